//! How far each rank is: acknowledged results and acknowledged contributions, with the lowest of each.
//!
//! Written by the data plane from several CPUs without a lock. Every word carries the generation it belongs to, so a
//! packet of an old generation that was under way while the generation changed cannot move anything (protocol-rules
//! F11), and a new generation starts at zero without anybody clearing the table. Lost updates only make a value too
//! low. That holds slots back until a request repeats its numbers; and it lets an old duplicate through the window, which
//! the slot refuses under its lock ([`crate::slot::decide`]).

use crate::layout::described;
use crate::limits::{MAX_RANKS, MAX_RING_SLOTS};
use crate::mind::{negative, pick};
use crate::seq::Seq;
use crate::wire::Redo;

/// A number with the generation it belongs to, in one atomic word.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Word(Shared);

pub(crate) use cell::Shared;

/// A 64-bit word that several CPUs read and write whole, in any order.
#[cfg(not(target_arch = "bpf"))]
mod cell {
    use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

    #[derive(Debug, Default)]
    #[repr(transparent)]
    pub struct Shared(AtomicU64);

    impl Shared {
        pub fn load(&self) -> u64 {
            self.0.load(Relaxed)
        }

        pub fn store(&self, value: u64) {
            self.0.store(value, Relaxed);
        }
    }
}

/// The same for BPF, whose code generator has no atomic loads and stores below CPU v4: a volatile access to an aligned
/// word is one instruction.
#[cfg(target_arch = "bpf")]
mod cell {
    use core::cell::UnsafeCell;

    #[derive(Debug, Default)]
    #[repr(transparent)]
    pub struct Shared(UnsafeCell<u64>);

    // SAFETY: accessed by `load` and `store` only, each one instruction on an aligned word.
    unsafe impl Sync for Shared {}

    impl Shared {
        #[inline(always)]
        pub fn load(&self) -> u64 {
            // SAFETY: aligned and alive by `&self`.
            unsafe { self.0.get().read_volatile() }
        }

        #[inline(always)]
        pub fn store(&self, value: u64) {
            // SAFETY: as above.
            unsafe { self.0.get().write_volatile(value) }
        }
    }
}

impl Word {
    /// The number; zero if the word belongs to another generation.
    #[inline(always)]
    pub fn get(&self, generation: u32) -> u32 {
        let word = self.0.load() ^ (generation as u64) << 32;
        // The upper half is zero if the generations are the same. Without a branch, see `negative`.
        let is_same = negative(((word >> 32) as i64).wrapping_sub(1));
        (word & is_same) as u32
    }

    /// One more.
    #[inline(always)]
    fn count(&self, generation: u32) {
        self.set(generation, self.get(generation).wrapping_add(1));
    }

    /// Replaces word and generation.
    #[inline(always)]
    pub fn set(&self, generation: u32, value: u32) {
        self.0.store((generation as u64) << 32 | value as u64);
    }
}

/// What a lower node tells of the slowest of its ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Credit {
    pub(crate) generation: u32,
    /// Steps beyond which it is no acknowledgement.
    pub(crate) reach: u32,
    pub(crate) ack: Seq,
    pub(crate) contributed: Seq,
}

/// The lowest of all ranks' numbers.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Floor {
    floor: Word,
    slowest: Word,
}

described!(Floor { floor, slowest });

/// Whose numbers count.
#[derive(Clone, Copy, Debug)]
pub struct Members {
    /// Generation of the job.
    pub generation: u32,
    /// Bitmap of the ranks that count.
    pub expected: u64,
    /// Number of ranks, those that count no longer included.
    pub world: u8,
}

impl Floor {
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
    /// further is a lie or a ghost of 2^32 chunks ago (protocol-rules F13). Returns true where the floor may have
    /// risen.
    #[inline(always)]
    fn record(&self, generation: u32, word: &Word, rank: usize, value: Seq, reach: u32) -> bool {
        // Not below the floor: another CPU may have written an old number over a newer one.
        let known = later(Seq(word.get(generation)), self.floor(generation));
        let steps = value.since(known);
        if steps == 0 || steps > reach {
            return false;
        }
        word.set(generation, value.0);
        // As long as that rank stands at the floor, nobody else can raise it.
        self.slowest(generation) as usize == rank
    }

    /// The same without a branch, and without saying whether the floor may have risen.
    #[inline(always)]
    fn credit(&self, generation: u32, word: &Word, value: Seq, reach: u32) {
        let known = later(Seq(word.get(generation)), self.floor(generation));
        let steps = u64::from(value.since(known));
        // All ones if it is within reach.
        let taken = negative((steps as i64).wrapping_sub(i64::from(reach)).wrapping_sub(1));
        word.set(generation, known.plus((steps & taken) as u32).0);
    }

