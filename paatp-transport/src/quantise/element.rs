//! The float types of tensors, converted without branches.

use half::{bf16, f16};

/// Sign bit of an f32.
const SIGN: u32 = 1 << 31;

/// A float type that tensors may hold.
pub trait Float: Copy {
    /// A signed integer of the type's width: x86-64's baseline has a maximum for 16 bits, and for none that are unsigned.
    type Magnitude: Copy + Default + Ord;
    /// What [`Float::of_sum`] needs of a quantum.
    type Quantum: Copy;
    /// Magnitude of infinity.
    const INFINITY: Self::Magnitude;
    /// The bits without the sign: ordered as the absolute values are, with NaN above infinity.
    fn magnitude(self) -> Self::Magnitude;
    /// The positive number of this magnitude.
    fn of_magnitude(magnitude: Self::Magnitude) -> Self;
    /// Exactly, if finite.
    fn widen(self) -> f32;
    /// Rounded once to the nearest, ties to even.
    fn narrow(value: f64) -> Self;
    /// Prepares for a quantum, which is a power of two.
    fn quantum(quantum: f64) -> Self::Quantum;
    /// So many quanta, rounded once to the nearest, ties to even.
    fn of_sum(number: i32, quantum: Self::Quantum) -> Self;
    /// As [`Float::of_sum`], of a number that was divided; its last 13 bits are zero.
    fn of_mean(quotient: f64, quantum: Self::Quantum) -> Self;
}

/// `number / divisor` for divisors up to 2^8, but for a relative error below 2^-39, and exactly if it has 40 binary digits
/// or fewer. Takes 1 / `divisor`: the product's last digits may be wrong, so it is rounded to 40.
///
/// Rounding it to 25 digits or fewer, or to halves, gives what rounding the quotient gives: a point between two results is
/// k·2^j with k < 2^25, or a half, and the quotient either is one, and exact, or is away from it by a relative 2^-33 or more
/// (for |number| ≤ 2^31: it differs by a multiple of 1 / divisor, or of 2^j / divisor if j < 0).
#[inline(always)]
pub(super) fn quotient(number: i32, reciprocal: f64) -> f64 {
    const DROPPED: u64 = 1 << 13;
    let bits = (f64::from(number) * reciprocal).to_bits();
    f64::from_bits(bits.wrapping_add(DROPPED / 2) & !(DROPPED - 1))
}

impl Float for f32 {
    type Magnitude = i32;
    type Quantum = f64;
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

    #[inline(always)]
    fn quantum(quantum: f64) -> f64 {
        quantum
    }

    #[inline(always)]
    fn of_sum(number: i32, quantum: f64) -> f32 {
        (f64::from(number) * quantum) as f32
    }

    #[inline(always)]
    fn of_mean(quotient: f64, quantum: f64) -> f32 {
        (quotient * quantum) as f32
    }
}

impl Float for f16 {
    type Magnitude = i16;
    type Quantum = Rounding<10>;
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
        const ONE: u32 = 1 << 23;
        let bits = u32::from(self.to_bits());
        let magnitude = bits & 0x7FFF;
        let subnormal = mask(magnitude < 0x0400);
        let absolute = f32::from_bits((magnitude << 13) + BIAS + (subnormal & ONE));
        let leading = f32::from_bits(subnormal & (BIAS + ONE));
        f32::from_bits((absolute - leading).to_bits() | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    fn narrow(value: f64) -> f16 {
        f16::from_bits(round_to_16_bits(value, 10, -14))
    }

    #[inline(always)]
    fn quantum(quantum: f64) -> Rounding<10> {
        Rounding::new(quantum, -14)
    }

    #[inline(always)]
    fn of_sum(number: i32, quantum: Rounding<10>) -> f16 {
        f16::from_bits(quantum.round(odd_of_integer(number)))
    }

    #[inline(always)]
    fn of_mean(quotient: f64, quantum: Rounding<10>) -> f16 {
        f16::from_bits(quantum.round(odd_of_quotient(quotient)))
    }
}

impl Float for bf16 {
    type Magnitude = i16;
    type Quantum = Rounding<7>;
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

