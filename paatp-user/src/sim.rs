//! `paatp sim`: runs a scenario, or many small ones, in the simulator.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use paatp_sim::report::{self, Outcome, Report};
use paatp_sim::sweep::{self, Grid, Places, Slots};
use paatp_sim::{Scenario, output, soak};
use paatp_transport::rate::Algorithm;

/// After the options of `paatp sim`.
pub const AFTER_HELP: &str = "\
Everything runs in virtual time: no network, no root. The same file and seed give the same numbers on every machine.

Examples:
  paatp sim scenarios/server-8-slow-link.toml
  paatp sim scenarios/server-8-slow-link.toml --controller pa-atp --controller atp --json result.json --output plots
  paatp sim soak --seeds 100000
  paatp sim sweep scenarios/switch-mixed.toml --slots 16,64,unlimited --k 8,tuned

Exit status: 0 all went well, 1 it failed (standard error says why and what to do), 2 it was called wrongly.";

/// Seeds of a soak unless told otherwise.
const DEFAULT_SEEDS: u64 = 10_000;
/// Seeds of a sweep unless told otherwise: enough for a median and a spread.
const DEFAULT_SWEEP_SEEDS: u64 = 3;
/// A line of progress after so many seeds.
const SEEDS_PER_LINE: u64 = 10_000;

/// `paatp sim`
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Sim {
    /// Scenario to run: a TOML file, see scenarios/ and docs/simulator.md.
    #[arg(value_name = "SCENARIO.toml", required = true)]
    pub scenario: Option<PathBuf>,
    /// Rate controller to run it with: pa-atp, atp, a2tp, switchml or fixed; may be given several times [default: all].
    #[arg(long, value_name = "NAME")]
    pub controller: Vec<Algorithm>,
    /// Seed of all randomness [default: the scenario's].
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Write the table to this file as JSON.
    #[arg(long, value_name = "FILE.json")]
    pub json: Option<PathBuf>,
    /// Write plots (SVG) and their numbers (CSV) to this directory.
    #[arg(long, value_name = "DIRECTORY")]
    pub output: Option<PathBuf>,
    /// Something else than one scenario.
    #[command(subcommand)]
    pub command: Option<SimCommand>,
}

/// Subcommands of `paatp sim`.
#[derive(Debug, Subcommand)]
pub enum SimCommand {
    /// Run many small, bad networks, one for each seed; stop at the first that breaks a rule or gives a wrong sum.
    Soak {
        /// How many seeds.
        #[arg(long, value_name = "N", default_value_t = DEFAULT_SEEDS)]
        seeds: u64,
        /// First seed.
        #[arg(long, value_name = "N", default_value_t = 0)]
        from: u64,
    },
    /// Run a scenario that has a switch over sizes of its table, numbers of jobs and k, and print a table.
    Sweep(Sweep),
}

/// `paatp sim sweep`
#[derive(Debug, Args)]
pub struct Sweep {
    /// Scenario to run: a TOML file with a table `switch`.
    #[arg(value_name = "SCENARIO.toml")]
    pub scenario: PathBuf,
    /// Numbers of jobs: the first ones of the scenario.
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 2, 4, 8])]
    pub jobs: Vec<usize>,
    /// Slots of the switch, each a power of two or `unlimited`.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "16,64,256,1024,unlimited")]
    pub slots: Vec<Slots>,
    /// Places that a chunk may claim, each 1 to 8 or `tuned`.
    #[arg(long, value_name = "K", value_delimiter = ',', default_value = "1,8,tuned")]
    pub k: Vec<Places>,
    /// Seeds, from 1 on.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_SWEEP_SEEDS)]
    pub seeds: u64,
    /// Rate controller.
    #[arg(long, value_name = "NAME", default_value = "pa-atp")]
    pub controller: Algorithm,
    /// Write all figures to this file as JSON.
    #[arg(long, value_name = "FILE.json")]
    pub json: Option<PathBuf>,
    /// Write plots (SVG) and all figures (CSV) to this directory.
    #[arg(long, value_name = "DIRECTORY")]
    pub output: Option<PathBuf>,
}

