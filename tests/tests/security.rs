//! What senders can do that are no members, or say that they are: through the real program, over the real wire. What is
//! asserted here is what docs/security.md says, also where that is nothing to be proud of.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use paatp_common::counter::Refusal;
use paatp_common::progress::RankRecord;
use paatp_common::slot::Slot;
use paatp_common::tag::{rank_key, salt};
use paatp_common::wire::{Answer, Body, Chunk, Header, Kind, Request, Status, flags};
use paatp_common::{Event, Seq};
use paatp_tests::audit::progress;
use paatp_tests::gradients::synthetic;
use paatp_tests::http::send;
use paatp_tests::job::run;
use paatp_tests::kernel::{Maps, SlotMemory};
use paatp_tests::lab::{Family, Host};
use paatp_tests::process::{Aggregator, AggregatorOptions, PORT, wait_until};
use paatp_tests::testrun::support::requests::{lanes_of, payload_of, sum_of, tag_of};
use paatp_tests::{Dtype, JobOptions, Lab, Layout, require_bpf};
use serde_json::Value;

const WORLD: u8 = 2;
const LANES: u16 = 64;
const DEADLINE: Duration = Duration::from_secs(20);
/// Generations that are guessed, one after the other.
const GUESSES: u32 = 2000;

/// What a member was granted.
#[derive(Clone, Copy, Debug)]
struct Grant {
    job: u16,
    generation: u32,
    nonce: u64,
}

/// Two members, and a namespace that belongs to neither.
struct Bench {
    lab: Lab,
    maps: Maps,
    _aggregator: Aggregator,
}

/// What the tables hold: slots, and what of them counts.
type State = (Vec<(Slot, Vec<u64>)>, Vec<RankRecord>);

impl Bench {
    fn new() -> Bench {
        let lab = Lab::new(Layout::workers(usize::from(WORLD) + 1)).unwrap();
        let options = AggregatorOptions {
            lanes: usize::from(LANES),
            slots: 8,
            window: 4,
            ..AggregatorOptions::world(usize::from(WORLD))
        };
        let aggregator = Aggregator::start(&lab, &options).unwrap();
        let maps = Maps::on(&lab.aggregator.namespace, &lab.aggregator.interface).unwrap();
        Bench { lab, maps, _aggregator: aggregator }
    }

    fn address(&self) -> SocketAddr {
        (self.lab.aggregator.address(Family::V4), PORT).into()
    }

    fn stranger(&self) -> &Host {
        &self.lab.workers[usize::from(WORLD)]
    }

