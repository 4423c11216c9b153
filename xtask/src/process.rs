//! Child processes, and what to say when they fail.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Runs a command with its output going where ours goes; an error names the command and `advice`.
pub fn run(command: &mut Command, advice: &str) -> Result<()> {
    let shown = show(command);
    let status = command.status().with_context(|| format!("cannot start `{shown}`. {advice}"))?;
    if !status.success() {
        bail!("`{shown}` failed ({status}). {advice}");
    }
    Ok(())
}

/// The standard output of a command, if it can be started and succeeds.
pub fn output(command: &mut Command) -> Option<String> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The standard output of a command that must succeed; its messages go where ours go.
pub fn must_output(command: &mut Command, advice: &str) -> Result<String> {
    let shown = show(command);
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start `{shown}`. {advice}"))?;
    if !output.status.success() {
        bail!("`{shown}` failed ({}). {advice}", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The program's name and its arguments, without its folder.
pub fn show(command: &Command) -> String {
    let program = std::path::Path::new(command.get_program());
    let mut shown = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned();
    for argument in command.get_args() {
        shown.push(' ');
        shown.push_str(&argument.to_string_lossy());
    }
    shown
}
