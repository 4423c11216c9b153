//! What a scenario file says: the network, the jobs, and what goes wrong.

use std::path::{Path, PathBuf};

use paatp_common::limits::{LANES_PER_BLOCK, MAX_JOBS, MAX_RANKS};
use paatp_common::pool::K_MAX;
use paatp_transport::{Membership, MembershipError};
use serde::Deserialize;

use crate::link::{Impairment, LinkSpec};
use crate::units::{Bytes, Nanos};

/// Slots of all jobs together: what fits one host's memory while it simulates hundreds of workers.
pub const MAX_SLOTS: u64 = 1 << 18;
/// Chunks of one operation: positions stay far from the wrap of sequence numbers, which the checks rely on.
pub const MAX_CHUNKS: u64 = 1 << 20;
/// Iterations of a job.
pub const MAX_ITERATIONS: u32 = 10_000;
/// Slots of a switch without a limit: with all jobs of a scenario in flight hardly any chunk meets another.
pub const UNLIMITED_SLOTS: u32 = 1 << 16;
/// How often the loader looks at its tables, and the control plane at those of a switch unless the scenario says more.
pub const TICK: Nanos = Nanos(5_000_000);
/// Slowest that a link may become.
pub const LEAST_FACTOR: f64 = 0.001;

/// Packets that a host's card takes unless the scenario says more: enough to keep the link busy while the driver is told of
/// room, as byte queue limits do.
pub const CARD_PACKETS: u64 = 8;

/// A scenario.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// What it is about, in a sentence.
    pub description: String,
    /// Seed of all randomness, unless the command line names another.
    #[serde(default = "one")]
    pub seed: u64,
    /// A run that takes longer in virtual time has failed.
    #[serde(default = "minute")]
    pub limit: Nanos,
    /// The network.
    pub network: Network,
    /// Slots that jobs share.
    #[serde(default)]
    pub pool: Option<PoolSpec>,
    /// A switch in front of the aggregator that adds.
    #[serde(default)]
    pub switch: Option<SwitchSpec>,
    /// The jobs; all have the same aggregator.
    #[serde(rename = "job")]
    pub jobs: Vec<JobSpec>,
    /// What goes wrong with hosts and their links.
    #[serde(default, rename = "straggler")]
    pub stragglers: Vec<Straggler>,
    /// Probability, for each request, that a bit of a complete slot flips in the aggregator's memory.
    #[serde(default)]
    pub memory_damage: f64,
}

/// The network: hosts on leaves, leaves on spines, the aggregator on the first leaf.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Leaf switches; hosts are dealt out to them in turn. With one there are no spines.
    #[serde(default = "one")]
    pub leaves: u64,
    /// Spine switches; a host's packets always take the same one.
    #[serde(default = "one")]
    pub spines: u64,
    /// Bytes of an IP packet that carries a whole chunk: what links charge, however few lanes are simulated.
    pub packet: Bytes,
    /// Packets that a host hands to its network card, or has waiting in its socket, before the worker waits.
    #[serde(default = "few")]
    pub card: u64,
    /// A host's link, each direction.
    pub host: LinkSpec,
    /// The aggregator's link, each direction, which all ranks share: it is a server. Absent: it is the leaf switch itself,
    /// with a port for each rank.
    pub aggregator: Option<LinkSpec>,
    /// A link between leaf and spine, each direction.
    pub fabric: Option<LinkSpec>,
    /// What goes wrong by chance, on hosts' links in both directions.
    #[serde(default)]
    pub impairment: Impairment,
}

/// Slots of the aggregator that jobs with `memory = "shared"` share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolSpec {
    /// Their number, a power of two.
    pub slots: u32,
    /// Places in it that a chunk may take. Absent: the loader tunes each job's for equal goodput, whatever the
    /// controller.
    pub k: Option<u8>,
}

/// A switch that adds. It stands on the first leaf, before the aggregator's link, and adds in no time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwitchSpec {
    /// Slots of its table, a power of two, which all jobs share. Absent: [`UNLIMITED_SLOTS`].
    pub slots: Option<u32>,
    /// Places in it that a chunk may claim. Absent: the control plane tunes each job's for equal goodput.
    pub k: Option<u8>,
    /// How long a slot may be untouched before another chunk may have it.
    #[serde(default = "ten_milliseconds")]
    pub patience: Nanos,
    /// How often the control plane tunes k, if it does.
    #[serde(default = "tick")]
    pub tuning: Nanos,
}

