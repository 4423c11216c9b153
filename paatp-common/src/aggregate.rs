//! One request through the tables: who may speak, what becomes of the contribution, what is answered.
//!
//! [`handle`] is the whole aggregator but for parsing frames and owning memory. The XDP program instantiates it over
//! kernel maps and packet memory, tests and simulator over slices ([`Machine`]). The request's header becomes the
//! answer's in place, and a result is written over the request's payload: one packet in, one packet out.

use crate::counter::{Event, Refusal};
use crate::job::{Address, JobEntry, RankEntry};
use crate::lanes;
use crate::limits::{MAX_JOBS, MAX_RANKS};
use crate::progress::{Members, Progress};
use crate::seq::Seq;
use crate::slot::{self, Contribution, Decision, Lanes, Rules, Slot};
use crate::tag;
use crate::wire::{Chunk, Header, Kind, Redo, Status, flags};

/// Memory of an aggregator: its tables, its slots, and the payload of the request in hand.
///
/// Payload passes walk `blocks` whole blocks and return `None` where payload or slot are shorter.
pub trait Machine {
    /// Names one slot.
    type SlotRef: Copy;

    /// The entry of a job; `number` is below [`MAX_JOBS`].
    fn job(&self, number: u16) -> Option<&JobEntry>;
    /// The entry of a rank; `rank` is below [`MAX_RANKS`].
    fn rank(&self, number: u16, rank: u8) -> Option<&RankEntry>;
    /// The progress of a job.
    fn progress(&self, number: u16) -> Option<&Progress>;
    /// A slot by its index in the node's table.
    fn slot(&self, index: u32) -> Option<Self::SlotRef>;
    /// A slot's header. To change it, hold the lock.
    fn state(&mut self, slot: Self::SlotRef) -> &mut Slot;
    /// Takes a slot's lock; false where it stays taken.
    fn lock(&mut self, slot: Self::SlotRef) -> bool;
    /// Gives the lock back.
    fn unlock(&mut self, slot: Self::SlotRef);
    /// Counts a refusal.
    fn refuse(&mut self, refusal: Refusal);
    /// Counts an event.
    fn note(&mut self, event: Event);

    /// Writes the payload to the slot's lanes; returns its tag.
    fn store(&mut self, slot: Self::SlotRef, blocks: u32) -> Option<u64>;
    /// Adds the payload to the slot's lanes; returns its tag.
    fn add(&mut self, slot: Self::SlotRef, blocks: u32) -> Option<u64>;
    /// Takes an addition back.
    fn subtract(&mut self, slot: Self::SlotRef, blocks: u32);
    /// Keeps the larger of each lane; returns the tags of the slot's lanes before and after.
    fn maximum(&mut self, slot: Self::SlotRef, blocks: u32) -> Option<(u64, u64)>;
    /// The payload's tag.
    fn verify(&mut self, blocks: u32) -> Option<u64>;
    /// Writes the slot's lanes over the payload.
    fn emit(&mut self, slot: Self::SlotRef, blocks: u32) -> Option<()>;
}

/// What the layers below told of a request.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// Source address of the IP packet.
    pub source: Address,
    /// The IP header was marked "congestion experienced".
    pub congested: bool,
    /// Bytes after the header.
    pub payload_bytes: u32,
}

/// What to do with the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing is answered; the refusal is counted already.
    Drop(Refusal),
    /// Send the header back, with the payload (same length as the request's) or without.
    Answer {
        /// The payload holds a result.
        payload: bool,
    },
}

/// A request that may touch the job's state.
struct Admitted {
    job_number: u16,
    members: Members,
    rules: Rules,
    first_slot: u32,
    slots: u32,
    window: u16,
    gain: i8,
    key: u64,
    rank: u8,
}

impl Admitted {
    #[inline(always)]
    fn slot_index(&self, seq: Seq) -> u32 {
        self.first_slot.wrapping_add(seq.0 & self.slots.wrapping_sub(1))
    }
}

/// What became of a contribution.
struct Received {
    status: Status,
    /// Attempt that the slot of `seq` is at; with [`Status::Aborted`] the number of the refusal.
    attempt: u8,
    /// Contributors in the slot of `seq`: with [`Status::Aborted`], those that the sender disagrees with.
    bits: u64,
}

