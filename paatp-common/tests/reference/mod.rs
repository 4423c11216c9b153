//! The reference: what one aggregator level does with a job's requests, written from the protocol's rules with sets and
//! maps, positions that never wrap, and no regard to speed or memory.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::collections::{BTreeMap, BTreeSet};

use paatp_common::counter::{Counters, Event};
use paatp_common::pool::{Pool, Quarry};
use paatp_common::wire::{Chunk, Operation, Status};
use paatp_common::{Refusal, Seq};

/// Redos of one chunk that are allowed.
const MOST_REDOS: u8 = 4;

/// A request, in the reference's terms.
#[derive(Clone, Debug)]
pub struct Packet {
    pub rank: u8,
    pub generation: u32,
    /// PULL instead of DATA.
    pub pull: bool,
    pub seq: Seq,
    pub want: Seq,
    pub ack: Seq,
    pub progress: Seq,
    pub attempt: u8,
    pub chunk: Chunk,
    pub next_exponent: i8,
    pub payload: Vec<u32>,
    /// The payload was damaged on its way.
    pub damaged: bool,
}

/// A result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub ranks: BTreeSet<u8>,
    pub lanes: Vec<u32>,
    pub next_exponent: i8,
    pub attempt: u8,
    pub epoch: u64,
}

/// What must be answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    pub status: Status,
    /// Attempt of the chunk contributed to (DATA) or wished for (PULL), where no result comes.
    pub attempt: u8,
    pub result: Option<Outcome>,
    /// Who is in, where no result comes.
    pub ranks: BTreeSet<u8>,
    pub min_ack: u64,
    pub p_min: u64,
    pub p_max: u64,
    /// Why the contribution was aborted.
    pub reason: Option<Refusal>,
}

#[derive(Clone, Debug)]
pub struct ChunkState {
    pub attempt: u8,
    pub contributions: BTreeMap<u8, Vec<u32>>,
    pub frozen: Option<BTreeSet<u8>>,
    pub complete: bool,
    pub identity: Option<Chunk>,
    exponent: i8,
    pub quorum: Option<usize>,
    /// Number of the policy that it began under.
    pub epoch: u64,
    /// A place in the pool was taken for it, and what came then was refused: nothing is known of it.
    pub blank: bool,
}

/// How many contributions complete which chunk: one number before a chunk, another from it on.
#[derive(Clone, Debug, Default)]
pub struct Waiting {
    before: Option<usize>,
    after: Option<usize>,
    epoch: u64,
    from: From,
}

/// From which chunk on the number after holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum From {
    /// From the first one.
    #[default]
    Always,
    /// From the one that will be two rings after the first one to begin.
    Wanted,
    /// From this position on.
    Chunk(u64),
}

impl Waiting {
    pub fn is_over(&self, min_ack: u64) -> bool {
        match self.from {
            From::Always => true,
            From::Wanted => false,
            From::Chunk(from) => min_ack >= from,
        }
    }

    /// Another number is wanted; the last change is over, or nobody has seen it.
    pub fn ask_for(&mut self, quorum: Option<usize>) {
        let (before, epoch) =
            if self.from == From::Wanted { (self.before, self.epoch - 1) } else { (self.after, self.epoch) };
        *self = if quorum == before {
            Waiting { before, after: before, epoch, from: From::Always }
        } else {
            Waiting { before, after: quorum, epoch: epoch + 1, from: From::Wanted }
        };
    }

    /// A chunk begins.
    fn begin(&mut self, position: u64, ring: u64) -> (Option<usize>, u64) {
        if self.from == From::Wanted {
            self.from = From::Chunk(position + 2 * ring);
        }
        match self.from {
            From::Chunk(from) if position < from => (self.before, self.epoch - 1),
            _ => (self.after, self.epoch),
        }
    }
}

