//! The 64-byte header of PA-ATP, version 1, in network byte order. `docs/protocol.md` has the same table.
//!
//! [`Header`] is a view over bytes with infallible getters; [`Header::check`] says whether it may be believed.
//! [`Request`] and [`Answer`] are the parsed forms that workers build and read.

use bytemuck::{Pod, Zeroable};

use crate::counter::Refusal;
use crate::layout::described;
use crate::seq::Seq;
use crate::tag::{self, CHECKED_HEADER_WORDS};

/// First two bytes of every packet: "PA".
pub const MAGIC: u16 = 0x5041;
/// The version this code speaks.
pub const VERSION: u8 = 1;
/// Bytes of a header.
pub const HEADER_BYTES: usize = 64;

/// What a packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A contribution to `seq` that also wishes for the result of `want`.
    Data = 1,
    /// A wish for the result of `want`.
    Pull = 2,
    /// The answer to either.
    Answer = 8,
}

mod answer;
pub mod flags;
mod turn;
pub use answer::{Answer, Body};
pub use turn::{Saying, Turn};

/// What became of a request's contribution; of a PULL, why no result came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// The contribution is in its slot (just added, or before).
    Ok = 0,
    /// PULL: the chunk is not complete yet.
    NotYet = 1,
    /// The ring has no room for this chunk yet: send it again later.
    Busy = 2,
    /// Every rank has acknowledged this chunk already.
    Stale = 3,
    /// The generation is over: ask the control plane (never adopt a generation from a packet).
    Rejoin = 4,
    /// The job cannot go on: the attempt field holds the number of the [`Refusal`] that says why, and without a result
    /// the bitmap the ranks that the sender disagrees with.
    Aborted = 5,
    /// `lanes` is not what this chunk has.
    BadLength = 6,
    /// A partial sum overlapped with what is there.
    Conflict = 7,
    /// The chunk is being redone: send the contribution again under the answer's attempt.
    OldAttempt = 8,
    /// The chunk was completed without this contribution (quorum).
    NotIncluded = 9,
    /// The payload failed its check on arrival: send it again.
    BadTag = 10,
}

impl Status {
    /// The status with this number.
    #[must_use]
    pub const fn from_wire(value: u8) -> Option<Status> {
        Some(match value {
            0 => Status::Ok,
            1 => Status::NotYet,
            2 => Status::Busy,
            3 => Status::Stale,
            4 => Status::Rejoin,
            5 => Status::Aborted,
            6 => Status::BadLength,
            7 => Status::Conflict,
            8 => Status::OldAttempt,
            9 => Status::NotIncluded,
            10 => Status::BadTag,
            _ => return None,
        })
    }
}

/// What is computed over the ranks' contributions to a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Operation {
    /// Nothing: header-only packets that complete when all are there.
    Barrier = 0,
    /// Header-only packets that agree on the exponent of an operation's first window.
    Exponents = 1,
    /// Lane-wise sum.
    Sum = 2,
    /// Sum, divided by the number of contributors at the receiver.
    Mean = 3,
    /// Lane-wise maximum of order-preserving keys.
    Max = 4,
    /// Maximum of the complemented keys.
    Min = 5,
    /// The root's payload; the others' packets are header-only.
    Broadcast = 6,
}

impl Operation {
    /// The operation with this number.
    #[inline(always)]
    #[must_use]
    pub const fn from_wire(value: u8) -> Option<Operation> {
        Some(match value {
            0 => Operation::Barrier,
            1 => Operation::Exponents,
            2 => Operation::Sum,
            3 => Operation::Mean,
            4 => Operation::Max,
            5 => Operation::Min,
            6 => Operation::Broadcast,
            _ => return None,
        })
    }

    /// Payloads combine by maximum instead of by addition.
    #[inline(always)]
    #[must_use]
    pub const fn takes_maximum(self) -> bool {
        matches!(self, Operation::Max | Operation::Min)
    }

