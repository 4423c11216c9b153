//! What an aggregator is to the path of a request: its memory, and what is done with a frame in the end.

use crate::counter::{Event, Refusal};
use crate::job::{Address, JobEntry, RankEntry};
use crate::levels::{Above, KeySum, Link, Vouching};
use crate::limits::{MAX_PORTS, MAX_RANKS};
use crate::policy::Policy;
use crate::pool::{Pool, Search};
use crate::progress::{Members, Progress};
use crate::slot::{Rules, Slot};
use crate::wire::Header;

/// Memory of an aggregator: its tables, its slots, and the payload of the request in hand.
///
/// Payload passes walk `blocks` whole blocks and return `None` where payload or slot are shorter.
pub trait Machine {
    /// Names one job's tables.
    type JobRef: Copy;
    /// Names one slot.
    type SlotRef: Copy;

    /// It passes sums on to a parent, and takes such sums (docs/protocol.md, Levels). Where it does not, nothing of that is
    /// left in the program, and the functions that say so are not called.
    const LEVELS: bool = false;

    /// The header of the request in hand, which becomes the answer's. Asked for anew wherever it is needed: what the
    /// kernel's verifier knows of a packet pointer grows with every check, and a pointer kept over a pass would carry
    /// along how far that went.
    fn header(&mut self) -> &mut Header;

    /// The tables of a job; `number` is below [`MAX_JOBS`](crate::limits::MAX_JOBS).
    fn find(&self, number: u16) -> Option<Self::JobRef>;
    /// A job's entry.
    fn job(&self, job: Self::JobRef) -> &JobEntry;
    /// The job's rules, read anew: what was read before the lock may be over (protocol-rules F11).
    fn rules(&self, job: Self::JobRef) -> Rules;
    /// A job's policy, read anew.
    fn policy(&self, job: Self::JobRef) -> Policy;
    /// Replaces a job's policy, unless it has become another one meanwhile.
    fn replace_policy(&mut self, job: Self::JobRef, from: Policy, to: Policy);
    /// The progress of a job.
    fn progress(&self, job: Self::JobRef) -> &Progress;
    /// [`Progress::recompute`], in whatever way the machine loops.
    fn recompute(&mut self, job: Self::JobRef, members: Members);
    /// The entry of a rank; `number` is below [`MAX_JOBS`](crate::limits::MAX_JOBS), `rank` below [`MAX_RANKS`](crate::limits::MAX_RANKS).
    fn rank(&self, number: u16, rank: u8) -> Option<&RankEntry>;
    /// A slot by its index in the node's table.
    fn slot(&self, index: u32) -> Option<Self::SlotRef>;
    /// A slot's header. To change it, hold the lock.
    fn state(&mut self, slot: Self::SlotRef) -> &mut Slot;
    /// Takes a slot's lock; false where it stays taken.
    fn lock(&mut self, slot: Self::SlotRef) -> bool;
    /// Gives the lock back.
    fn unlock(&mut self, slot: Self::SlotRef);
    /// The slots that jobs share.
    fn pool(&self) -> Pool;
    /// Carries a search out ([`Search::visit`] for each of its turns), in whatever way the machine loops.
    fn search(&mut self, search: Search) -> Search;
    /// Takes the lock of the chunks whose home a slot is; false where it stays taken. Never while a slot's lock is held.
    fn lock_home(&mut self, slot: Self::SlotRef) -> bool;
    /// Gives that lock back.
    fn unlock_home(&mut self, slot: Self::SlotRef);
    /// Counts by [`Refusal::counter`] or [`Event::counter`].
    fn count(&mut self, counter: u32);
    /// The same number. The kernel's verifier must not know that: it walks what follows once for each value that it
    /// knows on some way there, and the number of ways multiplies.
    fn forget(&self, value: u64) -> u64;

    /// Counts a refusal.
    #[inline(always)]
    fn refuse(&mut self, refusal: Refusal) {
        self.count(refusal.counter());
    }
    /// Counts an event.
    #[inline(always)]
    fn note(&mut self, event: Event) {
        self.count(event.counter());
    }

    /// Writes the payload to the slot's lanes; returns its tag.
    fn store(&mut self, slot: Self::SlotRef, blocks: u32) -> Option<u64>;
    /// Adds the payload to the slot's lanes; returns its tag.
    fn add(&mut self, slot: Self::SlotRef, blocks: u32) -> Option<u64>;
    /// Takes an addition back.
    fn subtract(&mut self, slot: Self::SlotRef, blocks: u32);
    /// Keeps the larger of each lane; returns the tags of the slot's lanes before and after.
    fn maximum(&mut self, slot: Self::SlotRef, blocks: u32) -> Option<(u64, u64)>;
    /// The payload's tag.
    fn verify(&mut self, blocks: u32) -> Option<u64>;
    /// Writes the slot's lanes over the payload.
    fn emit(&mut self, slot: Self::SlotRef, blocks: u32) -> Option<()>;

