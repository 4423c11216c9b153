//! A node for tests of those who look.

use crate::control::protocol::{CounterReport, JobStatus, NodeStatus};
use crate::telemetry::health;
use crate::telemetry::history::{RankSeries, Series};
use crate::telemetry::snapshot::{JobSnapshot, OpenSlot, Snapshot};
use crate::telemetry::stall::Stall;

/// Three jobs: `train` of four ranks, in which rank 2 holds the others up, `eval` of two, which is well, and `idle`.
pub(crate) fn node() -> Snapshot {
    let node = serde_json::json!({
        "schema_version": 1, "unix_seconds": 1.8e9, "uptime_seconds": 7500.0, "core_age_seconds": 0.1,
        "build": { "version": "0.1.0", "object_sha256": "00ff" },
        "attachment": { "interface": "eth0", "mode": "native", "held_by": "bpf_link", "program": 123 },
        "node": NodeStatus {
            version: "0.1.0".into(), draining: false, jobs: 3, max_jobs: 64, running_jobs: 2, closing_jobs: 0,
            max_lanes: 352, slots: 65_536, free_slots: 64_768, longest_free_slots: 64_768, slot_bytes: 1472,
            pool_slots: 0, pool_slots_in_use: 0,
        },
        "slots_in_use": 66, "counters": CounterReport::default(), "jobs": [], "problems": [],
        "health": health::Health::default(),
    });
    let mut snapshot: Snapshot = serde_json::from_value(node).unwrap_or_else(|error| panic!("{error}"));
    snapshot.counters.refusals.insert("bad_tag".into(), 3);
    snapshot.counters.refusals.insert("ahead".into(), 1_234_567);
    snapshot.counters.refusals.insert("behind".into(), 0);
    snapshot.jobs =
        vec![job(0, "train", 4, "running"), job(1, "eval", 2, "running"), job(2, "idle", 8, "idle")];
    stall(&mut snapshot.jobs[0], 2);
    snapshot.health = health::judge(&snapshot);
    snapshot
}

/// A job that is well.
pub(crate) fn job(number: u16, name: &str, world: u8, state: &str) -> JobSnapshot {
    let runs = state == "running";
    let status: JobStatus = serde_json::from_value(serde_json::json!({
        "name": name, "job": number, "state": state, "world": world, "lanes": 352, "window": 64, "slots": 256,
        "slot_bytes": 376_832, "memory": "reserved", "access": "open", "timeout_seconds": null,
        "on_failure": "abort", "sync": { "mode": "bsp" }, "epoch": 0, "sync_change": null, "generation": runs.then_some(77), "waiting_ranks": [],
        "missing_ranks": [], "left_ranks": [], "lost_ranks": [],
    }))
    .unwrap_or_else(|error| panic!("{error}"));
    let rate = if runs { 12_340.0 } else { 0.0 };
    let rank = |rank: u8| {
        serde_json::json!({
            "rank": rank, "state": if runs { "member" } else { "absent" },
            "address": runs.then(|| format!("10.0.{number}.{rank}")), "contributed": 4_800_000,
            "acknowledged": 4_799_900, "marks": 0, "busy": 7, "chunks_per_second": rate, "lag_chunks": 0,
            "straggler": false, "in_the_way_seconds": null,
        })
    };
    JobSnapshot {
        status,
        forming_seconds: None,
        completed_chunks: 4_799_000,
        chunks_per_second: rate,
        slots_in_use: Some(0),
        oldest_open_slot: None,
        lag_chunks: 0,
        ranks: serde_json::from_value((0..world).map(rank).collect())
            .unwrap_or_else(|error| panic!("{error}")),
        stall: None,
    }
}

/// A rank holds the others up.
pub(crate) fn stall(job: &mut JobSnapshot, rank: u8) {
    let name = job.status.name.clone();
    let contributors = (0..job.status.world).filter(|other| *other != rank).collect();
    job.oldest_open_slot =
        Some(OpenSlot { chunk: 4711, age_seconds: 3.2, contributors, missing_ranks: vec![rank] });
    (job.lag_chunks, job.chunks_per_second) = (64, 0.0);
    let row = &mut job.ranks[usize::from(rank)];
    (row.lag_chunks, row.straggler, row.in_the_way_seconds) = (64, true, Some(3.2));
    job.ranks.iter_mut().for_each(|rank| rank.chunks_per_second = 0.0);
    job.stall = Some(Stall {
        sentence: format!("job `{name}` waits for contributions of rank {rank} for 3.2 s, 64 chunks behind"),
        job: name,
        missing_ranks: vec![rank],
        seconds: 3.2,
        chunks_behind: 64,
    });
}

/// So many seconds in which each rank moves more than the one before.
pub(crate) fn series(ranks: u8, seconds: u64) -> Series {
    let steps = |rank: u8| (0..seconds).map(|second| (second as u32 + 1) * (u32::from(rank) + 1)).collect();
    let rank = |rank: u8| RankSeries { rank, contributed: steps(rank), acknowledged: steps(rank) };
    Series {
        schema_version: 1,
        job: "train".into(),
        lanes: 352,
        first: 0,
        next: seconds,
        uptime_seconds: (0..seconds).map(|second| second as f64).collect(),
        ranks: (0..ranks).map(rank).collect(),
    }
}
