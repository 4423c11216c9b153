//! A switch between workers and aggregator, in ordinary memory: what `p4/paatp.p4` does, said in Rust.
//!
//! A switch adds contributions that pass by, as far as its memory goes, and sends the aggregator one *partial sum* for
//! all its ranks. It decides nothing else: results, redos, quorums, refusals are the aggregator's, and whatever a switch
//! cannot or need not take it passes on unchanged. `docs/switch.md` has the decisions as a table.
//!
//! The test vectors (`tests/vectors`) are made from this code and hold the P4 program against it.

use crate::counter::counters;
use crate::job::Address;
use crate::lanes::{self, SlotBlock};
use crate::limits::{BLOCK_BYTES, LANES_PER_BLOCK, MAX_RANKS};
use crate::pool::K_MAX;
use crate::seq::Seq;
use crate::tag::Tag;
use crate::wire::{Chunk, HEADER_BYTES, Header, Kind, Operation, Status, flags};

counters! {
    /// What a switch counts.
    Count {
        Stored = "stored": "Contributions that began a slot of the switch.",
        Added = "added": "Contributions that were added to a slot of the switch.",
        Duplicates = "duplicates": "Contributions that a slot of the switch held already; answered, not added.",
        Completed = "completed": "Slots that all ranks of the switch were in, sent on as one partial sum.",
        Results = "results": "Results of the aggregator that were handed to all ranks of the switch.",
        PassedUnfit = "passed_unfit": "Contributions that a switch does not take: retransmissions, redos, other operations or lengths.",
        PassedWindow = "passed_window": "Contributions outside of the window as the switch knows it; passed on.",
        PassedCrowded = "passed_crowded": "Contributions that found no free slot at the places of their chunk, or whose chunk is not after one that found none; passed on.",
        PassedMismatch = "passed_mismatch": "Contributions that differ from their slot in operation, type, lanes, exponent or root; passed on.",
        PassedLate = "passed_late": "Contributions to a chunk whose partial sum had been sent on; passed on.",
        Evicted = "evicted": "Slots that were taken for another chunk before their own had its result.",
    }
}

/// Blocks of a switch's slot at most: 256 lanes, as many as a switch of four pipelines folded into one has adders for.
pub const MAX_SWITCH_BLOCKS: usize = 8;

/// What the control plane tells a switch of one job.
#[derive(Clone, Copy, Debug)]
pub struct SwitchJob<'a> {
    /// Number on its aggregator.
    pub number: u16,
    /// Incarnation of its membership.
    pub generation: u32,
    /// Ranks whose contributions are to be in a partial sum, two at least.
    pub local: u64,
    /// S: how far a chunk may be ahead of the lowest acknowledgement.
    pub reach: u32,
    /// Places of the table that a chunk may claim, at most [`K_MAX`].
    pub k: u8,
    /// Window stamped into answers, in chunks; 0: nothing is said.
    pub granted: u16,
    /// How long a slot may be untouched before another chunk may have it, in the unit of [`Passing::now`].
    pub patience: u64,
    /// Address of each rank; ranks that are not behind this switch have none of theirs here.
    pub addresses: &'a [Address],
}

/// Where a packet comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// A port of workers, with the source address.
    Worker(Address),
    /// The port of the aggregator.
    Node,
}

/// What the layers below tell of a packet.
#[derive(Clone, Copy, Debug)]
pub struct Passing {
    /// Where it comes from.
    pub side: Side,
    /// Its IP header is marked "congestion experienced".
    pub congested: bool,
    /// The time, in any unit; wraps at 2^48.
    pub now: u64,
}

/// What happens to a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It goes where it was going, unchanged.
    Forward,
    /// It became the answer to its sender: a header, nothing behind it.
    Answer,
    /// It became the partial sum of all ranks; to the aggregator.
    Up {
        /// To be marked "congestion experienced": one of the contributions was.
        congested: bool,
    },
    /// A result: to whom it is addressed, and a copy ([`address_copy`]) to each other rank of the switch.
    Down {
        /// The other ranks.
        others: u64,
    },
}

/// One slot, less its lanes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    /// Number of its job.
    pub job: u16,
    /// Generation of its job; 0: it is free.
    pub generation: u32,
    /// Its chunk.
    pub seq: Seq,
    /// Contributors.
    pub bits: u64,
    /// Sum of their tags.
    pub tag: u64,
    /// What they agreed on.
    pub chunk: Chunk,
    /// Largest exponent that they proposed.
    pub next_exponent: i8,
    /// Lowest acknowledgement among them.
    pub ack: Seq,
    /// Lowest progress among them.
    pub progress: Seq,
    /// One of them met congestion.
    pub congested: bool,
    /// The partial sum has been sent on.
    pub sent: bool,
    /// When it was touched last.
    pub touched: u64,
}

