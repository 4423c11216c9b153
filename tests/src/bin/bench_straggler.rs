//! `cargo xtask bench straggler`: the same slow link under every rate controller, for real and in the simulator.
//!
//! A scenario file says everything: the lab's links get its rates and buffers by `tbf`, its slow stretches by changes of
//! the rate at the same times, its window, slots and bytes. Controllers take turns within each round; all controllers of a
//! round meet the slow stretches at the same times after the first request, each round meets them at others, and the
//! simulator is given the same times. Every result is checked. What comes out is which controllers are faster than which,
//! on either side.

use std::cmp::Ordering;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use paatp_common::Event;
use paatp_sim::Scenario;
use paatp_sim::link::ETHERNET_OVERHEAD;
use paatp_sim::report::{Outcome, run};
use paatp_sim::scenario::{Direction as Ways, Place, Ranks, Straggler};
use paatp_sim::units::Nanos;
use paatp_tests::gradients::synthetic;
use paatp_tests::job::{JobResult, Running};
use paatp_tests::kernel::Maps;
use paatp_tests::process::wait_until;
use paatp_tests::shaping::{Shape, Shaping};
use paatp_tests::spread::{Ratio, Spread, cpu_model, cpus, kernel_release};
use paatp_tests::{Direction, Dtype, Gradient, JobOptions, Lab, Layout};
use paatp_transport::rate::Algorithm;
use serde::Serialize;

/// Compares controllers on a link that is slow for part of the time, for real and in the simulator.
#[derive(Parser)]
#[command(name = "bench-straggler", max_term_width = 110)]
struct Args {
    /// Scenarios: one job, one slow host link [default: all of scenarios/veth-4-tbf*.toml].
    #[arg(long, value_name = "FILE.toml")]
    scenario: Vec<PathBuf>,
    /// Rate controllers.
    #[arg(long, value_delimiter = ',', default_value = "pa-atp,atp,a2tp,switchml,fixed", value_name = "C,…")]
    controller: Vec<Algorithm>,
    /// Measurements of each controller.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Writes the figures to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Scenarios that are run unless told otherwise.
const SCENARIOS: [&str; 4] =
    ["veth-4-tbf.toml", "veth-4-tbf-down.toml", "veth-4-tbf-server.toml", "veth-4-tbf-server-drops.toml"];
/// Bytes of IPv4, UDP and our header.
const HEADERS: u64 = 20 + 8 + 64;
/// Longest run of one job.
const DEADLINE: Duration = Duration::from_secs(120);
/// Medians that are closer count as equal in any case; see [`resolution`].
const LEAST_RESOLUTION: f64 = 0.01;
/// Of the time that the links alone need, a run takes at least this share, or the links were not shaped: a bucket lets
/// some packets through at once, and the kernel's clock and ours meet within milliseconds.
const LEAST_OF_BOUND: f64 = 0.95;

/// What the lab does of a scenario.
struct Plan {
    name: String,
    scenario: Scenario,
    rate: u64,
    slow_rate: u64,
    buffer: u64,
    ranks: Vec<usize>,
    ways: Ways,
    period: Duration,
    slow: Duration,
    lanes: usize,
}

impl Plan {
    fn read(path: &Path) -> Result<Plan> {
        let scenario = Scenario::read(path)?;
        let (network, [job], [straggler]) = (&scenario.network, &scenario.jobs[..], &scenario.stragglers[..])
        else {
            bail!("{}: the lab does scenarios with one job and one straggler", path.display())
        };
        let Straggler::SlowLink {
            factor,
            period,
            share,
            place: Place::Host,
            direction,
            ranks: Ranks::These(ranks),
            ..
        } = straggler
        else {
            bail!("{}: the lab's straggler is a slow-link of named hosts", path.display())
        };
        let can = network.leaves == 1
            && [Some(network.host), network.aggregator].into_iter().flatten().all(|link| link.ecn.is_none())
            && network.impairment == Default::default()
            && job.iterations == 1
            && job.operations == 1;
        ensure!(
            can,
            "{}: the lab has one switch, no loss by chance, no marks (`tbf` makes none), and one operation",
            path.display()
        );
        let lanes = usize::try_from(network.packet.0.saturating_sub(HEADERS) / 4)?;
        let name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        Ok(Plan {
            name,
            rate: network.host.rate.0,
            slow_rate: (network.host.rate.0 as f64 * factor) as u64,
            buffer: network.host.buffer.0,
            ranks: ranks.iter().map(|rank| *rank as usize).collect(),
            ways: *direction,
            period: Duration::from_nanos(period.0),
            slow: Duration::from_nanos(period.times(*share).0),
            lanes,
            scenario,
        })
    }

