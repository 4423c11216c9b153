//! Where settings come from: flags, over environment variables, over the file, over defaults.
//!
//! There is one list, the options of `paatp run`. Each is also an environment variable (`PAATP_` and its name) and, but
//! for those that describe the one job of the command line, a key of the file's `[node]` (its name with underscores).
//! A value from the file becomes its option's default, so that all ways have the same names, units, ranges and messages.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::builder::Resettable;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, CommandFactory, FromArgMatches, Subcommand};
use serde::Serialize;
use thiserror::Error;

use crate::cli::{Cli, Command, Run};
use crate::config::{self, ConfigError, Entry, File, JobConfig, nearest};
use crate::daemon::{self, DaemonError};

/// After the options of `paatp config`.
pub const AFTER_CONFIG: &str = "\
Examples:
  paatp config check /etc/paatp/paatp.toml
  paatp config dump --config /etc/paatp/paatp.toml --iface eth0

Exit status: 0 all is right, 2 something is not (standard error says what).";

/// `paatp config`
#[derive(Debug, Args)]
pub struct Config {
    /// What to do.
    #[command(subcommand)]
    pub action: ConfigAction,
}

/// What `paatp config` does.
#[derive(Debug, Subcommand)]
pub enum ConfigAction {
    /// Check a configuration file: names, values, and whether its jobs fit together.
    Check {
        /// The file.
        #[arg(value_name = "FILE.toml")]
        file: PathBuf,
    },
    /// Print the settings that `paatp run` would have with the same options, and where each comes from. The output is a
    /// configuration file itself.
    Dump(Box<Run>),
}

/// Options of `paatp run` that describe the one job of the command line. In files that is a `[[job]]`.
const JOB_OPTIONS: [&str; 6] = ["job", "world", "lanes", "slots", "window", "quorum"];

/// Options that say where the file is, or print something.
const NO_SETTINGS: [&str; 3] = ["config", "help", "version"];

/// What every option's environment variable begins with.
const PREFIX: &str = "PAATP_";

/// The one option whose key is not its name: `lanes` means something else on the command line.
const NODE_LANES: (&str, &str) = ("node_lanes", "lanes");

