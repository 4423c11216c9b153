//! An aggregator that does not exist: its answers are made up, its page is the real one, over the real server.

use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use axum::extract::{Query, Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Router, middleware};
use paatp_user::control::http::{Connections, Scope};
use paatp_user::page;
use paatp_user::telemetry::history::Series;
use paatp_user::telemetry::snapshot::Snapshot;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::oneshot;

/// Chunks that a rank moves in a second, more or less.
const RATE: u64 = 12_000;

/// What the aggregator would say.
#[derive(Clone, Debug)]
pub struct Scene {
    /// Body of `/v1/status` without the jobs.
    pub node: Value,
    /// Its jobs.
    pub jobs: Vec<Value>,
    /// Seconds that it has been running; one sample for each.
    pub second: u64,
    /// It refuses everything with this status.
    pub refuses: Option<u16>,
    /// Questions that it was asked, with what was asked for.
    pub asked: Vec<String>,
}

impl Scene {
    /// So many jobs that run, of so many ranks each.
    pub fn new(jobs: usize, ranks: u8) -> Scene {
        let node = json!({
            "schema_version": 1, "unix_seconds": 1.8e9, "uptime_seconds": 0.0, "core_age_seconds": 0.12,
            "build": { "version": "0.1.0", "object_sha256": "00ff" },
            "attachment": {
                "interface": "eth0", "mode": "native", "held_by": "bpf_link", "program": 123,
                "pinned": null, "notices": [],
            },
            "node": {
                "version": "0.1.0", "draining": false, "jobs": jobs, "max_jobs": 64, "running_jobs": jobs,
                "closing_jobs": 0, "max_lanes": 352, "slots": 65536, "free_slots": 62976,
                "longest_free_slots": 62976, "slot_bytes": 1472, "pool_slots": 0, "pool_slots_in_use": 0,
            },
            "slots_in_use": 640,
            "counters": { "refusals": { "bad_tag": 0, "ahead": 0 }, "events": { "adds": 0 } },
            "problems": [],
            "health": { "level": "well", "notices": [] },
        });
        let jobs = (0..jobs).map(|number| job(number, &format!("train-{number}"), ranks)).collect();
        Scene { node, jobs, second: 400, refuses: None, asked: Vec::new() }
    }

    /// A rank of a job holds the others up.
    pub fn stall(&mut self, number: usize, rank: u8) {
        let name = self.jobs[number]["name"].as_str().unwrap_or_default().to_owned();
        let sentence =
            format!("job `{name}` waits for contributions of rank {rank} for 3.2 s, 64 chunks behind");
        let job = &mut self.jobs[number];
        job["stall"] = json!({
            "job": name, "missing_ranks": [rank], "seconds": 3.2, "chunks_behind": 64, "sentence": sentence,
        });
        job["oldest_open_slot"] = json!({
            "chunk": 4711, "age_seconds": 3.2, "contributors": [0, 1, 2], "missing_ranks": [rank],
        });
        job["lag_chunks"] = json!(64);
        let row = &mut job["ranks"][usize::from(rank)];
        (row["lag_chunks"], row["straggler"], row["in_the_way_seconds"]) =
            (json!(64), json!(true), json!(3.2));
        self.node["health"] = json!({ "level": "trouble", "notices": [
            { "level": "trouble", "job": name, "sentence": sentence },
        ] });
    }

    /// The answer to `GET /v1/status`.
    pub fn status(&self) -> Value {
        let mut status = self.node.clone();
        status["uptime_seconds"] = json!(self.second as f64 + 0.25);
        status["unix_seconds"] = json!(1.8e9 + self.second as f64 + 0.25);
        status["jobs"] = json!(self.jobs);
        status
    }

    /// The answer to `GET /v1/history`.
    pub fn series(&self, job: &str, since: u64) -> Value {
        let ranks = self.jobs.iter().find(|known| known["name"] == job);
        let ranks = ranks.and_then(|job| job["ranks"].as_array()).map_or(0, Vec::len) as u64;
        let next = self.second + 1;
        let first = since.clamp(next.saturating_sub(300), next);
        // Waves, so that each sample differs from the one before.
        let step = |rank: u64, second: u64| RATE + (second * 37 + rank * 11) % 101 * 30;
        let of_rank = |rank: u64| {
            let steps: Vec<u64> = (first..next).map(|second| step(rank, second)).collect();
            json!({ "rank": rank, "contributed": steps, "acknowledged": steps })
        };
        json!({
            "schema_version": 1, "job": job, "lanes": 352, "first": first, "next": next,
            "uptime_seconds": (first..next).map(|second| second as f64).collect::<Vec<_>>(),
            "ranks": (0..ranks).map(of_rank).collect::<Vec<_>>(),
        })
    }
}

