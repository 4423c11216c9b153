//! Each error and each race of the membership.

use super::*;
use crate::config::FailurePolicy;
use crate::control::protocol::{JobState, SyncChange};
use crate::engine::RankProgress;
use paatp_common::Seq;
use paatp_common::policy::{Mode, Staleness};
use paatp_common::tag::rank_key;

const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
const B: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));
const RANDOM: Entropy = Entropy { generation: 7, nonce: 99 };

fn config(name: &str, world: u32) -> JobConfig {
    JobConfig::new(name, world)
}

/// Job `pair` has two ranks, job `solo` one.
fn membership() -> Membership {
    match Jobs::new(vec![config("pair", 2), config("solo", 1)]) {
        Ok(jobs) => Membership::new(&jobs, 20545, 2),
        Err(error) => panic!("{error}"),
    }
}

fn request(rank: u32, world: u32) -> JoinRequest {
    JoinRequest {
        protocol: PROTOCOL,
        rank,
        world,
        wait_seconds: 5.0,
        layout: None,
        attempt: None,
        below: None,
        members: None,
    }
}

fn join(m: &mut Membership, rank: u32, address: IpAddr) -> Result<Joined, ControlError> {
    m.join(Instant::now(), "pair", &request(rank, 2), address, RANDOM)
}

fn joined(m: &mut Membership, rank: u32, address: IpAddr) -> Joined {
    join(m, rank, address).unwrap_or_else(|error| panic!("{error}"))
}

fn code(result: Result<Joined, ControlError>) -> &'static str {
    result.err().map_or("joined", |error| error.code().name())
}

#[test]
fn a_generation_forms_when_all_are_there() {
    let mut m = membership();
    let first = joined(&mut m, 1, B);
    assert_eq!(first.formation, None);
    let second = joined(&mut m, 0, A);
    let Some(formation) = second.formation else { panic!("not formed") };
    assert_eq!(formation.waiters, vec![second.waiter, first.waiter]);
    assert_eq!((formation.number, formation.entry.generation, formation.entry.expected), (0, 7, 0b11));
    assert_eq!((formation.entry.first_slot, formation.entry.slots), (0, 256));
    assert_eq!(formation.ranks.len(), 2);
    assert_eq!(formation.ranks[1].address, mapped([10, 0, 0, 2]));
    assert_eq!(formation.ranks[1].key, rank_key(99, 1));
    assert_eq!((formation.grant.nonce, formation.grant.ports, formation.grant.port_base), (99, 2, 20545));
    assert_eq!(m.list()[0].state, JobState::Running);
}

/// An answer gets lost, and the worker asks again: not a new generation, for others are in this one already.
#[test]
fn a_grant_that_was_lost_is_told_again() {
    let mut m = membership();
    let with = |rank, attempt| JoinRequest { attempt, ..request(rank, 2) };
    let mut ask =
        |rank, attempt, address| m.join(Instant::now(), "pair", &with(rank, attempt), address, RANDOM);
    assert!(ask(0, Some(5), A).is_ok());
    let formation = ask(1, None, B).ok().and_then(|joined| joined.formation);
    let Some(formation) = formation else { panic!("not formed") };
    let mut again =
        |rank, attempt, address| m.grant_again("pair", &with(rank, attempt), address).map(|(_, grant)| grant);
    assert_eq!(again(0, Some(5), A), Some(formation.grant.clone()));
    // Another process, another machine, a worker that says nothing: they want a new generation.
    assert_eq!((again(0, Some(6), A), again(0, Some(5), B), again(1, None, B)), (None, None, None));
    assert_eq!((again(1, Some(5), B), again(77, Some(5), A)), (None, None));
    let leave = LeaveRequest { protocol: PROTOCOL, rank: 0, generation: Some(7) };
    assert!(matches!(m.leave("pair", &leave, A), Ok(Leaving::Noted)));
    assert!(m.grant_again("pair", &with(0, Some(5)), A).is_none(), "it has its results");
}

#[test]
fn slots_are_given_out_in_order() {
    let mut m = membership();
    let formed = m.join(Instant::now(), "solo", &request(0, 1), A, RANDOM);
    let formation = formed.ok().and_then(|joined| joined.formation);
    assert_eq!(formation.map(|f| (f.number, f.entry.first_slot, f.entry.expected)), Some((1, 256, 1)));
}

