//! The scenario files: every one can be read and run, and errors say what to do.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};

use paatp_sim::report::{self, Outcome, Report};
use paatp_sim::{Scenario, output};
use paatp_transport::rate::Algorithm;

fn files() -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios");
    let mut files: Vec<PathBuf> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Shortened: whole runs are for `paatp sim`.
fn short(path: &Path) -> Scenario {
    let mut scenario = Scenario::read(path).unwrap_or_else(|error| panic!("{error}"));
    for job in &mut scenario.jobs {
        (job.iterations, job.chunks) = (2, 300);
    }
    scenario
}

#[test]
fn every_scenario_runs() {
    let files = files();
    assert!(files.len() >= 25, "{files:?}");
    for path in files {
        let scenario = short(&path);
        let record =
            report::run(&scenario, Algorithm::PaAtp, 1).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let outcome = Outcome::of(&scenario, &record);
        let (iteration, all) = (outcome.mean_iteration_seconds, outcome.job_completion_seconds);
        assert!(iteration > 0.0 && iteration <= all && all < 10.0, "{}: {outcome:?}", path.display());
        let fewest = 1.0 / scenario.jobs.len() as f64;
        assert!((fewest..=1.0 + 1e-9).contains(&outcome.jain_index), "{outcome:?}");
    }
}

/// What a job needs at least is known: computing, and its bytes over the narrowest link. No run is faster.
#[test]
fn nobody_is_faster_than_the_links() {
    let path = files().into_iter().find(|path| path.ends_with("server-8-plain.toml")).unwrap();
    let mut scenario = short(&path);
    scenario.jobs[0].jitter = 0.0;
    for algorithm in Algorithm::ALL {
        let record = report::run(&scenario, algorithm, 1).unwrap();
        let bound = 500e-6 + 8.0 * 300.0 * 1538.0 * 8.0 / 100e9;
        let mean = Outcome::of(&scenario, &record).mean_iteration_seconds;
        assert!(mean > bound && mean < 4.0 * bound, "{algorithm}: {mean} against {bound}");
    }
}

#[test]
fn files_and_table_are_complete() {
    let path = files().into_iter().find(|path| path.ends_with("share-2-8.toml")).unwrap();
    let scenario = short(&path);
    let (mut report, mut runs) = (Report::new("share-2-8".into(), 1), Vec::new());
    for algorithm in [Algorithm::PaAtp, Algorithm::Atp] {
        let record = report::run(&scenario, algorithm, 1).unwrap();
        report.controllers.insert(algorithm.name(), Outcome::of(&scenario, &record));
        runs.push((algorithm, record));
    }
    let json = serde_json::to_value(&report).unwrap();
    for key in ["mean_iteration_seconds", "job_completion_seconds", "jain_index"] {
        assert!(json["controllers"]["pa-atp"][key].is_f64(), "{key}");
    }
    assert_eq!((&json["schema_version"], &json["seed"]), (&1.into(), &1.into()));
    assert!(report.table().lines().count() == 8, "{}", report.table());

    let directory = tempfile::tempdir().unwrap();
    let names = output::write(directory.path(), &scenario, &runs).unwrap();
    assert_eq!(names.len(), 10);
    let csv = fs::read_to_string(directory.path().join("progress-atp.csv")).unwrap();
    let last: Vec<&str> = csv.lines().last().unwrap().split(',').collect();
    assert_eq!(last[1..3], ["large", "7"]);
    // Two iterations of 300 chunks, each with its round, but for the last moment.
    assert!((500..=602).contains(&last[3].parse::<u32>().unwrap()), "{last:?}");
}

#[test]
fn impossible_scenarios_are_refused_with_a_reason() {
    let text = fs::read_to_string(files().first().unwrap()).unwrap();
    let cases = [
        ("world = 16", "world = 65", "1 to 64 ranks"),
        ("slots = 2048", "slots = 512", "at least the window"),
        ("chunks = 2000", "chunks = 0", "chunks"),
        ("packet = \"1500 B\"", "packet = \"1500\"", "a number and a unit"),
        ("seed = 1", "sead = 1", "unknown field"),
    ];
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("bad.toml");
    for (from, to, reason) in cases {
        assert!(text.contains(from), "{from} is not in the first scenario any more");
        fs::write(&file, text.replace(from, to)).unwrap();
        let error = Scenario::read(&file).map(|_| ()).unwrap_err();
        let mut told = error.to_string();
        let mut cause = std::error::Error::source(&error);
        while let Some(error) = cause {
            told += &error.to_string();
            cause = error.source();
        }
        assert!(told.contains(reason), "{to}: {told}");
    }
    let switched = files().into_iter().find(|path| path.ends_with("switch-mixed.toml")).unwrap();
    let text = fs::read_to_string(switched).unwrap();
    let aggregator = text.lines().find(|line| line.starts_with("aggregator = ")).unwrap();
    let cases = [
        ("slots = 64", "slots = 48", "power of two"),
        ("slots = 64", "slots = 4", "power of two"),
        ("slots = 64", "slots = 64\nk = 9", "1 to 8 places"),
        ("slots = 64", "slots = 64\nplaces = 2", "unknown field"),
        ("patience = \"2 ms\"", "patience = \"0 ms\"", "patience"),
        (aggregator, "", "network.aggregator"),
    ];
    for (from, to, reason) in cases {
        assert!(text.contains(from), "{from} is not in the scenario any more");
        fs::write(&file, text.replacen(from, to, 1)).unwrap();
        let error = Scenario::read(&file).map(|_| ()).unwrap_err();
        let told = format!("{error}{:?}", std::error::Error::source(&error).map(ToString::to_string));
        assert!(told.contains(reason), "{to}: {told}");
    }
    let missing = Scenario::read(Path::new("nowhere.toml")).map(|_| ()).unwrap_err();
    assert!(missing.to_string().contains("scenarios/"), "{missing}");
}
