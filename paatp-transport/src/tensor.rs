//! What users hand in and get back.

use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;

use half::{bf16, f16};
use paatp_common::wire::{ElementType, Operation};

/// The elements of a tensor, in memory order.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// IEEE 754 binary32.
    F32(Vec<f32>),
    /// IEEE 754 binary16.
    F16(Vec<f16>),
    /// bfloat16.
    Bf16(Vec<bf16>),
    /// 32-bit two's complement integers.
    I32(Vec<i32>),
}

impl Values {
    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Values::F32(values) => values.len(),
            Values::F16(values) => values.len(),
            Values::Bf16(values) => values.len(),
            Values::I32(values) => values.len(),
        }
    }

    /// There are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Calls with each value of a range and its place in that; all types fit f64 exactly.
    pub(crate) fn each(&self, range: Range<usize>, mut take: impl FnMut(usize, f64)) {
        macro_rules! each {
            ($values:expr) => {
                $values.get(range).unwrap_or(&[]).iter().enumerate().for_each(|(i, v)| take(i, f64::from(*v)))
            };
        }
        match self {
            Values::F32(values) => each!(values),
            Values::F16(values) => each!(values),
            Values::Bf16(values) => each!(values),
            Values::I32(values) => each!(values),
        }
    }

    pub(crate) const fn element(&self) -> ElementType {
        match self {
            Values::F32(_) => ElementType::F32,
            Values::F16(_) => ElementType::F16,
            Values::Bf16(_) => ElementType::Bf16,
            Values::I32(_) => ElementType::I32,
        }
    }
}

/// A named array. All ranks hand in the same names, types and lengths in the same order.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Names the tensor in errors; ranks that disagree on it are told so.
    pub name: String,
    /// Its elements.
    pub values: Values,
}

/// What is computed over the ranks' values, element by element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Sum.
    Sum,
    /// Sum divided by the number of ranks.
    Mean,
    /// Largest value.
    Max,
    /// Smallest value.
    Min,
}

impl Reduction {
    pub(crate) const fn operation(self) -> Operation {
        match self {
            Reduction::Sum => Operation::Sum,
            Reduction::Mean => Operation::Mean,
            Reduction::Max => Operation::Max,
            Reduction::Min => Operation::Min,
        }
    }

    /// Lanes add up, so they need headroom and, for floats, a scale.
    pub(crate) const fn adds(self) -> bool {
        matches!(self, Reduction::Sum | Reduction::Mean)
    }
}

/// Names an operation that was queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle(pub u64);
