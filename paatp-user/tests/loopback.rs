//! Whole all-reduces over real sockets on loopback: the program's worker against its control server, with the
//! aggregation path of `paatp-common` in ordinary memory in place of the XDP program. Needs no privileges.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use paatp_common::counter::Counters;
use paatp_common::host::Host;
use paatp_common::job::{JobEntry, RankEntry};
use paatp_common::lanes::SlotBlock;
use paatp_common::limits::{LANES_PER_BLOCK, MAX_RANKS};
use paatp_common::policy::Policy;
use paatp_common::pool::Pool;
use paatp_common::progress::{Progress, RankRecord};
use paatp_common::slot::Slot;
use paatp_transport::rate::Algorithm;
use paatp_transport::rate::share::Share;
use paatp_user::cli::{Allreduce, Credentials, IoName, ReductionName};
use paatp_user::config::{FailurePolicy, JobConfig, Jobs};
use paatp_user::control::membership::{Formation, Membership, table_address};
use paatp_user::control::server::{Control, Tables, serve_all};
use paatp_user::engine::{EngineError, ProgressSnapshot, RankProgress};
use paatp_user::worker::{self, AllreduceError};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize};

/// The tables of a node with one job.
struct Memory {
    job: JobEntry,
    ranks: Vec<RankEntry>,
    progress: Progress,
    slots: Vec<Slot>,
    lanes: Vec<SlotBlock>,
    counters: Counters,
}

impl Memory {
    fn new(config: &JobConfig) -> Memory {
        let (slots, blocks) = (config.slots as usize, config.lanes as usize / LANES_PER_BLOCK);
        Memory {
            job: JobEntry::default(),
            ranks: vec![RankEntry::default(); MAX_RANKS],
            progress: Progress::default(),
            slots: vec![Slot::default(); slots],
            lanes: vec![bytemuck::Zeroable::zeroed(); slots * blocks],
            counters: Counters::default(),
        }
    }

    /// Answers a datagram in place.
    fn handle(&mut self, datagram: &mut [u8], from: IpAddr) -> Option<usize> {
        let blocks_per_slot = self.lanes.len() / self.slots.len();
        let mut host = Host {
            jobs: std::slice::from_mut(&mut self.job),
            ranks: &self.ranks,
            progress: std::slice::from_ref(&self.progress),
            pool: Pool::default(),
            slots: &mut self.slots,
            lanes: &mut self.lanes,
            blocks_per_slot,
            counters: &mut self.counters,
        };
        host.handle(datagram, table_address(from), false).ok()
    }
}

/// The tables as the control server writes them.
struct Shared(Arc<Mutex<Memory>>);

impl Tables for Shared {
    fn install(&mut self, formation: &Formation) -> Result<(), EngineError> {
        let mut memory = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        memory.job = formation.entry;
        for (place, rank) in memory.ranks.iter_mut().zip(&formation.ranks) {
            *place = *rank;
        }
        Ok(())
    }

    fn write(&mut self, _: u16, entry: JobEntry) -> Result<(), EngineError> {
        let mut memory = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        memory.job = JobEntry { policy: memory.job.policy, ..entry };
        Ok(())
    }

    fn policy(&self, _: u16) -> Policy {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).job.policy
    }

    fn replace_policy(&mut self, _: u16, from: Policy, to: Policy) -> bool {
        let mut memory = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = memory.job.policy == from;
        if is_same {
            memory.job.policy = to;
        }
        is_same
    }

    fn set_gains(&mut self, _: u16, gains: &[i8]) -> Result<(), EngineError> {
        let mut memory = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        memory.ranks.iter_mut().zip(gains).for_each(|(rank, gain)| rank.gain = *gain);
        Ok(())
    }

    fn records(&self, _: u16, entry: &JobEntry) -> Result<Vec<RankRecord>, EngineError> {
        let memory = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let record = |rank| memory.progress.reached(entry.generation, rank);
        Ok((0..usize::from(entry.world)).map(record).collect())
    }

    fn progress(&self, _: u16, entry: &JobEntry) -> Result<ProgressSnapshot, EngineError> {
        let memory = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let rank = |rank| {
            let record = memory.progress.reached(entry.generation, rank);
            RankProgress { acknowledged: record.acked.0, contributed: record.contributed.0 }
        };
        let ranks = (0..usize::from(entry.world)).map(rank).collect();
        Ok(ProgressSnapshot { ranks, min_ack: memory.progress.acks.floor(entry.generation).0 })
    }

    fn slots_in_use(&self, _: &JobEntry, _: u32) -> Result<Option<u32>, EngineError> {
        Ok(None)
    }

    fn share(&self, job: u16, entry: &JobEntry) -> Result<Share, EngineError> {
        Ok(Share { job, generation: entry.generation, min_ack: 0, crowded: 0 })
    }

    fn pool_in_use(&self) -> Result<u32, EngineError> {
        Ok(0)
    }
}

