//! Every page and every refusal, and what arbitrary requests do.

use super::super::testing::{Contract, SLOTS, TOKEN, control, problem, send, send_as, server};
use super::*;
use axum::body::Body;
use axum::http::Method;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::IpAddr;
use tower::ServiceExt;

const JOIN: &str = "/v1/jobs/pair/join";

/// Answers a request without sockets.
async fn ask(control: &Control, scope: Scope, request: axum::http::request::Builder, body: Body) -> Response {
    let peer = Peer { address: IpAddr::from([127, 0, 0, 1]), scope };
    let request = request.extension(peer).body(body).unwrap_or_else(|error| panic!("{error}"));
    control.router().oneshot(request).await.unwrap_or_else(|error| match error {})
}

fn runtime() -> tokio::runtime::Runtime {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn refusals_have_codes_of_their_own() {
    let server = server();
    let refused = |method: &str, path: &str, body: &Value| {
        server.refusal(send(server.address, method, path, &body.to_string()))
    };
    let join = |change: &[(&str, Value)]| {
        let mut body = json!({"protocol": 1, "rank": 0, "world": 2, "wait_seconds": 1});
        for (key, value) in change {
            body[*key] = value.clone();
        }
        body
    };
    let is = |status: u16, code: &str| (status, code.to_owned());
    assert_eq!(refused("POST", JOIN, &join(&[("protocol", json!(2))])), is(400, "bad_protocol"));
    assert_eq!(refused("POST", JOIN, &join(&[("rank", json!(2))])), is(400, "bad_rank"));
    assert_eq!(refused("POST", JOIN, &join(&[("wait_seconds", json!(-1))])), is(400, "bad_wait"));
    assert_eq!(refused("POST", JOIN, &join(&[("rank", json!(-1))])), is(400, "bad_request"));
    assert_eq!(refused("POST", JOIN, &join(&[("world", json!(3))])), is(409, "world_mismatch"));
    assert_eq!(refused("POST", "/v1/jobs/other/join", &join(&[])), is(404, "unknown_job"));
    assert_eq!(refused("GET", JOIN, &json!({})), is(405, "bad_method"));
    assert_eq!(refused("GET", "/nowhere", &json!({})), is(404, "not_found"));
    assert_eq!(refused("GET", "/v1/jobs/%ff", &json!({})), is(400, "bad_request"));
    let long = json!("x".repeat(MAX_BODY_BYTES));
    assert_eq!(refused("POST", JOIN, &long), is(413, "too_large"));
    let create = |name: &str, key: &str, value: Value| {
        let mut body = json!({"name": name, "world": 2});
        body[key] = value;
        refused("POST", "/v1/jobs", &body)
    };
    assert_eq!(create("pair", "world", json!(2)), is(409, "job_exists"));
    assert_eq!(create("new", "world", json!(65)), is(400, "bad_job"));
    assert_eq!(create("new", "timeout_seconds", json!(0.5)), is(400, "bad_job"));
    assert_eq!(create("new", "color", json!("red")), is(400, "bad_request"));
    assert_eq!(create("new", "lanes", json!(384)), is(409, "too_long"));
    assert_eq!(create("new", "memory", json!("shared")), is(409, "no_pool"));
    assert_eq!(create("new", "slots", json!(8192)), is(409, "memory_full"));
    let sync = |body: Value| refused("PUT", "/v1/jobs/pair/sync", &body);
    assert_eq!(sync(json!({"mode": "ssp", "staleness": 63})), is(400, "bad_job"));
    assert_eq!(sync(json!({"mode": "asp", "quorum": 3})), is(400, "bad_job"));
    assert_eq!(sync(json!({"mode": "quorum", "quorum": 3})), is(400, "bad_job"));
    assert_eq!(sync(json!({"mode": "turbo"})), is(400, "bad_request"));
    assert_eq!(server.ask("PUT", "/v1/jobs/pair/sync", r#"{"mode":"quorum","quorum":1}"#).0, 200);
    let (_, pair) = server.ask("GET", "/v1/jobs/pair", "");
    assert!(pair.contains(r#""sync":{"mode":"quorum","quorum":1}"#), "{pair}");
    // What an unfitting job is told would fit.
    let body = json!({"name": "new", "world": 2, "slots": 8192}).to_string();
    let (_, answer) = server.ask("POST", "/v1/jobs", &body);
    assert_eq!(problem(&answer).fitting_slots, Some(2048));
    for slots in [2048, 1024, 512, 256] {
        let body = json!({"name": format!("j{slots}"), "world": 2, "slots": slots}).to_string();
        assert_eq!(server.ask("POST", "/v1/jobs", &body).0, 201, "{slots}");
    }
    let (_, node) = server.ask("GET", "/v1/node", "");
    let node: NodeStatus = serde_json::from_str(&node).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((node.free_slots, u64::from(node.slots), node.jobs), (0, SLOTS, 5));
}

#[test]
fn changes_need_the_token_and_workers_addresses_take_none() {
    let server = server();
    let changes = [
        ("POST", "/v1/jobs", r#"{"name":"new","world":2}"#),
        ("DELETE", "/v1/jobs/pair", ""),
        ("PUT", "/v1/jobs/pair/sync", r#"{"mode":"bsp"}"#),
        ("PUT", "/v1/node/drain", r#"{"draining":true}"#),
    ];
    let longer = format!("{TOKEN}0");
    for (method, path, body) in changes {
        let refused = |token, address| server.refusal(send_as(token, address, method, path, body));
        assert_eq!(refused(None, server.address), (401, "token_missing".into()));
        for wrong in ["x", "", &TOKEN[1..], &longer] {
            assert!(
                matches!(refused(Some(wrong), server.address), (401, code) if code.starts_with("token_"))
            );
        }
        assert_eq!(refused(Some(TOKEN), server.workers), (403, "not_here".into()));
    }
    for path in ["/v1/jobs", "/v1/node", "/v1/status", "/v1/history?job=pair", "/metrics"] {
        assert_eq!(server.refusal(send(server.workers, "GET", path, "")), (403, "not_here".into()));
    }
    // What workers may see: whether it lives, the description, and jobs that are open.
    for path in ["/healthz", "/readyz", "/v1/jobs/pair"] {
        assert_eq!(server.receive(send_as(None, server.workers, "GET", path, "")).0, 200, "{path}");
    }
    assert!(!server.control.lock().membership.is_draining());
    assert_eq!(server.control.lock().membership.list().len(), 1);
}

/// Which secrets open a page, for a job that is open to tokens only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Opens {
    /// Nobody needs any.
    Free,
    /// The job's key, and the node's token.
    KeyOrToken,
    /// The node's token alone.
    Token,
    /// None: workers' addresses do not have it.
    Nothing,
}

/// Every page with every method that it has: what opens it where jobs are managed, and at workers' addresses.
const LOCKS: [(&str, &str, &str, Opens, Opens); 15] = {
    use Opens::{Free, KeyOrToken, Nothing, Token};
    [
        ("GET", "/healthz", "", Free, Free),
        ("GET", "/readyz", "", Free, Free),
        ("GET", "/metrics", "", Free, Nothing),
        ("GET", "/v1/openapi.json", "", Free, Free),
        ("GET", "/v1/node", "", Free, Nothing),
        ("GET", "/v1/status", "", Free, Nothing),
        ("GET", "/v1/history?job=closed", "", Free, Nothing),
        ("GET", "/v1/jobs", "", Free, Nothing),
        ("GET", "/v1/jobs/closed", "", Free, KeyOrToken),
        ("POST", "/v1/jobs", r#"{"name":"closed","world":1}"#, Token, Nothing),
        ("PUT", "/v1/jobs/closed/sync", r#"{"mode":"bsp"}"#, Token, Nothing),
        ("PUT", "/v1/node/drain", r#"{"draining":false}"#, Token, Nothing),
        (
            "POST",
            "/v1/jobs/closed/join",
            r#"{"protocol":1,"rank":0,"world":1,"wait_seconds":0}"#,
            KeyOrToken,
            KeyOrToken,
        ),
        (
            "POST",
            "/v1/jobs/closed/leave",
            r#"{"protocol":1,"rank":0,"generation":1}"#,
            KeyOrToken,
            KeyOrToken,
        ),
        // The last, for what it deletes.
        ("DELETE", "/v1/jobs/closed", "", Token, Nothing),
    ]
};

/// Without a secret, with a wrong one and with another job's key no page changes a job or tells of one that is closed; the
/// list has every page that there is.
#[test]
fn security_every_page_is_opened_by_its_secrets_alone() {
    let told = LOCKS.map(|(method, path, ..)| {
        let path = path.split('?').next().unwrap_or_default().replace("closed", "{name}");
        (method.to_ascii_lowercase(), path)
    });
    for (page, methods) in PAGES {
        for method in methods {
            assert!(told.contains(&((*method).into(), page.into())), "{method} {page} is not in the list");
        }
    }
    let server = server();
    let key = |name: &str| {
        let (status, body) = server.ask("POST", "/v1/jobs", &json!({"name": name, "world": 1}).to_string());
        let created: Created = serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(status, 201);
        created.key.unwrap_or_default()
    };
    let (own, other) = (key("closed"), key("other"));
    let shown = [None, Some(""), Some("x"), Some(&other[..]), Some(&own[..]), Some(TOKEN)];
    for (method, path, body, managing, working) in LOCKS {
        for (address, opens) in [(server.workers, working), (server.address, managing)] {
            for token in shown {
                let passes = match opens {
                    Opens::Free => true,
                    Opens::KeyOrToken => token == Some(&own[..]) || token == Some(TOKEN),
                    Opens::Token => token == Some(TOKEN),
                    Opens::Nothing => false,
                };
                let (status, _) = server.receive(send_as(token, address, method, path, body));
                let is_refused = matches!(status, 401 | 403);
                assert_eq!(is_refused, !passes, "{method} {path} with {token:?}: {status}");
            }
        }
    }
    let left: Vec<String> = server.control.list().into_iter().map(|job| job.name).collect();
    assert_eq!(left, ["pair", "other"], "the token deletes, and nothing else did anything");
}

#[test]
fn a_node_without_a_token_cannot_be_changed() {
    let (control, _) = control();
    let control = control.with_token(None);
    runtime().block_on(async {
        let request = Request::builder().method(Method::DELETE).uri("/v1/jobs/pair");
        let request = request.header(AUTHORIZATION, "Bearer ");
        let answer = ask(&control, Scope::Management, request, Body::empty()).await;
        assert_eq!(answer.status(), StatusCode::FORBIDDEN);
    });
}

/// The media type makes browsers ask before they send another site's request here.
#[test]
fn bodies_are_json() {
    let (control, _) = control();
    runtime().block_on(async {
        for media in [None, Some("text/plain"), Some("application/jsonx")] {
            let mut request = Request::builder().method(Method::POST).uri(JOIN);
            if let Some(media) = media {
                request = request.header(CONTENT_TYPE, media);
            }
            let answer = ask(&control, Scope::Workers, request, Body::from("{}")).await;
            assert_eq!(answer.status(), StatusCode::UNSUPPORTED_MEDIA_TYPE, "{media:?}");
            assert_eq!(
                answer.headers().get(CONTENT_TYPE).map(HeaderValue::as_bytes),
                Some(PROBLEM_TYPE.as_bytes())
            );
        }
    });
}

/// A body that trickles is given up after its time, however often something comes.
#[test]
fn slow_bodies_are_given_up() {
    struct Trickle(tokio::time::Interval);
    impl hyper::body::Body for Trickle {
        type Data = axum::body::Bytes;
        type Error = std::convert::Infallible;
        fn poll_frame(
            mut self: std::pin::Pin<&mut Self>,
            context: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<Result<hyper::body::Frame<Self::Data>, Self::Error>>> {
            let frame = |_| Some(Ok(hyper::body::Frame::data(axum::body::Bytes::from_static(b" "))));
            self.0.poll_tick(context).map(frame)
        }
    }
    let (control, _) = control();
    runtime().block_on(async {
        tokio::time::pause();
        let start = tokio::time::Instant::now();
        let request =
            Request::builder().method(Method::POST).uri(JOIN).header(CONTENT_TYPE, "application/json");
        let body = Body::new(Trickle(tokio::time::interval(Duration::from_secs(1))));
        let answer = ask(&control, Scope::Workers, request, body).await;
        assert_eq!(
            (answer.status(), start.elapsed().as_secs()),
            (StatusCode::REQUEST_TIMEOUT, BODY_TIME.as_secs())
        );
    });
}

/// Methods that a page may have.
const METHODS: [&str; 6] = ["get", "put", "post", "delete", "patch", "options"];

/// Pages, as the documentation lists them.
const PAGES: [(&str, &[&str]); 13] = [
    ("/healthz", &["get"]),
    ("/metrics", &["get"]),
    ("/readyz", &["get"]),
    ("/v1/history", &["get"]),
    ("/v1/jobs", &["get", "post"]),
    ("/v1/jobs/{name}", &["get", "delete"]),
    ("/v1/jobs/{name}/join", &["post"]),
    ("/v1/jobs/{name}/leave", &["post"]),
    ("/v1/jobs/{name}/sync", &["put"]),
    ("/v1/node", &["get"]),
    ("/v1/node/drain", &["put"]),
    ("/v1/openapi.json", &["get"]),
    ("/v1/status", &["get"]),
];

/// The document has every page with every method that the router takes, and no other.
#[test]
fn the_document_has_all_pages_and_no_other() {
    let document = Contract::new().document;
    let paths = document["paths"].as_object().cloned().unwrap_or_default();
    let told: BTreeSet<&str> = paths.keys().map(String::as_str).collect();
    assert_eq!(told, PAGES.iter().map(|(path, _)| *path).collect());
    let (control, _) = control();
    runtime().block_on(async {
        for (path, methods) in PAGES {
            let operations = paths[path].as_object().cloned().unwrap_or_default();
            for method in METHODS {
                assert_eq!(operations.contains_key(method), methods.contains(&method), "{method} {path}");
                let name = Method::from_bytes(method.to_ascii_uppercase().as_bytes()).unwrap_or_default();
                let request = Request::builder().method(name).uri(path.replace("{name}", "pair"));
                let status = ask(&control, Scope::Management, request, Body::empty()).await.status();
                let served = status != StatusCode::METHOD_NOT_ALLOWED && status != StatusCode::NOT_FOUND;
                assert_eq!(served, methods.contains(&method), "{method} {path}: {status}");
            }
        }
    });
}

/// It is OpenAPI 3.1: its schemas are JSON schemas, its references lead somewhere, its operations have names of their
/// own, say what they answer, and declare the parameters of their paths.
#[test]
fn the_document_is_sound() {
    fn references(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(object) => {
                found.extend(object.get("$ref").and_then(Value::as_str).map(str::to_owned));
                object.values().for_each(|value| references(value, found));
            }
            Value::Array(list) => list.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }
    let document = Contract::new().document;
    assert!(document["openapi"].as_str().is_some_and(|version| version.starts_with("3.1.")));
    assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
    let mut found = Vec::new();
    references(&document, &mut found);
    for reference in &found {
        let pointer = reference.strip_prefix('#').unwrap_or_default();
        assert!(document.pointer(pointer).is_some(), "{reference}");
    }
    for (name, schema) in document["components"]["schemas"].as_object().into_iter().flatten() {
        assert!(jsonschema::draft202012::meta::is_valid(schema), "{name}");
    }
    let mut names = BTreeSet::new();
    for (path, operations) in document["paths"].as_object().into_iter().flatten() {
        for (method, operation) in operations.as_object().into_iter().flatten() {
            let name = operation["operationId"].as_str().unwrap_or_default().to_owned();
            assert!(!name.is_empty() && names.insert(name), "{method} {path}");
            assert!(
                operation["responses"].as_object().is_some_and(|list| !list.is_empty()),
                "{method} {path}"
            );
            let parameters = operation["parameters"].as_array().into_iter().flatten();
            let declared = parameters.filter(|parameter| parameter["in"] == "path").count();
            assert_eq!(declared, path.matches('{').count(), "{method} {path}");
        }
    }
}

#[test]
fn the_document_is_served() {
    let (control, _) = control();
    runtime().block_on(async {
        let answer =
            ask(&control, Scope::Workers, Request::builder().uri("/v1/openapi.json"), Body::empty()).await;
        let body = answer.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
        let served: Value = serde_json::from_slice(&body).unwrap_or_default();
        assert_eq!(served, Contract::new().document);
    });
}

/// JSON of any shape, small.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (0..5i64).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z{}\"\\\\\u{0}-\u{ff}]{0,8}".prop_map(Value::from),
        Just(Value::from("pair")),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::btree_map(prop::sample::select(KEYS.as_slice()), inner, 0..4)
                .prop_map(|map| map.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()),
        ]
    })
}

const KEYS: [&str; 16] = [
    "protocol",
    "rank",
    "world",
    "wait_seconds",
    "layout",
    "generation",
    "name",
    "lanes",
    "slots",
    "window",
    "quorum",
    "mode",
    "staleness",
    "draining",
    "timeout_seconds",
    "access",
];

/// A body that is nearly right: what the page takes, with some values exchanged.
fn nearly() -> impl Strategy<Value = Value> {
    let right = prop::sample::select(vec![
        json!({"protocol": 1, "rank": 0, "world": 2, "wait_seconds": 0}),
        json!({"protocol": 1, "rank": 1, "world": 2, "wait_seconds": 0, "layout": "x"}),
        json!({"protocol": 1, "rank": 0, "generation": 1}),
        json!({"name": "new", "world": 2, "slots": 256}),
        json!({"name": "pair", "world": 1, "slots": 2, "window": 1, "timeout_seconds": 1, "on_failure": "shrink"}),
        json!({"mode": "quorum", "quorum": 1}),
        json!({"mode": "ssp", "staleness": 1}),
        json!({"draining": false}),
    ]);
    let changes = proptest::collection::vec((prop::sample::select(KEYS.as_slice()), any_json()), 0..3);
    (right, changes).prop_map(|(mut body, changes)| {
        for (key, value) in changes {
            body[key] = value;
        }
        body
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever is sent to whatever page: an answer that the document allows, and no failure of the server's.
    #[test]
    fn no_request_breaks_the_server(requests in proptest::collection::vec((
        prop::sample::select(PAGES.as_slice()), prop::sample::select(METHODS.as_slice()),
        prop_oneof![Just("pair".to_owned()), Just("new".to_owned()), "[!-~]{1,6}"],
        prop_oneof![any_json(), nearly(), nearly()], any::<bool>(), any::<bool>(),
    ), 1..24)) {
        let (control, tables) = control();
        let contract = Contract::new();
        runtime().block_on(async {
            for ((page, _), method, name, body, known, managing) in requests {
                let path = page.replace("{name}", &name.replace(['/', '?', '#', '%'], "-"));
                let upper = method.to_ascii_uppercase();
                let mut request = Request::builder().method(upper.as_str()).uri(&path).header(CONTENT_TYPE, "application/json");
                if known {
                    request = request.header(AUTHORIZATION, format!("Bearer {TOKEN}"));
                }
                if request.uri_ref().is_none() {
                    continue;
                }
                let scope = if managing { Scope::Management } else { Scope::Workers };
                let answered = ask(&control, scope, request, Body::from(body.to_string()));
                // Who waits for other ranks hangs up.
                let Ok(answer) = tokio::time::timeout(Duration::from_millis(20), answered).await else { continue };
                let status = answer.status();
                let media = answer.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).map(str::to_owned);
                let text = answer.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
                let text = String::from_utf8_lossy(&text).into_owned();
                assert!(!status.is_server_error() || page == "/readyz", "{method} {path} {body}: {status} {text}");
                contract.check(method, &path, status.as_u16(), media.as_deref(), &text);
            }
        });
        // Nobody waits any more, and the node is as large as it was.
        let mut inner = control.lock();
        assert!(inner.waiting.is_empty());
        let names: Vec<String> = inner.membership.list().into_iter().map(|job| job.name).collect();
        drop(inner);
        names.iter().for_each(|name| assert!(control.delete(name).is_ok()));
        control.tick(std::time::Instant::now() + Duration::from_secs(3));
        inner = control.lock();
        let node = inner.membership.node();
        assert_eq!((u64::from(node.free_slots), node.jobs, node.closing_jobs), (SLOTS, 0, 0));
        drop((inner, tables));
    }
}

/// Jobs that come and go leave nothing behind: no slot, no number, no entry with a generation, no file descriptor.
#[test]
fn a_thousand_jobs_leave_nothing() {
    let (control, tables) = control();
    let descriptors = || std::fs::read_dir("/proc/self/fd").map(Iterator::count).unwrap_or(0);
    let mut now = std::time::Instant::now();
    let before = (control.lock().membership.node(), descriptors());
    runtime().block_on(async {
        for round in 0..1000 {
            let config = JobConfig { slots: 64 << (round % 4), window: 16, ..JobConfig::new("loop", 1) };
            assert!(control.create(&config).is_ok(), "{round}");
            let request = Request::builder().method(Method::POST).uri("/v1/jobs/loop/join");
            let request = request
                .header(CONTENT_TYPE, "application/json")
                .header(AUTHORIZATION, format!("Bearer {TOKEN}"));
            let body = r#"{"protocol":1,"rank":0,"world":1,"wait_seconds":1}"#;
            let answer = ask(&control, Scope::Workers, request, Body::from(body)).await;
            assert_eq!(answer.status(), StatusCode::OK, "{round}");
            assert!(control.delete("loop").is_ok());
            now += Duration::from_secs(3);
            control.tick(now);
        }
    });
    assert_eq!(control.lock().membership.node(), before.0);
    assert!(control.lock().waiting.is_empty());
    // Other tests open some meanwhile, and close them.
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while descriptors() >= before.1 + 200 {
        assert!(std::time::Instant::now() < deadline, "{} {}", before.1, descriptors());
        std::thread::yield_now();
    }
    let tables = tables.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut last = std::collections::BTreeMap::new();
    last.extend(tables.written.iter().map(|(number, entry)| (*number, entry.generation)));
    assert!(last.values().all(|generation| *generation == 0), "{last:?}");
    let generations: BTreeSet<u32> =
        tables.installed.iter().map(|formation| formation.entry.generation).collect();
    assert_eq!(generations.len(), 1000);
}