/// The command line or the file cannot be used.
#[derive(Debug, Error)]
pub enum SettingsError {
    /// The command line; also a request for help.
    #[error(transparent)]
    Usage(#[from] clap::Error),
    /// The file.
    #[error(transparent)]
    File(#[from] ConfigError),
    /// What they ask for together.
    #[error(transparent)]
    Plan(#[from] DaemonError),
}

/// What to do, and the configuration file that belongs to it.
#[derive(Debug)]
pub struct Parsed {
    /// The command line, with the file's values where it has none of its own.
    pub cli: Cli,
    /// The file; an empty one where none was named.
    pub file: File,
    /// Where the values come from.
    matches: ArgMatches,
}

/// The whole command line, each option of `paatp run` with its environment variable.
#[must_use]
pub fn command() -> clap::Command {
    let with_variables = |run: clap::Command| {
        run.mut_args(|arg| match arg.get_long() {
            Some(long) if arg.get_env().is_none() && long != "help" => {
                let name = PREFIX.to_owned() + &long.replace('-', "_").to_uppercase();
                arg.env(name).hide_env_values(true)
            }
            _ => arg,
        })
    };
    Cli::command()
        .mut_subcommand("run", with_variables)
        .mut_subcommand("config", |config| config.mut_subcommand("dump", with_variables))
}

/// One setting, for documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The flag, without dashes.
    pub flag: String,
    /// The environment variable.
    pub variable: String,
    /// The key of `[node]`, if it has one.
    pub key: Option<String>,
    /// What it is unless told otherwise; nothing if the help says so in words.
    pub default: Option<String>,
}

/// All settings of `paatp run`, in the order of its help.
#[must_use]
pub fn list() -> Vec<Setting> {
    let command = command();
    let keys = settings(&command);
    let run = command.find_subcommand("run").into_iter().flat_map(clap::Command::get_arguments);
    let globals = command.get_arguments().filter(|arg| arg.is_global_set());
    let all = run.chain(globals).filter(|arg| arg.get_long().is_some());
    all.map(|arg| Setting {
        flag: arg.get_long().unwrap_or_default().into(),
        variable: arg.get_env().unwrap_or_default().to_string_lossy().into_owned(),
        key: keys.iter().any(|key| key.get_id() == arg.get_id()).then(|| key_of(arg).into()),
        default: arg.get_default_values().first().map(|value| value.to_string_lossy().into_owned()),
    })
    .collect()
}

/// Reads the command line, and the file that it names.
///
/// # Errors
/// If either is not right.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Parsed, SettingsError> {
    layered(command, &arguments.into_iter().collect::<Vec<_>>())
}

fn layered(command: impl Fn() -> clap::Command, line: &[OsString]) -> Result<Parsed, SettingsError> {
    // The file may name the interface, so that is not missed yet.
    let optional = |run: clap::Command| run.mut_arg("iface", |arg| arg.required(false));
    let first = match in_both(command(), &optional).try_get_matches_from(line) {
        Ok(matches) => matches,
        // Help and usage are told by the line as it is: there the interface is no option.
        Err(error) => {
            let error = command().try_get_matches_from(line).err().unwrap_or(error);
            return Err(blame(error, &command(), line).into());
        }
    };
    let Some(path) = layered_command(&first).and_then(|run| run.get_one::<PathBuf>("config")) else {
        let matches = command().try_get_matches_from(line).map_err(|error| blame(error, &command(), line))?;
        return Ok(Parsed { cli: Cli::from_arg_matches(&matches)?, file: File::default(), matches });
    };
    let file = config::read(path)?;
    let defaults = defaults(&file)?;
    let matches = with_defaults(command(), &defaults).try_get_matches_from(line);
    let matches = matches.map_err(|error| blame(error, &command(), line))?;
    Ok(Parsed { cli: Cli::from_arg_matches(&matches)?, file, matches })
}

/// Names the environment variable that a bad value came from: clap names the option, which nobody may have given.
fn blame(mut error: clap::Error, command: &clap::Command, line: &[OsString]) -> clap::Error {
    if !matches!(error.kind(), ErrorKind::InvalidValue | ErrorKind::ValueValidation) {
        return error;
    }
    let bad = |error: &clap::Error| {
        Some((
            error.get(ContextKind::InvalidArg)?.to_string(),
            error.get(ContextKind::InvalidValue)?.to_string(),
        ))
    };
    let Some((option, value)) = bad(&error) else { return error };
    // What is bad without the environment as well stands on the command line.
    let alone = without_environment(command.clone()).try_get_matches_from(line);
    if alone.err().as_ref().and_then(bad).is_some_and(|other| other.0 == option) {
        return error;
    }
    if let Some(variable) = variable_of(command, &option, &value) {
        let named = format!("{variable} (environment; {option})");
        error.insert(ContextKind::InvalidArg, ContextValue::String(named));
    }
    error
}

/// A command and all below it, reading nothing from the environment.
fn without_environment(command: clap::Command) -> clap::Command {
    command.mut_args(|arg| arg.env(Resettable::Reset)).mut_subcommands(without_environment)
}

/// The variable of an option, as clap writes that (`--port <PORT>`), whose value is this just now.
fn variable_of(command: &clap::Command, option: &str, value: &str) -> Option<String> {
    let long = option.split_whitespace().next()?.strip_prefix("--")?;
    let has = |name: &&OsStr| std::env::var_os(name).is_some_and(|it| it.to_string_lossy().contains(value));
    let here = command.get_arguments().filter(|arg| arg.get_long() == Some(long)).filter_map(Arg::get_env);
    let found = here.filter(has).map(|name| name.to_string_lossy().into_owned()).next();
    found.or_else(|| command.get_subcommands().find_map(|below| variable_of(below, option, value)))
}

/// Matches of `run`, or of `config dump`.
fn layered_command(matches: &ArgMatches) -> Option<&ArgMatches> {
    match matches.subcommand()? {
        ("run", run) => Some(run),
        ("config", config) => config.subcommand_matches("dump"),
        _ => None,
    }
}

fn in_both(command: clap::Command, change: &impl Fn(clap::Command) -> clap::Command) -> clap::Command {
    command
        .mut_subcommand("run", change)
        .mut_subcommand("config", |config| config.mut_subcommand("dump", change))
}

/// Options that have a key in the file, in the order of the help.
fn settings(command: &clap::Command) -> Vec<Arg> {
    let run = command.find_subcommand("run").into_iter().flat_map(clap::Command::get_arguments);
    let all = command.get_arguments().filter(|arg| arg.is_global_set()).chain(run);
    let is_setting = |arg: &&Arg| {
        let id = arg.get_id().as_str();
        arg.get_long().is_some() && !JOB_OPTIONS.contains(&id) && !NO_SETTINGS.contains(&id)
    };
    all.filter(is_setting).cloned().collect()
}

/// An option's key in the file.
fn key_of(arg: &Arg) -> &str {
    let id = arg.get_id().as_str();
    if id == NODE_LANES.0 { NODE_LANES.1 } else { id }
}

/// The file's values with the options that they are for, checked one by one.
fn defaults(file: &File) -> Result<Vec<(Arg, &Entry)>, ConfigError> {
    let command = Cli::command();
    let settings = settings(&command);
    let mut found = Vec::new();
    for entry in &file.node {
        let Some(arg) = settings.iter().find(|arg| key_of(arg) == entry.key) else {
            let hint = nearest(&entry.key, settings.iter().map(key_of));
            return Err(ConfigError::UnknownKey {
                path: file.path.clone(),
                line: entry.line,
                key: entry.key.clone(),
                hint: hint.map_or_else(String::new, |key| format!("; did you mean `{key}`?")),
            });
        };
        if let Err(message) = takes(&command, arg, &entry.values) {
            return Err(ConfigError::BadSetting {
                path: file.path.clone(),
                line: entry.line,
                key: entry.key.clone(),
                message,
            });
        }
        found.push((arg.clone(), entry));
    }
    Ok(found)
}

/// Whether an option takes these values: the option itself says so, on a command line with nothing else.
fn takes(command: &clap::Command, arg: &Arg, values: &[String]) -> Result<(), String> {
    if is_flag(arg) {
        let right = matches!(values, [value] if matches!(value.as_str(), "true" | "false"));
        return if right { Ok(()) } else { Err("true or false is wanted".into()) };
    }
    if values.len() != 1 && !matches!(arg.get_action(), ArgAction::Append) {
        return Err("one value is wanted, not a list".into());
    }
    let Some(run) = command.find_subcommand("run") else { return Ok(()) };
    let globals = command.get_arguments().filter(|arg| arg.is_global_set()).cloned();
    let alone = run.clone().args(globals).mut_args(|arg| arg.env(Resettable::Reset).required(false));
    let long = arg.get_long().unwrap_or_default();
    let line = values.iter().map(|value| format!("--{long}={value}"));
    let result = alone.try_get_matches_from(std::iter::once("run".to_owned()).chain(line));
    match result {
        Err(error) if matches!(error.kind(), ErrorKind::InvalidValue | ErrorKind::ValueValidation) => {
            let text = error.to_string();
            Err(text.trim_start_matches("error: ").lines().next().unwrap_or_default().to_owned())
        }
        _ => Ok(()),
    }
}

fn is_flag(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::SetTrue | ArgAction::SetFalse)
}

