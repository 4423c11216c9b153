//! Which jobs are to be on the switch, and why others are not: from the same facts as the kernel's tables. Pure.

use std::net::{IpAddr, Ipv4Addr};

use paatp_common::policy::QUORUM_ALL;
use thiserror::Error;

use crate::control::membership::JobFacts;

use super::entries::{Entry, Group, Neighbour, SwitchedJob, Unfit, broadcast, flood_group, station};
use super::options::{Setup, Station};

/// How long a slot of the switch may be untouched before another chunk may have it, in µs. Whatever is lost is sent again
/// after 250 ms at most, past the switch, so that a slot which nobody touched for so long does not get complete any more.
pub const PATIENCE: u64 = 250_000;

/// Places of the switch's table that a chunk may claim where nobody has tuned the job. In a table that is half full one chunk
/// in 16 finds none of four free, and goes to the aggregator; more places let a job take more from others.
pub const PLACES: u8 = 4;

/// Slots that a job may use unless told otherwise: as many as there are.
const ALL_SLOTS: u32 = 1 << 31;

/// Why a job that runs is not on the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Absent {
    /// Nothing to add.
    #[error("fewer than two of its ranks are behind the switch (--switch-port)")]
    TooFew,
    /// A switch waits for all its ranks.
    #[error("its chunks may be complete without all ranks (quorum), and a switch waits for all")]
    Quorum,
    /// This node adds for another one.
    #[error("it goes on to a parent")]
    Parent,
    /// All its packets would be passed on.
    #[error(
        "its packets of {lanes} lanes are longer than the {most} that the switch adds; create it with lanes = {most}"
    )]
    Lanes {
        /// Most lanes of the job's packets.
        lanes: u16,
        /// Most lanes that the program in the switch adds.
        most: u32,
    },
    /// The program cannot do it.
    #[error("{0}")]
    Unfit(#[from] Unfit),
}

/// A job that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Its name.
    pub name: String,
    /// Its number.
    pub number: u16,
    /// Most lanes of its packets.
    pub lanes: u16,
    /// What the switch is to know of it, or why nothing.
    pub outcome: Result<SwitchedJob, Absent>,
}

impl Placement {
    /// What a switch with so many slots, that adds so many lanes, is to know of it.
    ///
    /// # Errors
    /// Why nothing.
    pub fn on(&self, slots: u32, most: u32) -> Result<SwitchedJob, Absent> {
        let job = self.outcome.clone()?;
        if u32::from(self.lanes) > most {
            return Err(Absent::Lanes { lanes: self.lanes, most });
        }
        let job = SwitchedJob { slots: job.slots.min(slots), ..job };
        job.check()?;
        Ok(job)
    }
}

/// Who is where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Neighbourhood {
    stations: Vec<Station>,
    node: Station,
    slots: u32,
}

impl Neighbourhood {
    /// Of the aggregator with one of these addresses. None if it is not among the stations.
    #[must_use]
    pub fn new(setup: &Setup, own: &[IpAddr]) -> Option<Neighbourhood> {
        let node = setup.stations.iter().find(|station| own.contains(&station.address.into()))?;
        let slots = setup.slots.unwrap_or(ALL_SLOTS);
        Some(Neighbourhood { stations: setup.stations.clone(), node: *node, slots })
    }

    /// A rank with this address is behind the switch.
    #[must_use]
    pub fn is_behind(&self, address: IpAddr) -> bool {
        self.find(address).is_some()
    }

    fn find(&self, address: IpAddr) -> Option<&Station> {
        let IpAddr::V4(address) = address.to_canonical() else { return None };
        self.stations
            .iter()
            .find(|station| station.address == address && station.address != self.node.address)
    }

    /// Where everybody is, and how broadcasts go, for the switch.
    #[must_use]
    pub fn entries(&self) -> Vec<Entry> {
        self.stations.iter().map(|at| station(at.mac, at.port)).chain([broadcast()]).collect()
    }

    /// The ports that broadcasts go to: where stations are.
    #[must_use]
    pub fn flood(&self) -> Group {
        flood_group(self.stations.iter().map(|at| at.port))
    }

    /// The jobs that run.
    #[must_use]
    pub fn place(&self, jobs: &[JobFacts]) -> Vec<Placement> {
        let running = jobs.iter().filter(|job| job.status.generation.is_some());
        let place = |job: &JobFacts| Placement {
            name: job.status.name.clone(),
            number: job.status.job,
            lanes: job.entry.lanes,
            outcome: self.job(job),
        };
        running.map(place).collect()
    }

    fn job(&self, job: &JobFacts) -> Result<SwitchedJob, Absent> {
        let entry = &job.entry;
        let policy = entry.policy;
        if [policy.before(), policy.after()].iter().any(|mode| mode.quorum != QUORUM_ALL) {
            return Err(Absent::Quorum);
        }
        if entry.rises != 0 {
            return Err(Absent::Parent);
        }
        let neighbour = |(rank, address): (u8, &Option<IpAddr>)| {
            let at = self.find((*address)?)?;
            let counts = entry.expected.checked_shr(rank.into()).unwrap_or(0) & 1 == 1;
            counts.then_some(Neighbour { rank, port: at.port, mac: at.mac, address: at.address })
        };
        let ranks: Vec<Neighbour> = (0..).zip(&job.addresses).filter_map(neighbour).collect();
        if ranks.len() < 2 {
            return Err(Absent::TooFew);
        }
        Ok(SwitchedJob {
            number: job.status.job,
            generation: entry.generation,
            ranks,
            reach: entry.slots,
            k: if entry.k == 0 { PLACES } else { entry.k },
            granted: entry.granted,
            patience: PATIENCE,
            slots: self.slots,
            node: self.node_address(),
            node_port: self.node.port,
        })
    }

