//! Time as the caller tells it: this crate reads no clock.

use core::time::Duration;

/// Microseconds since an arbitrary origin, the same for all calls to one [`Worker`](crate::Worker).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// The time `span` later.
    #[must_use]
    pub fn plus(self, span: Duration) -> Time {
        Time(self.0.saturating_add(u64::try_from(span.as_micros()).unwrap_or(u64::MAX)))
    }

    /// The span from `earlier` to `self`; zero if that lies ahead.
    #[must_use]
    pub const fn since(self, earlier: Time) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

/// A delay that doubles from turn to turn, and when the next turn is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    /// Next turn.
    pub at: Time,
    delay: Duration,
}

impl Backoff {
    /// First turn after `delay`.
    pub fn new(now: Time, delay: Duration) -> Backoff {
        Backoff { at: now.plus(delay), delay }
    }

    /// First turn now, the second after `delay`.
    pub const fn at_once(now: Time, delay: Duration) -> Backoff {
        Backoff { at: now, delay }
    }

    /// A turn was taken: the next comes after the delay, which doubles up to `most`.
    pub fn step(&mut self, now: Time, most: Duration) {
        self.at = now.plus(self.delay);
        self.delay = (self.delay * 2).min(most);
    }

    /// As [`Backoff::step`], but the delay grows by only one part in so many.
    pub fn step_by(&mut self, now: Time, parts: u32, most: Duration) {
        self.at = now.plus(self.delay);
        self.delay = (self.delay + self.delay / parts).min(most);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_saturate() {
        assert_eq!(Time(5).plus(Duration::MAX), Time(u64::MAX));
        assert_eq!(Time(5).since(Time(9)), Duration::ZERO);
        assert_eq!(Time(9).since(Time(5)), Duration::from_micros(4));
    }

    #[test]
    fn a_backoff_doubles_up_to_its_limit() {
        let ms = Duration::from_millis;
        let mut backoff = Backoff::new(Time(0), ms(1));
        let mut turns = [0; 4];
        for turn in &mut turns {
            let now = backoff.at;
            *turn = now.0;
            backoff.step(now, ms(3));
        }
        assert_eq!(turns, [1000, 2000, 4000, 7000]);
    }
}
