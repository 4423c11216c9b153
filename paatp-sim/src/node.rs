//! The aggregator: `paatp_common`'s path of a request over ordinary memory, and an auditor that looks on.
//!
//! The auditor knows what no program could know in time, such as what every worker has really been given, and stops the run
//! at the first step that breaks a rule.

use std::collections::BTreeSet;

use bytemuck::Zeroable;
use paatp_common::aggregate::Outcome;
use paatp_common::counter::Counters;
use paatp_common::host::Host;
use paatp_common::job::{Address, JobEntry, RankEntry, mapped};
use paatp_common::lanes::SlotBlock;
use paatp_common::levels::Link;
use paatp_common::limits::{LANES_PER_BLOCK, MAX_JOBS, MAX_RANKS};
use paatp_common::pool::{K_MAX, Pool};
use paatp_common::progress::{Progress, RankRecord};
use paatp_common::slot::Slot;
use paatp_common::tag::rank_key;
use paatp_common::wire::{HEADER_BYTES, Header, flags};
use paatp_common::{Refusal, Seq};
use paatp_transport::rate::policy::Grant;
use paatp_transport::rate::share::Share;

use crate::random::Random;
use crate::scenario::{JobSpec, MemoryKind, PoolSpec};

/// Generations are arbitrary; each job has its own.
const FIRST_GENERATION: u32 = 0xC0FF_EE00;
/// Attempts up to which memory is damaged: what breaks for ever ends a job, as it should, and ends the test with it.
const MOST_DAMAGED_ATTEMPT: u8 = 2;

/// A rule that was broken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("job {job}, chunk {seq}: {rule}")]
pub struct Violation {
    /// The job.
    pub job: u16,
    /// The chunk.
    pub seq: u32,
    /// What happened, and should not.
    pub rule: String,
}

/// Whom a request speaks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sender {
    /// Job.
    pub job: u16,
    /// The rank that sent it, or whose packet became the sum.
    pub rank: u8,
    /// A bit for each rank whose contribution is in it.
    pub ranks: u64,
}

impl Sender {
    /// One rank, for itself.
    #[must_use]
    pub fn rank(job: u16, rank: u8) -> Sender {
        Sender { job, rank, ranks: 1_u64.checked_shl(rank.into()).unwrap_or(0) }
    }

    /// A request with the sum of several ranks.
    const fn is_sum(self) -> bool {
        self.ranks.count_ones() > 1
    }
}

/// Results as they were first handed out, one for each slot of a job.
type Digests = Vec<Option<(u32, u64)>>;

/// The aggregator's memory.
#[derive(Debug)]
pub struct Node {
    jobs: Vec<JobEntry>,
    /// Jobs whose ranks a switch may speak for; empty without a switch.
    links: Vec<Link>,
    ranks: Vec<RankEntry>,
    progress: Vec<Progress>,
    pool: Pool,
    slots: Vec<Slot>,
    lanes: Vec<SlotBlock>,
    blocks: usize,
    counters: Counters,
    digests: Vec<Digests>,
    damaged: BTreeSet<(u16, u32, u8)>,
    /// Contributions that came in a sum.
    summed: u64,
}

/// The address of a rank.
#[must_use]
pub fn address(job: u16, rank: u8) -> Address {
    mapped([10, (job >> 8) as u8, job as u8, rank])
}

