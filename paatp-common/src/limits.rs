//! Every limit of the data plane, with its unit and its reason.

/// Ranks in a job: one bit each in a packet's 64-bit bitmap.
pub const MAX_RANKS: usize = 64;

/// Ranks of a job through all nodes, each of which may be one rank of its parent's job: 64 nodes of 64 ranks. A lane has
/// 32 bits for their sum, of which so many ranks take 12.
pub const MAX_TOTAL_RANKS: u16 = 4096;

/// Jobs on one aggregator node. The tables are arrays indexed by the packet's job number; 64 keep them under 300 KiB.
pub const MAX_JOBS: usize = 64;

/// Lanes in a block. Payloads are whole blocks, so the kernel walks them with constant bounds.
pub const LANES_PER_BLOCK: usize = 32;

/// 64-bit words in a block: two lanes each.
pub const WORDS_PER_BLOCK: usize = LANES_PER_BLOCK / 2;

/// Bytes of one block on the wire and in a slot.
pub const BLOCK_BYTES: usize = LANES_PER_BLOCK * 4;

/// Blocks of a standard slot: 352 lanes, 1408 bytes, which with all headers (IPv4 20, UDP 8, ours 64) fill an MTU of
/// 1500 bytes exactly.
pub const STANDARD_BLOCKS: usize = 11;

/// Blocks of a wide slot: 832 lanes, 3328 bytes. With IPv6 (40 + 8 + 64) 3440 bytes: under the MTU of 3506 up to which
/// veth, and one page on most drivers, takes a program without `xdp.frags`.
pub const WIDE_BLOCKS: usize = 26;

/// Slots in one ring: 2^20 standard slots are 1.5 GiB; more is a typing error.
pub const MAX_RING_SLOTS: u32 = 1 << 20;

/// Redo attempts of one chunk before the job is given up: memory that fails five times is broken, not unlucky.
pub const MAX_ATTEMPTS: u8 = 4;

/// Turns that a CPU spins for a slot's lock before it drops the packet (the worker sends it again). One turn is a few
/// nanoseconds and a holder needs under a microsecond, so only a holder whose virtual CPU was taken away exceeds this.
pub const LOCK_SPINS: u32 = 4096;

/// UDP ports of one node at most (`base + seq mod Q`, one for each receive queue).
pub const MAX_PORTS: u16 = 256;

/// Addresses of the aggregator that its program answers for, of each family. Others pass to the stack.
pub const MAX_LOCAL_ADDRESSES: usize = 4;