#[test]
fn sixty_four_ranks_fill_the_bitmap() {
    let Ok(jobs) = Jobs::new(vec![config("big", 64)]) else { panic!("refused") };
    let mut m = Membership::new(&jobs, 20545, 1);
    for rank in 0..64 {
        let joined = m.join(Instant::now(), "big", &request(rank, 64), A, RANDOM);
        let formation = joined.ok().and_then(|joined| joined.formation);
        assert_eq!(formation.map(|f| f.entry.expected), (rank == 63).then_some(u64::MAX));
    }
}

#[test]
fn joins_that_cannot_be_are_refused_and_change_nothing() {
    let mut m = membership();
    let mut ask = |name: &str, request: JoinRequest| {
        let result = m.join(Instant::now(), name, &request, A, RANDOM);
        (code(result), m.list()[0].waiting_ranks.len())
    };
    assert_eq!(ask("other", request(0, 2)), ("unknown_job", 0));
    assert_eq!(ask("pair", JoinRequest { protocol: 2, ..request(0, 2) }), ("bad_protocol", 0));
    assert_eq!(ask("pair", request(2, 2)), ("bad_rank", 0));
    assert_eq!(ask("pair", request(256, 2)), ("bad_rank", 0));
    assert_eq!(ask("pair", request(0, 3)), ("world_mismatch", 0));
    for wait_seconds in [-1.0, 3601.0, f64::NAN, f64::INFINITY] {
        assert_eq!(ask("pair", JoinRequest { wait_seconds, ..request(0, 2) }), ("bad_wait", 0));
    }
}

#[test]
fn errors_say_what_there_is() {
    let mut m = membership();
    let unknown = m.join(Instant::now(), "other", &request(0, 2), A, RANDOM);
    let message = unknown.map_err(|error| error.to_string()).err().unwrap_or_default();
    assert_eq!(message, "no job `other` here; anybody may join: pair, solo");
}

#[test]
fn a_rank_waits_from_one_address() {
    let mut m = membership();
    let first = joined(&mut m, 0, A);
    assert_eq!(code(join(&mut m, 0, B)), "rank_taken");
    // The same worker again, for instance after its connection broke: the newer wait counts.
    let again = joined(&mut m, 0, A);
    assert_eq!(again.replaced, Some(first.waiter));
    let formation = joined(&mut m, 1, B).formation;
    assert!(
        formation.is_some_and(|f| f.waiters.contains(&again.waiter) && !f.waiters.contains(&first.waiter))
    );
}

#[test]
fn a_waiter_that_leaves_is_told_who_was_missing() {
    let mut m = membership();
    let waiter = joined(&mut m, 0, A).waiter;
    assert_eq!(m.abandon("pair", waiter), Some(vec![1]));
    assert_eq!(m.abandon("pair", waiter), None);
    assert_eq!(m.list()[0].state, JobState::Idle);
    // Its rank is free for another address.
    assert_eq!(code(join(&mut m, 0, B)), "joined");
}

#[test]
fn an_old_wait_that_ends_late_does_not_end_the_new_one() {
    let mut m = membership();
    let old = joined(&mut m, 0, A).waiter;
    let new = joined(&mut m, 0, A).waiter;
    assert_eq!(m.abandon("pair", old), None);
    assert!(m.deadline("pair", new).is_some());
    assert_eq!(m.list()[0].waiting_ranks, vec![0]);
}

#[test]
fn giving_up_after_the_formation_comes_too_late() {
    let mut m = membership();
    let waiter = joined(&mut m, 0, A).waiter;
    assert!(joined(&mut m, 1, B).formation.is_some());
    assert_eq!(m.abandon("pair", waiter), None);
}

#[test]
fn the_running_generation_lasts_until_the_next_is_complete() {
    let mut m = membership();
    joined(&mut m, 0, A);
    joined(&mut m, 1, B);
    joined(&mut m, 0, B); // ranks may have moved
    let status = m.list()[0].clone();
    assert_eq!((status.state, status.generation), (JobState::Forming, Some(7)));
    assert_eq!((status.waiting_ranks, status.missing_ranks), (vec![0], vec![1]));
    let next = joined(&mut m, 1, A).formation;
    // The random number is the one in force, so the next one is taken.
    assert_eq!(next.map(|f| (f.entry.generation, f.ranks[0].address)), Some((8, mapped([10, 0, 0, 2]))));
}

