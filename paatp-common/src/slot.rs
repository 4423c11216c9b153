//! The slot state machine: what to do with a contribution, decided once for kernel, host and simulator.
//!
//! [`decide`] is pure. Its caller holds the slot's lock, carries the decision out on the lanes, and then either
//! [`Slot::commit`]s it or, if the payload failed its check, leaves the slot as [`Slot::begin`] made it: without bits,
//! so that the next payload stores (protocol-rules F12).

use bytemuck::{Pod, Zeroable};

use crate::counter::Refusal;
use crate::layout::described;
use crate::limits::{MAX_ATTEMPTS, MAX_JOBS};
use crate::mind::{barrier, opaque};
use crate::policy::{Policy, QUORUM_ALL, Told};
use crate::seq::Seq;
use crate::wire::{Chunk, Header, Operation, flags};

/// State bits of a slot.
mod state {
    /// A payload has been stored (protocol-rules F20).
    pub const PAYLOAD: u8 = 1 << 0;
    /// The result stands: bits, exponents and lanes are frozen.
    pub const COMPLETE: u8 = 1 << 1;
    /// A contributor's gradient was not finite.
    pub const NON_FINITE: u8 = 1 << 2;
    /// Claimed for a chunk that nothing has been decided of yet: named, but as good as another chunk's.
    pub const CLAIMED: u8 = 1 << 3;
    /// Of a lower node: all of its ranks are in and their sum is the parent's to take. Bits and lanes are frozen, but
    /// there is no result yet (protocol-rules F16).
    pub const SENT: u8 = 1 << 4;
    /// Of a lower node: the chunk is between its ranks and the root from now on (protocol-rules part 2.15).
    pub const BYPASSED: u8 = 1 << 5;
}

/// What a slot knows besides its lanes: one cache line before them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Slot {
    /// 1 while a CPU changes the slot; taken by the owner of the memory, never here.
    pub lock: u64,
    /// Contributors.
    pub bits: u64,
    /// Contributors of the first completion; later attempts admit only these (protocol-rules F3).
    pub frozen: u64,
    /// Sum of the contributions' tags, salts included.
    pub tag: u64,
    /// Generation that `seq` belongs to; a slot of another generation is empty (protocol-rules F11).
    pub generation: u32,
    /// The chunk.
    pub seq: Seq,
    lanes: u16,
    contributors: u16,
    operation_and_type: u8,
    exponent: i8,
    next_exponent: i8,
    root: u8,
    state: u8,
    /// How often the chunk has been redone.
    pub attempt: u8,
    quorum: u8,
    /// Policy epoch of the first store.
    pub epoch: u8,
    culprit: u8,
    told: u8,
    /// Number of the job that claimed it, if it is one of the pool.
    job: u8,
    reserved: [u8; 1],
    /// 1 while a CPU looks for the slot of a chunk whose home this is ([`crate::pool`]). Taken before the lock of any
    /// slot, never after.
    pub home_lock: u64,
}

const _: () = assert!(size_of::<Slot>() == 64 && MAX_JOBS <= 256);
described!(Slot {
    lock,
    bits,
    frozen,
    tag,
    generation,
    seq,
    lanes,
    contributors,
    operation_and_type,
    exponent,
    next_exponent,
    root,
    state,
    attempt,
    quorum,
    epoch,
    culprit,
    told,
    job,
    reserved,
    home_lock,
});

// SAFETY: one u32 in a transparent-like newtype; every bit pattern is a Seq.
unsafe impl Zeroable for Seq {}
// SAFETY: as above, no padding.
unsafe impl Pod for Seq {}

/// The job's rules at the time of a touch, read under the slot's lock. How many contributions are needed is not one of
/// them: a slot keeps what was in force when it began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Current generation.
    pub generation: u32,
    /// Ranks whose contributions count.
    pub expected: u64,
}

impl Rules {
    /// Of a job that is gone: no packet is of generation 0.
    pub const NONE: Rules = Rules { generation: 0, expected: 0 };
}

