//! Changes of how ranks wait for one another, while packets flow.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

mod bench;
mod support;

use std::collections::BTreeMap;

use bench::{Bench, LANES, bitmap, has_result};
use paatp_common::Seq;
use paatp_common::policy::{Mode, Policy, QUORUM_ALL, Staleness};
use paatp_common::wire::{Body, Chunk, EVERYBODY, ElementType, Operation, Request, Status};
use proptest::prelude::*;
use support::requests::{TestJob, sum_of};

const BSP: Mode = Mode::BSP;
const TWO: Mode = Mode { quorum: 2, staleness: Staleness::Unbounded };

fn bench(world: u8, slots: u32, mode: Mode) -> Bench {
    let mut bench = Bench::ranks(world, slots);
    bench.node.jobs[0].policy = Policy::settled(mode, 0);
    bench
}

/// The control plane's half of a change.
fn ask_for(bench: &mut Bench, mode: Mode, min_ack: u32) -> bool {
    let policy = &mut bench.node.jobs[0].policy;
    let may = policy.is_armed() || policy.is_over(Seq(min_ack));
    if may {
        let now = if policy.is_armed() { *policy } else { policy.when_over() };
        *policy = now.armed(mode);
    }
    may
}

/// Everybody contributes and acknowledges, so that the next chunk begins.
fn finish(bench: &mut Bench, world: u8, seq: u32) {
    for rank in 0..world {
        bench.send(Request { ack: Seq(seq), ..bench.data(rank, seq) });
    }
    for rank in 0..world {
        bench.pull(rank, seq + 1, seq + 1);
    }
}

#[test]
fn f23_a_slot_keeps_the_policy_of_its_first_store() {
    let mut bench = bench(3, 4, BSP);
    bench.contribute(0, 0);
    assert!(ask_for(&mut bench, TWO, 0));
    // It is open already, so whatever touches it now changes nothing; nor does it fix the chunk from which on.
    assert!(!has_result(&bench.contribute(1, 0)));
    assert!(bench.node.jobs[0].policy.is_armed(), "nothing has begun since");
    assert!(!has_result(&bench.contribute(0, 1)));
    assert_eq!(bench.node.jobs[0].policy.from(), Some(Seq(1 + 8)));
    assert!(!has_result(&bench.contribute(1, 1)), "before it, all ranks are needed");
    let whole = bench.contribute(2, 0);
    assert_eq!((has_result(&whole), whole.answer.epoch, whole.answer.told.is_partial()), (true, 0, false));
}

#[test]
fn f23_no_third_policy_while_a_chunk_may_be_of_the_first() {
    let mut bench = bench(3, 2, BSP);
    assert!(ask_for(&mut bench, TWO, 0));
    finish(&mut bench, 3, 0);
    assert_eq!(bench.node.jobs[0].policy.from(), Some(Seq(4)));
    for seq in 1..4 {
        assert!(!ask_for(&mut bench, BSP, seq), "chunk 3 may be open");
        assert_eq!(bench.contribute(0, seq).answer.status, Status::Ok);
        assert!(!has_result(&bench.contribute(1, seq)));
        finish(&mut bench, 3, seq);
    }
    bench.contribute(2, 4);
    let partial = bench.contribute(0, 4);
    assert_eq!((has_result(&partial), bitmap(&partial), partial.answer.epoch), (true, 0b101, 1));
    assert_eq!(partial.answer.told.staleness(), Staleness::Unbounded);
    assert!(ask_for(&mut bench, BSP, 4));
}

/// The word is read once for a slot. A second look, at each touch, would complete this one with two ranks.
#[test]
fn f23_a_change_between_two_touches_of_a_slot_is_not_seen() {
    let mut bench = bench(3, 2, BSP);
    bench.contribute(0, 0);
    bench.node.jobs[0].policy = Policy::settled(TWO, 9);
    let second = bench.contribute(1, 0);
    assert_eq!((has_result(&second), bench.node.slots[0].quorum()), (false, QUORUM_ALL));
    assert!(!has_result(&bench.pull(0, 0, 0)));
    let whole = bench.contribute(2, 0);
    assert_eq!((bitmap(&whole), whole.answer.epoch), (0b111, 0));
}

