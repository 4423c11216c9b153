//! Who waits for whom: a pure function over a job's snapshot.

use std::time::Duration;

use paatp_transport::words::{Ranks, Span};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::snapshot::{JobSnapshot, RankState};

/// Ranks wait for one another all the time. Whoever waits for longer than this is held up: many round trips, and several
/// turns of the loop that looks.
pub const STALL_AFTER: Duration = Duration::from_secs(1);

/// Ranks hold a job up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Stall {
    /// The job.
    pub job: String,
    /// Who is waited for.
    pub missing_ranks: Vec<u8>,
    /// For how long, in seconds.
    pub seconds: f64,
    /// How far the slowest of them is behind the first rank, in chunks. 0 if they have not even joined.
    pub chunks_behind: u32,
    /// All of this in words.
    pub sentence: String,
}

/// Who holds a job up, if anybody has for longer than [`STALL_AFTER`].
#[must_use]
pub fn find(job: &JobSnapshot) -> Option<Stall> {
    let stall = running(job).or_else(|| forming(job))?;
    (stall.seconds >= STALL_AFTER.as_secs_f64()).then_some(stall)
}

/// Ranks that the others wait for, be it for a moment. A rank may be a window ahead of the sums that it has; whoever is
/// first can so get a window ahead of the slowest. One that is half a window behind makes the others wait; less is
/// the usual to and fro.
#[must_use]
pub fn stragglers(job: &JobSnapshot) -> Vec<u8> {
    let window = u32::from(job.status.window);
    let is_far_behind = |lag: u32| lag > 0 && lag.saturating_mul(2) >= window;
    let behind = job.ranks.iter().filter(|rank| rank.state == RankState::Member);
    let mut ranks: Vec<u8> =
        behind.filter(|rank| is_far_behind(rank.lag_chunks)).map(|rank| rank.rank).collect();
    ranks.extend(job.stall.iter().flat_map(|stall| &stall.missing_ranks));
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

fn words(seconds: f64) -> Span {
    Span(Duration::try_from_secs_f64(seconds).unwrap_or_default())
}

fn chunks(count: u32) -> String {
    if count == 1 { "1 chunk".into() } else { format!("{count} chunks") }
}

/// Members of a generation that keep the others from going on.
fn running(job: &JobSnapshot) -> Option<Stall> {
    job.status.generation?;
    let ranks: Vec<_> = job.ranks.iter().filter_map(|r| Some((r.rank, r.in_the_way_seconds?))).collect();
    let open = job.oldest_open_slot.as_ref().filter(|open| !open.missing_ranks.is_empty());
    // A slot that waits names everybody it waits for. Without one the ring is full of results that nobody lets go of.
    let (missing_ranks, seconds, what) = match open {
        Some(open) => (open.missing_ranks.clone(), open.age_seconds, "contributions"),
        None => {
            let longest = ranks.iter().map(|(_, seconds)| *seconds).reduce(f64::max)?;
            (ranks.iter().map(|(rank, _)| *rank).collect(), longest, "acknowledgements")
        }
    };
    let behind = missing_ranks.iter().filter_map(|rank| Some(job.ranks.get(usize::from(*rank))?.lag_chunks));
    let chunks_behind = behind.max().unwrap_or(0);
    let sentence = format!(
        "job `{}` waits for {what} of {} for {}, {} behind",
        job.status.name,
        Ranks(&missing_ranks),
        words(seconds),
        chunks(chunks_behind)
    );
    Some(Stall { job: job.status.name.clone(), missing_ranks, seconds, chunks_behind, sentence })
}

/// Ranks that have not joined although others wait.
fn forming(job: &JobSnapshot) -> Option<Stall> {
    let seconds = job.forming_seconds?;
    let missing = job.ranks.iter().filter(|rank| rank.state == RankState::Missing);
    let missing_ranks: Vec<u8> = missing.map(|rank| rank.rank).collect();
    let waiting = job.status.waiting_ranks.len();
    let sentence = format!(
        "job `{}` waits for {} to join for {}; {waiting} of {} have joined",
        job.status.name,
        Ranks(&missing_ranks),
        words(seconds),
        job.status.world,
    );
    Some(Stall { job: job.status.name.clone(), missing_ranks, seconds, chunks_behind: 0, sentence })
}
