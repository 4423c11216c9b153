//! Which packets are taken.

use paatp_common::wire::{HEADER_BYTES, Header};

/// Bytes of the longest headers before ours: Ethernet, two VLAN tags, IPv6, UDP.
const OUTER_BYTES: usize = 14 + 2 * 4 + 40 + 8;

/// Bytes of the longest headers, ours included.
pub const HEAD_BYTES: usize = OUTER_BYTES + HEADER_BYTES;

/// Length of the time over which the rate is kept, in nanoseconds: short enough that a burst is not the whole second's
/// share, long enough for a few packets of a low rate.
pub const RATE_WINDOW_NS: u64 = 100_000_000;

/// Every packet, as [`Settings::threshold`].
pub const EVERY_PACKET: u32 = u32::MAX;

/// What is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// First UDP port of ours.
    pub first_port: u16,
    /// Last one.
    pub last_port: u16,
    /// Number of the job; every job without it.
    pub job: Option<u16>,
    /// Packets whose [`draw`] is not above this are taken.
    pub threshold: u32,
    /// Most packets in [`RATE_WINDOW_NS`]; 0 for any number.
    pub window_packets: u32,
    /// Bytes of a datagram that are kept.
    pub keep: usize,
}

impl Settings {
    /// The threshold that takes one exchange in `n`.
    #[must_use]
    pub const fn one_in(n: u32) -> u32 {
        if n <= 1 { EVERY_PACKET } else { u32::MAX / n }
    }

    /// A packet with this header is one of those that are asked for. What is too short to have one is, unless it had to be
    /// of a job.
    #[must_use]
    pub fn takes(&self, header: Option<&Header>) -> bool {
        let Some(header) = header else { return self.job.is_none() };
        self.job.is_none_or(|job| job == header.job()) && draw(header) <= self.threshold
    }
}

/// A number that is the same for a request and its answer, and spreads evenly over a rank's requests: they are numbered in
/// order, and multiples of the golden ratio lie evenly.
#[must_use]
pub const fn draw(header: &Header) -> u32 {
    let sender = header.job() as u32 * 64 + header.worker() as u32;
    header.token().wrapping_add(sender.wrapping_mul(0x85EB_CA6B)).wrapping_mul(0x9E37_79B1)
}

/// Where our header begins in a frame that is UDP to or from one of our ports: behind Ethernet, at most two VLAN tags, IPv4
/// without options or IPv6 without extensions.
#[must_use]
pub fn locate(frame: &[u8], settings: &Settings) -> Option<usize> {
    let byte = |at: usize| frame.get(at).copied();
    let short = |at: usize| Some(u16::from_be_bytes([byte(at)?, byte(at + 1)?]));
    let tags =
        (0..=2).find(|tags| !short(12 + 4 * tags).is_some_and(|ether| matches!(ether, 0x8100 | 0x88A8)))?;
    let ether = 12 + 4 * tags;
    let ip = ether + 2;
    let (udp, protocol, fragment) = match short(ether)? {
        0x0800 if byte(ip)? == 0x45 => (ip + 20, byte(ip + 9)?, short(ip + 6)? & 0x1FFF),
        0x86DD => (ip + 40, byte(ip + 6)?, 0),
        _ => return None,
    };
    let ports = settings.first_port..=settings.last_port;
    let ours = ports.contains(&short(udp)?) || ports.contains(&short(udp + 2)?);
    (protocol == 17 && fragment == 0 && ours).then_some(udp + 8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytemuck::Zeroable;

    const SETTINGS: Settings = Settings {
        first_port: 20545,
        last_port: 20546,
        job: None,
        threshold: EVERY_PACKET,
        window_packets: 0,
        keep: HEADER_BYTES,
    };

    fn header(job: u16, worker: u8, token: u32) -> Header {
        let mut header = Header::zeroed();
        header.set_job(job);
        header.set_worker(worker);
        header.set_token(token);
        header
    }

    fn frame(tags: &[u16], ether: u16, ip: &[u8], ports: [u16; 2]) -> Vec<u8> {
        let mut bytes: Vec<u8> = [0; 12].to_vec();
        for tag in tags {
            bytes.extend_from_slice(&[&tag.to_be_bytes()[..], &[0, 5]].concat());
        }
        bytes.extend_from_slice(&ether.to_be_bytes());
        bytes.extend_from_slice(ip);
        ports.iter().for_each(|port| bytes.extend_from_slice(&port.to_be_bytes()));
        bytes.resize(bytes.len() + 4 + HEADER_BYTES, 0);
        bytes
    }

    #[test]
    fn our_header_is_found_behind_all_others() {
        let mut v4 = [0; 20];
        (v4[0], v4[9]) = (0x45, 17);
        let mut v6 = [0; 40];
        (v6[0], v6[6]) = (0x60, 17);
        for (tags, more) in [(&[][..], 0), (&[0x8100], 4), (&[0x88A8, 0x8100], 8)] {
            for ports in [[4000, 20545], [20546, 4000]] {
                assert_eq!(locate(&frame(tags, 0x0800, &v4, ports), &SETTINGS), Some(42 + more));
                assert_eq!(locate(&frame(tags, 0x86DD, &v6, ports), &SETTINGS), Some(62 + more));
            }
        }
        let ours = [4000, 20545];
        assert_eq!(locate(&frame(&[0x8100; 3], 0x0800, &v4, ours), &SETTINGS), None);
        assert_eq!(locate(&frame(&[], 0x0806, &v4, ours), &SETTINGS), None);
        assert_eq!(locate(&frame(&[], 0x0800, &v4, [4000, 20547]), &SETTINGS), None);
        assert_eq!(locate(&frame(&[], 0x0800, &v4, [20544, 53]), &SETTINGS), None);
        (v4[6], v4[7]) = (0, 1);
        assert_eq!(locate(&frame(&[], 0x0800, &v4, ours), &SETTINGS), None);
        (v4[0], v4[7]) = (0x46, 0);
        assert_eq!(locate(&frame(&[], 0x0800, &v4, ours), &SETTINGS), None);
        v6[6] = 6;
        assert_eq!(locate(&frame(&[], 0x86DD, &v6, ours), &SETTINGS), None);
    }

    #[test]
    fn one_in_n_is_one_in_n_for_every_rank() {
        for n in [1, 2, 7, 100] {
            for worker in [0, 1, 63] {
                let settings = Settings { threshold: Settings::one_in(n), ..SETTINGS };
                let taken =
                    (0..10_000).filter(|token| settings.takes(Some(&header(3, worker, *token)))).count();
                let fair = 10_000 / n as usize;
                assert!(taken.abs_diff(fair) <= 2 + fair / 50, "1 in {n}: {taken} of 10000");
            }
        }
    }

    #[test]
    fn jobs_are_told_apart() {
        let settings = Settings { job: Some(3), ..SETTINGS };
        assert!(settings.takes(Some(&header(3, 0, 1))) && !settings.takes(Some(&header(4, 0, 1))));
        assert!(SETTINGS.takes(None) && !settings.takes(None));
    }
}
