//! The running engine: a loaded and attached program with its tables.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use aya::maps::{Array, Map, MapData, MapError, PerCpuArray};
use paatp_common::counter::Counters;
use paatp_common::job::{JobEntry, Node, RankEntry};
use paatp_common::levels::Link;
use paatp_common::limits::{MAX_JOBS, MAX_RANKS};
use paatp_common::policy::Policy;
use paatp_common::pool;
use paatp_common::progress::{Progress, RankRecord};
use paatp_common::seq::Seq;
use paatp_common::slot::Slot;
use paatp_transport::rate::share::Share;

use crate::cli::XdpMode;
use crate::config::SlotSize;
use crate::control::membership::{Formation, Uplink};
use crate::switch::placement::Neighbourhood;

use super::attach::{AttachedMode, Attachment};
use super::error::EngineError;
use super::interface::Interface;
use super::jobs::JobTable;
use super::maps::Maps;
use super::netlink;
use super::pinning::Pinning;
use super::pins::Set;
use super::reader::Reader;
use super::surroundings::Surroundings;

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
    pub const LINKS: &str = "LINKS";
    pub const ABOVE: &str = "ABOVE";
    pub const ALL: [&str; 9] = [NODE, JOBS, RANKS, PROGRESS, SLOTS, WIDE_SLOTS, COUNTERS, LINKS, ABOVE];
}

/// Values of the shared tables as map values: `paatp-common` does not know aya.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(super) struct Raw<T>(pub(super) T);

// SAFETY: `bytemuck::Pod` promises what `aya::Pod` asks for: no padding, no invalid bit pattern, no pointer.
unsafe impl<T: bytemuck::Pod> aya::Pod for Raw<T> {}

mod start;
mod switched;

pub use start::check_program;

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
    /// The program takes sums of lower nodes, and sends sums to parents.
    pub levels: bool,
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

/// A loaded and attached program. Dropping it detaches, but for what an earlier daemon had left behind and this one has
/// not made its own ([`Aggregator::own`]).
#[derive(Debug)]
pub struct Aggregator {
    // Before `maps`: the program is taken off before its tables go.
    attachment: Attachment,
    maps: Maps,
    jobs: JobTable,
    /// The program, to ask the kernel what it costs.
    program: Option<OwnedFd>,
    /// The ranks of each job, as they were written.
    members: BTreeMap<u16, Vec<RankEntry>>,
    interface: Interface,
    size: SlotSize,
    slots: u32,
    node: Node,
    set: Option<Set>,
    pinning: Option<Pinning>,
    adopted: bool,
    stays: bool,
    /// Who is behind a switch, whose sums are taken.
    neighbourhood: Option<Neighbourhood>,
}

/// What the kernel's tables say of a job: its entry and its ranks.
pub type Truth = (JobEntry, Vec<RankEntry>);

impl Aggregator {
    /// What the tables say of all jobs, by number. The kernel is right, whatever files say.
    ///
    /// # Errors
    /// If a table cannot be read.
    pub fn truth(&self) -> Result<Vec<Truth>, EngineError> {
        let jobs = array::<Raw<JobEntry>>(&self.maps, map::JOBS)?;
        let ranks = array::<Raw<RankEntry>>(&self.maps, map::RANKS)?;
        let mut all = Vec::with_capacity(MAX_JOBS);
        for number in 0..MAX_JOBS as u32 {
            let entry = jobs.get(&number, 0).map_err(|source| table_error(map::JOBS, source))?.0;
            let first = number * MAX_RANKS as u32;
            let world = u32::from(entry.world).min(MAX_RANKS as u32);
            let read = (first..first + world).map(|index| ranks.get(&index, 0).map(|rank| rank.0));
            let read: Result<Vec<RankEntry>, _> = read.collect();
            all.push((entry, read.map_err(|source| table_error(map::RANKS, source))?));
        }
        Ok(all)
    }

    /// It goes on with the tables of an earlier start.
    #[must_use]
    pub const fn is_adopted(&self) -> bool {
        self.adopted
    }

    /// Its tables outlive this process.
    #[must_use]
    pub const fn is_pinned(&self) -> bool {
        self.set.is_some()
    }

