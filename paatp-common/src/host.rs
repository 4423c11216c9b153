//! An aggregator in ordinary memory: the same [`aggregate::handle`] over slices, for tests,
//! simulator and fuzzers.

use crate::aggregate::{self, Arrival, Machine, Outcome};
use crate::counter::{Counters, Refusal};
use crate::job::{Address, JobEntry, RankEntry};
use crate::lanes::{self, SlotBlock, WireBlock};
use crate::levels::{Above, KeySum, Link, Vouching};
use crate::limits::{BLOCK_BYTES, MAX_RANKS};
use crate::policy::Policy;
use crate::pool::{self, Pool, Search, TURNS};
use crate::progress::{Members, Progress};
use crate::slot::{Rules, Slot};
use crate::tag::Tag;
use crate::wire::{HEADER_BYTES, Header};

/// Tables and slots of a node, borrowed from whoever owns them.
#[derive(Debug)]
pub struct Host<'a> {
    /// One entry a job.
    pub jobs: &'a mut [JobEntry],
    /// [`MAX_RANKS`] entries a job.
    pub ranks: &'a [RankEntry],
    /// One entry a job.
    pub progress: &'a [Progress],
    /// The part of the slots that jobs share.
    pub pool: Pool,
    /// Slot headers.
    pub slots: &'a mut [Slot],
    /// `blocks_per_slot` blocks a slot.
    pub lanes: &'a mut [SlotBlock],
    /// Blocks of each slot.
    pub blocks_per_slot: usize,
    /// What happened.
    pub counters: &'a mut Counters,
}

impl Host<'_> {
    /// Handles a request datagram in place and returns the answer's length, or the refusal that dropped it.
    ///
    /// # Errors
    /// The refusal, where nothing is answered.
    pub fn handle(
        &mut self,
        datagram: &mut [u8],
        source: Address,
        congested: bool,
    ) -> Result<usize, Refusal> {
        let length = datagram.len();
        match self.run::<false>(datagram, (source, 0), congested, (&[], &[])) {
            Outcome::Drop(refusal) => Err(refusal),
            Outcome::Answer { payload: true } => Ok(length),
            // Nothing leaves a node without levels but answers.
            _ => Ok(HEADER_BYTES),
        }
    }

    /// The same on a node with levels, which has one link and one report for each job. Says what is to be done with the
    /// datagram, and how long it is then. `port` is the one that it came to: requests come to the first (number 0), see
    /// [`Machine::ports`].
    pub fn handle_with_levels(
        &mut self,
        links: &[Link],
        above: &[Above],
        datagram: &mut [u8],
        source: Address,
        port: u16,
        congested: bool,
    ) -> (Outcome, usize) {
        let length = datagram.len();
        let outcome = self.run::<true>(datagram, (source, port), congested, (links, above));
        let is_whole = match outcome {
            Outcome::Answer { payload } => payload,
            Outcome::Up(relay) => relay.has_payload(),
            Outcome::Down(_) => true,
            Outcome::Drop(_) => false,
        };
        (outcome, if is_whole { length } else { HEADER_BYTES.min(length) })
    }

    fn run<const LEVELS: bool>(
        &mut self,
        datagram: &mut [u8],
        (source, port): (Address, u16),
        congested: bool,
        (links, above): (&[Link], &[Above]),
    ) -> Outcome {
        let Some((header, payload)) = datagram.split_first_chunk_mut::<HEADER_BYTES>() else {
            self.counters.refuse(Refusal::Truncated);
            return Outcome::Drop(Refusal::Truncated);
        };
        let header: &mut Header = bytemuck::cast_mut(header);
        let arrival = Arrival { source, congested, payload_bytes: payload.len() as u32, port };
        let mut machine = HostMachine::<LEVELS> { host: self, links, above, header, payload };
        aggregate::handle(&mut machine, arrival)
    }
}

/// A [`Host`] with a request in hand.
struct HostMachine<'a, 'b, const LEVELS: bool> {
    host: &'a mut Host<'b>,
    links: &'a [Link],
    above: &'a [Above],
    header: &'a mut Header,
    payload: &'a mut [u8],
}

impl<const LEVELS: bool> HostMachine<'_, '_, LEVELS> {
    /// Payload and slot, block by block.
    fn pairs(
        &mut self,
        slot: usize,
        blocks: u32,
    ) -> Option<impl Iterator<Item = (&mut SlotBlock, &mut WireBlock)>> {
        let blocks = blocks as usize;
        let first = slot * self.host.blocks_per_slot;
        if blocks > self.host.blocks_per_slot {
            return None;
        }
        let lanes = self.host.lanes.get_mut(first..first + blocks)?;
        let payload = self.payload.get_mut(..blocks * BLOCK_BYTES)?;
        Some(lanes.iter_mut().zip(payload.chunks_exact_mut(BLOCK_BYTES).map(bytemuck::from_bytes_mut)))
    }
}

impl<const LEVELS: bool> Machine for HostMachine<'_, '_, LEVELS> {
    type JobRef = usize;
    type SlotRef = usize;
    const LEVELS: bool = LEVELS;

    fn header(&mut self) -> &mut Header {
        self.header
    }

    fn find(&self, number: u16) -> Option<usize> {
        let number = number as usize;
        (number < self.host.jobs.len().min(self.host.progress.len())).then_some(number)
    }

