//! Loads the XDP program, attaches it, and reads and writes its tables.

mod aggregator;
mod attach;
pub(crate) mod bpf;
mod capabilities;
mod error;
mod interface;
mod jobs;
pub(crate) mod layout;
pub(crate) mod lock;
mod maps;
pub(crate) mod netlink;
mod pinning;
pub(crate) mod pins;
mod reader;
mod surroundings;

pub use aggregator::{Aggregator, Options, ProgressSnapshot, RankProgress, Truth, check_program};
pub use attach::{AttachedBy, AttachedMode, Attachment};
pub use capabilities::{Capabilities, REQUIRED, Requirement, is_filtered};
pub use error::{EngineError, NATIVE_MTU};
pub(crate) use error::{error_number, verifier_log};
pub use interface::{Interface, InterfaceError, fitting_lanes, ip_and_udp_bytes, names, owner_of};
pub use netlink::{LinkState, XdpState, query, query_in};
pub use pinning::{Pinning, lock_file};
pub use pins::{DEFAULT_BPFFS, escape};
pub use reader::Reader;
pub use surroundings::Surroundings;
