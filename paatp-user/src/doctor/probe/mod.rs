//! Looks at the machine. Everything here is I/O; nothing here judges.

mod bpf;
mod host;
mod ioctl;
mod link;
mod netdev;
mod route;
mod switch;

pub use ioctl::{flow_rules, offloads, queues};

use std::net::IpAddr;

use super::facts::{Facts, Question};

/// Collects the facts. `object` is paatp's own eBPF object, to be judged by the verifier.
#[must_use]
pub fn look(question: Question, interface: Option<&str>, workers: &[IpAddr], object: &[u8]) -> Facts {
    let host = host::look(&question, object);
    let interface = link::look(interface, question.bpffs.as_deref());
    let workers = workers.iter().map(|address| route::look(*address)).collect();
    let switch = question.switch.map(|(address, device)| switch::look(address, device));
    Facts { question, host, interface, workers, switch }
}
