//! An answer as a worker reads it.

use crate::counter::Refusal;
use crate::policy::Told;
use crate::seq::Seq;

use super::{Header, Kind, Redo, Status, flags};

/// The answer to a request, as a worker reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Job number.
    pub job: u16,
    /// Rank that is answered.
    pub worker: u8,
    /// Generation of the job.
    pub generation: u32,
    /// What became of the contribution to `seq`.
    pub status: Status,
    /// The request's chunk.
    pub seq: Seq,
    /// The request's number.
    pub token: u32,
    /// A switch says so: it has added the contribution, or copied a result. Of all else it knows nothing.
    pub by_switch: bool,
    /// The request met congestion.
    pub ecn_echo: bool,
    /// Lowest progress in the job.
    pub p_min: Seq,
    /// Highest progress in the job.
    pub p_max: Seq,
    /// The slowest rank.
    pub slowest: u8,
    /// Asynchronous window granted, in chunks.
    pub window: u16,
    /// Rate-control gain.
    pub gain: i8,
    /// Policy epoch of the result's slot, else of the job.
    pub epoch: u8,
    /// What is told of that policy.
    pub told: Told,
    /// Attempt of the result, or of the slot of `seq` without one.
    pub attempt: u8,
    /// The result, or the state of affairs.
    pub body: Body,
}

/// Second half of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// The payload is a result.
    Result {
        /// Its chunk.
        want: Seq,
        /// Contributors.
        bitmap: u64,
        /// Checksum, with the salts of all contributors.
        tag: u64,
        /// Lanes in the payload; 0 for header-only chunks.
        lanes: u16,
        /// Scale of the payload.
        exponent: i8,
        /// Scale agreed for the chunk one window later.
        next_exponent: i8,
        /// The rank whose gradient was not finite, if any.
        non_finite: Option<u8>,
    },
    /// No result.
    Pending {
        /// Lowest acknowledgement of the job's ranks.
        min_ack: Seq,
        /// Contributors so far in the slot of the wished-for chunk.
        bitmap: u64,
        /// Those are ranks of the root, each of which may stand for many.
        above: bool,
        /// A chunk that is being redone.
        redo: Option<Redo>,
        /// Lanes of the wished-for chunk, if its result stands: a request as long as that gets it.
        lanes: u16,
    },
}

impl Answer {
    /// Reads an answer.
    ///
    /// # Errors
    /// Why the header cannot be one.
    pub fn decode(header: &Header) -> Result<Answer, Refusal> {
        header.check()?;
        let (Some(Kind::Answer), Some(status)) = (header.kind(), Status::from_wire(header.status())) else {
            return Err(Refusal::BadKind);
        };
        let body = if header.has(flags::RESULT) {
            Body::Result {
                want: header.want(),
                bitmap: header.bitmap(),
                tag: header.tag(),
                lanes: if header.has(flags::PAYLOAD) { header.lanes() } else { 0 },
                exponent: header.exponent(),
                next_exponent: header.next_exponent(),
                non_finite: header.has(flags::NON_FINITE).then_some(header.rank()),
            }
        } else {
            Body::Pending {
                min_ack: header.want(),
                bitmap: header.bitmap(),
                above: header.has(flags::ABOVE),
                redo: header.has(flags::REDO).then(|| Redo::from_word(header.tag())),
                lanes: header.lanes(),
            }
        };
        Ok(Answer {
            job: header.job(),
            worker: header.worker(),
            generation: header.generation(),
            status,
            seq: header.seq(),
            token: header.token(),
            by_switch: header.has(flags::PARTIAL),
            ecn_echo: header.has(flags::ECN_ECHO),
            p_min: Seq(header.raw_ack()),
            p_max: Seq(header.raw_progress()),
            slowest: header.rank(),
            window: header.window(),
            gain: header.gain(),
            epoch: header.operation_or_epoch(),
            told: Told(header.told()),
            attempt: header.attempt(),
            body,
        })
    }
}