/// What a DATA packet says of its contribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contribution {
    /// Generation it was sent in.
    pub generation: u32,
    /// The chunk.
    pub seq: Seq,
    /// Contributors: one bit, or several from a switch or a lower level.
    pub bits: u64,
    /// Attempt of the chunk.
    pub attempt: u8,
    /// What the ranks must agree on.
    pub chunk: Chunk,
    /// Scale proposed for the chunk one window later.
    pub next_exponent: i8,
    /// A payload came along.
    pub has_payload: bool,
    /// Sending rank, named where its gradient is not finite.
    pub rank: u8,
    /// The sender's gradient holds NaN or infinity.
    pub non_finite: bool,
}

/// What happens to the slot before a contribution is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Begin {
    /// Nothing.
    Continue,
    /// It becomes the slot of this chunk.
    Chunk,
    /// It is cleared for the next attempt; `frozen` stays.
    Redo,
}

/// What happens to the lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Lanes {
    /// The payload is written over them.
    Store,
    /// The payload is added.
    Add,
    /// Each lane keeps the larger value.
    Maximum,
    /// No payload came.
    Untouched,
}

/// What to do with a contribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Take it.
    Contribute {
        /// First.
        begin: Begin,
        /// Then.
        lanes: Lanes,
    },
    /// It is in already.
    Duplicate,
    /// The slot was completed without it.
    Late,
    /// Not taken.
    Refuse(Refusal),
}

/// Decides what to do with `c`, in the order of protocol-rules part 3 from "generation again" on.
#[inline(always)]
#[must_use]
pub fn decide(slot: &Slot, rules: Rules, c: &Contribution) -> Decision {
    if c.generation != rules.generation {
        return Decision::Refuse(Refusal::OldGeneration);
    }
    let Some(operation) = c.chunk.operation() else {
        return Decision::Refuse(Refusal::BadKind);
    };
    if c.has_payload && operation == Operation::Broadcast && c.rank != c.chunk.root {
        return Decision::Refuse(Refusal::NotRoot);
    }
    // The window was tested before the lock. Meanwhile every rank may have let go of this chunk, and a newer one have
    // taken the slot: an old duplicate must not take it back.
    if slot.generation == c.generation && c.seq.is_before(slot.seq) {
        return Decision::Refuse(Refusal::Behind);
    }
    let same = slot.holds(c.generation, c.seq) && slot.state & state::CLAIMED == 0;
    let attempt = if same { slot.attempt } else { 0 };
    if c.attempt < attempt {
        return Decision::Refuse(Refusal::OldAttempt);
    }
    if c.attempt > attempt {
        return decide_redo(slot, rules, c, same, attempt);
    }
    if !same {
        return Decision::Contribute { begin: Begin::Chunk, lanes: first(c) };
    }
    if slot.is_hopeless(rules) {
        return Decision::Refuse(Refusal::DeadRankInRedo);
    }
    if slot.bits != 0 && slot.chunk() != c.chunk {
        return Decision::Refuse(Refusal::Mismatch);
    }
    if c.bits & !slot.bits == 0 {
        return Decision::Duplicate;
    }
    if slot.is_complete() || (slot.frozen != 0 && c.bits & !slot.frozen != 0) {
        return Decision::Late;
    }
    if c.bits & slot.bits != 0 {
        return Decision::Refuse(Refusal::Conflict);
    }
    let lanes = match (c.has_payload, slot.state & state::PAYLOAD != 0) {
        (true, true) if operation.takes_maximum() => Lanes::Maximum,
        (true, true) => Lanes::Add,
        _ => first(c),
    };
    Decision::Contribute { begin: Begin::Continue, lanes }
}

