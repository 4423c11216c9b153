//! Connections to the control server: their number, their time, their encryption.
//!
//! One request a connection. So a connection's time is that of its parts: TLS, header, body ([`super::server`]), the
//! handler's own (a join waits for as long as it says), and the answer's way out. Who is slow holds one connection of
//! those that its address may have, and nobody up.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{Error as PemError, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tower::ServiceExt;
use tracing::{debug, warn};

/// Longest time for a TLS handshake, and then for a request's header.
pub const HEADER_TIME: Duration = Duration::from_secs(10);

/// Longest time in which a client takes its answer.
const ANSWER_TIME: Duration = Duration::from_secs(10);

/// Largest header of a request, in bytes.
const MAX_HEADER_BYTES: usize = 16 << 10;

/// Fields of a request's header at most.
const MAX_HEADER_FIELDS: usize = 64;

/// Connections of workers at most: each that waits to join holds one. Twelve jobs of 64 ranks may form at once; with
/// everything else it stays below the 1024 open files that a process usually may have.
const MAX_WORKER_CONNECTIONS: usize = 768;

/// Those from one address at most.
const MAX_CONNECTIONS_OF_A_PEER: usize = 256;

/// Connections to manage jobs at most. Counted apart, so that workers cannot use them up.
const MAX_MANAGEMENT_CONNECTIONS: usize = 64;

/// Silence after which a peer is asked whether it is there, and between further questions: a worker whose machine died
/// while it waited to join is gone half a minute later.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(15), Duration::from_secs(5), 3);

/// Pause where no connection can be taken, for want of files or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What is said to a connection too many, without TLS.
const BUSY: &str = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/problem+json\r\nRetry-After: 1\r\n\
Connection: close\r\nContent-Length: 125\r\n\r\n{\"code\":\"busy\",\"title\":\"Service Unavailable\",\"status\":503,\
\"detail\":\"too many connections from here or altogether; try again\"}";

/// What a listener is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Workers: join, leave, see their job.
    Workers,
    /// Everything.
    Management,
}

/// Who asks, and where.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// Its address.
    pub address: IpAddr,
    /// What the listener is for.
    pub scope: Scope,
}

/// Certificate or key cannot be used.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {path} as PEM; check path, permissions and contents")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<PemError>,
    },
    /// A file holds no certificate.
    #[error("{0} holds no certificate; it must be a PEM file with the server's certificate first")]
    Empty(PathBuf),
    /// They do not go together.
    #[error("certificate {certificate} and key {key} cannot be used together")]
    Mismatch {
        /// The certificate.
        certificate: PathBuf,
        /// The key.
        key: PathBuf,
        /// Why.
        #[source]
        source: Box<tokio_rustls::rustls::Error>,
    },
    /// One without the other.
    #[error("TLS needs both a certificate and a key: --tls-certificate FILE --tls-key FILE")]
    Half,
}

/// Reads what TLS needs.
///
/// # Errors
/// If it cannot be used.
pub fn tls(certificate: &Path, key: &Path) -> Result<TlsAcceptor, TlsError> {
    let unreadable = |path: &Path, source| TlsError::Read { path: path.into(), source: Box::new(source) };
    let chain = CertificateDer::pem_file_iter(certificate)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|source| unreadable(certificate, source))?;
    if chain.is_empty() {
        return Err(TlsError::Empty(certificate.into()));
    }
    let private = PrivateKeyDer::from_pem_file(key).map_err(|source| unreadable(key, source))?;
    let mismatch = |source| TlsError::Mismatch {
        certificate: certificate.into(),
        key: key.into(),
        source: Box::new(source),
    };
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(mismatch)?
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .map_err(mismatch)?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Places for connections.
#[derive(Clone, Debug)]
struct Places {
    free: Arc<Semaphore>,
    of_a_peer: usize,
    peers: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// A connection's place; free again when dropped.
struct Place {
    _permit: OwnedSemaphorePermit,
    address: IpAddr,
    peers: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = peers.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                peers.remove(&self.address);
            }
        }
    }
}

impl Places {
    fn new(connections: usize, of_a_peer: usize) -> Places {
        Places { free: Arc::new(Semaphore::new(connections)), of_a_peer, peers: Arc::default() }
    }

