//! Every metric: name, kind, labels, sentence. What is exported, documented and tested is this list.

use std::borrow::Cow;
use std::collections::HashMap;

use paatp_common::counter::Event;
use prometheus::core::Desc;
use serde::Serialize;

/// What a metric's number does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Goes up, and to zero when what it counts begins anew.
    Counter,
    /// Goes up and down.
    Gauge,
}

impl Kind {
    /// As the text format has it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        }
    }
}

/// One metric.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Metric {
    /// Its name.
    pub name: Cow<'static, str>,
    /// What its number does.
    pub kind: Kind,
    /// Its labels, in the order of their values.
    pub labels: &'static [&'static str],
    /// What it counts, for people.
    pub help: Cow<'static, str>,
}

impl Metric {
    const fn new(
        name: &'static str,
        kind: Kind,
        labels: &'static [&'static str],
        help: &'static str,
    ) -> Metric {
        Metric { name: Cow::Borrowed(name), kind, labels, help: Cow::Borrowed(help) }
    }

    /// As the registry wants it.
    ///
    /// # Errors
    /// If a name is none.
    pub fn desc(&self) -> prometheus::Result<Desc> {
        let labels = self.labels.iter().map(|label| (*label).to_owned()).collect();
        Desc::new(self.name.to_string(), self.help.to_string(), labels, HashMap::new())
    }
}

