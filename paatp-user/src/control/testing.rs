//! A control server for tests: tables in memory, real sockets, and every answer compared with the OpenAPI document.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use paatp_common::job::JobEntry;
use paatp_common::policy::Policy;
use paatp_common::progress::RankRecord;
use paatp_transport::rate::share::Share;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::config::{JobConfig, Jobs, NodeConfig};
use crate::engine::{EngineError, ProgressSnapshot, RankProgress};

use super::api::{self, PROBLEM_TYPE};
use super::http::Scope;
use super::membership::{Formation, Membership};
use super::protocol::Problem;
use super::server::{Control, Tables};
use super::token::Secret;

/// The node's token.
pub(crate) const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// Slots of the node.
pub(crate) const SLOTS: u64 = 4096;

/// Tables that remember what was written.
#[derive(Default)]
pub(crate) struct Memory {
    pub(crate) installed: Vec<Formation>,
    pub(crate) written: Vec<(u16, JobEntry)>,
    pub(crate) gains: Vec<(u16, Vec<i8>)>,
    pub(crate) records: Option<Vec<RankRecord>>,
    pub(crate) progress: Option<Vec<RankProgress>>,
    pub(crate) policies: BTreeMap<u16, Policy>,
    /// min_ack and crowded contributions of jobs in the pool.
    pub(crate) shares: BTreeMap<u16, (u32, u32)>,
    pub(crate) fail: bool,
    pub(crate) fail_writes: bool,
}

impl Memory {
    fn check(&self) -> Result<(), EngineError> {
        if self.fail { Err(EngineError::Gone("eth0".into())) } else { Ok(()) }
    }
}

impl Tables for Memory {
    fn install(&mut self, formation: &Formation) -> Result<(), EngineError> {
        self.check()?;
        self.installed.push(formation.clone());
        self.policies.insert(formation.number, formation.entry.policy);
        Ok(())
    }

    fn policy(&self, number: u16) -> Policy {
        self.policies.get(&number).copied().unwrap_or_default()
    }

    fn replace_policy(&mut self, number: u16, from: Policy, to: Policy) -> bool {
        let is_same = Tables::policy(self, number) == from;
        if is_same {
            self.policies.insert(number, to);
        }
        is_same
    }

    fn write(&mut self, number: u16, entry: JobEntry) -> Result<(), EngineError> {
        if self.fail_writes {
            return Err(EngineError::Gone("eth0".into()));
        }
        self.check()?;
        self.written.push((number, entry));
        Ok(())
    }

    fn set_gains(&mut self, number: u16, gains: &[i8]) -> Result<(), EngineError> {
        self.check()?;
        self.gains.push((number, gains.to_vec()));
        Ok(())
    }

    fn records(&self, _: u16, entry: &JobEntry) -> Result<Vec<RankRecord>, EngineError> {
        self.check()?;
        Ok(self.records.clone().unwrap_or_else(|| vec![RankRecord::default(); entry.world.into()]))
    }

    fn progress(&self, _: u16, entry: &JobEntry) -> Result<ProgressSnapshot, EngineError> {
        self.check()?;
        let same = || vec![RankProgress { acknowledged: 3, contributed: 5 }; entry.world.into()];
        Ok(ProgressSnapshot { ranks: self.progress.clone().unwrap_or_else(same), min_ack: 3 })
    }

    fn slots_in_use(&self, _: &JobEntry, _: u32) -> Result<Option<u32>, EngineError> {
        Ok(Some(2))
    }

    fn share(&self, number: u16, entry: &JobEntry) -> Result<Share, EngineError> {
        self.check()?;
        let (min_ack, crowded) = self.shares.get(&number).copied().unwrap_or_default();
        Ok(Share { job: number, generation: entry.generation, min_ack, crowded })
    }

    fn pool_in_use(&self) -> Result<u32, EngineError> {
        self.check()?;
        Ok(7)
    }
}

/// A server; job `pair` has two ranks and is open.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) workers: SocketAddr,
    pub(crate) tables: Arc<Mutex<Memory>>,
    pub(crate) control: Control,
    contract: Contract,
}

/// State without sockets.
pub(crate) fn control() -> (Control, Arc<Mutex<Memory>>) {
    let node = NodeConfig { memory: Some(SLOTS * 1472), ..NodeConfig::default() };
    control_of(vec![JobConfig::new("pair", 2)], &node)
}

/// The same with other jobs, on another node.
pub(crate) fn control_of(list: Vec<JobConfig>, node: &NodeConfig) -> (Control, Arc<Mutex<Memory>>) {
    let jobs = Jobs::of_node(list, node).unwrap_or_else(|error| panic!("{error}"));
    let tables = Arc::new(Mutex::new(Memory::default()));
    let control = Control::new(Membership::new(&jobs, 20545, 1), tables.clone());
    (control.with_token(Some(Secret::of(TOKEN))), tables)
}

pub(crate) fn server() -> Server {
    server_with(None)
}