    fn take(&self, address: IpAddr) -> Option<Place> {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if peers.get(&address).is_some_and(|count| *count >= self.of_a_peer) {
            return None;
        }
        let permit = self.free.clone().try_acquire_owned().ok()?;
        *peers.entry(address).or_default() += 1;
        Some(Place { _permit: permit, address, peers: self.peers.clone() })
    }
}

/// Serves connections of all listeners alike.
#[derive(Clone)]
pub struct Connections {
    router: Router,
    tls: Option<TlsAcceptor>,
    workers: Places,
    management: Places,
}

impl Connections {
    /// For these pages, encrypted if `tls` is there.
    #[must_use]
    pub fn new(router: Router, tls: Option<TlsAcceptor>) -> Connections {
        let workers = Places::new(MAX_WORKER_CONNECTIONS, MAX_CONNECTIONS_OF_A_PEER);
        let management = Places::new(MAX_MANAGEMENT_CONNECTIONS, MAX_MANAGEMENT_CONNECTIONS);
        Connections { router, tls, workers, management }
    }

    /// Takes connections of one listener, for ever.
    pub async fn accept(self, listener: TcpListener, scope: Scope) -> Infallible {
        let places = match scope {
            Scope::Workers => &self.workers,
            Scope::Management => &self.management,
        };
        loop {
            let (stream, address) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    if is_about_the_listener(&error) {
                        warn!("cannot take a connection, trying again: {error}");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                    continue;
                }
            };
            let peer = Peer { address: address.ip().to_canonical(), scope };
            let Some(place) = places.take(peer.address) else {
                debug!(%address, "a connection too many");
                refuse(&stream, self.tls.is_some());
                continue;
            };
            set_keepalive(&stream, address);
            let connections = self.clone();
            tokio::spawn(async move {
                connections.serve(stream, peer).await;
                drop(place);
            });
        }
    }

    async fn serve(&self, stream: TcpStream, peer: Peer) {
        let Some(tls) = &self.tls else { return serve(&self.router, stream, peer).await };
        match tokio::time::timeout(HEADER_TIME, tls.accept(stream)).await {
            Ok(Ok(stream)) => serve(&self.router, stream, peer).await,
            Ok(Err(error)) => debug!(address = %peer.address, "no TLS: {error}"),
            Err(_) => debug!(address = %peer.address, "no TLS in time"),
        }
    }
}

