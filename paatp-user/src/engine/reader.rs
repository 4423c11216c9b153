//! Reads the tables of a running engine beside it: with descriptors of its own, so that nobody who looks at a node holds up
//! those who change it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use aya::maps::{Array, Map, MapData, PerCpuArray};
use paatp_common::counter::Counters;
use paatp_common::job::JobEntry;
use paatp_common::pool::{Pool, Quarry, Search, TURNS};
use paatp_common::progress::RankRecord;
use paatp_common::seq::Seq;
use paatp_common::slot::Slot;

use crate::config::SlotSize;
use crate::telemetry::health::Notice;
use crate::telemetry::read::{Cost, View};

use super::aggregator::{PROGRESS_WORDS, Raw, map, no_map, progress_of, table_error};
use super::error::EngineError;
use super::maps::Maps;
use super::surroundings::Surroundings;

const STANDARD: usize = SlotSize::Standard.bytes();
const WIDE: usize = SlotSize::Wide.bytes();

/// Reads tables of a loaded program.
pub struct Reader {
    counters: PerCpuArray<MapData, Raw<Counters>>,
    progress: Array<MapData, [u64; PROGRESS_WORDS]>,
    slots: Slots,
    pool: Pool,
    program: Option<OwnedFd>,
    surroundings: Surroundings,
}

enum Slots {
    Standard(Array<MapData, [u8; STANDARD]>),
    Wide(Array<MapData, [u8; WIDE]>),
}

impl Reader {
    pub(super) fn new(
        maps: &Maps,
        size: SlotSize,
        pool: Pool,
        program: Option<BorrowedFd<'_>>,
        surroundings: Surroundings,
    ) -> Result<Reader, EngineError> {
        Ok(Reader {
            counters: open(maps, map::COUNTERS)?,
            progress: open(maps, map::PROGRESS)?,
            slots: match size {
                SlotSize::Standard => Slots::Standard(open(maps, map::SLOTS)?),
                SlotSize::Wide => Slots::Wide(open(maps, map::WIDE_SLOTS)?),
            },
            pool,
            program: program.and_then(|program| program.try_clone_to_owned().ok()),
            surroundings,
        })
    }
}

/// The kernel counts run times of programs while this is 1.
const STATISTICS: &str = "/proc/sys/kernel/bpf_stats_enabled";

/// What `/proc/self/fdinfo` says of a program.
fn cost_of(fdinfo: &str) -> Option<Cost> {
    let number = |name: &str| {
        let line = fdinfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').trim().parse().ok()
    };
    Some(Cost { run_time: Duration::from_nanos(number("run_time_ns")?), runs: number("run_cnt")? })
}

/// A table by a descriptor of its own.
fn open<T>(maps: &Maps, name: &'static str) -> Result<T, EngineError>
where
    T: TryFrom<Map, Error = aya::maps::MapError>,
{
    let failed = |source| table_error(name, source);
    let again = |data: &MapData| {
        let fd = data.fd().as_fd().try_clone_to_owned();
        MapData::from_fd(fd.map_err(|error| EngineError::Descriptor { map: name, source: error })?)
            .map_err(failed)
    };
    let map = match maps.map(name).ok_or_else(|| no_map(name))? {
        Map::Array(data) => Map::Array(again(data)?),
        Map::PerCpuArray(data) => Map::PerCpuArray(again(data)?),
        _ => return Err(no_map(name)),
    };
    T::try_from(map).map_err(failed)
}

impl Reader {
    /// What a slot knows, by its place in the table.
    fn state(&self, index: u32) -> Result<Slot, EngineError> {
        let (name, head) = match &self.slots {
            Slots::Standard(table) => (map::SLOTS, table.get(&index, 0).map(|slot| head(&slot))),
            Slots::Wide(table) => (map::WIDE_SLOTS, table.get(&index, 0).map(|slot| head(&slot))),
        };
        head.map_err(|source| table_error(name, source))
    }
}

impl View for Reader {
    fn counters(&self) -> Result<Counters, EngineError> {
        let values = self.counters.get(&0, 0).map_err(|source| table_error(map::COUNTERS, source))?;
        let mut total = Counters::default();
        values.iter().for_each(|cpu| total.absorb(&cpu.0));
        Ok(total)
    }

    fn records(&self, number: u16, entry: &JobEntry) -> Result<Vec<RankRecord>, EngineError> {
        let words = self.progress.get(&u32::from(number), 0);
        let progress = progress_of(words.map_err(|source| table_error(map::PROGRESS, source))?);
        Ok((0..usize::from(entry.world)).map(|rank| progress.reached(entry.generation, rank)).collect())
    }

    fn notices(&self) -> Vec<Notice> {
        self.surroundings.look()
    }

    fn cost(&self) -> Result<Option<Cost>, EngineError> {
        let Some(program) = &self.program else { return Ok(None) };
        let path = format!("/proc/self/fdinfo/{}", program.as_raw_fd());
        let fdinfo = std::fs::read_to_string(path).map_err(EngineError::Cost)?;
        let counts = std::fs::read_to_string(STATISTICS).is_ok_and(|value| value.trim() == "1");
        // What was counted before it was switched off stays.
        Ok(cost_of(&fdinfo).filter(|cost| counts || cost.runs > 0))
    }

    fn slot(&self, number: u16, entry: &JobEntry, seq: Seq) -> Result<Slot, EngineError> {
        if !entry.is_shared() {
            // Rings are powers of two.
            return self.state(entry.first_slot.wrapping_add(seq.0 & entry.slots.wrapping_sub(1)));
        }
        let quarry = Quarry { job: number, generation: entry.generation, seq, own: entry.first_slot };
        let search = Search::new(self.pool, quarry);
        for turn in 0..TURNS {
            let slot = self.state(search.index(turn.into()))?;
            if slot.holds(entry.generation, seq) && slot.job() == number {
                return Ok(slot);
            }
        }
        Ok(Slot::default())
    }
}

/// What a slot knows besides its lanes.
fn head(bytes: &[u8]) -> Slot {
    bytes.get(..size_of::<Slot>()).map(bytemuck::pod_read_unaligned).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cost_is_read_where_it_is_told() {
        let told = "pos:\t0\nprog_type:\t6\nrun_time_ns:\t1500\nrun_cnt:\t3\nrecursion_misses:\t0\n";
        let cost = Cost { run_time: Duration::from_nanos(1500), runs: 3 };
        assert_eq!((cost_of(told), cost_of("pos:\t0\n")), (Some(cost), None));
    }
}
