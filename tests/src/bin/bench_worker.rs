//! `cargo xtask bench worker`: what one core of a worker carries, through each driver, and what the numbers cost it.
//!
//! The worker's thread is bound to one CPU. Its only peer is an aggregator at the other end of a veth, so whatever the
//! kernel does on the way, the aggregator's program included, happens on the same CPU: the figures are of one core for
//! *both* ends. Drivers take turns within each round. System calls are counted by the drivers, allocations by a counting
//! allocator, on the worker's thread only, from the first packet to the last.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use indicatif::ProgressBar;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use nix::unistd::Pid;
use paatp_tests::netns::Namespace;
use paatp_tests::process::{Aggregator, AggregatorOptions, PORT, Process, paatp};
use paatp_tests::spread::{Spread, cpu_model, cpus, kernel_release};
use paatp_transport::quantise::{Lane, Quantiser, Scale};
use paatp_transport::{Membership, Reduction, Settings, Tensor, Values, Worker};
use paatp_user::cli::Credentials;
use paatp_user::client::Server;
use paatp_user::worker::client::join;
use paatp_user::worker::drive::{Clock, Path, drive};
use paatp_user::worker::driver::Driver;
use paatp_user::worker::endpoint::Endpoint;
use paatp_user::worker::socket::{Buffers, DataSocket, Target};
use paatp_user::worker::udp::UdpDriver;
use paatp_user::worker::xdp::{Copies, Mode, PeerProgram, XdpDriver};
use perf_event::Builder;
use perf_event::events::Hardware;
use serde::Serialize;

/// Measures one core of a worker.
#[derive(Parser)]
#[command(name = "bench-worker", max_term_width = 110)]
struct Args {
    /// Writes the figures to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measurements of each kind; medians are reported.
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Size of the tensor, in MiB of float32 values.
    #[arg(long, default_value_t = 16, value_name = "MIB")]
    mebibytes: usize,
    /// Window in chunks.
    #[arg(long, default_value_t = 64)]
    window: u16,
    /// CPU that the worker is bound to.
    #[arg(long, default_value_t = 0)]
    cpu: usize,
}

/// Lanes of a chunk: what an MTU of 1500 holds, and a job over larger frames.
const LANES: [usize; 2] = [352, 768];
/// MTU of the veth: the larger chunks, and what veth takes natively.
const MTU: &str = "3506";
/// The aggregator.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 91, 0, 1);
const TIMEOUT: Duration = Duration::from_secs(20);
/// Values that the quantiser is measured with: as many as a chunk has, which stay in the first-level cache with their
/// lanes; and 64 MiB, which no cache here holds.
const QUANTISED: [usize; 2] = [768, 16 << 20];
/// Shortest time of one measurement of it.
const QUANTISING: Duration = Duration::from_millis(20);
/// Values of one call: a chunk.
const CHUNK: usize = 768;
/// Farthest that a sum of one rank's values between −1 and 1 may be off.
const TOLERANCE: f32 = 1e-6;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// Counts what each thread allocates.
struct Counting;

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The drivers that are compared.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Plain,
    Segmented,
    AfXdp,
}

impl Kind {
    const ALL: [Kind; 3] = [Kind::Plain, Kind::Segmented, Kind::AfXdp];

    const fn name(self) -> &'static str {
        match self {
            Kind::Plain => "udp, plain",
            Kind::Segmented => "udp, segmented",
            Kind::AfXdp => "af-xdp, copy",
        }
    }
}

/// One all-reduce.
struct Sample {
    bytes_per_second: f64,
    /// Time of this thread in user space and in the kernel, less what interrupts took where the kernel tells them apart.
    cpu_ns_per_packet: f64,
    packets: u64,
    calls: u64,
    allocations: u64,
    instructions: Option<f64>,
}

#[derive(Serialize)]
struct Row {
    lanes: usize,
    driver: &'static str,
    bytes_per_second: Spread,
    cpu_ns_per_packet: Spread,
    packets: u64,
    system_calls_per_packet: Spread,
    allocations_per_packet: Spread,
    /// Null where the machine's counters cannot be read.
    instructions_per_packet: Option<Spread>,
}

