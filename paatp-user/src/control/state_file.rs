//! The file of a daemon's [`State`]: whose it is, whole or absent, readable by its owner only.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};
use tracing::{error, info};

use super::membership::Membership;
use super::state::{STATE_VERSION, State};

/// Largest file that is read, in bytes: 65,536 generations need 512 KiB, 64 jobs with all ranks and two generations
/// another 500 KiB.
const MAX_BYTES: u64 = 4 << 20;

/// Whose state it is. Tables have a number that no others get until the machine starts again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Owner {
    /// The kernel's name for this start of the machine.
    pub boot: String,
    /// The interface.
    pub interface: String,
    /// The network namespace.
    pub namespace: u64,
    /// The kernel's number of the table of jobs.
    pub tables: u32,
    /// Layout of the tables, in hexadecimal digits.
    pub layout: String,
}

/// What a file holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    version: u32,
    owner: Owner,
    state: State,
}

/// What came of reading a file.
#[derive(Debug, PartialEq)]
pub enum Reading {
    /// It is the state of these tables.
    Ours(Box<State>),
    /// There is none.
    Nothing,
    /// It is of other tables.
    Foreign(Box<Owner>),
    /// It cannot be used.
    Broken(String),
}

/// Keeps what a membership needs for a restart.
pub trait Keeper: Send {
    /// Keeps it. What cannot be kept is tried again later: a restart then ends what it does not know.
    fn keep(&mut self, membership: &Membership);

    /// Tries again, if the last attempt failed.
    fn retry(&mut self, membership: &Membership);
}

/// The file of one daemon.
#[derive(Clone, Debug)]
pub struct StateFile {
    path: PathBuf,
    owner: Owner,
    failed: bool,
}

/// The kernel's name for this start of the machine.
#[must_use]
pub fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

impl StateFile {
    /// The file of these tables, which need not exist.
    #[must_use]
    pub const fn new(path: PathBuf, owner: Owner) -> StateFile {
        StateFile { path, owner, failed: false }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the state of these tables.
    #[must_use]
    pub fn read(&self) -> Reading {
        match read(&self.path) {
            Ok(None) => Reading::Nothing,
            Err(why) => Reading::Broken(why),
            Ok(Some((owner, _))) if owner != self.owner => Reading::Foreign(Box::new(owner)),
            Ok(Some((_, state))) => Reading::Ours(Box::new(state)),
        }
    }

    /// Puts a file aside that cannot be used, for whoever wants to know why.
    pub fn set_aside(&self) -> Option<PathBuf> {
        let aside = with_suffix(&self.path, ".unreadable");
        fs::rename(&self.path, &aside).ok().map(|()| aside)
    }

    /// Removes the file.
    pub fn remove(&self) {
        if let Err(error) = fs::remove_file(&self.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            error!("cannot remove {}: {error}", self.path.display());
        }
    }

    /// Writes the state: the file is the old one or the new one, whenever this is interrupted.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&self, membership: &Membership) -> io::Result<()> {
        let document =
            Document { version: STATE_VERSION, owner: self.owner.clone(), state: membership.state() };
        let mut text = serde_json::to_string(&document)?;
        text.push('\n');
        if let Some(folder) = self.path.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        let fresh = with_suffix(&self.path, ".new");
        // One that a killed daemon left may be a link to somewhere else.
        match fs::remove_file(&fresh) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&fresh, &self.path)
    }
}

impl Keeper for StateFile {
    fn keep(&mut self, membership: &Membership) {
        let failed = self.write(membership);
        if let (Err(error), false) = (&failed, self.failed) {
            error!(
                "cannot write {}: {error}; a restart now would end what has changed since (trying again)",
                self.path.display()
            );
        } else if failed.is_ok() && self.failed {
            info!("{} is written again", self.path.display());
        }
        self.failed = failed.is_err();
    }