/// How far a job is, as its packets have told: lower bounds that only rise. A number that nothing has told yet counts as
/// zero, where each generation begins, and the first one told is taken as it is: a switch that has forgotten a job in the
/// second half of the numbers would find it before zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reached {
    /// The generation that the numbers belong to.
    pub generation: u32,
    /// Every rank of the switch has the results below.
    pub floor: Told,
    /// Lowest progress in the job, as the aggregator told.
    pub p_min: Told,
    /// Highest progress in the job.
    pub p_max: Told,
    /// The latest chunk that found no place.
    pub crowded: Told,
}

/// A number of a generation, once something has told it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Told(pub Option<Seq>);

impl Told {
    /// The number.
    #[must_use]
    pub fn seq(self) -> Seq {
        self.0.unwrap_or_default()
    }

    fn raise(&mut self, told: Seq) {
        self.0 = Some(self.0.map_or(told, |known| known.later(told)));
    }
}

impl Reached {
    /// The numbers of a generation: zero where they are of another one.
    fn of(&mut self, generation: u32) -> &mut Reached {
        if self.generation != generation {
            *self = Reached { generation, ..Reached::default() };
        }
        self
    }

    /// This chunk, or a later one within the window, found no place. Somebody's contribution to it went on to the aggregator
    /// then, as every rank sends in order, and a slot that the others began would wait for it in vain. By distance, or what
    /// was crowded half of all numbers ago would lie ahead.
    fn was_crowded(&self, seq: Seq, reach: u32) -> bool {
        self.crowded.0.is_some_and(|latest| latest.since(seq) < reach)
    }
}

/// A switch, borrowed from whoever owns its memory.
#[derive(Debug)]
pub struct Switch<'a> {
    /// The jobs that it knows.
    pub jobs: &'a [SwitchJob<'a>],
    /// By job number.
    pub reached: &'a mut [Reached],
    /// The slots: a power of two.
    pub cells: &'a mut [Cell],
    /// `blocks` blocks a slot.
    pub lanes: &'a mut [SlotBlock],
    /// Blocks of each slot.
    pub blocks: usize,
    /// By [`Count`].
    pub counts: &'a mut [u64; Count::COUNT],
}

/// What a search found.
enum Place {
    /// The chunk's slot.
    Found(usize),
    /// A slot that it may have.
    Free(usize),
    /// Nothing.
    None,
}

