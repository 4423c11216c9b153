//! PA-ATP: progress-aware and asynchronous.
//!
//! Who is behind grows faster and yields less; who is ahead yields more, and near its bound it paces itself to the slowest
//! rank. The published abstracts fix this behaviour and the send rule; the formulas are ours (`docs/transport.md`).

use core::time::Duration;

use super::a2tp::{COLLISIONS_IGNORED, collision_factor};
use super::epoch::{Counts, Epoch, average, ratio};
use super::{Controller, Feedback, Windows};
use crate::membership::Membership;
use crate::time::Time;

/// Chunks under way before the first answer (the initial window of RFC 6928, in packets).
const INITIAL_WINDOW: f64 = 10.0;
/// Chunks that the asynchronous window grows by in a window without BUSY (as A2TP's slot window).
const ASYNCHRONOUS_INCREASE: f64 = 1.0;
/// Weight of a new sample in the average share of BUSY answers (as A2TP's β).
const BUSY_SHARE: f64 = 1.0 / 8.0;
/// One step of `gain`: 128 of them double the increase or end it.
const GAIN_UNIT: f64 = 1.0 / 128.0;
/// A path whose average share of marks is above this is congested. Ours: one epoch full of marks is forgotten in thirty.
const CONGESTED: f64 = 1.0 / 128.0;
/// Weight of a new sample in the slowest rank's interval. Ours: a few round trips.
const INTERVAL_SHARE: f64 = 1.0 / 4.0;

/// The constants that experiments choose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tuning {
    /// κ: chunks that the last rank's window grows by in a round trip, beyond the one of everybody, at full spread.
    /// Ours, a first value: no experiment has chosen it yet.
    pub kappa: f64,
    /// λ, 0 to 1: how much more a leader and how much less a straggler yields to congestion. Ours, a first value: a leader
    /// yields three times as much as a straggler.
    pub lambda: f64,
    /// Weight of a new sample in α, the average share of marked answers (RFC 8257, 3.3).
    pub alpha_share: f64,
    /// Share of the asynchronous window that a leader is ahead by when it begins to pace itself. Ours, a first value.
    pub near: f64,
    /// The same where the path is congested. Every chunk that a leader is ahead costs a pull later, on the path that those
    /// behind need; where each has a path of its own, it costs nobody. Chosen in the simulator (docs/simulator.md): 1/8 of
    /// 1024 chunks against 3/4 took 1 to 2 % off an iteration on a shared link; everywhere, it cost 13 to 18 % where links
    /// are slow at different times.
    pub near_congested: f64,
    /// Part of the slowest rank's interval that a paced leader leaves between contributions: a little faster, so that it
    /// is not the one that is waited for. Ours, a first value.
    pub pace: f64,
}

impl Default for Tuning {
    fn default() -> Self {
        Tuning {
            kappa: 2.0,
            lambda: 0.5,
            alpha_share: 1.0 / 16.0,
            near: 0.75,
            near_congested: 0.125,
            pace: 7.0 / 8.0,
        }
    }
}

/// Where a rank stands among the others.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Standing {
    /// δ: 0 for the first, 1 for the last.
    lag: f64,
    /// σ: how far the first is ahead of the last, in asynchronous windows, at most 1.
    spread: f64,
}

impl Standing {
    fn of(feedback: &Feedback, asynchronous: f64) -> Standing {
        let behind = feedback.p_max.saturating_sub(feedback.progress) as f64;
        let between = feedback.p_max.saturating_sub(feedback.p_min) as f64;
        let lag = (behind / between.max(1.0)).min(1.0);
        Standing { lag, spread: (between / asynchronous).min(1.0) }
    }

    /// The factor that is left of a window in congestion of degree α: `1 − α/2 · (1 − λσ(2δ − 1))`.
    fn decrease(self, alpha: f64, lambda: f64) -> f64 {
        1.0 - alpha / 2.0 * (1.0 - lambda * self.spread * (2.0 * self.lag - 1.0))
    }

    /// The exponent of A2TP's slot rule, read from the standing instead of guessed from round trips: 1 for a straggler and
    /// without spread, 0 for a leader, who holds slots while it waits.
    fn straggling(self) -> f64 {
        1.0 - self.spread * (1.0 - self.lag)
    }
}

