//! Findings, by table: a machine where all is well, changed in one point.

use std::collections::BTreeMap;
use std::net::IpAddr;

use paatp_common::layout::LAYOUT;

use super::findings;
use crate::cli::XdpMode;
use crate::doctor::facts::{
    Bpffs, Call, Facts, FlowRule, HostFacts, InterfaceFacts, LinkFacts, Offload, Peer, PinFacts, Question,
    Queues, Route, SwitchFacts, WorkerFacts,
};
use crate::doctor::report::{Check, Severity};
use crate::engine::{Capabilities, Interface, LinkState, XdpState};

const WORKER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));
const UP: u32 = (libc::IFF_UP | libc::IFF_RUNNING) as u32;

fn host() -> HostFacts {
    HostFacts {
        kernel: "6.18.44".into(),
        capabilities: Capabilities { bpf: true, net_admin: true },
        initial_user_namespace: true,
        seccomp: false,
        bpf_reach: Call::Refused(libc::E2BIG),
        bpf_map: Call::Done,
        program: Some(Ok(())),
        lockdown: None,
        unprivileged_bpf_disabled: Some(2),
        jit: Some(1),
        btf: true,
        bpffs: Bpffs::Writable,
        memlock: Some(8 << 20),
        processors: 4,
        listeners: Vec::new(),
        interfaces: vec!["lo".into(), "eth0".into()],
    }
}

fn link() -> LinkFacts {
    let addresses = vec![IpAddr::from([10, 0, 0, 1])];
    let link = LinkState { mtu: 1500, name: "eth0".into(), flags: UP, ..LinkState::default() };
    LinkFacts {
        interface: Interface { name: "eth0".into(), index: 2, mtu: 1500, kind: None, addresses },
        link,
        master: None,
        vlans: Vec::new(),
        driver: Some("mlx5_core".into()),
        xdp_features: Some(0x7f),
        program_name: None,
        pins: Vec::new(),
        offloads: Some(BTreeMap::new()),
        queues: Some(Queues { receive: 4, transmit: 4, receive_most: 8, transmit_most: 8, combined: true }),
        rules: Some(Vec::new()),
        hash_has_ports: Some(true),
        peer: Peer::None,
        peer_transmit: None,
    }
}

fn facts() -> Facts {
    let route = Ok(Route { interface: "eth0".into(), ..Route::default() });
    Facts {
        question: Question {
            lanes: 352,
            mode: XdpMode::Auto,
            port: 20545,
            ports: 1,
            bpffs: Some("/sys/fs/bpf".into()),
            switch: None,
        },
        host: host(),
        interface: InterfaceFacts::Found(Box::new(link())),
        workers: vec![WorkerFacts { address: WORKER, route }],
        switch: None,
    }
}

/// Changes the healthy machine, and expects one finding about this, with these words in what, why or fix.
#[track_caller]
fn expect(change: impl FnOnce(&mut Facts), check: Check, severity: Severity, words: &[&str]) {
    let mut facts = facts();
    change(&mut facts);
    let all = findings(&facts);
    let about: Vec<_> = all.iter().filter(|finding| finding.check == check).collect();
    let [finding] = about[..] else { panic!("{about:?}") };
    let text = format!("{}\n{}\n{}", finding.what, finding.why, finding.fix.as_deref().unwrap_or_default());
    assert_eq!(finding.severity, severity, "{text}");
    assert!(words.iter().all(|word| text.contains(word)), "{words:?} in: {text}");
    if severity >= Severity::Warning && check != Check::Program {
        assert!(!finding.why.is_empty() && finding.fix.is_some(), "{text}");
    }
}

fn on_host(change: impl FnOnce(&mut HostFacts), check: Check, severity: Severity, words: &[&str]) {
    expect(|facts| change(&mut facts.host), check, severity, words);
}

