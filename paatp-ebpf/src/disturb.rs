//! Disturbs the path of our packets on purpose, and counts exactly what it did. For tests only.
//!
//! Two classifiers for a worker's port of the switch: [`disturb_ingress`] meets its requests, [`disturb_egress`] the answers.
//! Both touch only UDP packets with a port in the configured range. What happens to a packet follows from a hash of
//! seed, direction and the packet's number in that direction, so that a run can be repeated. The rolls are
//! independent and come in the order loss, duplicate, reorder, corrupt:
//!
//! - *loss*: the packet is dropped.
//! - *duplicate*: a clone goes ahead, taken before anything is corrupted: of the two at most one is.
//! - *reorder*: the packet is kept until the next one that survives has gone by, and follows it. One is kept at a
//!   time; one that no other follows is lost (counted as delayed, but not as released).
//! - *corrupt*: one bit of the UDP payload (header and lanes) is flipped, and the UDP checksum is set to zero, which
//!   means "none": what we test is our own checks, not those of the stack. (Receivers on IPv6 must allow zero, which
//!   ours do because the aggregator's answers need it.) A packet that is kept is corrupted when it is released.
//!
//! Before all of that comes a *gate*, which drops packets of chosen kinds from a chunk on. So a test brings an operation to
//! a step, and lets it go on from there, without measuring time.
//!
//! Clones and released packets carry a mark and pass untouched and uncounted when they come by again.
//!
//! `paatp-tests` has the loader (`disturbance.rs`), which repeats [`Config`], [`Count`] and the directions: change
//! them together.

use core::ffi::c_void;

use aya_ebpf::bindings::{__sk_buff, BPF_F_INGRESS, TC_ACT_OK, TC_ACT_SHOT};
use aya_ebpf::helpers::{
    bpf_clone_redirect, bpf_redirect, bpf_skb_change_tail, bpf_skb_load_bytes, bpf_skb_store_bytes,
};
use aya_ebpf::macros::{classifier, map};
use aya_ebpf::maps::Array;
use aya_ebpf::programs::TcContext;
use paatp_common::mind::opaque;
use paatp_ebpf::atomic;

/// What to do in one direction. Rates are in parts per million.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Config {
    /// Packets to drop.
    pub loss: u32,
    /// Packets to send twice.
    pub duplicate: u32,
    /// Packets to exchange with their successor.
    pub reorder: u32,
    /// Packets in which to flip a bit.
    pub corrupt: u32,
    /// Where the random decisions start from.
    pub seed: u64,
    /// First port of ours.
    pub first_port: u16,
    /// Last port of ours.
    pub last_port: u16,
    /// Kinds of packets that the gate drops, as bits `1 << kind`; 0 if it is open.
    pub gated: u32,
    /// First chunk whose packets it drops.
    pub gate: u32,
    /// Zero.
    pub reserved: u32,
}

/// Directions, as indices of [`CONFIG`], [`NUMBERS`] and [`KEPT`].
const EGRESS: u32 = 0;
const INGRESS: u32 = 1;
const DIRECTIONS: u32 = 2;

/// What is counted, for each direction: index `direction * COUNTS + count` of [`DISTURBED`].
#[derive(Clone, Copy)]
#[repr(u32)]
pub enum Count {
    /// Packets of ours that came by.
    Seen,
    /// Dropped.
    Dropped,
    /// Sent twice.
    Duplicated,
    /// Kept back for their successor.
    Delayed,
    /// Kept packets that were sent after all.
    Released,
    /// With a flipped bit.
    Corrupted,
    /// Of those: the bit was in our header.
    CorruptedHeader,
    /// Of those: the bit was behind our header.
    CorruptedPayload,
    /// Rolls that could not be carried out: the packet was too long to keep, or a helper failed.
    Failed,
    /// Dropped by the gate; not counted as seen.
    Gated,
}

const COUNTS: u32 = 10;

/// Longest frame that can be kept: 3506 bytes of MTU and a link-layer header.
const KEPT_BYTES: u32 = 3600;
const EMPTY: u64 = 0;
const IN_HAND: u64 = 1;
const FULL: u64 = 2;

/// A packet that waits for its successor.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Kept {
    /// EMPTY, FULL, or IN_HAND while one CPU fills or empties it.
    state: u64,
    length: u32,
    /// Its random number.
    dice: u64,
    frame: [u8; KEPT_BYTES as usize],
}

