//! The loaded program, run on single frames (`BPF_PROG_TEST_RUN`) without any interface, beside an aggregator in
//! ordinary memory with the same tables: the two must agree to the byte.
//!
//! The kernel runs the program on the CPU that asks, so that two threads on two CPUs are two packets at once.

use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use aya::maps::{Array, Map, MapData, PerCpuArray};
use aya::programs::{TestRun, TestRunOptions, Xdp};
use aya::{Ebpf, EbpfLoader};
use paatp_common::counter::Counters;
use paatp_common::job::{JobEntry, RankEntry};
use paatp_common::lanes::SlotBlock;
use paatp_common::limits::{MAX_JOBS, MAX_RANKS, STANDARD_BLOCKS, WIDE_BLOCKS};
use paatp_common::progress::Progress;
use paatp_common::slot::Slot;

#[path = "../../paatp-common/tests/support/mod.rs"]
pub mod support;

use support::node::{OwnedNode, Verdict};
use support::requests::TestJob;

/// Longest frame that a test run takes: a page without head room and what the kernel keeps at its end.
pub const MOST_BYTES: usize = 4096 - 256 - 320;

/// Bytes of [`Progress`] as words.
type ProgressWords = [u64; size_of::<Progress>() / 8];

/// Plain values as aya wants them.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Raw<T>(T);

// SAFETY: `bytemuck::Pod` promises what `aya::Pod` asks for.
unsafe impl<T: bytemuck::Pod> aya::Pod for Raw<T> {}

/// One of the two aggregators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavour {
    /// Slots of 352 lanes.
    Standard,
    /// Slots of 832 lanes.
    Wide,
    /// Slots of 352 lanes, of a node with levels.
    Levels,
    /// Slots of 832 lanes, of a node with levels.
    LevelsWide,
}

impl Flavour {
    /// Those without levels.
    pub const FLAT: [Flavour; 2] = [Flavour::Standard, Flavour::Wide];

    /// Sums of lower nodes are taken.
    #[must_use]
    pub const fn has_levels(self) -> bool {
        matches!(self, Flavour::Levels | Flavour::LevelsWide)
    }

    /// All.
    pub const ALL: [Flavour; 4] = [Flavour::Standard, Flavour::Wide, Flavour::Levels, Flavour::LevelsWide];

    /// Name of the program.
    #[must_use]
    pub const fn program(self) -> &'static str {
        match self {
            Flavour::Standard => "aggregate",
            Flavour::Wide => "aggregate_wide",
            Flavour::Levels => "levels",
            Flavour::LevelsWide => "levels_wide",
        }
    }

    /// Name of its slot table.
    #[must_use]
    pub const fn table(self) -> &'static str {
        match self {
            Flavour::Standard | Flavour::Levels => "SLOTS",
            Flavour::Wide | Flavour::LevelsWide => "WIDE_SLOTS",
        }
    }

    /// Blocks of a slot.
    #[must_use]
    pub const fn blocks(self) -> usize {
        match self {
            Flavour::Standard | Flavour::Levels => STANDARD_BLOCKS,
            Flavour::Wide | Flavour::LevelsWide => WIDE_BLOCKS,
        }
    }

    /// Lanes of a slot.
    #[must_use]
    pub const fn lanes(self) -> u16 {
        self.blocks() as u16 * 32
    }

    /// Bytes of a slot.
    #[must_use]
    pub const fn slot_bytes(self) -> usize {
        size_of::<Slot>() + self.blocks() * size_of::<SlotBlock>()
    }
}

/// The object with the aggregators: in `PAATP_EBPF_DIR`, or where `cargo xtask build` puts it.
#[must_use]
pub fn object() -> PathBuf {
    crate::lab::lab_object().with_file_name("paatp.bpf.o")
}

/// What became of a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// The program's verdict.
    pub verdict: Verdict,
    /// The frame afterwards.
    pub frame: Vec<u8>,
}

/// A loaded aggregator that is attached to nothing.
#[derive(Debug)]
pub struct Loaded {
    ebpf: Ebpf,
    flavour: Flavour,
    slots: Mapping,
}

impl Loaded {
    /// Loads the program with a table of so many slots.
    ///
    /// # Errors
    /// Where the object is missing, or the kernel refuses it.
    pub fn new(flavour: Flavour, slots: u32) -> Result<Loaded> {
        let object = object();
        let bytes = std::fs::read(&object).with_context(|| format!("cannot read {}", object.display()))?;
        let mut loader = EbpfLoader::new();
        loader.btf(None).map_max_entries(flavour.table(), slots);
        let mut ebpf = loader.load(&bytes).with_context(|| format!("cannot load {}", object.display()))?;
        let program: &mut Xdp = ebpf.program_mut(flavour.program()).context("no such program")?.try_into()?;
        program.load()?;
        let Some(Map::Array(table)) = ebpf.map(flavour.table()) else { bail!("no array of slots") };
        let slots = Mapping::new(table, flavour.slot_bytes() * slots as usize)?;
        Ok(Loaded { ebpf, flavour, slots })
    }

    /// Loads the program and gives it the tables of a node in memory, its slots and progress included.
    ///
    /// # Errors
    /// As [`Loaded::new`].
    pub fn like(flavour: Flavour, node: &OwnedNode) -> Result<Loaded> {
        if node.blocks != flavour.blocks() {
            bail!("slots of {} blocks are none of {flavour:?}", node.blocks);
        }
        let mut loaded = Loaded::new(flavour, node.slots.len() as u32)?;
        loaded.become_like(node)?;
        Ok(loaded)
    }

