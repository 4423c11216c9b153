//! What jobs an aggregator serves: from a TOML file, the command line or both, checked before anything is loaded.

use std::path::{Path, PathBuf};

use paatp_common::limits::{
    BLOCK_BYTES, LANES_PER_BLOCK, MAX_JOBS, MAX_RANKS, MAX_RING_SLOTS, STANDARD_BLOCKS, WIDE_BLOCKS,
};
use paatp_common::slot::Slot;
use serde::Deserialize;
use thiserror::Error;

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
/// Largest configuration file, in bytes: 64 jobs need a few KiB.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// One job, as asked for.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobConfig {
    /// Its name, `[a-z0-9._-]{1,64}`.
    pub name: String,
    /// Number of ranks.
    pub world: u32,
    /// Most lanes of a chunk.
    #[serde(default = "default_lanes")]
    pub lanes: u32,
    /// Slots of the ring, a power of two.
    #[serde(default = "default_slots")]
    pub slots: u32,
    /// Window in chunks.
    #[serde(default = "default_window")]
    pub window: u32,
    /// Contributions that complete a chunk; all ranks' if absent.
    pub quorum: Option<u32>,
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

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    job: Vec<JobConfig>,
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
    /// No job at all.
    #[error("no job to serve; add --job NAME --world N, or --config FILE.toml with a [[job]] table")]
    NoJob,
    /// More jobs than the tables hold.
    #[error(
        "{0} jobs, and one aggregator serves at most {MAX_JOBS}; run another on another interface or port"
    )]
    TooManyJobs(usize),
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

/// Jobs that passed every check, in the order of their numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Jobs {
    list: Vec<JobConfig>,
    size: SlotSize,
}

impl Jobs {
    /// Checks jobs one by one and together.
    ///
    /// # Errors
    /// The first value that is not allowed.
    pub fn new(list: Vec<JobConfig>) -> Result<Jobs, ConfigError> {
        if list.is_empty() {
            return Err(ConfigError::NoJob);
        }
        if list.len() > MAX_JOBS {
            return Err(ConfigError::TooManyJobs(list.len()));
        }
        for (index, job) in list.iter().enumerate() {
            check(job)?;
            if list.iter().take(index).any(|other| other.name == job.name) {
                return Err(ConfigError::Twice(job.name.clone()));
            }
        }
        let wide = list.iter().any(|job| job.lanes > SlotSize::Standard.lanes());
        let jobs = Jobs { list, size: if wide { SlotSize::Wide } else { SlotSize::Standard } };
        if jobs.slot_memory() > MAX_SLOT_MEMORY {
            return Err(ConfigError::Memory {
                slots: jobs.slots(),
                slot_bytes: jobs.size.bytes(),
                mib: jobs.slot_memory() >> 20,
            });
        }
        Ok(jobs)
    }

    /// The jobs; a job's number is its index.
    #[must_use]
    pub fn list(&self) -> &[JobConfig] {
        &self.list
    }

    /// The slot size that holds the largest chunk.
    #[must_use]
    pub const fn slot_size(&self) -> SlotSize {
        self.size
    }

    /// Slots of all jobs.
    #[must_use]
    pub fn slots(&self) -> u64 {
        self.list.iter().map(|job| u64::from(job.slots)).sum()
    }

    /// Bytes of all slots in the kernel.
    #[must_use]
    pub fn slot_memory(&self) -> u64 {
        self.slots() * self.size.bytes() as u64
    }

    /// Most lanes of any job's chunks.
    #[must_use]
    pub fn largest_lanes(&self) -> u32 {
        self.list.iter().map(|job| job.lanes).max().unwrap_or(0)
    }
}

/// Reads the jobs of a file.
///
/// # Errors
/// If it cannot be read or is not of the right shape; values are checked by [`Jobs::new`].
pub fn read(path: &Path) -> Result<Vec<JobConfig>, ConfigError> {
    let unreadable = |source| ConfigError::Read { path: path.into(), source };
    let length = std::fs::metadata(path).map_err(unreadable)?.len();
    if length > MAX_FILE_BYTES {
        return Err(ConfigError::Syntax {
            path: path.into(),
            message: format!("{length} bytes are more than a configuration has ({MAX_FILE_BYTES} at most)"),
        });
    }
    parse(path, &std::fs::read_to_string(path).map_err(unreadable)?)
}

fn parse(path: &Path, text: &str) -> Result<Vec<JobConfig>, ConfigError> {
    toml::from_str::<File>(text).map(|file| file.job).map_err(|error| {
        let mut message = error.to_string().trim_end().to_owned();
        if let Some(hint) = nearest_key(&message) {
            message.push_str(&format!("\ndid you mean `{hint}`?"));
        }
        ConfigError::Syntax { path: path.into(), message }
    })
}

/// Keys of the file, for hints.
const KEYS: [&str; 7] = ["job", "name", "world", "lanes", "slots", "window", "quorum"];

/// Largest number of changed letters in which a mistyped key is still recognised.
const MAX_TYPING_ERRORS: usize = 2;

