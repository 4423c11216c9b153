//! Quorums, staleness and changes of both while packets flow: every rank sees the same mode for every operation, and no
//! value is lost or counted twice.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;

use common::{Aggregator, FAIR, GENERATION, Net, Random, Shape, Weather};
use paatp_common::Seq;
use paatp_common::policy::{Mode, Policy, QUORUM_ALL, Staleness};
use paatp_transport::{Event, Reduction, Synchronisation, Tensor, Time, Values};

const STORMY: Weather = Weather { loss: 0.1, duplication: 0.1, flips: 0.0, delay: 50, jitter: 300 };
const BSP: Mode = Mode::BSP;

fn quorum(quorum: u8, staleness: Staleness) -> Mode {
    Mode { quorum, staleness }
}

/// The control plane's half of a change, as the daemon does it. Returns whether another mode is wanted now.
fn ask_for(aggregator: &mut Aggregator, mode: Mode) -> bool {
    let world = usize::from(aggregator.jobs[0].world);
    let acked = |rank| aggregator.progress[0].reached(GENERATION, rank).acked;
    let min_ack = (0..world).map(acked).min_by_key(|ack| ack.0).unwrap_or(Seq(0));
    let policy = aggregator.jobs[0].policy;
    if !policy.is_armed() && !policy.is_over(min_ack) {
        return false;
    }
    let now = if policy.is_armed() { policy } else { policy.when_over() };
    aggregator.jobs[0].policy = now.armed(mode);
    !policy.is_armed() && aggregator.jobs[0].policy.is_armed()
}

/// A job of operations on two tensors, whose ranks each take their time.
struct Job {
    shape: Shape,
    weather: Weather,
    seed: u64,
    operations: u64,
    /// Chunks of each tensor, at most.
    elements: [usize; 2],
    /// Longest time in µs that each rank takes to compute.
    computing: Vec<u64>,
    /// Probability that a mode is asked for, for each request that reaches the aggregator.
    changes: f64,
    mode: Mode,
    /// A rank whose values are [`LOUD`] times as large as the others'.
    loud: Option<u8>,
}

/// Far beyond the headroom of an exponent that the others agreed on, and all sums are exact in f32 still.
const LOUD: i32 = 64;

/// What came of it.
#[derive(Debug, Default)]
struct Came {
    changes: usize,
    modes: BTreeSet<(u8, u8)>,
    excluded: u64,
    skipped: u64,
    rounds: u64,
}

fn value(seed: u64, rank: u8, operation: u64, element: usize) -> i32 {
    let mut random =
        Random(seed ^ operation.wrapping_mul(0x9E37) ^ (element as u64) << 32 ^ u64::from(rank) << 56);
    (random.next() % 2001) as i32 - 1000
}

fn tensors(job: &Job, rank: u8, operation: u64) -> Vec<Tensor> {
    let loudness = if job.loud == Some(rank) { LOUD } else { 1 };
    let of = |tensor: usize| {
        (0..job.elements[tensor]).map(move |i| loudness * value(job.seed, rank, operation, i * 2 + tensor))
    };
    vec![
        Tensor { name: "f".into(), values: Values::F32(of(0).map(|value| value as f32).collect()) },
        Tensor { name: "i".into(), values: Values::I32(of(1).collect()) },
    ]
}

fn add(sums: &mut [Vec<f64>; 2], tensors: &[Tensor]) {
    for (sum, tensor) in sums.iter_mut().zip(tensors) {
        match &tensor.values {
            Values::F32(values) => {
                sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += f64::from(*value))
            }
            Values::I32(values) => {
                sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += f64::from(*value))
            }
            values => panic!("{values:?}"),
        }
    }
}

