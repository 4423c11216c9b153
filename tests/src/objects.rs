//! The built eBPF objects, and what their programs may cost.

use anyhow::{Context, Result};

/// What a program may cost the kernel's verifier.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Instructions walked; the kernel's limit is 1,000,000.
    pub instructions: u32,
    /// Bytes of the program's own stack frame. The kernel allows 512 with what the program calls, whose frames are
    /// rounded up to 32.
    pub stack: u32,
}

/// The budget of a program, by name.
#[must_use]
pub fn budget(program: &str) -> Budget {
    match program {
        "aggregate_wide" | "feed_aggregate_wide" => Budget { instructions: 800_000, stack: 416 },
        "aggregate" | "feed_aggregate" => Budget { instructions: 550_000, stack: 416 },
        // The reference that benchmarks compare with: a rolled loop is what it is about.
        "feed_naive" => Budget { instructions: 1_000_000, stack: 416 },
        _ => Budget { instructions: 20_000, stack: 256 },
    }
}

/// The bytes of a built object.
///
/// # Errors
/// Where it is not there: it has to be built first.
pub fn object(name: &str) -> Result<Vec<u8>> {
    let path = crate::lab::lab_object().with_file_name(name);
    std::fs::read(&path).with_context(|| format!("reading {}; `cargo xtask build` makes it", path.display()))
}
