//! Kernel maps and packet memory as the [`Machine`] that aggregates.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::bpf_loop;
use aya_ebpf::maps::Array;
use paatp_common::aggregate::Machine;
use paatp_common::counter::{Counters, Event};
use paatp_common::frame::Frame;
use paatp_common::job::{JobEntry, RankEntry};
use paatp_common::lanes::{self, SlotBlock, WireBlock};
use paatp_common::limits::{BLOCK_BYTES, LOCK_SPINS, MAX_RANKS};
use paatp_common::progress::{Members, Progress, Walk};
use paatp_common::slot::{Rules, Slot};
use paatp_common::tag::Tag;

use crate::{atomic, maps};

/// A wait for a lock.
struct Wait {
    word: *mut u64,
    taken: u64,
}

/// One turn of a wait. A callback, because the verifier walks it once, and a loop as often as it may turn.
unsafe extern "C" fn spin(_turn: u64, wait: *mut c_void) -> i64 {
    // SAFETY: `lock` passes a `Wait`, whose word is a slot's lock.
    unsafe {
        let wait = wait.cast::<Wait>();
        if atomic::compare_exchange((*wait).word, 0, 1) == 0 {
            (*wait).taken = 1;
        }
        (*wait).taken as i64
    }
}

/// A walk over a job's ranks.
struct RankWalk {
    progress: *const Progress,
    walk: Walk,
}

/// One rank of a walk.
unsafe extern "C" fn visit(rank: u64, walk: *mut c_void) -> i64 {
    // SAFETY: `recompute` passes a `RankWalk` whose progress is an element of the table.
    unsafe {
        let walk = walk.cast::<RankWalk>();
        (*walk).walk.visit(&*(*walk).progress, rank as usize) as i64
    }
}

/// One element of a slot table.
#[repr(C)]
pub struct SlotMemory<const BLOCKS: usize> {
    /// What the slot knows.
    pub state: Slot,
    /// Its lanes.
    pub lanes: [SlotBlock; BLOCKS],
}

/// A table of slots for payloads of up to `BLOCKS` blocks.
pub type SlotTable<const BLOCKS: usize> = Array<SlotMemory<BLOCKS>>;

/// The same block, computed here: LLVM would otherwise compute the addresses of a loop before the block's bounds check.
#[inline(always)]
fn pinned(block: &WireBlock) -> &WireBlock {
    // SAFETY: the address of a live reference.
    unsafe { &*(lanes::opaque(block as *const WireBlock as u64) as *const WireBlock) }
}

/// Adds two lanes at a time, as [`lanes::add`] does.
pub const FAST: bool = false;
/// Adds one lane at a time, as [`lanes::add_naively`] does: what benchmarks compare with.
pub const NAIVE: bool = true;

/// The maps, with the payload of the packet in hand.
pub struct Kernel<const BLOCKS: usize, const SLOW: bool> {
    /// The node's slots.
    pub slots: &'static SlotTable<BLOCKS>,
    /// What follows the packet's header.
    pub payload: *mut u8,
    /// End of the packet.
    pub payload_end: *mut u8,
    /// This CPU's counters.
    pub counters: &'static mut Counters,
    /// Zero, which neither compiler nor verifier know.
    pub zero: u32,
}

impl<const BLOCKS: usize, const SLOW: bool> Kernel<BLOCKS, SLOW> {
    /// The payload, by a pointer that the verifier sees as new. It notes how far each pointer was checked; a pass that
    /// ends after any number of blocks would leave as many different notes behind, and what follows be walked for each.
    #[inline(always)]
    fn payload_start(&self) -> *mut u8 {
        self.payload.wrapping_add((self.forget(0) & 1) as usize)
    }

    /// Walks `blocks` blocks of payload and slot. Constant bounds for the verifier; a comparison of pointers for each
    /// block of the payload.
    #[inline(always)]
    fn each(
        &mut self,
        slot: *mut SlotMemory<BLOCKS>,
        blocks: u32,
        mut pass: impl FnMut(&mut SlotBlock, &mut WireBlock),
    ) -> Option<()> {
        // SAFETY: points to an element of the slot table (Machine::slot). Lanes are changed under the lock only.
        let lanes = unsafe { &mut (*slot).lanes };
        // SAFETY: packet memory; this pass is its only user.
        let mut payload = unsafe { Frame::from_raw(self.payload_start(), self.payload_end) };
        for (i, block) in lanes.iter_mut().enumerate() {
            if i as u32 >= blocks {
                return Some(());
            }
            pass(block, payload.at_mut(i * BLOCK_BYTES)?);
        }
        (blocks as usize == BLOCKS).then_some(())
    }

