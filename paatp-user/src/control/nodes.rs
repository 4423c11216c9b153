//! Jobs of more ranks than a packet has bits: all ranks of a node are one rank of its parent's job (protocol-rules F22).

use paatp_common::limits::{MAX_RANKS, MAX_TOTAL_RANKS};
use paatp_common::policy::QUORUM_ALL;
use paatp_transport::{Names, Seating};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::config::FailurePolicy;

use super::error::ControlError;
use super::job::{Job, StandsFor};
use super::protocol::JoinRequest;

const _: () = assert!(MAX_RANKS * MAX_RANKS <= MAX_TOTAL_RANKS as usize);

/// Who stands behind the ranks of a job's root, where some are nodes with ranks of their own. Those are counted through:
/// first all of rank 0, then all of rank 1.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Nodes {
    /// Number of ranks behind each rank of the root's job; 1 for a worker.
    pub members: Vec<u16>,
    /// The rank of the root's job that all ranks of this node are together. Absent at the root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub child: Option<u8>,
}

impl Nodes {
    /// Whom the bits of results stand for.
    #[must_use]
    pub fn root(&self) -> Option<Names> {
        Names::new(0, &self.members)
    }

    /// Whom the bits of this node stand for, which has `world` ranks.
    #[must_use]
    pub fn here(&self, world: u8) -> Option<Names> {
        let root = self.root()?;
        match self.child {
            None => Some(root),
            Some(child) => Names::new(root.of(child).0, [1; MAX_RANKS].get(..usize::from(world))?),
        }
    }

    /// Where a rank of this node is among all.
    #[must_use]
    pub fn seating(&self, rank: u8, world: u8) -> Option<Seating> {
        Some(Seating { here: self.here(world)?, root: self.root()?, seat: self.child.unwrap_or(rank) })
    }

    /// The factor of the salts of all ranks together.
    #[must_use]
    pub fn keys(&self, nonce: u64) -> u64 {
        let bits = (0u8..).take(self.members.len());
        self.root().map_or(0, |root| bits.fold(0, |sum: u64, bit| sum.wrapping_add(root.key(nonce, bit))))
    }
}

/// Why ranks of lower nodes are either joined for one by one or not at all.
const MIXED: &str = "has lower nodes that join for each of their ranks, and others that are one rank each: give all of their jobs `ranks`, or all `child`";

impl Job {
    /// Checks what a lower node that joins asks for; says whom the wait is for.
    pub(super) fn admit_node(&self, request: &JoinRequest, rank: u8) -> Result<StandsFor, ControlError> {
        let refused = |why| Err(ControlError::NoLevels { job: self.name.clone(), why });
        let mut others = self.waiting.iter().filter(|(other, _)| **other != rank).map(|(_, w)| w.stands_for);
        let members = match (request.members, &request.below) {
            (None, None) => return Ok(StandsFor::Worker),
            (None, Some(_)) if self.parent.is_some_and(|parent| parent.child.is_some()) => {
                return refused(
                    "is one rank of its parent's, so no other node can be below it: of those there are two levels",
                );
            }
            (None, Some(_)) if others.any(|other| matches!(other, StandsFor::Node(_))) => {
                return refused(MIXED);
            }
            (None, Some(_)) => return Ok(StandsFor::RankBelow),
            (Some(_), Some(_)) => {
                return refused(
                    "is joined for several ranks and as one at once: give a job `ranks` or `child`",
                );
            }
            (Some(members), None) => members,
        };
        if self.parent.is_some() {
            return refused("has a parent itself: of nodes that are one rank each there are two levels");
        }
        if self.policy == FailurePolicy::Shrink || self.quorums() != [QUORUM_ALL; 2] {
            return refused(
                "has nodes for ranks, whose results need all of them: create it without a quorum and with on_failure = \"abort\"",
            );
        }
        if others.any(|other| other == StandsFor::RankBelow) {
            return refused(MIXED);
        }
        match u16::try_from(members) {
            // 64 ranks of 64 are as many as there may be in all.
            Ok(few) if (1..=MAX_RANKS).contains(&few.into()) => Ok(StandsFor::Node(few)),
            _ => refused("has nodes for ranks, each of which has 1 to 64"),
        }
    }

    fn quorums(&self) -> [u8; 2] {
        [self.entry.policy.before(), self.entry.policy.after()].map(|mode| mode.quorum)
    }

    /// Who stands behind the ranks that wait, if one of them is a node.
    pub(super) fn nodes(&self) -> Option<Nodes> {
        let is_flat = self.waiting.values().all(|waiter| !matches!(waiter.stands_for, StandsFor::Node(_)));
        let members = self.waiting.values().map(|waiter| match waiter.stands_for {
            StandsFor::Node(members) => members,
            StandsFor::Worker | StandsFor::RankBelow => 1,
        });
        (!is_flat).then(|| Nodes { members: members.collect(), child: None })
    }

    /// Ranks of the generation that runs are nodes, or all ranks here are one.
    pub(super) fn has_nodes(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.nodes.is_some())
    }
}

#[cfg(test)]
#[path = "nodes_tests.rs"]
mod tests;
