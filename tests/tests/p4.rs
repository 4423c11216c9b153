//! The switch program on BMv2: the vectors, frame by frame. `cargo xtask p4 test` runs this.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use paatp_common::Seq;
use paatp_common::frame::PLAIN_HEADER;
use paatp_common::switch::places;
use paatp_common::wire::{Chunk, Header};
use paatp_tests::netns::Namespace;
use paatp_tests::p4::{BLOCKS, Switch, Tools, Wire, require_p4};
use paatp_tests::testrun::support::switch::Port;
use paatp_tests::vectors::{self, SlotState, SwitchEffect, Vector, hex, port_name, unhex};
use paatp_user::switch::entries::{Group, Neighbour, SwitchedJob, station};

/// Longest wait for a frame that is to come.
const PATIENCE: Duration = Duration::from_secs(10);
/// Ranks that any vector has.
const RANKS: u8 = 3;
/// Ethernet type of a tag.
const VLAN: [u8; 2] = [0x81, 0];
/// The group that a fence goes to.
const EVERYBODY: u16 = 0x7000;

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
            let test_job = job.job();
            let neighbour = |rank: u8| {
                let [.., a, b, c, d] = test_job.address(rank);
                let mac = Port::Rank(rank).mac();
                Neighbour { rank, port: rank.into(), mac, address: [a, b, c, d].into() }
            };
            let switched = SwitchedJob {
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
            };
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
