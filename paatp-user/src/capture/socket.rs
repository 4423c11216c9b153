//! Packets of a worker's host, from a packet socket.
//!
//! A worker hands the kernel many datagrams at once, as one long packet with the length of a segment (GSO), and the kernel
//! may put arriving ones together. The socket tells that length, and [`segments`] cuts them as the card would.

use std::ffi::c_void;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, LinkAddr, MsgFlags, SockFlag, SockType, recvmsg, setsockopt, socket,
    sockopt,
};
use paatp_common::wire::Header;
use thiserror::Error;

use crate::engine::Interface;

use super::choice::{HEAD_BYTES, RATE_WINDOW_NS, Settings, locate};
use super::pcapng::{Direction, Packet};
use super::{CaptureError, Counts, Sink};

/// Bytes of the queue that the kernel keeps for us: some thousand datagrams.
pub const QUEUE_BYTES: usize = 16 << 20;
/// Most packets that are read before time and signals are looked at again.
pub const BURST: usize = 1024;
/// `struct virtio_net_hdr`, which precedes each packet.
const OFFLOAD_BYTES: usize = 10;
/// Longest packet: one of GSO, with its headers.
const LONGEST_BYTES: usize = OFFLOAD_BYTES + (1 << 16) + HEAD_BYTES;

/// `SO_ATTACH_FILTER` and what `linux/if_packet.h` numbers.
const PACKET_STATISTICS: libc::c_int = 6;
const PACKET_VNET_HDR: libc::c_int = 15;
/// `PACKET_OUTGOING`
const OUTGOING: u8 = 4;

/// There is no packet socket.
#[derive(Debug, Error)]
pub enum SocketError {
    /// Not allowed.
    #[error("cannot open a packet socket: it takes root or CAP_NET_RAW")]
    Forbidden(#[source] io::Error),
    /// The kernel refuses something.
    #[error("cannot {what} of the packet socket on `{interface}`")]
    Refused {
        /// What.
        what: &'static str,
        /// Where.
        interface: String,
        /// What it said.
        #[source]
        source: io::Error,
    },
}

/// A packet socket.
#[derive(Debug)]
pub struct Socket {
    descriptor: OwnedFd,
    interface: String,
    settings: Settings,
    buffer: Vec<u8>,
    segment: Vec<u8>,
    counts: Counts,
    window: Window,
    gone: bool,
}

/// Packets in the present window of the rate.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    number: u64,
    packets: u32,
}

impl Window {
    /// One more does not exceed the rate.
    fn admits(&mut self, most: u32, now_ns: u64) -> bool {
        let number = now_ns / RATE_WINDOW_NS;
        if number != self.number {
            *self = Window { number, packets: 0 };
        }
        self.packets = self.packets.saturating_add(1);
        most == 0 || self.packets <= most
    }
}

impl Socket {
    /// Opens one.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn open(interface: &Interface, settings: Settings) -> Result<Socket, SocketError> {
        // Of no protocol yet: nothing comes before the filter is there.
        let descriptor = socket(
            AddressFamily::Packet,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            None,
        )
        .map_err(|error| SocketError::Forbidden(error.into()))?;
        let refused = |what, source: io::Error| SocketError::Refused {
            what,
            interface: interface.name.clone(),
            source,
        };
        let filter = filter(&settings);
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
        set(descriptor.as_fd(), libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
            .map_err(|error| refused("set the filter", error))?;
        set(descriptor.as_fd(), libc::SOL_PACKET, PACKET_VNET_HDR, &1i32)
            .map_err(|error| refused("ask for the segments", error))?;
        setsockopt(&descriptor, sockopt::ReceiveTimestampns, &true)
            .map_err(|error| refused("ask for the times", error.into()))?;
        // More than the limit of the system only as an administrator; less is no reason to give up.
        let _ = setsockopt(&descriptor, sockopt::RcvBufForce, &QUEUE_BYTES)
            .or_else(|_| setsockopt(&descriptor, sockopt::RcvBuf, &QUEUE_BYTES));
        bind(descriptor.as_fd(), interface.index).map_err(|error| refused("take the packets", error))?;
        Ok(Socket {
            descriptor,
            interface: interface.name.clone(),
            settings,
            buffer: vec![0; LONGEST_BYTES],
            segment: Vec::with_capacity(LONGEST_BYTES),
            counts: Counts::default(),
            window: Window::default(),
            gone: false,
        })
    }

