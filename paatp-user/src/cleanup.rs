//! `paatp cleanup`: what killed aggregators left behind, why it is believed to be ours, and away with it.
//!
//! What a living process holds is left alone, and so is everything that no aggregator would have made.

use std::collections::BTreeSet;
use std::fmt::{self, Write as _};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;
use paatp_common::layout::LAYOUT;
use serde::Serialize;
use thiserror::Error;

use crate::cli::Cleanup;
use crate::config::NodeConfig;
use crate::control::state_file;
use crate::engine::bpf::{self, Kind};
use crate::engine::pins::{self, FOLDER, LINK, PinError, SetName, UNFINISHED, unescape};
use crate::engine::{escape, lock, lock_file};

/// Version of what `--json` prints.
const SCHEMA_VERSION: u32 = 1;

/// The command cannot be done.
#[derive(Debug, Error)]
pub enum CleanupError {
    /// Folders of root cannot be looked into.
    #[error(
        "what `paatp run` leaves belongs to root, and others cannot even see all of it; run this with sudo"
    )]
    NotRoot,
    /// Something could not be removed.
    #[error("{} of {} could not be removed; the list above says why", .0, .1)]
    Left(usize, usize),
    /// No JSON.
    #[error("cannot write the list")]
    Json(#[from] serde_json::Error),
}

/// What becomes of something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// It would be removed.
    WouldRemove,
    /// It was removed.
    Removed,
    /// A living process has it.
    InUse,
    /// It is not ours.
    Foreign,
    /// It could not be removed.
    Failed,
}

/// What something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// A link, which holds a program on an interface.
    Link,
    /// A program.
    Program,
    /// A map.
    Map,
    /// A folder.
    Folder,
    /// A state file.
    State,
    /// A lock.
    Lock,
    /// Something else.
    Other,
}

/// Something that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Item {
    /// Where.
    pub path: PathBuf,
    /// What it is.
    pub what: What,
    /// What becomes of it.
    pub fate: Fate,
    /// Why, for people.
    pub why: String,
}

/// Everything that was found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    schema_version: u32,
    dry_run: bool,
    /// In the order in which it is removed.
    pub items: Vec<Item>,
}

impl Report {
    fn count(&self, fate: Fate) -> usize {
        self.items.iter().filter(|item| item.fate == fate).count()
    }

    /// Whether all went well.
    ///
    /// # Errors
    /// If something that is ours could not be removed.
    pub fn outcome(&self) -> Result<(), CleanupError> {
        match self.count(Fate::Failed) {
            0 => Ok(()),
            failed => Err(CleanupError::Left(failed, failed + self.count(Fate::Removed))),
        }
    }

    /// For programs.
    ///
    /// # Errors
    /// Never today.
    pub fn json(&self) -> Result<String, CleanupError> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.items.is_empty() {
            return f.write_str("nothing was left behind\n");
        }
        for item in &self.items {
            let fate = match item.fate {
                Fate::WouldRemove => "would remove",
                Fate::Removed => "removed",
                Fate::InUse => "in use, left",
                Fate::Foreign => "not ours, left",
                Fate::Failed => "CANNOT REMOVE",
            };
            writeln!(f, "{fate:<14}  {}  ({})", item.path.display(), item.why)?;
        }
        Ok(())
    }
}

/// Where to look.
struct Search<'a> {
    node: &'a NodeConfig,
    /// The only interface that matters, as a folder's name.
    only: Option<String>,
    remove: bool,
    items: Vec<Item>,
}

/// Whether what is found can be trusted: who cannot look into a folder finds nothing in it.
///
/// # Errors
/// If this is not root.
pub fn may_look() -> Result<(), CleanupError> {
    if geteuid().is_root() { Ok(()) } else { Err(CleanupError::NotRoot) }
}

/// Finds what was left behind and, unless it is a dry run, removes it.
#[must_use]
pub fn run(args: &Cleanup) -> Report {
    let node = NodeConfig {
        pin_dir: args.pin_dir.clone(),
        state_dir: args.state_dir.clone(),
        runtime_dir: args.runtime_dir.clone(),
        ..NodeConfig::default()
    };
    let only = args.iface.as_deref().map(escape);
    let mut search = Search { node: &node, only, remove: !args.dry_run, items: Vec::new() };
    search.pins();
    search.states();
    search.locks();
    Report { schema_version: SCHEMA_VERSION, dry_run: args.dry_run, items: search.items }
}

