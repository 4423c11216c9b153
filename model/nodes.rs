//! Explicit-state model of nodes whose ranks are one rank of their parent's job (docs/protocol.md, "More ranks than
//! bits"): a root, two nodes, one or two ranks behind each; a network that loses, repeats and reorders; results that go bad
//! in a node's memory, in the root's or on their way. A variant has all rules in some shape, or leaves one of them out.
//!
//!     rustc --edition 2021 -O -o /tmp/nodes model/nodes.rs && /tmp/nodes [NAME_PREFIX]
//!
//! A step is an exchange: a rank's request, up, down, and the answer. At each leg it may be lost, or held up while others
//! go on, or arrive and be held up as a duplicate; what is held up arrives at any later time, and goes on from there.
//!
//! Checked: nothing but what every rank has contributed once is summed up or handed out; a slot is not taken from a chunk
//! that a rank lacks; min_ack is never above the truth; nobody is told ABORTED; and from every state one can be reached in
//! which all ranks have all results. (Not modelled: sums that go bad before they go up, which end the job with an error;
//! p_min; DATA with another wish than the lowest undelivered chunk.)

use std::fmt;

/// Most of each that a shape has.
const RANKS: usize = 4;
const NODES: usize = 2;
const CHUNKS: usize = 3;
const SLOTS: usize = 2;
const MESSAGES: usize = 3;
/// Place of the root among the aggregators, after the nodes.
const ROOT: usize = NODES;
/// More states are not looked at.
const MOST_STATES: usize = 10_000_000;

/// What a variant leaves out, or does otherwise.
#[derive(Clone, Copy, Debug)]
struct Rules {
    /// Of a node's open redo and the root's the earlier one is told; otherwise the node's.
    earlier_first: bool,
    /// Slots of a node are given out by the root's min_ack, within W of that of its own ranks; otherwise by that of its own ranks.
    ring_of_root: bool,
    /// The node's open redo is told in answers that come down from the root as well.
    told_below: bool,
    /// A kept result leaves the slot the bits of the ranks here; otherwise it has the root's.
    own_bits: bool,
    /// What goes up has the lowest ack of the ranks; otherwise that of the one that asks.
    lowest_ack: bool,
    /// A PULL of a chunk that is being redone here announces that again.
    told_again: bool,
    /// A PULL of a chunk that is being redone here goes up without a wish that can be granted, so that what comes down
    /// tells of redos; otherwise it may bring the bad result each time.
    bare: bool,
    /// Such a PULL is answered here instead.
    answered_here: bool,
}

const RULES: Rules = Rules {
    earlier_first: true,
    ring_of_root: true,
    told_below: true,
    own_bits: true,
    lowest_ack: true,
    told_again: true,
    bare: true,
    answered_here: false,
};

#[derive(Clone, Copy, Debug)]
struct Variant {
    name: &'static str,
    rules: Rules,
    /// Ranks behind each node.
    below: [usize; NODES],
    chunks: usize,
    /// S.
    slots: usize,
    /// W.
    window: usize,
    /// Results that go bad; also the highest attempt.
    damages: u8,
    /// Messages that are held up at once.
    cap: usize,
    /// Messages are lost.
    loss: bool,
    /// All contributions are made and all chunks complete at the root when it begins; no rank has a result yet.
    begun: bool,
    /// The flaw that is to come out.
    expect: Option<&'static str>,
}

/// A chunk that is being redone; attempt 0: none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Redo {
    seq: u8,
    attempt: u8,
}

/// A rank. Sets of chunks are bitmaps.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Rank {
    /// Contributions that were made.
    made: u8,
    /// Results that are here.
    has: u8,
    /// Contributions that are acknowledged under the attempt.
    sure: u8,
    attempt: [u8; CHUNKS],
}

