//! Three ranks, an aggregator with a job for each policy, and gates on their ways: what brings an operation to a step and
//! holds it there without measuring time.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use paatp_common::Seq;
use paatp_common::job::JobEntry;
use paatp_common::progress::RankRecord;
use paatp_tests::audit::progress;
use paatp_tests::http::ask;
use paatp_tests::kernel::{Maps, PodOf, SlotMemory};
use paatp_tests::lab::Family;
use paatp_tests::pins::Pins;
use paatp_tests::process::{Aggregator, AggregatorOptions, PORT, WorkerCommand, wait_until};
use paatp_tests::{Direction, Disturbance, Dtype, Gradient, Lab, Layout, Process, Rates, Tensor};
use serde_json::Value;
use tempfile::TempDir;

/// Ranks of every job.
pub const WORLD: usize = 3;
/// Chunks of every operation; the exponent round comes before them as chunk 0.
pub const CHUNKS: u32 = 20;
/// The chunk after the last one.
pub const END: u32 = CHUNKS + 1;
/// Chunks that a rank may contribute beyond its results.
pub const WINDOW: u32 = 4;
/// For how long a rank may hold the others up.
pub const JOB_TIMEOUT: Duration = Duration::from_secs(4);

const LANES: usize = 32;
const SLOTS: u32 = 8;
/// What starting, ending and a busy machine may take.
const SLACK: Duration = Duration::from_secs(30);

/// What the job does without a rank that is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    Abort,
    Shrink,
}

impl Policy {
    /// The job that has it.
    pub const fn job(self) -> &'static str {
        match self {
            Policy::Abort => "abort",
            Policy::Shrink => "shrink",
        }
    }
}

/// A lab with an aggregator; one operation at a time runs on it.
pub struct Bed {
    pub lab: Lab,
    pub aggregator: Aggregator,
    options: AggregatorOptions,
    maps: Maps,
    ways: Vec<Disturbance>,
    _folder: TempDir,
}

impl Bed {
    /// An aggregator that pins what it loads outlives its own death.
    pub fn new(pins: Option<Arc<Pins>>) -> Result<Bed> {
        let lab = Lab::new(Layout::workers(WORLD))?;
        let folder = tempfile::tempdir()?;
        let config = folder.path().join("jobs.toml");
        let job = |policy: Policy| {
            let (name, timeout) = (policy.job(), JOB_TIMEOUT.as_secs());
            format!(
                "[[job]]\nname = \"{name}\"\nworld = {WORLD}\nlanes = {LANES}\nslots = {SLOTS}\nwindow = {WINDOW}\n\
                 timeout = \"{timeout}s\"\non_failure = \"{name}\"\n"
            )
        };
        fs::write(&config, job(Policy::Abort) + &job(Policy::Shrink))?;
        let more = vec!["--config".into(), config.display().to_string()];
        let options = AggregatorOptions { pins, more, ..AggregatorOptions::world(WORLD) };
        let aggregator = Aggregator::start(&lab, &options)?;
        let maps = Maps::on(&lab.aggregator.namespace, &lab.aggregator.interface)?;
        let way = |rank| lab.disturb(rank, PORT..=PORT, rank as u64, Rates::NONE, Rates::NONE);
        let ways = (0..WORLD).map(way).collect::<Result<_>>()?;
        Ok(Bed { lab, aggregator, options, maps, ways, _folder: folder })
    }

    /// Opens all gates, and loses so many packets from now on, in both directions.
    pub fn reset(&mut self, loss: f64) -> Result<()> {
        let rates = Rates { loss, ..Rates::NONE };
        for way in &mut self.ways {
            way.open()?;
            way.change(rates, rates)?;
        }
        Ok(())
    }

    /// Requests that a rank has sent so far, in all its plays.
    fn requests(&self, rank: usize) -> Result<u64> {
        let counts = self.ways[rank].counts(Direction::Egress)?;
        Ok(counts.seen + counts.gated)
    }

    /// The gate of a rank's requests.
    pub fn gate(&mut self, rank: usize) -> &mut Disturbance {
        &mut self.ways[rank]
    }

    /// The daemon is stopped or goes on.
    pub fn daemon(&self, signal: Signal) -> Result<()> {
        self.aggregator.process.signal(signal)
    }

    /// The daemon is killed and another one takes over.
    pub fn restart(&mut self) -> Result<()> {
        self.aggregator.process.kill();
        self.aggregator = Aggregator::start(&self.lab, &self.options)?;
        Ok(())
    }

    fn ask(&self, path: &str) -> Result<Value> {
        let address = SocketAddr::from(([127, 0, 0, 1], PORT));
        let response = ask(&self.lab.aggregator.namespace, address, "GET", path)?;
        ensure!(response.status == 200, "{}", response.body);
        Ok(serde_json::from_str(&response.body)?)
    }

