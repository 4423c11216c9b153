//! Numbers and states as people read them.

use std::time::Duration;

use paatp_transport::words::{Ranks, Span};

use crate::switch::report::SwitchSnapshot;
use crate::telemetry::health::Level;
use crate::telemetry::snapshot::{AttachmentStatus, JobSnapshot, RankSnapshot, RankState, Snapshot};

/// From here on a time is told in hours, and in days; in seconds.
const HOURS: u64 = 2 * 3600;
const DAYS: u64 = 48 * 3600;

/// Three digits, a prefix and the unit: "12.3 kchunk/s".
#[must_use]
pub fn prefixed(number: f64, unit: &str) -> String {
    let (mut scaled, mut prefixes) = (number, ["", "k", "M", "G", "T", "P"].iter());
    let mut prefix = prefixes.next().unwrap_or(&"");
    while scaled.abs() >= 999.5 {
        let Some(next) = prefixes.next() else { break };
        (scaled, prefix) = (scaled / 1000.0, next);
    }
    let digits = match scaled.abs() {
        _ if prefix.is_empty() => 0,
        large if large >= 99.95 => 0,
        middle if middle >= 9.995 => 1,
        _ => 2,
    };
    format!("{scaled:.digits$} {prefix}{unit}")
}

/// Bits a second of payload, if all chunks are full.
#[must_use]
pub fn payload(chunks_per_second: f64, lanes: u16) -> String {
    prefixed(chunks_per_second * f64::from(lanes) * 32.0, "bit/s")
}

/// Memory: "14.4 MiB".
#[must_use]
pub fn bytes(number: u64) -> String {
    let mebibytes = number as f64 / f64::from(1 << 20);
    if mebibytes < 1024.0 { format!("{mebibytes:.1} MiB") } else { format!("{:.2} GiB", mebibytes / 1024.0) }
}

/// A time: "3.2 s", "3 min 20 s", "2 h 5 min", "3 d 4 h".
#[must_use]
pub fn time(seconds: f64) -> String {
    let duration = Duration::try_from_secs_f64(seconds).unwrap_or_default();
    let whole = duration.as_secs();
    match whole {
        ..HOURS => Span(duration).to_string(),
        HOURS..DAYS => format!("{} h {} min", whole / 3600, whole / 60 % 60),
        DAYS.. => format!("{} d {} h", whole / 86_400, whole / 3600 % 24),
    }
}

/// A number with its thousands apart.
#[must_use]
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// The node's health in a word or two.
#[must_use]
pub fn verdict(snapshot: &Snapshot) -> &'static str {
    match snapshot.health.level {
        Level::Well => "all is well",
        Level::Notice if snapshot.node.draining => "drained",
        Level::Notice => "running",
        Level::Trouble => "needs a look",
    }
}

/// How the XDP program is there: loaded, attached, held by what, and pinned: whether it outlives a kill of the aggregator.
#[must_use]
pub fn attachment(status: &AttachmentStatus) -> String {
    let AttachmentStatus { interface, mode, held_by, program, pinned, notices: _ } = status;
    let program = if *program == 0 { String::new() } else { format!(" {program}") };
    if mode.is_empty() {
        return format!("program{program} loaded, not attached");
    }
    let pinned = pinned.as_ref().map_or("not pinned".to_owned(), |path| format!("pinned at {path}"));
    format!("program{program} loaded, attached to {interface} in {mode} mode, held by {held_by}, {pinned}")
}

/// How the switch does, a line for it and for each job that is not on it.
#[must_use]
pub fn switch(switch: &SwitchSnapshot) -> String {
    let on = switch.jobs.iter().filter(|job| job.absent.is_none()).count();
    let share = match switch.added.share() {
        Some(share) => {
            format!("{:.0} % of {}", 100.0 * share, count(switch.added.by_switch + switch.added.by_xdp))
        }
        None => "none".into(),
    };
    let state = if switch.state.is_up() { "in use" } else { "not in use" };
    let jobs = switch.jobs.len();
    let mut text = format!(
        "switch {}: {state}; {on} of {jobs} jobs that run on it; contributions that it added: {share}\n",
        switch.address
    );
    for (name, why) in switch.jobs.iter().filter_map(|job| Some((&job.name, job.absent.as_ref()?))) {
        text.push_str(&format!("  `{name}` is not on it: {why}\n"));
    }
    text
}

