//! Running apart: results for operations that this rank has not issued yet, what becomes of values that no result took,
//! and when the next iteration may begin.
//!
//! Under a quorum others go on without a slow rank, but not further than the ring: slots are reused only when it has
//! acknowledged their results. So it takes results for operations that are still to come, up to S of them, into the
//! places of the ring that their contributions would have (protocol-rules part 2.8). When the operation is issued, a
//! chunk whose result is here already is *skipped*: nothing is sent, its values are left over.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use paatp_common::Refusal;
use paatp_common::wire::{Chunk, ElementType, Operation as Kind};

use super::receive::Arrived;
use super::{Phase, Worker};
use crate::operation::{Opening, Operation, Step};
use crate::quantise::{E_MIN, Scale};
use crate::ring::{Entry, Wish};
use crate::synchronisation::Synchronisation;
use crate::time::Time;

/// Room above the largest result of before, in binades, for values that grow or cancel each other in the sum.
const HEADROOM: i8 = 3;
/// Outcomes that are looked through for one of the same reduction. Those of the last W chunks are kept besides: not
/// every rank has them yet.
const OUTCOMES: usize = 64;
/// What a sum that is complete without this rank may be, apart from scale and length. What needs all ranks cannot be.
const SUMS: [(Kind, ElementType); 8] = [
    (Kind::Mean, ElementType::F32),
    (Kind::Sum, ElementType::F32),
    (Kind::Mean, ElementType::F16),
    (Kind::Sum, ElementType::F16),
    (Kind::Mean, ElementType::Bf16),
    (Kind::Sum, ElementType::Bf16),
    (Kind::Mean, ElementType::I32),
    (Kind::Sum, ElementType::I32),
];

/// What operations came to whose first window was partial, in their order.
#[derive(Debug, Default)]
pub(super) struct Outcomes(VecDeque<Outcome>);

#[derive(Clone, Copy, Debug)]
struct Outcome {
    fingerprint: u16,
    /// The last chunk of the first window.
    position: u64,
    exponent: i8,
}

impl Outcomes {
    fn note(&mut self, outcome: Outcome, window: u16) {
        if self.0.len() >= OUTCOMES + usize::from(window) {
            self.0.pop_back();
        }
        self.0.push_front(outcome);
    }

    /// By results up to a position alone, so every rank says the same.
    fn guess(&self, fingerprint: u16, known: u64) -> Option<i8> {
        let old = self.0.iter().filter(|outcome| outcome.position <= known).take(OUTCOMES);
        let same = old.into_iter().find(|outcome| outcome.fingerprint == fingerprint)?;
        // Of nothing but zeros nothing follows.
        (same.exponent > E_MIN).then(|| same.exponent.saturating_add(HEADROOM).min(i8::MAX - 1))
    }
}

impl Worker {
    /// The operations queued so far, since the last call, are one iteration.
    pub fn end_iteration(&mut self) {
        self.iterations.end(self.handles);
    }

    /// The next iteration may begin: never iteration t + 1 before the results of t − s, with the staleness s of the last
    /// operation that is done (before there is one: 0). Without a bound as long as the ring has room for what is queued.
    #[must_use]
    pub fn may_begin(&self) -> bool {
        let room = self.end.saturating_sub(self.settled()) <= u64::from(self.membership.slots);
        self.iterations.may_begin(self.synchronisation.told.staleness(), room)
    }

    /// How ranks waited for one another in the last operation that is done.
    #[must_use]
    pub const fn synchronisation(&self) -> Synchronisation {
        self.synchronisation
    }

    /// What is left over of this rank's values, by the name of the tensor: it goes into the next operation of a tensor of
    /// the same name, type and length.
    pub fn residuals(&self) -> impl Iterator<Item = (&str, &[f64])> {
        self.residuals.iter()
    }

    /// First chunk that is not dealt with: its result is not here, or its operation is not issued.
    pub(super) fn settled(&self) -> u64 {
        self.delivered.min(self.next)
    }

    /// First chunk whose result is not wanted: as many as the ring has slots beyond what this rank has contributed.
    pub(super) fn reach(&self) -> u64 {
        let open = self.open_end();
        let runs = self.phase == Phase::Running && self.leaving.is_none() && self.overflow.is_none();
        if self.partial && runs { open.max(self.next + u64::from(self.membership.slots)) } else { open }
    }

    /// A chunk beyond the own operations is to be asked for.
    pub(super) fn expect(&mut self, position: u64) {
        if position >= self.next && self.ring.get(position).is_none() {
            self.ring.put(Entry::foreign(position, self.foreign_lanes));
        }
    }

    /// A result for an operation that this rank has not issued: which sum it is follows from its tag, which holds for one
    /// only.
    pub(super) fn identify(&mut self, arrived: &Arrived<'_>) -> Option<Chunk> {
        let Arrived { position, exponent, bitmap, tag, payload, .. } = *arrived;
        let lanes = u16::try_from(payload.len() / 4).ok()?;
        SUMS.into_iter()
            .map(|(kind, element)| Chunk::new(kind, element, lanes, exponent))
            .find(|chunk| self.is_sound(position, *chunk, bitmap, tag, payload))
    }

