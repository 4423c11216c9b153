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
use tracing::{debug, warn};

use super::driver::ERROR_BATCH;

/// Memory that the kernel charges for a datagram in a queue beyond its bytes: `sk_buff`, shared information, headroom.
const CHARGED_BYTES: usize = 1024;

/// Memory comes in pages.
const PAGE_BYTES: usize = 4096;

/// Datagrams under way for each chunk of the window, at most: a contribution's answer and a pull's.
const DATAGRAMS_PER_CHUNK: usize = 2;

/// ECT(0) in the lowest bits of TOS and traffic class: switches may mark instead of drop.
const ECT0: libc::c_int = 0b10;

/// `linux/udp.h`, which libc does not name: IPv6 without UDP checksums.
const UDP_NO_CHECK6_RX: libc::c_int = 102;

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

/// Where the aggregator takes data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Its address; the port is the first one.
    pub address: SocketAddr,
    /// Number of ports, at least 1.
    pub ports: u16,
}

impl Target {
    /// Ports from `port_base` on at an address.
    #[must_use]
    pub fn new(address: SocketAddr, port_base: u16, ports: u16) -> Target {
        let mut address = address;
        address.set_port(port_base);
        Target { address, ports: ports.max(1) }
    }

    /// Which port a chunk belongs to, counted from the first.
    #[must_use]
    pub fn port_index(self, seq: u32) -> usize {
        // Below `ports`, which fits.
        (seq % u32::from(self.ports)) as usize
    }

    /// The address of a port.
    #[must_use]
    pub fn port(self, index: u16) -> SocketAddr {
        let mut address = self.address;
        address.set_port(self.address.port().wrapping_add(index));
        address
    }

    /// A datagram from there comes from the aggregator.
    #[must_use]
    pub fn is_sender(self, from: SocketAddr) -> bool {
        from.ip().to_canonical() == self.address.ip().to_canonical()
            && from.port().wrapping_sub(self.address.port()) < self.ports
    }
}

/// How much may be in the socket's queues.
#[derive(Clone, Copy, Debug)]
pub struct Buffers {
    /// Window of the job, in chunks.
    pub window: u16,
    /// Longest datagram, in bytes.
    pub datagram: usize,
}

impl Buffers {
    /// Datagrams that may be on their way in one direction.
    #[must_use]
    pub const fn datagrams(self) -> usize {
        self.window as usize * DATAGRAMS_PER_CHUNK
    }

    /// Memory for all of those.
    const fn bytes(self) -> usize {
        self.datagrams() * (self.datagram + CHARGED_BYTES).next_multiple_of(PAGE_BYTES)
    }
}

/// A socket to one aggregator's ports.
#[derive(Debug)]
pub struct DataSocket {
    socket: UdpSocket,
    target: Target,
    local: SocketAddr,
    path_mtu: u32,
}

impl DataSocket {
    /// Opens a socket on the address that routes to the aggregator.
    ///
    /// # Errors
    /// If there is no route, or an option is refused.
    pub fn open(target: Target, buffers: Buffers) -> Result<DataSocket, SocketError> {
        let aggregator = target.address.ip();
        let (local, path_mtu) =
            route(target.address).map_err(|source| SocketError::NoRoute { aggregator, source })?;
        let failed = |source| SocketError::Open { local: local.ip(), source };
        let socket = UdpSocket::bind(local).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        let local = socket.local_addr().map_err(failed)?;
        configure(&socket, aggregator.is_ipv6(), buffers)?;
        Ok(DataSocket { socket, target, local, path_mtu })
    }

    /// Sends to the first port from now on, without looking the way up for each message, and receives from nowhere else.
    ///
    /// # Errors
    /// If the route is gone.
    pub fn connect(&self) -> io::Result<()> {
        self.socket.connect(self.target.address)
    }

    /// The address and port that packets leave from.
    #[must_use]
    pub const fn local(&self) -> SocketAddr {
        self.local
    }

    /// Where the aggregator is.
    #[must_use]
    pub const fn target(&self) -> Target {
        self.target
    }

