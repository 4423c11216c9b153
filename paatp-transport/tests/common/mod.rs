//! A network in virtual time: workers, the user-space aggregator, and everything bad that may happen between them.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use bytemuck::Zeroable;
use paatp_common::counter::Counters;
use paatp_common::host::Host;
use paatp_common::job::{JobEntry, RankEntry, mapped};
use paatp_common::lanes::SlotBlock;
use paatp_common::levels::Link;
use paatp_common::limits::{LANES_PER_BLOCK, MAX_JOBS, MAX_RANKS};
use paatp_common::pool::Pool;
use paatp_common::progress::Progress;
use paatp_common::slot::Slot;
use paatp_common::switch::{Outcome, Side, address_copy};
use paatp_common::tag::rank_key;
use paatp_common::wire::{HEADER_BYTES, Header, Kind};
use paatp_transport::rate::Algorithm;
use paatp_transport::{Event, Membership, Settings, Tensor, Time, Worker};
use proptest::prelude::*;

#[path = "../../../paatp-common/tests/support/mod.rs"]
pub mod support;
use support::switch::OwnedSwitch;

pub const GENERATION: u32 = 0xC0FFEE;
pub const NONCE: u64 = 0x0123_4567_89AB_CDEF;

/// splitmix64: small, and the same everywhere.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    pub fn chance(&mut self, probability: f64) -> bool {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64 <= probability && probability > 0.0
    }

    /// Uniform in −1…1.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// How bad the network is, in both directions.
#[derive(Clone, Copy, Debug)]
pub struct Weather {
    pub loss: f64,
    pub duplication: f64,
    pub flips: f64,
    /// One way, in µs; the rest is chance, so packets overtake each other.
    pub delay: u64,
    pub jitter: u64,
}

pub const FAIR: Weather = Weather { loss: 0.0, duplication: 0.0, flips: 0.0, delay: 20, jitter: 0 };

#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub world: u8,
    pub lanes: u16,
    pub window: u16,
    pub slots: u32,
}

/// An aggregator's memory.
pub struct Aggregator {
    pub jobs: Vec<JobEntry>,
    pub ranks: Vec<RankEntry>,
    pub progress: Vec<Progress>,
    pub slots: Vec<Slot>,
    pub lanes: Vec<SlotBlock>,
    pub blocks: usize,
    pub counters: Counters,
    damaged: BTreeSet<(u32, u8)>,
}

impl Aggregator {
    pub fn new(shape: Shape) -> Aggregator {
        let blocks = usize::from(shape.lanes) / LANES_PER_BLOCK;
        // A node of several has no more than there are bits.
        let shape = Shape { world: shape.world.min(MAX_RANKS as u8), ..shape };
        let mut jobs = vec![JobEntry::zeroed(); MAX_JOBS];
        jobs[0] = JobEntry {
            expected: u64::MAX >> (64 - shape.world),
            generation: GENERATION,
            slots: shape.slots,
            lanes: shape.lanes,
            window: shape.window,
            world: shape.world,
            ..JobEntry::zeroed()
        };
        let mut ranks = vec![RankEntry::zeroed(); MAX_JOBS * MAX_RANKS];
        for rank in 0..shape.world {
            ranks[usize::from(rank)] = RankEntry {
                address: mapped([10, 0, 0, rank]),
                key: rank_key(NONCE, rank.into()),
                ..RankEntry::default()
            };
        }
        Aggregator {
            jobs,
            ranks,
            progress: (0..MAX_JOBS).map(|_| Progress::default()).collect(),
            slots: vec![Slot::zeroed(); shape.slots as usize],
            lanes: vec![SlotBlock::default(); shape.slots as usize * blocks],
            blocks,
            counters: Counters::default(),
            damaged: BTreeSet::new(),
        }
    }

