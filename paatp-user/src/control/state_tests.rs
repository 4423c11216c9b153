//! Kills at every step, and what the next start makes of file and tables.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use paatp_common::policy::Policy;
use paatp_common::progress::RankRecord;
use paatp_transport::rate::share::Share;
use proptest::prelude::*;

use super::*;
use crate::control::http::{Peer, Scope};
use crate::control::membership::{Entropy, Formation};
use crate::control::protocol::{Grant, JobStatus, JoinRequest, LeaveRequest, PROTOCOL};
use crate::control::server::{Control, Tables};
use crate::control::state_file::Keeper;
use crate::engine::{EngineError, ProgressSnapshot, RankProgress};

const NAMES: [&str; 3] = ["a", "b", "c"];
const WORLD: u8 = 3;
const SLOTS: u32 = 256;

/// Tables and a file, which change until the process dies.
struct Machine {
    truth: Vec<Truth>,
    kept: State,
    /// Changes until it dies.
    left: usize,
    /// Nobody has contributed but this rank of all jobs.
    stuck: Option<u8>,
}

type Shared = Arc<Mutex<Machine>>;

fn lock(machine: &Shared) -> MutexGuard<'_, Machine> {
    machine.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Machine {
    fn change(&mut self, change: impl FnOnce(&mut Machine)) {
        if self.left > 0 {
            self.left -= 1;
            change(self);
        }
    }
}

struct Plane(Shared);

impl Tables for Plane {
    fn install(&mut self, formation: &Formation) -> Result<(), EngineError> {
        let number = usize::from(formation.number);
        let mut machine = lock(&self.0);
        machine.change(|m| m.truth[number].0 = JobEntry { generation: 0, ..formation.entry });
        machine.change(|m| m.truth[number].1.clone_from(&formation.ranks));
        machine.change(|m| m.truth[number].0 = formation.entry);
        Ok(())
    }

    fn write(&mut self, number: u16, entry: JobEntry) -> Result<(), EngineError> {
        let number = usize::from(number);
        // As the kernel's table: all but the policy.
        lock(&self.0).change(|m| m.truth[number].0 = JobEntry { policy: m.truth[number].0.policy, ..entry });
        Ok(())
    }

    fn policy(&self, number: u16) -> Policy {
        lock(&self.0).truth[usize::from(number)].0.policy
    }

    fn replace_policy(&mut self, number: u16, from: Policy, to: Policy) -> bool {
        let is_same = self.policy(number) == from;
        if is_same {
            lock(&self.0).change(|m| m.truth[usize::from(number)].0.policy = to);
        }
        is_same
    }

    fn set_gains(&mut self, _: u16, _: &[i8]) -> Result<(), EngineError> {
        Ok(())
    }

    fn records(&self, _: u16, entry: &JobEntry) -> Result<Vec<RankRecord>, EngineError> {
        Ok(vec![RankRecord::default(); entry.world.into()])
    }

    fn progress(&self, _: u16, entry: &JobEntry) -> Result<ProgressSnapshot, EngineError> {
        let stuck = lock(&self.0).stuck;
        let rank = |rank| match stuck {
            Some(slow) if slow != rank => RankProgress { acknowledged: 0, contributed: 4 },
            _ => RankProgress::default(),
        };
        Ok(ProgressSnapshot { ranks: (0..entry.world).map(rank).collect(), min_ack: 0 })
    }

    fn slots_in_use(&self, _: &JobEntry, _: u32) -> Result<Option<u32>, EngineError> {
        Ok(None)
    }

    fn share(&self, number: u16, entry: &JobEntry) -> Result<Share, EngineError> {
        Ok(Share { job: number, generation: entry.generation, min_ack: 0, crowded: 0 })
    }

    fn pool_in_use(&self) -> Result<u32, EngineError> {
        Ok(0)
    }
}

struct File(Shared);

