//! Each fault that an operator may meet, caused on purpose, and where it is told: what it is, why, and what mends it.
//! Those that other files cause already are listed with their tests; a test holds the list to them.
//!
//! | fault | told by | tests |
//! |---|---|---|
//! | no CAP_BPF | `doctor`, `run` (status 3) | `doctor::missing_capabilities` `service::missing_capabilities_are_status_3` |
//! | no CAP_NET_ADMIN | `doctor`, `run` | `doctor::missing_capabilities` `lifecycle::two_capabilities_are_enough` |
//! | seccomp refuses bpf | `doctor`, `run` (status 3) | `doctor::seccomp_is_told_from_capabilities` `faults::seccomp_refuses_bpf` |
//! | bpffs missing or read-only | `doctor`, `run` (a warning) | `doctor::bpffs_missing_or_read_only` `restart::places_where_nothing_can_be_pinned` |
//! | MTU too large for native mode | `doctor`, `run` | `doctor::mtu_too_large_for_native_mode` |
//! | another XDP program attached | `doctor`, `run` (status 4) | `doctor::another_program` `faults::another_program_is_status_4` |
//! | veth whose other end has no program | `doctor`, `run` (a warning), `status`, the worker | `doctor::the_other_end_of_a_veth` `faults::the_other_end_of_a_veth_has_no_program` |
//! | interface down and up under load | `status` | `faults::the_interface_is_down_for_a_while` |
//! | interface gone and back under load | `run` (status 1), the workers | `faults::the_interface_is_gone_and_comes_back` |
//! | port taken | `doctor`, `run` (status 4) | `doctor::port_taken` `faults::a_taken_port_is_status_4` |
//! | a rank is missing | the workers, `status` (status 6) | `failures::a_rank_never_shows_up` `faults::status_names_a_missing_rank` |
//! | a rank is stopped | the workers, `status` (status 6), metrics | `failures::a_rank_is_stopped` `metrics::a_stopped_rank_is_named` `faults::status_names_a_stopped_rank` |
//! | a rank has the wrong world size | the worker, at once | `faults::a_wrong_world_size_is_told_at_once` |
//! | a wrong token | the worker, `job` | `faults::wrong_tokens_are_told` |
//! | the switch is dead, or dies | `status` (status 6), metrics | `switch_control::jobs_run_while_the_switch_is_dead` `switch_control::a_job_is_put_on_the_switch` |
//! | a typo in the configuration | `run`, `config check` (status 2) | `service::exit_statuses_tell_what_to_do` |

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use aya::Ebpf;
use aya::programs::{Xdp, xdp::XdpMode};
use nix::sys::signal::Signal;
use paatp_common::Event;
use paatp_tests::gradients::synthetic;
use paatp_tests::job::run;
use paatp_tests::kernel::attached;
use paatp_tests::lab::lab_object;
use paatp_tests::netns::Namespace;
use paatp_tests::process::{
    Aggregator, AggregatorOptions, Finished, PORT, Process, WorkerCommand, paatp, wait_until,
};
use paatp_tests::seccomp::refuse_bpf;
use paatp_tests::{Dtype, Family, Gradient, JobOptions, Lab, Layout, Running, require_bpf, require_program};

/// Starting, ending and being told, on a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);
/// What workers are given whose job is to fail.
const TIMEOUT: Duration = Duration::from_secs(3);

/// The list above names tests that exist.
#[test]
fn the_list_of_faults_names_tests() {
    let rows: Vec<&str> =
        include_str!("faults.rs").lines().filter_map(|line| line.strip_prefix("//! | ")).skip(1).collect();
    assert!(rows.len() >= 14, "{rows:?}");
    for row in rows {
        let tests = row.trim_end_matches(" |").rsplit(" | ").next().unwrap();
        for test in tests.split('`').filter(|part| !part.trim().is_empty()) {
            let (file, function) = test.split_once("::").unwrap();
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/{file}.rs"));
            let text = fs::read_to_string(path).unwrap();
            assert!(text.contains(&format!("#[test]\nfn {function}()")), "no {test}");
        }
    }
}

