//! Frames: which are ours, which are refused, and how they are turned round.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

mod support;

use std::fs;
use std::path::PathBuf;

use paatp_common::counter::Event;
use paatp_common::frame::{self, Frame, Parsed};
use paatp_common::levels::Way;
use paatp_common::wire::{Answer, Header, Request, flags};
use paatp_common::{Refusal, Seq};
use proptest::prelude::*;
use support::corpus::{self, fragment_v6};
use support::node::{OwnedNode, Verdict};
use support::packet::{Envelope, PORT, PORTS, internet_checksum};
use support::replay::{self, BLOCKS, LANES, jobs, node_at_work};
use support::requests::{TestJob, lanes_of, sum_of};

/// A contribution to an empty slot.
fn good(job: &TestJob) -> Vec<u8> {
    job.datagram(&job.data(0, Seq(3), sum_of(LANES)), &lanes_of(job.world, 0, Seq(3), LANES))
}

/// A frame that must not be answered: what happens to it, and what is counted.
fn refused(frame: &[u8], verdict: Verdict, counted: Option<Refusal>) {
    let mut node = node_at_work(BLOCKS);
    let (slots, counters) = (node.slot_bytes(), node.counters);
    let mut after = frame.to_vec();
    assert_eq!(node.frame(&mut after), verdict);
    assert_eq!(after, frame, "left as it was");
    assert_eq!(node.slot_bytes(), slots);
    let mut expected = counters;
    match counted {
        Some(refusal) => expected.refuse(refusal),
        None => expected.note(Event::Passed),
    }
    assert_eq!(node.counters, expected);
}

fn passes(frame: &[u8]) {
    refused(frame, Verdict::Pass, None);
}

/// A good frame of each version of IP with a change, and the offsets of its IP and UDP headers.
fn changed(change: impl Fn(&mut Vec<u8>, usize, usize)) -> [Vec<u8>; 2] {
    jobs().map(|job| {
        let envelope = job.envelope(0);
        let mut frame = envelope.wrap(&good(&job));
        change(&mut frame, envelope.ip(), envelope.udp());
        frame
    })
}

const TAGS: [&[u16]; 5] = [&[], &[0x8100], &[0x88A8], &[0x88A8, 0x8100], &[0x8100, 0x8100]];

/// Every field of the headers around the answer.
fn check_turned(request: &[u8], answer: &[u8], envelope: &Envelope, payload: usize) {
    let (ip, udp) = (envelope.ip(), envelope.udp());
    assert_eq!(answer.len(), envelope.datagram() + 64 + payload);
    assert_eq!((&answer[..6], &answer[6..12]), (&request[6..12], &request[..6]), "MAC addresses");
    assert_eq!(answer[12..ip], request[12..ip], "tags and type");
    let datagram = (8 + 64 + payload) as u16;
    let ecn = if envelope.ecn == 0b11 { 0b10 } else { envelope.ecn };
    if envelope.v6 {
        let ecn_field = request[ip + 1] & 0xCF | ecn << 4;
        assert_eq!(answer[ip..ip + 4], [request[ip], ecn_field, request[ip + 2], request[ip + 3]]);
        assert_eq!(answer[ip + 4..ip + 6], datagram.to_be_bytes());
        assert_eq!(answer[ip + 6..ip + 8], [17, 64]);
        assert_eq!(
            (&answer[ip + 8..ip + 24], &answer[ip + 24..ip + 40]),
            (&envelope.destination[..], &envelope.source[..])
        );
    } else {
        assert_eq!(answer[ip..ip + 2], [0x45, request[ip + 1] & 0xFC | ecn]);
        assert_eq!(answer[ip + 2..ip + 4], (datagram + 20).to_be_bytes());
        assert_eq!(answer[ip + 4..ip + 8], request[ip + 4..ip + 8], "identification and fragment bits");
        assert_eq!(answer[ip + 8..ip + 10], [64, 17]);
        assert_eq!(internet_checksum(&answer[ip..ip + 20]), 0);
        assert_eq!(
            (&answer[ip + 12..ip + 16], &answer[ip + 16..ip + 20]),
            (&envelope.destination[12..], &envelope.source[12..])
        );
    }
    assert_eq!(answer[udp..udp + 2], request[udp + 2..udp + 4], "ports");
    assert_eq!(answer[udp + 2..udp + 4], request[udp..udp + 2], "ports");
    assert_eq!(answer[udp + 4..udp + 6], datagram.to_be_bytes());
    assert_eq!(answer[udp + 6..udp + 8], [0, 0], "no checksum");
}

