//! An aggregator in memory of its own.

use paatp_common::aggregate::{Arrival, Outcome};
use paatp_common::counter::{Counters, Event};
use paatp_common::frame::{self, Frame, Parsed};
use paatp_common::host::Host;
use paatp_common::job::{Address, JobEntry, Node, RankEntry};
use paatp_common::lanes::SlotBlock;
use paatp_common::limits::MAX_RANKS;
use paatp_common::progress::{Members, Progress};
use paatp_common::slot::Slot;
use paatp_common::wire::{Answer, Request};
use paatp_common::{Refusal, Seq};

use super::packet::{PORT, PORTS, local};
use super::requests::{TestJob, payload_of};

/// What happens to a frame; the numbers are those of `enum xdp_action`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Verdict {
    /// Thrown away.
    Drop = 1,
    /// To the stack.
    Pass = 2,
    /// Back out of the interface.
    Transmit = 3,
}

/// An answer with its payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Its header.
    pub answer: Answer,
    /// Its lanes.
    pub payload: Vec<u32>,
}

/// Tables, slots and counters of a node.
#[derive(Debug)]
pub struct OwnedNode {
    /// What is ours.
    pub node: Node,
    /// By job.
    pub jobs: Vec<JobEntry>,
    /// By job and rank.
    pub ranks: Vec<RankEntry>,
    /// By job.
    pub progress: Vec<Progress>,
    /// Headers of slots.
    pub slots: Vec<Slot>,
    /// Lanes of slots.
    pub lanes: Vec<SlotBlock>,
    /// Blocks of each slot.
    pub blocks: usize,
    /// What happened.
    pub counters: Counters,
    /// It is one with levels, whose jobs have no parents.
    pub levels: bool,
}

impl OwnedNode {
    /// A node with room for so many jobs and slots.
    #[must_use]
    pub fn new(jobs: usize, slots: usize, blocks: usize) -> OwnedNode {
        let mut node = Node { port_base: PORT, port_count: PORTS, ..Node::default() };
        node.local[0] = local(false);
        node.local[1] = local(true);
        OwnedNode {
            node,
            jobs: vec![JobEntry::default(); jobs],
            ranks: vec![RankEntry::default(); jobs * MAX_RANKS],
            progress: (0..jobs).map(|_| Progress::default()).collect(),
            slots: vec![Slot::default(); slots],
            lanes: vec![SlotBlock::default(); slots * blocks],
            blocks,
            counters: Counters::default(),
            levels: false,
        }
    }

    /// The same node again.
    #[must_use]
    pub fn duplicate(&self) -> OwnedNode {
        let progress = |progress: &Progress| {
            // SAFETY: a repr(C) struct of words that owns nothing, read while nobody writes.
            unsafe { std::ptr::from_ref(progress).read() }
        };
        OwnedNode {
            node: self.node,
            jobs: self.jobs.clone(),
            ranks: self.ranks.clone(),
            progress: self.progress.iter().map(progress).collect(),
            slots: self.slots.clone(),
            lanes: self.lanes.clone(),
            blocks: self.blocks,
            counters: self.counters,
            levels: self.levels,
        }
    }

    /// A node with one job, whose slots are just large enough.
    #[must_use]
    pub fn of(job: &TestJob) -> OwnedNode {
        let slots = (job.first_slot + job.slots) as usize;
        let mut node = OwnedNode::new(job.number as usize + 1, slots, job.lanes as usize / 32);
        node.install(job);
        node
    }

    /// Puts a job, or a new generation of it, in force.
    pub fn install(&mut self, job: &TestJob) {
        self.jobs[job.number as usize] = job.entry();
        for rank in 0..job.world {
            self.ranks[job.number as usize * MAX_RANKS + rank as usize] = job.rank_entry(rank);
        }
    }

    /// Lets every rank of a job have acknowledged and contributed everything before `start`.
    pub fn start_at(&mut self, job: &TestJob, start: Seq) {
        let progress = &self.progress[job.number as usize];
        let members =
            Members { generation: job.generation, expected: job.entry().expected, world: job.world };
        // In steps: what is 2^31 ahead counts as behind.
        for position in [start.0 / 3, start.0 / 3 * 2, start.0].map(Seq) {
            for rank in 0..job.world as usize {
                progress.record(job.generation, rank, position, position, u32::MAX);
            }
            progress.recompute(members);
        }
        assert_eq!(progress.acks.floor(job.generation), start);
    }

