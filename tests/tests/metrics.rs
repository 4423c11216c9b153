//! What `/metrics` and `/v1/status` of a real aggregator say: against a strict reader, promtool, a real Prometheus, and
//! what the kernel's tables hold.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;
use paatp_common::counter::{Event, Refusal};
use paatp_common::wire::{Chunk, ElementType, Operation};
use paatp_common::{Seq, job::mapped};
use paatp_tests::exposition::Exposition;
use paatp_tests::gradients::synthetic;
use paatp_tests::http::{Response, ask, send};
use paatp_tests::kernel::Maps;
use paatp_tests::lab::{Family, Host};
use paatp_tests::process::{Aggregator, AggregatorOptions, PORT, Process, WorkerCommand, paatp, wait_until};
use paatp_tests::testrun::support::requests::{TestJob, lanes_of};
use paatp_tests::{Dtype, Lab, Layout, require_bpf, require_program};
use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(60);

/// Where jobs are managed.
const LOOPBACK: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), PORT);

/// A lab with an aggregator and files for its ranks.
struct Bench {
    lab: Lab,
    aggregator: Aggregator,
    folder: tempfile::TempDir,
}

impl Bench {
    fn new(workers: usize, values: usize, more: &[&str]) -> Bench {
        let folder = tempfile::tempdir().unwrap();
        let lab = Lab::new(Layout::workers(workers)).unwrap();
        let more = more.iter().map(|arg| (*arg).to_owned()).collect();
        let options = AggregatorOptions { more, ..AggregatorOptions::world(workers) };
        let aggregator = Aggregator::start(&lab, &options).unwrap();
        for (rank, gradient) in synthetic(workers, 7, &[(Dtype::F32, values)], 1.0).iter().enumerate() {
            gradient.write(&folder.path().join(format!("input-rank{rank}.safetensors"))).unwrap();
        }
        Bench { lab, aggregator, folder }
    }

    fn ask(&self, method: &str, path: &str) -> Response {
        ask(&self.lab.aggregator.namespace, LOOPBACK, method, path).unwrap()
    }

    fn scrape(&self) -> Exposition {
        let response = self.ask("GET", "/metrics");
        assert_eq!(response.status, 200, "{}", response.body);
        Exposition::parse(&response.body).unwrap_or_else(|error| panic!("{error:#}\n{}", response.body))
    }

    fn status(&self) -> Value {
        let response = self.ask("GET", "/v1/status");
        assert_eq!(response.status, 200, "{}", response.body);
        serde_json::from_str(&response.body).unwrap()
    }

    fn worker(&self, rank: usize) -> Process {
        let host = &self.lab.workers[rank];
        let world = self.lab.workers.len();
        WorkerCommand::new(&self.lab, Family::V4, rank, world, self.folder.path()).spawn(host).unwrap()
    }

    fn workers(&self) -> Vec<Process> {
        (0..self.lab.workers.len()).map(|rank| self.worker(rank)).collect()
    }

    fn run(&self) {
        for mut worker in self.workers() {
            let finished = worker.wait(DEADLINE).unwrap();
            assert!(finished.is_success(), "{}", finished.output);
        }
    }

    fn maps(&self) -> Maps {
        let Host { namespace, interface, .. } = &self.lab.aggregator;
        Maps::on(namespace, interface).unwrap()
    }
}

/// Chunks of an operation of so many values, and one header-only chunk or none more: what workers contribute.
fn rank(exposition: &Exposition, name: &str, rank: &str) -> f64 {
    exposition
        .value(name, &[("job_name", "lab"), ("rank", rank)])
        .unwrap_or_else(|| panic!("{name} of rank {rank}"))
}

