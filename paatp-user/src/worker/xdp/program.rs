//! The worker's XDP program: loaded with its addresses as constants, held by a descriptor, so that it is gone with this
//! process whatever ends it.

use std::net::{IpAddr, SocketAddr};

use aya::maps::{MapData, XskMap};
use aya::programs::links::FdLink;
use aya::programs::{Xdp, XdpMode};
use aya::{Ebpf, EbpfLoader};

use crate::engine::netlink;
use crate::engine::{Capabilities, error_number, verifier_log};
use crate::object::WORKER_OBJECT;
use crate::worker::socket::Target;

use super::AfXdpError;

/// Names in the object.
const ANSWERS: &str = "answers";
const PASS: &str = "pass";
const SOCKETS: &str = "SOCKETS";

/// Where a program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// In the driver.
    Native,
    /// In the network stack.
    Generic,
}

/// An attached program. Dropping it detaches.
#[derive(Debug)]
pub struct Program {
    // Before the program: it is taken off before its map goes.
    _link: FdLink,
    ebpf: Ebpf,
}

impl Program {
    /// Loads and attaches what hands a worker's answers to its sockets.
    ///
    /// # Errors
    /// If the kernel refuses, or another program is there.
    pub fn answers(
        interface: u32,
        name: &str,
        mode: Mode,
        local: SocketAddr,
        target: Target,
    ) -> Result<Program, AfXdpError> {
        let mut loader = EbpfLoader::new();
        // The program uses no kernel structure.
        let (aggregator, worker) = (octets(target.address.ip()), octets(local.ip()));
        let (port_base, ports, port) = (target.address.port(), target.ports, local.port());
        loader
            .btf(None)
            .override_global("AGGREGATOR", &aggregator, true)
            .override_global("PORT_BASE", &port_base, true)
            .override_global("PORTS", &ports, true)
            .override_global("LOCAL", &worker, true)
            .override_global("LOCAL_PORT", &port, true);
        Program::start(&mut loader, ANSWERS, interface, name, mode)
    }

    /// Loads and attaches, natively, what does nothing: veth hands on what its peer sends with `XDP_TX` only then.
    ///
    /// # Errors
    /// If the kernel refuses, or another program is there.
    pub fn pass(interface: u32, name: &str) -> Result<Program, AfXdpError> {
        Program::start(EbpfLoader::new().btf(None), PASS, interface, name, Mode::Native)
    }

    fn start(
        loader: &mut EbpfLoader<'_>,
        program: &'static str,
        interface: u32,
        name: &str,
        mode: Mode,
    ) -> Result<Program, AfXdpError> {
        if WORKER_OBJECT.is_empty() {
            return Err(AfXdpError::NoObject);
        }
        let mut ebpf = loader.load(WORKER_OBJECT).map_err(|error| refused(&error, String::new()))?;
        let xdp: Option<&mut Xdp> = ebpf.program_mut(program).and_then(|program| program.try_into().ok());
        let Some(xdp) = xdp else { return Err(AfXdpError::Incomplete(program)) };
        xdp.load().map_err(|error| refused(&error, verifier_log(&error)))?;
        let aya_mode = if mode == Mode::Native { XdpMode::Driver } else { XdpMode::Skb };
        let link = xdp
            .attach_to_if_index(interface, aya_mode)
            .and_then(|id| xdp.take_link(id))
            .map_err(|error| attach_refused(&error, interface, name, mode))?;
        match FdLink::try_from(link) {
            Ok(link) => Ok(Program { _link: link, ebpf }),
            // The kernel has no links for XDP; what aya did instead would outlive this process.
            Err(_) => {
                let flags = if mode == Mode::Native { netlink::DRV_MODE } else { netlink::SKB_MODE };
                // It was ours a moment ago; if it is gone, all the better.
                let _ = netlink::detach(interface, flags);
                Err(AfXdpError::OldKernel)
            }
        }
    }

    /// The map of sockets by receive queue.
    ///
    /// # Errors
    /// If the object has none.
    pub fn sockets(&mut self) -> Result<XskMap<&mut MapData>, AfXdpError> {
        let map = self.ebpf.map_mut(SOCKETS).ok_or(AfXdpError::Incomplete(SOCKETS))?;
        XskMap::try_from(map).map_err(|_| AfXdpError::Incomplete(SOCKETS))
    }
}

/// An address in network order; IPv4 in the first four bytes.
fn octets(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => {
            let [a, b, c, d] = v4.octets();
            [a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        }
        IpAddr::V6(v6) => v6.octets(),
    }
}

fn refused(error: &(dyn std::error::Error + 'static), log: String) -> AfXdpError {
    match error_number(error) {
        Some(libc::EPERM) => AfXdpError::NotAllowed(Capabilities::of_this_process().missing()),
        _ => AfXdpError::Load { reason: error.to_string(), log },
    }
}

fn attach_refused(
    error: &(dyn std::error::Error + 'static),
    interface: u32,
    name: &str,
    mode: Mode,
) -> AfXdpError {
    let number = error_number(error);
    let interface_name = name.to_owned();
    match number {
        Some(libc::EPERM | libc::EACCES) => AfXdpError::NotAllowed(Capabilities::of_this_process().missing()),
        Some(libc::EBUSY | libc::EEXIST) => {
            let program = netlink::query(interface).ok().and_then(|link| link.xdp?.program);
            AfXdpError::Taken { interface: interface_name, program }
        }
        _ => AfXdpError::Attach {
            interface: interface_name,
            mode,
            source: number
                .map_or_else(|| std::io::Error::other(error.to_string()), std::io::Error::from_raw_os_error),
        },
    }
}
