//! The driver that bypasses the kernel's network stack: AF_XDP sockets, and a program that hands the aggregator's answers
//! to them.
//!
//! The state machine writes datagrams into frames that the card reads (or that the kernel copies once, where the driver
//! cannot do that), and reads answers where the card put them. A UDP socket holds the port: what arrives there all the
//! same (on a queue without a socket, with a VLAN tag) is taken as well, and so are errors that the network reports.

mod headers;
mod program;
mod queue;
pub(crate) mod route;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use nix::sys::time::TimeSpec;
use thiserror::Error;
use tracing::{debug, info, warn};
use xdp::nic::NicIndex;
use xdp::packet::Packet;

use super::batch::Inbox;
use super::driver::{BATCH, Driver};
use super::socket::{Buffers, DataSocket, Target};
use headers::Headers;
use program::Program;
use queue::{Demand, Queue, QueueError};
use route::Way;

pub use program::Mode;

/// Receive queues that get a socket, at most: as many as the program's map has room for.
const MAX_QUEUES: u32 = 64;

/// Bytes of an Ethernet header with two VLAN tags, which come on top of the MTU.
const LINK_BYTES: usize = 14 + 2 * 4;

/// Kernel bypass cannot be had.
#[derive(Debug, Error)]
pub enum AfXdpError {
    /// The build had no object.
    #[error("this paatp was built without the worker's eBPF object; build it with `cargo xtask build`")]
    NoObject,
    /// The object lacks what this program needs.
    #[error(
        "the worker's eBPF object has no `{0}`; build it and this paatp from the same sources with `cargo xtask build`"
    )]
    Incomplete(&'static str),
    /// There is no way.
    #[error("there is no route to {aggregator}; see `ip route get {aggregator}`")]
    NoRoute {
        /// The aggregator.
        aggregator: IpAddr,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Both ends are on one host.
    #[error("{0} is an address of this host itself: packets to it pass no interface")]
    Local(IpAddr),
    /// There are no Ethernet headers to be made.
    #[error("packets to the aggregator leave through `{0}`, which is no Ethernet interface")]
    NotEthernet(String),
    /// The Ethernet address of the next hop is not known.
    #[error(
        "the Ethernet address of {next_hop} on `{interface}` cannot be found out; see `ip neighbour show dev {interface}`"
    )]
    NoNeighbour {
        /// The aggregator or a router.
        next_hop: IpAddr,
        /// The interface.
        interface: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Privileges are missing.
    #[error("this process may not load XDP programs{}; run it as root, or give it CAP_BPF, CAP_NET_ADMIN and CAP_NET_RAW", lacks(.0))]
    NotAllowed(Vec<&'static str>),
    /// The program was refused.
    #[error("the kernel refused the worker's XDP program: {reason}{}{log}", if .log.is_empty() { "" } else { "\n" })]
    Load {
        /// Why.
        reason: String,
        /// What the verifier said.
        log: String,
    },
    /// Another program is there.
    #[error("an XDP program{} is attached to `{interface}` already: another worker with kernel bypass, an aggregator, or somebody else's; see `ip link show dev {interface}`", number(.program))]
    Taken {
        /// The interface.
        interface: String,
        /// Its id.
        program: Option<u32>,
    },
    /// The driver refused.
    #[error("`{interface}` takes no XDP program in {} mode; see `dmesg`", in_words(*.mode))]
    Attach {
        /// The interface.
        interface: String,
        /// Where it was to run.
        mode: Mode,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// XDP links came with 5.9.
    #[error(
        "this kernel has no links for XDP programs (5.9), so the program would stay if this process were killed"
    )]
    OldKernel,
    /// No queue has a socket.
    #[error("cannot {what} on queue {queue} of `{interface}`{}", .hint)]
    Queue {
        /// What was refused.
        what: &'static str,
        /// Number of the queue.
        queue: u32,
        /// The interface.
        interface: String,
        /// What to do about it.
        hint: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Not worth it.
    #[error(
        "the driver of `{0}` has no zero-copy mode for AF_XDP, and copying is slower than UDP sockets (--io af-xdp does it all the same)"
    )]
    OnlyCopies(String),
    /// Frames are a page at most.
    #[error(
        "frames of {bytes} bytes do not fit: the MTU of `{interface}` is too large for AF_XDP (about 3800 at most)"
    )]
    TooLong {
        /// Bytes of the longest frame.
        bytes: usize,
        /// The interface.
        interface: String,
    },
}

