//! All-reduces end to end: every rank gets the same result, within its bound of the float64 reduction.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use paatp_common::Event;
use paatp_tests::gradients::{real, synthetic};
use paatp_tests::job::run;
use paatp_tests::reference::Reduction;
use paatp_tests::{Dtype, Family, Gradient, JobOptions, JobResult, Lab, Layout, Tensor, require_bpf};

/// Runs a job and checks everything about its result.
fn right(lab: &Lab, inputs: &[Gradient], options: &JobOptions) -> JobResult {
    let result = run(lab, inputs, options).unwrap();
    let verdict = result.check(inputs, options).unwrap();
    assert!(verdict.is_right(), "{:#?}\n{options:?}", verdict.complaints);
    result
}

/// Contributions of one rank, without the header-only ones that agree on exponents.
fn chunks(inputs: &[Gradient], lanes: usize) -> u64 {
    inputs[0].tensors.iter().map(|tensor| tensor.len().div_ceil(lanes) as u64).sum()
}

fn real_gradients(name: &str, world: usize, change: impl FnOnce(&mut JobOptions), mtu: u32) {
    if !require_bpf(name) {
        return;
    }
    let inputs = real(0, world).unwrap();
    let lab = Lab::new(Layout { workers: world, mtu, racks: 0 }).unwrap();
    let mut options = JobOptions::world(world);
    change(&mut options);
    let result = right(&lab, &inputs, &options);
    let payloads = result.counters.noted(Event::Stores) + result.counters.noted(Event::Adds);
    assert_eq!(
        payloads,
        world as u64 * chunks(&inputs, options.aggregator.lanes),
        "each chunk is added once"
    );
    let mode = options.aggregator.xdp_mode;
    assert!(result.ready.contains(mode), "\"{}\" does not say {mode}", result.ready);
}

#[test]
fn four_workers_native_v4() {
    real_gradients("sums::four_workers_native_v4", 4, |_| {}, 1500);
}

#[test]
fn eight_workers_native_v4() {
    real_gradients("sums::eight_workers_native_v4", 8, |_| {}, 1500);
}

#[test]
fn four_workers_generic_v4() {
    real_gradients(
        "sums::four_workers_generic_v4",
        4,
        |options| options.aggregator.xdp_mode = "generic",
        1500,
    );
}

/// IPv6's header is 20 bytes longer: at an MTU of 1500 one block less fits.
#[test]
fn four_workers_native_v6() {
    let change = |options: &mut JobOptions| (options.family, options.aggregator.lanes) = (Family::V6, 320);
    real_gradients("sums::four_workers_native_v6", 4, change, 1500);
}

#[test]
fn eight_workers_generic_v6() {
    let change = |options: &mut JobOptions| {
        (options.family, options.aggregator.lanes) = (Family::V6, 320);
        options.aggregator.xdp_mode = "generic";
    };
    real_gradients("sums::eight_workers_generic_v6", 8, change, 1500);
}

#[test]
fn wide_lanes_v4() {
    real_gradients("sums::wide_lanes_v4", 4, |options| options.aggregator.lanes = 832, 3500);
}

#[test]
fn wide_lanes_v6() {
    let change = |options: &mut JobOptions| (options.family, options.aggregator.lanes) = (Family::V6, 832);
    real_gradients("sums::wide_lanes_v6", 4, change, 3500);
}

#[test]
fn two_steps_over_the_same_lab() {
    if !require_bpf("sums::two_steps_over_the_same_lab") {
        return;
    }
    let lab = Lab::new(Layout::workers(8)).unwrap();
    let options = JobOptions::world(8);
    let digest = |step| right(&lab, &real(step, 8).unwrap(), &options).digests().unwrap()[0].clone();
    let first = digest(0);
    assert_ne!(digest(1), first);
    assert_eq!(digest(0), first, "the same inputs have the same result in every run");
}

#[test]
fn every_type_and_odd_lengths() {
    if !require_bpf("sums::every_type_and_odd_lengths") {
        return;
    }
    let lab = Lab::new(Layout::workers(3)).unwrap();
    let mut tensors = Vec::new();
    for dtype in Dtype::REDUCIBLE {
        tensors.extend([1, 15, 255, 257, 0, 352, 353].map(|length| (dtype, length)));
    }
    let inputs = synthetic(3, 5, &tensors, 10_000.0);
    for reduction in [Reduction::Sum, Reduction::Mean, Reduction::Max, Reduction::Min] {
        right(&lab, &inputs, &JobOptions { reduction, ..JobOptions::world(3) });
    }
}

