//! Looking at a running aggregator from a terminal: [`status`] prints, [`top`] stays. Both show what `GET /v1/status` says.

pub mod past;
pub mod status;
pub mod top;
pub mod words;

#[cfg(test)]
pub(crate) mod sample;

use std::path::PathBuf;

use clap::Args;

use crate::cli::{Credentials, maybe_file};
use crate::client::job::{Api, JobError};
use crate::telemetry::history::Series;
use crate::telemetry::snapshot::Snapshot;

/// Where to look.
#[derive(Clone, Debug, Args)]
pub struct Target {
    /// Address of the aggregator's control server.
    #[arg(
        long,
        value_name = "ADDR[:PORT]",
        env = "PAATP_CONTROL",
        hide_env_values = true,
        default_value = "127.0.0.1"
    )]
    pub control: String,
    /// Speak TLS to the aggregator, whose certificate must be signed by one in this PEM file.
    #[arg(long, value_name = "FILE.pem", env = "PAATP_TLS_CA", hide_env_values = true, value_parser = maybe_file())]
    pub tls_ca: Option<PathBuf>,
}

/// Sees one aggregator. Seeing needs no token.
pub struct Eyes(Api);

impl Eyes {
    /// Resolves the address and reads the certificates.
    ///
    /// # Errors
    /// If one cannot be used.
    pub fn open(target: &Target) -> Result<Eyes, JobError> {
        let credentials = Credentials { token_file: None, tls_ca: target.tls_ca.clone() };
        Api::open(&target.control, &credentials, false).map(Eyes)
    }

    /// Where it looks.
    #[must_use]
    pub fn place(&self) -> String {
        self.0.place()
    }

    /// The node, now.
    ///
    /// # Errors
    /// If it does not answer, or not with that.
    pub fn snapshot(&self) -> Result<Snapshot, JobError> {
        self.0.get("/v1/status")
    }

    /// The last minutes of a job, from a sample on.
    ///
    /// # Errors
    /// As [`Eyes::snapshot`], or if there is no such job.
    pub fn series(&self, job: &str, since: u64) -> Result<Series, JobError> {
        self.0.get(&format!("/v1/history?job={}&since={since}", crate::client::escape(job)))
    }
}