    /// Two CPUs may write in either order: the lower value that can remain is safe.
    #[inline(always)]
    fn lift(&self, generation: u32, floor: Seq, least: Least) {
        self.slowest.set(generation, least.rank());
        if least.steps() != 0 {
            self.floor.set(generation, floor.plus(least.steps()).0);
        }
    }
}

/// The later of two numbers, without a branch, see [`negative`].
#[inline(always)]
pub(crate) fn later(a: Seq, b: Seq) -> Seq {
    let ahead = i64::from(a.since(b) as i32);
    b.plus((ahead as u64 & !negative(ahead)) as u32)
}

/// The rank nearest to a floor: its steps from there above eight bits of its number, complemented. The lower of two such
/// words is the nearer rank, or the later one of two that are equally near.
#[derive(Clone, Copy, Debug)]
struct Least(u64);

impl Least {
    /// Further than any rank can be.
    const NONE: Least = Least((u32::MAX as u64) << 8 | 0xFF);

    /// Takes in a rank that has reached `value`, unless `ignored` is all ones. One below the floor counts as at it: two
    /// CPUs wrote its word in the wrong order.
    #[inline(always)]
    fn take(&mut self, value: u32, floor: Seq, rank: u64, ignored: u64) {
        let steps = i64::from(Seq(value).since(floor) as i32);
        let word = (steps as u64 & !negative(steps)) << 8 | rank ^ 0xFF | ignored >> 1;
        let change = word.wrapping_sub(self.0);
        self.0 = self.0.wrapping_add(change & negative(change as i64));
    }

    #[inline(always)]
    const fn steps(self) -> u32 {
        (self.0 >> 8) as u32
    }

    #[inline(always)]
    const fn rank(self) -> u32 {
        self.0 as u32 & 0xFF ^ 0xFF
    }
}

/// A walk over the ranks that computes both floors. In pieces, because the kernel makes it a `bpf_loop`: the verifier
/// would walk an ordinary loop once for each rank and each branch.
#[derive(Clone, Copy, Debug)]
pub struct Walk {
    members: Members,
    acks: Least,
    contributed: Least,
    ack_floor: Seq,
    contributed_floor: Seq,
}

impl Walk {
    /// Before the first rank.
    #[inline(always)]
    #[must_use]
    pub fn new(progress: &Progress, members: Members) -> Walk {
        Walk {
            members,
            acks: Least::NONE,
            contributed: Least::NONE,
            ack_floor: progress.acks.floor(members.generation),
            contributed_floor: progress.contributed.floor(members.generation),
        }
    }

    /// Takes in one rank, from the last to the first, so that of those at a floor the one that acts last in a round is
    /// the one whose move the next walk waits for. Returns true where no further rank can change the outcome: at the
    /// end, or when somebody still stands at both floors, which makes the usual walk short.
    #[inline(always)]
    pub fn visit(&mut self, progress: &Progress, turn: usize) -> bool {
        let rank = (self.members.world as usize).wrapping_sub(1).wrapping_sub(turn);
        if rank >= MAX_RANKS {
            return true;
        }
        let generation = self.members.generation;
        let ignored = (self.members.expected >> rank & 1).wrapping_sub(1);
        let reached = pick(&progress.ranks, rank);
        self.acks.take(reached.acked.get(generation), self.ack_floor, rank as u64, ignored);
        let contributed = reached.contributed.get(generation);
        self.contributed.take(contributed, self.contributed_floor, rank as u64, ignored);
        rank == 0 || (self.acks.0 | self.contributed.0) >> 8 == 0
    }

    /// Writes the floors.
    #[inline(always)]
    pub fn finish(&self, progress: &Progress) {
        if self.members.expected != 0 {
            progress.acks.lift(self.members.generation, self.ack_floor, self.acks);
            progress.contributed.lift(self.members.generation, self.contributed_floor, self.contributed);
        }
    }
}

/// What one rank has reached. Side by side, because every request moves the first two.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Reached {
    acked: Word,
    contributed: Word,
    /// Requests that met congestion.
    marks: Word,
    /// Contributions that were too far ahead.
    busy: Word,
}

described!(Reached { acked, contributed, marks, busy });

/// What one rank has reached, and what was counted of it, as user space reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankRecord {
    /// Results below have arrived.
    pub acked: Seq,
    /// Contributions below are acknowledged.
    pub contributed: Seq,
    /// Requests that met congestion; counts round. CPUs may lose counts to each other.
    pub marks: u32,
    /// Contributions that were refused as too far ahead, likewise.
    pub busy: u32,
}

