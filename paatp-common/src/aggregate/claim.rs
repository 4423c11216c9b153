//! A chunk's slot: its place in the ring, or one of the pool that it has or gets.

use crate::counter::Refusal;
use crate::pool::{self, Quarry, Search};
use crate::seq::Seq;

use super::{Admitted, Machine};

/// The chunk's slot, locked: its place in the ring, or one of the pool that is or becomes its own.
#[inline(always)]
pub(super) fn enter<M: Machine>(
    machine: &mut M,
    who: &Admitted<M::JobRef>,
    seq: Seq,
    min_ack: Seq,
) -> Result<M::SlotRef, Refusal> {
    let job = machine.job(who.job);
    if job.is_shared() {
        return claim(machine, who, seq, min_ack);
    }
    let slot = machine.slot(super::slot_index(job, seq)).ok_or(Refusal::UnknownJob)?;
    if machine.lock(slot) { Ok(slot) } else { Err(Refusal::LockBusy) }
}

/// Where to look for a chunk of a job that shares the pool.
#[inline(always)]
pub(super) fn search<M: Machine>(machine: &mut M, who: &Admitted<M::JobRef>, seq: Seq) -> Search {
    let header = machine.header();
    let (job, generation) = (header.job(), header.generation());
    let own = machine.job(who.job).first_slot;
    Search::new(machine.pool(), Quarry { job, generation, seq, own })
}

/// Finds the chunk's slot in the pool or claims one, and returns it locked. Both under the lock of the chunk's home: two
/// CPUs would otherwise give the chunk a slot each (protocol-rules F18).
#[inline(always)]
fn claim<M: Machine>(
    machine: &mut M,
    who: &Admitted<M::JobRef>,
    seq: Seq,
    min_ack: Seq,
) -> Result<M::SlotRef, Refusal> {
    let k = machine.job(who.job).k;
    let search = search(machine, who, seq).claiming(k, seq == min_ack);
    let home = machine.slot(search.home()).ok_or(Refusal::UnknownJob)?;
    if !machine.lock_home(home) {
        return Err(Refusal::LockBusy);
    }
    let outcome = match machine.search(search).outcome() {
        Some(index) => occupy(machine, who, seq, index),
        None => Err(Refusal::Crowded),
    };
    machine.unlock_home(home);
    if matches!(outcome, Err(Refusal::Crowded)) {
        let generation = machine.header().generation();
        machine.progress(who.job).note_crowded(generation);
    }
    outcome
}

/// Locks the slot that a search found and looks again: what was seen without its lock may have changed. A slot that is
/// still free becomes the chunk's.
#[inline(always)]
fn occupy<M: Machine>(
    machine: &mut M,
    who: &Admitted<M::JobRef>,
    seq: Seq,
    index: u32,
) -> Result<M::SlotRef, Refusal> {
    let slot = machine.slot(index).ok_or(Refusal::UnknownJob)?;
    if !machine.lock(slot) {
        return Err(Refusal::LockBusy);
    }
    let (number, generation) = (machine.header().job(), machine.header().generation());
    let state = machine.state(slot);
    let owner = state.job();
    if state.holds(generation, seq) && owner == number {
        return Ok(slot);
    }
    let refusal = if seq.is_before(machine.progress(who.job).acks.floor(generation)) {
        // Everybody has let go of the chunk meanwhile: it gets no new slot.
        Refusal::Behind
    } else if !is_over(machine, slot, owner) {
        // Another chunk, with another home, was faster.
        Refusal::Crowded
    } else {
        // If the generation is over (protocol-rules F11) the slot stays free, and the decision refuses what comes.
        if machine.rules(who.job).generation == generation {
            machine.state(slot).claim(number, generation, seq);
        }
        return Ok(slot);
    };
    machine.unlock(slot);
    Err(refusal)
}

/// What a slot of the pool holds is over; see [`pool::is_over`]. `owner` is the job it names.
#[inline(always)]
fn is_over<M: Machine>(machine: &mut M, slot: M::SlotRef, owner: u16) -> bool {
    let Some(job) = machine.find(owner) else { return true };
    let state = *machine.state(slot);
    pool::is_over(&state, machine.job(job), machine.progress(job))
}