    fn job(&self, job: usize) -> &JobEntry {
        &self.host.jobs[job]
    }

    fn rules(&self, job: usize) -> Rules {
        self.job(job).rules()
    }

    fn policy(&self, job: usize) -> Policy {
        self.job(job).policy
    }

    fn replace_policy(&mut self, job: usize, from: Policy, to: Policy) {
        let policy = &mut self.host.jobs[job].policy;
        if *policy == from {
            *policy = to;
        }
    }

    fn progress(&self, job: usize) -> &Progress {
        &self.host.progress[job]
    }

    fn recompute(&mut self, job: usize, members: Members) {
        self.progress(job).recompute(members);
    }

    fn rank(&self, number: u16, rank: u8) -> Option<&RankEntry> {
        self.host.ranks.get(number as usize * MAX_RANKS + rank as usize)
    }

    fn slot(&self, index: u32) -> Option<usize> {
        let index = index as usize;
        (index < self.host.slots.len()).then_some(index)
    }

    fn pool(&self) -> Pool {
        self.host.pool
    }

    fn search(&mut self, mut search: Search) -> Search {
        for turn in 0..u64::from(TURNS) {
            let Some(slot) = self.host.slots.get(search.index(turn) as usize) else { break };
            let owner = usize::from(slot.job());
            let (jobs, progress) = (self.host.jobs.get(owner), self.host.progress.get(owner));
            let is_over = jobs.zip(progress).is_none_or(|(job, progress)| pool::is_over(slot, job, progress));
            if search.visit(turn, slot, is_over) {
                break;
            }
        }
        search
    }

    fn state(&mut self, slot: usize) -> &mut Slot {
        &mut self.host.slots[slot]
    }

    fn lock(&mut self, _: usize) -> bool {
        true
    }

    fn unlock(&mut self, _: usize) {}

    fn lock_home(&mut self, _: usize) -> bool {
        true
    }

    fn unlock_home(&mut self, _: usize) {}

    fn count(&mut self, counter: u32) {
        self.host.counters.count(counter);
    }

    fn forget(&self, value: u64) -> u64 {
        value
    }

    fn store(&mut self, slot: usize, blocks: u32) -> Option<u64> {
        let mut tag = Tag::default();
        self.pairs(slot, blocks)?.for_each(|(lanes, payload)| lanes::store(lanes, payload, &mut tag));
        Some(tag.value())
    }

    fn add(&mut self, slot: usize, blocks: u32) -> Option<u64> {
        let mut tag = Tag::default();
        self.pairs(slot, blocks)?.for_each(|(lanes, payload)| lanes::add(lanes, payload, &mut tag));
        Some(tag.value())
    }

    fn subtract(&mut self, slot: usize, blocks: u32) {
        if let Some(pairs) = self.pairs(slot, blocks) {
            pairs.for_each(|(lanes, payload)| lanes::subtract(lanes, payload));
        }
    }

    fn maximum(&mut self, slot: usize, blocks: u32) -> Option<(u64, u64)> {
        let (mut before, mut after) = (Tag::default(), Tag::default());
        self.pairs(slot, blocks)?
            .for_each(|(lanes, payload)| lanes::maximum(lanes, payload, &mut before, &mut after));
        Some((before.value(), after.value()))
    }

    fn verify(&mut self, blocks: u32) -> Option<u64> {
        let payload = self.payload.get(..blocks as usize * BLOCK_BYTES)?;
        let mut tag = Tag::default();
        payload
            .chunks_exact(BLOCK_BYTES)
            .for_each(|block| lanes::verify(bytemuck::from_bytes(block), &mut tag));
        Some(tag.value())
    }

    fn emit(&mut self, slot: usize, blocks: u32) -> Option<()> {
        self.pairs(slot, blocks)?.for_each(|(lanes, payload)| lanes::emit(payload, lanes));
        Some(())
    }

    fn link(&self, number: u16) -> Option<&Link> {
        self.links.get(usize::from(number))
    }

    fn above(&self, number: u16) -> Option<&Above> {
        self.above.get(usize::from(number))
    }

    fn rises(&self, job: usize) -> bool {
        self.job(job).rises != 0
    }

    fn ports(&self) -> u16 {
        1
    }

    fn sum_keys(&mut self, number: u16, mut keys: KeySum) -> KeySum {
        let first = usize::from(number) * MAX_RANKS;
        let ranks = self.host.ranks.iter().skip(first).take(MAX_RANKS);
        for rank in ranks {
            if keys.visit(rank) {
                break;
            }
        }
        keys
    }

    fn vouch(&mut self, job: usize, number: u16, mut vouching: Vouching) -> Vouching {
        let first = usize::from(number) * MAX_RANKS;
        let ranks = self.host.ranks.iter().skip(first).take(usize::from(self.job(job).world));
        for (turn, rank) in (0..).zip(ranks) {
            if vouching.visit(turn, rank, self.progress(job)) {
                break;
            }
        }
        vouching
    }

    fn lift(&mut self, slot: usize, blocks: u32) -> Option<()> {
        self.emit(slot, blocks)
    }

    fn replace(&mut self, slot: usize, blocks: u32) -> Option<()> {
        self.store(slot, blocks).map(|_| ())
    }
}
