//! The command line.

mod job;

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use paatp_common::limits::{MAX_PORTS, MAX_RANKS};
use paatp_transport::Reduction;
use paatp_transport::rate::Algorithm;

use crate::capture::{self, Capture};
use crate::config::{
    ConfigError, DEFAULT_LANES, DEFAULT_SLOTS, DEFAULT_WINDOW, JobConfig, MemoryKind, parse_size,
};
use crate::control::DEFAULT_PORT;
use crate::doctor::{self, Doctor, SetupQueues};
use crate::duration;
use crate::log::LogArgs;
use crate::look::status::{self, Status};
use crate::look::top::{self, Top};
use crate::manual::{self, Completions, Man};
use crate::settings::{self, Config};
use crate::signals;
use crate::sim::{self, Sim};
use crate::switch::options::SwitchOptions;

pub use job::{AccessName, Job, JobAction, JobCreate, JobSync, PolicyName, SyncMode};

/// After the options of `paatp`.
pub const AFTER_HELP: &str = "\
A job of two ranks, one aggregator and two workers:
  aggregator# paatp run --iface eth0 --job train --world 2
  worker-0$   paatp allreduce --job train --rank 0 --world 2 --aggregator 10.0.0.1 --input g0.safetensors \
--output sum.safetensors
  worker-1$   paatp allreduce --job train --rank 1 --world 2 --aggregator 10.0.0.1 --input g1.safetensors \
--output sum.safetensors

Exit status: 0 all went well, or
  1 it failed; standard error says why and what to do
  2 it was called or configured wrongly
  3 `run` cannot work here as it is: privileges, kernel, interface (ask `paatp doctor`)
  4 `run`: the interface or the port is taken
  5 `run`: pinned state of another build is in the way
  6 `status`: the aggregator answers, and something needs a look
  128 and a signal's number: after a second signal";

/// After the options of `paatp run`.
const AFTER_RUN: &str = "\
Says `ready: …` on standard output once workers may join. Needs root or the capabilities CAP_BPF and CAP_NET_ADMIN. \
Jobs come from --job and --config, or later from `paatp job create`.

Example:
  paatp run --iface eth0 --job train --world 4

Several jobs, in a file for --config:
  [[job]]
  name = \"train\"
  world = 4

  [[job]]
  name = \"eval\"
  world = 2
  window = 32

  [node]
  iface = \"eth0\"
  memory = \"256MiB\"
  drain_timeout = \"5s\"

Every option but those of the one job is a key of [node], with underscores (--node-lanes: `lanes`), and every option is \
an environment variable; flags go before variables, variables before the file. `paatp config check` and `dump` show it.

SIGTERM or SIGINT: takes nothing new, waits up to --drain-timeout for what runs, detaches. A second one ends it at once. \
SIGUSR1 writes the counters; SIGHUP does nothing but say so.

Exit status: 0 ended by a signal, 1 it failed (standard error says why and what to do), 2 it was called or configured \
wrongly, 3 it cannot work here (ask `paatp doctor`), 4 the interface or the port is taken, 5 pinned state of another \
build is in the way, 128 and the signal's number after a second signal.";

/// After the options of `paatp allreduce`.
const AFTER_ALLREDUCE: &str = "\
Start it once for each rank, in any order; each waits for the others. Then one line on standard output says what was \
done. All ranks' files must hold tensors of the same names, types and shapes; all ranks get the same bits.

Example, the first of four ranks:
  paatp allreduce --job train --rank 0 --world 4 --aggregator 10.0.0.1 --input grad.safetensors \
--output sum.safetensors

Exit status: 0 the result is written, 1 it failed (standard error says why and what to do), 2 it was called wrongly.";

/// After the options of `paatp cleanup`.
const AFTER_CLEANUP: &str = "\
Removes what aggregators that were killed, and will not be started again, have left: pinned programs and tables, files \
about their jobs, locks. What a running aggregator has, and whatever is not of paatp, is shown and left. Needs the user \
that `paatp run` had.

