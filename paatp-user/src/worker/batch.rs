//! Many datagrams in one system call: `sendmmsg` with UDP segmentation (GSO), and `recvmmsg`.
//!
//! Datagrams of one length to one port become one message, which the kernel, or the card, cuts into datagrams as late as
//! possible: the way through the stack is walked once for all of them. All buffers are allocated once.

use std::io;
use std::mem::{offset_of, zeroed};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::sys::socket::{SockaddrLike, SockaddrStorage};

use super::driver::{BATCH, CE, DATAGRAM_BYTES};

/// `linux/udp.h`: the option, and the control message, that give the length of segments.
const UDP_SEGMENT: libc::c_int = 103;

/// Most segments of one message: `UDP_MAX_SEGMENTS` of kernels before 6.9 (128 since).
const MOST_SEGMENTS: usize = 64;

/// Most bytes of one message: an IPv4 packet's 65,535 less the headers of IP and UDP, and of tunnels on the way.
const MOST_SEGMENTED_BYTES: usize = 65_000;

/// Mark of a datagram that belongs to no message yet.
const NO_MESSAGE: usize = usize::MAX;

/// The control message that gives the length of segments, as `CMSG_FIRSTHDR` and `CMSG_DATA` would find it.
#[derive(Clone, Copy)]
#[repr(C)]
struct SegmentLength {
    header: libc::cmsghdr,
    bytes: u16,
    padding: [u8; 6],
}

/// `CMSG_LEN(sizeof(u16))`: without the padding.
const SEGMENT_LENGTH_BYTES: usize = offset_of!(SegmentLength, bytes) + size_of::<u16>();

impl SegmentLength {
    const fn new(bytes: u16) -> SegmentLength {
        // SAFETY: integers; some C libraries have padding that nobody can name.
        let mut header: libc::cmsghdr = unsafe { zeroed() };
        header.cmsg_len = SEGMENT_LENGTH_BYTES as _;
        header.cmsg_level = libc::SOL_UDP;
        header.cmsg_type = UDP_SEGMENT;
        SegmentLength { header, bytes, padding: [0; 6] }
    }
}

/// A datagram that waits to be sent.
#[derive(Clone, Copy, Debug)]
struct Queued {
    offset: usize,
    length: usize,
    /// Which port, counted from the first.
    port: usize,
    /// Index of the message that it is a part of.
    message: usize,
}

/// Datagrams on their way out.
pub struct Outbox {
    bytes: Box<[u8]>,
    end: usize,
    queued: Vec<Queued>,
    /// One for each port; none if the socket is connected.
    names: Vec<SockaddrStorage>,
    segments: bool,
    sent: Sent,
    calls: u64,
    pieces: Vec<libc::iovec>,
    messages: Vec<libc::mmsghdr>,
    lengths: Vec<SegmentLength>,
}

/// Datagrams that the kernel took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// As messages of their own.
    pub single: u64,
    /// In messages of several.
    pub segmented: u64,
}

impl Outbox {
    /// An empty outbox for a socket that is connected (no names), or whose datagrams go to these addresses.
    pub fn new(names: &[SocketAddr], segments: bool) -> Outbox {
        Outbox {
            bytes: vec![0; BATCH * DATAGRAM_BYTES].into_boxed_slice(),
            end: 0,
            queued: Vec::with_capacity(BATCH),
            names: names.iter().map(|name| SockaddrStorage::from(*name)).collect(),
            segments,
            sent: Sent::default(),
            calls: 0,
            pieces: Vec::with_capacity(BATCH),
            messages: Vec::with_capacity(BATCH),
            lengths: Vec::with_capacity(BATCH),
        }
    }

    /// Whether the kernel is asked to cut messages into datagrams.
    pub const fn segments(&self) -> bool {
        self.segments
    }

    /// From now on every datagram is a message of its own.
    pub const fn stop_segments(&mut self) {
        self.segments = false;
    }

    /// System calls made so far.
    pub const fn calls(&self) -> u64 {
        self.calls
    }

    /// What the kernel took so far.
    pub const fn sent(&self) -> Sent {
        self.sent
    }

