//! The workers' drivers end to end: kernel bypass and sockets, what is got when the better one cannot be had, and what is
//! left behind.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::time::Duration;

use aya::Ebpf;
use aya::programs::Xdp;
use aya::programs::xdp::XdpMode;
use nix::sys::signal::Signal;
use paatp_tests::gradients::{real, synthetic};
use paatp_tests::job::run;
use paatp_tests::kernel::attached;
use paatp_tests::lab::lab_object;
use paatp_tests::netns::Namespace;
use paatp_tests::process::{Aggregator, AggregatorOptions, Process, paatp, wait_until};
use paatp_tests::report::Report;
use paatp_tests::{
    Dtype, Family, Gradient, JobOptions, JobResult, Lab, Layout, Rates, Running, WorkerCommand, require_bpf,
    skip,
};

/// What a busy machine takes for what is done at once.
const PROMPTLY: Duration = Duration::from_secs(10);
/// Longest run of a few processes.
const LONG: Duration = Duration::from_secs(60);
/// The rates of `disturbed.rs`.
const HARSH: Rates = Rates { loss: 0.10, duplicate: 0.05, reorder: 0.05, corrupt: 0.01 };

fn af_xdp(world: usize) -> JobOptions {
    JobOptions { io: "af-xdp", ..JobOptions::world(world) }
}

/// Runs a job, checks its result, and returns it.
fn right(lab: &Lab, inputs: &[Gradient], options: &JobOptions) -> JobResult {
    let result = run(lab, inputs, options).unwrap();
    let verdict = result.check(inputs, options).unwrap();
    assert!(verdict.is_right(), "{:#?}\n{options:?}", verdict.complaints);
    result
}

/// What each rank's report says of its driver.
fn io_of(result: &JobResult) -> Vec<serde_json::Value> {
    result.ranks.iter().map(|rank| rank.report.as_ref().unwrap().0["io"].clone()).collect()
}

fn real_gradients_bypass(name: &str, family: Family, lanes: usize, mtu: u32) {
    if !require_bpf(name) {
        return;
    }
    let inputs = real(0, 4).unwrap();
    let lab = Lab::new(Layout { workers: 4, mtu, racks: 0 }).unwrap();
    let mut options = af_xdp(4);
    (options.family, options.aggregator.lanes) = (family, lanes);
    let bypassed = right(&lab, &inputs, &options);
    for io in io_of(&bypassed) {
        assert_eq!((io["driver"].as_str(), io["queues"].as_u64()), (Some("af-xdp"), Some(1)), "{io}");
        // veth copies, and the report says so.
        assert_eq!(io["mode"], "copy");
        assert!(io["not_better_because"].as_str().unwrap().contains("zero-copy"), "{io}");
    }
    // The stack has not seen the answers.
    for worker in &lab.workers {
        let answers = worker.namespace.run(udp_datagrams_received).unwrap();
        assert_eq!(answers, 0, "datagrams went through the stack");
    }
    let through_sockets = right(&lab, &inputs, &JobOptions { io: "udp", ..options });
    assert_eq!(bypassed.digests(), through_sockets.digests(), "drivers do not change results");
    for io in io_of(&through_sockets) {
        assert_eq!((io["driver"].as_str(), io["mode"].as_str()), (Some("udp"), Some("segmented")), "{io}");
    }
}

/// Datagrams that the calling thread's namespace has handed to sockets.
fn udp_datagrams_received() -> u64 {
    let v4 = std::fs::read_to_string("/proc/thread-self/net/snmp").unwrap();
    let mut udp = v4.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let (names, values) = (udp.next().unwrap(), udp.next().unwrap());
    let v4 = names.split_whitespace().zip(values.split_whitespace()).find(|(name, _)| *name == "InDatagrams");
    let v6 = std::fs::read_to_string("/proc/thread-self/net/snmp6").unwrap();
    let v6 = v6.lines().find_map(|line| line.strip_prefix("Udp6InDatagrams"));
    [v4.unwrap().1, v6.unwrap()].map(|count| count.trim().parse::<u64>().unwrap()).iter().sum()
}

