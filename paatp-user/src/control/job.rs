//! One job: who waits, who is a member, what the data plane is to know.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use paatp_common::job::{JobEntry, QUORUM_ALL, RankEntry};
use paatp_common::policy::{MAX_STALENESS, Mode, Policy};
use paatp_common::seq::Seq;
use paatp_transport::Names;

use crate::config::{Access, FailurePolicy, JobConfig, MemoryKind, RankRange};
use crate::engine::ProgressSnapshot;

use super::MAX_WAIT_SECONDS;
use super::error::ControlError;
use super::membership::{Formation, JobFacts, Limits, WaiterId, table_address};
use super::memory::Memory;
use super::protocol::{Grant, JobState, JobStatus, JoinRequest, Nodes, PROTOCOL, Sync, SyncChange};
use super::token::Secret;
use super::watch::{Terms, Watch};

/// Address of ranks that join at another node.
pub(super) const ELSEWHERE: IpAddr = IpAddr::V6(Ipv6Addr::UNSPECIFIED);

/// A complete generation, as remembered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generation {
    /// Its number.
    pub number: u32,
    /// Addresses, by rank.
    pub addresses: Vec<IpAddr>,
    /// Ranks that said that they are done.
    pub left: u64,
    /// Where its salts are drawn from.
    pub nonce: u64,
    /// What tells the ranks' waits for it from others, by rank.
    pub attempts: Vec<Option<u64>>,
    /// Who stands behind the ranks of the root, if some are nodes.
    pub nodes: Option<Nodes>,
}

/// A rank that waits for the others.
#[derive(Clone, Debug)]
pub(super) struct Waiter {
    pub(super) id: WaiterId,
    pub(super) address: IpAddr,
    pub(super) layout: Option<String>,
    pub(super) attempt: Option<u64>,
    pub(super) stands_for: StandsFor,
    pub(super) deadline: Instant,
}

/// Whom a wait is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StandsFor {
    /// A worker.
    Worker,
    /// A rank of a lower node, by its own name.
    RankBelow,
    /// A lower node that is one rank here, and has so many.
    Node(u16),
}

#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) name: String,
    pub(super) number: u16,
    /// All but `expected` and `generation`, which a formation fills in.
    pub(super) entry: JobEntry,
    pub(super) memory: Memory,
    pub(super) access: Access,
    pub(super) key: Option<Secret>,
    pub(super) waiting: BTreeMap<u8, Waiter>,
    pub(super) running: Option<Generation>,
    /// The generation before, until the tables say that it is over.
    pub(super) previous: Option<Generation>,
    pub(super) timeout: Option<Duration>,
    pub(super) policy: FailurePolicy,
    pub(super) lost: Vec<u8>,
    pub(super) parent: Option<Parent>,
    /// The last wait of those for whom the parent is being asked.
    pub(super) ascending: Option<WaiterId>,
    watch: Watch,
}

/// Where a job's sums go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parent {
    /// Control address of the aggregator there.
    pub address: SocketAddr,
    /// The ranks that join here.
    pub ranks: RankRange,
    /// The rank there that all of them are together, if they have none of their own.
    pub child: Option<u8>,
}

/// Ranks that held the others up, and what is to be written because of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// The job's name.
    pub name: String,
    /// Its number.
    pub number: u16,
    /// The generation that they belong to.
    pub generation: u32,
    /// Who.
    pub ranks: Vec<u8>,
    /// What is done: where nobody would be left, a shrink is an abort.
    pub policy: FailurePolicy,
    /// The job's new entry.
    pub entry: JobEntry,
}

impl Job {
    /// The values were checked by [`JobConfig::check`], so each fits its field. `places` are those that a chunk may take
    /// in the pool.
    pub(super) fn new(
        config: &JobConfig,
        number: u16,
        memory: Memory,
        places: u8,
        access: Access,
        key: Option<Secret>,
    ) -> Job {
        let quorum = match config.quorum {
            Some(quorum) if quorum < config.world => quorum as u8,
            _ => QUORUM_ALL,
        };
        let entry = JobEntry {
            first_slot: memory.first(),
            slots: config.slots,
            k: if matches!(memory, Memory::Shared { .. }) { places } else { 0 },
            lanes: config.lanes as u16,
            window: config.window as u16,
            world: config.world as u8,
            policy: Policy::settled(Mode { quorum, ..Mode::BSP }, 0),
            rises: u8::from(config.parent.is_some()),
            ..JobEntry::default()
        };
        Job {
            name: config.name.clone(),
            number,
            entry,
            memory,
            access,
            key,
            waiting: BTreeMap::new(),
            running: None,
            previous: None,
            timeout: config.timeout_seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
            policy: config.on_failure,
            lost: Vec::new(),
            parent: config.parent_address().zip(config.ranks_here()).map(|(address, ranks)| Parent {
                address,
                ranks,
                child: config.child.map(|child| child as u8),
            }),
            ascending: None,
            watch: Watch::default(),
        }
    }

