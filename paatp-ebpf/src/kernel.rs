//! Kernel maps and packet memory as the [`Machine`] that aggregates.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::bpf_loop;
use aya_ebpf::maps::Array;
use aya_ebpf::programs::XdpContext;
use paatp_common::aggregate::Machine;
use paatp_common::counter::{Counters, Event};
use paatp_common::frame::{Frame, PLAIN_HEADER};
use paatp_common::job::{JobEntry, RankEntry};
use paatp_common::lanes::{self, SlotBlock, WireBlock};
use paatp_common::levels::{Above, KeySum, Link, Vouching};
use paatp_common::limits::{BLOCK_BYTES, LOCK_SPINS, MAX_RANKS};
use paatp_common::mind::{blurred, opaque};
use paatp_common::policy::Policy;
use paatp_common::pool::{self, Pool, Search, TURNS};
use paatp_common::progress::{Members, Progress, Walk};
use paatp_common::slot::{Rules, Slot};
use paatp_common::tag::Tag;
use paatp_common::wire::{HEADER_BYTES, Header};

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

/// Takes the lock at `word`; false where it stays taken.
///
/// # Safety
/// `word` is a lock in an element of a slot table.
#[inline(always)]
unsafe fn acquire(word: *mut u64) -> bool {
    // SAFETY: by the contract.
    if unsafe { atomic::compare_exchange(word, 0, 1) } == 0 {
        return true;
    }
    let mut wait = Wait { word, taken: 0 };
    // SAFETY: `spin` is of the shape that the helper calls, and `wait` lives longer than the call.
    unsafe { bpf_loop(LOCK_SPINS, spin as *mut c_void, (&raw mut wait).cast(), 0) };
    forget_pointer(&mut wait.word);
    wait.taken != 0
}

