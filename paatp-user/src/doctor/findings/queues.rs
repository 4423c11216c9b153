//! Queues, and what spreads packets to them.

use crate::cli::XdpMode;
use crate::doctor::facts::{FlowRule, LinkFacts, Peer, Question};
use crate::doctor::report::{Check, Finding, Severity};

use super::link::against_native;

pub fn findings(facts: &LinkFacts, question: &Question, processors: u32) -> Vec<Finding> {
    let mut found = vec![receive(facts, question, processors)];
    found.extend(transmit(facts, question, processors));
    found.extend(veth(facts, question));
    found.extend(rules(facts, question));
    found.extend(hash(facts, question));
    found
}

fn receive(facts: &LinkFacts, question: &Question, processors: u32) -> Finding {
    let name = &facts.interface.name;
    let Some(queues) = facts.queues else {
        return Finding::new(
            Check::Queues,
            Severity::Note,
            format!("the driver of {name} does not tell how many receive queues it has"),
            "packets of one queue are added by one processor",
        );
    };
    let more = |count: u32| {
        let kind = if queues.combined { "combined" } else { "rx" };
        format!("ethtool -L {name} {kind} {count}")
    };
    let (receive, most) = (queues.receive, queues.receive_most);
    let wanted = u32::from(question.ports);
    if wanted > receive {
        let finding = Finding::new(
            Check::Queues,
            Severity::Warning,
            format!("{wanted} UDP ports are to be served, but there are {receive} receive queues"),
            "several ports share a queue and its processor: more ports than queues gain nothing",
        );
        return if wanted <= most {
            finding.mend(more(wanted))
        } else {
            finding.mend(format!("paatp run --ports {}", receive.max(1)))
        };
    }
    if receive == 1 && processors > 1 {
        let finding = Finding::new(
            Check::Queues,
            Severity::Note,
            format!("one receive queue, {processors} processors"),
            "one processor adds everything that arrives",
        );
        return if most > 1 { finding.mend(more(most.min(processors))) } else { finding };
    }
    Finding::ok(Check::Queues, format!("{receive} receive queues of at most {most}"))
}

/// virtio sends answers through a queue of each processor's own if it has that many to spare, else under a lock.
fn transmit(facts: &LinkFacts, question: &Question, processors: u32) -> Option<Finding> {
    let queues = facts.queues?;
    if facts.driver.as_deref() != Some("virtio_net") || question.mode == XdpMode::Generic {
        return None;
    }
    let (used, most, name) = (queues.transmit, queues.transmit_most, &facts.interface.name);
    if used.saturating_add(processors) <= most {
        return Some(Finding::ok(Check::TransmitQueues, format!("{used} of {most} are in use")));
    }
    let finding = Finding::new(
        Check::TransmitQueues,
        Severity::Warning,
        format!("{used} of {most} transmit queues are in use, and there are {processors} processors"),
        "native XDP on virtio wants one more for each processor; without, it takes a lock for each answer",
    );
    Some(match most.saturating_sub(processors) {
        0 => finding
            .mend(format!("give the virtual machine {} queue pairs, in the hypervisor", used + processors)),
        fewer => finding.mend(format!("ethtool -L {name} combined {fewer}")),
    })
}

/// veth refuses a program at an end that has fewer receive queues than the other has transmit queues.
fn veth(facts: &LinkFacts, question: &Question) -> Option<Finding> {
    let (Peer::Seen(peer), Some(transmit)) = (&facts.peer, facts.peer_transmit) else { return None };
    let queues = facts.queues?;
    if question.mode == XdpMode::Generic {
        return None;
    }
    let (receive, name) = (queues.receive, &facts.interface.name);
    if receive >= transmit {
        return Some(Finding::ok(
            Check::VethQueues,
            format!("{receive} receive queues here for {transmit} transmit queues at the other end"),
        ));
    }
    let finding = Finding::new(
        Check::VethQueues,
        against_native(question.mode),
        format!("{receive} receive queues here, {transmit} transmit queues at the other end, {}", peer.name),
        "veth takes a native program only where there are no fewer (ENOSPC)",
    );
    Some(if transmit <= queues.receive_most {
        finding.mend(format!("ethtool -L {name} rx {transmit}"))
    } else {
        finding.mend(format!("ethtool -L {} tx {receive}, in its namespace", peer.name))
    })
}

/// Each port is to have a queue of its own.
fn rules(facts: &LinkFacts, question: &Question) -> Option<Finding> {
    if question.ports == 1 {
        return None;
    }
    let name = &facts.interface.name;
    let why = "several ports pay only if each has a queue, and so a processor, of its own";
    let Some(rules) = &facts.rules else {
        return Some(
            Finding::new(
                Check::FlowRules,
                Severity::Warning,
                format!("the driver of {name} has no rules that steer ports to queues"),
                why,
            )
            .mend("paatp run --ports 1"),
        );
    };
    let missing = missing_rules(facts, question, rules);
    if missing.is_empty() {
        return Some(Finding::ok(Check::FlowRules, "each port has its queue"));
    }
    let list: Vec<String> = missing.iter().map(ToString::to_string).collect();
    let (port, ports) = (question.port, question.ports);
    Some(
        Finding::new(
            Check::FlowRules,
            Severity::Warning,
            format!("no rule steers UDP port {} to a queue of its own", list.join(", ")),
            why,
        )
        .mend(format!("paatp setup-queues {name} --port {port} --ports {ports} --apply")),
    )
}

/// Ports without a rule to their queue, for the IP versions that the interface has.
fn missing_rules(facts: &LinkFacts, question: &Question, rules: &[FlowRule]) -> Vec<u16> {
    let has = |v6| facts.interface.addresses.iter().any(|address| address.is_ipv6() == v6);
    let families: Vec<bool> = [false, true].into_iter().filter(|v6| has(*v6)).collect();
    (0..question.ports)
        .filter_map(|i| Some((i, question.port.checked_add(i)?)))
        .filter(|(i, port)| {
            let steered = |v6: &bool| {
                let mut to = rules.iter().filter(|rule| rule.port == *port && rule.v6 == *v6);
                to.any(|rule| rule.queue == u32::from(*i))
            };
            !families.iter().all(steered)
        })
        .map(|(_, port)| port)
        .collect()
}

fn hash(facts: &LinkFacts, question: &Question) -> Option<Finding> {
    let many = facts.queues.is_some_and(|queues| queues.receive > 1);
    if !many || question.ports > 1 {
        return None;
    }
    Some(match facts.hash_has_ports? {
        true => Finding::ok(Check::ReceiveHash, "workers are spread to queues by address and port"),
        false => Finding::new(
            Check::ReceiveHash,
            Severity::Note,
            "the card spreads UDP to its queues by addresses alone",
            "all workers of one host share a queue and its processor",
        )
        .mend(format!("ethtool -N {} rx-flow-hash udp4 sdfn", facts.interface.name)),
    })
}
