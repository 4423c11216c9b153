//! Tables, program and link in a BPF file system, so that they outlive the daemon.
//!
//! ```text
//! /sys/fs/bpf/paatp/eth0/0123456789abcdef-4026531840/     interface / layout - network namespace
//!     NODE JOBS RANKS PROGRESS COUNTERS SLOTS WIDE_SLOTS   maps, by their names in the object
//!     program-89abcdef01234567                             the program, by the digest of its object
//!     link                                                 what holds it on the interface
//! ```
//!
//! A set is made under another name and renamed, so it is whole or not there. One that cannot be used stays as it is,
//! and the next is made beside it (`…-2`, up to [`MAX_SETS`]). Only what this process made or took over is removed.

use std::fmt;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use aya::maps::{Map, MapData, MapType};
use aya::programs::ProgramInfo;
use nix::fcntl::{Flock, RenameFlags, renameat2};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};
use nix::unistd::{AccessFlags, access, geteuid};
use paatp_common::counter::Counters;
use paatp_common::job::{JobEntry, Node, RankEntry};
use paatp_common::layout::LAYOUT;
use paatp_common::levels::{Above, Link};
use paatp_common::limits::{MAX_JOBS, MAX_RANKS};
use paatp_common::progress::Progress;
use thiserror::Error;
use tracing::warn;

use crate::config::SlotSize;

use super::bpf::{self, Kind, LinkFacts};
use super::lock::try_lock;
use super::maps::Maps;

/// Where BPF file systems are mounted.
pub const DEFAULT_BPFFS: &str = "/sys/fs/bpf";
/// Our folder in it.
pub const FOLDER: &str = "paatp";
/// Name of the link's pin.
pub const LINK: &str = "link";
/// What the name of a program's pin begins with.
const PROGRAM: &str = "program-";
/// What the name of a set begins with that is being made.
pub const UNFINISHED: &str = "new-";
/// Sets of one layout on one interface, those that cannot be used included: each holds a table of slots.
pub const MAX_SETS: u32 = 4;
/// Attempts to make a folder whose parent another daemon removes because it was empty.
const ATTEMPTS: usize = 16;

/// The maps of a set: name, type, bytes of a value, and entries where they do not depend on the jobs.
const SHAPES: [(&str, MapType, usize, Option<usize>); 9] = [
    ("NODE", MapType::Array, size_of::<Node>(), Some(1)),
    ("JOBS", MapType::Array, size_of::<JobEntry>(), Some(MAX_JOBS)),
    ("RANKS", MapType::Array, size_of::<RankEntry>(), Some(MAX_JOBS * MAX_RANKS)),
    ("PROGRESS", MapType::Array, size_of::<Progress>(), Some(MAX_JOBS)),
    ("LINKS", MapType::Array, size_of::<Link>(), Some(MAX_JOBS)),
    ("ABOVE", MapType::Array, size_of::<Above>(), Some(MAX_JOBS)),
    ("COUNTERS", MapType::PerCpuArray, size_of::<Counters>(), Some(1)),
    ("SLOTS", MapType::Array, SlotSize::Standard.bytes(), None),
    ("WIDE_SLOTS", MapType::Array, SlotSize::Wide.bytes(), None),
];

/// Nothing can be pinned there.
#[derive(Debug, Error)]
pub enum PinError {
    /// No BPF file system.
    #[error("{0} is no BPF file system (`mount -t bpf bpf {0}` makes it one)")]
    NoBpffs(PathBuf),
    /// It is read-only, or this user may not write.
    #[error("{path} cannot be written to ({error}); systemd's ProtectKernelTunables= makes it read-only")]
    ReadOnly {
        /// The mount.
        path: PathBuf,
        /// What the kernel said.
        error: io::Error,
    },
    /// Somebody else's folder.
    #[error("{0} is not a folder that only this user can write to, so what lies in it is not trusted")]
    NotOurs(PathBuf),
    /// All names are taken.
    #[error(
        "{0} holds {MAX_SETS} sets that cannot be used; `paatp cleanup` shows them and removes those that are ours"
    )]
    Full(PathBuf),
    /// The kernel refused.
    #[error("cannot {what} {path}: {error}")]
    Refused {
        /// What was to be done.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// What it said.
        error: io::Error,
    },
}

