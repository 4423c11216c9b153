//! A2TP (EuroSys '23): one window for the path, one for the aggregator's memory; the latter shrinks the more, the longer
//! this rank waits for others while it holds slots.
//!
//! Formulas and constants are facts from CSU-NetLab/A2TP-Eurosys2023, `common/CC_manager.h` and `client/p4ml_manager.cc`.
//! What differs: a *collision* is an answer that says BUSY (its switch marks packets of slots that others wanted); and as
//! there is no parameter server to fall back on, chunks beyond the slot window wait instead of passing the slots by. So
//! what is sent is `min(aggregators, congestion)`.

use core::time::Duration;

use super::epoch::{Counts, Epoch, average, ratio};
use super::{Controller, Feedback, Windows};
use crate::membership::Membership;
use crate::time::Time;

/// Weight of a new sample in the straggler degree γ.
const GAMMA_SHARE: f64 = 1.0 / 64.0;
/// Weight of a new sample in the congestion of path (α) and slots (β).
const CONGESTION_SHARE: f64 = 1.0 / 8.0;
/// Collisions below this share do not shrink the slot window.
pub(super) const COLLISIONS_IGNORED: f64 = 0.1;
/// The slot window loses `(β − 0.1)^γ` parts of this.
pub(super) const COLLISION_SCALE: f64 = 2.0 - COLLISIONS_IGNORED;
/// The straggler degree is sampled when more than one and less than so many base round trips have passed since the window
/// began (20 and 100 µs in the public code, whose base round trip is 20 µs).
const SAMPLE_UNTIL: u32 = 5;

/// A2TP's two windows.
#[derive(Clone, Copy, Debug)]
pub struct A2tp {
    most: f64,
    congestion: f64,
    aggregators: f64,
    alpha: f64,
    beta: f64,
    gamma: f64,
    urgent: f64,
    epoch: Epoch,
    begun: Begun,
    base_rtt: Option<Duration>,
}

/// The beginning of the current window.
#[derive(Clone, Copy, Debug, Default)]
struct Begun {
    at: Time,
    delivered: u64,
    sampled: bool,
}

impl A2tp {
    /// Starts at W with α = β = 0 and γ = 1, as the public code.
    #[must_use]
    pub fn new(membership: &Membership) -> A2tp {
        let most = f64::from(membership.window.max(1));
        A2tp {
            most,
            congestion: most,
            aggregators: most,
            alpha: 0.0,
            beta: 0.0,
            gamma: 1.0,
            urgent: 1.0,
            epoch: Epoch::default(),
            begun: Begun::default(),
            base_rtt: None,
        }
    }

    /// Which part of a window came back within a round trip: 1 for a rank that waits for nobody.
    fn sample_urgency(&mut self, feedback: &Feedback) {
        if let Some(rtt) = feedback.rtt.filter(|rtt| !rtt.is_zero()) {
            self.base_rtt = Some(self.base_rtt.map_or(rtt, |base| base.min(rtt)));
        }
        let elapsed = feedback.now.since(self.begun.at);
        let Some(base) = self.base_rtt.filter(|base| elapsed > *base) else { return };
        if !self.begun.sampled && elapsed < base * SAMPLE_UNTIL {
            let received = feedback.delivered.saturating_sub(self.begun.delivered);
            self.urgent = (received as f64 / self.aggregators).min(1.0);
            self.begun.sampled = true;
        }
    }

    fn end_window(&mut self, counts: Counts) {
        self.gamma = average(self.gamma, self.urgent, GAMMA_SHARE);
        self.alpha = average(self.alpha, ratio(counts.marks, self.congestion as u32), CONGESTION_SHARE);
        self.beta = average(self.beta, ratio(counts.busy, self.aggregators as u32), CONGESTION_SHARE);
        if counts.busy > 0 && self.beta > COLLISIONS_IGNORED {
            self.aggregators *= collision_factor(self.beta, self.gamma);
        } else {
            self.aggregators += 1.0;
        }
        if counts.marks > 0 {
            self.congestion *= 1.0 - self.alpha / 2.0;
        } else {
            self.congestion += 1.0;
        }
        self.congestion = whole(self.congestion, self.most);
        self.aggregators = whole(self.aggregators, self.most).min(self.congestion);
    }
}

/// What is left of the slot window when β of its chunks collided: `1 − (β − 0.1)^γ / 1.9`.
pub(super) fn collision_factor(beta: f64, gamma: f64) -> f64 {
    1.0 - libm::pow((beta - COLLISIONS_IGNORED).max(0.0), gamma) / COLLISION_SCALE
}

/// Whole chunks, from 1 to `most`.
fn whole(window: f64, most: f64) -> f64 {
    f64::from(window.clamp(1.0, most) as u32)
}

impl Controller for A2tp {
    fn name(&self) -> &'static str {
        "a2tp"
    }

    fn windows(&self) -> Windows {
        Windows::synchronous(self.aggregators as u32)
    }

    fn on_answer(&mut self, feedback: &Feedback) {
        self.sample_urgency(feedback);
        self.epoch.count(feedback, true);
        if let Some(counts) = self.epoch.turn(feedback.delivered, feedback.next) {
            self.end_window(counts);
            self.begun = Begun { at: feedback.now, delivered: feedback.delivered, sampled: false };
        }
    }

    fn on_losses(&mut self, _: Time, _: u32) {}
}

#[cfg(test)]
mod tests {
    use super::super::laws::{MEMBERSHIP, feedback};
    use super::*;

    const COLLISIONS: Counts = Counts { answers: 64, marks: 0, busy: 64, lost: 0, filled: true };
    const MARKS: Counts = Counts { answers: 64, marks: 64, busy: 0, lost: 0, filled: true };

    #[test]
    fn marks_and_collisions_shrink_their_own_window() {
        let mut a2tp = A2tp::new(&MEMBERSHIP);
        a2tp.end_window(MARKS);
        // α = 1/8: 64 · (1 − 1/16).
        assert_eq!((a2tp.congestion, a2tp.aggregators), (60.0, 60.0));
        let mut a2tp = A2tp::new(&MEMBERSHIP);
        a2tp.end_window(COLLISIONS);
        // β = 1/8, γ = 1: 64 · (1 − 0.025 / 1.9) = 63.2.
        assert_eq!((a2tp.congestion, a2tp.aggregators), (64.0, 63.0));
        assert_eq!(a2tp.windows(), Windows::synchronous(63));
    }

    #[test]
    fn who_waits_for_others_gives_up_more_slots() {
        let factors: Vec<f64> = [1.0, 0.5, 0.1].map(|gamma| collision_factor(0.5, gamma)).to_vec();
        assert!(factors.is_sorted_by(|more, less| more > less), "{factors:?}");
        assert!((collision_factor(0.5, 1.0) - (1.0 - 0.4 / 1.9)).abs() < 1e-12);
    }

    #[test]
    fn urgency_is_sampled_once_a_window_after_a_round_trip() {
        let mut a2tp = A2tp::new(&MEMBERSHIP);
        let rtt = Some(Duration::from_micros(20));
        let mut answer = |now, delivered| {
            a2tp.on_answer(&Feedback { now: Time(now), rtt, delivered, next: 1_000, ..feedback() });
            a2tp.urgent
        };
        answer(0, 0);
        assert_eq!(answer(15, 8), 1.0);
        assert_eq!(answer(25, 16), 0.25);
        assert_eq!(answer(30, 32), 0.25);
    }
}
