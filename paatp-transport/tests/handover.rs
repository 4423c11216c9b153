//! Operations back to back: the exponents of one are agreed on while the one before is under way, and every rank decides
//! alike whether that worked.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use common::{FAIR, Net, Random, Shape, Weather, algorithm, settings, weather};
use paatp_common::wire::{Header, Kind, Operation, Request};
use paatp_transport::rate::Algorithm;
use paatp_transport::{Event, OperationError, Reduction, Settings, Tensor, Time, Values};
use proptest::prelude::*;

fn f32s(name: &str, values: Vec<f32>) -> Vec<Tensor> {
    vec![Tensor { name: name.into(), values: Values::F32(values) }]
}

/// One operation of a job: the same for all ranks but for the values.
#[derive(Clone, Debug)]
struct Job {
    reduction: Reduction,
    /// Lengths of its tensors; odd ones hold integers.
    lengths: Vec<usize>,
}

impl Job {
    /// Small integers times a power of two that differs between operations: every sum is exact.
    fn tensors(&self, number: usize, rank: u8) -> Vec<Tensor> {
        let value = |i: usize| (i % 7) as i32 - 3 + i32::from(rank);
        let scale = 2f32.powi(number as i32 % 9 * 3 - 12);
        let tensor = |(t, length): (usize, &usize)| {
            let values = (0..*length).map(value);
            let values = match length % 2 {
                0 => Values::F32(values.map(|v| v as f32 * scale).collect()),
                _ => Values::I32(values.collect()),
            };
            Tensor { name: format!("{number}.{t}"), values }
        };
        self.lengths.iter().enumerate().map(tensor).collect()
    }

    fn expected(&self, number: usize, world: u8) -> Vec<Tensor> {
        let all: Vec<Vec<Tensor>> = (0..world).map(|rank| self.tensors(number, rank)).collect();
        let mut result = all[0].clone();
        for (t, tensor) in result.iter_mut().enumerate() {
            match &mut tensor.values {
                Values::F32(values) => {
                    for (i, value) in values.iter_mut().enumerate() {
                        let column = all.iter().map(|rank| match &rank[t].values {
                            Values::F32(values) => values[i],
                            _ => unreachable!(),
                        });
                        *value = match self.reduction {
                            Reduction::Max => column.fold(f32::MIN, f32::max),
                            _ => column.sum(),
                        };
                    }
                }
                Values::I32(values) => {
                    for (i, value) in values.iter_mut().enumerate() {
                        let column = all.iter().map(|rank| match &rank[t].values {
                            Values::I32(values) => values[i],
                            _ => unreachable!(),
                        });
                        *value = match self.reduction {
                            Reduction::Max => column.max().unwrap(),
                            _ => column.sum(),
                        };
                    }
                }
                _ => unreachable!(),
            }
        }
        result
    }
}

fn jobs() -> impl Strategy<Value = Vec<Job>> {
    let reduction = prop_oneof![Just(Reduction::Sum), Just(Reduction::Max)];
    let length = prop_oneof![Just(0usize), 1..100usize, 200..900usize];
    let job = (reduction, proptest::collection::vec(length, 0..3))
        .prop_map(|(reduction, lengths)| Job { reduction, lengths });
    proptest::collection::vec(job, 1..9)
}

const DAY: Duration = Duration::from_secs(86_400);

/// How a run goes.
#[derive(Clone, Copy, Debug)]
struct Case {
    shape: Shape,
    algorithm: Algorithm,
    weather: Weather,
    seed: u64,
    /// How likely a rank queues the next operation at any moment.
    hurry: f64,
    staleness: u32,
}

