//! Tests of `quantise`: the error bound, exactness, independence of order.

use super::*;
use alloc::vec;
use alloc::vec::Vec;
use half::{bf16, f16};
use proptest::prelude::*;

/// The number that a lane of one contribution holds.
fn number(quantiser: Quantiser, lane: Lane) -> i32 {
    u32::from_be_bytes(lane).wrapping_sub(quantiser.bias()) as i32
}

/// Adds lanes as the aggregator does.
fn add(total: &mut [Lane], lanes: &[Lane]) {
    for (sum, lane) in total.iter_mut().zip(lanes) {
        let (wide, overflow) = u32::from_be_bytes(*sum).overflowing_add(u32::from_be_bytes(*lane));
        assert!(!overflow, "lanes never carry");
        *sum = wide.to_be_bytes();
    }
}

/// The ranks' lanes, in this order of arrival.
fn reduce(world: u16, exponent: i8, ranks: &[Vec<f32>], order: &[usize]) -> Vec<Lane> {
    let width = ranks[0].len();
    let (mut total, mut lanes) = (vec![[0; 4]; width], vec![[0; 4]; width]);
    for rank in order {
        Quantiser::new(world).quantise(&ranks[*rank], exponent, &mut lanes);
        add(&mut total, &lanes);
    }
    total
}

fn agreed(ranks: &[Vec<f32>]) -> i8 {
    ranks.iter().map(|rank| exponent(rank).unwrap()).max().unwrap()
}

fn ranks() -> impl Strategy<Value = (u16, Vec<Vec<f32>>, Vec<usize>)> {
    (1..=64u16, -38..=38i32).prop_flat_map(|(world, magnitude)| {
        let value = (-1.0..1.0f64, 0..6i32).prop_map(move |(unit, smaller)| {
            let value = unit * 10f64.powi(magnitude - smaller);
            value.clamp(-f64::from(f32::MAX), f64::from(f32::MAX)) as f32
        });
        let rank = proptest::collection::vec(value, 8);
        let order = Just((0..usize::from(world)).collect::<Vec<_>>()).prop_shuffle();
        (Just(world), proptest::collection::vec(rank, usize::from(world)), order)
    })
}

proptest! {
    #[test]
    fn sums_are_within_the_bound_and_do_not_depend_on_order((world, ranks, order) in ranks()) {
        let exponent = agreed(&ranks);
        let in_order: Vec<usize> = (0..ranks.len()).collect();
        let total = reduce(world, exponent, &ranks, &in_order);
        prop_assert_eq!(&reduce(world, exponent, &ranks, &order), &total);
        let (mut sums, scale) = (vec![0f32; 8], Scale { exponent, contributors: u32::from(world) });
        let fits = Quantiser::new(world).sums(scale, &total, &mut sums);
        for (i, sum) in sums.iter().enumerate() {
            let exact: f64 = ranks.iter().map(|rank| f64::from(rank[i])).sum();
            if fits.is_ok() {
                let half_ulp = (f64::from(sum.next_up()) - f64::from(*sum)) / 2.0;
                let error = (f64::from(*sum) - exact).abs();
                prop_assert!(error <= error_bound(world, exponent) + half_ulp, "{error:e} {exact:e}");
            } else {
                prop_assert!(ranks.iter().flatten().any(|v| v.abs() > f32::MAX / 64.0));
            }
        }
    }

    #[test]
    fn one_rank_gets_its_own_values_back(values in proptest::collection::vec(-1e3..1e3f32, 32)) {
        let values: Vec<f32> = values.iter().map(|v| (v * 64.0).round() / 64.0).collect();
        let exponent = exponent(&values).unwrap();
        let mut lanes = vec![[0; 4]; 32];
        Quantiser::new(1).quantise(&values, exponent, &mut lanes);
        let mut back = vec![0f32; 32];
        Quantiser::new(1).sums(Scale { exponent, contributors: 1 }, &lanes, &mut back).unwrap();
        prop_assert_eq!(back, values);
    }

    /// Any finite value of the top binade is exact for up to 64 ranks, off by half a quantum for more, and |q| < B.
    #[test]
    fn lanes_stay_in_range(world in 1..=4096u16, bits in any::<u32>()) {
        let value = f32::from_bits(bits);
        prop_assume!(value.is_finite());
        let e = exponent(&[value]).unwrap();
        let quantiser = Quantiser::new(world);
        let mut lanes = [[0; 4]; 2];
        quantiser.quantise(&[value], e, &mut lanes);
        prop_assert!(number(quantiser, lanes[0]).unsigned_abs() < quantiser.bias());
        prop_assert_eq!(number(quantiser, lanes[1]), 0);
        let off = f64::from(number(quantiser, lanes[0])) * quantiser.quantum(e) - f64::from(value);
        prop_assert!(off.abs() <= if world <= 64 { 0.0 } else { quantiser.quantum(e) / 2.0 }, "{off}");
    }

    #[test]
    fn keys_keep_the_order(a in any::<f32>(), b in any::<f32>()) {
        prop_assume!(a.is_finite() && b.is_finite());
        for (extreme, expected) in [(Extreme::Max, a.max(b)), (Extreme::Min, a.min(b))] {
            let mut lanes = [[0; 4]; 3];
            extreme.keys(&[a, b], &mut lanes);
            let winner = lanes.iter().map(|lane| u32::from_be_bytes(*lane)).max().unwrap();
            let mut back = [0f32];
            extreme.values(&[winner.to_be_bytes()], &mut back).unwrap();
            prop_assert_eq!(back[0], expected);
        }
    }

    #[test]
    fn integer_keys_keep_the_order(a in any::<i32>(), b in any::<i32>()) {
        for (extreme, expected) in [(Extreme::Max, a.max(b)), (Extreme::Min, a.min(b))] {
            let (mut lanes, mut back) = ([[0; 4]; 3], [0]);
            extreme.integer_keys(&[a, b], &mut lanes);
            extreme.integer_values(&[*lanes.iter().max().unwrap()], &mut back);
            prop_assert_eq!(back[0], expected);
        }
    }

    #[test]
    fn integer_means_round_to_nearest_even(values in proptest::collection::vec(-33_000_000..33_000_000i32, 1..64)) {
        let world = values.len() as u16;
        let quantiser = Quantiser::new(world);
        let mut total = [[0; 4]];
        for value in &values {
            let mut lane = [[0; 4]];
            quantiser.shift(&[*value], &mut lane);
            add(&mut total, &lane);
        }
        let (mut sum, mut mean) = ([0], [0]);
        quantiser.integer_sums(u32::from(world), &total, &mut sum);
        quantiser.integer_means(u32::from(world), &total, &mut mean);
        prop_assert_eq!(i64::from(sum[0]), values.iter().map(|v| i64::from(*v)).sum::<i64>());
        // In integers: twice the distance is at most the divisor, and a tie goes to the even side.
        let twice = 2 * (i64::from(sum[0]) - i64::from(mean[0]) * i64::from(world));
        prop_assert!(twice.abs() <= i64::from(world));
        prop_assert!(twice.abs() < i64::from(world) || mean[0] % 2 == 0);
    }

    /// A number beside a tie is not taken for a tie, wherever in the mantissa it differs.
    #[test]
    fn halves_are_rounded_once(mantissa in 0..1024u64, below in 0..42u32, up in any::<bool>()) {
        let tie = (1023 << 52) | (mantissa << 42) | (1 << 41);
        let beside = f64::from_bits(if up { tie + (1 << below.min(40)) } else { tie - (1 << below.min(40)) });
        let step = f64::from_bits((1023 << 52) | (mantissa << 42));
        let expected = if up { step + 1.0 / 1024.0 } else { step };
        prop_assert_eq!(f16::narrow(beside).to_f64(), expected);
        let tie = (1023 << 52) | ((mantissa & 127) << 45) | (1 << 44);
        let beside = f64::from_bits(if up { tie + (1 << below) } else { tie - (1 << below) });
        let step = f64::from_bits((1023 << 52) | ((mantissa & 127) << 45));
        let expected = if up { step + 1.0 / 128.0 } else { step };
        prop_assert_eq!(bf16::narrow(beside).to_f64(), expected);
    }
}

