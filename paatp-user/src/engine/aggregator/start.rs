//! How an aggregator starts: from an object, or from what an earlier daemon has left in the kernel.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::Path;

use aya::maps::Array;
use aya::programs::Xdp;
use aya::{Ebpf, EbpfError, EbpfLoader};
use paatp_common::job::Node;
use paatp_common::pool::Pool;
use tracing::{info, warn};

use crate::config::{Jobs, SlotSize};
use crate::engine::attach::{AttachedMode, Attachment};
use crate::engine::capabilities::{Capabilities, refuses_bpf};
use crate::engine::error::{Context, EngineError, Step, error_number, explain, verifier_log};
use crate::engine::interface::Interface;
use crate::engine::maps::Maps;
use crate::engine::pinning::{self, Pinning};
use crate::engine::pins::{Found, Set};
use crate::engine::{bpf, layout, netlink};

use super::{Aggregator, Options, Raw, array, array_mut, job_table, map, no_map, table_error};

/// Names of the object's programs: for slots of a size, without and with levels.
const PROGRAMS: [(SlotSize, bool, &str); 4] = [
    (SlotSize::Standard, false, "aggregate"),
    (SlotSize::Wide, false, "aggregate_wide"),
    (SlotSize::Standard, true, "levels"),
    (SlotSize::Wide, true, "levels_wide"),
];

/// Which of them a name is; the first one if it is none.
fn kind_of(name: &str) -> (SlotSize, bool) {
    let found = PROGRAMS.iter().find(|program| program.2 == name);
    found.map_or((SlotSize::Standard, false), |program| (program.0, program.1))
}

impl Aggregator {
    /// Takes over what an earlier daemon has pinned; without that loads an object, fills in its tables and attaches its
    /// program, and pins all of it.
    ///
    /// # Errors
    /// What failed, why, and what to do about it.
    pub fn start(
        object: &[u8],
        options: &Options,
        jobs: &Jobs,
        pinning: Option<Pinning>,
    ) -> Result<Aggregator, EngineError> {
        if object.is_empty() {
            return Err(EngineError::NoObject);
        }
        layout::check(object)?;
        let interface = Interface::find(&options.interface)?;
        let over_v6 = interface.check_mtu(jobs.largest_lanes())?;
        let context = Context {
            interface: interface.name.clone(),
            mtu: interface.mtu,
            capabilities: Capabilities::of_this_process(),
            seccomp: refuses_bpf(),
            slot_memory: jobs.slot_memory(),
            ..Context::default()
        };
        let found = pinning.as_ref().map(|pinning| pinning.find(&interface)).transpose()?.flatten();
        let mut aggregator = match found {
            Some(found) => Self::adopt(object, options, found, interface, &context)?,
            None => Self::fresh(object, options, jobs, pinning.as_ref(), interface, &context)?,
        };
        aggregator.pinning = pinning;
        aggregator.tell(over_v6);
        Ok(aggregator)
    }

    fn fresh(
        object: &[u8],
        options: &Options,
        jobs: &Jobs,
        pinning: Option<&Pinning>,
        interface: Interface,
        context: &Context,
    ) -> Result<Aggregator, EngineError> {
        pinning::held(pinning, &interface)?;
        let (size, slots) = (jobs.slot_size(), table_slots(jobs));
        let mut ebpf = load(object, &Tables::New { size, slots }, context)?;
        let mut maps = Maps::take(&mut ebpf);
        let mut node = interface.node(options.port_base, options.ports);
        node.pool = Pool { first: 0, slots: jobs.pool_slots() };
        set_node(&mut maps, node)?;
        let xdp = program(&mut ebpf, size, options.levels, context)?;
        let program = xdp.fd().ok().and_then(|fd| fd.as_fd().try_clone_to_owned().ok());
        let mut attachment = Attachment::new(xdp, interface.index, options.mode, context)?;
        let set = pinning.and_then(|pins| pins.pin(&maps, xdp, &layout::build(object), &mut attachment));
        if !attachment.is_attached() {
            attachment = Attachment::new(xdp, interface.index, options.mode, context)?;
        }
        Ok(Aggregator {
            attachment,
            jobs: job_table(&maps)?,
            program,
            maps,
            members: BTreeMap::new(),
            interface,
            size,
            slots,
            node,
            set,
            pinning: None,
            adopted: false,
            stays: false,
            neighbourhood: None,
        })
    }

