//! The Wireshark dissector reads what `paatp-common` writes: every field of random headers, and every flipped bit.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::fs;

use paatp_common::counter::Refusal;
use paatp_common::policy::Told;
use paatp_common::seq::Seq;
use paatp_common::wire::{
    Answer, Body, Chunk, ElementType, HEADER_BYTES, Header, Kind, Operation, Request, Status, flags,
};
use paatp_tests::gradients::Random;
use paatp_tests::require_program;
use paatp_tests::tshark::{Fields, decode};

const PORT: u16 = 20545;
/// Link type "raw IP": no Ethernet.
const RAW_IP: u32 = 101;

/// A capture file of datagrams from and to our port, one a microsecond.
fn capture(datagrams: &[Vec<u8>]) -> Vec<u8> {
    let mut file = Vec::new();
    let number = |file: &mut Vec<u8>, value: u32| file.extend_from_slice(&value.to_le_bytes());
    for value in [0xa1b2_3c4d, 0x0004_0002, 0, 0, 65535, RAW_IP] {
        number(&mut file, value);
    }
    for (index, datagram) in datagrams.iter().enumerate() {
        let is_answer = datagram.get(2).is_some_and(|byte| byte & 0x0F == Kind::Answer as u8);
        let (from, to) = if is_answer { (PORT, 40_000) } else { (40_000, PORT) };
        let length = u16::try_from(28 + datagram.len()).unwrap();
        for value in [0, index as u32 * 1000, length.into(), length.into()] {
            number(&mut file, value);
        }
        file.extend_from_slice(&[0x45, 0]);
        file.extend_from_slice(&length.to_be_bytes());
        file.extend_from_slice(&[0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        for value in [from, to, length - 20, 0] {
            file.extend_from_slice(&value.to_be_bytes());
        }
        file.extend_from_slice(datagram);
    }
    file
}

/// What the dissector makes of them: for each datagram its fields, with all of their values.
fn dissected(datagrams: &[Vec<u8>], fields: &[&str], options: &[&str]) -> Vec<Fields> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("packets.pcap");
    fs::write(&file, capture(datagrams)).unwrap();
    let lines = decode(&file, fields, options).unwrap();
    assert_eq!(lines.len(), datagrams.len());
    lines
}

fn request(random: &mut Random) -> Request {
    let [a, b, c, d] = [(); 4].map(|()| random.bits());
    let operation = Operation::from_wire((a % 7) as u8).unwrap();
    let everybody = (a >> 8) as u8 & 0x80;
    let chunk = Chunk {
        operation_and_type: everybody | (operation as u8) << 4 | ((a >> 16) as u8 % 4),
        lanes: (b % 12) as u16 * 32,
        exponent: (b >> 16) as i8,
        root: (b >> 24) as u8 % 64,
    };
    Request {
        kind: if a >> 32 & 1 == 0 { Kind::Data } else { Kind::Pull },
        flags: [0, flags::RETRANSMIT, flags::NON_FINITE][(a >> 33) as usize % 3],
        job: (b >> 32) as u16,
        worker: (b >> 48) as u8 % 64,
        generation: c as u32,
        seq: Seq((c >> 32) as u32),
        want: Seq(d as u32),
        ack: Seq((d >> 32) as u32),
        progress: Seq(random.bits() as u32),
        token: random.bits() as u32,
        bitmap: random.bits(),
        tag: random.bits(),
        chunk,
        next_exponent: random.bits() as i8,
        attempt: random.bits() as u8,
    }
}

/// The header of a random answer.
fn answer(random: &mut Random) -> Header {
    let mut header = request(random).encode();
    header.set_kind(Kind::Answer);
    let status = random.bits() as u8 % 11;
    header.set_status(status);
    let flags = [0, flags::RESULT, flags::REDO, flags::RESULT | flags::NON_FINITE, flags::ECN_ECHO];
    header.set_flags(flags[random.bits() as usize % flags.len()]);
    header.set_told(random.bits() as u8 & 0x7F);
    header.set_window(random.bits() as u16);
    header.set_gain(random.bits() as i8);
    if Status::from_wire(status) == Some(Status::Aborted) {
        header.set_attempt(random.bits() as u8 % Refusal::COUNT as u8);
    }
    header.seal();
    header
}

type Expected = Vec<(&'static str, String)>;

fn expected_of_request(request: &Request) -> Expected {
    let chunk = request.chunk;
    let operation = chunk.operation().unwrap();
    let mut expected = vec![
        ("paatp.kind", (request.kind as u8).to_string()),
        ("paatp.flags", format!("{:#04x}", request.flags)),
        ("paatp.flags.retransmit", told(request.flags & flags::RETRANSMIT != 0)),
        ("paatp.job", request.job.to_string()),
        ("paatp.worker", request.worker.to_string()),
        ("paatp.status", String::new()),
        ("paatp.generation", format!("{:#010x}", request.generation)),
        ("paatp.seq", request.seq.0.to_string()),
        ("paatp.want", request.want.0.to_string()),
        ("paatp.ack", request.ack.0.to_string()),
        ("paatp.progress", request.progress.0.to_string()),
        ("paatp.token", request.token.to_string()),
        ("paatp.bitmap", format!("{:#018x}", request.bitmap)),
        ("paatp.ranks", ranks(request.bitmap)),
        ("paatp.tag", format!("{:#018x}", request.tag)),
        ("paatp.lanes", chunk.lanes.to_string()),
        ("paatp.contributors", request.bitmap.count_ones().to_string()),
        ("paatp.exponent", chunk.exponent.to_string()),
        ("paatp.next_exponent", request.next_exponent.to_string()),
        ("paatp.attempt", request.attempt.to_string()),
        ("paatp.operation", (operation as u8).to_string()),
        ("paatp.type", (chunk.operation_and_type & 0x0F).to_string()),
        ("paatp.everybody", told(chunk.operation_and_type & 0x80 != 0)),
        ("paatp.check.good", told(true)),
    ];
    let of = |wanted, value| if operation == wanted { value } else { String::new() };
    expected.push(("paatp.root", of(Operation::Broadcast, chunk.root.to_string())));
    expected.push(("paatp.fingerprint", of(Operation::Exponents, format!("{:#04x}", chunk.root))));
    expected
}

fn expected_of_answer(header: &Header) -> Expected {
    let answer = Answer::decode(header).unwrap();
    let mut expected = vec![
        ("paatp.kind", (Kind::Answer as u8).to_string()),
        ("paatp.status", (answer.status as u8).to_string()),
        ("paatp.seq", answer.seq.0.to_string()),
        ("paatp.token", answer.token.to_string()),
        ("paatp.ack", String::new()),
        ("paatp.operation", String::new()),
        ("paatp.check.good", told(true)),
    ];
    if answer.status == Status::Rejoin {
        expected.push(("paatp.p_min", String::new()));
        return expected;
    }
    let known = if header.has(flags::NON_FINITE) { "paatp.culprit" } else { "paatp.slowest" };
    expected.extend([
        ("paatp.p_min", answer.p_min.0.to_string()),
        ("paatp.p_max", answer.p_max.0.to_string()),
        ("paatp.window", answer.window.to_string()),
        ("paatp.gain", answer.gain.to_string()),
        ("paatp.epoch", answer.epoch.to_string()),
        ("paatp.staleness", (header.told() & 0x3F).to_string()),
        ("paatp.mode.partial", told(Told(header.told()).is_partial())),
        ("paatp.flags.ecn_echo", told(answer.ecn_echo)),
        (known, answer.slowest.to_string()),
    ]);
    let is_result = matches!(answer.body, Body::Result { .. });
    let aborted = answer.status == Status::Aborted && !is_result;
    expected.push((if aborted { "paatp.reason" } else { "paatp.attempt" }, answer.attempt.to_string()));
    match answer.body {
        Body::Result { want, bitmap, tag, exponent, next_exponent, .. } => expected.extend([
            ("paatp.want", want.0.to_string()),
            ("paatp.min_ack", String::new()),
            ("paatp.ranks", ranks(bitmap)),
            ("paatp.tag", format!("{tag:#018x}")),
            ("paatp.exponent", exponent.to_string()),
            ("paatp.next_exponent", next_exponent.to_string()),
            ("paatp.redo.seq", String::new()),
        ]),
        Body::Pending { min_ack, bitmap, redo, lanes, above: _ } => expected.extend([
            ("paatp.want", String::new()),
            ("paatp.min_ack", min_ack.0.to_string()),
            ("paatp.ranks", ranks(bitmap)),
            ("paatp.tag", String::new()),
            ("paatp.redo.seq", redo.map_or_else(String::new, |redo| redo.seq.0.to_string())),
            ("paatp.redo.attempt", redo.map_or_else(String::new, |redo| redo.attempt.to_string())),
            ("paatp.lanes", lanes.to_string()),
        ]),
    }
    expected
}

/// As tshark writes a truth.
fn told(truth: bool) -> String {
    u8::from(truth).to_string()
}

/// "0-3, 5"
fn ranks(bitmap: u64) -> String {
    let mut parts = Vec::new();
    let mut rank = 0;
    while rank < 64 {
        let first = rank;
        while rank < 64 && bitmap >> rank & 1 == 1 {
            rank += 1;
        }
        match rank - first {
            0 => {}
            1 => parts.push(format!("{first}")),
            _ => parts.push(format!("{first}-{}", rank - 1)),
        }
        rank += 1;
    }
    if parts.is_empty() { "none".into() } else { parts.join(", ") }
}

fn compare(datagrams: &[Vec<u8>], expected: &[Expected]) {
    let mut fields: Vec<&str> = expected.iter().flatten().map(|(field, _)| *field).collect();
    fields.sort_unstable();
    fields.dedup();
    for ((line, expected), datagram) in dissected(datagrams, &fields, &[]).iter().zip(expected).zip(datagrams)
    {
        for (field, value) in expected {
            // Some versions write truths as words.
            let shown = line[*field].replace("True", "1").replace("False", "0");
            assert_eq!(&shown, value, "{field} of {datagram:02x?}: {line:?}");
        }
    }
}

#[test]
fn every_field_of_random_headers_is_read() {
    if !require_program("dissector::every_field_of_random_headers_is_read", "tshark") {
        return;
    }
    let mut random = Random(0x5041);
    let requests: Vec<Request> = (0..400).map(|_| request(&mut random)).collect();
    let datagrams: Vec<Vec<u8>> =
        requests.iter().map(|request| request.encode().as_bytes().to_vec()).collect();
    compare(&datagrams, &requests.iter().map(expected_of_request).collect::<Vec<_>>());

    let answers: Vec<Header> = (0..400).map(|_| answer(&mut random)).collect();
    let datagrams: Vec<Vec<u8>> = answers.iter().map(|header| header.as_bytes().to_vec()).collect();
    compare(&datagrams, &answers.iter().map(expected_of_answer).collect::<Vec<_>>());
}

/// Every single bit of a header, and lengths that are wrong.
#[test]
fn what_is_damaged_is_told() {
    if !require_program("dissector::what_is_damaged_is_told", "tshark") {
        return;
    }
    let whole = request(&mut Random(1)).encode().as_bytes().to_vec();
    let mut datagrams: Vec<Vec<u8>> = (0..HEADER_BYTES * 8)
        .map(|bit| {
            let mut damaged = whole.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            damaged
        })
        .collect();
    let flipped = datagrams.len();
    datagrams.push(whole[..HEADER_BYTES - 1].to_vec());
    datagrams.push(Vec::new());
    datagrams.push([&whole[..], &[0; 128]].concat());
    let fields =
        ["paatp.check.good", "paatp.bad_check", "paatp.short", "paatp.bad_length", "_ws.expert.message"];
    let lines = dissected(&datagrams, &fields, &[]);
    for (bit, line) in lines.iter().take(flipped).enumerate() {
        assert!(matches!(line["paatp.check.good"].as_str(), "0" | "False"), "bit {bit}: {line:?}");
        assert!(line["_ws.expert.message"].contains("failed its check"), "bit {bit}: {line:?}");
    }
    assert!(lines[flipped]["_ws.expert.message"].contains("Shorter than a header"), "{:?}", lines[flipped]);
    assert!(lines[flipped + 2]["_ws.expert.message"].contains("0 bytes of payload, there are 128"));
}

#[test]
fn reasons_are_sentences() {
    if !require_program("dissector::reasons_are_sentences", "tshark") {
        return;
    }
    let mut header = request(&mut Random(2)).encode();
    header.set_kind(Kind::Answer);
    header.set_flags(0);
    header.set_status(Status::Aborted as u8);
    header.set_attempt(Refusal::Mismatch as u8);
    header.set_bitmap(0b1011);
    header.seal();
    let lines = dissected(&[header.as_bytes().to_vec()], &["_ws.expert.message", "_ws.col.Info"], &[]);
    let message = &lines[0]["_ws.expert.message"];
    assert!(message.contains(Refusal::Mismatch.sentence()) && message.contains("ranks 0-1, 3"), "{message}");
    assert!(lines[0]["_ws.col.Info"].contains("ABORTED"), "{:?}", lines[0]);
}

/// An answer knows its request, a repeated contribution the first, and lanes become values if the world is known.
#[test]
fn packets_are_linked_and_lanes_are_values() {
    if !require_program("dissector::packets_are_linked_and_lanes_are_values", "tshark") {
        return;
    }
    // Two ranks: a bias of 2^30, and a step of 2^(3 + 1 - 30).
    let chunk = Chunk::new(Operation::Sum, ElementType::F32, 32, 3);
    let first = Request {
        kind: Kind::Data,
        flags: flags::PAYLOAD,
        bitmap: 1,
        chunk,
        token: 7,
        seq: Seq(5),
        want: Seq(5),
        worker: 0,
        ..request(&mut Random(3))
    };
    let again = Request { flags: flags::PAYLOAD | flags::RETRANSMIT, token: 8, ..first };
    let mut result = first.encode();
    result.set_kind(Kind::Answer);
    result.set_flags(flags::PAYLOAD | flags::RESULT);
    result.set_bitmap(3);
    result.set_contributors(2);
    result.seal();
    let with =
        |header: Header, lane: u32| [header.as_bytes().to_vec(), lane.to_be_bytes().repeat(32)].concat();
    let quanta = 12 << 26;
    let datagrams = [
        with(first.encode(), (1 << 30) + quanta),
        with(again.encode(), (1 << 30) + quanta),
        with(result, (2u32 << 30).wrapping_sub(quanta)),
    ];
    let fields = [
        "paatp.answer_in",
        "paatp.request_in",
        "paatp.time",
        "paatp.retransmission_of",
        "paatp.value",
        "_ws.col.Info",
        "_ws.expert.message",
    ];
    let lines = dissected(&datagrams, &fields, &["-o", "paatp.world:2"]);
    assert_eq!(
        (lines[0]["paatp.answer_in"].as_str(), lines[0]["paatp.retransmission_of"].as_str()),
        ("3", "")
    );
    assert_eq!(
        (lines[1]["paatp.answer_in"].as_str(), lines[1]["paatp.retransmission_of"].as_str()),
        ("", "1")
    );
    assert!(lines[1]["_ws.expert.message"].contains("Sent before"), "{:?}", lines[1]);
    assert_eq!(lines[2]["paatp.request_in"], "1");
    assert_eq!(lines[2]["paatp.time"].parse::<f64>().unwrap(), 2e-6, "{:?}", lines[2]);
    for (line, value) in lines.iter().zip(["12", "12", "-12"]) {
        assert_eq!(line["paatp.value"].split(',').next(), Some(value), "{line:?}");
    }
    let info = &lines[2]["_ws.col.Info"];
    assert!(info.starts_with("ANSWER job") && info.ends_with("seq 5 OK, result of 5, 32 lanes"), "{info}");
}
