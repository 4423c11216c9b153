//! The linear checksum of a payload, its salts, and the check of a header.
//!
//! `tag = Σ (2(N−i)−1) · wordᵢ mod 2^64` over the N 64-bit words of a payload (two lanes each, network order). Every
//! weight is odd, so a single wrong word is always seen; the weights differ, so exchanged words are seen. It is linear:
//! the tag of a sum is the sum of the tags, whatever the order of the additions. As running sums (`s += w; t += s`,
//! then `2t − s`) it costs two additions a word.

use crate::mind::barrier;
use crate::{seq::Seq, wire::Chunk};

/// Running sums over payload words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tag {
    /// Sum of the words.
    pub sum: u64,
    /// Sum of the sums.
    pub sums: u64,
}

impl Tag {
    /// Takes in the next word.
    #[inline(always)]
    pub fn push(&mut self, word: u64) {
        self.sum = self.sum.wrapping_add(word);
        self.sums = self.sums.wrapping_add(self.sum);
    }

    /// The checksum of all words so far.
    #[inline(always)]
    #[must_use]
    pub const fn value(self) -> u64 {
        self.sums.wrapping_mul(2).wrapping_sub(self.sum)
    }
}

/// A rank's factor of its salts, drawn from the job's nonce (design §5: a contribution added twice, left out or taken
/// from another seq must show). Odd, so that the product with an odd number is never zero. Ranks are counted through all
/// nodes of a job.
#[must_use]
pub const fn rank_key(nonce: u64, rank: u16) -> u64 {
    mix(nonce ^ (rank as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)) | 1
}

/// What rank with `key` adds to the tag of its contribution to a chunk. The sum of the salts of several ranks is the
/// salt of the sum of their keys, so a receiver subtracts all of them with one multiplication.
#[inline(always)]
#[must_use]
pub const fn salt(key: u64, seq: Seq, chunk: Chunk) -> u64 {
    let packed = (seq.0 as u64) << 32
        | (chunk.lanes as u64) << 16
        | (chunk.operation_and_type as u64) << 8
        | chunk.exponent as u8 as u64;
    key.wrapping_mul(mix(packed) | 1)
}

/// A bijection that spreads every input bit (two rounds of the finalizer of MurmurHash3, public domain).
#[inline(always)]
pub(crate) const fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 33)).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
    let x = (x ^ (x >> 33)).wrapping_mul(0xC4CE_B9FE_1A85_EC53);
    x ^ (x >> 33)
}

/// Big-endian 32-bit words of a header that its check covers: all but the last.
pub const CHECKED_HEADER_WORDS: usize = 15;

/// The check over a header's first 60 bytes: the same sum as a tag's, over 32-bit words modulo 2^32. Any single wrong
/// word shows, and being linear it can be updated for a changed field without reading the rest.
#[inline(always)]
#[must_use]
pub fn header_check(words: &[[u8; 4]; CHECKED_HEADER_WORDS]) -> u32 {
    // Of 64 bits, because BPF's registers are; the upper halves mean nothing.
    let mut check = Tag::default();
    for word in words {
        check.push(u32::from_be_bytes(*word) as u64);
        // One word after the other: with all of them in hand LLVM would have to put most on the stack.
        barrier();
    }
    check.value() as u32
}

/// The weight of a word in a header's check, for words that come in any order.
#[inline(always)]
#[must_use]
pub const fn header_weight(word: usize) -> u64 {
    2 * (CHECKED_HEADER_WORDS - word) as u64 - 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    fn tag(words: &[u64]) -> u64 {
        let mut tag = Tag::default();
        words.iter().for_each(|w| tag.push(*w));
        tag.value()
    }

    proptest! {
        #[test]
        fn weights_are_odd_and_distinct(words in proptest::collection::vec(any::<u64>(), 1..80)) {
            let n = words.len() as u64;
            let direct = words.iter().enumerate()
                .fold(0u64, |acc, (i, w)| acc.wrapping_add((2 * (n - i as u64) - 1).wrapping_mul(*w)));
            prop_assert_eq!(tag(&words), direct);
        }

        #[test]
        fn tag_of_a_sum_is_the_sum_of_tags(pairs in proptest::collection::vec(any::<(u64, u64)>(), 1..80)) {
            let (a, b): (Vec<u64>, Vec<u64>) = pairs.iter().copied().unzip();
            let sum: Vec<u64> = pairs.iter().map(|(a, b)| a.wrapping_add(*b)).collect();
            prop_assert_eq!(tag(&sum), tag(&a).wrapping_add(tag(&b)));
        }

        #[test]
        fn any_single_flipped_bit_shows(words in proptest::collection::vec(any::<u64>(), 1..80), bit in any::<u32>()) {
            let mut bad = words.clone();
            let bit = bit as usize % (words.len() * 64);
            bad[bit / 64] ^= 1 << (bit % 64);
            prop_assert_ne!(tag(&bad), tag(&words));
        }

        #[test]
        fn any_single_flipped_header_bit_shows(words in any::<[[u8; 4]; CHECKED_HEADER_WORDS]>(), bit in 0..480usize) {
            let mut bad = words;
            bad[bit / 32][bit / 8 % 4] ^= 1 << (bit % 8);
            prop_assert_ne!(header_check(&bad), header_check(&words));
        }
    }

    #[test]
    fn salts_of_several_ranks_add_up() {
        let chunk = Chunk { operation_and_type: 0x20, lanes: 352, exponent: -7, root: 0 };
        let keys: Vec<u64> = (0..64).map(|r| rank_key(99, r)).collect();
        let all = keys.iter().fold(0u64, |a, k| a.wrapping_add(salt(*k, Seq(5), chunk)));
        let total = keys.iter().fold(0u64, |a, k| a.wrapping_add(*k));
        assert_eq!(all, salt(total, Seq(5), chunk));
        assert_ne!(salt(keys[0], Seq(5), chunk), salt(keys[0], Seq(6), chunk));
        assert_ne!(salt(keys[0], Seq(5), chunk), salt(keys[1], Seq(5), chunk));
    }
}