impl Job {
    fn run(&self) -> Came {
        let world = self.shape.world;
        let mut net = Net::new(self.shape, self.weather, self.seed);
        net.aggregator.jobs[0].policy = Policy::settled(self.mode, 0);
        let changes = Rc::new(RefCell::new(0));
        let (counted, chance) = (Rc::clone(&changes), self.changes);
        net.meddle = Some(Box::new(move |aggregator, random| {
            if random.chance(chance) {
                let quorum = random.below(u64::from(world)) as u8;
                let staleness = match random.below(4) {
                    3 => Staleness::Unbounded,
                    most => Staleness::Bounded(most as u8),
                };
                *counted.borrow_mut() += usize::from(ask_for(aggregator, Mode { quorum, staleness }));
            }
        }));
        let mut issued = vec![0; usize::from(world)];
        let mut ready: Vec<u64> = vec![net.now; usize::from(world)];
        let mut put_in = [vec![0.0; self.elements[0]], vec![0.0; self.elements[1]]];
        let mut pace = Random(self.seed ^ 0xFACE);
        while net.events.iter().any(|events| events.len() as u64 <= self.operations) {
            for rank in 0..world {
                let index = usize::from(rank);
                let (at, worker) = (ready[index], &mut net.workers[index]);
                if issued[index] > self.operations || at > net.now || !worker.may_begin() {
                    continue;
                }
                let tensors = tensors(self, rank, issued[index]);
                add(&mut put_in, &tensors);
                if issued[index] < self.operations {
                    worker.all_reduce(Time(net.now), Reduction::Sum, tensors);
                } else {
                    worker.flush(Time(net.now), Reduction::Sum, tensors);
                }
                worker.end_iteration();
                issued[index] += 1;
                ready[index] = net.now + pace.below(self.computing[index] + 1);
                net.pump(rank);
            }
            assert!(net.steps < 40_000_000, "{}", net.describe());
            let failed = |event: &&Event| matches!(event, Event::Failed { .. });
            if let Some(event) = net.events.iter().flatten().find(failed) {
                panic!("{event:?}\n{}", net.describe());
            }
            // Computing goes on where the network is silent.
            let next = ready.iter().filter(|at| **at > net.now).min().copied();
            if net.next_at().is_none_or(|at| next.is_some_and(|next| next < at)) {
                net.now = next.unwrap_or_else(|| panic!("everything is silent\n{}", net.describe()));
            } else {
                net.step();
            }
        }
        assert!(net.leave(10_000_000), "{}", net.describe());
        let mut came = Came { changes: changes.take(), ..Came::default() };
        for worker in &net.workers {
            let statistics = worker.statistics();
            came.excluded += statistics.excluded;
            came.skipped += statistics.skipped;
            came.rounds += statistics.rounds;
            assert_eq!(worker.residuals().count(), 0, "the flush left something");
            assert_eq!(statistics.contributions + statistics.skipped, statistics.results);
        }
        let mut came_out = [vec![0.0; self.elements[0]], vec![0.0; self.elements[1]]];
        for operation in 0..=self.operations as usize {
            let outcome = |events: &Vec<Event>| match &events[operation] {
                Event::Done { tensors, synchronisation, .. } => (tensors.clone(), *synchronisation),
                event => panic!("{event:?}"),
            };
            let first = outcome(&net.events[0]);
            for events in &net.events[1..] {
                assert!(outcome(events) == first, "ranks differ in operation {operation}");
            }
            add(&mut came_out, &first.0);
            let Synchronisation { epoch, told } = first.1;
            came.modes.insert((epoch, told.0));
        }
        assert_eq!(put_in, came_out, "{came:?}");
        came
    }
}

fn job(seed: u64, mode: Mode) -> Job {
    Job {
        shape: Shape { world: 4, lanes: 32, window: 4, slots: 16 },
        weather: FAIR,
        seed,
        operations: 40,
        elements: [200, 150],
        computing: vec![100, 100, 100, 100],
        changes: 0.0,
        mode,
        loud: None,
    }
}

/// Part 2.8: the slow rank takes results for operations that it has not issued, and skips what was complete without it.
#[test]
fn r28_a_quorum_loses_nothing_and_does_not_wait_for_the_slow() {
    let slow = |mode| Job { computing: vec![100, 100, 100, 3000], ..job(5, mode) };
    let waiting = slow(BSP).run();
    assert_eq!((waiting.excluded, waiting.skipped), (0, 0));
    let quick = slow(quorum(3, Staleness::NONE)).run();
    assert!(quick.skipped + quick.excluded > 0, "{quick:?}");
    assert!(quick.rounds < waiting.rounds, "{quick:?}");
}

