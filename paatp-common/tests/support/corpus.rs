//! Frames that are worth keeping: seeds for the fuzzer, replayed by the tests.

use paatp_common::Seq;
use paatp_common::wire::{Chunk, ElementType, Operation, Request, flags};

use super::packet::{PORT, Random};
use super::replay::{LANES, jobs};
use super::requests::{TestJob, edit, lanes_of, sum_of};

/// Frames with names for files.
#[must_use]
pub fn frames() -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    for job in jobs() {
        let version = if job.v6 { "v6" } else { "v4" };
        for (name, frame) in around_ip(&job).into_iter().chain(requests(&job)) {
            all.push((format!("{version}-{name}"), frame));
        }
    }
    let mut random = Random(7);
    all.push(("empty".into(), Vec::new()));
    all.push(("random-64".into(), random.bytes(64)));
    all.push(("random-1500".into(), random.bytes(1500)));
    all.push(("arp".into(), [&[0xFF; 12][..], &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1], &[0; 36]].concat()));
    all
}

/// A contribution to the chunk that is begun.
fn good(job: &TestJob) -> (Request, Vec<u32>) {
    (job.data(0, Seq(1), sum_of(LANES)), lanes_of(job.world, 0, Seq(1), LANES))
}

fn around_ip(job: &TestJob) -> Vec<(&'static str, Vec<u8>)> {
    let (request, payload) = good(job);
    let datagram = job.datagram(&request, &payload);
    let envelope = job.envelope(0);
    let (ip, udp) = (envelope.ip(), envelope.udp());
    let plain = envelope.wrap(&datagram);
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut frame = plain.clone();
        change(&mut frame);
        frame
    };
    let tagged = |tags: &[u16]| {
        let mut envelope = envelope.clone();
        envelope.tags = tags.to_vec();
        envelope.wrap(&datagram)
    };
    let mut frames = vec![
        ("plain", plain.clone()),
        ("one-tag", tagged(&[0x8100])),
        ("two-tags", tagged(&[0x88A8, 0x8100])),
        ("three-tags", tagged(&[0x8100; 3])),
        ("congested", with(&|f| f[ip + 1] |= if job.v6 { 0x30 } else { 0x03 })),
        ("other-port", with(&|f| f[udp + 2..udp + 4].copy_from_slice(&(PORT + 2).to_be_bytes()))),
        ("other-destination", with(&|f| f[udp - 1] ^= 4)),
        ("other-protocol", with(&|f| f[ip + if job.v6 { 6 } else { 9 }] = 6)),
        ("udp-length-0", with(&|f| f[udp + 4..udp + 6].fill(0))),
        ("udp-length-71", with(&|f| f[udp + 4..udp + 6].copy_from_slice(&71u16.to_be_bytes()))),
        ("trailer", with(&|f| f.push(0))),
        ("cut-in-ip", with(&|f| f.truncate(ip + 13))),
        ("cut-in-udp", with(&|f| f.truncate(udp + 5))),
        ("cut-in-header", with(&|f| f.truncate(udp + 40))),
        ("cut-in-payload", with(&|f| f.truncate(udp + 8 + 64 + 128))),
    ];
    if job.v6 {
        frames.push(("extension", with(&|f| f[ip + 6] = 0)));
        frames.push(("fragment", fragment_v6(&plain, ip, [0, 1])));
        frames.push(("later-fragment", fragment_v6(&plain, ip, [1, 0])));
    } else {
        frames.push(("options", with(&|f| f[ip] = 0x46)));
        frames.push(("fragment", with(&|f| f[ip + 6] = 0x20)));
        frames.push(("later-fragment", with(&|f| f[ip + 7] = 9)));
    }
    frames
}

