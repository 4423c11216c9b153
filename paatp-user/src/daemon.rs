//! `paatp run`: engine and control server together, from start to a signal.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use paatp_common::counter::{Counters, Event, Refusal};
use paatp_common::limits::MAX_RANKS;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::signal::unix::Signal;
use tokio_rustls::TlsAcceptor;
use tracing::{error, info, warn};

use crate::cli::Run;
use crate::config::{Access, ConfigError, File, Jobs, NodeConfig};
use crate::control::error::ControlError;
use crate::control::http::{self, Scope, TlsError};
use crate::control::listen::{ListenError, listen, parse_address};
use crate::control::pacing::PACE_INTERVAL;
use crate::control::protocol::{CounterReport, JobStatus};
use crate::control::server::Control;
use crate::control::state_file::{Keeper, StateFile};
use crate::control::token::{self, DEFAULT_TOKEN_FILE, Secret, TokenError};
use crate::engine::{Aggregator, EngineError, Interface, Options, fitting_lanes, ip_and_udp_bytes};
use crate::restart;
use crate::service::{Loop, Service};
use crate::signals::{Signals, decline_reloads};
use crate::switch::keeper::keeper;
use crate::switch::options::{OptionsError, Setup};
use crate::switch::placement::Neighbourhood;
use crate::telemetry::snapshot::{AttachmentStatus, Build};
use crate::telemetry::{Identity, Telemetry, metrics};

/// Time between two looks at the interface.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// Time between two looks at how far the jobs are.
const TICK_INTERVAL: Duration = Duration::from_millis(250);

/// The daemon cannot start or go on.
#[derive(Debug, Error)]
pub enum DaemonError {
    /// What is said of a switch.
    #[error(transparent)]
    SwitchOptions(#[from] OptionsError),
    /// The switch does not know where the aggregator is.
    #[error(
        "none of the --switch-port has an address of `{interface}` ({addresses}): the switch must know which port this aggregator is at"
    )]
    NotAtSwitch {
        /// The interface.
        interface: String,
        /// Its addresses.
        addresses: String,
    },
    /// The jobs are not right.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The ports do not fit.
    #[error(
        "--port {port} --ports {ports}{}: the last UDP port would be above 65535; choose smaller numbers",
        if *.levels { " on several levels (--levels, a job with a parent, or a switch), which take 64 more" } else { "" }
    )]
    Ports {
        /// First port.
        port: u16,
        /// Number of ports.
        ports: u16,
        /// Answers of parents come to more.
        levels: bool,
    },
    /// The engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The control server.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The node's token.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// A job wants a token, and there is none.
    #[error(
        "job `{0}` is open to tokens only (access = \"token\"), and this aggregator has none; give it one with --token-file"
    )]
    NoToken(String),
    /// Certificate or key.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The operating system.
    #[error("cannot {what}; see the limits of this service (open files, memory)")]
    System {
        /// What failed.
        what: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The metrics cannot be made.
    #[error("cannot make metrics; this is a mistake in this program")]
    Metrics(#[source] ControlError),
    /// The counters cannot be written.
    #[error("cannot write the counters to {path}; check that its folder exists and may be written to")]
    Counters {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// What file and command line ask for.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The jobs and their slots.
    pub jobs: Jobs,
    /// The node.
    pub node: NodeConfig,
    /// The switch in front of it.
    pub switch: Option<Setup>,
}

/// Checks what command line and file ask for together. The file's settings are in `args` already.
///
/// # Errors
/// If they are not right.
pub fn plan(args: &Run, file: &File) -> Result<Plan, DaemonError> {
    let switch = args.switch.setup()?;
    let node = NodeConfig {
        memory: args.memory,
        pool: args.pool,
        pool_places: args.pool_places,
        lanes: args.node_lanes,
        token_file: args.token_file.clone(),
        control: args.control.clone(),
        allowed_hosts: args.allowed_host.clone(),
        tls_certificate: args.tls_certificate.clone(),
        tls_key: args.tls_key.clone(),
        pin_dir: args.pin_dir.clone(),
        state_dir: args.state_dir.clone(),
        runtime_dir: args.runtime_dir.clone(),
        keep_attached: args.keep_attached,
        // A switch's sums are sums of several ranks, which only that program takes.
        levels: args.levels || switch.is_some(),
    };
    let mut list = file.jobs.clone();
    list.extend(args.job());
    if let Some(control) = &node.control {
        parse_address(control, args.port)?;
    }
    let jobs = Jobs::of_node(list, &node)?;
    // Answers to a node that is one rank of its parent's come to a port for each of its ranks.
    let relayed = if jobs.levels() { MAX_RANKS as u32 } else { 0 };
    if u32::from(args.port) + u32::from(args.ports) + relayed - 1 > u32::from(u16::MAX) {
        return Err(DaemonError::Ports { port: args.port, ports: args.ports, levels: jobs.levels() });
    }
    Ok(Plan { jobs, node, switch })
}

/// The node's token. An empty path is none. The default place need not be writable: then nobody can change jobs.
fn token(plan: &Plan) -> Result<Option<Secret>, DaemonError> {
    let token = match &plan.node.token_file {
        Some(path) if path.as_os_str().is_empty() => None,
        Some(path) => Some(token::read_or_make(path)?),
        None => match token::read_or_make(Path::new(DEFAULT_TOKEN_FILE)) {
            Ok(token) => Some(token),
            Err(error @ TokenError::Exposed { .. }) => return Err(error.into()),
            Err(error) => {
                warn!("jobs cannot be changed while this runs: {error}");
                None
            }
        },
    };
    let closed = plan.jobs.list().iter().find(|job| job.access == Some(Access::Token));
    match (&token, closed) {
        (None, Some(job)) => Err(DaemonError::NoToken(job.name.clone())),
        _ => Ok(token),
    }
}

fn tls(node: &NodeConfig) -> Result<Option<TlsAcceptor>, DaemonError> {
    match (&node.tls_certificate, &node.tls_key) {
        (Some(certificate), Some(key)) => Ok(Some(http::tls(certificate, key)?)),
        (None, None) => Ok(None),
        _ => Err(TlsError::Half.into()),
    }
}

/// Most lanes of a chunk whose packet fits the MTU: to any of the addresses, and to those of IPv6.
fn mtu_lanes(interface: &Interface) -> (Option<u32>, Option<u32>) {
    let fitting = |address: &std::net::IpAddr| fitting_lanes(ip_and_udp_bytes(*address), interface.mtu);
    let addresses = || interface.served().iter();
    (addresses().map(fitting).max(), addresses().filter(|address| address.is_ipv6()).map(fitting).max())
}

/// Serves until a signal or until the interface is gone.
///
/// # Errors
/// What failed, why and what to do.
pub fn run(args: &Run, plan: &Plan, object: &[u8]) -> Result<(), DaemonError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|source| DaemonError::System { what: "start the event loop", source })?;
    runtime.block_on(serve(args, plan, object))
}