    /// A job as the API shows it.
    pub fn job(&self, name: &str) -> Result<Value> {
        self.ask(&format!("/v1/jobs/{name}"))
    }

    /// When the daemon last noted how far a job is, in seconds since its start: about once a second, after it has looked
    /// for ranks that are in the way.
    pub fn looked_at(&self, job: &str) -> Result<f64> {
        let history = self.ask(&format!("/v1/history?job={job}"))?;
        let samples = history["uptime_seconds"].as_array().context("a history without times")?;
        Ok(samples.last().and_then(Value::as_f64).unwrap_or(0.0))
    }

    /// Waits until the daemon has seen more than once that a rank is in the way and does not move.
    pub fn wait_in_the_way(&self, job: &str, rank: usize) -> Result<()> {
        /// More than the time between two looks.
        const SEEN_TWICE: f64 = 0.3;
        wait_until("the daemon had seen it", SLACK, || {
            let status = self.ask("/v1/status")?;
            let mut jobs = status["jobs"].as_array().into_iter().flatten();
            let shown = jobs.find(|shown| shown["name"] == job).context("no such job")?;
            Ok(shown["ranks"][rank]["in_the_way_seconds"].as_f64().is_some_and(|time| time > SEEN_TWICE))
        })
    }

    fn ranks(&self, job: &str, field: &str) -> Result<Vec<usize>> {
        Ok(serde_json::from_value(self.job(job)?[field].clone())?)
    }

    /// Waits until just these ranks wait for the others.
    pub fn wait_joining(&self, job: &str, mut ranks: Vec<usize>) -> Result<()> {
        ranks.sort_unstable();
        wait_until("the ranks had joined", SLACK, || Ok(self.ranks(job, "waiting_ranks")? == ranks))
    }

    /// The ranks that the aggregator took for lost.
    pub fn lost(&self, job: &str) -> Result<Vec<usize>> {
        let mut ranks = self.ranks(job, "lost_ranks")?;
        ranks.sort_unstable();
        Ok(ranks)
    }

    fn number(&self, job: &str) -> Result<u32> {
        let number = self.job(job)?["job"].as_u64().context("a job without a number")?;
        Ok(u32::try_from(number)?)
    }

    fn entry(&self, number: u32) -> Result<JobEntry> {
        Ok(self.maps.array::<PodOf<JobEntry>>("JOBS")?.get(&number, 0)?.0)
    }
}

/// How a rank's process ended.
#[derive(Debug)]
pub struct Ending {
    pub is_success: bool,
    pub output: String,
    /// Whose values are in each chunk of the result, as bits.
    pub result: Option<Vec<u32>>,
}

/// One operation: a process for each rank.
pub struct Play {
    pub job: &'static str,
    number: u32,
    /// That of the generation that runs; of the one before until [`Play::wait_formed`].
    generation: u32,
    commands: Vec<WorkerCommand>,
    workers: Vec<Option<Process>>,
    /// Requests that the ranks had sent before.
    requests: Vec<u64>,
    timeout: Duration,
    _folder: TempDir,
}

impl Play {
    /// Nobody is started yet. `timeout` is that of the workers.
    pub fn new(bed: &Bed, job: &'static str, timeout: Duration) -> Result<Play> {
        let folder = tempfile::tempdir()?;
        let number = bed.number(job)?;
        let command = |rank| -> Result<WorkerCommand> {
            let mut command = WorkerCommand::new(&bed.lab, Family::V4, rank, WORLD, folder.path());
            (command.job, command.timeout) = (job.into(), timeout);
            // A bit for each rank: the sum says who is in it.
            let values = vec![f64::from(1u32 << rank); CHUNKS as usize * LANES];
            let gradient = Gradient { tensors: vec![Tensor::new("w", Dtype::I32, &values)] };
            gradient.write(&command.input)?;
            Ok(command)
        };
        Ok(Play {
            job,
            number,
            generation: bed.entry(number)?.generation,
            commands: (0..WORLD).map(command).collect::<Result<_>>()?,
            workers: (0..WORLD).map(|_| None).collect(),
            requests: (0..WORLD).map(|rank| bed.requests(rank)).collect::<Result<_>>()?,
            timeout,
            _folder: folder,
        })
    }

    /// The generation that runs is another play's, which this one is to follow.
    pub fn follow(&mut self, other: &Play) {
        self.generation = other.generation;
    }

    pub fn start(&mut self, bed: &Bed, rank: usize) -> Result<()> {
        self.workers[rank] = Some(self.commands[rank].spawn(&bed.lab.workers[rank])?);
        Ok(())
    }

