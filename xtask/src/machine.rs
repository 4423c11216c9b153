//! What a machine has, and what it still needs: decisions only, no input or output.
//!
//! There are two routes to an eBPF object. A rustup nightly with the `rust-src` component compiles
//! `core` itself. Debian's own compiler comes with a compiled `core` for the BPF target. Both need a
//! bpf-linker that understands the compiler's LLVM bitcode.

use std::fmt;
use std::path::PathBuf;

/// The oldest compiler that takes the workspace's `rust-version`.
pub const OLDEST_RUST: (u32, u32) = (1, 95);
/// The bpf-linker that is built where none is found.
pub const LINKER_VERSION: &str = "0.13.0";
/// The LLVM majors that this bpf-linker has a feature for.
pub const LINKER_LLVM: std::ops::RangeInclusive<u32> = 21..=23;
/// Programs that tests start, each with the Debian package that has it.
pub const TEST_PROGRAMS: [(&str, &str); 7] = [
    ("ip", "iproute2"),
    ("setpriv", "util-linux"),
    ("setcap", "libcap2-bin"),
    ("promtool", "prometheus"),
    ("systemd-analyze", "systemd"),
    ("chromium-headless-shell", "chromium-headless-shell"),
    ("tshark", "tshark"),
];

/// A way to compile for the BPF target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// A rustup nightly that builds `core` from source.
    Nightly,
    /// `/usr/bin/rustc` with a ready `core` (Debian's `rustc-web`).
    System,
}

impl fmt::Display for Route {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Nightly => "nightly (rustup nightly with rust-src, -Z build-std)",
            Self::System => "system (/usr/bin/rustc with the distribution's core for BPF)",
        })
    }
}

/// A compiler and what belongs to it.
#[derive(Debug, Clone, Default)]
pub struct Compiler {
    /// Major and minor version.
    pub version: (u32, u32),
    /// Major version of its LLVM.
    pub llvm_major: u32,
    /// It has a `core` for BPF: compiled, or as source in the nightly's case.
    pub core: bool,
    /// A bpf-linker that runs and fits.
    pub linker: Option<PathBuf>,
    /// The development files of its LLVM major are installed (needed to build a bpf-linker).
    pub llvm_dev: bool,
}

impl Compiler {
    /// It can compile the workspace for BPF, a linker permitting.
    fn usable(&self) -> bool {
        self.version >= OLDEST_RUST && self.core
    }
}

/// What was found on the machine.
#[derive(Debug, Clone, Default)]
pub struct Machine {
    /// The rustup tool chain named nightly.
    pub nightly: Option<Compiler>,
    /// `/usr/bin/rustc`.
    pub system: Option<Compiler>,
    /// A Debian with apt.
    pub debian: bool,
    /// We are root.
    pub root: bool,
    /// Those of [`TEST_PROGRAMS`] that are not installed, as their Debian packages.
    pub missing_test_packages: Vec<&'static str>,
}

/// What a missing piece is needed for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Need {
    /// Building the eBPF objects.
    Build,
    /// Running the tests.
    Tests,
}

/// Something we can do about a missing piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Install these Debian packages.
    Install(Vec<String>),
    /// Build bpf-linker for this LLVM major.
    BuildLinker(u32),
}

/// Something only the user can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// What is missing.
    pub what: String,
    /// The command that gets it.
    pub remedy: String,
    /// What needs it.
    pub need: Need,
}

/// A route, and what lies between the machine and it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The chosen route.
    pub route: Route,
    /// The linker, once it exists.
    pub linker: Option<PathBuf>,
    /// LLVM major of the route's compiler, once it exists.
    pub llvm_major: Option<u32>,
    /// What to do now. Probe and plan again afterwards: a new compiler brings new needs.
    pub steps: Vec<Step>,
    /// What cannot be done from here.
    pub missing: Vec<Missing>,
}

