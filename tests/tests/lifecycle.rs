//! The aggregator as a process: how it starts, ends, what it leaves behind, and what it needs.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::time::Duration;

use nix::sys::signal::Signal;
use paatp_tests::gradients::real;
use paatp_tests::kernel::{Maps, attached};
use paatp_tests::process::{Aggregator, AggregatorOptions, Process, paatp, wait_until};
use paatp_tests::{JobOptions, Lab, Layout, Running, require_bpf, skip};

const MEBIBYTE: u64 = 1 << 20;
/// A second, and what a busy machine adds.
const PROMPTLY: Duration = Duration::from_secs(5);

#[test]
fn signals_detach() {
    if !require_bpf("lifecycle::signals_detach") {
        return;
    }
    let lab = Lab::new(Layout::workers(0)).unwrap();
    let (namespace, interface) = (&lab.aggregator.namespace, &lab.aggregator.interface);
    for (signal, mode) in
        [(Signal::SIGTERM, "native"), (Signal::SIGINT, "native"), (Signal::SIGTERM, "generic")]
    {
        assert_eq!(attached(namespace, interface).unwrap(), None);
        let options = AggregatorOptions { xdp_mode: mode, ..AggregatorOptions::world(2) };
        let mut aggregator = Aggregator::start(&lab, &options).unwrap();
        let xdp = attached(namespace, interface).unwrap().expect("a program is attached");
        assert_eq!((xdp.name.as_str(), xdp.is_native), ("aggregate", mode == "native"));
        aggregator.process.signal(signal).unwrap();
        let finished = aggregator.process.wait(PROMPTLY).unwrap();
        assert!(finished.is_success(), "{signal}: {}: {}", finished.status, finished.output);
        assert_eq!(attached(namespace, interface).unwrap(), None, "after {signal}");
        wait_until("the program was unloaded", PROMPTLY, || Ok(Maps::of(xdp.id).is_err())).unwrap();
        assert_eq!(pins(interface), Vec::<String>::new());
    }
}

#[test]
fn a_killed_aggregator_does_not_hinder_the_next() {
    if !require_bpf("lifecycle::a_killed_aggregator_does_not_hinder_the_next") {
        return;
    }
    let lab = Lab::new(Layout::workers(0)).unwrap();
    let options = AggregatorOptions::world(2);
    for _ in 0..2 {
        let mut aggregator = Aggregator::start(&lab, &options).unwrap();
        aggregator.process.kill();
    }
    let finished = Aggregator::start(&lab, &options).unwrap().stop().unwrap();
    assert!(finished.is_success(), "{}", finished.output);
}

#[test]
fn two_on_one_interface() {
    if !require_bpf("lifecycle::two_on_one_interface") {
        return;
    }
    let lab = Lab::new(Layout::workers(0)).unwrap();
    let first = Aggregator::start(&lab, &AggregatorOptions::world(2)).unwrap();
    let mut command = lab.aggregator.namespace.command(paatp().unwrap());
    command.args(AggregatorOptions::world(2).args(&lab.aggregator.interface));
    let finished = Process::spawn("the second", command).unwrap().wait(PROMPTLY).unwrap();
    assert!(!finished.is_success());
    assert!(
        finished.output.contains("in use") || finished.output.contains("attached"),
        "{}",
        finished.output
    );
    assert!(first.stop().unwrap().is_success(), "the second did no harm to the first");
}

#[test]
fn memory_of_the_daemon() {
    if !require_bpf("lifecycle::memory_of_the_daemon") {
        return;
    }
    let lab = Lab::new(Layout::workers(4)).unwrap();
    let inputs = real(0, 4).unwrap();
    let mut running = Running::start(&lab, &inputs, &JobOptions::world(4)).unwrap();
    for worker in &mut running.workers {
        let finished = worker.wait(Duration::from_secs(60)).unwrap();
        assert!(finished.is_success(), "{}", finished.output);
    }
    let bytes = running.aggregator.process.resident_bytes().unwrap();
    println!("{} KiB", bytes / 1024);
    assert!(bytes < 50 * MEBIBYTE, "{} MiB", bytes / MEBIBYTE);
}