/// The command line with the file's values as defaults.
fn with_defaults(command: clap::Command, defaults: &[(Arg, &Entry)]) -> clap::Command {
    let set = |mut command: clap::Command, global: bool| {
        for (arg, entry) in defaults.iter().filter(|(arg, _)| arg.is_global_set() == global) {
            command = command.mut_arg(arg.get_id().as_str(), |arg| {
                arg.required(false).default_values(entry.values.clone())
            });
        }
        command
    };
    in_both(set(command, true), &|run| set(run, false))
}

/// Checks a file as `paatp run` would, and says what is in it.
///
/// # Errors
/// The first thing that is not right.
pub fn check(path: &Path) -> Result<String, SettingsError> {
    // Only the file counts: no variables, and an interface can be named elsewhere.
    let command = || in_both(Cli::command(), &|run| run.mut_args(|arg| arg.env(Resettable::Reset)));
    let mut line: Vec<OsString> = ["paatp", "run", "--config"].map(Into::into).into();
    line.push(path.into());
    if !config::read(path)?.node.iter().any(|entry| entry.key == "iface") {
        line.extend(["--iface", "any"].map(OsString::from));
    }
    let parsed = layered(command, &line)?;
    if let Command::Run(run) = &parsed.cli.command {
        daemon::plan(run, &parsed.file)?;
    }
    let (settings, jobs) = (parsed.file.node.len(), parsed.file.jobs.len());
    Ok(format!("{}: right; settings: {settings}, jobs: {jobs}\n", path.display()))
}

