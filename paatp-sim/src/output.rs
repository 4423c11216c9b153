//! The files that a run leaves: progress of each rank over time, distribution of iteration times, throughput of each job.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{fs, io};

use paatp_transport::rate::Algorithm;

use crate::plot::{Line, Plot};
use crate::record::Recorder;
use crate::report::iteration_times;
use crate::scenario::Scenario;
use crate::sweep::Sweep;

/// Samples that a point of the throughput plot covers.
const THROUGHPUT_SAMPLES: usize = 16;

/// A file that could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {source}; name a directory that can be written to", path.display())]
pub struct OutputError {
    /// The file or directory.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

/// Runs of one scenario.
pub type Runs = [(Algorithm, Recorder)];

/// Writes all files of a scenario to a directory, which is made; returns their names.
///
/// # Errors
/// The first file that could not be written.
pub fn write(directory: &Path, scenario: &Scenario, runs: &Runs) -> Result<Vec<String>, OutputError> {
    let mut files = vec![
        ("iterations.csv".into(), iterations_csv(scenario, runs)),
        ("iterations.svg".into(), iterations_plot(scenario, runs).svg()),
    ];
    for (algorithm, record) in runs {
        files.push((format!("progress-{algorithm}.csv"), progress_csv(scenario, record)));
        files.push((format!("progress-{algorithm}.svg"), progress_plot(scenario, *algorithm, record).svg()));
        files.push((format!("throughput-{algorithm}.csv"), throughput_csv(scenario, record)));
        files.push((
            format!("throughput-{algorithm}.svg"),
            throughput_plot(scenario, *algorithm, record).svg(),
        ));
    }
    write_files(directory, files)
}

/// Writes a sweep's files; returns their names.
///
/// # Errors
/// The first file that could not be written.
pub fn write_sweep(directory: &Path, description: &str, sweep: &Sweep) -> Result<Vec<String>, OutputError> {
    let files = vec![
        ("sweep.csv".into(), sweep.csv()),
        ("throughput.svg".into(), sweep.throughput_plot(description).svg()),
        ("fairness.svg".into(), sweep.fairness_plot(description).svg()),
    ];
    write_files(directory, files)
}

fn write_files(directory: &Path, files: Vec<(String, String)>) -> Result<Vec<String>, OutputError> {
    let fail = |path: &Path| {
        let path = path.to_owned();
        move |source| OutputError { path, source }
    };
    fs::create_dir_all(directory).map_err(fail(directory))?;
    for (name, text) in &files {
        let path = directory.join(name);
        fs::write(&path, text).map_err(fail(&path))?;
    }
    Ok(files.into_iter().map(|(name, _)| name).collect())
}

/// Each rank's job and number, in the order of samples.
fn ranks(scenario: &Scenario) -> Vec<(&str, u8)> {
    scenario.jobs.iter().flat_map(|job| (0..job.world).map(|rank| (job.name.as_str(), rank))).collect()
}

fn iterations_csv(scenario: &Scenario, runs: &Runs) -> String {
    let mut text = String::from("controller,job,iteration,end_seconds,seconds\n");
    for (algorithm, record) in runs {
        for (spec, job) in scenario.jobs.iter().zip(&record.jobs) {
            let times = iteration_times(spec.start, &job.iterations);
            for (index, (end, time)) in job.iterations.iter().zip(times).enumerate() {
                let (end, time) = (end.seconds(), time.seconds());
                let _ = writeln!(text, "{algorithm},{},{index},{end:.9},{time:.9}", spec.name);
            }
        }
    }
    text
}

fn iterations_plot(scenario: &Scenario, runs: &Runs) -> Plot {
    let line = |(algorithm, record): &(Algorithm, Recorder)| {
        let of_job = |(spec, job): (&crate::scenario::JobSpec, &crate::record::JobRecord)| {
            iteration_times(spec.start, &job.iterations)
        };
        let mut times: Vec<_> = scenario.jobs.iter().zip(&record.jobs).flat_map(of_job).collect();
        times.sort_unstable();
        let count = times.len() as f64;
        let mut points = vec![(0.0, 0.0)];
        points
            .extend(times.iter().enumerate().map(|(i, time)| (time.seconds() * 1e3, (i + 1) as f64 / count)));
        Line { name: algorithm.to_string(), points, steps: true }
    };
    Plot {
        title: "Iteration times".into(),
        subtitle: scenario.description.clone(),
        x: "time of an iteration [ms]".into(),
        y: "share of iterations".into(),
        lines: runs.iter().map(line).collect(),
    }
}

fn progress_csv(scenario: &Scenario, record: &Recorder) -> String {
    let mut text = String::from("seconds,job,rank,contributed_chunks,delivered_chunks\n");
    for sample in &record.samples {
        for ((job, rank), (contributed, delivered)) in ranks(scenario).iter().zip(&sample.progress) {
            let _ = writeln!(text, "{:.9},{job},{rank},{contributed},{delivered}", sample.at.seconds());
        }
    }
    text
}

fn progress_plot(scenario: &Scenario, algorithm: Algorithm, record: &Recorder) -> Plot {
    let line = |(index, (job, rank)): (usize, &(&str, u8))| {
        let point = |sample: &crate::record::Sample| {
            let (contributed, _) = sample.progress.get(index).copied().unwrap_or_default();
            (sample.at.seconds() * 1e3, contributed as f64)
        };
        let points = record.samples.iter().map(point).collect();
        Line { name: format!("{job} {rank}"), points, steps: false }
    };
    Plot {
        title: format!("Contributed by each rank, {algorithm}"),
        subtitle: scenario.description.clone(),
        x: "time [ms]".into(),
        y: "chunks".into(),
        lines: ranks(scenario).iter().enumerate().map(line).collect(),
    }
}

/// Times and, for each job, bits a second that each of its ranks has had reduced.
fn throughput(scenario: &Scenario, record: &Recorder) -> Vec<(f64, Vec<f64>)> {
    let packet_bits = scenario.network.packet.0 as f64 * 8.0;
    let mut first = 0;
    let ranges: Vec<_> = scenario
        .jobs
        .iter()
        .map(|job| {
            first += usize::from(job.world);
            first - usize::from(job.world)..first
        })
        .collect();
    let lowest = |sample: &crate::record::Sample, range: &std::ops::Range<usize>| {
        let ranks = sample.progress.get(range.clone()).unwrap_or(&[]);
        ranks.iter().map(|(_, delivered)| *delivered).min().unwrap_or(0)
    };
    let marks: Vec<_> = record.samples.iter().step_by(THROUGHPUT_SAMPLES).collect();
    let pairs = marks.windows(2).filter_map(|pair| pair.first().zip(pair.last()));
    pairs
        .map(|(from, to)| {
            let span = (to.at - from.at).seconds().max(1e-12);
            let rate = |range| (lowest(to, range) - lowest(from, range)) as f64 * packet_bits / span;
            (to.at.seconds(), ranges.iter().map(rate).collect())
        })
        .collect()
}

fn throughput_csv(scenario: &Scenario, record: &Recorder) -> String {
    let mut text = String::from("seconds,job,bits_per_second\n");
    for (at, rates) in throughput(scenario, record) {
        for (job, rate) in scenario.jobs.iter().zip(rates) {
            let _ = writeln!(text, "{at:.9},{},{rate:.0}", job.name);
        }
    }
    text
}

fn throughput_plot(scenario: &Scenario, algorithm: Algorithm, record: &Recorder) -> Plot {
    let points = throughput(scenario, record);
    let line = |(index, job): (usize, &crate::scenario::JobSpec)| {
        let rate = |rates: &[f64]| rates.get(index).copied().unwrap_or(0.0) / 1e9;
        let points = points.iter().map(|(at, rates)| (at * 1e3, rate(rates))).collect();
        Line { name: job.name.clone(), points, steps: true }
    };
    Plot {
        title: format!("Goodput to each rank, {algorithm}"),
        subtitle: scenario.description.clone(),
        x: "time [ms]".into(),
        y: "Gbit/s".into(),
        lines: scenario.jobs.iter().enumerate().map(line).collect(),
    }
}
