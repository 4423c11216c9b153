//! The control server: HTTP around [`super::membership`]. Joins are held open until their generation is formed.

mod inner;

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::middleware::from_fn_with_state;
use paatp_common::job::JobEntry;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, oneshot};
use tokio_rustls::TlsAcceptor;
use tracing::{debug, error, info, warn};

use crate::config::{Access, JobConfig};
use crate::switch::keeper::Handle;
use crate::telemetry::Telemetry;
use crate::telemetry::history::Series;
use crate::telemetry::metrics::Exporter;
use crate::telemetry::snapshot::Snapshot;
use paatp_transport::rate::share::Share;
use paatp_transport::words::Ranks;

use super::api;
use super::ascent::{Ascent, Setback};
use super::error::ControlError;
use super::hosts::{self, Hosts};
use super::http::{Connections, Peer, Scope};
use super::membership::{Entropy, Leaving, Membership, Parent, WaiterId};
use super::pacing::Pacing;
use super::parent;
use super::protocol::{
    Created, Grant, JobDetails, JobStatus, JoinRequest, LeaveRequest, NodeStatus, RankStatus, Sync,
};
use super::state_file::Keeper;
use super::token::{self, Secret};

pub use super::tables::Tables;
pub(super) use inner::Inner;

/// What a waiting rank is told.
pub(super) type Answer = Result<Grant, ControlError>;

/// How many may look at the tables at a time, and how long they wait for their turn and for the tables.
const LOOKS: usize = 2;
const LOOK_TIME: Duration = Duration::from_secs(2);

/// The server's state, shared by all connections.
#[derive(Clone)]
pub struct Control(Arc<Mutex<Inner>>, Arc<Semaphore>, Arc<OnceLock<Arc<Exporter>>>);

/// What somebody wants to do.
#[derive(Clone, Copy, Debug)]
pub(super) enum Right<'a> {
    /// See the node.
    Look,
    /// See one job.
    LookAt(&'a str),
    /// Change jobs.
    Manage,
    /// Be a member of a job.
    Join(&'a str),
}

/// Whoever asks.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    pub(super) peer: Peer,
    /// The token that was shown.
    pub(super) token: Option<String>,
}

/// A wait that ends when this is dropped: with its answer, or because the worker hung up.
pub(super) struct Wait {
    control: Control,
    name: String,
    waiter: WaiterId,
}

impl Wait {
    /// Ends it; returns the ranks that were missing if nobody had ended it before.
    pub(super) fn end(&mut self) -> Option<Vec<u8>> {
        let mut inner = self.control.lock();
        inner.waiting.remove(&self.waiter);
        inner.membership.abandon(&self.name, self.waiter)
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        if let Some(missing) = self.end() {
            info!(job = self.name, missing = %Ranks(&missing), "a waiting worker hung up");
        }
    }
}

/// A rank's wait: what ends it, its answer, and when it gives up.
pub(super) type Entered = (Wait, oneshot::Receiver<Answer>, Option<Instant>);

impl Control {
    /// A server for these jobs, whose jobs nobody can change.
    #[must_use]
    pub fn new(membership: Membership, tables: Arc<Mutex<dyn Tables>>) -> Control {
        let inner = Inner {
            membership,
            tables,
            waiting: BTreeMap::new(),
            token: None,
            pacing: Pacing::default(),
            telemetry: Telemetry::blind(),
            hosts: Arc::default(),
            keeper: None,
            switch: None,
        };
        Control(Arc::new(Mutex::new(inner)), Arc::new(Semaphore::new(LOOKS)), Arc::default())
    }

    /// With a token for changes.
    #[must_use]
    pub fn with_token(self, token: Option<Secret>) -> Control {
        self.lock().token = token;
        self
    }

    /// With names under which it may be asked without TLS, besides its addresses and `localhost`.
    #[must_use]
    pub fn with_hosts(self, names: &[String]) -> Control {
        self.lock().hosts = Arc::new(Hosts::new(names));
        self
    }

    /// With eyes on the tables.
    #[must_use]
    pub fn with_telemetry(self, telemetry: Telemetry) -> Control {
        self.lock().telemetry = telemetry;
        self
    }

    /// With a switch that jobs are put on. It is told at once of those that run: what it has of an earlier start stays.
    #[must_use]
    pub fn with_switch(self, switch: Option<Arc<Handle>>) -> Control {
        let mut inner = self.lock();
        if let Some(switch) = &switch {
            switch.place(&inner.membership.facts().jobs);
        }
        inner.switch = switch;
        drop(inner);
        self
    }

