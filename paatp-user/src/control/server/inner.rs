//! What the server's lock guards, and the steps that are made under it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use paatp_common::Seq;
use paatp_common::job::JobEntry;
use paatp_common::policy::Policy;
use paatp_transport::words::Ranks;
use tokio::sync::oneshot;
use tracing::{error, info, warn};

use crate::config::FailurePolicy;
use crate::control::error::ControlError;
use crate::control::hosts::Hosts;
use crate::control::membership::{Formation, Loss, Membership, WaiterId};
use crate::control::pacing::Pacing;
use crate::control::state_file::Keeper;
use crate::control::tables::Tables;
use crate::control::token::Secret;
use crate::engine::EngineError;
use crate::switch::keeper::Handle;
use crate::telemetry::Telemetry;

use super::Answer;

pub(in crate::control) struct Inner {
    pub(in crate::control) membership: Membership,
    pub(super) tables: Arc<Mutex<dyn Tables>>,
    pub(in crate::control) waiting: BTreeMap<WaiterId, oneshot::Sender<Answer>>,
    /// The node's token; without it nobody changes anything.
    pub(super) token: Option<Secret>,
    pub(super) pacing: Pacing,
    pub(super) telemetry: Telemetry,
    /// Names under which it may be asked.
    pub(super) hosts: Arc<Hosts>,
    /// Where it is kept what a restart needs to know.
    pub(super) keeper: Option<Box<dyn Keeper>>,
    /// The switch that adds for jobs. It is told after the tables.
    pub(super) switch: Option<Arc<Handle>>,
}

impl Inner {
    pub(super) fn write(&mut self, number: u16, entry: JobEntry) -> Result<(), EngineError> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner).write(number, entry)?;
        // What the old entry let in is complete now.
        self.telemetry.settle(number, &entry);
        Ok(())
    }

    pub(super) fn replace_policy(&mut self, number: u16, from: Policy, to: Policy) -> bool {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner).replace_policy(number, from, to)
    }

    /// Takes in what the data plane made of policies.
    pub(super) fn look_at_policies(&mut self) {
        for (number, _) in self.membership.running() {
            let policy = self.tables.lock().unwrap_or_else(PoisonError::into_inner).policy(number);
            self.membership.note_policy(number, policy);
        }
    }

    /// Changes that are over hold for all chunks: numbers of chunks come round.
    pub(super) fn settle_policies(&mut self) {
        self.look_at_policies();
        for (number, entry) in self.membership.running() {
            let policy = entry.policy;
            if policy.from().is_none() {
                continue;
            }
            let progress =
                self.tables.lock().unwrap_or_else(PoisonError::into_inner).progress(number, &entry);
            let is_over = progress.is_ok_and(|progress| policy.is_over(Seq(progress.min_ack)));
            if is_over && self.replace_policy(number, policy, policy.when_over()) {
                self.membership.note_policy(number, policy.when_over());
            }
        }
    }

    /// Ends waits with an answer.
    pub(super) fn tell(&mut self, waiters: impl IntoIterator<Item = WaiterId>, answer: &Answer) {
        for waiter in waiters {
            if let Some(sender) = self.waiting.remove(&waiter) {
                let _ = sender.send(answer.clone());
            }
        }
    }

    /// Keeps what a restart needs to know. Before a generation comes into force: afterwards its nonce is nowhere else.
    pub(super) fn keep(&mut self) {
        if let Some(keeper) = &mut self.keeper {
            keeper.keep(&self.membership);
        }
    }

    /// A job is gone: nothing goes up for its number any more, nor comes down.
    pub(super) fn unlink(&mut self, number: u16) {
        if let Err(cause) = self.tables.lock().unwrap_or_else(PoisonError::into_inner).unlink(number) {
            // Without an entry of the job it does nothing, and the next job of this number writes its own.
            warn!(number, "cannot take a job's link to its parent away: {cause}");
        }
    }

    /// Writes the tables, then answers everybody who waits. True if the generation is in force.
    pub(super) fn form(&mut self, formation: &Formation) -> bool {
        self.keep();
        let written = self.tables.lock().unwrap_or_else(PoisonError::into_inner).install(formation);
        let answer = match written {
            Ok(()) => {
                self.telemetry.begin(&formation.name, formation.number, &formation.entry);
                self.membership.formed(formation);
                if let Some(switch) = &self.switch {
                    switch.place(&self.membership.facts().jobs);
                }
                info!(job = formation.name, generation = formation.entry.generation, "all ranks are there");
                Ok(formation.grant.clone())
            }
            Err(cause) => {
                error!(job = formation.name, "cannot form a generation: {cause}");
                self.membership.unform(formation);
                self.keep();
                Err(ControlError::from(cause))
            }
        };
        self.tell(formation.waiters.iter().copied(), &answer);
        answer.is_ok()
    }

    /// Ranks held the others up for too long.
    pub(super) fn lose(&mut self, loss: &Loss) {
        if let Err(cause) = self.write(loss.number, loss.entry) {
            error!(job = loss.name, "cannot act on lost ranks, trying again: {cause}");
            return;
        }
        self.membership.lose(loss);
        self.keep();
        let (job, generation, ranks) = (loss.name.as_str(), loss.generation, Ranks(&loss.ranks));
        match loss.policy {
            FailurePolicy::Abort => error!(job, generation, "ended: {ranks} held the others up for too long"),
            FailurePolicy::Shrink => warn!(job, generation, "goes on without {ranks}, held up for too long"),
        }
    }
}
