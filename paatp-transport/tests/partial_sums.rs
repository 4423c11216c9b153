//! Workers and aggregator with a switch between them, in virtual time: loss on both sides of it, slots that are too few,
//! evicted, wiped. The result is bit for bit that of a run without a switch.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use common::support::switch::{Installed, OwnedSwitch};
use common::{FAIR, GENERATION, Net, Shape, Weather, settings};
use paatp_common::job::mapped;
use paatp_common::switch::Count;
use paatp_transport::rate::Algorithm;
use paatp_transport::{Reduction, Tensor, Time, Values};
use proptest::prelude::*;

/// Longer than any run, in µs.
const PATIENT: u64 = 1 << 40;

fn switch(shape: Shape, local: u64, slots: usize, patience: u64) -> OwnedSwitch {
    let mut switch = OwnedSwitch::new(slots, usize::from(shape.lanes) / 32);
    switch.install(Installed {
        number: 0,
        generation: GENERATION,
        local,
        reach: shape.slots,
        k: 4,
        granted: 0,
        patience,
        addresses: (0..shape.world).map(|rank| mapped([10, 0, 0, rank])).collect(),
    });
    switch
}

fn values(rank: u8, count: usize) -> Vec<Tensor> {
    let value = |i: usize| ((i * 37 + usize::from(rank) * 11) % 101) as f32 / 8.0 - 5.0;
    vec![Tensor { name: "w".into(), values: Values::F32((0..count).map(value).collect()) }]
}

/// The bits of a result.
fn bits(tensors: &[Tensor]) -> Vec<u32> {
    let Values::F32(values) = &tensors[0].values else { panic!("another type") };
    values.iter().map(|value| value.to_bits()).collect()
}

/// An all-reduce and the leaving afterwards; the result, the same at all ranks.
fn all_reduce(net: &mut Net, count: usize) -> Vec<u32> {
    for (rank, worker) in (0..).zip(&mut net.workers) {
        worker.all_reduce(Time(net.now), Reduction::Sum, values(rank, count));
    }
    net.run_until_events(1, 3_000_000);
    let results: Vec<_> = net.results().iter().map(|tensors| bits(tensors)).collect();
    assert!(results.iter().all(|result| *result == results[0]), "ranks differ");
    assert!(net.leave(1_000_000), "{}", net.describe());
    results[0].clone()
}

fn net(shape: Shape, weather: Weather, seed: u64) -> Net {
    Net::with_algorithm(shape, weather, seed, settings(), Algorithm::Fixed)
}

/// Nothing is lost: the aggregator sees each chunk once, as a partial sum, and hardly any other contribution.
#[test]
fn the_aggregator_gets_one_sum_for_each_chunk() {
    let shape = Shape { world: 4, lanes: 64, window: 16, slots: 32 };
    const COUNT: usize = 64 * 400;
    let plain = all_reduce(&mut net(shape, FAIR, 1), COUNT);
    let mut net = net(shape, FAIR, 1);
    net.switch = Some(switch(shape, 0b1111, 64, PATIENT));
    assert_eq!(all_reduce(&mut net, COUNT), plain);
    let switch = net.switch.as_ref().unwrap();
    assert_eq!(switch.counted(Count::Completed), 400);
    assert_eq!(switch.counted(Count::Results), 400);
    let counters = &net.aggregator.counters;
    // The exponent round goes past the switch: four more.
    assert_eq!(counters.noted(paatp_common::Event::Contributions), 404, "{counters:?}");
    let statistics: Vec<_> = net.workers.iter().map(|worker| *worker.statistics()).collect();
    let copied: u64 = statistics.iter().map(|s| s.copied_results).sum();
    assert_eq!(copied, 3 * 400, "{statistics:?}");
    assert!(statistics.iter().all(|s| s.reclaimed == 0), "{statistics:?}");
    let pulls: u64 = statistics.iter().map(|s| s.pulls).sum();
    println!("{pulls} pulls for {} results", 4 * 400);
}

