//! Drives a transport worker over a driver: one thread, no allocation for each packet.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use paatp_common::wire::HEADER_BYTES;
use paatp_transport::{Event, OperationError, Tensor, Time, Worker};
use thiserror::Error;

use crate::engine::{fitting_lanes, ip_and_udp_bytes};

use super::driver::{BATCH, Driver};

/// Most batches taken from the driver's queue at the end: more than it holds.
const MOST_DRAINED: usize = 256;

/// Longest sleep, so that an operation without a deadline cannot make the driver deaf.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// Driving failed for a reason that sending again does not mend.
#[derive(Debug, Error)]
pub enum DriveError {
    /// A datagram does not fit the way.
    #[error(
        "packets of this job ({bytes} bytes with all headers) do not fit the MTU of {mtu} on the way to the aggregator; raise the MTU on the whole way, or run the job with --lanes {fitting} or less"
    )]
    TooLarge {
        /// Bytes of the IP packet.
        bytes: u32,
        /// The MTU as far as known.
        mtu: u32,
        /// Lanes that would fit.
        fitting: u32,
    },
    /// The socket failed.
    #[error("the socket failed; see `dmesg` and the limits of this container")]
    Socket(#[source] io::Error),
}

/// How an operation ended.
#[derive(Debug)]
pub struct Outcome {
    /// The result, or why there is none.
    pub result: Result<Vec<Tensor>, OperationError>,
    /// Every rank had everything when this one left.
    pub complete: bool,
    /// The last error that the network reported.
    pub trouble: Option<io::Error>,
}

/// The transport's clock: monotonic, from the driver's start.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Default for Clock {
    fn default() -> Clock {
        Clock(Instant::now())
    }
}

impl Clock {
    /// Now.
    #[must_use]
    pub fn now(self) -> Time {
        Time(u64::try_from(self.0.elapsed().as_micros()).unwrap_or(u64::MAX))
    }
}

/// The way to an aggregator, as far as lengths are concerned.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    /// The aggregator.
    pub aggregator: IpAddr,
    /// MTU in bytes, as the kernel knows it.
    pub mtu: u32,
}

impl Path {
    /// Tests whether chunks of that many lanes fit the way.
    ///
    /// # Errors
    /// If not.
    pub fn check_lanes(self, lanes: u16) -> Result<(), DriveError> {
        let payload = 4 * u32::from(lanes) + HEADER_BYTES as u32;
        let bytes = ip_and_udp_bytes(self.aggregator) + payload;
        if bytes > self.mtu { Err(self.too_large(bytes)) } else { Ok(()) }
    }

    fn too_large(self, bytes: u32) -> DriveError {
        DriveError::TooLarge {
            bytes,
            mtu: self.mtu,
            fitting: fitting_lanes(ip_and_udp_bytes(self.aggregator), self.mtu),
        }
    }
}

/// A worker, its driver and what the network has complained of.
struct Loop<'a, D> {
    worker: &'a mut Worker,
    driver: &'a mut D,
    path: Path,
    clock: Clock,
    trouble: Option<io::Error>,
}

/// Runs the one operation that was queued, then leaves: also after a failure, for the other ranks may have to learn of it
/// from this one. `observe` is called often and has to be quick.
///
/// # Errors
/// If the socket fails or datagrams are too large; whatever the operation ends with is in the outcome.
pub fn drive<D: Driver>(
    worker: &mut Worker,
    driver: &mut D,
    path: Path,
    clock: Clock,
    observe: &mut dyn FnMut(&Worker),
) -> Result<Outcome, DriveError> {
    let mut all = Loop { worker, driver, path, clock, trouble: None };
    let mut result = None;
    loop {
        let more_to_receive = all.receive()?;
        let now = clock.now();
        if all.worker.poll_timeout().is_some_and(|deadline| deadline <= now) {
            all.worker.handle_timeout(now);
        }
        while let Some(event) = all.worker.poll_event() {
            match event {
                Event::Done { tensors, .. } => {
                    result = Some(Ok(tensors));
                    all.worker.leave(now);
                }
                Event::Failed { error, .. } => {
                    result = Some(Err(error));
                    all.worker.leave(now);
                }
                Event::Left { complete } => {
                    all.drain()?;
                    let result = result.unwrap_or(Err(OperationError::Over));
                    return Ok(Outcome { result, complete, trouble: all.trouble });
                }
            }
        }
        let more_to_send = all.send()?;
        observe(all.worker);
        if !more_to_receive && !more_to_send {
            all.wait()?;
        }
    }
}

