//! One all-reduce: its tensors, its chunks, and what goes into and comes out of each.

use alloc::string::String;
use alloc::vec::Vec;

use paatp_common::wire::{self, Chunk, EVERYBODY, ElementType};

use crate::error::OperationError;
use crate::plan::{Piece, Plan};
use crate::quantise::{self, E_MIN, Extreme, Lane, Quantiser, Scale, Unfit};
use crate::residual::Residuals;
use crate::tensor::{Handle, Reduction, Tensor, Values};

/// Proposed one window ahead of an operation that the rank does not know yet, or whose first chunks cannot be sent: the
/// largest exponent there is, so that it wins. (Values that really need it cost a round.)
pub(crate) const UNKNOWN: i8 = i8::MAX;

/// How the exponent of an operation's first W chunks is agreed on. It is the same either way, so that the bits of a result
/// do not depend on when ranks queued the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opening {
    /// Not known before the result one window ahead is here; counted as a handover until then.
    Undecided,
    /// A header-only round agrees on one exponent for all of them.
    Round,
    /// The result one window ahead of the first chunk tells it: there is no gap.
    Handover,
    /// Where chunks may be complete without all ranks: from what the same reduction came to before. What does not fit
    /// waits in the residual.
    Guess,
}

/// A queued operation.
#[derive(Debug)]
pub(crate) struct Operation {
    pub handle: Handle,
    /// Position of the exponent round, if there is one, else of the first chunk. Final once the opening is decided.
    pub first: u64,
    pub opening: Opening,
    /// Positions whose results are delivered.
    pub delivered: u64,
    /// It was handed out, before an earlier one was done; only its place is kept.
    pub handed_out: bool,
    /// Exponent of the first W chunks, once it is agreed on.
    pub first_exponent: Option<i8>,
    /// This rank had a say in that.
    pub heard: bool,
    /// Every rank takes part, with all that is left over: the last of a job.
    pub flush: bool,
    /// Exponent of the largest result of the first W chunks, and how many of them may lack ranks.
    pub outcome: (i8, u64),
    pub tensors: Vec<Tensor>,
    reduction: Reduction,
    plan: Plan,
    fingerprint: u16,
    quantiser: Quantiser,
}

/// What an operation sends at one position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The exponent round.
    Round,
    /// The chunk with this index.
    Chunk(u64),
}

impl Operation {
    pub fn new(
        handle: Handle,
        first: u64,
        reduction: Reduction,
        tensors: Vec<Tensor>,
        flush: bool,
        shape: Shape,
    ) -> Operation {
        let plan = Plan::new(tensors.iter().map(|tensor| tensor.values.len()), shape.lanes);
        let fingerprint = fingerprint(reduction, flush, &tensors);
        let quantiser = shape.quantiser;
        // Without chunks the round is all there is. What is left over is known only when all before is done.
        let opening = if plan.chunks() == 0 || flush { Opening::Round } else { Opening::Undecided };
        Operation {
            handle,
            first,
            opening,
            delivered: 0,
            handed_out: false,
            first_exponent: None,
            heard: true,
            flush,
            outcome: (E_MIN, 0),
            tensors,
            reduction,
            plan,
            fingerprint,
            quantiser,
        }
    }

    /// All its results are here.
    pub fn is_complete(&self) -> bool {
        self.opening != Opening::Undecided && self.first + self.delivered >= self.end()
    }

    const fn rounds(&self) -> u64 {
        matches!(self.opening, Opening::Round) as u64
    }

    /// First position after this operation.
    pub const fn end(&self) -> u64 {
        self.first + self.rounds() + self.plan.chunks()
    }

    pub const fn step(&self, position: u64) -> Step {
        let number = position.saturating_sub(self.first);
        if number < self.rounds() { Step::Round } else { Step::Chunk(number - self.rounds()) }
    }

    /// Tells operations apart.
    pub const fn fingerprint(&self) -> u16 {
        self.fingerprint
    }

    pub const fn chunks(&self) -> u64 {
        self.plan.chunks()
    }

