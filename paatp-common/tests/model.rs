//! The aggregation path against a reference model, under random traffic: orders, duplicates, losses, stale and far
//! sequence numbers, damage, redos, dead ranks and new generations, near the beginning of the sequence and at its wrap.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

mod reference;
mod support;

use std::collections::{BTreeMap, BTreeSet};

use paatp_common::counter::{Counters, Event};
use paatp_common::policy::Mode;
use paatp_common::pool::{K_MAX, Pool, Quarry, Search};
use paatp_common::wire::{Answer, Body, Chunk, ElementType, Header, Kind, Operation, Request, Status};
use paatp_common::{Refusal, Seq};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use reference::{Packet, Reference, Shared};
use support::node::OwnedNode;
use support::requests::{TestJob, lanes_of, payload_of};

const LANES: u16 = 64;

/// What happens next.
#[derive(Clone, Debug)]
enum Step {
    /// A rank contributes to a chunk near its progress and asks for one near its acknowledgement.
    Contribute { rank: u8, ahead: i8, want: u8, attempt: u8, damaged: bool, lost: bool },
    /// A rank asks for a result.
    Pull { rank: u8, want: u8, damaged: bool, lost: bool },
    /// An old request comes again, whatever has happened since.
    Replay { which: u16 },
    /// A sequence number from anywhere.
    Wild { rank: u8, seq: u32 },
    /// An acknowledgement from anywhere.
    WildAck { rank: u8, steps: u32 },
    /// A rank takes another operation for the right one.
    Disagree { rank: u8, ahead: i8 },
    /// A rank dies.
    Shrink { rank: u8 },
    /// The job begins anew.
    Restart,
    /// Another quorum is asked for.
    Flip { quorum: u8 },
    /// The other job contributes to a chunk that is so far ahead of its oldest, whose result it has or has not.
    Neighbour { ahead: u8, has_it: bool },
    /// So many places of the pool may be claimed from now on.
    Tune { k: u8 },
}

fn step() -> impl Strategy<Value = Step> {
    let rare = |percent: u32| prop::bool::weighted(f64::from(percent) / 100.0);
    let rank = 0..4u8;
    prop_oneof![
        60 => (rank.clone(), -3..4i8, 0..3u8, prop_oneof![12 => Just(0u8), 2 => Just(1u8), 1 => Just(2u8)], rare(6), rare(20))
            .prop_map(|(rank, ahead, want, attempt, damaged, lost)| Step::Contribute { rank, ahead, want, attempt, damaged, lost }),
        25 => (rank.clone(), 0..3u8, rare(6), rare(20)).prop_map(|(rank, want, damaged, lost)| Step::Pull { rank, want, damaged, lost }),
        12 => any::<u16>().prop_map(|which| Step::Replay { which }),
        3 => (rank.clone(), any::<u32>()).prop_map(|(rank, seq)| Step::Wild { rank, seq }),
        1 => (rank.clone(), prop_oneof![0..20u32, any::<u32>()]).prop_map(|(rank, steps)| Step::WildAck { rank, steps }),
        2 => (rank.clone(), -1..2i8).prop_map(|(rank, ahead)| Step::Disagree { rank, ahead }),
        1 => rank.prop_map(|rank| Step::Shrink { rank }),
        1 => Just(Step::Restart),
        3 => (0..=3u8).prop_map(|quorum| Step::Flip { quorum }),
        12 => (0..9u8, rare(50)).prop_map(|(ahead, has_it)| Step::Neighbour { ahead, has_it }),
        1 => (1..=K_MAX).prop_map(|k| Step::Tune { k }),
    ]
}

/// The operation that every rank issues for a chunk.
fn chunk_of(seq: Seq) -> Chunk {
    let (operation, lanes) = match seq.0 % 7 {
        0 | 1 | 4 => (Operation::Sum, LANES),
        2 => (Operation::Max, LANES),
        3 => (Operation::Barrier, 0),
        5 => (Operation::Broadcast, LANES),
        _ => (Operation::Mean, LANES / 2),
    };
    Chunk {
        root: (operation == Operation::Broadcast) as u8,
        ..Chunk::new(operation, ElementType::F32, lanes, -3)
    }
}