#[test]
fn ranks_reduce_the_same() {
    let mut m = membership();
    let with =
        |rank, layout: Option<&str>| JoinRequest { layout: layout.map(Into::into), ..request(rank, 2) };
    let mut ask = |request| code(m.join(Instant::now(), "pair", &request, A, RANDOM));
    assert_eq!(ask(with(0, Some("x"))), "joined");
    assert_eq!(ask(with(1, Some("y"))), "layout_mismatch");
    assert_eq!(ask(with(0, Some("y"))), "joined"); // its own earlier wait does not count
    assert_eq!(ask(with(1, None)), "joined"); // a worker that tells none is not compared
}

#[test]
fn mapped_addresses_are_ipv4() {
    let dual: IpAddr = std::net::Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped().into();
    assert_eq!(table_address(dual), mapped([10, 0, 0, 1]));
    let mut m = membership();
    joined(&mut m, 0, A);
    assert_eq!(code(join(&mut m, 0, dual)), "joined");
}

#[test]
fn quorums_below_the_world_are_written() {
    let jobs = Jobs::new(vec![
        JobConfig { quorum: Some(1), ..config("a", 2) },
        JobConfig { quorum: Some(2), ..config("b", 2) },
    ]);
    let Ok(jobs) = jobs else { panic!("refused") };
    let list = Membership::new(&jobs, 1, 1).list();
    assert_eq!((list[0].sync, list[1].sync), (Sync::Quorum { quorum: 1 }, Sync::Bsp));
}

#[test]
fn ipv6_ranks_need_shorter_chunks() {
    let over_v6 = IpAddr::V6(std::net::Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2));
    let mut m = membership().with_mtu(None, Some(320));
    assert_eq!(code(join(&mut m, 0, over_v6)), "too_long");
    assert_eq!(code(join(&mut m, 0, A)), "joined");
    let mut m = membership().with_mtu(None, Some(352));
    assert_eq!(code(join(&mut m, 0, over_v6)), "joined");
}

/// A node of 1024 slots without jobs.
fn empty() -> Membership {
    match Jobs::with_memory(Vec::new(), Some(1024 * 1472), None) {
        Ok(jobs) => Membership::new(&jobs, 20545, 1),
        Err(error) => panic!("{error}"),
    }
}

fn create(m: &mut Membership, config: &JobConfig) -> Result<JobStatus, ControlError> {
    m.create(config, Access::Token, None)
}

fn refusal(result: Result<JobStatus, ControlError>) -> &'static str {
    result.err().map_or("done", |error| error.code().name())
}

fn delete(m: &mut Membership, name: &str, now: Instant) -> Deletion {
    let deletion = m.plan_deletion(name, 1).unwrap_or_else(|error| panic!("{error}"));
    m.delete(&deletion, now);
    deletion
}

#[test]
fn jobs_come_and_go() {
    let mut m = empty();
    let job = create(&mut m, &config("a", 2)).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(
        (job.job, job.state, job.slot_bytes, job.access),
        (0, JobState::Idle, 256 * 1472, Access::Token)
    );
    assert_eq!(refusal(create(&mut m, &config("a", 3))), "job_exists");
    assert_eq!(create(&mut m, &config("b", 1)).map(|job| job.job), Ok(1));
    // Nothing was ever written for it, so it is free at once.
    assert_eq!(delete(&mut m, "a", Instant::now()).write, None);
    assert_eq!(m.details("a").err().map(|error| error.code().name()), Some("unknown_job"));
    assert_eq!((m.node().free_slots, m.node().closing_jobs, m.node().jobs), (768, 0, 1));
    let again = create(&mut m, &config("c", 2));
    assert_eq!(again.map(|job| job.job), Ok(0));
    assert_eq!(m.details("c").map(|(_, entry, _)| entry.first_slot), Ok(0));
}

