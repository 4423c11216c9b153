//! The worker's half of protocol-rules, one test for each rule, with answers made by hand where the aggregator is too
//! well-behaved.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use common::{FAIR, Net, Random, Shape, Weather, membership, settings};
use paatp_common::limits::MAX_ATTEMPTS;
use paatp_common::wire::{Answer, Body, HEADER_BYTES, Header, Kind, Redo, Request, Status, flags};
use paatp_common::{Refusal, Seq};
use paatp_transport::rate::Algorithm;
use paatp_transport::{Event, OperationError, Reduction, Tensor, Time, Values, Worker};

const SHAPE: Shape = Shape { world: 2, lanes: 32, window: 2, slots: 4 };

#[path = "rules/switch.rs"]
mod switch;

fn ones(count: usize) -> Vec<Tensor> {
    vec![Tensor { name: "w".into(), values: Values::F32(vec![1.0; count]) }]
}

fn all_reduce(net: &mut Net, count: usize) {
    for worker in &mut net.workers {
        worker.all_reduce(Time(net.now), Reduction::Sum, ones(count));
    }
}

/// What a worker sends now, parsed.
fn sent(worker: &mut Worker, now: u64) -> Vec<Request> {
    let mut buffer = vec![0; worker.datagram_bytes()];
    let mut all = Vec::new();
    while let Some(transmit) = worker.poll_transmit(Time(now), &mut buffer) {
        let header = Header::of(&buffer[..transmit.len]).unwrap();
        assert!(header.payload_bytes() as usize == transmit.len - HEADER_BYTES);
        all.push(Request::decode(header).unwrap());
    }
    all
}

/// An answer without a result, to this request.
fn pending(request: &Request, status: Status, change: impl FnOnce(&mut Header)) -> Header {
    let mut header = request.encode();
    header.set_kind(Kind::Answer);
    header.set_flags(0);
    header.set_status(status as u8);
    header.set_raw_want(0);
    header.set_raw_ack(0);
    header.set_tag(0);
    header.set_lanes(0);
    header.set_attempt(0);
    header.set_bitmap(1);
    header.set_window(2);
    change(&mut header);
    header.seal();
    assert!(Answer::decode(&header).is_ok());
    header
}

/// The complete result of an exponent round of two ranks.
fn round_result(request: &Request, next_exponent: i8) -> Header {
    let keys = (0..2).fold(0u64, |sum, r| sum.wrapping_add(paatp_common::tag::rank_key(common::NONCE, r)));
    pending(request, Status::Ok, |header| {
        header.set_flags(flags::RESULT);
        header.set_raw_want(request.seq.0);
        header.set_bitmap(0b11);
        header.set_tag(paatp_common::tag::salt(keys, request.seq, request.chunk));
        header.set_next_exponent(next_exponent);
    })
}

fn worker() -> Worker {
    let mut worker = Worker::new(membership(SHAPE, 0), settings()).unwrap();
    worker.all_reduce(Time(0), Reduction::Sum, ones(200));
    worker
}

/// F5: an acknowledgement tells the maximum so far, which fixes nothing; the complete result does.
#[test]
fn f5_exponent_only_from_a_complete_result() {
    let mut worker = worker();
    let round = sent(&mut worker, 0);
    assert_eq!(round.len(), 1, "chunks wait for the round");
    let acknowledgement = pending(&round[0], Status::Ok, |header| {
        header.set_next_exponent(9);
        header.set_exponent(9);
    });
    worker.handle_datagram(Time(50), acknowledgement.as_bytes());
    let polls = sent(&mut worker, 20_000);
    assert!(polls.iter().all(|request| request.kind == Kind::Pull));
    worker.handle_datagram(Time(20_050), round_result(&round[0], 3).as_bytes());
    let data = sent(&mut worker, 20_050);
    assert_eq!(
        data.iter().map(|r| (r.seq, r.chunk.exponent)).collect::<Vec<_>>(),
        [(Seq(1), 3), (Seq(2), 3)]
    );
    // Acknowledged, but no result: chunk 3 is not made, though its predecessors' exponent has been heard of.
    for request in &data {
        let answer = pending(request, Status::Ok, |header| header.set_next_exponent(3));
        worker.handle_datagram(Time(20_100), answer.as_bytes());
    }
    assert!(sent(&mut worker, 40_000).iter().all(|request| request.kind == Kind::Pull));
}

