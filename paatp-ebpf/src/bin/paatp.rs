//! The object that `paatp run` loads.

#![cfg_attr(target_arch = "bpf", no_std, no_main)]
#![allow(missing_docs, reason = "the macros' items")]

use aya_ebpf::bindings::xdp_action::XDP_PASS;
use aya_ebpf::macros::{map, xdp};
use aya_ebpf::maps::Array;
use aya_ebpf::programs::XdpContext;
use paatp_common::layout::LAYOUT;
use paatp_common::limits::{STANDARD_BLOCKS, WIDE_BLOCKS};
use paatp_ebpf::kernel::{FAST, FLAT, SlotTable, WITH_LEVELS};
use paatp_ebpf::maps::MMAPABLE;

#[map]
static SLOTS: SlotTable<STANDARD_BLOCKS> = Array::with_max_entries(1, MMAPABLE);

#[map]
static WIDE_SLOTS: SlotTable<WIDE_BLOCKS> = Array::with_max_entries(1, MMAPABLE);

/// The aggregator for payloads of up to 352 lanes (MTU 1500).
#[xdp]
#[inline(always)]
pub fn aggregate(ctx: XdpContext) -> u32 {
    paatp_ebpf::serve::<STANDARD_BLOCKS, FAST, FLAT>(&ctx, &SLOTS)
}

/// The aggregator for payloads of up to 832 lanes (MTU 3440).
#[xdp]
#[inline(always)]
pub fn aggregate_wide(ctx: XdpContext) -> u32 {
    paatp_ebpf::serve::<WIDE_BLOCKS, FAST, FLAT>(&ctx, &WIDE_SLOTS)
}

/// The aggregator of a node with levels (docs/protocol.md), for payloads of up to 352 lanes.
#[xdp]
#[inline(always)]
pub fn levels(ctx: XdpContext) -> u32 {
    paatp_ebpf::serve::<STANDARD_BLOCKS, FAST, WITH_LEVELS>(&ctx, &SLOTS)
}

/// The same for payloads of up to 832 lanes.
#[xdp]
#[inline(always)]
pub fn levels_wide(ctx: XdpContext) -> u32 {
    paatp_ebpf::serve::<WIDE_BLOCKS, FAST, WITH_LEVELS>(&ctx, &WIDE_SLOTS)
}

/// Does nothing. veth hands on what its peer sends with `XDP_TX` only where a native program runs.
#[xdp]
pub fn pass(_: XdpContext) -> u32 {
    XDP_PASS
}

/// Not every licence string lets a program use every helper.
#[unsafe(no_mangle)]
#[unsafe(link_section = "license")]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

/// Which tables this object means; the loader compares.
#[unsafe(no_mangle)]
#[unsafe(link_section = "paatp_layout")]
static PAATP_LAYOUT: [u8; 8] = LAYOUT.to_le_bytes();

#[cfg(not(target_arch = "bpf"))]
fn main() {}
