//! `cargo xtask p4 test`: the tests of the switch program. The tools that they need are in no package registry, so CI
//! cannot run them; what a full run was made on is noted in `p4/verified.json`, and a test that CI does run compares.

use std::ffi::OsString;
use std::process::{Command, ExitCode};

use anyhow::Result;

use crate::objects;
use crate::process;
use crate::testing;
use crate::workspace::{Profile, Workspace};

/// The test programs that need the tools.
const PROGRAMS: [&str; 3] = ["p4", "switch", "switch_control"];

/// Whether a test may skip itself although BPF is required: CI has none of the tools. `PAATP_REQUIRE_P4=1` makes such a test
/// fail instead.
pub fn may_skip(test: &str) -> bool {
    test.split_once("::").is_some_and(|(program, _)| PROGRAMS.contains(&program))
}

/// Runs the tests; if none failed or skipped itself, notes that.
pub fn test(workspace: &Workspace) -> Result<ExitCode> {
    let args: Vec<OsString> = PROGRAMS.iter().flat_map(|name| ["--test".into(), name.into()]).collect();
    let outcome = testing::run(workspace, &args)?;
    if let Some(all) = outcome.all().filter(|_| outcome.passed()) {
        objects::host(workspace, Profile::Debug, &["verified"])?;
        let mut command = Command::new(workspace.binary(Profile::Debug, "verified"));
        command.args(all.map(|(name, outcome)| format!("{name}={outcome}")));
        process::run(&mut command, "The tests passed, but p4/verified.json does not say so.")?;
    } else {
        println!("p4/verified.json stays as it is: not every test ran and passed");
    }
    outcome.conclude()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_tests_of_the_switch_may_skip() {
        assert!(may_skip("p4::vectors"));
        assert!(!may_skip("sums::p4") && !may_skip("p4"));
    }
}
