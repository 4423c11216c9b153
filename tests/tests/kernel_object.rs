//! The object file itself: what its instructions are, how much stack they use, and what its maps look like.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::collections::{BTreeMap, BTreeSet};

use aya::maps::{Map, MapType};
use paatp_common::counter::Counters;
use paatp_common::job::{JobEntry, Node, RankEntry};
use paatp_common::levels::{Above, Link};
use paatp_common::limits::{MAX_JOBS, MAX_RANKS};
use paatp_common::progress::Progress;
use paatp_tests::require_bpf;
use paatp_tests::testrun::{Flavour, Loaded, object};

/// What a program and all that it calls may use.
const MOST_STACK: i32 = 512;
/// The verifier rounds each frame up to this.
const STACK_UNIT: i32 = 32;

/// One eBPF instruction.
#[derive(Clone, Copy, Debug)]
struct Instruction {
    opcode: u8,
    destination: u8,
    source: u8,
    offset: i16,
    immediate: i32,
}

impl Instruction {
    const LOAD_WIDE: u8 = 0x18;
    const CALL: u8 = 0x85;
    const MOVE: u8 = 0xBF;
    const ADD: u8 = 0x07;
    const FRAME: u8 = 10;

    fn of(bytes: &[u8]) -> Instruction {
        Instruction {
            opcode: bytes[0],
            destination: bytes[1] & 15,
            source: bytes[1] >> 4,
            offset: i16::from_le_bytes([bytes[2], bytes[3]]),
            immediate: i32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
        }
    }

    /// Class STX, mode ATOMIC, of 32 or 64 bits.
    const fn is_atomic(self) -> bool {
        matches!(self.opcode, 0xC3 | 0xDB)
    }

    /// The old value comes back: the FETCH bit, which exchange and compare-and-exchange have always.
    const fn fetches(self) -> bool {
        self.immediate & 1 == 1
    }

    /// Memory at an offset to a register: which one is the base.
    const fn base(self) -> Option<u8> {
        match self.opcode & 7 {
            1 => Some(self.source),
            2 | 3 => Some(self.destination),
            _ => None,
        }
    }
}

/// A section of an ELF file.
#[derive(Clone, Debug)]
struct Section {
    name: String,
    kind: u32,
    link: usize,
    info: usize,
    bytes: Vec<u8>,
}

/// A symbol of an ELF file.
#[derive(Clone, Debug)]
struct Symbol {
    name: String,
    is_function: bool,
    section: usize,
    value: usize,
    size: usize,
}

/// As much of a little-endian 64-bit ELF file as the tests need.
struct Elf {
    sections: Vec<Section>,
    symbols: Vec<Symbol>,
}

fn number(bytes: &[u8], at: usize, size: usize) -> usize {
    let mut wide = [0; 8];
    wide[..size].copy_from_slice(&bytes[at..at + size]);
    u64::from_le_bytes(wide) as usize
}

fn text(bytes: &[u8], at: usize) -> String {
    let end = at + bytes[at..].iter().position(|byte| *byte == 0).unwrap();
    String::from_utf8(bytes[at..end].to_vec()).unwrap()
}

impl Elf {
    const SYMBOLS: u32 = 2;
    const NO_BITS: u32 = 8;
    const RELOCATIONS: u32 = 9;