fn on_link(
    change: impl FnOnce(&mut LinkFacts, &mut Question),
    check: Check,
    severity: Severity,
    words: &[&str],
) {
    let change = |facts: &mut Facts| {
        let InterfaceFacts::Found(link) = &mut facts.interface else { return };
        change(link, &mut facts.question);
    };
    expect(change, check, severity, words);
}

#[test]
fn a_healthy_machine_has_nothing_but_oks() {
    let bad: Vec<_> = findings(&facts()).into_iter().filter(|f| f.severity != Severity::Ok).collect();
    assert!(bad.is_empty(), "{bad:?}");
}

#[test]
fn switches() {
    let with = |program: Result<(u32, u32), &str>| {
        let program = program.map_err(str::to_owned);
        |facts: &mut Facts| {
            facts.switch = Some(SwitchFacts { address: ([10, 0, 0, 9], 9559).into(), program });
        }
    };
    expect(with(Ok((1024, 256))), Check::Switch, Severity::Ok, &["10.0.0.9:9559", "1024 slots", "256 lanes"]);
    let why = "no P4Runtime server can be reached";
    expect(with(Err(why)), Check::Switch, Severity::Warning, &[why, "XDP", "paatpswitchdown"]);
}

#[test]
fn privileges() {
    use Severity::{Error, Ok};
    let lacks =
        |bpf, net_admin| move |host: &mut HostFacts| host.capabilities = Capabilities { bpf, net_admin };
    on_host(lacks(false, true), Check::Capabilities, Error, &["lacks CAP_BPF", "setcap cap_bpf+ep", "[BPF]"]);
    on_host(lacks(true, false), Check::Capabilities, Error, &["lacks CAP_NET_ADMIN", "NET_ADMIN"]);
    on_host(lacks(false, false), Check::Capabilities, Error, &["CAP_BPF and CAP_NET_ADMIN"]);
    on_host(|host| host.initial_user_namespace = false, Check::UserNamespace, Error, &["rootless"]);
    // A filter is told from a missing capability, whatever it answers.
    let filter = |reach| {
        move |host: &mut HostFacts| {
            (host.seccomp, host.bpf_reach, host.bpf_map) = (true, reach, reach);
            host.capabilities.bpf = false;
        }
    };
    on_host(
        filter(Call::Refused(libc::EPERM)),
        Check::Seccomp,
        Error,
        &["seccomp filter", "SystemCallFilter"],
    );
    on_host(filter(Call::Refused(libc::ENOSYS)), Check::Seccomp, Error, &["refuses bpf(2)"]);
    on_host(filter(Call::Killed), Check::Seccomp, Error, &["kills"]);
    on_host(filter(Call::Refused(libc::E2BIG)), Check::Seccomp, Ok, &["lets bpf(2) through"]);
    // Kernels before 5.19 answer EPERM to everything without CAP_BPF.
    let old = |host: &mut HostFacts| {
        (host.bpf_reach, host.capabilities.bpf) = (Call::Refused(libc::EPERM), false);
    };
    on_host(old, Check::Seccomp, Ok, &["no filter"]);
}

#[test]
fn bpf() {
    use Severity::{Error, Ok, Warning};
    let map = |number| move |host: &mut HostFacts| host.bpf_map = Call::Refused(number);
    on_host(map(libc::EPERM), Check::Bpf, Error, &["CAP_BPF is there", "SELinux"]);
    on_host(map(libc::EACCES), Check::Bpf, Error, &["denied"]);
    on_host(map(libc::ENOMEM), Check::Bpf, Error, &["MemoryMax"]);
    let locked = |host: &mut HostFacts| {
        (host.bpf_map, host.lockdown) = (Call::Refused(libc::EPERM), Some("integrity".into()));
    };
    on_host(locked, Check::Bpf, Error, &["lockdown (integrity)"]);
    on_host(|host| host.bpf_reach = Call::Refused(libc::ENOSYS), Check::Bpf, Error, &["CONFIG_BPF_SYSCALL"]);
    on_host(|host| host.unprivileged_bpf_disabled = Some(0), Check::Bpf, Ok, &["unprivileged"]);
    on_host(|host| host.program = Some(Err("refused\nlog".into())), Check::Program, Error, &["refused"]);
    on_host(|host| host.jit = Some(0), Check::Jit, Warning, &["net.core.bpf_jit_enable=1"]);
}

