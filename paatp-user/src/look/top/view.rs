//! Draws `paatp top`: a pure function from state to screen.

use std::time::Instant;

use paatp_common::counter::Refusal;
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Margin, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Block, Cell, Clear, Paragraph, Row, Table, TableState, Wrap};

use crate::client::job::{job_sync_in_words, state_in_words};
use crate::look::words;
use crate::telemetry::health::{Level, Notice};
use crate::telemetry::snapshot::{JobSnapshot, RankSnapshot, Snapshot};

use super::app::{App, Page};

/// The smallest screen that shows anything of use.
const SMALLEST: (u16, u16) = (40, 10);
/// Notices that are shown, refusals, and jobs beside the ranks of one.
const NOTICES: usize = 3;
const REFUSALS: usize = 4;
const JOBS: u16 = 12;
/// From here on there is room for addresses, in columns.
const WIDE_ENOUGH: u16 = 100;
/// Heights of a plot of one line.
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

const KEYS: &str = " ↑↓ job   enter ranks   ? keys   q quit";
const KEYS_OF_JOB: &str = " ↑↓ ranks   esc back   ? keys   q quit";

const HELP: &str = "\
up, down, k, j     another job; on its page, other ranks
page up, page down ten further
home, end, g, G    the first, the last
enter              the chosen job's ranks on the whole screen
escape             back
?                  this; any key closes it
q, Ctrl-C          end

Throughput: contributions, the newest on the right, all ranks on
one scale. Behind: chunks behind the first rank. ▲ marks a rank
that the others wait for.";

/// What colours mean. Without them weight and signs say the same.
struct Palette(bool);

impl Palette {
    fn alarm(&self) -> Style {
        let bold = Style::new().add_modifier(Modifier::BOLD);
        if self.0 { bold.fg(Color::Red) } else { bold }
    }

    fn plot(&self) -> Style {
        if self.0 { Style::new().fg(Color::Cyan) } else { Style::new() }
    }

    fn of(&self, level: Level) -> Style {
        if level == Level::Trouble { self.alarm() } else { Style::new() }
    }
}

const QUIET: Style = Style::new().add_modifier(Modifier::DIM);
const STRONG: Style = Style::new().add_modifier(Modifier::BOLD);

/// Draws everything.
pub fn draw(frame: &mut Frame<'_>, app: &App, now: Instant) {
    let area = frame.area();
    if area.width < SMALLEST.0 || area.height < SMALLEST.1 {
        let words = format!("paatp top needs {} columns and {} lines", SMALLEST.0, SMALLEST.1);
        frame.render_widget(Paragraph::new(words).wrap(Wrap { trim: true }), area);
        return;
    }
    let palette = Palette(app.colours);
    let lead = lead(app, &palette, now);
    let refusals = app.snapshot.as_ref().map(refusals).unwrap_or_default();
    let foot = if refusals.is_empty() { 0 } else { refusals.len() as u16 + 1 };
    // At most a line for each of a few notices and refusals.
    let [top, body, bottom, keys] = Layout::vertical([
        Constraint::Length(lead.lines.len() as u16),
        Constraint::Min(3),
        Constraint::Length(if area.height > 20 { foot } else { 0 }),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(Paragraph::new(lead), top);
    match (app.page, app.job()) {
        (Page::Job, Some(job)) => ranks(frame, body, app, job, &palette),
        _ => node(frame, body, app, &palette),
    }
    frame.render_widget(Paragraph::new(refusals), bottom);
    let line = if app.page == Page::Job { KEYS_OF_JOB } else { KEYS };
    frame.render_widget(Paragraph::new(line).style(QUIET), keys);
    if app.help {
        explain(frame, area);
    }
}

/// Who is looked at, how it does, and what needs a look.
fn lead<'a>(app: &'a App, palette: &Palette, now: Instant) -> Text<'a> {
    let name = Span::styled(format!(" paatp at {}", app.place), STRONG);
    let mut lines = Vec::new();
    match app.silence(now) {
        Some(failure) => {
            // Its age first: on a narrow screen the reason may be cut off.
            let age = app.age(now).map(|age| words::time(age.as_secs_f64()));
            let age = age.map(|age| format!("; what is shown is {age} old")).unwrap_or_default();
            lines.push(Line::from(vec![name, Span::styled(format!("  ▲ no answer{age}"), palette.alarm())]));
            lines.push(Line::styled(format!(" {failure}"), palette.alarm()));
        }
        None => {
            let Some(snapshot) = &app.snapshot else {
                return Line::from(vec![name, Span::raw("  asking…")]).into();
            };
            let style = palette.of(snapshot.health.level);
            lines
                .push(Line::from(vec![name, Span::styled(format!("  {}", words::verdict(snapshot)), style)]));
        }
    }
    if let Some(snapshot) = &app.snapshot {
        lines.push(Line::styled(summary(snapshot), QUIET));
        let notice = |notice: &Notice| {
            let mark = if notice.level == Level::Trouble { '▲' } else { '-' };
            Line::styled(format!(" {mark} {}", notice.sentence), palette.of(notice.level))
        };
        let notices = &snapshot.health.notices;
        lines.extend(notices.iter().take(NOTICES).map(notice));
        if notices.len() > NOTICES {
            lines.push(Line::raw(format!("   and {} more", notices.len() - NOTICES)));
        }
    }
    lines.into()
}