/// Progress of one job, as the kernel's map holds it.
#[derive(Debug)]
#[repr(C)]
pub struct Progress {
    /// Results that have arrived: slots are reused below the floor, min_ack.
    pub acks: Floor,
    /// Contributions that were acknowledged: floor p_min.
    pub contributed: Floor,
    highest: Word,
    redo: Word,
    redo_attempt: Word,
    crowded: Word,
    ranks: [Reached; MAX_RANKS],
}

const _: () = assert!(size_of::<Progress>() == 2112);
described!(Progress { acks, contributed, highest, redo, redo_attempt, crowded, ranks });

impl Default for Progress {
    fn default() -> Self {
        Progress {
            acks: Floor::default(),
            contributed: Floor::default(),
            highest: Word::default(),
            redo: Word::default(),
            redo_attempt: Word::default(),
            crowded: Word::default(),
            ranks: core::array::from_fn(|_| Reached::default()),
        }
    }
}

impl Progress {
    /// What one rank has reached.
    #[must_use]
    pub fn reached(&self, generation: u32, rank: usize) -> RankRecord {
        let Some(reached) = self.ranks.get(rank) else { return RankRecord::default() };
        let word = |word: &Word| word.get(generation);
        RankRecord {
            acked: Seq(word(&reached.acked)),
            contributed: Seq(word(&reached.contributed)),
            marks: word(&reached.marks),
            busy: word(&reached.busy),
        }
    }

    /// Counts a rank's request that met congestion.
    #[inline(always)]
    pub fn note_mark(&self, generation: u32, rank: usize) {
        pick(&self.ranks, rank).marks.count(generation);
    }

    /// Counts a rank's contribution that was too far ahead.
    #[inline(always)]
    pub fn note_busy(&self, generation: u32, rank: usize) {
        pick(&self.ranks, rank).busy.count(generation);
    }

    /// Counts a contribution that found no slot in the pool.
    #[inline(always)]
    pub fn note_crowded(&self, generation: u32) {
        self.crowded.count(generation);
    }

    /// Contributions of all ranks that found no slot in the pool; counts round. CPUs may lose counts to each other.
    #[inline(always)]
    pub fn crowded(&self, generation: u32) -> u32 {
        self.crowded.get(generation)
    }

    /// The highest progress of any rank, p_max.
    #[inline(always)]
    pub fn highest(&self, generation: u32) -> Seq {
        Seq(self.highest.get(generation))
    }

    /// Takes in a rank's acknowledgement and progress. Returns true where a floor may have risen.
    #[inline(always)]
    pub fn record(&self, generation: u32, rank: usize, ack: Seq, contributed: Seq, reach: u32) -> bool {
        let highest = self.highest(generation);
        if highest.is_before(contributed) && contributed.since(highest) <= reach {
            self.highest.set(generation, contributed.0);
        }
        let reached = pick(&self.ranks, rank);
        self.acks.record(generation, &reached.acked, rank, ack, reach)
            | self.contributed.record(generation, &reached.contributed, rank, contributed, reach)
    }

    /// Credits a rank with what a lower node told of its slowest one, by the rules of [`Progress::record`], but without a
    /// branch: in the kernel this is walked once for each rank. The floors are to be computed anew afterwards.
    #[inline(always)]
    pub(crate) fn credit(&self, rank: usize, credit: &Credit) {
        let Credit { generation, reach, ack, contributed } = *credit;
        let reached = pick(&self.ranks, rank);
        self.acks.credit(generation, &reached.acked, ack, reach);
        self.contributed.credit(generation, &reached.contributed, contributed, reach);
    }

    /// Computes both floors anew: when a rank at a floor moved, after a shrink, before a refusal that depends on a
    /// floor, and for every PULL (two CPUs that raised it at once may have left it too low, and nobody might move
    /// again).
    pub fn recompute(&self, members: Members) {
        let mut walk = Walk::new(self, members);
        for turn in 0..MAX_RANKS {
            if walk.visit(self, turn) {
                break;
            }
        }
        walk.finish(self);
    }