/// A node on loopback; ends with the test.
struct Node {
    address: SocketAddr,
    control: Control,
    stop: Arc<AtomicBool>,
    data: Option<JoinHandle<()>>,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(data) = self.data.take() {
            let _ = data.join();
        }
    }
}

/// TCP and UDP on one port.
fn sockets() -> (TcpListener, UdpSocket) {
    for _ in 0..100 {
        let Ok(udp) = UdpSocket::bind("127.0.0.1:0") else { continue };
        if let Ok(tcp) = udp.local_addr().and_then(TcpListener::bind) {
            return (tcp, udp);
        }
    }
    panic!("no port is free for both TCP and UDP");
}

/// Starts a node for job `test`; drops every `loss`-th datagram in each direction.
fn node(world: u32, loss: Option<u32>) -> Node {
    node_of(JobConfig { lanes: 64, slots: 64, window: 16, ..JobConfig::new("test", world) }, loss)
}

fn node_of(config: JobConfig, loss: Option<u32>) -> Node {
    let memory = Arc::new(Mutex::new(Memory::new(&config)));
    let (tcp, udp) = sockets();
    let address = udp.local_addr().unwrap_or_else(|error| panic!("{error}"));
    let jobs = Jobs::new(vec![config]).unwrap_or_else(|error| panic!("{error}"));
    let membership = Membership::new(&jobs, address.port(), 1);
    let control = Control::new(membership, Arc::new(Mutex::new(Shared(memory.clone()))));
    let serving = control.clone();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let _ = tcp.set_nonblocking(true);
        if let Ok(runtime) = runtime {
            let _ = runtime
                .block_on(async { serve_all(serving, vec![tokio::net::TcpListener::from_std(tcp)?]).await });
        }
    });
    let stop = Arc::new(AtomicBool::new(false));
    let ending = stop.clone();
    let data = thread::spawn(move || serve_data(&udp, &memory, loss, &ending));
    Node { address, control, stop, data: Some(data) }
}

fn serve_data(udp: &UdpSocket, memory: &Mutex<Memory>, loss: Option<u32>, stop: &AtomicBool) {
    let _ = udp.set_read_timeout(Some(Duration::from_millis(20)));
    let mut buffer = [0; 4096];
    let mut count = 0u32;
    let mut lost = || {
        count = count.wrapping_add(1);
        loss.is_some_and(|every| count.is_multiple_of(every))
    };
    while !stop.load(Ordering::Relaxed) {
        let Ok((length, from)) = udp.recv_from(&mut buffer) else { continue };
        let Some(datagram) = buffer.get_mut(..length) else { continue };
        if lost() {
            continue;
        }
        let answer = memory.lock().unwrap_or_else(PoisonError::into_inner).handle(datagram, from.ip());
        if let Some(answer) = answer.and_then(|length| datagram.get(..length))
            && !lost()
        {
            let _ = udp.send_to(answer, from);
        }
    }
}