/// The slowest rank's rate, as the time between its contributions.
#[derive(Clone, Copy, Debug, Default)]
struct Slowest {
    /// When p_min was last looked at, and what it was.
    last: Option<(Time, u64)>,
    /// Averages of how long a sample took, in nanoseconds, and of how far p_min moved in it. Their ratio is the interval. The
    /// average of ratios would be too long, for p_min moves in bursts, and behind a switch most of all.
    elapsed: f64,
    moved: f64,
}

impl Slowest {
    /// Takes a sample when p_min has moved and `span` has passed, unless nothing was to be done meanwhile.
    fn watch(&mut self, feedback: &Feedback, span: Duration) {
        if feedback.delivered >= feedback.next {
            self.last = None;
            return;
        }
        let (since, p_min) = *self.last.get_or_insert((feedback.now, feedback.p_min));
        let (elapsed, moved) = (feedback.now.since(since), feedback.p_min.saturating_sub(p_min));
        if moved == 0 || elapsed.is_zero() || elapsed < span {
            return;
        }
        self.last = Some((feedback.now, feedback.p_min));
        self.elapsed = average(self.elapsed, elapsed.as_nanos() as f64, INTERVAL_SHARE);
        self.moved = average(self.moved, moved as f64, INTERVAL_SHARE);
    }

    /// Nanoseconds; `None` before it moved.
    fn interval(&self) -> Option<f64> {
        (self.moved > 0.0).then(|| self.elapsed / self.moved)
    }
}

/// PA-ATP's two windows and its pace.
#[derive(Clone, Copy, Debug)]
pub struct PaAtp {
    tuning: Tuning,
    most: f64,
    congestion: f64,
    asynchronous: f64,
    /// The congestion window doubles in each round trip, until the path says that it is full.
    slow_start: bool,
    alpha: f64,
    beta: f64,
    epoch: Epoch,
    standing: Standing,
    slowest: Slowest,
    pace: Option<Duration>,
    rtt: Duration,
}

impl PaAtp {
    /// With the default constants.
    #[must_use]
    pub fn new(membership: &Membership) -> PaAtp {
        PaAtp::with_tuning(membership, Tuning::default())
    }

    /// With other constants, for experiments.
    #[must_use]
    pub fn with_tuning(membership: &Membership, tuning: Tuning) -> PaAtp {
        let most = f64::from(membership.window.max(1));
        PaAtp {
            tuning,
            most,
            congestion: INITIAL_WINDOW.min(most),
            asynchronous: most,
            slow_start: true,
            alpha: 0.0,
            beta: 0.0,
            epoch: Epoch::default(),
            standing: Standing::default(),
            slowest: Slowest::default(),
            pace: None,
            rtt: Duration::ZERO,
        }
    }

    /// The asynchronous window in force.
    fn bound(&self, granted: u16) -> f64 {
        if granted == 0 { self.asynchronous } else { self.asynchronous.min(f64::from(granted)) }
    }

    fn end_window(&mut self, counts: Counts, gain: i8) {
        let Tuning { kappa, lambda, alpha_share, .. } = self.tuning;
        let Standing { lag, spread } = self.standing;
        self.alpha = average(self.alpha, ratio(counts.marks, counts.answers), alpha_share);
        // Marks are averaged, as one window's are few. Losses are not: a path without marks must be heeded at once. They
        // count by their share, not as a half for each, for not only full queues lose packets here.
        let lost = ratio(counts.lost, counts.answers.saturating_add(counts.lost));
        let congested = if counts.marks > 0 { self.alpha.max(lost) } else { lost };
        if congested > 0.0 {
            self.slow_start = false;
            self.congestion *= self.standing.decrease(congested, lambda);
        } else if counts.filled && !self.slow_start {
            self.congestion += (1.0 + kappa * spread * lag) * (1.0 + f64::from(gain) * GAIN_UNIT);
        }
        self.beta = average(self.beta, ratio(counts.busy, counts.answers), BUSY_SHARE);
        if counts.busy > 0 && self.beta > COLLISIONS_IGNORED {
            self.asynchronous *= collision_factor(self.beta, self.standing.straggling());
        } else {
            self.asynchronous += ASYNCHRONOUS_INCREASE;
        }
        self.clamp();
    }

    fn clamp(&mut self) {
        self.congestion = self.congestion.clamp(1.0, self.most);
        self.asynchronous = self.asynchronous.clamp(1.0, self.most);
        self.slow_start &= self.congestion < self.most;
    }

