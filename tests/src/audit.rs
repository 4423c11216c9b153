//! What the aggregator's tables must look like after a run, by the rules of docs/protocol.md.

use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};
use paatp_common::Event;
use paatp_common::counter::Counters;
use paatp_common::job::{JobEntry, Node, RankEntry};
use paatp_common::limits::{MAX_JOBS, MAX_RANKS};
use paatp_common::pool::{Pool, Quarry, Search, TURNS};
use paatp_common::progress::{Progress, RankRecord};
use paatp_common::seq::Seq;
use paatp_common::slot::Slot;
use paatp_common::tag::{Tag, salt};
use paatp_common::wire::Operation;

use crate::kernel::{Maps, PodOf, SlotMemory};

/// [`Progress`] as words.
const PROGRESS_WORDS: usize = size_of::<Progress>() / 8;

/// How far the ranks of a job are, by its number.
///
/// # Errors
/// Where the map is missing.
pub fn progress(maps: &Maps, number: u32) -> Result<Progress> {
    let words = maps.array::<[u64; PROGRESS_WORDS]>("PROGRESS")?.get(&number, 0)?;
    // SAFETY: `Progress` is `repr(C)` and holds nothing but atomic words of 64 bits, which have the size of `u64`
    // (asserted by the array's length) and take every bit pattern.
    Ok(unsafe { std::mem::transmute::<[u64; PROGRESS_WORDS], Progress>(words) })
}

/// The tables of the only job of a node, as they were at one moment.
#[derive(Clone, Debug)]
pub struct Tables {
    /// The job's entry.
    pub job: JobEntry,
    /// Generation that is asked about. The entry's is 0 once all ranks have left.
    pub generation: u32,
    /// Factors of the ranks' salts.
    pub keys: Vec<u64>,
    /// What each rank has reached.
    pub ranks: Vec<RankRecord>,
    /// The floor of acknowledgements, min_ack.
    pub min_ack: Seq,
    /// The highest progress, p_max.
    pub p_max: Seq,
    /// The job's slots, in their order, with the words of their lanes. Of a job in the pool: its own, then the pool's.
    pub slots: Vec<(Slot, Vec<u64>)>,
    number: u16,
    pool: Pool,
}

impl Tables {
    /// Reads them.
    ///
    /// # Errors
    /// Where a map is missing, or the node has not exactly one job.
    pub fn read(maps: &Maps, generation: u32) -> Result<Tables> {
        let entries = maps.array::<PodOf<JobEntry>>("JOBS")?;
        let mut jobs = Vec::new();
        for number in 0..MAX_JOBS as u32 {
            let entry = entries.get(&number, 0)?.0;
            if entry.world > 0 {
                jobs.push((number, entry));
            }
        }
        ensure!(jobs.len() == 1, "the tables hold {} jobs: only a single one can be audited", jobs.len());
        let (number, job) = jobs[0];
        let world = usize::from(job.world);
        let keys = maps.array::<PodOf<RankEntry>>("RANKS")?;
        let key = |rank| Ok(keys.get(&(number * MAX_RANKS as u32 + rank), 0)?.0.key);
        let progress = progress(maps, number)?;
        let memory = SlotMemory::map(maps, "SLOTS").or_else(|_| SlotMemory::map(maps, "WIDE_SLOTS"))?;
        let pool = maps.array::<PodOf<Node>>("NODE")?.get(&0, 0)?.0.pool;
        let range = |first: u32, slots: u32| first as usize..(first + slots) as usize;
        let (own, shared) = match job.is_shared() {
            true => (range(job.first_slot, 1), range(pool.first, pool.slots)),
            false => (range(job.first_slot, job.slots), 0..0),
        };
        ensure!(
            own.end.max(shared.end) <= memory.slots(),
            "the job's slots {own:?}, {shared:?} are not in the table"
        );
        Ok(Tables {
            job,
            generation,
            keys: (0..world as u32).map(key).collect::<Result<_>>().context("the table of ranks")?,
            ranks: (0..world).map(|rank| progress.reached(generation, rank)).collect(),
            min_ack: progress.acks.floor(generation),
            p_max: progress.highest(generation),
            slots: own.chain(shared).map(|slot| memory.read(slot)).collect(),
            number: number as u16,
            pool,
        })
    }

    /// What no schedule of packets may bring about, in words; the ranks may still be at work, or have failed.
    #[must_use]
    pub fn broken_rules(&self) -> Vec<String> {
        let mut broken = Vec::new();
        let lead = self.p_max.since(self.lowest()) as i32;
        if lead > self.job.slots as i32 {
            broken.push(format!(
                "p_max {} is more than S = {} ahead of min_ack {}",
                self.p_max.0,
                self.job.slots,
                self.lowest().0
            ));
        }
        for (index, (slot, words)) in self.slots.iter().enumerate() {
            let mut of_slot = String::new();
            if let Err(why) = self.examine(index, slot, words, &mut of_slot) {
                let _ = write!(of_slot, "{why}; ");
            }
            if !of_slot.is_empty() {
                broken.push(format!("slot {index} of chunk {}: {of_slot}{slot:?}", slot.seq.0));
            }
        }
        broken
    }

