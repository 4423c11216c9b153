//! What to send next.
//!
//! Contributions first, each with a wish; then pulls for chunks that must be complete; then, paced, a pull for the lowest
//! undelivered chunk; and when the own work is done, slow pulls for the sake of the other ranks.

use paatp_common::aggregate::unsalted;
use paatp_common::tag;
use paatp_common::wire::{Chunk, HEADER_BYTES, Kind, Request, flags};

use super::{LEAVE_CAP, LINGER_FIRST, POLL_CAP, POLL_GROWTH, Transmit, Worker, seq_of};
use crate::error::OperationError;
use crate::operation::{Opening, Step, UNKNOWN};
use crate::quantise::payload_tag;
use crate::recovery::Sent;
use crate::ring::{Contribution, Entry, Wish};
use crate::time::Time;

impl Worker {
    pub(super) fn next_datagram(&mut self, now: Time, buffer: &mut [u8]) -> Option<Transmit> {
        self.release_held(now);
        self.skip(now);
        if let Some(position) = self.next_contribution(now) {
            return self.send_contribution(now, position, buffer);
        }
        if let Some(position) = self.next_pull(now) {
            return self.send_pull(now, position, buffer);
        }
        self.send_linger_pull(now, buffer)
    }

    /// A contribution to be sent again, or a new one if the window allows it.
    fn next_contribution(&mut self, now: Time) -> Option<u64> {
        let open_below = self.busy.filter(|busy| now < busy.until).map_or(u64::MAX, |busy| busy.from);
        while let Some(index) = self.resend.iter().position(|position| *position < open_below) {
            let position = self.resend.remove(index)?;
            let is_due = |entry: &Entry| entry.contribution == Contribution::Queued && entry.held.is_none();
            let is_queued = self.ring.get(position).is_some_and(is_due);
            if position < self.end && is_queued {
                return Some(position);
            }
        }
        let position = self.next;
        if position >= self.end.min(open_below).min(self.send_limit()) {
            return None;
        }
        let pace = self.controller.pace();
        if !self.pacer.lets(now, pace) {
            return None;
        }
        if self.is_here(position) {
            return None;
        }
        let made = self.contribute(now, position)?;
        self.pacer.count(now, pace);
        Some(made)
    }

    /// First chunk that may not be contributed yet (gack is `through`): `min(gack + congestion, aack + asynchronous)`, the latter bounded by W,
    /// because result k − W must be here before chunk k is made (protocol-rules F5), and by what the aggregator grants.
    fn send_limit(&self) -> u64 {
        let windows = self.controller.windows();
        let heeded = self.granted != 0 && self.controller.heeds_grants();
        let granted = if heeded { self.granted } else { self.membership.window };
        let most = self.membership.window.min(granted).max(1);
        let asynchronous = u64::from(windows.asynchronous).clamp(1, u64::from(most));
        let congestion = u64::from(windows.congestion.max(1));
        (self.through + congestion).min(self.delivered + asynchronous).max(self.delivered + 1)
    }

    /// What all ranks agreed on for this chunk one window ahead. Only a complete result says it: an acknowledgement tells a
    /// maximum so far (protocol-rules F5).
    fn agreed_for(&self, position: u64) -> Option<i8> {
        let before = position.checked_sub(u64::from(self.membership.window))?;
        self.ring.get(before).filter(|entry| entry.wish == Wish::Delivered).map(|entry| entry.agreed)
    }

