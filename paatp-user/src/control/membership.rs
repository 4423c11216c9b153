//! Who belongs to which job: the decisions of the control plane, without clock, randomness or I/O.
//!
//! Ranks join a job and wait. When all are there, a new generation is *formed*: random generation number and nonce are
//! drawn, the tables to write are handed out as data, and everybody who waits gets a grant. A generation that is
//! running goes on until the next one is complete.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use paatp_common::job::{Address, JobEntry, QUORUM_ALL, RankEntry, mapped};
use paatp_common::tag::rank_key;
use thiserror::Error;

use crate::config::{JobConfig, Jobs};

use super::MAX_WAIT_SECONDS;
use super::protocol::{Grant, JobState, JobStatus, JoinRequest, PROTOCOL};

/// Names one rank's wait, so that its end cannot be mistaken for that of a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WaiterId(u64);

/// Randomness for one generation, drawn by the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entropy {
    /// For the generation.
    pub generation: u32,
    /// For the nonce.
    pub nonce: u64,
}

/// Why a rank may not join.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum JoinError {
    /// No such job.
    #[error("no job `{name}` here; this aggregator serves: {}", .known.join(", "))]
    UnknownJob {
        /// What was asked for.
        name: String,
        /// What there is.
        known: Vec<String>,
    },
    /// Another version of the control protocol.
    #[error(
        "the worker speaks control protocol {0}, this aggregator {PROTOCOL}; use the same version of paatp on both"
    )]
    BadProtocol(u32),
    /// The rank is not below the job's world.
    #[error("rank {rank} is out of range; job `{job}` has ranks 0 to {}", .world - 1)]
    BadRank {
        /// The job.
        job: String,
        /// The rank.
        rank: u32,
        /// The job's world.
        world: u8,
    },
    /// The wait is no number of seconds in range.
    #[error("wait_seconds must be between 0 and {MAX_WAIT_SECONDS}")]
    BadWait,
    /// The worker expects another number of ranks.
    #[error(
        "rank {rank} expects {theirs} ranks, but job `{job}` has {ours}; start all workers with --world {ours}"
    )]
    WorldMismatch {
        /// The job.
        job: String,
        /// The rank.
        rank: u32,
        /// Its number of ranks.
        theirs: u32,
        /// The job's.
        ours: u8,
    },
    /// The rank waits already, from another address.
    #[error("rank {rank} of job `{job}` waits already from {holder}; give each worker a rank of its own")]
    RankTaken {
        /// The job.
        job: String,
        /// The rank.
        rank: u8,
        /// Who waits.
        holder: IpAddr,
    },
    /// The rank's packets would not fit the aggregator's MTU.
    #[error(
        "chunks of job `{job}` have up to {lanes} lanes, which over IPv6 do not fit the aggregator's MTU (up to {fitting} do); use the aggregator's IPv4 address, or lower the job's lanes"
    )]
    TooLongForIpv6 {
        /// The job.
        job: String,
        /// Its lanes.
        lanes: u16,
        /// Those that fit.
        fitting: u32,
    },
    /// The rank is about to reduce something else than the others.
    #[error(
        "rank {rank} of job `{job}` has tensors of other names, types or shapes, or another reduction, than rank {other}; all ranks must have the same"
    )]
    LayoutMismatch {
        /// The job.
        job: String,
        /// The rank.
        rank: u8,
        /// A rank that waits with another layout.
        other: u8,
    },
}

impl JoinError {
    /// The error's name in JSON.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            JoinError::UnknownJob { .. } => "unknown_job",
            JoinError::BadProtocol(_) => "bad_protocol",
            JoinError::BadRank { .. } => "bad_rank",
            JoinError::BadWait => "bad_wait",
            JoinError::WorldMismatch { .. } => "world_mismatch",
            JoinError::RankTaken { .. } => "rank_taken",
            JoinError::TooLongForIpv6 { .. } => "too_long",
            JoinError::LayoutMismatch { .. } => "layout_mismatch",
        }
    }
}

/// What became of a join that was not refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joined {
    /// The new wait.
    pub waiter: WaiterId,
    /// An earlier wait of the same rank from the same address, which is over now.
    pub replaced: Option<WaiterId>,
    /// The generation that this join completed; then every waiter is to be answered.
    pub formation: Option<Formation>,
}

/// A complete generation: what to write to the tables, and whom to tell afterwards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Formation {
    /// Name of the job.
    pub name: String,
    /// Its number.
    pub number: u16,
    /// Its entry, generation included.
    pub entry: JobEntry,
    /// Entries of all ranks, by rank.
    pub ranks: Vec<RankEntry>,
    /// Who waits.
    pub waiters: Vec<WaiterId>,
    /// What they are told.
    pub grant: Grant,
}

/// A complete generation, as remembered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generation {
    /// Its number.
    pub number: u32,
    /// Addresses, by rank.
    pub addresses: Vec<IpAddr>,
}

#[derive(Clone, Debug)]
struct Waiter {
    id: WaiterId,
    address: IpAddr,
    layout: Option<String>,
    deadline: Instant,
}