/// What the loader asks for.
#[map]
static CONFIG: Array<Config> = Array::with_max_entries(DIRECTIONS, 0);

/// What was done.
#[map]
static DISTURBED: Array<u64> = Array::with_max_entries(DIRECTIONS * COUNTS, 0);

/// Number of the next packet.
#[map]
static NUMBERS: Array<u64> = Array::with_max_entries(DIRECTIONS, 0);

/// The packet that waits.
#[map]
static KEPT: Array<Kept> = Array::with_max_entries(DIRECTIONS, 0);

/// Tells packets that were dealt with ("PAds").
const MARK: u32 = 0x5041_6473;

/// What leaves an interface.
#[classifier]
pub fn disturb_egress(context: TcContext) -> i32 {
    disturb(Packet { skb: context.skb.skb }, EGRESS)
}

/// What arrives at an interface.
#[classifier]
pub fn disturb_ingress(context: TcContext) -> i32 {
    disturb(Packet { skb: context.skb.skb }, INGRESS)
}

#[inline(always)]
fn disturb(packet: Packet, direction: u32) -> i32 {
    if packet.mark() == MARK {
        return TC_ACT_OK;
    }
    let Some(config) = CONFIG.get(direction) else { return TC_ACT_OK };
    let Some(datagram) = packet.datagram(config) else { return TC_ACT_OK };
    if packet.is_gated(config, datagram) {
        count(direction, Count::Gated);
        return TC_ACT_SHOT;
    }
    let Some(number) = next_number(direction) else { return TC_ACT_OK };
    count(direction, Count::Seen);
    let dice = mix(mix(config.seed ^ (direction as u64 + 1) << 56) ^ number);

    if hits(dice, 1, config.loss) {
        count(direction, Count::Dropped);
        return TC_ACT_SHOT;
    }
    if hits(dice, 2, config.duplicate) {
        note(direction, packet.send_clone(direction), Count::Duplicated);
    }
    let Some(kept) = KEPT.get_ptr_mut(direction) else { return TC_ACT_OK };
    if hits(dice, 3, config.reorder) && take(kept, EMPTY) {
        if keep(packet, kept, dice) {
            give(kept, FULL);
            count(direction, Count::Delayed);
            return TC_ACT_SHOT;
        }
        give(kept, EMPTY);
        count(direction, Count::Failed);
    }
    if hits(dice, 4, config.corrupt) {
        corrupt(packet, datagram, dice, direction);
    }
    if !take(kept, FULL) {
        return TC_ACT_OK;
    }
    let action = release(packet, kept, config, direction);
    give(kept, EMPTY);
    action
}

/// Lets the packet in hand go ahead and turns it into the one that was kept.
#[inline(always)]
fn release(packet: Packet, kept: *mut Kept, config: &Config, direction: u32) -> i32 {
    if !packet.send_clone(direction) {
        count(direction, Count::Failed);
        return TC_ACT_OK;
    }
    // SAFETY: we hold the state word, so nobody else touches the rest; the frame is bytes.
    let (length, dice) = unsafe { ((*kept).length, (*kept).dice) };
    // SAFETY: as above.
    let frame = unsafe { (&raw const (*kept).frame).cast() };
    // SAFETY: the frame has KEPT_BYTES bytes.
    let is_restored = packet.resize(length) && unsafe { packet.store(0, frame, length) };
    if !is_restored {
        count(direction, Count::Failed);
        return TC_ACT_SHOT;
    }
    count(direction, Count::Released);
    if hits(dice, 4, config.corrupt)
        && let Some(datagram) = packet.datagram(config)
    {
        corrupt(packet, datagram, dice, direction);
    }
    if direction == EGRESS {
        // The clone was transmitted at once; this one follows it.
        return TC_ACT_OK;
    }
    // The clone waits in the backlog: only from behind it does this one follow.
    packet.set_mark(MARK);
    // SAFETY: a helper without pointers.
    unsafe { bpf_redirect(packet.interface(), BPF_F_INGRESS as u64) as i32 }
}

