//! What a run is worth knowing afterwards, for programs.

use std::collections::BTreeMap;

use paatp_common::Refusal;
use paatp_transport::Statistics;
use serde::Serialize;

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
    /// Number of ranks.
    pub world: u8,
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
    /// From the first packet to the last result at every rank.
    pub seconds: f64,
    /// Tensor bytes by these seconds.
    pub throughput_bytes_per_second: f64,
    /// SHA-256 of all result tensors' bytes in the file's order.
    pub sha256: String,
    /// Every rank had everything when this one left.
    pub all_ranks_complete: bool,
    /// All that the transport counted.
    pub statistics: StatisticsReport,
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

impl From<&Statistics> for StatisticsReport {
    fn from(statistics: &Statistics) -> StatisticsReport {
        // Named one by one, so that a new field is a compile error here and not a gap in reports.
        let Statistics {
            datagrams_sent,
            bytes_sent,
            datagrams_received,
            bytes_received,
            contributions,
            retransmissions,
            pulls,
            linger_pulls,
            results,
            duplicate_results,
            unexpected_results,
            failed_checks,
            redos_asked,
            redos_joined,
            losses,
            late_answers,
            busy,
            bad_tags,
            ecn_echoes,
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
            ("retransmissions", retransmissions),
            ("pulls", pulls),
            ("linger_pulls", linger_pulls),
            ("results", results),
            ("duplicate_results", duplicate_results),
            ("unexpected_results", unexpected_results),
            ("failed_checks", failed_checks),
            ("redos_asked", redos_asked),
            ("redos_joined", redos_joined),
            ("losses", losses),
            ("late_answers", late_answers),
            ("busy", busy),
            ("bad_tags", bad_tags),
            ("ecn_echoes", ecn_echoes),
            ("foreign_answers", foreign_answers),
            ("srtt_us", srtt_us),
        ]);
        let refused = Refusal::ALL.iter().map(|reason| (reason.name(), statistics.refused(*reason)));
        StatisticsReport { counts, refused_answers: refused.filter(|(_, count)| *count > 0).collect() }
    }
}