#[derive(Clone, Debug)]
struct Job {
    name: String,
    /// All but `expected` and `generation`, which a formation fills in.
    entry: JobEntry,
    waiting: BTreeMap<u8, Waiter>,
    running: Option<Generation>,
}

impl Job {
    fn missing(&self) -> Vec<u8> {
        (0..self.entry.world).filter(|rank| !self.waiting.contains_key(rank)).collect()
    }
}

/// The jobs of one aggregator.
#[derive(Clone, Debug)]
pub struct Membership {
    jobs: Vec<Job>,
    port_base: u16,
    ports: u16,
    /// Most lanes of ranks that come over IPv6, where that is fewer than the jobs have.
    ipv6_lanes: Option<u32>,
    next_waiter: u64,
}

/// An address as the tables hold it. An IPv4 address inside an IPv6 one (as a dual-stack socket tells it) is IPv4.
#[must_use]
pub fn table_address(address: IpAddr) -> Address {
    match address.to_canonical() {
        IpAddr::V4(v4) => mapped(v4.octets()),
        IpAddr::V6(v6) => v6.octets(),
    }
}

impl Membership {
    /// Jobs without members; slots are given out in order.
    #[must_use]
    pub fn new(jobs: &Jobs, port_base: u16, ports: u16) -> Membership {
        let mut first_slot = 0;
        let list = jobs.list().iter().map(|config| {
            let job = Job::new(config, first_slot);
            first_slot += config.slots;
            job
        });
        Membership { jobs: list.collect(), port_base, ports, ipv6_lanes: None, next_waiter: 0 }
    }

    /// Refuses ranks that come over IPv6 in jobs of more lanes than those.
    #[must_use]
    pub fn with_ipv6_lanes(self, ipv6_lanes: Option<u32>) -> Membership {
        Membership { ipv6_lanes, ..self }
    }

    /// A rank joins and waits from `now` on.
    ///
    /// # Errors
    /// If it may not; nothing has changed then.
    pub fn join(
        &mut self,
        now: Instant,
        name: &str,
        request: &JoinRequest,
        address: IpAddr,
        entropy: Entropy,
    ) -> Result<Joined, JoinError> {
        let number = self.find(name)?;
        let known = || JoinError::UnknownJob { name: name.into(), known: Vec::new() };
        let (port_base, ports, ipv6_lanes) = (self.port_base, self.ports, self.ipv6_lanes);
        let job = self.jobs.get_mut(number).ok_or_else(known)?;
        let address = address.to_canonical();
        let (rank, wait) = job.admit(request, address)?;
        if let Some(fitting) =
            ipv6_lanes.filter(|fitting| address.is_ipv6() && u32::from(job.entry.lanes) > *fitting)
        {
            return Err(JoinError::TooLongForIpv6 { job: job.name.clone(), lanes: job.entry.lanes, fitting });
        }
        let id = WaiterId(self.next_waiter);
        self.next_waiter += 1;
        let waiter = Waiter { id, address, layout: request.layout.clone(), deadline: now + wait };
        let replaced = job.waiting.insert(rank, waiter).map(|old| old.id);
        let formation = job
            .missing()
            .is_empty()
            .then(|| job.form(u16::try_from(number).unwrap_or(u16::MAX), (port_base, ports), entropy));
        Ok(Joined { waiter: id, replaced, formation })
    }

    /// A waiter hung up or gave up. Returns the ranks that it waited for, or nothing if its wait was over before.
    pub fn abandon(&mut self, name: &str, waiter: WaiterId) -> Option<Vec<u8>> {
        let job = self.jobs.iter_mut().find(|job| job.name == name)?;
        let rank = *job.waiting.iter().find(|(_, waiting)| waiting.id == waiter)?.0;
        let missing = job.missing();
        job.waiting.remove(&rank);
        Some(missing)
    }

    /// When a waiter gives up.
    #[must_use]
    pub fn deadline(&self, name: &str, waiter: WaiterId) -> Option<Instant> {
        let job = self.jobs.iter().find(|job| job.name == name)?;
        job.waiting.values().find(|waiting| waiting.id == waiter).map(|waiting| waiting.deadline)
    }

    /// All jobs, in the order of their numbers.
    #[must_use]
    pub fn list(&self) -> Vec<JobStatus> {
        self.jobs.iter().zip(0..).map(|(job, number)| job.status(number)).collect()
    }

    /// One job, with its complete generation.
    ///
    /// # Errors
    /// [`JoinError::UnknownJob`].
    pub fn details(&self, name: &str) -> Result<(JobStatus, JobEntry, Option<Generation>), JoinError> {
        let index = self.find(name)?;
        match (self.jobs.get(index), u16::try_from(index)) {
            (Some(job), Ok(number)) => Ok((job.status(number), job.entry, job.running.clone())),
            _ => Err(JoinError::UnknownJob { name: name.into(), known: Vec::new() }),
        }
    }

