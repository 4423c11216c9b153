//! The interface that the program is attached to: its name, MTU and addresses, and whether the jobs fit it.

use std::ffi::CString;
use std::net::IpAddr;

use nix::ifaddrs::getifaddrs;
use nix::net::if_::if_nametoindex;
use paatp_common::job::{Address, Node};
use paatp_common::limits::{LANES_PER_BLOCK, MAX_LOCAL_ADDRESSES};
use paatp_common::pool::Pool;
use paatp_common::wire::HEADER_BYTES;
use thiserror::Error;

use crate::control::membership::table_address;

use super::netlink;

/// Bytes of an IPv4 and a UDP header.
const IPV4_UDP_BYTES: u32 = 20 + 8;
/// Bytes of an IPv6 and a UDP header.
const IPV6_UDP_BYTES: u32 = 40 + 8;

/// An interface cannot serve.
#[derive(Debug, Error)]
pub enum InterfaceError {
    /// No name of an interface.
    #[error("`{}` is no name of an interface (1 to 15 bytes, no slash, no space); there are: {}", .name.escape_debug(), .available.join(", "))]
    BadName {
        /// The name.
        name: String,
        /// Those there are.
        available: Vec<String>,
    },
    /// There is none of this name.
    #[error("there is no interface `{name}` in this network namespace; there are: {}", .available.join(", "))]
    NotFound {
        /// The name.
        name: String,
        /// Those there are.
        available: Vec<String>,
    },
    /// The kernel does not tell about it.
    #[error("cannot read the state of interface `{name}`; is it still there?")]
    Unreadable {
        /// The name.
        name: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Nobody could send to it.
    #[error(
        "interface `{name}` has no IP address that workers could send to; `ip address add ADDRESS/PREFIX dev {name}` gives it one"
    )]
    NoAddress {
        /// The name.
        name: String,
    },
    /// The jobs' packets do not fit.
    #[error(
        "packets of {lanes} lanes are {frame} bytes with {family} and UDP headers, but the MTU of `{name}` is {mtu}; use --lanes {fitting} or less, or `ip link set {name} mtu {frame}` on both ends"
    )]
    Mtu {
        /// The name.
        name: String,
        /// Its MTU.
        mtu: u32,
        /// Lanes of the job.
        lanes: u32,
        /// Bytes of its largest IP packet.
        frame: u32,
        /// IPv4 or IPv6.
        family: &'static str,
        /// Lanes that would fit.
        fitting: u32,
    },
}

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Its index.
    pub index: u32,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// Driver kind if virtual, for example `veth`.
    pub kind: Option<String>,
    /// Its addresses: IPv4 first, then IPv6, link-local ones last.
    pub addresses: Vec<IpAddr>,
}

impl Interface {
    /// Finds an interface that can serve by its name.
    ///
    /// # Errors
    /// If the name cannot be one, there is none, or it has no address.
    pub fn find(name: &str) -> Result<Interface, InterfaceError> {
        let interface = Self::look(name)?;
        if interface.addresses.is_empty() {
            return Err(InterfaceError::NoAddress { name: name.into() });
        }
        Ok(interface)
    }

    /// Finds an interface by its name, with or without addresses.
    ///
    /// # Errors
    /// If the name cannot be one or there is none.
    pub fn look(name: &str) -> Result<Interface, InterfaceError> {
        if !is_name(name) {
            return Err(InterfaceError::BadName { name: name.into(), available: names() });
        }
        let index = if_nametoindex(name)
            .map_err(|_| InterfaceError::NotFound { name: name.into(), available: names() })?;
        let unreadable = |source| InterfaceError::Unreadable { name: name.into(), source };
        let state = netlink::query(index).map_err(unreadable)?;
        let addresses = addresses(name).map_err(unreadable)?;
        Ok(Interface { name: name.into(), index, mtu: state.mtu, kind: state.kind, addresses })
    }

    /// The addresses that the program answers for: the first few.
    #[must_use]
    pub fn served(&self) -> &[IpAddr] {
        self.addresses.get(..MAX_LOCAL_ADDRESSES).unwrap_or(&self.addresses)
    }

    /// The addresses beyond those.
    #[must_use]
    pub fn left_out(&self) -> &[IpAddr] {
        self.addresses.get(MAX_LOCAL_ADDRESSES..).unwrap_or_default()
    }

    /// The entry of the program's first table.
    #[must_use]
    pub fn node(&self, port_base: u16, port_count: u16) -> Node {
        let mut local = [Address::default(); MAX_LOCAL_ADDRESSES];
        for (entry, address) in local.iter_mut().zip(self.served()) {
            *entry = table_address(*address);
        }
        Node { local, port_base, port_count, reserved: 0, pool: Pool::default() }
    }

