//! `paatp doctor`: looks at everything that `paatp run` depends on and says what is wrong, why it matters and what
//! mends it. `paatp setup-queues`: rules that give each UDP port a receive queue.
//!
//! `probe` collects facts (I/O), `findings` judges them (pure), `report` tells.

pub mod facts;
mod findings;
mod probe;
pub mod report;
mod setup_queues;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use clap::Args;
use paatp_common::limits::MAX_PORTS;

use crate::cli::XdpMode;
use crate::config::{DEFAULT_LANES, bpffs_of};
use crate::control::DEFAULT_PORT;
use crate::switch::options;

pub use findings::findings;
pub use setup_queues::{SetupQueues, SetupQueuesError, setup_queues};

/// After the options of `paatp doctor`.
pub const AFTER_DOCTOR: &str = "\
Run it as the user, in the container and in the network namespace where `paatp run` is to run: it looks at its own \
privileges. It attaches nothing and changes nothing; loading the program, which is tried, leaves nothing behind.

Examples:
  paatp doctor eth0 --worker 10.0.0.2 --worker 10.0.0.3
  paatp doctor eth0 --xdp-mode native --lanes 832 --json

Exit status: 0 no errors (there may be warnings), 1 errors were found, 2 it was called wrongly.";

/// After the options of `paatp setup-queues`.
pub const AFTER_SETUP_QUEUES: &str = "\
UDP port --port + i goes to receive queue i. Rules that are there already are left alone; those that send one of the \
ports elsewhere are deleted first. The rules are gone after a reboot. The program `ethtool` does the work.

Examples:
  paatp setup-queues eth0 --ports 4
  paatp setup-queues eth0 --ports 4 --apply && paatp run --iface eth0 --ports 4 --job train --world 4

Exit status: 0 all went well, 1 it failed (standard error says why and what to do), 2 it was called wrongly.";

/// `paatp doctor`
#[derive(Debug, Args)]
pub struct Doctor {
    /// Network interface that the workers' packets will arrive on; without one, only the machine is looked at.
    #[arg(value_name = "IFACE", env = "PAATP_IFACE", hide_env_values = true)]
    pub iface: Option<String>,
    /// Address of a worker, to see whether packets get there; may be given several times.
    #[arg(long = "worker", value_name = "ADDRESS")]
    pub workers: Vec<IpAddr>,
    /// As it will be given to `paatp run`: with `native`, whatever keeps the program out of the driver is an error.
    #[arg(long, value_enum, default_value = "auto", value_name = "MODE")]
    pub xdp_mode: XdpMode,
    /// Most values in a packet, as they will be given to `paatp run`.
    #[arg(long, default_value_t = u32::from(DEFAULT_LANES), value_name = "N")]
    pub lanes: u32,
    /// TCP port and first UDP port, as they will be given to `paatp run`.
    #[arg(long, default_value_t = DEFAULT_PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub port: u16,
    /// Number of UDP ports, as it will be given to `paatp run`.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_PORTS)))]
    pub ports: u16,
    /// BPF file system, as it will be given to `paatp run` [default: /sys/fs/bpf].
    #[arg(long, value_name = "DIR", env = "PAATP_PIN_DIR", hide_env_values = true)]
    pub pin_dir: Option<PathBuf>,
    /// P4Runtime server of a switch, as it will be given to `paatp run`, to see whether it has our program.
    #[arg(long, value_name = "ADDR[:PORT]", env = "PAATP_SWITCH", hide_env_values = true, value_parser = options::address)]
    pub switch: Option<SocketAddr>,
    /// The switch's number there, as it will be given to `paatp run`.
    #[arg(long, value_name = "N", env = "PAATP_SWITCH_DEVICE", hide_env_values = true, default_value_t = 0)]
    pub switch_device: u64,
    /// Write the findings as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Looks, and judges. `object` is paatp's eBPF object.
#[must_use]
pub fn examine(args: &Doctor, object: &[u8]) -> report::Report {
    let question = facts::Question {
        lanes: args.lanes,
        mode: args.xdp_mode,
        port: args.port,
        ports: args.ports,
        bpffs: bpffs_of(args.pin_dir.as_deref()).map(Into::into),
        switch: args.switch.map(|address| (address, args.switch_device)),
    };
    let facts = probe::look(question, args.iface.as_deref(), &args.workers, object);
    report::Report::new(args.iface.clone(), findings(&facts))
}
