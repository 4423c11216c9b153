//! What `setup` and `dist` can do: install Debian packages, build bpf-linker and cargo-deb.

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::Result;

use crate::machine::LINKER_VERSION;
use crate::probe;
use crate::process;
use crate::workspace::Workspace;

/// The package that Debian starts a service of.
const SERVICE: &str = "prometheus";
/// There where systemd runs.
const SYSTEMD: &str = "/run/systemd/system";
/// How long to wait before the one retry of something that went over the network.
const PAUSE: Duration = Duration::from_secs(5);

/// Installs Debian packages. Stale lists are refreshed first; that alone failing is no error,
/// because the lists that are there may do.
pub fn packages(packages: &[String]) -> Result<()> {
    let update = twice(|| process::run(&mut apt_get("update"), "The package lists stay as they are."));
    if let Err(error) = update {
        eprintln!("warning: {error:#}");
    }
    twice(|| {
        process::run(
            apt_get("install").arg("--no-install-recommends").args(packages),
            "Check the network and /etc/apt/sources.list: the packages come from Debian's main and \
             its security suite. Then repeat `cargo xtask setup`.",
        )
    })?;
    if packages.iter().any(|package| package == SERVICE) && Path::new(SYSTEMD).is_dir() {
        // The tests start their own; nobody asked for one on this machine.
        let mut command = Command::new("systemctl");
        command.args(["disable", "--now", SERVICE]);
        process::run(&mut command, "Its service runs now; end it if you do not want it.")?;
    }
    Ok(())
}

/// Builds bpf-linker for an LLVM major into a folder of its own.
pub fn linker(workspace: &Workspace, llvm_major: u32) -> Result<()> {
    let prefix = probe::llvm_prefix(llvm_major);
    twice(|| {
        let mut command = workspace.cargo("install");
        command
            .args(["bpf-linker", "--version", LINKER_VERSION, "--locked", "--force", "--no-default-features"])
            .arg("--features")
            .arg(format!("llvm-{llvm_major}"))
            .arg("--root")
            .arg(workspace.linker_root(llvm_major))
            // Without this one it looks below /usr and does not find libLLVM.
            .env("LLVM_PREFIX", &prefix)
            .env(format!("LLVM_SYS_{llvm_major}1_PREFIX"), &prefix);
        // It is a program of the host, whatever the caller compiles for.
        for variable in
            ["RUSTC", "RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "CARGO_BUILD_TARGET", "CARGO_TARGET_DIR"]
        {
            command.env_remove(variable);
        }
        process::run(
            &mut command,
            "The messages above say why. If a download failed, repeat `cargo xtask setup`; if a library \
             was not found, check that the packages shown by `cargo xtask setup --check` are complete.",
        )
    })
}

/// Builds cargo-deb into a folder of its own.
pub fn cargo_deb(workspace: &Workspace, root: &Path, version: &str) -> Result<()> {
    twice(|| {
        let mut command = workspace.cargo("install");
        command.args(["cargo-deb", "--version", version, "--locked", "--force", "--no-default-features"]);
        command.arg("--root").arg(root).env_remove("CARGO_TARGET_DIR");
        process::run(&mut command, "The messages above say why; if a download failed, repeat this.")
    })
}

/// An apt-get that asks nothing.
fn apt_get(subcommand: &str) -> Command {
    let mut command = Command::new("apt-get");
    command
        .args(["-y", "-q", "-o", "Dpkg::Use-Pty=0", subcommand])
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null());
    command
}

/// Tries again once, after a pause: mirrors and registries have their moments.
fn twice(attempt: impl Fn() -> Result<()>) -> Result<()> {
    attempt().or_else(|error| {
        eprintln!("warning: {error:#}");
        eprintln!("warning: trying once more in {} s", PAUSE.as_secs());
        thread::sleep(PAUSE);
        attempt()
    })
}