/// One rank, as far as it matters here.
#[derive(Clone, Debug, Default)]
struct Worker {
    ack: u64,
    progress: u64,
    attempts: BTreeMap<u64, u8>,
}

struct World {
    job: TestJob,
    node: OwnedNode,
    model: Reference,
    workers: Vec<Worker>,
    history: Vec<Packet>,
    /// Results that ranks have received, by position: all ranks must see the same.
    delivered: BTreeMap<u64, (BTreeSet<u8>, Vec<u32>)>,
    /// Ranks that were told that a redo lacks a rank that has died.
    told_of_the_dead: BTreeSet<u8>,
    /// How often that was the answer to a PULL.
    pulls_aborted: u64,
    /// Lies were told of acknowledgements: slots may be reused before everybody is served.
    is_lied_to: bool,
    /// A job of one rank that shares the pool.
    neighbour: Option<(TestJob, Reference)>,
}

/// The places of a chunk, in their order.
fn places(pool: Pool, quarry: Quarry) -> Vec<u64> {
    let search = Search::new(pool, quarry);
    (0..u64::from(K_MAX)).map(|turn| u64::from(search.index(turn))).collect()
}

fn share(job: &TestJob, pool: Pool, model: &mut Reference) {
    let quarry = Quarry { job: job.number, generation: 0, seq: Seq(0), own: job.first_slot };
    let k = usize::from(job.k);
    model.shared = Some(Shared { k, places, pool, job: quarry, taken: BTreeSet::new() });
}

impl World {
    fn new(Shape { world, quorum, slots, start, pool, k }: Shape) -> World {
        let job = TestJob { quorum, k, ..TestJob::new(world, slots, LANES) };
        let mut node = OwnedNode::new(2, (slots.max(2) + pool) as usize, usize::from(LANES) / 32);
        node.node.pool = Pool { first: 2, slots: pool };
        node.install(&job);
        node.start_at(&job, Seq(start));
        let mut model =
            Reference::new(job.generation, world, (quorum > 0).then_some(quorum.into()), slots, Seq(start));
        let neighbour = (k > 0).then(|| {
            let other = TestJob {
                number: 1,
                generation: 0x00BE_AD00,
                first_slot: 1,
                k: 4,
                ..TestJob::new(1, 8, LANES)
            };
            node.install(&other);
            let mut theirs = Reference::new(other.generation, 1, None, 8, Seq(0));
            share(&other, node.node.pool, &mut theirs);
            share(&job, node.node.pool, &mut model);
            (other, theirs)
        });
        let workers = vec![Worker::default(); world as usize];
        World {
            job,
            node,
            model,
            workers,
            history: Vec::new(),
            delivered: BTreeMap::new(),
            told_of_the_dead: BTreeSet::new(),
            pulls_aborted: 0,
            is_lied_to: false,
            neighbour,
        }
    }

    fn wire(&self, position: u64) -> Seq {
        self.model.wire(position)
    }

    fn packet(&self, rank: u8, seq: Seq, want: Seq, pull: bool) -> Packet {
        let worker = &self.workers[rank as usize];
        let chunk = chunk_of(if pull { want } else { seq });
        let has_payload = chunk.lanes > 0
            && (pull || chunk.operation() != Some(Operation::Broadcast) || rank == chunk.root);
        let payload = if !has_payload {
            Vec::new()
        } else if pull {
            vec![7; chunk.lanes as usize]
        } else {
            lanes_of(self.job.world, rank, seq, chunk.lanes)
        };
        Packet {
            rank,
            generation: self.job.generation,
            pull,
            seq,
            want,
            ack: self.wire(worker.ack),
            progress: self.wire(worker.progress),
            attempt: 0,
            chunk,
            next_exponent: (seq.0 as i8).wrapping_mul(31).wrapping_add(rank as i8),
            payload,
            damaged: false,
        }
    }

