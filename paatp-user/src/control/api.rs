//! The pages of the control server, and the document that describes them.

use std::sync::OnceLock;
use std::time::Duration;

use axum::Router;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request, State};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, WWW_AUTHENTICATE};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Json, Response};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use paatp_common::limits::MAX_RANKS;
use paatp_transport::words::{Ranks, Span};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tracing::info;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::{Modify, OpenApi};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::config::JobConfig;

use crate::page;
use crate::telemetry::history::Series;
use crate::telemetry::metrics::server;
use crate::telemetry::snapshot::Snapshot;

use super::error::ControlError;
use super::http::{Peer, Scope};
use super::protocol::{
    Created, Drain, Grant, JobDetails, JobList, JobStatus, JoinRequest, LeaveRequest, NodeStatus, Problem,
    Sync,
};
use super::server::{Caller, Control, Right, entropy};

/// Largest body of a request, in bytes: a job or a join has a few hundred.
pub(super) const MAX_BODY_BYTES: usize = 16 << 10;

/// Longest time that a body may take.
const BODY_TIME: Duration = Duration::from_secs(10);

/// Media type of refusals (RFC 9457).
pub(super) const PROBLEM_TYPE: &str = "application/problem+json";

/// What the document says beside pages and types.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "paatp control API",
        description = "Jobs of one aggregator node and their members. Refusals are problems as RFC 9457 has them; their `code` never changes its meaning. docs/jobs.md tells the life of a job.",
        license(name = "MIT OR Apache-2.0", identifier = "MIT OR Apache-2.0")
    ),
    components(schemas(Problem)),
    modifiers(&Token),
    tags(
        (name = "jobs", description = "Managing jobs: at loopback and where the operator opened it. Changes need the node's token."),
        (name = "members", description = "For workers: at the addresses that their packets go to, too. Open, or by the job's key."),
        (name = "node", description = "The node as a whole."),
    )
)]
struct Document;

struct Token;

impl Modify for Token {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer);
        let scheme = scheme.description(Some("The node's token, or for join and leave the job's key."));
        if let Some(components) = document.components.as_mut() {
            components.add_security_scheme("token", SecurityScheme::Http(scheme.build()));
        }
    }
}

/// Pages and their document.
pub(super) fn parts() -> (Router<Control>, utoipa::openapi::OpenApi) {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(openapi))
        .routes(routes!(healthz))
        .routes(routes!(readyz))
        .routes(routes!(node))
        .routes(routes!(drain))
        .routes(routes!(metrics))
        .routes(routes!(status))
        .routes(routes!(history))
        .routes(routes!(list, create))
        .routes(routes!(details, delete))
        .routes(routes!(sync))
        .routes(routes!(join))
        .routes(routes!(leave))
        .split_for_parts()
}

/// All pages.
pub(super) fn router(control: Control) -> Router {
    parts()
        .0
        .merge(page::router())
        .fallback(|| async { ControlError::NotFound })
        .method_not_allowed_fallback(|| async { ControlError::BadMethod })
        .with_state(control)
}

/// This document.
#[utoipa::path(get, path = "/v1/openapi.json", tag = "node", responses((status = 200, body = serde_json::Value)))]
async fn openapi() -> Json<&'static utoipa::openapi::OpenApi> {
    static DOCUMENT: OnceLock<utoipa::openapi::OpenApi> = OnceLock::new();
    Json(DOCUMENT.get_or_init(|| parts().1))
}

impl IntoResponse for ControlError {
    fn into_response(self) -> Response {
        let code = self.code();
        let problem = Problem {
            code: code.name().into(),
            title: code.status().canonical_reason().unwrap_or_default().into(),
            status: code.status().as_u16(),
            detail: self.to_string(),
            missing_ranks: self.missing_ranks().into(),
            fitting_slots: self.fitting_slots(),
        };
        let mut response = (code.status(), Json(problem)).into_response();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(PROBLEM_TYPE));
        if code.status() == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl<S: Send + std::marker::Sync> FromRequestParts<S> for Caller {
    type Rejection = ControlError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Caller, ControlError> {
        let peer = parts.extensions.get::<Peer>().copied();
        // Every connection has one. Without it nobody is trusted.
        let nobody = Peer { address: std::net::Ipv6Addr::UNSPECIFIED.into(), scope: Scope::Workers };
        Ok(Caller { peer: peer.unwrap_or(nobody), token: bearer(&parts.headers).map(Into::into) })
    }
}

/// The token of `Authorization: Bearer …`.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// A job's name in the path.
struct Name(String);

impl<S: Send + std::marker::Sync> FromRequestParts<S> for Name {
    type Rejection = ControlError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Name, ControlError> {
        let path: Result<Path<String>, PathRejection> = Path::from_request_parts(parts, state).await;
        path.map(|Path(name)| Name(name)).map_err(|rejection| ControlError::BadRequest(rejection.body_text()))
    }
}

/// A body of JSON, of bounded length, in bounded time.
struct Input<T>(T);

impl<S: Send + std::marker::Sync, T: DeserializeOwned> FromRequest<S> for Input<T> {
    type Rejection = ControlError;

