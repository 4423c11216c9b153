//! The loaded program against the same code in ordinary memory: the same frames, one after the other, and after each
//! the same verdict, the same frame, the same slots and the same progress.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use paatp_common::counter::Event;
use paatp_common::pool::{K_MAX, Pool};
use paatp_common::wire::{Answer, Body, Chunk, ElementType, Header, Kind, Operation, Request, Status, flags};
use paatp_common::{Refusal, Seq};
use paatp_tests::require_bpf;
use paatp_tests::testrun::support::corpus;
use paatp_tests::testrun::support::node::{OwnedNode, Verdict};
use paatp_tests::testrun::support::packet::{Envelope, PORT, PORTS, Random};
use paatp_tests::testrun::support::replay::node_at_work;
use paatp_tests::testrun::support::requests::{TestJob, edit, lanes_of};
use paatp_tests::testrun::{Flavour, Loaded};

const STEPS: usize = 3000;

/// How far a rank is.
#[derive(Clone, Copy, Default)]
struct Rank {
    ack: Seq,
    progress: Seq,
}

/// Random traffic of two jobs.
struct Traffic {
    random: Random,
    jobs: [TestJob; 2],
    ranks: [[Rank; 4]; 2],
    history: Vec<Vec<u8>>,
}

impl Traffic {
    /// With rings, or with a slot of its own for each job and a pool that is too small for both.
    fn new(seed: u64, flavour: Flavour, is_shared: bool) -> Traffic {
        let mut v4 = TestJob::new(3, 4, flavour.lanes());
        let mut v6 = TestJob { number: 1, first_slot: 4, v6: true, quorum: 2, slots: 2, ..v4 };
        if is_shared {
            (v4.k, v4.slots) = (K_MAX, 8);
            (v6.k, v6.slots, v6.first_slot) = (2, 8, 1);
        }
        Traffic { random: Random(seed), jobs: [v4, v6], ranks: Default::default(), history: Vec::new() }
    }

    /// A node with the jobs, the second one near the wrap of its sequence.
    fn node(&mut self, flavour: Flavour) -> OwnedNode {
        let mut node = OwnedNode::new(2, 6, flavour.blocks());
        node.levels = flavour.has_levels();
        node.node.pool = Pool { first: 2, slots: 4 };
        for job in &self.jobs {
            node.install(job);
        }
        let start = Seq(u32::MAX - 5);
        node.start_at(&self.jobs[1], start);
        self.ranks[1] = [Rank { ack: start, progress: start }; 4];
        node
    }

    /// What all ranks do at a chunk.
    fn chunk(&self, job: &TestJob, seq: Seq) -> Chunk {
        let (operation, lanes) = match seq.0 % 6 {
            0 | 1 => (Operation::Sum, job.lanes),
            2 => (Operation::Max, job.lanes),
            3 => (Operation::Barrier, 0),
            4 => (Operation::Broadcast, 64),
            _ => (Operation::Mean, 32),
        };
        Chunk {
            root: (operation == Operation::Broadcast).into(),
            ..Chunk::new(operation, ElementType::F32, lanes, 2)
        }
    }

    fn next(&mut self) -> Vec<u8> {
        match self.random.below(100) {
            0..3 => {
                let length = 14 + self.random.below(400) as usize;
                self.random.bytes(length)
            }
            3..10 if !self.history.is_empty() => self.old(),
            10..18 if !self.history.is_empty() => self.spoilt(),
            _ => {
                let frame = self.request();
                self.history.push(frame.clone());
                frame
            }
        }
    }

    fn old(&mut self) -> Vec<u8> {
        let which = self.random.below(self.history.len() as u64);
        self.history[which as usize].clone()
    }

    /// An old frame in which some bytes are wrong.
    fn spoilt(&mut self) -> Vec<u8> {
        let mut frame = self.old();
        for _ in 0..1 + self.random.below(3) {
            // Mostly in the headers.
            let reach = if self.random.chance(80) { 140.min(frame.len()) } else { frame.len() };
            let at = self.random.below(reach as u64) as usize;
            frame[at] ^= 1 << self.random.below(8);
        }
        if self.random.chance(20) {
            let length = self.random.below(frame.len() as u64) as usize;
            frame.truncate(length.max(14));
        }
        frame
    }