Example:
  paatp cleanup --dry-run
  paatp cleanup --iface eth0

Exit status: 0 nothing of ours is left that nobody holds, 1 it failed (standard error says why and what to do), 2 it was \
called wrongly.";

/// Sums tensors of many hosts; the additions happen on the aggregator, in the Linux kernel's XDP hook.
#[derive(Debug, Parser)]
#[command(name = "paatp", version, max_term_width = 110, after_help = AFTER_HELP)]
pub struct Cli {
    /// What is logged, and how.
    #[command(flatten)]
    pub log: LogArgs,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Aggregator: attach the XDP program to a network interface and serve jobs until Ctrl-C or SIGTERM.
    #[command(after_help = AFTER_RUN)]
    Run(Box<Run>),
    /// Worker: combine the tensors of a file with those of all other ranks, and write the result.
    #[command(after_help = AFTER_ALLREDUCE)]
    Allreduce(Allreduce),
    /// Simulator: race the rate controllers through a network in virtual time.
    #[command(after_help = sim::AFTER_HELP)]
    Sim(Sim),
    /// Operator: create, see, change and delete the jobs of a running aggregator.
    #[command(after_help = job::AFTER_JOB)]
    Job(Job),
    /// The metrics that an aggregator exports.
    Metrics(Metrics),
    /// Show how an aggregator and its jobs do, who waits for whom and since when.
    #[command(after_help = status::AFTER_HELP)]
    Status(Status),
    /// The same, live, with the last minutes of each rank.
    #[command(after_help = top::AFTER_HELP)]
    Top(Top),
    /// What keeps `paatp run` from running well here: looks at everything it depends on, says why and what mends it.
    #[command(after_help = doctor::AFTER_DOCTOR)]
    Doctor(Doctor),
    /// Write some of the packets between workers and aggregator to a file for Wireshark.
    #[command(after_help = capture::AFTER_HELP)]
    Capture(Capture),
    /// Show and remove what killed aggregators left behind.
    #[command(after_help = AFTER_CLEANUP)]
    Cleanup(Cleanup),
    /// Give each UDP port of an aggregator a receive queue of its own: prints the ethtool rules, or makes them.
    #[command(after_help = doctor::AFTER_SETUP_QUEUES)]
    SetupQueues(SetupQueues),
    /// Configuration files: check one, or see the settings in force.
    #[command(after_help = settings::AFTER_CONFIG)]
    Config(Config),
    /// Print what a shell needs to complete this command line.
    #[command(after_help = manual::AFTER_COMPLETIONS)]
    Completions(Completions),
    /// Print a manual page, for `man -l -`.
    #[command(after_help = manual::AFTER_MAN)]
    Man(Man),
}

/// `paatp metrics`
#[derive(Debug, Args)]
pub struct Metrics {
    /// What to do.
    #[command(subcommand)]
    pub action: MetricsAction,
}

/// What can be done with metrics.
#[derive(Clone, Copy, Debug, Subcommand)]
pub enum MetricsAction {
    /// List all of them: name, kind, labels, meaning.
    List {
        /// How.
        #[arg(long, value_enum, default_value = "md")]
        format: ListFormat,
    },
}

/// How a list is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ListFormat {
    /// Markdown, for people.
    Md,
    /// JSON, for programs.
    Json,
}

/// A path that may be empty, to say "none".
pub(crate) fn maybe_file() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().map(PathBuf::from)
}

/// How a client shows who it is, and knows whom it speaks to.
#[derive(Clone, Debug, Default, Args)]
pub struct Credentials {
    /// File with the job's key or the aggregator's token. Never give a token itself on a command line.
    #[arg(long, global = true, value_name = "FILE", env = "PAATP_TOKEN_FILE", hide_env_values = true, value_parser = maybe_file())]
    pub token_file: Option<PathBuf>,
    /// Speak TLS to the aggregator, whose certificate must be signed by one in this PEM file.
    #[arg(long, global = true, value_name = "FILE.pem", env = "PAATP_TLS_CA", hide_env_values = true, value_parser = maybe_file())]
    pub tls_ca: Option<PathBuf>,
}