impl Keeper for File {
    fn keep(&mut self, membership: &Membership) {
        lock(&self.0).change(|machine| machine.kept = membership.state());
    }

    fn retry(&mut self, _: &Membership) {}
}

#[derive(Clone, Debug)]
enum Action {
    Create(usize),
    Delete(usize),
    Join(usize, u8),
    Leave(usize, u8),
    Stuck(u8),
    Sync(usize, u32),
    Drain(bool),
    Wait,
}

fn action() -> impl Strategy<Value = Action> {
    let (name, rank) = (0..NAMES.len(), 0..WORLD);
    prop_oneof![
        2 => name.clone().prop_map(Action::Create),
        1 => name.clone().prop_map(Action::Delete),
        9 => (name.clone(), rank.clone()).prop_map(|(name, rank)| Action::Join(name, rank)),
        4 => (name.clone(), rank.clone()).prop_map(|(name, rank)| Action::Leave(name, rank)),
        1 => rank.prop_map(Action::Stuck),
        1 => (name, 1..=u32::from(WORLD)).prop_map(|(name, quorum)| Action::Sync(name, quorum)),
        1 => any::<bool>().prop_map(Action::Drain),
        1 => Just(Action::Wait),
    ]
}

/// A grant that a rank has got.
#[derive(Clone, Debug)]
struct Got {
    name: &'static str,
    request: JoinRequest,
    grant: Grant,
}

struct History {
    machine: Shared,
    control: Control,
    jobs: Jobs,
    now: Instant,
    drawn: u32,
    waits: Vec<(&'static str, JoinRequest, super::super::server::Entered)>,
    got: Vec<Got>,
}

fn of(rank: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, rank + 1).into()
}

fn peer(rank: u8) -> Peer {
    Peer { address: of(rank), scope: Scope::Workers }
}

impl History {
    fn new() -> History {
        let jobs = Jobs::with_memory(Vec::new(), Some(1472 * u64::from(4 * SLOTS)), None);
        let jobs = jobs.unwrap_or_else(|error| panic!("{error}"));
        let truth = vec![Truth::default(); MAX_JOBS];
        let machine = Machine { truth, kept: State::default(), left: usize::MAX, stuck: None };
        let machine = Arc::new(Mutex::new(machine));
        let control = serve(Membership::new(&jobs, 1, 1), &machine);
        let now = Instant::now();
        History { machine, control, jobs, now, drawn: 1000, waits: Vec::new(), got: Vec::new() }
    }

    fn act(&mut self, action: &Action) {
        self.drawn += 1;
        let entropy = Entropy { generation: self.drawn, nonce: u64::from(self.drawn) << 32 | 5 };
        match *action {
            Action::Create(name) => {
                let on_failure = if name == 0 { FailurePolicy::Shrink } else { FailurePolicy::Abort };
                let job = JobConfig {
                    timeout_seconds: Some(5.0),
                    on_failure,
                    ..JobConfig::new(NAMES[name], WORLD.into())
                };
                let _ = self.control.create(&job);
            }
            Action::Delete(name) => drop(self.control.delete(NAMES[name])),
            Action::Join(name, rank) => {
                let attempt = Some(u64::from(self.drawn));
                let request = JoinRequest {
                    protocol: PROTOCOL,
                    rank: rank.into(),
                    world: WORLD.into(),
                    wait_seconds: 60.0,
                    layout: None,
                    attempt,
                    below: None,
                    members: None,
                };
                if let Ok(entered) = self.control.enter(NAMES[name], &request, peer(rank), entropy) {
                    self.waits.push((NAMES[name], request, entered));
                }
            }
            Action::Leave(name, rank) => {
                let running = self.list().get(NAMES[name]).and_then(|job| job.generation);
                let generation = Some(running.unwrap_or(7));
                let request = LeaveRequest { protocol: PROTOCOL, rank: rank.into(), generation };
                let _ = self.control.leave(NAMES[name], &request, peer(rank));
            }
            Action::Stuck(rank) => {
                lock(&self.machine).stuck = Some(rank);
                self.control.tick(self.now);
                self.now += Duration::from_secs(6);
                self.control.tick(self.now);
                lock(&self.machine).stuck = None;
            }
            Action::Sync(name, quorum) => {
                let _ = self.control.set_sync(NAMES[name], super::super::protocol::Sync::Quorum { quorum });
            }
            Action::Drain(draining) => self.control.drain(draining),
            Action::Wait => {
                self.now += CLOSING_TIME;
                self.control.tick(self.now);
            }
        }
        // Whoever is answered while the process lives has a grant.
        let alive = lock(&self.machine).left > 0;
        self.waits.retain_mut(|(name, request, (_, receiver, _))| match receiver.try_recv() {
            Ok(Ok(grant)) if alive => {
                self.got.push(Got { name, request: request.clone(), grant });
                false
            }
            Ok(_) => false,
            Err(_) => true,
        });
    }