impl Node {
    /// An aggregator with these jobs, behind a switch that adds or not. Their nonces follow from the seed.
    #[must_use]
    pub fn new(specs: &[JobSpec], pool: Option<PoolSpec>, is_switched: bool, seed: u64) -> Node {
        let blocks = specs.iter().map(|job| usize::from(job.lanes) / LANES_PER_BLOCK).max().unwrap_or(1);
        let mut jobs = vec![JobEntry::zeroed(); MAX_JOBS];
        let mut ranks = vec![RankEntry::zeroed(); MAX_JOBS * MAX_RANKS];
        let mut first_slot = 0;
        for ((number, spec), entry) in (0..).zip(specs).zip(&mut jobs) {
            *entry = JobEntry {
                expected: spec.all_ranks(),
                generation: generation(number),
                first_slot,
                slots: spec.slots,
                lanes: spec.lanes,
                window: spec.window,
                world: spec.world,
                k: match spec.memory {
                    MemoryKind::Reserved => 0,
                    MemoryKind::Shared => pool.and_then(|pool| pool.k).unwrap_or(K_MAX),
                },
                ..JobEntry::zeroed()
            };
            first_slot += spec.own_slots();
            let places = ranks.iter_mut().skip(usize::from(number) * MAX_RANKS);
            for (rank, place) in (0..spec.world).zip(places) {
                let key = rank_key(nonce(seed, number), rank.into());
                *place = RankEntry { address: address(number, rank), key, ..RankEntry::default() };
            }
        }
        let pool = Pool { first: first_slot, slots: pool.map_or(0, |pool| pool.slots) };
        let slots = (pool.first + pool.slots) as usize;
        let mut links = vec![Link::default(); if is_switched { MAX_JOBS } else { 0 }];
        for (spec, link) in specs.iter().zip(&mut links) {
            link.switched = spec.all_ranks();
        }
        Node {
            jobs,
            links,
            ranks,
            progress: (0..MAX_JOBS).map(|_| Progress::default()).collect(),
            pool,
            slots: vec![Slot::zeroed(); slots],
            lanes: vec![SlotBlock::default(); slots * blocks],
            blocks,
            counters: Counters::default(),
            digests: specs.iter().map(|job| vec![None; job.slots as usize]).collect(),
            damaged: BTreeSet::new(),
            summed: 0,
        }
    }

    /// Contributions that were taken as a part of a sum.
    #[must_use]
    pub const fn summed(&self) -> u64 {
        self.summed
    }

    /// What was counted.
    #[must_use]
    pub const fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Stamps a job's answers, as the loader does.
    pub fn stamp(&mut self, grant: &Grant) {
        let Some(entry) = self.jobs.get_mut(usize::from(grant.job)) else { return };
        entry.granted = grant.window;
        let ranks = self.ranks.iter_mut().skip(usize::from(grant.job) * MAX_RANKS);
        ranks.zip(grant.gains).for_each(|(rank, gain)| rank.gain = gain);
    }

    /// What the tables say of a job that shares the pool, as the loader reads it.
    #[must_use]
    pub fn share(&self, job: u16) -> Option<Share> {
        let entry = self.jobs.get(usize::from(job)).filter(|entry| entry.is_shared())?;
        let (progress, generation) = (self.progress.get(usize::from(job))?, entry.generation);
        let (min_ack, crowded) = (self.min_ack(job), progress.crowded(generation));
        Some(Share { job, generation, min_ack, crowded })
    }

    /// What every rank of a job has acknowledged, as the tables say.
    #[must_use]
    pub fn min_ack(&self, job: u16) -> u32 {
        self.progress.get(usize::from(job)).map_or(0, |progress| progress.acks.floor(generation(job)).0)
    }

    /// Lets a job's chunks try so many places of the pool.
    pub fn set_k(&mut self, job: u16, k: u8) {
        if let Some(entry) = self.jobs.get_mut(usize::from(job)) {
            entry.k = k;
        }
    }

    /// What the tables say of a rank, as the loader reads it.
    #[must_use]
    pub fn record(&self, job: u16, rank: u8) -> RankRecord {
        let progress = self.progress.get(usize::from(job));
        progress.map_or_else(RankRecord::default, |p| p.reached(generation(job), usize::from(rank)))
    }

    /// Handles a request in place; `None` if nothing is answered. `delivered` tells what each of a job's workers has been
    /// given, in the order of ranks.
    ///
    /// # Errors
    /// The rule that this step broke.
    pub fn handle(
        &mut self,
        sender: Sender,
        datagram: &mut [u8],
        congested: bool,
        delivered: &dyn Fn(u16) -> Vec<u64>,
    ) -> Result<Option<usize>, Violation> {
        let Sender { job, rank, .. } = sender;
        let request = Header::of(datagram).copied();
        let is_shared = self.jobs.get(usize::from(job)).is_some_and(JobEntry::is_shared);
        let seen = if is_shared { self.slots.clone() } else { Vec::new() };
        let before = request.and_then(|header| Some((header, self.slot_of(job, header.seq())?)));
        let length = datagram.len();
        let mut host = Host {
            jobs: &mut self.jobs,
            ranks: &self.ranks,
            progress: &self.progress,
            pool: self.pool,
            slots: &mut self.slots,
            lanes: &mut self.lanes,
            blocks_per_slot: self.blocks,
            counters: &mut self.counters,
        };
        let source = address(job, rank);
        let answered = if self.links.is_empty() {
            host.handle(datagram, source, congested).ok()
        } else {
            let (outcome, length) = host.handle_with_levels(&self.links, &[], datagram, source, 0, congested);
            matches!(outcome, Outcome::Answer { .. }).then_some(length)
        };
        let Some(answered) = answered else { return Ok(None) };
        if is_shared {
            self.audit_pool(job, &seen, delivered)?;
        }
        if let Some((request, slot)) = before {
            let delivered = delivered(job);
            self.audit_slot(sender, &request, &slot, &delivered)?;
            self.audit_records(job, &request, &delivered)?;
            self.audit_answer(job, &request, length, datagram.get(..answered).unwrap_or(&[]))?;
        }
        Ok(Some(answered))
    }

