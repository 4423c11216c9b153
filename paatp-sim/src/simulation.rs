//! The event loop.
//!
//! Everything happens in the order of (time, number of the event). Nothing depends on the iteration order of a hash map, on
//! a clock or on a float function that differs between platforms: the same scenario and seed give the same run.

mod application;
mod passing;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::time::Duration;

use paatp_common::wire::HEADER_BYTES;
use paatp_transport::rate::policy::{JobCounts, Meter, Policy};
use paatp_transport::rate::share::Shares;
use paatp_transport::rate::{Algorithm, Controller};
use paatp_transport::{Membership, MembershipError, OperationError, Settings, Time, Values, Worker};

use crate::link::{ETHERNET_OVERHEAD, Passage};
use crate::node::{Node, Sender, Violation, generation, nonce};
use crate::random::{Purpose, Random};
use crate::record::Recorder;
use crate::scenario::{JobSpec, Scenario, TICK};
use crate::switch::Adder;
use crate::topology::{LinkId, Topology};
use crate::training::{OperationId, Pace};
use crate::units::Nanos;

/// IP (20), UDP (8) and our own header (64), in bytes: the IP packet of a request or answer without payload.
pub const BARE_PACKET: u64 = 20 + 8 + HEADER_BYTES as u64;
/// How long a worker waits for a result, and for others before it leaves.
const PATIENCE: Duration = Duration::from_secs(30);
/// Datagrams that a worker may send without time going on; more means that it sends without end.
const MOST_AT_ONCE: u32 = 1 << 18;
/// Events of a run at most: a run-away simulation ends by itself.
const MOST_EVENTS: u64 = 20_000_000_000;

/// How a run failed. Each is a defect of what is simulated, or of the scenario.
#[derive(Debug, thiserror::Error)]
pub enum SimulationError {
    /// A rule was broken.
    #[error("at {at}: {violation}")]
    Violation {
        /// When.
        at: Nanos,
        /// What.
        violation: Violation,
    },
    /// An operation failed.
    #[error("at {at}, job {job}, rank {rank}: an operation failed: {source}")]
    Operation {
        /// When.
        at: Nanos,
        /// Job.
        job: u16,
        /// Rank.
        rank: u8,
        /// Why.
        source: OperationError,
    },
    /// A result is not the sum.
    #[error("at {at}, job {job}, rank {rank}: {what}")]
    Wrong {
        /// When.
        at: Nanos,
        /// Job.
        job: u16,
        /// Rank.
        rank: u8,
        /// What is wrong.
        what: String,
    },
    /// Nothing is left to happen, or the limit was passed, and somebody waits.
    #[error("at {at}: no end: {state}")]
    Stuck {
        /// When.
        at: Nanos,
        /// What everybody waits for.
        state: String,
    },
    /// A worker could not be made.
    #[error("a worker cannot be made: {0}")]
    Membership(#[from] MembershipError),
}

/// What happens at a time.
#[derive(Clone, Copy, Debug)]
enum Happening {
    /// A packet reaches the end of a link.
    Arrive(u32),
    /// A worker's deadline.
    Wake(u32),
    /// A host's card has room again.
    Room(u32),
    /// The values of an operation are computed.
    Ready(u32, OperationId),
    /// A rank starts an iteration.
    Begin(u32),
    /// A host dies for a while.
    Fail(u32, Nanos),
    /// It is back.
    Recover(u32),
    /// Progress is noted.
    Sample,
    /// The loader reads the tables and grants windows.
    Tick,
    /// The control plane of the switch tunes k.
    Tune,
}

#[derive(Clone, Copy, Debug)]
struct Scheduled {
    at: Nanos,
    number: u64,
    what: Happening,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Scheduled) -> bool {
        self.number == other.number
    }
}

