//! What the result should be: float64 reductions, and the bound on the distance from them (`docs/numerics.md`).

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use paatp_transport::error_bound;
use paatp_transport::quantise::E_MIN;
use serde::Serialize;

use crate::gradients::{Dtype, Gradient};

/// What is computed over the ranks' values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Reduction {
    /// Their sum.
    Sum,
    /// Their sum, divided by their number.
    Mean,
    /// The largest.
    Max,
    /// The smallest.
    Min,
}

impl Reduction {
    /// As on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "sum",
            Reduction::Mean => "mean",
            Reduction::Max => "max",
            Reduction::Min => "min",
        }
    }
}

/// The reduction in float64, in rank order: each tensor's name and values.
///
/// # Errors
/// Where the ranks' tensors differ in names or lengths.
pub fn reduce(ranks: &[Gradient], reduction: Reduction) -> Result<Vec<(String, Vec<f64>)>> {
    let first = ranks.first().context("no ranks")?;
    let mut all = Vec::new();
    for tensor in &first.tensors {
        let mut result = tensor.values();
        for (rank, gradient) in ranks.iter().enumerate().skip(1) {
            let other = gradient
                .tensor(&tensor.name)
                .with_context(|| format!("rank {rank} has no tensor {}", tensor.name))?
                .values();
            ensure!(
                other.len() == result.len(),
                "{} has {} values on rank 0 and {} on rank {rank}",
                tensor.name,
                result.len(),
                other.len()
            );
            for (value, other) in result.iter_mut().zip(other) {
                match reduction {
                    Reduction::Sum | Reduction::Mean => *value += other,
                    Reduction::Max => *value = value.max(other),
                    Reduction::Min => *value = value.min(other),
                }
            }
        }
        if reduction == Reduction::Mean {
            result.iter_mut().for_each(|value| *value /= ranks.len() as f64);
        }
        all.push((tensor.name.clone(), result));
    }
    Ok(all)
}

/// 2^`exponent`, zero or infinite where out of range.
fn power(exponent: i32) -> f64 {
    2f64.powi(exponent)
}

/// Exponent of the largest power of two not above a positive normal value.
fn floor_log2(value: f64) -> i32 {
    ((value.to_bits() >> 52) & 0x7FF) as i32 - 1023
}

/// How far a result is from the reference.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Comparison {
    /// Number of values compared.
    pub values: usize,
    /// Largest distance.
    pub largest_error: f64,
    /// Bound on the distance of that value.
    pub bound: f64,
    /// Largest distance in parts of its bound: at most 1 if all is right.
    pub worst_ratio: f64,
    /// What is wrong, at most a few sentences; empty if all is right.
    pub complaints: Vec<String>,
}

impl Comparison {
    /// Everything is within its bound.
    #[must_use]
    pub fn is_right(&self) -> bool {
        self.complaints.is_empty()
    }

    fn complain(&mut self, sentence: String) {
        const AT_MOST: usize = 5;
        if self.complaints.len() < AT_MOST {
            self.complaints.push(sentence);
        }
    }
}

/// How an operation is cut into chunks, which decides the scale of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunking {
    /// Most lanes in a chunk; chunks never span two tensors.
    pub lanes: usize,
    /// The first so many chunks of an operation share one scale.
    pub window: usize,
}

impl Chunking {
    /// Exponents of the scales of each tensor's chunks.
    fn exponents(self, tensors: &[Inputs]) -> Vec<Vec<i32>> {
        let mut exponents: Vec<Vec<i32>> =
            tensors.iter().map(|tensor| tensor.exponents(self.lanes)).collect();
        let first = |exponents: &mut Vec<Vec<i32>>, change: &mut dyn FnMut(&mut i32)| {
            exponents.iter_mut().flatten().take(self.window).for_each(change);
        };
        let mut largest = i32::from(E_MIN);
        first(&mut exponents, &mut |exponent| largest = largest.max(*exponent));
        first(&mut exponents, &mut |exponent| *exponent = largest);
        exponents
    }
}

/// One tensor's values at all ranks.
struct Inputs {
    dtype: Dtype,
    shape: Vec<usize>,
    ranks: Vec<Vec<f64>>,
}

impl Inputs {
    fn of(ranks: &[Gradient], name: &str) -> Option<Inputs> {
        let tensors: Vec<_> = ranks.iter().map(|rank| rank.tensor(name)).collect::<Option<_>>()?;
        let first = tensors.first()?;
        let ranks = tensors.iter().map(|tensor| tensor.values()).collect();
        Some(Inputs { dtype: first.dtype, shape: first.shape.clone(), ranks })
    }

    /// For each chunk, the exponent that its own values need.
    fn exponents(&self, lanes: usize) -> Vec<i32> {
        let length = self.ranks.first().map_or(0, Vec::len);
        let of_chunk = |chunk: usize| {
            let range = chunk * lanes..((chunk + 1) * lanes).min(length);
            let values = self.ranks.iter().flat_map(|values| &values[range.clone()]);
            let largest = values.fold(0f64, |largest, value| largest.max(value.abs()));
            match self.dtype.precision() {
                Some(_) if largest > 0.0 => floor_log2(largest).max(E_MIN.into()),
                _ => E_MIN.into(),
            }
        };
        (0..length.div_ceil(lanes)).map(of_chunk).collect()
    }
}

