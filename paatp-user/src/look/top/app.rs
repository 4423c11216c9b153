//! What `paatp top` shows, and what keys change about it.

use std::time::{Duration, Instant};

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use crate::look::past::Past;
use crate::telemetry::snapshot::{JobSnapshot, Snapshot};

/// What a look brought: the node and the past of the chosen job, or why there is nothing.
pub type Look = Result<(Snapshot, Past), String>;

/// A look a second: what is older than this is told to be old, also while an answer may still come.
const STALE_AFTER: Duration = Duration::from_secs(3);

/// What fills the screen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Page {
    /// Jobs, and below them the ranks of the chosen one.
    #[default]
    Node,
    /// The ranks of the chosen job alone.
    Job,
}

/// The whole state.
#[derive(Debug)]
pub struct App {
    /// The aggregator's address.
    pub place: String,
    /// Colours may be used.
    pub colours: bool,
    /// What fills the screen.
    pub page: Page,
    /// The keys are explained.
    pub help: bool,
    /// First rank that is shown on the page of a job.
    pub scroll: usize,
    /// The last that was seen.
    pub snapshot: Option<Snapshot>,
    /// The last minutes of the chosen job.
    pub past: Past,
    /// Why nothing newer was seen.
    pub failure: Option<String>,
    seen: Option<Instant>,
    selected: Option<String>,
    over: bool,
}

impl App {
    /// Before the first look.
    #[must_use]
    pub fn new(place: &str, colours: bool) -> App {
        App {
            place: place.into(),
            colours,
            page: Page::Node,
            help: false,
            scroll: 0,
            snapshot: None,
            past: Past::default(),
            failure: None,
            seen: None,
            selected: None,
            over: false,
        }
    }

    /// Takes a look in.
    pub fn take(&mut self, look: Look, now: Instant) {
        match look {
            Ok((snapshot, past)) => {
                (self.failure, self.seen) = (None, Some(now));
                self.snapshot = Some(snapshot);
                if Some(past.job()) == self.selected.as_deref() {
                    self.past = past;
                }
                if self.job().is_none() {
                    self.choose_first();
                }
            }
            Err(failure) => self.failure = Some(failure),
        }
    }

    /// The job that needs a look most: one that is held up, one that runs, any.
    fn choose_first(&mut self) {
        let jobs = self.jobs();
        let held = jobs.iter().find(|job| job.stall.is_some());
        let runs = || jobs.iter().find(|job| job.status.generation.is_some());
        let name = held.or_else(runs).or(jobs.first()).map(|job| job.status.name.clone());
        self.choose(name);
    }

    fn choose(&mut self, name: Option<String>) {
        if self.selected != name {
            self.past = Past::of(name.as_deref().unwrap_or_default());
            (self.selected, self.scroll) = (name, 0);
        }
        if self.selected.is_none() {
            self.page = Page::Node;
        }
    }

    /// All jobs.
    #[must_use]
    pub fn jobs(&self) -> &[JobSnapshot] {
        self.snapshot.as_ref().map_or(&[], |snapshot| &snapshot.jobs)
    }

    /// Name of the chosen job.
    #[must_use]
    pub fn selected(&self) -> Option<&str> {
        self.selected.as_deref()
    }

    /// The chosen job.
    #[must_use]
    pub fn job(&self) -> Option<&JobSnapshot> {
        self.jobs().iter().find(|job| Some(job.status.name.as_str()) == self.selected())
    }

    /// Its place in the list.
    #[must_use]
    pub fn place_in_list(&self) -> Option<usize> {
        self.jobs().iter().position(|job| Some(job.status.name.as_str()) == self.selected())
    }

    /// How old what is shown is.
    #[must_use]
    pub fn age(&self, now: Instant) -> Option<Duration> {
        self.seen.map(|seen| now.saturating_duration_since(seen))
    }

    /// Why what is shown is not up to date, if it is not.
    #[must_use]
    pub fn silence(&self, now: Instant) -> Option<&str> {
        let late = || self.age(now).is_some_and(|age| age > STALE_AFTER);
        self.failure.as_deref().or_else(|| late().then_some("the aggregator has not answered yet"))
    }

    /// A key or a signal has ended it.
    #[must_use]
    pub const fn is_over(&self) -> bool {
        self.over
    }