/// Declares metrics and the group of all of them.
macro_rules! metrics {
    ($(#[$meta:meta])* $group:ident: $($name:ident = $kind:ident $metric:literal $labels:tt $help:literal;)*) => {
        $(#[doc = $help] pub const $name: Metric = Metric::new($metric, Kind::$kind, &$labels, $help);)*
        $(#[$meta])*
        pub const $group: &[Metric] = &[$($name),*];
    };
}

metrics! {
    /// What needs no reading.
    PROGRAM:
    BUILD_INFO = Gauge "paatp_build_info" ["version", "object_sha256"] "Always 1; version of the program and SHA-256 of the eBPF object inside.";
    XDP_ATTACHED = Gauge "paatp_xdp_attached" ["interface", "mode"] "1 for the mode in which the XDP program is attached (native: in the driver; generic: in the network stack), 0 for the other.";
    CORE_LOOP_AGE = Gauge "paatp_core_loop_age_seconds" [] "Time since the daemon's core loop last went round; usually below 0.3. The data plane goes on without it, but ranks that hold others up are not found.";
    DROPPED_SERIES = Gauge "paatp_dropped_series" [] "Series of ranks that the last scrape left out, because jobs have more ranks altogether than are shown.";
}

metrics! {
    /// The node, from the control plane.
    NODE:
    DRAINING = Gauge "paatp_draining" [] "1 while the node takes no new jobs and ranks.";
    JOBS_BY_STATE = Gauge "paatp_jobs" ["state"] "Jobs by state.";
    CLOSING_JOBS = Gauge "paatp_closing_jobs" [] "Deleted jobs whose number and slots are not free yet.";
    SLOTS = Gauge "paatp_slots" [] "Slots of the node.";
    FREE_SLOTS = Gauge "paatp_free_slots" [] "Slots that belong to no job.";
    SLOT_SIZE = Gauge "paatp_slot_size_bytes" [] "Size of one slot.";
}

metrics! {
    /// The run time that the kernel counts.
    COST:
    RUN_TIME = Counter "paatp_bpf_program_run_time_seconds_total" [] "Time that the XDP program ran, on all processors. Absent unless the kernel counts it (sysctl kernel.bpf_stats_enabled=1).";
    RUNS = Counter "paatp_bpf_program_runs_total" [] "Runs of the XDP program: frames that arrived at the interface. Absent unless the kernel counts them.";
}

metrics! {
    /// The switch in front of the aggregator, if it was told of one.
    SWITCH:
    SWITCH_UP = Gauge "paatp_switch_up" [] "1 while the tables of the switch are in this daemon's hands, 0 while it does not answer, another controller has it, or it has another program. Absent, as all of these, without --switch.";
    SWITCH_CONTACT_AGE = Gauge "paatp_switch_contact_age_seconds" [] "Time since the switch's tables were last read; usually below 1.1. Absent until they are read for the first time.";
    SWITCH_ENTRIES = Gauge "paatp_switch_entries" [] "Entries and groups of ours in the switch, when it was last asked.";
    SWITCH_JOBS = Gauge "paatp_switch_jobs" ["on_switch"] "Jobs that run, by whether they are on the switch.";
    SWITCH_REFUSED = Counter "paatp_switch_refused_changes_total" [] "Changes of its tables that the switch refused; each is tried again every second.";
    SWITCH_REPAIRED = Counter "paatp_switch_repaired_entries_total" [] "Entries and groups of the switch that were missing or changed although nobody had asked for that, and were put right.";
    SWITCH_PACKETS = Counter "paatp_switch_packets_total" ["event"] "What the switch counted when it was last asked, by event; the events are explained below. Begins at zero with the switch.";
    ADDED = Counter "paatp_added_contributions_total" ["by"] "Contributions that were added, one by one, by the switch (by=\"switch\") and by the XDP program (by=\"xdp\"). What a switch adds and loses is sent again, and then counts for both.";
}

metrics! {
    /// Each job, and each of its ranks.
    JOBS:
    JOB_INFO = Gauge "paatp_job_info" ["job_name", "sync"] "Always 1; how the job's ranks wait for one another.";
    JOB_STALENESS = Gauge "paatp_job_staleness_limit" ["job_name"] "Iterations that a rank may begin before the results of earlier ones are there: 0 for bsp and quorum; absent for asp, which has no limit. How far ranks are behind is in the lags.";
    JOB_RANKS = Gauge "paatp_job_ranks" ["job_name"] "Ranks of the job.";
    JOB_RUNNING = Gauge "paatp_job_running" ["job_name"] "1 while a generation of the job runs.";
    JOB_MISSING_RANKS = Gauge "paatp_job_missing_ranks" ["job_name"] "Ranks that others wait for to join.";
    JOB_LOST_RANKS = Gauge "paatp_job_lost_ranks" ["job_name"] "Ranks that held the others up for too long, in the generation that runs or in the last one.";
    JOB_STALL = Gauge "paatp_job_stall_seconds" ["job_name"] "How long ranks have been held up by others; 0 below one second. `paatp status` names them.";
    JOB_LAG = Gauge "paatp_job_lag_chunks" ["job_name"] "How far the slowest rank is behind the first, in chunks.";
    JOB_COMPLETED = Counter "paatp_job_completed_chunks_total" ["job_name"] "Chunks whose results every rank has acknowledged.";
    JOB_COMPLETED_BYTES = Counter "paatp_job_completed_bytes_total" ["job_name"] "The same as bytes of values, counting each chunk as full: 4 bytes for each of the job's lanes. Only the last chunk of an operation can be shorter.";
    JOB_SLOTS = Gauge "paatp_job_slots" ["job_name"] "Slots of the job's ring.";
    JOB_SLOTS_IN_USE = Gauge "paatp_job_slots_in_use" ["job_name"] "Slots that hold something which not every rank has acknowledged. Absent where that would be too many to count (4096 chunks under way).";
    JOB_OPEN_AGE = Gauge "paatp_job_oldest_open_slot_age_seconds" ["job_name"] "How long the oldest slot that waits for contributions has been the oldest; 0 if none waits. Up to 0.25 s too short.";
    RANK_CONTRIBUTED = Counter "paatp_rank_contributed_chunks_total" ["job_name", "rank"] "Chunks that the rank has contributed, as it acknowledged.";
    RANK_CONTRIBUTED_BYTES = Counter "paatp_rank_contributed_bytes_total" ["job_name", "rank"] "The same as bytes of values, counting each chunk as full.";
    RANK_ACKNOWLEDGED = Counter "paatp_rank_acknowledged_chunks_total" ["job_name", "rank"] "Results that the rank has acknowledged.";
    RANK_BUSY = Counter "paatp_rank_busy_total" ["job_name", "rank"] "Contributions of the rank that were refused as too far ahead of the slowest (BUSY). Can lose counts where several processors count at once.";
    RANK_MARKS = Counter "paatp_rank_ecn_marks_total" ["job_name", "rank"] "Requests of the rank that a switch had marked as having met congestion. Can lose counts, likewise.";
    RANK_LAG = Gauge "paatp_rank_lag_chunks" ["job_name", "rank"] "How far the rank is behind the first, in chunks.";
    RANK_IN_THE_WAY = Gauge "paatp_rank_in_the_way_seconds" ["job_name", "rank"] "How long the rank has stood lowest without moving while another is ahead; 0 if it is not in the way.";
}

/// Why requests were refused.
pub const REFUSED: Metric = Metric::new(
    "paatp_refused_packets_total",
    Kind::Counter,
    &["reason"],
    "Packets to the aggregator's port that were not taken, by reason; the reasons are explained below.",
);

/// Which readings succeeded.
pub const COLLECTOR_SUCCESS: Metric = Metric::new(
    "paatp_collector_success",
    Kind::Gauge,
    &["collector"],
    "1 if this part of the scrape could be read, 0 if it failed or took too long; its metrics are then missing or incomplete.",
);

/// The metric of an event.
#[must_use]
pub fn event(event: Event) -> Metric {
    Metric {
        name: format!("paatp_{}_total", event.name()).into(),
        kind: Kind::Counter,
        labels: &[],
        help: event.sentence().into(),
    }
}

/// What the data plane counts.
#[must_use]
pub fn counters() -> Vec<Metric> {
    let mut all = vec![REFUSED];
    all.extend(Event::ALL.iter().map(|kind| event(*kind)));
    all
}

/// What the crate `prometheus` tells of the process.
pub const PROCESS: &[(&str, Kind, &str)] = &[
    ("process_cpu_seconds_total", Kind::Counter, "Total user and system CPU time spent in seconds."),
    ("process_max_fds", Kind::Gauge, "Maximum number of open file descriptors."),
    ("process_open_fds", Kind::Gauge, "Number of open file descriptors."),
    ("process_resident_memory_bytes", Kind::Gauge, "Resident memory size in bytes."),
    ("process_start_time_seconds", Kind::Gauge, "Start time of the process since unix epoch in seconds."),
    ("process_threads", Kind::Gauge, "Number of OS threads in the process."),
    ("process_virtual_memory_bytes", Kind::Gauge, "Virtual memory size in bytes."),
];
