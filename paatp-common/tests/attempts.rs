//! Regressions for part 2 of the protocol's rules: attempts, ranks that disagree, answers that carry a result beside a
//! refusal, and the last chunk.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

mod bench;
mod support;

use bench::{Bench, LANES, bitmap, has_result, redo};
use paatp_common::counter::Event;
use paatp_common::wire::{Chunk, ElementType, Operation, Request, Status};
use paatp_common::{Refusal, Seq};
use support::requests::{lanes_of, sum_of};

#[test]
fn part_2_2_a_new_chunk_begins_at_attempt_0() {
    let mut bench = Bench::ranks(1, 1);
    bench.contribute(0, 0);
    assert_eq!(bench.redo(0, 0, 1).answer.attempt, 1);
    let next = bench.send(Request { ack: Seq(1), ..bench.data(0, 1) });
    assert_eq!((next.answer.status, next.answer.attempt, has_result(&next)), (Status::Ok, 0, true));
}

#[test]
fn part_2_2_only_the_next_attempt_is_begun() {
    let mut bench = Bench::ranks(2, 1);
    bench.contribute(0, 0);
    bench.contribute(1, 0);
    for attempt in [2, 3, 5, 255] {
        let reply = bench.redo(0, 0, attempt);
        assert_eq!((reply.answer.status, reply.answer.attempt), (Status::OldAttempt, 0), "{attempt}");
        assert_eq!(bench.node.slots[0].bits, 0b11);
    }
    assert_eq!(bench.refused(Refusal::FarAttempt), 4);
    assert_eq!(bitmap(&bench.redo(0, 0, 1)), 0b01);
}

#[test]
fn part_2_2_an_older_attempt_is_answered_with_the_current_one_and_not_added() {
    let mut bench = Bench::ranks(2, 1);
    bench.contribute(0, 0);
    bench.contribute(1, 0);
    bench.redo(0, 0, 1);
    let old = bench.contribute(1, 0);
    assert_eq!((old.answer.status, old.answer.attempt, bitmap(&old)), (Status::OldAttempt, 1, 0b01));
    assert_eq!(bench.refused(Refusal::OldAttempt), 1);
    assert_eq!(bench.redo(1, 0, 1).payload, bench.sum(&[0, 1], 0));
}

#[test]
fn part_2_2_after_four_redos_the_job_is_given_up() {
    let mut bench = Bench::ranks(1, 1);
    for attempt in 0..=4 {
        assert_eq!(bench.redo(0, 0, attempt).answer.status, Status::Ok, "{attempt}");
    }
    let reply = bench.redo(0, 0, 5);
    assert_eq!(reply.answer.status, Status::Aborted);
    assert_eq!(bench.refused(Refusal::TooManyAttempts), 1);
}

#[test]
fn part_2_2_a_refusal_tells_nothing_of_another_chunk_in_the_slot() {
    let mut bench = Bench::ranks(2, 1);
    for rank in 0..2 {
        bench.contribute(rank, 0);
    }
    // Rank 0 begins a redo that nobody needs in the end: both have the result.
    bench.redo(0, 0, 1);
    for rank in 0..2 {
        bench.pull(rank, 1, 1);
    }
    let refused = bench.send(Request { ack: Seq(1), attempt: 2, ..bench.data(1, 1) });
    assert_eq!((refused.answer.status, refused.answer.attempt), (Status::OldAttempt, 0));
    assert_eq!(redo(&refused), None, "chunk 1 is not being redone");
    // Nor does a new generation hear of the old one's.
    bench.redo(0, 1, 0);
    bench.redo(0, 1, 1);
    bench.job.generation += 1;
    bench.node.jobs[0].generation += 1;
    bench.shrink(1);
    let refused = bench.redo(0, 0, 2);
    assert_eq!((refused.answer.attempt, redo(&refused)), (0, None));
    assert_eq!(bench.node.counters.noted(Event::Completions), 1, "none of the old generation's");
}

#[test]
fn part_2_5_ranks_that_disagree_on_a_chunk_are_told() {
    let sum = sum_of(LANES);
    let others = [
        Chunk::new(Operation::Mean, ElementType::F32, LANES, sum.exponent),
        Chunk::new(Operation::Sum, ElementType::Bf16, LANES, sum.exponent),
        Chunk::new(Operation::Sum, ElementType::F32, LANES, sum.exponent + 1),
        Chunk::new(Operation::Sum, ElementType::F32, LANES / 2, sum.exponent),
        Chunk { root: 1, ..sum },
    ];
    for other in others {
        let mut bench = Bench::ranks(3, 1);
        bench.contribute(0, 0);
        bench.contribute(1, 0);
        let before = (bench.node.slots[0], bench.node.lanes_of_slot(0));
        let payload = lanes_of(3, 2, Seq(0), other.lanes);
        let reply = bench.node.ask(&bench.job, &bench.job.data(2, Seq(0), other), &payload).unwrap();
        assert_eq!(reply.answer.status, Status::Aborted, "{other:?}");
        assert_eq!(u32::from(reply.answer.attempt), Refusal::Mismatch.counter());
        assert_eq!(bitmap(&reply), 0b011, "those that it disagrees with");
        assert_eq!((bench.node.slots[0], bench.node.lanes_of_slot(0)), before);
        assert_eq!(bench.refused(Refusal::Mismatch), 1);
    }
}

#[test]
fn part_2_10_a_refused_contribution_still_gets_the_result_that_it_asks_for() {
    let mut bench = Bench::ranks(2, 1);
    for rank in 0..2 {
        bench.contribute(rank, 0);
    }
    let busy = bench.send(Request { want: Seq(0), ..bench.data(0, 1) });
    assert_eq!((busy.answer.status, &busy.payload), (Status::Busy, &bench.sum(&[0, 1], 0)));
    bench.pull(0, 1, 1);
    bench.pull(1, 1, 1);
    let stale = bench.send(Request { want: Seq(0), ack: Seq(1), ..bench.data(1, 0) });
    assert_eq!((stale.answer.status, &stale.payload), (Status::Stale, &bench.sum(&[0, 1], 0)));
    let damaged = bench.corrupted(Request { want: Seq(0), ack: Seq(1), ..bench.data(1, 0) });
    assert_eq!((damaged.answer.status, &damaged.payload), (Status::BadTag, &bench.sum(&[0, 1], 0)));
}

#[test]
fn part_2_17_a_last_chunk_may_be_short_and_its_result_is_as_short() {
    let mut bench = Bench::ranks(2, 1);
    let short = sum_of(32);
    let payloads = [0, 1].map(|rank| lanes_of(2, rank, Seq(0), 32));
    let untouched = bench.node.lanes_of_slot(0)[32..].to_vec();
    for (rank, payload) in payloads.iter().enumerate() {
        bench.node.ask(&bench.job, &bench.job.data(rank as u8, Seq(0), short), payload).unwrap();
    }
    let sum: Vec<u32> = payloads[0].iter().zip(&payloads[1]).map(|(a, b)| a + b).collect();
    assert_eq!(bench.node.lanes_of_slot(0)[32..], untouched);
    let pull = bench.job.pull(0, Seq(0), short);
    let reply = bench.node.ask(&bench.job, &pull, &[0; 32]).unwrap();
    assert_eq!(reply.payload, sum);
    // A frame is never grown nor cut to fit: whoever asks with another length gets no result.
    assert!(!has_result(&bench.pull(1, 0, 0)));
}
