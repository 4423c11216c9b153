//! How a job's ranks wait for one another, and from which chunk on they do so otherwise.
//!
//! All of it is one 64-bit word ([`Policy`]), so that no reader sees half of a change. A slot copies what is in force for
//! *its* chunk at its first store (protocol-rules F23), so a slot never has two policies.
//!
//! A change takes three states of the word:
//!
//! 1. *settled*: one [`Mode`] for all chunks.
//! 2. *armed*: another mode is wanted. The chunk that finds the word so when it takes a slot for itself, seq, makes it
//!    *switching* at X = seq + 2 S.
//! 3. *switching*: chunks before X have the mode before, chunks from X on the mode wanted. Once every rank has
//!    acknowledged all before X ([`Policy::is_over`]), another change may follow.
//!
//! **Why X is right**: a chunk that takes a slot for itself was never in one, so some rank needs it still: min_ack ≤ seq,
//! and has been at all times before. A chunk is let in less than S ahead of a min_ack that may be too low, never too
//! high. So whatever has begun is before seq + S, and had the mode before. No clock and no look at other CPUs is needed.
//! (The second S is for slots that are not a job's own: there an old duplicate may take one again.)

use crate::mind::opaque;
use crate::seq::Seq;

/// Quorum that stands for "every expected rank".
pub const QUORUM_ALL: u8 = 0;
/// Largest quorum below "all": a job has at most 64 ranks.
pub const MAX_QUORUM: u8 = 63;
/// Largest bounded staleness, in iterations: six bits, of which the last value means "unbounded". Serene's largest that
/// it does not call asynchronous is 48.
pub const MAX_STALENESS: u8 = 62;

/// Bits of one quorum or staleness in the word.
const FIELD: u64 = 0x3F;
/// Bits of a mode: quorum and, above it, staleness.
const MODE_BITS: u64 = 12;
const MODE: u64 = 0xFFF;
/// Epochs count round: consecutive changes differ.
const EPOCH_SHIFT: u64 = 24;
const EPOCH: u64 = 0x7F;
/// A mode is wanted and X is not known yet.
const ARMED: u64 = 1 << 31;
const SEQ_SHIFT: u64 = 32;

/// How many iterations a rank may be ahead of the results that it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Staleness {
    /// Iteration t + 1 begins when the results of t − s are there. 0 is bulk-synchronous.
    Bounded(u8),
    /// Only the ring bounds it.
    #[default]
    Unbounded,
}

impl Staleness {
    /// Bulk-synchronous.
    pub const NONE: Staleness = Staleness::Bounded(0);

    const fn code(self) -> u8 {
        match self {
            Staleness::Bounded(most) if most <= MAX_STALENESS => most,
            _ => FIELD as u8,
        }
    }

    const fn of_code(code: u8) -> Staleness {
        if code <= MAX_STALENESS { Staleness::Bounded(code) } else { Staleness::Unbounded }
    }
}

/// One way of waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mode {
    /// Contributions that complete a chunk, or [`QUORUM_ALL`].
    pub quorum: u8,
    /// How far ranks may run ahead of results.
    pub staleness: Staleness,
}

impl Mode {
    /// Everybody waits for everybody.
    pub const BSP: Mode = Mode { quorum: QUORUM_ALL, staleness: Staleness::NONE };

    const fn bits(self) -> u64 {
        let quorum = if self.quorum > MAX_QUORUM { QUORUM_ALL } else { self.quorum };
        quorum as u64 | (self.staleness.code() as u64) << 6
    }

    const fn of_bits(bits: u64) -> Mode {
        Mode { quorum: (bits & FIELD) as u8, staleness: Staleness::of_code((bits >> 6 & FIELD) as u8) }
    }
}

impl Default for Mode {
    fn default() -> Mode {
        Mode::BSP
    }
}

/// What answers tell of a mode: all that workers must know of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Told(pub u8);

impl Told {
    const PARTIAL: u8 = 1 << 6;

    /// Bulk-synchronous.
    pub const BSP: Told = Told(0);

    /// What is told of a mode.
    #[must_use]
    pub const fn of(mode: Mode) -> Told {
        Told(mode.staleness.code() | if mode.quorum == QUORUM_ALL { 0 } else { Told::PARTIAL })
    }

