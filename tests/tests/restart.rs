//! The aggregator is killed and started again: workers see nothing of it, and nothing that is not its own is touched.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nix::mount::MsFlags;
use nix::sys::signal::Signal;
use paatp_common::Event;
use paatp_tests::gradients::synthetic;
use paatp_tests::http::send;
use paatp_tests::job::{JobResult, run};
use paatp_tests::kernel::attached;
use paatp_tests::pins::{Pins, pin_some_map};
use paatp_tests::process::{Aggregator, AggregatorOptions, Finished, PORT, Process, paatp, wait_until};
use paatp_tests::{Dtype, Gradient, JobOptions, Lab, Layout, Rates, Running, require_bpf, skip};
use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(120);

/// A lab whose aggregator pins what it loads.
struct Bench {
    lab: Lab,
    pins: Arc<Pins>,
    options: JobOptions,
}

impl Bench {
    fn new(world: usize) -> Bench {
        Bench::with(world, Pins::new().unwrap())
    }

    fn with(world: usize, pins: Pins) -> Bench {
        let lab = Lab::new(Layout::workers(world)).unwrap();
        let pins = Arc::new(pins);
        let token = pins.state().with_file_name("token").display().to_string();
        let aggregator = AggregatorOptions {
            pins: Some(Arc::clone(&pins)),
            more: vec!["--token-file".into(), token],
            ..AggregatorOptions::world(world.max(1))
        };
        Bench { lab, pins, options: JobOptions { aggregator, ..JobOptions::world(world.max(1)) } }
    }

    fn start(&self) -> Aggregator {
        Aggregator::start(&self.lab, &self.options.aggregator).unwrap()
    }

    /// Starts one that cannot: how it ended.
    fn fail(&self) -> Finished {
        let finished =
            Aggregator::spawn(&self.lab, &self.options.aggregator).unwrap().wait(DEADLINE).unwrap();
        assert!(!finished.is_success(), "{}", finished.output);
        finished
    }

    /// `paatp` with these arguments beside the aggregator.
    fn paatp(&self, args: &str) -> Finished {
        let mut command = self.lab.aggregator.namespace.command(paatp().unwrap());
        command.args(args.split_whitespace());
        self.pins.enter(&mut command);
        command.env("PAATP_TOKEN_FILE", self.pins.state().with_file_name("token"));
        Process::spawn(format!("paatp {args}"), command).unwrap().wait(DEADLINE).unwrap()
    }

    fn jobs(&self) -> Value {
        let finished = self.paatp("job list --json");
        serde_json::from_str(&finished.output).unwrap_or_else(|error| panic!("{error}: {}", finished.output))
    }

    fn cleanup(&self, args: &str) -> String {
        let finished = self.paatp(&format!("cleanup {args}"));
        assert!(finished.is_success(), "{}", finished.output);
        finished.output
    }

    /// The only set of pins.
    fn set(&self) -> PathBuf {
        let tree = self.pins.tree().unwrap();
        let links: Vec<_> = tree.iter().filter_map(|path| path.strip_suffix("/link")).collect();
        assert_eq!(links.len(), 1, "{tree:?}");
        self.pins.bpffs().join(links[0])
    }

    /// Starts an aggregator and kills it; where its pins are.
    fn leave_pins(&self) -> PathBuf {
        self.start().process.kill();
        self.set()
    }

    /// Does something with files in the BPF file system.
    fn inside<T: Send>(&self, function: impl FnOnce() -> T + Send) -> T {
        self.pins.run(function).unwrap()
    }

    fn exists(&self, path: &PathBuf) -> bool {
        self.inside(|| fs::symlink_metadata(path).is_ok())
    }

    fn check(&self, result: &JobResult, inputs: &[Gradient]) {
        let verdict = result.check(inputs, &self.options).unwrap();
        assert!(verdict.is_right(), "{:?}", verdict.complaints);
    }

    /// An all-reduce with the aggregator that runs.
    fn works(&self, mut running: Running<'_>, inputs: &[Gradient]) {
        for rank in 0..inputs.len() {
            running.start_rank(rank).unwrap();
        }
        self.check(&running.finish(DEADLINE).unwrap(), inputs);
    }

    fn nothing_is_left(&self) {
        assert_eq!(self.pins.residue().unwrap(), Vec::<String>::new());
        let host = &self.lab.aggregator;
        assert_eq!(attached(&host.namespace, &host.interface).unwrap(), None);
    }
}