/// Checks that a BPF file system is mounted at a path, and that this process can write to it.
///
/// # Errors
/// What it is instead.
pub fn check_bpffs(path: &Path) -> Result<(), PinError> {
    if !statfs(path).is_ok_and(|found| found.filesystem_type() == BPF_FS_MAGIC) {
        return Err(PinError::NoBpffs(path.into()));
    }
    access(path, AccessFlags::W_OK)
        .map_err(|error| PinError::ReadOnly { path: path.into(), error: error.into() })
}

/// A name of an interface as a name in a BPF file system, where no dot may stand.
#[must_use]
pub fn escape(name: &str) -> String {
    name.replace('%', "%25").replace('.', "%2e")
}

/// The interface that a folder is for.
#[must_use]
pub fn unescape(name: &str) -> String {
    name.replace("%2e", ".").replace("%25", "%")
}

/// The number of this thread's network namespace.
///
/// # Errors
/// Without `/proc`.
pub fn network_namespace() -> io::Result<u64> {
    fs::metadata("/proc/thread-self/ns/net").map(|file| file.ino())
}

/// The name of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SetName {
    /// Layout of its tables.
    pub layout: u64,
    /// The network namespace that the interface is in.
    pub namespace: u64,
    /// Which of those that there are; 1 is not told.
    pub number: u32,
}

impl fmt::Display for SetName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}-{}", self.layout, self.namespace)?;
        if self.number > 1 { write!(f, "-{}", self.number) } else { Ok(()) }
    }
}

impl SetName {
    /// Reads a name.
    #[must_use]
    pub fn parse(text: &str) -> Option<SetName> {
        let mut parts = text.split('-');
        let layout = u64::from_str_radix(parts.next()?, 16).ok()?;
        let namespace = parts.next()?.parse().ok()?;
        let number = parts.next().map_or(Some(1), |number| number.parse().ok())?;
        let name = SetName { layout, namespace, number };
        // Only as it would be written.
        (parts.next().is_none() && name.to_string() == text).then_some(name)
    }
}

/// Where one interface's sets are.
#[derive(Clone, Debug)]
pub struct Place {
    root: PathBuf,
    folder: PathBuf,
    namespace: u64,
}

/// A set whose folder this process has locked.
#[derive(Debug)]
pub struct Set {
    path: PathBuf,
    _lock: Flock<File>,
}

/// A set that can be taken over.
#[derive(Debug)]
pub struct Found {
    /// The set.
    pub set: Set,
    /// Its maps.
    pub maps: Maps,
    /// Its link.
    pub link: LinkFacts,
    /// The digest of the object that the link's program is from.
    pub build: String,
    /// Name of the program in that object.
    pub program: String,
}

/// Why a set cannot be taken over.
#[derive(Debug)]
pub enum Unusable {
    /// A living process that is not ours has it.
    Alive,
    /// It is not what it should be.
    Broken(String),
}

impl Place {
    /// The place for an interface of this thread's network namespace in a BPF file system.
    ///
    /// # Errors
    /// If nothing can be pinned there.
    pub fn new(bpffs: &Path, interface: &str) -> Result<Place, PinError> {
        check_bpffs(bpffs)?;
        let root = bpffs.join(FOLDER);
        let refused =
            |error| PinError::Refused { what: "see the network namespace at", path: "/proc".into(), error };
        let namespace = network_namespace().map_err(refused)?;
        let place = Place { folder: root.join(escape(interface)), root, namespace };
        for folder in [&place.root, &place.folder] {
            check_owner(folder)?;
        }
        Ok(place)
    }

    /// The network namespace.
    #[must_use]
    pub const fn namespace(&self) -> u64 {
        self.namespace
    }

    /// The sets of this layout and namespace, in the order of their numbers.
    #[must_use]
    pub fn sets(&self) -> Vec<PathBuf> {
        let mut names: Vec<SetName> =
            names(&self.folder).iter().filter_map(|name| SetName::parse(name)).collect();
        names.retain(|name| name.layout == LAYOUT && name.namespace == self.namespace);
        names.sort_unstable();
        names.iter().map(|name| self.folder.join(name.to_string())).collect()
    }