    /// The announced redo, if one is open. Once every rank has the chunk (from an older attempt that passed its check)
    /// nobody needs it: it would stay for ever, and hide later ones.
    #[inline(always)]
    pub fn redo(&self, generation: u32) -> Option<Redo> {
        let redo =
            Redo { seq: Seq(self.redo.get(generation)), attempt: self.redo_attempt.get(generation) as u8 };
        let open = redo.attempt != 0 && redo.seq.since(self.acks.floor(generation)) < MAX_RING_SLOTS;
        open.then_some(redo)
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

    fn record(progress: &Progress, members: Members, rank: usize, ack: u32) -> Seq {
        if progress.record(members.generation, rank, Seq(ack), Seq(0), 8) {
            progress.recompute(members);
        }
        progress.acks.floor(members.generation)
    }

    proptest! {
        /// Both floors are the minimum of what was accepted, near the wrap as elsewhere.
        #[test]
        fn floors_are_the_lowest(start in prop_oneof![Just(0u32), Just(u32::MAX - 20)],
                                 steps in proptest::collection::vec((0..4usize, 0..6u32, 0..6u32), 0..200)) {
            let (progress, reach) = (Progress::default(), 8);
            let members = Members { generation: GENERATION, expected: 0b1011, world: 4 };
            let mut model = [(start, start); 4];
            for rank in [0, 1, 3] {
                progress.ranks[rank].acked.set(GENERATION, start);
                progress.ranks[rank].contributed.set(GENERATION, start);
            }
            progress.acks.floor.set(GENERATION, start);
            progress.contributed.floor.set(GENERATION, start);
            for (rank, ack, contributed) in steps {
                if members.expected >> rank & 1 == 1 {
                    model[rank] = (Seq(model[rank].0).plus(ack).0, Seq(model[rank].1).plus(contributed).0);
                    let (ack, contributed) = (Seq(model[rank].0), Seq(model[rank].1));
                    if progress.record(GENERATION, rank, ack, contributed, reach) {
                        progress.recompute(members);
                    }
                }
                let lowest = |pick: fn(&(u32, u32)) -> u32| {
                    Seq(start).plus([0, 1, 3].map(|r| Seq(pick(&model[r])).since(Seq(start))).into_iter().min().unwrap_or(0))
                };
                prop_assert_eq!(progress.acks.floor(GENERATION), lowest(|m| m.0));
                prop_assert_eq!(progress.contributed.floor(GENERATION), lowest(|m| m.1));
            }
        }
    }

    /// F13: acknowledgements further ahead than the ring are no acknowledgements.
    #[test]
    fn f13_far_acknowledgements_are_ignored() {
        let (progress, members) =
            (Progress::default(), Members { generation: GENERATION, expected: 1, world: 1 });
        assert_eq!(record(&progress, members, 0, 9), Seq(0));
        assert_eq!(record(&progress, members, 0, 8), Seq(8));
        assert_eq!(record(&progress, members, 0, 3), Seq(8));
    }

    /// F11: a word of another generation counts as zero and moves nothing.
    #[test]
    fn f11_generations_do_not_mix() {
        let progress = Progress::default();
        let old = Members { generation: GENERATION, expected: 0b11, world: 2 };
        let new = Members { generation: GENERATION + 1, expected: 0b11, world: 2 };
        record(&progress, old, 0, 3);
        assert_eq!(record(&progress, old, 1, 3), Seq(3));
        assert_eq!(progress.acks.floor(new.generation), Seq(0));
        record(&progress, new, 0, 2);
        record(&progress, old, 1, 4); // the packet that was under way
        progress.recompute(new);
        assert_eq!(progress.acks.floor(new.generation), Seq(0));
    }

    /// Two CPUs that write one rank's word in the wrong order never lift the floor above what that rank said.
    #[test]
    fn a_lost_update_does_not_lift_the_floor() {
        let (progress, members) =
            (Progress::default(), Members { generation: GENERATION, expected: 0b11, world: 2 });
        record(&progress, members, 0, 7);
        record(&progress, members, 1, 7);
        progress.ranks[0].acked.set(GENERATION, 6);
        assert_eq!(record(&progress, members, 1, 9), Seq(7));
        assert_eq!(record(&progress, members, 0, 8), Seq(8));
    }

    #[test]
    fn a_redo_that_every_rank_can_do_without_hides_no_other() {
        let (progress, members) =
            (Progress::default(), Members { generation: GENERATION, expected: 1, world: 1 });
        progress.announce(GENERATION, Redo { seq: Seq(5), attempt: 1 });
        record(&progress, members, 0, 6);
        assert_eq!(progress.redo(GENERATION), None);
        progress.announce(GENERATION, Redo { seq: Seq(9), attempt: 2 });
        assert_eq!(progress.redo(GENERATION), Some(Redo { seq: Seq(9), attempt: 2 }));
    }

    /// A number that was lost by more than the ring's length does not stop its rank for ever.
    #[test]
    fn a_lost_update_heals() {
        let (progress, members) =
            (Progress::default(), Members { generation: GENERATION, expected: 0b11, world: 2 });
        for ack in [8, 16, 24] {
            record(&progress, members, 0, ack);
            record(&progress, members, 1, ack);
        }
        progress.ranks[0].acked.set(GENERATION, 5);
        record(&progress, members, 0, 30);
        assert_eq!(record(&progress, members, 1, 32), Seq(30));
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
