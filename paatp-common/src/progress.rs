//! How far each rank is: acknowledged results and acknowledged contributions, with the lowest of each.
//!
//! Written by the data plane from several CPUs without a lock. Every word carries the generation it belongs to, so a
//! packet of an old generation that was under way while the generation changed cannot move anything (protocol-rules
//! F11), and a new generation starts at zero without anybody clearing the table. Lost updates only make a value too
//! low, which is safe: a request repeats its numbers.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::limits::MAX_RANKS;
use crate::seq::Seq;
use crate::wire::Redo;

/// A number with the generation it belongs to, in one atomic word.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Word(AtomicU64);

impl Word {
    /// The number; zero if the word belongs to another generation.
    #[inline(always)]
    pub fn get(&self, generation: u32) -> u32 {
        let word = self.0.load(Relaxed);
        if (word >> 32) as u32 == generation { word as u32 } else { 0 }
    }

    /// Replaces word and generation.
    #[inline(always)]
    pub fn set(&self, generation: u32, value: u32) {
        self.0.store((generation as u64) << 32 | value as u64, Relaxed);
    }
}

/// One number of every rank, and the lowest of them.
#[derive(Debug)]
#[repr(C)]
pub struct Track {
    floor: Word,
    slowest: Word,
    ranks: [Word; MAX_RANKS],
}

impl Default for Track {
    fn default() -> Self {
        Track {
            floor: Word::default(),
            slowest: Word::default(),
            ranks: [const { Word(AtomicU64::new(0)) }; MAX_RANKS],
        }
    }
}

/// Whose numbers count.
#[derive(Clone, Copy, Debug)]
pub struct Members {
    /// Generation of the job.
    pub generation: u32,
    /// Bitmap of the ranks that count.
    pub expected: u64,
}

impl Track {
    /// The number of one rank.
    #[must_use]
    pub fn of(&self, generation: u32, rank: usize) -> Seq {
        Seq(self.ranks.get(rank).map_or(0, |word| word.get(generation)))
    }

    /// The lowest number, as of the last time that a rank at the floor moved. May be too low, never too high.
    #[inline(always)]
    pub fn floor(&self, generation: u32) -> Seq {
        Seq(self.floor.get(generation))
    }

    /// A rank that was at the floor when it was last computed.
    #[inline(always)]
    pub fn slowest(&self, generation: u32) -> u8 {
        self.slowest.get(generation) as u8
    }

    /// Takes in a rank's word that it has reached `value`. Ignored unless at most `reach` steps ahead of what is known:
    /// further is a lie or a ghost of 2^32 chunks ago (protocol-rules F13). Returns the floor.
    #[inline(always)]
    pub fn record(&self, members: Members, rank: usize, value: Seq, reach: u32) -> Seq {
        let generation = members.generation;
        let floor = self.floor(generation);
        let Some(word) = self.ranks.get(rank) else { return floor };
        let known = Seq(word.get(generation));
        let steps = value.since(known);
        if steps == 0 || steps > reach {
            return floor;
        }
        word.set(generation, value.0);
        // Only a rank that stood at the floor (or below: a lost update) can have raised it.
        if floor.is_before(known) { floor } else { self.recompute(members) }
    }

    /// Computes the floor anew: after a shrink, before a refusal that depends on it, and for every answer that tells it
    /// (two CPUs that raised it at once may have left it too low, and nobody might move again).
    #[inline(always)]
    pub fn recompute(&self, members: Members) -> Seq {
        let generation = members.generation;
        let floor = self.floor(generation);
        let (mut least, mut slowest) = (u32::MAX, 0);
        for rank in 0..MAX_RANKS {
            if members.expected >> rank == 0 {
                break;
            }
            if members.expected >> rank & 1 == 0 {
                continue;
            }
            let value = Seq(self.ranks[rank].get(generation));
            // Below the floor: two CPUs wrote this rank's word in the wrong order.
            let ahead = if value.is_before(floor) { 0 } else { value.since(floor) };
            if ahead < least {
                (least, slowest) = (ahead, rank as u32);
                if ahead == 0 {
                    break;
                }
            }
        }
        if least == u32::MAX {
            return floor;
        }
        // Two CPUs may write in either order; the lower value that can remain is safe.
        self.slowest.set(generation, slowest);
        let lifted = floor.plus(least);
        if least != 0 {
            self.floor.set(generation, lifted.0);
        }
        lifted
    }
}

/// Progress of one job, as the kernel's map holds it.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Progress {
    /// Results that have arrived: slots are reused below the floor, min_ack.
    pub acks: Track,
    /// Contributions that were acknowledged: floor p_min.
    pub contributed: Track,
    highest: Word,
    redo: Word,
    redo_attempt: Word,
    reserved: [Word; 1],
}

const _: () = assert!(size_of::<Progress>() == 1088);

impl Progress {
    /// The highest progress of any rank, p_max.
    #[inline(always)]
    pub fn highest(&self, generation: u32) -> Seq {
        Seq(self.highest.get(generation))
    }

