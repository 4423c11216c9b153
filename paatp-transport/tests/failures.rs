//! Failures: values that cannot be reduced, ranks that are missing. Everybody learns of it, and nobody hangs.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use common::{FAIR, Net, Shape, Weather, shape, weather};
use half::f16;
use paatp_transport::{Event, Handle, OperationError, Reduction, Tensor, Time, Values};
use proptest::prelude::*;

const SHAPE: Shape = Shape { world: 3, lanes: 32, window: 4, slots: 8 };
const ROUGH: Weather = Weather { loss: 0.15, duplication: 0.1, flips: 0.02, delay: 20, jitter: 80 };

fn tensor(values: Vec<f32>) -> Vec<Tensor> {
    vec![Tensor { name: "w".into(), values: Values::F32(values) }]
}

fn error(event: &Event) -> (Handle, &OperationError) {
    match event {
        Event::Failed { handle, error } => (*handle, error),
        event => panic!("{event:?}"),
    }
}

/// NaN and infinities at every place, in every reduction, in rough weather; an operation before and one after.
#[test]
fn non_finite_values_fail_the_operation_everywhere() {
    for (seed, index) in [0, 1, 31, 100, 127, 128, 129, 300, 511, 999].into_iter().enumerate() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for reduction in [Reduction::Sum, Reduction::Min] {
                let mut net = Net::new(SHAPE, ROUGH, seed as u64);
                for (rank, worker) in net.workers.iter_mut().enumerate() {
                    let mut values = vec![1.0; 1000];
                    if rank == 1 {
                        values[index] = bad;
                    }
                    worker.all_reduce(Time(1_000_000), reduction, tensor(vec![2.0; 300]));
                    worker.all_reduce(Time(1_000_000), reduction, tensor(values));
                    worker.all_reduce(Time(1_000_000), reduction, tensor(vec![2.0; 300]));
                }
                net.run_until_events(3, 500_000);
                assert!(net.now < 15_000_000, "nobody waited for a timeout");
                assert!(net.leave(500_000), "everybody knows");
                for (rank, events) in net.events.iter().enumerate() {
                    let mut failed = Vec::new();
                    for event in events {
                        match event {
                            Event::Done { handle, .. } => assert_eq!(*handle, Handle(0)),
                            event => failed.push(error(event)),
                        }
                    }
                    assert_eq!((failed[0].0, failed[1]), (Handle(1), (Handle(2), &OperationError::Over)));
                    match failed[0].1 {
                        OperationError::NonFinite { tensor, index: i, value } => {
                            assert_eq!((rank, tensor.as_str(), *i), (1, "w", index));
                            assert!(value.to_bits() == bad.to_bits());
                        }
                        OperationError::PeerNonFinite { rank: 1, tensor, .. } => {
                            assert_eq!((rank != 1, tensor.as_str()), (true, "w"))
                        }
                        other => panic!("{other:?}"),
                    }
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, max_shrink_iters: 30, ..ProptestConfig::default() })]

    /// Wherever bad values sit, at one rank or at several: the operation before is done at all ranks, the operation fails
    /// at all ranks, nobody waits for a timeout, and everybody leaves knowing that all others know.
    #[test]
    fn bad_values_fail_the_operation_at_every_rank(
        shape in shape(), weather in weather(), seed in any::<u64>(),
        bad in proptest::collection::vec((0..5usize, 0..2000usize), 1..4),
    ) {
        let mut net = Net::new(shape, weather, seed);
        let world = usize::from(shape.world);
        for (rank, worker) in net.workers.iter_mut().enumerate() {
            let mut values = vec![1.0; 2000];
            for (_, index) in bad.iter().filter(|(at, _)| at % world == rank) {
                values[*index] = f32::NAN;
            }
            worker.all_reduce(Time(net.now), Reduction::Sum, tensor(vec![2.0; 200]));
            worker.all_reduce(Time(net.now), Reduction::Sum, tensor(values));
        }
        net.run_until_events(2, 3_000_000);
        prop_assert!(net.leave(3_000_000), "{}", net.describe());
        prop_assert!(net.now < 15_000_000);
        for events in &net.events {
            let done = |e: &&Event| matches!(e, Event::Done { handle: Handle(0), .. });
            prop_assert_eq!(events.iter().filter(done).count(), 1);
            let failed = |e: &&Event| match e {
                Event::Failed { handle: Handle(1), error } => {
                    matches!(error, OperationError::NonFinite { .. } | OperationError::PeerNonFinite { .. })
                }
                _ => false,
            };
            prop_assert_eq!(events.iter().filter(failed).count(), 1);
        }
    }
}

