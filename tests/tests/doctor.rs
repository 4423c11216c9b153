//! `paatp doctor` on machines that are broken on purpose: each gives the finding it should, and nothing is found where
//! all is well. Where it can be, what doctor says is compared with what `paatp run` does.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use aya::Ebpf;
use aya::programs::{Xdp, xdp::XdpMode};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use paatp_tests::lab::lab_object;
use paatp_tests::netns::Namespace;
use paatp_tests::process::{Aggregator, AggregatorOptions, PORT, Process, paatp};
use paatp_tests::seccomp::refuse_bpf;
use paatp_tests::{Family, Lab, Layout, require_bpf, skip};
use serde_json::Value;

/// Loading includes the verifier's walk, beside everything else that tests do.
const DEADLINE: Duration = Duration::from_secs(60);

/// What doctor said.
#[derive(Debug)]
struct Said {
    exit: Option<i32>,
    report: Value,
}

impl Said {
    /// Runs a command that ends in `doctor …`.
    fn by(mut command: Command, args: &[&str]) -> Said {
        command.arg("doctor").args(args).arg("--json");
        let finished = Process::spawn("doctor", command).unwrap().wait(DEADLINE).unwrap();
        let report: Value = serde_json::from_str(&finished.output)
            .unwrap_or_else(|error| panic!("{error}: {}: {}", finished.status, finished.output));
        assert_eq!(report["schema_version"], 1);
        Said { exit: finished.status.code(), report }
    }

    /// Runs it in a namespace.
    fn inside(namespace: &Namespace, args: &[&str]) -> Said {
        Said::by(namespace.command(paatp().unwrap()), args)
    }

    /// The only finding of a check: its severity and all its text.
    fn about(&self, check: &str) -> (&str, String) {
        let all = self.report["findings"].as_array().unwrap();
        let about: Vec<&Value> = all.iter().filter(|finding| finding["check"] == check).collect();
        let [finding] = about[..] else { panic!("{check}: {about:?} in {}", self.report) };
        let part = |name: &str| finding[name].as_str().unwrap_or_default();
        (part("severity"), [part("what"), part("why"), part("fix")].join("\n"))
    }

    /// Expects a finding of a check with this severity and these words. Errors and the exit status agree.
    #[track_caller]
    fn expect(&self, check: &str, severity: &str, words: &[&str]) {
        let (is, text) = self.about(check);
        assert_eq!(is, severity, "{check}: {text}");
        assert!(words.iter().all(|word| text.contains(word)), "{check}: {words:?} in: {text}");
        let errors = self.report["errors"].as_u64().unwrap();
        assert_eq!(self.exit, Some(if errors == 0 { 0 } else { 1 }), "{errors} errors");
    }
}

/// A veth with both ends in one namespace, `near` with an address; `ip` takes `options` of each end.
fn veth(namespace: &Namespace, near: &[&str], far: &[&str]) {
    let mut add = vec!["link", "add", "near"];
    add.extend(near);
    add.extend(["type", "veth", "peer", "name", "far"]);
    add.extend(far);
    namespace.ip(&add).unwrap();
    namespace.ip(&["address", "add", "10.90.0.1/24", "dev", "near"]).unwrap();
    for end in ["near", "far"] {
        namespace.ip(&["link", "set", end, "up"]).unwrap();
    }
}

/// A program that passes everything; gone with the value.
fn pass(namespace: &Namespace, interface: &str, mode: XdpMode) -> Ebpf {
    let mut object = Ebpf::load_file(lab_object()).unwrap();
    let program: &mut Xdp = object.program_mut("pass").unwrap().try_into().unwrap();
    program.load().unwrap();
    namespace.run(|| program.attach(interface, mode)).unwrap().unwrap();
    object
}