/// A walk over a job's ranks.
struct RankWalk {
    progress: *mut Progress,
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

/// A walk over the ranks of a sum.
struct SumWalk {
    progress: *mut Progress,
    /// The job's first place in the table of ranks.
    first: u64,
    vouching: Vouching,
}

/// One rank of such a walk.
unsafe extern "C" fn vouch_for(turn: u64, walk: *mut c_void) -> i64 {
    // SAFETY: `vouch` passes a `SumWalk` whose progress is an element of the table.
    unsafe {
        let SumWalk { progress, first, vouching } = &mut *walk.cast::<SumWalk>();
        let Some(rank) = maps::RANKS.get((*first + turn) as u32) else { return 1 };
        vouching.visit(turn, rank, &**progress) as i64
    }
}

/// A walk over the ranks of a result.
struct KeyWalk {
    /// The job's first place in the table of ranks.
    first: u64,
    keys: KeySum,
}

/// One rank of such a walk.
unsafe extern "C" fn add_key(turn: u64, walk: *mut c_void) -> i64 {
    // SAFETY: `sum_keys` passes a `KeyWalk`.
    unsafe {
        let KeyWalk { first, keys } = &mut *walk.cast::<KeyWalk>();
        let Some(rank) = maps::RANKS.get((*first + turn) as u32) else { return 1 };
        keys.visit(rank) as i64
    }
}

/// A search in the pool.
struct PoolSearch<const BLOCKS: usize> {
    slots: *mut SlotTable<BLOCKS>,
    search: Search,
}

/// One turn of a search in the pool.
unsafe extern "C" fn look<const BLOCKS: usize>(turn: u64, search: *mut c_void) -> i64 {
    // SAFETY: `search` passes a `PoolSearch` whose table is a map. Other CPUs change slots meanwhile; what is found is
    // looked at again under the slot's lock.
    unsafe {
        let PoolSearch { slots, search } = &mut *search.cast::<PoolSearch<BLOCKS>>();
        let Some(slot) = (**slots).get_ptr(search.index(turn)) else { return 1 };
        let slot = &(*slot).state;
        let owner = u32::from(slot.job());
        let (job, progress) = (maps::JOBS.get(owner), maps::PROGRESS.get(owner));
        let (Some(job), Some(progress)) = (job, progress) else { return 1 };
        search.visit(turn, slot, pool::is_over(slot, job, progress)) as i64
    }
}

/// Takes a pointer off the stack. LLVM uses its place for smaller values later, and without CAP_PERFMON the verifier
/// lets nothing smaller than a word be written over a pointer.
#[inline(always)]
fn forget_pointer<T>(pointer: &mut *mut T) {
    // SAFETY: a live reference; volatile, or LLVM would see that nobody reads it.
    unsafe { (&raw mut *pointer).write_volatile(core::ptr::null_mut()) };
}

/// Ends the program: drops the packet.
#[inline(always)]
fn give_up() -> ! {
    #[cfg(target_arch = "bpf")]
    // SAFETY: ends the program with a verdict. Only inlined into programs, never into callbacks.
    unsafe {
        core::arch::asm!("r0 = {0}", "exit", const aya_ebpf::bindings::xdp_action::XDP_DROP, options(noreturn))
    }
    #[cfg(not(target_arch = "bpf"))]
    unreachable!("on the host the crate is only linted")
}

/// One element of a slot table.
#[repr(C)]
pub struct SlotMemory<const BLOCKS: usize> {
    /// What the slot knows.
    pub state: Slot,
    /// Its lanes.
    pub lanes: [SlotBlock; BLOCKS],
}

/// An element of a slot table. Made from the table only, so it points to one.
#[derive(Clone, Copy)]
pub struct Place<const BLOCKS: usize>(*mut SlotMemory<BLOCKS>);

/// A job's elements of the tables.
#[derive(Clone, Copy)]
pub struct Tables {
    job: *const JobEntry,
    progress: *const Progress,
}

/// A table of slots for payloads of up to `BLOCKS` blocks.
pub type SlotTable<const BLOCKS: usize> = Array<SlotMemory<BLOCKS>>;

/// The same block, computed here: LLVM would otherwise compute the addresses of a loop before the block's bounds check.
#[inline(always)]
fn pinned(block: &WireBlock) -> &WireBlock {
    // SAFETY: the address of a live reference.
    unsafe { &*(opaque(block as *const WireBlock as u64) as *const WireBlock) }
}

/// Adds two lanes at a time, as [`lanes::add`] does.
pub const FAST: bool = false;
/// Adds one lane at a time, as [`lanes::add_naively`] does: what benchmarks compare with.
pub const NAIVE: bool = true;

/// Sums of lower nodes are not taken, and go nowhere.
pub const FLAT: bool = false;
/// They are, and do.
pub const WITH_LEVELS: bool = true;

/// The maps, with the payload of the packet in hand.
pub struct Kernel<'a, const BLOCKS: usize, const SLOW: bool, const LEVELS: bool> {
    /// The packet, with our header at [`PLAIN_HEADER`].
    pub ctx: &'a XdpContext,
    /// The node's slots.
    pub slots: &'static SlotTable<BLOCKS>,
    /// This CPU's counters.
    pub counters: &'static mut Counters,
    /// Zero, which neither compiler nor verifier know.
    pub zero: u64,
}