#[test]
fn requests_are_turned_round() {
    for job in jobs() {
        for (tags, ecn) in TAGS.iter().flat_map(|tags| (0..4).map(move |ecn| (tags, ecn))) {
            for port in PORT..PORT + PORTS {
                for has_result in [true, false] {
                    let mut node = node_at_work(BLOCKS);
                    let want = Seq(if has_result { 0 } else { 1 });
                    let mut envelope = job.envelope(2);
                    (envelope.tags, envelope.ecn, envelope.port) = (tags.to_vec(), ecn, port);
                    let room = vec![0; LANES as usize];
                    let request = envelope.wrap(&job.datagram(&job.pull(2, want, sum_of(LANES)), &room));
                    let mut frame = request.clone();
                    assert_eq!(node.frame(&mut frame), Verdict::Transmit);
                    check_turned(&request, &frame, &envelope, if has_result { room.len() * 4 } else { 0 });
                    let answer = Answer::decode(Header::of(&frame[envelope.datagram()..]).unwrap()).unwrap();
                    assert_eq!(answer.ecn_echo, ecn == 0b11, "the mark goes back to the sender");
                    assert_eq!(node.counters.noted(Event::EcnMarks), u64::from(ecn == 0b11));
                }
            }
        }
    }
}

/// Levels: a frame goes on from where it came to, to a neighbour and an address, with its marks and tags.
#[test]
fn frames_are_sent_on() {
    let way = Way::new([2, 4, 6, 8, 10, 12], 40_007);
    for (job, tags) in jobs().into_iter().flat_map(|job| TAGS.map(|tags| (job, tags))) {
        for (ecn, payload) in [(0b10, usize::from(LANES) * 4), (0b11, 0)] {
            let envelope = Envelope { tags: tags.to_vec(), ecn, ..job.envelope(0) };
            let frame = envelope.wrap(&good(&job));
            let node = node_at_work(BLOCKS).node;
            let Parsed::Ours(layout, _) =
                frame::parse(&Frame::new(&mut frame.clone()), frame.len() as u32, &node, 0)
            else {
                panic!("ours")
            };
            let back = frame::way_back(&Frame::new(&mut frame.clone()), layout).unwrap();
            assert_eq!((&back.mac()[..], back.port()), (&frame[6..12], envelope.source_port));
            let mut on = frame.clone();
            let to = job.address(2);
            frame::send_on(&mut Frame::new(&mut on), layout, payload as u32, None, way, &to).unwrap();
            let (ip, udp) = (envelope.ip(), envelope.udp());
            assert_eq!((&on[..6], &on[6..12]), (&way.mac()[..], &frame[..6]), "MAC addresses");
            assert_eq!(on[12..ip], frame[12..ip], "tags and type");
            let datagram = (8 + 64 + payload) as u16;
            if envelope.v6 {
                assert_eq!(on[ip..ip + 4], frame[ip..ip + 4], "class, marks and label");
                assert_eq!(on[ip + 4..ip + 6], datagram.to_be_bytes());
                assert_eq!(on[ip + 6..ip + 8], [17, 64]);
                assert_eq!(
                    (&on[ip + 8..ip + 24], &on[ip + 24..ip + 40]),
                    (&envelope.destination[..], &to[..])
                );
            } else {
                assert_eq!(on[ip..ip + 2], frame[ip..ip + 2], "class and marks");
                assert_eq!(on[ip + 2..ip + 4], (datagram + 20).to_be_bytes());
                assert_eq!(on[ip + 4..ip + 8], frame[ip + 4..ip + 8], "identification and fragment bits");
                assert_eq!(on[ip + 8..ip + 10], [64, 17]);
                assert_eq!(internet_checksum(&on[ip..ip + 20]), 0);
                assert_eq!(
                    (&on[ip + 12..ip + 16], &on[ip + 16..ip + 20]),
                    (&envelope.destination[12..], &to[12..])
                );
            }
            assert_eq!(on[udp..udp + 2], envelope.port.to_be_bytes(), "from the port it came to");
            assert_eq!(on[udp + 2..udp + 4], way.port().to_be_bytes());
            assert_eq!(
                (&on[udp + 4..udp + 6], &on[udp + 6..udp + 8]),
                (&datagram.to_be_bytes()[..], &[0, 0][..])
            );
            assert_eq!(on[udp + 8..], frame[udp + 8..]);
        }
    }
}

