//! What a rank wanted to contribute and no result took: it goes into the next operation of the same tensor.
//!
//! One f64 for each element of a tensor that has any, which holds every number of lanes times its quantum exactly (31
//! bits and a power of two). A tensor that has none takes no memory.

use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use paatp_common::wire::ElementType;

use crate::tensor::Tensor;

/// Values that are left over of one tensor.
#[derive(Debug)]
struct Residual {
    name: String,
    element: ElementType,
    values: Vec<f64>,
    /// Elements that are not zero.
    outstanding: usize,
}

impl Residual {
    fn is_of(&self, tensor: &Tensor) -> bool {
        self.values.len() == tensor.values.len()
            && self.element == tensor.values.element()
            && self.name == tensor.name
    }
}

/// Values that are left over, of all tensors.
#[derive(Debug, Default)]
pub(crate) struct Residuals(Vec<Residual>);

impl Residuals {
    /// What is left over of a part of a tensor, if anything is.
    pub fn of(&self, tensor: &Tensor, start: usize, len: usize) -> Option<&[f64]> {
        let residual = self.0.iter().find(|residual| residual.is_of(tensor))?;
        let part = residual.values.get(start..start + len)?;
        part.iter().any(|value| *value != 0.0).then_some(part)
    }

    /// Takes out what is left over of a part of a tensor; `into` gets one value for each element, zeros if there is
    /// nothing.
    pub fn take(&mut self, tensor: &Tensor, start: usize, into: &mut [f64]) {
        into.fill(0.0);
        let Some(index) = self.0.iter().position(|residual| residual.is_of(tensor)) else { return };
        let Some(residual) = self.0.get_mut(index) else { return };
        for (taken, value) in into.iter_mut().zip(residual.values.iter_mut().skip(start)) {
            residual.outstanding -= usize::from(*value != 0.0);
            *taken = core::mem::take(value);
        }
        if residual.outstanding == 0 {
            self.0.swap_remove(index);
        }
    }

    /// Adds to what is left over of a part of a tensor.
    pub fn add(&mut self, tensor: &Tensor, start: usize, more: impl Iterator<Item = f64>) {
        let mut more = more.enumerate().filter(|(_, value)| *value != 0.0).peekable();
        if more.peek().is_none() {
            return;
        }
        let index = self.0.iter().position(|residual| residual.is_of(tensor)).unwrap_or_else(|| {
            self.0.push(Residual {
                name: tensor.name.clone(),
                element: tensor.values.element(),
                values: vec![0.0; tensor.values.len()],
                outstanding: 0,
            });
            self.0.len() - 1
        });
        let Some(residual) = self.0.get_mut(index) else { return };
        for (offset, value) in more {
            let Some(place) = residual.values.get_mut(start + offset) else { break };
            residual.outstanding -= usize::from(*place != 0.0);
            *place += value;
            residual.outstanding += usize::from(*place != 0.0);
        }
        if residual.outstanding == 0 {
            self.0.swap_remove(index);
        }
    }

    /// Name and values of every tensor of which something is left over.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[f64])> {
        self.0.iter().map(|residual| (residual.name.as_str(), residual.values.as_slice()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Values;

    #[test]
    fn what_is_added_is_taken_once_and_leaves_nothing() {
        let tensor = |name: &str| Tensor { name: name.into(), values: Values::F32(vec![0.0; 10]) };
        let (a, b) = (tensor("a"), tensor("b"));
        let mut residuals = Residuals::default();
        residuals.add(&a, 4, [0.0, 0.0].into_iter());
        assert_eq!(residuals.iter().count(), 0);
        residuals.add(&a, 4, [1.0, 0.0, 3.0].into_iter());
        residuals.add(&b, 0, [7.0].into_iter());
        residuals.add(&a, 6, [-1.0].into_iter());
        assert_eq!(residuals.of(&a, 4, 3), Some(&[1.0, 0.0, 2.0][..]));
        assert_eq!((residuals.of(&a, 0, 4), residuals.of(&tensor("c"), 0, 10)), (None, None));
        let mut taken = [9.0; 6];
        residuals.take(&a, 3, &mut taken);
        assert_eq!(taken, [0.0, 1.0, 0.0, 2.0, 0.0, 0.0]);
        residuals.take(&a, 3, &mut taken);
        assert_eq!(taken, [0.0; 6]);
        assert_eq!(residuals.iter().map(|(name, _)| name).collect::<Vec<_>>(), ["b"]);
        residuals.add(&b, 0, [-7.0].into_iter());
        assert_eq!(residuals.iter().count(), 0, "what is over takes no memory");
    }
}
