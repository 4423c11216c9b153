//! `paatp capture`: some of the packets between workers and aggregator, in a file for Wireshark.
//!
//! They come from a packet socket, on a worker's host. (On an aggregator's interface there is nothing to see: its XDP program
//! takes requests and sends answers before any socket.) The socket changes and holds up no packet: what does not fit into its
//! queue is counted as lost.

mod choice;
pub mod pcapng;
mod socket;

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, BufWriter, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use paatp_common::limits::MAX_PORTS;
use paatp_common::wire::HEADER_BYTES;
use thiserror::Error;
use tracing::warn;

use crate::cli::Credentials;
use crate::client::escape;
use crate::client::job::{Api, JobError};
use crate::control::DEFAULT_PORT;
use crate::control::protocol::JobStatus;
use crate::duration;
use crate::engine::{Interface, InterfaceError, query};

use choice::{EVERY_PACKET, RATE_WINDOW_NS, Settings};
use pcapng::{Packet, Totals, Writer};
use socket::Socket;
pub use socket::SocketError;

/// Longest time until what came is in the file, and the time is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Bursts that are read when it is over: as many as the queue holds, at 768 bytes of the kernel's for the shortest packet.
const LAST_BURSTS: usize = socket::QUEUE_BYTES / 768 / socket::BURST + 1;

/// Most bytes of a datagram: of one that fills an Ethernet jumbo frame.
const MOST_BYTES: i64 = 9000;

/// After the options of `paatp capture`.
pub const AFTER_HELP: &str = "\
Run it on a worker's host: it sees what that worker sends and what it gets, but nothing of `--io af-xdp`. On the \
aggregator's own interface there is nothing to see: its XDP program answers before any socket. A sampled request is there \
with its answer. Values do not get into the file unless --snaplen is raised. Needs root or CAP_NET_RAW.

Example:
  paatp capture eth0 -w trouble.pcapng --sample 100 --seconds 30
  paatp capture eth0 -w trouble.pcapng --job train --control 10.0.0.1 --count 10000
  paatp capture eth0 -w - --rate 1000 | wireshark -k -i -

Exit status: 0 the file is whole, 1 it failed (standard error says why and what to do), 2 it was called wrongly.";

/// `paatp capture`
#[derive(Clone, Debug, Args)]
pub struct Capture {
    /// Network interface of a worker's host towards the aggregator, for example eth0.
    pub iface: String,
    /// File to write, in the pcapng format, readable by its owner only; `-` stands for standard output.
    #[arg(short, long, value_name = "FILE")]
    pub write: PathBuf,
    /// Take one request in N, with its answer.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub sample: u32,
    /// Take at most so many packets a second, as they come.
    #[arg(long, value_name = "R", conflicts_with = "sample", value_parser = clap::value_parser!(u32).range(10..))]
    pub rate: Option<u32>,
    /// Take packets of this job only; its number is asked of the aggregator at --control.
    #[arg(long, value_name = "NAME")]
    pub job: Option<String>,
    /// Stop after so many packets.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Stop after this time: 30s, 500ms, 2m [default: at Ctrl-C].
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    pub seconds: Option<Duration>,
    /// Bytes of each datagram that are kept, of which the first 64 are the header; the rest are values.
    #[arg(long, value_name = "BYTES", default_value_t = HEADER_BYTES as u32, value_parser = clap::value_parser!(u32).range(1..=MOST_BYTES))]
    pub snaplen: u32,
    /// First UDP port of the aggregator.
    #[arg(long, default_value_t = DEFAULT_PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub port: u16,
    /// Number of its UDP ports.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_PORTS)))]
    pub ports: u16,
    /// Address of the aggregator's control server, to ask for the job.
    #[arg(
        long,
        value_name = "ADDR[:PORT]",
        env = "PAATP_CONTROL",
        hide_env_values = true,
        default_value = "127.0.0.1"
    )]
    pub control: String,
    /// Who it is.
    #[command(flatten)]
    pub credentials: Credentials,
}