/// What `paatp run` says where it is expected to fail.
fn refusal(namespace: &Namespace, interface: &str) -> String {
    let mut command = namespace.command(paatp().unwrap());
    command.args(AggregatorOptions::world(2).args(interface));
    let finished = Process::spawn("an aggregator", command).unwrap().wait(DEADLINE).unwrap();
    assert!(!finished.is_success(), "{}", finished.output);
    finished.output
}

#[test]
fn a_sound_lab_has_no_errors() {
    if !require_bpf("doctor::a_sound_lab_has_no_errors") {
        return;
    }
    let lab = Lab::new(Layout::workers(1)).unwrap();
    let (namespace, interface) = (&lab.aggregator.namespace, lab.aggregator.interface.as_str());
    let (v4, v6) = (lab.workers[0].address(Family::V4), lab.workers[0].address(Family::V6));
    let said = Said::inside(namespace, &[interface, "--xdp-mode", "native", "--worker", &v4.to_string()]);
    assert_eq!((said.exit, &said.report["errors"]), (Some(0), &0.into()), "{}", said.report);
    for (check, word) in [
        ("kernel", "Linux"),
        ("capabilities", "CAP_BPF"),
        ("seccomp", "no filter"),
        ("program", "verifier takes"),
        ("native-xdp", "veth"),
        ("veth-peer", "native program"),
        ("attached", "no XDP program"),
        ("port", "nobody"),
        ("worker", interface),
    ] {
        said.expect(check, "ok", &[word]);
    }
    // 352 lanes do not fit over IPv6, which is worth a note; 320 do.
    said.expect("mtu", "note", &["320"]);
    let said = Said::inside(namespace, &[interface, "--lanes", "320", "--worker", &v6.to_string()]);
    said.expect("mtu", "ok", &["320"]);
    said.expect("worker", "ok", &[interface]);

    // With a running aggregator.
    let aggregator = Aggregator::start(&lab, &AggregatorOptions::world(1)).unwrap();
    let said = Said::inside(namespace, &[interface]);
    said.expect("attached", "note", &["`aggregate`", "native"]);
    said.expect("port", "note", &["running here already"]);
    assert!(aggregator.stop().unwrap().is_success(), "doctor did it no harm");
}

#[test]
fn text_is_for_people() {
    if !require_bpf("doctor::text_is_for_people") {
        return;
    }
    let namespace = Namespace::new("doctor").unwrap();
    let mut command = namespace.command(paatp().unwrap());
    command.args(["doctor", "nothing0"]);
    let finished = Process::spawn("doctor", command).unwrap().wait(DEADLINE).unwrap();
    assert_eq!(finished.status.code(), Some(1));
    for part in [
        "error    interface        there is no interface `nothing0`",
        "why: ",
        "fix: ip -brief link",
        "1 error",
    ] {
        assert!(finished.output.contains(part), "{part} in:\n{}", finished.output);
    }
}

#[test]
fn missing_capabilities() {
    let name = "doctor::missing_capabilities";
    if !require_bpf(name) {
        return;
    }
    let lab = Lab::new(Layout::workers(0)).unwrap();
    let namespace = &lab.aggregator.namespace;
    if namespace.output("setpriv", &["--version"]).is_err() {
        skip(name, "setpriv is missing; it is in Debian's util-linux");
        return;
    }
    let with = |capability: &str| {
        let set = format!("-all,+{capability}");
        let mut command = namespace.command("setpriv");
        command
            .args(["--bounding-set", &set, "--inh-caps", &set, "--ambient-caps", &set])
            .arg(paatp().unwrap());
        Said::by(command, &[&lab.aggregator.interface])
    };
    let said = with("net_admin");
    said.expect("capabilities", "error", &["lacks CAP_BPF\n", "setcap cap_bpf+ep", "no limit of memory"]);
    // What it lacks is not blamed on a filter.
    said.expect("seccomp", "ok", &[]);
    let said = with("bpf");
    said.expect("capabilities", "error", &["lacks CAP_NET_ADMIN\n"]);
    said.expect("bpf", "ok", &[]);
    // The other end is in another namespace.
    said.expect("veth-peer", "warning", &["CAP_NET_ADMIN"]);
}