impl<const BLOCKS: usize, const SLOW: bool, const LEVELS: bool> Kernel<'_, BLOCKS, SLOW, LEVELS> {
    /// Beginning of the payload, and end of the packet.
    #[inline(always)]
    fn payload(&self) -> (*mut u8, *mut u8) {
        let start = self.ctx.data() as *mut u8;
        (start.wrapping_add(PLAIN_HEADER + HEADER_BYTES), self.ctx.data_end() as *mut u8)
    }

    /// Walks `blocks` blocks of payload and slot, by constant steps: without CAP_PERFMON the verifier takes no packet
    /// pointer plus a variable.
    #[inline(always)]
    fn each(&mut self, slot: *mut SlotMemory<BLOCKS>, blocks: u32, pass: &mut impl Pass) -> Option<()> {
        let (mut payload, end) = self.payload();
        let mut before = slot.cast::<u8>();
        let mut i = 0;
        while i < BLOCKS as u64 {
            if i >= blocks as u64 {
                return Some(());
            }
            let next = payload.wrapping_add(BLOCK_BYTES);
            if next > end {
                return None;
            }
            // SAFETY: in bounds by the comparison, and of the slot (an element of the table, see Machine::slot) by the
            // loop's bound. Lanes are changed under the lock only.
            unsafe { pass.block(&mut *block_after(before), &mut *payload.cast()) };
            (payload, before) = (step(payload), step(before));
            // Opaque, or LLVM would unroll the loop, and call the block's pass instead of inlining it.
            i = opaque(i + 1);
        }
        (blocks as usize == BLOCKS).then_some(())
    }

    /// The same for passes that are rare, through a callback.
    #[inline(always)]
    fn walk(&mut self, slot: *mut SlotMemory<BLOCKS>, blocks: u32, pass: Callback) -> Option<(u64, u64)> {
        // Opaque, so that the bound is tested on the very register that the helper gets.
        let blocks = opaque(blocks as u64);
        if blocks > BLOCKS as u64 {
            return None;
        }
        let (payload, end) = self.payload();
        let before = slot.cast();
        let mut walk =
            BlockWalk { before, payload, end, is_short: opaque(0), old: blank_tag(), tag: blank_tag() };
        // SAFETY: the callbacks below are of the shape that the helper calls, and `walk` lives longer than the call.
        unsafe { bpf_loop(blocks as u32, pass as *mut c_void, (&raw mut walk).cast(), 0) };
        forget_pointer(&mut walk.before);
        forget_pointer(&mut walk.payload);
        forget_pointer(&mut walk.end);
        (walk.is_short == 0).then(|| (walk.old.value(), walk.tag.value()))
    }
}

/// The tag of no words. Opaque, or LLVM would call a `memset` that adds variables to pointers.
#[inline(always)]
fn blank_tag() -> Tag {
    Tag { sum: opaque(0), sums: opaque(0) }
}

/// The block that begins as far after a pointer as a slot's first after the slot. Passes walk such pointers, because one
/// to the lanes themselves would end behind the slot, where the verifier lets no pointer go.
#[inline(always)]
fn block_after(before: *mut u8) -> *mut SlotBlock {
    before.wrapping_add(size_of::<Slot>()).cast()
}

/// The pointer one block further, by an instruction with a constant: LLVM would rather add a variable to the first.
#[inline(always)]
fn step(pointer: *mut u8) -> *mut u8 {
    #[cfg(target_arch = "bpf")]
    {
        let mut pointer = pointer;
        // SAFETY: arithmetic on a register.
        unsafe {
            core::arch::asm!("{0} += {1}", inout(reg) pointer, const BLOCK_BYTES, options(nomem, nostack, preserves_flags))
        };
        pointer
    }
    #[cfg(not(target_arch = "bpf"))]
    pointer.wrapping_add(BLOCK_BYTES)
}

/// What a common pass does with each block. A trait and not a closure, whose calls LLVM may leave as calls: one a block
/// costs as much as the addition.
trait Pass {
    fn block(&mut self, lanes: &mut SlotBlock, payload: &mut WireBlock);
}

struct Store(Tag);

impl Pass for Store {
    #[inline(always)]
    fn block(&mut self, lanes: &mut SlotBlock, payload: &mut WireBlock) {
        lanes::store(lanes, payload, &mut self.0);
    }
}

struct Add<const SLOW: bool> {
    tag: Tag,
    overflow: bool,
}

impl<const SLOW: bool> Pass for Add<SLOW> {
    #[inline(always)]
    fn block(&mut self, lanes: &mut SlotBlock, payload: &mut WireBlock) {
        if SLOW {
            lanes::add_naively(lanes, pinned(payload), &mut self.tag, &mut self.overflow);
        } else {
            lanes::add(lanes, payload, &mut self.tag);
        }
    }
}

struct Emit;

impl Pass for Emit {
    #[inline(always)]
    fn block(&mut self, lanes: &mut SlotBlock, payload: &mut WireBlock) {
        lanes::emit(payload, lanes);
    }
}

/// What `bpf_loop` calls: with the number of the turn and a context; non-zero ends the loop.
type Callback = unsafe extern "C" fn(u64, *mut c_void) -> i64;