    pub(super) fn missing(&self) -> Vec<u8> {
        let here = self.here();
        (0..self.entry.world)
            .filter(|rank| here >> rank & 1 == 1 && !self.waiting.contains_key(rank))
            .collect()
    }

    /// A bit for each rank that joins at this node.
    pub(super) fn here(&self) -> u64 {
        match &self.parent {
            Some(parent) => parent.ranks.bits(),
            None => u64::MAX >> (64 - u32::from(self.entry.world)),
        }
    }

    /// A rank of this job.
    pub(super) fn rank(&self, rank: u32) -> Result<u8, ControlError> {
        let world = self.entry.world;
        match u8::try_from(rank) {
            Ok(small) if small < world => Ok(small),
            _ => Err(ControlError::BadRank { job: self.name.clone(), rank, world }),
        }
    }

    /// Checks a join; returns the rank and how long it waits.
    pub(super) fn admit(
        &self,
        request: &JoinRequest,
        address: IpAddr,
    ) -> Result<(u8, StandsFor, Duration), ControlError> {
        let job = || self.name.clone();
        if request.protocol != PROTOCOL {
            return Err(ControlError::BadProtocol(request.protocol));
        }
        if request.members.is_none() && request.world != u32::from(self.entry.world) {
            let (rank, theirs, ours) = (request.rank, request.world, self.entry.world);
            return Err(ControlError::WorldMismatch { job: job(), rank, theirs, ours });
        }
        let rank = self.rank(request.rank)?;
        if let Some(parent) = self.parent {
            if self.here() >> rank & 1 == 0 {
                return Err(ControlError::RankElsewhere {
                    job: job(),
                    rank: request.rank,
                    here: parent.ranks,
                });
            }
            if address.is_ipv4() != parent.address.is_ipv4() {
                // Frames are sent on, not translated.
                let why = "goes on over one version of IP: let the ranks join at this node's address of the same version as its parent's";
                return Err(ControlError::NoLevels { job: job(), why });
            }
        }
        if request.below.is_some() && self.policy == FailurePolicy::Shrink {
            let why = "has lower nodes, and cannot shrink: create it with on_failure = \"abort\"";
            return Err(ControlError::NoLevels { job: job(), why });
        }
        let stands_for = self.admit_node(request, rank)?;
        if !(0.0..=MAX_WAIT_SECONDS).contains(&request.wait_seconds) {
            return Err(ControlError::BadWait);
        }
        if let Some(holder) = self.waiting.get(&rank).map(|waiter| waiter.address)
            && holder != address
        {
            return Err(ControlError::RankTaken { job: job(), rank, holder });
        }
        let differs = |waiter: &Waiter| match (&waiter.layout, &request.layout) {
            (Some(theirs), Some(ours)) => theirs != ours,
            _ => false,
        };
        if let Some((other, _)) = self.waiting.iter().find(|(other, w)| **other != rank && differs(w)) {
            return Err(ControlError::LayoutMismatch { job: job(), rank, other: *other });
        }
        Ok((rank, stands_for, Duration::from_secs_f64(request.wait_seconds)))
    }

