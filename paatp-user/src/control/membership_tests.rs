//! Each error and each race of the membership.

use super::*;
use crate::config::DEFAULT_SLOTS;

const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
const B: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));
const RANDOM: Entropy = Entropy { generation: 7, nonce: 99 };

fn config(name: &str, world: u32) -> JobConfig {
    JobConfig { name: name.into(), world, lanes: 352, slots: DEFAULT_SLOTS, window: 64, quorum: None }
}

/// Job `pair` has two ranks, job `solo` one.
fn membership() -> Membership {
    match Jobs::new(vec![config("pair", 2), config("solo", 1)]) {
        Ok(jobs) => Membership::new(&jobs, 20545, 2),
        Err(error) => panic!("{error}"),
    }
}

fn request(rank: u32, world: u32) -> JoinRequest {
    JoinRequest { protocol: PROTOCOL, rank, world, wait_seconds: 5.0, layout: None }
}

fn join(m: &mut Membership, rank: u32, address: IpAddr) -> Result<Joined, JoinError> {
    m.join(Instant::now(), "pair", &request(rank, 2), address, RANDOM)
}

fn joined(m: &mut Membership, rank: u32, address: IpAddr) -> Joined {
    join(m, rank, address).unwrap_or_else(|error| panic!("{error}"))
}

fn code(result: Result<Joined, JoinError>) -> &'static str {
    result.err().map_or("joined", |error| error.code())
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
    assert_eq!(message, "no job `other` here; this aggregator serves: pair, solo");
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
fn generations_are_never_zero_or_repeated() {
    assert_eq!(next_generation(0, None), 1);
    assert_eq!(next_generation(0, Some(1)), 2);
    assert_eq!(next_generation(u32::MAX, Some(u32::MAX)), 1);
    assert_eq!(next_generation(5, Some(4)), 5);
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
    assert_eq!((list[0].quorum, list[1].quorum), (Some(1), None));
}

#[test]
fn ipv6_ranks_need_shorter_chunks() {
    let over_v6 = IpAddr::V6(std::net::Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2));
    let mut m = membership().with_ipv6_lanes(Some(320));
    assert_eq!(code(join(&mut m, 0, over_v6)), "too_long");
    assert_eq!(code(join(&mut m, 0, A)), "joined");
    let mut m = membership().with_ipv6_lanes(Some(352));
    assert_eq!(code(join(&mut m, 0, over_v6)), "joined");
}