fn summary(snapshot: &Snapshot) -> String {
    let node = &snapshot.node;
    let given = node.slots.saturating_sub(node.free_slots);
    let bytes = |slots: u32| words::bytes(u64::from(slots) * u64::from(node.slot_bytes));
    format!(
        " {} {}, up for {}; {} of {} given to jobs",
        snapshot.attachment.interface,
        snapshot.attachment.mode,
        words::time(snapshot.uptime_seconds),
        bytes(given),
        bytes(node.slots)
    )
}

/// Jobs, and below them the ranks of the chosen one.
fn node(frame: &mut Frame<'_>, area: Rect, app: &App, palette: &Palette) {
    if app.jobs().is_empty() {
        if app.snapshot.is_some() {
            let words = "\n no job; create one with `paatp job create NAME --world N`";
            frame.render_widget(Paragraph::new(words), area);
        }
        return;
    }
    // A heading and a frame's line; of a long list only a part, which the chosen job is in.
    let wanted = app.jobs().len().min(usize::from(JOBS)) as u16 + 2;
    let [upper, lower] =
        Layout::vertical([Constraint::Length(wanted.min(area.height / 2)), Constraint::Min(0)]).areas(area);
    jobs(frame, upper, app, palette);
    if let Some(job) = app.job() {
        ranks(frame, lower, app, job, palette);
    }
}

fn title(text: String) -> Block<'static> {
    Block::new().borders(ratatui::widgets::Borders::TOP).border_style(QUIET).title(Span::styled(text, STRONG))
}

fn number(text: String) -> Cell<'static> {
    Cell::from(Text::from(text).alignment(Alignment::Right))
}

