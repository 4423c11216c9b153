//! `paatp top`: the node on a terminal, live. [`app`] holds what is shown and what keys do, [`view`] draws it: both know
//! no terminal. Here are the terminal, the looks, and the signals.

pub mod app;
pub mod view;

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

use clap::Args;
use nix::sys::signal::{SigSet, Signal};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use thiserror::Error;

use crate::client::job::JobError;

use super::past::Past;
use super::{Eyes, Target};

use app::{App, Look};

/// Time between two looks.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Longest wait for a key: so long may news and signals take to show.
const KEY_WAIT: Duration = Duration::from_millis(100);

/// Exit status after a signal: 128 and its number, as shells have it.
const SIGNAL_STATUS: i32 = 128;

/// After the options of `paatp top`.
pub const AFTER_HELP: &str = "\
Keys: up and down (or k and j) choose a job, enter shows its ranks on the whole screen, escape goes back, ? explains, q \
ends. Changes nothing at the aggregator. NO_COLOR leaves colours away.

Example:
  paatp top
  paatp top --control 10.0.0.1

Exit status: 0 ended by q, 1 the address or the terminal cannot be used, 2 it was called wrongly, 128 and a signal's \
number. An aggregator that does not answer is no reason to end: it is asked again every second.";

/// `paatp top`
#[derive(Clone, Debug, Args)]
pub struct Top {
    /// Where to look.
    #[command(flatten)]
    pub target: Target,
}

/// It cannot run here.
#[derive(Debug, Error)]
pub enum TopError {
    /// The address or the certificates.
    #[error(transparent)]
    Aggregator(#[from] JobError),
    /// No terminal.
    #[error("`paatp top` needs a terminal on standard input and output; `paatp status --watch` needs none")]
    NoTerminal,
    /// The terminal fails.
    #[error("the terminal fails")]
    Terminal(#[from] io::Error),
    /// Signals.
    #[error("cannot take over signals")]
    Signals(#[from] nix::Error),
}

/// Runs until a key or a signal ends it.
///
/// # Errors
/// If it cannot run here.
pub fn run(args: &Top) -> Result<ExitCode, TopError> {
    let eyes = Eyes::open(&args.target)?;
    if !(io::stdin().is_terminal() && io::stdout().is_terminal()) {
        return Err(TopError::NoTerminal);
    }
    let colours = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let mut app = App::new(&eyes.place(), colours);
    let signal = heed_signals()?;
    let (looks, wishes) = look_for_ever(eyes);
    // The hook puts the terminal right before a panic's message.
    let mut terminal = ratatui::try_init()?;
    let shown = show(&mut terminal, &mut app, &looks, &wishes, &signal);
    let restored = ratatui::try_restore();
    shown?;
    restored?;
    Ok(match signal.load(Ordering::Relaxed) {
        0 => ExitCode::SUCCESS,
        number => u8::try_from(SIGNAL_STATUS + number).unwrap_or(u8::MAX).into(),
    })
}

/// The signal that came, or 0. No thread is interrupted by one.
fn heed_signals() -> Result<Arc<AtomicI32>, nix::Error> {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        signals.add(signal);
    }
    signals.thread_block()?;
    let came = Arc::new(AtomicI32::new(0));
    let noted = came.clone();
    std::thread::spawn(move || {
        if let Ok(signal) = signals.wait() {
            noted.store(signal as i32, Ordering::Relaxed);
        }
    });
    Ok(came)
}

/// What is to be looked at besides the node: a job, from the sample that is known on.
type Wish = Past;

/// Looks once a second and whenever another job is wished for, on a thread of its own: an aggregator that does not answer
/// holds no key up.
fn look_for_ever(eyes: Eyes) -> (Receiver<Look>, Sender<Wish>) {
    let (sender, looks) = channel();
    let (wishes, wished) = channel::<Wish>();
    std::thread::spawn(move || {
        let mut past = Past::default();
        loop {
            let begin = Instant::now();
            let look = eyes.snapshot().and_then(|snapshot| {
                let known = snapshot.jobs.iter().any(|job| job.status.name == past.job());
                if known {
                    past.take(&eyes.series(past.job(), past.next())?);
                }
                Ok((snapshot, past.clone()))
            });
            if sender.send(look.map_err(|error| error.to_string())).is_err() {
                return;
            }
            match wished.recv_timeout(LOOK_INTERVAL.saturating_sub(begin.elapsed())) {
                Ok(wish) => past = wish,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    });
    (looks, wishes)
}

/// Draws what is new and does what keys say, until one of them or a signal ends it.
fn show(
    terminal: &mut DefaultTerminal,
    app: &mut App,
    looks: &Receiver<Look>,
    wishes: &Sender<Wish>,
    signal: &AtomicI32,
) -> Result<(), TopError> {
    let mut wished = String::new();
    while !app.is_over() && signal.load(Ordering::Relaxed) == 0 {
        loop {
            match looks.try_recv() {
                Ok(look) => app.take(look, Instant::now()),
                Err(TryRecvError::Empty) => break,
                // It ends only with its panic, whose message the hook has written.
                Err(TryRecvError::Disconnected) => {
                    return Err(io::Error::other("the thread that looks has ended").into());
                }
            }
        }
        if let Some(job) = app.selected().filter(|job| *job != wished) {
            wished = job.to_owned();
            let _ = wishes.send(Past::of(job));
        }
        terminal.draw(|frame| view::draw(frame, app, Instant::now()))?;
        if event::poll(KEY_WAIT)? {
            match event::read()? {
                Event::Key(key) if key.kind != KeyEventKind::Release => app.press(key),
                // Drawn anew in the next turn, whatever it was.
                _ => {}
            }
        }
    }
    Ok(())
}
