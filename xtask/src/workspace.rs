//! Where things are, and how cargo is started.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

/// Cargo's profile for programs of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// `target/debug`.
    Debug,
    /// `target/release`.
    Release,
}

impl Profile {
    /// The folder below the target directory.
    pub fn folder(self) -> &'static str {
        match self {
            Self::Debug => "debug",
            Self::Release => "release",
        }
    }
}

/// This checkout and its target directory.
#[derive(Debug)]
pub struct Workspace {
    /// The folder with the workspace's `Cargo.toml`.
    pub root: PathBuf,
    /// Cargo's target directory, absolute.
    pub target: PathBuf,
    /// The cargo that started us, or the one on `PATH`.
    cargo: OsString,
}

impl Workspace {
    /// Finds the checkout from the environment that `cargo run` sets, and the target directory from
    /// `CARGO_TARGET_DIR` if that is set.
    pub fn locate() -> Result<Self> {
        let manifest = env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
        let root = manifest
            .parent()
            .filter(|root| root.join("Cargo.toml").is_file())
            .with_context(|| {
                format!("{} is not inside the workspace: start this as `cargo xtask`", manifest.display())
            })?
            .to_owned();
        let target = ["CARGO_TARGET_DIR", "CARGO_BUILD_TARGET_DIR"]
            .into_iter()
            .find_map(env::var_os)
            .filter(|dir| !dir.is_empty())
            .map_or_else(|| root.join("target"), PathBuf::from);
        let target = std::path::absolute(&target)
            .with_context(|| format!("cannot make the target directory {} absolute", target.display()))?;
        Ok(Self { root, target, cargo: env::var_os("CARGO").unwrap_or_else(|| "cargo".into()) })
    }

    /// Where the eBPF build and its finished objects live: a target directory of its own, so that
    /// it does not wait for the lock of the host's.
    pub fn ebpf_dir(&self) -> PathBuf {
        self.target.join("ebpf")
    }

    /// Where the bpf-linker for one LLVM major lives.
    pub fn linker_root(&self, llvm_major: u32) -> PathBuf {
        self.target.join("tools").join(format!("llvm-{llvm_major}"))
    }

    /// The path of a built program of the host.
    pub fn binary(&self, profile: Profile, name: &str) -> PathBuf {
        self.target.join(profile.folder()).join(name)
    }

    /// A cargo command at the workspace's root, without standard input.
    pub fn cargo(&self, subcommand: &str) -> Command {
        let mut command = Command::new(&self.cargo);
        command.arg(subcommand);
        self.dress(&mut command);
        command
    }

    /// Gives a command the working directory and the environment of a cargo child of ours.
    pub fn dress(&self, command: &mut Command) {
        // `cargo run` describes the package that it runs, us. Build scripts that look at these (ring's) would run again
        // after every change between `cargo xtask` and cargo alone, and all that needs TLS be compiled again.
        for (name, _) in env::vars_os() {
            if name.to_str().is_some_and(|name| OF_PACKAGES.iter().any(|start| name.starts_with(start))) {
                command.env_remove(name);
            }
        }
        command.current_dir(&self.root).env("CARGO_TARGET_DIR", &self.target).stdin(Stdio::null());
        // Not where it says the same as nothing: `cargo build` after `cargo xtask build` has nothing to do then.
        if self.target == self.root.join("target") {
            command.env_remove("PAATP_EBPF_DIR");
        } else {
            command.env("PAATP_EBPF_DIR", self.ebpf_dir());
        }
    }
}

/// What cargo tells a program that it runs of the program's package.
const OF_PACKAGES: [&str; 3] = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_NAME"];

/// Finds a program on `PATH`, or where system administration programs are (an ordinary user's
/// `PATH` leaves those out).
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(|dir| Path::new(dir).to_owned()))
        .map(|dir| dir.join(name))
        .find(|candidate| candidate.is_file())
}
