//! Jobs that come and go over the control API while the aggregator runs.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use paatp_common::Event;
use paatp_common::job::{JobEntry, RankEntry};
use paatp_tests::gradients::synthetic;
use paatp_tests::kernel::Maps;
use paatp_tests::lab::{Family, Host};
use paatp_tests::process::{Aggregator, AggregatorOptions, Process, WorkerCommand, paatp, wait_until};
use paatp_tests::{Dtype, Gradient, Lab, Layout, require_bpf};
use serde_json::Value;

/// A worker with little to do, on a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// A lab of two workers with an aggregator whose jobs can be changed.
struct Bench {
    lab: Lab,
    aggregator: Aggregator,
    folder: tempfile::TempDir,
}

impl Bench {
    fn new(workers: usize, more: &[&str]) -> Bench {
        let folder = tempfile::tempdir().unwrap();
        let lab = Lab::new(Layout::workers(workers)).unwrap();
        let token = folder.path().join("token").display().to_string();
        let mut all = vec!["--token-file".to_owned(), token];
        all.extend(more.iter().map(|arg| (*arg).to_owned()));
        let options = AggregatorOptions { more: all, ..AggregatorOptions::world(workers) };
        let aggregator = Aggregator::start(&lab, &options).unwrap();
        Bench { lab, aggregator, folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `paatp job …` on a host; its output, and whether it went well.
    fn job(&self, host: &Host, args: &str) -> (bool, String) {
        let mut command = host.namespace.command(paatp().unwrap());
        command.arg("job").args(args.split_whitespace()).arg("--token-file").arg(self.path("token"));
        let finished = Process::spawn("paatp job", command).unwrap().wait(DEADLINE).unwrap();
        (finished.is_success(), finished.output)
    }

    fn manage(&self, args: &str) -> String {
        let (well, output) = self.job(&self.lab.aggregator, args);
        assert!(well, "{args}: {output}");
        output
    }

    fn node(&self) -> Value {
        serde_json::from_str(&self.manage("node --json")).unwrap()
    }

    fn worker(&self, job: &str, rank: usize, world: usize, key: Option<&Path>) -> Process {
        let mut worker = WorkerCommand::new(&self.lab, Family::V4, rank, world, self.folder.path());
        worker.job = job.into();
        let mut command = self.lab.workers[rank].namespace.command(paatp().unwrap());
        command.args(worker.args());
        if let Some(key) = key {
            command.arg("--token-file").arg(key);
        }
        Process::spawn(format!("rank {rank} of {job}"), command).unwrap()
    }

    fn inputs(&self, inputs: &[Gradient]) {
        for (rank, gradient) in inputs.iter().enumerate() {
            gradient.write(&self.path(&format!("input-rank{rank}.safetensors"))).unwrap();
        }
    }

    /// All ranks of a job; their results.
    fn run(&self, job: &str, world: usize, key: Option<&Path>) -> Vec<Vec<u8>> {
        let workers: Vec<Process> = (0..world).map(|rank| self.worker(job, rank, world, key)).collect();
        for mut worker in workers {
            let finished = worker.wait(DEADLINE).unwrap();
            assert!(finished.is_success(), "{}\n{}", finished.output, self.aggregator.process.output());
        }
        (0..world)
            .map(|rank| fs::read(self.path(&format!("output-rank{rank}.safetensors"))).unwrap())
            .collect()
    }

    /// Resident memory of the aggregator, in KiB.
    fn resident(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.aggregator.process.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim_end_matches("kB").trim().parse().unwrap()
    }

    fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.aggregator.process.pid())).unwrap().count()
    }
}

