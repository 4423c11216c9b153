//! The float types of tensors, converted without branches.

use half::{bf16, f16};

/// Sign bit of an f32.
const SIGN: u32 = 1 << 31;

/// A float type that tensors may hold.
pub trait Float: Copy {
    /// A signed integer of the type's width: x86-64's baseline has a maximum for 16 bits, and for none that are unsigned.
    type Magnitude: Copy + Default + Ord + Into<i32>;
    /// Positive zero.
    const ZERO: Self;
    /// Magnitude of infinity.
    const INFINITY: Self::Magnitude;
    /// The bits without the sign: ordered as the absolute values are, with NaN above infinity.
    fn magnitude(self) -> Self::Magnitude;
    /// The positive number of this magnitude.
    fn of_magnitude(magnitude: Self::Magnitude) -> Self;
    /// Exactly.
    fn widen(self) -> f32;
    /// Rounded once to the nearest, ties to even.
    fn narrow(value: f64) -> Self;
}

impl Float for f32 {
    type Magnitude = i32;
    const ZERO: f32 = 0.0;
    const INFINITY: i32 = 0x7F80_0000;

    #[inline(always)]
    fn magnitude(self) -> i32 {
        (self.to_bits() & !SIGN) as i32
    }

    #[inline(always)]
    fn of_magnitude(magnitude: i32) -> f32 {
        f32::from_bits(magnitude as u32)
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
    type Magnitude = i16;
    const ZERO: f16 = f16::ZERO;
    const INFINITY: i16 = 0x7C00;

    #[inline(always)]
    fn magnitude(self) -> i16 {
        (self.to_bits() & 0x7FFF) as i16
    }

    #[inline(always)]
    fn of_magnitude(magnitude: i16) -> f16 {
        f16::from_bits(magnitude as u16)
    }

    /// Moves the bits and adds the difference of the exponents' biases. A subnormal gets exponent 1 and the leading one
    /// that it does not have, which is then subtracted.
    #[inline(always)]
    fn widen(self) -> f32 {
        const BIAS: u32 = (127 - 15) << 23;
        let bits = u32::from(self.to_bits());
        let magnitude = bits & 0x7FFF;
        let (subnormal, infinite) = (mask(magnitude < 0x0400), mask(magnitude >= 0x7C00));
        let quiet = mask(magnitude > 0x7C00) & 1 << 22;
        let exponent = BIAS + (subnormal & 1 << 23) + (infinite & BIAS);
        let absolute = f32::from_bits(((magnitude << 13) + exponent) | quiet);
        let leading = f32::from_bits(subnormal & (BIAS + (1 << 23)));
        f32::from_bits((absolute - leading).to_bits() | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    fn narrow(value: f64) -> f16 {
        f16::from_bits(round_to_16_bits(value, 10, -14))
    }
}

impl Float for bf16 {
    type Magnitude = i16;
    const ZERO: bf16 = bf16::ZERO;
    const INFINITY: i16 = 0x7F80;

    #[inline(always)]
    fn magnitude(self) -> i16 {
        (self.to_bits() & 0x7FFF) as i16
    }

    #[inline(always)]
    fn of_magnitude(magnitude: i16) -> bf16 {
        bf16::from_bits(magnitude as u16)
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(value: f64) -> bf16 {
        bf16::from_bits(round_to_16_bits(value, 7, -126))
    }
}

/// All ones if `condition`.
#[inline(always)]
const fn mask(condition: bool) -> u32 {
    (condition as u32).wrapping_neg()
}

/// Rounds to the type with `digits` binary digits after the point and `lowest` exponent of normal numbers; NaN becomes
/// infinity.
///
/// With E the number's exponent, but at least `lowest`, adding 2^(E + 52 − digits) leaves the number in units of its last
/// place in the low bits of the sum, rounded by the addition. The sum's exponent is E plus a constant: moved to its place
/// and added to the units, whose leading one makes up for the exponents' starting at 1. Subnormals have no leading one, and
/// a number that was rounded up to 2^(E+1) carries, so both come out right.
#[inline(always)]
fn round_to_16_bits(value: f64, digits: u32, lowest: i32) -> u16 {
    const EXPONENT: u64 = 0x7FF << 52;
    let bits = value.to_bits();
    let absolute = f64::from_bits(bits & !(1 << 63));
    let (power, least) = (f64::from_bits(bits & EXPONENT), power_of_two(lowest));
    let power = if power > least { power } else { least };
    let shift = 52 - digits;
    let sum = (absolute + power * power_of_two(shift as i32)).to_bits();
    let biased = (sum >> shift).wrapping_add(sum) as u32;
    let magnitude = biased.wrapping_sub(((1023 + shift as i32 + lowest) as u32) << digits) as i32;
    // Infinity has the bits above the largest finite number's: all of the exponent's, none below.
    let infinity = 0x7FFF >> digits << digits;
    (magnitude.min(infinity) as u32 | (bits >> 48) as u32 & 0x8000) as u16
}

/// 2^`exponent`, for exponents of normal numbers.
#[inline(always)]
pub(super) const fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((1023 + exponent) as u64) << 52)
}