    async fn from_request(request: Request, _: &S) -> Result<Input<T>, ControlError> {
        // A page of another site can make a browser send anything but this type without being asked about it.
        let media_type = request.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let is_json = media_type
            .and_then(|value| value.split(';').next())
            .is_some_and(|value| value.trim().eq_ignore_ascii_case("application/json"));
        if !is_json {
            return Err(ControlError::BadMediaType);
        }
        let body = Limited::new(request.into_body(), MAX_BODY_BYTES).collect();
        let body = match tokio::time::timeout(BODY_TIME, body).await {
            Ok(Ok(body)) => body.to_bytes(),
            Ok(Err(error)) if error.is::<LengthLimitError>() => {
                return Err(ControlError::TooLarge(MAX_BODY_BYTES));
            }
            Ok(Err(error)) => return Err(ControlError::BadRequest(error.to_string())),
            Err(_) => return Err(ControlError::TooSlow(BODY_TIME.as_secs())),
        };
        serde_json::from_slice(&body).map(Input).map_err(|error| ControlError::BadRequest(error.to_string()))
    }
}

/// The process answers.
#[utoipa::path(get, path = "/healthz", tag = "node", responses((status = 200, body = String, content_type = "text/plain")))]
async fn healthz() -> &'static str {
    "ok\n"
}

/// The node takes new jobs and ranks. 503 while it is drained.
#[utoipa::path(get, path = "/readyz", tag = "node", responses(
    (status = 200, body = String, content_type = "text/plain"),
    (status = 503, body = String, content_type = "text/plain"),
))]
async fn readyz(State(control): State<Control>) -> (StatusCode, &'static str) {
    if control.lock().membership.is_draining() {
        (StatusCode::SERVICE_UNAVAILABLE, "fail accepting: draining\n")
    } else {
        (StatusCode::OK, "ok accepting\n")
    }
}

/// The node: its memory, its jobs, whether it is drained.
#[utoipa::path(get, path = "/v1/node", tag = "node", responses(
    (status = 200, body = NodeStatus),
    (status = "4XX", body = Problem, content_type = "application/problem+json"),
))]
async fn node(State(control): State<Control>, caller: Caller) -> Result<Json<NodeStatus>, ControlError> {
    control.authorize(&caller, Right::Look)?;
    Ok(Json(control.node()?))
}

/// Everything that can be seen of the node at this moment: jobs, ranks, counters, who waits for whom.
#[utoipa::path(get, path = "/v1/status", tag = "node", responses(
    (status = 200, body = Snapshot),
    (status = "4XX", body = Problem, content_type = "application/problem+json"),
    (status = "5XX", body = Problem, content_type = "application/problem+json"),
))]
async fn status(State(control): State<Control>, caller: Caller) -> Result<Json<Snapshot>, ControlError> {
    control.authorize(&caller, Right::Look)?;
    control.look().await.map(Json)
}

/// Metrics in Prometheus' text format 0.0.4.
#[utoipa::path(get, path = "/metrics", tag = "node", responses(
    (status = 200, body = String, content_type = "text/plain"),
    (status = 503, body = String, content_type = "text/plain"),
    (status = "4XX", body = Problem, content_type = "application/problem+json"),
    (status = "5XX", body = Problem, content_type = "application/problem+json"),
))]
async fn metrics(State(control): State<Control>, caller: Caller) -> Result<Response, ControlError> {
    // As `Right::Look`, without the lock: whatever holds that must not keep metrics away.
    if caller.peer.scope != Scope::Management {
        return Err(ControlError::NotHere);
    }
    Ok(server::answer(&control.exporter()?).await)
}