#[test]
fn machine() {
    use Severity::{Error, Note, Ok, Warning};
    on_host(|host| host.kernel = "5.15.0-91-generic".into(), Check::Kernel, Error, &["5.18"]);
    on_host(|host| host.kernel = "odd".into(), Check::Kernel, Warning, &["odd"]);
    on_host(|host| host.btf = false, Check::Btf, Note, &["does not need it"]);
    on_host(|host| host.bpffs = Bpffs::Missing, Check::Bpffs, Warning, &["mount -t bpf bpf /sys/fs/bpf"]);
    on_host(|host| host.bpffs = Bpffs::NotAsked, Check::Bpffs, Ok, &["--pin-dir none"]);
    on_host(
        |host| host.bpffs = Bpffs::ReadOnly,
        Check::Bpffs,
        Warning,
        &["remount,rw", "ProtectKernelTunables"],
    );
    on_host(|host| host.memlock = Some(0), Check::Memlock, Ok, &["control group"]);
    on_host(|host| host.kernel = "5.10.1".into(), Check::Memlock, Error, &["LimitMEMLOCK"]);
    let listens = |at: IpAddr| move |host: &mut HostFacts| host.listeners = vec![at];
    for at in [IpAddr::from([10, 0, 0, 1]), IpAddr::from([0, 0, 0, 0]), IpAddr::from([0u16; 8])] {
        on_host(listens(at), Check::Port, Error, &["20545", "ss -tlnp"]);
    }
    on_host(listens(IpAddr::from([127, 0, 0, 1])), Check::Port, Ok, &["nobody"]);
}

#[test]
fn interface() {
    use Severity::{Error, Note, Warning};
    let absent = |owner: Option<&str>| {
        let owner = owner.map(str::to_owned);
        move |facts: &mut Facts| {
            facts.interface = InterfaceFacts::Absent { name: "10.0.0.1".into(), error: "gone".into(), owner };
        }
    };
    expect(absent(None), Check::Interface, Error, &["gone", "ip -brief link"]);
    expect(absent(Some("eth0")), Check::Interface, Error, &["paatp doctor eth0"]);
    expect(|facts| facts.interface = InterfaceFacts::NotAsked, Check::Interface, Note, &["lo, eth0"]);
    on_link(|link, _| link.link.flags = 0, Check::Link, Error, &["ip link set eth0 up"]);
    on_link(|link, _| link.link.flags = libc::IFF_UP as u32, Check::Link, Warning, &["carrier"]);
    on_link(|link, _| link.link.flags = UP | libc::IFF_LOOPBACK as u32, Check::Link, Warning, &["loopback"]);
    on_link(|link, _| link.interface.addresses.clear(), Check::Address, Error, &["ip address add"]);
    let in_a_bridge = |link: &mut LinkFacts, _: &mut Question| {
        link.interface.addresses.clear();
        link.master = Some(("br0".into(), "bridge".into()));
    };
    on_link(in_a_bridge, Check::Address, Error, &["paatp doctor br0", "nomaster"]);
    let many = |link: &mut LinkFacts, _: &mut Question| {
        link.interface.addresses = (1..=5).map(|i| IpAddr::from([10, 0, 0, i])).collect();
    };
    on_link(many, Check::Address, Warning, &["not for 10.0.0.5"]);
}

