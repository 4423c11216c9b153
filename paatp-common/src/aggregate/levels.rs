//! Requests that go up to a parent, and its answers that go down (docs/protocol.md, Levels).

use crate::counter::{Event, Refusal};
use crate::job::JobEntry;
use crate::levels::{Heard, KeySum, Reach, Report, Vouching};
use crate::limits::{LANES_PER_BLOCK, MAX_JOBS, MAX_RANKS};
use crate::mind::opaque;
use crate::seq::Seq;
use crate::slot::Final;
use crate::tag;
use crate::wire::{Header, Kind, Redo, Saying, Status, flags};

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
    let redo = earlier(Redo::from_word(saying.tag), report.redo);
    let is_redone = redo.attempt > 0;
    Saying {
        flags: echo | if is_redone { flags::REDO } else { 0 },
        want: report.min_ack.0,
        tag: if is_redone { redo.to_word() } else { 0 },
        told: report.told,
        rank: report.slowest,
        epoch: report.epoch,
        ..saying
    }
}

/// One more than the rank of the parent's job that all ranks here are together (protocol-rules F22), or 0. Read anew,
/// likewise.
#[inline(always)]
fn child<M: Machine>(machine: &mut M, number: u16) -> u8 {
    let child = machine.link(number).map_or(0, |link| link.child);
    machine.forget(u64::from(child)) as u8
}

/// The same of the job of the request in hand, which `rises`.
#[inline(always)]
fn child_of_request<M: Machine>(machine: &mut M) -> u8 {
    let number = machine.header().job();
    child(machine, number)
}

/// Lowest acknowledgement of all ranks that the ring's places are given out by, where that of the ranks here is `own`.
/// Where these are one at the parent it is the root's word, within what `own` proves ([`crate::levels::Above::floor`]): a
/// redo, which ranks of other nodes may ask for, needs the slots of the chunks that they have not acknowledged.
#[inline(always)]
pub(super) fn floor<M: Machine>(machine: &mut M, who: &Admitted<M::JobRef>, own: Seq) -> Seq {
    if !rises(machine, who) || child_of_request(machine) == 0 {
        return own;
    }
    let (number, generation) = (machine.header().job(), machine.header().generation());
    let window = machine.job(who.job).window;
    machine.above(number).map_or(own, |above| above.floor(generation, own, window))
}

/// Contributors of a result of this node, whose slot has these bits.
#[inline(always)]
pub(super) fn contributors<M: Machine>(machine: &mut M, bits: u64) -> u64 {
    let number = machine.header().job();
    match machine.link(number) {
        Some(link) if link.child != 0 => link.everybody(),
        _ => bits,
    }
}

