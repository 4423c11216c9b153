//! Test vectors: packets in, packets out and the slot afterwards, for the aggregator and for a switch in front of it.
//! `docs/vectors.md` describes the files in `tests/vectors`.
//!
//! They are made from `paatp-common` and then held against everything that is to behave like it: the same code, the
//! loaded XDP program, the P4 program.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use paatp_common::Seq;
use paatp_common::wire::Chunk;
use serde::{Deserialize, Serialize};

use crate::testrun::support::node::{OwnedNode, Verdict};
use crate::testrun::support::requests::TestJob;
use crate::testrun::support::switch::{Installed, OwnedSwitch, Port, lanes_of_cell};

pub mod scenes;

/// One file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vector {
    /// What it is about, in a sentence.
    pub about: String,
    /// The jobs, all of which have rings at the aggregator.
    pub jobs: Vec<JobSpec>,
    /// The switch, where one has a part in it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub switch: Option<SwitchSpec>,
    /// What happens.
    pub steps: Vec<Step>,
}

/// A job, as `paatp-common/tests/support/requests.rs` makes tables of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSpec {
    /// Number on the node.
    pub number: u16,
    /// Incarnation.
    pub generation: u32,
    /// Ranks.
    pub world: u8,
    /// First slot of the ring.
    pub first_slot: u32,
    /// Slots of the ring.
    pub slots: u32,
    /// Most lanes in a chunk.
    pub lanes: u16,
}

impl JobSpec {
    /// The job.
    #[must_use]
    pub const fn job(&self) -> TestJob {
        let job = TestJob::new(self.world, self.slots, self.lanes);
        TestJob { number: self.number, generation: self.generation, first_slot: self.first_slot, ..job }
    }

    /// As it stands in a vector.
    #[must_use]
    pub const fn of(job: &TestJob) -> JobSpec {
        JobSpec {
            number: job.number,
            generation: job.generation,
            world: job.world,
            first_slot: job.first_slot,
            slots: job.slots,
            lanes: job.lanes,
        }
    }
}

/// A switch that all ranks are behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwitchSpec {
    /// Slots of its table. A switch that has more must mask hashes to this many.
    pub slots: usize,
    /// Places of the table for each chunk.
    pub k: u8,
    /// How long a slot may be untouched before another chunk may have it, in µs.
    pub patience: u64,
}

/// One packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// What it shows.
    pub what: String,
    /// Who sends it: a rank, or the aggregator if there is none.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub rank: Option<u8>,
    /// The frame, in hexadecimal digits.
    pub frame: String,
    /// What an aggregator does that gets it, all steps of ranks before, and nothing else.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub aggregator: Option<AggregatorEffect>,
    /// What the switch does.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub switch: Option<SwitchEffect>,
    /// The switch does the same with its slot as the aggregator with its own.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub same: bool,
}

/// What an aggregator does with a frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AggregatorEffect {
    /// `drop`, `pass` or `transmit`.
    pub verdict: String,
    /// The frame afterwards; nothing if it is dropped.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub frame: String,
    /// The slot of `seq` afterwards, if it holds that chunk.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub slot: Option<SlotState>,
}

/// What a switch does with a frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwitchEffect {
    /// Frames that leave: `node` or the number of a rank, and the frame.
    pub out: BTreeMap<String, String>,
    /// The slot of `seq` afterwards, if there is one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub slot: Option<SlotState>,
}

/// What is the same in all slots of a chunk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotState {
    /// Its number in the table.
    pub index: usize,
    /// The chunk.
    pub seq: u32,
    /// Contributors, in hexadecimal digits.
    pub bits: String,
    /// Sum of their tags, likewise.
    pub tag: String,
    /// What they agreed on.
    pub operation_and_type: u8,
    /// Its scale.
    pub exponent: i8,
    /// Rank or fingerprint.
    pub root: u8,
    /// Largest exponent proposed.
    pub next_exponent: i8,
    /// The lanes in the order of the wire, in hexadecimal digits.
    pub lanes: String,
}

impl SlotState {
    /// Everything but where it is.
    #[must_use]
    pub fn is_same(&self, other: &SlotState) -> bool {
        *self == SlotState { index: self.index, ..other.clone() }
    }

    /// From its parts.
    #[must_use]
    pub fn new(index: usize, seq: Seq, sums: (u64, u64), chunk: Chunk, next: i8, lanes: &[u32]) -> SlotState {
        let lanes = lanes.iter().flat_map(|lane| lane.to_be_bytes()).collect::<Vec<u8>>();
        SlotState {
            index,
            seq: seq.0,
            bits: format!("{:x}", sums.0),
            tag: format!("{:x}", sums.1),
            operation_and_type: chunk.operation_and_type,
            exponent: chunk.exponent,
            root: chunk.root,
            next_exponent: next,
            lanes: hex(&lanes),
        }
    }
}

/// Bytes as hexadecimal digits.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes that hexadecimal digits stand for.
///
/// # Errors
/// Where they are none.
pub fn unhex(digits: &str) -> Result<Vec<u8>> {
    ensure!(digits.len().is_multiple_of(2) && digits.is_ascii(), "an odd number of digits");
    (0..digits.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).context("not a hexadecimal digit"))
        .collect()
}

/// The name of a port in [`SwitchEffect::out`].
#[must_use]
pub fn port_name(port: Port) -> String {
    match port {
        Port::Node => "node".into(),
        Port::Rank(rank) => rank.to_string(),
    }
}

