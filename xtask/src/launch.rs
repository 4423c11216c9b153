//! `verify`, `run`, `bench` and `fuzz`: builds a program and becomes it.
//!
//! Becoming it (`exec`) instead of waiting for it leaves nobody between the terminal and the
//! program: Ctrl-C, signals and the exit status are the program's own, and it cleans up in peace.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};

use crate::objects;
use crate::probe;
use crate::process;
use crate::workspace::{Profile, Workspace, find_program};

/// Builds a program of `paatp-tests` and `paatp` itself, optimised, and becomes the former.
pub fn replace(workspace: &Workspace, program: &str, args: &[OsString]) -> Result<ExitCode> {
    become_it(build(workspace, Profile::Release, program)?.args(args))
}

/// Builds a program of `paatp-tests` and `paatp` itself; gives the command that starts it in the caller's folder.
pub fn build(workspace: &Workspace, profile: Profile, program: &str) -> Result<Command> {
    objects::ebpf(workspace)?;
    objects::host(workspace, profile, &["paatp", program])?;
    let mut command = Command::new(workspace.binary(profile, program));
    command.env("PAATP_BIN", workspace.binary(profile, "paatp")).env("PAATP_EBPF_DIR", workspace.ebpf_dir());
    Ok(command)
}

/// Becomes `cargo fuzz run` on one target.
pub fn fuzz(workspace: &Workspace, target: &str, args: &[OsString]) -> Result<ExitCode> {
    if !workspace.root.join("fuzz/Cargo.toml").is_file() {
        bail!("there is no fuzz/Cargo.toml in {}: nothing to fuzz yet", workspace.root.display());
    }
    if find_program("cargo-fuzz").is_none() {
        bail!("cargo-fuzz is missing; `cargo install cargo-fuzz` gets it");
    }
    let mut command = probe::nightly_command("cargo");
    workspace.dress(&mut command);
    become_it(command.args(["fuzz", "run", target]).args(args).stdin(Stdio::inherit()))
}

/// Replaces this process; returns only if that fails.
fn become_it(command: &mut Command) -> Result<ExitCode> {
    let shown = process::show(command);
    Err(command.exec()).with_context(|| format!("cannot start `{shown}`; is it built and executable?"))
}