    /// The network namespace of its interface, if its tables outlive this process.
    #[must_use]
    pub fn namespace(&self) -> Option<u64> {
        self.pinning.as_ref().filter(|_| self.is_pinned()).map(Pinning::namespace)
    }

    /// The kernel's number of the table of jobs: it tells these tables from all others since the machine was started.
    #[must_use]
    pub fn tables(&self) -> u32 {
        self.maps.number(map::JOBS).unwrap_or(0)
    }

    /// Size and number of the slots that there are.
    #[must_use]
    pub const fn slots(&self) -> (SlotSize, u32) {
        (self.size, self.slots)
    }

    /// Slots of the pool, the first ones of the table.
    #[must_use]
    pub const fn pool_slots(&self) -> u32 {
        self.node.pool.slots
    }

    /// First UDP port and number of ports in force.
    #[must_use]
    pub const fn ports(&self) -> (u16, u16) {
        (self.node.port_base, self.node.port_count)
    }

    /// From now on what was taken over is this daemon's own, and goes when it ends in order.
    pub fn own(&mut self) {
        self.stays = false;
    }

    /// Leaves tables and program where they are, for the next start. Says whether they are pinned; else they go.
    pub fn leave(&mut self) -> bool {
        let stays = self.attachment.leave();
        if stays {
            self.set = None;
            self.stays = true;
        } else {
            self.detach();
        }
        stays
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
        // Looked at before anything is written: what cannot be linked leaves all as it is.
        let switched = self.switched(&formation.entry, &formation.ranks);
        let links = self.links(formation.number, formation.uplink, switched)?;
        self.jobs.write(formation.number, &JobEntry { generation: 0, ..formation.entry });
        self.jobs.set_policy(formation.number, formation.entry.policy);
        let mut ranks: Array<_, Raw<RankEntry>> = array_mut(&mut self.maps, map::RANKS)?;
        for (index, rank) in (number * MAX_RANKS as u32..).zip(&formation.ranks) {
            ranks.set(index, Raw(*rank), 0).map_err(|source| table_error(map::RANKS, source))?;
        }
        self.members.insert(formation.number, formation.ranks.clone());
        self.set_links(&links)?;
        self.jobs.write(formation.number, &formation.entry);
        Ok(())
    }

    /// Forgets where a job's sums went.
    ///
    /// # Errors
    /// If the table cannot be read or written.
    pub fn unlink(&mut self, number: u16) -> Result<(), EngineError> {
        let links = self.links(number, None, 0)?;
        self.set_links(&links)
    }

    /// Entries to write so that a job's sums go where they are to, and answers from there are its; and so that sums of the
    /// switch that these ranks are behind are taken.
    fn links(
        &self,
        number: u16,
        uplink: Option<Uplink>,
        switched: u64,
    ) -> Result<Vec<(u32, Link)>, EngineError> {
        if let Some(other) = uplink.filter(|uplink| uplink.interface != self.interface.index) {
            return Err(EngineError::OtherWay {
                interface: self.interface.name.clone(),
                other: netlink::query(other.interface).map(|link| link.name).unwrap_or_default(),
            });
        }
        let table: Array<_, Raw<Link>> = array(&self.maps, map::LINKS)?;
        let old: Result<Vec<Link>, _> =
            (0..MAX_JOBS as u32).map(|index| table.get(&index, 0).map(|raw| raw.0)).collect();
        let old = old.map_err(|source| table_error(map::LINKS, source))?;
        let mut new =
            linked(&old, number, uplink.map(|uplink| uplink.link)).ok_or(EngineError::NumberTaken)?;
        if let Some(own) = new.get_mut(usize::from(number)) {
            own.switched = switched;
        }
        Ok((0..).zip(new).filter(|(index, link)| old.get(*index as usize) != Some(link)).collect())
    }

    fn set_links(&mut self, links: &[(u32, Link)]) -> Result<(), EngineError> {
        let mut table: Array<_, Raw<Link>> = array_mut(&mut self.maps, map::LINKS)?;
        for (index, link) in links {
            table.set(*index, Raw(*link), 0).map_err(|source| table_error(map::LINKS, source))?;
        }
        Ok(())
    }