    fn envelope(&mut self, job: &TestJob, rank: u8) -> Envelope {
        let mut envelope = job.envelope(rank);
        let tags = [0x8100, 0x88A8, 0x8100];
        envelope.tags = tags[..[0, 0, 0, 1, 2, 3][self.random.below(6) as usize].min(3)].to_vec();
        envelope.ecn = self.random.below(4) as u8;
        envelope.port = PORT + self.random.below(PORTS.into()) as u16;
        envelope
    }

    fn request(&mut self) -> Vec<u8> {
        let number = self.random.below(2) as usize;
        let job = self.jobs[number];
        let rank = self.random.below(job.world.into()) as u8;
        let at = self.ranks[number][rank as usize];
        let is_pull = self.random.chance(25);
        let steps = self.random.below(u64::from(job.slots) + 2) as u32;
        let seq = if self.random.chance(85) { at.ack.plus(steps) } else { at.ack.minus(steps) };
        let want = at.ack.plus(self.random.below(3) as u32 / 2);
        let mut chunk = self.chunk(&job, if is_pull { want } else { seq });
        if self.random.chance(3) {
            chunk.exponent += 1;
        }
        if self.random.chance(2) {
            chunk.operation_and_type = self.random.number() as u8;
        }
        let is_bare = chunk.operation() == Some(Operation::Broadcast) && rank != chunk.root && !is_pull;
        let lanes = if is_bare && self.random.chance(90) { 0 } else { chunk.lanes };
        let attempt = [0, 0, 0, 0, 1, 1, 2, 3][self.random.below(8) as usize];
        let request = Request {
            kind: if is_pull { Kind::Pull } else { Kind::Data },
            flags: if self.random.chance(3) { flags::NON_FINITE } else { 0 },
            want,
            ack: at.ack,
            progress: at.progress,
            token: self.random.number() as u32,
            bitmap: if is_pull { 0 } else { 1 << rank },
            next_exponent: self.random.number() as i8,
            attempt,
            ..job.data(rank, seq, chunk)
        };
        let mut datagram = job.datagram(&request, &lanes_of(job.world, rank, seq, lanes));
        if self.random.chance(5) {
            *datagram.last_mut().unwrap() ^= 0x20;
        }
        if self.random.chance(4) {
            self.twist(&mut datagram);
        }
        let envelope = self.envelope(&job, rank);
        envelope.wrap(&datagram)
    }

    /// A field of the header that is wrong although the check is right.
    fn twist(&mut self, datagram: &mut [u8]) {
        let value = self.random.number();
        let which = self.random.below(10);
        edit(datagram, |header| match which {
            0 => header.set_job(value as u16),
            1 => header.set_generation(value as u32),
            2 => header.set_worker(value as u8),
            3 => header.set_raw_seq(value as u32),
            4 => header.set_raw_ack(value as u32),
            5 => header.set_raw_progress(value as u32),
            6 => header.set_bitmap(value),
            7 => header.set_lanes(value as u16),
            8 => header.set_raw_want(value as u32),
            _ => header.set_flags(value as u8),
        });
    }

    /// What the rank learns from an answer.
    fn learn(&mut self, frame: &[u8]) {
        for offset in [42, 46, 50, 62, 66, 70] {
            let Some(header) = frame.get(offset..).and_then(Header::of) else { continue };
            let Ok(answer) = Answer::decode(header) else { continue };
            let Some(ranks) = self.ranks.get_mut(answer.job as usize) else { continue };
            let Some(rank) = ranks.get_mut(answer.worker as usize) else { continue };
            if answer.status == Status::Ok && answer.seq == rank.progress {
                rank.progress = rank.progress.plus(1);
            }
            if let Body::Result { want, .. } = answer.body
                && want == rank.ack
            {
                rank.ack = rank.ack.plus(1);
                rank.progress = rank.progress.later(rank.ack);
            }
        }
    }