fn lacks(missing: &[&str]) -> String {
    if missing.is_empty() { String::new() } else { format!(" (it lacks {})", missing.join(" and ")) }
}

fn number(program: &Option<u32>) -> String {
    program.map(|id| format!(" (id {id})")).unwrap_or_default()
}

const fn in_words(mode: Mode) -> &'static str {
    match mode {
        Mode::Native => "native",
        Mode::Generic => "generic",
    }
}

/// Whether a driver that only copies will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copies {
    /// Kernel bypass at any price.
    Allowed,
    /// Only if the card reads and writes our memory.
    Refused,
}

/// Kernel bypass cannot be had; the socket may serve another driver.
#[derive(Debug)]
pub struct Refused {
    /// Why.
    pub error: AfXdpError,
    /// As it was handed in.
    pub socket: DataSocket,
}

/// AF_XDP sockets as a driver.
pub struct XdpDriver {
    /// Attached until the driver stops.
    program: Option<Program>,
    /// All of them receive; the first one sends.
    queues: Vec<Queue>,
    headers: Headers,
    target: Target,
    datagram_bytes: usize,
    interface: String,
    mode: Mode,
    frame: Option<Packet>,
    socket: DataSocket,
    inbox: Inbox,
    /// The UDP socket, then the queues'.
    polled: Vec<libc::pollfd>,
    waits: u64,
    /// Something is in the UDP socket's queue.
    is_at_socket: bool,
}

impl XdpDriver {
    /// Loads the program, attaches it to the interface towards the aggregator, and binds a socket to each of its queues.
    /// `socket` is the one whose port answers come to; it is left alone if this fails.
    ///
    /// # Errors
    /// What is missing, and the socket, for another driver.
    pub fn open(
        socket: DataSocket,
        buffers: Buffers,
        mode: Mode,
        copies: Copies,
    ) -> Result<XdpDriver, Box<Refused>> {
        match Parts::make(&socket, buffers, mode, copies) {
            Ok(Parts { program, queues, headers, way }) => Ok(XdpDriver {
                polled: polled(&socket, &queues),
                program: Some(program),
                queues,
                headers,
                target: socket.target(),
                datagram_bytes: buffers.datagram,
                interface: way.link.name,
                mode,
                frame: None,
                socket,
                inbox: Inbox::new(),
                waits: 0,
                is_at_socket: false,
            }),
            Err(error) => Err(Box::new(Refused { error, socket })),
        }
    }

    /// The interface.
    #[must_use]
    pub fn interface(&self) -> &str {
        &self.interface
    }

    /// Number of receive queues with a socket.
    #[must_use]
    pub fn queues(&self) -> usize {
        self.queues.len()
    }

    /// Where the program runs.
    #[must_use]
    pub const fn mode(&self) -> Mode {
        self.mode
    }

    /// Answers that the kernel had no room for.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.queues.iter().map(Queue::dropped).sum()
    }

    /// The card reads and writes our memory itself; otherwise the kernel copies.
    #[must_use]
    pub fn is_zero_copy(&self) -> bool {
        self.queues.iter().all(Queue::is_zero_copy)
    }
}

/// A program that does nothing, on a veth whose peer may answer with `XDP_TX`. Dropping it takes it off.
#[derive(Debug)]
pub struct PeerProgram(#[expect(dead_code, reason = "attached as long as it lives")] Program);

impl PeerProgram {
    /// Attaches it where packets to the aggregator leave through a veth without an XDP program, if this process may: what
    /// the aggregator sends back natively arrives only then, if it is the veth's other end itself.
    #[must_use]
    pub fn attach_where_needed(target: Target) -> Option<PeerProgram> {
        let (index, link) = route::interface_towards(target.address).ok()?;
        if link.kind.as_deref() != Some("veth") || link.xdp.is_some() {
            return None;
        }
        match Program::pass(index, &link.name) {
            Ok(program) => {
                info!(
                    interface = link.name,
                    "a native XDP program that passes everything, for answers by XDP_TX"
                );
                Some(PeerProgram(program))
            }
            Err(error) => {
                warn!(
                    "nobody has answered yet; if the aggregator is the other end of the veth `{}`, its answers need a \
                     native XDP program here, and this worker cannot attach one: {error}",
                    link.name
                );
                None
            }
        }
    }
}

/// What to wait for.
fn polled(socket: &DataSocket, queues: &[Queue]) -> Vec<libc::pollfd> {
    let sockets = queues.iter().map(|queue| queue.fd().as_raw_fd());
    std::iter::once(socket.as_fd().as_raw_fd())
        .chain(sockets)
        .map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 })
        .collect()
}