/// Copies the packet to the map. We hold the state word.
#[inline(always)]
fn keep(packet: Packet, kept: *mut Kept, dice: u64) -> bool {
    let length = packet.length();
    // SAFETY: we hold the state word, so nobody else touches the rest; the frame has KEPT_BYTES bytes.
    unsafe {
        (*kept).length = length;
        (*kept).dice = dice;
        packet.load(0, (&raw mut (*kept).frame).cast(), length)
    }
}

/// A length that the verifier sees to be right: opaque, so that the bounds are tested on the register that a helper gets.
#[inline(always)]
fn bounded(length: u32) -> Option<u32> {
    let length = opaque(length as u64);
    (length != 0 && length <= KEPT_BYTES as u64).then_some(length as u32)
}

/// Flips one bit of the UDP payload.
#[inline(always)]
fn corrupt(packet: Packet, datagram: Datagram, dice: u64, direction: u32) {
    let choice = mix(dice ^ 5);
    // Scaled instead of divided: even enough, and cheap.
    let bit = ((choice & 0xFFFF_FFFF) * (datagram.payload_bytes as u64 * 8)) >> 32;
    let offset = datagram.payload + (bit / 8) as u32;
    let Some(byte) = packet.byte(offset) else {
        count(direction, Count::Failed);
        return;
    };
    let is_flipped = packet.set_bytes(offset, [byte ^ 1 << (bit % 8)])
        && packet.set_bytes(datagram.payload - UDP_BYTES + 6, [0u8; 2]);
    note(direction, is_flipped, Count::Corrupted);
    if is_flipped {
        let is_header = bit < OUR_HEADER_BYTES * 8;
        count(direction, if is_header { Count::CorruptedHeader } else { Count::CorruptedPayload });
    }
}

/// A finalizer of splitmix64 (public domain).
#[inline(always)]
const fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// The roll number `which` of a packet comes out below `rate` parts per million.
#[inline(always)]
const fn hits(dice: u64, which: u64, rate: u32) -> bool {
    ((mix(dice ^ which << 48) & 0xFFFF_FFFF) * 1_000_000) >> 32 < rate as u64
}

const UDP_BYTES: u32 = 8;
const OUR_HEADER_BYTES: u64 = 64;
const ETHERNET_BYTES: u32 = 14;
const ETHER_IPV4: u16 = 0x0800;
const ETHER_IPV6: u16 = 0x86DD;
const PROTOCOL_UDP: u8 = 17;

/// Where a UDP payload is.
#[derive(Clone, Copy)]
struct Datagram {
    payload: u32,
    payload_bytes: u32,
}

/// A packet in the classifier's hands.
#[derive(Clone, Copy)]
struct Packet {
    skb: *mut __sk_buff,
}

impl Packet {
    #[inline(always)]
    fn mark(self) -> u32 {
        // SAFETY: the context of a classifier.
        unsafe { (*self.skb).mark }
    }

    #[inline(always)]
    fn set_mark(self, mark: u32) {
        // SAFETY: as above; classifiers may write the mark.
        unsafe { (*self.skb).mark = mark }
    }