    /// Keeps such a result until its operation is issued.
    pub(super) fn keep_result(&mut self, arrived: &Arrived<'_>) {
        let lanes = (arrived.payload.len() / 4) as u16;
        let place = self.ring.payload_mut(arrived.position, lanes);
        place.copy_from_slice(arrived.payload.get(..place.len()).unwrap_or(&[]));
    }

    /// The result of the next chunk is here already.
    pub(super) fn is_here(&self, position: u64) -> bool {
        self.ring.get(position).is_some_and(|entry| entry.absent && entry.wish == Wish::Delivered)
    }

    /// Takes in the results of chunks that were complete before this rank came to them.
    pub(super) fn skip(&mut self, now: Time) {
        let before = self.next;
        while self.next < self.end && self.is_here(self.next) && self.skip_one(now).is_some() {
            self.advance_delivered();
        }
        if self.next > before {
            self.advance_delivered();
            self.finish_operations(now);
        }
    }

    fn skip_one(&mut self, now: Time) -> Option<()> {
        let position = self.next;
        if position >= self.delivered + u64::from(self.membership.window) {
            // As for a contribution: what opens an operation, and an exponent, is told one window before.
            return None;
        }
        let index = self.operation_at(position)?;
        if self.operations.get(index)?.opening == Opening::Undecided {
            self.open(index, position);
        }
        let entry = *self.ring.get(position)?;
        let op = self.operations.get(index)?;
        let Step::Chunk(number) = op.step(position) else {
            // The others have no round here.
            self.abort_for(position, Refusal::Mismatch, Vec::new());
            return None;
        };
        let exponent = self.exponent_for(index, position, number)?;
        let piece = op.piece(number)?;
        let chunk = op.chunk(number, piece, exponent)?;
        if (Chunk { root: 0, ..chunk }) != entry.chunk {
            self.abort_for(position, Refusal::Mismatch, Vec::new());
            return None;
        }
        if let Err(error) = op.keep(piece, &mut self.residuals, &mut self.scratch) {
            self.fail_at(now, position, position, error);
            return None;
        }
        if let Some(entry) = self.ring.get_mut(position) {
            entry.chunk = chunk;
        }
        self.next += 1;
        self.statistics.skipped += 1;
        if let Some(rank) = entry.culprit {
            self.fail_for_a_peer(now, position, rank);
            return None;
        }
        let scale = Scale { exponent: chunk.exponent, contributors: u32::from(entry.contributors) };
        let payload = self.ring.payload(position, chunk.lanes);
        let op = self.operations.get_mut(index)?;
        op.delivered += 1;
        let read = op.read(piece, scale, payload);
        note_outcome(op, number, scale, entry.synchronisation, self.membership.window);
        if let Err(error) = read {
            self.note_overflow(position, error);
        }
        Some(())
    }

    /// Operations whose first window is done are remembered for later ones of the same kind, in their order.
    pub(super) fn remember_outcomes(&mut self) {
        let (settled, window) = (self.settled(), self.membership.window);
        for op in &mut self.operations {
            let first = op.end() - op.chunks();
            let last = first + op.chunks().min(u64::from(window));
            if op.opening == Opening::Undecided || last > settled {
                break;
            }
            let (exponent, partial) = core::mem::take(&mut op.outcome);
            if partial > 0 && partial == last - first {
                let outcome = Outcome { fingerprint: op.fingerprint(), position: last - 1, exponent };
                self.outcomes.note(outcome, window);
            }
        }
    }

    /// Where chunks may lack ranks, an operation need not wait for all of them to agree on an exponent.
    pub(super) fn guess(&self, index: usize, position: u64) -> Option<i8> {
        let known = position.checked_sub(u64::from(self.membership.window))?;
        let told = self.ring.get(known).filter(|entry| entry.wish == Wish::Delivered)?.synchronisation.told;
        let op = self.operations.get(index).filter(|_| told.is_partial())?;
        self.outcomes.guess(op.fingerprint(), known)
    }

    /// This rank had a say in the exponent of a chunk.
    pub(super) fn was_heard(&self, op: &Operation, position: u64, number: u64) -> bool {
        let window = u64::from(self.membership.window);
        if number < window {
            return op.heard;
        }
        self.ring.get(position - window).is_some_and(|entry| entry.included && !entry.absent)
    }
}

/// Takes in one result of an operation's first window.
pub(super) fn note_outcome(
    op: &mut Operation,
    number: u64,
    scale: Scale,
    synchronisation: Synchronisation,
    window: u16,
) {
    if number >= u64::from(window) || !synchronisation.told.is_partial() {
        return;
    }
    let Some(piece) = op.piece(number) else { return };
    let exponent = op.outcome_of(piece, scale.contributors);
    op.outcome = (op.outcome.0.max(exponent), op.outcome.1 + 1);
}
