//! Whole screens, compared with files. `PAATP_BLESS=1` writes them anew; look at the difference before you commit it.

use std::path::Path;
use std::time::Duration;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::*;
use crate::look::past::Past;
use crate::look::sample;

/// The node as of a moment, with the past of `train`.
fn app(now: Instant) -> App {
    let mut app = App::new("127.0.0.1:20545", true);
    app.take(Ok((sample::node(), Past::default())), now);
    let mut past = Past::of("train");
    past.take(&sample::series(4, 60));
    app.take(Ok((sample::node(), past)), now);
    app
}

fn press(app: &mut App, code: KeyCode) {
    app.press(KeyEvent::new(code, KeyModifiers::NONE));
}

fn terminal(app: &App, now: Instant, width: u16, height: u16) -> Terminal<TestBackend> {
    let mut terminal =
        Terminal::new(TestBackend::new(width, height)).unwrap_or_else(|error| panic!("{error}"));
    assert!(terminal.draw(|frame| draw(frame, app, now)).is_ok());
    terminal
}

fn screen(app: &App, now: Instant, width: u16, height: u16) -> String {
    let terminal = terminal(app, now, width, height);
    let cells = terminal.backend().buffer().content();
    let line = |cells: &[ratatui::buffer::Cell]| {
        let text: String = cells.iter().map(ratatui::buffer::Cell::symbol).collect();
        text.trim_end().to_owned() + "\n"
    };
    cells.chunks(width.into()).map(line).collect()
}

fn compare(name: &str, screen: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/look/top/screens").join(name);
    if std::env::var_os("PAATP_BLESS").is_some() {
        assert!(std::fs::write(&path, screen).is_ok());
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(screen, expected, "{name} differs; it is now\n{screen}");
}

#[test]
fn the_node() {
    let now = Instant::now();
    let app = app(now);
    compare("node.txt", &screen(&app, now, 110, 30));
    compare("node-narrow.txt", &screen(&app, now, 80, 24));
}

#[test]
fn one_job_with_all_its_ranks() {
    let now = Instant::now();
    let mut app = app(now);
    press(&mut app, KeyCode::Enter);
    compare("job.txt", &screen(&app, now, 140, 16));
    press(&mut app, KeyCode::End);
    assert!(!screen(&app, now, 140, 16).contains("10.0.0.1"), "scrolled away");
}

#[test]
fn keys_are_explained() {
    let now = Instant::now();
    let mut app = app(now);
    press(&mut app, KeyCode::Char('?'));
    compare("help.txt", &screen(&app, now, 80, 24));
}

#[test]
fn silence() {
    let now = Instant::now();
    let mut app = app(now);
    let before = App::new("127.0.0.1:20545", true);
    assert!(screen(&before, now, 80, 24).starts_with(" paatp at 127.0.0.1:20545  asking…"));
    let failure = "no aggregator answers at 127.0.0.1:20545: is `paatp run` running there?";
    app.take(Err(failure.into()), now + Duration::from_secs(9));
    let shown = screen(&app, now + Duration::from_secs(9), 110, 30);
    let lines: Vec<&str> = shown.lines().collect();
    assert_eq!(lines[0], " paatp at 127.0.0.1:20545  ▲ no answer; what is shown is 9 s old");
    assert_eq!(lines[1], format!(" {failure}"));
    assert!(shown.contains("train") && shown.contains("rank 2, 3.2 s"), "what was known stays:\n{shown}");
}

#[test]
fn an_empty_node() {
    let now = Instant::now();
    let mut snapshot = sample::node();
    snapshot.jobs.clear();
    snapshot.health = crate::telemetry::health::judge(&snapshot);
    let mut app = App::new("127.0.0.1:20545", true);
    app.take(Ok((snapshot, Past::default())), now);
    assert!(screen(&app, now, 80, 24).contains("no job; create one with `paatp job create NAME --world N`"));
}

/// No size breaks it, and on a screen that is too small it says so.
#[test]
fn all_sizes() {
    let now = Instant::now();
    let mut app = app(now);
    for page in [KeyCode::Esc, KeyCode::Enter, KeyCode::Char('?')] {
        press(&mut app, page);
        for (width, height) in
            (1..200).step_by(7).flat_map(|width| [1, 2, 9, 10, 21, 80].map(|height| (width, height)))
        {
            let _ = screen(&app, now, width, height);
        }
    }
    assert!(screen(&app, now, 39, 10).starts_with("paatp top needs 40 columns and 10 lines"));
}

/// More jobs than lines: the chosen one is in sight.
#[test]
fn long_lists_scroll() {
    let now = Instant::now();
    let mut snapshot = sample::node();
    snapshot.jobs =
        (0..64).map(|number| sample::job(number, &format!("job-{number}"), 64, "running")).collect();
    let mut app = App::new("127.0.0.1:20545", true);
    app.take(Ok((snapshot, Past::default())), now);
    press(&mut app, KeyCode::End);
    let shown = screen(&app, now, 110, 40);
    assert!(shown.contains(" job-63 ") && !shown.contains(" job-40 "), "{shown}");
    assert!(shown.contains("job-63, generation 77"), "{shown}");
}

#[test]
fn without_colours_everything_is_said_all_the_same() {
    let now = Instant::now();
    let mut app = app(now);
    let coloured = screen(&app, now, 110, 30);
    app.colours = false;
    assert_eq!(screen(&app, now, 110, 30), coloured);
    let terminal = terminal(&app, now, 110, 30);
    assert!(terminal.backend().buffer().content().iter().all(|cell| cell.fg == Color::Reset));
}

#[test]
fn bars_show_small_values_and_the_newest() {
    assert_eq!(bars(&[0.0, 0.1, 50.0, 100.0], 100.0, 3), "▁▄█");
    assert_eq!(bars(&[5.0], 5.0, 3), "  █");
    assert_eq!(bars(&[], 0.0, 3), "   ");
}