/// F5: a result whose agreed exponent is below the own proposal is damaged, whatever its check says.
#[test]
fn f5_an_exponent_below_the_own_proposal_is_refused() {
    let mut worker = worker();
    let round = sent(&mut worker, 0);
    worker.handle_datagram(Time(50), round_result(&round[0], -3).as_bytes());
    assert_eq!((worker.statistics().failed_checks, worker.chunks().0), (1, 0));
}

/// F1 i: after its own work a rank keeps in touch, and F24 ever more slowly.
#[test]
fn f1_lingers_until_everybody_has_everything() {
    let mut net = Net::new(SHAPE, FAIR, 1);
    net.workers[0].all_reduce(Time(1_000_000), Reduction::Sum, ones(1));
    net.workers[1].all_reduce(Time(1_000_000), Reduction::Sum, ones(1));
    net.run(10_000, |net| !net.events[1].is_empty());
    net.silent[1] = true; // has its result, but its last acknowledgement never gets out
    let pulls = |net: &mut Net, until: u64| {
        let before = net.workers[0].statistics().linger_pulls;
        while net.now < until && net.step() {}
        net.workers[0].statistics().linger_pulls - before
    };
    let idle = pulls(&mut net, 101_000_000);
    assert!((15..40).contains(&idle), "{idle} pulls in 100 s, at most 5 s apart");
    let now = net.time();
    net.workers[0].leave(now);
    net.pump_all();
    let leaving = pulls(&mut net, now.0 + 10_000_000);
    assert!((90..120).contains(&leaving), "{leaving} pulls in 10 s, at most 0.1 s apart");
    assert_eq!(net.left[0], None);
    net.silent[1] = false;
    assert!(net.leave(10_000));
}

/// F1 i: the linger has a deadline.
#[test]
fn f1_the_linger_ends() {
    let mut net = Net::new(SHAPE, FAIR, 1);
    all_reduce(&mut net, 1);
    net.run(10_000, |net| !net.events[1].is_empty());
    net.silent[1] = true;
    let now = net.time();
    net.workers[0].leave(now);
    net.run(10_000, |net| net.left[0].is_some());
    assert_eq!(net.left[0], Some(false));
    assert!(net.now < 22_000_000);
}

/// F24: a rank that is done and has nothing to say still hears that its generation is over, without being asked for
/// anything; leaving then waits for nobody.
#[test]
fn f24_a_finished_rank_hears_of_a_rejoin() {
    for over in [false, true] {
        let mut net = Net::new(SHAPE, FAIR, 1);
        all_reduce(&mut net, 1);
        net.run(10_000, |net| !net.events[1].is_empty());
        net.silent[1] = true; // its last acknowledgement never gets out, so rank 0 is still needed
        net.aggregator.jobs[0].generation += u32::from(over);
        let until = net.now + 60_000_000;
        while net.now < until && net.step() {}
        let now = net.time();
        net.workers[0].leave(now);
        net.pump_all();
        assert_eq!(net.left[0], over.then_some(false), "at once, and only if the generation is over");
    }
}

/// F24: a rank that nobody needs any more, and that therefore says nothing, hears it with its next operation.
#[test]
fn f24_an_idle_rank_hears_of_a_rejoin_when_it_goes_on() {
    let mut net = Net::new(SHAPE, FAIR, 1);
    all_reduce(&mut net, 1);
    net.run_until_events(1, 10_000);
    while net.step() {}
    net.aggregator.jobs[0].generation += 1;
    all_reduce(&mut net, 1);
    net.run_until_events(2, 10_000);
    for events in &net.events {
        assert!(matches!(events[1], Event::Failed { error: OperationError::Rejoin, .. }), "{:?}", events[1]);
    }
}

