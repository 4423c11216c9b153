//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use paatp_common::limits::{MAX_PORTS, MAX_RANKS};
use paatp_transport::Reduction;

use crate::config::{DEFAULT_LANES, DEFAULT_SLOTS, DEFAULT_WINDOW, JobConfig};
use crate::control::DEFAULT_PORT;
use crate::duration;

/// All-reduce whose additions happen in the Linux kernel's XDP hook.
#[derive(Debug, Parser)]
#[command(name = "paatp", version, max_term_width = 110)]
pub struct Cli {
    /// Log filter, for example `info` or `paatp_user=debug`.
    #[arg(long, global = true, env = "PAATP_LOG", value_name = "FILTER")]
    pub log: Option<String>,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve jobs: attach the XDP program to an interface and answer workers until SIGINT or SIGTERM.
    Run(Run),
    /// Take part in a job as one rank: all-reduce the tensors of a safetensors file.
    Allreduce(Allreduce),
}

/// How the XDP program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum XdpMode {
    /// In the driver; an error where the driver cannot.
    Native,
    /// In the network stack: slower, works with every driver.
    Generic,
    /// In the driver, else with a warning in the stack.
    Auto,
}

/// `paatp run`
#[derive(Debug, Args)]
pub struct Run {
    /// Interface that the workers' packets arrive on.
    #[arg(long, value_name = "IF", env = "PAATP_IFACE")]
    pub iface: String,
    /// Where the program runs.
    #[arg(long, value_enum, default_value = "auto", value_name = "MODE")]
    pub xdp_mode: XdpMode,
    /// TOML file of jobs: tables `job` with name, world, lanes, slots, window, quorum.
    #[arg(long, value_name = "FILE.toml")]
    pub config: Option<PathBuf>,
    /// A job, besides those of the file.
    #[arg(long, value_name = "NAME", requires = "world")]
    pub job: Option<String>,
    /// Number of ranks of that job.
    #[arg(long, value_name = "N", requires = "job")]
    pub world: Option<u32>,
    /// Most lanes (32-bit values) of that job's chunks: 352 fill an MTU of 1500.
    #[arg(long, default_value_t = u32::from(DEFAULT_LANES), requires = "job")]
    pub lanes: u32,
    /// Slots of that job's ring: a power of two, at least twice the window.
    #[arg(long, default_value_t = DEFAULT_SLOTS, requires = "job")]
    pub slots: u32,
    /// Window of that job, in chunks.
    #[arg(long, default_value_t = u32::from(DEFAULT_WINDOW), requires = "job")]
    pub window: u32,
    /// Contributions that complete that job's chunks [default: all ranks'].
    #[arg(long, value_name = "N", requires = "job")]
    pub quorum: Option<u32>,
    /// TCP port of the control server and first UDP port of the data plane.
    #[arg(long, default_value_t = DEFAULT_PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub port: u16,
    /// UDP ports of the data plane: as many as the interface has receive queues with flow rules.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_PORTS)))]
    pub ports: u16,
    /// Write all counters to this file at exit and on SIGUSR1.
    #[arg(long, value_name = "FILE")]
    pub json_counters: Option<PathBuf>,
}

impl Run {
    /// The job of the command line.
    #[must_use]
    pub fn job(&self) -> Option<JobConfig> {
        Some(JobConfig {
            name: self.job.clone()?,
            world: self.world?,
            lanes: self.lanes,
            slots: self.slots,
            window: self.window,
            quorum: self.quorum,
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

/// `paatp allreduce`
#[derive(Debug, Args)]
pub struct Allreduce {
    /// The job.
    #[arg(long, value_name = "NAME")]
    pub job: String,
    /// This worker's rank, from 0.
    #[arg(long, value_name = "R", value_parser = clap::value_parser!(u8).range(0..MAX_RANKS as i64))]
    pub rank: u8,
    /// Number of ranks; must be the job's.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=MAX_RANKS as i64))]
    pub world: u8,
    /// The aggregator: address or name, with a port if it is not 20545.
    #[arg(long, value_name = "ADDR[:PORT]", env = "PAATP_AGGREGATOR")]
    pub aggregator: String,
    /// Safetensors file with this rank's values (F32, F16, BF16, I32).
    #[arg(long, value_name = "FILE")]
    pub input: PathBuf,
    /// Where the result goes: same names, shapes, types and order.
    #[arg(long, value_name = "FILE")]
    pub output: PathBuf,
    /// What is computed.
    #[arg(long, value_enum, default_value = "sum")]
    pub reduction: ReductionName,
    /// Longest wait for the other ranks to join, and for progress afterwards.
    #[arg(long, default_value = "30s", value_parser = duration::parse, value_name = "DURATION")]
    pub timeout: Duration,
    /// Write a report of the run to this file, as JSON.
    #[arg(long, value_name = "FILE.json")]
    pub report: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split_whitespace())
    }

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn run_takes_a_job() {
        let Ok(Cli { command: Command::Run(run), .. }) =
            parse("paatp run --iface eth0 --job train --world 4 --slots 512 --xdp-mode native")
        else {
            panic!("refused");
        };
        let job = run.job();
        assert_eq!(
            job.map(|job| (job.name, job.world, job.lanes, job.slots, job.window, job.quorum)),
            Some(("train".into(), 4, 352, 512, 64, None))
        );
        assert_eq!((run.xdp_mode, run.port, run.ports), (XdpMode::Native, 20545, 1));
    }

    #[test]
    fn run_without_a_job_is_for_files() {
        let Ok(Cli { command: Command::Run(run), .. }) = parse("paatp run --iface eth0 --config x.toml")
        else {
            panic!("refused");
        };
        assert_eq!(run.job(), None);
    }

    #[test]
    fn allreduce_takes_durations() {
        let line = "paatp allreduce --job j --rank 0 --world 2 --aggregator 10.0.0.1 --input a --output b";
        let timeout = |line: &str| match parse(line) {
            Ok(Cli { command: Command::Allreduce(args), .. }) => Some((args.timeout, args.reduction)),
            _ => None,
        };
        assert_eq!(timeout(line), Some((Duration::from_secs(30), ReductionName::Sum)));
        let ms = format!("{line} --timeout 500ms --reduction mean");
        assert_eq!(timeout(&ms), Some((Duration::from_millis(500), ReductionName::Mean)));
    }

    #[test]
    fn usage_errors_have_exit_code_2() {
        for line in [
            "paatp",
            "paatp run",
            "paatp run --iface e --job j",
            "paatp run --iface e --lanes 32",
            "paatp run --iface e --ports 257",
            "paatp allreduce --job j --rank 64 --world 2 --aggregator a --input a --output b",
            "paatp allreduce --job j --rank 0 --world 0 --aggregator a --input a --output b",
            "paatp allreduce --job j --rank 0 --world 1 --aggregator a --input a --output b --timeout x",
        ] {
            assert_eq!(parse(line).map_err(|error| error.exit_code()).err(), Some(2), "{line}");
        }
    }
}