    /// The same for passes that are rare, through a callback: the verifier walks its body once.
    #[inline(always)]
    fn walk(&mut self, slot: *mut SlotMemory<BLOCKS>, blocks: u32, pass: Callback) -> Option<(u64, u64)> {
        let (payload, end) = (self.payload_start(), self.payload_end);
        let mut walk = BlockWalk { slot, payload, end, is_short: 0, before: Tag::ZERO, tag: Tag::ZERO };
        // SAFETY: the callbacks below are of the shape that the helper calls, and `walk` lives longer than the call.
        unsafe { bpf_loop(blocks, pass as *mut c_void, (&raw mut walk).cast(), 0) };
        let is_whole = walk.is_short == 0 && blocks as usize <= BLOCKS;
        is_whole.then(|| (walk.before.value(), walk.tag.value()))
    }
}

/// What `bpf_loop` calls: with the number of the turn and a context; non-zero ends the loop.
type Callback = unsafe extern "C" fn(u64, *mut c_void) -> i64;

/// A rare pass over payload and slot: what its callback needs, and what comes of it.
struct BlockWalk<const BLOCKS: usize> {
    slot: *mut SlotMemory<BLOCKS>,
    payload: *mut u8,
    end: *mut u8,
    is_short: u64,
    before: Tag,
    tag: Tag,
}

impl<const BLOCKS: usize> BlockWalk<BLOCKS> {
    /// Payload of one turn. No counter: the verifier walks the body until nothing new comes of it.
    #[inline(always)]
    fn payload(&mut self, turn: u64) -> Option<&'static mut WireBlock> {
        if turn >= BLOCKS as u64 {
            return None;
        }
        // SAFETY: the packet outlives the pass, and nothing else touches its payload meanwhile.
        let block = unsafe { Frame::from_raw(self.payload, self.end) }.into_mut(turn as usize * BLOCK_BYTES);
        if block.is_none() {
            self.is_short = 1;
        }
        block
    }
}

unsafe extern "C" fn verify_block<const BLOCKS: usize>(turn: u64, walk: *mut c_void) -> i64 {
    // SAFETY: `Kernel::walk` passes a `BlockWalk`.
    let walk = unsafe { &mut *walk.cast::<BlockWalk<BLOCKS>>() };
    let mut tag = walk.tag;
    let Some(payload) = walk.payload(turn) else { return 1 };
    lanes::verify(payload, &mut tag);
    walk.tag = tag;
    0
}

unsafe extern "C" fn subtract_block<const BLOCKS: usize>(turn: u64, walk: *mut c_void) -> i64 {
    // SAFETY: as above; the slot is an element of the table, whose lock is held.
    let walk = unsafe { &mut *walk.cast::<BlockWalk<BLOCKS>>() };
    let slot = walk.slot;
    let Some(payload) = walk.payload(turn) else { return 1 };
    // SAFETY: `payload` is there only for turns below BLOCKS.
    lanes::subtract(unsafe { &mut (*slot).lanes[turn as usize] }, payload);
    0
}

unsafe extern "C" fn maximum_block<const BLOCKS: usize>(turn: u64, walk: *mut c_void) -> i64 {
    // SAFETY: as above.
    let walk = unsafe { &mut *walk.cast::<BlockWalk<BLOCKS>>() };
    let (slot, mut before, mut after) = (walk.slot, walk.before, walk.tag);
    let Some(payload) = walk.payload(turn) else { return 1 };
    // SAFETY: as above.
    lanes::maximum(unsafe { &mut (*slot).lanes[turn as usize] }, payload, &mut before, &mut after);
    (walk.before, walk.tag) = (before, after);
    0
}

impl<const BLOCKS: usize, const SLOW: bool> Machine for Kernel<BLOCKS, SLOW> {
    type SlotRef = *mut SlotMemory<BLOCKS>;

    #[inline(always)]
    fn job(&self, number: u16) -> Option<&JobEntry> {
        maps::JOBS.get(number as u32)
    }

    #[inline(always)]
    fn rules(&self, number: u16) -> Option<Rules> {
        let entry = maps::JOBS.get_ptr(number as u32)?;
        // SAFETY: an element of the table; volatile, so that it is really read again.
        Some(unsafe { entry.read_volatile() }.rules())
    }