/// How the XDP program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum XdpMode {
    /// In the interface's driver, or not at all: the fastest.
    Native,
    /// In the network stack: slower, works with every driver.
    Generic,
    /// In the driver if it can, else in the stack with a warning.
    Auto,
}

/// `paatp run`
#[derive(Debug, Args)]
pub struct Run {
    /// Network interface that the workers' packets arrive on, for example eth0.
    #[arg(long, value_name = "IF", env = "PAATP_IFACE", hide_env_values = true)]
    pub iface: String,
    /// Where the XDP program, which adds, runs.
    #[arg(long, value_enum, default_value = "auto", value_name = "MODE")]
    pub xdp_mode: XdpMode,
    /// Configuration file: TOML with tables `[[job]]` (name, world, and if need be lanes, slots, window, quorum) and `[node]`
    /// (the other options of this command).
    #[arg(long, value_name = "FILE.toml")]
    pub config: Option<PathBuf>,
    /// Name of a job to serve, besides those of --config: `a-z 0-9 . _ -`. Workers give the same name.
    #[arg(long, value_name = "NAME", requires = "world")]
    pub job: Option<String>,
    /// Number of ranks (workers) of that job.
    #[arg(long, value_name = "N", requires = "job")]
    pub world: Option<u32>,
    /// Most values in a packet of that job, a multiple of 32: 352 fill an MTU of 1500 over IPv4; more need jumbo frames.
    #[arg(long, default_value_t = u32::from(DEFAULT_LANES), requires = "job")]
    pub lanes: u32,
    /// Packets that the aggregator keeps results of for that job: a power of two, at least twice --window.
    #[arg(long, default_value_t = DEFAULT_SLOTS, requires = "job")]
    pub slots: u32,
    /// Packets that each rank of that job may have under way at once.
    #[arg(long, default_value_t = u32::from(DEFAULT_WINDOW), requires = "job")]
    pub window: u32,
    /// Ranks that are enough to complete a packet's sum. Workers of this version need all of them [default: --world].
    #[arg(long, value_name = "N", requires = "job")]
    pub quorum: Option<u32>,
    /// TCP port that workers join at, and first UDP port for their data.
    #[arg(long, default_value_t = DEFAULT_PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub port: u16,
    /// Number of UDP ports for data. More than one only where the interface steers each to a receive queue of its own.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_PORTS)))]
    pub ports: u16,
    /// Write all packet counters to this file as JSON, at exit and on SIGUSR1.
    #[arg(long, value_name = "FILE")]
    pub json_counters: Option<PathBuf>,
    /// Kernel memory for the results of all jobs together: 256MiB, 1GiB; 0 stands for what the jobs given here need
    /// [default: 64MiB, or what they need if that is more].
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub memory: Option<u64>,
    /// Keep the job's results in the pool instead of a ring of its own.
    #[arg(long, requires_all = ["job", "pool"])]
    pub shared: bool,
    /// Of that memory, a pool for jobs with shared memory: 16MiB [default: none].
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub pool: Option<u64>,
    /// Places in the pool where a result may be kept, 1 to 8 [default: tuned for each job].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=8))]
    pub pool_places: Option<u8>,
    /// Most values in a packet that jobs created later may ask for, a multiple of 32 up to 832 [default: 352, or the most
    /// that a job given here has].
    #[arg(long, value_name = "N")]
    pub node_lanes: Option<u32>,
    /// Take sums of aggregators below this one, and let jobs send their sums to one above (`paatp job create --parent`).
    /// Jobs of --config that have a parent imply it.
    #[arg(long, env = "PAATP_LEVELS", hide_env_values = true, value_parser = clap::builder::FalseyValueParser::new())]
    pub levels: bool,
    /// Longest time to wait, after SIGTERM or SIGINT, for the jobs that run: 5s, 500ms, 2m; 0 detaches at once.
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = signals::patience)]
    pub drain_timeout: Duration,
    /// File with the token that changes of jobs need; made at the first start, readable by its owner only. An empty name
    /// stands for none: then nobody can change jobs [default: /var/lib/paatp/token].
    #[arg(long, value_name = "FILE", env = "PAATP_TOKEN_FILE", hide_env_values = true, value_parser = maybe_file())]
    pub token_file: Option<PathBuf>,
    /// Address that jobs can be managed at (`paatp job`), besides 127.0.0.1 and ::1.
    #[arg(long, value_name = "ADDR[:PORT]", env = "PAATP_CONTROL", hide_env_values = true)]
    pub control: Option<String>,
    /// Name under which the control server may be asked without TLS, besides its addresses and localhost; other names are
    /// refused, so that no web page can give itself one (DNS rebinding). May be given several times.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub allowed_host: Vec<String>,
    /// Serve metrics for Prometheus at this address as well, on a thread of its own and without TLS or a token. They are
    /// always at /metrics where jobs are managed.
    #[arg(long, value_name = "ADDR:PORT", env = "PAATP_METRICS", hide_env_values = true)]
    pub metrics: Option<std::net::SocketAddr>,
    /// Speak TLS on the control port with this certificate chain; workers then need --tls-ca.
    #[arg(long, value_name = "FILE.pem")]
    pub tls_certificate: Option<PathBuf>,
    /// The certificate's private key.
    #[arg(long, value_name = "FILE.pem")]
    pub tls_key: Option<PathBuf>,
    /// BPF file system to pin program and tables in, so that running jobs survive if this process is killed and started
    /// again; `none` stands for nowhere [default: /sys/fs/bpf].
    #[arg(long, value_name = "DIR", env = "PAATP_PIN_DIR", hide_env_values = true)]
    pub pin_dir: Option<PathBuf>,
    /// Folder for a file with what the next start needs to know of the jobs, if anything is pinned
    /// [default: /var/lib/paatp].
    #[arg(long, value_name = "DIR", env = "PAATP_STATE_DIR", hide_env_values = true)]
    pub state_dir: Option<PathBuf>,
    /// Folder for the lock that lets one `paatp run` have the interface, if anything is pinned [default: /run/paatp].
    #[arg(long, value_name = "DIR", env = "PAATP_RUNTIME_DIR", hide_env_values = true)]
    pub runtime_dir: Option<PathBuf>,
    /// At SIGTERM or Ctrl-C leave the pinned program and tables in force for the next start: running jobs go on meanwhile.
    #[arg(long, env = "PAATP_KEEP_ATTACHED", hide_env_values = true, value_parser = clap::builder::FalseyValueParser::new())]
    pub keep_attached: bool,
    /// A switch in front of it.
    #[command(flatten)]
    pub switch: SwitchOptions,
}

