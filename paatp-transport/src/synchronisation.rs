//! Bounded staleness: when the next iteration may begin.
//!
//! The mode comes with results: each slot tells the policy of its chunk. A rank is in the mode of the last operation
//! that is done, and operations are done in their order, so all ranks go through the same modes at the same operations.

use alloc::collections::VecDeque;

use paatp_common::policy::{Staleness, Told};

/// How ranks waited for one another in an operation: that of its last chunk, the same at every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Synchronisation {
    /// Number of the policy; counts round.
    pub epoch: u8,
    /// What is told of it.
    pub told: Told,
}

/// Iterations whose operations are queued, by the number of the first operation after each. Those that are done are
/// forgotten.
#[derive(Debug, Default)]
pub(crate) struct Iterations {
    ends: VecDeque<u64>,
}

impl Iterations {
    /// An iteration has no further operations; the next one will have number `next`.
    pub fn end(&mut self, next: u64) {
        self.ends.push_back(next);
    }

    /// Operations before this one are done.
    pub fn settle(&mut self, done: u64) {
        while self.ends.pop_front_if(|end| *end <= done).is_some() {}
    }

    /// Another may begin: never iteration t + 1 before the results of t − s. Without a bound, as long as `room` says
    /// that the ring holds what is queued.
    pub fn may_begin(&self, staleness: Staleness, room: bool) -> bool {
        match staleness {
            Staleness::Bounded(most) => self.ends.len() <= usize::from(most),
            Staleness::Unbounded => room || self.ends.is_empty(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_iteration_waits_for_the_one_that_is_as_far_back_as_staleness_says() {
        let mut iterations = Iterations::default();
        for t in 1..=10u64 {
            iterations.end(t * 3);
            iterations.settle(t.saturating_sub(4) * 3 + 2);
            // Results of t − 4 are here, and of no later one.
            let missing = t.min(4) as u8;
            assert!(iterations.may_begin(Staleness::Bounded(missing), false));
            assert!(!iterations.may_begin(Staleness::Bounded(missing - 1), true));
            assert!(iterations.may_begin(Staleness::Unbounded, true));
            assert!(!iterations.may_begin(Staleness::Unbounded, false));
        }
        iterations.settle(30);
        assert!(iterations.may_begin(Staleness::NONE, false));
        assert!(iterations.may_begin(Staleness::Unbounded, false), "one at a time is always possible");
    }
}
