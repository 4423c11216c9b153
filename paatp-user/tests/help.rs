//! What `--help` says of every command, in files, so that whoever reviews a change sees what users will see.
//! `PAATP_BLESS=1 cargo test --test help` writes them. And whose a bad value is.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Writes the files instead of comparing, if it is 1.
const BLESS: &str = "PAATP_BLESS";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/help")
}

/// What the program says of a command, on a terminal of a hundred columns, whatever the environment has.
fn help(words: &[String]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_paatp"));
    command.args(words).arg("--help").env_clear().env("COLUMNS", "100").stdin(Stdio::null());
    let output = command.output().unwrap();
    assert!(output.status.success(), "paatp {} --help: {}", words.join(" "), output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// The names below `Commands:`.
fn commands_in(help: &str) -> Vec<String> {
    let list =
        help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names = list.filter_map(|line| line.strip_prefix("  ")?.split(' ').next().map(str::to_owned));
    names.filter(|name| !name.is_empty() && name != "help").collect()
}

/// The help of a command and of all below it, by file.
fn collect(words: &[String], found: &mut BTreeMap<String, String>) {
    let text = help(words);
    for name in commands_in(&text) {
        let below: Vec<String> = words.iter().cloned().chain([name]).collect();
        collect(&below, found);
    }
    let name = ["paatp"].into_iter().chain(words.iter().map(String::as_str)).collect::<Vec<_>>().join("-");
    found.insert(format!("{name}.txt"), text);
}

#[test]
fn help_is_as_reviewed() {
    let mut said = BTreeMap::new();
    collect(&[], &mut said);
    assert!(said.len() > 20 && said.contains_key("paatp-job-create.txt"), "{:?}", said.keys());
    if std::env::var(BLESS).is_ok_and(|value| value == "1") {
        let _ = fs::remove_dir_all(folder());
        fs::create_dir_all(folder()).unwrap();
        said.iter().for_each(|(name, text)| fs::write(folder().join(name), text).unwrap());
    }
    let files = fs::read_dir(folder()).into_iter().flatten();
    let files = files.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let reviewed: BTreeMap<String, String> =
        files.map(|name| (name.clone(), fs::read_to_string(folder().join(name)).unwrap())).collect();
    let names: Vec<&String> = said.keys().chain(reviewed.keys()).collect();
    let differ: Vec<_> = names.into_iter().filter(|name| said.get(*name) != reviewed.get(*name)).collect();
    assert!(
        differ.is_empty(),
        "`--help` is not as in {}: {differ:?}; see the difference with {BLESS}=1 and `git diff`",
        folder().display()
    );
}

/// Standard error of a command line that is refused.
fn refusal(args: &[&str], variable: Option<(&str, &str)>) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_paatp"));
    command.args(args).env_clear().envs(variable).stdin(Stdio::null());
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{args:?} {variable:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// A value from the environment is told by its variable, one from the command line by its option.
#[test]
fn bad_values_are_told_with_where_they_are_from() {
    for (args, variable, value) in [
        (&["run", "--iface", "eth0"][..], "PAATP_PORT", "many"),
        (&["run", "--iface", "eth0"], "PAATP_DRAIN_TIMEOUT", "5 parsecs"),
        (&["run", "--iface", "eth0"], "PAATP_XDP_MODE", "fast"),
        (&["config", "dump", "--iface", "eth0"], "PAATP_MEMORY", "2MB"),
        (&["status"], "PAATP_LOG_FORMAT", "xml"),
    ] {
        let said = refusal(args, Some((variable, value)));
        assert!(said.contains(&format!("'{value}' for '{variable} (environment; --")), "{said}");
    }
    let said = refusal(&["run", "--iface", "eth0", "--port", "many"], Some(("PAATP_PORT", "many")));
    assert!(said.contains("for '--port <PORT>'") && !said.contains("environment"), "{said}");
    let said = refusal(&["run", "--iface", "eth0", "--port", "many"], Some(("PAATP_PORTS", "few")));
    assert!(said.contains("for '--port"), "{said}");
}
