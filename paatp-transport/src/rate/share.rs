//! The pool's half of PA-ATP: how many places in the pool a chunk of each job may try, k.
//!
//! A job of many ranks holds a slot for longer than one of few, because it waits for more, and more of its ranks look for
//! one. Who finds slots is then a matter of numbers and not of need. With k the loader makes it a matter of need: of a
//! pool of which the part p is taken, a chunk finds a slot with probability 1 − pᵏ. It takes places from jobs whose
//! goodput is above the others' and gives them to those below, until the goodput of all jobs that the pool holds up is
//! equal. Pure: the daemon moves the numbers and knows the time.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::time::Duration;

use paatp_common::pool::K_MAX;

use super::epoch::average;

/// Weight of a tick in all averages, as the policy's for windows and gains.
const SHARE: f64 = 1.0 / 8.0;
/// Ticks between two changes of one job's k: about the time in which an average shows most of what the last one did.
const SETTLE: u32 = 8;
/// A job whose goodput is within this part of the mean is left alone. A step of k moves goodput by less than this part
/// but for the lowest ks, so most jobs come to rest. Ours.
const DEAD_BAND: f64 = 1.0 / 8.0;
/// A job that finds no slot more often than this for each chunk is held up by the pool. (A2TP ignores as many
/// collisions of each contribution.)
const CROWDED: f64 = super::a2tp::COLLISIONS_IGNORED;
/// A job with less than this part of the mean goodput of those that move is idle for the others' sake: one that computes,
/// or has only begun. Ours.
const IDLE: f64 = 1.0 / 64.0;

/// One job of the pool, as the tables count it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Job number.
    pub job: u16,
    /// A new one begins anew.
    pub generation: u32,
    /// Acknowledged by every rank: a serial number, as on the wire.
    pub min_ack: u32,
    /// Contributions that found no slot: counts round.
    pub crowded: u32,
}

/// What the policy remembers of a job.
#[derive(Clone, Copy, Debug)]
struct Tuned {
    last: Share,
    k: u8,
    /// Chunks a second that every rank has, averaged.
    goodput: f64,
    /// Contributions a second that found no slot, averaged.
    crowding: f64,
    /// Ticks since k changed.
    settled: u32,
}

/// The policy and its memory.
#[derive(Clone, Debug, Default)]
pub struct Shares {
    jobs: BTreeMap<u16, Tuned>,
}

impl Shares {
    /// One tick, `elapsed` after the last one: the k of each job from now on, in the jobs' order. Jobs that are not named
    /// any more are forgotten.
    pub fn tick(&mut self, elapsed: Duration, jobs: &[Share]) -> Vec<u8> {
        self.jobs.retain(|number, _| jobs.iter().any(|share| share.job == *number));
        for share in jobs {
            let job = self.jobs.entry(share.job).or_insert_with(|| Tuned::new(*share));
            if job.last.generation != share.generation {
                *job = Tuned::new(*share);
            }
            job.observe(elapsed, *share);
        }
        let fair = self.fair_goodput();
        let tune = |share: &Share| {
            let job = self.jobs.get_mut(&share.job)?;
            job.tune(fair);
            Some(job.k)
        };
        jobs.iter().filter_map(tune).collect()
    }

    /// The mean goodput of the jobs that the pool holds up: what each would have if it were shared equally. Jobs that the
    /// pool does not hold up are slow for reasons of their own, and nobody is slowed down for their sake.
    fn fair_goodput(&self) -> Option<f64> {
        let fastest = self.jobs.values().map(|job| job.goodput).fold(0.0, f64::max);
        let held_up = self.jobs.values().filter(|job| job.goodput > fastest * IDLE && job.is_held_up());
        let (sum, count) = held_up.fold((0.0, 0_u32), |(sum, count), job| (sum + job.goodput, count + 1));
        (count > 1 && sum > 0.0).then(|| sum / f64::from(count))
    }
}

impl Tuned {
    fn new(share: Share) -> Tuned {
        Tuned { last: share, k: K_MAX, goodput: 0.0, crowding: 0.0, settled: 0 }
    }

    /// Finds no slot, or would not without its few places.
    fn is_held_up(&self) -> bool {
        self.k < K_MAX || self.crowding > self.goodput * CROWDED
    }

    fn observe(&mut self, elapsed: Duration, share: Share) {
        let seconds = elapsed.as_secs_f64();
        if seconds <= 0.0 {
            return;
        }
        // Backwards only where CPUs undo each other's writes.
        let gained = |now: u32, before: u32| f64::from((now.wrapping_sub(before) as i32).max(0)) / seconds;
        self.goodput = average(self.goodput, gained(share.min_ack, self.last.min_ack), SHARE);
        self.crowding = average(self.crowding, gained(share.crowded, self.last.crowded), SHARE);
        self.last = share;
        self.settled = self.settled.saturating_add(1);
    }