    /// A contribution at the attempt that the rank knows of.
    fn contribution(&self, rank: u8, position: u64, want: u64) -> Packet {
        let mut packet = self.packet(rank, self.wire(position), self.wire(want), false);
        packet.attempt = self.workers[rank as usize].attempts.get(&position).copied().unwrap_or(0);
        packet
    }

    /// Sends a packet to both, compares everything, and returns the answer.
    fn send(&mut self, packet: &Packet) -> Option<(Answer, Vec<u32>)> {
        let request = Request {
            kind: if packet.pull { Kind::Pull } else { Kind::Data },
            ack: packet.ack,
            progress: packet.progress,
            generation: packet.generation,
            attempt: packet.attempt,
            next_exponent: packet.next_exponent,
            want: packet.want,
            bitmap: if packet.pull { 0 } else { 1 << packet.rank },
            ..self.job.data(packet.rank, packet.seq, packet.chunk)
        };
        let mut datagram = self.job.datagram(&request, &packet.payload);
        if packet.damaged {
            *datagram.last_mut().unwrap() ^= 0x40;
        }
        if let (Some((_, neighbour)), Some(shared)) = (&self.neighbour, &mut self.model.shared) {
            shared.taken = neighbour.occupied();
        }
        let expected = self.model.request(packet);
        if let Some((_, neighbour)) = &mut self.neighbour {
            neighbour.held.retain(|place, _| !self.model.held.contains_key(place));
        }
        self.node.datagram(&mut datagram, self.job.address(packet.rank), false).unwrap();
        let answer = Answer::decode(Header::of(&datagram).unwrap()).unwrap();
        let payload = payload_of(&datagram);
        let reply = match expected {
            Err(_) => {
                assert_eq!((answer.status, datagram.len()), (Status::Rejoin, 64));
                None
            }
            Ok(expected) => {
                self.compare(packet, &expected, &answer, &payload);
                Some((answer, payload))
            }
        };
        self.compare_slots();
        reply
    }

    /// The other job contributes, and its only rank is told of the result at once.
    fn neighbour(&mut self, ahead: u8, has_it: bool) {
        let Some((job, model)) = &mut self.neighbour else { return };
        if let Some(shared) = &mut model.shared {
            shared.taken = self.model.occupied();
        }
        let oldest = model.min_ack();
        let (seq, ack) = (Seq(oldest as u32).plus(ahead.into()), Seq(oldest as u32).plus(has_it.into()));
        let payload = lanes_of(1, 0, seq, LANES);
        let chunk = Chunk::new(Operation::Sum, ElementType::F32, LANES, -3);
        let packet = Packet {
            rank: 0,
            generation: job.generation,
            pull: false,
            seq,
            want: seq,
            ack,
            progress: ack,
            attempt: 0,
            chunk,
            next_exponent: 0,
            payload: payload.clone(),
            damaged: false,
        };
        let expected = model.request(&packet).expect("a member");
        self.model.held.retain(|place, _| !model.held.contains_key(place));
        let request = Request { ack, progress: ack, ..job.data(0, seq, chunk) };
        let reply = self.node.ask(job, &request, &payload).expect("an answer");
        assert_eq!(reply.answer.status, expected.status, "{packet:?}");
        assert_eq!(reply.payload, expected.result.map_or(Vec::new(), |result| result.lanes), "{packet:?}");
        self.compare_slots();
    }