    pub fn handle(&mut self, rank: u8, datagram: &mut Vec<u8>) -> bool {
        let mut host = Host {
            jobs: &mut self.jobs,
            ranks: &self.ranks,
            progress: &self.progress,
            pool: Pool::default(),
            slots: &mut self.slots,
            lanes: &mut self.lanes,
            blocks_per_slot: self.blocks,
            counters: &mut self.counters,
        };
        match host.handle(datagram, mapped([10, 0, 0, rank]), false) {
            Ok(length) => {
                datagram.truncate(length);
                true
            }
            Err(_) => false,
        }
    }

    /// As [`Aggregator::handle`], on a node that takes the partial sums of a switch.
    pub fn handle_behind_a_switch(&mut self, rank: u8, datagram: &mut Vec<u8>) -> bool {
        let links = vec![Link { switched: u64::MAX, ..Link::default() }; MAX_JOBS];
        let mut host = Host {
            jobs: &mut self.jobs,
            ranks: &self.ranks,
            progress: &self.progress,
            pool: Pool::default(),
            slots: &mut self.slots,
            lanes: &mut self.lanes,
            blocks_per_slot: self.blocks,
            counters: &mut self.counters,
        };
        let (outcome, length) =
            host.handle_with_levels(&links, &[], datagram, mapped([10, 0, 0, rank]), 0, false);
        datagram.truncate(length);
        matches!(outcome, paatp_common::aggregate::Outcome::Answer { .. })
    }

    /// Flips a bit of a complete slot's lanes. Once for each result: the checksum sees every single wrong word, but its
    /// top bit is the parity of the words' top bits, so a second flip there may hide the first.
    pub fn damage(&mut self, random: &mut Random) {
        let is_fresh = |slot: &Slot| {
            slot.is_complete() && slot.has_payload() && !self.damaged.contains(&(slot.seq.0, slot.attempt))
        };
        let fresh: Vec<usize> = (0..self.slots.len()).filter(|i| is_fresh(&self.slots[*i])).collect();
        let Some(index) = fresh.get(random.below(fresh.len() as u64) as usize) else { return };
        let slot = &self.slots[*index];
        self.damaged.insert((slot.seq.0, slot.attempt));
        let word = random.below(u64::from(slot.chunk().lanes) / 2) as usize;
        self.lanes[index * self.blocks + word / 16][word % 16] ^= 1 << random.below(64);
    }
}

pub fn shape() -> impl Strategy<Value = Shape> {
    (2..=5u8, 1..=3u16, 2..=6u32).prop_flat_map(|(world, blocks, ring)| {
        let slots = 1 << ring;
        (1..=(slots as u16 / 2).min(16)).prop_map(move |window| Shape {
            world,
            lanes: blocks * 32,
            window,
            slots,
        })
    })
}

pub fn weather() -> impl Strategy<Value = Weather> {
    (0.0..0.3, 0.0..0.3, 0.0..0.05, 1..200u64, prop_oneof![Just(0), 1..500u64]).prop_map(
        |(loss, duplication, flips, delay, jitter)| Weather { loss, duplication, flips, delay, jitter },
    )
}

pub fn algorithm() -> impl Strategy<Value = Algorithm> {
    proptest::sample::select(Algorithm::ALL.to_vec())
}

enum Flight {
    /// From a worker: to the switch if there is one.
    ToAggregator(u8, Vec<u8>),
    ToWorker(u8, Vec<u8>),
    /// Between switch and aggregator.
    PastSwitch(u8, Vec<u8>),
    ToSwitch(u8, Vec<u8>),
    Wake(u8),
}

pub type Meddle = dyn FnMut(&mut Aggregator, &mut Random);
pub type Filter = dyn FnMut(u8, &mut Vec<u8>) -> bool;

