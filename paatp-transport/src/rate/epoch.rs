//! One window's worth of answers.

use super::Feedback;

/// Counts answers until everything that was under way at its beginning is back: about one round trip.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Epoch {
    end: u64,
    counts: Counts,
}

/// What the answers of one epoch said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// Answers.
    pub answers: u32,
    /// Of these, with congestion marks.
    pub marks: u32,
    /// Of these, BUSY.
    pub busy: u32,
    /// Requests thought lost.
    pub lost: u32,
    /// The window, not the work, was what held contributions back.
    pub filled: bool,
}

impl Epoch {
    /// Counts an answer; `filled` says whether the window was full.
    pub fn count(&mut self, feedback: &Feedback, filled: bool) {
        let counts = &mut self.counts;
        counts.answers = counts.answers.saturating_add(1);
        counts.marks = counts.marks.saturating_add(u32::from(feedback.ecn_echo));
        counts.busy = counts.busy.saturating_add(u32::from(feedback.busy));
        counts.filled |= filled;
    }

    /// Counts losses.
    pub fn lose(&mut self, requests: u32) {
        self.counts.lost = self.counts.lost.saturating_add(requests);
    }

    /// The counts, if the position that clocks the controller has reached the epoch's end. The next one lasts until what
    /// is under way now is back.
    pub fn turn(&mut self, reached: u64, next: u64) -> Option<Counts> {
        if reached < self.end {
            return None;
        }
        self.end = next.max(reached.saturating_add(1));
        Some(core::mem::take(&mut self.counts))
    }
}

/// `share` moves an average towards a sample.
pub(super) fn average(old: f64, sample: f64, share: f64) -> f64 {
    old + share * (sample - old)
}

/// The ratio of two counts, at most 1.
pub(super) fn ratio(part: u32, whole: u32) -> f64 {
    (f64::from(part) / f64::from(whole.max(1))).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::super::laws::feedback;
    use super::*;

    #[test]
    fn an_epoch_lasts_until_what_was_under_way_is_back() {
        let mut epoch = Epoch::default();
        epoch.count(&Feedback { ecn_echo: true, ..feedback() }, false);
        epoch.lose(2);
        let first = Counts { answers: 1, marks: 1, lost: 2, ..Counts::default() };
        assert_eq!(epoch.turn(0, 8), Some(first));
        assert_eq!(epoch.turn(7, 12), None);
        epoch.count(&Feedback { busy: true, ..feedback() }, true);
        let second = Counts { answers: 1, busy: 1, filled: true, ..Counts::default() };
        assert_eq!(epoch.turn(8, 12), Some(second));
        assert_eq!(epoch.turn(11, 12), None);
        assert_eq!(epoch.turn(12, 12), Some(Counts::default()));
        assert_eq!(epoch.turn(12, 12), None);
    }
}
