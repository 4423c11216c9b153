//! The loops over values and lanes, each compiled for every set of vectors.
//!
//! No value makes a branch, and no loop but the tag's carries more than a maximum from one value to the next: that is what
//! the compiler vectorises. The tag is a loop of its own over lanes that are still in the cache.

use paatp_common::limits::{BLOCK_BYTES, WORDS_PER_BLOCK};

use super::element::{Float, quotient};
use super::vectors::vectorised;
use super::{Lane, SIGN};

/// Adding 1.5·2^52 to an f64 of magnitude below 2^51 rounds it to an integer, ties to even, and leaves that integer in
/// two's complement in the low mantissa bits.
const ROUNDER: f64 = 6_755_399_441_055_744.0;

vectorised! {
    /// The largest magnitude.
    pub fn largest<T: Float>(values: &[T]) -> T::Magnitude {
        values.iter().fold(T::Magnitude::default(), |largest, value| largest.max(value.magnitude()))
    }

    /// Whether all magnitudes are below `limit`.
    pub fn are_below(values: &[i32], limit: u32) -> bool {
        // Without an early exit, to vectorise.
        values.iter().fold(true, |all, value| all & (value.unsigned_abs() < limit))
    }

    /// Lanes of `values` times `scale`, plus `bias`; the tag of the whole blocks.
    pub fn quantise<T: Float>(values: &[T], scale: f64, bias: u32, lanes: &mut [Lane]) -> u64 {
        let number = |value: T| {
            let rounded = f64::from(value.widen()) * scale + ROUNDER;
            (rounded.to_bits() as u32).wrapping_add(bias)
        };
        fill(values, bias, lanes, number)
    }

    /// As [`quantise`], of integers.
    pub fn shift(values: &[i32], bias: u32, lanes: &mut [Lane]) -> u64 {
        fill(values, bias, lanes, |value| (value as u32).wrapping_add(bias))
    }

    /// Lanes that are ordered as the values are, exclusive-or `flip`; the tag of the whole blocks.
    pub fn keys<T: Float>(values: &[T], flip: u32, lanes: &mut [Lane]) -> u64 {
        let key = |value: T| {
            let bits = value.widen().to_bits();
            bits ^ ((bits as i32 >> 31) as u32 | SIGN) ^ flip
        };
        fill(values, 0, lanes, key)
    }

    /// As [`keys`], of integers.
    pub fn integer_keys(values: &[i32], flip: u32, lanes: &mut [Lane]) -> u64 {
        fill(values, 0, lanes, |value| value as u32 ^ SIGN ^ flip)
    }

    /// Values of lanes less `bias`, times `quantum`; the largest magnitude.
    pub fn sums<T: Float>(lanes: &[Lane], bias: u32, quantum: f64, values: &mut [T]) -> T::Magnitude {
        let quantum = T::quantum(quantum);
        let value = |lane: u32| T::of_sum(lane.wrapping_sub(bias) as i32, quantum);
        drain_floats(lanes, values, value)
    }

    /// As [`sums`], divided.
    pub fn means<T: Float>(
        lanes: &[Lane], bias: u32, quantum: f64, divisor: u32, values: &mut [T],
    ) -> T::Magnitude {
        let (quantum, reciprocal) = (T::quantum(quantum), 1.0 / f64::from(divisor));
        let value =
            |lane: u32| T::of_mean(quotient(lane.wrapping_sub(bias) as i32, reciprocal), quantum);
        drain_floats(lanes, values, value)
    }

    /// Values of the lanes that [`keys`] made; the largest magnitude.
    pub fn values<T: Float>(lanes: &[Lane], flip: u32, values: &mut [T]) -> T::Magnitude {
        let value = |lane: u32| {
            let key = lane ^ flip;
            T::narrow(f64::from(f32::from_bits(key ^ (!((key as i32 >> 31) as u32) | SIGN))))
        };
        drain_floats(lanes, values, value)
    }

    /// Integers of lanes less `bias`.
    pub fn integer_sums(lanes: &[Lane], bias: u32, values: &mut [i32]) {
        drain(lanes, values, |lane| lane.wrapping_sub(bias) as i32);
    }

    /// As [`integer_sums`], divided and rounded to the nearest, ties to even.
    pub fn integer_means(lanes: &[Lane], bias: u32, divisor: u32, values: &mut [i32]) {
        let reciprocal = 1.0 / f64::from(divisor);
        let value = |lane: u32| {
            let rounded = quotient(lane.wrapping_sub(bias) as i32, reciprocal) + ROUNDER;
            rounded.to_bits() as i32
        };
        drain(lanes, values, value);
    }

    /// Integers of the lanes that [`integer_keys`] made.
    pub fn integer_values(lanes: &[Lane], flip: u32, values: &mut [i32]) {
        drain(lanes, values, |lane| (lane ^ SIGN ^ flip) as i32);
    }

    /// The tag of a payload's whole blocks, without salts.
    pub fn payload_tag(payload: &[u8]) -> u64 {
        tag(payload)
    }
}

