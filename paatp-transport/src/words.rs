//! Numbers as people read them: every message that names ranks or a duration takes its words from here.

use core::fmt;
use core::time::Duration;

/// As many ranks in a row, or more, are "0 to 63".
const RUN: usize = 5;

/// Ranks: "rank 1", "ranks 1 and 3", "ranks 0, 1 and 3", "ranks 2 and 64 to 127".
#[derive(Clone, Copy, Debug)]
pub struct Ranks<'a, T>(pub &'a [T]);

impl<T: Copy + Into<u64>> fmt::Display for Ranks<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0;
        match rest {
            [] => return f.write_str("no rank in particular"),
            [_] => f.write_str("rank ")?,
            _ => f.write_str("ranks ")?,
        }
        let mut is_first = true;
        while let [first, ..] = rest {
            let follows = rest.windows(2).take_while(|pair| pair[0].into() + 1 == pair[1].into());
            let run = 1 + follows.count();
            let taken = if run >= RUN { run } else { 1 };
            let (these, left) = rest.split_at(taken);
            rest = left;
            match (is_first, rest.is_empty()) {
                (true, _) => {}
                (false, true) => f.write_str(" and ")?,
                (false, false) => f.write_str(", ")?,
            }
            is_first = false;
            write!(f, "{}", (*first).into())?;
            if let [_, .., last] = these {
                write!(f, " to {}", (*last).into())?;
            }
        }
        Ok(())
    }
}

/// A rank, or the first of so many of whom it is one: "rank 5", "one of ranks 64 to 127".
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub u16, pub u16);

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Peer(rank, 0 | 1) => write!(f, "rank {rank}"),
            Peer(first, among) => {
                write!(f, "one of ranks {first} to {}", u32::from(first) + u32::from(among) - 1)
            }
        }
    }
}

/// A duration, rounded to what is worth reading: "250 µs", "40 ms", "2 s", "2.5 s", "30 s", "3 min 20 s".
#[derive(Clone, Copy, Debug)]
pub struct Span(pub Duration);

/// From here on in whole seconds, and in minutes, in milliseconds.
const WHOLE_SECONDS: u128 = 10_000;
const MINUTES: u128 = 120_000;

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = (self.0.as_nanos() + 500) / 1000;
        let millis = (micros + 500) / 1000;
        // Rounded first, so that 1.99999988 s are 2 s, and 999.9 ms are 1 s.
        let (tenths, seconds) = ((millis + 50) / 100, (millis + 500) / 1000);
        if micros < 1000 {
            write!(f, "{micros} µs")
        } else if millis < 1000 {
            write!(f, "{millis} ms")
        } else if tenths * 100 < WHOLE_SECONDS && tenths % 10 > 0 {
            write!(f, "{}.{} s", tenths / 10, tenths % 10)
        } else if seconds * 1000 < MINUTES {
            write!(f, "{seconds} s")
        } else {
            write!(f, "{} min", seconds / 60)?;
            if seconds % 60 > 0 { write!(f, " {} s", seconds % 60) } else { Ok(()) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn ranks_are_listed_as_people_do() {
        for (ranks, words) in [
            (&[][..] as &[u16], "no rank in particular"),
            (&[1], "rank 1"),
            (&[1, 3], "ranks 1 and 3"),
            (&[0, 1, 2, 3], "ranks 0, 1, 2 and 3"),
            (&[2, 64, 65, 66, 67, 68], "ranks 2 and 64 to 68"),
            (&[0, 1, 2, 3, 4, 9], "ranks 0 to 4 and 9"),
            (&[0, 1, 63], "ranks 0, 1 and 63"),
        ] {
            assert_eq!(Ranks(ranks).to_string(), words);
        }
    }

    #[test]
    fn spans_are_rounded_to_sensible_digits() {
        for (nanos, words) in [
            (0, "0 µs"),
            (1_499, "1 µs"),
            (250_000, "250 µs"),
            (999_600, "1 ms"),
            (40_123_456, "40 ms"),
            (999_700_000, "1 s"),
            (1_999_999_880, "2 s"),
            (2_540_000_000, "2.5 s"),
            (9_960_000_000, "10 s"),
            (30_000_041_000, "30 s"),
            (30_500_000_000, "31 s"),
            (119_600_000_000, "2 min"),
            (200_000_000_000, "3 min 20 s"),
            (86_400_000_000_000, "1440 min"),
        ] {
            assert_eq!(Span(Duration::from_nanos(nanos)).to_string(), words, "{nanos}");
        }
    }
}
