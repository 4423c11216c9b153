//! The data plane's tables, as the control server uses them.

use paatp_common::job::JobEntry;
use paatp_common::policy::Policy;
use paatp_common::progress::RankRecord;
use paatp_transport::rate::share::Share;

use crate::engine::{Aggregator, EngineError, ProgressSnapshot};

use super::error::ControlError;
use super::membership::Formation;

/// The data plane's tables.
pub trait Tables: Send {
    /// Puts a generation in force.
    ///
    /// # Errors
    /// If a table cannot be written.
    fn install(&mut self, formation: &Formation) -> Result<(), EngineError>;

    /// Replaces a job's entry, and leaves its ranks and its policy as they are.
    ///
    /// # Errors
    /// If the table cannot be written.
    fn write(&mut self, number: u16, entry: JobEntry) -> Result<(), EngineError>;

    /// A job has no parent any more: it is gone.
    ///
    /// # Errors
    /// If the table cannot be written.
    fn unlink(&mut self, _number: u16) -> Result<(), EngineError> {
        Ok(())
    }

    /// How a job's ranks wait for one another.
    fn policy(&self, number: u16) -> Policy;

    /// Changes that in one piece, unless it is not what it was: the data plane says from which chunk on it holds.
    fn replace_policy(&mut self, number: u16, from: Policy, to: Policy) -> bool;

    /// Stamps a rank's gain into the answers to it.
    ///
    /// # Errors
    /// If the table cannot be written.
    fn set_gains(&mut self, number: u16, gains: &[i8]) -> Result<(), EngineError>;

    /// What the data plane counted of each rank of a job.
    ///
    /// # Errors
    /// If a table cannot be read.
    fn records(&self, number: u16, entry: &JobEntry) -> Result<Vec<RankRecord>, EngineError>;

    /// How far a job is.
    ///
    /// # Errors
    /// If a table cannot be read.
    fn progress(&self, number: u16, entry: &JobEntry) -> Result<ProgressSnapshot, EngineError>;

    /// Slots of a job in use; none if that is too long to count.
    ///
    /// # Errors
    /// If a table cannot be read.
    fn slots_in_use(&self, entry: &JobEntry, min_ack: u32) -> Result<Option<u32>, EngineError>;

    /// What the data plane counted of a job that shares the pool.
    ///
    /// # Errors
    /// If a table cannot be read.
    fn share(&self, number: u16, entry: &JobEntry) -> Result<Share, EngineError>;

    /// Slots of the pool in use; estimated from a sample if they are many.
    ///
    /// # Errors
    /// If a table cannot be read.
    fn pool_in_use(&self) -> Result<u32, EngineError>;
}

impl Tables for Aggregator {
    fn install(&mut self, formation: &Formation) -> Result<(), EngineError> {
        Aggregator::install(self, formation)
    }

    fn write(&mut self, number: u16, entry: JobEntry) -> Result<(), EngineError> {
        self.write_job(number, &entry);
        Ok(())
    }

    fn unlink(&mut self, number: u16) -> Result<(), EngineError> {
        Aggregator::unlink(self, number)
    }

    fn policy(&self, number: u16) -> Policy {
        Aggregator::policy(self, number)
    }

    fn replace_policy(&mut self, number: u16, from: Policy, to: Policy) -> bool {
        Aggregator::replace_policy(self, number, from, to)
    }

    fn set_gains(&mut self, number: u16, gains: &[i8]) -> Result<(), EngineError> {
        Aggregator::set_gains(self, number, gains)
    }

    fn records(&self, number: u16, entry: &JobEntry) -> Result<Vec<RankRecord>, EngineError> {
        Aggregator::records(self, number, entry)
    }

    fn progress(&self, number: u16, entry: &JobEntry) -> Result<ProgressSnapshot, EngineError> {
        Aggregator::progress(self, number, entry)
    }

    fn slots_in_use(&self, entry: &JobEntry, min_ack: u32) -> Result<Option<u32>, EngineError> {
        Aggregator::slots_in_use(self, entry, min_ack)
    }

    fn share(&self, number: u16, entry: &JobEntry) -> Result<Share, EngineError> {
        Aggregator::share(self, number, entry)
    }

    fn pool_in_use(&self) -> Result<u32, EngineError> {
        Aggregator::pool_in_use(self)
    }
}

impl From<EngineError> for ControlError {
    fn from(error: EngineError) -> ControlError {
        ControlError::Tables(error.to_string())
    }
}
