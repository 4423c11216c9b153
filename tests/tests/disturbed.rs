//! Loss, duplicates, reordering and flipped bits, on the wire and in the aggregator's memory: the result is bit for bit
//! that of an undisturbed run, and every flipped bit is accounted for.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use paatp_tests::gradients::{Random, real, synthetic};
use paatp_tests::job::{Running, run};
use paatp_tests::kernel::SlotMemory;
use paatp_tests::{Dtype, Family, Gradient, JobOptions, JobResult, Lab, Layout, Rates, require_bpf};

/// The rates that the result must not show.
const HARSH: Rates = Rates { loss: 0.10, duplicate: 0.05, reorder: 0.05, corrupt: 0.01 };

fn check(result: &JobResult, inputs: &[Gradient], options: &JobOptions) -> String {
    let verdict = result.check(inputs, options).unwrap();
    assert!(
        verdict.is_right(),
        "{:#?}\nrequests: {}\nanswers: {}",
        verdict.complaints,
        result.requests,
        result.answers
    );
    result.digests().unwrap()[0].clone()
}

fn same_as_undisturbed(inputs: &[Gradient], options: &JobOptions) {
    let lab = Lab::new(Layout::workers(inputs.len())).unwrap();
    let undisturbed = check(&run(&lab, inputs, options).unwrap(), inputs, options);
    for seed in 1..=2 {
        let options = JobOptions { requests: HARSH, answers: HARSH, seed, ..options.clone() };
        let result = run(&lab, inputs, &options).unwrap();
        println!("seed {seed}: requests: {}", result.requests);
        println!("seed {seed}: answers: {}", result.answers);
        println!(
            "seed {seed}: workers saw {} of {} corrupted answers; {} duplicates were checked, {} results were too old to \
             be; {} packets were lost elsewhere, {} came late",
            result.corruptions_seen_by_workers(),
            result.answers.corrupted,
            result.sum(|report| report.statistic("duplicate_results")),
            result.sum(|report| report.statistic("unexpected_results")),
            result.lost_elsewhere,
            result.arrived_late
        );
        assert_eq!(check(&result, inputs, &options), undisturbed);
        for counts in [result.requests, result.answers] {
            assert!(counts.dropped > 0 && counts.duplicated > 0 && counts.released > 0, "{counts}");
            assert!(counts.corrupted_header > 0 || counts.corrupted_payload > 0, "{counts}");
            assert_eq!(counts.failed, 0);
        }
    }
}

#[test]
fn native_v4() {
    if require_bpf("disturbed::native_v4") {
        same_as_undisturbed(&real(0, 4).unwrap(), &JobOptions::world(4));
    }
}

#[test]
fn generic_v6_eight_workers() {
    if require_bpf("disturbed::generic_v6_eight_workers") {
        let mut options = JobOptions { family: Family::V6, ..JobOptions::world(8) };
        (options.aggregator.xdp_mode, options.aggregator.lanes) = ("generic", 320);
        same_as_undisturbed(&real(1, 8).unwrap(), &options);
    }
}

#[test]
fn tiny_ring() {
    if require_bpf("disturbed::tiny_ring") {
        let mut options = JobOptions::world(3);
        (options.aggregator.slots, options.aggregator.window) = (8, 4);
        let inputs = synthetic(3, 11, &[(Dtype::F32, 40_000), (Dtype::Bf16, 333), (Dtype::I32, 5000)], 100.0);
        same_as_undisturbed(&inputs, &options);
    }
}

/// Bits flip in the aggregator's slots while it works.
#[test]
fn broken_memory() {
    if !require_bpf("disturbed::broken_memory") {
        return;
    }
    const PAUSE: Duration = Duration::from_micros(500);
    let inputs = synthetic(3, 17, &[(Dtype::F32, 600_000)], 1.0);
    let lab = Lab::new(Layout::workers(3)).unwrap();
    let options = JobOptions::world(3);
    let undisturbed = check(&run(&lab, &inputs, &options).unwrap(), &inputs, &options);

    let running = Running::start(&lab, &inputs, &options).unwrap();
    let memory = SlotMemory::map(&running.maps, "SLOTS").unwrap();
    let done = AtomicBool::new(false);
    let result = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random(23);
            while !done.load(Ordering::Relaxed) {
                let (slot, bit) = (random.bits() as usize, random.bits() as usize);
                memory.flip(slot % memory.slots(), bit % memory.lane_bits());
                std::thread::sleep(PAUSE);
            }
        });
        let result = running.finish(Duration::from_secs(120));
        done.store(true, Ordering::Relaxed);
        result.unwrap()
    });
    let redone = result.sum(|report| report.statistic("redos_asked") + report.statistic("redos_joined"));
    let failed = result.sum(|report| report.statistic("failed_checks"));
    println!("{failed} results failed their check, {redone} redos");
    for rank in &result.ranks {
        assert!(rank.finished.is_success(), "{}", rank.finished.output);
    }
    assert_eq!(result.digests().unwrap(), vec![undisturbed; 3]);
    assert!(failed > 0 && redone > 0, "{failed} failed checks, {redone} redos: no flipped bit was met");
}