/// The network, its workers and what has come out of them.
pub struct Net {
    pub now: u64,
    pub workers: Vec<Worker>,
    /// Silenced ranks are neither asked nor told.
    pub silent: Vec<bool>,
    pub aggregator: Aggregator,
    /// Between workers and aggregator, which then takes partial sums.
    pub switch: Option<OwnedSwitch>,
    pub weather: Weather,
    pub random: Random,
    pub events: Vec<Vec<Event>>,
    pub left: Vec<Option<bool>>,
    /// Called before the aggregator handles a datagram.
    pub meddle: Option<Box<Meddle>>,
    /// Requests on their way to the aggregator are shown to it; false drops them.
    pub filter: Option<Box<Filter>>,
    /// As `filter`, for answers on their way to the workers.
    pub answer_filter: Option<Box<Filter>>,
    /// Answers with a flipped bit that were not lost.
    pub answers_flipped: u64,
    /// With a switch: what a bit was flipped in, by direction, chunk and attempt.
    flipped: BTreeSet<(bool, u32, u8)>,
    pub steps: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    flights: BTreeMap<u64, Flight>,
    serial: u64,
    wakes: Vec<Option<u64>>,
}

pub fn settings() -> Settings {
    Settings { timeout: Duration::from_secs(20), linger: Duration::from_secs(20), staleness: 0 }
}

pub fn membership(shape: Shape, rank: u8) -> Membership {
    Membership {
        job: 0,
        generation: GENERATION,
        nonce: NONCE,
        rank,
        world: shape.world,
        lanes: shape.lanes,
        window: shape.window,
        slots: shape.slots,
        seating: None,
    }
}

impl Net {
    pub fn new(shape: Shape, weather: Weather, seed: u64) -> Net {
        Net::with_settings(shape, weather, seed, settings())
    }

    pub fn with_settings(shape: Shape, weather: Weather, seed: u64, settings: Settings) -> Net {
        Net::with_algorithm(shape, weather, seed, settings, Algorithm::Fixed)
    }

    pub fn with_algorithm(
        shape: Shape,
        weather: Weather,
        seed: u64,
        settings: Settings,
        algorithm: Algorithm,
    ) -> Net {
        let worker = |rank| {
            let membership = membership(shape, rank);
            Worker::with_controller(membership, settings, algorithm.controller(&membership)).unwrap()
        };
        let world = usize::from(shape.world);
        Net {
            now: 1_000_000,
            workers: (0..shape.world).map(worker).collect(),
            silent: vec![false; world],
            aggregator: Aggregator::new(shape),
            switch: None,
            weather,
            random: Random(seed),
            events: (0..world).map(|_| Vec::new()).collect(),
            left: vec![None; world],
            meddle: None,
            filter: None,
            answer_filter: None,
            answers_flipped: 0,
            flipped: BTreeSet::new(),
            steps: 0,
            queue: BinaryHeap::new(),
            flights: BTreeMap::new(),
            serial: 0,
            wakes: vec![None; world],
        }
    }

    pub fn time(&self) -> Time {
        Time(self.now)
    }

    fn post(&mut self, at: u64, flight: Flight) {
        self.serial += 1;
        self.queue.push(Reverse((at, self.serial)));
        self.flights.insert(self.serial, flight);
    }

    /// Sends a datagram through the weather.
    fn throw(&mut self, datagram: Vec<u8>, flight: impl Fn(Vec<u8>) -> Flight) {
        let copies = 1 + u64::from(self.random.chance(self.weather.duplication));
        for _ in 0..copies {
            if self.random.chance(self.weather.loss) {
                continue;
            }
            let mut copy = datagram.clone();
            let flipped = self.random.chance(self.weather.flips) && self.may_flip(&copy);
            if flipped {
                let bit = self.random.below(copy.len() as u64 * 8) as usize;
                copy[bit / 8] ^= 1 << (bit % 8);
            }
            let at = self.now + self.weather.delay + self.random.below(self.weather.jitter + 1);
            let flight = flight(copy);
            self.answers_flipped += u64::from(flipped && matches!(flight, Flight::ToWorker(..)));
            self.post(at, flight);
        }
    }

