//! How an operation is cut into chunks.

use alloc::vec::Vec;

use paatp_common::limits::LANES_PER_BLOCK;

/// The part of a tensor that one chunk carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Index of the tensor.
    pub tensor: usize,
    /// First element.
    pub start: usize,
    /// Number of elements, at least one.
    pub len: usize,
    /// Lanes on the wire: `len` rounded up to whole blocks.
    pub lanes: u16,
}

/// Chunks never span two tensors, so that a small bias does not share its scale with a big neighbour; a tensor's last chunk
/// is padded to whole blocks.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Index of each tensor's first chunk.
    starts: Vec<u64>,
    lengths: Vec<usize>,
    chunks: u64,
    lanes: usize,
}

impl Plan {
    /// Cuts tensors of these lengths into chunks of at most `lanes` lanes.
    pub fn new(lengths: impl Iterator<Item = usize>, lanes: u16) -> Plan {
        let lengths: Vec<usize> = lengths.collect();
        let lanes = usize::from(lanes.max(1));
        let mut chunks = 0;
        let starts = lengths
            .iter()
            .map(|length| {
                let start = chunks;
                chunks += length.div_ceil(lanes) as u64;
                start
            })
            .collect();
        Plan { starts, lengths, chunks, lanes }
    }

    /// Number of chunks.
    pub const fn chunks(&self) -> u64 {
        self.chunks
    }

    /// What chunk `index` carries; `None` beyond the last.
    pub fn piece(&self, index: u64) -> Option<Piece> {
        if index >= self.chunks {
            return None;
        }
        // Of tensors that begin here, the last one has the chunk: those before it are empty.
        let tensor = self.starts.partition_point(|start| *start <= index).checked_sub(1)?;
        let start = (index - self.starts.get(tensor)?) as usize * self.lanes;
        let len = self.lengths.get(tensor)?.checked_sub(start)?.min(self.lanes);
        Some(Piece { tensor, start, len, lanes: len.next_multiple_of(LANES_PER_BLOCK) as u16 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_every_tensor_once_and_never_span_two() {
        let lengths = [0, 1, 0, 0, 64, 255, 0, 257, 15, 0];
        let plan = Plan::new(lengths.into_iter(), 64);
        let mut covered = [0; 10];
        for index in 0..plan.chunks() {
            let piece = plan.piece(index).unwrap();
            assert_eq!(piece.start, covered[piece.tensor]);
            assert!(piece.len >= 1 && piece.len <= usize::from(piece.lanes));
            assert!(piece.lanes.is_multiple_of(32) && piece.lanes <= 64);
            covered[piece.tensor] += piece.len;
        }
        assert_eq!(covered, lengths);
        assert_eq!(plan.piece(plan.chunks()), None);
    }

    #[test]
    fn nothing_makes_no_chunks() {
        assert_eq!(Plan::new([0, 0].into_iter(), 32).chunks(), 0);
        assert_eq!(Plan::new(core::iter::empty(), 32).piece(0), None);
    }
}