    /// The slot of a chunk. Of a job that shares the pool: an unused one, if it has none.
    fn slot_of(&self, job: u16, seq: Seq) -> Option<Slot> {
        let entry = self.jobs.get(usize::from(job)).filter(|entry| entry.slots > 0)?;
        if entry.is_shared() {
            let found = self.slots.iter().find(|slot| is_chunk(slot, job, seq));
            return Some(found.copied().unwrap_or_default());
        }
        self.slots.get((entry.first_slot + seq.0 % entry.slots) as usize).copied()
    }

    /// What a request of a job that shares the pool did to the slots: it changed one at most, took it from nobody who
    /// needs it, and did not give its chunk a second one (protocol-rules F18).
    fn audit_pool(
        &self,
        job: u16,
        before: &[Slot],
        delivered: &dyn Fn(u16) -> Vec<u64>,
    ) -> Result<(), Violation> {
        let mut changed = before.iter().zip(&self.slots).zip(0..).filter(|((old, new), _)| old != new);
        let Some(((old, new), index)) = changed.next() else { return Ok(()) };
        let fail = |job: u16, seq: Seq, rule: &str| Err(Violation { job, seq: seq.0, rule: rule.into() });
        if changed.next().is_some() {
            return fail(job, new.seq, "one request changed two slots");
        }
        let own = self.jobs.get(usize::from(job)).map_or(0, |entry| entry.first_slot);
        let is_in_pool = (self.pool.first..self.pool.first + self.pool.slots).contains(&index);
        if !is_in_pool && index != own {
            return fail(job, new.seq, "it has a slot of somebody else");
        }
        if (old.generation, old.seq) == (new.generation, new.seq) {
            return Ok(());
        }
        let is_needed = |seq: Seq, all: &[u64]| all.iter().any(|delivered| *delivered <= u64::from(seq.0));
        if old.generation != 0 && is_needed(old.seq, &delivered(old.job())) {
            return fail(old.job(), old.seq, "its slot in the pool went to another chunk too early");
        }
        if self.slots.iter().filter(|slot| is_chunk(slot, job, new.seq)).count() != 1 {
            return fail(job, new.seq, "it has two slots");
        }
        Ok(())
    }

    /// What this request did to the slot of its chunk.
    fn audit_slot(
        &mut self,
        sender: Sender,
        request: &Header,
        before: &Slot,
        delivered: &[u64],
    ) -> Result<(), Violation> {
        let Sender { job, rank, .. } = sender;
        let (Some(after), Some(entry)) =
            (self.slot_of(job, request.seq()), self.jobs.get(usize::from(job)).copied())
        else {
            return Ok(());
        };
        let fail = |seq: Seq, rule: String| Err(Violation { job, seq: seq.0, rule });
        let was_used = before.generation == entry.generation;
        if was_used && after.seq != before.seq {
            let all_have = delivered.iter().all(|delivered| *delivered > u64::from(before.seq.0));
            if !all_have {
                return fail(
                    before.seq,
                    format!("its slot went to chunk {} too early: {delivered:?}", after.seq.0),
                );
            }
        }
        let same = was_used && after.seq == before.seq;
        let gained =
            if same && after.attempt == before.attempt { after.bits & !before.bits } else { after.bits };
        let begun = !same || after.attempt != before.attempt;
        if sender.is_sum() {
            self.summed += u64::from(gained.count_ones());
        }
        if gained & !sender.ranks != 0 {
            return fail(after.seq, format!("rank {rank}'s request added bits {gained:#x}"));
        }
        if same && !begun && before.bits & !after.bits != 0 {
            return fail(after.seq, format!("bits {:#x} became {:#x}", before.bits, after.bits));
        }
        if same && before.frozen != 0 && after.frozen != before.frozen {
            return fail(after.seq, "the contributors of a redo are other than before".into());
        }
        let lowest = delivered.iter().min().copied().unwrap_or(0);
        if gained != 0 && u64::from(after.seq.0) >= lowest + u64::from(entry.slots) {
            return fail(after.seq, format!("taken more than {} ahead of {lowest}", entry.slots));
        }
        if after.is_complete() && after.bits != entry.expected {
            return fail(after.seq, format!("complete with {:#x}", after.bits));
        }
        Ok(())
    }

