//! Programs for tests and benchmarks only: what disturbs a path, what feeds the aggregator, what it is compared with.

#![cfg_attr(target_arch = "bpf", no_std, no_main)]
#![cfg_attr(
    target_arch = "bpf",
    allow(internal_features, reason = "BPF has no stable read-modify-write atomics")
)]
#![allow(missing_docs, reason = "the macros' items")]

#[path = "../disturb.rs"]
mod disturb;
#[path = "../feed.rs"]
mod feed;

use aya_ebpf::bindings::xdp_action::{XDP_DROP, XDP_PASS, XDP_TX};
use aya_ebpf::macros::{map, xdp};
use aya_ebpf::maps::Array;
use aya_ebpf::programs::XdpContext;
use paatp_common::frame::Frame;
use paatp_common::limits::{STANDARD_BLOCKS, WIDE_BLOCKS};
use paatp_common::mind::{blurred, opaque};
use paatp_ebpf::kernel::{FAST, FLAT, NAIVE, SlotTable};
use paatp_ebpf::maps::MMAPABLE;

#[map]
static SLOTS: SlotTable<STANDARD_BLOCKS> = Array::with_max_entries(1, MMAPABLE);

#[map]
static WIDE_SLOTS: SlotTable<WIDE_BLOCKS> = Array::with_max_entries(1, MMAPABLE);

/// Hands everything on. veth's `XDP_TX` needs a native program at the peer.
#[xdp]
pub fn pass(_: XdpContext) -> u32 {
    XDP_PASS
}

/// Drops and counts everything: the cheapest thing that can be done with a frame, and the sink of answers.
#[xdp]
pub fn drop_all(_: XdpContext) -> u32 {
    feed::count(feed::DROPPED);
    XDP_DROP
}

/// Sends every frame back, addresses exchanged: the ceiling of whatever answers in place.
#[xdp]
pub fn echo(ctx: XdpContext) -> u32 {
    feed::count(feed::ECHOED);
    // SAFETY: the kernel vouches for the range.
    let mut frame = unsafe { Frame::from_raw(ctx.data() as *mut u8, ctx.data_end() as *mut u8) };
    let Some(macs) = frame.at_mut::<[[u8; 6]; 2]>(0) else { return XDP_DROP };
    macs.swap(0, 1);
    XDP_TX
}

/// Steps that [`clock`] does in one turn, and its turns. The benchmark (`paatp-tests`) knows their product.
const CLOCK_STEPS: u32 = 16;
const CLOCK_TURNS: u32 = 256;

/// 4096 instructions that wait for each other: as many cycles of the core's clock, for benchmarks on machines whose clock
/// is unsteady.
#[xdp]
pub fn clock(_: XdpContext) -> u32 {
    let step = opaque(1);
    let mut word = step;
    let mut turn = 0u64;
    while turn < u64::from(CLOCK_TURNS) {
        for _ in 0..CLOCK_STEPS {
            word = blurred(word, step);
        }
        turn += 1;
    }
    if word == step { XDP_PASS } else { XDP_DROP }
}

/// Makes the frame the next contribution and sends it out of its interface: for live frames.
#[xdp]
pub fn feed_out(ctx: XdpContext) -> u32 {
    match feed::next(&ctx).and_then(|()| feed::trim(&ctx)) {
        Some(()) => XDP_TX,
        None => XDP_DROP,
    }
}

/// Makes the frame the next contribution, and nothing else: what the benchmarks subtract.
#[xdp]
pub fn feed_only(ctx: XdpContext) -> u32 {
    match feed::next(&ctx).and_then(|()| feed::cut(&ctx)) {
        Some(()) => XDP_TX,
        None => XDP_DROP,
    }
}

/// The aggregator, fed.
#[xdp]
#[inline(always)]
pub fn feed_aggregate(ctx: XdpContext) -> u32 {
    match feed::next(&ctx) {
        Some(()) => paatp_ebpf::serve::<STANDARD_BLOCKS, FAST, FLAT>(&ctx, &SLOTS),
        None => XDP_DROP,
    }
}

/// The aggregator for wide payloads, fed.
#[xdp]
#[inline(always)]
pub fn feed_aggregate_wide(ctx: XdpContext) -> u32 {
    match feed::next(&ctx) {
        Some(()) => paatp_ebpf::serve::<WIDE_BLOCKS, FAST, FLAT>(&ctx, &WIDE_SLOTS),
        None => XDP_DROP,
    }
}

/// The aggregator with a loop of 32-bit additions, fed.
#[xdp]
#[inline(always)]
pub fn feed_naive(ctx: XdpContext) -> u32 {
    match feed::next(&ctx) {
        Some(()) => paatp_ebpf::serve::<STANDARD_BLOCKS, NAIVE, FLAT>(&ctx, &SLOTS),
        None => XDP_DROP,
    }
}

/// The aggregator as `paatp run` loads it, with this object's maps.
#[xdp]
#[inline(always)]
pub fn aggregate(ctx: XdpContext) -> u32 {
    paatp_ebpf::serve::<STANDARD_BLOCKS, FAST, FLAT>(&ctx, &SLOTS)
}

/// Not every licence string lets a program use every helper.
#[unsafe(no_mangle)]
#[unsafe(link_section = "license")]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[cfg(not(target_arch = "bpf"))]
fn main() {}
