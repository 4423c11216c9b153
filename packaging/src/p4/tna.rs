//! The parts for Tofino: lanes one by one, a header as words, and its check without a multiplication.

use std::fmt::Write as _;

use paatp_common::limits::LANES_PER_BLOCK;
use paatp_common::tag::{CHECKED_HEADER_WORDS, header_weight};
use paatp_common::wire::HEADER_BYTES;

use super::ORIGIN;

/// Words of a header that the switch may change by an amount that no table knows.
const CHANGING: [usize; 9] = [1, 4, 5, 6, 7, 10, 11, 13, 14];

/// All of them.
pub(super) fn parts() -> String {
    let mut text = ORIGIN.to_owned();
    line!(text, "header paatp_words_h {{");
    for word in 0..HEADER_BYTES / 4 {
        line!(text, "    bit<32> word{word};");
    }
    line!(text, "}}\n");
    line!(text, "header paatp_payload_h {{");
    for lane in 0..LANES_PER_BLOCK {
        line!(text, "    bit<32> lane{lane};");
    }
    line!(text, "}}\n");
    for word in 0..CHECKED_HEADER_WORDS {
        line!(text, "#define PAATP_WEIGHT_{word} {}", header_weight(word));
    }
    line!(text, "");
    payload(&mut text);
    check(&mut text);
    text
}

fn payload(text: &mut String) {
    line!(text, "control PaatpPayload(inout paatp_payload_h payload, in slot_t slot, in found_t found) {{");
    for lane in 0..LANES_PER_BLOCK {
        line!(text, "    PaatpLane() lane{lane};");
    }
    line!(text, "\n    apply {{");
    for lane in 0..LANES_PER_BLOCK {
        line!(text, "        lane{lane}.apply(payload.lane{lane}, slot, found);");
    }
    line!(text, "    }}\n}}\n");
}

fn check(text: &mut String) {
    line!(text, "/* By how much words have changed. */");
    line!(text, "struct changes_t {{");
    for word in CHANGING {
        line!(text, "    bit<32> word{word};");
    }
    line!(text, "}}\n");
    line!(
        text,
        "/* Makes up for it in the header's check: each change times the weight of its word. Weights are sums and"
    );
    line!(
        text,
        " * differences of powers of two, so nothing is multiplied. An error that the check showed it still shows. */"
    );
    line!(text, "control PaatpCheck(inout bit<32> check, in changes_t by) {{");
    line!(text, "    apply {{");
    let mut powers: Vec<u32> =
        CHANGING.iter().flat_map(|word| digits(*word)).map(|(_, power)| power).collect();
    powers.sort_unstable();
    powers.dedup();
    let mut sums = Sums::default();
    let mut terms = vec![Term { level: 0, adds: true, name: "check".to_owned() }];
    for power in powers {
        let changes = CHANGING.iter().flat_map(|word| {
            let digits = digits(*word).into_iter().filter(|digit| digit.1 == power);
            digits.map(move |(adds, _)| Term { level: 0, adds, name: format!("by.word{word}") })
        });
        if power == 0 {
            terms.extend(changes);
            continue;
        }
        let Some(sum) = sums.add(changes.collect()) else { continue };
        let name = format!("times_{}", 1u32 << power);
        line!(sums.text, "        bit<32> {name} = {} << {power};", sum.name);
        terms.push(Term { level: sum.level + 1, name, ..sum });
    }
    if let Some(all) = sums.add(terms) {
        line!(sums.text, "        check = {};", all.name);
    }
    text.push_str(&sums.text);
    line!(text, "    }}\n}}");
}

/// Something to be added or subtracted, and the stage of a switch after which it is there.
struct Term {
    level: u32,
    adds: bool,
    name: String,
}

/// Additions, one a line.
#[derive(Default)]
struct Sums {
    text: String,
    count: usize,
}

