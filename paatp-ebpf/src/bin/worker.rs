//! The object that a worker with kernel bypass loads: the aggregator's answers go to the worker's AF_XDP sockets,
//! everything else to the stack.
//!
//! On veth it is at the same time the native program without which the peer's `XDP_TX` does not arrive; for that alone
//! (a worker that uses UDP sockets) there is `pass`.

#![cfg_attr(target_arch = "bpf", no_std, no_main)]
#![allow(missing_docs, reason = "the macros' items")]

use aya_ebpf::Global;
use aya_ebpf::bindings::xdp_action::XDP_PASS;
use aya_ebpf::macros::{map, xdp};
use aya_ebpf::maps::XskMap;
use aya_ebpf::programs::XdpContext;
use network_types::ip::{Ipv4Hdr, Ipv6Hdr};
use network_types::udp::UdpHdr;
use paatp_common::frame::Frame;

/// Receive queues whose answers can be redirected; a power of two. The loader (`paatp-user/src/worker/xdp`) repeats it.
const MAX_QUEUES: u32 = 64;

/// The worker's sockets, by receive queue.
#[map]
static SOCKETS: XskMap = XskMap::with_max_entries(MAX_QUEUES, 0);

// Set by the loader, before the kernel sees them: constants to the verifier and the JIT. Numbers are in host order,
// addresses in network order, IPv4 ones in the first four bytes.

/// The aggregator's address.
#[unsafe(no_mangle)]
static AGGREGATOR: Global<[u8; 16]> = Global::new([0; 16]);

/// Its first port.
#[unsafe(no_mangle)]
static PORT_BASE: Global<u16> = Global::new(0);

/// Number of its ports.
#[unsafe(no_mangle)]
static PORTS: Global<u16> = Global::new(0);

/// The worker's address.
#[unsafe(no_mangle)]
static LOCAL: Global<[u8; 16]> = Global::new([0; 16]);

/// The worker's port.
#[unsafe(no_mangle)]
static LOCAL_PORT: Global<u16> = Global::new(0);

const ETHERNET_BYTES: usize = 14;
const ETHER_IPV4: [u8; 2] = [0x08, 0x00];
const ETHER_IPV6: [u8; 2] = [0x86, 0xDD];
const PROTOCOL_UDP: u8 = 17;
/// Version 4, five words of header: no options.
const PLAIN_IPV4: u8 = 0x45;
/// All of the fragment field but "don't fragment".
const FRAGMENT: u16 = 0xBFFF;

/// Hands the aggregator's answers to the socket of the queue that they arrived on; what else there is, and answers on a
/// queue without a socket, to the stack, where the worker listens as well.
#[xdp]
pub fn answers(ctx: XdpContext) -> u32 {
    // SAFETY: the kernel vouches for the range, and nothing else uses it.
    let frame = unsafe { Frame::from_raw(ctx.data() as *mut u8, ctx.data_end() as *mut u8) };
    if is_answer(&frame) != Some(true) {
        return XDP_PASS;
    }
    // SAFETY: the context that the kernel gave.
    let queue = unsafe { (*ctx.ctx).rx_queue_index };
    // The lowest bits of the flags are the verdict where there is no socket.
    match SOCKETS.redirect(queue, XDP_PASS as u64) {
        Ok(verdict) | Err(verdict) => verdict,
    }
}

/// Does nothing, natively. veth hands on what its peer sends with `XDP_TX` only where a native program runs.
#[xdp]
pub fn pass(_: XdpContext) -> u32 {
    XDP_PASS
}

/// None for frames that end too early.
#[inline(always)]
fn is_answer(frame: &Frame<'_>) -> Option<bool> {
    match *frame.at::<[u8; 2]>(12)? {
        ETHER_IPV4 => {
            let ip: &Ipv4Hdr = frame.at(ETHERNET_BYTES)?;
            let is_plain = ip.vihl == PLAIN_IPV4
                && ip.proto == PROTOCOL_UDP
                && u16::from_be_bytes(ip.frags) & FRAGMENT == 0;
            let [a, b, c, d, ..] = AGGREGATOR.load();
            let [e, f, g, h, ..] = LOCAL.load();
            let is_ours = is_plain && ip.src_addr == [a, b, c, d] && ip.dst_addr == [e, f, g, h];
            Some(is_ours && is_between_ports(frame.at(ETHERNET_BYTES + Ipv4Hdr::LEN)?))
        }
        ETHER_IPV6 => {
            let ip: &Ipv6Hdr = frame.at(ETHERNET_BYTES)?;
            let is_ours = ip.next_hdr == PROTOCOL_UDP
                && ip.src_addr == AGGREGATOR.load()
                && ip.dst_addr == LOCAL.load();
            Some(is_ours && is_between_ports(frame.at(ETHERNET_BYTES + Ipv6Hdr::LEN)?))
        }
        _ => Some(false),
    }
}

#[inline(always)]
fn is_between_ports(udp: &UdpHdr) -> bool {
    let (source, destination) = (u16::from_be_bytes(udp.src), u16::from_be_bytes(udp.dst));
    destination == LOCAL_PORT.load() && source.wrapping_sub(PORT_BASE.load()) < PORTS.load()
}

/// Programs cannot unwind; the verifier proves that this is never reached. (The library has one too, but would bring the
/// aggregator's maps along.)
#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// Not every licence string lets a program use every helper.
#[unsafe(no_mangle)]
#[unsafe(link_section = "license")]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[cfg(not(target_arch = "bpf"))]
fn main() {}