    /// One place more or less, or none; all of them step by step where there is nobody to share with.
    fn tune(&mut self, fair: Option<f64>) {
        if self.settled < SETTLE {
            return;
        }
        let k = match fair.filter(|_| self.is_held_up()) {
            Some(fair) if self.goodput > fair * (1.0 + DEAD_BAND) => self.k.saturating_sub(1).max(1),
            Some(fair) if self.goodput >= fair * (1.0 - DEAD_BAND) => self.k,
            _ => self.k.saturating_add(1).min(K_MAX),
        };
        if k != self.k {
            (self.k, self.settled) = (k, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use proptest::prelude::*;

    const TICK: Duration = Duration::from_millis(5);

    /// A pool: jobs get slots by their weight and k, and all find too few.
    struct Plant {
        weights: Vec<f64>,
        done: Vec<f64>,
        crowded: Vec<f64>,
        shares: Shares,
        ks: Vec<u8>,
    }

    impl Plant {
        fn new(weights: &[f64]) -> Plant {
            let zeros = vec![0.0; weights.len()];
            Plant {
                weights: weights.to_vec(),
                done: zeros.clone(),
                crowded: zeros,
                shares: Shares::default(),
                ks: vec![K_MAX; weights.len()],
            }
        }

        /// Goodputs of this tick, as parts of the whole.
        fn tick(&mut self) -> Vec<f64> {
            let pulls: Vec<f64> = self.weights.iter().zip(&self.ks).map(|(w, k)| w * f64::from(*k)).collect();
            let all: f64 = pulls.iter().sum();
            let rates: Vec<f64> = pulls.iter().map(|pull| pull / all.max(1e-9)).collect();
            for (i, rate) in rates.iter().enumerate() {
                self.done[i] += rate * 1000.0;
                self.crowded[i] += if self.weights[i] > 0.0 { 200.0 } else { 0.0 };
            }
            let shares: Vec<Share> = (0..self.weights.len())
                .map(|i| Share {
                    job: i as u16,
                    generation: 1,
                    min_ack: self.done[i] as u32,
                    crowded: self.crowded[i] as u32,
                })
                .collect();
            self.ks = self.shares.tick(TICK, &shares);
            rates
        }
    }

    fn jain(shares: &[f64]) -> f64 {
        let sum: f64 = shares.iter().sum();
        sum * sum / (shares.len() as f64 * shares.iter().map(|share| share * share).sum::<f64>())
    }

    #[test]
    fn goodput_becomes_equal_and_stays() {
        for weights in [[1.0, 1.0, 1.0], [1.0, 2.0, 4.0], [1.0, 4.0, 4.0], [3.0, 4.0, 6.0]] {
            let mut plant = Plant::new(&weights);
            let before = jain(&plant.tick());
            (0..1000).for_each(|_| drop(plant.tick()));
            let rested = plant.ks.clone();
            for _ in 0..2000 {
                let after = jain(&plant.tick());
                assert!(after >= before.min(0.95), "{weights:?} {:?}: {before} {after}", plant.ks);
                let moved = plant.ks.iter().zip(&rested).map(|(k, rested)| k.abs_diff(*rested)).max();
                assert!(moved.is_some_and(|moved| moved <= 1), "{weights:?}: {rested:?} {:?}", plant.ks);
            }
        }
    }

    #[test]
    fn a_job_alone_and_one_that_finds_slots_have_all_places() {
        let mut plant = Plant::new(&[1.0]);
        (0..500).for_each(|_| drop(plant.tick()));
        assert_eq!(plant.ks, [K_MAX]);
        // The other one leaves: the places come back.
        let mut plant = Plant::new(&[1.0, 5.0]);
        (0..1000).for_each(|_| drop(plant.tick()));
        assert!(plant.ks[1] < K_MAX, "{:?}", plant.ks);
        plant.weights[0] = 0.0;
        (0..1000).for_each(|_| drop(plant.tick()));
        assert_eq!(plant.ks[1], K_MAX);
    }

    /// One that computes slows nobody down.
    #[test]
    fn idle_jobs_and_jobs_that_want_less_are_ignored() {
        let mut shares = Shares::default();
        let mut ks = Vec::new();
        for tick in 0..2000_u32 {
            let share = |job, min_ack, crowded| Share { job, generation: 1, min_ack, crowded };
            let busy = [share(0, tick * 100, tick * 50), share(1, tick * 100, tick * 50)];
            // The third has a tenth of the goodput and never finds the pool full; the fourth does nothing.
            let others = [share(2, tick * 10, 0), share(3, 0, 0)];
            ks = shares.tick(TICK, &[busy[0], busy[1], others[0], others[1]]);
        }
        assert_eq!(ks, [K_MAX; 4]);
    }

    #[test]
    fn a_new_generation_begins_with_all_places() {
        let mut plant = Plant::new(&[1.0, 8.0]);
        (0..1000).for_each(|_| drop(plant.tick()));
        assert!(plant.ks[1] < K_MAX);
        let share = |job, generation| Share { job, generation, min_ack: 0, crowded: 0 };
        assert_eq!(plant.shares.tick(TICK, &[share(0, 1), share(1, 2)])[1], K_MAX);
        assert_eq!(plant.shares.tick(TICK, &[]), []);
    }

    proptest! {
        /// Whatever is counted: from 1 to K_MAX, one step at a time, and the same for the same counts.
        #[test]
        fn k_stays_in_its_bounds(
            ticks in proptest::collection::vec(
                (0..100_000u64, proptest::collection::vec((any::<u32>(), any::<u32>(), 0..2u32), 3)), 1..200,
            ),
        ) {
            let run = || {
                let mut shares = Shares::default();
                let mut all: Vec<Vec<u8>> = Vec::new();
                for (micros, jobs) in &ticks {
                    let jobs: Vec<Share> = (0..).zip(jobs).map(|(job, (min_ack, crowded, generation))| {
                        Share { job, generation: *generation, min_ack: *min_ack, crowded: *crowded }
                    }).collect();
                    all.push(shares.tick(Duration::from_micros(*micros), &jobs));
                }
                all
            };
            let ks = run();
            prop_assert!(ks.iter().flatten().all(|k| (1..=K_MAX).contains(k)));
            for pair in ks.windows(2) {
                prop_assert!(pair[0].iter().zip(&pair[1]).all(|(a, b)| a.abs_diff(*b) <= 1 || *b == K_MAX));
            }
            prop_assert_eq!(ks, run());
        }
    }
}
