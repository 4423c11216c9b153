//! `paatp status`: the node on standard output, once or every second.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use nix::sys::signal::{SigSet, Signal};
use serde_json::Error as JsonError;
use thiserror::Error;

use crate::client::job::{JobError, job_sync_in_words, state_in_words};
use crate::client::table::columns;
use crate::exit::Exit;
use crate::telemetry::health::Level;
use crate::telemetry::snapshot::{JobSnapshot, RankSnapshot, Snapshot};

use super::{Eyes, Target, words};

/// Time between two looks of `--watch`.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// To the upper left corner, and clears from there.
const CLEAR: &str = "\x1b[H\x1b[J";

/// After the options of `paatp status`.
pub const AFTER_HELP: &str = "\
One line says how the node does, then what needs a look, all jobs, and the ranks of those that run. Whoever is waited \
for comes first.

Example:
  paatp status
  paatp status train --watch
  paatp status --json | jq '.jobs[] | select(.stall) | .stall.sentence'

Exit status: 0 the aggregator answers and all is well (drained is well), 1 nobody answers or there is no such job, 2 it \
was called wrongly, 6 the aggregator answers and something needs a look: ranks that hold a job up for longer than a \
second, lost ranks, tables that cannot be read. With --watch 0, ended by Ctrl-C.";

/// `paatp status`
#[derive(Clone, Debug, Args)]
pub struct Status {
    /// Show this job only.
    pub job: Option<String>,
    /// Print what the aggregator says as JSON, with a `schema_version`.
    #[arg(long, conflicts_with = "watch")]
    pub json: bool,
    /// Look again every second, until Ctrl-C.
    #[arg(long)]
    pub watch: bool,
    /// Where to look.
    #[command(flatten)]
    pub target: Target,
}

