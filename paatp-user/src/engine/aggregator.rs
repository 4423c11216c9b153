//! The running engine: a loaded and attached program with its tables.

use std::collections::BTreeMap;
use std::os::fd::AsFd as _;

use aya::maps::{Array, Map, MapData, MapError, PerCpuArray};
use aya::programs::Xdp;
use aya::{Ebpf, EbpfError, EbpfLoader};
use paatp_common::counter::Counters;
use paatp_common::job::{JobEntry, Node, RankEntry};
use paatp_common::limits::MAX_RANKS;
use paatp_common::policy::Policy;
use paatp_common::progress::{Progress, RankRecord};
use paatp_common::seq::Seq;
use paatp_common::slot::Slot;
use tracing::{info, warn};

use crate::cli::XdpMode;
use crate::config::{Jobs, SlotSize};
use crate::control::membership::Formation;

use super::attach::{AttachedMode, Attachment};
use super::capabilities::Capabilities;
use super::error::{Context, EngineError, Step, error_number, explain, verifier_log};
use super::interface::Interface;
use super::jobs::JobTable;
use super::netlink;
use super::reader::Reader;

/// Most slots of a ring that a status request walks: a system call each, about a microsecond.
const MAX_SLOTS_COUNTED: u32 = 4096;

/// 64-bit words of [`Progress`].
pub(super) const PROGRESS_WORDS: usize = size_of::<Progress>() / 8;

/// Names of maps in the object.
pub(super) mod map {
    pub const NODE: &str = "NODE";
    pub const JOBS: &str = "JOBS";
    pub const RANKS: &str = "RANKS";
    pub const PROGRESS: &str = "PROGRESS";
    pub const SLOTS: &str = "SLOTS";
    pub const WIDE_SLOTS: &str = "WIDE_SLOTS";
    pub const COUNTERS: &str = "COUNTERS";
}

/// Values of the shared tables as map values: `paatp-common` does not know aya.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(super) struct Raw<T>(pub(super) T);

// SAFETY: `bytemuck::Pod` promises what `aya::Pod` asks for: no padding, no invalid bit pattern, no pointer.
unsafe impl<T: bytemuck::Pod> aya::Pod for Raw<T> {}

/// How to start.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of the interface.
    pub interface: String,
    /// Where the program is to run.
    pub mode: XdpMode,
    /// First UDP port.
    pub port_base: u16,
    /// Number of UDP ports.
    pub ports: u16,
}

/// How far one rank is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankProgress {
    /// Results that it has acknowledged.
    pub acknowledged: u32,
    /// Chunks that it has contributed.
    pub contributed: u32,
}

/// How far a job is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProgressSnapshot {
    /// By rank.
    pub ranks: Vec<RankProgress>,
    /// The lowest acknowledgement: slots before it may be reused.
    pub min_ack: u32,
}

/// A loaded and attached program. Dropping it detaches.
#[derive(Debug)]
pub struct Aggregator {
    // Before `ebpf`: the program is taken off before its tables go.
    attachment: Attachment,
    ebpf: Ebpf,
    jobs: JobTable,
    /// The ranks of each job, as they were written.
    members: BTreeMap<u16, Vec<RankEntry>>,
    interface: Interface,
    size: SlotSize,
}