#[test]
fn seccomp_is_told_from_capabilities() {
    if !require_bpf("doctor::seccomp_is_told_from_capabilities") {
        return;
    }
    let namespace = Namespace::new("doctor").unwrap();
    for (action, word) in [
        (libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, "refuses bpf(2) with Operation not permitted"),
        (libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32, "refuses bpf(2)"),
        (libc::SECCOMP_RET_KILL_PROCESS, "kills a process that calls bpf(2)"),
    ] {
        let mut command = namespace.command(paatp().unwrap());
        refuse_bpf(&mut command, action);
        let said = Said::by(command, &[]);
        said.expect("seccomp", "error", &[word, "--security-opt", "SystemCallFilter"]);
        said.expect("capabilities", "ok", &[]);
    }
}

#[test]
fn bpffs_missing_or_read_only() {
    if !require_bpf("doctor::bpffs_missing_or_read_only") {
        return;
    }
    let namespace = Namespace::new("doctor").unwrap();
    for (kind, flags, severity, words) in [
        ("tmpfs", MsFlags::empty(), "warning", ["no BPF file system", "mount -t bpf bpf /sys/fs/bpf"]),
        ("bpf", MsFlags::MS_RDONLY, "warning", ["cannot be created", "remount,rw"]),
        ("bpf", MsFlags::empty(), "ok", ["mounted", "writable"]),
    ] {
        let mut command = namespace.command(paatp().unwrap());
        command.env_remove("PAATP_PIN_DIR");
        // SAFETY: between fork and exec only system calls are made.
        unsafe {
            command.pre_exec(move || {
                unshare(CloneFlags::CLONE_NEWNS)?;
                let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
                mount(None::<&str>, "/", None::<&str>, private, None::<&str>)?;
                mount(Some(kind), "/sys/fs/bpf", Some(kind), flags, None::<&str>)?;
                Ok(())
            });
        }
        Said::by(command, &[]).expect("bpffs", severity, &words);
    }
}

#[test]
fn mtu_too_large_for_native_mode() {
    if !require_bpf("doctor::mtu_too_large_for_native_mode") {
        return;
    }
    let namespace = Namespace::new("doctor").unwrap();
    veth(&namespace, &["mtu", "9000"], &["mtu", "9000"]);
    let fix = "ip link set near mtu 3506";
    Said::inside(&namespace, &["near"]).expect("native-mtu", "warning", &["9000", fix, "--xdp-mode generic"]);
    let native = ["near", "--xdp-mode", "native"];
    Said::inside(&namespace, &native).expect("native-mtu", "error", &["9000", fix]);
    assert!(refusal(&namespace, "near").contains("3506"));
    // What counts is how long the other end's frames may be.
    namespace.ip(&["link", "set", "far", "mtu", "3506"]).unwrap();
    Said::inside(&namespace, &native).expect("native-mtu", "ok", &["3506"]);
    let _program = pass(&namespace, "near", XdpMode::Driver);
}

#[test]
fn packets_longer_than_the_mtu() {
    if !require_bpf("doctor::packets_longer_than_the_mtu") {
        return;
    }
    let namespace = Namespace::new("doctor").unwrap();
    veth(&namespace, &["mtu", "1400"], &["mtu", "1400"]);
    Said::inside(&namespace, &["near"]).expect("mtu", "error", &["1500 bytes", "1400", "--lanes 320"]);
    assert!(refusal(&namespace, "near").contains("--lanes 320"));
    Said::inside(&namespace, &["near", "--lanes", "320"]).about("mtu");
}

