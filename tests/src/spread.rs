//! What benchmarks say of many measurements of one kind.

use std::cmp::Ordering;
use std::fmt;

use serde::Serialize;

/// Median and range.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Spread {
    /// The middle one.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

impl Spread {
    /// Of at least one measurement.
    #[must_use]
    pub fn of(mut values: Vec<f64>) -> Spread {
        values.sort_by(f64::total_cmp);
        let at = |index: usize| values.get(index).copied().unwrap_or(f64::NAN);
        Spread { median: at(values.len() / 2), min: at(0), max: at(values.len().saturating_sub(1)) }
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = f.precision().unwrap_or(1);
        write!(f, "{:.digits$} [{:.digits$}, {:.digits$}]", self.median, self.min, self.max)
    }
}

/// How one kind of measurement compares with another that was taken in the same rounds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Ratio {
    /// The middle one of the rounds' ratios.
    pub median: f64,
    /// A quarter of the rounds' ratios is below.
    pub lower_quartile: f64,
    /// A quarter is above.
    pub upper_quartile: f64,
}

impl Ratio {
    /// Of `first` to `second`, round by round.
    #[must_use]
    pub fn of(first: &[f64], second: &[f64]) -> Ratio {
        let mut ratios: Vec<f64> = first.iter().zip(second).map(|(first, second)| first / second).collect();
        ratios.sort_by(f64::total_cmp);
        let last = ratios.len().saturating_sub(1);
        let at = |index: usize| ratios.get(index).copied().unwrap_or(f64::NAN);
        // Outwards, so that few rounds make a wide range.
        Ratio {
            median: at(ratios.len() / 2),
            lower_quartile: at(last / 4),
            upper_quartile: at(last - last / 4),
        }
    }

    /// Whether the first is smaller or larger. Equal where the middle half of the rounds does not agree, or the median
    /// differs from 1 by less than `resolution`.
    #[must_use]
    pub fn order(&self, resolution: f64) -> Ordering {
        if self.upper_quartile < 1.0 && self.median <= 1.0 - resolution {
            Ordering::Less
        } else if self.lower_quartile > 1.0 && self.median >= 1.0 + resolution {
            Ordering::Greater
        } else {
            Ordering::Equal
        }
    }
}

/// Model of the CPU that this runs on.
#[must_use]
pub fn cpu_model() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find_map(|line| line.strip_prefix("model name"));
    line.map_or_else(|| "unknown".to_owned(), |line| line.trim_start_matches([' ', '\t', ':']).to_owned())
}

/// Version of the kernel that this runs on.
#[must_use]
pub fn kernel_release() -> String {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    release.trim().to_owned()
}

/// CPUs that this may run on.
#[must_use]
pub fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_needs_most_rounds_and_a_margin() {
        let base = [1.0, 2.0, 3.0, 4.0, 5.0];
        let scaled = |factors: [f64; 5]| {
            let first: Vec<f64> = base.iter().zip(factors).map(|(base, factor)| base * factor).collect();
            Ratio::of(&first, &base).order(0.01)
        };
        assert_eq!(scaled([0.9, 0.9, 0.9, 0.9, 5.0]), Ordering::Less);
        assert_eq!(scaled([1.1, 1.1, 1.1, 1.1, 0.5]), Ordering::Greater);
        assert_eq!(scaled([0.9, 0.9, 0.9, 1.1, 1.1]), Ordering::Equal, "rounds disagree");
        assert_eq!(scaled([0.995; 5]), Ordering::Equal, "below the resolution");
        assert_eq!(scaled([1.0; 5]), Ordering::Equal);
    }
}
