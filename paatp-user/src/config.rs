//! What an aggregator serves: its jobs and its node, from a TOML file, the command line or both, checked before anything
//! is loaded. A job that comes over the control API has the same shape and passes the same checks.

mod file;
mod ranks;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use paatp_common::limits::{
    BLOCK_BYTES, LANES_PER_BLOCK, MAX_JOBS, MAX_RANKS, MAX_RING_SLOTS, STANDARD_BLOCKS, WIDE_BLOCKS,
};
use paatp_common::pool::K_MAX;
use paatp_common::slot::Slot;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use utoipa::ToSchema;

use crate::control::DEFAULT_PORT;
use crate::control::listen::parse_address;
use crate::engine::DEFAULT_BPFFS;

pub use file::{Entry, File, nearest, read};
pub use ranks::RankRange;

/// Lanes of a chunk unless told otherwise: the most that fit an MTU of 1500 bytes over IPv4.
pub const DEFAULT_LANES: u16 = (STANDARD_BLOCKS * LANES_PER_BLOCK) as u16;
/// Slots of a ring unless told otherwise.
pub const DEFAULT_SLOTS: u32 = 256;
/// Window in chunks unless told otherwise.
pub const DEFAULT_WINDOW: u16 = 64;
/// Longest job name, in bytes: it goes into URLs and tables.
pub const MAX_NAME_BYTES: usize = 64;
/// Most slots' memory of one node, in bytes: 8 GiB. More is a typing error on today's machines.
pub const MAX_SLOT_MEMORY: u64 = 8 << 30;
/// Slots' memory of a node unless told otherwise, in bytes: 64 MiB are 45,590 standard slots, 178 rings of the default
/// length.
pub const DEFAULT_MEMORY: u64 = 64 << 20;
/// Longest silence that a job may allow its ranks, in seconds: a day. More is a typing error.
pub const MAX_TIMEOUT_SECONDS: f64 = 86_400.0;
/// Shortest such silence, in seconds: progress is looked at four times a second, and a retransmission may take as long.
pub const MIN_TIMEOUT_SECONDS: f64 = 1.0;

/// Who may join a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Whoever reaches the control port.
    Open,
    /// Whoever shows the job's key or the node's token.
    Token,
}

/// What happens when a rank holds the others up for longer than the job's timeout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FailurePolicy {
    /// The generation ends for all ranks.
    #[default]
    Abort,
    /// The others go on without it.
    Shrink,
}

/// Where a job's slots come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MemoryKind {
    /// A ring of its own.
    #[default]
    Reserved,
    /// The node's pool, and one slot of its own.
    Shared,
}

/// One job, as asked for: a `[[job]]` table of the configuration file, or the body of `POST /v1/jobs`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct JobConfig {
    /// Its name, `[a-z0-9._-]{1,64}`.
    #[schema(pattern = "^[a-z0-9._-]{1,64}$")]
    pub name: String,
    /// Number of ranks.
    #[schema(minimum = 1, maximum = 64)]
    pub world: u32,
    /// Most lanes of a chunk, a multiple of 32.
    #[serde(default = "default_lanes")]
    #[schema(minimum = 32, maximum = 832, multiple_of = 32)]
    pub lanes: u32,
    /// Slots of the ring, a power of two, at least twice the window. With shared memory how many chunks may be open.
    #[serde(default = "default_slots")]
    #[schema(minimum = 2, maximum = 1048576)]
    pub slots: u32,
    /// Window in chunks.
    #[serde(default = "default_window")]
    #[schema(minimum = 1, maximum = 65535)]
    pub window: u32,
    /// Contributions that complete a chunk; all ranks' if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 64)]
    pub quorum: Option<u32>,
    /// Who may join. Unless told otherwise `open` for jobs of the command line and of files, `token` for those of the API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access: Option<Access>,
    /// Longest time that a rank may hold the others up, in seconds; for ever if absent. Files may write `timeout = "20s"`.
    #[serde(default, alias = "timeout", skip_serializing_if = "Option::is_none")]
    #[serde(deserialize_with = "file::seconds")]
    #[schema(minimum = 1, maximum = 86400)]
    pub timeout_seconds: Option<f64>,
    /// What happens then.
    #[serde(default)]
    pub on_failure: FailurePolicy,
    /// Where its slots come from.
    #[serde(default)]
    pub memory: MemoryKind,
    /// Aggregator that the sums of this one's ranks go to, `ADDRESS` or `ADDRESS:PORT`. It has a job of this name with the
    /// same ranks, lanes, slots and window.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// With a parent: the ranks that join here, `FIRST-LAST`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, pattern = "^[0-9]{1,2}-[0-9]{1,2}$")]
    pub ranks: Option<RankRange>,
    /// With a parent, instead of `ranks`: the rank of the parent's job that all ranks of this one are together. So a job
    /// has up to 64 ranks on each of up to 64 nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 63)]
    pub child: Option<u32>,
}