/// Queues the jobs at random times at random ranks.
fn run(case: Case, jobs: &[Job]) {
    let Case { shape, algorithm, weather, seed, hurry, staleness } = case;
    // Ranks may dawdle for longer than any time-out.
    let settings = Settings { timeout: DAY, linger: DAY, staleness };
    let mut net = Net::with_algorithm(shape, weather, seed, settings, algorithm);
    let mut random = Random(!seed);
    let world = usize::from(shape.world);
    let mut queued = vec![0; world];
    net.pump_all();
    for _ in 0..3_000_000 {
        for (rank, queued) in queued.iter_mut().enumerate() {
            while *queued < jobs.len() && random.chance(hurry) {
                let (job, now) = (&jobs[*queued], net.time());
                net.workers[rank].all_reduce(now, job.reduction, job.tensors(*queued, rank as u8));
                *queued += 1;
                net.pump(rank as u8);
            }
        }
        if net.events.iter().all(|events| events.len() == jobs.len()) {
            break;
        }
        // If nothing is under way, whoever has not queued everything yet does so sooner or later.
        net.step();
    }
    assert!(
        net.events.iter().all(|events| events.len() == jobs.len()),
        "no end in sight: {}",
        net.describe()
    );
    assert!(net.leave(3_000_000), "not complete: {}", net.describe());
    for events in &net.events {
        let mut open: BTreeSet<u64> = (0..jobs.len() as u64).collect();
        for event in events {
            let Event::Done { handle, tensors, .. } = event else { panic!("{event:?}") };
            let number = handle.0 as usize;
            assert!(handle.0 - open.first().unwrap() <= u64::from(staleness) && open.remove(&handle.0));
            assert_eq!(tensors, &jobs[number].expected(number, shape.world));
        }
    }
    let rounds: BTreeSet<u64> = net.workers.iter().map(|worker| worker.statistics().rounds).collect();
    assert_eq!(rounds.len(), 1, "ranks disagree on rounds: {rounds:?}");
    for worker in &net.workers {
        let (statistics, (delivered, queued)) = (worker.statistics(), worker.chunks());
        assert_eq!((delivered, statistics.results, statistics.contributions), (queued, queued, queued));
    }
}

fn shape() -> impl Strategy<Value = Shape> {
    (1..=4u8, 1..=8u16, 0..2u32).prop_map(|(world, window, spare)| Shape {
        world,
        lanes: 32,
        window,
        slots: (u32::from(window) * 2).next_power_of_two() << spare,
    })
}

fn case() -> impl Strategy<Value = Case> {
    let hurry = prop_oneof![Just(1.0), (0.3..4.0f64).prop_map(|digits| 10f64.powf(-digits))];
    (shape(), algorithm(), weather(), any::<u64>(), hurry, prop_oneof![Just(0), 1..4u32]).prop_map(
        |(shape, algorithm, weather, seed, hurry, staleness)| Case {
            shape,
            algorithm,
            weather,
            seed,
            hurry,
            staleness,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, max_shrink_iters: 200, ..ProptestConfig::default() })]

    /// Whenever ranks queue what they queue, in any weather: the results are right, not further out of order than allowed,
    /// and no rank thinks that there is a round where another does not.
    #[test]
    fn operations_queued_at_any_time_are_reduced(
        case in case(), jobs in jobs(),
    ) {
        run(case, &jobs);
    }
}

/// In [`FAIR`] weather, in µs.
const ROUND_TRIP: u64 = 2 * FAIR.delay;
const SHAPE: Shape = Shape { world: 3, lanes: 32, window: 8, slots: 16 };

/// Time until all operations of so many chunks each are done, if they are queued together, and the number of rounds.
fn time_of(world: u8, window: u16, chunks: &[usize]) -> (u64, u64) {
    let shape = Shape { world, lanes: 32, window, slots: 2 * u32::from(window) };
    let mut net = Net::new(shape, FAIR, 1);
    for worker in &mut net.workers {
        for (number, chunks) in chunks.iter().enumerate() {
            let values = vec![2f32.powi(number as i32 % 8); chunks * 32];
            worker.all_reduce(Time(net.now), Reduction::Sum, f32s("w", values));
        }
    }
    let start = net.now;
    net.run_until_events(chunks.len(), 1_000_000);
    assert!(net.events.iter().flatten().all(|event| matches!(event, Event::Done { .. })));
    (net.now - start, net.workers[0].statistics().rounds)
}

/// Operations that are queued together take as long as one of their length: there is one round, at the beginning, and the
/// pipe never runs empty. Nor do short ones stop it, if the first is a window long.
#[test]
fn there_is_no_idle_round_trip_between_operations() {
    for (world, window) in [(1, 8), (3, 8), (3, 64), (8, 16)] {
        let (one, rounds) = time_of(world, window, &[800]);
        assert_eq!(rounds, 1);
        let short = [[usize::from(window)].as_slice(), &[3; 240], &[80 - usize::from(window)]].concat();
        for chunks in [[400, 400].as_slice(), &[80; 10], &short] {
            let (many, rounds) = time_of(world, window, chunks);
            assert_eq!(rounds, 1);
            assert!(many < one + ROUND_TRIP, "{world} ranks, W = {window}: {many} instead of {one} µs");
        }
    }
    // Without competition for who completes a chunk it is the same to the microsecond.
    assert_eq!(time_of(1, 8, &[400, 400]), time_of(1, 8, &[800]));
}

