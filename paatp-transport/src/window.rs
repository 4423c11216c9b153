//! The send window: how many chunks a worker may be ahead of its first undelivered one.
//!
//! Rate controllers stand behind [`Window`]; the worker bounds what they say by the job's window W.

use core::fmt::Debug;
use core::time::Duration;

use crate::time::Time;

/// What one answer tells a controller. Positions count chunks from the job's beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feedback {
    /// Now.
    pub now: Time,
    /// Round-trip time of this answer's request; `None` if it is no longer known.
    pub rtt: Option<Duration>,
    /// The request met congestion.
    pub ecn_echo: bool,
    /// The ring had no room for the contribution.
    pub busy: bool,
    /// Lowest progress of all ranks.
    pub p_min: u64,
    /// Highest progress of all ranks.
    pub p_max: u64,
    /// This rank's progress.
    pub progress: u64,
    /// Asynchronous window granted, in chunks.
    pub granted: u16,
    /// Rate-control gain.
    pub gain: i8,
}

/// A window controller.
pub trait Window: Debug + Send {
    /// Chunks that may be under way; the worker takes at least one and at most W.
    fn chunks(&self) -> u32;

    /// An answer came.
    fn on_answer(&mut self, feedback: &Feedback);

    /// Requests are thought lost.
    fn on_losses(&mut self, now: Time, requests: u32);
}

/// Always the same window: self-clocked, as SwitchML's pool of slots.
#[derive(Clone, Copy, Debug)]
pub struct Fixed(pub u32);

impl Window for Fixed {
    fn chunks(&self) -> u32 {
        self.0
    }

    fn on_answer(&mut self, _: &Feedback) {}

    fn on_losses(&mut self, _: Time, _: u32) {}
}
