//! What happens between two steps of one request: a machine that lets something happen while a lock is taken or a
//! result is copied, as another CPU would.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

mod support;

use paatp_common::aggregate::{self, Arrival, Machine, Outcome};
use paatp_common::job::{JobEntry, RankEntry};
use paatp_common::lanes::{self, SlotBlock, WireBlock};
use paatp_common::limits::{BLOCK_BYTES, MAX_RANKS};
use paatp_common::policy::Policy;
use paatp_common::progress::{Members, Progress};
use paatp_common::slot::{Rules, Slot};
use paatp_common::tag::Tag;
use paatp_common::wire::{Answer, Body, HEADER_BYTES, Header, Request, Status};
use paatp_common::{Refusal, Seq};
use support::node::OwnedNode;
use support::requests::{TestJob, lanes_of, payload_of, sum_of};

const LANES: u16 = 64;

/// What another CPU does meanwhile.
type Interference<'a> = &'a dyn Fn(&mut OwnedNode);

/// A node with a request in hand.
struct Racing<'a> {
    node: &'a mut OwnedNode,
    header: Header,
    payload: Vec<u8>,
    /// Just before the lock is ours.
    on_lock: Interference<'a>,
    /// In the middle of copying a result.
    on_emit: Interference<'a>,
    is_lock_free: bool,
}

impl Racing<'_> {
    fn pairs(&mut self, slot: usize, blocks: u32) -> impl Iterator<Item = (&mut SlotBlock, &mut WireBlock)> {
        let first = slot * self.node.blocks;
        let payload = self.payload.chunks_exact_mut(BLOCK_BYTES).map(bytemuck::from_bytes_mut);
        self.node.lanes[first..first + blocks as usize].iter_mut().zip(payload)
    }
}

impl Machine for Racing<'_> {
    type JobRef = usize;
    type SlotRef = usize;

    fn header(&mut self) -> &mut Header {
        &mut self.header
    }
    fn find(&self, number: u16) -> Option<usize> {
        Some(number as usize)
    }
    fn job(&self, job: usize) -> &JobEntry {
        &self.node.jobs[job]
    }
    fn rules(&self, job: usize) -> Rules {
        self.job(job).rules()
    }
    fn replace_policy(&mut self, job: usize, from: Policy, to: Policy) {
        let policy = &mut self.node.jobs[job].policy;
        if *policy == from {
            *policy = to;
        }
    }
    fn progress(&self, job: usize) -> &Progress {
        &self.node.progress[job]
    }
    fn recompute(&mut self, job: usize, members: Members) {
        self.progress(job).recompute(members);
    }
    fn rank(&self, number: u16, rank: u8) -> Option<&RankEntry> {
        self.node.ranks.get(number as usize * MAX_RANKS + rank as usize)
    }
    fn slot(&self, index: u32) -> Option<usize> {
        Some(index as usize)
    }
    fn state(&mut self, slot: usize) -> &mut Slot {
        &mut self.node.slots[slot]
    }
    fn lock(&mut self, _: usize) -> bool {
        (self.on_lock)(self.node);
        self.is_lock_free
    }
    fn unlock(&mut self, _: usize) {}
    fn count(&mut self, counter: u32) {
        self.node.counters.count(counter);
    }
    fn forget(&self, value: u64) -> u64 {
        value
    }
    fn store(&mut self, slot: usize, blocks: u32) -> Option<u64> {
        let mut tag = Tag::default();
        self.pairs(slot, blocks).for_each(|(lanes, payload)| lanes::store(lanes, payload, &mut tag));
        Some(tag.value())
    }
    fn add(&mut self, slot: usize, blocks: u32) -> Option<u64> {
        let mut tag = Tag::default();
        self.pairs(slot, blocks).for_each(|(lanes, payload)| lanes::add(lanes, payload, &mut tag));
        Some(tag.value())
    }
    fn subtract(&mut self, slot: usize, blocks: u32) {
        self.pairs(slot, blocks).for_each(|(lanes, payload)| lanes::subtract(lanes, payload));
    }
    fn maximum(&mut self, _: usize, _: u32) -> Option<(u64, u64)> {
        unreachable!("no maximum here")
    }
    fn verify(&mut self, _: u32) -> Option<u64> {
        let mut tag = Tag::default();
        let blocks = self.payload.chunks_exact(BLOCK_BYTES);
        blocks.for_each(|block| lanes::verify(bytemuck::from_bytes(block), &mut tag));
        Some(tag.value())
    }
    fn emit(&mut self, slot: usize, blocks: u32) -> Option<()> {
        let half = blocks as usize / 2;
        self.pairs(slot, blocks).take(half).for_each(|(lanes, payload)| lanes::emit(payload, lanes));
        (self.on_emit)(self.node);
        self.pairs(slot, blocks).skip(half).for_each(|(lanes, payload)| lanes::emit(payload, lanes));
        Some(())
    }
}