/// The packet's attempt is above the slot's.
#[inline(always)]
fn decide_redo(slot: &Slot, rules: Rules, c: &Contribution, same: bool, attempt: u8) -> Decision {
    if c.attempt != attempt + 1 {
        return Decision::Refuse(Refusal::FarAttempt);
    }
    if c.attempt > MAX_ATTEMPTS {
        return Decision::Refuse(Refusal::TooManyAttempts);
    }
    if !same {
        return Decision::Contribute { begin: Begin::Chunk, lanes: first(c) };
    }
    if slot.dead(rules) != 0 {
        return Decision::Refuse(Refusal::DeadRankInRedo);
    }
    if slot.frozen != 0 && c.bits & !slot.frozen != 0 {
        return Decision::Late;
    }
    if slot.bits != 0 && slot.chunk() != c.chunk {
        return Decision::Refuse(Refusal::Mismatch);
    }
    Decision::Contribute { begin: Begin::Redo, lanes: first(c) }
}

#[inline(always)]
const fn first(c: &Contribution) -> Lanes {
    if c.has_payload { Lanes::Store } else { Lanes::Untouched }
}

/// What a parent's result says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Final {
    /// Contributors.
    pub bits: u64,
    tag: u64,
    contributors: u8,
    next_exponent: i8,
    told: u8,
    epoch: u8,
    /// With NON_FINITE the culprit.
    rank: u8,
    flags: u8,
}

impl Final {
    /// From the answer that carries it.
    #[inline(always)]
    #[must_use]
    pub const fn of(result: &Header) -> Final {
        Final {
            bits: result.bitmap(),
            tag: result.tag(),
            contributors: result.contributors(),
            next_exponent: result.next_exponent(),
            told: result.told(),
            epoch: result.operation_or_epoch(),
            rank: result.rank(),
            flags: result.flags(),
        }
    }
}

impl Slot {
    /// The slot belongs to this chunk.
    #[inline(always)]
    #[must_use]
    pub const fn holds(&self, generation: u32, seq: Seq) -> bool {
        self.generation == generation && self.seq.0 == seq.0
    }

    /// Number of the job that claimed it, for slots of the pool.
    #[inline(always)]
    #[must_use]
    pub const fn job(&self) -> u16 {
        self.job as u16
    }

    /// The result stands.
    #[inline(always)]
    #[must_use]
    pub const fn is_complete(&self) -> bool {
        self.state & state::COMPLETE != 0
    }

    /// Lanes of the result if it stands, else 0. Without a branch.
    #[inline(always)]
    #[must_use]
    pub fn lanes_if_complete(&self) -> u16 {
        self.lanes & (((self.state >> 1 & 1) as u16).wrapping_neg())
    }

    /// A payload is stored.
    #[inline(always)]
    #[must_use]
    pub const fn has_payload(&self) -> bool {
        self.state & state::PAYLOAD != 0
    }

    /// What the contributors agreed on.
    #[inline(always)]
    #[must_use]
    pub const fn chunk(&self) -> Chunk {
        Chunk {
            operation_and_type: self.operation_and_type,
            lanes: self.lanes,
            exponent: self.exponent,
            root: self.root,
        }
    }

    /// Scale agreed for the chunk one window later; final once the slot is complete (protocol-rules F5, F6).
    #[inline(always)]
    #[must_use]
    pub const fn next_exponent(&self) -> i8 {
        self.next_exponent
    }

    /// Number of contributors.
    #[inline(always)]
    #[must_use]
    pub const fn contributors(&self) -> u16 {
        self.contributors
    }

    /// Contributions that complete it, or [`QUORUM_ALL`]: of the policy that is in force for its chunk, unless its
    /// operation needs all ranks.
    #[inline(always)]
    #[must_use]
    pub const fn quorum(&self) -> u8 {
        self.quorum
    }

    /// What answers tell of the policy of its first store.
    #[inline(always)]
    #[must_use]
    pub const fn told(&self) -> Told {
        Told(self.told)
    }

    /// The rank whose gradient was not finite.
    #[inline(always)]
    #[must_use]
    pub const fn non_finite(&self) -> Option<u8> {
        if self.state & state::NON_FINITE != 0 { Some(self.culprit) } else { None }
    }

