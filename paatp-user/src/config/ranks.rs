//! The ranks of a job that join at one node.

use std::fmt;
use std::str::FromStr;

use paatp_common::limits::MAX_RANKS;
use serde::{Deserialize, Serialize};

/// Ranks that follow each other, written `0-3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RankRange {
    first: u8,
    last: u8,
}

impl RankRange {
    /// So many, from rank 0 on.
    #[must_use]
    pub fn first_of(world: u32) -> Option<RankRange> {
        let last = u8::try_from(world.checked_sub(1)?).ok()?;
        (usize::from(last) < MAX_RANKS).then_some(RankRange { first: 0, last })
    }

    /// The first.
    #[must_use]
    pub const fn first(self) -> u8 {
        self.first
    }

    /// The last.
    #[must_use]
    pub const fn last(self) -> u8 {
        self.last
    }

    /// A bit for each.
    #[must_use]
    pub const fn bits(self) -> u64 {
        u64::MAX >> (MAX_RANKS - 1 - (self.last - self.first) as usize) << self.first
    }
}

impl fmt::Display for RankRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

impl FromStr for RankRange {
    type Err = String;

    fn from_str(text: &str) -> Result<RankRange, String> {
        let range = text.split_once('-').and_then(|(first, last)| {
            let number = |text: &str| text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok())?;
            let range = RankRange { first: number(first)?, last: number(last)? };
            (range.first <= range.last && usize::from(range.last) < MAX_RANKS).then_some(range)
        });
        range.ok_or_else(|| format!("`{text}` names no ranks; write for example 0-3 (ranks end at 63)"))
    }
}

impl TryFrom<String> for RankRange {
    type Error = String;

    fn try_from(text: String) -> Result<RankRange, String> {
        text.parse()
    }
}

impl From<RankRange> for String {
    fn from(range: RankRange) -> String {
        range.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_as_they_are_written() {
        for (text, bits) in
            [("0-0", 1), ("0-3", 0b1111), ("4-7", 0xF0), ("0-63", u64::MAX), ("63-63", 1 << 63)]
        {
            let range: Result<RankRange, _> = text.parse();
            assert_eq!(
                range.as_ref().map(|range| (range.bits(), range.to_string())),
                Ok((bits, text.into()))
            );
        }
        for text in ["", "3", "3-1", "0-64", "-1-3", "+1-3", "0-3-4", "a-b", "0-300"] {
            assert!(text.parse::<RankRange>().is_err_and(|error| error.contains(text)), "{text}");
        }
    }
}
