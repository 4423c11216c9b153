//! One request through the tables: who may speak, what becomes of the contribution, what is answered.
//!
//! [`handle`] is the whole aggregator but for parsing frames and owning memory. The XDP program instantiates it over
//! kernel maps and packet memory, tests and simulator over slices ([`Machine`]). The request's header becomes the
//! answer's in place, and a result is written over the request's payload: one packet in, one packet out.

use crate::counter::{Event, Refusal};
use crate::job::JobEntry;
use crate::limits::{LANES_PER_BLOCK, MAX_JOBS, MAX_RANKS};
use crate::mind::barrier;
use crate::progress::Members;
use crate::seq::Seq;
use crate::slot::{self, Begin, Contribution, Decision, Lanes, Rules};
use crate::tag;
use crate::wire::{Chunk, Header, Kind, Redo, Saying, Status, Turn, flags};

mod claim;
mod levels;
mod machine;

pub use machine::{Arrival, Machine, Outcome, Relay};

/// A request that may touch the job's state. No more than this: the kernel has 512 bytes of stack, and what can be read
/// from the header again is not kept there.
#[derive(Clone, Copy)]
struct Admitted<J> {
    job: J,
    rank: u8,
    /// The rank's salt factor.
    key: u64,
    /// Its rate-control gain.
    gain: i8,
}

/// The slot that a chunk has in a job's ring.
#[inline(always)]
fn slot_index(job: &JobEntry, seq: Seq) -> u32 {
    job.first_slot.wrapping_add(seq.0 & job.slots.wrapping_sub(1))
}

/// Whose progress counts in a job.
#[inline(always)]
fn members(job: &JobEntry) -> Members {
    Members { generation: job.generation, expected: job.expected, world: job.world }
}

/// What became of a contribution: the status that tells of it, the counter that counts it, and whether the payload
/// was checked on the way. One number, so that [`Machine::forget`] can make the kernel's verifier forget which it is.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Fate(u64);

impl Fate {
    /// There was none: the request is a PULL.
    const ABSENT: Fate = Fate::new(Status::NotYet, Event::Pulls.counter(), false);
    /// It is in its slot now.
    const TAKEN: Fate = Fate::new(Status::Ok, Event::Contributions.counter(), true);
    /// It was in its slot before.
    const DUPLICATE: Fate = Fate::new(Status::Ok, Event::Duplicates.counter(), false);
    /// It needs the contribution of a rank that is gone.
    const HOPELESS: Fate = Fate::refused(Refusal::DeadRankInRedo);
    /// The slot was completed without it.
    const LATE: Fate = Fate::new(Status::NotIncluded, Event::Late.counter(), false);
    /// It goes to the parent as it is, which checks it.
    const PASSED: Fate = Fate::new(Status::Ok, Event::PassedOn.counter(), true);

    const fn new(status: Status, counter: u32, checked: bool) -> Fate {
        Fate(status as u64 | (counter as u64) << 8 | (checked as u64) << 16)
    }

    #[inline(always)]
    const fn refused(refusal: Refusal) -> Fate {
        let status = match refusal {
            Refusal::Ahead | Refusal::Crowded => Status::Busy,
            Refusal::Behind => Status::Stale,
            Refusal::OldAttempt | Refusal::FarAttempt => Status::OldAttempt,
            Refusal::OldGeneration => Status::Rejoin,
            Refusal::BadTag => Status::BadTag,
            _ => Status::Aborted,
        };
        Fate::new(status, refusal.counter(), matches!(refusal, Refusal::BadTag))
    }

    #[inline(always)]
    const fn status(self) -> u8 {
        self.0 as u8
    }

    #[inline(always)]
    const fn counter(self) -> u32 {
        (self.0 >> 8 & 0xFF) as u32
    }

    #[inline(always)]
    const fn was_checked(self) -> bool {
        self.0 >> 16 & 1 == 1
    }
}

