//! Passes over payloads, block by block.
//!
//! A lane holds an offset-binary number `u = q + B`, |q| < B = 2^31 / n, so sums of n lanes stay below 2^32 and **two
//! lanes add as one 64-bit word without carry**. On the wire lanes are in network order; a slot keeps words in the
//! CPU's order. Maxima are taken lane by lane.
//!
//! The kernel runs these functions too: they are straight-line code over constant bounds, with a compiler barrier after
//! each word, because LLVM otherwise hoists the loads and spills past BPF's stack.

use crate::limits::WORDS_PER_BLOCK;
use crate::mind::{barrier, opaque};
use crate::tag::Tag;

/// A block as it travels: 16 words in network order.
pub type WireBlock = [[u8; 8]; WORDS_PER_BLOCK];

/// A block as a slot holds it: 16 words in the CPU's order.
pub type SlotBlock = [u64; WORDS_PER_BLOCK];

/// Repeats an expression for each word of a block; a loop would not be unrolled for BPF.
macro_rules! each_word {
    ($i:ident => $body:expr) => {
        each_word!(@ $i, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $i:ident, $body:expr, $($n:literal)*) => {
        $({ const $i: usize = $n; $body; barrier(); })*
    };
}

/// First contribution: writes the payload over whatever the slot held.
#[inline(always)]
pub fn store(slot: &mut SlotBlock, payload: &WireBlock, tag: &mut Tag) {
    each_word!(I => {
        let word = u64::from_be_bytes(payload[I]);
        slot[I] = word;
        tag.push(word);
    });
}

/// Adds the payload, two lanes at a time.
#[inline(always)]
pub fn add(slot: &mut SlotBlock, payload: &WireBlock, tag: &mut Tag) {
    each_word!(I => {
        let word = u64::from_be_bytes(payload[I]);
        slot[I] = slot[I].wrapping_add(word);
        tag.push(word);
    });
}

/// Takes an addition back.
#[inline(always)]
pub fn subtract(slot: &mut SlotBlock, payload: &WireBlock) {
    each_word!(I => slot[I] = slot[I].wrapping_sub(u64::from_be_bytes(payload[I])));
}

/// Keeps the larger of slot and payload in each lane. `before` and `after` take in the slot's old and new words: a bit
/// that was flipped in the slot's memory shows as `before` differing from the slot's tag (protocol-rules F21).
#[inline(always)]
pub fn maximum(slot: &mut SlotBlock, payload: &WireBlock, before: &mut Tag, after: &mut Tag) {
    each_word!(I => {
        let word = u64::from_be_bytes(payload[I]);
        let old = slot[I];
        let new = larger(word >> 32, old >> 32) << 32 | larger(word & LOW, old & LOW);
        slot[I] = new;
        before.push(old);
        after.push(new);
    });
}

const LOW: u64 = u32::MAX as u64;

/// The larger of two 32-bit numbers, without a branch: the kernel's verifier walks both sides of each.
#[inline(always)]
fn larger(a: u64, b: u64) -> u64 {
    let difference = a.wrapping_sub(b);
    let b_is_larger = opaque((difference as i64 >> 63) as u64);
    a.wrapping_sub(difference & b_is_larger)
}

/// Reads a payload for its tag alone.
#[inline(always)]
pub fn verify(payload: &WireBlock, tag: &mut Tag) {
    each_word!(I => tag.push(u64::from_be_bytes(payload[I])));
}

/// Writes a result into an answer.
#[inline(always)]
pub fn emit(payload: &mut WireBlock, slot: &SlotBlock) {
    each_word!(I => payload[I] = slot[I].to_be_bytes());
}

/// The reference that benchmarks compare [`add`] with: one lane at a time in a loop, with a test for overflow.
#[inline(always)]
pub fn add_naively(slot: &mut SlotBlock, payload: &WireBlock, tag: &mut Tag, overflow: &mut bool) {
    for i in 0..WORDS_PER_BLOCK {
        let word = u64::from_be_bytes(payload[i]);
        for half in 0..2 {
            let shift = half * 32;
            let (a, b) = ((slot[i] >> shift) as u32, (word >> shift) as u32);
            let sum = a.wrapping_add(b);
            *overflow |= sum < a;
            slot[i] = slot[i] & !(LOW << shift) | (sum as u64) << shift;
            barrier();
        }
        tag.push(word);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lanes(block: &SlotBlock) -> impl Iterator<Item = u32> + '_ {
        block.iter().flat_map(|w| [(w >> 32) as u32, *w as u32])
    }

    fn wire(block: &SlotBlock) -> WireBlock {
        block.map(u64::to_be_bytes)
    }

    /// Words whose lanes are below 2^31, so that two of them never carry.
    fn half_words() -> impl Strategy<Value = SlotBlock> {
        any::<SlotBlock>().prop_map(|b| b.map(|w| w & 0x7FFF_FFFF_7FFF_FFFF))
    }

    proptest! {
        #[test]
        fn words_add_as_lanes(a in half_words(), b in half_words()) {
            let (mut slot, mut tag) = (a, Tag::default());
            add(&mut slot, &wire(&b), &mut tag);
            prop_assert!(lanes(&slot).zip(lanes(&a).zip(lanes(&b))).all(|(s, (a, b))| s == a + b));
            let (mut naive, mut naive_tag, mut overflow) = (a, Tag::default(), false);
            add_naively(&mut naive, &wire(&b), &mut naive_tag, &mut overflow);
            prop_assert_eq!((naive, naive_tag, overflow), (slot, tag, false));
            subtract(&mut slot, &wire(&b));
            prop_assert_eq!(slot, a);
        }

        #[test]
        fn maximum_is_lane_wise(a in any::<SlotBlock>(), b in any::<SlotBlock>()) {
            let (mut slot, mut before, mut after) = (a, Tag::default(), Tag::default());
            maximum(&mut slot, &wire(&b), &mut before, &mut after);
            prop_assert!(lanes(&slot).zip(lanes(&a).zip(lanes(&b))).all(|(s, (a, b))| s == a.max(b)));
        }

        #[test]
        fn store_emit_round_trip(a in any::<SlotBlock>(), b in any::<SlotBlock>()) {
            let (mut slot, mut stored, mut read) = (a, Tag::default(), Tag::default());
            store(&mut slot, &wire(&b), &mut stored);
            let mut out = wire(&a);
            emit(&mut out, &slot);
            verify(&out, &mut read);
            prop_assert_eq!((out, stored), (wire(&b), read));
        }
    }
}