/// Runs the command; returns what to print.
///
/// # Errors
/// What could not be read, run or written.
pub fn run(args: &Sim) -> anyhow::Result<String> {
    match (&args.command, &args.scenario) {
        (Some(SimCommand::Soak { seeds, from }), _) => soak_seeds(*from, *seeds),
        (Some(SimCommand::Sweep(args)), _) => sweep_switch(args),
        (None, Some(path)) => scenario(args, path),
        (None, None) => bail!("no scenario was named; give one of the files in scenarios/"),
    }
}

fn name_of(path: &Path) -> String {
    path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned())
}

fn sweep_switch(args: &Sweep) -> anyhow::Result<String> {
    let scenario = Scenario::read(&args.scenario)?;
    let grid = Grid {
        jobs: args.jobs.clone(),
        slots: args.slots.clone(),
        places: args.k.clone(),
        seeds: (1..=args.seeds.max(1)).collect(),
    };
    let name = name_of(&args.scenario);
    let mut told = |row: &sweep::Row| {
        let ratio = row.of_none;
        eprintln!("{} jobs, {} slots, k {}: {:.2}", row.jobs, row.slots, row.k, ratio.median);
    };
    let sweep = sweep::run(&name, &scenario, args.controller, &grid, &mut told)
        .with_context(|| format!("{} fails under {}", args.scenario.display(), args.controller))?;
    if let Some(file) = &args.json {
        let text = serde_json::to_string_pretty(&sweep)? + "\n";
        std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    let mut text = format!("{}\n{}\n\n{}", scenario.description, args.controller, sweep.table());
    if let Some(directory) = &args.output {
        let files = output::write_sweep(directory, &scenario.description, &sweep)?;
        text += &format!("written to {}: {}\n", directory.display(), files.join(", "));
    }
    Ok(text)
}

fn scenario(args: &Sim, path: &Path) -> anyhow::Result<String> {
    let scenario = Scenario::read(path)?;
    let seed = args.seed.unwrap_or(scenario.seed);
    let mut report = Report::new(name_of(path), seed);
    let mut runs = Vec::new();
    for algorithm in Algorithm::ALL {
        if !args.controller.is_empty() && !args.controller.contains(&algorithm) {
            continue;
        }
        let record = report::run(&scenario, algorithm, seed)
            .with_context(|| format!("{} fails under {algorithm}, seed {seed}", path.display()))?;
        report.controllers.insert(algorithm.name(), Outcome::of(&scenario, &record));
        runs.push((algorithm, record));
    }
    if let Some(file) = &args.json {
        let text = serde_json::to_string_pretty(&report)? + "\n";
        std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    let mut text = format!("{}\nseed {seed}\n\n{}", scenario.description, report.table());
    if let Some(directory) = &args.output {
        let files = output::write(directory, &scenario, &runs)?;
        text += &format!("written to {}: {}\n", directory.display(), files.join(", "));
    }
    Ok(text)
}

fn soak_seeds(from: u64, seeds: u64) -> anyhow::Result<String> {
    let mut totals = paatp_sim::record::Totals::default();
    for seed in from..from.saturating_add(seeds) {
        totals.add(&soak::run(seed)?.totals);
        let count = seed - from + 1;
        if count.is_multiple_of(SEEDS_PER_LINE) && count < seeds {
            eprintln!("{count} seeds of {seeds}");
        }
    }
    let last = from.saturating_add(seeds).saturating_sub(1);
    Ok(format!(
        "seeds {from} to {last}: every operation completed with the right sum, no rule was broken\n\
         {} packets, of which {} were lost and {} found no room; {} contributions sent again, {} redos\n",
        totals.packets, totals.lost, totals.dropped, totals.retransmissions, totals.redos
    ))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        sim: Sim,
    }

    fn called(args: &[&str]) -> anyhow::Result<String> {
        run(&Line::try_parse_from([&["sim"], args].concat())?.sim)
    }

    const SCENARIO: &str = r#"
        description = "two ranks"
        seed = 5
        [network]
        packet = "1500 B"
        host = { rate = "10 Gbit/s", delay = "1 us", buffer = "1 MiB" }
        [[job]]
        name = "j"
        world = 2
        window = 16
        slots = 32
        chunks = 40
        iterations = 3
        compute = "10 us"
    "#;

    #[test]
    fn a_scenario_gives_a_table_json_and_files() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name).to_string_lossy().into_owned();
        std::fs::write(path("two.toml"), SCENARIO).unwrap();
        let (file, json, output) = (path("two.toml"), path("two.json"), path("plots"));
        let args =
            [&file, "--json", &json, "--output", &output, "--controller", "atp", "--controller", "pa-atp"];
        let text = called(&args).unwrap();
        assert!(
            text.starts_with("two ranks\nseed 5\n") && text.contains("\npa-atp ") && !text.contains("fixed")
        );
        let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
        assert_eq!(report["scenario"], "two");
        assert!(report["controllers"]["atp"]["mean_iteration_seconds"].as_f64().unwrap() > 1e-5);
        assert!(Path::new(&output).join("progress-pa-atp.svg").is_file());
        // The same again, whatever else is asked for; and another seed is said.
        assert!(text.starts_with(&called(&args[..1]).unwrap()[..20]));
        assert!(called(&[&file, "--seed", "6", "--controller", "fixed"]).unwrap().contains("seed 6"));
    }

    #[test]
    fn a_soak_replays_single_seeds() {
        let text = called(&["soak", "--from", "7", "--seeds", "2"]).unwrap();
        assert!(text.starts_with("seeds 7 to 8: every operation completed"), "{text}");
    }

    #[test]
    fn a_sweep_gives_a_table_json_and_files() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name).to_string_lossy().into_owned();
        let aggregator = "aggregator = { rate = \"10 Gbit/s\", delay = \"1 us\", buffer = \"1 MiB\" }";
        let job = SCENARIO.replace("[[job]]", &format!("{aggregator}\n[switch]\nslots = 8\n[[job]]"));
        std::fs::write(path("two.toml"), job).unwrap();
        std::fs::write(path("none.toml"), SCENARIO).unwrap();
        let (file, json, output) = (path("two.toml"), path("sweep.json"), path("plots"));
        let small = ["--jobs", "1", "--slots", "8,unlimited", "--k", "1,tuned", "--seeds", "2"];
        let args = [&["sweep", &file, "--json", &json, "--output", &output], &small[..]].concat();
        let text = called(&args).unwrap();
        assert!(text.contains("| 1 | no switch | 1: ") && text.contains("\n| 1 | unlimited | "), "{text}");
        let sweep: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
        assert_eq!(
            (&sweep["rows"][3]["slots"], &sweep["rows"][3]["k"]),
            (&"unlimited".into(), &"tuned".into())
        );
        assert_eq!(sweep["rows"][3]["of_unlimited"]["median"], 1.0);
        assert!(sweep["rows"][3]["summed_share"]["least"].as_f64().unwrap() > 0.9, "{sweep:#}");
        let csv = std::fs::read_to_string(Path::new(&output).join("sweep.csv")).unwrap();
        assert_eq!(csv.lines().count(), 5);
        assert!(Path::new(&output).join("throughput.svg").is_file());
        let error = called(&[&["sweep", &path("none.toml")], &small[..]].concat()).unwrap_err();
        assert!(format!("{error:#}").contains("[switch]"), "{error:#}");
        assert!(called(&[&["sweep", &file, "--jobs", "2"], &small[2..]].concat()).is_err());
    }

    #[test]
    fn a_missing_scenario_says_where_there_are_some() {
        let error = called(&["nowhere.toml"]).unwrap_err().to_string();
        assert!(error.contains("scenarios/"), "{error}");
    }
}