    /// Decides how the operation at `index` begins, before its first contribution. Every rank decides alike, for it looks at
    /// nothing but results:
    ///
    /// - The result one window ahead tells an exponent if every rank knew this operation when it contributed there.
    /// - It was meant for this operation's first chunk unless one that began since then has a round: that moves what follows,
    ///   and whoever proposes reckons without rounds to come.
    /// - Where chunks may lack ranks, what the same reduction came to before tells one that will do.
    pub(super) fn open(&mut self, index: usize, position: u64) {
        let window = u64::from(self.membership.window);
        let moved = self.latest_round.is_some_and(|round| round + window >= position);
        let agreed = self.agreed_for(position).filter(|exponent| *exponent != UNKNOWN && !moved);
        let guess = if agreed.is_some() { None } else { self.guess(index, position) };
        let before = position.checked_sub(window).and_then(|before| self.ring.get(before));
        let heard = before.is_some_and(|entry| entry.included && !entry.absent);
        if let Some(op) = self.operations.get_mut(index) {
            op.opening = match (agreed, guess) {
                (Some(_), _) => Opening::Handover,
                (None, Some(_)) => Opening::Guess,
                (None, None) => Opening::Round,
            };
            op.first_exponent = agreed.or(guess);
            op.heard = op.opening == Opening::Round || op.opening == Opening::Handover && heard;
        }
        if agreed.or(guess).is_none() {
            self.operations.range_mut(index + 1..).for_each(|op| op.first += 1);
            self.end += 1;
        }
    }

    /// The exponent to propose for a position that lies one window ahead, where this operation is over.
    fn propose_beyond(&self, position: u64) -> i8 {
        let op = self.operation_at(position).and_then(|index| self.operations.get(index));
        let first = op.filter(|op| op.step(position) == Step::Chunk(0));
        first.map_or(UNKNOWN, |op| op.handover(u64::from(self.membership.window), &self.residuals))
    }

    /// Makes the contribution of the next chunk; `None` if its exponent is not known yet.
    fn contribute(&mut self, now: Time, position: u64) -> Option<u64> {
        let index = self.operation_at(position)?;
        if self.operations.get(index)?.opening == Opening::Undecided {
            self.open(index, position);
        }
        let op = self.operations.get(index)?;
        let window = u64::from(self.membership.window);
        let (chunk, ahead, tag) = match op.step(position) {
            // What is left over is known when all before is done.
            Step::Round if op.flush && self.delivered < position => return None,
            Step::Round => (op.round_chunk(), op.exponent(0, window, &self.residuals), 0),
            Step::Chunk(number) => {
                let exponent = self.exponent_for(index, position, number)?;
                let piece = op.piece(number)?;
                let heard = self.was_heard(op, position, number);
                let is_long = op.needs_clipping(piece, exponent, heard, &self.residuals);
                let payload = self.ring.payload_mut(position, piece.lanes);
                let tag = if is_long {
                    op.write_clipped(piece, exponent, payload, &mut self.residuals, &mut self.scratch)?
                } else {
                    op.write(piece, exponent, payload)?
                };
                let ahead = if position + window < op.end() {
                    op.exponent(number + window, number + window + 1, &self.residuals)
                } else {
                    Ok(self.propose_beyond(position + window))
                };
                (op.chunk(number, piece, exponent)?, ahead, tag)
            }
        };
        if chunk.lanes == 0 {
            self.latest_round = Some(position);
            self.statistics.rounds += 1;
        }
        let fault = ahead.as_ref().err().cloned();
        let mut entry = Entry::new(position, chunk, ahead.unwrap_or(crate::quantise::E_MIN));
        let salt = tag::salt(self.contributors.own_key, seq_of(position), chunk);
        entry.tag = tag.wrapping_add(salt);
        entry.flagged = fault.is_some();
        if let Some(foreign) = self.ring.get(position) {
            // It was asked for before its operation was issued.
            (entry.wish, entry.asked, entry.doubted) = (foreign.wish, foreign.asked, foreign.doubted);
        }
        self.ring.put(entry);
        self.next += 1;
        self.statistics.contributions += 1;
        if let Some(error) = fault {
            self.stop_after(now, position, error);
        }
        Some(position)
    }

    /// The exponent of an operation's chunk, if it is known yet.
    pub(super) fn exponent_for(&self, index: usize, position: u64, number: u64) -> Option<i8> {
        if number < u64::from(self.membership.window) {
            self.operations.get(index)?.first_exponent
        } else {
            self.agreed_for(position)
        }
    }

    /// The values one window ahead cannot be sent. The flag on this chunk tells the other ranks; nothing is sent after it.
    fn stop_after(&mut self, now: Time, position: u64, error: OperationError) {
        if let Some(index) = self.operation_at(position) {
            self.fail_from(now, index, position + 1, error);
        }
    }