    /// With a place where what a restart needs to know is kept, from now on.
    #[must_use]
    pub fn with_keeper(self, keeper: Option<Box<dyn Keeper>>) -> Control {
        let mut inner = self.lock();
        inner.keeper = keeper;
        inner.keep();
        drop(inner);
        self
    }

    /// The pages.
    pub fn router(&self) -> Router {
        api::router(self.clone())
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        // No code panics while it holds the lock; if one did, the tables are still those of a complete step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says whether a caller may do something.
    pub(super) fn authorize(&self, caller: &Caller, right: Right<'_>) -> Result<(), ControlError> {
        let inner = self.lock();
        let managing = caller.peer.scope == Scope::Management;
        let name = match right {
            Right::Look if managing => return Ok(()),
            Right::LookAt(_) if managing => return Ok(()),
            Right::Look => return Err(ControlError::NotHere),
            Right::Manage if !managing => return Err(ControlError::NotHere),
            Right::Manage => {
                let token = inner.token.ok_or(ControlError::ManagementOff)?;
                return shown(caller, "changes need the node's token", |shown| token.is(shown));
            }
            Right::LookAt(name) | Right::Join(name) => name,
        };
        let (access, key) = inner.membership.access(name);
        if access == Access::Open {
            return Ok(());
        }
        let token = inner.token;
        shown(caller, "this job is open to its key and the node's token only", |shown| {
            // Both are compared, whatever the first says: a comparison that is left out tells by its time.
            key.is_some_and(|key| key.is(shown)) | token.is_some_and(|token| token.is(shown))
        })
    }

    /// A rank joins; if that forms a generation, everybody is answered before this returns.
    pub(super) fn enter(
        &self,
        name: &str,
        request: &JoinRequest,
        peer: Peer,
        entropy: Entropy,
    ) -> Result<Entered, ControlError> {
        let address = peer.address;
        let mut inner = self.lock();
        let refused =
            |error: &ControlError| warn!(job = name, rank = request.rank, %address, "refused: {error}");
        let now = Instant::now();
        if let Some((waiter, grant)) = inner.membership.grant_again(name, request, address) {
            info!(job = name, rank = request.rank, %address, "told again what it was granted");
            let (sender, receiver) = oneshot::channel();
            let _ = sender.send(Ok(grant));
            return Ok((Wait { control: self.clone(), name: name.into(), waiter }, receiver, None));
        }
        let joined = inner.membership.join(now, name, request, address, entropy).inspect_err(refused)?;
        info!(job = name, rank = request.rank, %address, "joined");
        let (sender, receiver) = oneshot::channel();
        inner.waiting.insert(joined.waiter, sender);
        inner.tell(joined.replaced, &Err(ControlError::Replaced(request.rank)));
        if let Some(formation) = &joined.formation {
            let _ = inner.form(formation);
        }
        if let Some(ascent) = joined.ascent {
            self.clone().go_up(ascent);
        }
        let deadline = inner.membership.deadline(name, joined.waiter);
        let wait = Wait { control: self.clone(), name: name.into(), waiter: joined.waiter };
        Ok((wait, receiver, deadline))
    }

    /// Joins a job's parent for the ranks that wait here, and answers them.
    async fn ascend(self, ascent: Ascent) {
        info!(job = ascent.name, parent = %ascent.parent.address, ranks = %ascent.parent.ranks, "joining the parent");
        let asking = ascent.clone();
        let (answer, asked) = oneshot::channel();
        // A thread of its own: the end of the daemon waits for those of the runtime, and this one may wait for an hour.
        let thread = std::thread::Builder::new().name("parent".into());
        let thread = thread.spawn(move || {
            let _ = answer.send(parent::join(&asking));
        });
        let asked = match thread {
            Ok(_) => asked.await.unwrap_or(Err(ControlError::Stopping)),
            Err(error) => Err(ControlError::Parent {
                job: ascent.name.clone(),
                parent: ascent.parent.address,
                why: format!("cannot be asked: there is no thread for it ({error})"),
            }),
        };
        let mut inner = self.lock();
        let formed = asked.and_then(|(grant, uplink)| {
            let formed = inner.membership.form_below(&ascent, &grant, uplink);
            let is_in_force = formed.as_ref().is_ok_and(|formation| inner.form(formation));
            if !is_in_force {
                // These ranks are out of it. (Those of other nodes find out by the timeout.)
                leave_parent(ascent.parent, ascent.name.clone(), grant.generation);
            }
            formed
        });
        if let Err(error) = formed {
            warn!(job = ascent.name, "not formed: {error}");
            let Setback { waiters, next } = inner.membership.give_up(&ascent, Instant::now());
            inner.tell(waiters, &Err(error));
            if let Some(next) = next {
                self.clone().go_up(next);
            }
        }
    }

    /// Goes up meanwhile.
    fn go_up(self, ascent: Ascent) {
        tokio::spawn(self.ascend(ascent));
    }

    pub(super) fn leave(&self, name: &str, request: &LeaveRequest, peer: Peer) -> Result<(), ControlError> {
        let mut inner = self.lock();
        match inner.membership.leave(name, request, peer.address)? {
            Leaving::Waiter(waiter) => {
                let rank = u8::try_from(request.rank).unwrap_or(u8::MAX);
                inner.tell([waiter], &Err(ControlError::Left(rank)));
            }
            Leaving::Noted => inner.keep(),
            Leaving::Last { number, entry } => {
                inner.write(number, entry)?;
                inner.membership.finish(number, entry);
                inner.keep();
                info!(job = name, generation = request.generation, "all ranks have left");
                if let Some((parent, generation)) = inner.membership.parent(name).zip(request.generation) {
                    leave_parent(parent, name.into(), generation);
                }
            }
        }
        info!(job = name, rank = request.rank, "left");
        Ok(())
    }

    /// Adds a job, with a key if it is not open to everybody.
    pub(super) fn create(&self, config: &JobConfig) -> Result<Created, ControlError> {
        let random = |error: getrandom::Error| ControlError::Randomness(error.to_string());
        let access = config.access.unwrap_or(Access::Token);
        let key = (access == Access::Token).then(token::draw).transpose().map_err(random)?;
        let mut inner = self.lock();
        let status = inner.membership.create(config, access, key.as_deref().map(Secret::of))?;
        inner.keep();
        info!(job = config.name, world = config.world, slots = config.slots, "created");
        Ok(Created { status, key })
    }

    /// Deletes a job; its waiting ranks are told, its members get REJOIN.
    pub(super) fn delete(&self, name: &str) -> Result<(), ControlError> {
        let random = entropy()?.generation;
        let mut inner = self.lock();
        let deletion = inner.membership.plan_deletion(name, random)?;
        let above = inner.membership.above(name);
        if let Some((number, entry)) = deletion.write {
            inner.write(number, entry)?;
        }
        inner.membership.delete(&deletion, Instant::now());
        inner.keep();
        inner.tell(deletion.waiters, &Err(ControlError::JobDeleted(name.into())));
        if let Some((parent, generation)) = above {
            leave_parent(parent, name.into(), generation);
        }
        info!(job = name, "deleted");
        Ok(())
    }

    /// Takes nothing new, or does again; whoever waits is told.
    pub fn drain(&self, draining: bool) {
        let mut inner = self.lock();
        let waiters = inner.membership.set_draining(draining);
        inner.keep();
        inner.tell(waiters, &Err(ControlError::Draining));
        info!(draining, "draining changed");
    }

    /// Changes how a job's ranks wait for one another, while it runs or not.
    pub(super) fn set_sync(&self, name: &str, sync: Sync) -> Result<JobStatus, ControlError> {
        let mut inner = self.lock();
        inner.look_at_policies();
        let (status, entry, running) = inner.membership.details(name)?;
        let number = status.job;
        let min_ack = match running {
            Some(_) => {
                let tables = inner.tables.lock().unwrap_or_else(PoisonError::into_inner);
                Some(tables.progress(number, &entry)?.min_ack)
            }
            None => None,
        };
        let (number, from, to) = inner.membership.plan_sync(name, sync, min_ack)?;
        if min_ack.is_some() && !inner.replace_policy(number, from, to) {
            // The data plane has met the change before, in this moment.
            inner.look_at_policies();
            let (_, entry, _) = inner.membership.details(name)?;
            let from = entry.policy.from().unwrap_or_default().0;
            return Err(ControlError::SyncChanging { job: name.into(), from });
        }
        inner.membership.note_policy(number, to);
        inner.keep();
        info!(job = name, sync = ?Sync::of(to.after()), epoch = to.epoch(), "synchronisation changes");
        inner.membership.status(name)
    }

    /// All jobs.
    pub(super) fn list(&self) -> Vec<JobStatus> {
        let mut inner = self.lock();
        inner.look_at_policies();
        inner.membership.list()
    }

    /// The node as a whole.
    pub(super) fn node(&self) -> Result<NodeStatus, ControlError> {
        let inner = self.lock();
        let mut node = inner.membership.node();
        if node.pool_slots > 0 {
            let tables = inner.tables.lock().unwrap_or_else(PoisonError::into_inner);
            node.pool_slots_in_use = tables.pool_in_use()?;
        }
        Ok(node)
    }

    /// Jobs of which a generation runs.
    #[must_use]
    pub fn running_jobs(&self) -> usize {
        self.lock().membership.running().len()
    }

    /// Jobs and ranks in a line, for a service manager's status.
    #[must_use]
    pub fn in_words(&self) -> String {
        let inner = self.lock();
        let (jobs, running) = (inner.membership.list(), inner.membership.running());
        let ranks = |worlds: &mut dyn Iterator<Item = u8>| worlds.map(u32::from).sum::<u32>();
        let at_work = ranks(&mut running.iter().map(|(_, entry)| entry.world));
        let waiting: usize = jobs.iter().map(|job| job.waiting_ranks.len()).sum();
        let all = ranks(&mut jobs.iter().map(|job| job.world));
        let (known, run) = (jobs.len(), running.len());
        format!("{known} jobs, {run} run: {at_work} of {all} ranks at work, {waiting} waiting")
    }

    /// One job with its ranks.
    pub(super) fn details(&self, name: &str) -> Result<JobDetails, ControlError> {
        let mut inner = self.lock();
        inner.look_at_policies();
        let (status, entry, running) = inner.membership.details(name)?;
        let Some(running) = running else {
            return Ok(JobDetails { status, ranks: Vec::new(), slots_in_use: Some(0) });
        };
        let tables = inner.tables.lock().unwrap_or_else(PoisonError::into_inner);
        let progress = tables.progress(status.job, &entry)?;
        let slots_in_use = tables.slots_in_use(&entry, progress.min_ack)?;
        let ranks =
            (0u8..).zip(&running.addresses).zip(&progress.ranks).map(|((rank, address), progress)| {
                RankStatus {
                    rank,
                    address: address.to_string(),
                    acknowledged: progress.acknowledged,
                    contributed: progress.contributed,
                }
            });
        Ok(JobDetails { status, ranks: ranks.collect(), slots_in_use })
    }

    /// What time brings: deleted jobs become free, ranks that hold others up are found. To be called a few times a
    /// second.
    pub fn tick(&self, now: Instant) {
        let mut inner = self.lock();
        let Inner { membership, keeper, .. } = &mut *inner;
        if let Some(keeper) = keeper {
            keeper.retry(membership);
        }
        for number in inner.membership.closed(now) {
            match inner.write(number, JobEntry::default()) {
                Ok(()) => {
                    inner.unlink(number);
                    inner.membership.free(number);
                    inner.keep();
                }
                Err(cause) => error!(number, "cannot clear a deleted job, trying again: {cause}"),
            }
        }
        inner.settle_policies();
        for (number, entry) in inner.membership.watched() {
            let progress = {
                let tables = inner.tables.lock().unwrap_or_else(PoisonError::into_inner);
                tables.progress(number, &entry)
            };
            let observed = progress.map_err(ControlError::from).and_then(|progress| {
                let random = entropy()?.generation;
                Ok(inner.membership.observe(now, number, &progress, random))
            });
            match observed {
                Ok(Some(loss)) => inner.lose(&loss),
                Ok(None) => {}
                Err(cause) => error!(number, "cannot see how far a job is: {cause}"),
            }
        }
        let (telemetry, facts) = (inner.telemetry.clone(), inner.membership.facts());
        if let Some(switch) = &inner.switch {
            switch.place(&facts.jobs);
        }
        drop(inner);
        telemetry.observe(now, &facts.jobs);
    }

    /// Everything that can be seen of the node, now. For a thread that may block.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let (telemetry, facts) = {
            let inner = self.lock();
            (inner.telemetry.clone(), inner.membership.facts())
        };
        telemetry.snapshot(&facts)
    }

    /// What makes metrics of it.
    ///
    /// # Errors
    /// If the list of metrics contradicts itself.
    pub fn exporter(&self) -> Result<Arc<Exporter>, ControlError> {
        if let Some(exporter) = self.2.get() {
            return Ok(exporter.clone());
        }
        let (telemetry, inner) = (self.lock().telemetry.clone(), self.0.clone());
        let facts = move || inner.lock().unwrap_or_else(PoisonError::into_inner).membership.facts();
        let exporter = Exporter::new(&telemetry, Arc::new(facts));
        let exporter = exporter.map_err(|cause| ControlError::Tables(cause.to_string()))?;
        Ok(self.2.get_or_init(|| Arc::new(exporter)).clone())
    }

    /// The same, on a thread of its own, for as many as may look at a time.
    pub(super) async fn look(&self) -> Result<Snapshot, ControlError> {
        let looking = async {
            let turn = self.1.clone().acquire_owned().await.ok()?;
            let control = self.clone();
            // The turn ends with the look, whether or not somebody still waits for it.
            let look = move || (control.snapshot(), turn).0;
            tokio::task::spawn_blocking(look).await.ok()
        };
        tokio::time::timeout(LOOK_TIME, looking).await.ok().flatten().ok_or(ControlError::Overloaded)
    }

    /// The last minutes of a job, from a sample on.
    pub(super) fn series(&self, name: &str, since: u64) -> Result<Series, ControlError> {
        let (telemetry, facts) = {
            let inner = self.lock();
            (inner.telemetry.clone(), inner.membership.job_facts(name)?)
        };
        Ok(telemetry.series(&facts, since))
    }

    /// Paces the jobs that run, and shares the pool out. To be called every [`PACE_INTERVAL`](super::pacing::PACE_INTERVAL).
    pub fn pace(&self, now: Instant) {
        let mut inner = self.lock();
        let Inner { membership, tables, pacing, .. } = &mut *inner;
        let mut tables = tables.lock().unwrap_or_else(PoisonError::into_inner);
        let tuned = membership.tuned();
        let shares: Vec<Share> =
            tuned.iter().filter_map(|(number, entry)| tables.share(*number, entry).ok()).collect();
        let places = pacing.share_out(now, &shares);
        for (number, before) in tuned {
            let Some((_, places)) = places.iter().find(|(tuned, _)| *tuned == number) else { continue };
            let Some(entry) = membership.set_places(number, *places) else { continue };
            if let Err(cause) = tables.write(number, entry) {
                debug!(number, "cannot change a job's places in the pool, trying again: {cause}");
                membership.set_places(number, before.k);
            }
        }
        let mut jobs = Vec::new();
        for (number, entry) in membership.running() {
            match tables.records(number, &entry) {
                Ok(records) => jobs.push((number, entry, records)),
                // The look at how far jobs are says so as well, and less often.
                Err(cause) => debug!(number, "cannot read what a job's ranks did: {cause}"),
            }
        }
        for grant in pacing.tick(now, &jobs) {
            let Some(entry) = membership.grant(grant.job, grant.window) else { continue };
            let gains = grant.gains.get(..usize::from(entry.world)).unwrap_or(&[]);
            let written = tables.write(grant.job, entry).and_then(|()| tables.set_gains(grant.job, gains));
            if let Err(cause) = written {
                debug!(number = grant.job, "cannot stamp a job's answers: {cause}");
                pacing.unstamp(grant.job);
            }
        }
    }

    /// Serves on all listeners until this is dropped.
    pub async fn serve(self, listeners: Vec<(TcpListener, Scope)>, tls: Option<TlsAcceptor>) {
        let mut router = self.router();
        if tls.is_none() {
            let names = self.lock().hosts.clone();
            router = router.layer(from_fn_with_state(names, hosts::check));
        }
        let connections = Connections::new(router, tls);
        let mut servers = tokio::task::JoinSet::new();
        for (listener, scope) in listeners {
            servers.spawn(connections.clone().accept(listener, scope));
        }
        while let Some(ended) = servers.join_next().await {
            let Err(cause) = ended;
            error!("a listener ended: {cause}");
        }
    }
}

