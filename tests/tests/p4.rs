//! The switch program on BMv2: the vectors, frame by frame; and that for Tofino: what it means, and whether it fits.
//! `cargo xtask p4 test` runs this.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use paatp_common::Seq;
use paatp_common::frame::PLAIN_HEADER;
use paatp_common::limits::LANES_PER_BLOCK;
use paatp_common::switch::{Count, places};
use paatp_common::tag::salt;
use paatp_common::wire::{Chunk, Header, Kind, Request, flags};
use paatp_tests::netns::Namespace;
use paatp_tests::p4::pipeline::{Program, Tofino};
use paatp_tests::p4::{BLOCKS, Switch, Tools, Wire, require_p4, tofino};
use paatp_tests::testrun::support::packet::Random;
use paatp_tests::testrun::support::requests::{TestJob, lanes_of, payload_of, sum_of, tag_of};
use paatp_tests::testrun::support::switch::Port;
use paatp_tests::vectors::{
    self, JobSpec, SlotState, SwitchEffect, SwitchSpec, Vector, hex, port_name, unhex,
};
use paatp_user::switch::entries::{Group, Neighbour, SwitchedJob, station};

/// Longest wait for a frame that is to come.
const PATIENCE: Duration = Duration::from_secs(10);
/// Ranks that any vector has.
const RANKS: u8 = 3;
/// Ethernet type of a tag.
const VLAN: [u8; 2] = [0x81, 0];
/// The group that a fence goes to.
const EVERYBODY: u16 = 0x7000;

/// A job of a vector, all its ranks behind the switch.
fn switched(job: &JobSpec, spec: SwitchSpec) -> SwitchedJob {
    let test_job = job.job();
    let neighbour = |rank: u8| {
        let [.., a, b, c, d] = test_job.address(rank);
        let mac = Port::Rank(rank).mac();
        Neighbour { rank, port: rank.into(), mac, address: [a, b, c, d].into() }
    };
    SwitchedJob {
        number: job.number,
        generation: job.generation,
        ranks: (0..job.world).map(neighbour).collect(),
        reach: job.slots,
        k: spec.k,
        granted: test_job.entry().granted,
        patience: spec.patience,
        slots: spec.slots as u32,
        node: [10, 80, 0, 1].into(),
        node_port: RANKS.into(),
    }
}

/// A switch with a socket at each port.
struct Bench {
    switch: Switch,
    wires: Vec<(Port, Wire)>,
    fences: u8,
    // Dropped last.
    _namespace: Namespace,
}

impl Bench {
    fn new(tools: &Tools, json: &Path, vector: &Vector) -> Bench {
        let namespace = Namespace::new("p4").unwrap();
        let ports: Vec<Port> = (0..RANKS).map(Port::Rank).chain([Port::Node]).collect();
        let mut interfaces = Vec::new();
        for number in 0..ports.len() {
            let (near, far) = (format!("s{number}"), format!("h{number}"));
            namespace.ip(&["link", "add", &near, "type", "veth", "peer", "name", &far]).unwrap();
            for interface in [&near, &far] {
                namespace.set(&format!("ipv6/conf/{interface}/disable_ipv6"), "1").unwrap();
                namespace.ip(&["link", "set", interface, "up"]).unwrap();
            }
            interfaces.push(near);
        }
        let mut switch = Switch::start(tools, json, &namespace, &interfaces).unwrap();
        let spec = vector.switch.unwrap();
        for (number, port) in (0u16..).zip(&ports) {
            switch.add(&[station(port.mac(), number)]).unwrap();
        }
        for job in &vector.jobs {
            let switched = switched(job, spec);
            switched.check().unwrap();
            switch.add(&switched.entries()).unwrap();
            switch.add_group(&switched.group()).unwrap();
        }
        // What is sent to everybody comes to each port after all that was sent before.
        let everybody =
            Group { number: EVERYBODY, copies: (0..ports.len() as u16).map(|port| (port, 0)).collect() };
        switch.add_group(&everybody).unwrap();
        switch
            .command(&format!(
                "table_add PaatpIngress.stations PaatpIngress.flood 0xffffffffffff => {EVERYBODY}"
            ))
            .unwrap();
        let wires = ports
            .iter()
            .zip(0..)
            .map(|(port, number)| (*port, Wire::open(&namespace, &format!("h{number}")).unwrap()));
        let wires = wires.collect();
        Bench { switch, wires, fences: 0, _namespace: namespace }
    }

