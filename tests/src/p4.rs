//! The switch program on BMv2's `simple_switch`, inside a namespace: compiled, started, told its tables over its own
//! command line, and looked into. `cargo xtask p4 test` uses it.
//!
//! The tools are in no package registry. They are looked for in `P4C` (`p4c-bm2-ss`), `BMV2` (`simple_switch`), `BMV2_CLI`
//! (`simple_switch_CLI`) and `BMV2_GRPC` (`simple_switch_grpc`), those for Tofino in `P4TEST` (`p4test`), `P4C_TOFINO`
//! (`p4c-barefoot`) and `BFAS` (`bfas`), and on `PATH`.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use paatp_user::switch::entries::{Entry, Group};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

use crate::netns::Namespace;
use crate::skip::skip;

mod ir;
pub mod pipeline;
mod run;
pub mod tofino;
mod wire;
pub use wire::Wire;

/// Turns a missing tool into a failure where it is set to anything but an empty value or 0.
pub const REQUIRE: &str = "PAATP_REQUIRE_P4";
/// Longest wait for the switch to start, and for each of its command line's answers.
const PATIENCE: Duration = Duration::from_secs(30);
/// Slots that the program is compiled with; jobs may be told to use fewer.
pub const SLOTS: usize = 1024;
/// Blocks of its slots.
pub const BLOCKS: usize = 8;
/// File in the program's folder that a full run of its tests writes.
pub const VERIFIED: &str = "verified.json";
/// What the command line of the switch writes when it waits for a command.
const PROMPT: &[u8] = b"RuntimeCmd: ";

/// Compiler, switch and its command line.
#[derive(Clone, Debug)]
pub struct Tools {
    /// `p4c-bm2-ss`.
    pub compiler: PathBuf,
    /// `simple_switch`.
    pub switch: PathBuf,
    /// `simple_switch_CLI`.
    pub cli: PathBuf,
}

impl Tools {
    /// Finds them.
    ///
    /// # Errors
    /// Which is missing.
    pub fn find() -> Result<Tools> {
        Ok(Tools {
            compiler: find("P4C", "p4c-bm2-ss")?,
            switch: find("BMV2", "simple_switch")?,
            cli: find("BMV2_CLI", "simple_switch_CLI")?,
        })
    }

    /// What compiler and switch say of their versions.
    ///
    /// # Errors
    /// Where they do not start.
    pub fn versions(&self) -> Result<[String; 2]> {
        Ok([format!("p4c {}", version(&self.compiler)?), format!("simple_switch {}", version(&self.switch)?)])
    }

    /// Compiles the program, unless these sources were compiled before: `target/p4` keeps what came out.
    ///
    /// # Errors
    /// What the compiler said. Warnings are errors.
    pub fn compile(&self, blocks: usize) -> Result<PathBuf> {
        Ok(self.pipeline(blocks)?.0)
    }

    /// The same, and its P4Info in protobuf's binary form.
    ///
    /// # Errors
    /// As [`Tools::compile`].
    pub fn pipeline(&self, blocks: usize) -> Result<(PathBuf, PathBuf)> {
        let folder = built()?;
        let key = digest(&[sources()])?;
        let [version, _] = self.versions()?;
        let name = format!("{}-{blocks}-{}.json", version.replace(' ', "-"), &key[..16]);
        let (source, json) = (sources().join("paatp.p4"), folder.join(name));
        let info = json.with_extension("p4info.bin");
        if json.is_file() && info.is_file() {
            return Ok((json, info));
        }
        let unfinished = tempfile::NamedTempFile::new_in(&folder)?;
        let unfinished_info = tempfile::Builder::new().suffix(".bin").tempfile_in(&folder)?;
        let output = Command::new(&self.compiler)
            .args(["--std", "p4-16", "--Werror"])
            .args([format!("-DPAATP_BLOCKS={blocks}"), format!("-DPAATP_SLOTS={SLOTS}")])
            .args([OsStr::new("--p4runtime-files"), unfinished_info.path().as_os_str()])
            .args([OsStr::new("-o"), unfinished.path().as_os_str(), source.as_os_str()])
            .output()
            .with_context(|| format!("cannot start {}", self.compiler.display()))?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success() && said.trim().is_empty(),
            "p4c refuses {}:\n{said}",
            source.display()
        );
        for (unfinished, path) in [(unfinished_info, &info), (unfinished, &json)] {
            unfinished.persist(path).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok((json, info))
    }
}