/// Handles one request whose frame was parsed: `header` becomes the answer's.
#[inline(always)]
pub fn handle<M: Machine>(machine: &mut M, header: &mut Header, arrival: Arrival) -> Outcome {
    let outcome = match admit(machine, header, arrival) {
        Ok(admitted) => serve(machine, header, arrival, &admitted),
        Err(Refusal::OldGeneration) => {
            // The address is registered, so telling it to join again amplifies nothing towards a stranger.
            machine.refuse(Refusal::OldGeneration);
            reject(header, Status::Rejoin)
        }
        Err(refusal) => {
            machine.refuse(refusal);
            Outcome::Drop(refusal)
        }
    };
    if matches!(outcome, Outcome::Answer { .. }) {
        header.seal();
    }
    outcome
}

/// Header, job, worker, address, length and generation: checked before any slot is touched.
#[inline(always)]
fn admit<M: Machine>(machine: &mut M, header: &Header, arrival: Arrival) -> Result<Admitted, Refusal> {
    header.check()?;
    if !matches!(header.kind(), Some(Kind::Data | Kind::Pull)) {
        return Err(Refusal::BadKind);
    }
    let number = header.job();
    if number as usize >= MAX_JOBS {
        return Err(Refusal::UnknownJob);
    }
    let job = machine.job(number).ok_or(Refusal::UnknownJob)?;
    if job.generation == 0 {
        return Err(Refusal::UnknownJob);
    }
    let rank = header.worker();
    if rank as usize >= MAX_RANKS || rank >= job.world {
        return Err(Refusal::UnknownWorker);
    }
    let entry = machine.rank(number, rank).ok_or(Refusal::UnknownWorker)?;
    if entry.address != arrival.source {
        return Err(Refusal::ForeignAddress);
    }
    if job.generation != header.generation() || job.expected >> rank & 1 == 0 {
        return Err(Refusal::OldGeneration);
    }
    if header.payload_bytes() != arrival.payload_bytes {
        return Err(Refusal::LengthMismatch);
    }
    let lanes = header.lanes();
    if lanes as usize % crate::limits::LANES_PER_BLOCK != 0
        || lanes > job.lanes
        || (header.has(flags::PAYLOAD) && lanes == 0)
    {
        return Err(Refusal::BadLanes);
    }
    Ok(Admitted {
        job_number: number,
        members: Members { generation: job.generation, expected: job.expected },
        rules: Rules {
            generation: job.generation,
            expected: job.expected,
            quorum: job.quorum,
            epoch: job.epoch,
        },
        first_slot: job.first_slot,
        slots: job.slots,
        window: job.window,
        gain: job.gain,
        key: entry.key,
        rank,
    })
}

/// Records progress, takes the contribution, answers the wish.
#[inline(always)]
fn serve<M: Machine>(machine: &mut M, header: &mut Header, arrival: Arrival, who: &Admitted) -> Outcome {
    machine.note(Event::Requests);
    if arrival.congested {
        machine.note(Event::EcnMarks);
    }
    let Some(progress) = machine.progress(who.job_number) else {
        return Outcome::Drop(Refusal::UnknownJob);
    };
    // Before anything can refuse the payload: the sender's own ack may be the missing one (protocol-rules F14).
    let min_ack = progress.acks.record(who.members, who.rank as usize, Seq(header.raw_ack()), who.slots);
    progress.contributed(who.members, who.rank as usize, Seq(header.raw_progress()), who.slots);

    let received = if header.kind() == Some(Kind::Data) {
        match receive(machine, header, who, min_ack) {
            Ok(received) => received,
            Err(refusal) => {
                machine.refuse(refusal);
                return Outcome::Drop(refusal);
            }
        }
    } else {
        machine.note(Event::Pulls);
        // Padding is checked like a contribution: a flipped bit tells of a bad link, whatever it hit.
        if !payload_is_sound(machine, header, 0) {
            machine.refuse(Refusal::BadTag);
        }
        Received { status: Status::NotYet, attempt: 0, bits: 0 }
    };
    answer(machine, header, arrival, who, received)
}