#[test]
fn what_cannot_be_created_changes_nothing() {
    let mut m = empty().with_mtu(Some(320), None);
    let before = m.node();
    let lanes = |lanes| JobConfig { lanes, ..config("a", 2) };
    assert_eq!(refusal(create(&mut m, &config("A", 2))), "bad_job");
    assert_eq!(refusal(create(&mut m, &lanes(384))), "too_long");
    assert_eq!(refusal(create(&mut m, &lanes(352))), "too_long");
    let shared = JobConfig { memory: MemoryKind::Shared, ..lanes(320) };
    assert_eq!(refusal(create(&mut m, &shared)), "no_pool");
    assert_eq!(m.node(), before);
    assert_eq!(refusal(create(&mut m, &lanes(320))), "done");
    let big = JobConfig { slots: 1024, name: "big".into(), ..lanes(320) };
    let Err(error) = create(&mut m, &big) else { panic!("created") };
    assert_eq!((error.code().name(), error.fitting_slots()), ("memory_full", Some(512)));
    assert!(error.to_string().contains("1024 slots in a row are not free, at most 768 are"), "{error}");
}

#[test]
fn a_node_has_64_jobs() {
    let mut m = empty();
    for number in 0..64 {
        let tiny = JobConfig { slots: 2, window: 1, ..config(&format!("j{number}"), 1) };
        assert_eq!(refusal(create(&mut m, &tiny)), "done");
    }
    let more = JobConfig { slots: 2, window: 1, ..config("more", 1) };
    assert_eq!(refusal(create(&mut m, &more)), "node_full");
    delete(&mut m, "j7", Instant::now());
    assert_eq!(create(&mut m, &more).map(|job| job.job), Ok(7));
}

#[test]
fn number_and_slots_of_a_job_with_members_stay_taken_for_a_while() {
    let (mut m, now) = (membership(), Instant::now());
    let waiter = joined(&mut m, 0, A).waiter;
    joined(&mut m, 1, B);
    let third = joined(&mut m, 0, A).waiter;
    assert_ne!(waiter, third);
    let deletion = delete(&mut m, "pair", now);
    // Another generation at the same addresses: its packets are answered with REJOIN.
    let Some((0, entry)) = deletion.write else { panic!("{deletion:?}") };
    assert_eq!((entry.generation, entry.world, entry.expected, entry.slots), (1, 2, 0b11, 256));
    assert_eq!(deletion.waiters, vec![third]);
    assert_eq!((m.node().free_slots, m.node().closing_jobs), (0, 1));
    assert_eq!(refusal(create(&mut m, &config("next", 2))), "memory_full");
    assert!(m.closed(now + CLOSING_TIME - Duration::from_millis(1)).is_empty());
    assert_eq!(m.closed(now + CLOSING_TIME), vec![0]);
    m.free(0);
    assert_eq!((m.node().free_slots, m.node().closing_jobs), (256, 0));
    assert_eq!(create(&mut m, &config("next", 2)).map(|job| job.job), Ok(0));
}

/// F11, F12: slots are not cleared between jobs, so no job may ever see the number of an earlier one.
#[test]
fn f11_generations_do_not_come_back_with_another_job() {
    let mut m = empty();
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..50 {
        assert_eq!(refusal(create(&mut m, &config("solo", 1))), "done");
        let formed = m.join(Instant::now(), "solo", &request(0, 1), A, RANDOM);
        let generation = formed.ok().and_then(|joined| joined.formation).map(|f| f.entry.generation);
        assert!(generation.is_some_and(|generation| seen.insert(generation)), "{generation:?}");
        let now = Instant::now();
        let closing = m.plan_deletion("solo", 7).unwrap_or_else(|error| panic!("{error}"));
        assert!(closing.write.is_some_and(|(_, entry)| seen.insert(entry.generation)));
        m.delete(&closing, now);
        for number in m.closed(now + CLOSING_TIME) {
            m.free(number);
        }
        assert_eq!((m.node().free_slots, m.node().jobs, m.node().closing_jobs), (1024, 0, 0));
    }
}

fn leave(
    m: &mut Membership,
    rank: u32,
    generation: Option<u32>,
    address: IpAddr,
) -> Result<Leaving, &'static str> {
    let request = LeaveRequest { protocol: PROTOCOL, rank, generation };
    m.leave("pair", &request, address).map_err(|error| error.code().name())
}