/// F1 ii, iii: rank 0 has the result and lingers; the memory goes bad before rank 1 has it. Rank 0 sends the same bytes
/// again.
#[test]
fn f1_a_delivered_chunk_is_redone_with_the_same_bytes() {
    let mut net = Net::new(SHAPE, FAIR, 1);
    let (phase, seen) = (Rc::new(Cell::new(0)), Rc::new(RefCell::new(Vec::new())));
    let (now, log) = (phase.clone(), seen.clone());
    net.filter = Some(Box::new(move |rank, datagram| {
        let request = Request::decode(Header::of(datagram).unwrap()).unwrap();
        match (rank, request.kind, request.seq) {
            // Rank 1 contributes first, so that its answer brings no result, and does not get to ask again.
            (1, Kind::Data, Seq(1)) => now.set(now.get().max(1)),
            (1, Kind::Pull, Seq(1)) => return now.get() == 2,
            (0, Kind::Data, Seq(1)) if now.get() == 0 => return false,
            (0, Kind::Data, Seq(1)) => {
                log.borrow_mut().push((request.attempt, datagram[HEADER_BYTES..].to_vec()))
            }
            _ => {}
        }
        true
    }));
    for (rank, worker) in net.workers.iter_mut().enumerate() {
        let values = Values::F32(vec![1.5 + rank as f32; 30]);
        worker.all_reduce(Time(1_000_000), Reduction::Sum, vec![Tensor { name: "w".into(), values }]);
    }
    net.run(10_000, |net| !net.events[0].is_empty());
    assert!(net.events[1].is_empty());
    net.aggregator.lanes[1][3] ^= 1 << 40;
    phase.set(2);
    assert!(net.leave(10_000));
    assert!(net.results().iter().all(|r| r[0].values == Values::F32(vec![4.0; 30])));
    assert_eq!((net.workers[1].statistics().redos_asked, net.workers[0].statistics().redos_joined), (1, 1));
    let seen = seen.borrow();
    assert_eq!(seen.last().map(|(attempt, _)| *attempt), Some(1));
    assert!(seen.iter().all(|(_, payload)| *payload == seen[0].1));
}

/// F4: a redo needs a rank that is lost, before it began or while it was open. Whoever needs the result is told which
/// rank, long before any timeout; who has it keeps it.
#[test]
fn f4_a_redo_that_lacks_a_lost_rank_fails_by_name() {
    for lost_meanwhile in [false, true] {
        let shape = Shape { world: 3, ..SHAPE };
        let mut net = Net::new(shape, FAIR, 1);
        let phase = Rc::new(Cell::new(0));
        let now = phase.clone();
        net.filter = Some(Box::new(move |rank, datagram| {
            let request = Request::decode(Header::of(datagram).unwrap()).unwrap();
            match (rank, request.kind, request.seq) {
                // Rank 1 contributes first, so that its answer brings no result, and does not get to ask again.
                (1, Kind::Data, Seq(1)) => now.set(now.get().max(1)),
                (1, Kind::Pull, Seq(1)) => return now.get() == 2,
                (_, Kind::Data, Seq(1)) => return now.get() > 0,
                _ => {}
            }
            true
        }));
        all_reduce(&mut net, 30);
        net.run(10_000, |net| !net.events[0].is_empty() && !net.events[2].is_empty());
        assert!(net.events[1].is_empty());
        net.aggregator.lanes[1][3] ^= 1 << 40;
        net.silent[2] = true;
        phase.set(2);
        if lost_meanwhile {
            net.run(10_000, |net| {
                net.aggregator.slots[1].attempt == 1 && net.aggregator.slots[1].bits == 0b011
            });
        }
        net.aggregator.jobs[0].expected &= !0b100;
        let then = net.now;
        net.run(10_000, |net| !net.events[1].is_empty());
        assert!(net.now < then + 1_000_000, "{} µs after the loss", net.now - then);
        let Event::Failed { error, .. } = &net.events[1][0] else { panic!("{:?}", net.events[1]) };
        let lacks = OperationError::RedoLacksRanks { ranks: vec![2], tensor: "w".into(), chunk: 1 };
        assert_eq!(*error, lacks, "lost meanwhile: {lost_meanwhile}");
        for rank in [0, 2] {
            assert!(matches!(net.events[rank][0], Event::Done { .. }), "rank {rank} has the result");
        }
    }
}

