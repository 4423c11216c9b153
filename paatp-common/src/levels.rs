//! What a lower node knows of its parent: where it is, what it told of the job, and how answers find back to the ranks.
//!
//! [`crate::aggregate`] has the path of requests up and answers down; docs/protocol.md, Levels, says why it is as it is.

use bytemuck::{Pod, Zeroable};

use crate::job::{Address, RankEntry};
use crate::layout::described;
use crate::limits::{MAX_ATTEMPTS, MAX_RANKS};
use crate::mind::{negative, opaque, pick};
use crate::progress::{Credit, Progress, Shared, Word, later};
use crate::seq::Seq;
use crate::wire::{Header, Redo, flags};

/// Where a job's sums go. One for each job, by number; the control plane writes it before the job's entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Link {
    /// Address of the parent.
    pub parent: Address,
    /// Ethernet address of the next hop towards it.
    pub mac: [u8; 6],
    /// Its first UDP port.
    pub port_base: u16,
    /// Number of its UDP ports. 0: the job has no parent.
    pub ports: u16,
    /// The job's number there.
    pub number: u16,
    /// One more than the number here of the job whose number at its parent is this entry's index. 0: there is none.
    pub below: u16,
    /// One more than the rank of the parent's job that all ranks here are together (protocol-rules F22). 0: each has its
    /// own name there.
    pub child: u8,
    /// With that: number of ranks of the root's job.
    pub seats: u8,
    /// Ranks that stand behind one switch: its partial sums, which come from the address of any of them, may hold all of
    /// them. It knows their addresses itself.
    pub switched: u64,
    /// With `child`: the keys of all ranks of the job together.
    pub keys: u64,
}

const _: () = assert!(size_of::<Link>() == 48);
described!(Link { parent, mac, port_base, ports, number, below, child, seats, switched, keys });

impl Link {
    /// The job has a parent.
    #[inline(always)]
    #[must_use]
    pub const fn is_set(&self) -> bool {
        self.ports != 0
    }

    /// Contributors of every result of a job whose ranks are one at the parent: all of the root's. Without a branch.
    #[inline(always)]
    #[must_use]
    pub const fn everybody(&self) -> u64 {
        u64::MAX >> ((MAX_RANKS as u32 - self.seats as u32) & 63)
    }

    /// UDP port of the parent for a chunk.
    #[inline(always)]
    #[must_use]
    pub const fn port(&self, seq: Seq) -> u16 {
        let ports = if self.ports == 0 { 1 } else { self.ports as u32 };
        self.port_base.wrapping_add((seq.0 % ports) as u16)
    }
}

/// The way to a host on the same network: its Ethernet address and its UDP port, in one word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Way(u64);

impl Way {
    /// To this port behind this Ethernet address.
    #[inline(always)]
    #[must_use]
    pub const fn new(mac: [u8; 6], port: u16) -> Way {
        let [a, b, c, d, e, f] = mac;
        Way(u64::from_le_bytes([a, b, c, d, e, f, 0, 0]) | (port as u64) << 48)
    }

    /// The Ethernet address.
    #[inline(always)]
    #[must_use]
    pub const fn mac(self) -> [u8; 6] {
        let [a, b, c, d, e, f, ..] = self.0.to_le_bytes();
        [a, b, c, d, e, f]
    }

    /// The UDP port.
    #[inline(always)]
    #[must_use]
    pub const fn port(self) -> u16 {
        (self.0 >> 48) as u16
    }

    /// It leads somewhere.
    #[inline(always)]
    #[must_use]
    pub const fn is_known(self) -> bool {
        self.0 != 0
    }
}

/// What the parent told of a job, and where the job's ranks are. The data plane writes it, from several CPUs without a
/// lock: numbers only rise, and one that gets lost is told again.
#[derive(Debug)]
#[repr(C)]
pub struct Above {
    min_ack: Word,
    low: Word,
    high: Word,
    told: Word,
    redo: RedoWord,
    ways: [Shared; MAX_RANKS],
}

const _: () = assert!(size_of::<Above>() == 552);
described!(Above { min_ack, low, high, told, redo, ways });

impl Default for Above {
    fn default() -> Self {
        Above {
            min_ack: Word::default(),
            low: Word::default(),
            high: Word::default(),
            told: Word::default(),
            redo: RedoWord::default(),
            ways: core::array::from_fn(|_| Shared::default()),
        }
    }
}

