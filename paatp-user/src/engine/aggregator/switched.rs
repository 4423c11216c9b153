//! Jobs with ranks behind a switch: the data plane takes sums of it for those.

use std::net::Ipv6Addr;

use aya::maps::Array;
use paatp_common::job::{JobEntry, RankEntry};
use paatp_common::levels::Link;
use paatp_common::limits::MAX_RANKS;

use crate::switch::placement::Neighbourhood;

use super::{Aggregator, EngineError, Raw, array_mut, map, table_error};

impl Aggregator {
    /// From now on sums of a switch are taken, for jobs that have two ranks at least behind it; also for those that run.
    /// What an earlier start said of those stays: its switch may still have them.
    ///
    /// # Errors
    /// If a table cannot be read or written.
    pub fn put_behind(&mut self, neighbourhood: Neighbourhood) -> Result<(), EngineError> {
        self.neighbourhood = Some(neighbourhood);
        for (number, (entry, ranks)) in (0u32..).zip(self.truth()?) {
            let switched = self.switched(&entry, &ranks);
            if entry.generation == 0 || switched == 0 {
                continue;
            }
            let failed = |source| table_error(map::LINKS, source);
            let mut table: Array<_, Raw<Link>> = array_mut(&mut self.maps, map::LINKS)?;
            let link = table.get(&number, 0).map_err(failed)?.0;
            let switched = switched | link.switched;
            table.set(number, Raw(Link { switched, ..link }), 0).map_err(failed)?;
        }
        Ok(())
    }

    /// A job's ranks behind the switch, if a sum can be made of them ([`Link::switched`]).
    pub(super) fn switched(&self, entry: &JobEntry, ranks: &[RankEntry]) -> u64 {
        let Some(neighbourhood) = self.neighbourhood.as_ref().filter(|_| entry.rises == 0) else { return 0 };
        let is_behind = |rank: &RankEntry| neighbourhood.is_behind(Ipv6Addr::from(rank.address).into());
        let behind = (0..).zip(ranks.iter().take(MAX_RANKS)).filter(|(_, rank)| is_behind(rank));
        let bits = behind.fold(0, |all, (rank, _): (u32, _)| all | 1u64 << rank);
        if bits.count_ones() >= 2 { bits } else { 0 }
    }
}
