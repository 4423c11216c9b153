//! Findings as a pure function of the facts.

mod host;
mod link;
mod offloads;
mod path;
mod queues;
#[cfg(test)]
mod tests;

use super::facts::{Facts, InterfaceFacts, LinkFacts, SwitchFacts};
use super::report::{Check, Finding, Severity};

/// What there is to say.
#[must_use]
pub fn findings(facts: &Facts) -> Vec<Finding> {
    let link = match &facts.interface {
        InterfaceFacts::Found(link) => Some(link.as_ref()),
        InterfaceFacts::NotAsked | InterfaceFacts::Absent { .. } => None,
    };
    let mut found = host::findings(&facts.host, &facts.question, link);
    match &facts.interface {
        InterfaceFacts::NotAsked => found.push(
            Finding::new(
                Check::Interface,
                Severity::Note,
                "no interface was named, so only the machine was looked at",
                "driver, MTU, queues and offloads decide whether the program can be attached and how fast it is",
            )
            .mend(format!("paatp doctor IFACE, one of: {}", facts.host.interfaces.join(", "))),
        ),
        InterfaceFacts::Absent { name, error, owner } => found.push(absent(name, error, owner.as_deref())),
        InterfaceFacts::Found(link) => {
            found.extend(link::findings(link, &facts.question));
            found.extend(queues::findings(link, &facts.question, facts.host.processors));
            found.extend(offloads::findings(link, &facts.question));
        }
    }
    found.extend(facts.workers.iter().map(|worker| path::finding(worker, &facts.interface)));
    found.extend(facts.switch.iter().map(switch));
    found
}

fn switch(switch: &SwitchFacts) -> Finding {
    let address = switch.address;
    match &switch.program {
        Ok((slots, lanes)) => Finding::ok(
            Check::Switch,
            format!("the switch at {address} has the program, with {slots} slots of {lanes} lanes"),
        ),
        Err(error) => Finding::new(
            Check::Switch,
            Severity::Warning,
            format!("the switch at {address} cannot be used: {error}"),
            "without it the XDP program adds every contribution by itself",
        )
        .mend("docs/operations.md#paatpswitchdown says what to do about each of these"),
    }
}

fn absent(name: &str, error: &str, owner: Option<&str>) -> Finding {
    let why = "the program is attached to an interface of this network namespace, by its name";
    let finding = Finding::new(Check::Interface, Severity::Error, error, why);
    match owner {
        Some(owner) => finding.mend(format!("{name} is an address of {owner}: paatp doctor {owner}")),
        None => finding.mend(
            "ip -brief link   # in a container: is it there, or in the host's network namespace (hostNetwork)?",
        ),
    }
}

/// The program on the interface is paatp's, as far as its name tells. The kernel keeps 15 bytes of a program's name.
fn runs_paatp(link: &LinkFacts) -> bool {
    let named = matches!(link.program_name.as_deref(), Some("aggregate" | "aggregate_wide"));
    link.link.xdp.is_some() && (named || link.pins.iter().any(|pins| pins.holds))
}
