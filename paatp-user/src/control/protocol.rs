//! What control server and workers say to each other, as JSON.

use std::collections::BTreeMap;

use paatp_common::counter::{Counters, Event, Refusal};
use paatp_common::policy::{MAX_STALENESS, Mode, QUORUM_ALL, Staleness};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::config::{Access, FailurePolicy, MemoryKind, RankRange};

pub use super::nodes::Nodes;

/// Version of these messages.
pub const PROTOCOL: u32 = 1;

/// Body of `POST /v1/jobs/{name}/join`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JoinRequest {
    /// [`PROTOCOL`].
    #[schema(minimum = 1, maximum = 1)]
    pub protocol: u32,
    /// The rank that asks.
    #[schema(maximum = 63)]
    pub rank: u32,
    /// The number of ranks that it expects.
    #[schema(minimum = 1, maximum = 64)]
    pub world: u32,
    /// How long it waits for the others, in seconds.
    #[schema(minimum = 0, maximum = 3600)]
    pub wait_seconds: f64,
    /// Digest of names, types and shapes of what it is going to reduce; ranks that send one must send the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<String>,
    /// Random number of this wait, the same however often the worker has to ask: if the answer got lost, because the
    /// connection broke or the aggregator was started again, the grant is told again.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "maybe_hex")]
    #[schema(value_type = Option<String>, pattern = "^[0-9a-f]{16}$")]
    pub attempt: Option<u64>,
    /// Of a lower node that joins for its ranks: those besides `rank`. Their packets come from its address, and they are
    /// granted the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub below: Option<Vec<u32>>,
    /// Of a lower node whose ranks are all this one rank: how many they are. `world` is theirs then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 64)]
    pub members: Option<u32>,
}

/// Answer to a join once all ranks are there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Grant {
    /// [`PROTOCOL`].
    pub protocol: u32,
    /// The job's number in packets.
    pub job: u16,
    /// Incarnation of the membership.
    pub generation: u32,
    /// Where salts are drawn from.
    #[serde(with = "hex")]
    #[schema(value_type = String, pattern = "^[0-9a-f]{16}$")]
    pub nonce: u64,
    /// Number of ranks.
    pub world: u8,
    /// Most lanes of a chunk.
    pub lanes: u16,
    /// Window in chunks.
    pub window: u16,
    /// Slots of the ring.
    pub slots: u32,
    /// First UDP port of the data plane.
    pub port_base: u16,
    /// Number of UDP ports.
    pub ports: u16,
    /// Who stands behind the ranks of the root, if some are nodes with ranks of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes: Option<Nodes>,
}

/// Body of `POST /v1/jobs/{name}/leave`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LeaveRequest {
    /// [`PROTOCOL`].
    #[schema(minimum = 1, maximum = 1)]
    pub protocol: u32,
    /// The rank that leaves.
    #[schema(maximum = 63)]
    pub rank: u32,
    /// The generation that it was granted; absent if it still waits for one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u32>,
}

/// Body of every answer but 2xx: a problem as RFC 9457 has it, `application/problem+json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// For programs: never changes its meaning.
    pub code: String,
    /// What the HTTP status says.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// For people: what failed, why, what to do.
    pub detail: String,
    /// Ranks that had not joined.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing_ranks: Vec<u8>,
    /// The largest ring that would fit, where memory was refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fitting_slots: Option<u32>,
}

/// How ranks wait for one another: body of `PUT /v1/jobs/{name}/sync`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "mode", rename_all = "snake_case")]
pub enum Sync {
    /// Bulk-synchronous: every chunk needs all ranks, every iteration all results.
    Bsp,
    /// So many contributions complete a chunk; what comes late goes into the sender's next gradient.
    Quorum {
        /// How many.
        #[schema(minimum = 1, maximum = 64)]
        quorum: u32,
    },
    /// An iteration begins when the results of that many iterations before the last one are there.
    Ssp {
        /// How many. 0 is `bsp`, or `quorum`.
        #[schema(maximum = 62)]
        staleness: u32,
        /// Contributions that complete a chunk; all without it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(minimum = 1, maximum = 64)]
        quorum: Option<u32>,
    },
    /// Nothing but the ring holds iterations back.
    Asp {
        /// Contributions that complete a chunk; all without it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(minimum = 1, maximum = 64)]
        quorum: Option<u32>,
    },
}

