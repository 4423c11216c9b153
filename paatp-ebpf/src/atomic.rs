//! The atomic operations that stable Rust lacks for BPF. All are sequentially consistent: LLVM miscompiles relaxed
//! ones whose old value is used (`docs/ebpf.md`).

/// Replaces `current` by `new` if it is there; returns what was there.
///
/// # Safety
/// `word` points to an aligned word that is only changed atomically.
#[cfg(target_arch = "bpf")]
#[inline(always)]
pub unsafe fn compare_exchange(word: *mut u64, current: u64, new: u64) -> u64 {
    use core::intrinsics::{AtomicOrdering::SeqCst, atomic_cxchg};
    // SAFETY: passed on to the caller.
    unsafe { atomic_cxchg::<u64, { SeqCst }, { SeqCst }>(word, current, new).0 }
}

/// Adds to a word; returns what was there.
///
/// # Safety
/// As [`compare_exchange`].
#[cfg(target_arch = "bpf")]
#[inline(always)]
pub unsafe fn fetch_add(word: *mut u64, value: u64) -> u64 {
    use core::intrinsics::{AtomicOrdering::SeqCst, atomic_xadd};
    // SAFETY: passed on to the caller.
    unsafe { atomic_xadd::<u64, u64, { SeqCst }>(word, value) }
}

/// Replaces a word; returns what was there.
///
/// # Safety
/// As [`compare_exchange`].
#[cfg(target_arch = "bpf")]
#[inline(always)]
pub unsafe fn swap(word: *mut u64, value: u64) -> u64 {
    use core::intrinsics::{AtomicOrdering::SeqCst, atomic_xchg};
    // SAFETY: passed on to the caller.
    unsafe { atomic_xchg::<u64, { SeqCst }>(word, value) }
}

/// The same on the host, where the crate is only linted.
#[cfg(not(target_arch = "bpf"))]
mod host {
    use core::sync::atomic::{AtomicU64, Ordering::SeqCst};

    /// See the BPF version.
    ///
    /// # Safety
    /// `word` points to an aligned word that is only changed atomically.
    pub unsafe fn compare_exchange(word: *mut u64, current: u64, new: u64) -> u64 {
        // SAFETY: passed on to the caller.
        let word = unsafe { AtomicU64::from_ptr(word) };
        word.compare_exchange(current, new, SeqCst, SeqCst).unwrap_or_else(|found| found)
    }

    /// See the BPF version.
    ///
    /// # Safety
    /// As [`compare_exchange`].
    pub unsafe fn fetch_add(word: *mut u64, value: u64) -> u64 {
        // SAFETY: passed on to the caller.
        unsafe { AtomicU64::from_ptr(word) }.fetch_add(value, SeqCst)
    }

    /// See the BPF version.
    ///
    /// # Safety
    /// As [`compare_exchange`].
    pub unsafe fn swap(word: *mut u64, value: u64) -> u64 {
        // SAFETY: passed on to the caller.
        unsafe { AtomicU64::from_ptr(word) }.swap(value, SeqCst)
    }
}
#[cfg(not(target_arch = "bpf"))]
pub use host::{compare_exchange, fetch_add, swap};