    /// Hands over what has come, some packets at most. Says whether there may be more.
    ///
    /// # Errors
    /// If the socket fails, or the file.
    pub fn drain(&mut self, sink: &mut Sink<'_>) -> Result<bool, CaptureError> {
        let mut control = nix::cmsg_space!(nix::sys::time::TimeSpec);
        for _ in 0..BURST {
            if sink.is_full() {
                return Ok(false);
            }
            let mut parts = [IoSliceMut::new(&mut self.buffer)];
            let received = recvmsg::<LinkAddr>(
                self.descriptor.as_raw_fd(),
                &mut parts,
                Some(&mut control),
                MsgFlags::MSG_DONTWAIT,
            );
            let message = match received {
                Ok(message) => message,
                Err(Errno::EAGAIN) => return Ok(false),
                // A packet whose offload this kernel cannot tell, or a signal.
                Err(Errno::EINVAL) => {
                    self.counts.totals.lost += 1;
                    continue;
                }
                Err(Errno::EINTR) => continue,
                Err(Errno::ENETDOWN | Errno::ENODEV | Errno::ENXIO) => {
                    self.gone = true;
                    return Ok(false);
                }
                Err(error) => {
                    return Err(SocketError::Refused {
                        what: "read a packet",
                        interface: self.interface.clone(),
                        source: error.into(),
                    }
                    .into());
                }
            };
            let outgoing = message.address.is_some_and(|address| address.pkttype() == OUTGOING);
            let direction = if outgoing { Direction::Outbound } else { Direction::Inbound };
            let time = message.cmsgs().ok().and_then(|mut all| {
                all.find_map(|one| match one {
                    ControlMessageOwned::ScmTimestampns(time) => Some(Duration::from(time)),
                    _ => None,
                })
            });
            let bytes = message.bytes;
            let time_ns = time.map_or(0, |time| time.as_nanos() as u64);
            self.take(bytes, time_ns, direction, sink)?;
        }
        Ok(true)
    }

    /// What happened so far.
    pub fn counts(&mut self) -> Counts {
        // Reading sets them to zero.
        let mut statistics = [0u32; 2];
        let mut length = size_of_val(&statistics) as libc::socklen_t;
        // SAFETY: pointers and length describe `statistics`; the kernel writes no more.
        let result = unsafe {
            libc::getsockopt(
                self.descriptor.as_raw_fd(),
                libc::SOL_PACKET,
                PACKET_STATISTICS,
                statistics.as_mut_ptr().cast::<c_void>(),
                &raw mut length,
            )
        };
        if result == 0 {
            let [_, lost] = statistics;
            self.counts.totals.lost += u64::from(lost);
        }
        self.counts
    }

    /// Why there will be no more packets, if so.
    pub fn end(&self) -> Option<String> {
        self.gone.then(|| format!("`{}` is down or gone", self.interface))
    }

