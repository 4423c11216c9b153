//! `paatp job`: manages the jobs of a running aggregator.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;
use ureq::http::Method;

use crate::cli::{Credentials, Job, JobAction, JobCreate, JobSync, SyncMode};
use crate::config::{JobConfig, MemoryKind};
use crate::control::protocol::{
    Created, Drain, JobDetails, JobList, JobState, JobStatus, NodeStatus, Problem, Sync, SyncChange,
};
use crate::control::token::{self, DEFAULT_TOKEN_FILE};
use crate::worker::{Endpoint, EndpointError};

use super::table::columns;
use super::{CredentialError, Server, escape};

/// Version of what `--json` prints. It rises when a field changes its meaning or goes; new fields may come.
pub const SCHEMA_VERSION: u32 = 1;

/// Longest time for a request: the server answers at once.
const DEADLINE: Duration = Duration::from_secs(10);

/// Managing a job failed.
#[derive(Debug, Error)]
pub enum JobError {
    /// The aggregator's address cannot be read.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// Token or certificates.
    #[error(transparent)]
    Credentials(#[from] CredentialError),
    /// Nobody answers.
    #[error("no aggregator answers at {aggregator}: is `paatp run` running there, and is --control right?")]
    NoAggregator {
        /// Where.
        aggregator: String,
        /// Why.
        #[source]
        source: Box<ureq::Error>,
    },
    /// It said no.
    #[error("the aggregator at {aggregator} refused: {}", .problem.detail)]
    Refused {
        /// Where.
        aggregator: String,
        /// What it said.
        problem: Box<Problem>,
    },
    /// Something else answered.
    #[error(
        "what answers at {aggregator} is no aggregator of this version (HTTP status {status}): {detail}; check --control"
    )]
    Strange {
        /// Where.
        aggregator: String,
        /// HTTP status.
        status: u16,
        /// What was wrong.
        detail: String,
    },
    /// The key cannot be kept.
    #[error("no key can be written to {path}, so no job was created; name a new file with --key-file")]
    KeyFile {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The key of a job that was created could not be written.
    #[error(
        "job `{job}` was created, but its key cannot be written to {path}; delete the job and create it again with another --key-file"
    )]
    Key {
        /// The job.
        job: String,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// The file of a key that is not known yet; it goes if none comes.
struct KeyFile<'a> {
    path: &'a Path,
    file: Option<File>,
}

impl KeyFile<'_> {
    fn make(path: &Path) -> Result<KeyFile<'_>, JobError> {
        match token::new_file(path) {
            Ok(file) => Ok(KeyFile { path, file: Some(file) }),
            Err(source) => Err(JobError::KeyFile { path: path.to_owned(), source }),
        }
    }

    fn keep(mut self, key: &str) -> io::Result<()> {
        self.file.take().map_or(Ok(()), |mut file| writeln!(file, "{key}"))
    }
}

impl Drop for KeyFile<'_> {
    fn drop(&mut self) {
        if self.file.is_some() {
            let _ = fs::remove_file(self.path);
        }
    }
}

/// `--json`: an answer with the version of its shape.
#[derive(Serialize)]
struct Versioned<T> {
    schema_version: u32,
    #[serde(flatten)]
    answer: T,
}

