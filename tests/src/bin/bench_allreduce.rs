//! `cargo xtask bench allreduce`: bandwidth of whole all-reduces on this machine, by number of workers and by driver.
//!
//! Every worker is a process in a namespace of its own, behind a bridge; the aggregator's program runs natively on a veth.
//! All of them share this machine's CPUs, so the figures compare drivers, and do not tell what a network could carry.
//! Drivers take turns within each round. Every result is checked: the same at all ranks, and within the bound of the sum
//! in float64.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use paatp_tests::gradients::synthetic;
use paatp_tests::job::{JobResult, Running};
use paatp_tests::spread::{Spread, cpu_model, cpus, kernel_release};
use paatp_tests::{Dtype, Gradient, JobOptions, Lab, Layout};
use serde::Serialize;

/// Measures whole all-reduces.
#[derive(Parser)]
#[command(name = "bench-allreduce", max_term_width = 110)]
struct Args {
    /// Numbers of workers.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8", value_name = "N,…")]
    workers: Vec<usize>,
    /// Drivers: udp, af-xdp.
    #[arg(long, value_delimiter = ',', default_value = "udp,af-xdp", value_parser = driver, value_name = "D,…")]
    io: Vec<&'static str>,
    /// Lanes in a chunk. More than 352 take larger interfaces' MTUs.
    #[arg(long, default_value_t = 352)]
    lanes: usize,
    /// Window in chunks.
    #[arg(long, default_value_t = 64)]
    window: u16,
    /// Size of each rank's tensor, in MiB of float32 values.
    #[arg(long, default_value_t = 16, value_name = "MIB")]
    mebibytes: usize,
    /// Measurements of each kind; medians are reported.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// `native` or `generic`: where the aggregator's program runs.
    #[arg(long, default_value = "native", value_parser = ["native", "generic"])]
    xdp_mode: String,
    /// Another build of `paatp` to compare with: its workers, with the driver that it takes by itself.
    #[arg(long, value_name = "PROGRAM")]
    baseline: Option<PathBuf>,
    /// Writes the figures to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn driver(text: &str) -> Result<&'static str, String> {
    let known = ["udp", "af-xdp"];
    known.into_iter().find(|name| *name == text).ok_or_else(|| format!("one of {}", known.join(", ")))
}

/// Bytes of IPv4, UDP and our header.
const HEADERS: usize = 20 + 8 + 64;
/// Smallest MTU of the lab.
const MTU: usize = 1500;
/// Longest run of one job.
const DEADLINE: Duration = Duration::from_secs(180);

/// Who is measured.
#[derive(Clone)]
struct Variant {
    name: &'static str,
    io: &'static str,
    program: Option<PathBuf>,
}

#[derive(Serialize)]
struct Row {
    workers: usize,
    driver: &'static str,
    /// What a worker's report says of its driver; null for a build that does not.
    mode: Option<String>,
    /// A rank's tensor, divided by the time of the all-reduce.
    bytes_per_second: Spread,
    retransmissions_per_chunk: Spread,
    rounds: usize,
}