    /// One bit in all that meets before somebody checks it: the checks see every single wrong word, and two flipped top
    /// bits cancel (docs/protocol.md). Without a switch that is a datagram. A switch adds unchecked what several ranks
    /// send, and passes on with the bits that were flipped before.
    fn may_flip(&mut self, datagram: &[u8]) -> bool {
        if self.switch.is_none() {
            return true;
        }
        let Some(header) = Header::of(datagram).filter(|header| header.check().is_ok()) else { return false };
        let is_answer = header.kind() == Some(Kind::Answer);
        let seq = if is_answer { header.want() } else { header.seq() };
        self.flipped.insert((is_answer, seq.0, header.attempt()))
    }

    /// A datagram at the switch, whose clock is the network's.
    fn switch(&mut self, side: Side, datagram: &mut [u8]) -> Outcome {
        let Some(switch) = &mut self.switch else { return Outcome::Forward };
        switch.now = self.now;
        switch.datagram(datagram, side, false)
    }

    /// Lets a worker send what it has to send, and notes when it wants to be woken.
    pub fn pump(&mut self, rank: u8) {
        let index = usize::from(rank);
        if self.silent[index] {
            return;
        }
        let mut buffer = vec![0; self.workers[index].datagram_bytes()];
        let mut sent = 0;
        while let Some(transmit) = self.workers[index].poll_transmit(Time(self.now), &mut buffer) {
            sent += 1;
            assert!(sent < 10_000, "rank {rank} sends without end");
            let mut datagram = buffer[..transmit.len].to_vec();
            let passes = self.filter.as_mut().is_none_or(|filter| filter(rank, &mut datagram));
            if passes {
                self.throw(datagram, |copy| Flight::ToAggregator(rank, copy));
            }
        }
        while let Some(event) = self.workers[index].poll_event() {
            match event {
                Event::Left { complete } => self.left[index] = Some(complete),
                event => self.events[index].push(event),
            }
        }
        if let Some(Time(at)) = self.workers[index].poll_timeout() {
            let at = at.max(self.now + 1);
            if self.wakes[index].is_none_or(|wake| at < wake || wake <= self.now) {
                self.wakes[index] = Some(at);
                self.post(at, Flight::Wake(rank));
            }
        }
    }

    pub fn pump_all(&mut self) {
        (0..self.workers.len() as u8).for_each(|rank| self.pump(rank));
    }

    /// When the next event is, if there is one.
    pub fn next_at(&self) -> Option<u64> {
        self.queue.peek().map(|Reverse((at, _))| *at)
    }

