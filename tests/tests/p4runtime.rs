//! The switch's control plane against a P4Runtime server that does what a switch may do.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use paatp_common::counter::Counters;
use paatp_tests::p4runtime::{MockSwitch, P4INFO, half};
use paatp_tests::process::wait_until;
use paatp_user::config::{JobConfig, Jobs};
use paatp_user::control::membership::{Entropy, Leaving, Membership};
use paatp_user::control::protocol::{JoinRequest, LeaveRequest, PROTOCOL};
use paatp_user::switch::client::{self, CALL_TIME};
use paatp_user::switch::error::SwitchState;
use paatp_user::switch::keeper::{Handle, LOOK_INTERVAL, keeper};
use paatp_user::switch::messages::p4::v1::update::Type;
use paatp_user::switch::options::{PipelineFiles, Setup, Station};
use paatp_user::switch::placement::Neighbourhood;
use paatp_user::switch::plan::{Key, Table};
use paatp_user::switch::report::SwitchSnapshot;

/// Longest wait for what takes a second or two by itself.
const DEADLINE: Duration = Duration::from_secs(60);
const NODE: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 100);

fn rank_address(rank: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 0, rank + 1)
}

fn setup(switch: &MockSwitch) -> Setup {
    let station =
        |address: Ipv4Addr, port: u16| Station { address, mac: [2, 0, 0, 0, 0, address.octets()[3]], port };
    let mut stations: Vec<Station> = (0..4).map(|rank| station(rank_address(rank), rank.into())).collect();
    stations.push(station(NODE, 9));
    Setup { address: switch.address, device: 0, stations, slots: None, pipeline: None }
}

/// The control plane of an aggregator, without an aggregator.
struct Control {
    runtime: tokio::runtime::Runtime,
    membership: Membership,
    handle: Handle,
    generation: u32,
}

impl Control {
    fn start(setup: Setup) -> Control {
        let job = |name: &str, lanes| JobConfig { lanes, ..JobConfig::new(name, 2) };
        let jobs = Jobs::new(vec![job("a", 256), job("b", 128), job("long", 352)]).unwrap();
        let membership = Membership::new(&jobs, 20545, 1);
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let neighbourhood = Neighbourhood::new(&setup, &[NODE.into()]).unwrap();
        let (handle, keeping) = keeper(setup, neighbourhood);
        runtime.spawn(keeping);
        Control { runtime, membership, handle, generation: 0x100 }
    }

    /// Forms a generation of two ranks; returns its number.
    fn form(&mut self, job: &str, addresses: [IpAddr; 2]) -> u32 {
        self.generation += 1;
        for (rank, address) in (0..).zip(addresses) {
            let request = JoinRequest {
                protocol: PROTOCOL,
                rank,
                world: 2,
                wait_seconds: 1.0,
                layout: None,
                attempt: None,
                below: None,
                members: None,
            };
            let entropy = Entropy { generation: self.generation, nonce: 1 };
            self.membership.join(Instant::now(), job, &request, address, entropy).unwrap();
        }
        self.tell();
        self.generation
    }

    fn form_behind(&mut self, job: &str) -> u32 {
        self.form(job, [0, 1].map(|rank| rank_address(rank).into()))
    }

    /// All ranks leave.
    fn end(&mut self, job: &str) {
        let generation = self.membership.status(job).unwrap().generation;
        for rank in 0..2 {
            let request = LeaveRequest { protocol: PROTOCOL, rank, generation };
            let address = rank_address(rank as u8).into();
            if let Leaving::Last { number, entry } = self.membership.leave(job, &request, address).unwrap() {
                self.membership.finish(number, entry);
            }
        }
        self.tell();
    }

    fn tell(&self) {
        self.handle.place(&self.membership.facts().jobs);
    }

    fn report(&self) -> SwitchSnapshot {
        self.handle.report().snapshot(&Counters::default())
    }

    fn wait(&self, what: &str, mut condition: impl FnMut() -> bool) {
        let come = wait_until(what, DEADLINE, || Ok(condition()));
        assert!(come.is_ok(), "{what}: {:#?}", self.report());
    }

    fn wait_for(&self, state: SwitchState) -> SwitchSnapshot {
        self.wait(&format!("{state:?}"), || self.report().state == state);
        self.report()
    }

    fn wait_for_jobs(&self, switch: &MockSwitch, generations: &[u32]) {
        self.wait(&format!("{generations:x?}"), || switch.tables().generations() == generations);
    }
}

