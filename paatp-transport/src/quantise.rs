//! Block floating point: floats as integers of one scale, so that sums do not depend on the order of additions.
//!
//! `docs/numerics.md` has the definition and the derivation of the error bound. Here is what a chunk's scale means; the
//! loops are in [`kernels`], and run with the widest vectors of the processor.

mod element;
pub mod kernels;
mod vectors;

pub use element::Float;
pub use vectors::Vectors;

use element::power_of_two;

/// One lane as it travels: network order.
pub type Lane = [u8; 4];

/// Lowest exponent of a chunk's scale. For 64 ranks the quantum is then 2^-149, f32's smallest subnormal, and it is finer
/// for fewer: nothing is lost below it.
pub const E_MIN: i8 = -125;

/// Sign bit of an f32 or i32.
const SIGN: u32 = 1 << 31;

/// A value that cannot be contributed, by its place in the slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfit {
    /// Index in the slice.
    pub index: usize,
}

/// The exponent that a block of these values needs, at least [`E_MIN`].
///
/// # Errors
/// The first value that is NaN or infinite.
pub fn exponent<T: Float>(values: &[T]) -> Result<i8, Unfit> {
    let largest = kernels::largest(Vectors::widest(), values);
    finite(values, largest)?;
    let biased = (T::of_magnitude(largest).widen().to_bits() >> 23) as i32;
    Ok((biased - 127).max(i32::from(E_MIN)) as i8)
}

/// Tests values by the largest magnitude among them.
fn finite<T: Float>(values: &[T], largest: T::Magnitude) -> Result<(), Unfit> {
    if largest < T::INFINITY {
        return Ok(());
    }
    let index = values.iter().position(|value| value.magnitude() >= T::INFINITY).unwrap_or(0);
    Err(Unfit { index })
}

/// The exponent that a block of these sums of values needs, at most one below the largest, which has another meaning.
#[must_use]
pub fn wide_exponent(values: impl Iterator<Item = f64>) -> i8 {
    let largest = values.fold(0.0, |largest: f64, value| largest.max(value.abs()));
    let exponent = (largest.to_bits() >> 52) as i32 - 1023;
    exponent.clamp(i32::from(E_MIN), i32::from(i8::MAX) - 1) as i8
}

/// The nearest integer, ties to even; the magnitude is below 2^31.
fn round(value: f64) -> i32 {
    // As in `kernels`.
    const ROUNDER: f64 = 6_755_399_441_055_744.0;
    (value + ROUNDER).to_bits() as i32
}

/// The tag of a payload of whole blocks, without salts.
#[must_use]
pub fn payload_tag(payload: &[u8]) -> u64 {
    kernels::payload_tag(Vectors::widest(), payload)
}

/// Half a quantum a rank: the most that the sum of one element over `world` ranks differs from the exact sum, before it is
/// rounded to the tensor's type.
#[must_use]
pub fn error_bound(world: u16, exponent: i8) -> f64 {
    f64::from(world) * Quantiser::new(world).quantum(exponent) / 2.0
}

/// Turns values into lanes and back, for one number of ranks.
///
/// What writes lanes fills those beyond the values with padding, and returns the [`payload_tag`] of the lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantiser {
    bias: u32,
    bits: u32,
}

impl Quantiser {
    /// For a job of `world` ranks (1 to 4096).
    #[must_use]
    pub const fn new(world: u16) -> Quantiser {
        let world = if world == 0 { 1 } else { world as u32 };
        let bias = SIGN / world;
        Quantiser { bias, bits: bias.ilog2() }
    }

    /// B: what a lane adds to its number, so that it is positive. All numbers have magnitudes below B.
    #[must_use]
    pub const fn bias(self) -> u32 {
        self.bias
    }

    /// What one step of a lane stands for: 2^(exponent + 1 − b).
    #[must_use]
    pub const fn quantum(self, exponent: i8) -> f64 {
        power_of_two(exponent as i32 + 1 - self.bits as i32)
    }

    /// Writes `values` as lanes of this scale; padding is zero. The values must not exceed the exponent that [`exponent`]
    /// tells, which is what the ranks agree on.
    pub fn quantise<T: Float>(self, values: &[T], exponent: i8, lanes: &mut [Lane]) -> u64 {
        let scale = power_of_two(self.bits as i32 - i32::from(exponent) - 1);
        kernels::quantise(Vectors::widest(), values, scale, self.bias, lanes)
    }

    /// As [`Quantiser::quantise`], of values that need not fit: each value's place gets what was cut off. Slower; only
    /// ranks that a quorum left out need it.
    pub fn quantise_clipped(self, values: &mut [f64], exponent: i8, lanes: &mut [Lane]) -> u64 {
        let scale = power_of_two(self.bits as i32 - i32::from(exponent) - 1);
        self.clip(values, scale, self.quantum(exponent), lanes)
    }

    /// As [`Quantiser::shift`], of integers that need not fit.
    pub fn shift_clipped(self, values: &mut [f64], lanes: &mut [Lane]) -> u64 {
        self.clip(values, 1.0, 1.0, lanes)
    }

