//! The quantiser as plain loops, value by value: what the tests compare the vectorised one with, and the benchmark.

use half::{bf16, f16};

/// One lane as it travels: network order.
pub type Lane = [u8; 4];

/// Lowest exponent of a chunk's scale. For 64 ranks the quantum is then 2^-149, f32's smallest subnormal, and it is finer
/// for fewer: nothing is lost below it.
pub const E_MIN: i8 = -125;

/// Sign bit of an f32 or i32.
const SIGN: u32 = 1 << 31;

/// Adding 1.5·2^52 to an f64 of magnitude below 2^51 rounds it to an integer, ties to even, and leaves that integer in
/// two's complement in the low mantissa bits.
const ROUNDER: f64 = 6_755_399_441_055_744.0;

/// From this quantum on no sum, nor its 64th part, is below 2^-126 except zero.
const NORMAL_QUANTUM: f64 = power_of_two(-120);

/// A value that cannot be contributed, by its place in the slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfit {
    /// Index in the slice.
    pub index: usize,
}

/// A float type that tensors may hold.
pub trait Float: Copy {
    /// Magnitude of infinity.
    const INFINITY: u32;
    /// The bits without the sign: ordered as the absolute values are, with NaN above infinity.
    fn magnitude(self) -> u32;
    /// The positive number of this magnitude.
    fn of_magnitude(magnitude: u32) -> Self;
    /// Exactly.
    fn widen(self) -> f32;
    /// Rounded once to the nearest, ties to even.
    fn narrow(value: f64) -> Self;
    /// The same for zero and magnitudes of at least 2^-126, without branches if there is a way.
    #[inline(always)]
    fn narrow_normal(value: f64) -> Self {
        Self::narrow(value)
    }
}

impl Float for f32 {
    const INFINITY: u32 = 0x7F80_0000;

    #[inline(always)]
    fn magnitude(self) -> u32 {
        self.to_bits() & !SIGN
    }

    #[inline(always)]
    fn of_magnitude(magnitude: u32) -> f32 {
        f32::from_bits(magnitude)
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(value: f64) -> f32 {
        value as f32
    }
}

impl Float for f16 {
    const INFINITY: u32 = 0x7C00;

    #[inline(always)]
    fn magnitude(self) -> u32 {
        u32::from(self.to_bits() & 0x7FFF)
    }

    #[inline(always)]
    fn of_magnitude(magnitude: u32) -> f16 {
        f16::from_bits(magnitude as u16)
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }

    #[inline(always)]
    fn narrow(value: f64) -> f16 {
        f16::from_f64(sticky(value))
    }
}

impl Float for bf16 {
    const INFINITY: u32 = 0x7F80;

    #[inline(always)]
    fn magnitude(self) -> u32 {
        u32::from(self.to_bits() & 0x7FFF)
    }

    #[inline(always)]
    fn of_magnitude(magnitude: u32) -> bf16 {
        bf16::from_bits(magnitude as u16)
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(value: f64) -> bf16 {
        bf16::from_f64(sticky(value))
    }

    /// As f32 with a sticky last bit (exact, for a normal f32 has 23 bits of mantissa), then to 16 bits by hand.
    #[inline(always)]
    fn narrow_normal(value: f64) -> bf16 {
        const KEPT: u64 = !((1 << 30) - 1);
        let bits = value.to_bits();
        let folded = (bits & KEPT) | (u64::from(bits & !KEPT != 0) << 29);
        let bits = (f64::from_bits(folded) as f32).to_bits();
        bf16::from_bits(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16)
    }
}

/// Folds the low half of the mantissa into one bit: `half` 2.7 drops that half before it rounds, which would take numbers
/// just beside a tie for ties.
#[inline(always)]
fn sticky(value: f64) -> f64 {
    let bits = value.to_bits();
    let low = bits & u64::from(u32::MAX);
    f64::from_bits((bits - low) | (u64::from(low != 0) << 32))
}

/// 2^`exponent`, for exponents of normal numbers.
#[inline(always)]
const fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((1023 + exponent) as u64) << 52)
}