    /// Checks that packets of that many lanes fit. Returns the most lanes that workers may use over IPv6 if those are
    /// fewer and the interface has both families.
    ///
    /// # Errors
    /// If they fit neither family that the interface has.
    pub fn check_mtu(&self, lanes: u32) -> Result<Option<u32>, InterfaceError> {
        let v4 = self.addresses.iter().any(IpAddr::is_ipv4);
        let v6 = self.addresses.iter().any(IpAddr::is_ipv6);
        let (family, headers) = if v4 { ("IPv4", IPV4_UDP_BYTES) } else { ("IPv6", IPV6_UDP_BYTES) };
        let frame = frame_bytes(headers, lanes);
        if frame > self.mtu {
            let fitting = fitting_lanes(headers, self.mtu);
            let (name, mtu) = (self.name.clone(), self.mtu);
            return Err(InterfaceError::Mtu { name, mtu, lanes, frame, family, fitting });
        }
        let over_v6 = fitting_lanes(IPV6_UDP_BYTES, self.mtu);
        Ok((v4 && v6 && over_v6 < lanes).then_some(over_v6))
    }
}

/// Bytes of IP and UDP headers of packets to an address.
#[must_use]
pub fn ip_and_udp_bytes(to: IpAddr) -> u32 {
    if to.to_canonical().is_ipv4() { IPV4_UDP_BYTES } else { IPV6_UDP_BYTES }
}

/// Bytes of the IP packet of a chunk.
const fn frame_bytes(ip_and_udp: u32, lanes: u32) -> u32 {
    ip_and_udp + HEADER_BYTES as u32 + 4 * lanes
}

/// Most lanes, in whole blocks, whose IP packet fits an MTU.
#[must_use]
pub const fn fitting_lanes(ip_and_udp: u32, mtu: u32) -> u32 {
    let block = LANES_PER_BLOCK as u32;
    mtu.saturating_sub(ip_and_udp + HEADER_BYTES as u32) / (4 * block) * block
}

/// The kernel's own rule, besides what would confuse tools.
fn is_name(name: &str) -> bool {
    (1..libc::IFNAMSIZ).contains(&name.len())
        && name != "."
        && name != ".."
        && !name.bytes().any(|byte| byte == b'/' || byte.is_ascii_whitespace() || byte.is_ascii_control())
        && CString::new(name).is_ok()
}

/// Name of the interface of this network namespace that has an address.
#[must_use]
pub fn owner_of(address: IpAddr) -> Option<String> {
    names().into_iter().find(|name| addresses(name).is_ok_and(|all| all.contains(&address)))
}

/// Interfaces of this network namespace.
pub fn names() -> Vec<String> {
    let Ok(all) = nix::net::if_::if_nameindex() else { return Vec::new() };
    all.iter().map(|interface| interface.name().to_string_lossy().into_owned()).collect()
}

fn addresses(name: &str) -> std::io::Result<Vec<IpAddr>> {
    let of_interface = getifaddrs()?.filter(|entry| entry.interface_name == name);
    let mut found: Vec<IpAddr> = of_interface
        .filter_map(|entry| {
            let address = entry.address?;
            let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
            v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
        })
        .collect();
    found.sort_by_key(|address| match address {
        IpAddr::V4(_) => 0,
        IpAddr::V6(v6) if !v6.is_unicast_link_local() => 1,
        IpAddr::V6(_) => 2,
    });
    found.dedup();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use paatp_common::job::mapped;
    use std::net::{Ipv4Addr, Ipv6Addr};

    const V4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
    const V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1));

    fn interface(mtu: u32, addresses: &[IpAddr]) -> Interface {
        Interface { name: "eth0".into(), index: 2, mtu, kind: None, addresses: addresses.into() }
    }

    #[test]
    fn names_are_checked_before_anything_else() {
        for name in ["", "a b", "a/b", "a\0b", "sixteen-bytes-xx", ".."] {
            assert!(matches!(Interface::find(name), Err(InterfaceError::BadName { .. })), "{name:?}");
        }
        let error = Interface::find("nosuchif0").err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains("nosuchif0") && error.contains("lo"), "{error}");
    }

    #[test]
    fn an_mtu_of_1500_holds_352_lanes_over_ipv4() {
        assert_eq!(interface(1500, &[V4]).check_mtu(352).ok(), Some(None));
        assert_eq!(interface(1500, &[V4, V6]).check_mtu(352).ok(), Some(Some(320)));
        let only_v6 = interface(1500, &[V6]).check_mtu(352).map_err(|error| error.to_string());
        let message = only_v6.err().unwrap_or_default();
        assert!(
            ["1520", "1500", "IPv6", "--lanes 320"].iter().all(|part| message.contains(part)),
            "{message}"
        );
        assert!(interface(1499, &[V4]).check_mtu(352).is_err());
        assert_eq!(interface(3440, &[V6]).check_mtu(832).ok(), Some(None));
    }

    #[test]
    fn the_node_holds_the_first_addresses() {
        let many: Vec<IpAddr> = (1..=6).map(|i| IpAddr::V4(Ipv4Addr::new(10, 0, 0, i))).collect();
        let many = interface(1500, &many);
        let node = many.node(20545, 3);
        assert_eq!((node.local[0], node.local[3]), (mapped([10, 0, 0, 1]), mapped([10, 0, 0, 4])));
        assert_eq!((node.port_base, node.port_count, many.left_out().len()), (20545, 3, 2));
        assert_eq!(interface(1500, &[V6]).node(1, 1).local[1], [0; 16]);
        assert!(interface(1500, &[V6]).left_out().is_empty());
    }
}
