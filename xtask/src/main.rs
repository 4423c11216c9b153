//! `cargo xtask`: sets a machine up, builds the eBPF objects and the program that embeds them, and
//! runs the tests, the demonstrations and the benchmarks the way CI does.
//!
//! Nothing here knows how the all-reduce works; it only knows in which order things are built and
//! which environment variables they are told:
//!
//! | variable | set for | meaning |
//! |---|---|---|
//! | `PAATP_EBPF_DIR` | every child, unless the target directory is `target` | where `paatp.bpf.o`, `worker.bpf.o` and `lab.bpf.o` are |
//! | `PAATP_BIN` | tests, verify, run, bench | the built `paatp` program |
//! | `PAATP_REQUIRE_BPF` | tests | `1`: a test that cannot use BPF fails instead of skipping itself |
//! | `P4C`, `BMV2`, `BMV2_CLI`, `BMV2_GRPC` | read by the tests of the switch program | its compiler, switch, the switch's command line, and the switch with a P4Runtime server, if not on `PATH` |
//! | `P4TEST` | read by the same | p4c's front end, which tells what the program for Tofino means |
//! | `PAATP_REQUIRE_P4` | read by the same | `1`: they fail instead of skipping themselves where these are missing |
//! | `PAATP_SKIP_LOG` | tests | file to which a test appends `SKIPPED: <name>: <reason>` |

mod bpf;
mod ci;
mod dist;
mod dist_check;
mod install;
mod launch;
mod machine;
mod objects;
mod p4;
mod probe;
mod process;
mod purity;
mod setup;
mod tally;
mod testing;
mod workspace;

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::machine::Need;
use crate::workspace::{Profile, Workspace};

/// The command line.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "Sets up, builds, tests and measures this repository")]
struct Cli {
    /// What to do.
    #[command(subcommand)]
    task: Task,
}

/// The tasks.
#[derive(Debug, Subcommand)]
enum Task {
    /// Get this machine ready to build the eBPF objects and to run the tests
    Setup {
        /// Only report what is there and what is missing
        #[arg(long)]
        check: bool,
    },
    /// Build the eBPF objects, then the `paatp` program that embeds them
    Build {
        /// Build the program optimised
        #[arg(long)]
        release: bool,
    },
    /// Build, then run all tests; further arguments go to `cargo test`
    Test {
        /// Arguments for `cargo test`, for example `lanes -- --nocapture`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Load every eBPF program and hold what the verifier walks, and the stack, against budgets
    #[command(disable_help_flag = true)]
    Verify {
        /// Arguments for `verify`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Start the playground: hosts and a switch in namespaces (arguments go to `playground`)
    #[command(disable_help_flag = true)]
    Run {
        /// Arguments for `playground`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Run a benchmark: `bench kernel` starts the program `bench-kernel` with the arguments
    #[command(disable_help_flag = true)]
    Bench {
        /// Which benchmark
        name: String,
        /// Arguments for the benchmark
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Write what the code decides into unit file, manifests and documentation
    Codegen {
        /// Change nothing, fail if something would change
        #[arg(long)]
        check: bool,
    },
    /// Write the test vectors (tests/vectors) that the code makes
    Vectors {
        /// Change nothing, fail if something would change
        #[arg(long)]
        check: bool,
    },
    /// `p4 test`: run the tests of the switch program, and note in p4/verified.json what they were run on
    P4 {
        /// What to do
        #[arg(value_parser = ["test"])]
        action: String,
    },
    /// Build what is given to others into `target/dist`: program, Debian package, man pages, completions, unit
    Dist {
        /// `check`: then install, start, upgrade, remove and purge the package in a chroot
        #[arg(value_parser = ["check"])]
        action: Option<String>,
    },
    /// Take docs/images/status.png anew: the status page of an aggregator at work (arguments go to `screenshot`)
    #[command(disable_help_flag = true)]
    Screenshot {
        /// Arguments for `screenshot`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Play what takes too long for every run: `matrix`, each failure at each step of an operation
    Soak {
        /// What to play
        #[arg(value_parser = ["matrix"])]
        name: String,
    },
    /// Everything CI runs, in CI's order
    Ci,
    /// Fuzz one target of `fuzz/` with cargo-fuzz (needs a nightly tool chain)
    Fuzz {
        /// Name of the fuzz target
        target: String,
        /// Further arguments for `cargo fuzz run`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
}

/// Runs the task and turns its outcome into an exit status.
fn main() -> ExitCode {
    match run(Cli::parse().task) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            for cause in error.chain().skip(1) {
                eprintln!("  because: {cause}");
            }
            ExitCode::FAILURE
        }
    }
}

/// Dispatches to the task's module.
fn run(task: Task) -> Result<ExitCode> {
    let workspace = Workspace::locate()?;
    match task {
        Task::Setup { check: true } => return setup::report(&workspace),
        Task::Setup { check: false } => {
            setup::ensure(&workspace, Need::Tests)?;
        }
        Task::Build { release } => {
            let profile = if release { Profile::Release } else { Profile::Debug };
            objects::build_all(&workspace, profile)?;
        }
        Task::Test { args } => return testing::run(&workspace, &args)?.conclude(),
        Task::Soak { name } => return testing::soak(&workspace, &name)?.conclude(),
        Task::Verify { args } => return launch::replace(&workspace, "verify", &args),
        Task::Run { args } => return launch::replace(&workspace, "playground", &args),
        Task::Bench { name, args } => return launch::replace(&workspace, &format!("bench-{name}"), &args),
        Task::Codegen { check } => dist::codegen(&workspace, check)?,
        Task::Vectors { check } => dist::vectors(&workspace, check)?,
        Task::P4 { action: _ } => return p4::test(&workspace),
        Task::Dist { action: None } => drop(dist::build(&workspace)?),
        Task::Dist { action: Some(_) } => dist_check::run(&workspace)?,
        Task::Screenshot { args } => return launch::replace(&workspace, "screenshot", &args),
        Task::Ci => return ci::run(&workspace),
        Task::Fuzz { target, args } => return launch::fuzz(&workspace, &target, &args),
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a panic is the failure report here")]

    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    /// What a launched program receives for a command line.
    fn passed_on(line: &[&str]) -> Vec<OsString> {
        match Cli::try_parse_from(line).unwrap().task {
            Task::Run { args } | Task::Bench { args, .. } | Task::Test { args } => args,
            other => panic!("unexpected task {other:?}"),
        }
    }

    #[test]
    fn arguments_pass_through_unchanged() {
        assert_eq!(passed_on(&["x", "run", "--hosts", "4", "--help"]), ["--hosts", "4", "--help"]);
        assert_eq!(passed_on(&["x", "run", "-v", "--", "sh", "-c"]), ["-v", "--", "sh", "-c"]);
        assert_eq!(passed_on(&["x", "bench", "kernel", "--json"]), ["--json"]);
        assert_eq!(
            passed_on(&["x", "test", "--", "lanes", "--", "--nocapture"]),
            ["lanes", "--", "--nocapture"]
        );
    }
}
