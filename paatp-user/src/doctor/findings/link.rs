//! The interface: addresses, MTU, driver, what is attached, the other end of a veth.

use paatp_common::layout::LAYOUT;

use crate::cli::XdpMode;
use crate::doctor::facts::{LinkFacts, Peer, Question};
use crate::doctor::report::{Check, Finding, Severity};
use crate::engine::{InterfaceError, NATIVE_MTU};

use super::runs_paatp;

/// `NETDEV_XDP_ACT_BASIC`: the driver drops, passes and sends back (`XDP_TX`).
const XDP_BASIC: u64 = 1;

/// `XDP_ATTACHED_DRV` and `XDP_ATTACHED_MULTI` of `linux/if_link.h`.
const ATTACHED_NATIVE: u8 = 1;
const ATTACHED_SEVERAL: u8 = 4;

pub fn findings(facts: &LinkFacts, question: &Question) -> Vec<Finding> {
    let mut found = vec![up(facts), address(facts)];
    found.extend(mtu(facts, question));
    found.push(native(facts, question.mode));
    if question.mode != XdpMode::Generic {
        found.extend(native_mtu(facts, question.mode));
        found.extend(peer(facts));
    }
    found.push(attached(facts));
    found.push(pins(facts));
    found
}

/// What keeps native mode away is an error where it is demanded, and slow where it is only wished for.
pub fn against_native(mode: XdpMode) -> Severity {
    match mode {
        XdpMode::Native => Severity::Error,
        XdpMode::Auto => Severity::Warning,
        XdpMode::Generic => Severity::Ok,
    }
}

fn up(facts: &LinkFacts) -> Finding {
    let name = &facts.interface.name;
    let has = |flag: i32| facts.link.flags & flag as u32 != 0;
    if !has(libc::IFF_UP) {
        return Finding::new(
            Check::Link,
            Severity::Error,
            format!("{name} is down"),
            "no packet arrives, and veth takes no program's answers",
        )
        .mend(format!("ip link set {name} up"));
    }
    if has(libc::IFF_LOOPBACK) {
        return Finding::new(
            Check::Link,
            Severity::Warning,
            format!("{name} is the loopback interface"),
            "only workers on this machine reach it, and it has no native XDP",
        )
        .mend("name the interface that the workers' packets arrive on: ip route get WORKER");
    }
    if !has(libc::IFF_RUNNING) {
        return Finding::new(
            Check::Link,
            Severity::Warning,
            format!("{name} is up, but has no carrier"),
            "cable, switch port or the other end of the veth are missing or down",
        )
        .mend(format!("ip link show {name}; ethtool {name}"));
    }
    Finding::ok(Check::Link, format!("{name} is up"))
}

fn address(facts: &LinkFacts) -> Finding {
    let interface = &facts.interface;
    let name = &interface.name;
    if interface.addresses.is_empty() {
        let finding = Finding::new(
            Check::Address,
            Severity::Error,
            format!("{name} has no IP address"),
            "the program answers for the addresses of its own interface only, so workers could not reach it",
        );
        return match &facts.master {
            Some((master, kind)) => finding.mend(format!(
                "{name} is a port of the {kind} {master}: paatp doctor {master} (generic mode), or take it out: \
                 ip link set {name} nomaster; ip address add ADDRESS/PREFIX dev {name}"
            )),
            None => finding.mend(format!("ip address add ADDRESS/PREFIX dev {name}")),
        };
    }
    let list = |all: &[std::net::IpAddr]| -> String {
        all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    };
    if interface.left_out().is_empty() {
        return Finding::ok(Check::Address, list(&interface.addresses));
    }
    Finding::new(
        Check::Address,
        Severity::Warning,
        format!(
            "the program answers for {}, but not for {}",
            list(interface.served()),
            list(interface.left_out())
        ),
        "it holds a few addresses only; workers that use another one get no answers",
    )
    .mend(format!("give the workers one of the first, or: ip address del ADDRESS dev {name}"))
}

