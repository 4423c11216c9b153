//! The way to the aggregator below IP: the interface that packets leave from, and the Ethernet address they go to.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use crate::engine::netlink::{
    self, LinkState, attribute, attributes_of, check_error, exchange, message, number,
};

use super::AfXdpError;

/// Longest wait for the next hop's address. It is known already as a rule: the job was joined over the same way.
const NEIGHBOUR_DEADLINE: Duration = Duration::from_secs(2);

/// How often the neighbour table is looked at meanwhile.
const NEIGHBOUR_GLANCE: Duration = Duration::from_millis(5);

/// Bytes of `rtmsg` and of `ndmsg`.
const RTMSG: usize = 12;
const NDMSG: usize = 12;

/// Attributes of routes and neighbours (`linux/rtnetlink.h`, `linux/neighbour.h`).
mod kind {
    pub const RTA_DST: u16 = 1;
    pub const RTA_OIF: u16 = 4;
    pub const RTA_GATEWAY: u16 = 5;
    pub const RTA_VIA: u16 = 18;
    pub const NDA_DST: u16 = 1;
    pub const NDA_LLADDR: u16 = 2;
}

/// States in which a neighbour's address may be used: all but incomplete, failed and none.
const USABLE: u16 = libc::NUD_REACHABLE
    | libc::NUD_STALE
    | libc::NUD_DELAY
    | libc::NUD_PROBE
    | libc::NUD_NOARP
    | libc::NUD_PERMANENT;

/// `NTF_USE`: as if a packet had been sent, which starts the search for the address.
const USE: u8 = 1;

/// The way to an address, as the kernel would take it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Route {
    interface: u32,
    next_hop: IpAddr,
    is_local: bool,
}

/// An interface, and both ends' Ethernet addresses.
#[derive(Clone, Debug)]
pub struct Way {
    /// Index of the interface.
    pub interface: u32,
    /// The interface.
    pub link: LinkState,
    /// Address of the interface.
    pub source: [u8; 6],
    /// Address of the next hop.
    pub destination: [u8; 6],
}

/// The interface that packets to an address leave from.
///
/// # Errors
/// If there is no route, or rtnetlink does not tell.
pub fn interface_towards(to: SocketAddr) -> io::Result<(u32, LinkState)> {
    let route = route(to)?;
    Ok((route.interface, netlink::query(route.interface)?))
}

impl Way {
    /// Asks the kernel.
    ///
    /// # Errors
    /// If the way does not begin with Ethernet, or the next hop does not answer.
    pub fn find(to: SocketAddr) -> Result<Way, AfXdpError> {
        let unknown = |source| AfXdpError::NoRoute { aggregator: to.ip(), source };
        let route = route(to).map_err(unknown)?;
        let link = netlink::query(route.interface).map_err(unknown)?;
        if route.is_local {
            return Err(AfXdpError::Local(to.ip()));
        }
        let Some(source) = link.mac.filter(|mac| *mac != [0; 6]) else {
            return Err(AfXdpError::NotEthernet(link.name));
        };
        let destination = neighbour(route.interface, route.next_hop).map_err(|source| {
            let (next_hop, interface) = (route.next_hop, link.name.clone());
            AfXdpError::NoNeighbour { next_hop, interface, source }
        })?;
        Ok(Way { interface: route.interface, link, source, destination })
    }
}

/// Bytes of an address, as attributes have them.
fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from),
        _ => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
    }
}

fn family(address: IpAddr) -> u8 {
    (if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 }) as u8
}