impl SwitchSpec {
    /// Slots of the table.
    #[must_use]
    pub fn table(&self) -> u32 {
        self.slots.unwrap_or(UNLIMITED_SLOTS)
    }

    fn check(&self, network: &Network) -> Result<(), String> {
        let slots = self.table();
        if !slots.is_power_of_two() || slots < K_MAX.into() || u64::from(slots) > MAX_SLOTS {
            return Err(format!(
                "a switch has a power of two of slots, from {K_MAX} to {MAX_SLOTS}, not {slots}"
            ));
        }
        if self.k.is_some_and(|k| !(1..=K_MAX).contains(&k)) {
            return Err(format!("a chunk may claim 1 to {K_MAX} places at a switch"));
        }
        if self.patience.0 == 0 || self.tuning.0 == 0 {
            return Err("a switch's patience and tuning are spans of time, not 0".into());
        }
        if network.aggregator.is_none() {
            return Err(
                "a switch stands before the aggregator's link: name its rate in network.aggregator".into()
            );
        }
        Ok(())
    }
}

/// Whose slots a job uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryKind {
    /// A ring of its own.
    #[default]
    Reserved,
    /// The pool.
    Shared,
}

/// One training job.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobSpec {
    /// Name.
    pub name: String,
    /// Ranks.
    pub world: u8,
    /// Lanes of each packet that are really added and checked. Few make a fast simulation.
    #[serde(default = "one_block")]
    pub lanes: u16,
    /// Window W: nobody runs further ahead of its own results.
    pub window: u16,
    /// Slots S of the ring; with `memory = "shared"` how far a chunk may be ahead of the last that every rank has.
    pub slots: u32,
    /// Whose slots it uses.
    #[serde(default)]
    pub memory: MemoryKind,
    /// Chunks of one gradient.
    pub chunks: u64,
    /// Operations that a gradient is cut into.
    #[serde(default = "one_operation")]
    pub operations: u32,
    /// Iterations.
    pub iterations: u32,
    /// When it starts.
    #[serde(default)]
    pub start: Nanos,
    /// Computing in each iteration.
    pub compute: Nanos,
    /// Share of the computing after which the first operation's values are ready; the last's are at the end.
    #[serde(default = "whole")]
    pub first_ready: f64,
    /// Computing takes up to this share more or less, by chance.
    #[serde(default)]
    pub jitter: f64,
    /// Results that may be missing when the next iteration begins, in iterations: 0 is bulk-synchronous.
    #[serde(default)]
    pub staleness: u32,
    /// What the values are.
    #[serde(default)]
    pub values: ValuesKind,
}

/// What is reduced, and how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ValuesKind {
    /// Floats, added.
    #[default]
    FloatSum,
    /// Integers, added.
    IntegerSum,
    /// Integers, the largest.
    IntegerMax,
}

/// Which ranks, counted over all jobs in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum Ranks {
    /// All.
    #[default]
    All,
    /// These.
    These(Vec<u32>),
}

impl Ranks {
    /// This one is meant.
    #[must_use]
    pub fn has(&self, host: usize) -> bool {
        match self {
            Ranks::All => true,
            Ranks::These(ranks) => ranks.iter().any(|rank| *rank as usize == host),
        }
    }
}

/// Directions of a host's link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// From the host.
    Up,
    /// To the host.
    Down,
    /// Both at once.
    #[default]
    Both,
}

/// Which links have bad times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// Those of hosts.
    #[default]
    Host,
    /// Those between leaves and spines, each by itself; who is asked for does not matter.
    Fabric,
}

