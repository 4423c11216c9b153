//! The aggregator inside the kernel.
//!
//! [`serve`] is the whole XDP program for slots of `BLOCKS` blocks: it parses the frame, runs
//! [`paatp_common::aggregate::handle`] over kernel maps and packet memory ([`kernel::Kernel`]), and turns the frame round.
//! Nothing is decided here.

#![no_std]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]
#![cfg_attr(
    target_arch = "bpf",
    allow(internal_features, reason = "BPF has no stable read-modify-write atomics")
)]

pub mod atomic;
pub mod kernel;
pub mod maps;

use aya_ebpf::bindings::xdp_action::{XDP_DROP, XDP_PASS, XDP_TX};
use aya_ebpf::helpers::generated::{bpf_xdp_adjust_head, bpf_xdp_adjust_tail, bpf_xdp_get_buff_len};
use aya_ebpf::programs::XdpContext;
use paatp_common::aggregate::{self, Arrival, Outcome};
use paatp_common::counter::{Counters, Event};
use paatp_common::frame::{self, Frame, Layout, Parsed};
use paatp_common::job::Node;
use paatp_common::levels::Way;
use paatp_common::limits::MAX_RANKS;
use paatp_common::mind::blurred;

use kernel::{Kernel, SlotTable};

/// One frame through the aggregator. Returns the XDP verdict.
#[inline(always)]
pub fn serve<const BLOCKS: usize, const SLOW: bool, const LEVELS: bool>(
    ctx: &XdpContext,
    slots: &'static SlotTable<BLOCKS>,
) -> u32 {
    let (Some(node), Some(counters)) = (maps::NODE.get(0), maps::COUNTERS.get_ptr_mut(0)) else {
        return XDP_PASS;
    };
    // SAFETY: per-CPU memory, and XDP programs of one CPU do not interrupt each other.
    let counters: &'static mut Counters = unsafe { &mut *counters };
    let zero = zero_of(node);
    // SAFETY: a helper on our own context.
    let length = unsafe { bpf_xdp_get_buff_len(ctx.ctx) } as u32;
    let (layout, mut arrival) =
        match frame::parse(&frame_of(ctx), length, node, if LEVELS { MAX_RANKS as u16 } else { 0 }) {
            Parsed::Ours(layout, arrival) => (layout, arrival),
            Parsed::NotOurs => {
                counters.note(Event::Passed);
                return XDP_PASS;
            }
            Parsed::Unread(refusal) => {
                counters.count(blurred(refusal.counter() as u64, zero) as u32);
                return XDP_PASS;
            }
            Parsed::Bad(refusal) => {
                counters.count(blurred(refusal.counter() as u64, zero) as u32);
                return XDP_DROP;
            }
        };
    arrival.congested = blurred(arrival.congested as u64, zero) != 0;
    arrival.payload_bytes = blurred(arrival.payload_bytes as u64, zero) as u32;
    // The header of every layout to the place that it has in a plain frame: offsets stay constant.
    // Blurred, or LLVM would write the rest of the program twice, for plain frames and for others.
    let excess = blurred(layout.excess() as u64, zero);
    if excess != 0 && !move_head(ctx, excess as i32) {
        return XDP_DROP;
    }
    let mut kernel = Kernel::<BLOCKS, SLOW, LEVELS> { ctx, slots, counters, zero };
    let outcome = aggregate::handle(&mut kernel, arrival);
    let Outcome::Answer { payload } = outcome else {
        return if LEVELS { relay(ctx, outcome, layout, arrival, zero) } else { XDP_DROP };
    };
    let excess = blurred(excess, zero);
    if excess != 0 && !move_head(ctx, -(excess as i32)) {
        return XDP_DROP;
    }
    let kept = if payload { arrival.payload_bytes } else { 0 };
    let layout = Layout {
        tags: blurred(layout.tags as u64, zero) as u8,
        is_v6: blurred(layout.is_v6 as u64, zero) != 0,
    };
    if frame::turn_round(&mut frame_of(ctx), layout, kept).is_none() {
        return XDP_DROP;
    }
    let cut = kept as i32 - arrival.payload_bytes as i32;
    // SAFETY: a helper on our own context; packet pointers are not used afterwards.
    if cut != 0 && unsafe { bpf_xdp_adjust_tail(ctx.ctx, cut) } != 0 {
        return XDP_DROP;
    }
    XDP_TX
}

