//! What `SIOCETHTOOL` tells: the driver's name, queues, offloads, flow rules, the receive hash. Rules and the driver's
//! name are not to be had over netlink, and what is needs a fraction of this.
//!
//! Layouts are those of `linux/ethtool.h`, the same on all 64-bit architectures. Buffers are of 64-bit words, so that
//! they are aligned for every structure.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use crate::doctor::facts::{FlowRule, Offload, Queues};

const GET_DRIVER: u32 = 0x3;
const GET_STRINGS: u32 = 0x1b;
const GET_STRING_COUNT: u32 = 0x37;
const GET_FEATURES: u32 = 0x3a;
const GET_CHANNELS: u32 = 0x3c;
const GET_HASH: u32 = 0x29;
const GET_RULE_COUNT: u32 = 0x2e;
const GET_RULE: u32 = 0x2f;
const GET_RULES: u32 = 0x30;

/// Bytes of `struct ethtool_drvinfo`, and where the name is in it.
const DRIVER_BYTES: usize = 196;
const DRIVER_NAME: std::ops::Range<usize> = 4..36;

/// Bytes of `struct ethtool_channels`.
const CHANNELS_BYTES: usize = 36;

/// `ETH_SS_FEATURES`: the set of the offloads' names, and the bytes of one.
const FEATURE_NAMES: u32 = 4;
const NAME_BYTES: usize = 32;
/// Most names that are read; Linux 6.18 has 64.
const MAX_FEATURES: u32 = 1024;

/// Bytes of `struct ethtool_rxnfc`, and where its parts are.
const RULE_BYTES: usize = 192;
mod at {
    pub const FLOW_TYPE: usize = 4;
    pub const DATA: usize = 8;
    /// `fs`, the rule: its own flow type, header fields, their mask, queue, location.
    pub const RULE: usize = 16;
    pub const FIELDS: usize = RULE + 4;
    pub const MASK: usize = RULE + 76;
    pub const QUEUE: usize = RULE + 152;
    pub const LOCATION: usize = RULE + 160;
    pub const COUNT: usize = 184;
    pub const LOCATIONS: usize = 188;
}
/// Bytes of a rule's header fields with their extension; the mask is as long.
const FIELD_BYTES: usize = 72;
/// Where the destination port is in `struct ethtool_tcpip4_spec` and `…_tcpip6_spec`.
const PORT_V4: usize = 10;
const PORT_V6: usize = 34;

const UDP_V4_FLOW: u32 = 0x02;
const UDP_V6_FLOW: u32 = 0x06;
/// The hash takes both ports: `RXH_L4_B_0_1 | RXH_L4_B_2_3`.
const HASH_PORTS: u64 = 0b1100_0000;

/// Most rules that are read; cards have up to 8192.
const MAX_RULES: u32 = 16 << 10;

/// A structure for the kernel to read and write.
struct Buffer(Vec<u64>);

impl Buffer {
    fn new(bytes: usize, command: u32) -> Buffer {
        let mut buffer = Buffer(vec![0; bytes.div_ceil(8)]);
        buffer.set(0, command);
        buffer
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }

    fn set(&mut self, at: usize, value: u32) {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.0);
        if let Some(field) = bytes.get_mut(at..at + 4) {
            field.copy_from_slice(&value.to_ne_bytes());
        }
    }

    fn u32(&self, at: usize) -> u32 {
        let field = self.bytes().get(at..).and_then(|rest| rest.first_chunk());
        field.map_or(0, |bytes| u32::from_ne_bytes(*bytes))
    }

    fn u64(&self, at: usize) -> u64 {
        let field = self.bytes().get(at..).and_then(|rest| rest.first_chunk());
        field.map_or(0, |bytes| u64::from_ne_bytes(*bytes))
    }
}

/// Asks about one interface.
struct Device<'a> {
    socket: OwnedFd,
    name: &'a str,
}

