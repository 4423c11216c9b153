//! The parts for Tofino: lanes one by one, a header as words, and its check without a multiplication.

use std::fmt::Write as _;

use paatp_common::limits::{LANES_PER_BLOCK, MAX_RANKS};
use paatp_common::tag::{CHECKED_HEADER_WORDS, header_weight};

use super::{ORIGIN, fields};

/// Words of a header that a partial sum changes by an amount that no table knows: what they hold, and their numbers.
const CHANGING: [(&str, usize); 6] =
    [("want", 4), ("ack", 5), ("progress", 6), ("tag_high", 10), ("tag_low", 11), ("next_exponent", 13)];

/// All of them.
pub(super) fn parts() -> String {
    let mut text = ORIGIN.to_owned();
    line!(text, "/* The header with whole words where there is something to compute. */");
    line!(text, "header paatp_words_h {{");
    for (name, bits) in words() {
        line!(text, "    bit<{bits}> {name};");
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
    ranks(&mut text);
    text
}

/// Name and bits of the fields of a header that has whole words but for the second.
fn words() -> Vec<(String, usize)> {
    let mut words = Vec::new();
    let mut parts: Vec<(&str, usize)> = Vec::new();
    for (name, bits) in fields() {
        parts.push((name, bits));
        let number = words.iter().map(|(_, bits)| bits).sum::<usize>() / 32;
        let sum = parts.iter().map(|(_, bits)| bits).sum::<usize>();
        let all = parts.iter().map(|(name, bits)| ((*name).to_owned(), *bits));
        match (sum, parts.len()) {
            (32, 1) => words.extend(all),
            // Of job, rank and status each is looked up, and none is computed with.
            (32, _) if parts[0].0 == "job" => words.extend(all),
            (32, _) => words.push((format!("word{number}"), 32)),
            (64, 1) => words.extend(["high", "low"].map(|half| (format!("{name}_{half}"), 32))),
            _ => continue,
        }
        parts.clear();
    }
    words
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
    line!(text, "header paatp_changes_h {{");
    for (name, _) in CHANGING {
        line!(text, "    bit<32> {name};");
    }
    line!(text, "}}\n");
    line!(
        text,
        "/* Makes up for it in the header's check: each change times the weight of its word. Weights are sums and"
    );
    line!(
        text,
        " * differences of powers of two, so nothing is multiplied. An error that the check showed it still shows."
    );
    line!(text, " * A step for each stage of a switch. */");
    line!(text, "control PaatpCheck(inout bit<32> check, in paatp_changes_h by) {{");
    let schedule = Schedule::of_the_check();
    for name in &schedule.sums {
        line!(text, "    bit<32> {name};");
    }
    for (number, step) in schedule.steps.iter().enumerate() {
        line!(text, "\n    action step{number}() {{");
        for statement in step {
            line!(text, "        {statement};");
        }
        line!(text, "    }}");
    }
    line!(text, "\n    apply {{");
    for number in 0..schedule.steps.len() {
        line!(text, "        step{number}();");
    }
    line!(text, "    }}\n}}\n");
}

/// What the check gains as a rank's number becomes 0, for a table of it. (A switch adds what a table says, but does not
/// subtract it.)
fn ranks(text: &mut String) {
    line!(text, "/* What the check gains as a rank's number becomes 0. */");
    line!(text, "#define PAATP_RANKS_OUT_OF_CHECK(action) \\");
    for rank in 0..MAX_RANKS as u32 {
        let end = if rank + 1 == MAX_RANKS as u32 { "" } else { " \\" };
        let gain = ((rank << 8).wrapping_mul(header_weight(1) as u32)).wrapping_neg();
        line!(text, "    {rank}: action({gain:#010x});{end}");
    }
}

/// Additions and shifts, those of a step at once.
#[derive(Default)]
struct Schedule {
    sums: Vec<String>,
    steps: Vec<Vec<String>>,
}

impl Schedule {
    /// For each power of two the sum of what has it, added up from the highest on, each time shifted by what is between
    /// them; what has a weight of one meanwhile goes to the check itself.
    fn of_the_check() -> Schedule {
        let mut schedule = Schedule::default();
        let mut powers: Vec<u32> =
            CHANGING.iter().flat_map(|(_, word)| digits(*word)).map(|digit| digit.1).collect();
        powers.sort_unstable();
        powers.dedup();
        let mut upper: Option<(String, u32, usize)> = None;
        for power in powers.iter().rev().copied() {
            let mut terms: Vec<(bool, &str)> = Vec::new();
            for (name, word) in CHANGING {
                terms.extend(
                    digits(word).iter().filter(|digit| digit.1 == power).map(|digit| (digit.0, name)),
                );
            }
            terms.sort_by_key(|(adds, _)| !adds);
            let name = if power == 0 { "check".to_owned() } else { format!("times_{}", 1u32 << power) };
            let mut rest = terms.iter();
            let mut done = 0;
            let mut value = "check".to_owned();
            if power > 0 {
                let Some((true, first)) = rest.next() else { continue };
                schedule.sums.push(name.clone());
                value = format!("by.{first}");
            }
            for (adds, term) in rest {
                let operator = if *adds { '+' } else { '-' };
                schedule.put(done, format!("{name} = {value} {operator} by.{term}"));
                value.clone_from(&name);
                done += 1;
            }
            if let Some((above, from, ready)) = upper {
                schedule.put(ready, format!("{above} = {above} << {}", from - power));
                let at = done.max(ready + 1);
                schedule.put(at, format!("{name} = {value} + {above}"));
                done = at + 1;
            }
            upper = Some((name, power, done));
        }
        schedule
    }

    fn put(&mut self, step: usize, statement: String) {
        self.steps.resize(self.steps.len().max(step + 1), Vec::new());
        self.steps[step].push(statement);
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
    use paatp_common::wire::HEADER_BYTES;

    use super::*;

    #[test]
    fn digits_make_the_weights() {
        for word in 0..CHECKED_HEADER_WORDS {
            let value = |&(adds, power): &(bool, u32)| if adds { 1 << power } else { -(1 << power) };
            let sum: i64 = digits(word).iter().map(value).sum();
            assert_eq!(sum, header_weight(word) as i64);
        }
    }

    /// Carries out what stands in the control's steps.
    fn run(steps: &str, check: u32, changes: &[u32; CHANGING.len()]) -> Option<u32> {
        let mut values: HashMap<String, u32> = HashMap::from([("check".to_owned(), check)]);
        for ((name, _), change) in CHANGING.iter().zip(changes) {
            values.insert(format!("by.{name}"), *change);
        }
        for step in steps.split("action step").skip(1) {
            let body = step.split_once('{')?.1.split_once('}')?.0;
            // A stage reads what was there before it.
            let before = values.clone();
            for statement in body.split(';').map(str::trim).filter(|statement| !statement.is_empty()) {
                let (name, expression) = statement.split_once(" = ")?;
                let parts: Vec<&str> = expression.split(' ').collect();
                let left = *before.get(*parts.first()?)?;
                let value = match parts[1..] {
                    ["+", right] => left.wrapping_add(*before.get(right)?),
                    ["-", right] => left.wrapping_sub(*before.get(right)?),
                    ["<<", power] => left.wrapping_shl(power.parse().ok()?),
                    _ => return None,
                };
                values.insert(name.to_owned(), value);
            }
        }
        values.get("check").copied()
    }

    #[test]
    fn the_check_that_is_made_up_for_is_that_of_the_changed_header() {
        let text = parts();
        let steps = text.split("control PaatpCheck").nth(1).and_then(|rest| rest.split("    apply {").next());
        let steps = steps.unwrap_or_default();
        // Numbers without a pattern: those of a linear congruential generator.
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state
        };
        for _ in 0..100 {
            let before = [(); CHECKED_HEADER_WORDS].map(|()| next());
            let (mut after, changes) = (before, CHANGING.map(|_| next()));
            for ((_, word), change) in CHANGING.iter().zip(changes) {
                after[*word] = after[*word].wrapping_add(change);
            }
            let check = |words: [u32; CHECKED_HEADER_WORDS]| header_check(&words.map(u32::to_be_bytes));
            assert_eq!(run(steps, check(before), &changes), Some(check(after)));
        }
    }

    #[test]
    fn words_are_where_the_check_has_them() {
        let mut bits = 0;
        for (name, width) in words() {
            if let Some((_, word)) = CHANGING.iter().find(|(changing, _)| *changing == name) {
                assert_eq!(bits, word * 32, "{name}");
            }
            bits += width;
        }
        assert_eq!(bits, HEADER_BYTES * 8);
        // The next exponent is in the word that the program computes with.
        assert!(words().iter().any(|(name, _)| name == "word13"));
    }
}
