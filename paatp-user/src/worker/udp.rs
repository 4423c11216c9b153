//! Drives a transport worker over a UDP socket: one thread, no allocation for each packet.

use std::io;
use std::time::{Duration, Instant};

use paatp_common::limits::{LANES_PER_BLOCK, WIDE_BLOCKS};
use paatp_common::wire::HEADER_BYTES;
use paatp_transport::{Event, OperationError, Tensor, Time, Transmit, Worker};
use thiserror::Error;

use crate::engine::{fitting_lanes, ip_and_udp_bytes};

use super::socket::DataSocket;

/// Largest datagram of the protocol, in bytes.
const DATAGRAM_BYTES: usize = HEADER_BYTES + WIDE_BLOCKS * LANES_PER_BLOCK * 4;

/// Most datagrams sent or received in a row before the other direction gets its turn.
const BATCH: usize = 64;

/// Most batches taken from the socket's queue at the end: more than it holds.
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
    #[error("the UDP socket failed; see `dmesg` and the limits of this container")]
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
    pub trouble: Option<io::ErrorKind>,
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

/// Tests whether chunks of that many lanes fit the way to the aggregator.
///
/// # Errors
/// If not.
pub fn check_mtu(socket: &DataSocket, lanes: u16) -> Result<(), DriveError> {
    let payload = 4 * u32::from(lanes) + HEADER_BYTES as u32;
    let bytes = ip_and_udp_bytes(socket.aggregator()) + payload;
    if bytes > socket.path_mtu() { Err(too_large(socket, bytes)) } else { Ok(()) }
}

fn too_large(socket: &DataSocket, bytes: u32) -> DriveError {
    let mtu = socket.path_mtu();
    DriveError::TooLarge { bytes, mtu, fitting: fitting_lanes(ip_and_udp_bytes(socket.aggregator()), mtu) }
}

/// A worker, its socket and what is under way between them.
struct Driver<'a> {
    worker: &'a mut Worker,
    socket: &'a DataSocket,
    clock: Clock,
    /// A datagram that the socket had no room for.
    unsent: Option<Transmit>,
    outgoing: Box<[u8]>,
    incoming: Box<[u8]>,
    trouble: Option<io::ErrorKind>,
}

/// Runs the one operation that was queued, then leaves: also after a failure, for the other ranks may have to learn of it
/// from this one. `observe` is called often and has to be quick.
///
/// # Errors
/// If the socket fails or datagrams are too large; whatever the operation ends with is in the outcome.
pub fn drive(
    worker: &mut Worker,
    socket: &DataSocket,
    clock: Clock,
    observe: &mut dyn FnMut(&Worker),
) -> Result<Outcome, DriveError> {
    let buffer = || vec![0; DATAGRAM_BYTES].into_boxed_slice();
    let mut driver =
        Driver { worker, socket, clock, unsent: None, outgoing: buffer(), incoming: buffer(), trouble: None };
    let mut result = None;
    loop {
        driver.receive()?;
        let now = clock.now();
        if driver.worker.poll_timeout().is_some_and(|deadline| deadline <= now) {
            driver.worker.handle_timeout(now);
        }
        while let Some(event) = driver.worker.poll_event() {
            match event {
                Event::Done { tensors, .. } => {
                    result = Some(Ok(tensors));
                    driver.worker.leave(now);
                }
                Event::Failed { error, .. } => {
                    result = Some(Err(error));
                    driver.worker.leave(now);
                }
                Event::Left { complete } => {
                    driver.drain()?;
                    let result = result.unwrap_or(Err(OperationError::Over));
                    return Ok(Outcome { result, complete, trouble: driver.trouble });
                }
            }
        }
        let more = driver.send()?;
        observe(driver.worker);
        driver.wait(more)?;
    }
}

impl Driver<'_> {
    /// Sends what there is to send, up to a batch. Returns true if there may be more.
    fn send(&mut self) -> Result<bool, DriveError> {
        for _ in 0..BATCH {
            let next = match self.unsent.take() {
                Some(unsent) => Some(unsent),
                None => self.worker.poll_transmit(self.clock.now(), &mut self.outgoing),
            };
            let Some(transmit) = next else { return Ok(false) };
            let datagram = self.outgoing.get(..transmit.len).unwrap_or_default();
            match self.socket.send(datagram, transmit.seq.0) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.unsent = Some(transmit);
                    return Ok(false);
                }
                Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) => {
                    let bytes = transmit.len as u32 + ip_and_udp_bytes(self.socket.aggregator());
                    return Err(too_large(self.socket, bytes));
                }
                // Lost like any other: the transport sends it again.
                Err(error) => self.note(error)?,
            }
        }
        Ok(true)
    }

    /// Hands in what has arrived, up to a batch. Returns true if there may be more.
    fn receive(&mut self) -> Result<bool, DriveError> {
        for _ in 0..BATCH {
            match self.socket.receive(&mut self.incoming) {
                Ok(Some(datagram)) => self.worker.handle_datagram(self.clock.now(), datagram),
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => self.note(error)?,
            }
        }
        Ok(true)
    }

    /// Hands in what arrived before the end, so that it is counted.
    fn drain(&mut self) -> Result<(), DriveError> {
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
            self.trouble = Some(error.kind());
            return Ok(());
        }
        Err(DriveError::Socket(error))
    }

    /// Sleeps until the transport's deadline or a datagram; not at all if there is more to send.
    fn wait(&mut self, more: bool) -> Result<(), DriveError> {
        if more {
            return Ok(());
        }
        let now = self.clock.now();
        let sleep = self.worker.poll_timeout().map_or(LONGEST_SLEEP, |deadline| deadline.since(now));
        let reported = self.socket.wait(sleep.min(LONGEST_SLEEP), self.unsent.is_some());
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
pub fn trouble_in_words(kind: io::ErrorKind, aggregator: std::net::IpAddr) -> String {
    match kind {
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
        other => format!("the network reported: {other}"),
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
        let aggregator = std::net::IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
        let text = trouble_in_words(io::ErrorKind::ConnectionRefused, aggregator);
        assert!(text.contains("10.0.0.1") && text.contains("paatp run"), "{text}");
    }
}
