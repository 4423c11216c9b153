//! Frames: is it ours, and how is it turned round. One decoder for kernel, host and fuzzer.
//!
//! Ethernet, up to two VLAN tags, IPv4 without options or IPv6 without extension headers, UDP to one of our ports at
//! one of our addresses. Everything else passes to the stack untouched.

use core::marker::PhantomData;

use network_types::ip::{Ipv4Hdr, Ipv6Hdr};
use network_types::udp::UdpHdr;

use crate::aggregate::Arrival;
use crate::counter::Refusal;
use crate::job::{Address, Node, mapped};
use crate::lanes::opaque;
use crate::limits::MAX_LOCAL_ADDRESSES;
use crate::wire::{HEADER_BYTES, Header};

/// Types that may be read from and written to any bytes.
///
/// # Safety
/// Alignment 1, no padding, every bit pattern valid.
pub unsafe trait Plain: Copy {}
// SAFETY: bytes.
unsafe impl<const N: usize> Plain for [u8; N] {}
// SAFETY: words as bytes.
unsafe impl<const N: usize, const W: usize> Plain for [[u8; N]; W] {}
// SAFETY: a repr(C) struct of byte arrays.
unsafe impl Plain for Header {}
// SAFETY: a repr(C) struct of bytes and byte arrays.
unsafe impl Plain for Ipv4Hdr {}
// SAFETY: a repr(C) struct of bytes and byte arrays.
unsafe impl Plain for Ipv6Hdr {}
// SAFETY: a repr(C) struct of byte arrays.
unsafe impl Plain for UdpHdr {}

/// Memory between two pointers. Every access compares pointers, which is the bounds check that the kernel's verifier
/// understands; nothing is ever computed from their difference.
pub struct Frame<'a> {
    start: *mut u8,
    end: *mut u8,
    memory: PhantomData<&'a mut [u8]>,
}

impl<'a> Frame<'a> {
    /// A frame in a slice.
    pub fn new(bytes: &'a mut [u8]) -> Frame<'a> {
        let range = bytes.as_mut_ptr_range();
        Frame { start: range.start, end: range.end, memory: PhantomData }
    }

    /// A frame between two pointers.
    ///
    /// # Safety
    /// The memory between them is readable and writable for `'a`, and nobody else uses it.
    #[inline(always)]
    pub const unsafe fn from_raw(start: *mut u8, end: *mut u8) -> Frame<'a> {
        Frame { start, end, memory: PhantomData }
    }

    #[inline(always)]
    fn pointer<T: Plain>(&self, offset: usize) -> Option<*mut T> {
        let first = self.start.wrapping_add(offset);
        if first.wrapping_add(size_of::<T>()) > self.end { None } else { Some(first.cast()) }
    }

    /// The bytes at `offset` as a `T`.
    #[inline(always)]
    #[must_use]
    pub fn at<T: Plain>(&self, offset: usize) -> Option<&T> {
        // SAFETY: in bounds, and `T` is valid for any bytes at any alignment.
        self.pointer(offset).map(|p| unsafe { &*p })
    }

    /// The bytes at `offset` as a `T`, to write.
    #[inline(always)]
    pub fn at_mut<T: Plain>(&mut self, offset: usize) -> Option<&mut T> {
        // SAFETY: as above; `&mut self` keeps the borrow unique.
        self.pointer(offset).map(|p| unsafe { &mut *p })
    }

    /// The bytes at `offset` as a `T`, to write, for as long as the memory lives.
    #[inline(always)]
    #[must_use]
    pub fn into_mut<T: Plain>(self, offset: usize) -> Option<&'a mut T> {
        // SAFETY: as above, and `self` is gone.
        self.pointer(offset).map(|p| unsafe { &mut *p })
    }

    /// The frame is exactly `length` bytes long.
    #[inline(always)]
    #[must_use]
    pub fn is_exactly(&self, length: usize) -> bool {
        // Two comparisons of pointers: their difference would need CAP_PERFMON.
        let end = self.start.wrapping_add(length);
        end <= self.end && end.wrapping_add(1) > self.end
    }

    /// Our header at `offset`, and where its payload begins.
    #[inline(always)]
    pub fn split(self, offset: usize) -> Option<(&'a mut Header, *mut u8)> {
        let rest = self.start.wrapping_add(offset + HEADER_BYTES);
        self.into_mut(offset).map(|header| (header, rest))
    }
}

/// Where the parts of one of our frames are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Offset of our header.
    pub header: usize,
    /// The IP header is of version 6.
    pub is_v6: bool,
}

impl Layout {
    /// Offset of the UDP header.
    #[inline(always)]
    #[must_use]
    pub fn udp(self) -> usize {
        self.before(UdpHdr::LEN)
    }