    /// MTU of the way to the aggregator, as the kernel knows it.
    #[must_use]
    pub const fn path_mtu(&self) -> u32 {
        self.path_mtu
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
    ///
    /// # Errors
    /// What the kernel says.
    pub fn drain_errors(&self) -> io::Result<Option<io::Error>> {
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

impl AsFd for DataSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
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

fn configure(socket: &UdpSocket, v6: bool, buffers: Buffers) -> Result<(), SocketError> {
    let set = |option: &'static str, level, name, value| {
        set_option(socket.as_fd(), level, name, value)
            .map_err(|source| SocketError::Option { option, source })
    };
    set_buffers(socket, buffers.bytes())?;
    if v6 {
        set("IPV6_MTU_DISCOVER", libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO)?;
        set("IPV6_TCLASS", libc::IPPROTO_IPV6, libc::IPV6_TCLASS, ECT0)?;
        set("IPV6_RECVTCLASS", libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1)?;
        set("IPV6_RECVERR", libc::IPPROTO_IPV6, libc::IPV6_RECVERR, 1)?;
        // The aggregator answers without a checksum; payloads have their own. (What is sent has one: segmentation needs
        // it, and leaves the work to the card.)
        set("UDP_NO_CHECK6_RX", libc::IPPROTO_UDP, UDP_NO_CHECK6_RX, 1)?;
    } else {
        set("IP_MTU_DISCOVER", libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO)?;
        set("IP_TOS", libc::IPPROTO_IP, libc::IP_TOS, ECT0)?;
        set("IP_RECVTOS", libc::IPPROTO_IP, libc::IP_RECVTOS, 1)?;
        set("IP_RECVERR", libc::IPPROTO_IP, libc::IP_RECVERR, 1)?;
    }
    debug!(local = ?socket.local_addr().ok(), "data socket");
    Ok(())
}

/// Gives both queues that much memory: beyond the system's limit where this process may, else as far as the limit goes.
fn set_buffers(socket: &UdpSocket, bytes: usize) -> Result<(), SocketError> {
    let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX / 2);
    for (option, forced, plain, limit) in [
        ("SO_RCVBUF", libc::SO_RCVBUFFORCE, libc::SO_RCVBUF, "rmem_max"),
        ("SO_SNDBUF", libc::SO_SNDBUFFORCE, libc::SO_SNDBUF, "wmem_max"),
    ] {
        let failed = |source| SocketError::Option { option, source };
        if set_option(socket.as_fd(), libc::SOL_SOCKET, forced, bytes).is_ok() {
            continue;
        }
        set_option(socket.as_fd(), libc::SOL_SOCKET, plain, bytes).map_err(failed)?;
        // The kernel tells twice what it counts with.
        let got = get_option(socket.as_fd(), libc::SOL_SOCKET, plain).map_err(failed)?;
        if got < bytes && plain == libc::SO_RCVBUF {
            warn!(
                "the socket's receive queue holds {got} bytes, a window of answers may need {bytes}: answers may be lost \
                 when this host is busy; `sysctl -w net.core.{limit}={bytes}` mends it"
            );
        }
    }
    Ok(())
}

/// Sets an option whose value is an int.
pub(super) fn set_option(
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

    const BUFFERS: Buffers = Buffers { window: 64, datagram: 1472 };

    fn peer() -> (UdpSocket, SocketAddr) {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap_or_else(|error| panic!("{error}"));
        let address = socket.local_addr().unwrap_or_else(|error| panic!("{error}"));
        (socket, address)
    }

    fn open(address: SocketAddr) -> DataSocket {
        DataSocket::open(Target::new(address, address.port(), 1), BUFFERS)
            .unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn refused_datagrams_show_and_do_not_spin() {
        let (aggregator, address) = peer();
        drop(aggregator);
        let socket = open(address);
        assert!(socket.path_mtu() >= 1280);
        assert!(socket.socket.send_to(b"x", address).is_ok());
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
        assert!(DataSocket::open(Target::new(address, address.port(), 1), BUFFERS).is_ok());
    }

    #[test]
    fn queues_hold_a_window() {
        let (_peer, address) = peer();
        let socket = open(address);
        let got = get_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF);
        let limit = std::fs::read_to_string("/proc/sys/net/core/rmem_max").unwrap_or_default();
        let limit = limit.trim().parse::<usize>().unwrap_or(0);
        let wanted = BUFFERS.bytes().min(2 * limit);
        assert!(got.is_ok_and(|got| got as usize >= wanted), "{wanted}");
    }

    #[test]
    fn ports_follow_seq() {
        let target = Target::new(SocketAddr::from(([10, 0, 0, 1], 1)), 20545, 4);
        assert_eq!(target.port(3).port(), 20548);
        assert_eq!((target.port_index(7), target.port_index(8)), (3, 0));
        let from = |port| SocketAddr::from(([10, 0, 0, 1], port));
        assert!(target.is_sender(from(20545)) && target.is_sender(from(20548)));
        assert!(!target.is_sender(from(20549)) && !target.is_sender(from(20544)));
        assert!(!target.is_sender(SocketAddr::from(([10, 0, 0, 2], 20545))));
    }
}
