//! `paatp sim`: runs a scenario, or many small ones, in the simulator.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use paatp_sim::report::{self, Outcome, Report};
use paatp_sim::{Scenario, output, soak};
use paatp_transport::rate::Algorithm;

/// After the options of `paatp sim`.
pub const AFTER_HELP: &str = "\
Everything runs in virtual time: no network, no root. The same file and seed give the same numbers on every machine.

Examples:
  paatp sim scenarios/slow-links-8.toml
  paatp sim scenarios/slow-links-8.toml --controller pa-atp --controller atp --json result.json --output plots
  paatp sim soak --seeds 100000

Exit status: 0 all went well, 1 it failed (standard error says why and what to do), 2 it was called wrongly.";

/// Seeds of a soak unless told otherwise.
const DEFAULT_SEEDS: u64 = 10_000;
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
}

/// Runs the command; returns what to print.
///
/// # Errors
/// What could not be read, run or written.
pub fn run(args: &Sim) -> anyhow::Result<String> {
    match (&args.command, &args.scenario) {
        (Some(SimCommand::Soak { seeds, from }), _) => soak_seeds(*from, *seeds),
        (None, Some(path)) => scenario(args, path),
        (None, None) => bail!("no scenario was named; give one of the files in scenarios/"),
    }
}

fn scenario(args: &Sim, path: &Path) -> anyhow::Result<String> {
    let scenario = Scenario::read(path)?;
    let seed = args.seed.unwrap_or(scenario.seed);
    let name = path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
    let mut report = Report::new(name, seed);
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
