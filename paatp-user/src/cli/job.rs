//! The command line of `paatp job`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

use crate::config::{Access, DEFAULT_LANES, DEFAULT_SLOTS, DEFAULT_WINDOW, FailurePolicy, RankRange};
use crate::duration;

use super::Credentials;

/// After the options of `paatp job`.
pub(super) const AFTER_JOB: &str = "\
Run it on the aggregator's machine, as a user who may read the token file, or name both with --control and --token-file.

Example:
  paatp job create train --world 4 --key-file train.key
  paatp job show train
  paatp job delete train

Exit status: 0 done, 1 it failed (standard error says why and what to do), 2 it was called wrongly.";

/// `paatp job`
#[derive(Debug, Args)]
pub struct Job {
    /// What to do.
    #[command(subcommand)]
    pub action: JobAction,
    /// Address of the aggregator's control server.
    #[arg(
        long,
        global = true,
        value_name = "ADDR[:PORT]",
        env = "PAATP_CONTROL",
        hide_env_values = true,
        default_value = "127.0.0.1"
    )]
    pub control: String,
    /// Print JSON, with a `schema_version`.
    #[arg(long, global = true)]
    pub json: bool,
    /// Who it is.
    #[command(flatten)]
    pub credentials: Credentials,
}

/// What `paatp job` does.
#[derive(Debug, Subcommand)]
pub enum JobAction {
    /// Create a job.
    Create(JobCreate),
    /// List all jobs.
    List,
    /// Show one job with its ranks.
    Show {
        /// Name of the job.
        name: String,
    },
    /// Change how the ranks wait for one another; between two runs of the job only.
    Sync(JobSync),
    /// Delete a job; workers that take part are told that it is over.
    Delete {
        /// Name of the job.
        name: String,
    },
    /// Show the aggregator: its memory, its jobs.
    Node,
    /// Let the aggregator take no new jobs and ranks; what runs goes on.
    Drain {
        /// Take new ones again.
        #[arg(long)]
        resume: bool,
    },
}

/// `paatp job create`
#[derive(Debug, Args)]
pub struct JobCreate {
    /// Name of the job: `a-z 0-9 . _ -`. Workers give the same name.
    pub name: String,
    /// Number of ranks (workers).
    #[arg(long, value_name = "N")]
    pub world: u32,
    /// Most values in a packet, a multiple of 32: 352 fill an MTU of 1500 over IPv4; more need jumbo frames.
    #[arg(long, default_value_t = u32::from(DEFAULT_LANES))]
    pub lanes: u32,
    /// Packets that the aggregator keeps results of: a power of two, at least twice --window.
    #[arg(long, default_value_t = DEFAULT_SLOTS)]
    pub slots: u32,
    /// Packets that each rank may have under way at once.
    #[arg(long, default_value_t = u32::from(DEFAULT_WINDOW))]
    pub window: u32,
    /// Keep results in the aggregator's pool, with those of other jobs, instead of a ring of its own.
    #[arg(long)]
    pub shared: bool,
    /// Ranks that are enough to complete a packet's sum. Workers of this version need all of them [default: --world].
    #[arg(long, value_name = "N")]
    pub quorum: Option<u32>,
    /// Who may join.
    #[arg(long, value_enum, default_value = "token", value_name = "WHO")]
    pub access: AccessName,
    /// Write the job's key to this new file, which only its owner can read: what workers give as --token-file.
    #[arg(long, value_name = "FILE")]
    pub key_file: Option<PathBuf>,
    /// Do something about ranks that hold the others up for this long, at least 1s [default: leave it to the workers].
    #[arg(long, value_parser = duration::parse, value_name = "DURATION")]
    pub timeout: Option<Duration>,
    /// What to do about them.
    #[arg(long, value_enum, default_value = "abort", value_name = "WHAT")]
    pub on_failure: PolicyName,
    /// Send the sums of this aggregator's ranks to the aggregator at this address, which has a job of the same name, world,
    /// lanes, slots and window, and makes the results.
    #[arg(long, value_name = "ADDR[:PORT]", requires = "here", conflicts_with_all = ["shared", "quorum", "timeout"])]
    pub parent: Option<String>,
    /// With --parent: the ranks that join at this aggregator, for example 0-3.
    #[arg(long, value_name = "FIRST-LAST", requires = "parent", group = "here")]
    pub ranks: Option<RankRange>,
    /// With --parent, instead of --ranks: the rank of the parent's job that all ranks of this one are together. So a job
    /// has up to 64 ranks on each of up to 64 nodes.
    #[arg(long, value_name = "RANK", requires = "parent", group = "here")]
    pub child: Option<u32>,
}

/// `paatp job sync`
#[derive(Debug, Args)]
pub struct JobSync {
    /// Name of the job.
    pub name: String,
    /// How the ranks wait for one another. Takes effect at one chunk, while the job runs.
    #[arg(value_enum)]
    pub mode: SyncMode,
    /// Ranks that are enough to complete a sum; all without it. For quorum, ssp and asp.
    #[arg(long, value_name = "N", required_if_eq("mode", "quorum"))]
    pub quorum: Option<u32>,
    /// For ssp: iterations that ranks may be ahead of the results they have, up to 62.
    #[arg(long, value_name = "N", required_if_eq("mode", "ssp"))]
    pub staleness: Option<u32>,
}

/// Modes of synchronisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SyncMode {
    /// Every sum needs all ranks.
    Bsp,
    /// Some ranks are enough.
    Quorum,
    /// Iterations begin some results early.
    Ssp,
    /// Iterations begin without waiting for results.
    Asp,
}

/// Who may join a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AccessName {
    /// Whoever reaches the control port.
    Open,
    /// Whoever has the job's key or the aggregator's token.
    Token,
}

impl AccessName {
    /// As the configuration calls it.
    #[must_use]
    pub const fn access(self) -> Access {
        match self {
            AccessName::Open => Access::Open,
            AccessName::Token => Access::Token,
        }
    }
}

/// What is done about ranks that hold others up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PolicyName {
    /// End the run for all ranks.
    Abort,
    /// Go on without them.
    Shrink,
}

impl PolicyName {
    /// As the configuration calls it.
    #[must_use]
    pub const fn policy(self) -> FailurePolicy {
        match self {
            PolicyName::Abort => FailurePolicy::Abort,
            PolicyName::Shrink => FailurePolicy::Shrink,
        }
    }
}
