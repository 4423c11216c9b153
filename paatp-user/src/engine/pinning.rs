//! Where a daemon pins what it loads, and what it finds there. Trouble with pins never stops a start: it runs without.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use aya::programs::Xdp;
use tracing::warn;

use super::attach::{AttachedBy, Attachment};
use super::error::EngineError;
use super::interface::Interface;
use super::lock::{Lock, Locked};
use super::maps::Maps;
use super::netlink;
use super::pins::{DEFAULT_BPFFS, Found, LINK, PinError, Place, Set, Unusable, escape};

/// What is at stake, for warnings.
const WITHOUT: &str = "nothing is pinned: if this process is killed, running jobs end with it";

/// A place for pins, locked for this process. Dropping it removes the lock, and folders that are empty.
#[derive(Debug)]
pub struct Pinning {
    place: Place,
    _lock: Lock,
    interface: String,
}

/// The file that a daemon locks for an interface of a network namespace.
#[must_use]
pub fn lock_file(runtime: &Path, interface: &str, namespace: u64) -> PathBuf {
    runtime.join(format!("{}-{namespace}.lock", escape(interface)))
}

impl Pinning {
    /// Prepares a BPF file system for an interface; none, with a warning, if nothing can be pinned there.
    ///
    /// # Errors
    /// If another process has the interface.
    pub fn prepare(
        bpffs: &Path,
        runtime: &Path,
        interface: &Interface,
    ) -> Result<Option<Pinning>, EngineError> {
        let place = match Place::new(bpffs, &interface.name) {
            Ok(place) => place,
            Err(why) => {
                warn!("{WITHOUT}: {why}");
                return Ok(None);
            }
        };
        let path = lock_file(runtime, &interface.name, place.namespace());
        let made = DirBuilder::new().recursive(true).mode(0o755).create(runtime);
        match made.and_then(|()| Lock::take(&path)) {
            Ok(Locked::Ours(lock)) => {
                Ok(Some(Pinning { place, _lock: lock, interface: interface.name.clone() }))
            }
            Ok(Locked::Taken(pid)) => {
                Err(EngineError::Locked { interface: interface.name.clone(), pid, path })
            }
            Err(why) => {
                warn!("{WITHOUT}: cannot lock {} ({why}); see --runtime-dir", path.display());
                Ok(None)
            }
        }
    }

    /// The network namespace.
    #[must_use]
    pub const fn namespace(&self) -> u64 {
        self.place.namespace()
    }

    /// The set that can be taken over; those that cannot are told and stay.
    ///
    /// # Errors
    /// If a process that is not to be seen from here has one.
    pub fn find(&self, interface: &Interface) -> Result<Option<Found>, EngineError> {
        let program = match netlink::query(interface.index) {
            Ok(state) => state.xdp.map_or(Some(0), |xdp| xdp.program),
            Err(_) => None,
        };
        for path in self.place.sets() {
            match Set::open(&path, interface.index, program) {
                Ok(found) => return Ok(Some(found)),
                Err(Unusable::Alive) => {
                    let interface = self.interface.clone();
                    return Err(EngineError::Locked { interface, pid: None, path });
                }
                Err(Unusable::Broken(why)) => warn!(
                    "pinned tables at {} cannot be used and stay as they are: {why}; `paatp cleanup` removes them",
                    path.display()
                ),
            }
        }
        Ok(None)
    }

    /// Pins what was loaded and attached; none, with a warning, if that cannot be. The attachment is then without a pin,
    /// or off.
    pub fn pin(&self, maps: &Maps, xdp: &mut Xdp, build: &str, attachment: &mut Attachment) -> Option<Set> {
        if attachment.by() == AttachedBy::Netlink {
            warn!("{WITHOUT}: this kernel holds the program without a link, which could be pinned");
            return None;
        }
        let refused = |path: &Path, error: &(dyn std::error::Error + 'static)| PinError::Refused {
            what: "pin",
            path: path.into(),
            error: super::error::error_number(error)
                .map_or_else(|| std::io::Error::other(error.to_string()), std::io::Error::from_raw_os_error),
        };
        let made = self.place.create(|folder| {
            for (name, map) in maps.iter() {
                let path = folder.join(name);
                map.pin(&path).map_err(|error| refused(&path, &error))?;
            }
            let path = folder.join(super::pins::program_name(build));
            xdp.pin(&path).map_err(|error| refused(&path, &error))?;
            let path = folder.join(LINK);
            attachment.pin(&path).map_err(|error| refused(&path, &error))
        });
        match made {
            Ok(set) => {
                attachment.set_pin(Some(set.link()));
                Some(set)
            }
            Err(why) => {
                attachment.set_pin(None);
                warn!("{WITHOUT}: {why}");
                None
            }
        }
    }
}

impl Drop for Pinning {
    fn drop(&mut self) {
        // Before the lock goes, so that no other daemon is making pins meanwhile.
        self.place.remove_empty();
    }
}

/// What holds an interface if a pinned link does that cannot be taken over.
pub fn held(pinning: Option<&Pinning>, interface: &Interface) -> Result<(), EngineError> {
    let Some(program) = netlink::query(interface.index).ok().and_then(|state| state.xdp) else {
        return Ok(());
    };
    let elsewhere = || Place::new(Path::new(DEFAULT_BPFFS), &interface.name).ok();
    let place = pinning.map(|pinning| pinning.place.clone()).or_else(elsewhere);
    match place.and_then(|place| place.holder(interface.index, program.program)) {
        Some((path, layout)) => {
            Err(EngineError::HeldByPins { interface: interface.name.clone(), path, layout })
        }
        None => Ok(()),
    }
}