/// The payload's tag is the header's, less the salt. True without a payload.
#[inline(always)]
fn payload_is_sound<M: Machine>(machine: &mut M, header: &Header, salt: u64) -> bool {
    match lanes::blocks_of(header.lanes()) {
        Some(blocks) if header.has(flags::PAYLOAD) => {
            machine.verify(blocks).is_some_and(|t| t.wrapping_add(salt) == header.tag())
        }
        _ => header.tag() == salt,
    }
}

/// Takes a contribution, or says why not. `Err` is for what is dropped without an answer.
#[inline(always)]
fn receive<M: Machine>(
    machine: &mut M,
    header: &Header,
    who: &Admitted,
    min_ack: Seq,
) -> Result<Received, Refusal> {
    let contribution = Contribution {
        generation: header.generation(),
        seq: header.seq(),
        bits: header.bitmap(),
        attempt: header.attempt(),
        chunk: header.chunk(),
        next_exponent: header.next_exponent(),
        has_payload: header.has(flags::PAYLOAD),
        rank: who.rank,
        non_finite: header.has(flags::NON_FINITE),
    };
    if contribution.bits != 1 << who.rank {
        // Partial sums come from switches and lower levels, which this version has none of.
        return Err(Refusal::Conflict);
    }
    let salt = tag::salt(who.key, contribution.seq, contribution.chunk);
    if let Err(refusal) = within_ring(machine, who, contribution.seq, min_ack) {
        return Ok(not_taken(machine, header, salt, refusal));
    }
    let slot = machine.slot(who.slot_index(contribution.seq)).ok_or(Refusal::UnknownJob)?;
    if !machine.lock(slot) {
        return Err(Refusal::LockBusy);
    }
    let taken = contribute(machine, header, who, slot, &contribution, salt);
    let state = machine.state(slot);
    let completed = state.settle(who.rules);
    let (attempt, bits, complete) = (state.attempt, state.bits, state.is_complete());
    machine.unlock(slot);
    if completed {
        machine.note(Event::Completions);
    }
    if attempt > 0 {
        track_redo(machine, who, Redo { seq: contribution.seq, attempt }, complete);
    }
    Ok(match taken {
        Ok(status) => Received { status, attempt, bits },
        Err(refusal) => {
            let refused = not_taken(machine, header, salt, refusal);
            let attempt = if refused.status == Status::Aborted { refused.attempt } else { attempt };
            Received { status: refused.status, attempt, bits }
        }
    })
}

/// The window test of protocol-rules F13: `seq − min_ack < S`.
#[inline(always)]
fn within_ring<M: Machine>(machine: &M, who: &Admitted, seq: Seq, min_ack: Seq) -> Result<(), Refusal> {
    if seq.since(min_ack) < who.slots {
        return Ok(());
    }
    if seq.is_before(min_ack) {
        return Err(Refusal::Behind);
    }
    let progress = machine.progress(who.job_number).ok_or(Refusal::UnknownJob)?;
    if seq.since(progress.acks.recompute(who.members)) < who.slots { Ok(()) } else { Err(Refusal::Ahead) }
}

/// Under the slot's lock: decides, combines the lanes, commits or undoes.
#[inline(always)]
fn contribute<M: Machine>(
    machine: &mut M,
    header: &Header,
    who: &Admitted,
    slot: M::SlotRef,
    contribution: &Contribution,
    salt: u64,
) -> Result<Status, Refusal> {
    let (begin, lanes) = match slot::decide(machine.state(slot), who.rules, contribution) {
        Decision::Contribute { begin, lanes } => (begin, lanes),
        Decision::Duplicate => {
            machine.note(Event::Duplicates);
            return if payload_is_sound(machine, header, salt) {
                Ok(Status::Ok)
            } else {
                Err(Refusal::BadTag)
            };
        }
        Decision::Late => {
            machine.note(Event::Late);
            return if payload_is_sound(machine, header, salt) {
                Ok(Status::NotIncluded)
            } else {
                Err(Refusal::BadTag)
            };
        }
        Decision::Refuse(refusal) => return Err(refusal),
    };
    machine.state(slot).begin(begin, who.rules, contribution);
    let gained = combine(machine, header, slot, contribution, lanes, salt)?;
    machine.state(slot).commit(contribution, gained);
    machine.note(Event::Contributions);
    if contribution.non_finite {
        machine.note(Event::NonFinite);
    }
    if begin == slot::Begin::Redo {
        machine.note(Event::Redos);
    }
    Ok(Status::Ok)
}