    /// No packet of this operation carries a payload.
    #[inline(always)]
    #[must_use]
    pub const fn is_header_only(self) -> bool {
        matches!(self, Operation::Barrier | Operation::Exponents)
    }

    /// The operation needs every rank, whatever the job's quorum (protocol-rules part 2.6).
    #[inline(always)]
    #[must_use]
    pub const fn needs_all(self) -> bool {
        matches!(self, Operation::Barrier | Operation::Exponents | Operation::Broadcast)
    }
}

/// Type of the values that a chunk's lanes stand for. The aggregator only compares it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ElementType {
    /// IEEE 754 binary32.
    F32 = 0,
    /// IEEE 754 binary16.
    F16 = 1,
    /// bfloat16.
    Bf16 = 2,
    /// 32-bit two's complement integers.
    I32 = 3,
}

impl ElementType {
    /// Every type.
    pub const ALL: [ElementType; 4] =
        [ElementType::F32, ElementType::F16, ElementType::Bf16, ElementType::I32];
}

/// What all ranks must agree on for one chunk: refused where it differs, and bound into the salt, all but the root.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Chunk {
    /// [`EVERYBODY`] in the highest bit, [`Operation`] in the next three, [`ElementType`] in the lower four.
    pub operation_and_type: u8,
    /// Lanes of the chunk, 0 for header-only operations.
    pub lanes: u16,
    /// Exponent of the block's scale, see the transport's quantiser.
    pub exponent: i8,
    /// Rank whose payload a broadcast hands out; 0 otherwise.
    pub root: u8,
}

/// Set in [`Chunk::operation_and_type`]: every rank must contribute, whatever the job's quorum.
pub const EVERYBODY: u8 = 1 << 7;

impl Chunk {
    /// A chunk's identity from its parts.
    #[must_use]
    pub const fn new(operation: Operation, element: ElementType, lanes: u16, exponent: i8) -> Chunk {
        Chunk { operation_and_type: (operation as u8) << 4 | element as u8, lanes, exponent, root: 0 }
    }

    /// The operation, unless the number is unknown.
    #[inline(always)]
    #[must_use]
    pub const fn operation(self) -> Option<Operation> {
        Operation::from_wire((self.operation_and_type & !EVERYBODY) >> 4)
    }

    /// Its payload is one rank's.
    #[inline(always)]
    #[must_use]
    pub const fn is_broadcast(self) -> bool {
        matches!(self.operation(), Some(Operation::Broadcast))
    }

    /// Every rank must contribute, whatever the job's quorum: by the operation, or because the ranks want it.
    #[inline(always)]
    #[must_use]
    pub const fn needs_all(self) -> bool {
        self.needs_all_as_number() != 0
    }

    /// The same as 0 or 1, without a branch.
    #[inline(always)]
    pub(crate) const fn needs_all_as_number(self) -> u8 {
        const NEED_ALL: u8 = 1 << Operation::Barrier as u8
            | 1 << Operation::Exponents as u8
            | 1 << Operation::Broadcast as u8
            | 1 << 7;
        let operation = (self.operation_and_type & !EVERYBODY) >> 4;
        self.operation_and_type >> 7 | NEED_ALL >> operation & 1
    }
}

/// A chunk that is being redone, as answers without a result announce it (protocol-rules F1 iii).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Redo {
    /// The chunk.
    pub seq: Seq,
    /// The attempt that contributions must carry.
    pub attempt: u8,
}

impl Redo {
    /// As the tag field of an answer carries it.
    #[inline(always)]
    #[must_use]
    pub const fn to_word(self) -> u64 {
        (self.seq.0 as u64) << 32 | self.attempt as u64
    }

    /// From an answer's tag field.
    #[inline(always)]
    #[must_use]
    pub const fn from_word(word: u64) -> Redo {
        Redo { seq: Seq((word >> 32) as u32), attempt: word as u8 }
    }
}

