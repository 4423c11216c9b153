//! Holds the two portable crates to their promise: no standard library (so no clock, socket, thread, `HashMap`), few
//! dependencies, nothing asynchronous.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::process;
use crate::setup::Toolchain;
use crate::workspace::Workspace;

/// The crates that must compile where there is no operating system.
const PORTABLE: [&str; 2] = ["paatp-common", "paatp-transport"];
/// All that `paatp-transport` may link; `network-types` (headers, for `paatp-common`) brings two.
const ALLOWED: [&str; 12] = [
    "paatp-transport",
    "paatp-common",
    "bytemuck",
    "cfg-if",
    "cpufeatures",
    "half",
    "libm",
    "network-types",
    "num-traits",
    "thiserror",
    "wincode",
    "zerocopy",
];
/// Words that compile without std, and must not occur all the same.
const FORBIDDEN: [&str; 4] = ["async", "await", "Future", "RandomState"];
/// How a portable crate's `lib.rs` declares itself.
const DECLARATIONS: [&str; 2] = ["#![no_std]", "#![cfg_attr(not(test), no_std)]"];

/// Checks declarations and dependencies, and type-checks both crates for the BPF target, which has
/// `core` and `alloc` but no `std` and no atomics (so no `Arc` either).
pub fn check(workspace: &Workspace, toolchain: &Toolchain) -> Result<()> {
    for package in PORTABLE {
        let path = workspace.root.join(package).join("src/lib.rs");
        let source = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        if !declares_no_std(&source) {
            bail!("{} does not say {}: it must not need std", path.display(), DECLARATIONS.join(" or "));
        }
        check_words(&workspace.root.join(package).join("src"))?;
    }
    let mut tree = workspace.cargo("tree");
    tree.args(["-p", "paatp-transport", "-e", "normal,no-proc-macro", "--prefix", "none", "--format", "{p}"]);
    let tree = process::must_output(&mut tree, "Its messages above say why.")?;
    let strangers = strangers(&tree);
    if !strangers.is_empty() {
        bail!(
            "paatp-transport depends on {}: it may link only {}. Drop the dependency, or extend ALLOWED in \
             xtask/src/purity.rs if it is worth it",
            strangers.join(", "),
            ALLOWED.join(", ")
        );
    }
    let mut command = toolchain.cargo(workspace, "check", "core,alloc");
    for package in PORTABLE {
        command.args(["-p", package]);
    }
    process::run(
        &mut command,
        "These crates must compile without std and atomics: use core and alloc only, and no Arc.",
    )
}

/// Refuses forbidden words in all sources of a folder.
fn check_words(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry.with_context(|| format!("cannot read {}", folder.display()))?.path();
        if path.is_dir() {
            check_words(&path)?;
            continue;
        }
        let source = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        if let Some((line, word)) = forbidden(&source) {
            bail!(
                "{}:{line} says '{word}': this crate is driven from outside and never waits",
                path.display()
            );
        }
    }
    Ok(())
}

/// The first forbidden word outside of comments, and its line.
fn forbidden(source: &str) -> Option<(usize, &'static str)> {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    source.lines().enumerate().find_map(|(index, line)| {
        let code = line.split("//").next().unwrap_or(line);
        let found = |word: &&str| code.split(|c| !is_part(c)).any(|part| part == *word);
        FORBIDDEN.into_iter().find(found).map(|word| (index + 1, word))
    })
}

/// Whether one of a file's lines is the declaration.
fn declares_no_std(source: &str) -> bool {
    source.lines().any(|line| DECLARATIONS.contains(&line.trim()))
}

/// The packages in the output of `cargo tree` that are not allowed, each once.
fn strangers(tree: &str) -> Vec<&str> {
    let mut names: Vec<_> = tree
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| !ALLOWED.contains(name))
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_declaration() {
        assert!(declares_no_std("//! A crate.\n#![no_std]\n"));
        assert!(declares_no_std("#![cfg_attr(not(test), no_std)]"));
        assert!(!declares_no_std("// #![no_std]\nuse std::fs;\n"));
    }

    #[test]
    fn finds_forbidden_words_in_code_only() {
        assert_eq!(forbidden("fn a() {}\npub async fn b() {}\n"), Some((2, "async")));
        assert_eq!(forbidden("use core::future::Future;"), Some((1, "Future")));
        assert_eq!(forbidden("// async\nfn asynchronous() {} // await\nlet x = asynchronous;"), None);
    }

    #[test]
    fn finds_strangers_once() {
        let tree = "paatp-transport v0.1.0 (path)\ntokio v1.0.0\nhalf v2.7.0\ntokio v1.0.0 (*)\n";
        assert_eq!(strangers(tree), ["tokio"]);
    }
}
