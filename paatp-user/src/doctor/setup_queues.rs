//! Rules that send each UDP port to a receive queue of its own: which are needed (pure), and how `ethtool` makes them.

use std::fmt;
use std::process::Command;

use clap::Args;
use paatp_common::limits::MAX_PORTS;
use thiserror::Error;

use super::facts::{FlowRule, Offload, Queues};
use super::probe;
use crate::control::DEFAULT_PORT;
use crate::engine::{Interface, InterfaceError};

/// The kernel's name of the offload that rules need.
const NTUPLE: &str = "rx-ntuple-filter";

/// The program that makes the rules.
const ETHTOOL: &str = "ethtool";

/// `paatp setup-queues`
#[derive(Debug, Args)]
pub struct SetupQueues {
    /// Network interface of the aggregator.
    #[arg(value_name = "IFACE")]
    pub iface: String,
    /// First UDP port, as for `paatp run`.
    #[arg(long, default_value_t = DEFAULT_PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub port: u16,
    /// Number of UDP ports, as for `paatp run` [default: as many as there are receive queues].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_PORTS)))]
    pub ports: Option<u16>,
    /// Run the commands; without this they are only printed.
    #[arg(long)]
    pub apply: bool,
}

/// The rules cannot be made.
#[derive(Debug, Error)]
pub enum SetupQueuesError {
    /// No interface.
    #[error(transparent)]
    Interface(#[from] InterfaceError),
    /// The driver has none.
    #[error(
        "the driver of `{0}` has no rules that steer UDP ports to receive queues; run paatp with --ports 1, and let the card spread workers by their addresses"
    )]
    NoRules(String),
    /// Too few queues.
    #[error(
        "{ports} ports need as many receive queues, but `{name}` has {queues}; use --ports {queues} or less, or `ethtool -L {name} combined {ports}` (at most {most})"
    )]
    TooFewQueues {
        /// The interface.
        name: String,
        /// Ports that were asked for.
        ports: u16,
        /// Receive queues in use.
        queues: u32,
        /// Receive queues that there could be.
        most: u32,
    },
    /// Beyond the last port.
    #[error("{ports} ports from {port} on go beyond 65535; choose a lower --port")]
    PortRange {
        /// The first.
        port: u16,
        /// How many.
        ports: u16,
    },
    /// No ethtool.
    #[error("cannot start `{command}`; is ethtool installed (apt-get install ethtool)?")]
    NoEthtool {
        /// The command.
        command: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// ethtool failed.
    #[error(
        "`{command}` failed ({status}): {output}\nrules made before it stay; see them with `ethtool -n {name}`"
    )]
    Failed {
        /// The interface.
        name: String,
        /// The command.
        command: String,
        /// How it ended.
        status: std::process::ExitStatus,
        /// What it said.
        output: String,
    },
}

/// One call of ethtool.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Ethtool(Vec<String>);

impl Ethtool {
    fn new(parts: &[&str]) -> Ethtool {
        Ethtool(parts.iter().map(|part| (*part).to_owned()).collect())
    }

    /// Runs it; `program` is `ethtool`, but for tests.
    fn run(&self, program: &str, interface: &str) -> Result<(), SetupQueuesError> {
        let output = Command::new(program)
            .args(&self.0)
            .output()
            .map_err(|source| SetupQueuesError::NoEthtool { command: self.to_string(), source })?;
        if output.status.success() {
            return Ok(());
        }
        let said = [output.stderr, output.stdout].concat();
        Err(SetupQueuesError::Failed {
            name: interface.into(),
            command: self.to_string(),
            status: output.status,
            output: String::from_utf8_lossy(&said).split_whitespace().collect::<Vec<_>>().join(" "),
        })
    }
}

impl fmt::Display for Ethtool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{ETHTOOL} {}", self.0.join(" "))
    }
}

/// What is there.
#[derive(Clone, Debug)]
struct Card {
    name: String,
    v4: bool,
    v6: bool,
    queues: Option<Queues>,
    rules: Option<Vec<FlowRule>>,
    ntuple: Option<Offload>,
}

impl Card {
    fn look(name: &str) -> Result<Card, InterfaceError> {
        let interface = Interface::find(name)?;
        let has = |v6| interface.addresses.iter().any(|address| address.is_ipv6() == v6);
        Ok(Card {
            name: name.into(),
            v4: has(false),
            v6: has(true),
            queues: probe::queues(name),
            rules: probe::flow_rules(name),
            ntuple: probe::offloads(name).and_then(|all| all.get(NTUPLE).copied()),
        })
    }

    /// Rules can be made, now or once they are switched on.
    fn can_steer(&self) -> bool {
        self.rules.is_some() || self.ntuple.is_some_and(|ntuple| !ntuple.fixed)
    }
}