/// A running `simple_switch_grpc` without a program. Dropping it ends it.
#[derive(Debug)]
pub struct GrpcSwitch {
    child: Child,
    /// Of its socket; removed with it.
    _folder: TempDir,
}

impl GrpcSwitch {
    /// Starts it in a namespace, with these interfaces as ports 0, 1, …, and its server at this port of all addresses.
    ///
    /// # Errors
    /// Where it does not start.
    pub fn start(
        program: &Path,
        namespace: &Namespace,
        interfaces: &[String],
        port: u16,
    ) -> Result<GrpcSwitch> {
        let mut command = namespace.command(program);
        for (port, interface) in interfaces.iter().enumerate() {
            command.args(["-i", &format!("{port}@{interface}")]);
        }
        let folder = tempfile::tempdir().context("no temporary folder")?;
        let news = format!("ipc://{}/news.ipc", folder.path().display());
        command.args(["--no-p4", "--log-level", "off", "--notifications-addr", &news]);
        command.args(["--", "--grpc-server-addr", &format!("0.0.0.0:{port}")]);
        let child = command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let mut switch = GrpcSwitch { child, _folder: folder };
        let end = Instant::now() + PATIENCE;
        while !namespace.run(|| std::net::TcpStream::connect(("127.0.0.1", port)).is_ok())? {
            if let Some(status) = switch.child.try_wait()? {
                bail!("{} ended at once: {status}", program.display());
            }
            ensure!(Instant::now() < end, "{} did not listen within {PATIENCE:?}", program.display());
            thread::sleep(Duration::from_millis(5));
        }
        Ok(switch)
    }
}

impl Drop for GrpcSwitch {
    fn drop(&mut self) {
        // Both fail only where it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `simple_switch_grpc`, for the test `name`, or its skip. It is looked for in `BMV2_GRPC` and on `PATH`.
///
/// # Panics
/// As [`require_p4`].
#[must_use]
pub fn require_grpc(name: &str) -> Option<PathBuf> {
    require(name, find("BMV2_GRPC", "simple_switch_grpc"))
}

/// The first number that a program says of its version.
fn version(program: &Path) -> Result<String> {
    let output = Command::new(program)
        .arg("--version")
        .output()
        .with_context(|| format!("cannot start {}", program.display()))?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    let words: Vec<&str> = text.split_whitespace().collect();
    let number = words.iter().find(|word| word.starts_with(|letter: char| letter.is_ascii_digit()));
    Ok(number.copied().unwrap_or("unknown").to_owned())
}

/// SHA-256 over names and contents of all files below some folders, in the order of their names.
///
/// # Errors
/// Where one cannot be read.
pub fn digest(folders: &[PathBuf]) -> Result<String> {
    let mut hash = Sha256::new();
    for folder in folders {
        let mut files = Vec::new();
        let mut open = vec![folder.clone()];
        while let Some(folder) = open.pop() {
            for entry in fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
                let path = entry?.path();
                if path.is_dir() { open.push(path) } else { files.push(path) }
            }
        }
        // What a run writes says nothing of what ran.
        files.retain(|path| path.file_name() != Some(OsStr::new(VERIFIED)));
        files.sort();
        for path in files {
            let name = path.strip_prefix(folder)?.display().to_string();
            let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            hash.update((name.len() as u64).to_be_bytes());
            hash.update(name);
            hash.update((text.len() as u64).to_be_bytes());
            hash.update(text);
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn find(variable: &str, program: &str) -> Result<PathBuf> {
    if let Some(path) = env::var_os(variable).filter(|path| !path.is_empty()) {
        let path = PathBuf::from(path);
        ensure!(path.is_file(), "{variable} names {}, which is no file", path.display());
        return Ok(path);
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&path).map(|folder| folder.join(program)).find(|path| path.is_file());
    found.with_context(|| format!("no `{program}` on PATH, and {variable} does not name it"))
}

/// Whether the test `name` can run: with the tools, as root. If not, it says so on standard error and in the file that
/// `PAATP_SKIP_LOG` names.
///
/// # Panics
/// Instead of returning nothing, where `PAATP_REQUIRE_P4=1`.
#[must_use]
pub fn require_p4(name: &str) -> Option<Tools> {
    let root = nix::unistd::geteuid().is_root();
    require(name, Tools::find().and_then(|tools| if root { Ok(tools) } else { bail!("not root") }))
}

/// What the test `name` needs, or its skip. Panics as [`require_p4`].
fn require<T>(name: &str, found: Result<T>) -> Option<T> {
    let reason = match found {
        Ok(found) => return Some(found),
        Err(error) => format!("{error:#}"),
    };
    let required = env::var(REQUIRE).is_ok_and(|value| !matches!(value.as_str(), "" | "0"));
    assert!(!required, "{name} cannot run: {reason}, and {REQUIRE} forbids to skip it");
    skip(name, &reason);
    None
}

/// The folder for what is compiled.
fn built() -> Result<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/p4");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder)
}

/// The folder with the program.
#[must_use]
pub fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../p4")
}

/// What a full run of the tests was made on (`p4/verified.json`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verified {
    /// [`digest`] of the program and the vectors.
    pub digest: String,
    /// Versions of compilers and switch.
    pub tools: Vec<String>,
    /// Day of the run (UTC).
    pub date: String,
    /// How each test ended.
    pub tests: BTreeMap<String, String>,
}

impl Verified {
    /// The digest of what is there now.
    ///
    /// # Errors
    /// Where something cannot be read.
    pub fn digest_now() -> Result<String> {
        digest(&[sources(), crate::vectors::folder()])
    }

