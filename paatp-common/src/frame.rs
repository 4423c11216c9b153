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
use crate::levels::Way;
use crate::limits::BLOCK_BYTES;
use crate::mind::advance;
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

/// An Ethernet address, in parts that each are one access.
#[derive(Clone, Copy)]
#[repr(C)]
struct Mac([u8; 4], [u8; 2]);
// SAFETY: a repr(C) struct of byte arrays.
unsafe impl Plain for Mac {}

const ETHERNET_BYTES: usize = 14;
const TAG_BYTES: usize = 4;
const IPV4_BYTES: usize = Ipv4Hdr::LEN;
const IPV6_BYTES: usize = Ipv6Hdr::LEN;

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

    /// The frame without its first 14 bytes.
    #[inline(always)]
    fn past_ethernet(&self) -> Frame<'a> {
        Frame { start: advance!(self.start, ETHERNET_BYTES), ..*self }
    }

    /// The frame without its first 4 bytes.
    #[inline(always)]
    fn past_tag(&self) -> Frame<'a> {
        Frame { start: advance!(self.start, TAG_BYTES), ..*self }
    }

    /// The frame without its first 20 bytes.
    #[inline(always)]
    fn past_ipv4(&self) -> Frame<'a> {
        Frame { start: advance!(self.start, IPV4_BYTES), ..*self }
    }

    /// The frame without its first 40 bytes.
    #[inline(always)]
    fn past_ipv6(&self) -> Frame<'a> {
        Frame { start: advance!(self.start, IPV6_BYTES), ..*self }
    }
}

/// Where the parts of one of our frames are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Number of VLAN tags, at most two.
    pub tags: u8,
    /// The IP header is of version 6.
    pub is_v6: bool,
}

impl Layout {
    /// Offset of our header.
    #[inline(always)]
    #[must_use]
    pub const fn header(self) -> usize {
        PLAIN_HEADER + self.excess()
    }

    /// How much further back our header is than in a plain IPv4 frame.
    #[inline(always)]
    #[must_use]
    pub const fn excess(self) -> usize {
        self.tags as usize * TAG_BYTES + if self.is_v6 { IPV6_BYTES - IPV4_BYTES } else { 0 }
    }
}

/// Offset of our header in an IPv4 frame without tags.
pub const PLAIN_HEADER: usize = ETHERNET_BYTES + IPV4_BYTES + UdpHdr::LEN;

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
const CONGESTED: u8 = 0b11;
const ECN_CAPABLE: u8 = 0b10;
/// Hops that an answer may take.
const TIME_TO_LIVE: u8 = 64;

#[inline(always)]
const fn is_tag(ether_type: u16) -> bool {
    ether_type == ether::VLAN || ether_type == ether::SERVICE_VLAN
}

/// Finds our header in a frame of `length` bytes. (The kernel's verifier takes no difference of the frame's pointers
/// without CAP_PERFMON.) `relayed`: so many ports after those of requests are ours too, for answers to what was sent on.
#[inline(always)]
#[must_use]
pub fn parse(frame: &Frame<'_>, length: u32, node: &Node, relayed: u16) -> Parsed {
    let ours = Ours { node, relayed };
    let mut ip = frame.past_ethernet();
    let Some(mut ether_type) = frame.at::<[u8; 2]>(12).map(|b| u16::from_be_bytes(*b)) else {
        return Parsed::NotOurs;
    };
    let mut tags = 0;
    for _ in 0..2 {
        if is_tag(ether_type) {
            let Some(inner) = ip.at::<[u8; 2]>(2) else { return Parsed::NotOurs };
            ether_type = u16::from_be_bytes(*inner);
            ip = ip.past_tag();
            tags += 1;
        }
    }
    match ether_type {
        ether::IPV4 => parse_v4(&ip, Layout { tags, is_v6: false }, length, ours),
        ether::IPV6 => parse_v6(&ip, Layout { tags, is_v6: true }, length, ours),
        other if is_tag(other) => Parsed::Unread(Refusal::TooManyTags),
        _ => Parsed::NotOurs,
    }
}

#[inline(always)]
fn parse_v4(ip: &Frame<'_>, layout: Layout, length: u32, ours: Ours<'_>) -> Parsed {
    let Some(header) = ip.at::<Ipv4Hdr>(0) else { return Parsed::NotOurs };
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
        datagram_bytes: u32::from(u16::from_be_bytes(header.tot_len)).wrapping_sub(IPV4_BYTES as u32),
    };
    parse_udp(&ip.past_ipv4(), layout, length, ours, &outer)
}