    fn compare(&mut self, packet: &Packet, expected: &reference::Expected, answer: &Answer, payload: &[u32]) {
        let told = (answer.seq, answer.status, answer.p_min, answer.p_max);
        let right = (packet.seq, expected.status, self.wire(expected.p_min), self.wire(expected.p_max));
        assert_eq!(told, right, "{packet:?}");
        let bits = |ranks: &BTreeSet<u8>| ranks.iter().fold(0u64, |bits, rank| bits | 1 << rank);
        match (&expected.result, answer.body) {
            (Some(result), Body::Result { want, bitmap, next_exponent, .. }) => {
                assert_eq!((want, bitmap), (packet.want, bits(&result.ranks)), "{packet:?}");
                assert_eq!((payload, next_exponent), (&*result.lanes, result.next_exponent), "{packet:?}");
                assert_eq!(answer.attempt, result.attempt, "{packet:?}");
                assert_eq!(u64::from(answer.epoch), (result.epoch + 5) % 128, "{packet:?}");
                let position = u64::from(want.since(self.model.start));
                let outcome = (result.ranks.clone(), result.lanes.clone());
                let first = self.delivered.entry(position).or_insert_with(|| outcome.clone());
                assert!(
                    self.is_lied_to || *first == outcome,
                    "ranks were given different results of {position}"
                );
            }
            (None, Body::Pending { min_ack, bitmap, redo, .. }) => {
                assert_eq!((min_ack, payload.len()), (self.wire(expected.min_ack), 0), "{packet:?}");
                match expected.reason {
                    Some(reason) => {
                        assert_eq!(u32::from(answer.attempt), reason.counter(), "{packet:?}");
                        if reason == Refusal::DeadRankInRedo {
                            assert_eq!(bitmap, bits(&self.dead_of(packet)), "{packet:?}");
                            self.told_of_the_dead.insert(packet.rank);
                            self.pulls_aborted += u64::from(packet.pull);
                        }
                    }
                    None => {
                        assert_eq!(bitmap, bits(&expected.ranks), "{packet:?}");
                        assert_eq!(answer.attempt, expected.attempt, "{packet:?}");
                    }
                }
                if let Some(redo) = redo {
                    let chunk = self.model.chunk(redo.seq).expect("a chunk that is held");
                    assert_eq!((chunk.attempt, chunk.complete), (redo.attempt, false), "{redo:?}");
                }
                // Whoever touches an open redo hears of it, or of one that is lower.
                let touched = self.model.chunk(packet.want);
                let position = packet.want.since(self.wire(expected.min_ack));
                let is_open = touched.is_some_and(|chunk| !chunk.complete && chunk.attempt > 0);
                if is_open && u64::from(position) < self.model.ring {
                    let told = redo.expect("an announcement");
                    assert!(told.seq.since(self.wire(expected.min_ack)) <= position, "{told:?} {packet:?}");
                }
            }
            (expected, _) => panic!("{packet:?}: expected {expected:?}, answered {answer:?}"),
        }
    }

    /// Ranks that died and are in the first completion of the chunk that a packet is about.
    fn dead_of(&self, packet: &Packet) -> BTreeSet<u8> {
        let chunk = self.model.chunk(if packet.pull { packet.want } else { packet.seq });
        let frozen = chunk.and_then(|chunk| chunk.frozen.clone()).expect("a redo");
        &frozen - &self.model.expected
    }

    /// Lanes are the sum of the bits, in every slot that the model knows.
    fn compare_slots(&self) {
        for (place, (position, chunk)) in &self.model.held {
            let slot = &self.node.slots[*place as usize];
            assert!(slot.holds(self.job.generation, self.wire(*position)));
            let namesakes = self.node.slots.iter().filter(|s| s.holds(slot.generation, slot.seq));
            assert_eq!(namesakes.count(), 1, "two slots for one chunk");
            assert_eq!((slot.lock, slot.home_lock), (0, 0));
            let bits = chunk.contributions.keys().fold(0, |bits, rank| bits | 1u64 << rank);
            assert_eq!((slot.bits, slot.is_complete()), (bits, chunk.complete));
            assert!(chunk.blank || u64::from(slot.epoch) == (chunk.epoch + 5) % 128);
            if !chunk.contributions.is_empty() {
                assert_eq!(usize::from(slot.quorum()), chunk.quorum.unwrap_or(0));
            }
            assert_eq!(usize::from(slot.contributors()), chunk.contributions.len());
            let lanes = chunk.lanes();
            assert_eq!(slot.has_payload(), !lanes.is_empty());
            assert_eq!(self.node.lanes_of_slot(*place as usize)[..lanes.len()], lanes);
        }
    }

