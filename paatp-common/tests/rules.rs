//! A named regression for each rule of the protocol that the aggregator keeps (flaws that model checking found in its
//! natural readings). Each fails if its rule is broken.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

mod bench;
mod support;

use bench::{Bench, LANES, agreed, bitmap, has_result, min_ack, redo};
use paatp_common::counter::Event;
use paatp_common::policy::Policy;
use paatp_common::slot::{Begin, Contribution, Decision, Lanes, Rules, Slot, decide};
use paatp_common::wire::{Body, Chunk, ElementType, Operation, Request, Status, flags};
use paatp_common::{Refusal, Seq};
use support::requests::{sum_of, tag_of};

#[test]
fn f1_answers_without_a_result_name_the_lowest_open_redo() {
    let mut bench = Bench::ranks(2, 4);
    for seq in 0..2 {
        for rank in 0..2 {
            bench.contribute(rank, seq);
        }
    }
    assert_eq!(redo(&bench.pull(0, 2, 2)), None);
    bench.redo(1, 1, 1);
    assert_eq!(redo(&bench.pull(0, 2, 2)), Some((1, 1)));
    bench.redo(1, 0, 1);
    assert_eq!(redo(&bench.pull(0, 2, 2)), Some((0, 1)));
    let other = bench.contribute(0, 2);
    assert_eq!(redo(&other), Some((0, 1)), "answers to contributions name it as well");
    assert!(has_result(&bench.redo(0, 0, 1)));
    assert_eq!(redo(&bench.pull(0, 2, 2)), None, "done: nobody needs it any more");
    // Each touch of a redo that is still open announces it again.
    bench.pull(1, 1, 1);
    assert_eq!(redo(&bench.pull(0, 2, 2)), Some((1, 1)));
}

#[test]
fn f1_a_rank_contributes_to_the_redo_of_what_it_has_acknowledged() {
    let mut bench = Bench::ranks(2, 4);
    bench.contribute(0, 0);
    bench.contribute(1, 0);
    bench.pull(0, 1, 1);
    bench.redo(1, 0, 1);
    let again = bench.send(Request { ack: Seq(1), attempt: 1, ..bench.data(0, 0) });
    assert_eq!((again.answer.status, again.answer.attempt), (Status::Ok, 1));
    assert_eq!(again.payload, bench.sum(&[0, 1], 0));
}

#[test]
fn f2_answers_without_a_result_carry_min_ack_and_not_the_lowest_contribution() {
    let mut bench = Bench::ranks(2, 4);
    for rank in 0..2 {
        bench.contribute(rank, 0);
    }
    let request = |bench: &Bench, rank, ack| Request {
        ack: Seq(ack),
        progress: Seq(1),
        ..bench.job.pull(rank, Seq(1), sum_of(LANES))
    };
    let ask = |bench: &mut Bench, rank, ack| {
        let request = request(bench, rank, ack);
        bench.node.ask(&bench.job, &request, &[0; LANES as usize]).unwrap()
    };
    ask(&mut bench, 0, 1);
    let reply = ask(&mut bench, 1, 0);
    assert_eq!((min_ack(&reply), reply.answer.p_min), (0, Seq(1)), "both contributed, one has the result");
    assert_eq!(min_ack(&ask(&mut bench, 1, 1)), 1);
    let busy = bench.send(Request { ack: Seq(1), ..bench.data(0, 5) });
    assert_eq!((busy.answer.status, min_ack(&busy)), (Status::Busy, 1));
}

#[test]
fn f3_a_redo_admits_only_the_ranks_of_the_first_completion() {
    let mut bench = Bench::quorum(3, 4, 2);
    bench.contribute(0, 0);
    assert!(has_result(&bench.contribute(1, 0)));
    bench.redo(1, 0, 1);
    let late = bench.redo(2, 0, 1);
    assert_eq!(late.answer.status, Status::NotIncluded);
    assert!(!has_result(&late), "{{1, 2}} would be another result than {{0, 1}}");
    let whole = bench.redo(0, 0, 1);
    assert_eq!((bitmap(&whole), whole.payload), (0b011, bench.sum(&[0, 1], 0)));
    // Nor may a rank from outside begin a redo.
    assert_eq!(bench.redo(2, 0, 2).answer.status, Status::NotIncluded);
    assert_eq!(bench.node.slots[0].attempt, 1);
}