impl Sums {
    /// Adds terms up in as few stages as can be: always the two that are there first.
    fn add(&mut self, mut terms: Vec<Term>) -> Option<Term> {
        loop {
            // With equal stages, what is subtracted comes last: it needs something that it is subtracted from.
            terms.sort_by_key(|term| (term.level, !term.adds));
            let mut rest = terms.into_iter();
            let (first, second) = (rest.next()?, rest.next());
            let Some(second) = second else { return Some(first) };
            let (left, operator, right) = match (first.adds, second.adds) {
                (false, true) => (&second, '-', &first),
                (adds, other) => (&first, if adds == other { '+' } else { '-' }, &second),
            };
            let name = format!("sum{}", self.count);
            line!(self.text, "        bit<32> {name} = {} {operator} {};", left.name, right.name);
            self.count += 1;
            let sum =
                Term { level: first.level.max(second.level) + 1, adds: first.adds || second.adds, name };
            terms = std::iter::once(sum).chain(rest).collect();
        }
    }
}

/// The weight of a word as sum and difference of powers of two, as few as can be: signs and exponents.
fn digits(word: usize) -> Vec<(bool, u32)> {
    let mut rest = header_weight(word) as i64;
    let mut digits = Vec::new();
    let mut power = 0;
    while rest != 0 {
        if rest & 1 == 1 {
            // 3 is 4 − 1.
            let digit = 2 - (rest & 3);
            digits.push((digit == 1, power));
            rest -= digit;
        }
        rest >>= 1;
        power += 1;
    }
    digits
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use paatp_common::tag::header_check;

    use super::*;

    #[test]
    fn digits_make_the_weights() {
        for word in 0..CHECKED_HEADER_WORDS {
            let value = |&(adds, power): &(bool, u32)| if adds { 1 << power } else { -(1 << power) };
            let sum: i64 = digits(word).iter().map(value).sum();
            assert_eq!(sum, header_weight(word) as i64);
        }
    }

    /// Carries out what stands in the control's body.
    fn run(body: &str, check: u32, changes: &[u32; CHANGING.len()]) -> Option<u32> {
        let mut values: HashMap<String, u32> = HashMap::from([("check".to_owned(), check)]);
        for (word, change) in CHANGING.iter().zip(changes) {
            values.insert(format!("by.word{word}"), *change);
        }
        for statement in body.split(';').map(str::trim).filter(|statement| !statement.is_empty()) {
            let (name, expression) = statement.split_once(" = ")?;
            let parts: Vec<&str> = expression.split(' ').collect();
            let left = *values.get(*parts.first()?)?;
            let value = match parts[1..] {
                [] => left,
                ["+", right] => left.wrapping_add(*values.get(right)?),
                ["-", right] => left.wrapping_sub(*values.get(right)?),
                ["<<", power] => left.wrapping_shl(power.parse().ok()?),
                _ => return None,
            };
            values.insert(name.trim_start_matches("bit<32> ").to_owned(), value);
        }
        values.get("check").copied()
    }

    #[test]
    fn the_check_that_is_made_up_for_is_that_of_the_changed_header() {
        let text = parts();
        let body = text.split("control PaatpCheck").nth(1).and_then(|rest| rest.split("apply {").nth(1));
        let body = body.and_then(|rest| rest.split('}').next()).unwrap_or_default();
        // Numbers without a pattern: those of a linear congruential generator.
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state
        };
        for _ in 0..100 {
            let before = [(); CHECKED_HEADER_WORDS].map(|()| next());
            let (mut after, changes) = (before, CHANGING.map(|_| next()));
            for (word, change) in CHANGING.iter().zip(changes) {
                after[*word] = after[*word].wrapping_add(change);
            }
            let check = |words: [u32; CHECKED_HEADER_WORDS]| header_check(&words.map(u32::to_be_bytes));
            assert_eq!(run(body, check(before), &changes), Some(check(after)));
        }
    }
}
