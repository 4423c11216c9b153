//! The kernel maps. Their layouts are `paatp-common`'s; the loader sets the size of the slot tables.

use aya_ebpf::macros::map;
use aya_ebpf::maps::{Array, PerCpuArray};
use paatp_common::counter::Counters;
use paatp_common::job::{JobEntry, Node, RankEntry};
use paatp_common::levels::{Above, Link};
use paatp_common::limits::{MAX_JOBS, MAX_RANKS};
use paatp_common::progress::Progress;

/// `BPF_F_MMAPABLE`: user space may map the array and read it without system calls.
pub const MMAPABLE: u32 = 1 << 10;

/// What makes a packet ours.
#[map]
pub static NODE: Array<Node> = Array::with_max_entries(1, MMAPABLE);

/// Jobs by number.
#[map]
pub static JOBS: Array<JobEntry> = Array::with_max_entries(MAX_JOBS as u32, MMAPABLE);

/// Ranks by `job * MAX_RANKS + rank`.
#[map]
pub static RANKS: Array<RankEntry> = Array::with_max_entries((MAX_JOBS * MAX_RANKS) as u32, MMAPABLE);

/// Progress of jobs, by number.
#[map]
pub static PROGRESS: Array<Progress> = Array::with_max_entries(MAX_JOBS as u32, MMAPABLE);

/// Where the sums of jobs go, by number.
#[map]
pub static LINKS: Array<Link> = Array::with_max_entries(MAX_JOBS as u32, MMAPABLE);

/// What parents told of jobs, by number, and the ways to their ranks.
#[map]
pub static ABOVE: Array<Above> = Array::with_max_entries(MAX_JOBS as u32, MMAPABLE);

/// What happened, by CPU.
#[map]
pub static COUNTERS: PerCpuArray<Counters> = PerCpuArray::with_max_entries(1, 0);