    fn retry(&mut self, membership: &Membership) {
        if self.failed {
            self.keep(membership);
        }
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Reads a state file, whoever's.
///
/// # Errors
/// Why it is none, in words.
pub fn read(path: &Path) -> Result<Option<(Owner, State)>, String> {
    let file =
        match OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(|error| error.to_string())?,
        };
    let found = file.metadata().map_err(|error| error.to_string())?;
    if !found.is_file() || found.uid() != geteuid().as_raw() || found.mode() & 0o022 != 0 {
        return Err("it is no file that only this user can write to".into());
    }
    parse(&read_all(file)?)
}

fn read_all(file: File) -> Result<String, String> {
    let mut text = String::new();
    file.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(|error| error.to_string())?;
    if text.len() as u64 > MAX_BYTES {
        return Err(format!("it is longer than {MAX_BYTES} bytes"));
    }
    Ok(text)
}

fn parse(text: &str) -> Result<Option<(Owner, State)>, String> {
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    let Version { version } = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if version != STATE_VERSION {
        return Err(format!("it is of version {version}, and this program writes {STATE_VERSION}"));
    }
    let document: Document = serde_json::from_str(text).map_err(|error| error.to_string())?;
    Ok(Some((document.owner, document.state)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{JobConfig, Jobs};
    use std::os::unix::fs::PermissionsExt;

    fn owner() -> Owner {
        Owner { boot: boot_id(), interface: "eth0".into(), namespace: 1, tables: 7, layout: "00".into() }
    }

    fn membership() -> Membership {
        let jobs = Jobs::new(vec![JobConfig::new("a", 2)]).unwrap_or_else(|error| panic!("{error}"));
        Membership::new(&jobs, 1, 1)
    }

    #[test]
    fn files_are_whole_private_and_of_their_tables() {
        let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
        let path = folder.path().join("below/eth0-1.json");
        let mut file = StateFile::new(path.clone(), owner());
        assert_eq!(file.read(), Reading::Nothing);
        file.keep(&membership());
        assert_eq!(fs::metadata(&path).map(|file| file.mode() & 0o777).ok(), Some(0o600));
        assert!(matches!(file.read(), Reading::Ours(state) if *state == membership().state()));
        for other in [
            Owner { boot: "another".into(), ..owner() },
            Owner { tables: 8, ..owner() },
            Owner { namespace: 2, ..owner() },
            Owner { layout: "01".into(), ..owner() },
        ] {
            assert!(
                matches!(StateFile::new(path.clone(), other).read(), Reading::Foreign(found) if *found == owner())
            );
        }
        file.remove();
        assert_eq!(fs::read_dir(folder.path().join("below")).map(Iterator::count).ok(), Some(0));
    }

    #[test]
    fn what_is_no_state_is_set_aside() {
        let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
        let path = folder.path().join("state.json");
        let file = StateFile::new(path.clone(), owner());
        assert!(file.write(&membership()).is_ok());
        let whole = fs::read_to_string(&path).unwrap_or_default();
        let newer = whole.replacen("\"version\":1", "\"version\":2", 1);
        let long = format!("{whole}{}", " ".repeat(MAX_BYTES as usize));
        for text in ["", "{", &whole[..whole.len() / 2], &newer, "\u{1F980}", &long] {
            assert!(fs::write(&path, text).is_ok());
            assert!(matches!(file.read(), Reading::Broken(_)), "{:.80}", text);
        }
        let aside = file.set_aside();
        assert!(aside.is_some_and(|aside| aside.exists()) && !path.exists());
        // Whoever else may write to it could let himself in.
        assert!(file.write(&membership()).is_ok());
        assert!(fs::set_permissions(&path, fs::Permissions::from_mode(0o622)).is_ok());
        assert!(matches!(file.read(), Reading::Broken(_)));
        assert!(fs::remove_file(&path).is_ok() && fs::create_dir(&path).is_ok());
        assert!(matches!(file.read(), Reading::Broken(_)));
    }

    /// A file that cannot be written is told once and tried again.
    #[test]
    fn failures_are_tried_again() {
        let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
        let blocked = folder.path().join("folder");
        assert!(fs::write(&blocked, "a file where a folder should be").is_ok());
        let mut file = StateFile::new(blocked.join("state.json"), owner());
        file.keep(&membership());
        assert!(file.failed);
        assert!(fs::remove_file(&blocked).is_ok());
        file.retry(&membership());
        assert!(!file.failed && matches!(file.read(), Reading::Ours(_)));
    }
}
