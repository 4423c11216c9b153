//! The worker's UDP socket and its options.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::socket::{MsgFlags, recv};
use nix::sys::time::TimeSpec;
use thiserror::Error;
use tracing::debug;

/// Socket buffers, in bytes: a few windows of answers. The kernel cuts this to `net.core.rmem_max` / `wmem_max`.
const BUFFER_BYTES: libc::c_int = 2 << 20;

/// ECT(0) in the lowest bits of TOS and traffic class: switches may mark instead of drop.
const ECT0: libc::c_int = 0b10;

/// `linux/udp.h`, which libc does not name: IPv6 without UDP checksums.
const UDP_NO_CHECK6_TX: libc::c_int = 101;
const UDP_NO_CHECK6_RX: libc::c_int = 102;

/// Most entries taken from the error queue at once.
const ERROR_BATCH: usize = 16;

/// The socket could not be made.
#[derive(Debug, Error)]
pub enum SocketError {
    /// There is no way to the aggregator.
    #[error("there is no route to {aggregator}; see `ip route get {aggregator}`")]
    NoRoute {
        /// The aggregator.
        aggregator: IpAddr,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// An option was refused.
    #[error("cannot set the socket option {option}; this kernel is older than paatp needs (5.18)")]
    Option {
        /// The option.
        option: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Anything else.
    #[error(
        "cannot open a UDP socket on {local}; see the limits of open files (`ulimit -n`) and of this container"
    )]
    Open {
        /// Where.
        local: IpAddr,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A socket to one aggregator's ports.
#[derive(Debug)]
pub struct DataSocket {
    socket: UdpSocket,
    aggregator: SocketAddr,
    local: IpAddr,
    path_mtu: u32,
    port_base: u16,
    ports: u16,
}

impl DataSocket {
    /// Opens a socket on the address that routes to the aggregator.
    ///
    /// # Errors
    /// If there is no route, or an option is refused.
    pub fn open(aggregator: SocketAddr, port_base: u16, ports: u16) -> Result<DataSocket, SocketError> {
        let mut aggregator = aggregator;
        aggregator.set_port(port_base);
        let (local, path_mtu) = route(aggregator)
            .map_err(|source| SocketError::NoRoute { aggregator: aggregator.ip(), source })?;
        let failed = |source| SocketError::Open { local: local.ip(), source };
        let socket = UdpSocket::bind(local).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        configure(&socket, aggregator.is_ipv6())?;
        Ok(DataSocket { socket, aggregator, local: local.ip(), path_mtu, port_base, ports: ports.max(1) })
    }

    /// The address that packets leave from.
    #[must_use]
    pub const fn local(&self) -> IpAddr {
        self.local
    }

    /// The aggregator's address.
    #[must_use]
    pub const fn aggregator(&self) -> IpAddr {
        self.aggregator.ip()
    }

    /// MTU of the way to the aggregator, as the kernel knows it.
    #[must_use]
    pub const fn path_mtu(&self) -> u32 {
        self.path_mtu
    }

    /// Sends a datagram to the port that its seq belongs to.
    ///
    /// # Errors
    /// What the socket says, `WouldBlock` included.
    pub fn send(&self, datagram: &[u8], seq: u32) -> io::Result<()> {
        let mut to = self.aggregator;
        // Below `ports`, which fits.
        let offset = (seq % u32::from(self.ports)) as u16;
        to.set_port(self.port_base.wrapping_add(offset));
        self.socket.send_to(datagram, to).map(drop)
    }

    /// Receives a datagram; none if it came from anybody else than the aggregator.
    ///
    /// # Errors
    /// What the socket says, `WouldBlock` included.
    pub fn receive<'a>(&self, buffer: &'a mut [u8]) -> io::Result<Option<&'a [u8]>> {
        let (length, from) = self.socket.recv_from(buffer)?;
        let expected = from.ip().to_canonical() == self.aggregator.ip().to_canonical()
            && from.port().wrapping_sub(self.port_base) < self.ports;
        Ok(buffer.get(..length).filter(|_| expected))
    }

    /// Waits until there is something to receive, room to send (if asked for), or the time is over. Returns the error
    /// that the network reported meanwhile, if any.
    ///
    /// # Errors
    /// What `ppoll` says, but for interruptions.
    pub fn wait(&self, timeout: Duration, to_send: bool) -> io::Result<Option<io::Error>> {
        let mut events = PollFlags::POLLIN;
        events.set(PollFlags::POLLOUT, to_send);
        let mut polled = [PollFd::new(self.socket.as_fd(), events)];
        match ppoll(&mut polled, Some(TimeSpec::from_duration(timeout)), None) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        if polled.first().and_then(PollFd::revents).is_some_and(|got| got.contains(PollFlags::POLLERR)) {
            return self.drain_errors();
        }
        Ok(None)
    }

    /// Empties the queue of ICMP errors, which would end every wait at once. Returns one of them.
    fn drain_errors(&self) -> io::Result<Option<io::Error>> {
        let error = self.socket.take_error()?;
        let mut nothing = [0; 1];
        for _ in 0..ERROR_BATCH {
            let flags = MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT;
            if recv(self.socket.as_raw_fd(), &mut nothing, flags).is_err() {
                break;
            }
        }
        Ok(error)
    }
}

