use paatp_common::levels::Link;

use super::*;
use crate::control::ascent::Setback;
use crate::control::protocol::Nodes;

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
        nodes: None,
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
    let expected: Vec<_> = (0..8).map(|rank| (address(rank), rank_key(99, rank as u16))).collect();
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

/// A node whose job of 2 ranks is rank 1 of its parent's.
fn lower_node() -> Membership {
    let job = JobConfig { parent: Some("10.9.9.9".into()), child: Some(1), ..config("up", 2) };
    match Jobs::new(vec![job]) {
        Ok(jobs) => Membership::new(&jobs, 20545, 2),
        Err(error) => panic!("{error}"),
    }
}

/// F22: the ranks of a node are one at its parent. Their salts are those of ranks that are counted through all nodes.
#[test]
fn f22_ranks_of_nodes_are_counted_through() {
    let mut m = lower_node();
    let mut join = |rank, address| {
        let joined = m.join(Instant::now(), "up", &request(rank, 2), address, RANDOM);
        joined.unwrap_or_else(|error| panic!("{error}")).ascent
    };
    assert_eq!(join(1, B), None);
    let Some(ascent) = join(0, A) else { panic!("nobody goes up") };
    assert_eq!((ascent.parent.child, ascent.world), (Some(1), 2));
    let grant = |members: &[u16]| {
        let nodes = Some(Nodes { members: members.into(), child: None });
        Grant { nodes, world: members.len() as u8, ..granted(77) }
    };
    // The parent must know as many ranks as there are.
    let refused = m.form_below(&ascent, &grant(&[40, 3, 1]), uplink()).err().map(|error| error.code().name());
    assert_eq!(refused, Some("parent"));
    let formation =
        m.form_below(&ascent, &grant(&[40, 2, 1]), uplink()).unwrap_or_else(|error| panic!("{error}"));
    let keys: Vec<_> = formation.ranks.iter().map(|rank| rank.key).collect();
    assert_eq!(keys, [rank_key(99, 40), rank_key(99, 41)]);
    assert_eq!((formation.entry.world, formation.entry.expected, formation.entry.rises), (2, 0b11, 1));
    let nodes = formation.grant.nodes.unwrap_or_else(|| panic!("ranks are told"));
    assert_eq!(nodes, Nodes { members: vec![40, 2, 1], child: Some(1) });
    let all = (0..43).fold(0u64, |sum, rank| sum.wrapping_add(rank_key(99, rank)));
    assert_eq!(nodes.keys(99), all);
    let seating = nodes.seating(1, 2).unwrap_or_else(|| panic!("it is among them"));
    assert_eq!((seating.seat, seating.here.of(1), seating.root.count(u64::MAX)), (1, (41, 1), 43));
    // By ranks nobody can join a job whose ranks are nodes.
    let mut other = lower();
    let ascent = both_join(&mut other, None).unwrap_or_else(|| panic!("nobody goes up"));
    let mixed = Grant { nodes: Some(nodes), ..granted(78) };
    let refused = other.form_below(&ascent, &mixed, uplink()).err().map(|error| error.to_string());
    assert!(refused.is_some_and(|why| why.contains("`child`")));
}

/// F22: what cannot be with nodes for ranks is refused.
#[test]
fn f22_nodes_need_all_of_their_ranks() {
    let node = |name, m: &mut Membership, members| {
        let request = JoinRequest { members: Some(members), world: members, ..request(0, 2) };
        code(m.join(Instant::now(), name, &request, A, RANDOM))
    };
    let with = |job: JobConfig| match Jobs::new(vec![job]) {
        Ok(jobs) => Membership::new(&jobs, 20545, 2),
        Err(error) => panic!("{error}"),
    };
    let quorum = JobConfig { quorum: Some(1), ..config("up", 2) };
    let shrinks =
        JobConfig { on_failure: FailurePolicy::Shrink, timeout_seconds: Some(5.0), ..config("up", 2) };
    for mut m in [with(quorum), with(shrinks), lower_node()] {
        assert_eq!(node("up", &mut m, 2), "no_levels");
    }
    let mut m = with(config("up", 2));
    assert_eq!([0, 65].map(|members| node("up", &mut m, members)), ["no_levels"; 2]);
    assert_eq!(node("up", &mut m, 64), "joined");
    let worker = m.join(Instant::now(), "up", &request(1, 2), B, RANDOM);
    let formation =
        worker.ok().and_then(|joined| joined.formation).unwrap_or_else(|| panic!("all are there"));
    let sum = (0..64).fold(0u64, |sum, rank| sum.wrapping_add(rank_key(RANDOM.nonce, rank)));
    let keys: Vec<_> = formation.ranks.iter().map(|rank| rank.key).collect();
    assert_eq!(keys, [sum, rank_key(RANDOM.nonce, 64)]);
    assert_eq!(formation.grant.nodes, Some(Nodes { members: vec![64, 1], child: None }));
    let refused =
        m.plan_sync("up", Sync::Quorum { quorum: 1 }, Some(0)).err().map(|error| error.code().name());
    assert_eq!(refused, Some("no_levels"));
    assert!(m.plan_sync("up", Sync::Ssp { staleness: 2, quorum: None }, Some(0)).is_ok());
}

