//! How fast values become lanes and lanes values, beside memcpy of as many bytes in the same run.
//!
//! `cargo bench -p paatp-transport --bench quantise -- [--json FILE] [--rounds N]`
//!
//! Every round times every case once (CPU time), memcpy among them, so that what slows the machine down slows all. A figure is the
//! median of the rounds; a ratio is the median of the rounds' ratios. GB/s count each byte of values and lanes that is
//! read or written once, though a send reads its values twice: a window ahead for the exponent, then for the lanes.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark's errors are for its user's eyes")]
#![allow(missing_docs, reason = "not a library")]

use std::hint::black_box;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use half::{bf16, f16};
use nix::time::{ClockId, clock_gettime};
use paatp_transport::quantise::{Float, Lane, Quantiser, Scale, Vectors, kernels};
use serde_json::json;

#[path = "../src/quantise/reference.rs"]
#[allow(dead_code, reason = "the tests compare more")]
mod reference;

/// Lanes of a standard chunk: 11 blocks, 1408 bytes.
const LANES: usize = 352;
/// Lanes in memory: 64 MiB of whole chunks.
const MANY_CHUNKS: usize = (64 << 20) / (LANES * 4);
/// Contributions that a worker retains with 512 slots and a window of 64.
const RING: usize = 512 + 64;
/// Chunks between a chunk and the one whose exponent goes with it.
const WINDOW: usize = 64;
/// Ranks: no power of two, for their means are sums of another quantum.
const WORLD: u16 = 7;
/// A sample takes at least this long: the clock's resolution and calls are then below a thousandth, and few samples are
/// interrupted.
const SAMPLE: Duration = Duration::from_micros(200);

#[derive(Parser)]
struct Args {
    /// Write all figures to this file
    #[arg(long)]
    json: Option<PathBuf>,
    /// How often each case is timed
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// Only cases whose name contains this
    #[arg(default_value = "")]
    filter: String,
    /// What cargo adds
    #[arg(long, hide = true)]
    bench: bool,
}

/// Where values and lanes are.
#[derive(Clone, Copy)]
struct Place {
    name: &'static str,
    chunks: usize,
    /// Chunks of lanes, used in turn.
    ring: usize,
}

const PLACES: [Place; 3] = [
    Place { name: "cache", chunks: 1, ring: 1 },
    Place { name: "worker", chunks: MANY_CHUNKS, ring: RING },
    Place { name: "memory", chunks: MANY_CHUNKS, ring: MANY_CHUNKS },
];

/// The code that a case runs.
#[derive(Clone, Copy, PartialEq)]
enum Code {
    /// The loops that the tests compare with.
    Plain,
    Vectors(Vectors),
}

