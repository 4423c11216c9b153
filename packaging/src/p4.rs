//! The parts of the switch program (`p4/include`) that `paatp-common` decides: header, constants, lanes.

use std::fmt::Write as _;

use paatp_common::limits::{LANES_PER_BLOCK, MAX_JOBS, MAX_RANKS, WORDS_PER_BLOCK};
use paatp_common::pool::K_MAX;
use paatp_common::switch::{Count, MAX_SWITCH_BLOCKS};
use paatp_common::tag::{CHECKED_HEADER_WORDS, header_weight};
use paatp_common::wire::{HEADER_BYTES, Header, Kind, MAGIC, Operation, Status, VERSION, flags};

/// Where these files come from, said at their top.
const ORIGIN: &str = "/* Made from paatp-common by `cargo xtask codegen`. */\n\n";

/// Appends a line. Writing to a string cannot fail.
macro_rules! line {
    ($text:expr, $($arguments:tt)*) => {
        let _ = writeln!($text, $($arguments)*);
    };
}

mod tna;

/// All files, from the root of the repository, with their text.
pub fn files() -> Vec<(&'static str, String)> {
    vec![
        ("p4/include/paatp_constants.p4", constants()),
        ("p4/include/paatp_header.p4", header()),
        ("p4/include/paatp_lanes.p4", lanes()),
        ("p4/include/paatp_tna_parts.p4", tna::parts()),
    ]
}

fn constants() -> String {
    let mut text = ORIGIN.to_owned();
    line!(text, "const bit<16> PAATP_MAGIC = {MAGIC:#06x};");
    line!(text, "const bit<4> PAATP_VERSION = {VERSION};");
    line!(text, "const bit<16> PAATP_HEADER_BYTES = {HEADER_BYTES};");
    line!(text, "const bit<16> PAATP_LANES_PER_BLOCK = {LANES_PER_BLOCK};");
    line!(text, "/* Places that a chunk may take. */");
    line!(text, "#define PAATP_K_MAX {K_MAX}");
    line!(text, "/* Sizes of tables. */");
    line!(text, "#define PAATP_MAX_JOBS {MAX_JOBS}");
    line!(text, "#define PAATP_MAX_RANKS {MAX_RANKS}");
    line!(text, "");
    for (name, kind) in [("DATA", Kind::Data), ("ANSWER", Kind::Answer)] {
        line!(text, "const bit<4> PAATP_KIND_{name} = {};", kind as u8);
    }
    line!(text, "");
    for (name, flag) in [
        ("RESULT", flags::RESULT),
        ("PARTIAL", flags::PARTIAL),
        ("ECN_ECHO", flags::ECN_ECHO),
        ("PAYLOAD", flags::PAYLOAD),
    ] {
        line!(text, "const bit<8> PAATP_FLAG_{name} = {flag:#04x};");
    }
    line!(text, "");
    for (name, status) in [("OK", Status::Ok), ("NOT_YET", Status::NotYet), ("REJOIN", Status::Rejoin)] {
        line!(text, "const bit<8> PAATP_STATUS_{name} = {};", status as u8);
    }
    line!(text, "");
    for (name, operation) in [("SUM", Operation::Sum), ("MEAN", Operation::Mean)] {
        line!(text, "const bit<3> PAATP_OPERATION_{name} = {};", operation as u8);
    }
    line!(text, "");
    line!(text, "/* What is counted. */");
    for count in Count::ALL {
        line!(text, "#define PAATP_COUNT_{} {}", count.name().to_uppercase(), *count as u8);
    }
    line!(text, "#define PAATP_COUNTS {}", Count::COUNT);
    text
}

/// Name and bits of each field; version and kind share a byte.
fn fields() -> Vec<(&'static str, usize)> {
    let mut fields = Vec::new();
    let ends = Header::FIELDS.iter().skip(1).map(|(_, offset)| *offset).chain([HEADER_BYTES]);
    for ((name, offset), end) in Header::FIELDS.iter().zip(ends) {
        let bits = (end - offset) * 8;
        match *name {
            "version_and_kind" => fields.extend([("version", 4), ("kind", 4)]),
            // As docs/protocol.md calls it.
            "told" => fields.push(("mode", bits)),
            name => fields.push((name, bits)),
        }
    }
    fields
}