#[test]
fn ranks_leave() {
    let mut m = membership();
    let waiter = joined(&mut m, 0, A).waiter;
    assert_eq!(leave(&mut m, 0, None, B), Err("foreign_address"));
    assert_eq!(leave(&mut m, 1, None, B), Err("no_member"));
    assert_eq!(leave(&mut m, 0, None, A), Ok(Leaving::Waiter(waiter)));
    joined(&mut m, 0, A);
    joined(&mut m, 1, B);
    assert_eq!(leave(&mut m, 2, Some(7), A), Err("bad_rank"));
    assert_eq!(leave(&mut m, 0, Some(8), A), Err("no_member"));
    assert_eq!(leave(&mut m, 0, Some(7), B), Err("foreign_address"));
    assert_eq!(leave(&mut m, 0, Some(7), A), Ok(Leaving::Noted));
    assert_eq!(leave(&mut m, 0, Some(7), A), Ok(Leaving::Noted), "again is no harm");
    assert_eq!((m.list()[0].left_ranks.clone(), m.list()[0].state), (vec![0], JobState::Running));
    let Ok(Leaving::Last { number: 0, entry }) = leave(&mut m, 1, Some(7), B) else { panic!("not the last") };
    assert_eq!((entry.generation, entry.slots), (0, 256));
    m.finish(0, entry);
    assert_eq!((m.list()[0].state, m.list()[0].generation), (JobState::Idle, None));
    // Nothing of it is left in the tables, so a deletion need not wait.
    assert_eq!(delete(&mut m, "pair", Instant::now()).write, None);
}

#[test]
fn a_draining_node_takes_nothing_new() {
    let mut m = membership();
    let waiter = joined(&mut m, 0, A).waiter;
    assert_eq!(m.set_draining(true), vec![waiter]);
    assert_eq!(code(join(&mut m, 0, A)), "draining");
    assert_eq!(refusal(create(&mut m, &config("new", 1))), "draining");
    assert!(m.node().draining && m.list()[0].waiting_ranks.is_empty());
    assert_eq!(m.set_draining(false), vec![]);
    assert_eq!(code(join(&mut m, 0, A)), "joined");
}

#[test]
fn synchronisation_of_an_idle_job_is_that_of_its_next_generation() {
    let mut m = membership();
    let set = |m: &mut Membership, sync| match m.plan_sync("pair", sync, None) {
        Ok((number, _, to)) => {
            m.note_policy(number, to);
            "done"
        }
        Err(error) => error.code().name(),
    };
    assert_eq!(set(&mut m, Sync::Quorum { quorum: 1 }), "done");
    assert_eq!(set(&mut m, Sync::Quorum { quorum: 1 }), "done", "it is so already");
    joined(&mut m, 0, A);
    let formation = joined(&mut m, 1, B).formation;
    let mode = Mode { quorum: 1, ..Mode::BSP };
    assert_eq!(formation.map(|f| f.entry.policy), Some(Policy::settled(mode, 1)));
    for quorum in [0, 3, u32::MAX] {
        assert_eq!(set(&mut m, Sync::Quorum { quorum }), "bad_job");
        assert_eq!(set(&mut m, Sync::Asp { quorum: Some(quorum) }), "bad_job");
    }
    assert_eq!(set(&mut m, Sync::Ssp { staleness: 63, quorum: None }), "bad_job");
    assert_eq!(m.plan_sync("other", Sync::Bsp, None).map_err(|e| e.code().name()), Err("unknown_job"));
}

