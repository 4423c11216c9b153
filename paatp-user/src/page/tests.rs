//! What the page is made of. How it behaves in a browser: `tests/tests/page.rs`.

use super::*;
use crate::control::testing::{send, server};
use std::io::Read;

fn asset(path: &str) -> &'static str {
    ASSETS.iter().find(|asset| asset.path == path).map_or("", |asset| asset.text)
}

/// Status line, header and body.
fn fetch(address: std::net::SocketAddr, path: &str) -> (String, String) {
    let mut text = String::new();
    let _ = send(address, "GET", path, "").stream.read_to_string(&mut text);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    (head.to_ascii_lowercase(), body.to_owned())
}

#[test]
fn the_page_is_served_where_jobs_are_managed_and_without_a_token() {
    let server = server();
    for Asset { path, media_type, text } in ASSETS {
        let (head, body) = fetch(server.address, path);
        assert!(head.starts_with("http/1.1 200"), "{path}: {head}");
        assert!(head.contains(&format!("content-type: {media_type}")), "{path}: {head}");
        assert!(head.contains("content-security-policy: default-src 'none'; script-src 'self'"), "{head}");
        assert!(head.contains("x-content-type-options: nosniff") && head.contains("no-store"), "{head}");
        assert_eq!(body, text);
        let (head, body) = fetch(server.workers, path);
        assert!(head.starts_with("http/1.1 403") && body.contains("not_here"), "{path}: {head}");
    }
    let (head, body) = fetch(server.address, WORDS);
    assert!(head.contains("content-type: application/json"), "{head}");
    let words: serde_json::Value = serde_json::from_str(&body).unwrap_or_default();
    assert_eq!(words["refusals"]["bad_tag"], Refusal::BadTag.sentence());
    assert_eq!(words["events"].as_object().map(serde_json::Map::len), Some(Event::COUNT));
}

/// Everything comes from this server, and nothing is code but the script.
#[test]
fn nothing_is_inline_and_nothing_from_elsewhere() {
    for Asset { path, text, .. } in ASSETS {
        let text = text.replace("http://www.w3.org/2000/svg", "");
        assert!(!text.contains("http:") && !text.contains("https:") && !text.contains("url("), "{path}");
    }
    let page = asset("/").to_ascii_lowercase();
    assert!(!page.contains("<style") && !page.contains(" style=") && !page.contains("javascript:"));
    assert_eq!(page.matches("<script").count(), 1);
    assert!(page.contains("<script type=\"module\" src=\"/page/script.js\"></script>"));
    let handler = page.split_whitespace().find(|word| word.starts_with("on") && word.contains('='));
    assert_eq!(handler, None);
    for forbidden in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", ".style"] {
        assert!(!asset("/page/script.js").contains(forbidden), "{forbidden}");
    }
    let used = [asset("/"), asset("/page/script.js")].concat();
    for path in used.split(['"', '\'']).filter(|part| part.starts_with("/page/")) {
        assert!(path == WORDS || !asset(path).is_empty(), "{path} is not served");
    }
}

/// The script's sentences fit the states that the API tells.
#[test]
fn the_script_knows_all_states() {
    use crate::telemetry::snapshot::RankState as State;
    let script = asset("/page/script.js");
    for state in [State::Absent, State::Missing, State::Waiting, State::Member, State::Left, State::Lost] {
        let name = serde_json::to_value(state).unwrap_or_default();
        assert!(script.contains(&format!("  {}: \"", name.as_str().unwrap_or("?"))), "{name}");
    }
}

/// A colour's part of the relative luminance of WCAG 2.
fn linear(part: &str) -> f64 {
    let value =
        f64::from(u8::from_str_radix(part, 16).unwrap_or_else(|error| panic!("{part}: {error}"))) / 255.0;
    if value <= 0.04045 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
}

fn luminance(colour: &str) -> f64 {
    0.2126 * linear(&colour[0..2]) + 0.7152 * linear(&colour[2..4]) + 0.0722 * linear(&colour[4..6])
}

/// Contrast of two colours by WCAG 2: 1 to 21.
fn contrast(one: &str, other: &str) -> f64 {
    let (a, b) = (luminance(one), luminance(other));
    (a.max(b) + 0.05) / (a.min(b) + 0.05)
}

/// The palettes, light and dark.
fn palettes() -> [BTreeMap<&'static str, &'static str>; 2] {
    let style = asset("/page/style.css");
    let (light, dark) = style.split_once("prefers-color-scheme: dark").unwrap_or_default();
    let dark = dark.split_once("\n}\n").unwrap_or_default().0;
    [light, dark].map(|part| {
        let lines = part.lines().filter_map(|line| line.trim().strip_prefix("--")?.split_once(": #"));
        lines.map(|(name, colour)| (name, colour.trim_end_matches(';'))).collect()
    })
}

#[test]
fn colours_can_be_told_apart() {
    assert!((contrast("000000", "ffffff") - 21.0).abs() < 1e-9);
    assert!((contrast("777777", "ffffff") - 4.48).abs() < 0.01);
    for palette in palettes() {
        let colour = |name: &str| *palette.get(name).unwrap_or_else(|| panic!("no --{name}: {palette:?}"));
        let ratio = |one, other| contrast(colour(one), colour(other));
        for ground in ["ground", "surface"] {
            // Text: 4.5 (WCAG 2.2, 1.4.3).
            for text in ["ink", "quiet", "accent", "alarm"] {
                assert!(ratio(text, ground) >= 4.5, "{text} on {ground}: {:.2}", ratio(text, ground));
            }
        }
        // Lines of plots, marks and the focus: 3 (1.4.11).
        for (line, ground) in
            [("accent", "surface"), ("accent", "band"), ("quiet", "surface"), ("ink", "band")]
        {
            assert!(ratio(line, ground) >= 3.0, "{line} on {ground}: {:.2}", ratio(line, ground));
        }
    }
}