    /// Of a lower node: all of its ranks are in, and the result is still to come.
    #[inline(always)]
    #[must_use]
    pub const fn is_sent(&self) -> bool {
        self.state & (state::SENT | state::COMPLETE | state::BYPASSED) == state::SENT
    }

    /// Of a lower node: what concerns the chunk goes past it.
    #[inline(always)]
    #[must_use]
    pub const fn is_bypassed(&self) -> bool {
        self.state & state::BYPASSED != 0
    }

    /// From now on the chunk goes past this node. What the slot holds is handed out no more.
    #[inline(always)]
    pub fn bypass(&mut self) {
        self.state = self.state & !state::COMPLETE | state::BYPASSED;
    }

    /// Of a lower node: freezes bits and lanes if all of its ranks are in. There is no quorum but the root's.
    #[inline(always)]
    pub fn settle_sum(&mut self, rules: Rules) {
        if self.bits != 0 && rules.expected & !self.bits == 0 {
            self.state |= state::SENT;
        }
    }

    /// Of a lower node: the parent's result, whose lanes have replaced the sum's.
    #[inline(always)]
    pub fn finish(&mut self, result: Final) {
        (self.bits, self.frozen) = (result.bits, result.bits);
        self.tag = result.tag;
        self.contributors = u16::from(result.contributors);
        self.next_exponent = result.next_exponent;
        (self.told, self.epoch) = (result.told, result.epoch);
        self.culprit = result.rank;
        let gained = if result.flags & flags::PAYLOAD != 0 { state::PAYLOAD } else { 0 };
        let non_finite = if result.flags & flags::NON_FINITE != 0 { state::NON_FINITE } else { 0 };
        // Last, for those who read without the lock.
        barrier();
        self.state = state::SENT | state::COMPLETE | gained | non_finite;
    }

    /// Clears the slot for a contribution that was decided to be taken: as the slot of another chunk, or for the next
    /// attempt at its own.
    #[inline(always)]
    pub fn begin(&mut self, is_another: bool, policy: Policy, c: &Contribution) {
        // First: whoever reads without the lock must not find the new name on a result.
        self.state = 0;
        barrier();
        if is_another {
            self.frozen = 0;
            self.generation = c.generation;
            self.seq = c.seq;
            let policy = policy.of(c.seq);
            (self.quorum, self.epoch, self.told) = (policy.quorum, policy.epoch, policy.told.0);
        }
        self.attempt = c.attempt;
        self.bits = 0;
        self.contributors = 0;
    }

    /// Takes a slot of the pool whose chunk is over for another one, of which nothing is decided yet.
    #[inline(always)]
    pub fn claim(&mut self, job: u16, generation: u32, seq: Seq) {
        // As in `begin`: first, whatever is read without the lock must not find the new name on a result.
        self.state = state::CLAIMED;
        barrier();
        // Opaque, or LLVM would clear both with a `memset`, which adds variables to pointers.
        self.bits = opaque(0);
        self.frozen = 0;
        self.contributors = 0;
        self.attempt = 0;
        self.job = job as u8;
        self.generation = generation;
        self.seq = seq;
    }

    /// The contribution is in: `tag` is what it adds to the slot's tag.
    #[inline(always)]
    pub fn commit(&mut self, c: &Contribution, tag: u64) {
        if self.bits == 0 {
            self.lanes = c.chunk.lanes;
            self.operation_and_type = c.chunk.operation_and_type;
            self.exponent = c.chunk.exponent;
            self.root = c.chunk.root;
            self.next_exponent = c.next_exponent;
            self.tag = 0;
            // QUORUM_ALL if it needs all.
            self.quorum &= c.chunk.needs_all_as_number().wrapping_sub(1);
        } else if c.next_exponent > self.next_exponent {
            self.next_exponent = c.next_exponent;
        }
        self.tag = self.tag.wrapping_add(tag);
        // One bit but for partial sums; counting bits costs a dozen instructions in BPF.
        let gained = if c.bits & c.bits.wrapping_sub(1) == 0 { 1 } else { c.bits.count_ones() as u16 };
        self.contributors = self.contributors.wrapping_add(gained);
        self.bits |= c.bits;
        if c.has_payload {
            self.state |= state::PAYLOAD;
        }
        if c.non_finite {
            self.state |= state::NON_FINITE;
            self.culprit = c.rank;
        }
    }