#[test]
fn f3_a_redo_under_quorum_needs_all_of_the_first_completion() {
    let mut bench = Bench::quorum(4, 4, 2);
    let last = [0, 1].map(|rank| bench.contribute(rank, 0));
    assert!(has_result(&last[1]));
    assert!(!has_result(&bench.redo(0, 0, 1)));
    assert!(has_result(&bench.redo(1, 0, 1)));
}

#[test]
fn f3_a_redo_of_a_slot_that_never_completed_leaves_it_free() {
    let mut bench = Bench::quorum(3, 4, 2);
    bench.contribute(0, 0);
    bench.redo(1, 0, 1);
    let reply = bench.redo(2, 0, 1);
    assert_eq!((bitmap(&reply), reply.payload), (0b110, bench.sum(&[1, 2], 0)));
}

#[test]
fn f4_a_redo_that_needs_a_dead_rank_is_aborted() {
    let mut bench = Bench::ranks(3, 4);
    for rank in 0..3 {
        bench.contribute(rank, 0);
    }
    bench.shrink(2);
    // Without a result in the answer, which would use the field that tells the reason.
    let reply = bench.send(Request { want: Seq(1), attempt: 1, ..bench.data(0, 0) });
    assert_eq!(reply.answer.status, Status::Aborted);
    assert_eq!(u32::from(reply.answer.attempt), Refusal::DeadRankInRedo.counter());
    assert_eq!((bench.refused(Refusal::DeadRankInRedo), bitmap(&reply)), (1, 0b100));
    assert_eq!(bench.pull(1, 0, 0).payload, bench.sum(&[0, 1, 2], 0), "the result stays");
}

#[test]
fn f4_a_redo_that_a_rank_died_in_is_aborted() {
    let mut bench = Bench::ranks(3, 4);
    for rank in 0..3 {
        bench.contribute(rank, 0);
    }
    bench.redo(0, 0, 1);
    let waits = bench.pull(0, 0, 0);
    assert_eq!((waits.answer.status, waits.answer.attempt), (Status::NotYet, 1));
    bench.shrink(2);
    // Who has contributed again asks, or sends it once more; who has not contributes.
    let pull = bench.pull(0, 0, 0);
    let [again, first] =
        [0, 1].map(|rank| bench.send(Request { want: Seq(1), attempt: 1, ..bench.data(rank, 0) }));
    for reply in [pull, again, first] {
        assert_eq!((reply.answer.status, bitmap(&reply)), (Status::Aborted, 0b100));
        assert_eq!(u32::from(reply.answer.attempt), Refusal::DeadRankInRedo.counter());
    }
    assert_eq!(bench.refused(Refusal::DeadRankInRedo), 2);
    assert_eq!(bench.node.slots[0].bits, 0b001, "nobody was added");
    assert_eq!(bench.contribute(1, 1).answer.status, Status::Ok, "other chunks go on");
}

#[test]
fn f4_a_redo_that_a_rank_died_after_is_completed() {
    let mut bench = Bench::ranks(3, 4);
    for rank in 0..3 {
        bench.contribute(rank, 0);
    }
    bench.redo(2, 0, 1);
    bench.shrink(2);
    assert!(!has_result(&bench.redo(0, 0, 1)));
    let whole = bench.redo(1, 0, 1);
    assert_eq!((bitmap(&whole), whole.payload), (0b111, bench.sum(&[0, 1, 2], 0)));
}

#[test]
fn f6_exponents_freeze_with_the_result() {
    let mut bench = Bench::quorum(3, 4, 2);
    let proposing = |bench: &Bench, rank, next_exponent| Request { next_exponent, ..bench.data(rank, 0) };
    bench.send(proposing(&bench, 0, -4));
    bench.send(proposing(&bench, 0, 9)); // a duplicate changes nothing before either
    assert_eq!(agreed(&bench.send(proposing(&bench, 2, 3))), 3);
    let late = bench.send(proposing(&bench, 1, 7));
    assert_eq!((late.answer.status, agreed(&late)), (Status::NotIncluded, 3));
    assert_eq!(agreed(&bench.send(proposing(&bench, 0, 8))), 3);
    assert_eq!(agreed(&bench.pull(0, 0, 0)), 3);
}

