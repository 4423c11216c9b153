//! What the probes saw, and what was asked. Findings are made from these values alone.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use crate::cli::XdpMode;
use crate::engine::{Capabilities, Interface, LinkState};

/// What the aggregator is to be started with.
#[derive(Clone, Debug)]
pub struct Question {
    /// Most lanes in a packet.
    pub lanes: u32,
    /// Where the program is to run.
    pub mode: XdpMode,
    /// TCP port, and first UDP port.
    pub port: u16,
    /// Number of UDP ports.
    pub ports: u16,
    /// Where program and tables are to be pinned, if anywhere.
    pub bpffs: Option<PathBuf>,
    /// P4Runtime server of a switch, and the switch's number there.
    pub switch: Option<(SocketAddr, u64)>,
}

/// Everything.
#[derive(Clone, Debug)]
pub struct Facts {
    /// What was asked.
    pub question: Question,
    /// The machine and this process.
    pub host: HostFacts,
    /// The interface, if one was named.
    pub interface: InterfaceFacts,
    /// The workers that were named.
    pub workers: Vec<WorkerFacts>,
    /// The switch, if one was named.
    pub switch: Option<SwitchFacts>,
}

/// A switch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwitchFacts {
    /// Its P4Runtime server.
    pub address: SocketAddr,
    /// Slots and lanes of its program, or why it cannot be used.
    pub program: Result<(u32, u32), String>,
}

/// How a system call ended that was tried in a child process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Without an error.
    Done,
    /// With this error number.
    Refused(i32),
    /// It killed the process, as seccomp filters may.
    Killed,
    /// It could not be tried, or its end was not seen.
    Untried,
}

/// The BPF file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bpffs {
    /// Mounted, and this process may create files.
    Writable,
    /// Mounted, but files cannot be created.
    ReadOnly,
    /// Something else is there, or nothing.
    Missing,
    /// None was asked for.
    NotAsked,
}

/// The machine and this process.
#[derive(Clone, Debug)]
pub struct HostFacts {
    /// As `uname -r` has it.
    pub kernel: String,
    /// Capabilities in force.
    pub capabilities: Capabilities,
    /// This process is in the user namespace that capabilities for BPF count in.
    pub initial_user_namespace: bool,
    /// A seccomp filter is in force.
    pub seccomp: bool,
    /// A bpf call that the kernel refuses with `E2BIG` whoever makes it, so that any other end is a filter's.
    pub bpf_reach: Call,
    /// Creating a small map.
    pub bpf_map: Call,
    /// Loading paatp's own program; none if it was not tried.
    pub program: Option<Result<(), String>>,
    /// Kernel lockdown, if it is on.
    pub lockdown: Option<String>,
    /// `kernel.unprivileged_bpf_disabled`.
    pub unprivileged_bpf_disabled: Option<u32>,
    /// `net.core.bpf_jit_enable`.
    pub jit: Option<u32>,
    /// The kernel's own type information is there.
    pub btf: bool,
    /// The BPF file system of the question.
    pub bpffs: Bpffs,
    /// Soft limit of locked memory in bytes; none if there is no limit.
    pub memlock: Option<u64>,
    /// Processors in use.
    pub processors: u32,
    /// Addresses at which somebody listens on the question's TCP port; unspecified ones stand for all.
    pub listeners: Vec<IpAddr>,
    /// Names of the interfaces there are.
    pub interfaces: Vec<String>,
}

/// The interface.
#[derive(Clone, Debug)]
pub enum InterfaceFacts {
    /// None was named.
    NotAsked,
    /// It cannot be found.
    Absent {
        /// What was named.
        name: String,
        /// Why it is none.
        error: String,
        /// The interface that has it as its address.
        owner: Option<String>,
    },
    /// It is there.
    Found(Box<LinkFacts>),
}

/// An interface that is there.
#[derive(Clone, Debug)]
pub struct LinkFacts {
    /// Name, MTU, addresses.
    pub interface: Interface,
    /// What rtnetlink tells.
    pub link: LinkState,
    /// Name and kind of the bridge or bond that it is a port of.
    pub master: Option<(String, String)>,
    /// VLAN interfaces on top of it.
    pub vlans: Vec<String>,
    /// Name of its driver.
    pub driver: Option<String>,
    /// `NETDEV_XDP_ACT_…`; none before Linux 6.3.
    pub xdp_features: Option<u64>,
    /// The name of the attached program; none if it may not be asked for.
    pub program_name: Option<String>,
    /// What lies in paatp's folder for it in the BPF file system.
    pub pins: Vec<PinFacts>,
    /// Offloads, by the kernel's names; none if it does not tell.
    pub offloads: Option<BTreeMap<String, Offload>>,
    /// Queues; none if the driver does not tell.
    pub queues: Option<Queues>,
    /// Rules that steer flows to queues; none if the driver has none.
    pub rules: Option<Vec<FlowRule>>,
    /// The hash that spreads UDP over IPv4 to queues includes the ports; none if the driver does not tell.
    pub hash_has_ports: Option<bool>,
    /// The other end of a veth.
    pub peer: Peer,
    /// That one's transmit queues in use; none where it is in another namespace, which only counts those it could have.
    pub peer_transmit: Option<u32>,
}

/// A set of pins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinFacts {
    /// Where.
    pub path: PathBuf,
    /// Layout of its tables, if its name tells.
    pub layout: Option<u64>,
    /// Its link holds the program on the interface.
    pub holds: bool,
}

/// One offload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offload {
    /// It is on.
    pub on: bool,
    /// It cannot be changed.
    pub fixed: bool,
}

/// Numbers of queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Queues {
    /// Receive queues in use.
    pub receive: u32,
    /// Transmit queues in use.
    pub transmit: u32,
    /// Receive queues that there could be.
    pub receive_most: u32,
    /// Transmit queues that there could be.
    pub transmit_most: u32,
    /// Receive and transmit queues come in pairs (`combined`).
    pub combined: bool,
}

/// A rule that sends one UDP port to one queue, whoever sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowRule {
    /// Its place in the driver's table.
    pub location: u32,
    /// For IPv6.
    pub v6: bool,
    /// Destination port.
    pub port: u16,
    /// Receive queue.
    pub queue: u32,
}

/// The other end of a veth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    /// It is no veth.
    None,
    /// The kernel does not tell us.
    Hidden(String),
    /// It is known.
    Seen(LinkState),
}

/// A worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerFacts {
    /// Its address.
    pub address: IpAddr,
    /// How packets get there, or the kernel's error.
    pub route: Result<Route, i32>,
}

/// How packets get to an address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Route {
    /// Through this interface.
    pub interface: String,
    /// The address is this host's own.
    pub local: bool,
    /// With this source.
    pub source: Option<IpAddr>,
    /// By this router.
    pub gateway: Option<IpAddr>,
    /// Largest packet that the route takes, in bytes, where that is set.
    pub mtu: Option<u32>,
}
