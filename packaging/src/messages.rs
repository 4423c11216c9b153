//! The messages of P4Runtime in Rust (`paatp-user/src/switch/messages`), made from their descriptions in
//! `paatp-user/proto` without protoc, so that a normal build needs neither that nor a build script.

use std::path::Path;

use anyhow::{Context, Result};

/// Where the descriptions are, from the root of the repository.
const DESCRIPTIONS: &str = "paatp-user/proto";
/// Where the code goes.
const CODE: &str = "paatp-user/src/switch/messages";
/// The description that brings all others.
const SERVICE: &str = "p4/v1/p4runtime.proto";
/// Said at the top of each file.
const ORIGIN: &str = "// Made from paatp-user/proto by `cargo xtask codegen`.\n";

/// All files, from the root of the repository, with their text.
///
/// # Errors
/// If a description cannot be read, or the code cannot be made of it.
pub fn files(root: &Path) -> Result<Vec<(String, String)>> {
    let descriptions = root.join(DESCRIPTIONS);
    let set = protox::compile([SERVICE], [&descriptions])
        .with_context(|| format!("cannot read the messages of {}", descriptions.display()))?;
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    tonic_prost_build::configure()
        .out_dir(folder.path())
        .build_transport(false)
        // Comments are markdown of another kind; they stand in the descriptions.
        .disable_comments(["."])
        .compile_fds(set)
        .context("cannot make code of the messages")?;
    let mut made = Vec::new();
    for entry in std::fs::read_dir(folder.path()).context("cannot list what was made")? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {name}"))?;
        made.push((format!("{CODE}/{name}"), ORIGIN.to_owned() + &text));
    }
    made.sort();
    Ok(made)
}