/// The exponent that a block of these values needs, at least [`E_MIN`].
///
/// # Errors
/// The first value that is NaN or infinite.
pub fn exponent<T: Float>(values: &[T]) -> Result<i8, Unfit> {
    // Signed, because SSE2 has no unsigned maximum.
    let largest = values.iter().map(|v| v.magnitude() as i32).fold(0, i32::max) as u32;
    if largest >= T::INFINITY {
        let index = values.iter().position(|v| v.magnitude() >= T::INFINITY).unwrap_or(0);
        return Err(Unfit { index });
    }
    let biased = (T::of_magnitude(largest).widen().to_bits() >> 23) as i32;
    Ok((biased - 127).max(i32::from(E_MIN)) as i8)
}

/// Half a quantum a rank: the most that the sum of one element over `world` ranks differs from the exact sum, before it is
/// rounded to the tensor's type.
#[must_use]
pub fn error_bound(world: u16, exponent: i8) -> f64 {
    f64::from(world) * Quantiser::new(world).quantum(exponent) / 2.0
}

/// Turns values into lanes and back, for one number of ranks.
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

    /// Writes `values` as lanes of this scale and fills the other lanes with zeros. The values must not exceed the
    /// exponent that [`exponent`] tells, which is what the ranks agree on.
    pub fn quantise<T: Float>(self, values: &[T], exponent: i8, lanes: &mut [Lane]) {
        let scale = power_of_two(self.bits as i32 - i32::from(exponent) - 1);
        for (lane, value) in lanes.iter_mut().zip(values) {
            let rounded = f64::from(value.widen()) * scale + ROUNDER;
            *lane = (rounded.to_bits() as u32).wrapping_add(self.bias).to_be_bytes();
        }
        self.pad(values.len(), lanes);
    }

    /// Writes integers as lanes. Their magnitudes must be below B, see [`Quantiser::unfit_integer`].
    pub fn shift(self, values: &[i32], lanes: &mut [Lane]) {
        for (lane, value) in lanes.iter_mut().zip(values) {
            *lane = (*value as u32).wrapping_add(self.bias).to_be_bytes();
        }
        self.pad(values.len(), lanes);
    }

    fn pad(self, used: usize, lanes: &mut [Lane]) {
        if let Some(rest) = lanes.get_mut(used..) {
            rest.fill(self.bias.to_be_bytes());
        }
    }

    /// Tests that integers fit lanes.
    ///
    /// # Errors
    /// The first that does not.
    pub fn unfit_integer(self, values: &[i32]) -> Result<(), Unfit> {
        let unfit = |value: &i32| value.unsigned_abs() >= self.bias;
        // Without an early exit, to vectorise.
        if values.iter().fold(false, |any, value| any | unfit(value)) {
            return Err(Unfit { index: values.iter().position(unfit).unwrap_or(0) });
        }
        Ok(())
    }

    /// The number that a lane of a result of `contributors` ranks holds.
    #[inline(always)]
    fn number(self, lane: Lane, contributors: u32) -> i32 {
        u32::from_be_bytes(lane).wrapping_sub(contributors.wrapping_mul(self.bias)) as i32
    }

    /// Reads sums.
    ///
    /// # Errors
    /// The first sum that the type cannot hold.
    pub fn sums<T: Float>(self, scale: Scale, lanes: &[Lane], values: &mut [T]) -> Result<(), Unfit> {
        self.read(scale, lanes, values, |sum| sum)
    }

    /// Reads sums as means.
    ///
    /// # Errors
    /// The first mean that the type cannot hold; only a broken exponent makes one.
    pub fn means<T: Float>(self, scale: Scale, lanes: &[Lane], values: &mut [T]) -> Result<(), Unfit> {
        let divisor = f64::from(scale.contributors);
        self.read(scale, lanes, values, |sum| sum / divisor)
    }

    #[inline(always)]
    fn read<T: Float>(
        self,
        scale: Scale,
        lanes: &[Lane],
        values: &mut [T],
        finish: impl Fn(f64) -> f64,
    ) -> Result<(), Unfit> {
        let quantum = self.quantum(scale.exponent);
        let sum = |lane: &Lane| finish(f64::from(self.number(*lane, scale.contributors)) * quantum);
        if quantum >= NORMAL_QUANTUM {
            values.iter_mut().zip(lanes).for_each(|(value, lane)| *value = T::narrow_normal(sum(lane)));
        } else {
            values.iter_mut().zip(lanes).for_each(|(value, lane)| *value = T::narrow(sum(lane)));
        }
        finite(values)
    }

    /// Reads sums of integers.
    pub fn integer_sums(self, contributors: u32, lanes: &[Lane], values: &mut [i32]) {
        for (value, lane) in values.iter_mut().zip(lanes) {
            *value = self.number(*lane, contributors);
        }
    }

    /// Reads sums of integers as means, rounded to the nearest, ties to even.
    pub fn integer_means(self, contributors: u32, lanes: &[Lane], values: &mut [i32]) {
        let divisor = f64::from(contributors);
        for (value, lane) in values.iter_mut().zip(lanes) {
            // The quotient's rounding error (2^-22) cannot make a tie: others are 1/128 away from one.
            let rounded = f64::from(self.number(*lane, contributors)) / divisor + ROUNDER;
            *value = rounded.to_bits() as i32;
        }
    }
}