#[test]
fn jobs_come_and_go_with_their_generations() {
    let switch = MockSwitch::start().unwrap();
    switch.tables().counts = (0..11).collect();
    let mut control = Control::start(setup(&switch));
    control.wait_for(SwitchState::Up);
    let first = control.form_behind("a");
    control.wait_for_jobs(&switch, &[first]);
    let second = control.form_behind("b");
    control.wait_for_jobs(&switch, &[first, second]);
    // The same job again, then nobody.
    let third = control.form("a", [2, 3].map(|rank| rank_address(rank).into()));
    control.wait_for_jobs(&switch, &[third, second]);
    control.wait("the report", || control.report().jobs.len() == 2);
    let report = control.report();
    assert_eq!((report.jobs[0].name.as_str(), &report.jobs[0].ranks), ("a", &vec![0, 1]));
    assert_eq!((report.counters["stored"], report.counters["evicted"]), (0, 10));
    assert_eq!(report.added.by_switch, 1);
    assert_eq!((report.refused_changes, report.repaired_entries), (0, 0));
    control.membership.finish(0, control.membership.facts().jobs[0].entry);
    control.tell();
    control.wait_for_jobs(&switch, &[second]);
    control.end("b");
    control.wait_for_jobs(&switch, &[]);
    control.wait("what jobs stood on goes", || switch.tables().state.len() == 7);
    let tables = switch.tables();
    assert_eq!(tables.halves, Vec::<String>::new());
    let stations = tables.state.keys().filter(|key| matches!(key, Key::Entry(Table::Stations, _))).count();
    assert_eq!(stations, 6, "and broadcasts");
    // A deletion begins with the job.
    let jobs = |kind: Type| {
        let is_job = |key: &Key| matches!(key, Key::Entry(Table::Jobs, _));
        tables.done.iter().filter(|(done, key)| *done == kind && is_job(key)).count()
    };
    assert_eq!((jobs(Type::Insert), jobs(Type::Delete)), (3, 3));
}

#[test]
fn who_is_not_behind_the_switch_is_told_why() {
    let switch = MockSwitch::start().unwrap();
    let mut control = Control::start(setup(&switch));
    control.form("a", [rank_address(0).into(), [10, 7, 7, 7].into()]);
    control.form_behind("long");
    let b = control.form("b", [IpAddr::from(rank_address(0).to_ipv6_mapped()), rank_address(3).into()]);
    control.wait_for_jobs(&switch, &[b]);
    control.wait("all are told of", || control.report().jobs.len() == 3);
    let told = control.report().jobs;
    let why = |index: usize| told[index].absent.clone().unwrap_or_default();
    assert!(why(0).contains("fewer than two") && why(2).contains("352 lanes"), "{told:#?}");
    assert_eq!((why(1), told[1].ranks.clone()), (String::new(), vec![0, 1]));
}

/// Everything that is forgotten comes back, whether the session goes on or not.
#[test]
fn a_switch_that_forgets_gets_everything_again() {
    let switch = MockSwitch::start().unwrap();
    let mut control = Control::start(setup(&switch));
    let generation = control.form_behind("a");
    control.wait_for_jobs(&switch, &[generation]);
    control.wait_for(SwitchState::Up);
    let whole = switch.tables().state.clone();
    // Ranks and group are gone while the job is there.
    switch.tables().state.retain(|key, _| !matches!(key, Key::Entry(Table::Ranks, _) | Key::Group(_)));
    control.wait("what was taken out came back", || switch.tables().state == whole);
    control.wait("it is told", || control.report().repaired_entries > 0);
    switch.tables().state.clear();
    control.wait("everything came back", || switch.tables().state == whole);
    // What somebody else added goes, but for stations that we were not told of.
    let mut foreign = whole.clone();
    foreign.insert(Key::Entry(Table::Ranks, vec![0, 77, 0, 5]), whole.values().next().unwrap().clone());
    switch.tables().state = foreign;
    control.wait("what is foreign went", || switch.tables().state == whole);
    let station = Key::Entry(Table::Stations, vec![0x0600_0000_0009]);
    let there = switch
        .tables()
        .state
        .iter()
        .find(|(key, _)| matches!(key, Key::Entry(Table::Stations, _)))
        .unwrap()
        .1
        .clone();
    switch.tables().state.insert(station.clone(), there);
    switch.tables().state.retain(|key, _| !matches!(key, Key::Entry(Table::Copies, _)));
    control.wait("the rest came back", || switch.tables().state.len() == whole.len() + 1);
    assert!(switch.tables().state.contains_key(&station));
    let switch = switch.restart().unwrap();
    control.wait_for_jobs(&switch, &[generation]);
    control.wait("all is there", || switch.tables().state == whole);
    assert_eq!(switch.tables().halves, Vec::<String>::new());
}

