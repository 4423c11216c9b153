//! The state machine of one rank.
//!
//! Every chunk has a *contribution*, to be acknowledged, and a *wish*, to be granted; both rest on requests that may get
//! lost. Chunks are counted by positions: 64-bit, from the job's beginning; the low half is the sequence number on the wire.
//! `docs/numerics.md` says what chunks hold, `protocol-rules` (F…) why the rules are as they are.

mod ending;
mod pacer;
mod receive;
mod staleness;
mod transmit;

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::time::Duration;

use paatp_common::limits::MAX_RANKS;
use paatp_common::wire::HEADER_BYTES;
use paatp_common::{Seq, tag};

use crate::error::OperationError;
use crate::membership::{Membership, MembershipError, Settings};
use crate::operation::{Operation, Shape};
use crate::quantise::Quantiser;
use crate::rate::{Controller, Fixed};
use crate::recovery::Recovery;
use crate::residual::Residuals;
use crate::ring::{Ring, Wish};
use crate::seating::Names;
use crate::statistics::Statistics;
use crate::synchronisation::{Iterations, Synchronisation};
use crate::tensor::{Handle, Reduction, Tensor};
use crate::time::{Backoff, Time};
use pacer::Pacer;
use staleness::Outcomes;

/// Shortest interval between polls for the lowest chunk (half a round trip, if that is longer), and the first one before a
/// round trip was measured. Each operation's first chunk and its last ones wait for a poll, so this is seen in every one.
const POLL_FLOOR: Duration = Duration::from_micros(10);
const POLL_UNMEASURED: Duration = Duration::from_millis(1);
/// Longest interval between polls: a late rank is noticed within this time.
const POLL_CAP: Duration = Duration::from_millis(10);
/// An interval between polls is longer than the one before by one part in so many: what a late rank took, its chunks are
/// noticed at most an eighth of that later. (Twice as long each time meant up to as much again.)
const POLL_GROWTH: u32 = 8;
/// Round trips to the aggregator that a result which a switch is to bring may take longer than one that is polled for: the
/// rank that comes last, and then the aggregator's queue. Ours.
const COPY_TRIPS: u32 = 2;
/// First and longest wait after BUSY. Ring and pool free up within round trips, unless a rank is stuck.
const BUSY_FIRST: Duration = Duration::from_micros(100);
const BUSY_CAP: Duration = Duration::from_millis(10);
/// First interval of the linger pulls; it doubles up to a quarter of the job's timeout (protocol-rules F24).
const LINGER_FIRST: Duration = Duration::from_millis(1);
/// Longest interval of the linger pulls of a rank that leaves: its user waits for the end.
const LEAVE_CAP: Duration = Duration::from_millis(100);

/// Something that the user of a [`Worker`] waits for.
#[derive(Debug)]
pub enum Event {
    /// An operation is done; the tensors hold its result.
    Done {
        /// The operation.
        handle: Handle,
        /// The tensors that were handed in.
        tensors: Vec<Tensor>,
        /// How ranks waited for one another: the same at every rank.
        synchronisation: Synchronisation,
    },
    /// An operation failed.
    Failed {
        /// The operation.
        handle: Handle,
        /// Why.
        error: OperationError,
    },
    /// The last event after [`Worker::leave`].
    Left {
        /// Every rank has every result; otherwise the time to linger was over, or the job failed.
        complete: bool,
    },
}

/// A datagram that was written to the buffer, to be sent as ECT(0): the network may mark it instead of dropping it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// Bytes of the datagram.
    pub len: usize,
    /// Chunk: it belongs to port `base + seq mod ports`.
    pub seq: Seq,
}

/// Where a worker stands in the life of its generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Operations are run.
    Running,
    /// An operation failed at this time; what was begun is finished, so that the other ranks learn of it.
    Draining(Time),
    /// Nothing is sent any more.
    Halted,
}