/// F1 iii, by hand: the announcement is obeyed once for each attempt, although the chunk was delivered.
#[test]
fn f1_announced_redo_is_obeyed_after_delivery() {
    let mut worker = worker();
    let round = sent(&mut worker, 0);
    worker.handle_datagram(Time(50), round_result(&round[0], 0).as_bytes());
    assert_eq!(worker.chunks().0, 1);
    let data = sent(&mut worker, 60);
    let announce = |request: &Request, attempt| {
        pending(request, Status::Ok, |header| {
            header.set_flags(flags::REDO);
            header.set_tag(Redo { seq: Seq(0), attempt }.to_word());
        })
    };
    worker.handle_datagram(Time(100), announce(&data[0], 1).as_bytes());
    let again: Vec<Request> = sent(&mut worker, 100).into_iter().filter(|r| r.kind == Kind::Data).collect();
    assert_eq!(again.len(), 1);
    let expected =
        Request { attempt: 1, flags: again[0].flags, token: again[0].token, want: again[0].want, ..round[0] };
    assert_eq!(Request { ack: round[0].ack, progress: round[0].progress, ..again[0] }, expected);
    assert!(again[0].flags & flags::RETRANSMIT != 0);
    // The acknowledgement of the earlier attempt is void now; the announcement heard again changes nothing.
    worker.handle_datagram(Time(110), announce(&data[1], 1).as_bytes());
    assert!(sent(&mut worker, 110).iter().all(|r| r.kind == Kind::Pull));
}

/// F2: having contributed is not having the results: with p_min at the end and min_ack below it, the rank stays.
#[test]
fn f2_the_linger_looks_at_acknowledgements_not_at_progress() {
    let mut worker = Worker::new(membership(SHAPE, 0), settings()).unwrap();
    worker.all_reduce(Time(0), Reduction::Sum, vec![]);
    let round = sent(&mut worker, 0);
    worker.handle_datagram(Time(50), round_result(&round[0], 0).as_bytes());
    assert!(matches!(worker.poll_event(), Some(Event::Done { .. })));
    worker.leave(Time(60));
    let linger = sent(&mut worker, 60);
    assert_eq!((linger.len(), linger[0].ack, linger[0].progress), (1, Seq(1), Seq(1)));
    let answer = |min_ack| {
        move |header: &mut Header| {
            header.set_raw_ack(1); // p_min
            header.set_raw_progress(1);
            header.set_raw_want(min_ack);
        }
    };
    worker.handle_datagram(Time(100), pending(&linger[0], Status::NotYet, answer(0)).as_bytes());
    assert!(worker.poll_event().is_none());
    let linger = sent(&mut worker, 10_000);
    worker.handle_datagram(Time(10_100), pending(&linger[0], Status::NotYet, answer(1)).as_bytes());
    assert!(matches!(worker.poll_event(), Some(Event::Left { complete: true })));
    assert_eq!(worker.poll_timeout(), None);
}

/// F14: a contribution that was BUSY because of the sender's own acknowledgement gets in, for it is sent again with the
/// current one.
#[test]
fn f14_a_busy_contribution_carries_the_newest_acknowledgement() {
    let mut worker = worker();
    let round = sent(&mut worker, 0);
    worker.handle_datagram(Time(50), round_result(&round[0], 0).as_bytes());
    let data = sent(&mut worker, 60);
    worker.handle_datagram(Time(100), pending(&data[0], Status::Busy, |_| ()).as_bytes());
    assert_eq!(worker.statistics().busy, 1);
    worker.handle_timeout(Time(1_000));
    let again = sent(&mut worker, 1_000);
    assert!(again.iter().any(|r| r.kind == Kind::Data && r.seq == Seq(1) && r.ack == Seq(1)), "{again:?}");
}

