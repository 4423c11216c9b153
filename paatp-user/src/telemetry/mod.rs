//! What can be seen of a running aggregator: one [`Snapshot`] for everybody who looks, and the last minutes.
//!
//! Whoever looks takes the control plane's facts under its lock (a copy, no system call), then reads the tables without
//! any lock ([`read`]), then adds what only time tells ([`ledger`]). The core loop does the same four times a second, so
//! that totals survive wraps and the times of standstills are known.

pub mod health;
pub mod history;
pub mod ledger;
pub mod metrics;
pub mod read;
pub mod snapshot;
pub mod stall;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use paatp_common::counter::Counters;
use paatp_common::job::JobEntry;
use paatp_common::progress::RankRecord;
use paatp_common::seq::Seq;
use paatp_common::slot::Slot;

use crate::control::membership::{Facts, JobFacts};
use crate::control::protocol::CounterReport;
use crate::engine::EngineError;
use crate::switch::report::Report;

use health::Health;
use history::Series;
use ledger::{JobLedger, Ledger};
use read::{Reading, View};
use snapshot::{
    AttachmentStatus, Build, JobSnapshot, OpenSlot, RankSnapshot, RankState, SCHEMA_VERSION, Snapshot,
};

/// What does not change while the aggregator runs.
#[derive(Clone, Debug, Default)]
pub struct Identity {
    /// What it was built from.
    pub build: Build,
    /// Where its program is.
    pub attachment: AttachmentStatus,
}

/// Sees the tables, keeps totals and times. Cheap to clone.
#[derive(Clone)]
pub struct Telemetry(Arc<Shared>);

struct Shared {
    view: Box<dyn View>,
    identity: Identity,
    start: Instant,
    /// When the core loop last went round, in microseconds since `start`.
    turned: AtomicU64,
    ledger: Mutex<Ledger>,
    switch: OnceLock<Report>,
}

impl Telemetry {
    /// Sees through `view`.
    #[must_use]
    pub fn new(view: Box<dyn View>, identity: Identity) -> Telemetry {
        let (start, turned) = (Instant::now(), AtomicU64::new(0));
        Telemetry(Arc::new(Shared {
            view,
            identity,
            start,
            turned,
            ledger: Mutex::default(),
            switch: OnceLock::new(),
        }))
    }

    /// Sees blank tables.
    #[must_use]
    pub fn blind() -> Telemetry {
        Telemetry::new(Box::new(Blank), Identity::default())
    }

    /// Sees a switch as well. Only the first counts.
    #[must_use]
    pub fn with_switch(self, report: Option<Report>) -> Telemetry {
        if let Some(report) = report {
            let _ = self.0.switch.set(report);
        }
        self
    }

    /// The switch in front of the aggregator, if there is one.
    #[must_use]
    pub fn switch(&self) -> Option<&Report> {
        self.0.switch.get()
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // Held for arithmetic only. Whatever panicked in between left whole numbers.
        self.0.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The core loop went round: takes in where everybody stands. To be called a few times a second.
    pub fn observe(&self, now: Instant, facts: &[JobFacts]) {
        let (readings, _) = read::read(&*self.0.view, facts, false);
        let since_start = now.saturating_duration_since(self.0.start);
        let mut ledger = self.ledger();
        ledger.observe(now, facts, &readings);
        ledger.sample(since_start);
        let micros = u64::try_from(since_start.as_micros()).unwrap_or(u64::MAX);
        self.0.turned.store(micros, Ordering::Relaxed);
    }

    /// A job's entry was written, so that its last generation may be over: takes in how far that came.
    pub fn settle(&self, number: u16, entry: &JobEntry) {
        let generation = self.ledger().generation(number);
        if generation == 0 {
            return;
        }
        let old = JobEntry { generation, ..*entry };
        // What cannot be read now is missing in the totals; the loop says why tables cannot be read.
        if let Ok(records) = self.0.view.records(number, &old) {
            self.ledger().settle(number, generation, entry.expected, &records);
        }
    }

    /// A generation was written to the tables, and nobody knows yet.
    pub fn begin(&self, name: &str, number: u16, entry: &JobEntry) {
        self.settle(number, entry);
        self.ledger().begin(number, name, entry.world, entry.generation);
    }

    /// How long ago the core loop last went round.
    #[must_use]
    pub fn core_age(&self, now: Instant) -> Duration {
        let turned = Duration::from_micros(self.0.turned.load(Ordering::Relaxed));
        now.saturating_duration_since(self.0.start + turned)
    }

    /// The last minutes of a job, from sample `since` on.
    #[must_use]
    pub fn series(&self, job: &JobFacts, since: u64) -> Series {
        let ledger = self.ledger();
        let (name, lanes) = (job.status.name.as_str(), job.status.lanes);
        let found = ledger.named(name).map(|job| job.history().series(name, lanes, since));
        found.unwrap_or_else(|| history::History::default().series(name, lanes, since))
    }

    /// What does not change.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.0.identity
    }

    /// The tables.
    #[must_use]
    pub fn view(&self) -> &dyn View {
        &*self.0.view
    }

    /// All jobs at this moment, and what could not be read of them. Reads tables, up to tens of thousands of slots: not
    /// for the core loop.
    #[must_use]
    pub fn jobs(&self, facts: &Facts) -> (Vec<JobSnapshot>, Vec<String>) {
        let (readings, problems) = read::read(self.view(), &facts.jobs, true);
        let now = Instant::now();
        let mut ledger = self.ledger();
        ledger.observe(now, &facts.jobs, &readings);
        let job = |facts: &JobFacts| {
            let reading = readings.iter().find(|reading| reading.number == facts.status.job);
            ledger.job(facts.status.job).map(|ledger| job_snapshot(now, facts, reading, ledger))
        };
        (facts.jobs.iter().filter_map(job).collect(), problems)
    }

