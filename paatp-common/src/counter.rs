//! What the data plane counts: refusals, each with a sentence for people, and events.
//!
//! Both enums index one array of per-CPU counters, refusals first.

use bytemuck::{Pod, Zeroable};

use crate::layout::described;
use crate::mind::pick_mut;

/// Declares an enum whose variants are counter indices with a metric name and a sentence.
macro_rules! counters {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $label:literal : $sentence:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum $name { $($(#[$doc])* #[doc = $sentence] $variant,)* }

        impl $name {
            /// Every variant, in index order.
            pub const ALL: &'static [$name] = &[$($name::$variant,)*];
            /// Number of variants.
            pub const COUNT: usize = Self::ALL.len();

            /// The name in metrics and tables.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $($name::$variant => $label,)* }
            }

            /// One sentence for people.
            #[must_use]
            pub const fn sentence(self) -> &'static str {
                match self { $($name::$variant => $sentence,)* }
            }
        }
    };
}

pub(crate) use counters;

counters! {
    /// Why a packet for us was not taken.
    Refusal {
        TooManyTags = "too_many_tags": "A frame carried more than two VLAN tags; it was passed to the stack unread.",
        Fragment = "fragment": "The first fragment of an IP datagram to our port; datagrams must fit the MTU.",
        Truncated = "truncated": "A datagram to our port was shorter than a header.",
        LengthMismatch = "length_mismatch": "The lengths told by frame, IP, UDP and header disagree.",
        BadMagic = "bad_magic": "A datagram to our port did not begin with our magic number.",
        BadVersion = "bad_version": "The packet speaks another version of the protocol.",
        BadKind = "bad_kind": "The packet is no request, or of an unknown kind or operation.",
        BadHeaderCheck = "bad_header_check": "The header failed its check: bits were flipped on the way.",
        UnknownJob = "unknown_job": "No such job on this node.",
        UnknownWorker = "unknown_worker": "The job has no rank of this number.",
        ForeignAddress = "foreign_address": "The source address is not the one registered for this rank.",
        OldGeneration = "old_generation": "The packet belongs to another generation of the job, or its rank was removed; its sender must join again.",
        BadLanes = "bad_lanes": "The number of lanes is not a multiple of 32, or more than the job's slots hold.",
        Ahead = "ahead": "The chunk is further ahead than the ring is long: some rank has not acknowledged enough (BUSY).",
        Behind = "behind": "Every rank has acknowledged this chunk already (STALE).",
        OldAttempt = "old_attempt": "The chunk is being redone and this contribution belongs to an earlier attempt.",
        FarAttempt = "far_attempt": "The packet asks for an attempt beyond the next one.",
        TooManyAttempts = "too_many_attempts": "The chunk failed its check in every attempt; the job is aborted.",
        DeadRankInRedo = "dead_rank_in_redo": "A redo needs the contribution of a rank that has left; the job is aborted.",
        Mismatch = "mismatch": "Ranks disagree on operation, type, lanes or exponent of a chunk; the job is aborted.",
        NotRoot = "not_root": "A rank that is not the root of a broadcast sent a payload.",
        Conflict = "conflict": "A partial sum overlaps with contributions that the slot already holds.",
        BadTag = "bad_tag": "The payload failed its checksum; it was not added, or the addition was undone.",
        LockBusy = "lock_busy": "The slot stayed locked for too long; the packet was dropped for its sender to repeat.",
        Crowded = "crowded": "The pool has no free slot at the places that the chunk may take (BUSY).",
    }
}