#[test]
fn jobs_come_and_go() {
    if !require_bpf("jobs::jobs_come_and_go") {
        return;
    }
    let bench = Bench::new(2, &["--memory", "2MiB"]);
    assert_eq!(fs::metadata(bench.path("token")).unwrap().mode() & 0o777, 0o600);
    bench.inputs(&synthetic(2, 7, &[(Dtype::F32, 20_000), (Dtype::I32, 500)], 1.0));
    // The same bits, whichever job and whichever slots.
    let expected = bench.run("lab", 2, None);
    assert_eq!(expected[0], expected[1]);
    let maps = Maps::on(&bench.lab.aggregator.namespace, &bench.lab.aggregator.interface).unwrap();
    let (before, descriptors) = (bench.node(), bench.descriptors());
    assert_eq!((before["jobs"].as_u64(), before["slots"].as_u64()), (Some(1), Some(1424)));
    for round in 0..12 {
        let (name, key) = (format!("job-{}", round % 3), bench.path(&format!("key-{round}")));
        let slots = 128 << (round % 3);
        bench.manage(&format!(
            "create {name} --world 2 --slots {slots} --window 32 --key-file {}",
            key.display()
        ));
        if round == 0 {
            let finished = bench.worker(&name, 0, 2, None).wait(DEADLINE).unwrap();
            assert!(
                !finished.is_success() && finished.output.contains("--token-file"),
                "{}",
                finished.output
            );
        }
        assert_eq!(bench.run(&name, 2, Some(&key)), expected, "round {round}");
        bench.manage(&format!("delete {name}"));
    }
    assert_eq!(bench.run("lab", 2, None), expected);
    wait_until("deleted jobs were free", DEADLINE, || Ok(bench.node()["closing_jobs"] == 0)).unwrap();
    assert_eq!(bench.node(), before);
    wait_until("connections were closed", DEADLINE, || Ok(bench.descriptors() <= descriptors)).unwrap();
    let jobs = maps.array::<[u8; size_of::<JobEntry>()]>("JOBS").unwrap();
    for number in 1..64 {
        let entry: JobEntry = bytemuck::pod_read_unaligned(&jobs.get(&number, 0).unwrap());
        assert_eq!(entry.generation, 0, "entry {number}");
    }
    assert!(bench.aggregator.stop().unwrap().is_success());
}

#[test]
fn workers_addresses_are_for_workers() {
    if !require_bpf("jobs::workers_addresses_are_for_workers") {
        return;
    }
    let bench = Bench::new(2, &[]);
    let there = format!("--control {}", bench.lab.aggregator.address(Family::V4));
    // Even with the token.
    for line in ["delete lab", "list", "drain", "create new --world 2"] {
        let (well, output) = bench.job(&bench.lab.workers[0], &format!("{line} {there}"));
        assert!(!well && output.contains("serves workers only"), "{line}: {output}");
    }
    let (well, output) = bench.job(&bench.lab.workers[0], &format!("show lab {there}"));
    assert!(well && output.contains("idle"), "{output}");
    assert!(bench.aggregator.stop().unwrap().is_success());
}

/// Members of a job that is deleted under them learn of it at once, and by name.
#[test]
fn members_of_a_deleted_job_are_told() {
    if !require_bpf("jobs::members_of_a_deleted_job_are_told") {
        return;
    }
    let bench = Bench::new(2, &[]);
    bench.inputs(&synthetic(2, 3, &[(Dtype::F32, 8_000_000)], 1.0));
    let maps = Maps::on(&bench.lab.aggregator.namespace, &bench.lab.aggregator.interface).unwrap();
    let mut workers: Vec<Process> = (0..2).map(|rank| bench.worker("lab", rank, 2, None)).collect();
    wait_until("some results were out", DEADLINE, || Ok(maps.counters()?.noted(Event::Results) > 300))
        .unwrap();
    bench.manage("delete lab");
    for worker in &mut workers {
        let finished = worker.wait(Duration::from_secs(20)).unwrap();
        assert!(!finished.is_success(), "it was deleted too late");
        assert!(finished.output.contains("has no job `lab` any more"), "{}", finished.output);
    }
}

