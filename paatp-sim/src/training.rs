//! What a rank does besides sending: it computes, hands in gradients, and waits; and what its values are.

use paatp_transport::{Reduction, Tensor, Values};

use crate::random::{Purpose, Random};
use crate::scenario::{JobSpec, Straggler, ValuesKind};
use crate::units::Nanos;

/// Values lie in −HALF … HALF − 1: sums of 64 of them are exact in every type and scale.
const HALF: i32 = 512;

/// How long a rank computes in each iteration, and when it fails.
#[derive(Clone, Debug)]
pub struct Pace {
    host: usize,
    compute: Nanos,
    jitter: f64,
    factor: f64,
    random: Random,
    chances: Random,
}

/// One iteration of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effort {
    /// Time to compute.
    pub compute: Nanos,
    /// From when on after the iteration's beginning, and for how long, the host is dead.
    pub failure: Option<(Nanos, Nanos)>,
}

impl Pace {
    /// The pace of a job's rank on a host.
    #[must_use]
    pub fn new(job: &JobSpec, rank: u8, host: usize, stragglers: &[Straggler], seed: u64) -> Pace {
        let share = if job.world > 1 { f64::from(rank) / f64::from(job.world - 1) } else { 0.0 };
        let factor = stragglers.iter().fold(1.0, |factor, straggler| match straggler {
            Straggler::Heterogeneous { most } => factor * (1.0 + (most - 1.0) * share),
            _ => factor,
        });
        Pace {
            host,
            compute: job.compute,
            jitter: job.jitter,
            factor,
            random: Random::new(seed, Purpose::Compute, host as u64),
            chances: Random::new(seed, Purpose::Straggler, host as u64),
        }
    }

    /// The next iteration. Draws the same numbers whatever the network does, so all controllers meet the same stragglers.
    pub fn next(&mut self, stragglers: &[Straggler]) -> Effort {
        let spread = self.random.uniform(1.0 - self.jitter, 1.0 + self.jitter);
        let mut effort = Effort { compute: self.compute.times(self.factor * spread), failure: None };
        for straggler in stragglers {
            match straggler {
                Straggler::SlowWorker { probability, least, most, mean_iteration, ranks } => {
                    let (slow, multiple) =
                        (self.chances.chance(*probability), self.chances.uniform(*least, *most));
                    if slow && ranks.has(self.host) {
                        effort.compute = effort.compute + mean_iteration.times(multiple);
                    }
                }
                Straggler::Failure { probability, duration, within, ranks } => {
                    let (fails, at) = (self.chances.chance(*probability), self.chances.below(within.0));
                    if fails && ranks.has(self.host) {
                        effort.failure = Some((Nanos(at), *duration));
                    }
                }
                _ => {}
            }
        }
        effort
    }
}

/// When the values of operation `index` of `count` are ready, after the iteration's beginning.
#[must_use]
pub fn ready_after(job: &JobSpec, compute: Nanos, index: u32) -> Nanos {
    let share = f64::from(index + 1) / f64::from(job.operations.max(1));
    let from = if job.operations > 1 { job.first_ready } else { 1.0 };
    let first = 1.0 / f64::from(job.operations.max(1));
    // The first at `from`, the last at the end, evenly between.
    let place = if job.operations > 1 { (share - first) / (1.0 - first) } else { 1.0 };
    compute.times(from + (1.0 - from) * place)
}

/// An operation of a job: iteration and place in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct OperationId {
    /// Iteration, from 0.
    pub iteration: u32,
    /// Place in the iteration, from 0.
    pub index: u32,
}

/// Elements of an operation: the chunks of a gradient, dealt out evenly.
#[must_use]
pub fn elements(job: &JobSpec, index: u32) -> usize {
    let (chunks, operations) = (job.chunks, u64::from(job.operations.max(1)));
    let own = chunks / operations + u64::from(u64::from(index) < chunks % operations);
    own as usize * usize::from(job.lanes)
}

/// A number that differs from element to element and from operation to operation.
fn scramble(operation: OperationId, element: usize) -> u32 {
    let mixed = (element as u32).wrapping_mul(0x9E37_79B9) ^ operation.iteration.wrapping_mul(0x85EB_CA6B);
    (mixed ^ operation.index.wrapping_mul(0xC2B2_AE35)).wrapping_mul(0x27D4_EB2F) >> 7
}

fn value(scrambled: u32, rank: u32) -> i32 {
    (scrambled.wrapping_add(rank.wrapping_mul(0x0001_1D31) >> 3) % (2 * HALF as u32)) as i32 - HALF
}

/// How the job reduces.
#[must_use]
pub const fn reduction(job: &JobSpec) -> Reduction {
    match job.values {
        ValuesKind::FloatSum | ValuesKind::IntegerSum => Reduction::Sum,
        ValuesKind::IntegerMax => Reduction::Max,
    }
}

/// A rank's values for an operation.
#[must_use]
pub fn tensor(job: &JobSpec, operation: OperationId, rank: u8) -> Tensor {
    let all = 0..elements(job, operation.index);
    let values = all.map(|element| value(scramble(operation, element), u32::from(rank)));
    let values = match job.values {
        ValuesKind::FloatSum => Values::F32(values.map(|value| value as f32).collect()),
        ValuesKind::IntegerSum | ValuesKind::IntegerMax => Values::I32(values.collect()),
    };
    Tensor { name: format!("gradient {}", operation.index), values }
}

/// What must come out of an operation, bit for bit.
#[must_use]
pub fn expected(job: &JobSpec, operation: OperationId) -> Values {
    let reduce = |element: usize| {
        let scrambled = scramble(operation, element);
        let of_ranks = (0..u32::from(job.world)).map(|rank| value(scrambled, rank));
        match job.values {
            ValuesKind::FloatSum | ValuesKind::IntegerSum => of_ranks.sum::<i32>(),
            ValuesKind::IntegerMax => of_ranks.max().unwrap_or(0),
        }
    };
    let reduced = (0..elements(job, operation.index)).map(reduce);
    match job.values {
        ValuesKind::FloatSum => Values::F32(reduced.map(|value| value as f32).collect()),
        ValuesKind::IntegerSum | ValuesKind::IntegerMax => Values::I32(reduced.collect()),
    }
}
