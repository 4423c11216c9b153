//! One daemon for each interface: a lock that ends with the process that holds it, however that ends.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

/// Longest process number in a lock file, in bytes; the rest of a file is something else.
const MAX_PID_BYTES: u64 = 16;

/// Attempts to lock a file that its last owner removes meanwhile; each needs another daemon that ends just then.
const ATTEMPTS: usize = 16;

/// A held lock. Dropping it removes its file.
#[derive(Debug)]
pub struct Lock {
    _file: Flock<File>,
    path: PathBuf,
}

/// What came of an attempt.
#[derive(Debug)]
pub enum Locked {
    /// It is ours.
    Ours(Lock),
    /// Another process holds it: its number, if the file tells.
    Taken(Option<u32>),
}

impl Lock {
    /// Takes the lock at a path, whose folder must exist, and writes this process's number into it.
    ///
    /// # Errors
    /// If the file cannot be made or locked; that somebody else holds it is no error.
    pub fn take(path: &Path) -> io::Result<Locked> {
        for _ in 0..ATTEMPTS {
            let mut options = OpenOptions::new();
            let file = options.read(true).write(true).create(true).mode(0o600).open(path)?;
            let mut file = match try_lock(file)? {
                Ok(file) => file,
                Err(mut file) => return Ok(Locked::Taken(pid(&mut file))),
            };
            // Its last owner may have removed it between opening and locking.
            let same = fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
            let ours = file.metadata()?;
            if same != Some((ours.dev(), ours.ino())) {
                continue;
            }
            file.set_len(0)?;
            file.write_all(format!("{}\n", std::process::id()).as_bytes())?;
            return Ok(Locked::Ours(Lock { _file: file, path: path.into() }));
        }
        Err(io::Error::new(io::ErrorKind::ResourceBusy, "the lock file is removed again and again"))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // While it is held: nobody else can have taken a file of this name.
        let _ = fs::remove_file(&self.path);
    }
}

/// Whether a living process holds the lock at a path: its number, where the file tells.
///
/// # Errors
/// If the file cannot be opened.
pub fn holder(path: &Path) -> io::Result<Option<Option<u32>>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    Ok(match try_lock(file)? {
        Ok(_free) => None,
        Err(mut file) => Some(pid(&mut file)),
    })
}

/// Locks an open file or folder; gives it back if somebody else holds it.
///
/// # Errors
/// What the kernel says.
pub fn try_lock(file: File) -> io::Result<Result<Flock<File>, File>> {
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Ok(lock)),
        Err((file, Errno::EWOULDBLOCK)) => Ok(Err(file)),
        Err((_, error)) => Err(error.into()),
    }
}

fn pid(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.take(MAX_PID_BYTES).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time() {
        let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
        let path = folder.path().join("eth0-1.lock");
        // Whatever lies there is no lock by itself.
        assert!(fs::write(&path, "12 rubbish, much longer than a number").is_ok());
        assert!(matches!(holder(&path), Ok(None)));
        let Ok(Locked::Ours(first)) = Lock::take(&path) else { panic!("taken") };
        assert!(matches!(Lock::take(&path), Ok(Locked::Taken(Some(pid))) if pid == std::process::id()));
        assert!(matches!(holder(&path), Ok(Some(Some(pid))) if pid == std::process::id()));
        drop(first);
        assert!(!path.exists() && matches!(holder(&path), Ok(None)));
        assert!(matches!(Lock::take(&path), Ok(Locked::Ours(_))));
        assert!(Lock::take(&folder.path().join("no/folder")).is_err());
        assert!(Lock::take(folder.path()).is_err(), "a folder is no lock file");
    }
}
