//! `cargo xtask test`: runs the workspace's tests, streams their output and adds them up.

use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};

use crate::bpf;
use crate::machine::Need;
use crate::objects;
use crate::p4;
use crate::process;
use crate::purity;
use crate::setup;
use crate::tally::Tally;
use crate::workspace::{Profile, Workspace};

/// Where proptest finds the seed of its random cases.
const PROPTEST_SEED: &str = "PROPTEST_RNG_SEED";
/// The seed unless another one is given: two runs of one commit try the same cases, so that a change is judged by what it
/// changes. New cases are looked for beside it.
const FIXED_SEED: &str = "1729";

/// How the tests went.
#[derive(Debug)]
pub struct Outcome {
    /// The counts.
    tally: Tally,
    /// Why the run counts as failed, if it does.
    failure: Option<String>,
}

impl Outcome {
    /// Names of the tests that ran to their end, with how they ended; nothing if one skipped itself.
    pub fn all(&self) -> Option<impl Iterator<Item = (&str, &str)>> {
        let all = self.tally.outcomes.iter().map(|(name, outcome)| (name.as_str(), outcome.as_str()));
        self.tally.skipped.is_empty().then_some(all)
    }

    /// Whether the run counts as passed.
    pub fn passed(&self) -> bool {
        self.failure.is_none()
    }

    /// Prints the skipped tests and, as the last line, the sum.
    pub fn conclude(&self) -> Result<ExitCode> {
        if !self.tally.skipped.is_empty() {
            println!("tests that skipped themselves: {}", self.tally.skipped.len());
            for (name, reason) in &self.tally.skipped {
                println!("  {name}: {reason}");
            }
        }
        if let Some(failure) = &self.failure {
            println!("tests failed: {failure}");
        }
        println!("{}", self.tally);
        std::io::stdout().flush().context("cannot write to standard output")?;
        Ok(if self.passed() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// Sets up, builds, checks the portable crates and runs the tests. An error means that the tests
/// did not get to run; failing tests are an [`Outcome`].
pub fn run(workspace: &Workspace, args: &[OsString]) -> Result<Outcome> {
    let toolchain = setup::ensure(workspace, Need::Tests)?;
    objects::build_all(workspace, Profile::Debug)?;
    purity::check(workspace, &toolchain)?;

    let skip_log = workspace.target.join(format!("skipped-tests-{}.log", std::process::id()));
    fs::write(&skip_log, "").with_context(|| format!("cannot create the log {}", skip_log.display()))?;
    let required = bpf::required();
    let mut command = workspace.cargo("test");
    if !selects_packages(args) {
        command.args(["--workspace", "--exclude", "paatp-ebpf"]);
    }
    command
        .arg("--no-fail-fast")
        .args(args)
        .env("PAATP_SKIP_LOG", &skip_log)
        .env(PROPTEST_SEED, std::env::var_os(PROPTEST_SEED).unwrap_or_else(|| FIXED_SEED.into()))
        .env("PAATP_BIN", workspace.binary(Profile::Debug, "paatp"))
        .env_remove(bpf::REQUIRE_BPF);
    if required {
        command.env(bpf::REQUIRE_BPF, "1");
    }
    let (mut tally, success) = stream(&mut command)?;
    tally.read_skip_log(
        &fs::read_to_string(&skip_log).with_context(|| format!("cannot read {}", skip_log.display()))?,
    );
    // Only a leftover file if this fails.
    let _ = fs::remove_file(&skip_log);

    let failure = if tally.failed > 0 {
        Some(format!("{} of them, named above", tally.failed))
    } else if !success {
        Some("cargo test failed without a failing test; its messages above say why".into())
    } else if required && tally.skipped.keys().any(|test| !p4::may_skip(test)) {
        Some(format!("tests skipped themselves although BPF is required ({}=1)", bpf::REQUIRE_BPF))
    } else {
        None
    };
    Ok(Outcome { tally, failure })
}

/// Runs the tests of a test program that are ignored otherwise, because they take long.
pub fn soak(workspace: &Workspace, name: &str) -> Result<Outcome> {
    run(workspace, &["--test", name, "--", "--ignored", "--nocapture"].map(OsString::from))
}

/// Whether arguments for `cargo test` say which packages they mean.
fn selects_packages(args: &[OsString]) -> bool {
    args.iter()
        .take_while(|arg| *arg != "--")
        .any(|arg| arg.to_str().is_some_and(|arg| arg.starts_with("-p") || arg.starts_with("--package")))
}

/// Runs the tests, passes their output on line by line and counts. Says whether cargo succeeded.
fn stream(command: &mut Command) -> Result<(Tally, bool)> {
    let shown = process::show(command);
    let mut child =
        command.stdout(Stdio::piped()).spawn().with_context(|| format!("cannot start `{shown}`"))?;
    let Some(pipe) = child.stdout.take() else { bail!("`{shown}` has no standard output to read") };
    let mut pipe = BufReader::new(pipe);
    let mut tally = Tally::default();
    let mut out = std::io::stdout().lock();
    let mut line = Vec::new();
    while pipe.read_until(b'\n', &mut line).with_context(|| format!("cannot read the output of `{shown}`"))?
        > 0
    {
        out.write_all(&line).and_then(|()| out.flush()).context("cannot write to standard output")?;
        tally.read_line(String::from_utf8_lossy(&line).trim_end());
        line.clear();
    }
    let status = child.wait().with_context(|| format!("cannot wait for `{shown}`"))?;
    Ok((tally, status.success()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knows_a_package_selection() {
        let args = |list: &[&str]| list.iter().map(OsString::from).collect::<Vec<_>>();
        assert!(selects_packages(&args(&["-p", "paatp-common"])));
        assert!(selects_packages(&args(&["--package=paatp-common", "lanes"])));
        assert!(!selects_packages(&args(&["lanes", "--", "-p"])));
    }
}
