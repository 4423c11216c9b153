//! `cargo xtask bench api`: whether packets hold up the API, and requests hold up the packets.
//!
//! Everything shares this machine's CPUs, so both get slower whenever the other has work. To tell that apart from waiting
//! for each other, the same requests go to a second aggregator that has no packets, while the first one adds as before: its
//! answers are as late, and the all-reduces as slow, as sharing the CPUs alone makes them. Each round runs all-reduces
//! without requests, with requests there, and with requests here, and asks once while nothing else runs.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use paatp_tests::gradients::synthetic;
use paatp_tests::http::{join_all, send_as};
use paatp_tests::job::Running;
use paatp_tests::netns::Namespace;
use paatp_tests::process::{Aggregator, AggregatorOptions, PORT};
use paatp_tests::spread::{Ratio, Spread, cpu_model, cpus, kernel_release};
use paatp_tests::{Dtype, Gradient, JobOptions, Lab, Layout};
use serde::Serialize;

/// Measures the API under the load of packets, and the packets under the load of the API.
#[derive(Parser)]
#[command(name = "bench-api", max_term_width = 110)]
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
    /// Requests a second; 0 for one after the other without a pause.
    #[arg(long, default_value_t = 100)]
    rate: u32,
    /// Writes the figures to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Longest run of one job.
const DEADLINE: Duration = Duration::from_secs(180);
/// How long the aggregator is asked while nothing else runs.
const IDLE: Duration = Duration::from_secs(1);
/// Least time between two jobs made: the places of deleted ones stay taken for two seconds.
const BETWEEN_JOBS: Duration = Duration::from_millis(100);
const LOOPBACK: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), PORT);

/// An aggregator that can be asked and managed.
struct Asked<'a> {
    namespace: &'a Namespace,
    token: &'a str,
    /// Requests a second; 0 for no pause.
    rate: u32,
}

/// Milliseconds of each answer, by what was asked.
#[derive(Default)]
struct Times {
    /// `GET /v1/status`, which reads the kernel's tables.
    reads: Vec<f64>,
    /// A job created or deleted, which writes them.
    writes: Vec<f64>,
}

impl Times {
    fn absorb(&mut self, other: Times) {
        self.reads.extend(other.reads);
        self.writes.extend(other.writes);
    }
}

#[derive(Serialize)]
struct Latency {
    requests: usize,
    median_milliseconds: f64,
    p99_milliseconds: f64,
}

impl Latency {
    fn of(times: &[f64]) -> Latency {
        let mut times = times.to_vec();
        times.sort_by(f64::total_cmp);
        let at = |percent: usize| times.get(times.len() * percent / 100).copied().unwrap_or(f64::NAN);
        Latency { requests: times.len(), median_milliseconds: at(50), p99_milliseconds: at(99) }
    }
}

#[derive(Serialize)]
struct Row {
    requests: &'static str,
    reads: Latency,
    writes: Latency,
    bytes_per_second: Option<Spread>,
    /// To the rate without requests, round by round.
    ratio: Option<Ratio>,
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
    requests_per_second: u32,
    rows: Vec<Row>,
    /// Medians of reads and writes here to those there, round by round.
    reads_here_to_there: Ratio,
    writes_here_to_there: Ratio,
    /// Throughput with requests here to that with requests there.
    throughput_here_to_there: Ratio,
}

/// What one kind of run measured.
#[derive(Default)]
struct Seen {
    rates: Vec<f64>,
    times: Times,
    /// Medians of each round.
    reads: Vec<f64>,
    writes: Vec<f64>,
}