    /// How far ranks may run ahead of results.
    #[must_use]
    pub const fn staleness(self) -> Staleness {
        Staleness::of_code(self.0 & FIELD as u8)
    }

    /// Chunks may be complete without all ranks.
    #[must_use]
    pub const fn is_partial(self) -> bool {
        self.0 & Told::PARTIAL != 0
    }
}

/// What is in force for one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InForce {
    /// Contributions that complete it, or [`QUORUM_ALL`].
    pub quorum: u8,
    /// Number of the policy.
    pub epoch: u8,
    /// What answers tell of it.
    pub told: Told,
}

/// The word. The control plane writes it whole; the data plane changes it from armed to switching, and nothing else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct Policy(pub u64);

impl Policy {
    /// One mode for all chunks.
    #[must_use]
    pub const fn settled(mode: Mode, epoch: u8) -> Policy {
        let bits = mode.bits();
        Policy(bits | bits << MODE_BITS | (epoch as u64 & EPOCH) << EPOCH_SHIFT)
    }

    /// A mode is wanted, from a chunk on that is still to be found.
    ///
    /// Nothing changes if that mode is in force, and nothing can be asked for while a change is under way.
    #[must_use]
    pub const fn armed(self, mode: Mode) -> Policy {
        let (now, epoch) = if self.is_armed() {
            (self.before(), self.epoch().wrapping_sub(1))
        } else {
            (self.after(), self.epoch())
        };
        if now.bits() == mode.bits() {
            // Nothing was wanted, or it is taken back before any chunk has seen it.
            return Policy::settled(now, epoch);
        }
        let epoch = (epoch.wrapping_add(1) as u64 & EPOCH) << EPOCH_SHIFT;
        Policy(now.bits() | mode.bits() << MODE_BITS | epoch | ARMED)
    }

    /// The word that this one becomes by a chunk that takes a slot for itself, in a ring of `slots`.
    #[inline(always)]
    #[must_use]
    pub const fn switching(self, seq: Seq, slots: u32) -> Policy {
        let from = seq.0.wrapping_add(slots).wrapping_add(slots) as u64;
        Policy(self.0 & (ARMED - 1) | from << SEQ_SHIFT)
    }

    /// X is to be found.
    #[inline(always)]
    #[must_use]
    pub const fn is_armed(self) -> bool {
        self.0 & ARMED != 0
    }

    /// Different modes for different chunks, now or soon.
    #[inline(always)]
    #[must_use]
    pub const fn is_changing(self) -> bool {
        (self.0 ^ self.0 >> MODE_BITS) & MODE != 0
    }

    /// The first chunk of the mode after, if a change is under way and it is known.
    #[must_use]
    pub const fn from(self) -> Option<Seq> {
        if self.is_changing() && !self.is_armed() { Some(Seq((self.0 >> SEQ_SHIFT) as u32)) } else { None }
    }

    /// Every rank has acknowledged all chunks of the mode before, if any: another change may follow.
    #[must_use]
    pub const fn is_over(self, min_ack: Seq) -> bool {
        match self.from() {
            Some(from) => !min_ack.is_before(from),
            None => !self.is_armed(),
        }
    }

    /// The same once [`Policy::is_over`]: for all chunks, so that the wrap of seq does not bring the mode before back.
    #[must_use]
    pub const fn when_over(self) -> Policy {
        Policy::settled(self.after(), self.epoch())
    }

    /// The mode of chunks before X.
    #[must_use]
    pub const fn before(self) -> Mode {
        Mode::of_bits(self.0)
    }

    /// The mode of chunks from X on.
    #[must_use]
    pub const fn after(self) -> Mode {
        Mode::of_bits(self.0 >> MODE_BITS)
    }

    /// Number of the mode after.
    #[inline(always)]
    #[must_use]
    pub const fn epoch(self) -> u8 {
        (self.0 >> EPOCH_SHIFT & EPOCH) as u8
    }

