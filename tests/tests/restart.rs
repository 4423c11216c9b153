//! The aggregator is killed and started again: workers see nothing of it, and nothing that is not its own is touched.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::sync::Arc;
use std::time::Duration;

use paatp_common::Event;
use paatp_tests::gradients::synthetic;
use paatp_tests::job::run;
use paatp_tests::pins::Pins;
use paatp_tests::process::{Aggregator, AggregatorOptions, wait_until};
use paatp_tests::{Dtype, JobOptions, Lab, Layout, Rates, Running, require_bpf};

const DEADLINE: Duration = Duration::from_secs(120);

fn pinned(world: usize) -> (Arc<Pins>, AggregatorOptions) {
    let pins = Arc::new(Pins::new().unwrap());
    let options = AggregatorOptions { pins: Some(Arc::clone(&pins)), ..AggregatorOptions::world(world) };
    (pins, options)
}

/// Ranks add while the daemon dies and comes back, several times, with packets lost on the way.
#[test]
fn killed_in_the_middle_of_operations() {
    if !require_bpf("restart::killed_in_the_middle_of_operations") {
        return;
    }
    let lab = Lab::new(Layout::workers(3)).unwrap();
    let inputs = synthetic(3, 21, &[(Dtype::F32, 1_500_000), (Dtype::I32, 1000)], 1.0);
    let loss = Rates { loss: 0.01, ..Rates::NONE };
    let (pins, aggregator) = pinned(3);
    let options = JobOptions { aggregator, requests: loss, answers: loss, ..JobOptions::world(3) };
    let undisturbed = run(&lab, &inputs, &JobOptions::world(3)).unwrap().digests().unwrap();
    let mut running = Running::start(&lab, &inputs, &options).unwrap();
    for at in [500, 3000, 6000] {
        wait_until("some more results were out", DEADLINE, || {
            Ok(running.maps.counters()?.noted(Event::Results) > at)
        })
        .unwrap();
        assert!(!running.workers[0].has_ended().unwrap(), "killed too late");
        running.aggregator.process.kill();
        let before = running.maps.counters().unwrap().noted(Event::Results);
        wait_until("results came without a daemon", DEADLINE, || {
            Ok(running.maps.counters()?.noted(Event::Results) > before)
        })
        .unwrap();
        running.aggregator = Aggregator::start(&lab, &options.aggregator).unwrap();
    }
    let result = running.finish(DEADLINE).unwrap();
    let verdict = result.check(&inputs, &options).unwrap();
    assert!(verdict.is_right(), "{:?}", verdict.complaints);
    assert_eq!(result.digests().unwrap(), undisturbed);
    assert_eq!(pins.residue().unwrap(), Vec::<String>::new());
}
