//! What an answer changes.

use alloc::string::String;
use alloc::vec::Vec;

use paatp_common::Refusal;
use paatp_common::limits::MAX_ATTEMPTS;
use paatp_common::wire::{Answer, Body, HEADER_BYTES, Header, Redo, Status};

use super::staleness::note_outcome;
use super::{BUSY_CAP, Busy, Event, Phase, Present, Waiting, Worker, seq_of};
use crate::error::OperationError;
use crate::operation::{Operation, Step};
use crate::quantise::Scale;
use crate::rate::Feedback;
use crate::recovery::Settled;
use crate::ring::{Contribution, Entry, Wish};
use crate::synchronisation::Synchronisation;
use crate::time::Time;

/// Results of one attempt that fail their check before a redo is asked for: the first may have been damaged on the wire,
/// which asking again mends (protocol-rules part 2.1).
const FAILURES_BEFORE_REDO: u8 = 2;

/// Contributions to one chunk that may be refused as damaged, in a row, before the operation fails. The first is sent
/// again at once (a flipped bit), the others after pauses that double: two seconds pass in all.
const MOST_REFUSALS: u8 = 16;

/// What the check of a result came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// It is awaited, and sound.
    Sound,
    /// It is awaited, and damaged.
    Damaged,
    /// Nobody waits for it: whatever it holds changes nothing.
    Unwanted,
}

/// A result as it arrived.
pub(super) struct Arrived<'a> {
    pub position: u64,
    pub bitmap: u64,
    pub tag: u64,
    pub exponent: i8,
    pub next_exponent: i8,
    pub attempt: u8,
    pub non_finite: Option<u8>,
    pub synchronisation: Synchronisation,
    pub payload: &'a [u8],
}

impl Worker {
    /// Reads a datagram and acts on it, if it is an answer for this worker.
    pub(super) fn take(&mut self, now: Time, datagram: &[u8], marked: bool) {
        let Some((header, payload)) = Header::of(datagram).zip(datagram.get(HEADER_BYTES..)) else {
            return self.statistics.refuse(Refusal::Truncated);
        };
        let answer = match Answer::decode(header) {
            Ok(answer) => answer,
            Err(refusal) => return self.statistics.refuse(refusal),
        };
        let (us, them) = (&self.membership, &answer);
        if (us.job, us.rank, us.generation) != (them.job, them.worker, them.generation) {
            self.statistics.foreign_answers += 1;
            return;
        }
        let lanes = if let Body::Result { lanes, .. } = answer.body { lanes } else { 0 };
        if payload.len() != usize::from(lanes) * 4 {
            return self.statistics.refuse(Refusal::LengthMismatch);
        }
        if answer.status == Status::Rejoin {
            // Nothing else in it is true: the header is the request's.
            return self.halt(OperationError::Rejoin);
        }
        let arrived = self.arrived(&answer, payload);
        let result = arrived.map(|arrived| (self.check(&arrived), arrived));
        if self.phase != Phase::Halted {
            self.statistics.ecn_marks += u64::from(marked);
            self.obey(now, &answer, result, marked);
        }
    }