/// What came in since the lowest undelivered chunk is waited for.
#[derive(Clone, Copy, Debug, Default)]
struct Waiting {
    /// Since when no chunk was delivered.
    since: Time,
    /// An answer came.
    answered: bool,
    /// Contributors of the lowest undelivered chunk, by the latest answer about it.
    present: Option<Present>,
}

/// Contributors of a chunk, as an answer tells them.
#[derive(Clone, Copy, Debug)]
struct Present {
    bitmap: u64,
    /// The root's bits, not those of this rank's node.
    above: bool,
}

/// Chunks that are thought to be complete although no answer has said so: as many again as were found to be.
#[derive(Clone, Copy, Debug, Default)]
struct Guess {
    below: u64,
    found: u64,
}

impl Guess {
    /// The result of a chunk came that need not have been complete.
    fn confirm(&mut self, position: u64) {
        self.found += 1;
        self.below = self.below.max(position + 1 + self.found);
    }

    /// A chunk is not complete.
    fn disappoint(&mut self, position: u64) {
        *self = Guess { below: self.below.min(position), found: 0 };
    }
}

/// Contributions from this chunk on wait, because the aggregator has no room for it.
#[derive(Clone, Copy, Debug)]
struct Busy {
    from: u64,
    until: Time,
    /// The others' min_ack at that time.
    min_ack: u64,
}

/// What the answers tell of the other ranks.
#[derive(Clone, Copy, Debug, Default)]
struct Others {
    /// Every rank's contributions below are acknowledged: these chunks are complete, unless they are redone.
    p_min: u64,
    p_max: u64,
    /// Every rank has the results below (protocol-rules F2: not the same as `p_min`).
    min_ack: u64,
    slowest: u8,
}

/// Whom the bits of results stand for, and the factors of their salts.
#[derive(Debug)]
struct Contributors {
    names: Names,
    /// All bits, and the one that this rank has, alone or with others.
    everybody: u64,
    own: u64,
    own_key: u64,
    /// By bit.
    keys: Vec<u64>,
    /// A bitmap, the sum of its keys and the number of its ranks: most results have the same contributors.
    cached: (u64, u64, u32),
}

impl Contributors {
    fn new(membership: &Membership) -> Contributors {
        let (names, nonce) = (membership.root(), membership.nonce);
        let bits = names.bits();
        Contributors {
            names,
            everybody: u64::MAX >> (MAX_RANKS as u32 - u32::from(bits).max(1)),
            own: 1 << membership.seat(),
            own_key: tag::rank_key(nonce, membership.number()),
            keys: (0..bits).map(|bit| names.key(nonce, bit)).collect(),
            cached: (0, 0, 0),
        }
    }

    /// Looks the contributors of a result up.
    fn look_up(&mut self, bitmap: u64) -> (u64, u32) {
        if self.cached.0 != bitmap {
            let keys = self.keys.iter().zip(0..MAX_RANKS).filter(|(_, bit)| bitmap >> bit & 1 == 1);
            let sum = keys.fold(0u64, |sum, (key, _)| sum.wrapping_add(*key));
            self.cached = (bitmap, sum, self.names.count(bitmap));
        }
        (self.cached.1, self.cached.2)
    }

    /// The sum of their keys.
    fn keys(&mut self, bitmap: u64) -> u64 {
        self.look_up(bitmap).0
    }

    /// Their number.
    fn count(&mut self, bitmap: u64) -> u32 {
        self.look_up(bitmap).1
    }
}

/// One rank of a job. See the crate's documentation; drive it as
///
/// ```text
/// loop { while poll_transmit … send; while poll_event … handle; wait for a datagram or poll_timeout;
///        handle_datagram or handle_timeout }
/// ```
#[derive(Debug)]
pub struct Worker {
    membership: Membership,
    settings: Settings,
    quantiser: Quantiser,
    contributors: Contributors,
    controller: Box<dyn Controller>,
    /// Asynchronous window that the latest answer granted; 0: nothing was said.
    granted: u16,
    /// Rate-control gain that the aggregator gave this rank last.
    gain: i8,
    pacer: Pacer,
    recovery: Recovery,
    ring: Ring,
    statistics: Statistics,
    operations: VecDeque<Operation>,
    events: VecDeque<Event>,
    handles: u64,