    pub fn signal(&self, rank: usize, signal: Signal) -> Result<()> {
        self.workers[rank].as_ref().context("not started")?.signal(signal)
    }

    /// Waits until the tables have the generation of these ranks.
    pub fn wait_formed(&mut self, bed: &Bed) -> Result<()> {
        let before = self.generation;
        wait_until("the generation was formed", SLACK, || {
            self.generation = bed.entry(self.number)?.generation;
            Ok(self.generation != before && self.generation != 0)
        })
        .with_context(|| self.outputs())
    }

    /// Waits until every rank has sent a request, so that it has its grant.
    pub fn wait_granted(&self, bed: &Bed) -> Result<()> {
        wait_until("all ranks had their grants", SLACK, || {
            for (rank, before) in self.requests.iter().enumerate() {
                if bed.requests(rank)? <= *before {
                    return Ok(false);
                }
            }
            Ok(true)
        })
        .with_context(|| self.outputs())
    }

    /// What the data plane knows of a rank.
    fn reached(&self, bed: &Bed, rank: usize) -> Result<RankRecord> {
        Ok(progress(&bed.maps, self.number)?.reached(self.generation, rank))
    }

    /// Waits until a rank has contributed all chunks below one, and can do no more.
    pub fn wait_contributed(&self, bed: &Bed, rank: usize, chunks: u32) -> Result<()> {
        wait_until("a rank had contributed", SLACK, || {
            let contributed = self.reached(bed, rank)?.contributed;
            ensure!(
                !Seq(chunks).is_before(contributed),
                "rank {rank} contributed {contributed:?}, not {chunks}"
            );
            Ok(contributed == Seq(chunks))
        })
        .with_context(|| self.outputs())
    }

    /// Waits until a rank has acknowledged all results.
    pub fn wait_acknowledged(&self, bed: &Bed, rank: usize) -> Result<()> {
        wait_until("a rank had all results", SLACK, || Ok(self.reached(bed, rank)?.acked == Seq(END)))
            .with_context(|| self.outputs())
    }

    /// Waits until a rank's contribution to the last chunk is in.
    pub fn wait_for_its_last(&self, bed: &Bed, rank: usize) -> Result<()> {
        let (entry, last) = (bed.entry(self.number)?, Seq(END - 1));
        let memory = SlotMemory::map(&bed.maps, "SLOTS")?;
        wait_until("the last contribution was in", SLACK, || {
            let (slot, _) = memory.read((entry.first_slot + last.0 % entry.slots) as usize);
            Ok(slot.holds(self.generation, last) && slot.bits >> rank & 1 == 1)
        })
        .with_context(|| self.outputs())
    }

    /// Waits until every rank has written its result: what is left to do is to say so.
    pub fn wait_written(&mut self) -> Result<()> {
        let outputs = self.outputs();
        wait_until("all results were written", SLACK, || {
            Ok(self.commands.iter().all(|command| command.output.is_file()))
        })
        .context(outputs)?;
        for worker in self.workers.iter_mut().flatten() {
            ensure!(!worker.has_ended()?, "it left although nobody took that");
        }
        Ok(())
    }

    /// Waits until a rank's process has ended: by its own timeout at the latest.
    pub fn end(&mut self, rank: usize) -> Result<Ending> {
        let mut worker = self.workers[rank].take().context("not started")?;
        // It may first linger, then leave.
        let finished = worker.wait(2 * self.timeout + SLACK)?;
        let output = &self.commands[rank].output;
        let result = output.is_file().then(|| contributors(output)).transpose()?;
        Ok(Ending { is_success: finished.is_success(), output: finished.output, result })
    }

    /// What the ranks wrote so far, for messages.
    fn outputs(&self) -> String {
        let output = |(rank, worker): (usize, &Option<Process>)| {
            format!("rank {rank}: {}", worker.as_ref().map(Process::output).unwrap_or_default())
        };
        self.workers.iter().enumerate().map(output).collect::<Vec<_>>().join("\n")
    }
}

/// Whose values are in each chunk of a result.
fn contributors(path: &Path) -> Result<Vec<u32>> {
    let gradient = Gradient::read(path)?;
    let tensor = gradient.tensor("w").context("a result without the tensor")?;
    let values = tensor.values();
    ensure!(values.len() == CHUNKS as usize * LANES, "{} values", values.len());
    let chunk = |lanes: &[f64]| {
        if lanes.iter().any(|lane| lane.to_bits() != lanes[0].to_bits()) {
            bail!("a chunk of several sums: {lanes:?}");
        }
        Ok(lanes[0] as u32)
    };
    values.chunks(LANES).map(chunk).collect()
}
