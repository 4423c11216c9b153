//! Rules for a worker behind a switch.

use super::*;

/// Two chunks that a switch has acknowledged, after the round.
fn entrusted(worker: &mut Worker) -> Vec<Request> {
    let round = sent(worker, 0);
    worker.handle_datagram(Time(50), round_result(&round[0], 3).as_bytes());
    let data = sent(worker, 100);
    assert_eq!(
        data.iter().map(|r| (r.kind, r.seq)).collect::<Vec<_>>(),
        [(Kind::Data, Seq(1)), (Kind::Data, Seq(2))]
    );
    for request in &data {
        let answer = pending(request, Status::Ok, |header| {
            header.set_flags(flags::PARTIAL);
            // What a switch does not know must not be believed.
            header.set_raw_want(7);
            header.set_bitmap(0);
        });
        worker.handle_datagram(Time(150), answer.as_bytes());
    }
    data
}

/// The pull for chunk 1, which comes sooner or later.
fn pull(worker: &mut Worker, now: &mut u64) -> Request {
    loop {
        *now += 5_000;
        let requests = sent(worker, *now);
        assert!(requests.iter().all(|request| request.kind == Kind::Pull), "{requests:?}");
        if let Some(request) = requests.into_iter().find(|request| request.want == Seq(1)) {
            return request;
        }
        assert!(*now < 1_000_000, "no pull");
    }
}

/// F15: a contribution that a switch has acknowledged, and that the aggregator lacks although every rank's is acknowledged,
/// is sent again, past the switch. Before that it may be in a switch that waits for other ranks.
#[test]
fn f15_what_a_switch_lost_is_sent_again() {
    let mut worker = worker();
    entrusted(&mut worker);
    let mut now = 150;
    // Not every rank is that far; then, the aggregator has it.
    for (p_min, bitmap) in [(1, 0b10), (3, 0b11)] {
        let answer = pending(&pull(&mut worker, &mut now), Status::NotYet, |header| {
            header.set_raw_ack(p_min);
            header.set_bitmap(bitmap);
        });
        worker.handle_datagram(Time(now + 50), answer.as_bytes());
        assert_eq!(worker.statistics().reclaimed, 0, "p_min {p_min}, bitmap {bitmap:b}");
    }
    let answer = pending(&pull(&mut worker, &mut now), Status::NotYet, |header| {
        header.set_raw_ack(3);
        header.set_bitmap(0b10);
    });
    worker.handle_datagram(Time(now + 50), answer.as_bytes());
    let again = sent(&mut worker, now + 100);
    let again: Vec<_> = again.iter().filter(|request| request.kind == Kind::Data).collect();
    assert_eq!(again.len(), 1, "{again:?}");
    assert_eq!((again[0].seq, again[0].bitmap, again[0].attempt), (Seq(1), 1, 0));
    assert!(again[0].flags & flags::RETRANSMIT != 0);
    assert_eq!(worker.statistics().reclaimed, 1);
    // The aggregator's own word is no switch's: it is not doubted.
    worker.handle_datagram(Time(now + 150), pending(again[0], Status::Ok, |_| {}).as_bytes());
    let answer = pending(&pull(&mut worker, &mut now), Status::NotYet, |header| {
        header.set_raw_ack(3);
        header.set_bitmap(0b10);
    });
    worker.handle_datagram(Time(now + 50), answer.as_bytes());
    assert_eq!(worker.statistics().reclaimed, 1);
}

/// 2.18: a copy of a result is delivered like any other, and answers no request, whatever its token.
#[test]
fn r218_a_copy_answers_nothing() {
    let mut worker = worker();
    let data = entrusted(&mut worker);
    let keys = (0..2).fold(0u64, |sum, r| sum.wrapping_add(paatp_common::tag::rank_key(common::NONCE, r)));
    let mut now = 150;
    let under_way = pull(&mut worker, &mut now);
    let mut copy = pending(&data[0], Status::NotYet, |header| {
        header.set_flags(flags::PARTIAL | flags::RESULT | flags::PAYLOAD);
        header.set_token(under_way.token);
        header.set_raw_want(1);
        header.set_lanes(32);
        header.set_bitmap(0b11);
        header.set_exponent(data[0].chunk.exponent);
        header.set_next_exponent(100);
        // Of a payload of zeros.
        header.set_tag(paatp_common::tag::salt(keys, data[0].seq, data[0].chunk));
    })
    .as_bytes()
    .to_vec();
    copy.resize(HEADER_BYTES + 32 * 4, 0);
    let before = *worker.statistics();
    worker.handle_datagram(Time(now + 500), &copy);
    let after = *worker.statistics();
    assert_eq!((after.copied_results, after.results), (1, before.results + 1), "{after:?}");
    assert_eq!(after.srtt_us, before.srtt_us, "no round trip has ended");
    // The pull is still under way, until its own answer comes.
    copy[3] &= !flags::PARTIAL;
    Header::of_mut(&mut copy).unwrap().seal();
    worker.handle_datagram(Time(now + 900), &copy);
    let last = *worker.statistics();
    assert_eq!((last.copied_results, last.duplicate_results), (1, after.duplicate_results + 1));
    assert!(last.srtt_us > after.srtt_us, "{last:?}");
}

/// What only a switch has acknowledged has the aggregator's link before it: the congestion window stays full until the
/// aggregator acknowledges. To the other ranks it is progress all the same.
#[test]
fn a_switch_opens_no_congestion_window() {
    let shape = Shape { window: 64, slots: 128, ..SHAPE };
    for (bits, goes_on) in [(flags::PARTIAL, false), (0, true)] {
        let membership = membership(shape, 0);
        let controller = Algorithm::PaAtp.controller(&membership);
        let mut worker = Worker::with_controller(membership, settings(), controller).unwrap();
        worker.all_reduce(Time(0), Reduction::Sum, ones(32 * 100));
        let round = sent(&mut worker, 0);
        let mut result = round_result(&round[0], 3);
        result.set_window(0);
        result.seal();
        worker.handle_datagram(Time(50), result.as_bytes());
        let is_data = |request: &Request| request.kind == Kind::Data;
        let first = sent(&mut worker, 100);
        assert!((5..20).contains(&first.len()) && first.iter().all(is_data), "{} chunks", first.len());
        for request in &first {
            let answer = pending(request, Status::Ok, |header| {
                header.set_flags(bits);
                header.set_window(0);
            });
            worker.handle_datagram(Time(150), answer.as_bytes());
        }
        let then = sent(&mut worker, 200);
        assert_eq!(then.iter().any(is_data), goes_on, "{} requests", then.len());
        let told = then.first().copied().unwrap_or_else(|| pull(&mut worker, &mut 200));
        assert_eq!(told.progress, Seq(1 + first.len() as u32));
    }
}