fn wait(name: &str, command: Command) -> Finished {
    Process::spawn(name, command).unwrap().wait(DEADLINE).unwrap()
}

/// `paatp` with these arguments in a namespace.
fn told(namespace: &Namespace, args: &[&str]) -> Finished {
    let mut command = namespace.command(paatp().unwrap());
    command.args(args);
    wait("paatp", command)
}

/// `paatp run` on an interface, which cannot start.
fn refused(namespace: &Namespace, interface: &str, change: impl FnOnce(&mut Command)) -> Finished {
    let mut command = namespace.command(paatp().unwrap());
    command.args(AggregatorOptions::world(2).args(interface));
    change(&mut command);
    wait("an aggregator that cannot start", command)
}

#[track_caller]
fn assert_says(finished: &Finished, status: i32, words: &[&str]) {
    let output = &finished.output;
    assert_eq!(finished.status.code(), Some(status), "{output}");
    for word in words {
        assert!(output.contains(word), "no \"{word}\" in:\n{output}");
    }
}

/// Tensors that ranks need some seconds for.
fn large(world: usize) -> Vec<Gradient> {
    synthetic(world, 31, &[(Dtype::F32, 6_000_000)], 1.0)
}

fn wait_for_results(running: &Running<'_>) {
    let maps = &running.maps;
    wait_until("some results were out", DEADLINE, || Ok(maps.counters()?.noted(Event::Results) > 300))
        .unwrap();
}

/// `paatp status` until it says this; its exit status then.
fn status_until(lab: &Lab, words: &str) -> Finished {
    let mut last = None;
    let said = wait_until(&format!("status said \"{words}\""), DEADLINE, || {
        let finished = told(&lab.aggregator.namespace, &["status"]);
        let says = finished.output.contains(words);
        last = Some(finished);
        Ok(says)
    });
    let last = last.unwrap();
    said.unwrap_or_else(|error| panic!("{error}:\n{}", last.output));
    last
}

#[test]
fn seccomp_refuses_bpf() {
    if !require_bpf("faults::seccomp_refuses_bpf") {
        return;
    }
    let lab = Lab::new(Layout::workers(0)).unwrap();
    let (namespace, interface) = (&lab.aggregator.namespace, lab.aggregator.interface.as_str());
    for number in [libc::EPERM, libc::ENOSYS] {
        let action = libc::SECCOMP_RET_ERRNO | number as u32;
        let finished = refused(namespace, interface, |command| refuse_bpf(command, action));
        assert_says(&finished, 3, &["a seccomp filter", "bpf(2)", "paatp doctor", "SystemCallFilter"]);
        // The kernel is blamed for nothing, and no capability.
        assert!(!finished.output.contains("run a kernel with"), "{}", finished.output);
        assert!(!finished.output.contains("lacks"), "{}", finished.output);
        assert_eq!(attached(namespace, interface).unwrap(), None);
    }
    // A filter that kills leaves no words: `doctor` has them (doctor::seccomp_is_told_from_capabilities).
    let kill = libc::SECCOMP_RET_KILL_PROCESS;
    let finished = refused(namespace, interface, |command| refuse_bpf(command, kill));
    assert_eq!(finished.signal(), Some(Signal::SIGSYS as i32), "{}", finished.output);
}

/// A program that passes everything; gone with the value.
fn pass(namespace: &Namespace, interface: &str) -> Ebpf {
    let mut object = Ebpf::load_file(lab_object()).unwrap();
    let program: &mut Xdp = object.program_mut("pass").unwrap().try_into().unwrap();
    program.load().unwrap();
    namespace.run(|| program.attach(interface, XdpMode::Driver)).unwrap().unwrap();
    object
}

