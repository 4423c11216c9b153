//! One job on a node of its own, and short words for what its ranks do.

#![allow(dead_code, reason = "each includer uses a part")]
#![allow(clippy::unwrap_used, reason = "a panic is the failure report here")]

use paatp_common::job::JobEntry;
use paatp_common::pool::{K_MAX, Pool, Quarry, Search};
use paatp_common::progress::Progress;
use paatp_common::slot::Slot;
use paatp_common::wire::{Body, Redo, Request};
use paatp_common::{Refusal, Seq};

use crate::support::node::{OwnedNode, Reply};
use crate::support::requests::{TestJob, lanes_of, sum_of};

/// Lanes of its chunks.
pub const LANES: u16 = 64;

/// A job with a node of its own.
pub struct Bench {
    pub job: TestJob,
    pub node: OwnedNode,
}

impl Bench {
    pub fn new(job: TestJob) -> Bench {
        Bench { job, node: OwnedNode::of(&job) }
    }

    pub fn ranks(world: u8, slots: u32) -> Bench {
        Bench::new(TestJob::new(world, slots, LANES))
    }

    pub fn quorum(world: u8, slots: u32, quorum: u8) -> Bench {
        Bench::new(TestJob { quorum, ..TestJob::new(world, slots, LANES) })
    }

    /// A job whose chunks are in a pool of so many slots, from slot 1 on. Slot 0 is its own.
    pub fn sharing(world: u8, pool: u32, k: u8) -> Bench {
        let mut bench = Bench::new(TestJob { k, ..TestJob::new(world, 64, LANES) });
        bench.node.node.pool = Pool { first: 1, slots: pool };
        bench
    }

    /// The places of a chunk in the pool, in their order.
    pub fn places(&self, seq: u32) -> Vec<u32> {
        let TestJob { number: job, generation, first_slot: own, .. } = self.job;
        let search = Search::new(self.node.node.pool, Quarry { job, generation, seq: Seq(seq), own });
        (0..u64::from(K_MAX)).map(|turn| search.index(turn)).collect()
    }

    /// The slots that hold a chunk of the job's generation.
    pub fn holding(&self, seq: u32) -> Vec<u32> {
        let holds = |slot: &Slot| slot.holds(self.job.generation, Seq(seq)) && slot.job() == self.job.number;
        (0..).zip(&self.node.slots).filter(|(_, slot)| holds(slot)).map(|(index, _)| index).collect()
    }

    /// Another job's chunk, which is not over as long as that job runs, comes to lie in a slot.
    pub fn occupy(&mut self, slot: u32) {
        if self.node.jobs.len() == 1 {
            let entry = JobEntry { generation: 0x0DD, ..self.job.entry() };
            self.node.jobs.push(entry);
            self.node.progress.push(Progress::default());
        }
        self.node.slots[slot as usize].claim(1, 0x0DD, Seq(slot));
    }

    pub fn data(&self, rank: u8, seq: u32) -> Request {
        self.job.data(rank, Seq(seq), sum_of(LANES))
    }

    pub fn payload(&self, rank: u8, seq: u32) -> Vec<u32> {
        lanes_of(self.job.world, rank, Seq(seq), LANES)
    }

    /// Sends with the payload that the rank has for that chunk.
    pub fn send(&mut self, request: Request) -> Reply {
        let payload = self.payload(request.worker, request.seq.0);
        self.node.ask(&self.job, &request, &payload).unwrap()
    }

    pub fn contribute(&mut self, rank: u8, seq: u32) -> Reply {
        self.send(self.data(rank, seq))
    }

    pub fn redo(&mut self, rank: u8, seq: u32, attempt: u8) -> Reply {
        self.send(Request { attempt, ..self.data(rank, seq) })
    }

    pub fn pull(&mut self, rank: u8, want: u32, ack: u32) -> Reply {
        let request = Request { ack: Seq(ack), ..self.job.pull(rank, Seq(want), sum_of(LANES)) };
        self.node.ask(&self.job, &request, &vec![0; LANES as usize]).unwrap()
    }

    /// The same with a bit of the payload flipped.
    pub fn corrupted(&mut self, request: Request) -> Reply {
        let mut datagram = self.job.datagram(&request, &self.payload(request.worker, request.seq.0));
        *datagram.last_mut().unwrap() ^= 0x10;
        self.node.ask_raw(datagram, self.job.address(request.worker)).unwrap()
    }

    pub fn shrink(&mut self, rank: u8) {
        self.node.jobs[0].expected &= !(1 << rank);
    }

    pub fn sum(&self, ranks: &[u8], seq: u32) -> Vec<u32> {
        let mut sum = vec![0u32; LANES as usize];
        for rank in ranks {
            sum.iter_mut().zip(self.payload(*rank, seq)).for_each(|(sum, lane)| *sum += lane);
        }
        sum
    }

    pub fn refused(&self, refusal: Refusal) -> u64 {
        self.node.counters.refused(refusal)
    }
}

pub fn bitmap(reply: &Reply) -> u64 {
    match reply.answer.body {
        Body::Result { bitmap, .. } | Body::Pending { bitmap, .. } => bitmap,
    }
}

pub fn has_result(reply: &Reply) -> bool {
    matches!(reply.answer.body, Body::Result { .. })
}

pub fn min_ack(reply: &Reply) -> u32 {
    match reply.answer.body {
        Body::Pending { min_ack, .. } => min_ack.0,
        Body::Result { .. } => panic!("a result: {reply:?}"),
    }
}

pub fn redo(reply: &Reply) -> Option<(u32, u8)> {
    match reply.answer.body {
        Body::Pending { redo, .. } => redo.map(|Redo { seq, attempt }| (seq.0, attempt)),
        Body::Result { .. } => None,
    }
}

pub fn agreed(reply: &Reply) -> i8 {
    match reply.answer.body {
        Body::Result { next_exponent, .. } => next_exponent,
        Body::Pending { .. } => panic!("no result: {reply:?}"),
    }
}