/// Runs the command; returns what it prints.
///
/// # Errors
/// What failed, why and what to do.
pub fn run(args: &Job) -> Result<String, JobError> {
    let api = Api::open(&args.control, &credentials(&args.credentials), args.json)?;
    match &args.action {
        JobAction::Create(create) => api.create(create),
        JobAction::List => {
            let list: JobList = api.get("/v1/jobs")?;
            api.print(&list, || list_in_words(&list))
        }
        JobAction::Show { name } => {
            let details: JobDetails = api.get(&path_of(name))?;
            api.print(&details, || details_in_words(&details))
        }
        JobAction::Sync(sync) => {
            let path = format!("{}/sync", path_of(&sync.name));
            let status: JobStatus = api.put(&path, &wanted(sync))?;
            api.print(&status, || format!("job {}: {}\n", status.name, job_sync_in_words(&status)))
        }
        JobAction::Delete { name } => {
            api.ask(Method::DELETE, &path_of(name), None::<&()>)?;
            api.print(&serde_json::json!({ "deleted": name }), || format!("deleted job {name}\n"))
        }
        JobAction::Node => {
            let node: NodeStatus = api.get("/v1/node")?;
            api.print(&node, || node_in_words(&node))
        }
        JobAction::Drain { resume } => {
            let node: NodeStatus = api.put("/v1/node/drain", &Drain { draining: !resume })?;
            api.print(&node, || node_in_words(&node))
        }
    }
}

/// On the aggregator's own machine its token is found without being named, if this user may read it.
fn credentials(given: &Credentials) -> Credentials {
    let default = || Some(PathBuf::from(DEFAULT_TOKEN_FILE)).filter(|path| token::read(path).is_ok());
    Credentials { token_file: given.token_file.clone().or_else(default), tls_ca: given.tls_ca.clone() }
}

fn path_of(name: &str) -> String {
    format!("/v1/jobs/{}", escape(name))
}

const fn wanted(sync: &JobSync) -> Sync {
    match (sync.mode, sync.quorum, sync.staleness) {
        (SyncMode::Bsp, _, _) => Sync::Bsp,
        (SyncMode::Asp, quorum, _) => Sync::Asp { quorum },
        // clap demands the numbers.
        (SyncMode::Quorum, Some(quorum), _) => Sync::Quorum { quorum },
        (SyncMode::Quorum, None, _) => Sync::Quorum { quorum: 0 },
        (SyncMode::Ssp, quorum, Some(staleness)) => Sync::Ssp { staleness, quorum },
        (SyncMode::Ssp, quorum, None) => Sync::Ssp { staleness: 0, quorum },
    }
}

/// The API of one aggregator.
pub(crate) struct Api {
    server: Server,
    json: bool,
}

impl Api {
    /// Resolves the address and reads the files.
    pub(crate) fn open(control: &str, credentials: &Credentials, json: bool) -> Result<Api, JobError> {
        let endpoint = Endpoint::resolve(control)?;
        Ok(Api { server: Server::new(endpoint, credentials)?, json })
    }

    /// Where it is.
    pub(crate) fn place(&self) -> String {
        self.server.endpoint().to_string()
    }

    fn create(&self, create: &JobCreate) -> Result<String, JobError> {
        let config = JobConfig {
            lanes: create.lanes,
            slots: create.slots,
            window: create.window,
            quorum: create.quorum,
            access: Some(create.access.access()),
            timeout_seconds: create.timeout.map(|timeout| timeout.as_secs_f64()),
            on_failure: create.on_failure.policy(),
            memory: if create.shared { MemoryKind::Shared } else { MemoryKind::Reserved },
            parent: create.parent.clone(),
            ranks: create.ranks,
            child: create.child,
            ..JobConfig::new(&create.name, create.world)
        };
        // Before there is a job whose key nobody would have.
        let key_file = create.key_file.as_deref().map(KeyFile::make).transpose()?;
        let body = self.ask(Method::POST, "/v1/jobs", Some(&config))?;
        let mut created: Created = self.read(201, &body)?;
        // It is for the file alone.
        let key = created.key.take();
        let mut words = format!("created job {} (number {})\n", created.status.name, created.status.job);
        if let (Some(file), Some(key)) = (key_file, &key) {
            let path = file.path;
            file.keep(key).map_err(|source| JobError::Key {
                job: create.name.clone(),
                path: path.to_owned(),
                source,
            })?;
            words.push_str(&format!("its key is in {}: workers join with --token-file\n", path.display()));
        } else if key.is_some() {
            words.push_str("workers join with the aggregator's token (--token-file)\n");
        }
        self.print(&created, || words)
    }