/// The error is not that of a single connection that ended before it was taken.
fn is_about_the_listener(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    !matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// Says why, if that goes without waiting.
fn refuse(stream: &TcpStream, encrypted: bool) {
    if !encrypted {
        // The socket's buffer is empty, so that all of it goes at once, or the peer is gone.
        let _ = socket2::SockRef::from(stream).send(BUSY.as_bytes());
    }
}

fn set_keepalive(stream: &TcpStream, address: SocketAddr) {
    let (time, interval, retries) = KEEPALIVE;
    let keepalive =
        socket2::TcpKeepalive::new().with_time(time).with_interval(interval).with_retries(retries);
    if let Err(error) = socket2::SockRef::from(stream).set_tcp_keepalive(&keepalive) {
        debug!(%address, "no keep-alive: {error}");
    }
}

/// One request.
async fn serve<S>(router: &Router, stream: S, peer: Peer)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let answered = Notify::new();
    let service = service_fn(|mut request: Request<Incoming>| {
        request.extensions_mut().insert(peer);
        let answer = router.clone().oneshot(request.map(Body::new));
        let answered = &answered;
        async move {
            let answer = answer.await;
            answered.notify_one();
            answer
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME)
        .max_buf_size(MAX_HEADER_BYTES)
        .max_headers(MAX_HEADER_FIELDS)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    let too_late = async {
        answered.notified().await;
        tokio::time::sleep(ANSWER_TIME).await;
    };
    tokio::select! {
        result = connection => if let Err(error) = result {
            debug!(address = %peer.address, "a connection broke: {error}");
        },
        () = too_late => debug!(address = %peer.address, "a client does not take its answer"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::error::Code;
    use crate::control::protocol::Problem;
    use crate::control::testing::{send_as, server};
    use std::io::{Read, Write};

    #[test]
    fn places_are_counted_by_address_and_given_back() {
        let places = Places::new(3, 2);
        let address = |last| IpAddr::from([10, 0, 0, last]);
        let first = places.take(address(1));
        let second = places.take(address(1));
        assert!(first.is_some() && second.is_some() && places.take(address(1)).is_none());
        let other = places.take(address(2));
        assert!(other.is_some() && places.take(address(3)).is_none(), "three altogether");
        drop(first);
        assert!(places.take(address(1)).is_some());
        drop((second, other));
        assert!(places.peers.lock().is_ok_and(|peers| peers.is_empty()));
    }

    #[test]
    fn the_refusal_is_whole() {
        let (head, body) = BUSY.split_once("\r\n\r\n").unwrap_or_default();
        assert!(head.contains(&format!("Content-Length: {}", body.len())), "{}", body.len());
        let problem: Problem = serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(
            (problem.code.as_str(), problem.status),
            (Code::BUSY.name(), Code::BUSY.status().as_u16())
        );
    }

    /// Who sends half a request holds a place, and nobody up.
    #[test]
    fn slow_clients_hold_nobody_up() {
        let server = server();
        let half = |address: SocketAddr| {
            let mut stream = std::net::TcpStream::connect(address).unwrap_or_else(|error| panic!("{error}"));
            let _ = stream.write_all(b"POST /v1/jobs/pair/join HTTP/1.1\r\nHost: localhost\r\nContent-Le");
            stream
        };
        let slow: Vec<_> = (0..MAX_CONNECTIONS_OF_A_PEER).map(|_| half(server.workers)).collect();
        // All places of this address are taken; the one too many is told so.
        let deadline = std::time::Instant::now() + HEADER_TIME / 2;
        let refusal = loop {
            let sent = send_as(None, server.workers, "GET", "/healthz", "");
            let mut text = String::new();
            let mut stream = sent.stream;
            let _ = stream.read_to_string(&mut text);
            if !text.starts_with("HTTP/1.1 200") || std::time::Instant::now() > deadline {
                break text;
            }
        };
        assert!(refusal.starts_with("HTTP/1.1 503") && refusal.contains("\"busy\""), "{refusal}");
        // Managing goes on as ever.
        let start = std::time::Instant::now();
        assert_eq!(server.ask("GET", "/v1/jobs", "").0, 200);
        assert!(start.elapsed() < HEADER_TIME / 2);
        drop(slow);
        let deadline = std::time::Instant::now() + HEADER_TIME;
        loop {
            let mut text = String::new();
            let mut stream = send_as(None, server.workers, "GET", "/healthz", "").stream;
            let _ = stream.read_to_string(&mut text);
            if text.starts_with("HTTP/1.1 200") {
                break;
            }
            assert!(std::time::Instant::now() < deadline, "places are not given back: {text}");
        }
    }

    /// A header that never ends is given up.
    #[test]
    fn half_a_header_is_given_up() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.unwrap_or_else(|error| panic!("{error}"));
        runtime.block_on(async {
            tokio::time::pause();
            let (mut client, server) = tokio::io::duplex(1024);
            let peer = Peer { address: IpAddr::from([127, 0, 0, 1]), scope: Scope::Workers };
            let start = tokio::time::Instant::now();
            let router = Router::new();
            let serving = serve(&router, server, peer);
            let talking = async {
                use tokio::io::AsyncWriteExt;
                loop {
                    if client.write_all(b"G").await.is_err() {
                        return;
                    }
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            };
            tokio::select! { () = serving => {}, () = talking => {} }
            assert!(start.elapsed() <= HEADER_TIME + Duration::from_secs(2), "{:?}", start.elapsed());
        });
    }

    /// An answer that nobody takes is given up.
    #[test]
    fn answers_that_nobody_takes_are_given_up() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.unwrap_or_else(|error| panic!("{error}"));
        runtime.block_on(async {
            tokio::time::pause();
            let (mut client, server) = tokio::io::duplex(64);
            let peer = Peer { address: IpAddr::from([127, 0, 0, 1]), scope: Scope::Workers };
            let router = Router::new().route("/", axum::routing::get(|| async { "x".repeat(100_000) }));
            let start = tokio::time::Instant::now();
            let asking = async {
                use tokio::io::AsyncWriteExt;
                let _ = client.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
                std::future::pending::<()>().await;
            };
            tokio::select! { () = serve(&router, server, peer) => {}, () = asking => {} }
            assert_eq!(start.elapsed().as_secs(), ANSWER_TIME.as_secs());
        });
    }
}