/// The parent's word on a job, as it is passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Lowest acknowledgement of all ranks, or less.
    pub min_ack: Seq,
    /// Lowest progress, p_min, or less.
    pub low: Seq,
    /// Highest progress, p_max, or less.
    pub high: Seq,
    /// The slowest rank.
    pub slowest: u8,
    /// What is told of the policy.
    pub told: u8,
    /// Epoch of the policy.
    pub epoch: u8,
    /// A chunk that is being redone; attempt 0 if none is. What is told of one that is over does no harm.
    pub redo: Redo,
}

impl Report {
    /// Nothing is known.
    pub const NONE: Report = Report {
        min_ack: Seq(0),
        low: Seq(0),
        high: Seq(0),
        slowest: 0,
        told: 0,
        epoch: 0,
        redo: Redo { seq: Seq(0), attempt: 0 },
    };
}

/// A chunk that is being redone and its attempt, in one word, so that nobody reads those of two redos together: seq (32
/// bits), attempt (3), the rest for the lower bits of the generation. (One of 2^29 other generations looks the same: its
/// redo, which is told until the next answer comes from above, asks for a chunk once more than needed.)
#[derive(Debug, Default)]
#[repr(transparent)]
struct RedoWord(Shared);

impl RedoWord {
    /// Bits below those of the generation.
    const SHIFT: u32 = 35;
    const _ATTEMPTS_FIT: () = assert!(MAX_ATTEMPTS < 8);

    #[inline(always)]
    fn set(&self, generation: u32, seq: u32, attempt: u64) {
        self.0.store((generation as u64) << Self::SHIFT | (attempt & 7) << 32 | seq as u64);
    }

    /// Attempt 0 if the word is of another generation.
    #[inline(always)]
    fn get(&self, generation: u32) -> Redo {
        let word = self.0.load() ^ (generation as u64) << Self::SHIFT;
        let is_same = negative(((word >> Self::SHIFT) as i64).wrapping_sub(1));
        let word = word & is_same;
        Redo { seq: Seq(word as u32), attempt: (word >> 32) as u8 & 7 }
    }
}

/// What one answer of a parent tells of its job. In whole words: a header that is copied to the stack cannot be read there
/// in pieces, which is what the kernel's verifier wants.
#[derive(Clone, Copy, Debug)]
pub struct Heard {
    low: u32,
    high: u32,
    min_ack: u32,
    redo: u64,
    attempt: u64,
    told: u64,
    is_result: bool,
    proves: bool,
}

/// Up to where a parent is believed: how far this node's own ranks are, and S. No number that it tells can be more than
/// 2 S above their lowest acknowledgement (protocol-rules F13): min_ack is not above it, p_min and p_max are below
/// min_ack + S, and what this node knows of its ranks may be S behind.
#[derive(Clone, Copy, Debug)]
pub struct Reach {
    /// Lowest acknowledgement of this node's ranks.
    pub floor: Seq,
    /// S.
    pub slots: u32,
}

impl Heard {
    /// What an answer says, unless it is REJOIN. With a `window`: a result of chunk k proves that every rank has contributed
    /// it, which nobody can without all results up to k − W (protocol-rules F5).
    #[inline(always)]
    #[must_use]
    pub fn of(answer: &Header, window: Option<u16>) -> Heard {
        let attempt = if answer.has(flags::REDO) { answer.tag() & 0xFF } else { 0 };
        // There are no more; a forged one would end the job.
        let attempt = if attempt > MAX_ATTEMPTS as u64 { 0 } else { attempt };
        let is_result = answer.has(flags::RESULT);
        let told = (answer.operation_or_epoch() as u64) << 16 | (answer.told() as u64) << 8;
        Heard {
            low: answer.raw_ack(),
            high: answer.raw_progress(),
            min_ack: if is_result {
                answer.raw_want().wrapping_add(1).wrapping_sub(window.unwrap_or(0).into())
            } else {
                answer.raw_want()
            },
            redo: answer.tag(),
            attempt,
            told: told | answer.rank() as u64,
            is_result,
            proves: window.is_some(),
        }
    }
}