impl<D: Driver> Loop<'_, D> {
    /// Sends what there is to send, up to a batch. Returns true if there may be more.
    fn send(&mut self) -> Result<bool, DriveError> {
        let (mut more, mut pushed) = (true, false);
        for _ in 0..BATCH {
            let Some(room) = self.driver.room() else { break };
            let Some(transmit) = self.worker.poll_transmit(self.clock.now(), room) else {
                more = false;
                break;
            };
            self.driver.push(transmit.len, transmit.seq.0);
            pushed = true;
        }
        match self.driver.flush() {
            // Where there was no room and still is none, there is nothing to do but wait.
            Ok(all_gone) => Ok(more && all_gone && (pushed || self.driver.room().is_some())),
            Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) => {
                let bytes = self.worker.datagram_bytes() as u32 + ip_and_udp_bytes(self.path.aggregator);
                Err(self.path.too_large(bytes))
            }
            // Lost like any other: the transport sends it again. Without room for more there is only waiting.
            Err(error) => self.note(error).map(|()| pushed || self.driver.room().is_some()),
        }
    }

    /// Hands in what has arrived, up to a batch. Returns true if there may be more.
    fn receive(&mut self) -> Result<bool, DriveError> {
        // One time for the batch: it is there already.
        let (worker, now) = (&mut *self.worker, self.clock.now());
        match self.driver.receive(&mut |datagram, is_marked| {
            if is_marked {
                worker.handle_marked_datagram(now, datagram);
            } else {
                worker.handle_datagram(now, datagram);
            }
        }) {
            Ok(more) => Ok(more),
            Err(error) => self.note(error).map(|()| true),
        }
    }

    /// Hands in what arrived before the end, so that it is counted.
    fn drain(&mut self) -> Result<(), DriveError> {
        self.driver.stop();
        for _ in 0..MOST_DRAINED {
            if !self.receive()? {
                break;
            }
        }
        Ok(())
    }

    /// Keeps an error that the network reported; others end the drive.
    fn note(&mut self, error: io::Error) -> Result<(), DriveError> {
        if error.kind() == io::ErrorKind::Interrupted {
            return Ok(());
        }
        if is_network_trouble(&error) {
            self.trouble = Some(error);
            return Ok(());
        }
        Err(DriveError::Socket(error))
    }

    /// Sleeps until the transport's deadline or a datagram.
    fn wait(&mut self) -> Result<(), DriveError> {
        let now = self.clock.now();
        let sleep = self.worker.poll_timeout().map_or(LONGEST_SLEEP, |deadline| deadline.since(now));
        let reported = self.driver.wait(sleep.min(LONGEST_SLEEP));
        reported.map_err(DriveError::Socket)?.map_or(Ok(()), |error| self.note(error))
    }
}

/// Errors that come from the way, not from this host's socket.
fn is_network_trouble(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(
            libc::ECONNREFUSED
                | libc::EHOSTUNREACH
                | libc::ENETUNREACH
                | libc::EHOSTDOWN
                | libc::ENETDOWN
                | libc::EPROTO
                | libc::ENOPROTOOPT
                | libc::EMSGSIZE
                | libc::ENOBUFS
                | libc::EPERM
                | libc::EACCES
        )
    )
}

/// What an error that the network reported means, and what to look at.
#[must_use]
pub fn trouble_in_words(error: &io::Error, aggregator: IpAddr) -> String {
    // Kinds have no name for these two.
    match error.raw_os_error() {
        Some(libc::EMSGSIZE) => {
            return format!(
                "packets are too long for the way to {aggregator}: see its MTU with `ip route get {aggregator}` and `ip link`, and raise it, or lower the job's lanes"
            );
        }
        Some(libc::ENOBUFS) => {
            return format!(
                "this host had no room to send packets to {aggregator}, or an interface on the way has a smaller MTU; see `ip -s link` and the MTU of all interfaces on the way"
            );
        }
        _ => {}
    }
    match error.kind() {
        io::ErrorKind::ConnectionRefused => format!(
            "{aggregator} answered that nobody takes packets at the port: they reached its network stack instead of \
             the XDP program; is `paatp run` attached to the interface that they arrive on?"
        ),
        io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable | io::ErrorKind::NetworkDown => {
            format!(
                "the network reported that {aggregator} cannot be reached; see `ip route get {aggregator}` and the links on the way"
            )
        }
        io::ErrorKind::PermissionDenied => {
            "a firewall on this host or on the way forbids the packets; allow UDP to the aggregator's ports"
                .into()
        }
        _ => format!("the network reported: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_trouble_is_told_from_broken_sockets() {
        for number in [libc::ECONNREFUSED, libc::ENETUNREACH, libc::EPERM, libc::ENOBUFS] {
            assert!(is_network_trouble(&io::Error::from_raw_os_error(number)));
        }
        assert!(!is_network_trouble(&io::Error::from_raw_os_error(libc::EBADF)));
    }

    #[test]
    fn trouble_has_advice() {
        let aggregator = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
        let text = |number| trouble_in_words(&io::Error::from_raw_os_error(number), aggregator);
        for (number, words) in [
            (libc::ECONNREFUSED, "paatp run"),
            (libc::EHOSTUNREACH, "ip route get"),
            (libc::EMSGSIZE, "lower the job's lanes"),
            (libc::ENOBUFS, "MTU"),
        ] {
            assert!(text(number).contains("10.0.0.1") && text(number).contains(words), "{}", text(number));
        }
        assert!(text(libc::EPROTO).contains("Protocol error"));
    }
}