/// `paatp cleanup`
#[derive(Debug, Args)]
pub struct Cleanup {
    /// What is left of this network interface only.
    #[arg(long, value_name = "IF")]
    pub iface: Option<String>,
    /// Show what would be removed, and remove nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Print JSON, with a `schema_version`.
    #[arg(long)]
    pub json: bool,
    /// BPF file system that `paatp run` pins in [default: /sys/fs/bpf].
    #[arg(long, value_name = "DIR", env = "PAATP_PIN_DIR", hide_env_values = true)]
    pub pin_dir: Option<PathBuf>,
    /// Its folder of state files [default: /var/lib/paatp].
    #[arg(long, value_name = "DIR", env = "PAATP_STATE_DIR", hide_env_values = true)]
    pub state_dir: Option<PathBuf>,
    /// Its folder of locks [default: /run/paatp].
    #[arg(long, value_name = "DIR", env = "PAATP_RUNTIME_DIR", hide_env_values = true)]
    pub runtime_dir: Option<PathBuf>,
}

/// A size for clap.
fn size(text: &str) -> Result<u64, ConfigError> {
    parse_size(text)
}

impl Run {
    /// The job of the command line.
    #[must_use]
    pub fn job(&self) -> Option<JobConfig> {
        Some(JobConfig {
            lanes: self.lanes,
            slots: self.slots,
            window: self.window,
            quorum: self.quorum,
            memory: if self.shared { MemoryKind::Shared } else { MemoryKind::Reserved },
            ..JobConfig::new(self.job.as_deref()?, self.world?)
        })
    }
}

