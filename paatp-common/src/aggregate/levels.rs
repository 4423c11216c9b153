//! Requests that go up to a parent, and its answers that go down (docs/protocol.md, Levels).

use crate::counter::{Event, Refusal};
use crate::job::JobEntry;
use crate::levels::{Heard, KeySum, Reach, Report, Vouching};
use crate::limits::{LANES_PER_BLOCK, MAX_JOBS, MAX_RANKS};
use crate::mind::opaque;
use crate::seq::Seq;
use crate::slot::Final;
use crate::tag;
use crate::wire::{Header, Kind, Saying, Status, flags};

use super::{Admitted, Arrival, Fate, Machine, Outcome, Received, Relay, agrees, named, slot_index};

/// The job's sums go to a parent. Read anew each time it is asked: what the verifier learns of a value at one test would
/// split all that follows up to the next.
#[inline(always)]
pub(super) fn rises<M: Machine>(machine: &M, who: &Admitted<M::JobRef>) -> bool {
    M::LEVELS && machine.rises(who.job)
}

/// The request is a sum of a lower node. Read anew, likewise.
#[inline(always)]
pub(super) fn is_sum<M: Machine>(machine: &mut M) -> bool {
    if !M::LEVELS {
        return false;
    }
    let header = machine.header();
    let is_data = header.kind() == Some(Kind::Data);
    let flag = if is_data { header.flags() & flags::PARTIAL } else { 0 };
    machine.forget(u64::from(flag)) != 0
}

/// What a lower node says where it has no result: its parent's word on the job.
#[inline(always)]
pub(super) fn said<M: Machine>(machine: &mut M, saying: Saying, echo: u8) -> Saying {
    let report = report(machine);
    let is_redone = report.redo.attempt > 0;
    Saying {
        flags: echo | if is_redone { flags::REDO } else { 0 },
        want: report.min_ack.0,
        tag: if is_redone { report.redo.to_word() } else { 0 },
        told: report.told,
        rank: report.slowest,
        epoch: report.epoch,
        ..saying
    }
}

/// The keys of all ranks in a partial sum, whose progress is recorded on the way.
#[inline(always)]
pub(super) fn vouched<M: Machine>(
    machine: &mut M,
    arrival: Arrival,
    who: &Admitted<M::JobRef>,
) -> Result<u64, Refusal> {
    let reach = machine.job(who.job).slots;
    let number = machine.header().job();
    let switched = machine.link(number).map_or(0, |link| link.switched);
    let vouching = Vouching::of(machine.header(), arrival.source, reach, switched);
    machine.vouch(who.job, number, vouching).keys().ok_or(Refusal::ForeignAddress)
}

/// The rank that a sum speaks for: the culprit of values that cannot be reduced, the root of a broadcast whose payload it
/// has, otherwise the one whose request it was.
#[inline(always)]
pub(super) fn speaker<M: Machine>(machine: &mut M, rank: u8) -> u8 {
    if !M::LEVELS {
        return rank;
    }
    let header = machine.header();
    let status = header.status();
    // Of a rank that is not in it a sum says nothing: a broadcast's payload counts only with its root's contribution (F20).
    let is_in = status < MAX_RANKS as u8 && header.bitmap() >> (status & 63) & 1 == 1;
    if header.has(flags::PARTIAL) && is_in { status } else { rank }
}

/// The bits of a contribution are what its sender may send: its own, or with PARTIAL its own and others, of the first
/// attempt (protocol-rules part 2.2: a sum may be what a redo is to mend).
#[inline(always)]
pub(super) fn check_bits<M: Machine>(machine: &mut M, rank: u8) -> Result<(), Refused> {
    let header = machine.header();
    let bits = header.bitmap();
    if M::LEVELS && header.has(flags::PARTIAL) {
        let is_allowed = bits >> rank & 1 == 1 && header.attempt() == 0;
        return if is_allowed { Ok(()) } else { Err(Refused::Answered) };
    }
    if bits == 1 << rank { Ok(()) } else { Err(Refused::Dropped) }
}

/// What becomes of a contribution whose bits are wrong.
pub(super) enum Refused {
    /// Its sender is told.
    Answered,
    /// Nobody is.
    Dropped,
}

