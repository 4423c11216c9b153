//! A node that goes up: it joins its job's parent for the ranks that wait here, and forms what the parent grants.

use std::time::{Duration, Instant};

use paatp_common::levels::Link;

use super::error::ControlError;
use super::job::{Job, Parent};
use super::membership::{Formation, Membership, WaiterId};
use super::protocol::{Grant, Nodes};

/// A node that joins its parent for the ranks that wait here. A job has one at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ascent {
    /// Name of the job, here and there.
    pub name: String,
    /// Its number here.
    pub number: u16,
    /// The wait that made the ranks complete: tells it from another that began later.
    pub last: WaiterId,
    /// Where it goes.
    pub parent: Parent,
    /// Number of ranks of the whole job.
    pub world: u8,
    /// How long it may wait for ranks of other nodes.
    pub wait: Duration,
    /// What the ranks reduce, if they told.
    pub layout: Option<String>,
}

/// What a parent granted, and how it is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uplink {
    /// Index of the interface towards it.
    pub interface: u32,
    /// For the data plane, but for `below`.
    pub link: Link,
}

/// What follows from an ascent that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setback {
    /// Waits that it was for, which are over.
    pub waiters: Vec<WaiterId>,
    /// Ranks have come anew meanwhile, and all are there: the next one.
    pub next: Option<Ascent>,
}

impl Job {
    /// Goes up if all ranks of this node wait, and it does not already.
    pub(super) fn begin_ascent(&mut self, now: Instant) -> Option<Ascent> {
        let parent = self.parent.filter(|_| self.ascending.is_none() && self.missing().is_empty())?;
        let last = self.newest()?;
        self.ascending = Some(last);
        let left = self.waiting.values().map(|waiter| waiter.deadline.saturating_duration_since(now));
        Some(Ascent {
            name: self.name.clone(),
            number: self.number,
            last,
            parent,
            world: self.entry.world,
            wait: left.max().unwrap_or_default(),
            layout: self.layout(),
        })
    }

    fn newest(&self) -> Option<WaiterId> {
        self.waiting.values().map(|waiter| waiter.id).max()
    }

    /// What the ranks that wait reduce, if one told: the others told the same.
    fn layout(&self) -> Option<String> {
        self.waiting.values().find_map(|waiter| waiter.layout.clone())
    }
}

impl Membership {
    /// The job that goes up by this ascent.
    fn ascending(&mut self, ascent: &Ascent) -> Option<&mut Job> {
        self.jobs.get_mut(&ascent.number).filter(|job| job.ascending == Some(ascent.last))
    }

    /// The parent has granted what an ascent asked for: the generation, unless ranks wait no more.
    ///
    /// # Errors
    /// If the parent's job is another one, or somebody has gone. Then the parent is to be told, and
    /// [`Membership::give_up`] to be called.
    pub fn form_below(
        &mut self,
        ascent: &Ascent,
        grant: &Grant,
        uplink: Uplink,
    ) -> Result<Formation, ControlError> {
        let limits = self.limits;
        let Some(job) = self.ascending(ascent) else {
            return Err(ControlError::JobDeleted(ascent.name.clone()));
        };
        let own = (job.entry.world, job.entry.lanes, job.entry.window, job.entry.slots);
        let (world, nodes) = match ascent.parent.child {
            None if grant.nodes.is_some() => {
                let why = "has nodes for ranks: create the job here with `child`, its rank there".into();
                return Err(ControlError::Parent {
                    job: job.name.clone(),
                    parent: ascent.parent.address,
                    why,
                });
            }
            None => (grant.world, None),
            Some(child) => {
                let members = grant.nodes.as_ref().map_or(&[][..], |nodes| &nodes.members);
                let ours = members.get(usize::from(child)).and_then(|ours| u8::try_from(*ours).ok());
                let nodes = Nodes { members: members.to_vec(), child: Some(child) };
                if nodes.root().is_none_or(|root| root.bits() != grant.world) {
                    let why = format!(
                        "tells of {} ranks with {members:?} behind them, which cannot be; run the same version everywhere",
                        grant.world
                    );
                    return Err(ControlError::Parent {
                        job: job.name.clone(),
                        parent: ascent.parent.address,
                        why,
                    });
                }
                (ours.unwrap_or(0), Some(nodes))
            }
        };
        let theirs = (world, grant.lanes, grant.window, grant.slots);
        if own != theirs {
            let why = format!(
                "has ranks, lanes, window and slots {theirs:?}, and here they are {own:?}; create both with the same"
            );
            return Err(ControlError::Parent { job: job.name.clone(), parent: ascent.parent.address, why });
        }
        let missing = job.missing();
        if !missing.is_empty() {
            let (world, waited) = (grant.world.into(), "the parent's grant came".into());
            return Err(ControlError::RanksMissing { world, waited, missing });
        }
        if job.layout() != ascent.layout {
            // All have come anew, with something else to reduce than what the other nodes agreed to.
            return Err(ControlError::Replaced(ascent.parent.ranks.first().into()));
        }
        job.ascending = None;
        let mut formation = job.form(&limits, grant.generation, grant.nonce, nodes);
        self.generations.remember(grant.generation);
        formation.uplink = Some(uplink);
        Ok(formation)
    }

    /// An ascent failed.
    pub fn give_up(&mut self, ascent: &Ascent, now: Instant) -> Setback {
        let Some(job) = self.ascending(ascent) else { return Setback { waiters: Vec::new(), next: None } };
        job.ascending = None;
        if job.newest() == Some(ascent.last) {
            let waiting = std::mem::take(&mut job.waiting);
            return Setback { waiters: waiting.into_values().map(|waiter| waiter.id).collect(), next: None };
        }
        Setback { waiters: Vec::new(), next: job.begin_ascent(now) }
    }

    /// Where a job's sums go, if they do.
    #[must_use]
    pub fn parent(&self, name: &str) -> Option<Parent> {
        self.jobs.values().find(|job| job.name == name)?.parent
    }

    /// A job's parent and the generation that it knows of it, if one runs.
    #[must_use]
    pub fn above(&self, name: &str) -> Option<(Parent, u32)> {
        let job = self.jobs.values().find(|job| job.name == name)?;
        job.parent.zip(job.running.as_ref().map(|running| running.number))
    }
}
