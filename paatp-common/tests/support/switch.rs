//! A switch that owns its memory and moves whole frames: what `p4/paatp.p4` is to do with each.

use paatp_common::frame::{self, Frame, Layout, PLAIN_HEADER};
use paatp_common::job::{Address, mapped};
use paatp_common::lanes::SlotBlock;
use paatp_common::limits::{LANES_PER_BLOCK, MAX_JOBS, MAX_RANKS};
use paatp_common::switch::{Cell, Count, Outcome, Passing, Reached, Side, Switch, SwitchJob, address_copy};
use paatp_common::wire::{HEADER_BYTES, Header, Kind, MAGIC};

use super::packet::{internet_checksum, local};
use super::requests::TestJob;

/// Where a frame enters or leaves the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Port {
    /// The port of a rank.
    Rank(u8),
    /// The port of the aggregator.
    Node,
}

impl Port {
    /// The address of Ethernet of whoever is there.
    #[must_use]
    pub const fn mac(self) -> [u8; 6] {
        match self {
            Port::Rank(rank) => [2, 0x50, 0, 0, 1, rank],
            Port::Node => [2, 0x50, 0, 0, 0, 1],
        }
    }

    fn of(mac: &[u8]) -> Option<Port> {
        let rank = Port::Rank(*mac.last()?);
        [Port::Node, rank].into_iter().find(|port| port.mac() == mac)
    }
}

/// A job as the control plane installs it.
#[derive(Clone, Debug)]
pub struct Installed {
    /// Number on the node.
    pub number: u16,
    /// Incarnation.
    pub generation: u32,
    /// Ranks behind the switch.
    pub local: u64,
    /// Slots of the ring.
    pub reach: u32,
    /// Places of the table.
    pub k: u8,
    /// Window stamped into answers.
    pub granted: u16,
    /// How long a slot may be untouched.
    pub patience: u64,
    /// By rank.
    pub addresses: Vec<Address>,
}

impl Installed {
    /// A job of the tests, all its ranks behind the switch.
    #[must_use]
    pub fn of(job: &TestJob, k: u8, patience: u64) -> Installed {
        Installed {
            number: job.number,
            generation: job.generation,
            local: job.entry().expected,
            reach: job.slots,
            k,
            granted: job.entry().granted,
            patience,
            addresses: (0..job.world).map(|rank| job.address(rank)).collect(),
        }
    }
}

/// Tables and memory of a switch.
#[derive(Debug)]
pub struct OwnedSwitch {
    /// The jobs that it knows.
    pub jobs: Vec<Installed>,
    /// By job number.
    pub reached: Vec<Reached>,
    /// Its slots.
    pub cells: Vec<Cell>,
    /// Their lanes.
    pub lanes: Vec<SlotBlock>,
    /// Blocks of each.
    pub blocks: usize,
    /// By [`Count`].
    pub counts: [u64; Count::COUNT],
    /// Time, as a test wants it.
    pub now: u64,
    /// UDP ports of ranks, by job and rank, as answers to them have told; 0: none has.
    ports: Vec<[u16; MAX_RANKS]>,
}

impl OwnedSwitch {
    /// A switch without jobs.
    #[must_use]
    pub fn new(slots: usize, blocks: usize) -> OwnedSwitch {
        OwnedSwitch {
            jobs: Vec::new(),
            reached: vec![Reached::default(); MAX_JOBS],
            cells: vec![Cell::default(); slots],
            lanes: vec![SlotBlock::default(); slots * blocks],
            blocks,
            counts: [0; Count::COUNT],
            now: 0,
            ports: vec![[0; MAX_RANKS]; MAX_JOBS],
        }
    }

    /// Puts a job in force, in place of an older generation of it.
    pub fn install(&mut self, job: Installed) {
        self.jobs.retain(|other| other.number != job.number);
        self.jobs.push(job);
    }

    /// How often something happened.
    #[must_use]
    pub const fn counted(&self, what: Count) -> u64 {
        self.counts[what as usize]
    }

    /// A datagram of ours.
    pub fn datagram(&mut self, datagram: &mut [u8], side: Side, congested: bool) -> Outcome {
        let jobs: Vec<SwitchJob<'_>> = self
            .jobs
            .iter()
            .map(|job| SwitchJob {
                number: job.number,
                generation: job.generation,
                local: job.local,
                reach: job.reach,
                k: job.k,
                granted: job.granted,
                patience: job.patience,
                addresses: &job.addresses,
            })
            .collect();
        let mut switch = Switch {
            jobs: &jobs,
            reached: &mut self.reached,
            cells: &mut self.cells,
            lanes: &mut self.lanes,
            blocks: self.blocks,
            counts: &mut self.counts,
        };
        switch.handle(datagram, Passing { side, congested, now: self.now })
    }