/// The settings of `paatp config dump` with their origins, as a configuration file.
///
/// # Errors
/// If they do not fit together.
pub fn dump(parsed: &Parsed, run: &Run) -> Result<String, SettingsError> {
    daemon::plan(run, &parsed.file)?;
    let mut text = String::from("[node]\n");
    let command = command();
    let matches = layered_command(&parsed.matches);
    for arg in settings(&command) {
        let key = key_of(&arg);
        let values: Vec<&OsStr> = matches
            .and_then(|matches| matches.get_raw(arg.get_id().as_str()))
            .map(Iterator::collect)
            .unwrap_or_default();
        let _ = if values.is_empty() {
            writeln!(text, "# {key} is not set")
        } else {
            let source = matches.and_then(|matches| matches.value_source(arg.get_id().as_str()));
            writeln!(text, "{key} = {}  # {}", literal(&arg, &values), origin(&arg, source, &parsed.file))
        };
    }
    let from_file = parsed.file.jobs.iter().map(|job| (job.clone(), parsed.file.path.display().to_string()));
    let from_line = run.job().map(|job| (job, "command line or environment".to_owned()));
    for (job, origin) in from_file.chain(from_line) {
        let _ = write!(text, "\n# {origin}\n{}", table(&job));
    }
    Ok(text)
}

/// Values in TOML.
fn literal(arg: &Arg, values: &[&OsStr]) -> String {
    let one = |value: &&OsStr| {
        let text = value.to_string_lossy();
        if is_flag(arg) || text.parse::<u32>().is_ok() {
            text.into_owned()
        } else {
            toml::Value::String(text.into_owned()).to_string()
        }
    };
    match values {
        [value] => one(value),
        many => format!("[{}]", many.iter().map(one).collect::<Vec<_>>().join(", ")),
    }
}

fn origin(arg: &Arg, source: Option<ValueSource>, file: &File) -> String {
    match source {
        Some(ValueSource::CommandLine) => format!("flag --{}", arg.get_long().unwrap_or_default()),
        Some(ValueSource::EnvVariable) => {
            format!("environment {}", arg.get_env().unwrap_or_default().display())
        }
        _ => match file.node.iter().find(|entry| entry.key == key_of(arg)) {
            Some(entry) => format!("file {}:{}", file.path.display(), entry.line),
            None => "default".into(),
        },
    }
}

/// A job as a table.
fn table(job: &JobConfig) -> String {
    #[derive(Serialize)]
    struct Tables<'a> {
        job: [&'a JobConfig; 1],
    }
    // All of it is numbers and texts.
    toml::to_string(&Tables { job: [job] }).unwrap_or_default()
}

#[cfg(test)]
#[path = "settings_tests.rs"]
mod tests;
