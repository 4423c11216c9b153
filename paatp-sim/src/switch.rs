//! The switch in front of the aggregator that adds: `paatp_common::switch` over ordinary memory, and an auditor that knows
//! whose contributions really came by.

use paatp_common::Seq;
use paatp_common::job::Address;
use paatp_common::lanes::SlotBlock;
use paatp_common::limits::{LANES_PER_BLOCK, MAX_JOBS};
use paatp_common::pool::K_MAX;
use paatp_common::switch::{
    Cell, Count, MAX_SWITCH_BLOCKS, Outcome, Passing, Reached, Side, Switch, SwitchJob, places,
};
use paatp_common::wire::{Header, flags};

use crate::node::{Sender, Violation, address, generation};
use crate::scenario::{JobSpec, SwitchSpec};
use crate::units::Nanos;

/// A job as the control plane installs it.
#[derive(Debug)]
struct Installed {
    local: u64,
    reach: u32,
    k: u8,
    granted: u16,
    addresses: Vec<Address>,
    /// Contributions that found no slot: what the control plane tunes by.
    crowded: u32,
}

/// Tables and memory of the switch.
#[derive(Debug)]
pub struct Adder {
    /// By job number; a job of one rank is not installed, as there is nothing to add.
    jobs: Vec<Option<Installed>>,
    reached: Vec<Reached>,
    cells: Vec<Cell>,
    lanes: Vec<SlotBlock>,
    blocks: usize,
    counts: [u64; Count::COUNT],
    patience: u64,
    /// Ranks whose contributions came in since a slot began, by slot.
    truth: Vec<u64>,
}

/// What a packet met, as far as it needs to be told to the switch and the auditor.
#[derive(Clone, Copy, Debug)]
pub struct Passage {
    /// Who sent the request, or gets the answer.
    pub peer: Sender,
    /// It is an answer, from the aggregator's side.
    pub is_answer: bool,
    /// It is marked.
    pub congested: bool,
    /// The time.
    pub now: Nanos,
}

impl Adder {
    /// A switch with all jobs in its tables.
    #[must_use]
    pub fn new(specs: &[JobSpec], spec: &SwitchSpec) -> Adder {
        let blocks = specs.iter().map(|job| usize::from(job.lanes) / LANES_PER_BLOCK).max().unwrap_or(1);
        let (slots, blocks) = (spec.table() as usize, blocks.min(MAX_SWITCH_BLOCKS));
        let install = |(number, job): (u16, &JobSpec)| {
            (job.world > 1).then(|| Installed {
                local: job.all_ranks(),
                reach: job.slots,
                k: spec.k.unwrap_or(K_MAX),
                granted: 0,
                addresses: (0..job.world).map(|rank| address(number, rank)).collect(),
                crowded: 0,
            })
        };
        Adder {
            jobs: (0..).zip(specs).map(install).collect(),
            reached: vec![Reached::default(); MAX_JOBS],
            cells: vec![Cell::default(); slots],
            lanes: vec![SlotBlock::default(); slots * blocks],
            blocks,
            counts: [0; Count::COUNT],
            patience: spec.patience.0,
            truth: vec![0; slots],
        }
    }

    /// What was counted.
    #[must_use]
    pub const fn counts(&self) -> &[u64; Count::COUNT] {
        &self.counts
    }

    /// A job's contributions that found no slot, if it is installed.
    #[must_use]
    pub fn crowded(&self, job: u16) -> Option<u32> {
        self.job(job).map(|installed| installed.crowded)
    }

    /// How many places each job's chunks may claim; 0 for a job that is not installed.
    #[must_use]
    pub fn ks(&self) -> Vec<u8> {
        self.jobs.iter().map(|job| job.as_ref().map_or(0, |job| job.k)).collect()
    }

    /// Lets a job's chunks claim so many places.
    pub fn set_k(&mut self, job: u16, k: u8) {
        if let Some(installed) = self.job_mut(job) {
            installed.k = k;
        }
    }

    /// The window that answers of the switch are stamped with, as the aggregator's are.
    pub fn grant(&mut self, job: u16, window: u16) {
        if let Some(installed) = self.job_mut(job) {
            installed.granted = window;
        }
    }

    fn job(&self, job: u16) -> Option<&Installed> {
        self.jobs.get(usize::from(job)).and_then(Option::as_ref)
    }

    fn job_mut(&mut self, job: u16) -> Option<&mut Installed> {
        self.jobs.get_mut(usize::from(job)).and_then(Option::as_mut)
    }