/// Whom a job waits for, and for how long.
#[must_use]
pub fn waits_for(job: &JobSnapshot) -> Option<String> {
    let stall = job.stall.as_ref()?;
    Some(format!("{}, {}", Ranks(&stall.missing_ranks), time(stall.seconds)))
}

/// The chunk that a job waits for.
#[must_use]
pub fn open_slot(job: &JobSnapshot) -> Option<String> {
    let open = job.oldest_open_slot.as_ref()?;
    Some(format!(
        "chunk {} is open for {}: it has {}, it lacks {}",
        count(open.chunk.into()),
        time(open.age_seconds),
        Ranks(&open.contributors),
        Ranks(&open.missing_ranks)
    ))
}

/// Whether the job is held up by a rank.
#[must_use]
pub fn is_held_by(job: &JobSnapshot, rank: &RankSnapshot) -> bool {
    job.stall.as_ref().is_some_and(|stall| stall.missing_ranks.contains(&rank.rank))
}

/// How a rank does.
#[must_use]
pub fn rank(job: &JobSnapshot, rank: &RankSnapshot) -> String {
    match rank.state {
        RankState::Absent => "not there".into(),
        RankState::Missing => "missing: others wait for it to join".into(),
        RankState::Waiting => "waits for others to join".into(),
        RankState::Left => "done".into(),
        RankState::Lost => "lost: held the others up for too long".into(),
        RankState::Member if is_held_by(job, rank) => {
            let seconds = rank.in_the_way_seconds.or(job.stall.as_ref().map(|stall| stall.seconds));
            format!("the others wait for it, {}", time(seconds.unwrap_or(0.0)))
        }
        RankState::Member if rank.straggler => "far behind, the others wait".into(),
        RankState::Member => "takes part".into(),
    }
}

/// Ranks in the order in which they matter: those that the others wait for first.
#[must_use]
pub fn by_need(job: &JobSnapshot) -> Vec<&RankSnapshot> {
    let mut ranks: Vec<_> = job.ranks.iter().collect();
    ranks.sort_by_key(|rank| (!is_held_by(job, rank), !rank.straggler, rank.rank));
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits() {
        let cases = [
            (0.0, "0 chunk/s"),
            (7.4, "7 chunk/s"),
            (999.4, "999 chunk/s"),
            (999.6, "1.00 kchunk/s"),
            (12_340.0, "12.3 kchunk/s"),
            (123_400.0, "123 kchunk/s"),
            (999_600.0, "1.00 Mchunk/s"),
            (1e20, "100000 Pchunk/s"),
        ];
        for (number, words) in cases {
            assert_eq!(prefixed(number, "chunk/s"), words);
        }
        assert_eq!(payload(100_000.0, 352), "1.13 Gbit/s");
        assert_eq!((bytes(15_099_494), bytes(3 << 29)), ("14.4 MiB".into(), "1.50 GiB".into()));
        assert_eq!((count(0), count(999), count(1_234_567)), ("0".into(), "999".into(), "1,234,567".into()));
    }

    #[test]
    fn times_are_as_people_say_them() {
        let cases = [
            (0.04, "40 ms"),
            (3.24, "3.2 s"),
            (200.0, "3 min 20 s"),
            (7_500.0, "2 h 5 min"),
            (273_600.0, "3 d 4 h"),
            (f64::NAN, "0 µs"),
            (-1.0, "0 µs"),
        ];
        for (seconds, words) in cases {
            assert_eq!(time(seconds), words, "{seconds}");
        }
    }
}
