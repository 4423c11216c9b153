//! Network namespaces that vanish with their owner.
//!
//! A [`Namespace`] is held by a file descriptor and has no name in the file system: links, routes and programs in it
//! are gone when the descriptor and the processes inside are, also after `SIGKILL`. [`Namespace::publish`] gives it a
//! name for `ip netns exec` and `nsenter`.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;

use anyhow::{Context, Result, bail};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};

/// What all names of ours begin with.
pub const PREFIX: &str = "pa";

/// A network namespace.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    file: Arc<File>,
    published: bool,
}

impl Namespace {
    /// Creates a namespace in which `lo` is up and nothing delays or adds packets: no duplicate address detection, no
    /// router solicitations.
    ///
    /// # Errors
    /// Without `CAP_SYS_ADMIN`, or where `ip` is missing.
    pub fn new(name: impl Into<String>) -> Result<Namespace> {
        let name = name.into();
        let file = on_a_thread(|| -> Result<File> {
            unshare(CloneFlags::CLONE_NEWNET)
                .context("cannot create a network namespace (CAP_SYS_ADMIN is needed)")?;
            File::open("/proc/thread-self/ns/net").context("cannot open /proc/thread-self/ns/net")
        })??;
        let namespace = Namespace { name, file: Arc::new(file), published: false };
        for (key, value) in [("accept_dad", "0"), ("accept_ra", "0"), ("router_solicitations", "0")] {
            for scope in ["all", "default"] {
                namespace.set(&format!("ipv6/conf/{scope}/{key}"), value)?;
            }
        }
        namespace.ip(&["link", "set", "lo", "up"])?;
        Ok(namespace)
    }

    /// The name, for messages.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A path that names the namespace while this process holds it.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()).into()
    }

    /// Runs a function on a thread of its own inside the namespace. A panic in it goes on here.
    ///
    /// # Errors
    /// Where the thread cannot enter.
    pub fn run<T: Send>(&self, function: impl FnOnce() -> T + Send) -> Result<T> {
        on_a_thread(|| {
            setns(&*self.file, CloneFlags::CLONE_NEWNET)
                .with_context(|| format!("cannot enter the network namespace {}", self.name))?;
            Ok(function())
        })?
    }

    /// A command that will run inside. It gets no signals of the terminal and dies with the thread that spawns it.
    /// Mounts stay as they are: unlike with `ip netns exec`, the BPF file system is visible.
    #[must_use]
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        // No token outside the lab is read or made; a test that wants one names its own.
        command.env("PAATP_TOKEN_FILE", "");
        // Nothing is pinned in the machine's own BPF file system either; tests of that have one of their own.
        command.env("PAATP_PIN_DIR", "none");
        command.stdin(Stdio::null()).process_group(0);
        let file = Arc::clone(&self.file);
        let parent = std::process::id();
        // SAFETY: between fork and exec only system calls are made; the descriptor lives in the closure.
        unsafe {
            command.pre_exec(move || {
                setns(&*file, CloneFlags::CLONE_NEWNET)?;
                nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
                if nix::unistd::getppid().as_raw() as u32 != parent {
                    return Err(std::io::Error::other("the parent is gone"));
                }
                sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?;
                Ok(())
            });
        }
        command
    }

    /// Runs `ip` with these arguments inside.
    ///
    /// # Errors
    /// What `ip` said.
    pub fn ip(&self, args: &[&str]) -> Result<String> {
        self.output("ip", args)
    }

    /// Runs a program inside to its end and returns what it wrote.
    ///
    /// # Errors
    /// With what it wrote to standard error, where it fails.
    pub fn output(&self, program: &str, args: &[&str]) -> Result<String> {
        let output = self
            .command(program)
            .args(args)
            .output()
            .with_context(|| format!("cannot start `{program}` in {}; is it installed?", self.name))?;
        if !output.status.success() {
            let message = String::from_utf8_lossy(&output.stderr);
            bail!("`{program} {}` in {}: {}: {}", args.join(" "), self.name, output.status, message.trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Writes a setting below `/proc/sys/net`; the kernel shows each thread those of its own namespace.
    ///
    /// # Errors
    /// Where the kernel does not know the setting or the value.
    pub fn set(&self, key: &str, value: &str) -> Result<()> {
        let path = format!("/proc/sys/net/{key}");
        self.run(|| fs::write(&path, value))?
            .with_context(|| format!("cannot write {value} to {path} in {}", self.name))
    }

    /// What `ip -json` shows.
    ///
    /// # Errors
    /// What `ip` said, or that it was no JSON.
    pub fn ip_json(&self, args: &[&str]) -> Result<serde_json::Value> {
        let mut all = vec!["-json"];
        all.extend(args);
        let text = self.ip(&all)?;
        if text.trim().is_empty() {
            return Ok(serde_json::Value::Array(Vec::new()));
        }
        serde_json::from_str(&text).with_context(|| format!("`ip {}` wrote no JSON", all.join(" ")))
    }

    /// Lets `ip netns exec NAME` and `nsenter --net=/run/netns/NAME` find the namespace, until it is dropped or, with
    /// [`Namespace::leave_behind`], for good.
    ///
    /// # Errors
    /// What `ip` said.
    pub fn publish(&mut self) -> Result<()> {
        let name = self.name.clone();
        self.run(|| {
            let thread = nix::unistd::gettid().to_string();
            let output = Command::new("ip").args(["netns", "attach", &name, &thread]).output()?;
            if output.status.success() {
                Ok(())
            } else {
                Err(std::io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
            }
        })?
        .with_context(|| format!("cannot name the namespace {name}"))?;
        self.published = true;
        Ok(())
    }

    /// Keeps a published name when this is dropped.
    pub fn leave_behind(&mut self) {
        self.published = false;
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if self.published {
            // Nothing to be done here if it fails: `residue` would show it.
            let _ = Command::new("ip").args(["netns", "delete", &self.name]).status();
        }
    }
}

/// Runs a function on a thread of its own, because a namespace belongs to a thread.
pub(crate) fn on_a_thread<T: Send>(function: impl FnOnce() -> T + Send) -> Result<T> {
    thread::scope(|scope| {
        let handle = thread::Builder::new()
            .name("netns".into())
            .spawn_scoped(scope, function)
            .context("no more threads")?;
        match handle.join() {
            Ok(value) => Ok(value),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Names of namespaces, and of links in this process's own namespace, that processes like this one left behind.
/// `process` limits the answer to what the process with this number created.
///
/// # Errors
/// Where `ip` fails.
pub fn residue(process: u32) -> Result<Vec<String>> {
    let prefix = format!("{PREFIX}{process:x}-");
    let mut left = Vec::new();
    let links = Command::new("ip").args(["-oneline", "link"]).output().context("cannot start `ip`")?;
    let links = String::from_utf8_lossy(&links.stdout).into_owned();
    left.extend(links.lines().filter_map(|line| {
        let name = line.split(": ").nth(1)?.split('@').next()?;
        name.starts_with(&prefix).then(|| format!("link {name}"))
    }));
    if let Ok(names) = fs::read_dir("/run/netns") {
        left.extend(names.filter_map(|entry| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            name.starts_with(&prefix).then(|| format!("namespace {name}"))
        }));
    }
    Ok(left)
}