impl Search<'_> {
    fn matters(&self, folder: &str) -> bool {
        self.only.as_deref().is_none_or(|only| only == folder)
    }

    fn add(&mut self, path: PathBuf, what: What, fate: Fate, why: impl Into<String>) {
        self.items.push(Item { path, what, fate, why: why.into() });
    }

    /// Removes something of ours, or says that it would.
    fn take(&mut self, path: PathBuf, what: What, why: impl Into<String>) {
        let (fate, why) = match (self.remove, what) {
            (false, _) => (Fate::WouldRemove, why.into()),
            (true, What::Folder) => outcome(fs::remove_dir(&path), why.into()),
            (true, _) => outcome(fs::remove_file(&path), why.into()),
        };
        self.add(path, what, fate, why);
    }

    /// The process that holds the lock of an interface.
    fn holder(&self, folder: &str, namespace: u64) -> Option<String> {
        let path = lock_file(self.node.runtime(), &unescape(folder), namespace);
        let pid = lock::holder(&path).ok().flatten()?;
        Some(pid.map_or_else(|| "a process".to_owned(), |pid| format!("process {pid}")))
    }

    fn pins(&mut self) {
        let Some(bpffs) = self.node.bpffs() else { return };
        let root = bpffs.join(FOLDER);
        if let Err(error @ PinError::NoBpffs(_)) = pins::check_bpffs(bpffs) {
            if root.exists() {
                self.add(root, What::Other, Fate::Foreign, error.to_string());
            }
            return;
        }
        let before = self.items.len();
        for folder in pins::names(&root) {
            let path = root.join(&folder);
            if !self.matters(&folder) {
                continue;
            }
            if !is_folder(&path) {
                self.add(path, What::Other, Fate::Foreign, "no folder of an interface");
                continue;
            }
            for name in pins::names(&path) {
                self.set(&folder, &path.join(&name), &name);
            }
            self.empty(path, before);
        }
        if root.exists() {
            self.empty(root, before);
        }
    }

    /// A folder of ours that is empty, or will be.
    fn empty(&mut self, path: PathBuf, since: usize) {
        let items = self.items.get(since..).unwrap_or_default();
        let gone: BTreeSet<&Path> = items
            .iter()
            .filter(|item| matches!(item.fate, Fate::WouldRemove | Fate::Removed))
            .map(|item| item.path.as_path())
            .collect();
        if pins::names(&path).iter().all(|name| gone.contains(path.join(name).as_path())) {
            self.take(path, What::Folder, "empty");
        }
    }

    /// What may be the pins of one daemon.
    fn set(&mut self, folder: &str, path: &Path, name: &str) {
        let unfinished =
            name.strip_prefix(UNFINISHED).and_then(|rest| rest.rsplit_once('-')).map(|(set, _)| set);
        let Some(set) = SetName::parse(unfinished.unwrap_or(name)).filter(|_| is_folder(path)) else {
            return self.add(path.into(), What::Other, Fate::Foreign, "no name that paatp gives");
        };
        // One that is being made is not locked yet.
        if let Some(holder) = unfinished.and_then(|_| self.holder(folder, set.namespace)) {
            return self.add(path.into(), What::Folder, Fate::InUse, format!("{holder} has it"));
        }
        // Held while it is emptied, so that nobody takes it over meanwhile.
        let lock = match File::open(path).and_then(lock::try_lock) {
            Ok(Ok(lock)) => lock,
            Ok(Err(_)) => return self.add(path.into(), What::Folder, Fate::InUse, "a process has it"),
            Err(error) => return self.add(path.into(), What::Folder, Fate::Failed, error.to_string()),
        };
        let since = self.items.len();
        let mut names = pins::names(path);
        // As long as the link is there, the tables are.
        names.sort_by_key(|name| name != LINK);
        let origin = describe(set, unfinished.is_some());
        for name in names {
            self.pin(&path.join(&name), &name, &origin);
        }
        self.empty(path.into(), since);
        drop(lock);
    }

    fn pin(&mut self, path: &Path, name: &str, origin: &str) {
        let Some(expected) = pins::expected(name) else {
            return self.add(path.into(), What::Other, Fate::Foreign, "no name that paatp gives");
        };
        let object = match bpf::open(path) {
            Ok(object) => object,
            Err(error) => {
                return self.add(path.into(), What::Other, Fate::Foreign, format!("no pin ({error})"));
            }
        };
        let (what, mut why) = match bpf::kind(object.as_fd()) {
            kind if kind != expected => {
                return self.add(path.into(), What::Other, Fate::Foreign, "a pin of another kind");
            }
            Kind::Map => (What::Map, format!("a table of {origin}")),
            Kind::Program => (What::Program, format!("the program of {origin}")),
            _ => (What::Link, format!("the link of {origin}")),
        };
        if what == What::Link {
            let _ = match bpf::link_facts(object.as_fd()) {
                Ok(facts) if facts.interface == 0 => write!(why, "; it holds no interface any more"),
                Ok(facts) => {
                    let (program, index) = (facts.program, facts.interface);
                    write!(why, "; it holds program {program} on the interface with index {index}")
                }
                Err(error) => {
                    return self.add(
                        path.into(),
                        What::Other,
                        Fate::Foreign,
                        format!("a link of another kind ({error})"),
                    );
                }
            };
        }
        self.take(path.into(), what, why);
        // The last descriptor of a link takes its program off: here, so that it is off when this returns.
        drop(object);
    }

    fn states(&mut self) {
        let boot = state_file::boot_id();
        for name in pins::names(self.node.state()) {
            let path = self.node.state().join(&name);
            let stem = ["json", "json.new", "json.unreadable"]
                .iter()
                .find_map(|ending| name.strip_suffix(ending)?.strip_suffix('.'));
            let Some((folder, namespace)) = stem.and_then(interface_and_namespace) else { continue };
            if !self.matters(folder) {
                continue;
            }
            if let Some(holder) = self.holder(folder, namespace) {
                self.add(path, What::State, Fate::InUse, format!("{holder} has it"));
                continue;
            }
            match state_file::read(&path) {
                Ok(Some((owner, _))) if owner.boot == boot => {
                    self.take(path, What::State, format!("jobs of interface {}", owner.interface));
                }
                Ok(Some((owner, _))) => {
                    let interface = owner.interface;
                    self.take(
                        path,
                        What::State,
                        format!("jobs of interface {interface} before the machine was started"),
                    );
                }
                Ok(None) => {}
                Err(why) if !name.ends_with(".json") => {
                    self.take(path, What::State, format!("the rest of a state file: {why}"));
                }
                Err(why) => self.add(path, What::Other, Fate::Foreign, format!("no state file: {why}")),
            }
        }
    }

    fn locks(&mut self) {
        for name in pins::names(self.node.runtime()) {
            let path = self.node.runtime().join(&name);
            let stem = name.strip_suffix(".lock").and_then(interface_and_namespace);
            let Some((folder, _)) = stem.filter(|(folder, _)| self.matters(folder)) else { continue };
            let interface = unescape(folder);
            match lock::holder(&path) {
                Ok(None) => self.take(path, What::Lock, format!("no process holds the lock of {interface}")),
                Ok(Some(pid)) => {
                    let who = pid.map_or_else(|| "a process".to_owned(), |pid| format!("process {pid}"));
                    self.add(path, What::Lock, Fate::InUse, format!("{who} has it"));
                }
                Err(error) => self.add(path, What::Other, Fate::Foreign, format!("no lock file ({error})")),
            }
        }
    }
}

