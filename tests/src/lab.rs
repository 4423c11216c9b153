//! A lab: one switch, one aggregator, some workers, each in a namespace of its own.
//!
//! ```text
//!   worker 0 ──veth──┐
//!   worker 1 ──veth──┤ bridge (switch) ├──veth── aggregator
//!   worker 2 ──veth──┘
//! ```
//!
//! The bridge's end of the aggregator's veth has a native XDP program that does nothing: without one, what the
//! aggregator sends back with `XDP_TX` would not arrive.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::programs::{Xdp, xdp::XdpMode};

use crate::disturbance::{Direction, Disturbance, Rates};
use crate::netns::{Namespace, PREFIX};
use crate::process::wait_until;
use crate::shaping::{Shape, Shaping};

/// Version of IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// What a lab looks like.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Number of workers, at most 200.
    pub workers: usize,
    /// MTU of all interfaces.
    pub mtu: u32,
    /// Number of places for lower aggregators, at most 200.
    pub racks: usize,
}

impl Layout {
    /// So many workers, MTU 1500.
    #[must_use]
    pub const fn workers(workers: usize) -> Layout {
        Layout { workers, mtu: 1500, racks: 0 }
    }
}

/// A namespace with one interface towards the switch.
#[derive(Debug)]
pub struct Host {
    /// The namespace.
    pub namespace: Namespace,
    /// Its interface.
    pub interface: String,
    /// The switch's end of it.
    port: String,
    v4: Ipv4Addr,
    v6: Ipv6Addr,
}

impl Host {
    /// Its address.
    #[must_use]
    pub const fn address(&self, family: Family) -> IpAddr {
        match family {
            Family::V4 => IpAddr::V4(self.v4),
            Family::V6 => IpAddr::V6(self.v6),
        }
    }
}

impl Host {
    /// Its IPv4 address.
    #[must_use]
    pub const fn v4(&self) -> Ipv4Addr {
        self.v4
    }

    /// Its address of Ethernet.
    #[must_use]
    pub const fn mac(&self) -> [u8; 6] {
        mac_bytes(self.v4)
    }

    /// Enters another host's addresses as a permanent neighbour.
    fn knows(&self, other: &Host) -> Result<()> {
        for family in [Family::V4, Family::V6] {
            let address = other.address(family).to_string();
            let mac = mac_of(other.v4);
            self.namespace.ip(&[
                "neighbour",
                "replace",
                &address,
                "lladdr",
                &mac,
                "dev",
                &self.interface,
                "nud",
                "permanent",
            ])?;
        }
        Ok(())
    }
}

/// A locally administered address of Ethernet for a host.
fn mac_of(v4: Ipv4Addr) -> String {
    mac_bytes(v4).map(|byte| format!("{byte:02x}")).join(":")
}

const fn mac_bytes(v4: Ipv4Addr) -> [u8; 6] {
    let [a, b, c, d] = v4.octets();
    [2, 0x50, a, b, c, d]
}

/// A running lab. Dropping it removes everything.
#[derive(Debug)]
pub struct Lab {
    /// Where the aggregator runs.
    pub aggregator: Host,
    /// Where the workers run, by rank.
    pub workers: Vec<Host>,
    /// Where lower aggregators run.
    pub racks: Vec<Host>,
    switch: Namespace,
    bridge: String,
    // Detach when they are dropped.
    _passes: Vec<Ebpf>,
}

/// The bridge between a spliced program and the aggregator.
const BEYOND: &str = "paatpbeyond";
/// The bridges' ends of the links to a spliced program.
const NEAR_SIDE: &str = "paatpnear";
const FAR_SIDE: &str = "paatpfar";

static LABS: AtomicU32 = AtomicU32::new(0);

impl Lab {
    /// Builds a lab.
    ///
    /// # Errors
    /// Without the privileges, where `ip` is missing, or where `lab.bpf.o` has not been built.
    pub fn new(layout: Layout) -> Result<Lab> {
        Lab::with_queues(layout, 1)
    }

