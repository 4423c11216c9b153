//! The last minutes of a job, made of the answers to several questions.

use std::collections::VecDeque;

use crate::telemetry::history::{SAMPLES, Series};

/// Samples of one job.
#[derive(Clone, Debug, Default)]
pub struct Past {
    job: String,
    next: u64,
    times: VecDeque<f64>,
    steps: Vec<VecDeque<u32>>,
}

impl Past {
    /// Of a job, of which nothing is known.
    #[must_use]
    pub fn of(job: &str) -> Past {
        Past { job: job.into(), ..Past::default() }
    }

    /// Whose it is.
    #[must_use]
    pub fn job(&self) -> &str {
        &self.job
    }

    /// From which sample on something is to be asked for.
    #[must_use]
    pub const fn next(&self) -> u64 {
        self.next
    }

    /// Takes an answer in. What does not follow what is known replaces it.
    pub fn take(&mut self, series: &Series) {
        let follows = series.first == self.next && self.steps.len() == series.ranks.len();
        let later = series.uptime_seconds.first().zip(self.times.back()).is_none_or(|(new, old)| new > old);
        if !(follows && later) {
            self.times.clear();
            self.steps = vec![VecDeque::new(); series.ranks.len()];
        }
        self.next = series.next;
        self.times.extend(&series.uptime_seconds);
        for (steps, rank) in self.steps.iter_mut().zip(&series.ranks) {
            steps.extend(&rank.contributed);
        }
        while self.times.len() > SAMPLES {
            self.times.pop_front();
            for steps in &mut self.steps {
                steps.pop_front();
            }
        }
    }

    /// Chunks a second that a rank contributed, the newest last. The first sample counts over a time that nobody knows.
    #[must_use]
    pub fn rates(&self, rank: u8) -> Vec<f64> {
        let Some(steps) = self.steps.get(usize::from(rank)) else { return Vec::new() };
        let lengths =
            self.times.iter().zip(self.times.iter().skip(1)).map(|(from, to)| (to - from).max(1e-3));
        lengths.zip(steps.iter().skip(1)).map(|(seconds, step)| f64::from(*step) / seconds).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::history::RankSeries;

    fn series(first: u64, times: &[f64], steps: &[u32]) -> Series {
        let rank = RankSeries { rank: 0, contributed: steps.into(), acknowledged: steps.into() };
        let next = first + steps.len() as u64;
        Series { first, next, uptime_seconds: times.into(), ranks: vec![rank], ..Series::default() }
    }

    #[test]
    fn answers_are_joined_and_what_does_not_follow_begins_anew() {
        let mut past = Past::of("j");
        past.take(&series(0, &[1.0, 2.0], &[99, 10]));
        assert_eq!((past.rates(0), past.next()), (vec![10.0], 2));
        past.take(&series(2, &[4.0], &[30]));
        assert_eq!(past.rates(0), [10.0, 15.0]);
        past.take(&series(3, &[], &[]));
        assert_eq!(past.rates(0), [10.0, 15.0]);
        // Another process, which by chance stands at the same sample.
        past.take(&series(3, &[2.5, 3.5], &[1, 7]));
        assert_eq!(past.rates(0), [7.0]);
        past.take(&series(40, &[50.0, 51.0], &[1, 8]));
        assert_eq!((past.rates(0), past.rates(1), past.next()), (vec![8.0], vec![], 42));
        for second in 42..1000u64 {
            past.take(&series(second, &[second as f64 + 10.0], &[5]));
        }
        assert_eq!(past.rates(0).len(), SAMPLES - 1);
    }
}
