//! The worker's side of paatp: turns tensors into chunks, gets every chunk's result in spite of loss, and turns results
//! back. Sans-IO: takes datagrams and the time, returns datagrams and deadlines.
//!
//! ```text
//! all_reduce ─▶ operation (plan: chunks; quantise: lanes) ─▶ ring (contributions as sent) ─▶ poll_transmit
//!                                                              ▲ recovery (requests, losses, RTT)
//! poll_event ◀─ operation ◀──────────── check, deliver ◀───────┴─────────────────────────── handle_datagram
//! ```
//!
//! Architecture invariant: no socket, clock, thread or async, and no allocation for each packet. The same code runs under
//! the drivers of `paatp-user` and in the simulator, so what its tests show in virtual time holds for real.

#![cfg_attr(not(test), no_std)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic"))]

extern crate alloc;

mod error;
mod membership;
mod operation;
mod plan;
pub mod quantise;
pub mod rate;
mod recovery;
mod residual;
mod ring;
mod seating;
mod statistics;
mod synchronisation;
mod tensor;
mod time;
pub mod words;
mod worker;

pub use error::OperationError;
pub use membership::{Membership, MembershipError, Settings};
pub use quantise::error_bound;
pub use seating::{Names, Seating};
pub use statistics::Statistics;
pub use synchronisation::Synchronisation;
pub use tensor::{Handle, Reduction, Tensor, Values};
pub use time::Time;
pub use worker::{Event, Transmit, Worker};