#[test]
fn metrics_tell_what_a_job_did() {
    if !require_bpf("metrics::metrics_tell_what_a_job_did") {
        return;
    }
    let bench = Bench::new(2, 200_000, &[]);
    let before = bench.scrape();
    // All is there at zero before anything happened.
    assert_eq!(before.value("paatp_refused_packets_total", &[("reason", "bad_tag")]), Some(0.0));
    assert_eq!(rank(&before, "paatp_rank_contributed_chunks_total", "1"), 0.0);
    assert_eq!(
        before.value(
            "paatp_xdp_attached",
            &[("interface", &bench.lab.aggregator.interface), ("mode", "native")]
        ),
        Some(1.0)
    );
    bench.run();
    let first = bench.scrape();
    let chunks = f64::from(200_000u32.div_ceil(352));
    let contributed = rank(&first, "paatp_rank_contributed_chunks_total", "0");
    // Contributions are acknowledged in the next request; the last ones have none.
    assert!((chunks - 128.0..=chunks + 2.0).contains(&contributed), "{contributed} of {chunks}");
    bench.run();
    let second = bench.scrape();
    let doubled = rank(&second, "paatp_rank_contributed_chunks_total", "0");
    assert!(doubled > contributed && doubled <= 2.0 * chunks + 4.0, "{contributed}, {doubled}");
    let completed = second.value("paatp_job_completed_chunks_total", &[("job_name", "lab")]).unwrap();
    let bytes = second.value("paatp_job_completed_bytes_total", &[("job_name", "lab")]);
    assert!(completed > chunks && bytes == Some(completed * 352.0 * 4.0), "{completed}, {bytes:?}");
    assert_eq!((before.fallen(&first), first.fallen(&second)), (vec![], vec![]));
    assert_eq!(before.series(), second.series(), "no traffic makes a series");
    // What is told is what the kernel has: nothing goes on any more.
    let counters = bench.maps().counters().unwrap();
    for event in Event::ALL {
        let told = second.value(&format!("paatp_{}_total", event.name()), &[]);
        // Frames that are not ours come all the time.
        assert!(
            told == Some(counters.noted(*event) as f64) || *event == Event::Passed,
            "{event:?}: {told:?}"
        );
    }
    for refusal in Refusal::ALL {
        let told = second.value("paatp_refused_packets_total", &[("reason", refusal.name())]);
        assert_eq!(told, Some(counters.refused(*refusal) as f64), "{refusal:?}");
    }
    assert!(
        second.samples.iter().all(|((name, _), value)| name != "paatp_collector_success" || *value == 1.0)
    );
    // The list in the documentation is what is exported, but for what this kernel does not count, and for the switch that
    // this aggregator does not have.
    let list = Command::new(paatp().unwrap()).args(["metrics", "list", "--format", "json"]).output().unwrap();
    let list: Value = serde_json::from_slice(&list.stdout).unwrap();
    let listed = list["metrics"].as_array().unwrap().iter().map(|metric| {
        (metric["name"].as_str().unwrap().to_owned(), metric["kind"].as_str().unwrap().to_owned())
    });
    let absent = ["paatp_bpf_program_", "paatp_switch_", "paatp_added_contributions_"];
    let absent = |name: &str| absent.iter().any(|prefix| name.starts_with(prefix));
    let listed: BTreeSet<_> = listed.filter(|(name, _)| !absent(name)).collect();
    let exported =
        second.families.clone().into_iter().filter(|(name, _)| !name.starts_with("paatp_bpf_program_"));
    assert_eq!(listed, exported.collect());
    assert!(bench.aggregator.stop().unwrap().is_success());
}

#[test]
fn the_page_is_what_prometheus_expects() {
    if !require_bpf("metrics::the_page_is_what_prometheus_expects") {
        return;
    }
    let bench = Bench::new(1, 10, &["--metrics", "127.0.0.1:9599"]);
    let extra: SocketAddr = ([127, 0, 0, 1], 9599).into();
    let host = &bench.lab.aggregator;
    for address in [LOOPBACK, extra] {
        let ask = |method: &str| ask(&host.namespace, address, method, "/metrics").unwrap();
        let got = ask("GET");
        assert_eq!(
            (got.status, got.header("content-type")),
            (200, Some("text/plain; version=0.0.4; charset=utf-8"))
        );
        Exposition::parse(&got.body).unwrap();
        let head = ask("HEAD");
        assert_eq!(
            (head.status, head.header("content-type"), head.body.as_str()),
            (200, got.header("content-type"), "")
        );
        assert_eq!([ask("POST").status, ask("DELETE").status], [405, 405]);
    }
    // Nothing else is there, and workers get nothing.
    assert_eq!(ask(&host.namespace, extra, "GET", "/v1/jobs").unwrap().status, 404);
    let there = SocketAddr::new(host.address(Family::V4), PORT);
    assert_eq!(ask(&bench.lab.workers[0].namespace, there, "GET", "/metrics").unwrap().status, 403);
    assert!(bench.aggregator.stop().unwrap().is_success());
}