fn mtu(facts: &LinkFacts, question: &Question) -> Option<Finding> {
    let interface = &facts.interface;
    if interface.addresses.is_empty() {
        return None;
    }
    let (lanes, mtu, name) = (question.lanes, interface.mtu, &interface.name);
    Some(match interface.check_mtu(lanes) {
        Ok(None) => Finding::ok(Check::Mtu, format!("{lanes} lanes fit the MTU of {mtu} bytes")),
        Ok(Some(over_v6)) => Finding::new(
            Check::Mtu,
            Severity::Note,
            format!("{lanes} lanes fit the MTU of {mtu} bytes over IPv4, {over_v6} over IPv6"),
            "workers over IPv6 cannot join a job of more lanes than that",
        )
        .mend(format!("paatp run --lanes {over_v6}, where workers use IPv6")),
        Err(InterfaceError::Mtu { frame, family, fitting, .. }) => {
            let what = format!(
                "packets of {lanes} lanes have {frame} bytes over {family}, the MTU of {name} is {mtu}"
            );
            let why = "they would be cut in fragments, which the program does not read; `paatp run` refuses such a job";
            let raise = format!("ip link set {name} mtu {frame} (all along the way)");
            Finding::new(Check::Mtu, Severity::Error, what, why).mend(match fitting {
                0 => raise,
                fitting => format!("paatp run --lanes {fitting}, or: {raise}"),
            })
        }
        Err(other) => Finding::new(Check::Mtu, Severity::Error, other.to_string(), ""),
    })
}

fn native(facts: &LinkFacts, mode: XdpMode) -> Finding {
    let name = &facts.interface.name;
    let driver = facts.driver.as_deref().or(facts.link.kind.as_deref()).unwrap_or("unknown");
    if mode == XdpMode::Generic {
        return Finding::ok(Check::NativeXdp, format!("not asked for; driver {driver}"));
    }
    match facts.xdp_features {
        Some(features) if features & XDP_BASIC != 0 => {
            Finding::ok(Check::NativeXdp, format!("driver {driver} has native XDP"))
        }
        Some(_) => Finding::new(
            Check::NativeXdp,
            against_native(mode),
            format!("driver {driver} of {name} has no native XDP, or not as it is set up now"),
            "generic mode works with every driver, but runs in the network stack, several times slower",
        )
        .mend("paatp run --xdp-mode generic, or attach to an interface whose driver has it"),
        None => Finding::new(
            Check::NativeXdp,
            Severity::Note,
            format!("driver {driver}; this kernel does not tell whether it has native XDP"),
            "only attaching will show (Linux tells since 6.3)",
        ),
    }
}

fn native_mtu(facts: &LinkFacts, mode: XdpMode) -> Option<Finding> {
    let name = &facts.interface.name;
    // What veth compares is the other end's MTU: that is how long frames get that arrive here.
    let mtu = match &facts.peer {
        Peer::Seen(peer) => peer.mtu,
        Peer::None | Peer::Hidden(_) => facts.interface.mtu,
    };
    let veth = facts.peer != Peer::None;
    let why = "a program without fragments needs each frame in one page";
    if mtu <= NATIVE_MTU {
        return Some(Finding::ok(Check::NativeMtu, format!("{mtu} bytes; native XDP takes {NATIVE_MTU}")));
    }
    if facts.xdp_features.is_some_and(|features| features & XDP_BASIC == 0) {
        return None;
    }
    let fix = "or: paatp run --xdp-mode generic";
    if veth {
        let ends = match &facts.peer {
            Peer::Seen(peer) => format!("ip link set {name} mtu {NATIVE_MTU}; the same for {}", peer.name),
            _ => format!("ip link set {name} mtu {NATIVE_MTU}, on both ends"),
        };
        let what =
            format!("the MTU of {mtu} bytes is too large for native XDP on veth, which takes {NATIVE_MTU}");
        return Some(
            Finding::new(Check::NativeMtu, against_native(mode), what, why).mend(format!("{ends}; {fix}")),
        );
    }
    Some(
        Finding::new(
            Check::NativeMtu,
            Severity::Warning,
            format!("an MTU of {mtu} bytes is more than most drivers take with native XDP ({NATIVE_MTU})"),
            why,
        )
        .mend(format!(
            "ip link set {name} mtu {NATIVE_MTU}, if attaching fails with ERANGE or EINVAL; {fix}"
        )),
    )
}

