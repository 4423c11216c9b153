//! Workers over several levels of aggregators: in any weather every rank gets the bits that one level gives.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;
#[path = "racks/seats.rs"]
mod seats;
#[path = "racks/tree.rs"]
mod tree;

use common::{FAIR, GENERATION, Net, Random, Shape, Weather};
use paatp_common::counter::Event as Counted;
use paatp_common::policy::{Mode, Policy, Staleness};
use paatp_common::wire::{Chunk, Header, Kind, Request};
use paatp_common::{Refusal, Seq};
use paatp_transport::{Event, OperationError, Reduction, Tensor, Time, Values};
use proptest::prelude::*;
use tree::{Naming, Place, Plan, Tree};

/// Values of all sizes, some of them not a multiple of a chunk.
fn tensors(seed: u64, rank: u8) -> Vec<Tensor> {
    let mut random = Random(seed ^ u64::from(rank) << 32);
    let lengths = [1, 64, 257, 31, 500];
    let tensor = |(number, length): (usize, usize)| {
        let values = (0..length).map(|_| (random.unit() * 10f64.powi(number as i32 - 2)) as f32);
        let ints = (0..length).map(|i| (i as i32 % 77) - i32::from(rank));
        let floats = Tensor { name: format!("f{number}"), values: Values::F32(values.collect()) };
        [floats, Tensor { name: format!("i{number}"), values: Values::I32(ints.collect()) }]
    };
    lengths.into_iter().enumerate().map(tensor).collect::<Vec<_>>().concat()
}

fn contribute(net: &mut Tree, seed: u64, reduction: Reduction) {
    for (rank, worker) in (0..).zip(&mut net.workers) {
        worker.all_reduce(Time(net.now), reduction, tensors(seed, rank));
        let last = Tensor { name: "last".into(), values: Values::F32(vec![f32::from(rank); 33]) };
        worker.all_reduce(Time(net.now), Reduction::Mean, vec![last]);
    }
}

/// One level in fair weather.
fn expected(shape: Shape, seed: u64, reduction: Reduction) -> Vec<Vec<Tensor>> {
    let mut net = Net::new(shape, FAIR, seed);
    for (rank, worker) in (0..).zip(&mut net.workers) {
        worker.all_reduce(Time(net.now), reduction, tensors(seed, rank));
        let last = Tensor { name: "last".into(), values: Values::F32(vec![f32::from(rank); 33]) };
        worker.all_reduce(Time(net.now), Reduction::Mean, vec![last]);
    }
    net.run_until_events(2, 3_000_000);
    net.results()
}

fn shape(world: u8) -> Shape {
    Shape { world, lanes: 64, window: 8, slots: 32 }
}

/// 2 racks of 4, whose ranks are numbered through.
fn two_racks() -> Plan {
    Plan { parents: vec![None, Some(0), Some(0)], homes: vec![1, 1, 1, 1, 2, 2, 2, 2] }
}

fn finish(net: &mut Tree) -> Vec<Vec<Tensor>> {
    net.run_until_events(2, 3_000_000);
    assert!(net.leave(3_000_000), "not complete {}", net.describe());
    net.results()
}

fn plan() -> impl Strategy<Value = Plan> {
    // Ranks anywhere: behind one of two racks, at the root itself, or behind a rack that has another above it.
    let trees = prop_oneof![
        3 => Just(vec![None, Some(0), Some(0)]),
        1 => Just(vec![None, Some(0), Some(1)]),
        1 => Just(vec![None, Some(0), Some(1), Some(0)]),
    ];
    (trees, proptest::collection::vec(any::<usize>(), 2..=8)).prop_map(|(parents, homes)| {
        let sites = parents.len();
        Plan { parents, homes: homes.into_iter().map(|home| home % sites).collect() }
    })
}