    fn read(bytes: &[u8]) -> Elf {
        assert_eq!(bytes[..6], [0x7F, b'E', b'L', b'F', 2, 1], "a little-endian 64-bit ELF file");
        assert_eq!(number(bytes, 18, 2), 247, "for the machine BPF");
        let (start, size, count) = (number(bytes, 40, 8), number(bytes, 58, 2), number(bytes, 60, 2));
        let names = number(bytes, 62, 2);
        let header = |index: usize| &bytes[start + index * size..][..size];
        let content = |header: &[u8]| match number(header, 4, 4) as u32 {
            Elf::NO_BITS => &[][..],
            _ => &bytes[number(header, 24, 8)..][..number(header, 32, 8)],
        };
        let names = content(header(names));
        let sections: Vec<Section> = (0..count)
            .map(header)
            .map(|header| Section {
                name: text(names, number(header, 0, 4)),
                kind: number(header, 4, 4) as u32,
                link: number(header, 40, 4),
                info: number(header, 44, 4),
                bytes: content(header).to_vec(),
            })
            .collect();
        let table = sections.iter().find(|section| section.kind == Elf::SYMBOLS).unwrap();
        let names = &sections[table.link].bytes;
        let symbols = table
            .bytes
            .chunks_exact(24)
            .map(|symbol| Symbol {
                name: text(names, number(symbol, 0, 4)),
                is_function: symbol[4] & 15 == 2,
                section: number(symbol, 6, 2),
                value: number(symbol, 8, 8),
                size: number(symbol, 16, 8),
            })
            .collect();
        Elf { sections, symbols }
    }

    fn section(&self, name: &str) -> &Section {
        self.sections.iter().find(|section| section.name == name).expect(name)
    }

    fn functions(&self) -> impl Iterator<Item = (usize, &Symbol)> {
        self.symbols.iter().enumerate().filter(|(_, symbol)| symbol.is_function)
    }

    fn instructions(&self, function: &Symbol) -> Vec<Instruction> {
        let code = &self.sections[function.section].bytes[function.value..][..function.size];
        code.chunks_exact(8).map(Instruction::of).collect()
    }

    /// What the instruction at an offset of a section refers to, from the section's relocations.
    fn references(&self, section: usize) -> BTreeMap<usize, usize> {
        let own = |other: &&Section| other.kind == Elf::RELOCATIONS && other.info == section;
        let relocations = self.sections.iter().filter(own).flat_map(|section| section.bytes.chunks_exact(16));
        relocations.map(|entry| (number(entry, 0, 8), number(entry, 12, 4))).collect()
    }

    /// The function that begins at an offset of a section.
    fn function_at(&self, section: usize, offset: usize) -> Option<usize> {
        self.functions().find(|(_, f)| f.section == section && f.value == offset).map(|(index, _)| index)
    }

    /// Functions that a function calls, or hands to a helper that calls them.
    fn callees(&self, function: &Symbol) -> BTreeSet<usize> {
        let references = self.references(function.section);
        let mut callees = BTreeSet::new();
        for (index, instruction) in self.instructions(function).iter().enumerate() {
            let at = function.value + index * 8;
            let is_call = instruction.opcode == Instruction::CALL && instruction.source == 1;
            let is_address = instruction.opcode == Instruction::LOAD_WIDE;
            if !is_call && !is_address {
                continue;
            }
            let named = references.get(&at).map(|symbol| &self.symbols[*symbol]);
            let target = match named {
                // Addresses of data are none of a function.
                Some(symbol) if is_address && !self.is_code(symbol.section) => continue,
                Some(symbol) if symbol.is_function => (symbol.section, symbol.value),
                // Relative to the section: a call by instructions after itself, an address by bytes.
                Some(symbol) if is_call => {
                    (symbol.section, (instruction.immediate as i64 + 1) as usize * 8 + symbol.value)
                }
                Some(symbol) => (symbol.section, symbol.value + instruction.immediate as usize),
                None if is_call => {
                    (function.section, (at as i64 / 8 + 1 + i64::from(instruction.immediate)) as usize * 8)
                }
                None => continue,
            };
            callees.insert(self.function_at(target.0, target.1).expect("a call leads to a function"));
        }
        callees
    }

    fn is_code(&self, section: usize) -> bool {
        matches!(self.sections.get(section).map(|s| s.name.as_str()), Some(".text" | "xdp"))
    }