impl Device<'_> {
    fn open(name: &str) -> io::Result<Device<'_>> {
        let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
        Ok(Device { socket, name })
    }

    /// The buffer has at least the bytes of the command's structure.
    fn ask(&self, buffer: &mut Buffer) -> io::Result<()> {
        // SAFETY: all zeroes are a valid `ifreq`.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        // The last byte stays 0.
        let room = request.ifr_name.len() - 1;
        for (to, from) in request.ifr_name.iter_mut().take(room).zip(self.name.bytes()) {
            *to = from as libc::c_char;
        }
        request.ifr_ifru.ifru_data = buffer.0.as_mut_ptr().cast();
        // SAFETY: the request and the buffer it points to outlive the call; the kernel writes no more than the
        // command's structure and, after it, as many locations, names or blocks as the buffer's
        // count says it has room for.
        let result =
            unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut request) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Names of the offloads, by bit.
    fn feature_names(&self) -> io::Result<Vec<String>> {
        // Command, padding, 64 bits of the sets asked for, then the count of each.
        let mut buffer = Buffer::new(20, GET_STRING_COUNT);
        if let Some(sets) = buffer.0.get_mut(at::DATA / 8) {
            *sets = 1 << FEATURE_NAMES;
        }
        self.ask(&mut buffer)?;
        let count = buffer.u32(16);
        if count > MAX_FEATURES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // Command, set, count, then the names. The count is the kernel's own and fixed as long as it runs.
        let mut buffer = Buffer::new(12 + NAME_BYTES * count as usize, GET_STRINGS);
        buffer.set(4, FEATURE_NAMES);
        buffer.set(8, count);
        self.ask(&mut buffer)?;
        let names = buffer.bytes().get(12..).unwrap_or_default().chunks_exact(NAME_BYTES);
        Ok(names.take(count as usize).map(text).collect())
    }
}

