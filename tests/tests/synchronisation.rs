//! Synchronisation that changes while packets flow: through the real daemon, its API and the kernel.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use paatp_tests::lab::{Family, Host};
use paatp_tests::process::{Aggregator, AggregatorOptions, PORT};
use paatp_tests::{Lab, Layout, require_bpf};
use paatp_transport::{
    Event, Membership, Reduction, Settings, Synchronisation, Tensor, Time, Values, Worker,
};
use serde_json::{Value, json};

const RANKS: usize = 3;
/// Changes that must have been accepted before the ranks stop.
const CHANGES: usize = 200;
/// Elements of the two tensors: a dozen chunks of 64 lanes.
const ELEMENTS: [usize; 2] = [500, 200];
/// Operations after the last change: more than any rank can be ahead by.
const MARGIN: u64 = 200;
/// A busy machine takes its time.
const DEADLINE: Duration = Duration::from_secs(300);

/// One request to the control server; its status and body.
fn ask(to: SocketAddr, token: Option<&str>, method: &str, path: &str, body: &Value) -> (u16, Value) {
    let body = body.to_string();
    let token = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
    let mut stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\n{token}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    (status, serde_json::from_str(body).unwrap_or(Value::Null))
}

/// Small numbers that depend on everything.
fn value(rank: u64, operation: u64, element: u64) -> i32 {
    let mixed = (rank * 0x9E37_79B9 + operation * 0x85EB_CA6B + element * 0xC2B2_AE35) ^ operation << 7;
    (mixed.wrapping_mul(0x27D4_EB2F_1656_67C5) >> 40) as i32 % 1000 - 500
}

fn tensors(rank: u64, operation: u64) -> Vec<Tensor> {
    let of = |tensor: u64| {
        (0..ELEMENTS[tensor as usize] as u64).map(move |i| value(rank, operation, i * 2 + tensor))
    };
    vec![
        Tensor { name: "f".into(), values: Values::F32(of(0).map(|value| value as f32).collect()) },
        Tensor { name: "i".into(), values: Values::I32(of(1).collect()) },
    ]
}

fn add(sums: &mut [Vec<f64>; 2], tensors: &[Tensor]) {
    for (sum, tensor) in sums.iter_mut().zip(tensors) {
        match &tensor.values {
            Values::F32(values) => {
                sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += f64::from(*value))
            }
            Values::I32(values) => {
                sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += f64::from(*value))
            }
            values => panic!("{values:?}"),
        }
    }
}

fn digest(tensors: &[Tensor]) -> u64 {
    let mut hash = 0xCBF2_9CE4_8422_2325_u64;
    let mut push = |word: u32| hash = (hash ^ u64::from(word)).wrapping_mul(0x0100_0000_01B3);
    for tensor in tensors {
        match &tensor.values {
            Values::F32(values) => values.iter().for_each(|value| push(value.to_bits())),
            Values::I32(values) => values.iter().for_each(|value| push(*value as u32)),
            values => panic!("{values:?}"),
        }
    }
    hash
}

/// What the threads share.
struct Shared {
    aggregator: IpAddr,
    /// Operations that each rank has issued.
    issued: [AtomicU64; RANKS],
    /// The last operation, once it is known.
    end: AtomicU64,
    changes: AtomicUsize,
}

/// What a rank saw.
#[derive(Default)]
struct Saw {
    operations: Vec<(Synchronisation, u64)>,
    put_in: [Vec<f64>; 2],
    came_out: [Vec<f64>; 2],
    excluded: u64,
    skipped: u64,
}

fn membership(shared: &Shared, rank: usize) -> Membership {
    let request = json!({"protocol": 1, "rank": rank, "world": RANKS, "wait_seconds": 60});
    let at = SocketAddr::new(shared.aggregator, PORT);
    let (status, grant) = ask(at, None, "POST", "/v1/jobs/lab/join", &request);
    assert_eq!(status, 200, "{grant}");
    let number = |name: &str| grant[name].as_u64().unwrap();
    Membership {
        job: number("job") as u16,
        generation: number("generation") as u32,
        nonce: u64::from_str_radix(grant["nonce"].as_str().unwrap(), 16).unwrap(),
        rank: rank as u8,
        world: RANKS as u8,
        lanes: number("lanes") as u16,
        window: number("window") as u16,
        slots: number("slots") as u32,
        seating: None,
    }
}

