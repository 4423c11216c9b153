use paatp_common::levels::Link;

use super::*;
use crate::control::ascent::Setback;

/// A node whose job `up` has ranks 4 to 5 of 8 here and the others elsewhere.
fn lower() -> Membership {
    let job = JobConfig { parent: Some("10.9.9.9".into()), ranks: "4-5".parse().ok(), ..config("up", 8) };
    match Jobs::new(vec![job]) {
        Ok(jobs) => Membership::new(&jobs, 20545, 2),
        Err(error) => panic!("{error}"),
    }
}

fn join_lower(m: &mut Membership, rank: u32, address: IpAddr) -> Result<Joined, ControlError> {
    m.join(Instant::now(), "up", &request(rank, 8), address, RANDOM)
}

fn both_join(m: &mut Membership, layout: Option<&str>) -> Option<Ascent> {
    let mut join = |rank, address| {
        let request = JoinRequest { layout: layout.map(Into::into), ..request(rank, 8) };
        let joined = m.join(Instant::now(), "up", &request, address, RANDOM);
        joined.unwrap_or_else(|error| panic!("{error}"))
    };
    join(5, B);
    join(4, A).ascent
}

impl Membership {
    fn abandon_all(&mut self) {
        self.jobs.values_mut().for_each(|job| job.waiting.clear());
    }
}

fn granted(generation: u32) -> Grant {
    let JobConfig { lanes, window, slots, .. } = config("up", 8);
    Grant {
        protocol: PROTOCOL,
        job: 7,
        generation,
        nonce: 99,
        world: 8,
        lanes: lanes as u16,
        window: window as u16,
        slots,
        port_base: 30000,
        ports: 1,
    }
}

fn uplink() -> Uplink {
    let parent = mapped([10, 9, 9, 9]);
    let link = Link { parent, mac: [2; 6], port_base: 30000, ports: 1, number: 7, ..Link::default() };
    Uplink { interface: 3, link }
}

/// The ranks of one node wait: it goes up for them, and takes generation and nonce from above.
#[test]
fn a_lower_node_forms_what_its_parent_granted() {
    let mut m = lower();
    assert_eq!(code(join_lower(&mut m, 0, A)), "rank_elsewhere");
    let v6: IpAddr = "fd00::1".parse().unwrap_or(A);
    assert_eq!(code(join_lower(&mut m, 4, v6)), "no_levels", "its parent is reached over IPv4");
    let first = join_lower(&mut m, 5, B).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((first.formation, first.ascent), (None, None));
    let second = join_lower(&mut m, 4, A).unwrap_or_else(|error| panic!("{error}"));
    let Some(ascent) = second.ascent else { panic!("nobody goes up") };
    assert_eq!((second.formation, ascent.world, ascent.parent.ranks.bits()), (None, 8, 0b11_0000));

    let other = Grant { slots: 512, ..granted(77) };
    let refused = m.form_below(&ascent, &other, uplink()).err().map(|error| error.code().name());
    assert_eq!(refused, Some("parent"));
    let formation = m.form_below(&ascent, &granted(77), uplink()).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((formation.entry.generation, formation.entry.expected), (77, 0b11_0000));
    assert_eq!((formation.entry.rises, formation.uplink), (1, Some(uplink())));
    assert_eq!((formation.grant.generation, formation.grant.nonce, formation.grant.job), (77, 99, 0));
    let ranks: Vec<_> = formation.ranks.iter().map(|rank| (rank.address, rank.key)).collect();
    let address = |rank: usize| match rank {
        4 => mapped([10, 0, 0, 1]),
        5 => mapped([10, 0, 0, 2]),
        _ => [0; 16],
    };
    // Results hold the salts of all ranks.
    let expected: Vec<_> = (0..8).map(|rank| (address(rank), rank_key(99, rank as u8))).collect();
    assert_eq!(ranks, expected);
    assert_eq!(formation.waiters.len(), 2);

    // Its own ranks are all that leaving waits for.
    let leave = |rank| LeaveRequest { protocol: PROTOCOL, rank, generation: Some(77) };
    assert_eq!(m.leave("up", &leave(4), A), Ok(Leaving::Noted));
    assert!(matches!(m.leave("up", &leave(5), B), Ok(Leaving::Last { .. })));
    assert!(m.parent("up").is_some_and(|parent| parent.address.port() == 20545));
}

