//! The aggregator on a test bed: `lab.bpf.o` with one job, fed with contributions by its own programs
//! (`paatp-ebpf/src/feed.rs`), and the counters that tell whether they were what a benchmark thinks.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use aya::maps::{Array, PerCpuArray};
use aya::programs::xdp::XdpMode;
use aya::programs::{TestRun, TestRunAttrs, TestRunOptions, Xdp};
use aya::{Ebpf, EbpfLoader, Pod};
use paatp_common::counter::{Counters, Event, Refusal};
use paatp_common::job::{JobEntry, Node, RankEntry, mapped};
use paatp_common::limits::{LANES_PER_BLOCK, MAX_RANKS, STANDARD_BLOCKS};
use paatp_common::pool::{K_MAX, Pool};
use paatp_common::seq::Seq;
use paatp_common::tag::rank_key;
use paatp_common::wire::{Chunk, ElementType, Header, Kind, Operation, Request, flags};

const OUTER_BYTES: usize = 42;
/// Bytes of a live frame that `feed_out` cuts off (`paatp-ebpf/src/feed.rs` says why).
const LIVE_SPARE: usize = 4;
const GENERATION: u32 = 0x5EED;
const PORT: u16 = 20_545;
const SOURCE: [u8; 4] = [10, 0, 0, 1];
const DESTINATION: [u8; 4] = [10, 0, 0, 2];

/// Cycles that one run of `clock` (`paatp-ebpf/src/bin/lab.rs`) takes.
const CLOCK_CYCLES: u32 = 4096;
/// Its runs in one measurement: a few milliseconds.
const CLOCK_RUNS: u32 = 4000;

/// `paatp-ebpf/src/feed.rs` has the same layout.
#[derive(Clone, Copy)]
#[repr(C)]
struct Feed {
    outer: [u8; OUTER_BYTES],
    reserved: [u8; 6],
    header: Header,
    keys: [u64; MAX_RANKS],
    rank_mask: u32,
    rank_bits: u32,
    wish_back: u32,
    frame_bytes: u32,
}

/// Lets aya copy a type of ours into and out of maps.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Raw<T: Copy>(T);
// SAFETY: used for `repr(C)` types of integers without padding only, see the calls.
unsafe impl<T: Copy + 'static> Pod for Raw<T> {}

/// What to load.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Lanes in a payload.
    pub lanes: u16,
    /// Slots in the ring.
    pub slots: u32,
    /// Ranks, a power of two.
    pub ranks: u8,
    /// Answers carry the result of the chunk before; else they are cut to the header.
    pub with_results: bool,
    /// The slots are a pool, and the job shares it.
    pub is_shared: bool,
}

/// A loaded object with one job.
pub struct Bed {
    ebpf: Ebpf,
    setup: Setup,
    frame: Vec<u8>,
}

