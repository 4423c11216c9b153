//! `cargo xtask bench share`: three jobs of 2, 8 and 16 ranks in one pool that is too small for all, with and without the
//! aggregator's tuning of their places in it, by turns. What comes out is Jain's index of their goodputs: chunks that
//! every rank of a job has, from the moment that all three jobs are under way until the first is about to end.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use paatp_common::Refusal;
use paatp_common::job::JobEntry;
use paatp_common::limits::MAX_JOBS;
use paatp_common::progress::Progress;
use paatp_sim::report::jain;
use paatp_tests::gradients::synthetic;
use paatp_tests::kernel::{Maps, PodOf};
use paatp_tests::lab::Family;
use paatp_tests::process::{Aggregator, PORT, Process, WorkerCommand, paatp, wait_until};
use paatp_tests::reference::{Reduction, compare};
use paatp_tests::spread::{Spread, cpu_model, cpus, kernel_release};
use paatp_tests::{Dtype, Gradient, Lab, Layout};
use paatp_transport::rate::Algorithm;
use serde::Serialize;

/// Ranks of the jobs.
const WORLDS: [usize; 3] = [2, 8, 16];
/// Lanes of a chunk.
const LANES: usize = 352;
/// Bytes of a standard slot.
const SLOT_BYTES: u32 = 1472;
/// Longest run of all jobs.
const DEADLINE: Duration = Duration::from_secs(600);
/// Share of its chunks that each job must have done before anything is measured, and that ends the measurement.
const BEGIN: f64 = 0.05;
const END: f64 = 0.95;
/// How often progress is read.
const LOOK: Duration = Duration::from_millis(20);