    /// Sends a frame, and then one to everybody: what came before it at each port is what the first one caused.
    fn frame(&mut self, from: Port, frame: &[u8]) -> BTreeMap<String, String> {
        self.fences = self.fences.wrapping_add(1);
        let fence = [&[0xFF; 6][..], &from.mac(), &[0x88, 0xB5], &[self.fences; 50]].concat();
        let wire = &self.wires.iter().find(|(port, _)| *port == from).unwrap().1;
        wire.send(frame).unwrap();
        wire.send(&fence).unwrap();
        let mut out = BTreeMap::new();
        for (port, wire) in &self.wires {
            loop {
                let received = wire.receive(PATIENCE).unwrap();
                let received = received.unwrap_or_else(|| panic!("nothing comes out at {port:?}"));
                if received == fence {
                    break;
                }
                let other = out.insert(port_name(*port), hex(&received));
                assert_eq!(other, None, "two frames at {port:?}");
            }
        }
        out
    }

    /// What a slot holds.
    fn slot(&mut self, index: usize, lanes: u16) -> SlotState {
        let mut read = |name: &str| self.switch.register(&format!("PaatpIngress.{name}"), index).unwrap();
        let (bits, tag) = (read("slot_bits") as u64, read("slot_tag") as u64);
        let (seq, agreed) = (read("slot_seq") as u32, read("slot_agreed") as u64);
        let next = read("slot_next_exponent") as u8 as i8;
        let words = (0..usize::from(lanes) / 2)
            .flat_map(|word| {
                let word = read(&format!("lanes.lanes_{}_{}", word / 16, word % 16)) as u64;
                [(word >> 32) as u32, word as u32]
            })
            .collect::<Vec<_>>();
        let agreed = Chunk {
            operation_and_type: (agreed >> 32) as u8,
            lanes: (agreed >> 16) as u16,
            exponent: (agreed >> 8) as i8,
            root: agreed as u8,
        };
        assert_eq!(agreed.lanes, lanes);
        SlotState::new(index, Seq(seq), (bits, tag), agreed, next, &words)
    }
}

/// A slot as the switch's command line shows it: larger numbers than of 63 bits as the largest of these. (The packets
/// that the switch sends have all bits.)
fn clipped(slot: &SlotState) -> SlotState {
    let clip = |digits: &str| u64::from_str_radix(digits, 16).unwrap().min(i64::MAX as u64);
    let words = slot.lanes.as_bytes().chunks(16).map(|word| clip(str::from_utf8(word).unwrap()));
    let lanes = words.map(|word| format!("{word:016x}")).collect();
    SlotState { tag: format!("{:x}", clip(&slot.tag)), lanes, ..slot.clone() }
}

/// Everything that a vector says of the switch; returns how many steps did.
fn replay(tools: &Tools, json: &Path, name: &str, vector: &Vector) -> usize {
    let mut bench = Bench::new(tools, json, vector);
    let mut steps = 0;
    for step in &vector.steps {
        let Some(SwitchEffect { out, slot }) = &step.switch else { continue };
        let from = step.rank.map_or(Port::Node, Port::Rank);
        let frame = unhex(&step.frame).unwrap();
        let what = format!("{name}: {}", step.what);
        if frame[12..14] == VLAN {
            // The kernel takes tags off before a socket sees them.
            continue;
        }
        assert_eq!(bench.frame(from, &frame), *out, "{what}");
        if let Some(slot) = slot {
            let lanes = (slot.lanes.len() / 8) as u16;
            assert_eq!(bench.slot(slot.index, lanes), clipped(slot), "{what}");
        } else if let Some(header) = Header::of(frame.get(PLAIN_HEADER..).unwrap_or_default()) {
            let owner = u128::from(header.job()) << 32 | u128::from(header.generation());
            let slots = vector.switch.unwrap().slots;
            for place in places(header.job(), header.seq(), slots) {
                let read =
                    |name: &str| bench.switch.register(&format!("PaatpIngress.{name}"), place).unwrap();
                let held = ["slot_owner", "slot_seq"].map(read);
                assert_ne!(held, [owner, header.raw_seq().into()], "{what}: there is a slot");
            }
        }
        steps += 1;
    }
    steps
}