#[test]
fn the_other_end_of_a_veth() {
    if !require_bpf("doctor::the_other_end_of_a_veth") {
        return;
    }
    let namespace = Namespace::new("doctor").unwrap();
    veth(&namespace, &[], &[]);
    let said = || Said::inside(&namespace, &["near"]);
    // A worker could be there.
    said().expect("veth-peer", "warning", &["no XDP program runs at the other end, far", "XDP_TX"]);
    // Now it cannot.
    namespace.ip(&["link", "add", "bridge0", "type", "bridge"]).unwrap();
    namespace.ip(&["link", "set", "far", "master", "bridge0"]).unwrap();
    said().expect("veth-peer", "error", &["no XDP program runs at the other end, far", "XDP_TX"]);
    let generic = pass(&namespace, "far", XdpMode::Skb);
    said().expect("veth-peer", "error", &["far", "generic XDP program, which does not help"]);
    drop(generic);
    let _native = pass(&namespace, "far", XdpMode::Driver);
    said().expect("veth-peer", "ok", &["far"]);
}

#[test]
fn queues_of_a_veth() {
    let name = "doctor::queues_of_a_veth";
    if !require_bpf(name) {
        return;
    }
    let namespace = Namespace::new("doctor").unwrap();
    veth(&namespace, &["numrxqueues", "2", "numtxqueues", "2"], &["numrxqueues", "2", "numtxqueues", "2"]);
    let native = ["near", "--xdp-mode", "native"];
    let ethtool = |args: &[&str]| namespace.output("ethtool", args).unwrap();
    if namespace.output("ethtool", &["--version"]).is_err() {
        skip(name, "ethtool is missing, so queues cannot be taken away");
    } else {
        ethtool(&["-L", "far", "tx", "2"]);
        ethtool(&["-L", "near", "rx", "1"]);
        let fix = "ethtool -L near rx 2";
        Said::inside(&namespace, &native).expect(
            "veth-queues",
            "error",
            &["1 receive", "2 transmit", "far", fix],
        );
        refusal(&namespace, "near");
        ethtool(&fix.split(' ').skip(1).collect::<Vec<_>>());
        Said::inside(&namespace, &native).expect("veth-queues", "ok", &[]);
        drop(pass(&namespace, "near", XdpMode::Driver));
        ethtool(&["-L", "near", "rx", "1"]);
    }
    let said = Said::inside(&namespace, &["near", "--ports", "3"]);
    said.expect("queues", "warning", &["3 UDP ports", "paatp run --ports"]);
    said.expect("flow-rules", "warning", &["no rules", "paatp run --ports 1"]);
    let mut command = namespace.command(paatp().unwrap());
    command.args(["setup-queues", "near", "--ports", "2"]);
    let finished = Process::spawn("setup-queues", command).unwrap().wait(DEADLINE).unwrap();
    assert_eq!(finished.status.code(), Some(1), "{}", finished.output);
    assert!(
        finished.output.contains("no rules") && finished.output.contains("--ports 1"),
        "{}",
        finished.output
    );
}

#[test]
fn another_program() {
    if !require_bpf("doctor::another_program") {
        return;
    }
    let namespace = Namespace::new("doctor").unwrap();
    veth(&namespace, &[], &[]);
    for (mode, word) in [(XdpMode::Driver, "native"), (XdpMode::Skb, "generic")] {
        let program = pass(&namespace, "near", mode);
        Said::inside(&namespace, &["near"]).expect("attached", "error", &["`pass`", word, "xdp off"]);
        assert!(refusal(&namespace, "near").contains("another XDP program"));
        drop(program);
        Said::inside(&namespace, &["near"]).expect("attached", "ok", &[]);
    }
}