    fn clip(self, values: &mut [f64], scale: f64, quantum: f64, lanes: &mut [Lane]) -> u64 {
        let most = f64::from(self.bias) - 0.5;
        // Of few digits, so that sums and what is left over need few as well.
        let cut = f64::from(15 << (self.bits - 4));
        for (lane, value) in lanes.iter_mut().zip(values.iter_mut()) {
            let wanted = *value * scale;
            let fits = wanted.abs() < most;
            let number = round(if fits { wanted } else { cut.copysign(wanted) });
            // What is rounded off is dropped, as of every contribution; what does not fit stays.
            *value = if fits { 0.0 } else { *value - f64::from(number) * quantum };
            *lane = (number as u32).wrapping_add(self.bias).to_be_bytes();
        }
        if let Some(rest) = lanes.get_mut(values.len()..) {
            rest.fill(self.bias.to_be_bytes());
        }
        payload_tag(lanes.as_flattened())
    }

    /// What lanes of one rank stand for, exactly.
    pub fn contributed(self, exponent: Option<i8>, lanes: &[Lane]) -> impl Iterator<Item = f64> {
        let quantum = exponent.map_or(1.0, |exponent| self.quantum(exponent));
        lanes
            .iter()
            .map(move |lane| f64::from(u32::from_be_bytes(*lane).wrapping_sub(self.bias) as i32) * quantum)
    }

    /// Writes integers as lanes; padding is zero. Their magnitudes must be below B, see [`Quantiser::unfit_integer`].
    pub fn shift(self, values: &[i32], lanes: &mut [Lane]) -> u64 {
        kernels::shift(Vectors::widest(), values, self.bias, lanes)
    }

    /// Tests that integers fit lanes.
    ///
    /// # Errors
    /// The first that does not.
    pub fn unfit_integer(self, values: &[i32]) -> Result<(), Unfit> {
        if kernels::are_below(Vectors::widest(), values, self.bias) {
            return Ok(());
        }
        let unfit = |value: &i32| value.unsigned_abs() >= self.bias;
        Err(Unfit { index: values.iter().position(unfit).unwrap_or(0) })
    }

    /// What the lanes of a result of `contributors` ranks hold beside its number.
    const fn biases(self, contributors: u32) -> u32 {
        contributors.wrapping_mul(self.bias)
    }

    /// Reads sums.
    ///
    /// # Errors
    /// The first sum that the type cannot hold.
    pub fn sums<T: Float>(self, scale: Scale, lanes: &[Lane], values: &mut [T]) -> Result<(), Unfit> {
        let (biases, quantum) = (self.biases(scale.contributors), self.quantum(scale.exponent));
        let largest = kernels::sums(Vectors::widest(), lanes, biases, quantum, values);
        finite(values, largest)
    }

    /// Reads sums as means.
    ///
    /// # Errors
    /// The first mean that the type cannot hold; only a broken exponent makes one.
    pub fn means<T: Float>(self, scale: Scale, lanes: &[Lane], values: &mut [T]) -> Result<(), Unfit> {
        let (biases, quantum) = (self.biases(scale.contributors), self.quantum(scale.exponent));
        let (vectors, divisor) = (Vectors::widest(), scale.contributors);
        let largest = if divisor.is_power_of_two() {
            kernels::sums(vectors, lanes, biases, quantum / f64::from(divisor), values)
        } else {
            kernels::means(vectors, lanes, biases, quantum, divisor, values)
        };
        finite(values, largest)
    }

    /// Reads sums of integers.
    pub fn integer_sums(self, contributors: u32, lanes: &[Lane], values: &mut [i32]) {
        kernels::integer_sums(Vectors::widest(), lanes, self.biases(contributors), values);
    }

    /// Reads sums of integers as means, rounded to the nearest, ties to even.
    pub fn integer_means(self, contributors: u32, lanes: &[Lane], values: &mut [i32]) {
        let biases = self.biases(contributors);
        kernels::integer_means(Vectors::widest(), lanes, biases, contributors, values);
    }
}

/// How the lanes of a result are to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scale {
    /// Agreed exponent.
    pub exponent: i8,
    /// Number of ranks in the sum (1 to 64).
    pub contributors: u32,
}

/// Largest or smallest.
///
/// What writes lanes returns their [`payload_tag`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extreme {
    /// Largest.
    Max,
    /// Smallest.
    Min,
}

impl Extreme {
    /// What turns keys so that the larger key wins.
    const fn mask(self) -> u32 {
        match self {
            Extreme::Max => 0,
            Extreme::Min => u32::MAX,
        }
    }

    /// Writes order-preserving keys: u32 numbers in the order of the values (−0 below +0). The other lanes get 0.
    pub fn keys<T: Float>(self, values: &[T], lanes: &mut [Lane]) -> u64 {
        kernels::keys(Vectors::widest(), values, self.mask(), lanes)
    }

    /// Reads keys.
    ///
    /// # Errors
    /// The first key that stands for no finite number.
    pub fn values<T: Float>(self, lanes: &[Lane], values: &mut [T]) -> Result<(), Unfit> {
        let largest = kernels::values(Vectors::widest(), lanes, self.mask(), values);
        finite(values, largest)
    }

    /// As [`Extreme::keys`], of integers.
    pub fn integer_keys(self, values: &[i32], lanes: &mut [Lane]) -> u64 {
        kernels::integer_keys(Vectors::widest(), values, self.mask(), lanes)
    }

    /// As [`Extreme::values`], of integers.
    pub fn integer_values(self, lanes: &[Lane], values: &mut [i32]) {
        kernels::integer_values(Vectors::widest(), lanes, self.mask(), values);
    }
}

#[cfg(test)]
#[path = "quantise_tests.rs"]
mod tests;

#[cfg(test)]
mod comparison;
#[cfg(test)]
#[allow(dead_code, reason = "it is whole for the benchmark")]
mod reference;