fn route(to: SocketAddr) -> io::Result<Route> {
    let destination = octets(to.ip());
    let mut body = vec![family(to.ip()), destination.len() as u8 * 8];
    body.resize(RTMSG, 0);
    attribute(&mut body, kind::RTA_DST, &destination);
    if let SocketAddr::V6(v6) = to
        && v6.scope_id() != 0
    {
        attribute(&mut body, kind::RTA_OIF, &v6.scope_id().to_ne_bytes());
    }
    let answer = exchange(&message(libc::RTM_GETROUTE, libc::NLM_F_REQUEST, &body))?;
    check_error(&answer)?;
    let of_type = answer.get(size_of::<libc::nlmsghdr>() + 7).copied();
    let mut route = Route { interface: 0, next_hop: to.ip(), is_local: of_type == Some(libc::RTN_LOCAL) };
    for (kind, value) in attributes_of(&answer, RTMSG)? {
        match kind {
            kind::RTA_OIF => route.interface = number(value),
            kind::RTA_GATEWAY => route.next_hop = address(value).unwrap_or(route.next_hop),
            // Family, then the address of another IP version.
            kind::RTA_VIA => {
                route.next_hop = value.get(2..).and_then(address).unwrap_or(route.next_hop);
            }
            _ => {}
        }
    }
    Ok(route)
}

/// A neighbour's Ethernet address; looks for it if it is not known.
fn neighbour(interface: u32, next_hop: IpAddr) -> io::Result<[u8; 6]> {
    let end = Instant::now() + NEIGHBOUR_DEADLINE;
    loop {
        let last = match known_neighbour(interface, next_hop) {
            Ok(Some(mac)) => return Ok(mac),
            Ok(None) => io::ErrorKind::TimedOut.into(),
            Err(error) => error,
        };
        if Instant::now() >= end {
            return Err(last);
        }
        look_for_neighbour(interface, next_hop)?;
        thread::sleep(NEIGHBOUR_GLANCE);
    }
}

fn neighbour_body(interface: u32, next_hop: IpAddr, flags: u8) -> Vec<u8> {
    let mut body = vec![family(next_hop), 0, 0, 0];
    body.extend_from_slice(&interface.to_ne_bytes());
    body.extend_from_slice(&[0, 0, flags, 0]); // state, flags, type
    attribute(&mut body, kind::NDA_DST, &octets(next_hop));
    body
}

fn known_neighbour(interface: u32, next_hop: IpAddr) -> io::Result<Option<[u8; 6]>> {
    let body = neighbour_body(interface, next_hop, 0);
    let answer = exchange(&message(libc::RTM_GETNEIGH, libc::NLM_F_REQUEST, &body))?;
    check_error(&answer)?;
    let state = answer.get(size_of::<libc::nlmsghdr>() + 8..).and_then(|rest| rest.first_chunk());
    if state.is_none_or(|state| u16::from_ne_bytes(*state) & USABLE == 0) {
        return Ok(None);
    }
    let mut all = attributes_of(&answer, NDMSG)?;
    Ok(all.find(|(kind, _)| *kind == kind::NDA_LLADDR).and_then(|(_, value)| value.try_into().ok()))
}

fn look_for_neighbour(interface: u32, next_hop: IpAddr) -> io::Result<()> {
    let flags = libc::NLM_F_REQUEST | libc::NLM_F_ACK | libc::NLM_F_CREATE;
    let body = neighbour_body(interface, next_hop, USE);
    check_error(&exchange(&message(libc::RTM_NEWNEIGH, flags, &body))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_no_ethernet() {
        for to in ["127.0.0.1:1", "[::1]:1"] {
            let Ok(to) = to.parse::<SocketAddr>() else { panic!("{to}") };
            if to.is_ipv6() && !std::path::Path::new("/proc/net/if_inet6").exists() {
                continue;
            }
            assert!(interface_towards(to).is_ok_and(|(_, link)| link.name == "lo"), "{to}");
            let error = Way::find(to).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.contains("this host"), "{error}");
        }
    }

    #[test]
    fn addresses_survive_attributes() {
        for text in ["10.1.2.3", "fd00::1"] {
            let Ok(ip) = text.parse() else { panic!("{text}") };
            assert_eq!(address(&octets(ip)), Some(ip));
        }
        assert_eq!(address(&[1, 2, 3]), None);
    }
}