fn arguments(node: &Node, folder: &Path, rank: u8, world: u8) -> Allreduce {
    Allreduce {
        job: "test".into(),
        rank,
        world,
        aggregator: node.address.to_string(),
        input: folder.join(format!("in-{rank}")),
        output: folder.join(format!("out-{rank}")),
        reduction: ReductionName::Sum,
        timeout: Duration::from_secs(10),
        io: IoName::Udp,
        controller: Algorithm::PaAtp,
        report: Some(folder.join(format!("report-{rank}.json"))),
        credentials: Credentials::default(),
    }
}

/// Small integers, so that float sums are exact whatever the scale.
fn value(rank: u8, index: usize) -> i32 {
    i32::try_from(index % 61).unwrap_or(0) * (i32::from(rank) + 1) - 20
}

const SHAPES: [(&str, usize); 4] = [("long", 5003), ("odd", 33), ("one", 1), ("empty", 0)];

/// A file with a tensor of each length, floats and integers; the tensors' order differs between ranks.
fn write_input(path: &Path, rank: u8) {
    let mut tensors = Vec::new();
    for (name, length) in SHAPES {
        let ints: Vec<u8> = (0..length).flat_map(|i| value(rank, i).to_le_bytes()).collect();
        let floats: Vec<u8> = (0..length).flat_map(|i| (value(rank, i) as f32).to_le_bytes()).collect();
        let suffix = if rank == 0 { ["a", "b"] } else { ["b", "a"] };
        for suffix in suffix {
            let (dtype, data) = if suffix == "a" { (Dtype::F32, &floats) } else { (Dtype::I32, &ints) };
            tensors.push((format!("{name}.{suffix}"), dtype, length, data.clone()));
        }
    }
    let views = tensors.iter().filter_map(|(name, dtype, length, data)| {
        Some((name.clone(), TensorView::new(*dtype, vec![*length], data).ok()?))
    });
    let bytes = serialize(views, None).unwrap_or_else(|error| panic!("{error}"));
    std::fs::write(path, bytes).unwrap_or_else(|error| panic!("{error}"));
}

type Results = Vec<Result<worker::report::Report, AllreduceError>>;

/// Runs all ranks at once, each with a change to its arguments.
fn run(node: &Node, folder: &Path, world: u8, change: impl Fn(&mut Allreduce) + Sync) -> Results {
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|rank| {
                let mut args = arguments(node, folder, rank, world);
                change(&mut args);
                scope.spawn(move || worker::allreduce(&args))
            })
            .collect();
        let join =
            |rank: thread::ScopedJoinHandle<'_, _>| rank.join().unwrap_or_else(|_| panic!("a rank panicked"));
        ranks.into_iter().map(join).collect()
    })
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"))
}

fn check_sums(path: &PathBuf, world: u8) {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{error}"));
    let file = SafeTensors::deserialize(&bytes).unwrap_or_else(|error| panic!("{error}"));
    for (name, length) in SHAPES {
        let expected: Vec<i32> = (0..length).map(|i| (0..world).map(|rank| value(rank, i)).sum()).collect();
        let data = |suffix: &str| file.tensor(&format!("{name}.{suffix}")).map(|view| view.data().to_vec());
        let ints: Vec<u8> = expected.iter().flat_map(|value| value.to_le_bytes()).collect();
        let floats: Vec<u8> = expected.iter().flat_map(|value| (*value as f32).to_le_bytes()).collect();
        assert_eq!(data("b").ok(), Some(ints), "{name}");
        assert_eq!(data("a").ok(), Some(floats), "{name}");
    }
}

fn whole_run(world: u8, loss: Option<u32>) {
    let (node, folder) = (node(world.into(), loss), folder());
    (0..world).for_each(|rank| write_input(&folder.path().join(format!("in-{rank}")), rank));
    // Twice: the second run is a new generation on the slots of the first.
    for _ in 0..2 {
        let results = run(&node, folder.path(), world, |_| {});
        for (rank, result) in results.into_iter().enumerate() {
            let report = result.unwrap_or_else(|error| panic!("rank {rank}: {error:?}"));
            assert_eq!((report.tensors, report.elements, report.world), (8, 2 * 5037, world));
            assert!(report.all_ranks_complete && report.chunks >= 2 * 80, "{report:?}");
            check_sums(&folder.path().join(format!("out-{rank}")), world);
            let text = std::fs::read_to_string(folder.path().join(format!("report-{rank}.json")));
            assert!(text.is_ok_and(|text| text.contains("\"schema_version\": 1") && text.contains(&report.sha256)));
        }
    }
}

