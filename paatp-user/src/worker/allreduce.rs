//! `paatp allreduce`: one file, one operation.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use paatp_common::wire::HEADER_BYTES;
use paatp_transport::words::Span;
use paatp_transport::{Membership, MembershipError, OperationError, Settings, Worker};
use thiserror::Error;
use tracing::{info, warn};

use crate::cli::Allreduce;
use crate::client::{CredentialError, Server};
use crate::control::protocol::Grant;

use super::client::{self, ClientError};
use super::drive::{self, Clock, DriveError, Outcome, Path};
use super::endpoint::{Endpoint, EndpointError};
use super::io::{Io, IoError, IoReport};
use super::report::{Report, SCHEMA_VERSION, StatisticsReport};
use super::socket::{Buffers, DataSocket, SocketError, Target};
use super::tensors::{self, Layout, Output, TensorError};

/// Shortest time between two updates of the progress bar.
const BAR_INTERVAL: Duration = Duration::from_millis(100);

/// An all-reduce failed; the output file is as it was before.
#[derive(Debug, Error)]
pub enum AllreduceError {
    /// The aggregator's address cannot be read.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// Token or certificates cannot be used.
    #[error(transparent)]
    Credentials(#[from] CredentialError),
    /// A tensor file cannot be used.
    #[error(transparent)]
    Tensors(#[from] TensorError),
    /// The job cannot be joined.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The grant cannot be worked with.
    #[error("the aggregator's grant cannot be used; run the same version of paatp on both")]
    Membership(#[from] MembershipError),
    /// The socket cannot be made.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The driver that was asked for cannot be had.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The socket failed, or packets do not fit.
    #[error(transparent)]
    Drive(#[from] DriveError),
    /// The operation failed.
    #[error("the all-reduce of job `{job}` failed at rank {rank}{}", .hint.as_ref().map(|hint| format!("\n{hint}")).unwrap_or_default())]
    Operation {
        /// The job.
        job: String,
        /// This rank.
        rank: u8,
        /// What the network said.
        hint: Option<String>,
        /// Why.
        #[source]
        source: OperationError,
    },
    /// The report cannot be written; the result is.
    #[error(
        "the result is written, but not the report {path}; check that its folder exists and may be written to"
    )]
    Report {
        /// The report.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// Runs the command; returns its report, which is written already if a file was named.
///
/// # Errors
/// What failed, why and what to do; the output file is then as it was before.
pub fn allreduce(args: &Allreduce) -> Result<Report, AllreduceError> {
    let endpoint = Endpoint::resolve(&args.aggregator)?;
    let server = Server::new(endpoint.clone(), &args.credentials)?;
    let (layout, input) = tensors::read(&args.input)?;
    // Before joining: whoever joins and then fails makes all others wait.
    let output = Output::create(&args.output)?;
    let digest = layout.digest(args.reduction.name());
    let (rank, world) = (u32::from(args.rank), u32::from(args.world));
    let waiting = wait_sign(args);
    let grant = client::join(&server, &args.job, rank, world, args.timeout, &digest, &waiting);
    waiting.finish_and_clear();
    let grant = grant?;
    info!(job = args.job, rank, generation = grant.generation, "joined");
    let target = Target::new(endpoint.address, grant.port_base, grant.ports);
    let datagram = HEADER_BYTES + 4 * usize::from(grant.lanes);
    let buffers = Buffers { window: grant.window, datagram };
    let socket = DataSocket::open(target, buffers)?;
    let path = Path { aggregator: target.address.ip(), mtu: socket.path_mtu() };
    path.check_lanes(grant.lanes)?;
    if socket.local().ip() == path.aggregator {
        warn!(
            "the aggregator's address is this machine's own: packets to it may never pass the interface that `paatp run` is attached to"
        );
    }
    let mut io = Io::open(args.io, socket, buffers)?;
    let settings = Settings { timeout: args.timeout, linger: args.timeout, ..Settings::default() };
    let membership = membership(&grant, args.rank)?;
    let controller = args.controller.controller(&membership);
    let mut worker = Worker::with_controller(membership, settings, controller)?;
    let clock = Clock::default();
    let start = Instant::now();
    worker.all_reduce(clock.now(), args.reduction.reduction(), input);
    let outcome = drive_with_bar(&mut worker, &mut io, path, clock)?;
    let io_got = io.report();
    // Closed at once: what still comes is not to lie in its queue unread.
    drop(io);
    let seconds = start.elapsed().as_secs_f64();
    let Outcome { result, complete, trouble } = outcome;
    let tensors = result.map_err(|source| AllreduceError::Operation {
        job: args.job.clone(),
        rank: args.rank,
        hint: trouble
            .map(|error| drive::trouble_in_words(&error, path.aggregator))
            .or_else(|| why(&server, args, grant.generation, &source)),
        source,
    })?;
    if !complete {
        warn!(
            "this rank's result is complete, but it left after {} without knowing that all other ranks have theirs; see whether they ended well",
            Span(args.timeout)
        );
    }
    // The result first: the control server may be slow to answer.
    let sha256 = output.finish(&layout, &tensors)?;
    let patience = client::LEAVE_PATIENCE.min(args.timeout);
    client::leave(&server, &args.job, rank, grant.generation, patience);
    let end = End { seconds, sha256, all_ranks_complete: complete, io: io_got };
    let report = report(args, &grant, &layout, &worker, end);
    write_report(args, &report)?;
    Ok(report)
}

/// What the aggregator knows of a generation that has ended, where the network does not tell.
fn why(server: &Server, args: &Allreduce, generation: u32, error: &OperationError) -> Option<String> {
    use OperationError::{NoAnswer, Rejoin, Timeout};
    matches!(error, NoAnswer { .. } | Rejoin | Timeout { .. })
        .then(|| client::fate(server, &args.job, generation))
        .flatten()
}

/// # Errors
/// If what is told of other nodes has no place for this rank.
fn membership(grant: &Grant, rank: u8) -> Result<Membership, MembershipError> {
    let seating = grant
        .nodes
        .as_ref()
        .map(|nodes| nodes.seating(rank, grant.world).ok_or(MembershipError::Seating { rank }));
    Ok(Membership {
        job: grant.job,
        generation: grant.generation,
        nonce: grant.nonce,
        rank,
        world: grant.world,
        lanes: grant.lanes,
        window: grant.window,
        slots: grant.slots,
        seating: seating.transpose()?,
    })
}

/// Shows what is waited for before the all-reduce, on a terminal only.
fn wait_sign(args: &Allreduce) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let sign = ProgressBar::new_spinner();
    sign.set_message(format!(
        "rank {} waits for all {} ranks of job `{}` to join (at most {})",
        args.rank,
        args.world,
        args.job,
        Span(args.timeout)
    ));
    sign.enable_steady_tick(BAR_INTERVAL);
    sign
}

/// What the bar says of a worker that has delivered so many of its chunks.
const fn phase_in_words(chunks: (u64, u64)) -> &'static str {
    if chunks.0 < chunks.1 { "" } else { "all here; waiting until every other rank has its result" }
}

/// Drives the worker and shows how far it is, on a terminal only.
fn drive_with_bar(worker: &mut Worker, io: &mut Io, path: Path, clock: Clock) -> Result<Outcome, DriveError> {
    if !std::io::stderr().is_terminal() {
        return io.drive(worker, path, clock, &mut |_| {});
    }
    let style = ProgressStyle::with_template(
        "all-reduce {bar:30} {percent:>3} %  {elapsed} elapsed, about {eta} left  {msg}",
    );
    let bar = ProgressBar::new(worker.chunks().1);
    if let Ok(style) = style {
        bar.set_style(style);
    }
    let mut shown = Instant::now();
    let outcome = io.drive(worker, path, clock, &mut |worker| {
        if shown.elapsed() >= BAR_INTERVAL {
            shown = Instant::now();
            bar.set_position(worker.chunks().0);
            bar.set_message(phase_in_words(worker.chunks()));
        }
    });
    bar.finish_and_clear();
    outcome
}

/// How it went.
struct End {
    seconds: f64,
    sha256: String,
    all_ranks_complete: bool,
    io: IoReport,
}

fn report(args: &Allreduce, grant: &Grant, layout: &Layout, worker: &Worker, end: End) -> Report {
    let End { seconds, sha256, all_ranks_complete, io } = end;
    let statistics = worker.statistics();
    Report {
        schema_version: SCHEMA_VERSION,
        job: args.job.clone(),
        rank: args.rank,
        world: grant.world,
        total: worker.membership().total(),
        generation: grant.generation,
        reduction: args.reduction.name().into(),
        tensors: layout.tensors(),
        elements: layout.elements(),
        tensor_bytes: layout.bytes(),
        chunks: worker.chunks().0,
        bytes_sent: statistics.bytes_sent,
        bytes_received: statistics.bytes_received,
        seconds,
        throughput_bytes_per_second: layout.bytes() as f64 / seconds.max(f64::MIN_POSITIVE),
        sha256,
        all_ranks_complete,
        synchronisation: worker.synchronisation().into(),
        io,
        statistics: StatisticsReport::from(statistics),
    }
}

fn write_report(args: &Allreduce, report: &Report) -> Result<(), AllreduceError> {
    let Some(path) = &args.report else { return Ok(()) };
    let failed = |source| AllreduceError::Report { path: path.clone(), source };
    let mut text = serde_json::to_string_pretty(report).map_err(|error| failed(error.into()))?;
    text.push('\n');
    std::fs::write(path, text).map_err(failed)
}