impl Above {
    /// Takes in what an answer of the parent tells of the job.
    #[inline(always)]
    pub fn learn(&self, generation: u32, heard: Heard, reach: Reach) {
        raise(&self.low, generation, heard.low, reach);
        raise(&self.high, generation, heard.high, reach);
        if !heard.is_result || heard.proves {
            raise(&self.min_ack, generation, heard.min_ack, reach);
        }
        if !heard.is_result {
            self.redo.set(generation, Redo::from_word(heard.redo).seq.0, heard.attempt);
            self.told.set(generation, heard.told as u32);
        }
    }

    /// Lowest acknowledgement of all ranks, or less, where that of this node's ranks is `own`. It is not above that,
    /// whatever was forged. Nor is it more than a window W below, whatever news got lost: result k holds a contribution of
    /// every rank, and none contributes k without all results up to k − W (protocol-rules F5).
    #[inline(always)]
    #[must_use]
    pub fn floor(&self, generation: u32, own: Seq, window: u16) -> Seq {
        let told = i64::from(Seq(self.min_ack.get(generation)).since(own) as i32);
        // The lower of both, without a branch.
        let told = own.plus((told as u64 & negative(told)) as u32);
        later(own.minus(window.into()), told)
    }

    /// What is known. For an answer without the result of `want`: a chunk below p_min is complete at the root, which does
    /// not mean that its result is here, so no more is told than that those before `want` are.
    #[inline(always)]
    #[must_use]
    pub fn report(&self, generation: u32, want: Seq) -> Report {
        let low = Seq(self.low.get(generation));
        let told = self.told.get(generation);
        // The earlier of two, without a branch.
        let ahead = i64::from(want.since(low) as i32);
        let behind = ahead as u64 & negative(ahead);
        Report {
            min_ack: Seq(self.min_ack.get(generation)),
            low: low.plus(behind as u32),
            high: Seq(self.high.get(generation)),
            slowest: told as u8,
            told: (told >> 8) as u8,
            epoch: (told >> 16) as u8,
            redo: self.redo.get(generation),
        }
    }

    /// The way to a rank (modulo [`MAX_RANKS`]), if a request of it has gone up.
    #[inline(always)]
    pub fn way(&self, rank: usize) -> Way {
        Way(pick(&self.ways, rank).load())
    }

    /// A request of a rank (modulo [`MAX_RANKS`]) came by this way.
    #[inline(always)]
    pub fn remember(&self, rank: usize, way: Way) {
        pick(&self.ways, rank).store(way.0);
    }
}

/// The number is at least this much, unless that cannot be. Two CPUs may write in either order: the lower value that can
/// remain is safe.
#[inline(always)]
fn raise(word: &Word, generation: u32, value: u32, reach: Reach) {
    let before = word.get(generation);
    let limit = reach.floor.plus(reach.slots.wrapping_mul(2));
    // What was there instead of what is beyond the limit, without a branch.
    let beyond = negative(i64::from(limit.since(Seq(value)) as i32)) as u32;
    let value = value ^ (value ^ before) & beyond;
    word.set(generation, later(Seq(before), Seq(value)).0);
}

/// A walk over the ranks of a lower node's sum: their keys add up, and each is credited with the progress that the sum
/// tells. In pieces, as [`crate::progress::Walk`] is.
#[derive(Clone, Copy, Debug)]
pub struct Vouching {
    credit: Credit,
    sum: KeySum,
    /// Not 0: ranks that are registered elsewhere.
    foreign: u64,
    /// The address it came from: it may speak only for ranks that are registered with that.
    source: Address,
    /// Ranks that it may speak for wherever they are: those behind the sender's switch ([`Link::switched`]). The lowest bit
    /// is the rank whose turn it is.
    behind: u64,
}

impl Vouching {
    /// For a sum that came from `source`, to a job with this [`Link::switched`].
    #[inline(always)]
    #[must_use]
    pub fn of(header: &Header, source: Address, reach: u32, switched: u64) -> Vouching {
        let (ack, contributed) = (Seq(header.raw_ack()), Seq(header.raw_progress()));
        let credit = Credit { generation: header.generation(), reach, ack, contributed };
        // A sum of a rank that is beside the switch is none of the switch's.
        let is_behind = (switched >> (header.worker() & 63) & 1).wrapping_neg();
        let behind = switched & is_behind;
        Vouching { credit, sum: KeySum::of(header.bitmap()), foreign: opaque(0), source, behind }
    }

