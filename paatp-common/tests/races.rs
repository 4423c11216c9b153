//! What happens between two steps of one request: a machine that lets something happen while a lock is taken or a
//! result is copied, as another CPU would.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

mod support;

use std::cell::RefCell;

use paatp_common::aggregate::{self, Arrival, Machine, Outcome};
use paatp_common::job::{JobEntry, RankEntry};
use paatp_common::lanes::{self, SlotBlock, WireBlock};
use paatp_common::limits::{BLOCK_BYTES, MAX_RANKS};
use paatp_common::policy::Policy;
use paatp_common::pool::{self, K_MAX, Pool, Quarry, Search, TURNS};
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
    meanwhile: Meanwhile<'a>,
    is_lock_free: bool,
}

/// What happens when.
#[derive(Clone, Copy)]
struct Meanwhile<'a> {
    /// Just before the lock is ours.
    on_lock: Interference<'a>,
    /// In the middle of copying a result.
    on_emit: Interference<'a>,
    /// Before each turn of a search in the pool, the lock of the chunk's home being held.
    on_look: &'a dyn Fn(&mut OwnedNode, u64),
}

const UNDISTURBED: Meanwhile<'static> = Meanwhile { on_lock: NOTHING, on_emit: NOTHING, on_look: &|_, _| () };

impl Racing<'_> {
    fn pairs(&mut self, slot: usize, blocks: u32) -> impl Iterator<Item = (&mut SlotBlock, &mut WireBlock)> {
        let first = slot * self.node.blocks;
        let payload = self.payload.chunks_exact_mut(BLOCK_BYTES).map(bytemuck::from_bytes_mut);
        self.node.lanes[first..first + blocks as usize].iter_mut().zip(payload)
    }
}

/// A lock that is taken stays taken: nothing else moves while the other CPU spins.
fn take(lock: &mut u64) -> bool {
    std::mem::replace(lock, 1) == 0
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
    fn policy(&self, job: usize) -> Policy {
        self.job(job).policy
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
    fn lock(&mut self, slot: usize) -> bool {
        (self.meanwhile.on_lock)(self.node);
        self.is_lock_free && take(&mut self.node.slots[slot].lock)
    }
    fn unlock(&mut self, slot: usize) {
        self.node.slots[slot].lock = 0;
    }
    fn pool(&self) -> Pool {
        self.node.node.pool
    }
    fn search(&mut self, mut search: Search) -> Search {
        for turn in 0..u64::from(TURNS) {
            (self.meanwhile.on_look)(self.node, turn);
            let node = &*self.node;
            let slot = &node.slots[search.index(turn) as usize];
            let owner = slot.job() as usize;
            let is_over = pool::is_over(slot, &node.jobs[owner], &node.progress[owner]);
            if search.visit(turn, slot, is_over) {
                break;
            }
        }
        search
    }
    fn lock_home(&mut self, slot: usize) -> bool {
        take(&mut self.node.slots[slot].home_lock)
    }
    fn unlock_home(&mut self, slot: usize) {
        self.node.slots[slot].home_lock = 0;
    }
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
        (self.meanwhile.on_emit)(self.node);
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
        let meanwhile = Meanwhile { on_lock, on_emit, ..UNDISTURBED };
        raced(&mut self.node, &self.job, request, meanwhile, is_lock_free)
    }
}