/// Few slots, and one rank beside the switch.
#[test]
fn a_switch_that_is_too_small_and_a_rank_beside_it() {
    let shape = Shape { world: 4, lanes: 32, window: 16, slots: 32 };
    let plain = all_reduce(&mut net(shape, FAIR, 1), 32 * 300);
    let weather = Weather { jitter: 40, ..FAIR };
    for (local, slots) in [(0b0111, 64), (0b1111, 8), (0b1011, 8)] {
        let mut net = net(shape, weather, 5);
        net.switch = Some(switch(shape, local, slots, 2_000));
        assert_eq!(all_reduce(&mut net, 32 * 300), plain);
        let switch = net.switch.as_ref().unwrap();
        assert!(switch.counted(Count::Completed) > 50, "{:?}", switch.counts);
        assert!(slots > 8 || switch.counted(Count::PassedCrowded) > 0, "{:?}", switch.counts);
    }
}

/// A switch that is replaced far beyond S, where no slot has told it how far the job is, learns it from the aggregator and adds
/// again.
#[test]
fn a_switch_that_has_forgotten_everything_adds_again() {
    const CHUNKS: usize = 600;
    let shape = Shape { world: 3, lanes: 32, window: 8, slots: 16 };
    let plain = all_reduce(&mut net(shape, FAIR, 1), 32 * CHUNKS);
    for seed in 1..=5 {
        let mut net = net(shape, Weather { jitter: 40, ..FAIR }, seed);
        net.switch = Some(switch(shape, 0b111, 64, PATIENT));
        for (rank, worker) in (0..).zip(&mut net.workers) {
            worker.all_reduce(Time(net.now), Reduction::Sum, values(rank, 32 * CHUNKS));
        }
        let enough = (CHUNKS / 4) as u64;
        let completed = |net: &Net| net.switch.as_ref().unwrap().counted(Count::Completed);
        net.run(3_000_000, |net| completed(net) >= enough);
        net.switch = Some(switch(shape, 0b111, 64, PATIENT));
        net.run_until_events(1, 3_000_000);
        assert_eq!(bits(&net.results()[0]), plain);
        let switch = net.switch.as_ref().unwrap();
        assert!(switch.counted(Count::PassedWindow) > 0, "{:?}", switch.counts);
        assert!(switch.counted(Count::Completed) > enough, "seed {seed}: {:?}", switch.counts);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whatever the weather on both sides of the switch, and whatever becomes of its memory.
    #[test]
    fn the_result_does_not_depend_on_the_switch(
        world in 2..=5u8,
        seed in any::<u64>(),
        weather in common::weather(),
        local in any::<u64>(),
        slots in prop_oneof![Just(8usize), Just(64)],
        patience in prop_oneof![Just(PATIENT), 100..20_000u64],
        wipe in 0..4u64,
    ) {
        let shape = Shape { world, lanes: 32, window: 8, slots: 16 };
        let all = (1 << world) - 1;
        let local = if (local & all).count_ones() < 2 { all } else { local & all };
        let plain = all_reduce(&mut net(shape, FAIR, 1), 32 * 60);
        let mut net = net(shape, weather, seed);
        net.switch = Some(switch(shape, local, slots, patience));
        for (rank, worker) in (0..).zip(&mut net.workers) {
            worker.all_reduce(Time(net.now), Reduction::Sum, values(rank, 32 * 60));
        }
        if wipe > 0 {
            // All that it holds is gone, in the middle of it.
            net.run(3_000_000, |net| net.steps > wipe * 150 || net.events.iter().all(|events| !events.is_empty()));
            net.switch = Some(switch(shape, local, slots, patience));
        }
        net.run_until_events(1, 3_000_000);
        for tensors in net.results() {
            prop_assert_eq!(&bits(&tensors), &plain);
        }
        prop_assert!(net.leave(1_000_000), "{}", net.describe());
    }
}