impl Aggregator {
    /// Loads an object, fills in its tables and attaches its program.
    ///
    /// # Errors
    /// What failed, why, and what to do about it.
    pub fn start(object: &[u8], options: &Options, jobs: &Jobs) -> Result<Aggregator, EngineError> {
        if object.is_empty() {
            return Err(EngineError::NoObject);
        }
        let interface = Interface::find(&options.interface)?;
        let over_v6 = interface.check_mtu(jobs.largest_lanes())?;
        let context = Context {
            interface: interface.name.clone(),
            mtu: interface.mtu,
            capabilities: Capabilities::of_this_process(),
            slot_memory: jobs.slot_memory(),
            ..Context::default()
        };
        let mut ebpf = load(object, jobs, &context)?;
        let node = interface.node(options.port_base, options.ports);
        let mut table: Array<_, Raw<Node>> = array_mut(&mut ebpf, map::NODE)?;
        table.set(0, Raw(node), 0).map_err(|source| table_error(map::NODE, source))?;
        let xdp = program(&mut ebpf, jobs.slot_size(), &context)?;
        let attachment = Attachment::new(xdp, interface.index, options.mode, &context)?;
        let table = job_table(&ebpf)?;
        let members = BTreeMap::new();
        let aggregator =
            Aggregator { attachment, ebpf, jobs: table, members, interface, size: jobs.slot_size() };
        aggregator.tell(jobs, over_v6);
        Ok(aggregator)
    }

    /// Says once what was started and what may surprise.
    fn tell(&self, jobs: &Jobs, over_v6: Option<u32>) {
        let (slots, bytes) = (jobs.slots(), self.size.bytes());
        let interface = self.interface.name.as_str();
        info!(
            "{slots} slots x {bytes} bytes = {:.1} MiB in the kernel",
            (slots * bytes as u64) as f64 / 1048576.0
        );
        info!(
            interface,
            mode = %self.attachment.mode(),
            held_by = %self.attachment.by(),
            program = self.attachment.program(),
            mtu = self.interface.mtu,
            "attached"
        );
        if let Some(lanes) = over_v6 {
            info!(interface, "workers over IPv6 need jobs of at most {lanes} lanes at this MTU");
        }
        if !self.interface.left_out().is_empty() {
            warn!(
                interface,
                served = ?self.interface.served(),
                left_out = ?self.interface.left_out(),
                "the interface has more addresses than the program answers for; workers must use one of those served"
            );
        }
        if self.interface.kind.as_deref() == Some("veth") && self.attachment.mode() == AttachedMode::Native {
            warn!(
                interface,
                "native XDP on veth: answers arrive only if the other end runs a native XDP program as well (one that passes everything will do)"
            );
        }
    }

    /// The interface.
    #[must_use]
    pub const fn interface(&self) -> &Interface {
        &self.interface
    }

    /// How the program is attached.
    #[must_use]
    pub const fn attachment(&self) -> &Attachment {
        &self.attachment
    }

    /// Puts a generation in force: the job's entry without a generation, the ranks, then the generation, so that no
    /// packet ever sees new members with an old generation or the other way round.
    ///
    /// # Errors
    /// If a table cannot be written.
    pub fn install(&mut self, formation: &Formation) -> Result<(), EngineError> {
        let number = u32::from(formation.number);
        self.jobs.write(formation.number, &JobEntry { generation: 0, ..formation.entry });
        self.jobs.set_policy(formation.number, formation.entry.policy);
        let mut ranks: Array<_, Raw<RankEntry>> = array_mut(&mut self.ebpf, map::RANKS)?;
        for (index, rank) in (number * MAX_RANKS as u32..).zip(&formation.ranks) {
            ranks.set(index, Raw(*rank), 0).map_err(|source| table_error(map::RANKS, source))?;
        }
        self.members.insert(formation.number, formation.ranks.clone());
        self.jobs.write(formation.number, &formation.entry);
        Ok(())
    }

    /// Stamps gains into the answers to a job's ranks. Only what changes is written: this is called every few
    /// milliseconds.
    ///
    /// # Errors
    /// If the table cannot be written.
    pub fn set_gains(&mut self, number: u16, gains: &[i8]) -> Result<(), EngineError> {
        let Some(members) = self.members.get_mut(&number) else { return Ok(()) };
        let mut table: Array<_, Raw<RankEntry>> = array_mut(&mut self.ebpf, map::RANKS)?;
        let first = u32::from(number) * MAX_RANKS as u32;
        for (index, (entry, gain)) in (first..).zip(members.iter_mut().zip(gains)) {
            if entry.gain != *gain {
                let changed = RankEntry { gain: *gain, ..*entry };
                table.set(index, Raw(changed), 0).map_err(|source| table_error(map::RANKS, source))?;
                *entry = changed;
            }
        }
        Ok(())
    }