/// A rank that reduces until it is told to stop, now and then slowly.
fn work(shared: &Shared, rank: usize) -> Saw {
    let membership = membership(shared, rank);
    let settings = Settings { timeout: DEADLINE, linger: Duration::from_secs(30), staleness: 0 };
    let mut worker = Worker::new(membership, settings).unwrap();
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.connect((shared.aggregator, PORT)).unwrap();
    let start = Instant::now();
    let now = || Time(start.elapsed().as_micros() as u64);
    let mut saw = Saw {
        put_in: ELEMENTS.map(|n| vec![0.0; n]),
        came_out: ELEMENTS.map(|n| vec![0.0; n]),
        ..Saw::default()
    };
    let (mut out, mut incoming) = (vec![0; worker.datagram_bytes()], vec![0; 2048]);
    let (mut operation, mut busy_until, mut done) = (0, Duration::ZERO, false);
    loop {
        assert!(
            start.elapsed() < DEADLINE,
            "rank {rank} at operation {operation}: {:?}",
            worker.statistics()
        );
        while !done && start.elapsed() >= busy_until && worker.may_begin() {
            shared.issued[rank].store(operation, Ordering::SeqCst);
            done = operation == shared.end.load(Ordering::SeqCst);
            let tensors = tensors(rank as u64, operation);
            add(&mut saw.put_in, &tensors);
            if done {
                worker.flush(now(), Reduction::Sum, tensors);
            } else {
                worker.all_reduce(now(), Reduction::Sum, tensors);
            }
            worker.end_iteration();
            operation += 1;
            // Each rank is slow in turn.
            if operation / 16 % RANKS as u64 == rank as u64 {
                busy_until = start.elapsed() + Duration::from_micros(500 + operation % 5 * 400);
            }
        }
        while let Some(transmit) = worker.poll_transmit(now(), &mut out) {
            // A full queue loses, as the network does.
            let _ = socket.send(&out[..transmit.len]);
        }
        while let Some(event) = worker.poll_event() {
            match event {
                Event::Done { tensors, synchronisation, .. } => {
                    add(&mut saw.came_out, &tensors);
                    saw.operations.push((synchronisation, digest(&tensors)));
                    if done && saw.operations.len() as u64 == operation {
                        assert_eq!(worker.residuals().count(), 0, "rank {rank} has something left");
                        (saw.excluded, saw.skipped) =
                            (worker.statistics().excluded, worker.statistics().skipped);
                        worker.leave(now());
                    }
                }
                Event::Failed { error, .. } => panic!("rank {rank}, operation {operation}: {error}"),
                Event::Left { complete } => {
                    assert!(complete, "rank {rank} left early");
                    return saw;
                }
            }
        }
        let wait = worker.poll_timeout().map_or(1000, |at| at.0.saturating_sub(now().0)).clamp(1, 1000);
        socket.set_read_timeout(Some(Duration::from_micros(wait))).unwrap();
        if let Ok(length) = socket.recv(&mut incoming) {
            worker.handle_datagram(now(), &incoming[..length]);
        }
        if worker.poll_timeout().is_some_and(|at| at <= now()) {
            worker.handle_timeout(now());
        }
    }
}