#[test]
fn bypass_v4() {
    real_gradients_bypass("drivers::bypass_v4", Family::V4, 352, 1500);
}

#[test]
fn bypass_v6() {
    real_gradients_bypass("drivers::bypass_v6", Family::V6, 320, 1500);
}

#[test]
fn bypass_wide_v4() {
    real_gradients_bypass("drivers::bypass_wide_v4", Family::V4, 768, 3506);
}

#[test]
fn bypass_wide_v6() {
    real_gradients_bypass("drivers::bypass_wide_v6", Family::V6, 832, 3506);
}

/// Loss, duplicates, reordering and flipped bits, outside of what the worker's host sees.
#[test]
fn bypass_over_a_disturbed_path() {
    if !require_bpf("drivers::bypass_over_a_disturbed_path") {
        return;
    }
    for (family, lanes, mtu) in [(Family::V4, 352, 1500), (Family::V6, 832, 3506)] {
        let inputs = real(0, 4).unwrap();
        let lab = Lab::new(Layout { workers: 4, mtu, racks: 0 }).unwrap();
        let mut options = af_xdp(4);
        (options.family, options.aggregator.lanes) = (family, lanes);
        let undisturbed = right(&lab, &inputs, &options);
        let disturbed = JobOptions { requests: HARSH, answers: HARSH, seed: 5, ..options };
        let result = right(&lab, &inputs, &disturbed);
        assert_eq!(result.digests(), undisturbed.digests());
        for counts in [result.requests, result.answers] {
            assert!(counts.dropped > 0 && counts.duplicated > 0 && counts.released > 0, "{counts}");
            assert!(counts.corrupted > 0 && counts.failed == 0, "{counts}");
        }
        assert!(io_of(&result).iter().all(|io| io["driver"] == "af-xdp"));
    }
}

/// Every queue has a socket, and answers that arrive on any of them are received.
#[test]
fn bypass_with_several_queues_and_ports() {
    if !require_bpf("drivers::bypass_with_several_queues_and_ports") {
        return;
    }
    let inputs = synthetic(3, 7, &[(Dtype::F32, 300_000)], 10.0);
    let lab = Lab::with_queues(Layout::workers(3), 2).unwrap();
    let mut options = af_xdp(3);
    options.aggregator.more = vec!["--ports".into(), "8".into()];
    for io in ["af-xdp", "udp"] {
        let result = right(&lab, &inputs, &JobOptions { io, ..options.clone() });
        let queues = if io == "udp" { 0 } else { 2 };
        assert!(io_of(&result).iter().all(|io| io["queues"] == queues), "{:?}", io_of(&result));
    }
}

/// A worker and an aggregator at the two ends of one veth: answers arrive only because the worker has a native program,
/// with either driver.
#[test]
fn the_worker_is_the_aggregators_peer() {
    if !require_bpf("drivers::the_worker_is_the_aggregators_peer") {
        return;
    }
    let ours = Namespace::new("peer-worker").unwrap();
    let theirs = Namespace::new("peer-aggregator").unwrap();
    let target = theirs.path().display().to_string();
    ours.ip(&["link", "add", "near", "type", "veth", "peer", "name", "far", "netns", &target]).unwrap();
    ours.ip(&["address", "add", "10.90.0.2/24", "dev", "near"]).unwrap();
    theirs.ip(&["address", "add", "10.90.0.1/24", "dev", "far"]).unwrap();
    ours.ip(&["link", "set", "near", "up"]).unwrap();
    theirs.ip(&["link", "set", "far", "up"]).unwrap();
    let mut command = theirs.command(paatp().unwrap());
    command.args(AggregatorOptions::world(1).args("far"));
    let _aggregator = Aggregator::watch(Process::spawn("the aggregator", command).unwrap()).unwrap();

    let folder = tempfile::tempdir().unwrap();
    let inputs = synthetic(1, 3, &[(Dtype::F32, 100_000)], 1.0);
    inputs[0].write(&folder.path().join("input")).unwrap();
    for io in ["udp", "af-xdp", "auto"] {
        let report = folder.path().join(io);
        let mut command = ours.command(paatp().unwrap());
        command
            .args(["allreduce", "--job", "lab", "--rank", "0", "--world", "1", "--aggregator", "10.90.0.1"])
            .args(["--timeout", "10s", "--io", io, "--input"])
            .arg(folder.path().join("input"))
            .arg("--output")
            .arg(folder.path().join("output"))
            .arg("--report")
            .arg(&report);
        let finished = Process::spawn(format!("the worker with {io}"), command).unwrap().wait(LONG).unwrap();
        assert!(finished.is_success(), "{io}: {}", finished.output);
        let sent = Report::read(&report).unwrap();
        assert_eq!(sent.0["io"]["driver"], if io == "auto" { "udp" } else { io });
        wait_until("the program was off", PROMPTLY, || Ok(attached(&ours, "near")?.is_none())).unwrap();
    }
}