impl Sync {
    /// What the data plane has.
    #[must_use]
    pub fn of(mode: Mode) -> Sync {
        let quorum = (mode.quorum != QUORUM_ALL).then_some(u32::from(mode.quorum));
        match (mode.staleness, quorum) {
            (Staleness::Bounded(0), None) => Sync::Bsp,
            (Staleness::Bounded(0), Some(quorum)) => Sync::Quorum { quorum },
            (Staleness::Bounded(staleness), quorum) => Sync::Ssp { staleness: staleness.into(), quorum },
            (Staleness::Unbounded, quorum) => Sync::Asp { quorum },
        }
    }

    /// What the data plane is to have in a job of `world` ranks; none if a number is out of range.
    #[must_use]
    pub fn mode(self, world: u8) -> Option<Mode> {
        let (staleness, quorum) = match self {
            Sync::Bsp => (Some(0), None),
            Sync::Quorum { quorum } => (Some(0), Some(quorum)),
            Sync::Ssp { staleness, quorum } => (Some(staleness), quorum),
            Sync::Asp { quorum } => (None, quorum),
        };
        let staleness = match staleness {
            None => Staleness::Unbounded,
            Some(most) => Staleness::Bounded(u8::try_from(most).ok().filter(|most| *most <= MAX_STALENESS)?),
        };
        let quorum = match quorum {
            Some(quorum) if quorum < u32::from(world) => u8::try_from(quorum).ok().filter(|q| *q > 0)?,
            Some(quorum) if quorum > u32::from(world) => return None,
            _ => QUORUM_ALL,
        };
        Some(Mode { quorum, staleness })
    }
}

/// A change of the synchronisation that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SyncChange {
    /// What is in force for the chunks before.
    pub before: Sync,
    /// The first chunk of what is wanted; absent until the data plane has met the change.
    pub from: Option<u32>,
}

/// Where a job stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// No generation runs and nobody waits.
    Idle,
    /// Ranks wait for the others; a complete generation may be running all the same.
    Forming,
    /// A generation is complete.
    Running,
    /// The last generation was ended because of ranks that held the others up.
    Failed,
}

impl JobState {
    /// All of them.
    pub const ALL: [JobState; 4] = [JobState::Idle, JobState::Forming, JobState::Running, JobState::Failed];

    /// As JSON has it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            JobState::Idle => "idle",
            JobState::Forming => "forming",
            JobState::Running => "running",
            JobState::Failed => "failed",
        }
    }
}

/// Element of `GET /v1/jobs`, and with ranks and counters the body of `GET /v1/jobs/{name}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobStatus {
    /// Its name.
    pub name: String,
    /// Its number in packets.
    pub job: u16,
    /// Where it stands.
    pub state: JobState,
    /// Number of ranks.
    pub world: u8,
    /// Most lanes of a chunk.
    pub lanes: u16,
    /// Window in chunks.
    pub window: u16,
    /// Slots of the ring; with shared memory how many chunks may be open.
    pub slots: u32,
    /// Bytes of the slots that belong to it alone.
    pub slot_bytes: u64,
    /// Where they come from.
    pub memory: MemoryKind,
    /// Places in the pool that each chunk may take at the moment; none with a ring.
    pub places: Option<u8>,
    /// Who may join.
    pub access: Access,
    /// Longest time that a rank may hold the others up, in seconds; none for ever.
    pub timeout_seconds: Option<f64>,
    /// What happens then.
    pub on_failure: FailurePolicy,
    /// How ranks wait for one another, or are to.
    pub sync: Sync,
    /// Number of that; counts round.
    pub epoch: u8,
    /// The change to it, while a rank may still need a chunk from before it.
    pub sync_change: Option<SyncChange>,
    /// The complete generation, if any.
    pub generation: Option<u32>,
    /// Ranks that wait for the others.
    pub waiting_ranks: Vec<u8>,
    /// Ranks that those wait for.
    pub missing_ranks: Vec<u8>,
    /// Aggregator that the sums of its ranks go to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// With a parent: the ranks that join here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub ranks_here: Option<RankRange>,
    /// With a parent: the rank of its job that all ranks here are together; absent if each has its own there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub child: Option<u8>,
    /// Number of ranks behind each rank of the generation, if some are nodes with ranks of their own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<u16>,
    /// Ranks that left the generation.
    pub left_ranks: Vec<u8>,
    /// Ranks that held the others up for too long, in the generation that runs or in the last one.
    pub lost_ranks: Vec<u8>,
}

/// Body of `GET /v1/jobs/{name}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobDetails {
    /// As in the list.
    #[serde(flatten)]
    pub status: JobStatus,
    /// Members of the complete generation.
    pub ranks: Vec<RankStatus>,
    /// Slots that hold something which not every rank has acknowledged; none if not counted.
    pub slots_in_use: Option<u32>,
}