    pub fn piece(&self, index: u64) -> Option<Piece> {
        self.plan.piece(index)
    }

    /// Name of the tensor that a step belongs to, or begins with.
    pub fn tensor_name(&self, step: Step) -> String {
        let index = match step {
            Step::Round => self.plan.piece(0),
            Step::Chunk(index) => self.plan.piece(index),
        };
        self.tensors.get(index.map_or(0, |piece| piece.tensor)).map_or_else(String::new, |t| t.name.clone())
    }

    /// What the ranks agree on in the exponent round. It has no scale and no root: their places carry a fingerprint, so that
    /// ranks which issue different operations are told at once.
    pub const fn round_chunk(&self) -> Chunk {
        let [root, exponent] = self.fingerprint.to_be_bytes();
        let chunk = Chunk::new(wire::Operation::Exponents, ElementType::F32, 0, exponent as i8);
        Chunk { root, ..chunk }
    }

    /// What the ranks agree on for chunk `number`, given its exponent (which exact types and reductions do not use). It has
    /// no root: that place carries the fingerprint, a byte in turn, for there need not be a round.
    pub fn chunk(&self, number: u64, piece: Piece, exponent: i8) -> Option<Chunk> {
        let values = &self.tensors.get(piece.tensor)?.values;
        let exponent = if self.is_scaled(values) { exponent } else { 0 };
        let mut chunk = Chunk::new(self.reduction.operation(), values.element(), piece.lanes, exponent);
        if self.flush || !self.reduction.adds() {
            // A largest value that comes late cannot be added to anything.
            chunk.operation_and_type |= EVERYBODY;
        }
        let [even, odd] = self.fingerprint.to_be_bytes();
        Some(Chunk { root: if number.is_multiple_of(2) { even } else { odd }, ..chunk })
    }

    fn is_scaled(&self, values: &Values) -> bool {
        self.reduction.adds() && values.element() != ElementType::I32
    }

    /// The exponent that chunks `from..to` need; those beyond the last need none.
    ///
    /// # Errors
    /// The first value that cannot be sent.
    pub fn exponent(&self, from: u64, to: u64, residuals: &Residuals) -> Result<i8, OperationError> {
        (from..to.min(self.plan.chunks())).try_fold(E_MIN, |largest, index| {
            let exponent = self.piece(index).map_or(Ok(E_MIN), |piece| self.exponent_of(piece, residuals))?;
            Ok(largest.max(exponent))
        })
    }

    /// What to propose one window ahead of the first chunk, for the first `window` chunks. Values that cannot be sent make
    /// the operation begin with a round, which reports them as its own: the operations before it are not to fail.
    pub fn handover(&self, window: u64, residuals: &Residuals) -> i8 {
        self.exponent(0, window, residuals).unwrap_or(UNKNOWN)
    }

    /// The exponent that a piece and what is left over of it need.
    fn exponent_of(&self, piece: Piece, residuals: &Residuals) -> Result<i8, OperationError> {
        let own = self.own_exponent_of(piece)?;
        let Some(tensor) = self.tensors.get(piece.tensor) else { return Ok(own) };
        let rest = residuals.of(tensor, piece.start, piece.len).filter(|_| self.is_scaled(&tensor.values));
        let Some(rest) = rest else { return Ok(own) };
        let mut largest: f64 = 0.0;
        tensor.values.each(piece.start..piece.start + piece.len, |index, value| {
            largest = largest.max((value + rest.get(index).unwrap_or(&0.0)).abs());
        });
        Ok(quantise::wide_exponent(core::iter::once(largest)))
    }

