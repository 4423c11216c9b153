//! Where the control server listens, and what for.
//!
//! Workers join at the addresses that their packets go to. Jobs are managed at loopback, and elsewhere only where the
//! operator says so.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::time::{Duration, Instant};

use thiserror::Error;
use tokio::net::TcpListener;
use tracing::debug;

use crate::engine::Interface;

use super::http::Scope;

/// How long an address may take to become usable (IPv6 duplicate address detection takes one to two seconds).
const BIND_PATIENCE: Duration = Duration::from_secs(4);

/// Pause between two attempts to bind.
const BIND_PAUSE: Duration = Duration::from_millis(100);

/// Why the server cannot listen.
#[derive(Debug, Error)]
pub enum ListenError {
    /// The port is taken.
    #[error(
        "the control server cannot listen on TCP {0}: the port is in use; is another `paatp run` there? Choose another one with --port"
    )]
    InUse(SocketAddr),
    /// Anything else.
    #[error("the control server cannot listen on TCP {address}; is the address still on the interface?")]
    Other {
        /// Where.
        address: SocketAddr,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The address of `--control` cannot be read.
    #[error("--control {0} is no address; write for example 10.0.0.1, 10.0.0.1:20545 or [fd00::1]:20545")]
    Address(String),
    /// `--control` names no address of its own.
    #[error(
        "--control {0} means every address, of which the aggregator's own are taken by the workers' listeners; name the one that jobs are to be managed on"
    )]
    Everywhere(String),
}

/// Reads an address with or without a port.
///
/// # Errors
/// If it is none.
pub fn parse_address(text: &str, port: u16) -> Result<SocketAddr, ListenError> {
    let with_port = text.parse::<SocketAddr>().ok();
    let bare = || text.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().ok();
    let address = with_port
        .or_else(|| bare().map(|address| SocketAddr::new(address, port)))
        .ok_or_else(|| ListenError::Address(text.into()))?;
    if address.ip().is_unspecified() {
        return Err(ListenError::Everywhere(text.into()));
    }
    Ok(address)
}

/// Where to listen: each served address for workers, loopback and `control` for everything. The second part of an entry
/// says that it may fail.
fn plan(interface: &Interface, port: u16, control: Option<SocketAddr>) -> Vec<(SocketAddr, Scope, bool)> {
    let served = interface.served().iter().map(|address| match address {
        IpAddr::V6(v6) if v6.is_unicast_link_local() => {
            SocketAddr::V6(SocketAddrV6::new(*v6, port, 0, interface.index))
        }
        other => SocketAddr::new(*other, port),
    });
    let mut list: Vec<(SocketAddr, Scope, bool)> =
        served.map(|address| (address, Scope::Workers, false)).collect();
    let loopback = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
    let loopback = loopback.map(|address| (SocketAddr::new(address, port), true));
    for (address, may_fail) in loopback.into_iter().chain(control.map(|address| (address, false))) {
        match list.iter_mut().find(|(other, _, _)| *other == address) {
            Some((_, scope, _)) => *scope = Scope::Management,
            None => list.push((address, Scope::Management, may_fail)),
        }
    }
    list
}

/// Opens the port on each address that the program answers for, on loopback where that is up, and at `control`.
///
/// # Errors
/// If an address cannot be bound in time.
pub async fn listen(
    interface: &Interface,
    port: u16,
    control: Option<SocketAddr>,
) -> Result<Vec<(TcpListener, Scope)>, ListenError> {
    let mut listeners = Vec::new();
    for (address, scope, may_fail) in plan(interface, port, control) {
        match bind(address, may_fail).await {
            Ok(listener) => listeners.push((listener, scope)),
            Err(error) if may_fail => debug!(%address, %error, "not listening"),
            Err(error) => return Err(error),
        }
    }
    Ok(listeners)
}

async fn bind(address: SocketAddr, at_once: bool) -> Result<TcpListener, ListenError> {
    let deadline = Instant::now() + BIND_PATIENCE;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
                return Err(ListenError::InUse(address));
            }
            // An IPv6 address that is still tentative.
            Err(error)
                if error.kind() == std::io::ErrorKind::AddrNotAvailable
                    && !at_once
                    && Instant::now() < deadline =>
            {
                tokio::time::sleep(BIND_PAUSE).await;
            }
            Err(source) => return Err(ListenError::Other { address, source }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_port_or_get_one() {
        let read = |text| parse_address(text, 20545).map(|address| address.to_string()).ok();
        assert_eq!(read("10.0.0.1").as_deref(), Some("10.0.0.1:20545"));
        assert_eq!(read("10.0.0.1:80").as_deref(), Some("10.0.0.1:80"));
        assert_eq!(read("fd00::1").as_deref(), Some("[fd00::1]:20545"));
        assert_eq!(read("[fd00::1]:80").as_deref(), Some("[fd00::1]:80"));
        assert_eq!((read(""), read("host"), read("10.0.0.1:x")), (None, None, None));
    }
}