    /// The result in an answer, if its chunk has a position.
    fn arrived<'a>(&mut self, answer: &Answer, payload: &'a [u8]) -> Option<Arrived<'a>> {
        let Body::Result { want, bitmap, tag, exponent, next_exponent, non_finite, .. } = answer.body else {
            return None;
        };
        let Some(position) = self.position_of(want) else {
            self.statistics.unexpected_results += 1;
            return None;
        };
        let attempt = answer.attempt;
        let synchronisation = Synchronisation { epoch: answer.epoch, told: answer.told };
        Some(Arrived {
            position,
            bitmap,
            tag,
            exponent,
            next_exponent,
            attempt,
            non_finite,
            synchronisation,
            payload,
        })
    }

    fn obey(&mut self, now: Time, answer: &Answer, result: Option<(Verdict, Arrived<'_>)>, marked: bool) {
        self.waiting.answered = true;
        self.learn(answer);
        // The token of a copy is nobody's.
        let is_copy = answer.by_switch && result.is_some();
        let settled = match answer.by_switch {
            true if is_copy => None,
            true => self.recovery.settle_on_the_way(now, answer.token),
            false => self.recovery.settle(now, answer.token),
        };
        self.statistics.copied_results += u64::from(is_copy);
        self.statistics.late_answers += u64::from(settled.is_some_and(|s| s.late));
        self.statistics.srtt_us = self.recovery.srtt().map_or(0, |srtt| srtt.as_micros() as u64);
        let before = self.through;
        self.heed(now, answer, result, settled);
        self.controller.on_answer(&Feedback {
            now,
            rtt: settled.filter(|_| !answer.by_switch).map(|s| s.rtt),
            ecn_echo: answer.ecn_echo || marked,
            busy: answer.status == Status::Busy,
            p_min: self.others.p_min,
            p_max: self.others.p_max,
            progress: self.acknowledged,
            through: self.through,
            delivered: self.delivered,
            next: self.next,
            granted: answer.window,
            gain: self.gain,
            chunks_through: self.through.saturating_sub(before).min(u64::from(u32::MAX)) as u32,
        });
    }

    /// Acts on the result, on what is told instead of one, and on what became of the request.
    fn heed(
        &mut self,
        now: Time,
        answer: &Answer,
        result: Option<(Verdict, Arrived<'_>)>,
        settled: Option<Settled>,
    ) {
        match answer.body {
            Body::Result { .. } => match result {
                Some((Verdict::Sound, arrived)) => self.deliver(now, &arrived),
                Some((Verdict::Damaged, arrived)) => self.doubt(now, arrived.position, arrived.attempt),
                Some((Verdict::Unwanted, _)) | None => {}
            },
            // A switch has not looked at the wished-for chunk, nor does it know what the others have.
            Body::Pending { .. } if answer.by_switch => {}
            Body::Pending { min_ack, bitmap, above, redo, .. } => {
                self.partial = answer.told.is_partial();
                let min_ack = self.position_of(min_ack).filter(|position| *position <= self.delivered);
                self.others.min_ack = self.others.min_ack.max(min_ack.unwrap_or(0));
                self.open_gate();
                if let Some(redo) = redo {
                    self.join_redo(redo);
                }
                // A pull is told the attempt of the chunk that it asks about, a contribution that of its own.
                let is_pull = settled.is_some_and(|s| s.sent.contribution.is_none());
                if is_pull && answer.status != Status::Aborted {
                    self.join_redo(Redo { seq: answer.seq, attempt: answer.attempt });
                }
                if settled.is_some_and(|s| s.sent.about == self.delivered) && answer.status != Status::Aborted
                {
                    self.waiting.present = Some(Present { bitmap, above });
                }
                if let Some(settled) = settled {
                    self.reclaim(settled.sent.about, Present { bitmap, above });
                }
            }
        }
        let Some(Settled { sent, .. }) = settled else { return };
        if let Some(position) = sent.wish {
            match answer.body {
                Body::Pending { .. } if answer.by_switch => {}
                Body::Pending { lanes: 0, .. } => self.guess.disappoint(position),
                Body::Pending { lanes, .. } => self.learn_length(position, lanes),
                Body::Result { .. } => {}
            }
            let should_be_there = position < self.position_of(answer.p_min).unwrap_or(0);
            let refused = should_be_there && !answer.by_switch && matches!(answer.body, Body::Pending { .. });
            self.release_wish(position, answer.token, if refused { Wish::Refused } else { Wish::Idle });
        }
        match sent.contribution {
            Some((position, attempt)) => self.heed_status(now, answer, position, attempt),
            // A redo that lacks a rank; or a node of a lower level took the pull to its parent as the sum of its ranks,
            // and that was refused.
            None if answer.status == Status::Aborted && matches!(answer.body, Body::Pending { .. }) => {
                self.abort(sent.about, answer);
            }
            None => {}
        }
    }

    /// Takes in what the answer tells of the other ranks.
    fn learn(&mut self, answer: &Answer) {
        self.statistics.ecn_echoes += u64::from(answer.ecn_echo);
        let p_min = self.position_of(answer.p_min).unwrap_or(0).min(self.next);
        self.others.p_min = self.others.p_min.max(p_min);
        self.others.p_max = self.others.p_max.max(self.position_of(answer.p_max).unwrap_or(0));
        self.granted = answer.window;
        if answer.by_switch {
            return;
        }
        self.gain = answer.gain;
        self.partial |= answer.told.is_partial();
        if !matches!(answer.body, Body::Result { non_finite: Some(_), .. }) {
            self.others.slowest = answer.slowest;
        }
    }

    /// What the status says of the contribution in the answered request.
    fn heed_status(&mut self, now: Time, answer: &Answer, position: u64, attempt: u8) {
        let Some(entry) = self.ring.get_mut(position) else { return };
        let current = entry.contribution == Contribution::UnderWay(answer.token);
        if answer.status != Status::BadTag {
            // The aggregator checks every payload, so this one was sound.
            entry.refused = 0;
        }
        match answer.status {
            // Late contributions are not included, but whether one was is the result's bitmap's to say (F7).
            Status::Ok | Status::Stale | Status::NotIncluded => {
                if attempt == entry.attempt {
                    entry.entrusted = answer.by_switch;
                    self.acknowledge(position);
                }
            }
            Status::Busy | Status::Conflict | Status::BadLength | Status::NotYet => {
                self.statistics.busy += u64::from(answer.status == Status::Busy);
                if current {
                    self.wait_for_room(now, position);
                    self.queue(position);
                }
            }
            Status::BadTag => {
                self.statistics.bad_tags += 1;
                if current {
                    self.send_again_after_damage(now, position);
                }
            }
            Status::OldAttempt | Status::Aborted if matches!(answer.body, Body::Result { .. }) => {
                if current {
                    entry.bare = true;
                    self.queue(position);
                }
            }
            Status::OldAttempt => {
                // Equal to the slot's, or the next one if this rank was ahead of it.
                let slot = answer.attempt;
                let adopted = if attempt > slot { slot.saturating_add(1) } else { slot };
                if current && attempt == entry.attempt {
                    self.restart(position, adopted);
                }
            }
            Status::Aborted => self.abort(position, answer),
            Status::Rejoin => {}
        }
    }

    /// The aggregator has not this rank's contribution to a chunk that every rank has contributed to: the partial sum that
    /// it was in was lost or refused. Sent again it goes past the switch (protocol-rules F15).
    ///
    /// Before that it may well be in a switch that waits for other ranks. And whoever came last was acknowledged by the
    /// aggregator itself, so the sum is not under way either.
    fn reclaim(&mut self, position: u64, present: Present) {
        let own = if present.above { self.membership.seat() } else { self.membership.rank };
        if position >= self.others.p_min || present.bitmap >> own & 1 == 1 {
            return;
        }
        let Some(entry) = self.ring.get_mut(position) else { return };
        if entry.entrusted && entry.contribution == Contribution::Acknowledged {
            entry.entrusted = false;
            self.statistics.reclaimed += 1;
            self.queue(position);
        }
    }

    /// The contribution is in the slot.
    fn acknowledge(&mut self, position: u64) {
        if let Some(entry) = self.ring.get_mut(position) {
            (entry.contribution, entry.held) = (Contribution::Acknowledged, None);
        }
        self.advance_progress();
    }

    /// All results up to the first that is missing are here.
    pub(super) fn advance_delivered(&mut self) {
        while self.delivered < self.reach() && self.is_delivered(self.delivered) {
            self.delivered += 1;
        }
        self.advance_progress();
    }

    /// Progress never goes back, nor stops at a chunk that is only wanted again for a redo: the aggregator takes no jump of
    /// more than the ring (protocol-rules F13).
    fn advance_progress(&mut self) {
        let known = if self.reach() > self.end { self.delivered } else { self.delivered.min(self.end) };
        self.acknowledged = self.acknowledged.max(known);
        let is_in = |entry: &Entry| entry.contribution == Contribution::Acknowledged;
        while self.acknowledged < self.open_end() && self.ring.get(self.acknowledged).is_some_and(is_in) {
            self.acknowledged += 1;
        }
        self.through = self.through.max(known);
        let is_through = |entry: &Entry| is_in(entry) && (!entry.entrusted || entry.wish == Wish::Delivered);
        while self.through < self.acknowledged && self.ring.get(self.through).is_some_and(is_through) {
            self.through += 1;
        }
    }

    /// The contribution is to be sent again.
    fn queue(&mut self, position: u64) {
        if let Some(entry) = self.ring.get_mut(position) {
            entry.contribution = Contribution::Queued;
            self.resend.push_back(position);
        }
    }

    /// The contribution arrived damaged: at once the first time, then ever later, and in the end not at all.
    fn send_again_after_damage(&mut self, now: Time, position: u64) {
        let Some(entry) = self.ring.get_mut(position) else { return };
        entry.refused = entry.refused.saturating_add(1);
        match entry.refused {
            1 => self.queue(position),
            refusals if refusals < MOST_REFUSALS => self.hold(now, position, refusals - 2),
            refusals => {
                let tensor = self.tensor_at(position, 0);
                self.halt(OperationError::DamagedOnTheWay { tensor, refusals });
            }
        }
    }

    /// The contribution is to be sent again after a pause.
    fn hold(&mut self, now: Time, position: u64, doublings: u8) {
        let until = now.plus(self.recovery.pause(doublings));
        let Some(entry) = self.ring.get_mut(position) else { return };
        (entry.contribution, entry.held) = (Contribution::Queued, Some(until));
        if !self.held.contains(&position) {
            self.held.push(position);
        }
    }

    /// Ends the pauses that are over.
    pub(super) fn release_held(&mut self, now: Time) {
        let (ring, resend) = (&mut self.ring, &mut self.resend);
        self.held.retain(|position| {
            let Some(entry) = ring.get_mut(*position) else { return false };
            let over = entry.held.is_some_and(|until| until <= now);
            if over {
                entry.held = None;
                resend.push_back(*position);
            }
            entry.held.is_some()
        });
    }

    /// The contribution is to be sent again under another attempt; what was acknowledged of it is void, also if this rank
    /// has the result already (protocol-rules F1 iii, part 2.2).
    fn restart(&mut self, position: u64, attempt: u8) {
        let Some(entry) = self.ring.get_mut(position) else { return };
        if entry.absent {
            // Only whoever is in the result can redo it (protocol-rules F3).
            return;
        }
        if !entry.restart(attempt) {
            return self.abort_for(position, Refusal::TooManyAttempts, Vec::new());
        }
        if entry.wish == Wish::Refused {
            entry.wish = Wish::Idle;
        }
        self.asked = self.asked.min(position);
        self.resend.push_back(position);
        self.statistics.redos_joined += 1;
    }

    fn join_redo(&mut self, redo: Redo) {
        let Some(position) = self.position_of(redo.seq).filter(|position| *position < self.open_end()) else {
            return;
        };
        if self.ring.get(position).is_some_and(|entry| entry.attempt < redo.attempt) {
            self.restart(position, redo.attempt);
        }
    }

    /// There is no room: wait, twice as long each time, before contributions from there on are sent.
    fn wait_for_room(&mut self, now: Time, position: u64) {
        match &mut self.busy {
            // One burst of refusals is one.
            Some(busy) if now < busy.until => busy.from = busy.from.min(position),
            _ => {
                let (until, min_ack) = (now.plus(self.busy_delay), self.others.min_ack);
                self.busy = Some(Busy { from: position, until, min_ack });
                self.busy_delay = (self.busy_delay * 2).min(BUSY_CAP);
            }
        }
    }

    /// There is room again if everybody has acknowledged enough; in a ring for certain. A pool may have been full within
    /// the reach as well: then it is worth a try when something was acknowledged, for that gave back slots.
    fn open_gate(&mut self) {
        let min_ack = self.others.min_ack;
        let reach = min_ack + u64::from(self.membership.slots);
        if self.busy.is_some_and(|busy| busy.from < reach && busy.min_ack < min_ack) {
            self.busy = None;
        }
    }

    fn release_wish(&mut self, position: u64, token: u32, to: Wish) {
        let Some(entry) = self.ring.get_mut(position) else { return };
        if entry.wish == Wish::Asked(token) {
            entry.wish = to;
            self.wishes -= 1;
            self.asked = self.asked.min(position);
        }
    }

    /// Gives up on requests that took too long; what they carried is to be sent again.
    pub(super) fn detect_losses(&mut self, now: Time) {
        let (mut lost, mut idle) = (0, 0);
        while let Some((token, sent)) = self.recovery.next_lost(now) {
            lost += 1;
            if let Some(position) = sent.wish {
                self.release_wish(position, token, Wish::Idle);
            }
            let under_way = Contribution::UnderWay(token);
            let carried = sent.contribution.map(|(position, _)| position);
            if carried.is_none() && sent.wish.is_none() {
                // A linger pull: there are only a few within a timeout, so each must get through.
                self.linger.at = self.linger.at.min(now);
                idle += 1;
            }
            if let Some(position) =
                carried.filter(|p| self.ring.get(*p).is_some_and(|e| e.contribution == under_way))
            {
                self.queue(position);
            }
        }
        if lost > 0 {
            self.statistics.losses += u64::from(lost);
        }
        if lost > idle {
            self.controller.on_losses(now, lost - idle);
        }
    }

    /// Checks a result, whether or not anybody waits for it: every damaged payload is counted. That needs the chunk's
    /// identity, which is known as long as the ring retains it.
    fn check(&mut self, arrived: &Arrived<'_>) -> Verdict {
        let position = arrived.position;
        let Some(entry) = self.ring.get(position).copied() else {
            self.statistics.unexpected_results += 1;
            return Verdict::Unwanted;
        };
        let is_foreign = entry.absent && position >= self.next;
        let is_ours = arrived.bitmap != 0 && arrived.bitmap & !self.contributors.everybody == 0;
        let sound = is_ours
            && if is_foreign {
                let chunk = self.identify(arrived);
                let place = self.ring.get_mut(position).filter(|entry| entry.wish != Wish::Delivered);
                if let (Some(entry), Some(chunk)) = (place, chunk) {
                    entry.chunk = chunk;
                }
                chunk.is_some()
            } else {
                arrived.payload.len() == usize::from(entry.chunk.lanes) * 4
                    && (!self.is_in(arrived) || arrived.next_exponent >= entry.next_exponent)
                    && self.is_sound(position, entry.chunk, arrived.bitmap, arrived.tag, arrived.payload)
            };
        self.statistics.failed_checks += u64::from(!sound);
        // Whatever the check said: a torn late answer must not start a redo (protocol-rules part 2.3).
        if entry.wish == Wish::Delivered || position >= self.reach() {
            self.statistics.duplicate_results += 1;
            return Verdict::Unwanted;
        }
        if sound { Verdict::Sound } else { Verdict::Damaged }
    }

    /// This rank's contribution is in a result.
    fn is_in(&self, arrived: &Arrived<'_>) -> bool {
        arrived.bitmap & self.contributors.own != 0
    }

    /// A result stands, and the request was too short or too long for it.
    fn learn_length(&mut self, position: u64, lanes: u16) {
        let is_foreign = position >= self.next;
        if let Some(entry) = self.ring.get_mut(position).filter(|entry| entry.absent && is_foreign)
            && entry.wish != Wish::Delivered
        {
            entry.chunk.lanes = lanes.min(self.membership.lanes);
            self.foreign_lanes = entry.chunk.lanes;
            // It is there: worth another request at once.
            self.guess.below = self.guess.below.max(position + 1);
        }
    }

    /// A result failed its check: ask again, then for a redo, the further ones after pauses that double. An older attempt
    /// than the one asked for says nothing new. Only the first failure is asked about at once: then the chunk is polled.
    fn doubt(&mut self, now: Time, position: u64, attempt: u8) {
        let Some(entry) = self.ring.get_mut(position) else { return };
        entry.doubted = entry.doubted.saturating_add(1);
        let failures = entry.doubted;
        let current = entry.attempt;
        if attempt == current {
            entry.failed = entry.failed.saturating_add(1);
        }
        let redo = attempt == current && entry.failed >= FAILURES_BEFORE_REDO;
        if redo && attempt >= MAX_ATTEMPTS {
            let tensor = self.tensor_at(position, 0);
            return self.halt(OperationError::DamagedResults { tensor, failures });
        }
        if attempt > current {
            self.restart(position, attempt);
        } else if redo {
            self.statistics.redos_asked += 1;
            self.restart(position, attempt.saturating_add(1));
            if attempt > 0 {
                self.hold(now, position, attempt - 1);
            }
        }
        if failures > 1 {
            self.poll_only(position);
        }
    }

    /// The chunk is not asked for by itself any more, only polled or along with contributions.
    fn poll_only(&mut self, position: u64) {
        let Some(entry) = self.ring.get_mut(position) else { return };
        self.wishes -= u64::from(matches!(entry.wish, Wish::Asked(_)));
        entry.wish = Wish::Refused;
        self.asked = self.asked.min(position);
    }

    fn deliver(&mut self, now: Time, arrived: &Arrived<'_>) {
        let position = arrived.position;
        let (is_in, is_foreign) = (self.is_in(arrived), position >= self.next);
        let contributors = self.contributors.count(arrived.bitmap);
        let Some(entry) = self.ring.get_mut(position) else { return };
        self.wishes -= u64::from(matches!(entry.wish, Wish::Asked(_)));
        (entry.wish, entry.agreed) = (Wish::Delivered, arrived.next_exponent);
        (entry.included, entry.synchronisation) = (is_in, arrived.synchronisation);
        (entry.contributors, entry.culprit) = (contributors as u16, arrived.non_finite);
        if arrived.attempt >= entry.attempt {
            // The result says so, whatever became of the acknowledgement.
            (entry.contribution, entry.held) = (Contribution::Acknowledged, None);
        }
        let (exponent, lanes) = (entry.chunk.exponent, entry.chunk.lanes);
        self.statistics.results += 1;
        if position >= self.others.p_min {
            self.guess.confirm(position);
        }
        let lowest = self.delivered;
        self.advance_delivered();
        let present = if self.delivered == lowest { self.waiting.present } else { None };
        self.waiting = Waiting { since: now, answered: false, present };
        self.reset_timers(now);
        if is_foreign {
            self.keep_result(arrived);
        } else if let Some(rank) = arrived.non_finite {
            self.fail_for_a_peer(now, position, rank);
        } else {
            if !is_in {
                // Decided here, once, by the result (protocol-rules F7).
                self.give_back(position, exponent, lanes);
            }
            let scale = Scale { exponent, contributors };
            self.write_result(position, scale, arrived);
        }
        self.finish_operations(now);
    }

    /// Another rank's values cannot be reduced; the result of this chunk told it.
    pub(super) fn fail_for_a_peer(&mut self, now: Time, position: u64, rank: u8) {
        let tensor = self.tensor_at(position, u64::from(self.membership.window));
        let (rank, among) = self.contributors.names.of(rank);
        self.fail_at(now, position, position + 1, OperationError::PeerNonFinite { rank, among, tensor });
    }

    /// This rank's contribution is not in the result of its chunk: it is for the next operation.
    fn give_back(&mut self, position: u64, exponent: i8, lanes: u16) {
        self.statistics.excluded += 1;
        let Some(op) = self.operation_at(position).and_then(|index| self.operations.get(index)) else {
            return;
        };
        if let Step::Chunk(number) = op.step(position)
            && let Some(piece) = op.piece(number)
        {
            op.give_back(piece, exponent, self.ring.payload(position, lanes), &mut self.residuals);
        }
    }

    fn is_delivered(&self, position: u64) -> bool {
        self.ring.get(position).is_some_and(|entry| entry.wish == Wish::Delivered)
    }

    fn write_result(&mut self, position: u64, scale: Scale, arrived: &Arrived<'_>) {
        let Some(op) = self.operation_at(position).and_then(|index| self.operations.get_mut(index)) else {
            return;
        };
        op.delivered += 1;
        let written = match op.step(position) {
            Step::Round => {
                op.first_exponent = Some(arrived.next_exponent);
                Ok(())
            }
            Step::Chunk(number) => {
                let read = op.piece(number).map_or(Ok(()), |piece| op.read(piece, scale, arrived.payload));
                note_outcome(op, number, scale, arrived.synchronisation, self.membership.window);
                read
            }
        };
        if let Err(error) = written {
            self.note_overflow(position, error);
        }
    }

    /// Hands out operations whose chunks are all here, and the error of a result that fits no type: in order, so that all
    /// ranks see the same, or as far out of order as the settings allow.
    pub(super) fn finish_operations(&mut self, now: Time) {
        let settled = self.settled();
        if let Some((position, error)) = self.overflow.take_if(|(position, _)| settled > *position) {
            self.fail_at(now, position, position + 1, error);
        }
        self.remember_outcomes();
        while let Some(op) = self.operations.pop_front_if(|op| op.end() <= settled) {
            let synchronisation = self.synchronisation_of(&op);
            self.synchronisation = synchronisation;
            self.iterations.settle(op.handle.0 + 1);
            if !op.handed_out {
                let (handle, tensors) = (op.handle, op.tensors);
                self.events.push_back(Event::Done { handle, tensors, synchronisation });
            }
        }
        // Nothing from a result on that fits no type: it will be an error.
        let cut = self.overflow.as_ref().map_or(u64::MAX, |(position, _)| *position);
        for index in 0..self.operations.len().min(self.settings.staleness as usize + 1) {
            let is_done = |op: &&Operation| {
                op.is_complete() && !op.handed_out && op.end() <= cut && op.end() <= self.next
            };
            let Some(op) = self.operations.get(index).filter(is_done) else { continue };
            let synchronisation = self.synchronisation_of(op);
            if let Some(op) = self.operations.get_mut(index) {
                op.handed_out = true;
                let tensors = core::mem::take(&mut op.tensors);
                self.events.push_back(Event::Done { handle: op.handle, tensors, synchronisation });
            }
        }
    }

    /// That of an operation's last chunk, whose result is here: the slot's, and so the same at every rank.
    fn synchronisation_of(&self, op: &Operation) -> Synchronisation {
        let last = op.end().checked_sub(1).and_then(|last| self.ring.get(last));
        last.map_or(self.synchronisation, |entry| entry.synchronisation)
    }

    /// Name of the tensor of the chunk `ahead` after a position, or of the last one of its operation.
    pub(super) fn tensor_at(&self, position: u64, ahead: u64) -> String {
        let op = self.operation_at(position).and_then(|index| self.operations.get(index));
        op.map_or_else(String::new, |op| match op.step(position) {
            Step::Round => op.tensor_name(Step::Round),
            Step::Chunk(number) if op.piece(number + ahead).is_some() => {
                op.tensor_name(Step::Chunk(number + ahead))
            }
            step => op.tensor_name(step),
        })
    }

    /// The aggregator will not take this rank's contribution, or knows that the chunk will never be complete.
    fn abort(&mut self, position: u64, answer: &Answer) {
        let reason = Refusal::ALL.get(usize::from(answer.attempt)).copied();
        let ranks = match answer.body {
            Body::Pending { bitmap, above, .. } => self.others_of(Present { bitmap, above }),
            Body::Result { .. } => Vec::new(),
        };
        self.abort_for(position, reason.unwrap_or(Refusal::Mismatch), ranks);
    }

    pub(super) fn abort_for(&mut self, position: u64, reason: Refusal, ranks: Vec<u16>) {
        let tensor = self.tensor_at(position, 0);
        self.halt(match reason {
            Refusal::DeadRankInRedo => {
                OperationError::RedoLacksRanks { ranks, tensor, chunk: seq_of(position).0 }
            }
            reason => OperationError::Aborted { reason, ranks, tensor },
        });
    }
}