/// Two levels: an answer that goes down by a node's name finds one rank behind each of its ports.
fn two_levels() -> impl Strategy<Value = Plan> {
    let trees = prop_oneof![Just(vec![None, Some(0)]), Just(vec![None, Some(0), Some(0), Some(0)])];
    (trees, proptest::collection::vec(any::<usize>(), 2..=8)).prop_map(|(parents, homes)| {
        let sites = parents.len();
        Plan { parents, homes: homes.into_iter().map(|home| home % sites).collect() }
    })
}

fn weather() -> impl Strategy<Value = Weather> {
    (0.0..0.25, 0.0..0.25, 0.0..0.03, 1..200u64, prop_oneof![Just(0), 1..500u64]).prop_map(
        |(loss, duplication, flips, delay, jitter)| Weather { loss, duplication, flips, delay, jitter },
    )
}

fn reduction() -> impl Strategy<Value = Reduction> {
    prop_oneof![3 => Just(Reduction::Sum), 1 => Just(Reduction::Max), 1 => Just(Reduction::Min)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, max_shrink_iters: 20, ..ProptestConfig::default() })]

    /// Loss, duplicates, reordering and flipped bits on every link: the bits are those of one level.
    #[test]
    fn levels_do_not_change_a_bit(plan in plan(), weather in weather(), seed in any::<u64>(), reduction in reduction()) {
        let shape = shape(plan.homes.len() as u8);
        let mut net = Tree::new(shape, &plan, weather, seed);
        contribute(&mut net, seed, reduction);
        prop_assert_eq!(finish(&mut net), expected(shape, seed, reduction));
    }

    /// r215: results go bad in the memory of any node. Redos go past the lower nodes, and mend it. (Not too many of them, nor
    /// in the worst weather: a rank that has all its results hears of a redo when it asks, every five seconds, and ranks
    /// give up after twenty.)
    #[test]
    fn r215_damage_is_redone_through_levels(plan in plan(), weather in weather(), seed in any::<u64>()) {
        let shape = shape(plan.homes.len() as u8);
        let mut net = Tree::new(shape, &plan, Weather { flips: 0.0, loss: weather.loss / 2.0, ..weather }, seed);
        contribute(&mut net, seed, Reduction::Sum);
        net.damage = 0.002;
        net.run_until_events(2, 3_000_000);
        net.damage = 0.0;
        prop_assert!(net.leave(3_000_000), "not complete {}", net.describe());
        prop_assert_eq!(net.results(), expected(shape, seed, Reduction::Sum));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, max_shrink_iters: 20, ..ProptestConfig::default() })]

    /// F22: all ranks of a node are one at its parent. The bits are those of one level.
    #[test]
    fn f22_nodes_for_ranks_do_not_change_a_bit(
        plan in two_levels(),
        weather in weather(),
        seed in any::<u64>(),
        reduction in reduction(),
    ) {
        let shape = shape(plan.homes.len() as u8);
        let mut net = Tree::with_names(shape, &plan, Naming::Nodes, weather, seed);
        contribute(&mut net, seed, reduction);
        prop_assert_eq!(finish(&mut net), expected(shape, seed, reduction));
    }

    /// F22 with results that go bad in the memory of any node: each collects a redo anew.
    #[test]
    fn f22_damage_is_redone_by_every_node(plan in two_levels(), weather in weather(), seed in any::<u64>()) {
        let shape = shape(plan.homes.len() as u8);
        let weather = Weather { flips: 0.0, loss: weather.loss / 2.0, ..weather };
        let mut net = Tree::with_names(shape, &plan, Naming::Nodes, weather, seed);
        contribute(&mut net, seed, Reduction::Sum);
        net.damage = 0.002;
        net.run_until_events(2, 3_000_000);
        net.damage = 0.0;
        prop_assert!(net.leave(3_000_000), "not complete {}", net.describe());
        prop_assert_eq!(net.results(), expected(shape, seed, Reduction::Sum));
    }
}

