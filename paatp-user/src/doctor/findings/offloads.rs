//! Offloads that break XDP, or that are said to.

use crate::cli::XdpMode;
use crate::doctor::facts::{LinkFacts, Offload, Question};
use crate::doctor::report::{Check, Finding, Severity};

/// The kernel's names, and those that `ethtool -K` takes.
const LRO: (&str, &str) = ("rx-lro", "lro");
const GRO_HW: (&str, &str) = ("rx-gro-hw", "rx-gro-hw");
const GRO_FORWARDING: (&str, &str) = ("rx-udp-gro-forwarding", "rx-udp-gro-forwarding");
const GRO_LIST: (&str, &str) = ("rx-gro-list", "rx-gro-list");
const VLAN: &str = "rx-vlan-hw-parse";
const CHECKSUM: [&str; 3] = ["tx-checksum-ip-generic", "tx-checksum-ipv4", "tx-checksum-ipv6"];

pub fn findings(facts: &LinkFacts, question: &Question) -> Vec<Finding> {
    if facts.offloads.is_none() {
        return vec![Finding::new(
            Check::ReceiveOffload,
            Severity::Note,
            format!("the kernel does not tell the offloads of {}", facts.interface.name),
            "large receive offload and hardware GRO are at odds with native XDP",
        )];
    }
    let mut found = vec![receive(facts, question.mode), forwarding(facts, question.mode)];
    found.extend(vlan(facts));
    found.extend(checksum(facts));
    found
}

fn get(facts: &LinkFacts, name: &str) -> Option<Offload> {
    facts.offloads.as_ref()?.get(name).copied().filter(|offload| offload.on)
}

/// Those of a list that are on.
fn on<'a>(
    facts: &LinkFacts,
    wanted: impl IntoIterator<Item = &'a (&'static str, &'static str)>,
) -> Vec<(&'a str, &'a str, bool)> {
    let on = |(kernel, ethtool): &(&'static str, &'static str)| {
        Some((*kernel, *ethtool, get(facts, kernel)?.fixed))
    };
    wanted.into_iter().filter_map(on).collect()
}

fn receive(facts: &LinkFacts, mode: XdpMode) -> Finding {
    let found = on(facts, &[LRO, GRO_HW]);
    // The kernel takes both off by itself for a generic program.
    if found.is_empty() || mode == XdpMode::Generic {
        return Finding::ok(Check::ReceiveOffload, "nothing merges packets before the program");
    }
    let names: Vec<&str> = found.iter().map(|(kernel, ..)| *kernel).collect();
    let fixed = found.iter().any(|(.., fixed)| *fixed);
    let how = if fixed { " and fixed" } else { "" };
    let finding = Finding::new(
        Check::ReceiveOffload,
        Severity::Warning,
        format!("{} on{how}", are(&names)),
        "it merges packets in the card before the program sees them; many drivers refuse native XDP meanwhile \
         (EOPNOTSUPP, EINVAL), some switch it off themselves",
    );
    if fixed {
        return finding.mend(
            "it cannot be switched off here: if attaching fails, paatp run --xdp-mode generic, or switch it off in the \
             hypervisor (virtio: guest_tso4=off,guest_tso6=off,guest_ufo=off)",
        );
    }
    finding.mend(switch_off(facts, &found))
}

fn forwarding(facts: &LinkFacts, mode: XdpMode) -> Finding {
    let found = on(facts, &[GRO_FORWARDING, GRO_LIST]);
    if found.is_empty() {
        return Finding::ok(Check::GroForwarding, "nothing merges datagrams");
    }
    let names: Vec<&str> = found.iter().map(|(kernel, ..)| *kernel).collect();
    let severity = if mode == XdpMode::Native { Severity::Note } else { Severity::Warning };
    Finding::new(
        Check::GroForwarding,
        severity,
        format!("{} on", are(&names)),
        "it merges datagrams before a generic program sees them, and the program refuses them by their length; a native \
         program runs before it",
    )
    .mend(switch_off(facts, &found))
}

fn vlan(facts: &LinkFacts) -> Option<Finding> {
    let parse = get(facts, VLAN)?;
    let name = &facts.interface.name;
    let why = "the program then sees no tag and answers without one, and the switch drops the answer";
    let (severity, what) = if facts.vlans.is_empty() {
        (
            Severity::Note,
            format!("the card takes VLAN tags off ({VLAN}); no VLAN interface is on top of {name}"),
        )
    } else {
        let list = facts.vlans.join(", ");
        (
            Severity::Warning,
            format!("the card takes VLAN tags off ({VLAN}), and there are VLANs on {name}: {list}"),
        )
    };
    let finding =
        Finding::new(Check::VlanOffload, severity, what, format!("where workers send tagged frames: {why}"));
    Some(if parse.fixed {
        finding.mend("it cannot be switched off here: use an interface or a network without tags")
    } else {
        finding.mend(format!("ethtool -K {name} rxvlan off"))
    })
}

/// Answers carry no UDP checksum, so that a partial one that arrived does no harm.
fn checksum(facts: &LinkFacts) -> Option<Finding> {
    CHECKSUM.iter().find_map(|name| get(facts, name))?;
    Some(Finding::ok(
        Check::Checksum,
        "checksums are left to the card, which does no harm: answers carry none (tx off is not needed)",
    ))
}

fn are(names: &[&str]) -> String {
    format!("{} {}", names.join(" and "), if names.len() == 1 { "is" } else { "are" })
}

fn switch_off(facts: &LinkFacts, found: &[(&str, &str, bool)]) -> String {
    let list: Vec<String> = found.iter().map(|(_, ethtool, _)| format!("{ethtool} off")).collect();
    format!("ethtool -K {} {}", facts.interface.name, list.join(" "))
}