    /// All results below have been delivered: `ack` on the wire.
    delivered: u64,
    /// All contributions below have been acknowledged, or their results delivered: `progress` on the wire.
    acknowledged: u64,
    /// The same without what only a switch acknowledged: that may yet have the aggregator's link before it.
    through: u64,
    /// First chunk that was never contributed.
    next: u64,
    /// First chunk after all operations: one less than it will be for each that turns out to need a round.
    end: u64,
    /// The latest exponent round that was contributed.
    latest_round: Option<u64>,
    /// All wishes from `delivered` up to here are asked for or granted.
    asked: u64,
    /// Wishes that rest on requests under way.
    wishes: u64,
    /// Chunks whose contributions are to be sent again; may name some that are not any more.
    resend: VecDeque<u64>,
    /// Chunks whose contributions are to be sent again later (`Entry::held`); may name some that are not any more.
    held: Vec<u64>,

    others: Others,
    waiting: Waiting,
    busy: Option<Busy>,
    busy_delay: Duration,
    poll: Backoff,
    guess: Guess,
    linger: Backoff,
    phase: Phase,
    /// A result that its type cannot hold: its position and the error, until all before it are delivered.
    overflow: Option<(u64, OperationError)>,
    leaving: Option<Time>,
    left: bool,

    /// Mode of the last operation that is done.
    synchronisation: Synchronisation,
    iterations: Iterations,
    /// Chunks may be complete without this rank.
    partial: bool,
    /// Lanes of the latest chunk that this rank had no operation for.
    foreign_lanes: u16,
    residuals: Residuals,
    /// One chunk's values, with what is left over.
    scratch: Vec<f64>,
    outcomes: Outcomes,
}

impl Worker {
    /// A worker whose window is always the job's.
    ///
    /// # Errors
    /// What does not fit in the membership.
    pub fn new(membership: Membership, settings: Settings) -> Result<Worker, MembershipError> {
        Worker::with_controller(membership, settings, Box::new(Fixed::new(u32::from(membership.window))))
    }

    /// A worker with a rate controller; see [`Algorithm::controller`](crate::rate::Algorithm::controller).
    ///
    /// # Errors
    /// What does not fit in the membership.
    pub fn with_controller(
        membership: Membership,
        settings: Settings,
        controller: Box<dyn Controller>,
    ) -> Result<Worker, MembershipError> {
        membership.check()?;
        let most = usize::from(membership.window) * 4 + 16;
        let start = Backoff::new(Time(0), LINGER_FIRST);
        Ok(Worker {
            membership,
            settings,
            quantiser: Quantiser::new(membership.total()),
            contributors: Contributors::new(&membership),
            controller,
            granted: 0,
            gain: 0,
            pacer: Pacer::default(),
            recovery: Recovery::new(most),
            ring: Ring::new(&membership),
            statistics: Statistics::default(),
            operations: VecDeque::new(),
            events: VecDeque::with_capacity(8),
            handles: 0,
            delivered: 0,
            acknowledged: 0,
            through: 0,
            next: 0,
            end: 0,
            latest_round: None,
            asked: 0,
            wishes: 0,
            resend: VecDeque::with_capacity(most),
            held: Vec::with_capacity(most),
            others: Others::default(),
            waiting: Waiting::default(),
            busy: None,
            busy_delay: BUSY_FIRST,
            poll: start,
            guess: Guess::default(),
            linger: start,
            phase: Phase::Running,
            overflow: None,
            leaving: None,
            left: false,
            synchronisation: Synchronisation::default(),
            iterations: Iterations::default(),
            partial: false,
            foreign_lanes: membership.lanes,
            residuals: Residuals::default(),
            scratch: Vec::with_capacity(usize::from(membership.lanes)),
            outcomes: Outcomes::default(),
        })
    }