    /// Statuses by name, but for those who wait: they have to ask again.
    fn list(&self) -> BTreeMap<String, JobStatus> {
        let list = self.control.lock().membership.list();
        list.into_iter()
            .map(|job| {
                let (waiting_ranks, missing_ranks) = (Vec::new(), Vec::new());
                let state = crate::control::protocol::JobState::Idle;
                (job.name.clone(), JobStatus { waiting_ranks, missing_ranks, state, ..job })
            })
            .collect()
    }

    /// The next start.
    fn restart(&mut self) -> Vec<String> {
        self.waits.clear();
        let (truth, kept) = {
            let mut machine = lock(&self.machine);
            machine.left = usize::MAX;
            (machine.truth.clone(), machine.kept.clone())
        };
        let sources = Sources { jobs: &self.jobs, port_base: 1, ports: 1, state: &kept, truth: &truth };
        let drawn = &mut self.drawn;
        let restored = restore(sources, self.now, &mut || {
            *drawn += 1;
            *drawn
        });
        for (number, entry) in &restored.writes {
            lock(&self.machine).truth[usize::from(*number)].0 = *entry;
        }
        self.control = serve(restored.membership, &self.machine);
        restored.notes
    }

    /// What must hold whenever a process begins.
    fn check(&self) {
        let inner = self.control.lock();
        let membership = &inner.membership;
        let machine = lock(&self.machine);
        let mut taken = vec![0u8; 4 * SLOTS as usize];
        let memories = membership.jobs.values().map(|job| job.memory);
        for memory in memories.chain(membership.closing.iter().map(|closing| closing.memory)) {
            (memory.first()..memory.first() + memory.slots()).for_each(|slot| taken[slot as usize] += 1);
        }
        assert!(taken.iter().all(|owners| *owners < 2), "slots of two jobs");
        let free = taken.iter().filter(|owners| **owners == 0).count();
        assert_eq!(membership.slots.room().free as usize, free);
        for (number, (entry, _)) in (0u16..).zip(&machine.truth) {
            if entry.generation == 0 {
                continue;
            }
            let closing = membership.closing.iter().any(|closing| closing.number == number);
            let Some(job) = membership.jobs.get(&number) else {
                assert!(closing, "the kernel serves {number}, and nobody knows");
                continue;
            };
            assert_eq!((job.entry.first_slot, job.entry.slots), (entry.first_slot, entry.slots));
            if let Some(running) = &job.running {
                assert_eq!((running.number, job.entry.expected), (entry.generation, entry.expected));
            }
            assert!(membership.generations.remembered().any(|number| number == entry.generation));
        }
    }

