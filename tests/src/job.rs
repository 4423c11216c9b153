//! One all-reduce in a lab, from files to files, and everything that can be known about it afterwards.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use paatp_common::Refusal;
use paatp_common::counter::Counters;
use tempfile::TempDir;

use crate::audit::Tables;
use crate::disturbance::{Counts, Direction, Disturbance, Rates};
use crate::gradients::Gradient;
use crate::kernel::Maps;
use crate::lab::{Family, Lab};
use crate::process::{Aggregator, AggregatorOptions, Finished, PORT, Process, WorkerCommand, wait_until};
use crate::reference::{Comparison, Reduction, compare};
use crate::report::Report;

/// Set to end all waiting, for example by a signal.
pub static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Refusals of the aggregator that a single flipped bit in header or payload can cause.
pub const CORRUPTIONS: [Refusal; 5] =
    [Refusal::BadMagic, Refusal::BadVersion, Refusal::BadKind, Refusal::BadHeaderCheck, Refusal::BadTag];

/// What to run.
#[derive(Clone, Debug)]
pub struct JobOptions {
    /// Version of IP between workers and aggregator.
    pub family: Family,
    /// Options of the aggregator; `world` is that of the gradients.
    pub aggregator: AggregatorOptions,
    /// What is computed.
    pub reduction: Reduction,
    /// How workers send and receive: `udp`, `af-xdp` or `auto`.
    pub io: &'static str,
    /// Rate controller of the workers; empty for the one that `paatp` takes by itself.
    pub controller: &'static str,
    /// Longest time that a worker goes without progress.
    pub timeout: Duration,
    /// What happens to requests on the way.
    pub requests: Rates,
    /// What happens to answers on the way.
    pub answers: Rates,
    /// Decides which packets it happens to; each rank has its own sequence.
    pub seed: u64,
}

impl JobOptions {
    /// A sum over IPv4 with the aggregator in native mode, undisturbed.
    #[must_use]
    pub fn world(world: usize) -> JobOptions {
        JobOptions {
            family: Family::V4,
            aggregator: AggregatorOptions::world(world),
            reduction: Reduction::Sum,
            io: "udp",
            controller: "",
            timeout: Duration::from_secs(30),
            requests: Rates::NONE,
            answers: Rates::NONE,
            seed: 1,
        }
    }
}

/// A job that runs.
#[derive(Debug)]
pub struct Running<'a> {
    /// The aggregator.
    pub aggregator: Aggregator,
    /// Its program's maps.
    pub maps: Maps,
    /// The workers, by rank; ranks that were left out are missing.
    pub workers: Vec<Process>,
    /// How they were started.
    pub commands: Vec<WorkerCommand>,
    /// Their disturbances, if any was asked for.
    pub disturbances: Vec<Disturbance>,
    lab: &'a Lab,
    folder: TempDir,
}