    /// Takes over all but the counters of a node in memory with as many slots.
    ///
    /// # Errors
    /// Where a table cannot be written.
    pub fn become_like(&mut self, node: &OwnedNode) -> Result<()> {
        self.array("NODE")?.set(0, Raw(node.node), 0)?;
        for (rank, entry) in (0..).zip(&node.ranks) {
            self.array::<RankEntry>("RANKS")?.set(rank, Raw(*entry), 0)?;
        }
        for (number, entry) in (0..).zip(&node.jobs) {
            self.array::<JobEntry>("JOBS")?.set(number.into(), Raw(*entry), 0)?;
            let words = node.progress_words(number);
            self.array::<ProgressWords>("PROGRESS")?.set(number.into(), Raw(words), 0)?;
        }
        self.slots.write(&node.slot_bytes());
        Ok(())
    }

    /// Puts a job, or a new generation of it, in force.
    ///
    /// # Errors
    /// Where the tables cannot be written.
    pub fn install(&mut self, job: &TestJob) -> Result<()> {
        let first = u32::from(job.number) * MAX_RANKS as u32;
        for rank in 0..job.world {
            let entry = Raw(job.rank_entry(rank));
            self.array::<RankEntry>("RANKS")?.set(first + u32::from(rank), entry, 0)?;
        }
        self.set_job(job.number, job.entry())
    }

    /// Writes a job's entry.
    ///
    /// # Errors
    /// Where the table cannot be written.
    pub fn set_job(&mut self, number: u16, entry: JobEntry) -> Result<()> {
        Ok(self.array::<JobEntry>("JOBS")?.set(number.into(), Raw(entry), 0)?)
    }

    /// Runs the program on one frame of 14 to [`MOST_BYTES`] bytes.
    ///
    /// # Errors
    /// Where the kernel refuses to.
    pub fn run(&self, frame: &[u8]) -> Result<Run> {
        let program: &Xdp =
            self.ebpf.program(self.flavour.program()).context("no such program")?.try_into()?;
        let mut out = vec![0; 4096];
        let options =
            TestRunOptions { data_in: Some(frame), data_out: Some(&mut out), ..TestRunOptions::new() };
        let result = program.test_run(options)?;
        out.truncate(result.data_size_out as usize);
        let verdict = match result.return_value {
            1 => Verdict::Drop,
            2 => Verdict::Pass,
            3 => Verdict::Transmit,
            other => bail!("an unexpected verdict: {other}"),
        };
        Ok(Run { verdict, frame: out })
    }

    /// All slots, as they are now.
    #[must_use]
    pub fn slots(&self) -> Vec<u8> {
        self.slots.read()
    }

    /// One slot: its header, and its lanes in the order of the wire.
    #[must_use]
    pub fn slot(&self, index: usize) -> (Slot, Vec<u32>) {
        let bytes = self.slots.read();
        let slot = &bytes[index * self.flavour.slot_bytes()..][..self.flavour.slot_bytes()];
        let (state, lanes) = slot.split_at(size_of::<Slot>());
        let words = lanes.chunks_exact(8).filter_map(|word| Some(u64::from_ne_bytes(word.try_into().ok()?)));
        (bytemuck::pod_read_unaligned(state), words.flat_map(|w| [(w >> 32) as u32, w as u32]).collect())
    }

    /// The progress of a job.
    ///
    /// # Errors
    /// Where the table cannot be read.
    pub fn progress(&mut self, job: u16) -> Result<ProgressWords> {
        Ok(self.array::<ProgressWords>("PROGRESS")?.get(&job.into(), 0)?.0)
    }

    /// The counters, summed over all CPUs.
    ///
    /// # Errors
    /// Where the table cannot be read.
    pub fn counters(&self) -> Result<Counters> {
        let map = self.ebpf.map("COUNTERS").context("no counters")?;
        let map = PerCpuArray::<_, Raw<Counters>>::try_from(map)?;
        let mut sum = Counters::default();
        for counters in map.get(&0, 0)?.iter() {
            sum.absorb(&counters.0);
        }
        Ok(sum)
    }

    /// Everything that the program may change, to be compared with later.
    ///
    /// # Errors
    /// Where a table cannot be read.
    pub fn state(&mut self) -> Result<State> {
        let progress = (0..MAX_JOBS as u16).map(|job| self.progress(job)).collect::<Result<_>>()?;
        Ok(State { slots: self.slots(), progress })
    }

    /// The program and its maps.
    #[must_use]
    pub const fn ebpf(&self) -> &Ebpf {
        &self.ebpf
    }

    fn array<T: bytemuck::Pod>(&mut self, name: &str) -> Result<Array<&mut MapData, Raw<T>>> {
        let map = self.ebpf.map_mut(name).with_context(|| format!("no map {name}"))?;
        Array::try_from(map).with_context(|| format!("the map {name}"))
    }
}

/// What a program has written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// All slots.
    pub slots: Vec<u8>,
    /// Progress by job.
    pub progress: Vec<ProgressWords>,
}

/// A map's values in this process's memory.
#[derive(Debug)]
struct Mapping {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: the kernel shares the memory anyway; tests read it while nobody writes.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(map: &MapData, bytes: usize) -> Result<Mapping> {
        let descriptor = map.fd().as_fd().as_raw_fd();
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping; the kernel checks descriptor and length.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, libc::MAP_SHARED, descriptor, 0) };
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error()).context("cannot map the slots into memory");
        }
        Ok(Mapping { start: start.cast(), bytes })
    }

    fn read(&self) -> Vec<u8> {
        let mut copy = vec![0; self.bytes];
        // SAFETY: the mapping is that long.
        unsafe { self.start.copy_to_nonoverlapping(copy.as_mut_ptr(), self.bytes) };
        copy
    }

    fn write(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.bytes);
        // SAFETY: the mapping is that long.
        unsafe { self.start.copy_from_nonoverlapping(bytes.as_ptr(), self.bytes) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, which nobody uses any more.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}
