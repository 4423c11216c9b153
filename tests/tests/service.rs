//! The aggregator as a service: signals and draining, exit statuses, logs, what it tells its service manager.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use paatp_tests::gradients::synthetic;
use paatp_tests::kernel::attached;
use paatp_tests::process::{Aggregator, AggregatorOptions, LOG_FORMAT, PORT, Process, paatp, wait_until};
use paatp_tests::{Dtype, Gradient, JobOptions, Lab, Layout, Running, require_bpf, skip};

/// Starting and ending, on a busy machine.
const PROMPTLY: Duration = Duration::from_secs(10);
/// An all-reduce of [`large`], on a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// Enough to be caught at work.
fn large() -> Vec<Gradient> {
    synthetic(2, 11, &[(Dtype::F32, 6_000_000)], 1.0)
}

/// An all-reduce of two ranks, the second of which has been stopped while it was at work.
fn held_up<'a>(lab: &'a Lab, inputs: &[Gradient], drain_timeout: &str) -> Running<'a> {
    let more = vec!["--drain-timeout".to_owned(), drain_timeout.to_owned()];
    let aggregator = AggregatorOptions { more, ..AggregatorOptions::world(2) };
    let options = JobOptions { aggregator, timeout: DEADLINE, ..JobOptions::world(2) };
    let mut running = Running::start(lab, inputs, &options).unwrap();
    running.aggregator.process.wait_for_line("all ranks are there", DEADLINE).unwrap();
    running.workers[1].signal(Signal::SIGSTOP).unwrap();
    assert!(!running.workers[1].has_ended().unwrap(), "the worker was quicker than this test");
    running
}

/// Status and body of a page of the control server, from inside the aggregator's namespace.
fn page(lab: &Lab, path: &str) -> (u16, String) {
    let address = SocketAddr::from(([127, 0, 0, 1], PORT));
    let answer = lab.aggregator.namespace.run(|| -> std::io::Result<String> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(PROMPTLY))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    });
    let answer = answer.unwrap().unwrap();
    let status = answer.split_whitespace().nth(1).unwrap().parse().unwrap();
    (status, answer.split_once("\r\n\r\n").unwrap().1.to_owned())
}

#[test]
fn what_runs_is_waited_for() {
    if !require_bpf("service::what_runs_is_waited_for") {
        return;
    }
    let lab = Lab::new(Layout::workers(2)).unwrap();
    let inputs = large();
    let mut running = held_up(&lab, &inputs, "60s");
    assert_eq!(page(&lab, "/readyz").0, 200);
    running.aggregator.process.signal(Signal::SIGTERM).unwrap();
    running.aggregator.process.wait_for_line("waiting for what runs", PROMPTLY).unwrap();
    let (status, body) = page(&lab, "/readyz");
    assert!(status == 503 && body.contains("draining"), "{status} {body}");
    // Whoever comes now is told.
    let mut late = lab.workers[0].namespace.command(paatp().unwrap());
    late.args(running.commands[0].args());
    let finished = Process::spawn("a late worker", late).unwrap().wait(DEADLINE).unwrap();
    assert!(!finished.is_success() && finished.output.contains("drained"), "{}", finished.output);

    running.workers[1].signal(Signal::SIGCONT).unwrap();
    for worker in &mut running.workers {
        let finished = worker.wait(DEADLINE).unwrap();
        assert!(finished.is_success(), "{}", finished.output);
    }
    let finished = running.aggregator.process.wait(PROMPTLY).unwrap();
    assert!(finished.is_success(), "{}: {}", finished.status, finished.output);
    let results: Vec<Vec<u8>> =
        running.commands.iter().map(|command| fs::read(&command.output).unwrap()).collect();
    assert_eq!(results[0], results[1]);
    assert_eq!(attached(&lab.aggregator.namespace, &lab.aggregator.interface).unwrap(), None);
}

#[test]
fn ranks_that_wait_are_told() {
    if !require_bpf("service::ranks_that_wait_are_told") {
        return;
    }
    let lab = Lab::new(Layout::workers(2)).unwrap();
    let inputs = synthetic(2, 11, &[(Dtype::F32, 100)], 1.0);
    let mut running = Running::prepare(&lab, &inputs, &JobOptions::world(2)).unwrap();
    running.start_rank(0).unwrap();
    running.aggregator.process.wait_for_line("joined", PROMPTLY).unwrap();
    running.aggregator.process.signal(Signal::SIGTERM).unwrap();
    let finished = running.workers[0].wait(DEADLINE).unwrap();
    assert!(!finished.is_success() && finished.output.contains("drained"), "{}", finished.output);
    assert!(running.aggregator.process.wait(PROMPTLY).unwrap().is_success());
}

