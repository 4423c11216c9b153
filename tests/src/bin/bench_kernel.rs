//! `cargo xtask bench kernel`: what a contribution costs in the kernel, and what of that the network sees.
//!
//! Nanoseconds come from `BPF_PROG_TEST_RUN`. A frame that it repeats comes back as its own answer, so a program in the
//! test object first makes it the next contribution ([`paatp_tests::bed`]); what that alone costs is measured in turns
//! with the whole and subtracted. Frames per second come from live frames over a veth pair. Every measurement checks the
//! aggregator's counters: so many contributions taken, nothing else.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use paatp_tests::bed::{Bed, Setup};
use paatp_tests::netns::Namespace;
use serde::Serialize;

/// Measures the aggregator in the kernel.
#[derive(Parser)]
struct Args {
    /// Writes the figures to this file as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Measurements of each kind; medians are reported.
    #[arg(long, default_value_t = 15)]
    rounds: u32,
    /// Contributions in one measurement.
    #[arg(long, default_value_t = 200_000)]
    repeat: u32,
}

/// Ranks that contribute to each chunk.
const RANKS: u8 = 4;
/// Slots that stay in the first-level cache together with the rest: 8 × 1.5 KiB.
const HOT_SLOTS: u32 = 8;
/// Slots that no cache here holds: 2^17 × 1.5 KiB are 192 MiB.
const COLD_SLOTS: u32 = 1 << 17;
/// Frames of one live measurement.
const LIVE_FRAMES: u32 = 1 << 20;
/// Frames that the kernel makes at once; below a veth queue's 256.
const LIVE_BATCH: u32 = 64;

/// Median and range of one kind of measurement.
#[derive(Clone, Copy, Serialize)]
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

impl Spread {
    fn of(mut values: Vec<f64>) -> Spread {
        values.sort_by(f64::total_cmp);
        Spread { median: values[values.len() / 2], min: values[0], max: values[values.len() - 1] }
    }
}

#[derive(Serialize)]
struct Contribution {
    lanes: u16,
    cache: &'static str,
    memory: &'static str,
    answer: &'static str,
    ns: f64,
    ns_min: f64,
    ns_max: f64,
    /// Cycles of the core's clock, as measured beside each round.
    cycles: f64,
    payload_gbit_per_s: f64,
    /// Of making the frame, subtracted.
    feeding_ns: f64,
}

#[derive(Serialize)]
struct Live {
    drop_frames_per_s: Spread,
    echo_frames_per_s: Spread,
    aggregate_frames_per_s: Spread,
    aggregate_payload_gbit_per_s: f64,
    ratio_to_echo: f64,
    ratio_to_drop: f64,
}

