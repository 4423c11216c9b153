//! How the aggregator writes an answer over its request.

use super::{Header, Kind, MAGIC, VERSION};
use crate::seq::Seq;
use crate::tag;

/// Writes an answer's header over its request's, word by word in any order, and keeps the check meanwhile. Whole words,
/// for a load cannot take a word that was just written in parts from the store buffer, and nothing is read back.
#[derive(Clone, Copy, Debug, Default)]
pub struct Turn {
    check: u64,
}

/// What an answer says at last. Everything else was the request's, or was said by [`Turn::begin`].
#[derive(Clone, Copy, Debug)]
pub struct Saying {
    /// Bits of [`super::flags`].
    pub flags: u8,
    /// [`super::Status`].
    pub status: u8,
    /// See [`Header::raw_want`].
    pub want: u32,
    /// See [`Header::bitmap`].
    pub bitmap: u64,
    /// See [`Header::tag`].
    pub tag: u64,
    /// Lanes of the payload.
    pub lanes: u16,
    /// What is told of the policy, see [`crate::policy::Told`].
    pub told: u8,
    /// Ranks in the payload.
    pub contributors: u16,
    /// Exponent of the payload's scale, and the one agreed.
    pub exponents: (i8, i8),
    /// Window granted, in chunks.
    pub window: u16,
    /// The slowest rank, or the culprit.
    pub rank: u8,
    /// Rate-control gain.
    pub gain: i8,
    /// See [`Header::attempt`].
    pub attempt: u8,
    /// Policy epoch.
    pub epoch: u8,
}

impl Turn {
    /// Says what all answers say: what they answer to, and how far the job is.
    #[inline(always)]
    pub fn begin(&mut self, header: &mut Header, p_min: Seq, p_max: Seq) {
        self.keep::<2>(header);
        self.keep::<3>(header);
        self.put::<5>(header, p_min.0 as u64);
        self.put::<6>(header, p_max.0 as u64);
        self.keep::<7>(header);
    }

    /// Says the rest.
    #[inline(always)]
    pub fn end(mut self, header: &mut Header, saying: Saying) {
        let Saying { want, bitmap, tag, .. } = saying;
        let name = (MAGIC as u64) << 16 | ((VERSION << 4 | Kind::Answer as u8) as u64) << 8;
        self.put::<0>(header, name | saying.flags as u64);
        let sender = header.word::<1>() & !0xFF;
        self.put::<1>(header, sender | saying.status as u64);
        self.put::<4>(header, want as u64);
        self.put::<8>(header, bitmap >> 32);
        self.put::<9>(header, bitmap);
        self.put::<10>(header, tag >> 32);
        self.put::<11>(header, tag);
        let (told, contributors) = (saying.told as u64, saying.contributors as u64);
        self.put::<12>(header, (saying.lanes as u64) << 16 | told << 8 | contributors & 0xFF);
        let (own, next) = (saying.exponents.0 as u8 as u64, saying.exponents.1 as u8 as u64);
        self.put::<13>(header, own << 24 | next << 16 | saying.window as u64);
        let (rank, gain) = (saying.rank as u64, saying.gain as u8 as u64);
        self.put::<14>(header, rank << 24 | gain << 16 | (saying.attempt as u64) << 8 | saying.epoch as u64);
        header.check = (self.check as u32).to_be_bytes();
    }

    #[inline(always)]
    const fn put<const WORD: usize>(&mut self, header: &mut Header, value: u64) {
        self.count::<WORD>(value);
        header.words_mut()[WORD] = (value as u32).to_be_bytes();
    }

    #[inline(always)]
    const fn keep<const WORD: usize>(&mut self, header: &Header) {
        self.count::<WORD>(header.word::<WORD>());
    }

    /// The upper halves of value and check mean nothing.
    #[inline(always)]
    const fn count<const WORD: usize>(&mut self, value: u64) {
        self.check = self.check.wrapping_add(value.wrapping_mul(tag::header_weight(WORD)));
    }
}
