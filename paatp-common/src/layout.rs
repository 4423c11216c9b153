//! One number for everything that a loaded program and whoever writes its tables must agree on.
//!
//! Tables and program outlive the daemon that made them. Another build may take them over only if it means the same by
//! each byte. [`LAYOUT`] is made from the names, sizes and offsets of the tables' types, from the counters' names and
//! from the version of the wire; what these do not show (the same bytes with another meaning) is [`ABI`]'s to tell.

use crate::counter::{COUNTERS, Counters, Event, Refusal};
use crate::job::{JobEntry, Node, RankEntry};
use crate::levels::{Above, Link};
use crate::limits::{BLOCK_BYTES, MAX_JOBS, MAX_LOCAL_ADDRESSES, MAX_RANKS, STANDARD_BLOCKS, WIDE_BLOCKS};
use crate::progress::{Floor, Progress, Reached};
use crate::slot::Slot;
use crate::wire::VERSION;

/// To be raised when tables of the same layout change their meaning, or the program what it does with them.
pub const ABI: u32 = 1;

/// The layout of tables and program.
pub const LAYOUT: u64 = layout();

/// Name of the section of the eBPF object that holds [`LAYOUT`], as eight bytes in little-endian order.
pub const SECTION: &str = "paatp_layout";

/// A type's name, size and the offsets of its fields.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Described {
    pub(crate) name: &'static str,
    pub(crate) bytes: usize,
    pub(crate) fields: &'static [(&'static str, usize)],
}

/// Describes a type where its fields are visible. A field that is left out does not compile.
macro_rules! described {
    ($type:ident { $($field:ident),* $(,)? }) => {
        impl $type {
            pub(crate) const DESCRIBED: $crate::layout::Described = $crate::layout::Described {
                name: stringify!($type),
                bytes: size_of::<$type>(),
                fields: &[$((stringify!($field), core::mem::offset_of!($type, $field))),*],
            };
        }

        const _: fn(&$type) = |whole| {
            let $type { $($field: _),* } = whole;
        };
    };
}
pub(crate) use described;

const fn layout() -> u64 {
    let mut digest = Digest::new().number(ABI as u64).number(VERSION as u64);
    let types = [
        Node::DESCRIBED,
        JobEntry::DESCRIBED,
        RankEntry::DESCRIBED,
        Progress::DESCRIBED,
        Floor::DESCRIBED,
        Reached::DESCRIBED,
        Slot::DESCRIBED,
        Link::DESCRIBED,
        Above::DESCRIBED,
        Counters::DESCRIBED,
    ];
    let mut index = 0;
    while index < types.len() {
        digest = digest.described(&types[index]);
        index += 1;
    }
    let sizes =
        [MAX_JOBS, MAX_RANKS, MAX_LOCAL_ADDRESSES, COUNTERS, BLOCK_BYTES, STANDARD_BLOCKS, WIDE_BLOCKS];
    let mut index = 0;
    while index < sizes.len() {
        digest = digest.number(sizes[index] as u64);
        index += 1;
    }
    let mut index = 0;
    while index < Refusal::COUNT {
        digest = digest.text(Refusal::ALL[index].name());
        index += 1;
    }
    let mut index = 0;
    while index < Event::COUNT {
        digest = digest.text(Event::ALL[index].name());
        index += 1;
    }
    digest.0
}

/// FNV-1a with 64 bits: it tells builds apart, nobody forges them.
#[derive(Clone, Copy)]
struct Digest(u64);

impl Digest {
    const fn new() -> Digest {
        Digest(0xcbf2_9ce4_8422_2325)
    }

    const fn byte(self, byte: u8) -> Digest {
        Digest((self.0 ^ byte as u64).wrapping_mul(0x0100_0000_01b3))
    }

    const fn number(mut self, number: u64) -> Digest {
        let bytes = number.to_le_bytes();
        let mut index = 0;
        while index < bytes.len() {
            self = self.byte(bytes[index]);
            index += 1;
        }
        self
    }

    /// With its length, so that two texts are not one.
    const fn text(mut self, text: &str) -> Digest {
        let bytes = text.as_bytes();
        self = self.number(bytes.len() as u64);
        let mut index = 0;
        while index < bytes.len() {
            self = self.byte(bytes[index]);
            index += 1;
        }
        self
    }

    const fn described(mut self, what: &Described) -> Digest {
        self = self.text(what.name).number(what.bytes as u64);
        let mut index = 0;
        while index < what.fields.len() {
            let (name, offset) = what.fields[index];
            self = self.text(name).number(offset as u64);
            index += 1;
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A daemon refuses tables and objects of another layout. If this fails, they changed: put the new number here, and
    /// say in the changelog that a running aggregator has to be stopped (not killed) before the update.
    #[test]
    fn the_layout_changes_on_purpose_only() {
        assert_eq!(LAYOUT, 0x1F4E_4E60_7BFB_2E22, "{LAYOUT:#018x}");
    }

    #[test]
    fn fields_that_move_change_it() {
        let one = Described { name: "T", bytes: 8, fields: &[("a", 0), ("b", 4)] };
        let digest = |what: Described| Digest::new().described(&what).0;
        let others = [
            Described { bytes: 16, ..one },
            Described { name: "U", ..one },
            Described { fields: &[("a", 4), ("b", 0)], ..one },
            Described { fields: &[("a", 0)], ..one },
            Described { fields: &[("ab", 0), ("", 4)], ..one },
        ];
        assert!(others.iter().all(|other| digest(*other) != digest(one)));
        // FNV-1a's published value for "a".
        assert_eq!(Digest::new().byte(b'a').0, 0xaf63_dc4c_8601_ec8c);
    }
}
