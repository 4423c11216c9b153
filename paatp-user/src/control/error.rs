//! Every way in which the control server says no: one code each, which never changes its meaning.

use std::net::{IpAddr, SocketAddr};

use axum::http::StatusCode;
use paatp_common::limits::{MAX_JOBS, MAX_RANKS};
use paatp_transport::words::Ranks;
use thiserror::Error;

use crate::config::{ConfigError, RankRange};

use super::MAX_WAIT_SECONDS;
use super::protocol::PROTOCOL;

/// Name of a refusal, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Code(&'static str, StatusCode);

impl Code {
    /// As JSON has it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.0
    }

    /// The HTTP status that goes with it.
    #[must_use]
    pub const fn status(self) -> StatusCode {
        self.1
    }
}

/// Defines the codes and the list of all of them.
macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $text:literal, $status:ident;)*) => {
        impl Code {
            $($(#[$doc])* pub const $name: Code = Code($text, StatusCode::$status);)*

            /// All codes.
            pub const ALL: &[Code] = &[$(Code::$name),*];
        }
    };
}

codes! {
    /// The body cannot be read.
    BAD_REQUEST = "bad_request", BAD_REQUEST;
    /// Another version of the control protocol.
    BAD_PROTOCOL = "bad_protocol", BAD_REQUEST;
    /// The rank is not below the job's world.
    BAD_RANK = "bad_rank", BAD_REQUEST;
    /// The wait is no number of seconds in range.
    BAD_WAIT = "bad_wait", BAD_REQUEST;
    /// A value of the job is not allowed.
    BAD_JOB = "bad_job", BAD_REQUEST;
    /// No token was shown.
    TOKEN_MISSING = "token_missing", UNAUTHORIZED;
    /// Another token was shown.
    TOKEN_WRONG = "token_wrong", UNAUTHORIZED;
    /// The node has no token, so nobody may change anything.
    MANAGEMENT_OFF = "management_off", FORBIDDEN;
    /// This address serves workers only.
    NOT_HERE = "not_here", FORBIDDEN;
    /// The rank joined from another address.
    FOREIGN_ADDRESS = "foreign_address", FORBIDDEN;
    /// No such page.
    NOT_FOUND = "not_found", NOT_FOUND;
    /// No such job.
    UNKNOWN_JOB = "unknown_job", NOT_FOUND;
    /// The page takes another method.
    BAD_METHOD = "bad_method", METHOD_NOT_ALLOWED;
    /// Ranks had not joined in time.
    RANKS_MISSING = "ranks_missing", REQUEST_TIMEOUT;
    /// The body did not come in time.
    TOO_SLOW = "too_slow", REQUEST_TIMEOUT;
    /// A job has that name.
    JOB_EXISTS = "job_exists", CONFLICT;
    /// The node has as many jobs as its tables hold.
    NODE_FULL = "node_full", CONFLICT;
    /// The node has not so much free memory.
    MEMORY_FULL = "memory_full", CONFLICT;
    /// The job is to share a pool, and the node has none.
    NO_POOL = "no_pool", CONFLICT;
    /// Chunks do not fit the slots or the MTU.
    TOO_LONG = "too_long", CONFLICT;
    /// The node takes nothing new.
    DRAINING = "draining", CONFLICT;
    /// The worker expects another number of ranks.
    WORLD_MISMATCH = "world_mismatch", CONFLICT;
    /// The rank joins at another node.
    RANK_ELSEWHERE = "rank_elsewhere", CONFLICT;
    /// The node takes no sums of lower nodes.
    NO_LEVELS = "no_levels", CONFLICT;
    /// The rank waits already, from another address.
    RANK_TAKEN = "rank_taken", CONFLICT;
    /// The rank reduces something else than the others.
    LAYOUT_MISMATCH = "layout_mismatch", CONFLICT;
    /// The rank joined again.
    REPLACED = "replaced", CONFLICT;
    /// The generation is not the one that runs.
    NO_MEMBER = "no_member", CONFLICT;
    /// The rank left, or the job or its wait was ended.
    LEFT = "left", CONFLICT;
    /// The last change of the synchronisation is not over.
    SYNC_CHANGING = "sync_changing", CONFLICT;
    /// Not in this version.
    UNSUPPORTED = "unsupported", CONFLICT;
    /// The job was deleted meanwhile.
    JOB_DELETED = "job_deleted", GONE;
    /// The body is too long.
    TOO_LARGE = "too_large", PAYLOAD_TOO_LARGE;
    /// The body is not JSON.
    BAD_MEDIA_TYPE = "bad_media_type", UNSUPPORTED_MEDIA_TYPE;
    /// The request is for another host.
    BAD_HOST = "bad_host", MISDIRECTED_REQUEST;
    /// The kernel's tables cannot be read or written.
    TABLES = "tables", INTERNAL_SERVER_ERROR;
    /// The kernel gave no randomness.
    RANDOMNESS = "randomness", INTERNAL_SERVER_ERROR;
    /// The job's parent does not answer, or refuses.
    PARENT = "parent", BAD_GATEWAY;
    /// The aggregator is stopping.
    STOPPING = "stopping", SERVICE_UNAVAILABLE;
    /// Too many connections.
    BUSY = "busy", SERVICE_UNAVAILABLE;
}

/// A request that was refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ControlError {
    /// [`Code::BAD_REQUEST`]
    #[error("the body cannot be read: {0}")]
    BadRequest(String),
    /// [`Code::BAD_PROTOCOL`]
    #[error(
        "the worker speaks control protocol {0}, this aggregator {PROTOCOL}; use the same version of paatp on both"
    )]
    BadProtocol(u32),
    /// [`Code::BAD_RANK`]
    #[error("rank {rank} is out of range; job `{job}` has ranks 0 to {}", .world - 1)]
    BadRank {
        /// The job.
        job: String,
        /// The rank.
        rank: u32,
        /// The job's world.
        world: u8,
    },
    /// [`Code::BAD_WAIT`]
    #[error("wait_seconds must be between 0 and {MAX_WAIT_SECONDS}")]
    BadWait,
    /// [`Code::BAD_JOB`]
    #[error("{0}")]
    BadJob(String),
    /// [`Code::TOKEN_MISSING`]
    #[error("{0}; send a token as `Authorization: Bearer …` (--token-file)")]
    TokenMissing(&'static str),
    /// [`Code::TOKEN_WRONG`]
    #[error("that token opens nothing here; see which file the aggregator uses (--token-file)")]
    TokenWrong,
    /// [`Code::MANAGEMENT_OFF`]
    #[error("this aggregator has no token, so nobody may change its jobs; start it with --token-file")]
    ManagementOff,
    /// [`Code::NOT_HERE`]
    #[error(
        "this address serves workers only (join, leave, one job's state); manage jobs at the aggregator's loopback address, or start it with --control ADDR"
    )]
    NotHere,
    /// [`Code::FOREIGN_ADDRESS`]
    #[error("rank {rank} of job `{job}` joined from another address; only it can leave")]
    ForeignAddress {
        /// The job.
        job: String,
        /// The rank.
        rank: u8,
    },
    /// [`Code::NOT_FOUND`]
    #[error("no such page; /v1/openapi.json lists all there are")]
    NotFound,
    /// [`Code::UNKNOWN_JOB`]
    #[error("no job `{name}` here{}", served(.known))]
    UnknownJob {
        /// What was asked for.
        name: String,
        /// Jobs that anybody may join.
        known: Vec<String>,
    },
    /// [`Code::BAD_METHOD`]
    #[error("this page takes another method; see /v1/openapi.json")]
    BadMethod,
    /// [`Code::RANKS_MISSING`]
    #[error("{} of {world} ranks had not joined after {waited}: {}; start what is missing, or wait longer (--timeout)", .missing.len(), Ranks(.missing))]
    RanksMissing {
        /// The job's world.
        world: u32,
        /// For how long, in words.
        waited: String,
        /// Who.
        missing: Vec<u8>,
    },
    /// [`Code::RANKS_MISSING`]
    #[error(
        "all ranks are here, but {} of its parent {parent} had not joined after {waited}; start what is missing there or at other nodes, or wait longer (--timeout)",
        Ranks(.missing)
    )]
    NodesMissing {
        /// The parent, whose ranks may be nodes.
        parent: SocketAddr,
        /// For how long, in words.
        waited: String,
        /// Ranks of its job.
        missing: Vec<u8>,
    },
    /// [`Code::TOO_SLOW`]
    #[error("the body did not come within {0} seconds")]
    TooSlow(u64),
    /// [`Code::JOB_EXISTS`]
    #[error("job `{0}` exists; delete it first, or take another name")]
    JobExists(String),
    /// [`Code::NODE_FULL`]
    #[error(
        "this aggregator has {MAX_JOBS} jobs, as many as its tables hold; delete one (a deleted one is free after two seconds)"
    )]
    NodeFull,
    /// [`Code::MEMORY_FULL`]
    #[error(
        "{wanted} slots in a row are not free, at most {longest} are (of {free} free slots of {slot_bytes} bytes); lower `slots`, delete a job, or give the node more memory (--memory)"
    )]
    MemoryFull {
        /// Slots that were asked for.
        wanted: u32,
        /// Free slots.
        free: u32,
        /// Most in a row.
        longest: u32,
        /// The largest ring that would fit.
        fitting: u32,
        /// Bytes of one slot.
        slot_bytes: u32,
    },
    /// [`Code::NO_POOL`]
    #[error(
        "job `{0}` asks for shared memory, and this aggregator has no pool; start it with one (--pool 16MiB), or leave `memory` out"
    )]
    NoPool(String),
    /// [`Code::TOO_LONG`]
    #[error("chunks of job `{job}` have up to {lanes} lanes, and {limit} takes at most {fitting}; {advice}")]
    TooLong {
        /// The job.
        job: String,
        /// Its lanes.
        lanes: u32,
        /// Those that fit.
        fitting: u32,
        /// What limits them.
        limit: &'static str,
        /// What to do.
        advice: &'static str,
    },
    /// [`Code::DRAINING`]
    #[error("this aggregator is being drained and takes no new jobs or ranks; use another one")]
    Draining,
    /// [`Code::WORLD_MISMATCH`]
    #[error(
        "rank {rank} expects {theirs} ranks, but job `{job}` has {ours}; start all workers with --world {ours}"
    )]
    WorldMismatch {
        /// The job.
        job: String,
        /// The rank.
        rank: u32,
        /// Its number of ranks.
        theirs: u32,
        /// The job's.
        ours: u8,
    },
    /// [`Code::RANK_ELSEWHERE`]
    #[error(
        "rank {rank} of job `{job}` does not join here, but ranks {here} do; see at which aggregator it does"
    )]
    RankElsewhere {
        /// The job.
        job: String,
        /// The rank.
        rank: u32,
        /// Those that do.
        here: RankRange,
    },
    /// [`Code::NO_LEVELS`]
    #[error("job `{job}` {why}")]
    NoLevels {
        /// The job.
        job: String,
        /// What it cannot do, and what to do about it.
        why: &'static str,
    },
    /// [`Code::PARENT`]
    #[error("job `{job}`: its parent {parent} {why}")]
    Parent {
        /// The job.
        job: String,
        /// Where the parent is.
        parent: SocketAddr,
        /// What is wrong with it.
        why: String,
    },
    /// [`Code::RANK_TAKEN`]
    #[error("rank {rank} of job `{job}` waits already from {holder}; give each worker a rank of its own")]
    RankTaken {
        /// The job.
        job: String,
        /// The rank.
        rank: u8,
        /// Who waits.
        holder: IpAddr,
    },
    /// [`Code::LAYOUT_MISMATCH`]
    #[error(
        "rank {rank} of job `{job}` has tensors of other names, types or shapes, or another reduction, than rank {other}; all ranks must have the same"
    )]
    LayoutMismatch {
        /// The job.
        job: String,
        /// The rank.
        rank: u8,
        /// A rank that waits with another layout.
        other: u8,
    },
    /// [`Code::REPLACED`]
    #[error("rank {0} joined again from the same address; that wait goes on")]
    Replaced(u32),
    /// [`Code::NO_MEMBER`]
    #[error("generation {generation} of job `{job}` does not run, so rank {rank} has nothing to leave")]
    NoMember {
        /// The job.
        job: String,
        /// The rank.
        rank: u8,
        /// What it named.
        generation: u32,
    },
    /// [`Code::LEFT`]
    #[error("rank {0} left while it waited")]
    Left(u8),
    /// [`Code::SYNC_CHANGING`]
    #[error(
        "the last change of job `{job}` holds from chunk {from} on, and not every rank has all results before it; ask again when they have"
    )]
    SyncChanging {
        /// The job.
        job: String,
        /// The first chunk after the change.
        from: u32,
    },
    /// [`Code::UNSUPPORTED`]
    #[error("{0}")]
    Unsupported(&'static str),
    /// [`Code::JOB_DELETED`]
    #[error("job `{0}` was deleted")]
    JobDeleted(String),
    /// [`Code::TOO_LARGE`]
    #[error("the body has more than {0} bytes")]
    TooLarge(usize),
    /// [`Code::BAD_MEDIA_TYPE`]
    #[error("the body must be JSON: send it with `Content-Type: application/json`")]
    BadMediaType,
    /// [`Code::BAD_HOST`]
    #[error(
        "this server is not called `{0}`: ask for it by its address or as localhost, or start the aggregator with --allowed-host {0}"
    )]
    BadHost(String),
    /// [`Code::TABLES`]
    #[error("{0}")]
    Tables(String),
    /// [`Code::RANDOMNESS`]
    #[error("the kernel gave no randomness: {0}")]
    Randomness(String),
    /// [`Code::STOPPING`]
    #[error("the aggregator is stopping")]
    Stopping,
    /// [`Code::BUSY`]
    #[error("too many others are looking at this aggregator, or it has too little time to look; try again")]
    Overloaded,
}