/// The header as it travels. All fields are byte arrays in network order: no alignment, no padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Header {
    magic: [u8; 2],
    version_and_kind: u8,
    flags: u8,
    job: [u8; 2],
    worker: u8,
    status: u8,
    generation: [u8; 4],
    seq: [u8; 4],
    want: [u8; 4],
    ack: [u8; 4],
    progress: [u8; 4],
    token: [u8; 4],
    bitmap: [u8; 8],
    tag: [u8; 8],
    lanes: [u8; 2],
    told: u8,
    contributors: u8,
    exponent: u8,
    next_exponent: u8,
    window: [u8; 2],
    rank: u8,
    gain: u8,
    attempt: u8,
    operation_or_epoch: u8,
    check: [u8; 4],
}

const _: () = assert!(size_of::<Header>() == HEADER_BYTES && align_of::<Header>() == 1);
described!(Header {
    magic,
    version_and_kind,
    flags,
    job,
    worker,
    status,
    generation,
    seq,
    want,
    ack,
    progress,
    token,
    bitmap,
    tag,
    lanes,
    told,
    contributors,
    exponent,
    next_exponent,
    window,
    rank,
    gain,
    attempt,
    operation_or_epoch,
    check,
});

impl Header {
    /// The header at the beginning of a datagram; `None` where that is shorter than one.
    #[must_use]
    pub fn of(datagram: &[u8]) -> Option<&Header> {
        datagram.get(..HEADER_BYTES).map(bytemuck::from_bytes)
    }

    /// As [`Header::of`], to write.
    pub fn of_mut(datagram: &mut [u8]) -> Option<&mut Header> {
        datagram.get_mut(..HEADER_BYTES).map(bytemuck::from_bytes_mut)
    }

    /// The fields with their offsets, in order: the program of a switch is made from it.
    pub const FIELDS: &'static [(&'static str, usize)] = Header::DESCRIBED.fields;

    /// The header as bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; HEADER_BYTES] {
        bytemuck::cast_ref(self)
    }

    #[inline(always)]
    const fn words(&self) -> &[[u8; 4]; CHECKED_HEADER_WORDS + 1] {
        // SAFETY: both are 64 bytes of any value, without alignment.
        unsafe { &*(&raw const *self).cast() }
    }

    #[inline(always)]
    const fn words_mut(&mut self) -> &mut [[u8; 4]; CHECKED_HEADER_WORDS + 1] {
        // SAFETY: as above.
        unsafe { &mut *(&raw mut *self).cast() }
    }

    #[inline(always)]
    const fn word<const WORD: usize>(&self) -> u64 {
        u32::from_be_bytes(self.words()[WORD]) as u64
    }

    /// Magic, version and check are right.
    ///
    /// # Errors
    /// The first refusal that applies, in that order.
    #[inline(always)]
    pub fn check(&self) -> Result<(), Refusal> {
        if self.magic != MAGIC.to_be_bytes() {
            return Err(Refusal::BadMagic);
        }
        if self.version_and_kind >> 4 != VERSION {
            return Err(Refusal::BadVersion);
        }
        if self.computed_check() != u32::from_be_bytes(self.check) {
            return Err(Refusal::BadHeaderCheck);
        }
        Ok(())
    }

    #[inline(always)]
    fn computed_check(&self) -> u32 {
        let (covered, _) = self.words().split_first_chunk().unwrap_or((&[[0; 4]; CHECKED_HEADER_WORDS], &[]));
        tag::header_check(covered)
    }

    /// Writes the check over the other fields.
    #[inline(always)]
    pub fn seal(&mut self) {
        self.check = self.computed_check().to_be_bytes();
    }

    /// The kind, unless unknown.
    #[inline(always)]
    #[must_use]
    pub const fn kind(&self) -> Option<Kind> {
        Some(match self.version_and_kind & 0x0F {
            1 => Kind::Data,
            2 => Kind::Pull,
            8 => Kind::Answer,
            _ => return None,
        })
    }
}

