//! Quantities with their units, as scenario files write them: `"100 Gbit/s"`, `"2 us"`, `"256 KiB"`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer};

/// A span or a point of virtual time, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

/// Bits a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BitRate(pub u64);

/// Bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

/// Nanoseconds in a second.
pub const SECOND: u64 = 1_000_000_000;

impl Nanos {
    /// As a number of seconds, for reports.
    #[must_use]
    pub fn seconds(self) -> f64 {
        self.0 as f64 / SECOND as f64
    }

    /// The span multiplied by a factor, rounded down; a negative factor counts as zero.
    #[must_use]
    pub fn times(self, factor: f64) -> Nanos {
        // Far below 2^53, so the product is the same on every platform.
        Nanos((self.0 as f64 * factor) as u64)
    }
}

impl std::ops::Add for Nanos {
    type Output = Nanos;

    fn add(self, span: Nanos) -> Nanos {
        Nanos(self.0.saturating_add(span.0))
    }
}

impl std::ops::Sub for Nanos {
    type Output = Nanos;

    fn sub(self, earlier: Nanos) -> Nanos {
        Nanos(self.0.saturating_sub(earlier.0))
    }
}

impl fmt::Display for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            n if n < 1_000_000 => write!(f, "{:.2} us", n as f64 / 1e3),
            n if n < SECOND => write!(f, "{:.3} ms", n as f64 / 1e6),
            n => write!(f, "{:.4} s", n as f64 / 1e9),
        }
    }
}

/// A quantity that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no {what}: write a number and a unit, one of {units}")]
pub struct UnitError {
    text: String,
    what: &'static str,
    units: String,
}

fn parse(text: &str, what: &'static str, units: &[(&str, f64)]) -> Result<u64, UnitError> {
    let trimmed = text.trim();
    let split = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let factor = units.iter().find(|(name, _)| *name == unit.trim()).map(|(_, factor)| *factor);
    let value = number.parse::<f64>().ok().zip(factor).map(|(number, factor)| (number * factor).round());
    match value {
        Some(value) if value < 1e18 => Ok(value as u64),
        _ => {
            let units = units.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
            Err(UnitError { text: text.into(), what, units })
        }
    }
}

impl FromStr for Nanos {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Nanos, UnitError> {
        parse(text, "span of time", &[("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("s", 1e9)]).map(Nanos)
    }
}

impl FromStr for BitRate {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<BitRate, UnitError> {
        let units = [("bit/s", 1.0), ("kbit/s", 1e3), ("Mbit/s", 1e6), ("Gbit/s", 1e9)];
        parse(text, "rate", &units).map(BitRate)
    }
}

impl FromStr for Bytes {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Bytes, UnitError> {
        let units = [("B", 1.0), ("KiB", 1024.0), ("MiB", 1_048_576.0)];
        parse(text, "number of bytes", &units).map(Bytes)
    }
}

macro_rules! from_text {
    ($($type:ty),*) => {$(
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<$type, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }
    )*};
}

from_text!(Nanos, BitRate, Bytes);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read() {
        assert_eq!("1.5 us".parse(), Ok(Nanos(1500)));
        assert_eq!("2ms".parse(), Ok(Nanos(2_000_000)));
        assert_eq!("100 Gbit/s".parse(), Ok(BitRate(100_000_000_000)));
        assert_eq!("256 KiB".parse(), Ok(Bytes(262_144)));
    }

    #[test]
    fn nonsense_names_the_units() {
        for text in ["", "5", "5 m", "-1 us", "1e3 us", "1..2 us", "99999999999999 s"] {
            let error = text.parse::<Nanos>().map_err(|error| error.to_string());
            assert!(error.is_err_and(|text| text.contains("ns, us, ms, s")), "{text}");
        }
    }

    #[test]
    fn spans_saturate_and_read_well() {
        assert_eq!(Nanos(3) - Nanos(5), Nanos(0));
        assert_eq!(Nanos(u64::MAX) + Nanos(5), Nanos(u64::MAX));
        assert_eq!(Nanos(1500).to_string(), "1.50 us");
        assert_eq!(Nanos(2_500_000).to_string(), "2.500 ms");
    }
}