/// F14 end to end: the smallest ring, where every contribution needs the acknowledgement of the last but one.
#[test]
fn f14_the_smallest_ring_gets_through() {
    let shape = Shape { world: 3, lanes: 32, window: 1, slots: 2 };
    let mut net = Net::new(shape, Weather { loss: 0.3, duplication: 0.3, jitter: 100, ..FAIR }, 4);
    all_reduce(&mut net, 3000);
    net.run_until_events(1, 100_000);
    assert!(net.leave(100_000));
    assert!(net.results().iter().all(|r| r[0].values == Values::F32(vec![3.0; 3000])));
}

/// Part 2.1: the first failed check is asked again, the second asks for a redo of the next attempt.
#[test]
fn r21_pull_first_then_redo() {
    let mut worker = worker();
    let round = sent(&mut worker, 0);
    let bad = |request: &Request, attempt: u8| {
        let mut header = round_result(request, 0);
        header.set_tag(header.tag() ^ 1);
        header.set_attempt(attempt);
        header.seal();
        header
    };
    worker.handle_datagram(Time(50), bad(&round[0], 0).as_bytes());
    let ask = sent(&mut worker, 30_000);
    assert!(ask.iter().all(|r| r.kind == Kind::Pull && r.want == Seq(0)) && !ask.is_empty());
    worker.handle_datagram(Time(30_050), bad(&ask[0], 0).as_bytes());
    let redo = sent(&mut worker, 30_050);
    assert!(redo.iter().any(|r| r.kind == Kind::Data && r.attempt == 1 && r.seq == Seq(0)), "{redo:?}");
    // A damaged result of the old attempt, still under way, says nothing about the new one.
    for _ in 0..5 {
        worker.handle_datagram(Time(30_060), bad(&ask[0], 0).as_bytes());
    }
    assert_eq!(worker.statistics().redos_asked, 1);
    // Part 2.3: a sound one of the old attempt is delivered all the same.
    worker.handle_datagram(Time(30_070), round_result(&round[0], 0).as_bytes());
    assert_eq!(worker.chunks().0, 1);
    // After that a damaged one is counted, and nothing else.
    let failed = worker.statistics().failed_checks;
    let _ = sent(&mut worker, 30_070);
    for _ in 0..3 {
        worker.handle_datagram(Time(30_080), bad(&ask[0], 1).as_bytes());
    }
    let statistics = *worker.statistics();
    assert_eq!((statistics.failed_checks, statistics.duplicate_results), (failed + 3, 3));
    assert_eq!(statistics.redos_asked, 1);
    assert!(sent(&mut worker, 30_080).is_empty());
}

/// Part 2.2: attempts have an end, and the error names the chunk's tensor.
#[test]
fn r22_attempts_are_limited() {
    let mut worker = worker();
    let round = sent(&mut worker, 0);
    let mut now = 50;
    for attempt in 0..=MAX_ATTEMPTS {
        for _ in 0..2 {
            let mut header = round_result(&round[0], 0);
            header.set_tag(0);
            header.set_attempt(attempt);
            header.seal();
            now += 10;
            worker.handle_datagram(Time(now), header.as_bytes());
            sent(&mut worker, now);
        }
    }
    let Some(Event::Failed { error, .. }) = worker.poll_event() else { panic!("no error") };
    assert!(
        matches!(error, OperationError::DamagedResults { failures: 10, ref tensor } if tensor == "w"),
        "{error:?}"
    );
    assert!(error.to_string().contains("ethtool"));
}