impl JobConfig {
    /// A job with the defaults.
    #[must_use]
    pub fn new(name: &str, world: u32) -> JobConfig {
        JobConfig {
            name: name.into(),
            world,
            lanes: default_lanes(),
            slots: default_slots(),
            window: default_window(),
            quorum: None,
            access: None,
            timeout_seconds: None,
            on_failure: FailurePolicy::Abort,
            memory: MemoryKind::Reserved,
            parent: None,
            ranks: None,
            child: None,
        }
    }

    /// With a parent: the ranks that join here.
    #[must_use]
    pub fn ranks_here(&self) -> Option<RankRange> {
        match self.child {
            Some(_) => RankRange::first_of(self.world),
            None => self.ranks,
        }
    }

    /// The control address of its parent, if it has one that can be read.
    #[must_use]
    pub fn parent_address(&self) -> Option<SocketAddr> {
        self.parent.as_deref().and_then(|parent| parse_address(parent, DEFAULT_PORT).ok())
    }

    /// Slots that belong to it alone: of a job in the pool the one for the chunk that everybody waits for.
    #[must_use]
    pub const fn own_slots(&self) -> u32 {
        match self.memory {
            MemoryKind::Reserved => self.slots,
            MemoryKind::Shared => 1,
        }
    }

    /// Checks the values one by one.
    ///
    /// # Errors
    /// The first that is not allowed.
    pub fn check(&self) -> Result<(), ConfigError> {
        check(self)
    }
}

const fn default_lanes() -> u32 {
    DEFAULT_LANES as u32
}
const fn default_slots() -> u32 {
    DEFAULT_SLOTS
}
const fn default_window() -> u32 {
    DEFAULT_WINDOW as u32
}

/// What the node's settings say, wherever they stand (see [`crate::settings`]).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeConfig {
    /// Memory of all slots, in bytes.
    pub memory: Option<u64>,
    /// Of it, memory of the pool that jobs with `memory = "shared"` share.
    pub pool: Option<u64>,
    /// Places in the pool that each chunk may take; if absent, the aggregator tunes each job's.
    pub pool_places: Option<u8>,
    /// Longest chunk that jobs may ask for, in lanes.
    pub lanes: Option<u32>,
    /// File with the token for changes.
    pub token_file: Option<PathBuf>,
    /// Address to manage jobs at, besides loopback.
    pub control: Option<String>,
    /// Names under which the control server may be asked without TLS.
    pub allowed_hosts: Vec<String>,
    /// File with the control server's certificate chain.
    pub tls_certificate: Option<PathBuf>,
    /// File with its key.
    pub tls_key: Option<PathBuf>,
    /// BPF file system to pin tables and program in, or `none`.
    pub pin_dir: Option<PathBuf>,
    /// Folder for what a restart needs to know.
    pub state_dir: Option<PathBuf>,
    /// Folder for the lock of the interface.
    pub runtime_dir: Option<PathBuf>,
    /// Leave program and tables in force at the end.
    pub keep_attached: bool,
    /// Take sums of lower nodes, and let jobs have parents.
    pub levels: bool,
}

/// Says that nothing is to be pinned.
pub const NO_PINS: &str = "none";
/// Where the state of jobs is kept unless told otherwise.
pub const DEFAULT_STATE_DIR: &str = "/var/lib/paatp";
/// Where locks are unless told otherwise.
pub const DEFAULT_RUNTIME_DIR: &str = "/run/paatp";