#[test]
fn mtu() {
    use Severity::{Error, Note, Ok, Warning};
    on_link(|link, _| link.interface.mtu = 1400, Check::Mtu, Error, &["--lanes 320", "mtu 1500"]);
    on_link(|link, _| link.interface.mtu = 100, Check::Mtu, Error, &["ip link set eth0 mtu 1500"]);
    let both =
        |link: &mut LinkFacts, _: &mut Question| link.interface.addresses.push(IpAddr::from([0xfd00u16; 8]));
    on_link(both, Check::Mtu, Note, &["320 over IPv6"]);
    on_link(|link, _| link.interface.mtu = 9000, Check::NativeMtu, Warning, &["3506", "--xdp-mode generic"]);
    let veth = |mode| {
        move |link: &mut LinkFacts, question: &mut Question| {
            link.peer = peer(Some(1));
            let Peer::Seen(peer) = &mut link.peer else { return };
            (peer.mtu, link.interface.mtu, question.mode) = (9000, 1500, mode);
        }
    };
    on_link(veth(XdpMode::Auto), Check::NativeMtu, Warning, &["9000", "ip link set eth0 mtu 3506"]);
    on_link(veth(XdpMode::Native), Check::NativeMtu, Error, &["same for veth1"]);
    on_link(|link, _| link.peer = peer(Some(1)), Check::NativeMtu, Ok, &["1500"]);
}

#[test]
fn native_mode() {
    use Severity::{Error, Note, Ok, Warning};
    let without = |mode| {
        move |link: &mut LinkFacts, question: &mut Question| {
            (link.xdp_features, question.mode) = (Some(0), mode)
        }
    };
    on_link(without(XdpMode::Auto), Check::NativeXdp, Warning, &["--xdp-mode generic"]);
    on_link(without(XdpMode::Native), Check::NativeXdp, Error, &["mlx5_core"]);
    on_link(without(XdpMode::Generic), Check::NativeXdp, Ok, &["not asked for"]);
    on_link(|link, _| link.xdp_features = None, Check::NativeXdp, Note, &["6.3"]);
}

fn peer(attached: Option<u8>) -> Peer {
    let xdp = attached.map(|attached| XdpState { attached, program: Some(3) });
    Peer::Seen(LinkState { name: "veth1".into(), mtu: 1500, xdp, ..LinkState::default() })
}

#[test]
fn the_other_end_of_a_veth() {
    use Severity::{Error, Ok, Warning};
    let with = |attached| move |link: &mut LinkFacts, _: &mut Question| link.peer = peer(attached);
    on_link(
        with(None),
        Check::VethPeer,
        Warning,
        &["veth1", "XDP_TX", "--xdp-mode generic", "a worker at that end"],
    );
    // A bridge brings no program.
    let port = |link: &mut LinkFacts, _: &mut Question| {
        link.peer = peer(None);
        let Peer::Seen(peer) = &mut link.peer else { return };
        peer.master = Some(7);
    };
    on_link(port, Check::VethPeer, Error, &["veth1", "XDP_TX", "--xdp-mode generic"]);
    on_link(with(Some(2)), Check::VethPeer, Error, &["generic XDP program, which does not help"]);
    on_link(with(Some(1)), Check::VethPeer, Ok, &["veth1"]);
    let hidden = |link: &mut LinkFacts, _: &mut Question| link.peer = Peer::Hidden("EACCES".into());
    on_link(hidden, Check::VethPeer, Warning, &["EACCES", "CAP_NET_ADMIN"]);
    // A generic program's answers go through the stack, which needs nothing at the other end.
    let mut generic = facts();
    generic.question.mode = XdpMode::Generic;
    if let InterfaceFacts::Found(link) = &mut generic.interface {
        link.peer = peer(None);
    }
    assert!(findings(&generic).iter().all(|finding| finding.check != Check::VethPeer));
    let queues = |mode| {
        move |link: &mut LinkFacts, question: &mut Question| {
            (link.peer, question.mode) = (peer(Some(1)), mode);
            link.queues = Some(Queues { receive: 1, receive_most: 1, ..Queues::default() });
            link.peer_transmit = Some(4);
        }
    };
    on_link(queues(XdpMode::Auto), Check::VethQueues, Warning, &["ethtool -L veth1 tx 1"]);
    on_link(queues(XdpMode::Native), Check::VethQueues, Error, &["ENOSPC"]);
}

