//! The space between new contributions.

use core::time::Duration;

use crate::time::Time;

/// Contributions that a worker may make up for when it was woken late: timers are coarser than the intervals. Ours.
const BURST: u64 = 8;
const NANOS_PER_MICRO: u64 = 1_000;

/// A token bucket, in nanoseconds: one contribution each interval, and up to [`BURST`] saved.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pacer {
    /// When the next contribution is due.
    due: u64,
    /// A contribution waits for nothing but this time.
    pub waiting: Option<Time>,
}

impl Pacer {
    /// Whether a contribution may go out now; notes until when it waits if not.
    pub fn lets(&mut self, now: Time, interval: Option<Duration>) -> bool {
        let early = interval.is_some() && nanos(now) < self.due;
        self.waiting = early.then_some(Time(self.due.div_ceil(NANOS_PER_MICRO)));
        !early
    }

    /// A contribution went out.
    pub fn count(&mut self, now: Time, interval: Option<Duration>) {
        let Some(interval) = interval else { return };
        let interval = u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX);
        let earliest = nanos(now).saturating_sub(interval.saturating_mul(BURST));
        self.due = self.due.max(earliest).saturating_add(interval);
    }
}

const fn nanos(time: Time) -> u64 {
    time.0.saturating_mul(NANOS_PER_MICRO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_kept_though_timers_are_coarse() {
        let (mut pacer, interval) = (Pacer::default(), Some(Duration::from_nanos(300)));
        let mut sent = 0;
        for micros in 1_000..2_000 {
            while pacer.lets(Time(micros), interval) {
                pacer.count(Time(micros), interval);
                sent += 1;
            }
            assert_eq!(pacer.waiting, Some(Time(micros + 1)));
        }
        // 1 ms of 300 ns, and the burst.
        assert!((3_333..3_345).contains(&sent), "{sent}");
    }

    #[test]
    fn a_long_pause_is_not_made_up_for() {
        let (mut pacer, interval) = (Pacer::default(), Some(Duration::from_micros(10)));
        let mut burst = |at| {
            core::iter::from_fn(|| {
                let lets = pacer.lets(Time(at), interval);
                pacer.count(Time(at), interval.filter(|_| lets));
                lets.then_some(())
            })
            .count()
        };
        assert_eq!([burst(1_000), burst(1_000), burst(1_010), burst(9_000)], [9, 0, 1, 9]);
    }

    #[test]
    fn without_a_pace_nothing_waits() {
        let mut pacer = Pacer::default();
        pacer.count(Time(5), Some(Duration::MAX));
        assert!(!pacer.lets(Time(6), Some(Duration::MAX)));
        assert!(pacer.lets(Time(6), None) && pacer.waiting.is_none());
    }
}
