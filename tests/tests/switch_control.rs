//! `paatp run --switch` against a switch that has tables and no ports: what it is told, and that nobody waits for it.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::fs;
use std::net::{TcpListener, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;

use paatp_common::Event;
use paatp_common::levels::Link;
use paatp_common::switch::Count;
use paatp_tests::gradients::{Gradient, real};
use paatp_tests::http::ask;
use paatp_tests::job::{Running, run};
use paatp_tests::kernel::PodOf;
use paatp_tests::lab::Host;
use paatp_tests::p4::{BLOCKS, GrpcSwitch, Switch, require_grpc, require_p4};
use paatp_tests::p4runtime::{MockSwitch, P4INFO};
use paatp_tests::pins::Pins;
use paatp_tests::process::{Aggregator, AggregatorOptions, PORT, wait_until};
use paatp_tests::{JobOptions, Lab, Layout, Rates, require_bpf};
use paatp_user::switch::client::Client;
use paatp_user::switch::entries::{Entry, FLOOD_ACTION, Field, Group};
use paatp_user::switch::messages::p4::config::v1::P4Info;
use paatp_user::switch::plan::{Key, State, Table, Value};
use paatp_user::switch::program::Program;
use prost::Message;
use serde_json::Value as Json;

const DEADLINE: Duration = Duration::from_secs(120);
const WORLD: usize = 4;
/// Lanes that a switch adds.
const LANES: usize = 256;
/// Where its P4Runtime server is, in the namespace of the aggregator.
const AGENT: &str = "127.0.0.1:9559";
/// Everything is lost: nobody is to begin before the switch knows the job.
const NOTHING_PASSES: Rates = Rates { loss: 1.0, ..Rates::NONE };

/// All workers but the last are at the switch, and the aggregator.
fn options(lab: &Lab) -> JobOptions {
    let mut options = JobOptions { timeout: DEADLINE, ..JobOptions::world(WORLD) };
    (options.aggregator.lanes, options.aggregator.window) = (LANES, 32);
    let mut more = vec!["--switch".to_owned(), AGENT.into()];
    let hosts = lab.workers[..WORLD - 1].iter().chain([&lab.aggregator]);
    for (port, host) in hosts.enumerate() {
        more.extend(["--switch-port".into(), at_port(host, port)]);
    }
    options.aggregator.more = more;
    options
}

fn at_port(host: &Host, port: usize) -> String {
    let mac = host.mac().map(|byte| format!("{byte:02x}")).join(":");
    format!("{},{mac},{port}", host.v4())
}

fn status(lab: &Lab) -> Json {
    let answer = ask(&lab.aggregator.namespace, ([127, 0, 0, 1], PORT).into(), "GET", "/v1/status").unwrap();
    serde_json::from_str(&answer.body).unwrap()
}

fn generations(switch: &MockSwitch) -> Vec<u32> {
    switch.tables().generations()
}

/// The switch is told of a job by the time its ranks are, after the kernel; when it dies in the middle nothing happens; and
/// at the end it lets go.
#[test]
fn a_job_is_put_on_the_switch() {
    if !require_bpf("switch_control::a_job_is_put_on_the_switch") {
        return;
    }
    let inputs = real(0, WORLD).unwrap();
    let lab = Lab::new(Layout::workers(WORLD)).unwrap();
    let listener = lab.aggregator.namespace.run(|| TcpListener::bind(AGENT)).unwrap().unwrap();
    let switch = MockSwitch::on(listener).unwrap();
    switch.load();
    let options = options(&lab);
    let held: Vec<_> = (0..WORLD)
        .map(|rank| lab.disturb(rank, PORT..=PORT, 1, NOTHING_PASSES, Rates::NONE).unwrap())
        .collect();
    let running = Running::start(&lab, &inputs, &options).unwrap();
    wait_until("the switch has the job", DEADLINE, || Ok(!generations(&switch).is_empty())).unwrap();
    let link = running.maps.array::<PodOf<Link>>("LINKS").unwrap().get(&0, 0).unwrap().0;
    assert_eq!(link.switched, 0b111, "the last rank is beside it");
    {
        let tables = switch.tables();
        let job = tables.state.iter().find(|(key, _)| matches!(key, Key::Entry(Table::Jobs, _))).unwrap();
        let Value::Action { params, .. } = job.1 else { panic!("{job:?}") };
        let node = u32::from(lab.aggregator.v4());
        assert_eq!((params[0], params[6], params[7]), (0b111, node.into(), 3));
        assert_eq!(tables.halves, Vec::<String>::new());
    }
    wait_until("it is told", DEADLINE, || {
        Ok(status(&lab)["switch"]["jobs"][0]["ranks"].as_array().is_some_and(|ranks| ranks.len() == 3))
    })
    .unwrap();
    // It dies, and comes back with nothing.
    let (address, held) = (switch.address, (held, switch));
    drop(held);
    wait_until("it is known to be down", DEADLINE, || Ok(status(&lab)["switch"]["state"] == "down")).unwrap();
    let mut listener = None;
    wait_until("the port was free", DEADLINE, || {
        listener = lab.aggregator.namespace.run(|| TcpListener::bind(address))?.ok();
        Ok(listener.is_some())
    })
    .unwrap();
    let switch = MockSwitch::on(listener.unwrap()).unwrap();
    switch.load();
    let result = running.finish(DEADLINE).unwrap();
    let verdict = result.check(&inputs, &options).unwrap();
    assert!(verdict.is_right(), "{:#?}", verdict.complaints);
    assert_eq!((generations(&switch), switch.tables().halves.clone()), (vec![], vec![]));
}

/// A daemon that is killed leaves the switch as it is, and the next one goes on with it: nothing is written anew. One that was
/// started without a switch puts the jobs that run on it.
#[test]
fn a_restart_goes_on_with_the_switch() {
    if !require_bpf("switch_control::a_restart_goes_on_with_the_switch") {
        return;
    }
    let inputs = real(0, WORLD).unwrap();
    let lab = Lab::new(Layout::workers(WORLD)).unwrap();
    let listener = lab.aggregator.namespace.run(|| TcpListener::bind(AGENT)).unwrap().unwrap();
    let switch = MockSwitch::on(listener).unwrap();
    switch.load();
    let mut options = options(&lab);
    options.aggregator.pins = Some(Arc::new(Pins::new().unwrap()));
    let without = AggregatorOptions { more: vec!["--levels".into()], ..options.aggregator.clone() };
    let held: Vec<_> = (0..WORLD)
        .map(|rank| lab.disturb(rank, PORT..=PORT, 1, NOTHING_PASSES, Rates::NONE).unwrap())
        .collect();
    let with = std::mem::replace(&mut options.aggregator, without);
    let mut running = Running::start(&lab, &inputs, &options).unwrap();
    let switched = |running: &Running<'_>| {
        running.maps.array::<PodOf<Link>>("LINKS").unwrap().get(&0, 0).unwrap().0.switched
    };
    wait_until("the job runs", DEADLINE, || Ok(status(&lab)["node"]["running_jobs"] == 1)).unwrap();
    assert_eq!(switched(&running), 0);
    let in_use = || Ok(status(&lab)["switch"]["state"] == "up");
    for start in 0..3 {
        running.aggregator.process.kill();
        let before = switch.tables().done.len();
        running.aggregator = Aggregator::start(&lab, &with).unwrap();
        wait_until("the switch is in use", DEADLINE, in_use).unwrap();
        assert_eq!((switched(&running), generations(&switch).len()), (0b111, 1));
        assert_eq!(switch.tables().done.len() == before, start > 0, "start {start}");
    }
    drop(held);
    let result = running.finish(DEADLINE).unwrap();
    let verdict = result.check(&inputs, &options).unwrap();
    assert!(verdict.is_right(), "{:#?}", verdict.complaints);
    assert_eq!((generations(&switch), switch.tables().halves.clone()), (vec![], vec![]));
}