/// Which minutes of which job.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stretch {
    /// Name of the job.
    job: String,
    /// Number of the first sample that is wanted: the `next` of the last answer.
    #[serde(default)]
    since: u64,
}

/// The last minutes of a job, rank by rank: chunks a second.
#[utoipa::path(get, path = "/v1/history", tag = "node", params(
    ("job" = String, Query, description = "Name of the job"),
    ("since" = Option<u64>, Query, description = "Number of the first sample that is wanted: the `next` of the last answer"),
), responses(
    (status = 200, body = Series),
    (status = "4XX", body = Problem, content_type = "application/problem+json"),
))]
async fn history(
    State(control): State<Control>,
    caller: Caller,
    stretch: Result<Query<Stretch>, QueryRejection>,
) -> Result<Json<Series>, ControlError> {
    control.authorize(&caller, Right::Look)?;
    let Query(stretch) = stretch.map_err(|rejection| ControlError::BadRequest(rejection.body_text()))?;
    control.series(&stretch.job, stretch.since).map(Json)
}

/// Drains the node: no new jobs and ranks, what runs goes on. Or ends that.
#[utoipa::path(put, path = "/v1/node/drain", tag = "node", request_body = Drain, security(("token" = [])), responses(
    (status = 200, body = NodeStatus),
    (status = "4XX", body = Problem, content_type = "application/problem+json"),
))]
async fn drain(
    State(control): State<Control>,
    caller: Caller,
    request: Request,
) -> Result<Json<NodeStatus>, ControlError> {
    control.authorize(&caller, Right::Manage)?;
    let Input(drain): Input<Drain> = Input::from_request(request, &()).await?;
    control.drain(drain.draining);
    Ok(Json(control.node()?))
}

/// All jobs.
#[utoipa::path(get, path = "/v1/jobs", tag = "jobs", responses(
    (status = 200, body = JobList),
    (status = "4XX", body = Problem, content_type = "application/problem+json"),
))]
async fn list(State(control): State<Control>, caller: Caller) -> Result<Json<JobList>, ControlError> {
    control.authorize(&caller, Right::Look)?;
    Ok(Json(JobList { jobs: control.list() }))
}

/// Creates a job. The answer has its key, if it is not open to everybody, this once.
#[utoipa::path(post, path = "/v1/jobs", tag = "jobs", request_body = JobConfig, security(("token" = [])), responses(
    (status = 201, body = Created),
    (status = "4XX", body = Problem, content_type = "application/problem+json"),
    (status = "5XX", body = Problem, content_type = "application/problem+json"),
))]
async fn create(
    State(control): State<Control>,
    caller: Caller,
    request: Request,
) -> Result<(StatusCode, Json<Created>), ControlError> {
    control.authorize(&caller, Right::Manage)?;
    let Input(config): Input<JobConfig> = Input::from_request(request, &()).await?;
    Ok((StatusCode::CREATED, Json(control.create(&config)?)))
}

/// One job with its ranks.
#[utoipa::path(get, path = "/v1/jobs/{name}", tag = "members", params(("name" = String, Path, description = "Name of the job")), responses(
    (status = 200, body = JobDetails),
    (status = "4XX", body = Problem, content_type = "application/problem+json"),
    (status = "5XX", body = Problem, content_type = "application/problem+json"),
))]
async fn details(
    State(control): State<Control>,
    caller: Caller,
    Name(name): Name,
) -> Result<Json<JobDetails>, ControlError> {
    control.authorize(&caller, Right::LookAt(&name))?;
    control.details(&name).map(Json)
}

/// Deletes a job, whatever it does. Its members are told to rejoin, and then learn that it is gone.
#[utoipa::path(delete, path = "/v1/jobs/{name}", tag = "jobs", params(("name" = String, Path, description = "Name of the job")), security(("token" = [])), responses(
    (status = 204),
    (status = "4XX", body = Problem, content_type = "application/problem+json"),
    (status = "5XX", body = Problem, content_type = "application/problem+json"),
))]
async fn delete(
    State(control): State<Control>,
    caller: Caller,
    Name(name): Name,
) -> Result<StatusCode, ControlError> {
    control.authorize(&caller, Right::Manage)?;
    control.delete(&name)?;
    Ok(StatusCode::NO_CONTENT)
}

