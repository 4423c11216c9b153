//! A small network that four workers train together, each slow now and then, with bounded staleness: as in Serene's
//! emulation, but with gradients of sums that all workers add up (`docs/simulator.md`).
//!
//! `TRAINING_SEEDS=5 cargo test -p paatp-transport --test training -- --nocapture` prints the table.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use common::{FAIR, Net, Random, Shape, Weather};
use paatp_common::policy::{Mode, Policy, QUORUM_ALL, Staleness};
use paatp_transport::{Event, Reduction, Tensor, Time, Values};

const WORKERS: usize = 4;
const INPUTS: usize = 24;
const HIDDEN: usize = 32;
const CLASSES: usize = 8;
const BATCH: usize = 16;
const ITERATIONS: u64 = 400;
const RATE: f32 = 0.25;
/// Share of right answers that is to be reached.
const TARGET: f64 = 0.90;
/// Computing, in µs; and how much of it more when a worker is slow, and how often that is.
const COMPUTE: f64 = 2000.0;
const SLOW: (f64, f64, f64) = (0.15, 0.5, 2.0);

struct Data {
    inputs: Vec<[f32; INPUTS]>,
    classes: Vec<usize>,
}

/// Points around a centre for each class; many lie nearer to another one.
fn data(seed: u64, count: usize) -> Data {
    let mut centres = Random(0xC0FFEE);
    let centre = |random: &mut Random| -> [f32; INPUTS] { std::array::from_fn(|_| random.unit() as f32) };
    let centres: Vec<_> = (0..CLASSES).map(|_| centre(&mut centres)).collect();
    let mut random = Random(seed);
    let classes: Vec<usize> = (0..count).map(|_| random.below(CLASSES as u64) as usize).collect();
    // The sum of four uniform numbers is as good as a normal one.
    let mut noise = || (0..4).map(|_| random.unit() as f32).sum::<f32>() * 0.75;
    let inputs = classes.iter().map(|class| std::array::from_fn(|i| centres[*class][i] + noise())).collect();
    Data { inputs, classes }
}

/// Two layers: weights and biases of each, in one row.
#[derive(Clone)]
struct Net2 {
    weights: Vec<f32>,
}

const FIRST: usize = INPUTS * HIDDEN;
const SECOND: usize = FIRST + HIDDEN;
const THIRD: usize = SECOND + HIDDEN * CLASSES;
const ALL: usize = THIRD + CLASSES;

impl Net2 {
    fn new() -> Net2 {
        let mut random = Random(7);
        Net2 { weights: (0..ALL).map(|_| random.unit() as f32 * 0.2).collect() }
    }

    fn forward(&self, input: &[f32; INPUTS]) -> ([f32; HIDDEN], [f32; CLASSES]) {
        let w = &self.weights;
        let hidden = std::array::from_fn(|h| {
            let sum: f32 = (0..INPUTS).map(|i| input[i] * w[i * HIDDEN + h]).sum();
            (sum + w[FIRST + h]).max(0.0)
        });
        let hidden: [f32; HIDDEN] = hidden;
        let scores: [f32; CLASSES] = std::array::from_fn(|c| {
            (0..HIDDEN).map(|h| hidden[h] * w[SECOND + h * CLASSES + c]).sum::<f32>() + w[THIRD + c]
        });
        let most = scores.iter().fold(f32::MIN, |most, score| most.max(*score));
        let powers = scores.map(|score| (score - most).exp());
        let sum: f32 = powers.iter().sum();
        (hidden, powers.map(|power| power / sum))
    }

    fn gradient(&self, data: &Data, random: &mut Random) -> Vec<f32> {
        let mut gradient = vec![0.0; ALL];
        for _ in 0..BATCH {
            let index = random.below(data.inputs.len() as u64) as usize;
            let input = &data.inputs[index];
            let (hidden, mut error) = self.forward(input);
            error[data.classes[index]] -= 1.0;
            for h in 0..HIDDEN {
                let mut back = 0.0;
                for c in 0..CLASSES {
                    gradient[SECOND + h * CLASSES + c] += hidden[h] * error[c];
                    back += error[c] * self.weights[SECOND + h * CLASSES + c];
                }
                if hidden[h] > 0.0 {
                    (0..INPUTS).for_each(|i| gradient[i * HIDDEN + h] += input[i] * back);
                    gradient[FIRST + h] += back;
                }
            }
            (0..CLASSES).for_each(|c| gradient[THIRD + c] += error[c]);
        }
        gradient.iter_mut().for_each(|value| *value /= BATCH as f32);
        gradient
    }

    fn accuracy(&self, data: &Data) -> f64 {
        let best =
            |scores: [f32; CLASSES]| (0..CLASSES).max_by(|a, b| scores[*a].total_cmp(&scores[*b])).unwrap();
        let right =
            data.inputs.iter().zip(&data.classes).filter(|(i, class)| best(self.forward(i).1) == **class);
        right.count() as f64 / data.inputs.len() as f64
    }
}

#[derive(Debug)]
struct Outcome {
    /// Virtual time in ms until the target was reached, and until all iterations were done.
    to_target: f64,
    all: f64,
    iterations_to_target: u64,
    accuracy: f64,
    /// Share of their time that workers wait.
    waiting: f64,
}

