//! Who belongs to which job: the decisions of the control plane, without clock, randomness or I/O.
//!
//! Ranks join a job and wait. When all are there, a new generation is *formed*: random generation number and nonce are
//! drawn, the tables to write are handed out as data, and everybody who waits gets a grant. A generation that is
//! running goes on until the next one is complete, all its ranks have left, ranks are lost, or its job is deleted.
//!
//! What ends a generation is a plan first, to be written to the tables, and comes into force here only once that has
//! been done: slots must not go to another job while the data plane still lets the old one write to them.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use paatp_common::job::{Address, JobEntry, RankEntry, mapped};
use paatp_common::limits::MAX_JOBS;
use paatp_common::policy::Policy;
use paatp_common::pool::K_MAX;

use crate::config::{Access, JobConfig, Jobs, MAX_NAME_BYTES, MemoryKind};
use crate::engine::ProgressSnapshot;

pub use super::ascent::{Ascent, Uplink};
use super::error::ControlError;
use super::generation::Generations;
pub use super::job::{Generation, Loss, Parent};
use super::job::{Job, Waiter};
use super::memory::{Memory, NoRoom, SlotTable};
use super::protocol::{Grant, JobStatus, JoinRequest, LeaveRequest, NodeStatus, PROTOCOL, Sync};
use super::token::Secret;

/// How long a deleted job's number and slots stay taken. Its workers ask at least four times a second and learn by an
/// answer that it is over; a number that is taken by another job answers with silence.
pub const CLOSING_TIME: Duration = Duration::from_secs(2);

/// Why a node without levels takes no part in them.
const NO_LEVELS: &str =
    "is on several levels, and this aggregator was not started for that: start it with --levels";

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

/// What became of a join that was not refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joined {
    /// The new wait.
    pub waiter: WaiterId,
    /// An earlier wait of the same rank from the same address, which is over now.
    pub replaced: Option<WaiterId>,
    /// The generation that this join completed; then every waiter is to be answered.
    pub formation: Option<Formation>,
    /// All ranks of this node wait: it is to join the job's parent for them.
    pub ascent: Option<Ascent>,
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
    /// Where the sums go, if not to these ranks.
    pub uplink: Option<Uplink>,
}

/// What becomes of a rank that leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaving {
    /// It waited; that wait is over.
    Waiter(WaiterId),
    /// It is noted. Others are still members.
    Noted,
    /// It was the last: the entry to write, then [`Membership::finish`] is to be called.
    Last {
        /// The job's number.
        number: u16,
        /// Its entry, without a generation.
        entry: JobEntry,
    },
}

/// A job that is to be deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deletion {
    number: u16,
    /// What to write first, with the job's number: its generation is over. Nothing if it has none.
    pub write: Option<(u16, JobEntry)>,
    /// Who waits for the job.
    pub waiters: Vec<WaiterId>,
}

/// What the node can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// First UDP port.
    pub port_base: u16,
    /// Number of UDP ports.
    pub ports: u16,
    /// Most lanes that fit a slot.
    pub slot_lanes: u32,
    /// Bytes of a slot.
    pub slot_bytes: u32,
    /// Most lanes that fit the interface's MTU.
    pub mtu_lanes: Option<u32>,
    /// The same for ranks that come over IPv6.
    pub ipv6_lanes: Option<u32>,
}

/// A job as the control plane knows it, copied for those who look.
#[derive(Clone, Debug)]
pub struct JobFacts {
    /// As it is told.
    pub status: JobStatus,
    /// As the data plane has it.
    pub entry: JobEntry,
    /// Where each rank joined from: members of the generation that runs, otherwise those that wait.
    pub addresses: Vec<Option<IpAddr>>,
}

/// The node and all its jobs, in the order of their numbers.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The node as a whole.
    pub node: NodeStatus,
    /// Its jobs.
    pub jobs: Vec<JobFacts>,
}

/// A deleted job whose members may not know yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Closing {
    pub(super) number: u16,
    pub(super) memory: Memory,
    pub(super) until: Instant,
}