impl Rank {
    /// The lowest undelivered chunk.
    fn ack(&self) -> u8 {
        self.has.trailing_ones() as u8
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Slot {
    /// Chunk + 1; 0 for none.
    key: u8,
    attempt: u8,
    bits: u8,
    frozen: u8,
    /// How often each contributor is in the lanes: two bits for each.
    lanes: u8,
    /// Of a node: all of its ranks are in.
    sent: u8,
    complete: u8,
    bad: u8,
}

impl Slot {
    fn holds(&self, seq: u8) -> bool {
        self.key == seq + 1
    }

    fn is_sent(&self) -> bool {
        self.sent == 1 && self.complete == 0
    }
}

/// What a node knows of the root, and its own announcement.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Node {
    min_ack: u8,
    above: Redo,
    own: Redo,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
#[repr(u8)]
enum Kind {
    #[default]
    None,
    Data,
    Pull,
    DataUp,
    PullUp,
    /// From the root to a node.
    Answer,
    /// From a node to a rank.
    AnswerDown,
}

const KINDS: [Kind; 7] =
    [Kind::None, Kind::Data, Kind::Pull, Kind::DataUp, Kind::PullUp, Kind::Answer, Kind::AnswerDown];

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
#[repr(u8)]
enum Status {
    #[default]
    Ok,
    NotYet,
    Busy,
    Stale,
    OldAttempt,
    NotIncluded,
    Aborted,
}

const STATUSES: [Status; 7] = [
    Status::Ok,
    Status::NotYet,
    Status::Busy,
    Status::Stale,
    Status::OldAttempt,
    Status::NotIncluded,
    Status::Aborted,
];

/// A message of any kind. What a kind does not use is 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
struct Message {
    kind: u8,
    /// The rank that asks, which the port tells on the way.
    rank: u8,
    /// The rank's request was a PULL.
    by_pull: u8,
    seq: u8,
    want: u8,
    /// Request: ack. Answer without a result: min_ack.
    ack: u8,
    /// Of the rank's contribution.
    attempt: u8,
    /// Answer: the slot's.
    found: u8,
    status: u8,
    result: u8,
    bad: u8,
    redo_seq: u8,
    redo_attempt: u8,
}

impl Message {
    fn kind(&self) -> Kind {
        KINDS[self.kind as usize]
    }

    fn redo(&self) -> Redo {
        Redo { seq: self.redo_seq, attempt: self.redo_attempt }
    }

    fn told(self, redo: Redo) -> Message {
        Message { redo_seq: if redo.attempt > 0 { redo.seq } else { 0 }, redo_attempt: redo.attempt, ..self }
    }
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Message { rank, seq, want, ack, attempt, found, .. } = self;
        match self.kind() {
            Kind::Data => {
                write!(f, "DATA of rank {rank}, chunk {seq} attempt {attempt}, want {want}, ack {ack}")
            }
            Kind::Pull => write!(f, "PULL of rank {rank}, chunk {want}, ack {ack}"),
            Kind::DataUp => {
                write!(f, "sum for rank {rank}, chunk {seq} attempt {attempt}, want {want}, ack {ack}")
            }
            Kind::PullUp => write!(f, "PULL going up for rank {rank}, chunk {want}, ack {ack}"),
            Kind::None => write!(f, "result of chunk {want}"),
            Kind::Answer | Kind::AnswerDown => {
                let place = if self.kind() == Kind::Answer { "root's answer" } else { "answer" };
                write!(f, "{place} to rank {rank}, chunk {seq} {:?}, ", STATUSES[self.status as usize])?;
                if self.result == 1 {
                    write!(f, "{} result {want} attempt {found}", if self.bad == 1 { "BAD" } else { "sound" })
                } else {
                    write!(f, "attempt {found}, min_ack {ack}, redo {:?}", (self.redo_seq, self.redo_attempt))
                }
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct State {
    ranks: [Rank; RANKS],
    /// What each rank's node knows of its acks.
    acked: [u8; RANKS],
    nodes: [Node; NODES],
    slots: [[Slot; SLOTS]; NODES + 1],
    /// The root's: acks of the nodes, and what it announces.
    acks: [u8; NODES],
    redo: Redo,
    damages: u8,
    net: [Message; MESSAGES],
}

const WORDS: usize = 5;
type Packed = [u64; WORDS];

impl State {
    /// Visits each field with the number of its bits.
    fn fields(&mut self, f: &mut impl FnMut(&mut u8, u32)) {
        for rank in &mut self.ranks {
            [&mut rank.made, &mut rank.has, &mut rank.sure].into_iter().for_each(|set| f(set, CHUNKS as u32));
            rank.attempt.iter_mut().for_each(|attempt| f(attempt, 2));
        }
        self.acked.iter_mut().chain(&mut self.acks).for_each(|ack| f(ack, 2));
        let mut redo =
            |redo: &mut Redo| [&mut redo.seq, &mut redo.attempt].into_iter().for_each(|field| f(field, 2));
        redo(&mut self.redo);
        for node in &mut self.nodes {
            redo(&mut node.above);
            redo(&mut node.own);
        }
        self.nodes.iter_mut().for_each(|node| f(&mut node.min_ack, 2));
        for slot in self.slots.iter_mut().flatten() {
            [&mut slot.key, &mut slot.attempt, &mut slot.bits, &mut slot.frozen]
                .into_iter()
                .for_each(|field| f(field, 2));
            f(&mut slot.lanes, 4);
            [&mut slot.sent, &mut slot.complete, &mut slot.bad].into_iter().for_each(|field| f(field, 1));
        }
        f(&mut self.damages, 2);
        for m in &mut self.net {
            [&mut m.kind, &mut m.status].into_iter().for_each(|field| f(field, 3));
            [&mut m.rank, &mut m.seq, &mut m.want, &mut m.ack].into_iter().for_each(|field| f(field, 2));
            [&mut m.attempt, &mut m.found, &mut m.redo_seq, &mut m.redo_attempt]
                .into_iter()
                .for_each(|field| f(field, 2));
            [&mut m.by_pull, &mut m.result, &mut m.bad].into_iter().for_each(|field| f(field, 1));
        }
    }

    fn pack(&self) -> Packed {
        let (mut packed, mut at) = ([0; WORDS], 0);
        let mut copy = *self;
        copy.fields(&mut |field, bits| {
            debug_assert!(u32::from(*field) < 1 << bits);
            let (word, shift) = (at as usize / 64, at % 64);
            packed[word] |= u64::from(*field) << shift;
            if shift + bits > 64 {
                packed[word + 1] |= u64::from(*field) >> (64 - shift);
            }
            at += bits;
        });
        packed
    }

    fn unpack(packed: &Packed) -> State {
        let (mut state, mut at) = (State::default(), 0);
        state.fields(&mut |field, bits| {
            let (word, shift) = (at as usize / 64, at % 64);
            let mut value = packed[word] >> shift;
            if shift + bits > 64 {
                value |= packed[word + 1] << (64 - shift);
            }
            *field = (value & ((1 << bits) - 1)) as u8;
            at += bits;
        });
        state
    }

    /// The same with the two ranks of a node exchanged.
    fn with_exchanged_ranks(&self, first: usize, node: usize) -> State {
        let swap = |bits: u8, width: u8| {
            let mask = (1 << width) - 1;
            (bits & mask) << width | bits >> width & mask
        };
        let mut s = *self;
        s.ranks.swap(first, first + 1);
        s.acked.swap(first, first + 1);
        for slot in &mut s.slots[node] {
            (slot.bits, slot.frozen, slot.lanes) =
                (swap(slot.bits, 1), swap(slot.frozen, 1), swap(slot.lanes, 2));
        }
        for m in s.net.iter_mut().filter(|m| m.kind() != Kind::None) {
            match m.rank as usize {
                rank if rank == first => m.rank += 1,
                rank if rank == first + 1 => m.rank -= 1,
                _ => {}
            }
        }
        s.net.sort_unstable();
        s
    }
}

/// A state that is being changed by one event.
struct World<'a> {
    v: &'a Variant,
    s: State,
    flaw: Option<&'static str>,
}

impl World<'_> {
    fn ranks(&self) -> usize {
        self.v.below[0] + self.v.below[1]
    }

    fn node_of(&self, rank: usize) -> usize {
        usize::from(rank >= self.v.below[0])
    }

    fn ranks_of(&self, node: usize) -> std::ops::Range<usize> {
        let first = if node == 0 { 0 } else { self.v.below[0] };
        first..first + self.v.below[node]
    }

    fn expect(&mut self, holds: bool, flaw: &'static str) {
        if !holds {
            self.flaw.get_or_insert(flaw);
        }
    }

    fn true_min_ack(&self) -> u8 {
        self.s.ranks[..self.ranks()].iter().map(Rank::ack).min().unwrap_or(0)
    }

    fn own_floor(&self, node: usize) -> u8 {
        self.s.acked[self.ranks_of(node)].iter().copied().min().unwrap_or(0)
    }

    fn root_floor(&self) -> u8 {
        self.s.acks[0].min(self.s.acks[1])
    }

    fn contributors(&self, place: usize) -> usize {
        if place == ROOT { NODES } else { self.v.below[place] }
    }

    /// Lanes that have each contributor once.
    fn once(&self, place: usize) -> u8 {
        (0..self.contributors(place)).map(|i| 1 << (2 * i)).sum()
    }

    fn slot(&mut self, place: usize, seq: u8) -> &mut Slot {
        &mut self.s.slots[place][seq as usize % self.v.slots]
    }

    fn announcement(&mut self, place: usize) -> &mut Redo {
        if place == ROOT { &mut self.s.redo } else { &mut self.s.nodes[place].own }
    }

    /// `Progress::announce`: unless an earlier chunk's is announced.
    fn announce(&mut self, place: usize, redo: Redo) {
        let open = self.open_redo(place);
        if open.attempt == 0 || open.seq >= redo.seq {
            *self.announcement(place) = redo;
        }
    }

    fn withdraw(&mut self, place: usize, seq: u8) {
        let word = self.announcement(place);
        if word.seq == seq {
            *word = Redo::default();
        }
    }

    /// `Progress::redo`: unless all ranks that this aggregator knows of have the chunk.
    fn open_redo(&mut self, place: usize) -> Redo {
        let floor = if place == ROOT { self.root_floor() } else { self.own_floor(place) };
        let word = *self.announcement(place);
        if word.attempt > 0 && word.seq >= floor { word } else { Redo::default() }
    }

    /// Steps 11 to 21, at a node or at the root: `slot::decide` and what follows. Returns the slot's attempt too.
    fn receive(&mut self, place: usize, floor: u8, index: usize, seq: u8, attempt: u8) -> (Status, u8) {
        if seq < floor {
            return (Status::Stale, 0);
        }
        if usize::from(seq - floor) >= self.v.slots {
            return (Status::Busy, 0);
        }
        let status = self.decide(place, index, seq, attempt);
        let expected = (1 << self.contributors(place)) - 1;
        let slot = self.slot(place, seq);
        if !slot.holds(seq) {
            return (status, 0);
        }
        if expected & !slot.bits == 0 {
            if place != ROOT {
                slot.sent = 1;
            } else if slot.complete == 0 {
                (slot.complete, slot.frozen) = (1, slot.bits);
            }
        }
        let slot = *slot;
        self.track(place, seq, slot);
        (status, slot.attempt)
    }

    fn track(&mut self, place: usize, seq: u8, slot: Slot) {
        if slot.attempt > 0 && slot.complete == 1 {
            self.withdraw(place, seq);
        } else if slot.attempt > 0 {
            self.announce(place, Redo { seq, attempt: slot.attempt });
        }
    }

    fn decide(&mut self, place: usize, index: usize, seq: u8, attempt: u8) -> Status {
        let (bit, expected) = (1 << index, (1 << self.contributors(place)) - 1);
        let slot = *self.slot(place, seq);
        if slot.key > seq + 1 {
            return Status::Stale;
        }
        let same = slot.holds(seq);
        let at = if same { slot.attempt } else { 0 };
        if attempt < at || attempt > at + 1 {
            return Status::OldAttempt;
        }
        let dead = slot.frozen & !expected;
        if attempt > at && same {
            if dead != 0 {
                return Status::Aborted;
            }
            if slot.frozen != 0 && bit & !slot.frozen != 0 {
                return Status::NotIncluded;
            }
            *self.slot(place, seq) = Slot { key: slot.key, attempt, frozen: slot.frozen, ..Slot::default() };
        } else if !same {
            let is_over = slot.key == 0 || self.true_min_ack() >= slot.key;
            self.expect(is_over, "a slot is taken from a chunk that a rank lacks");
            *self.slot(place, seq) = Slot { key: seq + 1, attempt, ..Slot::default() };
        } else if slot.complete == 0 && dead & !slot.bits != 0 {
            return Status::Aborted;
        } else if slot.bits & bit != 0 {
            return Status::Ok;
        } else if slot.complete == 1 || slot.frozen != 0 && bit & !slot.frozen != 0 {
            return Status::NotIncluded;
        }
        let slot = self.slot(place, seq);
        // The first stores, the others add.
        slot.lanes = if slot.bits == 0 { 0 } else { slot.lanes } + (1 << (2 * index));
        slot.bits |= bit;
        Status::Ok
    }

    /// A rank's request at its node.
    fn at_node(&mut self, m: Message) -> Message {
        let (rank, is_pull) = (m.rank as usize, m.kind() == Kind::Pull);
        let node = self.node_of(rank);
        self.s.acked[rank] = self.s.acked[rank].max(m.ack);
        let (own, above) = (self.own_floor(node), self.s.nodes[node].min_ack);
        let ack = if self.v.rules.lowest_ack { own } else { m.ack };
        let chunk = if is_pull { m.want } else { m.seq };
        let (mut status, mut found) = (Status::NotYet, 0);
        if !is_pull {
            // Not above that of the ranks here, and at most W below it.
            let within = above.min(own).max(own.saturating_sub(self.v.window as u8));
            let floor = if self.v.rules.ring_of_root { within } else { own };
            let is_true = floor <= self.true_min_ack();
            self.expect(is_true || !self.v.rules.ring_of_root, "a ring is given out above the true min_ack");
            let index = rank - self.ranks_of(node).start;
            (status, found) = self.receive(node, floor, index, m.seq, m.attempt);
        }
        let slot = *self.slot(node, chunk);
        if slot.holds(chunk) && slot.is_sent() && (is_pull || status == Status::Ok) {
            let is_sum = slot.lanes == self.once(node);
            self.expect(is_sum, "a sum that goes up lacks a rank or has one twice");
            let (seq, attempt) = (chunk, slot.attempt);
            return Message { kind: Kind::DataUp as u8, seq, attempt, ack, by_pull: is_pull.into(), ..m };
        }
        let is_redone = slot.holds(chunk) && slot.attempt > 0;
        let here = self.v.rules.answered_here && is_redone;
        if here && is_pull {
            self.track(node, chunk, slot);
            found = slot.attempt;
        }
        if is_pull && !here && !(slot.holds(chunk) && slot.complete == 1) {
            if self.v.rules.told_again && slot.holds(chunk) {
                self.track(node, chunk, slot);
            }
            let is_bare = self.v.rules.bare && is_redone;
            let want = if is_bare { self.v.chunks as u8 } else { m.want };
            return Message { kind: Kind::PullUp as u8, want, ack, by_pull: 1, ..m };
        }
        let answer = Message { kind: Kind::AnswerDown as u8, ..m };
        if let Some(result) = self.result(node, answer, status) {
            return result;
        }
        let redo = self.both(node, self.s.nodes[node].above);
        Message { status: status as u8, found, want: 0, ack: above, ..answer }.told(redo)
    }

    /// The node's open redo and what the root tells of its own.
    fn both(&mut self, node: usize, above: Redo) -> Redo {
        let own = self.open_redo(node);
        let is_own =
            above.attempt == 0 || own.attempt > 0 && (own.seq < above.seq || !self.v.rules.earlier_first);
        if is_own { own } else { above }
    }

    /// The answer with the result of `want`, if it stands here.
    fn result(&mut self, place: usize, m: Message, status: Status) -> Option<Message> {
        let slot = *self.slot(place, m.want);
        if !slot.holds(m.want) || slot.complete == 0 {
            return None;
        }
        let is_whole = slot.lanes == self.once(place);
        self.expect(is_whole, "a result lacks a rank or has one twice");
        let status = if m.by_pull == 1 { Status::Ok } else { status };
        Some(Message { status: status as u8, found: slot.attempt, result: 1, bad: slot.bad, ack: 0, ..m })
    }

    /// What has come up, at the root.
    fn at_root(&mut self, m: Message) -> Message {
        let node = self.node_of(m.rank as usize);
        self.s.acks[node] = self.s.acks[node].max(m.ack);
        let floor = self.root_floor();
        let is_true = floor <= self.true_min_ack();
        self.expect(is_true, "the root's min_ack is above the truth");
        let (mut status, mut found) = (Status::NotYet, 0);
        if m.kind() == Kind::DataUp {
            (status, found) = self.receive(ROOT, floor, node, m.seq, m.attempt);
        }
        let mut answer = Message { kind: Kind::Answer as u8, ..m };
        if m.by_pull == 1 {
            answer.attempt = 0;
        }
        if let Some(result) = self.result(ROOT, answer, status) {
            return result;
        }
        let slot = *self.slot(ROOT, m.want);
        if slot.holds(m.want) {
            self.track(ROOT, m.want, slot);
            if m.kind() == Kind::PullUp {
                found = slot.attempt;
            }
        }
        let redo = self.open_redo(ROOT);
        Message { status: status as u8, found, want: 0, ack: floor, ..answer }.told(redo)
    }

    /// The root's answer at the node.
    fn going_down(&mut self, m: Message) -> Message {
        let node = self.node_of(m.rank as usize);
        let window = self.v.window as u8;
        let told = if m.result == 1 { (m.want + 1).saturating_sub(window) } else { m.ack };
        let known = &mut self.s.nodes[node];
        known.min_ack = known.min_ack.max(told);
        if m.result == 0 {
            known.above = m.redo();
        }
        let is_true = self.s.nodes[node].min_ack <= self.true_min_ack();
        self.expect(is_true, "a node's min_ack is above the truth");
        let down = Message { kind: Kind::AnswerDown as u8, ..m };
        if m.result == 0 {
            return if self.v.rules.told_below { down.told(self.both(node, m.redo())) } else { down };
        }
        let own_bits = self.v.rules.own_bits;
        let slot = self.slot(node, m.want);
        if slot.holds(m.want) && slot.is_sent() && slot.attempt == m.found && m.bad == 0 {
            if !own_bits {
                slot.bits = (1 << NODES) - 1;
            }
            (slot.complete, slot.frozen, slot.bad) = (1, slot.bits, 0);
            self.withdraw(node, m.want);
        }
        down
    }

    /// An answer at its rank. (If a result is bad it asks for a redo at once: for the rank, asking for the result again first
    /// is as if the answer were lost.)
    fn at_rank(&mut self, m: Message) {
        let rank = &mut self.s.ranks[m.rank as usize];
        if m.result == 1 {
            let (want, bit) = (m.want as usize, 1 << m.want);
            if rank.made & bit != 0 && rank.has & bit == 0 {
                let current = rank.attempt[want];
                if m.bad == 0 {
                    rank.has |= bit;
                    if m.found >= current {
                        rank.sure |= bit;
                    }
                } else if m.found > current {
                    self.restart(m.rank, m.want, m.found);
                } else if m.found == current {
                    self.restart(m.rank, m.want, current + 1);
                }
            }
        } else {
            self.join(m.rank, m.redo());
            if m.by_pull == 1 {
                self.join(m.rank, Redo { seq: m.seq, attempt: m.found });
            }
        }
        if m.by_pull == 1 {
            return;
        }
        let rank = &mut self.s.ranks[m.rank as usize];
        if m.attempt != rank.attempt[m.seq as usize] {
            return;
        }
        match STATUSES[m.status as usize] {
            Status::Ok | Status::Stale | Status::NotIncluded => rank.sure |= 1 << m.seq,
            Status::OldAttempt if m.result == 0 => {
                let next = if m.attempt > m.found { m.found + 1 } else { m.found };
                self.restart(m.rank, m.seq, next);
            }
            _ => {}
        }
    }

    fn join(&mut self, rank: u8, redo: Redo) {
        let of = &self.s.ranks[rank as usize];
        if usize::from(redo.seq) < self.v.chunks
            && of.made >> redo.seq & 1 == 1
            && of.attempt[redo.seq as usize] < redo.attempt
        {
            self.restart(rank, redo.seq, redo.attempt);
        }
    }

    fn restart(&mut self, rank: u8, seq: u8, attempt: u8) {
        let is_due = attempt <= self.v.damages;
        self.expect(is_due, "more attempts than damaged results");
        let of = &mut self.s.ranks[rank as usize];
        of.attempt[seq as usize] = attempt;
        of.sure &= !(1 << seq);
    }

    /// Holds a message up. False if there is no room for it.
    fn send(&mut self, m: Message) -> bool {
        if self.s.net.contains(&m) {
            return true;
        }
        let cap = self.v.cap;
        let Some(place) = self.s.net.iter().rev().take(cap).position(|m| m.kind() == Kind::None) else {
            return false;
        };
        self.s.net[MESSAGES - 1 - place] = m;
        self.s.net.sort_unstable();
        true
    }
}

/// One step of an exchange, for the trace.
type Event = (&'static str, Message);
/// Most steps of one: a request, up, down, and what became of it.
const STEPS: usize = 6;

/// What may happen next: an exchange of one rank, a damage, a loss.
#[derive(Clone, Copy)]
struct Next {
    events: [Event; STEPS],
    state: State,
    flaw: Option<&'static str>,
}

/// Finds all that may happen in a state.
struct Search<'a> {
    v: &'a Variant,
    from: State,
    found: &'a mut Vec<Next>,
}

impl<'a> Search<'a> {
    fn world(&self, state: State) -> World<'a> {
        World { v: self.v, s: state, flaw: None }
    }

    fn push(&mut self, w: &World<'_>, events: [Event; STEPS]) {
        if w.s != self.from || w.flaw.is_some() {
            self.found.push(Next { events, state: w.s, flaw: w.flaw });
        }
    }

    /// A message is on its way, and an exchange goes on with it: it is lost, or held up while others go on, or taken; then
    /// a second one of it may be held up.
    fn exchange(&mut self, state: State, m: Message, events: [Event; STEPS], step: usize) {
        let told = |what: &'static str| {
            let mut events = events;
            events[step] = (what, m);
            events
        };
        let mut lost = self.world(state);
        if lost.v.cap > 0 && lost.send(m) {
            self.push(&lost, told("is held up"));
        }
        if self.v.loss {
            self.push(&self.world(state), told("is lost"));
        }
        if m.result == 1 && m.bad == 0 && state.damages < self.v.damages {
            let damaged = State { damages: state.damages + 1, ..state };
            self.take(damaged, Message { bad: 1, ..m }, told("is damaged"), step);
        }
        self.take(state, m, told("arrives"), step);
        let mut twice = self.world(state);
        if twice.send(m) {
            self.take(twice.s, m, told("arrives, and once more later"), step);
        }
    }

    fn take(&mut self, state: State, m: Message, events: [Event; STEPS], step: usize) {
        let mut w = self.world(state);
        let reply = match m.kind() {
            Kind::Data | Kind::Pull => w.at_node(m),
            Kind::DataUp | Kind::PullUp => w.at_root(m),
            Kind::Answer => w.going_down(m),
            Kind::AnswerDown | Kind::None => {
                w.at_rank(m);
                return self.push(&w, events);
            }
        };
        let is_aborted = reply.status == Status::Aborted as u8;
        w.expect(!is_aborted, "a rank is told ABORTED");
        if w.flaw.is_some() {
            return self.push(&w, events);
        }
        self.exchange(w.s, reply, events, step + 1);
    }
}

fn successors(v: &Variant, state: &State, found: &mut Vec<Next>) {
    let none = [("", Message::default()); STEPS];
    let mut search = Search { v, from: *state, found };
    for rank in 0..v.below[0] + v.below[1] {
        for m in requests(v, &state.ranks[rank], rank as u8) {
            let mut s = *state;
            if m.kind() == Kind::Data {
                s.ranks[rank].made |= 1 << m.seq;
            }
            search.exchange(s, m, none, 0);
        }
    }
    for place in (0..MESSAGES).filter(|place| state.net[*place].kind() != Kind::None) {
        let mut s = *state;
        s.net[place] = Message::default();
        s.net.sort_unstable();
        search.exchange(s, state.net[place], none, 0);
    }
    if state.damages == v.damages {
        return;
    }
    for (place, name) in ["kept by node 0 is damaged", "kept by node 1 is damaged", "of the root is damaged"]
        .into_iter()
        .enumerate()
    {
        for i in 0..v.slots {
            let slot = state.slots[place][i];
            if slot.complete == 1 && slot.bad == 0 {
                let mut w = World { v, s: *state, flaw: None };
                w.s.slots[place][i].bad = 1;
                w.s.damages += 1;
                let mut events = none;
                events[0] = (name, Message { want: slot.key - 1, result: 1, ..Message::default() });
                search.push(&w, events);
            }
        }
    }
}

/// What a rank may send.
fn requests(v: &Variant, of: &Rank, rank: u8) -> impl Iterator<Item = Message> + use<> {
    let (of, v) = (*of, *v);
    let (ack, next) = (of.ack(), of.made.trailing_ones() as usize);
    (0..=v.chunks).flat_map(move |chunk| {
        let bit = 1_u8 << chunk;
        let (seq, want) = (chunk as u8, ack);
        let is_new = chunk == next && chunk < v.chunks && usize::from(ack) + v.window > chunk;
        let is_open = chunk < v.chunks && of.made & bit != 0;
        let is_due = is_new || is_open && of.sure & bit == 0;
        let attempt = if chunk < v.chunks { of.attempt[chunk] } else { 0 };
        let data = Message { kind: Kind::Data as u8, rank, seq, want, ack, attempt, ..Message::default() };
        // The last is that of a rank that has everything.
        let is_pull = is_open && of.has & bit == 0 || chunk == v.chunks && usize::from(ack) == v.chunks;
        let pull =
            Message { kind: Kind::Pull as u8, rank, by_pull: 1, seq, want: seq, ack, ..Message::default() };
        [is_due.then_some(data), is_pull.then_some(pull)].into_iter().flatten()
    })
}

/// The same state whichever of a node's two ranks is called the first. (With the root's bits in a node's slot they differ.)
fn canonical(v: &Variant, state: &State) -> Packed {
    let mut same = vec![*state];
    for node in (0..NODES).filter(|node| v.below[*node] == 2 && v.rules.own_bits) {
        let first = if node == 0 { 0 } else { v.below[0] };
        same.extend(same.clone().iter().map(|state| state.with_exchanged_ranks(first, node)));
    }
    same.iter().map(State::pack).min().unwrap_or_default()
}

/// Where it begins.
fn first(v: &Variant) -> State {
    let mut w = World { v, s: State::default(), flaw: None };
    if !v.begun {
        return w.s;
    }
    let ranks = w.ranks();
    let all = (1 << v.chunks) - 1;
    w.s.ranks[..ranks].iter_mut().for_each(|rank| (rank.made, rank.sure) = (all, all));
    for place in 0..=ROOT {
        let (n, lanes) = (w.contributors(place), w.once(place));
        for seq in 0..v.chunks as u8 {
            let bits = (1 << n) - 1;
            let is_root = u8::from(place == ROOT);
            let frozen = if place == ROOT { bits } else { 0 };
            let (sent, complete) = (1 - is_root, is_root);
            *w.slot(place, seq) =
                Slot { key: seq + 1, attempt: 0, bits, frozen, lanes, sent, complete, bad: 0 };
        }
    }
    w.s
}

/// States by number, in the order in which they were found.
struct Visited {
    states: Vec<Packed>,
    from: Vec<u32>,
    table: Vec<u32>,
}

impl Visited {
    const EMPTY: u32 = u32::MAX;