/// Part 2.7: values of a rank that was not asked do not fit the exponent of the others. What is beyond it goes into the
/// residual, and comes later.
#[test]
fn r27_values_beyond_an_exponent_of_others_come_later() {
    for seed in 0..10 {
        let slow = Job { computing: vec![100, 100, 100, 3000], ..job(seed, quorum(3, Staleness::NONE)) };
        let came = Job { loud: Some(3), ..slow }.run();
        assert!(came.excluded + came.skipped > 0, "{came:?}");
    }
}

#[test]
fn a_quorum_of_one_is_right_as_well() {
    for seed in 0..10 {
        let weather = if seed % 2 == 0 { FAIR } else { STORMY };
        let job = Job {
            weather,
            computing: vec![50, 500, 2000, 5000],
            ..job(seed, quorum(1, Staleness::Unbounded))
        };
        let came = job.run();
        assert!(came.excluded + came.skipped > 0);
    }
}

/// The mode is changed hundreds of times while operations run, under loss, duplication and reordering. Ranks take it from
/// the results, in their order (part 2.9).
#[test]
fn f23_r29_every_rank_sees_the_same_mode_for_every_operation() {
    let (mut changes, mut modes, mut came) = (0, 0, (0, 0));
    for seed in 0..24 {
        let shapes = [
            Shape { world: 4, lanes: 32, window: 4, slots: 16 },
            Shape { world: 3, lanes: 64, window: 1, slots: 2 },
            Shape { world: 2, lanes: 32, window: 8, slots: 16 },
            Shape { world: 5, lanes: 32, window: 2, slots: 8 },
        ];
        let shape = shapes[seed as usize % 4];
        let job = Job {
            shape,
            weather: if seed % 3 == 0 { FAIR } else { STORMY },
            computing: vec![300, 100, 2000, 500, 100][..usize::from(shape.world)].to_vec(),
            changes: 0.012,
            ..job(seed, BSP)
        };
        let outcome = job.run();
        changes += outcome.changes;
        modes += outcome.modes.len();
        came = (came.0 + outcome.excluded, came.1 + outcome.skipped);
    }
    assert!(changes > 300 && modes > 200, "{changes} changes, {modes} seen");
    assert!(came.0 > 0 && came.1 > 0, "{came:?}");
}

/// F7: what comes late is given back once, however often the answer says so.
#[test]
fn f7_what_was_left_out_is_given_back_once() {
    let weather = Weather { duplication: 0.9, loss: 0.3, ..STORMY };
    let job = Job { weather, computing: vec![0, 0, 900, 900], ..job(3, quorum(2, Staleness::Bounded(1))) };
    assert!(job.run().excluded > 0);
}

#[test]
fn a_rank_is_never_further_ahead_than_staleness_allows() {
    for most in [0, 1, 3] {
        let mode = Mode { quorum: QUORUM_ALL, staleness: Staleness::Bounded(most) };
        let mut net = Net::new(Shape { world: 2, lanes: 32, window: 2, slots: 4 }, FAIR, 1);
        net.aggregator.jobs[0].policy = Policy::settled(mode, 0);
        let tensor = || vec![Tensor { name: "w".into(), values: Values::F32(vec![1.0; 100]) }];
        // The first result tells the mode; before it nobody runs ahead.
        for rank in 0..2 {
            assert!(net.workers[rank].may_begin());
            net.workers[rank].all_reduce(Time(net.now), Reduction::Sum, tensor());
            net.workers[rank].end_iteration();
            assert!(!net.workers[rank].may_begin());
        }
        net.run_until_events(1, 100_000);
        let mut ahead = 0;
        while net.workers[0].may_begin() {
            net.workers[0].all_reduce(Time(net.now), Reduction::Sum, tensor());
            net.workers[0].end_iteration();
            ahead += 1;
        }
        assert_eq!(ahead, u32::from(most) + 1);
    }
}
