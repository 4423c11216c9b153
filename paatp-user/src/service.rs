//! What a service manager is told (`sd_notify`, systemd's `Type=notify`), and when.
//!
//! The watchdog is fed by the daemon's own work: each of its loops leaves its mark when it has gone round, and only while
//! all marks are fresh is the watchdog fed. A loop that hangs stops the feeding, whatever the others do.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use sd_notify::NotifyState;
use tracing::debug;

/// A mark is fresh for so many of its loop's intervals; at least [`MIN_FRESH`].
const FRESH_ROUNDS: u32 = 4;
const MIN_FRESH: Duration = Duration::from_secs(2);

/// Longest time that is left to take the program off and write counters.
const DETACHING: Duration = Duration::from_secs(10);

/// The status line changes at most so often.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);

/// The daemon's loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loop {
    /// Looks at how far the jobs are.
    Tick,
    /// Stamps windows and gains.
    Pace,
    /// Looks at the interface.
    Watch,
}

const LOOPS: usize = 3;

/// Marks of the loops.
#[derive(Debug)]
struct Pulse {
    fresh: [Duration; LOOPS],
    marks: [Cell<Instant>; LOOPS],
}

impl Pulse {
    fn new(now: Instant, intervals: [Duration; LOOPS]) -> Pulse {
        let fresh = intervals.map(|interval| (interval * FRESH_ROUNDS).max(MIN_FRESH));
        Pulse { fresh, marks: std::array::from_fn(|_| Cell::new(now)) }
    }

    fn mark(&self, which: Loop, now: Instant) {
        if let Some(mark) = self.marks.get(which as usize) {
            mark.set(now);
        }
    }

    /// All loops have gone round lately.
    fn beats(&self, now: Instant) -> bool {
        self.marks.iter().zip(self.fresh).all(|(mark, fresh)| now.duration_since(mark.get()) <= fresh)
    }
}