/// Answers to what a node has sent on come to ports after those of requests, where the program takes part in levels, and
/// to no more than those; what goes on may leave from one of them.
#[test]
fn ports_after_those_of_requests_are_for_answers_to_a_node() {
    const RELAYED: u16 = 64;
    let node = node_at_work(BLOCKS).node;
    for job in jobs() {
        for (port, relayed, counted) in [
            (PORT + PORTS - 1, 0, Some(PORTS - 1)),
            (PORT + PORTS, 0, None),
            (PORT - 1, RELAYED, None),
            (PORT, RELAYED, Some(0)),
            (PORT + PORTS, RELAYED, Some(PORTS)),
            (PORT + PORTS + RELAYED - 1, RELAYED, Some(PORTS + RELAYED - 1)),
            (PORT + PORTS + RELAYED, RELAYED, None),
        ] {
            let mut frame = Envelope { port, ..job.envelope(0) }.wrap(&good(&job));
            let length = frame.len() as u32;
            let parsed = frame::parse(&Frame::new(&mut frame), length, &node, relayed);
            let found = match parsed {
                Parsed::Ours(_, arrival) => Some(arrival.port),
                Parsed::NotOurs => None,
                other => panic!("{other:?}"),
            };
            assert_eq!(found, counted, "{port} {relayed}");
            let Parsed::Ours(layout, arrival) = parsed else { continue };
            let (way, to) = (Way::new([2; 6], 40_007), job.address(2));
            let source = Some(PORT + PORTS + 5);
            let mut on = Frame::new(&mut frame);
            frame::send_on(&mut on, layout, arrival.payload_bytes, source, way, &to).unwrap();
            let udp = job.envelope(0).udp();
            assert_eq!(frame[udp..udp + 2], (PORT + PORTS + 5).to_be_bytes());
        }
    }
}

#[test]
fn three_tags_pass_unread() {
    for job in jobs() {
        for tags in [[0x8100; 3], [0x88A8, 0x8100, 0x8100], [0x8100, 0x8100, 0x88A8]] {
            let mut envelope = job.envelope(0);
            envelope.tags = tags.to_vec();
            refused(&envelope.wrap(&good(&job)), Verdict::Pass, Some(Refusal::TooManyTags));
        }
    }
}

#[test]
fn first_fragments_are_refused_and_later_ones_are_not_ours() {
    let [v4, v6] = changed(|_, _, _| ());
    let with_flags = |flags: [u8; 2]| {
        let mut frame = v4.clone();
        frame[20..22].copy_from_slice(&flags);
        frame
    };
    for first in [[0x20, 0], [0x60, 0]] {
        refused(&with_flags(first), Verdict::Drop, Some(Refusal::Fragment));
    }
    for later in [[0, 1], [0x20, 1], [0x1F, 0xFF], [0x01, 0]] {
        passes(&with_flags(later));
    }
    refused(&fragment_v6(&v6, 14, [0, 1]), Verdict::Drop, Some(Refusal::Fragment));
    // A fragment that is the whole datagram ("atomic") is refused like any other.
    refused(&fragment_v6(&v6, 14, [0, 0]), Verdict::Drop, Some(Refusal::Fragment));
    for later in [[0, 8], [0, 9], [1, 0]] {
        passes(&fragment_v6(&v6, 14, later));
    }
}

