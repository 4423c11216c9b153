//! The rules for slots, on the kernel's own tables after a run; and that the audit finds tables that break them.
//! (Every other run of the end-to-end tests is audited too: `JobResult::check`.)

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::time::Duration;

use paatp_common::Event;
use paatp_common::seq::Seq;
use paatp_tests::audit::Tables;
use paatp_tests::gradients::synthetic;
use paatp_tests::job::{Running, run};
use paatp_tests::kernel::SlotMemory;
use paatp_tests::process::wait_until;
use paatp_tests::report::Report;
use paatp_tests::{Dtype, Gradient, JobOptions, Lab, Layout, Rates, require_bpf};

/// Longest run of a few processes.
const LONG: Duration = Duration::from_secs(60);
/// The rates of `disturbed.rs`.
const HARSH: Rates = Rates { loss: 0.10, duplicate: 0.05, reorder: 0.05, corrupt: 0.01 };
/// 115 chunks of 352 lanes.
const ELEMENTS: usize = 40_000;

fn inputs() -> Vec<Gradient> {
    synthetic(3, 29, &[(Dtype::F32, ELEMENTS)], 1.0)
}

fn audited(name: &str, change: impl FnOnce(&mut JobOptions)) {
    if !require_bpf(name) {
        return;
    }
    let (inputs, lab) = (inputs(), Lab::new(Layout::workers(3)).unwrap());
    let mut options = JobOptions::world(3);
    change(&mut options);
    let result = run(&lab, &inputs, &options).unwrap();
    let verdict = result.check(&inputs, &options).unwrap();
    assert!(verdict.is_right() && result.broken_rules.is_empty(), "{:#?}", verdict.complaints);
    assert!(result.counters.noted(Event::Completions) >= (ELEMENTS / options.aggregator.lanes) as u64);
}

#[test]
fn a_ring_longer_than_the_job() {
    audited("invariants::a_ring_longer_than_the_job", |_| {});
}

#[test]
fn a_ring_that_goes_round() {
    audited("invariants::a_ring_that_goes_round", |options| {
        (options.aggregator.slots, options.aggregator.window) = (8, 4);
    });
}

#[test]
fn the_smallest_ring_disturbed() {
    audited("invariants::the_smallest_ring_disturbed", |options| {
        (options.aggregator.slots, options.aggregator.window) = (2, 1);
        (options.requests, options.answers) = (HARSH, HARSH);
    });
}

#[test]
fn disturbed() {
    audited("invariants::disturbed", |options| (options.requests, options.answers) = (HARSH, HARSH));
}

#[test]
fn kernel_bypass() {
    audited("invariants::kernel_bypass", |options| {
        options.io = "af-xdp";
        (options.aggregator.slots, options.aggregator.window) = (32, 16);
    });
}

/// While the ranks are still at work: read beside the program that writes, only what a single word tells can be held
/// against the rules.
#[test]
fn nobody_is_ever_too_far_ahead() {
    if !require_bpf("invariants::nobody_is_ever_too_far_ahead") {
        return;
    }
    let inputs = synthetic(3, 31, &[(Dtype::F32, 20 * ELEMENTS)], 1.0);
    let lab = Lab::new(Layout::workers(3)).unwrap();
    let mut options = JobOptions::world(3);
    (options.aggregator.slots, options.aggregator.window) = (16, 8);
    let mut running = Running::start(&lab, &inputs, &options).unwrap();
    let slots = i64::from(options.aggregator.slots);
    let (mut looks, mut generation) = (0u32, 0);
    wait_until("all ranks had ended", LONG, || {
        if generation == 0 {
            if running.maps.counters()?.noted(Event::Requests) > 0 {
                generation = Tables::read(&running.maps, 0)?.job.generation;
            }
        } else {
            // min_ack last: it may rise meanwhile.
            let tables = Tables::read(&running.maps, generation)?;
            let later = Tables::read(&running.maps, generation)?;
            let lead = i64::from(tables.p_max.since(later.lowest()) as i32);
            assert!(lead <= slots, "{lead} ahead");
            for (slot, _) in tables.slots.iter().filter(|(slot, _)| slot.generation == generation) {
                let ahead = i64::from(slot.seq.since(later.lowest()) as i32);
                assert!(ahead < slots, "a slot {ahead} ahead of min_ack: {slot:?}");
            }
            looks += u32::from(tables.p_max != Seq(0));
        }
        let mut all = true;
        for worker in &mut running.workers {
            all &= worker.has_ended()?;
        }
        Ok(all)
    })
    .unwrap();
    assert!(looks > 3, "only {looks} looks while the ranks were at work");
    let result = running.finish(LONG).unwrap();
    assert!(result.check(&inputs, &options).unwrap().is_right(), "{:#?}", result.broken_rules);
}

/// A way to break tables.
type Break = (&'static str, fn(&mut Tables, usize));

/// Tables after a right run, and each of them broken in one way.
#[test]
fn broken_tables_are_found() {
    if !require_bpf("invariants::broken_tables_are_found") {
        return;
    }
    let (inputs, lab) = (inputs(), Lab::new(Layout::workers(3)).unwrap());
    let mut options = JobOptions::world(3);
    (options.aggregator.slots, options.aggregator.window) = (32, 16);
    let mut running = Running::start(&lab, &inputs, &options).unwrap();
    wait_until("all ranks had ended", LONG, || {
        let mut all = true;
        for worker in &mut running.workers {
            all &= worker.has_ended()?;
        }
        Ok(all)
    })
    .unwrap();
    let report = Report::read(&running.commands[0].report).unwrap();
    let number = |name: &str| report.0[name].as_u64().unwrap();
    let (generation, chunks) = (number("generation") as u32, number("chunks"));
    let counters = running.maps.counters().unwrap();
    let sound = Tables::read(&running.maps, generation).unwrap();
    assert_eq!(sound.broken_rules_at_the_end(chunks, &counters), Vec::<String>::new());
    let slot = sound.some_sum().expect("a slot with a sum");

    let breaks: [Break; 9] = [
        ("another chunk", |tables, slot| tables.slots[slot].0.seq = tables.slots[slot].0.seq.plus(1)),
        ("a chunk 2 S ahead", |tables, slot| tables.slots[slot].0.seq = tables.slots[slot].0.seq.plus(64)),
        ("a chunk 2 S behind", |tables, slot| tables.slots[slot].0.seq = tables.slots[slot].0.seq.minus(64)),
        ("a contributor missing", |tables, slot| tables.slots[slot].0.bits &= !1),
        ("a tag", |tables, slot| tables.slots[slot].0.tag ^= 1 << 40),
        ("a lane", |tables, slot| tables.slots[slot].1[7] ^= 1),
        ("another generation", |tables, slot| tables.slots[slot].0.generation ^= 1),
        ("a lock", |tables, slot| tables.slots[slot].0.lock = 1),
        ("p_max", |tables, _| tables.p_max = tables.p_max.plus(33)),
    ];
    for (what, break_it) in breaks {
        let mut broken = sound.clone();
        break_it(&mut broken, slot);
        assert!(!broken.broken_rules().is_empty(), "{what} went unnoticed");
    }
    assert!(!sound.broken_rules_at_the_end(chunks + 1, &counters).is_empty(), "a missing completion");

    // And in the kernel's memory itself.
    let first = sound.job.first_slot as usize;
    SlotMemory::map(&running.maps, "SLOTS").unwrap().flip(first + slot, 77);
    let flipped = Tables::read(&running.maps, generation).unwrap().broken_rules();
    assert!(flipped.len() == 1 && flipped[0].contains("tag"), "{flipped:?}");
}