    /// Builds a lab whose interfaces have that many queues in each direction.
    ///
    /// # Errors
    /// As [`Lab::new`].
    pub fn with_queues(layout: Layout, queues: u32) -> Result<Lab> {
        // Together at most 15 bytes, as an interface's name may have: process numbers end at 2^22.
        let number = LABS.fetch_add(1, Ordering::Relaxed);
        let prefix = format!("{PREFIX}{:x}-{number:x}", std::process::id());
        let mtu = layout.mtu.to_string();
        let queues = queues.to_string();

        let switch = Namespace::new(format!("{prefix}s"))?;
        let bridge = format!("{prefix}b");
        switch.ip(&["link", "add", &bridge, "type", "bridge", "stp_state", "0", "mcast_snooping", "0"])?;
        switch.ip(&["link", "set", &bridge, "mtu", &mtu, "up"])?;

        let host = |kind: &str, v4: Ipv4Addr, v6| -> Result<Host> {
            let name = format!("{prefix}{kind}");
            let namespace = Namespace::new(name.clone())?;
            let port = format!("{PREFIX}{kind}");
            let target = namespace.path().display().to_string();
            let mac = mac_of(v4);
            let in_both = ["numrxqueues", &queues, "numtxqueues", &queues, "mtu", &mtu];
            let near = [&["link", "add", &port][..], &in_both, &["type", "veth", "peer", "name", &name]];
            let far = [&["address", &mac][..], &in_both, &["netns", &target]];
            switch.ip(&[near, far].concat().concat())?;
            switch.ip(&["link", "set", &port, "master", &bridge, "up"])?;
            namespace.ip(&["address", "add", &format!("{v4}/16"), "dev", &name])?;
            namespace.ip(&["address", "add", &format!("{v6}/64"), "dev", &name, "nodad"])?;
            namespace.ip(&["link", "set", &name, "up"])?;
            Ok(Host { namespace, interface: name, port, v4, v6 })
        };
        let aggregator =
            host("a", Ipv4Addr::new(10, 80, 0, 1), Ipv6Addr::new(0xfd50, 0x41, 0, 0, 0, 0, 0, 1))?;
        let workers: Vec<Host> = (0..layout.workers)
            .map(|rank| {
                let last = u8::try_from(rank + 1).context("a lab has at most 200 workers")?;
                let v6 = Ipv6Addr::new(0xfd50, 0x41, 0, 0, 0, 0, 1, last.into());
                host(&format!("w{rank}"), Ipv4Addr::new(10, 80, 1, last), v6)
            })
            .collect::<Result<_>>()?;

        let racks: Vec<Host> = (0..layout.racks)
            .map(|rack| {
                let last = u8::try_from(rack + 1).context("a lab has at most 200 lower aggregators")?;
                let v6 = Ipv6Addr::new(0xfd50, 0x41, 0, 0, 0, 0, 2, last.into());
                host(&format!("r{rack}"), Ipv4Addr::new(10, 80, 2, last), v6)
            })
            .collect::<Result<_>>()?;

        // Nothing is lost or delayed while a neighbour is looked for.
        for upper in racks.iter().chain([&aggregator]) {
            for lower in workers.iter().chain(&racks).filter(|lower| lower.v4 != upper.v4) {
                lower.knows(upper)?;
                upper.knows(lower)?;
            }
        }
        let ports = workers.len() + racks.len() + 1;
        wait_until("the bridge's ports forwarded", Duration::from_secs(20), || {
            let links = switch.ip_json(&["-details", "link", "show", "master", &bridge])?;
            let state =
                |link: &serde_json::Value| link["linkinfo"]["info_slave_data"]["state"] == "forwarding";
            Ok(links.as_array().is_some_and(|links| links.iter().filter(|link| state(link)).count() == ports))
        })?;

        let pass_at = |host: &Host| -> Result<Ebpf> {
            let mut pass = Ebpf::load_file(lab_object()).context("cannot load lab.bpf.o")?;
            let program: &mut Xdp =
                pass.program_mut("pass").context("lab.bpf.o has no program `pass`")?.try_into()?;
            program.load()?;
            switch
                .run(|| program.attach(&host.port, XdpMode::Driver))?
                .with_context(|| format!("cannot attach a native XDP program to a veth of MTU {mtu}"))?;
            Ok(pass)
        };
        let passes = racks.iter().chain([&aggregator]).map(pass_at).collect::<Result<_>>()?;
        Ok(Lab { aggregator, workers, racks, switch, bridge, _passes: passes })
    }