impl Switch<'_> {
    /// A datagram of ours passes by.
    pub fn handle(&mut self, datagram: &mut [u8], passing: Passing) -> Outcome {
        let Some((header, payload)) = datagram.split_first_chunk_mut::<HEADER_BYTES>() else {
            return Outcome::Forward;
        };
        let header: &mut Header = bytemuck::cast_mut(header);
        if header.check().is_err() {
            return Outcome::Forward;
        }
        let name = (header.job(), header.generation());
        let Some(job) = self.jobs.iter().find(|job| (job.number, job.generation) == name).copied() else {
            return Outcome::Forward;
        };
        match (header.kind(), passing.side) {
            (Some(Kind::Data), Side::Worker(from)) if job.addresses.get(rank_of(header)) == Some(&from) => {
                self.contribute(&job, header, payload, passing)
            }
            (Some(Kind::Answer), Side::Node) => self.hand_down(&job, header),
            _ => Outcome::Forward,
        }
    }

    fn count(&mut self, what: Count) {
        self.counts[what as usize] += 1;
    }

    fn pass(&mut self, why: Count) -> Outcome {
        self.count(why);
        Outcome::Forward
    }

    /// No place for a chunk, nor for those before it that have none.
    fn pass_crowded(&mut self, job: &SwitchJob<'_>, seq: Seq) -> Outcome {
        if let Some(reached) = self.reached.get_mut(usize::from(job.number))
            && !reached.was_crowded(seq, job.reach)
        {
            reached.crowded = Told(Some(seq));
        }
        self.pass(Count::PassedCrowded)
    }

    /// A contribution of a rank of the switch.
    fn contribute(
        &mut self,
        job: &SwitchJob<'_>,
        header: &mut Header,
        payload: &mut [u8],
        passing: Passing,
    ) -> Outcome {
        if !self.is_fit(job, header, payload.len()) {
            return self.pass(Count::PassedUnfit);
        }
        let Some(reached) = self.reached.get_mut(usize::from(job.number)) else {
            return self.pass(Count::PassedUnfit);
        };
        let reached = reached.of(job.generation);
        reached.p_max.raise(Seq(header.raw_progress()));
        let reached = *reached;
        let floor = reached.floor.seq();
        if header.seq().since(floor) >= job.reach {
            return self.pass(Count::PassedWindow);
        }
        let index = match self.search(job, header.seq(), floor, passing.now) {
            Place::Found(index) => {
                let cell = self.cells[index];
                if cell.chunk != header.chunk() {
                    return self.pass(Count::PassedMismatch);
                }
                if cell.bits & header.bitmap() != 0 {
                    self.count(Count::Duplicates);
                    answer(header, job, &reached, cell.bits, passing.congested);
                    return Outcome::Answer;
                }
                if cell.sent {
                    return self.pass(Count::PassedLate);
                }
                self.add(index, header, payload, passing);
                index
            }
            Place::Free(index) if !reached.was_crowded(header.seq(), job.reach) => {
                self.store(index, header, payload, passing);
                index
            }
            Place::Free(_) | Place::None => return self.pass_crowded(job, header.seq()),
        };
        let cell = &mut self.cells[index];
        if job.local & !cell.bits != 0 {
            let bits = cell.bits;
            answer(header, job, &reached, bits, passing.congested);
            return Outcome::Answer;
        }
        cell.sent = true;
        let cell = *cell;
        self.count(Count::Completed);
        if let Some(reached) = self.reached.get_mut(usize::from(job.number)) {
            reached.floor.raise(cell.ack);
        }
        self.send_up(index, header, payload);
        Outcome::Up { congested: cell.congested }
    }

    /// A first sending of lanes that add up, whole, from a rank that speaks for itself. All else is the aggregator's.
    fn is_fit(&self, job: &SwitchJob<'_>, header: &Header, payload_bytes: usize) -> bool {
        let rank = rank_of(header);
        let lanes = usize::from(header.lanes());
        header.flags() == flags::PAYLOAD
            && header.attempt() == 0
            && matches!(header.chunk().operation(), Some(Operation::Sum | Operation::Mean))
            && lanes.is_multiple_of(LANES_PER_BLOCK)
            && (1..=self.blocks).contains(&(lanes / LANES_PER_BLOCK))
            && payload_bytes == lanes * 4
            && rank < MAX_RANKS
            && job.local >> rank & 1 == 1
            && header.bitmap() == 1 << rank
    }

    /// Looks at all places of a chunk; a free one may be claimed among the first k (protocol-rules F18).
    fn search(&mut self, job: &SwitchJob<'_>, seq: Seq, floor: Seq, now: u64) -> Place {
        let places = places(job.number, seq, self.cells.len());
        let holds = |cell: &Cell| (cell.job, cell.generation, cell.seq) == (job.number, job.generation, seq);
        if let Some(found) = places.into_iter().find(|index| holds(&self.cells[*index])) {
            return Place::Found(found);
        }
        let claimable = &places[..usize::from(job.k.min(K_MAX))];
        let is_free = |index: &&usize| {
            let cell = &self.cells[**index];
            let is_own = cell.job == job.number;
            let is_over = cell.generation != job.generation || cell.seq.is_before(floor);
            let age = now.wrapping_sub(cell.touched) & TIME_MASK;
            cell.generation == 0 || is_own && is_over || age > job.patience
        };
        match claimable.iter().find(is_free).copied() {
            Some(index) => {
                if self.cells[index].generation != 0 {
                    self.count(Count::Evicted);
                }
                Place::Free(index)
            }
            None => Place::None,
        }
    }

    /// The first contribution to a chunk.
    fn store(&mut self, index: usize, header: &Header, payload: &[u8], passing: Passing) {
        self.count(Count::Stored);
        self.cells[index] = Cell {
            job: header.job(),
            generation: header.generation(),
            seq: header.seq(),
            bits: header.bitmap(),
            tag: header.tag(),
            chunk: header.chunk(),
            next_exponent: header.next_exponent(),
            ack: Seq(header.raw_ack()),
            progress: Seq(header.raw_progress()),
            congested: passing.congested,
            sent: false,
            touched: passing.now & TIME_MASK,
        };
        let mut unused = Tag::default();
        for (lanes, block) in self.blocks_of(index).zip(payload.chunks_exact(BLOCK_BYTES)) {
            lanes::store(lanes, bytemuck::from_bytes(block), &mut unused);
        }
    }

    /// A further one.
    fn add(&mut self, index: usize, header: &Header, payload: &[u8], passing: Passing) {
        self.count(Count::Added);
        let cell = &mut self.cells[index];
        cell.bits |= header.bitmap();
        cell.tag = cell.tag.wrapping_add(header.tag());
        cell.next_exponent = cell.next_exponent.max(header.next_exponent());
        cell.ack = cell.ack.earlier(Seq(header.raw_ack()));
        cell.progress = cell.progress.earlier(Seq(header.raw_progress()));
        cell.congested |= passing.congested;
        cell.touched = passing.now & TIME_MASK;
        let mut unused = Tag::default();
        for (lanes, block) in self.blocks_of(index).zip(payload.chunks_exact(BLOCK_BYTES)) {
            lanes::add(lanes, bytemuck::from_bytes(block), &mut unused);
        }
    }

    /// Turns the contribution that came last into that of all ranks. It stays its sender's request, who gets the answer;
    /// what it wishes for is the chunk itself, for that is complete now, unless other ranks are elsewhere.
    fn send_up(&mut self, index: usize, header: &mut Header, payload: &mut [u8]) {
        let cell = self.cells[index];
        header.set_flags(flags::PAYLOAD | flags::PARTIAL);
        // In a partial sum: the rank that it speaks for.
        header.set_status(header.worker());
        header.set_raw_want(cell.seq.0);
        header.set_raw_ack(cell.ack.0);
        header.set_raw_progress(cell.progress.0);
        header.set_bitmap(cell.bits);
        header.set_tag(cell.tag);
        header.set_contributors(cell.bits.count_ones() as u8);
        header.set_next_exponent(cell.next_exponent);
        header.seal();
        for (lanes, block) in self.blocks_of(index).zip(payload.chunks_exact_mut(BLOCK_BYTES)) {
            lanes::emit(bytemuck::from_bytes_mut(block), lanes);
        }
    }

    /// An answer of the aggregator: what it tells is learnt, and the result that frees a slot goes to all ranks.
    fn hand_down(&mut self, job: &SwitchJob<'_>, header: &Header) -> Outcome {
        if header.status() == Status::Rejoin as u8 {
            // Nothing else in it is true: the header is the request's.
            return Outcome::Forward;
        }
        if let Some(reached) = self.reached.get_mut(usize::from(job.number)) {
            let reached = reached.of(job.generation);
            reached.p_min.raise(Seq(header.raw_ack()));
            reached.p_max.raise(Seq(header.raw_progress()));
            if let Some(min_ack) = min_ack_of(header, job.reach) {
                reached.floor.raise(min_ack);
            }
        }
        let rank = header.worker();
        let is_local = usize::from(rank) < MAX_RANKS && job.local >> rank & 1 == 1;
        if !header.has(flags::RESULT) || !is_local {
            return Outcome::Forward;
        }
        let name = (job.number, job.generation, header.want());
        let places = places(job.number, header.want(), self.cells.len());
        let holds = |index: &usize| {
            let cell = &self.cells[*index];
            (cell.job, cell.generation, cell.seq) == name
        };
        let Some(index) = places.into_iter().find(holds) else { return Outcome::Forward };
        self.cells[index] = Cell::default();
        self.count(Count::Results);
        Outcome::Down { others: job.local & !(1 << rank) }
    }

    fn blocks_of(&mut self, index: usize) -> impl Iterator<Item = &mut SlotBlock> {
        self.lanes.iter_mut().skip(index * self.blocks).take(self.blocks)
    }
}