#[test]
fn another_program_is_status_4() {
    if !require_bpf("faults::another_program_is_status_4") {
        return;
    }
    let lab = Lab::new(Layout::workers(0)).unwrap();
    let (namespace, interface) = (&lab.aggregator.namespace, lab.aggregator.interface.as_str());
    let _other = pass(namespace, interface);
    let id = attached(namespace, interface).unwrap().unwrap().id.to_string();
    let finished = refused(namespace, interface, |_| {});
    let off = format!("ip link set dev {interface} xdp off");
    assert_says(&finished, 4, &["another XDP program", &id, &off, "bpftool net"]);
}

#[test]
fn a_taken_port_is_status_4() {
    if !require_bpf("faults::a_taken_port_is_status_4") {
        return;
    }
    let lab = Lab::new(Layout::workers(0)).unwrap();
    let (namespace, interface) = (&lab.aggregator.namespace, lab.aggregator.interface.as_str());
    let address = lab.aggregator.address(Family::V4);
    let _listener = namespace.run(|| TcpListener::bind((address, PORT))).unwrap().unwrap();
    let finished = refused(namespace, interface, |_| {});
    assert_says(&finished, 4, &["10.80.0.1:20545", "in use", "--port"]);
    // What was attached by then is off again.
    assert_eq!(attached(namespace, interface).unwrap(), None);
}

/// The worker is the other end itself, and may not load what answers by `XDP_TX` need there.
#[test]
fn the_other_end_of_a_veth_has_no_program() {
    let name = "faults::the_other_end_of_a_veth_has_no_program";
    if !require_bpf(name) || !require_program(name, "setpriv") {
        return;
    }
    let (near, far) = (Namespace::new("near").unwrap(), Namespace::new("far").unwrap());
    let target = far.path().display().to_string();
    near.ip(&["link", "add", "near", "type", "veth", "peer", "name", "far", "netns", &target]).unwrap();
    for (namespace, interface, address) in [(&near, "near", "10.90.0.1/24"), (&far, "far", "10.90.0.2/24")] {
        namespace.ip(&["address", "add", address, "dev", interface]).unwrap();
        namespace.ip(&["link", "set", interface, "up"]).unwrap();
    }
    let mut command = near.command(paatp().unwrap());
    command.args(AggregatorOptions::world(1).args("near"));
    let mut aggregator = Aggregator::watch(Process::spawn("the aggregator", command).unwrap()).unwrap();
    let missing = "no native XDP program runs at the other end of the veth `near`, `far`";
    aggregator.process.wait_for_line(missing, DEADLINE).unwrap();
    // Not yet an error: a worker may bring one.
    assert_says(&told(&near, &["status"]), 0, &[missing, "--xdp-mode generic"]);
    assert_says(&told(&near, &["doctor", "near"]), 0, &["veth-peer", "--xdp-mode generic"]);

    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    synthetic(1, 5, &[(Dtype::F32, 100)], 1.0)[0].write(Path::new(&path("in"))).unwrap();
    let mut worker = far.command("setpriv");
    worker.args(["--bounding-set", "-all", "--inh-caps", "-all"]).arg(paatp().unwrap());
    worker.args(["allreduce", "--job", "lab", "--rank", "0", "--world", "1", "--aggregator", "10.90.0.1"]);
    worker.args(["--io", "udp", "--timeout", "3s", "--input", &path("in"), "--output", &path("out")]);
    let finished = wait("a worker without capabilities", worker);
    let own_end = "the other end of the veth `far`, its answers need a native XDP program here";
    assert_says(&finished, 1, &["sent nothing usable", "paatp doctor", own_end]);

    let _program = pass(&far, "far");
    let finished = told(&near, &["status"]);
    assert!(!finished.output.contains("no native XDP program"), "{}", finished.output);
    assert!(aggregator.stop().unwrap().is_success());
}