    /// What is in force for a chunk. Without a branch: the kernel's verifier would go on once for each of their ends.
    #[inline(always)]
    #[must_use]
    pub fn of(self, seq: Seq) -> InForce {
        let word = opaque(self.0);
        let is_changing = (((word ^ word >> MODE_BITS) & MODE) + MODE) >> MODE_BITS;
        let is_armed = word >> 31 & 1;
        let is_behind = (seq.0 as u64).wrapping_sub(word >> SEQ_SHIFT) << 32 >> 63;
        let is_before = opaque(is_changing & (is_armed | is_behind));
        let bits = opaque(word >> (MODE_BITS & is_before.wrapping_sub(1)));
        let told = bits >> 6 & FIELD | partial(bits & FIELD);
        let epoch = (word >> EPOCH_SHIFT).wrapping_sub(is_before) & EPOCH;
        InForce { quorum: (bits & FIELD) as u8, epoch: epoch as u8, told: Told(told as u8) }
    }

    /// What to tell where there is no chunk to tell of: of the mode after, but that chunks may be partial if they may be
    /// in either.
    #[inline(always)]
    #[must_use]
    pub fn told(self) -> Told {
        let after = opaque(self.0) >> MODE_BITS;
        Told((after >> 6 & FIELD | partial((after | self.0) & FIELD)) as u8)
    }
}

/// [`Told::PARTIAL`] if there is a quorum, without a branch.
#[inline(always)]
fn partial(quorum: u64) -> u64 {
    opaque(quorum + FIELD) >> 6 << 6
}

#[cfg(test)]
mod tests {
    use super::*;

    const SSP: Mode = Mode { quorum: QUORUM_ALL, staleness: Staleness::Bounded(2) };
    const THREE: Mode = Mode { quorum: 3, staleness: Staleness::Unbounded };

    fn all() -> impl Iterator<Item = Mode> {
        let staleness = |code| Staleness::of_code(code);
        (0..=MAX_QUORUM)
            .flat_map(move |quorum| (0..=63).map(move |code| Mode { quorum, staleness: staleness(code) }))
    }

    #[test]
    fn modes_survive_the_word() {
        for mode in all() {
            let policy = Policy::settled(mode, 127);
            assert_eq!((policy.before(), policy.after(), policy.epoch()), (mode, mode, 127));
            let of = policy.of(Seq(9));
            assert_eq!((of.quorum, of.epoch, of.told), (mode.quorum, 127, Told::of(mode)));
            assert_eq!(of.told.staleness(), mode.staleness);
            assert_eq!(policy.told(), of.told);
            assert!(!policy.is_changing() && policy.from().is_none() && policy.is_over(Seq(0)));
        }
    }

    #[test]
    fn a_change_takes_effect_at_one_chunk() {
        for first in [5, u32::MAX - 3] {
            let armed = Policy::settled(SSP, 127).armed(THREE);
            assert!(armed.is_armed() && armed.from().is_none() && !armed.is_over(Seq(first)));
            assert_eq!(armed.of(Seq(first)), Policy::settled(SSP, 127).of(Seq(0)));
            assert!(armed.told().is_partial(), "whoever asks early must know that there may be results");
            let policy = armed.switching(Seq(first), 4);
            let from = Seq(first).plus(8);
            assert_eq!(policy.from(), Some(from));
            for ahead in 0..40 {
                let seq = Seq(first).plus(ahead);
                let mode = if ahead < 8 { (SSP, 127) } else { (THREE, 0) };
                let is = policy.of(seq);
                assert_eq!((is.quorum, is.told, is.epoch), (mode.0.quorum, Told::of(mode.0), mode.1));
                assert_eq!(policy.is_over(seq), ahead >= 8);
            }
            assert_eq!(policy.when_over(), Policy::settled(THREE, 0));
        }
    }

    #[test]
    fn what_no_chunk_has_seen_can_be_taken_back() {
        let settled = Policy::settled(SSP, 7);
        assert_eq!(settled.armed(SSP), settled);
        let armed = settled.armed(THREE);
        assert_eq!(armed.armed(SSP), settled);
        let other = armed.armed(Mode::BSP);
        assert_eq!((other.before(), other.after(), other.epoch()), (SSP, Mode::BSP, 8));
        assert!(other.is_armed());
    }

    #[test]
    fn a_settled_policy_outlives_the_wrap_of_seq() {
        let over = Policy::settled(SSP, 0).armed(THREE).switching(Seq(5), 4).when_over();
        assert_eq!(over.of(Seq(5 + 8 + (1 << 31))), over.of(Seq(5)));
    }
}
