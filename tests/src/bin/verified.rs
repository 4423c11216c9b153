//! `cargo xtask p4 test` starts this after a full run: notes in p4/verified.json what was run, and on what.

use anyhow::{Context, Result};
use clap::Parser;
use paatp_tests::p4::{Tools, Verified};

/// Notes that the switch program was verified, as it is now
#[derive(Parser)]
struct Args {
    /// Each test and how it ended, as NAME=OUTCOME
    #[arg(required = true)]
    tests: Vec<String>,
}

fn main() -> Result<()> {
    let pair = |test: &String| test.split_once('=').map(|(name, how)| (name.to_owned(), how.to_owned()));
    let tests = Args::parse().tests.iter().map(pair).collect::<Option<_>>();
    let verified = Verified::now(&Tools::find()?, tests.context("a test without an outcome")?)?;
    println!("wrote {}", verified.write()?.display());
    Ok(())
}