fn inputs(world: usize, elements: usize) -> Vec<Gradient> {
    synthetic(world, 21, &[(Dtype::F32, elements), (Dtype::I32, 1000)], 1.0)
}

/// What the ranks get from an aggregator that nobody kills.
fn undisturbed(lab: &Lab, inputs: &[Gradient]) -> Vec<String> {
    run(lab, inputs, &JobOptions::world(inputs.len())).unwrap().digests().unwrap()
}

/// Ranks add while the daemon dies and comes back, several times, with packets lost on the way.
#[test]
fn killed_in_the_middle_of_operations() {
    if !require_bpf("restart::killed_in_the_middle_of_operations") {
        return;
    }
    let mut bench = Bench::new(3);
    let inputs = inputs(3, 6_000_000);
    let expected = undisturbed(&bench.lab, &inputs);
    let loss = Rates { loss: 0.01, ..Rates::NONE };
    (bench.options.requests, bench.options.answers) = (loss, loss);
    let mut running = Running::start(&bench.lab, &inputs, &bench.options).unwrap();
    for at in [500, 4000, 9000] {
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
        running.aggregator = bench.start();
    }
    let result = running.finish(DEADLINE).unwrap();
    bench.check(&result, &inputs);
    assert_eq!(result.digests().unwrap(), expected);
    bench.nothing_is_left();
}

/// Ranks wait for the last one while the daemon dies: they ask again.
#[test]
fn killed_before_all_have_joined() {
    if !require_bpf("restart::killed_before_all_have_joined") {
        return;
    }
    let bench = Bench::new(3);
    let inputs = inputs(3, 20_000);
    let mut running = Running::prepare(&bench.lab, &inputs, &bench.options).unwrap();
    for rank in 0..2 {
        running.start_rank(rank).unwrap();
    }
    for _ in 0..2 {
        wait_until("two ranks waited", DEADLINE, || {
            Ok(bench.jobs()["jobs"][0]["waiting_ranks"].as_array().is_some_and(|ranks| ranks.len() == 2))
        })
        .unwrap();
        running.aggregator.process.kill();
        running.aggregator = bench.start();
    }
    running.start_rank(2).unwrap();
    bench.check(&running.finish(DEADLINE).unwrap(), &inputs);
    bench.nothing_is_left();
}

/// Killed when the file knows of a generation: its tables may be written or not, its ranks told or not.
#[test]
fn killed_while_a_generation_is_formed() {
    if !require_bpf("restart::killed_while_a_generation_is_formed") {
        return;
    }
    let bench = Bench::new(3);
    let inputs = inputs(3, 20_000);
    let expected = undisturbed(&bench.lab, &inputs);
    for round in 0..4 {
        let mut running = Running::start(&bench.lab, &inputs, &bench.options).unwrap();
        let file = bench.pins.state_file().unwrap();
        wait_until("the file knew of a generation", DEADLINE, || {
            Ok(fs::read_to_string(&file).unwrap_or_default().contains("\"members\""))
        })
        .unwrap();
        running.aggregator.process.kill();
        running.aggregator = bench.start();
        let result = running.finish(DEADLINE).unwrap();
        bench.check(&result, &inputs);
        assert_eq!(result.digests().unwrap(), expected, "round {round}");
        bench.nothing_is_left();
    }
}

/// Killed when a rank has its result: the others' go on, and all of them say that they leave.
#[test]
fn killed_while_ranks_leave() {
    if !require_bpf("restart::killed_while_ranks_leave") {
        return;
    }
    let bench = Bench::new(3);
    let inputs = inputs(3, 20_000);
    let mut running = Running::start(&bench.lab, &inputs, &bench.options).unwrap();
    wait_until("a result was written", DEADLINE, || {
        Ok(running.commands.iter().any(|command| command.output.exists()))
    })
    .unwrap();
    running.aggregator.process.kill();
    running.aggregator = bench.start();
    for worker in &mut running.workers {
        let finished = worker.wait(DEADLINE).unwrap();
        assert!(finished.is_success(), "{}", finished.output);
    }
    wait_until("the job was idle", DEADLINE, || Ok(bench.jobs()["jobs"][0]["state"] == "idle")).unwrap();
    bench.check(&running.finish(DEADLINE).unwrap(), &inputs);
    bench.nothing_is_left();
}