#[test]
fn f8_shrink_keeps_slots_and_generation_and_lets_go_of_the_dead() {
    let mut bench = Bench::ranks(3, 2);
    for rank in 0..3 {
        bench.contribute(rank, 0);
    }
    bench.pull(0, 1, 1);
    bench.shrink(2);
    let reply = bench.pull(1, 0, 0);
    assert_eq!((bitmap(&reply), reply.payload), (0b111, bench.sum(&[0, 1, 2], 0)));
    let dead = bench.contribute(2, 1);
    assert_eq!(dead.answer.status, Status::Rejoin);
    assert_eq!(bench.node.slots[1].bits, 0);
    assert_eq!(min_ack(&bench.pull(1, 1, 1)), 1, "the lowest of those who are left");
    assert_eq!(bench.send(Request { ack: Seq(1), ..bench.data(0, 2) }).answer.status, Status::Ok);
}

#[test]
fn f9_a_dead_rank_does_not_stand_in_for_a_live_one() {
    let mut bench = Bench::ranks(3, 2);
    bench.contribute(0, 0);
    bench.contribute(2, 0);
    bench.shrink(2);
    assert!(!has_result(&bench.pull(0, 0, 0)), "two of two, but rank 1 is missing");
    let reply = bench.contribute(1, 0);
    assert_eq!((bitmap(&reply), reply.payload), (0b111, bench.sum(&[0, 1, 2], 0)));
}

#[test]
fn f9_a_quorum_larger_than_what_is_left_is_all_that_is_left() {
    let mut bench = Bench::quorum(4, 2, 3);
    bench.shrink(3);
    bench.shrink(2);
    bench.contribute(0, 0);
    assert!(has_result(&bench.contribute(1, 0)));
}

#[test]
fn f10_a_pull_completes_what_shrinking_has_made_whole() {
    let mut bench = Bench::ranks(3, 2);
    bench.contribute(0, 0);
    bench.contribute(1, 0);
    bench.shrink(2);
    assert_eq!(bench.pull(1, 0, 0).payload, bench.sum(&[0, 1], 0));
    assert_eq!(bench.node.counters.noted(Event::Completions), 1);
}

#[test]
fn f10_a_duplicate_completes_what_shrinking_has_made_whole() {
    let mut bench = Bench::ranks(3, 2);
    bench.contribute(0, 0);
    bench.contribute(1, 0);
    bench.shrink(2);
    // It wishes for another chunk: the touch of its own completes it.
    bench.send(Request { want: Seq(1), ..bench.data(1, 0) });
    assert!(bench.node.slots[0].is_complete());
    assert_eq!(bench.contribute(0, 0).payload, bench.sum(&[0, 1], 0));
}

/// Position 0 was taken when the first rank came, and is free when the second does.
#[test]
fn f18_a_chunk_is_found_behind_a_place_that_became_free() {
    let mut bench = Bench::sharing(2, 8, 8);
    let places = bench.places(3);
    bench.occupy(places[0]);
    bench.contribute(0, 3);
    assert_eq!(bench.holding(3), [places[1]]);
    bench.node.jobs[1].generation = 0; // the other job is deleted
    let reply = bench.contribute(1, 3);
    assert_eq!((bench.holding(3), reply.payload), (vec![places[1]], bench.sum(&[0, 1], 3)));
}

#[test]
fn f18_lowering_k_hides_no_slot() {
    let mut bench = Bench::sharing(2, 8, 8);
    let places = bench.places(3);
    (0..5).for_each(|place| bench.occupy(places[place]));
    bench.contribute(0, 3);
    assert_eq!(bench.holding(3), [places[5]]);
    bench.node.jobs[0].k = 1;
    assert_eq!(bench.pull(1, 3, 0).answer.status, Status::NotYet);
    let reply = bench.contribute(1, 3);
    assert_eq!((bench.holding(3), reply.payload), (vec![places[5]], bench.sum(&[0, 1], 3)));
    assert_eq!(bench.pull(0, 3, 0).payload, bench.sum(&[0, 1], 3));
}

#[test]
fn f18_only_the_first_k_places_are_claimed() {
    for k in 1..=8 {
        let mut bench = Bench::sharing(1, 16, k);
        let places = bench.places(3);
        places[..usize::from(k)].iter().for_each(|place| bench.occupy(*place));
        let busy = bench.send(Request { want: Seq(9), ..bench.data(0, 3) });
        assert_eq!((busy.answer.status, bench.refused(Refusal::Crowded)), (Status::Busy, 1), "{k}");
        assert_eq!((bench.holding(3), bench.node.progress[0].crowded(bench.job.generation)), (vec![], 1));
        bench.node.slots[places[usize::from(k) - 1] as usize].generation = 0;
        bench.contribute(0, 3);
        assert_eq!(bench.holding(3), [places[usize::from(k) - 1]]);
    }
}