/// Nobody is at the switch's address: jobs, status and metrics do not mind.
#[test]
fn jobs_run_while_the_switch_is_dead() {
    if !require_bpf("switch_control::jobs_run_while_the_switch_is_dead") {
        return;
    }
    let inputs = real(0, WORLD).unwrap();
    let lab = Lab::new(Layout::workers(WORLD)).unwrap();
    let options = options(&lab);
    let running = Running::start(&lab, &inputs, &options).unwrap();
    wait_until("it is told", DEADLINE, || Ok(status(&lab)["switch"]["state"] == "down")).unwrap();
    let told = status(&lab);
    assert_eq!(told["health"]["level"], "trouble", "{told}");
    let metrics = ask(&lab.aggregator.namespace, ([127, 0, 0, 1], PORT).into(), "GET", "/metrics").unwrap();
    assert!(metrics.body.contains("\npaatp_switch_up 0\n"), "{}", metrics.body);
    assert!(metrics.body.contains("\npaatp_collector_success{collector=\"switch\"} 1\n"), "{}", metrics.body);
    let result = running.finish(DEADLINE).unwrap();
    let verdict = result.check(&inputs, &options).unwrap();
    assert!(verdict.is_right(), "{:#?}", verdict.complaints);
}

/// The digest of a run without a switch.
fn plain(inputs: &[Gradient]) -> String {
    let lab = Lab::new(Layout::workers(WORLD)).unwrap();
    let mut options = options(&lab);
    options.aggregator.more.clear();
    run(&lab, inputs, &options).unwrap().digests().unwrap().swap_remove(0)
}