/// Sends an IPv4 packet from whatever address it names.
fn send_raw(namespace: &paatp_tests::netns::Namespace, packets: &[Vec<u8>], to: Ipv4Addr) {
    namespace
        .run(|| {
            // SAFETY: plain system calls on a descriptor of our own and memory that lives.
            unsafe {
                let socket = libc::socket(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_RAW);
                assert!(socket >= 0, "{}", std::io::Error::last_os_error());
                let mut address: libc::sockaddr_in = std::mem::zeroed();
                address.sin_family = libc::AF_INET as u16;
                address.sin_addr.s_addr = u32::from_ne_bytes(to.octets());
                for packet in packets {
                    let sent = libc::sendto(
                        socket,
                        packet.as_ptr().cast(),
                        packet.len(),
                        0,
                        (&raw const address).cast(),
                        size_of::<libc::sockaddr_in>() as u32,
                    );
                    assert_eq!(sent, packet.len() as isize, "{}", std::io::Error::last_os_error());
                }
                libc::close(socket);
            }
        })
        .unwrap();
}

/// Ten thousand senders that are nobody, with jobs, ranks and generations of all kinds: every packet is refused and counted,
/// and none makes a series.
#[test]
fn foreign_senders_make_no_series() {
    if !require_bpf("metrics::foreign_senders_make_no_series") {
        return;
    }
    const SENDERS: u32 = 10_000;
    let bench = Bench::new(1, 10, &[]);
    // A job that runs, so that there is something to be a stranger to.
    let worker = &bench.lab.workers[0].namespace;
    let there = SocketAddr::new(bench.lab.aggregator.address(Family::V4), PORT);
    let join = r#"{"protocol":1,"rank":0,"world":1,"wait_seconds":5}"#;
    let joined = worker.run(|| send(there, "POST", "/v1/jobs/lab/join", join)).unwrap().unwrap();
    assert_eq!(joined.status, 200, "{}", joined.body);
    let before = bench.scrape();
    let std::net::IpAddr::V4(to) = bench.lab.aggregator.address(Family::V4) else {
        panic!("no IPv4 address")
    };
    let chunk = Chunk::new(Operation::Sum, ElementType::F32, 32, 0);
    let packet = |sender: u32| {
        // Jobs that there are not, ranks that the job has not, and strangers that claim to be its rank.
        let number = if sender.is_multiple_of(4) { 0 } else { (sender % 64) as u16 };
        let job = TestJob { number, generation: sender, ..TestJob::new(64, 8, 32) };
        let rank = (sender % 7) as u8;
        let request = job.data(rank, Seq(sender), chunk);
        let datagram = job.datagram(&request, &lanes_of(64, rank, Seq(sender), 32));
        let [_, a, b, c] = sender.to_be_bytes();
        let mut envelope = job.envelope(rank);
        (envelope.source, envelope.destination) = (mapped([11, a, b, c]), mapped(to.octets()));
        envelope.source_port = 1024 + (sender % 60_000) as u16;
        // From the IP header on: the kernel adds what is below.
        envelope.wrap(&datagram).split_off(envelope.ip())
    };
    let packets: Vec<Vec<u8>> = (0..SENDERS).map(packet).collect();
    send_raw(worker, &packets, to);
    let refused = |exposition: &Exposition| {
        let all = exposition.samples.iter().filter(|((name, _), _)| name == "paatp_refused_packets_total");
        all.map(|(_, value)| value).sum::<f64>()
    };
    wait_until("all packets were refused", DEADLINE, || Ok(refused(&bench.scrape()) >= f64::from(SENDERS)))
        .unwrap();
    let after = bench.scrape();
    assert_eq!(before.series(), after.series());
    let by = |reason| after.value("paatp_refused_packets_total", &[("reason", reason)]).unwrap();
    assert!(by("unknown_job") > 1000.0 && by("unknown_worker") > 1000.0, "{:?}", after.samples);
    assert!(by("foreign_address") > 100.0, "{:?}", after.samples);
    assert_eq!(rank(&after, "paatp_rank_contributed_chunks_total", "0"), 0.0);
    assert!(bench.aggregator.stop().unwrap().is_success());
}