    /// Queues an all-reduce of many tensors, back to back with earlier ones. The values come back in the event, in place.
    pub fn all_reduce(&mut self, now: Time, reduction: Reduction, tensors: Vec<Tensor>) -> Handle {
        self.enqueue(now, reduction, tensors, false)
    }

    /// As [`Worker::all_reduce`], with every rank whatever the job's quorum, and with all that is left over of earlier
    /// operations: the last one of a job, or a part of what a rank computed is lost.
    pub fn flush(&mut self, now: Time, reduction: Reduction, tensors: Vec<Tensor>) -> Handle {
        self.enqueue(now, reduction, tensors, true)
    }

    fn enqueue(&mut self, now: Time, reduction: Reduction, tensors: Vec<Tensor>, flush: bool) -> Handle {
        let handle = Handle(self.handles);
        self.handles += 1;
        if self.phase != Phase::Running || self.leaving.is_some() || self.overflow.is_some() {
            self.events.push_back(Event::Failed { handle, error: OperationError::Over });
            return handle;
        }
        if self.operations.is_empty() {
            self.waiting = Waiting { since: now, ..Waiting::default() };
            self.reset_timers(now);
        }
        let shape = Shape { lanes: self.membership.lanes, quantiser: self.quantiser };
        let operation = Operation::new(handle, self.end, reduction, tensors, flush, shape);
        self.end = operation.end();
        self.operations.push_back(operation);
        handle
    }

    /// No further operations: stay at hand until every rank has everything, or for [`Settings::linger`] after the own
    /// work is done; then [`Event::Left`].
    pub fn leave(&mut self, now: Time) {
        if self.leaving.is_none() {
            self.leaving = Some(now);
            // The others may wait for this rank's last acknowledgement.
            self.linger = Backoff::at_once(now, LINGER_FIRST);
            self.look_for_the_end();
        }
    }

    /// Writes the next datagram to `buffer`; `None` if there is nothing to send now, or the buffer is shorter than
    /// [`Worker::datagram_bytes`].
    pub fn poll_transmit(&mut self, now: Time, buffer: &mut [u8]) -> Option<Transmit> {
        if self.phase == Phase::Halted || buffer.len() < self.datagram_bytes() {
            return None;
        }
        let transmit = self.next_datagram(now, buffer)?;
        self.statistics.datagrams_sent += 1;
        self.statistics.bytes_sent += transmit.len as u64;
        Some(transmit)
    }

    /// Length of the longest datagram of this job.
    #[must_use]
    pub const fn datagram_bytes(&self) -> usize {
        HEADER_BYTES + 4 * self.membership.lanes as usize
    }

    /// Takes in a datagram from the aggregator.
    pub fn handle_datagram(&mut self, now: Time, datagram: &[u8]) {
        self.handle(now, datagram, false);
    }

    /// Takes in a datagram from the aggregator whose IP header is marked CE: results are as large as contributions, so
    /// their path may be the one that is full. For drivers that can see it (`IP_RECVTOS`, `IPV6_RECVTCLASS`).
    pub fn handle_marked_datagram(&mut self, now: Time, datagram: &[u8]) {
        self.handle(now, datagram, true);
    }

    fn handle(&mut self, now: Time, datagram: &[u8], marked: bool) {
        self.statistics.datagrams_received += 1;
        self.statistics.bytes_received += datagram.len() as u64;
        // Also when halted: what was damaged is to be counted.
        self.take(now, datagram, marked);
        if self.phase != Phase::Halted {
            self.detect_losses(now);
            self.look_for_the_end();
        }
    }