/// A contribution to a redo goes to the parent, also to one that all ranks here can do without; the chunk's slot is
/// bypassed from now on (protocol-rules part 2.15).
#[inline(always)]
pub(super) fn pass_redo<M: Machine>(
    machine: &mut M,
    who: &Admitted<M::JobRef>,
    seq: Seq,
) -> Result<Received, Refusal> {
    let slot = machine.slot(slot_index(machine.job(who.job), seq)).ok_or(Refusal::UnknownJob)?;
    if !machine.lock(slot) {
        return Err(Refusal::LockBusy);
    }
    let generation = machine.header().generation();
    let state = machine.state(slot);
    if state.holds(generation, seq) {
        state.bypass();
    }
    machine.unlock(slot);
    Ok(Received { fate: Fate::PASSED, attempt: 0, bits: 0 })
}

/// Under the slot's lock: the contribution is none of this node's business, but its parent's.
#[inline(always)]
pub(super) fn passes<M: Machine>(machine: &mut M, slot: M::SlotRef) -> bool {
    let header = machine.header();
    let (generation, seq, bits) = (header.generation(), header.seq(), header.bitmap());
    let state = machine.state(slot);
    state.holds(generation, seq) && (state.is_bypassed() || state.is_sent() && bits & !state.bits != 0)
}

/// What a lower node tells of the job: its parent's word.
#[inline(always)]
pub(super) fn report<M: Machine>(machine: &mut M) -> Report {
    let header = machine.header();
    let (number, generation, want) = (header.job(), header.generation(), header.want());
    match machine.above(number) {
        Some(above) => above.report(generation, want),
        // A machine with levels has one for each job.
        None => Report::NONE,
    }
}

/// The chunk that a request is about: a PULL says it in `want`. Each is read by itself, or LLVM would add a variable to the
/// header's address, which the verifier takes with CAP_PERFMON only.
#[inline(always)]
fn chunk_of(header: &Header) -> Seq {
    let is_pull = header.kind() == Some(Kind::Pull);
    let (want, seq) = (opaque(u64::from(header.raw_want())), opaque(u64::from(header.raw_seq())));
    Seq(if is_pull { want } else { seq } as u32)
}

/// Sends a request up, if that is what becomes of it; otherwise it is answered here.
#[inline(always)]
pub(super) fn ascend<M: Machine>(
    machine: &mut M,
    arrival: Arrival,
    who: &Admitted<M::JobRef>,
    received: Received,
    status: u8,
) -> Option<Outcome> {
    let header = machine.header();
    let is_pull = header.kind() == Some(Kind::Pull);
    let (generation, chunk) = (header.generation(), chunk_of(header));
    if machine.forget(received.fate.0) == Fate::PASSED.0 {
        return Some(pass_on(machine, who));
    }
    // Forgotten for itself, so that the test tells the verifier nothing of what the answer says.
    if !is_pull && machine.forget(u64::from(status)) != Status::Ok as u64 {
        return None;
    }
    let slot = machine.slot(slot_index(machine.job(who.job), chunk))?;
    // A glance without the lock: most contributions are not the last one.
    if !is_pull && !machine.state(slot).is_sent() {
        return None;
    }
    if !machine.lock(slot) {
        machine.refuse(Refusal::LockBusy);
        return Some(Outcome::Drop(Refusal::LockBusy));
    }
    let rules = machine.rules(who.job);
    let state = machine.state(slot);
    let is_own = state.holds(generation, chunk) && rules.generation == generation;
    if is_own {
        // At every touch (protocol-rules F10): a rank may be expected no more.
        state.settle_sum(rules);
    }
    if is_own && state.is_sent() {
        let outcome = lift(machine, arrival, who, slot);
        machine.unlock(slot);
        return outcome;
    }
    let has_result = is_own && state.is_complete();
    machine.unlock(slot);
    if is_pull && !has_result {
        machine.note(Event::PassedOn);
        return Some(pass_on(machine, who));
    }
    None
}

/// The request as it is, under the job's number at the parent.
#[inline(always)]
fn pass_on<M: Machine>(machine: &mut M, who: &Admitted<M::JobRef>) -> Outcome {
    let payload = machine.header().has(flags::PAYLOAD);
    leave(machine, who, payload)
}