/// SIGKILL leaves no program, and the next worker gets what it asks for.
#[test]
fn a_killed_worker_leaves_nothing() {
    if !require_bpf("drivers::a_killed_worker_leaves_nothing") {
        return;
    }
    let lab = Lab::new(Layout::workers(2)).unwrap();
    let inputs = synthetic(2, 3, &[(Dtype::F32, 6_000_000)], 1.0);
    // With `udp` nobody answers, because all requests are lost, and the worker tries a program of its own.
    for (io, loss, program) in [("af-xdp", 0.5, "answers"), ("udp", 1.0, "pass")] {
        let options = JobOptions { io, requests: Rates { loss, ..Rates::NONE }, ..af_xdp(2) };
        let mut running = Running::start(&lab, &inputs, &options).unwrap();
        let (namespace, interface) = (&lab.workers[0].namespace, &lab.workers[0].interface);
        wait_until("the worker's program was attached", LONG, || {
            Ok(attached(namespace, interface)?.is_some_and(|xdp| xdp.name == program && xdp.is_native))
        })
        .unwrap();
        running.workers[0].signal(Signal::SIGKILL).unwrap();
        assert_eq!(running.workers[0].wait(PROMPTLY).unwrap().signal(), Some(9));
        wait_until("the program was gone", PROMPTLY, || Ok(attached(namespace, interface)?.is_none()))
            .unwrap();
    }
    let inputs = real(0, 2).unwrap();
    assert!(io_of(&right(&lab, &inputs, &af_xdp(2))).iter().all(|io| io["driver"] == "af-xdp"));
}

/// Two workers of one host: the second one cannot have the interface's queues as well.
#[test]
fn two_workers_on_one_interface() {
    if !require_bpf("drivers::two_workers_on_one_interface") {
        return;
    }
    let lab = Lab::new(Layout::workers(2)).unwrap();
    let inputs = real(0, 2).unwrap();
    let together = |io: &'static str, timeout| {
        let options = JobOptions { io, timeout, ..JobOptions::world(2) };
        let mut running = Running::prepare(&lab, &inputs, &options).unwrap();
        for command in &running.commands {
            // Both on the first host.
            running.workers.push(command.spawn(&lab.workers[0]).unwrap());
        }
        running.finish(LONG).unwrap()
    };
    let result = together("af-xdp", Duration::from_secs(2));
    let refused: Vec<_> = result
        .ranks
        .iter()
        .filter(|rank| rank.finished.output.contains("--io af-xdp"))
        .map(|rank| &rank.finished)
        .collect();
    assert_eq!(refused.len(), 1, "{result:?}");
    let output = &refused[0].output;
    assert!(!refused[0].is_success() && output.contains("--io udp"), "{output}");
    assert!(output.contains("is attached to") && output.contains(&lab.workers[0].interface), "{output}");

    // The second one has sockets beside the first one's program.
    let options = JobOptions { io: "af-xdp", ..JobOptions::world(2) };
    let mut running = Running::prepare(&lab, &inputs, &options).unwrap();
    running.commands[1].io = "udp";
    for command in &running.commands {
        running.workers.push(command.spawn(&lab.workers[0]).unwrap());
    }
    let result = running.finish(LONG).unwrap();
    let verdict = result.check(&inputs, &options).unwrap();
    assert!(verdict.is_right(), "{:#?}", verdict.complaints);
    let drivers: Vec<_> = io_of(&result).iter().map(|io| io["driver"].as_str().unwrap().to_owned()).collect();
    assert_eq!(drivers, ["af-xdp", "udp"]);
}

