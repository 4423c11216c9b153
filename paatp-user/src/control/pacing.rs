//! The loader's half of PA-ATP: moves the numbers between the data plane's tables and the policy
//! ([`paatp_transport::rate::policy`]), which decides. Every few milliseconds it reads how far each rank is, and how often
//! its packets were marked or refused, and writes the window and the gains that answers are stamped with.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use paatp_common::job::JobEntry;
use paatp_common::limits::MAX_RANKS;
use paatp_common::progress::RankRecord;
use paatp_transport::rate::policy::{Grant, JobCounts, Meter, Policy, RankCounts};
use paatp_transport::rate::share::{Share, Shares};

/// Time between two ticks. As in the simulator, where the policy's constants were chosen.
pub const PACE_INTERVAL: Duration = Duration::from_millis(5);

/// The policy, with what it was told and said last.
#[derive(Debug, Default)]
pub struct Pacing {
    policy: Policy,
    meter: Meter,
    last: Option<Instant>,
    shares: Shares,
    last_share: Option<Instant>,
    /// What each job's answers are stamped with: generation and grant.
    stamped: BTreeMap<u16, (u32, Grant)>,
}

impl Pacing {
    /// What to stamp anew, by the records of all jobs that run.
    pub fn tick(&mut self, now: Instant, jobs: &[(u16, JobEntry, Vec<RankRecord>)]) -> Vec<Grant> {
        let elapsed =
            self.last.replace(now).map_or(PACE_INTERVAL, |last| now.saturating_duration_since(last));
        let runs = |number: u16| jobs.iter().any(|(job, ..)| *job == number);
        self.stamped.keys().filter(|number| !runs(**number)).for_each(|number| self.meter.forget(*number));
        self.stamped.retain(|number, _| runs(*number));
        let mut ranks: Vec<Vec<RankCounts>> = Vec::with_capacity(jobs.len());
        for (number, entry, records) in jobs {
            let counts = self.meter.read(*number, entry.generation, records);
            // A lost rank stands where it died, and holds nobody up any more.
            ranks.push(
                counts
                    .into_iter()
                    .zip(members(entry))
                    .filter_map(|(c, is_one)| is_one.then_some(c))
                    .collect(),
            );
        }
        let mut counts = Vec::with_capacity(jobs.len());
        for ((job, entry, _), ranks) in jobs.iter().zip(&ranks) {
            counts.push(JobCounts { job: *job, generation: entry.generation, window: entry.window, ranks });
        }
        let mut changed = Vec::new();
        for (mut grant, (number, entry, _)) in self.policy.tick(elapsed, &counts).into_iter().zip(jobs) {
            let mut gains = grant.gains.into_iter();
            grant.gains = [0; MAX_RANKS];
            for (gain, is_member) in grant.gains.iter_mut().zip(members(entry)) {
                *gain = if is_member { gains.next().unwrap_or(0) } else { 0 };
            }
            let stamp = (entry.generation, grant);
            if self.stamped.insert(*number, stamp) != Some(stamp) {
                changed.push(grant);
            }
        }
        changed
    }

    /// How many places in the pool each job's chunks may take from now on.
    pub fn share_out(&mut self, now: Instant, shares: &[Share]) -> Vec<(u16, u8)> {
        let last = self.last_share.replace(now);
        let elapsed = last.map_or(PACE_INTERVAL, |last| now.saturating_duration_since(last));
        let places = self.shares.tick(elapsed, shares);
        shares.iter().map(|share| share.job).zip(places).collect()
    }

    /// A grant could not be written: it is to be written again.
    pub fn unstamp(&mut self, job: u16) {
        self.stamped.remove(&job);
    }
}

/// Which ranks of a job count.
fn members(entry: &JobEntry) -> impl Iterator<Item = bool> {
    let expected = entry.expected;
    (0..MAX_RANKS).map(move |rank| expected >> rank & 1 == 1)
}

#[cfg(test)]
mod tests {
    use paatp_common::Seq;

    use super::*;

    fn records(contributed: [u32; 2], marks: u32) -> Vec<RankRecord> {
        let record =
            |contributed| RankRecord { contributed: Seq(contributed), marks, ..RankRecord::default() };
        contributed.map(record).to_vec()
    }

    #[test]
    fn only_what_changes_is_stamped() {
        let entry = JobEntry {
            generation: 7,
            window: 64,
            slots: 128,
            world: 2,
            expected: 0b11,
            ..JobEntry::default()
        };
        let (mut pacing, start) = (Pacing::default(), Instant::now());
        let mut tick = |at: u32, entry: JobEntry, contributed| {
            let jobs = [(3, entry, records(contributed, 0))];
            pacing.tick(start + PACE_INTERVAL * at, &jobs)
        };
        let first = tick(0, entry, [10, 10]);
        assert_eq!(first.iter().map(|grant| (grant.job, grant.window)).collect::<Vec<_>>(), [(3, 64)]);
        assert!(tick(1, entry, [20, 20]).is_empty(), "nothing changed");
        let behind: Vec<Grant> = (2..60).flat_map(|at| tick(at, entry, [at * 100, at * 100 - 60])).collect();
        let last = behind.last().unwrap_or_else(|| panic!("a rank stays behind, and no gain changes"));
        assert!(last.gains[1] > last.gains[0], "{:?}", &last.gains[..2]);
        // A new generation's tables are blank.
        assert_eq!(tick(60, JobEntry { generation: 8, ..entry }, [0, 0]).len(), 1);
    }

    #[test]
    fn a_job_that_came_back_is_stamped_again() {
        let entry = JobEntry {
            generation: 7,
            window: 64,
            slots: 128,
            world: 2,
            expected: 0b11,
            ..JobEntry::default()
        };
        let (mut pacing, now) = (Pacing::default(), Instant::now());
        let jobs = [(3, entry, records([1, 1], 0))];
        assert_eq!(pacing.tick(now, &jobs).len(), 1);
        assert!(pacing.tick(now + PACE_INTERVAL, &[]).is_empty());
        assert_eq!(pacing.tick(now + PACE_INTERVAL * 2, &jobs).len(), 1);
        pacing.unstamp(3);
        assert_eq!(pacing.tick(now + PACE_INTERVAL * 3, &jobs).len(), 1);
    }

    #[test]
    fn a_lost_rank_paces_nobody() {
        let entry = JobEntry { generation: 7, window: 64, world: 3, expected: 0b101, ..JobEntry::default() };
        let (mut pacing, start) = (Pacing::default(), Instant::now());
        let mut last = None;
        for at in 0..200 {
            let record = |contributed| RankRecord { contributed: Seq(contributed), ..RankRecord::default() };
            let jobs = [(3, entry, vec![record(at * 50), record(3), record(at * 50)])];
            last = pacing.tick(start + PACE_INTERVAL * at, &jobs).pop().or(last);
        }
        let last = last.unwrap_or_else(|| panic!("nothing was stamped"));
        assert_eq!((last.window, &last.gains[..3]), (64, &[0, 0, 0][..]));
    }
}
