//! Requests as numbered packets: what is under way, what is lost, how long a round trip takes (as QUIC, RFC 9002).
//!
//! Every datagram has a fresh token, so an answer tells exactly which request it belongs to, also for one that was thought
//! lost. What a request carried (a contribution, a wish) is the worker's to send again.

use alloc::collections::VecDeque;
use core::time::Duration;

use crate::time::Time;

/// Requests answered after a request before it is thought lost, at first; queues and CPUs reorder a little (RFC 9002,
/// 6.1.1).
const REORDERING: u32 = 3;
/// The same at most. More than a window hardly has: only time tells then.
const REORDERING_MOST: u32 = 96;
/// Losses without a late answer after which answers are thought to come in order again (RFC 8985, 6.2: 16 recoveries).
const IN_ORDER_AFTER: u32 = 16;
/// Retransmission time-out before the first sample.
const RTO_INITIAL: u64 = 20_000;
/// Shortest time-out, in µs: the aggregator answers in microseconds, but hosts are scheduled in milliseconds.
const RTO_FLOOR: u64 = 1_000;
/// Longest time-out, in µs: a dead aggregator gets four probes a second.
const RTO_CAP: u64 = 250_000;
/// Most doublings of the time-out; the cap is reached long before.
const MOST_BACKOFF: u32 = 16;

/// What one request carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sent {
    /// Contribution, as position and attempt.
    pub contribution: Option<(u64, u8)>,
    /// Chunk whose wish rests on this request.
    pub wish: Option<u64>,
    /// Chunk that the request asked about; the same, if there is a wish.
    pub about: u64,
    /// When it was sent.
    pub at: Time,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    UnderWay,
    Answered,
    /// Others that were sent later have been answered.
    Overtaken,
    /// It took too long.
    Expired,
}

/// An answered request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settled {
    pub sent: Sent,
    pub rtt: Duration,
    /// It had been thought lost.
    pub late: bool,
}

/// The requests that answers may still come for.
#[derive(Debug)]
pub(crate) struct Recovery {
    requests: VecDeque<(Sent, State)>,
    /// Lost requests are forgotten beyond this many.
    most: usize,
    /// Token of the first in `requests`.
    first: u32,
    /// Requests before this token are not under way.
    live: u32,
    /// Latest token that the aggregator answered.
    answered: Option<u32>,
    /// When the first request after the latest answer was sent.
    unanswered: Option<Time>,
    rtt: Rtt,
    /// How far answers overtake one another: where some come from a rack or a switch and others from behind it, that is
    /// nothing unusual.
    overtaking: Overtaking,
    backoff: u32,
    expired: bool,
}

impl Recovery {
    /// For about `most` requests at once.
    pub fn new(most: usize) -> Recovery {
        let requests = VecDeque::with_capacity(most + 1);
        let rtt = Rtt::default();
        Recovery {
            requests,
            most,
            first: 0,
            live: 0,
            answered: None,
            unanswered: None,
            rtt,
            overtaking: Overtaking::default(),
            backoff: 0,
            expired: false,
        }
    }

    /// Notes a request; returns its token.
    pub fn send(&mut self, sent: Sent) -> u32 {
        if self.requests.len() > self.most {
            self.forget();
        }
        self.unanswered.get_or_insert(sent.at);
        let token = self.first.wrapping_add(self.requests.len() as u32);
        self.requests.push_back((sent, State::UnderWay));
        token
    }

    /// An answer of the aggregator came. `None` if its request is forgotten or was answered before.
    pub fn settle(&mut self, now: Time, token: u32) -> Option<Settled> {
        let settled = self.settle_on_the_way(now, token)?;
        self.rtt.sample(settled.rtt.as_micros() as u64);
        if self.answered.is_none_or(|latest| token.wrapping_sub(latest) as i32 > 0) {
            self.answered = Some(token);
        }
        Some(settled)
    }