#[test]
fn offloads() {
    let name = "doctor::offloads";
    if !require_bpf(name) {
        return;
    }
    let namespace = Namespace::new("doctor").unwrap();
    veth(&namespace, &[], &[]);
    let said = Said::inside(&namespace, &["near"]);
    said.expect("receive-offload", "ok", &[]);
    said.expect("gro-forwarding", "ok", &[]);
    said.expect("checksum", "ok", &["does no harm"]);
    said.expect("vlan-offload", "note", &["ethtool -K near rxvlan off"]);
    if namespace.output("ethtool", &["--version"]).is_err() {
        skip(name, "ethtool is missing, so nothing can be switched");
        return;
    }
    // The commands that doctor gives are the ones that help.
    namespace.output("ethtool", &["-K", "near", "rx-udp-gro-forwarding", "on", "rxvlan", "off"]).unwrap();
    let said = Said::inside(&namespace, &["near"]);
    let fix = "ethtool -K near rx-udp-gro-forwarding off";
    said.expect("gro-forwarding", "warning", &[fix]);
    assert!(!said.report.to_string().contains("vlan-offload"));
    namespace.output("ethtool", &fix.split(' ').skip(1).collect::<Vec<_>>()).unwrap();
    Said::inside(&namespace, &["near"]).expect("gro-forwarding", "ok", &[]);
}

#[test]
fn interfaces() {
    if !require_bpf("doctor::interfaces") {
        return;
    }
    let namespace = Namespace::new("doctor").unwrap();
    veth(&namespace, &[], &[]);
    Said::inside(&namespace, &["10.90.0.1"]).expect("interface", "error", &["paatp doctor near"]);
    namespace.ip(&["link", "set", "far", "down"]).unwrap();
    Said::inside(&namespace, &["near"]).expect("link", "warning", &["carrier"]);
    namespace.ip(&["link", "set", "near", "down"]).unwrap();
    Said::inside(&namespace, &["near"]).expect("link", "error", &["ip link set near up"]);
    Said::inside(&namespace, &["far"]).expect("address", "error", &["ip address add"]);
    Said::inside(&namespace, &["lo"]).expect("link", "warning", &["loopback"]);
    namespace.ip(&["link", "delete", "near"]).unwrap();
    Said::inside(&namespace, &["near"]).expect("interface", "error", &["`near`", "there are: lo"]);
    // A bridge has no native XDP.
    namespace.ip(&["link", "add", "bridge0", "type", "bridge"]).unwrap();
    let said = Said::inside(&namespace, &["bridge0", "--xdp-mode", "native"]);
    said.expect("native-xdp", "error", &["--xdp-mode generic"]);
    Said::inside(&namespace, &[]).expect("interface", "note", &["bridge0"]);
}

#[test]
fn ways_to_workers() {
    if !require_bpf("doctor::ways_to_workers") {
        return;
    }
    let namespace = Namespace::new("doctor").unwrap();
    veth(&namespace, &[], &[]);
    namespace.ip(&["address", "add", "10.91.0.1/24", "dev", "far"]).unwrap();
    let worker = |address| Said::inside(&namespace, &["near", "--worker", address]);
    worker("10.90.0.2").expect("worker", "ok", &["through near from 10.90.0.1"]);
    worker("10.90.0.1").expect("worker", "error", &["own address"]);
    worker("10.91.0.2").expect("worker", "warning", &["through far", "not through near"]);
    worker("203.0.113.1").expect("worker", "error", &["no way to 203.0.113.1", "unreachable"]);
    namespace.ip(&["route", "add", "203.0.113.0/24", "via", "10.90.0.254", "mtu", "1300"]).unwrap();
    worker("203.0.113.1").expect("worker", "warning", &["1300"]);
}

#[test]
fn port_taken() {
    if !require_bpf("doctor::port_taken") {
        return;
    }
    let namespace = Namespace::new("doctor").unwrap();
    veth(&namespace, &[], &[]);
    let listener = namespace.run(|| TcpListener::bind(("10.90.0.1", PORT))).unwrap().unwrap();
    Said::inside(&namespace, &["near"]).expect("port", "error", &["20545", "ss -tlnp"]);
    assert!(refusal(&namespace, "near").contains("in use"));
    Said::inside(&namespace, &["near", "--port", "20600"]).expect("port", "ok", &["20600"]);
    drop(listener);
}