/// F8 through the kernel: a rank that is killed holds the others up for the job's timeout, then they go on.
#[test]
fn f8_a_shrunk_job_goes_on() {
    if !require_bpf("jobs::f8_a_shrunk_job_goes_on") {
        return;
    }
    let bench = Bench::new(3, &["--memory", "2MiB"]);
    bench.inputs(&synthetic(3, 5, &[(Dtype::F32, 4_000_000)], 1.0));
    bench.manage("create shrinks --world 3 --access open --timeout 1s --on-failure shrink");
    let maps = Maps::on(&bench.lab.aggregator.namespace, &bench.lab.aggregator.interface).unwrap();
    let mut workers: Vec<Process> = (0..3).map(|rank| bench.worker("shrinks", rank, 3, None)).collect();
    wait_until("some results were out", DEADLINE, || Ok(maps.counters()?.noted(Event::Results) > 300))
        .unwrap();
    workers[1].signal(Signal::SIGKILL).unwrap();
    assert!(!workers[0].has_ended().unwrap(), "rank 1 was killed too late");
    for rank in [0, 2] {
        let finished = workers[rank].wait(DEADLINE).unwrap();
        let daemon = bench.aggregator.process.output();
        let shown = bench.manage("show shrinks");
        assert!(finished.is_success(), "rank {rank}: {}\n{daemon}\n{shown}", finished.output);
    }
    let output = |rank: usize| fs::read(bench.path(&format!("output-rank{rank}.safetensors"))).unwrap();
    assert!(output(0) == output(2), "both have the same bits");
    let shown = bench.manage("show shrinks");
    assert!(shown.lines().any(|line| line.starts_with("lost ranks") && line.ends_with('1')), "{shown}");
}

/// The loader's half of PA-ATP: while a job runs, its answers are stamped with a window, and its ranks' entries stay what
/// they were but for the gain.
#[test]
fn a_running_job_is_granted_a_window() {
    if !require_bpf("jobs::a_running_job_is_granted_a_window") {
        return;
    }
    let mut bench = Bench::new(2, &[]);
    bench.inputs(&synthetic(2, 11, &[(Dtype::F32, 4_000_000)], 1.0));
    let maps = Maps::on(&bench.lab.aggregator.namespace, &bench.lab.aggregator.interface).unwrap();
    let (jobs, ranks) = (
        maps.array::<[u8; size_of::<JobEntry>()]>("JOBS").unwrap(),
        maps.array::<[u8; 32]>("RANKS").unwrap(),
    );
    let job = || -> JobEntry { bytemuck::pod_read_unaligned(&jobs.get(&0, 0).unwrap()) };
    let rank = |number| -> RankEntry { bytemuck::pod_read_unaligned(&ranks.get(&number, 0).unwrap()) };
    assert_eq!((job().granted, job().generation), (0, 0));
    let workers: Vec<Process> = (0..2).map(|rank| bench.worker("lab", rank, 2, None)).collect();
    wait_until("the job runs", DEADLINE, || Ok(job().generation != 0)).unwrap();
    let members = [rank(0), rank(1)];
    wait_until("a window is granted", DEADLINE, || Ok(job().granted != 0)).unwrap();
    let granted = job();
    assert!((granted.window / 4..=granted.window).contains(&granted.granted), "{granted:?}");
    for mut worker in workers {
        let finished = worker.wait(DEADLINE).unwrap();
        assert!(finished.is_success(), "{}", finished.output);
    }
    for (number, before) in (0..).zip(members) {
        let now = rank(number);
        assert_eq!((now.address, now.key), (before.address, before.key));
    }
    // Members that have left are paced no more.
    wait_until("the job ended", DEADLINE, || Ok(job().generation == 0)).unwrap();
    assert!(!bench.aggregator.process.has_ended().unwrap());
}

/// Jobs of [`sixteen_jobs_of_eight_come_and_go`], and ranks of each.
const CROWD: (usize, usize) = (16, 8);

/// Most that the aggregator's memory may grow after the second round, in KiB: what an allocator keeps for itself.
const GROWTH: u64 = 4096;