/// Changes how a job's ranks wait for one another, also while packets flow: from one chunk on, the same for all ranks.
/// Another change must wait until every rank has all results before that chunk (409 `sync_changing`).
#[utoipa::path(put, path = "/v1/jobs/{name}/sync", tag = "jobs", params(("name" = String, Path, description = "Name of the job")), request_body = Sync, security(("token" = [])), responses(
    (status = 200, body = JobStatus),
    (status = "4XX", body = Problem, content_type = "application/problem+json"),
))]
async fn sync(
    State(control): State<Control>,
    caller: Caller,
    Name(name): Name,
    request: Request,
) -> Result<Json<JobStatus>, ControlError> {
    control.authorize(&caller, Right::Manage)?;
    let Input(sync): Input<Sync> = Input::from_request(request, &()).await?;
    control.set_sync(&name, sync).map(Json)
}

/// A rank joins; answered when all are there, or the wait is over. Its packets must come from the address that it asks
/// from.
#[utoipa::path(post, path = "/v1/jobs/{name}/join", tag = "members", params(("name" = String, Path, description = "Name of the job")), request_body = JoinRequest, security((), ("token" = [])), responses(
    (status = 200, body = Grant),
    (status = "4XX", body = Problem, content_type = "application/problem+json"),
    (status = "5XX", body = Problem, content_type = "application/problem+json"),
))]
async fn join(
    State(control): State<Control>,
    caller: Caller,
    Name(name): Name,
    request: Request,
) -> Result<Json<Grant>, ControlError> {
    control.authorize(&caller, Right::Join(&name))?;
    let Input(request): Input<JoinRequest> = Input::from_request(request, &()).await?;
    // Again: the sender chose how long its body took, and the job may be another one by now.
    control.authorize(&caller, Right::Join(&name))?;
    let (mut wait, mut answer, deadline) = control.enter(&name, &request, caller.peer, entropy()?)?;
    // The other ranks of a lower node are granted the same, and wait as long as this does.
    let others = request.below.iter().flatten().take(MAX_RANKS);
    let others = others.map(|rank| {
        let other = JoinRequest { rank: *rank, below: Some(Vec::new()), ..request.clone() };
        control.enter(&name, &other, caller.peer, entropy()?)
    });
    let _others: Vec<_> = others.collect::<Result<_, _>>()?;
    let waited = match deadline {
        Some(deadline) => tokio::time::timeout_at(deadline.into(), &mut answer).await,
        // The generation was formed at once, so the answer is there.
        None => Ok((&mut answer).await),
    };
    match waited {
        Ok(Ok(answer)) => answer.map(Json),
        Ok(Err(_closed)) => Err(ControlError::Stopping),
        Err(_elapsed) => match wait.end() {
            Some(missing) => Err(ranks_missing(&control, &name, &request, missing)),
            // The last rank came while we gave up.
            None => answer
                .try_recv()
                .unwrap_or_else(|_| Err(ranks_missing(&control, &name, &request, Vec::new())))
                .map(Json),
        },
    }
}

fn ranks_missing(control: &Control, name: &str, request: &JoinRequest, missing: Vec<u8>) -> ControlError {
    info!(job = name, rank = request.rank, missing = %Ranks(&missing), "gave up waiting");
    // The wait was checked when the rank was admitted.
    let waited = Duration::try_from_secs_f64(request.wait_seconds).unwrap_or_default();
    // A node that is one rank tells the number of its own.
    let world = control.lock().membership.status(name).map_or(request.world, |status| status.world.into());
    ControlError::RanksMissing { world, waited: Span(waited).to_string(), missing }
}

/// A rank is done: it does not wait any longer, or has all results of its generation.
#[utoipa::path(post, path = "/v1/jobs/{name}/leave", tag = "members", params(("name" = String, Path, description = "Name of the job")), request_body = LeaveRequest, security((), ("token" = [])), responses(
    (status = 204),
    (status = "4XX", body = Problem, content_type = "application/problem+json"),
    (status = "5XX", body = Problem, content_type = "application/problem+json"),
))]
async fn leave(
    State(control): State<Control>,
    caller: Caller,
    Name(name): Name,
    request: Request,
) -> Result<StatusCode, ControlError> {
    control.authorize(&caller, Right::Join(&name))?;
    let Input(request): Input<LeaveRequest> = Input::from_request(request, &()).await?;
    // Again: the sender chose how long its body took, and the job may be another one by now.
    control.authorize(&caller, Right::Join(&name))?;
    control.leave(&name, &request, caller.peer)?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
#[path = "api_tests.rs"]
mod tests;
