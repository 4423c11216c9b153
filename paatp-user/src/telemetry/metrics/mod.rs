//! Metrics for Prometheus: the snapshot in the text format, read when it is asked for.
//!
//! A registry of our own (no global one) holds a [`Source`] for each part of the node. Each reads on a thread of its own and
//! within a deadline, so that one that fails or hangs costs its own metrics and no others.

pub mod list;
pub mod server;
pub mod source;

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use paatp_common::counter::{Event, Refusal};
use paatp_common::limits::MAX_JOBS;
use paatp_common::switch::Count;
use prometheus::process_collector::ProcessCollector;
use prometheus::{Encoder, Registry, TextEncoder};
use serde::Serialize;
use tokio::sync::Semaphore;

use crate::control::membership::Facts;
use crate::control::protocol::{JobState, Sync};
use crate::engine::AttachedMode;

use super::Telemetry;
use super::snapshot::{JobSnapshot, RankSnapshot};
use list::{Kind, Metric};
use source::{Samples, Source};

/// What the text format is called. Prometheus 3 refuses answers without it.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Most ranks that have series of their own, over all jobs: 7,168 series. Jobs whose ranks do not fit any more are shown
/// without them.
pub const MAX_RANKS_SHOWN: usize = 1024;

/// Bytes of a lane.
const LANE_BYTES: u64 = 4;

/// Reads the control plane's facts; may block.
pub type ReadFacts = Arc<dyn Fn() -> Facts + Send + std::marker::Sync>;

/// Scrapes at a time.
const TURNS: usize = 1;

/// Makes scrapes.
pub struct Exporter {
    registry: Registry,
    turns: Arc<Semaphore>,
}

impl Exporter {
    /// Of what `telemetry` sees and `facts` knows.
    ///
    /// # Errors
    /// If the list of metrics contradicts itself.
    pub fn new(telemetry: &Telemetry, facts: ReadFacts) -> prometheus::Result<Exporter> {
        let registry = Registry::new();
        let dropped = Arc::new(AtomicU64::new(0));
        let add = |name, metrics: &[Metric], read: Arc<source::Read>| {
            registry.register(Box::new(Source::new(name, metrics.to_vec(), read)?))
        };
        let (seen, known) = (telemetry.clone(), facts.clone());
        let count = dropped.clone();
        add("jobs", list::JOBS, Arc::new(move |samples| read_jobs(&seen, &known(), &count, samples)))?;
        let seen = telemetry.clone();
        add("counters", &list::counters(), Arc::new(move |samples| read_counters(&seen, samples)))?;
        if telemetry.switch().is_some() {
            let seen = telemetry.clone();
            add("switch", list::SWITCH, Arc::new(move |samples| read_switch(&seen, samples)))?;
        }
        let seen = telemetry.clone();
        add("cost", list::COST, Arc::new(move |samples| read_cost(&seen, samples)))?;
        add(
            "node",
            list::NODE,
            Arc::new(move |samples| {
                read_node(&facts(), samples);
                Ok(())
            }),
        )?;
        let seen = telemetry.clone();
        add(
            "program",
            list::PROGRAM,
            Arc::new(move |samples| {
                read_program(&seen, &dropped, samples);
                Ok(())
            }),
        )?;
        registry.register(Box::new(ProcessCollector::for_self()))?;
        Ok(Exporter { registry, turns: Arc::new(Semaphore::new(TURNS)) })
    }

    /// All metrics as text. Blocks, for the deadlines of its parts at most.
    ///
    /// # Errors
    /// If the text cannot be made.
    pub fn scrape(&self) -> prometheus::Result<Vec<u8>> {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(text)
    }
}

fn read_program(telemetry: &Telemetry, dropped: &AtomicU64, samples: &mut Samples) {
    let identity = telemetry.identity();
    let (build, attachment) = (&identity.build, &identity.attachment);
    samples.push(&list::BUILD_INFO, &[&build.version, &build.object_sha256], 1.0);
    for mode in [AttachedMode::Native, AttachedMode::Generic].map(|mode| mode.to_string()) {
        let is_it = f64::from(u8::from(mode == attachment.mode));
        samples.push(&list::XDP_ATTACHED, &[&attachment.interface, &mode], is_it);
    }
    samples.push(&list::CORE_LOOP_AGE, &[], telemetry.core_age(Instant::now()).as_secs_f64());
    samples.push(&list::DROPPED_SERIES, &[], dropped.load(Ordering::Relaxed) as f64);
}