    /// Takes in one rank, from rank 0 on. Returns true where no further rank is in the sum.
    #[inline(always)]
    pub fn visit(&mut self, turn: u64, rank: &RankEntry, progress: &Progress) -> bool {
        if self.sum.bits & 1 != 0 {
            if rank.address == self.source || self.behind & 1 != 0 {
                progress.credit(turn as usize, &self.credit);
            } else {
                self.foreign = 1;
            }
        }
        self.behind >>= 1;
        self.sum.visit(rank)
    }

    /// The keys of all ranks together, if the sender may speak for them and there are none beyond those that were
    /// visited.
    #[inline(always)]
    #[must_use]
    pub const fn keys(&self) -> Option<u64> {
        if self.foreign == 0 { self.sum.keys() } else { None }
    }
}

/// A walk over the ranks of a result, whose keys add up.
#[derive(Clone, Copy, Debug)]
pub struct KeySum {
    bits: u64,
    keys: u64,
}

impl KeySum {
    /// Of the ranks with these bits.
    #[inline(always)]
    #[must_use]
    pub fn of(bits: u64) -> KeySum {
        // Opaque, or LLVM would clear it with a `memset`, which adds variables to pointers.
        KeySum { bits, keys: opaque(0) }
    }

    /// Takes in one rank, from rank 0 on. Returns true where no further rank is in it.
    #[inline(always)]
    pub fn visit(&mut self, rank: &RankEntry) -> bool {
        // Without a branch: all ones for a rank that is in it.
        self.keys = self.keys.wrapping_add(rank.key & (self.bits & 1).wrapping_neg());
        self.bits >>= 1;
        self.bits == 0
    }

