//! The secrets that changes are guarded with: the node's token in a file, and keys of single jobs.
//!
//! A secret never stands on a command line or in a log. The server keeps digests only.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use thiserror::Error;

/// Where the node's token is unless told otherwise.
pub const DEFAULT_TOKEN_FILE: &str = "/var/lib/paatp/token";

/// Random bytes of a secret. Nobody guesses 256 bits, so nothing slows attempts down.
pub const SECRET_BYTES: usize = 32;

/// Shortest secret that a file may hold, in characters.
const MIN_CHARACTERS: usize = 16;

/// Longest one: beyond, the file is something else.
const MAX_CHARACTERS: u64 = 4096;

/// What a secret is compared with: its SHA-256, so that length and contents take the same time.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Secret")
    }
}

impl Secret {
    /// The digest of a secret.
    #[must_use]
    pub fn of(text: &str) -> Secret {
        Secret(Sha256::digest(text.as_bytes()).into())
    }

    /// The digest, to be kept.
    #[must_use]
    pub const fn digest(&self) -> &[u8; 32] {
        &self.0
    }

    /// A secret of which the digest was kept.
    #[must_use]
    pub const fn of_digest(digest: [u8; 32]) -> Secret {
        Secret(digest)
    }

    /// Whether that is the secret, in constant time.
    #[must_use]
    pub fn is(&self, text: &str) -> bool {
        self.0.ct_eq(&Secret::of(text).0).into()
    }
}

/// A token file cannot be used.
#[derive(Debug, Error)]
pub enum TokenError {
    /// It cannot be read.
    #[error(
        "cannot read the token file {path}; is the path right (--token-file), and may this user read it?"
    )]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It cannot be made.
    #[error("cannot make the token file {path}; choose another place with --token-file")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Others can read it.
    #[error(
        "the token file {path} can be read by others (mode {mode:03o}); say chmod 600 {path}, and replace the token if they may have"
    )]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// It holds no token.
    #[error(
        "{path} holds no token: it must be one line of {MIN_CHARACTERS} to {MAX_CHARACTERS} visible ASCII characters; delete it, and `paatp run` makes a new one"
    )]
    Malformed {
        /// The file.
        path: PathBuf,
    },
    /// The kernel gave no randomness.
    #[error("the kernel gave no randomness for a token: {0}")]
    Randomness(getrandom::Error),
}

/// Draws a secret: 64 hexadecimal digits.
///
/// # Errors
/// If the kernel gives no randomness.
pub fn draw() -> Result<String, getrandom::Error> {
    let mut bytes = [0; SECRET_BYTES];
    getrandom::fill(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Reads a secret from a file, as a client does: its permissions are its owner's business (mounted secrets have odd
/// ones).
///
/// # Errors
/// If it cannot be read or holds none.
pub fn read(path: &Path) -> Result<String, TokenError> {
    let failed = |source| TokenError::Read { path: path.into(), source };
    read_from(path, File::open(path).map_err(failed)?)
}

fn read_from(path: &Path, file: File) -> Result<String, TokenError> {
    let mut text = String::new();
    let read = file.take(MAX_CHARACTERS + 2).read_to_string(&mut text);
    read.map_err(|source| TokenError::Read { path: path.into(), source })?;
    let token = text.trim_end_matches(['\n', '\r']);
    let allowed = MIN_CHARACTERS..=usize::try_from(MAX_CHARACTERS).unwrap_or(usize::MAX);
    if !allowed.contains(&token.len()) || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(TokenError::Malformed { path: path.into() });
    }
    Ok(token.to_owned())
}

/// The node's token: read from its file, which is made at the first start. Whoever else can read the file is an error.
///
/// # Errors
/// If it can be neither read nor made, or others can read it.
pub fn read_or_make(path: &Path) -> Result<Secret, TokenError> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let token = draw().map_err(TokenError::Randomness)?;
            make(path, &token).map_err(|source| TokenError::Write { path: path.into(), source })?;
            // Read again: another aggregator may have been quicker.
            File::open(path)
        }
        other => other,
    };
    let failed = |source| TokenError::Read { path: path.into(), source };
    let file = file.map_err(failed)?;
    let mode = file.metadata().map_err(failed)?.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(TokenError::Exposed { path: path.into(), mode });
    }
    read_from(path, file).map(|token| Secret::of(&token))
}