/// A request of a job during which something else happens; `None` where it is dropped.
fn raced(
    node: &mut OwnedNode,
    job: &TestJob,
    request: &Request,
    meanwhile: Meanwhile<'_>,
    is_lock_free: bool,
) -> Option<(Answer, Vec<u32>)> {
    let payload = lanes_of(job.world, request.worker, request.seq, LANES);
    let datagram = job.datagram(request, &payload);
    let arrival = Arrival {
        source: job.address(request.worker),
        congested: false,
        payload_bytes: u32::from(LANES) * 4,
        port: 0,
    };
    let mut machine = Racing {
        node,
        header: *Header::of(&datagram).unwrap(),
        payload: datagram[HEADER_BYTES..].to_vec(),
        meanwhile,
        is_lock_free,
    };
    match aggregate::handle(&mut machine, arrival) {
        Outcome::Drop(_) => None,
        Outcome::Answer { payload } => {
            let lanes = [machine.header.as_bytes(), &machine.payload[..]].concat();
            let lanes = if payload { payload_of(&lanes) } else { Vec::new() };
            Some((Answer::decode(&machine.header).unwrap(), lanes))
        }
        Outcome::Up(_) | Outcome::Down(_) => unreachable!("a machine without levels"),
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

/// Two jobs of two ranks on a node whose first slots are their own, and the others a pool.
fn sharing(pool: u32, k: u8) -> ([TestJob; 2], OwnedNode) {
    let shared = TestJob { k, ..TestJob::new(2, 64, LANES) };
    let jobs = [shared, TestJob { number: 1, generation: 0x00BE_AD00, first_slot: 1, ..shared }];
    let mut node = OwnedNode::new(2, 2 + pool as usize, usize::from(LANES) / 32);
    node.node.pool = Pool { first: 2, slots: pool };
    jobs.iter().for_each(|job| node.install(job));
    (jobs, node)
}

fn search_of(job: &TestJob, pool: Pool, seq: u32) -> Search {
    let quarry = Quarry { job: job.number, generation: job.generation, seq: Seq(seq), own: job.first_slot };
    Search::new(pool, quarry)
}

/// The slots that hold a chunk.
fn holding(node: &OwnedNode, job: &TestJob, seq: u32) -> Vec<usize> {
    let holds = |slot: &Slot| slot.holds(job.generation, Seq(seq)) && slot.job() == job.number;
    node.slots.iter().enumerate().filter(|(_, slot)| holds(slot)).map(|(index, _)| index).collect()
}

fn is_unlocked(node: &OwnedNode) -> bool {
    node.slots.iter().all(|slot| slot.lock == 0 && slot.home_lock == 0)
}

/// F18: another CPU brings the other rank's contribution to the same chunk, at whatever moment between the look and the
/// claim. One of them claims, and the other's comes to the same slot.
#[test]
fn f18_two_cpus_with_the_same_chunk_use_one_slot() {
    for moment in 0..=u64::from(TURNS) {
        let ([job, _], mut node) = sharing(8, K_MAX);
        let other = job.data(1, Seq(3), sum_of(LANES));
        let contribute = |node: &mut OwnedNode| raced(node, &job, &other, UNDISTURBED, true);
        let answers = RefCell::new(Vec::new());
        let come_between = |node: &mut OwnedNode, now: u64| {
            // Once: the answer's wish is searched for as well.
            if now == moment && answers.borrow().is_empty() {
                let answer = contribute(node);
                answers.borrow_mut().push(answer);
            }
        };
        let look = |node: &mut OwnedNode, turn: u64| come_between(node, turn);
        let lock = |node: &mut OwnedNode| come_between(node, TURNS.into());
        let meanwhile = Meanwhile { on_look: &look, on_lock: &lock, ..UNDISTURBED };
        let first = raced(&mut node, &job, &job.data(0, Seq(3), sum_of(LANES)), meanwhile, true);
        assert_eq!(first.map(|(answer, _)| answer.status), Some(Status::Ok), "{moment}");
        assert_eq!(*answers.borrow(), [None], "{moment}: it had to wait for the chunk's lock");
        assert_eq!((node.counters.refused(Refusal::LockBusy), is_unlocked(&node)), (1, true));
        let (answer, lanes) = contribute(&mut node).unwrap();
        assert_eq!(answer.status, Status::Ok);
        let sums = lanes_of(2, 0, Seq(3), LANES).into_iter().zip(lanes_of(2, 1, Seq(3), LANES));
        assert_eq!(lanes, sums.map(|(a, b)| a + b).collect::<Vec<_>>());
        assert_eq!(holding(&node, &job, 3).len(), 1, "{moment}");
    }
}

/// F18: another CPU claims the very slot for another chunk, with another home, between look and lock.
#[test]
fn f18_two_cpus_with_different_chunks_do_not_share_a_slot() {
    let ([job, rival], mut node) = sharing(4, K_MAX);
    let pool = node.node.pool;
    let home = |job: &TestJob, seq| search_of(job, pool, seq).home();
    // Chunk 0 goes elsewhere, so that nobody's own slot is used.
    for (number, slot) in [(40, 2), (41, 3), (42, 4)] {
        node.slots[slot].claim(rival.number, rival.generation, Seq(number));
    }
    let seq = 7;
    let other = (8..40).find(|other| home(&rival, *other) != home(&job, seq)).unwrap();
    let theirs = rival.data(0, Seq(other), sum_of(LANES));
    let taken = std::cell::Cell::new(false);
    let claim = |node: &mut OwnedNode| {
        if !taken.replace(true) {
            let answer = raced(node, &rival, &theirs, UNDISTURBED, true);
            assert_eq!(answer.map(|(answer, _)| answer.status), Some(Status::Ok));
        }
    };
    let meanwhile = Meanwhile { on_lock: &claim, ..UNDISTURBED };
    let request = job.data(0, Seq(seq), sum_of(LANES));
    let (answer, _) = raced(&mut node, &job, &request, meanwhile, true).unwrap();
    assert_eq!((answer.status, node.counters.refused(Refusal::Crowded)), (Status::Busy, 1));
    assert_eq!((holding(&node, &rival, other), holding(&node, &job, seq)), (vec![5], vec![]));
    assert!(is_unlocked(&node));
    assert_eq!(node.progress[0].crowded(job.generation), 1);
}

/// The slot is found, and goes to another chunk before it is locked, since every rank has acknowledged this one meanwhile.
#[test]
fn f18_a_chunk_that_is_over_before_the_lock_gets_no_new_slot() {
    let ([job, _], mut node) = sharing(1, 1);
    let ask = |node: &mut OwnedNode, request: &Request| {
        let meanwhile = UNDISTURBED;
        raced(node, &job, request, meanwhile, true).unwrap().0.status
    };
    // Chunk 0 in the pool's only slot; chunk 1 waits for it.
    for rank in 0..2 {
        assert_eq!(ask(&mut node, &job.data(rank, Seq(0), sum_of(LANES))), Status::Ok);
    }
    assert_eq!(holding(&node, &job, 0), [2]);
    let next = |node: &mut OwnedNode| {
        // Home and lock are the same word here for all, so the other CPU's claim is done by hand.
        for rank in 0..2 {
            node.progress[0].record(job.generation, rank, Seq(1), Seq(1), 64);
        }
        let members = Members { generation: job.generation, expected: 0b11, world: 2 };
        node.progress[0].recompute(members);
        node.slots[2].claim(job.number, job.generation, Seq(1));
    };
    let meanwhile = Meanwhile { on_lock: &next, ..UNDISTURBED };
    let late = raced(&mut node, &job, &job.data(1, Seq(0), sum_of(LANES)), meanwhile, true);
    assert_eq!(late.map(|(answer, _)| answer.status), Some(Status::Stale));
    assert_eq!((holding(&node, &job, 0), holding(&node, &job, 1)), (vec![], vec![2]));
    assert!(is_unlocked(&node));
}

/// F11: the generation ends between the look and the lock. Nothing is claimed for it.
#[test]
fn f11_a_generation_that_ends_before_the_claim_claims_nothing() {
    let ([job, _], mut node) = sharing(4, K_MAX);
    let end = |node: &mut OwnedNode| node.jobs[0].generation += 1;
    let meanwhile = Meanwhile { on_lock: &end, ..UNDISTURBED };
    let late = raced(&mut node, &job, &job.data(1, Seq(5), sum_of(LANES)), meanwhile, true);
    assert_eq!(late.map(|(answer, _)| answer.status), Some(Status::Rejoin));
    assert!(node.slots.iter().all(|slot| slot.generation == 0) && is_unlocked(&node));
}

/// Whichever lock stays taken, the packet is dropped and both locks are as before.
#[test]
fn a_lock_of_the_pool_that_stays_taken_drops_the_packet() {
    let ([job, _], mut node) = sharing(4, K_MAX);
    let request = job.data(0, Seq(1), sum_of(LANES));
    assert_eq!(raced(&mut node, &job, &request, UNDISTURBED, false), None);
    assert!(is_unlocked(&node));
    let home = search_of(&job, node.node.pool, 1).home() as usize;
    node.slots[home].home_lock = 1;
    assert_eq!(raced(&mut node, &job, &request, UNDISTURBED, true), None);
    assert_eq!((node.slots[home].home_lock, node.counters.refused(Refusal::LockBusy)), (1, 2));
    assert_eq!(holding(&node, &job, 1), []);
}
