//! Finds out what a [`Machine`] has.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

use crate::bpf;
use crate::machine::{Compiler, LINKER_VERSION, Machine, Route, TEST_PROGRAMS};
use crate::process::output;
use crate::workspace::{Workspace, find_program};

/// The distribution's compiler.
pub const SYSTEM_RUSTC: &str = "/usr/bin/rustc";
/// Environment variable that forces a route.
const FORCED_ROUTE: &str = "PAATP_EBPF_ROUTE";

/// Looks at the machine. Takes some tens of milliseconds.
pub fn machine(workspace: &Workspace) -> Machine {
    Machine {
        nightly: nightly(workspace),
        system: system(workspace),
        debian: is_debian() && find_program("apt-get").is_some(),
        root: bpf::is_root(),
        missing_test_packages: TEST_PROGRAMS
            .into_iter()
            .filter(|(program, _)| find_program(program).is_none())
            .map(|(_, package)| package)
            .collect(),
    }
}

/// The route that `PAATP_EBPF_ROUTE` demands, if it is set.
pub fn forced_route() -> Result<Option<Route>> {
    match env::var(FORCED_ROUTE).as_deref() {
        Err(_) | Ok("") => Ok(None),
        Ok("nightly") => Ok(Some(Route::Nightly)),
        Ok("system") => Ok(Some(Route::System)),
        Ok(other) => bail!("{FORCED_ROUTE}={other} is not a route: unset it, or say `nightly` or `system`"),
    }
}

/// `rustup run nightly …`, without rustup installing anything by itself.
pub fn nightly_command(program: &str) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", program]).env("RUSTUP_AUTO_INSTALL", "0").env_remove("RUSTC");
    command
}

/// Probes the rustup nightly; a bpf-linker on `PATH` is taken to fit it.
fn nightly(workspace: &Workspace) -> Option<Compiler> {
    let about = output(nightly_command("rustc").arg("-vV"))?;
    let sysroot = output(nightly_command("rustc").args(["--print", "sysroot"]))?;
    let core = Path::new(&sysroot).join("lib/rustlib/src/rust/library/core").is_dir();
    let mut compiler = compiler(workspace, &about, core)?;
    if let Some(linker) = find_program("bpf-linker").filter(|linker| linker_version(linker).is_some()) {
        compiler.linker = Some(linker);
    }
    Some(compiler)
}

/// Probes the distribution's compiler. Only a bpf-linker that we built for its LLVM counts: one on
/// `PATH` usually follows rustup's compilers.
fn system(workspace: &Workspace) -> Option<Compiler> {
    let about = output(Command::new(SYSTEM_RUSTC).arg("-vV"))?;
    let sysroot = output(Command::new(SYSTEM_RUSTC).args(["--print", "sysroot"]))?;
    let libraries = Path::new(&sysroot).join("lib/rustlib").join(crate::objects::TARGET).join("lib");
    let core = fs::read_dir(libraries).is_ok_and(|entries| {
        entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("libcore-"))
    });
    compiler(workspace, &about, core)
}

/// Makes a compiler of what `rustc -vV` says.
fn compiler(workspace: &Workspace, about: &str, core: bool) -> Option<Compiler> {
    let (version, llvm_major) = parse_about(about)?;
    let built = linker_path(workspace, llvm_major);
    Some(Compiler {
        version,
        llvm_major,
        core,
        linker: (linker_version(&built).as_deref() == Some(LINKER_VERSION)).then_some(built),
        llvm_dev: ["lib/libLLVM.so", "lib/libPolly.a", "bin/llvm-config"]
            .into_iter()
            .all(|file| llvm_prefix(llvm_major).join(file).exists()),
    })
}

/// Where the bpf-linker that we build for an LLVM major ends up.
fn linker_path(workspace: &Workspace, llvm_major: u32) -> PathBuf {
    workspace.linker_root(llvm_major).join("bin/bpf-linker")
}

/// Where Debian installs an LLVM major.
pub fn llvm_prefix(llvm_major: u32) -> PathBuf {
    PathBuf::from(format!("/usr/lib/llvm-{llvm_major}"))
}

/// The version of a bpf-linker, if it runs at all: its libLLVM may have gone.
fn linker_version(linker: &Path) -> Option<String> {
    if !linker.is_file() {
        return None;
    }
    output(Command::new(linker).arg("--version"))?.strip_prefix("bpf-linker ").map(str::to_owned)
}

/// Reads version and LLVM major from `rustc -vV`.
fn parse_about(about: &str) -> Option<((u32, u32), u32)> {
    let field = |name: &str| about.lines().find_map(|line| line.strip_prefix(name));
    let mut release = field("release: ")?.split('.');
    let version = (release.next()?.parse().ok()?, release.next()?.parse().ok()?);
    let llvm_major = field("LLVM version: ")?.split('.').next()?.parse().ok()?;
    Some((version, llvm_major))
}

/// Whether this is Debian itself (its derivatives have other compilers).
fn is_debian() -> bool {
    fs::read_to_string("/etc/os-release")
        .is_ok_and(|text| text.lines().any(|line| matches!(line, "ID=debian" | "ID=\"debian\"")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_rustc_says_about_itself() {
        let about = "rustc 1.96.0 (ac68faa20)\nrelease: 1.96.0\nLLVM version: 22.1.8\n";
        assert_eq!(parse_about(about), Some(((1, 96), 22)));
        assert_eq!(parse_about("release: 1.97.0-nightly\nLLVM version: 22.1.4"), Some(((1, 97), 22)));
        assert_eq!(parse_about("rustc 1.96.0"), None);
    }
}
