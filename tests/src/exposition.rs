//! A strict reader of Prometheus' text format 0.0.4: takes less than Prometheus does, so that nothing slips through.
//!
//! Every family has HELP, then TYPE, then its samples, all together and once. Counters, and nothing else, end in `_total`. No
//! series twice, no time stamp, no empty family, only finite numbers, counters not below zero.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail, ensure};

/// A series: the metric's name and its labels.
pub type Series = (String, BTreeMap<String, String>);

/// What an exposition says.
#[derive(Clone, Debug, Default)]
pub struct Exposition {
    /// Type of each family.
    pub families: BTreeMap<String, String>,
    /// Value of each series.
    pub samples: BTreeMap<Series, f64>,
}

impl Exposition {
    /// Reads a text.
    ///
    /// # Errors
    /// With the number of the first line that is not right.
    pub fn parse(text: &str) -> Result<Exposition> {
        ensure!(text.ends_with('\n'), "the last line has no end");
        let mut read = Exposition::default();
        let (mut help, mut family): (Option<String>, Option<(String, usize)>) = (None, None);
        for (number, line) in (1..).zip(text.lines()) {
            read.line(line, &mut help, &mut family).with_context(|| format!("line {number}: {line}"))?;
        }
        ensure!(help.is_none(), "HELP without TYPE at the end");
        finish(family)?;
        Ok(read)
    }

    fn line(
        &mut self,
        line: &str,
        help: &mut Option<String>,
        family: &mut Option<(String, usize)>,
    ) -> Result<()> {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            finish(family.take())?;
            let (name, text) = rest.split_once(' ').context("HELP without a text")?;
            ensure!(help.is_none() && !text.trim().is_empty(), "HELP without TYPE, or empty");
            ensure!(!self.families.contains_key(name), "a second HELP, or samples that are not together");
            unescape(text, &['\\', 'n'])?;
            *help = Some(name.into());
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').context("TYPE without a type")?;
            ensure!(help.take().as_deref() == Some(name), "TYPE does not follow its HELP");
            ensure!(is_name(name, true), "no name of a metric");
            ensure!(matches!(kind, "counter" | "gauge"), "unknown type");
            ensure!(
                name.ends_with("_total") == (kind == "counter"),
                "_total is for counters, and needed there"
            );
            self.families.insert(name.into(), kind.into());
            *family = Some((name.into(), 0));
        } else {
            let (series, value) = sample(line)?;
            let (name, samples) = family.as_mut().context("a sample without a family")?;
            ensure!(help.is_none() && series.0 == *name, "a sample outside of its family");
            *samples += 1;
            ensure!(value.is_finite(), "no finite number");
            ensure!(
                value >= 0.0 || self.families.get(name).is_some_and(|kind| kind == "gauge"),
                "below zero"
            );
            ensure!(self.samples.insert(series, value).is_none(), "the series is there twice");
        }
        Ok(())
    }

    /// The value of a series.
    #[must_use]
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let labels = labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        self.samples.get(&(name.to_owned(), labels.collect())).copied()
    }

    /// All series.
    #[must_use]
    pub fn series(&self) -> BTreeSet<&Series> {
        self.samples.keys().collect()
    }

    /// Series that are counters here and there, and have gone down from here to there.
    #[must_use]
    pub fn fallen(&self, later: &Exposition) -> Vec<Series> {
        let counters = self.samples.iter().filter(|((name, _), _)| name.ends_with("_total"));
        let fallen = counters.filter(|(series, value)| later.samples.get(series).is_some_and(|l| l < value));
        fallen.map(|(series, _)| series.clone()).collect()
    }
}

fn finish(family: Option<(String, usize)>) -> Result<()> {
    match family {
        Some((name, 0)) => bail!("the family {name} has no samples"),
        _ => Ok(()),
    }
}

fn is_name(name: &str, colons: bool) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '_' || (colons && c == ':');
    name.starts_with(|c: char| !c.is_ascii_digit()) && name.chars().all(fits)
}