    /// What a rank learns from an answer.
    fn learn(&mut self, packet: &Packet, reply: Option<(Answer, Vec<u32>)>) -> Option<(u64, u8)> {
        let (answer, _) = reply?;
        let start = self.model.start;
        let worker = &mut self.workers[packet.rank as usize];
        let position = u64::from(packet.seq.since(start));
        let is_known = matches!(answer.status, Status::Ok | Status::NotIncluded | Status::Stale);
        if !packet.pull && is_known && position == worker.progress {
            worker.progress += 1;
        }
        if !packet.pull && answer.status == Status::OldAttempt {
            worker.attempts.insert(position, answer.attempt);
        }
        match answer.body {
            Body::Result { want, .. } => {
                if u64::from(want.since(start)) == worker.ack {
                    worker.ack += 1;
                    worker.progress = worker.progress.max(worker.ack);
                }
                None
            }
            Body::Pending { redo, .. } => redo.map(|redo| (u64::from(redo.seq.since(start)), redo.attempt)),
        }
    }

    fn exchange(&mut self, packet: &Packet, lost: bool) -> Option<(u64, u8)> {
        self.history.push(packet.clone());
        let reply = self.send(packet);
        if lost { None } else { self.learn(packet, reply) }
    }

    fn take(&mut self, step: &Step) {
        let world = self.job.world;
        match *step {
            Step::Contribute { rank, ahead, want, attempt, damaged, lost } => {
                let rank = rank % world;
                let worker = &self.workers[rank as usize];
                let position = worker.progress.saturating_add_signed(ahead.into());
                let mut packet = self.contribution(rank, position, worker.ack + u64::from(want));
                packet.attempt += attempt;
                packet.damaged = damaged && !packet.payload.is_empty();
                self.exchange(&packet, lost);
            }
            Step::Pull { rank, want, damaged, lost } => {
                let rank = rank % world;
                let want = self.wire(self.workers[rank as usize].ack + u64::from(want));
                let mut packet = self.packet(rank, want, want, true);
                packet.damaged = damaged && !packet.payload.is_empty();
                self.exchange(&packet, lost);
            }
            Step::Replay { which } => {
                if !self.history.is_empty() {
                    let packet = self.history[which as usize % self.history.len()].clone();
                    self.send(&packet);
                }
            }
            Step::Wild { rank, seq } => {
                // Not into the window: who contributes there means it.
                let seq = Seq(seq);
                let ring = self.model.ring as u32;
                if seq.since(self.wire(self.model.min_ack())) >= ring {
                    let packet = self.packet(rank % world, seq, seq, false);
                    self.send(&packet);
                }
            }
            Step::WildAck { rank, steps } => {
                let rank = rank % world;
                let mut packet = self.packet(rank, self.wire(0), self.wire(0), true);
                packet.ack = packet.ack.plus(steps);
                packet.progress = packet.progress.plus(steps / 2);
                self.is_lied_to |= (1..=self.job.slots).contains(&steps);
                self.send(&packet);
            }
            Step::Disagree { rank, ahead } => {
                let rank = rank % world;
                let position = self.workers[rank as usize].progress.saturating_add_signed(ahead.into());
                let mut packet = self.contribution(rank, position, position);
                if packet.chunk.operation() == Some(Operation::Broadcast) && rank != packet.chunk.root {
                    packet.payload = lanes_of(world, rank, packet.seq, LANES);
                    self.send(&packet);
                    return;
                }
                packet.chunk.exponent += 1;
                // Only against somebody: the first one is right by definition.
                if self.model.chunk(packet.seq).is_some_and(|chunk| !chunk.contributions.is_empty()) {
                    self.send(&packet);
                }
            }
            Step::Neighbour { ahead, has_it } => self.neighbour(ahead, has_it),
            Step::Tune { k } => {
                if let Some(shared) = &mut self.model.shared {
                    shared.k = k.into();
                    (self.job.k, self.node.jobs[0].k) = (k, k);
                }
            }
            Step::Shrink { rank } => self.shrink(rank % world),
            Step::Flip { quorum } => self.flip(quorum.min(world)),
            Step::Restart => {
                self.job.generation += 1;
                self.node.install(&self.job);
                self.model.restart(self.job.generation, world);
                self.workers = vec![Worker::default(); world as usize];
                self.delivered.clear();
                self.told_of_the_dead.clear();
                self.is_lied_to = false;
            }
        }
    }

