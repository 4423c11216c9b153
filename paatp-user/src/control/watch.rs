//! Which ranks hold the others up: a pure decision over what the data plane counts.
//!
//! A rank that waits for others stands still as well, so silence alone says nothing. A rank is in the way if it stands
//! lowest and somebody is ahead of it: with its contributions, or with its acknowledgements when the ring is full
//! because of them. Between operations everybody stands at the same place and nobody is in the way, however long that
//! takes.
//!
//! Only time in which somebody looked counts. A daemon that was stopped, or frozen together with the ranks, must not take
//! its own pause for theirs.

use std::time::{Duration, Instant};

use paatp_common::seq::Seq;

use crate::engine::{ProgressSnapshot, RankProgress};

/// What the time since the last look counts at most: the timeout divided by this. So nobody is lost before this many
/// looks found them in the way, without their having moved.
const LEAST_LOOKS: u32 = 4;

/// Whose progress counts, and how much of it there may be.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// Ranks that count.
    pub expected: u64,
    /// Slots of the ring.
    pub slots: u32,
    /// Longest time in the way.
    pub timeout: Duration,
}

#[derive(Clone, Copy, Debug, Default)]
struct Watched {
    seen: RankProgress,
    in_the_way_since: Option<Instant>,
}

/// What was seen of one generation.
#[derive(Clone, Debug, Default)]
pub struct Watch {
    ranks: Vec<Watched>,
    looked: Option<Instant>,
}

impl Watch {
    /// Takes in where the ranks stand; returns those that have been in the way for the whole timeout.
    pub fn observe(&mut self, now: Instant, terms: Terms, progress: &ProgressSnapshot) -> Vec<u8> {
        self.ranks.resize(progress.ranks.len(), Watched::default());
        let gap = self.looked.replace(now).map_or(Duration::ZERO, |last| now.duration_since(last));
        let unseen = gap.saturating_sub(terms.timeout / LEAST_LOOKS);
        let mut dead = Vec::new();
        for ((rank, seen), watched) in (0u8..).zip(&progress.ranks).zip(&mut self.ranks) {
            let moved = watched.seen != *seen;
            watched.seen = *seen;
            watched.in_the_way_since = watched.in_the_way_since.map(|since| since + unseen);
            if !is_in_the_way(usize::from(rank), terms, &progress.ranks) {
                watched.in_the_way_since = None;
            } else if moved || watched.in_the_way_since.is_none() {
                watched.in_the_way_since = Some(now);
            } else if watched.in_the_way_since.is_some_and(|since| now.duration_since(since) >= terms.timeout)
            {
                dead.push(rank);
            }
        }
        dead
    }

    /// Since when a rank has been in the way without moving.
    #[must_use]
    pub fn in_the_way_since(&self, rank: u8) -> Option<Instant> {
        self.ranks.get(usize::from(rank))?.in_the_way_since
    }

    /// Ranks were lost: the time of all others begins anew, for what they waited for may have been just those.
    pub fn begin_anew(&mut self) {
        self.ranks.iter_mut().for_each(|watched| watched.in_the_way_since = None);
    }
}

