//! What a service manager is told (`sd_notify`, systemd's `Type=notify`), and when.
//!
//! The watchdog is fed by the daemon's own work: each of its loops leaves its mark when it has gone round, and only while
//! all marks are fresh is the watchdog fed. A loop that hangs stops the feeding, whatever the others do.

use std::cell::{Cell, RefCell};
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
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

/// Where a service manager listens, if there is one.
const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";

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
    /// The first status, until the manager has taken that the daemon is ready.
    owed: RefCell<Option<String>>,
    send: fn(&[NotifyState<'_>]) -> io::Result<()>,
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
            owed: RefCell::default(),
            send: notify,
        }
    }

    /// A loop has gone round.
    pub fn mark(&self, which: Loop) {
        self.pulse.mark(which, Instant::now());
    }

    /// Attached, and serving. If the manager does not take it, it is told again with each [`Service::beat`].
    pub fn ready(&self, status: &str) {
        let told = self.tell(&[NotifyState::Ready, NotifyState::Status(status)]);
        *self.owed.borrow_mut() = (!told).then(|| status.to_owned());
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
        let owed = self.owed.take();
        if let Some(status) = owed {
            self.ready(&status);
        }
        let is_time =
            |last: Option<Instant>, interval| last.is_none_or(|last| now.duration_since(last) >= interval);
        if self.feeding.is_some_and(|feeding| is_time(self.fed.get(), feeding)) && self.pulse.beats(now) {
            // Without a manager that takes it, it is tried again at the next turn.
            if self.tell(&[NotifyState::Watchdog]) {
                self.fed.set(Some(now));
            }
        }
        let mut told = self.told.borrow_mut();
        if is_time(told.0, STATUS_INTERVAL) {
            let status = status();
            if told.1 == status || self.tell(&[NotifyState::Status(&status)]) {
                told.1 = status;
            }
            told.0 = Some(now);
        }
    }

    /// Says whether the manager took it. Where there is none, nothing is left to be told.
    fn tell(&self, states: &[NotifyState<'_>]) -> bool {
        let sent = (self.send)(states);
        if let Err(error) = &sent {
            debug!("the service manager was not told: {error}");
        }
        sent.is_ok()
    }
}

/// Sends to the manager that the environment names, if there is one. Never waits: a manager that does not read would
/// otherwise hold up the loop that looks after jobs.
fn notify(states: &[NotifyState<'_>]) -> io::Result<()> {
    match std::env::var_os(NOTIFY_SOCKET) {
        Some(place) if !place.is_empty() => send_to(&place, states),
        _ => Ok(()),
    }
}

fn send_to(place: &OsStr, states: &[NotifyState<'_>]) -> io::Result<()> {
    let mut message = String::new();
    for state in states {
        let _ = writeln!(message, "{state}");
    }
    let address = match place.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(place)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    socket.send_to_addr(message.as_bytes(), &address).map(drop)
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
            owed: RefCell::default(),
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

    /// A manager that does not read holds nobody up, and learns the rest when it reads again.
    #[test]
    fn a_manager_that_does_not_read_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
        let path = folder.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap_or_else(|error| panic!("{error}"));
        let send = || send_to(path.as_os_str(), &[NotifyState::Watchdog]);
        let mut sent = 0;
        let refusal = loop {
            match send() {
                Ok(()) => sent += 1,
                Err(error) => break error,
            }
        };
        assert_eq!((refusal.kind(), sent > 0), (io::ErrorKind::WouldBlock, true));
        let mut message = [0; 64];
        assert_eq!(manager.recv(&mut message).ok(), Some("WATCHDOG=1\n".len()));
        assert!(send().is_ok());
        let name = format!("paatp-test-{}", std::process::id());
        let hidden =
            SocketAddr::from_abstract_name(&name).and_then(|address| UnixDatagram::bind_addr(&address));
        assert!(hidden.is_ok() && send_to(OsStr::new(&format!("@{name}")), &[NotifyState::Ready]).is_ok());
    }

    #[test]
    fn what_the_manager_did_not_take_is_told_again() {
        let (mut service, now) = service(10);
        let takes = service.send;
        service.send = |_| Err(io::ErrorKind::WouldBlock.into());
        service.ready("r");
        service.beat_at(now, || "s".into());
        service.send = takes;
        assert_eq!(sent(), Vec::<String>::new());
        service.beat_at(now + Duration::from_secs(1), || "s".into());
        assert_eq!(sent(), ["READY=1", "STATUS=r", "WATCHDOG=1", "STATUS=s"]);
        service.beat_at(now + Duration::from_secs(2), || "s".into());
        assert_eq!(sent(), Vec::<String>::new());
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