#[test]
fn nothing_to_sum() {
    if !require_bpf("sums::nothing_to_sum") {
        return;
    }
    let lab = Lab::new(Layout::workers(2)).unwrap();
    let empty = Gradient { tensors: vec![Tensor::new("empty", Dtype::F32, &[])] };
    right(&lab, &[empty.clone(), empty], &JobOptions::world(2));
    right(&lab, &[Gradient::default(), Gradient::default()], &JobOptions::world(2));
}

#[test]
fn one_rank_alone() {
    if !require_bpf("sums::one_rank_alone") {
        return;
    }
    let lab = Lab::new(Layout::workers(1)).unwrap();
    right(&lab, &synthetic(1, 3, &[(Dtype::F32, 1000)], 1.0), &JobOptions::world(1));
}

#[test]
fn extreme_values() {
    if !require_bpf("sums::extreme_values") {
        return;
    }
    let lab = Lab::new(Layout::workers(3)).unwrap();
    let tiny = f64::from(f32::from_bits(1));
    let huge = 2f64.powi(127);
    // Each in a job of its own: the first chunks of an operation share a scale. By rank, and what must come out if it
    // has to be exact.
    type Case<'a> = ([&'a [f64]; 3], Option<&'a [f64]>);
    let cases: [Case<'_>; 7] = [
        // 0 and −0.
        ([&[0.0, -0.0, -0.0], &[0.0, -0.0, 0.0], &[0.0, -0.0, -0.0]], Some(&[0.0, 0.0, 0.0])),
        // Subnormals.
        (
            [&[tiny, -tiny, 3.0 * tiny], &[tiny, tiny, 0.0], &[tiny, 0.0, 0.0]],
            Some(&[3.0 * tiny, 0.0, 3.0 * tiny]),
        ),
        ([&[1e-38], &[1e-38], &[1e-38]], None),
        // 2^127 on one rank; on several, with signs that keep the sum in range.
        ([&[huge], &[0.0], &[0.0]], Some(&[huge])),
        ([&[huge], &[-huge], &[huge / 2.0]], Some(&[huge / 2.0])),
        ([&[huge / 2.0], &[huge / 2.0], &[huge / 2.0]], Some(&[huge * 1.5])),
        // A large value beside small ones.
        ([&[1e38, 1e-38, 1.0], &[0.0, 0.0, 0.0], &[-1e38, 1e-38, 1.0]], None),
    ];
    for (ranks, exact) in cases {
        let inputs = ranks.map(|values| Gradient { tensors: vec![Tensor::new("t", Dtype::F32, values)] });
        let result = right(&lab, &inputs, &JobOptions::world(3));
        let sums = result.ranks[0].output.as_ref().unwrap().tensors[0].values();
        assert!(exact.is_none_or(|exact| sums == exact), "{ranks:?}: {sums:?}");
    }
}

#[test]
fn a_sum_beyond_the_type() {
    if !require_bpf("sums::a_sum_beyond_the_type") {
        return;
    }
    let lab = Lab::new(Layout::workers(2)).unwrap();
    let input = Gradient { tensors: vec![Tensor::new("big", Dtype::F32, &[0.0, 0.0, 2f64.powi(127)])] };
    let result = run(&lab, &[input.clone(), input], &JobOptions::world(2)).unwrap();
    for rank in &result.ranks {
        let output = &rank.finished.output;
        assert!(!rank.finished.is_success() && rank.output.is_none());
        assert!(output.contains("big") && output.contains("index 2"), "{output}");
    }
}

#[test]
fn large_integers() {
    if !require_bpf("sums::large_integers") {
        return;
    }
    let lab = Lab::new(Layout::workers(2)).unwrap();
    let largest = f64::from((1 << 30) - 1);
    let input = |values: &[f64]| Gradient { tensors: vec![Tensor::new("n", Dtype::I32, values)] };
    right(
        &lab,
        &[input(&[largest, -largest, 1.0]), input(&[largest, -largest, -1.0])],
        &JobOptions::world(2),
    );
    let too_large = input(&[0.0, f64::from(i32::MAX), 0.0]);
    let result = run(&lab, &[too_large.clone(), too_large], &JobOptions::world(2)).unwrap();
    for rank in &result.ranks {
        assert!(!rank.finished.is_success() && rank.output.is_none());
        assert!(rank.finished.output.contains("'n'") || rank.finished.output.contains("rank"), "{rank:?}");
    }
}