/// Getters and setters of plain fields.
macro_rules! fields {
    ($($(#[$doc:meta])* $get:ident, $set:ident: $int:tt = $field:ident;)*) => {
        impl Header {
            $(
                $(#[$doc])*
                #[inline(always)]
                #[must_use]
                pub const fn $get(&self) -> $int { fields!(@get self, $field, $int) }

                /// Sets the field; [`Header::seal`] afterwards.
                #[inline(always)]
                pub const fn $set(&mut self, value: $int) { fields!(@set self, $field, $int, value) }
            )*
        }
    };
    (@get $s:ident, $f:ident, u8) => { $s.$f };
    (@get $s:ident, $f:ident, i8) => { $s.$f as i8 };
    (@get $s:ident, $f:ident, $int:tt) => { $int::from_be_bytes($s.$f) };
    (@set $s:ident, $f:ident, u8, $v:ident) => { $s.$f = $v };
    (@set $s:ident, $f:ident, i8, $v:ident) => { $s.$f = $v as u8 };
    (@set $s:ident, $f:ident, $int:tt, $v:ident) => { $s.$f = $v.to_be_bytes() };
}

fields! {
    /// Bits of [`flags`].
    flags, set_flags: u8 = flags;
    /// Job number on its aggregator.
    job, set_job: u16 = job;
    /// Rank of the worker that sent the request.
    worker, set_worker: u8 = worker;
    /// [`Status`] of an answer.
    status, set_status: u8 = status;
    /// Incarnation of the job's membership.
    generation, set_generation: u32 = generation;
    /// Chunk that a DATA contributes to.
    raw_seq, set_raw_seq: u32 = seq;
    /// Request: chunk whose result is wished for. Answer: chunk of the payload, or min_ack without one.
    raw_want, set_raw_want: u32 = want;
    /// Request: all results below have arrived. Answer: lowest progress of the job.
    raw_ack, set_raw_ack: u32 = ack;
    /// Request: chunks contributed so far. Answer: highest progress of the job.
    raw_progress, set_raw_progress: u32 = progress;
    /// Opaque number of a request, echoed: matches answers to requests, for RTT and loss detection.
    token, set_token: u32 = token;
    /// Contributors: in the payload, or so far in the slot of `want` where there is no result.
    bitmap, set_bitmap: u64 = bitmap;
    /// Linear checksum with salts, see [`crate::tag`]; in an answer without a result the [`Redo`] word.
    tag, set_tag: u64 = tag;
    /// Lanes of the payload (of the chunk, where flags::PAYLOAD is not set; in an answer without a result of the slot of
    /// `want`, if that is complete).
    lanes, set_lanes: u16 = lanes;
    /// Answer: what is told of the policy, see [`Told`](crate::policy::Told).
    told, set_told: u8 = told;
    /// Number of ranks in the payload.
    contributors, set_contributors: u8 = contributors;
    /// Exponent of the payload's scale.
    exponent, set_exponent: i8 = exponent;
    /// Exponent proposed (request) or agreed (result) for the chunk one window later.
    next_exponent, set_next_exponent: i8 = next_exponent;
    /// Answer: asynchronous window granted, in chunks.
    window, set_window: u16 = window;
    /// Request: root of a broadcast. Answer: the slowest rank, or with NON_FINITE the culprit.
    rank, set_rank: u8 = rank;
    /// Answer: rate-control gain.
    gain, set_gain: i8 = gain;
    /// Attempt of the contribution (request), of the result, or of the chunk contributed to.
    attempt, set_attempt: u8 = attempt;
    /// Request: operation and type. Answer: policy epoch.
    operation_or_epoch, set_operation_or_epoch: u8 = operation_or_epoch;
}

impl Header {
    /// `seq` as a serial number.
    #[inline(always)]
    #[must_use]
    pub const fn seq(&self) -> Seq {
        Seq(self.raw_seq())
    }

    /// `want` as a serial number.
    #[inline(always)]
    #[must_use]
    pub const fn want(&self) -> Seq {
        Seq(self.raw_want())
    }

    /// `flag` is set.
    #[inline(always)]
    #[must_use]
    pub const fn has(&self, flag: u8) -> bool {
        self.flags() & flag != 0
    }

    /// What a request says of its chunk.
    #[inline(always)]
    #[must_use]
    pub const fn chunk(&self) -> Chunk {
        Chunk {
            operation_and_type: self.operation_or_epoch,
            lanes: self.lanes(),
            exponent: self.exponent(),
            root: self.rank,
        }
    }

    /// Sets magic, version and kind.
    #[inline(always)]
    pub const fn set_kind(&mut self, kind: Kind) {
        self.magic = MAGIC.to_be_bytes();
        self.version_and_kind = VERSION << 4 | kind as u8;
    }

    /// Bytes that follow the header by its own word.
    #[inline(always)]
    #[must_use]
    pub const fn payload_bytes(&self) -> u32 {
        if self.has(flags::PAYLOAD) { self.lanes() as u32 * 4 } else { 0 }
    }
}

/// A request, as a worker builds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// DATA or PULL.
    pub kind: Kind,
    /// Bits of [`flags`].
    pub flags: u8,
    /// Job number.
    pub job: u16,
    /// Sending rank.
    pub worker: u8,
    /// Generation of the job.
    pub generation: u32,
    /// Chunk contributed to.
    pub seq: Seq,
    /// Result wished for.
    pub want: Seq,
    /// All results below have arrived.
    pub ack: Seq,
    /// All contributions below are acknowledged.
    pub progress: Seq,
    /// Opaque request number.
    pub token: u32,
    /// Contributors in the payload.
    pub bitmap: u64,
    /// Checksum with salt.
    pub tag: u64,
    /// What the ranks must agree on. With [`flags::PAYLOAD`], `lanes` lanes follow.
    pub chunk: Chunk,
    /// Exponent proposed for the chunk one window later.
    pub next_exponent: i8,
    /// Attempt of the contribution.
    pub attempt: u8,
}

impl Request {
    /// The header to send.
    #[must_use]
    pub fn encode(&self) -> Header {
        let mut header = Header::zeroed();
        header.set_kind(self.kind);
        header.set_flags(self.flags);
        header.set_job(self.job);
        header.set_worker(self.worker);
        header.set_generation(self.generation);
        header.set_raw_seq(self.seq.0);
        header.set_raw_want(self.want.0);
        header.set_raw_ack(self.ack.0);
        header.set_raw_progress(self.progress.0);
        header.set_token(self.token);
        header.set_bitmap(self.bitmap);
        header.set_tag(self.tag);
        header.set_lanes(self.chunk.lanes);
        header.set_contributors(self.bitmap.count_ones() as u8);
        header.set_exponent(self.chunk.exponent);
        header.set_next_exponent(self.next_exponent);
        header.set_rank(self.chunk.root);
        header.set_attempt(self.attempt);
        header.set_operation_or_epoch(self.chunk.operation_and_type);
        header.seal();
        header
    }

    /// Reads a request.
    ///
    /// # Errors
    /// Why the header cannot be one.
    pub fn decode(header: &Header) -> Result<Request, Refusal> {
        header.check()?;
        let kind = match header.kind() {
            Some(kind @ (Kind::Data | Kind::Pull)) => kind,
            _ => return Err(Refusal::BadKind),
        };
        Ok(Request {
            kind,
            flags: header.flags(),
            job: header.job(),
            worker: header.worker(),
            generation: header.generation(),
            seq: header.seq(),
            want: header.want(),
            ack: Seq(header.raw_ack()),
            progress: Seq(header.raw_progress()),
            token: header.token(),
            bitmap: header.bitmap(),
            tag: header.tag(),
            chunk: header.chunk(),
            next_exponent: header.next_exponent(),
            attempt: header.attempt(),
        })
    }
}

#[cfg(test)]
mod tests;
