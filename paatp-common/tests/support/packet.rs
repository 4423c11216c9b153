//! Frames around datagrams.

use paatp_common::job::{Address, mapped};

/// First UDP port of the node under test.
pub const PORT: u16 = 20545;
/// Number of its ports.
pub const PORTS: u16 = 2;

/// A small generator of numbers that look random (SplitMix64): the same sequence for the same seed, everywhere.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.number() % bound
    }

    /// True in `percent` of a hundred cases.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// So many bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.number() as u8).collect()
    }
}

/// Everything around a datagram.
#[derive(Clone, Debug)]
pub struct Envelope {
    /// Ethernet types of the VLAN tags, outermost first.
    pub tags: Vec<u16>,
    /// IPv6.
    pub v6: bool,
    /// Sender; the last four bytes for IPv4.
    pub source: Address,
    /// Receiver.
    pub destination: Address,
    /// Port of the sender.
    pub source_port: u16,
    /// Port of the receiver.
    pub port: u16,
    /// The two ECN bits.
    pub ecn: u8,
}

/// The addresses at which the node under test is, IPv4 and IPv6.
#[must_use]
pub const fn local(v6: bool) -> Address {
    if v6 { [0xFD, 0x50, 0, 0x41, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1] } else { mapped([10, 80, 0, 1]) }
}

const MACS: [[u8; 6]; 2] = [[2, 0x50, 0, 0, 0, 1], [2, 0x50, 0, 0, 1, 9]];

impl Envelope {
    /// From `source` to the node under test, untagged.
    #[must_use]
    pub fn from(source: Address, v6: bool) -> Envelope {
        let destination = local(v6);
        Envelope { tags: Vec::new(), v6, source, destination, source_port: 40_001, port: PORT, ecn: 0b10 }
    }

    /// Offset of the IP header.
    #[must_use]
    pub fn ip(&self) -> usize {
        14 + 4 * self.tags.len()
    }

    /// Offset of the UDP header.
    #[must_use]
    pub fn udp(&self) -> usize {
        self.ip() + if self.v6 { 40 } else { 20 }
    }

    /// Offset of the datagram.
    #[must_use]
    pub fn datagram(&self) -> usize {
        self.udp() + 8
    }

    /// The whole frame.
    #[must_use]
    pub fn wrap(&self, datagram: &[u8]) -> Vec<u8> {
        let udp_bytes = datagram.len() as u16 + 8;
        let mut frame = MACS.concat();
        for (number, tag) in self.tags.iter().enumerate() {
            frame.extend(tag.to_be_bytes());
            frame.extend([0x20, number as u8 + 1]);
        }
        frame.extend(if self.v6 { [0x86, 0xDD] } else { [0x08, 0x00] });
        let ip = frame.len();
        if self.v6 {
            frame.extend([0x62, 0x85 | self.ecn << 4, 0xCD, 0xEF]);
            frame.extend(udp_bytes.to_be_bytes());
            frame.extend([17, 63]);
            frame.extend(self.source);
            frame.extend(self.destination);
        } else {
            frame.extend([0x45, 0x28 | self.ecn]);
            frame.extend((udp_bytes + 20).to_be_bytes());
            frame.extend([0x12, 0x34, 0x40, 0, 63, 17, 0, 0]);
            frame.extend(&self.source[12..]);
            frame.extend(&self.destination[12..]);
            let sum = internet_checksum(&frame[ip..]);
            frame[ip + 10..ip + 12].copy_from_slice(&sum.to_be_bytes());
        }
        frame.extend(self.source_port.to_be_bytes());
        frame.extend(self.port.to_be_bytes());
        frame.extend(udp_bytes.to_be_bytes());
        // What checksum offload leaves: a partial sum.
        frame.extend([0xAB, 0xCD]);
        frame.extend(datagram);
        frame
    }
}

/// RFC 1071 over whole 16-bit words; 0 over a header that holds its right checksum.
#[must_use]
pub fn internet_checksum(bytes: &[u8]) -> u16 {
    let mut sum: u64 =
        bytes.chunks(2).map(|w| u64::from(w[0]) << 8 | u64::from(*w.get(1).unwrap_or(&0))).sum();
    while sum > 0xFFFF {
        sum = (sum & 0xFFFF) + (sum >> 16);
    }
    !(sum as u16)
}
