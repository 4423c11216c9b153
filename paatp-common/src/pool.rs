//! The pool: slots that all jobs of a node share which have no ring of their own.
//!
//! A chunk of such a job may lie at [`K_MAX`] places of the pool, which its job and number are hashed to, or in the one
//! slot that the job has to itself. Whoever looks for a chunk looks at all of them, so that lowering a job's k hides
//! nothing; whoever claims a slot for it takes the first free one of the first k. Both happen under the lock of the
//! chunk's *home*, its first place, so that no chunk gets two slots (protocol-rules F18).
//!
//! A slot is free when what it holds is over ([`is_over`]). Nobody gives slots back.

use bytemuck::{Pod, Zeroable};

use crate::job::JobEntry;
use crate::mind::opaque;
use crate::progress::Progress;
use crate::seq::Seq;
use crate::slot::Slot;
use crate::tag::mix;

/// Places in the pool for one chunk, and the largest k. A chunk finds none of eight free in a pool that is three quarters
/// full once in ten times, in one that is half full once in 256; more places cost every look-up time.
pub const K_MAX: u8 = 8;

/// Where a search looks: the places in the pool, then the job's own slot.
pub const TURNS: u32 = K_MAX as u32 + 1;

/// The part of the node's slot table that is shared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Pool {
    /// Its first slot.
    pub first: u32,
    /// Its length: a power of two, or 0 on a node without one, which has no job that shares.
    pub slots: u32,
}

/// What a slot holds is of nobody's use any more: its job's generation has ended, or every rank has acknowledged the
/// result. `owner` is the job that the slot names, with its progress. Both only ever become true: a floor that lags says
/// "not yet".
///
/// (A slot that nobody claims for 2^31 chunks of its job would come to look like one of chunks to come. Places are drawn
/// by a hash, so of n slots each is somebody's first choice once in n chunks.)
#[inline(always)]
#[must_use]
pub fn is_over(slot: &Slot, owner: &JobEntry, progress: &Progress) -> bool {
    let generation = slot.generation;
    generation == 0 || generation != owner.generation || slot.seq.is_before(progress.acks.floor(generation))
}

/// One number for a chunk's identity as a slot has it: the generation names the job too, but tests reuse numbers.
#[inline(always)]
const fn name(generation: u32, seq: Seq) -> u64 {
    (generation as u64) << 32 | seq.0 as u64
}

/// Where and for whom to look.
#[derive(Clone, Copy, Debug)]
pub struct Quarry {
    /// Number of the job.
    pub job: u16,
    /// Its generation.
    pub generation: u32,
    /// The chunk.
    pub seq: Seq,
    /// The job's own slot.
    pub own: u32,
}

/// Nowhere.
const NONE: u64 = u64::MAX;

/// A search for a chunk's slot. In steps, because the kernel makes it a `bpf_loop`, and in whole words, because the
/// kernel's verifier lets nothing smaller be written where a pointer lay before.
#[derive(Clone, Copy, Debug)]
pub struct Search {
    name: u64,
    job: u64,
    /// Hash of job and number: the first place in the lower half, the step from place to place in the upper.
    hash: u64,
    first: u64,
    mask: u64,
    own: u64,
    /// Places from which a free slot may be claimed: k, or 0 to look only.
    claims: u64,
    /// Its own slot may be claimed: the chunk is the one that everybody waits for.
    is_lowest: u64,
    found: u64,
    free: u64,
}

impl Search {
    /// Looks for the slot that holds the chunk.
    #[inline(always)]
    #[must_use]
    pub fn new(pool: Pool, quarry: Quarry) -> Search {
        Search {
            name: name(quarry.generation, quarry.seq),
            job: quarry.job as u64,
            hash: mix((quarry.job as u64) << 32 | quarry.seq.0 as u64),
            first: pool.first as u64,
            mask: (pool.slots as u64).wrapping_sub(1),
            own: quarry.own as u64,
            // Opaque, or LLVM would call a `memset`, which adds variables to pointers.
            claims: opaque(0),
            is_lowest: opaque(0),
            found: opaque(NONE),
            free: opaque(NONE),
        }
    }

    /// The same, and for a free one of the first `k`; and where there is none, for the job's own slot, if the chunk is
    /// min_ack, the one that everybody waits for (protocol-rules F19).
    #[inline(always)]
    #[must_use]
    pub const fn claiming(self, k: u8, is_lowest: bool) -> Search {
        let k = if k > K_MAX { K_MAX } else { k };
        Search { claims: k as u64, is_lowest: is_lowest as u64, ..self }
    }

    /// The slot whose lock is the chunk's.
    #[inline(always)]
    #[must_use]
    pub const fn home(&self) -> u32 {
        self.place(0)
    }

    /// The slot to look at in a turn below [`TURNS`].
    #[inline(always)]
    #[must_use]
    pub const fn index(&self, turn: u64) -> u32 {
        if turn < K_MAX as u64 { self.place(turn) } else { self.own as u32 }
    }

    /// Odd steps reach every slot of a power of two, so the places differ where the pool has that many.
    #[inline(always)]
    const fn place(&self, turn: u64) -> u32 {
        let steps = (self.hash >> 32 | 1).wrapping_mul(turn);
        self.first.wrapping_add(self.hash.wrapping_add(steps) & self.mask) as u32
    }

    /// Looks at the slot of a turn, which may change meanwhile; `is_over` says if [`is_over`]. Returns true where the
    /// search is at its end.
    #[inline(always)]
    pub fn visit(&mut self, turn: u64, slot: &Slot, is_over: bool) -> bool {
        let index = self.index(turn) as u64;
        if name(slot.generation, slot.seq) == self.name && slot.job() as u64 == self.job {
            self.found = index;
            return true;
        }
        let is_allowed = turn < self.claims || turn >= K_MAX as u64 && self.is_lowest != 0;
        if is_over && is_allowed && self.free == NONE {
            self.free = index;
        }
        false
    }

    /// The slot that holds the chunk, else the free one, if any.
    #[inline(always)]
    #[must_use]
    pub const fn outcome(&self) -> Option<u32> {
        let index = if self.found == NONE { self.free } else { self.found };
        if index == NONE { None } else { Some(index as u32) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn search(job: u16, seq: u32, slots: u32) -> Search {
        let pool = Pool { first: 100, slots };
        Search::new(pool, Quarry { job, generation: 9, seq: Seq(seq), own: 7 })
    }

    #[test]
    fn places_differ_and_stay_in_the_pool() {
        for slots in [1, 2, 8, 64, 1 << 16] {
            for seq in 0..500 {
                let search = search(3, seq, slots);
                let places: BTreeSet<u32> = (0..u64::from(K_MAX)).map(|turn| search.index(turn)).collect();
                assert!(places.iter().all(|place| (100..100 + slots).contains(place)));
                assert_eq!(places.len(), slots.min(K_MAX.into()) as usize);
                assert_eq!((search.index(K_MAX.into()), search.home()), (7, search.index(0)));
            }
        }
    }

    /// Consecutive chunks of several jobs use a pool evenly: each first place about as often as any.
    #[test]
    fn places_are_spread_evenly() {
        let mut uses = [0u32; 256];
        for job in 0..16 {
            for seq in 0..4096 {
                uses[search(job, seq, 256).home() as usize - 100] += 1;
            }
        }
        // 256 expected, standard deviation 16.
        let (least, most) = (uses.iter().min().copied(), uses.iter().max().copied());
        assert!(least.unwrap_or(0) > 176 && most.unwrap_or(0) < 336, "{least:?} {most:?}");
    }
}