fn is_in_the_way(rank: usize, terms: Terms, ranks: &[RankProgress]) -> bool {
    let counts = |rank: usize| rank < 64 && terms.expected >> rank & 1 == 1;
    let Some(own) = ranks.get(rank).filter(|_| counts(rank)) else { return false };
    let others = || ranks.iter().enumerate().filter(|(other, _)| counts(*other)).map(|(_, other)| other);
    let ahead = |other: &RankProgress| Seq(own.contributed).is_before(Seq(other.contributed));
    let behind = |other: &RankProgress| Seq(other.contributed).is_before(Seq(own.contributed));
    if others().any(ahead) && !others().any(behind) {
        return true;
    }
    let least = !others().any(|other| Seq(other.acknowledged).is_before(Seq(own.acknowledged)));
    let fills = |other: &RankProgress| {
        let distance = Seq(other.contributed).since(Seq(own.acknowledged));
        distance >= terms.slots && !Seq(other.contributed).is_before(Seq(own.acknowledged))
    };
    least && others().any(fills)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NOBODY: Vec<u8> = Vec::new();

    const TERMS: Terms = Terms { expected: 0b111, slots: 8, timeout: Duration::from_secs(10) };

    fn at(ranks: &[(u32, u32)]) -> ProgressSnapshot {
        let rank = |(acknowledged, contributed): &(u32, u32)| RankProgress {
            acknowledged: *acknowledged,
            contributed: *contributed,
        };
        ProgressSnapshot { ranks: ranks.iter().map(rank).collect(), min_ack: 0 }
    }

    struct Case {
        watch: Watch,
        start: Instant,
        seen: Option<(u64, ProgressSnapshot)>,
    }

    impl Case {
        fn new() -> Case {
            Case { watch: Watch::default(), start: Instant::now(), seen: None }
        }

        fn at(&self, seconds: u64) -> Instant {
            self.start + Duration::from_secs(seconds)
        }

        /// Looks every second until the ranks stand there, and nobody is found before. Whoever is found is taken out.
        fn see(&mut self, seconds: u64, terms: Terms, ranks: &[(u32, u32)]) -> Vec<u8> {
            if let Some((last, before)) = self.seen.take() {
                for second in last + 1..seconds {
                    assert_eq!(self.watch.observe(self.at(second), terms, &before), NOBODY);
                }
            }
            self.seen = Some((seconds, at(ranks)));
            self.look(seconds, terms, ranks)
        }

        /// Looks once, however long nobody did.
        fn look(&mut self, seconds: u64, terms: Terms, ranks: &[(u32, u32)]) -> Vec<u8> {
            let now = self.at(seconds);
            let dead = self.watch.observe(now, terms, &at(ranks));
            // As long as nothing was done about them, they are found again.
            assert_eq!(self.watch.observe(now, terms, &at(ranks)), dead);
            if !dead.is_empty() {
                self.watch.begin_anew();
            }
            dead
        }
    }

    #[test]
    fn a_rank_that_holds_the_others_up_is_named_after_the_timeout() {
        let mut case = Case::new();
        let stuck = [(3, 7), (3, 3), (3, 7)];
        assert_eq!(case.see(0, TERMS, &[(3, 3); 3]), NOBODY);
        assert_eq!(case.see(100, TERMS, &stuck), NOBODY);
        assert_eq!(case.see(109, TERMS, &stuck), NOBODY);
        assert_eq!(case.see(110, TERMS, &stuck), vec![1]);
        // It is out: the others are not in each other's way.
        let shrunk = Terms { expected: 0b101, ..TERMS };
        assert_eq!(case.see(200, shrunk, &[(7, 7), (3, 3), (7, 7)]), NOBODY);
    }

    #[test]
    fn pauses_between_operations_are_nobodys_fault() {
        let mut case = Case::new();
        for seconds in 0..100 {
            assert_eq!(case.see(seconds, TERMS, &[(9, 9); 3]), NOBODY);
        }
        // The time counts from when somebody goes on.
        assert_eq!(case.see(100, TERMS, &[(9, 9), (9, 9), (9, 10)]), NOBODY);
        assert_eq!(case.see(109, TERMS, &[(9, 9), (9, 9), (9, 10)]), NOBODY);
    }

    #[test]
    fn a_slow_rank_that_moves_is_alive() {
        let mut case = Case::new();
        for step in 0..20 {
            assert_eq!(
                case.see(u64::from(step) * 9, TERMS, &[(step, step + 5), (step, step), (step, step + 5)]),
                NOBODY
            );
        }
    }

    /// The daemon stood still, and perhaps everybody: whoever was lowest at that moment is not lost because of it.
    #[test]
    fn a_pause_of_the_daemon_is_nobodys_fault() {
        let mut case = Case::new();
        let stuck = [(3, 7), (3, 3), (3, 7)];
        assert_eq!(case.look(0, TERMS, &stuck), NOBODY);
        assert_eq!(case.look(1000, TERMS, &stuck), NOBODY);
        // Rank 1 has moved by the next look.
        assert_eq!(case.look(1001, TERMS, &[(3, 8), (3, 5), (3, 8)]), NOBODY);
        // From then on it stands, and the looks are as they should be: what was seen of it counts.
        assert_eq!(case.see(1002, TERMS, &[(3, 8), (3, 5), (3, 8)]), NOBODY);
        assert_eq!(case.see(1010, TERMS, &[(3, 8), (3, 5), (3, 8)]), NOBODY);
        assert_eq!(case.see(1011, TERMS, &[(3, 8), (3, 5), (3, 8)]), vec![1]);
    }

    /// Looks that come late again and again still find it.
    #[test]
    fn rare_looks_find_it_later() {
        let mut case = Case::new();
        let stuck = [(3, 7), (3, 3), (3, 7)];
        for look in 0..4 {
            assert_eq!(case.look(look * 100, TERMS, &stuck), NOBODY, "{look}");
        }
        assert_eq!(case.look(400, TERMS, &stuck), vec![1]);
    }

    #[test]
    fn missing_acknowledgements_count_when_the_ring_is_full() {
        let mut case = Case::new();
        let idle = [(0, 7), (7, 7), (7, 7)];
        assert_eq!((case.see(0, TERMS, &idle), case.see(50, TERMS, &idle)), (NOBODY, NOBODY));
        let full = [(0, 8), (8, 8), (8, 8)];
        assert_eq!((case.see(60, TERMS, &full), case.see(70, TERMS, &full)), (NOBODY, vec![0]));
    }

    #[test]
    fn only_the_lowest_are_blamed_and_the_next_get_their_time() {
        let mut case = Case::new();
        let stuck = [(3, 7), (3, 3), (3, 5)];
        assert_eq!((case.see(0, TERMS, &stuck), case.see(10, TERMS, &stuck)), (NOBODY, vec![1]));
        let shrunk = Terms { expected: 0b101, ..TERMS };
        assert_eq!((case.see(11, shrunk, &stuck), case.see(20, shrunk, &stuck)), (NOBODY, NOBODY));
        assert_eq!(case.see(21, shrunk, &stuck), vec![2]);
    }

    #[test]
    fn the_wrap_of_seq_is_no_step_back() {
        let mut case = Case::new();
        let stuck = [(u32::MAX - 1, 2), (u32::MAX - 1, u32::MAX), (u32::MAX - 1, 2)];
        assert_eq!((case.see(0, TERMS, &stuck), case.see(10, TERMS, &stuck)), (NOBODY, vec![1]));
    }

    proptest! {
        /// Never everybody, never a rank that does not count, never one that stands at the front.
        #[test]
        fn whoever_is_ahead_is_never_blamed(expected in any::<u64>(), ranks in proptest::collection::vec((0..20u32, 0..8u32), 1..10)) {
            let ranks: Vec<(u32, u32)> = ranks.into_iter().map(|(ack, more)| (ack, ack + more)).collect();
            let terms = Terms { expected, ..TERMS };
            let mut case = Case::new();
            case.see(0, terms, &ranks);
            let dead = case.see(10, terms, &ranks);
            let counting = |rank: usize| expected >> rank & 1 == 1;
            let highest = ranks.iter().enumerate().filter(|(rank, _)| counting(*rank)).map(|(_, rank)| rank.1).max();
            for rank in &dead {
                let (ack, contributed) = ranks[usize::from(*rank)];
                prop_assert!(counting(usize::from(*rank)));
                prop_assert!(Some(contributed) < highest || highest >= Some(ack + terms.slots));
            }
        }
    }
}