/// The daemon as its service manager sees it. Without one, nothing is sent.
#[derive(Debug)]
pub struct Service {
    pulse: Pulse,
    /// Time between two feedings: half of what the manager allows.
    feeding: Option<Duration>,
    fed: Cell<Option<Instant>>,
    told: RefCell<(Option<Instant>, String)>,
    send: fn(&[NotifyState<'_>]) -> std::io::Result<()>,
}

impl Service {
    /// As the environment says (`NOTIFY_SOCKET`, `WATCHDOG_USEC`, `WATCHDOG_PID`), for loops that go round in these times.
    #[must_use]
    pub fn new(tick: Duration, pace: Duration, watch: Duration) -> Service {
        Service {
            pulse: Pulse::new(Instant::now(), [tick, pace, watch]),
            feeding: sd_notify::watchdog_enabled().map(|allowed| allowed / 2),
            fed: Cell::new(None),
            told: RefCell::default(),
            send: sd_notify::notify,
        }
    }

    /// A loop has gone round.
    pub fn mark(&self, which: Loop) {
        self.pulse.mark(which, Instant::now());
    }

    /// Attached, and serving.
    pub fn ready(&self, status: &str) {
        self.tell(&[NotifyState::Ready, NotifyState::Status(status)]);
    }

    /// On the way out, which may take that long.
    pub fn stopping(&self, patience: Duration) {
        let time = patience.saturating_add(DETACHING);
        self.tell(&[
            NotifyState::Stopping,
            // An hour and more than eleven minutes are the most that there is.
            NotifyState::ExtendTimeoutUsec(u32::try_from(time.as_micros()).unwrap_or(u32::MAX)),
            NotifyState::Status("stopping: waiting for what runs"),
        ]);
    }

    /// Feeds the watchdog if it is time and all loops have gone round; tells a status that has changed. To be called by
    /// the loop [`Loop::Tick`].
    pub fn beat(&self, status: impl FnOnce() -> String) {
        self.beat_at(Instant::now(), status);
    }

    fn beat_at(&self, now: Instant, status: impl FnOnce() -> String) {
        self.pulse.mark(Loop::Tick, now);
        let is_time =
            |last: Option<Instant>, interval| last.is_none_or(|last| now.duration_since(last) >= interval);
        if self.feeding.is_some_and(|feeding| is_time(self.fed.get(), feeding)) && self.pulse.beats(now) {
            self.fed.set(Some(now));
            self.tell(&[NotifyState::Watchdog]);
        }
        let mut told = self.told.borrow_mut();
        if is_time(told.0, STATUS_INTERVAL) {
            let status = status();
            if told.1 != status {
                self.tell(&[NotifyState::Status(&status)]);
            }
            *told = (Some(now), status);
        }
    }

    fn tell(&self, states: &[NotifyState<'_>]) {
        if let Err(error) = (self.send)(states) {
            debug!("the service manager was not told: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    thread_local! {
        static SENT: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }

    fn sent() -> Vec<String> {
        SENT.with_borrow_mut(std::mem::take)
    }

    fn service(allowed: u64) -> (Service, Instant) {
        let now = Instant::now();
        let service = Service {
            pulse: Pulse::new(now, [250, 100, 1000].map(Duration::from_millis)),
            feeding: Some(Duration::from_secs(allowed) / 2),
            fed: Cell::new(None),
            told: RefCell::default(),
            send: |states| {
                SENT.with_borrow_mut(|sent| sent.extend(states.iter().map(ToString::to_string)));
                Ok(())
            },
        };
        (service, now)
    }

    /// Time passes; the loops that do not hang go round.
    fn go(service: &Service, from: Instant, seconds: u32, hanging: Option<Loop>) -> Instant {
        let mut now = from;
        for _ in 0..seconds * 4 {
            now += Duration::from_millis(250);
            for which in [Loop::Pace, Loop::Watch] {
                if hanging != Some(which) {
                    service.pulse.mark(which, now);
                }
            }
            if hanging != Some(Loop::Tick) {
                service.beat_at(now, || "fine".into());
            }
        }
        now
    }

    #[test]
    fn the_watchdog_is_fed_twice_in_its_time() {
        let (service, now) = service(10);
        go(&service, now, 20, None);
        assert_eq!(sent().iter().filter(|line| *line == "WATCHDOG=1").count(), 4);
    }

    /// Whichever loop hangs, the others going on: after the time that its mark is fresh, nothing is fed.
    #[test]
    fn a_loop_that_hangs_stops_the_feeding() {
        for hanging in [Loop::Tick, Loop::Pace, Loop::Watch] {
            let (service, now) = service(1);
            let now = go(&service, now, 10, None);
            assert!(sent().iter().any(|line| line == "WATCHDOG=1"), "{hanging:?}");
            let now = go(&service, now, 5, Some(hanging));
            sent();
            let now = go(&service, now, 60, Some(hanging));
            assert_eq!(sent(), Vec::<String>::new(), "{hanging:?}");
            go(&service, now, 5, None);
            assert!(sent().iter().any(|line| line == "WATCHDOG=1"), "{hanging:?}: goes on again");
        }
    }

    #[test]
    fn the_status_is_told_when_it_changes() {
        let (service, now) = service(1_000_000);
        let tell = |seconds: u64, text: &str| {
            service.beat_at(now + Duration::from_secs(seconds), || text.into());
            sent().into_iter().filter(|line| line.starts_with("STATUS=")).collect::<Vec<_>>()
        };
        assert_eq!(tell(1, "a"), ["STATUS=a"]);
        assert_eq!(tell(2, "a"), Vec::<String>::new());
        assert_eq!(tell(2, "b"), Vec::<String>::new(), "not twice in a second");
        assert_eq!(tell(3, "b"), ["STATUS=b"]);
        service.ready("r");
        service.stopping(Duration::from_secs(5));
        assert_eq!(sent()[..4], ["READY=1", "STATUS=r", "STOPPING=1", "EXTEND_TIMEOUT_USEC=15000000"]);
    }
}