/// A node with levels that has this job and no other.
fn root(job: JobConfig) -> Membership {
    let node = crate::config::NodeConfig { levels: true, ..Default::default() };
    match Jobs::of_node(vec![job], &node) {
        Ok(jobs) => Membership::new(&jobs, 20545, 2),
        Err(error) => panic!("{error}"),
    }
}

fn node(rank: u32, members: u32) -> JoinRequest {
    JoinRequest { members: Some(members), ..request(rank, members) }
}

/// F22: ranks that lower nodes join by their own names and nodes that are one rank cannot be in one generation: the lower
/// nodes would refuse what the root has granted to all. So it is refused before, whoever comes first.
#[test]
fn f22_nodes_and_ranks_of_lower_nodes_are_not_mixed() {
    let join = |m: &mut Membership, request: &JoinRequest, address| {
        code(m.join(Instant::now(), "up", request, address, RANDOM))
    };
    let below = |rank| JoinRequest { below: Some(vec![rank + 1]), ..request(rank, 4) };
    let mut m = root(config("up", 4));
    assert_eq!(join(&mut m, &node(0, 40), A), "joined");
    assert_eq!(join(&mut m, &below(1), B), "no_levels");
    assert_eq!(join(&mut m, &request(1, 4), B), "joined", "workers may be among nodes");
    let mut m = root(config("up", 4));
    assert_eq!(join(&mut m, &below(1), B), "joined");
    assert_eq!(join(&mut m, &node(0, 40), A), "no_levels");
    assert_eq!(join(&mut m, &request(0, 4), A), "joined", "and among ranks of lower nodes");
    // Whoever waited so does no more.
    assert_eq!(join(&mut m, &node(1, 40), B), "joined", "its own wait is replaced");
    // Behind one rank of a node there would be many ports.
    let below = JoinRequest { below: Some(vec![1]), ..request(0, 2) };
    assert_eq!(join(&mut lower_node(), &below, A), "no_levels");
    assert_eq!(join(&mut lower(), &JoinRequest { below: Some(vec![5]), ..request(4, 8) }, A), "joined");
}

/// F22: a quorum cannot slip in between the join of a node and the generation.
#[test]
fn f22_no_quorum_while_a_node_waits() {
    let mut m = root(config("up", 2));
    assert_eq!(code(m.join(Instant::now(), "up", &node(0, 40), A, RANDOM)), "joined");
    let refused = m.plan_sync("up", Sync::Quorum { quorum: 1 }, None).err().map(|error| error.code().name());
    assert_eq!(refused, Some("no_levels"));
    m.abandon_all();
    assert!(m.plan_sync("up", Sync::Quorum { quorum: 1 }, None).is_ok());
}

/// F22: what a restart with another file says of the policy does not shrink a generation with nodes.
#[test]
fn f22_a_lost_node_ends_the_generation() {
    let job = JobConfig { timeout_seconds: Some(10.0), ..config("up", 2) };
    let (mut m, start) = (root(job), Instant::now());
    assert_eq!(code(m.join(start, "up", &node(1, 40), A, RANDOM)), "joined");
    assert_eq!(code(m.join(start, "up", &request(0, 2), B, RANDOM)), "joined");
    m.jobs.values_mut().for_each(|job| job.policy = FailurePolicy::Shrink);
    let ranks = [4, 1].map(|contributed| RankProgress { acknowledged: 0, contributed });
    let progress = ProgressSnapshot { ranks: ranks.into(), min_ack: 0 };
    let loss = (0..=10).find_map(|second| m.observe(start + Duration::from_secs(second), 0, &progress, 9));
    let Some(loss) = loss else { panic!("nobody was lost") };
    assert_eq!((loss.ranks.as_slice(), loss.policy), (&[1][..], FailurePolicy::Abort));
    assert_eq!((loss.entry.expected, loss.entry.generation != 7), (0b11, true));
    m.lose(&loss);
    assert_eq!((m.list()[0].state, m.list()[0].lost_ranks.as_slice()), (JobState::Failed, &[1][..]));
}

/// F22: what a parent tells of the others is looked at before anything is made of it.
#[test]
fn f22_a_parent_that_tells_nonsense_is_refused() {
    let refused = |members: &[u16], world: usize| {
        let mut m = lower_node();
        let mut ascent = None;
        for (rank, address) in [(1, B), (0, A)] {
            let joined = m.join(Instant::now(), "up", &request(rank, 2), address, RANDOM);
            ascent = joined.unwrap_or_else(|error| panic!("{error}")).ascent;
        }
        let Some(ascent) = ascent else { panic!("nobody goes up") };
        let nodes = Some(Nodes { members: members.into(), child: None });
        let grant = Grant { nodes, world: world as u8, ..granted(77) };
        m.form_below(&ascent, &grant, uplink()).err().map(|error| error.code().name())
    };
    assert_eq!(refused(&[40, 2, 1], 3), None);
    for (members, world) in [
        (&[40, 2, 0][..], 3),
        (&[40, 2, 1], 4),
        (&[40, 2, 1], 2),
        (&[40, 2, 1], 200),
        (&[40, 2, 4096], 3),
        (&[1; 65], 65),
        (&[], 0),
        (&[40], 1),
    ] {
        assert_eq!(refused(members, world), Some("parent"), "{members:?} {world}");
    }
}
