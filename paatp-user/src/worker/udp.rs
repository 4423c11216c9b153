//! The driver that works everywhere: a UDP socket, with as few system calls as can be.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use super::batch::{Inbox, Outbox};
use super::driver::{BATCH, Driver};
use super::socket::{DataSocket, Target};

/// A UDP socket as a driver.
pub struct UdpDriver {
    socket: DataSocket,
    target: Target,
    outbox: Outbox,
    inbox: Inbox,
}

impl UdpDriver {
    /// Drives a socket.
    ///
    /// # Errors
    /// If the route is gone.
    pub fn new(socket: DataSocket) -> io::Result<UdpDriver> {
        let target = socket.target();
        // With one port the kernel can look the way up once.
        let names: Vec<SocketAddr> = if target.ports == 1 {
            socket.connect()?;
            Vec::new()
        } else {
            (0..target.ports).map(|index| target.port(index)).collect()
        };
        Ok(UdpDriver { socket, target, outbox: Outbox::new(&names, true), inbox: Inbox::new() })
    }

    /// Whether messages of several datagrams are cut by the kernel or the card; false once that was refused.
    #[must_use]
    pub const fn segments(&self) -> bool {
        self.outbox.segments()
    }
}

impl Driver for UdpDriver {
    fn room(&mut self) -> Option<&mut [u8]> {
        self.outbox.room()
    }

    fn push(&mut self, length: usize, seq: u32) {
        self.outbox.push(length, self.target.port_index(seq));
    }

    fn flush(&mut self) -> io::Result<bool> {
        self.outbox.flush(self.socket.as_fd())
    }

    fn receive(&mut self, take: &mut dyn FnMut(&[u8])) -> io::Result<bool> {
        match self.inbox.receive(self.socket.as_fd(), |from| self.target.is_sender(from), take) {
            Ok(received) => Ok(received == BATCH),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn wait(&mut self, timeout: Duration) -> io::Result<Option<io::Error>> {
        self.socket.wait(timeout, !self.outbox.is_empty())
    }

    /// Closing the socket does it.
    fn stop(&mut self) {}
}