const NOTHING: Interference<'static> = &|_| ();

struct Race {
    job: TestJob,
    node: OwnedNode,
}

impl Race {
    fn new(world: u8, slots: u32) -> Race {
        let job = TestJob::new(world, slots, LANES);
        Race { job, node: OwnedNode::of(&job) }
    }

    fn payload(&self, rank: u8, seq: u32) -> Vec<u32> {
        lanes_of(self.job.world, rank, Seq(seq), LANES)
    }

    fn contribute(&mut self, rank: u8, seq: u32, ack: u32) {
        let request = Request { ack: Seq(ack), ..self.job.data(rank, Seq(seq), sum_of(LANES)) };
        let payload = self.payload(rank, seq);
        self.node.ask(&self.job, &request, &payload).unwrap();
    }

    /// A request during which something else happens; `None` where it is dropped.
    fn raced(
        &mut self,
        request: &Request,
        on_lock: Interference<'_>,
        on_emit: Interference<'_>,
        is_lock_free: bool,
    ) -> Option<(Answer, Vec<u32>)> {
        let payload = self.payload(request.worker, request.seq.0);
        let datagram = self.job.datagram(request, &payload);
        let arrival = Arrival {
            source: self.job.address(request.worker),
            congested: false,
            payload_bytes: u32::from(LANES) * 4,
        };
        let mut machine = Racing {
            node: &mut self.node,
            header: *Header::of(&datagram).unwrap(),
            payload: datagram[HEADER_BYTES..].to_vec(),
            on_lock,
            on_emit,
            is_lock_free,
        };
        match aggregate::handle(&mut machine, arrival) {
            Outcome::Drop(_) => None,
            Outcome::Answer { payload } => {
                let lanes = [machine.header.as_bytes(), &machine.payload[..]].concat();
                let lanes = if payload { payload_of(&lanes) } else { Vec::new() };
                Some((Answer::decode(&machine.header).unwrap(), lanes))
            }
        }
    }
}

/// F11: the generation is over between the check and the lock. The old packet must not be added.
#[test]
fn f11_a_generation_that_ends_before_the_lock_is_seen_under_it() {
    let mut race = Race::new(2, 2);
    let old = race.job.data(0, Seq(0), sum_of(LANES));
    let mut newer = race.job;
    newer.generation += 1;
    let payload = race.payload(1, 0);
    // Meanwhile the job begins anew, and rank 1 contributes.
    let begin_anew = |node: &mut OwnedNode| {
        node.install(&newer);
        node.ask(&newer, &newer.data(1, Seq(0), sum_of(LANES)), &payload).unwrap();
    };
    let (answer, _) = race.raced(&old, &begin_anew, NOTHING, true).unwrap();
    assert_eq!(answer.status, Status::Rejoin);
    assert_eq!(race.node.counters.refused(Refusal::OldGeneration), 1);
    let slot = &race.node.slots[0];
    assert_eq!((slot.generation, slot.bits), (newer.generation, 0b10));
    assert_eq!(race.node.lanes_of_slot(0), race.payload(1, 0));
}

