//! The report that `paatp allreduce --report` writes, as far as the lab reads it.

use std::path::Path;

use anyhow::{Context, Result};
use paatp_common::Refusal;
use serde_json::Value;

use crate::job::CORRUPTIONS;

/// A worker's report.
#[derive(Clone, Debug, PartialEq)]
pub struct Report(pub Value);

impl Report {
    /// Reads a report.
    ///
    /// # Errors
    /// Where the file is missing or no JSON.
    pub fn read(path: &Path) -> Result<Report> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Report(serde_json::from_str(&text).with_context(|| format!("{} is no JSON", path.display()))?))
    }

    /// A number of the statistics, 0 where there is none of this name.
    #[must_use]
    pub fn statistic(&self, name: &str) -> u64 {
        self.0["statistics"][name].as_u64().unwrap_or(0)
    }

    /// How long the all-reduce took.
    #[must_use]
    pub fn seconds(&self) -> Option<f64> {
        self.0["seconds"].as_f64()
    }

    /// Answers that were refused because a bit of their header was wrong.
    #[must_use]
    pub fn corrupted_headers(&self) -> u64 {
        let headers = CORRUPTIONS.iter().filter(|refusal| **refusal != Refusal::BadTag);
        headers
            .map(|refusal| self.0["statistics"]["refused_answers"][refusal.name()].as_u64().unwrap_or(0))
            .sum()
    }

    /// Results that failed their check.
    #[must_use]
    pub fn corrupted_payloads(&self) -> u64 {
        self.statistic("failed_checks")
    }
}
