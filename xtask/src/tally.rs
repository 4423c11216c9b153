//! Counts what tests say: libtest's result lines, and the tests that skipped themselves.

use std::collections::BTreeMap;
use std::fmt;

/// The sum of all test programs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    /// Passed, according to libtest: a test that skipped itself is among them.
    reported_passed: usize,
    /// Failed.
    pub failed: usize,
    /// Marked `#[ignore]`.
    ignored: usize,
    /// Tests that skipped themselves, with their reasons.
    pub skipped: BTreeMap<String, String>,
    /// Every test that was named, with its outcome in libtest's words.
    pub outcomes: BTreeMap<String, String>,
}

impl Tally {
    /// Takes notice of a line if it is a `test result:` line, or tells of one test.
    pub fn read_line(&mut self, line: &str) {
        if let Some((name, outcome)) = line.strip_prefix("test ").and_then(|rest| rest.rsplit_once(" ... "))
            && outcome.split_whitespace().count() == 1
        {
            self.outcomes.insert(name.to_owned(), outcome.to_owned());
        }
        let Some((_, counts)) = line.strip_prefix("test result: ").and_then(|rest| rest.split_once(". "))
        else {
            return;
        };
        for count in counts.split(';') {
            let mut words = count.split_whitespace();
            let (Some(number), Some(what)) = (words.next(), words.next()) else { continue };
            let Ok(number) = number.parse::<usize>() else { continue };
            match what {
                "passed" => self.reported_passed += number,
                "failed" => self.failed += number,
                "ignored" => self.ignored += number,
                _ => {}
            }
        }
    }

    /// Takes over the log of skipped tests: lines of the form `SKIPPED: <name>: <reason>`.
    pub fn read_skip_log(&mut self, log: &str) {
        for line in log.lines().filter(|line| !line.trim().is_empty()) {
            let entry = line.strip_prefix("SKIPPED: ").unwrap_or(line);
            let (name, reason) = entry.split_once(": ").unwrap_or((entry, "no reason given"));
            self.skipped.insert(name.to_owned(), reason.to_owned());
        }
    }
}

impl fmt::Display for Tally {
    /// `N passed, N failed, N skipped`, where a test that skipped itself has not passed.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let skipped = self.skipped.len();
        write!(
            formatter,
            "{} passed, {} failed, {} skipped",
            self.reported_passed.saturating_sub(skipped),
            self.failed,
            self.ignored + skipped
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adds_up_result_lines() {
        let mut tally = Tally::default();
        for line in [
            "running 3 tests",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.01s",
            "test result: FAILED. 4 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s",
            "test result: nonsense",
        ] {
            tally.read_line(line);
        }
        assert_eq!(tally.to_string(), "7 passed, 2 failed, 1 skipped");
    }

    #[test]
    fn remembers_how_each_test_ended() {
        let mut tally = Tally::default();
        for line in [
            "test vectors::one ... ok",
            "test two ... FAILED",
            "test two has been running for ...",
            "testing ... ok",
        ] {
            tally.read_line(line);
        }
        let outcomes: Vec<_> = tally.outcomes.iter().map(|(name, how)| format!("{name} {how}")).collect();
        assert_eq!(outcomes, ["two FAILED", "vectors::one ok"]);
    }

    #[test]
    fn a_test_that_skipped_itself_has_not_passed() {
        let mut tally = Tally::default();
        tally.read_line("test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out");
        tally.read_skip_log(
            "SKIPPED: loads: not root: really\nSKIPPED: loads: not root: really\n\nodd line\n",
        );
        assert_eq!(tally.to_string(), "1 passed, 0 failed, 2 skipped");
        assert_eq!(tally.skipped["loads"], "not root: really");
        assert_eq!(tally.skipped["odd line"], "no reason given");
    }
}