    pub(crate) fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, JobError> {
        let body = self.ask(Method::GET, path, None::<&()>)?;
        self.read(200, &body)
    }

    fn put<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, JobError> {
        let body = self.ask(Method::PUT, path, Some(body))?;
        self.read(200, &body)
    }

    fn strange(&self, status: u16, detail: String) -> JobError {
        JobError::Strange { aggregator: self.server.endpoint().to_string(), status, detail }
    }

    /// The body of an answer that is a success.
    fn ask(&self, method: Method, path: &str, body: Option<&impl Serialize>) -> Result<Vec<u8>, JobError> {
        let aggregator = || self.server.endpoint().to_string();
        let (status, answer) = self.server.ask(method, path, body, DEADLINE).map_err(|source| {
            JobError::NoAggregator { aggregator: aggregator(), source: Box::new(source) }
        })?;
        if (200..300).contains(&status) {
            return Ok(answer);
        }
        let problem: Problem =
            serde_json::from_slice(&answer).map_err(|error| self.strange(status, error.to_string()))?;
        Err(JobError::Refused { aggregator: aggregator(), problem: Box::new(problem) })
    }

    fn read<T: DeserializeOwned>(&self, status: u16, body: &[u8]) -> Result<T, JobError> {
        serde_json::from_slice(body).map_err(|error| self.strange(status, error.to_string()))
    }

    fn print(&self, answer: &impl Serialize, words: impl FnOnce() -> String) -> Result<String, JobError> {
        if !self.json {
            return Ok(words());
        }
        let versioned = Versioned { schema_version: SCHEMA_VERSION, answer };
        let text = serde_json::to_string_pretty(&versioned);
        text.map(|text| text + "\n").map_err(|error| self.strange(200, error.to_string()))
    }
}

pub(crate) const fn state_in_words(state: JobState) -> &'static str {
    match state {
        JobState::Idle => "idle",
        JobState::Forming => "forming",
        JobState::Running => "running",
        JobState::Failed => "failed",
    }
}

fn sync_in_words(sync: Sync) -> String {
    match sync {
        Sync::Bsp => "all ranks (bsp)".into(),
        Sync::Quorum { quorum } => format!("a quorum of {quorum}"),
        Sync::Ssp { staleness, quorum } => format!("{}, staleness {staleness} (ssp)", chunks_need(quorum)),
        Sync::Asp { quorum } => format!("{}, without a bound (asp)", chunks_need(quorum)),
    }
}

fn chunks_need(quorum: Option<u32>) -> String {
    quorum.map_or_else(|| "all ranks".into(), |quorum| format!("a quorum of {quorum}"))
}

/// The synchronisation, and the change to it if one is under way.
pub(crate) fn job_sync_in_words(job: &JobStatus) -> String {
    let now = sync_in_words(job.sync);
    match job.sync_change {
        None => now,
        Some(SyncChange { before, from: Some(from) }) => {
            format!("{now} from chunk {from} on, {} before", sync_in_words(before))
        }
        Some(SyncChange { before, from: None }) => {
            format!("{now} from one of the next chunks on, {} before", sync_in_words(before))
        }
    }
}

