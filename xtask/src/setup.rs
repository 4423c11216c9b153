//! `cargo xtask setup`: looks, decides, acts, until nothing is missing.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};

use crate::install;
use crate::machine::{self, Missing, Need, Plan, Route, Step};
use crate::probe;
use crate::workspace::Workspace;

/// What compiles for the BPF target.
#[derive(Debug)]
pub struct Toolchain {
    /// Which compiler.
    pub route: Route,
    /// The LLVM major of the compiler.
    pub llvm_major: u32,
    /// The bpf-linker to use with it.
    pub linker: PathBuf,
}

/// A new compiler brings a new LLVM, a new LLVM a new linker: more rounds than that are a mistake.
const MOST_ROUNDS: usize = 4;

/// Gets the machine ready, installing what can be installed. Pieces that only a greater need than
/// `need` asks for are warned about if they cannot be had.
pub fn ensure(workspace: &Workspace, need: Need) -> Result<Toolchain> {
    let forced = probe::forced_route()?;
    let mut done: Vec<Step> = Vec::new();
    for _ in 0..MOST_ROUNDS {
        let plan = machine::plan(&probe::machine(workspace), forced);
        let (fatal, bearable): (Vec<_>, Vec<_>) =
            plan.missing.iter().partition(|missing| missing.need <= need);
        if !fatal.is_empty() {
            bail!("this machine is not ready; route: {}\n{}", plan.route, list(&fatal));
        }
        if plan.steps.is_empty() {
            for missing in bearable {
                eprintln!("note: tests will need {}: {}", missing.what, missing.remedy);
            }
            return finish(plan, need);
        }
        for step in plan.steps {
            if done.contains(&step) {
                bail!(
                    "{} went through, yet the same is still missing. \
                     `cargo xtask setup --check` shows what is found; look for a second copy on PATH",
                    describe(&step)
                );
            }
            println!("setup: {}; route: {}", describe(&step), plan.route);
            match &step {
                Step::Install(packages) => install::packages(packages)?,
                Step::BuildLinker(llvm_major) => install::linker(workspace, *llvm_major)?,
            }
            done.push(step);
        }
    }
    bail!(
        "setup is still not finished after {MOST_ROUNDS} rounds; `cargo xtask setup --check` shows what is found"
    )
}

/// Turns a plan without steps into a tool chain and, in `setup` itself, says which it is.
fn finish(plan: Plan, need: Need) -> Result<Toolchain> {
    let (Some(linker), Some(llvm_major)) = (plan.linker, plan.llvm_major) else {
        bail!(
            "neither steps left nor a linker on the route {}; please report this with `setup --check`",
            plan.route
        );
    };
    if need == Need::Tests {
        println!("setup: ready: {}, LLVM {llvm_major}, {}", plan.route, linker.display());
    }
    Ok(Toolchain { route: plan.route, llvm_major, linker })
}

/// `cargo xtask setup --check`: shows what is there and what is missing; fails if anything is.
pub fn report(workspace: &Workspace) -> Result<ExitCode> {
    let machine = probe::machine(workspace);
    let plan = machine::plan(&machine, probe::forced_route()?);
    for (name, compiler) in [("rustup nightly", &machine.nightly), ("system rustc", &machine.system)] {
        match compiler {
            None => println!("{name}: none"),
            Some(compiler) => println!(
                "{name}: {}.{}, LLVM {}; core for BPF: {}; LLVM development files: {}; bpf-linker: {}",
                compiler.version.0,
                compiler.version.1,
                compiler.llvm_major,
                yes(compiler.core),
                yes(compiler.llvm_dev),
                compiler.linker.as_ref().map_or("none".into(), |linker| linker.display().to_string()),
            ),
        }
    }
    println!("route: {}", plan.route);
    for step in &plan.steps {
        println!("to do: {} (`cargo xtask setup` does it)", describe(step));
    }
    if !plan.missing.is_empty() {
        println!("{}", list(&plan.missing.iter().collect::<Vec<_>>()));
    }
    let ready = plan.steps.is_empty() && plan.missing.is_empty();
    println!("{}", if ready { "ready" } else { "not ready" });
    Ok(if ready { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// One line for each missing piece.
fn list(missing: &[&Missing]) -> String {
    let lines: Vec<_> =
        missing.iter().map(|piece| format!("  missing: {}; get it: {}", piece.what, piece.remedy)).collect();
    lines.join("\n")
}

/// A step in words.
fn describe(step: &Step) -> String {
    match step {
        Step::Install(packages) => format!("installing {}", packages.join(" ")),
        Step::BuildLinker(llvm_major) => format!("building bpf-linker for LLVM {llvm_major}"),
    }
}

/// A truth in words.
fn yes(truth: bool) -> &'static str {
    if truth { "yes" } else { "no" }
}