impl<'a> Running<'a> {
    /// Starts the aggregator and one worker for each gradient.
    ///
    /// # Errors
    /// Where something does not start.
    pub fn start(lab: &'a Lab, gradients: &[Gradient], options: &JobOptions) -> Result<Running<'a>> {
        let mut running = Running::prepare(lab, gradients, options)?;
        for rank in 0..gradients.len() {
            running.start_rank(rank)?;
        }
        Ok(running)
    }

    /// Starts the aggregator and writes the workers' files.
    ///
    /// # Errors
    /// Where something does not start.
    pub fn prepare(lab: &'a Lab, gradients: &[Gradient], options: &JobOptions) -> Result<Running<'a>> {
        let world = options.aggregator.world;
        ensure!(world <= lab.workers.len(), "the lab has {} workers, not {world}", lab.workers.len());
        let folder =
            tempfile::Builder::new().prefix("paatp-lab-").tempdir().context("no temporary folder")?;
        let aggregator = Aggregator::start(lab, &options.aggregator)?;
        let maps = Maps::on(&lab.aggregator.namespace, &lab.aggregator.interface)?;
        let mut commands = Vec::new();
        for (rank, gradient) in gradients.iter().enumerate() {
            let mut command = WorkerCommand::new(lab, options.family, rank, world, folder.path());
            command.job.clone_from(&options.aggregator.job);
            (command.reduction, command.timeout) = (options.reduction, options.timeout);
            (command.io, command.controller) = (options.io, options.controller);
            gradient.write(&command.input)?;
            commands.push(command);
        }
        let mut disturbances = Vec::new();
        if options.requests.any() || options.answers.any() {
            for rank in 0..world {
                let seed = options.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(rank as u64);
                let (requests, answers) = (options.requests, options.answers);
                disturbances.push(lab.disturb(rank, PORT..=PORT, seed, requests, answers)?);
            }
        }
        Ok(Running { aggregator, maps, workers: Vec::new(), commands, disturbances, lab, folder })
    }

    /// Starts the next worker. They have to be started in the order of [`Running::workers`].
    ///
    /// # Errors
    /// Where it cannot be started.
    pub fn start_rank(&mut self, rank: usize) -> Result<()> {
        self.workers.push(self.commands[rank].spawn(&self.lab.workers[rank])?);
        Ok(())
    }

    /// Keeps the folder with inputs, outputs and reports; says where it is.
    pub fn keep_files(&mut self) -> String {
        self.folder.disable_cleanup(true);
        self.folder.path().display().to_string()
    }

    /// Waits until all workers have ended, stops the aggregator, and gathers what there is.
    ///
    /// # Errors
    /// Where they do not end in time, or [`INTERRUPTED`] is set.
    pub fn finish(self, deadline: Duration) -> Result<JobResult> {
        self.finish_after(deadline, || {})
    }

    /// The same, and says when the workers have ended: before the aggregator is stopped.
    ///
    /// # Errors
    /// As [`Running::finish`].
    pub fn finish_after(mut self, deadline: Duration, ended: impl FnOnce()) -> Result<JobResult> {
        let end = Instant::now() + deadline;
        wait_until("all ranks had ended", deadline, || {
            ensure!(!INTERRUPTED.load(Ordering::Relaxed), "interrupted");
            if self.aggregator.process.has_ended()? {
                bail!("the aggregator ended early:\n{}", self.aggregator.process.output());
            }
            for worker in &mut self.workers {
                if !worker.has_ended()? {
                    return Ok(false);
                }
            }
            Ok(true)
        })
        .with_context(|| {
            let outputs = self.workers.iter().map(Process::output).collect::<Vec<_>>();
            format!("the ranks wrote: {outputs:#?}")
        })?;
        ended();
        let mut ranks = Vec::new();
        for (worker, command) in self.workers.iter_mut().zip(&self.commands) {
            let finished =
                worker.wait(end.saturating_duration_since(Instant::now()).max(Duration::from_secs(1)))?;
            ranks.push(RankResult {
                finished,
                report: command.report.is_file().then(|| Report::read(&command.report)).transpose()?,
                output: command.output.is_file().then(|| Gradient::read(&command.output)).transpose()?,
            });
        }
        let (mut requests, mut answers) = (Counts::default(), Counts::default());
        for disturbance in &self.disturbances {
            requests.absorb(&disturbance.counts(Direction::Egress)?);
            answers.absorb(&disturbance.counts(Direction::Ingress)?);
        }
        // The last packets of the workers may still be on their way. That they never arrive shows in the result.
        let _ = wait_until("every corrupted request was seen", Duration::from_millis(500), || {
            Ok(corruptions(&self.maps.counters()?) >= requests.corrupted)
        });
        let counters = self.maps.counters()?;
        let broken_rules = broken_rules(&self.maps, &ranks, &counters)?;
        let ready = self.aggregator.ready.clone();
        let aggregator = self.aggregator.stop()?;
        let lost_elsewhere = self.lab.dropped_by_the_kernel()?;
        let arrived_late = self.lab.arrived_late()?;
        Ok(JobResult {
            ranks,
            counters,
            broken_rules,
            requests,
            answers,
            ready,
            aggregator,
            lost_elsewhere,
            arrived_late,
        })
    }
}

/// What the aggregator's tables, read before it stops, show of broken rules.
fn broken_rules(maps: &Maps, ranks: &[RankResult], counters: &Counters) -> Result<Vec<String>> {
    let reports: Vec<_> = ranks.iter().filter_map(|rank| rank.report.as_ref()).collect();
    // Reports tell the generation; without one there was no operation that could be audited.
    let Some(generation) = reports.iter().find_map(|report| report.0["generation"].as_u64()) else {
        return Ok(Vec::new());
    };
    let tables = Tables::read(maps, u32::try_from(generation)?)?;
    let chunks = reports[0].0["chunks"].as_u64().context("a report without chunks")?;
    let all_complete = reports.iter().all(|report| report.0["all_ranks_complete"] == true);
    Ok(if reports.len() == usize::from(tables.job.world) && all_complete {
        tables.broken_rules_at_the_end(chunks, counters)
    } else {
        tables.broken_rules()
    })
}

/// Runs one job from beginning to end.
///
/// # Errors
/// Where something does not start or end.
pub fn run(lab: &Lab, gradients: &[Gradient], options: &JobOptions) -> Result<JobResult> {
    Running::start(lab, gradients, options)?.finish(Duration::from_secs(180))
}

/// Packets that the aggregator found to be corrupted.
#[must_use]
pub fn corruptions(counters: &Counters) -> u64 {
    CORRUPTIONS.iter().map(|refusal| counters.refused(*refusal)).sum()
}

/// How one rank ended.
#[derive(Clone, Debug)]
pub struct RankResult {
    /// Its process.
    pub finished: Finished,
    /// The report that it wrote.
    pub report: Option<Report>,
    /// The result that it wrote.
    pub output: Option<Gradient>,
}

/// How a job ended.
#[derive(Clone, Debug)]
pub struct JobResult {
    /// By rank.
    pub ranks: Vec<RankResult>,
    /// The aggregator's counters.
    pub counters: Counters,
    /// What its tables showed, when the ranks had ended, that the rules forbid.
    pub broken_rules: Vec<String>,
    /// What was done to all requests.
    pub requests: Counts,
    /// What was done to all answers.
    pub answers: Counts,
    /// What the aggregator said when it was ready.
    pub ready: String,
    /// The aggregator's process.
    pub aggregator: Finished,
    /// Packets that full queues of the kernel lost.
    pub lost_elsewhere: u64,
    /// Answers that arrived after their worker had closed its socket.
    pub arrived_late: u64,
}

impl JobResult {
    /// The ranks' digests if all have a result.
    #[must_use]
    pub fn digests(&self) -> Option<Vec<String>> {
        self.ranks.iter().map(|rank| Some(rank.output.as_ref()?.digest())).collect()
    }

    /// Bytes of a rank's tensors a second, of a run in which every rank got the same.
    ///
    /// # Errors
    /// Where it was no such run, so that its time means nothing.
    pub fn throughput(&self) -> Result<f64> {
        let digests = self.digests().context("not every rank has a result")?;
        ensure!(digests.windows(2).all(|pair| pair[0] == pair[1]), "ranks have different results");
        let reports: Vec<_> = self.ranks.iter().filter_map(|rank| rank.report.as_ref()).collect();
        ensure!(reports.len() == self.ranks.len(), "a rank wrote no report");
        // The rank that was ready last: the others' times hold their waiting for it.
        let seconds = reports.iter().filter_map(|report| report.seconds()).fold(f64::INFINITY, f64::min);
        let bytes = reports.first().and_then(|report| report.0["tensor_bytes"].as_f64());
        Ok(bytes.context("a report without tensor_bytes")? / seconds)
    }

    /// Corrupted answers that workers refused.
    #[must_use]
    pub fn corruptions_seen_by_workers(&self) -> u64 {
        self.sum(Report::corrupted_headers) + self.sum(Report::corrupted_payloads)
    }

    /// Sum of something over all reports.
    #[must_use]
    pub fn sum(&self, of: impl Fn(&Report) -> u64) -> u64 {
        self.ranks.iter().filter_map(|rank| rank.report.as_ref()).map(of).sum()
    }

    /// What is wrong with the corruption counts: every corrupted packet must have been refused, and for its corruption,
    /// unless the kernel lost it in a full queue, it came after its worker had ended, or it was an answer with a result so
    /// old that its worker did not know the chunk any more, and could not check it.
    #[must_use]
    pub fn corruption_complaints(&self) -> Vec<String> {
        let mut complaints = Vec::new();
        let lost_answers = self.lost_elsewhere + self.arrived_late;
        let unchecked = self.sum(|report| report.statistic("unexpected_results"));
        let bad_tags = self.counters.refused(Refusal::BadTag);
        let sides = [
            (
                "requests in the header",
                self.requests.corrupted_header,
                corruptions(&self.counters) - bad_tags,
                self.lost_elsewhere,
            ),
            ("requests in the payload", self.requests.corrupted_payload, bad_tags, self.lost_elsewhere),
            (
                "answers in the header",
                self.answers.corrupted_header,
                self.sum(Report::corrupted_headers),
                lost_answers,
            ),
            (
                "answers in the payload",
                self.answers.corrupted_payload,
                self.sum(Report::corrupted_payloads),
                lost_answers + unchecked,
            ),
        ];
        for (what, injected, seen, lost) in sides {
            if seen > injected {
                complaints.push(format!("{injected} {what} were corrupted, but {seen} were refused as such"));
            } else if injected - seen > lost {
                complaints.push(format!(
                    "{injected} {what} were corrupted and {seen} were seen; at most {lost} can have been lost elsewhere"
                ));
            }
        }
        complaints
    }

    /// Compares each rank's result with the float64 reduction, and the ranks with each other.
    ///
    /// # Errors
    /// Where the inputs do not belong together.
    pub fn check(&self, inputs: &[Gradient], options: &JobOptions) -> Result<Verdict> {
        let mut verdict = Verdict::default();
        for (rank, result) in self.ranks.iter().enumerate() {
            let finished = &result.finished;
            if !finished.is_success() {
                verdict.complain(format!("rank {rank} ended with {}: {}", finished.status, finished.output));
            }
            let comparison = match &result.output {
                // What is the same as rank 0's is not told again.
                Some(output) if rank > 0 && self.ranks[0].output.as_ref() == Some(output) => {
                    verdict.comparisons[0].clone()
                }
                Some(output) => {
                    let comparison =
                        compare(inputs, output, options.reduction, options.aggregator.chunking())?;
                    comparison
                        .complaints
                        .iter()
                        .for_each(|what| verdict.complain(format!("rank {rank}: {what}")));
                    comparison
                }
                None => {
                    verdict.complain(format!("rank {rank}: no result"));
                    Comparison { complaints: vec!["no result".into()], ..Comparison::default() }
                }
            };
            verdict.comparisons.push(comparison);
        }
        match self.digests() {
            Some(digests) => {
                if let Some(rank) = digests.iter().position(|digest| *digest != digests[0]) {
                    verdict.complain(format!("rank {rank}'s result is not that of rank 0"));
                }
            }
            None => verdict.complain("not every rank has a result".into()),
        }
        if !self.aggregator.is_success() {
            let Finished { status, output, .. } = &self.aggregator;
            verdict.complain(format!("the aggregator ended with {status}: {output}"));
        }
        self.broken_rules.iter().for_each(|what| verdict.complain(what.clone()));
        self.corruption_complaints().into_iter().for_each(|what| verdict.complain(what));
        Ok(verdict)
    }
}

/// Whether a job's results are right.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// By rank.
    pub comparisons: Vec<Comparison>,
    /// Everything that is wrong.
    pub complaints: Vec<String>,
}

impl Verdict {
    fn complain(&mut self, what: String) {
        self.complaints.push(what);
    }

    /// Nothing is wrong.
    #[must_use]
    pub fn is_right(&self) -> bool {
        self.complaints.is_empty()
    }
}
