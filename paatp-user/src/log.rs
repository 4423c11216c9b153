//! What is logged, and how: text for people, JSON for collectors. Always on standard error.
//!
//! Levels: *error*, somebody must act; *warn*, it goes on, but worse than it should, told once for each cause; *info*, the
//! life of daemon, jobs and ranks; *debug*, decisions in between. Nothing is logged for a packet, at any level.

use std::io::{self, IsTerminal, Write};

use anyhow::{Context, Error};
use clap::{Args, ValueEnum};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt};

/// How logs are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For `run` text on a terminal and JSON elsewhere; for the others text.
    #[default]
    Auto,
    /// A line for people; coloured on a terminal, unless NO_COLOR is set.
    Text,
    /// One JSON object a line: timestamp, level, target, fields.
    Json,
}

/// Options of every command.
#[derive(Clone, Debug, Default, Args)]
pub struct LogArgs {
    /// What to log on standard error: `error`, `warn`, `info`, `debug`, or by module as in `paatp_user=debug`
    /// [default: info for `run`, warn for the others].
    #[arg(
        long,
        global = true,
        env = "PAATP_LOG",
        hide_env_values = true,
        value_name = "FILTER",
        display_order = 900
    )]
    pub log: Option<String>,
    /// How to log.
    #[arg(
        long,
        global = true,
        env = "PAATP_LOG_FORMAT",
        hide_env_values = true,
        value_enum,
        default_value = "auto",
        value_name = "FORMAT",
        display_order = 901
    )]
    pub log_format: LogFormat,
}

/// Who logs: a daemon, whose log is collected, or a command, whose messages are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speaker {
    /// `paatp run`.
    Daemon,
    /// Everything else.
    Command,
}

impl Speaker {
    /// Filter unless told otherwise: life-cycle for the daemon, only trouble for a command.
    const fn filter(self) -> &'static str {
        match self {
            Speaker::Daemon => "info",
            Speaker::Command => "warn",
        }
    }
}

/// The form that `auto` turns into.
fn chosen(format: LogFormat, speaker: Speaker, terminal: bool) -> LogFormat {
    match (format, speaker) {
        (LogFormat::Auto, Speaker::Daemon) if !terminal => LogFormat::Json,
        (LogFormat::Auto, _) => LogFormat::Text,
        (other, _) => other,
    }
}

/// Standard error goes to systemd's journal, which has its own clock.
fn to_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let own = nix::sys::stat::fstat(io::stderr());
    own.is_ok_and(|stat| stream == format!("{}:{}", stat.st_dev, stat.st_ino))
}

/// Starts the log. Returns what the last words of this process are to be said in.
///
/// # Errors
/// If the filter is none.
pub fn start(args: &LogArgs, speaker: Speaker) -> Result<LogFormat, Error> {
    let filter = args.log.as_deref().unwrap_or(speaker.filter());
    let filter = EnvFilter::builder().parse(filter).with_context(|| {
        format!("--log {filter} is no filter; write for example info or paatp_user=debug")
    })?;
    let terminal = io::stderr().is_terminal();
    let colour = terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let format = chosen(args.log_format, speaker, terminal);
    let layer: Box<dyn Layer<Registry> + Send + Sync> = match format {
        LogFormat::Json => fmt::layer().json().with_writer(io::stderr).with_filter(filter).boxed(),
        LogFormat::Auto | LogFormat::Text => {
            let text = fmt::layer().with_writer(io::stderr).with_ansi(colour).with_target(false);
            if to_journal() {
                text.without_time().with_filter(filter).boxed()
            } else {
                text.with_filter(filter).boxed()
            }
        }
    };
    tracing_subscriber::registry().with(layer).init();
    Ok(format)
}

/// Tells an error and its causes, whatever the filter: one a line, or one JSON object.
pub fn tell(error: &Error, format: LogFormat) {
    let mut causes: Vec<String> = Vec::new();
    let mut last = error.to_string();
    for cause in error.chain().skip(1) {
        let text = cause.to_string();
        // Some libraries repeat their cause in their own words.
        if !last.contains(&text) {
            causes.push(text.clone());
        }
        last = text;
    }
    let mut out = io::stderr().lock();
    // Whoever closed standard error does not want it.
    let _ = match format {
        LogFormat::Json => writeln!(out, "{}", record(&error.to_string(), &causes)),
        LogFormat::Auto | LogFormat::Text => writeln!(out, "error: {error}")
            .and_then(|()| causes.iter().try_for_each(|text| writeln!(out, "  cause: {text}"))),
    };
}

/// An error in the shape of the log's objects.
fn record(message: &str, causes: &[String]) -> serde_json::Value {
    let mut timestamp = String::new();
    // Writing to a text cannot fail.
    let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp));
    let mut fields = serde_json::json!({ "message": message });
    if !causes.is_empty() {
        fields["causes"] = causes.into();
    }
    serde_json::json!({ "timestamp": timestamp, "level": "ERROR", "fields": fields, "target": "paatp" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_is_json_for_a_daemon_without_a_terminal() {
        use LogFormat::{Auto, Json, Text};
        assert_eq!(chosen(Auto, Speaker::Daemon, false), Json);
        assert_eq!(chosen(Auto, Speaker::Daemon, true), Text);
        assert_eq!(chosen(Auto, Speaker::Command, false), Text);
        assert_eq!(
            (chosen(Text, Speaker::Daemon, false), chosen(Json, Speaker::Command, true)),
            (Text, Json)
        );
    }

    #[test]
    fn errors_are_records_like_the_others() {
        let record = record("cannot", &["why\nso".to_owned()]);
        assert_eq!((&record["level"], &record["target"]), (&"ERROR".into(), &"paatp".into()));
        assert_eq!(record["fields"]["message"], "cannot");
        assert_eq!(record["fields"]["causes"][0], "why\nso");
        assert!(record["timestamp"].as_str().is_some_and(|time| time.ends_with('Z')), "{record}");
        assert!(!record.to_string().contains('\n'));
    }
}