#[test]
fn exponents_of_the_edges() {
    assert_eq!(exponent::<f32>(&[]), Ok(E_MIN));
    assert_eq!(exponent(&[0.0f32, -0.0]), Ok(E_MIN));
    assert_eq!(exponent(&[f32::from_bits(1)]), Ok(E_MIN));
    assert_eq!(exponent(&[f32::MIN_POSITIVE]), Ok(E_MIN));
    assert_eq!(exponent(&[0.5f32, -1.0]), Ok(0));
    assert_eq!(exponent(&[f32::MAX]), Ok(127));
    assert_eq!(exponent(&[f16::MAX]), Ok(15));
    assert_eq!(exponent(&[f16::from_bits(1)]), Ok(-24));
    assert_eq!(exponent(&[bf16::MIN]), Ok(127));
    assert_eq!(exponent(&[1.0f32, f32::NAN]), Err(Unfit { index: 1 }));
    assert_eq!(exponent(&[f16::INFINITY]), Err(Unfit { index: 0 }));
    assert_eq!(exponent(&[bf16::ONE, bf16::ONE, bf16::NEG_INFINITY]), Err(Unfit { index: 2 }));
}

#[test]
fn subnormals_are_exact_for_up_to_64_ranks() {
    for world in 1..=64u16 {
        let ranks =
            vec![vec![f32::from_bits(1), f32::from_bits(0x007F_FFFF), -f32::from_bits(3)]; world.into()];
        let order: Vec<usize> = (0..ranks.len()).collect();
        let total = reduce(world, E_MIN, &ranks, &order);
        let (mut sums, contributors) = ([0f32; 3], u32::from(world));
        Quantiser::new(world).sums(Scale { exponent: E_MIN, contributors }, &total, &mut sums).unwrap();
        let exact = |value: f32| (f64::from(value) * f64::from(world)) as f32;
        assert_eq!(sums.to_vec(), ranks[0].iter().map(|v| exact(*v)).collect::<Vec<_>>());
    }
}

#[test]
fn a_sum_that_the_type_cannot_hold_is_told() {
    let ranks = vec![vec![1.0, f32::MAX]; 2];
    let total = reduce(2, 127, &ranks, &[0, 1]);
    let scale = Scale { exponent: 127, contributors: 2 };
    let mut sums = [0f32; 2];
    assert_eq!(Quantiser::new(2).sums(scale, &total, &mut sums), Err(Unfit { index: 1 }));
    assert_eq!(Quantiser::new(2).means(scale, &total, &mut sums), Ok(()));
    assert_eq!(sums[1], f32::MAX);
}

#[test]
fn integers_that_could_overflow_are_told() {
    let quantiser = Quantiser::new(4);
    let limit = 1 << 29;
    assert_eq!(quantiser.unfit_integer(&[limit - 1, 1 - limit]), Ok(()));
    assert_eq!(quantiser.unfit_integer(&[0, -limit]), Err(Unfit { index: 1 }));
    assert_eq!(Quantiser::new(1).unfit_integer(&[i32::MAX, i32::MIN]), Err(Unfit { index: 1 }));
}