/// Memory that a job shares with others.
#[derive(Clone, Debug)]
pub struct Shared {
    /// Places that a chunk may take, before its own.
    pub k: usize,
    /// All places of a chunk in the pool.
    pub places: fn(Pool, Quarry) -> Vec<u64>,
    pub pool: Pool,
    /// Who looks; the chunk is filled in.
    pub job: Quarry,
    /// Places where others hold what is not over.
    pub taken: BTreeSet<u64>,
}

impl ChunkState {
    /// Sum or maximum over whoever is in.
    pub fn lanes(&self) -> Vec<u32> {
        let takes_maximum = self
            .identity
            .and_then(Chunk::operation)
            .is_some_and(|o| matches!(o, Operation::Max | Operation::Min));
        let mut total: Vec<u32> = Vec::new();
        for lanes in self.contributions.values().filter(|lanes| !lanes.is_empty()) {
            if total.is_empty() {
                total.clone_from(lanes);
            } else {
                for (sum, lane) in total.iter_mut().zip(lanes) {
                    *sum = if takes_maximum {
                        (*sum).max(*lane)
                    } else {
                        sum.checked_add(*lane).expect("lanes are small enough")
                    };
                }
            }
        }
        total
    }

    pub fn ranks(&self) -> BTreeSet<u8> {
        self.contributions.keys().copied().collect()
    }
}

/// One job's state.
#[derive(Clone, Debug)]
pub struct Reference {
    pub generation: u32,
    pub expected: BTreeSet<u8>,
    /// Contributions that complete chunks; `None` for all.
    pub waiting: Waiting,
    quorum: Option<usize>,
    /// Length of the ring.
    pub ring: u64,
    /// Sequence number at position 0.
    pub start: Seq,
    pub acks: BTreeMap<u8, u64>,
    pub progress: BTreeMap<u8, u64>,
    highest: u64,
    /// The chunk that each place of the ring holds, by its position.
    pub held: BTreeMap<u64, (u64, ChunkState)>,
    pub counters: Counters,
    /// Contributions whose fate was that their payload was damaged.
    pub damaged_instead: u64,
    /// `None`: the job has a ring.
    pub shared: Option<Shared>,
    /// The lowest acknowledgement when it was last looked at.
    floor: u64,
}

/// What became of a contribution.
enum Fate {
    Taken,
    Duplicate,
    Late,
    Refused(Refusal),
}

impl Reference {
    pub fn new(generation: u32, world: u8, quorum: Option<usize>, ring: u32, start: Seq) -> Reference {
        let zeros: BTreeMap<u8, u64> = (0..world).map(|rank| (rank, 0)).collect();
        Reference {
            generation,
            expected: (0..world).collect(),
            waiting: Waiting { before: quorum, after: quorum, ..Waiting::default() },
            quorum,
            ring: u64::from(ring),
            start,
            acks: zeros.clone(),
            progress: zeros,
            highest: 0,
            held: BTreeMap::new(),
            counters: Counters::default(),
            damaged_instead: 0,
            shared: None,
            floor: 0,
        }
    }

    /// A new generation: everything is over, positions begin at 0.
    pub fn restart(&mut self, generation: u32, world: u8) {
        let (counters, damaged_instead) = (self.counters, self.damaged_instead);
        let shared = self.shared.take();
        *self = Reference::new(generation, world, self.quorum, self.ring as u32, Seq(0));
        (self.counters, self.damaged_instead, self.shared) = (counters, damaged_instead, shared);
    }

    pub fn min_ack(&self) -> u64 {
        self.expected.iter().map(|rank| self.acks[rank]).min().unwrap()
    }

    fn p_min(&self) -> u64 {
        self.expected.iter().map(|rank| self.progress[rank]).min().unwrap()
    }

    pub fn wire(&self, position: u64) -> Seq {
        self.start.plus(position as u32)
    }

    /// Steps from `origin` to a number on the wire, which may lie behind.
    fn distance(&self, seq: Seq, origin: u64) -> i64 {
        i64::from(seq.since(self.wire(origin)) as i32)
    }

