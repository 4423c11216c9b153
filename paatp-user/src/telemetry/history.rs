//! The last minutes of each job: how many chunks each rank moved in each second.

use std::collections::VecDeque;
use std::time::Duration;

use paatp_common::limits::MAX_RANKS;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Time between two samples.
pub const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

/// Samples kept of each job: five minutes. All 64 jobs with 64 ranks each take 10 MiB.
pub const SAMPLES: usize = 300;

/// Samples that a rate is the mean of: five seconds, so that it can be read while it moves.
const RATE_SAMPLES: usize = 5;

/// Chunks that a rank moved between two samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Contributions.
    pub contributed: u32,
    /// Acknowledgements.
    pub acknowledged: u32,
}

/// Samples of one job.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// Number of the next sample.
    next: u64,
    /// Milliseconds between the start of the daemon and each sample.
    at: VecDeque<u64>,
    /// Steps of each rank; as many as `at` has.
    ranks: Vec<VecDeque<Step>>,
    /// Where each rank stood at the last sample.
    last: Vec<(u64, u64)>,
}

impl History {
    /// Takes in where the ranks stand: contributed and acknowledged, since the job was created.
    pub fn sample(&mut self, at: Duration, totals: &[(u64, u64)]) {
        let totals = totals.get(..MAX_RANKS).unwrap_or(totals);
        // Ranks never become fewer or more: a job's world is fixed.
        self.ranks.resize_with(totals.len(), || VecDeque::with_capacity(SAMPLES));
        self.last.resize(totals.len(), (0, 0));
        if self.at.len() == SAMPLES {
            self.at.pop_front();
            for steps in &mut self.ranks {
                steps.pop_front();
            }
        }
        self.at.push_back(u64::try_from(at.as_millis()).unwrap_or(u64::MAX));
        let step = |now: u64, last: u64| u32::try_from(now.saturating_sub(last)).unwrap_or(u32::MAX);
        for ((steps, last), now) in self.ranks.iter_mut().zip(&mut self.last).zip(totals) {
            steps.push_back(Step { contributed: step(now.0, last.0), acknowledged: step(now.1, last.1) });
            *last = *now;
        }
        self.next += 1;
    }

    /// When the last sample was taken, since the start of the daemon.
    #[must_use]
    pub fn last_at(&self) -> Option<Duration> {
        self.at.back().map(|at| Duration::from_millis(*at))
    }

    /// Contributions and acknowledgements of each rank, in chunks a second, over the last five seconds.
    pub fn rates(&self) -> impl Iterator<Item = (f64, f64)> {
        // The first sample of all counts from zero, over a time that nobody knows.
        let steps = self.at.len().saturating_sub(1).min(RATE_SAMPLES);
        let moment = |back: usize| self.at.iter().rev().nth(back).copied().unwrap_or(0);
        let seconds = moment(0).saturating_sub(moment(steps)) as f64 / 1e3;
        let rate = move |chunks: u64| if seconds > 0.0 { chunks as f64 / seconds } else { 0.0 };
        self.ranks.iter().map(move |all| {
            let last = || all.iter().rev().take(steps);
            let contributed = last().map(|step| u64::from(step.contributed)).sum();
            let acknowledged = last().map(|step| u64::from(step.acknowledged)).sum();
            (rate(contributed), rate(acknowledged))
        })
    }

    /// The samples from number `since` on, as far as they are still kept.
    #[must_use]
    pub fn series(&self, job: &str, lanes: u16, since: u64) -> Series {
        let oldest = self.next - self.at.len() as u64;
        let first = since.clamp(oldest, self.next);
        // At most `SAMPLES`, checked by the clamp.
        let skip = (first - oldest) as usize;
        let ranks = (0u8..).zip(&self.ranks).map(|(rank, steps)| RankSeries {
            rank,
            contributed: steps.iter().skip(skip).map(|step| step.contributed).collect(),
            acknowledged: steps.iter().skip(skip).map(|step| step.acknowledged).collect(),
        });
        Series {
            schema_version: super::snapshot::SCHEMA_VERSION,
            job: job.into(),
            lanes,
            first,
            next: self.next,
            uptime_seconds: self.at.iter().skip(skip).map(|at| *at as f64 / 1e3).collect(),
            ranks: ranks.collect(),
        }
    }
}