#[test]
fn fragments_of_others_are_not_ours() {
    let [mut v4, mut v6] = changed(|frame, _, udp| frame[udp + 2] ^= 1);
    v4[20] = 0x20;
    passes(&v4);
    v6 = fragment_v6(&v6, 14, [0, 1]);
    passes(&v6);
}

#[test]
fn options_and_extensions_are_not_ours() {
    let [v4, v6] = changed(|_, _, _| ());
    for first in [0x44, 0x46, 0x4F, 0x55, 0x65] {
        let mut frame = v4.clone();
        frame[14] = first;
        passes(&frame);
    }
    for next in [0, 6, 43, 50, 51, 58, 59, 60] {
        let mut frame = v6.clone();
        frame[20] = next;
        passes(&frame);
    }
}

#[test]
fn other_protocols_are_not_ours() {
    for frame in changed(|frame, ip, _| {
        let at = ip + if frame[12] == 8 { 9 } else { 6 };
        frame[at] = 6;
    }) {
        passes(&frame);
    }
    for kind in [[0x08, 0x06], [0x88, 0x47], [0x88, 0xCC], [0x91, 0x00]] {
        for frame in changed(|frame, _, _| frame[12..14].copy_from_slice(&kind)) {
            passes(&frame);
        }
    }
}

#[test]
fn other_ports_are_not_ours() {
    for port in [0, 1, PORT - 1, PORT + PORTS, u16::MAX] {
        for frame in changed(|f, _, udp| f[udp + 2..udp + 4].copy_from_slice(&port.to_be_bytes())) {
            passes(&frame);
        }
    }
}

#[test]
fn other_destinations_are_not_ours() {
    for bit in 0..8 {
        for frame in changed(|frame, _, udp| frame[udp - 1] ^= 1 << bit) {
            passes(&frame);
        }
    }
    let [broadcast, _] = changed(|frame, _, udp| frame[udp - 4..udp].fill(0xFF));
    passes(&broadcast);
}

#[test]
fn a_frame_that_is_cut_off_anywhere_is_refused() {
    for job in jobs() {
        for tags in TAGS {
            let mut envelope = job.envelope(0);
            envelope.tags = tags.to_vec();
            let frame = envelope.wrap(&good(&job));
            for length in 0..frame.len() {
                if length < envelope.datagram() {
                    passes(&frame[..length]);
                } else {
                    refused(&frame[..length], Verdict::Drop, Some(Refusal::LengthMismatch));
                }
            }
        }
    }
}

#[test]
fn a_frame_with_something_behind_it_is_refused() {
    for more in [1, 2, 64, 127, 128, 129, 1024] {
        for frame in changed(|frame, _, _| frame.resize(frame.len() + more, 0)) {
            refused(&frame, Verdict::Drop, Some(Refusal::LengthMismatch));
        }
    }
}

#[test]
fn lengths_that_disagree_are_refused() {
    let add = |field: &mut [u8], by: i16| {
        let value = u16::from_be_bytes([field[0], field[1]]).wrapping_add_signed(by);
        field.copy_from_slice(&value.to_be_bytes());
    };
    for by in [-128, -4, -1, 1, 4, 128, 1000] {
        for frame in changed(|f, _, udp| add(&mut f[udp + 4..udp + 6], by)) {
            refused(&frame, Verdict::Drop, Some(Refusal::LengthMismatch));
        }
        for frame in changed(|f, ip, _| {
            let at = ip + if f[12] == 8 { 2 } else { 4 };
            add(&mut f[at..at + 2], by);
        }) {
            refused(&frame, Verdict::Drop, Some(Refusal::LengthMismatch));
        }
    }
}

#[test]
fn datagrams_shorter_than_a_header_are_refused() {
    for job in jobs() {
        for length in 0..64 {
            let frame = job.envelope(0).wrap(&good(&job)[..length]);
            refused(&frame, Verdict::Drop, Some(Refusal::Truncated));
        }
    }
}