impl Eq for Scheduled {}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Scheduled) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Scheduled {
    fn cmp(&self, other: &Scheduled) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// A packet on its way.
#[derive(Debug, Default)]
struct Packet {
    host: u32,
    answer: bool,
    congested: bool,
    /// Links passed.
    hop: u32,
    /// Whose contributions a request has: a bit for each rank.
    ranks: u64,
    bytes: Vec<u8>,
}

/// A host with its worker.
#[derive(Debug)]
struct Peer {
    worker: Worker,
    job: u16,
    rank: u8,
    pace: Pace,
    /// Earliest wake-up in the queue.
    wake: Option<Nanos>,
    /// A wake-up for room in the card is in the queue.
    waits_for_room: bool,
    /// Dead until then.
    dead_until: Option<Nanos>,
    /// Iterations begun, and finished.
    begun: u32,
    finished: u32,
    computing: bool,
    operations: BTreeMap<u64, OperationId>,
    /// Operations that became ready while the host was dead.
    held: VecDeque<OperationId>,
    /// Operations of the current and, with staleness, earlier iterations that are not done.
    missing: BTreeMap<u32, u32>,
    left: Option<bool>,
}

/// A run.
#[derive(Debug)]
pub struct Simulation<'a> {
    scenario: &'a Scenario,
    now: Nanos,
    queue: BinaryHeap<Reverse<Scheduled>>,
    number: u64,
    topology: Topology,
    packets: Vec<Packet>,
    free: Vec<u32>,
    node: Node,
    /// Adds on the way to the node.
    switch: Option<Adder>,
    peers: Vec<Peer>,
    /// First host of each job.
    first: Vec<usize>,
    damage: Random,
    expected: BTreeMap<(u16, OperationId), (Values, u8)>,
    recorder: Recorder,
    buffer: Vec<u8>,
    policy: Policy,
    shares: Shares,
    switch_shares: Shares,
    /// The loader paces ranks; it tunes the pool in any case.
    has_loader: bool,
    meter: Meter,
}

impl<'a> Simulation<'a> {
    /// Prepares a run of a scenario that was checked.
    ///
    /// # Errors
    /// A worker that cannot be made.
    pub fn new(scenario: &'a Scenario, algorithm: Algorithm, seed: u64) -> Result<Self, SimulationError> {
        // The other algorithms have no half in the loader.
        let has_loader = algorithm == Algorithm::PaAtp;
        Simulation::with_controllers(scenario, seed, has_loader, |membership| {
            algorithm.controller(membership)
        })
    }

    /// As [`Simulation::new`], with any controllers: for experiments with their constants.
    ///
    /// # Errors
    /// A worker that cannot be made.
    pub fn with_controllers(
        scenario: &'a Scenario,
        seed: u64,
        has_loader: bool,
        controller: impl Fn(&Membership) -> Box<dyn Controller>,
    ) -> Result<Self, SimulationError> {
        let (mut peers, mut first) = (Vec::new(), Vec::new());
        for (number, job) in (0..).zip(&scenario.jobs) {
            first.push(peers.len());
            let settings = Settings { timeout: PATIENCE, linger: PATIENCE, staleness: job.staleness };
            for rank in 0..job.world {
                let membership = job.membership(number, rank, generation(number), nonce(seed, number));
                peers.push(Peer {
                    worker: Worker::with_controller(membership, settings, controller(&membership))?,
                    job: number,
                    rank,
                    pace: Pace::new(job, rank, peers.len(), &scenario.stragglers, seed),
                    wake: None,
                    waits_for_room: false,
                    dead_until: None,
                    begun: 0,
                    finished: 0,
                    computing: false,
                    operations: BTreeMap::new(),
                    held: VecDeque::new(),
                    missing: BTreeMap::new(),
                    left: None,
                });
            }
        }
        let longest = peers.iter().map(|peer| peer.worker.datagram_bytes()).max().unwrap_or(0);
        let mut simulation = Simulation {
            scenario,
            now: Nanos(0),
            queue: BinaryHeap::new(),
            number: 0,
            topology: Topology::new(scenario, seed),
            packets: Vec::new(),
            free: Vec::new(),
            node: Node::new(&scenario.jobs, scenario.pool, scenario.switch.is_some(), seed),
            switch: scenario.switch.map(|spec| Adder::new(&scenario.jobs, &spec)),
            recorder: Recorder::new(scenario),
            peers,
            first,
            damage: Random::new(seed, Purpose::Damage, 0),
            expected: BTreeMap::new(),
            buffer: vec![0; longest],
            policy: Policy::default(),
            shares: Shares::default(),
            switch_shares: Shares::default(),
            has_loader,
            meter: Meter::default(),
        };
        if has_loader || scenario.pool.is_some_and(|pool| pool.k.is_none()) {
            simulation.schedule(TICK, Happening::Tick);
        }
        if let Some(switch) = scenario.switch.filter(|switch| switch.k.is_none()) {
            simulation.schedule(switch.tuning, Happening::Tune);
        }
        for host in 0..simulation.peers.len() as u32 {
            let start = simulation.job_of(host as usize).start;
            simulation.schedule(start, Happening::Begin(host));
        }
        simulation.schedule(Nanos(0), Happening::Sample);
        Ok(simulation)
    }