/// Starts the aggregator as root with these capabilities only.
fn with_capabilities(lab: &Lab, capabilities: &[&str]) -> Process {
    let set: String =
        ["-all".to_owned()].into_iter().chain(capabilities.iter().map(|c| format!(",+{c}"))).collect();
    let mut command = lab.aggregator.namespace.command("setpriv");
    command
        .args(["--bounding-set", &set, "--inh-caps", &set, "--ambient-caps", &set])
        .arg(paatp().unwrap())
        .args(AggregatorOptions::world(2).args(&lab.aggregator.interface));
    Process::spawn("an aggregator with few capabilities", command).unwrap()
}

#[test]
fn two_capabilities_are_enough() {
    if !require_bpf("lifecycle::two_capabilities_are_enough") {
        return;
    }
    let lab = Lab::new(Layout::workers(0)).unwrap();
    if lab.aggregator.namespace.output("setpriv", &["--version"]).is_err() {
        skip("lifecycle::two_capabilities_are_enough", "setpriv is missing; it is in Debian's util-linux");
        return;
    }
    let aggregator = Aggregator::watch(with_capabilities(&lab, &["bpf", "net_admin"])).unwrap();
    let finished = aggregator.stop().unwrap();
    assert!(finished.is_success(), "{}", finished.output);

    for (capabilities, missing, there) in
        [(["net_admin"], "CAP_BPF", "CAP_NET_ADMIN"), (["bpf"], "CAP_NET_ADMIN", "CAP_BPF")]
    {
        let finished = with_capabilities(&lab, &capabilities).wait(PROMPTLY).unwrap();
        assert!(!finished.is_success(), "without {missing}");
        let lacks = finished.output.contains(&format!("lacks {missing}"));
        assert!(lacks && !finished.output.contains(&format!("{there} and")), "{}", finished.output);
        assert!(!finished.output.to_lowercase().contains("memlock"), "{}", finished.output);
    }
}

#[test]
fn wrong_interfaces_are_explained() {
    if !require_bpf("lifecycle::wrong_interfaces_are_explained") {
        return;
    }
    let lab = Lab::new(Layout { workers: 0, mtu: 3506, racks: 0 }).unwrap();
    let namespace = &lab.aggregator.namespace;
    let refused = |interface: &str, mode| {
        let options = AggregatorOptions { xdp_mode: mode, ..AggregatorOptions::world(2) };
        let mut command = namespace.command(paatp().unwrap());
        command.args(options.args(interface));
        let finished = Process::spawn("an aggregator", command).unwrap().wait(PROMPTLY).unwrap();
        assert!(!finished.is_success(), "{interface} in {mode} mode: {}", finished.output);
        finished.output
    };
    let output = refused("nothing0", "auto");
    assert!(output.contains("nothing0"), "{output}");
    // A bridge has no native XDP.
    namespace.ip(&["link", "add", "bridge0", "type", "bridge"]).unwrap();
    namespace.ip(&["address", "add", "10.81.0.1/24", "dev", "bridge0"]).unwrap();
    namespace.ip(&["link", "set", "bridge0", "up"]).unwrap();
    let output = refused("bridge0", "native");
    assert!(output.contains("bridge0") && output.contains("generic"), "{output}");
}

/// Files in the BPF file system that belong to an interface.
fn pins(interface: &str) -> Vec<String> {
    fn below(folder: &std::path::Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            found.push(path.display().to_string());
            if path.is_dir() {
                below(&path, found);
            }
        }
    }
    let mut found = Vec::new();
    below(std::path::Path::new("/sys/fs/bpf"), &mut found);
    found.retain(|path| path.contains(interface));
    found
}