/// [`Fate`] of a contribution, and its slot afterwards.
#[derive(Clone, Copy)]
struct Received {
    fate: Fate,
    attempt: u8,
    bits: u64,
}

/// Handles one request whose frame was parsed: its header becomes the answer's.
#[inline(always)]
pub fn handle<M: Machine>(machine: &mut M, arrival: Arrival) -> Outcome {
    if M::LEVELS && machine.header().kind() == Some(Kind::Answer) {
        return levels::descend(machine, arrival);
    }
    match admit(machine, arrival) {
        Ok(admitted) => serve(machine, arrival, &admitted),
        Err(Refusal::OldGeneration) => {
            // The address is registered, so telling it to join again amplifies nothing towards a stranger.
            machine.refuse(Refusal::OldGeneration);
            reject(machine.header(), Status::Rejoin);
            Outcome::Answer { payload: false }
        }
        Err(refusal) => {
            machine.refuse(refusal);
            Outcome::Drop(refusal)
        }
    }
}

/// Header, job, worker, address, length and generation: checked before any slot is touched.
#[inline(always)]
fn admit<M: Machine>(machine: &mut M, arrival: Arrival) -> Result<Admitted<M::JobRef>, Refusal> {
    machine.header().check()?;
    let header = machine.header();
    if !matches!(header.kind(), Some(Kind::Data | Kind::Pull)) {
        return Err(Refusal::BadKind);
    }
    let (number, rank, generation) = (header.job(), header.worker(), header.generation());
    let (lanes, promised) = (header.lanes(), header.payload_bytes());
    let is_empty = header.has(flags::PAYLOAD) && lanes == 0;
    if number as usize >= MAX_JOBS {
        return Err(Refusal::UnknownJob);
    }
    let job = machine.find(number).ok_or(Refusal::UnknownJob)?;
    let entry = machine.job(job);
    if entry.generation == 0 {
        return Err(Refusal::UnknownJob);
    }
    if rank as usize >= MAX_RANKS || rank >= entry.world {
        return Err(Refusal::UnknownWorker);
    }
    let (current, expected, most) = (entry.generation, entry.expected, entry.lanes);
    let sender = machine.rank(number, rank).ok_or(Refusal::UnknownWorker)?;
    if sender.address != arrival.source {
        return Err(Refusal::ForeignAddress);
    }
    if current != generation || expected >> rank & 1 == 0 {
        return Err(Refusal::OldGeneration);
    }
    if promised != arrival.payload_bytes {
        return Err(Refusal::LengthMismatch);
    }
    if !(lanes as usize).is_multiple_of(LANES_PER_BLOCK) || lanes > most || is_empty {
        return Err(Refusal::BadLanes);
    }
    Ok(Admitted { job, rank, key: sender.key, gain: sender.gain })
}

/// Records progress, takes the contribution, answers the wish.
#[inline(always)]
fn serve<M: Machine>(machine: &mut M, arrival: Arrival, who: &Admitted<M::JobRef>) -> Outcome {
    machine.note(Event::Requests);
    if arrival.congested {
        machine.note(Event::EcnMarks);
        let (generation, rank) = named(machine, who);
        machine.progress(who.job).note_mark(generation, rank);
    }
    let is_pull = machine.header().kind() == Some(Kind::Pull);
    let mut key = who.key;
    if levels::is_sum(machine) {
        key = match levels::vouched(machine, arrival, who) {
            Ok(keys) => keys,
            Err(refusal) => {
                machine.refuse(refusal);
                return Outcome::Drop(refusal);
            }
        };
    }
    let anew = is_pull | levels::is_sum(machine);
    let min_ack = record(machine, who, anew);
    let mut salt = 0;
    let mut received = Received { fate: Fate::ABSENT, attempt: 0, bits: 0 };
    if !is_pull {
        let header = machine.header();
        salt = tag::salt(key, header.seq(), header.chunk());
        received = match receive(machine, who, min_ack, salt) {
            Ok(received) => received,
            Err(refusal) => {
                machine.refuse(refusal);
                return Outcome::Drop(refusal);
            }
        };
    }
    received.fate = Fate(machine.forget(received.fate.0));
    if received.fate == Fate::TAKEN {
        machine.note(Event::Contributions);
        if levels::is_sum(machine) {
            machine.note(Event::Sums);
        }
    } else {
        machine.count(received.fate.counter());
    }
    let is_sound = received.fate.was_checked() || payload_is_sound(machine, salt);
    if !is_sound {
        machine.refuse(Refusal::BadTag);
    }
    let mut status = if is_sound || is_pull { received.fate.status() } else { Status::BadTag as u8 };
    if M::LEVELS && is_sound && received.fate.counter() == Refusal::Conflict.counter() {
        status = Status::Conflict as u8;
    }
    let status = machine.forget(status as u64) as u8;
    if levels::rises(machine, who)
        && let Some(outcome) = levels::ascend(machine, arrival, who, received, status)
    {
        return outcome;
    }
    answer(machine, arrival, who, received, status)
}