/// A rare pass over payload and slot: what its callback needs, and what comes of it.
struct BlockWalk {
    /// See [`block_after`].
    before: *mut u8,
    payload: *mut u8,
    end: *mut u8,
    is_short: u64,
    old: Tag,
    tag: Tag,
}

impl BlockWalk {
    /// Payload of this turn, and on to the next.
    #[inline(always)]
    fn payload(&mut self) -> Option<&'static mut WireBlock> {
        let payload = self.payload;
        if payload.wrapping_add(BLOCK_BYTES) > self.end {
            self.is_short = 1;
            return None;
        }
        self.payload = step(payload);
        // SAFETY: in bounds; the packet outlives the pass, and nothing else touches its payload meanwhile.
        Some(unsafe { &mut *payload.cast() })
    }

    /// Lanes of this turn, and on to the next.
    ///
    /// # Safety
    /// The walk is over a slot whose lock is held, and has no more turns than that has blocks.
    #[inline(always)]
    unsafe fn lanes(&mut self) -> &'static mut SlotBlock {
        let before = self.before;
        self.before = step(before);
        // SAFETY: by the contract.
        unsafe { &mut *block_after(before) }
    }
}

unsafe extern "C" fn verify_block(_turn: u64, walk: *mut c_void) -> i64 {
    // SAFETY: `Kernel::walk` passes a `BlockWalk`.
    let walk = unsafe { &mut *walk.cast::<BlockWalk>() };
    let mut tag = walk.tag;
    let Some(payload) = walk.payload() else { return 1 };
    lanes::verify(payload, &mut tag);
    walk.tag = tag;
    0
}

unsafe extern "C" fn subtract_block(_turn: u64, walk: *mut c_void) -> i64 {
    // SAFETY: as above, with a slot.
    let walk = unsafe { &mut *walk.cast::<BlockWalk>() };
    let Some(payload) = walk.payload() else { return 1 };
    // SAFETY: `Kernel::walk` allows as many turns as a slot has blocks.
    lanes::subtract(unsafe { walk.lanes() }, payload);
    0
}

unsafe extern "C" fn lift_block(_turn: u64, walk: *mut c_void) -> i64 {
    // SAFETY: as above.
    let walk = unsafe { &mut *walk.cast::<BlockWalk>() };
    let Some(payload) = walk.payload() else { return 1 };
    // SAFETY: as above.
    lanes::emit(payload, unsafe { walk.lanes() });
    0
}

unsafe extern "C" fn replace_block(_turn: u64, walk: *mut c_void) -> i64 {
    // SAFETY: as above.
    let walk = unsafe { &mut *walk.cast::<BlockWalk>() };
    let mut tag = walk.tag;
    let Some(payload) = walk.payload() else { return 1 };
    // SAFETY: as above.
    lanes::store(unsafe { walk.lanes() }, payload, &mut tag);
    0
}

unsafe extern "C" fn maximum_block(_turn: u64, walk: *mut c_void) -> i64 {
    // SAFETY: as above.
    let walk = unsafe { &mut *walk.cast::<BlockWalk>() };
    let (mut before, mut after) = (walk.old, walk.tag);
    let Some(payload) = walk.payload() else { return 1 };
    // SAFETY: as above.
    lanes::maximum(unsafe { walk.lanes() }, payload, &mut before, &mut after);
    (walk.old, walk.tag) = (before, after);
    0
}