/// Seals the header for the parent.
#[inline(always)]
fn leave<M: Machine>(machine: &mut M, who: &Admitted<M::JobRef>, payload: bool) -> Outcome {
    let number = machine.header().job();
    let seq = machine.header().seq();
    let Some(link) = machine.link(number) else { return Outcome::Drop(Refusal::UnknownJob) };
    let (there, port) = (link.number, link.port(seq));
    let header = machine.header();
    header.set_job(there);
    header.seal();
    Outcome::Up(Relay::up(number, who.rank, port, payload))
}

/// Under the slot's lock: makes the request a contribution of all ranks in the slot.
#[inline(always)]
fn lift<M: Machine>(
    machine: &mut M,
    arrival: Arrival,
    who: &Admitted<M::JobRef>,
    slot: M::SlotRef,
) -> Option<Outcome> {
    let state = machine.state(slot);
    let (has_payload, lanes) = (state.has_payload(), state.chunk().lanes);
    if has_payload {
        if u32::from(lanes) * 4 != arrival.payload_bytes {
            // Only a broadcast's: a pull, which is as long as the result, takes it up.
            return None;
        }
        let blocks = (machine.forget(u64::from(lanes)) / LANES_PER_BLOCK as u64) as u32;
        machine.lift(slot, blocks)?;
    }
    let (generation, rank) = named(machine, who);
    let progress = machine.progress(who.job);
    let (ack, contributed) = (progress.acks.floor(generation), progress.contributed.floor(generation));
    let state = *machine.state(slot);
    let chunk = state.chunk();
    let culprit = state.non_finite();
    let root = (has_payload && chunk.is_broadcast()).then_some(chunk.root);
    let header = machine.header();
    // Sent again it goes past a switch, as a worker's retransmission does (protocol-rules F15).
    let is_again = header.kind() == Some(Kind::Pull) || header.has(flags::RETRANSMIT);
    let mut told = flags::PARTIAL | if is_again { flags::RETRANSMIT } else { 0 };
    told |= if has_payload { flags::PAYLOAD } else { 0 };
    told |= if culprit.is_some() { flags::NON_FINITE } else { 0 };
    let seq = chunk_of(header);
    header.set_kind(Kind::Data);
    header.set_flags(told);
    header.set_status(culprit.or(root).unwrap_or(rank as u8));
    header.set_raw_seq(seq.0);
    header.set_raw_ack(ack.0);
    header.set_raw_progress(contributed.0);
    header.set_bitmap(state.bits);
    header.set_tag(state.tag);
    header.set_lanes(chunk.lanes);
    header.set_contributors(state.contributors() as u8);
    header.set_exponent(chunk.exponent);
    header.set_next_exponent(state.next_exponent());
    header.set_rank(chunk.root);
    header.set_attempt(0);
    header.set_operation_or_epoch(chunk.operation_and_type);
    machine.note(Event::Lifted);
    Some(leave(machine, who, has_payload))
}

/// Hands an answer of the parent down.
#[inline(always)]
pub(super) fn descend<M: Machine>(machine: &mut M, arrival: Arrival) -> Outcome {
    match hand_down(machine, arrival) {
        Ok(outcome) => outcome,
        Err(refusal) => {
            machine.refuse(refusal);
            Outcome::Drop(refusal)
        }
    }
}