    /// What was counted of each rank of a job.
    ///
    /// # Errors
    /// If the table cannot be read.
    pub fn records(&self, number: u16, entry: &JobEntry) -> Result<Vec<RankRecord>, EngineError> {
        let progress = self.tracks(number)?;
        let record = |rank| progress.reached(entry.generation, rank);
        Ok((0..usize::from(entry.world)).map(record).collect())
    }

    fn tracks(&self, number: u16) -> Result<Progress, EngineError> {
        let table = array::<[u64; PROGRESS_WORDS]>(&self.ebpf, map::PROGRESS)?;
        let words = table.get(&u32::from(number), 0).map_err(|source| table_error(map::PROGRESS, source))?;
        Ok(progress_of(words))
    }

    /// Replaces the entry of a job, but for its policy.
    pub fn write_job(&mut self, number: u16, entry: &JobEntry) {
        self.jobs.write(number, entry);
    }

    /// How a job's ranks wait for one another.
    #[must_use]
    pub fn policy(&self, number: u16) -> Policy {
        self.jobs.policy(number)
    }

    /// Changes that, unless the data plane was faster.
    pub fn replace_policy(&mut self, number: u16, from: Policy, to: Policy) -> bool {
        self.jobs.replace_policy(number, from, to)
    }

    /// The counters, summed over all CPUs.
    ///
    /// # Errors
    /// If the table cannot be read.
    pub fn counters(&self) -> Result<Counters, EngineError> {
        let failed = |source| table_error(map::COUNTERS, source);
        let table = self.ebpf.map(map::COUNTERS).ok_or_else(|| no_map(map::COUNTERS))?;
        let table = PerCpuArray::<&MapData, Raw<Counters>>::try_from(table).map_err(failed)?;
        let mut total = Counters::default();
        for cpu in table.get(&0, 0).map_err(failed)?.iter() {
            total.absorb(&cpu.0);
        }
        Ok(total)
    }

    /// How far the ranks of a job are.
    ///
    /// # Errors
    /// If the table cannot be read.
    pub fn progress(&self, number: u16, entry: &JobEntry) -> Result<ProgressSnapshot, EngineError> {
        Ok(snapshot(&self.tracks(number)?, entry))
    }

    /// Slots of a job that hold contributions which not every rank has acknowledged; none for rings too long to walk.
    ///
    /// # Errors
    /// If the table cannot be read.
    pub fn slots_in_use(&self, entry: &JobEntry, min_ack: u32) -> Result<Option<u32>, EngineError> {
        if entry.slots > MAX_SLOTS_COUNTED {
            return Ok(None);
        }
        let range = entry.first_slot..entry.first_slot + entry.slots;
        let used = |slot: Slot| {
            slot.generation == entry.generation && slot.bits != 0 && !slot.seq.is_before(Seq(min_ack))
        };
        match self.size {
            SlotSize::Standard => {
                const BYTES: usize = SlotSize::Standard.bytes();
                count_slots(&array::<[u8; BYTES]>(&self.ebpf, map::SLOTS)?, map::SLOTS, range, used)
            }
            SlotSize::Wide => {
                const BYTES: usize = SlotSize::Wide.bytes();
                count_slots(&array::<[u8; BYTES]>(&self.ebpf, map::WIDE_SLOTS)?, map::WIDE_SLOTS, range, used)
            }
        }
        .map(Some)
    }

    /// Reads the tables beside this, without holding anybody up.
    ///
    /// # Errors
    /// If the process has no descriptors left.
    pub fn reader(&self) -> Result<Reader, EngineError> {
        Reader::new(&self.ebpf, self.size)
    }

