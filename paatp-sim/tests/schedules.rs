//! Every operation completes with the right sum for any schedule of loss, duplication, reordering, delay and damage that
//! delivers infinitely often: rings of one slot, of two, and of many, all controllers, redo included.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::thread;

use paatp_common::switch::Count;
use paatp_sim::record::{SwitchRecord, Totals};
use paatp_sim::soak;

/// Seeds that every test run goes through. `paatp sim soak` goes through more.
const SEEDS: u64 = 10_000;

#[test]
fn ten_thousand_schedules_complete_with_the_right_sums() {
    let threads = thread::available_parallelism().map_or(1, usize::from) as u64;
    let run = |first: u64| {
        let (mut totals, mut switches) = (Totals::default(), SwitchRecord::default());
        for seed in (first..SEEDS).step_by(threads as usize) {
            let record = soak::run(seed).unwrap_or_else(|failure| panic!("{failure}"));
            totals.add(&record.totals);
            record.switch.iter().for_each(|switch| switches.add(switch));
        }
        (totals, switches)
    };
    let (totals, switches) = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|first| scope.spawn(move || run(first))).collect();
        let mut all = (Totals::default(), SwitchRecord::default());
        for worker in workers {
            let (totals, switches) = worker.join().expect("a seed failed");
            all.0.add(&totals);
            all.1.add(&switches);
        }
        all
    });
    println!("{SEEDS} seeds: {totals:?}\n{switches:?}");
    // The test is worth nothing if nothing went wrong on the way.
    assert!(totals.lost > SEEDS && totals.retransmissions > SEEDS && totals.dropped > 0, "{totals:?}");
    assert!(totals.redos > SEEDS / 20 && totals.failed_checks > SEEDS / 20, "{totals:?}");
    assert!(totals.marked > SEEDS, "{totals:?}");
    // In rings of less than 2 W only: a rank is less than W past its own results, which are at most W past the results of
    // the slowest.
    assert!(totals.busy > SEEDS / 10, "{totals:?}");
    let counted = |what: Count| switches.counts[what as usize];
    assert!(switches.summed > SEEDS && switches.reclaimed > SEEDS / 10, "{switches:?}");
    assert!(counted(Count::Results) > SEEDS && counted(Count::PassedCrowded) > SEEDS / 10, "{switches:?}");
    assert!(counted(Count::Evicted) > SEEDS / 20, "{switches:?}");
}

/// The same seed is the same run, to the nanosecond.
#[test]
fn a_seed_is_a_run() {
    for seed in 0..50 {
        let (first, second) = (soak::run(seed).unwrap(), soak::run(seed).unwrap());
        assert_eq!((first.end, first.totals, first.samples), (second.end, second.totals, second.samples));
    }
}
