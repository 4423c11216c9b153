//! Keeps a switch's tables as they are to be: one task, which reads them every second and puts right what differs, and
//! begins anew when the switch has gone. It waits for nothing without a deadline, and nobody waits for it.

use std::path::Path;
use std::time::{Duration, SystemTime};

use paatp_common::switch::Count;
use prost::Message;
use sha2::{Digest, Sha256};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tracing::{info, warn};

use crate::control::membership::JobFacts;

use super::client::Client;
use super::entries::{Entry, Group, SwitchedJob};
use super::error::SwitchError;
use super::messages::p4::config::v1::P4Info;
use super::options::{PipelineFiles, Setup};
use super::placement::{Neighbourhood, Placement};
use super::plan::{self, Key, State, Step};
use super::program::Program;
use super::report::{JobOnSwitch, Report, Round};

/// Time between two looks at the switch's tables and counters; also the longest that a new window or number of places takes.
pub const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Time before a switch is asked again that did not answer: at first, and at most. It doubles in between.
pub const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// See [`FIRST_PAUSE`].
pub const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Longest time that the end of the daemon waits for the switch to let go of its jobs.
pub const RELEASE_TIME: Duration = Duration::from_secs(2);
/// Largest file of a program, in bytes: BMv2's is 1.5 MiB, and gRPC servers take 4 MiB unless told otherwise.
const MAX_PROGRAM_BYTES: u64 = 64 << 20;
/// Why a job that is to be on the switch is not.
const REFUSED: &str = "the switch refuses its entries";

/// What is to be on the switch.
#[derive(Clone, Debug, Default, PartialEq)]
struct Wish {
    jobs: Vec<Placement>,
    /// The daemon ends: no job stays, and then the task ends.
    released: bool,
}

/// Says to the task what is to be on the switch.
pub struct Handle {
    wish: watch::Sender<Wish>,
    neighbourhood: Neighbourhood,
    report: Report,
}

impl Handle {
    /// The jobs that run.
    pub fn place(&self, jobs: &[JobFacts]) {
        let jobs = self.neighbourhood.place(jobs);
        self.wish.send_if_modified(|wish| {
            let is_new = wish.jobs != jobs;
            wish.jobs = jobs;
            is_new
        });
    }

    /// What others see of it.
    #[must_use]
    pub fn report(&self) -> Report {
        self.report.clone()
    }

    /// Takes all jobs off the switch, or gives up after [`RELEASE_TIME`]: what stays there is of generations that are over.
    pub async fn release(&self) {
        self.wish.send_modify(|wish| wish.released = true);
        if timeout(RELEASE_TIME, self.wish.closed()).await.is_err() {
            warn!(
                "the switch keeps its jobs: it did not answer in time; they are of generations that are over"
            );
        }
    }
}

/// A handle, and the task that it is of: to be run until it ends, which is when the handle has released it.
pub fn keeper(setup: Setup, neighbourhood: Neighbourhood) -> (Handle, impl Future<Output = ()>) {
    let report = Report::new(setup.address.to_string());
    let (wish, heard) = watch::channel(Wish::default());
    let keeper = Keeper {
        stations: neighbourhood.entries(),
        flood: neighbourhood.flood(),
        setup,
        wish: heard,
        report: report.clone(),
        first: first_election(),
        sessions: 0,
        was_vacant: false,
        is_loaded: false,
        jobs: Vec::new(),
        written: None,
    };
    (Handle { wish, neighbourhood, report }, keeper.run())
}

/// Later daemons have higher numbers, so that one which was started anew gets the switch from one that hangs.
fn first_election() -> u128 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    since.as_micros() << 64
}

struct Keeper {
    setup: Setup,
    stations: Vec<Entry>,
    flood: Group,
    wish: watch::Receiver<Wish>,
    report: Report,
    /// This daemon's first election id, and how many sessions have been tried since.
    first: u128,
    sessions: u128,
    /// The last session found that whoever was primary had gone.
    was_vacant: bool,
    /// This daemon has loaded the switch's program.
    is_loaded: bool,
    /// The jobs that were to be on the switch at the last look of this session.
    jobs: Vec<SwitchedJob>,
    /// What was as it is to be after that look; none before the first.
    written: Option<State>,
}

/// How it ends.
enum Over {
    /// No job is to stay on the switch.
    Released,
    /// The handle has gone: all stays as it is.
    Dropped,
}

