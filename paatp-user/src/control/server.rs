//! The control server: joins are held open until their generation is formed.

use std::collections::BTreeMap;
use std::future::Future;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{ConnectInfo, DefaultBodyLimit, Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, post};
use paatp_common::job::JobEntry;
use paatp_transport::words::{Ranks, Span};
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tracing::{debug, error, info, warn};

use crate::engine::{Aggregator, EngineError, Interface, ProgressSnapshot};

use super::membership::{Entropy, Formation, JoinError, Membership, WaiterId};
use super::protocol::{Grant, JobDetails, JobList, JoinRequest, RANKS_MISSING, RankStatus, Refused};

/// Largest body of a request, in bytes: a join has under 200.
const MAX_BODY_BYTES: usize = 16 << 10;

/// How long an address may take to become usable (IPv6 duplicate address detection takes one to two seconds).
const BIND_PATIENCE: Duration = Duration::from_secs(4);

/// Pause between two attempts to bind.
const BIND_PAUSE: Duration = Duration::from_millis(100);

/// Where formations go, and progress comes from.
pub trait Tables: Send {
    /// Puts a generation in force.
    ///
    /// # Errors
    /// If a table cannot be written.
    fn install(&mut self, formation: &Formation) -> Result<(), EngineError>;

    /// How far a job is, and its slots in use.
    ///
    /// # Errors
    /// If a table cannot be read.
    fn progress(&self, number: u16, entry: &JobEntry)
    -> Result<(ProgressSnapshot, Option<u32>), EngineError>;
}

impl Tables for Aggregator {
    fn install(&mut self, formation: &Formation) -> Result<(), EngineError> {
        Aggregator::install(self, formation)
    }

    fn progress(
        &self,
        number: u16,
        entry: &JobEntry,
    ) -> Result<(ProgressSnapshot, Option<u32>), EngineError> {
        let progress = Aggregator::progress(self, number, entry)?;
        let used = self.slots_in_use(entry, progress.min_ack)?;
        Ok((progress, used))
    }
}

/// Why the server cannot listen.
#[derive(Debug, Error)]
pub enum ListenError {
    /// The port is taken.
    #[error(
        "the control server cannot listen on TCP {0}: the port is in use; is another `paatp run` there? Choose another one with --port"
    )]
    InUse(SocketAddr),
    /// Anything else.
    #[error("the control server cannot listen on TCP {address}; is the address still on the interface?")]
    Other {
        /// Where.
        address: SocketAddr,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// Opens the port on each address that the program answers for, and on loopback where that is up.
///
/// # Errors
/// If an address of the interface cannot be bound in time.
pub async fn listen(interface: &Interface, port: u16) -> Result<Vec<TcpListener>, ListenError> {
    let mut listeners = Vec::new();
    for address in interface.served() {
        let address = match address {
            IpAddr::V6(v6) if v6.is_unicast_link_local() => {
                SocketAddr::V6(SocketAddrV6::new(*v6, port, 0, interface.index))
            }
            other => SocketAddr::new(*other, port),
        };
        listeners.push(bind(address).await?);
    }
    for loopback in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
        if interface.served().contains(&loopback) {
            continue;
        }
        match TcpListener::bind(SocketAddr::new(loopback, port)).await {
            Ok(listener) => listeners.push(listener),
            Err(error) => debug!(%loopback, %error, "not listening"),
        }
    }
    Ok(listeners)
}

async fn bind(address: SocketAddr) -> Result<TcpListener, ListenError> {
    let deadline = Instant::now() + BIND_PATIENCE;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
                return Err(ListenError::InUse(address));
            }
            // An IPv6 address that is still tentative.
            Err(error)
                if error.kind() == std::io::ErrorKind::AddrNotAvailable && Instant::now() < deadline =>
            {
                tokio::time::sleep(BIND_PAUSE).await;
            }
            Err(source) => return Err(ListenError::Other { address, source }),
        }
    }
}

type Answer = Result<Grant, ApiError>;

struct Inner {
    membership: Membership,
    tables: Arc<Mutex<dyn Tables>>,
    waiting: BTreeMap<WaiterId, oneshot::Sender<Answer>>,
}

/// The server's state, shared by all connections.
#[derive(Clone)]
pub struct Control(Arc<Mutex<Inner>>);

impl Control {
    /// A server for these jobs.
    #[must_use]
    pub fn new(membership: Membership, tables: Arc<Mutex<dyn Tables>>) -> Control {
        Control(Arc::new(Mutex::new(Inner { membership, tables, waiting: BTreeMap::new() })))
    }