/// Leaves a job's parent for the ranks of this node, without waiting for it.
fn leave_parent(parent: Parent, name: String, generation: u32) {
    tokio::task::spawn_blocking(move || {
        if let Err(why) = parent::leave(parent, &name, generation) {
            warn!(job = name, parent = %parent.address, "the parent does not know that the ranks have left: it {why}");
        }
    });
}

/// The caller showed a token that passes.
fn shown(caller: &Caller, why: &'static str, passes: impl Fn(&str) -> bool) -> Result<(), ControlError> {
    match &caller.token {
        None => Err(ControlError::TokenMissing(why)),
        Some(token) if passes(token) => Ok(()),
        Some(_) => Err(ControlError::TokenWrong),
    }
}

/// Randomness from the kernel.
pub(super) fn entropy() -> Result<Entropy, ControlError> {
    let drawn = getrandom::u32().and_then(|generation| Ok(Entropy { generation, nonce: getrandom::u64()? }));
    drawn.map_err(|error| ControlError::Randomness(error.to_string()))
}

/// Serves everything on all listeners, without TLS, for ever.
///
/// # Errors
/// Never today.
pub async fn serve_all(control: Control, listeners: Vec<TcpListener>) -> io::Result<()> {
    let listeners = listeners.into_iter().map(|listener| (listener, Scope::Management)).collect();
    control.serve(listeners, None).await;
    Ok(())
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