    fn find(&self, name: &str) -> Result<usize, JoinError> {
        self.jobs.iter().position(|job| job.name == name).ok_or_else(|| JoinError::UnknownJob {
            name: name.chars().take(crate::config::MAX_NAME_BYTES).collect(),
            known: self.jobs.iter().map(|job| job.name.clone()).collect(),
        })
    }
}

impl Job {
    /// The values were checked by [`Jobs::new`], so each fits its field.
    fn new(config: &JobConfig, first_slot: u32) -> Job {
        let quorum = match config.quorum {
            Some(quorum) if quorum < config.world => quorum as u8,
            _ => QUORUM_ALL,
        };
        let entry = JobEntry {
            first_slot,
            slots: config.slots,
            lanes: config.lanes as u16,
            window: config.window as u16,
            world: config.world as u8,
            quorum,
            ..JobEntry::default()
        };
        Job { name: config.name.clone(), entry, waiting: BTreeMap::new(), running: None }
    }

    /// Checks a join; returns the rank and how long it waits.
    fn admit(&self, request: &JoinRequest, address: IpAddr) -> Result<(u8, Duration), JoinError> {
        let job = || self.name.clone();
        let world = self.entry.world;
        if request.protocol != PROTOCOL {
            return Err(JoinError::BadProtocol(request.protocol));
        }
        if request.world != u32::from(world) {
            let (rank, theirs) = (request.rank, request.world);
            return Err(JoinError::WorldMismatch { job: job(), rank, theirs, ours: world });
        }
        let rank = match u8::try_from(request.rank) {
            Ok(rank) if rank < world => rank,
            _ => return Err(JoinError::BadRank { job: job(), rank: request.rank, world }),
        };
        if !(0.0..=MAX_WAIT_SECONDS).contains(&request.wait_seconds) {
            return Err(JoinError::BadWait);
        }
        if let Some(holder) = self.waiting.get(&rank).map(|waiter| waiter.address)
            && holder != address
        {
            return Err(JoinError::RankTaken { job: job(), rank, holder });
        }
        let differs = |waiter: &Waiter| match (&waiter.layout, &request.layout) {
            (Some(theirs), Some(ours)) => theirs != ours,
            _ => false,
        };
        if let Some((other, _)) = self.waiting.iter().find(|(other, w)| **other != rank && differs(w)) {
            return Err(JoinError::LayoutMismatch { job: job(), rank, other: *other });
        }
        Ok((rank, Duration::from_secs_f64(request.wait_seconds)))
    }

    /// Everybody is there: the next generation.
    fn form(&mut self, number: u16, (port_base, ports): (u16, u16), entropy: Entropy) -> Formation {
        let previous = self.running.as_ref().map(|running| running.number);
        let generation = next_generation(entropy.generation, previous);
        let world = self.entry.world;
        let waiting = std::mem::take(&mut self.waiting);
        self.entry.generation = generation;
        self.entry.expected = u64::MAX >> (64 - u32::from(world));
        let ranks = waiting.iter().map(|(rank, waiter)| RankEntry {
            address: table_address(waiter.address),
            key: rank_key(entropy.nonce, *rank),
            ..RankEntry::default()
        });
        let formation = Formation {
            name: self.name.clone(),
            number,
            entry: self.entry,
            ranks: ranks.collect(),
            waiters: waiting.values().map(|waiter| waiter.id).collect(),
            grant: Grant {
                protocol: PROTOCOL,
                job: number,
                generation,
                nonce: entropy.nonce,
                world,
                lanes: self.entry.lanes,
                window: self.entry.window,
                slots: self.entry.slots,
                port_base,
                ports,
            },
        };
        let addresses = waiting.values().map(|waiter| waiter.address).collect();
        self.running = Some(Generation { number: generation, addresses });
        formation
    }

    fn status(&self, number: u16) -> JobStatus {
        let state = match (&self.running, self.waiting.is_empty()) {
            (_, false) => JobState::Forming,
            (Some(_), true) => JobState::Running,
            (None, true) => JobState::Idle,
        };
        let missing_ranks = if state == JobState::Forming { self.missing() } else { Vec::new() };
        JobStatus {
            name: self.name.clone(),
            job: number,
            state,
            world: self.entry.world,
            lanes: self.entry.lanes,
            window: self.entry.window,
            slots: self.entry.slots,
            quorum: (self.entry.quorum != QUORUM_ALL).then_some(self.entry.quorum),
            generation: self.running.as_ref().map(|running| running.number),
            waiting_ranks: self.waiting.keys().copied().collect(),
            missing_ranks,
        }
    }
}

/// A generation number that is neither 0 (unused entry) nor the one in force.
const fn next_generation(random: u32, previous: Option<u32>) -> u32 {
    let mut generation = random;
    loop {
        let taken = match previous {
            Some(previous) => generation == previous,
            None => false,
        };
        if generation != 0 && !taken {
            return generation;
        }
        generation = generation.wrapping_add(1);
    }
}

#[cfg(test)]
#[path = "membership_tests.rs"]
mod tests;
