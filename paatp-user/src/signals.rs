//! Signals that the daemon heeds, and the way from the first one that ends it to the end.
//!
//! SIGTERM, SIGINT: takes nothing new, waits for what runs, ends. Another one: ends at once. SIGUSR1: counters. SIGHUP: said
//! to do nothing (the default would be to die). All of them work for process 1 of a container as well: handlers are set.

use std::time::{Duration, Instant};

use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::{info, warn};

use crate::control::server::Control;
use crate::daemon::DaemonError;
use crate::duration::{self, DurationError};
use crate::service::Service;

/// Exit status after the second signal: 128 and the signal's number, as shells have it.
const SIGNAL_STATUS: i32 = 128;

/// Time between two looks at whether jobs still run.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// The signals that the daemon heeds.
pub struct Signals {
    /// Those that end it.
    pub end: EndSignals,
    /// The one that asks for counters.
    pub dump: Signal,
    /// The one that others reload at.
    pub hangup: Signal,
}

/// Those that end it.
pub struct EndSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    /// Takes them over.
    ///
    /// # Errors
    /// If the system does not let us.
    pub fn new() -> Result<Signals, DaemonError> {
        let heed =
            |kind| signal(kind).map_err(|source| DaemonError::System { what: "take over signals", source });
        let end = EndSignals {
            interrupt: heed(SignalKind::interrupt())?,
            terminate: heed(SignalKind::terminate())?,
        };
        Ok(Signals { end, dump: heed(SignalKind::user_defined1())?, hangup: heed(SignalKind::hangup())? })
    }
}

impl EndSignals {
    /// The number of the next one.
    async fn next(&mut self) -> i32 {
        tokio::select! {
            _ = self.interrupt.recv() => libc::SIGINT,
            _ = self.terminate.recv() => libc::SIGTERM,
        }
    }

    /// Waits for the first, then until nothing runs any more or `patience` is over. From the first on, another one ends the
    /// process at once.
    pub async fn drained(&mut self, control: &Control, patience: Duration, service: &Service) {
        let name = if self.next().await == libc::SIGINT { "SIGINT" } else { "SIGTERM" };
        service.stopping(patience);
        control.drain(true);
        let begin = Instant::now();
        let running = control.running_jobs();
        if running > 0 && !patience.is_zero() {
            info!(running, ?patience, "{name}: taking nothing new, waiting for what runs");
        }
        // Once in any case: the answers to ranks that waited are on their way.
        let mut pause = LOOK_INTERVAL;
        loop {
            tokio::select! {
                number = self.next() => std::process::exit(SIGNAL_STATUS + number),
                () = tokio::time::sleep(pause) => {}
            }
            let left = patience.saturating_sub(begin.elapsed());
            if left.is_zero() || control.running_jobs() == 0 {
                break;
            }
            pause = LOOK_INTERVAL.min(left);
        }
        match control.running_jobs() {
            0 => info!("{name}: detaching"),
            running => warn!(running, "{name}: detaching although jobs run"),
        }
    }

    /// From now on the next one ends the process at once.
    pub fn exit_at_the_next(mut self) {
        tokio::spawn(async move {
            let number = self.next().await;
            std::process::exit(SIGNAL_STATUS + number);
        });
    }
}

/// Says at every SIGHUP that it does nothing here.
pub async fn decline_reloads(hangup: &mut Signal) {
    while hangup.recv().await.is_some() {
        warn!(
            "SIGHUP: settings are read at the start only; jobs are changed with `paatp job`, everything else by a restart"
        );
    }
    std::future::pending().await
}

/// Reads a duration that may be zero.
///
/// # Errors
/// If it is none.
pub fn patience(text: &str) -> Result<Duration, DurationError> {
    match text.trim() {
        "0" | "0s" => Ok(Duration::ZERO),
        _ => duration::parse(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_may_be_none() {
        assert_eq!((patience("0"), patience("0s")), (Ok(Duration::ZERO), Ok(Duration::ZERO)));
        assert_eq!(patience("1.5m"), Ok(Duration::from_secs(90)));
        assert!(patience("-1").is_err() && patience("").is_err());
    }
}