    /// A leader near its bound has nothing to win: it goes as the slowest rank does.
    fn set_pace(&mut self, feedback: &Feedback, bound: f64) {
        let ahead = feedback.progress.saturating_sub(feedback.p_min) as f64;
        let Tuning { near, near_congested, .. } = self.tuning;
        let near = if self.alpha > CONGESTED { near_congested } else { near };
        let leads = self.standing.lag <= 0.5 && ahead >= near * bound;
        let interval = self.slowest.interval().filter(|_| leads);
        self.pace = interval.map(|nanoseconds| Duration::from_nanos((nanoseconds * self.tuning.pace) as u64));
    }
}

impl Controller for PaAtp {
    fn name(&self) -> &'static str {
        "pa-atp"
    }

    fn heeds_grants(&self) -> bool {
        true
    }

    fn windows(&self) -> Windows {
        Windows { congestion: self.congestion as u32, asynchronous: self.asynchronous as u32 }
    }

    fn pace(&self) -> Option<Duration> {
        self.pace
    }

    fn on_answer(&mut self, feedback: &Feedback) {
        if let Some(rtt) = feedback.rtt {
            self.rtt = rtt;
        }
        let bound = self.bound(feedback.granted);
        self.standing = Standing::of(feedback, bound);
        self.slowest.watch(feedback, self.rtt);
        self.set_pace(feedback, bound);
        let under_way = feedback.next.saturating_sub(feedback.through);
        let filled =
            under_way.saturating_add(u64::from(feedback.chunks_through)) as f64 >= self.congestion - 1.0;
        self.epoch.count(feedback, filled);
        if self.slow_start && filled && !feedback.ecn_echo {
            self.congestion += f64::from(feedback.chunks_through);
            self.clamp();
        }
        if let Some(counts) = self.epoch.turn(feedback.through, feedback.next) {
            self.end_window(counts, feedback.gain);
        }
    }

    fn on_losses(&mut self, _: Time, requests: u32) {
        self.slow_start = false;
        self.epoch.lose(requests);
    }
}

#[cfg(test)]
mod tests {
    use super::super::laws::{MEMBERSHIP, feedback};
    use super::*;

    const CLEAN: Counts = Counts { answers: 40, marks: 0, busy: 0, lost: 0, filled: true };
    const MARKED: Counts = Counts { marks: 40, ..CLEAN };
    const LEADER: Standing = Standing { lag: 0.0, spread: 1.0 };
    const STRAGGLER: Standing = Standing { lag: 1.0, spread: 1.0 };

    /// Past its slow start, in the middle of its range.
    fn settled(standing: Standing) -> PaAtp {
        PaAtp { congestion: 20.0, slow_start: false, standing, ..PaAtp::new(&MEMBERSHIP) }
    }

    #[test]
    fn a_straggler_grows_faster_and_nobody_stands_still() {
        let grown = |standing, gain| {
            let mut controller = settled(standing);
            controller.end_window(CLEAN, gain);
            controller.congestion - 20.0
        };
        assert_eq!([grown(LEADER, 0), grown(STRAGGLER, 0)], [1.0, 3.0]);
        assert_eq!(grown(Standing { lag: 1.0, spread: 0.0 }, 0), 1.0);
        assert_eq!([grown(STRAGGLER, 64), grown(STRAGGLER, -128)], [4.5, 0.0]);
    }

    #[test]
    fn a_leader_yields_more_to_marks_and_to_losses() {
        let left = |standing| {
            let mut marked = PaAtp { alpha: 1.0, ..settled(standing) };
            marked.end_window(MARKED, 0);
            let mut lossy = settled(standing);
            lossy.end_window(Counts { answers: 0, lost: 40, ..CLEAN }, 0);
            [marked.congestion, lossy.congestion]
        };
        let level = Standing { lag: 0.5, spread: 0.0 };
        assert_eq!([left(LEADER), left(level), left(STRAGGLER)], [[5.0; 2], [10.0; 2], [15.0; 2]]);
    }

    #[test]
    fn few_marks_and_losses_cost_little() {
        let left = |counts| {
            let mut controller = settled(Standing::default());
            controller.end_window(counts, 0);
            controller.congestion
        };
        let (marked, lossy) = (left(Counts { marks: 1, ..CLEAN }), left(Counts { lost: 1, ..CLEAN }));
        assert!(marked > 19.97 && marked < 20.0 && lossy > 19.7 && lossy < 19.8, "{marked} {lossy}");
    }

    #[test]
    fn busy_takes_the_asynchronous_window_of_leaders_first() {
        let busy = Counts { busy: 40, ..CLEAN };
        let left = |standing| {
            let mut controller = settled(standing);
            controller.end_window(busy, 0);
            controller.end_window(busy, 0);
            controller.asynchronous
        };
        assert!(left(LEADER) < 16.0 && left(STRAGGLER) > 50.0, "{} {}", left(LEADER), left(STRAGGLER));
    }