    /// Everybody is there: the next generation.
    pub(super) fn form(
        &mut self,
        limits: &Limits,
        generation: u32,
        nonce: u64,
        nodes: Option<Nodes>,
    ) -> Formation {
        let world = self.entry.world;
        let names = nodes.as_ref().and_then(|nodes| nodes.here(world)).unwrap_or(Names::flat(world));
        let waiting = std::mem::take(&mut self.waiting);
        let ids = waiting.values().map(|waiter| waiter.id).collect();
        self.entry.generation = generation;
        self.entry.granted = 0;
        self.entry.policy = self.entry.policy.when_over();
        self.entry.expected = self.here();
        self.watch = Watch::default();
        self.lost.clear();
        // Ranks of other nodes have an address that no packet comes from, and are not expected; but results hold their salts.
        let address = |rank: u8| waiting.get(&rank).map_or(ELSEWHERE, |waiter| waiter.address);
        let attempts = (0..world).map(|rank| waiting.get(&rank).and_then(|waiter| waiter.attempt)).collect();
        let addresses: Vec<IpAddr> = (0..world).map(address).collect();
        let ranks = (0u8..).zip(&addresses).map(|(rank, address)| RankEntry {
            address: table_address(*address),
            key: names.key(nonce, rank),
            ..RankEntry::default()
        });
        let formation = Formation {
            name: self.name.clone(),
            number: self.number,
            entry: self.entry,
            ranks: ranks.collect(),
            waiters: ids,
            grant: self.grant(limits, generation, nonce, nodes.clone()),
            uplink: None,
        };
        self.previous = self.running.take();
        self.running = Some(Generation { number: generation, addresses, left: 0, nonce, attempts, nodes });
        formation
    }

    /// What members of a generation need to know.
    fn grant(&self, limits: &Limits, generation: u32, nonce: u64, nodes: Option<Nodes>) -> Grant {
        Grant {
            protocol: PROTOCOL,
            job: self.number,
            generation,
            nonce,
            world: self.entry.world,
            lanes: self.entry.lanes,
            window: self.entry.window,
            slots: self.entry.slots,
            port_base: limits.port_base,
            ports: limits.ports,
            nodes,
        }
    }

    /// The grant of the generation that runs, for a rank whose wait has led to it.
    pub(super) fn grant_again(
        &self,
        request: &JoinRequest,
        address: IpAddr,
        limits: &Limits,
    ) -> Option<Grant> {
        let running = self.running.as_ref()?;
        let rank = usize::try_from(request.rank).ok()?;
        let same = running.attempts.get(rank).is_some_and(|own| own.is_some() && *own == request.attempt);
        let is_member = self.entry.expected & !running.left & 1u64.checked_shl(request.rank)? != 0;
        let fits = request.protocol == PROTOCOL && running.addresses.get(rank) == Some(&address);
        (same && is_member && fits)
            .then(|| self.grant(limits, running.number, running.nonce, running.nodes.clone()))
    }

    /// Ends the generation, in what is remembered here.
    pub(super) fn end(&mut self, entry: JobEntry) {
        self.entry = entry;
        (self.running, self.previous) = (None, None);
    }

    /// The entry that ends the generation for all ranks: their packets are answered with REJOIN, because it has another
    /// number and still their addresses. Not by clearing `expected`: a slot that a packet under way touches would then
    /// be complete with whoever is in it.
    pub(super) const fn ended(&self, number: u32) -> JobEntry {
        JobEntry { generation: number, ..self.entry }
    }

    /// Takes in progress; says what is to be done if ranks held the others up for too long.
    pub(super) fn observe(
        &mut self,
        now: Instant,
        progress: &ProgressSnapshot,
        next_generation: impl FnOnce() -> u32,
    ) -> Option<Loss> {
        let generation = self.running.as_ref()?.number;
        let terms = Terms { expected: self.entry.expected, slots: self.entry.slots, timeout: self.timeout? };
        let ranks = self.watch.observe(now, terms, progress);
        if ranks.is_empty() {
            return None;
        }
        let lost = ranks.iter().fold(0, |bits, rank| bits | 1u64 << rank);
        let expected = self.entry.expected & !lost;
        let (policy, entry) = match self.policy {
            FailurePolicy::Shrink if expected != 0 && !self.has_nodes() => {
                // F8: a bit less in `expected`, nothing else.
                (FailurePolicy::Shrink, JobEntry { expected, ..self.entry })
            }
            _ => (FailurePolicy::Abort, self.ended(next_generation())),
        };
        Some(Loss { name: self.name.clone(), number: self.number, generation, ranks, policy, entry })
    }

    /// A loss was written to the tables.
    pub(super) fn lose(&mut self, loss: &Loss) {
        self.lost.extend(&loss.ranks);
        self.watch.begin_anew();
        match loss.policy {
            FailurePolicy::Shrink => self.entry = loss.entry,
            FailurePolicy::Abort => self.end(loss.entry),
        }
    }