/// Names, numbers, slots, who may join, synchronisation, generations: all as before.
#[test]
fn jobs_are_as_they_were() {
    if !require_bpf("restart::jobs_are_as_they_were") {
        return;
    }
    let mut bench = Bench::new(2);
    bench.options.aggregator.more.extend(["--memory".into(), "4MiB".into()]);
    bench.options.timeout = DEADLINE;
    let inputs = inputs(2, 8_000_000);
    let mut running = Running::start(&bench.lab, &inputs, &bench.options).unwrap();
    wait_until(
        "some results were out",
        DEADLINE,
        || Ok(running.maps.counters()?.noted(Event::Results) > 100),
    )
    .unwrap();
    // They wait, however long this takes on a busy machine.
    for worker in &running.workers {
        worker.signal(Signal::SIGSTOP).unwrap();
    }
    for line in [
        "job create a --world 4 --slots 512 --timeout 9s --on-failure shrink",
        "job create gone --world 2",
        "job create b --world 2 --access open",
        "job sync a quorum --quorum 3",
        "job delete gone",
        "job drain",
    ] {
        let finished = bench.paatp(line);
        assert!(finished.is_success(), "{line}: {}", finished.output);
    }
    let before = bench.jobs();
    assert_eq!(before["jobs"][0]["state"], "running");
    let node =
        |bench: &Bench| -> Value { serde_json::from_str(&bench.paatp("job node --json").output).unwrap() };
    assert_eq!(node(&bench)["draining"], true);
    running.aggregator.process.kill();
    running.aggregator = bench.start();
    assert_eq!(bench.jobs(), before);
    let after = node(&bench);
    assert_eq!((&after["draining"], after["jobs"].as_u64()), (&Value::Bool(true), Some(3)));
    for worker in &running.workers {
        worker.signal(Signal::SIGCONT).unwrap();
    }
    bench.check(&running.finish(DEADLINE).unwrap(), &inputs);
    bench.nothing_is_left();
}

/// The interface goes on while no daemon runs, if that is asked for; another build's program takes the old one's place.
#[test]
fn kept_attached_and_replaced() {
    if !require_bpf("restart::kept_attached_and_replaced") {
        return;
    }
    let mut bench = Bench::new(2);
    let inputs = inputs(2, 3_000_000);
    let host = |bench: &Bench| attached(&bench.lab.aggregator.namespace, &bench.lab.aggregator.interface);
    bench.options.aggregator.more.push("--keep-attached".into());
    let mut running = Running::start(&bench.lab, &inputs, &bench.options).unwrap();
    wait_until(
        "some results were out",
        DEADLINE,
        || Ok(running.maps.counters()?.noted(Event::Results) > 100),
    )
    .unwrap();
    running.aggregator.process.signal(Signal::SIGTERM).unwrap();
    let finished = running.aggregator.process.wait(DEADLINE).unwrap();
    assert!(finished.is_success() && finished.output.contains("stay in force"), "{}", finished.output);
    let program = host(&bench).unwrap().expect("a program is attached").id;
    // As if it was from another build of the same layout.
    let set = bench.set();
    bench.inside(|| {
        let names = fs::read_dir(&set).unwrap().flatten().map(|entry| entry.path());
        let old = names.into_iter().find(|path| path.to_string_lossy().contains("/program-")).unwrap();
        fs::rename(old, set.join("program-0000000000000000")).unwrap();
    });
    bench.options.aggregator.more.pop();
    running.aggregator = bench.start();
    let output = running.aggregator.process.output();
    assert!(output.contains("replaced by this build's"), "{output}");
    assert_ne!(host(&bench).unwrap().expect("a program is attached").id, program);
    assert_eq!(bench.set(), set);
    bench.check(&running.finish(DEADLINE).unwrap(), &inputs);
    bench.nothing_is_left();
}

#[test]
fn one_daemon_for_each_interface() {
    if !require_bpf("restart::one_daemon_for_each_interface") {
        return;
    }
    let bench = Bench::new(0);
    let first = bench.start();
    let second = bench.fail();
    assert_eq!(second.status.code(), Some(4), "{}", second.output);
    assert!(second.output.contains(&format!("process {}", first.process.pid())), "{}", second.output);
    // Neither does cleanup touch what it has.
    let before = bench.pins.residue().unwrap();
    let output = bench.cleanup("");
    assert!(output.contains("in use, left") && !output.contains("removed"), "{output}");
    assert_eq!(bench.pins.residue().unwrap(), before);
    assert!(first.stop().unwrap().is_success());
    bench.nothing_is_left();
}