/// The frame with a fragment header between IPv6 and UDP. `position`: offset and "more".
#[must_use]
pub fn fragment_v6(plain: &[u8], ip: usize, position: [u8; 2]) -> Vec<u8> {
    let mut frame = plain[..ip + 40].to_vec();
    let length = u16::from_be_bytes([frame[ip + 4], frame[ip + 5]]) + 8;
    frame[ip + 4..ip + 6].copy_from_slice(&length.to_be_bytes());
    frame[ip + 6] = 44;
    frame.extend([17, 0, position[0], position[1], 1, 2, 3, 4]);
    frame.extend(&plain[ip + 40..]);
    frame
}

fn requests(job: &TestJob) -> Vec<(&'static str, Vec<u8>)> {
    let (request, payload) = good(job);
    let edited = |change: &dyn Fn(&mut paatp_common::wire::Header)| {
        let mut datagram = job.datagram(&request, &payload);
        edit(&mut datagram, change);
        job.envelope(0).wrap(&datagram)
    };
    let data = |request: Request| job.frame(&request, &payload);
    let bare =
        |operation| job.frame(&job.data(1, Seq(3), Chunk::new(operation, ElementType::F32, 0, 0)), &[]);
    let maximum = Chunk::new(Operation::Max, ElementType::I32, LANES, 0);
    let broadcast = Chunk { root: 2, ..Chunk::new(Operation::Broadcast, ElementType::Bf16, LANES, 0) };
    vec![
        ("pull-complete", job.frame(&job.pull(2, Seq(0), sum_of(LANES)), &payload)),
        ("pull-open", job.frame(&job.pull(2, Seq(1), sum_of(LANES)), &payload)),
        ("pull-bare", job.frame(&job.pull(2, Seq(0), sum_of(LANES)), &[])),
        ("duplicate", data(Request { seq: Seq(0), ..request })),
        ("redo", data(Request { seq: Seq(0), attempt: 1, ..request })),
        ("redo-joined", data(Request { seq: Seq(2), worker: 1, bitmap: 2, attempt: 1, ..request })),
        ("old-attempt", data(Request { seq: Seq(2), ..request })),
        ("far-attempt", data(Request { attempt: 200, ..request })),
        ("ahead", data(Request { seq: Seq(4), ..request })),
        ("behind", data(Request { seq: Seq(u32::MAX), ..request })),
        ("acknowledging", data(Request { ack: Seq(1), progress: Seq(2), ..request })),
        ("far-acknowledgement", data(Request { ack: Seq(1 << 31), progress: Seq(1 << 31), ..request })),
        ("maximum", job.frame(&job.data(1, Seq(3), maximum), &payload)),
        ("broadcast-root", job.frame(&job.data(2, Seq(3), broadcast), &payload)),
        ("broadcast-other", job.frame(&job.data(1, Seq(3), broadcast), &[])),
        ("broadcast-not-root", job.frame(&job.data(1, Seq(3), broadcast), &payload)),
        ("barrier", bare(Operation::Barrier)),
        ("exponents", bare(Operation::Exponents)),
        ("non-finite", data(Request { flags: flags::NON_FINITE, ..request })),
        ("mismatch", data(Request { chunk: Chunk { exponent: 9, ..request.chunk }, ..request })),
        ("bad-magic", edited(&|h| *h = bytemuck::Zeroable::zeroed())),
        ("bad-kind", edited(&|h| h.set_kind(paatp_common::wire::Kind::Answer))),
        ("bad-operation", edited(&|h| h.set_operation_or_epoch(0xF0))),
        ("bad-job", edited(&|h| h.set_job(65535))),
        ("bad-generation", edited(&|h| h.set_generation(1))),
        ("bad-worker", edited(&|h| h.set_worker(255))),
        ("other-lanes", edited(&|h| h.set_lanes(63))),
        ("too-many-lanes", job.frame(&job.data(0, Seq(3), sum_of(LANES + 32)), &[7; LANES as usize + 32])),
        ("bad-bitmap", edited(&|h| h.set_bitmap(u64::MAX))),
        ("bad-tag", edited(&|h| h.set_tag(1))),
        ("mended", edited(&|h| h.set_contributors(0x3F))),
        ("mended-pull", edited(&|h| h.set_contributors(0x37))),
    ]
}
