//! `cargo xtask run`: an all-reduce of real gradients on this machine, in network namespaces, with or without
//! disturbance, compared with the float64 sum. The exit status is 0 only if all of it is right.

use std::fmt::Write as _;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::Pid;
use paatp_common::counter::{Counters, Event, Refusal};
use paatp_tests::gradients::{Gradient, Tensor, bundled, rank_files};
use paatp_tests::job::{INTERRUPTED, JobOptions, JobResult, Running, Verdict};
use paatp_tests::process::{AggregatorOptions, PORT, paatp};
use paatp_tests::reference::Reduction;
use paatp_tests::{Counts, Family, Lab, Layout, Rates};
use serde_json::{Value, json};

/// Version of the layout of the `--json` file.
const SCHEMA_VERSION: u32 = 1;
/// Workers, unless told otherwise.
const DEFAULT_WORKERS: usize = 4;
/// Exit status after Ctrl-C, as shells expect it.
const INTERRUPTED_STATUS: u8 = 130;

/// Sums real gradients in an XDP program, on this machine: an aggregator and workers in network namespaces.
#[derive(Debug, Parser)]
#[command(name = "playground", max_term_width = 110)]
struct Args {
    /// Number of workers [default: 4 with the bundled gradients, else one for each file].
    #[arg(long, value_name = "N")]
    workers: Option<usize>,
    /// Folder with one safetensors file a rank, its name ending in rankR.safetensors; of several for a rank the one
    /// with stepS in its name is taken [default: the bundled gradients].
    #[arg(long, value_name = "DIR")]
    gradients: Option<PathBuf>,
    /// Which step's gradients, where the folder has several.
    #[arg(long, default_value_t = 0, value_name = "S")]
    step: u32,
    /// Probability that a packet is lost, in each direction.
    #[arg(long, default_value_t = 0.0, value_parser = probability, value_name = "P")]
    loss: f64,
    /// Probability that a packet arrives twice.
    #[arg(long, default_value_t = 0.0, value_parser = probability, value_name = "P")]
    duplicate: f64,
    /// Probability that a packet arrives after its successor.
    #[arg(long, default_value_t = 0.0, value_parser = probability, value_name = "P")]
    reorder: f64,
    /// Probability that a bit of a packet is flipped.
    #[arg(long, default_value_t = 0.0, value_parser = probability, value_name = "P")]
    corrupt: f64,
    /// Decides which packets are disturbed.
    #[arg(long, default_value_t = 1, value_name = "S")]
    seed: u64,
    /// What is computed.
    #[arg(long, value_enum, default_value = "sum")]
    reduction: Reduction,
    /// Lanes in a chunk.
    #[arg(long, default_value_t = 352, value_name = "L")]
    lanes: usize,
    /// How workers send and receive: `udp`, `af-xdp` or `auto`, as `paatp allreduce --io` has it.
    #[arg(long, default_value = "auto", value_parser = io, value_name = "DRIVER")]
    io: &'static str,
    /// Longest time that a worker goes without progress, in seconds.
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    timeout: u64,
    /// Write everything to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only start the aggregator, on this interface of this machine, and print the workers' command lines.
    #[arg(long, value_name = "IF")]
    iface: Option<String>,
    /// Leave namespaces and files behind to look at.
    #[arg(long)]
    keep: bool,
}

fn probability(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.0..=1.0).contains(&value) => Ok(value),
        _ => Err("a probability is a number from 0 to 1, for example 0.1 for 10 %".into()),
    }
}

fn io(text: &str) -> Result<&'static str, String> {
    let known = ["auto", "af-xdp", "udp"];
    known.into_iter().find(|name| *name == text).ok_or_else(|| format!("one of {}", known.join(", ")))
}

