//! Whole jobs through the switch program on BMv2, in front of the XDP program. `cargo xtask p4 test` runs this.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::time::Duration;

use paatp_common::Event;
use paatp_common::job::JobEntry;
use paatp_common::levels::Link;
use paatp_common::switch::Count;
use paatp_tests::gradients::real;
use paatp_tests::job::{Running, run};
use paatp_tests::kernel::{Maps, PodOf};
use paatp_tests::p4::{BLOCKS, SLOTS, Switch, Tools, require_p4};
use paatp_tests::process::{PORT, wait_until};
use paatp_tests::{Gradient, JobOptions, JobResult, Lab, Layout, Rates, require_bpf};
use paatp_user::switch::entries::{Neighbour, SwitchedJob, station};

/// A software switch on a busy machine.
const DEADLINE: Duration = Duration::from_secs(240);
/// Lanes of a chunk: as many as the switch takes.
const LANES: usize = BLOCKS * 32;
/// Ports of the switch.
const WORKERS: u16 = 0;
const NODE: u16 = 1;
/// Everything is lost: nobody is to begin before the switch knows the job.
const NOTHING_PASSES: Rates = Rates { loss: 1.0, ..Rates::NONE };
const DISTURBED: Rates = Rates { loss: 0.03, duplicate: 0.03, reorder: 0.03, corrupt: 0.0 };

fn options(world: usize) -> JobOptions {
    let mut options = JobOptions { timeout: DEADLINE, ..JobOptions::world(world) };
    (options.aggregator.lanes, options.aggregator.window) = (LANES, 32);
    options
}

/// The digest of a job without any switch.
fn without_a_switch(inputs: &[Gradient]) -> String {
    let options = options(inputs.len());
    let lab = Lab::new(Layout::workers(inputs.len())).unwrap();
    let result = run(&lab, inputs, &options).unwrap();
    let verdict = result.check(inputs, &options).unwrap();
    assert!(verdict.is_right(), "{:#?}", verdict.complaints);
    result.digests().unwrap().swap_remove(0)
}

/// What a run through the switch is to have.
struct Plan {
    /// Slots of its table that the job may use.
    slots: u32,
    /// What happens on the workers' links.
    rates: Rates,
    /// The switch forgets the job in the middle of it.
    wiped: bool,
}

/// The job that the aggregator serves.
fn served(maps: &Maps) -> JobEntry {
    maps.array::<PodOf<JobEntry>>("JOBS").unwrap().get(&0, 0).unwrap().0
}

fn through_the_switch(tools: &Tools, inputs: &[Gradient], plan: &Plan) -> (JobResult, Vec<u64>) {
    let world = inputs.len();
    let lab = Lab::new(Layout::workers(world)).unwrap();
    let (namespace, interfaces) = lab.splice().unwrap();
    let json = tools.compile(BLOCKS).unwrap();
    let mut switch = Switch::start(tools, &json, namespace, &interfaces).unwrap();
    for worker in &lab.workers {
        switch.add(&[station(worker.mac(), WORKERS)]).unwrap();
    }
    switch.add(&[station(lab.aggregator.mac(), NODE)]).unwrap();

    let mut options = options(world);
    options.aggregator.more = vec!["--levels".into()];
    let held: Vec<_> = (0..world)
        .map(|rank| lab.disturb(rank, PORT..=PORT, 1, NOTHING_PASSES, Rates::NONE).unwrap())
        .collect();
    let mut running = Running::start(&lab, inputs, &options).unwrap();
    wait_until("the generation was formed", DEADLINE, || Ok(served(&running.maps).generation != 0)).unwrap();
    let entry = served(&running.maps);
    let mut links = running.maps.array::<PodOf<Link>>("LINKS").unwrap();
    links.set(0, PodOf(Link { switched: (1 << world) - 1, ..Link::default() }), 0).unwrap();
    let neighbour = |(rank, worker): (u8, &paatp_tests::lab::Host)| Neighbour {
        rank,
        port: WORKERS,
        mac: worker.mac(),
        address: worker.v4(),
    };
    let job = SwitchedJob {
        number: 0,
        generation: entry.generation,
        ranks: (0..).zip(&lab.workers).map(neighbour).collect(),
        reach: entry.slots,
        k: 4,
        granted: 0,
        patience: 200_000,
        slots: plan.slots,
        node: lab.aggregator.v4(),
        node_port: NODE,
    };
    job.check().unwrap();
    switch.add_group(&job.group()).unwrap();
    switch.add(&job.entries()).unwrap();
    drop(held);
    if plan.rates.any() {
        for rank in 0..world {
            let seed = 7 + rank as u64;
            running.disturbances.push(lab.disturb(rank, PORT..=PORT, seed, plan.rates, plan.rates).unwrap());
        }
    }
    if plan.wiped {
        wait_until("the switch had sent sums", DEADLINE, || {
            Ok(switch.counter("PaatpIngress.counts", Count::Completed as usize)? > 5)
        })
        .unwrap();
        switch.command("table_clear PaatpIngress.jobs").unwrap();
    }
    let result = running.finish(DEADLINE).unwrap();
    let counts =
        (0..Count::COUNT).map(|count| switch.counter("PaatpIngress.counts", count).unwrap()).collect();
    (result, counts)
}

fn same_bits(name: &str, world: usize, plan: &Plan) {
    let Some(tools) = require_p4(name).filter(|_| require_bpf(name)) else { return };
    let inputs = real(0, world).unwrap();
    let plain = without_a_switch(&inputs);
    let (result, counts) = through_the_switch(&tools, &inputs, plan);
    for rank in &result.ranks {
        assert!(rank.finished.is_success(), "{}", rank.finished.output);
    }
    assert_eq!(result.digests().unwrap(), vec![plain; world]);
    let count = |what: Count| counts[what as usize];
    let told: Vec<String> =
        Count::ALL.iter().map(|what| format!("{} {}", what.name(), count(*what))).collect();
    let contributions = result.counters.noted(Event::Contributions);
    let by_switch = count(Count::Stored) + count(Count::Added);
    println!("{name}: {}; the aggregator took {contributions} contributions", told.join(", "));
    println!(
        "{name}: {} results copied, {} contributions reclaimed",
        result.sum(|report| report.statistic("copied_results")),
        result.sum(|report| report.statistic("reclaimed"))
    );
    assert!(count(Count::Completed) > 5 && by_switch > 0, "{told:?}");
    if !plan.rates.any() && !plan.wiped && plan.slots as usize == SLOTS {
        let chunks = result.ranks[0].report.as_ref().unwrap().statistic("contributions");
        assert!(contributions < chunks * world as u64 / 2, "{contributions} of {chunks} chunks: {told:?}");
    }
}

const ROOMY: Plan = Plan { slots: SLOTS as u32, rates: Rates::NONE, wiped: false };

#[test]
fn four_workers() {
    same_bits("switch::four_workers", 4, &ROOMY);
}

#[test]
fn eight_workers() {
    same_bits("switch::eight_workers", 8, &ROOMY);
}

#[test]
fn four_workers_disturbed() {
    same_bits("switch::four_workers_disturbed", 4, &Plan { rates: DISTURBED, ..ROOMY });
}

/// Room for 16 slots only: the rest is the aggregator's.
#[test]
fn sixteen_slots() {
    same_bits("switch::sixteen_slots", 4, &Plan { slots: 16, ..ROOMY });
}

#[test]
fn the_switch_forgets_the_job() {
    same_bits("switch::the_switch_forgets_the_job", 4, &Plan { wiped: true, ..ROOMY });
}