    fn new() -> Visited {
        let places = (MOST_STATES * 2).next_power_of_two();
        Visited { states: Vec::new(), from: Vec::new(), table: vec![Visited::EMPTY; places] }
    }

    /// Its number.
    fn insert(&mut self, state: Packed, from: u32) -> u32 {
        let mix = |h: u64, word: &u64| (h ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
        let hash = state.iter().fold(0, mix).wrapping_mul(0xC4CE_B9FE_1A85_EC53);
        let mut place = (hash >> 32) as usize & (self.table.len() - 1);
        loop {
            match self.table[place] {
                Visited::EMPTY => break,
                number if self.states[number as usize] == state => return number,
                _ => place = (place + 1) & (self.table.len() - 1),
            }
        }
        let number = self.states.len() as u32;
        self.table[place] = number;
        self.states.push(state);
        self.from.push(from);
        number
    }

    /// From the first state to this one.
    fn path(&self, mut number: u32) -> Vec<u32> {
        let mut path = vec![number];
        while number != 0 {
            number = self.from[number as usize];
            path.push(number);
        }
        path.reverse();
        path
    }
}

/// What came out.
enum Outcome {
    Ok,
    TooMany,
    Flaw(&'static str, Vec<String>),
}

const NO_WAY: &str = "all results cannot be had any more";

fn check(v: &Variant) -> (Outcome, usize) {
    let mut visited = Visited::new();
    let first = canonical(v, &first(v));
    visited.insert(first, 0);
    // Successors of each state, one after the other.
    let (mut edges, mut ends) = (Vec::new(), Vec::new());
    let mut next = Vec::new();
    let mut at = 0;
    while at < visited.states.len() {
        if visited.states.len() > MOST_STATES {
            return (Outcome::TooMany, visited.states.len());
        }
        let state = State::unpack(&visited.states[at]);
        next.clear();
        let begin = edges.len();
        if !is_done(v, &state) {
            successors(v, &state, &mut next);
        }
        for step in &next {
            if let Some(flaw) = step.flaw {
                let (mut trace, state) = tell(v, &visited, at as u32);
                next.clear();
                successors(v, &state, &mut next);
                next.iter()
                    .filter(|next| next.flaw == Some(flaw))
                    .take(1)
                    .for_each(|next| trace.push(line(next)));
                return (Outcome::Flaw(flaw, trace), visited.states.len());
            }
            let number = visited.insert(canonical(v, &step.state), at as u32);
            if number != at as u32 && !edges[begin..].contains(&number) {
                edges.push(number);
            }
        }
        ends.push(edges.len());
        at += 1;
    }
    let outcome = match hopeless(v, &visited, &edges, &ends) {
        None => Outcome::Ok,
        Some(number) => {
            let (mut trace, state) = tell(v, &visited, number);
            trace.push(describe(&state));
            Outcome::Flaw(NO_WAY, trace)
        }
    };
    (outcome, visited.states.len())
}

/// The first state from which no state with all results can be reached.
fn hopeless(v: &Variant, visited: &Visited, edges: &[u32], ends: &[usize]) -> Option<u32> {
    let mut good: Vec<bool> =
        visited.states.iter().map(|packed| is_done(v, &State::unpack(packed))).collect();
    loop {
        let mut has_changed = false;
        for number in (0..good.len()).rev() {
            let begin = if number == 0 { 0 } else { ends[number - 1] };
            if !good[number] && edges[begin..ends[number]].iter().any(|to| good[*to as usize]) {
                good[number] = true;
                has_changed = true;
            }
        }
        if !has_changed {
            return good.iter().position(|good| !good).map(|number| number as u32);
        }
    }
}

/// All ranks have all results.
fn is_done(v: &Variant, state: &State) -> bool {
    state.ranks[..v.below[0] + v.below[1]].iter().all(|rank| usize::from(rank.ack()) == v.chunks)
}

fn line(step: &Next) -> String {
    let events = step.events.iter().filter(|event| !event.0.is_empty());
    events.map(|(what, m)| format!("{m} {what}")).collect::<Vec<_>>().join("\n      ")
}

/// The way to a state in words, with the same name for a rank all along.
fn tell(v: &Variant, visited: &Visited, number: u32) -> (Vec<String>, State) {
    let mut state = first(v);
    let mut lines = Vec::new();
    for to in &visited.path(number)[1..] {
        let mut next = Vec::new();
        successors(v, &state, &mut next);
        let target = visited.states[*to as usize];
        let Some(step) = next.iter().find(|step| canonical(v, &step.state) == target) else { break };
        lines.push(line(step));
        state = step.state;
    }
    (lines, state)
}

fn describe(state: &State) -> String {
    format!(
        "ranks {:?}\n  node 0 {:?} {:?}\n  node 1 {:?} {:?}\n  root {:?} acks {:?} {:?}",
        state.ranks,
        state.nodes[0],
        state.slots[0],
        state.nodes[1],
        state.slots[1],
        state.redo,
        state.acks,
        state.slots[ROOT]
    )
}

fn variants() -> Vec<Variant> {
    let base = Variant {
        name: "",
        rules: RULES,
        below: [2, 1],
        chunks: 1,
        slots: 1,
        window: 1,
        damages: 1,
        cap: 0,
        loss: true,
        begun: false,
        expect: None,
    };
    let pair = Variant { below: [1, 1], ..base };
    // Two redos may be open at once.
    let two = Variant { chunks: 2, slots: 2, window: 2, ..base };
    let begun = Variant { begun: true, ..two };
    let lossless = Variant { loss: false, ..two };
    let without = |name, rules, shape: Variant| Variant { name, rules, expect: Some(NO_WAY), ..shape };
    vec![
        Variant { name: "rules: 1 chunk, 1 late", cap: 1, ..base },
        Variant { name: "rules: 1 chunk, 2 bad", damages: 2, ..base },
        Variant { name: "rules: S 1, 1 + 1 ranks, 1 late", chunks: 2, cap: 1, ..pair },
        Variant { name: "rules: S 1, 2 bad", chunks: 2, damages: 2, ..base },
        Variant { name: "rules: S 2, 3 chunks", chunks: 3, slots: 2, ..base },
        Variant { name: "rules: W 2", ..two },
        Variant { name: "rules: W 2, begun, no loss, 1 late", loss: false, cap: 1, ..begun },
        Variant { name: "rules: W 2, begun, 1 + 1 ranks, 2 bad", below: [1, 1], damages: 2, ..begun },
        Variant {
            name: "rules: W 2, begun, 2 + 2 ranks, no loss, 2 bad",
            below: [2, 2],
            loss: false,
            damages: 2,
            ..begun
        },
        Variant { name: "rules: W 2, no loss, 3 bad", damages: 3, ..lossless },
        Variant { name: "long: rules: W 2, begun, 2 bad", damages: 2, ..begun },
        without(
            "a node tells its own redo first",
            Rules { earlier_first: false, ..RULES },
            Variant { below: [1, 1], damages: 2, ..lossless },
        ),
        without(
            "a ring by its own min_ack",
            Rules { ring_of_root: false, ..RULES },
            Variant { loss: false, ..pair },
        ),
        without(
            "own redo not told in what comes down",
            Rules { told_below: false, ..RULES },
            Variant { loss: false, damages: 2, ..base },
        ),
        Variant {
            name: "a result's bits for the slot's",
            rules: Rules { own_bits: false, ..RULES },
            loss: false,
            expect: Some("a rank is told ABORTED"),
            ..base
        },
        Variant {
            name: "acks of the rank that asks",
            rules: Rules { lowest_ack: false, ..RULES },
            loss: false,
            damages: 0,
            expect: Some("the root's min_ack is above the truth"),
            ..two
        },
        without(
            "a PULL does not tell a redo again, nor goes up bare",
            Rules { told_again: false, bare: false, ..RULES },
            Variant { damages: 2, ..lossless },
        ),
        without(
            "a PULL does not tell a redo again",
            Rules { told_again: false, ..RULES },
            Variant { loss: false, damages: 2, ..begun },
        ),
        without(
            "a PULL of what is redone goes up as it is",
            Rules { bare: false, ..RULES },
            Variant { loss: false, damages: 3, ..begun },
        ),
        without(
            "a PULL of what is redone is answered here",
            Rules { answered_here: true, ..RULES },
            Variant { loss: false, damages: 3, ..begun },
        ),
    ]
}

fn main() {
    let prefix = std::env::args().nth(1).unwrap_or_default();
    let mut wrong = 0;
    let is_wanted =
        |v: &&Variant| v.name.starts_with(&prefix) && !(prefix.is_empty() && v.name.starts_with("long"));
    for v in variants().iter().filter(is_wanted) {
        let started = std::time::Instant::now();
        let (outcome, states) = check(v);
        let (verdict, trace) = match outcome {
            Outcome::Ok => ("ok", Vec::new()),
            Outcome::TooMany => ("too many states", Vec::new()),
            Outcome::Flaw(flaw, trace) => (flaw, trace),
        };
        println!("{:<52} {verdict} ({states} states, {:.1} s)", v.name, started.elapsed().as_secs_f32());
        trace.iter().for_each(|line| println!("    {line}"));
        wrong += i32::from(verdict != v.expect.unwrap_or("ok"));
    }
    std::process::exit(i32::from(wrong > 0));
}