/// Many chunks are damaged at once: their redos are asked for by ranks of several nodes, and come one after the other.
#[test]
fn f22_redos_of_several_chunks_do_not_wait_for_each_other() {
    for seed in 0..12 {
        let weather = Weather { loss: 0.03, jitter: 60, ..FAIR };
        let mut net = Tree::with_names(shape(8), &two_racks(), Naming::Nodes, weather, seed);
        contribute(&mut net, seed, Reduction::Sum);
        net.damage = 0.03;
        net.run(3_000_000, |net| net.workers.iter().all(|worker| worker.chunks().0 > 20));
        net.damage = 0.0;
        assert_eq!(finish(&mut net), expected(shape(8), seed, Reduction::Sum), "seed {seed}");
    }
}

/// The test of damage would show nothing if nothing was redone, by ranks of several nodes.
#[test]
fn f22_damage_leads_to_redos_of_all_nodes() {
    let (mut asked, mut begun) = (0, [0; 3]);
    for seed in 0..10 {
        let weather = Weather { loss: 0.05, jitter: 30, ..FAIR };
        let mut net = Tree::with_names(shape(8), &two_racks(), Naming::Nodes, weather, seed);
        contribute(&mut net, seed, Reduction::Sum);
        net.damage = 0.01;
        net.run_until_events(2, 3_000_000);
        asked += net.workers.iter().map(|worker| worker.statistics().redos_asked).sum::<u64>();
        begun = std::array::from_fn(|site| begun[site] + net.sites[site].counted(Counted::Redos));
        assert!(net.sites.iter().all(|site| site.counted(Counted::PassedOn) < 10_000));
    }
    assert!(asked > 5 && begun.iter().all(|begun| *begun > 2), "{asked} asked for, {begun:?} begun");
}

/// More ranks than a packet has bits: 3 nodes of 40, and one rank at the root. Each takes one place there.
#[test]
fn f22_more_ranks_than_bits() {
    let homes = [vec![1; 40], vec![2; 40], vec![3; 40], vec![0]].concat();
    let plan = Plan { parents: vec![None, Some(0), Some(0), Some(0)], homes };
    let weather = Weather { loss: 0.02, duplication: 0.02, jitter: 60, flips: 0.002, delay: 20 };
    let mut net = Tree::with_names(shape(121), &plan, Naming::Nodes, weather, 5);
    for (rank, worker) in (0..).zip(&mut net.workers) {
        assert_eq!(worker.membership().total(), 121);
        let ints = (0..1000).map(|i| i % 77 - rank).collect();
        let floats = (0..1000).map(|i| (i % 13) as f32 / 8.0 - rank as f32).collect();
        let tensors = [("i", Values::I32(ints)), ("f", Values::F32(floats))];
        let tensors = tensors.map(|(name, values)| Tensor { name: name.into(), values });
        worker.all_reduce(Time(net.now), Reduction::Sum, tensors.into());
        let mean = Tensor { name: "mean".into(), values: Values::F32(vec![rank as f32; 70]) };
        worker.all_reduce(Time(net.now), Reduction::Mean, vec![mean]);
    }
    let ranks = 120 * 121 / 2;
    for tensors in finish(&mut net) {
        assert_eq!(tensors[0].values, Values::I32((0..1000).map(|i| i % 77 * 121 - ranks).collect()));
        let sum = |i: i32| (i % 13) as f32 / 8.0 * 121.0 - ranks as f32;
        assert_eq!(tensors[1].values, Values::F32((0..1000).map(sum).collect()));
        assert_eq!(tensors[2].values, Values::F32(vec![60.0; 70]));
    }
    let [root, racks @ ..] = &net.sites[..] else { unreachable!() };
    let results = root.counted(Counted::Completions);
    assert_eq!(root.counted(Counted::Contributions), 4 * results);
    assert!(racks.iter().all(|rack| rack.counted(Counted::Contributions) == 40 * results));
}

