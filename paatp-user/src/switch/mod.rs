//! The control plane of a programmable switch in front of the aggregator (`p4/paatp.p4`).

pub mod entries;
pub mod messages;
