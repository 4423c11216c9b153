//! Ethernet, IP and UDP headers of a worker's datagrams: made once, completed for each datagram.

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;

use crate::worker::driver::CE;

/// Bytes of headers.
pub const ETHERNET_BYTES: usize = 14;
const IPV4_BYTES: usize = 20;
const IPV6_BYTES: usize = 40;
const UDP_BYTES: usize = 8;
/// The longest of all headers together.
pub const MOST_BYTES: usize = ETHERNET_BYTES + IPV6_BYTES + UDP_BYTES;

const ETHER_IPV4: [u8; 2] = [0x08, 0x00];
const ETHER_IPV6: [u8; 2] = [0x86, 0xDD];
const PROTOCOL_UDP: u8 = 17;
/// ECT(0): switches may mark instead of drop.
const ECT0: u8 = 0b10;
/// Routers on the way, as for any packet of this host.
const HOP_LIMIT: u8 = 64;
/// "Don't fragment".
const DONT_FRAGMENT: [u8; 2] = [0x40, 0x00];

/// The headers of one worker's datagrams. UDP checksums are 0, "none": header and payload have their own checks.
#[derive(Clone, Debug)]
pub struct Headers {
    bytes: [u8; MOST_BYTES],
    is_v4: bool,
    /// Sum of the IPv4 header's words but the length.
    sum: u32,
}

