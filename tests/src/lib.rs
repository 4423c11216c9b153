//! The lab: network namespaces joined by a bridge, programs that disturb the path, the `paatp` processes in them, real
//! gradients and their exact sums. The end-to-end tests and the playground are built from it.
//!
//! Architecture invariant: nothing outside the namespaces that a [`Lab`] creates is changed, and everything is held by
//! file descriptors of this process, so that nothing is left behind however it ends.

pub mod audit;
pub mod bed;
pub mod browser;
pub mod disturbance;
pub mod exposition;
pub mod gradients;
pub mod http;
pub mod job;
pub mod kernel;
pub mod lab;
pub mod netns;
pub mod objects;
pub mod p4;
pub mod p4runtime;
pub mod pins;
pub mod process;
pub mod racks;
pub mod reference;
pub mod report;
pub mod seccomp;
pub mod shaping;
pub mod skip;
pub mod spread;
pub mod testrun;
pub mod tshark;
pub mod vectors;

pub use disturbance::{Counts, Direction, Disturbance, Rates};
pub use gradients::{Dtype, Gradient, Tensor};
pub use job::{JobOptions, JobResult, Running};
pub use lab::{Family, Lab, Layout};
pub use process::{Aggregator, Process, WorkerCommand};
pub use skip::{require_bpf, require_program, skip};