    /// The lowest wish that an answer of `lanes` lanes can grant: chunks that must be complete come first, as they are
    /// lower than all others.
    fn wish_for(&mut self, lanes: u16) -> Option<u64> {
        let fits = |entry: &Entry| entry.chunk.lanes == lanes || entry.chunk.lanes == 0;
        let end = self.open_end();
        (self.lowest_unasked()..end)
            .find(|position| self.is_unasked(*position) && self.ring.get(*position).is_some_and(fits))
    }

    fn lowest_unasked(&mut self) -> u64 {
        self.asked = self.asked.max(self.delivered);
        while self.asked < self.open_end() && !self.is_unasked(self.asked) {
            self.asked += 1;
        }
        self.asked
    }

    /// A chunk to pull: one that must be complete, or the lowest one if it is time to ask again.
    ///
    /// While contributions go out, half a window of wishes under way is enough: each result lets a contribution go, which
    /// carries the next wish for nothing. (Pulling all at once would leave the next contributions only their own chunks to
    /// wish for, which are not complete yet: two requests for each chunk, for ever.)
    ///
    /// When all are out, p_min is not enough: a rank that has all its results falls silent before it has told its last
    /// progress. Then a result that came beyond p_min is reason to guess that the next ones are there too. (Not while
    /// contributions wait for the window: there most such pulls came too early, and loaded the path.)
    fn next_pull(&mut self, now: Time) -> Option<u64> {
        let from = self.lowest_unasked();
        if self.next >= self.end || self.wishes < (self.send_limit() - self.delivered).div_ceil(2) {
            let mut ripe_end = self.others.p_min;
            if self.next >= self.end {
                ripe_end = ripe_end.max(self.guess.below);
            }
            let ripe_end = ripe_end.min(self.open_end());
            let is_idle = |p: &u64| self.ring.get(*p).is_some_and(|entry| entry.wish == Wish::Idle);
            let ripe = (from..ripe_end).find(is_idle);
            if ripe.is_some() {
                return ripe;
            }
        }
        if self.wishes < u64::from(self.membership.window) {
            // Others have gone on without this rank.
            let is_idle = |p: &u64| self.ring.get(*p).is_none_or(|entry| entry.wish == Wish::Idle);
            let from = self.delivered.max(self.next);
            let foreign = (from..self.reach().min(self.guess.below)).find(is_idle);
            if foreign.is_some() {
                return foreign;
            }
        }
        let lowest = self.delivered;
        if lowest < self.reach() && self.is_unasked(lowest) && now >= self.poll_at() {
            // What comes damaged again and again is asked for ever more rarely.
            let doubted = self.ring.get(lowest).is_some_and(|entry| entry.doubted > 0);
            self.poll.step_by(now, if doubted { 1 } else { POLL_GROWTH }, POLL_CAP);
            return Some(lowest);
        }
        None
    }

    fn send_contribution(&mut self, now: Time, position: u64, buffer: &mut [u8]) -> Option<Transmit> {
        let entry = *self.ring.get(position)?;
        // Without a wish, ask about a chunk that cannot be complete: this rank has not contributed to it.
        let wish = if entry.bare { None } else { self.wish_for(entry.chunk.lanes) };
        let about = wish.unwrap_or(self.next);
        let token =
            self.recovery.send(Sent { contribution: Some((position, entry.attempt)), wish, about, at: now });
        if let Some(entry) = self.ring.get_mut(position) {
            (entry.contribution, entry.sent, entry.bare) = (Contribution::UnderWay(token), true, false);
        }
        self.mark_asked(wish, token);
        let mut bits = flag(entry.chunk.lanes > 0, flags::PAYLOAD);
        bits |= flag(entry.sent, flags::RETRANSMIT) | flag(entry.flagged, flags::NON_FINITE);
        self.statistics.retransmissions += u64::from(entry.sent);
        let request = Request {
            kind: Kind::Data,
            flags: bits,
            seq: seq_of(position),
            want: seq_of(about),
            bitmap: 1 << self.membership.rank,
            tag: entry.tag,
            chunk: entry.chunk,
            next_exponent: entry.next_exponent,
            attempt: entry.attempt,
            ..self.blank(token)
        };
        let payload = self.ring.payload(position, entry.chunk.lanes);
        let (head, body) = buffer.split_at_mut_checked(HEADER_BYTES)?;
        head.copy_from_slice(request.encode().as_bytes());
        body.get_mut(..payload.len())?.copy_from_slice(payload);
        Some(Transmit { len: HEADER_BYTES + payload.len(), seq: request.seq })
    }

