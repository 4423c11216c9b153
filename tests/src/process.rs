//! The `paatp` processes of a lab: started inside namespaces, watched, and killed when dropped.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::lab::{Family, Host, Lab};
use crate::pins::Pins;
use crate::reference::{Chunking, Reduction};

/// Port of control server and data plane.
pub const PORT: u16 = 20545;
/// Says how `paatp` logs. Tests of the log remove it from the command.
pub const LOG_FORMAT: &str = "PAATP_LOG_FORMAT";
/// What `paatp run` begins a line with once workers may join.
const READY: &str = "ready:";
/// Longest wait for that line: loading includes the verifier's walk, beside everything else that tests do.
const START_DEADLINE: Duration = Duration::from_secs(60);
/// How often a condition is looked at that nothing announces.
const GLANCE: Duration = Duration::from_millis(2);

/// Finds `paatp`: in `PAATP_BIN`, beside the running program, or one folder up (test programs lie in `deps`).
///
/// # Errors
/// Where there is none.
pub fn paatp() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("PAATP_BIN").filter(|path| !path.is_empty()) {
        return Ok(path.into());
    }
    let program = std::env::current_exe().context("this program does not know where it is")?;
    let found =
        program.ancestors().skip(1).take(2).map(|folder| folder.join("paatp")).find(|path| path.is_file());
    found.with_context(|| {
        format!(
            "no `paatp` beside {}: build it with `cargo build -p paatp-user` or name it in PAATP_BIN",
            program.display()
        )
    })
}

/// What a process wrote, line by line.
#[derive(Debug, Default)]
struct Lines {
    lines: Mutex<Vec<String>>,
    news: Condvar,
}

impl Lines {
    fn lock(&self) -> MutexGuard<'_, Vec<String>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The end of what a process wrote, for messages: a verifier's log has ten thousand lines.
fn last(lines: &[String]) -> String {
    const AT_MOST: usize = 40;
    let (omitted, rest) = lines.split_at(lines.len().saturating_sub(AT_MOST));
    let mut text = rest.join("\n");
    if !omitted.is_empty() {
        text.insert_str(0, &format!("({} lines omitted)\n", omitted.len()));
    }
    text
}

/// A child process whose output is collected. Dropping it kills it.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    lines: Arc<Lines>,
    readers: Vec<JoinHandle<()>>,
    started: Instant,
}

/// A process that has ended.
#[derive(Clone, Debug)]
pub struct Finished {
    /// How.
    pub status: ExitStatus,
    /// What it wrote to either output.
    pub output: String,
    /// How long it ran.
    pub duration: Duration,
}

impl Finished {
    /// Its exit status was 0.
    #[must_use]
    pub fn is_success(&self) -> bool {
        self.status.success()
    }

    /// The signal that ended it.
    #[must_use]
    pub fn signal(&self) -> Option<i32> {
        self.status.signal()
    }
}