#[test]
fn another_controller_is_named_and_its_place_taken_when_it_goes() {
    let switch = MockSwitch::start().unwrap();
    let mut control = Control::start(setup(&switch));
    control.wait_for(SwitchState::Up);
    let other = u128::MAX - 100;
    switch.tables().usurp(other);
    let report = control.wait_for(SwitchState::NotPrimary);
    let why = report.why.unwrap();
    assert!(why.contains(&other.to_string()) && why.contains("another controller"), "{why}");
    let generation = control.form_behind("a");
    // It asks again, and writes nothing.
    switch.tables().vacate();
    control.wait_for(SwitchState::Up);
    control.wait_for_jobs(&switch, &[generation]);
    assert_eq!(switch.tables().usurped, 0);
}

#[test]
fn another_program_is_told_and_ours_loaded_if_it_may_be() {
    let folder = tempfile::tempdir().unwrap();
    let files =
        PipelineFiles { program: folder.path().join("p.json"), info: folder.path().join("p4info.bin") };
    let switch = MockSwitch::start().unwrap();
    switch.tables().config = None;
    let control = Control::start(setup(&switch));
    assert!(control.wait_for(SwitchState::WrongProgram).why.unwrap().contains("has no program"));
    switch.load();
    control.wait_for(SwitchState::Up);
    let wrong = |switch: &MockSwitch| {
        let mut tables = switch.tables();
        tables.config.as_mut().unwrap().p4info.as_mut().unwrap().tables.remove(1);
    };
    let switch = switch.restart().unwrap();
    wrong(&switch);
    control.wait("the table that is missing is named", || {
        control.report().why.is_some_and(|why| why.contains("no table `PaatpIngress.jobs`"))
    });
    drop(control);

    // With the files: first they are missing, then wrong, then right; and right is loaded once.
    let with_files = Setup { pipeline: Some(files.clone()), ..setup(&switch) };
    let mut control = Control::start(with_files);
    let report = control.wait_for(SwitchState::WrongProgram);
    assert!(report.why.unwrap().contains("p.json"));
    std::fs::write(&files.program, "{}").unwrap();
    std::fs::write(&files.info, "no P4Info").unwrap();
    control
        .wait("the file is named", || control.report().why.is_some_and(|why| why.contains("no P4Info in")));
    std::fs::write(&files.info, P4INFO).unwrap();
    control.wait_for(SwitchState::Up);
    let generation = control.form_behind("a");
    control.wait_for_jobs(&switch, &[generation]);
    assert_eq!(switch.tables().loads, 1);
    // Somebody who only looks does not take it.
    let seen = control.runtime.block_on(client::look(switch.address, 0)).unwrap();
    assert_eq!((seen.slots(), seen.lanes()), (1024, 256));
    drop(control);
    let control = Control::start(Setup { pipeline: Some(files), ..setup(&switch) });
    control.wait_for(SwitchState::Up);
    assert_eq!(switch.tables().loads, 1, "it has it already");
}

#[test]
fn a_switch_that_does_not_answer_is_given_up_and_asked_again() {
    let switch = MockSwitch::start().unwrap();
    let mut control = Control::start(setup(&switch));
    control.wait_for(SwitchState::Up);
    switch.tables().is_silent = true;
    let begin = Instant::now();
    // Who has something to tell does not wait.
    let generation = control.form_behind("a");
    assert!(begin.elapsed() < CALL_TIME);
    let report = control.wait_for(SwitchState::Down);
    assert!(report.why.unwrap().contains("did not answer"), "{:?}", control.report());
    assert!(report.contact_age_seconds.unwrap() > 0.5);
    switch.tables().is_silent = false;
    control.wait_for_jobs(&switch, &[generation]);
    control.wait_for(SwitchState::Up);
    // A port where nobody is.
    let address = switch.address;
    drop(switch);
    let why = control.wait_for(SwitchState::Down).why.unwrap();
    assert!(why.contains("ended") || why.contains("refused"), "{why}");
    control.wait("nobody is reached", || {
        control.report().why.is_some_and(|why| why.contains("no P4Runtime server can be reached"))
    });
    // The end does not wait for it.
    let begin = Instant::now();
    control.runtime.block_on(control.handle.release());
    assert!(begin.elapsed() < DEADLINE, "{address}");
}