/// The BPF file system that `--pin-dir` means, if it means any.
#[must_use]
pub fn bpffs_of(pin_dir: Option<&Path>) -> Option<&Path> {
    let path = pin_dir.unwrap_or(Path::new(DEFAULT_BPFFS));
    (path != Path::new(NO_PINS) && !path.as_os_str().is_empty()).then_some(path)
}

impl NodeConfig {
    /// The BPF file system to pin in, if anything is to be pinned.
    #[must_use]
    pub fn bpffs(&self) -> Option<&Path> {
        bpffs_of(self.pin_dir.as_deref())
    }

    /// The folder for state files.
    #[must_use]
    pub fn state(&self) -> &Path {
        self.state_dir.as_deref().unwrap_or(Path::new(DEFAULT_STATE_DIR))
    }

    /// The folder for locks.
    #[must_use]
    pub fn runtime(&self) -> &Path {
        self.runtime_dir.as_deref().unwrap_or(Path::new(DEFAULT_RUNTIME_DIR))
    }
}

/// Which of the object's programs and slot tables serves the jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotSize {
    /// 352 lanes.
    Standard,
    /// 832 lanes.
    Wide,
}

impl SlotSize {
    /// Most lanes of a chunk.
    #[must_use]
    pub const fn lanes(self) -> u32 {
        (self.blocks() * LANES_PER_BLOCK) as u32
    }

    /// Bytes of one slot in the kernel.
    #[must_use]
    pub const fn bytes(self) -> usize {
        size_of::<Slot>() + self.blocks() * BLOCK_BYTES
    }

    const fn blocks(self) -> usize {
        match self {
            SlotSize::Standard => STANDARD_BLOCKS,
            SlotSize::Wide => WIDE_BLOCKS,
        }
    }
}

/// A configuration cannot be used.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {path}; check path and permissions")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The file is no TOML of the right shape.
    #[error("{path}: {message}")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What the parser says, with line and column.
        message: String,
    },
    /// A key that `[node]` does not have.
    #[error("{path}:{line}: [node] has no key `{key}`{hint}")]
    UnknownKey {
        /// The file.
        path: PathBuf,
        /// Where it stands.
        line: usize,
        /// The key.
        key: String,
        /// What it was perhaps meant to be.
        hint: String,
    },
    /// A value of `[node]` that its option does not take.
    #[error("{path}:{line}: {key}: {message}")]
    BadSetting {
        /// The file.
        path: PathBuf,
        /// Where it stands.
        line: usize,
        /// The key.
        key: String,
        /// Why.
        message: String,
    },
    /// A job of the file.
    #[error("{path}:{line}: {source}")]
    InFile {
        /// The file.
        path: PathBuf,
        /// Where the job's table begins.
        line: usize,
        /// What is wrong with it; told by this message.
        #[source]
        source: Box<ConfigError>,
    },
    /// A value is out of its range.
    #[error("job `{job}`: {key} = {value} is not allowed; {allowed}")]
    Value {
        /// The job's name.
        job: String,
        /// The key.
        key: &'static str,
        /// What it was.
        value: String,
        /// What it may be.
        allowed: String,
    },
    /// Two jobs have one name.
    #[error("job `{0}` is defined twice; give each job a name of its own")]
    Twice(String),
    /// No job, and no memory for any.
    #[error("no job to serve and no memory for any; add --job NAME --world N, or memory (--memory 64MiB)")]
    NoJob,
    /// More jobs than the tables hold.
    #[error(
        "{0} jobs, and one aggregator serves at most {MAX_JOBS}; run another on another interface or port"
    )]
    TooManyJobs(usize),
    /// The node's longest chunk.
    #[error("[node] lanes = {0} is not allowed; up to {most} are", most = SlotSize::Wide.lanes())]
    NodeLanes(u32),
    /// The jobs do not fit the memory that was allowed.
    #[error(
        "pool and jobs need {slots} slots of {slot_bytes} bytes, {} bytes, but the node may use {memory}; lower `slots` or the pool, or raise the memory (--memory)",
        .slots * *slot_bytes as u64
    )]
    Budget {
        /// Slots of the pool and of all jobs.
        slots: u64,
        /// Bytes of one.
        slot_bytes: usize,
        /// What is allowed, in bytes.
        memory: u64,
    },
    /// The pool holds no slot.
    #[error("a pool of {pool} bytes holds no slot of {slot_bytes} bytes; give it more (--pool 16MiB)")]
    SmallPool {
        /// What it has, in bytes.
        pool: u64,
        /// Bytes of a slot.
        slot_bytes: usize,
    },
    /// Places in the pool.
    #[error("[node] pool_places = {0} is not allowed; 1 to {K_MAX} are")]
    PoolPlaces(u8),
    /// A job shares what the node does not have.
    #[error(
        "job `{0}` has memory = \"shared\", and the node has no pool; give it one (--pool 16MiB), or leave `memory` out"
    )]
    NoPool(String),
    /// A memory size cannot be read.
    #[error("`{0}` is no size; write for example 64MiB, 1GiB or a number of bytes")]
    Size(String),
    /// All slots together need too much memory.
    #[error(
        "the jobs' {slots} slots of {slot_bytes} bytes need {mib} MiB, and at most {} MiB are allowed; lower `slots`",
        MAX_SLOT_MEMORY >> 20
    )]
    Memory {
        /// Slots of all jobs.
        slots: u64,
        /// Bytes of one.
        slot_bytes: usize,
        /// All together.
        mib: u64,
    },
}