    /// As [`Tables::broken_rules`], after a run in which every rank has received `chunks` results, the exponent rounds
    /// counted, and told so before it left.
    #[must_use]
    pub fn broken_rules_at_the_end(&self, chunks: u64, counters: &Counters) -> Vec<String> {
        let mut broken = self.broken_rules();
        let (end, ranks) = (Seq(chunks as u32), self.ranks.len() as u64);
        let mut say = |is_right: bool, what: String| {
            if !is_right {
                broken.push(what);
            }
        };
        say(self.min_ack == end, format!("min_ack is {} after {chunks} chunks", self.min_ack.0));
        for (rank, reached) in self.ranks.iter().enumerate() {
            say(
                reached.acked == end,
                format!("rank {rank} has acknowledged {} of {chunks}", reached.acked.0),
            );
        }
        let used = self.slots.iter().filter(|(slot, _)| self.is_ours(slot)).count() as u64;
        let complete = self.slots.iter().filter(|(slot, _)| self.is_ours(slot) && slot.is_complete()).count();
        let expected = chunks.min(u64::from(self.job.slots));
        // Which slots of a pool are used is a matter of a hash.
        say(self.job.is_shared() || used == expected, format!("{used} slots were used, not {expected}"));
        say(complete as u64 == used, format!("{complete} of {used} used slots are complete"));
        // A redo completes a chunk again, with the contributions of all ranks.
        let redos = counters.noted(Event::Redos);
        for (event, once) in [(Event::Completions, chunks), (Event::Contributions, chunks * ranks)] {
            let count = counters.noted(event);
            let is_right = if redos == 0 { count == once } else { count >= once };
            say(is_right, format!("{count} {event:?} with {chunks} chunks, {ranks} ranks, {redos} redos"));
        }
        broken
    }

    fn is_ours(&self, slot: &Slot) -> bool {
        slot.generation == self.generation
    }

    /// The lowest acknowledgement; CPUs may have left the floor below it.
    #[must_use]
    pub fn lowest(&self) -> Seq {
        let counted = self.ranks.iter().enumerate().filter(|(rank, _)| self.job.expected >> rank & 1 == 1);
        let steps = counted.map(|(_, reached)| reached.acked.since(self.min_ack) as i32).min().unwrap_or(0);
        self.min_ack.plus(steps.max(0) as u32)
    }

    /// One slot; `Err` is what makes all else meaningless.
    fn examine(&self, index: usize, slot: &Slot, words: &[u64], broken: &mut String) -> Result<(), String> {
        if slot.lock != 0 {
            broken.push_str("locked; ");
        }
        if !self.is_ours(slot) {
            let untouched = slot.generation == 0 && slot.bits == 0 && slot.home_lock == 0;
            return if untouched { Ok(()) } else { Err(format!("generation {}", slot.generation)) };
        }
        let (slots, seq) = (self.job.slots, slot.seq);
        let ahead = seq.since(self.lowest()) as i32;
        // A slot is not given away before all have its result, and nothing is taken more than S ahead. A slot of the pool
        // may lie idle for longer.
        let mut oldest = -(slots as i32);
        if self.job.is_shared() {
            oldest = i32::MIN;
            self.examine_place(index, slot, broken);
        } else if seq.0 & (slots - 1) != index as u32 {
            broken.push_str("seq is not the slot's index mod S; ");
        }
        if !(oldest..slots as i32).contains(&ahead) {
            let _ = write!(broken, "{ahead} from min_ack {} with S = {slots}; ", self.lowest().0);
        }
        let of_job = 1u64.checked_shl(self.job.world.into()).map_or(u64::MAX, |bit| bit - 1);
        if slot.bits & !of_job != 0 || u32::from(slot.contributors()) != slot.bits.count_ones() {
            broken.push_str("bits of ranks that do not exist, or not as many as contributors; ");
        }
        if slot.is_complete() && (slot.bits != slot.frozen || self.job.expected & !slot.bits != 0) {
            let _ = write!(broken, "complete without the {:#x} expected; ", self.job.expected);
        }
        if slot.bits != 0 && self.tag_of(slot, words) != Some(slot.tag) {
            broken.push_str("the lanes are not those that the tag tells; ");
        }
        Ok(())
    }

    /// A slot of the pool, or the job's own: at a place of its chunk, and the only one that holds it (protocol-rules F18).
    fn examine_place(&self, index: usize, slot: &Slot, broken: &mut String) {
        let (job, generation) = (self.number, self.generation);
        let quarry = Quarry { job, generation, seq: slot.seq, own: self.job.first_slot };
        let search = Search::new(self.pool, quarry);
        let place = match index {
            0 => self.job.first_slot,
            index => self.pool.first + index as u32 - 1,
        };
        if !(0..u64::from(TURNS)).any(|turn| search.index(turn) == place) || slot.job() != job {
            broken.push_str("not at a place of its chunk; ");
        }
        let namesakes = self.slots.iter().filter(|(other, _)| other.holds(generation, slot.seq)).count();
        if namesakes != 1 || slot.home_lock != 0 {
            let _ =
                write!(broken, "{namesakes} slots hold its chunk, its home's lock is {}; ", slot.home_lock);
        }
    }

    /// The tag that lanes and contributors must have; `None` where there are more lanes than a slot has.
    fn tag_of(&self, slot: &Slot, words: &[u64]) -> Option<u64> {
        let (chunk, mut tag) = (slot.chunk(), Tag::default());
        if slot.has_payload() {
            words.get(..usize::from(chunk.lanes) / 2)?.iter().for_each(|word| tag.push(*word));
        }
        let keys = self.keys.iter().enumerate().filter(|(rank, _)| slot.bits >> rank & 1 == 1);
        let key = keys.fold(0u64, |sum, (_, key)| sum.wrapping_add(*key));
        Some(tag.value().wrapping_add(salt(key, slot.seq, chunk)))
    }

    /// A slot that holds a sum of all ranks, by its place; for tests that break one.
    #[must_use]
    pub fn some_sum(&self) -> Option<usize> {
        let is_sum = |slot: &Slot| slot.chunk().operation() == Some(Operation::Sum) && slot.is_complete();
        self.slots.iter().position(|(slot, _)| self.is_ours(slot) && is_sum(slot))
    }
}
