//! A network in virtual time of workers and aggregators above one another.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use crate::seats::{self, Seat};
use paatp_common::aggregate::Outcome;
use paatp_common::counter::Event as Counted;
use paatp_common::host::Host;
use paatp_common::job::{Address, RankEntry, mapped};
use paatp_common::levels::{Above, Link};
use paatp_common::limits::{MAX_JOBS, MAX_RANKS};
use paatp_common::pool::Pool;
use paatp_common::progress::RankRecord;
use paatp_common::tag::rank_key;
use paatp_common::wire::{Header, Kind, flags};
use paatp_transport::{Event, Membership, Tensor, Time, Worker};

use crate::common::{Aggregator, GENERATION, NONCE, Random, Shape, Weather, membership, settings};

/// Who is where: the parent of each aggregator (the first one is the root), and where each rank is at home.
#[derive(Clone, Debug)]
pub struct Plan {
    pub parents: Vec<Option<usize>>,
    pub homes: Vec<usize>,
}

/// How a lower node's ranks are called at its parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// As everywhere.
    Ranks,
    /// All by one name, the node's (protocol-rules F22).
    Nodes,
}

/// An end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Rank(u8),
    Site(usize),
}

impl Place {
    const fn address(self) -> Address {
        match self {
            Place::Rank(rank) => mapped([10, 0, 0, rank]),
            Place::Site(site) => mapped([10, 1, 0, site as u8]),
        }
    }
}

/// One aggregator.
pub struct Site {
    pub memory: Aggregator,
    /// The job's number here.
    pub number: usize,
    parent: Option<usize>,
    links: Vec<Link>,
    above: Vec<Above>,
    /// Where requests of each rank have come from, and from which port.
    ways: BTreeMap<u8, (Place, u16)>,
}

impl Site {
    pub fn counted(&self, event: Counted) -> u64 {
        self.memory.counters.noted(event)
    }

    pub fn reached(&self, rank: usize) -> RankRecord {
        self.memory.progress[self.number].reached(GENERATION, rank)
    }

    /// F22: where all ranks here are one at the parent, what goes up is what that rank could have sent itself, to whatever
    /// is on the way.
    fn check_ascent(&self, datagram: &[u8]) {
        let (Some(child), Some(header)) =
            (self.links[self.number].child.checked_sub(1), Header::of(datagram))
        else {
            return;
        };
        header.check().unwrap();
        let allowed = flags::RETRANSMIT | flags::NON_FINITE | flags::PAYLOAD;
        assert_eq!((header.worker(), header.status(), header.flags() & !allowed), (child, 0, 0));
        if header.kind() == Some(Kind::Data) {
            assert_eq!((header.bitmap(), header.contributors()), (1 << child, 1));
        }
    }

    /// What becomes of a datagram.
    fn handle(&mut self, from: Place, ports: Ports, datagram: &mut Vec<u8>) -> Option<(Place, Ports)> {
        let memory = &mut self.memory;
        let mut host = Host {
            jobs: &mut memory.jobs,
            ranks: &memory.ranks,
            progress: &memory.progress,
            pool: Pool::default(),
            slots: &mut memory.slots,
            lanes: &mut memory.lanes,
            blocks_per_slot: memory.blocks,
            counters: &mut memory.counters,
        };
        let (outcome, length) =
            host.handle_with_levels(&self.links, &self.above, datagram, from.address(), ports.to, false);
        datagram.truncate(length);
        match outcome {
            Outcome::Drop(_) => None,
            Outcome::Answer { .. } => Some((from, Ports { from: ports.to, to: ports.from })),
            Outcome::Up(relay) => {
                assert_eq!(usize::from(relay.number()), self.number);
                self.ways.insert(relay.rank(), (from, ports.from));
                self.check_ascent(datagram);
                let ports = Ports { from: relay.source().checked_sub(1).unwrap_or(ports.to), to: REQUESTS };
                self.parent.map(|parent| (Place::Site(parent), ports))
            }
            Outcome::Down(relay) => {
                let source = relay.source().checked_sub(1).unwrap_or(ports.to);
                self.ways.get(&relay.rank()).map(|(place, port)| (*place, Ports { from: source, to: *port }))
            }
        }
    }
}

