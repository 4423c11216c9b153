//! What a restart needs to know of the jobs and the kernel's tables do not tell, and how both make a membership again.
//!
//! The kernel is right: what its tables say of a job that runs comes before what the file says, field by field, and a
//! difference is told. The file adds names, who may join, nonces, and who has left.
//!
//! Nothing here does I/O but [`StateFile`](super::state_file::StateFile).

use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

use paatp_common::job::{JobEntry, RankEntry};
use paatp_common::limits::{MAX_JOBS, MAX_RANKS};
use serde::{Deserialize, Serialize};

use crate::config::{Access, FailurePolicy, JobConfig, Jobs, MemoryKind, RankRange};
use crate::engine::Truth;

use super::job::{Generation, Job};
use super::membership::{CLOSING_TIME, Closing, Membership};
use super::memory::Memory;
use super::protocol::{Nodes, hex, maybe_hex};
use super::token::Secret;

/// Version of the state's shape.
pub const STATE_VERSION: u32 = 1;

/// What the name of a job begins with that the kernel knows and nobody else.
const UNKNOWN: &str = "adopted-";

/// What is kept of all jobs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// The node takes nothing new.
    pub draining: bool,
    /// Generation numbers that must not be given out again, oldest first, eight hexadecimal digits each.
    pub generations: String,
    /// The jobs.
    pub jobs: Vec<SavedJob>,
    /// Deleted jobs whose slots are not free yet.
    pub closing: Vec<SavedClosing>,
}

/// One job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedJob {
    /// Its name.
    pub name: String,
    /// Its number.
    pub number: u16,
    /// Its entry, as hexadecimal bytes: in force from the next generation on.
    pub entry: String,
    /// Who may join.
    pub access: Access,
    /// SHA-256 of the key that opens it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Longest time that a rank may hold the others up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<f64>,
    /// What happens then.
    pub on_failure: FailurePolicy,
    /// Where its sums go.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// The ranks that join here, with a parent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<RankRange>,
    /// The rank there that all of them are together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub child: Option<u32>,
    /// Ranks that held the others up.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<u8>,
    /// The generation that runs, and the one before until the tables say that it is over.
    pub generations: Vec<SavedGeneration>,
}

/// One generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedGeneration {
    /// Its number.
    pub number: u32,
    /// Where its salts are drawn from.
    #[serde(with = "hex")]
    pub nonce: u64,
    /// Its ranks.
    pub members: Vec<SavedMember>,
    /// Those that said that they are done.
    pub left: u64,
    /// Who stands behind the ranks of the root, if some are nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes: Option<Nodes>,
}

/// One rank of a generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedMember {
    /// Its address.
    pub address: IpAddr,
    /// What tells its wait from others.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "maybe_hex")]
    pub attempt: Option<u64>,
}

/// Slots that belong to a deleted job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedClosing {
    /// The job's number.
    pub number: u16,
    /// Its first slot.
    pub first: u32,
    /// Their number.
    pub slots: u32,
}

/// What to make a membership of.
#[derive(Clone, Copy, Debug)]
pub struct Sources<'a> {
    /// The jobs of command line and file, and the slots that there are.
    pub jobs: &'a Jobs,
    /// First UDP port in force.
    pub port_base: u16,
    /// Number of ports in force.
    pub ports: u16,
    /// What was kept.
    pub state: &'a State,
    /// What the kernel's tables say, by number.
    pub truth: &'a [Truth],
}

/// A membership as it was, as far as anybody knows.
#[derive(Clone, Debug)]
pub struct Restored {
    /// The jobs.
    pub membership: Membership,
    /// Entries to be written to the tables before anything else.
    pub writes: Vec<(u16, JobEntry)>,
    /// What does not fit together, for people.
    pub notes: Vec<String>,
}

/// Puts a membership together. `random` draws numbers for generations.
pub fn restore(sources: Sources<'_>, now: Instant, random: &mut dyn FnMut() -> u32) -> Restored {
    let Sources { jobs, port_base, ports, state, truth } = sources;
    let membership = Membership::empty(jobs, port_base, ports);
    let mut work = Work { membership, writes: Vec::new(), notes: Vec::new(), truth, random };
    work.remember(state);
    // What runs first: its slots are where they are.
    let runs = |job: &&SavedJob| entry_of(truth, job.number).generation != 0;
    let (running, idle): (Vec<_>, Vec<_>) = state.jobs.iter().partition(runs);
    state.closing.iter().for_each(|closing| work.close(closing, now));
    running.into_iter().for_each(|job| work.job(job));
    work.unknown(state);
    idle.into_iter().for_each(|job| work.job(job));
    jobs.list().iter().for_each(|config| work.configured(config));
    work.membership.draining = state.draining;
    Restored { membership: work.membership, writes: work.writes, notes: work.notes }
}

