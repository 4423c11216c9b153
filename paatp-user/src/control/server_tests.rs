//! The server over real sockets on loopback, with tables in memory.

use super::*;
use crate::config::{JobConfig, Jobs};
use crate::control::protocol::PROTOCOL;
use std::io::{Read, Write};
use std::net::TcpStream;

#[derive(Default)]
struct Memory {
    installed: Vec<Formation>,
    fail: bool,
}

impl Tables for Memory {
    fn install(&mut self, formation: &Formation) -> Result<(), EngineError> {
        if self.fail {
            return Err(EngineError::Gone("eth0".into()));
        }
        self.installed.push(formation.clone());
        Ok(())
    }

    fn progress(&self, _: u16, entry: &JobEntry) -> Result<(ProgressSnapshot, Option<u32>), EngineError> {
        let ranks = vec![crate::engine::RankProgress { acknowledged: 3, contributed: 5 }; entry.world.into()];
        Ok((ProgressSnapshot { ranks, min_ack: 3 }, Some(2)))
    }
}

struct Server {
    address: SocketAddr,
    tables: Arc<Mutex<Memory>>,
    control: Control,
}

/// Starts a server for job `pair` on a thread of its own.
fn server() -> Server {
    let config =
        JobConfig { name: "pair".into(), world: 2, lanes: 352, slots: 256, window: 64, quorum: None };
    let jobs = Jobs::new(vec![config]).unwrap_or_else(|error| panic!("{error}"));
    let tables = Arc::new(Mutex::new(Memory::default()));
    let control = Control::new(Membership::new(&jobs, 20545, 1), tables.clone());
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap_or_else(|error| panic!("{error}"));
    let address = listener.local_addr().unwrap_or_else(|error| panic!("{error}"));
    let serving = control.clone();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let Ok(runtime) = runtime else { return };
        let _ = runtime.block_on(async {
            listener.set_nonblocking(true)?;
            serve_all(serving, vec![TcpListener::from_std(listener)?]).await
        });
    });
    Server { address, tables, control }
}

fn send(address: SocketAddr, method: &str, path: &str, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap_or_else(|error| panic!("{error}"));
    let _ = stream.set_read_timeout(Some(Duration::from_secs(10)));
    let length = body.len();
    let text = format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(text.as_bytes()).unwrap_or_else(|error| panic!("{error}"));
    stream
}

/// Status and body.
fn receive(mut stream: TcpStream) -> (u16, String) {
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text);
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    (status, text.split("\r\n\r\n").nth(1).unwrap_or_default().to_owned())
}

fn ask(address: SocketAddr, method: &str, path: &str, body: &str) -> (u16, String) {
    receive(send(address, method, path, body))
}