/// What is made before anything can be lost.
struct Parts {
    program: Program,
    queues: Vec<Queue>,
    headers: Headers,
    way: Way,
}

impl Parts {
    fn make(socket: &DataSocket, buffers: Buffers, mode: Mode, copies: Copies) -> Result<Parts, AfXdpError> {
        let target = socket.target();
        let way = Way::find(target.address)?;
        let only_copies = || AfXdpError::OnlyCopies(way.link.name.clone());
        // Asked before anything is done to the interface; kernels before 6.3 cannot tell.
        let told = NicIndex(way.interface).query_capabilities();
        if copies == Copies::Refused && told.is_ok_and(|told| !told.xdp_features.zero_copy()) {
            return Err(only_copies());
        }
        let headers = Headers::new((&way.source, &way.destination), socket.local(), target.address);
        let mut program = Program::answers(way.interface, &way.link.name, mode, socket.local(), target)?;
        let demand =
            Demand { longest_frame: way.link.mtu as usize + LINK_BYTES, datagrams: buffers.datagrams() };
        let queues = bind_all(&way, demand)?;
        if copies == Copies::Refused && !queues.iter().all(Queue::is_zero_copy) {
            return Err(only_copies());
        }
        let mut sockets = program.sockets()?;
        for queue in &queues {
            let redirected = sockets.set(queue.id, queue.fd().as_fd(), 0);
            redirected.map_err(|error| {
                let source = io::Error::other(error.to_string());
                queue_error(&way, queue.id, "redirect answers to the socket", source)
            })?;
        }
        Ok(Parts { program, queues, headers, way })
    }
}

/// Sockets on all queues of the interface that are free; the first one has to be.
fn bind_all(way: &Way, demand: Demand) -> Result<Vec<Queue>, AfXdpError> {
    let mut queues = Vec::new();
    for id in 0..MAX_QUEUES {
        match Queue::bind(way.interface, id, demand) {
            Ok(queue) => queues.push(queue),
            Err(QueueError::None) if id > 0 => break,
            Err(QueueError::None) => {
                return Err(queue_error(
                    way,
                    id,
                    "bind the AF_XDP socket",
                    io::ErrorKind::InvalidInput.into(),
                ));
            }
            Err(QueueError::TooLong(bytes)) => {
                return Err(AfXdpError::TooLong { bytes, interface: way.link.name.clone() });
            }
            Err(QueueError::Refused { what, source }) if id > 0 => {
                // Answers on that queue go to the stack, and from there to the UDP socket.
                debug!(queue = id, what, error = %source, "a queue without a socket");
            }
            Err(QueueError::Refused { what, source }) => return Err(queue_error(way, id, what, source)),
        }
    }
    Ok(queues)
}

fn queue_error(way: &Way, queue: u32, what: &'static str, source: io::Error) -> AfXdpError {
    let hint = match source.raw_os_error() {
        Some(libc::EPERM) => "; it takes CAP_NET_RAW",
        Some(libc::EBUSY) => "; another program's AF_XDP socket has it, see `ss --xdp`",
        Some(libc::ENOBUFS | libc::ENOMEM) => "; raise the limit of locked memory (`ulimit -l`)",
        Some(libc::EAFNOSUPPORT) => "; this kernel was built without CONFIG_XDP_SOCKETS",
        _ => "",
    };
    AfXdpError::Queue { what, queue, interface: way.link.name.clone(), hint, source }
}

impl Driver for XdpDriver {
    fn room(&mut self) -> Option<&mut [u8]> {
        if self.frame.is_none() {
            let mut frame = self.queues.first_mut()?.frame()?;
            let length = self.headers.len() + self.datagram_bytes;
            // Frames are long enough for the MTU, and datagrams fit that.
            if frame.adjust_tail(length as i32).is_err() {
                self.queues.first_mut()?.give_back(frame);
                return None;
            }
            self.frame = Some(frame);
        }
        self.frame.as_mut()?.get_mut(self.headers.len()..)
    }