    #[inline(always)]
    fn quantum(quantum: f64) -> Rounding<7> {
        Rounding::new(quantum, -126)
    }

    #[inline(always)]
    fn of_sum(number: i32, quantum: Rounding<7>) -> bf16 {
        bf16::from_bits(quantum.round(odd_of_integer(number)))
    }

    #[inline(always)]
    fn of_mean(quotient: f64, quantum: Rounding<7>) -> bf16 {
        bf16::from_bits(quantum.round(odd_of_quotient(quotient)))
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

/// The number as an f32 of which rounding to 16 digits or fewer gives what rounding the number gives.
///
/// From 2^24 on, f32 is coarser than integers. There the low 8 bits become one that tells if any was set: results of 16
/// digits, and the points between two of them, are multiples of 2^8.
#[inline(always)]
fn odd_of_integer(number: i32) -> f32 {
    const LOW: i32 = 0xFF;
    let any_low = if number & LOW == 0 { 0 } else { (LOW + 1) / 2 };
    let folded = (number & !LOW) | any_low;
    // The absolute value of i32::MIN stays negative; f32 has that number too.
    (if number.wrapping_abs() < 1 << 24 { number } else { folded }) as f32
}

/// As [`odd_of_integer`]: what f32 has no place for sets its last digit.
#[inline(always)]
fn odd_of_quotient(quotient: f64) -> f32 {
    const LAST: u64 = 1 << 29;
    let bits = quotient.to_bits();
    f64::from_bits((bits | ((bits & (LAST - 1)) + (LAST - 1))) & !(LAST - 1)) as f32
}

/// How numbers that count quanta are rounded to 16 bits, of which `DIGITS` are after the point.
///
/// The same as [`round_to_16_bits`], but in 32 bits and in units of the quantum, where numbers are between 1/64 and 2^31:
/// no intermediate is out of f32's range, whatever the quantum is.
#[derive(Clone, Copy, Debug)]
pub struct Rounding<const DIGITS: u32> {
    /// The lowest normal number, as far as it matters and f32 has it.
    least: f32,
    /// Infinity is the type's encoding of this power of two.
    infinity: f32,
    /// What the exponents' fields begin with.
    offset: u32,
}

impl<const DIGITS: u32> Rounding<DIGITS> {
    const SHIFT: u32 = 23 - DIGITS;
    /// More than the largest number's exponent by more than the digits: all numbers are zero in this unit.
    const BEYOND: i32 = 60;

    #[inline(always)]
    fn new(quantum: f64, lowest: i32) -> Rounding<DIGITS> {
        let quantum = (quantum.to_bits() >> 52) as i32 - 1023;
        // IEEE 754: the exponents of normal numbers are 1 − E to E.
        let highest = 1 - lowest - quantum;
        let lowest = (lowest - quantum).min(Self::BEYOND);
        Rounding {
            least: single_power_of_two(lowest.max(-126)),
            infinity: single_power_of_two((highest + 1).min(Self::BEYOND)),
            offset: ((lowest + 127 + Self::SHIFT as i32) << DIGITS) as u32,
        }
    }

    #[inline(always)]
    fn round(self, value: f32) -> u16 {
        const EXPONENT: u32 = 0xFF << 23;
        let bits = value.to_bits();
        let absolute = f32::from_bits(bits & !SIGN);
        let absolute = if absolute < self.infinity { absolute } else { self.infinity };
        let power = f32::from_bits(absolute.to_bits() & EXPONENT);
        let power = if power > self.least { power } else { self.least };
        let sum = (absolute + power * single_power_of_two(Self::SHIFT as i32)).to_bits();
        // The sum's own exponent is left of the 16 bits.
        let magnitude = (sum >> Self::SHIFT).wrapping_add(sum).wrapping_sub(self.offset);
        // Where the lowest normal number is not f32's, zero is not counted from it.
        (magnitude & mask(absolute > 0.0) & 0x7FFF | bits >> 16 & 0x8000) as u16
    }
}

/// 2^`exponent`, for exponents of normal numbers.
#[inline(always)]
const fn single_power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// 2^`exponent`, for exponents of normal numbers.
#[inline(always)]
pub(super) const fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((1023 + exponent) as u64) << 52)
}