    /// The slot would be complete by these rules, or is: tested at every touch (protocol-rules F10).
    #[inline(always)]
    #[must_use]
    pub fn is_due(&self, rules: Rules) -> bool {
        if self.is_complete() {
            return true;
        }
        if self.bits == 0 {
            return false;
        }
        if self.frozen != 0 {
            return self.bits == self.frozen;
        }
        if self.quorum == QUORUM_ALL {
            // By set, not by count: a dead rank's bit must not stand in for a live one's (protocol-rules F9).
            return rules.expected & !self.bits == 0;
        }
        let wanted = u32::from(self.quorum).min(rules.expected.count_ones());
        self.bits.count_ones() >= wanted
    }

    /// Ranks of the first completion that do not count any more: no redo gets their contributions (protocol-rules F4).
    #[inline(always)]
    #[must_use]
    pub const fn dead(&self, rules: Rules) -> u64 {
        self.frozen & !rules.expected
    }

    /// A redo is open that will never be complete: a rank died before it contributed again (protocol-rules F4). That
    /// stays so, for ranks only leave those that count.
    #[inline(always)]
    #[must_use]
    pub const fn is_hopeless(&self, rules: Rules) -> bool {
        !self.is_complete() && self.generation == rules.generation && self.dead(rules) & !self.bits != 0
    }

    /// Freezes bits and exponents if the slot is due. Returns true if this call completed it.
    #[inline(always)]
    pub fn settle(&mut self, rules: Rules) -> bool {
        if self.is_complete() || !self.is_due(rules) {
            return false;
        }
        self.state |= state::COMPLETE;
        self.frozen = self.bits;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::ElementType;

    const RULES: Rules = Rules { generation: 7, expected: 0b11 };

    fn contribution(seq: u32, bits: u64) -> Contribution {
        Contribution {
            generation: RULES.generation,
            seq: Seq(seq),
            bits,
            attempt: 0,
            chunk: Chunk::new(Operation::Sum, ElementType::F32, 32, 0),
            next_exponent: 0,
            has_payload: true,
            rank: 0,
            non_finite: false,
        }
    }

    /// The window is tested before the lock: an old duplicate that passed it and then waited finds its slot with a newer
    /// chunk, near the wrap as elsewhere.
    #[test]
    fn an_old_duplicate_does_not_take_a_newer_chunks_slot() {
        for newer in [9, 3] {
            let mut slot = Slot::default();
            let taken = contribution(newer, 0b01);
            slot.begin(true, Policy::default(), &taken);
            slot.commit(&taken, 0);
            let old = contribution(Seq(newer).minus(8).0, 0b10);
            assert_eq!(decide(&slot, RULES, &old), Decision::Refuse(Refusal::Behind));
            let next = contribution(newer + 8, 0b10);
            let begin = Decision::Contribute { begin: Begin::Chunk, lanes: Lanes::Store };
            assert_eq!(decide(&slot, RULES, &next), begin);
        }
    }

    /// What reads without the lock finds a slot incomplete before it finds it renamed.
    #[test]
    fn a_slot_that_begins_anew_is_not_complete() {
        let mut slot = Slot::default();
        let only = contribution(1, 0b11);
        slot.begin(true, Policy::default(), &only);
        slot.commit(&only, 0);
        assert!(slot.settle(RULES) && slot.is_complete());
        slot.begin(true, Policy::default(), &contribution(9, 0b01));
        assert!(!slot.is_complete() && !slot.is_due(RULES));
    }
}