impl Code {
    fn name(self) -> &'static str {
        match self {
            Code::Plain => "plain",
            Code::Vectors(vectors) if vectors.have_avx2() => "avx2",
            Code::Vectors(_) => "baseline",
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Pass {
    /// Lanes one after the other as bytes: what the others are measured by.
    Memcpy,
    Exponent,
    Quantise,
    /// Exponent of the chunk a window ahead, lanes and tag.
    Send,
    Tag,
    Sum,
    Mean,
    /// Test of the tag, then the mean.
    Receive,
}

impl Pass {
    const SENDING: [Pass; 4] = [Pass::Memcpy, Pass::Exponent, Pass::Quantise, Pass::Send];
    const RECEIVING: [Pass; 5] = [Pass::Memcpy, Pass::Tag, Pass::Sum, Pass::Mean, Pass::Receive];

    fn name(self) -> &'static str {
        match self {
            Pass::Memcpy => "memcpy",
            Pass::Exponent => "exponent",
            Pass::Quantise => "lanes+tag",
            Pass::Send => "send",
            Pass::Tag => "tag",
            Pass::Sum => "sum",
            Pass::Mean => "mean",
            Pass::Receive => "receive",
        }
    }

    /// Bytes read and written, each once, for values of this size.
    fn bytes(self, place: Place, value: usize) -> usize {
        let each = match self {
            Pass::Memcpy => 8,
            Pass::Exponent => value,
            Pass::Tag => 4,
            _ => value + 4,
        };
        each * LANES * place.chunks
    }
}

/// A type of values, with the passes by either code. All return something that depends on what they read.
trait Element: Copy + Default + PartialEq {
    const NAME: &'static str;
    fn of(value: f32) -> Self;
    fn exponent(code: Code, values: &[Self]) -> u64;
    fn lanes(code: Code, values: &[Self], lanes: &mut [Lane]) -> u64;
    fn sums(code: Code, lanes: &[Lane], values: &mut [Self], mean: bool) -> u64;
}

/// Values of the test data are below 2^(EXPONENT + 1).
const EXPONENT: i8 = -1;
const SCALE: Scale = Scale { exponent: EXPONENT, contributors: WORLD as u32 };

fn old() -> reference::Quantiser {
    reference::Quantiser::new(WORLD)
}

/// The passes of a float type. They are called as the library calls them, with vectors to choose.
macro_rules! float {
    ($type:ty, $name:literal, $of:expr) => {
        impl Element for $type {
            const NAME: &'static str = $name;

            fn of(value: f32) -> Self {
                $of(value)
            }

            fn exponent(code: Code, values: &[Self]) -> u64 {
                match code {
                    Code::Plain => reference::exponent(values).unwrap() as u64,
                    Code::Vectors(vectors) => {
                        let largest = kernels::largest(vectors, values);
                        assert!(largest < <$type as Float>::INFINITY);
                        largest as u64
                    }
                }
            }

            fn lanes(code: Code, values: &[Self], lanes: &mut [Lane]) -> u64 {
                match code {
                    Code::Plain => {
                        old().quantise(values, EXPONENT, lanes);
                        plain_tag(lanes)
                    }
                    Code::Vectors(vectors) => {
                        let quantiser = Quantiser::new(WORLD);
                        let scale = 1.0 / quantiser.quantum(EXPONENT);
                        kernels::quantise(vectors, values, scale, quantiser.bias(), lanes)
                    }
                }
            }

            fn sums(code: Code, lanes: &[Lane], values: &mut [Self], mean: bool) -> u64 {
                let scale = reference::Scale { exponent: SCALE.exponent, contributors: SCALE.contributors };
                let quantiser = Quantiser::new(WORLD);
                let (biases, quantum) = (quantiser.bias() * SCALE.contributors, quantiser.quantum(EXPONENT));
                match (code, mean) {
                    (Code::Plain, false) => old().sums(scale, lanes, values).is_ok() as u64,
                    (Code::Plain, true) => old().means(scale, lanes, values).is_ok() as u64,
                    (Code::Vectors(vectors), false) => {
                        kernels::sums(vectors, lanes, biases, quantum, values) as u64
                    }
                    (Code::Vectors(vectors), true) => {
                        kernels::means(vectors, lanes, biases, quantum, SCALE.contributors, values) as u64
                    }
                }
            }
        }
    };
}

float!(f32, "f32", |value| value);
float!(f16, "f16", f16::from_f32);
float!(bf16, "bf16", bf16::from_f32);

impl Element for i32 {
    const NAME: &'static str = "i32";

    fn of(value: f32) -> Self {
        (value * 1e8) as i32
    }

    fn exponent(code: Code, values: &[Self]) -> u64 {
        match code {
            Code::Plain => old().unfit_integer(values).is_ok() as u64,
            Code::Vectors(vectors) => kernels::are_below(vectors, values, old().bias()) as u64,
        }
    }

    fn lanes(code: Code, values: &[Self], lanes: &mut [Lane]) -> u64 {
        match code {
            Code::Plain => {
                old().shift(values, lanes);
                plain_tag(lanes)
            }
            Code::Vectors(vectors) => kernels::shift(vectors, values, old().bias(), lanes),
        }
    }