#[test]
fn other_programs() {
    use Severity::{Error, Note, Ok, Warning};
    let attached = |attached, name: Option<&str>| {
        let name = name.map(str::to_owned);
        move |link: &mut LinkFacts, _: &mut Question| {
            link.link.xdp = Some(XdpState { attached, program: Some(77) });
            link.program_name = name;
        }
    };
    on_link(
        attached(1, Some("xdp_firewall")),
        Check::Attached,
        Error,
        &["xdp_firewall", "id 77", "native", "xdp off"],
    );
    on_link(attached(2, None), Check::Attached, Error, &["id 77", "generic", "bpftool net show dev eth0"]);
    on_link(attached(1, Some("aggregate")), Check::Attached, Note, &["paatp's program"]);
    let pinned = |holds, layout| {
        move |link: &mut LinkFacts, question: &mut Question| {
            attached(1, None)(link, question);
            link.pins = vec![PinFacts { path: "/sys/fs/bpf/paatp/eth0/x".into(), layout, holds }];
        }
    };
    // Without CAP_SYS_ADMIN its name is not told, but its pins are.
    on_link(pinned(true, Some(LAYOUT)), Check::Attached, Note, &["paatp's program"]);
    on_link(pinned(true, Some(LAYOUT)), Check::Pins, Ok, &["goes on with them"]);
    let held = &["/sys/fs/bpf/paatp/eth0/x", "layout 0000000000000007", "paatp cleanup --iface eth0"];
    on_link(pinned(true, Some(7)), Check::Pins, Error, held);
    on_link(pinned(false, Some(LAYOUT)), Check::Pins, Warning, &["left over", "paatp cleanup --iface eth0"]);
    on_link(pinned(false, None), Check::Pins, Warning, &["left over"]);
    // Then it is no surprise that the port is taken.
    let ours = |facts: &mut Facts| {
        facts.host.listeners = vec![IpAddr::from([10, 0, 0, 1])];
        if let InterfaceFacts::Found(link) = &mut facts.interface {
            link.link.xdp = Some(XdpState { attached: 1, program: Some(77) });
            link.program_name = Some("aggregate_wide".into());
        }
    };
    expect(ours, Check::Port, Note, &["running here already"]);
}

#[test]
fn queues() {
    use Severity::{Note, Ok, Warning};
    let counts =
        |receive, most| Some(Queues { receive, receive_most: most, combined: true, ..Queues::default() });
    on_link(|link, _| link.queues = None, Check::Queues, Note, &["does not tell"]);
    on_link(|link, _| link.queues = counts(1, 8), Check::Queues, Note, &["ethtool -L eth0 combined 4"]);
    on_link(
        |_, question| question.ports = 6,
        Check::Queues,
        Warning,
        &["6 UDP ports", "ethtool -L eth0 combined 6"],
    );
    on_link(|_, question| question.ports = 9, Check::Queues, Warning, &["--ports 4"]);
    let virtio = |used, most| {
        move |link: &mut LinkFacts, _: &mut Question| {
            link.driver = Some("virtio_net".into());
            link.queues = Some(Queues {
                receive: used,
                transmit: used,
                receive_most: most,
                transmit_most: most,
                combined: true,
            });
        }
    };
    on_link(virtio(4, 8), Check::TransmitQueues, Ok, &["4 of 8"]);
    on_link(virtio(8, 8), Check::TransmitQueues, Warning, &["ethtool -L eth0 combined 4"]);
    on_link(virtio(1, 1), Check::TransmitQueues, Warning, &["hypervisor"]);
}