    /// The interface is there and our program on it.
    ///
    /// # Errors
    /// If not.
    pub fn check_attached(&self) -> Result<(), EngineError> {
        let name = || self.interface.name.clone();
        let state = match netlink::query(self.interface.index) {
            Ok(state) => state,
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {
                return Err(EngineError::Gone(name()));
            }
            // A question that could not be asked says nothing about the interface.
            Err(_) => return Ok(()),
        };
        match state.xdp {
            None => Err(EngineError::TakenOff(name())),
            Some(xdp) if xdp.program.is_some_and(|id| id != self.attachment.program()) => {
                Err(EngineError::TakenOff(name()))
            }
            Some(_) => Ok(()),
        }
    }

    /// Takes the program off.
    pub fn detach(&mut self) {
        self.attachment.detach();
    }
}

/// Creates the tables for these jobs and lets the verifier judge the program, attaches nothing and keeps nothing.
///
/// # Errors
/// As [`Aggregator::start`] would fail.
pub fn check_program(object: &[u8], jobs: &Jobs) -> Result<(), EngineError> {
    if object.is_empty() {
        return Err(EngineError::NoObject);
    }
    let context = Context {
        capabilities: Capabilities::of_this_process(),
        slot_memory: jobs.slot_memory(),
        ..Context::default()
    };
    let mut ebpf = load(object, jobs, &context)?;
    program(&mut ebpf, jobs.slot_size(), &context).map(|_| ())
}

fn load(object: &[u8], jobs: &Jobs, context: &Context) -> Result<Ebpf, EngineError> {
    // Checked by `Jobs::new`: all slots together are far below 2^32.
    let slots = u32::try_from(jobs.slots()).unwrap_or(u32::MAX);
    let (standard, wide) = match jobs.slot_size() {
        SlotSize::Standard => (slots, 1),
        SlotSize::Wide => (1, slots),
    };
    let mut loader = EbpfLoader::new();
    // The program uses no kernel structure, so the kernel's own type information is of no use (and may be missing).
    loader.btf(None).map_max_entries(map::SLOTS, standard).map_max_entries(map::WIDE_SLOTS, wide);
    loader.load(object).map_err(|error| match error {
        EbpfError::MapError(_) | EbpfError::ProgramError(_) => {
            explain(Step::Maps, error_number(&error), context)
        }
        EbpfError::BtfError(_) if error_number(&error).is_some() => {
            explain(Step::Maps, error_number(&error), context)
        }
        error => EngineError::BadObject(Box::new(error)),
    })
}

/// Loads the program for a slot size.
fn program<'a>(ebpf: &'a mut Ebpf, size: SlotSize, context: &Context) -> Result<&'a mut Xdp, EngineError> {
    let name = match size {
        SlotSize::Standard => "aggregate",
        SlotSize::Wide => "aggregate_wide",
    };
    let missing = EngineError::Incomplete { what: "XDP program", name };
    let Some(program) = ebpf.program_mut(name) else { return Err(missing) };
    let Ok(xdp) = <&mut Xdp>::try_from(program) else { return Err(missing) };
    xdp.load().map_err(|error| {
        let context = Context { verifier_log: verifier_log(&error), ..context.clone() };
        explain(Step::Load, error_number(&error), &context)
    })?;
    Ok(xdp)
}

pub(super) fn table_error(map: &'static str, source: MapError) -> EngineError {
    EngineError::Table { map, source: Box::new(source) }
}

pub(super) const fn no_map(name: &'static str) -> EngineError {
    EngineError::Incomplete { what: "map", name }
}

fn job_table(ebpf: &Ebpf) -> Result<JobTable, EngineError> {
    let Some(Map::Array(table)) = ebpf.map(map::JOBS) else { return Err(no_map(map::JOBS)) };
    JobTable::map(table.fd().as_fd()).map_err(|source| EngineError::Map { map: map::JOBS, source })
}

