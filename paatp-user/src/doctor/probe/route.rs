//! The way to an address, as the kernel would choose it.

use std::io;
use std::net::IpAddr;

use netlink_bindings::rt_route::{Request, RtmType, Rtmsg};
use netlink_socket2::NetlinkSocket;
use nix::net::if_::if_indextoname;

use crate::doctor::facts::{Route, WorkerFacts};

pub fn look(address: IpAddr) -> WorkerFacts {
    let route = ask(address.to_canonical()).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO));
    WorkerFacts { address, route }
}

fn ask(address: IpAddr) -> io::Result<Route> {
    let (family, bits) = match address {
        IpAddr::V4(_) => (libc::AF_INET, 32),
        IpAddr::V6(_) => (libc::AF_INET6, 128),
    };
    let header = Rtmsg { rtm_family: family as u8, rtm_dst_len: bits, ..Rtmsg::default() };
    let mut request = Request::new().op_getroute_do(&header);
    request.encode().push_dst(address);
    let mut socket = NetlinkSocket::new();
    let mut reply = socket.request(&request)?;
    let (header, route) = reply.recv_one().map_err(io::Error::from)?;
    let index = route.get_oif().map_err(io::Error::other)?;
    let interface = if_indextoname(index).map(|name| name.to_string_lossy().into_owned());
    Ok(Route {
        interface: interface.unwrap_or_else(|_| format!("interface {index}")),
        local: header.rtm_type == RtmType::Local as u8,
        source: route.get_prefsrc().ok(),
        gateway: route.get_gateway().ok(),
        mtu: route.get_metrics().ok().and_then(|metrics| metrics.get_mtu().ok()).filter(|mtu| *mtu > 0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_local() {
        let facts = look(IpAddr::from([127, 0, 0, 1]));
        let Ok(route) = facts.route else { panic!("{facts:?}") };
        assert_eq!((route.interface.as_str(), route.local), ("lo", true));
    }
}
