//! How operations fail, and how a worker leaves.
//!
//! **Nobody hangs and nobody is left behind.** A rank that fails because of values (its own, another's, a result out of
//! range) goes on with the chunks up to the one that tells, so that every rank gets there and learns of it; all ranks have
//! contributed those, because none stops before. A rank that fails because of the network or the job stops at once.

use alloc::vec::Vec;
use core::mem;

use super::{Event, Phase, Present, Worker};
use crate::error::OperationError;
use crate::ring::Contribution;
use crate::time::Time;

/// An aggregator that answers no request for this part of the timeout is not there: half.
const SILENT_SHARE: u32 = 2;

impl Worker {
    /// Fails the operation that a position belongs to and all later ones; chunks from `cut` on are given up.
    pub(super) fn fail_at(&mut self, now: Time, position: u64, cut: u64, error: OperationError) {
        match self.operation_at(position) {
            Some(index) => self.fail_from(now, index, cut, error),
            // It had failed before, at a later chunk.
            None => self.cut(now, cut),
        }
    }

    /// As [`Worker::fail_at`], by the operation's index.
    pub(super) fn fail_from(&mut self, now: Time, index: usize, cut: u64, error: OperationError) {
        self.cut(now, cut);
        let mut error = Some(error);
        for op in self.operations.drain(index..).filter(|op| !op.handed_out) {
            let error = error.take().unwrap_or(OperationError::Over);
            self.events.push_back(Event::Failed { handle: op.handle, error });
        }
    }

    fn cut(&mut self, now: Time, cut: u64) {
        self.end = self.end.min(cut);
        self.keep_within_end();
        if self.overflow.as_ref().is_some_and(|(position, _)| *position >= self.end) {
            self.overflow = None;
        }
        if self.phase == Phase::Running {
            self.phase = Phase::Draining(now);
        }
    }

    /// A result does not fit its type. Nothing after it is begun; the lowest such chunk makes the error.
    pub(super) fn note_overflow(&mut self, position: u64, error: OperationError) {
        if self.overflow.as_ref().is_none_or(|(lowest, _)| position < *lowest) {
            self.overflow = Some((position, error));
            self.stop_contributing_after(position);
        }
    }

    fn stop_contributing_after(&mut self, position: u64) {
        // Operations keep their ends; only what may still be done shrinks.
        self.end = self.end.min(position + 1);
        self.keep_within_end();
    }

    fn keep_within_end(&mut self) {
        self.acknowledged = self.acknowledged.min(self.end);
        self.through = self.through.min(self.end);
    }

    /// Fails everything and stops.
    pub(super) fn halt(&mut self, error: OperationError) {
        let mut error = Some(error);
        for op in mem::take(&mut self.operations).into_iter().filter(|op| !op.handed_out) {
            let error = error.take().unwrap_or(OperationError::Over);
            self.events.push_back(Event::Failed { handle: op.handle, error });
        }
        self.overflow = None;
        self.phase = Phase::Halted;
        if self.leaving.is_some() {
            self.say_left(false);
        }
    }

    /// When to give up.
    pub(super) fn deadline(&self) -> Option<Time> {
        if !self.operations.is_empty() {
            return Some(self.waiting.since.plus(self.settings.timeout));
        }
        let since = match (self.leaving, self.phase) {
            (Some(leaving), _) => leaving,
            (None, Phase::Draining(since)) if !self.is_at_rest() => since,
            _ => return None,
        };
        Some(since.max(self.waiting.since).plus(self.settings.linger))
    }

    pub(super) fn meet_deadlines(&mut self, now: Time) {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return;
        }
        let error = self.timeout_error(now);
        self.halt(error);
    }

    /// Names what is damaged, or who is missing: those that had not contributed to the lowest undelivered chunk.
    fn timeout_error(&self, now: Time) -> OperationError {
        let waited = now.since(self.waiting.since);
        let tensor = || self.tensor_at(self.delivered, 0);
        let lowest = self.ring.get(self.delivered).filter(|_| self.delivered < self.open_end());
        let refusals =
            lowest.filter(|e| e.contribution != Contribution::Acknowledged).map_or(0, |e| e.refused);
        if refusals > 1 {
            return OperationError::DamagedOnTheWay { tensor: tensor(), refusals };
        }
        let absent = self.waiting.present.map(|present| self.absent(present));
        let failures = lowest.map_or(0, |entry| entry.doubted);
        if failures > 1 && absent.as_ref().is_none_or(Vec::is_empty) {
            return OperationError::DamagedResults { tensor: tensor(), failures };
        }
        let absent = match absent {
            Some(absent) => absent,
            None if !self.waiting.answered => Vec::new(),
            // Nothing came about that chunk, but something did: the rank that holds everybody up.
            None => self.slowest(),
        };
        if absent.is_empty() {
            return OperationError::NoAnswer { waited };
        }
        // Who answers no more is gone itself, and what it last said of other ranks is old.
        let silence = self.recovery.silence(now);
        if silence >= self.settings.timeout / SILENT_SHARE {
            return OperationError::NoAnswer { waited: silence };
        }
        OperationError::Timeout { missing: absent, tensor: tensor(), waited }
    }

    /// Other ranks that have not contributed to a chunk, as an answer tells them.
    fn absent(&self, present: Present) -> Vec<u16> {
        self.others_of(Present { bitmap: !present.bitmap, ..present })
    }

    /// The ranks of a bitmap but for this one, and those that it has its bit in common with.
    pub(super) fn others_of(&self, present: Present) -> Vec<u16> {
        let (names, own) = if present.above {
            (self.contributors.names, self.membership.seat())
        } else {
            (self.membership.here(), self.membership.rank)
        };
        names.ranks(present.bitmap & !(1 << own))
    }

    /// The slowest rank of all, or those among whom it is.
    fn slowest(&self) -> Vec<u16> {
        let slowest = 1_u64.checked_shl(u32::from(self.others.slowest)).unwrap_or(0);
        self.contributors.names.ranks(slowest & !self.contributors.own)
    }

    /// Every rank has everything that this generation will bring.
    fn is_at_rest(&self) -> bool {
        self.has_everything() && self.others.min_ack >= self.end
    }

    /// Says goodbye if it is time.
    pub(super) fn look_for_the_end(&mut self) {
        if self.leaving.is_none() {
            return;
        }
        if self.phase == Phase::Halted {
            self.say_left(false);
        } else if self.operations.is_empty() && self.is_at_rest() {
            self.phase = Phase::Halted;
            self.say_left(true);
        }
    }

    fn say_left(&mut self, complete: bool) {
        if !mem::replace(&mut self.left, true) {
            self.events.push_back(Event::Left { complete });
        }
    }
}