#[test]
fn f9_a_quorum_counts_and_all_ranks_are_a_set_on_either_side_of_a_change() {
    let mut bench = bench(4, 2, Mode { quorum: 3, ..BSP });
    assert!(ask_for(&mut bench, BSP, 0));
    for seq in 0..4 {
        bench.contribute(0, seq);
        bench.contribute(1, seq);
        assert!(has_result(&bench.contribute(3, seq)), "{seq}: three are enough");
        finish(&mut bench, 4, seq);
    }
    bench.contribute(0, 4);
    bench.contribute(1, 4);
    bench.contribute(3, 4);
    bench.shrink(3);
    assert!(!has_result(&bench.pull(0, 4, 4)), "three of three, but rank 2 is missing");
    assert_eq!(bitmap(&bench.contribute(2, 4)), 0b1111);
}

#[test]
fn f3_a_redo_keeps_the_policy_of_its_slot() {
    let mut bench = bench(3, 4, Mode { quorum: 2, ..BSP });
    bench.contribute(0, 0);
    bench.node.jobs[0].policy = Policy::settled(BSP, 1);
    // Never complete, so anybody may take part; and two are enough still.
    bench.redo(1, 0, 1);
    assert!(has_result(&bench.redo(2, 0, 1)));
    bench.redo(1, 0, 2);
    let again = bench.redo(2, 0, 2);
    assert_eq!((bitmap(&again), again.answer.epoch), (0b110, 0));
}

#[test]
fn f6_a_late_rank_moves_no_exponent_of_either_policy() {
    let mut bench = bench(3, 4, BSP);
    ask_for(&mut bench, TWO, 0);
    for seq in 0..9 {
        let with = |bench: &Bench, rank, next_exponent| Request { next_exponent, ..bench.data(rank, seq) };
        let proposals = if seq < 8 { vec![(0, 1), (1, 2), (2, 3)] } else { vec![(0, 1), (1, 2)] };
        for (rank, exponent) in proposals {
            let request = Request { ack: Seq(seq), ..with(&bench, rank, exponent) };
            bench.send(request);
        }
        let late = bench.send(with(&bench, 2, 9));
        let Body::Result { next_exponent, .. } = late.answer.body else { panic!("{late:?}") };
        assert_eq!(next_exponent, if seq < 8 { 3 } else { 2 });
        for rank in 0..3 {
            bench.pull(rank, seq + 1, seq + 1);
        }
    }
}

/// F7: the status says that a contribution came late, the result says who is in.
#[test]
fn f7_the_bitmap_of_the_result_says_who_is_in() {
    let mut bench = bench(3, 2, TWO);
    bench.contribute(0, 0);
    bench.contribute(1, 0);
    for _ in 0..3 {
        let late = bench.contribute(2, 0);
        assert_eq!((late.answer.status, bitmap(&late)), (Status::NotIncluded, 0b011));
    }
}

/// Part 2.6: what needs every rank, as rounds of exponents do, needs them whatever the quorum.
#[test]
fn r26_what_the_ranks_ask_of_all_needs_all() {
    let mut bench = bench(3, 2, TWO);
    let chunk = Chunk { operation_and_type: sum_of(LANES).operation_and_type | EVERYBODY, ..sum_of(LANES) };
    assert_eq!(chunk.operation(), Some(Operation::Sum));
    let ask = |bench: &mut Bench, rank: u8| {
        let (request, payload) = (bench.job.data(rank, Seq(0), chunk), bench.payload(rank, 0));
        bench.node.ask(&bench.job, &request, &payload).unwrap()
    };
    assert!(!has_result(&ask(&mut bench, 0)));
    let other = bench.contribute(1, 0);
    assert_eq!(other.answer.status, Status::Aborted, "ranks must agree on it");
    assert!(!has_result(&ask(&mut bench, 1)));
    let whole = ask(&mut bench, 2);
    assert_eq!(
        (bitmap(&whole), whole.answer.told.is_partial()),
        (0b111, true),
        "the policy is told all the same"
    );
}

/// A first contribution that was damaged leaves nothing of what it asked for.
#[test]
fn a_refused_first_store_does_not_decide_who_is_needed() {
    let barrier = Chunk::new(Operation::Barrier, ElementType::F32, 0, 0);
    let mut bench = bench(3, 2, TWO);
    let damaged = bench.corrupted(bench.data(0, 0));
    assert_eq!(damaged.answer.status, Status::BadTag);
    let last = [0, 1, 2].map(|rank| {
        has_result(&bench.node.ask(&bench.job, &bench.job.data(rank, Seq(0), barrier), &[]).unwrap())
    });
    assert_eq!(last, [false, false, true]);
}