/// The end of "no job here".
fn served(known: &[String]) -> String {
    if known.is_empty() { String::new() } else { format!("; anybody may join: {}", known.join(", ")) }
}

impl ControlError {
    /// The code.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            ControlError::BadRequest(_) => Code::BAD_REQUEST,
            ControlError::BadProtocol(_) => Code::BAD_PROTOCOL,
            ControlError::BadRank { .. } => Code::BAD_RANK,
            ControlError::BadWait => Code::BAD_WAIT,
            ControlError::BadJob(_) => Code::BAD_JOB,
            ControlError::TokenMissing(_) => Code::TOKEN_MISSING,
            ControlError::TokenWrong => Code::TOKEN_WRONG,
            ControlError::ManagementOff => Code::MANAGEMENT_OFF,
            ControlError::NotHere => Code::NOT_HERE,
            ControlError::ForeignAddress { .. } => Code::FOREIGN_ADDRESS,
            ControlError::NotFound => Code::NOT_FOUND,
            ControlError::UnknownJob { .. } => Code::UNKNOWN_JOB,
            ControlError::BadMethod => Code::BAD_METHOD,
            ControlError::RanksMissing { .. } | ControlError::NodesMissing { .. } => Code::RANKS_MISSING,
            ControlError::TooSlow(_) => Code::TOO_SLOW,
            ControlError::JobExists(_) => Code::JOB_EXISTS,
            ControlError::NodeFull => Code::NODE_FULL,
            ControlError::MemoryFull { .. } => Code::MEMORY_FULL,
            ControlError::NoPool(_) => Code::NO_POOL,
            ControlError::TooLong { .. } => Code::TOO_LONG,
            ControlError::Draining => Code::DRAINING,
            ControlError::WorldMismatch { .. } => Code::WORLD_MISMATCH,
            ControlError::RankElsewhere { .. } => Code::RANK_ELSEWHERE,
            ControlError::NoLevels { .. } => Code::NO_LEVELS,
            ControlError::Parent { .. } => Code::PARENT,
            ControlError::RankTaken { .. } => Code::RANK_TAKEN,
            ControlError::LayoutMismatch { .. } => Code::LAYOUT_MISMATCH,
            ControlError::Replaced(_) => Code::REPLACED,
            ControlError::NoMember { .. } => Code::NO_MEMBER,
            ControlError::Left(_) => Code::LEFT,
            ControlError::SyncChanging { .. } => Code::SYNC_CHANGING,
            ControlError::Unsupported(_) => Code::UNSUPPORTED,
            ControlError::JobDeleted(_) => Code::JOB_DELETED,
            ControlError::TooLarge(_) => Code::TOO_LARGE,
            ControlError::BadMediaType => Code::BAD_MEDIA_TYPE,
            ControlError::BadHost(_) => Code::BAD_HOST,
            ControlError::Tables(_) => Code::TABLES,
            ControlError::Randomness(_) => Code::RANDOMNESS,
            ControlError::Stopping => Code::STOPPING,
            ControlError::Overloaded => Code::BUSY,
        }
    }

    /// Ranks of the job here that had not joined.
    #[must_use]
    pub fn missing_ranks(&self) -> &[u8] {
        match self {
            ControlError::RanksMissing { missing, .. } => missing,
            _ => &[],
        }
    }

    /// The largest ring that would fit.
    #[must_use]
    pub const fn fitting_slots(&self) -> Option<u32> {
        match self {
            ControlError::MemoryFull { fitting, .. } => Some(*fitting),
            _ => None,
        }
    }
}

impl From<ConfigError> for ControlError {
    fn from(error: ConfigError) -> ControlError {
        ControlError::BadJob(error.to_string())
    }
}

const _: () = assert!(MAX_RANKS == 64 && MAX_JOBS == 64, "docs/openapi limits name these numbers");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_names_of_their_own() {
        let mut names: Vec<&str> = Code::ALL.iter().map(|code| code.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Code::ALL.len());
        assert!(names.iter().all(|name| name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')));
        assert!(
            Code::ALL.iter().all(|code| code.status().is_client_error() || code.status().is_server_error())
        );
    }

    /// `docs/jobs.md` lists every code with its status, and no other.
    #[test]
    fn the_documentation_lists_all_codes() {
        let page = include_str!("../../../docs/jobs.md");
        let rows: Vec<(u16, &str)> = page
            .lines()
            .filter_map(|line| {
                let mut cells = line.strip_prefix("| ")?.split(" | ");
                let status = cells.next()?.parse().ok()?;
                Some((status, cells.next()?.trim_matches('`')))
            })
            .collect();
        let codes: Vec<(u16, &str)> = Code::ALL.iter().map(|c| (c.status().as_u16(), c.name())).collect();
        assert_eq!(rows, codes);
    }
}