    /// The pinned link that holds a program on an interface, with its layout if that can be told.
    #[must_use]
    pub fn holder(&self, interface: u32, program: Option<u32>) -> Option<(PathBuf, Option<u64>)> {
        let holders = self.all(interface, program).into_iter().filter(|(_, _, holds)| *holds);
        holders.map(|(path, layout, _)| (path.join(LINK), layout)).next()
    }

    /// All sets of the interface, of whatever namespace and layout: the folder, the layout that its name tells, and whether
    /// its link holds the program.
    #[must_use]
    pub fn all(&self, interface: u32, program: Option<u32>) -> Vec<(PathBuf, Option<u64>, bool)> {
        let set = |name: String| {
            let path = self.folder.join(&name);
            let held = bpf::open(&path.join(LINK)).and_then(|link| bpf::link_facts(link.as_fd()));
            let holds = |facts: LinkFacts| {
                facts.interface == interface && program.is_none_or(|id| id == facts.program)
            };
            (path, SetName::parse(&name).map(|name| name.layout), held.is_ok_and(holds))
        };
        names(&self.folder).into_iter().map(set).collect()
    }

    /// Pins what `fill` pins in a folder, which then gets its name.
    ///
    /// # Errors
    /// What could not be done; nothing is left of it then.
    pub fn create(&self, fill: impl FnOnce(&Path) -> Result<(), PinError>) -> Result<Set, PinError> {
        let own = |number| SetName { layout: LAYOUT, namespace: self.namespace, number };
        let taken = names(&self.folder);
        let mut free = (1..=MAX_SETS).map(own).filter(|name| !taken.contains(&name.to_string()));
        let Some(name) = free.next() else { return Err(PinError::Full(self.folder.clone())) };
        let unfinished = self.folder.join(format!("{UNFINISHED}{name}-{}", std::process::id()));
        let refused = |what, path: &Path, error| PinError::Refused { what, path: path.into(), error };
        self.make(&unfinished).map_err(|error| refused("make the folder", &unfinished, error))?;
        let path = self.folder.join(name.to_string());
        let filled = fill(&unfinished).and_then(|()| {
            let lock = File::open(&unfinished).and_then(try_lock);
            let lock = lock.and_then(|lock| lock.map_err(|_| io::ErrorKind::ResourceBusy.into()));
            let lock = lock.map_err(|error| refused("lock", &unfinished, error))?;
            let nowhere = nix::fcntl::AT_FDCWD;
            renameat2(nowhere, &unfinished, nowhere, &path, RenameFlags::RENAME_NOREPLACE)
                .map_err(|error| refused("name", &path, error.into()))?;
            Ok(Set { path: path.clone(), _lock: lock })
        });
        if filled.is_err() {
            remove_known(&unfinished);
            self.remove_empty();
        }
        filled
    }

    fn make(&self, path: &Path) -> io::Result<()> {
        let mut builder = DirBuilder::new();
        builder.mode(0o700);
        let mut last = io::ErrorKind::NotFound.into();
        for _ in 0..ATTEMPTS {
            for folder in [&self.root, &self.folder] {
                match builder.create(folder) {
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                    // The other daemon's removal again.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    other => other?,
                }
            }
            match builder.create(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => last = error,
                other => return other,
            }
        }
        Err(last)
    }

    /// Removes our folders if nothing is in them.
    pub fn remove_empty(&self) {
        let _ = fs::remove_dir(&self.folder).and_then(|()| fs::remove_dir(&self.root));
    }
}

impl Set {
    /// Its folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where its link is.
    #[must_use]
    pub fn link(&self) -> PathBuf {
        self.path.join(LINK)
    }

    /// Where a program is.
    #[must_use]
    pub fn program(&self, build: &str) -> PathBuf {
        self.path.join(program_name(build))
    }

    /// Removes pins of programs but the one of this build.
    pub fn forget_other_programs(&self, build: &str) {
        let keep = program_name(build);
        for name in names(&self.path).iter().filter(|name| name.starts_with(PROGRAM) && **name != keep) {
            let _ = fs::remove_file(self.path.join(name));
        }
    }