    fn flip(&mut self, quorum: u8) {
        let policy = self.node.jobs[0].policy;
        let is_over = policy.is_over(self.wire(self.model.min_ack()));
        assert_eq!(is_over, self.model.waiting.is_over(self.model.min_ack()));
        if policy.is_armed() || is_over {
            let now = if is_over { policy.when_over() } else { policy };
            self.node.jobs[0].policy = now.armed(Mode { quorum, ..policy.before() });
            self.model.waiting.ask_for((quorum > 0).then_some(quorum.into()));
        }
    }

    fn shrink(&mut self, rank: u8) {
        if self.model.expected.len() > 1 && self.model.expected.remove(&rank) {
            self.node.jobs[0].expected &= !(1 << rank);
            // The floors are computed anew at the next wish.
            let survivor = *self.model.expected.first().unwrap();
            let want = self.wire(self.workers[survivor as usize].ack);
            let packet = self.packet(survivor, want, want, true);
            self.send(&packet);
        }
    }

    /// From here on nothing is lost: whoever is left gets every result, unless a redo has become impossible.
    fn drain(&mut self) {
        let ranks: Vec<u8> = self.model.expected.iter().copied().collect();
        let target = ranks.iter().map(|rank| self.workers[*rank as usize].progress).max().unwrap();
        for _ in 0..12 * (target + 2) {
            if ranks.iter().all(|rank| self.workers[*rank as usize].ack >= target) {
                return;
            }
            for rank in &ranks {
                let ack = self.workers[*rank as usize].ack;
                let want = self.wire(ack);
                let pull = self.packet(*rank, want, want, true);
                let redo = self.exchange(&pull, false);
                if let Some((position, attempt)) = redo {
                    self.workers[*rank as usize].attempts.insert(position, attempt);
                    let packet = self.contribution(*rank, position, position);
                    self.exchange(&packet, false);
                }
                for position in ack..target.min(ack + self.model.ring) {
                    let packet = self.contribution(*rank, position, position);
                    self.exchange(&packet, false);
                }
            }
        }
        // Whoever still needs a chunk whose redo lacks a rank that has died was told so.
        let mut is_given_up = self.node.counters.refused(Refusal::TooManyAttempts) > 0;
        for (position, _) in self.model.held.values().filter(|(_, chunk)| self.model.is_hopeless(chunk)) {
            for rank in ranks.iter().filter(|rank| self.workers[**rank as usize].ack == *position) {
                assert!(self.told_of_the_dead.contains(rank), "rank {rank} waits for {position}");
            }
        }
        is_given_up |= !self.told_of_the_dead.is_empty();
        assert!(is_given_up, "no end: {:?}", self.workers);
    }
}