    #[test]
    fn a_window_that_is_not_filled_does_not_grow() {
        let mut controller = settled(STRAGGLER);
        controller.end_window(Counts { filled: false, ..CLEAN }, 0);
        assert_eq!(controller.congestion, 20.0);
    }

    #[test]
    fn only_a_leader_near_its_bound_paces_itself() {
        let mut controller = PaAtp::new(&MEMBERSHIP);
        let mut answer = |now, p_min, progress, p_max| {
            let rtt = Some(Duration::from_micros(30));
            let next = progress + 8;
            let now = Time(now);
            controller.on_answer(&Feedback { now, rtt, p_min, p_max, progress, next, ..feedback() });
            controller.pace()
        };
        // The slowest rank makes a chunk in ten microseconds.
        assert_eq!(answer(1_000, 10, 40, 40), None);
        assert_eq!(answer(1_100, 20, 60, 60), None, "40 of 64 chunks ahead");
        assert_eq!(answer(1_200, 30, 80, 80), Some(Duration::from_nanos(8_750)));
        assert_eq!(answer(1_300, 40, 88, 88), Some(Duration::from_nanos(8_750)));
        assert_eq!(answer(1_400, 50, 60, 110), None, "a straggler never");
    }

    #[test]
    fn a_leader_paces_itself_earlier_on_a_congested_path() {
        for (alpha, paced) in [(0.0, false), (0.5, true)] {
            let mut controller = PaAtp { alpha, ..settled(LEADER) };
            (controller.slowest.elapsed, controller.slowest.moved) = (10_000.0, 1.0);
            let progress = 20;
            controller.set_pace(&Feedback { progress, p_min: 10, ..feedback() }, 64.0);
            assert_eq!(controller.pace.is_some(), paced, "10 of 64 chunks ahead, α {alpha}");
        }
    }

    /// p_min of 31 chunks in 25 µs, one in 20 and the others in 5; then nothing was to be done for a second.
    #[test]
    fn bursts_and_pauses_do_not_make_the_slowest_rank_slower() {
        let mut slowest = Slowest::default();
        let (mut now, mut p_min) = (0, 0);
        for _ in 0..20 {
            for (span, chunks) in [(20, 1), (5, 30)] {
                (now, p_min) = (now + span, p_min + chunks);
                let next = p_min + 64;
                slowest.watch(&Feedback { now: Time(now), p_min, next, ..feedback() }, Duration::ZERO);
            }
        }
        let interval = slowest.interval().unwrap();
        assert!((500.0..1_100.0).contains(&interval), "{interval} ns, 806 in the long run");
        slowest
            .watch(&Feedback { now: Time(now), p_min, delivered: 9, next: 9, ..feedback() }, Duration::ZERO);
        let next = p_min + 99;
        for after in [1_000_000, 1_000_020] {
            let now = Time(now + after);
            p_min += 10;
            slowest.watch(&Feedback { now, p_min, next, ..feedback() }, Duration::ZERO);
        }
        assert!(slowest.interval().unwrap() < 1_500.0, "{:?}", slowest.interval());
    }

    /// What only a switch has acknowledged fills the congestion window, and does not open it.
    #[test]
    fn what_a_switch_acknowledged_is_still_under_way() {
        let grown = |through, chunks_through| {
            let mut controller = PaAtp::new(&MEMBERSHIP);
            let (progress, next) = (10, 10);
            controller.on_answer(&Feedback { progress, through, next, chunks_through, ..feedback() });
            controller.congestion - INITIAL_WINDOW
        };
        assert_eq!([grown(0, 0), grown(5, 5)], [0.0, 5.0]);
    }

    #[test]
    fn starts_fast_until_the_path_is_full() {
        let mut controller = PaAtp::new(&MEMBERSHIP);
        for trip in 0..3u64 {
            let next = 10 * (trip + 2);
            let (through, chunks_through) = (10 * (trip + 1), 10);
            controller.on_answer(&Feedback { through, next, chunks_through, ..feedback() });
        }
        assert_eq!(controller.congestion, 30.0, "20 under way do not fill 30");
        controller.on_losses(Time(0), 1);
        assert_eq!((controller.slow_start, controller.epoch.turn(40, 40).map(|c| c.lost)), (false, Some(1)));
    }
}