/// The calls that lead from what is there to what is wanted.
fn plan(card: &Card, port: u16, ports: Option<u16>) -> Result<Vec<Ethtool>, SetupQueuesError> {
    let name = card.name.as_str();
    if !card.can_steer() {
        return Err(SetupQueuesError::NoRules(name.into()));
    }
    let (queues, most) = card.queues.map_or((1, 1), |queues| (queues.receive, queues.receive_most));
    let all = u16::try_from(queues).unwrap_or(MAX_PORTS).clamp(1, MAX_PORTS);
    let ports = ports.unwrap_or(all);
    if u32::from(ports) > queues {
        return Err(SetupQueuesError::TooFewQueues { name: name.into(), ports, queues, most });
    }
    if port.checked_add(ports - 1).is_none() {
        return Err(SetupQueuesError::PortRange { port, ports });
    }
    let mut calls = Vec::new();
    if card.ntuple.is_some_and(|ntuple| !ntuple.on && !ntuple.fixed) {
        calls.push(Ethtool::new(&["-K", name, "ntuple", "on"]));
    }
    let rules = card.rules.as_deref().unwrap_or_default();
    for (v6, flow) in [(false, "udp4"), (true, "udp6")] {
        if !(if v6 { card.v6 } else { card.v4 }) {
            continue;
        }
        for queue in 0..ports {
            let wanted = port + queue;
            let there: Vec<&FlowRule> =
                rules.iter().filter(|rule| rule.v6 == v6 && rule.port == wanted).collect();
            let right = |rule: &&&FlowRule| rule.queue == u32::from(queue);
            for wrong in there.iter().filter(|rule| !right(rule)) {
                calls.push(Ethtool::new(&["-N", name, "delete", &wrong.location.to_string()]));
            }
            if !there.iter().any(|rule| right(&rule)) {
                let (port, queue) = (wanted.to_string(), queue.to_string());
                calls.push(Ethtool::new(&[
                    "-N",
                    name,
                    "flow-type",
                    flow,
                    "dst-port",
                    &port,
                    "action",
                    &queue,
                ]));
            }
        }
    }
    Ok(calls)
}

/// Prints the commands to `out`, and runs them with `--apply`.
///
/// # Errors
/// Where the rules cannot be made; those before the one that failed stay.
pub fn setup_queues(args: &SetupQueues, out: &mut dyn std::io::Write) -> Result<(), SetupQueuesError> {
    let card = Card::look(&args.iface)?;
    let calls = plan(&card, args.port, args.ports)?;
    // Whoever closed standard output does not want it.
    if calls.is_empty() {
        let _ = writeln!(out, "# nothing to do: each port has its queue");
    } else if !args.apply {
        let _ = writeln!(out, "# nothing was changed; --apply runs these");
    }
    for call in &calls {
        let _ = writeln!(out, "{call}");
        if args.apply {
            call.run(ETHTOOL, &card.name)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card() -> Card {
        Card {
            name: "eth0".into(),
            v4: true,
            v6: false,
            queues: Some(Queues { receive: 4, receive_most: 8, ..Queues::default() }),
            rules: Some(Vec::new()),
            ntuple: Some(Offload { on: true, fixed: false }),
        }
    }

    fn lines(card: &Card, ports: Option<u16>) -> Vec<String> {
        plan(card, 20545, ports).map_or_else(
            |error| vec![error.to_string()],
            |calls| calls.iter().map(ToString::to_string).collect(),
        )
    }

    #[test]
    fn each_port_gets_its_queue() {
        assert_eq!(
            lines(&card(), Some(2)),
            [
                "ethtool -N eth0 flow-type udp4 dst-port 20545 action 0",
                "ethtool -N eth0 flow-type udp4 dst-port 20546 action 1",
            ]
        );
        assert_eq!(lines(&card(), None).len(), 4, "as many as there are queues");
        assert_eq!(lines(&Card { v6: true, ..card() }, Some(2)).len(), 4, "both versions of IP");
    }

    #[test]
    fn what_is_there_is_left_or_replaced() {
        let rule = |location, port, queue| FlowRule { location, v6: false, port, queue };
        let rules = Some(vec![rule(10, 20545, 0), rule(11, 20546, 3), rule(12, 9999, 1)]);
        assert_eq!(
            lines(&Card { rules, ..card() }, Some(2)),
            ["ethtool -N eth0 delete 11", "ethtool -N eth0 flow-type udp4 dst-port 20546 action 1"]
        );
    }

    #[test]
    fn rules_are_switched_on_first() {
        let off = Card { ntuple: Some(Offload { on: false, fixed: false }), rules: None, ..card() };
        assert_eq!(lines(&off, Some(1))[0], "ethtool -K eth0 ntuple on");
    }

    #[test]
    fn failures_of_ethtool_are_told() {
        let call = Ethtool::new(&["-c", "echo no such rule >&2; exit 3"]);
        let error = call.run("sh", "eth0").map_err(|error| error.to_string()).err().unwrap_or_default();
        assert!(
            ["no such rule", "exit status: 3", "ethtool -n eth0"].iter().all(|part| error.contains(part)),
            "{error}"
        );
        assert!(Ethtool::new(&["-c", "exit 0"]).run("sh", "eth0").is_ok());
        let missing = call.run("no-such-program-at-all", "eth0");
        assert!(matches!(missing, Err(SetupQueuesError::NoEthtool { .. })));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let none = Card { rules: None, ntuple: None, ..card() };
        assert!(lines(&none, Some(2))[0].contains("--ports 1"));
        assert!(lines(&card(), Some(5))[0].contains("ethtool -L eth0 combined 5"));
        assert!(matches!(plan(&card(), 65535, Some(2)), Err(SetupQueuesError::PortRange { .. })));
    }
}
