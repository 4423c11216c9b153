//! Reads the data plane's tables for those who look. Each read is one system call, without a lock; walks are bounded.

use std::time::Duration;

use paatp_common::counter::Counters;
use paatp_common::job::{JobEntry, QUORUM_ALL};
use paatp_common::pool::TURNS;
use paatp_common::progress::RankRecord;
use paatp_common::seq::Seq;
use paatp_common::slot::Slot;

use crate::control::membership::JobFacts;
use crate::engine::EngineError;

use super::health::Notice;

/// Most slots that are looked at to find the first open one of a job.
const MAX_PROBES: u32 = 1024;

/// Most slots of a job that are counted: a system call each, about a microsecond.
pub const MAX_SLOTS_COUNTED: u32 = 4096;

/// Most slots that one look at all jobs counts.
pub const MAX_SLOTS_OF_A_LOOK: u32 = 32_768;

/// What the program cost so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Time that it ran, on all CPUs.
    pub run_time: Duration,
    /// How often.
    pub runs: u64,
}

/// The data plane's tables, read without anybody's lock.
pub trait View: Send + Sync {
    /// The counters, summed over all CPUs.
    ///
    /// # Errors
    /// If the table cannot be read.
    fn counters(&self) -> Result<Counters, EngineError>;

    /// What the data plane counted of each rank of a job's generation.
    ///
    /// # Errors
    /// If the table cannot be read.
    fn records(&self, number: u16, entry: &JobEntry) -> Result<Vec<RankRecord>, EngineError>;

    /// The slot that a chunk of a job has, whatever it holds now.
    ///
    /// # Errors
    /// If the table cannot be read.
    fn slot(&self, number: u16, entry: &JobEntry, seq: Seq) -> Result<Slot, EngineError>;

    /// What is wrong with the interface just now.
    fn notices(&self) -> Vec<Notice> {
        Vec::new()
    }

    /// What the program cost, where the kernel counts that.
    ///
    /// # Errors
    /// If the kernel does not tell.
    fn cost(&self) -> Result<Option<Cost>, EngineError> {
        Ok(None)
    }
}

/// A slot that waits for contributions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Open {
    /// Its chunk.
    pub seq: Seq,
    /// Ranks whose contributions it has.
    pub bits: u64,
}

/// What was read of one job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    /// The job.
    pub number: u16,
    /// What was counted of each rank.
    pub records: Vec<RankRecord>,
    /// The first slot that has contributions and needs more.
    pub open: Option<Open>,
    /// Slots in use, if they were counted.
    pub slots_in_use: Option<u32>,
}

/// Reads the jobs that run, and what could not be read. Counts slots if `count`.
pub fn read(view: &dyn View, facts: &[JobFacts], count: bool) -> (Vec<Reading>, Vec<String>) {
    let (mut readings, mut problems) = (Vec::new(), Vec::new());
    let mut budget = if count { MAX_SLOTS_OF_A_LOOK } else { 0 };
    for facts in facts.iter().filter(|facts| facts.status.generation.is_some()) {
        match read_job(view, facts.status.job, &facts.entry, &mut budget) {
            Ok(reading) => readings.push(reading),
            Err(cause) => problems.push(format!("job `{}`: {cause}", facts.status.name)),
        }
    }
    (readings, problems)
}

fn read_job(
    view: &dyn View,
    number: u16,
    entry: &JobEntry,
    budget: &mut u32,
) -> Result<Reading, EngineError> {
    let records = view.records(number, entry)?;
    let open = find_open(view, number, entry, &records)?;
    let slots_in_use = match in_use_range(entry, &records) {
        (_, 0) => Some(0),
        (first, chunks) if chunks <= MAX_SLOTS_COUNTED && chunks.saturating_mul(reads(entry)) <= *budget => {
            *budget -= chunks.saturating_mul(reads(entry));
            Some(count_in_use(view, number, entry, first, chunks)?)
        }
        _ => None,
    };
    Ok(Reading { number, records, open, slots_in_use })
}