/// An old duplicate must not open a slot for what everybody has.
#[test]
fn f18_a_chunk_that_everybody_has_gets_no_slot() {
    let mut bench = Bench::sharing(2, 8, 8);
    for rank in 0..2 {
        bench.contribute(rank, 0);
    }
    (0..2).for_each(|rank| drop(bench.pull(rank, 1, 1)));
    let slot = bench.holding(0)[0];
    bench.node.slots[slot as usize].generation = 0;
    assert_eq!(bench.contribute(0, 0).answer.status, Status::Stale);
    assert_eq!(bench.holding(0), []);
}

/// A result stays until every rank has it; then its slot is anybody's.
#[test]
fn f18_a_slot_is_free_when_every_rank_has_its_result() {
    let mut bench = Bench::sharing(2, 1, 1);
    bench.contribute(0, 0);
    bench.contribute(1, 0);
    assert_eq!(bench.holding(0), [1]);
    let next = |bench: &Bench, rank, ack| Request { ack: Seq(ack), want: Seq(5), ..bench.data(rank, 2) };
    let status = |bench: &mut Bench, request| bench.send(request).answer.status;
    let request = next(&bench, 0, 1);
    assert_eq!(status(&mut bench, request), Status::Busy, "rank 1 may not have it yet");
    assert_eq!(bench.pull(1, 0, 0).payload, bench.sum(&[0, 1], 0));
    let request = next(&bench, 1, 1);
    assert_eq!(status(&mut bench, request), Status::Ok);
    assert_eq!((bench.holding(0), bench.holding(2)), (vec![], vec![1]));
}

/// Chunk 0 was lost and chunk 1 has the pool's last slot: the slot of its own takes chunk 0, and no other.
#[test]
fn f19_the_chunk_that_everybody_waits_for_has_a_slot() {
    let mut bench = Bench::sharing(2, 1, 8);
    bench.contribute(1, 1);
    assert_eq!(bench.holding(1), [1]);
    let busy = bench.send(Request { want: Seq(9), ..bench.data(1, 2) });
    assert_eq!(busy.answer.status, Status::Busy);
    bench.contribute(0, 0);
    assert_eq!(bench.holding(0), [0], "its own");
    let reply = bench.contribute(1, 0);
    assert_eq!(reply.payload, bench.sum(&[0, 1], 0));
    assert_eq!(bench.pull(0, 0, 0).payload, bench.sum(&[0, 1], 0), "look-ups find it there");
    // Once everybody has chunk 0 its slot is free again, for the next that everybody waits for.
    let data = |bench: &Bench, rank, seq, ack| Request { ack: Seq(ack), ..bench.data(rank, seq) };
    let requests = [data(&bench, 1, 1, 1), data(&bench, 0, 1, 1)];
    let replies = requests.map(|request| bench.send(request));
    assert_eq!(replies[1].payload, bench.sum(&[0, 1], 1));
    bench.occupy(1);
    let lowest = [data(&bench, 0, 2, 2), data(&bench, 1, 2, 2), data(&bench, 0, 2, 2)];
    let replies = lowest.map(|request| bench.send(request));
    assert_eq!((replies[2].payload.clone(), bench.holding(2)), (bench.sum(&[0, 1], 2), vec![0]));
}

#[test]
fn f19_a_pool_that_others_fill_for_ever_stops_nobody() {
    let mut bench = Bench::sharing(2, 4, 8);
    (1..5).for_each(|slot| bench.occupy(slot));
    for seq in 0..20 {
        let data = |bench: &Bench, rank| Request { ack: Seq(seq), ..bench.data(rank, seq) };
        for _ in 0..2 {
            // Twice: the first round tells the acknowledgements.
            let requests = [data(&bench, 0), data(&bench, 1)];
            requests.into_iter().for_each(|request| drop(bench.send(request)));
        }
        assert_eq!((bench.pull(0, seq, seq).payload, bench.holding(seq)), (bench.sum(&[0, 1], seq), vec![0]));
    }
    assert!(bench.refused(Refusal::Crowded) > 0);
}

/// F11: a new generation, and a job that is gone, let go of all slots at once.
#[test]
fn f11_slots_of_a_generation_that_is_over_are_free() {
    let mut bench = Bench::sharing(2, 4, 8);
    [1, 2, 3, 4, 0].into_iter().for_each(|seq| drop(bench.contribute(0, seq)));
    assert!((0..5).all(|seq| bench.holding(seq).len() == 1), "all slots are taken");
    bench.job.generation += 1;
    bench.node.install(&bench.job);
    for seq in 0..4 {
        bench.contribute(0, seq);
        assert_eq!(bench.contribute(1, seq).payload, bench.sum(&[0, 1], seq));
        assert!(bench.holding(seq).len() == 1 && bench.holding(seq) != [0], "in the pool");
    }
}

