//! Totals, times and words, over tables in memory.

use super::*;
use crate::config::{JobConfig, Jobs};
use crate::control::membership::{Entropy, Membership};
use crate::control::protocol::{JoinRequest, PROTOCOL};
use paatp_common::job::{JobEntry, QUORUM_ALL};
use paatp_common::slot::Contribution;
use paatp_common::wire::{Chunk, ElementType, Operation};
use proptest::prelude::*;

/// Tables in memory.
#[derive(Clone, Default)]
struct Fake(Arc<Mutex<Tables>>);

#[derive(Default)]
struct Tables {
    records: Vec<RankRecord>,
    slots: Vec<Slot>,
    fail: bool,
    reads: u32,
}

impl Fake {
    fn edit<T>(&self, edit: impl FnOnce(&mut Tables) -> T) -> T {
        edit(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn stand(&self, ranks: &[(u32, u32)]) {
        let record = |(acked, contributed): &(u32, u32)| RankRecord {
            acked: Seq(*acked),
            contributed: Seq(*contributed),
            marks: contributed / 2,
            busy: contributed / 4,
        };
        self.edit(|tables| tables.records = ranks.iter().map(record).collect());
    }

    /// These ranks contributed to a chunk.
    fn contribute(&self, entry: &JobEntry, seq: u32, bits: u64) {
        let rules = entry.rules();
        self.edit(|tables| {
            tables.slots.resize(entry.slots as usize, Slot::default());
            let slot = &mut tables.slots[(seq % entry.slots) as usize];
            for rank in (0..64u8).filter(|rank| bits >> rank & 1 == 1) {
                let contribution = Contribution {
                    generation: entry.generation,
                    seq: Seq(seq),
                    bits: 1 << rank,
                    attempt: 0,
                    chunk: Chunk::new(Operation::Sum, ElementType::F32, 32, 0),
                    next_exponent: 0,
                    has_payload: true,
                    rank,
                    non_finite: false,
                };
                if !slot.holds(entry.generation, Seq(seq)) {
                    slot.begin(true, entry.policy, &contribution);
                }
                slot.commit(&contribution, 0);
                slot.settle(rules);
            }
        });
    }
}

impl View for Fake {
    fn counters(&self) -> Result<Counters, EngineError> {
        self.edit(
            |tables| {
                if tables.fail { Err(EngineError::Gone("eth0".into())) } else { Ok(Counters::default()) }
            },
        )
    }

    fn records(&self, _: u16, entry: &JobEntry) -> Result<Vec<RankRecord>, EngineError> {
        self.edit(|tables| {
            if tables.fail {
                return Err(EngineError::Gone("eth0".into()));
            }
            let mut records = tables.records.clone();
            records.resize(entry.world.into(), RankRecord::default());
            Ok(records)
        })
    }

    fn slot(&self, _: u16, entry: &JobEntry, seq: Seq) -> Result<Slot, EngineError> {
        self.edit(|tables| {
            tables.reads += 1;
            Ok(tables.slots.get((seq.0 & (entry.slots - 1)) as usize).copied().unwrap_or_default())
        })
    }
}

/// A node with job `train`, whose clock is ours.
struct Case {
    fake: Fake,
    telemetry: Telemetry,
    membership: Membership,
    start: Instant,
}

impl Case {
    fn new(world: u32, quorum: Option<u32>) -> Case {
        let job = JobConfig { quorum, slots: 16, window: 8, ..JobConfig::new("train", world) };
        let jobs = Jobs::new(vec![job]).unwrap_or_else(|error| panic!("{error}"));
        let fake = Fake::default();
        let telemetry = Telemetry::new(Box::new(fake.clone()), Identity::default());
        Case { fake, telemetry, membership: Membership::new(&jobs, 20545, 1), start: Instant::now() }
    }

    fn join(&mut self, rank: u32, generation: u32) {
        let world = u32::from(self.facts().jobs[0].status.world);
        let request = JoinRequest {
            protocol: PROTOCOL,
            rank,
            world,
            wait_seconds: 60.0,
            layout: None,
            attempt: None,
            below: None,
            members: None,
        };
        let entropy = Entropy { generation, nonce: 1 };
        let address = std::net::IpAddr::from([10, 0, 0, rank as u8]);
        let joined = self.membership.join(self.start, "train", &request, address, entropy);
        let joined = joined.unwrap_or_else(|error| panic!("{error}"));
        if let Some(formation) = joined.formation {
            self.telemetry.begin(&formation.name, formation.number, &formation.entry);
        }
    }

    /// All ranks join.
    fn form(&mut self, generation: u32) -> JobEntry {
        let world = u32::from(self.facts().jobs[0].status.world);
        (0..world).for_each(|rank| self.join(rank, generation));
        self.facts().jobs[0].entry
    }

    fn facts(&self) -> Facts {
        self.membership.facts()
    }

    fn observe(&self, millis: u64) {
        self.telemetry.observe(self.start + Duration::from_millis(millis), &self.facts().jobs);
    }

    /// The job as of now, whatever the clock.
    fn job(&self) -> JobSnapshot {
        let snapshot = self.telemetry.snapshot(&self.facts());
        assert!(snapshot.problems.is_empty(), "{:?}", snapshot.problems);
        snapshot.jobs[0].clone()
    }

    /// The job at a time.
    fn at(&self, millis: u64) -> JobSnapshot {
        let (facts, now) = (self.facts(), self.start + Duration::from_millis(millis));
        let (readings, _) = read::read(&self.fake, &facts.jobs, true);
        let mut ledger = self.telemetry.ledger();
        ledger.observe(now, &facts.jobs, &readings);
        let ledger = ledger.job(0).unwrap_or_else(|| panic!("no ledger"));
        job_snapshot(now, &facts.jobs[0], readings.first(), ledger)
    }
}

#[test]
fn totals_go_on_in_the_next_generation_and_over_the_wrap() {
    let mut case = Case::new(2, None);
    case.form(7);
    case.fake.stand(&[(4, 9), (3, 8)]);
    let job = case.job();
    let totals = |job: &JobSnapshot| {
        job.ranks
            .iter()
            .map(|rank| (rank.contributed, rank.acknowledged, rank.marks, rank.busy))
            .collect::<Vec<_>>()
    };
    assert_eq!(totals(&job), [(9, 4, 4, 2), (8, 3, 4, 2)]);
    assert_eq!((job.completed_chunks, job.lag_chunks), (3, 1));
    // What came after the last look is read when the next generation is written.
    case.fake.stand(&[(20, 20), (20, 20)]);
    case.form(8);
    case.fake.stand(&[(0, 0), (0, 0)]);
    assert_eq!(totals(&case.job()), [(20, 20, 10, 5), (20, 20, 10, 5)]);
    case.fake.stand(&[(1, 5), (2, 2)]);
    let job = case.job();
    assert_eq!((totals(&job), job.completed_chunks), (vec![(25, 21, 12, 6), (22, 22, 11, 5)], 21));
    for far in [1 << 30, 2 << 30, 3 << 30, u32::MAX, 4] {
        case.fake.stand(&[(far, far), (far, far)]);
        case.observe(0);
    }
    assert_eq!(case.job().ranks[0].contributed, 20 + (1 << 32) + 4);
}

#[test]
fn a_generation_that_ran_before_counts_from_where_it_stands() {
    let mut case = Case::new(2, None);
    case.form(7);
    case.telemetry = Telemetry::new(Box::new(case.fake.clone()), Identity::default());
    case.fake.stand(&[(3 << 30, 3 << 30), (5, 5)]);
    let job = case.job();
    assert_eq!((job.ranks[0].contributed, job.ranks[1].contributed), (3 << 30, 5));
}

proptest! {
    /// Whatever is read in whatever order, and however often a generation ends: no total goes down, and none runs ahead of
    /// what was really moved.
    #[test]
    fn totals_never_go_down(steps in proptest::collection::vec((0..3u32, 0..50u32, 0..4u32), 1..60)) {
        let mut case = Case::new(2, None);
        let (mut generation, mut position, mut moved, mut last) = (1, 0u32, 0u64, 0u64);
        case.form(generation);
        for (what, step, late) in steps {
            match what {
                0 => {
                    generation += 1;
                    case.form(generation);
                    position = 0;
                    case.fake.stand(&[(0, 0), (0, 0)]);
                }
                _ => {
                    position += step;
                    moved += u64::from(step);
                    case.fake.stand(&[(position, position), (position, position)]);
                }
            }
            if late > 0 {
                case.observe(0);
            }
            let total = case.job().ranks[1].contributed;
            prop_assert!(total >= last && total <= moved);
            last = total;
            // Somebody who read earlier says so only now.
            let old = position.saturating_sub(late);
            case.fake.stand(&[(old, old), (old, old)]);
            case.observe(0);
            prop_assert_eq!(case.job().ranks[1].contributed, total);
            case.fake.stand(&[(position, position), (position, position)]);
        }
        prop_assert_eq!(case.job().ranks[0].contributed, moved);
    }
}

#[test]
fn the_oldest_open_slot_names_who_is_missing_and_since_when() {
    let mut case = Case::new(4, None);
    let entry = case.form(7);
    case.fake.stand(&[(3, 7), (3, 7), (3, 3), (3, 7)]);
    (0..3).for_each(|seq| case.fake.contribute(&entry, seq, 0b1111));
    (3..7).for_each(|seq| case.fake.contribute(&entry, seq, 0b1011));
    let first = case.at(1000);
    let open = first.oldest_open_slot.unwrap_or_else(|| panic!("none is open"));
    assert_eq!((open.chunk, open.contributors, open.missing_ranks), (3, vec![0, 1, 3], vec![2]));
    assert_eq!((open.age_seconds, first.stall), (0.0, None));
    assert_eq!((first.slots_in_use, first.lag_chunks, first.ranks[2].lag_chunks), (Some(4), 4, 4));
    let later = case.at(4000);
    let stall = later.stall.unwrap_or_else(|| panic!("nobody is held up"));
    assert_eq!(stall.sentence, "job `train` waits for contributions of rank 2 for 3 s, 4 chunks behind");
    assert_eq!((stall.missing_ranks, stall.seconds, stall.chunks_behind), (vec![2], 3.0, 4));
    let in_the_way: Vec<_> = later.ranks.iter().map(|rank| rank.in_the_way_seconds).collect();
    assert_eq!(in_the_way, [None, None, Some(3.0), None]);
    // It moves, and the next chunk's time begins.
    case.fake.contribute(&entry, 3, 0b0100);
    case.fake.stand(&[(4, 7), (4, 7), (4, 4), (4, 7)]);
    let moved = case.at(4250);
    assert_eq!(moved.oldest_open_slot.map(|open| (open.chunk, open.age_seconds)), Some((4, 0.0)));
    assert_eq!(moved.stall, None);
}

/// A rank whose contribution got through and whose acknowledgement of that did not: the open slot is a later one.
#[test]
fn complete_slots_are_passed_over() {
    let mut case = Case::new(2, None);
    let entry = case.form(7);
    case.fake.stand(&[(5, 8), (5, 5)]);
    (5..7).for_each(|seq| case.fake.contribute(&entry, seq, 0b11));
    case.fake.contribute(&entry, 7, 0b01);
    assert_eq!(case.job().oldest_open_slot.map(|open| (open.chunk, open.missing_ranks)), Some((7, vec![1])));
}

#[test]
fn a_full_ring_names_whoever_does_not_acknowledge() {
    let mut case = Case::new(2, None);
    let entry = case.form(7);
    case.fake.stand(&[(16, 16), (0, 16)]);
    (0..16).for_each(|seq| case.fake.contribute(&entry, seq, 0b11));
    case.at(0);
    let stalled = case.at(5000);
    assert_eq!((stalled.oldest_open_slot, stalled.slots_in_use), (None, Some(16)));
    let sentence = stalled.stall.map(|stall| stall.sentence);
    assert_eq!(
        sentence.as_deref(),
        Some("job `train` waits for acknowledgements of rank 1 for 5 s, 0 chunks behind")
    );
}

#[test]
fn a_quorum_waits_for_nobody_it_can_do_without() {
    let mut case = Case::new(3, Some(2));
    let entry = case.form(7);
    assert_ne!(entry.policy.after().quorum, QUORUM_ALL);
    case.fake.stand(&[(6, 6), (6, 6), (0, 0)]);
    (0..6).for_each(|seq| case.fake.contribute(&entry, seq, 0b011));
    assert_eq!(case.job().oldest_open_slot, None);
    case.fake.contribute(&entry, 6, 0b001);
    assert_eq!(
        case.job().oldest_open_slot.map(|open| (open.chunk, open.missing_ranks)),
        Some((6, vec![1, 2]))
    );
}

#[test]
fn ranks_that_do_not_join_are_named() {
    let mut case = Case::new(3, None);
    assert_eq!(case.at(0).ranks[0].state, RankState::Absent);
    case.join(1, 7);
    case.at(0);
    let forming = case.at(2500);
    let states: Vec<_> = forming.ranks.iter().map(|rank| rank.state).collect();
    assert_eq!(states, [RankState::Missing, RankState::Waiting, RankState::Missing]);
    assert_eq!(forming.ranks[1].address.as_deref(), Some("10.0.0.1"));
    let sentence = forming.stall.map(|stall| stall.sentence);
    let expected = "job `train` waits for ranks 0 and 2 to join for 2.5 s; 1 of 3 have joined";
    assert_eq!(sentence.as_deref(), Some(expected));
    case.join(0, 7);
    case.join(2, 7);
    let running = case.at(9000);
    assert!(running.ranks.iter().all(|rank| rank.state == RankState::Member));
    assert_eq!((running.forming_seconds, running.stall), (None, None));
}

/// Between operations everybody stands at the same place, with results that nobody has acknowledged yet.
#[test]
fn pauses_are_no_stalls() {
    let mut case = Case::new(2, None);
    let entry = case.form(7);
    case.fake.stand(&[(0, 4), (0, 4)]);
    (0..4).for_each(|seq| case.fake.contribute(&entry, seq, 0b11));
    case.at(0);
    let idle = case.at(600_000);
    assert_eq!((idle.oldest_open_slot, idle.stall, idle.slots_in_use), (None, None, Some(4)));
}

#[test]
fn what_cannot_be_read_is_said() {
    let mut case = Case::new(2, None);
    case.form(7);
    case.fake.stand(&[(4, 9), (3, 8)]);
    case.observe(0);
    case.fake.edit(|tables| tables.fail = true);
    let snapshot = case.telemetry.snapshot(&case.facts());
    assert_eq!(snapshot.problems.len(), 2, "{:?}", snapshot.problems);
    assert!(snapshot.problems[0].starts_with("job `train`: interface `eth0` is gone"));
    let job = &snapshot.jobs[0];
    assert_eq!((job.ranks[0].contributed, job.slots_in_use, snapshot.slots_in_use), (9, None, None));
}

/// A job that was deleted is forgotten; one of the same name begins at zero.
#[test]
fn totals_end_with_the_job() {
    let mut case = Case::new(1, None);
    case.form(7);
    case.fake.stand(&[(4, 9)]);
    assert_eq!(case.job().ranks[0].contributed, 9);
    let deletion = case.membership.plan_deletion("train", 5).unwrap_or_else(|error| panic!("{error}"));
    case.membership.delete(&deletion, case.start);
    assert!(case.telemetry.snapshot(&case.facts()).jobs.is_empty());
    assert!(case.telemetry.ledger().job(0).is_none());
}

#[test]
fn the_core_loop_keeps_the_last_minutes() {
    let mut case = Case::new(1, None);
    case.form(7);
    for turn in 0..10u32 {
        case.fake.stand(&[(turn, turn * 2)]);
        case.observe(u64::from(turn) * 250 + 1000);
    }
    let facts = case.facts();
    let series = case.telemetry.series(&facts.jobs[0], 0);
    assert_eq!((series.job.as_str(), series.next, series.ranks.len()), ("train", 3, 1));
    assert_eq!(series.ranks[0].contributed, [0, 8, 8]);
    assert_eq!(series.ranks[0].acknowledged, [0, 4, 4]);
    assert!(series.uptime_seconds.windows(2).all(|pair| pair[1] - pair[0] == 1.0), "{series:?}");
}

/// However large the rings are, a look reads so many slots and no more.
#[test]
fn a_look_reads_a_bounded_number_of_slots() {
    let jobs = (0..64).map(|number| JobConfig {
        slots: 4096,
        window: 2048,
        ..JobConfig::new(&format!("j{number}"), 1)
    });
    let jobs = Jobs::new(jobs.collect()).unwrap_or_else(|error| panic!("{error}"));
    let mut membership = Membership::new(&jobs, 20545, 1);
    for number in 0..64u32 {
        let request = JoinRequest {
            protocol: PROTOCOL,
            rank: 0,
            world: 1,
            wait_seconds: 1.0,
            layout: None,
            attempt: None,
            below: None,
            members: None,
        };
        let entropy = Entropy { generation: 1 + number, nonce: 1 };
        let joined =
            membership.join(Instant::now(), &format!("j{number}"), &request, [10, 0, 0, 1].into(), entropy);
        assert!(joined.is_ok_and(|joined| joined.formation.is_some()));
    }
    let fake = Fake::default();
    fake.stand(&[(0, 2048)]);
    let telemetry = Telemetry::new(Box::new(fake.clone()), Identity::default());
    let snapshot = telemetry.snapshot(&membership.facts());
    let counted = snapshot.jobs.iter().filter(|job| job.slots_in_use.is_some()).count();
    assert_eq!((counted, snapshot.slots_in_use), (8, None));
    let reads = fake.edit(|tables| tables.reads);
    assert!(reads <= read::MAX_SLOTS_OF_A_LOOK + 64, "{reads}");
}