    fn world(&self) -> usize {
        usize::from(self.scenario.jobs[0].world)
    }

    fn elements(&self) -> Result<usize> {
        Ok(usize::try_from(self.scenario.jobs[0].chunks)? * self.lanes)
    }

    /// When the first slow stretch of a round begins: evenly over the period, so that rounds differ as the scenario's
    /// chance would have it.
    fn phase(&self, round: u32, rounds: u32) -> Duration {
        self.period * (2 * round + 1) / (2 * rounds)
    }

    /// Time that the slow link needs for every chunk once.
    fn bound(&self, phase: Duration) -> f64 {
        let packet = (self.scenario.network.packet.0 + ETHERNET_OVERHEAD) as f64 * 8.0;
        let mut bits = self.scenario.jobs[0].chunks as f64 * packet;
        let (mut time, mut span, mut rate) = (0.0, phase.as_secs_f64(), self.rate);
        while bits > span * rate as f64 {
            bits -= span * rate as f64;
            time += span;
            (rate, span) = match rate == self.rate {
                true => (self.slow_rate, self.slow.as_secs_f64()),
                false => (self.rate, (self.period - self.slow).as_secs_f64()),
            };
        }
        time + bits / rate as f64
    }

    fn options(&self, controller: Algorithm) -> JobOptions {
        let job = &self.scenario.jobs[0];
        // Sockets: what AF_XDP sends on veth passes no queueing discipline.
        let mut options =
            JobOptions { io: "udp", controller: controller.name(), ..JobOptions::world(self.world()) };
        (options.aggregator.lanes, options.aggregator.window) = (self.lanes, job.window);
        options.aggregator.slots = job.slots;
        options
    }

    /// The simulator's seconds for the same.
    fn simulate(&self, controller: Algorithm, phase: Duration) -> Result<Outcome> {
        let mut scenario = self.scenario.clone();
        for straggler in &mut scenario.stragglers {
            if let Straggler::SlowLink { phase: begin, .. } = straggler {
                *begin = Some(Nanos(u64::try_from(phase.as_nanos())?));
            }
        }
        let record = run(&scenario, controller, scenario.seed)
            .with_context(|| format!("{} fails in the simulator under {controller}", self.name))?;
        Ok(Outcome::of(&scenario, &record))
    }
}

/// The lab's links, shaped.
struct Links<'a> {
    steady: Vec<Shaping<'a>>,
    /// Those that have slow stretches.
    changing: Vec<Shaping<'a>>,
}

