//! Two CPUs in the same slots at once. A test run executes on the CPU that asks for it, so two pinned threads are two
//! packets of one slot on two receive queues.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use paatp_common::counter::Event;
use paatp_common::pool::{K_MAX, Pool};
use paatp_common::wire::{
    Answer, Body, Chunk, ElementType, HEADER_BYTES, Header, Operation, Request, Status,
};
use paatp_common::{Refusal, Seq, tag};
use paatp_tests::testrun::support::node::{OwnedNode, Verdict};
use paatp_tests::testrun::support::requests::{TestJob, lanes_of, payload_of, sum_of, tag_of};
use paatp_tests::testrun::{Flavour, Loaded};
use paatp_tests::{require_bpf, skip};

/// Chunks of one test.
const CHUNKS: u32 = 1024;
const WORLD: u8 = 4;

/// The first two CPUs that this process may use.
fn two_cpus(name: &str) -> Option<[usize; 2]> {
    let allowed = sched_getaffinity(Pid::from_raw(0)).unwrap();
    let mut cpus = (0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu).unwrap_or(false));
    let pair = cpus.next().zip(cpus.next()).map(|(a, b)| [a, b]);
    if pair.is_none() {
        skip(name, "there is only one CPU");
    }
    pair
}

fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu).unwrap();
    sched_setaffinity(Pid::from_raw(0), &set).unwrap();
}

/// Lets two threads begin each round together, until one of them fails.
#[derive(Default)]
struct Rounds {
    arrivals: AtomicUsize,
    is_over: AtomicBool,
}

impl Rounds {
    fn meet(&self, round: u32) {
        self.arrivals.fetch_add(1, Ordering::SeqCst);
        while self.arrivals.load(Ordering::SeqCst) < 2 * (round as usize + 1) {
            assert!(!self.is_over.load(Ordering::SeqCst), "the other side failed");
            // The two have a CPU each; where they have not, the other one must get on.
            thread::yield_now();
        }
    }
}

/// Ends the rounds when its thread panics.
struct EndOnPanic<'a>(&'a Rounds);

impl Drop for EndOnPanic<'_> {
    fn drop(&mut self) {
        self.0.is_over.store(thread::panicking(), Ordering::SeqCst);
    }
}

/// A loaded program for a job whose ring holds all chunks.
struct Arena {
    job: TestJob,
    loaded: Loaded,
    chunk: Chunk,
}

/// What the two threads saw.
#[derive(Default)]
struct Seen {
    sent: u64,
    lock_busy: u64,
}

impl Arena {
    fn new(operation: Operation) -> Arena {
        let flavour = Flavour::Standard;
        let lanes = flavour.lanes();
        let job = TestJob::new(WORLD, CHUNKS, lanes);
        let loaded = Loaded::like(flavour, &OwnedNode::of(&job)).unwrap();
        let chunk = match operation {
            Operation::Sum => sum_of(lanes),
            other => Chunk::new(other, ElementType::I32, lanes, 0),
        };
        Arena { job, loaded, chunk }
    }

    fn payload(&self, rank: u8, seq: u32) -> Vec<u32> {
        lanes_of(WORLD, rank, Seq(seq), self.chunk.lanes)
    }

    /// What must come of a chunk.
    fn result(&self, seq: u32) -> Vec<u32> {
        let mut total = self.payload(0, seq);
        for rank in 1..WORLD {
            for (total, lane) in total.iter_mut().zip(self.payload(rank, seq)) {
                *total = match self.chunk.operation() {
                    Some(Operation::Max) => lane.max(*total),
                    _ => lane + *total,
                };
            }
        }
        total
    }

    /// Sends until the slot's lock was to be had; returns the answer.
    fn send(&self, frame: &[u8], seen: &mut Seen) -> (Answer, Vec<u32>) {
        loop {
            let run = self.loaded.run(frame).unwrap();
            seen.sent += 1;
            match run.verdict {
                Verdict::Transmit => {
                    let datagram = &run.frame[self.job.envelope(0).datagram()..];
                    return (Answer::decode(Header::of(datagram).unwrap()).unwrap(), payload_of(datagram));
                }
                // The holder's virtual CPU was taken away; its sender repeats it.
                Verdict::Drop => seen.lock_busy += 1,
                Verdict::Pass => panic!("passed on"),
            }
        }
    }

    fn contribution(&self, rank: u8, seq: u32) -> Vec<u8> {
        self.job.frame(&self.job.data(rank, Seq(seq), self.chunk), &self.payload(rank, seq))
    }

