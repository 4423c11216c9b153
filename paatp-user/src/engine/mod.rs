//! Loads the XDP program, attaches it, and reads and writes its tables.

mod aggregator;
mod attach;
mod capabilities;
mod error;
mod interface;
mod jobs;
pub(crate) mod netlink;
mod reader;

pub use aggregator::{Aggregator, Options, ProgressSnapshot, RankProgress, check_program};
pub use attach::{AttachedBy, AttachedMode, Attachment};
pub use capabilities::Capabilities;
pub use error::{EngineError, NATIVE_MTU};
pub(crate) use error::{error_number, verifier_log};
pub use interface::{Interface, InterfaceError, fitting_lanes, ip_and_udp_bytes, names, owner_of};
pub use netlink::{LinkState, XdpState, query, query_in};
pub use reader::Reader;