/// What cannot be taken over and does not hold the interface: the start goes on beside it, and leaves it.
#[test]
fn leftovers_do_not_stop_a_start() {
    if !require_bpf("restart::leftovers_do_not_stop_a_start") {
        return;
    }
    type Damage = fn(&PathBuf);
    let cases: [(&str, Damage); 5] = [
        ("a plain folder", |set| {
            fs::read_dir(set).unwrap().flatten().for_each(|entry| fs::remove_file(entry.path()).unwrap());
        }),
        ("no link", |set| fs::remove_file(set.join("link")).unwrap()),
        ("a map for a link", |set| {
            fs::remove_file(set.join("link")).unwrap();
            pin_some_map(&set.join("link"), 8).unwrap();
        }),
        ("another size", |set| {
            ["link", "JOBS"].iter().for_each(|name| fs::remove_file(set.join(name)).unwrap());
            pin_some_map(&set.join("JOBS"), 8).unwrap();
        }),
        ("somebody's things", |set| {
            fs::remove_file(set.join("link")).unwrap();
            pin_some_map(&set.join("theirs"), 8).unwrap();
            pin_some_map(&set.parent().unwrap().join("theirs"), 8).unwrap();
            fs::create_dir(set.parent().unwrap().with_file_name("a-folder")).unwrap();
        }),
    ];
    for (what, damage) in cases {
        let bench = Bench::new(1);
        let set = bench.leave_pins();
        bench.inside(|| damage(&set));
        let before = bench.pins.tree().unwrap();
        let inputs = inputs(1, 2000);
        let running = Running::prepare(&bench.lab, &inputs, &bench.options).unwrap();
        let output = running.aggregator.process.output();
        assert!(running.aggregator.ready.contains("link=pinned_link"), "{what}: {output}");
        assert!(output.contains("paatp cleanup"), "{what}: {output}");
        assert!(
            bench.exists(&set.with_file_name(format!("{}-2", set.file_name().unwrap().display()))),
            "{what}"
        );
        bench.works(running, &inputs);
        assert_eq!(bench.pins.tree().unwrap(), before, "{what}: it was left as it was");
        let shown = bench.cleanup("--dry-run");
        assert_eq!(bench.pins.tree().unwrap(), before, "{what}: {shown}");
        bench.cleanup("");
        let foreign: Vec<String> = bench.pins.tree().unwrap();
        let theirs =
            |path: &String| path.contains("theirs") || path.contains("a-folder") || what.contains("a map");
        let expected = before.iter().any(theirs);
        assert_eq!(foreign.iter().any(theirs), expected, "{what}: {foreign:?}");
    }
}

/// The interface was deleted and made again while nobody looked: its link holds nothing.
#[test]
fn a_link_of_an_interface_that_is_gone() {
    if !require_bpf("restart::a_link_of_an_interface_that_is_gone") {
        return;
    }
    let bench = Bench::new(0);
    let set = bench.leave_pins();
    let (namespace, name) = (&bench.lab.aggregator.namespace, bench.lab.aggregator.interface.as_str());
    namespace.ip(&["link", "delete", name]).unwrap();
    namespace.ip(&["link", "add", name, "type", "veth", "peer", "name", "other"]).unwrap();
    namespace.ip(&["address", "add", "10.81.0.1/16", "dev", name]).unwrap();
    namespace.ip(&["link", "set", name, "up"]).unwrap();
    let aggregator = bench.start();
    let output = aggregator.process.output();
    assert!(output.contains("holds no interface any more"), "{output}");
    assert!(bench.exists(&set));
    // While it runs, what it does not have can be removed.
    let output = bench.cleanup("");
    assert!(output.contains("in use, left") && output.contains("removed"), "{output}");
    assert!(!bench.exists(&set));
    assert!(aggregator.stop().unwrap().is_success());
    bench.nothing_is_left();
}