/// veth only copies, so `auto` takes sockets there, and says why.
#[test]
fn auto_takes_what_is_faster() {
    if !require_bpf("drivers::auto_takes_what_is_faster") {
        return;
    }
    let lab = Lab::new(Layout::workers(2)).unwrap();
    let result = right(&lab, &real(0, 2).unwrap(), &JobOptions { io: "auto", ..JobOptions::world(2) });
    for (io, rank) in io_of(&result).iter().zip(&result.ranks) {
        assert_eq!((io["driver"].as_str(), io["mode"].as_str()), (Some("udp"), Some("segmented")));
        for text in [io["not_better_because"].as_str().unwrap(), rank.finished.output.as_str()] {
            assert!(text.contains("zero-copy"), "{text}");
        }
        assert!(rank.finished.output.contains("over UDP"), "{}", rank.finished.output);
    }
}

/// An aggregator in generic mode behind virtual interfaces gets messages of many datagrams uncut.
#[test]
fn segmentation_ends_where_nobody_answers_it() {
    if !require_bpf("drivers::segmentation_ends_where_nobody_answers_it") {
        return;
    }
    let lab = Lab::new(Layout::workers(2)).unwrap();
    let mut options = JobOptions::world(2);
    options.aggregator.xdp_mode = "generic";
    let result = right(&lab, &synthetic(2, 9, &[(Dtype::F32, 200_000)], 1.0), &options);
    for (io, rank) in io_of(&result).iter().zip(&result.ranks) {
        assert_eq!(io["mode"], "plain");
        assert!(rank.finished.output.contains("UDP segmentation"), "{}", rank.finished.output);
    }
}

/// Somebody else's program on the interface, and missing privileges: named, and not stumbled over.
#[test]
fn what_cannot_be_had_is_explained() {
    if !require_bpf("drivers::what_cannot_be_had_is_explained") {
        return;
    }
    let lab = Lab::new(Layout::workers(1)).unwrap();
    let host = &lab.workers[0];
    let inputs = real(0, 1).unwrap();
    let mut other = Ebpf::load_file(lab_object()).unwrap();
    let program: &mut Xdp = other.program_mut("pass").unwrap().try_into().unwrap();
    program.load().unwrap();
    let id = program.info().unwrap().id();
    host.namespace.run(|| program.attach(&host.interface, XdpMode::Driver).unwrap()).unwrap();
    let result = run(&lab, &inputs, &af_xdp(1)).unwrap();
    let refused = &result.ranks[0].finished;
    assert!(!refused.is_success(), "{}", refused.output);
    for text in ["--io udp", &format!("id {id}"), &host.interface] {
        assert!(refused.output.contains(text), "{text}: {}", refused.output);
    }
    drop(other);

    if host.namespace.output("setpriv", &["--version"]).is_err() {
        skip("drivers::what_cannot_be_had_is_explained", "setpriv is missing; it is in Debian's util-linux");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let _aggregator = Aggregator::start(&lab, &AggregatorOptions::world(1)).unwrap();
    let mut worker = WorkerCommand::new(&lab, Family::V4, 0, 1, folder.path());
    inputs[0].write(&worker.input).unwrap();
    let mut without_privileges = |io| {
        worker.io = io;
        let mut command = host.namespace.command("setpriv");
        command
            .args(["--bounding-set", "-all", "--inh-caps", "-all", "--ambient-caps", "-all"])
            .arg(paatp().unwrap())
            .args(worker.args());
        Process::spawn("a worker without privileges", command).unwrap().wait(LONG).unwrap()
    };
    let finished = without_privileges("udp");
    assert!(finished.is_success(), "{}", finished.output);
    let finished = without_privileges("af-xdp");
    assert!(!finished.is_success());
    for text in ["--io udp", "CAP_BPF", "CAP_NET_ADMIN", "CAP_NET_RAW"] {
        assert!(finished.output.contains(text), "{text}: {}", finished.output);
    }
}
