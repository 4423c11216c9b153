//! `cargo xtask bench scrape`: what looking at an aggregator costs it, and how long a look takes.
//!
//! First whole all-reduces, without scrapes, with one a second, and with one after the other, taking turns within each
//! round, so that each mode is compared with the others under the same conditions. Everything shares this machine's CPUs: the
//! scraper's own work, which is done elsewhere in reality, is in the figures. Then scrapes of a node with 64 jobs.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use paatp_tests::exposition::Exposition;
use paatp_tests::gradients::synthetic;
use paatp_tests::http::{ask, join_all, send};
use paatp_tests::job::Running;
use paatp_tests::netns::Namespace;
use paatp_tests::process::{Aggregator, AggregatorOptions, PORT};
use paatp_tests::spread::{Ratio, Spread, cpu_model, cpus, kernel_release};
use paatp_tests::{Dtype, Gradient, JobOptions, Lab, Layout};
use serde::Serialize;

/// Measures what scrapes cost, and how long they take.
#[derive(Parser)]
#[command(name = "bench-scrape", max_term_width = 110)]
struct Args {
    /// Number of workers.
    #[arg(long, default_value_t = 2)]
    workers: usize,
    /// Size of each rank's tensor, in MiB of float32 values.
    #[arg(long, default_value_t = 128, value_name = "MIB")]
    mebibytes: usize,
    /// All-reduces of each kind; medians are reported.
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Ranks of each of the 64 jobs.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// Scrapes of that node.
    #[arg(long, default_value_t = 50)]
    scrapes: usize,
    /// Writes the figures to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Jobs of the large node: as many as there can be.
const JOBS: u32 = 64;
/// Longest run of one job.
const DEADLINE: Duration = Duration::from_secs(180);
const LOOPBACK: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), PORT);

/// How often somebody looks.
#[derive(Clone, Copy)]
struct Variant {
    name: &'static str,
    /// Time between two scrapes' beginnings; none for no scrapes.
    every: Option<Duration>,
}

const VARIANTS: [Variant; 3] = [
    Variant { name: "none", every: None },
    Variant { name: "1 a second", every: Some(Duration::from_secs(1)) },
    Variant { name: "back to back", every: Some(Duration::ZERO) },
];

#[derive(Serialize)]
struct Row {
    scrapes: &'static str,
    bytes_per_second: Spread,
    /// To the rate without scrapes, round by round.
    ratio: Ratio,
    scrapes_per_run: Spread,
    scrape_milliseconds: Spread,
}

#[derive(Serialize)]
struct Report {
    schema_version: u32,
    kernel: String,
    cpu: String,
    cpus: usize,
    workers: usize,
    tensor_bytes: usize,
    rounds: usize,
    rows: Vec<Row>,
    large_node: LargeNode,
}

#[derive(Serialize)]
struct LargeNode {
    jobs: u32,
    ranks: u32,
    series: usize,
    bytes: usize,
    milliseconds: Spread,
    /// The daemon's own processor time, which a busy machine does not change much.
    processor_milliseconds: f64,
}

#[derive(Default)]
struct Seen {
    rates: Vec<f64>,
    counts: Vec<f64>,
    times: Vec<f64>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let rows = cost(&args)?;
    let large_node = large_node(&args)?;
    let Spread { median, max, .. } = large_node.milliseconds;
    println!(
        "\n{JOBS} jobs of {} ranks: {} series, {} kB; median {median:.1} ms, longest {max:.1} ms, {:.1} ms of processor time of {} scrapes",
        args.ranks,
        large_node.series,
        large_node.bytes / 1000,
        large_node.processor_milliseconds,
        args.scrapes
    );
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
            large_node,
        };
        std::fs::write(path, serde_json::to_string_pretty(&report)? + "\n")
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn cost(args: &Args) -> Result<Vec<Row>> {
    let lab = Lab::new(Layout::workers(args.workers))?;
    let inputs = synthetic(args.workers, 42, &[(Dtype::F32, args.mebibytes << 18)], 1.0);
    let mut seen: [Seen; VARIANTS.len()] = Default::default();
    for round in 0..args.rounds {
        // In turn first: what a run leaves behind must not always meet the same one.
        for index in (0..VARIANTS.len()).map(|place| (round + place) % VARIANTS.len()) {
            let variant = VARIANTS[index];
            run(&lab, &inputs, variant, &mut seen[index])
                .with_context(|| format!("{}, round {round}", variant.name))?;
        }
    }
    println!(
        "{:<13} {:<28} {:<24} {:<22} ms a scrape",
        "scrapes", "MB/s of a rank's tensor", "ratio [quartiles]", "scrapes a run"
    );
    let without = seen[0].rates.clone();
    let row = |(variant, seen): (&Variant, Seen)| {
        let row = Row {
            scrapes: variant.name,
            ratio: Ratio::of(&seen.rates, &without),
            scrapes_per_run: Spread::of(seen.counts),
            scrape_milliseconds: Spread::of(seen.times),
            bytes_per_second: Spread::of(seen.rates.clone()),
        };
        let mega = Spread::of(seen.rates.iter().map(|rate| rate / 1e6).collect());
        let Ratio { median, lower_quartile, upper_quartile } = row.ratio;
        println!(
            "{:<13} {:<28} {:<24} {:<22} {}",
            variant.name,
            format!("{mega:.1}"),
            format!("{median:.3} [{lower_quartile:.3}, {upper_quartile:.3}]"),
            format!("{:.0}", row.scrapes_per_run),
            if variant.every.is_some() { format!("{:.2}", row.scrape_milliseconds) } else { String::new() }
        );
        row
    };
    Ok(VARIANTS.iter().zip(seen).map(row).collect())
}