/// Nothing is lost but time, and `paatp status` says meanwhile what is wrong.
#[test]
fn the_interface_is_down_for_a_while() {
    if !require_bpf("faults::the_interface_is_down_for_a_while") {
        return;
    }
    let lab = Lab::new(Layout::workers(2)).unwrap();
    let (inputs, options) = (large(2), JobOptions { timeout: DEADLINE, ..JobOptions::world(2) });
    let running = Running::start(&lab, &inputs, &options).unwrap();
    wait_for_results(&running);
    let (namespace, interface) = (&lab.aggregator.namespace, lab.aggregator.interface.as_str());
    namespace.ip(&["link", "set", interface, "down"]).unwrap();
    let finished = status_until(&lab, &format!("interface `{interface}` is down"));
    assert_says(&finished, 6, &["needs a look", &format!("ip link set dev {interface} up")]);
    namespace.ip(&["link", "set", interface, "up"]).unwrap();
    let result = running.finish(DEADLINE).unwrap();
    let verdict = result.check(&inputs, &options).unwrap();
    assert!(verdict.is_right(), "{:?}", verdict.complaints);
}

#[test]
fn the_interface_is_gone_and_comes_back() {
    if !require_bpf("faults::the_interface_is_gone_and_comes_back") {
        return;
    }
    let lab = Lab::new(Layout::workers(2)).unwrap();
    let (inputs, options) = (large(2), JobOptions { timeout: TIMEOUT, ..JobOptions::world(2) });
    let mut running = Running::start(&lab, &inputs, &options).unwrap();
    wait_for_results(&running);
    let (namespace, interface) = (&lab.aggregator.namespace, lab.aggregator.interface.as_str());
    let elsewhere = Namespace::new("elsewhere").unwrap();
    let there = elsewhere.path().display().to_string();
    namespace.ip(&["link", "set", interface, "netns", &there]).unwrap();

    let finished = running.aggregator.process.wait(DEADLINE).unwrap();
    let gone = format!("interface `{interface}` is gone");
    assert_says(&finished, 1, &[&gone, "moved to another network namespace", "start paatp again"]);
    for (worker, command) in running.workers.iter_mut().zip(&running.commands) {
        let finished = worker.wait(DEADLINE).unwrap();
        assert_says(&finished, 1, &["the aggregator sent nothing usable", "'paatp run' is up"]);
        assert!(!command.output.exists());
    }
    assert_eq!(attached(&elsewhere, interface).unwrap(), None, "nothing stays on it");

    // It comes back, as a cable or a hypervisor may have it, and so does the aggregator, as its unit would start it.
    let back = namespace.path().display().to_string();
    elsewhere.ip(&["link", "set", interface, "netns", &back]).unwrap();
    namespace.ip(&["address", "add", "10.80.0.1/16", "dev", interface]).unwrap();
    namespace.ip(&["link", "set", interface, "up"]).unwrap();
    let small = synthetic(2, 32, &[(Dtype::F32, 20_000)], 1.0);
    let options = JobOptions { timeout: DEADLINE, ..JobOptions::world(2) };
    let result = run(&lab, &small, &options).unwrap();
    let verdict = result.check(&small, &options).unwrap();
    assert!(verdict.is_right(), "{:?}", verdict.complaints);
}

#[test]
fn status_names_a_missing_rank() {
    if !require_bpf("faults::status_names_a_missing_rank") {
        return;
    }
    let lab = Lab::new(Layout::workers(3)).unwrap();
    let inputs = synthetic(3, 1, &[(Dtype::F32, 1000)], 1.0);
    let options = JobOptions { timeout: DEADLINE, ..JobOptions::world(3) };
    let mut running = Running::prepare(&lab, &inputs, &options).unwrap();
    running.start_rank(0).unwrap();
    running.start_rank(1).unwrap();
    let finished = status_until(&lab, "missing: others wait for it to join");
    assert_says(&finished, 6, &["needs a look", "! job `lab` waits for rank 2 to join"]);
    running.start_rank(2).unwrap();
    let result = running.finish(DEADLINE).unwrap();
    assert!(result.check(&inputs, &options).unwrap().is_right());
}