impl<'a> Links<'a> {
    fn shape(lab: &'a Lab, plan: &Plan) -> Result<Links<'a>> {
        let mut links = Links { steady: Vec::new(), changing: Vec::new() };
        for rank in 0..plan.world() {
            for direction in [Direction::Egress, Direction::Ingress] {
                let other = if direction == Direction::Egress { Ways::Down } else { Ways::Up };
                let shape = Shape { rate: plan.rate, buffer: plan.buffer };
                let shaping = lab.shape(rank, direction, shape)?;
                let changes = plan.ranks.contains(&rank) && plan.ways != other;
                if changes { &mut links.changing } else { &mut links.steady }.push(shaping);
            }
        }
        if let Some(link) = plan.scenario.network.aggregator {
            // Answers are no longer than their requests, so the way back has room where the way there has.
            let shape = Shape { rate: link.rate.0, buffer: link.buffer.0 };
            links.steady.push(lab.shape_aggregator(shape)?);
        }
        ensure!(!links.changing.is_empty(), "{}: the slow link is of no rank of the job", plan.name);
        Ok(links)
    }

    /// Packets that found no room, and how often packets of the changing links waited.
    fn dropped_and_waits(&self) -> Result<(u64, u64)> {
        let (mut dropped, mut waits) = (0, 0);
        for shaping in self.steady.iter().chain(&self.changing) {
            dropped += shaping.passed()?.dropped;
        }
        for shaping in &self.changing {
            waits += shaping.passed()?.waits;
        }
        Ok((dropped, waits))
    }
}

/// What the slow stretches really were.
#[derive(Clone, Copy, Debug, Default)]
struct Stretches {
    begun: u32,
    /// Latest change of a rate after its time.
    latest: Duration,
    /// Share of the CPUs' time that was not idle, whoever used it.
    busy: f64,
}

/// Changes rates from the job's first request on, until `done` closes.
fn change_rates(
    plan: &Plan,
    phase: Duration,
    maps: &Maps,
    links: &mut [Shaping<'_>],
    done: &Receiver<()>,
) -> Result<Stretches> {
    wait_until("the first request came", DEADLINE, || Ok(maps.counters()?.noted(Event::Requests) > 0))?;
    let (mut due, before) = (Instant::now() + phase, cpu_times()?);
    let (mut stretches, mut is_slow) = (Stretches::default(), false);
    while done.recv_timeout(due.saturating_duration_since(Instant::now())) == Err(RecvTimeoutError::Timeout) {
        is_slow = !is_slow;
        stretches.latest = stretches.latest.max(due.elapsed());
        stretches.begun += u32::from(is_slow);
        for link in &mut *links {
            link.set_rate(if is_slow { plan.slow_rate } else { plan.rate })?;
        }
        due += if is_slow { plan.slow } else { plan.period - plan.slow };
    }
    let after = cpu_times()?;
    stretches.busy = 1.0 - (after.1 - before.1) / (after.0 - before.0).max(1.0);
    links.iter_mut().try_for_each(|link| link.set_rate(plan.rate))?;
    Ok(stretches)
}

/// Ticks of all CPUs since the machine started, and those of them that were idle.
fn cpu_times() -> Result<(f64, f64)> {
    let text = std::fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    let line = text.lines().next().unwrap_or_default();
    let ticks: Vec<f64> = line.split_whitespace().skip(1).take(8).filter_map(|n| n.parse().ok()).collect();
    let idle = ticks.get(3).zip(ticks.get(4)).context("/proc/stat has no idle time")?;
    Ok((ticks.iter().sum(), idle.0 + idle.1))
}

/// What one controller has shown, round by round.
#[derive(Default)]
struct Seen {
    real: Vec<f64>,
    simulated: Vec<f64>,
    pulls: Vec<f64>,
    simulated_pulls: Vec<f64>,
    retransmissions: Vec<f64>,
    dropped: u64,
}

/// What the machine did meanwhile.
#[derive(Default)]
struct Conditions {
    busy: Vec<f64>,
    latest: Duration,
}

#[derive(Serialize)]
struct Row {
    controller: &'static str,
    real_seconds: Spread,
    simulated_seconds: Spread,
    real_to_simulated: Ratio,
    pulls_per_chunk: Spread,
    simulated_pulls_per_chunk: Spread,
    retransmissions_per_chunk: Spread,
    dropped_packets: u64,
}

#[derive(Serialize)]
struct Pair {
    first: &'static str,
    second: &'static str,
    real: Ratio,
    real_order: &'static str,
    simulated: Ratio,
    simulated_order: &'static str,
    /// The same to the nanosecond in every simulated round: they decided the same, and are a control of the measurement.
    identical: bool,
    same: bool,
}

#[derive(Serialize)]
struct Comparison {
    scenario: String,
    rounds: u32,
    rate_bits_per_second: u64,
    slow_rate_bits_per_second: u64,
    tensor_bytes: usize,
    busy_share_of_cpus: Spread,
    latest_change_seconds: f64,
    resolution: f64,
    rows: Vec<Row>,
    pairs: Vec<Pair>,
}

#[derive(Serialize)]
struct Report {
    schema_version: u32,
    kernel: String,
    cpu: String,
    cpus: usize,
    comparisons: Vec<Comparison>,
}

fn main() -> Result<()> {
    let mut args = Args::parse();
    if args.scenario.is_empty() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios");
        args.scenario = SCENARIOS.map(|name| folder.join(name)).into();
    }
    let plans: Vec<Plan> = args.scenario.iter().map(|path| Plan::read(path)).collect::<Result<_>>()?;
    let mut comparisons = Vec::new();
    for plan in &plans {
        let comparison = compare(&args, plan)?;
        print(plan, &comparison);
        comparisons.push(comparison);
    }
    if let Some(path) = &args.json {
        let report = Report {
            schema_version: 1,
            kernel: kernel_release(),
            cpu: cpu_model(),
            cpus: cpus(),
            comparisons,
        };
        std::fs::write(path, serde_json::to_string_pretty(&report)? + "\n")
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn compare(args: &Args, plan: &Plan) -> Result<Comparison> {
    let lab = Lab::new(Layout::workers(plan.world()))?;
    let mut links = Links::shape(&lab, plan)?;
    let inputs = synthetic(plan.world(), 42, &[(Dtype::F32, plan.elements()?)], 1.0);
    let mut seen: Vec<Seen> = args.controller.iter().map(|_| Seen::default()).collect();
    let mut conditions = Conditions::default();
    for round in 0..args.rounds {
        let phase = plan.phase(round, args.rounds);
        for turn in 0..args.controller.len() {
            // Another one is first in each round.
            let turn = (turn + round as usize) % args.controller.len();
            let (controller, seen) = (args.controller[turn], &mut seen[turn]);
            measure(plan, &lab, &mut links, &inputs, (controller, phase), seen, &mut conditions)
                .with_context(|| format!("{}, {controller}, round {round}", plan.name))?;
            let outcome = plan.simulate(controller, phase)?;
            seen.simulated.push(outcome.job_completion_seconds);
            seen.simulated_pulls.push(outcome.pulls as f64 / outcome.contributions.max(1) as f64);
            eprintln!(
                "{}: round {round}, {controller}: {:.3} s, simulated {:.3} s",
                plan.name,
                seen.real.last().copied().unwrap_or(f64::NAN),
                seen.simulated.last().copied().unwrap_or(f64::NAN)
            );
        }
    }
    Ok(summarise(args, plan, seen, conditions))
}

/// One job under one controller.
fn measure(
    plan: &Plan,
    lab: &Lab,
    links: &mut Links<'_>,
    inputs: &[Gradient],
    (controller, phase): (Algorithm, Duration),
    seen: &mut Seen,
    conditions: &mut Conditions,
) -> Result<()> {
    let options = plan.options(controller);
    let (dropped_before, waits_before) = links.dropped_and_waits()?;
    let mut running = Running::prepare(lab, inputs, &options)?;
    let maps = Maps::on(&lab.aggregator.namespace, &lab.aggregator.interface)?;
    let (alive, done) = channel();
    let changing = &mut links.changing;
    let (result, stretches) = std::thread::scope(|scope| {
        let changer = scope.spawn(move || change_rates(plan, phase, &maps, changing, &done));
        let result = (0..inputs.len())
            .try_for_each(|rank| running.start_rank(rank))
            .and_then(|()| running.finish(DEADLINE));
        drop(alive);
        let stretches = changer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        result.and_then(|result| Ok((result, stretches?)))
    })?;
    check(&result, inputs, seen.real.is_empty().then_some(&options))?;

    let reports: Vec<_> = result.ranks.iter().filter_map(|rank| rank.report.as_ref()).collect();
    ensure!(reports.len() == inputs.len(), "a rank wrote no report");
    // The rank that was ready last: the others' times hold their waiting for it.
    let seconds = reports.iter().filter_map(|report| report.seconds()).fold(f64::INFINITY, f64::min);
    let bound = plan.bound(phase);
    ensure!(
        seconds >= LEAST_OF_BOUND * bound,
        "{seconds:.3} s is less than the {bound:.3} s that the slow link alone takes: it was not shaped"
    );
    let (dropped, waits) = links.dropped_and_waits()?;
    ensure!(waits > waits_before && stretches.begun > 0, "no packet waited in a slow link: {stretches:?}");
    seen.real.push(seconds);
    seen.dropped += dropped - dropped_before;
    let sum = |name| result.sum(|report| report.statistic(name)) as f64;
    let contributions = sum("contributions").max(1.0);
    seen.pulls.push(sum("pulls") / contributions);
    seen.retransmissions.push(sum("retransmissions") / contributions);
    conditions.busy.push(stretches.busy);
    conditions.latest = conditions.latest.max(stretches.latest);
    Ok(())
}

/// The same result at all ranks; where `options` are given, within the bound of the sum in float64.
fn check(result: &JobResult, inputs: &[Gradient], options: Option<&JobOptions>) -> Result<()> {
    if let Some(options) = options {
        let verdict = result.check(inputs, options)?;
        ensure!(verdict.is_right(), "the result is wrong: {:#?}", verdict.complaints);
    }
    let digests = result.digests().with_context(|| {
        let outputs: Vec<_> = result.ranks.iter().map(|rank| &rank.finished.output).collect();
        format!("not every rank has a result: {outputs:#?}")
    })?;
    ensure!(digests.iter().all(|digest| *digest == digests[0]), "ranks have different results");
    Ok(())
}

fn summarise(args: &Args, plan: &Plan, seen: Vec<Seen>, conditions: Conditions) -> Comparison {
    let names: Vec<&'static str> = args.controller.iter().map(|controller| controller.name()).collect();
    let mut pairs = Vec::new();
    for (first, one) in seen.iter().enumerate() {
        for (second, other) in seen.iter().enumerate().skip(first + 1) {
            let real = Ratio::of(&one.real, &other.real);
            let simulated = Ratio::of(&one.simulated, &other.simulated);
            pairs.push(Pair {
                first: names[first],
                second: names[second],
                real,
                real_order: "",
                simulated,
                simulated_order: "",
                identical: one.simulated == other.simulated,
                same: false,
            });
        }
    }
    let resolution = resolution(&pairs);
    for pair in &mut pairs {
        let (real, simulated) = (pair.real.order(resolution), pair.simulated.order(resolution));
        (pair.real_order, pair.simulated_order, pair.same) = (word(real), word(simulated), real == simulated);
    }
    let row = |(controller, seen): (&'static str, Seen)| Row {
        controller,
        real_to_simulated: Ratio::of(&seen.real, &seen.simulated),
        real_seconds: Spread::of(seen.real),
        simulated_seconds: Spread::of(seen.simulated),
        pulls_per_chunk: Spread::of(seen.pulls),
        simulated_pulls_per_chunk: Spread::of(seen.simulated_pulls),
        retransmissions_per_chunk: Spread::of(seen.retransmissions),
        dropped_packets: seen.dropped,
    };
    Comparison {
        scenario: plan.name.clone(),
        rounds: args.rounds,
        rate_bits_per_second: plan.rate,
        slow_rate_bits_per_second: plan.slow_rate,
        tensor_bytes: plan.elements().unwrap_or_default() * 4,
        busy_share_of_cpus: Spread::of(conditions.busy),
        latest_change_seconds: conditions.latest.as_secs_f64(),
        resolution,
        rows: names.iter().copied().zip(seen).map(row).collect(),
        pairs,
    }
}

/// What real medians must differ by to mean anything: the most by which controllers differ that decide the same (without
/// marks all but *pa-atp* do). The same bar is put to the simulator.
fn resolution(pairs: &[Pair]) -> f64 {
    let controls = pairs.iter().filter(|pair| pair.identical);
    controls.map(|pair| (pair.real.median - 1.0).abs()).fold(LEAST_RESOLUTION, f64::max)
}

const fn word(order: Ordering) -> &'static str {
    match order {
        Ordering::Less => "faster",
        Ordering::Equal => "equal",
        Ordering::Greater => "slower",
    }
}

fn print(plan: &Plan, comparison: &Comparison) {
    println!("{}: {}", plan.name, plan.scenario.description);
    println!(
        "{} rounds; CPUs busy {:.2}; rates changed at most {:.1} ms late; differences below {:.1} % count as none\n",
        comparison.rounds,
        comparison.busy_share_of_cpus,
        comparison.latest_change_seconds * 1e3,
        comparison.resolution * 1e2
    );
    println!(
        "{:<10} {:<22} {:<22} {:<7} {:<16} {:<12} dropped",
        "controller", "real s", "simulated s", "ratio", "pulls/chunk", "again/chunk"
    );
    for row in &comparison.rows {
        println!(
            "{:<10} {:<22} {:<22} {:<7.3} {:<16} {:<12.4} {}",
            row.controller,
            format!("{:.3}", row.real_seconds),
            format!("{:.3}", row.simulated_seconds),
            row.real_to_simulated.median,
            format!("{:.3}, sim {:.3}", row.pulls_per_chunk.median, row.simulated_pulls_per_chunk.median),
            row.retransmissions_per_chunk.median,
            row.dropped_packets
        );
    }
    println!("\n{:<22} {:<32} {:<32} same", "pair", "real", "simulated");
    let told = |ratio: &Ratio, order: &str| {
        let Ratio { median, lower_quartile, upper_quartile } = ratio;
        format!("{order:<6} {median:.3} [{lower_quartile:.3}, {upper_quartile:.3}]")
    };
    for pair in &comparison.pairs {
        println!(
            "{:<22} {:<32} {:<32} {}",
            format!("{} / {}", pair.first, pair.second),
            told(&pair.real, pair.real_order),
            told(&pair.simulated, pair.simulated_order),
            match (pair.identical, pair.same) {
                (true, _) => "control",
                (false, true) => "yes",
                (false, false) => "NO",
            }
        );
    }
    println!();
}
