//! The `paatp` program. What its exit statuses mean: [`paatp_user::exit`].

use std::io::Write;
use std::process::ExitCode;

use anyhow::Error;
use paatp_user::capture;
use paatp_user::cleanup;
use paatp_user::cli::{Allreduce, Cleanup, Command, Job, ListFormat, Metrics, MetricsAction, Run};
use paatp_user::client;
use paatp_user::config::File;
use paatp_user::daemon;
use paatp_user::doctor::{self, Doctor};
use paatp_user::exit::Exit;
use paatp_user::log::{self, LogFormat, Speaker};
use paatp_user::look;
use paatp_user::manual::{self, Man};
use paatp_user::object::OBJECT;
use paatp_user::settings::{self, Config, ConfigAction, Parsed, SettingsError};
use paatp_user::sim::{self, Sim};
use paatp_user::telemetry::metrics;
use paatp_user::worker;

fn main() -> ExitCode {
    let parsed = match settings::parse(std::env::args_os()) {
        Ok(parsed) => parsed,
        Err(SettingsError::Usage(error)) => error.exit(),
        Err(error) => {
            log::tell(&error.into(), LogFormat::Text);
            return Exit::Usage.into();
        }
    };
    let speaker = match parsed.cli.command {
        Command::Run(_) => Speaker::Daemon,
        _ => Speaker::Command,
    };
    let format = match log::start(&parsed.cli.log, speaker) {
        Ok(format) => format,
        Err(error) => {
            log::tell(&error, LogFormat::Text);
            return Exit::Usage.into();
        }
    };
    match carry_out(&parsed) {
        Ok(code) => code,
        Err(failure) => {
            log::tell(&failure.error, format);
            failure.exit.into()
        }
    }
}

fn carry_out(parsed: &Parsed) -> Result<ExitCode, Failure> {
    match &parsed.cli.command {
        Command::Run(args) => run(args, &parsed.file),
        Command::Allreduce(args) => allreduce(args),
        Command::Sim(args) => simulate(args),
        Command::Job(args) => job(args),
        Command::Status(args) => return look::status::run(args).map_err(Failure::from),
        Command::Top(args) => return look::top::run(args).map_err(Failure::from),
        Command::Metrics(args) => list_metrics(args),
        Command::Doctor(args) => return examine(args),
        Command::Capture(args) => capture::run(args).map_err(Failure::from),
        Command::Cleanup(args) => clean(args),
        Command::SetupQueues(args) => {
            doctor::setup_queues(args, &mut std::io::stdout().lock()).map_err(Failure::from)
        }
        Command::Config(args) => config(args, parsed),
        Command::Completions(args) => {
            let _ = std::io::stdout().lock().write_all(&manual::completions(args.shell));
            Ok(())
        }
        Command::Man(args) => man(args),
    }
    .map(|()| ExitCode::SUCCESS)
}

/// An error with its exit status.
struct Failure {
    error: Error,
    exit: Exit,
}

impl Failure {
    fn usage(error: Error) -> Failure {
        Failure { error, exit: Exit::Usage }
    }
}

impl<E: Into<Error>> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure { error: error.into(), exit: Exit::Failure }
    }
}

fn run(args: &Run, file: &File) -> Result<(), Failure> {
    let result = daemon::plan(args, file).and_then(|plan| daemon::run(args, &plan, OBJECT));
    result.map_err(|error| Failure { exit: Exit::of_daemon(&error), error: error.into() })
}

fn config(args: &Config, parsed: &Parsed) -> Result<(), Failure> {
    let text = match &args.action {
        ConfigAction::Check { file } => settings::check(file),
        ConfigAction::Dump(run) => settings::dump(parsed, run),
    };
    let text = text.map_err(|error| Failure::usage(error.into()))?;
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
    Ok(())
}

fn man(args: &Man) -> Result<(), Failure> {
    let page = manual::page(&args.command).map_err(|error| Failure::usage(error.into()))?;
    // Whoever closed standard output does not want it.
    let _ = std::io::stdout().lock().write_all(&page);
    Ok(())
}

fn clean(args: &Cleanup) -> Result<(), Failure> {
    cleanup::may_look()?;
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
