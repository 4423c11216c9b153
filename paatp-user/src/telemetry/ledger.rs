//! What the tables cannot say by themselves: totals over generations and wraps, and since when something stands still.
//! Pure; the clock is an argument.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use paatp_common::progress::RankRecord;
use paatp_common::seq::Seq;

use crate::control::membership::JobFacts;
use crate::control::watch::{Terms, Watch};
use crate::engine::{ProgressSnapshot, RankProgress};

use super::history::{History, SAMPLE_INTERVAL};
use super::read::{Open, Reading, min_ack};

/// A counter of 32 bits that wraps, as one of 64 that does not.
#[derive(Clone, Copy, Debug, Default)]
struct Total {
    /// Where the counter stood; none before the first look at one that began unseen.
    last: Option<u32>,
    total: u64,
}

impl Total {
    /// Takes in where the counter stands. A step of half its range or more is one back: somebody read it earlier and says
    /// so later, or two CPUs wrote in the wrong order. A rank of 10 million chunks a second needs 200 s for it.
    fn advance(&mut self, now: Seq) {
        let step =
            self.last.map_or(now.0, |last| if now.is_before(Seq(last)) { 0 } else { now.since(Seq(last)) });
        if step != 0 || self.last.is_none() {
            self.total += u64::from(step);
            self.last = Some(now.0);
        }
    }

    /// It begins anew.
    const fn begin(&mut self, seen: bool) {
        self.last = if seen { Some(0) } else { None };
    }
}

/// One rank's totals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankTotals {
    /// Chunks contributed.
    pub contributed: u64,
    /// Results acknowledged.
    pub acknowledged: u64,
    /// Requests that met congestion.
    pub marks: u64,
    /// Contributions too far ahead.
    pub busy: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct RankEntry {
    contributed: Total,
    acknowledged: Total,
    marks: Total,
    busy: Total,
}

impl RankEntry {
    fn advance(&mut self, record: &RankRecord) {
        self.contributed.advance(record.contributed);
        self.acknowledged.advance(record.acked);
        self.marks.advance(Seq(record.marks));
        self.busy.advance(Seq(record.busy));
    }

    fn begin(&mut self, seen: bool) {
        for total in [&mut self.contributed, &mut self.acknowledged, &mut self.marks, &mut self.busy] {
            total.begin(seen);
        }
    }

    const fn totals(&self) -> RankTotals {
        RankTotals {
            contributed: self.contributed.total,
            acknowledged: self.acknowledged.total,
            marks: self.marks.total,
            busy: self.busy.total,
        }
    }
}

/// One job.
#[derive(Debug, Default)]
pub struct JobLedger {
    name: String,
    /// The generation that the totals' last positions belong to.
    generation: u32,
    ranks: Vec<RankEntry>,
    completed: Total,
    watch: Watch,
    /// The oldest open slot, and since when it has been that.
    open: Option<(Open, Instant)>,
    forming: Option<Instant>,
    history: History,
}

impl JobLedger {
    fn new(name: &str, world: u8) -> JobLedger {
        let ranks = vec![RankEntry::default(); world.into()];
        JobLedger { name: name.into(), ranks, ..JobLedger::default() }
    }

    /// Another generation. Its tables are blank, unless it ran before anybody looked.
    fn begin(&mut self, generation: u32, seen: bool) {
        if self.generation != generation {
            self.generation = generation;
            self.ranks.iter_mut().for_each(|rank| rank.begin(seen));
            self.completed.begin(seen);
            self.watch = Watch::default();
            self.open = None;
        }
    }

    fn advance(&mut self, expected: u64, records: &[RankRecord]) {
        for (rank, record) in self.ranks.iter_mut().zip(records) {
            rank.advance(record);
        }
        if let Some(least) = min_ack(expected, records) {
            self.completed.advance(least);
        }
    }

    fn observe(&mut self, now: Instant, facts: &JobFacts, reading: &Reading) {
        let rank = |record: &RankRecord| RankProgress {
            acknowledged: record.acked.0,
            contributed: record.contributed.0,
        };
        let progress = ProgressSnapshot { ranks: reading.records.iter().map(rank).collect(), min_ack: 0 };
        let terms =
            Terms { expected: facts.entry.expected, slots: facts.entry.slots, timeout: Duration::MAX };
        self.watch.observe(now, terms, &progress);
        let since = |(open, since): &(Open, Instant)| {
            reading.open.filter(|seen| seen.seq == open.seq).map(|_| *since)
        };
        let since = self.open.as_ref().and_then(since).unwrap_or(now);
        self.open = reading.open.map(|open| (open, since));
    }

