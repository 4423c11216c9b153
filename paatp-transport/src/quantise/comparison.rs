//! Tests that the vectorised loops give the plain ones' results, bit for bit, for every set of vectors.

use alloc::vec;
use alloc::vec::Vec;
use core::fmt::Debug;

use half::{bf16, f16};
use proptest::prelude::*;

use super::{E_MIN, Float, Lane, Quantiser, Scale, Unfit, Vectors, kernels, reference};

/// Both, also where the processor has no more than the baseline.
fn vectors() -> [Vectors; 2] {
    [Vectors::BASELINE, Vectors::widest()]
}

/// A type in both implementations.
trait Both: Float<Magnitude: Debug> + reference::Float + Debug {
    fn of(bits: u32) -> Self;
    fn bits(self) -> u32;
}

impl Both for f32 {
    fn of(bits: u32) -> f32 {
        f32::from_bits(bits)
    }
    fn bits(self) -> u32 {
        self.to_bits()
    }
}

impl Both for f16 {
    fn of(bits: u32) -> f16 {
        f16::from_bits((bits >> 16) as u16)
    }
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

impl Both for bf16 {
    fn of(bits: u32) -> bf16 {
        bf16::from_bits((bits >> 16) as u16)
    }
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

fn bits<T: Both>(values: &[T]) -> Vec<u32> {
    values.iter().map(|value| value.bits()).collect()
}

/// Bits of values, or lanes: over the whole range, or near one another, or with few digits, which make ties.
fn words() -> impl Strategy<Value = Vec<u32>> {
    let word = (any::<u32>(), any::<u32>(), 0..32u32, 0..4u8).prop_map(|(a, b, shift, kind)| match kind {
        0 => a,
        1 => (a & 0x8000_FFFF) | 0x3F80_0000 | (b & 0x000F_0000),
        2 => (a >> shift) << shift,
        _ => ((a >> shift) << shift).wrapping_add(b % 3).wrapping_sub(1),
    });
    proptest::collection::vec(word, 0..100)
}

fn unfit(result: Result<(), reference::Unfit>) -> Result<(), Unfit> {
    result.map_err(|reference::Unfit { index }| Unfit { index })
}

/// How many lanes there are beside values, or too few.
const MORE_LANES: core::ops::Range<i32> = -5..70;

fn some_lanes(values: usize, more: i32) -> Vec<Lane> {
    vec![[0xA5; 4]; (values as i32 + more).max(0) as usize]
}

fn exponents_are_the_same<T: Both>(words: &[u32]) {
    let mut values: Vec<T> = words.iter().map(|bits| T::of(*bits)).collect();
    for _ in 0..2 {
        let plain = reference::exponent(&values).map_err(|reference::Unfit { index }| Unfit { index });
        assert_eq!(super::exponent(&values), plain);
        for vectors in vectors() {
            let largest = values.iter().map(|value| <T as Float>::magnitude(*value)).max();
            assert_eq!(kernels::largest(vectors, &values), largest.unwrap_or_default());
        }
        values.retain(|value| <T as Float>::magnitude(*value) < <T as Float>::INFINITY);
    }
}

fn lanes_are_the_same<T: Both>(words: &[u32], world: u16, above: i8, more: i32) {
    let mut values: Vec<T> = words.iter().map(|bits| T::of(*bits)).collect();
    values.retain(|value| <T as Float>::magnitude(*value) < <T as Float>::INFINITY);
    let exponent = reference::exponent(&values).unwrap().saturating_add(above);
    let (mut expected, quantiser) = (some_lanes(values.len(), more), Quantiser::new(world));
    reference::Quantiser::new(world).quantise(&values, exponent, &mut expected);
    let tag = reference::payload_tag(expected.as_flattened());
    for vectors in vectors() {
        let mut lanes = some_lanes(values.len(), more);
        let scale = 1.0 / quantiser.quantum(exponent);
        assert_eq!(kernels::quantise(vectors, &values, scale, quantiser.bias(), &mut lanes), tag);
        assert_eq!(lanes, expected);
        assert_eq!(kernels::payload_tag(vectors, lanes.as_flattened()), tag);
    }
    let mut lanes = some_lanes(values.len(), more);
    assert_eq!(quantiser.quantise(&values, exponent, &mut lanes), tag);
    assert_eq!(lanes, expected);
    for (extreme, flip) in [(reference::Extreme::Max, 0), (reference::Extreme::Min, u32::MAX)] {
        let mut expected = some_lanes(values.len(), more);
        extreme.keys(&values, &mut expected);
        let tag = reference::payload_tag(expected.as_flattened());
        for vectors in vectors() {
            let mut lanes = some_lanes(values.len(), more);
            assert_eq!(kernels::keys(vectors, &values, flip, &mut lanes), tag);
            assert_eq!(lanes, expected);
        }
    }
}

fn results_are_the_same<T: Both>(words: &[u32], world: u16, contributors: u32, exponent: i8, fewer: usize) {
    let biases = contributors.wrapping_mul(Quantiser::new(world).bias());
    // Numbers around zero, as sums are.
    let lanes: Vec<Lane> = words.iter().map(|word| word.wrapping_add(biases).to_be_bytes()).collect();
    let blank = || vec![T::of(0); lanes.len().saturating_sub(fewer)];
    let (scale, quantiser) = (Scale { exponent, contributors }, Quantiser::new(world));
    let (plain, quantum) = (reference::Quantiser::new(world), quantiser.quantum(exponent));
    let plain_scale = reference::Scale { exponent, contributors };

    let (mut sums, mut means) = (blank(), blank());
    let sums_fit = unfit(plain.sums(plain_scale, &lanes, &mut sums));
    let means_fit = unfit(plain.means(plain_scale, &lanes, &mut means));
    for vectors in vectors() {
        let (mut values, divisor) = (blank(), contributors);
        kernels::sums(vectors, &lanes, biases, quantum, &mut values);
        assert_eq!(bits(&values), bits(&sums));
        kernels::means(vectors, &lanes, biases, quantum, divisor, &mut values);
        assert_eq!(bits(&values), bits(&means));
    }
    let mut values = blank();
    assert_eq!(quantiser.sums(scale, &lanes, &mut values), sums_fit);
    assert_eq!(bits(&values), bits(&sums));
    assert_eq!(quantiser.means(scale, &lanes, &mut values), means_fit);
    assert_eq!(bits(&values), bits(&means));

    for (extreme, plain, flip) in [
        (super::Extreme::Max, reference::Extreme::Max, 0),
        (super::Extreme::Min, reference::Extreme::Min, u32::MAX),
    ] {
        // A key of NaN may be read as another thing that is not finite.
        let finite = |bits: u32| bits & 0x7FFF_FFFF < 0x7F80_0000;
        let keys: Vec<f32> =
            words.iter().map(|word| f32::from_bits(*word)).filter(|v| finite(v.to_bits())).collect();
        let mut lanes = vec![[0; 4]; keys.len()];
        plain.keys(&keys, &mut lanes);
        let (mut expected, mut values) = (vec![T::of(0); lanes.len()], vec![T::of(0); lanes.len()]);
        assert_eq!(extreme.values(&lanes, &mut values), unfit(plain.values(&lanes, &mut expected)));
        assert_eq!(bits(&values), bits(&expected));
        for vectors in vectors() {
            kernels::values(vectors, &lanes, flip, &mut values);
            assert_eq!(bits(&values), bits(&expected));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn exponents(words in words()) {
        exponents_are_the_same::<f32>(&words);
        exponents_are_the_same::<f16>(&words);
        exponents_are_the_same::<bf16>(&words);
    }

    #[test]
    fn lanes(words in words(), world in 1..=4096u16, above in 0..30i8, more in MORE_LANES) {
        lanes_are_the_same::<f32>(&words, world, above, more);
        lanes_are_the_same::<f16>(&words, world, above, more);
        lanes_are_the_same::<bf16>(&words, world, above, more);
    }

    #[test]
    fn results(
        words in words(), world in 1..=4096u16, contributors in 1..=4096u32, exponent in E_MIN..=127, fewer in 0..40usize,
    ) {
        results_are_the_same::<f32>(&words, world, contributors, exponent, fewer);
        results_are_the_same::<f16>(&words, world, contributors, exponent, fewer);
        results_are_the_same::<bf16>(&words, world, contributors, exponent, fewer);
        // Where f16's results are neither all zero nor all infinite.
        results_are_the_same::<f16>(&words, world, contributors, exponent / 6, fewer);
    }

    #[test]
    fn integers(words in words(), world in 1..=4096u16, contributors in 1..=4096u32, more in MORE_LANES) {
        let values: Vec<i32> = words.iter().map(|word| *word as i32).collect();
        let (plain, quantiser) = (reference::Quantiser::new(world), Quantiser::new(world));
        prop_assert_eq!(quantiser.unfit_integer(&values), unfit(plain.unfit_integer(&values)));
        let biases = contributors.wrapping_mul(quantiser.bias());
        let payload: Vec<Lane> = words.iter().map(|word| word.to_be_bytes()).collect();
        for vectors in vectors() {
            let (mut lanes, mut expected) = (some_lanes(values.len(), more), some_lanes(values.len(), more));
            plain.shift(&values, &mut expected);
            let tag = reference::payload_tag(expected.as_flattened());
            prop_assert_eq!(kernels::shift(vectors, &values, quantiser.bias(), &mut lanes), tag);
            prop_assert_eq!(&lanes, &expected);
            for (extreme, flip) in [(reference::Extreme::Max, 0), (reference::Extreme::Min, u32::MAX)] {
                extreme.integer_keys(&values, &mut expected);
                kernels::integer_keys(vectors, &values, flip, &mut lanes);
                prop_assert_eq!(&lanes, &expected);
                let (mut read, mut expected) = (vec![0; values.len()], vec![0; values.len()]);
                extreme.integer_values(&payload, &mut expected);
                kernels::integer_values(vectors, &payload, flip, &mut read);
                prop_assert_eq!(read, expected);
            }
            let (mut read, mut expected) = (vec![0; values.len()], vec![0; values.len()]);
            plain.integer_sums(contributors, &payload, &mut expected);
            kernels::integer_sums(vectors, &payload, biases, &mut read);
            prop_assert_eq!(&read, &expected);
            plain.integer_means(contributors, &payload, &mut expected);
            kernels::integer_means(vectors, &payload, biases, contributors, &mut read);
            prop_assert_eq!(read, expected);
        }
    }

    #[test]
    fn tags(payload in proptest::collection::vec(any::<u8>(), 0..1500)) {
        for vectors in vectors() {
            prop_assert_eq!(kernels::payload_tag(vectors, &payload), reference::payload_tag(&payload));
        }
    }

    /// Long runs of zeros or ones make ties and their neighbours.
    #[test]
    fn narrowing(bits in any::<u64>(), exponent in 1023 - 160..1023 + 135u64, ones in 0..52u32) {
        for mantissa in [bits >> 12, bits >> 12 << ones & ((1 << 52) - 1), (bits >> 12) | ((1 << ones) - 1)] {
            let value = f64::from_bits(bits >> 63 << 63 | exponent << 52 | mantissa);
            let plain = <bf16 as reference::Float>::narrow(value).to_bits();
            prop_assert_eq!(<bf16 as Float>::narrow(value).to_bits(), plain);
            let plain = <f16 as reference::Float>::narrow(value).to_bits();
            prop_assert_eq!(<f16 as Float>::narrow(value).to_bits(), plain);
        }
    }
}

#[test]
fn widening_every_finite_number_of_16_bits() {
    for bits in (0..=u16::MAX).filter(|bits| bits & 0x7FFF < 0x7C00) {
        let (value, plain) = (<f16 as Float>::widen(f16::from_bits(bits)), f16::from_bits(bits).to_f32());
        assert_eq!(value.to_bits(), plain.to_bits(), "{bits:#x}");
    }
}