    /// Both ranks join, and are granted the same.
    fn form(&self) -> Grant {
        let address = self.address();
        let join = |rank: usize| {
            let body = format!(r#"{{"protocol":1,"rank":{rank},"world":{WORLD},"wait_seconds":20.0}}"#);
            let host = &self.lab.workers[rank].namespace;
            let response = host.run(|| send(address, "POST", "/v1/jobs/lab/join", &body)).unwrap().unwrap();
            assert_eq!(response.status, 200, "{}", response.body);
            serde_json::from_str::<Value>(&response.body).unwrap()
        };
        let granted = thread::scope(|scope| {
            let other = scope.spawn(|| join(1));
            join(0);
            other.join().unwrap()
        });
        let number = |name: &str| u32::try_from(granted[name].as_u64().unwrap()).unwrap();
        let nonce = u64::from_str_radix(granted["nonce"].as_str().unwrap(), 16).unwrap();
        Grant { job: number("job") as u16, generation: number("generation"), nonce }
    }

    /// A socket towards the aggregator in a host's namespace, from one of its addresses.
    fn socket(&self, host: &Host, from: IpAddr) -> UdpSocket {
        let socket = host.namespace.run(|| UdpSocket::bind((from, 0))).unwrap().unwrap();
        socket.connect(self.address()).unwrap();
        socket.set_read_timeout(Some(DEADLINE)).unwrap();
        socket
    }

    fn member(&self, rank: u8) -> UdpSocket {
        let host = &self.lab.workers[usize::from(rank)];
        self.socket(host, host.address(Family::V4))
    }

    /// The stranger takes a member's address beside its own. Answers go to where the request's frame came from, so it gets
    /// those to its own requests.
    fn spoofer(&self, rank: u8) -> UdpSocket {
        let (host, stolen) = (self.stranger(), self.lab.workers[usize::from(rank)].address(Family::V4));
        host.namespace.ip(&["address", "add", &format!("{stolen}/32"), "dev", &host.interface]).unwrap();
        self.socket(host, stolen)
    }

    fn state(&self, grant: Grant) -> State {
        let memory = SlotMemory::map(&self.maps, "SLOTS").unwrap();
        let progress = progress(&self.maps, grant.job.into()).unwrap();
        let ranks = (0..usize::from(WORLD)).map(|rank| progress.reached(grant.generation, rank)).collect();
        ((0..memory.slots()).map(|slot| memory.read(slot)).collect(), ranks)
    }

    fn refused(&self, refusal: Refusal) -> u64 {
        self.maps.counters().unwrap().refused(refusal)
    }

    fn wait_refused(&self, refusal: Refusal, times: u64) {
        wait_until("it was refused", DEADLINE, || Ok(self.refused(refusal) >= times)).unwrap();
    }
}

/// A contribution to a chunk, which wishes for the same one.
fn data(grant: Grant, rank: u8, seq: u32) -> Request {
    Request {
        kind: Kind::Data,
        flags: flags::PAYLOAD,
        job: grant.job,
        worker: rank,
        generation: grant.generation,
        seq: Seq(seq),
        want: Seq(seq),
        ack: Seq(0),
        progress: Seq(0),
        token: 0,
        bitmap: 1 << rank,
        tag: 0,
        chunk: sum_of(LANES),
        next_exponent: 0,
        attempt: 0,
    }
}

fn pull(grant: Grant, rank: u8, seq: u32) -> Request {
    Request { kind: Kind::Pull, bitmap: 0, ..data(grant, rank, seq) }
}

/// The datagram of a request, with the rank's lanes of that chunk and the salt that the grant's nonce makes.
fn datagram(grant: Grant, request: &Request) -> Vec<u8> {
    let (rank, seq) = (request.worker, request.seq);
    let lanes = match request.kind {
        Kind::Data => lanes_of(WORLD, rank, seq, LANES),
        _ => vec![0; usize::from(LANES)],
    };
    let salt = match request.kind {
        Kind::Data => salt(rank_key(grant.nonce, rank.into()), seq, request.chunk),
        _ => 0,
    };
    let request = Request { tag: tag_of(&lanes).wrapping_add(salt), ..*request };
    let mut datagram = request.encode().as_bytes().to_vec();
    datagram.extend(lanes.iter().flat_map(|lane| lane.to_be_bytes()));
    datagram
}

/// The answer to a datagram, and its lanes.
fn ask(socket: &UdpSocket, datagram: &[u8]) -> (Answer, Vec<u32>) {
    socket.send(datagram).unwrap();
    let mut buffer = [0; 2048];
    let length = socket.recv(&mut buffer).unwrap();
    (Answer::decode(Header::of(&buffer[..length]).unwrap()).unwrap(), payload_of(&buffer[..length]))
}

/// Nothing has come. To be called when everything that could bring an answer is known to be done.
fn heard_nothing(socket: &UdpSocket) {
    socket.set_nonblocking(true).unwrap();
    assert!(socket.recv(&mut [0; 2048]).is_err(), "it was answered");
}

/// Lanes of the sum of all ranks.
fn sum(seq: u32) -> Vec<u32> {
    let ranks = (0..WORLD).map(|rank| lanes_of(WORLD, rank, Seq(seq), LANES));
    ranks.reduce(|sum, lanes| sum.iter().zip(lanes).map(|(a, b)| a + b).collect()).unwrap()
}

/// The members complete a chunk, and its sum is right.
fn complete(bench: &Bench, grant: Grant, seq: u32) {
    ask(&bench.member(0), &datagram(grant, &data(grant, 0, seq)));
    let (answer, lanes) = ask(&bench.member(1), &datagram(grant, &data(grant, 1, seq)));
    assert!(matches!(answer.body, Body::Result { bitmap: 0b11, .. }), "{answer:?}");
    assert_eq!(lanes, sum(seq));
}

/// Everything is known to it, job, generation, nonce; only its address is not a member's.
#[test]
fn an_unregistered_sender_changes_nothing_and_learns_nothing() {
    if !require_bpf("security::an_unregistered_sender_changes_nothing_and_learns_nothing") {
        return;
    }
    let bench = Bench::new();
    let grant = bench.form();
    complete(&bench, grant, 0);
    ask(&bench.member(0), &datagram(grant, &data(grant, 0, 1)));
    let before = bench.state(grant);
    let host = bench.stranger();
    let socket = bench.socket(host, host.address(Family::V4));
    for rank in 0..WORLD {
        let lie = Request { ack: Seq(1), progress: Seq(2), ..data(grant, rank, 1) };
        for request in [lie, data(grant, rank, 1), pull(grant, rank, 0)] {
            socket.send(&datagram(grant, &request)).unwrap();
        }
    }
    bench.wait_refused(Refusal::ForeignAddress, 3 * u64::from(WORLD));
    // Nor from another member's address.
    bench.member(1).send(&datagram(grant, &data(grant, 0, 1))).unwrap();
    bench.wait_refused(Refusal::ForeignAddress, 3 * u64::from(WORLD) + 1);
    heard_nothing(&socket);
    assert_eq!(bench.state(grant), before);
    complete(&bench, grant, 1);
}

/// Whoever has a member's address, but not the generation, is told to join again, and nothing else. Each guess is counted.
#[test]
fn a_guessed_generation_changes_nothing_and_learns_nothing() {
    if !require_bpf("security::a_guessed_generation_changes_nothing_and_learns_nothing") {
        return;
    }
    let bench = Bench::new();
    let grant = bench.form();
    complete(&bench, grant, 0);
    let (before, counted) = (bench.state(grant), bench.refused(Refusal::OldGeneration));
    let spoofer = bench.spoofer(0);
    let start = Instant::now();
    for guess in 1..=GUESSES {
        let guess =
            Grant { generation: grant.generation.wrapping_add(guess.wrapping_mul(0x9E37_79B9)), ..grant };
        let request = if guess.generation.is_multiple_of(2) { pull(guess, 0, 0) } else { data(guess, 0, 1) };
        let sent = datagram(guess, &request);
        let (answer, lanes) = ask(&spoofer, &sent);
        assert_eq!((answer.status, lanes.len()), (Status::Rejoin, 0));
        // Everything else in it is its own request's.
        assert_eq!(
            (answer.generation, answer.seq, answer.token),
            (guess.generation, request.seq, request.token)
        );
        assert!(matches!(answer.body, Body::Pending { bitmap, .. } if bitmap == request.bitmap));
    }
    let rate = f64::from(GUESSES) / start.elapsed().as_secs_f64();
    println!(
        "{rate:.0} guesses a second, one at a time: half of all generations in {:.0} h",
        2f64.powi(31) / rate / 3600.0
    );
    assert_eq!(bench.refused(Refusal::OldGeneration), counted + u64::from(GUESSES));
    assert_eq!(bench.state(grant), before);
    complete(&bench, grant, 1);
}

/// All packets of a generation again, from their senders' addresses, when the next one runs and is at the same chunks.
#[test]
fn packets_of_an_old_generation_change_nothing() {
    if !require_bpf("security::packets_of_an_old_generation_change_nothing") {
        return;
    }
    let bench = Bench::new();
    let old = bench.form();
    let mut recorded = Vec::new();
    for seq in 0..4 {
        complete(&bench, old, seq);
        for rank in 0..WORLD {
            recorded.extend(
                [data(old, rank, seq), pull(old, rank, seq)].map(|request| (rank, datagram(old, &request))),
            );
        }
    }
    let new = bench.form();
    assert_ne!((old.generation, old.nonce), (new.generation, new.nonce));
    complete(&bench, new, 0);
    ask(&bench.member(0), &datagram(new, &data(new, 0, 1)));
    let before = bench.state(new);
    let sockets = [bench.spoofer(0), bench.spoofer(1)];
    for (rank, datagram) in &recorded {
        let (answer, lanes) = ask(&sockets[usize::from(*rank)], datagram);
        assert_eq!((answer.status, lanes.len()), (Status::Rejoin, 0));
    }
    assert_eq!(bench.state(new), before);
    assert_eq!(bench.refused(Refusal::OldGeneration), recorded.len() as u64);
    complete(&bench, new, 1);
}

/// **Not protected.** A member's address and the generation make a member, for the data plane: from any port and any
/// machine that the network lets send so. Without the nonce it reads results, acknowledges in the member's name and makes
/// chunks be redone; with the nonce it contributes in its place.
#[test]
fn a_members_address_and_generation_open_nearly_everything() {
    if !require_bpf("security::a_members_address_and_generation_open_nearly_everything") {
        return;
    }
    let bench = Bench::new();
    let grant = bench.form();
    complete(&bench, grant, 0);
    let spoofer = bench.spoofer(0);
    // It learns results.
    let (answer, lanes) = ask(&spoofer, &datagram(grant, &pull(grant, 0, 0)));
    assert!(matches!(answer.body, Body::Result { .. }));
    assert_eq!(lanes, sum(0));
    // Without the nonce its contributions fail their check: nothing is added.
    let ignorant = Grant { nonce: grant.nonce ^ 1, ..grant };
    let (answer, _) = ask(&spoofer, &datagram(ignorant, &data(grant, 0, 1)));
    assert_eq!(answer.status, Status::BadTag);
    complete(&bench, grant, 1);
    // But one that names the next attempt clears the slot before that is known, and all ranks have to send again.
    let redo = Request { attempt: 1, want: Seq(6), ..data(grant, 0, 1) };
    assert_eq!(ask(&spoofer, &datagram(ignorant, &redo)).0.status, Status::BadTag);
    let (slot, _) = &bench.state(grant).0[1];
    assert_eq!((slot.attempt, slot.bits, slot.is_complete()), (1, 0, false));
    // An acknowledgement has no check but the header's. Rank 1's missing one is all that keeps the slot of chunk 0.
    ask(&spoofer, &datagram(grant, &Request { ack: Seq(2), ..pull(grant, 0, 5) }));
    assert_eq!(bench.state(grant).1[0].acked, Seq(2), "told in rank 0's name");
    // With the nonce (from the wire of the control port without TLS) it contributes in rank 0's place, and the real one
    // counts as a duplicate, or is what disagrees.
    let first = |seq, chunk| {
        let (answer, _) = ask(&spoofer, &datagram(grant, &Request { chunk, ..data(grant, 0, seq) }));
        assert_eq!(answer.status, Status::Ok);
        ask(&bench.member(0), &datagram(grant, &data(grant, 0, seq))).0.status
    };
    assert_eq!(first(3, sum_of(LANES)), Status::Ok);
    assert_eq!(bench.maps.counters().unwrap().noted(Event::Duplicates), 1);
    assert_eq!(first(4, Chunk { exponent: 7, ..sum_of(LANES) }), Status::Aborted);
}

/// A real job, while strangers send all they have: the same bits as without them.
#[test]
fn attacks_during_a_job_change_no_bit_of_its_result() {
    if !require_bpf("security::attacks_during_a_job_change_no_bit_of_its_result") {
        return;
    }
    let lab = Lab::new(Layout::workers(3)).unwrap();
    let inputs = synthetic(2, 9, &[(Dtype::F32, 300_000)], 1.0);
    let options = JobOptions::world(2);
    let undisturbed = run(&lab, &inputs, &options).unwrap().digests().unwrap();
    let host = &lab.workers[2];
    let stolen = lab.workers[0].address(Family::V4);
    host.namespace.ip(&["address", "add", &format!("{stolen}/32"), "dev", &host.interface]).unwrap();
    let target = SocketAddr::from((lab.aggregator.address(Family::V4), PORT));
    let sockets = [host.address(Family::V4), stolen].map(|from| {
        let socket = host.namespace.run(|| UdpSocket::bind((from, 0))).unwrap().unwrap();
        socket.connect(target).unwrap();
        socket.set_nonblocking(true).unwrap();
        socket
    });
    let is_over = AtomicBool::new(false);
    let result = thread::scope(|scope| {
        scope.spawn(|| {
            let mut guess = 1u32;
            while !is_over.load(Ordering::Relaxed) {
                guess = guess.wrapping_mul(0x9E37_79B9).wrapping_add(1);
                let grant = Grant { job: 0, generation: guess, nonce: u64::from(guess) };
                let request = data(grant, 0, guess % 4096);
                for socket in &sockets {
                    // What does not fit its queue is not sent.
                    let _ = socket.send(&datagram(grant, &request));
                }
            }
        });
        let result = run(&lab, &inputs, &options);
        is_over.store(true, Ordering::Relaxed);
        result.unwrap()
    });
    assert_eq!(result.digests().unwrap(), undisturbed);
    for refusal in [Refusal::ForeignAddress, Refusal::OldGeneration] {
        let refused = result.counters.refused(refusal);
        println!("{refused} {}", refusal.name());
        assert!(refused > 0, "{}", refusal.name());
    }
    assert!(result.aggregator.is_success());
}