fn train(mode: Mode, seed: u64) -> Outcome {
    let shape = Shape { world: WORKERS as u8, lanes: 32, window: 16, slots: 64 };
    let mut net = Net::new(shape, Weather { delay: 5, ..FAIR }, seed);
    net.aggregator.jobs[0].policy = Policy::settled(mode, 0);
    let (train, test) = (data(1, 2000), data(2, 500));
    let mut models = vec![Net2::new(); WORKERS];
    let mut random: Vec<Random> = (0..WORKERS as u64).map(|rank| Random(seed * 1000 + rank)).collect();
    let mut pace: Vec<Random> = (0..WORKERS as u64).map(|rank| Random(seed * 7919 + rank)).collect();
    // A gradient and when it will be there, once it is begun.
    let mut computing: Vec<Option<(u64, Vec<f32>)>> = vec![None; WORKERS];
    let (mut begun, mut applied) = ([0; WORKERS], [0; WORKERS]);
    let (start, mut worked) = (net.now, 0);
    let mut outcome =
        Outcome { to_target: f64::NAN, all: 0.0, iterations_to_target: 0, accuracy: 0.0, waiting: 0.0 };
    while applied.iter().any(|applied| *applied < ITERATIONS) {
        for rank in 0..WORKERS {
            for event in std::mem::take(&mut net.events[rank]) {
                let Event::Done { tensors, .. } = event else { panic!("{event:?}") };
                let Values::F32(mean) = &tensors[0].values else { panic!() };
                models[rank].weights.iter_mut().zip(mean).for_each(|(weight, mean)| *weight -= RATE * mean);
                applied[rank] += 1;
                if rank == 0
                    && applied[0] % 4 == 0
                    && outcome.to_target.is_nan()
                    && models[0].accuracy(&test) >= TARGET
                {
                    outcome.to_target = (net.now - start) as f64 / 1000.0;
                    outcome.iterations_to_target = applied[0];
                }
            }
            if let Some((_, gradient)) = computing[rank].take_if(|(at, _)| *at <= net.now) {
                let tensor = Tensor { name: "all".into(), values: Values::F32(gradient) };
                if begun[rank] == ITERATIONS && mode.quorum != QUORUM_ALL {
                    net.workers[rank].flush(Time(net.now), Reduction::Mean, vec![tensor]);
                } else {
                    net.workers[rank].all_reduce(Time(net.now), Reduction::Mean, vec![tensor]);
                }
                net.workers[rank].end_iteration();
                net.pump(rank as u8);
            }
            if computing[rank].is_none() && begun[rank] < ITERATIONS && net.workers[rank].may_begin() {
                let slow = if pace[rank].chance(SLOW.0) {
                    SLOW.1 + (SLOW.2 - SLOW.1) * (pace[rank].unit() + 1.0) / 2.0
                } else {
                    0.0
                };
                let span = (COMPUTE * (1.0 + slow + 0.05 * pace[rank].unit())) as u64;
                worked += span;
                computing[rank] = Some((net.now + span, models[rank].gradient(&train, &mut random[rank])));
                begun[rank] += 1;
            }
        }
        let next = computing.iter().flatten().map(|(at, _)| *at).min();
        match (net.next_at(), next) {
            (Some(at), Some(next)) if next < at => net.now = next,
            (None, Some(next)) => net.now = next.max(net.now),
            (Some(_), _) => assert!(net.step()),
            (None, None) => {
                assert!(net.events.iter().any(|events| !events.is_empty()), "everything is silent")
            }
        }
    }
    let all = net.now - start;
    outcome.all = all as f64 / 1000.0;
    outcome.waiting = 1.0 - worked as f64 / (all * WORKERS as u64) as f64;
    outcome.accuracy = models[0].accuracy(&test);
    assert!(models.iter().all(|model| model.weights == models[0].weights), "the models differ");
    outcome
}

#[test]
fn staleness_saves_time_and_costs_no_accuracy() {
    let ssp = |most| Mode { quorum: QUORUM_ALL, staleness: Staleness::Bounded(most) };
    let modes = [
        ("s = 0", ssp(0)),
        ("s = 2", ssp(2)),
        ("s = 10", ssp(10)),
        ("s = 32", ssp(32)),
        ("unbounded", Mode { quorum: QUORUM_ALL, staleness: Staleness::Unbounded }),
        ("3 of 4, s = 0", Mode { quorum: 3, staleness: Staleness::NONE }),
        ("3 of 4, s = 2", Mode { quorum: 3, staleness: Staleness::Bounded(2) }),
    ];
    println!(
        "| mode | to {:.0} % [ms] | of s = 0 | iterations | {ITERATIONS} iterations [ms] | of s = 0 | accuracy | waiting |",
        TARGET * 100.0
    );
    let seeds = std::env::var("TRAINING_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(1);
    let mut first: Option<Outcome> = None;
    for (name, mode) in modes {
        let runs: Vec<Outcome> = (1..=seeds).map(|seed| train(mode, seed)).collect();
        let median = |of: fn(&Outcome) -> f64| {
            let mut values: Vec<f64> = runs.iter().map(of).collect();
            values.sort_unstable_by(f64::total_cmp);
            values[values.len() / 2]
        };
        let came = Outcome {
            to_target: median(|run| run.to_target),
            all: median(|run| run.all),
            iterations_to_target: median(|run| run.iterations_to_target as f64) as u64,
            accuracy: median(|run| run.accuracy),
            waiting: median(|run| run.waiting),
        };
        let base = first.as_ref().unwrap_or(&came);
        let (to_target, all) = (came.to_target / base.to_target, came.all / base.all);
        println!(
            "| {name} | {:.0} | {:.1} % | {} | {:.0} | {:.1} % | {:.3} | {:.1} % |",
            came.to_target,
            to_target * 100.0,
            came.iterations_to_target,
            came.all,
            all * 100.0,
            came.accuracy,
            came.waiting * 100.0,
        );
        assert!(came.accuracy > TARGET, "{name}: {came:?}");
        match &first {
            Some(first) => assert!(all < 0.95 && came.waiting < first.waiting, "{name}: {came:?}"),
            None => first = Some(came),
        }
    }
}