/// A rank that is stopped is named, with how long and how far behind, in status and metrics.
#[test]
fn a_stopped_rank_is_named() {
    if !require_bpf("metrics::a_stopped_rank_is_named") {
        return;
    }
    let bench = Bench::new(3, 8_000_000, &[]);
    let maps = bench.maps();
    let workers = bench.workers();
    wait_until("some results were out", DEADLINE, || Ok(maps.counters()?.noted(Event::Results) > 300))
        .unwrap();
    workers[1].signal(Signal::SIGSTOP).unwrap();
    let stall = || bench.status()["jobs"][0]["stall"].clone();
    wait_until("the stall is seen", DEADLINE, || Ok(!stall().is_null())).unwrap();
    let (seen, status) = (stall(), bench.status());
    assert_eq!(seen["missing_ranks"], serde_json::json!([1]), "{status:#}");
    assert!(seen["sentence"].as_str().unwrap().contains("rank 1"), "{seen}");
    let job = &status["jobs"][0];
    assert_eq!(job["oldest_open_slot"]["missing_ranks"], serde_json::json!([1]), "{status:#}");
    assert!(job["ranks"][1]["in_the_way_seconds"].as_f64().unwrap() >= 0.5, "{status:#}");
    let metrics = bench.scrape();
    assert!(metrics.value("paatp_job_stall_seconds", &[("job_name", "lab")]).unwrap() >= 1.0);
    assert!(metrics.value("paatp_job_oldest_open_slot_age_seconds", &[("job_name", "lab")]).unwrap() >= 1.0);
    assert!(rank(&metrics, "paatp_rank_lag_chunks", "1") > 0.0);
    workers[1].signal(Signal::SIGCONT).unwrap();
    for mut worker in workers {
        let finished = worker.wait(DEADLINE).unwrap();
        assert!(finished.is_success(), "{}", finished.output);
    }
    let idle = bench.status();
    assert!(idle["jobs"][0]["stall"].is_null(), "{idle:#}");
    // The last minutes are kept as well.
    let filled = wait_until("the last minutes are told", DEADLINE, || {
        let history = bench.ask("GET", "/v1/history?job=lab");
        let history: Value = serde_json::from_str(&history.body)?;
        let sum = |rank: usize| -> u64 {
            let steps = history["ranks"][rank]["contributed"].as_array().unwrap();
            steps.iter().map(|step| step.as_u64().unwrap()).sum()
        };
        Ok(sum(0) > 1000 && sum(1) > 1000)
    });
    filled.unwrap();
    assert!(bench.aggregator.stop().unwrap().is_success());
}

#[test]
fn promtool_finds_nothing_wrong() {
    if !require_bpf("metrics::promtool_finds_nothing_wrong")
        || !require_program("metrics::promtool_finds_nothing_wrong", "promtool")
    {
        return;
    }
    let bench = Bench::new(2, 10_000, &[]);
    bench.run();
    let page = bench.ask("GET", "/metrics").body;
    let mut promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    promtool.stdin.take().unwrap().write_all(page.as_bytes()).unwrap();
    let output = promtool.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.trim().is_empty(), "{said}");
    assert!(bench.aggregator.stop().unwrap().is_success());
}

