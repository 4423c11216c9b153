//! The `paatp` program. Exit codes: 0 all went well, 1 it failed, 2 it was called wrongly; `paatp run` has more
//! ([`DaemonError::exit_code`]).

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use anyhow::{Context, Error};
use clap::Parser;
use paatp_user::cleanup;
use paatp_user::cli::{Allreduce, Cleanup, Cli, Command, Job, ListFormat, Metrics, MetricsAction, Run};
use paatp_user::client;
use paatp_user::daemon::{self, DaemonError};
use paatp_user::doctor::{self, Doctor};
use paatp_user::object::OBJECT;
use paatp_user::sim::{self, Sim};
use paatp_user::telemetry::metrics;
use paatp_user::worker;
use tracing_subscriber::EnvFilter;

/// Called wrongly, as clap has it.
const USAGE: u8 = 2;

/// Log filter unless told otherwise: life-cycle for the daemon, only trouble for a worker.
const RUN_FILTER: &str = "info";
const WORKER_FILTER: &str = "warn";

fn main() -> ExitCode {
    let cli = Cli::parse();
    let default = match cli.command {
        Command::Run(_) => RUN_FILTER,
        Command::Allreduce(_)
        | Command::Job(_)
        | Command::Sim(_)
        | Command::Metrics(_)
        | Command::Doctor(_)
        | Command::Cleanup(_)
        | Command::SetupQueues(_) => WORKER_FILTER,
    };
    let result = start_log(cli.log.as_deref().unwrap_or(default)).map_err(Failure::usage).and_then(|()| {
        match &cli.command {
            Command::Run(args) => run(args),
            Command::Allreduce(args) => allreduce(args),
            Command::Sim(args) => simulate(args),
            Command::Job(args) => job(args),
            Command::Metrics(args) => list_metrics(args),
            Command::Doctor(args) => return examine(args),
            Command::Cleanup(args) => clean(args),
            Command::SetupQueues(args) => {
                doctor::setup_queues(args, &mut std::io::stdout().lock()).map_err(Failure::from)
            }
        }
        .map(|()| ExitCode::SUCCESS)
    });
    match result {
        Ok(code) => code,
        Err(failure) => {
            tell(&failure.error);
            ExitCode::from(failure.code)
        }
    }
}

/// An error with its exit code.
struct Failure {
    error: Error,
    code: u8,
}

impl Failure {
    fn usage(error: Error) -> Failure {
        Failure { error, code: USAGE }
    }
}

impl<E: Into<Error>> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure { error: error.into(), code: 1 }
    }
}

/// Logs go to standard error.
fn start_log(filter: &str) -> Result<(), Error> {
    let filter = EnvFilter::builder().parse(filter).with_context(|| {
        format!("--log {filter} is no filter; write for example info or paatp_user=debug")
    })?;
    let terminal =
        std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(terminal)
        .with_target(false)
        .init();
    Ok(())
}

/// Prints an error and its causes, one per line.
fn tell(error: &Error) {
    let mut out = std::io::stderr().lock();
    let _ = writeln!(out, "error: {error}");
    let mut last = error.to_string();
    for cause in error.chain().skip(1) {
        let text = cause.to_string();
        // Some libraries repeat their cause in their own words.
        if !last.contains(&text) {
            let _ = writeln!(out, "  cause: {text}");
        }
        last = text;
    }
}

fn run(args: &Run) -> Result<(), Failure> {
    let plan = daemon::plan(args).map_err(|error| Failure::usage(error.into()))?;
    daemon::run(args, &plan, OBJECT)
        .map_err(|error: DaemonError| Failure { code: error.exit_code(), error: error.into() })
}

fn clean(args: &Cleanup) -> Result<(), Failure> {
    let report = cleanup::run(args);
    let text = if args.json { report.json()? } else { report.to_string() };
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
    report.outcome().map_err(Failure::from)
}

fn job(args: &Job) -> Result<(), Failure> {
    let text = client::job::run(args)?;
    // Whoever closed standard output does not want it.
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
    Ok(())
}

fn list_metrics(args: &Metrics) -> Result<(), Failure> {
    let MetricsAction::List { format } = args.action;
    let text = match format {
        ListFormat::Md => metrics::markdown(),
        ListFormat::Json => metrics::json()?,
    };
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
    Ok(())
}

fn simulate(args: &Sim) -> Result<(), Failure> {
    let text = sim::run(args)?;
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
    Ok(())
}

/// Errors that were found are the exit status, not messages of their own.
fn examine(args: &Doctor) -> Result<ExitCode, Failure> {
    let report = doctor::examine(args, OBJECT);
    let text = if args.json { report.json()? } else { report.to_string() };
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
    Ok(if report.errors == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn allreduce(args: &Allreduce) -> Result<(), Failure> {
    if args.rank >= args.world {
        let (rank, world) = (args.rank, args.world);
        let error = anyhow::anyhow!(
            "--rank {rank} is out of range: a job of --world {world} has ranks 0 to {}",
            world - 1
        );
        return Err(Failure::usage(error));
    }
    let report = worker::allreduce(args)?;
    let line = report.in_words(&args.output) + "\n";
    // Whoever closed standard output does not want it.
    let _ = std::io::stdout().lock().write_all(line.as_bytes());
    Ok(())
}