    /// The deepest byte below the frame pointer that a function touches or takes the address of.
    fn own_stack(&self, function: &Symbol) -> i32 {
        let mut deepest = 0;
        // Registers that are the frame pointer plus a constant.
        let mut copies: BTreeMap<u8, i32> = BTreeMap::from([(Instruction::FRAME, 0)]);
        for instruction in self.instructions(function) {
            let Instruction { opcode, destination, source, offset, immediate } = instruction;
            if let Some(depth) = instruction.base().and_then(|base| copies.get(&base)) {
                deepest = deepest.min(depth + i32::from(offset));
            }
            match opcode {
                Instruction::MOVE if copies.contains_key(&source) => {
                    copies.insert(destination, copies[&source]);
                }
                Instruction::ADD
                    if copies.contains_key(&destination) && destination != Instruction::FRAME =>
                {
                    let depth = copies[&destination] + immediate;
                    deepest = deepest.min(depth);
                    copies.insert(destination, depth);
                }
                // Loads and arithmetic overwrite their destination.
                _ if matches!(opcode & 7, 0 | 1 | 4 | 7) && destination != Instruction::FRAME => {
                    copies.remove(&destination);
                }
                _ => {}
            }
        }
        -deepest
    }

    /// Stack of a function and its deepest chain of calls, rounded as the verifier rounds.
    fn whole_stack(&self, function: usize) -> i32 {
        let symbol = &self.symbols[function];
        let own = (self.own_stack(symbol).max(1) + STACK_UNIT - 1) / STACK_UNIT * STACK_UNIT;
        own + self.callees(symbol).iter().map(|callee| self.whole_stack(*callee)).max().unwrap_or(0)
    }
}

/// The object, or nothing where it was not built and need not be.
fn elf(test: &str) -> Option<Elf> {
    if !object().exists() && !require_bpf(test) {
        return None;
    }
    Some(Elf::read(&std::fs::read(object()).expect("cargo xtask build makes it")))
}

/// Programs, with everything that they call.
fn reachable(elf: &Elf, program: &str) -> BTreeSet<usize> {
    let (first, _) = elf.functions().find(|(_, symbol)| symbol.name == program).expect(program);
    let mut found = BTreeSet::from([first]);
    let mut open = vec![first];
    while let Some(function) = open.pop() {
        open.extend(elf.callees(&elf.symbols[function]).into_iter().filter(|callee| found.insert(*callee)));
    }
    found
}

#[test]
fn the_decoder_knows_atomics() {
    let instruction = |immediate: i32| {
        let mut bytes = [0xDB, 0x31, 0, 0, 0, 0, 0, 0];
        bytes[4..].copy_from_slice(&immediate.to_le_bytes());
        Instruction::of(&bytes)
    };
    // add, or, and, xor; with FETCH; exchange, compare-and-exchange.
    let fetching =
        [0x00, 0x40, 0x50, 0xA0, 0x01, 0x41, 0x51, 0xA1, 0xE1, 0xF1].map(|imm| instruction(imm).fetches());
    assert_eq!(fetching, [false, false, false, false, true, true, true, true, true, true]);
    assert!(instruction(0).is_atomic());
    assert!(!Instruction::of(&[0x7B, 0x31, 0, 0, 0, 0, 0, 0]).is_atomic(), "a plain store");
}

/// LLVM turns a relaxed operation whose old value is used into one that does not fetch it.
#[test]
fn every_atomic_of_the_aggregator_fetches() {
    let Some(elf) = elf("kernel_object::every_atomic_of_the_aggregator_fetches") else { return };
    for flavour in Flavour::ALL {
        let functions = reachable(&elf, flavour.program());
        let mut atomics = 0;
        for function in functions.iter().map(|function| &elf.symbols[*function]) {
            let mut skip = false;
            for (index, instruction) in elf.instructions(function).iter().enumerate() {
                // The second half of a wide load is no instruction.
                if std::mem::replace(&mut skip, instruction.opcode == Instruction::LOAD_WIDE) {
                    skip = false;
                    continue;
                }
                if instruction.is_atomic() {
                    atomics += 1;
                    let fetches = instruction.fetches();
                    assert!(
                        fetches,
                        "{}: instruction {index} does not fetch: {instruction:?}",
                        function.name
                    );
                }
            }
        }
        assert!(atomics >= 3, "{}: lock, wait and unlock, but only {atomics}", flavour.program());
    }
}