/// Resolves escapes, of which only these are allowed.
fn unescape(text: &str, allowed: &[char]) -> Result<String> {
    let (mut out, mut chars) = (String::new(), text.chars());
    while let Some(c) = chars.next() {
        match (c, c == '\\') {
            (_, true) => {
                let escaped = chars.next().filter(|c| allowed.contains(c)).context("a wrong escape")?;
                out.push(if escaped == 'n' { '\n' } else { escaped });
            }
            (c, _) => out.push(c),
        }
    }
    Ok(out)
}

/// `name{label="value",…} number`
fn sample(line: &str) -> Result<(Series, f64)> {
    let end = line.find(['{', ' ']).context("no value")?;
    let (name, mut rest) = line.split_at(end);
    ensure!(is_name(name, true), "no name of a metric");
    let mut labels = BTreeMap::new();
    if let Some(mut inside) = rest.strip_prefix('{') {
        loop {
            let (label, after) = inside.split_once("=\"").context("a label without a value")?;
            ensure!(is_name(label, false) && !label.starts_with("__"), "no name of a label");
            let mut escaped = false;
            let end = after.find(|c| {
                let ends = c == '"' && !escaped;
                escaped = c == '\\' && !escaped;
                ends
            });
            let (value, after) = after.split_at(end.context("a label's value does not end")?);
            let value = unescape(value, &['\\', 'n', '"'])?;
            ensure!(labels.insert(label.to_owned(), value).is_none(), "a label twice");
            let after = after.strip_prefix('"').unwrap_or(after);
            match (after.strip_prefix(','), after.strip_prefix('}')) {
                (Some(more), _) => inside = more,
                (_, Some(end)) => {
                    rest = end;
                    break;
                }
                _ => bail!("labels do not end"),
            }
        }
    }
    let value = rest.strip_prefix(' ').context("no space before the value")?;
    ensure!(!value.contains(' '), "a time stamp, or more than one space");
    Ok(((name.into(), labels), value.parse().context("no number")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "# HELP a_total It's \\\\ fine.\n# TYPE a_total counter\na_total{x=\"1\",y=\"q\\\"\\\\\\n}\"} 3\na_total 2\n# HELP b B.\n# TYPE b gauge\nb -1.5\n";

    #[test]
    fn what_is_right_is_read() {
        let read = Exposition::parse(GOOD).unwrap_or_else(|error| panic!("{error:#}"));
        assert_eq!(read.value("a_total", &[("x", "1"), ("y", "q\"\\\n}")]), Some(3.0));
        assert_eq!((read.value("b", &[]), read.value("b", &[("x", "1")])), (Some(-1.5), None));
        let mut later = read.clone();
        later.samples.values_mut().for_each(|value| *value -= 1.0);
        assert_eq!(read.fallen(&later).len(), 2);
    }

    #[test]
    fn what_is_wrong_is_refused() {
        for (from, to) in [
            ("# HELP b B.\n", ""),
            ("# TYPE b gauge\n", ""),
            ("# TYPE b gauge", "# TYPE b counter"),
            ("# TYPE b gauge", "# TYPE b histogram"),
            ("b -1.5\n", ""),
            ("b -1.5", "b NaN"),
            ("b -1.5", "b inf"),
            ("b -1.5", "b 1 1700000000"),
            ("b -1.5", "b  1"),
            ("b -1.5", "c 1"),
            ("a_total 2", "a_total -2"),
            ("a_total 2", "a_total{x=\"1\",y=\"q\\\"\\\\\\n}\"} 2"),
            ("# HELP b B.\n# TYPE b gauge", "# HELP a_total A.\n# TYPE a_total counter"),
            ("\\n}", "\\t}"),
            ("x=\"1\",", "x=\"1\" "),
            ("x=\"1\"", "9x=\"1\""),
            ("x=\"1\",y", "y=\"1\",y"),
            ("-1.5\n", "-1.5"),
            ("It's \\\\", "It's \\x"),
        ] {
            let bad = GOOD.replacen(from, to, 1);
            assert!(bad != GOOD && Exposition::parse(&bad).is_err(), "{from:?} -> {to:?}");
        }
    }
}