    fn sums(code: Code, lanes: &[Lane], values: &mut [Self], mean: bool) -> u64 {
        let (contributors, biases) = (SCALE.contributors, old().bias() * SCALE.contributors);
        match (code, mean) {
            (Code::Plain, false) => old().integer_sums(contributors, lanes, values),
            (Code::Plain, true) => old().integer_means(contributors, lanes, values),
            (Code::Vectors(vectors), false) => kernels::integer_sums(vectors, lanes, biases, values),
            (Code::Vectors(vectors), true) => {
                kernels::integer_means(vectors, lanes, biases, contributors, values);
            }
        }
        0
    }
}

fn plain_tag(lanes: &[Lane]) -> u64 {
    reference::payload_tag(bytemuck::cast_slice(lanes))
}

/// Tensor and payloads of a case.
struct Bed<T> {
    place: Place,
    values: Vec<T>,
    lanes: Vec<Lane>,
    /// What memcpy reads or writes instead of values.
    copied: Vec<Lane>,
}

impl<T: Element> Bed<T> {
    /// Values like gradients: most are small. The lanes are those of the sum of as many equal contributions as there are
    /// ranks.
    fn new(place: Place) -> Bed<T> {
        let mut state = 1u32;
        let mut uniform = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state as i32 as f32 / -(i32::MIN as f32)
        };
        let values: Vec<T> =
            (0..place.chunks * LANES).map(|_| T::of(uniform() * uniform() * uniform() * 0.999)).collect();
        let mut lanes = vec![[0; 4]; place.ring * LANES];
        T::lanes(Code::Plain, &values[..lanes.len()], &mut lanes);
        for lane in &mut lanes {
            *lane = u32::from_be_bytes(*lane).wrapping_mul(SCALE.contributors).to_be_bytes();
        }
        let copied = lanes.iter().copied().cycle().take(place.chunks * LANES).collect();
        Bed { place, values, lanes, copied }
    }

    fn run(&mut self, code: Code, pass: Pass, sending: bool) -> u64 {
        if pass == Pass::Memcpy {
            return self.memcpy(sending);
        }
        let mut all = 0u64;
        for chunk in 0..self.place.chunks {
            let here = chunk * LANES..(chunk + 1) * LANES;
            let slot = chunk % self.place.ring * LANES;
            let lanes = &mut self.lanes[slot..slot + LANES];
            let ahead = (chunk + WINDOW) % self.place.chunks * LANES;
            all = all.wrapping_add(match pass {
                Pass::Exponent => T::exponent(code, &self.values[here]),
                Pass::Quantise => T::lanes(code, &self.values[here], lanes),
                Pass::Send => {
                    let written = T::lanes(code, &self.values[here], lanes);
                    written.wrapping_add(T::exponent(code, &self.values[ahead..ahead + LANES]))
                }
                Pass::Tag => tag(code, lanes),
                Pass::Sum => T::sums(code, lanes, &mut self.values[here], false),
                Pass::Mean => T::sums(code, lanes, &mut self.values[here], true),
                Pass::Receive => {
                    tag(code, lanes).wrapping_add(T::sums(code, lanes, &mut self.values[here], true))
                }
                Pass::Memcpy => 0,
            });
        }
        all
    }

    /// As many bytes as there are lanes, in one call where both ends are in memory.
    fn memcpy(&mut self, sending: bool) -> u64 {
        let step = if self.place.ring == self.place.chunks { self.lanes.len() } else { LANES };
        let ring = self.lanes.len() / step;
        for (chunk, copied) in self.copied.chunks_exact_mut(step).enumerate() {
            let lanes = &mut self.lanes[chunk % ring * step..][..step];
            if sending { lanes.copy_from_slice(copied) } else { copied.copy_from_slice(lanes) }
        }
        0
    }
}

fn tag(code: Code, lanes: &[Lane]) -> u64 {
    match code {
        Code::Plain => plain_tag(lanes),
        Code::Vectors(vectors) => kernels::payload_tag(vectors, bytemuck::cast_slice(lanes)),
    }
}

/// Samples of one case in GB/s.
struct Case {
    pass: Pass,
    code: Code,
    samples: Vec<f64>,
}

impl Case {
    /// 10th, 50th and 90th percentile.
    fn spread(samples: &[f64]) -> [f64; 3] {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        [1, 5, 9].map(|tenth| sorted[(sorted.len() - 1) * tenth / 10])
    }
}

/// What this thread has used of its processor. Not the time that passed: others may use the machine, too.
fn cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("Linux has this clock").into()
}

/// Times one pass; GB/s.
fn sample<T: Element>(bed: &mut Bed<T>, case: (Pass, Code), sending: bool) -> f64 {
    let (mut runs, start) = (0u32, cpu_time());
    let batch = if bed.place.chunks == 1 { 100 } else { 1 };
    loop {
        for _ in 0..batch {
            black_box(&mut *bed).run(case.1, case.0, sending);
        }
        runs += batch;
        let elapsed = cpu_time() - start;
        if elapsed >= SAMPLE {
            let bytes = case.0.bytes(bed.place, size_of::<T>()) as f64 * f64::from(runs);
            return bytes / elapsed.as_secs_f64() / 1e9;
        }
    }
}