fn main() -> ExitCode {
    if let Err(error) = watch_for_signals() {
        eprintln!("error: {error:#}");
        return ExitCode::FAILURE;
    }
    let args = Args::parse();
    let result = match &args.iface {
        Some(interface) => serve(&args, interface),
        None => play(&args),
    };
    if INTERRUPTED.load(Ordering::Relaxed) {
        eprintln!("interrupted; everything is cleaned up");
        return ExitCode::from(INTERRUPTED_STATUS);
    }
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Turns Ctrl-C and SIGTERM into a flag that all waiting looks at, so that everything is dropped in order.
fn watch_for_signals() -> Result<()> {
    let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM]);
    // Before any thread exists, so that all have them blocked and only the one below takes them.
    signals.thread_block().context("cannot block signals")?;
    std::thread::spawn(move || {
        while signals.wait().is_ok() {
            INTERRUPTED.store(true, Ordering::Relaxed);
        }
    });
    Ok(())
}

/// The inputs, by rank.
fn inputs(args: &Args) -> Result<Vec<Gradient>> {
    let folder = args.gradients.clone().unwrap_or_else(bundled);
    let mut files = rank_files(&folder, args.step)?;
    let workers =
        args.workers.unwrap_or(if args.gradients.is_some() { files.len() } else { DEFAULT_WORKERS });
    ensure!(workers > 0, "at least one worker is needed");
    ensure!(
        workers <= files.len(),
        "{} has gradients of {} ranks; use --workers {1} or fewer, or another --gradients folder",
        folder.display(),
        files.len(),
    );
    files.truncate(workers);
    files.iter().map(|file| Gradient::read(file)).collect()
}

/// Runs the job in namespaces; says whether all was right.
fn play(args: &Args) -> Result<bool> {
    let inputs = inputs(args)?;
    let world = inputs.len();
    let values: usize = inputs[0].tensors.iter().map(Tensor::len).sum();
    println!(
        "{world} workers, {} tensors, {values} values each, {} of all",
        inputs[0].tensors.len(),
        args.reduction.name()
    );
    let rates =
        Rates { loss: args.loss, duplicate: args.duplicate, reorder: args.reorder, corrupt: args.corrupt };
    let options = JobOptions {
        family: Family::V4,
        aggregator: AggregatorOptions { lanes: args.lanes, ..AggregatorOptions::world(world) },
        reduction: args.reduction,
        io: args.io,
        controller: "",
        timeout: Duration::from_secs(args.timeout),
        requests: rates,
        answers: rates,
        seed: args.seed,
    };
    /// Bytes of IPv4, UDP and our header.
    const HEADERS: usize = 20 + 8 + 64;
    let mtu = u32::try_from((args.lanes * 4 + HEADERS).max(1500)).context("that many lanes fit no packet")?;
    let mut lab = Lab::new(Layout { workers: world, mtu, racks: 0 })?;
    if args.keep {
        lab.publish(true)?;
    }
    let mut running = Running::start(&lab, &inputs, &options)?;
    println!("aggregator: {}", running.aggregator.ready);
    if args.keep {
        println!("kept: files in {}, and namespaces:", running.keep_files());
        for namespace in lab.namespaces() {
            println!("  ip netns delete {}", namespace.name());
        }
    }
    // Each worker ends by itself when nothing goes on; the deadline is for the case that one does not.
    let result = running.finish(Duration::from_secs(args.timeout * 20))?;
    let verdict = result.check(&inputs, &options)?;
    print!("\n{}", table(&inputs, args, &result, &verdict));
    print!("{}", disturbance(args, &result));
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&summary(args, &inputs, &result, &verdict))?;
        std::fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    }
    println!();
    if verdict.is_right() {
        let worst = verdict.comparisons.iter().map(|c| c.worst_ratio).fold(0.0, f64::max);
        println!(
            "right: all {world} ranks have the same result, bit for bit, within {:.0} % of the bound on its distance \
             from the float64 {}",
            worst * 100.0,
            args.reduction.name()
        );
    } else {
        println!("wrong:");
        verdict.complaints.iter().for_each(|complaint| println!("  {complaint}"));
    }
    Ok(verdict.is_right())
}

