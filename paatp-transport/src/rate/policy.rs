//! The loader's half of PA-ATP: from what the tables count, what answers are to be stamped with.
//!
//! Workers see one round trip and one job. The loader sees all jobs of its node, every few milliseconds. So it grants
//! each job's *asynchronous window* (how far its leaders may run ahead), and *gains*: between jobs that congest the same
//! node, so that their goodput becomes equal whatever their number of ranks; between the ranks of a job, so that those that
//! stay behind for longer than a round trip catch up. Pure: the daemon moves the numbers and knows the time.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::time::Duration;

use paatp_common::limits::MAX_RANKS;
use paatp_common::progress::RankRecord;

use super::epoch::{average, ratio};

/// Weight of a tick in all averages. Ours: with ticks of some milliseconds, tens of them.
const SHARE: f64 = 1.0 / 8.0;
/// A job with more marked requests than this for each contribution is congested. Ours.
const CONGESTED: f64 = 0.01;
/// A job with more refusals as BUSY than this for each contribution runs too far ahead (A2TP ignores as many collisions).
const CROWDED: f64 = super::a2tp::COLLISIONS_IGNORED;
/// The granted window is at least this part of W: less would not fill the path. Ours.
const LEAST_WINDOW: f64 = 1.0 / 4.0;
/// Part of W that the granted window recovers by in a tick. Ours.
const WINDOW_STEP: f64 = 1.0 / 16.0;
/// How much of a job's relative deficit of goodput goes into its gain in each tick: an integrator, so that the deficit
/// ends. Ours.
const JOB_STEP: f64 = 8.0;
/// Largest gain for a job, in 1/128. Ours: between a quarter and seven quarters of the increase.
const JOB_MOST: f64 = 96.0;
/// Gain of a rank that is behind the middle of its job by a whole asynchronous window, in 1/128. Ours.
const RANK_MOST: f64 = 31.0;

/// One rank, as the tables count it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankCounts {
    /// Its progress: a serial number, as on the wire.
    pub progress: u32,
    /// Contributions since the last tick that were acknowledged in order: what its progress gained.
    pub contributions: u32,
    /// Requests of all kinds since then that met congestion.
    pub marks: u32,
    /// Contributions since then that were refused as BUSY, each sending of one counted.
    pub busy: u32,
}

/// One job, as the tables count it.
#[derive(Clone, Copy, Debug)]
pub struct JobCounts<'a> {
    /// Job number.
    pub job: u16,
    /// A new one begins anew.
    pub generation: u32,
    /// W.
    pub window: u16,
    /// The ranks that count, at most [`MAX_RANKS`], in order.
    pub ranks: &'a [RankCounts],
}

/// What a count has gained. Nothing where it stepped back: CPUs may undo each other's counts.
fn gained(now: u32, before: u32) -> u32 {
    (now.wrapping_sub(before) as i32).max(0) as u32
}

/// Turns what the tables count for ever into what happened since the last tick.
#[derive(Clone, Debug, Default)]
pub struct Meter {
    last: BTreeMap<(u16, u32), Vec<RankRecord>>,
}

impl Meter {
    /// What the ranks of a job did since this was asked last; at first, since their generation began.
    pub fn read(&mut self, job: u16, generation: u32, ranks: &[RankRecord]) -> Vec<RankCounts> {
        self.last.retain(|(number, incarnation), _| *number != job || *incarnation == generation);
        let last = self.last.entry((job, generation)).or_default();
        last.resize(ranks.len(), RankRecord::default());
        let since = |(last, now): (&mut RankRecord, &RankRecord)| {
            let before = core::mem::replace(last, *now);
            RankCounts {
                progress: now.contributed.0,
                contributions: gained(now.contributed.0, before.contributed.0),
                marks: gained(now.marks, before.marks),
                busy: gained(now.busy, before.busy),
            }
        };
        last.iter_mut().zip(ranks).map(since).collect()
    }