/// The ring of a node has room for what its ranks send, though it is given out by what the root tells.
#[test]
fn f22_a_ring_of_two_windows_is_long_enough() {
    let shape = Shape { world: 8, lanes: 64, window: 32, slots: 64 };
    let mut net = Tree::with_names(shape, &two_racks(), Naming::Nodes, Weather { jitter: 30, ..FAIR }, 3);
    for worker in &mut net.workers {
        let values = Values::F32(vec![1.0; 64 * 1000]);
        worker.all_reduce(Time(net.now), Reduction::Sum, vec![Tensor { name: "w".into(), values }]);
    }
    net.run_until_events(1, 1_000_000);
    for worker in &net.workers {
        assert_eq!(worker.statistics().busy, 0, "{:?}", worker.statistics());
    }
}

/// An answer without a result of the root to its rank 0, that tells this min_ack.
fn answer(min_ack: Seq) -> Header {
    let request = Request {
        kind: Kind::Pull,
        flags: 0,
        job: 0,
        worker: 0,
        generation: GENERATION,
        seq: Seq(0),
        want: min_ack,
        ack: Seq(0),
        progress: Seq(0),
        token: 0,
        bitmap: 0,
        tag: 0,
        chunk: Chunk::default(),
        next_exponent: 0,
        attempt: 0,
    };
    let mut header = request.encode();
    header.set_kind(Kind::Answer);
    header.seal();
    header
}

/// F13: a forged answer that tells of more acknowledgements than there are must not stop a node for good: its ring would be
/// given out for chunks to come, and those before counted as over.
#[test]
fn f13_a_forged_min_ack_stops_no_node() {
    for seed in 0..4 {
        let weather = Weather { loss: 0.05, jitter: 30, ..FAIR };
        let mut net = Tree::with_names(shape(8), &two_racks(), Naming::Nodes, weather, seed);
        contribute(&mut net, seed, Reduction::Sum);
        net.run(3_000_000, |net| net.workers[0].chunks().0 > 5);
        let acked = (0..4).map(|rank| net.sites[1].reached(rank).acked);
        let floor = acked.reduce(|least, acked| if acked.is_before(least) { acked } else { least }).unwrap();
        net.forge(Place::Site(0), 1, 1, answer(floor.plus(64)).as_bytes().to_vec());
        assert_eq!(finish(&mut net), expected(shape(8), seed, Reduction::Sum));
    }
}

/// The ring moves on although what the root told is lost: that a node's own ranks have acknowledged a chunk proves enough.
#[test]
fn f22_a_ring_needs_no_news() {
    for (window, slots) in [(1, 2), (8, 16), (8, 64)] {
        let shape = Shape { world: 8, lanes: 64, window, slots };
        let weather = Weather { loss: 0.05, jitter: 30, ..FAIR };
        let mut net = Tree::with_names(shape, &two_racks(), Naming::Nodes, weather, 6);
        net.forgetful = true;
        contribute(&mut net, 6, Reduction::Sum);
        net.run_until_events(2, 3_000_000);
        assert_eq!(net.results(), expected(shape, 6, Reduction::Sum));
    }
}

/// What comes to a node as an answer is its parent's, to the job's rank there, at the port of a rank that there is.
#[test]
fn f22_answers_of_others_are_dropped() {
    let mut net = Tree::with_names(shape(8), &two_racks(), Naming::Nodes, FAIR, 7);
    contribute(&mut net, 7, Reduction::Sum);
    net.run(3_000_000, |net| net.workers[0].chunks().0 > 5);
    let (good, root) = (answer(Seq(0)), Place::Site(0));
    let other = |change: fn(&mut Header)| {
        let mut header = good;
        change(&mut header);
        header.seal();
        header
    };
    let cases = [
        (Place::Rank(5), 1, good, Refusal::ForeignAddress),
        (Place::Rank(0), 1, good, Refusal::ForeignAddress),
        (Place::Site(2), 1, good, Refusal::ForeignAddress),
        // Where requests come to, and behind the last rank.
        (root, 0, good, Refusal::UnknownWorker),
        (root, 5, good, Refusal::UnknownWorker),
        (root, 64, good, Refusal::UnknownWorker),
        (root, u16::MAX, good, Refusal::UnknownWorker),
        (root, 1, other(|header| header.set_worker(1)), Refusal::UnknownWorker),
        (root, 1, other(|header| header.set_job(9)), Refusal::UnknownJob),
        (root, 1, other(|header| header.set_job(u16::MAX)), Refusal::UnknownJob),
        (root, 1, other(|header| header.set_generation(5)), Refusal::OldGeneration),
        (root, 1, other(|header| header.set_lanes(65)), Refusal::BadLanes),
    ];
    for (from, port, header, refusal) in cases {
        let before = net.sites[1].memory.counters.refused(refusal);
        net.forge(from, 1, port, header.as_bytes().to_vec());
        net.run(100_000, |net| net.sites[1].memory.counters.refused(refusal) > before);
    }
    assert_eq!(finish(&mut net), expected(shape(8), 7, Reduction::Sum));
}

