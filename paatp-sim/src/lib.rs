//! A packet network in virtual time that runs the real workers and the real aggregator: [`paatp_transport::Worker`] and
//! `paatp_common`'s path of a request, the same code as under the drivers and in the kernel.
//!
//! ```text
//! scenario (TOML) ─▶ simulation: queue of events ─┬─ peers: Worker, training (compute, stragglers, values)
//!        seed ─────▶                              ├─ topology: links (rate, delay, buffer, marks, loss, weather)
//!                                                 ├─ switch: adds on the way, and its auditor
//!                                                 └─ node: aggregate::handle, and the auditor of the rules
//!                                  record ─▶ report (table, JSON), plots (CSV, SVG)
//! ```
//!
//! Packets carry few real lanes, but links charge for whole ones (`docs/simulator.md`). Every result is compared with the
//! sum, and every step of the aggregator with the rules that keep the protocol right.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic"))]

pub mod link;
pub mod node;
pub mod output;
pub mod plot;
pub mod random;
pub mod record;
pub mod report;
pub mod scenario;
pub mod simulation;
pub mod soak;
pub mod sweep;
pub mod switch;
pub mod topology;
pub mod training;
pub mod units;

pub use record::Recorder;
pub use scenario::{Scenario, ScenarioError};
pub use simulation::{Simulation, SimulationError};
