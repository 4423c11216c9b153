//! ATP (NSDI '21): additive increase, multiplicative decrease on congestion marks, once a window.
//!
//! Its window is clocked by aggregated results, so a straggler's pace is everybody's.

use super::epoch::Epoch;
use super::{Controller, Feedback, Windows};
use crate::membership::Membership;
use crate::time::Time;

/// A window that met congestion is divided by this (in-ATP/ATP, `common/CC_manager.h`).
const DECREASE: u32 = 2;
/// Chunks that a window without congestion grows by: 1500 bytes (in-ATP/ATP, `common/CC_manager.h`), a chunk of ours.
const INCREASE: u32 = 1;

/// ATP's window. Losses do not change it, as in its public code: there they are only sent again.
#[derive(Clone, Copy, Debug)]
pub struct Atp {
    window: u32,
    most: u32,
    epoch: Epoch,
}

impl Atp {
    /// Starts at W, as the public client does, whose window is its number of aggregators from the first packet on.
    #[must_use]
    pub fn new(membership: &Membership) -> Atp {
        let most = u32::from(membership.window).max(1);
        Atp { window: most, most, epoch: Epoch::default() }
    }
}

impl Controller for Atp {
    fn name(&self) -> &'static str {
        "atp"
    }

    fn windows(&self) -> Windows {
        Windows::synchronous(self.window)
    }

    fn on_answer(&mut self, feedback: &Feedback) {
        self.epoch.count(feedback, true);
        let Some(counts) = self.epoch.turn(feedback.delivered, feedback.next) else { return };
        let window = if counts.marks > 0 { self.window / DECREASE } else { self.window + INCREASE };
        self.window = window.clamp(1, self.most);
    }

    fn on_losses(&mut self, _: Time, _: u32) {}
}

#[cfg(test)]
mod tests {
    use super::super::laws::{MEMBERSHIP, feedback};
    use super::*;

    #[test]
    fn halves_once_a_window_and_grows_by_one() {
        let mut atp = Atp::new(&MEMBERSHIP);
        let mut answer = |delivered, next, ecn_echo| {
            atp.on_answer(&Feedback { delivered, next, ecn_echo, ..feedback() });
            atp.window
        };
        assert_eq!(answer(1, 65, true), 32);
        // More marks of the same window change nothing.
        assert_eq!(answer(2, 66, true), 32);
        assert_eq!(answer(65, 97, false), 16);
        assert_eq!(answer(97, 113, false), 17);
        assert_eq!(answer(113, 130, false), 18);
    }
}
