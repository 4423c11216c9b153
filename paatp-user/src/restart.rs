//! What `paatp run` does to go on where an earlier one was killed: a place to pin, the file with its state, and the
//! membership that file and kernel make.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use nix::unistd::{AccessFlags, access};
use paatp_common::layout::LAYOUT;
use paatp_common::limits::MAX_JOBS;
use tracing::{info, warn};

use crate::config::{Jobs, NodeConfig};
use crate::control::membership::Membership;
use crate::control::state::{Restored, Sources, State, restore};
use crate::control::state_file::{Owner, Reading, StateFile, boot_id};
use crate::engine::{Aggregator, EngineError, Interface, Pinning, escape};

/// The state file of an interface.
#[must_use]
pub fn state_path(folder: &Path, interface: &str, namespace: u64) -> PathBuf {
    folder.join(format!("{}-{namespace}.json", escape(interface)))
}

/// Where to pin; none, with a warning, where that cannot be.
///
/// # Errors
/// If there is no such interface, or another daemon has it.
pub fn pinning(node: &NodeConfig, interface: &str) -> Result<Option<Pinning>, EngineError> {
    let Some(bpffs) = node.bpffs() else { return Ok(None) };
    let interface = Interface::find(interface)?;
    let folder = node.state();
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    if let Err(error) = made.and_then(|()| Ok(access(folder, AccessFlags::W_OK)?)) {
        warn!(
            "nothing is pinned: if this process is killed, running jobs end with it: {} cannot be written to ({error}), and pins without the state of the jobs are worth little; see --state-dir",
            folder.display()
        );
        return Ok(None);
    }
    Pinning::prepare(bpffs, node.runtime(), &interface)
}

/// The jobs as they are to be served, and the file that what happens to them is kept in.
///
/// # Errors
/// If the tables cannot be read or written.
pub fn membership(
    node: &NodeConfig,
    jobs: &Jobs,
    engine: &mut Aggregator,
) -> Result<(Membership, Option<StateFile>), EngineError> {
    let (size, slots) = engine.slots();
    let jobs = jobs.clone().with_table(size, slots, engine.pool_slots());
    let (port_base, ports) = engine.ports();
    let file = engine.namespace().map(|namespace| {
        let interface = engine.interface().name.clone();
        let path = state_path(node.state(), &interface, namespace);
        let layout = format!("{LAYOUT:016x}");
        let owner = Owner { boot: boot_id(), interface, namespace, tables: engine.tables(), layout };
        StateFile::new(path, owner)
    });
    let Some(file) = file else { return Ok((Membership::new(&jobs, port_base, ports), None)) };
    let state = read(&file, engine.is_adopted());
    if !engine.is_adopted() {
        return Ok((Membership::new(&jobs, port_base, ports), Some(file)));
    }
    let truth = engine.truth()?;
    let sources = Sources { jobs: &jobs, port_base, ports, state: &state, truth: &truth };
    let mut drawn = draw().into_iter();
    let restored = restore(sources, Instant::now(), &mut || drawn.next().unwrap_or(1));
    let Restored { membership, writes, notes } = restored;
    for (number, entry) in writes {
        engine.write_job(number, &entry);
    }
    notes.iter().for_each(|note| warn!("{note}"));
    for job in membership.list() {
        info!(job = job.name, generation = job.generation, "goes on");
    }
    Ok((membership, Some(file)))
}

fn read(file: &StateFile, adopted: bool) -> State {
    let path = file.path().display();
    match file.read() {
        Reading::Ours(state) => return *state,
        Reading::Nothing if adopted => warn!("there is no state file {path} for the pinned tables"),
        Reading::Nothing => {}
        Reading::Foreign(owner) => {
            let boot = if owner.boot == boot_id() { "" } else { " before the machine was started" };
            info!("the state file {path} is of other tables{boot} and is not used");
        }
        Reading::Broken(why) => match file.set_aside() {
            Some(aside) => {
                warn!("the state file {path} cannot be used ({why}); it is {} now", aside.display())
            }
            None => warn!("the state file {path} cannot be used ({why})"),
        },
    }
    State::default()
}

/// Numbers for generations that have to be ended, one for each job that there can be, twice.
fn draw() -> Vec<u32> {
    let mut bytes = vec![0; 4 * 2 * MAX_JOBS];
    if let Err(error) = getrandom::fill(&mut bytes) {
        warn!("the kernel gave no randomness: {error}");
    }
    bytes.chunks_exact(4).filter_map(|bytes| Some(u32::from_le_bytes(bytes.try_into().ok()?))).collect()
}