/// UDP ports of a datagram; those of a site count from its first.
#[derive(Clone, Copy, Debug)]
pub struct Ports {
    from: u16,
    to: u16,
}

/// The port of requests, and that of a worker.
const REQUESTS: u16 = 0;
const WORKER: u16 = 5000;

enum Flight {
    To(Place, Place, Ports, Vec<u8>),
    Wake(u8),
}

/// The network, and what has come out of it.
pub struct Tree {
    pub now: u64,
    pub steps: u64,
    pub workers: Vec<Worker>,
    pub sites: Vec<Site>,
    pub events: Vec<Vec<Event>>,
    /// Probability that a bit of a result flips in the memory of a node that is about to handle a datagram.
    pub damage: f64,
    /// So many datagrams that go up are lost.
    pub lose_upwards: u64,
    /// Lower nodes keep nothing of what their parent tells: two CPUs that write at once may lose it.
    pub forgetful: bool,
    left: Vec<Option<bool>>,
    silent: Vec<bool>,
    homes: Vec<usize>,
    weather: Weather,
    /// Datagrams in which a bit was flipped, by direction, rank and token.
    flipped: BTreeSet<(bool, u8, u32)>,
    random: Random,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    flights: BTreeMap<u64, Flight>,
    serial: u64,
    wakes: Vec<Option<u64>>,
}

/// Bit of each rank that has its home at a site or below.
fn beneath(plan: &Plan, site: usize) -> u64 {
    let is_beneath = |mut home: usize| loop {
        if home == site {
            return true;
        }
        match plan.parents[home] {
            Some(parent) => home = parent,
            None => return false,
        }
    };
    (0..plan.homes.len()).filter(|rank| is_beneath(plan.homes[*rank])).fold(0, |bits, rank| bits | 1 << rank)
}

/// Where a site sees a rank's requests come from.
fn seen_at(plan: &Plan, site: usize, rank: usize) -> Place {
    let mut place = Place::Rank(rank as u8);
    let mut home = plan.homes[rank];
    while home != site {
        place = Place::Site(home);
        home = plan.parents[home].expect("beneath the site");
    }
    place
}

fn site(shape: Shape, plan: &Plan, naming: Naming, index: usize) -> Site {
    let mut memory = Aggregator::new(shape);
    // Numbers differ from node to node.
    let number = index;
    let mut entry = std::mem::take(&mut memory.jobs[0]);
    entry.expected = if naming == Naming::Ranks { beneath(plan, index) } else { 0 };
    entry.rises = u8::from(plan.parents[index].is_some());
    memory.ranks = vec![RankEntry::default(); MAX_JOBS * MAX_RANKS];
    if naming == Naming::Nodes {
        let (all, names) = (seats::seats(plan, index), seats::names(plan, index));
        entry.world = all.len() as u8;
        entry.expected = u64::MAX.checked_shr(64 - all.len() as u32).unwrap_or(0);
        for (seat, is) in all.into_iter().enumerate() {
            let place = match is {
                Seat::Rank(rank) => Place::Rank(rank as u8),
                Seat::Site(site) => Place::Site(site),
            };
            let key = names.key(NONCE, seat as u8);
            memory.ranks[number * MAX_RANKS + seat] =
                RankEntry { address: place.address(), key, ..RankEntry::default() };
        }
    }
    memory.jobs[number] = entry;
    for rank in (0..plan.homes.len()).filter(|_| naming == Naming::Ranks) {
        let is_here = entry.expected >> rank & 1 == 1;
        let address = if is_here { seen_at(plan, index, rank).address() } else { [0; 16] };
        let key = rank_key(NONCE, rank as u16);
        memory.ranks[number * MAX_RANKS + rank] = RankEntry { address, key, ..RankEntry::default() };
    }
    let mut links = vec![Link::default(); MAX_JOBS];
    let parent = plan.parents[index];
    if let Some(parent) = parent {
        links[number] = Link {
            parent: Place::Site(parent).address(),
            port_base: 1000,
            ports: 3,
            number: parent as u16,
            ..links[number]
        };
        if naming == Naming::Nodes {
            links[number] = seats::link(plan, index, links[number]);
        }
        links[parent].below = number as u16 + 1;
    }
    let above = (0..MAX_JOBS).map(|_| Above::default()).collect();
    Site { memory, number, parent, links, above, ways: BTreeMap::new() }
}