/// Numbers of ranks, or a dash.
fn ranks_in_words(ranks: &[u8]) -> String {
    if ranks.is_empty() {
        return "-".into();
    }
    ranks.iter().map(u8::to_string).collect::<Vec<_>>().join(",")
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

fn list_in_words(list: &JobList) -> String {
    if list.jobs.is_empty() {
        return "no job; create one with `paatp job create NAME --world N`\n".into();
    }
    let row = |job: &JobStatus| {
        [
            job.name.clone(),
            job.job.to_string(),
            state_in_words(job.state).into(),
            job.world.to_string(),
            ranks_in_words(&job.waiting_ranks),
            ranks_in_words(&job.lost_ranks),
            mebibytes(job.slot_bytes),
        ]
    };
    let rows: Vec<_> = list.jobs.iter().map(row).collect();
    columns(["NAME", "NUMBER", "STATE", "WORLD", "WAITING", "LOST", "MEMORY"], &rows)
}

fn details_in_words(details: &JobDetails) -> String {
    let job = &details.status;
    let generation = job.generation.map_or("-".into(), |generation| generation.to_string());
    let timeout = job.timeout_seconds.map_or("none".into(), |seconds| format!("{seconds} s"));
    let used = details.slots_in_use.map_or("not counted".into(), |used| used.to_string());
    let facts = [
        ["job".into(), format!("{} (number {})", job.name, job.job)],
        ["state".into(), state_in_words(job.state).into()],
        ["generation".into(), generation],
        ["waits for".into(), job_sync_in_words(job)],
        ["timeout".into(), timeout],
        ["waiting ranks".into(), ranks_in_words(&job.waiting_ranks)],
        ["missing ranks".into(), ranks_in_words(&job.missing_ranks)],
        ["left ranks".into(), ranks_in_words(&job.left_ranks)],
        ["lost ranks".into(), ranks_in_words(&job.lost_ranks)],
        ["lanes".into(), job.lanes.to_string()],
        ["window".into(), job.window.to_string()],
        ["slots".into(), format!("{} ({}), in use: {used}", job.slots, mebibytes(job.slot_bytes))],
        ["parent".into(), job.parent.clone().unwrap_or_else(|| "-".into())],
        ["rank there".into(), job.child.map_or("-".into(), |child| format!("{child}, for all ranks here"))],
        ["ranks here".into(), job.ranks_here.map_or("all".into(), |ranks| ranks.to_string())],
        ["ranks in all".into(), in_all_words(&job.members)],
        ["pool places".into(), job.places.map_or("-".into(), |places| places.to_string())],
    ];
    let mut text = columns(["", ""], &facts).trim_start().to_owned();
    if !details.ranks.is_empty() {
        let row = |rank: &crate::control::protocol::RankStatus| {
            let (contributed, acknowledged) = (rank.contributed.to_string(), rank.acknowledged.to_string());
            [rank.rank.to_string(), rank.address.clone(), contributed, acknowledged]
        };
        let rows: Vec<_> = details.ranks.iter().map(row).collect();
        text.push('\n');
        text.push_str(&columns(["RANK", "ADDRESS", "CONTRIBUTED", "ACKNOWLEDGED"], &rows));
    }
    text
}

/// How many ranks stand behind those of a job some of which are nodes.
fn in_all_words(members: &[u16]) -> String {
    if members.is_empty() {
        return "-".into();
    }
    let each: Vec<String> = members.iter().map(u16::to_string).collect();
    let all: u32 = members.iter().copied().map(u32::from).sum();
    format!("{all} (behind each rank of the root, from 0 on: {})", each.join(", "))
}

fn node_in_words(node: &NodeStatus) -> String {
    let bytes = |slots: u32| mebibytes(u64::from(slots) * u64::from(node.slot_bytes));
    let facts = [
        ["version".into(), node.version.clone()],
        ["draining".into(), if node.draining { "yes" } else { "no" }.into()],
        ["jobs".into(), format!("{} of {}, running: {}", node.jobs, node.max_jobs, node.running_jobs)],
        ["slots".into(), format!("{} ({})", node.slots, bytes(node.slots))],
        ["free slots".into(), format!("{} ({})", node.free_slots, bytes(node.free_slots))],
        ["in a row".into(), node.longest_free_slots.to_string()],
        ["pool".into(), format!("{} slots, in use: {}", node.pool_slots, node.pool_slots_in_use)],
        ["lanes at most".into(), node.max_lanes.to_string()],
    ];
    columns(["", ""], &facts).trim_start().to_owned()
}

#[cfg(test)]
#[path = "job_tests.rs"]
mod tests;