counters! {
    /// What happened besides refusals.
    Event {
        Passed = "passed": "Frames that are not ours, handed to the stack untouched.",
        Requests = "requests": "Requests with a good header from a registered worker of the current generation.",
        Pulls = "pulls": "Requests for a result, without a contribution.",
        Contributions = "contributions": "Contributions taken into a slot, with or without payload.",
        Stores = "stores": "Payloads that were the first of their slot and were stored.",
        Adds = "adds": "Payloads combined with a slot's lanes.",
        Duplicates = "duplicates": "Contributions that the slot held already; answered, not added.",
        Late = "late": "Contributions that came after their slot was complete without them.",
        Completions = "completions": "Slots that became complete.",
        Results = "results": "Answers that carried a result.",
        Redos = "redos": "Slots cleared because a rank asked for a chunk to be redone.",
        EcnMarks = "ecn_marks": "Requests that a switch had marked as having met congestion.",
        NonFinite = "non_finite": "Contributions flagged because their gradients held NaN or infinity.",
        Sums = "sums": "Partial sums of lower nodes taken into a slot; they are among the contributions.",
        Lifted = "lifted": "Sums of this node's ranks sent up to the parent, for the first time or again.",
        PassedOn = "passed_on": "Requests passed on to the parent as they came.",
        HandedDown = "handed_down": "Answers of the parent handed down to the rank that asked.",
    }
}

impl Refusal {
    /// Index among all counters.
    #[inline(always)]
    #[must_use]
    pub const fn counter(self) -> u32 {
        self as u32
    }
}

impl Event {
    /// Index among all counters.
    #[inline(always)]
    #[must_use]
    pub const fn counter(self) -> u32 {
        Refusal::COUNT as u32 + self as u32
    }
}

/// Places for counters of one CPU: a power of two, so that the kernel reaches each by constant steps ([`pick_mut`]).
pub const COUNTERS: usize = 64;

/// Places that are not used yet.
const SPARE: usize = COUNTERS - Refusal::COUNT - Event::COUNT;

/// The counters of one CPU, as the kernel's per-CPU map holds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Counters {
    /// By refusal, in index order.
    pub refusals: [u64; Refusal::COUNT],
    /// By event, in index order.
    pub events: [u64; Event::COUNT],
    spare: [u64; SPARE],
}

described!(Counters { refusals, events, spare });

impl Default for Counters {
    fn default() -> Self {
        Zeroable::zeroed()
    }
}

impl Counters {
    /// Adds one to a refusal.
    #[inline(always)]
    pub fn refuse(&mut self, refusal: Refusal) {
        self.refusals[refusal as usize] = self.refusals[refusal as usize].wrapping_add(1);
    }

    /// Adds one to an event.
    #[inline(always)]
    pub fn note(&mut self, event: Event) {
        self.events[event as usize] = self.events[event as usize].wrapping_add(1);
    }

    /// Adds one to the counter with this index (modulo [`COUNTERS`]).
    #[inline(always)]
    pub fn count(&mut self, counter: u32) {
        let all: &mut [u64; COUNTERS] = bytemuck::cast_mut(self);
        let count = pick_mut(all, counter as usize);
        *count = count.wrapping_add(1);
    }

    /// How often `refusal` happened.
    #[must_use]
    pub const fn refused(&self, refusal: Refusal) -> u64 {
        self.refusals[refusal as usize]
    }

    /// How often `event` happened.
    #[must_use]
    pub const fn noted(&self, event: Event) -> u64 {
        self.events[event as usize]
    }

    /// Adds another CPU's counters to these.
    pub fn absorb(&mut self, other: &Counters) {
        for (mine, theirs) in self.refusals.iter_mut().zip(&other.refusals) {
            *mine = mine.wrapping_add(*theirs);
        }
        for (mine, theirs) in self.events.iter_mut().zip(&other.events) {
            *mine = mine.wrapping_add(*theirs);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_sentences_end() {
        let names = Refusal::ALL.iter().map(|r| (r.name(), r.sentence()));
        let names: std::vec::Vec<_> =
            names.chain(Event::ALL.iter().map(|e| (e.name(), e.sentence()))).collect();
        let unique: std::collections::BTreeSet<_> = names.iter().map(|n| n.0).collect();
        assert_eq!(unique.len(), names.len());
        assert!(names.iter().all(|n| n.1.ends_with(['.', ')'])));
        assert_eq!(size_of::<Counters>(), COUNTERS * 8);
    }
}
