//! Whom the bits of packets stand for, where a node's ranks are one rank of its parent's job (protocol-rules F22).

use alloc::vec::Vec;

use paatp_common::limits::{MAX_RANKS, MAX_TOTAL_RANKS};
use paatp_common::tag::rank_key;

/// The ranks that each bit of a node's packets stands for, counted through all nodes of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names {
    first: u16,
    beneath: [u16; MAX_RANKS],
}

impl Names {
    /// A bit for each of `world` ranks, counted from 0.
    #[must_use]
    pub const fn flat(world: u8) -> Names {
        let mut beneath = [0; MAX_RANKS];
        let mut bit = 0;
        while bit < world as usize && bit < MAX_RANKS {
            beneath[bit] = 1;
            bit += 1;
        }
        Names { first: 0, beneath }
    }

    /// From rank `first` on so many for each bit. None if a bit stands for nobody, or they are too many.
    #[must_use]
    pub fn new(first: u16, beneath: &[u16]) -> Option<Names> {
        let total = beneath.iter().fold(u32::from(first), |total, count| total + u32::from(*count));
        let fits = beneath.len() <= MAX_RANKS && total <= u32::from(MAX_TOTAL_RANKS) && !beneath.contains(&0);
        let mut names = Names { first, beneath: [0; MAX_RANKS] };
        names.beneath.get_mut(..beneath.len()).filter(|_| fits)?.copy_from_slice(beneath);
        Some(names)
    }

    /// Number of bits.
    #[must_use]
    pub fn bits(&self) -> u8 {
        self.beneath.iter().filter(|count| **count > 0).count() as u8
    }

    /// The first rank of a bit, and how many it stands for.
    #[must_use]
    pub fn of(&self, bit: u8) -> (u16, u16) {
        let before = self.beneath.iter().take(usize::from(bit)).sum::<u16>();
        (self.first + before, self.beneath.get(usize::from(bit)).copied().unwrap_or(0))
    }

    /// All ranks of a bitmap.
    #[must_use]
    pub fn ranks(&self, bitmap: u64) -> Vec<u16> {
        let bits = (0..MAX_RANKS as u8).filter(|bit| bitmap >> bit & 1 == 1);
        bits.flat_map(|bit| {
            let (first, count) = self.of(bit);
            first..first + count
        })
        .collect()
    }

    /// How many those are.
    #[must_use]
    pub fn count(&self, bitmap: u64) -> u32 {
        let bits = self.beneath.iter().zip(0u32..);
        bits.filter(|(_, bit)| bitmap >> bit & 1 == 1).map(|(count, _)| u32::from(*count)).sum()
    }

    /// The factor of the salts of what a bit stands for: its ranks' together.
    #[must_use]
    pub fn key(&self, nonce: u64, bit: u8) -> u64 {
        let (first, count) = self.of(bit);
        (first..first + count).fold(0, |sum, rank| sum.wrapping_add(rank_key(nonce, rank)))
    }
}

/// Where a rank is in a job of several nodes each of which is one rank above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seating {
    /// Whom the bits of its own node stand for.
    pub here: Names,
    /// Whom those of the root stand for, which every result has.
    pub root: Names,
    /// The bit there that this rank is among.
    pub seat: u8,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_stand_for_ranks_in_a_row() {
        let names = Names::new(10, &[1, 40, 3]).unwrap();
        assert_eq!((names.bits(), names.count(0b101), names.of(1)), (3, 4, (11, 40)));
        assert_eq!(names.ranks(0b101), [10, 51, 52, 53]);
        let keys = (51..54).fold(0u64, |sum, rank| sum.wrapping_add(rank_key(7, rank)));
        assert_eq!(names.key(7, 2), keys);
        assert_eq!(Names::flat(3), Names::new(0, &[1; 3]).unwrap());
        assert_eq!(Names::flat(64).ranks(1 << 63), [63]);
    }

    #[test]
    fn nobody_and_too_many_have_no_names() {
        for (first, beneath) in
            [(0, &[1, 0, 1][..]), (0, &[1; 65]), (0, &[4096, 1]), (4000, &[97]), (0, &[65535; 64])]
        {
            assert_eq!(Names::new(first, beneath), None);
        }
        assert!(Names::new(0, &[64; 64]).is_some());
    }
}
