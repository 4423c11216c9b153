//! Why an operation failed: what, why, and what to do.

use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use paatp_common::Refusal;

use crate::words::{Peer, Ranks, Span};

/// Why an operation failed. After any of these the job's generation is over for this worker, and later operations fail
/// with [`OperationError::Over`].
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum OperationError {
    /// This rank's own values hold NaN or infinity.
    #[error(
        "tensor '{tensor}' holds {value} at index {index}, which has no sum; look for a diverged loss or skip this step on all ranks"
    )]
    NonFinite {
        /// Name of the tensor.
        tensor: String,
        /// Index of the first such element.
        index: usize,
        /// The element.
        value: f32,
    },
    /// Another rank reported values that cannot be reduced.
    #[error(
        "{} reported NaN, infinity or an integer out of range in this operation, at or after tensor '{tensor}'; see that rank's error for the element",
        Peer(*.rank, *.among)
    )]
    PeerNonFinite {
        /// The rank, or the first of those among whom it is.
        rank: u16,
        /// How many those are: 1, if a bit of the result stands for one rank.
        among: u16,
        /// Tensor in which the chunks that it may be in begin.
        tensor: String,
    },
    /// This rank's integer is too large to be added without overflow.
    #[error(
        "tensor '{tensor}' holds {value} at index {index}: integers must be below {limit} in magnitude so that no sum over all ranks overflows; scale them down"
    )]
    IntegerRange {
        /// Name of the tensor.
        tensor: String,
        /// Index of the first such element.
        index: usize,
        /// The element.
        value: i32,
        /// First magnitude that is too large.
        limit: u32,
    },
    /// The result is finite but too large for the tensor's type. All ranks get this error alike.
    #[error(
        "the result for tensor '{tensor}' at index {index} does not fit its type; scale the values down, or use 'mean' or a wider type"
    )]
    ResultRange {
        /// Name of the tensor.
        tensor: String,
        /// Index of the first such element in the chunk.
        index: usize,
    },
    /// Some ranks did not contribute in time.
    #[error(
        "no chunk was completed for {}: {} did not contribute to tensor '{tensor}'; see whether they still run and reach the aggregator",
        Span(*.waited),
        Ranks(.missing)
    )]
    Timeout {
        /// The ranks.
        missing: Vec<u16>,
        /// Tensor of the chunk that was waited for.
        tensor: String,
        /// How long no chunk was completed.
        waited: Duration,
    },
    /// Nothing came back from the aggregator, or nothing that helps.
    #[error(
        "the aggregator sent nothing usable for {}; see whether 'paatp run' is up, and whether UDP to its ports passes in both directions; 'paatp doctor IFACE' beside it finds what keeps answers from arriving",
        Span(*.waited)
    )]
    NoAnswer {
        /// How long.
        waited: Duration,
    },
    /// This rank's payloads do not reach the aggregator intact.
    #[error(
        "payloads are damaged between this rank and the aggregator: it refused this rank's values of tensor '{tensor}' {refusals} times in a row because their checksum was wrong; on both hosts and the switch look for errors in 'ethtool -S', switch off the NIC's offloads ('ethtool -K'), change cable or transceiver, then join the job again"
    )]
    DamagedOnTheWay {
        /// Tensor of the chunk.
        tensor: String,
        /// Refusals in a row.
        refusals: u8,
    },
    /// The results of a chunk failed their check however often it was computed anew.
    #[error(
        "payloads are damaged between the aggregator and this rank, or in the aggregator's memory: {failures} results in a row for tensor '{tensor}' had a wrong checksum; if other ranks report the same, suspect the aggregator's memory, else look for errors in 'ethtool -S', switch off the NIC's offloads ('ethtool -K'), change cable or transceiver; then join the job again"
    )]
    DamagedResults {
        /// Tensor of the chunk.
        tensor: String,
        /// Failed checks in a row.
        failures: u8,
    },
    /// The job has a new generation.
    #[error(
        "the job has begun anew without this rank: its membership is of an older generation; join the job again and restart from the last checkpoint"
    )]
    Rejoin,
    /// The job cannot go on.
    #[error("the aggregator aborted the job at tensor '{tensor}': {} Other side: {}. Make all ranks issue the same operations, then join again", reason.sentence(), Ranks(ranks))]
    Aborted {
        /// Why.
        reason: Refusal,
        /// Ranks whose contributions this rank's disagrees with.
        ranks: Vec<u16>,
        /// Tensor of the chunk.
        tensor: String,
    },
    /// A result has to be computed anew, which a rank that is gone would have to contribute to.
    #[error(
        "the result of chunk {chunk} (tensor '{tensor}') was damaged and cannot be computed anew: {} contributed to it and {} been lost since; join the job again and restart from the last checkpoint",
        Ranks(ranks),
        if ranks.len() == 1 { "has" } else { "have" }
    )]
    RedoLacksRanks {
        /// The ranks.
        ranks: Vec<u16>,
        /// Tensor of the chunk.
        tensor: String,
        /// Its number.
        chunk: u32,
    },
    /// There is no generation to run in.
    #[error("the operation was not run: an earlier one failed, or the worker has left; join the job again")]
    Over,
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn sentences_name_the_ranks() {
        let missing = [1, 3].into();
        let error = OperationError::Timeout { missing, tensor: "w".into(), waited: Duration::from_secs(2) };
        assert!(error.to_string().contains("for 2 s: ranks 1 and 3 did not contribute to tensor 'w'"));
        let error =
            OperationError::Aborted { reason: Refusal::Mismatch, ranks: [2].into(), tensor: "w".into() };
        assert!(error.to_string().contains("Other side: rank 2."));
        let error = OperationError::RedoLacksRanks { ranks: [2].into(), tensor: "w".into(), chunk: 7 };
        assert!(error.to_string().contains("chunk 7 (tensor 'w')"));
        assert!(error.to_string().contains("rank 2 contributed to it and has been lost"));
    }
}