/// Generation and rank of the sender. The rank is forgotten: to reach its counters the verifier splits into one way for
/// each rank.
#[inline(always)]
fn named<M: Machine>(machine: &mut M, who: &Admitted<M::JobRef>) -> (u32, usize) {
    (machine.header().generation(), machine.forget(u64::from(who.rank)) as usize)
}

/// The payload's tag is right. Whatever was not taken has its payload checked all the same, a PULL's padding too: a
/// flipped bit tells of a bad link, whatever it hit.
#[inline(always)]
fn payload_is_sound<M: Machine>(machine: &mut M, salt: u64) -> bool {
    let found = if machine.header().has(flags::PAYLOAD) {
        let n = payload_blocks(machine);
        machine.verify(n)
    } else {
        Some(0)
    };
    found.is_some_and(|tag| tag.wrapping_add(salt) == machine.header().tag())
}

/// Takes in what the request says of its sender's progress; returns min_ack. Before anything can refuse the payload:
/// the sender's own ack may be the missing one (protocol-rules F14). `anew`: the floors are computed whatever has moved.
#[inline(always)]
fn record<M: Machine>(machine: &mut M, who: &Admitted<M::JobRef>, anew: bool) -> Seq {
    let header = machine.header();
    let (seq, ack, contributed) = (header.seq(), Seq(header.raw_ack()), Seq(header.raw_progress()));
    let generation = header.generation();
    let (job, progress) = (machine.job(who.job), machine.progress(who.job));
    // In the request's generation, which may not be the job's any more: its numbers are of no other (F11).
    let (members, slots) = (Members { generation, ..members(job) }, job.slots);
    let moved = progress.record(generation, who.rank as usize, ack, contributed, slots);
    let ahead = seq.since(progress.acks.floor(generation)) >= slots;
    if moved | anew | ahead | job.is_shared() {
        machine.recompute(who.job, members);
    }
    let own = machine.progress(who.job).acks.floor(generation);
    levels::floor(machine, who, own)
}

