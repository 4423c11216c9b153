//! A scenario with a switch that adds, over sizes of its table, numbers of jobs and k: what that does to throughput and
//! fairness.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::str::FromStr;

use paatp_common::pool::K_MAX;
use paatp_transport::rate::Algorithm;
use serde::{Serialize, Serializer};

use crate::plot::{Line, Plot};
use crate::record::Recorder;
use crate::report::{self, Outcome};
use crate::scenario::{Scenario, ScenarioError, UNLIMITED_SLOTS};
use crate::simulation::SimulationError;

/// Slots of the switch's table; `None` is a table without a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots(pub Option<u32>);

/// Places of the table that a chunk may claim; `None`: the control plane tunes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places(pub Option<u8>);

/// A size or a k that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is neither {number} nor `{word}`")]
pub struct AxisError {
    text: String,
    number: &'static str,
    word: &'static str,
}

/// The number of a text, or none where the text is this word.
fn number_or<N: FromStr>(
    text: &str,
    number: &'static str,
    word: &'static str,
) -> Result<Option<N>, AxisError> {
    if text == word {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| AxisError { text: text.into(), number, word })
}

impl FromStr for Slots {
    type Err = AxisError;

    fn from_str(text: &str) -> Result<Slots, AxisError> {
        number_or(text, "a number of slots", "unlimited").map(Slots)
    }
}

impl FromStr for Places {
    type Err = AxisError;

    fn from_str(text: &str) -> Result<Places, AxisError> {
        number_or(text, "a number of places", "tuned").map(Places)
    }
}

impl fmt::Display for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(slots) => write!(f, "{slots}"),
            None => f.write_str("unlimited"),
        }
    }
}

impl fmt::Display for Places {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(k) => write!(f, "{k}"),
            None => f.write_str("tuned"),
        }
    }
}

fn as_text<T: fmt::Display, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

/// What is run.
#[derive(Clone, Debug)]
pub struct Grid {
    /// Numbers of jobs: the first ones of the scenario.
    pub jobs: Vec<usize>,
    /// Sizes of the table.
    pub slots: Vec<Slots>,
    /// Values of k.
    pub places: Vec<Places>,
    /// Seeds; what is told is the median over them.
    pub seeds: Vec<u64>,
}

/// One figure over all seeds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    /// The middle one, the lower of two.
    pub median: f64,
    /// The least.
    pub least: f64,
    /// The largest.
    pub most: f64,
}

impl Spread {
    /// Of these figures.
    #[must_use]
    pub fn of(mut figures: Vec<f64>) -> Spread {
        figures.sort_by(f64::total_cmp);
        let at = |index: usize| figures.get(index).copied().unwrap_or_default();
        let last = figures.len().saturating_sub(1);
        Spread { median: at(last / 2), least: at(0), most: at(last) }
    }
}

/// One cell of the grid, or (without slots and places) the same jobs without a switch that adds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Jobs.
    pub jobs: usize,
    /// Size of the table.
    #[serde(serialize_with = "as_text")]
    pub slots: Slots,
    /// k.
    #[serde(serialize_with = "as_text")]
    pub k: Places,
    /// Goodput to each rank, all jobs together, until the first job was over.
    pub goodput_bits_per_second: Spread,
    /// The same, as a multiple of that without a switch.
    pub of_none: Spread,
    /// The same, as a part of that with an unlimited table and this k; 0 where the grid has none.
    pub of_unlimited: Spread,
    /// Share of all contributions that came to the aggregator in a sum of the switch.
    pub summed_share: Spread,
    /// Contributions that found no slot, for each contribution.
    pub crowded_share: Spread,
    /// Contributions outside of the window as the switch knew it, for each contribution.
    pub outside_share: Spread,
    /// Slots whose sum never became complete, as a share of all that were begun.
    pub unfinished_share: Spread,
    /// Contributions that were sent again because their sum did not come, for each contribution.
    pub reclaimed_share: Spread,
    /// Jain's index of the jobs' goodputs.
    pub jain_index: Spread,
}