impl Bench {
    /// All ranks of all jobs at once; every result is the expected one.
    fn crowd(&self, expected: &[u8]) {
        let (jobs, world) = CROWD;
        let member = |number: usize, rank: usize| {
            let folder = self.path(&format!("crowd-{number}"));
            fs::create_dir_all(&folder).unwrap();
            let mut worker = WorkerCommand::new(&self.lab, Family::V4, rank, world, &folder);
            worker.job = format!("crowd-{number}");
            worker.input = self.path(&format!("input-rank{rank}.safetensors"));
            let mut command = self.lab.workers[rank].namespace.command(paatp().unwrap());
            command.args(worker.args());
            (Process::spawn(format!("rank {rank} of {}", worker.job), command).unwrap(), worker.output)
        };
        let members = (0..jobs).flat_map(|number| (0..world).map(move |rank| (number, rank)));
        let members: Vec<_> = members.map(|(number, rank)| member(number, rank)).collect();
        for (mut process, output) in members {
            let finished = process.wait(DEADLINE).unwrap();
            assert!(finished.is_success(), "{}\n{}", finished.output, self.aggregator.process.output());
            assert!(fs::read(&output).unwrap() == expected, "{}", output.display());
        }
    }
}

/// Sixteen jobs of eight ranks at once, half of them in the pool, created and deleted over and over: every sum is right,
/// and nothing is left of them. Twice; with `PAATP_SOAK_MINUTES=10` for ten minutes.
#[test]
fn sixteen_jobs_of_eight_come_and_go() {
    if !require_bpf("jobs::sixteen_jobs_of_eight_come_and_go") {
        return;
    }
    let minutes = std::env::var("PAATP_SOAK_MINUTES").ok().and_then(|minutes| minutes.parse::<f64>().ok());
    let end = Instant::now() + Duration::from_secs_f64(60.0 * minutes.unwrap_or(0.0));
    let (jobs, world) = CROWD;
    let bench = Bench::new(world, &["--memory", "16MiB", "--pool", "4MiB"]);
    bench.inputs(&synthetic(world, 3, &[(Dtype::F32, 5_000), (Dtype::I32, 300)], 1.0));
    let expected = bench.run("lab", world, None).swap_remove(0);
    let maps = Maps::on(&bench.lab.aggregator.namespace, &bench.lab.aggregator.interface).unwrap();
    let (before, descriptors) = (bench.node(), bench.descriptors());
    let (mut rounds, mut resident) = (0, 0);
    while rounds < 2 || Instant::now() < end {
        for number in 0..jobs {
            let shared = if number % 2 == 0 { "--shared" } else { "" };
            let size = "--slots 128 --window 32 --access open";
            bench.manage(&format!("create crowd-{number} --world {world} {size} {shared}"));
        }
        bench.crowd(&expected);
        (0..jobs).for_each(|number| drop(bench.manage(&format!("delete crowd-{number}"))));
        wait_until("deleted jobs were free", DEADLINE, || Ok(bench.node() == before)).unwrap();
        wait_until("connections were closed", DEADLINE, || Ok(bench.descriptors() <= descriptors)).unwrap();
        let entries = maps.array::<[u8; size_of::<JobEntry>()]>("JOBS").unwrap();
        for number in 1..64 {
            let entry: JobEntry = bytemuck::pod_read_unaligned(&entries.get(&number, 0).unwrap());
            assert_eq!(entry.generation, 0, "entry {number}");
        }
        rounds += 1;
        let now = bench.resident();
        if rounds <= 2 {
            resident = now;
        }
        assert!(now <= resident + GROWTH, "{resident} KiB after the second round, {now} KiB after {rounds}");
    }
    println!(
        "{rounds} rounds of {jobs} jobs of {world} ranks; the aggregator's memory: {resident} KiB after the second, {} KiB \
         at the end",
        bench.resident()
    );
    assert!(bench.aggregator.stop().unwrap().is_success());
}