/// Redos, F3 and all, in a slot of the pool.
#[test]
fn f3_a_redo_stays_in_the_slot_of_the_pool() {
    let mut bench = Bench::sharing(2, 8, 8);
    (0..2).for_each(|rank| drop(bench.contribute(rank, 4)));
    let slot = bench.holding(4);
    assert!(!has_result(&bench.redo(1, 4, 1)));
    assert_eq!(bench.redo(0, 4, 1).payload, bench.sum(&[0, 1], 4));
    assert_eq!((bench.holding(4), bench.node.slots[slot[0] as usize].attempt), (slot, 1));
}

/// What rank 1 says of chunk 5 in generation 7.
fn contribution() -> Contribution {
    Contribution {
        generation: 7,
        seq: Seq(5),
        bits: 0b10,
        attempt: 0,
        chunk: sum_of(LANES),
        next_exponent: 0,
        has_payload: true,
        rank: 1,
        non_finite: false,
    }
}

const RULES: Rules = Rules { generation: 7, expected: 0b11 };

#[test]
fn f11_a_packet_of_an_older_generation_is_refused_under_the_lock() {
    let now = Rules { generation: 8, ..RULES };
    let refused = Decision::Refuse(Refusal::OldGeneration);
    assert_eq!(decide(&Slot::default(), now, &contribution()), refused);
    assert_eq!(decide(&Slot::default(), Rules::NONE, &contribution()), refused);
}

#[test]
fn f11_a_slot_of_another_generation_is_empty() {
    let mut bench = Bench::ranks(2, 2);
    bench.contribute(0, 0);
    bench.job.generation += 1;
    bench.node.jobs[0].generation += 1;
    let reply = bench.contribute(1, 0);
    assert_eq!((reply.answer.status, bitmap(&reply)), (Status::Ok, 0b10), "rank 0 is not in");
    assert_eq!(bench.contribute(0, 0).payload, bench.sum(&[0, 1], 0), "stored, not added");
    assert!(!has_result(&bench.pull(0, 1, 0)));
}

#[test]
fn f11_acknowledgements_of_another_generation_do_not_count() {
    let mut bench = Bench::ranks(2, 2);
    for rank in 0..2 {
        bench.contribute(rank, 0);
        bench.pull(rank, 1, 1);
    }
    assert_eq!(bench.contribute(0, 2).answer.status, Status::Ok);
    bench.job.generation += 1;
    bench.node.jobs[0].generation += 1;
    let reply = bench.contribute(0, 2);
    assert_eq!((reply.answer.status, min_ack(&reply)), (Status::Busy, 0));
}

#[test]
fn f12_a_refused_first_store_leaves_no_lanes() {
    let mut bench = Bench::ranks(2, 1);
    for rank in 0..2 {
        bench.contribute(rank, 0);
        bench.pull(rank, 1, 1);
    }
    let reply = bench.corrupted(bench.data(0, 1));
    assert_eq!((reply.answer.status, bitmap(&reply)), (Status::BadTag, 0));
    // The slot belongs to chunk 1 now, without anybody: the next one stores, not adds.
    bench.contribute(1, 1);
    assert_eq!(bench.contribute(0, 1).payload, bench.sum(&[0, 1], 1));
}

#[test]
fn f12_a_refused_first_store_of_a_redo_leaves_no_lanes() {
    let mut bench = Bench::ranks(2, 1);
    for rank in 0..2 {
        bench.contribute(rank, 0);
    }
    let reply = bench.corrupted(Request { attempt: 1, ..bench.data(0, 0) });
    assert_eq!((reply.answer.status, bitmap(&reply)), (Status::BadTag, 0));
    bench.redo(1, 0, 1);
    assert_eq!(bench.redo(0, 0, 1).payload, bench.sum(&[0, 1], 0));
}

#[test]
fn f12_a_refused_addition_is_undone() {
    let mut bench = Bench::ranks(3, 1);
    bench.contribute(0, 0);
    let before = (bench.node.slots[0], bench.node.lanes_of_slot(0));
    assert_eq!(bench.corrupted(bench.data(1, 0)).answer.status, Status::BadTag);
    assert_eq!((bench.node.slots[0], bench.node.lanes_of_slot(0)), before);
    bench.contribute(1, 0);
    assert_eq!(bench.contribute(2, 0).payload, bench.sum(&[0, 1, 2], 0));
}