fn entry_of(truth: &[Truth], number: u16) -> JobEntry {
    truth.get(usize::from(number)).map(|(entry, _)| *entry).unwrap_or_default()
}

struct Work<'a> {
    membership: Membership,
    writes: Vec<(u16, JobEntry)>,
    notes: Vec<String>,
    truth: &'a [Truth],
    random: &'a mut dyn FnMut() -> u32,
}

impl Work<'_> {
    fn note(&mut self, what: String) {
        self.notes.push(what);
    }

    fn remember(&mut self, state: &State) {
        for number in read_numbers(&state.generations) {
            self.membership.generations.remember(number);
        }
        for (entry, _) in self.truth {
            self.membership.generations.remember(entry.generation);
        }
    }

    /// Ends what runs under a number: its members get REJOIN.
    fn end(&mut self, number: u16, entry: JobEntry) -> JobEntry {
        let drawn = (self.random)();
        let ended = JobEntry { generation: self.membership.generations.next(drawn), ..entry };
        self.writes.push((number, ended));
        ended
    }

    /// A deleted job: its time begins anew.
    fn close(&mut self, closing: &SavedClosing, now: Instant) {
        let number = closing.number;
        if usize::from(number) >= MAX_JOBS || self.is_taken(number) {
            return self
                .note(format!("a deleted job's number {number} is taken or cannot be; it is forgotten"));
        }
        let Some(memory) = self.membership.slots.take(closing.first, closing.slots) else {
            return self
                .note(format!("a deleted job's slots (number {number}) are not there; it is forgotten"));
        };
        let entry = entry_of(self.truth, number);
        if entry.generation != 0 && self.is_sane(&entry) {
            self.end(number, entry);
        } else if entry.generation != 0 {
            self.writes.push((number, JobEntry::default()));
        }
        self.membership.closing.push(Closing { number, memory, until: now + CLOSING_TIME });
    }

    /// Takes the slots that an entry names.
    fn take(&mut self, entry: &JobEntry) -> Option<Memory> {
        let memory = self.membership.slots.take(entry.first_slot, own_slots(entry))?;
        Some(kind_of(entry, memory))
    }

    fn is_taken(&self, number: u16) -> bool {
        self.membership.jobs.contains_key(&number)
            || self.membership.closing.iter().any(|closing| closing.number == number)
    }

    /// A job of the file.
    fn job(&mut self, saved: &SavedJob) {
        let (name, number) = (saved.name.as_str(), saved.number);
        let (kernel, ranks) = self.truth.get(usize::from(number)).cloned().unwrap_or_default();
        let Some(kept) = read_entry(&saved.entry).filter(|entry| self.is_sane(entry)) else {
            return self.note(format!("job `{name}`: its entry in the state file cannot be used"));
        };
        let same_name = self.membership.jobs.values().any(|job| job.name == name);
        if usize::from(number) >= MAX_JOBS || self.is_taken(number) || same_name {
            return self
                .note(format!("job `{name}`: name or number {number} is another job's, or cannot be"));
        }
        let runs = kernel.generation != 0 && self.is_sane(&kernel);
        if kernel.generation != 0 && !runs {
            self.writes.push((number, JobEntry::default()));
            self.note(format!("job `{name}`: its entry in the kernel cannot be; it is cleared"));
        }
        let mut entry = if runs { kernel } else { JobEntry { generation: 0, ..kept } };
        if runs {
            self.compare(name, &kernel, &kept);
        }
        let memory = match self.take(&entry) {
            Some(memory) => memory,
            // It holds nothing: any slots will do.
            None if !runs => match self.membership.slots.reserve(own_slots(&entry)) {
                Ok(memory) => kind_of(&entry, memory),
                Err(_) => return self.note(format!("job `{name}` is not served: there are no slots for it")),
            },
            None => {
                self.end(number, kernel);
                return self.note(format!("job `{name}` is not served: others have its slots"));
            }
        };
        entry.first_slot = memory.first();
        let found =
            saved.generations.iter().find(|generation| runs && generation.number == kernel.generation);
        let running = found.map(|generation| self.generation(name, generation, &ranks));
        if runs && running.is_none() {
            // All have left, it was ended, or it was to be: whoever is still there is told.
            let ended = self.end(number, kernel);
            entry = JobEntry { generation: ended.generation, policy: kept.policy, ..entry };
        }
        let mut job = self.make(saved, entry, memory);
        job.lost = match &running {
            Some(_) => lost(entry, &saved.lost),
            None => saved.lost.clone(),
        };
        let here = job.here();
        job.lost.retain(|rank| here.checked_shr((*rank).into()).unwrap_or(0) & 1 == 1);
        job.running = running;
        self.membership.jobs.insert(number, job);
    }

    /// The generation that runs; its ranks' addresses are the kernel's.
    fn generation(&mut self, name: &str, saved: &SavedGeneration, ranks: &[RankEntry]) -> Generation {
        let addresses: Vec<IpAddr> = ranks.iter().map(|rank| address(rank.address)).collect();
        if !saved.members.iter().map(|member| member.address).eq(addresses.iter().copied()) {
            self.note(format!("job `{name}`: the addresses of its ranks are not those of the state file"));
        }
        let attempts = (0..ranks.len()).map(|rank| saved.members.get(rank).and_then(|member| member.attempt));
        Generation {
            number: saved.number,
            attempts: attempts.collect(),
            addresses,
            left: saved.left,
            nonce: saved.nonce,
            nodes: saved.nodes.clone(),
        }
    }

    fn make(&self, saved: &SavedJob, entry: JobEntry, memory: Memory) -> Job {
        let config = JobConfig {
            access: Some(saved.access),
            timeout_seconds: saved.timeout_seconds,
            on_failure: saved.on_failure,
            lanes: entry.lanes.into(),
            slots: entry.slots,
            window: entry.window.into(),
            memory: if entry.is_shared() { MemoryKind::Shared } else { MemoryKind::Reserved },
            parent: saved.parent.clone(),
            ranks: saved.ranks.filter(|_| saved.child.is_none()),
            child: saved.child,
            ..JobConfig::new(&saved.name, entry.world.into())
        };
        let key = saved.key.as_deref().and_then(read_digest).map(Secret::of_digest);
        let mut job = Job::new(&config, saved.number, memory, entry.k, saved.access, key);
        job.entry = entry;
        job
    }

    /// The kernel is right; that it differs is told.
    fn compare(&mut self, name: &str, kernel: &JobEntry, kept: &JobEntry) {
        let fields = [
            ("first slot", kernel.first_slot, kept.first_slot),
            ("slots", kernel.slots, kept.slots),
            ("lanes", kernel.lanes.into(), kept.lanes.into()),
            ("window", kernel.window.into(), kept.window.into()),
            ("ranks", kernel.world.into(), kept.world.into()),
        ];
        for (what, kernel, kept) in fields.into_iter().filter(|(_, kernel, kept)| kernel != kept) {
            self.note(format!("job `{name}`: {what} {kernel} in the kernel, {kept} in the state file"));
        }
    }

    /// What the kernel serves and the file does not know goes on under another name: its slots are not free.
    fn unknown(&mut self, state: &State) {
        for (number, (entry, ranks)) in (0u16..).zip(self.truth) {
            if entry.generation == 0 || self.is_taken(number) {
                continue;
            }
            let mut name = format!("{UNKNOWN}{number}");
            while state.jobs.iter().any(|job| job.name == name) {
                name.push('_');
            }
            let memory = self.is_sane(entry).then(|| self.take(entry));
            let Some(memory) = memory.flatten() else {
                self.writes.push((number, JobEntry::default()));
                self.note(format!(
                    "the kernel's entry {number} cannot be a job of these tables; it is cleared"
                ));
                continue;
            };
            let saved = SavedJob {
                name: name.clone(),
                number,
                entry: String::new(),
                access: Access::Token,
                key: None,
                timeout_seconds: None,
                on_failure: FailurePolicy::Abort,
                parent: None,
                ranks: None,
                child: None,
                lost: Vec::new(),
                generations: Vec::new(),
            };
            let mut job = self.make(&saved, *entry, memory);
            job.lost = lost(*entry, &[]);
            job.running = Some(Generation {
                number: entry.generation,
                addresses: ranks.iter().map(|rank| address(rank.address)).collect(),
                left: 0,
                nonce: 0,
                attempts: vec![None; ranks.len()],
                nodes: None,
            });
            self.membership.jobs.insert(number, job);
            self.note(format!(
                "the kernel serves job number {number}, of which the state file knows nothing; it goes on as `{name}` until it is deleted (`paatp job delete {name}`)"
            ));
        }
    }

    /// A job of command line or file: made if it is not there, else it says who may join and what happens to ranks that
    /// hold others up.
    fn configured(&mut self, config: &JobConfig) {
        let Some(job) = self.membership.jobs.values_mut().find(|job| job.name == config.name) else {
            if let Err(error) = self.membership.create(config, Access::Open, None) {
                self.note(format!("job `{}` is not served: {error}", config.name));
            }
            return;
        };
        job.access = config.access.unwrap_or(Access::Open);
        job.timeout = config.timeout_seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        job.policy = config.on_failure;
        let goes = job.parent.map(|parent| (parent.address, (parent.ranks, parent.child.map(u32::from))));
        let asked = config.parent_address().zip(config.ranks_here().map(|ranks| (ranks, config.child)));
        let entry = job.entry;
        let fields = [
            ("world", config.world, entry.world.into()),
            ("lanes", config.lanes, entry.lanes.into()),
            ("slots", config.slots, entry.slots),
            ("window", config.window, entry.window.into()),
        ];
        if goes != asked {
            self.note(format!(
                "job `{}`: parent and ranks stay as they are; delete the job, or stop paatp (SIGTERM) and start it",
                config.name
            ));
        }
        for (key, asked, is) in fields.into_iter().filter(|(_, asked, is)| asked != is) {
            self.note(format!(
                "job `{}`: {key} stays {is}, although {asked} is asked for; delete the job, or stop paatp (SIGTERM) and start it",
                config.name
            ));
        }
    }

    /// An entry that a job of these tables can have.
    fn is_sane(&self, entry: &JobEntry) -> bool {
        let end = entry.first_slot.checked_add(own_slots(entry));
        let fits_the_pool = !entry.is_shared() || self.membership.pool_slots > 0;
        (1..=MAX_RANKS).contains(&usize::from(entry.world))
            && entry.slots.is_power_of_two()
            && fits_the_pool
            && end.is_some_and(|end| end <= self.membership.slots.total())
    }
}