/// Ranks of two nodes that do different things are told who disagrees with them: the other node's, not their own.
#[test]
fn f22_those_who_disagree_are_named() {
    let plan = Plan { parents: vec![None, Some(0), Some(0), Some(0)], homes: vec![1, 1, 2, 2, 3, 3, 0] };
    let mut told = 0;
    for seed in 0..8 {
        let weather = Weather { jitter: 200, ..FAIR };
        let mut net = Tree::with_names(shape(7), &plan, Naming::Nodes, weather, seed);
        // Numbers go by the root's seats: its own rank is the first.
        let numbers: Vec<u16> = net.workers.iter().map(|worker| worker.membership().number()).collect();
        for (rank, worker) in net.workers.iter_mut().enumerate() {
            let reduction = if rank < 4 { Reduction::Sum } else { Reduction::Max };
            let values = Values::F32(vec![1.0; 700]);
            worker.all_reduce(Time(net.now), reduction, vec![Tensor { name: "w".into(), values }]);
        }
        net.run_until_events(1, 1_000_000);
        for (rank, events) in net.events.iter().enumerate() {
            let Event::Failed { error: OperationError::Aborted { reason, ranks, .. }, .. } = &events[0]
            else {
                continue;
            };
            assert_eq!(*reason, Refusal::Mismatch);
            told += 1;
            let same = |other: &u16| {
                let other = numbers.iter().position(|number| number == other).unwrap();
                (other < 4) == (rank < 4)
            };
            assert!(!ranks.is_empty() && !ranks.iter().any(same), "rank {rank} of {numbers:?}: {ranks:?}");
        }
    }
    assert!(told > 8, "{told}");
}

/// The root ends the generation: its REJOIN comes down to every rank, whose node knows nothing of it.
#[test]
fn f22_the_end_of_a_generation_reaches_every_rank() {
    let weather = Weather { loss: 0.05, jitter: 40, ..FAIR };
    let mut net = Tree::with_names(shape(8), &two_racks(), Naming::Nodes, weather, 11);
    contribute(&mut net, 11, Reduction::Sum);
    net.run(3_000_000, |net| net.workers[0].chunks().0 > 5);
    net.sites[0].memory.jobs[0].generation += 1;
    net.run_until_events(1, 3_000_000);
    for events in &net.events {
        assert!(matches!(events[0], Event::Failed { error: OperationError::Rejoin, .. }), "{events:?}");
    }
}

/// Whoever waits is told whom for: the rank, if it is of the own node; otherwise the nodes that lack one.
#[test]
fn f22_the_missing_are_named() {
    let plan = Plan { parents: vec![None, Some(0), Some(0)], homes: vec![1, 1, 1, 2, 2, 2] };
    let mut net = Tree::with_names(shape(6), &plan, Naming::Nodes, FAIR, 9);
    net.silence(4);
    contribute(&mut net, 9, Reduction::Sum);
    net.run(3_000_000, |net| (0..6).all(|rank| rank == 4 || !net.events[rank].is_empty()));
    let missing = |rank: usize| match &net.events[rank][0] {
        Event::Failed { error: OperationError::Timeout { missing, .. }, .. } => missing.clone(),
        event => panic!("rank {rank}: {event:?}"),
    };
    for rank in [3, 5] {
        assert_eq!(missing(rank), [4], "rank {rank}");
    }
    for rank in 0..3 {
        assert_eq!(missing(rank), [3, 4, 5], "rank {rank}");
    }
}