impl Bed {
    /// Loads `lab.bpf.o` and writes the tables.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn new(setup: Setup) -> Result<Bed> {
        let object = std::fs::read(crate::lab::lab_object())
            .context("reading lab.bpf.o; `cargo xtask build` makes it")?;
        let wide = setup.lanes as usize > STANDARD_BLOCKS * LANES_PER_BLOCK;
        // In a pool the job has one more of its own.
        let slots = setup.slots + u32::from(setup.is_shared);
        let (standard_slots, wide_slots) = if wide { (1, slots) } else { (slots, 1) };
        let mut ebpf = EbpfLoader::new()
            .map_max_entries("SLOTS", standard_slots)
            .map_max_entries("WIDE_SLOTS", wide_slots)
            .load(&object)?;
        let feed = feed(setup);
        let mut frame = vec![0u8; feed.frame_bytes as usize];
        frame[..OUTER_BYTES].copy_from_slice(&feed.outer);
        set(&mut ebpf, "FEED", 0, feed)?;
        let mut node = Node { port_base: PORT, port_count: 1, ..Node::default() };
        node.local[0] = mapped(DESTINATION);
        node.pool = Pool { first: 0, slots: setup.slots };
        set(&mut ebpf, "NODE", 0, node)?;
        for rank in 0..u32::from(setup.ranks) {
            let entry =
                RankEntry { address: mapped(SOURCE), key: feed.keys[rank as usize], ..RankEntry::default() };
            set(&mut ebpf, "RANKS", rank, entry)?;
        }
        let job = JobEntry {
            expected: u64::MAX >> (64 - u32::from(setup.ranks)),
            generation: GENERATION,
            slots: setup.slots,
            lanes: setup.lanes,
            window: u16::try_from(setup.slots / 2).unwrap_or(u16::MAX),
            world: setup.ranks,
            first_slot: if setup.is_shared { setup.slots } else { 0 },
            k: if setup.is_shared { K_MAX } else { 0 },
            ..JobEntry::default()
        };
        set(&mut ebpf, "JOBS", 0, job)?;
        Ok(Bed { ebpf, setup, frame })
    }

    /// The program of this name, loaded.
    fn program(&mut self, name: &str) -> Result<&mut Xdp> {
        let program: &mut Xdp =
            self.ebpf.program_mut(name).with_context(|| format!("no program {name}"))?.try_into()?;
        if program.fd().is_err() {
            program.load().with_context(|| format!("loading {name}"))?;
        }
        Ok(program)
    }

    /// Runs a program `repeat` times over its own output; returns the mean of one run as the kernel measured it
    /// (whole nanoseconds).
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn run(&mut self, name: &str, repeat: u32) -> Result<Duration> {
        let frame = self.frame.clone();
        let options = TestRunOptions { data_in: Some(&frame), repeat, ..TestRunOptions::new() };
        Ok(self.program(name)?.test_run(options)?.duration)
    }

    /// Cycles of the core's clock in a nanosecond, now.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn clock(&mut self) -> Result<f64> {
        Ok(f64::from(CLOCK_CYCLES) / self.run("clock", CLOCK_RUNS)?.as_nanos() as f64)
    }

    /// Runs what makes the frames alone, and sets the count back: the contributions that it stands for were not made.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn run_feeder(&mut self, repeat: u32) -> Result<Duration> {
        let fed = {
            let map = self.ebpf.map("FED").context("no map FED")?;
            let map: PerCpuArray<_, u64> = PerCpuArray::try_from(map)?;
            map.get(&0, 0)?
        };
        let duration = self.run("feed_only", repeat)?;
        let map = self.ebpf.map_mut("FED").context("no map FED")?;
        let mut map: PerCpuArray<_, u64> = PerCpuArray::try_from(map)?;
        map.set(0, fed, 0)?;
        Ok(duration)
    }

    /// Sends `frames` live frames, as `name` makes them, out of interface `ifindex` in batches of `batch`.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn run_live(&mut self, name: &str, ifindex: u32, frames: u32, batch: u32) -> Result<()> {
        let mut frame = self.frame.clone();
        frame.extend([0; LIVE_SPARE]);
        // struct xdp_md: data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex.
        let context: [u32; 6] = [0, u32::try_from(frame.len())?, 0, ifindex, 0, 0];
        let options = TestRunOptions {
            data_in: Some(&frame),
            ctx_in: Some(bytemuck::bytes_of(&context)),
            repeat: frames,
            attrs: TestRunAttrs::new().xdp_live_frames(batch),
            ..TestRunOptions::new()
        };
        self.program(name)?.test_run(options)?;
        Ok(())
    }

    /// Attaches a program natively to an interface of the calling thread's namespace, until the bed is dropped or
    /// [`Bed::detach`] is called.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn attach(&mut self, name: &str, interface: &str) -> Result<()> {
        self.program(name)?.attach(interface, XdpMode::Driver)?;
        Ok(())
    }

    /// Takes a program off its interfaces.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn detach(&mut self, name: &str) -> Result<()> {
        let program = self.program(name)?;
        program.unload()?;
        Ok(())
    }

    /// The aggregator's counters, of all CPUs.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn counters(&self) -> Result<Counters> {
        let map = self.ebpf.map("COUNTERS").context("no map COUNTERS")?;
        let map: PerCpuArray<_, Raw<Counters>> = PerCpuArray::try_from(map)?;
        let mut sum = Counters::default();
        map.get(&0, 0)?.iter().for_each(|cpu| sum.absorb(&cpu.0));
        Ok(sum)
    }

    /// Frames that `drop_all` dropped and `echo` sent back.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn seen(&self) -> Result<(u64, u64)> {
        let map = self.ebpf.map("SEEN").context("no map SEEN")?;
        let map: PerCpuArray<_, u64> = PerCpuArray::try_from(map)?;
        Ok((map.get(&0, 0)?.iter().sum(), map.get(&1, 0)?.iter().sum()))
    }

    /// Checks that `runs` contributions were taken since `before`, each an addition or a store, and nothing else
    /// happened.
    ///
    /// # Errors
    /// What happened instead.
    pub fn check(&self, before: &Counters, runs: u64) -> Result<()> {
        let now = self.counters()?;
        let gained = |event| now.noted(event) - before.noted(event);
        for refusal in Refusal::ALL {
            let refused = now.refused(*refusal) - before.refused(*refusal);
            ensure!(refused == 0, "{refused} of {runs} contributions were refused: {}", refusal.sentence());
        }
        let taken = gained(Event::Contributions);
        ensure!(taken == runs, "{taken} of {runs} contributions were taken");
        ensure!(
            gained(Event::Adds) + gained(Event::Stores) == runs,
            "not all of {runs} payloads were added or stored"
        );
        let completions = runs / u64::from(self.setup.ranks);
        ensure!(
            gained(Event::Completions).abs_diff(completions) <= 1,
            "not every {} contributions completed a slot",
            self.setup.ranks
        );
        if self.setup.with_results {
            let missing = runs - gained(Event::Results);
            if missing > u64::from(self.setup.ranks) {
                bail!("{missing} of {runs} answers carried no result");
            }
        }
        Ok(())
    }
}