    /// Where a chunk lies.
    fn place(&self, seq: Seq) -> Option<u64> {
        let is_it = |(_, (position, _)): &(&u64, &(u64, ChunkState))| self.wire(*position) == seq;
        self.held.iter().find(is_it).map(|(place, _)| *place)
    }

    /// The chunk with this number, if it lies anywhere.
    pub fn chunk(&self, seq: Seq) -> Option<&ChunkState> {
        Some(&self.held.get(&self.place(seq)?)?.1)
    }

    /// The place that a chunk gets: in the ring its only one; in the pool the first free one, or for the lowest chunk
    /// the job's own.
    fn find_place(&self, seq: Seq, position: u64) -> Option<u64> {
        let Some(shared) = &self.shared else { return Some(u64::from(seq.0) % self.ring) };
        let is_free = |place: &u64| {
            !shared.taken.contains(place)
                && self.held.get(place).is_none_or(|(position, _)| *position < self.min_ack())
        };
        let quarry = Quarry { generation: self.generation, seq, ..shared.job };
        let mut places = (shared.places)(shared.pool, quarry);
        places.truncate(shared.k);
        if position == self.min_ack() {
            places.push(u64::from(shared.job.own));
        }
        places.into_iter().find(is_free)
    }

    /// Places that hold what is not over, as others see it.
    pub fn occupied(&self) -> BTreeSet<u64> {
        let is_open = |(_, (position, _)): &(&u64, &(u64, ChunkState))| *position >= self.floor;
        self.held.iter().filter(is_open).map(|(place, _)| *place).collect()
    }

    /// Handles a request.
    pub fn request(&mut self, packet: &Packet) -> Result<Expected, Refusal> {
        if packet.generation != self.generation || !self.expected.contains(&packet.rank) {
            self.counters.refuse(Refusal::OldGeneration);
            return Err(Refusal::OldGeneration);
        }
        self.counters.note(Event::Requests);
        self.note_progress(packet);
        let (status, reason) = if packet.pull {
            self.counters.note(Event::Pulls);
            if packet.damaged {
                self.counters.refuse(Refusal::BadTag);
            }
            (Status::NotYet, None)
        } else {
            self.contribution(packet)
        };
        let own = if packet.pull { packet.want } else { packet.seq };
        let attempt = if packet.pull { 0 } else { self.attempt_in_window(packet.seq) };
        let mut expected = Expected {
            status,
            attempt,
            result: None,
            ranks: BTreeSet::new(),
            min_ack: self.min_ack(),
            p_min: self.p_min(),
            p_max: self.highest,
            reason,
        };
        self.settle(packet.want);
        if let Some(chunk) = self.chunk(packet.want) {
            let lanes = chunk.lanes();
            if chunk.complete && (lanes.is_empty() || lanes.len() == packet.payload.len()) {
                let (ranks, attempt) = (chunk.ranks(), chunk.attempt);
                expected.result = Some(Outcome {
                    ranks,
                    lanes,
                    next_exponent: chunk.exponent,
                    attempt,
                    epoch: chunk.epoch,
                });
                if packet.pull {
                    expected.status = Status::Ok;
                }
                self.counters.note(Event::Results);
            } else {
                expected.ranks = chunk.ranks();
                if packet.pull {
                    expected.attempt = self.chunk(own).map_or(0, |chunk| chunk.attempt);
                    if self.is_hopeless(chunk) {
                        expected.status = Status::Aborted;
                        expected.reason = Some(Refusal::DeadRankInRedo);
                    }
                }
            }
        }
        Ok(expected)
    }

    /// The attempt that an answer to DATA tells: that of the chunk, where it was looked at.
    fn attempt_in_window(&self, seq: Seq) -> u8 {
        let distance = self.distance(seq, self.min_ack());
        let looked_at = (0..self.ring as i64).contains(&distance);
        if looked_at { self.chunk(seq).map_or(0, |chunk| chunk.attempt) } else { 0 }
    }