fn array<'a, V: aya::Pod>(ebpf: &'a Ebpf, name: &'static str) -> Result<Array<&'a MapData, V>, EngineError> {
    let map = ebpf.map(name).ok_or_else(|| no_map(name))?;
    Array::try_from(map).map_err(|source| table_error(name, source))
}

fn array_mut<'a, V: aya::Pod>(
    ebpf: &'a mut Ebpf,
    name: &'static str,
) -> Result<Array<&'a mut MapData, V>, EngineError> {
    let map = ebpf.map_mut(name).ok_or_else(|| no_map(name))?;
    Array::try_from(map).map_err(|source| table_error(name, source))
}

fn count_slots<const N: usize>(
    table: &Array<&MapData, [u8; N]>,
    name: &'static str,
    range: std::ops::Range<u32>,
    used: impl Fn(Slot) -> bool,
) -> Result<u32, EngineError> {
    let mut count = 0;
    for index in range {
        let bytes = table.get(&index, 0).map_err(|source| table_error(name, source))?;
        if bytes.get(..size_of::<Slot>()).is_some_and(|head| used(bytemuck::pod_read_unaligned(head))) {
            count += 1;
        }
    }
    Ok(count)
}

/// Progress as the map's value holds it.
pub(super) const fn progress_of(words: [u64; PROGRESS_WORDS]) -> Progress {
    // SAFETY: `Progress` is `repr(C)` and holds nothing but atomic words of 64 bits, which have the size of `u64`
    // (asserted by the array's length) and take every bit pattern.
    unsafe { std::mem::transmute::<[u64; PROGRESS_WORDS], Progress>(words) }
}

fn snapshot(progress: &Progress, entry: &JobEntry) -> ProgressSnapshot {
    let generation = entry.generation;
    let rank = |rank: usize| {
        let RankRecord { acked, contributed, .. } = progress.reached(generation, rank);
        RankProgress { acknowledged: acked.0, contributed: contributed.0 }
    };
    let ranks: Vec<RankProgress> = (0..usize::from(entry.world)).map(rank).collect();
    let expected = ranks.iter().zip(0..).filter(|(_, rank)| entry.expected >> rank & 1 == 1);
    let acks = expected.map(|(rank, _)| Seq(rank.acknowledged));
    let min_ack = acks.reduce(|least, ack| if ack.is_before(least) { ack } else { least });
    ProgressSnapshot { ranks, min_ack: min_ack.unwrap_or_default().0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_read_through_its_own_type() {
        let entry = JobEntry { generation: 9, world: 2, expected: 0b11, slots: 8, ..JobEntry::default() };
        let progress = Progress::default();
        progress.record(9, 0, Seq(3), Seq(0), 8);
        progress.record(9, 1, Seq(2), Seq(5), 8);
        let read = snapshot(&progress, &entry);
        let rank = |acknowledged, contributed| RankProgress { acknowledged, contributed };
        assert_eq!(read, ProgressSnapshot { ranks: vec![rank(3, 0), rank(2, 5)], min_ack: 2 });
        let other = snapshot(&progress, &JobEntry { generation: 8, ..entry });
        assert_eq!(other.ranks, vec![rank(0, 0); 2]);
    }

    #[test]
    fn a_build_without_an_object_says_so() {
        let options = Options { interface: "lo".into(), mode: XdpMode::Auto, port_base: 1, ports: 1 };
        let job = crate::config::JobConfig {
            lanes: 32,
            slots: 2,
            window: 1,
            ..crate::config::JobConfig::new("j", 1)
        };
        let Ok(jobs) = Jobs::new(vec![job]) else { panic!("refused") };
        let error = Aggregator::start(&[], &options, &jobs).err().map(|error| error.to_string());
        assert!(error.is_some_and(|message| message.contains("cargo xtask build")));
    }
}