/// Of this node's open redo and the parent's (attempt 0: there is none) the one of the earlier chunk: with all nodes telling
/// that, every rank joins in one after the other. Two that each told its own first would wait for each other.
#[inline(always)]
fn earlier(own: Redo, above: Redo) -> Redo {
    let is_later = own.seq == above.seq && own.attempt > above.attempt;
    let is_own = above.attempt == 0 || own.attempt > 0 && (own.seq.is_before(above.seq) || is_later);
    if is_own { own } else { above }
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

/// Under the slot's lock: the contribution is none of this node's business, but its parent's. (Where ranks have no name of
/// their own there, nobody's: all that are expected are in a sum.)
#[inline(always)]
pub(super) fn passes<M: Machine>(machine: &mut M, slot: M::SlotRef) -> Option<Fate> {
    let header = machine.header();
    let (generation, seq, bits) = (header.generation(), header.seq(), header.bitmap());
    let state = machine.state(slot);
    let is_late = state.is_sent() && bits & !state.bits != 0;
    if !state.holds(generation, seq) || !(state.is_bypassed() || is_late) {
        return None;
    }
    let is_child = child_of_request(machine) != 0;
    Some(if is_child { Fate::refused(Refusal::Conflict) } else { Fate::PASSED })
}

/// A contribution to a redo is the root's. Where ranks have no name of their own there, this node collects them anew.
#[inline(always)]
pub(super) fn passes_redo<M: Machine>(machine: &mut M, who: &Admitted<M::JobRef>) -> bool {
    rises(machine, who) && machine.header().attempt() > 0 && child_of_request(machine) == 0
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
    let attempt = if is_own { state.attempt } else { 0 };
    machine.unlock(slot);
    if is_pull && !has_result {
        machine.note(Event::PassedOn);
        if attempt > 0 {
            ask_for_news(machine, who, Redo { seq: chunk, attempt });
        }
        return Some(pass_on(machine, who));
    }
    None
}

/// A PULL of a chunk that this node collects anew. It announces that once more: an earlier chunk's redo may have taken the
/// place of the announcement, and whose contribution is acknowledged does not send it again. And it goes up with a wish that
/// cannot be granted: the result that the root has is the bad one, and with it comes no word of the redo that all others are
/// told first (`model/nodes.rs`: two redos wait for each other).
#[inline(always)]
fn ask_for_news<M: Machine>(machine: &mut M, who: &Admitted<M::JobRef>, redo: Redo) {
    let generation = machine.header().generation();
    machine.progress(who.job).announce(generation, redo);
    // In the ring it has the place of the chunk that is asked for, and cannot be there before that one is over.
    let beyond = redo.seq.plus(machine.job(who.job).slots);
    machine.header().set_raw_want(beyond.0);
}

/// The request as it is, under the job's number at the parent.
#[inline(always)]
fn pass_on<M: Machine>(machine: &mut M, who: &Admitted<M::JobRef>) -> Outcome {
    if child_of_request(machine) != 0 {
        // In the name of all ranks here.
        let (generation, _) = named(machine, who);
        let progress = machine.progress(who.job);
        let (ack, contributed) = (progress.acks.floor(generation), progress.contributed.floor(generation));
        let header = machine.header();
        header.set_raw_ack(ack.0);
        header.set_raw_progress(contributed.0);
    }
    let payload = machine.header().has(flags::PAYLOAD);
    leave(machine, who, payload)
}

/// Seals the header for the parent.
#[inline(always)]
fn leave<M: Machine>(machine: &mut M, who: &Admitted<M::JobRef>, payload: bool) -> Outcome {
    let number = machine.header().job();
    let seq = machine.header().seq();
    let Some(link) = machine.link(number) else { return Outcome::Drop(Refusal::UnknownJob) };
    let (there, port, child) = (link.number, link.port(seq), link.child);
    let relay = Relay::up(number, who.rank, port, payload);
    if machine.forget(u64::from(child)) == 0 {
        let header = machine.header();
        header.set_job(there);
        header.seal();
        return Outcome::Up(relay);
    }
    // The answer will not name the rank, so its port does.
    let from = machine.ports().wrapping_add(u16::from(who.rank));
    let header = machine.header();
    header.set_job(there);
    header.set_worker(child.wrapping_sub(1));
    header.seal();
    Outcome::Up(relay.from(from))
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
    let number = header.job();
    let child = child(machine, number);
    let header = machine.header();
    // In one name it is an ordinary contribution.
    let partial = if child == 0 { flags::PARTIAL } else { 0 };
    let mut told = partial | if is_again { flags::RETRANSMIT } else { 0 };
    told |= if has_payload { flags::PAYLOAD } else { 0 };
    told |= if culprit.is_some() { flags::NON_FINITE } else { 0 };
    let seq = chunk_of(header);
    header.set_kind(Kind::Data);
    header.set_flags(told);
    // Whom it speaks for is told of sums of several names alone.
    header.set_status(if child == 0 { culprit.or(root).unwrap_or(rank as u8) } else { 0 });
    header.set_raw_seq(seq.0);
    header.set_raw_ack(ack.0);
    header.set_raw_progress(contributed.0);
    header.set_bitmap(if child == 0 { state.bits } else { 1 << ((child - 1) & 63) });
    header.set_tag(state.tag);
    header.set_lanes(chunk.lanes);
    header.set_contributors(if child == 0 { state.contributors() as u8 } else { 1 });
    header.set_exponent(chunk.exponent);
    header.set_next_exponent(state.next_exponent());
    header.set_rank(chunk.root);
    // Of a redo in one name; several names have none.
    header.set_attempt(if child == 0 { 0 } else { state.attempt });
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
    let ports = machine.ports();
    let child = child(machine, number);
    let named = arrival.port.wrapping_sub(ports);
    let (rank, is_known) = if child == 0 {
        (rank, rank < world)
    } else {
        (named as u8, rank == child - 1 && named < u16::from(world))
    };
    if !is_known {
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
    let mut relay = Relay::down(number, rank);
    if machine.forget(u64::from(child)) != 0 {
        let header = machine.header();
        header.set_worker(rank);
        if !header.has(flags::RESULT) {
            speak_for_both(machine, job);
        }
        // From the port that the rank sent to.
        let port = machine.header().raw_seq() % u32::from(ports).max(1);
        relay = relay.from(port as u16);
    }
    machine.header().seal();
    machine.note(Event::HandedDown);
    Ok(Outcome::Down(relay))
}

/// The parent's answer without a result, for a rank that has no name there: as long as ranks of this node are missing it
/// tells who is here. (With ABORTED it tells who disagrees, or is lost, which the parent knows.)
#[inline(always)]
fn speak_for_both<M: Machine>(machine: &mut M, job: M::JobRef) {
    let header = machine.header();
    let (generation, seq) = (header.generation(), header.seq());
    let is_aborted = header.status() == Status::Aborted as u8;
    let Some(slot) = machine.slot(slot_index(machine.job(job), seq)) else { return };
    let state = machine.state(slot);
    let is_own = state.holds(generation, seq);
    let is_up = is_aborted || is_own && (state.is_sent() || state.is_complete());
    let here = if is_own { state.bits } else { 0 };
    let redo = machine.progress(job).redo(generation);
    let header = machine.header();
    if is_up {
        header.set_flags(header.flags() | flags::ABOVE);
    } else {
        header.set_bitmap(here);
    }
    let none = Redo { seq: Seq(0), attempt: 0 };
    let above = if header.has(flags::REDO) { Redo::from_word(header.tag()) } else { none };
    let redo = earlier(redo.unwrap_or(none), above);
    if redo.attempt > 0 {
        header.set_flags(header.flags() | flags::REDO);
        header.set_tag(redo.to_word());
    }
}

#[inline(always)]
fn learn<M: Machine>(machine: &mut M, job: M::JobRef, number: u16, generation: u32) {
    // A switch on the way up speaks of its own memory, not of the job.
    if machine.header().has(flags::PARTIAL) {
        return;
    }
    let child = child(machine, number);
    // A result proves that all ranks have those a window before it: nobody contributes without (protocol-rules F5).
    let window = machine.job(job).window;
    let proof = if child == 0 { None } else { Some(window) };
    let heard = Heard::of(machine.header(), proof);
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
    let Some(keys) = keys_of(machine, number, bitmap) else { return };
    if !machine.lock(slot) {
        // It comes again with the next pull.
        return;
    }
    let kept = replace(machine, slot, number, (generation, want), keys);
    machine.unlock(slot);
    match kept {
        Kept::Now => {
            machine.note(Event::Completions);
            machine.progress(job).withdraw(generation, want);
        }
        Kept::Not => {}
        Kept::Bad => machine.refuse(Refusal::BadTag),
    }
}

/// The keys of all contributors of a result.
#[inline(always)]
fn keys_of<M: Machine>(machine: &mut M, number: u16, bitmap: u64) -> Option<u64> {
    if child(machine, number) == 0 {
        return machine.sum_keys(number, KeySum::of(bitmap)).keys();
    }
    let link = machine.link(number)?;
    (bitmap == link.everybody()).then_some(link.keys)
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
fn replace<M: Machine>(
    machine: &mut M,
    slot: M::SlotRef,
    number: u16,
    (generation, want): (u32, Seq),
    keys: u64,
) -> Kept {
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
    // Ranks without a name in the result are still those that a redo waits for.
    let is_child = child(machine, number) != 0;
    let mut result = Final::of(machine.header());
    if is_child {
        result.bits = machine.state(slot).bits;
    }
    machine.state(slot).finish(result);
    Kept::Now
}