    /// The aggregator's address.
    #[must_use]
    pub const fn node_address(&self) -> Ipv4Addr {
        self.node.address
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a panic is the failure report here")]

    use std::time::Instant;

    use paatp_common::policy::{Mode, Policy};

    use super::*;
    use crate::config::{JobConfig, Jobs};
    use crate::control::membership::{Entropy, Membership};
    use crate::control::protocol::{JoinRequest, PROTOCOL};

    const NODE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 9));

    fn neighbourhood(slots: Option<u32>) -> Neighbourhood {
        let at = |last: u8| Station {
            address: Ipv4Addr::new(10, 0, 0, last),
            mac: [2, 0, 0, 0, 0, last],
            port: last.into(),
        };
        let setup = Setup {
            address: ([10, 0, 0, 200], 9559).into(),
            device: 0,
            stations: [0, 1, 2, 9].map(at).into(),
            slots,
            pipeline: None,
        };
        assert_eq!(Neighbourhood::new(&setup, &[[10, 0, 0, 8].into()]), None);
        Neighbourhood::new(&setup, &["fd00::1".parse().unwrap(), NODE]).unwrap()
    }

    /// A job of four ranks at 10.0.0.0 to 10.0.0.3, which runs.
    fn facts() -> JobFacts {
        let jobs = Jobs::new(vec![JobConfig { lanes: 256, ..JobConfig::new("train", 4) }]).unwrap();
        let mut membership = Membership::new(&jobs, 20545, 1);
        for rank in 0..4 {
            let request = JoinRequest {
                protocol: PROTOCOL,
                rank,
                world: 4,
                wait_seconds: 1.0,
                layout: None,
                attempt: None,
                below: None,
                members: None,
            };
            let entropy = Entropy { generation: 77, nonce: 1 };
            let address = [10, 0, 0, rank as u8].into();
            membership.join(Instant::now(), "train", &request, address, entropy).unwrap();
        }
        membership.facts().jobs.remove(0)
    }

    fn placed(change: impl Fn(&mut JobFacts)) -> Result<SwitchedJob, Absent> {
        let mut facts = facts();
        change(&mut facts);
        let placements = neighbourhood(None).place(&[facts]);
        placements.first().unwrap().on(1024, 256)
    }

    #[test]
    fn ranks_behind_the_switch_are_on_it() {
        let job = placed(|_| {}).unwrap();
        let ranks: Vec<_> = job.ranks.iter().map(|at| (at.rank, at.port, at.address.octets()[3])).collect();
        assert_eq!(ranks, [(0, 0, 0), (1, 1, 1), (2, 2, 2)], "rank 3 is beside it");
        assert_eq!((job.number, job.generation, job.reach, job.k, job.granted), (0, 77, 256, PLACES, 0));
        assert_eq!((IpAddr::from(job.node), job.node_port, job.slots), (NODE, 9, 1024));
        let tuned = placed(|facts| (facts.entry.k, facts.entry.granted) = (7, 12)).unwrap();
        assert_eq!((tuned.k, tuned.granted), (7, 12));
        let shrunk = placed(|facts| facts.entry.expected = 0b1101).unwrap();
        assert_eq!(shrunk.ranks.iter().map(|at| at.rank).collect::<Vec<_>>(), [0, 2]);
        let few = neighbourhood(Some(16)).place(&[facts()]);
        assert_eq!(few[0].on(1024, 256).unwrap().slots, 16);
        assert_eq!(few[0].on(8, 256).unwrap().slots, 8, "there are no more");
    }

    #[test]
    fn others_are_not_and_it_is_known_why() {
        let quorum = Mode { quorum: 3, ..Mode::BSP };
        assert_eq!(placed(|facts| facts.entry.policy = Policy::settled(quorum, 1)), Err(Absent::Quorum));
        assert_eq!(placed(|facts| facts.entry.rises = 1), Err(Absent::Parent));
        assert_eq!(placed(|facts| facts.entry.expected = 0b1001), Err(Absent::TooFew));
        assert_eq!(placed(|facts| facts.addresses.truncate(1)), Err(Absent::TooFew));
        let far = |facts: &mut JobFacts| facts.addresses[1..].fill(Some("fd00::2".parse().unwrap()));
        assert_eq!(placed(far), Err(Absent::TooFew));
        // The aggregator's own address is no rank's place.
        assert_eq!(placed(|facts| facts.addresses[..3].fill(Some(NODE))), Err(Absent::TooFew));
        let long = placed(|facts| facts.entry.lanes = 288);
        assert_eq!(long, Err(Absent::Lanes { lanes: 288, most: 256 }));
        assert_eq!(neighbourhood(None).place(&[]), []);
        let mut idle = facts();
        idle.status.generation = None;
        assert_eq!(neighbourhood(None).place(&[idle]), []);
    }
}
