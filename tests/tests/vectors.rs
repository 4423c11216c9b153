//! The vectors (tests/vectors) against the code that they were made from, and against the loaded program.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use paatp_common::limits::STANDARD_BLOCKS;
use paatp_tests::p4::Verified;
use paatp_tests::require_bpf;
use paatp_tests::testrun::support::switch::Port;
use paatp_tests::testrun::{Flavour, Loaded};
use paatp_tests::vectors::{
    AggregatorEffect, SlotState, at_the_aggregator, at_the_switch, effect, read, ring_slot, unhex, write,
};

#[test]
fn the_files_are_what_the_code_makes() {
    write(true).unwrap();
}

/// Nobody changes the program of the switch, or what it is held against, without running it.
#[test]
fn the_switch_program_was_run_as_it_is() {
    let (verified, now) = (Verified::read().unwrap(), Verified::digest_now().unwrap());
    assert_eq!(
        verified.digest, now,
        "p4 or tests/vectors changed; `cargo xtask p4 test` runs the program and notes it"
    );
    assert!(
        verified.tests.len() > 1 && verified.tests.values().all(|how| how == "ok"),
        "{:?}",
        verified.tests
    );
}

/// Frames as they are in the files, not as they were made.
#[test]
fn the_code_does_what_the_files_say() {
    let (mut aggregator_steps, mut switch_steps, mut same) = (0, 0, 0);
    for (name, vector) in read().unwrap() {
        // Slots of another length than those that the files were made with, where it matters to nobody.
        let mut node = vector.node(STANDARD_BLOCKS + 1);
        let mut switch = vector.switch(STANDARD_BLOCKS);
        for step in &vector.steps {
            let what = format!("{name}: {}", step.what);
            let frame = unhex(&step.frame).unwrap();
            let from = step.rank.map_or(Port::Node, Port::Rank);
            let mut slots: [Option<SlotState>; 2] = [None, None];
            if let Some(expected) = &step.aggregator {
                let found = at_the_aggregator(&mut node, &vector.jobs, &frame);
                assert_eq!(found, *expected, "{what}");
                slots[0] = found.slot;
                aggregator_steps += 1;
            }
            if let Some(expected) = &step.switch {
                let switch = switch.as_mut().unwrap();
                switch.now += 1000;
                let found = at_the_switch(switch, from, &frame);
                assert_eq!(found, *expected, "{what}");
                slots[1] = found.slot;
                switch_steps += 1;
            }
            if step.same {
                let [Some(aggregator), Some(switch)] = &slots else { panic!("{what}: no slot") };
                assert!(aggregator.is_same(switch), "{what}: {aggregator:?} and {switch:?}");
                same += 1;
            }
        }
    }
    assert!(
        aggregator_steps > 60 && switch_steps > 60 && same > 30,
        "{aggregator_steps} {switch_steps} {same}"
    );
}

#[test]
fn the_loaded_program_does_what_the_files_say() {
    if !require_bpf("vectors::the_loaded_program_does_what_the_files_say") {
        return;
    }
    for flavour in Flavour::ALL {
        // Loading takes longer than everything else.
        let mut loaded: Option<Loaded> = None;
        let mut steps = 0;
        let vectors = read().unwrap();
        let most = vectors.values().map(|vector| vector.node(1).slots.len()).max().unwrap();
        for (name, vector) in &vectors {
            let mut node = vector.node(flavour.blocks());
            node.slots.resize_with(most, Default::default);
            node.lanes.resize_with(most * flavour.blocks(), Default::default);
            let loaded = loaded.get_or_insert_with(|| Loaded::like(flavour, &node).unwrap());
            loaded.become_like(&node).unwrap();
            for step in &vector.steps {
                let Some(expected) = &step.aggregator else { continue };
                let frame = unhex(&step.frame).unwrap();
                let run = loaded.run(&frame).unwrap();
                let slot = ring_slot(&vector.jobs, &frame).and_then(|(index, generation, seq)| {
                    let (state, lanes) = loaded.slot(index);
                    let holds = state.holds(generation, seq) && state.bits != 0;
                    let lanes = &lanes[..usize::from(state.chunk().lanes)];
                    let sums = (state.bits, state.tag);
                    let slot = SlotState::new(index, seq, sums, state.chunk(), state.next_exponent(), lanes);
                    holds.then_some(slot)
                });
                let found: AggregatorEffect = effect(run.verdict, &run.frame, slot);
                assert_eq!(found, *expected, "{flavour:?}: {name}: {}", step.what);
                steps += 1;
            }
        }
        println!("{flavour:?}: {steps} steps");
    }
}