    /// Nothing waits.
    pub const fn is_empty(&self) -> bool {
        self.queued.is_empty()
    }

    /// Where the next datagram may be written.
    pub fn room(&mut self) -> Option<&mut [u8]> {
        if self.queued.len() == BATCH {
            return None;
        }
        self.bytes.get_mut(self.end..self.end + DATAGRAM_BYTES)
    }

    /// Takes the datagram that was written there.
    pub fn push(&mut self, length: usize, port: usize) {
        debug_assert!(length <= DATAGRAM_BYTES && self.queued.len() < BATCH);
        self.queued.push(Queued { offset: self.end, length, port, message: NO_MESSAGE });
        // Packed: neighbours of one message are one piece of memory.
        self.end += length;
    }

    /// Sends what waits. True if nothing waits any more.
    ///
    /// # Errors
    /// What the kernel said; the message that it said it of is given up.
    pub fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        // Every turn sends or gives up a message, or turns segmentation off.
        while !self.queued.is_empty() {
            self.assemble();
            self.calls += 1;
            match send(socket, &mut self.messages) {
                Ok(sent) => {
                    self.count(sent);
                    self.forget(sent.max(1));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if self.segments && is_about_segments(&error) => self.segments = false,
                Err(error) => {
                    self.forget(1);
                    return Err(error);
                }
            }
        }
        Ok(true)
    }

    /// Counts the datagrams of the first messages.
    fn count(&mut self, messages: usize) {
        let all = self.queued.iter().filter(|queued| queued.message < messages).count();
        let is_single = |message: &&libc::mmsghdr| message.msg_hdr.msg_controllen == 0;
        let single = self.messages.iter().take(messages).filter(is_single).count();
        self.sent.single += single as u64;
        self.sent.segmented += all.saturating_sub(single) as u64;
    }

    /// Removes the datagrams of the first messages.
    fn forget(&mut self, messages: usize) {
        self.queued.retain(|queued| queued.message >= messages);
        if self.queued.is_empty() {
            self.end = 0;
        }
    }

    /// Makes messages of all that waits.
    fn assemble(&mut self) {
        self.pieces.clear();
        self.messages.clear();
        self.lengths.clear();
        self.queued.iter_mut().for_each(|queued| queued.message = NO_MESSAGE);
        let mut index = 0;
        while let Some(first) = self.queued.get(index).copied() {
            if first.message == NO_MESSAGE {
                self.assemble_message(index, first);
            }
            index += 1;
        }
    }

    /// Makes a message of a datagram and those behind it that go to the same port and are as long; the last one may be
    /// shorter. None of the same port is overtaken.
    fn assemble_message(&mut self, from: usize, first: Queued) {
        let number = self.messages.len();
        let first_piece = self.pieces.len();
        let (mut bytes, mut count) = (0, 0);
        let mut last_end = usize::MAX;
        for queued in self.queued.iter_mut().skip(from).filter(|queued| queued.port == first.port) {
            let fits = count == 0
                || self.segments
                    && count < MOST_SEGMENTS
                    && queued.length <= first.length
                    && bytes + queued.length <= MOST_SEGMENTED_BYTES;
            if !fits {
                break;
            }
            queued.message = number;
            if queued.offset == last_end
                && let Some(piece) = self.pieces.last_mut()
            {
                piece.iov_len += queued.length;
            } else if let Some(datagram) = self.bytes.get_mut(queued.offset..queued.offset + queued.length) {
                self.pieces
                    .push(libc::iovec { iov_base: datagram.as_mut_ptr().cast(), iov_len: datagram.len() });
            }
            last_end = queued.offset + queued.length;
            (bytes, count) = (bytes + queued.length, count + 1);
            if queued.length < first.length {
                break;
            }
        }
        // SAFETY: integers and pointers, for which zero is valid; some C libraries have padding that nobody can name.
        let mut header: libc::msghdr = unsafe { zeroed() };
        if let Some(name) = self.names.get(first.port) {
            header.msg_name = name.as_ptr().cast_mut().cast();
            header.msg_namelen = name.len();
        }
        // Within their capacities, which hold a batch: the pointers stay valid.
        let pieces = self.pieces.get_mut(first_piece..).unwrap_or_default();
        header.msg_iov = pieces.as_mut_ptr();
        header.msg_iovlen = pieces.len() as _;
        if count > 1 {
            self.lengths.push(SegmentLength::new(first.length as u16));
            if let Some(length) = self.lengths.last_mut() {
                header.msg_control = (&raw mut *length).cast();
                header.msg_controllen = size_of::<SegmentLength>() as _;
            }
        }
        self.messages.push(libc::mmsghdr { msg_hdr: header, msg_len: 0 });
    }
}