    /// Stamps gains into the answers to a job's ranks. Only what changes is written: this is called every few
    /// milliseconds.
    ///
    /// # Errors
    /// If the table cannot be written.
    pub fn set_gains(&mut self, number: u16, gains: &[i8]) -> Result<(), EngineError> {
        let Some(members) = self.members.get_mut(&number) else { return Ok(()) };
        let mut table: Array<_, Raw<RankEntry>> = array_mut(&mut self.maps, map::RANKS)?;
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
        let table = array::<[u64; PROGRESS_WORDS]>(&self.maps, map::PROGRESS)?;
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
        let table = self.maps.map(map::COUNTERS).ok_or_else(|| no_map(map::COUNTERS))?;
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
        let used = |slot: Slot| {
            slot.generation == entry.generation && slot.bits != 0 && !slot.seq.is_before(Seq(min_ack))
        };
        let own = entry.first_slot..entry.first_slot + if entry.is_shared() { 1 } else { entry.slots };
        let pool = if entry.is_shared() {
            self.node.pool.first..self.node.pool.first + self.node.pool.slots
        } else {
            0..0
        };
        if own.len() + pool.len() > MAX_SLOTS_COUNTED as usize {
            return Ok(None);
        }
        self.count_slots(own.chain(pool), used).map(Some)
    }

    /// What was counted of a job that shares the pool.
    ///
    /// # Errors
    /// If the table cannot be read.
    pub fn share(&self, number: u16, entry: &JobEntry) -> Result<Share, EngineError> {
        let (progress, generation) = (self.tracks(number)?, entry.generation);
        let (min_ack, crowded) = (progress.acks.floor(generation).0, progress.crowded(generation));
        Ok(Share { job: number, generation, min_ack, crowded })
    }

    /// Slots of the pool that hold something which some rank has not acknowledged. Of a large pool every so-many-th is
    /// looked at: places are drawn by a hash, so any slots are a fair sample.
    ///
    /// # Errors
    /// If a table cannot be read.
    pub fn pool_in_use(&self) -> Result<u32, EngineError> {
        let jobs = array::<Raw<JobEntry>>(&self.maps, map::JOBS)?;
        let mut owners = Vec::new();
        for number in 0..MAX_JOBS as u16 {
            let entry = jobs.get(&number.into(), 0).map_err(|source| table_error(map::JOBS, source))?;
            owners.push((entry.0, self.tracks(number)?));
        }
        let in_use = |slot: Slot| {
            let owner = owners.get(usize::from(slot.job()));
            slot.bits != 0 && owner.is_some_and(|(job, progress)| !pool::is_over(&slot, job, progress))
        };
        let stride = self.node.pool.slots.div_ceil(MAX_SLOTS_COUNTED).max(1);
        let sample =
            (0..self.node.pool.slots).step_by(stride as usize).map(|slot| self.node.pool.first + slot);
        Ok(self.count_slots(sample, in_use)?.saturating_mul(stride).min(self.node.pool.slots))
    }

    fn count_slots(
        &self,
        slots: impl Iterator<Item = u32>,
        used: impl Fn(Slot) -> bool,
    ) -> Result<u32, EngineError> {
        match self.size {
            SlotSize::Standard => {
                const BYTES: usize = SlotSize::Standard.bytes();
                count_slots(&array::<[u8; BYTES]>(&self.maps, map::SLOTS)?, map::SLOTS, slots, used)
            }
            SlotSize::Wide => {
                const BYTES: usize = SlotSize::Wide.bytes();
                count_slots(&array::<[u8; BYTES]>(&self.maps, map::WIDE_SLOTS)?, map::WIDE_SLOTS, slots, used)
            }
        }
    }

    /// Reads the tables beside this, without holding anybody up.
    ///
    /// # Errors
    /// If the process has no descriptors left.
    pub fn reader(&self) -> Result<Reader, EngineError> {
        let program = self.program.as_ref().map(AsFd::as_fd);
        Reader::new(&self.maps, self.size, self.node.pool, program, self.surroundings())
    }

    /// Where program and tables are pinned, if they are.
    #[must_use]
    pub fn pinned_at(&self) -> Option<&Path> {
        self.set.as_ref().map(Set::path)
    }