/// Jobs that passed every check, in the order of their numbers, and the table that holds their slots.
#[derive(Clone, Debug, PartialEq)]
pub struct Jobs {
    list: Vec<JobConfig>,
    size: SlotSize,
    slots: u64,
    pool_slots: u32,
    pool_places: Option<u8>,
    levels: bool,
}

impl Jobs {
    /// Checks jobs one by one and together; the table has as many slots as they need.
    ///
    /// # Errors
    /// The first value that is not allowed.
    pub fn new(list: Vec<JobConfig>) -> Result<Jobs, ConfigError> {
        Jobs::with_memory(list, Some(0), None)
    }

    /// The same with `memory` bytes of slots, so that jobs can be added later, of up to `lanes` lanes. Without `memory`
    /// there are [`DEFAULT_MEMORY`], or what the jobs need if that is more.
    ///
    /// # Errors
    /// The first value that is not allowed.
    pub fn with_memory(
        list: Vec<JobConfig>,
        memory: Option<u64>,
        lanes: Option<u32>,
    ) -> Result<Jobs, ConfigError> {
        Jobs::of_node(list, &NodeConfig { memory, lanes, ..NodeConfig::default() })
    }

    /// The same on a node that may have a pool, which is part of its memory.
    ///
    /// # Errors
    /// The first value that is not allowed.
    pub fn of_node(list: Vec<JobConfig>, node: &NodeConfig) -> Result<Jobs, ConfigError> {
        let (memory, lanes) = (node.memory, node.lanes);
        if list.len() > MAX_JOBS {
            return Err(ConfigError::TooManyJobs(list.len()));
        }
        for (index, job) in list.iter().enumerate() {
            check(job)?;
            if list.iter().take(index).any(|other| other.name == job.name) {
                return Err(ConfigError::Twice(job.name.clone()));
            }
        }
        if let Some(lanes) = lanes.filter(|lanes| *lanes == 0 || *lanes > SlotSize::Wide.lanes()) {
            return Err(ConfigError::NodeLanes(lanes));
        }
        let longest = list.iter().map(|job| job.lanes).chain(lanes).max().unwrap_or(0);
        let size = if longest > SlotSize::Standard.lanes() { SlotSize::Wide } else { SlotSize::Standard };
        let pool_slots = pool_slots(node.pool, size.bytes())?;
        if let Some(places) = node.pool_places.filter(|places| !(1..=K_MAX).contains(places)) {
            return Err(ConfigError::PoolPlaces(places));
        }
        if let Some(job) = list.iter().find(|job| job.memory == MemoryKind::Shared && pool_slots == 0) {
            return Err(ConfigError::NoPool(job.name.clone()));
        }
        let own: u64 = list.iter().map(|job| u64::from(job.own_slots())).sum();
        let needed = own + u64::from(pool_slots);
        let bytes = memory.unwrap_or(DEFAULT_MEMORY);
        let slots = needed.max(bytes / size.bytes() as u64);
        if memory.is_some_and(|memory| memory > 0 && needed * size.bytes() as u64 > memory) {
            return Err(ConfigError::Budget { slots: needed, slot_bytes: size.bytes(), memory: bytes });
        }
        let levels = node.levels || list.iter().any(|job| job.parent.is_some());
        let jobs = Jobs { list, size, slots, pool_slots, pool_places: node.pool_places, levels };
        if jobs.slot_memory() > MAX_SLOT_MEMORY {
            return Err(ConfigError::Memory {
                slots,
                slot_bytes: size.bytes(),
                mib: jobs.slot_memory() >> 20,
            });
        }
        if slots == 0 {
            return Err(ConfigError::NoJob);
        }
        Ok(jobs)
    }