#[test]
fn f23_a_running_job_changes_once_at_a_time() {
    let mut m = membership();
    joined(&mut m, 0, A);
    joined(&mut m, 1, B);
    let ssp = Sync::Ssp { staleness: 2, quorum: None };
    let plan = |m: &Membership, sync, min_ack| match m.plan_sync("pair", sync, Some(min_ack)) {
        Ok((_, from, to)) => Ok((from, to)),
        Err(error) => Err(error.code().name()),
    };
    let Ok((bsp, armed)) = plan(&m, ssp, 4) else { panic!("refused") };
    assert_eq!((bsp, armed.is_armed()), (Policy::settled(Mode::BSP, 0), true));
    m.note_policy(0, armed);
    assert_eq!(m.list()[0].sync_change, Some(SyncChange { before: Sync::Bsp, from: None }));
    assert_eq!(plan(&m, Sync::Bsp, 4), Ok((armed, bsp)), "no chunk has met it");
    let switching = armed.switching(Seq(5), 256);
    m.note_policy(0, switching);
    let status = m.list()[0].clone();
    assert_eq!(status.sync_change, Some(SyncChange { before: Sync::Bsp, from: Some(517) }));
    assert_eq!((status.sync, status.epoch), (ssp, 1));
    assert_eq!(plan(&m, Sync::Bsp, 516), Err("sync_changing"));
    let Ok((from, to)) = plan(&m, Sync::Asp { quorum: Some(1) }, 517) else { panic!("refused") };
    assert_eq!((from, to.before(), to.epoch()), (switching, switching.after(), 2));
    // The next generation begins with what was wanted last.
    m.note_policy(0, to);
    joined(&mut m, 0, A);
    let formation = joined(&mut m, 1, B).formation;
    assert_eq!(formation.map(|f| f.entry.policy), Some(to.when_over()));
    assert_eq!(m.list()[0].sync_change, None);
}

#[test]
fn every_mode_of_the_data_plane_has_a_name() {
    for world in [1, 2, 64] {
        for quorum in 0..world {
            for staleness in [Staleness::Unbounded, Staleness::Bounded(0), Staleness::Bounded(62)] {
                let mode = Mode { quorum, staleness };
                assert_eq!(Sync::of(mode).mode(world), Some(mode));
            }
        }
    }
}

/// Job `watched` of three ranks with a timeout of ten seconds; its generation 7 runs.
fn watched(on_failure: FailurePolicy) -> Membership {
    let job = JobConfig { timeout_seconds: Some(10.0), on_failure, ..config("watched", 3) };
    let Ok(jobs) = Jobs::new(vec![job]) else { panic!("refused") };
    let mut m = Membership::new(&jobs, 20545, 1);
    for rank in 0..3 {
        assert!(m.join(Instant::now(), "watched", &request(rank, 3), A, RANDOM).is_ok());
    }
    assert_eq!(
        m.watched().iter().map(|(number, entry)| (*number, entry.generation)).collect::<Vec<_>>(),
        [(0, 7)]
    );
    m
}

/// Contributions of all ranks; nothing acknowledged.
fn progress(contributed: [u32; 3]) -> ProgressSnapshot {
    let ranks = contributed.map(|contributed| RankProgress { acknowledged: 0, contributed });
    ProgressSnapshot { ranks: ranks.into(), min_ack: 0 }
}

fn lose(m: &mut Membership, start: Instant, contributed: [u32; 3]) -> Loss {
    for second in 0..10 {
        let now = start + Duration::from_secs(second);
        assert_eq!(m.observe(now, 0, &progress(contributed), 9), None);
    }
    let loss = m.observe(start + Duration::from_secs(10), 0, &progress(contributed), 9);
    loss.unwrap_or_else(|| panic!("nobody was lost"))
}

/// F8: a shrink clears bits of `expected` and nothing else.
#[test]
fn f8_a_shrink_clears_a_bit() {
    let (mut m, now) = (watched(FailurePolicy::Shrink), Instant::now());
    let Ok((_, before, _)) = m.details("watched") else { panic!("gone") };
    let loss = lose(&mut m, now, [4, 1, 4]);
    assert_eq!((loss.policy, loss.ranks.as_slice()), (FailurePolicy::Shrink, [1].as_slice()));
    assert_eq!(loss.entry, JobEntry { expected: 0b101, ..before });
    m.lose(&loss);
    let status = m.list()[0].clone();
    assert_eq!((status.state, status.generation, status.lost_ranks), (JobState::Running, Some(7), vec![1]));
    // The last two that leave end it.
    let request = |rank| LeaveRequest { protocol: PROTOCOL, rank, generation: Some(7) };
    assert_eq!(m.leave("watched", &request(0), A), Ok(Leaving::Noted));
    assert!(matches!(m.leave("watched", &request(2), A), Ok(Leaving::Last { .. })));
}