    /// Offset of the IP header.
    #[inline(always)]
    #[must_use]
    pub fn ip(self) -> usize {
        self.before(UdpHdr::LEN + if self.is_v6 { Ipv6Hdr::LEN } else { Ipv4Hdr::LEN })
    }

    /// Opaque and masked: the verifier follows no offset that is a difference.
    #[inline(always)]
    fn before(self, bytes: usize) -> usize {
        opaque(self.header.wrapping_sub(bytes) as u64) as usize & OFFSET_MASK
    }

    /// The same layout, if `zero` is zero. The kernel's verifier, which does not know that, then forgets what each
    /// combination of tags and IP version said of the offsets, and walks the rest of the program once, not six times.
    #[inline(always)]
    #[must_use]
    pub fn blurred(self, zero: u32) -> Layout {
        let zero = zero as usize;
        Layout { header: (self.header | zero) & OFFSET_MASK, is_v6: self.is_v6 as usize | zero != 0 }
    }
}

/// Above every offset in a [`Layout`]: Ethernet 14, two tags 8, IPv6 40, UDP 8 are 70 bytes.
const OFFSET_MASK: usize = 0x7F;

/// What a frame is.
#[derive(Clone, Copy, Debug)]
pub enum Parsed {
    /// Not for us: hand it to the stack.
    NotOurs,
    /// Not readable as ours: count, and hand it to the stack.
    Unread(Refusal),
    /// For us, but not well-formed: count and drop.
    Bad(Refusal),
    /// A request of the right shape.
    Ours(Layout, Arrival),
}

mod ether {
    pub const IPV4: u16 = 0x0800;
    pub const IPV6: u16 = 0x86DD;
    pub const VLAN: u16 = 0x8100;
    pub const SERVICE_VLAN: u16 = 0x88A8;
}

const PROTOCOL_UDP: u8 = 17;
const IPV6_FRAGMENT: u8 = 44;
const ETHERNET_BYTES: usize = 14;
const TAG_BYTES: usize = 4;
const CONGESTED: u8 = 0b11;
const ECN_CAPABLE: u8 = 0b10;
/// Hops that an answer may take.
const TIME_TO_LIVE: u8 = 64;

#[inline(always)]
const fn is_tag(ether_type: u16) -> bool {
    ether_type == ether::VLAN || ether_type == ether::SERVICE_VLAN
}

/// Finds our header in a frame. `length` is its length in bytes where that is more than lies between the frame's
/// pointers (multi-buffer frames).
#[inline(always)]
#[must_use]
pub fn parse(frame: &Frame<'_>, length: Option<u32>, node: &Node) -> Parsed {
    let mut ip = ETHERNET_BYTES;
    let Some(mut ether_type) = frame.at::<[u8; 2]>(12).map(|b| u16::from_be_bytes(*b)) else {
        return Parsed::NotOurs;
    };
    for _ in 0..2 {
        if is_tag(ether_type) {
            let Some(inner) = frame.at::<[u8; 2]>(ip + 2) else { return Parsed::NotOurs };
            ether_type = u16::from_be_bytes(*inner);
            ip += TAG_BYTES;
        }
    }
    match ether_type {
        ether::IPV4 => parse_v4(frame, ip, length, node),
        ether::IPV6 => parse_v6(frame, ip, length, node),
        other if is_tag(other) => Parsed::Unread(Refusal::TooManyTags),
        _ => Parsed::NotOurs,
    }
}

#[inline(always)]
fn parse_v4(frame: &Frame<'_>, ip: usize, length: Option<u32>, node: &Node) -> Parsed {
    let Some(header) = frame.at::<Ipv4Hdr>(ip) else { return Parsed::NotOurs };
    if header.vihl != 0x45 || header.proto != PROTOCOL_UDP {
        return Parsed::NotOurs;
    }
    let fragment = u16::from_be_bytes(header.frags);
    if fragment & 0x1FFF != 0 {
        return Parsed::NotOurs;
    }
    let outer = Outer {
        source: mapped(header.src_addr),
        destination: mapped(header.dst_addr),
        is_fragment: fragment & 0x2000 != 0,
        congested: header.tos & CONGESTED == CONGESTED,
        datagram_bytes: u32::from(u16::from_be_bytes(header.tot_len)).wrapping_sub(Ipv4Hdr::LEN as u32),
    };
    parse_udp(frame, ip + Ipv4Hdr::LEN, false, length, node, &outer)
}

