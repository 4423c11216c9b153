//! What holds for every controller.

use alloc::boxed::Box;
use core::time::Duration;

use proptest::prelude::*;

use super::{Algorithm, Controller, Feedback, Windows};
use crate::membership::Membership;
use crate::time::Time;

pub(super) const MEMBERSHIP: Membership = Membership {
    job: 0,
    generation: 1,
    nonce: 2,
    rank: 0,
    world: 4,
    lanes: 352,
    window: 64,
    slots: 256,
    seating: None,
};

/// An answer that says nothing.
pub(super) fn feedback() -> Feedback {
    Feedback {
        now: Time(0),
        rtt: None,
        ecn_echo: false,
        busy: false,
        p_min: 0,
        p_max: 0,
        progress: 0,
        through: 0,
        delivered: 0,
        next: 0,
        granted: 0,
        gain: 0,
        chunks_through: 0,
    }
}

fn membership(window: u16) -> Membership {
    Membership { window, slots: u32::from(window).next_power_of_two() * 2, ..MEMBERSHIP }
}

/// Any answer, also one that contradicts itself.
fn any_feedback() -> impl Strategy<Value = Feedback> {
    let position = || prop_oneof![0..200u64, Just(u64::MAX), any::<u64>()];
    let flags = (any::<bool>(), any::<bool>(), any::<u16>(), any::<i8>(), any::<u32>());
    let times = (any::<u64>(), proptest::option::of(prop_oneof![0..1000u64, any::<u64>()]));
    (times, flags, proptest::array::uniform6(position())).prop_map(|((now, rtt), flags, at)| {
        let (ecn_echo, busy, granted, gain, chunks_through) = flags;
        let [p_min, p_max, progress, delivered, next, through] = at;
        Feedback {
            now: Time(now),
            rtt: rtt.map(Duration::from_micros),
            ecn_echo,
            busy,
            p_min,
            p_max,
            progress,
            through,
            delivered,
            next,
            granted,
            gain,
            chunks_through,
        }
    })
}

fn is_sane(Windows { congestion, asynchronous }: Windows, window: u16) -> bool {
    let within = 1..=u32::from(window);
    within.contains(&asynchronous) && (within.contains(&congestion) || congestion == u32::MAX)
}

proptest! {
    /// Whatever the answers say, windows stay between 1 and W (a NaN would be 0), and the same answers give the same.
    #[test]
    fn windows_stay_in_their_bounds_and_are_reproducible(
        window in 1..600u16,
        answers in proptest::collection::vec((any_feedback(), proptest::option::of(1..9u32)), 0..60),
    ) {
        for algorithm in Algorithm::ALL {
            let run = || {
                let mut controller = algorithm.controller(&membership(window));
                let mut seen = vec![(controller.windows(), controller.pace())];
                for (feedback, losses) in &answers {
                    controller.on_answer(feedback);
                    losses.iter().for_each(|lost| controller.on_losses(feedback.now, *lost));
                    seen.push((controller.windows(), controller.pace()));
                }
                seen
            };
            let seen = run();
            prop_assert!(seen.iter().all(|(windows, _)| is_sane(*windows, window)), "{algorithm}: {seen:?}");
            prop_assert_eq!(seen, run());
        }
    }
}

/// One rank that always has something to send, with answers one round trip later.
struct Path {
    controller: Box<dyn Controller>,
    now: u64,
    done: u64,
}

impl Path {
    fn new(algorithm: Algorithm) -> Path {
        Path { controller: algorithm.controller(&MEMBERSHIP), now: 1_000, done: 0 }
    }

    /// One round trip: a window goes out, and all of it comes back.
    fn trip(&mut self, change: impl Fn(&mut Feedback)) -> u32 {
        self.now += 20;
        let Windows { congestion, asynchronous } = self.controller.windows();
        let chunks = congestion.min(asynchronous);
        let next = self.done + u64::from(chunks);
        for _ in 0..chunks {
            self.done += 1;
            let mut feedback = Feedback {
                now: Time(self.now),
                rtt: Some(Duration::from_micros(20)),
                p_min: self.done,
                p_max: self.done,
                progress: self.done,
                through: self.done,
                delivered: self.done,
                next,
                granted: 64,
                chunks_through: 1,
                ..feedback()
            };
            change(&mut feedback);
            self.controller.on_answer(&feedback);
        }
        chunks
    }
}

/// After marks, refusals and losses every window opens again.
#[test]
fn windows_recover() {
    for algorithm in Algorithm::ALL {
        let mut path = Path::new(algorithm);
        for _ in 0..50 {
            path.trip(|feedback| (feedback.ecn_echo, feedback.busy) = (true, true));
            path.controller.on_losses(Time(path.now), 3);
        }
        let least = path.trip(|_| ());
        let chunks = (0..200).map(|_| path.trip(|_| ())).max();
        assert_eq!(chunks, Some(64), "{algorithm} from {least}");
        let reacts = !matches!(algorithm, Algorithm::Fixed | Algorithm::SwitchMl);
        assert!(!reacts || least < 8, "{algorithm} kept {least} chunks in congestion");
    }
}

/// Congestion marks that begin at 24 chunks: a window that reacts ends up around there, and stays.
#[test]
fn windows_find_the_path() {
    for algorithm in [Algorithm::PaAtp, Algorithm::Atp, Algorithm::A2tp] {
        let mut path = Path::new(algorithm);
        let mut sum = 0;
        for trip in 0..600 {
            let Windows { congestion, asynchronous } = path.controller.windows();
            let full = congestion.min(asynchronous) > 24;
            let chunks = path.trip(|feedback| feedback.ecn_echo = full);
            sum += if trip >= 200 { chunks } else { 0 };
        }
        let mean = f64::from(sum) / 400.0;
        assert!((15.0..=26.0).contains(&mean), "{algorithm}: {mean} chunks");
    }
}

/// A straggler and a leader on one path, marked alike: PA-ATP's straggler gets more, the others' does not.
#[test]
fn progress_decides_who_yields_in_pa_atp_only() {
    for algorithm in [Algorithm::PaAtp, Algorithm::Atp, Algorithm::A2tp] {
        let (mut leader, mut straggler) = (Path::new(algorithm), Path::new(algorithm));
        let (mut ahead, mut behind) = (0, 0);
        for trip in 0..400 {
            let window = |path: &Path| {
                path.controller.windows().congestion.min(path.controller.windows().asynchronous)
            };
            let full = window(&leader) + window(&straggler) > 48;
            let leads = leader.trip(|feedback| {
                feedback.ecn_echo = full;
                feedback.p_min = feedback.progress.saturating_sub(64);
            });
            let lags = straggler.trip(|feedback| {
                feedback.ecn_echo = full;
                feedback.p_max = feedback.progress + 64;
            });
            if trip >= 100 {
                (ahead, behind) = (ahead + leads, behind + lags);
            }
        }
        if algorithm == Algorithm::PaAtp {
            assert!(behind > ahead * 3 / 2, "{ahead} and {behind}");
        } else {
            assert_eq!(ahead, behind, "{algorithm}");
        }
    }
}