    fn own_exponent_of(&self, piece: Piece) -> Result<i8, OperationError> {
        let Some(tensor) = self.tensors.get(piece.tensor) else { return Ok(E_MIN) };
        let range = piece.start..piece.start + piece.len;
        let found = match &tensor.values {
            Values::F32(values) => quantise::exponent(values.get(range).unwrap_or(&[])),
            Values::F16(values) => quantise::exponent(values.get(range).unwrap_or(&[])),
            Values::Bf16(values) => quantise::exponent(values.get(range).unwrap_or(&[])),
            Values::I32(values) if self.reduction.adds() => {
                self.quantiser.unfit_integer(values.get(range).unwrap_or(&[])).map(|()| E_MIN)
            }
            Values::I32(_) => Ok(E_MIN),
        };
        match found {
            Ok(exponent) => Ok(if self.is_scaled(&tensor.values) { exponent } else { E_MIN }),
            Err(Unfit { index }) => Err(self.unfit(tensor, piece.start + index)),
        }
    }

    fn unfit(&self, tensor: &Tensor, index: usize) -> OperationError {
        let name = tensor.name.clone();
        let float = |value: Option<f32>| OperationError::NonFinite {
            tensor: tensor.name.clone(),
            index,
            value: value.unwrap_or(f32::NAN),
        };
        match &tensor.values {
            Values::F32(values) => float(values.get(index).copied()),
            Values::F16(values) => float(values.get(index).map(|value| value.to_f32())),
            Values::Bf16(values) => float(values.get(index).map(|value| value.to_f32())),
            Values::I32(values) => OperationError::IntegerRange {
                tensor: name,
                index,
                value: values.get(index).copied().unwrap_or(0),
                limit: self.quantiser.bias(),
            },
        }
    }

    /// Writes a chunk's lanes and returns their tag, without salt. `None` if there is no such piece.
    pub fn write(&self, piece: Piece, exponent: i8, payload: &mut [u8]) -> Option<u64> {
        let tensor = self.tensors.get(piece.tensor)?;
        let lanes = bytemuck::try_cast_slice_mut::<u8, Lane>(payload).ok()?;
        let range = piece.start..piece.start + piece.len;
        let (quantiser, extreme) = (self.quantiser, self.extreme());
        macro_rules! floats {
            ($values:expr) => {{
                let values = $values.get(range).unwrap_or(&[]);
                match extreme {
                    None => quantiser.quantise(values, exponent, lanes),
                    Some(extreme) => extreme.keys(values, lanes),
                }
            }};
        }
        Some(match &tensor.values {
            Values::F32(values) => floats!(values),
            Values::F16(values) => floats!(values),
            Values::Bf16(values) => floats!(values),
            Values::I32(values) => {
                let values = values.get(range).unwrap_or(&[]);
                match extreme {
                    None => quantiser.shift(values, lanes),
                    Some(extreme) => extreme.integer_keys(values, lanes),
                }
            }
        })
    }

    /// As [`Operation::write`], with what is left over, of which and of the values only as much as fits: the rest is
    /// left over again.
    pub fn write_clipped(
        &self,
        piece: Piece,
        exponent: i8,
        payload: &mut [u8],
        residuals: &mut Residuals,
        scratch: &mut Vec<f64>,
    ) -> Option<u64> {
        let tensor = self.tensors.get(piece.tensor)?;
        let lanes = bytemuck::try_cast_slice_mut::<u8, Lane>(payload).ok()?;
        scratch.resize(piece.len, 0.0);
        residuals.take(tensor, piece.start, scratch);
        tensor.values.each(piece.start..piece.start + piece.len, |index, value| {
            scratch.iter_mut().skip(index).take(1).for_each(|sum| *sum += value);
        });
        let tag = if tensor.values.element() == ElementType::I32 {
            self.quantiser.shift_clipped(scratch, lanes)
        } else {
            self.quantiser.quantise_clipped(scratch, exponent, lanes)
        };
        residuals.add(tensor, piece.start, scratch.iter().copied());
        Some(tag)
    }

    /// Whether a piece has to be written by [`Operation::write_clipped`]: something is left over, or it may not fit.
    pub fn needs_clipping(&self, piece: Piece, exponent: i8, heard: bool, residuals: &Residuals) -> bool {
        let Some(tensor) = self.tensors.get(piece.tensor).filter(|_| self.reduction.adds()) else {
            return false;
        };
        let is_left = residuals.of(tensor, piece.start, piece.len).is_some();
        is_left || (!heard && self.own_exponent_of(piece).is_ok_and(|own| own > exponent))
    }

