//! What others see of a switch: one report, written by its keeper, read by status page, `paatp status` and metrics without
//! waiting for the switch.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use paatp_common::counter::{Counters, Event};
use paatp_common::switch::Count;
use serde::{Deserialize, Serialize};
use tracing::{info, warn};
use utoipa::ToSchema;

use super::error::{SwitchError, SwitchState};

/// A job that runs, and the switch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobOnSwitch {
    /// Its name.
    pub name: String,
    /// Its number on the aggregator.
    pub number: u16,
    /// Ranks whose contributions the switch adds; none if the job is not on it.
    pub ranks: Vec<u8>,
    /// Why it is not on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub absent: Option<String>,
}

/// The switch at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SwitchSnapshot {
    /// Its P4Runtime server.
    pub address: String,
    /// How it does.
    pub state: SwitchState,
    /// For how long, in seconds.
    pub state_seconds: f64,
    /// Why it is not up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Time since its tables were last read, in seconds; absent if they never were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contact_age_seconds: Option<f64>,
    /// Entries and groups of ours in its tables, when they were last read.
    pub entries: u64,
    /// Changes that it refused.
    pub refused_changes: u64,
    /// Entries and groups that were missing or changed although nobody had asked for that, and were put right.
    pub repaired_entries: u64,
    /// What it counted, by name, when it was last asked. Begins anew with the switch.
    pub counters: BTreeMap<String, u64>,
    /// Contributions that the switch added, and those that the XDP program added one by one.
    pub added: Added,
    /// The jobs that run.
    pub jobs: Vec<JobOnSwitch>,
}

/// Who added contributions, each alone. A switch may have added some of which nothing came: what it loses is sent again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Added {
    /// The switch.
    pub by_switch: u64,
    /// The XDP program.
    pub by_xdp: u64,
}

impl Added {
    /// Of what both counted.
    #[must_use]
    pub fn of(switch: &[u64; Count::COUNT], node: &Counters) -> Added {
        let taken = node.noted(Event::Stores) + node.noted(Event::Adds);
        Added {
            by_switch: switch[Count::Stored as usize] + switch[Count::Added as usize],
            by_xdp: taken.saturating_sub(node.noted(Event::Sums)),
        }
    }

    /// The switch's part, if there is anything.
    #[must_use]
    pub fn share(self) -> Option<f64> {
        let all = self.by_switch.saturating_add(self.by_xdp);
        (all > 0).then(|| self.by_switch as f64 / all as f64)
    }
}

/// What came of one look at the switch's tables.
#[derive(Clone, Debug, Default)]
pub struct Round {
    /// Entries and groups in its tables.
    pub entries: usize,
    /// Changes that were made for no change of ours.
    pub repaired: usize,
    /// Changes that it refused.
    pub refused: usize,
    /// What it counted.
    pub counts: [u64; Count::COUNT],
    /// The jobs that run.
    pub jobs: Vec<JobOnSwitch>,
}

struct Inner {
    state: SwitchState,
    since: Instant,
    why: Option<String>,
    contact: Option<Instant>,
    entries: usize,
    refused: u64,
    repaired: u64,
    counts: [u64; Count::COUNT],
    jobs: Vec<JobOnSwitch>,
}

/// The report. Cheap to clone.
#[derive(Clone)]
pub struct Report {
    address: String,
    inner: Arc<Mutex<Inner>>,
}