#[derive(Serialize)]
struct Report {
    schema_version: u32,
    kernel: String,
    cpu: String,
    ranks: u8,
    contribution: Vec<Contribution>,
    naive_ns: f64,
    speedup_over_naive: f64,
    live_frames: Live,
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(args.rounds > 0 && args.repeat > 0, "--rounds and --repeat must be at least 1");
    // The feeder counts per CPU.
    let mut cpu = CpuSet::new();
    cpu.set(nix::sched::sched_getcpu()?)?;
    sched_setaffinity(Pid::from_raw(0), &cpu).context("pinning the benchmark to a CPU")?;
    let mut contribution = Vec::new();
    for (lanes, slots, cache, with_results, is_shared) in [
        (256, HOT_SLOTS, "hot", false, false),
        (352, HOT_SLOTS, "hot", false, false),
        (768, HOT_SLOTS, "hot", false, false),
        (256, COLD_SLOTS, "cold", false, false),
        (352, COLD_SLOTS, "cold", false, false),
        (768, COLD_SLOTS / 2, "cold", false, false),
        (352, HOT_SLOTS, "hot", true, false),
        (352, HOT_SLOTS, "hot", false, true),
        (352, COLD_SLOTS, "cold", false, true),
        (352, HOT_SLOTS, "hot", true, true),
    ] {
        let setup = Setup { lanes, slots, ranks: RANKS, with_results, is_shared };
        let program = if lanes > 352 { "feed_aggregate_wide" } else { "feed_aggregate" };
        let Cost { ns, cycles, feeding_ns } = cost(setup, program, &args)?;
        let row = Contribution {
            lanes,
            cache,
            memory: if is_shared { "pool" } else { "ring" },
            answer: if with_results { "result" } else { "header" },
            ns: ns.median,
            ns_min: ns.min,
            ns_max: ns.max,
            cycles: cycles.median,
            payload_gbit_per_s: f64::from(lanes) * 32.0 / ns.median,
            feeding_ns: feeding_ns.median,
        };
        println!(
            "{:>4} lanes, {:<4} {}, answer with {:<6}: {:6.1} ns [{:.1}, {:.1}] = {:.0} cycles of {:.2} GHz  {:6.1} Gbit/s of payload  (feeding {:.1} ns)",
            lanes,
            cache,
            row.memory,
            row.answer,
            row.ns,
            row.ns_min,
            row.ns_max,
            row.cycles,
            row.cycles / row.ns,
            row.payload_gbit_per_s,
            row.feeding_ns
        );
        contribution.push(row);
    }
    let setup = Setup { lanes: 352, slots: HOT_SLOTS, ranks: RANKS, with_results: false, is_shared: false };
    let naive = cost(setup, "feed_naive", &args)?.ns;
    let speedup = naive.median / contribution[1].ns;
    println!("the same with a loop of 32-bit additions: {:.1} ns, {speedup:.2} times as long", naive.median);
    let live_frames = live(&args)?;
    println!(
        "live frames, 352 lanes: drop {:.2} M/s, echo {:.2} M/s, aggregate {:.2} M/s [{:.2}, {:.2}] = {:.1} Gbit/s of payload; {:.2} of echo, {:.2} of drop",
        live_frames.drop_frames_per_s.median / 1e6,
        live_frames.echo_frames_per_s.median / 1e6,
        live_frames.aggregate_frames_per_s.median / 1e6,
        live_frames.aggregate_frames_per_s.min / 1e6,
        live_frames.aggregate_frames_per_s.max / 1e6,
        live_frames.aggregate_payload_gbit_per_s,
        live_frames.ratio_to_echo,
        live_frames.ratio_to_drop
    );
    if let Some(path) = args.json {
        let report = Report {
            schema_version: 1,
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            cpu: cpu_model(),
            ranks: RANKS,
            contribution,
            naive_ns: naive.median,
            speedup_over_naive: speedup,
            live_frames,
        };
        std::fs::write(&path, serde_json::to_string_pretty(&report)?)
            .with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

fn cpu_model() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find_map(|line| line.strip_prefix("model name"));
    line.map_or_else(|| "unknown".to_owned(), |line| line.trim_start_matches([' ', '\t', ':']).to_owned())
}

/// What one contribution takes.
struct Cost {
    ns: Spread,
    cycles: Spread,
    /// Of making its frame, which is not part of the above.
    feeding_ns: Spread,
}

fn cost(setup: Setup, program: &str, args: &Args) -> Result<Cost> {
    let mut bed = Bed::new(setup)?;
    // Once round the ring, so that no page is touched for the first time later.
    bed.run(program, setup.slots * u32::from(setup.ranks))?;
    let (mut net, mut cycles, mut feeding) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..args.rounds {
        let clock = bed.clock()?;
        let before = bed.counters()?;
        let whole = bed.run(program, args.repeat)?;
        bed.check(&before, u64::from(args.repeat))?;
        // The feeder counts on, and must not leave gaps: it gets a bed of its own state, but the same frame.
        let fed = bed.run_feeder(args.repeat)?;
        let ns = whole.as_nanos() as f64 - fed.as_nanos() as f64;
        feeding.push(fed.as_nanos() as f64);
        cycles.push(ns * (clock + bed.clock()?) / 2.0);
        net.push(ns);
    }
    Ok(Cost { ns: Spread::of(net), cycles: Spread::of(cycles), feeding_ns: Spread::of(feeding) })
}

/// Frames per second through a veth pair whose far end drops, echoes or aggregates.
fn live(args: &Args) -> Result<Live> {
    let namespace = Namespace::new(format!("paatp-bench-{}", std::process::id()))?;
    // No neighbour discovery among the frames that are counted.
    namespace.set("ipv6/conf/default/disable_ipv6", "1")?;
    namespace.ip(&["link", "add", "near", "type", "veth", "peer", "name", "far"])?;
    for interface in ["near", "far"] {
        namespace.ip(&["link", "set", interface, "up"])?;
    }
    let measure = |far: &'static str, count: fn(&Bed) -> Result<u64>| -> Result<Vec<f64>> {
        namespace.run(|| -> Result<Vec<f64>> {
            let setup =
                Setup { lanes: 352, slots: HOT_SLOTS, ranks: RANKS, with_results: true, is_shared: false };
            let mut bed = Bed::new(setup)?;
            let ifindex = nix::net::if_::if_nametoindex("near")?;
            bed.attach(far, "far")?;
            if far != "drop_all" {
                bed.attach("drop_all", "near")?;
            }
            bed.run_live("feed_out", ifindex, LIVE_FRAMES / 8, LIVE_BATCH)?;
            let mut rates = Vec::new();
            for _ in 0..args.rounds {
                let before = (bed.counters()?, count(&bed)?);
                let start = Instant::now();
                bed.run_live("feed_out", ifindex, LIVE_FRAMES, LIVE_BATCH)?;
                let seconds = start.elapsed().as_secs_f64();
                let frames = count(&bed)? - before.1;
                ensure!(frames == u64::from(LIVE_FRAMES), "{frames} of {LIVE_FRAMES} frames arrived");
                if far == "aggregate" {
                    bed.check(&before.0, u64::from(LIVE_FRAMES))?;
                }
                rates.push(frames as f64 / seconds);
            }
            Ok(rates)
        })?
    };
    let arrived_back = |bed: &Bed| Ok(bed.seen()?.0);
    let dropped = Spread::of(measure("drop_all", arrived_back)?);
    let echoed = Spread::of(measure("echo", arrived_back)?);
    let aggregated = Spread::of(measure("aggregate", arrived_back)?);
    Ok(Live {
        drop_frames_per_s: dropped,
        echo_frames_per_s: echoed,
        aggregate_frames_per_s: aggregated,
        aggregate_payload_gbit_per_s: aggregated.median * 352.0 * 32.0 / 1e9,
        ratio_to_echo: aggregated.median / echoed.median,
        ratio_to_drop: aggregated.median / dropped.median,
    })
}
