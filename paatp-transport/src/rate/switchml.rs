//! SwitchML: a worker owns a pool of slots and sends into one as soon as that slot's result is here.

use super::{Controller, Feedback, Windows};
use crate::membership::Membership;
use crate::time::Time;

/// Self-clocked by a pool: chunk k is sent when result k − pool is here. Marks and losses change nothing.
#[derive(Clone, Copy, Debug)]
pub struct SwitchMl {
    pool: u32,
}

impl SwitchMl {
    /// Each chunk in flight takes two slots of the ring, as SwitchML's has two versions, one of them kept for ranks that
    /// have not received it yet. So the pool is half of the ring, and at most W.
    #[must_use]
    pub fn new(membership: &Membership) -> SwitchMl {
        SwitchMl { pool: (membership.slots / 2).clamp(1, u32::from(membership.window).max(1)) }
    }
}

impl Controller for SwitchMl {
    fn name(&self) -> &'static str {
        "switchml"
    }

    fn windows(&self) -> Windows {
        Windows::synchronous(self.pool)
    }

    fn on_answer(&mut self, _: &Feedback) {}

    fn on_losses(&mut self, _: Time, _: u32) {}
}