#[test]
fn f13_the_window_is_measured_from_min_ack_and_not_from_the_slot() {
    let mut bench = Bench::ranks(2, 2);
    for seq in 0..3 {
        for rank in 0..2 {
            bench.send(Request { ack: Seq(seq), ..bench.data(rank, seq) });
            bench.pull(rank, seq + 1, seq + 1);
        }
    }
    // min_ack is 3 everywhere; slot 1 holds chunk 1. By serial arithmetic these are "newer" than what is there.
    for seq in [5, 6, 3 + (1 << 30), 2 + (1 << 31)] {
        let reply = bench.send(Request { ack: Seq(3), ..bench.data(0, seq) });
        assert_eq!((reply.answer.status, min_ack(&reply)), (Status::Busy, 3), "{seq}");
    }
    for seq in [0, 1, 2, 3u32.wrapping_sub(1 << 30), 4 + (1 << 31)] {
        let reply = bench.send(Request { ack: Seq(3), ..bench.data(0, seq) });
        assert_eq!(reply.answer.status, Status::Stale, "{seq}");
    }
    assert_eq!(bench.node.slots[0].seq, Seq(2));
    assert_eq!(bench.node.slots[1].seq, Seq(1), "nobody has poisoned the slot");
    for seq in [3, 4] {
        assert_eq!(bench.send(Request { ack: Seq(3), ..bench.data(0, seq) }).answer.status, Status::Ok);
    }
    assert_eq!((bench.refused(Refusal::Ahead), bench.refused(Refusal::Behind)), (4, 5));
}

#[test]
fn f13_the_window_survives_the_wrap() {
    let mut bench = Bench::ranks(2, 4);
    let start = u32::MAX - 1;
    bench.node.start_at(&bench.job, Seq(start));
    let at = |bench: &mut Bench, rank, steps: u32| {
        let seq = start.wrapping_add(steps);
        bench.send(Request { ack: Seq(start), progress: Seq(start), ..bench.data(rank, seq) })
    };
    for steps in 0..4 {
        assert_eq!(at(&mut bench, 0, steps).answer.status, Status::Ok, "{steps}");
    }
    assert_eq!(at(&mut bench, 0, 4).answer.status, Status::Busy);
    assert_eq!(at(&mut bench, 0, u32::MAX).answer.status, Status::Stale);
    for steps in 0..4 {
        let seq = start.wrapping_add(steps);
        assert_eq!(at(&mut bench, 1, steps).payload, bench.sum(&[0, 1], seq));
        bench.pull(0, seq.wrapping_add(1), seq.wrapping_add(1));
        let next = bench.pull(1, seq.wrapping_add(1), seq.wrapping_add(1));
        if steps == 3 {
            assert_eq!(min_ack(&next), 2);
        }
    }
}

#[test]
fn f13_an_acknowledgement_further_ahead_than_the_ring_is_none() {
    let mut bench = Bench::ranks(1, 2);
    assert_eq!(min_ack(&bench.pull(0, 9, 3)), 0);
    assert_eq!(min_ack(&bench.pull(0, 9, 2)), 2);
    assert_eq!(min_ack(&bench.pull(0, 9, 1)), 2, "nor does one lead back");
}

#[test]
fn f14_the_acknowledgement_of_a_refused_contribution_counts() {
    let mut bench = Bench::ranks(2, 1);
    for rank in 0..2 {
        bench.contribute(rank, 0);
    }
    let with_ack = |bench: &Bench, rank| Request { ack: Seq(1), progress: Seq(1), ..bench.data(rank, 1) };
    // Refused only because the other rank has not acknowledged; its own acknowledgement must not be lost.
    assert_eq!(bench.send(with_ack(&bench, 0)).answer.status, Status::Busy);
    assert_eq!(bench.send(with_ack(&bench, 1)).answer.status, Status::Ok);
    assert_eq!(bench.node.progress[0].contributed.floor(bench.job.generation), Seq(1));
}

#[test]
fn f14_the_acknowledgement_of_a_damaged_payload_counts() {
    let mut bench = Bench::ranks(2, 1);
    for rank in 0..2 {
        bench.contribute(rank, 0);
    }
    let with_ack = |bench: &Bench, rank| Request { ack: Seq(1), ..bench.data(rank, 1) };
    bench.corrupted(with_ack(&bench, 0));
    assert_eq!(bench.send(with_ack(&bench, 1)).answer.status, Status::Ok);
}