/// Who begins within a window of a round has one as well, and waits for it.
#[test]
fn a_short_operation_after_a_round_has_one_too() {
    let (one, two) = (time_of(1, 8, &[16]), time_of(1, 8, &[7, 9]));
    assert_eq!(two, (one.0 + ROUND_TRIP, 2));
}

/// One rank queues the second operation too late: all ranks have the round.
#[test]
fn one_rank_that_does_not_know_makes_a_round() {
    for late in [0, 1] {
        let mut net = Net::new(SHAPE, FAIR, 1);
        for worker in &mut net.workers {
            worker.all_reduce(Time(net.now), Reduction::Sum, f32s("a", vec![1.0; 3200]));
        }
        for rank in late..3 {
            net.workers[rank].all_reduce(Time(net.now), Reduction::Sum, f32s("b", vec![2.0; 3200]));
        }
        if late == 1 {
            net.run(100_000, |net| net.workers[0].chunks().0 == 95);
            net.workers[0].all_reduce(Time(net.now), Reduction::Sum, f32s("b", vec![2.0; 3200]));
        }
        net.run_until_events(2, 100_000);
        assert!(net.workers.iter().all(|worker| worker.statistics().rounds == 1 + late as u64));
        assert!(net.results().iter().all(|all| all[1].values == Values::F32(vec![6.0; 3200])));
    }
}

