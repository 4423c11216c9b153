//! Hostile packets against the loaded program: no slot changes, each refusal is counted by its own counter, and what is
//! not ours goes on as it came.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use paatp_common::counter::{Counters, Event};
use paatp_common::wire::{
    Answer, Chunk, ElementType, HEADER_BYTES, Header, Kind, MAGIC, Operation, Request, Status, VERSION, flags,
};
use paatp_common::{Refusal, Seq};
use paatp_tests::require_bpf;
use paatp_tests::testrun::support::corpus::fragment_v6;
use paatp_tests::testrun::support::node::Verdict;
use paatp_tests::testrun::support::packet::{PORT, PORTS, Random, local};
use paatp_tests::testrun::support::replay::{LANES, jobs, node_at_work};
use paatp_tests::testrun::support::requests::{TestJob, edit, lanes_of, sum_of};
use paatp_tests::testrun::{Flavour, Loaded, MOST_BYTES};

/// What a hostile frame must come to.
#[derive(Clone, Copy, Debug)]
enum Fate {
    /// Passed on as it came, counted as not ours.
    NotOurs,
    /// Passed on as it came, counted as refused.
    PassedOn(Refusal),
    /// Dropped.
    Dropped(Refusal),
    /// Told that it was refused.
    Told(Refusal, Status),
}

struct Attack {
    name: String,
    frame: Vec<u8>,
    fate: Fate,
}

fn good(job: &TestJob) -> (Request, Vec<u32>) {
    (job.data(0, Seq(3), sum_of(LANES)), lanes_of(job.world, 0, Seq(3), LANES))
}

/// Attacks on a job: on the layers below, on the header, on the contribution.
fn attacks(job: &TestJob) -> Vec<Attack> {
    let mut all = below(job);
    all.extend(on_the_header(job));
    all.extend(on_the_contribution(job));
    all
}

fn below(job: &TestJob) -> Vec<Attack> {
    use Fate::{Dropped, NotOurs, PassedOn};
    let (request, payload) = good(job);
    let datagram = job.datagram(&request, &payload);
    let envelope = job.envelope(0);
    let plain = envelope.wrap(&datagram);
    let (ip, udp) = (envelope.ip(), envelope.udp());
    let mut all = Vec::new();
    let mut add = |name: &str, fate, change: &dyn Fn(&mut Vec<u8>)| {
        let mut frame = plain.clone();
        change(&mut frame);
        all.push(Attack { name: name.into(), frame, fate });
    };
    let be = u16::to_be_bytes;
    for tags in [[0x8100u16; 3], [0x88A8, 0x8100, 0x8100]] {
        let mut tagged = envelope.clone();
        tagged.tags = tags.to_vec();
        let frame = tagged.wrap(&datagram);
        add("three tags", PassedOn(Refusal::TooManyTags), &|f| f.clone_from(&frame));
    }
    for length in (14..plain.len()).step_by(7) {
        let fate = if length < udp + 8 { NotOurs } else { Dropped(Refusal::LengthMismatch) };
        add("cut off", fate, &|f| f.truncate(length));
    }
    for more in [1, 63, 128, 512] {
        add("something behind", Dropped(Refusal::LengthMismatch), &|f| f.resize(f.len() + more, 9));
    }
    for length in [0, 1, 8, 63] {
        let frame = envelope.wrap(&datagram[..length]);
        add("short datagram", Dropped(Refusal::Truncated), &|f| f.clone_from(&frame));
    }
    add("UDP length", Dropped(Refusal::LengthMismatch), &|f| f[udp + 4..udp + 6].copy_from_slice(&be(200)));
    add("UDP length 0", Dropped(Refusal::Truncated), &|f| f[udp + 4..udp + 6].fill(0));
    for port in [0, PORT - 1, PORT + PORTS, u16::MAX] {
        add("port", NotOurs, &|f| f[udp + 2..udp + 4].copy_from_slice(&be(port)));
    }
    add("destination", NotOurs, &|f| f[udp - 1] ^= 0x80);
    add("TCP", NotOurs, &|f| f[ip + if job.v6 { 6 } else { 9 }] = 6);
    add("ARP", NotOurs, &|f| f[12..14].copy_from_slice(&[8, 6]));
    if job.v6 {
        add("extension", NotOurs, &|f| f[ip + 6] = 0);
        add("fragment", Dropped(Refusal::Fragment), &|f| *f = fragment_v6(f, ip, [0, 1]));
        add("later fragment", NotOurs, &|f| *f = fragment_v6(f, ip, [2, 1]));
    } else {
        add("options", NotOurs, &|f| f[ip] = 0x46);
        add("fragment", Dropped(Refusal::Fragment), &|f| f[ip + 6] = 0x20);
        add("later fragment", NotOurs, &|f| f[ip + 7] = 1);
        add("last fragment", NotOurs, &|f| f[ip + 6..ip + 8].copy_from_slice(&[0, 185]));
    }
    all
}