    #[inline(always)]
    fn length(self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.skb).len }
    }

    #[inline(always)]
    fn interface(self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.skb).ifindex }
    }

    /// # Safety
    /// `length` bytes at `to`, at most [`KEPT_BYTES`], are writable.
    #[inline(always)]
    unsafe fn load(self, offset: u32, to: *mut c_void, length: u32) -> bool {
        let Some(length) = bounded(length) else { return false };
        // SAFETY: the caller's promise.
        unsafe { bpf_skb_load_bytes(self.skb.cast(), offset, to, length) == 0 }
    }

    /// # Safety
    /// `length` bytes at `from`, at most [`KEPT_BYTES`], are readable.
    #[inline(always)]
    unsafe fn store(self, offset: u32, from: *const c_void, length: u32) -> bool {
        let Some(length) = bounded(length) else { return false };
        // SAFETY: the caller's promise.
        unsafe { bpf_skb_store_bytes(self.skb.cast(), offset, from, length, 0) == 0 }
    }

    #[inline(always)]
    fn bytes<const N: usize>(self, offset: u32) -> Option<[u8; N]> {
        let mut bytes = [0u8; N];
        // SAFETY: N bytes of our own.
        unsafe { self.load(offset, bytes.as_mut_ptr().cast(), N as u32) }.then_some(bytes)
    }

    #[inline(always)]
    fn byte(self, offset: u32) -> Option<u8> {
        self.bytes::<1>(offset).map(|[byte]| byte)
    }

    #[inline(always)]
    fn word(self, offset: u32) -> Option<u16> {
        self.bytes::<2>(offset).map(u16::from_be_bytes)
    }

    #[inline(always)]
    fn set_bytes<const N: usize>(self, offset: u32, bytes: [u8; N]) -> bool {
        // SAFETY: N bytes of our own.
        unsafe { self.store(offset, bytes.as_ptr().cast(), N as u32) }
    }

    #[inline(always)]
    fn resize(self, length: u32) -> bool {
        // SAFETY: a helper without pointers but the context.
        self.length() == length || unsafe { bpf_skb_change_tail(self.skb, length, 0) == 0 }
    }

    /// Sends a marked clone where this packet is going.
    #[inline(always)]
    fn send_clone(self, direction: u32) -> bool {
        let flags = if direction == INGRESS { BPF_F_INGRESS as u64 } else { 0 };
        let mark = self.mark();
        self.set_mark(MARK);
        // SAFETY: a helper without pointers but the context.
        let is_sent = unsafe { bpf_clone_redirect(self.skb, self.interface(), flags) == 0 };
        self.set_mark(mark);
        is_sent
    }

    /// The gate is closed for this packet: by the kind in byte 2 of our header and the chunk in bytes 12 to 15.
    #[inline(always)]
    fn is_gated(self, config: &Config, datagram: Datagram) -> bool {
        if config.gated == 0 {
            return false;
        }
        let kind = self.byte(datagram.payload + 2).unwrap_or(0) & 0x0F;
        let Some(seq) = self.bytes::<4>(datagram.payload + 12).map(u32::from_be_bytes) else { return false };
        config.gated >> kind & 1 == 1 && seq >= config.gate
    }

    /// The payload, if this is an unfragmented UDP packet of ours.
    #[inline(always)]
    fn datagram(self, config: &Config) -> Option<Datagram> {
        let udp = match self.word(12)? {
            ETHER_IPV4 => {
                let is_plain = self.byte(ETHERNET_BYTES)? == 0x45
                    && self.word(ETHERNET_BYTES + 6)? & 0x3FFF == 0
                    && self.byte(ETHERNET_BYTES + 9)? == PROTOCOL_UDP;
                if !is_plain {
                    return None;
                }
                ETHERNET_BYTES + 20
            }
            ETHER_IPV6 if self.byte(ETHERNET_BYTES + 6)? == PROTOCOL_UDP => ETHERNET_BYTES + 40,
            _ => return None,
        };
        let ours = config.first_port..=config.last_port;
        if !ours.contains(&self.word(udp)?) && !ours.contains(&self.word(udp + 2)?) {
            return None;
        }
        let payload = udp + UDP_BYTES;
        let payload_bytes = self.length().checked_sub(payload).filter(|bytes| *bytes > 0)?;
        Some(Datagram { payload, payload_bytes })
    }
}

#[inline(always)]
fn note(direction: u32, is_done: bool, what: Count) {
    count(direction, if is_done { what } else { Count::Failed });
}

#[inline(always)]
fn count(direction: u32, what: Count) {
    if let Some(count) = DISTURBED.get_ptr_mut(direction * COUNTS + what as u32) {
        // SAFETY: a map's value.
        unsafe { atomic::fetch_add(count, 1) };
    }
}

#[inline(always)]
fn next_number(direction: u32) -> Option<u64> {
    // SAFETY: a map's value.
    NUMBERS.get_ptr_mut(direction).map(|number| unsafe { atomic::fetch_add(number, 1) })
}

/// Takes the kept packet's place in hand if it is in state `from`.
#[inline(always)]
fn take(kept: *mut Kept, from: u64) -> bool {
    // SAFETY: the place of a field in a map's value.
    unsafe { atomic::compare_exchange(&raw mut (*kept).state, from, IN_HAND) == from }
}

/// Gives it back in state `to`.
#[inline(always)]
fn give(kept: *mut Kept, to: u64) {
    // SAFETY: as above.
    unsafe { atomic::compare_exchange(&raw mut (*kept).state, IN_HAND, to) };
}
