//! Questions to rtnetlink, and one request: what is an interface like, and take its XDP program off. The messages' parts
//! are shared with the workers' side, which asks for routes and neighbours.
//!
//! Listing programs by id would need CAP_SYS_ADMIN; rtnetlink tells the attached one to anybody.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto, setsockopt, socket,
    sockopt::ReceiveTimeout,
};
use nix::sys::time::{TimeVal, TimeValLike};

/// Longest wait for the kernel's answer, in seconds; it comes at once unless something is very wrong.
const ANSWER_SECONDS: i64 = 2;

/// Room for one answer, in bytes: a link with all its attributes, statistics and a few virtual functions is 1 to 8 KiB.
const ANSWER_BYTES: usize = 64 << 10;

/// `XDP_FLAGS_SKB_MODE` and `XDP_FLAGS_DRV_MODE` of `linux/if_link.h`.
pub(crate) const SKB_MODE: u32 = 1 << 1;
pub(crate) const DRV_MODE: u32 = 1 << 2;

const HEADER: usize = size_of::<libc::nlmsghdr>();
const IFINFO: usize = size_of::<libc::ifinfomsg>();

/// Attribute numbers of `linux/if_link.h` that libc does not name.
mod xdp {
    pub const FD: u16 = 1;
    pub const ATTACHED: u16 = 2;
    pub const FLAGS: u16 = 3;
    pub const PROG_ID: u16 = 4;
    pub const IN_THE_DRIVER: u8 = 1;
    pub const SEVERAL: u8 = 4;
    pub const IFLA_INFO_KIND: u16 = 1;
    pub const IFLA_TARGET_NETNSID: u16 = 46;
}

/// An interface's attached XDP program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XdpState {
    /// `XDP_ATTACHED_…`: 1 in the driver, 2 in the stack, 3 on the card, 4 several.
    pub attached: u8,
    /// Its id; none where several are attached.
    pub program: Option<u32>,
}

impl XdpState {
    /// A program runs in the driver.
    #[must_use]
    pub const fn is_native(self) -> bool {
        matches!(self.attached, xdp::IN_THE_DRIVER | xdp::SEVERAL)
    }
}

/// What rtnetlink tells of an interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkState {
    /// MTU in bytes.
    pub mtu: u32,
    /// Its name.
    pub name: String,
    /// Driver kind of a virtual interface, for example `veth`.
    pub kind: Option<String>,
    /// Its address, if it is one of Ethernet.
    pub mac: Option<[u8; 6]>,
    /// What is attached.
    pub xdp: Option<XdpState>,
    /// `IFF_…` of `linux/if.h`.
    pub flags: u32,
    /// Index of the interface at the other end (veth) or below (vlan, macvlan), as its namespace counts.
    pub lower: Option<u32>,
    /// The kernel's number for that one's network namespace, where it is another one.
    pub lower_namespace: Option<i32>,
    /// Index of the bridge or bond that it is a port of.
    pub master: Option<u32>,
}

/// Asks for the state of an interface.
///
/// # Errors
/// `ENODEV` where there is none of this index; else what the socket says.
pub fn query(index: u32) -> io::Result<LinkState> {
    query_in(None, index)
}

/// Asks for the state of an interface in another network namespace, by the kernel's number for it.
///
/// # Errors
/// `EACCES` without `CAP_NET_ADMIN` over that namespace; else as [`query`].
pub fn query_in(namespace: Option<i32>, index: u32) -> io::Result<LinkState> {
    let mut attributes = Vec::new();
    if let Some(namespace) = namespace {
        attribute(&mut attributes, xdp::IFLA_TARGET_NETNSID, &namespace.to_ne_bytes());
    }
    let message = link_message(libc::RTM_GETLINK, libc::NLM_F_REQUEST, index, &attributes);
    parse_link(&exchange(&message)?)
}

