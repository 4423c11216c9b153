//! Requests as the ranks of a job send them.

use paatp_common::Seq;
use paatp_common::job::{Address, JobEntry, RankEntry, mapped};
use paatp_common::policy::{Mode, Policy, Staleness};
use paatp_common::tag::{self, rank_key};
use paatp_common::wire::{Chunk, ElementType, HEADER_BYTES, Header, Kind, Operation, Request, flags};

use super::packet::Envelope;

/// A job on the node under test.
#[derive(Clone, Copy, Debug)]
pub struct TestJob {
    /// Number on the node.
    pub number: u16,
    /// Incarnation.
    pub generation: u32,
    /// Ranks.
    pub world: u8,
    /// Slots of its ring.
    pub slots: u32,
    /// First of them.
    pub first_slot: u32,
    /// Most lanes.
    pub lanes: u16,
    /// Contributions that complete a slot; 0 for all.
    pub quorum: u8,
    /// Places in the pool for each chunk; 0: a ring.
    pub k: u8,
    /// The ranks have IPv6 addresses.
    pub v6: bool,
}

impl TestJob {
    /// Job 0: `world` ranks, a ring of `slots` at the beginning of the table.
    #[must_use]
    pub const fn new(world: u8, slots: u32, lanes: u16) -> TestJob {
        TestJob {
            number: 0,
            generation: 0x00C0_FFEE,
            world,
            slots,
            first_slot: 0,
            lanes,
            quorum: 0,
            k: 0,
            v6: false,
        }
    }

    /// The entry that the control plane writes.
    #[must_use]
    pub const fn entry(&self) -> JobEntry {
        let expected = if self.world >= 64 { u64::MAX } else { (1 << self.world) - 1 };
        JobEntry {
            expected,
            generation: self.generation,
            first_slot: self.first_slot,
            slots: self.slots,
            lanes: self.lanes,
            window: 1 + self.slots as u16 / 2,
            world: self.world,
            unused: 0,
            rises: 0,
            k: self.k,
            granted: 9,
            spare: [0; 2],
            policy: self.policy(),
        }
    }

    /// How its ranks wait for one another.
    #[must_use]
    pub const fn policy(&self) -> Policy {
        Policy::settled(Mode { quorum: self.quorum, staleness: Staleness::Bounded(3) }, 5)
    }

    /// A rank's address.
    #[must_use]
    pub const fn address(&self, rank: u8) -> Address {
        let number = self.number as u8;
        if self.v6 {
            [0xFD, 0x50, 0, 0x41, 0, 0, 0, 0, 0, 0, 0, 0, 0, number, 1, rank]
        } else {
            mapped([10, 81, number, rank])
        }
    }

    /// A rank's factor of its salts.
    #[must_use]
    pub const fn key(&self, rank: u8) -> u64 {
        rank_key(0x5EED_0000 + self.number as u64, rank as u16)
    }

    /// The entry of a rank.
    #[must_use]
    pub const fn rank_entry(&self, rank: u8) -> RankEntry {
        RankEntry {
            address: self.address(rank),
            key: self.key(rank),
            gain: -3 + rank as i8,
            reserved: [0; 7],
        }
    }

    /// A frame's surroundings, from a rank to the node.
    #[must_use]
    pub fn envelope(&self, rank: u8) -> Envelope {
        Envelope::from(self.address(rank), self.v6)
    }

    /// A contribution of a rank that asks for the result of the same chunk and has acknowledged nothing yet.
    #[must_use]
    pub const fn data(&self, rank: u8, seq: Seq, chunk: Chunk) -> Request {
        Request {
            kind: Kind::Data,
            flags: 0,
            job: self.number,
            worker: rank,
            generation: self.generation,
            seq,
            want: seq,
            ack: Seq(0),
            progress: Seq(0),
            token: seq.0 ^ 0xABCD_0000,
            bitmap: 1 << rank,
            tag: 0,
            chunk,
            next_exponent: 0,
            attempt: 0,
        }
    }

    /// A wish for the result of `want`, with room for `chunk`.
    #[must_use]
    pub const fn pull(&self, rank: u8, want: Seq, chunk: Chunk) -> Request {
        let mut request = self.data(rank, want, chunk);
        request.kind = Kind::Pull;
        request.bitmap = 0;
        request
    }

    /// The datagram of a request: payload behind it, tag and header check right.
    #[must_use]
    pub fn datagram(&self, request: &Request, payload: &[u32]) -> Vec<u8> {
        let mut request = *request;
        if !payload.is_empty() {
            request.flags |= flags::PAYLOAD;
        }
        let salt = match request.kind {
            Kind::Data => tag::salt(self.key(request.worker), request.seq, request.chunk),
            _ => 0,
        };
        request.tag = tag_of(payload).wrapping_add(salt);
        let mut datagram = request.encode().as_bytes().to_vec();
        datagram.extend(payload.iter().flat_map(|lane| lane.to_be_bytes()));
        datagram
    }

    /// The whole frame of a request.
    #[must_use]
    pub fn frame(&self, request: &Request, payload: &[u32]) -> Vec<u8> {
        self.envelope(request.worker).wrap(&self.datagram(request, payload))
    }
}

/// A sum of `f32` values over `lanes` lanes.
#[must_use]
pub const fn sum_of(lanes: u16) -> Chunk {
    Chunk::new(Operation::Sum, ElementType::F32, lanes, -3)
}

/// Lanes that differ by rank and chunk and whose sums over `world` ranks stay below 2^32.
#[must_use]
pub fn lanes_of(world: u8, rank: u8, seq: Seq, lanes: u16) -> Vec<u32> {
    let bound = u64::from(u32::MAX) / u64::from(world.max(1));
    (0..u64::from(lanes))
        .map(|lane| {
            let x = (lane + 1) << 40 ^ u64::from(seq.0) << 8 ^ (u64::from(rank) + 1);
            let x = x.wrapping_mul(0x9E37_79B9_7F4A_7C15);
            ((x ^ x >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 16) % bound
        })
        .map(|lane| lane as u32)
        .collect()
}

/// The checksum by its definition, `Σ (2(N−i)−1)·wordᵢ`.
#[must_use]
pub fn tag_of(payload: &[u32]) -> u64 {
    let words = payload.len() as u64 / 2;
    payload.chunks_exact(2).zip(0..).fold(0, |sum: u64, (pair, i)| {
        let word = u64::from(pair[0]) << 32 | u64::from(pair[1]);
        sum.wrapping_add((2 * (words - i) - 1).wrapping_mul(word))
    })
}

/// The lanes after a datagram's header.
#[must_use]
pub fn payload_of(datagram: &[u8]) -> Vec<u32> {
    let payload = datagram.get(HEADER_BYTES..).unwrap_or_default();
    payload.chunks_exact(4).map(|b| u32::from_be_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Changes a datagram's header and makes its check right again.
pub fn edit(datagram: &mut [u8], change: impl FnOnce(&mut Header)) {
    let header = Header::of_mut(datagram).expect("a whole header");
    change(header);
    header.seal();
}