/// Takes a contribution, or says why not. `Err` is for what is dropped without an answer.
#[inline(always)]
fn receive<M: Machine>(
    machine: &mut M,
    who: &Admitted<M::JobRef>,
    min_ack: Seq,
    salt: u64,
) -> Result<Received, Refusal> {
    let seq = machine.header().seq();
    match levels::check_bits(machine, who.rank) {
        Ok(()) => {}
        Err(levels::Refused::Dropped) => return Err(Refusal::Conflict),
        Err(levels::Refused::Answered) => {
            return Ok(Received { fate: Fate::refused(Refusal::Conflict), attempt: 0, bits: 0 });
        }
    }
    if levels::passes_redo(machine, who) {
        return levels::pass_redo(machine, who, seq);
    }
    let job = machine.job(who.job);
    // The window test of protocol-rules F13.
    if seq.since(min_ack) >= job.slots {
        let refusal = if seq.is_before(min_ack) { Refusal::Behind } else { Refusal::Ahead };
        if refusal == Refusal::Ahead {
            let (generation, rank) = named(machine, who);
            machine.progress(who.job).note_busy(generation, rank);
        }
        return Ok(Received { fate: Fate::refused(refusal), attempt: 0, bits: 0 });
    }
    let slot = match claim::enter(machine, who, seq, min_ack) {
        Ok(slot) => slot,
        Err(refusal @ (Refusal::Crowded | Refusal::Behind)) => {
            return Ok(Received { fate: Fate::refused(refusal), attempt: 0, bits: 0 });
        }
        Err(refusal) => return Err(refusal),
    };
    let rules = machine.rules(who.job);
    let passed = if levels::rises(machine, who) { levels::passes(machine, slot) } else { None };
    let fate = match passed {
        Some(fate) => fate,
        None => contribute(machine, rules, who, slot, salt),
    };
    let fate = Fate(machine.forget(fate.0));
    let rules = machine.rules(who.job);
    let generation = machine.header().generation();
    let rises = levels::rises(machine, who);
    let state = machine.state(slot);
    // What was refused may have found another chunk's slot, whose state says nothing of this one.
    let is_own = state.holds(generation, seq);
    let completed = if rises {
        if is_own && rules.generation == generation {
            state.settle_sum(rules);
        }
        false
    } else {
        is_own && rules.generation == generation && state.settle(rules)
    };
    let (attempt, mut bits) = if is_own { (state.attempt, state.bits) } else { (0, 0) };
    if fate == Fate::HOPELESS {
        // Whom it lacks instead of whom it has.
        bits = state.dead(rules);
    }
    let complete = state.is_complete();
    machine.unlock(slot);
    if completed {
        machine.note(Event::Completions);
    }
    if attempt > 0 {
        let (generation, seq) = (machine.header().generation(), machine.header().seq());
        track_redo(machine, who.job, generation, Redo { seq, attempt }, complete);
    }
    Ok(Received { fate, attempt, bits })
}

/// A [`Decision`] as one number, which [`Machine::forget`] takes: the fate of a contribution that is not taken, or with
/// the highest bit set what to do with one that is.
#[derive(Clone, Copy)]
struct Verdict(u64);

impl Verdict {
    const TAKEN: u64 = 1 << 31;

    #[inline(always)]
    const fn of(decision: Decision) -> Verdict {
        Verdict(match decision {
            Decision::Contribute { begin, lanes } => Verdict::TAKEN | (begin as u64) << 8 | lanes as u64,
            Decision::Duplicate => Fate::DUPLICATE.0,
            Decision::Late => Fate::LATE.0,
            Decision::Refuse(refusal) => Fate::refused(refusal).0,
        })
    }

    #[inline(always)]
    const fn is_taken(self) -> bool {
        self.0 & Verdict::TAKEN != 0
    }

    #[inline(always)]
    const fn fate(self) -> Fate {
        Fate(self.0)
    }

    #[inline(always)]
    const fn begins(self, begin: Begin) -> bool {
        self.0 >> 8 & 0xFF == begin as u64
    }

    #[inline(always)]
    const fn lanes(self) -> u64 {
        self.0 & 0xFF
    }
}

/// What a DATA packet says of its contribution.
#[inline(always)]
fn contribution(header: &Header, rank: u8) -> Contribution {
    Contribution {
        generation: header.generation(),
        seq: header.seq(),
        bits: header.bitmap(),
        attempt: header.attempt(),
        chunk: header.chunk(),
        next_exponent: header.next_exponent(),
        has_payload: header.has(flags::PAYLOAD),
        rank,
        non_finite: header.has(flags::NON_FINITE),
    }
}

