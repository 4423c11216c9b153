//! `cargo xtask bench capture`: what `paatp capture` costs the worker on whose host it runs.
//!
//! Whole all-reduces without a capture and with captures of several kinds on rank 0's host, taking turns within each round.
//! Everything shares this machine's CPUs, the capture's own work included. Every run checks that all ranks have the same
//! result, and that the capture saw as many packets as it should.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use nix::sys::signal::Signal;
use paatp_common::counter::Event;
use paatp_tests::gradients::synthetic;
use paatp_tests::job::Running;
use paatp_tests::process::{Finished, Process, paatp};
use paatp_tests::spread::{Ratio, Spread, cpu_model, cpus, kernel_release};
use paatp_tests::{Dtype, Gradient, JobOptions, Lab, Layout};
use serde::Serialize;

/// Measures what a capture costs a worker.
#[derive(Parser)]
#[command(name = "bench-capture", max_term_width = 110)]
struct Args {
    /// Number of workers.
    #[arg(long, default_value_t = 2)]
    workers: usize,
    /// Size of each rank's tensor, in MiB of float32 values.
    #[arg(long, default_value_t = 128, value_name = "MIB")]
    mebibytes: usize,
    /// All-reduces of each kind; medians are reported.
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Writes the figures to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// One exchange in so many is captured; none for no capture.
const VARIANTS: [(&str, Option<u32>); 4] =
    [("none", None), ("1 in 1000", Some(1000)), ("1 in 10", Some(10)), ("everything", Some(1))];
/// Longest run of one job, and longest wait for a capture.
const DEADLINE: Duration = Duration::from_secs(180);

#[derive(Serialize)]
struct Row {
    capture: &'static str,
    bytes_per_second: Spread,
    /// To the rate without a capture, round by round.
    ratio: Ratio,
    packets_per_run: Spread,
    lost_per_run: Spread,
}

#[derive(Serialize)]
struct Report {
    schema_version: u32,
    kernel: String,
    cpu: String,
    cpus: usize,
    workers: usize,
    tensor_bytes: usize,
    rounds: u32,
    rows: Vec<Row>,
}

#[derive(Default)]
struct Seen {
    rates: Vec<f64>,
    packets: Vec<f64>,
    lost: Vec<f64>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let lab = Lab::new(Layout::workers(args.workers))?;
    let inputs = synthetic(args.workers, 42, &[(Dtype::F32, args.mebibytes << 18)], 1.0);
    let mut seen: [Seen; VARIANTS.len()] = Default::default();
    for round in 0..args.rounds {
        for ((name, sample), seen) in VARIANTS.iter().zip(&mut seen) {
            run(&lab, &inputs, *sample, seen).with_context(|| format!("{name}, round {round}"))?;
        }
    }
    let rows = rows(seen);
    if let Some(path) = &args.json {
        let report = Report {
            schema_version: 1,
            kernel: kernel_release(),
            cpu: cpu_model(),
            cpus: cpus(),
            workers: args.workers,
            tensor_bytes: args.mebibytes << 20,
            rounds: args.rounds,
            rows,
        };
        std::fs::write(path, serde_json::to_string_pretty(&report)? + "\n")
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// One all-reduce, whose ranks all get the same, with or without a capture.
fn run(lab: &Lab, inputs: &[Gradient], sample: Option<u32>, seen: &mut Seen) -> Result<()> {
    let options = JobOptions::world(inputs.len());
    let mut running = Running::prepare(lab, inputs, &options)?;
    let mut capture = sample.map(|sample| start(lab, sample)).transpose()?;
    for rank in 0..inputs.len() {
        running.start_rank(rank)?;
    }
    let mut captured = None;
    let result = running.finish_after(DEADLINE, || {
        captured = capture.take().map(stop);
    })?;
    seen.rates.push(result.throughput()?);
    let Some(finished) = captured.transpose()? else { return Ok(()) };
    let [passed, chosen, lost] =
        ["UDP port 20545: ", "asked for: ", "lost: "].map(|what| number(&finished, what));
    let (passed, chosen, lost) = (passed?, chosen?, lost?);
    // Rank 0 has its share of all requests, and as many answers, but for those that the capture lost.
    let share = 2.0 * result.counters.noted(Event::Requests) as f64 / inputs.len() as f64;
    ensure!(
        passed > 0.0 && passed + lost <= 1.5 * share,
        "the capture saw {passed} packets, of about {share}"
    );
    ensure!(lost > 0.0 || passed > 0.5 * share, "the capture saw {passed} packets, of about {share}");
    seen.packets.push(chosen);
    seen.lost.push(lost);
    Ok(())
}

/// A capture into nowhere that sees packets.
fn start(lab: &Lab, sample: u32) -> Result<Process> {
    let host = &lab.workers[0];
    let mut command = host.namespace.command(paatp()?);
    command.args(["capture", &host.interface, "-w", "/dev/null", "--sample", &sample.to_string()]);
    let mut process = Process::spawn("the capture", command)?;
    process.wait_for_line("capturing at", DEADLINE)?;
    Ok(process)
}

fn stop(mut capture: Process) -> Result<Finished> {
    capture.signal(Signal::SIGINT)?;
    let finished = capture.wait(DEADLINE)?;
    ensure!(finished.is_success(), "the capture failed: {}", finished.output);
    Ok(finished)
}

/// The number behind some words of the capture's summary.
fn number(finished: &Finished, what: &str) -> Result<f64> {
    let rest = finished.output.split_once(what).context("an unknown summary")?.1;
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().with_context(|| format!("no number behind `{what}` in {}", finished.output))
}

fn rows(seen: [Seen; VARIANTS.len()]) -> Vec<Row> {
    println!(
        "{:<12} {:<28} {:<24} {:<28} lost",
        "capture", "MB/s of a rank's tensor", "ratio [quartiles]", "packets a run"
    );
    let without = seen[0].rates.clone();
    let row = |((name, sample), seen): (&(&'static str, Option<u32>), Seen)| {
        let row = Row {
            capture: name,
            ratio: Ratio::of(&seen.rates, &without),
            packets_per_run: Spread::of(seen.packets),
            lost_per_run: Spread::of(seen.lost),
            bytes_per_second: Spread::of(seen.rates.clone()),
        };
        let mega = Spread::of(seen.rates.iter().map(|rate| rate / 1e6).collect());
        let Ratio { median, lower_quartile, upper_quartile } = row.ratio;
        let counts = [row.packets_per_run, row.lost_per_run]
            .map(|count| if sample.is_some() { format!("{count:.0}") } else { String::new() });
        println!(
            "{:<12} {:<28} {:<24} {:<28} {}",
            row.capture,
            format!("{mega:.1}"),
            format!("{median:.3} [{lower_quartile:.3}, {upper_quartile:.3}]"),
            counts[0],
            counts[1]
        );
        row
    };
    VARIANTS.iter().zip(seen).map(row).collect()
}