/// What is computed over the ranks' values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReductionName {
    /// Their sum.
    Sum,
    /// Their sum, divided by the number of ranks.
    Mean,
    /// The largest.
    Max,
    /// The smallest.
    Min,
}

impl ReductionName {
    /// As the transport calls it.
    #[must_use]
    pub const fn reduction(self) -> Reduction {
        match self {
            ReductionName::Sum => Reduction::Sum,
            ReductionName::Mean => Reduction::Mean,
            ReductionName::Max => Reduction::Max,
            ReductionName::Min => Reduction::Min,
        }
    }

    /// As the command line calls it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            ReductionName::Sum => "sum",
            ReductionName::Mean => "mean",
            ReductionName::Max => "max",
            ReductionName::Min => "min",
        }
    }
}

/// How a worker sends and receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IoName {
    /// `af-xdp` where the interface's driver can do it without copies, else `udp`, with a warning that says why.
    Auto,
    /// Past the kernel's network stack, with copies if need be: as root or with CAP_BPF, CAP_NET_ADMIN and CAP_NET_RAW,
    /// one such worker on each interface.
    AfXdp,
    /// Sockets: works everywhere.
    Udp,
}

/// `paatp allreduce`
#[derive(Debug, Args)]
pub struct Allreduce {
    /// Name of the job, as the aggregator serves it (`paatp run --job`).
    #[arg(long, value_name = "NAME")]
    pub job: String,
    /// Number of this worker, from 0 to one less than --world; no two workers have the same.
    #[arg(long, value_name = "R", value_parser = clap::value_parser!(u8).range(0..MAX_RANKS as i64))]
    pub rank: u8,
    /// Number of workers in the job; the same as for `paatp run`.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=MAX_RANKS as i64))]
    pub world: u8,
    /// Address or name of the host where `paatp run` runs, with a port if it is not 20545.
    #[arg(long, value_name = "ADDR[:PORT]", env = "PAATP_AGGREGATOR", hide_env_values = true)]
    pub aggregator: String,
    /// Safetensors file with this rank's values (F32, F16, BF16, I32).
    #[arg(long, value_name = "FILE")]
    pub input: PathBuf,
    /// Safetensors file for the result: same names, shapes, types and order. Written only if all went well.
    #[arg(long, value_name = "FILE")]
    pub output: PathBuf,
    /// What is computed from the ranks' values, element by element; the same at all ranks.
    #[arg(long, value_enum, default_value = "sum", value_name = "WHAT")]
    pub reduction: ReductionName,
    /// Give up when the other ranks have not joined for this long, or, later, nothing has moved for this long: 30s, 500ms,
    /// 2m.
    #[arg(long, default_value = "30s", value_parser = duration::parse, value_name = "DURATION")]
    pub timeout: Duration,
    /// How packets are sent and received.
    #[arg(long, value_enum, default_value = "auto", value_name = "DRIVER")]
    pub io: IoName,
    /// Rate controller: pa-atp, atp, a2tp, switchml or fixed; all ranks should have the same.
    #[arg(long, default_value = "pa-atp", value_name = "NAME")]
    pub controller: Algorithm,
    /// Write times, throughput and what was lost and repaired to this file, as JSON.
    #[arg(long, value_name = "FILE.json")]
    pub report: Option<PathBuf>,
    /// Who it is.
    #[command(flatten)]
    pub credentials: Credentials,
}

#[cfg(test)]
#[path = "cli_tests.rs"]
mod tests;