/// Times are 48 bits wide, as a switch stamps them.
const TIME_MASK: u64 = (1 << 48) - 1;

/// min_ack, which the aggregator tells in its answers without a result (protocol-rules F2). A job of which no slot becomes
/// complete for S chunks, or that the switch has forgotten, would else be out of its window for good. No rank's
/// acknowledgement is below it, so it is never above the floor of all slots. An answer of another switch tells nothing of
/// it, and no rank is more than S ahead of it (F13): what says so is not true.
fn min_ack_of(answer: &Header, reach: u32) -> Option<Seq> {
    let min_ack = Seq(answer.raw_want());
    let is_told = !answer.has(flags::RESULT) && !answer.has(flags::PARTIAL);
    (is_told && Seq(answer.raw_progress()).since(min_ack) <= reach).then_some(min_ack)
}

fn rank_of(header: &Header) -> usize {
    usize::from(header.worker())
}

/// The places of a chunk in a table of so many slots, a power of two: steps of an odd width from a first place, both from
/// one hash that switches have a unit for.
#[must_use]
pub fn places(job: u16, seq: Seq, slots: usize) -> [usize; K_MAX as usize] {
    let [a, b] = job.to_be_bytes();
    let [c, d, e, f] = seq.0.to_be_bytes();
    let hash = crc32([a, b, c, d, e, f]);
    let step = hash >> 16 | 1;
    let mut place = hash;
    [(); K_MAX as usize].map(|()| {
        let index = place as usize & slots.wrapping_sub(1);
        place = place.wrapping_add(step);
        index
    })
}

