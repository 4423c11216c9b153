//! Jobs whose chunks are in the pool, end to end: pools that are far too small, disturbed paths, jobs that come and go.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use paatp_common::Refusal;
use paatp_tests::gradients::synthetic;
use paatp_tests::job::run;
use paatp_tests::kernel::Maps;
use paatp_tests::lab::Family;
use paatp_tests::process::{Aggregator, AggregatorOptions, Process, WorkerCommand, paatp, wait_until};
use paatp_tests::{Dtype, Gradient, JobOptions, Lab, Layout, Rates, require_bpf};
use serde_json::Value;

/// A few workers with little to do, on a busy machine.
const DEADLINE: Duration = Duration::from_secs(120);
/// The rates of `disturbed.rs`.
const HARSH: Rates = Rates { loss: 0.10, duplicate: 0.05, reorder: 0.05, corrupt: 0.01 };
/// Four standard slots: less than any window.
const FOUR_SLOTS: &str = "5888";

/// One job in a pool; its tables are audited afterwards. Returns the digest of its result.
fn audited(pool: &str, change: impl FnOnce(&mut JobOptions)) -> String {
    let inputs = synthetic(3, 29, &[(Dtype::F32, 20_000), (Dtype::I32, 777)], 1.0);
    let lab = Lab::new(Layout::workers(3)).unwrap();
    let mut options = JobOptions::world(3);
    if !pool.is_empty() {
        options.aggregator.more = ["--pool", pool, "--shared"].map(Into::into).into();
    }
    change(&mut options);
    let result = run(&lab, &inputs, &options).unwrap();
    let verdict = result.check(&inputs, &options).unwrap();
    assert!(verdict.is_right() && result.broken_rules.is_empty(), "{:#?}", verdict.complaints);
    assert_eq!(result.counters.refused(Refusal::Crowded) > 0, !pool.is_empty(), "{:?}", result.counters);
    result.digests().unwrap().swap_remove(0)
}

/// The same bits from a ring, from a pool of four slots, and from one whose packets are lost, doubled and damaged.
#[test]
fn four_slots_are_enough_for_the_right_sum() {
    if !require_bpf("pool::four_slots_are_enough_for_the_right_sum") {
        return;
    }
    let ring = audited("", |_| {});
    assert_eq!(audited(FOUR_SLOTS, |_| {}), ring);
    let disturbed = audited(FOUR_SLOTS, |options| (options.requests, options.answers) = (HARSH, HARSH));
    assert_eq!(disturbed, ring);
}

/// An aggregator with a pool and no job but `lab`, which has a ring.
struct Bench {
    lab: Lab,
    aggregator: Aggregator,
    folder: tempfile::TempDir,
}

impl Bench {
    fn new(pool: &str) -> Bench {
        let folder = tempfile::tempdir().unwrap();
        let lab = Lab::new(Layout::workers(2)).unwrap();
        let token = folder.path().join("token").display().to_string();
        let more = ["--token-file", &token, "--memory", "2MiB", "--pool", pool].map(Into::into).into();
        let options = AggregatorOptions { more, ..AggregatorOptions::world(2) };
        let aggregator = Aggregator::start(&lab, &options).unwrap();
        Bench { lab, aggregator, folder }
    }

    fn manage(&self, args: &str) -> String {
        let mut command = self.lab.aggregator.namespace.command(paatp().unwrap());
        command.arg("job").args(args.split_whitespace());
        command.arg("--token-file").arg(self.folder.path().join("token"));
        let finished = Process::spawn("paatp job", command).unwrap().wait(DEADLINE).unwrap();
        assert!(finished.is_success(), "{args}: {}", finished.output);
        finished.output
    }

    fn look(&self, args: &str) -> Value {
        serde_json::from_str(&self.manage(args)).unwrap()
    }

    /// Starts both ranks of a job, with files of its own.
    fn start(&self, job: &str, inputs: &[Gradient]) -> Vec<(Process, PathBuf)> {
        let folder = self.folder.path().join(job);
        fs::create_dir_all(&folder).unwrap();
        let rank = |(rank, gradient): (usize, &Gradient)| {
            let mut worker = WorkerCommand::new(&self.lab, Family::V4, rank, inputs.len(), &folder);
            worker.job = job.into();
            gradient.write(&worker.input).unwrap();
            (worker.spawn(&self.lab.workers[rank]).unwrap(), worker.output)
        };
        inputs.iter().enumerate().map(rank).collect()
    }
}

fn results(ranks: Vec<(Process, PathBuf)>) -> Vec<Vec<u8>> {
    let result = |(mut process, output): (Process, PathBuf)| {
        let finished = process.wait(DEADLINE).unwrap();
        assert!(finished.is_success(), "{}", finished.output);
        fs::read(Path::new(&output)).unwrap()
    };
    ranks.into_iter().map(result).collect()
}

/// Two jobs at once in four slots, again and again: each generation, and each job that is deleted, gives its slots back.
#[test]
fn jobs_in_a_pool_come_and_go() {
    if !require_bpf("pool::jobs_in_a_pool_come_and_go") {
        return;
    }
    let bench = Bench::new(FOUR_SLOTS);
    let inputs = synthetic(2, 7, &[(Dtype::F32, 10_000)], 1.0);
    let expected = results(bench.start("lab", &inputs));
    let before = bench.look("node --json");
    assert_eq!((before["pool_slots"].as_u64(), before["pool_slots_in_use"].as_u64()), (Some(4), Some(0)));
    for round in 0..4 {
        for name in ["a", "b"] {
            bench.manage(&format!("create {name} --world 2 --shared --access open"));
        }
        let job = bench.look("show a --json");
        assert_eq!((job["memory"].as_str(), job["places"].as_u64()), (Some("shared"), Some(8)));
        for _ in 0..2 {
            let running = ["a", "b"].map(|name| bench.start(name, &inputs));
            for ranks in running {
                assert_eq!(results(ranks), expected, "round {round}");
            }
        }
        ["a", "b"].iter().for_each(|name| drop(bench.manage(&format!("delete {name}"))));
    }
    wait_until("deleted jobs were free", DEADLINE, || Ok(bench.look("node --json")["closing_jobs"] == 0))
        .unwrap();
    assert_eq!(bench.look("node --json"), before, "all slots are free");
    let maps = Maps::on(&bench.lab.aggregator.namespace, &bench.lab.aggregator.interface).unwrap();
    assert!(maps.counters().unwrap().refused(Refusal::Crowded) > 0, "the pool was never full");
    assert!(bench.aggregator.stop().unwrap().is_success());
}