#[inline(always)]
fn parse_v6(frame: &Frame<'_>, ip: usize, length: Option<u32>, node: &Node) -> Parsed {
    let Some(header) = frame.at::<Ipv6Hdr>(ip) else { return Parsed::NotOurs };
    let mut outer = Outer {
        source: header.src_addr,
        destination: header.dst_addr,
        is_fragment: false,
        congested: (header.vcf[1] >> 4) & CONGESTED == CONGESTED,
        datagram_bytes: u32::from(u16::from_be_bytes(header.payload_len)),
    };
    let mut udp = ip + Ipv6Hdr::LEN;
    if header.next_hdr == IPV6_FRAGMENT {
        let Some(fragment) = frame.at::<[u8; 8]>(udp) else { return Parsed::NotOurs };
        if fragment[0] != PROTOCOL_UDP || fragment[2] != 0 || fragment[3] & 0xF8 != 0 {
            return Parsed::NotOurs;
        }
        outer.is_fragment = true;
        udp += 8;
    } else if header.next_hdr != PROTOCOL_UDP {
        return Parsed::NotOurs;
    }
    parse_udp(frame, udp, true, length, node, &outer)
}

/// What the IP header says, whichever version.
struct Outer {
    source: Address,
    destination: Address,
    is_fragment: bool,
    congested: bool,
    datagram_bytes: u32,
}

#[inline(always)]
fn parse_udp(
    frame: &Frame<'_>,
    offset: usize,
    is_v6: bool,
    length: Option<u32>,
    node: &Node,
    outer: &Outer,
) -> Parsed {
    let Some(udp) = frame.at::<UdpHdr>(offset) else { return Parsed::NotOurs };
    if u16::from_be_bytes(udp.dst).wrapping_sub(node.port_base) >= node.port_count {
        return Parsed::NotOurs;
    }
    if !is_local(node, &outer.destination) {
        return Parsed::NotOurs;
    }
    if outer.is_fragment {
        return Parsed::Bad(Refusal::Fragment);
    }
    let udp_bytes = u32::from(u16::from_be_bytes(udp.len));
    let overhead = (UdpHdr::LEN + HEADER_BYTES) as u32;
    if udp_bytes < overhead {
        return Parsed::Bad(Refusal::Truncated);
    }
    let frame_bytes = offset as u32 + udp_bytes;
    let fits = length.map_or_else(|| frame.is_exactly(frame_bytes as usize), |length| length == frame_bytes);
    if udp_bytes != outer.datagram_bytes || !fits {
        return Parsed::Bad(Refusal::LengthMismatch);
    }
    let arrival =
        Arrival { source: outer.source, congested: outer.congested, payload_bytes: udp_bytes - overhead };
    Parsed::Ours(Layout { header: offset + UdpHdr::LEN, is_v6 }, arrival)
}

#[inline(always)]
fn is_local(node: &Node, destination: &Address) -> bool {
    let mut found = false;
    for i in 0..MAX_LOCAL_ADDRESSES {
        found |= node.local[i] == *destination;
    }
    found
}

/// Turns a request's frame into its answer's: addresses and ports exchanged, lengths and checksums for `payload`
/// bytes after our header. The UDP checksum becomes zero: what arrived may have been partial (checksum offload), and
/// header check and tag cover the contents. IPv6 receivers must allow zero (RFC 6935).
#[inline(always)]
pub fn turn_round(frame: &mut Frame<'_>, layout: Layout, payload: u32) -> Option<()> {
    let macs: &mut [[u8; 6]; 2] = frame.at_mut(0)?;
    macs.swap(0, 1);
    let datagram = (UdpHdr::LEN + HEADER_BYTES) as u16 + payload as u16;
    if layout.is_v6 {
        let ip: &mut Ipv6Hdr = frame.at_mut(layout.ip())?;
        core::mem::swap(&mut ip.src_addr, &mut ip.dst_addr);
        ip.payload_len = datagram.to_be_bytes();
        ip.hop_limit = TIME_TO_LIVE;
        if (ip.vcf[1] >> 4) & CONGESTED == CONGESTED {
            ip.vcf[1] = ip.vcf[1] & !(CONGESTED << 4) | ECN_CAPABLE << 4;
        }
    } else {
        let ip: &mut Ipv4Hdr = frame.at_mut(layout.ip())?;
        core::mem::swap(&mut ip.src_addr, &mut ip.dst_addr);
        ip.tot_len = (datagram + Ipv4Hdr::LEN as u16).to_be_bytes();
        ip.ttl = TIME_TO_LIVE;
        if ip.tos & CONGESTED == CONGESTED {
            ip.tos = ip.tos & !CONGESTED | ECN_CAPABLE;
        }
        ip.check = [0; 2];
        let words: &mut [[u8; 2]; 10] = frame.at_mut(layout.ip())?;
        let mut sum = 0u32;
        for word in words.iter() {
            sum += u32::from(u16::from_be_bytes(*word));
        }
        sum = (sum & 0xFFFF) + (sum >> 16);
        sum = (sum & 0xFFFF) + (sum >> 16);
        words[5] = (!(sum as u16)).to_be_bytes();
    }
    let udp: &mut UdpHdr = frame.at_mut(layout.udp())?;
    core::mem::swap(&mut udp.src, &mut udp.dst);
    udp.len = datagram.to_be_bytes();
    udp.check = [0; 2];
    Some(())
}