    #[inline(always)]
    fn rank(&self, number: u16, rank: u8) -> Option<&RankEntry> {
        maps::RANKS.get(number as u32 * MAX_RANKS as u32 + rank as u32)
    }

    #[inline(always)]
    fn progress(&self, number: u16) -> Option<&Progress> {
        maps::PROGRESS.get(number as u32)
    }

    #[inline(always)]
    fn recompute(&mut self, number: u16, members: Members) {
        let Some(progress) = maps::PROGRESS.get(number as u32) else { return };
        let mut walk = RankWalk { progress, walk: Walk::new(progress, members) };
        // SAFETY: `visit` is of the shape that the helper calls, and `walk` lives longer than the call.
        unsafe { bpf_loop(MAX_RANKS as u32, visit as *mut c_void, (&raw mut walk).cast(), 0) };
        walk.walk.finish(progress);
    }

    #[inline(always)]
    fn slot(&self, index: u32) -> Option<Self::SlotRef> {
        self.slots.get_ptr_mut(index)
    }

    #[inline(always)]
    fn state(&mut self, slot: Self::SlotRef) -> &mut Slot {
        // SAFETY: points to an element of the slot table. Other CPUs change it under its lock; what is read without
        // the lock is checked again afterwards (aggregate::look_up, hand_out).
        unsafe { &mut (*slot).state }
    }

    #[inline(always)]
    fn lock(&mut self, slot: Self::SlotRef) -> bool {
        // SAFETY: the word is only changed here, in `spin` and in `unlock`.
        let word = unsafe { &raw mut (*slot).state.lock };
        // SAFETY: as above.
        if unsafe { atomic::compare_exchange(word, 0, 1) } == 0 {
            return true;
        }
        let mut wait = Wait { word, taken: 0 };
        // SAFETY: `spin` is of the shape that the helper calls, and `wait` lives longer than the call.
        unsafe { bpf_loop(LOCK_SPINS, spin as *mut c_void, (&raw mut wait).cast(), 0) };
        wait.taken != 0
    }

    #[inline(always)]
    fn unlock(&mut self, slot: Self::SlotRef) {
        // SAFETY: this CPU holds the lock. An exchange, because BPF has no release store below v4.
        unsafe { atomic::swap(&raw mut (*slot).state.lock, 0) };
    }

    #[inline(always)]
    fn count(&mut self, counter: u32) {
        self.counters.count(lanes::opaque(counter as u64) as u32);
    }

    #[inline(always)]
    fn forget(&self, value: u32) -> u32 {
        // Opaque, or LLVM would reuse an earlier forgotten value, of which the verifier has learnt meanwhile.
        lanes::opaque(value as u64) as u32 | self.zero
    }

    #[inline(always)]
    fn note(&mut self, event: Event) {
        self.counters.note(event);
    }

    #[inline(always)]
    fn store(&mut self, slot: Self::SlotRef, blocks: u32) -> Option<u64> {
        let mut tag = Tag::default();
        self.each(slot, blocks, |lanes, payload| lanes::store(lanes, payload, &mut tag))?;
        Some(tag.value())
    }

    #[inline(always)]
    fn add(&mut self, slot: Self::SlotRef, blocks: u32) -> Option<u64> {
        let mut tag = Tag::default();
        let mut overflow = false;
        self.each(slot, blocks, |lanes, payload| {
            if SLOW {
                lanes::add_naively(lanes, pinned(payload), &mut tag, &mut overflow);
            } else {
                lanes::add(lanes, payload, &mut tag);
            }
        })?;
        if overflow {
            return None;
        }
        Some(tag.value())
    }

    #[inline(always)]
    fn subtract(&mut self, slot: Self::SlotRef, blocks: u32) {
        self.walk(slot, blocks, subtract_block::<BLOCKS>);
    }

    #[inline(always)]
    fn maximum(&mut self, slot: Self::SlotRef, blocks: u32) -> Option<(u64, u64)> {
        self.walk(slot, blocks, maximum_block::<BLOCKS>)
    }

    #[inline(always)]
    fn verify(&mut self, blocks: u32) -> Option<u64> {
        self.walk(core::ptr::null_mut(), blocks, verify_block::<BLOCKS>).map(|(_, tag)| tag)
    }

    #[inline(always)]
    fn emit(&mut self, slot: Self::SlotRef, blocks: u32) -> Option<()> {
        self.each(slot, blocks, |lanes, payload| lanes::emit(payload, lanes))
    }
}