    /// One event; false if nothing is left to happen.
    pub fn step(&mut self) -> bool {
        let Some(Reverse((at, serial))) = self.queue.pop() else { return false };
        let Some(flight) = self.flights.remove(&serial) else { return true };
        assert!(at >= self.now);
        self.now = at;
        self.steps += 1;
        match flight {
            Flight::ToAggregator(rank, mut datagram) if self.switch.is_some() => {
                let outcome = self.switch(Side::Worker(mapped([10, 0, 0, rank])), &mut datagram);
                match outcome {
                    Outcome::Answer => {
                        datagram.truncate(HEADER_BYTES);
                        self.throw(datagram, |copy| Flight::ToWorker(rank, copy));
                    }
                    _ => self.throw(datagram, |copy| Flight::PastSwitch(rank, copy)),
                }
            }
            Flight::ToSwitch(rank, mut datagram) => {
                if let Outcome::Down { others } = self.switch(Side::Node, &mut datagram) {
                    for other in (0..64).filter(|other| others >> other & 1 == 1) {
                        let mut copy = datagram.clone();
                        address_copy(Header::of_mut(&mut copy).unwrap(), other);
                        self.throw(copy, |copy| Flight::ToWorker(other, copy));
                    }
                }
                self.throw(datagram, |copy| Flight::ToWorker(rank, copy));
            }
            Flight::ToAggregator(rank, mut datagram) | Flight::PastSwitch(rank, mut datagram) => {
                if let Some(mut meddle) = self.meddle.take() {
                    meddle(&mut self.aggregator, &mut self.random);
                    self.meddle = Some(meddle);
                }
                let answered = if self.switch.is_some() {
                    self.aggregator.handle_behind_a_switch(rank, &mut datagram)
                } else {
                    self.aggregator.handle(rank, &mut datagram)
                };
                if answered && self.answer_filter.as_mut().is_none_or(|filter| filter(rank, &mut datagram)) {
                    if self.switch.is_some() {
                        self.throw(datagram, |copy| Flight::ToSwitch(rank, copy));
                    } else {
                        self.throw(datagram, |copy| Flight::ToWorker(rank, copy));
                    }
                }
            }
            Flight::ToWorker(rank, datagram) => {
                if !self.silent[usize::from(rank)] {
                    self.workers[usize::from(rank)].handle_datagram(Time(self.now), &datagram);
                    self.pump(rank);
                }
            }
            Flight::Wake(rank) => {
                let index = usize::from(rank);
                if self.wakes[index].is_some_and(|wake| wake <= self.now) {
                    self.wakes[index] = None;
                }
                if !self.silent[index] {
                    self.workers[index].handle_timeout(Time(self.now));
                    self.pump(rank);
                    let next = self.workers[index].poll_timeout();
                    assert!(next.is_none_or(|at| at.0 > self.now), "rank {rank} would be woken for ever");
                }
            }
        }
        true
    }

    /// Runs until `done`, at most `steps` events.
    pub fn run(&mut self, steps: u64, mut done: impl FnMut(&Net) -> bool) {
        self.pump_all();
        let limit = self.steps + steps;
        while !done(self) {
            assert!(self.steps < limit, "no end in sight at {} µs", self.now);
            assert!(self.step(), "everything is silent, but not done");
        }
    }

    /// Runs until every worker that is not silent has as many events as told.
    pub fn run_until_events(&mut self, events: usize, steps: u64) {
        self.run(steps, |net| {
            net.events.iter().zip(&net.silent).all(|(seen, silent)| *silent || seen.len() >= events)
        });
    }

    /// Everybody leaves; returns whether all were complete.
    pub fn leave(&mut self, steps: u64) -> bool {
        for (worker, silent) in self.workers.iter_mut().zip(&self.silent) {
            if !silent {
                worker.leave(Time(self.now));
            }
        }
        self.run(steps, |net| {
            net.left.iter().zip(&net.silent).all(|(left, silent)| *silent || left.is_some())
        });
        self.left.iter().zip(&self.silent).all(|(left, silent)| *silent || *left == Some(true))
    }

    /// What everybody thinks, for failed tests.
    pub fn describe(&self) -> String {
        let mut text = format!("at {} µs, left {:?}", self.now, self.left);
        for (rank, worker) in self.workers.iter().enumerate() {
            let known = self.aggregator.progress[0].reached(GENERATION, rank);
            text += &format!("\nrank {rank}: chunks {:?}, aggregator knows {known:?}", worker.chunks());
            text += &format!(", timeout {:?}, {:?}", worker.poll_timeout(), worker.statistics());
        }
        text + &format!("\nredo {:?}", self.aggregator.progress[0].redo(GENERATION))
    }

    /// The tensors of the only event so far of each rank, which must be a success.
    pub fn results(&mut self) -> Vec<Vec<Tensor>> {
        let take = |(rank, events): (usize, &mut Vec<Event>)| {
            let mut results = Vec::new();
            for event in events.drain(..) {
                match event {
                    Event::Done { tensors, .. } => results.extend(tensors),
                    event => panic!("rank {rank}: {event:?}"),
                }
            }
            results
        };
        self.events.iter_mut().enumerate().map(take).collect()
    }
}