/// The second test would show nothing if nothing was redone.
#[test]
fn damage_leads_to_redos() {
    let mut redos = 0;
    let mut passed = 0;
    for seed in 0..10 {
        let weather = Weather { loss: 0.05, jitter: 30, ..FAIR };
        let mut net = Tree::new(shape(8), &two_racks(), weather, seed);
        contribute(&mut net, seed, Reduction::Sum);
        net.damage = 0.01;
        net.run_until_events(2, 3_000_000);
        redos += net.workers.iter().map(|worker| worker.statistics().redos_asked).sum::<u64>();
        passed += net.sites[1].counted(Counted::PassedOn);
    }
    assert!(redos > 5 && passed > 5, "{redos} redos, {passed} passed on");
}

/// In fair weather the parent takes one sum of each rack for each chunk, and each result is kept once. (A rank whose answer
/// comes from further away than the next ones may think its request lost, so not every request is needed.)
#[test]
fn each_sum_counts_once() {
    let shape = Shape { world: 8, lanes: 352, window: 64, slots: 256 };
    let mut net = Tree::new(shape, &two_racks(), FAIR, 3);
    for worker in &mut net.workers {
        let values = Values::F32(vec![1.0; 352 * 1000]);
        worker.all_reduce(Time(net.now), Reduction::Sum, vec![Tensor { name: "w".into(), values }]);
    }
    net.run_until_events(1, 1_000_000);
    let (chunks, _) = net.workers[0].chunks();
    let [root, racks @ ..] = &net.sites[..] else { unreachable!() };
    let summed =
        [Counted::Sums, Counted::Contributions, Counted::Completions].map(|event| root.counted(event));
    assert_eq!(summed, [2 * chunks, 2 * chunks, chunks]);
    for rack in racks {
        let counted = |event| rack.counted(event);
        assert_eq!((counted(Counted::Contributions), counted(Counted::Completions)), (4 * chunks, chunks));
        let [requests, lifted, passed, down] =
            [Counted::Requests, Counted::Lifted, Counted::PassedOn, Counted::HandedDown].map(counted);
        assert_eq!(lifted + passed, down, "one answer for each request that went up");
        println!("{chunks} chunks: {requests} requests, {lifted} sums and {passed} others went up");
    }
    for worker in &net.workers {
        let s = worker.statistics();
        assert_eq!((s.failed_checks, s.busy, s.bad_tags), (0, 0, 0), "{s:?}");
    }
    assert!(net.results().iter().all(|result| result[0].values == Values::F32(vec![8.0; 352 * 1000])));
}

/// r214: the sum is lost on its way up. Any touch sends it again.
#[test]
fn r214_a_lost_sum_goes_up_again() {
    let mut net = Tree::new(shape(8), &two_racks(), FAIR, 4);
    net.lose_upwards = 40;
    contribute(&mut net, 4, Reduction::Sum);
    assert_eq!(finish(&mut net), expected(shape(8), 4, Reduction::Sum));
    assert_eq!(net.lose_upwards, 0);
    let again = net.sites[1].counted(Counted::Lifted) + net.sites[2].counted(Counted::Lifted);
    assert!(again >= 2 * net.sites[0].counted(Counted::Completions));
}