/// Combines the payload with the slot's lanes, checking it in the same pass; a bad one is undone. Returns what the
/// contribution adds to the slot's tag.
#[inline(always)]
fn combine<M: Machine>(
    machine: &mut M,
    header: &Header,
    slot: M::SlotRef,
    contribution: &Contribution,
    lanes: Lanes,
    salt: u64,
) -> Result<u64, Refusal> {
    let claimed = header.tag();
    let expected = claimed.wrapping_sub(salt);
    let blocks = lanes::blocks_of(contribution.chunk.lanes).unwrap_or(0);
    match lanes {
        Lanes::Untouched if expected == 0 => Ok(claimed),
        Lanes::Untouched => Err(Refusal::BadTag),
        Lanes::Store => {
            let found = machine.store(slot, blocks);
            machine.note(Event::Stores);
            if found == Some(expected) { Ok(claimed) } else { Err(Refusal::BadTag) }
        }
        Lanes::Add => {
            if machine.add(slot, blocks) == Some(expected) {
                machine.note(Event::Adds);
                return Ok(claimed);
            }
            machine.subtract(slot, blocks);
            Err(Refusal::BadTag)
        }
        Lanes::Maximum => {
            // A maximum cannot be undone, so the payload is checked before.
            if machine.verify(blocks) != Some(expected) {
                return Err(Refusal::BadTag);
            }
            machine.note(Event::Adds);
            let (before, after) = machine.maximum(slot, blocks).ok_or(Refusal::BadLanes)?;
            // By difference: damage to the slot's memory stays visible in its tag.
            Ok(after.wrapping_sub(before).wrapping_add(salt))
        }
    }
}

/// A contribution that was not taken: counts why, and whether its payload was damaged as well.
#[inline(always)]
fn not_taken<M: Machine>(machine: &mut M, header: &Header, salt: u64, refusal: Refusal) -> Received {
    machine.refuse(refusal);
    if refusal != Refusal::BadTag && !payload_is_sound(machine, header, salt) {
        machine.refuse(Refusal::BadTag);
    }
    let status = match refusal {
        Refusal::Ahead => Status::Busy,
        Refusal::Behind => Status::Stale,
        Refusal::OldAttempt | Refusal::FarAttempt => Status::OldAttempt,
        Refusal::OldGeneration => Status::Rejoin,
        Refusal::Conflict => Status::Conflict,
        Refusal::BadTag => Status::BadTag,
        _ => Status::Aborted,
    };
    Received { status, attempt: refusal as u8, bits: 0 }
}

/// Keeps the announcement of open redos true.
#[inline(always)]
fn track_redo<M: Machine>(machine: &M, who: &Admitted, redo: Redo, complete: bool) {
    if let Some(progress) = machine.progress(who.job_number) {
        if complete {
            progress.withdraw(who.members.generation, redo.seq);
        } else {
            progress.announce(who.members.generation, redo);
        }
    }
}

/// A bare answer for a request that was not admitted.
#[inline(always)]
fn reject(header: &mut Header, status: Status) -> Outcome {
    header.set_kind(Kind::Answer);
    header.set_flags(0);
    header.set_status(status as u8);
    header.set_lanes(0);
    Outcome::Answer { payload: false }
}

