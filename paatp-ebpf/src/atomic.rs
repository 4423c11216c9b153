//! The atomic operations that stable Rust lacks for BPF, in assembly: code is generated for CPU v2, whose registers are
//! all 64 bits wide (`docs/ebpf.md`), and v2 knows none that returns the old value. (LLVM also miscompiles relaxed ones
//! whose old value is used.) The kernel makes all of them fully ordered.

/// Replaces `current` by `new` if it is there; returns what was there.
///
/// # Safety
/// `word` points to an aligned word that is only changed atomically.
#[cfg(target_arch = "bpf")]
#[inline(always)]
pub unsafe fn compare_exchange(word: *mut u64, current: u64, new: u64) -> u64 {
    let mut found = current;
    // SAFETY: passed on to the caller.
    unsafe {
        core::arch::asm!(
            "r0 = cmpxchg_64({0} + 0, r0, {1})",
            in(reg) word, in(reg) new, inout("r0") found, options(nostack, preserves_flags)
        )
    };
    found
}

/// Adds to a word; returns what was there.
///
/// # Safety
/// As [`compare_exchange`].
#[cfg(target_arch = "bpf")]
#[inline(always)]
pub unsafe fn fetch_add(word: *mut u64, value: u64) -> u64 {
    let mut value = value;
    // SAFETY: passed on to the caller.
    unsafe {
        core::arch::asm!(
            "{1} = atomic_fetch_add((u64 *)({0} + 0), {1})",
            in(reg) word, inout(reg) value, options(nostack, preserves_flags)
        )
    };
    value
}

/// Replaces a word; returns what was there.
///
/// # Safety
/// As [`compare_exchange`].
#[cfg(target_arch = "bpf")]
#[inline(always)]
pub unsafe fn swap(word: *mut u64, value: u64) -> u64 {
    let mut value = value;
    // SAFETY: passed on to the caller.
    unsafe {
        core::arch::asm!("{1} = xchg_64({0} + 0, {1})", in(reg) word, inout(reg) value, options(nostack, preserves_flags))
    };
    value
}

/// Sets a word to zero so that what was written before is seen before.
///
/// # Safety
/// As [`compare_exchange`].
#[cfg(target_arch = "bpf")]
#[inline(always)]
pub unsafe fn release(word: *mut u64) {
    // BPF has a release store from CPU v4 on only. On x86 every store is one; elsewhere an exchange.
    #[cfg(bpf_target_arch = "x86_64")]
    // SAFETY: passed on to the caller. The assembly is a barrier for the compiler.
    unsafe {
        core::arch::asm!("", options(nostack, preserves_flags));
        word.write_volatile(0);
    }
    #[cfg(not(bpf_target_arch = "x86_64"))]
    // SAFETY: passed on to the caller.
    unsafe {
        swap(word, 0);
    }
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
    pub unsafe fn release(word: *mut u64) {
        // SAFETY: passed on to the caller.
        unsafe { AtomicU64::from_ptr(word) }.store(0, SeqCst);
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
pub use host::{compare_exchange, fetch_add, release, swap};
