//! Rate control: how far a worker may run ahead, and how fast.
//!
//! Two numbers bound a worker from two sides. *gack*, its own contributions that the aggregator has acknowledged, tells what
//! the path takes: at most `congestion` chunks may lie past it. (What a switch acknowledged has the path from there before it.)
//! *aack*, the results that are delivered, tells what all ranks have
//! reached: at most `asynchronous` chunks may lie past it. Chunk k is contributed iff
//!
//! ```text
//! k < min(gack + congestion, aack + min(asynchronous, W, granted))
//! ```
//!
//! and at least one chunk past `aack` always. A controller is a pure function of what it was told, in this order: the
//! same answers give the same windows, on every machine. `docs/transport.md` has the formulas and where they are from.

mod a2tp;
mod atp;
mod epoch;
mod fixed;
#[cfg(test)]
mod laws;
mod paatp;
pub mod policy;
pub mod share;
mod switchml;

use alloc::boxed::Box;
use core::fmt::{self, Debug, Display, Formatter};
use core::str::FromStr;
use core::time::Duration;

pub use a2tp::A2tp;
pub use atp::Atp;
pub use fixed::Fixed;
pub use paatp::{PaAtp, Tuning};
pub use switchml::SwitchMl;

use crate::membership::Membership;
use crate::time::Time;

/// What one answer tells a controller, after everything else in it was heeded. Positions count chunks from the job's
/// beginning; they never go back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feedback {
    /// Now.
    pub now: Time,
    /// Round-trip time of this answer's request; `None` if it is no longer known, or a switch on the way answered.
    pub rtt: Option<Duration>,
    /// The request or this answer met congestion.
    pub ecn_echo: bool,
    /// The ring had no room for the contribution.
    pub busy: bool,
    /// Lowest progress of all ranks.
    pub p_min: u64,
    /// Highest progress of all ranks.
    pub p_max: u64,
    /// This rank's progress: its contributions below are acknowledged. What [`Feedback::p_min`] and `p_max` are compared with.
    pub progress: u64,
    /// The same as the aggregator alone acknowledged it, or brought the results (gack).
    pub through: u64,
    /// Results below are delivered (aack).
    pub delivered: u64,
    /// First chunk that was never contributed.
    pub next: u64,
    /// Asynchronous window granted by the aggregator, in chunks; 0: it said nothing.
    pub granted: u16,
    /// Rate-control gain, in 1/128: the increase is multiplied by `1 + gain / 128`.
    pub gain: i8,
    /// By how much this answer moved `through`.
    pub chunks_through: u32,
}

/// How far a worker may run ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Chunks past the own ones that are through (gack).
    pub congestion: u32,
    /// Chunks past the delivered ones (aack). The worker bounds it by W, and by what the aggregator grants where the
    /// controller heeds that.
    pub asynchronous: u32,
}

impl Windows {
    /// As every synchronous protocol: clocked by results alone.
    #[must_use]
    pub const fn synchronous(chunks: u32) -> Windows {
        Windows { congestion: u32::MAX, asynchronous: chunks }
    }
}

/// A rate controller.
pub trait Controller: Debug + Send {
    /// Its name, as [`Algorithm`] spells it.
    fn name(&self) -> &'static str;

    /// How far the worker may run ahead now. The worker takes each as at least one.
    fn windows(&self) -> Windows;

    /// Least time between two new contributions; `None`: as the windows allow.
    fn pace(&self) -> Option<Duration> {
        None
    }

    /// What the aggregator's loader grants bounds the asynchronous window. The baselines know no such thing.
    fn heeds_grants(&self) -> bool {
        false
    }

    /// An answer came.
    fn on_answer(&mut self, feedback: &Feedback);

    /// Requests are thought lost.
    fn on_losses(&mut self, now: Time, requests: u32);
}

/// The controllers there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Algorithm {
    /// Progress-aware and asynchronous: stragglers take more, leaders less.
    #[default]
    PaAtp,
    /// ATP: halves once a window that met congestion.
    Atp,
    /// A2TP: one window for the path, one for the slots.
    A2tp,
    /// SwitchML: a pool of slots, self-clocked.
    SwitchMl,
    /// Always W.
    Fixed,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Algorithm; 5] =
        [Algorithm::PaAtp, Algorithm::Atp, Algorithm::A2tp, Algorithm::SwitchMl, Algorithm::Fixed];

    /// The name that [`FromStr`] reads.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::PaAtp => "pa-atp",
            Algorithm::Atp => "atp",
            Algorithm::A2tp => "a2tp",
            Algorithm::SwitchMl => "switchml",
            Algorithm::Fixed => "fixed",
        }
    }

    /// A controller for a rank of this job.
    #[must_use]
    pub fn controller(self, membership: &Membership) -> Box<dyn Controller> {
        let window = u32::from(membership.window);
        match self {
            Algorithm::PaAtp => Box::new(PaAtp::new(membership)),
            Algorithm::Atp => Box::new(Atp::new(membership)),
            Algorithm::A2tp => Box::new(A2tp::new(membership)),
            Algorithm::SwitchMl => Box::new(SwitchMl::new(membership)),
            Algorithm::Fixed => Box::new(Fixed::new(window)),
        }
    }
}

impl Display for Algorithm {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// No controller has this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no such rate controller: choose pa-atp, atp, a2tp, switchml or fixed")]
pub struct UnknownAlgorithm;

impl FromStr for Algorithm {
    type Err = UnknownAlgorithm;

    fn from_str(name: &str) -> Result<Algorithm, UnknownAlgorithm> {
        Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == name).ok_or(UnknownAlgorithm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn names_are_read_back() {
        for algorithm in Algorithm::ALL {
            assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
        }
        assert_eq!("tcp".parse::<Algorithm>(), Err(UnknownAlgorithm));
        let told = UnknownAlgorithm.to_string();
        assert!(Algorithm::ALL.iter().all(|algorithm| told.contains(algorithm.name())));
    }
}
