//! Which vector instructions the loops are compiled for.
//!
//! The loops are plain Rust that the compiler vectorises. On x86-64 it may assume SSE2 only, so each is compiled a second
//! time with AVX2, and the processor is asked which to run. Other targets have their vectors in the baseline (aarch64).

#[cfg(target_arch = "x86_64")]
cpufeatures::new!(avx2, "avx2");

/// A set of vector instructions that this processor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vectors {
    /// Only ever true where the processor was asked: `vectorised!` relies on it.
    avx2: bool,
}

impl Vectors {
    /// Those that every processor of the target has.
    pub const BASELINE: Vectors = Vectors { avx2: false };

    /// The widest that this processor has. It is asked once; later calls read the answer.
    #[inline]
    #[must_use]
    pub fn widest() -> Vectors {
        #[cfg(target_arch = "x86_64")]
        return Vectors { avx2: avx2::get() };
        #[cfg(not(target_arch = "x86_64"))]
        Vectors::BASELINE
    }

    /// They include AVX2.
    #[inline(always)]
    #[must_use]
    pub const fn have_avx2(self) -> bool {
        self.avx2
    }
}

/// Compiles a function once for each set of vectors. Its first argument, a [`Vectors`], chooses.
macro_rules! vectorised {
    ($(
        $(#[$attribute:meta])*
        pub fn $name:ident $(<$($generic:ident: $bound:path),+>)? ($($argument:ident: $type:ty),* $(,)?) $(-> $output:ty)?
        $body:block
    )*) => {$(
        $(#[$attribute])*
        #[inline]
        pub fn $name $(<$($generic: $bound),+>)? (
            vectors: $crate::quantise::Vectors, $($argument: $type),*
        ) $(-> $output)? {
            #[inline(always)]
            fn baseline $(<$($generic: $bound),+>)? ($($argument: $type),*) $(-> $output)? $body

            #[cfg(target_arch = "x86_64")]
            if vectors.have_avx2() {
                #[target_feature(enable = "avx2")]
                fn avx2 $(<$($generic: $bound),+>)? ($($argument: $type),*) $(-> $output)? {
                    baseline($($argument),*)
                }
                // SAFETY: `Vectors` has AVX2 only where the processor says so.
                return unsafe { avx2($($argument),*) };
            }
            let _ = vectors;
            baseline($($argument),*)
        }
    )*};
}
pub(super) use vectorised;
