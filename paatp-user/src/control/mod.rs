//! The control plane: which ranks make up a job, and since when.
//!
//! [`membership`] decides and does no I/O; [`server`] speaks HTTP and writes the tables that it decides on.

pub(crate) mod api;
pub mod ascent;
pub mod error;
pub mod generation;
pub mod hosts;
pub mod http;
pub mod job;
pub mod listen;
pub mod membership;
pub mod memory;
mod nodes;
pub mod pacing;
mod parent;
pub mod protocol;
pub mod server;
pub mod state;
pub mod state_file;
pub mod tables;
pub mod token;
pub mod watch;

/// TCP port of the control server and first UDP port of the data plane unless told otherwise: "PA".
pub const DEFAULT_PORT: u16 = 20545;

/// Longest wait for ranks that a worker may ask for, in seconds: an hour. A longer one would keep connections of dead
/// workers for as long.
pub const MAX_WAIT_SECONDS: f64 = 3600.0;

#[cfg(test)]
pub(crate) mod testing;