    /// A run that has just ended.
    ///
    /// # Errors
    /// Where something cannot be read.
    pub fn now(tools: &Tools, tests: BTreeMap<String, String>) -> Result<Verified> {
        let output = Command::new("date").args(["-u", "+%F"]).output().context("cannot start `date`")?;
        let date = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        let mut versions = tools.versions()?.to_vec();
        versions.push(tofino::Backend::find()?.version()?);
        Ok(Verified { digest: Verified::digest_now()?, tools: versions, date, tests })
    }

    /// What is noted.
    ///
    /// # Errors
    /// Where nothing is.
    pub fn read() -> Result<Verified> {
        let path = sources().join(VERIFIED);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{} is not what a run writes", path.display()))
    }

    /// Notes it; says where.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn write(&self) -> Result<PathBuf> {
        let path = sources().join(VERIFIED);
        let text = format!("{}\n", serde_json::to_string_pretty(self)?);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }
}

/// A running `simple_switch`, and its command line. Dropping it ends both.
#[derive(Debug)]
pub struct Switch {
    child: Child,
    cli: Child,
    commands: ChildStdin,
    said: Receiver<u8>,
    nodes: u32,
    /// Of its socket; removed with it.
    _folder: TempDir,
}

impl Switch {
    /// Starts a compiled program in a namespace, with these interfaces as ports 0, 1, …
    ///
    /// # Errors
    /// Where it does not start.
    pub fn start(tools: &Tools, json: &Path, namespace: &Namespace, interfaces: &[String]) -> Result<Switch> {
        /// Ports of Thrift are the namespace's own.
        const THRIFT: &str = "9090";
        let mut command = namespace.command(&tools.switch);
        for (port, interface) in interfaces.iter().enumerate() {
            command.args(["-i", &format!("{port}@{interface}")]);
        }
        // No log, nor what it would say: one line for each packet.
        // Else a socket by one name for all of this machine, whatever the namespace: the second switch ends at once.
        let folder = tempfile::tempdir().context("no temporary folder")?;
        let news = format!("ipc://{}/news.ipc", folder.path().display());
        command.args(["--notifications-addr", &news]);
        command.args(["--thrift-port", THRIFT, "--log-level", "off"]).arg(json);
        let child = command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {}", tools.switch.display()))?;
        let mut switch = Switch::connect(tools, namespace, child, THRIFT, folder)?;
        switch.wait_for_prompt().context("the switch's command line does not answer")?;
        Ok(switch)
    }