impl Keeper {
    async fn run(mut self) {
        let mut pause = FIRST_PAUSE;
        loop {
            let error = match self.session(&mut pause).await {
                Ok(()) => return,
                Err(error) => error,
            };
            self.report.failed(&error);
            self.next_session(&error);
            match self.rest(pause).await {
                None => {}
                Some(Over::Released) => {
                    return warn!(
                        "the switch was not told that jobs are over, as it is not in use ({error}); what it still has of them \
                         is of generations that are over"
                    );
                }
                Some(Over::Dropped) => return,
            }
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }

    /// With which number the next session is opened. A later daemon has a larger one and stays primary: what has gone for a
    /// moment is not taken, and whoever is primary is not overtaken.
    fn next_session(&mut self, error: &SwitchError) {
        self.sessions += 1;
        match *error {
            SwitchError::Vacant { last } if self.was_vacant => {
                (self.first, self.sessions) = (self.first.max(last.saturating_add(1)), 0);
            }
            SwitchError::NotPrimary { .. } => self.sessions = 0,
            _ => {}
        }
        self.was_vacant = matches!(error, SwitchError::Vacant { .. });
    }

    /// Waits. Says whether all is over.
    async fn rest(&mut self, pause: Duration) -> Option<Over> {
        tokio::select! {
            () = sleep(pause) => None,
            released = self.wish.wait_for(|wish| wish.released) => {
                Some(if released.is_ok() { Over::Released } else { Over::Dropped })
            }
        }
    }

    /// From connecting to the end of the session, which is an error, or of the daemon, which is none.
    async fn session(&mut self, pause: &mut Duration) -> Result<(), SwitchError> {
        let election = self.first.saturating_add(self.sessions);
        let mut client = Client::open(self.setup.address, self.setup.device, election).await?;
        if let Some(files) = &self.setup.pipeline {
            load(&mut client, files, self.is_loaded).await?;
            self.is_loaded = true;
        }
        let (info, _) = client.program().await?;
        let program = Program::of(&info)?;
        (self.jobs, self.written) = (Vec::new(), None);
        let mut looks = interval(LOOK_INTERVAL);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let is_look = tokio::select! {
                error = client.lost() => return Err(error),
                changed = self.wish.changed() => match changed {
                    Ok(()) => false,
                    // The daemon has gone without a word.
                    Err(_) => return Ok(()),
                },
                _ = looks.tick() => true,
            };
            let wish = self.wish.borrow_and_update().clone();
            if !is_look && !wish.released && !self.is_other(&program, &wish) {
                continue;
            }
            let result = self.look(&mut client, &program, &wish).await;
            match result {
                Ok(()) if wish.released => return Ok(()),
                Err(error) if !error.is_partial() => return Err(error),
                // It answers.
                _ => *pause = FIRST_PAUSE,
            }
        }
    }

    /// Jobs, generations or ranks are others than those on the switch. Windows and places can wait for the next look.
    fn is_other(&self, program: &Program, wish: &Wish) -> bool {
        let name = |job: &SwitchedJob| (job.number, job.generation, job.ranks.clone());
        let (jobs, _) = jobs_of(program, wish);
        !self.jobs.iter().map(name).eq(jobs.iter().map(name))
    }