/// What a switch was told over P4Runtime, told to BMv2 over its own command line: `simple_switch` has no P4Runtime server.
fn mirror(state: &State, switch: &mut Switch) {
    let field = |value: &u128| Field { name: "", bits: 0, value: *value };
    let entry = |(key, value): (&Key, &Value)| match (key, value) {
        (Key::Entry(table, keys), Value::Action { is_ours: true, params }) => Some(Entry {
            table: table.name(),
            keys: keys.iter().map(field).collect(),
            action: match table {
                Table::Stations => "PaatpIngress.forward",
                Table::Jobs => "PaatpIngress.set_job",
                Table::Ranks => "NoAction",
                Table::Copies => "PaatpEgress.set_copy",
            },
            params: params.iter().map(field).collect(),
        }),
        (Key::Entry(table, keys), Value::Flood(group)) => Some(Entry {
            table: table.name(),
            keys: keys.iter().map(field).collect(),
            action: FLOOD_ACTION,
            params: vec![field(&(*group).into())],
        }),
        _ => None,
    };
    for (key, value) in state {
        if let (Key::Group(number), Value::Copies(copies)) = (key, value) {
            let copies = copies.iter().map(|(port, copy)| (*port as u16, *copy as u16)).collect();
            switch.add_group(&Group { number: *number as u16, copies }).unwrap();
        }
    }
    let entries: Vec<Entry> = state.iter().filter_map(entry).collect();
    switch.add(&entries).unwrap();
}

/// The tables that the daemon writes make the program add: the bits are those of a run without a switch, and the share that
/// the switch added is told.
#[test]
fn bmv2_adds_with_the_tables_that_it_was_told() {
    const NAME: &str = "switch_control::bmv2_adds_with_the_tables_that_it_was_told";
    let Some(tools) = require_p4(NAME).filter(|_| require_bpf(NAME)) else { return };
    let inputs = real(0, WORLD).unwrap();
    let plain = plain(&inputs);
    let lab = Lab::new(Layout::workers(WORLD)).unwrap();
    let (namespace, interfaces) = lab.splice().unwrap();
    let json = tools.compile(BLOCKS).unwrap();
    let mut bmv2 = Switch::start(&tools, &json, namespace, &interfaces).unwrap();
    let listener = lab.aggregator.namespace.run(|| TcpListener::bind(AGENT)).unwrap().unwrap();
    let switch = MockSwitch::on(listener).unwrap();
    switch.load();
    // All workers are at the bridge behind port 0.
    let mut options = options(&lab);
    options.aggregator.more = vec!["--switch".into(), AGENT.into()];
    for (host, port) in lab.workers.iter().map(|host| (host, 0)).chain([(&lab.aggregator, 1)]) {
        options.aggregator.more.extend(["--switch-port".into(), at_port(host, port)]);
    }
    // Frames that the switch does not know where to send are lost.
    let told = |switch: &MockSwitch| switch.tables().state.clone();
    let held: Vec<_> = (0..WORLD)
        .map(|rank| lab.disturb(rank, PORT..=PORT, 1, NOTHING_PASSES, Rates::NONE).unwrap())
        .collect();
    let mut running = Running::prepare(&lab, &inputs, &options).unwrap();
    wait_until("the switch knows where all are", DEADLINE, || Ok(told(&switch).len() == WORLD + 3)).unwrap();
    let stations = told(&switch);
    mirror(&stations, &mut bmv2);
    (0..WORLD).for_each(|rank| running.start_rank(rank).unwrap());
    wait_until("the switch has the job", DEADLINE, || Ok(!generations(&switch).is_empty())).unwrap();
    let mut job = told(&switch);
    job.retain(|key, _| !stations.contains_key(key));
    mirror(&job, &mut bmv2);
    drop(held);
    let mut shares = Json::Null;
    let result = running
        .finish_after(DEADLINE, || {
            let count = |count| bmv2.counter("PaatpIngress.counts", count).unwrap() as i64;
            switch.tables().counts = (0..Count::COUNT).map(count).collect();
            wait_until("the switch's counters were read", DEADLINE, || {
                shares = status(&lab)["switch"].clone();
                Ok(shares["added"]["by_switch"].as_u64() > Some(0))
            })
            .unwrap();
        })
        .unwrap();
    assert_eq!(result.digests().unwrap(), vec![plain; WORLD]);
    println!("{NAME}: {}; counters {}", shares["added"], shares["counters"]);
    assert!(shares["counters"]["completed"].as_u64() > Some(5), "{shares}");
}