fn outcome(result: io::Result<()>, why: String) -> (Fate, String) {
    match result {
        Ok(()) => (Fate::Removed, why),
        Err(error) => (Fate::Failed, error.to_string()),
    }
}

fn is_folder(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_dir())
}

/// `eth0-4026531840`: names of interfaces may have hyphens too.
fn interface_and_namespace(stem: &str) -> Option<(&str, u64)> {
    let (folder, namespace) = stem.rsplit_once('-')?;
    Some((folder, namespace.parse().ok()?)).filter(|(folder, _)| !folder.is_empty())
}

fn describe(set: SetName, unfinished: bool) -> String {
    let mut text = "an aggregator that does not run".to_owned();
    if set.layout != LAYOUT {
        let _ = write!(text, ", of layout {:016x}", set.layout);
    }
    if unfinished {
        text.push_str(", killed while it started");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_taken_apart() {
        assert_eq!(interface_and_namespace("eth0-12"), Some(("eth0", 12)));
        assert_eq!(interface_and_namespace("a-b-12"), Some(("a-b", 12)));
        for stem in ["token", "-12", "eth0-", "eth0-x"] {
            assert_eq!(interface_and_namespace(stem), None, "{stem}");
        }
    }

    fn search(folder: &Path, dry_run: bool) -> Report {
        run(&Cleanup {
            iface: None,
            dry_run,
            json: false,
            pin_dir: Some("none".into()),
            state_dir: Some(folder.into()),
            runtime_dir: Some(folder.into()),
        })
    }

    #[test]
    fn only_what_nobody_holds_is_removed() {
        let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
        let put = |name: &str, text: &str| assert!(fs::write(folder.path().join(name), text).is_ok());
        put("token", "secret");
        put("eth0-1.json", "no state");
        put("eth1-1.json.unreadable", "{");
        put("eth1-1.lock", "1\n");
        let held = lock::Lock::take(&folder.path().join("eth2-1.lock"));
        put("eth2-1.json", "{}");
        let fates = |report: &Report| -> Vec<(String, Fate)> {
            let name = |item: &Item| item.path.file_name().map(|name| name.to_string_lossy().into_owned());
            report.items.iter().map(|item| (name(item).unwrap_or_default(), item.fate)).collect()
        };
        let wanted = |removed: Fate| {
            vec![
                ("eth0-1.json".to_owned(), Fate::Foreign),
                ("eth1-1.json.unreadable".to_owned(), removed),
                ("eth2-1.json".to_owned(), Fate::InUse),
                ("eth1-1.lock".to_owned(), removed),
                ("eth2-1.lock".to_owned(), Fate::InUse),
            ]
        };
        let dry = search(folder.path(), true);
        assert_eq!(fates(&dry), wanted(Fate::WouldRemove));
        let report = search(folder.path(), false);
        assert_eq!(fates(&report), wanted(Fate::Removed));
        assert!(report.outcome().is_ok() && report.to_string().contains("in use, left"), "{report}");
        assert_eq!(pins::names(folder.path()), ["eth0-1.json", "eth2-1.json", "eth2-1.lock", "token"]);
        drop(held);
    }
}