    fn surroundings(&self) -> Surroundings {
        Surroundings {
            name: self.interface.name.clone(),
            index: self.interface.index,
            native: self.attachment.mode() == AttachedMode::Native,
        }
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

    /// Takes the program off, and removes its pins.
    pub fn detach(&mut self) {
        self.attachment.detach();
        if let Some(set) = self.set.take() {
            set.remove();
        }
        // The lock stays until this is dropped: whoever started now would find the rest of this daemon.
    }
}

impl Drop for Aggregator {
    fn drop(&mut self) {
        if !self.stays {
            self.detach();
        }
    }
}

/// The table of links with that of a job replaced. None if another job that goes up has the same number at its parent.
fn linked(old: &[Link], number: u16, link: Option<Link>) -> Option<Vec<Link>> {
    let mut new = old.to_vec();
    new.iter_mut().filter(|entry| entry.below == number + 1).for_each(|entry| entry.below = 0);
    let own = new.get_mut(usize::from(number))?;
    *own = Link { below: own.below, ..link.unwrap_or_default() };
    if let Some(link) = link {
        let below = new.get(usize::from(link.number))?.below;
        let holder = below.checked_sub(1).and_then(|holder| new.get(usize::from(holder)));
        if holder.is_some_and(|holder| holder.is_set() && holder.number == link.number) {
            return None;
        }
        new.get_mut(usize::from(link.number))?.below = number + 1;
    }
    Some(new)
}

pub(super) fn table_error(map: &'static str, source: MapError) -> EngineError {
    EngineError::Table { map, source: Box::new(source) }
}

pub(super) const fn no_map(name: &'static str) -> EngineError {
    EngineError::Incomplete { what: "map", name }
}

fn job_table(maps: &Maps) -> Result<JobTable, EngineError> {
    let Some(Map::Array(table)) = maps.map(map::JOBS) else { return Err(no_map(map::JOBS)) };
    JobTable::map(table.fd().as_fd()).map_err(|source| EngineError::Map { map: map::JOBS, source })
}

fn array<'a, V: aya::Pod>(maps: &'a Maps, name: &'static str) -> Result<Array<&'a MapData, V>, EngineError> {
    let map = maps.map(name).ok_or_else(|| no_map(name))?;
    Array::try_from(map).map_err(|source| table_error(name, source))
}

fn array_mut<'a, V: aya::Pod>(
    maps: &'a mut Maps,
    name: &'static str,
) -> Result<Array<&'a mut MapData, V>, EngineError> {
    let map = maps.map_mut(name).ok_or_else(|| no_map(name))?;
    Array::try_from(map).map_err(|source| table_error(name, source))
}

fn count_slots<const N: usize>(
    table: &Array<&MapData, [u8; N]>,
    name: &'static str,
    slots: impl Iterator<Item = u32>,
    used: impl Fn(Slot) -> bool,
) -> Result<u32, EngineError> {
    let mut count = 0;
    for index in slots {
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
    use crate::config::Jobs;

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
    fn answers_of_parents_find_their_jobs() {
        let link = |number| Link { ports: 1, number, ..Link::default() };
        let none = vec![Link::default(); 4];
        let one = linked(&none, 2, Some(link(0))).unwrap_or_default();
        assert_eq!((one[0].below, one[2].number, one[2].below), (3, 0, 0));
        // Another generation, under another number there.
        let moved = linked(&one, 2, Some(link(2))).unwrap_or_default();
        assert_eq!((moved[0].below, moved[2].below, moved[2].number), (0, 3, 2));
        let both = linked(&one, 0, Some(link(3))).unwrap_or_default();
        assert_eq!((both[0].below, both[3].below, both[0].number), (3, 1, 3));
        assert_eq!(linked(&both, 1, Some(link(3))), None, "two jobs cannot have one number there");
        assert_eq!(linked(&linked(&both, 0, None).unwrap_or_default(), 2, None), Some(none));
    }

    #[test]
    fn a_build_without_an_object_says_so() {
        let options =
            Options { interface: "lo".into(), mode: XdpMode::Auto, port_base: 1, ports: 1, levels: false };
        let job = crate::config::JobConfig {
            lanes: 32,
            slots: 2,
            window: 1,
            ..crate::config::JobConfig::new("j", 1)
        };
        let Ok(jobs) = Jobs::new(vec![job]) else { panic!("refused") };
        let error = Aggregator::start(&[], &options, &jobs, None).err().map(|error| error.to_string());
        assert!(error.is_some_and(|message| message.contains("cargo xtask build")));
    }
}