    /// The node as `paatp-common` wants it.
    pub fn host(&mut self) -> Host<'_> {
        Host {
            jobs: &mut self.jobs,
            ranks: &self.ranks,
            progress: &self.progress,
            pool: self.node.pool,
            slots: &mut self.slots,
            lanes: &mut self.lanes,
            blocks_per_slot: self.blocks,
            counters: &mut self.counters,
        }
    }

    /// One datagram, cut to its answer.
    ///
    /// # Errors
    /// The refusal, where it is dropped.
    pub fn datagram(
        &mut self,
        datagram: &mut Vec<u8>,
        source: Address,
        congested: bool,
    ) -> Result<(), Refusal> {
        let length = self.handle(datagram, source, congested)?;
        datagram.truncate(length);
        Ok(())
    }

    fn handle(&mut self, datagram: &mut [u8], source: Address, congested: bool) -> Result<usize, Refusal> {
        if !self.levels {
            return self.host().handle(datagram, source, congested);
        }
        match self.host().handle_with_levels(&[], &[], datagram, source, 0, congested) {
            (Outcome::Answer { .. }, length) => Ok(length),
            (Outcome::Drop(refusal), _) => Err(refusal),
            (outcome, _) => panic!("without a parent, and still {outcome:?}"),
        }
    }

    /// A well-formed request from its rank's own address.
    ///
    /// # Errors
    /// The refusal, where it is dropped.
    pub fn ask(&mut self, job: &TestJob, request: &Request, payload: &[u32]) -> Result<Reply, Refusal> {
        self.ask_raw(job.datagram(request, payload), job.address(request.worker))
    }

    /// A datagram as it is.
    ///
    /// # Errors
    /// The refusal, where it is dropped.
    pub fn ask_raw(&mut self, mut datagram: Vec<u8>, source: Address) -> Result<Reply, Refusal> {
        self.datagram(&mut datagram, source, false)?;
        let header = paatp_common::wire::Header::of(&datagram).expect("an answer has a header");
        let answer = Answer::decode(header).expect("an answer that can be read");
        Ok(Reply { answer, payload: payload_of(&datagram) })
    }

    /// One frame through the node, as the XDP program treats it.
    pub fn frame(&mut self, frame: &mut Vec<u8>) -> Verdict {
        let length = frame.len() as u32;
        let relayed = if self.levels { MAX_RANKS as u16 } else { 0 };
        let (layout, arrival) = match frame::parse(&Frame::new(frame), length, &self.node, relayed) {
            Parsed::NotOurs => {
                self.counters.note(Event::Passed);
                return Verdict::Pass;
            }
            Parsed::Unread(refusal) => {
                self.counters.refuse(refusal);
                return Verdict::Pass;
            }
            Parsed::Bad(refusal) => {
                self.counters.refuse(refusal);
                return Verdict::Drop;
            }
            Parsed::Ours(layout, arrival) => (layout, arrival),
        };
        let Arrival { source, congested, .. } = arrival;
        let Ok(length) = self.handle(&mut frame[layout.header()..], source, congested) else {
            return Verdict::Drop;
        };
        let payload = length - paatp_common::wire::HEADER_BYTES;
        frame::turn_round(&mut Frame::new(frame), layout, payload as u32).expect("parsed before");
        frame.truncate(layout.header() + length);
        Verdict::Transmit
    }

    /// Headers and lanes of all slots as one string of bytes, as the kernel's map holds them.
    #[must_use]
    pub fn slot_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (slot, lanes) in self.slots.iter().zip(self.lanes.chunks(self.blocks)) {
            bytes.extend(bytemuck::bytes_of(slot));
            bytes.extend(bytemuck::cast_slice::<_, u8>(lanes));
        }
        bytes
    }

    /// The lanes of one slot, in the order of the wire.
    #[must_use]
    pub fn lanes_of_slot(&self, slot: usize) -> Vec<u32> {
        let words = self.lanes[slot * self.blocks..][..self.blocks].iter().flatten();
        words.flat_map(|word| [(word >> 32) as u32, *word as u32]).collect()
    }

    /// A job's progress as the kernel's map holds it.
    #[must_use]
    pub fn progress_words(&self, job: u16) -> [u64; size_of::<Progress>() / 8] {
        let progress = &raw const self.progress[job as usize];
        // SAFETY: a repr(C) struct of words without padding, read while nobody writes.
        unsafe { progress.cast::<[u64; size_of::<Progress>() / 8]>().read() }
    }
}