/// One all-reduce, whose ranks all get the same, while somebody looks.
fn run(lab: &Lab, inputs: &[Gradient], variant: Variant, seen: &mut Seen) -> Result<()> {
    let options = JobOptions::world(inputs.len());
    let running = Running::start(lab, inputs, &options)?;
    let over = AtomicBool::new(false);
    let (result, times) = std::thread::scope(|scope| {
        let scraper = scope.spawn(|| scrape_until(&lab.aggregator.namespace, variant, &over));
        let result = running.finish_after(DEADLINE, || over.store(true, Ordering::Relaxed));
        over.store(true, Ordering::Relaxed);
        let times = scraper.join().unwrap_or_else(|_| Err(anyhow::anyhow!("the scraper ended early")));
        (result, times)
    });
    let (result, times) = (result?, times?);
    ensure!(variant.every.is_none() || !times.is_empty(), "nobody looked");
    seen.rates.push(result.throughput()?);
    seen.counts.push(times.len() as f64);
    seen.times.extend(times);
    Ok(())
}

/// Looks until the run is over; milliseconds of each look.
fn scrape_until(namespace: &Namespace, variant: Variant, over: &AtomicBool) -> Result<Vec<f64>> {
    let mut times = Vec::new();
    let Some(every) = variant.every else { return Ok(times) };
    namespace.run(|| {
        while !over.load(Ordering::Relaxed) {
            let start = Instant::now();
            let response = send(LOOPBACK, "GET", "/metrics", "")?;
            ensure!(response.status == 200, "{}", response.status);
            times.push(start.elapsed().as_secs_f64() * 1e3);
            while start.elapsed() < every && !over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(5).min(every));
            }
        }
        Ok(())
    })??;
    Ok(times)
}

/// Scrapes of a node with as many jobs as there can be, each with a generation that runs.
fn large_node(args: &Args) -> Result<LargeNode> {
    let lab = Lab::new(Layout::workers(1))?;
    let folder = tempfile::tempdir()?;
    let config = folder.path().join("jobs.toml");
    let job = |number| format!("[[job]]\nname = \"job-{number}\"\nworld = {}\n", args.ranks);
    std::fs::write(&config, (1..JOBS).map(job).collect::<String>())?;
    let more = vec!["--config".into(), config.display().to_string()];
    let world = usize::try_from(args.ranks)?;
    let options = AggregatorOptions { job: "job-0".into(), more, ..AggregatorOptions::world(world) };
    let aggregator = Aggregator::start(&lab, &options)?;
    let namespace = &lab.aggregator.namespace;
    for number in 0..JOBS {
        join_all(namespace, LOOPBACK, &format!("job-{number}"), args.ranks)?;
    }
    let mut times = Vec::new();
    let (mut series, mut bytes) = (0, 0);
    let before = processor_time(aggregator.process.pid())?;
    for _ in 0..args.scrapes {
        let start = Instant::now();
        let response = ask(namespace, LOOPBACK, "GET", "/metrics")?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
        let read = Exposition::parse(&response.body)?;
        let running = read.value("paatp_jobs", &[("state", "running")]);
        ensure!(running == Some(f64::from(JOBS)), "{running:?} jobs run");
        let failed: Vec<_> = read
            .samples
            .iter()
            .filter(|((name, _), v)| name == "paatp_collector_success" && **v != 1.0)
            .collect();
        ensure!(failed.is_empty(), "not all was read: {failed:?}");
        (series, bytes) = (read.samples.len(), response.body.len());
    }
    let processor = processor_time(aggregator.process.pid())? - before;
    ensure!(aggregator.stop()?.is_success(), "the aggregator failed");
    Ok(LargeNode {
        jobs: JOBS,
        ranks: args.ranks,
        series,
        bytes,
        milliseconds: Spread::of(times),
        processor_milliseconds: processor * 1e3 / args.scrapes as f64,
    })
}

/// Seconds that a process ran, in its own code and in the kernel.
fn processor_time(process: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    // Behind the name, which may hold anything: state is the first field, the times are the 12th and 13th.
    let fields = stat.rsplit_once(')').context("no stat of a process")?.1;
    let ticks = fields.split_whitespace().skip(11).take(2).map(str::parse::<f64>).sum::<Result<f64, _>>()?;
    let tick = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.context("no length of a tick")?;
    Ok(ticks / tick as f64)
}