    /// Takes the packet in the buffer, or the datagrams that it is made of.
    fn take(
        &mut self,
        bytes: usize,
        time_ns: u64,
        direction: Direction,
        sink: &mut Sink<'_>,
    ) -> Result<(), CaptureError> {
        let Socket { buffer, segment, settings, counts, window, .. } = self;
        let Some((offload, frame)) = buffer.get(..bytes).and_then(|all| all.split_at_checked(OFFLOAD_BYTES))
        else {
            return Ok(());
        };
        let segment_bytes = match offload {
            [_, kind, _, _, low, high, ..] if *kind != 0 => usize::from(u16::from_ne_bytes([*low, *high])),
            _ => 0,
        };
        let Some(at) = locate(frame, settings) else { return Ok(()) };
        for part in segments(frame, at, segment_bytes) {
            counts.totals.seen += 1;
            if !settings.takes(Header::of(part)) || sink.is_full() {
                continue;
            }
            counts.totals.chosen += 1;
            if !window.admits(settings.window_packets, time_ns) {
                counts.beyond_rate += 1;
                continue;
            }
            assemble(segment, frame.get(..at).unwrap_or_default(), part);
            let keep = segment.len().min(at + settings.keep);
            sink.take(&Packet {
                time_ns,
                direction,
                length: segment.len() as u32,
                bytes: segment.get(..keep).unwrap_or_default(),
            })?;
        }
        Ok(())
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// The datagrams of a packet whose headers end at `at`: one, or as many as have `segment` bytes.
fn segments(frame: &[u8], at: usize, segment: usize) -> impl Iterator<Item = &[u8]> {
    let payload = frame.get(at..).unwrap_or_default();
    let whole = segment == 0 || payload.len() <= segment;
    let size = if whole { payload.len().max(1) } else { segment };
    let empty = payload.is_empty().then_some(payload);
    payload.chunks(size).chain(empty)
}

/// One datagram behind its headers, with the lengths that it has by itself.
fn assemble(segment: &mut Vec<u8>, headers: &[u8], payload: &[u8]) {
    segment.clear();
    segment.extend_from_slice(headers);
    segment.extend_from_slice(payload);
    let udp_bytes = (payload.len() + 8) as u16;
    let Some(udp) = headers.len().checked_sub(8) else { return };
    write_short(segment, udp + 4, udp_bytes);
    if let Some(ip) = udp.checked_sub(20).filter(|ip| is_v4(segment, *ip)) {
        write_short(segment, ip + 2, udp_bytes + 20);
        write_short(segment, ip + 10, 0);
        let sum = segment.get(ip..ip + 20).map_or(0, checksum);
        write_short(segment, ip + 10, sum);
    } else if let Some(ip) = udp.checked_sub(40) {
        write_short(segment, ip + 4, udp_bytes);
    }
}

/// IPv4 without options begins there: the type before it says so.
fn is_v4(segment: &[u8], ip: usize) -> bool {
    ip.checked_sub(2).and_then(|ether| segment.get(ether..ip + 1)) == Some(&[0x08, 0x00, 0x45])
}

fn write_short(bytes: &mut [u8], at: usize, value: u16) {
    if let Some(place) = bytes.get_mut(at..at + 2) {
        place.copy_from_slice(&value.to_be_bytes());
    }
}

/// The Internet checksum (RFC 1071) of an even number of bytes.
fn checksum(bytes: &[u8]) -> u16 {
    let words =
        bytes.chunks_exact(2).map(|two| two.iter().fold(0u32, |word, byte| word << 8 | u32::from(*byte)));
    let mut sum: u32 = words.sum();
    while sum >> 16 != 0 {
        sum = (sum & 0xFFFF) + (sum >> 16);
    }
    !(sum as u16)
}

/// Sets an option to a C structure.
fn set<T>(socket: BorrowedFd<'_>, level: libc::c_int, option: libc::c_int, value: &T) -> io::Result<()> {
    // SAFETY: pointer and length describe `value`, which the kernel only reads.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            std::ptr::from_ref(value).cast::<c_void>(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// All packets of one interface, in both directions.
fn bind(socket: BorrowedFd<'_>, index: u32) -> io::Result<()> {
    // SAFETY: integers and bytes, for which zero is a value.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
    address.sll_ifindex = index as i32;
    // SAFETY: pointer and length describe `address`.
    let result = unsafe {
        libc::bind(
            socket.as_raw_fd(),
            (&raw const address).cast::<libc::sockaddr>(),
            size_of_val(&address) as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A program of classic BPF that lets UDP packets through which have one of our ports; the kernel has taken off a VLAN tag.
fn filter(settings: &Settings) -> Vec<libc::sock_filter> {
    /// `BPF_LD | BPF_ABS` of two bytes and of one, `BPF_JMP` of three kinds, `BPF_RET`, all with a constant.
    const SHORT: u16 = 0x28;
    const BYTE: u16 = 0x30;
    const EQUAL: u16 = 0x15;
    const AT_LEAST: u16 = 0x35;
    const SET: u16 = 0x45;
    const RETURN: u16 = 0x06;

    let mut program = Vec::new();
    let mut push = |code, jt, jf, k| program.push(libc::sock_filter { code, jt, jf, k });
    let (first, beyond) = (u32::from(settings.first_port), u32::from(settings.last_port) + 1);
    // Each port: at least the first, and not beyond the last. Jumps count what they pass over; ALL and NONE end it.
    push(SHORT, 0, 0, 12);
    push(EQUAL, 0, 11, 0x0800);
    push(BYTE, 0, 0, 14);
    push(EQUAL, 0, 19, 0x45);
    push(BYTE, 0, 0, 23);
    push(EQUAL, 0, 17, 17);
    push(SHORT, 0, 0, 20);
    push(SET, 15, 0, 0x1FFF);
    push(SHORT, 0, 0, 34);
    push(AT_LEAST, 0, 1, first);
    push(AT_LEAST, 0, 13, beyond);
    push(SHORT, 0, 0, 36);
    push(AT_LEAST, 9, 10, first);
    // IPv6.
    push(EQUAL, 0, 9, 0x86DD);
    push(BYTE, 0, 0, 20);
    push(EQUAL, 0, 7, 17);
    push(SHORT, 0, 0, 54);
    push(AT_LEAST, 0, 1, first);
    push(AT_LEAST, 0, 5, beyond);
    push(SHORT, 0, 0, 56);
    push(AT_LEAST, 1, 0, first);
    push(RETURN, 0, 0, 0);
    push(AT_LEAST, 0, 1, beyond);
    push(RETURN, 0, 0, 0);
    push(RETURN, 0, 0, u32::MAX);
    program
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::choice::EVERY_PACKET;

    const SETTINGS: Settings = Settings {
        first_port: 20545,
        last_port: 20548,
        job: None,
        threshold: EVERY_PACKET,
        window_packets: 0,
        keep: 64,
    };

    /// As the kernel runs it.
    fn accepts(program: &[libc::sock_filter], packet: &[u8]) -> bool {
        let (mut at, mut value) = (0, 0u32);
        for _ in 0..100 {
            let one = program.get(at).copied().unwrap_or_else(|| panic!("jumped to {at}"));
            let k = one.k as usize;
            let byte = |at: usize| packet.get(at).map(|byte| u32::from(*byte));
            let jump = |truth: bool| if truth { usize::from(one.jt) } else { usize::from(one.jf) };
            at += 1 + match one.code {
                0x28 | 0x30 => {
                    let loaded = if one.code == 0x28 {
                        byte(k).zip(byte(k + 1)).map(|(high, low)| high << 8 | low)
                    } else {
                        byte(k)
                    };
                    let Some(loaded) = loaded else { return false };
                    value = loaded;
                    0
                }
                0x15 => jump(value == one.k),
                0x35 => jump(value >= one.k),
                0x45 => jump(value & one.k != 0),
                0x06 => return one.k != 0,
                code => panic!("{code:#x}"),
            };
        }
        panic!("it does not end")
    }

    fn packet(ether: u16, ports: [u16; 2]) -> Vec<u8> {
        let mut bytes = vec![0; 12];
        bytes.extend_from_slice(&ether.to_be_bytes());
        let mut ip = if ether == 0x0800 { vec![0; 20] } else { vec![0; 40] };
        let (first, protocol) = if ether == 0x0800 { (0x45, 9) } else { (0x60, 6) };
        (ip[0], ip[protocol]) = (first, 17);
        bytes.extend_from_slice(&ip);
        ports.iter().for_each(|port| bytes.extend_from_slice(&port.to_be_bytes()));
        bytes.resize(bytes.len() + 4 + 64, 0);
        bytes
    }

    #[test]
    fn the_filter_and_the_search_agree() {
        let program = filter(&SETTINGS);
        for ether in [0x0800, 0x86DD, 0x0806] {
            for from in [0, 53, 20544, 20545, 20548, 20549, u16::MAX] {
                for to in [0, 53, 20544, 20545, 20547, 20548, 20549, u16::MAX] {
                    let bytes = packet(ether, [from, to]);
                    let found = locate(&bytes, &SETTINGS).is_some();
                    assert_eq!(accepts(&program, &bytes), found, "{ether:#x} {from} {to}");
                }
            }
        }
        for (at, value) in [(14, 0x46), (21, 1), (20, 0x1F), (23, 6)] {
            let mut bytes = packet(0x0800, [4000, 20545]);
            assert!(accepts(&program, &bytes));
            bytes[at] = value;
            assert!(!accepts(&program, &bytes), "{at}");
        }
    }

    #[test]
    fn long_packets_are_cut_into_datagrams() {
        for (ether, at) in [(0x0800, 42), (0x86DD, 62)] {
            let mut frame = packet(ether, [4000, 20545]);
            frame.truncate(at);
            frame.extend((0..250u32).map(|byte| byte as u8));
            let mut segment = Vec::new();
            let parts: Vec<&[u8]> = segments(&frame, at, 100).collect();
            assert_eq!(parts.iter().map(|part| part.len()).collect::<Vec<_>>(), [100, 100, 50]);
            for (number, part) in parts.iter().enumerate() {
                assemble(&mut segment, &frame[..at], part);
                assert_eq!(segment.len(), at + part.len());
                assert_eq!(usize::from(segment[at]), number * 100);
                let short = |at: usize| usize::from(segment[at]) << 8 | usize::from(segment[at + 1]);
                assert_eq!(short(at - 4), 8 + part.len());
                if ether == 0x0800 {
                    assert_eq!((short(16), checksum(&segment[14..34])), (28 + part.len(), 0));
                } else {
                    assert_eq!(short(18), 8 + part.len());
                }
            }
            assert_eq!(segments(&frame, at, 0).count(), 1);
            assert_eq!(segments(&frame[..at], at, 100).count(), 1);
        }
    }

    #[test]
    fn the_rate_holds_in_each_window() {
        let mut window = Window::default();
        let taken = |window: &mut Window, at| (0..100).filter(|_| window.admits(10, at)).count();
        assert_eq!(taken(&mut window, 5), 10);
        assert_eq!(taken(&mut window, RATE_WINDOW_NS - 1), 0);
        assert_eq!(taken(&mut window, RATE_WINDOW_NS), 10);
        assert!((0..1000).all(|_| window.admits(0, 5)));
    }
}