    /// Takes the aggregator's port off the bridge, for a program that reads and writes whole frames to be put between: the
    /// names of the interfaces towards the workers and towards the aggregator, and the namespace that they are in.
    ///
    /// ```text
    ///   workers ── bridge ──veth── program ──veth── bridge ── aggregator
    /// ```
    ///
    /// Such a program sees frames as hosts hand them over, so checksums and segments are not left to cards any more.
    ///
    /// # Errors
    /// Where `ip` or `ethtool` fails.
    pub fn splice(&self) -> Result<(&Namespace, [String; 2])> {
        let (near, far) = (format!("{PREFIX}y"), format!("{PREFIX}z"));
        let port = &self.aggregator.port;
        self.switch.ip(&[
            "link",
            "add",
            BEYOND,
            "type",
            "bridge",
            "stp_state",
            "0",
            "mcast_snooping",
            "0",
        ])?;
        self.switch.ip(&["link", "set", BEYOND, "up"])?;
        self.switch.ip(&["link", "set", port, "master", BEYOND])?;
        for (bridged, end, bridge) in [(NEAR_SIDE, &near, self.bridge.as_str()), (FAR_SIDE, &far, BEYOND)] {
            self.switch.ip(&["link", "add", bridged, "type", "veth", "peer", "name", end])?;
            self.switch.ip(&["link", "set", bridged, "master", bridge, "up"])?;
            self.switch.ip(&["link", "set", end, "up"])?;
        }
        for host in self.workers.iter().chain([&self.aggregator]) {
            let switches = ["tx", "off", "tso", "off", "gso", "off"];
            host.namespace.output("ethtool", &[&["-K", &host.interface][..], &switches].concat())?;
            host.namespace.ip(&["link", "set", &host.interface, "gso_max_segs", "1"])?;
        }
        for port in [NEAR_SIDE, FAR_SIDE, port] {
            self.wait_for_forwarding(port)?;
        }
        Ok((&self.switch, [near, far]))
    }

    /// The program's link to the workers fails, and the aggregator's port is where it was without the program: as in a
    /// network that has another way.
    ///
    /// # Errors
    /// Where `ip` fails.
    pub fn bypass(&self) -> Result<()> {
        self.switch.ip(&["link", "set", NEAR_SIDE, "down"])?;
        self.switch.ip(&["link", "set", &self.aggregator.port, "master", &self.bridge])?;
        self.wait_for_forwarding(&self.aggregator.port)
    }

    fn wait_for_forwarding(&self, port: &str) -> Result<()> {
        wait_until("a port forwarded", Duration::from_secs(20), || {
            let link = self.switch.ip_json(&["-details", "link", "show", port])?;
            Ok(link[0]["linkinfo"]["info_slave_data"]["state"] == "forwarding")
        })
    }

    /// Disturbs what the spliced program and the aggregator send one another, until the answer is dropped.
    ///
    /// # Errors
    /// As [`Lab::disturb`].
    pub fn disturb_beyond(
        &self,
        ports: RangeInclusive<u16>,
        seed: u64,
        requests: Rates,
        answers: Rates,
    ) -> Result<Disturbance> {
        Disturbance::attach(&self.switch, FAR_SIDE, ports, seed, requests, answers)
    }

    /// Disturbs a worker's packets until the answer is dropped. From now on the worker's interface sends one datagram at a
    /// time: one that stands for many would be disturbed as one.
    ///
    /// # Errors
    /// Where `lab.bpf.o` is missing or the kernel refuses it.
    pub fn disturb(
        &self,
        rank: usize,
        ports: RangeInclusive<u16>,
        seed: u64,
        requests: Rates,
        answers: Rates,
    ) -> Result<Disturbance> {
        let host = self.workers.get(rank).with_context(|| format!("the lab has no worker {rank}"))?;
        host.namespace.ip(&["link", "set", &host.interface, "gso_max_segs", "1"])?;
        Disturbance::attach(&self.switch, &host.port, ports, seed, requests, answers)
    }

    /// Disturbs what a lower aggregator sends and receives, with its ranks and with its parent, until the answer is dropped.
    ///
    /// # Errors
    /// Where `lab.bpf.o` is missing or the kernel refuses it.
    pub fn disturb_rack(
        &self,
        rack: usize,
        ports: RangeInclusive<u16>,
        seed: u64,
        sent: Rates,
        received: Rates,
    ) -> Result<Disturbance> {
        let host = self.racks.get(rack).with_context(|| format!("the lab has no rack {rack}"))?;
        Disturbance::attach(&self.switch, &host.port, ports, seed, sent, received)
    }