    /// Whoever has a grant of a generation that runs gets the same one again.
    fn check_grants(&self) {
        let mut inner = self.control.lock();
        for Got { name, request, grant } in &self.got {
            let Some(job) = inner.membership.jobs.values().find(|job| job.name == *name) else { continue };
            let Some(running) = &job.running else { continue };
            let counts = job.entry.expected & !running.left & 1 << request.rank != 0;
            if running.number == grant.generation && counts {
                let address = of(u8::try_from(request.rank).unwrap_or(0));
                let again = inner.membership.grant_again(name, request, address);
                assert_eq!(again.map(|(_, grant)| grant).as_ref(), Some(grant));
            }
        }
    }
}

fn serve(membership: Membership, machine: &Shared) -> Control {
    let control = Control::new(membership, Arc::new(Mutex::new(Plane(machine.clone()))));
    control.with_keeper(Some(Box::new(File(machine.clone()))))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Killed at rest, nothing is different but who waits.
    #[test]
    fn a_restart_at_rest_changes_nothing(actions in proptest::collection::vec(action(), 0..60)) {
        let mut history = History::new();
        for action in &actions {
            history.act(action);
        }
        let (before, closing) = (history.list(), history.control.lock().membership.node());
        let notes = history.restart();
        history.check();
        history.check_grants();
        prop_assert_eq!(notes, Vec::<String>::new());
        prop_assert_eq!(history.list(), before);
        let node = history.control.lock().membership.node();
        prop_assert_eq!(node, closing);
    }

    /// Killed at any step of any action, again and again: what runs in the kernel is known, nobody else has its slots, and
    /// each job is as it was before the action or after it, or its generation was ended.
    #[test]
    fn a_kill_at_any_step_is_survived(
        rounds in proptest::collection::vec((proptest::collection::vec(action(), 1..12), 0..6usize), 1..8),
    ) {
        let mut history = History::new();
        for (actions, left) in &rounds {
            let Some((last, first)) = actions.split_last() else { continue };
            first.iter().for_each(|action| history.act(action));
            let before = history.list();
            lock(&history.machine).left = *left;
            history.act(last);
            let after = history.list();
            history.restart();
            history.check();
            history.check_grants();
            for (name, status) in history.list() {
                let plain = |job: &JobStatus| JobStatus { generation: None, left_ranks: Vec::new(), lost_ranks: Vec::new(), ..job.clone() };
                let candidates = [before.get(&name), after.get(&name)];
                let known = candidates.iter().flatten().any(|job| plain(job) == plain(&status));
                prop_assert!(known || name.starts_with(UNKNOWN), "{:?}: {:?} of {:?}", last, status, candidates);
                let generations = candidates.map(|job| job.and_then(|job| job.generation));
                let same = status.generation.is_none() || generations.contains(&status.generation);
                prop_assert!(same || name.starts_with(UNKNOWN), "{:?}: {:?} of {:?}", last, status, candidates);
            }
        }
    }

    /// Whatever stands in file and tables: no panic, no slot of two, nothing that the kernel serves is forgotten.
    #[test]
    fn rubbish_is_survived(entries in proptest::collection::vec((0..8usize, proptest::collection::vec(any::<u8>(), size_of::<JobEntry>()), any::<bool>()), 0..8), kept in 0..8u16) {
        let mut history = History::new();
        for (number, bytes, sane) in entries {
            let mut entry: JobEntry = bytemuck::pod_read_unaligned(&bytes);
            if sane {
                (entry.slots, entry.world, entry.k) = (SLOTS, WORLD, 0);
                entry.first_slot %= 4 * SLOTS;
            }
            let world = usize::from(entry.world).min(MAX_RANKS);
            lock(&history.machine).truth[number] = (entry, vec![RankEntry::default(); world]);
        }
        let job = SavedJob {
            child: None,
            name: "a".into(),
            number: kept,
            entry: "00".repeat(size_of::<JobEntry>()),
            access: Access::Open,
            key: Some("zz".into()),
            timeout_seconds: Some(-1.0),
            on_failure: FailurePolicy::Abort,
            parent: None,
            ranks: None,
            lost: vec![255],
            generations: Vec::new(),
        };
        lock(&history.machine).kept.jobs = vec![job.clone(), SavedJob { entry: "é".into(), ..job }];
        history.restart();
        history.check();
    }
}