    /// Goes on with what an earlier daemon has left on the interface. Packets are answered all the while.
    fn adopt(
        object: &[u8],
        options: &Options,
        found: Found,
        interface: Interface,
        context: &Context,
    ) -> Result<Aggregator, EngineError> {
        let Found { set, mut maps, link, build, program: name } = found;
        info!(interface = interface.name, set = %set.path().display(), "taking over what an earlier start has pinned");
        let (size, levels) = kind_of(&name);
        // A program with levels stays one: to another the sum of a rack, which waits for its parent, were a result.
        let options = &Options { levels: options.levels || levels, ..options.clone() };
        let slots = maps.entries(if size == SlotSize::Wide { map::WIDE_SLOTS } else { map::SLOTS });
        let slots = slots.ok_or_else(|| no_map(map::SLOTS))?;
        let mode = attached_mode(&interface);
        let adopted = Attachment::adopt(&set.link(), interface.index, mode, link.program);
        let mut attachment = adopted.map_err(|error| {
            explain(Step::Attach { native: mode == AttachedMode::Native }, error_number(&error), context)
        })?;
        let wanted = mode.is(options.mode);
        let ours = layout::build(object);
        if build != ours || !wanted || levels != options.levels {
            // What cannot be changed goes on as it is.
            change_program(object, options, &set, size, &mut attachment, context)?;
        }
        set.forget_other_programs(&ours);
        let program = bpf::open(&set.program(&ours)).ok();
        let node = adopt_node(&mut maps, &interface, options)?;
        let mut aggregator = Aggregator {
            attachment,
            jobs: job_table(&maps)?,
            program,
            maps,
            members: BTreeMap::new(),
            interface,
            size,
            slots,
            node,
            set: Some(set),
            pinning: None,
            adopted: true,
            stays: true,
            neighbourhood: None,
        };
        aggregator.members = (0u16..)
            .zip(aggregator.truth()?)
            .filter(|(_, (entry, _))| entry.generation != 0)
            .map(|(number, (_, ranks))| (number, ranks))
            .collect();
        Ok(aggregator)
    }

    /// Says once what was started and what may surprise.
    fn tell(&self, over_v6: Option<u32>) {
        let (slots, bytes) = (u64::from(self.slots), self.size.bytes());
        let interface = self.interface.name.as_str();
        info!(
            "{slots} slots x {bytes} bytes = {:.1} MiB in the kernel",
            (slots * bytes as u64) as f64 / 1048576.0
        );
        info!(
            interface,
            mode = %self.attachment.mode(),
            held_by = %self.attachment.by(),
            program = self.attachment.program(),
            mtu = self.interface.mtu,
            "attached"
        );
        if let Some(lanes) = over_v6 {
            info!(interface, "workers over IPv6 need jobs of at most {lanes} lanes at this MTU");
        }
        if !self.interface.left_out().is_empty() {
            warn!(
                interface,
                served = ?self.interface.served(),
                left_out = ?self.interface.left_out(),
                "the interface has more addresses than the program answers for; workers must use one of those served"
            );
        }
        let surroundings = self.surroundings();
        for notice in surroundings.look() {
            warn!(interface, "{}", notice.sentence);
        }
        if surroundings.native && surroundings.has_hidden_peer() {
            warn!(
                interface,
                "native XDP on veth: answers arrive only if the other end runs a native XDP program as well (one that passes everything will do)"
            );
        }
    }
}

