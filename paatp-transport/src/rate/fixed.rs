//! A window that nothing changes.

use super::{Controller, Feedback, Windows};
use crate::time::Time;

/// Always the same window past what is delivered.
#[derive(Clone, Copy, Debug)]
pub struct Fixed {
    chunks: u32,
}

impl Fixed {
    /// A window of so many chunks; the worker takes at least 1 and at most W.
    #[must_use]
    pub const fn new(chunks: u32) -> Fixed {
        Fixed { chunks }
    }
}

impl Controller for Fixed {
    fn name(&self) -> &'static str {
        "fixed"
    }

    fn windows(&self) -> Windows {
        Windows::synchronous(self.chunks)
    }

    fn on_answer(&mut self, _: &Feedback) {}

    fn on_losses(&mut self, _: Time, _: u32) {}
}