    /// With the table that is there already, whatever these jobs would need.
    #[must_use]
    pub fn with_table(mut self, size: SlotSize, slots: u32, pool_slots: u32) -> Jobs {
        (self.size, self.slots, self.pool_slots) = (size, slots.into(), pool_slots);
        self
    }

    /// The jobs; a job's number is its index.
    #[must_use]
    pub fn list(&self) -> &[JobConfig] {
        &self.list
    }

    /// Sums of lower nodes are taken, and jobs may have parents.
    #[must_use]
    pub const fn levels(&self) -> bool {
        self.levels
    }

    /// The slot size that holds the largest chunk.
    #[must_use]
    pub const fn slot_size(&self) -> SlotSize {
        self.size
    }

    /// Slots of the pool, the first of the table: a power of two, or 0 without one.
    #[must_use]
    pub const fn pool_slots(&self) -> u32 {
        self.pool_slots
    }

    /// Places in the pool that each chunk may take, where they are not tuned.
    #[must_use]
    pub const fn pool_places(&self) -> Option<u8> {
        self.pool_places
    }

    /// Slots of the table: the pool's, those of all jobs, and free ones.
    #[must_use]
    pub const fn slots(&self) -> u64 {
        self.slots
    }

    /// Bytes of all slots in the kernel.
    #[must_use]
    pub const fn slot_memory(&self) -> u64 {
        self.slots * self.size.bytes() as u64
    }

    /// Most lanes of any job's chunks.
    #[must_use]
    pub fn largest_lanes(&self) -> u32 {
        self.list.iter().map(|job| job.lanes).max().unwrap_or(0)
    }
}

/// Slots that fit a pool of so many bytes: a power of two, so that a hash is brought into it by a mask.
fn pool_slots(bytes: Option<u64>, slot_bytes: usize) -> Result<u32, ConfigError> {
    let Some(pool) = bytes.filter(|bytes| *bytes > 0) else { return Ok(0) };
    let slots = (pool.min(MAX_SLOT_MEMORY) / slot_bytes as u64).checked_ilog2().map(|bits| 1 << bits);
    slots.ok_or(ConfigError::SmallPool { pool, slot_bytes })
}

/// Reads a size: bytes, or a number with one of the units KiB, MiB, GiB.
///
/// # Errors
/// If it is none.
pub fn parse_size(text: &str) -> Result<u64, ConfigError> {
    const UNITS: [(&str, u64); 3] = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];
    let (number, unit) = UNITS
        .iter()
        .find_map(|(name, unit)| text.strip_suffix(name).map(|number| (number.trim_end(), *unit)))
        .unwrap_or((text, 1));
    let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    bytes.ok_or_else(|| ConfigError::Size(text.into()))
}