type Engine = Arc<Mutex<Aggregator>>;

fn lock(engine: &Engine) -> MutexGuard<'_, Aggregator> {
    engine.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn serve(args: &Run, plan: &Plan, object: &[u8]) -> Result<(), DaemonError> {
    let jobs = &plan.jobs;
    let (token, tls) = (token(plan)?, tls(&plan.node)?);
    let extra = plan.node.control.as_deref().map(|text| parse_address(text, args.port)).transpose()?;
    // Signals first: one that comes during the start must not leave a program behind.
    let mut signals = Signals::new()?;
    let options = Options {
        interface: args.iface.clone(),
        mode: args.xdp_mode,
        port_base: args.port,
        ports: args.ports,
        levels: jobs.levels(),
    };
    // Before anything is attached.
    let neighbourhood = plan.switch.as_ref().map(|setup| neighbourhood(setup, &args.iface)).transpose()?;
    let pinning = restart::pinning(&plan.node, &args.iface)?;
    let mut engine = Aggregator::start(object, &options, jobs, pinning)?;
    let interface = engine.interface().clone();
    let (membership, file) = restart::membership(&plan.node, jobs, &mut engine)?;
    if let Some(neighbourhood) = &neighbourhood {
        engine.put_behind(neighbourhood.clone())?;
    }
    let engine: Engine = Arc::new(Mutex::new(engine));
    let listeners = listen(&interface, args.port, extra).await?;
    let (over_any, over_v6) = mtu_lanes(&interface);
    let membership = membership.with_mtu(over_any, over_v6);
    let served = membership.list();
    let (switch, keeping) = match plan.switch.clone().zip(neighbourhood) {
        Some((setup, neighbourhood)) => {
            let (handle, keeping) = keeper(setup, neighbourhood);
            (Some(Arc::new(handle)), Some(keeping))
        }
        None => (None, None),
    };
    let telemetry = {
        let engine = lock(&engine);
        Telemetry::new(Box::new(engine.reader()?), identity(&engine, object))
    };
    let telemetry = telemetry.with_switch(switch.as_ref().map(|handle| handle.report()));
    let keeper = file.clone().map(|file| Box::new(file) as Box<dyn Keeper>);
    let control = Control::new(membership, engine.clone()).with_token(token).with_telemetry(telemetry);
    let control = control.with_keeper(keeper).with_hosts(&plan.node.allowed_hosts);
    let control = control.with_switch(switch.clone());
    keeping.map(tokio::spawn);
    lock(&engine).own();
    if let Some(address) = args.metrics {
        metrics::server::start(address, control.exporter().map_err(DaemonError::Metrics)?)?;
        info!(%address, "metrics");
    }
    let service = Service::new(TICK_INTERVAL, PACE_INTERVAL, WATCH_INTERVAL);
    let place = { format!("{} on {}", lock(&engine).attachment().mode(), args.iface) };
    let status = || format!("{}, {place}", control.in_words());
    tell_ready(&served, &lock(&engine), &listeners);
    service.ready(&status());
    let result = tokio::select! {
        () = control.clone().serve(listeners, tls) => Ok(()),
        () = tick(&control, &service, status) => Ok(()),
        () = pace(&control, &service) => Ok(()),
        result = watch(&engine, &service) => result,
        () = dump_on_request(args, &engine, &mut signals.dump) => Ok(()),
        () = decline_reloads(&mut signals.hangup) => Ok(()),
        () = signals.end.drained(&control, args.drain_timeout, &service) => Ok(()),
    };
    signals.end.exit_at_the_next();
    // The program is taken off after the switch has let go. Where that stays, the switch stays as it is.
    if let Some(switch) = switch.filter(|_| !plan.node.keep_attached) {
        switch.release().await;
    }
    let finished = finish(args, plan, &engine, file.as_ref());
    result.and(finished)
}