/// A contribution that arrives damaged is sent again at once, then ever more slowly, and not for ever.
#[test]
fn damaged_contributions_back_off_and_end() {
    let mut worker = worker();
    let (mut now, mut times) = (0, Vec::new());
    let error = loop {
        let requests = sent(&mut worker, now);
        for data in requests.iter().filter(|request| request.kind == Kind::Data) {
            times.push(now);
            worker.handle_datagram(Time(now + 50), pending(data, Status::BadTag, |_| ()).as_bytes());
        }
        for pull in requests.iter().filter(|request| request.kind == Kind::Pull) {
            worker.handle_datagram(Time(now + 50), pending(pull, Status::NotYet, |_| ()).as_bytes());
        }
        if let Some(Event::Failed { error, .. }) = worker.poll_event() {
            break error;
        }
        now = if requests.is_empty() { worker.poll_timeout().unwrap().0.max(now + 1) } else { now + 50 };
        worker.handle_timeout(Time(now));
    };
    let gaps: Vec<u64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!((times.len(), gaps[0]), (16, 50), "the first at once: {gaps:?}");
    let expected = [1, 2, 4, 8, 16, 32, 64, 128, 250, 250, 250, 250, 250, 250].map(|ms| ms * 1000 + 50);
    // A poll that is answered in between makes this test look 50 µs later.
    let is_close = |(gap, expected): (&u64, u64)| (expected..=expected + 50).contains(gap);
    assert!(gaps[1..].iter().zip(expected).all(is_close), "{gaps:?}");
    assert_eq!(error, OperationError::DamagedOnTheWay { tensor: "w".into(), refusals: 16 });
    let words = error.to_string();
    assert!(
        ["between this rank and the aggregator", "'w'", "ethtool", "cable"].iter().all(|w| words.contains(w))
    );
    // Polls for the result, which nobody refuses, go on beside them, but slowly.
    assert!(worker.statistics().pulls < 300, "{:?}", worker.statistics());
    assert_eq!(worker.poll_timeout(), None);
}

/// One sound arrival in between, and the count begins anew; an acknowledgement of an earlier copy ends a pause.
#[test]
fn refusals_count_in_a_row() {
    let mut worker = worker();
    let mut now = 0;
    let mut latest = sent(&mut worker, now)[0];
    for turn in 0..60 {
        let status = if turn % 10 == 9 { Status::Busy } else { Status::BadTag };
        worker.handle_datagram(Time(now + 50), pending(&latest, status, |_| ()).as_bytes());
        let limit = now + 1_000_000;
        latest = loop {
            assert!(now < limit);
            now += 500;
            worker.handle_timeout(Time(now));
            if let Some(data) = sent(&mut worker, now).into_iter().find(|r| r.kind == Kind::Data) {
                break data;
            }
        };
    }
    assert!(worker.poll_event().is_none());
    for _ in 0..2 {
        worker.handle_datagram(Time(now + 50), pending(&latest, Status::BadTag, |_| ()).as_bytes());
        now += 100_000;
        worker.handle_timeout(Time(now));
        if let Some(data) = sent(&mut worker, now).into_iter().find(|r| r.kind == Kind::Data) {
            latest = data;
        }
    }
    worker.handle_datagram(Time(now + 50), pending(&latest, Status::Ok, |_| ()).as_bytes());
    for _ in 0..1000 {
        now += 1000;
        worker.handle_timeout(Time(now));
        assert!(sent(&mut worker, now).iter().all(|request| request.kind == Kind::Pull));
    }
}

/// Part 2.2: a higher attempt is adopted, and an acknowledgement of the earlier one is void.
#[test]
fn r22_a_higher_attempt_is_adopted_and_old_acknowledgements_are_void() {
    let mut worker = worker();
    let round = sent(&mut worker, 0);
    worker.handle_datagram(Time(50), pending(&round[0], Status::OldAttempt, |h| h.set_attempt(2)).as_bytes());
    let again = sent(&mut worker, 50);
    assert_eq!((again[0].kind, again[0].attempt, again[0].progress), (Kind::Data, 2, Seq(0)));
    assert_eq!((again[0].tag, again[0].chunk), (round[0].tag, round[0].chunk));
    // A second answer to the first request (duplicated on the way) is no news.
    worker.handle_datagram(Time(60), pending(&round[0], Status::Ok, |_| ()).as_bytes());
    let poll = sent(&mut worker, 15_000);
    assert!(poll.iter().all(|r| r.progress == Seq(0)), "{poll:?}");
    worker.handle_datagram(Time(15_100), pending(&again[0], Status::Ok, |h| h.set_attempt(2)).as_bytes());
    let poll = sent(&mut worker, 30_000);
    assert!(!poll.is_empty() && poll.iter().all(|r| r.progress == Seq(1)));
}

