//! What is exported against the list, and parts that fail or hang.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use paatp_common::Seq;
use paatp_common::counter::Counters;
use paatp_common::job::JobEntry;
use paatp_common::progress::RankRecord;
use paatp_common::slot::Slot;
use prometheus::proto::MetricFamily;

use super::*;
use crate::config::{JobConfig, Jobs};
use crate::control::membership::{Entropy, Membership};
use crate::control::protocol::{JoinRequest, PROTOCOL};
use crate::engine::EngineError;
use crate::switch::report::{Report, Round};
use crate::telemetry::Identity;
use crate::telemetry::read::{Cost, View};

/// Tables that can be locked.
#[derive(Clone, Default)]
struct Fake {
    counters: Arc<Mutex<()>>,
    fail: Arc<Mutex<bool>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl View for Fake {
    fn counters(&self) -> Result<Counters, EngineError> {
        let _held = lock(&self.counters);
        if *lock(&self.fail) {
            return Err(EngineError::Gone("eth0".into()));
        }
        let mut counters = Counters::default();
        counters.refuse(Refusal::BadTag);
        Ok(counters)
    }

    fn records(&self, _: u16, entry: &JobEntry) -> Result<Vec<RankRecord>, EngineError> {
        let record = RankRecord { acked: Seq(3), contributed: Seq(5), ..RankRecord::default() };
        Ok(vec![record; entry.world.into()])
    }

    fn slot(&self, _: u16, _: &JobEntry, _: Seq) -> Result<Slot, EngineError> {
        Ok(Slot::default())
    }

    fn cost(&self) -> Result<Option<Cost>, EngineError> {
        Ok(Some(Cost { run_time: Duration::from_millis(1500), runs: 7 }))
    }
}

/// So many jobs that run.
fn node(jobs: usize, world: u32) -> Membership {
    let list = (0..jobs).map(|number| JobConfig::new(&format!("job-{number}"), world)).collect();
    let jobs = Jobs::new(list).unwrap_or_else(|error| panic!("{error}"));
    let mut membership = Membership::new(&jobs, 20545, 1);
    for job in jobs.list() {
        for rank in 0..world {
            let request = JoinRequest {
                protocol: PROTOCOL,
                rank,
                world,
                wait_seconds: 1.0,
                layout: None,
                attempt: None,
                below: None,
                members: None,
            };
            let entropy = Entropy { generation: 1, nonce: 1 };
            let joined =
                membership.join(Instant::now(), &job.name, &request, [10, 0, 0, rank as u8].into(), entropy);
            assert!(joined.is_ok());
        }
    }
    membership
}

fn exporter(fake: &Fake, membership: Membership) -> (Exporter, Arc<Mutex<Membership>>) {
    let report = Report::new("10.0.0.9:9559".into());
    report.looked(Round::default(), None);
    let telemetry = Telemetry::new(Box::new(fake.clone()), Identity::default()).with_switch(Some(report));
    let membership = Arc::new(Mutex::new(membership));
    let facts = membership.clone();
    let exporter = Exporter::new(&telemetry, Arc::new(move || lock(&facts).facts()));
    (exporter.unwrap_or_else(|error| panic!("{error}")), membership)
}

/// The value of each series, as the text has it.
fn scrape(exporter: &Exporter) -> BTreeMap<String, f64> {
    let text = exporter.scrape().unwrap_or_else(|error| panic!("{error}"));
    let text = String::from_utf8_lossy(&text).into_owned();
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    samples
        .filter_map(|line| line.rsplit_once(' '))
        .map(|(name, value)| (name.into(), value.parse().unwrap_or(f64::NAN)))
        .collect()
}

fn success(scraped: &BTreeMap<String, f64>) -> BTreeMap<&str, f64> {
    let of =
        |name: &'static str| (name, scraped[&format!("paatp_collector_success{{collector=\"{name}\"}}")]);
    ["jobs", "counters", "cost", "node", "program"].map(of).into()
}

#[test]
fn what_is_listed_is_exported_and_nothing_else() {
    let (exporter, _) = exporter(&Fake::default(), node(2, 3));
    let families = exporter.registry.gather();
    let exported: BTreeMap<&str, &MetricFamily> =
        families.iter().map(|family| (family.name(), family)).collect();
    let listed: Vec<Metric> = all().into_iter().flat_map(|(_, metrics)| metrics).collect();
    let names: BTreeSet<&str> = listed.iter().map(|metric| metric.name.as_ref()).collect();
    assert_eq!(names.len(), listed.len(), "a name twice");
    assert_eq!(names, exported.keys().copied().collect());
    for metric in &listed {
        let family = exported[metric.name.as_ref()];
        assert!(is_well_named(metric), "{}", metric.name);
        assert_eq!(family.help(), metric.help, "{}", metric.name);
        assert_eq!(
            format!("{:?}", family.get_field_type()).to_lowercase(),
            metric.kind.name(),
            "{}",
            metric.name
        );
        for sample in family.get_metric() {
            let labels: BTreeSet<_> = sample.get_label().iter().map(|label| label.name()).collect();
            assert_eq!(labels, metric.labels.iter().copied().collect(), "{}", metric.name);
        }
        // Prometheus puts these on everything that it scrapes.
        assert!(!metric.labels.iter().any(|label| ["job", "instance"].contains(label)), "{}", metric.name);
    }
}

#[test]
fn the_page_in_the_documentation_is_this_list() {
    let page = include_str!("../../../../docs/metrics.md");
    assert!(page == markdown(), "run `paatp metrics list --format md > docs/metrics.md`");
    assert!(json().is_ok_and(|text| text.contains("\"paatp_build_info\"")));
}

#[test]
fn numbers_are_in_base_units() {
    let (exporter, _) = exporter(&Fake::default(), node(1, 2));
    let scraped = scrape(&exporter);
    assert_eq!(scraped["paatp_refused_packets_total{reason=\"bad_tag\"}"], 1.0);
    assert_eq!(scraped["paatp_refused_packets_total{reason=\"behind\"}"], 0.0);
    assert_eq!(scraped["paatp_bpf_program_run_time_seconds_total"], 1.5);
    assert_eq!(scraped["paatp_rank_contributed_chunks_total{job_name=\"job-0\",rank=\"1\"}"], 5.0);
    assert_eq!(scraped["paatp_job_completed_bytes_total{job_name=\"job-0\"}"], 3.0 * 352.0 * 4.0);
    assert_eq!(scraped["paatp_jobs{state=\"running\"}"] + scraped["paatp_jobs{state=\"idle\"}"], 1.0);
    assert!(success(&scraped).values().all(|value| *value == 1.0));
}

/// A table that is locked, or fails, costs its own metrics only; no thread is started beside one that hangs; and when it can
/// be read again it is.
#[test]
fn a_part_that_hangs_or_fails_costs_its_own_metrics() {
    let fake = Fake::default();
    let (exporter, membership) = exporter(&fake, node(1, 2));
    let held = lock(&fake.counters);
    for _ in 0..3 {
        let start = Instant::now();
        let scraped = scrape(&exporter);
        // Six parts, each with its deadline.
        assert!(start.elapsed() < source::DEADLINE * 6 + Duration::from_secs(1));
        assert_eq!(
            success(&scraped),
            [("jobs", 1.0), ("counters", 0.0), ("cost", 1.0), ("node", 1.0), ("program", 1.0)].into()
        );
        assert!(!scraped.keys().any(|name| name.starts_with("paatp_refused_packets_total")));
        assert!(scraped.contains_key("paatp_job_ranks{job_name=\"job-0\"}"));
    }
    drop(held);
    let deadline = Instant::now() + Duration::from_secs(10);
    while success(&scrape(&exporter))["counters"] == 0.0 {
        assert!(Instant::now() < deadline, "still not read");
    }
    *lock(&fake.fail) = true;
    assert_eq!(success(&scrape(&exporter))["counters"], 0.0);
    *lock(&fake.fail) = false;
    // The control plane's own lock.
    let held = lock(&membership);
    let scraped = scrape(&exporter);
    assert_eq!(
        success(&scraped),
        [("jobs", 0.0), ("counters", 1.0), ("cost", 1.0), ("node", 0.0), ("program", 1.0)].into()
    );
    drop(held);
}

#[test]
fn ranks_beyond_the_limit_are_counted_and_left_out() {
    let (exporter, _) = exporter(&Fake::default(), node(17, 64));
    let scraped = scrape(&exporter);
    let ranks = scraped.keys().filter(|name| name.starts_with("paatp_rank_lag_chunks")).count();
    assert_eq!(
        (ranks, scraped.keys().filter(|name| name.starts_with("paatp_job_ranks")).count()),
        (1024, 17)
    );
    // One scrape later, for parts are read in any order.
    assert_eq!(scrape(&exporter)["paatp_dropped_series"], 64.0 * RANK_METRICS as f64);
}

/// Everything that Prometheus and Grafana are to ask for is there, and each runbook that an alert names.
#[test]
fn dashboards_and_alerts_name_what_there_is() {
    let dashboard = include_str!("../../../../packaging/grafana/paatp.json");
    let rules = include_str!("../../../../packaging/prometheus/paatp.rules.yml");
    let runbooks = include_str!("../../../../docs/operations.md");
    let listed: BTreeSet<String> =
        all().into_iter().flat_map(|(_, metrics)| metrics).map(|metric| metric.name.into_owned()).collect();
    let named = |text: &str| -> BTreeSet<String> {
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        words
            .filter(|word| word.starts_with("paatp_") || word.starts_with("process_"))
            .map(Into::into)
            .collect()
    };
    let dashboard: serde_json::Value =
        serde_json::from_str(dashboard).unwrap_or_else(|error| panic!("{error}"));
    assert!(dashboard["id"].is_null() && dashboard["uid"] == "paatp");
    let mut asked = String::new();
    expressions(&dashboard, &mut asked);
    let (shown, alerting) = (named(&asked), named(rules));
    assert!(!shown.is_empty() && !alerting.is_empty());
    for name in shown.union(&alerting) {
        assert!(listed.contains(name), "{name} does not exist");
    }
    // On neither, and why.
    let ignored = [
        // Told by others that are there.
        "paatp_closing_jobs",
        "paatp_slot_size_bytes",
        "paatp_rank_contributed_bytes_total",
        // Of levels, which few nodes have.
        "paatp_sums_total",
        "paatp_lifted_total",
        "paatp_passed_on_total",
        "paatp_handed_down_total",
        // Of a switch: told by whether it is up.
        "paatp_switch_contact_age_seconds",
        "paatp_switch_entries",
        // For development.
        "paatp_passed_total",
        "paatp_stores_total",
        "paatp_adds_total",
        "process_max_fds",
        "process_threads",
        "process_virtual_memory_bytes",
    ];
    for name in &listed {
        let is_shown = shown.contains(name) || alerting.contains(name);
        assert_ne!(
            is_shown,
            ignored.contains(&name.as_str()),
            "{name}: on the dashboard, or ignored with a reason"
        );
    }
    let alerts: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(alerts.len() > 10);
    for alert in alerts {
        assert!(
            rules.contains(&format!("docs/operations.md#{}", alert.to_lowercase())),
            "{alert} has no runbook"
        );
        assert!(runbooks.contains(&format!("\n### {alert}\n")), "{alert} has no section");
    }
}

/// Every expression of a dashboard.
fn expressions(value: &serde_json::Value, found: &mut String) {
    match value {
        serde_json::Value::Object(object) => {
            for (key, value) in object {
                match value.as_str() {
                    Some(text) if ["expr", "query", "definition"].contains(&key.as_str()) => {
                        found.push_str(text);
                        found.push('\n');
                    }
                    _ => expressions(value, found),
                }
            }
        }
        serde_json::Value::Array(list) => list.iter().for_each(|value| expressions(value, found)),
        _ => {}
    }
}

/// One scrape at a time; the others wait for their turn, and not for ever.
#[test]
fn scrapes_wait_for_their_turn() {
    use axum::http::StatusCode;
    use axum::http::header::{CONTENT_TYPE as TYPE, RETRY_AFTER};
    let (exporter, _) = exporter(&Fake::default(), node(1, 2));
    let exporter = Arc::new(exporter);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.unwrap_or_else(|error| panic!("{error}"));
    runtime.block_on(async {
        let turn = exporter.turns.clone().try_acquire_owned();
        assert!(turn.is_ok());
        tokio::time::pause();
        let refused = server::answer(&exporter).await;
        assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(refused.headers().contains_key(RETRY_AFTER));
        drop(turn);
        tokio::time::resume();
        let answer = server::answer(&exporter).await;
        assert_eq!(answer.status(), StatusCode::OK);
        assert_eq!(answer.headers().get(TYPE).and_then(|value| value.to_str().ok()), Some(CONTENT_TYPE));
    });
}