fn on_the_header(job: &TestJob) -> Vec<Attack> {
    use Fate::{Dropped, Told};
    let (request, payload) = good(job);
    let mut all = Vec::new();
    let mut add = |name: &str, fate, change: &dyn Fn(&mut Header)| {
        let mut datagram = job.datagram(&request, &payload);
        edit(&mut datagram, change);
        all.push(Attack { name: name.into(), frame: job.envelope(0).wrap(&datagram), fate });
    };
    let raw = |at: usize, value: u8| move |header: &mut Header| bytemuck::bytes_of_mut(header)[at] = value;
    add("magic", Dropped(Refusal::BadMagic), &raw(0, MAGIC.to_be_bytes()[0] ^ 1));
    add("magic", Dropped(Refusal::BadMagic), &raw(1, 0));
    for version in (0..16).filter(|version| *version != VERSION) {
        add("version", Dropped(Refusal::BadVersion), &raw(2, version << 4 | 1));
    }
    for kind in (0..16).filter(|kind| ![Kind::Data as u8, Kind::Pull as u8].contains(kind)) {
        add("kind", Dropped(Refusal::BadKind), &raw(2, VERSION << 4 | kind));
    }
    for number in [2, 63, 64, 255, 256, u16::MAX] {
        add("job", Dropped(Refusal::UnknownJob), &|h| h.set_job(number));
    }
    add("other job", Dropped(Refusal::ForeignAddress), &|h| h.set_job(job.number ^ 1));
    for rank in [job.world, 63, 64, 255] {
        add("worker", Dropped(Refusal::UnknownWorker), &|h| h.set_worker(rank));
    }
    add("other worker", Dropped(Refusal::ForeignAddress), &|h| h.set_worker(1));
    for generation in [0, 1, job.generation - 1, job.generation + 1, u32::MAX] {
        let fate = Told(Refusal::OldGeneration, Status::Rejoin);
        add("generation", fate, &|h| h.set_generation(generation));
    }
    for lanes in [0, 1, 32, 63, 65, 96, 352, u16::MAX] {
        add("lanes and length", Dropped(Refusal::LengthMismatch), &|h| h.set_lanes(lanes));
    }
    add("no payload", Dropped(Refusal::LengthMismatch), &|h| h.set_flags(h.flags() & !flags::PAYLOAD));
    for bits in [0, 2, 3, u64::MAX] {
        add("bitmap", Dropped(Refusal::Conflict), &|h| h.set_bitmap(bits));
    }
    // Bits that were flipped on the way.
    for bit in (0..HEADER_BYTES * 8).step_by(11).filter(|bit| *bit >= 24) {
        let mut datagram = job.datagram(&request, &payload);
        datagram[bit / 8] ^= 1 << (bit % 8);
        let frame = job.envelope(0).wrap(&datagram);
        all.push(Attack { name: format!("bit {bit}"), frame, fate: Dropped(Refusal::BadHeaderCheck) });
    }
    all
}

