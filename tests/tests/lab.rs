//! The lab itself: namespaces, native XDP over veth, and a disturbance whose counts are exact.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use paatp_tests::netns::{Namespace, residue};
use paatp_tests::process::wait_until;
use paatp_tests::{Counts, Direction, Family, Lab, Layout, Rates, require_bpf};

const PORT: u16 = 20545;
const HEADER: usize = 64;

#[test]
fn nothing_is_left_behind() {
    if !require_bpf("lab::nothing_is_left_behind") {
        return;
    }
    let mut lab = Lab::new(Layout::workers(2)).unwrap();
    lab.publish(false).unwrap();
    let left = residue(std::process::id()).unwrap();
    assert!(left.len() >= 4, "published namespaces are seen: {left:?}");
    let names: Vec<_> = lab.namespaces().map(|namespace| format!("namespace {}", namespace.name())).collect();
    drop(lab);
    let panicking = std::panic::catch_unwind(|| {
        let mut lab = Lab::new(Layout::workers(1)).unwrap();
        lab.publish(false).unwrap();
        panic!("{} must vanish", lab.aggregator.namespace.name());
    });
    let message = *panicking.unwrap_err().downcast::<String>().unwrap();
    let left = residue(std::process::id()).unwrap();
    assert!(names.iter().all(|name| !left.contains(name)), "{left:?}");
    let other = message.split(' ').next().unwrap();
    assert!(left.iter().all(|entry| !entry.ends_with(other)), "{left:?} after a panic in {other}");
}

#[test]
fn commands_run_inside() {
    if !require_bpf("lab::commands_run_inside") {
        return;
    }
    let namespace = Namespace::new("inside").unwrap();
    assert!(namespace.ip(&["link", "show", "lo"]).unwrap().contains("UP"));
    let error = namespace.ip(&["link", "show", "nothing"]).unwrap_err().to_string();
    assert!(error.contains("nothing") && error.contains("inside"), "{error}");
    let links = namespace.run(|| std::fs::read_to_string("/proc/thread-self/net/dev").unwrap()).unwrap();
    assert_eq!(links.lines().count(), 3, "two headings and lo: {links}");
}

/// A datagram of the test: its number, again and again.
fn datagram(number: u32, length: usize) -> Vec<u8> {
    number.to_be_bytes().iter().copied().cycle().take(length).collect()
}

/// Which number a datagram has, and how many of its bits are wrong.
fn read(datagram: &[u8]) -> (u32, u32) {
    // A flipped bit is in at most one of three copies.
    let copy = |at: usize| u32::from_be_bytes(datagram[at..at + 4].try_into().unwrap());
    let (a, b, c) = (copy(0), copy(4), copy(8));
    let number = if a == b || a == c { a } else { b };
    let expected = self::datagram(number, datagram.len());
    (number, datagram.iter().zip(expected).map(|(a, b)| (a ^ b).count_ones()).sum())
}

/// Sends datagrams of changing lengths and returns what arrived. After each it waits until everything that the
/// disturbance let through is there, so that no queue overflows.
fn transfer(from: &UdpSocket, to: &UdpSocket, count: u32, counts: impl Fn() -> Counts) -> Vec<Vec<u8>> {
    let target = to.local_addr().unwrap();
    to.set_nonblocking(true).unwrap();
    let mut arrived: Vec<Vec<u8>> = Vec::new();
    let mut buffer = vec![0; 4096];
    for number in 0..count {
        let length = HEADER + (number % 11) as usize * 128;
        from.send_to(&datagram(number, length), target).unwrap();
        wait_until("a packet had gone through", Duration::from_secs(10), || {
            while let Ok(length) = to.recv(&mut buffer) {
                arrived.push(buffer[..length].to_vec());
            }
            let counts = counts();
            let through = counts.seen + counts.duplicated + counts.released - counts.dropped - counts.delayed;
            Ok(counts.seen == u64::from(number) + 1 && arrived.len() as u64 == through)
        })
        .unwrap_or_else(|error| panic!("{error}: {} of {} arrived: {}", arrived.len(), number + 1, counts()));
    }
    arrived
}

struct Seen {
    lost: u64,
    doubled: u64,
    overtaken: u64,
    corrupted_header: u64,
    corrupted_payload: u64,
}

fn examine(arrived: &[Vec<u8>], count: u32) -> Seen {
    let mut times: BTreeMap<u32, u64> = BTreeMap::new();
    let (mut corrupted_header, mut corrupted_payload, mut overtaken, mut highest) = (0, 0, 0, 0);
    for packet in arrived {
        let (number, wrong_bits) = read(packet);
        assert!(wrong_bits <= 1, "{wrong_bits} wrong bits in one packet");
        if wrong_bits == 1 {
            let expected = datagram(number, packet.len());
            let at = packet.iter().zip(expected).position(|(a, b)| *a != b).unwrap();
            *(if at < HEADER { &mut corrupted_header } else { &mut corrupted_payload }) += 1;
        }
        *times.entry(number).or_default() += 1;
        overtaken += u64::from(number < highest);
        highest = highest.max(number);
    }
    assert!(times.values().all(|times| *times <= 2));
    Seen {
        lost: u64::from(count) - times.len() as u64,
        doubled: times.values().filter(|times| **times == 2).count() as u64,
        overtaken,
        corrupted_header,
        corrupted_payload,
    }
}

