//! `paatp capture` on real runs, read by tshark with our dissector, and compared with what the kernel and the ranks counted.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::Signal;
use paatp_common::counter::Event;
use paatp_common::wire::{Kind, Status};
use paatp_tests::gradients::synthetic;
use paatp_tests::lab::Host;
use paatp_tests::process::{Process, paatp};
use paatp_tests::report::Report;
use paatp_tests::tshark::{Fields, decode, is_true};
use paatp_tests::{Dtype, Family, Gradient, JobOptions, JobResult, Lab, Layout, Rates, Running};
use paatp_tests::{require_bpf, require_program};

const DEADLINE: Duration = Duration::from_secs(60);

/// What is asked of tshark.
const FIELDS: [&str; 18] = [
    "frame.number",
    "frame.time_epoch",
    "frame.packet_flags_direction",
    "frame.cap_len",
    "frame.len",
    "paatp.kind",
    "paatp.worker",
    "paatp.token",
    "paatp.seq",
    "paatp.status",
    "paatp.check.good",
    "paatp.flags.result",
    "paatp.flags.retransmit",
    "paatp.answer_in",
    "paatp.request_in",
    "paatp.retransmission_of",
    "paatp.time",
    "_ws.expert.message",
];

/// As pcapng counts.
const INBOUND: &str = "1";
const OUTBOUND: &str = "2";

fn ready(name: &str) -> bool {
    require_bpf(name) && require_program(name, "tshark")
}

/// A capture under way.
struct Capture {
    process: Process,
    file: PathBuf,
}

impl Capture {
    /// Starts one on a host, and waits until it sees packets.
    fn start(host: &Host, folder: &Path, name: &str, more: &[&str]) -> Capture {
        let file = folder.join(name);
        let mut command = host.namespace.command(paatp().unwrap());
        command.args(["capture", &host.interface, "-w"]).arg(&file).args(more);
        let mut process = Process::spawn(format!("capture {name}"), command).unwrap();
        process.wait_for_line("capturing at", DEADLINE).unwrap();
        Capture { process, file }
    }

