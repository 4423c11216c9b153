//! What a worker counts.

use paatp_common::Refusal;

/// Totals of one worker since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Datagrams sent.
    pub datagrams_sent: u64,
    /// Bytes in them, without IP and UDP headers.
    pub bytes_sent: u64,
    /// Datagrams received, useful or not.
    pub datagrams_received: u64,
    /// Bytes in them.
    pub bytes_received: u64,
    /// Contributions made: each chunk once.
    pub contributions: u64,
    /// Chunks that were complete before this rank came to them: nothing was sent.
    pub skipped: u64,
    /// Contributions that came too late for a quorum: given back to the next operation.
    pub excluded: u64,
    /// Of the contributions, header-only exponent rounds at the beginning of an operation: a round trip without chunks each.
    pub rounds: u64,
    /// Contributions sent again.
    pub retransmissions: u64,
    /// Requests for results without a contribution.
    pub pulls: u64,
    /// Of these, sent while only other ranks had work left.
    pub linger_pulls: u64,
    /// Results that passed their check and were delivered.
    pub results: u64,
    /// Results that were not wanted (any more): delivered before, or cut off by a failure. Checked all the same.
    pub duplicate_results: u64,
    /// Results that a switch copied for this rank, which had not asked.
    pub copied_results: u64,
    /// Contributions sent again because the partial sum of a switch that they were in did not reach the aggregator.
    pub reclaimed: u64,
    /// Results for chunks that are not known: older than what is retained, so that the payload **could not be checked**.
    pub unexpected_results: u64,
    /// Results that failed their check, wanted or not; never delivered.
    pub failed_checks: u64,
    /// Chunks whose redo this worker asked for.
    pub redos_asked: u64,
    /// Contributions repeated because a redo was announced or found.
    pub redos_joined: u64,
    /// Requests thought lost.
    pub losses: u64,
    /// Answers to requests that had been thought lost.
    pub late_answers: u64,
    /// Answers that said BUSY.
    pub busy: u64,
    /// Contributions that were damaged when they reached the aggregator.
    pub bad_tags: u64,
    /// Answers that echoed a congestion mark of their request.
    pub ecn_echoes: u64,
    /// Answers that were marked themselves, as far as the driver told.
    pub ecn_marks: u64,
    /// Answers that belong to another job, rank or generation.
    pub foreign_answers: u64,
    /// Answers that could not be read, by [`Refusal`] number; see [`Statistics::refused`].
    pub refused_answers: [u64; Refusal::COUNT],
    /// Smoothed round-trip time, in microseconds; 0 before the first sample.
    pub srtt_us: u64,
}

impl Statistics {
    /// How many answers could not be read for this reason.
    #[must_use]
    pub fn refused(&self, reason: Refusal) -> u64 {
        self.refused_answers.get(reason as usize).copied().unwrap_or(0)
    }

    pub(crate) fn refuse(&mut self, reason: Refusal) {
        if let Some(count) = self.refused_answers.get_mut(reason as usize) {
            *count += 1;
        }
    }
}