#[test]
fn stacks_stay_below_the_limit() {
    let Some(elf) = elf("kernel_object::stacks_stay_below_the_limit") else { return };
    for flavour in Flavour::ALL {
        let (index, symbol) = elf.functions().find(|(_, s)| s.name == flavour.program()).unwrap();
        let (own, whole) = (elf.own_stack(symbol), elf.whole_stack(index));
        println!("{}: {own} bytes of stack, {whole} with callbacks", symbol.name);
        assert!(own > 0 && whole <= MOST_STACK, "{}: {own} and {whole} bytes", symbol.name);
    }
}

#[test]
fn callbacks_are_found() {
    let Some(elf) = elf("kernel_object::callbacks_are_found") else { return };
    for flavour in Flavour::ALL {
        let functions = reachable(&elf, flavour.program());
        let names: Vec<_> = functions.iter().map(|function| elf.symbols[*function].name.as_str()).collect();
        assert!(names.iter().any(|name| name.contains("spin")), "the wait for a lock: {names:?}");
    }
}

#[test]
fn the_licence_is_gpl_compatible() {
    let Some(elf) = elf("kernel_object::the_licence_is_gpl_compatible") else { return };
    assert_eq!(elf.section("license").bytes, b"Dual MIT/GPL\0");
}

#[test]
fn programs_are_there_by_name() {
    let Some(elf) = elf("kernel_object::programs_are_there_by_name") else { return };
    let xdp = elf.sections.iter().position(|section| section.name == "xdp").unwrap();
    let programs: BTreeSet<_> =
        elf.functions().filter(|(_, symbol)| symbol.section == xdp).map(|(_, s)| s.name.as_str()).collect();
    assert_eq!(programs, BTreeSet::from(["aggregate", "aggregate_wide", "levels", "levels_wide", "pass"]));
}

#[test]
fn maps_are_as_agreed() {
    /// `BPF_F_MMAPABLE`
    const MMAPABLE: u32 = 1 << 10;
    if !require_bpf("kernel_object::maps_are_as_agreed") {
        return;
    }
    for (flavour, slots) in [(Flavour::Standard, [37, 1]), (Flavour::Wide, [1, 37])] {
        let loaded = Loaded::new(flavour, 37).unwrap();
        let [standard, wide] = slots;
        let array = |size: usize, entries: usize| (MapType::Array, size as u32, entries as u32, MMAPABLE);
        let expected = BTreeMap::from([
            ("NODE", array(size_of::<Node>(), 1)),
            ("JOBS", array(size_of::<JobEntry>(), MAX_JOBS)),
            ("RANKS", array(size_of::<RankEntry>(), MAX_JOBS * MAX_RANKS)),
            ("PROGRESS", array(size_of::<Progress>(), MAX_JOBS)),
            ("LINKS", array(size_of::<Link>(), MAX_JOBS)),
            ("ABOVE", array(size_of::<Above>(), MAX_JOBS)),
            ("SLOTS", array(64 + 11 * 128, standard)),
            ("WIDE_SLOTS", array(64 + 26 * 128, wide)),
            ("COUNTERS", (MapType::PerCpuArray, size_of::<Counters>() as u32, 1, 0)),
        ]);
        let found: BTreeMap<_, _> = loaded
            .ebpf()
            .maps()
            .map(|(name, map)| {
                let (Map::Array(data) | Map::PerCpuArray(data)) = map else { panic!("{name}: {map:?}") };
                let info = data.info().unwrap();
                assert_eq!(info.key_size(), 4, "{name}");
                let kind = info.map_type().unwrap();
                (name, (kind, info.value_size(), info.max_entries(), info.map_flags()))
            })
            .collect();
        assert_eq!(format!("{found:?}"), format!("{expected:?}"));
    }
}