/// Tests that all codes did the same on this bed's data, at this place.
fn check<T: Element>(place: Place, codes: &[Code]) {
    let results = codes.iter().map(|code| {
        let mut bed = Bed::<T>::new(place);
        let sums: Vec<Vec<T>> = [false, true]
            .iter()
            .map(|mean| {
                let mut values = vec![T::default(); LANES];
                T::sums(*code, &bed.lanes[..LANES], &mut values, *mean);
                values
            })
            .collect();
        let tag = tag(*code, &bed.lanes[..LANES]);
        (bed.run(*code, Pass::Quantise, true), bed.lanes, sums, tag)
    });
    let results: Vec<_> = results.collect();
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "{}: the codes differ", T::NAME);
    assert!(results[0].2[0].iter().any(|value| *value != T::default()), "{}: sums of nothing", T::NAME);
}

fn measure<T: Element>(place: Place, args: &Args, codes: &[Code]) -> Vec<serde_json::Value> {
    let mut rows = Vec::new();
    for (sending, passes) in [(true, &Pass::SENDING[..]), (false, &Pass::RECEIVING[..])] {
        let wanted = |pass: &Pass| {
            *pass == Pass::Memcpy
                || format!("{} {} {}", place.name, T::NAME, pass.name()).contains(&args.filter)
        };
        let passes: Vec<Pass> = passes.iter().copied().filter(wanted).collect();
        if passes.len() == 1 {
            continue;
        }
        let mut bed = Bed::<T>::new(place);
        let mut cases: Vec<Case> = passes
            .iter()
            .flat_map(|pass| {
                let codes = if *pass == Pass::Memcpy { &codes[..1] } else { codes };
                codes.iter().map(|code| Case { pass: *pass, code: *code, samples: Vec::new() })
            })
            .collect();
        // The first round only warms up.
        for round in 0..=args.rounds.max(1) {
            for case in &mut cases {
                let speed = sample(&mut bed, (case.pass, case.code), sending);
                if round > 0 {
                    case.samples.push(speed);
                }
            }
        }
        let memcpy = cases[0].samples.clone();
        for pass in &passes {
            let found: Vec<&Case> = cases.iter().filter(|case| case.pass == *pass).collect();
            print!("{:7} {:5} {:10}", place.name, T::NAME, pass.name());
            for case in &found {
                let [low, median, high] = Case::spread(&case.samples);
                let ratios: Vec<f64> = case.samples.iter().zip(&memcpy).map(|(a, b)| a / b).collect();
                let ratio = Case::spread(&ratios);
                let code = if *pass == Pass::Memcpy { "memcpy" } else { case.code.name() };
                print!("  {median:6.1} ({low:5.1}-{high:5.1}) {:4.2}x", ratio[1]);
                rows.push(json!({
                    "place": place.name, "type": T::NAME, "pass": pass.name(), "code": code,
                    "sending": sending, "gb_per_second": {"p10": low, "median": median, "p90": high},
                    "of_memcpy": {"p10": ratio[0], "median": ratio[1], "p90": ratio[2]},
                }));
            }
            println!();
        }
    }
    rows
}

fn main() {
    let args = Args::parse();
    let mut codes = vec![Code::Plain, Code::Vectors(Vectors::BASELINE)];
    if Vectors::widest() != Vectors::BASELINE {
        codes.push(Code::Vectors(Vectors::widest()));
    }
    let names: Vec<&str> = codes.iter().map(|code| code.name()).collect();
    println!(
        "GB/s read and written: median (p10-p90), and of memcpy's in the same round; {}",
        names.join(", ")
    );
    let mut rows = Vec::new();
    for place in PLACES {
        check::<f32>(place, &codes);
        check::<f16>(place, &codes);
        check::<bf16>(place, &codes);
        check::<i32>(place, &codes);
        rows.extend(measure::<f32>(place, &args, &codes));
        rows.extend(measure::<f16>(place, &args, &codes));
        rows.extend(measure::<bf16>(place, &args, &codes));
        rows.extend(measure::<i32>(place, &args, &codes));
    }
    if let Some(path) = args.json {
        let report =
            json!({"schema_version": 1, "rounds": args.rounds, "world": WORLD, "lanes": LANES, "rows": rows});
        let text = serde_json::to_string_pretty(&report).unwrap();
        std::fs::write(&path, text)
            .unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
    }
}