/// A figure of a row, and its name.
type Column = (&'static str, fn(&Row) -> Spread);

/// Everything that was run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sweep {
    /// [`report::SCHEMA_VERSION`].
    pub schema_version: u32,
    /// The scenario's name.
    pub scenario: String,
    /// The controller.
    pub controller: &'static str,
    /// The seeds.
    pub seeds: Vec<u64>,
    /// Goodput and fairness without a switch that adds, by number of jobs.
    pub without: BTreeMap<usize, Baseline>,
    /// The grid.
    pub rows: Vec<Row>,
}

/// The same jobs without a switch that adds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Baseline {
    /// Goodput to each rank, all jobs together.
    pub goodput_bits_per_second: Spread,
    /// Jain's index of the jobs' goodputs.
    pub jain_index: Spread,
}

/// Why a sweep ended.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    /// The scenario cannot be swept.
    #[error(transparent)]
    Scenario(#[from] ScenarioError),
    /// A run failed.
    #[error("{jobs} jobs, {slots} slots, k {k}, seed {seed}: {source}")]
    Run {
        /// Jobs.
        jobs: usize,
        /// Slots.
        slots: String,
        /// k.
        k: Places,
        /// Seed.
        seed: u64,
        /// What happened.
        source: SimulationError,
    },
}

/// What one run came to.
#[derive(Clone, Copy, Debug, Default)]
struct Figures {
    goodput: f64,
    jain: f64,
    summed: f64,
    crowded: f64,
    outside: f64,
    unfinished: f64,
    reclaimed: f64,
}

impl Figures {
    fn of(scenario: &Scenario, record: &Recorder) -> Figures {
        let outcome = Outcome::of(scenario, record);
        let goodput = outcome.jobs.iter().map(|job| job.goodput_bits_per_second).sum();
        let switch = outcome.switch.unwrap_or_default();
        Figures {
            goodput,
            jain: outcome.jain_index,
            summed: switch.summed_share,
            crowded: switch.crowded_share,
            outside: switch.outside_share,
            unfinished: switch.unfinished_share,
            reclaimed: switch.reclaimed_share,
        }
    }
}

/// Runs a grid; `told` hears of each cell that is done.
///
/// # Errors
/// The first run that failed, or why the scenario cannot be swept.
pub fn run(
    name: &str,
    scenario: &Scenario,
    algorithm: Algorithm,
    grid: &Grid,
    told: &mut dyn FnMut(&Row),
) -> Result<Sweep, SweepError> {
    let mut sweep = Sweep {
        schema_version: report::SCHEMA_VERSION,
        scenario: name.into(),
        controller: algorithm.name(),
        seeds: grid.seeds.clone(),
        without: BTreeMap::new(),
        rows: Vec::new(),
    };
    for jobs in grid.jobs.iter().copied() {
        let scenario = first_jobs(scenario, jobs)?;
        let seeds = |slots: Option<Slots>, places: Places| -> Result<Vec<Figures>, SweepError> {
            grid.seeds.iter().map(|seed| figures(&scenario, slots, places, algorithm, *seed)).collect()
        };
        let without = seeds(None, Places(None))?;
        let goodput_bits_per_second = over(&without, |figures| figures.goodput);
        let jain_index = over(&without, |figures| figures.jain);
        sweep.without.insert(jobs, Baseline { goodput_bits_per_second, jain_index });
        for places in grid.places.iter().copied() {
            let runs = |slots: &Slots| Ok((*slots, seeds(Some(*slots), places)?));
            let runs: Vec<(Slots, Vec<Figures>)> =
                grid.slots.iter().map(runs).collect::<Result<_, SweepError>>()?;
            let unlimited = runs.iter().find(|(slots, _)| *slots == Slots(None)).map(|(_, all)| all.clone());
            for (slots, all) in runs {
                let row = row((jobs, slots, places), &all, &without, unlimited.as_deref().unwrap_or(&[]));
                told(&row);
                sweep.rows.push(row);
            }
        }
    }
    Ok(sweep)
}

