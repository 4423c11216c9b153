//! The commands against a control server over loopback, plain and encrypted.

use super::*;
use crate::cli::{Cli, Command};
use crate::control::http;
use crate::control::testing::{Server as ControlServer, TOKEN, server, server_with};
use clap::Parser;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

struct Bench {
    server: ControlServer,
    folder: tempfile::TempDir,
}

impl Bench {
    fn new(server: ControlServer) -> Bench {
        let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
        assert!(fs::write(folder.path().join("token"), TOKEN).is_ok());
        Bench { server, folder }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// Runs `paatp job …`.
    fn run(&self, line: &str) -> Result<String, JobError> {
        let all =
            format!("paatp job {line} --control {} --token-file {}", self.server.address, self.path("token"));
        match Cli::try_parse_from(all.split_whitespace()) {
            Ok(Cli { command: Command::Job(job), .. }) => run(&job),
            other => panic!("{other:?}"),
        }
    }

    fn json(&self, line: &str) -> serde_json::Value {
        let text = self.run(&format!("{line} --json")).unwrap_or_else(|error| panic!("{error}"));
        let value: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        assert_eq!(value["schema_version"], SCHEMA_VERSION, "{line}: {text}");
        value
    }
}

#[test]
fn jobs_are_created_shown_changed_and_deleted() {
    let bench = Bench::new(server());
    let key = bench.path("key");
    let words = bench.run(&format!("create train --world 4 --timeout 5s --key-file {key}"));
    let words = words.unwrap_or_else(|error| panic!("{error}"));
    assert!(words.contains("created job train (number 1)") && words.contains(&key), "{words}");
    let secret = fs::read_to_string(&key).unwrap_or_default();
    assert_eq!(secret.trim().len(), 64);
    assert_eq!(fs::metadata(&key).map(|file| file.mode() & 0o777).ok(), Some(0o600));
    let list = bench.run("list").unwrap_or_default();
    assert!(list.starts_with("NAME   NUMBER  STATE") && list.contains("train  1       idle   4"), "{list}");
    let shown = bench.run("show train").unwrap_or_default();
    assert!(shown.contains("timeout        5 s") && shown.contains("all ranks (bsp)"), "{shown}");
    let changed = bench.run("sync train quorum --quorum 3").unwrap_or_default();
    assert_eq!(changed, "job train: a quorum of 3\n");
    let changed = bench.run("sync train ssp --staleness 2 --quorum 3").unwrap_or_default();
    assert_eq!(changed, "job train: a quorum of 3, staleness 2 (ssp)\n");
    let changed = bench.run("sync train asp").unwrap_or_default();
    assert_eq!(changed, "job train: all ranks, without a bound (asp)\n");
    let node = bench.run("node").unwrap_or_default();
    assert!(node.contains("2 of 64, running: 0") && node.contains("352"), "{node}");
    assert_eq!(bench.run("delete train").unwrap_or_default(), "deleted job train\n");
    assert!(bench.run("drain").unwrap_or_default().contains("draining       yes"));
    assert!(bench.run("drain --resume").unwrap_or_default().contains("draining       no"));
}

#[test]
fn json_has_a_version_and_no_key() {
    let bench = Bench::new(server());
    let created = bench.json("create train --world 2 --access token");
    assert_eq!((created["name"].as_str(), created["key"].is_null()), (Some("train"), true));
    assert_eq!(bench.json("list")["jobs"][1]["name"], "train");
    assert_eq!(bench.json("show train")["world"], 2);
    assert_eq!(bench.json("sync train bsp")["sync"]["mode"], "bsp");
    assert_eq!(bench.json("node")["jobs"], 2);
    assert_eq!(bench.json("drain")["draining"], true);
    assert_eq!(bench.json("delete train")["deleted"], "train");
}

#[test]
fn refusals_are_told() {
    let bench = Bench::new(server());
    let refused = |line: &str| bench.run(line).map_err(|error| error.to_string()).err().unwrap_or_default();
    assert!(refused("show nothing").contains("no job `nothing` here"));
    assert!(refused("create pair --world 2").contains("job `pair` exists"));
    assert!(refused("sync pair asp --quorum 3").contains("1 to 2 ranks"));
    assert!(refused("create big --world 2 --slots 8192").contains("at most 3840 are"));
    assert!(fs::write(bench.folder.path().join("token"), "another token, wrong".replace(' ', "-")).is_ok());
    assert!(refused("delete pair").contains("that token opens nothing here"));
    // Where its key cannot be kept no job is made; and where none is made, no file stays.
    assert!(fs::write(bench.folder.path().join("token"), TOKEN).is_ok());
    let message = refused("create keyed --world 2 --key-file /nonexistent/key");
    assert!(message.contains("no job was created") && message.contains("/nonexistent/key"), "{message}");
    assert!(!bench.run("list").unwrap_or_default().contains("keyed"));
    let key = bench.path("spare");
    assert!(refused(&format!("create pair --world 2 --key-file {key}")).contains("job `pair` exists"));
    assert!(!Path::new(&key).exists());
}

#[test]
fn nobody_there_is_told() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let Ok(address) = listener else { panic!("no port") };
    let line = format!("paatp job list --control {address} --token-file=");
    let Ok(Cli { command: Command::Job(job), .. }) = Cli::try_parse_from(line.split_whitespace()) else {
        panic!("refused");
    };
    assert!(matches!(run(&job), Err(JobError::NoAggregator { .. })));
}

/// A certificate for 127.0.0.1, and its key.
fn certificate(folder: &Path) -> (PathBuf, PathBuf) {
    let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".into()]);
    let made = made.unwrap_or_else(|error| panic!("{error}"));
    let (certificate, key) = (folder.join("cert.pem"), folder.join("key.pem"));
    assert!(fs::write(&certificate, made.cert.pem()).is_ok());
    assert!(fs::write(&key, made.signing_key.serialize_pem()).is_ok());
    (certificate, key)
}

#[test]
fn tls_is_spoken_where_both_sides_say_so() {
    let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
    let (cert, key) = certificate(folder.path());
    let tls = http::tls(&cert, &key).unwrap_or_else(|error| panic!("{error}"));
    let bench = Bench::new(server_with(Some(tls)));
    let list = bench.run(&format!("list --tls-ca {}", cert.display()));
    assert!(list.unwrap_or_else(|error| panic!("{error:?}")).contains("pair"));
    // Another certificate is not trusted, and without TLS nothing is said.
    let other = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
    let (stranger, _) = certificate(other.path());
    let refused = bench.run(&format!("list --tls-ca {}", stranger.display()));
    assert!(matches!(refused, Err(JobError::NoAggregator { .. })), "{refused:?}");
    assert!(matches!(bench.run("list"), Err(JobError::NoAggregator { .. })));
}

#[test]
fn certificates_that_cannot_be_used_are_explained() {
    let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
    let (cert, key) = certificate(folder.path());
    let other = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
    let (_, foreign) = certificate(other.path());
    let missing = folder.path().join("nothing");
    assert!(matches!(http::tls(&missing, &key), Err(http::TlsError::Read { .. })));
    assert!(matches!(http::tls(&cert, &missing), Err(http::TlsError::Read { .. })));
    assert!(matches!(http::tls(&key, &key), Err(http::TlsError::Empty(_))));
    assert!(matches!(http::tls(&cert, &foreign), Err(http::TlsError::Mismatch { .. })));
}

#[test]
fn ranks_behind_nodes_are_counted() {
    assert_eq!(in_all_words(&[]), "-");
    assert_eq!(in_all_words(&[48, 1, 40]), "89 (behind each rank of the root, from 0 on: 48, 1, 40)");
}
