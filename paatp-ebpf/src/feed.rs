//! Makes one frame after the other the next contribution of a job, for benchmarks: a frame that `BPF_PROG_TEST_RUN`
//! repeats comes back as the answer to itself, and would be counted as a duplicate.
//!
//! The ranks take turns, one chunk after the other. Payloads are zero and stay so, because sums of zeros are zeros:
//! whatever an answer writes over them, their checksum is their salt. What an addition costs does not depend on values.

use aya_ebpf::helpers::generated::bpf_xdp_adjust_tail;
use aya_ebpf::macros::map;
use aya_ebpf::maps::{Array, PerCpuArray};
use aya_ebpf::programs::XdpContext;
use paatp_common::frame::Frame;
use paatp_common::limits::{BLOCK_BYTES, MAX_RANKS, WIDE_BLOCKS};
use paatp_common::seq::Seq;
use paatp_common::tag;
use paatp_common::wire::Header;
use paatp_ebpf::atomic;

/// Ethernet, IPv4, UDP.
pub const OUTER_BYTES: usize = 42;

/// What to feed. The benchmark (`paatp-tests`) repeats this layout.
#[repr(C)]
pub struct Feed {
    /// The frame's first bytes: everything before our header.
    pub outer: [u8; OUTER_BYTES],
    /// Zero.
    pub reserved: [u8; 6],
    /// Our header; what changes from frame to frame is written over it.
    pub header: Header,
    /// Salt factors of the ranks.
    pub keys: [u64; MAX_RANKS],
    /// Number of ranks less one, a power of two less one.
    pub rank_mask: u32,
    /// Its number of bits.
    pub rank_bits: u32,
    /// The wished-for result is this many chunks back; beyond what is complete, answers carry none.
    pub wish_back: u32,
    /// Bytes of the whole frame.
    pub frame_bytes: u32,
}

#[map]
static FEED: Array<Feed> = Array::with_max_entries(1, 0);

/// Frames fed so far.
#[map]
static FED: PerCpuArray<u64> = PerCpuArray::with_max_entries(1, 0);

/// Index in `SEEN` of frames that `drop_all` dropped.
pub const DROPPED: u32 = 0;
/// Index in `SEEN` of frames that `echo` sent back.
pub const ECHOED: u32 = 1;

/// Frames that `drop_all` and `echo` saw.
#[map]
static SEEN: PerCpuArray<u64> = PerCpuArray::with_max_entries(2, 0);

/// Counts one frame.
#[inline(always)]
pub fn count(what: u32) {
    if let Some(seen) = SEEN.get_ptr_mut(what) {
        // SAFETY: per-CPU memory.
        unsafe { *seen = (*seen).wrapping_add(1) };
    }
}

/// Writes the next contribution into the frame, lengthening it if an answer had cut it.
#[inline(always)]
pub fn next(ctx: &XdpContext) -> Option<()> {
    let (feed, fed) = (FEED.get(0)?, FED.get_ptr_mut(0)?);
    // SAFETY: per-CPU memory.
    let number = unsafe { *fed };
    if frame_of(ctx).at::<[u8; 1]>(OUTER_BYTES + size_of::<Header>()).is_none() {
        let missing = feed.frame_bytes as i32 - (OUTER_BYTES + size_of::<Header>()) as i32;
        // SAFETY: a helper on our own context; packet pointers are taken anew.
        if unsafe { bpf_xdp_adjust_tail(ctx.ctx, missing) } != 0 {
            return None;
        }
    }
    let mut frame = frame_of(ctx);
    *frame.at_mut(0)? = feed.outer;
    let header: &mut Header = frame.at_mut(OUTER_BYTES)?;
    *header = feed.header;
    let rank = number as u32 & feed.rank_mask & (MAX_RANKS as u32 - 1);
    // Chunk 0 stays empty, so that the first wishes have something to be behind of.
    let seq = (number >> (feed.rank_bits & 63)) as u32 + 1;
    header.set_worker(rank as u8);
    header.set_bitmap(1 << rank);
    header.set_raw_seq(seq);
    header.set_raw_want(seq.wrapping_sub(feed.wish_back));
    header.set_raw_ack(seq - 1);
    header.set_raw_progress(seq - 1);
    header.set_token(number as u32);
    header.set_tag(tag::salt(feed.keys[rank as usize], Seq(seq), header.chunk()));
    header.seal();
    warm(ctx);
    // Atomic, so that all the writes above have reached the cache, as those of a network card have, before the aggregator
    // reads the frame: it would else pay for waiting for them.
    // SAFETY: a word of a map.
    unsafe { atomic::fetch_add(fed, 1) };
    Some(())
}

/// Reads the payload once: lengthening a frame clears it past the first-level cache, and the aggregator would pay for that.
#[inline(always)]
fn warm(ctx: &XdpContext) {
    const LINE: usize = 64;
    let frame = frame_of(ctx);
    for line in 0..(WIDE_BLOCKS * BLOCK_BYTES / LINE) {
        let Some(byte) = frame.at::<[u8; 1]>(OUTER_BYTES + size_of::<Header>() + line * LINE) else { break };
        // SAFETY: a live reference; volatile, or nothing would be read.
        unsafe { byte.as_ptr().read_volatile() };
    }
}

/// Bytes that a live frame is longer than what is sent of it.
pub const LIVE_SPARE: i32 = 4;

/// Cuts the spare bytes off a live frame. The kernel gives the same pages to later frames, and notices only by a cut
/// here that it has to set their length anew, which an answer may have changed meanwhile.
#[inline(always)]
pub fn trim(ctx: &XdpContext) -> Option<()> {
    // SAFETY: a helper on our own context; packet pointers are not used afterwards.
    (unsafe { bpf_xdp_adjust_tail(ctx.ctx, -LIVE_SPARE) } == 0).then_some(())
}

/// Cuts the frame as an answer without a result is cut.
#[inline(always)]
pub fn cut(ctx: &XdpContext) -> Option<()> {
    let feed = FEED.get(0)?;
    if feed.wish_back as i32 >= 0 {
        return Some(());
    }
    let spare = feed.frame_bytes as i32 - (OUTER_BYTES + size_of::<Header>()) as i32;
    // SAFETY: a helper on our own context; packet pointers are not used afterwards.
    (unsafe { bpf_xdp_adjust_tail(ctx.ctx, -spare) } == 0).then_some(())
}

#[inline(always)]
fn frame_of(ctx: &XdpContext) -> Frame<'static> {
    // SAFETY: the kernel vouches for the range; each use ends before the next begins.
    unsafe { Frame::from_raw(ctx.data() as *mut u8, ctx.data_end() as *mut u8) }
}