fn header<const N: usize>(names: [&'static str; N], left: &[usize]) -> Row<'static> {
    let cell = |(place, name): (usize, &'static str)| {
        let side = if left.contains(&place) { Alignment::Left } else { Alignment::Right };
        Cell::from(Text::from(name).alignment(side))
    };
    Row::new(names.into_iter().enumerate().map(cell)).style(QUIET)
}

fn jobs(frame: &mut Frame<'_>, area: Rect, app: &App, palette: &Palette) {
    let row = |job: &JobSnapshot| {
        let status = &job.status;
        let waits = words::waits_for(job).map(|waits| format!("▲ {waits}"));
        Row::new([
            Cell::from(format!(" {}", status.name)),
            Cell::from(state_in_words(status.state)),
            number(status.world.to_string()),
            number(words::prefixed(job.chunks_per_second, "chunk/s")),
            number(words::payload(job.chunks_per_second, status.lanes)),
            number(words::count(job.lag_chunks.into())),
            Cell::from(waits.unwrap_or_default()).style(palette.alarm()),
        ])
    };
    let widths = [
        Constraint::Min(8),
        Constraint::Length(7),
        Constraint::Length(5),
        Constraint::Length(13),
        Constraint::Length(11),
        Constraint::Length(6),
        Constraint::Fill(2),
    ];
    let names = [" job", "state", "ranks", "results", "payload", "behind", "waits for"];
    let table = Table::new(app.jobs().iter().map(row), widths)
        .header(header(names, &[0, 1, 6]))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
        .column_spacing(2)
        .block(title(format!(" Jobs ({}) ", app.jobs().len())));
    let mut state = TableState::new().with_selected(app.place_in_list());
    frame.render_stateful_widget(table, area, &mut state);
}

fn ranks(frame: &mut Frame<'_>, area: Rect, app: &App, job: &JobSnapshot, palette: &Palette) {
    let generation =
        job.status.generation.map_or("no generation".into(), |number| format!("generation {number}"));
    let block = title(format!(
        " {}, {generation}, results wait for {} ",
        job.status.name,
        job_sync_in_words(&job.status)
    ));
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let open = words::open_slot(job);
    let [line, body] =
        Layout::vertical([Constraint::Length(u16::from(open.is_some())), Constraint::Min(0)]).areas(inner);
    frame.render_widget(Paragraph::new(format!(" {}", open.unwrap_or_default())), line);

    let pasts: Vec<Vec<f64>> = (0..job.status.world).map(|rank| app.past.rates(rank)).collect();
    let highest = pasts.iter().flatten().copied().fold(0.0, f64::max);
    let width = usize::from(plot_width(body.width));
    let row = |rank: &&RankSnapshot| {
        let held = words::is_held_by(job, rank);
        let style = match (held, rank.straggler) {
            (true, _) => palette.alarm(),
            (false, true) => STRONG,
            _ => Style::new(),
        };
        let mark = if rank.straggler { '▲' } else { ' ' };
        let past = pasts.get(usize::from(rank.rank)).map(Vec::as_slice).unwrap_or_default();
        Row::new([
            Cell::from(format!("{mark}{:>3}", rank.rank)).style(style),
            Cell::from(words::rank(job, rank)).style(style),
            Cell::from(bars(past, highest, width)).style(palette.plot()),
            number(words::prefixed(rank.chunks_per_second, "chunk/s")),
            number(words::count(rank.lag_chunks.into())),
            number(words::count(rank.busy)),
            Cell::from(rank.address.clone().filter(|_| body.width >= WIDE_ENOUGH).unwrap_or_default()),
        ])
    };
    let widths = [
        Constraint::Length(5),
        Constraint::Length(30),
        Constraint::Length(plot_width(body.width)),
        Constraint::Length(13),
        Constraint::Length(7),
        Constraint::Length(7),
        Constraint::Fill(1),
    ];
    // Half an address is none.
    let address = if body.width < WIDE_ENOUGH { "" } else { "address" };
    let names = ["rank", "state", "", "throughput", "behind", "BUSY", address];
    let scroll = if app.page == Page::Job { app.scroll } else { 0 };
    let all = words::by_need(job);
    let shown = all.iter().skip(scroll).map(row);
    let table = Table::new(shown, widths).header(header(names, &[0, 1, 2, 6])).column_spacing(1);
    frame.render_widget(table, body);
}

/// Columns for the plot of a rank.
const fn plot_width(width: u16) -> u16 {
    match width {
        ..90 => 8,
        90..130 => 16,
        _ => 40,
    }
}

/// The last of `values`, one sign each, the newest on the right.
fn bars(values: &[f64], highest: f64, width: usize) -> String {
    let shown = &values[values.len().saturating_sub(width)..];
    let bar = |value: &f64| {
        if highest <= 0.0 || *value <= 0.0 {
            return ' ';
        }
        // Between 0 and 7: a value that is no zero is seen.
        let height = (value / highest * BARS.len() as f64).ceil() as usize;
        BARS[height.clamp(1, BARS.len()) - 1]
    };
    let text: String = shown.iter().map(bar).collect();
    format!("{text:>width$}")
}

/// The reasons that counted most.
fn refusals(snapshot: &Snapshot) -> Vec<Line<'static>> {
    let counted = &snapshot.counters.refusals;
    let mut all: Vec<(&String, u64)> = counted.iter().map(|(name, count)| (name, *count)).collect();
    all.retain(|(_, count)| *count > 0);
    all.sort_by_key(|(name, count)| (std::cmp::Reverse(*count), *name));
    if all.is_empty() {
        return Vec::new();
    }
    let more =
        if all.len() > REFUSALS { format!(", {} more reasons", all.len() - REFUSALS) } else { String::new() };
    let heading = Line::styled(format!(" Refused packets of all jobs, since the start{more}"), STRONG);
    let line = |(name, count): &(&String, u64)| {
        let meaning = Refusal::ALL.iter().find(|refusal| refusal.name() == name.as_str());
        let meaning = meaning.map_or("", |refusal| refusal.sentence());
        Line::raw(format!(" {:>14} {name:<16} {meaning}", words::count(*count)))
    };
    std::iter::once(heading).chain(all.iter().take(REFUSALS).map(line)).collect()
}

fn explain(frame: &mut Frame<'_>, area: Rect) {
    let lines = HELP.lines().count() as u16;
    let columns = HELP.lines().map(|line| line.chars().count()).max().unwrap_or(0) as u16;
    let [column] = Layout::horizontal([Constraint::Length((columns + 4).min(area.width))])
        .flex(ratatui::layout::Flex::Center)
        .areas(area);
    let [place] = Layout::vertical([Constraint::Length((lines + 2).min(area.height))])
        .flex(ratatui::layout::Flex::Center)
        .areas(column);
    frame.render_widget(Clear, place);
    frame.render_widget(Block::bordered().title(" Keys "), place);
    frame.render_widget(Paragraph::new(HELP), place.inner(Margin { horizontal: 2, vertical: 1 }));
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