    /// Forgets a job that is gone.
    pub fn forget(&mut self, job: u16) {
        self.last.retain(|(number, _), _| *number != job);
    }
}

/// What one job's answers are to be stamped with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Job number.
    pub job: u16,
    /// Asynchronous window, 1 to W.
    pub window: u16,
    /// Gain of the job, in 1/128.
    pub gain: i8,
    /// Gain of each rank of `ranks`, the job's included.
    pub gains: [i8; MAX_RANKS],
}

/// What the policy remembers of a job.
#[derive(Clone, Copy, Debug)]
struct Job {
    generation: u32,
    /// p_min at the last tick.
    lowest: u32,
    window: f64,
    gain: f64,
    /// Chunks a second that all ranks have contributed, averaged.
    goodput: f64,
    marks: f64,
    busy: f64,
    /// How far each rank is behind the job's middle, in asynchronous windows, averaged.
    behind: [f64; MAX_RANKS],
}

/// The policy and its memory.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    jobs: BTreeMap<u16, Job>,
}

impl Policy {
    /// One tick, `elapsed` after the last one: what to stamp from now on, in the jobs' order. Jobs that are not named any
    /// more are forgotten.
    pub fn tick(&mut self, elapsed: Duration, jobs: &[JobCounts<'_>]) -> Vec<Grant> {
        self.jobs.retain(|number, _| jobs.iter().any(|counts| counts.job == *number));
        for counts in jobs {
            let job = self.jobs.entry(counts.job).or_insert_with(|| Job::new(counts));
            if job.generation != counts.generation {
                *job = Job::new(counts);
            }
            job.observe(elapsed, counts);
        }
        let fair = self.fair_goodput();
        let grant = |counts: &JobCounts<'_>| {
            let job = self.jobs.get_mut(&counts.job)?;
            job.adjust_gain(fair);
            job.adjust_window(counts);
            Some(job.grant(counts))
        };
        jobs.iter().filter_map(grant).collect()
    }

    /// The mean goodput of the jobs that congest the node: what each would have if it were shared equally.
    fn fair_goodput(&self) -> Option<f64> {
        let (sum, count) = self
            .jobs
            .values()
            .filter(|job| job.is_congested())
            .fold((0.0, 0_u32), |(sum, count), job| (sum + job.goodput, count + 1));
        (count > 1 && sum > 0.0).then(|| sum / f64::from(count))
    }
}

/// How far serial number `a` is past `b`; 0 if it is before.
fn past(a: u32, b: u32) -> f64 {
    f64::from((a.wrapping_sub(b) as i32).max(0))
}

/// The lowest and the highest progress. (0, 0) without ranks.
fn ends(ranks: &[RankCounts]) -> (u32, u32) {
    let first = ranks.first().map_or(0, |rank| rank.progress);
    ranks.iter().fold((first, first), |(low, high), rank| {
        let progress = rank.progress;
        (
            if past(low, progress) > 0.0 { progress } else { low },
            if past(progress, high) > 0.0 { progress } else { high },
        )
    })
}

impl Job {
    fn new(counts: &JobCounts<'_>) -> Job {
        Job {
            generation: counts.generation,
            lowest: ends(counts.ranks).0,
            window: f64::from(counts.window.max(1)),
            gain: 0.0,
            goodput: 0.0,
            marks: 0.0,
            busy: 0.0,
            behind: [0.0; MAX_RANKS],
        }
    }

    fn is_congested(&self) -> bool {
        self.marks > CONGESTED
    }