/// Loads the program into BMv2's own P4Runtime server and writes its tables; the switch adds, forwards broadcasts, is started
/// again in the middle of a job with nothing in its memory, and has no job at the end.
#[test]
fn a_real_server_takes_what_the_keeper_writes() {
    const NAME: &str = "switch_control::a_real_server_takes_what_the_keeper_writes";
    /// Between the server's namespace and the aggregator's.
    const MANAGEMENT: [&str; 2] = ["192.0.2.1", "192.0.2.2"];
    const SERVER: u16 = 9559;
    let Some(tools) = require_p4(NAME) else { return };
    let Some(server) = require_grpc(NAME).filter(|_| require_bpf(NAME)) else { return };
    let (json, info) = tools.pipeline(BLOCKS).unwrap();
    let inputs = real(0, WORLD).unwrap();
    let plain = plain(&inputs);
    let lab = Lab::new(Layout::workers(WORLD)).unwrap();
    let (namespace, interfaces) = lab.splice().unwrap();
    let there = lab.aggregator.namespace.path().display().to_string();
    namespace
        .ip(&["link", "add", "manage", "type", "veth", "peer", "name", "manage", "netns", &there])
        .unwrap();
    for (namespace, address) in [namespace, &lab.aggregator.namespace].into_iter().zip(MANAGEMENT) {
        namespace.ip(&["address", "add", &format!("{address}/24"), "dev", "manage"]).unwrap();
        namespace.ip(&["link", "set", "manage", "up"]).unwrap();
    }
    let start = || GrpcSwitch::start(&server, namespace, &interfaces, SERVER).unwrap();
    let switch = start();
    let address = format!("{}:{SERVER}", MANAGEMENT[0]);
    let mut options = options(&lab);
    let files = format!("{},{}", json.display(), info.display());
    options.aggregator.more = vec!["--switch".into(), address.clone(), "--switch-pipeline".into(), files];
    for (host, port) in lab.workers.iter().map(|host| (host, 0)).chain([(&lab.aggregator, 1)]) {
        options.aggregator.more.extend(["--switch-port".into(), at_port(host, port)]);
    }
    let held: Vec<_> = (0..WORLD)
        .map(|rank| lab.disturb(rank, PORT..=PORT, 1, NOTHING_PASSES, Rates::NONE).unwrap())
        .collect();
    let mut running = Running::prepare(&lab, &inputs, &options).unwrap();
    let told = || status(&lab)["switch"].clone();
    let is_up = || {
        let told = told();
        ensure!(told["state"] != "wrong_program" && told["state"] != "refusing", "{told}");
        Ok(told["state"] == "up")
    };
    wait_until("the switch is in use", DEADLINE, is_up).unwrap();
    finds_by_broadcast(&lab.workers[0], &lab.aggregator);

    (0..WORLD).for_each(|rank| running.start_rank(rank).unwrap());
    let has_job = || Ok(told()["jobs"][0]["ranks"].as_array().is_some_and(|ranks| ranks.len() == WORLD));
    wait_until("the switch has the job", DEADLINE, has_job).unwrap();
    drop(held);
    let noted = |running: &Running<'_>, event| Ok::<_, anyhow::Error>(running.maps.counters()?.noted(event));
    wait_until("it adds", DEADLINE, || Ok(noted(&running, Event::Sums)? > 5)).unwrap();
    drop(switch);
    let before = noted(&running, Event::Completions).unwrap();
    wait_until("it is known to be down", DEADLINE, || Ok(told()["state"] == "down")).unwrap();
    let _switch = start();
    let mut last = Json::Null;
    let result = running
        .finish_after(DEADLINE, || {
            wait_until("it has added again", DEADLINE, || {
                last = told();
                Ok(last["counters"]["completed"].as_u64() > Some(5))
            })
            .unwrap();
        })
        .unwrap();
    assert_eq!(result.digests().unwrap(), vec![plain; WORLD]);
    let chunks = result.ranks[0].report.as_ref().unwrap().0["chunks"].as_u64().unwrap();
    println!("{NAME}: ended after {before} of {chunks} chunks; then {}; {}", last["added"], last["counters"]);
    assert!(before < chunks, "{before} of {chunks}");
    let state = lab.aggregator.namespace.run(|| what_stands_in(&address)).unwrap();
    let is_job = |key: &&Key| !matches!(key, Key::Entry(Table::Stations, _) | Key::Group(65..));
    assert_eq!(state.keys().find(is_job), None, "{state:?}");
    assert_eq!(state.len(), WORLD + 3, "stations, broadcasts and their group: {state:?}");
}

