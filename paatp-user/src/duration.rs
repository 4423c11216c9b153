//! Durations as people write them: `30s`, `500ms`, `1.5m`, or plain seconds.

use std::time::Duration;

use thiserror::Error;

/// Longest duration that an option may hold, in seconds: a day. More is a typing error.
pub const MAX_SECONDS: f64 = 86_400.0;

/// A text is no duration that an option may hold.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DurationError {
    /// No number, or an unknown unit.
    #[error("`{0}` is no duration: write for example 30s, 500ms, 250us, 2m or plain seconds")]
    Syntax(String),
    /// Zero, negative or too long.
    #[error("`{0}` is not between 1us and 24h")]
    Range(String),
}

/// Units with their length in seconds; longer names first where one ends with another.
const UNITS: [(&str, f64); 5] = [("ms", 1e-3), ("us", 1e-6), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];

/// Reads a duration.
///
/// # Errors
/// If it is no number with a known unit, or out of range.
pub fn parse(text: &str) -> Result<Duration, DurationError> {
    let trimmed = text.trim();
    let (number, unit) = UNITS
        .iter()
        .find_map(|(name, unit)| trimmed.strip_suffix(name).map(|number| (number.trim_end(), *unit)))
        .unwrap_or((trimmed, 1.0));
    let plain = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let seconds = match number.parse::<f64>() {
        Ok(value) if plain => value * unit,
        _ => return Err(DurationError::Syntax(text.into())),
    };
    if !(1e-6..=MAX_SECONDS).contains(&seconds) {
        return Err(DurationError::Range(text.into()));
    }
    Ok(Duration::from_secs_f64(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write() {
        for (text, micros) in [
            ("30s", 30_000_000),
            ("500ms", 500_000),
            ("250us", 250),
            ("2", 2_000_000),
            ("1.5m", 90_000_000),
            (" 1 h ", 3_600_000_000),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_micros(micros)), "{text}");
        }
    }

    #[test]
    fn refuses_the_rest() {
        for text in ["", "s", "abc", "-1s", "1e3", "nan", "inf", "1..2", "3d"] {
            assert!(matches!(parse(text), Err(DurationError::Syntax(_))), "{text}");
        }
        for text in ["0", "0s", "25h", "0.0000001s"] {
            assert!(matches!(parse(text), Err(DurationError::Range(_))), "{text}");
        }
    }
}