/// Answers the wish for `want`: with the result if it stands and fits the frame, else with the state of affairs.
#[inline(always)]
fn answer<M: Machine>(
    machine: &mut M,
    header: &mut Header,
    arrival: Arrival,
    who: &Admitted,
    received: Received,
) -> Outcome {
    let want = header.want();
    let (is_pull, room) = (header.kind() == Some(Kind::Pull), arrival.payload_bytes);
    let generation = who.members.generation;
    header.set_kind(Kind::Answer);
    header.set_flags(if arrival.congested { flags::ECN_ECHO } else { 0 });
    header.set_status(received.status as u8);
    header.set_attempt(received.attempt);
    header.set_window(who.window);
    header.set_gain(who.gain);
    header.set_operation_or_epoch(who.rules.epoch);

    if let Some(progress) = machine.progress(who.job_number) {
        stamp_progress(header, progress, generation);
    }
    let mut bitmap = 0;
    if let Some(slot) = look_up(machine, who, want) {
        let state = *machine.state(slot);
        if state.is_complete() {
            if let Some(payload) = hand_out(machine, header, slot, state, generation, want, room) {
                if is_pull {
                    header.set_status(Status::Ok as u8);
                }
                return Outcome::Answer { payload };
            }
        }
        bitmap = state.bits;
        if is_pull {
            header.set_attempt(state.attempt);
        }
    }
    if let Some(progress) = machine.progress(who.job_number) {
        progress.contributed.recompute(who.members);
        header.set_raw_want(progress.acks.recompute(who.members).0);
        stamp_progress(header, progress, generation);
        let redo = progress.redo(generation);
        header.set_tag(redo.map_or(0, Redo::to_word));
        if redo.is_some() {
            header.set_flags(header.flags() | flags::REDO);
        }
    }
    header.set_bitmap(if received.status == Status::Aborted { received.bits } else { bitmap });
    header.set_lanes(0);
    Outcome::Answer { payload: false }
}

#[inline(always)]
fn stamp_progress(header: &mut Header, progress: &Progress, generation: u32) {
    header.set_raw_ack(progress.contributed.floor(generation).0);
    header.set_raw_progress(progress.highest(generation).0);
    header.set_rank(progress.contributed.slowest(generation));
}

/// The slot of `want`, if it holds that chunk. Completes it if the rules have come to allow it (protocol-rules F10).
#[inline(always)]
fn look_up<M: Machine>(machine: &mut M, who: &Admitted, want: Seq) -> Option<M::SlotRef> {
    let slot = machine.slot(who.slot_index(want))?;
    let state = machine.state(slot);
    if !state.holds(who.members.generation, want) {
        return None;
    }
    if !state.is_complete() {
        let (due, attempt) = (state.is_due(who.rules), state.attempt);
        if due && machine.lock(slot) {
            let state = machine.state(slot);
            let completed = state.holds(who.members.generation, want) && state.settle(who.rules);
            machine.unlock(slot);
            if completed {
                machine.note(Event::Completions);
            }
        }
        if attempt > 0 {
            let complete = machine.state(slot).is_complete();
            track_redo(machine, who, Redo { seq: want, attempt }, complete);
        }
    }
    Some(slot)
}

/// Writes a complete slot's result into the answer, unless the frame has another length. The slot may be taken for
/// another chunk meanwhile (only by a chunk that this rank has let go of, but an old duplicate may ask): the copy is
/// valid if the slot's identity is the same afterwards (protocol-rules part 2.11), and the tag tells the receiver.
#[inline(always)]
fn hand_out<M: Machine>(
    machine: &mut M,
    header: &mut Header,
    slot: M::SlotRef,
    state: Slot,
    generation: u32,
    want: Seq,
    room: u32,
) -> Option<bool> {
    let chunk = state.chunk();
    let payload = state.has_payload();
    if payload {
        if u32::from(chunk.lanes) * 4 != room {
            return None;
        }
        machine.emit(slot, lanes::blocks_of(chunk.lanes)?)?;
        let now = machine.state(slot);
        if !now.holds(generation, want) || !now.is_complete() || now.attempt != state.attempt {
            return None;
        }
    }
    let mut flags = header.flags() | flags::RESULT;
    if payload {
        flags |= flags::PAYLOAD;
    }
    if let Some(culprit) = state.non_finite() {
        flags |= flags::NON_FINITE;
        header.set_rank(culprit);
    }
    header.set_flags(flags);
    header.set_raw_want(want.0);
    header.set_bitmap(state.bits);
    header.set_tag(state.tag);
    header.set_lanes(chunk.lanes);
    header.set_contributors(state.contributors());
    header.set_exponent(chunk.exponent);
    header.set_next_exponent(state.next_exponent());
    header.set_attempt(state.attempt);
    header.set_operation_or_epoch(state.epoch);
    machine.note(Event::Results);
    Some(payload)
}

/// What a result of `chunk` is checked against: its tag less the salts of its contributors.
#[must_use]
pub fn unsalted(tag: u64, keys: u64, seq: Seq, chunk: Chunk) -> u64 {
    tag.wrapping_sub(tag::salt(keys, seq, chunk))
}