#[test]
fn an_abort_ends_the_generation_for_all() {
    let (mut m, now) = (watched(FailurePolicy::Abort), Instant::now());
    let loss = lose(&mut m, now, [4, 1, 4]);
    assert_eq!((loss.policy, loss.generation, loss.entry.generation), (FailurePolicy::Abort, 7, 9));
    // Not a bit less: a slot that is touched now must not be complete with whoever is in it.
    assert_eq!(loss.entry.expected, 0b111);
    m.lose(&loss);
    let status = m.list()[0].clone();
    assert_eq!((status.state, status.generation, status.lost_ranks), (JobState::Failed, None, vec![1]));
    assert!(m.watched().is_empty());
    // All ranks may come again; then it is over.
    for rank in 0..3 {
        assert!(m.join(now, "watched", &request(rank, 3), A, RANDOM).is_ok());
    }
    let status = m.list()[0].clone();
    assert_eq!((status.state, status.generation, status.lost_ranks), (JobState::Running, Some(8), vec![]));
}

#[test]
fn tables_that_cannot_be_written_leave_no_generation() {
    let mut m = membership();
    joined(&mut m, 0, A);
    let formation = joined(&mut m, 1, B).formation.unwrap_or_else(|| panic!("not formed"));
    m.unform(&formation);
    assert_eq!((m.list()[0].state, m.list()[0].generation), (JobState::Idle, None));
}

#[test]
fn quorums_are_told_as_the_data_plane_has_them() {
    let Ok(jobs) = Jobs::new(vec![JobConfig { quorum: Some(2), ..config("a", 2) }]) else {
        panic!("refused")
    };
    let details = Membership::new(&jobs, 1, 1).details("a");
    assert_eq!(details.map(|(_, entry, _)| entry.policy), Ok(Policy::settled(Mode::BSP, 0)));
}

mod properties {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Step {
        Create(u8, u32),
        Delete(u8),
        Join(u8, u32),
        Leave(u8, u32),
        Wait,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..6u8, 0..4u32).prop_map(|(job, size)| Step::Create(job, size)),
            (0..6u8).prop_map(Step::Delete),
            (0..6u8, 0..2u32).prop_map(|(job, rank)| Step::Join(job, rank)),
            (0..6u8, 0..2u32).prop_map(|(job, rank)| Step::Leave(job, rank)),
            Just(Step::Wait),
        ]
    }

    proptest! {
        /// Whatever happens, live jobs' rings do not overlap, and when all jobs are gone all slots are free.
        #[test]
        fn nothing_leaks(steps in proptest::collection::vec(step(), 0..80)) {
            let (mut m, mut now) = (empty(), Instant::now());
            let name = |job: u8| format!("j{job}");
            for step in steps {
                match step {
                    Step::Create(job, size) => {
                        let slots = 64 << size;
                        let _ = create(&mut m, &JobConfig { slots, window: 32, ..config(&name(job), 2) });
                    }
                    Step::Delete(job) => {
                        if let Ok(deletion) = m.plan_deletion(&name(job), 5) {
                            m.delete(&deletion, now);
                        }
                    }
                    Step::Join(job, rank) => {
                        let _ = m.join(now, &name(job), &request(rank, 2), A, RANDOM);
                    }
                    Step::Leave(job, rank) => {
                        let running = m.details(&name(job)).ok().and_then(|(_, _, running)| running);
                        let request = LeaveRequest { protocol: PROTOCOL, rank, generation: running.map(|r| r.number) };
                        if let Ok(Leaving::Last { number, entry }) = m.leave(&name(job), &request, A) {
                            m.finish(number, entry);
                        }
                    }
                    Step::Wait => {
                        now += CLOSING_TIME;
                        for number in m.closed(now) {
                            m.free(number);
                        }
                    }
                }
                let mut rings: Vec<_> = m.list().iter().filter_map(|job| m.details(&job.name).ok()).map(|(_, e, _)| (e.first_slot, e.slots)).collect();
                rings.sort_unstable();
                prop_assert!(rings.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
                prop_assert!(m.node().free_slots + rings.iter().map(|ring| ring.1).sum::<u32>() <= 1024);
            }
            for job in m.list() {
                delete(&mut m, &job.name, now);
            }
            for number in m.closed(now + CLOSING_TIME) {
                m.free(number);
            }
            prop_assert_eq!((m.node().free_slots, m.node().jobs, m.node().closing_jobs), (1024, 0, 0));
        }
    }
}

#[path = "ascent_tests.rs"]
mod ascent;