    /// The totals of each rank.
    pub fn totals(&self) -> impl Iterator<Item = RankTotals> {
        self.ranks.iter().map(RankEntry::totals)
    }

    /// Chunks whose results every rank has acknowledged.
    #[must_use]
    pub const fn completed(&self) -> u64 {
        self.completed.total
    }

    /// The oldest open slot and its age.
    #[must_use]
    pub fn open(&self, now: Instant) -> Option<(Open, Duration)> {
        self.open.map(|(open, since)| (open, now.saturating_duration_since(since)))
    }

    /// How long ranks have been waiting for others to join.
    #[must_use]
    pub fn forming(&self, now: Instant) -> Option<Duration> {
        self.forming.map(|since| now.saturating_duration_since(since))
    }

    /// How long a rank has been in the way.
    #[must_use]
    pub fn in_the_way(&self, now: Instant, rank: u8) -> Option<Duration> {
        self.watch.in_the_way_since(rank).map(|since| now.saturating_duration_since(since))
    }

    /// The last minutes.
    #[must_use]
    pub const fn history(&self) -> &History {
        &self.history
    }
}

/// All jobs, by number.
#[derive(Debug, Default)]
pub struct Ledger {
    jobs: BTreeMap<u16, JobLedger>,
}

impl Ledger {
    /// One job.
    #[must_use]
    pub fn job(&self, number: u16) -> Option<&JobLedger> {
        self.jobs.get(&number)
    }

    /// One job, by name.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<&JobLedger> {
        self.jobs.values().find(|job| job.name == name)
    }

    /// The generation that a job's totals are at.
    #[must_use]
    pub fn generation(&self, number: u16) -> u32 {
        self.jobs.get(&number).map_or(0, |job| job.generation)
    }

    /// A generation ended or another one begins: takes in the last that was read of it.
    pub fn settle(&mut self, number: u16, generation: u32, expected: u64, records: &[RankRecord]) {
        if let Some(job) = self.jobs.get_mut(&number).filter(|job| job.generation == generation) {
            job.advance(expected, records);
        }
    }

    /// A generation begins, whose tables are blank.
    pub fn begin(&mut self, number: u16, name: &str, world: u8, generation: u32) {
        self.entry(number, name, world).begin(generation, true);
    }

    fn entry(&mut self, number: u16, name: &str, world: u8) -> &mut JobLedger {
        let job = self.jobs.entry(number).or_insert_with(|| JobLedger::new(name, world));
        if job.name != name || job.ranks.len() != usize::from(world) {
            *job = JobLedger::new(name, world);
        }
        job
    }

    /// Takes in all jobs as they are now. Jobs that are gone are forgotten.
    pub fn observe(&mut self, now: Instant, facts: &[JobFacts], readings: &[Reading]) {
        self.jobs.retain(|number, _| facts.iter().any(|facts| facts.status.job == *number));
        for facts in facts {
            let status = &facts.status;
            let job = self.entry(status.job, &status.name, status.world);
            job.forming = (!status.waiting_ranks.is_empty()).then(|| job.forming.unwrap_or(now));
            let reading = readings.iter().find(|reading| reading.number == status.job);
            match (status.generation, reading) {
                (Some(generation), reading) => {
                    // One that the aggregator found when it started. Never back to one that ended meanwhile.
                    if job.generation == 0 {
                        job.begin(generation, false);
                    }
                    if let Some(reading) = reading.filter(|_| job.generation == generation) {
                        job.advance(facts.entry.expected, &reading.records);
                        job.observe(now, facts, reading);
                    }
                }
                (None, _) => {
                    job.watch = Watch::default();
                    job.open = None;
                }
            }
        }
    }

    /// Keeps a sample of each job, if it is time.
    pub fn sample(&mut self, since_start: Duration) {
        for job in self.jobs.values_mut() {
            let due = job.history.last_at().is_none_or(|last| since_start >= last + SAMPLE_INTERVAL);
            if due {
                let totals: Vec<_> =
                    job.ranks.iter().map(|rank| (rank.contributed.total, rank.acknowledged.total)).collect();
                job.history.sample(since_start, &totals);
            }
        }
    }
}