#[test]
fn one_rank_gets_its_own_values() {
    whole_run(1, None);
}

#[test]
fn three_ranks_get_the_sum() {
    whole_run(3, None);
}

#[test]
fn losses_are_repaired() {
    whole_run(2, Some(13));
}

#[test]
fn a_missing_rank_is_named_and_nothing_is_written() {
    let (node, folder) = (node(2, None), folder());
    write_input(&folder.path().join("in-0"), 0);
    let mut args = arguments(&node, folder.path(), 0, 2);
    args.timeout = Duration::from_millis(300);
    let message = worker::allreduce(&args).map(drop).map_err(|error| error.to_string());
    let message = message.err().unwrap_or_default();
    assert!(message.contains("1 of 2 ranks had not joined after 300 ms: rank 1; start"), "{message}");
    let names: Vec<_> = std::fs::read_dir(folder.path()).into_iter().flatten().flatten().collect();
    assert_eq!(names.len(), 1, "only the input is there: {names:?}");
}

#[test]
fn refusals_come_at_once() {
    let (node, folder) = (node(2, None), folder());
    write_input(&folder.path().join("in-0"), 0);
    let refusal = |change: &dyn Fn(&mut Allreduce)| {
        let mut args = arguments(&node, folder.path(), 0, 2);
        change(&mut args);
        let start = Instant::now();
        let message = worker::allreduce(&args).map(drop).map_err(|error| error.to_string()).err();
        assert!(start.elapsed() < Duration::from_secs(5));
        message.unwrap_or_default()
    };
    let world = refusal(&|args| args.world = 3);
    assert!(world.contains("expects 3 ranks, but job `test` has 2"), "{world}");
    let job = refusal(&|args| args.job = "other".into());
    assert!(job.contains("no job `other` here; anybody may join: test"), "{job}");
}

#[test]
fn ranks_with_other_tensors_are_told() {
    let (node, folder) = (node(2, None), folder());
    write_input(&folder.path().join("in-0"), 0);
    let other = TensorView::new(Dtype::F32, vec![1], &[0; 4]).and_then(|view| serialize([("w", view)], None));
    assert!(std::fs::write(folder.path().join("in-1"), other.unwrap_or_default()).is_ok());
    let results = run(&node, folder.path(), 2, |args| args.timeout = Duration::from_secs(2));
    let messages: Vec<String> =
        results.into_iter().filter_map(|result| result.err()).map(|error| error.to_string()).collect();
    assert_eq!(messages.len(), 2);
    assert!(messages.iter().any(|message| message.contains("other names, types or shapes")), "{messages:?}");
}

#[test]
fn a_silent_aggregator_is_an_error_in_time() {
    let (mut node, folder) = (node(1, None), folder());
    write_input(&folder.path().join("in-0"), 0);
    // The control server goes on, the data plane ends, and its port closes.
    node.stop.store(true, Ordering::Relaxed);
    if let Some(data) = node.data.take() {
        let _ = data.join();
    }
    let mut args = arguments(&node, folder.path(), 0, 1);
    args.timeout = Duration::from_millis(700);
    let start = Instant::now();
    let message = worker::allreduce(&args).map(drop).map_err(|error| format!("{error:#}"));
    assert!(start.elapsed() < Duration::from_secs(5));
    let message = message.err().unwrap_or_default();
    assert!(message.contains("instead of the XDP program"), "{message}");
}

