//! `cargo xtask vectors` starts this: writes the test vectors.

use anyhow::Result;
use clap::Parser;

/// Writes the test vectors (tests/vectors) that the code makes
#[derive(Parser)]
struct Args {
    /// Change nothing, fail if something would change
    #[arg(long)]
    check: bool,
}

fn main() -> Result<()> {
    for name in paatp_tests::vectors::write(Args::parse().check)? {
        println!("changed {name}");
    }
    Ok(())
}
