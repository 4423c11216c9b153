//! Jobs of more ranks than a packet has bits: all ranks of a node are one rank of its parent's job (protocol-rules F22).

use paatp_common::limits::{MAX_RANKS, MAX_TOTAL_RANKS};
use paatp_common::policy::QUORUM_ALL;
use paatp_transport::{Names, Seating};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::config::FailurePolicy;

use super::error::ControlError;
use super::job::Job;
use super::protocol::JoinRequest;

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

impl Job {
    /// Checks what a node that joins as one rank asks for; returns the number of its ranks.
    pub(super) fn admit_node(&self, request: &JoinRequest, rank: u32) -> Result<u16, ControlError> {
        let Some(members) = request.members else { return Ok(1) };
        let refused = |why| Err(ControlError::NoLevels { job: self.name.clone(), why });
        let quorums = [self.entry.policy.before(), self.entry.policy.after()].map(|mode| mode.quorum);
        if request.below.is_some() {
            return refused("is joined for several ranks and as one at once: give a job `ranks` or `child`");
        }
        if self.parent.is_some() {
            return refused("has a parent itself: of nodes that are one rank each there are two levels");
        }
        if self.policy == FailurePolicy::Shrink || quorums != [QUORUM_ALL; 2] {
            return refused(
                "has nodes for ranks, whose results need all of them: create it without a quorum and with on_failure = \"abort\"",
            );
        }
        let others = self.waiting.iter().filter(|(other, _)| u32::from(**other) != rank);
        let others: u32 = others.map(|(_, waiter)| u32::from(waiter.members)).sum();
        match u16::try_from(members) {
            Ok(few)
                if (1..=MAX_RANKS).contains(&few.into()) && others + members <= MAX_TOTAL_RANKS.into() =>
            {
                Ok(few)
            }
            _ => refused("has too many ranks: 64 for each node, 4096 in all"),
        }
    }

    /// Who stands behind the ranks that wait, if one of them is a node.
    pub(super) fn nodes(&self) -> Option<Nodes> {
        let is_flat = self.waiting.values().all(|waiter| !waiter.is_node);
        let members = self.waiting.values().map(|waiter| waiter.members);
        (!is_flat).then(|| Nodes { members: members.collect(), child: None })
    }
}