#[test]
fn payloads_that_are_not_what_the_header_says_are_refused() {
    for job in jobs() {
        // Frame, IP and UDP agree with each other; the header tells another number of lanes.
        let whole = good(&job);
        for length in (64..whole.len()).step_by(4) {
            refused(&job.envelope(0).wrap(&whole[..length]), Verdict::Drop, Some(Refusal::LengthMismatch));
        }
        // Or says that there are none.
        let mut silent = whole.clone();
        support::requests::edit(&mut silent, |header| header.set_flags(header.flags() & !flags::PAYLOAD));
        refused(&job.envelope(0).wrap(&silent), Verdict::Drop, Some(Refusal::LengthMismatch));
    }
}

#[test]
fn more_lanes_than_the_job_has_are_refused() {
    for job in jobs() {
        for lanes in [LANES + 32, 512] {
            let request = Request { bitmap: 1, ..job.data(0, Seq(3), sum_of(lanes)) };
            let frame = job.frame(&request, &vec![1; lanes as usize]);
            refused(&frame, Verdict::Drop, Some(Refusal::BadLanes));
        }
    }
}

fn corpus_folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/frame")
}

/// `PAATP_WRITE_CORPUS=1` writes the frames of [`corpus::frames`]; what the fuzzer adds stays.
#[test]
fn the_corpus_is_replayed() {
    let folder = corpus_folder();
    if std::env::var_os("PAATP_WRITE_CORPUS").is_some() {
        fs::create_dir_all(&folder).unwrap();
        for (name, frame) in corpus::frames() {
            fs::write(folder.join(name), frame).unwrap();
        }
    }
    for (name, frame) in corpus::frames() {
        let path = folder.join(&name);
        let kept = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert_eq!(kept, frame, "{name}: run with PAATP_WRITE_CORPUS=1 if frames have changed");
    }
    let mut replayed = 0;
    for entry in fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        if let Err(panic) = std::panic::catch_unwind(|| replay::check(&bytes)) {
            eprintln!("while replaying {}", path.display());
            std::panic::resume_unwind(panic);
        }
        replayed += 1;
    }
    assert!(replayed >= corpus::frames().len());
}

/// The good frames of the corpus are answered: else it would test the parser's first refusals only.
#[test]
fn the_corpus_reaches_the_slots() {
    let mut total = OwnedNode::new(0, 0, 1).counters;
    for (_, mut frame) in corpus::frames() {
        let mut node = node_at_work(BLOCKS);
        node.counters = Default::default();
        node.frame(&mut frame);
        total.absorb(&node.counters);
    }
    for event in
        [Event::Contributions, Event::Stores, Event::Adds, Event::Duplicates, Event::Results, Event::Redos]
    {
        assert!(total.noted(event) > 0, "{}", event.name());
    }
    // (The jobs of the corpus have rings, so nothing is crowded.)
    let unreachable = [
        Refusal::TooManyAttempts,
        Refusal::DeadRankInRedo,
        Refusal::LockBusy,
        Refusal::BadVersion,
        Refusal::Crowded,
    ];
    let expected = [Refusal::BadHeaderCheck, Refusal::ForeignAddress];
    for refusal in Refusal::ALL.iter().filter(|r| !unreachable.contains(r) && !expected.contains(r)) {
        assert!(total.refused(*refusal) > 0, "{}", refusal.name());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    #[test]
    fn random_bytes_do_nothing(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        replay::check(&bytes);
    }

    #[test]
    fn frames_with_random_changes_do_nothing_that_is_not_theirs(
        which in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        wishes in any::<u8>(),
        cut in prop::option::weighted(0.1, any::<prop::sample::Index>()),
    ) {
        let frames = corpus::frames();
        let mut frame = which.get(&frames).1.clone();
        for (at, value) in changes.iter().filter(|_| !frame.is_empty()).collect::<Vec<_>>() {
            let at = at.index(frame.len());
            frame[at] ^= value;
        }
        // Where a plain frame of IPv4 asks for being mended.
        if let Some(field) = frame.get_mut(14 + 20 + 8 + 51) {
            *field = wishes;
        }
        if let Some(cut) = cut {
            frame.truncate(cut.index(frame.len() + 1));
        }
        replay::check(&frame);
    }
}
