//! Tests that need privileges say so, and nobody overlooks it.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

/// Turns skips into failures where it is set to anything but an empty value or 0.
const REQUIRE_BPF: &str = "PAATP_REQUIRE_BPF";
/// File that skips are written to, one a line.
const SKIP_LOG: &str = "PAATP_SKIP_LOG";

/// Whether the test `name` can run: as root, with a usable `bpf` system call and network namespaces. If not, it says
/// so on standard error and in the file that `PAATP_SKIP_LOG` names.
///
/// # Panics
/// Instead of returning false, where `PAATP_REQUIRE_BPF=1`.
#[must_use]
pub fn require_bpf(name: &str) -> bool {
    let Some(reason) = unavailable() else { return true };
    let required = std::env::var(REQUIRE_BPF).is_ok_and(|value| !matches!(value.as_str(), "" | "0"));
    assert!(!required, "{name} cannot run: {reason}, and {REQUIRE_BPF} forbids to skip it");
    skip(name, &reason);
    false
}

/// Whether a program that the test `name` starts is installed; `cargo xtask setup` installs it. If not, the same as with
/// [`require_bpf`].
///
/// # Panics
/// Instead of returning false, where `PAATP_REQUIRE_BPF=1`.
#[must_use]
pub fn require_program(name: &str, program: &str) -> bool {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    if std::env::split_paths(&paths).any(|folder| folder.join(program).is_file()) {
        return true;
    }
    let required = std::env::var(REQUIRE_BPF).is_ok_and(|value| !matches!(value.as_str(), "" | "0"));
    assert!(!required, "{name} cannot run: `{program}` is not installed; `cargo xtask setup` installs it");
    skip(name, &format!("no `{program}`; `cargo xtask setup` installs it"));
    false
}

/// Tells that a test did not run.
pub fn skip(name: &str, reason: &str) {
    let line = format!("SKIPPED: {name}: {reason}");
    eprintln!("{line}");
    if let Some(path) = std::env::var_os(SKIP_LOG) {
        let written = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
        if let Err(error) = written {
            eprintln!("cannot write to {}: {error}", Path::new(&path).display());
        }
    }
}

/// Why BPF cannot be used, or nothing if it can.
fn unavailable() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("not root".into());
    }
    if let Err(error) = crate::kernel::probe() {
        return Some(format!("the bpf system call refuses a small map: {error}"));
    }
    crate::netns::Namespace::new("probe").err().map(|error| format!("{error:#}"))
}