/// Sends a request up to its job's parent, or an answer of that down to its rank. Returns the XDP verdict.
#[inline(always)]
fn relay(ctx: &XdpContext, outcome: Outcome, layout: Layout, arrival: Arrival, zero: u64) -> u32 {
    let (relay, is_up) = match outcome {
        Outcome::Up(relay) => (relay, true),
        Outcome::Down(relay) => (relay, false),
        Outcome::Drop(_) | Outcome::Answer { .. } => return XDP_DROP,
    };
    let (number, is_up) = (relay.number(), blurred(is_up as u64, zero) != 0);
    let excess = blurred(layout.excess() as u64, zero);
    if excess != 0 && !move_head(ctx, -(excess as i32)) {
        return XDP_DROP;
    }
    let layout = Layout {
        tags: blurred(layout.tags as u64, zero) as u8,
        is_v6: blurred(layout.is_v6 as u64, zero) != 0,
    };
    let rank = blurred(relay.rank() as u64, zero);
    let Some(above) = maps::ABOVE.get(number as u32) else { return XDP_DROP };
    let (way, address) = if is_up {
        let (Some(link), Some(back)) =
            (maps::LINKS.get(number as u32), frame::way_back(&frame_of(ctx), layout))
        else {
            return XDP_DROP;
        };
        above.remember(rank as usize, back);
        (Way::new(link.mac, relay.port()), &link.parent)
    } else {
        let place = number as u64 * MAX_RANKS as u64 + (rank & (MAX_RANKS as u64 - 1));
        let Some(member) = maps::RANKS.get(place as u32) else { return XDP_DROP };
        let way = above.way(rank as usize);
        if !way.is_known() {
            return XDP_DROP;
        }
        (way, &member.address)
    };
    let kept = if is_up && !relay.has_payload() { 0 } else { arrival.payload_bytes };
    let kept = blurred(kept as u64, zero) as u32;
    let source = match (blurred(relay.source() as u64, zero) as u16, maps::NODE.get(0)) {
        (0, _) | (_, None) => None,
        (port, Some(node)) => Some(node.port_base.wrapping_add(port - 1)),
    };
    if frame::send_on(&mut frame_of(ctx), layout, kept, source, way, address).is_none() {
        return XDP_DROP;
    }
    let cut = kept as i32 - arrival.payload_bytes as i32;
    // SAFETY: a helper on our own context; packet pointers are not used afterwards.
    if cut != 0 && unsafe { bpf_xdp_adjust_tail(ctx.ctx, cut) } != 0 {
        return XDP_DROP;
    }
    XDP_TX
}

/// Moves the beginning of the packet; what lies before it stays in memory.
#[inline(always)]
fn move_head(ctx: &XdpContext, bytes: i32) -> bool {
    // SAFETY: a helper on our own context; packet pointers are taken anew afterwards.
    unsafe { bpf_xdp_adjust_head(ctx.ctx, bytes) == 0 }
}

/// Zero, but neither LLVM nor the verifier knows; see [`aggregate::Machine::forget`].
#[inline(always)]
fn zero_of(node: &Node) -> u64 {
    // SAFETY: a field of a live reference.
    unsafe { (&raw const node.reserved).read_volatile() as u64 }
}

/// The packet's linear part.
#[inline(always)]
fn frame_of(ctx: &XdpContext) -> Frame<'static> {
    // SAFETY: the kernel vouches for the range; each use ends before the next begins.
    unsafe { Frame::from_raw(ctx.data() as *mut u8, ctx.data_end() as *mut u8) }
}

/// Programs cannot unwind; the verifier proves that this is never reached.
#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