    /// Takes in a rank's progress; returns p_min.
    #[inline(always)]
    pub fn contributed(&self, members: Members, rank: usize, value: Seq, reach: u32) -> Seq {
        let low = self.contributed.record(members, rank, value, reach);
        let highest = self.highest(members.generation);
        if highest.is_before(value) && value.since(highest) <= reach {
            self.highest.set(members.generation, value.0);
        }
        low
    }

    /// The announced redo, if one is open.
    #[inline(always)]
    pub fn redo(&self, generation: u32) -> Option<Redo> {
        let attempt = self.redo_attempt.get(generation) as u8;
        (attempt != 0).then(|| Redo { seq: Seq(self.redo.get(generation)), attempt })
    }

    /// Announces the redo of a chunk, unless an earlier chunk's is announced.
    #[inline(always)]
    pub fn announce(&self, generation: u32, redo: Redo) {
        let keep = match self.redo(generation) {
            Some(open) => open.seq.is_before(redo.seq) || open == redo,
            None => false,
        };
        if !keep {
            self.redo.set(generation, redo.seq.0);
            self.redo_attempt.set(generation, redo.attempt as u32);
        }
    }

    /// Withdraws the announcement of a chunk that is complete again or over.
    #[inline(always)]
    pub fn withdraw(&self, generation: u32, seq: Seq) {
        if self.redo(generation).is_some_and(|open| open.seq == seq) {
            self.redo_attempt.set(generation, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GENERATION: u32 = 7;

    proptest! {
        /// The floor is the minimum of what was accepted, near the wrap as elsewhere.
        #[test]
        fn floor_is_the_lowest(start in prop_oneof![Just(0u32), Just(u32::MAX - 20)],
                               steps in proptest::collection::vec((0..4usize, 0..6u32), 0..200)) {
            let (track, reach) = (Track::default(), 8);
            let members = Members { generation: GENERATION, expected: 0b1011 };
            let mut model = [start; 4];
            for rank in [0, 1, 3] {
                track.ranks[rank].set(GENERATION, start);
            }
            track.floor.set(GENERATION, start);
            for (rank, step) in steps {
                let value = Seq(model[rank]).plus(step);
                if members.expected >> rank & 1 == 1 {
                    model[rank] = value.0;
                    track.record(members, rank, value, reach);
                }
                let lowest = [0, 1, 3].map(|r| Seq(model[r]).since(Seq(start))).into_iter().min().unwrap_or(0);
                prop_assert_eq!(track.floor(GENERATION), Seq(start).plus(lowest));
            }
        }
    }

    /// F13: acknowledgements further ahead than the ring are no acknowledgements.
    #[test]
    fn f13_far_acknowledgements_are_ignored() {
        let (track, members) = (Track::default(), Members { generation: GENERATION, expected: 1 });
        assert_eq!(track.record(members, 0, Seq(9), 8), Seq(0));
        assert_eq!(track.record(members, 0, Seq(8), 8), Seq(8));
        assert_eq!(track.record(members, 0, Seq(3), 8), Seq(8));
    }

    /// F11: a word of another generation counts as zero and moves nothing.
    #[test]
    fn f11_generations_do_not_mix() {
        let track = Track::default();
        let old = Members { generation: GENERATION, expected: 0b11 };
        let new = Members { generation: GENERATION + 1, expected: 0b11 };
        track.record(old, 0, Seq(3), 8);
        track.record(old, 1, Seq(3), 8);
        assert_eq!(track.floor(old.generation), Seq(3));
        assert_eq!(track.floor(new.generation), Seq(0));
        track.record(new, 0, Seq(2), 8);
        track.record(old, 1, Seq(4), 8); // the packet that was under way
        assert_eq!(track.recompute(new), Seq(0));
    }

    /// Two CPUs that write one rank's word in the wrong order never lift the floor above what that rank said.
    #[test]
    fn a_lost_update_does_not_lift_the_floor() {
        let (track, members) = (Track::default(), Members { generation: GENERATION, expected: 0b11 });
        track.record(members, 0, Seq(7), 8);
        track.record(members, 1, Seq(7), 8);
        track.ranks[0].set(GENERATION, 6);
        assert_eq!(track.record(members, 1, Seq(9), 8), Seq(7));
        assert_eq!(track.record(members, 0, Seq(8), 8), Seq(8));
    }

    #[test]
    fn the_lowest_redo_is_announced() {
        let progress = Progress::default();
        progress.announce(GENERATION, Redo { seq: Seq(5), attempt: 1 });
        progress.announce(GENERATION, Redo { seq: Seq(6), attempt: 1 });
        assert_eq!(progress.redo(GENERATION), Some(Redo { seq: Seq(5), attempt: 1 }));
        progress.announce(GENERATION, Redo { seq: Seq(5), attempt: 2 });
        assert_eq!(progress.redo(GENERATION).map(|r| r.attempt), Some(2));
        progress.withdraw(GENERATION, Seq(6));
        assert!(progress.redo(GENERATION).is_some());
        progress.withdraw(GENERATION, Seq(5));
        assert_eq!(progress.redo(GENERATION), None);
    }
}