#[inline(always)]
fn hand_down<M: Machine>(machine: &mut M, arrival: Arrival) -> Result<Outcome, Refusal> {
    machine.header().check()?;
    let header = machine.header();
    let (there, rank, generation) = (header.job(), header.worker(), header.generation());
    let (lanes, promised, status) = (header.lanes(), header.payload_bytes(), header.status());
    if there as usize >= MAX_JOBS {
        return Err(Refusal::UnknownJob);
    }
    let below = machine.link(there).map_or(0, |link| link.below);
    let number = below.wrapping_sub(1);
    if number as usize >= MAX_JOBS {
        return Err(Refusal::UnknownJob);
    }
    let link = machine.link(number).ok_or(Refusal::UnknownJob)?;
    if !link.is_set() || link.parent != arrival.source {
        return Err(Refusal::ForeignAddress);
    }
    let job = machine.find(number).ok_or(Refusal::UnknownJob)?;
    let &JobEntry { generation: current, world, lanes: most, .. } = machine.job(job);
    if current == 0 || current != generation {
        return Err(Refusal::OldGeneration);
    }
    if rank >= world {
        return Err(Refusal::UnknownWorker);
    }
    if promised != arrival.payload_bytes {
        return Err(Refusal::LengthMismatch);
    }
    if !(lanes as usize).is_multiple_of(LANES_PER_BLOCK) || lanes > most {
        return Err(Refusal::BadLanes);
    }
    // REJOIN holds the request's words.
    if status != Status::Rejoin as u8 {
        learn(machine, job, number, generation);
        if machine.header().has(flags::RESULT) {
            keep(machine, job, number);
        }
    }
    let header = machine.header();
    header.set_job(number);
    header.seal();
    machine.note(Event::HandedDown);
    Ok(Outcome::Down(Relay::down(number, rank)))
}

#[inline(always)]
fn learn<M: Machine>(machine: &mut M, job: M::JobRef, number: u16, generation: u32) {
    // A switch on the way up speaks of its own memory, not of the job.
    if machine.header().has(flags::PARTIAL) {
        return;
    }
    let heard = Heard::of(machine.header());
    let floor = machine.progress(job).acks.floor(generation);
    let reach = Reach { floor, slots: machine.job(job).slots };
    if let Some(above) = machine.above(number) {
        above.learn(generation, heard, reach);
    }
}

/// Puts a result into its slot, where the other ranks of this node find it, if the slot waits for it and it is sound.
#[inline(always)]
fn keep<M: Machine>(machine: &mut M, job: M::JobRef, number: u16) {
    let header = machine.header();
    let (generation, want, bitmap) = (header.generation(), header.want(), header.bitmap());
    let Some(slot) = machine.slot(slot_index(machine.job(job), want)) else { return };
    // A glance without the lock: it may be there already.
    let state = machine.state(slot);
    if !state.holds(generation, want) || !state.is_sent() || bitmap == 0 {
        return;
    }
    let keys = KeySum::of(bitmap);
    let Some(keys) = machine.sum_keys(number, keys).keys() else { return };
    if !machine.lock(slot) {
        // It comes again with the next pull.
        return;
    }
    let kept = replace(machine, slot, generation, want, keys);
    machine.unlock(slot);
    match kept {
        Kept::Now => machine.note(Event::Completions),
        Kept::Not => {}
        Kept::Bad => machine.refuse(Refusal::BadTag),
    }
}

/// What became of a parent's result.
#[derive(Clone, Copy)]
enum Kept {
    /// It is in the slot.
    Now,
    /// The slot does not wait for it.
    Not,
    /// It is not what the slot's ranks contributed to, or damaged.
    Bad,
}

/// Under the slot's lock: checks the result and writes it over the sum.
#[inline(always)]
fn replace<M: Machine>(machine: &mut M, slot: M::SlotRef, generation: u32, want: Seq, keys: u64) -> Kept {
    let state = machine.state(slot);
    let (chunk, attempt) = (state.chunk(), state.attempt);
    if !state.holds(generation, want) || !state.is_sent() {
        // Another CPU was faster.
        return Kept::Not;
    }
    let header = machine.header();
    let has_payload = header.has(flags::PAYLOAD);
    let (lanes, result_attempt, exponent) = (header.lanes(), header.attempt(), header.exponent());
    if result_attempt != attempt {
        // Of a redo: it is between the rank and the root.
        return Kept::Not;
    }
    if exponent != chunk.exponent || has_payload && lanes != chunk.lanes {
        return Kept::Bad;
    }
    let blocks = if has_payload { machine.forget(u64::from(lanes)) / LANES_PER_BLOCK as u64 } else { 0 };
    let blocks = machine.forget(blocks) as u32;
    let found = machine.verify(blocks);
    if !agrees(machine, found, tag::salt(keys, want, chunk)) {
        return Kept::Bad;
    }
    if machine.replace(slot, blocks).is_none() {
        return Kept::Bad;
    }
    let result = Final::of(machine.header());
    machine.state(slot).finish(result);
    Kept::Now
}
