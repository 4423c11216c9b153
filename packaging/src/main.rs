//! `cargo xtask codegen` and `dist` start this; it is not installed.

use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;

/// Makes what is made from the program.
#[derive(Parser)]
enum Task {
    /// Write the regions of checked-in files that the code decides
    Codegen {
        /// The repository
        root: PathBuf,
        /// Change nothing, fail if something would change
        #[arg(long)]
        check: bool,
    },
    /// Write man pages and completions
    Assets {
        /// Where to
        folder: PathBuf,
    },
}

fn main() -> Result<()> {
    match Task::parse() {
        Task::Codegen { root, check } => {
            for file in paatp_packaging::codegen(&root, check)? {
                println!("changed {file}");
            }
            Ok(())
        }
        Task::Assets { folder } => paatp_packaging::assets(&folder),
    }
}
