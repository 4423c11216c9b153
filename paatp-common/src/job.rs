//! The tables that the control plane writes and the data plane reads, as kernel maps hold them.

use bytemuck::{Pod, Zeroable};

use crate::layout::described;
use crate::limits::MAX_LOCAL_ADDRESSES;
use crate::policy::Policy;
pub use crate::policy::QUORUM_ALL;
use crate::pool::Pool;
use crate::slot::Rules;

/// An IPv6 address, or an IPv4 address mapped into it, in network order.
pub type Address = [u8; 16];

/// `::ffff:a.b.c.d`
#[inline(always)]
#[must_use]
pub const fn mapped(v4: [u8; 4]) -> Address {
    // As one number: byte by byte it would stay so in the kernel.
    ((u32::from_le_bytes(v4) as u128) << 96 | 0xFFFF << 80).to_le_bytes()
}

/// What makes a packet ours: its UDP port and the address it was sent to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Node {
    /// Addresses that the program answers for; all-zero entries are unused.
    pub local: [Address; MAX_LOCAL_ADDRESSES],
    /// First UDP port.
    pub port_base: u16,
    /// Number of ports.
    pub port_count: u16,
    /// Must stay zero: the kernel makes its verifier forget numbers with it ([`crate::aggregate::Machine::forget`]).
    pub reserved: u32,
    /// The slots that jobs share.
    pub pool: Pool,
}

const _: () = assert!(size_of::<Node>() == 80);
described!(Node { local, port_base, port_count, reserved, pool });

/// One job. The control plane writes it, `generation` last; the data plane only reads, but for
/// [`JobEntry::policy`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct JobEntry {
    /// Ranks whose contributions count; shrinking clears bits, nothing else (protocol-rules F8).
    pub expected: u64,
    /// Random incarnation of the membership; 0 means that the entry is unused.
    pub generation: u32,
    /// The job's first slot in the node's slot table; its only one, if it shares the pool.
    pub first_slot: u32,
    /// Slots in the ring. A power of two, so that `seq mod slots` survives the wrap of seq. Of a job that shares the
    /// pool: how far a chunk may be ahead of min_ack, all the same.
    pub slots: u32,
    /// Most lanes in a chunk.
    pub lanes: u16,
    /// Window W, in chunks: result k − W fixes the exponent of chunk k, and nobody runs further ahead.
    pub window: u16,
    /// Number of ranks, fixed within a generation.
    pub world: u8,
    /// Zero.
    pub unused: u8,
    /// 1: the job's sums go to a parent, see [`crate::levels::Link`].
    pub rises: u8,
    /// k: places in the pool that a chunk may claim a slot at, up to [`crate::pool::K_MAX`]. 0: the job has a ring.
    pub k: u8,
    /// Asynchronous window stamped into answers, in chunks: how far ahead of the slowest rank the loader lets ranks run.
    /// 0 lets them run as far as `window`.
    pub granted: u16,
    /// Zero.
    pub spare: [u8; 2],
    /// How ranks wait for one another. Read and written whole.
    pub policy: Policy,
}

const _: () = assert!(size_of::<JobEntry>() == 40);
described!(JobEntry {
    expected,
    generation,
    first_slot,
    slots,
    lanes,
    window,
    world,
    unused,
    rises,
    k,
    granted,
    spare,
    policy,
});

impl JobEntry {
    /// Its chunks are in the node's pool.
    #[inline(always)]
    #[must_use]
    pub const fn is_shared(&self) -> bool {
        self.k != 0
    }

    /// The rules for slots.
    #[inline(always)]
    #[must_use]
    pub const fn rules(&self) -> Rules {
        Rules { generation: self.generation, expected: self.expected }
    }
}

/// One rank of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct RankEntry {
    /// The only source address that may speak for this rank.
    pub address: Address,
    /// Factor of its salts, see [`crate::tag::rank_key`].
    pub key: u64,
    /// Rate-control gain stamped into its answers.
    pub gain: i8,
    /// Zero.
    pub reserved: [u8; 7],
}

const _: () = assert!(size_of::<RankEntry>() == 32);
described!(RankEntry { address, key, gain, reserved });