/// Bad values among the first chunks of an operation fail that one, not the one before, though they are found there.
#[test]
fn bad_values_behind_the_border_spare_the_operation_before() {
    for index in [0, 31, 32, 255, 256, 700] {
        let mut net = Net::new(SHAPE, Weather { loss: 0.1, jitter: 40, ..FAIR }, index as u64);
        for (rank, worker) in net.workers.iter_mut().enumerate() {
            let mut values = vec![1.0; 800];
            if rank == 2 {
                values[index] = f32::NAN;
            }
            worker.all_reduce(Time(net.now), Reduction::Sum, f32s("good", vec![1.0; 800]));
            worker.all_reduce(Time(net.now), Reduction::Sum, f32s("bad", values));
            worker.all_reduce(Time(net.now), Reduction::Sum, f32s("late", vec![1.0; 800]));
        }
        net.run_until_events(3, 100_000);
        assert!(net.leave(100_000));
        // What is found one window ahead within the operation needs no round.
        let rounds = if index < 256 { 2 } else { 1 };
        for (rank, events) in net.events.iter().enumerate() {
            assert_eq!(net.workers[rank].statistics().rounds, rounds, "index {index}");
            let of = |number| {
                let handle = |e: &&Event| matches!(e, Event::Done { handle, .. } | Event::Failed { handle, .. } if handle.0 == number);
                events.iter().find(handle).unwrap()
            };
            let (good, bad, late) = (of(0), of(1), of(2));
            assert!(
                matches!(good, Event::Done { tensors, .. } if tensors[0].values == Values::F32(vec![3.0; 800]))
            );
            assert!(matches!(late, Event::Failed { error: OperationError::Over, .. }));
            match bad {
                Event::Failed { error: OperationError::NonFinite { tensor, index: at, .. }, .. } => {
                    assert_eq!((rank, tensor.as_str(), *at), (2, "bad", index));
                }
                Event::Failed { error: OperationError::PeerNonFinite { rank: 2, tensor, .. }, .. } => {
                    assert_eq!(tensor, "bad");
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

/// The largest exponent of all stands for "unknown" at the border: values that need it cost a round, and are right.
#[test]
fn the_largest_values_cost_a_round() {
    let mut net = Net::new(SHAPE, FAIR, 1);
    for (rank, worker) in net.workers.iter_mut().enumerate() {
        let large = if rank == 1 { 2f32.powi(127) } else { 0.0 };
        worker.all_reduce(Time(net.now), Reduction::Sum, f32s("a", vec![1.0; 800]));
        worker.all_reduce(Time(net.now), Reduction::Sum, f32s("b", vec![large; 800]));
    }
    net.run_until_events(2, 100_000);
    assert!(net.workers.iter().all(|worker| worker.statistics().rounds == 2));
    assert!(net.results().iter().all(|all| all[1].values == Values::F32(vec![2f32.powi(127); 800])));
}

/// Ranks that issue different operations behind a border without a round are told all the same: their chunks carry the
/// fingerprint too.
#[test]
fn different_operations_behind_the_border_are_told() {
    let mut net = Net::new(SHAPE, FAIR, 1);
    for (rank, worker) in net.workers.iter_mut().enumerate() {
        let name = if rank == 1 { "c" } else { "b" };
        worker.all_reduce(Time(net.now), Reduction::Sum, f32s("a", vec![1.0; 800]));
        worker.all_reduce(Time(net.now), Reduction::Sum, f32s(name, vec![1.0; 800]));
    }
    net.run(100_000, |net| net.events.iter().any(|events| events.len() > 1));
    let aborted = |event: &Event| matches!(event, Event::Failed { error: OperationError::Aborted { tensor, .. }, .. } if tensor == "b" || tensor == "c");
    assert!(net.events.iter().any(|events| events.iter().any(aborted)), "{:?}", net.events);
}

/// All ranks send the same kind of packet for each chunk, rounds where rounds are.
#[test]
fn rounds_are_header_only_and_where_everybody_has_them() {
    let mut net = Net::new(SHAPE, Weather { loss: 0.2, jitter: 30, ..FAIR }, 3);
    let kinds = Rc::new(RefCell::new(BTreeSet::new()));
    let seen = kinds.clone();
    net.filter = Some(Box::new(move |_, datagram| {
        let request = Request::decode(Header::of(datagram).unwrap()).unwrap();
        if request.kind == Kind::Data {
            let operation = request.chunk.operation().unwrap();
            seen.borrow_mut().insert((request.seq.0, operation == Operation::Exponents, request.chunk.lanes));
        }
        true
    }));
    for worker in &mut net.workers {
        for chunks in [20, 0, 3, 4, 9, 30] {
            worker.all_reduce(Time(net.now), Reduction::Sum, f32s("w", vec![1.0; chunks * 32]));
        }
    }
    net.run_until_events(6, 100_000);
    let kinds = kinds.borrow();
    let rounds: Vec<u32> = kinds.iter().filter(|(_, round, _)| *round).map(|(seq, ..)| *seq).collect();
    // The empty operation is a round, and moves what begins within a window of it.
    assert_eq!(rounds, [0, 21, 22, 26, 31]);
    assert!(kinds.iter().all(|(_, round, lanes)| *lanes == if *round { 0 } else { 32 }));
    assert_eq!(kinds.len() as u64, net.workers[0].chunks().1);
}

/// How many of eight short operations are handed out before an earlier one, over all ranks, in rough weather.
fn overtakers(seed: u64, staleness: u32) -> usize {
    let weather = Weather { loss: 0.2, jitter: 60, ..FAIR };
    let mut net = Net::with_settings(SHAPE, weather, seed, Settings { staleness, ..settings() });
    for worker in &mut net.workers {
        for value in 0..8 {
            worker.all_reduce(Time(net.now), Reduction::Sum, f32s("w", vec![value as f32; 64]));
        }
    }
    net.run_until_events(8, 100_000);
    let mut overtakers = 0;
    for events in &net.events {
        let mut open: BTreeSet<u64> = (0..8).collect();
        for event in events {
            let Event::Done { handle, tensors, .. } = event else { panic!("{event:?}") };
            assert_eq!(tensors[0].values, Values::F32(vec![3.0 * handle.0 as f32; 64]));
            let ahead = handle.0 - open.first().unwrap();
            assert!(ahead <= u64::from(staleness) && open.remove(&handle.0));
            overtakers += usize::from(ahead > 0);
        }
    }
    assert!(net.leave(100_000));
    overtakers
}

#[test]
fn operations_overtake_as_far_as_staleness_allows() {
    let count = |staleness| (0..80).map(|seed| overtakers(seed, staleness)).sum::<usize>();
    let counts = [0, 1, 2].map(count);
    assert!(counts[0] == 0 && counts[1] > 20 && counts[2] >= counts[1], "{counts:?}");
}

/// The bits of results do not depend on when operations were queued, although some then begin with a round.
#[test]
fn the_bits_do_not_depend_on_when_operations_are_queued() {
    let run = |late: bool| {
        let mut net = Net::new(SHAPE, FAIR, 1);
        for number in 0..3 {
            for (rank, worker) in net.workers.iter_mut().enumerate() {
                let mut random = Random(number * 10 + rank as u64);
                // Magnitudes differ from chunk to chunk, so that a scale of its own would change digits.
                let value = |i: u64| (random.unit() * 10f64.powi((i / 32 % 7) as i32 - 3)) as f32;
                worker.all_reduce(Time(net.now), Reduction::Sum, f32s("w", (0..1000).map(value).collect()));
            }
            if late {
                net.run_until_events(number as usize + 1, 100_000);
            }
        }
        net.run_until_events(3, 100_000);
        (net.workers[0].statistics().rounds, net.results())
    };
    let ((early_rounds, early), (late_rounds, late)) = (run(false), run(true));
    assert_eq!((early_rounds, late_rounds), (1, 3));
    assert_eq!(early, late);
}