    fn push(&mut self, length: usize, seq: u32) {
        let (Some(mut frame), Some(queue)) = (self.frame.take(), self.queues.first_mut()) else { return };
        let port = self.target.port(self.target.port_index(seq) as u16).port();
        let whole = frame.len();
        let written = self.headers.write(&mut frame, length, port);
        let is_cut = written.is_some_and(|total| frame.adjust_tail(total as i32 - whole as i32).is_ok());
        if is_cut { queue.push(frame) } else { queue.give_back(frame) }
    }

    fn flush(&mut self) -> io::Result<bool> {
        self.queues.first_mut().map_or(Ok(true), Queue::flush)
    }

    fn receive(&mut self, take: &mut dyn FnMut(&[u8], bool)) -> io::Result<bool> {
        let (headers, target) = (&self.headers, self.target);
        let base = target.address.port();
        let mut more = false;
        for queue in &mut self.queues {
            let count = queue.receive(|frame| {
                let payload = headers.payload(frame, |port| port.wrapping_sub(base) < target.ports);
                if let Some(datagram) = payload.and_then(|range| frame.get(range)) {
                    take(datagram, headers.is_marked(frame));
                }
            })?;
            more |= count == BATCH;
        }
        if self.is_at_socket {
            match self.inbox.receive(self.socket.as_fd(), |from| target.is_sender(from), take) {
                Ok(count) => self.is_at_socket = count == BATCH,
                Err(error) => {
                    self.is_at_socket = false;
                    if error.kind() != io::ErrorKind::WouldBlock {
                        return Err(error);
                    }
                }
            }
        }
        Ok(more || self.is_at_socket)
    }

    fn wait(&mut self, timeout: Duration) -> io::Result<Option<io::Error>> {
        if let Some(sending) = self.polled.get_mut(1) {
            let is_behind = self.queues.first().is_some_and(Queue::is_behind);
            sending.events = if is_behind { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN };
        }
        self.waits += 1;
        poll(&mut self.polled, timeout)?;
        let told = self.polled.first().map_or(0, |socket| socket.revents);
        self.is_at_socket |= told & libc::POLLIN != 0;
        if told & libc::POLLERR != 0 { self.socket.drain_errors() } else { Ok(None) }
    }

    fn system_calls(&self) -> u64 {
        self.queues.iter().map(Queue::calls).sum::<u64>() + self.inbox.calls() + self.waits
    }

    /// From here on answers go to the UDP socket, as if there were no program.
    fn stop(&mut self) {
        self.program = None;
        self.is_at_socket = true;
    }
}

/// Waits for one of several descriptors.
fn poll(polled: &mut [libc::pollfd], timeout: Duration) -> io::Result<()> {
    let timeout = TimeSpec::from_duration(timeout);
    // SAFETY: pointer and length describe the slice, the time lives until the call returns, and no signal mask is given.
    let result = unsafe {
        libc::ppoll(
            polled.as_mut_ptr(),
            polled.len() as libc::nfds_t,
            std::ptr::from_ref(timeout.as_ref()),
            std::ptr::null(),
        )
    };
    if result >= 0 {
        return Ok(());
    }
    polled.iter_mut().for_each(|polled| polled.revents = 0);
    match io::Error::last_os_error() {
        error if error.kind() == io::ErrorKind::Interrupted => Ok(()),
        error => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_say_what_to_do() {
        let taken = AfXdpError::Taken { interface: "eth0".into(), program: Some(7) }.to_string();
        assert!(taken.contains("(id 7)") && taken.contains("ip link show dev eth0"), "{taken}");
        let lacking = AfXdpError::NotAllowed(vec!["CAP_BPF"]).to_string();
        assert!(lacking.contains("(it lacks CAP_BPF)"), "{lacking}");
        let not_lacking = AfXdpError::NotAllowed(Vec::new()).to_string();
        assert!(not_lacking.contains("programs; run it as root"), "{not_lacking}");
    }

    #[test]
    fn loopback_is_refused_before_anything_is_attached() {
        let Ok(address) = "127.0.0.1:20545".parse() else { panic!("no address") };
        let buffers = Buffers { window: 4, datagram: 1472 };
        let Ok(socket) = DataSocket::open(Target::new(address, 20545, 1), buffers) else {
            panic!("no socket")
        };
        let refused = XdpDriver::open(socket, buffers, Mode::Native, Copies::Allowed)
            .err()
            .map(|refused| refused.error);
        assert!(matches!(refused, Some(AfXdpError::Local(_))), "{refused:?}");
    }
}