/// Errors that a message of several segments has and its datagrams alone may not have.
fn is_about_segments(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EIO | libc::EINVAL | libc::EMSGSIZE | libc::EOPNOTSUPP | libc::ENOPROTOOPT)
    )
}

/// Sends messages; returns how many went.
fn send(socket: BorrowedFd<'_>, messages: &mut [libc::mmsghdr]) -> io::Result<usize> {
    // SAFETY: `Outbox::assemble` has just made the messages from its own buffers, none of which has moved since.
    let sent = unsafe {
        libc::sendmmsg(
            socket.as_raw_fd(),
            messages.as_mut_ptr(),
            messages.len() as libc::c_uint,
            libc::MSG_DONTWAIT as _,
        )
    };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Room for the control message that tells TOS or traffic class, as the kernel aligns it: a header and an int, or for TOS
/// a byte.
#[derive(Clone, Copy)]
#[repr(C)]
struct ClassRoom {
    header: libc::cmsghdr,
    class: [u8; 8],
}

impl ClassRoom {
    /// What the kernel wrote there says "congestion experienced".
    fn is_marked(&self) -> bool {
        let (level, kind) = (self.header.cmsg_level, self.header.cmsg_type);
        let [a, b, c, d, ..] = self.class;
        let class = match (level, kind) {
            (libc::IPPROTO_IP, libc::IP_TOS) => a,
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => libc::c_int::from_ne_bytes([a, b, c, d]) as u8,
            _ => 0,
        };
        class & CE == CE
    }
}

/// Datagrams that have arrived.
pub struct Inbox {
    bytes: Box<[u8]>,
    names: Box<[libc::sockaddr_storage]>,
    pieces: Box<[libc::iovec]>,
    classes: Box<[ClassRoom]>,
    messages: Box<[libc::mmsghdr]>,
    calls: u64,
}

impl Inbox {
    /// An empty inbox.
    pub fn new() -> Inbox {
        let zero_piece = || libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Inbox {
            bytes: vec![0; BATCH * DATAGRAM_BYTES].into_boxed_slice(),
            // SAFETY: integers, for which zero is valid.
            names: (0..BATCH).map(|_| unsafe { zeroed() }).collect(),
            pieces: (0..BATCH).map(|_| zero_piece()).collect(),
            // SAFETY: integers, for which zero is valid.
            classes: (0..BATCH).map(|_| unsafe { zeroed() }).collect(),
            // SAFETY: integers and pointers, for which zero is valid.
            messages: (0..BATCH).map(|_| unsafe { zeroed() }).collect(),
            calls: 0,
        }
    }

    /// System calls made so far.
    pub const fn calls(&self) -> u64 {
        self.calls
    }

    /// Receives up to a batch and hands over what was sent by somebody whom `expected` knows (told with the sender's
    /// address). Returns how many came, the unexpected ones included.
    ///
    /// # Errors
    /// What the kernel said, `WouldBlock` included.
    pub fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        expected: impl Fn(SocketAddr) -> bool,
        take: &mut dyn FnMut(&[u8], bool),
    ) -> io::Result<usize> {
        self.prepare();
        self.calls += 1;
        // SAFETY: the messages were just made from buffers of this inbox, which nobody else uses during the call.
        let received = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                self.messages.as_mut_ptr(),
                BATCH as libc::c_uint,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        };
        let received = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
        let all = self.messages.iter().zip(self.bytes.chunks_exact(DATAGRAM_BYTES)).zip(&self.names);
        for (((message, bytes), name), class) in all.zip(&self.classes).take(received) {
            let is_whole = message.msg_hdr.msg_flags & libc::MSG_TRUNC == 0;
            if is_whole
                && address(name, message.msg_hdr.msg_namelen).is_some_and(&expected)
                && let Some(datagram) = bytes.get(..message.msg_len as usize)
            {
                take(datagram, message.msg_hdr.msg_controllen > 0 && class.is_marked());
            }
        }
        Ok(received)
    }

    /// Points the messages to the buffers.
    fn prepare(&mut self) {
        let buffers = self.bytes.chunks_exact_mut(DATAGRAM_BYTES).zip(self.names.iter_mut());
        let headers = self.messages.iter_mut().zip(self.pieces.iter_mut()).zip(self.classes.iter_mut());
        for (((message, piece), class), (bytes, name)) in headers.zip(buffers) {
            *piece = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
            let header = &mut message.msg_hdr;
            header.msg_name = (&raw mut *name).cast();
            header.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
            header.msg_iov = &raw mut *piece;
            header.msg_iovlen = 1;
            header.msg_control = (&raw mut *class).cast();
            header.msg_controllen = size_of::<ClassRoom>() as _;
            header.msg_flags = 0;
        }
    }
}