/// The jobs of one aggregator.
#[derive(Clone, Debug)]
pub struct Membership {
    pub(super) jobs: BTreeMap<u16, Job>,
    pub(super) closing: Vec<Closing>,
    pub(super) slots: SlotTable,
    pub(super) generations: Generations,
    pub(super) limits: Limits,
    pub(super) draining: bool,
    pub(super) pool_slots: u32,
    /// Places in the pool for each chunk, where they are not tuned.
    places: Option<u8>,
    /// The node takes sums of lower nodes.
    levels: bool,
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
        let mut membership = Membership::empty(jobs, port_base, ports);
        for job in jobs.list() {
            // Cannot fail: `Jobs` has counted names, numbers and slots.
            if let Err(error) = membership.create(job, Access::Open, None) {
                tracing::error!(job = job.name, "not served: {error}");
            }
        }
        membership
    }

    /// No jobs, and the slots that there are for some.
    pub(super) fn empty(jobs: &Jobs, port_base: u16, ports: u16) -> Membership {
        let size = jobs.slot_size();
        let limits = Limits {
            port_base,
            ports,
            slot_lanes: size.lanes(),
            slot_bytes: u32::try_from(size.bytes()).unwrap_or(u32::MAX),
            mtu_lanes: None,
            ipv6_lanes: None,
        };
        let mut membership = Membership {
            jobs: BTreeMap::new(),
            closing: Vec::new(),
            // Checked by `Jobs`: all slots together are far below 2^32.
            slots: SlotTable::new(u32::try_from(jobs.slots()).unwrap_or(u32::MAX)),
            pool_slots: jobs.pool_slots(),
            places: jobs.pool_places(),
            generations: Generations::default(),
            limits,
            draining: false,
            levels: jobs.levels(),
            next_waiter: 0,
        };
        // The pool is the beginning of the table, where the engine told the program that it is.
        let _ = membership.slots.reserve(membership.pool_slots);
        membership
    }

    /// With the most lanes that fit the interface's MTU, and of those that fit over IPv6.
    #[must_use]
    pub fn with_mtu(mut self, mtu_lanes: Option<u32>, ipv6_lanes: Option<u32>) -> Membership {
        (self.limits.mtu_lanes, self.limits.ipv6_lanes) = (mtu_lanes, ipv6_lanes);
        self
    }

    /// Adds a job. `access` is for one that does not say; `key` opens it.
    ///
    /// # Errors
    /// If it cannot be; nothing has changed then.
    pub fn create(
        &mut self,
        config: &JobConfig,
        access: Access,
        key: Option<Secret>,
    ) -> Result<JobStatus, ControlError> {
        config.check()?;
        if self.draining {
            return Err(ControlError::Draining);
        }
        let is_shared = config.memory == MemoryKind::Shared;
        if is_shared && self.pool_slots == 0 {
            return Err(ControlError::NoPool(config.name.clone()));
        }
        if self.jobs.values().any(|job| job.name == config.name) {
            return Err(ControlError::JobExists(config.name.clone()));
        }
        if config.parent.is_some() && !self.levels {
            return Err(ControlError::NoLevels { job: config.name.clone(), why: NO_LEVELS });
        }
        self.check_lanes(config)?;
        let taken = |number: &u16| {
            self.jobs.contains_key(number) || self.closing.iter().any(|closing| closing.number == *number)
        };
        let number = (0..MAX_JOBS as u16).find(|number| !taken(number)).ok_or(ControlError::NodeFull)?;
        let own = config.own_slots();
        let memory = self.slots.reserve(own).map_err(|room| self.no_room(own, room))?;
        let memory = if is_shared { Memory::Shared { own: memory.first() } } else { memory };
        let places = self.places.unwrap_or(K_MAX);
        let job = Job::new(config, number, memory, places, config.access.unwrap_or(access), key);
        let status = job.status(self.limits.slot_bytes);
        self.jobs.insert(number, job);
        Ok(status)
    }

    fn check_lanes(&self, config: &JobConfig) -> Result<(), ControlError> {
        let too_long = |fitting, limit, advice| {
            Err(ControlError::TooLong {
                job: config.name.clone(),
                lanes: config.lanes,
                fitting,
                limit,
                advice,
            })
        };
        if config.lanes > self.limits.slot_lanes {
            let advice = "lower the job's lanes, or start the aggregator for longer ones ([node] lanes)";
            return too_long(self.limits.slot_lanes, "a slot of this node", advice);
        }
        match self.limits.mtu_lanes {
            Some(fitting) if config.lanes > fitting => {
                too_long(fitting, "the interface's MTU", "lower the job's lanes, or raise the MTU")
            }
            _ => Ok(()),
        }
    }

    fn no_room(&self, wanted: u32, room: NoRoom) -> ControlError {
        // Rings are powers of two.
        let fitting = room.longest.checked_ilog2().map_or(0, |bits| 1 << bits);
        ControlError::MemoryFull {
            wanted,
            free: room.free,
            longest: room.longest,
            fitting,
            slot_bytes: self.limits.slot_bytes,
        }
    }

    /// What is to be done to delete a job; [`Membership::delete`] does it.
    ///
    /// # Errors
    /// If there is none of that name.
    pub fn plan_deletion(&mut self, name: &str, random: u32) -> Result<Deletion, ControlError> {
        let number = self.find(name)?.number;
        let next = self.generations.next(random);
        let job = self.find(name)?;
        // An entry that was never written holds nothing.
        let write = (job.entry.generation != 0).then(|| (number, job.ended(next)));
        Ok(Deletion { number, write, waiters: job.waiting.values().map(|waiter| waiter.id).collect() })
    }

    /// Deletes a job. If it has had a generation, its number and slots are taken until [`CLOSING_TIME`] is over.
    pub fn delete(&mut self, deletion: &Deletion, now: Instant) {
        let Some(job) = self.jobs.remove(&deletion.number) else { return };
        if deletion.write.is_some() {
            self.closing.push(Closing { number: job.number, memory: job.memory, until: now + CLOSING_TIME });
        } else {
            self.slots.release(job.memory);
        }
    }

    /// Numbers of deleted jobs whose entries are to be cleared; then [`Membership::free`] is to be called.
    #[must_use]
    pub fn closed(&self, now: Instant) -> Vec<u16> {
        self.closing.iter().filter(|closing| closing.until <= now).map(|closing| closing.number).collect()
    }

    /// The entry of a deleted job has been cleared: number and slots are free.
    pub fn free(&mut self, number: u16) {
        if let Some(index) = self.closing.iter().position(|closing| closing.number == number) {
            self.slots.release(self.closing.swap_remove(index).memory);
        }
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
    ) -> Result<Joined, ControlError> {
        let (limits, draining) = (self.limits, self.draining);
        let job = self.find(name)?;
        let (number, is_on_levels) = (job.number, job.parent.is_some() || request.below.is_some());
        if draining {
            return Err(ControlError::Draining);
        }
        // Also a job of before: its ranks would be given the sum of this node alone.
        if is_on_levels && !self.levels {
            return Err(ControlError::NoLevels { job: name.into(), why: NO_LEVELS });
        }
        let Some(job) = self.jobs.get_mut(&number) else { return Err(unknown(name, Vec::new())) };
        let address = address.to_canonical();
        let (rank, stands_for, wait) = job.admit(request, address)?;
        let lanes = u32::from(job.entry.lanes);
        if let Some(fitting) = limits.ipv6_lanes.filter(|fitting| address.is_ipv6() && lanes > *fitting) {
            return Err(ControlError::TooLong {
                job: job.name.clone(),
                lanes,
                fitting,
                limit: "the aggregator's MTU over IPv6",
                advice: "use the aggregator's IPv4 address, or lower the job's lanes",
            });
        }
        let id = WaiterId(self.next_waiter);
        self.next_waiter += 1;
        let (layout, attempt) = (request.layout.clone(), request.attempt);
        let waiter = Waiter { id, address, layout, attempt, stands_for, deadline: now + wait };
        let replaced = job.waiting.insert(rank, waiter).map(|old| old.id);
        let is_complete = job.missing().is_empty();
        let ascent = job.begin_ascent(now);
        let formation = (is_complete && job.parent.is_none()).then(|| {
            let generation = self.generations.next(entropy.generation);
            let nodes = job.nodes();
            job.form(&limits, generation, entropy.nonce, nodes)
        });
        Ok(Joined { waiter: id, replaced, formation, ascent })
    }

    /// A rank asks again for the grant that its wait has brought already, because the answer got lost: the same one.
    pub fn grant_again(
        &mut self,
        name: &str,
        request: &JoinRequest,
        address: IpAddr,
    ) -> Option<(WaiterId, Grant)> {
        let job = self.jobs.values().find(|job| job.name == name)?;
        let grant = job.grant_again(request, address.to_canonical(), &self.limits)?;
        let id = WaiterId(self.next_waiter);
        self.next_waiter += 1;
        Some((id, grant))
    }

    /// The tables of a generation have been written: nobody asks for the one before any more.
    pub fn formed(&mut self, formation: &Formation) {
        if let Some(job) = self.jobs.get_mut(&formation.number) {
            job.previous = None;
        }
    }

    /// The tables of a generation could not be written: it does not run.
    pub fn unform(&mut self, formation: &Formation) {
        if let Some(job) = self.jobs.get_mut(&formation.number) {
            job.end(formation.entry);
        }
    }

    /// A rank leaves: it does not wait any longer, or is done with its generation.
    ///
    /// # Errors
    /// If it is no member of that generation, or asks from another address.
    pub fn leave(
        &mut self,
        name: &str,
        request: &LeaveRequest,
        address: IpAddr,
    ) -> Result<Leaving, ControlError> {
        let number = self.find(name)?.number;
        let Some(job) = self.jobs.get_mut(&number) else { return Err(unknown(name, Vec::new())) };
        if request.protocol != PROTOCOL {
            return Err(ControlError::BadProtocol(request.protocol));
        }
        let rank = job.rank(request.rank)?;
        let (address, job_name) = (address.to_canonical(), job.name.clone());
        let foreign = || ControlError::ForeignAddress { job: job_name.clone(), rank };
        let Some(generation) = request.generation else {
            return match job.waiting.get(&rank) {
                Some(waiter) if waiter.address != address => Err(foreign()),
                Some(_) => Ok(job.waiting.remove(&rank).map_or(Leaving::Noted, |w| Leaving::Waiter(w.id))),
                None => Err(ControlError::NoMember { job: job_name, rank, generation: 0 }),
            };
        };
        let Some(running) = job.running.as_mut().filter(|running| running.number == generation) else {
            return Err(ControlError::NoMember { job: job_name, rank, generation });
        };
        if running.addresses.get(usize::from(rank)) != Some(&address) {
            return Err(foreign());
        }
        running.left |= 1 << rank;
        // Those that were lost will not say that they leave.
        if job.entry.expected & !running.left != 0 {
            return Ok(Leaving::Noted);
        }
        Ok(Leaving::Last { number, entry: JobEntry { generation: 0, ..job.entry } })
    }

    /// The entry of a job that all ranks left has been written.
    pub fn finish(&mut self, number: u16, entry: JobEntry) {
        if let Some(job) = self.jobs.get_mut(&number) {
            job.end(entry);
        }
    }

    /// A waiter hung up or gave up. Returns the ranks that it waited for, or nothing if its wait was over before.
    pub fn abandon(&mut self, name: &str, waiter: WaiterId) -> Option<Vec<u8>> {
        let job = self.jobs.values_mut().find(|job| job.name == name)?;
        let rank = *job.waiting.iter().find(|(_, waiting)| waiting.id == waiter)?.0;
        let missing = job.missing();
        job.waiting.remove(&rank);
        Some(missing)
    }

    /// When a waiter gives up.
    #[must_use]
    pub fn deadline(&self, name: &str, waiter: WaiterId) -> Option<Instant> {
        let job = self.jobs.values().find(|job| job.name == name)?;
        job.waiting.values().find(|waiting| waiting.id == waiter).map(|waiting| waiting.deadline)
    }

    /// What a job's policy is to become: the number of its job, what it is and what it is to be. `min_ack` tells up to
    /// where all ranks of a job that runs have the results. To be written, then given to [`Membership::note_policy`].
    ///
    /// # Errors
    /// If there is no such job, a number is out of range, or the last change is not over.
    pub fn plan_sync(
        &self,
        name: &str,
        sync: Sync,
        min_ack: Option<u32>,
    ) -> Result<(u16, Policy, Policy), ControlError> {
        let job = self.find(name)?;
        Ok((job.number, job.entry.policy, job.plan_sync(sync, min_ack)?))
    }

    /// The policy of a job as the tables have it.
    pub fn note_policy(&mut self, number: u16, policy: Policy) {
        if let Some(job) = self.jobs.get_mut(&number) {
            job.entry.policy = policy;
        }
    }

    /// Where one job stands.
    ///
    /// # Errors
    /// If there is none of that name.
    pub fn status(&self, name: &str) -> Result<JobStatus, ControlError> {
        self.find(name).map(|job| job.status(self.limits.slot_bytes))
    }

    /// Takes nothing new from now on, or does again. Returns those whose wait is over.
    pub fn set_draining(&mut self, draining: bool) -> Vec<WaiterId> {
        self.draining = draining;
        if !draining {
            return Vec::new();
        }
        let waiting = self.jobs.values_mut().flat_map(|job| std::mem::take(&mut job.waiting));
        waiting.map(|(_, waiter)| waiter.id).collect()
    }

    /// It takes nothing new.
    #[must_use]
    pub const fn is_draining(&self) -> bool {
        self.draining
    }

    /// Jobs of which a generation runs and whose ranks must not hold the others up: number and entry.
    #[must_use]
    pub fn watched(&self) -> Vec<(u16, JobEntry)> {
        let watched = self.jobs.values().filter(|job| job.running.is_some() && job.timeout.is_some());
        watched.map(|job| (job.number, job.entry)).collect()
    }

    /// Jobs of which a generation runs: number and entry.
    #[must_use]
    pub fn running(&self) -> Vec<(u16, JobEntry)> {
        let running = self.jobs.values().filter(|job| job.running.is_some());
        running.map(|job| (job.number, job.entry)).collect()
    }

    /// Grants a job's ranks a window to run ahead, in chunks. Returns the entry, which is to be written.
    pub fn grant(&mut self, number: u16, window: u16) -> Option<JobEntry> {
        let job = self.jobs.get_mut(&number)?;
        job.entry.granted = window;
        Some(job.entry)
    }

    /// Jobs whose places in the pool are tuned, of which a generation runs: number and entry.
    #[must_use]
    pub fn tuned(&self) -> Vec<(u16, JobEntry)> {
        let mut running = self.running();
        running.retain(|(_, entry)| entry.is_shared() && self.places.is_none());
        running
    }

    /// Lets a job's chunks take so many places in the pool. Returns the entry, which is to be written, if that is new.
    pub fn set_places(&mut self, number: u16, places: u8) -> Option<JobEntry> {
        let job = self.jobs.get_mut(&number).filter(|job| job.entry.k != places)?;
        job.entry.k = places;
        Some(job.entry)
    }

    /// Takes in how far a watched job's ranks are. A loss is to be written, then given to [`Membership::lose`].
    pub fn observe(
        &mut self,
        now: Instant,
        number: u16,
        progress: &ProgressSnapshot,
        random: u32,
    ) -> Option<Loss> {
        let generations = &mut self.generations;
        self.jobs.get_mut(&number)?.observe(now, progress, || generations.next(random))
    }

    /// A loss has been written.
    pub fn lose(&mut self, loss: &Loss) {
        if let Some(job) = self.jobs.get_mut(&loss.number) {
            job.lose(loss);
        }
    }

    /// All jobs, in the order of their numbers.
    #[must_use]
    pub fn list(&self) -> Vec<JobStatus> {
        self.jobs.values().map(|job| job.status(self.limits.slot_bytes)).collect()
    }

    /// One job, with its complete generation.
    ///
    /// # Errors
    /// If there is none of that name.
    pub fn details(&self, name: &str) -> Result<(JobStatus, JobEntry, Option<Generation>), ControlError> {
        let job = self.find(name)?;
        Ok((job.status(self.limits.slot_bytes), job.entry, job.running.clone()))
    }

    /// What those who look are told.
    #[must_use]
    pub fn facts(&self) -> Facts {
        let jobs = self.jobs.values().map(|job| job.facts(self.limits.slot_bytes));
        Facts { node: self.node(), jobs: jobs.collect() }
    }

    /// The same of one job.
    ///
    /// # Errors
    /// If there is none of that name.
    pub fn job_facts(&self, name: &str) -> Result<JobFacts, ControlError> {
        Ok(self.find(name)?.facts(self.limits.slot_bytes))
    }

    /// Who may join a job, and what opens it. A job that there is not needs nothing: its name is no secret.
    #[must_use]
    pub fn access(&self, name: &str) -> (Access, Option<Secret>) {
        let found = self.jobs.values().find(|job| job.name == name);
        found.map_or((Access::Open, None), |job| (job.access, job.key))
    }

    /// The node as a whole, but for what its pool holds.
    #[must_use]
    pub fn node(&self) -> NodeStatus {
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let room = self.slots.room();
        NodeStatus {
            version: env!("CARGO_PKG_VERSION").into(),
            draining: self.draining,
            jobs: count(self.jobs.len()),
            max_jobs: count(MAX_JOBS),
            running_jobs: count(self.jobs.values().filter(|job| job.running.is_some()).count()),
            closing_jobs: count(self.closing.len()),
            max_lanes: self
                .limits
                .mtu_lanes
                .map_or(self.limits.slot_lanes, |mtu| mtu.min(self.limits.slot_lanes)),
            slots: self.slots.total(),
            free_slots: room.free,
            longest_free_slots: room.longest,
            slot_bytes: self.limits.slot_bytes,
            pool_slots: self.pool_slots,
            pool_slots_in_use: 0,
        }
    }

    fn find(&self, name: &str) -> Result<&Job, ControlError> {
        let found = self.jobs.values().find(|job| job.name == name);
        let open = || self.jobs.values().filter(|job| job.access == Access::Open);
        found.ok_or_else(|| unknown(name, open().map(|job| job.name.clone()).collect()))
    }
}

fn unknown(name: &str, known: Vec<String>) -> ControlError {
    ControlError::UnknownJob { name: name.chars().take(MAX_NAME_BYTES).collect(), known }
}

#[cfg(test)]
#[path = "membership_tests.rs"]
mod tests;