#[test]
fn waiting_ends_in_the_configured_time() {
    if !require_bpf("service::waiting_ends_in_the_configured_time") {
        return;
    }
    let lab = Lab::new(Layout::workers(2)).unwrap();
    let inputs = large();
    for (drain_timeout, least) in [("0", Duration::ZERO), ("1500ms", Duration::from_millis(1500))] {
        let mut running = held_up(&lab, &inputs, drain_timeout);
        let begin = Instant::now();
        running.aggregator.process.signal(Signal::SIGTERM).unwrap();
        let finished = running.aggregator.process.wait(least + PROMPTLY).unwrap();
        assert!(finished.is_success(), "{}: {}", finished.status, finished.output);
        assert!(begin.elapsed() >= least, "{:?}", begin.elapsed());
        assert!(finished.output.contains("although jobs run"), "{}", finished.output);
        assert_eq!(attached(&lab.aggregator.namespace, &lab.aggregator.interface).unwrap(), None);
    }
}

#[test]
fn a_second_signal_ends_it_at_once() {
    if !require_bpf("service::a_second_signal_ends_it_at_once") {
        return;
    }
    let lab = Lab::new(Layout::workers(2)).unwrap();
    let inputs = large();
    for (second, status) in [(Signal::SIGTERM, 143), (Signal::SIGINT, 130)] {
        let mut running = held_up(&lab, &inputs, "10m");
        running.aggregator.process.signal(Signal::SIGTERM).unwrap();
        running.aggregator.process.wait_for_line("waiting for what runs", PROMPTLY).unwrap();
        running.aggregator.process.signal(second).unwrap();
        let finished = running.aggregator.process.wait(PROMPTLY).unwrap();
        assert_eq!(finished.status.code(), Some(status), "{}", finished.output);
    }
}

/// A container's process 1 is sent signals that it has no handler for in vain.
#[test]
fn process_one_heeds_signals() {
    if !require_bpf("service::process_one_heeds_signals") {
        return;
    }
    let lab = Lab::new(Layout::workers(0)).unwrap();
    let mut command = lab.aggregator.namespace.command("unshare");
    command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]).arg(paatp().unwrap());
    command.args(AggregatorOptions::world(2).args(&lab.aggregator.interface));
    let mut outer = Aggregator::watch(Process::spawn("process 1", command).unwrap()).unwrap();
    let parent = outer.process.pid();
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap();
    let inner: i32 = children.trim().parse().unwrap();
    let names = fs::read_to_string(format!("/proc/{inner}/status")).unwrap();
    let numbers = names.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap();
    assert_eq!(numbers.split_whitespace().last(), Some("1"), "{numbers}");
    kill(Pid::from_raw(inner), Signal::SIGTERM).unwrap();
    let finished = outer.process.wait(PROMPTLY).unwrap();
    assert!(finished.is_success(), "{}: {}", finished.status, finished.output);
    assert_eq!(attached(&lab.aggregator.namespace, &lab.aggregator.interface).unwrap(), None);
}

#[test]
fn a_hangup_is_declined() {
    if !require_bpf("service::a_hangup_is_declined") {
        return;
    }
    let lab = Lab::new(Layout::workers(0)).unwrap();
    let mut aggregator = Aggregator::start(&lab, &AggregatorOptions::world(2)).unwrap();
    for _ in 0..2 {
        aggregator.process.signal(Signal::SIGHUP).unwrap();
    }
    aggregator.process.wait_for_line("SIGHUP: settings are read at the start only", PROMPTLY).unwrap();
    assert!(!aggregator.process.has_ended().unwrap());
    assert!(aggregator.stop().unwrap().is_success());
}

/// How `paatp` ends with these arguments in the aggregator's namespace.
fn status(lab: &Lab, args: &[&str]) -> (Option<i32>, String) {
    let mut command = lab.aggregator.namespace.command(paatp().unwrap());
    command.args(args);
    let finished = Process::spawn("paatp", command).unwrap().wait(PROMPTLY).unwrap();
    (finished.status.code(), finished.output)
}