/// Under the slot's lock: decides, combines the lanes, commits or undoes.
#[inline(always)]
fn contribute<M: Machine>(
    machine: &mut M,
    rules: Rules,
    who: &Admitted<M::JobRef>,
    slot: M::SlotRef,
    salt: u64,
) -> Fate {
    let speaker = levels::speaker(machine, who.rank);
    let contribution = contribution(machine.header(), speaker);
    let verdict = Verdict::of(slot::decide(machine.state(slot), rules, &contribution));
    let verdict = Verdict(machine.forget(verdict.0));
    if !verdict.is_taken() {
        return verdict.fate();
    }
    if verdict.begins(Begin::Redo) {
        machine.note(Event::Redos);
    }
    if !verdict.begins(Begin::Continue) {
        let policy = machine.policy(who.job);
        machine.state(slot).begin(verdict.begins(Begin::Chunk), policy, &contribution);
        if policy.is_armed() && verdict.begins(Begin::Chunk) {
            // If another CPU was first, that chunk's X holds, and this chunk is before it all the same.
            let slots = machine.job(who.job).slots;
            machine.replace_policy(who.job, policy, policy.switching(contribution.seq, slots));
        }
    }
    let Some(gained) = combine(machine, slot, verdict, salt) else {
        return Fate::refused(Refusal::BadTag);
    };
    // Read again: the pass needs the registers.
    let speaker = levels::speaker(machine, who.rank);
    let contribution = self::contribution(machine.header(), speaker);
    machine.state(slot).commit(&contribution, gained);
    if contribution.non_finite {
        machine.note(Event::NonFinite);
    }
    Fate::TAKEN
}

/// Blocks of the request's payload. Forgotten before each pass: after a pass the verifier knows the number on each of
/// its ways out, and would walk the next pass once for each.
#[inline(always)]
fn payload_blocks<M: Machine>(machine: &mut M) -> u32 {
    let lanes = machine.header().lanes();
    (machine.forget(u64::from(lanes)) / LANES_PER_BLOCK as u64) as u32
}

/// The tag of a pass is the header's, less the salt.
#[inline(always)]
fn agrees<M: Machine>(machine: &mut M, found: Option<u64>, salt: u64) -> bool {
    found.is_some_and(|tag| tag.wrapping_add(salt) == machine.header().tag())
}

/// Combines the payload with the slot's lanes as the verdict tells, checking it in the same pass; a bad one is undone. Returns what the contribution adds to the slot's tag, or `None` for a bad payload.
#[inline(always)]
fn combine<M: Machine>(machine: &mut M, slot: M::SlotRef, verdict: Verdict, salt: u64) -> Option<u64> {
    let n = payload_blocks(machine);
    let lanes = verdict.lanes();
    if lanes == Lanes::Add as u64 {
        machine.note(Event::Adds);
        let found = machine.add(slot, n);
        if agrees(machine, found, salt) {
            return Some(machine.header().tag());
        }
        let n = payload_blocks(machine);
        machine.subtract(slot, n);
        None
    } else if lanes == Lanes::Store as u64 {
        machine.note(Event::Stores);
        let found = machine.store(slot, n);
        agrees(machine, found, salt).then(|| machine.header().tag())
    } else if lanes == Lanes::Maximum as u64 {
        // A maximum cannot be undone, so the payload is checked before.
        let found = machine.verify(n);
        if !agrees(machine, found, salt) {
            return None;
        }
        machine.note(Event::Adds);
        let n = payload_blocks(machine);
        let (before, after) = machine.maximum(slot, n)?;
        // By difference: damage to the slot's memory stays visible in its tag.
        Some(after.wrapping_sub(before).wrapping_add(salt))
    } else {
        agrees(machine, Some(0), salt).then(|| machine.header().tag())
    }
}

