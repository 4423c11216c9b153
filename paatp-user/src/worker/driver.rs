//! What a driver is: it moves datagrams between a worker's state machine and the aggregator, and nothing else.
//!
//! The state machine writes each datagram where the driver wants it ([`Driver::room`]: a batch's buffer, or memory that
//! the card reads), so that nothing is copied on the way and nothing is allocated.

use std::io;
use std::time::Duration;

use paatp_common::limits::{LANES_PER_BLOCK, WIDE_BLOCKS};
use paatp_common::wire::HEADER_BYTES;

/// Largest datagram of the protocol, in bytes.
pub const DATAGRAM_BYTES: usize = HEADER_BYTES + WIDE_BLOCKS * LANES_PER_BLOCK * 4;

/// Most datagrams sent or received in a row before the other direction gets its turn; also what one system call carries
/// at most.
pub const BATCH: usize = 64;

/// Both ECN bits of TOS or traffic class set: "congestion experienced".
pub const CE: u8 = 0b11;

/// Most entries taken from an error queue at once.
pub const ERROR_BATCH: usize = 16;

/// Moves datagrams. All calls but [`Driver::wait`] return at once.
pub trait Driver {
    /// Where the next datagram may be written, long enough for the job's longest; none until something has been flushed.
    fn room(&mut self) -> Option<&mut [u8]>;

    /// Takes the datagram that was written to the beginning of the room. It belongs to the port of chunk `seq`.
    fn push(&mut self, length: usize, seq: u32);

    /// Hands what was pushed to the kernel. True if all of it went; false if there was no room for the rest.
    ///
    /// # Errors
    /// What the kernel said; the datagram that it said it of is given up, as if the network had lost it.
    fn flush(&mut self) -> io::Result<bool>;

    /// Hands over what has arrived from the aggregator, up to [`BATCH`], each datagram with whether its IP header is marked
    /// CE ("congestion experienced"). True if there may be more.
    ///
    /// # Errors
    /// What the kernel said.
    fn receive(&mut self, take: &mut dyn FnMut(&[u8], bool)) -> io::Result<bool>;

    /// Waits until there is something to receive, room to flush what is left (if any), or the time is over. Returns the
    /// error that the network reported meanwhile, if any.
    ///
    /// # Errors
    /// What the kernel said, but for interruptions.
    fn wait(&mut self, timeout: Duration) -> io::Result<Option<io::Error>>;

    /// System calls made so far.
    fn system_calls(&self) -> u64;

    /// Takes nothing more in from the network; what has arrived already can still be received.
    fn stop(&mut self);
}