    /// Ends it as Ctrl-C does; returns what it said, and the packets.
    fn stop(mut self) -> (String, Vec<Fields>) {
        if !self.process.has_ended().unwrap() {
            self.process.signal(Signal::SIGINT).unwrap();
        }
        let finished = self.process.wait(DEADLINE).unwrap();
        assert!(finished.is_success(), "{}", finished.output);
        assert!(finished.output.contains("lost: 0"), "{}", finished.output);
        let mode = fs::metadata(&self.file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        (finished.output, decode(&self.file, &FIELDS, &[]).unwrap())
    }
}

/// Runs a job; captures are stopped when its ranks have ended, before the aggregator goes.
fn run(
    lab: &Lab,
    inputs: &[Gradient],
    options: &JobOptions,
    start: impl FnOnce(&Lab) -> Vec<Capture>,
) -> (JobResult, Vec<(String, Vec<Fields>)>) {
    let mut running = Running::prepare(lab, inputs, options).unwrap();
    let captures = start(lab);
    for rank in 0..inputs.len() {
        running.start_rank(rank).unwrap();
    }
    let mut captured = Vec::new();
    let result = running
        .finish_after(Duration::from_secs(120), || {
            captured = captures.into_iter().map(Capture::stop).collect();
        })
        .unwrap();
    let verdict = result.check(inputs, options).unwrap();
    assert!(verdict.is_right(), "{:#?}", verdict.complaints);
    (result, captured)
}

fn is(packet: &Fields, kind: Kind) -> bool {
    packet["paatp.kind"] == (kind as u8).to_string()
}

fn goes(packet: &Fields, direction: &str) -> bool {
    // Written as a hexadecimal number of 32 bits.
    packet["frame.packet_flags_direction"].trim_start_matches("0x").trim_start_matches('0') == direction
}

fn good(packet: &Fields) -> bool {
    is_true(packet, "paatp.check.good")
}

fn says(packet: &Fields, text: &str) -> bool {
    packet["_ws.expert.message"].contains(text)
}

fn number(packet: &Fields, field: &str) -> u64 {
    packet[field].parse().unwrap_or_else(|error| panic!("{field} of {packet:?}: {error}"))
}

/// Everything that a bad network does to a rank's packets is in the capture, and nothing else is.
fn decoded_run(name: &str, family: Family, xdp_mode: &'static str, lanes: usize) {
    let inputs = synthetic(2, 5, &[(Dtype::F32, 60_000)], 1.0);
    let lab = Lab::new(Layout::workers(2)).unwrap();
    let rates = Rates { loss: 0.05, duplicate: 0.03, reorder: 0.03, corrupt: 0.02 };
    let mut options = JobOptions { family, requests: rates, answers: rates, ..JobOptions::world(2) };
    (options.aggregator.xdp_mode, options.aggregator.lanes) = (xdp_mode, lanes);
    let folder = tempfile::tempdir().unwrap();
    let files = [format!("{name}-0.pcapng"), format!("{name}-1.pcapng")];
    let (result, captured) = run(&lab, &inputs, &options, |lab| {
        let start = |(host, file): (_, &String)| Capture::start(host, folder.path(), file, &[]);
        lab.workers.iter().zip(&files).map(start).collect()
    });
    for (rank, (said, packets)) in captured.iter().enumerate() {
        println!("rank {rank}: {said}");
        compare_requests(packets, rank, result.ranks[rank].report.as_ref().unwrap());
    }
    let all: Vec<&Fields> = captured.iter().flat_map(|(_, packets)| packets).collect();
    // What came, after loss, duplicates and delays; each damaged header is seen, and told.
    let counts = result.answers;
    let came = counts.seen - counts.dropped + counts.duplicated - (counts.delayed - counts.released);
    let answers: Vec<&Fields> = all.iter().copied().filter(|packet| goes(packet, INBOUND)).collect();
    assert_eq!(answers.len() as u64, came, "{counts}");
    let (sound, damaged): (Vec<&Fields>, Vec<&Fields>) = answers.into_iter().partition(|packet| good(packet));
    assert_eq!(damaged.len() as u64, counts.corrupted_header, "{counts}");
    assert!(
        !damaged.is_empty() && damaged.iter().all(|packet| says(packet, "failed its check")),
        "{damaged:?}"
    );
    compare_answers(&sound);
    // What went, before anything was done to it.
    assert_eq!(all.iter().filter(|packet| goes(packet, OUTBOUND)).count() as u64, result.requests.seen);

    // Only headers are in the file.
    let outer = if family == Family::V4 { 42 } else { 62 };
    for packet in all {
        let [kept, length] = ["frame.cap_len", "frame.len"].map(|field| number(packet, field) as usize);
        assert_eq!(kept, length.min(outer + 64), "{packet:?}");
    }
}

/// A rank contributed to each chunk, and what it repeated is marked and linked.
fn compare_requests(packets: &[Fields], rank: usize, report: &Report) {
    let requests: Vec<&Fields> = packets.iter().filter(|packet| goes(packet, OUTBOUND)).collect();
    assert!(requests.iter().all(|packet| good(packet) && number(packet, "paatp.worker") == rank as u64));
    let (data, pulls): (Vec<&Fields>, Vec<&Fields>) =
        requests.into_iter().partition(|packet| is(packet, Kind::Data));
    assert!(!pulls.is_empty() && pulls.iter().all(|packet| is(packet, Kind::Pull)));
    let seqs: BTreeSet<u64> = data.iter().map(|packet| number(packet, "paatp.seq")).collect();
    let chunks = report.0["chunks"].as_u64().unwrap();
    assert_eq!(seqs, (0..chunks).collect());

    let (repeated, first): (Vec<&Fields>, Vec<&Fields>) =
        data.into_iter().partition(|packet| is_true(packet, "paatp.flags.retransmit"));
    assert_eq!((first.len() as u64, repeated.len() as u64), (chunks, report.statistic("retransmissions")));
    assert!(!repeated.is_empty());
    let frames: BTreeMap<u64, &Fields> =
        packets.iter().map(|packet| (number(packet, "frame.number"), packet)).collect();
    for packet in repeated {
        assert!(says(packet, "Sent before"), "{packet:?}");
        let frame = number(packet, "frame.number");
        let original = match packet["paatp.retransmission_of"].as_str() {
            // Packets sent on two CPUs can be captured in another order: then the first sending is yet to come.
            "" => first.iter().find(|first| {
                first["paatp.seq"] == packet["paatp.seq"] && number(first, "frame.number") > frame
            }),
            linked => frames.get(&linked.parse().unwrap()),
        };
        let original = original.unwrap_or_else(|| panic!("nothing was sent before {packet:?}"));
        assert_eq!(original["paatp.seq"], packet["paatp.seq"]);
        assert_ne!(original["paatp.token"], packet["paatp.token"]);
    }
    assert!(first.iter().all(|packet| packet["paatp.retransmission_of"].is_empty()));
}

/// All kinds of answers were there, and each knows its request.
fn compare_answers(answers: &[&Fields]) {
    assert!(answers.iter().all(|packet| is(packet, Kind::Answer)));
    let statuses: BTreeSet<u64> = answers.iter().map(|packet| number(packet, "paatp.status")).collect();
    for status in [Status::Ok, Status::NotYet, Status::BadTag] {
        assert!(statuses.contains(&u64::from(status as u8)), "{status:?} is not among {statuses:?}");
    }
    let results = answers.iter().filter(|packet| is_true(packet, "paatp.flags.result")).count();
    assert!(results > 0 && results < answers.len(), "{results} of {}", answers.len());
    for packet in answers {
        assert!(!packet["paatp.request_in"].is_empty(), "{packet:?}");
        let seconds: f64 = packet["paatp.time"].parse().unwrap();
        assert!((0.0..60.0).contains(&seconds), "{packet:?}");
    }
}

#[test]
fn disturbed_v4() {
    if ready("capture::disturbed_v4") {
        decoded_run("v4", Family::V4, "native", 352);
    }
}

#[test]
fn disturbed_generic_v6() {
    if ready("capture::disturbed_generic_v6") {
        decoded_run("v6", Family::V6, "generic", 320);
    }
}

/// A worker that hands the kernel many datagrams at once: every one of them is in the capture, a sample has exchanges whole.
#[test]
fn every_datagram_is_there_and_samples_are_whole() {
    if !ready("capture::every_datagram_is_there_and_samples_are_whole") {
        return;
    }
    let inputs = synthetic(1, 6, &[(Dtype::F32, 200_000)], 1.0);
    let lab = Lab::new(Layout::workers(1)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let control = lab.aggregator.address(Family::V4).to_string();
    let (result, captured) = run(&lab, &inputs, &JobOptions::world(1), |lab| {
        let start = |name, more: &[&str]| Capture::start(&lab.workers[0], folder.path(), name, more);
        vec![
            start("all.pcapng", &[]),
            start("sample.pcapng", &["--sample", "10", "--job", "lab", "--control", &control]),
            start("few.pcapng", &["--count", "5", "--snaplen", "9000"]),
        ]
    });
    let packets: Vec<&Vec<Fields>> = captured.iter().map(|(_, packets)| packets).collect();
    let [all, sample, few] = packets[..] else { panic!("{}", packets.len()) };
    let count = |direction| all.iter().filter(|packet| goes(packet, direction)).count() as u64;
    assert_eq!(count(OUTBOUND), result.counters.noted(Event::Requests));
    assert_eq!(count(INBOUND), count(OUTBOUND));
    assert!(all.iter().all(good));
    let pulls = all.iter().filter(|packet| is(packet, Kind::Pull)).count() as u64;
    assert_eq!(pulls, result.counters.noted(Event::Pulls));
    let results = all.iter().filter(|packet| is_true(packet, "paatp.flags.result")).count() as u64;
    assert_eq!(results, result.counters.noted(Event::Results));
    // More at once than fit one after the other: else this shows nothing of cutting.
    let mut times: Vec<&str> = all
        .iter()
        .filter(|packet| goes(packet, OUTBOUND))
        .map(|packet| packet["frame.time_epoch"].as_str())
        .collect();
    let sent = times.len();
    times.dedup();
    assert!(times.len() < sent, "none of {sent} datagrams was sent together with another");

    let (requests, answers): (Vec<&Fields>, Vec<&Fields>) =
        sample.iter().partition(|packet| goes(packet, OUTBOUND));
    assert_eq!(requests.len(), answers.len());
    assert!(requests.iter().all(|packet| !packet["paatp.answer_in"].is_empty()));
    let tenth = all.len() / 10;
    assert!(sample.len().abs_diff(tenth) <= 2 + tenth / 10, "{} of {}", sample.len(), all.len());

    assert_eq!(few.len(), 5);
    assert!(few.iter().all(|packet| packet["frame.cap_len"] == packet["frame.len"]), "{few:?}");
}

/// On the aggregator's interface an XDP program answers before a socket sees anything; it is not kept secret.
#[test]
fn an_aggregators_interface_is_warned_of() {
    if !ready("capture::an_aggregators_interface_is_warned_of") {
        return;
    }
    let inputs = synthetic(1, 7, &[(Dtype::F32, 2_000)], 1.0);
    let lab = Lab::new(Layout::workers(1)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for mode in ["native", "generic"] {
        let mut options = JobOptions::world(1);
        options.aggregator.xdp_mode = mode;
        let (_, captured) = run(&lab, &inputs, &options, |lab| {
            vec![Capture::start(&lab.aggregator, folder.path(), "aggregator.pcapng", &[])]
        });
        let (said, packets) = &captured[0];
        assert!(said.contains("an XDP program is on this interface"), "{said}");
        assert!(said.contains("no packet had such a port") && packets.is_empty(), "{said}");
    }
}

#[test]
fn what_cannot_be_captured_is_said() {
    if !ready("capture::what_cannot_be_captured_is_said") {
        return;
    }
    let lab = Lab::new(Layout::workers(1)).unwrap();
    let host = &lab.workers[0];
    let said = |args: &[&str]| {
        let mut command = host.namespace.command(paatp().unwrap());
        command.arg("capture").args(args);
        let finished = Process::spawn("capture", command).unwrap().wait(DEADLINE).unwrap();
        (finished.status.code(), finished.output)
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("none.pcapng").display().to_string();
    let (status, text) = said(&["nothing0", "-w", &file]);
    assert!(status == Some(1) && text.contains("no interface `nothing0`"), "{text}");
    let (status, text) = said(&[&host.interface, "-w", "/nowhere/at/all"]);
    assert!(status == Some(1) && text.contains("cannot create /nowhere/at/all"), "{text}");
    let (status, text) = said(&[&host.interface, "-w", &file, "--job", "lab", "--control", "127.0.0.1"]);
    assert!(
        status == Some(1) && text.contains("job `lab`") && text.contains("no aggregator answers"),
        "{text}"
    );
    let (status, text) = said(&[&host.interface, "-w", &file, "--seconds", "50ms"]);
    assert!(status == Some(0) && text.contains("no packet had such a port"), "{text}");
    assert_eq!(decode(Path::new(&file), &FIELDS, &[]).unwrap().len(), 0);
}
