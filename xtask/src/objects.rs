//! `cargo xtask build`: the eBPF objects, then the program that embeds them.

use std::env::consts::ARCH;
use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::machine::{Need, Route};
use crate::probe;
use crate::process;
use crate::setup::{self, Toolchain};
use crate::workspace::{Profile, Workspace};

/// The target of the eBPF crate.
pub const TARGET: &str = "bpfel-unknown-none";
/// The binaries of the eBPF crate: the aggregator, the programs that tests put on the path, what a worker loads.
const OBJECTS: [&str; 3] = ["paatp", "lab", "worker"];
/// The LLVM that learnt to load a misaligned word with one instruction.
const MISALIGNED_SINCE: u32 = 22;

/// Builds everything that `paatp` needs, and `paatp`.
pub fn build_all(workspace: &Workspace, profile: Profile) -> Result<()> {
    ebpf(workspace)?;
    host(workspace, profile, &["paatp"])
}

/// Gets the machine ready and builds the eBPF objects.
pub fn ebpf(workspace: &Workspace) -> Result<()> {
    let toolchain = setup::ensure(workspace, Need::Build)?;
    process::run(
        toolchain.cargo(workspace, "build", "core").args(["--release", "-p", "paatp-ebpf", "--bins"]),
        "If the compiler is at fault, `cargo xtask setup --check` shows which one was taken, and \
         PAATP_EBPF_ROUTE=system or =nightly demands the other.",
    )?;
    let built = workspace.ebpf_dir().join(TARGET).join("release");
    for name in OBJECTS {
        let object = workspace.ebpf_dir().join(format!("{name}.bpf.o"));
        if copy_if_changed(&built.join(name), &object)? {
            println!("built {}", object.display());
        }
    }
    Ok(())
}

/// What debug builds choose besides their programs: all packages, and with a test the features of dev-dependencies.
/// `cargo test --workspace` chooses the same, so that nothing is compiled twice.
const LIKE_TESTS: [&str; 5] = ["--workspace", "--exclude", "paatp-ebpf", "--test", "manifests"];
/// Packages with programs, for optimised builds.
const PACKAGES: [(&str, &[&str]); 2] = [("paatp-user", &["paatp"]), ("paatp-packaging", &["packaging"])];

/// Builds programs of the host, of `paatp-tests` unless told otherwise in [`PACKAGES`], with the eBPF objects that are
/// there. All in one build, so that they share their dependencies.
pub fn host(workspace: &Workspace, profile: Profile, programs: &[&str]) -> Result<()> {
    let mut command = workspace.cargo("build");
    match profile {
        Profile::Debug => command.args(LIKE_TESTS),
        Profile::Release => command.arg("--release"),
    };
    for program in programs {
        if profile == Profile::Release {
            let package = PACKAGES.iter().find(|(_, programs)| programs.contains(program));
            command.args(["-p", package.map_or("paatp-tests", |(package, _)| package)]);
        }
        command.args(["--bin", program]);
    }
    process::run(&mut command, "The compiler's messages above say where.")
}

impl Toolchain {
    /// A cargo command that compiles for the BPF target, in a target directory of its own.
    /// `build_std` names the crates that a nightly compiles first.
    pub fn cargo(&self, workspace: &Workspace, subcommand: &str, build_std: &str) -> Command {
        let mut command = match self.route {
            Route::System => {
                let mut command = workspace.cargo(subcommand);
                command.env("RUSTC", probe::SYSTEM_RUSTC).env("RUSTC_BOOTSTRAP", "1");
                command
            }
            Route::Nightly => {
                let mut command = probe::nightly_command("cargo");
                workspace.dress(&mut command);
                command.arg(subcommand).arg(format!("-Zbuild-std={build_std}"));
                command
            }
        };
        command
            .args(["--target", TARGET])
            .env("CARGO_TARGET_DIR", workspace.ebpf_dir())
            .env("CARGO_TARGET_BPFEL_UNKNOWN_NONE_LINKER", &self.linker)
            .env("CARGO_ENCODED_RUSTFLAGS", rustflags(self.llvm_major, ARCH).join("\x1f"))
            // In many small units LLVM inlines less, and the verifier gives up on what comes out.
            .env("CARGO_INCREMENTAL", "0")
            .env_remove("RUSTC_WORKSPACE_WRAPPER");
        command
    }
}

/// The compiler's flags for the BPF target. rustc passes the CPU on to bpf-linker by itself.
fn rustflags(llvm_major: u32, host_arch: &str) -> Vec<String> {
    let mut flags = vec![
        "--cfg".into(),
        format!("bpf_target_arch=\"{host_arch}\""),
        "-Cdebuginfo=2".into(),
        "-Clink-arg=--btf".into(),
        // Not v3, whose 32-bit registers LLVM spills over pointers: refused without CAP_PERFMON (docs/ebpf.md).
        "-Ctarget-cpu=v2".into(),
    ];
    if llvm_major >= MISALIGNED_SINCE {
        // To the linker, which generates the code; as -Ctarget-feature rustc warns about it each time.
        flags.push("-Clink-arg=--cpu-features=+allows-misaligned-mem-access".into());
    }
    flags
}

/// Copies a file unless the copy is already the same, so that nothing that depends on the copy's
/// time is built again. The copy appears at once or not at all. Says whether it was written.
fn copy_if_changed(from: &Path, to: &Path) -> Result<bool> {
    let new = fs::read(from).with_context(|| {
        let name = from.file_name().unwrap_or(OsStr::new("?")).display();
        format!("cannot read {}: does paatp-ebpf still have a binary named {name}?", from.display())
    })?;
    match fs::read(to) {
        Ok(old) if old == new => return Ok(false),
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| format!("cannot compare with {}", to.display())),
    }
    let fresh = to.with_extension("new");
    fs::write(&fresh, new).with_context(|| format!("cannot write {}", fresh.display()))?;
    fs::rename(&fresh, to)
        .with_context(|| format!("cannot rename {} to {}", fresh.display(), to.display()))?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a panic is the failure report here")]

    use super::*;

    #[test]
    fn an_unchanged_object_keeps_its_time() {
        let dir = std::env::temp_dir().join(format!("xtask-objects-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let (from, to) = (dir.join("paatp"), dir.join("paatp.bpf.o"));
        fs::write(&from, "one").unwrap();
        assert!(copy_if_changed(&from, &to).unwrap());
        let written = fs::metadata(&to).unwrap().modified().unwrap();
        assert!(!copy_if_changed(&from, &to).unwrap());
        assert_eq!(fs::metadata(&to).unwrap().modified().unwrap(), written);
        fs::write(&from, "two").unwrap();
        assert!(copy_if_changed(&from, &to).unwrap());
        assert_eq!(fs::read_to_string(&to).unwrap(), "two");
        let error = copy_if_changed(&dir.join("lab"), &to).unwrap_err();
        assert!(error.to_string().contains("a binary named lab"));
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn the_flags_follow_llvm_and_the_host() {
        assert!(rustflags(22, "x86_64").iter().any(|flag| flag.contains("misaligned")));
        assert!(!rustflags(21, "x86_64").iter().any(|flag| flag.contains("misaligned")));
        assert!(rustflags(22, "aarch64").contains(&"bpf_target_arch=\"aarch64\"".to_owned()));
    }
}