/// The local address (port 0) and the MTU of the way to an address.
fn route(to: SocketAddr) -> io::Result<(SocketAddr, u32)> {
    let any =
        if to.is_ipv6() { IpAddr::V6(Ipv6Addr::UNSPECIFIED) } else { IpAddr::V4(Ipv4Addr::UNSPECIFIED) };
    let probe = UdpSocket::bind((any, 0))?;
    probe.connect(to)?;
    let mut local = probe.local_addr()?;
    local.set_port(0);
    let (level, name) =
        if to.is_ipv6() { (libc::IPPROTO_IPV6, libc::IPV6_MTU) } else { (libc::IPPROTO_IP, libc::IP_MTU) };
    Ok((local, get_option(probe.as_fd(), level, name)?.unsigned_abs()))
}

fn configure(socket: &UdpSocket, v6: bool) -> Result<(), SocketError> {
    let set = |option: &'static str, level, name, value| {
        set_option(socket.as_fd(), level, name, value)
            .map_err(|source| SocketError::Option { option, source })
    };
    set("SO_RCVBUF", libc::SOL_SOCKET, libc::SO_RCVBUF, BUFFER_BYTES)?;
    set("SO_SNDBUF", libc::SOL_SOCKET, libc::SO_SNDBUF, BUFFER_BYTES)?;
    if v6 {
        set("IPV6_MTU_DISCOVER", libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO)?;
        set("IPV6_TCLASS", libc::IPPROTO_IPV6, libc::IPV6_TCLASS, ECT0)?;
        set("IPV6_RECVERR", libc::IPPROTO_IPV6, libc::IPV6_RECVERR, 1)?;
        // The aggregator answers without a checksum; payloads have their own.
        set("UDP_NO_CHECK6_RX", libc::IPPROTO_UDP, UDP_NO_CHECK6_RX, 1)?;
        set("UDP_NO_CHECK6_TX", libc::IPPROTO_UDP, UDP_NO_CHECK6_TX, 1)?;
    } else {
        set("IP_MTU_DISCOVER", libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO)?;
        set("IP_TOS", libc::IPPROTO_IP, libc::IP_TOS, ECT0)?;
        set("IP_RECVERR", libc::IPPROTO_IP, libc::IP_RECVERR, 1)?;
    }
    debug!(local = ?socket.local_addr().ok(), "data socket");
    Ok(())
}

/// Sets an option whose value is an int.
fn set_option(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    let length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the pointer and the length describe `value`, which the kernel only reads.
    let result =
        unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), length) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Reads an option whose value is an int.
fn get_option(socket: BorrowedFd<'_>, level: libc::c_int, name: libc::c_int) -> io::Result<libc::c_int> {
    let (mut value, mut length) = (0, size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: the pointer and the length describe `value`, which lives until the call returns; the kernel writes no
    // more than the length.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, name, (&raw mut value).cast(), &raw mut length)
    };
    if result == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer() -> (UdpSocket, SocketAddr) {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap_or_else(|error| panic!("{error}"));
        let address = socket.local_addr().unwrap_or_else(|error| panic!("{error}"));
        (socket, address)
    }

    fn open(address: SocketAddr) -> DataSocket {
        DataSocket::open(address, address.port(), 1).unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn datagrams_of_others_are_ignored() {
        let (aggregator, address) = peer();
        let (stranger, _) = peer();
        let socket = open(address);
        assert!(socket.path_mtu() >= 1280);
        let Ok(to) = socket.socket.local_addr() else { panic!("no address") };
        let mut buffer = [0; 64];
        assert!(stranger.send_to(b"no", to).is_ok());
        assert!(socket.wait(Duration::from_secs(5), false).is_ok());
        assert!(matches!(socket.receive(&mut buffer), Ok(None)));
        assert!(aggregator.send_to(b"yes", to).is_ok());
        assert!(socket.wait(Duration::from_secs(5), false).is_ok());
        assert!(matches!(socket.receive(&mut buffer), Ok(Some(b"yes"))));
        let empty = socket.receive(&mut buffer).map_err(|error| error.kind());
        assert_eq!(empty.err(), Some(io::ErrorKind::WouldBlock));
    }

    #[test]
    fn refused_datagrams_show_and_do_not_spin() {
        let (aggregator, address) = peer();
        drop(aggregator);
        let socket = open(address);
        assert!(socket.send(b"x", 0).is_ok());
        let told = socket.wait(Duration::from_secs(1), false).ok().flatten().map(|error| error.kind());
        assert_eq!(told, Some(io::ErrorKind::ConnectionRefused));
        let start = std::time::Instant::now();
        assert!(socket.wait(Duration::from_millis(50), false).is_ok());
        assert!(socket.wait(Duration::from_millis(50), false).is_ok());
        assert!(start.elapsed() >= Duration::from_millis(45));
    }

    #[test]
    fn ipv6_sockets_take_their_options() {
        let Ok(socket) = UdpSocket::bind("[::1]:0") else { return }; // no IPv6 here
        let Ok(address) = socket.local_addr() else { return };
        assert!(DataSocket::open(address, address.port(), 1).is_ok());
    }

    #[test]
    fn ports_follow_seq() {
        let (socket, address) = peer();
        let data = open(address);
        assert!(data.send(b"x", 7).is_ok());
        assert!(socket.recv(&mut [0; 8]).is_ok());
    }
}