    /// Both threads run `play` for each chunk, beginning each together.
    fn fight(&self, cpus: [usize; 2], play: impl Fn(usize, u32, &mut Seen) + Sync) -> Seen {
        // One fight at a time: four threads on two CPUs meet less often than two.
        static CPUS: Mutex<()> = Mutex::new(());
        let _cpus = CPUS.lock().unwrap_or_else(PoisonError::into_inner);
        let rounds = Rounds::default();
        let (rounds, play) = (&rounds, &play);
        let seen = thread::scope(|scope| {
            let threads = [0, 1].map(|side| {
                scope.spawn(move || {
                    let _end = EndOnPanic(rounds);
                    pin(cpus[side]);
                    let mut seen = Seen::default();
                    for seq in 0..CHUNKS {
                        rounds.meet(seq);
                        play(side, seq, &mut seen);
                    }
                    seen
                })
            });
            threads.map(|thread| thread.join().unwrap())
        });
        Seen { sent: seen[0].sent + seen[1].sent, lock_busy: seen[0].lock_busy + seen[1].lock_busy }
    }

    /// Every slot is complete, holds the exact result and its tag, and is unlocked.
    fn check_slots(&self) {
        let (bytes, blocks) = (self.loaded.slots(), Flavour::Standard.slot_bytes());
        for seq in 0..CHUNKS {
            let (slot, lanes) = slot_of(&bytes[seq as usize * blocks..][..blocks]);
            assert_eq!((slot.lock, slot.bits, slot.contributors()), (0, 0b1111, 4), "chunk {seq}");
            assert!(slot.is_complete());
            assert!(lanes == self.result(seq), "chunk {seq} is wrong");
            let salts = (0..WORLD).fold(0, |sum: u64, rank| {
                sum.wrapping_add(tag::salt(self.job.key(rank), Seq(seq), self.chunk))
            });
            assert_eq!(slot.tag.wrapping_sub(salts), tag_of(&lanes), "tag of chunk {seq}");
        }
    }

    fn check_counters(&self, seen: &Seen, duplicates: u64, damaged: u64) {
        let counters = self.loaded.counters().unwrap();
        let chunks = u64::from(CHUNKS);
        let contributions = chunks * u64::from(WORLD);
        assert_eq!(counters.noted(Event::Requests), seen.sent);
        assert_eq!(counters.noted(Event::Contributions), contributions);
        assert_eq!(counters.noted(Event::Duplicates), duplicates);
        assert_eq!(counters.noted(Event::Completions), chunks);
        assert_eq!(counters.refused(Refusal::BadTag), damaged);
        assert_eq!(counters.refused(Refusal::LockBusy), seen.lock_busy);
        let refused: u64 = Refusal::ALL.iter().map(|refusal| counters.refused(*refusal)).sum();
        assert_eq!(refused, damaged + seen.lock_busy, "nothing else was refused");
    }
}

fn slot_of(bytes: &[u8]) -> (paatp_common::slot::Slot, Vec<u32>) {
    let (state, lanes) = bytes.split_at(HEADER_BYTES);
    let words = lanes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap()));
    (bytemuck::pod_read_unaligned(state), words.flat_map(|word| [(word >> 32) as u32, word as u32]).collect())
}

#[test]
fn different_ranks_on_two_cpus_add_up() {
    let name = "kernel_concurrency::different_ranks_on_two_cpus_add_up";
    if !require_bpf(name) {
        return;
    }
    let Some(cpus) = two_cpus(name) else { return };
    for operation in [Operation::Sum, Operation::Max] {
        let arena = Arena::new(operation);
        let seen = arena.fight(cpus, |side, seq, seen| {
            for rank in [side as u8, side as u8 + 2] {
                let (answer, payload) = arena.send(&arena.contribution(rank, seq), seen);
                assert_eq!(answer.status, Status::Ok);
                // Whoever sees a result sees the whole one.
                if let Body::Result { bitmap, .. } = answer.body {
                    assert_eq!(bitmap, 0b1111);
                    assert!(payload == arena.result(seq), "a torn result of chunk {seq}");
                }
            }
        });
        arena.check_slots();
        arena.check_counters(&seen, 0, 0);
    }
}

#[test]
fn the_same_contribution_on_two_cpus_counts_once() {
    const REPEATS: u64 = 3;
    let name = "kernel_concurrency::the_same_contribution_on_two_cpus_counts_once";
    if !require_bpf(name) {
        return;
    }
    let Some(cpus) = two_cpus(name) else { return };
    let arena = Arena::new(Operation::Sum);
    let seen = arena.fight(cpus, |_, seq, seen| {
        for rank in 0..WORLD {
            let frame = arena.contribution(rank, seq);
            for _ in 0..REPEATS {
                assert_eq!(arena.send(&frame, seen).0.status, Status::Ok);
            }
        }
    });
    arena.check_slots();
    let all = 2 * REPEATS * u64::from(CHUNKS) * u64::from(WORLD);
    arena.check_counters(&seen, all - u64::from(CHUNKS) * u64::from(WORLD), 0);
}