/// Refusals that an admitted contribution may meet here.
const FATES: [Refusal; 10] = [
    Refusal::Ahead,
    Refusal::Crowded,
    Refusal::Behind,
    Refusal::OldAttempt,
    Refusal::FarAttempt,
    Refusal::TooManyAttempts,
    Refusal::DeadRankInRedo,
    Refusal::Mismatch,
    Refusal::NotRoot,
    Refusal::BadTag,
];

/// Every request is counted once among what can become of one; damaged payloads of requests that were not taken anyway
/// are counted as damaged besides.
fn assert_counters_add_up(counters: &Counters, damaged_besides: u64) {
    let fates = [Event::Pulls, Event::Contributions, Event::Duplicates, Event::Late];
    let sum: u64 = fates.iter().map(|e| counters.noted(*e)).sum::<u64>()
        + FATES.iter().map(|r| counters.refused(*r)).sum::<u64>();
    assert_eq!(sum, counters.noted(Event::Requests) + damaged_besides);
}

/// The node's counters, and how often a PULL was aborted, which no counter tells.
fn play(shape: Shape, steps: &[Step]) -> (Counters, u64) {
    let mut played = World::new(shape);
    for step in steps {
        played.take(step);
    }
    if !played.is_lied_to {
        played.drain();
    }
    let counters = played.node.counters;
    let mut right = played.model.counters;
    if let Some((_, neighbour)) = &played.neighbour {
        right.absorb(&neighbour.counters);
    }
    assert_eq!(counters, right);
    let damaged_besides = counters.refused(Refusal::BadTag) - played.model.damaged_instead;
    assert_counters_add_up(&counters, damaged_besides);
    (counters, played.pulls_aborted)
}

/// A job, and the memory it has.
#[derive(Clone, Copy, Debug)]
struct Shape {
    world: u8,
    quorum: u8,
    slots: u32,
    start: u32,
    /// Slots of the pool, and the places in it that a chunk may take at first; 0 with a ring.
    pool: u32,
    k: u8,
}

/// A shape and what happens.
fn scene() -> impl Strategy<Value = (Shape, Vec<Step>)> {
    let start = prop_oneof![
        Just(0u32),
        Just(u32::MAX),
        (0..40u32).prop_map(|back| 0u32.wrapping_sub(back)),
        any::<u32>()
    ];
    let slots = prop_oneof![Just(1u32), Just(2), Just(4), Just(8)];
    let ring = (Just(0u32), Just(0u8)).boxed();
    let pool = (prop_oneof![Just(1u32), Just(2), Just(4), Just(8), Just(16)], 1..=K_MAX).boxed();
    let memory = prop_oneof![ring, pool];
    (1..=4u8, 0..=3u8, slots, start, memory, prop::collection::vec(step(), 1..150)).prop_map(
        |(world, quorum, slots, start, (pool, k), steps)| {
            (Shape { world, quorum: quorum.min(world), slots, start, pool, k }, steps)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_the_reference((shape, steps) in scene()) {
        play(shape, &steps);
    }
}

/// The traffic above is no proof of anything that it does not reach.
#[test]
fn the_traffic_reaches_every_fate() {
    let mut runner = TestRunner::deterministic();
    let (mut total, mut pulls_aborted) = (Counters::default(), 0);
    for _ in 0..500 {
        let (shape, steps) = scene().new_tree(&mut runner).unwrap().current();
        let (counters, aborted) = play(shape, &steps);
        total.absorb(&counters);
        pulls_aborted += aborted;
    }
    assert!(pulls_aborted > 0);
    let of_levels = [Event::Sums, Event::Lifted, Event::PassedOn, Event::HandedDown];
    let unused = [Event::Passed, Event::EcnMarks, Event::NonFinite].into_iter().chain(of_levels);
    let unused: Vec<Event> = unused.collect();
    for event in Event::ALL.iter().filter(|event| !unused.contains(event)) {
        assert!(total.noted(*event) > 0, "{}", event.name());
    }
    for refusal in FATES {
        assert!(total.refused(refusal) > 0, "{}", refusal.name());
    }
}