/// How the lanes of a result are to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scale {
    /// Agreed exponent.
    pub exponent: i8,
    /// Number of ranks in the sum.
    pub contributors: u32,
}

fn finite<T: Float>(values: &[T]) -> Result<(), Unfit> {
    exponent(values).map(|_| ())
}

/// Largest or smallest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extreme {
    /// Largest.
    Max,
    /// Smallest.
    Min,
}

impl Extreme {
    /// What turns keys so that the larger key wins.
    #[inline(always)]
    const fn mask(self) -> u32 {
        match self {
            Extreme::Max => 0,
            Extreme::Min => u32::MAX,
        }
    }

    /// Writes order-preserving keys: u32 numbers in the order of the values (−0 below +0). The other lanes get 0.
    pub fn keys<T: Float>(self, values: &[T], lanes: &mut [Lane]) {
        for (lane, value) in lanes.iter_mut().zip(values) {
            let bits = value.widen().to_bits();
            let turn = (bits as i32 >> 31) as u32 | SIGN;
            *lane = (bits ^ turn ^ self.mask()).to_be_bytes();
        }
        clear(values.len(), lanes);
    }

    /// Reads keys.
    ///
    /// # Errors
    /// The first key that stands for no finite number.
    pub fn values<T: Float>(self, lanes: &[Lane], values: &mut [T]) -> Result<(), Unfit> {
        for (value, lane) in values.iter_mut().zip(lanes) {
            let key = u32::from_be_bytes(*lane) ^ self.mask();
            let turn = !((key as i32 >> 31) as u32) | SIGN;
            *value = T::narrow(f64::from(f32::from_bits(key ^ turn)));
        }
        finite(values)
    }

    /// As [`Extreme::keys`], of integers.
    pub fn integer_keys(self, values: &[i32], lanes: &mut [Lane]) {
        for (lane, value) in lanes.iter_mut().zip(values) {
            *lane = (*value as u32 ^ SIGN ^ self.mask()).to_be_bytes();
        }
        clear(values.len(), lanes);
    }

    /// As [`Extreme::values`], of integers.
    pub fn integer_values(self, lanes: &[Lane], values: &mut [i32]) {
        for (value, lane) in values.iter_mut().zip(lanes) {
            *value = (u32::from_be_bytes(*lane) ^ SIGN ^ self.mask()) as i32;
        }
    }
}

fn clear(used: usize, lanes: &mut [Lane]) {
    if let Some(rest) = lanes.get_mut(used..) {
        rest.fill([0; 4]);
    }
}

/// The tag of a payload of whole blocks, without salts.
pub fn payload_tag(payload: &[u8]) -> u64 {
    let mut tag = paatp_common::tag::Tag::default();
    for word in payload.as_chunks::<{ paatp_common::limits::BLOCK_BYTES }>().0.as_flattened().as_chunks().0 {
        tag.push(u64::from_be_bytes(*word));
    }
    tag.value()
}
