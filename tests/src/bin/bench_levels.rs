//! `cargo xtask bench levels`: all-reduces of eight ranks over two racks and a root, and over one aggregator, by turns.
//!
//! Every worker and every aggregator's program runs on this machine's CPUs, so a second level is more work on them: the ratio
//! says what levels cost, not what they save a network. Results are the same bits, or it fails.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use paatp_common::Event;
use paatp_tests::gradients::synthetic;
use paatp_tests::job::run;
use paatp_tests::racks::{RACK, RACKS, Racks, lanes};
use paatp_tests::report::Report;
use paatp_tests::spread::{Ratio, Spread, cpu_model, cpus, kernel_release};
use paatp_tests::{Dtype, Family, Gradient, JobOptions, Lab, Layout};
use serde::Serialize;

/// Measures two levels against one.
#[derive(Parser)]
#[command(name = "bench-levels", max_term_width = 110)]
struct Args {
    /// Measurements of either kind.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Size of each rank's tensor, in MiB of float32 values.
    #[arg(long, default_value_t = 16, value_name = "MIB")]
    mebibytes: usize,
    /// Writes the figures to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What one kind has shown, by round.
#[derive(Debug, Default, Serialize)]
struct Seen {
    megabytes_per_second: Vec<f64>,
    /// Requests sent again, by contribution.
    retransmissions: Vec<f64>,
    /// Of those, what was answered after all.
    late: Vec<f64>,
    /// Packets with contributions that the aggregator which makes the results took, by chunk.
    at_the_top: Vec<f64>,
}

#[derive(Serialize)]
struct Figures {
    schema_version: u32,
    kernel: String,
    cpu: String,
    cpus: usize,
    one_level: Seen,
    two_levels: Seen,
    throughput_of_two_to_one: Ratio,
}

impl Seen {
    fn take(&mut self, reports: &[&Report], taken: u64, chunks: u64) -> Result<()> {
        // The rank that was ready last: the others' times hold their waiting for it.
        let seconds = reports.iter().filter_map(|report| report.seconds()).fold(f64::INFINITY, f64::min);
        let bytes = reports.first().and_then(|report| report.0["tensor_bytes"].as_f64());
        let bytes = bytes.context("a report without tensor_bytes")?;
        let sum = |name| reports.iter().map(|report| report.statistic(name)).sum::<u64>() as f64;
        self.megabytes_per_second.push(bytes / seconds / 1e6);
        self.retransmissions.push(sum("retransmissions") / sum("contributions"));
        self.late.push(sum("late_answers") / sum("contributions"));
        self.at_the_top.push(taken as f64 / chunks as f64);
        Ok(())
    }

    fn print(&self, name: &str) {
        let spread = |values: &[f64]| Spread::of(values.to_vec());
        println!(
            "{name:<11} {:<24} {:<24.4} {:<24.4} {:.2}",
            format!("{:.1}", spread(&self.megabytes_per_second)),
            spread(&self.retransmissions),
            spread(&self.late),
            spread(&self.at_the_top)
        );
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    println!("{} with {} CPUs, kernel {}", cpu_model(), cpus(), kernel_release());
    let inputs = synthetic(RACK * RACKS, 42, &[(Dtype::F32, args.mebibytes << 18)], 1.0);
    let (mut one, mut two) = (Seen::default(), Seen::default());
    for round in 0..args.rounds {
        let flat =
            |one: &mut Seen| one_level(&inputs, one).with_context(|| format!("one level, round {round}"));
        let stacked =
            |two: &mut Seen| two_levels(&inputs, two).with_context(|| format!("two levels, round {round}"));
        let (first, second) = if round % 2 == 0 {
            (flat(&mut one)?, stacked(&mut two)?)
        } else {
            let stacked = stacked(&mut two)?;
            (flat(&mut one)?, stacked)
        };
        ensure!(first == second, "two levels have another result than one");
    }
    println!(
        "{:<11} {:<24} {:<24} {:<24} contributions per chunk at the top",
        "", "MB/s of a rank's tensor", "retransmissions", "late answers"
    );
    one.print("one level");
    two.print("two levels");
    let ratio = Ratio::of(&two.megabytes_per_second, &one.megabytes_per_second);
    println!(
        "throughput of two levels: {:.2} [{:.2}, {:.2}] of one",
        ratio.median, ratio.lower_quartile, ratio.upper_quartile
    );
    if let Some(path) = &args.json {
        let figures = Figures {
            schema_version: 1,
            kernel: kernel_release(),
            cpu: cpu_model(),
            cpus: cpus(),
            one_level: one,
            two_levels: two,
            throughput_of_two_to_one: ratio,
        };
        std::fs::write(path, serde_json::to_string_pretty(&figures)? + "\n")
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// The digest that all ranks agree on.
fn agreed(digests: &[String]) -> Result<String> {
    let first = digests.first().context("no rank has a result")?;
    ensure!(digests.iter().all(|digest| digest == first), "ranks have different results");
    Ok(first.clone())
}

fn one_level(inputs: &[Gradient], seen: &mut Seen) -> Result<String> {
    let lab = Lab::new(Layout::workers(inputs.len()))?;
    let mut options = JobOptions::world(inputs.len());
    options.aggregator.lanes = lanes(Family::V4);
    let result = run(&lab, inputs, &options)?;
    let digests = result.digests().context("not every rank has a result")?;
    let reports: Vec<&Report> = result.ranks.iter().filter_map(|rank| rank.report.as_ref()).collect();
    let noted = |event| result.counters.noted(event);
    seen.take(&reports, noted(Event::Contributions), noted(Event::Completions))?;
    agreed(&digests)
}

fn two_levels(inputs: &[Gradient], seen: &mut Seen) -> Result<String> {
    let racks = Racks::new(Family::V4, "--levels")?;
    let result = racks.all_reduce(inputs)?;
    let counters = racks.root_counters()?;
    racks.stop()?;
    ensure!(counters.noted(Event::Sums) > 0, "no rack sent a sum: this was one level");
    let reports: Vec<&Report> = result.reports.iter().collect();
    seen.take(&reports, counters.noted(Event::Contributions), counters.noted(Event::Completions))?;
    agreed(&result.digests)
}