#[test]
fn the_vectors_have_the_same_effect_on_the_switch() {
    let Some(tools) = require_p4("p4::the_vectors_have_the_same_effect_on_the_switch") else { return };
    let json = tools.compile(BLOCKS).unwrap();
    for (name, vector) in vectors::read().unwrap() {
        if vector.switch.is_some() {
            let steps = replay(&tools, &json, &name, &vector);
            println!("{name}: {steps} steps");
            assert!(steps > 0, "{name}");
        }
    }
}

/// The smallest size that the program can have, and the largest.
#[test]
fn both_ends_of_its_sizes_compile() {
    let Some(tools) = require_p4("p4::both_ends_of_its_sizes_compile") else { return };
    for blocks in [1, BLOCKS] {
        tools.compile(blocks).unwrap();
    }
}

/// By the front end alone, which knows the architecture but not the chip.
#[test]
fn the_tofino_program_is_well_typed() {
    let Some(checker) = tofino::require_checker("p4::the_tofino_program_is_well_typed") else { return };
    checker.check().unwrap();
}

/// Compiled, assembled, and within the chip; there is none to run it.
#[test]
fn the_tofino_program_fits() {
    let Some(backend) = tofino::require_backend("p4::the_tofino_program_fits") else { return };
    let used = backend.build().unwrap();
    println!("{used}");
    let lanes = used.registers.keys().filter(|name| name.contains(".lane")).count();
    assert_eq!(lanes, LANES_PER_BLOCK, "{used}");
    let others = [
        "slot_holder",
        "slot_seen",
        "slot_agreed",
        "slot_ack",
        "slot_progress",
        "slot_missing",
        "slot_tag_low",
        "slot_tag_high",
        "rank_ports",
    ];
    assert_eq!(used.registers.len(), LANES_PER_BLOCK + others.len(), "{used}");
    for other in others {
        assert!(used.registers.keys().any(|name| name.ends_with(other)), "no {other}: {used}");
    }
    assert!(used.stages() <= tofino::STAGES, "{used}");
    assert!(used.units().into_iter().all(|units| units <= tofino::UNITS), "{used}");
    for stage in 0..used.stages() {
        let tables: usize = used.tables.values().filter_map(|tables| tables.get(stage)).sum();
        assert!(tables <= tofino::TABLES, "{used}");
    }
    for (letter, most) in tofino::CONTAINERS {
        let taken = used.containers.get(&letter.to_string()).copied().unwrap_or(0);
        assert!((1..=most).contains(&taken), "{used}");
    }
}

/// Between two packets, in ns.
const PAUSE: u64 = 1_000_000;
/// When the first packet comes, in ns: slots that nobody has had are free by then.
const BEGIN: u64 = 1_000_000_000;
/// Two to this many slots, as it is compiled.
const SLOT_BITS: u32 = 12;
/// Names a job and its generation.
const SEED: u32 = 0x8765_4321;

/// Where the two programs differ; docs/switch.md says why.
const DIFFERENT: [(&str, &str); 14] = [
    // Headers are not checked: what the switch makes of a damaged one is as damaged.
    ("damage", "in the header"),
    ("results", "a damaged header frees nothing"),
    ("results", "a result of a chunk that is not complete here"),
    // One patience for all jobs.
    ("eviction", "takes it back, without what was there"),
    // What lies behind a datagram does not show.
    ("strangers", "with a trailer"),
    // No window.
    ("window", "rank 0: one further"),
    ("window", "rank 1: all ranks have acknowledged this one"),
    // One place of very many slots.
    ("crowded", "no place"),
    ("crowded", "there is a place now, but a part of it has gone by"),
    ("crowded", "as something of this one may have"),
    ("floor", "rank 0: nothing is known but the job's beginning"),
    ("floor", "rank 1: one further"),
    ("floor", "rank 2: so the window is the same"),
    ("floor", "rank 0: all ranks have acknowledged this one"),
];

fn tofino_of(program: &Program) -> Tofino {
    let mut switch = Tofino::new(program).unwrap();
    for port in (0..RANKS).map(Port::Rank).chain([Port::Node]) {
        switch.add_station(port.mac(), number_of(port));
    }
    switch.now = BEGIN;
    switch
}