    /// A switch before the aggregator answered, which is nearer: requests that went on to the aggregator are not lost
    /// because this one overtook them, and how long those take it does not tell.
    pub fn settle_on_the_way(&mut self, now: Time, token: u32) -> Option<Settled> {
        self.unanswered = None;
        let index = token.wrapping_sub(self.first) as usize;
        let (sent, state) = self.requests.get_mut(index)?;
        let late = match state {
            State::UnderWay => false,
            State::Overtaken | State::Expired => true,
            State::Answered => return None,
        };
        // That others were faster said nothing. (An expired time-out says nothing of the order.)
        let was_overtaken = *state == State::Overtaken;
        *state = State::Answered;
        let (sent, rtt) = (*sent, now.since(sent.at));
        if was_overtaken {
            self.overtaking.widen();
        }
        self.backoff = 0;
        self.forget();
        Some(Settled { sent, rtt, late })
    }

    /// The next request to be thought lost, oldest first.
    pub fn next_lost(&mut self, now: Time) -> Option<(u32, Sent)> {
        self.forget();
        // Here alone, or a deadline that was told would be over before its time.
        self.overtaking.settle_down();
        let token = self.live;
        let index = token.wrapping_sub(self.first) as usize;
        let rtt_threshold = self.reordering_time();
        let rto = self.rto();
        let overtaken = self.overtaken_by(token);
        let Some((sent, state)) = self.requests.get_mut(index) else {
            self.back_off();
            return None;
        };
        let age = now.since(sent.at);
        let lost = overtaken >= self.overtaking.requests || (overtaken > 0 && age >= rtt_threshold);
        if !lost && age < rto {
            self.back_off();
            return None;
        }
        self.expired |= !lost;
        *state = if lost { State::Overtaken } else { State::Expired };
        let sent = *sent;
        self.live = token.wrapping_add(1);
        Some((token, sent))
    }

    /// When [`Recovery::next_lost`] may find something, if nothing is answered before.
    pub fn deadline(&self) -> Option<Time> {
        let (sent, _) = self.requests.get(self.live.wrapping_sub(self.first) as usize)?;
        let span = if self.overtaken_by(self.live) > 0 { self.reordering_time() } else { self.rto() };
        Some(sent.at.plus(span))
    }

    /// How long requests have been sent in vain. A rank that asked nothing, for want of processor time, waits for nothing.
    pub fn silence(&self, now: Time) -> Duration {
        self.unanswered.map_or(Duration::ZERO, |since| now.since(since))
    }

    /// Smoothed round-trip time; `None` before the first sample.
    pub fn srtt(&self) -> Option<Duration> {
        self.rtt.smoothed.map(|eighths| Duration::from_micros(eighths / 8))
    }

    /// How much later the latest answered request was sent.
    fn overtaken_by(&self, token: u32) -> u32 {
        self.answered.map_or(0, |latest| (latest.wrapping_sub(token) as i32).max(0) as u32)
    }

    /// A pause before something that failed is tried again: the time-out, doubled so many times, up to its cap.
    pub fn pause(&self, doublings: u8) -> Duration {
        Duration::from_micros((self.rtt.timeout() << u32::from(doublings).min(MOST_BACKOFF)).min(RTO_CAP))
    }

    /// Age at which an overtaken request is lost. Never later than one that nothing has overtaken.
    fn reordering_time(&self) -> Duration {
        self.rtt.reordering(self.overtaking.eighths).min(self.rto())
    }

    fn rto(&self) -> Duration {
        Duration::from_micros((self.rtt.timeout() << self.backoff).min(RTO_CAP))
    }

    /// Doubles the time-out once for all requests that it expired for.
    fn back_off(&mut self) {
        if self.expired {
            self.expired = false;
            self.backoff = (self.backoff + 1).min(MOST_BACKOFF);
        }
    }

