//! Ranks that are missing, die, or contribute what has no sum: everybody ends in time, with an error that says who.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use paatp_common::Event;
use paatp_tests::gradients::synthetic;
use paatp_tests::job::run;
use paatp_tests::process::{names, wait_until};
use paatp_tests::{Dtype, Gradient, JobOptions, Lab, Layout, Rates, Running, Tensor, require_bpf};

/// What the workers are given.
const TIMEOUT: Duration = Duration::from_secs(2);
/// What starting, ending and a busy machine may take besides.
const SLACK: Duration = Duration::from_secs(10);

fn options(world: usize) -> JobOptions {
    JobOptions { timeout: TIMEOUT, ..JobOptions::world(world) }
}

#[test]
fn a_rank_never_shows_up() {
    if !require_bpf("failures::a_rank_never_shows_up") {
        return;
    }
    let lab = Lab::new(Layout::workers(3)).unwrap();
    let inputs = synthetic(3, 1, &[(Dtype::F32, 1000)], 1.0);
    let mut running = Running::prepare(&lab, &inputs, &options(3)).unwrap();
    for rank in [0, 2] {
        running.start_rank(rank).unwrap();
    }
    let started = Instant::now();
    for worker in &mut running.workers {
        let finished = worker.wait(TIMEOUT + SLACK).unwrap();
        assert!(!finished.is_success());
        assert!(names(&finished.output, 1), "{}", finished.output);
    }
    assert!(started.elapsed() >= TIMEOUT, "they wait as long as they were told to");
    assert!(running.commands.iter().all(|command| !command.output.exists()));
}

#[test]
fn a_rank_is_killed() {
    if !require_bpf("failures::a_rank_is_killed") {
        return;
    }
    stopped("killed", Signal::SIGKILL);
}

#[test]
fn a_rank_is_stopped() {
    if !require_bpf("failures::a_rank_is_stopped") {
        return;
    }
    stopped("stopped", Signal::SIGSTOP);
}

/// Rank 1 gets a signal when some results are out.
fn stopped(what: &str, signal: Signal) {
    let lab = Lab::new(Layout::workers(3)).unwrap();
    let inputs = synthetic(3, 2, &[(Dtype::F32, 4_000_000)], 1.0);
    let mut running = Running::start(&lab, &inputs, &options(3)).unwrap();
    let maps = &running.maps;
    wait_until("some results were out", Duration::from_secs(60), || {
        Ok(maps.counters()?.noted(Event::Results) > 300)
    })
    .unwrap();
    running.workers[1].signal(signal).unwrap();
    assert!(!running.workers[0].has_ended().unwrap(), "rank 1 was {what} too late");
    for rank in [0, 2] {
        let finished = running.workers[rank].wait(TIMEOUT + SLACK).unwrap();
        assert!(!finished.is_success(), "rank {rank} got a result without rank 1");
        assert!(names(&finished.output, 1), "rank {rank}: {}", finished.output);
        assert!(!running.commands[rank].output.exists());
    }
}

#[test]
fn the_aggregator_is_killed() {
    if !require_bpf("failures::the_aggregator_is_killed") {
        return;
    }
    let lab = Lab::new(Layout::workers(2)).unwrap();
    let inputs = synthetic(2, 3, &[(Dtype::F32, 4_000_000)], 1.0);
    let mut running = Running::start(&lab, &inputs, &options(2)).unwrap();
    let maps = &running.maps;
    wait_until("some results were out", Duration::from_secs(60), || {
        Ok(maps.counters()?.noted(Event::Results) > 300)
    })
    .unwrap();
    running.aggregator.process.signal(Signal::SIGKILL).unwrap();
    for worker in &mut running.workers {
        let finished = worker.wait(TIMEOUT + SLACK).unwrap();
        assert!(!finished.is_success());
        assert!(finished.output.contains("aggregator"), "{}", finished.output);
    }
}