fn peer(facts: &LinkFacts) -> Option<Finding> {
    let name = &facts.interface.name;
    let why = "what the program sends back with XDP_TX is dropped without a word unless a native program runs at the \
               veth's other end as well";
    let fix = "attach a native program that passes everything there (docs/troubleshooting.md, `veth-peer`), or: \
               paatp run --xdp-mode generic";
    let peer = match &facts.peer {
        Peer::None => return None,
        Peer::Hidden(error) => {
            let what = format!("the other end of the veth {name} cannot be seen: {error}");
            return Some(Finding::new(Check::VethPeer, Severity::Warning, what, why).mend(
                "run paatp doctor with CAP_NET_ADMIN over the other end's namespace, or look there: ip -details link",
            ));
        }
        Peer::Seen(peer) => peer,
    };
    let other = &peer.name;
    let what = match peer.xdp.map(|xdp| xdp.attached) {
        Some(ATTACHED_NATIVE | ATTACHED_SEVERAL) => {
            let what = format!("a native program runs at the other end, {other}");
            return Some(Finding::ok(Check::VethPeer, what));
        }
        Some(_) => format!("at the other end, {other}, runs a generic XDP program, which does not help"),
        None => format!("no XDP program runs at the other end, {other}"),
    };
    // A worker that is the other end itself brings a program, if it may and none is there.
    if peer.master.is_none() && peer.xdp.is_none() {
        let why = format!("{why}; a worker at that end brings one, if it has CAP_BPF and CAP_NET_ADMIN");
        return Some(Finding::new(Check::VethPeer, Severity::Warning, what, why).mend(fix));
    }
    Some(Finding::new(Check::VethPeer, Severity::Error, what, why).mend(fix))
}

fn pins(facts: &LinkFacts) -> Finding {
    let name = &facts.interface.name;
    let mend = format!("paatp cleanup --iface {name} --dry-run   # then without --dry-run");
    if let Some(held) = facts.pins.iter().find(|pins| pins.holds && pins.layout != Some(LAYOUT)) {
        let layout = held.layout.map_or_else(|| "unknown".to_owned(), |layout| format!("{layout:016x}"));
        return Finding::new(
            Check::Pins,
            Severity::Error,
            format!(
                "a link of another build holds {name}: pinned at {}, layout {layout}",
                held.path.display()
            ),
            "this build cannot go on with its tables, and nobody else can attach while its pin is there",
        )
        .mend(format!("if no `paatp run` of that build is running: {mend}"));
    }
    if let Some(left) = facts.pins.iter().find(|pins| !pins.holds) {
        return Finding::new(
            Check::Pins,
            Severity::Warning,
            format!("pins are left over at {}", left.path.display()),
            "a killed aggregator left them, and none can go on with them; they hold memory",
        )
        .mend(mend);
    }
    match facts.pins.first() {
        Some(pins) => Finding::ok(
            Check::Pins,
            format!(
                "program and tables are pinned at {}; a start after a kill goes on with them",
                pins.path.display()
            ),
        ),
        None => Finding::ok(Check::Pins, format!("nothing is pinned for {name}")),
    }
}

fn attached(facts: &LinkFacts) -> Finding {
    let name = &facts.interface.name;
    let Some(xdp) = facts.link.xdp else {
        return Finding::ok(Check::Attached, "no XDP program is attached");
    };
    let program = match (xdp.program, &facts.program_name) {
        (Some(id), Some(name)) => format!("`{name}`, id {id}"),
        (Some(id), None) => format!("id {id}"),
        (None, _) => "several".into(),
    };
    let mode = match xdp.attached {
        ATTACHED_NATIVE => "native",
        ATTACHED_SEVERAL => "several modes",
        3 => "offloaded",
        _ => "generic",
    };
    if runs_paatp(facts) {
        return Finding::new(
            Check::Attached,
            Severity::Note,
            format!("paatp's program is attached ({program}, {mode})"),
            "a second `paatp run` cannot use this interface",
        );
    }
    Finding::new(
        Check::Attached,
        Severity::Error,
        format!("another XDP program is attached to {name} ({program}, {mode})"),
        "an interface has one; the kernel refuses ours with EBUSY or EEXIST",
    )
    .mend(format!(
        "bpftool net show dev {name}; bpftool link   # who? end that process, or: ip link set dev {name} xdp off \
         (not where a link holds it)"
    ))
}