/// Body of `GET /v1/history`: one number for each sample, about one second apart.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Series {
    /// Version of this format, as that of `GET /v1/status`.
    pub schema_version: u32,
    /// The job.
    pub job: String,
    /// Most lanes of its chunks, four bytes each.
    pub lanes: u16,
    /// Number of the first sample here.
    pub first: u64,
    /// Number of the next sample, for `since`.
    pub next: u64,
    /// When each sample was taken, in seconds since the aggregator's start.
    pub uptime_seconds: Vec<f64>,
    /// By rank.
    pub ranks: Vec<RankSeries>,
}

/// What one rank did between each sample and the one before.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RankSeries {
    /// Its rank.
    pub rank: u8,
    /// Chunks contributed.
    pub contributed: Vec<u32>,
    /// Results acknowledged.
    pub acknowledged: Vec<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_steps_and_the_oldest_make_room() {
        let mut history = History::default();
        for second in 0..=SAMPLES as u64 {
            history.sample(SAMPLE_INTERVAL * second as u32, &[(10 + second * 3, second), (second, 0)]);
        }
        let all = history.series("j", 352, 0);
        assert_eq!((all.first, all.next, all.uptime_seconds.len()), (1, 301, SAMPLES));
        assert_eq!((all.uptime_seconds[0], all.uptime_seconds[SAMPLES - 1]), (1.0, 300.0));
        assert!(all.ranks[0].contributed.iter().all(|step| *step == 3), "{:?}", all.ranks[0]);
        assert!(all.ranks[1].acknowledged.iter().all(|step| *step == 0));
        assert!(all.ranks.iter().all(|rank| rank.contributed.len() == SAMPLES));
        // What somebody who asks again gets.
        let new = history.series("j", 352, 299);
        assert_eq!((new.first, new.ranks[0].contributed.as_slice()), (299, &[3, 3][..]));
        let none = history.series("j", 352, u64::MAX);
        assert_eq!((none.first, none.next, none.uptime_seconds.len()), (301, 301, 0));
    }

    #[test]
    fn rates_are_means_of_the_last_seconds() {
        let mut history = History::default();
        assert_eq!(history.rates().count(), 0);
        history.sample(Duration::from_secs(1), &[(1000, 900), (0, 0)]);
        assert_eq!(history.rates().collect::<Vec<_>>(), [(0.0, 0.0); 2], "one sample has no length");
        for (second, total) in [(2, 1100), (4, 1400)] {
            history.sample(Duration::from_secs(second), &[(total, total - 100), (0, 6)]);
        }
        let rates: Vec<_> = history.rates().collect();
        assert_eq!(rates, [(400.0 / 3.0, 400.0 / 3.0), (0.0, 2.0)]);
        (5..=10).for_each(|second| history.sample(Duration::from_secs(second), &[(1400, 1300), (0, 6)]));
        assert_eq!(history.rates().collect::<Vec<_>>(), [(0.0, 0.0); 2], "forgotten after five samples");
    }

    #[test]
    fn the_first_sample_counts_from_zero_and_steps_saturate() {
        let mut history = History::default();
        history.sample(Duration::ZERO, &[(7, 5)]);
        history.sample(SAMPLE_INTERVAL, &[(1 << 40, 4)]);
        let series = history.series("j", 32, 0);
        assert_eq!(series.ranks[0].contributed, [7, u32::MAX]);
        assert_eq!(series.ranks[0].acknowledged, [5, 0]);
    }

    #[test]
    fn memory_is_bounded() {
        assert_eq!(size_of::<Step>(), 8);
        let mut history = History::default();
        for second in 0..10_000u32 {
            history.sample(SAMPLE_INTERVAL * second, &[(0, 0); 70]);
        }
        assert_eq!((history.ranks.len(), history.at.len()), (MAX_RANKS, SAMPLES));
        assert!(history.ranks.iter().all(|steps| steps.capacity() <= 2 * SAMPLES));
    }
}
