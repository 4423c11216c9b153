//! Nodes that are one rank each, over real sockets on loopback; every answer is compared with the OpenAPI document.

use std::time::{Duration, Instant};

use super::*;
use crate::config::{JobConfig, Jobs};
use crate::control::membership::{Ascent, Entropy, Membership};
use crate::control::parent;
use crate::control::protocol::{Grant, JobDetails, PROTOCOL};
use crate::control::testing::{Server, problem, send, server};

const JOIN: &str = "/v1/jobs/pair/join";

/// A node of 40 ranks that joins as rank 0 of the job of two.
fn node(wait: f64) -> String {
    format!(r#"{{"protocol":{PROTOCOL},"rank":0,"world":40,"members":40,"wait_seconds":{wait}}}"#)
}

fn until(server: &Server, wanted: &[u8]) {
    let waiting = || server.control.lock().membership.list()[0].waiting_ranks.clone();
    let deadline = Instant::now() + Duration::from_secs(5);
    while waiting() != wanted && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(waiting(), wanted);
}

#[test]
fn f22_a_node_and_a_worker_are_told_of_each_other() {
    let server = server();
    let first = send(server.workers, "POST", JOIN, &node(10.0));
    until(&server, &[0]);
    let worker = format!(r#"{{"protocol":{PROTOCOL},"rank":1,"world":2,"wait_seconds":10}}"#);
    let (status, second) = server.receive(send(server.workers, "POST", JOIN, &worker));
    assert_eq!((status, server.receive(first)), (200, (200, second.clone())));
    let grant: Grant = serde_json::from_str(&second).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(grant.nodes, Some(Nodes { members: vec![40, 1], child: None }));
    let (status, text) = server.ask("GET", "/v1/jobs/pair", "");
    let details: JobDetails = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((status, details.status.members, details.ranks.len()), (200, vec![40, 1], 2));
}

/// The document says what a job with `child`, a join with `members` and a grant with `nodes` look like.
#[test]
fn f22_the_document_knows_nodes() {
    let server = server();
    let (status, document) = server.ask("GET", "/v1/openapi.json", "");
    let document: serde_json::Value =
        serde_json::from_str(&document).unwrap_or_else(|error| panic!("{error}"));
    let properties = |name: &str| document["components"]["schemas"][name]["properties"].clone();
    assert_eq!(status, 200);
    assert_eq!(properties("JobConfig")["child"]["maximum"], 63);
    assert_eq!(properties("JoinRequest")["members"]["maximum"], 64);
    for (schema, field) in
        [("Grant", "nodes"), ("Nodes", "members"), ("JobStatus", "child"), ("JobStatus", "members")]
    {
        assert!(!properties(schema)[field].is_null(), "{schema}.{field}");
    }
}

/// Who is missing at the root is a rank of the root's job, of which there are two, not of the node's, of which there are
/// three: the node's own ranks are all there.
#[test]
fn f22_ranks_that_are_missing_above_are_called_so() {
    let server = server();
    let (status, text) = server.receive(send(server.workers, "POST", JOIN, &node(0.05)));
    let problem = problem(&text);
    assert_eq!((status, problem.missing_ranks.as_slice()), (408, &[1][..]));
    assert!(problem.detail.contains("1 of 2 ranks"), "{}", problem.detail);

    let error = match parent::join(&ascent(&server)) {
        Err(error) => error,
        Ok(_) => panic!("granted"),
    };
    assert_eq!((error.code().name(), error.missing_ranks()), ("ranks_missing", &[][..]));
    let text = error.to_string();
    assert!(text.contains(&format!("rank 1 of its parent {}", server.workers)), "{text}");
    assert!(!text.contains("of 3 ranks"), "{text}");
}

/// That of a node of three ranks, which is rank 0 at a server and has little time.
fn ascent(server: &Server) -> Ascent {
    let parent = Some(server.workers.to_string());
    let job = JobConfig { parent, child: Some(0), ..JobConfig::new("pair", 3) };
    let jobs = Jobs::new(vec![job]).unwrap_or_else(|error| panic!("{error}"));
    let mut membership = Membership::new(&jobs, 1, 1);
    let mut join = |rank| {
        let request = JoinRequest {
            protocol: PROTOCOL,
            rank,
            world: 3,
            wait_seconds: 0.05,
            layout: None,
            attempt: None,
            below: None,
            members: None,
        };
        let entropy = Entropy { generation: 1, nonce: 1 };
        let joined = membership.join(Instant::now(), "pair", &request, [127, 0, 0, 1].into(), entropy);
        joined.unwrap_or_else(|error| panic!("{error}")).ascent
    };
    (0..3).find_map(&mut join).unwrap_or_else(|| panic!("nobody goes up"))
}