/// A broadcast from rank `root`.
fn broadcast(bench: &Bench, rank: u8, root: u8) -> Request {
    let chunk = Chunk { root, ..Chunk::new(Operation::Broadcast, ElementType::F32, LANES, 0) };
    bench.job.data(rank, Seq(1), chunk)
}

#[test]
fn f20_the_first_payload_is_stored_whichever_contribution_it_is() {
    let mut bench = Bench::ranks(3, 1);
    for rank in 0..3 {
        bench.contribute(rank, 0);
    }
    for rank in 0..3 {
        bench.pull(rank, 1, 1);
    }
    let payload = bench.payload(2, 1);
    for rank in 0..2 {
        let request = broadcast(&bench, rank, 2);
        assert_eq!(bench.node.ask(&bench.job, &request, &[]).unwrap().answer.status, Status::Ok);
    }
    let request = broadcast(&bench, 2, 2);
    let reply = bench.node.ask(&bench.job, &request, &payload).unwrap();
    assert_eq!((bitmap(&reply), reply.payload), (0b111, payload));
}

#[test]
fn f20_a_payload_of_a_rank_that_is_not_the_root_is_refused() {
    let mut bench = Bench::ranks(2, 2);
    let payload = bench.payload(0, 1);
    let request = broadcast(&bench, 0, 1);
    let reply = bench.node.ask(&bench.job, &request, &payload).unwrap();
    assert_eq!(reply.answer.status, Status::Aborted);
    assert_eq!((bench.refused(Refusal::NotRoot), bench.node.slots[1].bits), (1, 0));
}

#[test]
fn f20_a_barrier_hands_out_no_old_lanes() {
    let mut bench = Bench::ranks(2, 1);
    for rank in 0..2 {
        bench.contribute(rank, 0);
        bench.pull(rank, 1, 1);
    }
    let barrier = Chunk::new(Operation::Barrier, ElementType::F32, 0, 0);
    bench.node.ask(&bench.job, &bench.job.data(0, Seq(1), barrier), &[]).unwrap();
    let reply = bench.node.ask(&bench.job, &bench.job.data(1, Seq(1), barrier), &[]).unwrap();
    assert!(has_result(&reply) && reply.payload.is_empty());
}

/// Bits of all ranks whatever the quorum.
#[test]
fn barriers_and_exponents_need_every_rank() {
    for operation in [Operation::Barrier, Operation::Exponents] {
        let mut bench = Bench::quorum(3, 1, 1);
        let chunk = Chunk::new(operation, ElementType::F32, 0, 0);
        let last = [0, 1, 2].map(|rank| {
            has_result(&bench.node.ask(&bench.job, &bench.job.data(rank, Seq(0), chunk), &[]).unwrap())
        });
        assert_eq!(last, [false, false, true], "{operation:?}");
    }
}

/// A maximum of rank `rank`.
fn maximum(bench: &Bench, rank: u8) -> Request {
    bench.job.data(rank, Seq(0), Chunk::new(Operation::Max, ElementType::F32, LANES, 0))
}

fn salts(bench: &Bench, ranks: &[u8], chunk: Chunk, seq: Seq) -> u64 {
    ranks
        .iter()
        .fold(0, |sum: u64, rank| sum.wrapping_add(paatp_common::tag::salt(bench.job.key(*rank), seq, chunk)))
}

#[test]
fn f21_the_tag_of_a_maximum_is_that_of_its_lanes() {
    let mut bench = Bench::ranks(3, 1);
    let mut expected = vec![0; LANES as usize];
    let mut last = None;
    for rank in 0..3 {
        let payload = bench.payload(rank, 0);
        expected.iter_mut().zip(&payload).for_each(|(max, lane)| *max = (*lane).max(*max));
        let request = maximum(&bench, rank);
        last = Some(bench.node.ask(&bench.job, &request, &payload).unwrap());
    }
    let last = last.unwrap();
    assert_eq!(last.payload, expected);
    let Body::Result { tag, .. } = last.answer.body else { panic!("{last:?}") };
    let salts = salts(&bench, &[0, 1, 2], maximum(&bench, 0).chunk, Seq(0));
    assert_eq!(tag.wrapping_sub(salts), tag_of(&expected));
}