    /// Answers requests on one listener for ever.
    ///
    /// # Errors
    /// If the listener fails for good.
    pub async fn serve(self, listener: TcpListener) -> std::io::Result<()> {
        axum::serve(listener, router(self).into_make_service_with_connect_info::<SocketAddr>()).await
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // No code panics while it holds the lock; if one did, the tables are still those of a complete step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The routes.
fn router(control: Control) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/v1/jobs", get(list))
        .route("/v1/jobs/{name}", get(details))
        .route("/v1/jobs/{name}/join", post(join))
        .fallback(|| async {
            ApiError::new(
                StatusCode::NOT_FOUND,
                "not_found",
                "no such page; there are /healthz, /v1/jobs, /v1/jobs/NAME and POST /v1/jobs/NAME/join",
            )
        })
        .method_not_allowed_fallback(|| async {
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "bad_method", "this page takes another method")
        })
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(control)
}

/// An answer that is no success.
#[derive(Clone, Debug)]
struct ApiError {
    status: StatusCode,
    body: Refused,
}

impl ApiError {
    fn new(status: StatusCode, error: &str, message: impl Into<String>) -> ApiError {
        let body = Refused { error: error.into(), message: message.into(), missing_ranks: Vec::new() };
        ApiError { status, body }
    }
}

impl From<JoinError> for ApiError {
    fn from(error: JoinError) -> ApiError {
        let status = match error {
            JoinError::UnknownJob { .. } => StatusCode::NOT_FOUND,
            JoinError::WorldMismatch { .. }
            | JoinError::TooLongForIpv6 { .. }
            | JoinError::RankTaken { .. }
            | JoinError::LayoutMismatch { .. } => StatusCode::CONFLICT,
            JoinError::BadProtocol(_) | JoinError::BadRank { .. } | JoinError::BadWait => {
                StatusCode::BAD_REQUEST
            }
        };
        ApiError::new(status, error.code(), error.to_string())
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "tables", error.to_string())
    }
}

impl From<BytesRejection> for ApiError {
    fn from(rejection: BytesRejection) -> ApiError {
        ApiError::new(rejection.status(), "bad_request", rejection.body_text())
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(self.body)).into_response()
    }
}

async fn list(State(control): State<Control>) -> Json<JobList> {
    Json(JobList { jobs: control.lock().membership.list() })
}

async fn details(
    State(control): State<Control>,
    Path(name): Path<String>,
) -> Result<Json<JobDetails>, ApiError> {
    let inner = control.lock();
    let (status, entry, running) = inner.membership.details(&name)?;
    let Some(running) = running else {
        return Ok(Json(JobDetails { status, ranks: Vec::new(), slots_in_use: Some(0) }));
    };
    let tables = inner.tables.lock().unwrap_or_else(PoisonError::into_inner);
    let (progress, slots_in_use) = tables.progress(status.job, &entry)?;
    let ranks =
        (0u8..).zip(&running.addresses).zip(&progress.ranks).map(|((rank, address), progress)| RankStatus {
            rank,
            address: address.to_string(),
            acknowledged: progress.acknowledged,
            contributed: progress.contributed,
        });
    Ok(Json(JobDetails { status, ranks: ranks.collect(), slots_in_use }))
}

async fn join(
    State(control): State<Control>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    Path(name): Path<String>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Grant>, ApiError> {
    let request: JoinRequest = serde_json::from_slice(&body?).map_err(|error| {
        ApiError::new(StatusCode::BAD_REQUEST, "bad_request", format!("the body is no join request: {error}"))
    })?;
    let entropy = entropy()?;
    let (mut wait, mut answer, deadline) = control.enter(&name, &request, peer.ip(), entropy)?;
    let waited = match deadline {
        Some(deadline) => tokio::time::timeout_at(deadline.into(), &mut answer).await,
        // The generation was formed at once, so the answer is there.
        None => Ok((&mut answer).await),
    };
    match waited {
        Ok(Ok(answer)) => answer.map(Json),
        Ok(Err(_closed)) => {
            Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "stopping", "the aggregator is stopping"))
        }
        Err(_elapsed) => match wait.end() {
            Some(missing) => Err(ranks_missing(&name, &request, missing)),
            // The last rank came while we gave up.
            None => answer
                .try_recv()
                .unwrap_or_else(|_| Err(ranks_missing(&name, &request, Vec::new())))
                .map(Json),
        },
    }
}