    /// Starts the command line, again and again until the switch listens.
    fn connect(
        tools: &Tools,
        namespace: &Namespace,
        mut child: Child,
        port: &str,
        folder: TempDir,
    ) -> Result<Switch> {
        let end = Instant::now() + PATIENCE;
        let is_listening = || {
            let address = format!("127.0.0.1:{port}");
            namespace.run(|| std::net::TcpStream::connect(address).is_ok())
        };
        while !is_listening()? {
            if let Some(status) = child.try_wait()? {
                bail!("simple_switch ended at once: {status}");
            }
            if Instant::now() >= end {
                // Both fail only where it has ended.
                let _ = child.kill();
                let _ = child.wait();
                bail!("simple_switch did not listen within {PATIENCE:?}");
            }
            thread::sleep(Duration::from_millis(5));
        }
        let mut cli = namespace
            .command(&tools.cli)
            .args(["--thrift-port", port])
            .env("PYTHONUNBUFFERED", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {}", tools.cli.display()))?;
        let commands = cli.stdin.take().context("no standard input")?;
        let mut pipe = cli.stdout.take().context("no standard output")?;
        let (sender, said) = channel();
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = pipe.read(&mut buffer) {
                if buffer[..count].iter().any(|byte| sender.send(*byte).is_err()) {
                    return;
                }
            }
        });
        Ok(Switch { child, cli, commands, said, nodes: 0, _folder: folder })
    }

    /// What was said up to the next prompt.
    fn wait_for_prompt(&mut self) -> Result<String> {
        let (end, mut text) = (Instant::now() + PATIENCE, Vec::new());
        while !text.ends_with(PROMPT) {
            let left = end.saturating_duration_since(Instant::now());
            text.push(self.said.recv_timeout(left).with_context(|| {
                format!("no prompt within {PATIENCE:?} after: {}", String::from_utf8_lossy(&text))
            })?);
        }
        text.truncate(text.len() - PROMPT.len());
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// Carries out one command of the switch's command line.
    ///
    /// # Errors
    /// What it said, where that was an error.
    pub fn command(&mut self, command: &str) -> Result<String> {
        writeln!(self.commands, "{command}").context("the switch's command line has ended")?;
        self.commands.flush()?;
        let said = self.wait_for_prompt().with_context(|| format!("after `{command}`"))?;
        let lower = said.to_lowercase();
        ensure!(
            !["error", "invalid", "unknown"].iter().any(|word| lower.contains(word)),
            "`{command}`: {said}"
        );
        Ok(said)
    }

    /// Adds entries.
    ///
    /// # Errors
    /// Where the switch refuses one.
    pub fn add(&mut self, entries: &[Entry]) -> Result<()> {
        entries.iter().try_for_each(|entry| self.command(&entry.to_string()).map(drop))
    }

    /// Makes a multicast group.
    ///
    /// # Errors
    /// Where the switch refuses it.
    pub fn add_group(&mut self, group: &Group) -> Result<()> {
        self.command(&format!("mc_mgrp_create {}", group.number))?;
        for (port, number) in &group.copies {
            self.command(&format!("mc_node_create {number} {port}"))?;
            self.command(&format!("mc_node_associate {} {}", group.number, self.nodes))?;
            self.nodes += 1;
        }
        Ok(())
    }

    /// One cell of a register.
    ///
    /// # Errors
    /// Where there is none.
    pub fn register(&mut self, name: &str, index: usize) -> Result<u128> {
        let said = self.command(&format!("register_read {name} {index}"))?;
        let number = said.rsplit('=').next().unwrap_or_default().trim();
        number.parse().with_context(|| format!("`{said}` is no value of {name}[{index}]"))
    }

    /// Packets of a counter.
    ///
    /// # Errors
    /// Where there is none.
    pub fn counter(&mut self, name: &str, index: usize) -> Result<u64> {
        let said = self.command(&format!("counter_read {name} {index}"))?;
        // `name[index]= (n bytes, m packets)`
        let number = said.split(", ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap_or_default();
        number.parse().with_context(|| format!("`{said}` is no value of {name}[{index}]"))
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        for child in [&mut self.cli, &mut self.child] {
            // Both fail only where it has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
