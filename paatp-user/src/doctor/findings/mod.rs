//! Findings as a pure function of the facts.

mod host;
mod link;
mod offloads;
mod path;
mod queues;
#[cfg(test)]
mod tests;

use super::facts::{Facts, InterfaceFacts};
use super::report::{Check, Finding, Severity};

/// What there is to say.
#[must_use]
pub fn findings(facts: &Facts) -> Vec<Finding> {
    let mut found = host::findings(&facts.host, &facts.question, attached_is_ours(facts));
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
    found
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

/// The program on the interface is paatp's, as far as its name tells.
fn attached_is_ours(facts: &Facts) -> bool {
    match &facts.interface {
        InterfaceFacts::Found(link) => {
            link.link.xdp.is_some() && link.program_name.as_deref().is_some_and(is_our_program)
        }
        _ => false,
    }
}

/// The kernel keeps 15 bytes of a program's name: `aggregate`, `aggregate_wide`.
fn is_our_program(name: &str) -> bool {
    matches!(name, "aggregate" | "aggregate_wide")
}