/// An ascent that fails ends the waits that it was for.
#[test]
fn a_failed_ascent_ends_its_waits() {
    let mut m = lower();
    let ascent = both_join(&mut m, None).unwrap_or_else(|| panic!("nobody goes up"));
    let Setback { waiters, next } = m.give_up(&ascent, Instant::now());
    assert_eq!((waiters.len(), next), (2, None));
    let late = m.form_below(&ascent, &granted(78), uplink()).err().map(|error| error.code().name());
    assert_eq!(late, Some("job_deleted"), "it is over");
    assert!(both_join(&mut m, None).is_some(), "the next one may begin");
}

/// However often ranks join, their parent is asked once at a time.
#[test]
fn a_job_goes_up_once_at_a_time() {
    let mut m = lower();
    let first = both_join(&mut m, None).unwrap_or_else(|| panic!("nobody goes up"));
    for _ in 0..3 {
        assert_eq!(both_join(&mut m, None), None);
    }
    // What it is granted is for those who wait now.
    let formed = m.form_below(&first, &granted(77), uplink()).map(|formation| formation.waiters.len());
    assert_eq!(formed, Ok(2));

    // It fails: those who came meanwhile go on waiting, and the parent is asked for them.
    let first = both_join(&mut m, None).unwrap_or_else(|| panic!("nobody goes up"));
    assert_eq!(both_join(&mut m, None), None);
    let Setback { waiters, next } = m.give_up(&first, Instant::now());
    let Some(second) = next else { panic!("nobody goes up for those who came meanwhile") };
    assert_eq!((waiters, second.last == first.last), (vec![], false));
    assert_eq!(m.give_up(&first, Instant::now()), Setback { waiters: vec![], next: None }, "told twice");
    assert_eq!(m.form_below(&second, &granted(79), uplink()).map(|formed| formed.waiters.len()), Ok(2));
}

/// Other nodes agreed to what the ranks reduced then, not to what they reduce now.
#[test]
fn what_is_granted_for_other_tensors_is_given_back() {
    let mut m = lower();
    let first = both_join(&mut m, Some("one")).unwrap_or_else(|| panic!("nobody goes up"));
    m.abandon_all();
    assert_eq!(both_join(&mut m, Some("two")), None);
    let refused = m.form_below(&first, &granted(77), uplink()).err().map(|error| error.code().name());
    assert_eq!(refused, Some("replaced"));
    let next = m.give_up(&first, Instant::now()).next;
    assert_eq!(next.and_then(|ascent| ascent.layout).as_deref(), Some("two"));
}

/// A node that was not started for it joins for nobody, and takes nobody's sums.
#[test]
fn nodes_without_levels_take_no_part() {
    let mut m = membership();
    let mut node = |below| {
        let request = JoinRequest { below, ..request(0, 2) };
        code(m.join(Instant::now(), "pair", &request, A, RANDOM))
    };
    assert_eq!((node(Some(vec![1])), node(None)), ("no_levels", "joined"));
    let job = JobConfig { parent: Some("10.9.9.9".into()), ranks: "0-1".parse().ok(), ..config("up", 8) };
    let refused = m.create(&job, Access::Open, None).err().map(|error| error.code().name());
    assert_eq!(refused, Some("no_levels"));
    // A job that was made when the node had them: alone it would give its ranks the sum of this node.
    let mut before = lower();
    before.levels = false;
    assert_eq!(code(join_lower(&mut before, 4, A)), "no_levels");
}