/// Slots that belong to a job alone.
const fn own_slots(entry: &JobEntry) -> u32 {
    if entry.is_shared() { 1 } else { entry.slots }
}

/// What slots are to a job that has them.
const fn kind_of(entry: &JobEntry, memory: Memory) -> Memory {
    if entry.is_shared() { Memory::Shared { own: memory.first() } } else { memory }
}

/// Ranks that do not count any more, those that are known to be lost first and in their order.
fn lost(entry: JobEntry, known: &[u8]) -> Vec<u8> {
    let gone = |rank: &u8| entry.expected >> rank & 1 == 0;
    let mut lost: Vec<u8> = known.iter().copied().filter(|rank| *rank < entry.world).filter(gone).collect();
    let others = (0..entry.world).filter(gone).filter(|rank| !lost.contains(rank));
    let others: Vec<u8> = others.collect();
    lost.extend(others);
    lost
}

/// An address of the tables.
fn address(address: [u8; 16]) -> IpAddr {
    IpAddr::V6(Ipv6Addr::from(address)).to_canonical()
}

impl Membership {
    /// What is to be kept.
    #[must_use]
    pub fn state(&self) -> State {
        let jobs = self.jobs.values().map(|job| SavedJob {
            name: job.name.clone(),
            number: job.number,
            entry: digits(bytemuck::bytes_of(&job.entry)),
            access: job.access,
            key: job.key.map(|key| digits(key.digest())),
            timeout_seconds: job.timeout.map(|timeout| timeout.as_secs_f64()),
            on_failure: job.policy,
            parent: job.parent.map(|parent| parent.address.to_string()),
            ranks: job.parent.map(|parent| parent.ranks),
            child: job.parent.and_then(|parent| parent.child).map(u32::from),
            lost: job.lost.clone(),
            generations: job.running.iter().chain(&job.previous).map(saved).collect(),
        });
        let closing = self.closing.iter().map(|closing| SavedClosing {
            number: closing.number,
            first: closing.memory.first(),
            slots: closing.memory.slots(),
        });
        State {
            draining: self.draining,
            generations: self.generations.remembered().map(|number| format!("{number:08x}")).collect(),
            jobs: jobs.collect(),
            closing: closing.collect(),
        }
    }
}

fn saved(generation: &Generation) -> SavedGeneration {
    let members = generation.addresses.iter().zip(&generation.attempts);
    SavedGeneration {
        number: generation.number,
        nonce: generation.nonce,
        members: members
            .map(|(address, attempt)| SavedMember { address: *address, attempt: *attempt })
            .collect(),
        left: generation.left,
        nodes: generation.nodes.clone(),
    }
}

fn digits(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn read_bytes<const N: usize>(text: &str) -> Option<[u8; N]> {
    if text.len() != 2 * N || !text.is_ascii() {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, index) in bytes.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(text.get(index..index + 2)?, 16).ok()?;
    }
    Some(bytes)
}

fn read_entry(text: &str) -> Option<JobEntry> {
    read_bytes::<{ size_of::<JobEntry>() }>(text).map(|bytes| bytemuck::pod_read_unaligned(&bytes))
}

fn read_digest(text: &str) -> Option<[u8; 32]> {
    read_bytes(text)
}

/// Whatever can be read.
fn read_numbers(text: &str) -> impl Iterator<Item = u32> {
    text.as_bytes()
        .chunks_exact(8)
        .filter_map(|digits| u32::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok())
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