    /// Before anything else, and whatever becomes of the payload.
    fn note_progress(&mut self, packet: &Packet) {
        let reach = self.ring as i64;
        let ack = self.acks[&packet.rank];
        let steps = self.distance(packet.ack, ack);
        if (1..=reach).contains(&steps) {
            self.acks.insert(packet.rank, ack + steps as u64);
        }
        let steps = self.distance(packet.progress, self.highest);
        if (1..=reach).contains(&steps) {
            self.highest += steps as u64;
        }
        let progress = self.progress[&packet.rank];
        let steps = self.distance(packet.progress, progress);
        if (1..=reach).contains(&steps) {
            self.progress.insert(packet.rank, progress + steps as u64);
        }
        self.floor = self.min_ack();
    }

    fn contribution(&mut self, packet: &Packet) -> (Status, Option<Refusal>) {
        let distance = self.distance(packet.seq, self.min_ack());
        let fate = if distance < 0 {
            Fate::Refused(Refusal::Behind)
        } else if distance >= self.ring as i64 {
            Fate::Refused(Refusal::Ahead)
        } else {
            let fate = self.contribute(packet, self.min_ack() + distance as u64);
            self.settle(packet.seq);
            fate
        };
        let (status, reason) = match fate {
            Fate::Taken => {
                self.counters.note(Event::Contributions);
                (Status::Ok, None)
            }
            Fate::Duplicate => {
                self.counters.note(Event::Duplicates);
                (Status::Ok, None)
            }
            Fate::Late => {
                self.counters.note(Event::Late);
                (Status::NotIncluded, None)
            }
            Fate::Refused(refusal) => {
                self.counters.refuse(refusal);
                match refusal {
                    Refusal::Behind => (Status::Stale, None),
                    Refusal::Ahead | Refusal::Crowded => (Status::Busy, None),
                    Refusal::OldAttempt | Refusal::FarAttempt => (Status::OldAttempt, None),
                    Refusal::BadTag => {
                        self.damaged_instead += 1;
                        return (Status::BadTag, None);
                    }
                    aborted => (Status::Aborted, Some(aborted)),
                }
            }
        };
        if packet.damaged {
            // Not taken anyway, but the damage is told and counted.
            self.counters.refuse(Refusal::BadTag);
            return (Status::BadTag, None);
        }
        (status, reason)
    }

    /// A redo is open, and a rank that it needs has died.
    pub fn is_hopeless(&self, chunk: &ChunkState) -> bool {
        let waits = |rank: &u8| !chunk.contributions.contains_key(rank) && !self.expected.contains(rank);
        !chunk.complete && chunk.frozen.as_ref().is_some_and(|frozen| frozen.iter().any(waits))
    }