    /// Gives the link of one worker a rate, at the end that sends in this direction: egress is the worker's, ingress the
    /// switch's.
    ///
    /// # Errors
    /// Where there is no such worker, `tc` is missing, or the kernel lacks `tbf`.
    pub fn shape(&self, rank: usize, direction: Direction, shape: Shape) -> Result<Shaping<'_>> {
        let host = self.workers.get(rank).with_context(|| format!("the lab has no worker {rank}"))?;
        match direction {
            Direction::Egress => {
                // One packet at a time, as the bucket counts them.
                host.namespace.ip(&["link", "set", &host.interface, "gso_max_segs", "1"])?;
                Shaping::attach(&host.namespace, &host.interface, shape)
            }
            Direction::Ingress => Shaping::attach(&self.switch, &host.port, shape),
        }
    }

    /// Gives the aggregator's link a rate towards it, at the switch's end. What `XDP_TX` sends passes no queueing discipline,
    /// so the way back stays as it is.
    ///
    /// # Errors
    /// As [`Lab::shape`].
    pub fn shape_aggregator(&self, shape: Shape) -> Result<Shaping<'_>> {
        Shaping::attach(&self.switch, &self.aggregator.port, shape)
    }

    /// All namespaces, the switch first.
    pub fn namespaces(&self) -> impl Iterator<Item = &Namespace> {
        [&self.switch, &self.aggregator.namespace]
            .into_iter()
            .chain(self.workers.iter().chain(&self.racks).map(|w| &w.namespace))
    }

    /// Gives all namespaces names that `ip netns` shows; they stay when the lab is dropped if `keep` is set.
    ///
    /// # Errors
    /// What `ip` said.
    pub fn publish(&mut self, keep: bool) -> Result<()> {
        let hosts = self.workers.iter_mut().chain(&mut self.racks);
        let hosts = hosts.chain([&mut self.aggregator]).map(|host| &mut host.namespace);
        for namespace in hosts.chain([&mut self.switch]) {
            namespace.publish()?;
            if keep {
                namespace.leave_behind();
            }
        }
        Ok(())
    }

    /// Packets that interfaces and sockets dropped because a queue was full: by these the kernel lost packets that
    /// nobody disturbed.
    ///
    /// # Errors
    /// Where `ip` fails.
    pub fn dropped_by_the_kernel(&self) -> Result<u64> {
        let mut sum = 0;
        for namespace in self.namespaces() {
            let links = namespace.ip_json(&["-statistics", "link", "show"])?;
            for link in links.as_array().into_iter().flatten() {
                for direction in ["rx", "tx"] {
                    sum += link["stats64"][direction]["dropped"].as_u64().unwrap_or(0);
                }
            }
            sum += namespace.run(|| udp_counters(|name| matches!(name, "RcvbufErrors" | "InCsumErrors")))?;
        }
        Ok(sum)
    }

    /// Datagrams that found no socket on their port in the workers' namespaces: answers to workers that had ended.
    ///
    /// # Errors
    /// Where a namespace cannot be entered.
    pub fn arrived_late(&self) -> Result<u64> {
        self.workers
            .iter()
            .map(|worker| worker.namespace.run(|| udp_counters(|name| name == "NoPorts")))
            .sum()
    }

    /// What `ethtool -S` says of the bridge's end of the aggregator's veth, if `ethtool` is there.
    #[must_use]
    pub fn statistics_of_port(&self) -> String {
        self.switch.output("ethtool", &["-S", &self.aggregator.port]).unwrap_or_default()
    }
}

/// Sum of counters of UDP in the calling thread's namespace, IPv4 and IPv6.
fn udp_counters(wanted: impl Fn(&str) -> bool) -> u64 {
    let v4 = std::fs::read_to_string("/proc/thread-self/net/snmp").unwrap_or_default();
    let mut udp = v4.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let (names, values) = (udp.next().unwrap_or_default(), udp.next().unwrap_or_default());
    let of_v4 = names.split_whitespace().zip(values.split_whitespace());
    let v6 = std::fs::read_to_string("/proc/thread-self/net/snmp6").unwrap_or_default();
    let of_v6 = v6.lines().filter_map(|line| line.strip_prefix("Udp6")?.split_once(char::is_whitespace));
    of_v4
        .chain(of_v6)
        .filter(|(name, _)| wanted(name))
        .filter_map(|(_, value)| value.trim().parse::<u64>().ok())
        .sum()
}

/// The object with the lab's programs: in `PAATP_EBPF_DIR`, or where `cargo xtask build` puts it.
#[must_use]
pub fn lab_object() -> PathBuf {
    match std::env::var_os("PAATP_EBPF_DIR") {
        Some(directory) if !directory.is_empty() => PathBuf::from(directory),
        _ => Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/ebpf"),
    }
    .join("lab.bpf.o")
}