    /// Sometimes a rank dies, or a job begins anew.
    fn disrupt(&mut self, node: &mut OwnedNode, loaded: &mut Loaded) {
        let number = self.random.below(2) as usize;
        if self.random.chance(50) {
            let rank = self.random.below(self.jobs[number].world.into());
            if node.jobs[number].expected.count_ones() > 1 {
                node.jobs[number].expected &= !(1 << rank);
            }
            loaded.set_job(number as u16, node.jobs[number]).unwrap();
        } else {
            self.jobs[number].generation += 1;
            self.ranks[number] = Default::default();
            node.install(&self.jobs[number]);
            loaded.install(&self.jobs[number]).unwrap();
        }
    }
}

/// One frame through both.
fn both(node: &mut OwnedNode, loaded: &mut Loaded, frame: &[u8], what: &str) -> Vec<u8> {
    let mut expected = frame.to_vec();
    let verdict = node.frame(&mut expected);
    let run = loaded.run(frame).unwrap();
    assert_eq!(run.verdict, verdict, "{what}: {frame:02x?}");
    if verdict != Verdict::Drop {
        assert!(
            run.frame == expected,
            "{what}: {frame:02x?}\nkernel {:02x?}\nmemory {expected:02x?}",
            run.frame
        );
    }
    assert!(loaded.slots() == node.slot_bytes(), "{what}: slots differ after {frame:02x?}");
    for job in 0..node.jobs.len() as u16 {
        assert_eq!(loaded.progress(job).unwrap(), node.progress_words(job), "{what}: {frame:02x?}");
    }
    expected
}

/// Takes the program along from seed to seed: loading it takes longer than the test.
fn play(seed: u64, flavour: Flavour, is_shared: bool, loaded: &mut Option<Loaded>) {
    let mut traffic = Traffic::new(seed, flavour, is_shared);
    let mut node = traffic.node(flavour);
    let loaded = loaded.get_or_insert_with(|| Loaded::like(flavour, &node).unwrap());
    loaded.become_like(&node).unwrap();
    node.counters = loaded.counters().unwrap();
    for step in 0..STEPS {
        let frame = traffic.next();
        let what = format!("seed {seed}, {flavour:?}, shared {is_shared}, step {step}");
        let answer = both(&mut node, loaded, &frame, &what);
        traffic.learn(&answer);
        if traffic.random.below(400) == 0 {
            traffic.disrupt(&mut node, loaded);
        }
    }
    assert_eq!(loaded.counters().unwrap(), node.counters);
}

#[test]
fn random_traffic_has_the_same_effect_in_the_kernel() {
    if !require_bpf("kernel_vectors::random_traffic_has_the_same_effect_in_the_kernel") {
        return;
    }
    for flavour in Flavour::ALL {
        let mut loaded = None;
        for seed in 1..=3 {
            play(seed, flavour, false, &mut loaded);
            play(seed, flavour, true, &mut loaded);
        }
        let counters = loaded.unwrap().counters().unwrap();
        let events =
            [Event::Stores, Event::Adds, Event::Duplicates, Event::Completions, Event::Results, Event::Redos];
        for event in events {
            assert!(counters.noted(event) > 50, "{}: {}", event.name(), counters.noted(event));
        }
        assert!(counters.refused(Refusal::BadTag) > 50 && counters.refused(Refusal::Crowded) > 50);
    }
}

/// What the fuzzer's corpus does to a node in memory it does to the kernel.
#[test]
fn the_corpus_has_the_same_effect_in_the_kernel() {
    if !require_bpf("kernel_vectors::the_corpus_has_the_same_effect_in_the_kernel") {
        return;
    }
    for flavour in Flavour::ALL {
        let at_work = || OwnedNode { levels: flavour.has_levels(), ..node_at_work(flavour.blocks()) };
        let mut loaded = Loaded::like(flavour, &at_work()).unwrap();
        for (name, frame) in corpus::frames() {
            // Test runs need an Ethernet header.
            if frame.len() >= 14 {
                let mut node = at_work();
                loaded.become_like(&node).unwrap();
                both(&mut node, &mut loaded, &frame, &name);
            }
        }
    }
}