#[test]
fn what_the_file_does_not_know_goes_on_under_another_name() {
    let mut history = History::new();
    history.act(&Action::Create(0));
    (0..WORLD).for_each(|rank| history.act(&Action::Join(0, rank)));
    lock(&history.machine).kept = State::default();
    let notes = history.restart();
    let list = history.list();
    let job = list.get("adopted-0").unwrap_or_else(|| panic!("{list:?}"));
    assert!(job.generation.is_some() && job.access == Access::Token);
    assert!(notes.iter().any(|note| note.contains("paatp job delete adopted-0")), "{notes:?}");
    // Its slots are its own until it is deleted.
    history.act(&Action::Create(0));
    history.check();
    assert!(history.control.delete("adopted-0").is_ok());
}

#[test]
fn the_kernel_is_right() {
    let mut history = History::new();
    history.act(&Action::Create(0));
    (0..WORLD).for_each(|rank| history.act(&Action::Join(0, rank)));
    {
        let mut machine = lock(&history.machine);
        let entry = &mut machine.truth[0].0;
        (entry.expected, entry.window) = (0b101, 9);
        machine.truth[0].1[2].address = super::super::membership::table_address(of(77));
    }
    let notes = history.restart();
    let list = history.list();
    let job = &list["a"];
    assert_eq!((job.lost_ranks.as_slice(), job.window), (&[1][..], 9));
    let running = history.control.lock().membership.jobs[&0].running.clone();
    assert_eq!(running.map(|running| running.addresses[2]), Some(of(77)));
    for part in ["window 9 in the kernel, 64 in the state file", "addresses"] {
        assert!(notes.iter().any(|note| note.contains(part)), "{notes:?}");
    }
}

/// Jobs of command line and file: new ones are added, old ones keep their shape and take over who may join.
#[test]
fn configured_jobs_are_served() {
    let mut history = History::new();
    history.act(&Action::Create(0));
    let list = vec![
        JobConfig { window: 32, on_failure: FailurePolicy::Abort, ..JobConfig::new("a", WORLD.into()) },
        JobConfig::new("new", 2),
        JobConfig { slots: 1 << 12, ..JobConfig::new("big", 2) },
    ];
    let jobs = Jobs::new(list).unwrap_or_else(|error| panic!("{error}"));
    history.jobs = jobs.with_table(crate::config::SlotSize::Standard, 4 * SLOTS, 0);
    let notes = history.restart();
    let list = history.list();
    assert_eq!(list.keys().collect::<Vec<_>>(), ["a", "new"]);
    assert_eq!(
        (list["a"].window, list["a"].on_failure, list["a"].access),
        (64, FailurePolicy::Abort, Access::Open)
    );
    for part in ["window stays 64, although 32", "`big` is not served"] {
        assert!(notes.iter().any(|note| note.contains(part)), "{notes:?}");
    }
}

/// A membership after a restart: what was kept goes through JSON, and the tables are as these formations left them.
fn restarted(jobs: &Jobs, membership: &Membership, formations: &[Formation]) -> Restored {
    let text = serde_json::to_string(&membership.state()).unwrap_or_else(|error| panic!("{error}"));
    let state: State = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(state, membership.state());
    let mut truth = vec![Truth::default(); MAX_JOBS];
    for formation in formations {
        truth[usize::from(formation.number)] = (formation.entry, formation.ranks.clone());
    }
    let sources = Sources { jobs, port_base: 1, ports: 1, state: &state, truth: &truth };
    restore(sources, Instant::now(), &mut || 4711)
}

fn join_with(attempt: u64, rank: u32, world: u32, members: Option<u32>) -> JoinRequest {
    JoinRequest {
        protocol: PROTOCOL,
        rank,
        world,
        wait_seconds: 60.0,
        layout: None,
        attempt: Some(attempt),
        below: None,
        members,
    }
}

