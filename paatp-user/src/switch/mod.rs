//! The control plane of a programmable switch in front of the aggregator (`p4/paatp.p4`), over P4Runtime.
//!
//! [`placement`] says which jobs are to be on it, [`entries`] what then stands in its tables, [`program`] what these are
//! called there, [`plan`] what is to be changed, in a safe order: all pure. [`client`] speaks to it, [`keeper`] keeps it
//! like that, and [`report`] is what others see of it.

pub mod client;
pub mod entries;
pub mod error;
pub mod keeper;
pub mod messages;
pub mod options;
pub mod placement;
pub mod plan;
pub mod program;
pub mod report;