#[derive(Serialize)]
struct Numbers {
    values: usize,
    quantise_gigabytes_per_second: Spread,
    inverse_gigabytes_per_second: Spread,
    memcpy_gigabytes_per_second: Spread,
    quantise_over_memcpy: f64,
    inverse_over_memcpy: f64,
}

#[derive(Serialize)]
struct Report {
    schema_version: u32,
    kernel: String,
    cpu: String,
    cpus: usize,
    rounds: usize,
    tensor_bytes: usize,
    window: u16,
    /// Why there are no instruction counts.
    instructions_unavailable: Option<String>,
    drivers: Vec<Row>,
    numbers: Vec<Numbers>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let unavailable = instruction_counter().err().map(|error| error.to_string());
    if let Some(error) = &unavailable {
        println!("instructions: unavailable ({error})");
    }
    let mut drivers = Vec::new();
    for lanes in LANES {
        drivers.extend(measure(&args, lanes)?);
    }
    let numbers = QUANTISED.iter().map(|count| numbers(&args, *count)).collect::<Result<Vec<_>>>()?;
    for numbers in &numbers {
        println!(
            "{} float32 values in chunks: quantise {:.2} GB/s, inverse {:.2} GB/s, memcpy {:.2} GB/s: {:.2} and {:.2} of memcpy",
            numbers.values,
            numbers.quantise_gigabytes_per_second,
            numbers.inverse_gigabytes_per_second,
            numbers.memcpy_gigabytes_per_second,
            numbers.quantise_over_memcpy,
            numbers.inverse_over_memcpy
        );
    }
    if let Some(path) = &args.json {
        let report = Report {
            schema_version: 1,
            kernel: kernel_release(),
            cpu: cpu_model(),
            cpus: cpus(),
            rounds: args.rounds,
            tensor_bytes: args.mebibytes << 20,
            window: args.window,
            instructions_unavailable: unavailable,
            drivers,
            numbers,
        };
        std::fs::write(path, serde_json::to_string_pretty(&report)? + "\n")
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn bind_to(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu)?;
    sched_setaffinity(Pid::from_raw(0), &set).with_context(|| format!("cannot run on CPU {cpu}"))
}

fn instruction_counter() -> Result<perf_event::Counter, std::io::Error> {
    Builder::new(Hardware::INSTRUCTIONS).include_kernel().build()
}

/// All drivers with chunks of so many lanes.
fn measure(args: &Args, lanes: usize) -> Result<Vec<Row>> {
    let name = |kind: &str| format!("paatp-bench-{}-{kind}", std::process::id());
    let (ours, theirs) = (Namespace::new(name("w"))?, Namespace::new(name("a"))?);
    let target = theirs.path().display().to_string();
    for namespace in [&ours, &theirs] {
        // No neighbour discovery among the packets that are counted.
        namespace.set("ipv6/conf/default/disable_ipv6", "1")?;
    }
    ours.ip(&[
        "link", "add", "near", "mtu", MTU, "type", "veth", "peer", "name", "far", "mtu", MTU, "netns",
        &target,
    ])?;
    ours.ip(&["address", "add", "10.91.0.2/24", "dev", "near"])?;
    theirs.ip(&["address", "add", &format!("{ADDRESS}/24"), "dev", "far"])?;
    ours.ip(&["link", "set", "near", "up"])?;
    theirs.ip(&["link", "set", "far", "up"])?;
    let mut options = AggregatorOptions { lanes, window: args.window, ..AggregatorOptions::world(1) };
    options.slots = (4 * u32::from(args.window)).next_power_of_two();
    let mut command = theirs.command(paatp()?);
    command.args(options.args("far"));
    let _aggregator = Aggregator::watch(Process::spawn("the aggregator", command)?)?;

    let values: Vec<f32> =
        (0..args.mebibytes << 18_u32).map(|i| ((i % 2001) as f32 - 1000.0) / 1000.0).collect();
    let mut samples: [Vec<Sample>; 3] = Default::default();
    ours.run(|| -> Result<()> {
        bind_to(args.cpu)?;
        // The first round warms up.
        for round in 0..=args.rounds {
            for (kind, samples) in Kind::ALL.into_iter().zip(&mut samples) {
                let sample =
                    run(kind, &values).with_context(|| format!("{} lanes, {}", lanes, kind.name()))?;
                if round > 0 {
                    samples.push(sample);
                }
            }
        }
        Ok(())
    })??;
    Kind::ALL.into_iter().zip(samples).map(|(kind, samples)| row(lanes, kind, &samples)).collect()
}

fn row(lanes: usize, kind: Kind, samples: &[Sample]) -> Result<Row> {
    let spread = |of: &dyn Fn(&Sample) -> f64| Spread::of(samples.iter().map(of).collect());
    let per_packet =
        |of: &dyn Fn(&Sample) -> u64| spread(&|sample| of(sample) as f64 / sample.packets as f64);
    let instructions: Option<Vec<f64>> = samples.iter().map(|sample| sample.instructions).collect();
    let row = Row {
        lanes,
        driver: kind.name(),
        bytes_per_second: spread(&|sample| sample.bytes_per_second),
        cpu_ns_per_packet: spread(&|sample| sample.cpu_ns_per_packet),
        packets: samples.first().context("no rounds")?.packets,
        system_calls_per_packet: per_packet(&|sample| sample.calls),
        allocations_per_packet: per_packet(&|sample| sample.allocations),
        instructions_per_packet: instructions.map(Spread::of),
    };
    println!(
        "{lanes} lanes, {:<14}: {:>6.1} MB/s of tensor, {:.0} ns of CPU, {:.3} system calls, {:.5} allocations for each \
         packet sent or received ({} packets)",
        row.driver,
        Spread::of(samples.iter().map(|sample| sample.bytes_per_second / 1e6).collect()),
        row.cpu_ns_per_packet.median,
        row.system_calls_per_packet.median,
        row.allocations_per_packet.max,
        row.packets
    );
    Ok(row)
}

/// Joins and reduces once through a driver, with its result checked.
fn run(kind: Kind, values: &[f32]) -> Result<Sample> {
    let address = SocketAddr::new(IpAddr::V4(ADDRESS), PORT);
    let endpoint = Endpoint { text: address.to_string(), address };
    let server = Server::new(endpoint, &Credentials::default())?;
    let grant = join(&server, "lab", 0, 1, TIMEOUT, "bench", &ProgressBar::hidden())?;
    let membership = Membership {
        job: grant.job,
        generation: grant.generation,
        nonce: grant.nonce,
        rank: 0,
        world: grant.world,
        lanes: grant.lanes,
        window: grant.window,
        slots: grant.slots,
        seating: None,
    };
    let settings = Settings { timeout: TIMEOUT, linger: TIMEOUT, ..Settings::default() };
    let mut worker = Worker::new(membership, settings)?;
    let target = Target::new(address, grant.port_base, grant.ports);
    let buffers = Buffers { window: grant.window, datagram: worker.datagram_bytes() };
    let socket = DataSocket::open(target, buffers)?;
    let path = Path { aggregator: address.ip(), mtu: socket.path_mtu() };
    match kind {
        Kind::AfXdp => {
            let driver = XdpDriver::open(socket, buffers, Mode::Native, Copies::Allowed);
            let mut driver = driver.map_err(|refused| refused.error)?;
            ensure!(!driver.is_zero_copy(), "veth has learnt zero-copy: call it so");
            reduce(&mut worker, &mut driver, path, values)
        }
        Kind::Segmented | Kind::Plain => {
            // The aggregator is the veth's other end.
            let _peer = PeerProgram::attach_where_needed(target).context("no program on this end")?;
            let driver = UdpDriver::new(socket)?;
            let mut driver = if kind == Kind::Plain { driver.without_segments() } else { driver };
            let sample = reduce(&mut worker, &mut driver, path, values);
            ensure!(driver.segments() == (kind == Kind::Segmented), "segmentation was given up");
            sample
        }
    }
}

fn reduce<D: Driver>(worker: &mut Worker, driver: &mut D, path: Path, values: &[f32]) -> Result<Sample> {
    let clock = Clock::default();
    let tensor = Tensor { name: "t".into(), values: Values::F32(values.to_vec()) };
    worker.all_reduce(clock.now(), Reduction::Sum, vec![tensor]);
    let mut counter = instruction_counter().ok();
    let before = (thread_cpu()?, ALLOCATIONS.get());
    let start = Instant::now();
    if let Some(counter) = &mut counter {
        counter.enable()?;
    }
    let outcome = drive(worker, driver, path, clock, &mut |_| {})?;
    if let Some(counter) = &mut counter {
        counter.disable()?;
    }
    let seconds = start.elapsed().as_secs_f64();
    let allocations = ALLOCATIONS.get() - before.1;
    let cpu_ns = thread_cpu()? - before.0;
    let packets = worker.statistics().datagrams_sent + worker.statistics().datagrams_received;
    ensure!(allocations * 1000 <= packets, "{allocations} allocations for {packets} packets");
    let result = outcome.result?;
    let Some(Values::F32(sums)) = result.first().map(|tensor| &tensor.values) else {
        anyhow::bail!("another result")
    };
    let is_right = sums.len() == values.len()
        && sums.iter().zip(values).all(|(sum, value)| (sum - value).abs() <= TOLERANCE);
    ensure!(is_right && outcome.complete, "the sum of one rank is not its values");
    Ok(Sample {
        bytes_per_second: size_of_val(values) as f64 / seconds,
        cpu_ns_per_packet: cpu_ns / packets as f64,
        packets,
        calls: driver.system_calls(),
        allocations,
        instructions: counter
            .map(|mut counter| counter.read())
            .transpose()?
            .map(|i| i as f64 / packets as f64),
    })
}

/// Time of this thread, in nanoseconds.
fn thread_cpu() -> Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_THREAD)?;
    Ok((usage.user_time().num_microseconds() + usage.system_time().num_microseconds()) as f64 * 1e3)
}