/// Shrink: a rank dies, and is expected no more, at the rack first or at the root first.
#[test]
fn a_dead_rank_is_left_out_at_both_levels_in_any_order() {
    for (first, second) in [(1, 0), (0, 1)] {
        for seed in 0..6 {
            let mut net = Tree::new(shape(8), &two_racks(), Weather { loss: 0.05, jitter: 40, ..FAIR }, seed);
            contribute(&mut net, seed, Reduction::Sum);
            net.run(3_000_000, |net| net.workers[3].chunks().0 > 5);
            net.silence(2);
            let steps = net.steps;
            net.run(5_000, |net| net.steps >= steps + 1_000);
            for site in [first, second] {
                let number = net.sites[site].number;
                net.sites[site].memory.jobs[number].expected &= !(1 << 2);
                let steps = net.steps;
                net.run(5_000, |net| net.steps >= steps + 300);
            }
            net.run_until_events(2, 3_000_000);
            let outputs = net.results();
            let alive: Vec<_> = (0..8).filter(|rank| *rank != 2).map(|rank| &outputs[rank]).collect();
            assert!(alive.iter().all(|output| *output == alive[0]), "ranks differ");
        }
    }
}

/// F16: only the root has a quorum. Every rank gets the same bits, whoever is in them.
#[test]
fn f16_a_quorum_at_the_root_decides_for_all() {
    let mut left_out = 0;
    for seed in 0..8 {
        let plan = Plan { parents: vec![None, Some(0), Some(0)], homes: vec![1, 1, 1, 2, 2, 0] };
        let mut net = Tree::new(shape(6), &plan, Weather { loss: 0.1, jitter: 300, ..FAIR }, seed);
        let mode = Mode { quorum: 3, staleness: Staleness::Unbounded };
        net.sites[0].memory.jobs[0].policy = Policy::settled(mode, 3);
        contribute(&mut net, seed, Reduction::Sum);
        net.run_until_events(2, 3_000_000);
        left_out += net.workers.iter().map(|worker| worker.statistics().excluded).sum::<u64>();
        let outputs = net.results();
        assert!(outputs.iter().all(|output| output == &outputs[0]), "ranks differ");
    }
    assert!(left_out > 0, "nobody was ever left out");
}

/// Ranks of different racks that do different things are told, also those whose contribution their rack has taken.
#[test]
fn disagreement_between_racks_ends_the_operation() {
    let mut net = Tree::new(
        shape(4),
        &Plan { parents: vec![None, Some(0), Some(0)], homes: vec![1, 1, 2, 2] },
        FAIR,
        9,
    );
    for (rank, worker) in net.workers.iter_mut().enumerate() {
        let reduction = if rank < 2 { Reduction::Sum } else { Reduction::Max };
        let values = Values::F32(vec![1.0; 700]);
        worker.all_reduce(Time(net.now), reduction, vec![Tensor { name: "w".into(), values }]);
    }
    net.run_until_events(1, 1_000_000);
    let is_told = |event: &Event| {
        matches!(
            event,
            Event::Failed { error: OperationError::Aborted { reason: Refusal::Mismatch, .. }, .. }
        )
    };
    let told = net.events.iter().filter(|events| events.iter().any(is_told)).count();
    assert!(told >= 2, "{:?}", net.events);
}

/// r213: what a lower node tells its parent of acknowledgements is the lowest of its ranks, so that the parent keeps what a
/// redo may need.
#[test]
fn r213_the_parent_hears_the_lowest_acknowledgement() {
    for seed in 0..10 {
        let mut net = Tree::new(shape(8), &two_racks(), Weather { loss: 0.2, jitter: 300, ..FAIR }, seed);
        contribute(&mut net, seed, Reduction::Sum);
        net.run(3_000_000, |net| {
            let told = |rank: usize| net.sites[0].reached(rank).acked;
            let has = |rank: usize| Seq(net.workers[rank].chunks().0 as u32);
            for rank in 0..8 {
                assert!(
                    !has(rank).is_before(told(rank)),
                    "rank {rank}: {:?} told, {:?} has",
                    told(rank),
                    has(rank)
                );
            }
            net.events.iter().all(|events| events.len() >= 2)
        });
    }
}