    /// Removes it; what is not ours in it stays.
    pub fn remove(self) {
        remove_known(&self.path);
        let left = names(&self.path);
        if !left.is_empty() {
            warn!(path = %self.path.display(), ?left, "the folder is not empty; what is not of paatp stays");
        }
    }

    /// Opens a set for an interface whose program is `program`, if rtnetlink told.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn open(path: &Path, interface: u32, program: Option<u32>) -> Result<Found, Unusable> {
        let broken = |what: String| Unusable::Broken(what);
        check_owner(path).map_err(|error| broken(error.to_string()))?;
        let folder = File::open(path).map_err(|error| broken(error.to_string()))?;
        let lock = try_lock(folder).map_err(|error| broken(format!("it cannot be locked: {error}")))?;
        let lock = lock.map_err(|_| Unusable::Alive)?;
        let mut maps = Maps::default();
        for shape in &SHAPES {
            maps.insert(shape.0, open_map(path, shape).map_err(broken)?);
        }
        let link = bpf::open(&path.join(LINK)).and_then(|link| bpf::link_facts(link.as_fd()));
        let link = link.map_err(|error| broken(format!("its link cannot be used ({error})")))?;
        if link.interface == 0 {
            return Err(broken(
                "its link holds no interface any more: that was deleted, or the link detached".into(),
            ));
        }
        if link.interface != interface || program.is_some_and(|id| id != link.program) {
            let index = link.interface;
            return Err(broken(format!(
                "its link holds another interface (index {index}), or other programs run here"
            )));
        }
        let (build, program) = open_program(path, link.program, &maps).map_err(broken)?;
        Ok(Found { set: Set { path: path.into(), _lock: lock }, maps, link, build, program })
    }
}

/// Name of a program's pin.
#[must_use]
pub fn program_name(build: &str) -> String {
    format!("{PROGRAM}{build}")
}

/// A folder, if it is there, is this user's and nobody else may write to it.
fn check_owner(folder: &Path) -> Result<(), PinError> {
    match fs::symlink_metadata(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Ok(found) if found.is_dir() && found.uid() == geteuid().as_raw() && found.mode() & 0o022 == 0 => {
            Ok(())
        }
        _ => Err(PinError::NotOurs(folder.into())),
    }
}

/// The names in a folder, sorted.
#[must_use]
pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

/// What a file in a set must be by its name; none for names that no set has.
#[must_use]
pub fn expected(name: &str) -> Option<Kind> {
    if name == LINK {
        Some(Kind::Link)
    } else if name.starts_with(PROGRAM) {
        Some(Kind::Program)
    } else {
        SHAPES.iter().any(|shape| shape.0 == name).then_some(Kind::Map)
    }
}

/// Removes what a set has from a folder, and the folder if nothing else is in it. The link last: until then the
/// interface has its tables.
pub fn remove_known(folder: &Path) {
    let mut ours: Vec<String> = names(folder);
    ours.retain(|name| {
        let open = || bpf::open(&folder.join(name)).map(|file| bpf::kind(file.as_fd())).ok();
        expected(name).is_some_and(|kind| open() == Some(kind))
    });
    ours.sort_by_key(|name| name == LINK);
    for name in ours {
        let _ = fs::remove_file(folder.join(name));
    }
    let _ = fs::remove_dir(folder);
}

