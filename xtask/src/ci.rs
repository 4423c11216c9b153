//! `cargo xtask ci`: what CI runs, in CI's order, each step named and timed.

use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::launch;
use crate::machine::Need;
use crate::objects;
use crate::process;
use crate::setup;
use crate::testing;
use crate::workspace::{Profile, Workspace};

/// A step's name and what it does.
type Step = (&'static str, fn(&Workspace) -> Result<()>);

/// Everything before the tests.
const STEPS: [Step; 6] = [
    ("setup", |workspace| setup::ensure(workspace, Need::Tests).map(drop)),
    ("format", |workspace| {
        process::run(workspace.cargo("fmt").args(["--all", "--check"]), "`cargo fmt --all` puts it right.")
    }),
    ("build", |workspace| objects::build_all(workspace, Profile::Debug)),
    ("clippy", clippy),
    ("rustdoc", |workspace| {
        let mut command = workspace.cargo("doc");
        // The eBPF crate's binary has the same name as the program, and so would their pages.
        command
            .args(["--no-deps", "--workspace", "--exclude", "paatp-ebpf"])
            .env("RUSTDOCFLAGS", "-Dwarnings");
        process::run(&mut command, "Put right what it names above.")
    }),
    ("verify", |workspace| {
        // What is verified are the objects; what loads them need not be fast.
        let mut command = launch::build(workspace, Profile::Debug, "verify")?;
        process::run(command.stdin(Stdio::null()), "`cargo xtask verify` repeats this step alone.")
    }),
];

/// Lints all crates. The eBPF crate, whose binaries have neither std nor unwinding, is linted as a
/// program of the host that aborts on panic: what lints there is the same code.
fn clippy(workspace: &Workspace) -> Result<()> {
    let deny = ["--", "-D", "warnings"];
    let advice = "Put right what it names above.";
    let mut host = workspace.cargo("clippy");
    host.args(["--workspace", "--exclude", "paatp-ebpf", "--all-targets"]).args(deny);
    process::run(&mut host, advice)?;
    let mut ebpf = workspace.cargo("clippy");
    ebpf.args(["-p", "paatp-ebpf", "--lib", "--bins"]).args(deny).env("CARGO_PROFILE_DEV_PANIC", "abort");
    process::run(&mut ebpf, advice)
}

/// Runs all steps up to the first that fails; the tests' sum is the last line.
pub fn run(workspace: &Workspace) -> Result<ExitCode> {
    let mut times: Vec<(&str, Duration)> = Vec::new();
    for (name, step) in STEPS {
        timed(name, &mut times, || step(workspace))?;
    }
    let outcome = timed("test", &mut times, || testing::run(workspace, &[]))?;
    for (name, time) in &times {
        println!("{name:>8} {:7.1} s", time.as_secs_f64());
    }
    outcome.conclude()
}

/// Runs one step between two lines that name it.
fn timed<T>(
    name: &'static str,
    times: &mut Vec<(&'static str, Duration)>,
    step: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let number = times.len() + 1;
    let of = STEPS.len() + 1;
    println!("==> [{number}/{of}] {name}");
    let start = Instant::now();
    let result = step().with_context(|| format!("step {number} of {of}, {name}, failed"));
    let time = start.elapsed();
    println!(
        "<== [{number}/{of}] {name}: {} in {:.1} s",
        if result.is_ok() { "done" } else { "FAILED" },
        time.as_secs_f64()
    );
    times.push((name, time));
    result
}