/// Keeps the announcement of open redos true.
#[inline(always)]
fn track_redo<M: Machine>(machine: &M, job: M::JobRef, generation: u32, redo: Redo, complete: bool) {
    let progress = machine.progress(job);
    if complete {
        progress.withdraw(generation, redo.seq);
    } else {
        progress.announce(generation, redo);
    }
}

/// A bare answer for a request that was not admitted.
#[inline(always)]
fn reject(header: &mut Header, status: Status) {
    header.set_kind(Kind::Answer);
    header.set_flags(0);
    header.set_status(status as u8);
    header.set_lanes(0);
    header.seal();
}

/// An answer that is begun: what is the same whether it carries a result or not.
#[derive(Clone, Copy)]
struct Begun {
    turn: Turn,
    flags: u8,
    status: u8,
}

/// Answers the wish for `want`: with the result if it stands and fits the frame, else with the state of affairs.
#[inline(always)]
fn answer<M: Machine>(
    machine: &mut M,
    arrival: Arrival,
    who: &Admitted<M::JobRef>,
    received: Received,
    status: u8,
) -> Outcome {
    let echo = machine.forget(if arrival.congested { flags::ECN_ECHO } else { 0 } as u64) as u8;
    let mut is_aborted = status == Status::Aborted as u8;
    let mut begun = Begun { turn: Turn::default(), flags: echo, status };
    let (generation, want) = (machine.header().generation(), machine.header().want());
    let (low, high) = if levels::rises(machine, who) {
        let report = levels::report(machine);
        (report.low, report.high)
    } else {
        let progress = machine.progress(who.job);
        (progress.contributed.floor(generation), progress.highest(generation))
    };
    begun.turn.begin(machine.header(), low, high);

    let mut attempt = if is_aborted { received.fate.counter() as u8 } else { received.attempt };
    let mut bitmap = received.bits;
    let slot = look_up(machine, who, generation, want);
    if let Some(slot) = slot {
        if let Some(payload) = hand_out(machine, who, slot, begun, arrival.payload_bytes) {
            return Outcome::Answer { payload };
        }
        if machine.header().kind() == Some(Kind::Pull) {
            let rules = machine.rules(who.job);
            let state = machine.state(slot);
            attempt = state.attempt;
            // Whoever has contributed to it again only asks.
            if state.is_hopeless(rules) {
                (attempt, bitmap) = (Fate::HOPELESS.counter() as u8, state.dead(rules));
                (is_aborted, begun.status) = (true, Status::Aborted as u8);
            }
        }
    }
    if !is_aborted {
        bitmap = slot.map_or(0, |slot| machine.state(slot).bits);
    }
    // It did not fit: whoever does not know the chunk learns how long its request must be.
    let lanes = slot.map_or(0, |slot| machine.state(slot).lanes_if_complete());
    let progress = machine.progress(who.job);
    let redo = progress.redo(generation);
    let slowest = progress.contributed.slowest(generation);
    let want = progress.acks.floor(generation).0;
    let job = machine.job(who.job);
    let saying = Saying {
        flags: echo | if redo.is_some() { flags::REDO } else { 0 },
        status: begun.status,
        want,
        bitmap,
        tag: redo.map_or(0, Redo::to_word),
        lanes,
        told: job.policy.told().0,
        contributors: 0,
        exponents: (0, 0),
        window: job.granted,
        rank: slowest,
        gain: who.gain,
        attempt,
        epoch: job.policy.epoch(),
    };
    if levels::rises(machine, who) {
        let saying = levels::said(machine, saying, echo);
        begun.turn.end(machine.header(), saying);
        return Outcome::Answer { payload: false };
    }
    begun.turn.end(machine.header(), saying);
    Outcome::Answer { payload: false }
}

