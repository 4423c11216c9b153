//! What a run is worth knowing afterwards, for programs.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use paatp_common::{Refusal, Staleness};
use paatp_transport::words::Span;
use paatp_transport::{Statistics, Synchronisation};
use serde::Serialize;

use super::io::IoReport;

/// Version of [`Report`].
pub const SCHEMA_VERSION: u32 = 1;

/// Report of one all-reduce.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Name of the job.
    pub job: String,
    /// This rank.
    pub rank: u8,
    /// Number of ranks, at this rank's aggregator where all ranks of a node are one rank of its parent's job.
    pub world: u8,
    /// Number of ranks of all nodes, over which sums and means are.
    pub total: u16,
    /// Generation of the membership.
    pub generation: u32,
    /// What was computed.
    pub reduction: String,
    /// Number of tensors.
    pub tensors: usize,
    /// Elements of all tensors.
    pub elements: u64,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    /// Chunks, exponent rounds included.
    pub chunks: u64,
    /// Bytes sent, without IP and UDP headers.
    pub bytes_sent: u64,
    /// Bytes received, without IP and UDP headers.
    pub bytes_received: u64,
    /// From the first packet until every rank had its last result, or the wait for that was over.
    pub seconds: f64,
    /// Bytes of all tensors, divided by these seconds.
    pub throughput_bytes_per_second: f64,
    /// SHA-256 of all result tensors' bytes in the file's order.
    pub sha256: String,
    /// Every rank had everything when this one left.
    pub all_ranks_complete: bool,
    /// How ranks waited for one another.
    pub synchronisation: SynchronisationReport,
    /// How packets were sent and received.
    pub io: IoReport,
    /// All that the transport counted; `paatp_transport::Statistics` says what each name means.
    pub statistics: StatisticsReport,
}

/// How ranks waited for one another in the operation: the same at every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SynchronisationReport {
    /// Number of the policy; counts round.
    pub epoch: u8,
    /// Iterations that ranks may be ahead of results; none: without a bound.
    pub staleness: Option<u8>,
    /// Chunks may have been complete without all ranks.
    pub partial: bool,
}

impl From<Synchronisation> for SynchronisationReport {
    fn from(synchronisation: Synchronisation) -> SynchronisationReport {
        let Synchronisation { epoch, told } = synchronisation;
        let staleness = match told.staleness() {
            Staleness::Bounded(most) => Some(most),
            Staleness::Unbounded => None,
        };
        SynchronisationReport { epoch, staleness, partial: told.is_partial() }
    }
}

/// The transport's statistics, by name.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StatisticsReport {
    /// Plain counts.
    #[serde(flatten)]
    pub counts: BTreeMap<&'static str, u64>,
    /// Answers that could not be read, by reason.
    pub refused_answers: BTreeMap<&'static str, u64>,
}

impl Report {
    /// The one line for people.
    #[must_use]
    pub fn in_words(&self, output: &Path) -> String {
        let plural = if self.tensors == 1 { "" } else { "s" };
        let all = if self.total == u16::from(self.world) {
            String::new()
        } else {
            format!(" ({} in all)", self.total)
        };
        format!(
            "job `{}`, rank {} of {}{all}: the {} of {} tensor{plural} ({} elements, {}) took {} ({}/s) over {}; written to {}, \
             sha256 of the values {}",
            self.job,
            self.rank,
            self.world,
            self.reduction,
            self.tensors,
            self.elements,
            bytes_in_words(self.tensor_bytes as f64),
            Span(Duration::from_secs_f64(self.seconds)),
            bytes_in_words(self.throughput_bytes_per_second),
            self.io.in_words(),
            output.display(),
            self.sha256
        )
    }
}

/// Bytes with three digits or so: "12 bytes", "4.1 kB", "230 MB".
fn bytes_in_words(bytes: f64) -> String {
    let mut value = bytes;
    for unit in ["bytes", "kB", "MB", "GB"] {
        if value < 999.5 {
            return match unit {
                "bytes" => format!("{value:.0} {unit}"),
                _ if value < 9.95 => format!("{value:.1} {unit}"),
                _ => format!("{value:.0} {unit}"),
            };
        }
        value /= 1000.0;
    }
    format!("{value:.1} TB")
}