/// A real Prometheus with our rules: the target is up, and what a job did can be asked for.
#[test]
fn prometheus_scrapes_it() {
    const NAME: &str = "metrics::prometheus_scrapes_it";
    if !require_bpf(NAME) || !require_program(NAME, "prometheus") {
        return;
    }
    let bench = Bench::new(2, 100_000, &[]);
    let rules = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/prometheus/paatp.rules.yml");
    let config = format!(
        "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [\"{rules}\"]\nscrape_configs:\n\
         - job_name: paatp\n  static_configs:\n  - targets: [\"{LOOPBACK}\"]\n"
    );
    let file = bench.folder.path().join("prometheus.yml");
    fs::write(&file, config).unwrap();
    let server: SocketAddr = ([127, 0, 0, 1], 9090).into();
    let namespace = &bench.lab.aggregator.namespace;
    let mut command = namespace.command("prometheus");
    command
        .arg(format!("--config.file={}", file.display()))
        .arg(format!("--storage.tsdb.path={}", bench.folder.path().join("data").display()))
        .arg(format!("--web.listen-address={server}"));
    let prometheus = Process::spawn("prometheus", command).unwrap();
    let api = |path: &str| -> anyhow::Result<Value> {
        Ok(serde_json::from_str(&ask(namespace, server, "GET", path)?.body)?)
    };
    let query = |query: &str| -> Option<f64> {
        let answer = api(&format!("/api/v1/query?query={query}")).ok()?;
        answer["data"]["result"][0]["value"][1].as_str()?.parse().ok()
    };
    wait_until("the target was up", DEADLINE, || Ok(query("up") == Some(1.0)))
        .unwrap_or_else(|error| panic!("{error}\n{}", prometheus.output()));
    bench.run();
    let told = rank(&bench.scrape(), "paatp_rank_contributed_chunks_total", "1");
    assert!(told > 100.0, "{told}");
    let contributed = "paatp_rank_contributed_chunks_total%7Brank=%221%22%7D";
    wait_until("Prometheus has what we have", DEADLINE, || Ok(query(contributed) == Some(told))).unwrap();
    // Everything that was on the page was taken.
    let series = bench.scrape().samples.len() as f64;
    assert_eq!(query("scrape_samples_scraped"), Some(series));
    let targets = api("/api/v1/targets").unwrap();
    assert_eq!(targets["data"]["activeTargets"][0]["lastError"], "", "{targets}");
    let rules = api("/api/v1/rules").unwrap();
    let rules: Vec<&Value> = rules["data"]["groups"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|group| group["rules"].as_array().unwrap())
        .collect();
    assert!(rules.len() > 5, "{rules:?}");
    wait_until("all rules were evaluated", DEADLINE, || {
        let now = api("/api/v1/rules")?;
        let groups = now["data"]["groups"].as_array().cloned().unwrap_or_default();
        let mut rules =
            groups.iter().flat_map(|group| group["rules"].as_array().cloned().unwrap_or_default());
        Ok(rules.all(|rule| rule["health"] == "ok"))
    })
    .unwrap();
    assert!(bench.aggregator.stop().unwrap().is_success());
}

/// Each alert rule fires when it should, and not when it should not.
#[test]
fn alert_rules_do_what_they_say() {
    if !require_program("metrics::alert_rules_do_what_they_say", "promtool") {
        return;
    }
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/prometheus");
    for args in [["check", "rules", "paatp.rules.yml"], ["test", "rules", "paatp.rules.test.yml"]] {
        let output = Command::new("promtool").args(args).current_dir(folder).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains("SUCCESS"), "{args:?}: {said}");
    }
    let [rules, tests] = ["paatp.rules.yml", "paatp.rules.test.yml"]
        .map(|name| fs::read_to_string(format!("{folder}/{name}")).unwrap());
    let alerts = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: "));
    for alert in alerts {
        assert!(tests.contains(&format!("alertname: {alert}\n")), "{alert} has no test");
    }
}
