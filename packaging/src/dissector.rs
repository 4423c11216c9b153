//! What the Wireshark dissector knows by name, in Lua.

use std::fmt::Write as _;

use paatp_common::counter::Refusal;
use paatp_common::wire::{ElementType, HEADER_BYTES, Header, Kind, MAGIC, Operation, Status, VERSION, flags};
use paatp_user::control::DEFAULT_PORT;

/// The tables of `packaging/wireshark/paatp.lua`.
pub(crate) fn names() -> String {
    let mut text = format!("local MAGIC, VERSION, DEFAULT_PORT = {MAGIC:#06x}, {VERSION}, {DEFAULT_PORT}\n");
    table(&mut text, "KINDS", (0..16).filter_map(|number| Some((number, shouted(kind(number)?)))));
    let statuses = (0..=u8::MAX).filter_map(|number| Some((number, shouted(Status::from_wire(number)?))));
    table(&mut text, "STATUSES", statuses);
    let operations = (0..8).filter_map(|number| Some((number, Operation::from_wire(number)?)));
    table(
        &mut text,
        "OPERATIONS",
        operations.map(|(number, name)| (number, format!("{name:?}").to_lowercase())),
    );
    let types = ElementType::ALL.iter().map(|name| (*name as u8, format!("{name:?}").to_lowercase()));
    table(&mut text, "TYPES", types);
    let flags = flags::NAMES.iter().map(|(bit, name)| (*bit, (*name).to_owned()));
    table(&mut text, "FLAGS", flags);
    let refusals = Refusal::ALL.iter();
    table(&mut text, "REFUSALS", refusals.clone().map(|refusal| (*refusal as u8, refusal.name().to_owned())));
    table(
        &mut text,
        "REFUSAL_SENTENCES",
        refusals.map(|refusal| (*refusal as u8, refusal.sentence().to_owned())),
    );
    text
}

/// The kind that a header with this number has.
fn kind(number: u8) -> Option<Kind> {
    let mut bytes = [0; HEADER_BYTES];
    bytes[2] = number;
    Header::of(&bytes)?.kind()
}

/// `NotYet` as `NOT_YET`, which is how documentation writes it.
fn shouted(name: impl std::fmt::Debug) -> String {
    let mut text = String::new();
    for letter in format!("{name:?}").chars() {
        if letter.is_uppercase() && !text.is_empty() {
            text.push('_');
        }
        text.extend(letter.to_uppercase());
    }
    text
}

fn table(text: &mut String, name: &str, entries: impl Iterator<Item = (u8, String)>) {
    // Writing to a string does not fail.
    let _ = writeln!(text, "local {name} = {{");
    for (number, entry) in entries {
        let _ = writeln!(text, "    [{number}] = {entry:?},");
    }
    text.push_str("}\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_documentation() {
        assert_eq!(shouted(Status::NotYet), "NOT_YET");
        assert_eq!(kind(8).map(shouted).as_deref(), Some("ANSWER"));
        let protocol = include_str!("../../docs/protocol.md");
        for status in (0..=u8::MAX).filter_map(Status::from_wire) {
            let row = format!("| {} | {} |", status as u8, shouted(status));
            assert!(protocol.contains(&row), "docs/protocol.md lacks `{row}`");
        }
        for (bit, name) in flags::NAMES {
            let row = format!("| {bit:#04x} | {name} |");
            assert!(protocol.contains(&row), "docs/protocol.md lacks `{row}`");
        }
    }
}
