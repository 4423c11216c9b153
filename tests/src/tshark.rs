//! What Wireshark makes of a capture, with the dissector of `packaging/wireshark`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// A packet's fields, each with all of its values and commas between them.
pub type Fields = BTreeMap<String, String>;

/// What shows a flaw of the dissector: a dissection that was given up, an error of Lua.
const FLAWS: [&str; 3] = ["_ws.malformed", "_ws.lua.error", "_ws.lua.text"];

/// The dissector.
#[must_use]
pub fn dissector() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/wireshark/paatp.lua")
}

/// Reads a capture file twice, so that requests know their answers.
///
/// # Errors
/// Where tshark fails, or the dissector does.
pub fn decode(file: &Path, fields: &[&str], options: &[&str]) -> Result<Vec<Fields>> {
    // Without the user's own settings and plugins.
    let home = tempfile::tempdir()?;
    let mut command = Command::new("tshark");
    command.env("HOME", home.path()).args(["-2", "-n", "-T", "fields", "-E", "separator=/t"]);
    command.args(options).arg("-X").arg(format!("lua_script:{}", dissector().display())).arg("-r").arg(file);
    let all: Vec<&str> = fields.iter().chain(&FLAWS).copied().collect();
    for field in &all {
        command.args(["-e", field]);
    }
    let output = command.output().context("cannot start tshark")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() && !errors.contains("Lua"), "tshark: {errors}");
    let text = String::from_utf8(output.stdout).context("tshark wrote no text")?;
    let lines: Vec<Fields> = text
        .lines()
        .map(|line| {
            all.iter().map(|name| (*name).to_owned()).zip(line.split('\t').map(str::to_owned)).collect()
        })
        .collect();
    for line in &lines {
        ensure!(FLAWS.iter().all(|name| line[*name].is_empty()), "the dissector failed: {line:?}");
    }
    Ok(lines)
}

/// Whether a field is true: versions differ in how they write it.
#[must_use]
pub fn is_true(fields: &Fields, name: &str) -> bool {
    matches!(fields.get(name).map(String::as_str), Some("1" | "True"))
}