impl Tree {
    pub fn new(shape: Shape, plan: &Plan, weather: Weather, seed: u64) -> Tree {
        Tree::with_names(shape, plan, Naming::Ranks, weather, seed)
    }

    pub fn with_names(shape: Shape, plan: &Plan, naming: Naming, weather: Weather, seed: u64) -> Tree {
        let worker = |(rank, home): (u8, &usize)| {
            let mut membership = Membership { job: *home as u16, ..membership(shape, rank) };
            if naming == Naming::Nodes {
                let (rank, seating) = seats::seating(plan, rank.into());
                (membership.rank, membership.seating) = (rank, Some(seating));
                membership.world = seating.here.bits();
            }
            Worker::new(membership, settings()).unwrap()
        };
        let world = plan.homes.len();
        let sites: Vec<Site> =
            (0..plan.parents.len()).map(|index| site(shape, plan, naming, index)).collect();
        Tree {
            now: 1_000_000,
            steps: 0,
            workers: (0..).zip(&plan.homes).map(worker).collect(),
            sites,
            events: (0..world).map(|_| Vec::new()).collect(),
            damage: 0.0,
            lose_upwards: 0,
            forgetful: false,
            left: vec![None; world],
            silent: vec![false; world],
            homes: plan.homes.clone(),
            weather,
            flipped: BTreeSet::new(),
            random: Random(seed),
            queue: BinaryHeap::new(),
            flights: BTreeMap::new(),
            serial: 0,
            wakes: vec![None; world],
        }
    }

    /// From now on a rank neither sends nor hears.
    pub fn silence(&mut self, rank: usize) {
        self.silent[rank] = true;
    }

    /// Somebody sends a datagram in another one's name, to a port of a site.
    pub fn forge(&mut self, from: Place, site: usize, port: u16, datagram: Vec<u8>) {
        let ports = Ports { from: REQUESTS, to: port };
        self.post(self.now, Flight::To(from, Place::Site(site), ports, datagram));
    }

    fn post(&mut self, at: u64, flight: Flight) {
        self.serial += 1;
        self.queue.push(Reverse((at, self.serial)));
        self.flights.insert(self.serial, flight);
    }

    fn throw(&mut self, from: Place, to: Place, ports: Ports, datagram: &[u8]) {
        let is_upwards = match (from, to) {
            (Place::Site(from), Place::Site(to)) => self.sites[from].parent == Some(to),
            _ => false,
        };
        if is_upwards && self.lose_upwards > 0 {
            self.lose_upwards -= 1;
            return;
        }
        let copies = 1 + u64::from(self.random.chance(self.weather.duplication));
        for _ in 0..copies {
            if self.random.chance(self.weather.loss) {
                continue;
            }
            let mut copy = datagram.to_vec();
            if self.random.chance(self.weather.flips) && self.may_flip(&copy) {
                let bit = self.random.below(copy.len() as u64 * 8) as usize;
                copy[bit / 8] ^= 1 << (bit % 8);
            }
            let at = self.now + self.weather.delay + self.random.below(self.weather.jitter + 1);
            self.post(at, Flight::To(from, to, ports, copy));
        }
    }

    /// Once on its way through all levels: what a node passes on as it is nobody has checked yet, and two flipped top bits
    /// cancel (docs/protocol.md).
    fn may_flip(&mut self, datagram: &[u8]) -> bool {
        let Some(header) = Header::of(datagram).filter(|header| header.check().is_ok()) else { return false };
        let is_answer = header.kind() == Some(Kind::Answer);
        self.flipped.insert((is_answer, header.worker(), header.token()))
    }