#[test]
fn a_result_that_does_not_fit_tells_its_length() {
    let mut bench = bench(3, 2, TWO);
    let lanes = |reply: &support::node::Reply| match reply.answer.body {
        Body::Pending { lanes, .. } => lanes,
        Body::Result { .. } => panic!("{reply:?}"),
    };
    let none = Chunk { lanes: 0, ..sum_of(LANES) };
    let pull = |bench: &mut Bench| {
        let request = bench.job.pull(2, Seq(0), none);
        bench.node.ask(&bench.job, &request, &[]).unwrap()
    };
    bench.contribute(0, 0);
    assert_eq!(lanes(&pull(&mut bench)), 0, "not complete");
    bench.contribute(1, 0);
    assert_eq!(lanes(&pull(&mut bench)), LANES);
}

/// What happens next.
#[derive(Clone, Debug)]
enum Step {
    /// A rank contributes to a chunk that it may contribute to, or one that it has had before.
    Contribute { rank: u8, ahead: u8, damaged: bool },
    /// A rank takes its next result, if it is there.
    Take { rank: u8 },
    /// Another mode is asked for.
    Ask { quorum: u8, staleness: u8 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..4u8, prop_oneof![6 => Just(0u8), 2 => 0..8u8], prop::bool::weighted(0.1))
            .prop_map(|(rank, ahead, damaged)| Step::Contribute { rank, ahead, damaged }),
        8 => (0..4u8).prop_map(|rank| Step::Take { rank }),
        1 => (0..4u8, 0..64u8).prop_map(|(quorum, staleness)| Step::Ask { quorum, staleness }),
    ]
}

/// Every chunk has exactly one policy, by its number: one change after the other, each at one chunk.
fn play(world: u8, slots: u32, start: u32, steps: &[Step]) -> usize {
    let job = TestJob::new(world, slots, LANES);
    let mut bench = Bench::new(job);
    bench.node.start_at(&job, Seq(start));
    let epochs = &mut BTreeMap::<u64, u8>::new();
    let mut modes = vec![job.policy().after()];
    let mut acks = vec![0u64; world as usize];
    for step in steps {
        let min_ack = acks.iter().min().copied().unwrap();
        match *step {
            Step::Contribute { rank, ahead, damaged } => {
                let rank = rank % world;
                let ack = acks[rank as usize];
                let position = ack + u64::from(ahead);
                let seq = Seq(start).plus(position as u32);
                let request = Request { ack: Seq(start).plus(ack as u32), ..bench.data(rank, seq.0) };
                if damaged {
                    bench.corrupted(request)
                } else {
                    bench.send(request)
                };
            }
            Step::Take { rank } => {
                let rank = rank % world;
                let ack = acks[rank as usize];
                let (want, ack) = (Seq(start).plus(ack as u32), Seq(start).plus(ack as u32));
                acks[rank as usize] += u64::from(has_result(&bench.pull(rank, want.0, ack.0)));
            }
            Step::Ask { quorum, staleness } => {
                let mode = Mode {
                    quorum: if quorum < world { quorum } else { QUORUM_ALL },
                    staleness: if staleness > 62 {
                        Staleness::Unbounded
                    } else {
                        Staleness::Bounded(staleness)
                    },
                };
                let before = bench.node.jobs[0].policy;
                if ask_for(&mut bench, mode, Seq(start).plus(min_ack as u32).0) {
                    modes.truncate(modes.len() - usize::from(before.is_armed()));
                    if bench.node.jobs[0].policy.is_armed() {
                        modes.push(mode);
                    }
                }
            }
        }
        for slot in &bench.node.slots {
            let position = u64::from(slot.seq.since(Seq(start)));
            if slot.generation != job.generation {
                continue;
            }
            let epoch = *epochs.entry(position).or_insert(slot.epoch);
            assert_eq!(epoch, slot.epoch, "chunk {position} has two policies");
            let mode = modes[usize::from(slot.epoch) - 5];
            assert_eq!((slot.quorum(), slot.told().staleness()), (mode.quorum, mode.staleness));
        }
        // One chunk parts the epochs: none goes back.
        assert!(epochs.values().is_sorted(), "{epochs:?}");
        assert!(epochs.len() < 2 || modes.len() <= 120);
    }
    modes.len() - 1
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn f23_every_chunk_has_one_policy_by_its_number(
        world in 1..=4u8, slots in prop_oneof![Just(1u32), Just(2), Just(4)],
        start in prop_oneof![Just(0u32), Just(u32::MAX - 5)], steps in prop::collection::vec(step(), 1..400),
    ) {
        play(world, slots, start, &steps);
    }
}

/// The steps above do change the mode.
#[test]
fn the_steps_change_the_mode() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut changes = 0;
    for _ in 0..50 {
        let steps = prop::collection::vec(step(), 400).new_tree(&mut runner).unwrap().current();
        changes += play(3, 2, 0, &steps);
    }
    assert!(changes > 100, "{changes}");
}