/// Writes a lane for each value and `padding` for the rest, and returns the tag of the whole blocks.
#[inline(always)]
fn fill<T: Copy>(values: &[T], padding: u32, lanes: &mut [Lane], number: impl Fn(T) -> u32) -> u64 {
    for (lane, value) in lanes.iter_mut().zip(values) {
        *lane = number(*value).to_be_bytes();
    }
    if let Some(rest) = lanes.get_mut(values.len()..) {
        rest.fill(padding.to_be_bytes());
    }
    tag(lanes.as_flattened())
}

/// Writes a value for each lane, as far as both go.
#[inline(always)]
fn drain<T>(lanes: &[Lane], values: &mut [T], value: impl Fn(u32) -> T) {
    for (place, lane) in values.iter_mut().zip(lanes) {
        *place = value(u32::from_be_bytes(*lane));
    }
}

/// As [`drain`]; the largest magnitude.
#[inline(always)]
fn drain_floats<T: Float>(lanes: &[Lane], values: &mut [T], value: impl Fn(u32) -> T) -> T::Magnitude {
    let mut largest = T::Magnitude::default();
    for (place, lane) in values.iter_mut().zip(lanes) {
        *place = value(u32::from_be_bytes(*lane));
        largest = largest.max(place.magnitude());
    }
    largest
}

/// Sums the words of the whole blocks.
#[inline(always)]
fn tag(payload: &[u8]) -> u64 {
    let words = payload.as_chunks::<BLOCK_BYTES>().0.as_flattened().as_chunks().0;
    let mut tag = Columns::default();
    words.as_chunks().0.iter().for_each(|row| tag.take(row));
    tag.value()
}

/// Columns of words that [`Columns`] sums apart: two vectors of AVX2, and blocks have whole rows.
const COLUMNS: usize = 8;
const _: () = assert!(WORDS_PER_BLOCK.is_multiple_of(COLUMNS));

/// The running sums of `paatp_common::tag::Tag`, for every eighth word apart.
///
/// With N = 8K words, word 8k + j has the weight 2(N − 8k − j) − 1 = 16(K − k) − (2j + 1), and the sum of the running
/// sums of column j has its words K − k times.
#[derive(Default)]
struct Columns {
    sum: [u64; COLUMNS],
    sums: [u64; COLUMNS],
}

impl Columns {
    #[inline(always)]
    fn take(&mut self, row: &[[u8; 8]; COLUMNS]) {
        for ((sum, sums), word) in self.sum.iter_mut().zip(&mut self.sums).zip(row) {
            *sum = sum.wrapping_add(u64::from_be_bytes(*word));
            *sums = sums.wrapping_add(*sum);
        }
    }

    #[inline(always)]
    fn value(&self) -> u64 {
        let columns = self.sum.iter().zip(&self.sums).zip(0u64..);
        columns.fold(0u64, |tag, ((sum, sums), column)| {
            let weighted =
                sums.wrapping_mul(2 * COLUMNS as u64).wrapping_sub(sum.wrapping_mul(2 * column + 1));
            tag.wrapping_add(weighted)
        })
    }
}