/// F22: who stands behind whom is nowhere else: a rank that asks for its grant again after a restart gets all of it, at a
/// node whose ranks are one at the parent and at the root.
#[test]
fn f22_nodes_survive_a_restart() {
    let entropy = Entropy { generation: 77, nonce: 99 };
    let config = JobConfig { parent: Some("10.9.9.9".into()), child: Some(1), ..JobConfig::new("up", 2) };
    let jobs = Jobs::new(vec![config.clone(), JobConfig::new("idle", 2)]).unwrap_or_else(|e| panic!("{e}"));
    let mut node = Membership::new(&jobs, 1, 1);
    let mut ascent = None;
    for rank in 0..2 {
        let request = join_with(50 + u64::from(rank), rank, 2, None);
        let joined = node.join(Instant::now(), "up", &request, of(rank as u8), entropy);
        ascent = joined.unwrap_or_else(|error| panic!("{error}")).ascent;
    }
    let Some(ascent) = ascent else { panic!("nobody goes up") };

    let root_jobs = Jobs::new(vec![JobConfig::new("up", 3)]).unwrap_or_else(|error| panic!("{error}"));
    let mut root = Membership::new(&root_jobs, 1, 1);
    let mut formed = None;
    for (rank, members) in [(2, None), (1, Some(2)), (0, Some(40))] {
        let request = join_with(60 + u64::from(rank), rank, members.unwrap_or(3), members);
        let joined = root.join(Instant::now(), "up", &request, of(rank as u8), entropy);
        formed = joined.unwrap_or_else(|error| panic!("{error}")).formation;
    }
    let Some(at_root) = formed else { panic!("not formed") };
    let uplink = crate::control::membership::Uplink { interface: 1, link: Default::default() };
    let at_node = node.form_below(&ascent, &at_root.grant, uplink).unwrap_or_else(|error| panic!("{error}"));
    let expected = Nodes { members: vec![40, 2, 1], child: Some(1) };
    assert_eq!(at_node.grant.nodes, Some(expected.clone()));

    let again = restarted(&jobs, &node, std::slice::from_ref(&at_node));
    assert_eq!((again.notes, again.writes), (vec![], vec![]));
    let mut restored = again.membership;
    assert_eq!(restored.state(), node.state());
    for rank in 0..2 {
        let request = join_with(50 + u64::from(rank), rank, 2, None);
        let grant = restored.grant_again("up", &request, of(rank as u8)).map(|(_, grant)| grant);
        assert_eq!(grant.as_ref(), Some(&at_node.grant));
    }
    let status = restored.status("up").unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((status.child, status.members), (Some(1), expected.members));
    assert_eq!(restored.parent("up"), node.parent("up"));

    let again = restarted(&root_jobs, &root, std::slice::from_ref(&at_root));
    let (mut restored, request) = (again.membership, join_with(62, 2, 3, None));
    assert_eq!((again.notes, restored.state()), (vec![], root.state()));
    let grant = restored.grant_again("up", &request, of(2)).map(|(_, grant)| grant);
    assert_eq!(grant.as_ref(), Some(&at_root.grant));

    // The next start is told otherwise: the job stays what it is, and that is said.
    for other in [
        JobConfig { child: Some(0), ..config.clone() },
        JobConfig { child: None, ranks: "0-1".parse().ok(), ..config.clone() },
        JobConfig { child: None, parent: None, ..config },
    ] {
        let jobs = Jobs::new(vec![other, JobConfig::new("idle", 2)]).unwrap_or_else(|e| panic!("{e}"));
        let again = restarted(&jobs, &node, std::slice::from_ref(&at_node));
        assert!(again.notes.iter().any(|note| note.contains("stay as they are")), "{:?}", again.notes);
        assert_eq!(again.membership.state(), node.state());
    }
}