fn header() -> String {
    let mut text = ORIGIN.to_owned();
    line!(text, "header paatp_h {{");
    for (name, bits) in fields() {
        line!(text, "    bit<{bits}> {name};");
    }
    line!(text, "}}\n");
    line!(text, "/* {LANES_PER_BLOCK} lanes: two in a word, which add up without a carry between them. */");
    line!(text, "header paatp_block_h {{");
    for word in 0..WORDS_PER_BLOCK {
        line!(text, "    bit<64> word{word};");
    }
    line!(text, "}}\n");
    line!(text, "/* A header's 32-bit words, and its check over all but the last. */");
    for (number, parts) in words().iter().enumerate() {
        line!(text, "#define PAATP_WORD_{number}(h) ({})", parts.join(" ++ "));
    }
    line!(text, "#define PAATP_HEADER_CHECK(h) ( \\");
    for number in 0..CHECKED_HEADER_WORDS {
        let weight = header_weight(number);
        let end = if number + 1 == CHECKED_HEADER_WORDS { ")" } else { " + \\" };
        line!(text, "    {weight} * PAATP_WORD_{number}(h){end}");
    }
    line!(text, "");
    line!(text, "#define PAATP_OPERATION(h) ((h).operation_or_epoch[6:4])");
    line!(text, "/* What ranks must agree on. */");
    line!(text, "#define PAATP_AGREED(h) ((h).operation_or_epoch ++ (h).lanes ++ (h).exponent ++ (h).rank)");
    text
}

/// The parts of each 32-bit word.
fn words() -> Vec<Vec<String>> {
    let mut words: Vec<Vec<String>> = vec![Vec::new(); HEADER_BYTES / 4];
    let mut at = 0;
    for (name, bits) in fields() {
        if bits <= 32 {
            words[at / 32].push(format!("(h).{name}"));
        } else {
            for (number, part) in (at / 32..).zip((0..bits / 32).rev()) {
                words[number].push(format!("(h).{name}[{}:{}]", part * 32 + 31, part * 32));
            }
        }
        at += bits;
    }
    words
}

fn lanes() -> String {
    let mut text = ORIGIN.to_owned();
    line!(
        text,
        "/* The lanes of all slots. The first payload is stored; to others the slot's lanes are added, in both. */"
    );
    line!(text, "control PaatpLanes(inout headers_t hdr, in bit<32> slot, in bool is_first) {{");
    for block in 0..MAX_SWITCH_BLOCKS {
        line!(text, "#if PAATP_BLOCKS > {block}");
        for word in 0..WORDS_PER_BLOCK {
            line!(text, "    register<bit<64>>(PAATP_SLOTS) lanes_{block}_{word};");
        }
        line!(text, "#endif");
    }
    line!(text, "");
    line!(text, "    apply {{");
    line!(text, "        bit<64> sum;");
    for block in 0..MAX_SWITCH_BLOCKS {
        line!(text, "#if PAATP_BLOCKS > {block}");
        line!(text, "        if (hdr.block[{block}].isValid()) {{");
        line!(text, "            if (!is_first) {{");
        for word in 0..WORDS_PER_BLOCK {
            line!(text, "                lanes_{block}_{word}.read(sum, slot);");
            line!(
                text,
                "                hdr.block[{block}].word{word} = hdr.block[{block}].word{word} + sum;"
            );
        }
        line!(text, "            }}");
        for word in 0..WORDS_PER_BLOCK {
            line!(text, "            lanes_{block}_{word}.write(slot, hdr.block[{block}].word{word});");
        }
        line!(text, "        }}");
        line!(text, "#endif");
    }
    line!(text, "    }}");
    line!(text, "}}");
    text
}
