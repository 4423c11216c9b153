//! Whole frames into and out of an interface.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::net::if_::if_nametoindex;
use socket2::{Domain, SockAddr, Socket, Type};

use crate::netns::Namespace;

/// Longest frame that is received.
const MOST_BYTES: usize = 2048;
/// Shortest time-out that the kernel takes for one.
const SHORTEST: Duration = Duration::from_micros(1);

/// One end of a veth, as a socket.
#[derive(Debug)]
pub struct Wire {
    socket: Socket,
}

impl Wire {
    /// Opens an interface of a namespace.
    ///
    /// # Errors
    /// Where there is none, or the privileges are missing.
    pub fn open(namespace: &Namespace, interface: &str) -> Result<Wire> {
        namespace.run(|| open(interface))?.with_context(|| format!("cannot open {interface}"))
    }

    /// Sends a frame.
    ///
    /// # Errors
    /// Where the kernel does not take it.
    pub fn send(&self, frame: &[u8]) -> Result<()> {
        (&self.socket).write_all(frame).context("cannot send a frame")
    }

    /// The next frame that comes in, if one does in time.
    ///
    /// # Errors
    /// Where the kernel refuses to say.
    pub fn receive(&self, patience: Duration) -> Result<Option<Vec<u8>>> {
        let end = Instant::now() + patience;
        let mut buffer = [0; MOST_BYTES];
        loop {
            let left = end.saturating_duration_since(Instant::now());
            self.socket.set_read_timeout(Some(left.max(SHORTEST)))?;
            match (&self.socket).read(&mut buffer) {
                Ok(bytes) => return Ok(Some(buffer[..bytes].to_vec())),
                Err(error) if error.kind() == ErrorKind::WouldBlock && left.is_zero() => return Ok(None),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => return Err(error).context("cannot receive a frame"),
            }
        }
    }
}

fn open(interface: &str) -> Result<Wire> {
    let everything = (libc::ETH_P_ALL as u16).to_be();
    // No protocol before it is bound, or it would receive from all interfaces until then.
    let socket = Socket::new(Domain::from(libc::AF_PACKET), Type::from(libc::SOCK_RAW), None)?;
    let yes: libc::c_int = 1;
    // SAFETY: the option's value is one int.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_IGNORE_OUTGOING,
            (&raw const yes).cast(),
            size_of_val(&yes) as libc::socklen_t,
        )
    };
    if set != 0 {
        return Err(std::io::Error::last_os_error()).context("the kernel shows what is sent as well");
    }
    let index = i32::try_from(if_nametoindex(interface)?)?;
    // SAFETY: what is written is a whole sockaddr_ll, shorter than the storage.
    let ((), address) = unsafe {
        SockAddr::try_init(|storage, length| {
            storage.cast::<libc::sockaddr_ll>().write(libc::sockaddr_ll {
                sll_family: libc::AF_PACKET as u16,
                sll_protocol: everything,
                sll_ifindex: index,
                sll_hatype: 0,
                sll_pkttype: 0,
                sll_halen: 0,
                sll_addr: [0; 8],
            });
            *length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
            Ok(())
        })
    }?;
    socket.bind(&address)?;
    Ok(Wire { socket })
}