    /// Everything at this moment. Reads tables, up to tens of thousands of slots: not for the core loop.
    #[must_use]
    pub fn snapshot(&self, facts: &Facts) -> Snapshot {
        let Shared { view, identity, start, .. } = &*self.0;
        let (jobs, mut problems) = self.jobs(facts);
        let counters = view.counters().unwrap_or_else(|cause| {
            problems.push(format!("counters: {cause}"));
            Counters::default()
        });
        let (now, unix) = (Instant::now(), SystemTime::now());
        let unix = unix.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mut snapshot = Snapshot {
            schema_version: SCHEMA_VERSION,
            unix_seconds: unix.as_secs_f64(),
            uptime_seconds: now.saturating_duration_since(*start).as_secs_f64(),
            core_age_seconds: self.core_age(now).as_secs_f64(),
            build: identity.build.clone(),
            attachment: AttachmentStatus { notices: view.notices(), ..identity.attachment.clone() },
            node: facts.node.clone(),
            slots_in_use: jobs.iter().map(|job| job.slots_in_use).sum(),
            counters: CounterReport::of(&counters),
            switch: self.switch().map(|report| report.snapshot(&counters)),
            jobs,
            problems,
            health: Health::default(),
        };
        snapshot.health = health::judge(&snapshot);
        snapshot
    }
}

fn job_snapshot(
    now: Instant,
    facts: &JobFacts,
    reading: Option<&Reading>,
    ledger: &JobLedger,
) -> JobSnapshot {
    let JobFacts { status, entry, addresses } = facts;
    let expected = if status.generation.is_some() { entry.expected } else { 0 };
    let lags = reading.map(|reading| lags(expected, &reading.records)).unwrap_or_default();
    let lag = |rank: u8| lags.get(usize::from(rank)).copied().unwrap_or(0);
    let rates: Vec<(f64, f64)> = ledger.history().rates().collect();
    let rate = |rank: u8| rates.get(usize::from(rank)).copied().unwrap_or_default();
    let ranks = (0..status.world).zip(ledger.totals()).map(|(rank, totals)| RankSnapshot {
        rank,
        state: rank_state(facts, rank),
        address: addresses.get(usize::from(rank)).copied().flatten().map(|address| address.to_string()),
        contributed: totals.contributed,
        acknowledged: totals.acknowledged,
        marks: totals.marks,
        busy: totals.busy,
        chunks_per_second: rate(rank).0,
        lag_chunks: lag(rank),
        straggler: false,
        in_the_way_seconds: ledger.in_the_way(now, rank).map(|time| time.as_secs_f64()),
    });
    let counting = || (0..status.world).filter(|rank| expected >> rank & 1 == 1);
    let ranks_in = |bits: u64| (0..status.world).filter(|rank| bits >> rank & 1 == 1).collect();
    let open = ledger.open(now).filter(|_| status.generation.is_some());
    let slots_in_use = match status.generation {
        None => Some(0),
        Some(_) => reading.and_then(|reading| reading.slots_in_use),
    };
    let mut job = JobSnapshot {
        status: status.clone(),
        forming_seconds: ledger.forming(now).map(|time| time.as_secs_f64()),
        completed_chunks: ledger.completed(),
        chunks_per_second: counting().map(|rank| rate(rank).1).reduce(f64::min).unwrap_or(0.0),
        slots_in_use,
        oldest_open_slot: open.map(|(open, age)| OpenSlot {
            chunk: open.seq.0,
            age_seconds: age.as_secs_f64(),
            contributors: ranks_in(open.bits),
            missing_ranks: ranks_in(expected & !open.bits),
        }),
        lag_chunks: counting().map(lag).max().unwrap_or(0),
        ranks: ranks.collect(),
        stall: None,
    };
    job.stall = stall::find(&job);
    for rank in stall::stragglers(&job) {
        if let Some(rank) = job.ranks.get_mut(usize::from(rank)) {
            rank.straggler = true;
        }
    }
    job
}

/// How far each rank is behind the first that counts, in chunks.
fn lags(expected: u64, records: &[RankRecord]) -> Vec<u32> {
    let counting = records.iter().enumerate().filter(|(rank, _)| expected >> rank & 1 == 1);
    let first = counting.map(|(_, record)| record.contributed).reduce(Seq::later);
    let lag = |record: &RankRecord| {
        first.filter(|first| record.contributed.is_before(*first)).map_or(0, |f| f.since(record.contributed))
    };
    records.iter().map(lag).collect()
}

fn rank_state(facts: &JobFacts, rank: u8) -> RankState {
    let status = &facts.status;
    if status.lost_ranks.contains(&rank) {
        RankState::Lost
    } else if status.waiting_ranks.contains(&rank) {
        RankState::Waiting
    } else if status.missing_ranks.contains(&rank) {
        RankState::Missing
    } else if status.generation.is_none() {
        RankState::Absent
    } else if status.left_ranks.contains(&rank) {
        RankState::Left
    } else {
        RankState::Member
    }
}

/// Tables in which nothing has happened.
struct Blank;

impl View for Blank {
    fn counters(&self) -> Result<Counters, EngineError> {
        Ok(Counters::default())
    }

    fn records(&self, _: u16, entry: &JobEntry) -> Result<Vec<RankRecord>, EngineError> {
        Ok(vec![RankRecord::default(); entry.world.into()])
    }

    fn slot(&self, _: u16, _: &JobEntry, _: Seq) -> Result<Slot, EngineError> {
        Ok(Slot::default())
    }
}

#[cfg(test)]
mod tests;