/// Nothing is captured, or not everything.
#[derive(Debug, Error)]
pub enum CaptureError {
    /// The interface.
    #[error(transparent)]
    Interface(#[from] InterfaceError),
    /// The packet socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The aggregator that knows the job.
    #[error("cannot find out the number of job `{job}`; without --job all jobs are captured")]
    Aggregator {
        /// The job.
        job: String,
        /// Why.
        #[source]
        source: Box<JobError>,
    },
    /// The file.
    #[error("cannot write {path}; what was captured before is in it")]
    Write {
        /// The file.
        path: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file cannot be made.
    #[error("cannot create {path}: it must be a new or an ordinary file in a folder that exists")]
    Create {
        /// The file.
        path: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Signals.
    #[error("cannot take over signals")]
    Signals(#[from] nix::Error),
}

/// What the socket counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    totals: Totals,
    beyond_rate: u64,
}

/// Takes packets.
struct Sink<'a> {
    writer: &'a mut Writer<Box<dyn Write>>,
    path: &'a Path,
    written: u64,
    most: u64,
}

impl Sink<'_> {
    fn is_full(&self) -> bool {
        self.written >= self.most
    }

    fn take(&mut self, packet: &Packet<'_>) -> Result<(), CaptureError> {
        if !self.is_full() {
            self.writer.packet(packet).map_err(|source| write_failed(self.path, source))?;
            self.written += 1;
        }
        Ok(())
    }
}

/// Captures until it is to end; says on standard error what was done.
///
/// # Errors
/// If packets cannot be seen, or the file not written.
pub fn run(args: &Capture) -> Result<(), CaptureError> {
    let interface = Interface::look(&args.iface)?;
    let settings = settings(args)?;
    let mut socket = Socket::open(&interface, settings)?;
    // Before signals are kept: a pipe that nobody reads waits for its reader, and Ctrl-C must end that.
    let output = create(&args.write)?;
    // Before the first packet is written, so that no signal ends it without the file's last block.
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGINT);
    signals.add(Signal::SIGTERM);
    signals.thread_block()?;
    let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;

    if query(interface.index).is_ok_and(|state| state.xdp.is_some()) {
        warn!(
            interface = args.iface,
            "an XDP program is on this interface: what it takes and sends, as an aggregator's does and a worker's with \
             AF_XDP, passes no socket and is not captured"
        );
    }
    let failed = |source| write_failed(&args.write, source);
    let mut writer = Writer::new(output, &args.iface, "packet socket").map_err(failed)?;
    writer.flush().map_err(failed)?;
    eprintln!("capturing at {}; Ctrl-C ends it", args.iface);

    let mut sink =
        Sink { writer: &mut writer, path: &args.write, written: 0, most: args.count.unwrap_or(u64::MAX) };
    let reason = follow(&mut socket, &mut sink, args.seconds, &signals)?;
    let written = sink.written;
    let counts = socket.counts();
    writer.finish(counts.totals).map_err(failed)?;
    eprintln!("{}", summary(args, written, counts, reason.as_deref()));
    Ok(())
}

/// Writes packets until time, number or a signal ends it, or the interface is gone; says why in that case.
fn follow(
    socket: &mut Socket,
    sink: &mut Sink<'_>,
    limit: Option<Duration>,
    signals: &SignalFd,
) -> Result<Option<String>, CaptureError> {
    let end = limit.map(|limit| Instant::now() + limit);
    loop {
        let mut waits =
            [PollFd::new(signals.as_fd(), PollFlags::POLLIN), PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
        let left = end.map_or(LOOK_INTERVAL, |end| end.saturating_duration_since(Instant::now()));
        // Rounded up: a wait of less than a millisecond would be none.
        let wait = LOOK_INTERVAL.min(left).as_millis() as u32 + 1;
        match poll(&mut waits, PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX)) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let [signal, _] = waits;
        let over = signal.any() == Some(true) || end.is_some_and(|end| Instant::now() >= end);
        // At the end the queue is emptied, once.
        for _ in 0..if over { LAST_BURSTS } else { 1 } {
            if !socket.drain(sink)? {
                break;
            }
        }
        sink.writer.flush().map_err(|error| write_failed(sink.path, error))?;
        if over || sink.is_full() {
            return Ok(None);
        }
        if let Some(reason) = socket.end() {
            return Ok(Some(reason));
        }
    }
}