/// All that a server's tables hold, asked by a controller that takes it from whoever has it.
fn what_stands_in(address: &str) -> State {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = Client::open(address.parse().unwrap(), 0, u128::MAX).await.unwrap();
        let (info, _) = client.program().await.unwrap();
        client.state(&Program::of(&info).unwrap()).await.unwrap()
    })
}

/// A host that has forgotten another one's address of Ethernet asks everybody, and is answered.
fn finds_by_broadcast(host: &Host, other: &Host) {
    let (address, interface) = (other.v4().to_string(), host.interface.as_str());
    host.namespace.ip(&["neighbour", "del", &address, "dev", interface]).unwrap();
    wait_until("the neighbour was found", DEADLINE, || {
        host.namespace.run(|| -> std::io::Result<()> {
            UdpSocket::bind("0.0.0.0:0")?.send_to(b"?", (address.as_str(), 9)).map(drop)
        })??;
        let known = host.namespace.ip_json(&["neighbour", "show", &address])?;
        Ok(known[0]["lladdr"].is_string())
    })
    .unwrap();
}

/// What the tests' switch says of its program is what the compiler says.
#[test]
fn the_p4info_is_the_programs() {
    let Some(tools) = require_p4("switch_control::the_p4info_is_the_programs") else { return };
    let (_, info) = tools.pipeline(BLOCKS).unwrap();
    let read = |bytes: &[u8]| P4Info::decode(bytes).unwrap();
    assert!(
        read(&fs::read(&info).unwrap()) == read(P4INFO),
        "the program has another P4Info: tests/data/paatp.p4info.bin is to be what p4c-bm2-ss writes with --p4runtime-files"
    );
}

/// It says so, and starts nothing.
#[test]
fn an_aggregator_that_is_not_at_the_switch_does_not_start() {
    if !require_bpf("switch_control::an_aggregator_that_is_not_at_the_switch_does_not_start") {
        return;
    }
    let lab = Lab::new(Layout::workers(WORLD)).unwrap();
    let mut options = options(&lab);
    options.aggregator.more.truncate(4);
    let mut process = Aggregator::spawn(&lab, &options.aggregator).unwrap();
    let finished = process.wait(DEADLINE).unwrap();
    assert_eq!(finished.status.code(), Some(2), "{}", finished.output);
    assert!(finished.output.contains("--switch-port"), "{}", finished.output);
}