impl Process {
    /// Starts a command. `name` is for messages.
    ///
    /// # Errors
    /// Where it cannot be started.
    pub fn spawn(name: impl Into<String>, mut command: Command) -> Result<Process> {
        let name = name.into();
        // What is looked for is text, and the daemon would write JSON into a pipe.
        if !command.get_envs().any(|(key, _)| key == LOG_FORMAT) {
            command.env(LOG_FORMAT, "text");
        }
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {name} ({})", command.get_program().display()))?;
        let lines = Arc::new(Lines::default());
        let pipes: [Option<Box<dyn Read + Send>>; 2] = [
            child.stdout.take().map(|pipe| Box::new(pipe) as _),
            child.stderr.take().map(|pipe| Box::new(pipe) as _),
        ];
        let readers = pipes
            .into_iter()
            .flatten()
            .map(|pipe| {
                let lines = Arc::clone(&lines);
                thread::spawn(move || {
                    let mut pipe = BufReader::new(pipe);
                    let mut line = Vec::new();
                    while pipe.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
                        lines.lock().push(String::from_utf8_lossy(&line).trim_end().to_owned());
                        lines.news.notify_all();
                        line.clear();
                    }
                })
            })
            .collect();
        Ok(Process { name, child, lines, readers, started: Instant::now() })
    }

    /// What it has written so far.
    #[must_use]
    pub fn output(&self) -> String {
        self.lines.lock().join("\n")
    }

    /// Its process number.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line with this text.
    ///
    /// # Errors
    /// Where the process ends before, or none comes in time.
    pub fn wait_for_line(&mut self, text: &str, deadline: Duration) -> Result<String> {
        let end = Instant::now() + deadline;
        loop {
            // In this order: what it wrote before it ended is not missed.
            let ended = self.child.try_wait()?;
            if ended.is_some() {
                self.readers.drain(..).for_each(|reader| drop(reader.join()));
            }
            let lines = self.lines.lock();
            if let Some(line) = lines.iter().find(|line| line.contains(text)) {
                return Ok(line.clone());
            }
            if let Some(status) = ended {
                bail!("{} ended ({status}) without saying \"{text}\":\n{}", self.name, last(&lines));
            }
            if Instant::now() >= end {
                bail!("{} did not say \"{text}\" within {deadline:?}:\n{}", self.name, last(&lines));
            }
            // Ending closes the pipes but wakes nobody.
            drop(self.lines.news.wait_timeout(lines, Duration::from_millis(20)));
        }
    }

    /// Whether it has ended.
    ///
    /// # Errors
    /// Where the system does not tell.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// Where it does not end in time; it is killed then.
    pub fn wait(&mut self, deadline: Duration) -> Result<Finished> {
        let end = Instant::now() + deadline;
        while Instant::now() < end {
            if let Some(status) = self.child.try_wait()? {
                let duration = self.started.elapsed();
                self.readers.drain(..).for_each(|reader| drop(reader.join()));
                return Ok(Finished { status, output: self.output(), duration });
            }
            thread::sleep(GLANCE);
        }
        self.kill();
        bail!("{} was still running after {deadline:?}; it wrote:\n{}", self.name, last(&self.lines.lock()))
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// Where it has ended and was waited for.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(Pid::from_raw(i32::try_from(self.pid())?), signal)
            .with_context(|| format!("cannot send {signal} to {}", self.name))
    }

    /// Kills it and waits for its end.
    pub fn kill(&mut self) {
        // Both fail only where it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Memory that it holds in RAM, in bytes.
    ///
    /// # Errors
    /// Where it has ended.
    pub fn resident_bytes(&self) -> Result<u64> {
        let path = format!("/proc/{}/status", self.pid());
        let status = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS line")?;
        let kibibytes: u64 =
            line.trim().trim_end_matches(" kB").parse().context("a VmRSS line without a number")?;
        Ok(kibibytes * 1024)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The message names this rank: `rank 1`, `ranks 0, 1 and 2`.
#[must_use]
pub fn names(message: &str, rank: usize) -> bool {
    ["rank", "ranks"].iter().any(|word| {
        message.match_indices(&format!("{word} ")).any(|(at, found)| {
            let rest = &message[at + found.len()..];
            rest.split([',', ' ', '.', ':', ';', '\n'])
                .filter(|word| !word.is_empty())
                .take_while(|word| word.parse::<usize>().is_ok() || *word == "and")
                .any(|word| word == rank.to_string())
        })
    })
}

/// Waits until `condition` holds.
///
/// # Errors
/// Where it does not within the deadline, with `what` that was.
pub fn wait_until(what: &str, deadline: Duration, mut condition: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + deadline;
    while !condition()? {
        ensure!(Instant::now() < end, "it took more than {deadline:?} until {what}");
        thread::sleep(GLANCE);
    }
    Ok(())
}

/// Options of `paatp run`.
#[derive(Clone, Debug)]
pub struct AggregatorOptions {
    /// Name of the job.
    pub job: String,
    /// Number of ranks; 0 for no job but those of a file.
    pub world: usize,
    /// Most lanes in a chunk.
    pub lanes: usize,
    /// Slots in the ring.
    pub slots: u32,
    /// Window in chunks.
    pub window: u16,
    /// `native`, `generic` or `auto`.
    pub xdp_mode: &'static str,
    /// Where it pins what it loads; nowhere if absent.
    pub pins: Option<Arc<Pins>>,
    /// More arguments.
    pub more: Vec<String>,
}

impl AggregatorOptions {
    /// A job `lab` of so many ranks in native mode.
    #[must_use]
    pub fn world(world: usize) -> AggregatorOptions {
        AggregatorOptions {
            job: "lab".into(),
            world,
            lanes: 352,
            slots: 256,
            window: 64,
            xdp_mode: "native",
            pins: None,
            more: Vec::new(),
        }
    }

    /// How the job's operations are cut into chunks.
    #[must_use]
    pub const fn chunking(&self) -> Chunking {
        Chunking { lanes: self.lanes, window: self.window as usize }
    }

    /// The arguments for `paatp`.
    #[must_use]
    pub fn args(&self, interface: &str) -> Vec<String> {
        let mut args: Vec<String> =
            ["run", "--iface", interface, "--xdp-mode", self.xdp_mode].map(Into::into).into();
        args.extend(["--port".into(), PORT.to_string()]);
        if self.world > 0 {
            args.extend(["--job".into(), self.job.clone(), "--world".into(), self.world.to_string()]);
            args.extend(["--lanes".into(), self.lanes.to_string()]);
            args.extend([
                "--slots".into(),
                self.slots.to_string(),
                "--window".into(),
                self.window.to_string(),
            ]);
        }
        if !self.more.iter().any(|arg| arg == "--memory") {
            // No slots but the job's: tests that damage slots are to hit those in use.
            args.extend(["--memory".into(), "0".into()]);
        }
        if !self.more.iter().any(|arg| arg == "--drain-timeout") {
            // Nobody waits for workers that were killed.
            args.extend(["--drain-timeout".into(), "0".into()]);
        }
        args.extend(self.more.iter().cloned());
        args
    }
}

/// A running `paatp run`.
#[derive(Debug)]
pub struct Aggregator {
    /// The process.
    pub process: Process,
    /// Its line that says "ready".
    pub ready: String,
}

impl Aggregator {
    /// Starts it in the lab and waits until workers may join.
    ///
    /// # Errors
    /// With its output, where it does not get ready.
    pub fn start(lab: &Lab, options: &AggregatorOptions) -> Result<Aggregator> {
        Aggregator::watch(Aggregator::spawn(lab, options)?)
    }

    /// Starts it in the lab.
    ///
    /// # Errors
    /// Where it cannot be started.
    pub fn spawn(lab: &Lab, options: &AggregatorOptions) -> Result<Process> {
        Aggregator::spawn_at(&lab.aggregator, options)
    }

    /// Starts it on a host.
    ///
    /// # Errors
    /// Where it cannot be started.
    pub fn spawn_at(host: &Host, options: &AggregatorOptions) -> Result<Process> {
        let mut command = host.namespace.command(paatp()?);
        command.args(options.args(&host.interface));
        if let Some(pins) = &options.pins {
            pins.enter(&mut command);
        }
        Process::spawn("the aggregator", command)
    }

    /// Waits until a process that is a `paatp run` lets workers join.
    ///
    /// # Errors
    /// With its output, where it does not get ready.
    pub fn watch(mut process: Process) -> Result<Aggregator> {
        let ready = process.wait_for_line(READY, START_DEADLINE)?;
        Ok(Aggregator { process, ready })
    }

    /// Asks it to stop, as `SIGTERM` does, and waits for its end.
    ///
    /// # Errors
    /// Where it does not end within a few seconds.
    pub fn stop(mut self) -> Result<Finished> {
        if !self.process.has_ended()? {
            self.process.signal(Signal::SIGTERM)?;
        }
        self.process.wait(Duration::from_secs(10))
    }
}

/// Options of `paatp allreduce`.
#[derive(Clone, Debug)]
pub struct WorkerCommand {
    /// Name of the job.
    pub job: String,
    /// Its rank.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// Address of the aggregator.
    pub aggregator: IpAddr,
    /// Safetensors file that it contributes.
    pub input: PathBuf,
    /// Safetensors file that it writes.
    pub output: PathBuf,
    /// JSON file that it writes.
    pub report: PathBuf,
    /// What is computed.
    pub reduction: Reduction,
    /// How it sends and receives: `udp`, `af-xdp` or `auto`; empty to say nothing of it.
    pub io: &'static str,
    /// Rate controller; empty for the one that `paatp` takes by itself.
    pub controller: &'static str,
    /// The program, if it is another build than [`paatp`] finds.
    pub program: Option<PathBuf>,
    /// Longest time without progress.
    pub timeout: Duration,
}

impl WorkerCommand {
    /// For the job `lab`; files are called after the rank, in `folder`.
    #[must_use]
    pub fn new(lab: &Lab, family: Family, rank: usize, world: usize, folder: &Path) -> WorkerCommand {
        WorkerCommand {
            job: "lab".into(),
            rank,
            world,
            aggregator: lab.aggregator.address(family),
            input: folder.join(format!("input-rank{rank}.safetensors")),
            output: folder.join(format!("output-rank{rank}.safetensors")),
            report: folder.join(format!("report-rank{rank}.json")),
            reduction: Reduction::Sum,
            io: "udp",
            controller: "",
            program: None,
            timeout: Duration::from_secs(30),
        }
    }

    /// The arguments for `paatp`.
    #[must_use]
    pub fn args(&self) -> Vec<String> {
        let aggregator = SocketAddr::new(self.aggregator, PORT).to_string();
        let timeout = format!("{}ms", self.timeout.as_millis());
        let pairs = [
            ("--job", self.job.clone()),
            ("--rank", self.rank.to_string()),
            ("--world", self.world.to_string()),
            ("--aggregator", aggregator),
            ("--input", self.input.display().to_string()),
            ("--output", self.output.display().to_string()),
            ("--report", self.report.display().to_string()),
            ("--reduction", self.reduction.name().to_owned()),
            ("--io", self.io.to_owned()),
            ("--controller", self.controller.to_owned()),
            ("--timeout", timeout),
        ];
        std::iter::once("allreduce".to_owned())
            .chain(
                pairs
                    .into_iter()
                    .filter(|(_, value)| !value.is_empty())
                    .flat_map(|(name, value)| [name.to_owned(), value]),
            )
            .collect()
    }

    /// Starts the worker in a host's namespace.
    ///
    /// # Errors
    /// Where it cannot be started.
    pub fn spawn(&self, host: &Host) -> Result<Process> {
        let program = self.program.clone().map_or_else(paatp, Ok)?;
        let mut command = host.namespace.command(program);
        command.args(self.args());
        Process::spawn(format!("rank {}", self.rank), command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found() {
        assert!(names("missing: rank 1", 1) && names("ranks 0, 1 did", 1) && names("ranks 0 and 1.", 1));
        assert!(!names("rank 0 is 1", 1) && !names("rank 11", 1));
    }
}