/// A sender's address.
fn address(name: &libc::sockaddr_storage, length: libc::socklen_t) -> Option<SocketAddr> {
    // SAFETY: the kernel has written a socket address of this length there, and the storage is as large as any.
    let name = unsafe { SockaddrStorage::from_raw((&raw const *name).cast(), Some(length)) }?;
    let v4 = name.as_sockaddr_in().map(|v4| SocketAddr::V4((*v4).into()));
    v4.or_else(|| name.as_sockaddr_in6().map(|v6| SocketAddr::V6((*v6).into())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::socket::set_option;
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    fn pair() -> (UdpSocket, UdpSocket) {
        let bind = || UdpSocket::bind("127.0.0.1:0").unwrap_or_else(|error| panic!("{error}"));
        (bind(), bind())
    }

    fn address_of(socket: &UdpSocket) -> SocketAddr {
        socket.local_addr().unwrap_or_else(|error| panic!("{error}"))
    }

    fn push(outbox: &mut Outbox, length: usize, port: usize, mark: u8) {
        let Some(room) = outbox.room() else { panic!("full") };
        room[..length].fill(mark);
        outbox.push(length, port);
    }

    /// Length and first byte of everything that has arrived, in order.
    fn arrived(socket: &UdpSocket) -> Vec<(usize, u8)> {
        let (mut inbox, mut all) = (Inbox::new(), Vec::new());
        while inbox
            .receive(socket.as_fd(), |_| true, &mut |datagram, _| all.push((datagram.len(), datagram[0])))
            .is_ok()
        {}
        all
    }

    /// Lengths as they change, on one port and on two: every datagram arrives whole, none of a port overtakes another.
    #[test]
    fn datagrams_keep_their_lengths_and_their_order() {
        for segments in [false, true] {
            let (first, second) = pair();
            let sender = UdpSocket::bind("127.0.0.1:0").unwrap_or_else(|error| panic!("{error}"));
            let mut outbox = Outbox::new(&[address_of(&first), address_of(&second)], segments);
            let lengths = [1000, 1000, 64, 1000, 200, 200, 1000, 1000, 64, 64];
            for (mark, length) in (0..).zip(lengths) {
                push(&mut outbox, length, usize::from(mark % 2), mark);
            }
            assert!(matches!(outbox.flush(sender.as_fd()), Ok(true)));
            for (port, socket) in [first, second].iter().enumerate() {
                let wanted: Vec<_> = lengths.into_iter().zip(0..).skip(port).step_by(2).collect();
                assert_eq!(arrived(socket), wanted, "segments: {segments}, port {port}");
            }
            assert!(outbox.is_empty());
            let segmented = if segments { outbox.sent().segmented } else { 0 };
            assert_eq!(outbox.sent(), Sent { single: 10 - segmented, segmented });
            assert_eq!(segmented > 0, segments);
        }
    }

    #[test]
    fn a_full_outbox_has_no_room_until_it_is_flushed() {
        let (receiver, sender) = pair();
        assert!(sender.connect(address_of(&receiver)).is_ok());
        let mut outbox = Outbox::new(&[], true);
        for turn in 0..3 {
            for mark in 0..BATCH as u8 {
                push(&mut outbox, 500, 0, mark);
            }
            assert!(outbox.room().is_none(), "turn {turn}");
            assert!(matches!(outbox.flush(sender.as_fd()), Ok(true)));
            let wanted: Vec<_> = (0..BATCH as u8).map(|mark| (500, mark)).collect();
            assert_eq!(arrived(&receiver), wanted);
        }
    }

    /// Messages are as few as they can be.
    #[test]
    fn runs_of_one_length_and_port_are_one_message() {
        let (receiver, _) = pair();
        let to = address_of(&receiver);
        let mut outbox = Outbox::new(&[to, to], true);
        for mark in 0..40 {
            push(&mut outbox, 1472, 0, mark);
        }
        for mark in 0..4 {
            push(&mut outbox, 64, 1, mark);
        }
        outbox.assemble();
        // 44 of them fill 64 KiB; each message's datagrams lie behind one another.
        assert_eq!((outbox.messages.len(), outbox.pieces.len()), (2, 2));
        outbox.segments = false;
        outbox.assemble();
        assert_eq!(outbox.messages.len(), 44);
    }

    /// A datagram that cannot be sent does not hold up the others, and is told.
    #[test]
    fn a_refused_datagram_is_given_up() {
        let (receiver, sender) = pair();
        let nobody: SocketAddr = SocketAddr::from(([255, 255, 255, 255], 9));
        let mut outbox = Outbox::new(&[nobody, address_of(&receiver)], true);
        push(&mut outbox, 100, 0, 1);
        push(&mut outbox, 100, 1, 2);
        let refused = outbox.flush(sender.as_fd()).err().and_then(|error| error.raw_os_error());
        assert!(matches!(refused, Some(libc::EACCES | libc::ENETUNREACH)), "{refused:?}");
        assert!(matches!(outbox.flush(sender.as_fd()), Ok(true)));
        assert_eq!(arrived(&receiver), [(100, 2)]);
    }

    /// "Congestion experienced" is told, over either version of IP.
    #[test]
    fn marks_are_seen() {
        for (address, level, send, receive) in [
            ("127.0.0.1:0", libc::IPPROTO_IP, libc::IP_TOS, libc::IP_RECVTOS),
            ("[::1]:0", libc::IPPROTO_IPV6, libc::IPV6_TCLASS, libc::IPV6_RECVTCLASS),
        ] {
            let (Ok(to), Ok(from)) = (UdpSocket::bind(address), UdpSocket::bind(address)) else { continue };
            assert!(set_option(to.as_fd(), level, receive, 1).is_ok());
            let mut marks = Vec::new();
            for class in [0b00, 0b10, 0b11, 0b1111_1100] {
                assert!(set_option(from.as_fd(), level, send, class).is_ok());
                assert!(from.send_to(b"x", address_of(&to)).is_ok());
            }
            let mut inbox = Inbox::new();
            let count = inbox.receive(to.as_fd(), |_| true, &mut |_, is_marked| marks.push(is_marked));
            assert_eq!((count.ok(), marks), (Some(4), vec![false, false, true, false]), "{address}");
        }
    }

    #[test]
    fn strangers_and_long_datagrams_are_not_handed_over() {
        let (receiver, friend) = pair();
        let stranger = UdpSocket::bind("127.0.0.1:0").unwrap_or_else(|error| panic!("{error}"));
        let (to, from) = (address_of(&receiver), address_of(&friend));
        assert!(stranger.send_to(b"no", to).is_ok());
        assert!(friend.send_to(&vec![0; DATAGRAM_BYTES + 1], to).is_ok());
        assert!(friend.send_to(b"yes", to).is_ok());
        let mut got = Vec::new();
        let mut take = |datagram: &[u8], _| got.push(datagram.to_vec());
        let count = Inbox::new().receive(receiver.as_fd(), |sender| sender == from, &mut take);
        assert_eq!((count.ok(), got), (Some(3), vec![b"yes".to_vec()]));
    }
}