/// Pins that hold the interface and cannot be taken over: the start says who holds it, and what mends it.
#[test]
fn an_interface_that_is_held_by_another_layout() {
    if !require_bpf("restart::an_interface_that_is_held_by_another_layout") {
        return;
    }
    let bench = Bench::new(0);
    let set = bench.leave_pins();
    let namespace = set.file_name().unwrap().to_str().unwrap().split_once('-').unwrap().1.to_owned();
    let other = set.with_file_name(format!("00000000deadbeef-{namespace}"));
    bench.inside(|| fs::rename(&set, &other)).unwrap();
    let refused = bench.fail();
    assert_eq!(refused.status.code(), Some(5), "{}", refused.output);
    let link = other.join("link").display().to_string();
    for part in [&link, "layout 00000000deadbeef", "paatp cleanup --iface"] {
        assert!(refused.output.contains(part), "{part}: {}", refused.output);
    }
    // The same without pins of its own.
    let mut without = bench.options.aggregator.clone();
    without.more.extend(["--pin-dir".into(), "none".into()]);
    let finished = Aggregator::spawn(&bench.lab, &without).unwrap().wait(DEADLINE).unwrap();
    assert!(!finished.is_success() && finished.output.contains("attached"), "{}", finished.output);
    assert!(bench.exists(&other));
    let name = bench.lab.aggregator.interface.clone();
    assert!(bench.cleanup("--iface nothing0 --json").contains("\"items\": []"));
    let shown = bench.cleanup(&format!("--iface {name} --dry-run"));
    assert!(shown.contains("would remove") && shown.contains("layout 00000000deadbeef"), "{shown}");
    bench.cleanup(&format!("--iface {name}"));
    bench.nothing_is_left();
    assert!(bench.start().stop().unwrap().is_success());
}

/// State files that cannot be used: what the kernel serves goes on, and nobody gets its slots.
#[test]
fn state_files_that_cannot_be_used() {
    if !require_bpf("restart::state_files_that_cannot_be_used") {
        return;
    }
    type Damage = fn(String) -> String;
    let cases: [(&str, Damage, &str); 4] = [
        ("empty", |_| String::new(), "cannot be used"),
        ("truncated", |text| text[..text.len() / 2].into(), "cannot be used"),
        ("of another version", |text| text.replacen("\"version\":1", "\"version\":9", 1), "version 9"),
        (
            "of another boot",
            |text| {
                let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
                text.replace(boot.trim(), "another")
            },
            "of other tables",
        ),
    ];
    let bench = Bench::new(2);
    for (what, damage, said) in cases {
        let inputs = inputs(2, 2_000_000);
        let mut running = Running::start(&bench.lab, &inputs, &bench.options).unwrap();
        wait_until("some results were out", DEADLINE, || {
            Ok(running.maps.counters()?.noted(Event::Results) > 100)
        })
        .unwrap();
        running.aggregator.process.kill();
        let file = bench.pins.state_file().unwrap();
        fs::write(&file, damage(fs::read_to_string(&file).unwrap())).unwrap();
        running.aggregator = bench.start();
        let output = running.aggregator.process.output();
        assert!(output.contains(said) && output.contains("adopted-0"), "{what}: {output}");
        assert_eq!(bench.jobs()["jobs"][0]["name"], "adopted-0", "{what}");
        bench.check(&running.finish(DEADLINE).unwrap(), &inputs);
        bench.cleanup("");
        bench.nothing_is_left();
    }
}

/// Without a BPF file system that can be written to it runs as if nothing was to be pinned, and says so.
#[test]
fn places_where_nothing_can_be_pinned() {
    if !require_bpf("restart::places_where_nothing_can_be_pinned") {
        return;
    }
    for (kind, flags, said) in [
        ("bpf", MsFlags::MS_RDONLY, "cannot be written to"),
        ("tmpfs", MsFlags::empty(), "is no BPF file system"),
    ] {
        let bench = Bench::with(1, Pins::with(kind, flags).unwrap());
        let inputs = inputs(1, 2000);
        let running = Running::prepare(&bench.lab, &inputs, &bench.options).unwrap();
        let output = running.aggregator.process.output();
        assert!(output.contains("nothing is pinned") && output.contains(said), "{output}");
        assert!(running.aggregator.ready.contains("link=bpf_link"), "{}", running.aggregator.ready);
        bench.works(running, &inputs);
        bench.nothing_is_left();
    }
    // Pins without a place for the state would be worth little; a lock is needed too.
    for folder in ["state", "run"] {
        let bench = Bench::new(0);
        fs::write(bench.pins.state().with_file_name(folder), "a file where a folder should be").unwrap();
        let aggregator = bench.start();
        assert!(aggregator.process.output().contains("nothing is pinned"), "{folder}");
        assert!(aggregator.stop().unwrap().is_success());
        assert_eq!(bench.pins.tree().unwrap(), Vec::<String>::new());
    }
}