    fn pump(&mut self, rank: u8) {
        let index = usize::from(rank);
        if self.silent[index] {
            return;
        }
        let mut buffer = vec![0; self.workers[index].datagram_bytes()];
        let mut sent = 0;
        while let Some(transmit) = self.workers[index].poll_transmit(Time(self.now), &mut buffer) {
            sent += 1;
            assert!(sent < 10_000, "rank {rank} sends without end");
            let ports = Ports { from: WORKER, to: REQUESTS };
            self.throw(Place::Rank(rank), Place::Site(self.homes[index]), ports, &buffer[..transmit.len]);
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

    /// One event; false if nothing is left to happen.
    fn step(&mut self) -> bool {
        let Some(Reverse((at, serial))) = self.queue.pop() else { return false };
        let Some(flight) = self.flights.remove(&serial) else { return true };
        self.now = at;
        self.steps += 1;
        match flight {
            Flight::To(from, Place::Site(index), ports, mut datagram) => {
                let site = &mut self.sites[index];
                if self.random.chance(self.damage) {
                    site.memory.damage(&mut self.random);
                }
                if self.forgetful {
                    site.above[site.number] = Above::default();
                }
                if let Some((to, ports)) = site.handle(from, ports, &mut datagram) {
                    self.throw(Place::Site(index), to, ports, &datagram);
                }
            }
            Flight::To(_, Place::Rank(rank), ports, datagram) if !self.silent[usize::from(rank)] => {
                assert_eq!(
                    (ports.from, ports.to),
                    (REQUESTS, WORKER),
                    "an answer comes from where it was asked for"
                );
                self.workers[usize::from(rank)].handle_datagram(Time(self.now), &datagram);
                self.pump(rank);
            }
            Flight::To(..) => {}
            Flight::Wake(rank) => {
                let index = usize::from(rank);
                if self.wakes[index].is_some_and(|wake| wake <= self.now) {
                    self.wakes[index] = None;
                }
                if !self.silent[index] {
                    self.workers[index].handle_timeout(Time(self.now));
                    self.pump(rank);
                }
            }
        }
        true
    }

    /// Runs until `done`, at most `steps` events.
    pub fn run(&mut self, steps: u64, mut done: impl FnMut(&Tree) -> bool) {
        (0..self.workers.len() as u8).for_each(|rank| self.pump(rank));
        let limit = self.steps + steps;
        while !done(self) {
            assert!(self.steps < limit, "no end in sight at {} µs {}", self.now, self.describe());
            assert!(self.step(), "everything is silent, but not done {}", self.describe());
        }
    }

    /// Runs until every rank that is not silent has as many events as told.
    pub fn run_until_events(&mut self, events: usize, steps: u64) {
        self.run(steps, |net| {
            net.events.iter().zip(&net.silent).all(|(seen, silent)| *silent || seen.len() >= events)
        });
    }

    /// Everybody leaves; returns whether all were complete.
    pub fn leave(&mut self, steps: u64) -> bool {
        for worker in &mut self.workers {
            worker.leave(Time(self.now));
        }
        self.run(steps, |net| net.left.iter().all(Option::is_some));
        self.left.iter().all(|left| *left == Some(true))
    }

    /// What everybody thinks, for failed tests.
    pub fn describe(&self) -> String {
        let mut text = format!("at {} µs, left {:?}", self.now, self.left);
        for (rank, worker) in self.workers.iter().enumerate() {
            let known: Vec<_> = self.sites.iter().map(|site| site.reached(rank % 64)).collect();
            text += &format!("\nrank {rank}: chunks {:?}, known {known:?}", worker.chunks());
            text += &format!("\n    {:?}", worker.statistics());
        }
        for (index, site) in self.sites.iter().enumerate() {
            text += &format!("\nsite {index}: {:?}", site.memory.counters);
            let redo = site.memory.progress[site.number].redo(GENERATION);
            let lowest = self.workers.iter().map(|worker| worker.chunks().0).min().unwrap_or(0);
            let slot = &site.memory.slots[lowest as usize % site.memory.slots.len()];
            text += &format!("\nredo {redo:?}, slot of the lowest chunk {slot:?}");
        }
        text
    }

    /// The tensors of all events so far, which must be successes of every rank that is not silent.
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