fn on_the_contribution(job: &TestJob) -> Vec<Attack> {
    use Fate::{Dropped, Told};
    let (request, payload) = good(job);
    let mut all = Vec::new();
    let mut add = |name: &str, fate, request: Request, payload: &[u32]| {
        all.push(Attack { name: name.into(), frame: job.frame(&request, payload), fate });
    };
    let told = |refusal, status| Told(refusal, status);
    let too_many = lanes_of(job.world, 0, Seq(3), LANES + 32);
    let chunk = sum_of(LANES + 32);
    add("too many lanes", Dropped(Refusal::BadLanes), Request { chunk, ..request }, &too_many);
    for steps in [4, 5, 1000, 1 << 30, (1 << 31) - 1] {
        let ahead = Request { seq: Seq(steps), ..request };
        add("far ahead", told(Refusal::Ahead, Status::Busy), ahead, &payload);
    }
    for steps in [1, 2, 1000, 1 << 30, 1 << 31] {
        let behind = Request { seq: Seq(0).minus(steps), ..request };
        add("far behind", told(Refusal::Behind, Status::Stale), behind, &payload);
    }
    for attempt in [2, 3, 255] {
        let far = Request { attempt, ..request };
        add("attempt", told(Refusal::FarAttempt, Status::OldAttempt), far, &payload);
    }
    let old = Request { seq: Seq(2), ..request };
    add("old attempt", told(Refusal::OldAttempt, Status::OldAttempt), old, &payload);
    let begun = |chunk| Request { seq: Seq(1), chunk, ..request };
    for chunk in [
        Chunk { exponent: 5, ..request.chunk },
        Chunk { root: 1, ..request.chunk },
        Chunk::new(Operation::Max, ElementType::F32, LANES, request.chunk.exponent),
        Chunk::new(Operation::Sum, ElementType::I32, LANES, request.chunk.exponent),
    ] {
        add("mismatch", told(Refusal::Mismatch, Status::Aborted), begun(chunk), &payload);
    }
    let chunk = Chunk::new(Operation::Sum, ElementType::F32, 32, request.chunk.exponent);
    add("fewer lanes", told(Refusal::Mismatch, Status::Aborted), begun(chunk), &payload[..32]);
    let chunk = Chunk { root: 2, ..Chunk::new(Operation::Broadcast, ElementType::F32, LANES, 0) };
    add("not root", told(Refusal::NotRoot, Status::Aborted), Request { chunk, ..request }, &payload);
    for operation in [7, 15] {
        let chunk = Chunk { operation_and_type: operation << 4, ..request.chunk };
        add("operation", told(Refusal::BadKind, Status::Aborted), Request { chunk, ..request }, &payload);
    }
    all
}

/// Counters as they were, and what has been counted since.
fn since(now: &Counters, then: &Counters) -> Vec<(&'static str, u64)> {
    let refusals = Refusal::ALL.iter().map(|r| (r.name(), now.refused(*r) - then.refused(*r)));
    let events = Event::ALL.iter().map(|e| (e.name(), now.noted(*e) - then.noted(*e)));
    refusals.chain(events).filter(|(_, count)| *count > 0).collect()
}

#[test]
fn no_hostile_packet_changes_a_slot() {
    if !require_bpf("kernel_hostile::no_hostile_packet_changes_a_slot") {
        return;
    }
    for flavour in Flavour::FLAT {
        let mut loaded = Loaded::like(flavour, &node_at_work(flavour.blocks())).unwrap();
        let state = loaded.state().unwrap();
        for (job, attack) in jobs().iter().flat_map(|job| attacks(job).into_iter().map(move |a| (job, a))) {
            let name = format!("{flavour:?}, IPv{}, {}", if job.v6 { 6 } else { 4 }, attack.name);
            let (before, then) = (loaded.counters().unwrap(), loaded.state().unwrap());
            let run = loaded.run(&attack.frame).unwrap();
            let counted = since(&loaded.counters().unwrap(), &before);
            let now = loaded.state().unwrap();
            assert!(now.slots == state.slots, "{name}: a slot changed");
            // A member's acknowledgements count even where its contribution does not.
            let is_admitted = counted.iter().any(|(name, _)| *name == Event::Requests.name());
            assert!(is_admitted || now == then, "{name}: progress changed");
            let (verdict, counters): (_, Vec<&str>) = match attack.fate {
                Fate::NotOurs => (Verdict::Pass, vec![Event::Passed.name()]),
                Fate::PassedOn(refusal) => (Verdict::Pass, vec![refusal.name()]),
                Fate::Dropped(Refusal::Conflict) => {
                    (Verdict::Drop, vec![Refusal::Conflict.name(), Event::Requests.name()])
                }
                Fate::Dropped(refusal) => (Verdict::Drop, vec![refusal.name()]),
                Fate::Told(refusal @ Refusal::OldGeneration, _) => (Verdict::Transmit, vec![refusal.name()]),
                Fate::Told(refusal, _) => (Verdict::Transmit, vec![refusal.name(), Event::Requests.name()]),
            };
            assert_eq!(run.verdict, verdict, "{name}");
            // An answer may carry the result that the request asks for as well.
            let others: Vec<_> = counted.iter().filter(|(name, _)| *name != Event::Results.name()).collect();
            let expected: Vec<_> = counters.iter().map(|name| (*name, 1)).collect();
            assert_eq!(others, expected.iter().collect::<Vec<_>>(), "{name}");
            match attack.fate {
                Fate::NotOurs | Fate::PassedOn(_) => {
                    assert!(run.frame == attack.frame, "{name}: not as it came")
                }
                Fate::Told(_, status) => {
                    let header = Header::of(&run.frame[job.envelope(0).datagram()..]).unwrap();
                    assert_eq!(Answer::decode(header).unwrap().status, status, "{name}");
                }
                Fate::Dropped(_) => {}
            }
        }
    }
}