impl Seen {
    fn take(&mut self, rate: Option<f64>, times: Times) {
        self.rates.extend(rate);
        self.reads.push(Latency::of(&times.reads).median_milliseconds);
        self.writes.push(Latency::of(&times.writes).median_milliseconds);
        self.times.absorb(times);
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let [idle, quiet, there, here] = measure(&args)?;
    let rows = [("idle", &idle), ("none", &quiet), ("elsewhere", &there), ("here", &here)]
        .map(|(name, seen)| row(name, seen, &quiet.rates));
    let report = Report {
        schema_version: 1,
        kernel: kernel_release(),
        cpu: cpu_model(),
        cpus: cpus(),
        workers: args.workers,
        tensor_bytes: args.mebibytes << 20,
        rounds: args.rounds,
        requests_per_second: args.rate,
        rows: rows.into(),
        reads_here_to_there: Ratio::of(&here.reads, &there.reads),
        writes_here_to_there: Ratio::of(&here.writes, &there.writes),
        throughput_here_to_there: Ratio::of(&here.rates, &there.rates),
    };
    print(&report);
    if let Some(path) = &args.json {
        std::fs::write(path, serde_json::to_string_pretty(&report)? + "\n")
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn row(requests: &'static str, seen: &Seen, quiet: &[f64]) -> Row {
    let loaded = !seen.rates.is_empty();
    Row {
        requests,
        reads: Latency::of(&seen.times.reads),
        writes: Latency::of(&seen.times.writes),
        bytes_per_second: loaded.then(|| Spread::of(seen.rates.clone())),
        ratio: loaded.then(|| Ratio::of(&seen.rates, quiet)),
    }
}

fn print(report: &Report) {
    println!("{} with {} CPUs, kernel {}", report.cpu, report.cpus, report.kernel);
    println!(
        "requests    MB/s of a rank's tensor   to none                status ms: p50, p99    jobs ms: p50, p99"
    );
    for row in &report.rows {
        let rate = row.bytes_per_second.map(|rate| {
            let Spread { median, min, max } = rate;
            format!("{:.1} [{:.1}, {:.1}]", median / 1e6, min / 1e6, max / 1e6)
        });
        let latency = |latency: &Latency| {
            let Latency { requests, median_milliseconds: median, p99_milliseconds: late } = latency;
            if *requests == 0 { String::new() } else { format!("{median:.2}, {late:.2} of {requests}") }
        };
        println!(
            "{:<11} {:<25} {:<22} {:<22} {}",
            row.requests,
            rate.unwrap_or_default(),
            row.ratio.as_ref().map(ratio).unwrap_or_default(),
            latency(&row.reads),
            latency(&row.writes),
        );
    }
    println!("here to elsewhere: throughput {}", ratio(&report.throughput_here_to_there));
    println!("here to elsewhere: status     {}", ratio(&report.reads_here_to_there));
    println!("here to elsewhere: jobs       {}", ratio(&report.writes_here_to_there));
}

fn ratio(ratio: &Ratio) -> String {
    format!("{:.3} [{:.3}, {:.3}]", ratio.median, ratio.lower_quartile, ratio.upper_quartile)
}

/// Idle, without requests, with requests elsewhere, with requests here.
fn measure(args: &Args) -> Result<[Seen; 4]> {
    let lab = Lab::new(Layout::workers(args.workers))?;
    let neighbour = Lab::new(Layout::workers(args.workers))?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("token");
    // Room for a second job.
    let more = ["--memory", "16MiB", "--token-file"].map(str::to_owned);
    let more: Vec<_> = more.into_iter().chain([file.display().to_string()]).collect();
    let mut options = JobOptions::world(args.workers);
    options.aggregator.more.extend(more.clone());
    let there_options = AggregatorOptions { more, ..AggregatorOptions::world(args.workers) };
    let there_runs = Aggregator::start(&neighbour, &there_options)?;
    // Both say the same of their jobs: theirs runs as well, without a packet.
    let world = u32::try_from(args.workers)?;
    join_all(&neighbour.aggregator.namespace, LOOPBACK, &there_options.job, world)?;
    let token = std::fs::read_to_string(&file).context("the aggregator made no token")?;
    let token = token.trim();
    let [there, here] =
        [&neighbour, &lab].map(|lab| Asked { namespace: &lab.aggregator.namespace, token, rate: args.rate });

    let inputs = synthetic(args.workers, 42, &[(Dtype::F32, args.mebibytes << 18)], 1.0);
    let mut seen: [Seen; 4] = Default::default();
    for round in 0..args.rounds {
        let start = Instant::now();
        seen[0].take(None, there.ask_until(|| start.elapsed() > IDLE)?);
        let kinds = [None, Some(&there), Some(&here)];
        // In turn first: what a run leaves behind must not always meet the same one.
        for index in (0..kinds.len()).map(|place| (round + place) % kinds.len()) {
            let (rate, times) =
                run(&lab, &inputs, &options, kinds[index]).with_context(|| format!("round {round}"))?;
            seen[index + 1].take(Some(rate), times);
        }
    }
    ensure!(there_runs.stop()?.is_success(), "the second aggregator failed");
    Ok(seen)
}

/// One all-reduce, whose ranks all get the same, while an aggregator is asked. Bytes a second, and the answers' times.
fn run(
    lab: &Lab,
    inputs: &[Gradient],
    options: &JobOptions,
    asked: Option<&Asked<'_>>,
) -> Result<(f64, Times)> {
    let running = Running::start(lab, inputs, options)?;
    let over = AtomicBool::new(false);
    let (result, times) = std::thread::scope(|scope| {
        let asking = asked.map(|asked| scope.spawn(|| asked.ask_until(|| over.load(Ordering::Relaxed))));
        let result = running.finish_after(DEADLINE, || over.store(true, Ordering::Relaxed));
        over.store(true, Ordering::Relaxed);
        let times = asking.map(|asking| {
            asking.join().unwrap_or_else(|_| Err(anyhow::anyhow!("the one who asks ended early")))
        });
        (result, times)
    });
    let (result, times) = (result?, times.transpose()?.unwrap_or_default());
    ensure!(asked.is_none() || (times.reads.len() > 1 && times.writes.len() > 1), "nobody asked");
    Ok((result.throughput()?, times))
}

impl Asked<'_> {
    /// Asks, and makes and deletes jobs, until it is over.
    fn ask_until(&self, over: impl Fn() -> bool + Send + Sync) -> Result<Times> {
        let pause = if self.rate == 0 { Duration::ZERO } else { Duration::from_secs(1) / self.rate };
        self.namespace.run(|| {
            let mut times = Times::default();
            let mut job_made: Option<Instant> = None;
            let mut next = Instant::now();
            while !over() {
                if job_made.is_none_or(|made| made.elapsed() > BETWEEN_JOBS) {
                    job_made = Some(Instant::now());
                    times.writes.push(self.timed("POST", "/v1/jobs", r#"{"name":"asked","world":2}"#)?);
                    times.writes.push(self.timed("DELETE", "/v1/jobs/asked", "")?);
                } else {
                    times.reads.push(self.timed("GET", "/v1/status", "")?);
                }
                // Not faster after a late answer: the rate is what is compared.
                next = (next + pause).max(Instant::now());
                std::thread::sleep(next.saturating_duration_since(Instant::now()));
            }
            Ok(times)
        })?
    }

    /// Milliseconds until the answer was there, which must be the expected one.
    fn timed(&self, method: &str, path: &str, body: &str) -> Result<f64> {
        let start = Instant::now();
        let response = send_as(Some(self.token), LOOPBACK, method, path, body)?;
        ensure!(
            (200..300).contains(&response.status),
            "{method} {path}: {} {}",
            response.status,
            response.body
        );
        Ok(start.elapsed().as_secs_f64() * 1e3)
    }
}