impl Report {
    /// Of a switch that nobody has spoken to yet.
    #[must_use]
    pub fn new(address: String) -> Report {
        let inner = Inner {
            state: SwitchState::Connecting,
            since: Instant::now(),
            why: None,
            contact: None,
            entries: 0,
            refused: 0,
            repaired: 0,
            counts: [0; Count::COUNT],
            jobs: Vec::new(),
        };
        Report { address, inner: Arc::new(Mutex::new(inner)) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Held for assignments only.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tables were read, and put right as far as the switch let them.
    pub fn looked(&self, round: Round, error: Option<&SwitchError>) {
        let address = &self.address;
        {
            let mut inner = self.lock();
            inner.contact = Some(Instant::now());
            inner.entries = round.entries;
            inner.repaired += round.repaired as u64;
            inner.refused += round.refused as u64;
            inner.counts = round.counts;
            inner.jobs = round.jobs;
        }
        if round.repaired > 0 {
            warn!(
                switch = address,
                "{} entries were not as they had been written, and are again: was it started again, or its tables changed?",
                round.repaired
            );
        }
        self.is_now(error.map_or(SwitchState::Up, SwitchError::state), error);
    }

    /// The session has ended, or none could begin.
    pub fn failed(&self, error: &SwitchError) {
        for job in &mut self.lock().jobs {
            job.ranks.clear();
            job.absent.get_or_insert_with(|| "the switch is not in use".into());
        }
        self.is_now(error.state(), Some(error));
    }

    /// Tells changes of state, once each.
    fn is_now(&self, state: SwitchState, error: Option<&SwitchError>) {
        let (address, why) = (&self.address, error.map(ToString::to_string));
        let mut inner = self.lock();
        let is_new = inner.state != state;
        inner.why.clone_from(&why);
        if !is_new {
            return;
        }
        (inner.state, inner.since) = (state, Instant::now());
        let entries = inner.entries;
        drop(inner);
        match why {
            None => info!(switch = address, entries, "up: jobs are put on it"),
            Some(why) if state == SwitchState::Refusing => warn!(switch = address, "{why}"),
            Some(why) => warn!(switch = address, "not in use, jobs go on over XDP: {why}"),
        }
    }

    /// How it does.
    #[must_use]
    pub fn state(&self) -> SwitchState {
        self.lock().state
    }

    /// What it counted.
    #[must_use]
    pub fn counts(&self) -> [u64; Count::COUNT] {
        self.lock().counts
    }

    /// Everything, beside what the aggregator counted.
    #[must_use]
    pub fn snapshot(&self, node: &Counters) -> SwitchSnapshot {
        let (now, inner) = (Instant::now(), self.lock());
        let seconds = |since: Instant| now.saturating_duration_since(since).as_secs_f64();
        let count = |what: &Count| (what.name().to_owned(), inner.counts[*what as usize]);
        SwitchSnapshot {
            address: self.address.clone(),
            state: inner.state,
            state_seconds: seconds(inner.since),
            why: inner.why.clone(),
            contact_age_seconds: inner.contact.map(seconds),
            entries: inner.entries as u64,
            refused_changes: inner.refused,
            repaired_entries: inner.repaired,
            counters: Count::ALL.iter().map(count).collect(),
            added: Added::of(&inner.counts, node),
            jobs: inner.jobs.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_adds_its_own() {
        let mut counts = [0; Count::COUNT];
        counts[Count::Stored as usize] = 10;
        counts[Count::Added as usize] = 30;
        let mut node = Counters::default();
        for (event, times) in [(Event::Stores, 12), (Event::Adds, 8), (Event::Sums, 10)] {
            (0..times).for_each(|_| node.note(event));
        }
        let added = Added::of(&counts, &node);
        assert_eq!((added, added.share()), (Added { by_switch: 40, by_xdp: 10 }, Some(0.8)));
        assert_eq!(Added::default().share(), None);
    }

    #[test]
    fn states_follow_what_was_heard() {
        let report = Report::new("10.0.0.9:9559".into());
        assert_eq!(report.state(), SwitchState::Connecting);
        report.failed(&SwitchError::NoProgram);
        let told = report.snapshot(&Counters::default());
        assert_eq!((told.state, told.contact_age_seconds), (SwitchState::WrongProgram, None));
        assert!(told.why.is_some_and(|why| why.contains("--switch-pipeline")));
        let round = Round { entries: 7, repaired: 2, refused: 1, ..Round::default() };
        report.looked(round.clone(), Some(&SwitchError::Writes { refused: 1, all: 3, first: "no".into() }));
        report.looked(round, None);
        let told = report.snapshot(&Counters::default());
        assert_eq!((told.state, told.why, told.entries), (SwitchState::Up, None, 7));
        assert_eq!((told.repaired_entries, told.refused_changes), (4, 2));
    }
}
