//! What the kernel, the workers and a switch must agree on, once.
//!
//! Packets ([`wire`], [`frame`]), fixed-point lanes and their checksum ([`lanes`], [`tag`]), the slot state machine
//! ([`slot`]), the tables ([`job`], [`progress`]) and the path of one request through them ([`aggregate`]).
//!
//! Architecture invariant: nothing here allocates, does I/O, reads a clock or depends on a crate of ours. The XDP
//! program, the user-space engine of the tests and the simulator call the same functions.

#![no_std]
// Empty assembly is the one compiler barrier that BPF code generation respects; see `mind`.
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

#[cfg(test)]
extern crate std;

pub mod aggregate;
pub mod counter;
pub mod frame;
pub mod host;
pub mod job;
pub mod lanes;
pub mod layout;
pub mod levels;
pub mod limits;
pub mod mind;
pub mod policy;
pub mod pool;
pub mod progress;
pub mod seq;
pub mod slot;
pub mod switch;
pub mod tag;
pub mod wire;

pub use counter::{Event, Refusal};
pub use policy::{Mode, Policy, Staleness, Told};
pub use seq::Seq;
