//! Joining, waiting, losing ranks: over real sockets on loopback, with tables in memory.

use super::*;
use crate::config::{MemoryKind, NodeConfig};
use crate::control::pacing::PACE_INTERVAL;
use crate::control::protocol::{JobList, JobState, PROTOCOL};
use crate::control::testing::{Server, control_of, problem, send, send_as, server};
use crate::engine::RankProgress;
use paatp_common::Seq;
use paatp_common::job::JobEntry;
use paatp_common::progress::RankRecord;
use std::time::Duration;

fn body(rank: u32, wait: f64) -> String {
    format!(r#"{{"protocol":{PROTOCOL},"rank":{rank},"world":2,"wait_seconds":{wait}}}"#)
}

const JOIN: &str = "/v1/jobs/pair/join";

/// Waits until these ranks wait for the others.
fn until(server: &Server, wanted: &[u8]) {
    let waiting = || server.control.lock().membership.list()[0].waiting_ranks.clone();
    let deadline = Instant::now() + Duration::from_secs(5);
    while waiting() != wanted && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(waiting(), wanted);
}

/// Both ranks of `pair` join; returns the grant.
fn form(server: &Server) -> Grant {
    let first = send(server.workers, "POST", JOIN, &body(1, 10.0));
    until(server, &[1]);
    let (status, second) = server.receive(send(server.workers, "POST", JOIN, &body(0, 10.0)));
    assert_eq!(status, 200, "{second}");
    assert_eq!(server.receive(first), (200, second.clone()));
    serde_json::from_str(&second).unwrap_or_else(|error| panic!("{error}"))
}

fn details(server: &Server) -> JobDetails {
    let (status, details) = server.ask("GET", "/v1/jobs/pair", "");
    assert_eq!(status, 200);
    serde_json::from_str(&details).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn everybody_gets_the_grant_after_the_tables_are_written() {
    let server = server();
    let grant = form(&server);
    let installed = server.tables(|tables| tables.installed.clone());
    assert_eq!(installed.len(), 1);
    assert_eq!((installed[0].entry.generation, installed[0].ranks.len()), (grant.generation, 2));
    let details = details(&server);
    assert_eq!(details.status.generation, Some(grant.generation));
    assert_eq!((details.ranks[1].rank, details.ranks[1].contributed, details.slots_in_use), (1, 5, Some(2)));
}

#[test]
fn a_wait_ends_with_the_missing_ranks() {
    let server = server();
    let (status, text) = server.ask("POST", JOIN, &body(1, 0.05));
    let answer = problem(&text);
    assert_eq!((status, answer.code.as_str(), answer.missing_ranks), (408, "ranks_missing", vec![0]));
    let expected = "1 of 2 ranks had not joined after 50 ms: rank 0;";
    assert!(answer.detail.starts_with(expected), "{}", answer.detail);
}

#[test]
fn a_worker_that_hangs_up_leaves() {
    let server = server();
    let sent = send(server.address, "POST", JOIN, &body(1, 10.0));
    until(&server, &[1]);
    drop(sent);
    until(&server, &[]);
    assert!(server.control.lock().waiting.is_empty());
}

#[test]
fn a_second_join_of_a_rank_ends_the_first() {
    let server = server();
    let first = send(server.address, "POST", JOIN, &body(1, 10.0));
    until(&server, &[1]);
    let again = send(server.address, "POST", JOIN, &body(1, 10.0));
    assert_eq!(server.refusal(first), (409, "replaced".into()));
    assert_eq!(server.ask("POST", JOIN, &body(0, 10.0)).0, 200);
    assert_eq!(server.receive(again).0, 200);
}

#[test]
fn failed_tables_are_everybodys_error() {
    let server = server();
    server.tables(|tables| tables.fail = true);
    let first = send(server.address, "POST", JOIN, &body(1, 10.0));
    until(&server, &[1]);
    assert_eq!(server.refusal(send(server.address, "POST", JOIN, &body(0, 10.0))), (500, "tables".into()));
    assert_eq!(server.refusal(first), (500, "tables".into()));
    assert_eq!(server.control.lock().membership.list()[0].state, JobState::Idle);
}

#[test]
fn a_job_that_is_deleted_tells_whoever_waits_and_frees_what_it_had() {
    let server = server();
    let free = |server: &Server| server.control.lock().membership.node().free_slots;
    let before = free(&server);
    form(&server);
    let waiting = send(server.workers, "POST", JOIN, &body(1, 10.0));
    until(&server, &[1]);
    // As long as the tables cannot be written, nothing has happened.
    server.tables(|tables| tables.fail = true);
    assert_eq!(server.refusal(send(server.address, "DELETE", "/v1/jobs/pair", "")), (500, "tables".into()));
    server.tables(|tables| tables.fail = false);
    assert_eq!(details(&server).status.state, JobState::Forming);
    assert_eq!(server.ask("DELETE", "/v1/jobs/pair", "").0, 204);
    assert_eq!(server.refusal(waiting), (410, "job_deleted".into()));
    assert_eq!(server.refusal(send(server.address, "GET", "/v1/jobs/pair", "")), (404, "unknown_job".into()));
    let later = Instant::now() + crate::control::membership::CLOSING_TIME;
    server.tables(|tables| tables.fail = true);
    server.control.tick(later);
    assert_eq!(free(&server), before, "not cleared, so not free");
    server.tables(|tables| tables.fail = false);
    server.control.tick(later);
    assert_eq!(free(&server), before + 256);
    let written = server.tables(|tables| tables.written.clone());
    assert_eq!(written.last(), Some(&(0, JobEntry::default())));
}

#[test]
fn ranks_that_leave_end_the_generation() {
    let server = server();
    let grant = form(&server);
    let leave = |rank: u32, generation: u32| {
        let text = format!(r#"{{"protocol":1,"rank":{rank},"generation":{generation}}}"#);
        send(server.workers, "POST", "/v1/jobs/pair/leave", &text)
    };
    assert_eq!(server.refusal(leave(0, grant.generation ^ 1)), (409, "no_member".into()));
    assert_eq!(server.receive(leave(0, grant.generation)).0, 204);
    assert_eq!(details(&server).status.left_ranks, vec![0]);
    assert_eq!(server.receive(leave(1, grant.generation)).0, 204);
    assert_eq!(details(&server).status.state, JobState::Idle);
    let written = server.tables(|tables| tables.written.clone());
    assert_eq!(written.iter().map(|(_, entry)| entry.generation).collect::<Vec<_>>(), vec![0]);
    // A rank that only waits can leave as well.
    let waiting = send(server.workers, "POST", JOIN, &body(1, 10.0));
    until(&server, &[1]);
    let text = r#"{"protocol":1,"rank":1}"#;
    assert_eq!(server.receive(send(server.workers, "POST", "/v1/jobs/pair/leave", text)).0, 204);
    assert_eq!(server.refusal(waiting), (409, "left".into()));
}

#[test]
fn a_drained_node_tells_whoever_waits() {
    let server = server();
    let waiting = send(server.workers, "POST", JOIN, &body(1, 10.0));
    until(&server, &[1]);
    let drain =
        |draining: bool| server.ask("PUT", "/v1/node/drain", &format!(r#"{{"draining":{draining}}}"#)).0;
    assert_eq!((server.ask("GET", "/readyz", "").0, drain(true)), (200, 200));
    assert_eq!(server.refusal(waiting), (409, "draining".into()));
    assert_eq!((server.ask("GET", "/readyz", "").0, server.ask("GET", "/healthz", "").0), (503, 200));
    assert_eq!(server.refusal(send(server.workers, "POST", JOIN, &body(1, 10.0))), (409, "draining".into()));
    assert_eq!((drain(false), server.ask("GET", "/readyz", "").0), (200, 200));
}

#[test]
fn lost_ranks_are_found_by_the_clock() {
    let server = server();
    let job = r#"{"name":"slow","world":2,"access":"open","timeout_seconds":5,"on_failure":"shrink"}"#;
    assert_eq!(server.ask("POST", "/v1/jobs", job).0, 201);
    let path = "/v1/jobs/slow/join";
    let first = send(server.workers, "POST", path, &body(1, 10.0));
    assert_eq!(server.receive(send(server.workers, "POST", path, &body(0, 10.0))).0, 200);
    assert_eq!(server.receive(first).0, 200);
    let rank = |contributed| RankProgress { acknowledged: 0, contributed };
    server.tables(|tables| tables.progress = Some(vec![rank(9), rank(2)]));
    let start = Instant::now();
    for look in 0..20 {
        server.control.tick(start + look * Duration::from_millis(250));
    }
    assert!(server.tables(|tables| tables.written.is_empty()));
    // A table that cannot be read or written now is read or written the next time.
    server.tables(|tables| tables.fail = true);
    server.control.tick(start + Duration::from_secs(5));
    server.tables(|tables| (tables.fail, tables.fail_writes) = (false, true));
    server.control.tick(start + Duration::from_secs(5));
    server.tables(|tables| tables.fail_writes = false);
    server.control.tick(start + Duration::from_secs(5));
    let written = server.tables(|tables| tables.written.clone());
    assert_eq!(
        written.iter().map(|(number, entry)| (*number, entry.expected)).collect::<Vec<_>>(),
        vec![(1, 0b01)]
    );
    let (_, list) = server.ask("GET", "/v1/jobs", "");
    let list: JobList = serde_json::from_str(&list).unwrap_or_default();
    assert_eq!(list.jobs.iter().map(|job| job.lost_ranks.clone()).collect::<Vec<_>>(), [vec![], vec![1]]);
}

/// Grants go to the generation that runs, gains to its ranks; what could not be written is written later, and what ended is
/// left alone.
#[test]
fn jobs_that_run_are_paced() {
    let server = server();
    server.control.pace(Instant::now());
    assert!(server.tables(|tables| tables.written.is_empty() && tables.gains.is_empty()), "nobody runs");
    let grant = form(&server);
    let record = |contributed| RankRecord { contributed: Seq(contributed), ..RankRecord::default() };
    server.tables(|tables| {
        tables.records = Some(vec![record(9), record(4)]);
        tables.fail_writes = true;
    });
    server.control.pace(Instant::now());
    assert!(server.tables(|tables| std::mem::take(&mut tables.fail_writes) && tables.gains.is_empty()));
    server.control.pace(Instant::now());
    let (written, gains) = server.tables(|tables| (tables.written.clone(), tables.gains.clone()));
    let [(0, entry)] = written[..] else { panic!("{written:?}") };
    assert_eq!((entry.generation, entry.expected, entry.window), (grant.generation, 0b11, grant.window));
    assert!((grant.window / 4..=grant.window).contains(&entry.granted), "{entry:?}");
    assert_eq!(gains.iter().map(|(job, gains)| (*job, gains.len())).collect::<Vec<_>>(), [(0, 2)]);
    // Its members leave.
    for rank in 0..2 {
        let body = format!(r#"{{"protocol":{PROTOCOL},"rank":{rank},"generation":{}}}"#, grant.generation);
        let left = server.receive(send(server.workers, "POST", "/v1/jobs/pair/leave", &body));
        assert!(left.0 < 300, "{left:?}");
    }
    let ended = server.tables(|tables| tables.written.len());
    server.tables(|tables| tables.records = Some(vec![record(90), record(4)]));
    server.control.pace(Instant::now());
    assert_eq!(server.tables(|tables| tables.written.len()), ended);
    // The next generation begins without a grant.
    let next = form(&server);
    let installed =
        server.tables(|tables| tables.installed.last().map(|f| (f.entry.generation, f.entry.granted)));
    assert_eq!(installed, Some((next.generation, 0)));
}

/// Of two jobs in a pool that holds both up, the one with more goodput gets fewer places.
#[test]
fn places_in_the_pool_are_tuned() {
    let node = NodeConfig { memory: Some(0), pool: Some(256 * 1472), ..NodeConfig::default() };
    let shared = |name| JobConfig { memory: MemoryKind::Shared, ..JobConfig::new(name, 1) };
    let (control, tables) = control_of(vec![shared("a"), shared("b")], &node);
    for name in ["a", "b"] {
        let request = JoinRequest {
            protocol: PROTOCOL,
            rank: 0,
            world: 1,
            wait_seconds: 5.0,
            layout: None,
            attempt: None,
            below: None,
            members: None,
        };
        let mut inner = control.lock();
        let drawn = entropy().unwrap_or_else(|error| panic!("{error}"));
        let joined = inner.membership.join(Instant::now(), name, &request, [10, 0, 0, 1].into(), drawn);
        let formation = joined.ok().and_then(|joined| joined.formation);
        inner.form(&formation.unwrap_or_else(|| panic!("{name} is not formed")));
    }
    let places = || {
        let list = control.lock().membership.list();
        list.iter().map(|job| job.places).collect::<Vec<_>>()
    };
    assert_eq!(places(), [Some(8), Some(8)]);
    let start = Instant::now();
    for tick in 0..400 {
        let mut tables = tables.lock().unwrap_or_else(PoisonError::into_inner);
        tables.shares = BTreeMap::from([(0, (tick * 400, tick * 300)), (1, (tick * 100, tick * 300))]);
        // A failure is made good at the next tick.
        tables.fail_writes = tick % 2 == 1;
        drop(tables);
        control.pace(start + PACE_INTERVAL * tick);
    }
    assert_eq!(places(), [Some(1), Some(8)]);
    let tables = tables.lock().unwrap_or_else(PoisonError::into_inner);
    let last = tables.written.iter().rfind(|(number, _)| *number == 0).map(|(_, entry)| entry.k);
    assert_eq!(last, Some(1), "as the tables have it");
    drop(tables);
    let node = control.node().unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((node.slots, node.free_slots, node.pool_slots, node.pool_slots_in_use), (258, 0, 256, 7));
}

#[test]
fn jobs_open_to_tokens_open_to_tokens() {
    let server = server();
    let (status, created) = server.ask("POST", "/v1/jobs", r#"{"name":"closed","world":1}"#);
    let created: Created = serde_json::from_str(&created).unwrap_or_else(|error| panic!("{error}"));
    let key = created.key.unwrap_or_default();
    assert_eq!((status, key.len(), created.status.access), (201, 64, Access::Token));
    let join = |token: Option<&str>| {
        let body = r#"{"protocol":1,"rank":0,"world":1,"wait_seconds":5}"#;
        send_as(token, server.workers, "POST", "/v1/jobs/closed/join", body)
    };
    assert_eq!(server.refusal(join(None)), (401, "token_missing".into()));
    assert_eq!(server.refusal(join(Some("wrong"))), (401, "token_wrong".into()));
    assert_eq!(server.receive(join(Some(&key))).0, 200);
    assert_eq!(server.receive(join(Some(crate::control::testing::TOKEN))).0, 200);
    let look = |token: Option<&str>| send_as(token, server.workers, "GET", "/v1/jobs/closed", "");
    assert_eq!(server.refusal(look(None)), (401, "token_missing".into()));
    assert_eq!(server.receive(look(Some(&key))).0, 200);
    let leave = |token: Option<&str>| {
        send_as(
            token,
            server.workers,
            "POST",
            "/v1/jobs/closed/leave",
            r#"{"protocol":1,"rank":0,"generation":1}"#,
        )
    };
    assert_eq!(server.refusal(leave(None)), (401, "token_missing".into()));
    assert_eq!(server.refusal(leave(Some(&key))), (409, "no_member".into()));
    // The key opens its own job, and no changes.
    let delete = |token| send_as(token, server.address, "DELETE", "/v1/jobs/closed", "");
    assert_eq!(server.refusal(delete(Some(&key))), (401, "token_wrong".into()));
    assert_eq!(server.refusal(delete(None)), (401, "token_missing".into()));
    // Told once.
    assert!(!server.ask("GET", "/v1/jobs/closed", "").1.contains(&key));
}

/// What `GET /v1/status` and `GET /v1/history` say goes through the document's schema in `ask`.
#[test]
fn a_node_can_be_looked_at() {
    let server = server();
    form(&server);
    server.control.tick(Instant::now());
    let (status, text) = server.ask("GET", "/v1/status", "");
    let snapshot: Snapshot = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert_eq!((status, snapshot.schema_version, snapshot.jobs.len()), (200, 1, 1));
    let job = &snapshot.jobs[0];
    assert_eq!((job.status.name.as_str(), job.status.state, job.ranks.len()), ("pair", JobState::Running, 2));
    assert!(job.ranks.iter().all(|rank| rank.address.as_deref() == Some("127.0.0.1")), "{:?}", job.ranks);
    let (status, text) = server.ask("GET", "/v1/history?job=pair&since=0", "");
    let series: Series = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert_eq!((status, series.next, series.ranks.len()), (200, 1, 2));
    let refused = |path: &str| server.refusal(send(server.address, "GET", path, ""));
    assert_eq!(refused("/v1/history"), (400, "bad_request".into()));
    assert_eq!(refused("/v1/history?job=pair&since=-1"), (400, "bad_request".into()));
    assert_eq!(refused("/v1/history?job=pair&speed=1"), (400, "bad_request".into()));
    assert_eq!(refused("/v1/history?job=nobody"), (404, "unknown_job".into()));
}

/// Who looks waits for a turn, not for ever, and nobody else waits for those who look.
#[test]
fn looks_are_limited() {
    let server = server();
    let turns: Vec<_> =
        (0..LOOKS).filter_map(|_| server.control.1.clone().try_acquire_owned().ok()).collect();
    assert_eq!(turns.len(), LOOKS);
    let looking = send(server.address, "GET", "/v1/status", "");
    assert_eq!(server.ask("GET", "/v1/node", "").0, 200);
    assert_eq!(server.refusal(looking), (503, "busy".into()));
    drop(turns);
    assert_eq!(server.ask("GET", "/v1/status", "").0, 200);
}
