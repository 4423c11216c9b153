//! One receive queue of a card, and its AF_XDP socket: memory that both sides see, and four rings of what is in it.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use xdp::nic::NicIndex;
use xdp::packet::Packet;
use xdp::slab::{HeapSlab, Slab};
use xdp::socket::{SocketError, XdpSocket, XdpSocketBuilder};
use xdp::umem::{FrameSize, Umem, UmemCfgBuilder};
use xdp::{CompletionRing, RingConfigBuilder, RxRing, WakableFillRing, WakableTxRing};

use crate::worker::driver::BATCH;

/// Frames that may be on their way out: a batch that the kernel still has, and the next ones. A power of two.
const TX_FRAMES: u32 = 4 * BATCH as u32;

/// Fewest and most frames for what arrives: a card that copies nothing puts everything there that the queue gets. Powers
/// of two.
const LEAST_RX_FRAMES: u32 = 1024;
const MOST_RX_FRAMES: u32 = 16 << 10;

/// Bytes of a frame that the kernel keeps for itself (`XDP_PACKET_HEADROOM`).
const HEADROOM_BYTES: usize = 256;
/// Bytes of the smaller frames.
const SMALL_FRAME_BYTES: usize = 2048;
/// Bytes of the larger frames: a page.
const LARGE_FRAME_BYTES: usize = 4096;

/// Descriptors that one call sends where the kernel copies (`TX_BATCH_SIZE` of `net/xdp/xsk.c`).
const SENT_PER_CALL: u32 = 32;

/// What frames have to hold.
#[derive(Clone, Copy, Debug)]
pub struct Demand {
    /// Longest frame that may arrive, in bytes: the interface's, and not only ours.
    pub longest_frame: usize,
    /// Datagrams that may be on their way back at once.
    pub datagrams: usize,
}

impl Demand {
    fn frame_size(self) -> Option<FrameSize> {
        match self.longest_frame + HEADROOM_BYTES {
            bytes if bytes <= SMALL_FRAME_BYTES => Some(FrameSize::TwoK),
            bytes if bytes <= LARGE_FRAME_BYTES => Some(FrameSize::FourK),
            _ => None,
        }
    }

    fn rx_frames(self) -> u32 {
        let wanted = u32::try_from(self.datagrams.next_power_of_two()).unwrap_or(MOST_RX_FRAMES);
        wanted.clamp(LEAST_RX_FRAMES, MOST_RX_FRAMES)
    }
}

/// A bound socket with its rings and memory.
pub struct Queue {
    /// Number of the queue.
    pub id: u32,
    // Everything that refers to the memory is dropped before it.
    socket: XdpSocket,
    fill: WakableFillRing,
    rx: RxRing,
    tx: WakableTxRing,
    completion: CompletionRing,
    tx_flags: RingFlags,
    fill_flags: RingFlags,
    outgoing: HeapSlab,
    received: HeapSlab,
    /// Frames that the kernel has to send or has not given back.
    under_way: u32,
    /// The kernel did not take all that is in its ring.
    is_behind: bool,
    calls: u64,
    umem: Umem,
}