/// Whether jobs outlive the daemon is told by `status` and `doctor`, wherever the pins are.
#[test]
fn pins_are_told() {
    if !require_bpf("restart::pins_are_told") {
        return;
    }
    let bench = Bench::new(0);
    let doctor = format!("doctor {}", bench.lab.aggregator.interface);
    let bpffs = bench.pins.bpffs().display().to_string();
    let before = bench.paatp(&doctor).output;
    assert!(before.contains(&format!("{bpffs} is mounted and writable")), "{before}");
    let aggregator = bench.start();
    let place = bench.set().display().to_string();
    let status = bench.paatp("status").output;
    assert!(status.contains(&format!("held by pinned_link, pinned at {place}")), "{status}");
    let during = bench.paatp(&doctor).output;
    assert!(during.contains(&format!("program and tables are pinned at {place}")), "{during}");
    assert!(aggregator.stop().unwrap().is_success());
    bench.nothing_is_left();
}

/// Pins are opened by their paths, so no more capabilities are needed.
#[test]
fn two_capabilities_are_enough_for_pins() {
    if !require_bpf("restart::two_capabilities_are_enough_for_pins") {
        return;
    }
    let bench = Bench::new(0);
    if bench.lab.aggregator.namespace.output("setpriv", &["--version"]).is_err() {
        skip(
            "restart::two_capabilities_are_enough_for_pins",
            "setpriv is missing; it is in Debian's util-linux",
        );
        return;
    }
    let set = "-all,+bpf,+net_admin";
    let start = || {
        let mut command = bench.lab.aggregator.namespace.command("setpriv");
        command.args(["--bounding-set", set, "--inh-caps", set, "--ambient-caps", set]).arg(paatp().unwrap());
        command.args(bench.options.aggregator.args(&bench.lab.aggregator.interface));
        bench.pins.enter(&mut command);
        Aggregator::watch(Process::spawn("an aggregator with few capabilities", command).unwrap()).unwrap()
    };
    for round in 0..2 {
        let mut aggregator = start();
        assert!(aggregator.ready.contains("link=pinned_link"), "{round}: {}", aggregator.process.output());
        aggregator.process.kill();
    }
    assert!(start().stop().unwrap().is_success());
    bench.nothing_is_left();
}

/// Another mode needs another link: the tables stay.
#[test]
fn another_mode() {
    if !require_bpf("restart::another_mode") {
        return;
    }
    let mut bench = Bench::new(1);
    let set = bench.leave_pins();
    bench.options.aggregator.xdp_mode = "generic";
    let inputs = inputs(1, 2000);
    let running = Running::prepare(&bench.lab, &inputs, &bench.options).unwrap();
    assert!(
        running.aggregator.ready.contains("mode=generic link=pinned_link"),
        "{}",
        running.aggregator.ready
    );
    assert_eq!(bench.set(), set);
    bench.works(running, &inputs);
    bench.nothing_is_left();
}

/// A node with levels is killed and started without them. Its program keeps them, or the sum of a rack, which waits for its
/// parent, were a result; and a rank of such a job is told.
#[test]
fn levels_stay_over_a_start_without_them() {
    if !require_bpf("restart::levels_stay_over_a_start_without_them") {
        return;
    }
    let mut bench = Bench::new(1);
    let program = |bench: &Bench| {
        let host = &bench.lab.aggregator;
        attached(&host.namespace, &host.interface).unwrap().unwrap().name
    };
    bench.options.aggregator.more.extend(["--memory", "16MiB", "--levels"].map(str::to_owned));
    let mut aggregator = bench.start();
    assert_eq!(program(&bench), "levels");
    let made = bench.paatp("job create up --world 8 --access open --parent 10.9.9.9 --ranks 0-1");
    assert!(made.is_success(), "{}", made.output);
    aggregator.process.kill();
    bench.options.aggregator.more.retain(|arg| arg != "--levels");
    let aggregator = bench.start();
    assert_eq!(program(&bench), "levels");
    let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), PORT);
    let body = r#"{"protocol":1,"rank":0,"world":8,"wait_seconds":1}"#;
    let join = || send(address, "POST", "/v1/jobs/up/join", body);
    let answer = bench.lab.aggregator.namespace.run(join).unwrap().unwrap();
    assert!(answer.status == 409 && answer.body.contains("no_levels"), "{answer:?}");
    let inputs = inputs(1, 2000);
    assert!(aggregator.stop().unwrap().is_success());
    bench.works(Running::prepare(&bench.lab, &inputs, &bench.options).unwrap(), &inputs);
    bench.nothing_is_left();
}