/// The scenario with its first jobs alone.
fn first_jobs(scenario: &Scenario, jobs: usize) -> Result<Scenario, ScenarioError> {
    if jobs == 0 || jobs > scenario.jobs.len() || scenario.switch.is_none() {
        let most = scenario.jobs.len();
        return Err(ScenarioError::Impossible(format!(
            "a sweep needs a [switch], and 1 to {most} jobs of those that the file has"
        )));
    }
    let mut scenario = scenario.clone();
    scenario.jobs.truncate(jobs);
    Ok(scenario)
}

fn figures(
    scenario: &Scenario,
    slots: Option<Slots>,
    k: Places,
    algorithm: Algorithm,
    seed: u64,
) -> Result<Figures, SweepError> {
    let mut scenario = scenario.clone();
    match (&mut scenario.switch, slots) {
        (Some(switch), Some(slots)) => (switch.slots, switch.k) = (slots.0, k.0),
        _ => scenario.switch = None,
    }
    scenario.check()?;
    let record = report::run(&scenario, algorithm, seed).map_err(|source| SweepError::Run {
        jobs: scenario.jobs.len(),
        slots: slots.map_or_else(|| "no".into(), |slots| slots.to_string()),
        k,
        seed,
        source,
    })?;
    Ok(Figures::of(&scenario, &record))
}

fn over(all: &[Figures], of: fn(&Figures) -> f64) -> Spread {
    Spread::of(all.iter().map(of).collect())
}

fn row(
    (jobs, slots, k): (usize, Slots, Places),
    all: &[Figures],
    without: &[Figures],
    unlimited: &[Figures],
) -> Row {
    // Seed by seed: what a seed does to all runs alike is no spread of the ratio.
    let relative = |to: &[Figures]| {
        let ratio = |(one, other): (&Figures, &Figures)| {
            if other.goodput > 0.0 { one.goodput / other.goodput } else { 0.0 }
        };
        Spread::of(all.iter().zip(to).map(ratio).collect())
    };
    Row {
        jobs,
        slots,
        k,
        goodput_bits_per_second: over(all, |figures| figures.goodput),
        of_none: relative(without),
        of_unlimited: relative(unlimited),
        summed_share: over(all, |figures| figures.summed),
        crowded_share: over(all, |figures| figures.crowded),
        outside_share: over(all, |figures| figures.outside),
        unfinished_share: over(all, |figures| figures.unfinished),
        reclaimed_share: over(all, |figures| figures.reclaimed),
        jain_index: over(all, |figures| figures.jain),
    }
}

impl Sweep {
    /// A table in Markdown: one line for each number of jobs and size, three columns for each k.
    #[must_use]
    pub fn table(&self) -> String {
        let mut ks: Vec<Places> = Vec::new();
        let mut lines: Vec<(usize, Slots)> = Vec::new();
        for row in &self.rows {
            if !ks.contains(&row.k) {
                ks.push(row.k);
            }
            if !lines.contains(&(row.jobs, row.slots)) {
                lines.push((row.jobs, row.slots));
            }
        }
        let mut text = String::from("| jobs | slots |");
        for k in &ks {
            let _ = write!(text, " k = {k}: throughput | added | Jain |");
        }
        text += "\n|---|---|";
        text += &"---|---|---|".repeat(ks.len());
        text.push('\n');
        let mut told = None;
        for (jobs, slots) in lines {
            if told != Some(jobs) {
                self.write_baseline(&mut text, jobs, ks.len());
                told = Some(jobs);
            }
            let _ = write!(text, "| {jobs} | {slots} |");
            for k in &ks {
                let row = self.rows.iter().find(|row| (row.jobs, row.slots, row.k) == (jobs, slots, *k));
                let Some(row) = row else { continue };
                let (ratio, share, jain) = (row.of_none, row.summed_share, row.jain_index);
                let (least, most) = (ratio.least, ratio.most);
                let _ = write!(
                    text,
                    " {:.2} [{least:.2}, {most:.2}] | {:.0} % | {:.3} [{:.3}] |",
                    ratio.median,
                    share.median * 100.0,
                    jain.median,
                    jain.least
                );
            }
            text.push('\n');
        }
        let _ = write!(
            text,
            "\nthroughput: goodput of all jobs together as a multiple of that without a switch, median [least, most] of {} \
             seeds;\nadded: share of contributions that came to the aggregator in a sum of the switch; Jain's index of the jobs' \
             goodputs,\nmedian [least]; unlimited: {UNLIMITED_SLOTS} slots; k: of {K_MAX} places, those that a chunk may claim\n",
            self.seeds.len()
        );
        text
    }