/// Puts this object's program in the place of the one that was taken over: by an update of its link, or, where it is to run
/// elsewhere, by another link.
fn change_program(
    object: &[u8],
    options: &Options,
    set: &Set,
    size: SlotSize,
    attachment: &mut Attachment,
    context: &Context,
) -> Result<(), EngineError> {
    let mut ebpf = load(object, &Tables::Pinned(set.path()), context)?;
    let xdp = program(&mut ebpf, size, options.levels, context)?;
    let pin = set.program(&layout::build(object));
    // One that no link holds: it was pinned and then the daemon was killed.
    let _ = std::fs::remove_file(&pin);
    let refused =
        |error: &(dyn std::error::Error + 'static)| explain(Step::Load, error_number(error), context);
    xdp.pin(&pin).map_err(|error| refused(&error))?;
    if attachment.mode().is(options.mode) {
        attachment.replace(xdp, context)?;
        info!(interface = context.interface, "the program was replaced by this build's");
        return Ok(());
    }
    warn!(
        interface = context.interface,
        "the program runs in {} mode; it is attached anew as --xdp-mode says, and packets of that moment are lost (workers repeat them)",
        attachment.mode()
    );
    attachment.detach();
    *attachment = Attachment::new(xdp, attachment.interface(), options.mode, context)?;
    attachment.pin(&set.link()).map_err(|error| refused(&error))
}

/// The addresses that the interface has now, with the ports that members of running jobs know.
fn adopt_node(maps: &mut Maps, interface: &Interface, options: &Options) -> Result<Node, EngineError> {
    let old = array::<Raw<Node>>(maps, map::NODE)?;
    let old = old.get(&0, 0).map_err(|source| table_error(map::NODE, source))?.0;
    let mut node = interface.node(options.port_base, options.ports);
    node.pool = old.pool;
    if old.port_count != 0 && (old.port_base, old.port_count) != (node.port_base, node.port_count) {
        warn!(
            "data goes on at UDP ports {}+{}, which running jobs know, instead of {}+{}; stop paatp (SIGTERM) and start it to change that",
            old.port_base, old.port_count, node.port_base, node.port_count
        );
        (node.port_base, node.port_count) = (old.port_base, old.port_count);
    }
    if node != old {
        set_node(maps, node)?;
    }
    Ok(node)
}

fn set_node(maps: &mut Maps, node: Node) -> Result<(), EngineError> {
    let mut table: Array<_, Raw<Node>> = array_mut(maps, map::NODE)?;
    table.set(0, Raw(node), 0).map_err(|source| table_error(map::NODE, source))
}

/// Where the program on an interface runs, as rtnetlink has it.
fn attached_mode(interface: &Interface) -> AttachedMode {
    /// `XDP_ATTACHED_SKB` of `linux/if_link.h`.
    const IN_THE_STACK: u8 = 2;
    let state = netlink::query(interface.index).ok().and_then(|state| state.xdp);
    match state {
        Some(xdp) if xdp.attached == IN_THE_STACK => AttachedMode::Generic,
        _ => AttachedMode::Native,
    }
}

/// Creates the tables for these jobs and lets the verifier judge the program, attaches nothing and keeps nothing.
///
/// # Errors
/// As [`Aggregator::start`] would fail.
pub fn check_program(object: &[u8], jobs: &Jobs) -> Result<(), EngineError> {
    if object.is_empty() {
        return Err(EngineError::NoObject);
    }
    let context = Context {
        capabilities: Capabilities::of_this_process(),
        seccomp: refuses_bpf(),
        slot_memory: jobs.slot_memory(),
        ..Context::default()
    };
    layout::check(object)?;
    let tables = Tables::New { size: jobs.slot_size(), slots: table_slots(jobs) };
    let mut ebpf = load(object, &tables, &context)?;
    program(&mut ebpf, jobs.slot_size(), jobs.levels(), &context).map(|_| ())
}

/// Checked by `Jobs`: all slots together are far below 2^32.
fn table_slots(jobs: &Jobs) -> u32 {
    u32::try_from(jobs.slots()).unwrap_or(u32::MAX)
}

/// The tables that a program is loaded for.
enum Tables<'a> {
    /// New ones, for so many slots.
    New { size: SlotSize, slots: u32 },
    /// Those pinned in a folder.
    Pinned(&'a Path),
}

fn load(object: &[u8], tables: &Tables<'_>, context: &Context) -> Result<Ebpf, EngineError> {
    let mut loader = EbpfLoader::new();
    // The program uses no kernel structure, so the kernel's own type information is of no use (and may be missing).
    loader.btf(None);
    match tables {
        Tables::New { size, slots } => {
            let (standard, wide) = match size {
                SlotSize::Standard => (*slots, 1),
                SlotSize::Wide => (1, *slots),
            };
            loader.map_max_entries(map::SLOTS, standard).map_max_entries(map::WIDE_SLOTS, wide);
        }
        Tables::Pinned(folder) => {
            for name in map::ALL {
                loader.map_pin_path(name, folder.join(name));
            }
        }
    }
    loader.load(object).map_err(|error| match error {
        EbpfError::MapError(_) | EbpfError::ProgramError(_) => {
            explain(Step::Maps, error_number(&error), context)
        }
        EbpfError::BtfError(_) if error_number(&error).is_some() => {
            explain(Step::Maps, error_number(&error), context)
        }
        error => EngineError::BadObject(Box::new(error)),
    })
}

/// Loads the program for a slot size.
fn program<'a>(
    ebpf: &'a mut Ebpf,
    size: SlotSize,
    levels: bool,
    context: &Context,
) -> Result<&'a mut Xdp, EngineError> {
    let fits = |program: &&(SlotSize, bool, &str)| (program.0, program.1) == (size, levels);
    let name = PROGRAMS.iter().find(fits).map_or("", |program| program.2);
    let missing = EngineError::Incomplete { what: "XDP program", name };
    let Some(program) = ebpf.program_mut(name) else { return Err(missing) };
    let Ok(xdp) = <&mut Xdp>::try_from(program) else { return Err(missing) };
    xdp.load().map_err(|error| {
        let context = Context { verifier_log: verifier_log(&error), ..context.clone() };
        explain(Step::Load, error_number(&error), &context)
    })?;
    Ok(xdp)
}