/// The key that the one in "unknown field `…`" was perhaps meant to be.
fn nearest_key(message: &str) -> Option<&'static str> {
    let wrong = message.split("unknown field `").nth(1)?.split('`').next()?;
    KEYS.iter()
        .map(|key| (edit_distance(wrong, key), *key))
        .filter(|(distance, _)| *distance <= MAX_TYPING_ERRORS)
        .min()
        .map(|(_, key)| key)
}

/// Levenshtein's distance.
fn edit_distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        for (y, cell) in b.bytes().zip(row.iter_mut().skip(1)) {
            let substituted = diagonal + usize::from(x != y);
            diagonal = *cell;
            left = substituted.min(left + 1).min(diagonal + 1);
            *cell = left;
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().unwrap_or(0)
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
    match job.quorum {
        Some(quorum) if quorum == 0 || quorum > job.world => refuse(
            "quorum",
            quorum.to_string(),
            format!("1 to {} ranks are; leave it out for all ranks", job.world),
        ),
        _ => Ok(()),
    }
}

/// A job may be called so.
#[must_use]
pub fn is_name(name: &str) -> bool {
    (1..=MAX_NAME_BYTES).contains(&name.len())
        && name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(name: &str) -> JobConfig {
        JobConfig { name: name.into(), world: 4, lanes: 352, slots: 256, window: 64, quorum: None }
    }

    fn refusal(change: impl FnOnce(&mut JobConfig)) -> String {
        let mut changed = job("train");
        change(&mut changed);
        match Jobs::new(vec![changed]) {
            Ok(_) => "accepted".into(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn each_value_is_checked_and_named() {
        let cases: [(String, [&str; 3]); 11] = [
            (refusal(|job| job.name = "Train".into()), ["name", "Train", "a-z"]),
            (refusal(|job| job.name = "x".repeat(65)), ["name", "xxx", "64"]),
            (refusal(|job| job.name = String::new()), ["name", "``", "1 to 64"]),
            (refusal(|job| job.world = 0), ["world", "0", "1 to 64"]),
            (refusal(|job| job.world = 65), ["world", "65", "1 to 64"]),
            (refusal(|job| job.lanes = 100), ["lanes", "100", "multiples of 32"]),
            (refusal(|job| job.lanes = 864), ["lanes", "864", "832"]),
            (refusal(|job| job.slots = 64), ["slots", "64", "from 128"]),
            (refusal(|job| job.slots = 300), ["slots", "300", "powers of two"]),
            (refusal(|job| job.window = 0), ["window", "0", "65535"]),
            (refusal(|job| job.quorum = Some(5)), ["quorum", "5", "1 to 4"]),
        ];
        for (message, parts) in cases {
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
    }

    #[test]
    fn jobs_are_checked_together() {
        assert!(matches!(Jobs::new(vec![]), Err(ConfigError::NoJob)));
        assert!(matches!(Jobs::new(vec![job("a"), job("a")]), Err(ConfigError::Twice(name)) if name == "a"));
        let many = (0..65).map(|i| job(&format!("j{i}"))).collect();
        assert!(matches!(Jobs::new(many), Err(ConfigError::TooManyJobs(65))));
        let big = |i: usize| JobConfig { slots: MAX_RING_SLOTS, ..job(&format!("j{i}")) };
        assert!(matches!(Jobs::new((0..6).map(big).collect()), Err(ConfigError::Memory { .. })));
    }

    #[test]
    fn the_largest_chunk_chooses_the_slots() {
        let size = |lanes| Jobs::new(vec![job("a"), JobConfig { lanes, ..job("b") }]).map(|j| j.slot_size());
        assert!(matches!(size(352), Ok(SlotSize::Standard)));
        assert!(matches!(size(384), Ok(SlotSize::Wide)));
        assert_eq!((SlotSize::Standard.bytes(), SlotSize::Wide.bytes()), (64 + 1408, 64 + 3328));
    }

    #[test]
    fn files_have_defaults_and_no_unknown_keys() {
        let path = Path::new("jobs.toml");
        let parsed = parse(path, "[[job]]\nname = \"train\"\nworld = 4\n").unwrap_or_default();
        assert_eq!(parsed, vec![job("train")]);
        let error = parse(path, "[[job]]\nname = \"train\"\nworlds = 4\n").map_err(|e| e.to_string());
        let message = error.err().unwrap_or_default();
        assert!(message.contains("worlds") && message.contains("did you mean `world`?"), "{message}");
        assert!(message.contains("line 3"), "{message}");
        assert!(parse(path, "[[job]]\nname = \"a\"\nworld = -1\n").is_err());
        assert!(parse(path, "").is_ok_and(|jobs| jobs.is_empty()));
    }

    #[test]
    fn missing_files_are_named() {
        let error = read(Path::new("/nonexistent/x.toml")).map_err(|e| e.to_string());
        assert!(error.is_err_and(|message| message.contains("/nonexistent/x.toml")));
    }

    #[test]
    fn distances() {
        assert_eq!(edit_distance("kitten", "sitting"), 3);
        assert_eq!(edit_distance("", "abc"), 3);
        assert_eq!(edit_distance("lanes", "lanes"), 0);
    }
}