/// Who is where on the switch, this node included.
fn neighbourhood(setup: &Setup, interface: &str) -> Result<Neighbourhood, DaemonError> {
    let interface = Interface::find(interface).map_err(EngineError::from)?;
    Neighbourhood::new(setup, interface.served()).ok_or_else(|| DaemonError::NotAtSwitch {
        addresses: interface.served().iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        interface: interface.name,
    })
}

/// What the node is, for those who look.
fn identity(engine: &Aggregator, object: &[u8]) -> Identity {
    let attachment = engine.attachment();
    Identity {
        build: Build::of(object),
        attachment: AttachmentStatus {
            interface: engine.interface().name.clone(),
            mode: attachment.mode().to_string(),
            held_by: attachment.by().to_string(),
            program: attachment.program(),
            pinned: engine.pinned_at().map(|path| path.display().to_string()),
            notices: Vec::new(),
        },
    }
}

/// Prints the one line that says that everything is up.
fn tell_ready(jobs: &[JobStatus], engine: &Aggregator, listeners: &[(TcpListener, Scope)]) {
    let at = |listener: &TcpListener| Some(listener.local_addr().ok()?.to_string());
    let addresses: Vec<String> = listeners.iter().filter_map(|(listener, _)| at(listener)).collect();
    for (listener, _) in listeners.iter().filter(|(_, scope)| *scope == Scope::Management) {
        info!(address = at(listener), "jobs can be managed");
    }
    if jobs.is_empty() {
        info!("no job yet; create one with `paatp job create`");
    }
    for job in jobs {
        info!(
            job = job.name,
            world = job.world,
            lanes = job.lanes,
            slots = job.slots,
            window = job.window,
            "serving"
        );
    }
    let (first, ports) = engine.ports();
    let last = first + (ports.max(1) - 1);
    let names: Vec<&str> = jobs.iter().map(|job| job.name.as_str()).collect();
    let line = format!(
        "ready: iface={} mode={} link={} control={} udp={first}-{last} jobs={}\n",
        engine.interface().name,
        engine.attachment().mode(),
        engine.attachment().by(),
        addresses.join(","),
        names.join(",")
    );
    let mut out = std::io::stdout().lock();
    if out.write_all(line.as_bytes()).and_then(|()| out.flush()).is_err() {
        warn!("nobody reads standard output: {}", line.trim_end());
    }
}

/// Lets time pass for the jobs, and tells the service manager that the daemon works.
async fn tick(control: &Control, service: &Service, status: impl Fn() -> String) {
    let mut ticks = tokio::time::interval(TICK_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        control.tick(Instant::now());
        service.beat(&status);
    }
}

/// Stamps windows and gains into answers.
async fn pace(control: &Control, service: &Service) {
    let mut ticks = tokio::time::interval(PACE_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        control.pace(Instant::now());
        service.mark(Loop::Pace);
    }
}