    /// A key was pressed.
    pub fn press(&mut self, key: KeyEvent) {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if control => self.over = true,
            _ if control => {}
            KeyCode::Char('q') => self.over = true,
            KeyCode::Char('?' | 'h') => self.help = !self.help,
            // Any other key closes the explanation.
            _ if self.help => self.help = false,
            KeyCode::Enter if self.job().is_some() => self.page = Page::Job,
            KeyCode::Esc | KeyCode::Backspace => (self.page, self.scroll) = (Page::Node, 0),
            KeyCode::Down | KeyCode::Char('j') => self.go(1),
            KeyCode::Up | KeyCode::Char('k') => self.go(-1),
            KeyCode::PageDown => self.go(10),
            KeyCode::PageUp => self.go(-10),
            KeyCode::Home | KeyCode::Char('g') => self.go(isize::MIN),
            KeyCode::End | KeyCode::Char('G') => self.go(isize::MAX),
            _ => {}
        }
    }

    /// To another job, or on the page of one to other ranks.
    fn go(&mut self, steps: isize) {
        let last = |length: usize| length.saturating_sub(1);
        match self.page {
            Page::Node => {
                let here = self.place_in_list().unwrap_or(0);
                let there = here.saturating_add_signed(steps).min(last(self.jobs().len()));
                let name = self.jobs().get(there).map(|job| job.status.name.clone());
                self.choose(name);
            }
            Page::Job => {
                let ranks = self.job().map_or(0, |job| job.ranks.len());
                self.scroll = self.scroll.saturating_add_signed(steps).min(last(ranks));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::look::sample;

    fn press(app: &mut App, code: KeyCode) {
        app.press(KeyEvent::new(code, KeyModifiers::NONE));
    }

    fn app() -> App {
        let mut app = App::new("127.0.0.1:20545", true);
        app.take(Ok((sample::node(), Past::default())), Instant::now());
        app
    }

    #[test]
    fn keys_choose_jobs_and_ranks() {
        let mut app = app();
        assert_eq!(app.selected(), Some("train"), "the one that is held up");
        press(&mut app, KeyCode::Up);
        assert_eq!(app.selected(), Some("train"));
        press(&mut app, KeyCode::Char('j'));
        assert_eq!(app.selected(), Some("eval"));
        press(&mut app, KeyCode::PageDown);
        assert_eq!((app.selected(), app.page), (Some("idle"), Page::Node));
        press(&mut app, KeyCode::Enter);
        press(&mut app, KeyCode::Down);
        press(&mut app, KeyCode::End);
        assert_eq!((app.page, app.scroll), (Page::Job, 7));
        press(&mut app, KeyCode::Home);
        assert_eq!(app.scroll, 0);
        press(&mut app, KeyCode::Char('?'));
        press(&mut app, KeyCode::Down);
        assert_eq!((app.help, app.scroll), (false, 0));
        press(&mut app, KeyCode::Esc);
        press(&mut app, KeyCode::Char('k'));
        assert_eq!((app.page, app.selected()), (Page::Node, Some("eval")));
        press(&mut app, KeyCode::Char('q'));
        assert!(app.is_over());
    }

    #[test]
    fn control_c_ends_it_and_other_control_keys_do_nothing() {
        let mut app = app();
        app.press(KeyEvent::new(KeyCode::Char('q'), KeyModifiers::CONTROL));
        assert!(!app.is_over());
        app.press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL));
        assert!(app.is_over());
    }

    #[test]
    fn a_job_that_goes_makes_room_for_another() {
        let mut app = app();
        press(&mut app, KeyCode::Enter);
        let mut snapshot = sample::node();
        snapshot.jobs.remove(0);
        app.take(Ok((snapshot, Past::of("train"))), Instant::now());
        assert_eq!((app.selected(), app.past.job()), (Some("eval"), "eval"));
        let mut snapshot = sample::node();
        snapshot.jobs.clear();
        app.take(Ok((snapshot, Past::default())), Instant::now());
        assert_eq!((app.selected(), app.page), (None, Page::Node));
        for code in [KeyCode::Down, KeyCode::Enter, KeyCode::End] {
            press(&mut app, code);
        }
        assert_eq!((app.selected(), app.page), (None, Page::Node));
    }

    #[test]
    fn what_was_seen_stays_while_nobody_answers() {
        let mut app = app();
        let now = Instant::now() + Duration::from_secs(9);
        app.take(Err("no answer".into()), now);
        assert!(app.snapshot.is_some() && app.failure.is_some());
        assert!(app.age(now).is_some_and(|age| age >= Duration::from_secs(9)));
        app.take(Ok((sample::node(), Past::default())), now);
        assert_eq!((app.failure.as_deref(), app.age(now)), (None, Some(Duration::ZERO)));
        // One that takes its time to answer is not taken for up to date either.
        assert_eq!(app.silence(now + STALE_AFTER), None);
        assert!(app.silence(now + STALE_AFTER + Duration::from_millis(1)).is_some());
    }
}