/// Job and chunk that a frame speaks of, if it is long enough.
#[must_use]
pub fn name_of(frame: &[u8]) -> Option<(u16, u32, Seq)> {
    let header = paatp_common::wire::Header::of(frame.get(paatp_common::frame::PLAIN_HEADER..)?)?;
    Some((header.job(), header.generation(), header.seq()))
}

/// The ring's slot of the chunk that a frame speaks of: its number in the table.
#[must_use]
pub fn ring_slot(jobs: &[JobSpec], frame: &[u8]) -> Option<(usize, u32, Seq)> {
    let (number, generation, seq) = name_of(frame)?;
    let job = jobs.iter().find(|job| job.number == number)?;
    Some(((job.first_slot + seq.0 % job.slots) as usize, generation, seq))
}

impl Vector {
    /// An aggregator with these jobs and slots of so many blocks.
    #[must_use]
    pub fn node(&self, blocks: usize) -> OwnedNode {
        let jobs = self.jobs.iter().map(|job| usize::from(job.number) + 1).fold(2, usize::max);
        let slots = self.jobs.iter().map(|job| (job.first_slot + job.slots) as usize).max().unwrap_or(0);
        let mut node = OwnedNode::new(jobs, slots, blocks);
        self.jobs.iter().for_each(|job| node.install(&job.job()));
        node
    }

    /// The switch with these jobs.
    #[must_use]
    pub fn switch(&self, blocks: usize) -> Option<OwnedSwitch> {
        let spec = self.switch?;
        let mut switch = OwnedSwitch::new(spec.slots, blocks);
        for job in &self.jobs {
            switch.install(Installed::of(&job.job(), spec.k, spec.patience));
        }
        Some(switch)
    }
}

/// What an aggregator in memory does with a frame.
#[must_use]
pub fn at_the_aggregator(node: &mut OwnedNode, jobs: &[JobSpec], frame: &[u8]) -> AggregatorEffect {
    let mut answer = frame.to_vec();
    let verdict = node.frame(&mut answer);
    let slot = ring_slot(jobs, frame).and_then(|(index, generation, seq)| {
        let state = node.slots.get(index).filter(|slot| slot.holds(generation, seq) && slot.bits != 0)?;
        let lanes = &node.lanes_of_slot(index)[..usize::from(state.chunk().lanes)];
        let sums = (state.bits, state.tag);
        Some(SlotState::new(index, seq, sums, state.chunk(), state.next_exponent(), lanes))
    });
    effect(verdict, &answer, slot)
}

/// An effect from its parts.
#[must_use]
pub fn effect(verdict: Verdict, frame: &[u8], slot: Option<SlotState>) -> AggregatorEffect {
    let name = match verdict {
        Verdict::Drop => "drop",
        Verdict::Pass => "pass",
        Verdict::Transmit => "transmit",
    };
    let frame = if verdict == Verdict::Drop { String::new() } else { hex(frame) };
    AggregatorEffect { verdict: name.into(), frame, slot }
}

/// What a switch in memory does with a frame.
#[must_use]
pub fn at_the_switch(switch: &mut OwnedSwitch, from: Port, frame: &[u8]) -> SwitchEffect {
    let out = switch.frame(from, frame);
    let out = out.into_iter().map(|(port, frame)| (port_name(port), hex(&frame))).collect();
    let slot = name_of(frame).and_then(|(job, generation, seq)| {
        let holds = |cell: &paatp_common::switch::Cell| {
            (cell.job, cell.generation, cell.seq) == (job, generation, seq)
        };
        let index = switch.cells.iter().position(holds)?;
        let cell = switch.cells[index];
        let lanes = lanes_of_cell(switch, index);
        Some(SlotState::new(index, seq, (cell.bits, cell.tag), cell.chunk, cell.next_exponent, &lanes))
    });
    SwitchEffect { out, slot }
}

/// The folder with the files.
#[must_use]
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("vectors")
}

/// Reads all files, by name.
///
/// # Errors
/// Where one cannot be read.
pub fn read() -> Result<BTreeMap<String, Vector>> {
    let folder = folder();
    let mut vectors = BTreeMap::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let vector =
            serde_json::from_str(&text).with_context(|| format!("{} is no vector", path.display()))?;
        let name = path.file_stem().context("a file without a name")?.to_string_lossy().into_owned();
        vectors.insert(name, vector);
    }
    Ok(vectors)
}

/// Writes all files, or with `check` only says which are not as they should be.
///
/// # Errors
/// Where one cannot be written, or with `check` differs.
pub fn write(check: bool) -> Result<Vec<String>> {
    let (folder, mut changed) = (folder(), Vec::new());
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let vectors = scenes::all()?;
    for (name, vector) in &vectors {
        let path = folder.join(format!("{name}.json"));
        let text = format!("{}\n", serde_json::to_string_pretty(vector)?);
        if fs::read_to_string(&path).ok().as_ref() != Some(&text) {
            changed.push(name.clone());
            if !check {
                fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
            }
        }
    }
    for entry in fs::read_dir(&folder)? {
        let path = entry?.path();
        let name = path.file_stem().context("a file without a name")?.to_string_lossy().into_owned();
        if !vectors.contains_key(&name) {
            changed.push(name);
            if !check {
                fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
            }
        }
    }
    if check && !changed.is_empty() {
        bail!("not as the code makes them: {}; `cargo xtask vectors` writes them", changed.join(", "));
    }
    Ok(changed)
}