    /// Changes the synchronisation. While a generation runs that is a word to be written, which takes effect when the
    /// data plane meets it; `min_ack` is up to where all its ranks have the results, or less.
    pub(super) fn plan_sync(&self, sync: Sync, min_ack: Option<u32>) -> Result<Policy, ControlError> {
        let world = self.entry.world;
        if self.parent.is_some() {
            let why = "has a parent, and the root's synchronisation: change it there";
            return Err(ControlError::NoLevels { job: self.name.clone(), why });
        }
        let Some(mode) = sync.mode(world) else {
            let job = &self.name;
            let allowed =
                format!("a quorum of 1 to {world} ranks and a staleness of 0 to {MAX_STALENESS} are");
            return Err(ControlError::BadJob(format!("job `{job}`: {sync:?} is not allowed; {allowed}")));
        };
        if (self.has_nodes() || self.nodes().is_some()) && mode.quorum != QUORUM_ALL {
            let why = "has nodes for ranks, whose results need all of them: there is no quorum";
            return Err(ControlError::NoLevels { job: self.name.clone(), why });
        }
        let policy = self.entry.policy;
        match min_ack {
            Some(min_ack) if policy.is_over(Seq(min_ack)) => Ok(policy.when_over().armed(mode)),
            // Nobody has seen the last one.
            Some(_) if policy.is_armed() => Ok(policy.armed(mode)),
            Some(_) => {
                let from = policy.from().unwrap_or_default().0;
                Err(ControlError::SyncChanging { job: self.name.clone(), from })
            }
            None if policy.after() == mode => Ok(policy),
            None => Ok(Policy::settled(mode, policy.epoch().wrapping_add(1))),
        }
    }

    fn sync_change(&self) -> Option<SyncChange> {
        let policy = self.entry.policy;
        let change =
            SyncChange { before: Sync::of(policy.before()), from: policy.from().map(|Seq(from)| from) };
        (self.running.is_some() && policy.is_changing()).then_some(change)
    }

    pub(super) fn facts(&self, slot_bytes: u32) -> JobFacts {
        let member = |rank: u8| Some(*self.running.as_ref()?.addresses.get(usize::from(rank))?);
        let address = |rank| member(rank).or_else(|| self.waiting.get(&rank).map(|waiter| waiter.address));
        JobFacts {
            status: self.status(slot_bytes),
            entry: self.entry,
            addresses: (0..self.entry.world).map(address).collect(),
        }
    }

    pub(super) fn status(&self, slot_bytes: u32) -> JobStatus {
        let missing_ranks = if self.waiting.is_empty() { Vec::new() } else { self.missing() };
        let state = match (&self.running, self.waiting.is_empty()) {
            (_, false) => JobState::Forming,
            (Some(_), true) => JobState::Running,
            (None, true) if !self.lost.is_empty() => JobState::Failed,
            (None, true) => JobState::Idle,
        };
        let left = self.running.as_ref().map_or(0, |running| running.left);
        JobStatus {
            name: self.name.clone(),
            job: self.number,
            state,
            world: self.entry.world,
            lanes: self.entry.lanes,
            window: self.entry.window,
            slots: self.entry.slots,
            slot_bytes: u64::from(self.memory.slots()) * u64::from(slot_bytes),
            memory: match self.memory {
                Memory::Reserved { .. } => MemoryKind::Reserved,
                Memory::Shared { .. } => MemoryKind::Shared,
            },
            places: self.entry.is_shared().then_some(self.entry.k),
            access: self.access,
            timeout_seconds: self.timeout.map(|timeout| timeout.as_secs_f64()),
            on_failure: self.policy,
            sync: Sync::of(self.entry.policy.after()),
            epoch: self.entry.policy.epoch(),
            sync_change: self.sync_change(),
            generation: self.running.as_ref().map(|running| running.number),
            waiting_ranks: self.waiting.keys().copied().collect(),
            missing_ranks,
            parent: self.parent.map(|parent| parent.address.to_string()),
            ranks_here: self.parent.map(|parent| parent.ranks),
            child: self.parent.and_then(|parent| parent.child),
            members: self
                .running
                .as_ref()
                .and_then(|running| running.nodes.clone())
                .map_or(Vec::new(), |nodes| nodes.members),
            left_ranks: (0..self.entry.world).filter(|rank| left >> rank & 1 == 1).collect(),
            lost_ranks: self.lost.clone(),
        }
    }
}