/// Ends with an error when the interface or the program is gone.
async fn watch(engine: &Engine, service: &Service) -> Result<(), DaemonError> {
    loop {
        tokio::time::sleep(WATCH_INTERVAL).await;
        lock(engine).check_attached()?;
        service.mark(Loop::Watch);
    }
}

/// Writes the counters on every request.
async fn dump_on_request(args: &Run, engine: &Engine, requests: &mut Signal) {
    while requests.recv().await.is_some() {
        let Some(path) = &args.json_counters else {
            warn!("SIGUSR1 writes counters only with --json-counters FILE");
            continue;
        };
        let written =
            lock(engine).counters().map_err(DaemonError::from).and_then(|c| write_counters(path, &c));
        match written {
            Ok(()) => info!(path = %path.display(), "counters written"),
            Err(cause) => error!("{cause}"),
        }
    }
    std::future::pending().await
}

/// Takes the program off, or leaves it for the next start; tells what was counted.
fn finish(args: &Run, plan: &Plan, engine: &Engine, file: Option<&StateFile>) -> Result<(), DaemonError> {
    let mut engine = lock(engine);
    let keeps = plan.node.keep_attached;
    if keeps && engine.leave() {
        info!("program and tables stay in force for the next start");
    } else {
        if keeps {
            warn!("nothing is pinned, so nothing stays in force");
        }
        engine.detach();
        if let Some(file) = file {
            file.remove();
        }
    }
    let counters = engine.counters()?;
    for line in in_words(&counters) {
        info!("{line}");
    }
    match &args.json_counters {
        Some(path) => write_counters(path, &counters),
        None => Ok(()),
    }
}

/// Counters that are not zero, with their sentences.
fn in_words(counters: &Counters) -> Vec<String> {
    let events = Event::ALL.iter().map(|event| (counters.noted(*event), event.name(), event.sentence()));
    let refusals = Refusal::ALL.iter().map(|r| (counters.refused(*r), r.name(), r.sentence()));
    let all = events.chain(refusals).filter(|(count, _, _)| *count > 0);
    all.map(|(count, name, sentence)| {
        let mut line = String::new();
        let _ = write!(line, "{count:>12} {name}: {sentence}");
        line
    })
    .collect()
}

/// Writes a file that readers see whole or not at all.
fn write_counters(path: &Path, counters: &Counters) -> Result<(), DaemonError> {
    let failed = |source| DaemonError::Counters { path: path.into(), source };
    let text = serde_json::to_string(&CounterReport::of(counters)).map_err(|error| failed(error.into()))?;
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    std::fs::write(&temporary, text + "\n").and_then(|()| std::fs::rename(&temporary, path)).map_err(failed)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn counters_are_told_by_name_and_sentence() {
        let mut counters = Counters::default();
        counters.note(Event::Contributions);
        counters.refuse(Refusal::BadTag);
        let words = in_words(&counters);
        assert_eq!(words.len(), 2);
        assert!(
            words.iter().any(|line| line.contains("1 bad_tag: The payload failed its checksum")),
            "{words:?}"
        );
        let report = CounterReport::of(&counters);
        assert_eq!((report.refusals.len(), report.events.len()), (Refusal::COUNT, Event::COUNT));
        assert_eq!((report.refusals.get("bad_tag"), report.events.get("adds")), (Some(&1), Some(&0)));
    }

    #[test]
    fn counter_files_are_whole() {
        let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
        let path = folder.path().join("counters.json");
        assert!(write_counters(&path, &Counters::default()).is_ok());
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(serde_json::from_str::<CounterReport>(&text).is_ok_and(|report| !report.events.is_empty()));
        let nowhere = write_counters(&folder.path().join("no/such"), &Counters::default());
        assert!(matches!(nowhere, Err(DaemonError::Counters { .. })));
    }

    /// With levels answers of parents come to 64 ports more.
    #[test]
    fn ports_end_at_65535() {
        let plan_of = |line: &str| {
            let line = format!("paatp run --iface eth0 --job j --world 2 {line}");
            let cli = crate::cli::Cli::try_parse_from(line.split_whitespace());
            let Ok(crate::cli::Cli { command: crate::cli::Command::Run(run), .. }) = cli else {
                panic!("{line}")
            };
            plan(&run, &File::default())
        };
        assert!(plan_of("--port 65535").is_ok());
        assert!(matches!(plan_of("--port 65535 --ports 2"), Err(DaemonError::Ports { .. })));
        assert!(plan_of("--port 65470 --ports 2 --levels").is_ok());
        let refused = plan_of("--port 65471 --ports 2 --levels").err().map(|error| error.to_string());
        assert!(refused.is_some_and(|why| why.contains("--levels")));
    }
}