#[inline(always)]
fn parse_v6(ip: &Frame<'_>, layout: Layout, length: u32, ours: Ours<'_>) -> Parsed {
    let Some(header) = ip.at::<Ipv6Hdr>(0) else { return Parsed::NotOurs };
    let outer = Outer {
        source: header.src_addr,
        destination: header.dst_addr,
        is_fragment: header.next_hdr == IPV6_FRAGMENT,
        congested: (header.vcf[1] >> 4) & CONGESTED == CONGESTED,
        datagram_bytes: u32::from(u16::from_be_bytes(header.payload_len)),
    };
    let next = ip.past_ipv6();
    if !outer.is_fragment {
        if header.next_hdr != PROTOCOL_UDP {
            return Parsed::NotOurs;
        }
        return parse_udp(&next, layout, length, ours, &outer);
    }
    let Some(fragment) = next.at::<[u8; 8]>(0) else { return Parsed::NotOurs };
    if fragment[0] != PROTOCOL_UDP || fragment[2] != 0 || fragment[3] & 0xF8 != 0 {
        return Parsed::NotOurs;
    }
    match next.at::<[u8; 12]>(0) {
        Some([.., high, low]) if ours.are([*high, *low], &outer) => Parsed::Bad(Refusal::Fragment),
        _ => Parsed::NotOurs,
    }
}

/// What makes a frame ours.
#[derive(Clone, Copy)]
struct Ours<'a> {
    node: &'a Node,
    relayed: u16,
}

impl Ours<'_> {
    /// The port and the address.
    #[inline(always)]
    fn are(self, port: [u8; 2], outer: &Outer) -> bool {
        let ports = self.node.port_count.wrapping_add(self.relayed);
        u16::from_be_bytes(port).wrapping_sub(self.node.port_base) < ports
            && is_local(self.node, &outer.destination)
    }
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
fn parse_udp(frame: &Frame<'_>, layout: Layout, length: u32, ours: Ours<'_>, outer: &Outer) -> Parsed {
    let Some(udp) = frame.at::<UdpHdr>(0) else { return Parsed::NotOurs };
    if !ours.are(udp.dst, outer) {
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
    let payload_bytes = udp_bytes - overhead;
    let fits = layout.header() as u32 + HEADER_BYTES as u32 + payload_bytes == length;
    // Payloads are whole blocks.
    if udp_bytes != outer.datagram_bytes || !payload_bytes.is_multiple_of(BLOCK_BYTES as u32) || !fits {
        return Parsed::Bad(Refusal::LengthMismatch);
    }
    let port = u16::from_be_bytes(udp.dst).wrapping_sub(ours.node.port_base);
    Parsed::Ours(layout, Arrival { source: outer.source, congested: outer.congested, payload_bytes, port })
}

#[inline(always)]
fn is_local(node: &Node, destination: &Address) -> bool {
    let mut found = false;
    for local in &node.local {
        found |= *local == *destination;
    }
    // Unused entries are all zero, and the unspecified address is nobody's.
    found && *destination != [0; 16]
}

/// Turns a request's frame into its answer's: addresses and ports exchanged, lengths and checksums for `payload`
/// bytes after our header. The UDP checksum becomes zero: what arrived may have been partial (checksum offload), and
/// header check and tag cover the contents. IPv6 receivers must allow zero (RFC 6935).
#[inline(always)]
pub fn turn_round(frame: &mut Frame<'_>, layout: Layout, payload: u32) -> Option<()> {
    let (to, from): (Mac, Mac) = (*frame.at(0)?, *frame.at(size_of::<Mac>())?);
    *frame.at_mut(0)? = from;
    *frame.at_mut(size_of::<Mac>())? = to;
    let datagram = (UdpHdr::LEN + HEADER_BYTES) as u16 + payload as u16;
    let mut ip = past_tags(frame, layout);
    let mut udp = if layout.is_v6 { turn_v6(&mut ip, datagram)? } else { turn_v4(&mut ip, datagram)? };
    let words: &mut [[u8; 4]; 2] = udp.at_mut(0)?;
    let ports = u32::from_ne_bytes(words[0]).rotate_left(16);
    // The length, and no checksum.
    *words = [ports.to_ne_bytes(), (u32::from(datagram) << 16).to_be_bytes()];
    Some(())
}

/// Returns what follows the IP header.
#[inline(always)]
fn turn_v6<'a>(frame: &mut Frame<'a>, datagram: u16) -> Option<Frame<'a>> {
    let ip: &mut Ipv6Hdr = frame.at_mut(0)?;
    core::mem::swap(&mut ip.src_addr, &mut ip.dst_addr);
    ip.payload_len = datagram.to_be_bytes();
    ip.hop_limit = TIME_TO_LIVE;
    if (ip.vcf[1] >> 4) & CONGESTED == CONGESTED {
        ip.vcf[1] = ip.vcf[1] & !(CONGESTED << 4) | ECN_CAPABLE << 4;
    }
    Some(frame.past_ipv6())
}