fn read_node(facts: &Facts, samples: &mut Samples) {
    let node = &facts.node;
    for state in JobState::ALL {
        let count = facts.jobs.iter().filter(|job| job.status.state == state).count();
        samples.push(&list::JOBS_BY_STATE, &[state.name()], count as f64);
    }
    samples.push(&list::DRAINING, &[], f64::from(u8::from(node.draining)));
    samples.push(&list::CLOSING_JOBS, &[], node.closing_jobs.into());
    samples.push(&list::SLOTS, &[], node.slots.into());
    samples.push(&list::FREE_SLOTS, &[], node.free_slots.into());
    samples.push(&list::SLOT_SIZE, &[], node.slot_bytes.into());
}

fn read_counters(telemetry: &Telemetry, samples: &mut Samples) -> Result<(), String> {
    let counters = telemetry.view().counters().map_err(|cause| cause.to_string())?;
    for refusal in Refusal::ALL {
        samples.push(&list::REFUSED, &[refusal.name()], counters.refused(*refusal) as f64);
    }
    for event in Event::ALL {
        samples.push(&list::event(*event), &[], counters.noted(*event) as f64);
    }
    Ok(())
}

/// What the switch said when it was last asked: nothing waits for it here.
fn read_switch(telemetry: &Telemetry, samples: &mut Samples) -> Result<(), String> {
    let Some(report) = telemetry.switch() else { return Ok(()) };
    let counters = telemetry.view().counters().map_err(|cause| cause.to_string())?;
    let switch = report.snapshot(&counters);
    samples.push(&list::SWITCH_UP, &[], f64::from(u8::from(switch.state.is_up())));
    if let Some(age) = switch.contact_age_seconds {
        samples.push(&list::SWITCH_CONTACT_AGE, &[], age);
    }
    samples.push(&list::SWITCH_ENTRIES, &[], switch.entries as f64);
    for (name, is_on) in [("true", true), ("false", false)] {
        let jobs = switch.jobs.iter().filter(|job| job.absent.is_none() == is_on).count();
        samples.push(&list::SWITCH_JOBS, &[name], jobs as f64);
    }
    samples.push(&list::SWITCH_REFUSED, &[], switch.refused_changes as f64);
    samples.push(&list::SWITCH_REPAIRED, &[], switch.repaired_entries as f64);
    for (event, count) in &switch.counters {
        samples.push(&list::SWITCH_PACKETS, &[event], *count as f64);
    }
    samples.push(&list::ADDED, &["switch"], switch.added.by_switch as f64);
    samples.push(&list::ADDED, &["xdp"], switch.added.by_xdp as f64);
    Ok(())
}

fn read_cost(telemetry: &Telemetry, samples: &mut Samples) -> Result<(), String> {
    if let Some(cost) = telemetry.view().cost().map_err(|cause| cause.to_string())? {
        samples.push(&list::RUN_TIME, &[], cost.run_time.as_secs_f64());
        samples.push(&list::RUNS, &[], cost.runs as f64);
    }
    Ok(())
}

fn read_jobs(
    telemetry: &Telemetry,
    facts: &Facts,
    dropped: &AtomicU64,
    samples: &mut Samples,
) -> Result<(), String> {
    let (jobs, problems) = telemetry.jobs(facts);
    let (mut shown, mut left_out) = (0, 0);
    for job in jobs.iter().take(MAX_JOBS) {
        read_job(job, samples);
        if shown + job.ranks.len() > MAX_RANKS_SHOWN {
            left_out += job.ranks.len() * RANK_METRICS;
            continue;
        }
        shown += job.ranks.len();
        let lane_bytes = u64::from(job.status.lanes) * LANE_BYTES;
        job.ranks.iter().for_each(|rank| read_rank(&job.status.name, lane_bytes, rank, samples));
    }
    dropped.store(left_out as u64, Ordering::Relaxed);
    if problems.is_empty() { Ok(()) } else { Err(problems.join("; ")) }
}

/// Series of each rank.
const RANK_METRICS: usize = 7;

fn read_job(job: &JobSnapshot, samples: &mut Samples) {
    let status = &job.status;
    let name = [status.name.as_str()];
    let running = status.generation.is_some();
    let chunk_bytes = u64::from(status.lanes) * LANE_BYTES;
    let open = job.oldest_open_slot.as_ref().map_or(0.0, |open| open.age_seconds);
    samples.push(&list::JOB_INFO, &[&status.name, sync_name(status.sync)], 1.0);
    if let Some(limit) = staleness_limit(status.sync) {
        samples.push(&list::JOB_STALENESS, &name, limit.into());
    }
    samples.push(&list::JOB_RANKS, &name, status.world.into());
    samples.push(&list::JOB_RUNNING, &name, f64::from(u8::from(running)));
    samples.push(&list::JOB_MISSING_RANKS, &name, status.missing_ranks.len() as f64);
    samples.push(&list::JOB_LOST_RANKS, &name, status.lost_ranks.len() as f64);
    samples.push(&list::JOB_STALL, &name, job.stall.as_ref().map_or(0.0, |stall| stall.seconds));
    samples.push(&list::JOB_LAG, &name, job.lag_chunks.into());
    samples.push(&list::JOB_COMPLETED, &name, job.completed_chunks as f64);
    samples.push(&list::JOB_COMPLETED_BYTES, &name, (job.completed_chunks * chunk_bytes) as f64);
    samples.push(&list::JOB_SLOTS, &name, status.slots.into());
    if let Some(in_use) = job.slots_in_use {
        samples.push(&list::JOB_SLOTS_IN_USE, &name, in_use.into());
    }
    samples.push(&list::JOB_OPEN_AGE, &name, open);
}