    /// A datagram passes by. `delivered` is how many chunks every rank of a job has.
    ///
    /// # Errors
    /// The rule that this step broke.
    pub fn pass(
        &mut self,
        datagram: &mut [u8],
        passage: Passage,
        delivered: &dyn Fn(u16) -> u64,
    ) -> Result<Outcome, Violation> {
        let number = passage.peer.job;
        let Some(header) = Header::of(datagram).copied().filter(|header| header.check().is_ok()) else {
            return Ok(Outcome::Forward);
        };
        let about = if passage.is_answer { header.want() } else { header.seq() };
        let around = places(number, about, self.cells.len());
        let before = around.map(|index| self.cells.get(index).copied().unwrap_or_default());
        let outcome = self.handle(datagram, passage);
        let audit = Audit { number, about, passage, header: &header, delivered };
        for (index, old) in around.into_iter().zip(before) {
            if self.cells.get(index).is_some_and(|new| *new != old) {
                self.audit_cell(&audit, index, &old)?;
            }
        }
        let holding = around.iter().filter(|index| self.holds(**index, number, about)).count();
        if holding > 1 {
            return audit.fail("the switch has two slots for it".into());
        }
        if let Outcome::Up { .. } = outcome {
            self.audit_sum(&audit, Header::of(datagram).map_or(0, Header::bitmap), &around)?;
        }
        Ok(outcome)
    }

    fn handle(&mut self, datagram: &mut [u8], passage: Passage) -> Outcome {
        let Sender { job, rank, .. } = passage.peer;
        let Some(installed) = self.jobs.get_mut(usize::from(job)).and_then(Option::as_mut) else {
            return Outcome::Forward;
        };
        let jobs = [SwitchJob {
            number: job,
            generation: generation(job),
            local: installed.local,
            reach: installed.reach,
            k: installed.k,
            granted: installed.granted,
            patience: self.patience,
            addresses: &installed.addresses,
        }];
        let before = self.counts[Count::PassedCrowded as usize];
        let mut switch = Switch {
            jobs: &jobs,
            reached: &mut self.reached,
            cells: &mut self.cells,
            lanes: &mut self.lanes,
            blocks: self.blocks,
            counts: &mut self.counts,
        };
        let side = if passage.is_answer { Side::Node } else { Side::Worker(address(job, rank)) };
        let passing = Passing { side, congested: passage.congested, now: passage.now.0 };
        let outcome = switch.handle(datagram, passing);
        let crowded = self.counts[Count::PassedCrowded as usize] - before;
        installed.crowded = installed.crowded.wrapping_add(crowded as u32);
        outcome
    }

    fn holds(&self, index: usize, job: u16, seq: Seq) -> bool {
        self.cells.get(index).is_some_and(|cell| {
            (cell.job, cell.generation, cell.seq) == (job, generation(job), seq) && cell.bits != 0
        })
    }

    /// A slot changed: for the packet's own chunk, by the packet's own sender, and nobody lost what is still needed.
    fn audit_cell(&mut self, audit: &Audit<'_>, index: usize, old: &Cell) -> Result<(), Violation> {
        let Audit { number, about, passage, .. } = *audit;
        let own = 1_u64.checked_shl(passage.peer.rank.into()).unwrap_or(0);
        let (Some(new), Some(truth)) = (self.cells.get(index).copied(), self.truth.get_mut(index)) else {
            return Ok(());
        };
        let was_own = (old.job, old.generation, old.seq) == (number, generation(number), about);
        if new.generation == 0 {
            *truth = 0;
            let is_result = passage.is_answer && audit.header.has(flags::RESULT);
            return if was_own && is_result {
                Ok(())
            } else {
                audit.fail("its slot in the switch was freed without a result".into())
            };
        }
        if passage.is_answer || !self.holds(index, number, about) {
            return audit.fail("a packet changed another chunk's slot in the switch".into());
        }
        let (kept, gained) = if was_own { (old.bits, new.bits & !old.bits) } else { (0, new.bits) };
        if kept & !new.bits != 0 || gained != own {
            return audit.fail(format!("in the switch ranks {:#x} became {:#x}", old.bits, new.bits));
        }
        let truth = &mut self.truth[index];
        if was_own {
            *truth |= own;
            return Ok(());
        }
        *truth = own;
        let is_over = old.job == number && u64::from(old.seq.0) < (audit.delivered)(number);
        let age = passage.now.0.saturating_sub(old.touched);
        if old.generation != 0 && !is_over && age <= self.patience {
            let rule = "its slot in the switch went to another chunk too early".into();
            return Err(Violation { job: old.job, seq: old.seq.0, rule });
        }
        Ok(())
    }