    /// One frame: what leaves, and where.
    pub fn frame(&mut self, from: Port, frame: &[u8]) -> Vec<(Port, Vec<u8>)> {
        let mut frame = frame.to_vec();
        let forwarded = Port::of(&frame[..6]);
        let outcome = if is_ours(&frame, from) {
            let congested = frame[15] & 3 == 3;
            let side = match from {
                Port::Rank(_) => Side::Worker(mapped([frame[26], frame[27], frame[28], frame[29]])),
                Port::Node => Side::Node,
            };
            self.datagram(&mut frame[PLAIN_HEADER..], side, congested)
        } else {
            Outcome::Forward
        };
        let mut out = Vec::new();
        match outcome {
            Outcome::Forward => out.extend(forwarded.map(|port| (port, frame))),
            Outcome::Answer => {
                let layout = Layout { tags: 0, is_v6: false };
                frame::turn_round(&mut Frame::new(&mut frame), layout, 0).expect("parsed before");
                frame.truncate(PLAIN_HEADER + HEADER_BYTES);
                out.push((from, frame));
            }
            Outcome::Up { congested } => {
                frame[15] |= if congested { 3 } else { 0 };
                seal(&mut frame);
                out.push((Port::Node, frame));
            }
            Outcome::Down { others } => {
                let job = Header::of(&frame[PLAIN_HEADER..]).expect("parsed before").job();
                for rank in (0..MAX_RANKS as u8).filter(|rank| others >> rank & 1 == 1) {
                    out.extend(self.copy(&frame, job, rank).map(|copy| (Port::Rank(rank), copy)));
                }
                out.extend(forwarded.map(|port| (port, frame)));
            }
        }
        if from == Port::Node || outcome == Outcome::Answer {
            out.iter().for_each(|(_, frame)| self.learn_port(frame));
        }
        out.sort();
        out
    }

    /// A result for a rank that did not ask. None where its port is not known.
    fn copy(&self, frame: &[u8], job: u16, rank: u8) -> Option<Vec<u8>> {
        let port = self.ports[usize::from(job)][usize::from(rank)];
        let installed = self.jobs.iter().find(|installed| installed.number == job)?;
        let mut copy = frame.to_vec();
        copy[..6].copy_from_slice(&Port::Rank(rank).mac());
        copy[30..34].copy_from_slice(&installed.addresses[usize::from(rank)][12..]);
        copy[36..38].copy_from_slice(&port.to_be_bytes());
        address_copy(Header::of_mut(&mut copy[PLAIN_HEADER..])?, rank);
        seal(&mut copy);
        (port != 0).then_some(copy)
    }

    /// Answers to a rank tell where it listens.
    fn learn_port(&mut self, frame: &[u8]) {
        let header = is_ours(frame, Port::Node).then(|| Header::of(&frame[PLAIN_HEADER..])).flatten();
        let Some(header) = header.filter(|header| header.check().is_ok()) else { return };
        let is_known = self.jobs.iter().any(|job| {
            (job.number, job.generation) == (header.job(), header.generation())
                && job.local.checked_shr(header.worker().into()).is_some_and(|bit| bit & 1 == 1)
        });
        if is_known && header.kind() == Some(Kind::Answer) {
            self.ports[usize::from(header.job())][usize::from(header.worker())] =
                u16::from_be_bytes([frame[36], frame[37]]);
        }
    }
}

/// An untagged IPv4 frame of exactly the right lengths, with our magic, to the node or from it.
fn is_ours(frame: &[u8], from: Port) -> bool {
    let word = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
    let [.., a, b, c, d] = local(false);
    frame.len() >= PLAIN_HEADER + HEADER_BYTES
        && word(12) == 0x0800
        && (frame[14], frame[23]) == (0x45, 17)
        && word(20) & 0x3FFF == 0
        && usize::from(word(16)) + 14 == frame.len()
        && word(38) + 20 == word(16)
        && word(PLAIN_HEADER) == MAGIC
        && (if from == Port::Node { &frame[26..30] } else { &frame[30..34] }) == [a, b, c, d]
}

/// The checksum of IPv4 anew, none of UDP.
fn seal(frame: &mut [u8]) {
    frame[24..26].fill(0);
    let sum = internet_checksum(&frame[14..34]);
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
    frame[40..42].fill(0);
}

/// The lanes of a slot, in the order of the wire.
#[must_use]
pub fn lanes_of_cell(switch: &OwnedSwitch, index: usize) -> Vec<u32> {
    let lanes = usize::from(switch.cells[index].chunk.lanes);
    let blocks = &switch.lanes[index * switch.blocks..][..lanes / LANES_PER_BLOCK];
    blocks.iter().flatten().flat_map(|word| [(word >> 32) as u32, *word as u32]).collect()
}