    /// When to call [`Worker::handle_timeout`], if nothing arrives before.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        if self.phase == Phase::Halted {
            return None;
        }
        let poll = (self.delivered < self.reach() && self.is_unasked(self.delivered)).then(|| self.poll_at());
        let linger = self.is_lingering().then_some(self.linger.at);
        let busy = self.busy.map(|busy| busy.until);
        let held = self.held.iter().filter_map(|position| self.ring.get(*position)?.held).min();
        let pace = self.pacer.waiting;
        [self.recovery.deadline(), poll, linger, busy, held, pace, self.deadline()]
            .into_iter()
            .flatten()
            .min()
    }

    /// The time that [`Worker::poll_timeout`] told has come. Harmless at other times.
    pub fn handle_timeout(&mut self, now: Time) {
        if self.phase == Phase::Halted {
            return;
        }
        if self.busy.is_some_and(|busy| now >= busy.until) {
            self.busy = None;
        }
        self.pacer.waiting = self.pacer.waiting.filter(|at| now < *at);
        self.release_held(now);
        self.detect_losses(now);
        self.meet_deadlines(now);
        self.look_for_the_end();
    }

    /// What has happened, oldest first.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// The rate controller, to look at.
    #[must_use]
    pub fn controller(&self) -> &dyn Controller {
        self.controller.as_ref()
    }

    /// Its place in the job.
    #[must_use]
    pub const fn membership(&self) -> &Membership {
        &self.membership
    }

    /// What was counted.
    pub const fn statistics(&self) -> &Statistics {
        &self.statistics
    }

    /// Chunks delivered, and queued in total, exponent rounds included.
    #[must_use]
    pub const fn chunks(&self) -> (u64, u64) {
        if self.delivered < self.end { (self.delivered, self.end) } else { (self.end, self.end) }
    }

    /// First chunk that this worker has no business with: neither contributed nor cut off by a failure.
    fn open_end(&self) -> u64 {
        self.next.min(self.end)
    }

    fn is_unasked(&self, position: u64) -> bool {
        match self.ring.get(position) {
            Some(entry) => matches!(entry.wish, Wish::Idle | Wish::Refused),
            None => position >= self.next && position < self.reach(),
        }
    }

    /// All own work is done. A failure may have cut the end off below what was delivered.
    fn has_everything(&self) -> bool {
        self.delivered >= self.end && self.acknowledged >= self.end
    }

    /// All own work is done, and others may still need this rank (protocol-rules F1 i).
    fn is_lingering(&self) -> bool {
        self.has_everything() && self.others.min_ack < self.end
    }

    /// The operation that a position belongs to, as an index.
    fn operation_at(&self, position: u64) -> Option<usize> {
        let index = self.operations.partition_point(|op| op.end() <= position);
        self.operations.get(index).filter(|op| op.first <= position).map(|_| index)
    }

    /// The position with this sequence number: the one nearest to the lowest undelivered chunk.
    fn position_of(&self, seq: Seq) -> Option<u64> {
        let ahead = seq.since(seq_of(self.delivered)) as i32;
        self.delivered.checked_add_signed(i64::from(ahead))
    }

    /// When the lowest chunk may be polled for. What a switch has acknowledged it brings by itself; to ask for it all the same
    /// would cost the aggregator what the switch saves it.
    fn poll_at(&self) -> Time {
        let is_entrusted = self.ring.get(self.delivered).is_some_and(|entry| entry.entrusted);
        let trip = self.recovery.srtt().filter(|_| is_entrusted).unwrap_or_default();
        self.poll.at.plus((trip * COPY_TRIPS).min(POLL_CAP))
    }

    /// Something moved: waits start from their shortest again.
    fn reset_timers(&mut self, now: Time) {
        let half_trip = self.recovery.srtt().map_or(POLL_UNMEASURED, |srtt| srtt / 2);
        self.poll = Backoff::new(now, half_trip.clamp(POLL_FLOOR, POLL_CAP));
        self.linger = Backoff::new(now, LINGER_FIRST);
        self.busy_delay = BUSY_FIRST;
    }
}

/// The sequence number of a position.
const fn seq_of(position: u64) -> Seq {
    Seq(position as u32)
}
