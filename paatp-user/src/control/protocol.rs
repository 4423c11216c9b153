//! What control server and workers say to each other, as JSON.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Version of these messages.
pub const PROTOCOL: u32 = 1;

/// [`Refused::error`] where the wait for the other ranks was over.
pub const RANKS_MISSING: &str = "ranks_missing";

/// Body of `POST /v1/jobs/{name}/join`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JoinRequest {
    /// [`PROTOCOL`].
    pub protocol: u32,
    /// The rank that asks.
    pub rank: u32,
    /// The number of ranks that it expects.
    pub world: u32,
    /// How long it waits for the others.
    pub wait_seconds: f64,
    /// Digest of names, types and shapes of what it is going to reduce; ranks that send one must send the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<String>,
}

/// Answer to a join once all ranks are there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// [`PROTOCOL`].
    pub protocol: u32,
    /// The job's number in packets.
    pub job: u16,
    /// Incarnation of the membership.
    pub generation: u32,
    /// Where salts are drawn from.
    #[serde(with = "hex")]
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
}

/// Body of every answer but 2xx.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// For programs.
    pub error: String,
    /// For people.
    pub message: String,
    /// Ranks that had not joined.
    #[serde(default)]
    pub missing_ranks: Vec<u8>,
}

/// Where a job stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// Nobody has joined since the start.
    Idle,
    /// Ranks wait for the others; a complete generation may be running all the same.
    Forming,
    /// A generation is complete.
    Running,
}

/// Element of `GET /v1/jobs`, and with ranks and counters the body of `GET /v1/jobs/{name}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
    /// Slots of the ring.
    pub slots: u32,
    /// Contributions that complete a chunk; none for all.
    pub quorum: Option<u8>,
    /// The complete generation, if any.
    pub generation: Option<u32>,
    /// Ranks that wait for the others.
    pub waiting_ranks: Vec<u8>,
    /// Ranks that those wait for.
    pub missing_ranks: Vec<u8>,
}

/// Body of `GET /v1/jobs/{name}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobList {
    /// All jobs, in the order of their numbers.
    pub jobs: Vec<JobStatus>,
}

/// Counters as the option `--json-counters` writes them: by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CounterReport {
    /// Requests that were not taken, by reason.
    pub refusals: BTreeMap<String, u64>,
    /// What else happened.
    pub events: BTreeMap<String, u64>,
}

/// 64-bit numbers as 16 hexadecimal digits: JSON readers keep only 53 bits of a number.
mod hex {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{value:016x}"))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        if text.len() != 16 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(D::Error::custom("expected 16 hexadecimal digits"));
        }
        u64::from_str_radix(&text, 16).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nonces_are_hexadecimal() {
        let grant = Grant {
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