    /// The keys of all ranks together, if there are none beyond those that were visited.
    #[inline(always)]
    #[must_use]
    pub const fn keys(&self) -> Option<u64> {
        if self.bits == 0 { Some(self.keys) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Chunk;
    use crate::wire::{Kind, Request};

    fn answer(low: u32, high: u32, min_ack: u32) -> Header {
        let request = Request {
            kind: Kind::Pull,
            flags: 0,
            job: 0,
            worker: 0,
            generation: 7,
            seq: Seq(0),
            want: Seq(min_ack),
            ack: Seq(low),
            progress: Seq(high),
            token: 0,
            bitmap: 0,
            tag: 0,
            chunk: Chunk { root: 3, operation_and_type: 9, ..Chunk::default() },
            next_exponent: 0,
            attempt: 0,
        };
        request.encode()
    }

    #[test]
    fn what_the_parent_told_only_rises() {
        for start in [0, u32::MAX - 4] {
            let above = Above::default();
            let at = |n: u32| start.wrapping_add(n);
            for word in [&above.low, &above.high, &above.min_ack] {
                word.set(7, start);
            }
            let reach = Reach { floor: Seq(start), slots: 8 };
            above.learn(7, Heard::of(&answer(at(5), at(9), at(4)), None), reach);
            above.learn(7, Heard::of(&answer(at(3), at(8), at(2)), None), reach);
            let told = above.report(7, Seq(at(20)));
            assert_eq!((told.min_ack, told.low, told.high), (Seq(at(4)), Seq(at(5)), Seq(at(9))));
            assert_eq!((told.slowest, told.epoch), (3, 9));
            assert_eq!(above.report(7, Seq(at(2))).low, Seq(at(2)), "no promise beyond the wish");
            assert_eq!(above.report(8, Seq(9)).low, Seq(0), "another generation");
        }
    }

    /// One forged answer must not stop a node for good.
    #[test]
    fn f13_a_parent_is_believed_within_its_reach() {
        for start in [0, u32::MAX - 4] {
            let above = Above::default();
            let at = |n: u32| start.wrapping_add(n);
            let reach = Reach { floor: Seq(start), slots: 8 };
            for word in [&above.low, &above.high, &above.min_ack] {
                word.set(7, start);
            }
            above.learn(7, Heard::of(&answer(at(16), at(16), at(16)), None), reach);
            for beyond in [17, 1 << 20, i32::MAX as u32] {
                above.learn(7, Heard::of(&answer(at(beyond), at(beyond), at(beyond)), None), reach);
            }
            let told = above.report(7, Seq(at(100)));
            assert_eq!((told.min_ack, told.low, told.high), (Seq(at(16)), Seq(at(16)), Seq(at(16))));
        }
    }

    /// Neither a lie nor silence of the parent moves the ring from where a node's own ranks are.
    #[test]
    fn a_ring_is_given_out_within_a_window_of_the_own_ranks() {
        let above = Above::default();
        for start in [100, 5, u32::MAX - 4] {
            let at = |n: i32| Seq(start).plus(n as u32);
            for (told, floor) in [(0, 0), (-3, -3), (-8, -8), (-9, -8), (-4000, -8), (1, 0), (64, 0)] {
                above.min_ack.set(7, at(told).0);
                assert_eq!(above.floor(7, at(0), 8), at(floor), "{told} from {start}");
            }
            // Nothing of the generation that runs.
            assert_eq!(above.floor(9, Seq(3), 8), Seq(0));
        }
    }

    #[test]
    fn a_redo_is_told_whole() {
        let above = Above::default();
        let reach = Reach { floor: Seq(0), slots: 8 };
        let tell = |seq: u32, attempt: u8| {
            let mut header = answer(0, 0, 0);
            header.set_flags(flags::REDO);
            header.set_tag(Redo { seq: Seq(seq), attempt }.to_word());
            above.learn(7, Heard::of(&header, None), reach);
            above.report(7, Seq(0)).redo
        };
        assert_eq!(tell(u32::MAX, MAX_ATTEMPTS), Redo { seq: Seq(u32::MAX), attempt: MAX_ATTEMPTS });
        assert_eq!(above.report(8, Seq(0)).redo.attempt, 0, "another generation");
        assert_eq!(tell(5, MAX_ATTEMPTS + 1).attempt, 0, "there is no such attempt");
        tell(5, 1);
        above.learn(7, Heard::of(&answer(0, 0, 0), None), reach);
        assert_eq!(above.report(7, Seq(0)).redo.attempt, 0, "it is over");
    }

    #[test]
    fn ways_survive_their_word() {
        let way = Way::new([1, 2, 3, 4, 5, 0xFF], 0xABCD);
        assert_eq!((way.mac(), way.port(), way.is_known()), ([1, 2, 3, 4, 5, 0xFF], 0xABCD, true));
        let above = Above::default();
        assert!(!above.way(5).is_known());
        above.remember(5, way);
        assert_eq!((above.way(5), above.way(4)), (way, Way::default()));
    }

    #[test]
    fn nobody_speaks_for_ranks_that_are_elsewhere() {
        let progress = Progress::default();
        let here = RankEntry { address: [1; 16], key: 5, ..RankEntry::default() };
        let elsewhere = RankEntry { address: [2; 16], key: 7, ..RankEntry::default() };
        let by = |switched: u64, bits: u64, ranks: &[RankEntry]| {
            let mut header = answer(4, 4, 0);
            header.set_bitmap(bits);
            let mut vouching = Vouching::of(&header, [1; 16], 8, switched);
            for (turn, rank) in (0..).zip(ranks) {
                if vouching.visit(turn, rank, &progress) {
                    break;
                }
            }
            vouching.keys()
        };
        let run = |bits: u64, ranks: &[RankEntry]| by(0, bits, ranks);
        assert_eq!(run(0b101, &[here, elsewhere, here]), Some(10));
        assert_eq!(run(0b110, &[here, elsewhere, here]), None);
        assert_eq!(run(0b1001, &[here, elsewhere, here]), None, "a rank that there is not");
        let reached = |rank| progress.reached(7, rank).contributed;
        assert_eq!([reached(0), reached(1), reached(2)], [Seq(4), Seq(0), Seq(4)]);
        assert_eq!(
            by(0b110, 0b110, &[here, elsewhere, here]),
            None,
            "its sender, rank 0, is beside the switch"
        );
        assert_eq!(reached(1), Seq(0));
        assert_eq!(by(0b011, 0b011, &[here, elsewhere, here]), Some(12), "a switch knows them itself");
        assert_eq!(reached(1), Seq(4));
        assert_eq!(by(0b1_0011, 0b1_0011, &[here, elsewhere, here]), None, "a rank that there is not");
        let nobody = RankEntry::default();
        assert_eq!(by(0b11, 0b1011, &[here, elsewhere, here, nobody]), None, "a rank beyond the job's world");
    }
}