/// A name in a field of constant length.
fn text(field: &[u8]) -> String {
    String::from_utf8_lossy(field.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned()
}

/// The driver's name.
pub fn driver(name: &str) -> Option<String> {
    let mut buffer = Buffer::new(DRIVER_BYTES, GET_DRIVER);
    Device::open(name).ok()?.ask(&mut buffer).ok()?;
    Some(text(buffer.bytes().get(DRIVER_NAME)?)).filter(|name| !name.is_empty())
}

/// Queues in use, and how many there could be.
#[must_use]
pub fn queues(name: &str) -> Option<Queues> {
    let mut buffer = Buffer::new(CHANNELS_BYTES, GET_CHANNELS);
    Device::open(name).ok()?.ask(&mut buffer).ok()?;
    // After the command: the most of rx, tx, other and combined, then those in use.
    let [_, rx_most, tx_most, _, combined_most, rx, tx, _, combined] =
        std::array::from_fn(|i| buffer.u32(4 * i));
    Some(Queues {
        receive: combined.saturating_add(rx),
        transmit: combined.saturating_add(tx),
        receive_most: combined_most.saturating_add(rx_most),
        transmit_most: combined_most.saturating_add(tx_most),
        combined: combined_most > 0,
    })
}

/// All offloads by the kernel's names.
#[must_use]
pub fn offloads(name: &str) -> Option<BTreeMap<String, Offload>> {
    let device = Device::open(name).ok()?;
    let names = device.feature_names().ok()?;
    let blocks = names.len().div_ceil(32);
    let mut buffer = Buffer::new(8 + 16 * blocks, GET_FEATURES);
    buffer.set(4, blocks as u32);
    device.ask(&mut buffer).ok()?;
    // A block of 32 offloads: those that can be changed, are wanted, are on, can never be changed.
    let bit = |i: usize, word: usize| buffer.u32(8 + 16 * (i / 32) + 4 * word) >> (i % 32) & 1 == 1;
    let offload = |i| Offload { on: bit(i, 2), fixed: !bit(i, 0) || bit(i, 3) };
    let named = names.into_iter().enumerate().filter(|(_, name)| !name.is_empty());
    Some(named.map(|(i, name)| (name, offload(i))).collect())
}

/// Whether the hash that spreads UDP over IPv4 to queues includes the ports.
pub fn hash_has_ports(name: &str) -> Option<bool> {
    let mut buffer = Buffer::new(RULE_BYTES, GET_HASH);
    buffer.set(at::FLOW_TYPE, UDP_V4_FLOW);
    Device::open(name).ok()?.ask(&mut buffer).ok()?;
    match buffer.u64(at::DATA) {
        // The driver knows the question, but spreads nothing.
        0 => None,
        fields => Some(fields & HASH_PORTS == HASH_PORTS),
    }
}

/// Rules that send one UDP port to one queue; none where the driver has no rules.
#[must_use]
pub fn flow_rules(name: &str) -> Option<Vec<FlowRule>> {
    let device = Device::open(name).ok()?;
    let mut buffer = Buffer::new(RULE_BYTES, GET_RULE_COUNT);
    device.ask(&mut buffer).ok()?;
    let count = buffer.u32(at::COUNT).min(MAX_RULES);
    let mut buffer = Buffer::new(RULE_BYTES + 4 * count as usize, GET_RULES);
    buffer.set(at::COUNT, count);
    device.ask(&mut buffer).ok()?;
    let count = buffer.u32(at::COUNT).min(count);
    let locations = (0..count as usize).map(|i| buffer.u32(at::LOCATIONS + 4 * i));
    let rule = |location| {
        let mut buffer = Buffer::new(RULE_BYTES, GET_RULE);
        buffer.set(at::LOCATION, location);
        device.ask(&mut buffer).ok()?;
        parse_rule(&buffer)
    };
    Some(locations.filter_map(rule).collect())
}

/// A rule that looks at nothing but a UDP destination port; none if it is another one.
fn parse_rule(buffer: &Buffer) -> Option<FlowRule> {
    let (v6, port_at) = match buffer.u32(at::RULE) {
        UDP_V4_FLOW => (false, PORT_V4),
        UDP_V6_FLOW => (true, PORT_V6),
        _ => return None,
    };
    let bytes = buffer.bytes();
    let mask = bytes.get(at::MASK..at::MASK + FIELD_BYTES)?;
    let is_port = |i: usize| i == port_at || i == port_at + 1;
    if mask.iter().enumerate().any(|(i, byte)| *byte != if is_port(i) { 0xff } else { 0 }) {
        return None;
    }
    let port = u16::from_be_bytes(*bytes.get(at::FIELDS + port_at..)?.first_chunk()?);
    // Anything above the queue's 32 bits is a virtual function, or "drop".
    let queue = u32::try_from(buffer.u64(at::QUEUE)).ok()?;
    Some(FlowRule { location: buffer.u32(at::LOCATION), v6, port, queue })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(flow: u32, port_at: usize, mask: &[(usize, u8)], queue: u64) -> Buffer {
        let mut buffer = Buffer::new(RULE_BYTES, GET_RULE);
        buffer.set(at::RULE, flow);
        buffer.set(at::LOCATION, 7);
        buffer.set(at::QUEUE, queue as u32);
        buffer.set(at::QUEUE + 4, (queue >> 32) as u32);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut buffer.0);
        bytes[at::FIELDS + port_at..][..2].copy_from_slice(&20545u16.to_be_bytes());
        for (at, value) in mask {
            bytes[at::MASK + at] = *value;
        }
        buffer
    }

    #[test]
    fn rules_of_one_port_are_read() {
        let v4 = rule(UDP_V4_FLOW, PORT_V4, &[(10, 0xff), (11, 0xff)], 3);
        assert_eq!(parse_rule(&v4), Some(FlowRule { location: 7, v6: false, port: 20545, queue: 3 }));
        let v6 = rule(UDP_V6_FLOW, PORT_V6, &[(34, 0xff), (35, 0xff)], 1);
        assert_eq!(parse_rule(&v6), Some(FlowRule { location: 7, v6: true, port: 20545, queue: 1 }));
    }

    #[test]
    fn other_rules_are_not_taken_for_ours() {
        let whole = [(10, 0xff), (11, 0xff)];
        assert_eq!(parse_rule(&rule(1, PORT_V4, &whole, 3)), None, "TCP");
        assert_eq!(parse_rule(&rule(UDP_V4_FLOW, PORT_V4, &whole[..1], 3)), None, "a range of ports");
        let from_one = [whole[0], whole[1], (0, 0xff)];
        assert_eq!(parse_rule(&rule(UDP_V4_FLOW, PORT_V4, &from_one, 3)), None, "one sender");
        assert_eq!(parse_rule(&rule(UDP_V4_FLOW, PORT_V4, &whole, u64::MAX)), None, "drop");
    }

    #[test]
    fn offloads_of_loopback_are_known() {
        let offloads = offloads("lo").unwrap_or_default();
        // The same on every kernel: loopback leaves all checksums out and does no large receive offload.
        let checksum = offloads.get("tx-checksum-ip-generic");
        assert!(checksum.is_some_and(|offload| offload.on && offload.fixed), "{offloads:?}");
        assert!(offloads.get("rx-lro").is_some_and(|offload| !offload.on));
    }

    #[test]
    fn interfaces_without_a_driver_tell_nothing() {
        assert_eq!(driver("nosuchif0"), None);
        assert_eq!((queues("nosuchif0"), offloads("nosuchif0")), (None, None));
        assert_eq!(flow_rules("lo"), None);
        assert_eq!(hash_has_ports("nosuchif0"), None);
    }
}