/// Why some are slower than others. The first three as the experiments of Serene have them.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Straggler {
    /// In some iterations computing takes longer, by a multiple of the mean iteration.
    SlowWorker {
        /// Probability for each rank and iteration.
        probability: f64,
        /// Least multiple.
        least: f64,
        /// Largest multiple.
        most: f64,
        /// The mean iteration without stragglers.
        mean_iteration: Nanos,
        /// Who.
        #[serde(default)]
        ranks: Ranks,
    },
    /// A host neither computes, sends nor receives for a while, from some moment in the iteration on.
    Failure {
        /// Probability for each rank and iteration.
        probability: f64,
        /// How long.
        duration: Nanos,
        /// The moment is uniform in this span from the iteration's beginning on.
        within: Nanos,
        /// Who.
        #[serde(default)]
        ranks: Ranks,
    },
    /// Computing always takes longer: from 1 for the first rank of a job up to this factor for its last.
    Heterogeneous {
        /// The last rank's factor.
        most: f64,
    },
    /// Links that are slow for part of the time, each at other times.
    SlowLink {
        /// Of the rate, what is left.
        factor: f64,
        /// Length of a period; each host's begins elsewhere, by chance.
        period: Nanos,
        /// When the first slow stretch begins, if not by chance.
        #[serde(default)]
        phase: Option<Nanos>,
        /// Share of it that is slow.
        share: f64,
        /// On which links.
        #[serde(default)]
        place: Place,
        /// Which direction of hosts' links.
        #[serde(default)]
        direction: Direction,
        /// Whose.
        #[serde(default)]
        ranks: Ranks,
    },
    /// Bursts of other traffic, on each link at other times.
    Background {
        /// Rate of a burst, as a share of the link's.
        rate: f64,
        /// Mean length of a burst.
        on: Nanos,
        /// Mean time between bursts.
        off: Nanos,
        /// On which links.
        #[serde(default)]
        place: Place,
        /// Which direction of hosts' links.
        #[serde(default)]
        direction: Direction,
        /// Whose.
        #[serde(default)]
        ranks: Ranks,
    },
}

const fn one() -> u64 {
    1
}

const fn one_operation() -> u32 {
    1
}

const fn few() -> u64 {
    CARD_PACKETS
}

const fn whole() -> f64 {
    1.0
}

const fn one_block() -> u16 {
    LANES_PER_BLOCK as u16
}

const fn ten_milliseconds() -> Nanos {
    Nanos(10_000_000)
}

const fn tick() -> Nanos {
    TICK
}

const fn minute() -> Nanos {
    Nanos(60_000_000_000)
}

/// Why a scenario cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// The file cannot be read.
    #[error("cannot read the scenario {}: {source}; name one of the files in scenarios/", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not what it should be.
    #[error("{} is no scenario: {source}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<toml::de::Error>,
    },
    /// A number is impossible.
    #[error("the scenario is impossible: {0}")]
    Impossible(String),
    /// A job is.
    #[error("job `{job}` is impossible: {source}")]
    Job {
        /// Its name.
        job: String,
        /// Why.
        source: MembershipError,
    },
}

impl Scenario {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// Why it cannot be run.
    pub fn read(path: &Path) -> Result<Scenario, ScenarioError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ScenarioError::Read { path: path.into(), source })?;
        let scenario: Scenario = toml::from_str(&text)
            .map_err(|source| ScenarioError::Syntax { path: path.into(), source: Box::new(source) })?;
        scenario.check()?;
        Ok(scenario)
    }

    /// Ranks of all jobs.
    #[must_use]
    pub fn hosts(&self) -> usize {
        self.jobs.iter().map(|job| usize::from(job.world)).sum()
    }

    /// Tests that everything is possible.
    ///
    /// # Errors
    /// The first thing that is not.
    pub fn check(&self) -> Result<(), ScenarioError> {
        let fail = |text: String| Err(ScenarioError::Impossible(text));
        if self.jobs.is_empty() || self.jobs.len() > MAX_JOBS {
            return fail(format!("{} jobs; an aggregator has 1 to {MAX_JOBS}", self.jobs.len()));
        }
        let pool = self.pool.map_or(0, |pool| pool.slots);
        if self.pool.is_some_and(|pool| {
            !pool.slots.is_power_of_two() || pool.k.is_some_and(|k| !(1..=K_MAX).contains(&k))
        }) {
            return fail(format!("a pool has a power of two of slots, and k is from 1 to {K_MAX}"));
        }
        if pool == 0 && self.jobs.iter().any(|job| job.memory == MemoryKind::Shared) {
            return fail("jobs with memory = \"shared\" need a [pool]".into());
        }
        let slots: u64 =
            self.jobs.iter().map(|job| u64::from(job.own_slots())).sum::<u64>() + u64::from(pool);
        if slots > MAX_SLOTS {
            return fail(format!("{slots} slots in all; at most {MAX_SLOTS} are simulated"));
        }
        let network = &self.network;
        if network.leaves == 0 || network.spines == 0 || (network.leaves > 1 && network.fabric.is_none()) {
            return fail("leaves and spines count from 1, and several leaves need a fabric link".into());
        }
        let links = [Some(network.host), network.aggregator, network.fabric];
        let whole = network.packet.0 + crate::link::ETHERNET_OVERHEAD;
        if links.into_iter().flatten().any(|link| link.rate.0 == 0 || link.buffer.0 < whole) {
            return fail("every link needs a rate, and a buffer of at least one packet".into());
        }
        let chances =
            [network.impairment.loss, network.impairment.duplication, network.impairment.reordering];
        if chances.iter().any(|chance| !(0.0..1.0).contains(chance)) {
            return fail(
                "probabilities of loss, duplication and reordering are from 0 to less than 1".into(),
            );
        }
        if let Some(switch) = &self.switch {
            switch.check(network).or_else(fail)?;
        }
        self.jobs.iter().try_for_each(JobSpec::check)?;
        self.stragglers.iter().try_for_each(|straggler| straggler.check().or_else(fail))
    }
}