/// CRC-32 as Ethernet has it.
fn crc32(bytes: [u8; 6]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ (crc & 1).wrapping_neg() & 0xEDB8_8320;
        }
    }
    !crc
}

/// The switch's own answer: the contribution is in a partial sum. It speaks of nothing else; what is told of the job is
/// what passed by.
fn answer(header: &mut Header, job: &SwitchJob<'_>, reached: &Reached, bits: u64, congested: bool) {
    header.set_kind(Kind::Answer);
    header.set_flags(flags::PARTIAL | if congested { flags::ECN_ECHO } else { 0 });
    header.set_status(Status::Ok as u8);
    header.set_raw_want(0);
    header.set_raw_ack(reached.p_min.seq().0);
    header.set_raw_progress(reached.p_max.seq().0);
    header.set_bitmap(bits);
    header.set_tag(0);
    header.set_lanes(0);
    header.set_told(0);
    header.set_contributors(0);
    header.set_exponent(0);
    header.set_next_exponent(0);
    header.set_window(job.granted);
    header.set_rank(0);
    header.set_gain(0);
    header.set_attempt(0);
    header.set_operation_or_epoch(0);
    header.seal();
}

/// Turns a result's header into that of its copy for another rank, who did not ask: the token is nobody's, and the status
/// speaks of no contribution (protocol-rules part 2.18).
pub fn address_copy(header: &mut Header, rank: u8) {
    header.set_flags(header.flags() | flags::PARTIAL);
    header.set_worker(rank);
    header.set_status(Status::NotYet as u8);
    header.set_token(0);
    header.set_gain(0);
    header.seal();
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytemuck::Zeroable;
    use std::collections::BTreeSet;
    use std::vec::Vec;

    fn pending(min_ack: u32, highest: u32) -> Header {
        let mut header = Header::zeroed();
        header.set_raw_want(min_ack);
        header.set_raw_progress(highest);
        header
    }

    /// F13, F17: however answers come, doubled, late, forged in a number or of another kind, the floor is never above the
    /// lowest acknowledgement and never falls; in the end it is there, wherever the numbers wrap.
    #[test]
    fn the_floor_follows_the_lowest_acknowledgement() {
        const REACH: u32 = 16;
        for begin in [0, 5, i32::MAX as u32 - 40, u32::MAX - 40] {
            let (mut floor, mut told) = (Told::default(), Vec::new());
            for step in 0..80 {
                let min_ack = begin.wrapping_add(step);
                told.push(pending(min_ack, min_ack.wrapping_add(step % (REACH + 1))));
                // An earlier one once more, the present one, and what must not be heeded.
                let old = told[(step * 7 % (step + 1)) as usize];
                let far = min_ack.wrapping_add(1000);
                let mut result = pending(far, far);
                result.set_flags(flags::RESULT);
                let mut partial = pending(far, far);
                partial.set_flags(flags::PARTIAL);
                let forged = [pending(far, min_ack), pending(min_ack, far), result, partial];
                for answer in [told[step as usize], old].iter().chain(&forged) {
                    if let Some(min_ack) = min_ack_of(answer, REACH) {
                        floor.raise(min_ack);
                    }
                    assert_eq!(floor, Told(Some(Seq(min_ack))));
                }
            }
        }
    }

    #[test]
    fn the_hash_is_the_crc_of_ethernet() {
        // The check value of CRC-32/ISO-HDLC is of nine digits; this one was computed with zlib.
        assert_eq!(crc32(*b"123456"), 0x0972_D361);
    }

    #[test]
    fn places_differ_and_are_in_the_table() {
        for slots in [8, 16, 1024] {
            for seq in 0..500 {
                let places = places(3, Seq(seq), slots);
                assert!(places.iter().all(|place| *place < slots));
                assert_eq!(BTreeSet::from(places).len(), usize::from(K_MAX));
            }
        }
    }
}