/// Writes a secret to a new file of mode 0600; readers find it whole. An existing file is left as it is.
///
/// # Errors
/// If it cannot be written.
fn make(path: &Path, token: &str) -> io::Result<()> {
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        fs::create_dir_all(folder)?;
    }
    let mut name = path.as_os_str().to_owned();
    // Of random name: two aggregators in containers may both be process 1 and share the folder.
    name.push(format!(".{:08x}.new", getrandom::u32().map_err(|error| io::Error::other(error.to_string()))?));
    let temporary = PathBuf::from(name);
    write_new(&temporary, token)?;
    let made = match fs::hard_link(&temporary, path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    };
    let removed = fs::remove_file(&temporary);
    made.and(removed)
}

/// Writes a secret to a new file of mode 0600.
///
/// # Errors
/// If there is such a file, or it cannot be written.
fn write_new(path: &Path, secret: &str) -> io::Result<()> {
    writeln!(new_file(path)?, "{secret}")
}

/// A new file of mode 0600.
///
/// # Errors
/// If there is such a file, or it cannot be made.
pub fn new_file(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    // Whatever the umask left out.
    file.set_permissions(fs::Permissions::from_mode(0o600))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn the_first_start_makes_the_token_and_the_next_keeps_it() {
        let folder = folder();
        let path = folder.path().join("state/paatp/token");
        let first = read_or_make(&path).unwrap_or_else(|error| panic!("{error}"));
        let mode = fs::metadata(&path).map(|file| file.mode() & 0o777);
        assert_eq!(mode.ok(), Some(0o600));
        let text = read(&path).unwrap_or_default();
        assert_eq!(text.len(), 64);
        assert!(first.is(&text) && !first.is(&text[1..]) && !first.is(""));
        assert!(read_or_make(&path).is_ok_and(|second| second == first));
        let left: Vec<_> = fs::read_dir(folder.path().join("state/paatp")).into_iter().flatten().collect();
        assert_eq!(left.len(), 1, "no temporary file stays");
    }

    #[test]
    fn tokens_that_others_can_read_are_refused() {
        let folder = folder();
        let path = folder.path().join("token");
        assert!(fs::write(&path, "0123456789abcdef\n").is_ok());
        for mode in [0o640, 0o604, 0o666] {
            assert!(fs::set_permissions(&path, fs::Permissions::from_mode(mode)).is_ok());
            assert!(
                matches!(read_or_make(&path), Err(TokenError::Exposed { mode: found, .. }) if found == mode)
            );
        }
        assert!(fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).is_ok());
        assert!(read_or_make(&path).is_ok());
    }

    #[test]
    fn what_is_no_token_is_refused() {
        let folder = folder();
        let path = folder.path().join("token");
        for wrong in [
            "",
            "\n",
            "short",
            "two words are not one",
            "0123456789abcdef\n0123456789abcdef",
            "é123456789abcdef",
        ] {
            assert!(fs::write(&path, wrong).is_ok());
            assert!(matches!(read(&path), Err(TokenError::Malformed { .. })), "{wrong}");
        }
        assert!(fs::write(&path, "x".repeat(5000)).is_ok());
        assert!(matches!(read(&path), Err(TokenError::Malformed { .. })));
        assert!(matches!(read(folder.path()), Err(TokenError::Read { .. })));
        assert!(matches!(
            read_or_make(&folder.path().join("token/below")),
            Err(TokenError::Read { .. } | TokenError::Write { .. })
        ));
    }

    #[test]
    fn secrets_are_not_printed() {
        assert_eq!(format!("{:?}", Secret::of("x")), "Secret");
    }

    #[test]
    fn draws_differ() {
        assert_ne!(draw().ok(), draw().ok());
    }
}