#[test]
fn exit_statuses_tell_what_to_do() {
    if !require_bpf("service::exit_statuses_tell_what_to_do") {
        return;
    }
    let lab = Lab::new(Layout::workers(0)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let interface = lab.aggregator.interface.clone();
    let wrong = folder.path().join("wrong.toml");
    fs::write(&wrong, "[node]\nifcae = \"eth0\"\n").unwrap();
    let wrong = wrong.display().to_string();
    let run = ["run", "--iface", &interface, "--job", "a", "--world", "2"];
    let run_with = |more: &[&str]| status(&lab, &[&run[..], more].concat());

    // 2: called or configured wrongly.
    let (code, output) = status(&lab, &["run", "--config", &wrong]);
    assert!(code == Some(2) && output.contains("did you mean `iface`?"), "{code:?} {output}");
    let (code, output) = status(&lab, &["config", "check", &wrong]);
    assert!(code == Some(2) && output.contains(":2:"), "{code:?} {output}");
    assert_eq!(run_with(&["--nothing"]).0, Some(2));
    assert_eq!(run_with(&["--port", "65535", "--ports", "2"]).0, Some(2));
    assert_eq!(run_with(&["--log", "paatp=loudly"]).0, Some(2));
    // 3: not here.
    let (code, output) = status(&lab, &["run", "--iface", "nothing0", "--job", "a", "--world", "2"]);
    assert!(code == Some(3) && output.contains("nothing0"), "{code:?} {output}");
    let (code, output) = run_with(&["--lanes", "832"]);
    assert!(code == Some(3) && output.contains("MTU"), "{code:?} {output}");
    // 4: taken, interface and port.
    let aggregator = Aggregator::start(&lab, &AggregatorOptions::world(2)).unwrap();
    let (code, output) = run_with(&[]);
    assert!(code == Some(4), "{code:?} {output}");
    let (code, output) = run_with(&["--port", "20600"]);
    assert!(code == Some(4) && output.contains("attached"), "{code:?} {output}");
    // 1: it fails while it runs.
    lab.aggregator.namespace.ip(&["link", "delete", &interface]).unwrap();
    let mut process = aggregator.process;
    let finished = process.wait(PROMPTLY).unwrap();
    assert_eq!(finished.status.code(), Some(1), "{}", finished.output);
}

#[test]
fn missing_capabilities_are_status_3() {
    if !require_bpf("service::missing_capabilities_are_status_3") {
        return;
    }
    let lab = Lab::new(Layout::workers(0)).unwrap();
    if lab.aggregator.namespace.output("setpriv", &["--version"]).is_err() {
        skip(
            "service::missing_capabilities_are_status_3",
            "setpriv is missing; it is in Debian's util-linux",
        );
        return;
    }
    let mut command = lab.aggregator.namespace.command("setpriv");
    command
        .args(["--bounding-set", "-all,+net_admin", "--inh-caps", "-all,+net_admin"])
        .arg(paatp().unwrap());
    command.args(AggregatorOptions::world(2).args(&lab.aggregator.interface));
    let finished = Process::spawn("without CAP_BPF", command).unwrap().wait(PROMPTLY).unwrap();
    assert!(finished.status.code() == Some(3) && finished.output.contains("CAP_BPF"), "{}", finished.output);
}

/// The lines of a log, each an object with what collectors look for.
fn records(output: &str) -> Vec<serde_json::Value> {
    let lines = output.lines().filter(|line| !line.starts_with("ready:"));
    let records: Vec<serde_json::Value> = lines
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect();
    for record in &records {
        for key in ["timestamp", "level", "target", "fields"] {
            assert!(record.get(key).is_some(), "no {key}: {record}");
        }
        assert!(record["fields"]["message"].is_string(), "{record}");
    }
    records
}

#[test]
fn logs_are_json_where_there_is_no_terminal() {
    if !require_bpf("service::logs_are_json_where_there_is_no_terminal") {
        return;
    }
    let lab = Lab::new(Layout::workers(0)).unwrap();
    let command = |interface: &str| {
        let mut command = lab.aggregator.namespace.command(paatp().unwrap());
        command.args(AggregatorOptions::world(2).args(interface)).env_remove(LOG_FORMAT);
        command
    };
    let process = Process::spawn("the aggregator", command(&lab.aggregator.interface)).unwrap();
    let finished = Aggregator::watch(process).unwrap().stop().unwrap();
    assert!(finished.is_success(), "{}", finished.output);
    let records_of_a_run = records(&finished.output);
    let serving = records_of_a_run.iter().find(|record| record["fields"]["message"] == "serving");
    assert_eq!(serving.unwrap()["fields"]["job"], "lab", "{}", finished.output);
    assert_eq!(serving.unwrap()["level"], "INFO");

    // Last words as well.
    let finished = Process::spawn("it", command("nothing0")).unwrap().wait(PROMPTLY).unwrap();
    let last = records(&finished.output).pop().unwrap();
    assert_eq!(last["level"], "ERROR");
    assert!(last["fields"]["message"].as_str().unwrap().contains("nothing0"), "{last}");

    // Who wants text gets text, without colours.
    let mut text = command(&lab.aggregator.interface);
    text.args(["--log-format", "text"]);
    let process = Process::spawn("the aggregator", text).unwrap();
    let finished = Aggregator::watch(process).unwrap().stop().unwrap();
    assert!(finished.output.contains("serving job=\"lab\""), "{}", finished.output);
    assert!(!finished.output.contains('\x1b'), "{}", finished.output);
}

#[test]
fn settings_come_from_file_and_environment() {
    if !require_bpf("service::settings_come_from_file_and_environment") {
        return;
    }
    let lab = Lab::new(Layout::workers(0)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("paatp.toml");
    let token = folder.path().join("token");
    let text = format!(
        "[node]\niface = \"{}\"\nxdp_mode = \"generic\"\nport = 20600\ntoken_file = \"{}\"\n\n[[job]]\nname = \"filed\"\nworld = 2\n",
        lab.aggregator.interface,
        token.display()
    );
    fs::write(&path, text).unwrap();
    let mut command = lab.aggregator.namespace.command(paatp().unwrap());
    command.arg("run").env("PAATP_CONFIG", &path).env("PAATP_PORT", "20700");
    // The lab's own says "none".
    command.env_remove("PAATP_TOKEN_FILE");
    let aggregator = Aggregator::watch(Process::spawn("the aggregator", command).unwrap()).unwrap();
    for part in ["mode=generic", "udp=20700-20700", "jobs=filed"] {
        assert!(aggregator.ready.contains(part), "{}", aggregator.ready);
    }
    assert!(aggregator.stop().unwrap().is_success() && token.is_file());
}

/// What arrives at a service manager's socket: assignments, with the time allowed for each.
struct Manager {
    socket: UnixDatagram,
    path: std::path::PathBuf,
    _folder: tempfile::TempDir,
}

impl Manager {
    fn new() -> Manager {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        Manager { socket: UnixDatagram::bind(&path).unwrap(), path, _folder: folder }
    }

    fn watch(&self, mut command: Command, watchdog: Duration) -> Process {
        command.env("NOTIFY_SOCKET", &self.path).env("WATCHDOG_USEC", watchdog.as_micros().to_string());
        Process::spawn("the aggregator", command).unwrap()
    }

    /// The next message; nothing if none comes in time.
    fn next(&self, time: Duration) -> Option<Vec<String>> {
        self.socket.set_read_timeout(Some(time)).unwrap();
        let mut bytes = [0; 4096];
        let length = self.socket.recv(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes[..length]).lines().map(str::to_owned).collect())
    }

    /// The next message that says this.
    fn until(&self, what: &str) -> Vec<String> {
        let end = Instant::now() + DEADLINE;
        while Instant::now() < end {
            match self.next(PROMPTLY) {
                Some(message) if message.iter().any(|line| line == what) => return message,
                _ => {}
            }
        }
        panic!("the manager was not told {what}");
    }
}

#[test]
fn the_service_manager_is_told() {
    if !require_bpf("service::the_service_manager_is_told") {
        return;
    }
    const WATCHDOG: Duration = Duration::from_secs(2);
    let lab = Lab::new(Layout::workers(0)).unwrap();
    let manager = Manager::new();
    let mut command = lab.aggregator.namespace.command(paatp().unwrap());
    command.args(AggregatorOptions::world(2).args(&lab.aggregator.interface));
    let mut process = manager.watch(command, WATCHDOG);
    let first = manager.next(DEADLINE).unwrap();
    assert_eq!(first[0], "READY=1", "{first:?}");
    let status = format!(
        "STATUS=1 jobs, 0 run: 0 of 2 ranks at work, 0 waiting, native on {}",
        lab.aggregator.interface
    );
    assert_eq!(first[1], status);
    // Ready means attached and serving.
    assert!(attached(&lab.aggregator.namespace, &lab.aggregator.interface).unwrap().is_some());
    assert_eq!(page(&lab, "/readyz").0, 200);
    for _ in 0..3 {
        manager.until("WATCHDOG=1");
    }
    // It hangs: nothing comes for longer than the manager allows.
    process.signal(Signal::SIGSTOP).unwrap();
    wait_until("it is stopped", PROMPTLY, || {
        let state = fs::read_to_string(format!("/proc/{}/stat", process.pid()))?;
        Ok(state.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T')))
    })
    .unwrap();
    while manager.next(Duration::from_millis(1)).is_some() {}
    assert_eq!(manager.next(WATCHDOG), None);
    process.signal(Signal::SIGCONT).unwrap();
    manager.until("WATCHDOG=1");
    process.signal(Signal::SIGTERM).unwrap();
    manager.until("STOPPING=1");
    let finished = process.wait(PROMPTLY).unwrap();
    assert!(finished.is_success(), "{}", finished.output);
}