fn set<T: Copy + 'static>(ebpf: &mut Ebpf, map: &str, index: u32, value: T) -> Result<()> {
    let mut array: Array<_, Raw<T>> =
        Array::try_from(ebpf.map_mut(map).with_context(|| format!("no map {map}"))?)?;
    array.set(index, Raw(value), 0)?;
    Ok(())
}

/// The frames to feed.
fn feed(setup: Setup) -> Feed {
    let payload = u32::from(setup.lanes) * 4;
    let mut keys = [0; MAX_RANKS];
    for (rank, key) in (0u8..).zip(keys.iter_mut()) {
        *key = rank_key(1, rank.into());
    }
    let request = Request {
        kind: Kind::Data,
        flags: flags::PAYLOAD,
        job: 0,
        worker: 0,
        generation: GENERATION,
        seq: Seq(0),
        want: Seq(0),
        ack: Seq(0),
        progress: Seq(0),
        token: 0,
        bitmap: 1,
        tag: 0,
        chunk: Chunk::new(Operation::Sum, ElementType::F32, setup.lanes, 0),
        next_exponent: 0,
        attempt: 0,
    };
    Feed {
        outer: outer_headers(payload),
        reserved: [0; 6],
        header: request.encode(),
        keys,
        rank_mask: u32::from(setup.ranks) - 1,
        rank_bits: u32::from(setup.ranks).trailing_zeros(),
        // One back is complete; one ahead is nobody's yet.
        wish_back: if setup.with_results { 1 } else { u32::MAX },
        frame_bytes: OUTER_BYTES as u32 + 64 + payload,
    }
}

/// Ethernet, IPv4 and UDP before `payload` bytes after our header.
fn outer_headers(payload: u32) -> [u8; OUTER_BYTES] {
    let udp = (8 + 64 + payload) as u16;
    let mut outer = [0u8; OUTER_BYTES];
    outer[..6].copy_from_slice(&[2, 0, 0, 0, 0, 2]);
    outer[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
    outer[12..14].copy_from_slice(&[8, 0]);
    outer[14] = 0x45;
    outer[16..18].copy_from_slice(&(udp + 20).to_be_bytes());
    outer[22..24].copy_from_slice(&[64, 17]);
    outer[26..30].copy_from_slice(&SOURCE);
    outer[30..34].copy_from_slice(&DESTINATION);
    outer[34..36].copy_from_slice(&40_000u16.to_be_bytes());
    outer[36..38].copy_from_slice(&PORT.to_be_bytes());
    outer[38..40].copy_from_slice(&udp.to_be_bytes());
    outer
}