/// F11: nor may its acknowledgement count in the new generation.
#[test]
fn f11_an_acknowledgement_of_a_generation_that_ended_moves_nothing() {
    let mut race = Race::new(1, 4);
    for seq in 0..2 {
        race.contribute(0, seq, seq);
    }
    let old = Request { ack: Seq(2), ..race.job.data(0, Seq(2), sum_of(LANES)) };
    let mut newer = race.job;
    newer.generation += 1;
    race.raced(&old, &|node| node.install(&newer), NOTHING, true);
    let reply = race.node.ask(&newer, &newer.pull(0, Seq(0), sum_of(LANES)), &[0; LANES as usize]).unwrap();
    let Body::Pending { min_ack, .. } = reply.answer.body else { panic!("{reply:?}") };
    assert_eq!(min_ack, Seq(0));
}

/// Part 2.11: the slot is taken for another chunk, or for a redo, while its result is copied. No result is better than a
/// mixed one.
#[test]
fn part_2_11_a_copy_of_a_slot_that_was_taken_over_is_not_handed_out() {
    let fresh = Race::new(2, 1);
    let job = fresh.job;
    let payloads = [fresh.payload(0, 1), fresh.payload(1, 1)];
    let next_chunk = |node: &mut OwnedNode| {
        for _ in 0..2 {
            // Twice: the first round tells the acknowledgements.
            for rank in 0..2 {
                let request = Request { ack: Seq(1), ..job.data(rank, Seq(1), sum_of(LANES)) };
                node.ask(&job, &request, &payloads[rank as usize]).unwrap();
            }
        }
        assert!(node.slots[0].holds(job.generation, Seq(1)) && node.slots[0].is_complete());
    };
    let redo = |node: &mut OwnedNode| {
        for rank in 0..2 {
            let request = Request { attempt: 1, ..job.data(rank, Seq(0), sum_of(LANES)) };
            node.ask(&job, &request, &lanes_of(2, rank, Seq(0), LANES)).unwrap();
        }
        assert!(node.slots[0].is_complete());
    };
    let interferences: [Interference<'_>; 2] = [&next_chunk, &redo];
    for interference in interferences {
        let mut race = Race::new(2, 1);
        for rank in 0..2 {
            race.contribute(rank, 0, 0);
        }
        let pull = job.pull(1, Seq(0), sum_of(LANES));
        let (answer, lanes) = race.raced(&pull, NOTHING, interference, true).unwrap();
        assert!(matches!(answer.body, Body::Pending { .. }), "{answer:?}");
        assert!(lanes.is_empty());
    }
}

#[test]
fn a_lock_that_stays_taken_drops_the_packet_and_leaves_the_slot() {
    let mut race = Race::new(2, 1);
    race.contribute(0, 0, 0);
    let before = (race.node.slots[0], race.node.lanes_of_slot(0));
    let request = race.job.data(1, Seq(0), sum_of(LANES));
    assert_eq!(race.raced(&request, NOTHING, NOTHING, false), None);
    assert_eq!((race.node.slots[0], race.node.lanes_of_slot(0)), before);
    assert_eq!(race.node.counters.refused(Refusal::LockBusy), 1);
}

/// The job is deleted while a contribution waits for the lock.
#[test]
fn a_job_that_goes_before_the_lock_takes_no_contribution() {
    let mut race = Race::new(2, 1);
    let request = race.job.data(1, Seq(0), sum_of(LANES));
    let (answer, _) = race.raced(&request, &|node| node.jobs[0].generation = 0, NOTHING, true).unwrap();
    assert_eq!((answer.status, race.node.slots[0].bits), (Status::Rejoin, 0));
}