fn body(rank: u32, wait: f64) -> String {
    format!(r#"{{"protocol":{PROTOCOL},"rank":{rank},"world":2,"wait_seconds":{wait}}}"#)
}

const JOIN: &str = "/v1/jobs/pair/join";

fn refused(body: &str) -> Refused {
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {body}"))
}

#[test]
fn everybody_gets_the_grant_after_the_tables_are_written() {
    let server = server();
    let first = send(server.address, "POST", JOIN, &body(1, 10.0));
    let (status, second) = ask(server.address, "POST", JOIN, &body(0, 10.0));
    assert_eq!(status, 200, "{second}");
    assert_eq!(receive(first), (200, second.clone()));
    let grant: Grant = serde_json::from_str(&second).unwrap_or_else(|error| panic!("{error}"));
    let installed = server.tables.lock().map(|tables| tables.installed.clone()).unwrap_or_default();
    assert_eq!(installed.len(), 1);
    assert_eq!((installed[0].entry.generation, installed[0].ranks.len()), (grant.generation, 2));
    let (status, details) = ask(server.address, "GET", "/v1/jobs/pair", "");
    let details: JobDetails = serde_json::from_str(&details).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((status, details.status.generation), (200, Some(grant.generation)));
    assert_eq!((details.ranks[1].rank, details.ranks[1].contributed, details.slots_in_use), (1, 5, Some(2)));
}

#[test]
fn a_wait_ends_with_the_missing_ranks() {
    let server = server();
    let (status, text) = ask(server.address, "POST", JOIN, &body(1, 0.05));
    let answer = refused(&text);
    assert_eq!((status, answer.error.as_str(), answer.missing_ranks), (408, "ranks_missing", vec![0]));
    assert!(
        answer.message.starts_with("1 of 2 ranks had not joined after 50 ms: rank 0;"),
        "{}",
        answer.message
    );
}

#[test]
fn a_worker_that_hangs_up_leaves() {
    let server = server();
    let waiting = || server.control.lock().membership.list()[0].waiting_ranks.clone();
    let until = |wanted: &[u8]| {
        let deadline = Instant::now() + Duration::from_secs(5);
        while waiting() != wanted && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(waiting(), wanted);
    };
    let stream = send(server.address, "POST", JOIN, &body(1, 10.0));
    until(&[1]);
    drop(stream);
    until(&[]);
    assert!(server.control.lock().waiting.is_empty());
}

#[test]
fn a_second_join_of_a_rank_ends_the_first() {
    let server = server();
    let first = send(server.address, "POST", JOIN, &body(1, 10.0));
    std::thread::sleep(Duration::from_millis(50));
    let again = send(server.address, "POST", JOIN, &body(1, 10.0));
    let (status, text) = receive(first);
    assert_eq!((status, refused(&text).error.as_str()), (409, "replaced"));
    assert_eq!(ask(server.address, "POST", JOIN, &body(0, 10.0)).0, 200);
    assert_eq!(receive(again).0, 200);
}

#[test]
fn failed_tables_are_everybodys_error() {
    let server = server();
    if let Ok(mut tables) = server.tables.lock() {
        tables.fail = true;
    }
    let first = send(server.address, "POST", JOIN, &body(1, 10.0));
    std::thread::sleep(Duration::from_millis(50));
    let (status, text) = ask(server.address, "POST", JOIN, &body(0, 10.0));
    assert_eq!((status, refused(&text).error.as_str()), (500, "tables"));
    assert_eq!(receive(first).0, 500);
}

#[test]
fn bad_requests_have_one_shape() {
    let server = server();
    let bad = |method: &str, path: &str, body: &str| {
        let (status, text) = ask(server.address, method, path, body);
        let answer = refused(&text);
        assert!(!answer.message.is_empty());
        (status, answer.error)
    };
    assert_eq!(bad("POST", JOIN, "{"), (400, "bad_request".into()));
    assert_eq!(bad("POST", JOIN, ""), (400, "bad_request".into()));
    assert_eq!(bad("POST", JOIN, r#"{"protocol":1,"rank":-1,"world":2,"wait_seconds":1}"#).0, 400);
    assert_eq!(bad("POST", JOIN, &"x".repeat(MAX_BODY_BYTES + 1)), (413, "bad_request".into()));
    assert_eq!(bad("POST", "/v1/jobs/other/join", &body(0, 1.0)), (404, "unknown_job".into()));
    assert_eq!(bad("POST", JOIN, &body(2, 1.0)), (400, "bad_rank".into()));
    assert_eq!(bad("GET", "/v1/jobs/other", ""), (404, "unknown_job".into()));
    assert_eq!(bad("GET", "/nowhere", ""), (404, "not_found".into()));
    assert_eq!(bad("GET", JOIN, ""), (405, "bad_method".into()));
    assert_eq!(ask(server.address, "GET", "/healthz", ""), (200, "ok\n".into()));
    let (status, jobs) = ask(server.address, "GET", "/v1/jobs", "");
    let jobs: JobList = serde_json::from_str(&jobs).unwrap_or_default();
    assert_eq!((status, jobs.jobs.len()), (200, 1));
}