#[test]
fn a_damaged_payload_leaves_neither_bits_nor_lanes() {
    if !require_bpf("kernel_hostile::a_damaged_payload_leaves_neither_bits_nor_lanes") {
        return;
    }
    for flavour in Flavour::FLAT {
        let mut loaded = Loaded::like(flavour, &node_at_work(flavour.blocks())).unwrap();
        for job in jobs() {
            let state = loaded.state().unwrap();
            // Added to the chunk that is begun, and undone.
            let request = job.data(0, Seq(1), sum_of(LANES));
            let payload = lanes_of(job.world, 0, Seq(1), LANES);
            for bit in (0..LANES as usize * 32).step_by(61) {
                let mut datagram = job.datagram(&request, &payload);
                datagram[HEADER_BYTES + bit / 8] ^= 1 << (bit % 8);
                let run = loaded.run(&job.envelope(0).wrap(&datagram)).unwrap();
                let header = Header::of(&run.frame[job.envelope(0).datagram()..]).unwrap();
                assert_eq!(Answer::decode(header).unwrap().status, Status::BadTag);
                assert!(loaded.slots() == state.slots, "bit {bit}: a slot changed");
            }
            // Stored to an empty slot: that has an owner now, but nobody in it.
            let mut datagram = job.datagram(&job.data(0, Seq(3), sum_of(LANES)), &payload);
            datagram[HEADER_BYTES] ^= 1;
            loaded.run(&job.envelope(0).wrap(&datagram)).unwrap();
            let (slot, _) = loaded.slot(job.first_slot as usize + 3);
            assert_eq!((slot.seq, slot.bits, slot.has_payload()), (Seq(3), 0, false));
        }
    }
}

/// A frame that is random from some layer on.
fn noise(random: &mut Random) -> Vec<u8> {
    let job = jobs()[random.below(2) as usize];
    let length = random.below(MOST_BYTES as u64 - 200) as usize;
    match random.below(4) {
        0 => random.bytes(14 + length % 300),
        1 => {
            let whole_blocks = HEADER_BYTES + length % 12 * 128;
            let bytes = if random.chance(50) { whole_blocks } else { length % 1500 };
            job.envelope(random.below(4) as u8).wrap(&random.bytes(bytes))
        }
        2 => {
            // Magic and version are right, and the length is what the lanes say.
            let mut datagram = random.bytes(HEADER_BYTES + length % 12 * 128);
            let kind = if random.chance(50) { Kind::Data } else { Kind::Pull };
            Header::of_mut(&mut datagram).unwrap().set_kind(kind);
            job.envelope(0).wrap(&datagram)
        }
        _ => {
            // From a stranger; everything else is right.
            let (request, payload) = good(&job);
            let mut envelope = job.envelope(0);
            envelope.source = local(job.v6);
            envelope.source[15] = random.number() as u8;
            envelope.wrap(&job.datagram(&request, &payload))
        }
    }
}

#[test]
fn noise_changes_nothing() {
    const FRAMES: u64 = 200_000;
    if !require_bpf("kernel_hostile::noise_changes_nothing") {
        return;
    }
    let flavour = Flavour::Standard;
    let mut loaded = Loaded::like(flavour, &node_at_work(flavour.blocks())).unwrap();
    let state = loaded.state().unwrap();
    let mut random = Random(20_260_101);
    for _ in 0..FRAMES {
        let frame = noise(&mut random);
        let run = loaded.run(&frame).unwrap();
        match run.verdict {
            Verdict::Pass => assert!(run.frame == frame, "not as it came: {frame:02x?}"),
            Verdict::Drop => {}
            Verdict::Transmit => panic!("answered: {frame:02x?}"),
        }
    }
    assert!(loaded.state().unwrap() == state);
    let counters = loaded.counters().unwrap();
    let counted: u64 =
        counters.noted(Event::Passed) + Refusal::ALL.iter().map(|r| counters.refused(*r)).sum::<u64>();
    assert_eq!(counted, FRAMES, "each is counted once");
    for refusal in [Refusal::BadMagic, Refusal::BadHeaderCheck, Refusal::ForeignAddress, Refusal::Truncated] {
        assert!(counters.refused(refusal) > 1000, "{}", refusal.name());
    }
}