/// Jobs of 2, 8 and 16 ranks in one pool, tuned and untuned by turns.
#[derive(Parser)]
#[command(name = "bench-share", max_term_width = 110)]
struct Args {
    /// Measurements of either kind.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Slots of the pool, a power of two.
    #[arg(long, default_value_t = 64)]
    pool: u32,
    /// Window of each job, in chunks.
    #[arg(long, default_value_t = 64)]
    window: u32,
    /// Chunks of each job.
    #[arg(long, default_value_t = 20_000)]
    chunks: usize,
    /// Rate controller of the workers.
    #[arg(long, default_value = "pa-atp")]
    controller: Algorithm,
    /// Writes the figures to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// One measurement.
#[derive(Clone, Debug, Serialize)]
struct Run {
    tuned: bool,
    seconds: f64,
    /// Chunks a second, by job.
    goodputs: Vec<f64>,
    jain_index: f64,
    /// Places in the pool at the end of the measurement, by job.
    places: Vec<u8>,
    /// Contributions that found no slot.
    crowded: u64,
}

#[derive(Serialize)]
struct Report {
    schema_version: u32,
    kernel: String,
    cpu: String,
    cpus: usize,
    worlds: [usize; 3],
    pool_slots: u32,
    window: u32,
    chunks: usize,
    controller: &'static str,
    runs: Vec<Run>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let lab = Lab::new(Layout::workers(WORLDS[2]))?;
    let input = synthetic(1, 5, &[(Dtype::F32, args.chunks * LANES)], 1.0).swap_remove(0);
    println!(
        "{} with {} CPUs, kernel {}; {} slots, windows of {} chunks, {} chunks a job, {}",
        cpu_model(),
        cpus(),
        kernel_release(),
        args.pool,
        args.window,
        args.chunks,
        args.controller
    );
    println!(
        "{:<8} {:>6} {:>8}  {:<27} {:<10} {:>9}",
        "", "Jain", "seconds", "chunks/s of 2, 8, 16", "places", "crowded"
    );
    let mut runs = Vec::new();
    for round in 0..args.rounds {
        // By turns, and the order as well.
        for tuned in [round % 2 == 0, round % 2 == 1] {
            let run = measure(&args, &lab, &input, tuned)?;
            println!(
                "{:<8} {:>6.3} {:>8.2}  {:<27} {:<10} {:>9}",
                if tuned { "tuned" } else { "untuned" },
                run.jain_index,
                run.seconds,
                run.goodputs.iter().map(|goodput| format!("{goodput:.0}")).collect::<Vec<_>>().join(", "),
                run.places.iter().map(u8::to_string).collect::<Vec<_>>().join(", "),
                run.crowded
            );
            runs.push(run);
        }
    }
    for tuned in [true, false] {
        let of = runs.iter().filter(|run| run.tuned == tuned).map(|run| run.jain_index).collect();
        println!("{}: Jain's index {:.3}", if tuned { "tuned" } else { "untuned" }, Spread::of(of));
    }
    if let Some(path) = &args.json {
        let report = Report {
            schema_version: 1,
            kernel: kernel_release(),
            cpu: cpu_model(),
            cpus: cpus(),
            worlds: WORLDS,
            pool_slots: args.pool,
            window: args.window,
            chunks: args.chunks,
            controller: args.controller.name(),
            runs,
        };
        std::fs::write(path, serde_json::to_string_pretty(&report)? + "\n")
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn name(world: usize) -> String {
    format!("of-{world}")
}

/// Starts an aggregator whose three jobs share a pool.
fn aggregator(args: &Args, lab: &Lab, folder: &Path, tuned: bool) -> Result<Aggregator> {
    let places = if tuned { "" } else { "pool_places = 8\n" };
    let mut text = format!("[node]\nmemory = 0\npool = {}\n{places}", args.pool * SLOT_BYTES);
    for world in WORLDS {
        text += &format!(
            "[[job]]\nname = \"{}\"\nworld = {world}\nwindow = {}\nslots = {}\nmemory = \"shared\"\n",
            name(world),
            args.window,
            (2 * args.window).next_power_of_two()
        );
    }
    let config = folder.join("paatp.toml");
    std::fs::write(&config, text)?;
    let mut command = lab.aggregator.namespace.command(paatp()?);
    command.args(["run", "--iface", &lab.aggregator.interface, "--xdp-mode", "native"]);
    command.args(["--port", &PORT.to_string(), "--token-file", "", "--config"]).arg(&config);
    Aggregator::watch(Process::spawn("the aggregator", command)?)
}

/// How far the jobs are: chunks that every rank has, by job.
fn floors(maps: &Maps) -> Result<Vec<u32>> {
    // A floor is the first word of a job's progress: its lower half is the number.
    let table = maps.array::<[u64; size_of::<Progress>() / 8]>("PROGRESS")?;
    (0..WORLDS.len() as u32).map(|job| Ok(table.get(&job, 0)?[0] as u32)).collect()
}

fn measure(args: &Args, lab: &Lab, input: &Gradient, tuned: bool) -> Result<Run> {
    const { assert!(WORLDS.len() <= MAX_JOBS) };
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("input.safetensors");
    input.write(&file)?;
    let aggregator = aggregator(args, lab, folder.path(), tuned)?;
    let maps = Maps::on(&lab.aggregator.namespace, &lab.aggregator.interface)?;
    let mut workers = Vec::new();
    for world in WORLDS {
        let files = folder.path().join(name(world));
        std::fs::create_dir(&files)?;
        for rank in 0..world {
            let mut command = WorkerCommand::new(lab, Family::V4, rank, world, &files);
            (command.job, command.controller) = (name(world), args.controller.name());
            (command.input, command.timeout) = (file.clone(), DEADLINE);
            workers.push((world, command.spawn(&lab.workers[rank])?, command.output));
        }
    }
    let reached = |share: f64| (args.chunks as f64 * share) as u32;
    wait_until("all jobs were under way", DEADLINE, || {
        Ok(floors(&maps)?.iter().all(|floor| *floor >= reached(BEGIN)))
    })?;
    let (begun, before) = (Instant::now(), floors(&maps)?);
    let (mut seconds, mut after) = (0.0, before.clone());
    while after.iter().all(|floor| *floor < reached(END)) {
        ensure!(begun.elapsed() < DEADLINE, "no job came to its end");
        std::thread::sleep(LOOK);
        (seconds, after) = (begun.elapsed().as_secs_f64(), floors(&maps)?);
    }
    let entries = maps.array::<PodOf<JobEntry>>("JOBS")?;
    let places = (0..WORLDS.len() as u32).map(|job| Ok(entries.get(&job, 0)?.0.k)).collect::<Result<_>>()?;
    let crowded = maps.counters()?.refused(Refusal::Crowded);
    ensure!(crowded > 0, "the pool was never full: nothing was shared; make it smaller (--pool)");
    for (world, mut worker, output) in workers {
        let finished = worker.wait(DEADLINE)?;
        ensure!(finished.is_success(), "a rank of {world} failed: {}", finished.output);
        check(world, input, &Gradient::read(&output)?, args)?;
    }
    aggregator.stop()?;
    let gained = |(after, before): (&u32, &u32)| f64::from(after.wrapping_sub(*before)) / seconds;
    let goodputs: Vec<f64> = after.iter().zip(&before).map(gained).collect();
    Ok(Run { tuned, seconds, jain_index: jain(&goodputs), goodputs, places, crowded })
}

/// The result is the sum of as many equal gradients as there are ranks.
fn check(world: usize, input: &Gradient, output: &Gradient, args: &Args) -> Result<()> {
    let inputs = vec![input.clone(); world];
    let chunking = paatp_tests::reference::Chunking { lanes: LANES, window: args.window as usize };
    let comparison = compare(&inputs, output, Reduction::Sum, chunking)?;
    ensure!(comparison.complaints.is_empty(), "a wrong sum of {world} ranks: {:?}", comparison.complaints);
    Ok(())
}
