//! Which XDP actions a driver has.

use netlink_bindings::netdev::Request;
use netlink_socket2::NetlinkSocket;

/// `NETDEV_XDP_ACT_…`; none before Linux 6.3.
pub fn xdp_features(index: u32) -> Option<u64> {
    let mut request = Request::new().op_dev_get_do();
    request.encode().push_ifindex(index);
    let mut socket = NetlinkSocket::new();
    let mut reply = socket.request(&request).ok()?;
    reply.recv_one().ok()?.get_xdp_features().ok()
}