/// Part 2.5: ranks that issue different operations are told at once, which ones disagree.
#[test]
fn r25_different_operations_are_told() {
    let mut net = Net::new(Shape { world: 3, ..SHAPE }, FAIR, 1);
    net.workers[0].all_reduce(Time(1_000_000), Reduction::Sum, ones(100));
    net.workers[2].all_reduce(Time(1_000_000), Reduction::Sum, ones(100));
    net.workers[1].all_reduce(Time(1_000_000), Reduction::Max, ones(100));
    net.run_until_events(1, 100_000);
    let errors: Vec<String> = net.events.iter().map(|events| format!("{:?}", events[0])).collect();
    assert!(errors[1].contains("Aborted { reason: Mismatch, ranks: [0"), "{errors:?}");
    assert!(errors[0].contains("Timeout { missing: [1]"), "{errors:?}");
    assert!(errors[2].contains("Timeout { missing: [1]"), "{errors:?}");
}

/// Part 2.10: status and result are independent: BUSY with a result delivers it.
#[test]
fn r210_busy_with_a_result_is_normal() {
    let mut worker = worker();
    let round = sent(&mut worker, 0);
    let mut header = round_result(&round[0], 0);
    header.set_status(Status::Busy as u8);
    header.seal();
    worker.handle_datagram(Time(50), header.as_bytes());
    assert_eq!((worker.chunks().0, worker.statistics().busy), (1, 1));
}

/// Part 2.12: REJOIN ends everything, and adopts nothing from the packet.
#[test]
fn r212_rejoin_ends_every_operation() {
    let mut net = Net::new(SHAPE, FAIR, 1);
    for worker in &mut net.workers {
        worker.all_reduce(Time(1_000_000), Reduction::Sum, ones(1000));
        worker.all_reduce(Time(1_000_000), Reduction::Sum, ones(10));
    }
    net.run(20, |net| net.steps > 10);
    net.aggregator.jobs[0].generation += 1;
    net.run_until_events(2, 10_000);
    for events in &net.events {
        assert!(matches!(events[0], Event::Failed { error: OperationError::Rejoin, .. }));
        assert!(matches!(events[1], Event::Failed { error: OperationError::Over, .. }));
    }
    assert!(!net.leave(10));
}