/// Nine of ten requests arrive damaged: no storm, and an error that says what it is.
#[test]
fn a_path_that_damages_packets() {
    if !require_bpf("failures::a_path_that_damages_packets") {
        return;
    }
    let lab = Lab::new(Layout::workers(2)).unwrap();
    let inputs = synthetic(2, 8, &[(Dtype::F32, 500_000)], 1.0);
    let requests = Rates { corrupt: 0.9, ..Rates::NONE };
    let options = JobOptions { timeout: Duration::from_secs(20), requests, ..JobOptions::world(2) };
    let result = run(&lab, &inputs, &options).unwrap();
    println!("requests: {}", result.requests);
    let outputs: Vec<&String> = result.ranks.iter().map(|rank| &rank.finished.output).collect();
    assert!(result.ranks.iter().all(|rank| !rank.finished.is_success()), "{outputs:#?}");
    let told = "payloads are damaged between this rank and the aggregator";
    assert!(outputs.iter().any(|output| output.contains(told) && output.contains("ethtool")), "{outputs:#?}");
    // Until then a few attempts for each chunk of a window, and polls.
    assert!(result.requests.seen < 20_000, "{}", result.requests);
}

#[test]
fn no_aggregator_at_all() {
    if !require_bpf("failures::no_aggregator_at_all") {
        return;
    }
    let lab = Lab::new(Layout::workers(1)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut command = paatp_tests::WorkerCommand::new(&lab, paatp_tests::Family::V4, 0, 1, folder.path());
    command.timeout = TIMEOUT;
    synthetic(1, 4, &[(Dtype::F32, 10)], 1.0)[0].write(&command.input).unwrap();
    let finished = command.spawn(&lab.workers[0]).unwrap().wait(TIMEOUT + SLACK).unwrap();
    assert!(!finished.is_success());
    assert!(
        finished.output.contains("aggregator") && finished.output.contains("10.80.0.1"),
        "{}",
        finished.output
    );
}

#[test]
fn values_that_have_no_sum() {
    if !require_bpf("failures::values_that_have_no_sum") {
        return;
    }
    let lab = Lab::new(Layout::workers(3)).unwrap();
    for (dtype, value) in [
        (Dtype::F32, f64::NAN),
        (Dtype::F32, f64::INFINITY),
        (Dtype::F16, f64::NEG_INFINITY),
        (Dtype::Bf16, f64::NAN),
    ] {
        let mut inputs = synthetic(3, 5, &[(Dtype::F32, 2000), (dtype, 3000), (Dtype::F32, 100)], 1.0);
        let mut values = inputs[1].tensors[1].values();
        values[2345] = value;
        inputs[1].tensors[1] = Tensor::new("t1", dtype, &values);
        let result = run(&lab, &inputs, &options(3)).unwrap();
        for (rank, outcome) in result.ranks.iter().enumerate() {
            let output = &outcome.finished.output;
            assert!(!outcome.finished.is_success(), "rank {rank} with {value}");
            assert!(outcome.output.is_none(), "rank {rank} wrote a result with {value} in it");
            if rank == 1 {
                assert!(output.contains("t1") && output.contains("2345"), "{output}");
            } else {
                assert!(names(output, 1), "rank {rank}: {output}");
            }
        }
        assert!(result.aggregator.is_success());
    }
    // A later job on the same machine is not poisoned.
    let clean: Vec<Gradient> = synthetic(3, 6, &[(Dtype::F32, 5000)], 1.0);
    let result = run(&lab, &clean, &options(3)).unwrap();
    let verdict = result.check(&clean, &options(3)).unwrap();
    assert!(verdict.is_right(), "{:?}", verdict.complaints);
}

#[test]
fn ranks_that_disagree() {
    if !require_bpf("failures::ranks_that_disagree") {
        return;
    }
    let lab = Lab::new(Layout::workers(2)).unwrap();
    let of = |dtype, length| synthetic(1, 7, &[(dtype, length)], 1.0).remove(0);
    for inputs in [
        [of(Dtype::F32, 1000), of(Dtype::F32, 900)],
        [of(Dtype::F32, 1000), of(Dtype::F32, 2000)],
        [of(Dtype::F32, 1000), of(Dtype::F16, 1000)],
    ] {
        let result = run(&lab, &inputs, &options(2)).unwrap();
        assert!(result.ranks.iter().any(|rank| !rank.finished.is_success()), "nobody noticed");
        for rank in &result.ranks {
            assert!(rank.finished.is_success() || !rank.finished.output.is_empty());
        }
    }
}
