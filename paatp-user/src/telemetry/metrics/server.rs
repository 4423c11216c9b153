//! Answers scrapes: on the control port, and at an address of its own on a thread of its own, which goes on when the core loop
//! does not.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tracing::error;

use crate::control::http::{Connections, Scope};
use crate::control::listen::ListenError;

use super::{CONTENT_TYPE as TEXT, Exporter};

/// How long a scrape waits for the one before it.
const PATIENCE: Duration = Duration::from_secs(2);

/// Media type of everything else.
const PLAIN: &str = "text/plain; charset=utf-8";

/// One scrape, when it is its turn.
pub async fn answer(exporter: &Arc<Exporter>) -> Response {
    let turn = tokio::time::timeout(PATIENCE, exporter.turns.clone().acquire_owned()).await;
    let Ok(Ok(turn)) = turn else {
        let headers = [(CONTENT_TYPE, PLAIN), (RETRY_AFTER, "1")];
        return (StatusCode::SERVICE_UNAVAILABLE, headers, "other scrapes are under way\n").into_response();
    };
    let exporter = exporter.clone();
    // The turn ends with the scrape, whether or not somebody still waits for it.
    match tokio::task::spawn_blocking(move || (exporter.scrape(), turn).0).await {
        Ok(Ok(text)) => ([(CONTENT_TYPE, TEXT)], text).into_response(),
        Ok(Err(cause)) => failed(&cause.to_string()),
        Err(cause) => failed(&cause.to_string()),
    }
}

fn failed(cause: &str) -> Response {
    error!("cannot write metrics: {cause}");
    (StatusCode::INTERNAL_SERVER_ERROR, [(CONTENT_TYPE, PLAIN)], format!("{cause}\n")).into_response()
}

fn router(exporter: Arc<Exporter>) -> Router {
    let scrape = |State(exporter): State<Arc<Exporter>>| async move { answer(&exporter).await };
    let nothing = || async { (StatusCode::NOT_FOUND, [(CONTENT_TYPE, PLAIN)], "only /metrics is here\n") };
    Router::new().route("/metrics", get(scrape)).fallback(nothing).with_state(exporter)
}

/// Serves `/metrics` at an address, and nothing else, until the process ends.
///
/// # Errors
/// If the address cannot be had.
pub fn start(address: SocketAddr, exporter: Arc<Exporter>) -> Result<(), ListenError> {
    let failed = |source| ListenError::Other { address, source };
    let listener = TcpListener::bind(address).map_err(|error| match error.kind() {
        std::io::ErrorKind::AddrInUse => ListenError::InUse(address),
        _ => failed(error),
    })?;
    listener.set_nonblocking(true).map_err(failed)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let serve = move || {
        runtime.block_on(async {
            match tokio::net::TcpListener::from_std(listener) {
                Ok(listener) => {
                    let connections = Connections::new(router(exporter), None);
                    match connections.accept(listener, Scope::Management).await {}
                }
                Err(cause) => error!(%address, "cannot serve metrics: {cause}"),
            }
        });
    };
    std::thread::Builder::new().name("metrics".into()).spawn(serve).map_err(failed)?;
    Ok(())
}