    fn send_pull(&mut self, now: Time, position: u64, buffer: &mut [u8]) -> Option<Transmit> {
        self.expect(position);
        let entry = *self.ring.get(position)?;
        let wish = Some(position);
        let token = self.recovery.send(Sent { contribution: None, wish, about: position, at: now });
        self.mark_asked(wish, token);
        self.statistics.pulls += 1;
        self.write_pull(token, position, entry.chunk.lanes, entry.asked, buffer)
    }

    /// Keeps in touch while others may need this rank's contributions again, or its last acknowledgement.
    fn send_linger_pull(&mut self, now: Time, buffer: &mut [u8]) -> Option<Transmit> {
        if !self.is_lingering() || now < self.linger.at {
            return None;
        }
        let slow = LINGER_FIRST.max(self.settings.timeout / 4);
        self.linger.step(now, if self.leaving.is_some() { slow.min(LEAVE_CAP) } else { slow });
        // About a chunk that cannot be complete: an answer that carried a result would not tell min_ack.
        let about = self.next;
        let token = self.recovery.send(Sent { contribution: None, wish: None, about, at: now });
        self.statistics.pulls += 1;
        self.statistics.linger_pulls += 1;
        self.write_pull(token, about, 0, false, buffer)
    }

    /// A pull is as long as the result that it asks for, because the answer is made in its place.
    fn write_pull(
        &self,
        token: u32,
        position: u64,
        lanes: u16,
        again: bool,
        buffer: &mut [u8],
    ) -> Option<Transmit> {
        let seq = seq_of(position);
        let flags = flag(lanes > 0, flags::PAYLOAD) | flag(again, flags::RETRANSMIT);
        let chunk = Chunk { lanes, ..Chunk::default() };
        let request = Request { kind: Kind::Pull, flags, seq, want: seq, chunk, ..self.blank(token) };
        let len = HEADER_BYTES + usize::from(lanes) * 4;
        let (head, body) = buffer.get_mut(..len)?.split_at_mut_checked(HEADER_BYTES)?;
        head.copy_from_slice(request.encode().as_bytes());
        body.fill(0);
        Some(Transmit { len, seq })
    }

    /// What all requests say alike.
    fn blank(&self, token: u32) -> Request {
        Request {
            kind: Kind::Pull,
            flags: 0,
            job: self.membership.job,
            worker: self.membership.rank,
            generation: self.membership.generation,
            seq: seq_of(self.next),
            want: seq_of(self.next),
            ack: seq_of(self.delivered),
            progress: seq_of(self.acknowledged),
            token,
            bitmap: 0,
            tag: 0,
            chunk: Chunk::default(),
            next_exponent: 0,
            attempt: 0,
        }
    }

    fn mark_asked(&mut self, wish: Option<u64>, token: u32) {
        if let Some(entry) = wish.and_then(|position| self.ring.get_mut(position)) {
            entry.wish = Wish::Asked(token);
            entry.asked = true;
            self.wishes += 1;
        }
    }

    /// A result's tag, less the salts of its contributors, is that of its payload.
    pub(super) fn is_sound(
        &mut self,
        position: u64,
        chunk: Chunk,
        bitmap: u64,
        tag: u64,
        payload: &[u8],
    ) -> bool {
        payload_tag(payload) == unsalted(tag, self.contributors.keys(bitmap), seq_of(position), chunk)
    }
}

/// `bit` if `on`.
const fn flag(on: bool, bit: u8) -> u8 {
    if on { bit } else { 0 }
}