fn ranks_missing(name: &str, request: &JoinRequest, missing: Vec<u8>) -> ApiError {
    info!(job = name, rank = request.rank, missing = %Ranks(&missing), "gave up waiting");
    // The wait was checked when the rank was admitted.
    let waited = Duration::try_from_secs_f64(request.wait_seconds).unwrap_or_default();
    let message = format!(
        "{} of {} ranks had not joined after {}: {}; start what is missing, or wait longer (--timeout)",
        missing.len(),
        request.world,
        Span(waited),
        Ranks(&missing)
    );
    let mut error = ApiError::new(StatusCode::REQUEST_TIMEOUT, RANKS_MISSING, message);
    error.body.missing_ranks = missing;
    error
}

/// Randomness from the kernel.
fn entropy() -> Result<Entropy, ApiError> {
    let drawn = getrandom::u32().and_then(|generation| Ok(Entropy { generation, nonce: getrandom::u64()? }));
    drawn.map_err(|error| {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "randomness", format!("no randomness: {error}"))
    })
}

/// A wait that ends when this is dropped: with its answer, or because the worker hung up.
struct Wait {
    control: Control,
    name: String,
    waiter: WaiterId,
}

impl Wait {
    /// Ends it; returns the ranks that were missing if nobody had ended it before.
    fn end(&mut self) -> Option<Vec<u8>> {
        let mut inner = self.control.lock();
        inner.waiting.remove(&self.waiter);
        inner.membership.abandon(&self.name, self.waiter)
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        if let Some(missing) = self.end() {
            debug!(job = self.name, missing = %Ranks(&missing), "a waiting worker hung up");
        }
    }
}

type Entered = (Wait, oneshot::Receiver<Answer>, Option<Instant>);

impl Control {
    /// A rank joins; if that forms a generation, everybody is answered before this returns.
    fn enter(
        &self,
        name: &str,
        request: &JoinRequest,
        address: IpAddr,
        entropy: Entropy,
    ) -> Result<Entered, ApiError> {
        let mut inner = self.lock();
        let refused =
            |error: &JoinError| warn!(job = name, rank = request.rank, %address, "refused: {error}");
        let now = Instant::now();
        let joined = inner.membership.join(now, name, request, address, entropy).inspect_err(refused)?;
        info!(job = name, rank = request.rank, %address, "joined");
        let (sender, receiver) = oneshot::channel();
        inner.waiting.insert(joined.waiter, sender);
        if let Some(old) = joined.replaced.and_then(|old| inner.waiting.remove(&old)) {
            let message =
                format!("rank {} joined again from the same address; that wait goes on", request.rank);
            let _ = old.send(Err(ApiError::new(StatusCode::CONFLICT, "replaced", message)));
        }
        if let Some(formation) = &joined.formation {
            inner.form(formation);
        }
        let deadline = inner.membership.deadline(name, joined.waiter);
        let wait = Wait { control: self.clone(), name: name.into(), waiter: joined.waiter };
        Ok((wait, receiver, deadline))
    }
}

impl Inner {
    /// Writes the tables, then answers everybody who waits.
    fn form(&mut self, formation: &Formation) {
        let written = self.tables.lock().unwrap_or_else(PoisonError::into_inner).install(formation);
        let answer = match written {
            Ok(()) => {
                info!(job = formation.name, generation = formation.entry.generation, "all ranks are there");
                Ok(formation.grant.clone())
            }
            Err(cause) => {
                error!(job = formation.name, "cannot form a generation: {cause}");
                Err(ApiError::from(cause))
            }
        };
        for waiter in &formation.waiters {
            if let Some(sender) = self.waiting.remove(waiter) {
                let _ = sender.send(answer.clone());
            }
        }
    }
}

/// Serves on all listeners until one of them fails.
///
/// # Errors
/// That failure.
pub async fn serve_all(control: Control, listeners: Vec<TcpListener>) -> std::io::Result<()> {
    let mut servers = tokio::task::JoinSet::new();
    for listener in listeners {
        servers.spawn(serve_one(control.clone(), listener));
    }
    match servers.join_next().await {
        Some(Ok(result)) => result,
        Some(Err(error)) => Err(std::io::Error::other(error)),
        None => std::future::pending().await,
    }
}

fn serve_one(control: Control, listener: TcpListener) -> impl Future<Output = std::io::Result<()>> + Send {
    control.serve(listener)
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