impl JobSpec {
    fn check(&self) -> Result<(), ScenarioError> {
        self.membership(0, 0, 1, 0).check().map_err(|source| {
            let job = self.name.clone();
            ScenarioError::Job { job, source }
        })?;
        let fits = (1..=MAX_CHUNKS).contains(&self.chunks)
            && (1..=MAX_ITERATIONS).contains(&self.iterations)
            && (1..=self.chunks).contains(&u64::from(self.operations))
            && (0.0..=1.0).contains(&self.first_ready)
            && (0.0..1.0).contains(&self.jitter)
            && usize::from(self.world) <= MAX_RANKS;
        if fits {
            return Ok(());
        }
        Err(ScenarioError::Impossible(format!(
            "job `{}`: 1 to {MAX_CHUNKS} chunks, 1 to {MAX_ITERATIONS} iterations, no more operations than chunks, first_ready \
             from 0 to 1 and jitter from 0 to less than 1 are possible",
            self.name
        )))
    }

    /// A bit for each rank.
    #[must_use]
    pub const fn all_ranks(&self) -> u64 {
        u64::MAX >> (MAX_RANKS - self.world as usize)
    }

    /// Slots that nobody else uses.
    #[must_use]
    pub fn own_slots(&self) -> u32 {
        match self.memory {
            MemoryKind::Reserved => self.slots,
            MemoryKind::Shared => 1,
        }
    }

    /// A rank's place in the job.
    #[must_use]
    pub const fn membership(&self, job: u16, rank: u8, generation: u32, nonce: u64) -> Membership {
        Membership {
            job,
            generation,
            nonce,
            rank,
            world: self.world,
            lanes: self.lanes,
            window: self.window,
            slots: self.slots,
            seating: None,
        }
    }
}

impl Straggler {
    fn check(&self) -> Result<(), String> {
        let sound = match self {
            Straggler::SlowWorker { probability, least, most, .. } => {
                (0.0..=1.0).contains(probability) && *least >= 0.0 && least <= most && most.is_finite()
            }
            Straggler::Failure { probability, .. } => (0.0..=1.0).contains(probability),
            Straggler::Heterogeneous { most } => *most >= 1.0 && most.is_finite(),
            Straggler::SlowLink { factor, period, share, .. } => {
                (LEAST_FACTOR..=1.0).contains(factor) && period.0 > 0 && (0.0..=1.0).contains(share)
            }
            Straggler::Background { rate, on, off, .. } => {
                (0.0..=1.0).contains(rate) && on.0 > 0 && off.0 > 0
            }
        };
        if sound {
            return Ok(());
        }
        Err(format!(
            "{self:?}: shares and probabilities are from 0 to 1, factors of rates at least {LEAST_FACTOR}"
        ))
    }
}