fn read_rank(job: &str, chunk_bytes: u64, rank: &RankSnapshot, samples: &mut Samples) {
    let number = rank.rank.to_string();
    let labels = [job, number.as_str()];
    samples.push(&list::RANK_CONTRIBUTED, &labels, rank.contributed as f64);
    samples.push(&list::RANK_CONTRIBUTED_BYTES, &labels, (rank.contributed * chunk_bytes) as f64);
    samples.push(&list::RANK_ACKNOWLEDGED, &labels, rank.acknowledged as f64);
    samples.push(&list::RANK_BUSY, &labels, rank.busy as f64);
    samples.push(&list::RANK_MARKS, &labels, rank.marks as f64);
    samples.push(&list::RANK_LAG, &labels, rank.lag_chunks.into());
    samples.push(&list::RANK_IN_THE_WAY, &labels, rank.in_the_way_seconds.unwrap_or(0.0));
}

/// Iterations that may begin before the results of earlier ones are there.
const fn staleness_limit(sync: Sync) -> Option<u32> {
    match sync {
        Sync::Bsp | Sync::Quorum { .. } => Some(0),
        Sync::Ssp { staleness, .. } => Some(staleness),
        Sync::Asp { .. } => None,
    }
}

const fn sync_name(sync: Sync) -> &'static str {
    match sync {
        Sync::Bsp => "bsp",
        Sync::Quorum { .. } => "quorum",
        Sync::Ssp { .. } => "ssp",
        Sync::Asp { .. } => "asp",
    }
}

/// All metrics, in the groups in which they are documented.
#[must_use]
pub fn all() -> Vec<(&'static str, Vec<Metric>)> {
    let process = list::PROCESS.iter().map(|(name, kind, help)| Metric {
        name: (*name).into(),
        kind: *kind,
        labels: &[],
        help: (*help).into(),
    });
    vec![
        ("Jobs and ranks", list::JOBS.to_vec()),
        ("Packets", list::counters()),
        ("The switch", list::SWITCH.to_vec()),
        ("The node", list::NODE.to_vec()),
        (
            "The program",
            list::PROGRAM.iter().chain(list::COST).cloned().chain([list::COLLECTOR_SUCCESS]).collect(),
        ),
        ("The process", process.collect()),
    ]
}

/// `paatp metrics list --format json`
///
/// # Errors
/// Never.
pub fn json() -> serde_json::Result<String> {
    #[derive(Serialize)]
    struct List {
        schema_version: u32,
        metrics: Vec<Metric>,
        refusals: Vec<(&'static str, &'static str)>,
    }
    let list = List {
        schema_version: super::snapshot::SCHEMA_VERSION,
        metrics: all().into_iter().flat_map(|(_, metrics)| metrics).collect(),
        refusals: Refusal::ALL.iter().map(|refusal| (refusal.name(), refusal.sentence())).collect(),
    };
    Ok(serde_json::to_string_pretty(&list)? + "\n")
}

/// `paatp metrics list --format md`: the page docs/metrics.md.
#[must_use]
pub fn markdown() -> String {
    let mut page = String::from(include_str!("intro.md"));
    for (title, metrics) in all() {
        let _ = write!(page, "\n## {title}\n\n| metric | kind | labels | |\n|---|---|---|---|\n");
        for metric in metrics {
            let labels: Vec<String> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
            let (name, kind, help) = (&metric.name, metric.kind.name(), &metric.help);
            let _ = writeln!(page, "| `{name}` | {kind} | {} | {help} |", labels.join(", "));
        }
    }
    page.push_str("\n## Reasons of refusals\n\n| `reason` | |\n|---|---|\n");
    for refusal in Refusal::ALL {
        let _ = writeln!(page, "| `{}` | {} |", refusal.name(), refusal.sentence());
    }
    page.push_str("\n## Events of a switch\n\n| `event` | |\n|---|---|\n");
    for count in Count::ALL {
        let _ = writeln!(page, "| `{}` | {} |", count.name(), count.sentence());
    }
    page
}

/// A metric of this kind must be called so.
#[must_use]
pub fn is_well_named(metric: &Metric) -> bool {
    metric.name.ends_with("_total") == (metric.kind == Kind::Counter)
}

#[cfg(test)]
mod tests;
