//! What is made from the program for those who package and run it: man pages, completions, and the lists in unit file,
//! manifests and documentation that must be what the code says.
//!
//! Checked-in files have *regions* between a line with `>>> NAME` and one with `<<< NAME`. `cargo xtask codegen` writes
//! them, a test compares.

mod dissector;
mod messages;

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use paatp_user::engine::REQUIRED;
use paatp_user::exit::Exit;
use paatp_user::manual;
use paatp_user::settings;

pub mod p4;

/// Files with regions, from the root of the repository, each with what is between the marks.
pub fn regions() -> Vec<(&'static str, Vec<(&'static str, String)>)> {
    let names = REQUIRED.map(|capability| capability.name).join(" ");
    let table: String =
        REQUIRED.iter().map(|needed| format!("| `{}` | {} |\n", needed.name, needed.purpose)).collect();
    let statuses: String =
        Exit::ALL.iter().map(|exit| format!("| {} | {} |\n", exit.status(), exit.meaning())).collect();
    vec![
        (
            "packaging/systemd/paatp.service",
            vec![("capabilities", format!("CapabilityBoundingSet={names}\n"))],
        ),
        ("packaging/kubernetes/daemonset.yaml", vec![("capabilities", kubernetes(&[]))]),
        (
            "packaging/kubernetes/legacy/kustomization.yaml",
            vec![("capabilities", kubernetes(&["SYS_ADMIN"]))],
        ),
        ("packaging/container/Containerfile", vec![("capabilities", format!("# {}\n", docker_options()))]),
        ("packaging/wireshark/paatp.lua", vec![("names", dissector::names())]),
        (
            "docs/operations.md",
            vec![
                ("capabilities", format!("| capability | what for |\n|---|---|\n{table}")),
                (
                    "statuses",
                    format!("| status | |\n|---|---|\n{statuses}| 128 + n | signal n came twice |\n"),
                ),
                ("settings", settings_table()),
                (
                    "docker",
                    format!(
                        "<!-- not run: needs a container engine; its options are made from the code's list of capabilities -->\n```sh\ndocker run --rm --network host {} \\\n    --volume /etc/paatp:/etc/paatp:ro --volume /var/lib/paatp:/var/lib/paatp \\\n    --volume /run/paatp:/run/paatp --volume /sys/fs/bpf:/sys/fs/bpf localhost/paatp\n```\n",
                        docker_options()
                    ),
                ),
            ],
        ),
    ]
}

/// `docker run`'s way to give the capabilities and nothing else.
fn docker_options() -> String {
    let added: Vec<String> =
        REQUIRED.iter().map(|needed| format!("--cap-add {}", needed.short_name())).collect();
    format!("--cap-drop ALL {}", added.join(" "))
}

/// The capabilities of a container, in YAML.
fn kubernetes(more: &[&str]) -> String {
    let names = REQUIRED.iter().map(|needed| needed.short_name()).chain(more.iter().copied());
    let list: Vec<&str> = names.collect();
    format!("add: [{}]\n", list.join(", "))
}

/// Every setting with its flag, variable, key and default.
fn settings_table() -> String {
    let mut table =
        String::from("| flag | environment | `[node]` | unless told otherwise |\n|---|---|---|---|\n");
    for setting in settings::list() {
        let key = match setting.key {
            Some(key) => format!("`{key}`"),
            None if setting.flag == "config" => String::new(),
            None => "`[[job]]`".into(),
        };
        let default = setting.default.map_or_else(String::new, |default| format!("`{default}`"));
        table.push_str(&format!("| `--{}` | `{}` | {key} | {default} |\n", setting.flag, setting.variable));
    }
    table
}

/// A file's text with its regions as they should be. Lines keep the indentation of the mark before them.
///
/// # Errors
/// If a region is missing.
pub fn with_regions(text: &str, regions: &[(&str, String)]) -> Result<String> {
    let mut text = text.to_owned();
    for (name, content) in regions {
        let (open, close) = (format!(">>> {name}"), format!("<<< {name}"));
        let begin = text.find(&open).with_context(|| format!("there is no line with `{open}`"))?;
        let line = text[..begin].rfind('\n').map_or(0, |end| end + 1);
        let indentation: String = text[line..].chars().take_while(|letter| *letter == ' ').collect();
        let from = begin + text[begin..].find('\n').context("the region has no end")? + 1;
        let to =
            text[from..].find(&close).with_context(|| format!("there is no line with `{close}`"))? + from;
        let to = text[..to].rfind('\n').map_or(0, |end| end + 1);
        ensure!(from <= to, "`{open}` and `{close}` must be on lines of their own");
        let lines: String = content.lines().map(|line| format!("{indentation}{line}\n")).collect();
        text.replace_range(from..to, &lines);
    }
    Ok(text)
}

/// Writes the regions of all files below `root` and the files that are made whole, or with `check` only says which are
/// not as they should be.
///
/// # Errors
/// If a file cannot be read or written, lacks a region, or with `check` differs.
pub fn codegen(root: &Path, check: bool) -> Result<Vec<String>> {
    let mut changed = Vec::new();
    for (file, regions) in regions() {
        let path = root.join(file);
        let old =
            std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let new = with_regions(&old, &regions).with_context(|| path.display().to_string())?;
        if old != new {
            changed.push(file.to_owned());
            if !check {
                std::fs::write(&path, new).with_context(|| format!("cannot write {}", path.display()))?;
            }
        }
    }
    let whole = p4::files().into_iter().map(|(file, text)| (file.to_owned(), text));
    for (file, new) in whole.chain(messages::files(root)?) {
        let path = root.join(&file);
        if std::fs::read_to_string(&path).ok().as_ref() != Some(&new) {
            changed.push(file);
            if !check {
                std::fs::write(&path, new).with_context(|| format!("cannot write {}", path.display()))?;
            }
        }
    }
    if check && !changed.is_empty() {
        bail!("not as the code says: {}; `cargo xtask codegen` writes them", changed.join(", "));
    }
    Ok(changed)
}

/// Writes man pages to `man/` and completions to `completions/` below a folder.
///
/// # Errors
/// If they cannot be written.
pub fn assets(folder: &Path) -> Result<()> {
    manual::write_all(folder).with_context(|| format!("cannot write to {}", folder.display()))
}
