//! What keeps the kernel's verifier content: values that the compiler knows nothing of, and pointers that only constants
//! are added to. On the host all of it is plain arithmetic. `docs/ebpf.md` tells the reasons at length.

/// Keeps the compiler from moving memory accesses across; no instruction is emitted.
#[inline(always)]
pub(crate) fn barrier() {
    #[cfg(target_arch = "bpf")]
    // SAFETY: empty; only a barrier for the compiler.
    unsafe {
        core::arch::asm!("", options(nostack, preserves_flags))
    };
}

/// The same value, of which the compiler knows nothing: it neither drops checks that the verifier wants nor turns
/// arithmetic back into branches.
#[inline(always)]
#[must_use]
pub fn opaque(value: u64) -> u64 {
    #[cfg(target_arch = "bpf")]
    let value = {
        let mut value = value;
        // SAFETY: moves a register to itself. (An empty template would leave line info without an instruction, which
        // the kernel refuses.)
        unsafe { core::arch::asm!("{0} = {0}", inout(reg) value, options(nomem, nostack, preserves_flags)) };
        value
    };
    value
}

/// All ones if `value` is negative, else zero: a choice without a branch. The verifier walks both sides of each branch,
/// and without CAP_PERFMON those as well that a CPU may take by mistake.
#[inline(always)]
#[must_use]
pub fn negative(value: i64) -> u64 {
    #[cfg(target_arch = "bpf")]
    {
        let mut value = value;
        // SAFETY: arithmetic on a register.
        unsafe {
            core::arch::asm!("{0} s>>= 63", inout(reg) value, options(pure, nomem, nostack, preserves_flags))
        };
        value as u64
    }
    #[cfg(not(target_arch = "bpf"))]
    ((value >> 63) as u64)
}

/// The same value, if `zero` is zero, which neither the compiler nor the verifier know: one forgets what it knew of it.
#[inline(always)]
#[must_use]
pub fn blurred(value: u64, zero: u64) -> u64 {
    #[cfg(target_arch = "bpf")]
    let value = {
        let mut value = value;
        // SAFETY: arithmetic on registers.
        unsafe {
            core::arch::asm!("{0} ^= {1}", inout(reg) value, in(reg) zero, options(nomem, nostack, preserves_flags))
        };
        value
    };
    #[cfg(not(target_arch = "bpf"))]
    let value = value ^ zero;
    value
}

/// A pointer moved by a constant. In assembly for BPF: where two ways meet, LLVM would rather add a variable to one
/// pointer than choose between two, and without CAP_PERFMON the verifier takes no packet pointer plus a variable, and
/// prunes next to nothing once it has seen any pointer plus a variable.
macro_rules! advance {
    ($pointer:expr, $bytes:expr) => {{
        #[cfg(target_arch = "bpf")]
        {
            let mut pointer = $pointer;
            // SAFETY: arithmetic on a register.
            unsafe {
                core::arch::asm!("{0} += {1}", inout(reg) pointer, const $bytes, options(nomem, nostack, preserves_flags))
            };
            pointer
        }
        #[cfg(not(target_arch = "bpf"))]
        $pointer.wrapping_byte_add($bytes)
    }};
}
pub(crate) use advance;

/// The address of element `index` (modulo 64) of 64, by steps of constant length.
#[inline(always)]
fn nth<T>(first: *mut T, index: usize) -> *mut T {
    let mut element = first;
    macro_rules! step_if {
        ($($bit:literal)*) => {
            $(if index >> $bit & 1 == 1 {
                element = advance!(element, size_of::<T>() << $bit).cast();
            })*
        };
    }
    step_if!(0 1 2 3 4 5);
    element
}

/// One of 64 elements; `index` is taken modulo 64.
#[inline(always)]
#[must_use]
pub fn pick<T>(elements: &[T; 64], index: usize) -> &T {
    // SAFETY: at most 63 elements after the first of 64.
    unsafe { &*nth(elements.as_ptr().cast_mut(), index) }
}

/// As [`pick`], to write.
#[inline(always)]
pub fn pick_mut<T>(elements: &mut [T; 64], index: usize) -> &mut T {
    // SAFETY: as above; the borrow is unique.
    unsafe { &mut *nth(elements.as_mut_ptr(), index) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picking_is_indexing() {
        let words: [u64; 64] = core::array::from_fn(|i| i as u64);
        assert!((0..64).all(|i| *pick(&words, i) == i as u64));
    }

    #[test]
    fn negative_is_the_sign() {
        assert_eq!([-1, i64::MIN, 0, 1].map(negative), [u64::MAX, u64::MAX, 0, 0]);
    }
}