    /// A partial sum left: it is of those who came in, each once.
    fn audit_sum(&self, audit: &Audit<'_>, bits: u64, around: &[usize]) -> Result<(), Violation> {
        let slot = around.iter().find(|index| self.holds(**index, audit.number, audit.about));
        let truth = slot.and_then(|index| self.truth.get(*index)).copied().unwrap_or(0);
        if bits == truth {
            return Ok(());
        }
        audit.fail(format!("a partial sum of ranks {truth:#x} says that it is of {bits:#x}"))
    }
}

/// What the auditor knows of a packet.
struct Audit<'a> {
    number: u16,
    about: Seq,
    passage: Passage,
    header: &'a Header,
    delivered: &'a dyn Fn(u16) -> u64,
}

impl Audit<'_> {
    fn fail<T>(&self, rule: String) -> Result<T, Violation> {
        Err(Violation { job: self.number, seq: self.about.0, rule })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::{MemoryKind, ValuesKind};
    use paatp_common::switch::Told;
    use paatp_common::wire::{Chunk, ElementType, Kind, Operation, Request};

    fn adder(world: u8, patience: u64) -> Adder {
        let job = JobSpec {
            name: "j".into(),
            world,
            lanes: 32,
            window: 8,
            slots: 16,
            memory: MemoryKind::Reserved,
            chunks: 9,
            operations: 1,
            iterations: 1,
            start: Nanos(0),
            compute: Nanos(0),
            first_ready: 1.0,
            jitter: 0.0,
            staleness: 0,
            values: ValuesKind::FloatSum,
        };
        let spec =
            SwitchSpec { slots: Some(8), k: Some(1), patience: Nanos(patience), tuning: Nanos(1_000_000) };
        Adder::new(&[job], &spec)
    }

    fn data(rank: u8, seq: u32) -> Vec<u8> {
        let seq = Seq(seq);
        let request = Request {
            kind: Kind::Data,
            flags: flags::PAYLOAD,
            job: 0,
            worker: rank,
            generation: generation(0),
            seq,
            want: seq,
            ack: Seq(0),
            progress: Seq(0),
            token: 7,
            bitmap: 1 << rank,
            tag: 0,
            chunk: Chunk::new(Operation::Sum, ElementType::F32, 32, 0),
            next_exponent: 0,
            attempt: 0,
        };
        let mut datagram = request.encode().as_bytes().to_vec();
        datagram.extend([0; 128]);
        datagram
    }

    fn contribute(adder: &mut Adder, rank: u8, seq: u32, now: u64) -> Result<Outcome, Violation> {
        let peer = Sender::rank(0, rank);
        let passage = Passage { peer, is_answer: false, congested: false, now: Nanos(now) };
        adder.pass(&mut data(rank, seq), passage, &|_| 0)
    }

    #[test]
    fn a_sum_goes_up_when_all_are_in() {
        let mut adder = adder(2, 100);
        assert_eq!(contribute(&mut adder, 0, 0, 1), Ok(Outcome::Answer));
        assert_eq!(contribute(&mut adder, 0, 0, 2), Ok(Outcome::Answer), "a duplicate");
        assert_eq!(contribute(&mut adder, 1, 0, 3), Ok(Outcome::Up { congested: false }));
        assert_eq!(adder.counts()[Count::Completed as usize], 1);
    }

    #[test]
    fn a_sum_of_ranks_that_did_not_contribute_is_noticed() {
        let mut adder = adder(3, 100);
        assert_eq!(contribute(&mut adder, 0, 0, 1), Ok(Outcome::Answer));
        adder.cells.iter_mut().filter(|cell| cell.generation != 0).for_each(|cell| cell.bits |= 2);
        let violation = contribute(&mut adder, 2, 0, 2).unwrap_err();
        assert!(violation.rule.contains("says that it is of 0x7"), "{violation}");
    }

    /// Patience is what keeps a slot from others: with the switch's clock wrong, it goes too early.
    #[test]
    fn a_slot_that_is_given_away_too_early_is_noticed() {
        let first = places(0, Seq(0), 8)[0];
        let other = (1..16).find(|seq| places(0, Seq(*seq), 8)[0] == first).unwrap();
        let mut adder = adder(2, 100);
        assert_eq!(contribute(&mut adder, 0, 0, 1), Ok(Outcome::Answer));
        assert_eq!(contribute(&mut adder, 0, other, 50), Ok(Outcome::Forward));
        assert_eq!(adder.crowded(0), Some(1));
        let mut early = adder;
        early.reached[0] =
            Reached { generation: generation(0), floor: Told(Some(Seq(1))), ..Reached::default() };
        let violation = contribute(&mut early, 0, other, 60).unwrap_err();
        assert!(violation.rule.contains("too early") && violation.seq == 0, "{violation}");
    }
}