/// Why a queue has no socket.
#[derive(Debug)]
pub enum QueueError {
    /// There is no queue of this number.
    None,
    /// Frames of this length do not fit.
    TooLong(usize),
    /// The kernel refused.
    Refused {
        /// What.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

impl Queue {
    /// Binds a socket to a queue of an interface.
    ///
    /// # Errors
    /// If there is no such queue, or the kernel refuses.
    pub fn bind(interface: u32, id: u32, demand: Demand) -> Result<Queue, QueueError> {
        let frame_size = demand.frame_size().ok_or(QueueError::TooLong(demand.longest_frame))?;
        let rx_frames = demand.rx_frames();
        let config = UmemCfgBuilder { frame_size, frame_count: rx_frames + TX_FRAMES, ..Default::default() };
        let config = config.build().map_err(|error| invalid("choose the memory's layout", &error))?;
        let mut umem = Umem::map(config).map_err(|source| refused("map memory for frames", source))?;
        let rings = RingConfigBuilder {
            rx_count: rx_frames,
            fill_count: rx_frames,
            tx_count: TX_FRAMES,
            completion_count: TX_FRAMES,
        };
        let rings = rings.build().map_err(|error| invalid("choose the rings' lengths", &error))?;
        let mut builder = XdpSocketBuilder::new().map_err(of_socket)?;
        let (rings, flags) = builder.build_wakable_rings(&umem, rings).map_err(of_socket)?;
        let (Some(rx), Some(tx)) = (rings.rx_ring, rings.tx_ring) else {
            return Err(QueueError::Refused {
                what: "map the rings",
                source: io::ErrorKind::NotFound.into(),
            });
        };
        let (tx_flags, fill_flags) =
            ring_flags(builder.as_raw_fd()).map_err(|source| refused("map the rings' flags", source))?;
        let mut fill = rings.fill_ring;
        // SAFETY: `Queue` drops the socket and the rings before the memory.
        unsafe { fill.enqueue(&mut umem, rx_frames as usize, false) }
            .map_err(|source| refused("offer frames", source))?;
        let socket = match builder.bind(NicIndex(interface), id, flags) {
            Ok(socket) => socket,
            Err(SocketError::Bind(error)) if error.raw_os_error() == Some(libc::EINVAL) => {
                return Err(QueueError::None);
            }
            Err(error) => return Err(of_socket(error)),
        };
        let queue = Queue {
            id,
            socket,
            fill,
            rx,
            tx,
            completion: rings.completion_ring,
            tx_flags,
            fill_flags,
            outgoing: HeapSlab::with_capacity(BATCH),
            received: HeapSlab::with_capacity(BATCH),
            under_way: 0,
            is_behind: false,
            calls: 0,
            umem,
        };
        queue.widen_send_buffer();
        Ok(queue)
    }

    /// Where the kernel copies, it charges the socket for what it has not sent: all frames are to fit.
    fn widen_send_buffer(&self) {
        let bytes = (TX_FRAMES as usize * LARGE_FRAME_BYTES) as libc::c_int;
        // Where this is refused, sending pauses until the charge is gone.
        let _ = set_option(self.fd(), libc::SO_SNDBUFFORCE, bytes);
    }

    /// The socket.
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the socket is open as long as the queue, and the borrow no longer.
        unsafe { BorrowedFd::borrow_raw(self.socket.raw_fd()) }
    }

    /// The card reads and writes the frames itself.
    pub fn is_zero_copy(&self) -> bool {
        let (mut options, mut length) = (0u32, size_of::<u32>() as libc::socklen_t);
        // SAFETY: the pointer and the length describe `options`, which lives until the call returns.
        let result = unsafe {
            libc::getsockopt(
                self.socket.raw_fd(),
                libc::SOL_XDP,
                libc::XDP_OPTIONS,
                (&raw mut options).cast(),
                &raw mut length,
            )
        };
        result == 0 && options & libc::XDP_OPTIONS_ZEROCOPY != 0
    }

    /// What the kernel could not deliver: no frame was on offer, or the ring was full.
    pub fn dropped(&self) -> u64 {
        self.socket.statistics().map_or(0, |s| s.rx_dropped + s.rx_ring_full)
    }

    /// A frame to be written; none while all are under way.
    pub fn frame(&mut self) -> Option<Packet> {
        if self.outgoing.available() == 0 {
            return None;
        }
        if self.under_way == TX_FRAMES {
            self.reap();
        }
        if self.under_way == TX_FRAMES {
            return None;
        }
        // SAFETY: it is given back by `push` or `give_back`, or forgotten with the queue.
        let frame = unsafe { self.umem.alloc() }?;
        self.under_way += 1;
        Some(frame)
    }

    /// Takes a written frame.
    pub fn push(&mut self, frame: Packet) {
        if let Some(frame) = self.outgoing.push_front(frame) {
            // Not reached: `frame` hands out no more than fit.
            self.give_back(frame);
        }
    }

    /// Takes a frame that is not to be sent.
    pub fn give_back(&mut self, frame: Packet) {
        self.umem.free_packet(frame);
        self.under_way -= 1;
    }

    /// System calls made so far.
    pub const fn calls(&self) -> u64 {
        self.calls
    }

    /// The kernel did not take all that is in its ring.
    pub const fn is_behind(&self) -> bool {
        self.is_behind
    }

    /// Takes frames back that the kernel has sent.
    fn reap(&mut self) {
        let back = self.completion.dequeue(&mut self.umem, TX_FRAMES as usize);
        self.under_way = self.under_way.saturating_sub(back as u32);
    }

    /// Hands what was pushed to the kernel. True if it has taken all of it.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn flush(&mut self) -> io::Result<bool> {
        let has_new = !self.outgoing.is_empty();
        if has_new {
            // SAFETY: `Queue` drops the socket before the memory. The ring holds all frames there are.
            unsafe { self.tx.send(&mut self.outgoing, false) }?;
        }
        // With all frames under way, the card may have to be told to give some back.
        if !has_new && !self.is_behind && self.under_way < TX_FRAMES {
            return Ok(true);
        }
        self.is_behind = false;
        if self.tx_flags.need_wakeup() {
            self.is_behind = !self.kick()?;
        }
        self.reap();
        Ok(!self.is_behind)
    }

    /// Makes the kernel look at the ring; where it copies, it sends from within these calls.
    fn kick(&mut self) -> io::Result<bool> {
        for _ in 0..=TX_FRAMES / SENT_PER_CALL {
            self.calls += 1;
            // SAFETY: no memory is involved.
            let result = unsafe {
                libc::sendto(
                    self.socket.raw_fd(),
                    std::ptr::null(),
                    0,
                    libc::MSG_DONTWAIT,
                    std::ptr::null(),
                    0,
                )
            };
            if result >= 0 {
                return Ok(true);
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                // More is left than one call sends; there may be no room for what came back.
                Some(libc::EAGAIN) => self.reap(),
                Some(libc::EBUSY | libc::ENOBUFS | libc::EINTR) => return Ok(false),
                _ => return Err(error),
            }
        }
        Ok(false)
    }