/// Returns what follows the IP header.
#[inline(always)]
fn turn_v4<'a>(frame: &mut Frame<'a>, datagram: u16) -> Option<Frame<'a>> {
    let words: &mut [[u8; 4]; 5] = frame.at_mut(0)?;
    let [first, fragment, hops, source, destination] = *words;
    let old = u32::from_be_bytes(first);
    let congested = (old >> 16) as u8 & CONGESTED == CONGESTED;
    let marks = if congested { u32::from(CONGESTED ^ ECN_CAPABLE) << 16 } else { 0 };
    let first = old & 0xFFFF_0000 ^ marks | u32::from(datagram + IPV4_BYTES as u16);
    *words = ipv4_words(first, fragment, hops[1], destination, source);
    Some(frame.past_ipv4())
}

/// The way back to the sender of a frame: what its answer would be sent to.
#[inline(always)]
#[must_use]
pub fn way_back(frame: &Frame<'_>, layout: Layout) -> Option<Way> {
    let Mac(high, low): Mac = *frame.at(size_of::<Mac>())?;
    let ip = past_tags(frame, layout);
    let rest = if layout.is_v6 { ip.past_ipv6() } else { ip.past_ipv4() };
    let udp: &UdpHdr = rest.at(0)?;
    let mac = [high[0], high[1], high[2], high[3], low[0], low[1]];
    Some(Way::new(mac, u16::from_be_bytes(udp.src)))
}

/// Sends a frame that came to us on to somebody else, with `payload` bytes after our header: from the address that it
/// came to, and the port unless there is another `source`. What the network marked it with stays.
#[inline(always)]
pub fn send_on(
    frame: &mut Frame<'_>,
    layout: Layout,
    payload: u32,
    source: Option<u16>,
    way: Way,
    address: &Address,
) -> Option<()> {
    let us: Mac = *frame.at(0)?;
    let [a, b, c, d, e, f] = way.mac();
    *frame.at_mut(0)? = Mac([a, b, c, d], [e, f]);
    *frame.at_mut(size_of::<Mac>())? = us;
    let datagram = (UdpHdr::LEN + HEADER_BYTES) as u16 + payload as u16;
    let mut ip = past_tags(frame, layout);
    let mut udp = if layout.is_v6 {
        let header: &mut Ipv6Hdr = ip.at_mut(0)?;
        header.src_addr = header.dst_addr;
        header.dst_addr = *address;
        header.payload_len = datagram.to_be_bytes();
        header.hop_limit = TIME_TO_LIVE;
        ip.past_ipv6()
    } else {
        let [.., a, b, c, d] = *address;
        let words: &mut [[u8; 4]; 5] = ip.at_mut(0)?;
        let [first, fragment, hops, _, us] = *words;
        let first = u32::from_be_bytes(first) & 0xFFFF_0000 | u32::from(datagram + IPV4_BYTES as u16);
        *words = ipv4_words(first, fragment, hops[1], us, [a, b, c, d]);
        ip.past_ipv4()
    };
    let words: &mut [[u8; 4]; 2] = udp.at_mut(0)?;
    let [_, _, high, low] = words[0];
    let [high, low] = source.map_or([high, low], u16::to_be_bytes);
    let [to_high, to_low] = way.port().to_be_bytes();
    // The length, and no checksum.
    *words = [[high, low, to_high, to_low], (u32::from(datagram) << 16).to_be_bytes()];
    Some(())
}

/// The frame from its IP header on.
#[inline(always)]
fn past_tags<'a>(frame: &Frame<'a>, layout: Layout) -> Frame<'a> {
    let mut ip = frame.past_ethernet();
    if layout.tags > 0 {
        ip = ip.past_tag();
    }
    if layout.tags > 1 {
        ip = ip.past_tag();
    }
    ip
}

/// An IPv4 header with its checksum.
#[inline(always)]
fn ipv4_words(
    first: u32,
    fragment: [u8; 4],
    protocol: u8,
    source: [u8; 4],
    destination: [u8; 4],
) -> [[u8; 4]; 5] {
    let hops = u32::from(TIME_TO_LIVE) << 24 | u32::from(protocol) << 16;
    let mut sum = u64::from(first) + u64::from(hops);
    for word in [fragment, source, destination] {
        sum += u64::from(u32::from_be_bytes(word));
    }
    // Three folds: 35 bits become 20, 17 and 16.
    for _ in 0..3 {
        sum = (sum & 0xFFFF) + (sum >> 16);
    }
    let hops = hops | u32::from(!(sum as u16));
    [first.to_be_bytes(), fragment, hops.to_be_bytes(), source, destination]
}