fn number_of(port: Port) -> u16 {
    match port {
        Port::Rank(rank) => rank.into(),
        Port::Node => RANKS.into(),
    }
}

/// An answer without what the program for Tofino tells less of (contributors and what passed by), and without what it
/// leaves as it was: fields that an answer of a switch does not define.
fn without_news(frame: &[u8]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    let Some(header) = frame.get_mut(PLAIN_HEADER..).and_then(Header::of_mut) else { return frame };
    if header.check().is_err() || header.kind() != Some(Kind::Answer) || !header.has(flags::PARTIAL) {
        return frame;
    }
    header.set_gain(0);
    if header.has(flags::RESULT) {
        header.set_status(0);
        header.set_token(0);
    } else {
        header.set_raw_want(0);
        header.set_raw_ack(0);
        header.set_raw_progress(0);
        header.set_bitmap(0);
        header.set_tag(0);
        header.set_lanes(0);
        header.set_told(0);
        header.set_contributors(0);
        header.set_exponent(0);
        header.set_next_exponent(0);
        header.set_rank(0);
        header.set_attempt(0);
        header.set_operation_or_epoch(0);
    }
    header.seal();
    frame
}

/// The program's text carried out, frame by frame.
#[test]
fn the_tofino_program_does_what_the_vectors_say() {
    let Some(checker) = tofino::require_checker("p4::the_tofino_program_does_what_the_vectors_say") else {
        return;
    };
    let program = checker.load(SLOT_BITS).unwrap();
    let mut steps = 0;
    for (name, vector) in vectors::read().unwrap() {
        let Some(spec) = vector.switch else { continue };
        let mut switch = tofino_of(&program);
        for (job, seed) in vector.jobs.iter().zip(SEED..) {
            switch.install(&switched(job, spec), seed);
        }
        for step in &vector.steps {
            let Some(SwitchEffect { out, .. }) = &step.switch else { continue };
            let what = format!("{name}: {}", step.what);
            let from = step.rank.map_or(Port::Node, Port::Rank);
            let frame = unhex(&step.frame).unwrap();
            switch.now += PAUSE;
            let left = switch.frame(number_of(from), &frame).expect(&what);
            let left: BTreeMap<u16, Vec<u8>> =
                left.into_iter().map(|(port, frame)| (port, without_news(&frame))).collect();
            let mut expected = BTreeMap::new();
            for port in (0..RANKS).map(Port::Rank).chain([Port::Node]) {
                let frame = out.get(&port_name(port)).map(|frame| unhex(frame).unwrap());
                expected.extend(frame.map(|frame| (number_of(port), without_news(&frame))));
            }
            if name == "lengths" {
                // Other lengths than 32 lanes: all passed on.
                let passed = BTreeMap::from([(number_of(Port::Node), frame)]);
                assert_eq!(left, passed, "{what}");
            } else if DIFFERENT.contains(&(name.as_str(), step.what.as_str())) {
                assert_ne!(left, expected, "{what}: it does not differ");
            } else {
                assert_eq!(left, expected, "{what}");
            }
            steps += 1;
        }
    }
    println!("{steps} steps");
    assert!(steps > 50);
}

