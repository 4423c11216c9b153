//! Loads the XDP program, attaches it, and reads and writes its tables.

mod aggregator;
mod attach;
mod capabilities;
mod error;
mod interface;
pub(crate) mod netlink;

pub use aggregator::{Aggregator, Options, ProgressSnapshot, RankProgress};
pub use attach::{AttachedBy, AttachedMode, Attachment};
pub use capabilities::Capabilities;
pub use error::EngineError;
pub(crate) use error::{error_number, verifier_log};
pub use interface::{Interface, InterfaceError, fitting_lanes, ip_and_udp_bytes};
pub use netlink::{LinkState, XdpState, query};