#[test]
fn values_that_are_not_finite_fail_everybody() {
    let (node, folder) = (node(2, None), folder());
    for rank in 0..2u8 {
        let values = [1.0f32, if rank == 1 { f32::NAN } else { 2.0 }];
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let bytes =
            TensorView::new(Dtype::F32, vec![2], &data).and_then(|view| serialize([("w", view)], None));
        let path = folder.path().join(format!("in-{rank}"));
        assert!(std::fs::write(path, bytes.unwrap_or_default()).is_ok());
    }
    let results = run(&node, folder.path(), 2, |_| {});
    let causes: Vec<String> = results
        .into_iter()
        .filter_map(|result| match result {
            Err(AllreduceError::Operation { source, .. }) => Some(source.to_string()),
            _ => None,
        })
        .collect();
    assert_eq!(causes.len(), 2);
    assert!(causes.iter().any(|cause| cause.contains("NaN at index 1")), "{causes:?}");
    assert!(causes.iter().any(|cause| cause.contains("rank 1 reported NaN")), "{causes:?}");
    assert!(!folder.path().join("out-0").exists() && !folder.path().join("out-1").exists());
}

/// A node whose job of three ranks allows a silence of a second. Rank 2 joins and is never heard of again; the others
/// do what they do while time passes for the daemon.
fn with_a_dead_rank(on_failure: FailurePolicy) -> (Results, tempfile::TempDir) {
    let config = JobConfig { lanes: 64, slots: 64, window: 16, ..JobConfig::new("test", 3) };
    let node = node_of(JobConfig { timeout_seconds: Some(1.0), on_failure, ..config }, None);
    let folder = folder();
    (0..2).for_each(|rank| write_input(&folder.path().join(format!("in-{rank}")), rank));
    let over = AtomicBool::new(false);
    let results = thread::scope(|scope| {
        scope.spawn(|| {
            let body = r#"{"protocol":1,"rank":2,"world":3,"wait_seconds":20}"#;
            let head =
                "POST /v1/jobs/test/join HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
            let text = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
            let mut stream = TcpStream::connect(node.address).unwrap_or_else(|error| panic!("{error}"));
            assert!(stream.write_all(text.as_bytes()).is_ok());
            let mut answer = String::new();
            let _ = stream.read_to_string(&mut answer);
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        });
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                node.control.tick(Instant::now());
                thread::sleep(Duration::from_millis(50));
            }
        });
        let ranks: Vec<_> = (0..2)
            .map(|rank| {
                let args = arguments(&node, folder.path(), rank, 3);
                scope.spawn(move || worker::allreduce(&args))
            })
            .collect();
        let results = ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|_| panic!("a rank panicked")));
        let results = results.collect();
        over.store(true, Ordering::Relaxed);
        results
    });
    (results, folder)
}

/// F8, F9, F10: the others' sum is completed although nothing but repetitions and pulls comes after the shrink.
#[test]
fn f8_a_shrunk_job_goes_on_with_the_others_sum() {
    let (results, folder) = with_a_dead_rank(FailurePolicy::Shrink);
    for (rank, result) in results.into_iter().enumerate() {
        let report = result.unwrap_or_else(|error| panic!("rank {rank}: {error:?}"));
        assert!(report.all_ranks_complete, "those that count");
        check_sums(&folder.path().join(format!("out-{rank}")), 2);
    }
}

#[test]
fn an_aborted_job_names_the_rank_that_held_it_up() {
    let (results, folder) = with_a_dead_rank(FailurePolicy::Abort);
    for (rank, result) in results.into_iter().enumerate() {
        let message = result.map(drop).map_err(|error| error.to_string()).err().unwrap_or_default();
        assert!(message.contains("the aggregator says: rank 2 held the others up"), "{message}");
        assert!(!folder.path().join(format!("out-{rank}")).exists());
    }
}

#[test]
fn ranks_that_are_done_leave() {
    let (node, folder) = (node(2, None), folder());
    (0..2).for_each(|rank| write_input(&folder.path().join(format!("in-{rank}")), rank));
    assert!(run(&node, folder.path(), 2, |_| {}).iter().all(Result::is_ok));
    let mut stream = TcpStream::connect(node.address).unwrap_or_else(|error| panic!("{error}"));
    assert!(stream.write_all(b"GET /v1/jobs/test HTTP/1.1\r\nHost: localhost\r\n\r\n").is_ok());
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    assert!(answer.contains("\"state\":\"idle\""), "{answer}");
}