#[derive(Serialize)]
struct Report {
    schema_version: u32,
    kernel: String,
    cpu: String,
    cpus: usize,
    lanes: usize,
    window: u16,
    tensor_bytes: usize,
    xdp_mode: String,
    rows: Vec<Row>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let mut variants: Vec<Variant> =
        args.io.iter().map(|io| Variant { name: io, io, program: None }).collect();
    if let Some(program) = &args.baseline {
        let program = std::fs::canonicalize(program)
            .with_context(|| format!("there is no program {}", program.display()))?;
        variants.push(Variant { name: "baseline", io: "", program: Some(program) });
    }
    println!(
        "{:>7}  {:<9} {:<12} {:<28} retransmissions per chunk",
        "workers", "driver", "mode", "MB/s of a rank's tensor"
    );
    let mut rows = Vec::new();
    for workers in &args.workers {
        rows.extend(measure(&args, *workers, &variants)?);
    }
    if let Some(path) = &args.json {
        let report = Report {
            schema_version: 1,
            kernel: kernel_release(),
            cpu: cpu_model(),
            cpus: cpus(),
            lanes: args.lanes,
            window: args.window,
            tensor_bytes: args.mebibytes << 20,
            xdp_mode: args.xdp_mode,
            rows,
        };
        std::fs::write(path, serde_json::to_string_pretty(&report)? + "\n")
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// What one variant has shown.
#[derive(Default)]
struct Seen {
    rates: Vec<f64>,
    retransmissions: Vec<f64>,
    mode: Option<String>,
}

fn measure(args: &Args, workers: usize, variants: &[Variant]) -> Result<Vec<Row>> {
    let mtu = u32::try_from((args.lanes * 4 + HEADERS).max(MTU))?;
    let lab = Lab::new(Layout { workers, mtu, racks: 0 })?;
    let inputs = synthetic(workers, 42, &[(Dtype::F32, args.mebibytes << 18)], 1.0);
    let mut seen: Vec<Seen> = variants.iter().map(|_| Seen::default()).collect();
    for round in 0..args.rounds {
        for (variant, seen) in variants.iter().zip(&mut seen) {
            let result = run(args, &lab, &inputs, variant, round == 0)
                .with_context(|| format!("{workers} workers, {}, round {round}", variant.name))?;
            take(&result, variant, seen)?;
        }
    }
    let row = |(variant, seen): (&Variant, Seen)| {
        let row = Row {
            workers,
            driver: variant.name,
            mode: seen.mode,
            bytes_per_second: Spread::of(seen.rates.clone()),
            retransmissions_per_chunk: Spread::of(seen.retransmissions),
            rounds: args.rounds,
        };
        let mega = Spread::of(seen.rates.iter().map(|rate| rate / 1e6).collect());
        println!(
            "{workers:>7}  {:<9} {:<12} {:<28} {:.4}",
            row.driver,
            row.mode.as_deref().unwrap_or("?"),
            format!("{mega:.1}"),
            row.retransmissions_per_chunk.median
        );
        row
    };
    Ok(variants.iter().zip(seen).map(row).collect())
}

/// One job, its results checked: against float64 once, against the first rank's each time.
fn run(args: &Args, lab: &Lab, inputs: &[Gradient], variant: &Variant, whole: bool) -> Result<JobResult> {
    let mut options = JobOptions { io: variant.io, ..JobOptions::world(inputs.len()) };
    options.aggregator.xdp_mode = if args.xdp_mode == "generic" { "generic" } else { "native" };
    options.aggregator.lanes = args.lanes;
    options.aggregator.window = args.window;
    options.aggregator.slots = (4 * u32::from(args.window)).next_power_of_two();
    let mut running = Running::prepare(lab, inputs, &options)?;
    for command in &mut running.commands {
        command.program.clone_from(&variant.program);
    }
    for rank in 0..inputs.len() {
        running.start_rank(rank)?;
    }
    let result = running.finish(DEADLINE)?;
    if whole {
        let verdict = result.check(inputs, &options)?;
        ensure!(verdict.is_right(), "the result is wrong: {:#?}", verdict.complaints);
    }
    let digests = result.digests().with_context(|| {
        let outputs: Vec<_> = result.ranks.iter().map(|rank| &rank.finished.output).collect();
        format!("not every rank has a result: {outputs:#?}")
    })?;
    ensure!(digests.iter().all(|digest| *digest == digests[0]), "ranks have different results");
    Ok(result)
}

fn take(result: &JobResult, variant: &Variant, seen: &mut Seen) -> Result<()> {
    let reports: Vec<_> = result.ranks.iter().filter_map(|rank| rank.report.as_ref()).collect();
    ensure!(reports.len() == result.ranks.len(), "a rank wrote no report");
    for report in &reports {
        let driver = report.0["io"]["driver"].as_str();
        ensure!(variant.io.is_empty() || driver == Some(variant.io), "{} became {driver:?}", variant.io);
        seen.mode = report.0["io"]["mode"].as_str().map(str::to_owned);
    }
    // The rank that was ready last: the others' times hold their waiting for it.
    let seconds = reports.iter().filter_map(|report| report.seconds()).fold(f64::INFINITY, f64::min);
    let bytes = reports[0].0["tensor_bytes"].as_f64().context("a report without tensor_bytes")?;
    seen.rates.push(bytes / seconds);
    let sum = |name| result.sum(|report| report.statistic(name)) as f64;
    seen.retransmissions.push(sum("retransmissions") / sum("contributions").max(1.0));
    Ok(())
}