    /// Runs to the end.
    ///
    /// # Errors
    /// What went wrong.
    pub fn run(mut self) -> Result<Recorder, SimulationError> {
        while self.peers.iter().any(|peer| peer.left.is_none()) {
            self.step()?;
        }
        self.check_end()?;
        self.recorder.finish(
            self.now,
            &self.topology,
            (&self.node, self.switch.as_ref()),
            self.peers.iter().map(|peer| &peer.worker),
        );
        Ok(self.recorder)
    }

    fn job_of(&self, host: usize) -> &'a JobSpec {
        let job = self.peers.get(host).map_or(0, |peer| usize::from(peer.job));
        // Hosts were made from jobs.
        &self.scenario.jobs[job]
    }

    fn schedule(&mut self, at: Nanos, what: Happening) {
        self.number += 1;
        self.queue.push(Reverse(Scheduled { at, number: self.number, what }));
    }

    fn step(&mut self) -> Result<(), SimulationError> {
        let next = self.queue.pop().filter(|_| self.number < MOST_EVENTS);
        let Some(Reverse(Scheduled { at, what, .. })) = next.filter(|next| next.0.at <= self.scenario.limit)
        else {
            return Err(self.stuck());
        };
        self.now = at;
        match what {
            Happening::Arrive(packet) => self.arrive(packet),
            Happening::Wake(host) => self.wake(host as usize),
            Happening::Room(host) => {
                self.peers[host as usize].waits_for_room = false;
                self.pump(host as usize)
            }
            Happening::Ready(host, operation) => self.hand_in(host as usize, operation),
            Happening::Begin(host) => self.begin(host as usize),
            Happening::Fail(host, span) => {
                self.fail(host as usize, span);
                Ok(())
            }
            Happening::Recover(host) => self.recover(host as usize),
            Happening::Tick => {
                self.tick();
                Ok(())
            }
            Happening::Tune => {
                self.tune();
                Ok(())
            }
            Happening::Sample => {
                let node = &self.node;
                let progress = self.peers.iter().map(|peer| {
                    (u64::from(node.record(peer.job, peer.rank).contributed.0), peer.worker.chunks().0)
                });
                let interval = self.recorder.sample(self.now, progress);
                self.schedule(self.now + interval, Happening::Sample);
                Ok(())
            }
        }
    }

    /// What the daemon does every few milliseconds.
    fn tick(&mut self) {
        if self.scenario.pool.is_some_and(|pool| pool.k.is_none()) {
            let jobs = 0..self.scenario.jobs.len() as u16;
            let shares: Vec<_> = jobs.filter_map(|job| self.node.share(job)).collect();
            let ks = self.shares.tick(Duration::from_nanos(TICK.0), &shares);
            shares.iter().zip(ks).for_each(|(share, k)| self.node.set_k(share.job, k));
        }
        if self.has_loader {
            self.pace();
        }
        self.schedule(self.now + TICK, Happening::Tick);
    }

    fn pace(&mut self) {
        let mut ranks = Vec::with_capacity(self.scenario.jobs.len());
        for (job, spec) in (0..).zip(&self.scenario.jobs) {
            let records: Vec<_> = (0..spec.world).map(|rank| self.node.record(job, rank)).collect();
            ranks.push(self.meter.read(job, generation(job), &records));
        }
        let mut counts = Vec::with_capacity(ranks.len());
        for (job, (spec, ranks)) in (0..).zip(self.scenario.jobs.iter().zip(&ranks)) {
            counts.push(JobCounts { job, generation: generation(job), window: spec.window, ranks });
        }
        for grant in self.policy.tick(Duration::from_nanos(TICK.0), &counts) {
            self.node.stamp(&grant);
            if let Some(switch) = &mut self.switch {
                switch.grant(grant.job, grant.window);
            }
        }
    }

    fn time(&self) -> Time {
        Time(self.now.0 / 1000)
    }

    /// The host cannot do anything now.
    fn is_dead(&self, host: usize) -> bool {
        self.peers[host].dead_until.is_some_and(|until| self.now < until)
    }

    fn arrive(&mut self, id: u32) -> Result<(), SimulationError> {
        let packet = &mut self.packets[id as usize];
        packet.hop += 1;
        let (host, hop, answer) = (packet.host as usize, packet.hop as usize, packet.answer);
        if self.is_at_switch(host, hop, answer) {
            return self.pass(id, host);
        }
        let way = if answer { self.topology.down(host) } else { self.topology.up(host) };
        if let Some(link) = way.get(hop).copied() {
            return self.forward(id, link);
        }
        if answer {
            let bytes = std::mem::take(&mut self.packets[id as usize].bytes);
            let dead = self.is_dead(host);
            if !dead {
                let now = self.time();
                let marked = self.packets[id as usize].congested;
                let worker = &mut self.peers[host].worker;
                if marked {
                    worker.handle_marked_datagram(now, &bytes);
                } else {
                    worker.handle_datagram(now, &bytes);
                }
            }
            self.packets[id as usize].bytes = bytes;
            self.free.push(id);
            return if dead { Ok(()) } else { self.pump(host) };
        }
        self.serve(id, host)
    }

    /// A request has reached the aggregator.
    fn serve(&mut self, id: u32, host: usize) -> Result<(), SimulationError> {
        if self.damage.chance(self.scenario.memory_damage) {
            self.node.damage(&mut self.damage);
        }
        let (job, rank) = (self.peers[host].job, self.peers[host].rank);
        let (peers, firsts, jobs) = (&self.peers, &self.first, &self.scenario.jobs);
        let delivered = |job: u16| delivered(peers, firsts, jobs, job);
        let packet = &mut self.packets[id as usize];
        let sender = Sender { job, rank, ranks: packet.ranks };
        let handled = self.node.handle(sender, &mut packet.bytes, packet.congested, &delivered);
        let answered = handled.map_err(|violation| SimulationError::Violation { at: self.now, violation })?;
        let Some(length) = answered else {
            self.free.push(id);
            return Ok(());
        };
        packet.bytes.truncate(length);
        // The answer leaves as ECT(0).
        (packet.answer, packet.congested, packet.hop) = (true, false, 0);
        match self.topology.down(host).first().copied() {
            Some(link) => self.forward(id, link),
            None => Ok(()),
        }
    }

    /// How many chunks each rank of a job has.
    fn delivered(&self, job: u16) -> Vec<u64> {
        delivered(&self.peers, &self.first, &self.scenario.jobs, job)
    }

    /// Bytes on the wire: a payload counts as a whole packet, however few lanes are simulated.
    fn wire_bytes(&self, datagram: usize) -> u64 {
        let packet = if datagram > HEADER_BYTES { self.scenario.network.packet.0 } else { BARE_PACKET };
        packet + ETHERNET_OVERHEAD
    }

    /// Sends a packet over a link.
    fn forward(&mut self, id: u32, link: LinkId) -> Result<(), SimulationError> {
        let wire = self.wire_bytes(self.packets[id as usize].bytes.len());
        let Passage { arrivals, congested, damaged } = self.topology.link(link).send(self.now, wire);
        let packet = &mut self.packets[id as usize];
        packet.congested |= congested;
        if let Some(bit) = damaged {
            let bit = (bit % (packet.bytes.len() as u64 * 8)) as usize;
            packet.bytes[bit / 8] ^= 1 << (bit % 8);
        }
        match arrivals {
            [Some(at), None] | [None, Some(at)] => self.schedule(at, Happening::Arrive(id)),
            [Some(at), Some(copy_at)] => {
                self.schedule(at, Happening::Arrive(id));
                let copy = self.copy(id);
                self.schedule(copy_at, Happening::Arrive(copy));
            }
            [None, None] => self.free.push(id),
        }
        Ok(())
    }

    fn copy(&mut self, id: u32) -> u32 {
        let new = self.packet();
        let Packet { host, answer, congested, hop, ranks, ref bytes } = self.packets[id as usize];
        let bytes = bytes.clone();
        self.packets[new as usize] = Packet { host, answer, congested, hop, ranks, bytes };
        new
    }

    fn packet(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.packets.push(Packet::default());
            self.packets.len() as u32 - 1
        })
    }

    fn wake(&mut self, host: usize) -> Result<(), SimulationError> {
        let now = self.now;
        let peer = &mut self.peers[host];
        if peer.wake.is_some_and(|wake| wake <= now) {
            peer.wake = None;
        }
        if self.is_dead(host) {
            return Ok(());
        }
        let time = self.time();
        self.peers[host].worker.handle_timeout(time);
        self.pump(host)
    }

    /// Lets a worker send while its card has room, hands out what has happened, and notes when to wake it.
    fn pump(&mut self, host: usize) -> Result<(), SimulationError> {
        if self.is_dead(host) {
            return Ok(());
        }
        let time = self.time();
        let Some(card) = self.topology.up(host).first().copied() else { return Ok(()) };
        let packet = self.scenario.network.packet.0 + ETHERNET_OVERHEAD;
        let room = self.scenario.network.card.saturating_mul(packet);
        let room = room.min(self.scenario.network.host.buffer.0.saturating_sub(packet));
        let mut full = false;
        for turn in 0.. {
            full = self.topology.link(card).backlog(self.now) > room;
            if full {
                break;
            }
            let mut buffer = std::mem::take(&mut self.buffer);
            let transmit = self.peers[host].worker.poll_transmit(time, &mut buffer);
            if let Some(transmit) = transmit {
                let id = self.packet();
                let packet = &mut self.packets[id as usize];
                (packet.host, packet.answer, packet.congested, packet.hop) = (host as u32, false, false, 0);
                packet.ranks = 1 << self.peers[host].rank;
                packet.bytes.clear();
                packet.bytes.extend_from_slice(buffer.get(..transmit.len).unwrap_or(&[]));
                self.buffer = buffer;
                self.forward(id, card)?;
            } else {
                self.buffer = buffer;
                break;
            }
            if turn > MOST_AT_ONCE {
                return Err(self.stuck());
            }
        }
        if full && !self.peers[host].waits_for_room {
            self.peers[host].waits_for_room = true;
            let wait = self.topology.link(card).time_to_drain_to(self.now, room).max(Nanos(1));
            self.schedule(self.now + wait, Happening::Room(host as u32));
        }
        self.hear(host)?;
        self.set_alarm(host);
        Ok(())
    }

    fn set_alarm(&mut self, host: usize) {
        let peer = &mut self.peers[host];
        let Some(Time(at)) = peer.worker.poll_timeout() else { return };
        // The worker counts in microseconds: never before the one it named, never in the present one.
        let at = Nanos(at.saturating_mul(1000)).max(Nanos((self.now.0 / 1000 + 1) * 1000));
        if peer.wake.is_none_or(|wake| at < wake) {
            peer.wake = Some(at);
            self.schedule(at, Happening::Wake(host as u32));
        }
    }

    /// After the end: everybody has everything, and nothing was contributed twice.
    fn check_end(&self) -> Result<(), SimulationError> {
        for (host, peer) in self.peers.iter().enumerate() {
            let (delivered, queued) = peer.worker.chunks();
            let statistics = peer.worker.statistics();
            let spec = self.job_of(host);
            let chunks = u64::from(spec.iterations) * spec.chunks + statistics.rounds;
            if peer.left != Some(true) {
                return self.wrong(host, "it left before everybody had everything".into());
            }
            let counted = [delivered, queued, statistics.results, statistics.contributions];
            if counted.iter().any(|count| *count != chunks) {
                let what = format!("of {chunks} chunks it counted {counted:?}");
                return self.wrong(host, what);
            }
        }
        Ok(())
    }

    fn stuck(&self) -> SimulationError {
        let describe = |peer: &Peer| {
            let Peer { job, rank, begun, finished, .. } = peer;
            let chunks = peer.worker.chunks();
            format!(
                "job {job} rank {rank}: {finished} of {begun} iterations, {chunks:?} chunks, the aggregator knows {}, deadline {:?}; {:?}",
                self.node.record(*job, *rank).contributed.0,
                peer.worker.poll_timeout(),
                peer.worker.statistics(),
            )
        };
        let waiting: Vec<String> =
            self.peers.iter().filter(|peer| peer.left.is_none()).map(describe).collect();
        SimulationError::Stuck { at: self.now, state: waiting.join("\n") }
    }
}

/// How many chunks each rank of a job has, which its worker knows best.
fn delivered(peers: &[Peer], first: &[usize], jobs: &[JobSpec], job: u16) -> Vec<u64> {
    let (first, world) = (first[usize::from(job)], usize::from(jobs[usize::from(job)].world));
    peers[first..first + world].iter().map(|peer| peer.worker.chunks().0).collect()
}
