//! The chunks that a worker may still be asked about, each with its contribution as it was sent.
//!
//! **A contribution is quantised once.** Retransmissions and redos send the retained bytes, next exponent included
//! (protocol-rules F1 ii, part 2.4).
//!
//! How many: a redo may ask for any chunk that some rank has not acknowledged. Chunk k is made when result k − W is here,
//! which holds this rank's own contribution, which was taken while k − W was less than S ahead of that acknowledgement.
//! So S + W contributions suffice; S would not, because chunk k takes its place before the aggregator has accepted it.

use alloc::vec;
use alloc::vec::Vec;

use paatp_common::limits::MAX_ATTEMPTS;
use paatp_common::policy::Told;
use paatp_common::wire::Chunk;

use crate::membership::Membership;
use crate::synchronisation::Synchronisation;
use crate::time::Time;

/// What became of a chunk's contribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contribution {
    /// To be sent, or sent again.
    Queued,
    /// In the request with this token.
    UnderWay(u32),
    /// In the slot, under the entry's attempt.
    Acknowledged,
}

/// What became of the wish for a chunk's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    /// Not asked for.
    Idle,
    /// The request with this token asks for it.
    Asked(u32),
    /// It should have been complete, and was not: only polled, or asked for along with a contribution.
    Refused,
    /// Here.
    Delivered,
}

/// One chunk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    position: u64,
    /// What the ranks agree on; results are checked against it.
    pub chunk: Chunk,
    /// Tag of the contribution, salt included. The attempt is not part of it.
    pub tag: u64,
    /// Exponent proposed for the chunk one window later.
    pub next_exponent: i8,
    /// Exponent agreed for that chunk; valid once delivered (protocol-rules F5).
    pub agreed: i8,
    /// The next chunks' values are not fit to be sent.
    pub flagged: bool,
    /// Attempt that the contribution is sent under.
    pub attempt: u8,
    /// Results of this attempt that failed their check.
    pub failed: u8,
    /// Results of any attempt that failed their check, in a row.
    pub doubted: u8,
    /// Contributions that reached the aggregator damaged, in a row.
    pub refused: u8,
    /// The contribution is queued, but not before this time.
    pub held: Option<Time>,
    /// It has been sent before.
    pub sent: bool,
    /// It was a switch that acknowledged it: the contribution is in a partial sum, which may get lost.
    pub entrusted: bool,
    /// It has been asked for before.
    pub asked: bool,
    /// This rank never contributed to it, and need not: it was complete before.
    pub absent: bool,
    /// The result that is here holds this rank's contribution.
    pub included: bool,
    /// Ranks in that result.
    pub contributors: u16,
    /// The rank whose values could not be reduced, as that result tells.
    pub culprit: Option<u8>,
    /// How ranks waited for one another there.
    pub synchronisation: Synchronisation,
    /// The last refusal came with a result, which took the place of the reason: ask again without a wish.
    pub bare: bool,
    pub contribution: Contribution,
    pub wish: Wish,
}

impl Entry {
    /// A chunk that was never sent.
    pub const fn new(position: u64, chunk: Chunk, next_exponent: i8) -> Entry {
        Entry {
            position,
            chunk,
            tag: 0,
            next_exponent,
            agreed: 0,
            flagged: false,
            attempt: 0,
            failed: 0,
            doubted: 0,
            refused: 0,
            held: None,
            sent: false,
            entrusted: false,
            asked: false,
            absent: false,
            included: true,
            contributors: 0,
            culprit: None,
            synchronisation: Synchronisation { epoch: 0, told: Told(0) },
            bare: false,
            contribution: Contribution::Queued,
            wish: Wish::Idle,
        }
    }

    /// A chunk of `lanes` lanes, as it is thought, that others contribute to: this rank has no operation for it yet.
    pub const fn foreign(position: u64, lanes: u16) -> Entry {
        let chunk = Chunk { operation_and_type: 0, lanes, exponent: 0, root: 0 };
        let mut entry = Entry::new(position, chunk, i8::MIN);
        (entry.absent, entry.contribution) = (true, Contribution::Acknowledged);
        entry
    }

    /// The contribution is to be sent under another attempt. False if there are none left.
    pub fn restart(&mut self, attempt: u8) -> bool {
        self.attempt = attempt;
        self.failed = 0;
        self.held = None;
        self.contribution = Contribution::Queued;
        attempt <= MAX_ATTEMPTS
    }
}

/// Entries and their payloads, by position modulo S + W.
#[derive(Debug)]
pub(crate) struct Ring {
    entries: Vec<Entry>,
    /// One payload an entry. Zeroed pages, so that memory is only taken up as far as it is used.
    payloads: Vec<u8>,
    payload_bytes: usize,
}

/// Position of an entry that holds no chunk.
const NOWHERE: u64 = u64::MAX;

impl Ring {
    pub fn new(membership: &Membership) -> Ring {
        let length = membership.slots as usize + usize::from(membership.window);
        let payload_bytes = usize::from(membership.lanes) * 4;
        Ring {
            entries: vec![Entry::new(NOWHERE, Chunk::default(), 0); length],
            payloads: vec![0; length * payload_bytes],
            payload_bytes,
        }
    }

    /// The entry of a chunk, if it is retained.
    pub fn get(&self, position: u64) -> Option<&Entry> {
        self.entries.get(self.index(position)).filter(|entry| entry.position == position)
    }

    /// As [`Ring::get`], to change it.
    pub fn get_mut(&mut self, position: u64) -> Option<&mut Entry> {
        let index = self.index(position);
        self.entries.get_mut(index).filter(|entry| entry.position == position)
    }

    /// Takes in a new chunk, in place of the one S + W before.
    pub fn put(&mut self, entry: Entry) {
        let index = self.index(entry.position);
        if let Some(place) = self.entries.get_mut(index) {
            *place = entry;
        }
    }

    /// A chunk's payload of `lanes` lanes.
    pub fn payload(&self, position: u64, lanes: u16) -> &[u8] {
        let start = self.index(position) * self.payload_bytes;
        self.payloads.get(start..start + usize::from(lanes) * 4).unwrap_or(&[])
    }

    /// As [`Ring::payload`], to write it.
    pub fn payload_mut(&mut self, position: u64, lanes: u16) -> &mut [u8] {
        let start = self.index(position) * self.payload_bytes;
        self.payloads.get_mut(start..start + usize::from(lanes) * 4).unwrap_or(&mut [])
    }

    fn index(&self, position: u64) -> usize {
        (position % self.entries.len() as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_retained_for_slots_plus_window() {
        let membership = Membership {
            job: 0,
            generation: 1,
            nonce: 2,
            rank: 0,
            world: 2,
            lanes: 32,
            window: 2,
            slots: 4,
            seating: None,
        };
        let mut ring = Ring::new(&membership);
        assert!(ring.get(0).is_none());
        for position in 0..7 {
            ring.put(Entry::new(position, Chunk::default(), 0));
            ring.payload_mut(position, 32).fill(position as u8);
        }
        assert!(ring.get(0).is_none() && ring.get_mut(6).is_some());
        assert!((1..7).all(|position| ring.get(position).is_some()));
        assert!((1..7).all(|position| ring.payload(position, 32) == [position as u8; 128]));
    }
}