    /// A result does not hold this rank's contribution: it is left over.
    pub fn give_back(&self, piece: Piece, exponent: i8, payload: &[u8], residuals: &mut Residuals) {
        let Some(tensor) = self.tensors.get(piece.tensor) else { return };
        let Ok(lanes) = bytemuck::try_cast_slice::<u8, Lane>(payload) else { return };
        let exponent = (tensor.values.element() != ElementType::I32).then_some(exponent);
        let lanes = lanes.get(..piece.len).unwrap_or(&[]);
        residuals.add(tensor, piece.start, self.quantiser.contributed(exponent, lanes));
    }

    /// A chunk is complete, and nothing of it was ever sent: its values are left over.
    ///
    /// # Errors
    /// The first value that cannot be added to anything.
    pub fn keep(
        &self,
        piece: Piece,
        residuals: &mut Residuals,
        scratch: &mut Vec<f64>,
    ) -> Result<(), OperationError> {
        let Some(tensor) = self.tensors.get(piece.tensor) else { return Ok(()) };
        self.own_exponent_of(piece)?;
        scratch.clear();
        tensor.values.each(piece.start..piece.start + piece.len, |_, value| scratch.push(value));
        residuals.add(tensor, piece.start, scratch.iter().copied());
        Ok(())
    }

    /// Exponent of the largest result of a piece, for [`Opening::Guess`]: of the sum, also where means were made.
    pub fn outcome_of(&self, piece: Piece, contributors: u32) -> i8 {
        let Some(tensor) = self.tensors.get(piece.tensor) else { return E_MIN };
        if !self.is_scaled(&tensor.values) {
            return E_MIN;
        }
        let factor = if self.reduction == Reduction::Mean { f64::from(contributors) } else { 1.0 };
        let mut largest: f64 = 0.0;
        tensor
            .values
            .each(piece.start..piece.start + piece.len, |_, value| largest = largest.max(value.abs()));
        quantise::wide_exponent(core::iter::once(largest * factor))
    }

    /// Reads a result into its place.
    ///
    /// # Errors
    /// The first element whose result the type cannot hold.
    pub fn read(&mut self, piece: Piece, scale: Scale, payload: &[u8]) -> Result<(), OperationError> {
        let Ok(lanes) = bytemuck::try_cast_slice::<u8, Lane>(payload) else { return Ok(()) };
        let (quantiser, extreme, mean) = (self.quantiser, self.extreme(), self.reduction == Reduction::Mean);
        let Some(tensor) = self.tensors.get_mut(piece.tensor) else { return Ok(()) };
        let range = piece.start..piece.start + piece.len;
        macro_rules! floats {
            ($values:expr) => {{
                let values = $values.get_mut(range).unwrap_or(&mut []);
                match extreme {
                    None if mean => quantiser.means(scale, lanes, values),
                    None => quantiser.sums(scale, lanes, values),
                    Some(extreme) => extreme.values(lanes, values),
                }
            }};
        }
        let read = match &mut tensor.values {
            Values::F32(values) => floats!(values),
            Values::F16(values) => floats!(values),
            Values::Bf16(values) => floats!(values),
            Values::I32(values) => {
                let values = values.get_mut(range).unwrap_or(&mut []);
                match extreme {
                    None if mean => quantiser.integer_means(scale.contributors, lanes, values),
                    None => quantiser.integer_sums(scale.contributors, lanes, values),
                    Some(extreme) => extreme.integer_values(lanes, values),
                }
                Ok(())
            }
        };
        read.map_err(|unfit| OperationError::ResultRange {
            tensor: tensor.name.clone(),
            index: piece.start + unfit.index,
        })
    }

    const fn extreme(&self) -> Option<Extreme> {
        match self.reduction {
            Reduction::Sum | Reduction::Mean => None,
            Reduction::Max => Some(Extreme::Max),
            Reduction::Min => Some(Extreme::Min),
        }
    }
}

/// What a job fixes for all its operations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub lanes: u16,
    pub quantiser: Quantiser,
}