/// The quantiser and its inverse against a copy of as many bytes, in turns.
fn numbers(args: &Args, count: usize) -> Result<Numbers> {
    bind_to(args.cpu)?;
    let quantiser = Quantiser::new(4);
    let values: Vec<f32> = (0..count).map(|i| ((i % 201) as f32 - 100.0) / 100.0).collect();
    let mut lanes: Vec<Lane> = vec![[0; 4]; count];
    let mut back = vec![0f32; count];
    let mut copy = vec![0f32; count];
    let scale = Scale { exponent: 1, contributors: 1 };
    let (mut forward, mut inverse, mut memcpy) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..args.rounds {
        forward.push(rate(count, || {
            for (values, lanes) in values.chunks(CHUNK).zip(lanes.chunks_mut(CHUNK)) {
                quantiser.quantise(black_box(values), black_box(1), black_box(lanes));
            }
        }));
        inverse.push(rate(count, || {
            for (lanes, back) in lanes.chunks(CHUNK).zip(back.chunks_mut(CHUNK)) {
                black_box(quantiser.sums(scale, black_box(lanes), black_box(back)).is_ok());
            }
        }));
        memcpy.push(rate(count, || {
            for (values, copy) in values.chunks(CHUNK).zip(copy.chunks_mut(CHUNK)) {
                black_box(copy).copy_from_slice(black_box(values));
            }
        }));
    }
    let off = back.iter().zip(&values).map(|(back, value)| (back - value).abs()).fold(0.0, f32::max);
    ensure!(off <= TOLERANCE, "the inverse is off by {off}");
    let (forward, inverse, memcpy) = (Spread::of(forward), Spread::of(inverse), Spread::of(memcpy));
    Ok(Numbers {
        values: count,
        quantise_over_memcpy: forward.median / memcpy.median,
        inverse_over_memcpy: inverse.median / memcpy.median,
        quantise_gigabytes_per_second: forward,
        inverse_gigabytes_per_second: inverse,
        memcpy_gigabytes_per_second: memcpy,
    })
}

/// Gigabytes of values per second, of passes over so many.
fn rate(count: usize, mut pass: impl FnMut()) -> f64 {
    let (start, mut passes) = (Instant::now(), 0);
    let at_once = (16 << 10) / count + 1;
    while start.elapsed() < QUANTISING {
        (0..at_once).for_each(|_| pass());
        passes += at_once;
    }
    (passes * count * size_of::<f32>()) as f64 / start.elapsed().as_secs_f64() / 1e9
}