/// One row.
struct Row {
    rank: usize,
    bytes: usize,
    chunks: usize,
    retransmissions: u64,
    seconds: f64,
    gbit_per_s: f64,
    error: f64,
    bound: f64,
    digest: String,
    is_right: bool,
}

fn rows(inputs: &[Gradient], args: &Args, result: &JobResult, verdict: &Verdict) -> Vec<Row> {
    let mut rows = Vec::new();
    for (rank, (outcome, comparison)) in result.ranks.iter().zip(&verdict.comparisons).enumerate() {
        let input = &inputs[rank];
        let seconds = outcome.report.as_ref().and_then(|report| report.seconds()).unwrap_or(f64::NAN);
        rows.push(Row {
            rank,
            bytes: input.bytes(),
            chunks: input.tensors.iter().map(|tensor| tensor.len().div_ceil(args.lanes)).sum(),
            retransmissions: outcome.report.as_ref().map_or(0, |report| report.statistic("retransmissions")),
            seconds,
            gbit_per_s: input.bytes() as f64 * 8.0 / seconds / 1e9,
            error: comparison.largest_error,
            bound: comparison.bound,
            digest: outcome.output.as_ref().map_or_else(|| "no result".into(), Gradient::digest),
            is_right: comparison.is_right(),
        });
    }
    rows
}

fn table(inputs: &[Gradient], args: &Args, result: &JobResult, verdict: &Verdict) -> String {
    let mut text = format!(
        "{:>4} {:>9} {:>7} {:>8} {:>9} {:>8} {:>13} {:>11}  {}\n",
        "rank", "bytes", "chunks", "resent", "ms", "Gbit/s", "largest error", "its bound", "result (SHA-256)"
    );
    for row in rows(inputs, args, result, verdict) {
        let _ = writeln!(
            text,
            "{:>4} {:>9} {:>7} {:>8} {:>9.2} {:>8.3} {:>13.3e} {:>11.3e}  {:.16}{}",
            row.rank,
            row.bytes,
            row.chunks,
            row.retransmissions,
            row.seconds * 1e3,
            row.gbit_per_s,
            row.error,
            row.bound,
            row.digest,
            if row.is_right { "" } else { "  WRONG" },
        );
    }
    text
}

/// What was done to the packets and what was seen of it.
fn disturbance(args: &Args, result: &JobResult) -> String {
    let mut text = String::new();
    let counted = |counters: &Counters| {
        let refusals = Refusal::ALL.iter().map(|refusal| (refusal.name(), counters.refused(*refusal)));
        let events = Event::ALL.iter().map(|event| (event.name(), counters.noted(*event)));
        let all = refusals.chain(events).filter(|(_, count)| *count > 0);
        all.map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ")
    };
    let _ = writeln!(text, "\naggregator counted: {}", counted(&result.counters));
    if result.requests != Counts::default() || result.answers != Counts::default() {
        let _ = writeln!(text, "disturbed (seed {}):", args.seed);
        let _ = writeln!(text, "  requests: {}", result.requests);
        let _ = writeln!(text, "  answers:  {}", result.answers);
        let _ = writeln!(
            text,
            "corruption seen: {} of {} requests, by the aggregator; {} of {} answers, by the workers",
            paatp_tests::job::corruptions(&result.counters),
            result.requests.corrupted,
            result.corruptions_seen_by_workers(),
            result.answers.corrupted,
        );
    }
    if result.lost_elsewhere + result.arrived_late > 0 {
        let _ = writeln!(
            text,
            "besides, {} packets were lost in full queues of the kernel, and {} answers came after their worker had ended",
            result.lost_elsewhere, result.arrived_late
        );
    }
    text
}