#[test]
fn f21_a_bit_flipped_in_memory_shows_in_the_tag_of_a_maximum() {
    let mut bench = Bench::ranks(2, 1);
    let payload = bench.payload(0, 0);
    let request = maximum(&bench, 0);
    bench.node.ask(&bench.job, &request, &payload).unwrap();
    bench.node.lanes[0][3] ^= 1 << 30;
    let request = maximum(&bench, 1);
    let reply = bench.node.ask(&bench.job, &request, &vec![0; LANES as usize]).unwrap();
    let Body::Result { tag, .. } = reply.answer.body else { panic!("{reply:?}") };
    let salts = salts(&bench, &[0, 1], request.chunk, Seq(0));
    assert_ne!(tag.wrapping_sub(salts), tag_of(&reply.payload));
}

#[test]
fn f21_a_damaged_maximum_touches_nothing() {
    let mut bench = Bench::ranks(2, 1);
    let payload = bench.payload(0, 0);
    let request = maximum(&bench, 0);
    bench.node.ask(&bench.job, &request, &payload).unwrap();
    let before = (bench.node.slots[0], bench.node.lanes_of_slot(0));
    let mut damaged = bench.job.datagram(&maximum(&bench, 1), &bench.payload(1, 0));
    *damaged.last_mut().unwrap() ^= 1;
    let reply = bench.node.ask_raw(damaged, bench.job.address(1)).unwrap();
    assert_eq!(reply.answer.status, Status::BadTag);
    assert_eq!((bench.node.slots[0], bench.node.lanes_of_slot(0)), before);
}

#[test]
fn nothing_is_added_twice() {
    let mut bench = Bench::ranks(3, 2);
    for _ in 0..3 {
        for rank in 0..2 {
            assert_eq!(bench.contribute(rank, 0).answer.status, Status::Ok);
        }
    }
    assert_eq!(bench.contribute(2, 0).payload, bench.sum(&[0, 1, 2], 0));
    let counters = &bench.node.counters;
    assert_eq!(counters.noted(Event::Contributions), 3);
    assert_eq!(counters.noted(Event::Duplicates), 4);
}

#[test]
fn a_gradient_that_is_not_finite_is_told_with_its_rank() {
    let mut bench = Bench::ranks(3, 1);
    bench.contribute(0, 0);
    bench.send(Request { flags: flags::NON_FINITE, ..bench.data(1, 0) });
    let reply = bench.contribute(2, 0);
    let Body::Result { non_finite, .. } = reply.answer.body else { panic!("{reply:?}") };
    assert_eq!(non_finite, Some(1));
    assert_eq!(bench.node.counters.noted(Event::NonFinite), 1);
    // A redo starts without the mark, and sets it again from the contributions.
    for (rank, flags) in [(0, 0), (1, flags::NON_FINITE), (2, 0)] {
        bench.send(Request { flags, attempt: 1, ..bench.data(rank, 0) });
    }
    let Body::Result { non_finite, .. } = bench.pull(0, 0, 0).answer.body else { panic!() };
    assert_eq!(non_finite, Some(1));
}

#[test]
fn a_bitmap_of_other_ranks_is_dropped() {
    let mut bench = Bench::ranks(3, 1);
    for bits in [0, 0b010, 0b011, u64::MAX] {
        let request = Request { bitmap: bits, ..bench.data(0, 0) };
        let payload = bench.payload(0, 0);
        assert_eq!(bench.node.ask(&bench.job, &request, &payload), Err(Refusal::Conflict), "{bits:b}");
    }
    assert_eq!((bench.refused(Refusal::Conflict), bench.node.slots[0].bits), (4, 0));
}

#[test]
fn a_decision_says_what_happens_to_the_lanes() {
    let mut slot = Slot::default();
    let first = contribution();
    let begun = Decision::Contribute { begin: Begin::Chunk, lanes: Lanes::Store };
    assert_eq!(decide(&slot, RULES, &first), begun);
    slot.begin(true, Policy::default(), &first);
    slot.commit(&first, 1);
    assert_eq!(decide(&slot, RULES, &first), Decision::Duplicate);
    let second = Contribution { bits: 1, rank: 0, ..first };
    let added = Decision::Contribute { begin: Begin::Continue, lanes: Lanes::Add };
    assert_eq!(decide(&slot, RULES, &second), added);
    let partial = Contribution { bits: 0b11, ..first };
    assert_eq!(decide(&slot, RULES, &partial), Decision::Refuse(Refusal::Conflict));
}