    /// A contribution to a chunk inside the window.
    fn contribute(&mut self, packet: &Packet, position: u64) -> Fate {
        let operation = packet.chunk.operation().expect("the tests send known operations");
        let is_shared = self.shared.is_some();
        let Some(place) = self.place(packet.seq).or_else(|| self.find_place(packet.seq, position)) else {
            return Fate::Refused(Refusal::Crowded);
        };
        if is_shared && self.chunk(packet.seq).is_none() {
            self.held.insert(
                place,
                (position, ChunkState { blank: true, attempt: 0, ..self.fresh(packet, None, 0) }),
            );
        }
        if operation == Operation::Broadcast && !packet.payload.is_empty() && packet.rank != packet.chunk.root
        {
            return Fate::Refused(Refusal::NotRoot);
        }
        let held = self.chunk(packet.seq).filter(|chunk| !chunk.blank).cloned();
        let current = held.as_ref().map_or(0, |chunk| chunk.attempt);
        if packet.attempt < current {
            return Fate::Refused(Refusal::OldAttempt);
        }
        if packet.attempt > current + 1 {
            return Fate::Refused(Refusal::FarAttempt);
        }
        let is_redo = packet.attempt == current + 1;
        if is_redo && packet.attempt > MOST_REDOS {
            return Fate::Refused(Refusal::TooManyAttempts);
        }
        let disagrees =
            |chunk: &ChunkState| !chunk.contributions.is_empty() && chunk.identity != Some(packet.chunk);
        let mut chunk = match held {
            Some(chunk) if is_redo => {
                if chunk.frozen.as_ref().is_some_and(|frozen| !frozen.is_subset(&self.expected)) {
                    return Fate::Refused(Refusal::DeadRankInRedo);
                }
                if chunk.frozen.as_ref().is_some_and(|frozen| !frozen.contains(&packet.rank)) {
                    return Fate::Late;
                }
                if disagrees(&chunk) {
                    return Fate::Refused(Refusal::Mismatch);
                }
                self.counters.note(Event::Redos);
                let (quorum, epoch) = (chunk.quorum, chunk.epoch);
                ChunkState { frozen: chunk.frozen, ..self.fresh(packet, quorum, epoch) }
            }
            Some(chunk) => {
                if self.is_hopeless(&chunk) {
                    return Fate::Refused(Refusal::DeadRankInRedo);
                }
                if disagrees(&chunk) {
                    return Fate::Refused(Refusal::Mismatch);
                }
                if chunk.contributions.contains_key(&packet.rank) {
                    return Fate::Duplicate;
                }
                let is_outside = chunk.frozen.as_ref().is_some_and(|frozen| !frozen.contains(&packet.rank));
                if chunk.complete || is_outside {
                    return Fate::Late;
                }
                chunk
            }
            None => {
                let (quorum, epoch) = self.waiting.begin(position, self.ring);
                self.fresh(packet, quorum, epoch)
            }
        };
        if !packet.payload.is_empty() {
            let is_first = chunk.contributions.values().all(Vec::is_empty);
            let is_checked_before = matches!(operation, Operation::Max | Operation::Min);
            if is_first {
                self.counters.note(Event::Stores);
            } else if !(is_checked_before && packet.damaged) {
                self.counters.note(Event::Adds);
            }
        }
        if !packet.damaged {
            chunk.exponent = if chunk.contributions.is_empty() {
                packet.next_exponent
            } else {
                chunk.exponent.max(packet.next_exponent)
            };
            chunk.contributions.insert(packet.rank, packet.payload.clone());
            chunk.identity = Some(packet.chunk);
        }
        self.held.insert(place, (position, chunk));
        if packet.damaged { Fate::Refused(Refusal::BadTag) } else { Fate::Taken }
    }

    fn fresh(&self, packet: &Packet, quorum: Option<usize>, epoch: u64) -> ChunkState {
        let needs_all = matches!(
            packet.chunk.operation(),
            Some(Operation::Barrier | Operation::Exponents | Operation::Broadcast)
        );
        ChunkState {
            attempt: packet.attempt,
            contributions: BTreeMap::new(),
            frozen: None,
            complete: false,
            identity: None,
            exponent: 0,
            quorum: if needs_all { None } else { quorum },
            epoch,
            blank: false,
        }
    }

    /// Completes a chunk that has everybody it needs.
    fn settle(&mut self, seq: Seq) {
        let Some(place) = self.place(seq) else { return };
        let (_, chunk) = self.held.get_mut(&place).unwrap();
        let ranks = chunk.ranks();
        let is_whole = match (&chunk.frozen, chunk.quorum) {
            (Some(frozen), _) => ranks == *frozen,
            (None, None) => self.expected.is_subset(&ranks),
            (None, Some(quorum)) => ranks.len() >= quorum.min(self.expected.len()),
        };
        if is_whole && !ranks.is_empty() && !chunk.complete {
            chunk.complete = true;
            chunk.frozen = Some(ranks);
            self.counters.note(Event::Completions);
        }
    }
}
