//! The decisions of [`plan`] on machines of many kinds.

use super::*;

/// Debian 12 with root, rustup and nothing else.
fn bare() -> Machine {
    Machine { debian: true, root: true, ..Machine::default() }
}

/// A compiler that lacks only its linker.
fn compiler(llvm_major: u32) -> Compiler {
    Compiler { version: (1, 96), llvm_major, core: true, linker: None, llvm_dev: true }
}

/// A compiler that lacks nothing.
fn complete(llvm_major: u32) -> Compiler {
    Compiler { linker: Some("/l/bpf-linker".into()), ..compiler(llvm_major) }
}

/// The step that installs these packages.
fn install(packages: &[&str]) -> Step {
    Step::Install(packages.iter().map(|package| (*package).to_owned()).collect())
}

#[test]
fn a_bare_debian_is_brought_up_in_rounds() {
    let mut machine = Machine { missing_test_packages: vec!["iproute2"], ..bare() };
    let first = plan(&machine, None);
    assert_eq!(first.route, Route::System);
    assert_eq!(first.steps, [install(&["rustc-web", "libstd-rust-web-dev-bpf", "iproute2"])]);

    machine.missing_test_packages.clear();
    machine.system = Some(Compiler { llvm_dev: false, ..compiler(22) });
    assert_eq!(
        plan(&machine, None).steps,
        [install(&["llvm-22-dev", "libpolly-22-dev"]), Step::BuildLinker(22)]
    );

    machine.system = Some(complete(22));
    let last = plan(&machine, None);
    assert!(last.steps.is_empty() && last.missing.is_empty());
    assert_eq!((last.linker, last.llvm_major), (Some("/l/bpf-linker".into()), Some(22)));
}

#[test]
fn an_old_or_incomplete_system_compiler_is_replaced() {
    for unusable in [Compiler { version: (1, 85), ..complete(19) }, Compiler { core: false, ..complete(22) }]
    {
        let machine = Machine { system: Some(unusable), ..bare() };
        let plan = plan(&machine, None);
        assert_eq!(plan.steps, [install(&["rustc-web", "libstd-rust-web-dev-bpf"])]);
        assert_eq!(plan.linker, None);
    }
}

#[test]
fn a_moved_on_system_compiler_gets_a_new_linker() {
    let machine = Machine { system: Some(compiler(23)), ..bare() };
    assert_eq!(plan(&machine, None).steps, [Step::BuildLinker(23)]);
    let machine = Machine { system: Some(compiler(99)), ..bare() };
    let plan = plan(&machine, None);
    assert!(plan.steps.is_empty());
    assert!(plan.missing[0].what.contains("LLVM 99"));
}

#[test]
fn a_complete_nightly_wins_and_an_incomplete_one_does_not() {
    let machine = Machine { nightly: Some(complete(22)), system: Some(complete(22)), ..bare() };
    assert_eq!(plan(&machine, None).route, Route::Nightly);
    assert_eq!(plan(&machine, Some(Route::System)).route, Route::System);
    let machine = Machine { nightly: Some(Compiler { core: false, ..complete(22) }), ..bare() };
    assert_eq!(plan(&machine, None).route, Route::System);
}

#[test]
fn without_root_the_packages_are_named() {
    let machine = Machine { root: false, missing_test_packages: vec!["iproute2"], ..bare() };
    let plan = plan(&machine, None);
    assert!(plan.steps.is_empty());
    assert_eq!(plan.missing.len(), 2);
    assert!(plan.missing[0].remedy.starts_with("sudo apt-get install"));
    assert_eq!(
        plan.missing.iter().map(|missing| missing.need).collect::<Vec<_>>(),
        [Need::Build, Need::Tests]
    );
}

#[test]
fn without_root_a_linker_can_still_be_built() {
    let machine = Machine { root: false, system: Some(compiler(22)), ..bare() };
    assert_eq!(plan(&machine, None).steps, [Step::BuildLinker(22)]);
    let machine =
        Machine { root: false, system: Some(Compiler { llvm_dev: false, ..compiler(22) }), ..bare() };
    let plan = plan(&machine, None);
    assert!(plan.steps.is_empty());
    assert!(plan.missing[0].what.contains("llvm-22-dev"));
}

#[test]
fn elsewhere_the_nightly_is_asked_for_piece_by_piece() {
    let mut machine = Machine::default();
    let remedy = |machine: &Machine| plan(machine, None).missing[0].remedy.clone();
    assert!(remedy(&machine).starts_with("rustup toolchain install nightly"));
    machine.nightly = Some(Compiler { version: (1, 80), ..compiler(22) });
    assert_eq!(remedy(&machine), "rustup update nightly");
    machine.nightly = Some(Compiler { core: false, ..compiler(22) });
    assert!(remedy(&machine).contains("rust-src"));
    machine.nightly = Some(Compiler { llvm_dev: false, ..compiler(22) });
    assert!(remedy(&machine).contains("binstall bpf-linker"));
    machine.nightly = Some(complete(22));
    assert!(plan(&machine, None).missing.is_empty());
}