fn open_map(
    folder: &Path,
    (name, kind, bytes, entries): &(&'static str, MapType, usize, Option<usize>),
) -> Result<Map, String> {
    let file = bpf::open(&folder.join(name)).map_err(|error| format!("{name} cannot be opened ({error})"))?;
    if bpf::kind(file.as_fd()) != Kind::Map {
        return Err(format!("{name} is no map"));
    }
    let data = MapData::from_fd(file).map_err(|error| format!("{name} cannot be used ({error})"))?;
    let info = data.info().map_err(|error| format!("{name} cannot be used ({error})"))?;
    let found = (info.map_type().ok(), info.key_size(), info.value_size() as usize);
    if found != (Some(*kind), 4, *bytes)
        || entries.is_some_and(|wanted| wanted != info.max_entries() as usize)
    {
        return Err(format!("{name} is a map of another type or size"));
    }
    Ok(match kind {
        MapType::PerCpuArray => Map::PerCpuArray(data),
        _ => Map::Array(data),
    })
}

/// The pin of the program that a link holds: the digest in its name, and the program's name. Its maps must be those of the
/// set.
fn open_program(folder: &Path, number: u32, maps: &Maps) -> Result<(String, String), String> {
    let programs = names(folder).into_iter().filter_map(|name| {
        let build = name.strip_prefix(PROGRAM)?.to_owned();
        let path = folder.join(&name);
        let is_program = bpf::kind(bpf::open(&path).ok()?.as_fd()) == Kind::Program;
        let info = is_program.then(|| ProgramInfo::from_pin(&path).ok())??;
        (info.id() == number).then_some((build, info))
    });
    let Some((build, info)) = programs.into_iter().next() else {
        return Err("the program that its link holds is not in it".into());
    };
    let used = info.map_ids().ok().flatten().unwrap_or_default();
    let ours = maps.numbers();
    if !used.iter().all(|id| ours.contains(id)) {
        return Err("its program uses other tables".into());
    }
    Ok((build, info.name_as_str().unwrap_or_default().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_of_sets_are_read_as_they_are_written() {
        let name = SetName { layout: 0x12, namespace: 4_026_531_840, number: 1 };
        assert_eq!(name.to_string(), "0000000000000012-4026531840");
        assert_eq!(SetName { number: 3, ..name }.to_string(), "0000000000000012-4026531840-3");
        for text in
            ["", "12-1", "0000000000000012-1-1", "0000000000000012-01", "0000000000000012-1-2-3", "new-x"]
        {
            assert_eq!(SetName::parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn every_name_of_a_set_survives(layout: u64, namespace: u64, number in 1..=MAX_SETS) {
            let name = SetName { layout, namespace, number };
            prop_assert_eq!(SetName::parse(&name.to_string()), Some(name));
        }

        /// No dot, which a BPF file system refuses, and no two interfaces have one folder.
        #[test]
        fn every_interface_has_a_folder(name in "[a-z0-9.%2e]{1,15}") {
            prop_assert_eq!(unescape(&escape(&name)), name.clone());
            prop_assert!(!escape(&name).contains('.'));
        }
    }

    /// A map that is added to the object belongs into the table of shapes, and to what a new program is loaded for.
    #[test]
    fn all_maps_of_the_object_have_a_shape() {
        use object::{Object, ObjectSection, ObjectSymbol};
        let Ok(file) = object::File::parse(crate::object::OBJECT) else { return };
        let section = file.sections().find(|section| section.name() == Ok("maps")).map(|maps| maps.index());
        let symbols = file
            .symbols()
            .filter(|symbol| symbol.section_index() == section && !symbol.name().is_ok_and(str::is_empty));
        let mut maps: Vec<&str> = symbols.filter_map(|symbol| symbol.name().ok()).collect();
        let mut shapes: Vec<&str> = SHAPES.iter().map(|shape| shape.0).collect();
        let mut loaded = super::super::aggregator::map::ALL;
        maps.sort_unstable();
        shapes.sort_unstable();
        loaded.sort_unstable();
        assert_eq!((maps, shapes.as_slice()), (shapes.clone(), loaded.as_slice()));
    }

    #[test]
    fn what_is_no_bpffs_is_told() {
        let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
        assert!(matches!(check_bpffs(folder.path()), Err(PinError::NoBpffs(_))));
        assert!(matches!(check_bpffs(&folder.path().join("nothing")), Err(PinError::NoBpffs(_))));
    }

    #[test]
    fn folders_of_others_are_not_trusted() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
        assert!(check_owner(folder.path()).is_ok() && check_owner(&folder.path().join("nothing")).is_ok());
        assert!(fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o722)).is_ok());
        assert!(matches!(check_owner(folder.path()), Err(PinError::NotOurs(_))));
        let file = folder.path().join("file");
        assert!(fs::write(&file, "").is_ok());
        assert!(matches!(check_owner(&file), Err(PinError::NotOurs(_))));
    }
}