/// Nothing can be shown.
#[derive(Debug, Error)]
pub enum StatusError {
    /// The aggregator.
    #[error(transparent)]
    Aggregator(#[from] JobError),
    /// It has no such job.
    #[error("the aggregator at {aggregator} has no job `{job}`; it has {}", list(.known))]
    UnknownJob {
        /// Where.
        aggregator: String,
        /// The job.
        job: String,
        /// All jobs.
        known: Vec<String>,
    },
    /// What cannot happen with these types.
    #[error("the answer cannot be written as JSON")]
    Json(#[from] JsonError),
    /// Signals.
    #[error("cannot take over signals")]
    Signals(#[from] nix::Error),
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

/// Runs the command.
///
/// # Errors
/// If nothing can be shown.
pub fn run(args: &Status) -> Result<ExitCode, StatusError> {
    let eyes = Eyes::open(&args.target)?;
    if args.watch {
        return watch(args, &eyes);
    }
    let snapshot = look(args, &eyes)?;
    let text = if args.json {
        serde_json::to_string_pretty(&snapshot)? + "\n"
    } else {
        in_words(&snapshot, &eyes.place(), args.job.is_some())
    };
    // Whoever closed standard output does not want it.
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
    let exit = if snapshot.health.level == Level::Trouble { Exit::Trouble } else { Exit::Success };
    Ok(exit.into())
}

fn look(args: &Status, eyes: &Eyes) -> Result<Snapshot, StatusError> {
    let mut snapshot = eyes.snapshot()?;
    if let Some(name) = &args.job {
        narrow(&mut snapshot, name).map_err(|known| StatusError::UnknownJob {
            aggregator: eyes.place(),
            job: name.clone(),
            known,
        })?;
    }
    Ok(snapshot)
}

/// Leaves one job, and what is about it or about the node. Returns all names if it is none of them.
fn narrow(snapshot: &mut Snapshot, name: &str) -> Result<(), Vec<String>> {
    if !snapshot.jobs.iter().any(|job| job.status.name == name) {
        return Err(snapshot.jobs.iter().map(|job| job.status.name.clone()).collect());
    }
    snapshot.jobs.retain(|job| job.status.name == name);
    snapshot.health.keep(|notice| notice.job.as_deref().is_none_or(|job| job == name));
    Ok(())
}

/// Looks until a signal.
fn watch(args: &Status, eyes: &Eyes) -> Result<ExitCode, StatusError> {
    end_by_signal()?;
    let mut last: Option<(String, Instant)> = None;
    loop {
        let begin = Instant::now();
        let text = match look(args, eyes) {
            Ok(snapshot) => {
                let text = in_words(&snapshot, &eyes.place(), args.job.is_some());
                last = Some((text.clone(), Instant::now()));
                text
            }
            Err(error) => silence(&error, last.as_ref().map(|(text, at)| (text.as_str(), at.elapsed()))),
        };
        let mut out = std::io::stdout().lock();
        let lead = if out.is_terminal() { CLEAR } else { "" };
        if writeln!(out, "{lead}{text}").and_then(|()| out.flush()).is_err() {
            return Ok(ExitCode::SUCCESS);
        }
        drop(out);
        std::thread::sleep(LOOK_INTERVAL.saturating_sub(begin.elapsed()));
    }
}

/// What is shown while nobody answers: that first, then what was known.
fn silence(error: &StatusError, last: Option<(&str, Duration)>) -> String {
    let known = match last {
        Some((text, age)) => format!("What follows is {} old.\n\n{text}", words::time(age.as_secs_f64())),
        None => String::new(),
    };
    format!("No answer: {error}. Asking again every second.\n{known}")
}

/// SIGINT and SIGTERM end the process with status 0, whatever it waits for.
fn end_by_signal() -> Result<(), nix::Error> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGINT);
    signals.add(Signal::SIGTERM);
    signals.thread_block()?;
    std::thread::spawn(move || {
        if signals.wait().is_ok() {
            let _ = std::io::stdout().lock().flush();
            std::process::exit(0);
        }
    });
    Ok(())
}

/// Everything, for people. `one` if it was asked for one job.
#[must_use]
pub fn in_words(snapshot: &Snapshot, place: &str, one: bool) -> String {
    let node = &snapshot.node;
    let bytes = |slots: u32| words::bytes(u64::from(slots) * u64::from(node.slot_bytes));
    let in_use = snapshot.slots_in_use.map_or("not counted".into(), |used| words::count(used.into()));
    let mut text = format!(
        "paatp {} at {place}: {}\n{}; up for {}\n{} of {} jobs, {} run; {} of {} given to jobs; slots in use: {in_use}\n",
        snapshot.build.version,
        words::verdict(snapshot),
        words::attachment(&snapshot.attachment),
        words::time(snapshot.uptime_seconds),
        node.jobs,
        node.max_jobs,
        node.running_jobs,
        bytes(node.slots - node.free_slots.min(node.slots)),
        bytes(node.slots),
    );
    if let Some(switch) = &snapshot.switch {
        text.push_str(&words::switch(switch));
    }
    if !snapshot.health.notices.is_empty() {
        text.push('\n');
    }
    for notice in &snapshot.health.notices {
        let mark = if notice.level == Level::Trouble { '!' } else { '-' };
        text.push_str(&format!("{mark} {}\n", notice.sentence));
    }
    text.push('\n');
    if snapshot.jobs.is_empty() {
        text.push_str("no job; create one with `paatp job create NAME --world N`\n");
        return text;
    }
    text.push_str(&jobs(snapshot));
    let shown =
        snapshot.jobs.iter().filter(|job| one || job.status.generation.is_some() || job.stall.is_some());
    for job in shown {
        text.push('\n');
        text.push_str(&ranks(job));
    }
    text
}

fn jobs(snapshot: &Snapshot) -> String {
    let row = |job: &JobSnapshot| {
        let status = &job.status;
        [
            status.name.clone(),
            state_in_words(status.state).into(),
            status.world.to_string(),
            words::prefixed(job.chunks_per_second, "chunk/s"),
            words::payload(job.chunks_per_second, status.lanes),
            words::count(job.lag_chunks.into()),
            words::waits_for(job).unwrap_or("-".into()),
        ]
    };
    let rows: Vec<_> = snapshot.jobs.iter().map(row).collect();
    columns(["JOB", "STATE", "RANKS", "RESULTS", "PAYLOAD", "BEHIND", "WAITS FOR"], &rows)
}

fn ranks(job: &JobSnapshot) -> String {
    let status = &job.status;
    let generation =
        status.generation.map_or("no generation".into(), |number| format!("generation {number}"));
    let mut text = format!("{}, {generation}; results wait for {}\n", status.name, job_sync_in_words(status));
    for line in [job.stall.as_ref().map(|stall| stall.sentence.clone()), words::open_slot(job)] {
        text.extend(line.map(|line| format!("{line}\n")));
    }
    let row = |rank: &&RankSnapshot| {
        [
            rank.rank.to_string(),
            words::rank(job, rank),
            rank.address.clone().unwrap_or("-".into()),
            words::prefixed(rank.chunks_per_second, "chunk/s"),
            words::count(rank.contributed),
            words::count(rank.lag_chunks.into()),
            words::count(rank.busy),
            words::count(rank.marks),
        ]
    };
    let rows: Vec<_> = words::by_need(job).iter().map(row).collect();
    let header = ["RANK", "STATE", "ADDRESS", "THROUGHPUT", "CONTRIBUTED", "BEHIND", "BUSY", "ECN"];
    text.push_str(&columns(header, &rows));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::look::sample;

    #[test]
    fn whoever_is_waited_for_comes_first() {
        let text = in_words(&sample::node(), "127.0.0.1:20545", false);
        let expected = "\
paatp 0.1.0 at 127.0.0.1:20545: needs a look
program 123 loaded, attached to eth0 in native mode, held by bpf_link, not pinned; up for 2 h 5 min
3 of 64 jobs, 2 run; 1.1 MiB of 92.0 MiB given to jobs; slots in use: 66

! job `train` waits for contributions of rank 2 for 3.2 s, 64 chunks behind

JOB    STATE    RANKS  RESULTS        PAYLOAD     BEHIND  WAITS FOR
train  running  4      0 chunk/s      0 bit/s     64      rank 2, 3.2 s
eval   running  2      12.3 kchunk/s  139 Mbit/s  0       -
idle   idle     8      0 chunk/s      0 bit/s     0       -

train, generation 77; results wait for all ranks (bsp)
job `train` waits for contributions of rank 2 for 3.2 s, 64 chunks behind
chunk 4,711 is open for 3.2 s: it has ranks 0, 1 and 3, it lacks rank 2
RANK  STATE                          ADDRESS   THROUGHPUT  CONTRIBUTED  BEHIND  BUSY  ECN
2     the others wait for it, 3.2 s  10.0.0.2  0 chunk/s   4,800,000    64      7     0
0     takes part                     10.0.0.0  0 chunk/s   4,800,000    0       7     0
1     takes part                     10.0.0.1  0 chunk/s   4,800,000    0       7     0
3     takes part                     10.0.0.3  0 chunk/s   4,800,000    0       7     0

eval, generation 77; results wait for all ranks (bsp)
RANK  STATE       ADDRESS   THROUGHPUT     CONTRIBUTED  BEHIND  BUSY  ECN
0     takes part  10.0.1.0  12.3 kchunk/s  4,800,000    0       7     0
1     takes part  10.0.1.1  12.3 kchunk/s  4,800,000    0       7     0
";
        assert_eq!(text, expected);
    }

    #[test]
    fn one_job_has_its_own_health() {
        let mut snapshot = sample::node();
        assert!(narrow(&mut snapshot, "eval").is_ok());
        assert_eq!((snapshot.jobs.len(), snapshot.health.level), (1, Level::Well));
        assert!(snapshot.health.notices.is_empty());
        let mut snapshot = sample::node();
        assert!(narrow(&mut snapshot, "train").is_ok());
        assert_eq!(snapshot.health.level, Level::Trouble);
        assert_eq!(
            narrow(&mut sample::node(), "no"),
            Err(vec!["train".into(), "eval".into(), "idle".into()])
        );
        // A job that does not run is told with its ranks if it was asked for.
        let mut snapshot = sample::node();
        assert!(narrow(&mut snapshot, "idle").is_ok());
        assert!(in_words(&snapshot, "x", true).contains("7     not there"));
        assert!(!in_words(&sample::node(), "x", false).contains("not there"));
    }

    #[test]
    fn silence_shows_what_was_known_and_its_age() {
        let error = StatusError::UnknownJob { aggregator: "a".into(), job: "j".into(), known: vec![] };
        let first =
            "No answer: the aggregator at a has no job `j`; it has none. Asking again every second.\n";
        assert_eq!(silence(&error, None), first);
        let later = silence(&error, Some(("paatp …", Duration::from_secs(75))));
        assert_eq!(later, format!("{first}What follows is 75 s old.\n\npaatp …"));
    }
}