impl Headers {
    /// From one socket's address to another's, between two Ethernet addresses. Both are of one IP version.
    pub fn new(macs: (&[u8; 6], &[u8; 6]), local: SocketAddr, remote: SocketAddr) -> Headers {
        let mut bytes = Vec::with_capacity(MOST_BYTES);
        bytes.extend_from_slice(macs.1);
        bytes.extend_from_slice(macs.0);
        let is_v4 = match (local.ip(), remote.ip()) {
            (IpAddr::V4(local), IpAddr::V4(remote)) => {
                bytes.extend_from_slice(&ETHER_IPV4);
                bytes.extend_from_slice(&[0x45, ECT0, 0, 0, 0, 0]); // version and words, TOS, length, identification
                bytes.extend_from_slice(&DONT_FRAGMENT);
                bytes.extend_from_slice(&[HOP_LIMIT, PROTOCOL_UDP, 0, 0]); // and the checksum
                bytes.extend_from_slice(&local.octets());
                bytes.extend_from_slice(&remote.octets());
                true
            }
            (local, remote) => {
                bytes.extend_from_slice(&ETHER_IPV6);
                bytes.extend_from_slice(&[0x60 | ECT0 >> 4, ECT0 << 4, 0, 0]); // version, class, flow label
                bytes.extend_from_slice(&[0, 0, PROTOCOL_UDP, HOP_LIMIT]); // length first
                bytes.extend_from_slice(&octets_v6(local));
                bytes.extend_from_slice(&octets_v6(remote));
                false
            }
        };
        bytes.extend_from_slice(&local.port().to_be_bytes());
        bytes.extend_from_slice(&remote.port().to_be_bytes());
        bytes.extend_from_slice(&[0; 4]); // length and checksum
        let mut all = [0; MOST_BYTES];
        all.iter_mut().zip(&bytes).for_each(|(to, from)| *to = *from);
        let ip = all.get(ETHERNET_BYTES..ETHERNET_BYTES + IPV4_BYTES).unwrap_or_default();
        let sum = ip.chunks_exact(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum();
        Headers { bytes: all, is_v4, sum }
    }

    /// Bytes of all headers.
    pub const fn len(&self) -> usize {
        if self.is_v4 { MOST_BYTES - IPV6_BYTES + IPV4_BYTES } else { MOST_BYTES }
    }

    /// Completes the frame at the beginning of `frame`, whose payload of `payload` bytes stands behind the room for
    /// headers already. Returns the frame's length; none if it does not fit.
    pub fn write(&self, frame: &mut [u8], payload: usize, port: u16) -> Option<usize> {
        let headers = self.len();
        let total = headers + payload;
        let udp_length = u16::try_from(UDP_BYTES + payload).ok()?.to_be_bytes();
        let frame = frame.get_mut(..total)?;
        frame.get_mut(..headers)?.copy_from_slice(self.bytes.get(..headers)?);
        if self.is_v4 {
            let length = u16::try_from(total - ETHERNET_BYTES).ok()?;
            put(frame, ETHERNET_BYTES + 2, length.to_be_bytes())?;
            put(frame, ETHERNET_BYTES + 10, checksum(self.sum + u32::from(length)).to_be_bytes())?;
        } else {
            put(frame, ETHERNET_BYTES + 4, udp_length)?;
        }
        let udp = headers - UDP_BYTES;
        put(frame, udp + 2, port.to_be_bytes())?;
        put(frame, udp + 4, udp_length)?;
        Some(total)
    }

    /// Where the payload of an answer to these datagrams is; none if the frame is none. The program has looked at the
    /// addresses; lengths and the port may still be anything, and a card may have padded the frame.
    pub fn payload(&self, frame: &[u8], is_port: impl Fn(u16) -> bool) -> Option<Range<usize>> {
        let udp = self.len() - UDP_BYTES;
        let [a, b, _, _, c, d, ..] = *frame.get(udp..)? else { return None };
        let end = udp + usize::from(u16::from_be_bytes([c, d]));
        let payload = self.len()..end;
        (payload.start <= end && end <= frame.len() && is_port(u16::from_be_bytes([a, b]))).then_some(payload)
    }
}

impl Headers {
    /// The IP header says "congestion experienced".
    pub fn is_marked(&self, frame: &[u8]) -> bool {
        // TOS is a byte of its own; the traffic class lies across two.
        let class = frame.get(ETHERNET_BYTES + 1).map(|byte| if self.is_v4 { *byte } else { byte >> 4 });
        class.is_some_and(|class| class & CE == CE)
    }
}

fn put(frame: &mut [u8], offset: usize, bytes: [u8; 2]) -> Option<()> {
    frame.get_mut(offset..offset + 2)?.copy_from_slice(&bytes);
    Some(())
}

const fn checksum(sum: u32) -> u16 {
    let folded = (sum & 0xFFFF) + (sum >> 16);
    !((folded & 0xFFFF) + (folded >> 16)) as u16
}

fn octets_v6(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paatp_common::frame::{Frame, Parsed, parse, turn_round};
    use paatp_common::job::{Node, mapped};

    const MACS: (&[u8; 6], &[u8; 6]) = (&[2, 0, 0, 0, 0, 1], &[2, 0, 0, 0, 0, 2]);
    /// Our header and one block of lanes.
    const PAYLOAD: usize = 64 + 128;

    fn ends(v6: bool) -> (SocketAddr, SocketAddr) {
        let (local, remote) =
            if v6 { ("[fd00::2]:4000", "[fd00::1]:20545") } else { ("10.0.0.2:4000", "10.0.0.1:20545") };
        let read = |text: &str| text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
        (read(local), read(remote))
    }

    fn node(remote: SocketAddr) -> Node {
        let mut node = Node { port_base: 20545, port_count: 2, ..Node::default() };
        node.local[0] = match remote.ip() {
            IpAddr::V4(v4) => mapped(v4.octets()),
            IpAddr::V6(v6) => v6.octets(),
        };
        node
    }

    /// Ones' complement sum of an IPv4 header, which is right if it is all ones.
    fn sum(words: &[u8]) -> u16 {
        !checksum(words.chunks_exact(2).map(|w| u32::from(w[0]) << 8 | u32::from(w[1])).sum())
    }

    /// The aggregator takes what we send, and we take what it makes of that.
    #[test]
    fn the_aggregator_reads_our_frames_and_we_read_its_answers() {
        for v6 in [false, true] {
            let (local, remote) = ends(v6);
            let headers = Headers::new(MACS, local, remote);
            let mut bytes = [7u8; MOST_BYTES + PAYLOAD];
            let length = headers.write(&mut bytes, PAYLOAD, 20546).unwrap_or(0);
            assert_eq!(length, headers.len() + PAYLOAD);
            if !v6 {
                assert_eq!(sum(&bytes[ETHERNET_BYTES..ETHERNET_BYTES + IPV4_BYTES]), 0xFFFF);
                assert_eq!(bytes[ETHERNET_BYTES + 1] & 3, ECT0);
            }
            assert!(!headers.is_marked(&bytes));
            let mut marked = bytes;
            marked[ETHERNET_BYTES + 1] |= if v6 { CE << 4 } else { CE };
            assert!(headers.is_marked(&marked) && !headers.is_marked(&[]));
            let mut frame = Frame::new(&mut bytes[..length]);
            let layout = match parse(&frame, length as u32, &node(remote), 0) {
                Parsed::Ours(layout, arrival) => {
                    assert!(!arrival.congested);
                    layout
                }
                _ => panic!("not ours, IPv6: {v6}"),
            };
            assert!(turn_round(&mut frame, layout, 128).is_some());
            let payload = headers.payload(&bytes[..length], |port| port == 20546);
            assert_eq!(payload, Some(headers.len()..headers.len() + PAYLOAD));
            assert_eq!(headers.payload(&bytes[..length], |port| port == 20545), None);
        }
    }

    #[test]
    fn lengths_that_lie_are_refused() {
        let (local, remote) = ends(false);
        let headers = Headers::new(MACS, local, remote);
        let mut bytes = [0u8; MOST_BYTES + PAYLOAD];
        let length = headers.write(&mut bytes, PAYLOAD, 20545).unwrap_or(0);
        let udp = headers.len() - UDP_BYTES;
        let source_is_any = |_| true;
        // Padded by a card: the datagram ends where UDP says.
        assert_eq!(
            headers.payload(&bytes[..length + 4], source_is_any),
            Some(headers.len()..headers.len() + PAYLOAD)
        );
        for (high, low) in [(0, 0), (0, 7), (0xFF, 0xFF)] {
            (bytes[udp + 4], bytes[udp + 5]) = (high, low);
            assert_eq!(headers.payload(&bytes[..length], source_is_any), None, "{high} {low}");
        }
        for end in 0..headers.len() {
            assert_eq!(headers.payload(&bytes[..end], source_is_any), None);
        }
        assert_eq!(headers.write(&mut bytes, PAYLOAD + 100, 1), None);
    }
}