/// Whatever arrives, nothing panics and nothing is delivered.
#[test]
fn garbage_is_counted_and_ignored() {
    let mut random = Random(9);
    for seed in 0..300 {
        let mut worker = worker();
        let requests = sent(&mut worker, 0);
        for step in 0..50 {
            let mut header = requests[0].encode();
            if seed % 3 != 0 {
                header = pending(&requests[0], Status::Ok, |_| ());
            }
            let mut bytes = [0u8; 64];
            bytes.copy_from_slice(header.as_bytes());
            for _ in 0..random.below(6) {
                let bit = random.below(512) as usize;
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
            // Sealed garbage gets past the check, and must not get further than an error.
            let sealed = random.chance(0.7);
            if let Some(header) = Header::of_mut(&mut bytes).filter(|_| sealed) {
                header.seal();
            }
            let mut datagram = bytes.to_vec();
            datagram.resize(random.below(300) as usize, 7);
            worker.handle_datagram(Time(step * 100), if random.chance(0.5) { &bytes } else { &datagram });
            let _ = sent(&mut worker, step * 100 + 50);
            worker.handle_timeout(Time(step * 100 + 60));
        }
        while let Some(event) = worker.poll_event() {
            assert!(!matches!(event, Event::Done { .. }));
        }
    }
}

/// Congestion on the way there is echoed, congestion on the way back is seen by the driver: controllers hear of both.
#[test]
fn congestion_both_ways_reaches_the_controller() {
    for (echoed, marked) in [(false, false), (true, false), (false, true)] {
        let membership = membership(SHAPE, 0);
        let controller = Algorithm::Atp.controller(&membership);
        let mut worker = Worker::with_controller(membership, settings(), controller).unwrap();
        worker.all_reduce(Time(0), Reduction::Sum, ones(200));
        let round = sent(&mut worker, 0);
        let mut answer = round_result(&round[0], 0);
        if echoed {
            answer.set_flags(flags::RESULT | flags::ECN_ECHO);
            answer.seal();
        }
        match marked {
            true => worker.handle_marked_datagram(Time(50), answer.as_bytes()),
            false => worker.handle_datagram(Time(50), answer.as_bytes()),
        }
        let statistics = worker.statistics();
        assert_eq!((statistics.ecn_echoes, statistics.ecn_marks), (u64::from(echoed), u64::from(marked)));
        let window = worker.controller().windows().asynchronous;
        assert_eq!(window, if echoed || marked { 1 } else { 2 });
    }
}

/// An answer that nobody can have sent for us is counted.
#[test]
fn foreign_answers_are_counted() {
    let mut worker = worker();
    let round = sent(&mut worker, 0);
    for change in [
        |h: &mut Header| h.set_job(1),
        |h: &mut Header| h.set_worker(1),
        |h: &mut Header| h.set_generation(1),
    ] {
        worker.handle_datagram(Time(9), pending(&round[0], Status::Rejoin, change).as_bytes());
    }
    let mut flipped = *round_result(&round[0], 0).as_bytes();
    flipped[20] ^= 1;
    worker.handle_datagram(Time(9), &flipped);
    let statistics = worker.statistics();
    assert_eq!((statistics.foreign_answers, statistics.refused(Refusal::BadHeaderCheck)), (3, 1));
    assert_eq!(worker.chunks(), (0, 8));
}

/// The time-out without any answer says so.
#[test]
fn no_answer_is_an_error_of_its_own() {
    let mut net = Net::new(SHAPE, Weather { loss: 1.0, ..FAIR }, 1);
    net.workers[0].all_reduce(Time(1_000_000), Reduction::Sum, ones(9));
    net.silent[1] = true;
    net.run_until_events(1, 10_000);
    let Event::Failed { error: OperationError::NoAnswer { waited }, .. } = &net.events[0][0] else {
        panic!()
    };
    assert_eq!(*waited, Duration::from_secs(20));
}

/// An aggregator that vanishes is not mistaken for the rank that it last waited for.
#[test]
fn an_aggregator_that_falls_silent_is_named_itself() {
    const SECOND: u64 = 1_000_000;
    for (last_answer, expected) in [(2, "NoAnswer { waited: 1"), (15, "Timeout { missing: [1")] {
        let mut worker = worker();
        let mut latest = sent(&mut worker, 0).remove(0);
        for second in 1..20 {
            if second <= last_answer {
                let answer = pending(&latest, Status::Ok, |_| ());
                worker.handle_datagram(Time(second * SECOND), answer.as_bytes());
            }
            worker.handle_timeout(Time(second * SECOND));
            latest = sent(&mut worker, second * SECOND).pop().unwrap_or(latest);
        }
        worker.handle_timeout(Time(20 * SECOND));
        let Some(Event::Failed { error, .. }) = worker.poll_event() else { panic!("it goes on") };
        assert!(format!("{error:?}").starts_with(expected), "{error:?}");
    }
}

#[test]
fn body_of_a_result_is_decoded_as_the_worker_expects() {
    let mut worker = worker();
    let round = sent(&mut worker, 0);
    let answer = Answer::decode(&round_result(&round[0], 5)).unwrap();
    assert!(matches!(answer.body, Body::Result { lanes: 0, next_exponent: 5, .. }));
}