/// One CPU adds damaged payloads and takes them back while the other adds good ones.
#[test]
fn what_one_cpu_undoes_does_not_touch_what_another_adds() {
    let name = "kernel_concurrency::what_one_cpu_undoes_does_not_touch_what_another_adds";
    if !require_bpf(name) {
        return;
    }
    let Some(cpus) = two_cpus(name) else { return };
    let arena = Arena::new(Operation::Sum);
    let seen = arena.fight(cpus, |side, seq, seen| {
        let own = [[0, 1], [2, 3]][side];
        for rank in own {
            if side == 1 {
                let mut damaged = arena.contribution(rank, seq);
                *damaged.last_mut().unwrap() ^= 4;
                assert_eq!(arena.send(&damaged, seen).0.status, Status::BadTag);
            }
            assert_eq!(arena.send(&arena.contribution(rank, seq), seen).0.status, Status::Ok);
        }
    });
    arena.check_slots();
    arena.check_counters(&seen, 0, 2 * u64::from(CHUNKS));
}

/// One CPU completes chunks while the other pulls them: a result is whole or not there.
#[test]
fn results_are_whole_or_not_there() {
    let name = "kernel_concurrency::results_are_whole_or_not_there";
    if !require_bpf(name) {
        return;
    }
    let Some(cpus) = two_cpus(name) else { return };
    let arena = Arena::new(Operation::Sum);
    let room = vec![0; arena.chunk.lanes as usize];
    let pulls = std::sync::atomic::AtomicU64::new(0);
    let seen = arena.fight(cpus, |side, seq, seen| {
        if side == 0 {
            for rank in 0..WORLD {
                arena.send(&arena.contribution(rank, seq), seen);
            }
            return;
        }
        let pull = arena.job.frame(&arena.job.pull(1, Seq(seq), arena.chunk), &room);
        loop {
            pulls.fetch_add(1, Ordering::Relaxed);
            let (answer, payload) = arena.send(&pull, seen);
            match answer.body {
                Body::Result { bitmap, .. } => {
                    assert_eq!(bitmap, 0b1111);
                    assert!(payload == arena.result(seq), "a torn result of chunk {seq}");
                    return;
                }
                Body::Pending { .. } => assert!(payload.is_empty()),
            }
        }
    });
    arena.check_slots();
    arena.check_counters(&seen, 0, 0);
    assert_eq!(arena.loaded.counters().unwrap().noted(Event::Pulls), pulls.into_inner());
}

/// Two CPUs bring two chunks of a job in opposite order into a pool with room for no more: they meet at a chunk's home, and
/// at slots that both chunks may take. Each chunk has one slot, and its sum is whole.
#[test]
fn two_cpus_claim_slots_of_a_pool() {
    let name = "kernel_concurrency::two_cpus_claim_slots_of_a_pool";
    if !require_bpf(name) {
        return;
    }
    let Some(cpus) = two_cpus(name) else { return };
    let flavour = Flavour::Standard;
    let job = TestJob { k: K_MAX, ..TestJob::new(WORLD, 64, flavour.lanes()) };
    // The job's own slot, and the two chunks of one round beside those of the round before.
    let mut node = OwnedNode::new(1, 5, flavour.blocks());
    node.node.pool = Pool { first: 1, slots: 4 };
    node.install(&job);
    let loaded = Loaded::like(flavour, &node).unwrap();
    let arena = Arena { job, loaded, chunk: sum_of(flavour.lanes()) };
    let results = std::sync::atomic::AtomicU64::new(0);
    let seen = arena.fight(cpus, |side, round, seen| {
        for chunk in [side as u32, 1 - side as u32] {
            let seq = 2 * round + chunk;
            for rank in [side as u8, side as u8 + 2] {
                let request = Request { ack: Seq(2 * round), ..arena.job.data(rank, Seq(seq), arena.chunk) };
                let frame = arena.job.frame(&request, &arena.payload(rank, seq));
                // BUSY where the other CPU's chunk was faster, or not every rank has told its acknowledgement.
                let (answer, payload) = loop {
                    let reply = arena.send(&frame, seen);
                    if reply.0.status != Status::Busy {
                        break reply;
                    }
                    // A rank whose contribution must wait tells its acknowledgement all the same.
                    for rank in [side as u8, side as u8 + 2] {
                        let pull = Request {
                            ack: Seq(2 * round),
                            ..arena.job.pull(rank, Seq(seq), Chunk::default())
                        };
                        arena.send(&arena.job.frame(&pull, &[]), seen);
                    }
                };
                assert_eq!(answer.status, Status::Ok);
                if let Body::Result { bitmap, .. } = answer.body {
                    assert!(bitmap == 0b1111 && payload == arena.result(seq), "chunk {seq} is wrong");
                    results.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    });
    let (counters, chunks) = (arena.loaded.counters().unwrap(), 2 * u64::from(CHUNKS));
    assert_eq!(counters.noted(Event::Completions), chunks);
    assert_eq!(counters.noted(Event::Contributions), chunks * u64::from(WORLD));
    assert!(results.into_inner() >= chunks, "whoever completes a chunk sees its result");
    assert_eq!(counters.refused(Refusal::LockBusy), seen.lock_busy);
    let bytes = arena.loaded.slots();
    for slot in bytes.chunks_exact(flavour.slot_bytes()) {
        let (slot, _) = slot_of(slot);
        assert_eq!((slot.lock, slot.home_lock), (0, 0));
    }
}