    /// Hands over up to a batch of what has arrived, and gives the frames back. Returns how many there were.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn receive(&mut self, mut take: impl FnMut(&[u8])) -> io::Result<usize> {
        // SAFETY: the frames go back below, before the memory does.
        let count = unsafe { self.rx.recv(&self.umem, &mut self.received) };
        if count == 0 {
            return Ok(0);
        }
        while let Some(frame) = self.received.pop_back() {
            take(&frame);
            self.umem.free_packet(frame);
        }
        let wake = self.fill_flags.need_wakeup();
        self.calls += u64::from(wake);
        // SAFETY: as in `bind`. The ring holds all frames there are.
        unsafe { self.fill.enqueue(&mut self.umem, count, wake) }?;
        Ok(count)
    }
}

fn refused(what: &'static str, source: io::Error) -> QueueError {
    QueueError::Refused { what, source }
}

fn invalid(what: &'static str, error: &xdp::error::Error) -> QueueError {
    QueueError::Refused { what, source: io::Error::other(error.to_string()) }
}

fn of_socket(error: SocketError) -> QueueError {
    match error {
        SocketError::SocketCreation(source) => refused("open an AF_XDP socket", source),
        SocketError::SetSockOpt { inner, .. } => refused("set an option of the AF_XDP socket", inner),
        SocketError::GetSockOpt { inner, .. } => refused("read an option of the AF_XDP socket", inner),
        SocketError::RingMap { inner, .. } => refused("map the rings", inner),
        SocketError::Bind(source) => refused("bind the AF_XDP socket", source),
    }
}

fn set_option(socket: BorrowedFd<'_>, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the pointer and the length describe `value`, which the kernel only reads.
    let result = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, (&raw const value).cast(), length)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The word of a ring in which the kernel says whether it has to be woken. The crate for the rings does not read it, so
/// its page is mapped once more, to be read only.
struct RingFlags {
    map: NonNull<c_void>,
    length: usize,
    offset: usize,
}

impl RingFlags {
    fn map(socket: RawFd, ring: libc::off_t, offset: u64) -> io::Result<RingFlags> {
        let offset = usize::try_from(offset).map_err(io::Error::other)?;
        let length = offset + size_of::<u32>();
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let map = unsafe {
            libc::mmap(std::ptr::null_mut(), length, libc::PROT_READ, libc::MAP_SHARED, socket, ring)
        };
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let map = NonNull::new(map).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(RingFlags { map, length, offset })
    }

    fn need_wakeup(&self) -> bool {
        // SAFETY: a word of the mapping, which is as long as this; the kernel says where it is and aligns it. It is only
        // ever read as an atomic.
        let flags = unsafe { AtomicU32::from_ptr(self.map.byte_add(self.offset).cast().as_ptr()) };
        // The kernel looks at the ring again after it has set the flag; nothing else is told by it.
        flags.load(Ordering::Relaxed) & libc::XDP_RING_NEED_WAKEUP != 0
    }
}

impl Drop for RingFlags {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which nobody refers to any more. There is nothing to be done if it fails.
        unsafe { libc::munmap(self.map.as_ptr(), self.length) };
    }
}

/// Flags of the rings for sending and of frames on offer. To be called before the socket is bound.
fn ring_flags(socket: RawFd) -> io::Result<(RingFlags, RingFlags)> {
    // SAFETY: integers, for which zero is valid.
    let mut offsets: libc::xdp_mmap_offsets = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::xdp_mmap_offsets>() as libc::socklen_t;
    // SAFETY: the pointer and the length describe `offsets`, which lives until the call returns.
    let result = unsafe {
        libc::getsockopt(
            socket,
            libc::SOL_XDP,
            libc::XDP_MMAP_OFFSETS,
            (&raw mut offsets).cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    if length as usize != size_of::<libc::xdp_mmap_offsets>() {
        return Err(io::Error::other("the kernel is older than 5.4 and has no such flags"));
    }
    Ok((
        RingFlags::map(socket, libc::XDP_PGOFF_TX_RING, offsets.tx.flags)?,
        RingFlags::map(socket, libc::XDP_UMEM_PGOFF_FILL_RING as libc::off_t, offsets.fr.flags)?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_as_large_as_the_interface_needs() {
        let demand = |longest_frame| Demand { longest_frame, datagrams: 10 };
        assert!(matches!(demand(1518).frame_size(), Some(FrameSize::TwoK)));
        assert!(matches!(demand(3524).frame_size(), Some(FrameSize::FourK)));
        assert!(demand(9018).frame_size().is_none());
        assert_eq!(demand(1518).rx_frames(), LEAST_RX_FRAMES);
        assert_eq!(Demand { longest_frame: 1518, datagrams: 3000 }.rx_frames(), 4096);
        assert_eq!(Demand { longest_frame: 1518, datagrams: 1 << 20 }.rx_frames(), MOST_RX_FRAMES);
    }
}