    /// Levels: where a job's sums go; `number` is below [`MAX_JOBS`](crate::limits::MAX_JOBS).
    fn link(&self, _number: u16) -> Option<&Link> {
        None
    }
    /// Levels: what the parent told; `number` is below [`MAX_JOBS`](crate::limits::MAX_JOBS).
    fn above(&self, _number: u16) -> Option<&Above> {
        None
    }
    /// Levels: the job's sums go to a parent ([`JobEntry::rises`]), read anew.
    fn rises(&self, _job: Self::JobRef) -> bool {
        false
    }
    /// Levels: number of UDP ports that requests come to. Answers to requests of ranks that are one at the parent come to
    /// those after them, one for each rank.
    fn ports(&self) -> u16 {
        0
    }
    /// Levels: carries a walk out over the ranks of a job ([`KeySum::visit`]), in whatever way the machine loops.
    fn sum_keys(&mut self, _number: u16, keys: KeySum) -> KeySum {
        keys
    }
    /// Levels: carries a walk out over the ranks of a job ([`Vouching::visit`]), in whatever way the machine loops.
    fn vouch(&mut self, _job: Self::JobRef, _number: u16, vouching: Vouching) -> Vouching {
        vouching
    }
    /// Levels: [`Machine::emit`], in whatever way rare passes loop.
    fn lift(&mut self, _slot: Self::SlotRef, _blocks: u32) -> Option<()> {
        None
    }
    /// Levels: [`Machine::store`], likewise, without a tag.
    fn replace(&mut self, _slot: Self::SlotRef, _blocks: u32) -> Option<()> {
        None
    }
}

/// What the layers below told of a request.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// Source address of the IP packet.
    pub source: Address,
    /// The IP header was marked "congestion experienced".
    pub congested: bool,
    /// Bytes after the header.
    pub payload_bytes: u32,
    /// The UDP port that it came to, counted from the node's first.
    pub port: u16,
}

/// What to do with the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing is answered; the refusal is counted already.
    Drop(Refusal),
    /// Send the header back, with the payload (same length as the request's) or without.
    Answer {
        /// The payload holds a result.
        payload: bool,
    },
    /// Levels: send it to the job's parent.
    Up(Relay),
    /// Levels: send it to a rank, whole.
    Down(Relay),
}

/// Where a frame goes on to. One word: in the kernel parts of a word on the stack cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relay(u64);

impl Relay {
    /// Place of the port that it leaves from, which is below [`MAX_PORTS`] + [`MAX_RANKS`].
    const FROM: u32 = 49;
    const _PORTS_FIT: () = assert!(MAX_PORTS as u32 + MAX_RANKS as u32 + 1 < 1 << (64 - Relay::FROM));

    #[inline(always)]
    pub(super) const fn up(number: u16, rank: u8, port: u16, payload: bool) -> Relay {
        Relay(Relay::down(number, rank).0 | (port as u64) << 32 | (payload as u64) << 48)
    }

    #[inline(always)]
    pub(super) const fn down(number: u16, rank: u8) -> Relay {
        Relay(number as u64 | (rank as u64) << 16)
    }

    /// From this UDP port, counted from the node's first, instead of the one that it came to.
    #[inline(always)]
    pub(super) const fn from(self, port: u16) -> Relay {
        Relay(self.0 | (port as u64 + 1) << Relay::FROM)
    }

    /// One more than the UDP port that it leaves from, counted from the node's first. 0: the one that it came to.
    #[inline(always)]
    #[must_use]
    pub const fn source(self) -> u16 {
        (self.0 >> Relay::FROM) as u16
    }

    /// Number of the job here.
    #[inline(always)]
    #[must_use]
    pub const fn number(self) -> u16 {
        self.0 as u16
    }

    /// Whose request it is, or whose is answered.
    #[inline(always)]
    #[must_use]
    pub const fn rank(self) -> u8 {
        (self.0 >> 16) as u8
    }

    /// UDP port of the parent.
    #[inline(always)]
    #[must_use]
    pub const fn port(self) -> u16 {
        (self.0 >> 32) as u16
    }

    /// Of a request: something follows the header.
    #[inline(always)]
    #[must_use]
    pub const fn has_payload(self) -> bool {
        self.0 >> 48 & 1 == 1
    }
}