    /// Moves `live` to the first request under way, and drops what no answer is waited for.
    fn forget(&mut self) {
        let state =
            |requests: &VecDeque<(Sent, State)>, index: u32| requests.get(index as usize).map(|r| r.1);
        while state(&self.requests, self.live.wrapping_sub(self.first)).is_some_and(|s| s != State::UnderWay)
        {
            self.live = self.live.wrapping_add(1);
        }
        while self.first != self.live
            && (state(&self.requests, 0) == Some(State::Answered) || self.requests.len() > self.most)
        {
            if state(&self.requests, 0) == Some(State::Overtaken) {
                self.overtaking.lost();
            }
            self.requests.pop_front();
            self.first = self.first.wrapping_add(1);
        }
    }
}

/// What is taken for a loss, learnt from answers that came after all (as RACK does, RFC 8985).
#[derive(Debug)]
struct Overtaking {
    /// Requests answered after a request before it is thought lost.
    requests: u32,
    /// How much longer than a round trip an overtaken request may take, in eighths of one.
    eighths: u64,
    /// Losses since the last late answer.
    losses: u32,
}

impl Default for Overtaking {
    fn default() -> Self {
        Overtaking { requests: REORDERING, eighths: 1, losses: 0 }
    }
}

impl Overtaking {
    /// What was thought lost was not.
    fn widen(&mut self) {
        self.requests = (self.requests * 2).min(REORDERING_MOST);
        // Up to two round trips, as RACK.
        self.eighths = (self.eighths * 2).min(8);
        self.losses = 0;
    }

    /// What was thought lost was, as far as can be known.
    fn lost(&mut self) {
        self.losses += 1;
    }

    /// After enough losses answers are thought to come in order.
    fn settle_down(&mut self) {
        if self.losses >= IN_ORDER_AFTER {
            *self = Overtaking::default();
        }
    }
}

/// Round-trip times in µs, smoothed as RFC 6298 says, with binary fractions.
#[derive(Debug, Default)]
struct Rtt {
    /// Eight times the smoothed time.
    smoothed: Option<u64>,
    /// Four times the variation.
    variation: u64,
    latest: u64,
}

impl Rtt {
    fn sample(&mut self, rtt: u64) {
        self.latest = rtt;
        match self.smoothed {
            None => (self.smoothed, self.variation) = (Some(rtt * 8), rtt * 2),
            Some(eighths) => {
                let error = (eighths / 8).abs_diff(rtt);
                self.variation = self.variation - self.variation / 4 + error;
                self.smoothed = Some(eighths - eighths / 8 + rtt);
            }
        }
    }

    fn timeout(&self) -> u64 {
        self.smoothed.map_or(RTO_INITIAL, |eighths| (eighths / 8 + self.variation).max(RTO_FLOOR))
    }