impl<const BLOCKS: usize, const SLOW: bool, const LEVELS: bool> Machine for Kernel<'_, BLOCKS, SLOW, LEVELS> {
    type JobRef = Tables;
    type SlotRef = Place<BLOCKS>;
    const LEVELS: bool = LEVELS;

    #[inline(always)]
    fn header(&mut self) -> &mut Header {
        // SAFETY: the kernel vouches for the range; the borrow of `self` keeps the reference unique.
        let frame = unsafe { Frame::from_raw(self.ctx.data() as *mut u8, self.ctx.data_end() as *mut u8) };
        match frame.into_mut(PLAIN_HEADER) {
            Some(header) => header,
            // `serve` has looked, but each pointer is new to the verifier.
            None => give_up(),
        }
    }

    #[inline(always)]
    fn find(&self, number: u16) -> Option<Tables> {
        let (job, progress) = (maps::JOBS.get_ptr(number as u32)?, maps::PROGRESS.get_ptr(number as u32)?);
        Some(Tables { job, progress })
    }

    #[inline(always)]
    fn job(&self, job: Tables) -> &JobEntry {
        // SAFETY: an element of the table; user space changes it, one field after the other.
        unsafe { &*job.job }
    }

    #[inline(always)]
    fn rules(&self, job: Tables) -> Rules {
        // SAFETY: as above; volatile, so that the fields are really read again.
        unsafe {
            Rules {
                generation: (&raw const (*job.job).generation).read_volatile(),
                expected: (&raw const (*job.job).expected).read_volatile(),
            }
        }
    }

    #[inline(always)]
    fn policy(&self, job: Tables) -> Policy {
        // SAFETY: as above; one instruction on an aligned word.
        unsafe { (&raw const (*job.job).policy).read_volatile() }
    }

    #[inline(always)]
    fn replace_policy(&mut self, job: Tables, from: Policy, to: Policy) {
        // SAFETY: an aligned word of the table, which user space replaces in one piece as well. The table is writable;
        // only the pointer was made for reading.
        unsafe { atomic::compare_exchange((&raw const (*job.job).policy).cast_mut().cast(), from.0, to.0) };
    }

    #[inline(always)]
    fn progress(&self, job: Tables) -> &Progress {
        // SAFETY: an element of the table, which holds atomic words only.
        unsafe { &*job.progress }
    }

    #[inline(always)]
    fn recompute(&mut self, job: Tables, members: Members) {
        let progress = self.progress(job);
        let mut walk =
            RankWalk { progress: (&raw const *progress).cast_mut(), walk: Walk::new(progress, members) };
        // SAFETY: `visit` is of the shape that the helper calls, and `walk` lives longer than the call.
        unsafe { bpf_loop(MAX_RANKS as u32, visit as *mut c_void, (&raw mut walk).cast(), 0) };
        forget_pointer(&mut walk.progress);
        walk.walk.finish(progress);
    }

    #[inline(always)]
    fn rank(&self, number: u16, rank: u8) -> Option<&RankEntry> {
        maps::RANKS.get(number as u32 * MAX_RANKS as u32 + rank as u32)
    }

    #[inline(always)]
    fn slot(&self, index: u32) -> Option<Self::SlotRef> {
        self.slots.get_ptr_mut(index).map(Place)
    }

    #[inline(always)]
    fn state(&mut self, slot: Self::SlotRef) -> &mut Slot {
        // SAFETY: points to an element of the slot table. Other CPUs change it under its lock; what is read without
        // the lock is checked again afterwards (aggregate::look_up, hand_out).
        unsafe { &mut (*slot.0).state }
    }

    #[inline(always)]
    fn lock(&mut self, slot: Self::SlotRef) -> bool {
        // SAFETY: an element of the table; the word is only changed here and in `unlock`.
        unsafe { acquire(&raw mut (*slot.0).state.lock) }
    }

    #[inline(always)]
    fn unlock(&mut self, slot: Self::SlotRef) {
        // SAFETY: this CPU holds the lock.
        unsafe { atomic::release(&raw mut (*slot.0).state.lock) };
    }

    #[inline(always)]
    fn pool(&self) -> Pool {
        // `serve` has looked it up before.
        maps::NODE.get(0).map_or(Pool { first: 0, slots: 1 }, |node| node.pool)
    }

    #[inline(always)]
    fn search(&mut self, search: Search) -> Search {
        let mut search = PoolSearch { slots: (&raw const *self.slots).cast_mut(), search };
        // SAFETY: `look` is of the shape that the helper calls, and `search` lives longer than the call.
        unsafe { bpf_loop(TURNS, look::<BLOCKS> as *mut c_void, (&raw mut search).cast(), 0) };
        forget_pointer(&mut search.slots);
        search.search
    }

    #[inline(always)]
    fn lock_home(&mut self, slot: Self::SlotRef) -> bool {
        // SAFETY: as in `lock`.
        unsafe { acquire(&raw mut (*slot.0).state.home_lock) }
    }

    #[inline(always)]
    fn unlock_home(&mut self, slot: Self::SlotRef) {
        // SAFETY: this CPU holds the lock.
        unsafe { atomic::release(&raw mut (*slot.0).state.home_lock) };
    }

    #[inline(always)]
    fn count(&mut self, counter: u32) {
        self.counters.count(self.forget(counter as u64) as u32);
    }

    #[inline(always)]
    fn forget(&self, value: u64) -> u64 {
        blurred(value, self.zero)
    }

    #[inline(always)]
    fn note(&mut self, event: Event) {
        self.counters.note(event);
    }

    #[inline(always)]
    fn store(&mut self, slot: Self::SlotRef, blocks: u32) -> Option<u64> {
        let mut pass = Store(blank_tag());
        self.each(slot.0, blocks, &mut pass)?;
        Some(pass.0.value())
    }

    #[inline(always)]
    fn add(&mut self, slot: Self::SlotRef, blocks: u32) -> Option<u64> {
        let mut pass = Add::<SLOW> { tag: blank_tag(), overflow: false };
        self.each(slot.0, blocks, &mut pass)?;
        if pass.overflow { None } else { Some(pass.tag.value()) }
    }

    #[inline(always)]
    fn subtract(&mut self, slot: Self::SlotRef, blocks: u32) {
        self.walk(slot.0, blocks, subtract_block);
    }

    #[inline(always)]
    fn maximum(&mut self, slot: Self::SlotRef, blocks: u32) -> Option<(u64, u64)> {
        self.walk(slot.0, blocks, maximum_block)
    }

    #[inline(always)]
    fn verify(&mut self, blocks: u32) -> Option<u64> {
        self.walk(core::ptr::null_mut(), blocks, verify_block).map(|(_, tag)| tag)
    }

    #[inline(always)]
    fn emit(&mut self, slot: Self::SlotRef, blocks: u32) -> Option<()> {
        self.each(slot.0, blocks, &mut Emit)
    }

    #[inline(always)]
    fn link(&self, number: u16) -> Option<&Link> {
        maps::LINKS.get(u32::from(number))
    }

    #[inline(always)]
    fn above(&self, number: u16) -> Option<&Above> {
        maps::ABOVE.get(u32::from(number))
    }

    #[inline(always)]
    fn rises(&self, job: Tables) -> bool {
        // SAFETY: an element of the table; volatile, so that it is really read again.
        unsafe { (&raw const (*job.job).rises).read_volatile() != 0 }
    }

    #[inline(always)]
    fn ports(&self) -> u16 {
        // `serve` has looked it up before.
        maps::NODE.get(0).map_or(0, |node| node.port_count)
    }

    #[inline(always)]
    fn sum_keys(&mut self, number: u16, keys: KeySum) -> KeySum {
        let mut walk = KeyWalk { first: u64::from(number) * MAX_RANKS as u64, keys };
        // SAFETY: `add_key` is of the shape that the helper calls, and `walk` lives longer than the call.
        unsafe { bpf_loop(MAX_RANKS as u32, add_key as *mut c_void, (&raw mut walk).cast(), 0) };
        walk.keys
    }

    #[inline(always)]
    fn vouch(&mut self, job: Tables, number: u16, vouching: Vouching) -> Vouching {
        let progress = job.progress.cast_mut();
        let mut walk = SumWalk { progress, first: u64::from(number) * MAX_RANKS as u64, vouching };
        // SAFETY: `vouch_for` is of the shape that the helper calls, and `walk` lives longer than the call.
        unsafe { bpf_loop(MAX_RANKS as u32, vouch_for as *mut c_void, (&raw mut walk).cast(), 0) };
        forget_pointer(&mut walk.progress);
        walk.vouching
    }

    #[inline(always)]
    fn lift(&mut self, slot: Self::SlotRef, blocks: u32) -> Option<()> {
        self.walk(slot.0, blocks, lift_block).map(|_| ())
    }

    #[inline(always)]
    fn replace(&mut self, slot: Self::SlotRef, blocks: u32) -> Option<()> {
        self.walk(slot.0, blocks, replace_block).map(|_| ())
    }
}