#[test]
fn status_names_a_stopped_rank() {
    if !require_bpf("faults::status_names_a_stopped_rank") {
        return;
    }
    let lab = Lab::new(Layout::workers(3)).unwrap();
    let (inputs, options) = (large(3), JobOptions { timeout: DEADLINE, ..JobOptions::world(3) });
    let running = Running::start(&lab, &inputs, &options).unwrap();
    wait_for_results(&running);
    running.workers[1].signal(Signal::SIGSTOP).unwrap();
    let finished = status_until(&lab, "waits for contributions of rank 1");
    assert_says(&finished, 6, &["needs a look", "the others wait for it", "chunks behind"]);
    running.workers[1].signal(Signal::SIGCONT).unwrap();
    let result = running.finish(DEADLINE).unwrap();
    assert!(result.check(&inputs, &options).unwrap().is_right());
}

/// A worker of the lab with something in its command line changed.
fn worker(lab: &Lab, folder: &Path, change: impl FnOnce(&mut WorkerCommand)) -> Command {
    let mut options = WorkerCommand::new(lab, Family::V4, 0, 2, folder);
    options.timeout = DEADLINE * 2;
    change(&mut options);
    synthetic(1, 4, &[(Dtype::F32, 10)], 1.0)[0].write(&options.input).unwrap();
    let mut command = lab.workers[0].namespace.command(paatp().unwrap());
    command.args(options.args());
    command
}

#[test]
fn a_wrong_world_size_is_told_at_once() {
    if !require_bpf("faults::a_wrong_world_size_is_told_at_once") {
        return;
    }
    let lab = Lab::new(Layout::workers(1)).unwrap();
    let aggregator = Aggregator::start(&lab, &AggregatorOptions::world(2)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let start = Instant::now();
    let finished = wait("a rank", worker(&lab, folder.path(), |options| options.world = 3));
    assert_says(
        &finished,
        1,
        &["rank 0 expects 3 ranks, but job `lab` has 2", "start all workers with --world 2"],
    );
    assert!(start.elapsed() < DEADLINE, "it did not wait for ranks that cannot come");
    let said = aggregator.stop().unwrap().output;
    assert!(said.contains("refused") && said.contains("--world 2"), "{said}");
}

#[test]
fn wrong_tokens_are_told() {
    if !require_bpf("faults::wrong_tokens_are_told") {
        return;
    }
    let lab = Lab::new(Layout::workers(1)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).display().to_string();
    let more = vec!["--token-file".to_owned(), file("token"), "--memory".to_owned(), "2MiB".to_owned()];
    let aggregator =
        Aggregator::start(&lab, &AggregatorOptions { more, ..AggregatorOptions::world(2) }).unwrap();
    let namespace = &lab.aggregator.namespace;
    let create = ["job", "create", "closed", "--world", "2", "--key-file", &file("key")];
    let wrong = "0123456789abcdef".repeat(4);
    fs::write(file("wrong"), format!("{wrong}\n")).unwrap();
    fs::set_permissions(file("wrong"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let opens_nothing = "that token opens nothing here; see which file the aggregator uses (--token-file)";

    let with = |token: &str| {
        let mut all = create.to_vec();
        all.extend(["--token-file", token]);
        told(namespace, &all)
    };
    assert_says(&with(&file("wrong")), 1, &[opens_nothing]);
    // A command that changes nothing leaves no key either.
    assert!(!Path::new(&file("key")).exists());
    assert_says(&told(namespace, &create), 1, &["--token-file"]);
    assert_says(&with(&file("token")), 0, &[]);

    for (token, words) in [(Some("wrong"), opens_nothing), (None, "--token-file")] {
        let mut command = worker(&lab, folder.path(), |options| options.job = "closed".into());
        command.args(token.iter().flat_map(|token| ["--token-file".to_owned(), file(token)]));
        assert_says(&wait("a stranger", command), 1, &["refused rank 0 of job `closed`", words]);
    }
    let said = aggregator.stop().unwrap().output;
    assert!(!said.contains(&wrong), "no token is logged");
}
