//! The worker's side of the program: joins a job, drives the sans-IO transport over a driver, and all-reduces the tensors
//! of a file.

pub mod allreduce;
mod batch;
pub mod client;
pub mod drive;
pub mod driver;
pub mod endpoint;
pub mod io;
pub mod report;
pub mod socket;
pub mod tensors;
pub mod udp;
pub mod xdp;

pub use allreduce::{AllreduceError, allreduce};
pub use endpoint::{Endpoint, EndpointError};