/// Contributions of two jobs in any order, doubled, late, and more chunks than there are slots: each partial sum is that
/// of all ranks, each once. (The salts are in the tags, so a chunk or job taken for another one shows too.)
#[test]
fn partial_sums_of_the_tofino_program_are_right() {
    const LANES: u16 = 32;
    /// So that chunks meet in slots.
    const FEW_SLOT_BITS: u32 = 3;
    /// Of them half are near the end of the numbers.
    const ROUNDS: u64 = 8;
    const PACKETS: u32 = 300;
    /// Packets that may come again.
    const UNDER_WAY: usize = 40;
    let Some(checker) = tofino::require_checker("p4::partial_sums_of_the_tofino_program_are_right") else {
        return;
    };
    let program = checker.load(FEW_SLOT_BITS).unwrap();
    let mut sums = 0;
    let mut counts = [0; Count::COUNT];
    for round in 0..ROUNDS {
        let mut random = Random(round);
        let mut switch = tofino_of(&program);
        let jobs =
            [TestJob::new(3, 4, 64), TestJob { number: 1, generation: 0xBEEF, ..TestJob::new(2, 4, 64) }];
        let begin = if round % 2 == 0 { 0 } else { u32::MAX - 4 };
        for (job, seed) in jobs.iter().zip(SEED..) {
            let spec = SwitchSpec { slots: 1 << FEW_SLOT_BITS, k: 1, patience: 0 };
            switch.install(&switched(&JobSpec::of(job), spec), seed);
        }
        let mut sent: Vec<(u8, Vec<u8>)> = Vec::new();
        for packet in 0..PACKETS {
            switch.now += [1000, PAUSE, 150 * PAUSE][random.below(3) as usize];
            if sent.is_empty() || random.chance(70) {
                let job = &jobs[random.below(2) as usize];
                let rank = random.below(job.world.into()) as u8;
                let seq = Seq(begin.wrapping_add(packet / 40 + random.below(6) as u32));
                let back = |by: u64| Seq(seq.0.wrapping_sub(by as u32));
                // What a rank says of a chunk is the same each time.
                let said = u64::from(seq.0) * 64 + u64::from(rank) * 8;
                let request = Request {
                    ack: back(said % 5),
                    progress: back(said % 3),
                    next_exponent: (said % 251) as u8 as i8,
                    ..job.data(rank, seq, sum_of(LANES))
                };
                let lanes = lanes_of(job.world, rank, seq, LANES);
                sent.push((rank, job.frame(&request, &lanes)));
                if sent.len() > UNDER_WAY {
                    sent.remove(0);
                }
            } else {
                let again = random.below(sent.len() as u64) as usize;
                sent.push(sent[again].clone());
            }
            let (rank, frame) = sent.last().unwrap().clone();
            for (port, frame) in switch.frame(rank.into(), &frame).unwrap() {
                let header = Header::of(&frame[PLAIN_HEADER..]).unwrap();
                header.check().unwrap();
                if port == u16::from(rank) {
                    assert_eq!(header.kind(), Some(Kind::Answer));
                } else if header.has(flags::PARTIAL) {
                    is_whole_sum(&jobs[usize::from(header.job())], &frame[PLAIN_HEADER..]);
                    sums += 1;
                }
            }
        }
        for (what, count) in &switch.ingress.counts {
            counts[*what as usize] += count;
        }
    }
    println!("{sums} partial sums; {counts:?}");
    assert_eq!(counts[Count::Completed as usize], sums);
    for what in [Count::Stored, Count::Added, Count::Duplicates, Count::Completed, Count::PassedCrowded] {
        assert!(counts[what as usize] > 100, "{counts:?}");
    }
}

/// A partial sum of all ranks, right in all that it says.
fn is_whole_sum(job: &TestJob, datagram: &[u8]) {
    let header = Header::of(datagram).unwrap();
    let (seq, chunk, ranks) = (header.seq(), header.chunk(), 0..job.world);
    let mut sums = vec![0u32; usize::from(header.lanes())];
    for rank in ranks.clone() {
        let lanes = lanes_of(job.world, rank, seq, header.lanes());
        sums.iter_mut().zip(lanes).for_each(|(sum, lane)| *sum = sum.wrapping_add(lane));
    }
    assert_eq!(payload_of(datagram), sums);
    let keys = ranks.clone().fold(0u64, |keys, rank| keys.wrapping_add(job.key(rank)));
    assert_eq!(header.tag(), tag_of(&sums).wrapping_add(salt(keys, seq, chunk)));
    assert_eq!((header.bitmap(), header.contributors()), (job.entry().expected, job.world));
    assert_eq!((header.want(), header.status()), (seq, header.worker()));
    let said = ranks.map(|rank| u64::from(seq.0) * 64 + u64::from(rank) * 8);
    let next = said.clone().map(|said| (said % 251) as u8 as i8).max();
    assert_eq!(Some(header.next_exponent()), next);
    let lowest = |modulus: u64| {
        let furthest = said.clone().map(|said| said % modulus).max().unwrap_or_default();
        seq.0.wrapping_sub(furthest as u32)
    };
    assert_eq!((header.raw_ack(), header.raw_progress()), (lowest(5), lowest(3)));
}