    fn observe(&mut self, elapsed: Duration, counts: &JobCounts<'_>) {
        let sum = |count: fn(&RankCounts) -> u32| {
            counts.ranks.iter().fold(0_u32, |sum, rank| sum.saturating_add(count(rank)))
        };
        let contributions = sum(|rank| rank.contributions);
        self.marks = average(self.marks, ratio(sum(|rank| rank.marks), contributions), SHARE);
        self.busy = average(self.busy, ratio(sum(|rank| rank.busy), contributions), SHARE);
        let (low, high) = ends(counts.ranks);
        if !elapsed.is_zero() {
            let rate = past(low, self.lowest) / elapsed.as_secs_f64();
            self.goodput = average(self.goodput, rate, SHARE);
            self.lowest = low;
        }
        let middle = past(high, low) / 2.0;
        for (behind, rank) in self.behind.iter_mut().zip(counts.ranks) {
            let windows = ((past(high, rank.progress) - middle) / self.window).clamp(-1.0, 1.0);
            *behind = average(*behind, windows, SHARE);
        }
    }

    /// Moves the gain until the goodput is the fair one; without competition it fades.
    fn adjust_gain(&mut self, fair: Option<f64>) {
        self.gain = match fair.filter(|_| self.is_congested()) {
            Some(fair) => self.gain + JOB_STEP * ((fair - self.goodput) / fair).clamp(-1.0, 1.0),
            None => average(self.gain, 0.0, SHARE),
        }
        .clamp(-JOB_MOST, JOB_MOST);
    }

    /// Leaders stop earlier if the ring is crowded, or if what they send congests a path while others are behind.
    fn adjust_window(&mut self, counts: &JobCounts<'_>) {
        let most = f64::from(counts.window.max(1));
        let (low, high) = ends(counts.ranks);
        let spread = (past(high, low) / self.window).min(1.0);
        let excess = if self.busy > CROWDED { self.busy } else { 0.0 };
        let congestion = if self.is_congested() { self.marks * spread } else { 0.0 };
        let degree = excess.max(congestion);
        self.window =
            if degree > 0.0 { self.window * (1.0 - degree / 2.0) } else { self.window + most * WINDOW_STEP };
        self.window = self.window.clamp((most * LEAST_WINDOW).max(1.0), most);
    }

    fn grant(&self, counts: &JobCounts<'_>) -> Grant {
        let mut gains = [0; MAX_RANKS];
        for ((gain, behind), _) in gains.iter_mut().zip(&self.behind).zip(counts.ranks) {
            *gain = (self.gain + behind * RANK_MOST) as i8;
        }
        Grant { job: counts.job, window: self.window as u16, gain: self.gain as i8, gains }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TICK: Duration = Duration::from_millis(5);

    fn counts(job: u16, ranks: &[RankCounts]) -> JobCounts<'_> {
        JobCounts { job, generation: 1, window: 64, ranks }
    }

    fn rank(progress: u32, contributions: u32, marks: u32, busy: u32) -> RankCounts {
        RankCounts { progress, contributions, marks, busy }
    }

    #[test]
    fn level_ranks_on_free_paths_get_all_and_no_gain() {
        let mut policy = Policy::default();
        for tick in 0..20 {
            let ranks = [rank(tick * 100, 100, 0, 0); 4];
            let grants = policy.tick(TICK, &[counts(7, &ranks)]);
            assert_eq!(grants, [Grant { job: 7, window: 64, gain: 0, gains: [0; MAX_RANKS] }]);
        }
    }

    #[test]
    fn who_stays_behind_gains_also_across_the_wrap() {
        let mut policy = Policy::default();
        let mut last = None;
        for tick in 0..40_u32 {
            let lowest = (tick * 100).wrapping_sub(2000);
            let ranks = [lowest + 64, lowest + 32, lowest].map(|progress| rank(progress, 100, 0, 0));
            last = policy.tick(TICK, &[counts(0, &ranks)]).pop();
        }
        let Grant { gains, gain, window, .. } = last.unwrap();
        assert!(gains[0] <= -14 && gains[1] == 0 && gains[2] >= 14, "{gains:?}");
        assert_eq!((gain, window, gains[3]), (0, 64, 0));
        let goodput = policy.jobs[&0].goodput;
        assert!((19_000.0..20_001.0).contains(&goodput), "100 chunks in 5 ms: {goodput}");
    }