/// The slot of `want`, if it holds that chunk. Completes it if the rules have come to allow it (protocol-rules F10).
#[inline(always)]
fn look_up<M: Machine>(
    machine: &mut M,
    who: &Admitted<M::JobRef>,
    generation: u32,
    want: Seq,
) -> Option<M::SlotRef> {
    let job = machine.job(who.job);
    let index = if job.is_shared() {
        let search = claim::search(machine, who, want);
        machine.search(search).outcome()?
    } else {
        slot_index(job, want)
    };
    let slot = machine.slot(machine.forget(u64::from(index)) as u32)?;
    let state = machine.state(slot);
    if !state.holds(generation, want) {
        return None;
    }
    // At a lower node there is no result but the parent's.
    if !state.is_complete() && !levels::rises(machine, who) {
        let attempt = machine.state(slot).attempt;
        let rules = machine.rules(who.job);
        if machine.state(slot).is_due(rules) && machine.lock(slot) {
            let rules = machine.rules(who.job);
            let state = machine.state(slot);
            let completed = state.holds(rules.generation, want) && state.settle(rules);
            machine.unlock(slot);
            if completed {
                machine.note(Event::Completions);
            }
        }
        if attempt > 0 {
            let complete = machine.state(slot).is_complete();
            track_redo(machine, who.job, generation, Redo { seq: want, attempt }, complete);
        }
    }
    Some(slot)
}

/// Writes a slot's result into the answer, unless it is not complete or the frame has another length. The slot may be
/// taken for another chunk meanwhile (only by a chunk that this rank has let go of, but an old duplicate may ask): the
/// copy is valid if the slot's identity is the same afterwards (protocol-rules part 2.11), and the tag tells the
/// receiver.
#[inline(always)]
fn hand_out<M: Machine>(
    machine: &mut M,
    who: &Admitted<M::JobRef>,
    slot: M::SlotRef,
    begun: Begun,
    room: u32,
) -> Option<bool> {
    let state = machine.state(slot);
    if !state.is_complete() {
        return None;
    }
    let (has_payload, lanes, attempt) = (state.has_payload(), state.chunk().lanes, state.attempt);
    if has_payload {
        if u32::from(lanes) * 4 != room {
            return None;
        }
        let blocks = (machine.forget(u64::from(lanes)) / LANES_PER_BLOCK as u64) as u32;
        machine.emit(slot, blocks)?;
    }
    let (generation, want) = (machine.header().generation(), machine.header().want());
    let is_pull = machine.header().kind() == Some(Kind::Pull);
    let slowest = if levels::rises(machine, who) {
        levels::report(machine).slowest
    } else {
        machine.progress(who.job).contributed.slowest(generation)
    };
    let window = machine.job(who.job).granted;
    let mut bitmap = machine.state(slot).bits;
    if levels::rises(machine, who) {
        bitmap = levels::contributors(machine, bitmap);
    }
    let state = machine.state(slot);
    let culprit = state.non_finite();
    let mut told = flags::RESULT | begun.flags;
    told |= if has_payload { flags::PAYLOAD } else { 0 };
    told |= if culprit.is_some() { flags::NON_FINITE } else { 0 };
    let saying = Saying {
        flags: told,
        status: if is_pull { Status::Ok as u8 } else { begun.status },
        want: want.0,
        bitmap,
        tag: state.tag,
        lanes,
        told: state.told().0,
        contributors: state.contributors(),
        exponents: (state.chunk().exponent, state.next_exponent()),
        window,
        rank: culprit.unwrap_or(slowest),
        gain: who.gain,
        attempt,
        epoch: state.epoch,
    };
    // What was read above stands only if the slot is still the same, read again below.
    barrier();
    let state = machine.state(slot);
    if !state.holds(generation, want) || !state.is_complete() || state.attempt != attempt {
        return None;
    }
    begun.turn.end(machine.header(), saying);
    machine.note(Event::Results);
    Some(has_payload)
}

/// What a result of `chunk` is checked against: its tag less the salts of its contributors.
#[must_use]
pub fn unsalted(tag: u64, keys: u64, seq: Seq, chunk: Chunk) -> u64 {
    tag.wrapping_sub(tag::salt(keys, seq, chunk))
}