fn disturbed(family: Family, direction: Direction, rates: Rates) {
    const COUNT: u32 = 4000;
    let lab = Lab::new(Layout::workers(1)).unwrap();
    let worker = &lab.workers[0];
    let (egress, ingress) = match direction {
        Direction::Egress => (rates, Rates::NONE),
        Direction::Ingress => (Rates::NONE, rates),
    };
    let disturbance = lab.disturb(0, PORT..=PORT, 99, egress, ingress).unwrap();
    let bind = |host: &paatp_tests::lab::Host, port| {
        let address = SocketAddr::new(host.address(family), port);
        host.namespace.run(|| UdpSocket::bind(address).unwrap()).unwrap()
    };
    let (theirs, ours) = (bind(&lab.aggregator, PORT), bind(worker, 4000));
    for socket in [&theirs, &ours] {
        allow_zero_checksums(socket, family);
    }
    let so_far = || disturbance.counts(direction).unwrap();
    let arrived = match direction {
        Direction::Egress => transfer(&ours, &theirs, COUNT, so_far),
        Direction::Ingress => transfer(&theirs, &ours, COUNT, so_far),
    };
    let counts = disturbance.counts(direction).unwrap();
    let seen = examine(&arrived, COUNT);
    println!("{family:?} {direction:?}: {counts}");
    assert_eq!(lab.dropped_by_the_kernel().unwrap(), 0);
    assert_eq!(counts.seen, u64::from(COUNT));
    assert_eq!(counts.failed, 0);
    // A packet that was doubled and then held back for good has arrived once.
    let lost_for_good = counts.delayed - counts.released;
    assert!(lost_for_good <= 1);
    assert!((counts.dropped..=counts.dropped + lost_for_good).contains(&seen.lost), "{} lost", seen.lost);
    assert!((counts.duplicated.saturating_sub(lost_for_good)..=counts.duplicated).contains(&seen.doubled));
    assert_eq!(
        (seen.corrupted_header, seen.corrupted_payload),
        (counts.corrupted_header, counts.corrupted_payload)
    );
    assert_eq!(counts.corrupted, counts.corrupted_header + counts.corrupted_payload);
    // Duplicates of the successor may overtake it as well.
    assert!(seen.overtaken >= counts.released, "{} overtaken, {} released", seen.overtaken, counts.released);
    for (rate, count) in [
        (rates.loss, counts.dropped),
        (rates.duplicate, counts.duplicated),
        (rates.reorder, counts.delayed),
        (rates.corrupt, counts.corrupted),
    ] {
        // Six standard deviations of a binomial distribution, and what earlier rolls take away.
        let expected = rate * f64::from(COUNT);
        let tolerance = 6.0 * (expected * (1.0 - rate)).sqrt() + expected * (rates.loss + rates.reorder);
        assert!((count as f64 - expected).abs() <= tolerance, "{count} of {COUNT} at a rate of {rate}");
    }
    let other = match direction {
        Direction::Egress => Direction::Ingress,
        Direction::Ingress => Direction::Egress,
    };
    assert_eq!(disturbance.counts(other).unwrap().dropped, 0);
}

/// IPv6 sockets refuse datagrams without a checksum unless they are told.
fn allow_zero_checksums(socket: &UdpSocket, family: Family) {
    use std::os::fd::AsRawFd;
    /// `UDP_NO_CHECK6_RX` of the kernel.
    const NO_CHECK6_RX: libc::c_int = 102;
    if family == Family::V6 {
        let yes: libc::c_int = 1;
        // SAFETY: pointer and size describe `yes`.
        let result = unsafe {
            let size = size_of_val(&yes) as libc::socklen_t;
            libc::setsockopt(socket.as_raw_fd(), libc::SOL_UDP, NO_CHECK6_RX, (&raw const yes).cast(), size)
        };
        assert_eq!(result, 0);
    }
}

const HARSH: Rates = Rates { loss: 0.1, duplicate: 0.05, reorder: 0.05, corrupt: 0.05 };

#[test]
fn requests_are_disturbed_as_counted() {
    if require_bpf("lab::requests_are_disturbed_as_counted") {
        disturbed(Family::V4, Direction::Egress, HARSH);
        disturbed(Family::V6, Direction::Egress, HARSH);
    }
}

#[test]
fn answers_are_disturbed_as_counted() {
    if require_bpf("lab::answers_are_disturbed_as_counted") {
        disturbed(Family::V4, Direction::Ingress, HARSH);
        disturbed(Family::V6, Direction::Ingress, HARSH);
    }
}

#[test]
fn each_disturbance_alone() {
    if require_bpf("lab::each_disturbance_alone") {
        for rates in [
            Rates { loss: 0.5, ..Rates::NONE },
            Rates { duplicate: 1.0, ..Rates::NONE },
            Rates { reorder: 0.3, ..Rates::NONE },
            Rates { corrupt: 1.0, ..Rates::NONE },
            Rates::NONE,
        ] {
            disturbed(Family::V4, Direction::Egress, rates);
            disturbed(Family::V4, Direction::Ingress, rates);
        }
    }
}