/// Starts a server on a thread of its own.
pub(crate) fn server_with(tls: Option<TlsAcceptor>) -> Server {
    let (control, tables) = control();
    let bind = || {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap_or_else(|error| panic!("{error}"));
        let address = listener.local_addr().unwrap_or_else(|error| panic!("{error}"));
        (listener, address)
    };
    let ((management, address), (worker, workers)) = (bind(), bind());
    let serving = control.clone();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let Ok(runtime) = runtime else { return };
        runtime.block_on(async {
            let mut listeners = Vec::new();
            for (listener, scope) in [(management, Scope::Management), (worker, Scope::Workers)] {
                let _ = listener.set_nonblocking(true);
                listeners.extend(TcpListener::from_std(listener).map(|listener| (listener, scope)));
            }
            serving.serve(listeners, tls).await;
        });
    });
    Server { address, workers, tables, control, contract: Contract::new() }
}

/// A request that was sent.
pub(crate) struct Sent {
    method: String,
    path: String,
    pub(crate) stream: TcpStream,
}

/// Sends a request with the node's token.
pub(crate) fn send(address: SocketAddr, method: &str, path: &str, body: &str) -> Sent {
    send_as(Some(TOKEN), address, method, path, body)
}

pub(crate) fn send_as(
    token: Option<&str>,
    address: SocketAddr,
    method: &str,
    path: &str,
    body: &str,
) -> Sent {
    let mut stream = TcpStream::connect(address).unwrap_or_else(|error| panic!("{error}"));
    let _ = stream.set_read_timeout(Some(Duration::from_secs(20)));
    let length = body.len();
    let authorization = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
    let text = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\n{authorization}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    // A server that refuses by the header may have closed by now.
    let _ = stream.write_all(text.as_bytes());
    Sent { method: method.into(), path: path.into(), stream }
}

impl Server {
    /// Status and body, which the document allows.
    pub(crate) fn receive(&self, mut sent: Sent) -> (u16, String) {
        let mut text = String::new();
        let _ = sent.stream.read_to_string(&mut text);
        let status = text.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let media = head
            .lines()
            .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-type: ").map(str::to_owned));
        self.contract.check(&sent.method, &sent.path, status, media.as_deref(), body);
        (status, body.to_owned())
    }

    pub(crate) fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        self.receive(send(self.address, method, path, body))
    }

    /// Code and status of a refusal.
    pub(crate) fn refusal(&self, sent: Sent) -> (u16, String) {
        let (status, body) = self.receive(sent);
        (status, problem(&body).code)
    }

    pub(crate) fn tables<T>(&self, look: impl FnOnce(&mut Memory) -> T) -> T {
        look(&mut self.tables.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

pub(crate) fn problem(body: &str) -> Problem {
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {body}"))
}

/// The OpenAPI document as a judge of answers.
pub(crate) struct Contract {
    pub(crate) document: Value,
}

impl Contract {
    pub(crate) fn new() -> Contract {
        let document = serde_json::to_value(api::parts().1).unwrap_or_else(|error| panic!("{error}"));
        Contract { document }
    }

    /// The path of the document that a path is an instance of.
    fn template(&self, path: &str) -> Option<String> {
        let path = path.split('?').next().unwrap_or_default();
        let paths = self.document.get("paths")?.as_object()?;
        let matches = |template: &str| {
            let parts = |text: &str| text.split('/').map(str::to_owned).collect::<Vec<_>>();
            let (template, path) = (parts(template), parts(path));
            template.len() == path.len()
                && template.iter().zip(&path).all(|(t, p)| t.starts_with('{') && !p.is_empty() || t == p)
        };
        // A fixed path goes before one with a name.
        let found = paths.keys().filter(|template| matches(template)).min_by_key(|t| t.matches('{').count());
        found.cloned()
    }

    /// Panics if the document does not allow an answer.
    pub(crate) fn check(&self, method: &str, path: &str, status: u16, media: Option<&str>, body: &str) {
        let Some(template) = self.template(path) else {
            assert!(status == 404 && media == Some(PROBLEM_TYPE), "{path}: {status} {media:?}");
            return;
        };
        let operation = &self.document["paths"][&template][method.to_ascii_lowercase()];
        if operation.is_null() {
            assert!(status == 405 && media == Some(PROBLEM_TYPE), "{method} {path}: {status}");
            return;
        }
        let responses = &operation["responses"];
        let range = format!("{}XX", status / 100);
        let response =
            [status.to_string(), range].into_iter().map(|key| &responses[key]).find(|r| !r.is_null());
        let response = response.unwrap_or_else(|| panic!("{method} {path}: {status} is not in the document"));
        let Some(content) = response.get("content") else {
            assert_eq!(body, "", "{method} {path}: {status}");
            return;
        };
        let media = media.unwrap_or_default().split(';').next().unwrap_or_default().to_owned();
        let schema = &content[&media]["schema"];
        assert!(!schema.is_null(), "{method} {path}: {status} as {media} is not in the document");
        if media == "text/plain" {
            return;
        }
        let value: Value = serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {body}"));
        let mut schema = schema.clone();
        schema["components"] = self.document["components"].clone();
        let validator = jsonschema::draft202012::new(&schema).unwrap_or_else(|error| panic!("{error}"));
        if let Err(error) = validator.validate(&value) {
            panic!("{method} {path}: {status}: {error}: {body}");
        }
    }
}