#[test]
fn steering() {
    use Severity::{Note, Ok, Warning};
    let rules = |rules: &[(u16, u32)]| {
        let of = |(port, queue): &(u16, u32)| FlowRule { location: 0, v6: false, port: *port, queue: *queue };
        let rules = Some(rules.iter().map(of).collect());
        move |link: &mut LinkFacts, question: &mut Question| (link.rules, question.ports) = (rules, 2)
    };
    on_link(rules(&[(20545, 0), (20546, 1)]), Check::FlowRules, Ok, &[]);
    let fix = "paatp setup-queues eth0 --port 20545 --ports 2 --apply";
    on_link(rules(&[(20545, 0), (20546, 3)]), Check::FlowRules, Warning, &["port 20546 ", fix]);
    let none = |link: &mut LinkFacts, question: &mut Question| (link.rules, question.ports) = (None, 2);
    on_link(none, Check::FlowRules, Warning, &["--ports 1"]);
    on_link(
        |link, _| link.hash_has_ports = Some(false),
        Check::ReceiveHash,
        Note,
        &["rx-flow-hash udp4 sdfn"],
    );
}

#[test]
fn offloads() {
    use Severity::{Note, Ok, Warning};
    let with = |names: &[&str], fixed| {
        let all: BTreeMap<String, Offload> =
            names.iter().map(|name| ((*name).to_owned(), Offload { on: true, fixed })).collect();
        move |link: &mut LinkFacts, _: &mut Question| link.offloads = Some(all)
    };
    let both = with(&["rx-lro", "rx-gro-hw"], false);
    on_link(both, Check::ReceiveOffload, Warning, &["ethtool -K eth0 lro off rx-gro-hw off"]);
    on_link(
        with(&["rx-gro-hw"], true),
        Check::ReceiveOffload,
        Warning,
        &["fixed", "--xdp-mode generic", "guest_tso4"],
    );
    let forwarding = with(&["rx-udp-gro-forwarding"], false);
    on_link(forwarding, Check::GroForwarding, Warning, &["ethtool -K eth0 rx-udp-gro-forwarding off"]);
    let vlan = || with(&["rx-vlan-hw-parse"], false);
    on_link(vlan(), Check::VlanOffload, Note, &["ethtool -K eth0 rxvlan off"]);
    let on_top = |link: &mut LinkFacts, question: &mut Question| {
        vlan()(link, question);
        link.vlans = vec!["eth0.7".into()];
    };
    on_link(on_top, Check::VlanOffload, Warning, &["eth0.7"]);
    on_link(with(&["tx-checksum-ip-generic"], false), Check::Checksum, Ok, &["tx off is not needed"]);
    on_link(|link, _| link.offloads = None, Check::ReceiveOffload, Note, &["does not tell"]);
    let off = |link: &mut LinkFacts, _: &mut Question| {
        link.offloads = Some([("rx-lro".to_owned(), Offload { on: false, fixed: false })].into());
    };
    on_link(off, Check::ReceiveOffload, Ok, &[]);
}

#[test]
fn workers() {
    use Severity::{Error, Ok, Warning};
    let way = |route: Result<Route, i32>| {
        move |facts: &mut Facts| facts.workers = vec![WorkerFacts { address: WORKER, route }]
    };
    let by = |interface: &str| Route { interface: interface.into(), ..Route::default() };
    expect(way(Err(libc::ENETUNREACH)), Check::Worker, Error, &["unreachable", "ip route get 10.0.0.2"]);
    expect(way(Result::Ok(Route { local: true, ..by("lo") })), Check::Worker, Error, &["own address"]);
    expect(
        way(Result::Ok(by("eth1"))),
        Check::Worker,
        Warning,
        &["through eth1, not through eth0", "doctor eth1"],
    );
    expect(way(Result::Ok(Route { mtu: Some(1400), ..by("eth0") })), Check::Worker, Warning, &["1400"]);
    let gateway = Some(IpAddr::from([10, 0, 0, 254]));
    expect(way(Result::Ok(Route { gateway, ..by("eth0") })), Check::Worker, Ok, &["by 10.0.0.254"]);
    let v6 = |facts: &mut Facts| {
        facts.workers =
            vec![WorkerFacts { address: IpAddr::from([0xfd00u16; 8]), route: Result::Ok(by("eth0")) }];
    };
    expect(v6, Check::Worker, Error, &["no IPv6 address"]);
}
