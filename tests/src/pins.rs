//! A BPF file system of a test's own, in a mount namespace of its own, with folders for state and locks.
//!
//! It is held by a descriptor: what is pinned in it is gone when the descriptor and the processes inside are.

use std::ffi::CString;
use std::fs::{self, File};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use tempfile::TempDir;

use crate::netns::on_a_thread;

/// A BPF file system, and folders.
#[derive(Debug)]
pub struct Pins {
    folder: TempDir,
    mounts: Arc<File>,
}

impl Pins {
    /// Mounts one.
    ///
    /// # Errors
    /// Without `CAP_SYS_ADMIN`.
    pub fn new() -> Result<Pins> {
        Pins::with("bpf", MsFlags::empty())
    }

    /// Mounts a file system of another kind, or with other flags, in its place.
    ///
    /// # Errors
    /// Without `CAP_SYS_ADMIN`.
    pub fn with(kind: &str, flags: MsFlags) -> Result<Pins> {
        let folder =
            tempfile::Builder::new().prefix("paatp-pins-").tempdir().context("no temporary folder")?;
        let path = folder.path().join("bpf");
        fs::create_dir(&path)?;
        let mounts = on_a_thread(|| -> Result<File> {
            unshare(CloneFlags::CLONE_NEWNS).context("cannot create a mount namespace")?;
            let none = None::<&str>;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
            mount(Some(kind), &path, Some(kind), flags, none)
                .with_context(|| format!("cannot mount {kind}"))?;
            File::open("/proc/thread-self/ns/mnt").context("cannot open /proc/thread-self/ns/mnt")
        })??;
        Ok(Pins { folder, mounts: Arc::new(mounts) })
    }

    /// Lets a command run in the mount namespace, with the folders of this.
    pub fn enter(&self, command: &mut Command) {
        command.env("PAATP_PIN_DIR", self.bpffs());
        command.env("PAATP_STATE_DIR", self.state());
        command.env("PAATP_RUNTIME_DIR", self.runtime());
        let mounts = Arc::clone(&self.mounts);
        // SAFETY: between fork and exec only a system call is made; the descriptor lives in the closure.
        unsafe {
            command.pre_exec(move || Ok(setns(&*mounts, CloneFlags::CLONE_NEWNS)?));
        }
    }

    /// Runs a function on a thread of its own inside the mount namespace.
    ///
    /// # Errors
    /// Where the thread cannot enter.
    pub fn run<T: Send>(&self, function: impl FnOnce() -> T + Send) -> Result<T> {
        on_a_thread(|| {
            unshare(CloneFlags::CLONE_FS)?;
            setns(&*self.mounts, CloneFlags::CLONE_NEWNS).context("cannot enter the mount namespace")?;
            Ok(function())
        })?
    }

    /// The BPF file system, as seen inside.
    #[must_use]
    pub fn bpffs(&self) -> PathBuf {
        self.folder.path().join("bpf")
    }

    /// Folder for state files.
    #[must_use]
    pub fn state(&self) -> PathBuf {
        self.folder.path().join("state")
    }

    /// Folder for locks.
    #[must_use]
    pub fn runtime(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    /// The state file, if there is exactly one.
    ///
    /// # Errors
    /// If there is none, or more.
    pub fn state_file(&self) -> Result<PathBuf> {
        let files = below(&self.state());
        let file = files.iter().find(|path| path.ends_with(".json"));
        file.map(|path| self.state().join(path)).with_context(|| format!("the state files are {files:?}"))
    }

    /// What is in the BPF file system, below our folder and beside it, as sorted paths.
    ///
    /// # Errors
    /// Where the mount namespace cannot be entered.
    pub fn tree(&self) -> Result<Vec<String>> {
        let mut tree = self.run(|| below(&self.bpffs()))?;
        // The kernel's own, in every one.
        tree.retain(|path| !path.ends_with(".debug"));
        Ok(tree)
    }

    /// Everything that a daemon may leave: pins, state, locks.
    ///
    /// # Errors
    /// Where the mount namespace cannot be entered.
    pub fn residue(&self) -> Result<Vec<String>> {
        let mut all = self.tree()?;
        all.extend(below(&self.state()));
        all.extend(below(&self.runtime()));
        Ok(all)
    }
}

/// Pins a map of one entry with values of so many bytes, as somebody else might. To be run inside [`Pins::run`].
///
/// # Errors
/// What the kernel said.
pub fn pin_some_map(path: &Path, value_bytes: u32) -> Result<()> {
    /// Commands of `enum bpf_cmd`.
    const MAP_CREATE: libc::c_long = 0;
    const OBJ_PIN: libc::c_long = 6;
    // The heads of `union bpf_attr`. Type (2: array), key size, value size, entries.
    let map: [u32; 4] = [2, 4, value_bytes, 1];
    // SAFETY: pointer and size describe `map`, which the kernel only reads.
    let descriptor = unsafe { libc::syscall(libc::SYS_bpf, MAP_CREATE, map.as_ptr(), size_of_val(&map)) };
    let descriptor = i32::try_from(descriptor)?;
    if descriptor < 0 {
        return Err(std::io::Error::last_os_error()).context("cannot make a map");
    }
    // SAFETY: a new descriptor of our own.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    let name = CString::new(path.as_os_str().as_bytes())?;
    let pin: [u64; 2] = [name.as_ptr() as u64, descriptor.as_raw_fd() as u64];
    // SAFETY: pointer and size describe `pin`, whose path lives until after the call.
    let result = unsafe { libc::syscall(libc::SYS_bpf, OBJ_PIN, pin.as_ptr(), size_of_val(&pin)) };
    if result < 0 {
        return Err(std::io::Error::last_os_error())
            .with_context(|| format!("cannot pin {}", path.display()));
    }
    Ok(())
}

/// Everything below a folder, as sorted paths relative to it.
fn below(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut next = vec![folder.to_owned()];
    while let Some(at) = next.pop() {
        for entry in fs::read_dir(&at).into_iter().flatten().flatten() {
            let path = entry.path();
            found.push(path.strip_prefix(folder).unwrap_or(&path).display().to_string());
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                next.push(path);
            }
        }
    }
    found.sort();
    found
}