/// A hash (FNV-1a) of what all ranks must issue alike.
fn fingerprint(reduction: Reduction, flush: bool, tensors: &[Tensor]) -> u16 {
    let mut hash = 0xCBF2_9CE4_8422_2325_u64;
    let mut push = |bytes: &[u8]| {
        for byte in bytes {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01B3);
        }
    };
    push(&[reduction.operation() as u8 | if flush { EVERYBODY } else { 0 }]);
    for tensor in tensors {
        push(&(tensor.name.len() as u64).to_be_bytes());
        push(tensor.name.as_bytes());
        push(&[tensor.values.element() as u8]);
        push(&(tensor.values.len() as u64).to_be_bytes());
    }
    (hash ^ hash >> 16 ^ hash >> 32 ^ hash >> 48) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    fn tensor(name: &str, values: Values) -> Tensor {
        Tensor { name: name.into(), values }
    }

    fn operation(reduction: Reduction, tensors: Vec<Tensor>) -> Operation {
        let shape = Shape { lanes: 32, quantiser: Quantiser::new(2) };
        Operation::new(Handle(0), 10, reduction, tensors, false, shape)
    }

    #[test]
    fn exponents_are_those_of_the_chunk_and_bad_values_are_named() {
        let mut values = vec![1.0_f32; 100];
        values[70] = 300.0;
        let mut op = operation(Reduction::Sum, vec![tensor("w", Values::F32(values))]);
        assert_eq!((op.first, op.end(), op.step(10)), (10, 14, Step::Chunk(0)));
        op.opening = Opening::Round;
        assert_eq!((op.first, op.end()), (10, 15));
        assert_eq!((op.step(10), op.step(11), op.step(14)), (Step::Round, Step::Chunk(0), Step::Chunk(3)));
        let none = Residuals::default();
        let exponents = [op.exponent(0, 2, &none), op.exponent(0, 9, &none), op.exponent(4, 5, &none)];
        assert_eq!(exponents, [Ok(0), Ok(8), Ok(E_MIN)]);
        assert_eq!([op.handover(2, &none), op.handover(3, &none)], [0, 8]);
        let Values::F32(values) = &mut op.tensors[0].values else { return };
        values[97] = f32::NEG_INFINITY;
        assert_eq!([op.handover(3, &none), op.handover(4, &none)], [8, UNKNOWN]);
        assert_eq!(op.exponent(0, 3, &none), Ok(8));
        let name = "w".into();
        let error = OperationError::NonFinite { tensor: name, index: 97, value: f32::NEG_INFINITY };
        assert_eq!(op.exponent(0, 4, &none), Err(error));
    }

    #[test]
    fn integers_have_a_limit_only_where_they_are_added() {
        let values = || vec![tensor("i", Values::I32(vec![0, i32::MIN]))];
        let error = operation(Reduction::Mean, values()).exponent(0, 1, &Residuals::default());
        assert!(matches!(error, Err(OperationError::IntegerRange { index: 1, limit: 0x4000_0000, .. })));
        let unbounded = operation(Reduction::Min, values()).exponent(0, 1, &Residuals::default());
        assert_eq!(unbounded, Ok(E_MIN));
    }

    #[test]
    fn fingerprints_tell_operations_apart() {
        let f32s = |name, n| tensor(name, Values::F32(vec![0.0; n]));
        let all = [
            operation(Reduction::Sum, vec![f32s("a", 1), f32s("b", 2)]),
            operation(Reduction::Max, vec![f32s("a", 1), f32s("b", 2)]),
            operation(Reduction::Sum, vec![f32s("b", 2), f32s("a", 1)]),
            operation(Reduction::Sum, vec![f32s("a", 2), f32s("b", 1)]),
            operation(Reduction::Sum, vec![tensor("a", Values::I32(vec![0])), f32s("b", 2)]),
        ];
        let distinct: std::collections::BTreeSet<u16> = all.iter().map(|op| op.fingerprint).collect();
        assert_eq!(distinct.len(), all.len());
    }
}