    #[test]
    fn leaders_are_held_back_where_they_hurt_and_let_go_again() {
        let mut policy = Policy::default();
        let mut window =
            |ranks: &[RankCounts]| (0..60).fold(0, |_, _| policy.tick(TICK, &[counts(0, ranks)])[0].window);
        assert_eq!(window(&[rank(0, 100, 50, 0), rank(0, 100, 50, 0)]), 64, "congested, but nobody leads");
        assert_eq!(window(&[rank(64, 100, 50, 0), rank(0, 100, 50, 0)]), 16, "a quarter of W at least");
        assert_eq!(window(&[rank(64, 100, 0, 0), rank(0, 100, 0, 0)]), 64);
        assert_eq!(window(&[rank(0, 100, 0, 40), rank(0, 100, 0, 0)]), 16, "crowded");
        assert_eq!(window(&[rank(0, 100, 0, 5), rank(0, 100, 0, 5)]), 64, "a little crowded");
    }

    /// Two jobs share a path whose rate goes by weights of 1 to 4 times what the gains make of them: it ends up in equal
    /// parts, and the gains fade when one job is gone.
    #[test]
    fn goodput_becomes_equal_between_jobs() {
        let (mut policy, mut done, mut gains) = (Policy::default(), [0.0; 2], [0_i8; 2]);
        let mut rates = [0.0; 2];
        for _ in 0..400 {
            let weights = [1.0, 4.0];
            let share = |j: usize| weights[j] * (1.0 + f64::from(gains[j]) / 128.0);
            rates = [0, 1].map(|j| 500.0 * share(j) / (share(0) + share(1)));
            done = [0, 1].map(|j| done[j] + rates[j]);
            let ranks = [0, 1].map(|j: usize| [rank(done[j] as u32, 100, 10, 0); 8]);
            let grants = policy.tick(TICK, &[counts(3, &ranks[0][..2]), counts(9, &ranks[1])]);
            gains = [grants[0].gain, grants[1].gain];
        }
        assert!((0.9..1.1).contains(&(rates[0] / rates[1])), "{rates:?} with gains {gains:?}");
        let ranks = [rank(done[0] as u32, 100, 10, 0); 2];
        let grants = (0..60).map(|_| policy.tick(TICK, &[counts(3, &ranks)])).last().unwrap();
        assert_eq!((grants.len(), grants[0].gain), (1, 0));
    }

    #[test]
    fn a_new_generation_begins_anew() {
        let mut policy = Policy::default();
        let crowded = [rank(5, 100, 0, 90); 2];
        (0..60).for_each(|_| drop(policy.tick(TICK, &[counts(0, &crowded)])));
        let fresh = [rank(0, 0, 0, 0); 2];
        let grant = policy.tick(TICK, &[JobCounts { generation: 2, ..counts(0, &fresh) }]);
        assert_eq!(grant[0].window, 64);
    }

    proptest! {
        /// Whatever is counted: windows between 1 and W, gains within their limits, and the same for the same counts.
        #[test]
        fn grants_stay_in_their_bounds(
            window in 1..2000u16,
            ticks in proptest::collection::vec(
                (0..100_000u64, proptest::collection::vec((any::<u32>(), any::<u32>(), any::<u32>(), any::<u32>()), 0..9)),
                1..30,
            ),
        ) {
            let run = || {
                let mut policy = Policy::default();
                let mut all = Vec::new();
                for (micros, ranks) in &ticks {
                    let ranks: Vec<_> = ranks.iter().map(|r| rank(r.0, r.1, r.2, r.3)).collect();
                    let jobs = [1, 2].map(|job| JobCounts { window, ..counts(job, &ranks) });
                    all.extend(policy.tick(Duration::from_micros(*micros), &jobs));
                }
                all
            };
            let grants = run();
            prop_assert_eq!(grants.len(), 2 * ticks.len());
            for grant in &grants {
                prop_assert!((1..=window).contains(&grant.window));
                prop_assert!(grant.gain.abs() <= JOB_MOST as i8);
            }
            prop_assert_eq!(grants, run());
        }
    }
}