    /// What the tables say of the job's ranks: no more than is true, whoever told it for them.
    fn audit_records(&self, job: u16, request: &Header, delivered: &[u64]) -> Result<(), Violation> {
        let (floor, lowest) = (self.min_ack(job), delivered.iter().min().copied().unwrap_or(0));
        if u64::from(floor) <= lowest {
            return Ok(());
        }
        let rule = format!("chunks below {floor} count as acknowledged by all, who have {lowest}");
        Err(Violation { job, seq: request.seq().0, rule })
    }

    /// What was answered.
    fn audit_answer(
        &mut self,
        job: u16,
        request: &Header,
        asked: usize,
        answer: &[u8],
    ) -> Result<(), Violation> {
        let Some(header) = Header::of(answer) else { return Ok(()) };
        let want = header.want();
        let violation = |rule: String| Violation { job, seq: want.0, rule };
        if answer.len() > asked || header.token() != request.token() {
            return Err(violation("an answer is longer than its request, or another's".into()));
        }
        if !header.has(flags::RESULT) {
            return Ok(());
        }
        let slots = self.jobs.get(usize::from(job)).map_or(1, |entry| entry.slots.max(1));
        let is_damaged = self.damaged.range((job, want.0, 0)..=(job, want.0, u8::MAX)).next().is_some();
        if is_damaged {
            return Ok(());
        }
        let digest = digest(header, answer);
        let place =
            self.digests.get_mut(usize::from(job)).and_then(|all| all.get_mut((want.0 % slots) as usize));
        match place {
            Some(Some((seq, first))) if *seq == want.0 && *first != digest => {
                Err(violation("two ranks get different results".into()))
            }
            Some(place) => {
                *place = Some((want.0, digest));
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Flips a bit of a complete slot. Once for each attempt of a chunk: the checksum sees every single wrong word, but its
    /// top bit is the parity of the words' top bits, so a second flip there may hide the first.
    pub fn damage(&mut self, random: &mut Random) {
        let job_of = |generation: u32| generation.wrapping_sub(FIRST_GENERATION) as u16;
        let is_fresh = |slot: &&Slot| {
            slot.is_complete()
                && slot.has_payload()
                && slot.attempt <= MOST_DAMAGED_ATTEMPT
                && !self.damaged.contains(&(job_of(slot.generation), slot.seq.0, slot.attempt))
        };
        let fresh: Vec<usize> =
            self.slots.iter().enumerate().filter(|(_, slot)| is_fresh(slot)).map(|(i, _)| i).collect();
        let Some(index) = fresh.get(random.below(fresh.len() as u64) as usize) else { return };
        let Some(slot) = self.slots.get(*index) else { return };
        self.damaged.insert((job_of(slot.generation), slot.seq.0, slot.attempt));
        let word = random.below(u64::from(slot.chunk().lanes) / 2) as usize;
        let bit = random.below(64);
        if let Some(word) =
            self.lanes.get_mut(index * self.blocks + word / 16).and_then(|b| b.get_mut(word % 16))
        {
            *word ^= 1 << bit;
        }
    }

    /// Whether a request was refused for this reason.
    #[must_use]
    pub const fn refused(&self, refusal: Refusal) -> u64 {
        self.counters.refused(refusal)
    }
}

/// The slot holds this chunk.
const fn is_chunk(slot: &Slot, job: u16, seq: Seq) -> bool {
    slot.holds(generation(job), seq)
}

/// A job's generation.
#[must_use]
pub const fn generation(job: u16) -> u32 {
    FIRST_GENERATION + job as u32
}

/// A job's nonce.
#[must_use]
pub const fn nonce(seed: u64, job: u16) -> u64 {
    (seed ^ 0x0123_4567_89AB_CDEF).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(job as u64)
}

/// What all ranks must get alike: contributors, tag, scales and lanes, not attempt or progress.
fn digest(header: &Header, answer: &[u8]) -> u64 {
    let mut hash = header.bitmap() ^ header.tag().rotate_left(17);
    hash ^=
        (header.exponent() as u64) << 8 ^ (header.next_exponent() as u64) << 16 ^ u64::from(header.lanes());
    for word in answer.get(HEADER_BYTES..).unwrap_or(&[]).chunks_exact(8) {
        let word = word.iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
        hash = (hash ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    }
    hash
}

#[cfg(test)]
mod tests {
    use paatp_common::wire::Kind;

    use super::*;
    use crate::scenario::ValuesKind;
    use crate::units::Nanos;
    use paatp_common::tag;
    use paatp_common::wire::{Chunk, ElementType, Operation, Request};

    const SEED: u64 = 3;

    fn node(world: u8) -> Node {
        let job = JobSpec {
            name: "j".into(),
            world,
            lanes: 32,
            window: 1,
            slots: 2,
            memory: MemoryKind::Reserved,
            chunks: 9,
            operations: 1,
            iterations: 1,
            start: Nanos(0),
            compute: Nanos(0),
            first_ready: 1.0,
            jitter: 0.0,
            staleness: 0,
            values: ValuesKind::FloatSum,
        };
        Node::new(&[job], None, false, SEED)
    }

    /// A contribution of zeros, and a wish for the same chunk.
    fn data(rank: u8, seq: u32, ack: u32) -> Vec<u8> {
        let seq = Seq(seq);
        let chunk = Chunk::new(Operation::Sum, ElementType::F32, 32, 0);
        let request = Request {
            kind: Kind::Data,
            flags: flags::PAYLOAD,
            job: 0,
            worker: rank,
            generation: generation(0),
            seq,
            want: seq,
            ack: Seq(ack),
            progress: Seq(ack),
            token: 7,
            bitmap: 1 << rank,
            tag: tag::salt(rank_key(nonce(SEED, 0), rank.into()), seq, chunk),
            chunk,
            next_exponent: 0,
            attempt: 0,
        };
        let mut datagram = request.encode().as_bytes().to_vec();
        datagram.extend([0; 128]);
        datagram
    }

    #[test]
    fn a_slot_that_is_given_away_too_early_is_noticed() {
        let mut node = node(1);
        let mut ask = |seq, ack, delivered| {
            node.handle(Sender::rank(0, 0), &mut data(0, seq, ack), false, &|_| vec![delivered])
        };
        assert!(ask(0, 0, 0).is_ok_and(|answer| answer == Some(192)));
        // The worker says that it has the result, and has not.
        let violation = ask(2, 2, 0).unwrap_err();
        assert!(violation.rule.contains("too early") && violation.seq == 0, "{violation}");
    }

    #[test]
    fn results_that_differ_are_noticed_unless_memory_was_damaged_on_purpose() {
        for on_purpose in [false, true] {
            let mut node = node(2);
            let ask = |node: &mut Node, rank| {
                node.handle(Sender::rank(0, rank), &mut data(rank, 0, 0), false, &|_| vec![0, 0])
            };
            assert!(ask(&mut node, 0).is_ok_and(|answer| answer == Some(HEADER_BYTES)));
            assert!(ask(&mut node, 1).is_ok_and(|answer| answer == Some(192)));
            if on_purpose {
                node.damage(&mut Random::new(1, crate::random::Purpose::Damage, 0));
            } else {
                node.lanes[0][0] ^= 1;
            }
            let again = ask(&mut node, 0);
            assert_eq!(again.is_ok(), on_purpose, "{again:?}");
        }
    }

    #[test]
    fn strangers_are_not_answered_and_tallies_are_taken_once() {
        let mut node = node(1);
        let mut foreign = data(1, 0, 0);
        assert_eq!(node.handle(Sender::rank(0, 1), &mut foreign, false, &|_| vec![0]), Ok(None));
        assert!(node.handle(Sender::rank(0, 0), &mut data(0, 0, 0), true, &|_| vec![0]).is_ok());
        assert_eq!(node.record(0, 0), RankRecord { marks: 1, ..RankRecord::default() });
    }
}