    /// Age at which an overtaken request is lost: the longer of smoothed and latest time and so many eighths more.
    fn reordering(&self, eighths_more: u64) -> Duration {
        let longer = self.smoothed.map_or(RTO_INITIAL, |eighths| (eighths / 8).max(self.latest));
        Duration::from_micros((longer * (8 + eighths_more) / 8).max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(at: u64) -> Sent {
        Sent { contribution: None, wish: None, about: 0, at: Time(at) }
    }

    fn lost(recovery: &mut Recovery, now: u64) -> Vec<u32> {
        core::iter::from_fn(|| recovery.next_lost(Time(now)).map(|(token, _)| token)).collect()
    }

    #[test]
    fn three_later_answers_make_a_loss() {
        let mut recovery = Recovery::new(8);
        (0..5).for_each(|at| assert_eq!(recovery.send(sent(at)), at as u32));
        assert!(recovery.settle(Time(100), 1).is_some());
        assert_eq!(lost(&mut recovery, 100), []);
        assert!(recovery.settle(Time(102), 3).is_some());
        assert_eq!(lost(&mut recovery, 102), [0]);
        // Token 2 was overtaken, and waits for 9/8 of a round trip.
        assert_eq!(recovery.deadline(), Some(Time(2 + 99 * 9 / 8)));
        assert_eq!(lost(&mut recovery, 2 + 99 * 9 / 8), [2]);
        // What was thought lost may still be answered, once.
        assert!(recovery.settle(Time(120), 0).is_some_and(|settled| settled.late));
        assert!(recovery.settle(Time(121), 0).is_none());
    }

    /// Answers from two distances: those from near overtake those from afar, and nothing is lost.
    #[test]
    fn answers_that_overtake_one_another_are_learnt() {
        let mut recovery = Recovery::new(64);
        let (near, far, mut spurious) = (100, 180, Vec::new());
        for round in 0..40 {
            let start = round * 1000;
            let tokens: Vec<u32> = (0..8).map(|at| recovery.send(sent(start + at))).collect();
            tokens[1..]
                .iter()
                .for_each(|token| assert!(recovery.settle(Time(start + near), *token).is_some()));
            spurious
                .push(lost(&mut recovery, start + near).len() + lost(&mut recovery, start + far - 1).len());
            assert!(recovery.settle(Time(start + far), tokens[0]).is_some());
        }
        assert_eq!(spurious[0], 1);
        assert!(spurious[5..].iter().all(|count| *count == 0), "{spurious:?}");
        // Losses for good make it as watchful as before.
        for round in 100..200 {
            let tokens: Vec<u32> = (0..4).map(|at| recovery.send(sent(round * 10_000 + at))).collect();
            let now = Time(round * 10_000 + near);
            tokens[1..].iter().for_each(|token| assert!(recovery.settle(now, *token).is_some()));
            lost(&mut recovery, round * 10_000 + 9_000);
        }
        assert_eq!((recovery.overtaking.requests, recovery.overtaking.eighths), (REORDERING, 1));
    }

    /// Contributions that a switch holds are answered at once, the one that completes a sum by the aggregator.
    #[test]
    fn a_switch_overtakes_without_a_loss() {
        let mut recovery = Recovery::new(8);
        (0..6).for_each(|at| assert_eq!(recovery.send(sent(at)), at as u32));
        assert!(recovery.settle(Time(200), 0).is_some());
        (2..5).for_each(|token| assert!(recovery.settle_on_the_way(Time(210), token).is_some()));
        assert!(recovery.settle_on_the_way(Time(211), 4).is_none(), "answered before");
        assert_eq!((lost(&mut recovery, 210), recovery.srtt()), (vec![], Some(Duration::from_micros(200))));
        // The aggregator's answer to a later one does tell.
        assert!(recovery.settle(Time(215), 5).is_some());
        assert_eq!(lost(&mut recovery, 215), [1]);
    }

    #[test]
    fn the_timeout_doubles_up_to_its_cap_and_an_answer_resets_it() {
        let (mut recovery, mut now, mut spans) = (Recovery::new(4), 0, Vec::new());
        for _ in 0..6 {
            let token = recovery.send(sent(now));
            let deadline = recovery.deadline().unwrap().0;
            spans.push(deadline - now);
            now = deadline;
            assert_eq!(lost(&mut recovery, now), [token]);
        }
        assert_eq!(spans, [20_000, 40_000, 80_000, 160_000, 250_000, 250_000]);
        let token = recovery.send(sent(now));
        assert!(recovery.settle(Time(now + 50), token).is_some());
        recovery.send(sent(now));
        assert_eq!(recovery.deadline(), Some(Time(now + RTO_FLOOR)));
    }

    #[test]
    fn tokens_wrap_and_lost_requests_are_forgotten() {
        let mut recovery = Recovery::new(4);
        (recovery.first, recovery.live) = (u32::MAX - 1, u32::MAX - 1);
        let tokens: Vec<u32> = (0..6).map(|at| recovery.send(sent(at))).collect();
        assert_eq!(tokens[2..], [0, 1, 2, 3]);
        assert!(recovery.settle(Time(100), 3).is_some());
        assert_eq!(lost(&mut recovery, 100), [u32::MAX - 1, u32::MAX, 0]);
        assert!(recovery.settle(Time(100), u32::MAX - 1).is_none());
        assert!(recovery.settle(Time(100), 0).is_some_and(|settled| settled.late));
        assert!(recovery.settle(Time(100), 77).is_none());
    }
}