/// Asks for one mode after the other, as soon as the last change is over.
fn change(shared: &Shared, aggregator: &Host, token: &str) {
    let modes = [
        json!({"mode": "quorum", "quorum": 2}),
        json!({"mode": "bsp"}),
        json!({"mode": "ssp", "staleness": 2}),
        json!({"mode": "ssp", "staleness": 1, "quorum": 2}),
        json!({"mode": "asp"}),
        json!({"mode": "asp", "quorum": 1}),
    ];
    let start = Instant::now();
    let mut refused = 0;
    while shared.changes.load(Ordering::SeqCst) < CHANGES {
        assert!(start.elapsed() < DEADLINE, "{refused} refusals, {:?}", shared.changes);
        let changes = shared.changes.load(Ordering::SeqCst);
        let mode = &modes[changes % modes.len()];
        let at = SocketAddr::from(([127, 0, 0, 1], PORT));
        let (status, body) =
            aggregator.namespace.run(|| ask(at, Some(token), "PUT", "/v1/jobs/lab/sync", mode)).unwrap();
        match status {
            200 => {
                // One that no chunk has met yet may be replaced: only those that are met count.
                let met = |status: &Value| {
                    status["sync_change"].is_null() || status["sync_change"]["from"].is_u64()
                };
                let deadline = Instant::now() + DEADLINE;
                let show = || ask(at, None, "GET", "/v1/jobs/lab", &Value::Null).1;
                while !met(&aggregator.namespace.run(show).unwrap()) {
                    assert!(Instant::now() < deadline, "no chunk has met the change: {body}");
                    std::thread::yield_now();
                }
                shared.changes.fetch_add(1, Ordering::SeqCst);
            }
            409 => {
                assert_eq!(body["code"], "sync_changing", "{body}");
                refused += 1;
                std::thread::yield_now();
            }
            _ => panic!("{status}: {body}"),
        }
    }
    let furthest = shared.issued.iter().map(|issued| issued.load(Ordering::SeqCst)).max().unwrap();
    shared.end.store(furthest + MARGIN, Ordering::SeqCst);
}

#[test]
fn f23_two_hundred_changes_under_load_lose_nothing() {
    if !require_bpf("synchronisation::f23_two_hundred_changes_under_load_lose_nothing") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let lab = Lab::new(Layout::workers(RANKS)).unwrap();
    let file = folder.path().join("token");
    let options = AggregatorOptions {
        lanes: 64,
        slots: 16,
        window: 8,
        xdp_mode: "generic",
        more: vec!["--token-file".into(), file.display().to_string()],
        ..AggregatorOptions::world(RANKS)
    };
    let aggregator = Aggregator::start(&lab, &options).unwrap();
    let token = std::fs::read_to_string(&file).unwrap().trim().to_owned();
    let shared = Shared {
        aggregator: lab.aggregator.address(Family::V4),
        issued: Default::default(),
        end: AtomicU64::new(u64::MAX),
        changes: AtomicUsize::new(0),
    };
    let saw: Vec<Saw> = std::thread::scope(|scope| {
        let (shared, lab) = (&shared, &lab);
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| scope.spawn(move || lab.workers[rank].namespace.run(|| work(shared, rank)).unwrap()))
            .collect();
        scope.spawn(|| change(shared, &lab.aggregator, &token));
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    aggregator.stop().unwrap();
    let (first, others) = saw.split_first().unwrap();
    for other in others {
        assert!(other.operations == first.operations, "ranks saw other modes or results");
        assert_eq!(other.came_out, first.came_out);
    }
    let mut put_in = ELEMENTS.map(|n| vec![0.0; n]);
    for rank in &saw {
        for (all, own) in put_in.iter_mut().zip(&rank.put_in) {
            all.iter_mut().zip(own).for_each(|(all, own)| *all += own);
        }
    }
    assert_eq!(put_in, first.came_out, "what went in is not what came out");
    // Epochs count up by one: each change has its place in the order of operations, or lies within one.
    let mut epochs = vec![first.operations[0].0.epoch];
    for (synchronisation, _) in &first.operations {
        let last = epochs.last().copied().unwrap();
        let ahead = synchronisation.epoch.wrapping_sub(last) & 0x7F;
        assert!(ahead < 16, "an epoch went back: {last}, {}", synchronisation.epoch);
        if ahead > 0 {
            epochs.push(synchronisation.epoch);
        }
    }
    let (excluded, skipped) =
        saw.iter().fold((0, 0), |sum, rank| (sum.0 + rank.excluded, sum.1 + rank.skipped));
    println!(
        "{} operations, {} epochs seen, {excluded} contributions left out, {skipped} chunks skipped",
        first.operations.len(),
        epochs.len(),
    );
    assert!(epochs.len() > CHANGES / 4, "{} epochs", epochs.len());
    assert!(excluded + skipped > 0);
}