/// Compares a result with the float64 reduction of the ranks' inputs.
///
/// # Errors
/// Where the inputs do not belong together.
pub fn compare(
    ranks: &[Gradient],
    result: &Gradient,
    reduction: Reduction,
    chunking: Chunking,
) -> Result<Comparison> {
    let mut comparison = Comparison::default();
    let reference: BTreeMap<_, _> = reduce(ranks, reduction)?.into_iter().collect();
    if reference.len() != result.tensors.len() {
        comparison.complain(format!(
            "{} tensors went in, {} came out",
            reference.len(),
            result.tensors.len()
        ));
    }
    // In the order of the file, which is that of the chunks.
    let mut inputs = Vec::new();
    for tensor in &result.tensors {
        let Some(input) = Inputs::of(ranks, &tensor.name) else {
            comparison.complain(format!("nobody contributed to tensor {}", tensor.name));
            return Ok(comparison);
        };
        if tensor.shape != input.shape || tensor.dtype != input.dtype {
            comparison.complain(format!(
                "{} went in as {:?} {:?} and came out as {:?} {:?}",
                tensor.name, input.dtype, input.shape, tensor.dtype, tensor.shape
            ));
            return Ok(comparison);
        }
        inputs.push(input);
    }
    let exponents = chunking.exponents(&inputs);
    for ((tensor, input), exponents) in result.tensors.iter().zip(&inputs).zip(&exponents) {
        let expected = reference[&tensor.name].iter();
        for (index, (expected, actual)) in expected.zip(tensor.values()).enumerate() {
            let bound =
                bound_of(ranks.len(), exponents[index / chunking.lanes], *expected, input.dtype, reduction);
            let error = (actual - expected).abs();
            comparison.values += 1;
            if error.is_nan() || error > bound {
                comparison.complain(format!(
                    "{}[{index}] is {actual:e}, not {expected:e}: off by more than {bound:e}",
                    tensor.name
                ));
            }
            if error > comparison.largest_error {
                (comparison.largest_error, comparison.bound) = (error, bound);
            }
            if error > 0.0 {
                comparison.worst_ratio = comparison.worst_ratio.max(error / bound);
            }
        }
    }
    Ok(comparison)
}

/// Bound for one value of a chunk.
fn bound_of(world: usize, exponent: i32, expected: f64, dtype: Dtype, reduction: Reduction) -> f64 {
    let Some((significand, smallest)) = dtype.precision() else {
        // Integers are exact; their means are rounded.
        return if reduction == Reduction::Mean { 0.5 } else { 0.0 };
    };
    if matches!(reduction, Reduction::Max | Reduction::Min) {
        return 0.0;
    }
    let divisor = if reduction == Reduction::Mean { world as f64 } else { 1.0 };
    let lanes = error_bound(world as u16, exponent as i8) / divisor;
    // The result is rounded to its type: half a unit in the last place of the largest value that it can be.
    let magnitude = expected.abs() + lanes;
    let last_place = (floor_log2(magnitude) + 1 - significand).max(smallest);
    // The reference itself is rounded: world − 1 additions of at most world values below 2^(exponent + 1).
    let reference = (world * world) as f64 * power(exponent + 1) * f64::EPSILON;
    lanes + power(last_place) / 2.0 + reference
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a panic is the failure report here")]

    use super::*;
    use crate::gradients::{Tensor, synthetic};

    /// The definition that `docs/numerics.md` states, written out again.
    #[test]
    fn the_bound_is_the_documented_one() {
        // 2^31 / 4 = 2^29; values below 2 are rounded to multiples of 2^(1 - 29) and off by at most 2^-29 each.
        assert_eq!(error_bound(4, 0), 4.0 * power(-29));
        // ⌊2^31 / 3⌋ is below 2^30.
        assert_eq!(error_bound(3, 5), 3.0 * power(5 - 29));
        for world in 1..=64u8 {
            let bits = ((1u64 << 31) / u64::from(world)).ilog2() as i32;
            assert_eq!(error_bound(world.into(), -3), f64::from(world) * power(-3 - bits), "{world} ranks");
        }
        assert_eq!((floor_log2(1.0), floor_log2(1.99), floor_log2(0.5)), (0, 0, -1));
    }

    const CHUNKING: Chunking = Chunking { lanes: 352, window: 64 };

    #[test]
    fn the_first_window_shares_a_scale() {
        let tensors = [8.0, 1.0, 0.25].map(|value| Inputs {
            dtype: Dtype::F32,
            shape: vec![40],
            ranks: vec![vec![value; 40], vec![0.0; 40]],
        });
        let exponents = |window| Chunking { lanes: 32, window }.exponents(&tensors);
        assert_eq!(exponents(1), [[3, 3], [0, 0], [-2, -2]]);
        assert_eq!(exponents(3), [[3, 3], [3, 0], [-2, -2]]);
        assert_eq!(exponents(64), [[3, 3], [3, 3], [3, 3]]);
    }

    #[test]
    fn a_wrong_value_is_told() {
        let ranks = synthetic(3, 1, &[(Dtype::F32, 10)], 1.0);
        let exact: Vec<f64> = reduce(&ranks, Reduction::Sum).unwrap()[0].1.clone();
        let right = Gradient { tensors: vec![Tensor::new("t0", Dtype::F32, &exact)] };
        let comparison = compare(&ranks, &right, Reduction::Sum, CHUNKING).unwrap();
        assert!(comparison.is_right() && comparison.worst_ratio <= 1.0, "{comparison:?}");
        for wrong in [exact[7] + 1e-6, f64::NAN] {
            let mut values = exact.clone();
            values[7] = wrong;
            let wrong = Gradient { tensors: vec![Tensor::new("t0", Dtype::F32, &values)] };
            let comparison = compare(&ranks, &wrong, Reduction::Sum, CHUNKING).unwrap();
            assert_eq!(comparison.complaints.len(), 1);
            assert!(comparison.complaints[0].starts_with("t0[7]"));
        }
    }
}
