//! The node at one moment, as data. Status page, `paatp status`, `paatp top` and metrics show this and nothing else.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use utoipa::ToSchema;

use crate::control::protocol::{CounterReport, JobStatus, NodeStatus};
use crate::switch::report::SwitchSnapshot;

use super::health::{Health, Notice};
use super::stall::Stall;

/// Version of [`Snapshot`] and [`Series`](super::history::Series). New fields may be added within one.
pub const SCHEMA_VERSION: u32 = 1;

/// Body of `GET /v1/status`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Snapshot {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// When it was made, in seconds since 1970.
    pub unix_seconds: f64,
    /// How long the aggregator has been running, in seconds.
    pub uptime_seconds: f64,
    /// How long ago its core loop last went round, in seconds: usually less than 0.3.
    pub core_age_seconds: f64,
    /// What it was built from.
    pub build: Build,
    /// Where its program is.
    pub attachment: AttachmentStatus,
    /// Its memory, its jobs, whether it is drained.
    pub node: NodeStatus,
    /// Slots of all jobs that hold something which not every rank has acknowledged; none if not all could be counted.
    pub slots_in_use: Option<u32>,
    /// What the data plane counted, by name.
    pub counters: CounterReport,
    /// The switch in front of it, if it was told of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub switch: Option<SwitchSnapshot>,
    /// All jobs, in the order of their numbers.
    pub jobs: Vec<JobSnapshot>,
    /// What could not be read, in words.
    pub problems: Vec<String>,
    /// All of this as one judgement.
    pub health: Health,
}

/// What a program was built from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Build {
    /// Its version.
    pub version: String,
    /// SHA-256 of the eBPF object inside, in hexadecimal.
    pub object_sha256: String,
}

impl Build {
    /// Of this program, with this object inside.
    #[must_use]
    pub fn of(object: &[u8]) -> Build {
        let hex = Sha256::digest(object).iter().map(|byte| format!("{byte:02x}")).collect();
        Build { version: env!("CARGO_PKG_VERSION").into(), object_sha256: hex }
    }
}

/// How the XDP program is attached.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AttachmentStatus {
    /// The interface.
    pub interface: String,
    /// `native` (in the driver) or `generic` (in the network stack).
    pub mode: String,
    /// `bpf_link`, `pinned_link` or `netlink`.
    pub held_by: String,
    /// Id of the program in the kernel; 0 if it did not tell.
    pub program: u32,
    /// Folder in a BPF file system where program and tables are pinned, if they are.
    #[serde(default)]
    pub pinned: Option<String>,
    /// What is wrong with the interface just now.
    #[serde(default)]
    pub notices: Vec<Notice>,
}

/// One job at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobSnapshot {
    /// As in the list of jobs.
    #[serde(flatten)]
    pub status: JobStatus,
    /// How long ranks have been waiting for others to join, in seconds.
    pub forming_seconds: Option<f64>,
    /// Chunks whose results every rank has acknowledged, in all generations.
    pub completed_chunks: u64,
    /// Results that every rank acknowledged, in chunks a second, over the last five seconds.
    pub chunks_per_second: f64,
    /// Slots that hold something which not every rank has acknowledged; none if not counted.
    pub slots_in_use: Option<u32>,
    /// The first chunk that has contributions and needs more.
    pub oldest_open_slot: Option<OpenSlot>,
    /// How far the slowest rank that counts is behind the first, in chunks.
    pub lag_chunks: u32,
    /// Every rank, from 0 on.
    pub ranks: Vec<RankSnapshot>,
    /// Who holds whom up, if somebody does.
    pub stall: Option<Stall>,
}

/// A slot that waits for contributions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OpenSlot {
    /// Number of its chunk in the generation.
    pub chunk: u32,
    /// How long it has been the oldest one, in seconds. The kernel has no clock in its slots: this is the time since
    /// the core loop first saw it so, and too short by up to a quarter of a second.
    pub age_seconds: f64,
    /// Ranks whose contribution it has.
    pub contributors: Vec<u8>,
    /// Ranks that count and whose contribution it lacks.
    pub missing_ranks: Vec<u8>,
}

/// What a rank is to its job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RankState {
    /// Neither a member nor expected just now.
    Absent,
    /// Others wait for it to join.
    Missing,
    /// It waits for others to join.
    Waiting,
    /// A member of the generation that runs.
    Member,
    /// It said that it is done with the generation that runs.
    Left,
    /// It held the others up for too long.
    Lost,
}

/// One rank at one moment. Totals never go down: a new generation continues them. They end with the job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RankSnapshot {
    /// Its rank.
    pub rank: u8,
    /// What it is.
    pub state: RankState,
    /// Where it joined from.
    pub address: Option<String>,
    /// Chunks that it has contributed, as it acknowledged.
    pub contributed: u64,
    /// Results that it has acknowledged.
    pub acknowledged: u64,
    /// Its requests that had met congestion (ECN).
    pub marks: u64,
    /// Its contributions that were refused as too far ahead of the slowest rank (BUSY).
    pub busy: u64,
    /// Chunks that it contributes a second, over the last five seconds.
    pub chunks_per_second: f64,
    /// How far it is behind the first rank of the generation, in chunks.
    pub lag_chunks: u32,
    /// The others wait for it just now: half a window behind, or held up for longer than a second.
    pub straggler: bool,
    /// How long it has stood lowest without moving while somebody is ahead, in seconds. Exact to a quarter of a second.
    pub in_the_way_seconds: Option<f64>,
}
