//! Which driver a worker gets: what was asked for, or the best there is, and a word about it.

use std::error::Error;
use std::io;

use paatp_transport::Worker;
use serde::Serialize;
use thiserror::Error;
use tracing::{info, warn};

use crate::cli::IoName;

use super::drive::{self, Clock, DriveError, Outcome, Path};
use super::driver::Driver as _;
use super::socket::{Buffers, DataSocket};
use super::udp::UdpDriver;
use super::xdp::{AfXdpError, Copies, Mode, Refused, XdpDriver};

/// The driver that was asked for cannot be had.
#[derive(Debug, Error)]
pub enum IoError {
    /// No kernel bypass.
    #[error("kernel bypass (--io af-xdp) cannot be had; --io udp works everywhere")]
    AfXdp(#[from] AfXdpError),
    /// The route is gone.
    #[error("the way to the aggregator is gone; see `ip route` and the interfaces")]
    Udp(#[source] io::Error),
}

/// What a worker got, for its report.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct IoReport {
    /// `af-xdp` or `udp`.
    pub driver: &'static str,
    /// With AF_XDP `zero-copy`, `copy`, or `copy, generic` (the program runs in the stack); with UDP `segmented` (many
    /// datagrams in one message) or `plain`.
    pub mode: &'static str,
    /// Interface, where it was asked for.
    pub interface: Option<String>,
    /// Receive queues with a socket of their own; 0 with UDP.
    pub queues: usize,
    /// System calls made to send, receive and wait.
    pub system_calls: u64,
    /// Answers that AF_XDP had no room for.
    pub dropped: u64,
    /// Why it is not the better driver, or the better mode.
    pub not_better_because: Option<String>,
}

impl IoReport {
    /// As people say it.
    #[must_use]
    pub fn in_words(&self) -> &'static str {
        match (self.driver, self.mode) {
            ("af-xdp", "zero-copy") => "AF_XDP without copies",
            ("af-xdp", _) => "AF_XDP",
            _ => "UDP",
        }
    }
}

/// One of the drivers.
enum Either {
    Udp(Box<UdpDriver>),
    AfXdp(Box<XdpDriver>),
}

/// A driver, and what is to be told of it.
pub struct Io {
    driver: Either,
    report: IoReport,
}

impl Io {
    /// Makes the driver that was asked for, and says what it became.
    ///
    /// # Errors
    /// If it cannot be had; with `auto` only if no driver can be.
    pub fn open(name: IoName, socket: DataSocket, buffers: Buffers) -> Result<Io, IoError> {
        match name {
            IoName::Udp => Io::udp(socket, "--io udp asks for it".into()),
            IoName::AfXdp => {
                let native = XdpDriver::open(socket, buffers, Mode::Native, Copies::Allowed);
                let driver = native.or_else(|refused| match *refused {
                    Refused { error: AfXdpError::Attach { .. }, socket } => {
                        XdpDriver::open(socket, buffers, Mode::Generic, Copies::Allowed)
                    }
                    refused => Err(Box::new(refused)),
                });
                driver.map(Io::af_xdp).map_err(|refused| refused.error.into())
            }
            IoName::Auto => match XdpDriver::open(socket, buffers, Mode::Native, Copies::Refused) {
                Ok(driver) => Ok(Io::af_xdp(driver)),
                Err(refused) => {
                    let Refused { error, socket } = *refused;
                    let reason = with_causes(&error);
                    warn!("no kernel bypass, so packets go through UDP sockets: {reason}");
                    Io::udp(socket, reason)
                }
            },
        }
    }

    fn af_xdp(driver: XdpDriver) -> Io {
        let interface = driver.interface();
        let (mode, not_better_because) = match (driver.is_zero_copy(), driver.mode()) {
            (true, _) => ("zero-copy", None),
            (false, Mode::Native) => {
                ("copy", Some(format!("the driver of `{interface}` has no zero-copy mode")))
            }
            (false, Mode::Generic) => {
                ("copy, generic", Some(format!("the driver of `{interface}` takes no native XDP program")))
            }
        };
        let queues = driver.queues();
        let why = not_better_because.as_deref().unwrap_or("nothing is copied");
        if driver.mode() == Mode::Generic {
            warn!(interface, mode, queues, "packets go through AF_XDP sockets: {why}");
        } else {
            info!(interface, mode, queues, "packets go through AF_XDP sockets: {why}");
        }
        let report = IoReport {
            driver: "af-xdp",
            mode,
            interface: Some(interface.into()),
            queues,
            system_calls: 0,
            dropped: 0,
            not_better_because,
        };
        Io { driver: Either::AfXdp(Box::new(driver)), report }
    }

    fn udp(socket: DataSocket, reason: String) -> Result<Io, IoError> {
        let driver = UdpDriver::new(socket).map_err(IoError::Udp)?;
        info!("packets go through UDP sockets: {reason}");
        let report = IoReport { driver: "udp", not_better_because: Some(reason), ..IoReport::default() };
        Ok(Io { driver: Either::Udp(Box::new(driver)), report })
    }

    /// Drives a worker to its end: see [`drive::drive`].
    ///
    /// # Errors
    /// See there.
    pub fn drive(
        &mut self,
        worker: &mut Worker,
        path: Path,
        clock: Clock,
        observe: &mut dyn FnMut(&Worker),
    ) -> Result<Outcome, DriveError> {
        match &mut self.driver {
            Either::Udp(driver) => drive::drive(worker, driver.as_mut(), path, clock, observe),
            Either::AfXdp(driver) => drive::drive(worker, driver.as_mut(), path, clock, observe),
        }
    }

    /// What is to be told of it.
    #[must_use]
    pub fn report(&self) -> IoReport {
        let mut report = self.report.clone();
        match &self.driver {
            Either::Udp(driver) => {
                report.mode = if driver.segments() { "segmented" } else { "plain" };
                report.system_calls = driver.system_calls();
            }
            Either::AfXdp(driver) => {
                report.dropped = driver.dropped();
                report.system_calls = driver.system_calls();
            }
        }
        report
    }
}

/// An error and its causes in one line.
fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::socket::Target;

    fn open(name: IoName) -> Result<Io, IoError> {
        let Ok(address) = "127.0.0.1:20545".parse() else { panic!("no address") };
        let buffers = Buffers { window: 4, datagram: 1472 };
        let socket = DataSocket::open(Target::new(address, 20545, 1), buffers);
        Io::open(name, socket.unwrap_or_else(|error| panic!("{error}")), buffers)
    }

    #[test]
    fn on_loopback_auto_is_udp_and_says_why() {
        let report = open(IoName::Auto).map(|io| io.report()).unwrap_or_default();
        assert_eq!((report.driver, report.mode), ("udp", "segmented"));
        let reason = report.not_better_because.unwrap_or_default();
        assert!(reason.contains("this host") || reason.contains("object"), "{reason}");
    }

    #[test]
    fn what_was_asked_for_is_not_replaced() {
        let error = open(IoName::AfXdp).err().map(|error| with_causes(&error)).unwrap_or_default();
        assert!(error.contains("--io af-xdp") && error.contains("--io udp"), "{error}");
        let report = open(IoName::Udp).map(|io| io.report()).unwrap_or_default();
        assert_eq!(report.not_better_because.as_deref(), Some("--io udp asks for it"));
    }
}