/// Slots that are read at most to find a chunk's.
const fn reads(entry: &JobEntry) -> u32 {
    if entry.is_shared() { TURNS } else { 1 }
}

/// The lowest acknowledgement of the ranks that count: slots before it may be reused.
#[must_use]
pub fn min_ack(expected: u64, records: &[RankRecord]) -> Option<Seq> {
    let counting = records.iter().enumerate().filter(|(rank, _)| expected >> rank & 1 == 1);
    let acks = counting.map(|(_, record)| record.acked);
    acks.reduce(|least, ack| if ack.is_before(least) { ack } else { least })
}

/// Ranks that count, in the order of their contributions, the furthest first.
fn contributed(entry: &JobEntry, records: &[RankRecord]) -> Vec<Seq> {
    let counts = |rank: usize| entry.expected >> rank & 1 == 1;
    let counting = records.iter().enumerate().filter(|(rank, _)| counts(*rank));
    let mut positions: Vec<Seq> = counting.map(|(_, record)| record.contributed).collect();
    let Some(first) = positions.first().copied() else { return positions };
    // By distance from one of them: positions of a job lie close together, also around the wrap.
    positions.sort_by_key(|position| std::cmp::Reverse(position.since(first).cast_signed()));
    positions
}

/// How far the chunks go that can be under way: whoever is first has the window before it.
fn under_way(entry: &JobEntry, highest: Seq, from: Seq) -> u32 {
    highest.since(from).saturating_add(entry.window.into()).min(entry.slots)
}

/// The first chunk that has contributions and is not complete.
fn find_open(
    view: &dyn View,
    number: u16,
    entry: &JobEntry,
    records: &[RankRecord],
) -> Result<Option<Open>, EngineError> {
    let positions = contributed(entry, records);
    // While a change is under way either quorum may hold: the one that needs more.
    let needed = [entry.policy.before(), entry.policy.after()].map(|mode| match mode.quorum {
        QUORUM_ALL => positions.len(),
        quorum => positions.len().min(quorum.into()),
    });
    let needed = needed.into_iter().fold(0, usize::max);
    // Below this, so many ranks' contributions were acknowledged that the chunk is complete.
    let Some((highest, start)) = positions.first().zip(positions.get(needed.wrapping_sub(1))) else {
        return Ok(None);
    };
    for step in 0..under_way(entry, *highest, *start).min(MAX_PROBES / reads(entry)) {
        let seq = start.plus(step);
        let slot = view.slot(number, entry, seq)?;
        let taken = slot.holds(entry.generation, seq) && slot.bits != 0;
        if taken && !slot.is_complete() {
            return Ok(Some(Open { seq, bits: slot.bits }));
        }
        // Ranks contribute in order, so behind the first chunk that nobody has sent comes nothing.
        if !taken && !seq.is_before(*highest) {
            return Ok(None);
        }
    }
    Ok(None)
}

/// Chunks that may be in slots and are not acknowledged by every rank: the first, and how many.
fn in_use_range(entry: &JobEntry, records: &[RankRecord]) -> (Seq, u32) {
    let highest = contributed(entry, records).first().copied();
    let least = min_ack(entry.expected, records);
    match (highest, least) {
        (Some(highest), Some(least)) => (least, under_way(entry, highest, least)),
        _ => (Seq(0), 0),
    }
}

fn count_in_use(
    view: &dyn View,
    number: u16,
    entry: &JobEntry,
    first: Seq,
    chunks: u32,
) -> Result<u32, EngineError> {
    let mut count = 0;
    for seq in (0..chunks).map(|step| first.plus(step)) {
        let slot = view.slot(number, entry, seq)?;
        count += u32::from(slot.holds(entry.generation, seq) && slot.bits != 0);
    }
    Ok(count)
}