/// Takes the XDP program off that was attached in a mode (`XDP_FLAGS_…`) without a link.
///
/// # Errors
/// What the kernel says.
pub fn detach(index: u32, mode_flags: u32) -> io::Result<()> {
    let mut nested = Vec::new();
    attribute(&mut nested, xdp::FD, &(-1i32).to_ne_bytes());
    attribute(&mut nested, xdp::FLAGS, &mode_flags.to_ne_bytes());
    let mut attributes = Vec::new();
    attribute(&mut attributes, libc::IFLA_XDP | libc::NLA_F_NESTED as u16, &nested);
    let flags = libc::NLM_F_REQUEST | libc::NLM_F_ACK;
    let answer = exchange(&link_message(libc::RTM_SETLINK, flags, index, &attributes))?;
    check_error(&answer)
}

/// A message about one interface.
fn link_message(kind: u16, flags: i32, index: u32, attributes: &[u8]) -> Vec<u8> {
    let mut body = vec![libc::AF_UNSPEC as u8, 0, 0, 0]; // family, padding, type
    body.extend_from_slice(&index.to_ne_bytes());
    body.extend_from_slice(&[0; 8]); // flags and change mask
    body.extend_from_slice(attributes);
    message(kind, flags, &body)
}

/// A message with the header of its kind, and attributes, in its body.
pub(crate) fn message(kind: u16, flags: i32, body: &[u8]) -> Vec<u8> {
    let length = (HEADER + body.len()) as u32;
    let mut bytes = Vec::with_capacity(length as usize);
    bytes.extend_from_slice(&length.to_ne_bytes());
    bytes.extend_from_slice(&kind.to_ne_bytes());
    bytes.extend_from_slice(&(flags as u16).to_ne_bytes());
    bytes.extend_from_slice(&1u32.to_ne_bytes()); // sequence number: one exchange on each socket
    bytes.extend_from_slice(&0u32.to_ne_bytes()); // port id: the kernel fills it in
    bytes.extend_from_slice(body);
    bytes
}

/// Appends an attribute.
pub(crate) fn attribute(out: &mut Vec<u8>, kind: u16, value: &[u8]) {
    out.extend_from_slice(&((4 + value.len()) as u16).to_ne_bytes());
    out.extend_from_slice(&kind.to_ne_bytes());
    out.extend_from_slice(value);
    out.resize(out.len().next_multiple_of(4), 0);
}

/// Sends a message on a fresh socket and returns the answer.
pub(crate) fn exchange(message: &[u8]) -> io::Result<Vec<u8>> {
    let socket: OwnedFd = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        Some(SockProtocol::NetlinkRoute),
    )?;
    setsockopt(&socket, ReceiveTimeout, &TimeVal::seconds(ANSWER_SECONDS))?;
    sendto(socket.as_raw_fd(), message, &NetlinkAddr::new(0, 0), MsgFlags::empty())?;
    let mut answer = vec![0; ANSWER_BYTES];
    let length = recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty())?;
    answer.truncate(length);
    Ok(answer)
}

pub(crate) fn bad_answer() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "rtnetlink's answer cannot be read")
}

/// An error message with a number other than 0 is an error.
pub(crate) fn check_error(answer: &[u8]) -> io::Result<()> {
    let kind = answer.get(4..6).ok_or_else(bad_answer)?;
    if kind != (libc::NLMSG_ERROR as u16).to_ne_bytes() {
        return Ok(());
    }
    let number = answer.get(HEADER..).and_then(|rest| rest.first_chunk()).ok_or_else(bad_answer)?;
    match i32::from_ne_bytes(*number) {
        0 => Ok(()),
        number => Err(io::Error::from_raw_os_error(number.saturating_neg())),
    }
}