    /// What is changed although it was, or was not, there as it is to be: whoever else changed it, it was not this daemon. At a
    /// session's first look nobody knows.
    fn repairs<'a>(&self, updates: &'a [plan::Update], goal: &State) -> Vec<&'a Key> {
        let Some(written) = &self.written else { return Vec::new() };
        let keys = updates.iter().map(|update| &update.key);
        keys.filter(|key| written.get(*key) == goal.get(*key)).collect()
    }

    /// Reads what the switch has, puts right what differs, and reads what it counted.
    async fn look(&mut self, client: &mut Client, program: &Program, wish: &Wish) -> Result<(), SwitchError> {
        let (jobs, mut told) = jobs_of(program, wish);
        let goal = plan::wanted(&self.stations, Some(&self.flood), &jobs);
        let mut held = client.state(program).await?;
        let (mut all, mut repaired, mut refused) = (0, 0, Vec::new());
        for step in Step::ALL {
            let updates = step.updates(&held, &goal);
            if updates.is_empty() {
                continue;
            }
            all += updates.len();
            let repairs = self.repairs(&updates, &goal);
            let no = client.write(program, &updates).await?;
            if no.is_empty() {
                updates.iter().for_each(|update| update.apply(&mut held));
                repaired += repairs.len();
            } else {
                refused.extend(no);
                held = client.state(program).await?;
                repaired += repairs.iter().filter(|key| held.get(**key) == goal.get(**key)).count();
            }
        }
        let mut counts = [0; Count::COUNT];
        let cells = client.read("tell its counters", vec![program.counts()]).await?;
        program.count(&cells, &mut counts);
        let entries = goal.iter().filter(|(key, value)| held.get(key) == Some(value)).count();
        for job in &mut told {
            let entry = jobs.iter().find(|switched| job.number == switched.number).map(plan::job_key);
            if entry.is_some_and(|key| held.get(&key) != goal.get(&key)) {
                (job.ranks, job.absent) = (Vec::new(), Some(REFUSED.into()));
            }
        }
        let round = Round { entries, repaired, refused: refused.len(), counts, jobs: told };
        let error = refused.first().map(|first| SwitchError::Writes {
            refused: refused.len(),
            all,
            first: first.clone(),
        });
        if error.is_none() {
            let is_known = |job: &SwitchedJob| {
                let is_it =
                    |known: &SwitchedJob| (known.number, known.generation) == (job.number, job.generation);
                self.written.is_some() && self.jobs.iter().any(is_it)
            };
            for job in jobs.iter().filter(|job| !is_known(job)) {
                let (number, generation, ranks) = (job.number, job.generation, job.ranks.len());
                info!(number, generation, ranks, "a job is on the switch");
            }
        }
        self.jobs = jobs;
        self.written = Some(goal.into_iter().filter(|(key, value)| held.get(key) == Some(value)).collect());
        self.report.looked(round, error.as_ref());
        error.map_or(Ok(()), Err)
    }
}

/// What the switch is to know of the jobs, and what is told of them.
fn jobs_of(program: &Program, wish: &Wish) -> (Vec<SwitchedJob>, Vec<JobOnSwitch>) {
    let (mut jobs, mut told) = (Vec::new(), Vec::new());
    for placement in wish.jobs.iter().filter(|_| !wish.released) {
        let name = placement.name.clone();
        match placement.on(program.slots(), program.lanes()) {
            Ok(job) => {
                let ranks = job.ranks.iter().map(|neighbour| neighbour.rank).collect();
                told.push(JobOnSwitch { name, number: job.number, ranks, absent: None });
                jobs.push(job);
            }
            Err(absent) => {
                let number = placement.number;
                told.push(JobOnSwitch { name, number, ranks: Vec::new(), absent: Some(absent.to_string()) });
            }
        }
    }
    (jobs, told)
}

/// Loads a program into the switch, unless it has this one.
async fn load(client: &mut Client, files: &PipelineFiles, was_loaded: bool) -> Result<(), SwitchError> {
    let (program, info) = (read(&files.program)?, read(&files.info)?);
    let unreadable = |why: prost::DecodeError| SwitchError::Pipeline {
        path: files.info.clone(),
        why: format!("it is no P4Info in protobuf's binary form ({why})"),
    };
    let cookie = Sha256::new().chain_update(&info).chain_update(&program).finalize();
    let cookie = cookie.iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte));
    let info = P4Info::decode(&*info).map_err(unreadable)?;
    Program::of(&info)?;
    let has_it = match client.program().await {
        // A switch that keeps no cookies is not loaded again and again, which would clear its tables.
        Ok((there, same)) => same == cookie || was_loaded && Program::of(&there).is_ok(),
        Err(SwitchError::NoProgram) => false,
        Err(error) => return Err(error),
    };
    if has_it {
        return Ok(());
    }
    info!(program = %files.program.display(), "loading the switch's program");
    client.load(info, program, cookie).await
}

fn read(path: &Path) -> Result<Vec<u8>, SwitchError> {
    let unusable = |why: String| SwitchError::Pipeline { path: path.into(), why };
    let length = std::fs::metadata(path).map_err(|error| unusable(error.to_string()))?.len();
    if length > MAX_PROGRAM_BYTES {
        return Err(unusable(format!(
            "{length} bytes are more than a program has ({MAX_PROGRAM_BYTES} at most)"
        )));
    }
    std::fs::read(path).map_err(|error| unusable(error.to_string()))
}
