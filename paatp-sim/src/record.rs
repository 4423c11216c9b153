//! What a run is remembered by.

use paatp_common::Event;
use paatp_common::switch::Count;
use paatp_transport::Worker;

use crate::node::Node;
use crate::scenario::Scenario;
use crate::switch::Adder;
use crate::topology::Topology;
use crate::units::Nanos;

/// Samples of progress that are kept at most; when there are more, every second one is dropped.
const MOST_SAMPLES: usize = 2048;
/// First interval between samples.
const FIRST_INTERVAL: Nanos = Nanos(1000);

/// Progress of all ranks at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// When.
    pub at: Nanos,
    /// Chunks contributed, as the aggregator knows, and delivered, of each rank of all jobs in their order.
    pub progress: Vec<(u64, u64)>,
}

/// One job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobRecord {
    /// When all ranks had finished each iteration.
    pub iterations: Vec<Nanos>,
    /// Ranks that have finished each iteration.
    finished: Vec<u8>,
    /// Lowest number of chunks delivered when the first job was over.
    pub chunks_when_first_ended: u64,
}

/// Totals of the whole run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Packets that entered links.
    pub packets: u64,
    /// Packets that found no room.
    pub dropped: u64,
    /// Packets lost by chance.
    pub lost: u64,
    /// Packets marked.
    pub marked: u64,
    /// Contributions made: each chunk once for each rank.
    pub contributions: u64,
    /// Contributions sent again.
    pub retransmissions: u64,
    /// Requests for results without a contribution.
    pub pulls: u64,
    /// Contributions that found no room in the ring.
    pub busy: u64,
    /// Redos begun at the aggregator.
    pub redos: u64,
    /// Results that failed their check.
    pub failed_checks: u64,
}

impl Totals {
    /// Adds those of another run.
    pub const fn add(&mut self, other: &Totals) {
        self.packets += other.packets;
        self.dropped += other.dropped;
        self.lost += other.lost;
        self.marked += other.marked;
        self.contributions += other.contributions;
        self.retransmissions += other.retransmissions;
        self.pulls += other.pulls;
        self.busy += other.busy;
        self.redos += other.redos;
        self.failed_checks += other.failed_checks;
    }
}

/// What a switch did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SwitchRecord {
    /// By [`Count`].
    pub counts: [u64; Count::COUNT],
    /// Contributions that the aggregator took as a part of one of its sums.
    pub summed: u64,
    /// Contributions sent again because the sum that they were in did not arrive.
    pub reclaimed: u64,
    /// Places that each job's chunks might claim in the end.
    pub ks: Vec<u8>,
}

impl SwitchRecord {
    /// Adds that of another run.
    pub fn add(&mut self, other: &SwitchRecord) {
        self.counts.iter_mut().zip(other.counts).for_each(|(count, other)| *count += other);
        self.summed += other.summed;
        self.reclaimed += other.reclaimed;
    }
}

/// A run.
#[derive(Clone, Debug)]
pub struct Recorder {
    /// Jobs.
    pub jobs: Vec<JobRecord>,
    /// Progress over time.
    pub samples: Vec<Sample>,
    /// When everything was over.
    pub end: Nanos,
    /// Totals.
    pub totals: Totals,
    /// Of the switch, if there is one that adds.
    pub switch: Option<SwitchRecord>,
    worlds: Vec<u8>,
    interval: Nanos,
    first_end: Option<Nanos>,
}

impl Recorder {
    /// Nothing has happened yet.
    #[must_use]
    pub fn new(scenario: &Scenario) -> Recorder {
        let job = |iterations: u32| JobRecord {
            iterations: vec![Nanos(0); iterations as usize],
            finished: vec![0; iterations as usize],
            chunks_when_first_ended: 0,
        };
        Recorder {
            jobs: scenario.jobs.iter().map(|spec| job(spec.iterations)).collect(),
            samples: Vec::new(),
            end: Nanos(0),
            totals: Totals::default(),
            switch: None,
            worlds: scenario.jobs.iter().map(|spec| spec.world).collect(),
            interval: FIRST_INTERVAL,
            first_end: None,
        }
    }

    /// Notes progress; returns when to do so again.
    pub fn sample(&mut self, at: Nanos, progress: impl Iterator<Item = (u64, u64)>) -> Nanos {
        self.samples.push(Sample { at, progress: progress.collect() });
        if self.samples.len() >= MOST_SAMPLES {
            let mut keep = false;
            self.samples.retain(|_| {
                keep = !keep;
                keep
            });
            self.interval = Nanos(self.interval.0 * 2);
        }
        self.interval
    }

    /// A rank has finished an iteration. True if that ends the first job to end.
    pub fn finished(&mut self, at: Nanos, job: usize, iteration: u32) -> bool {
        let Some(record) = self.jobs.get_mut(job) else { return false };
        let (Some(count), Some(time)) =
            (record.finished.get_mut(iteration as usize), record.iterations.get_mut(iteration as usize))
        else {
            return false;
        };
        *count += 1;
        *time = (*time).max(at);
        let over = iteration as usize + 1 == record.iterations.len()
            && self.worlds.get(job).is_some_and(|world| record.finished.last() == Some(world));
        let first = over && self.first_end.is_none();
        if first {
            self.first_end = Some(at);
        }
        first
    }

    /// When the first job ended.
    #[must_use]
    pub fn first_end(&self) -> Nanos {
        self.first_end.unwrap_or(self.end)
    }

    /// Everything is over.
    pub fn finish<'w>(
        &mut self,
        at: Nanos,
        topology: &Topology,
        (node, switch): (&Node, Option<&Adder>),
        workers: impl Iterator<Item = &'w Worker>,
    ) {
        self.end = at;
        self.switch = switch.map(|switch| SwitchRecord {
            counts: *switch.counts(),
            summed: node.summed(),
            reclaimed: 0,
            ks: switch.ks(),
        });
        for link in topology.links() {
            self.totals.packets += link.counters.packets;
            self.totals.dropped += link.counters.dropped;
            self.totals.lost += link.counters.lost;
            self.totals.marked += link.counters.marked;
        }
        for worker in workers {
            let statistics = worker.statistics();
            self.totals.contributions += statistics.contributions;
            self.totals.retransmissions += statistics.retransmissions;
            self.totals.pulls += statistics.pulls;
            self.totals.busy += statistics.busy;
            self.totals.failed_checks += statistics.failed_checks;
            if let Some(switch) = &mut self.switch {
                switch.reclaimed += statistics.reclaimed;
            }
        }
        self.totals.redos = node.counters().noted(Event::Redos);
    }
}