/// Two ranks have bad values at different places: all get an error, nobody a result.
#[test]
fn the_first_bad_chunk_counts() {
    for seed in 0..20 {
        let mut net = Net::new(SHAPE, ROUGH, seed);
        for (rank, worker) in net.workers.iter_mut().enumerate() {
            let mut values = vec![1.0; 1000];
            match rank {
                0 => values[700] = f32::NAN,
                2 => values[300 + seed as usize * 20] = f32::INFINITY,
                _ => {}
            }
            worker.all_reduce(Time(1_000_000), Reduction::Sum, tensor(values));
        }
        net.run_until_events(1, 500_000);
        assert!(net.leave(500_000));
        assert!(net.now < 15_000_000);
        assert!(net.events.iter().all(|events| matches!(events[..], [Event::Failed { .. }])));
    }
}

#[test]
fn integers_out_of_range_fail_the_operation_everywhere() {
    for index in [3, 500] {
        let mut net = Net::new(SHAPE, FAIR, 1);
        for (rank, worker) in net.workers.iter_mut().enumerate() {
            let mut values = vec![7; 600];
            if rank == 2 {
                values[index] = i32::MIN;
            }
            let values = Values::I32(values);
            worker.all_reduce(Time(1_000_000), Reduction::Mean, vec![Tensor { name: "i".into(), values }]);
        }
        net.run_until_events(1, 500_000);
        assert!(net.leave(500_000));
        let limit = (1 << 31) / 3;
        let own = OperationError::IntegerRange { tensor: "i".into(), index, value: i32::MIN, limit };
        assert_eq!(error(&net.events[2][0]).1, &own);
        let peer = OperationError::PeerNonFinite { rank: 2, among: 1, tensor: "i".into() };
        assert!(net.events[..2].iter().all(|events| error(&events[0]).1 == &peer));
    }
}

/// A finite result that the type cannot hold: the same error at every rank, for the first such element.
#[test]
fn results_out_of_range_are_the_same_error_everywhere() {
    for seed in 0..20 {
        let mut net = Net::new(SHAPE, ROUGH, seed);
        for worker in &mut net.workers {
            let mut values = vec![f16::ONE; 600];
            values[200] = f16::MAX;
            values[250] = f16::MIN;
            values[550] = f16::MAX;
            let values = Values::F16(values);
            worker.all_reduce(Time(1_000_000), Reduction::Sum, tensor(vec![1.0; 40]));
            worker.all_reduce(Time(1_000_000), Reduction::Sum, vec![Tensor { name: "h".into(), values }]);
        }
        net.run_until_events(2, 500_000);
        assert!(net.leave(500_000));
        for events in &net.events {
            assert!(matches!(events[0], Event::Done { .. }));
            assert_eq!(error(&events[1]).1, &OperationError::ResultRange { tensor: "h".into(), index: 200 });
        }
    }
}

/// A rank that never starts is named by all others, within the timeout, although only the exponent round is open.
#[test]
fn a_rank_that_never_starts_is_named() {
    let mut net = Net::new(SHAPE, FAIR, 1);
    net.silent[1] = true;
    for rank in [0, 2] {
        net.workers[rank].all_reduce(Time(1_000_000), Reduction::Sum, tensor(vec![1.0; 1000]));
    }
    net.run_until_events(1, 100_000);
    assert!(net.now <= 1_000_000 + 20_100_000);
    for rank in [0, 2] {
        let OperationError::Timeout { missing, tensor, .. } = error(&net.events[rank][0]).1 else { panic!() };
        assert_eq!((missing.as_slice(), tensor.as_str()), ([1].as_slice(), "w"));
    }
    assert!(!net.leave(10));
}

/// A rank that stops midway is named by all others; what happens after a timeout is over at once.
#[test]
fn a_rank_that_stops_midway_is_named() {
    for seed in 0..30 {
        let mut net = Net::new(SHAPE, ROUGH, seed);
        for worker in &mut net.workers {
            worker.all_reduce(Time(1_000_000), Reduction::Sum, tensor(vec![1.0; 3000]));
        }
        net.run(100_000, |net| net.workers[2].chunks().0 > 10 + seed);
        net.silent[2] = true;
        let stopped = net.now;
        net.run_until_events(1, 100_000);
        assert!(net.now < stopped + 21_000_000);
        for rank in 0..2 {
            let OperationError::Timeout { missing, .. } = error(&net.events[rank][0]).1 else { panic!() };
            assert_eq!(missing, &[2], "seed {seed}");
        }
        let later = net.workers[0].all_reduce(Time(net.now), Reduction::Sum, tensor(vec![]));
        net.pump_all();
        assert_eq!(error(net.events[0].last().unwrap()), (later, &OperationError::Over));
    }
}

/// A rank that goes away in order (its work done) does not stop the others, and an empty operation completes.
#[test]
fn empty_operations_complete() {
    let mut net = Net::new(SHAPE, ROUGH, 1);
    for worker in &mut net.workers {
        worker.all_reduce(Time(1_000_000), Reduction::Max, vec![]);
        worker.all_reduce(Time(1_000_000), Reduction::Max, tensor(vec![]));
    }
    net.run_until_events(2, 10_000);
    assert!(net.leave(10_000));
    assert!(net.results().iter().all(|results| results.len() == 1 && results[0].values.is_empty()));
}

