//! The built eBPF objects, and what their programs may cost.

use anyhow::{Context, Result};
use object::{Object, ObjectSection, ObjectSymbol};

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
        // Without CAP_PERFMON the kernel walks what a CPU may do by mistake as well, about four times as much.
        "aggregate" => Budget { instructions: 150_000, stack: 320 },
        "aggregate_wide" => Budget { instructions: 230_000, stack: 320 },
        // Nodes with levels.
        "levels" => Budget { instructions: 380_000, stack: 320 },
        "levels_wide" => Budget { instructions: 560_000, stack: 320 },
        "feed_aggregate" => Budget { instructions: 150_000, stack: 320 },
        "feed_aggregate_wide" => Budget { instructions: 230_000, stack: 320 },
        // The reference that benchmarks compare with: a rolled loop is what it is about.
        "feed_naive" => Budget { instructions: 500_000, stack: 352 },
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

/// Bytes of stack that the instructions of a program use, without what it calls: from the lowest address below the frame
/// pointer that any of them names.
///
/// # Errors
/// Where the object has no such program.
pub fn stack_bytes(object: &[u8], program: &str) -> Result<u32> {
    Ok(instructions(object, program)?.iter().filter_map(Instruction::stack_offset).max().unwrap_or(0))
}

/// One eBPF instruction of eight bytes.
#[derive(Clone, Copy, Debug)]
pub struct Instruction {
    /// Operation code.
    pub code: u8,
    registers: u8,
    offset: i16,
    /// Constant operand; of atomic operations, which one.
    pub immediate: i32,
}

impl Instruction {
    /// `BPF_STX | BPF_ATOMIC`, of either width.
    #[must_use]
    pub fn is_atomic(&self) -> bool {
        matches!(self.code, 0xC3 | 0xDB)
    }

    /// How far below the frame pointer the instruction reaches.
    fn stack_offset(&self) -> Option<u32> {
        const FRAME_POINTER: u8 = 10;
        let (destination, source) = (self.registers & 0xF, self.registers >> 4);
        let base = match self.code & 0x07 {
            // Loads name their base as the source, stores as the destination.
            0x01 => source,
            0x02 | 0x03 => destination,
            _ => return None,
        };
        (base == FRAME_POINTER && self.offset < 0).then(|| u32::from(self.offset.unsigned_abs()))
    }
}

/// The instructions of a program, as the compiler wrote them.
///
/// # Errors
/// Where the object has no such program.
pub fn instructions(object: &[u8], program: &str) -> Result<Vec<Instruction>> {
    let object = object::File::parse(object).context("the object is no ELF file")?;
    let symbol = object.symbols().find(|symbol| symbol.name() == Ok(program));
    let symbol = symbol.with_context(|| format!("the object has no program {program}"))?;
    let section = symbol.section_index().context("a program outside of any section")?;
    let section = object.section_by_index(section)?;
    let range = usize::try_from(symbol.address())?..usize::try_from(symbol.address() + symbol.size())?;
    let bytes = section.data()?.get(range).context("a program longer than its section")?;
    Ok(bytes.chunks_exact(8).map(decode).collect())
}

fn decode(bytes: &[u8]) -> Instruction {
    Instruction {
        code: bytes[0],
        registers: bytes[1],
        offset: i16::from_le_bytes([bytes[2], bytes[3]]),
        immediate: i32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
    }
}