fn settings(args: &Capture) -> Result<Settings, CaptureError> {
    let windows_a_second = (1_000_000_000 / RATE_WINDOW_NS) as u32;
    let job = args.job.as_deref().map(|name| number_of(args, name)).transpose()?;
    Ok(Settings {
        first_port: args.port,
        last_port: last_port(args),
        job,
        threshold: if args.rate.is_some() { EVERY_PACKET } else { Settings::one_in(args.sample) },
        window_packets: args.rate.map_or(0, |rate| rate / windows_a_second),
        keep: args.snaplen as usize,
    })
}

/// The number that a job has in packets.
fn number_of(args: &Capture, name: &str) -> Result<u16, CaptureError> {
    let status = Api::open(&args.control, &args.credentials, false)
        .and_then(|api| api.get::<JobStatus>(&format!("/v1/jobs/{}", escape(name))));
    status
        .map(|status| status.job)
        .map_err(|source| CaptureError::Aggregator { job: name.into(), source: Box::new(source) })
}

/// The last of the ports, of which there are none beyond 65535.
const fn last_port(args: &Capture) -> u16 {
    args.port.saturating_add(args.ports - 1)
}

/// Where the capture is written to.
fn create(path: &Path) -> Result<Box<dyn Write>, CaptureError> {
    if path == Path::new("-") {
        return Ok(Box::new(BufWriter::new(io::stdout())));
    }
    let create = || -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let file = options.open(path)?;
        // An older file of this name may be open to others; a device is not ours to change.
        if file.metadata()?.is_file() {
            file.set_permissions(Permissions::from_mode(0o600))?;
        }
        Ok(file)
    };
    let file =
        create().map_err(|source| CaptureError::Create { path: path.display().to_string(), source })?;
    Ok(Box::new(BufWriter::new(file)))
}

fn write_failed(path: &Path, source: io::Error) -> CaptureError {
    CaptureError::Write { path: path.display().to_string(), source }
}

fn summary(args: &Capture, written: u64, counts: Counts, reason: Option<&str>) -> String {
    let Counts { totals: Totals { seen, chosen, lost }, beyond_rate } = counts;
    let ports = match args.ports {
        1 => args.port.to_string(),
        _ => format!("{}-{}", args.port, last_port(args)),
    };
    let mut text = format!(
        "{written} packets written to {}; seen with UDP port {ports}: {seen}, asked for: {chosen}, lost: {lost}",
        args.write.display()
    );
    if args.rate.is_some() {
        text.push_str(&format!(", beyond the rate: {beyond_rate}"));
    }
    if let Some(reason) = reason {
        text.push_str(&format!("\nended early: {reason}"));
    }
    if seen == 0 {
        text.push_str(
            "\nno packet had such a port: is a job running, and are --port and --ports those of `paatp run`?",
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_their_owners() {
        let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
        let path = folder.path().join("file");
        assert!(std::fs::write(&path, "old").is_ok());
        assert!(std::fs::set_permissions(&path, Permissions::from_mode(0o644)).is_ok());
        assert!(create(&path).is_ok());
        let metadata = std::fs::metadata(&path).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!((metadata.permissions().mode() & 0o777, metadata.len()), (0o600, 0));
        let link = folder.path().join("link");
        assert!(std::os::unix::fs::symlink(&path, &link).is_ok());
        assert!(matches!(create(&link), Err(CaptureError::Create { .. })));
    }
}