/// Decides what to do on `machine`; `forced` overrides the choice of the route.
pub fn plan(machine: &Machine, forced: Option<Route>) -> Plan {
    let route = forced.unwrap_or_else(|| choose(machine));
    let compiler = match route {
        Route::Nightly => machine.nightly.as_ref(),
        Route::System => machine.system.as_ref(),
    };
    let usable = compiler.filter(|compiler| compiler.usable());
    let mut plan = Plan {
        route,
        linker: usable.and_then(|compiler| compiler.linker.clone()),
        llvm_major: usable.map(|compiler| compiler.llvm_major),
        steps: Vec::new(),
        missing: Vec::new(),
    };
    match (usable, route) {
        (None, Route::System) => {
            plan.packages(
                machine,
                Need::Build,
                ["rustc-web", "libstd-rust-web-dev-bpf"].map(String::from).to_vec(),
            );
        }
        (None, Route::Nightly) => plan.missing.push(missing_nightly(compiler)),
        (Some(compiler), _) if plan.linker.is_none() => plan.linker_for(machine, compiler),
        (Some(_), _) => {}
    }
    if !machine.missing_test_packages.is_empty() {
        let packages = machine.missing_test_packages.iter().map(|package| (*package).to_owned()).collect();
        plan.packages(machine, Need::Tests, packages);
    }
    plan
}

/// A complete nightly comes first; then the system's compiler if it is there or can be installed.
/// The nightly is also what is asked for on a machine that has neither.
fn choose(machine: &Machine) -> Route {
    let nightly =
        machine.nightly.as_ref().is_some_and(|nightly| nightly.usable() && nightly.linker.is_some());
    let system = machine.debian || machine.system.as_ref().is_some_and(Compiler::usable);
    if nightly || !system { Route::Nightly } else { Route::System }
}

/// What a nightly lacks before a linker matters.
fn missing_nightly(nightly: Option<&Compiler>) -> Missing {
    let (what, remedy) = match nightly {
        Some(nightly) if nightly.version < OLDEST_RUST => {
            ("a recent enough rustup nightly", "rustup update nightly")
        }
        Some(_) => {
            ("the rust-src component of the nightly", "rustup component add rust-src --toolchain nightly")
        }
        None => {
            ("a rustup nightly", "rustup toolchain install nightly --profile minimal --component rust-src")
        }
    };
    Missing { what: what.into(), remedy: remedy.into(), need: Need::Build }
}

impl Plan {
    /// Plans the installation of Debian packages, by us or by the user.
    fn packages(&mut self, machine: &Machine, need: Need, packages: Vec<String>) {
        if machine.debian && machine.root {
            match self.steps.iter_mut().find_map(|step| match step {
                Step::Install(planned) => Some(planned),
                Step::BuildLinker(_) => None,
            }) {
                Some(planned) => planned.extend(packages),
                None => self.steps.insert(0, Step::Install(packages)),
            }
        } else {
            let list = packages.join(" ");
            let remedy = if machine.debian {
                format!("sudo apt-get install --no-install-recommends {list}")
            } else {
                format!("install what Debian calls {list} with this system's package manager")
            };
            self.missing.push(Missing { what: list, remedy, need });
        }
    }

    /// Plans how a usable compiler gets its linker.
    fn linker_for(&mut self, machine: &Machine, compiler: &Compiler) {
        let major = compiler.llvm_major;
        if !LINKER_LLVM.contains(&major) {
            self.missing.push(Missing {
                what: format!(
                    "a bpf-linker for LLVM {major} (version {LINKER_VERSION} knows {LINKER_LLVM:?})"
                ),
                remedy: "raise LINKER_VERSION and LINKER_LLVM in xtask/src/machine.rs".into(),
                need: Need::Build,
            });
            return;
        }
        if !compiler.llvm_dev {
            if self.route == Route::Nightly && !machine.debian {
                self.missing.push(Missing {
                    what: "bpf-linker".into(),
                    remedy: "cargo install cargo-binstall && cargo binstall bpf-linker".into(),
                    need: Need::Build,
                });
                return;
            }
            let packages = vec![format!("llvm-{major}-dev"), format!("libpolly-{major}-dev")];
            self.packages(machine, Need::Build, packages);
        }
        if self.missing.is_empty() {
            self.steps.push(Step::BuildLinker(major));
        }
    }
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