#[test]
fn a_refusal_costs_one_job_and_is_told() {
    let switch = MockSwitch::start().unwrap();
    let rank = |generation: u128| {
        Key::Entry(Table::Ranks, vec![0, generation, 1, u32::from(rank_address(1)).into()])
    };
    switch.tables().refuses = Some(rank(0x101));
    let mut control = Control::start(setup(&switch));
    let a = control.form_behind("a");
    let b = control.form_behind("b");
    assert_eq!(a, 0x101);
    control.wait_for_jobs(&switch, &[b]);
    let report = control.wait_for(SwitchState::Refusing);
    let why = report.why.unwrap();
    assert!(why.contains("PaatpIngress.ranks 0x0 0x101 0x1") && why.contains("table is full"), "{why}");
    control.wait("it is tried again", || control.report().refused_changes > 1);
    assert_eq!(switch.tables().generations(), [b]);
    switch.tables().refuses = None;
    control.wait_for_jobs(&switch, &[a, b]);
    control.wait_for(SwitchState::Up);
    assert_eq!(switch.tables().halves, Vec::<String>::new());
}

/// At the end the jobs go, and the stations stay: others still send to one another.
#[test]
fn at_the_end_the_switch_lets_go() {
    let switch = MockSwitch::start().unwrap();
    let mut control = Control::start(setup(&switch));
    let generation = control.form_behind("a");
    control.wait_for_jobs(&switch, &[generation]);
    control.runtime.block_on(control.handle.release());
    let tables = switch.tables();
    assert_eq!((tables.generations(), tables.state.len()), (vec![], 7));
    assert_eq!(tables.halves, Vec::<String>::new());
}

/// Windows and places change many times a second: the switch is told once a second, and the job stays on it.
#[test]
fn windows_come_with_the_next_look() {
    let switch = MockSwitch::start().unwrap();
    let mut control = Control::start(setup(&switch));
    let generation = control.form_behind("a");
    control.wait_for_jobs(&switch, &[generation]);
    let begin = Instant::now();
    let mut granted = 0;
    while begin.elapsed() < 3 * LOOK_INTERVAL {
        granted += 1;
        control.membership.grant(0, granted).unwrap();
        control.tell();
        std::thread::sleep(Duration::from_millis(2));
    }
    let changes = |kind: Type| {
        let is_job = |key: &Key| matches!(key, Key::Entry(Table::Jobs, _));
        let tables = switch.tables();
        tables.done.iter().filter(|(done, key)| *done == kind && is_job(key)).count()
    };
    control.wait("the window came", || changes(Type::Modify) > 0);
    assert!(changes(Type::Modify) < granted.into(), "{} of {granted}", changes(Type::Modify));
    assert_eq!((changes(Type::Insert), changes(Type::Delete)), (1, 0));
    assert_eq!(control.report().repaired_entries, 0);
    // What is damaged meanwhile is counted: nobody asked for that.
    switch.tables().state.retain(|key, _| !matches!(key, Key::Group(_)));
    let begin = Instant::now();
    while control.report().repaired_entries == 0 {
        assert!(begin.elapsed() < DEADLINE, "{:?}", control.report());
        granted += 1;
        control.membership.grant(0, granted).unwrap();
        control.tell();
        std::thread::sleep(Duration::from_millis(2));
    }
    // The groups of the job and of broadcasts, at least: the job itself came back with another window.
    assert!(control.report().repaired_entries >= 2, "{:?}", control.report());
    // Also while it refuses something.
    let b = u128::from(control.generation + 1);
    switch.tables().refuses = Some(Key::Entry(Table::Jobs, vec![1, b]));
    control.form_behind("b");
    control.wait_for(SwitchState::Refusing);
    let (begin, mut told) = (Instant::now(), 0);
    while begin.elapsed() < 3 * LOOK_INTERVAL {
        told += 1;
        control.membership.grant(0, granted + told).unwrap();
        control.tell();
        std::thread::sleep(Duration::from_millis(2));
    }
    let refused = control.report().refused_changes;
    assert!((2..u64::from(told) / 2).contains(&refused), "{refused} of {told}");
}

/// The one that the tests' switch looks for halves with finds them.
#[test]
fn halves_are_found() {
    let switch = MockSwitch::start().unwrap();
    let mut control = Control::start(setup(&switch));
    let generation = control.form_behind("a");
    control.wait_for_jobs(&switch, &[generation]);
    let whole = switch.tables().state.clone();
    assert_eq!(half(&whole), None);
    for table in [Table::Ranks, Table::Copies] {
        let mut state = whole.clone();
        let key = state.keys().find(|key| matches!(key, Key::Entry(of, _) if *of == table)).cloned().unwrap();
        state.remove(&key);
        assert!(half(&state).is_some(), "{table:?}");
    }
    let mut state = whole;
    state.retain(|key, _| !matches!(key, Key::Group(_)));
    assert!(half(&state).is_some());
}