/// Nothing can be queued after leaving, and leaving at once is fine.
#[test]
fn leaving_is_final() {
    let mut net = Net::new(SHAPE, FAIR, 1);
    assert!(net.leave(10));
    let handle = net.workers[0].all_reduce(Time(net.now), Reduction::Sum, vec![]);
    net.pump_all();
    assert_eq!(error(&net.events[0][0]), (handle, &OperationError::Over));
}

/// Flips a bit behind the header.
fn damage_payload(datagram: &mut [u8]) {
    if let Some(byte) = datagram.get_mut(70) {
        *byte ^= 4;
    }
}

/// All payloads of one rank are damaged on the way: it says so, in seconds and after few packets; the others name it.
#[test]
fn a_path_that_damages_contributions_ends_the_operation() {
    let mut net = Net::new(SHAPE, FAIR, 1);
    net.filter = Some(Box::new(|rank, datagram| {
        if rank == 1 {
            damage_payload(datagram);
        }
        true
    }));
    for worker in &mut net.workers {
        worker.all_reduce(Time(1_000_000), Reduction::Sum, tensor(vec![1.0; 1000]));
    }
    net.run(100_000, |net| !net.events[1].is_empty());
    assert!(net.now < 4_000_000, "{} µs", net.now);
    let (_, error_of_1) = error(&net.events[1][0]);
    assert_eq!(error_of_1, &OperationError::DamagedOnTheWay { tensor: "w".into(), refusals: 16 });
    let statistics = net.workers[1].statistics();
    assert!(statistics.bad_tags <= 4 * 16 && statistics.datagrams_sent < 1000, "{statistics:?}");
    net.run_until_events(1, 100_000);
    for rank in [0, 2] {
        let OperationError::Timeout { missing, .. } = error(&net.events[rank][0]).1 else { panic!() };
        assert_eq!(missing, &[1]);
    }
}

/// A path that is bad for a while is survived.
#[test]
fn a_path_that_damages_contributions_for_a_while_is_survived() {
    let mut net = Net::new(SHAPE, FAIR, 1);
    let mut seen = std::collections::BTreeMap::new();
    net.filter = Some(Box::new(move |rank, datagram| {
        let seq: [u8; 4] = datagram[12..16].try_into().unwrap();
        let times = seen.entry((rank, seq)).or_insert(0);
        *times += 1;
        if *times <= 8 {
            damage_payload(datagram);
        }
        true
    }));
    for worker in &mut net.workers {
        worker.all_reduce(Time(1_000_000), Reduction::Sum, tensor(vec![1.0; 1000]));
    }
    net.run_until_events(1, 100_000);
    net.filter = None;
    assert!(net.leave(10_000));
    assert!(net.results().iter().all(|r| r[0].values == Values::F32(vec![3.0; 1000])));
}

/// All results are damaged on the way to one rank: a few redos, then it gives up; the others name it.
#[test]
fn a_path_that_damages_results_ends_the_operation() {
    for both_ways in [false, true] {
        let mut net = Net::new(SHAPE, FAIR, 1);
        net.answer_filter = Some(Box::new(|rank, datagram| {
            if rank == 1 {
                damage_payload(datagram);
            }
            true
        }));
        if both_ways {
            // From the first redo on, so that there are results.
            net.filter = Some(Box::new(|rank, datagram| {
                if rank == 1 && datagram[58] > 0 {
                    damage_payload(datagram);
                }
                true
            }));
        }
        for worker in &mut net.workers {
            worker.all_reduce(Time(1_000_000), Reduction::Sum, tensor(vec![1.0; 1000]));
        }
        net.run(100_000, |net| !net.events[1].is_empty());
        assert!(net.now < 4_000_000, "{} µs", net.now);
        match error(&net.events[1][0]).1 {
            OperationError::DamagedResults { tensor, failures: 10..=16 } if !both_ways => {
                assert_eq!(tensor, "w")
            }
            OperationError::DamagedOnTheWay { tensor, .. } if both_ways => assert_eq!(tensor, "w"),
            other => panic!("{other:?}"),
        }
        for worker in &net.workers {
            let statistics = worker.statistics();
            assert!(statistics.datagrams_sent < 2000 && statistics.failed_checks < 1000, "{statistics:?}");
        }
        net.run_until_events(1, 100_000);
        for rank in [0, 2] {
            let OperationError::Timeout { missing, .. } = error(&net.events[rank][0]).1 else { panic!() };
            // The other may lag behind, and be missing too.
            assert!(missing.contains(&1), "{missing:?}");
        }
    }
}