impl From<&Statistics> for StatisticsReport {
    fn from(statistics: &Statistics) -> StatisticsReport {
        // Named one by one, so that a new field is a compile error here and not a gap in reports.
        let Statistics {
            datagrams_sent,
            bytes_sent,
            datagrams_received,
            bytes_received,
            contributions,
            skipped,
            excluded,
            rounds,
            retransmissions,
            pulls,
            linger_pulls,
            results,
            duplicate_results,
            copied_results,
            reclaimed,
            unexpected_results,
            failed_checks,
            redos_asked,
            redos_joined,
            losses,
            late_answers,
            busy,
            bad_tags,
            ecn_echoes,
            ecn_marks,
            foreign_answers,
            refused_answers: _,
            srtt_us,
        } = *statistics;
        let counts = BTreeMap::from([
            ("datagrams_sent", datagrams_sent),
            ("bytes_sent", bytes_sent),
            ("datagrams_received", datagrams_received),
            ("bytes_received", bytes_received),
            ("contributions", contributions),
            ("skipped", skipped),
            ("excluded", excluded),
            ("rounds", rounds),
            ("retransmissions", retransmissions),
            ("pulls", pulls),
            ("linger_pulls", linger_pulls),
            ("results", results),
            ("duplicate_results", duplicate_results),
            ("copied_results", copied_results),
            ("reclaimed", reclaimed),
            ("unexpected_results", unexpected_results),
            ("failed_checks", failed_checks),
            ("redos_asked", redos_asked),
            ("redos_joined", redos_joined),
            ("losses", losses),
            ("late_answers", late_answers),
            ("busy", busy),
            ("bad_tags", bad_tags),
            ("ecn_echoes", ecn_echoes),
            ("ecn_marks", ecn_marks),
            ("foreign_answers", foreign_answers),
            ("srtt_us", srtt_us),
        ]);
        let refused = Refusal::ALL.iter().map(|reason| (reason.name(), statistics.refused(*reason)));
        StatisticsReport { counts, refused_answers: refused.filter(|(_, count)| *count > 0).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_sensible_digits() {
        for (bytes, words) in [
            (0.0, "0 bytes"),
            (999.0, "999 bytes"),
            (999.7, "1.0 kB"),
            (4_096.0, "4.1 kB"),
            (9_960.0, "10 kB"),
            (229_600_000.0, "230 MB"),
            (1.25e9, "1.2 GB"),
            (3e12, "3.0 TB"),
        ] {
            assert_eq!(bytes_in_words(bytes), words);
        }
    }

    #[test]
    fn the_line_for_people_says_what_took_how_long() {
        let report = Report {
            schema_version: SCHEMA_VERSION,
            job: "train".into(),
            rank: 1,
            world: 4,
            total: 4,
            generation: 7,
            reduction: "mean".into(),
            tensors: 1,
            elements: 1000,
            tensor_bytes: 4000,
            chunks: 4,
            bytes_sent: 0,
            bytes_received: 0,
            seconds: 0.040_2,
            throughput_bytes_per_second: 99_500.0,
            sha256: "ab".into(),
            all_ranks_complete: true,
            synchronisation: SynchronisationReport::default(),
            io: IoReport { driver: "udp", mode: "segmented", ..IoReport::default() },
            statistics: StatisticsReport::default(),
        };
        assert_eq!(
            report.in_words(Path::new("out.safetensors")),
            "job `train`, rank 1 of 4: the mean of 1 tensor (1000 elements, 4.0 kB) took 40 ms (100 kB/s) over UDP; \
             written to out.safetensors, sha256 of the values ab"
        );
        // Of a node that is one rank of its parent's.
        let words = Report { total: 88, ..report }.in_words(Path::new("out.safetensors"));
        assert!(words.starts_with("job `train`, rank 1 of 4 (88 in all): the mean"), "{words}");
    }
}