/// One member of a generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RankStatus {
    /// Its rank.
    pub rank: u8,
    /// Where its packets come from.
    pub address: String,
    /// Results that it has acknowledged, as the data plane saw it.
    pub acknowledged: u32,
    /// Chunks that it has contributed.
    pub contributed: u32,
}

/// Body of `GET /v1/jobs`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobList {
    /// All jobs, in the order of their numbers.
    pub jobs: Vec<JobStatus>,
}

/// Answer to `POST /v1/jobs`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Created {
    /// The job.
    #[serde(flatten)]
    pub status: JobStatus,
    /// What its workers show to join, where access is by token. Told only once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

/// Body of `GET /v1/node`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeStatus {
    /// Version of the aggregator.
    pub version: String,
    /// It takes no new jobs or ranks.
    pub draining: bool,
    /// Number of jobs.
    pub jobs: u32,
    /// Most jobs that it can have.
    pub max_jobs: u32,
    /// Jobs of which a generation runs.
    pub running_jobs: u32,
    /// Deleted jobs whose number and slots are not free yet.
    pub closing_jobs: u32,
    /// Most lanes that a job's chunks may have.
    pub max_lanes: u32,
    /// Slots of the node.
    pub slots: u32,
    /// Those that belong to no job.
    pub free_slots: u32,
    /// Most free slots in a row: the longest ring that would fit, rounded down to a power of two.
    pub longest_free_slots: u32,
    /// Bytes of one slot.
    pub slot_bytes: u32,
    /// Of the slots those that jobs share.
    pub pool_slots: u32,
    /// Of those, how many hold something that some rank has not acknowledged; estimated from a sample if they are many.
    pub pool_slots_in_use: u32,
}

/// Answer to `PUT /v1/node/drain`, and its body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Drain {
    /// Whether the node takes nothing new.
    pub draining: bool,
}

/// Counters as the option `--json-counters` writes them: by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CounterReport {
    /// Requests that were not taken, by reason.
    pub refusals: BTreeMap<String, u64>,
    /// What else happened.
    pub events: BTreeMap<String, u64>,
}

impl CounterReport {
    /// All counters by name.
    #[must_use]
    pub fn of(counters: &Counters) -> CounterReport {
        let refusals = Refusal::ALL.iter().map(|r| (r.name().to_owned(), counters.refused(*r)));
        let events = Event::ALL.iter().map(|event| (event.name().to_owned(), counters.noted(*event)));
        CounterReport { refusals: refusals.collect(), events: events.collect() }
    }
}

/// 64-bit numbers as 16 hexadecimal digits: JSON readers keep only 53 bits of a number.
pub(super) mod hex {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{value:016x}"))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        read(&text).ok_or_else(|| D::Error::custom("expected 16 hexadecimal digits"))
    }

    pub(super) fn read(text: &str) -> Option<u64> {
        let digits = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        digits.then(|| u64::from_str_radix(text, 16).ok()).flatten()
    }
}

/// The same for numbers that may be left out.
pub(super) mod maybe_hex {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(value: &Option<u64>, serializer: S) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => super::hex::serialize(value, serializer),
            None => serializer.serialize_none(),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
        let text = Option::<std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        let read = |text: std::borrow::Cow<'de, str>| super::hex::read(&text);
        text.map(|text| read(text).ok_or_else(|| D::Error::custom("expected 16 hexadecimal digits")))
            .transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nonces_are_hexadecimal() {
        let grant = Grant {
            nodes: None,
            protocol: PROTOCOL,
            job: 0,
            generation: 123,
            nonce: 0x0123_4567_89ab_cdef,
            world: 4,
            lanes: 352,
            window: 64,
            slots: 256,
            port_base: 20545,
            ports: 1,
        };
        let text = serde_json::to_string(&grant).unwrap_or_default();
        assert!(text.contains("\"nonce\":\"0123456789abcdef\""), "{text}");
        assert_eq!(serde_json::from_str::<Grant>(&text).ok(), Some(grant));
        let short = text.replace("0123456789abcdef", "+123456789abcdef");
        assert!(serde_json::from_str::<Grant>(&short).is_err());
    }

    #[test]
    fn requests_need_no_layout() {
        let text = r#"{"protocol":1,"rank":2,"world":4,"wait_seconds":30.0}"#;
        assert!(serde_json::from_str::<JoinRequest>(text).is_ok_and(|request| request.layout.is_none()));
    }
}