/// Checks the values of one job.
fn check(job: &JobConfig) -> Result<(), ConfigError> {
    let refuse = |key: &'static str, value: String, allowed: String| {
        Err(ConfigError::Value { job: job.name.clone(), key, value, allowed })
    };
    if !is_name(&job.name) {
        let allowed = format!("1 to {MAX_NAME_BYTES} characters of a-z 0-9 . _ - are");
        return refuse("name", format!("`{}`", job.name.escape_default()), allowed);
    }
    if !(1..=MAX_RANKS as u32).contains(&job.world) {
        return refuse("world", job.world.to_string(), format!("1 to {MAX_RANKS} ranks are"));
    }
    let block = LANES_PER_BLOCK as u32;
    if job.lanes == 0 || !job.lanes.is_multiple_of(block) || job.lanes > SlotSize::Wide.lanes() {
        let allowed = format!(
            "multiples of {block} up to {} are (up to {} for an MTU of 1500)",
            SlotSize::Wide.lanes(),
            SlotSize::Standard.lanes()
        );
        return refuse("lanes", job.lanes.to_string(), allowed);
    }
    // The window is checked first: the lower limit of `slots` depends on it.
    if job.window == 0 || job.window > u32::from(u16::MAX) {
        return refuse("window", job.window.to_string(), format!("1 to {} chunks are", u16::MAX));
    }
    if !job.slots.is_power_of_two() || job.slots > MAX_RING_SLOTS || job.slots < 2 * job.window {
        let allowed = format!(
            "powers of two from {} (twice the window of {}) to {MAX_RING_SLOTS} are",
            (2 * job.window).next_power_of_two(),
            job.window
        );
        return refuse("slots", job.slots.to_string(), allowed);
    }
    if let Some(seconds) = job.timeout_seconds
        && !(MIN_TIMEOUT_SECONDS..=MAX_TIMEOUT_SECONDS).contains(&seconds)
    {
        let allowed =
            format!("{MIN_TIMEOUT_SECONDS} to {MAX_TIMEOUT_SECONDS} seconds are; leave it out for none");
        return refuse("timeout_seconds", seconds.to_string(), allowed);
    }
    match job.quorum {
        Some(quorum) if quorum == 0 || quorum > job.world => refuse(
            "quorum",
            quorum.to_string(),
            format!("1 to {} ranks are; leave it out for all ranks", job.world),
        ),
        _ => check_parent(job, refuse),
    }
}

/// A job that goes up: what the root decides must not be decided here as well.
fn check_parent(
    job: &JobConfig,
    refuse: impl Fn(&'static str, String, String) -> Result<(), ConfigError>,
) -> Result<(), ConfigError> {
    if let Some(child) = job.child {
        if job.parent.is_none() || job.ranks.is_some() {
            let allowed = "it says which rank of its parent's job this node is, instead of `ranks`".into();
            return refuse("child", child.to_string(), allowed);
        }
        if child >= MAX_RANKS as u32 {
            return refuse("child", child.to_string(), format!("ranks up to {} are", MAX_RANKS - 1));
        }
    }
    let (parent, ranks) = match (&job.parent, job.ranks_here()) {
        (None, None) => return Ok(()),
        (Some(parent), Some(ranks)) => (parent, ranks),
        (None, Some(ranks)) => {
            let allowed = "it belongs to a job with a parent, whose other ranks join elsewhere".into();
            return refuse("ranks", ranks.to_string(), allowed);
        }
        (Some(parent), None) => {
            let allowed = "say as well which ranks join here (ranks = \"0-3\"), or which rank this node is there (child = 0)".into();
            return refuse("parent", parent.clone(), allowed);
        }
    };
    if job.parent_address().is_none() {
        let allowed = "an IP address of another aggregator is, with or without a port".into();
        return refuse("parent", parent.clone(), allowed);
    }
    if u32::from(ranks.last()) >= job.world {
        return refuse("ranks", ranks.to_string(), format!("ranks up to {} are", job.world - 1));
    }
    if job.memory == MemoryKind::Shared {
        let allowed = "a job with a parent needs a ring of its own (leave `memory` out)".into();
        return refuse("memory", "shared".into(), allowed);
    }
    if let Some(quorum) = job.quorum {
        let allowed = "the root decides how many ranks are enough; leave it out here".into();
        return refuse("quorum", quorum.to_string(), allowed);
    }
    if let Some(seconds) = job.timeout_seconds {
        let allowed = "the root decides who holds the others up; leave it out here".into();
        return refuse("timeout_seconds", seconds.to_string(), allowed);
    }
    Ok(())
}

/// A job may be called so.
#[must_use]
pub fn is_name(name: &str) -> bool {
    (1..=MAX_NAME_BYTES).contains(&name.len())
        && name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-'))
}

#[cfg(test)]
mod tests;