fn parse_link(answer: &[u8]) -> io::Result<LinkState> {
    check_error(answer)?;
    // After family, padding and type (4 bytes) comes the index (4 bytes), then the flags.
    let flags = answer.get(HEADER + 8..).map(number).ok_or_else(bad_answer)?;
    let mut state = LinkState { flags, ..LinkState::default() };
    let hardware = answer.get(HEADER + 2..).and_then(|rest| rest.first_chunk()).ok_or_else(bad_answer)?;
    let is_ethernet = u16::from_ne_bytes(*hardware) == libc::ARPHRD_ETHER;
    for (kind, value) in attributes_of(answer, IFINFO)? {
        match kind {
            libc::IFLA_ADDRESS if is_ethernet => state.mac = value.try_into().ok(),
            libc::IFLA_MTU => state.mtu = number(value),
            libc::IFLA_LINKINFO => {
                let kind = attributes(value).find(|(kind, _)| *kind == xdp::IFLA_INFO_KIND);
                state.kind = kind.map(|(_, name)| text(name));
            }
            libc::IFLA_IFNAME => state.name = text(value),
            libc::IFLA_LINK => state.lower = Some(number(value)).filter(|index| *index != 0),
            libc::IFLA_LINK_NETNSID => state.lower_namespace = Some(number(value) as i32),
            libc::IFLA_MASTER => state.master = Some(number(value)),
            libc::IFLA_XDP => state.xdp = parse_xdp(value),
            _ => {}
        }
    }
    Ok(state)
}

/// A text with a zero at its end.
fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value).trim_end_matches('\0').to_owned()
}

fn parse_xdp(nested: &[u8]) -> Option<XdpState> {
    let of = |wanted: u16| attributes(nested).find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
    let attached = of(xdp::ATTACHED).and_then(|value| value.first().copied()).unwrap_or(0);
    (attached != 0).then(|| XdpState { attached, program: of(xdp::PROG_ID).map(number) })
}

pub(crate) fn number(value: &[u8]) -> u32 {
    value.first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}

/// The attributes of an answer behind the header of its kind.
pub(crate) fn attributes_of(answer: &[u8], header: usize) -> io::Result<impl Iterator<Item = (u16, &[u8])>> {
    Ok(attributes(answer.get(HEADER + header..).ok_or_else(bad_answer)?))
}

/// Walks attributes; stops at the first that does not fit.
fn attributes(mut rest: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(*rest.first_chunk()?));
        let kind = u16::from_ne_bytes(*rest.get(2..)?.first_chunk()?);
        let value = rest.get(4..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind & libc::NLA_TYPE_MASK as u16, value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_known() {
        let state = query(1).unwrap_or_else(|error| panic!("{error}"));
        assert!(state.mtu >= 1280 && state.name == "lo" && state.mac.is_none(), "{state:?}");
        assert_eq!(state.flags & libc::IFF_LOOPBACK as u32, libc::IFF_LOOPBACK as u32);
    }

    #[test]
    fn interfaces_that_are_not_there_are_errors() {
        let error = query(i32::MAX as u32).err().and_then(|error| error.raw_os_error());
        assert_eq!(error, Some(libc::ENODEV));
    }

    #[test]
    fn attached_programs_are_read() {
        let mut nested = Vec::new();
        attribute(&mut nested, xdp::ATTACHED, &[1]);
        attribute(&mut nested, xdp::PROG_ID, &77u32.to_ne_bytes());
        let mut kind = Vec::new();
        attribute(&mut kind, xdp::IFLA_INFO_KIND, b"veth\0");
        let mut all = Vec::new();
        attribute(&mut all, libc::IFLA_MTU, &1500u32.to_ne_bytes());
        attribute(&mut all, libc::IFLA_XDP | libc::NLA_F_NESTED as u16, &nested);
        attribute(&mut all, libc::IFLA_LINKINFO, &kind);
        let state = parse_link(&link_message(libc::RTM_NEWLINK, 0, 3, &all)).unwrap_or_default();
        let xdp = Some(XdpState { attached: 1, program: Some(77) });
        assert_eq!(state, LinkState { mtu: 1500, kind: Some("veth".into()), xdp, ..LinkState::default() });
    }

    #[test]
    fn broken_answers_are_errors_or_empty() {
        assert!(parse_link(&[]).is_err());
        assert!(parse_link(&[0; 20]).is_err());
        // An attribute that claims more bytes than there are, or fewer than its header.
        for length in [0u16, 3, 400] {
            let mut all = length.to_ne_bytes().to_vec();
            all.extend_from_slice(&[4, 0, 1, 2, 3, 4]);
            assert_eq!(
                parse_link(&link_message(libc::RTM_NEWLINK, 0, 3, &all)).ok(),
                Some(LinkState::default())
            );
        }
    }
}