fn summary(args: &Args, inputs: &[Gradient], result: &JobResult, verdict: &Verdict) -> Value {
    let ranks: Vec<Value> = rows(inputs, args, result, verdict)
        .into_iter()
        .zip(&result.ranks)
        .map(|(row, outcome)| {
            json!({
                "rank": row.rank,
                "bytes": row.bytes,
                "chunks": row.chunks,
                "retransmissions": row.retransmissions,
                "seconds": row.seconds,
                "gbit_per_s": row.gbit_per_s,
                "largest_error": row.error,
                "error_bound": row.bound,
                "digest": row.digest,
                "right": row.is_right,
                "report": outcome.report.as_ref().map(|report| &report.0),
            })
        })
        .collect();
    let refusals: serde_json::Map<String, Value> =
        Refusal::ALL.iter().map(|r| (r.name().to_owned(), result.counters.refused(*r).into())).collect();
    let events: serde_json::Map<String, Value> =
        Event::ALL.iter().map(|e| (e.name().to_owned(), result.counters.noted(*e).into())).collect();
    json!({
        "schema_version": SCHEMA_VERSION,
        "right": verdict.is_right(),
        "complaints": verdict.complaints,
        "workers": inputs.len(),
        "step": args.step,
        "reduction": args.reduction.name(),
        "lanes": args.lanes,
        "seed": args.seed,
        "rates": { "loss": args.loss, "duplicate": args.duplicate, "reorder": args.reorder, "corrupt": args.corrupt },
        "ranks": ranks,
        "aggregator": { "ready": result.ready, "refusals": refusals, "events": events },
        "disturbed": { "requests": result.requests, "answers": result.answers },
        "corruptions_seen": {
            "by_aggregator": paatp_tests::job::corruptions(&result.counters),
            "by_workers": result.corruptions_seen_by_workers(),
        },
        "lost_in_full_queues": result.lost_elsewhere,
        "answers_after_the_end": result.arrived_late,
    })
}

/// Runs only the aggregator, on an interface of this machine, until Ctrl-C.
fn serve(args: &Args, interface: &str) -> Result<bool> {
    let address = address_of(interface)?;
    let world = args.workers.unwrap_or(DEFAULT_WORKERS);
    let options =
        AggregatorOptions { lanes: args.lanes, xdp_mode: "auto", ..AggregatorOptions::world(world) };
    let mut command = Command::new(paatp()?);
    // Signals of the terminal come to us; we pass them on.
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    // SAFETY: between fork and exec only system calls are made.
    unsafe {
        std::os::unix::process::CommandExt::pre_exec(&mut command, || {
            nix::sys::prctl::set_pdeathsig(Signal::SIGTERM)?;
            SigSet::empty().thread_set_mask()?;
            Ok(())
        });
    }
    let mut child = command.args(options.args(interface)).spawn().context("cannot start paatp")?;
    println!("start one worker on each of {world} machines, R from 0 to {}:", world - 1);
    println!(
        "  paatp allreduce --job {} --rank R --world {world} --aggregator {address} --input INPUT-rankR.safetensors \
         --output sum-rankR.safetensors --reduction {}",
        options.job,
        args.reduction.name()
    );
    println!("Ctrl-C ends the aggregator.");
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status.success());
        }
        if INTERRUPTED.load(Ordering::Relaxed) {
            kill(Pid::from_raw(i32::try_from(child.id())?), Signal::SIGTERM)
                .context("cannot stop the aggregator")?;
            child.wait()?;
            bail!("interrupted");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The first address of an interface that others can reach, and the port.
fn address_of(interface: &str) -> Result<String> {
    let output = Command::new("ip")
        .args(["-json", "address", "show", "dev", interface])
        .output()
        .context("cannot start `ip`; install iproute2")?;
    ensure!(
        output.status.success(),
        "no interface {interface} ({}); `ip link` lists them",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let links: Value = serde_json::from_slice(&output.stdout).context("`ip` wrote no JSON")?;
    let addresses = links[0]["addr_info"].as_array().map_or(&[][..], Vec::as_slice);
    let address = addresses
        .iter()
        .filter(|address| address["scope"] == "global")
        .find_map(|address| address["local"].as_str()?.parse::<IpAddr>().ok())
        .with_context(|| {
            format!("{interface} has no address; `ip address add ADDR/PREFIX dev {interface}` gives it one")
        })?;
    Ok(std::net::SocketAddr::new(address, PORT).to_string())
}