    fn write_baseline(&self, text: &mut String, jobs: usize, ks: usize) {
        let Some(without) = self.without.get(&jobs) else { return };
        let goodput = without.goodput_bits_per_second.median / 1e9;
        let jain = without.jain_index;
        let _ = write!(
            text,
            "| {jobs} | no switch | 1: {goodput:.2} Gbit/s | 0 % | {:.3} [{:.3}] |",
            jain.median, jain.least
        );
        *text += &" | | |".repeat(ks.saturating_sub(1));
        text.push('\n');
    }

    /// All figures, one line for each cell.
    #[must_use]
    pub fn csv(&self) -> String {
        let columns: [Column; 9] = [
            ("goodput_bits_per_second", |row| row.goodput_bits_per_second),
            ("of_none", |row| row.of_none),
            ("of_unlimited", |row| row.of_unlimited),
            ("summed_share", |row| row.summed_share),
            ("crowded_share", |row| row.crowded_share),
            ("outside_share", |row| row.outside_share),
            ("unfinished_share", |row| row.unfinished_share),
            ("reclaimed_share", |row| row.reclaimed_share),
            ("jain_index", |row| row.jain_index),
        ];
        let mut text = String::from("jobs,slots,k");
        for (name, _) in columns {
            let _ = write!(text, ",{name},{name}_least,{name}_most");
        }
        text.push('\n');
        for row in &self.rows {
            let _ = write!(text, "{},{},{}", row.jobs, row.slots, row.k);
            for (_, of) in columns {
                let Spread { median, least, most } = of(row);
                let _ = write!(text, ",{median:.6},{least:.6},{most:.6}");
            }
            text.push('\n');
        }
        text
    }

    /// Throughput over the size of the table.
    #[must_use]
    pub fn throughput_plot(&self, description: &str) -> Plot {
        self.plot("Throughput over the switch's memory", "multiple of no switch", description, |row| {
            row.of_none.median
        })
    }

    /// Fairness over the size of the table.
    #[must_use]
    pub fn fairness_plot(&self, description: &str) -> Plot {
        self.plot("Fairness over the switch's memory", "Jain's index", description, |row| {
            row.jain_index.median
        })
    }

    fn plot(&self, title: &str, y: &str, description: &str, of: fn(&Row) -> f64) -> Plot {
        let mut lines: Vec<Line> = Vec::new();
        for row in &self.rows {
            let name = format!("{} jobs, k = {}", row.jobs, row.k);
            let point = (f64::from(row.slots.0.unwrap_or(UNLIMITED_SLOTS).ilog2()), of(row));
            match lines.iter_mut().find(|line| line.name == name) {
                Some(line) => line.points.push(point),
                None => lines.push(Line { name, points: vec![point], steps: false }),
            }
        }
        Plot {
            title: title.into(),
            subtitle: description.into(),
            x: "slots of the switch, logarithm to base 2".into(),
            y: y.into(),
            lines,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_are_read_and_told_alike() {
        for text in ["16", "unlimited"] {
            assert_eq!(text.parse::<Slots>().map(|slots| slots.to_string()), Ok(text.into()));
        }
        for text in ["1", "tuned"] {
            assert_eq!(text.parse::<Places>().map(|places| places.to_string()), Ok(text.into()));
        }
        let error = "many".parse::<Slots>().unwrap_err().to_string();
        assert!(error.contains("many") && error.contains("unlimited"), "{error}");
    }

    #[test]
    fn the_middle_of_figures() {
        assert_eq!(Spread::of(vec![3.0, 1.0, 2.0]), Spread { median: 2.0, least: 1.0, most: 3.0 });
        assert_eq!(Spread::of(vec![2.0, 1.0]).median, 1.0);
        assert_eq!(Spread::of(Vec::new()), Spread::default());
    }
}