/// A job that runs well.
pub fn job(number: usize, name: &str, world: u8) -> Value {
    let rank = |rank: u8| {
        json!({
            "rank": rank, "state": "member", "address": format!("10.0.{number}.{rank}"),
            "contributed": 4_800_000, "acknowledged": 4_799_900, "marks": 3, "busy": 7,
            "chunks_per_second": RATE as f64, "lag_chunks": u64::from(rank % 3), "straggler": false,
            "in_the_way_seconds": null,
        })
    };
    json!({
        "name": name, "job": number, "state": "running", "world": world, "lanes": 352, "window": 64, "slots": 256,
        "slot_bytes": 376_832, "memory": "reserved", "places": null, "access": "open", "timeout_seconds": null,
        "on_failure": "abort", "sync": { "mode": "bsp" }, "epoch": 0, "sync_change": null, "generation": 77, "waiting_ranks": [],
        "missing_ranks": [], "left_ranks": [], "lost_ranks": [], "forming_seconds": null,
        "completed_chunks": 4_799_000, "chunks_per_second": RATE as f64, "slots_in_use": 64,
        "oldest_open_slot": null, "lag_chunks": 2, "ranks": (0..world).map(rank).collect::<Vec<_>>(),
        "stall": null,
    })
}

type Shared = Arc<Mutex<Scene>>;

/// The scene on a socket.
pub struct Server {
    /// Where.
    pub address: SocketAddr,
    scene: Shared,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves at any free port of loopback.
    pub fn start(scene: Scene) -> Result<Server> {
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut server = Server { address, scene: Arc::new(Mutex::new(scene)), stop: None, thread: None };
        server.resume()?;
        Ok(server)
    }

    /// What is served.
    pub fn scene(&self) -> MutexGuard<'_, Scene> {
        self.scene.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves again, at the same address.
    pub fn resume(&mut self) -> Result<()> {
        let listener = listen(self.address)?;
        self.address = listener.local_addr()?;
        let (stop, stopped) = oneshot::channel();
        let router = router(self.scene.clone());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        self.stop = Some(stop);
        self.thread = Some(std::thread::spawn(move || {
            runtime.block_on(async {
                let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
                let serving = Connections::new(router, None).accept(listener, Scope::Management);
                tokio::select! {
                    _ = serving => {}
                    _ = stopped => {}
                }
            });
        }));
        Ok(())
    }

    /// Does not answer any more.
    pub fn stop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

fn listen(address: SocketAddr) -> Result<TcpListener> {
    // The standard library sets SO_REUSEADDR: connections of the one before do not matter.
    let listener = TcpListener::bind(address).with_context(|| format!("cannot listen at {address}"))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn router(scene: Shared) -> Router {
    let api = Router::new().route("/v1/status", get(status)).route("/v1/history", get(history));
    let refused = async |State(scene): State<Shared>, request: Request, next: middleware::Next| {
        let refuses = {
            let mut scene = scene.lock().unwrap_or_else(PoisonError::into_inner);
            scene.asked.push(request.uri().to_string());
            scene.refuses
        };
        match refuses.and_then(|status| StatusCode::from_u16(status).ok()) {
            Some(status) => (status, problem(status).to_string()).into_response(),
            None => next.run(request).await,
        }
    };
    let api = api.layer(middleware::from_fn_with_state(scene.clone(), refused));
    Router::new().merge(page::router()).merge(api).with_state(scene)
}

/// A refusal, as the API tells them.
fn problem(status: StatusCode) -> Value {
    let title = status.canonical_reason().unwrap_or_default();
    let detail = "too many who look; try again";
    json!({ "code": "busy", "title": title, "status": status.as_u16(), "detail": detail })
}

fn answer(value: &Value) -> Response {
    ([(CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

async fn status(State(scene): State<Shared>) -> Response {
    answer(&scene.lock().unwrap_or_else(PoisonError::into_inner).status())
}

#[derive(Deserialize)]
struct Stretch {
    job: String,
    since: u64,
}

async fn history(State(scene): State<Shared>, Query(stretch): Query<Stretch>) -> Response {
    answer(&scene.lock().unwrap_or_else(PoisonError::into_inner).series(&stretch.job, stretch.since))
}

/// What is made up has exactly the shape that the aggregator's answers have.
#[test]
fn made_up_answers_have_the_shape_of_real_ones() {
    let mut scene = Scene::new(2, 4);
    scene.stall(1, 3);
    let status = scene.status();
    let snapshot: Snapshot = serde_json::from_value(status.clone()).unwrap_or_else(|error| panic!("{error}"));
    // Counters that are left out are those of other versions.
    assert_eq!(serde_json::to_value(&snapshot).unwrap_or_default(), status);
    let series = scene.series("train-0", 390);
    let real: Series = serde_json::from_value(series.clone()).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(serde_json::to_value(&real).unwrap_or_default(), series);
    assert_eq!((real.ranks.len(), real.uptime_seconds.len()), (4, 11));
    assert!(snapshot.jobs[1].stall.is_some() && snapshot.jobs[1].ranks[3].straggler);
}
