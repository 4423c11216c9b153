//! What a rank learns when it joins a job, and how it wants to behave.

use core::time::Duration;

use crate::seating::{Names, Seating};
use paatp_common::limits::{LANES_PER_BLOCK, MAX_RANKS, MAX_RING_SLOTS};

/// A rank's place in a job, as the control plane hands it out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Membership {
    /// Job number on its aggregator.
    pub job: u16,
    /// Incarnation of the membership.
    pub generation: u32,
    /// Secret that the salts are drawn from.
    pub nonce: u64,
    /// This rank, at its node.
    pub rank: u8,
    /// Number of ranks there.
    pub world: u8,
    /// Most lanes in a chunk.
    pub lanes: u16,
    /// Window W, in chunks: result k − W fixes the exponent of chunk k.
    pub window: u16,
    /// Slots S of the job's ring: a power of two, at least 2 W.
    pub slots: u32,
    /// Where it is among the ranks of other nodes, if the ranks of a node are one rank at its parent.
    pub seating: Option<Seating>,
}

impl Membership {
    /// Tests that the numbers fit together.
    ///
    /// # Errors
    /// The first that does not.
    pub fn check(&self) -> Result<(), MembershipError> {
        let Membership { rank, world, lanes, window, slots, .. } = *self;
        if world == 0 || usize::from(world) > MAX_RANKS {
            return Err(MembershipError::World { world });
        }
        if rank >= world {
            return Err(MembershipError::Rank { rank, world });
        }
        if let Some(Seating { here, root, seat }) = self.seating {
            let is_beneath = root.ranks(1u64.checked_shl(seat.into()).unwrap_or(0)).contains(&self.number());
            if here.bits() != world || here.of(rank).1 != 1 || !is_beneath {
                return Err(MembershipError::Seating { rank });
            }
        }
        if lanes == 0 || !usize::from(lanes).is_multiple_of(LANES_PER_BLOCK) {
            return Err(MembershipError::Lanes { lanes });
        }
        if window == 0 || u32::from(window) > slots {
            return Err(MembershipError::Window { window, slots });
        }
        if !slots.is_power_of_two() || slots > MAX_RING_SLOTS {
            return Err(MembershipError::Slots { slots });
        }
        Ok(())
    }

    /// Whom the bits of this rank's node stand for.
    pub(crate) fn here(&self) -> Names {
        self.seating.map_or(Names::flat(self.world), |seating| seating.here)
    }

    /// Whom the bits of results stand for.
    pub(crate) fn root(&self) -> Names {
        self.seating.map_or(Names::flat(self.world), |seating| seating.root)
    }

    /// The bit that this rank has in results, alone or with others.
    pub(crate) fn seat(&self) -> u8 {
        self.seating.map_or(self.rank, |seating| seating.seat)
    }

    /// This rank, counted through all nodes.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.here().of(self.rank).0
    }

    /// Number of ranks of all nodes.
    #[must_use]
    pub fn total(&self) -> u16 {
        self.root().count(u64::MAX) as u16
    }
}

/// Why a [`Membership`] cannot be worked with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MembershipError {
    /// No ranks, or too many.
    #[error(
        "a job of {world} ranks is impossible: a packet's bitmap names 1 to {MAX_RANKS} ranks; correct the job's world size"
    )]
    World {
        /// Number of ranks told.
        world: u8,
    },
    /// The rank is not in the world.
    #[error("rank {rank} is not in a job of {world} ranks: ranks count from 0; correct --rank or --world")]
    Rank {
        /// Rank told.
        rank: u8,
        /// Number of ranks told.
        world: u8,
    },
    /// What is told of the other nodes does not fit.
    #[error(
        "what the aggregator tells of the ranks of other nodes has no place for rank {rank}; run the same version everywhere"
    )]
    Seating {
        /// This rank.
        rank: u8,
    },
    /// Not whole blocks.
    #[error(
        "chunks of {lanes} lanes are impossible: payloads are whole blocks of {LANES_PER_BLOCK} lanes; correct the job's lanes"
    )]
    Lanes {
        /// Lanes told.
        lanes: u16,
    },
    /// The window does not fit the ring.
    #[error(
        "a window of {window} chunks does not fit a ring of {slots} slots: the ring needs at least the window (twice as much, to keep ranks from running into BUSY), and the window at least one chunk; correct the job's window or slots"
    )]
    Window {
        /// Window told.
        window: u16,
        /// Slots told.
        slots: u32,
    },
    /// The ring is no power of two, or too long.
    #[error(
        "a ring of {slots} slots is impossible: it must be a power of two up to {MAX_RING_SLOTS}; correct the job's slots"
    )]
    Slots {
        /// Slots told.
        slots: u32,
    },
}

/// How long a worker waits, and for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Give up when no chunk was completed for this long.
    pub timeout: Duration,
    /// Longest time to stay at hand for other ranks after the own work is done and `leave` was called.
    pub linger: Duration,
    /// How many operations after the oldest unfinished one may be handed out before it; 0: in order. Results do not depend
    /// on it. An operation that was handed out early stays done, also if an earlier one fails later.
    pub staleness: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Settings { timeout: Duration::from_secs(30), linger: Duration::from_secs(30), staleness: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Membership = Membership {
        job: 0,
        generation: 1,
        nonce: 2,
        rank: 0,
        world: 2,
        lanes: 352,
        window: 4,
        slots: 8,
        seating: None,
    };

    #[test]
    fn what_does_not_fit_is_named() {
        assert_eq!(GOOD.check(), Ok(()));
        let bad = [
            Membership { world: 0, ..GOOD },
            Membership { world: 65, ..GOOD },
            Membership { rank: 2, ..GOOD },
            Membership { lanes: 33, ..GOOD },
            Membership { window: 9, ..GOOD },
            Membership { slots: 12, ..GOOD },
        ];
        assert!(bad.iter().all(|membership| membership.check().is_err()));
    }
}
