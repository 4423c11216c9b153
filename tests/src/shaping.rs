//! Rates of links: `tbf` at one end of a veth, changed while packets pass.

use std::io::Write;
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::netns::Namespace;
use crate::process::wait_until;

/// Bytes that the bucket lets pass at once: five packets of 1500 bytes. Less, and a late timer costs rate; more, and bursts
/// are no longer those of a link.
const BURST: u64 = 8192;
/// Bytes of a packet on an Ethernet that the kernel does not count: FCS 4, preamble 8, gap 12.
const OVERHEAD: u64 = 24;

/// Longest time that `tc` takes for a command.
const DEADLINE: Duration = Duration::from_secs(5);

/// One direction of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Bits a second on the wire, preamble and gap included.
    pub rate: u64,
    /// Bytes that may wait; what does not fit is dropped.
    pub buffer: u64,
}

impl Shape {
    fn command(self, verb: &str, interface: &str) -> String {
        let Shape { rate, buffer } = self;
        format!(
            "qdisc {verb} dev {interface} root handle 1: tbf rate {rate}bit burst {BURST} limit {buffer} overhead {OVERHEAD}"
        )
    }
}

/// What has passed a shaped interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// Bytes, as the kernel counts them.
    pub bytes: u64,
    /// Packets for which there was no room.
    pub dropped: u64,
    /// How often a packet had to wait.
    pub waits: u64,
}

/// A shaped interface. The shape stays when this is dropped, until the lab goes.
#[derive(Debug)]
pub struct Shaping<'a> {
    namespace: &'a Namespace,
    interface: String,
    shape: Shape,
    // Takes commands from its standard input: a program that has to be started first would be late.
    tc: Child,
}

impl<'a> Shaping<'a> {
    /// Shapes what an interface sends.
    ///
    /// # Errors
    /// Where `tc` is missing or refuses.
    pub fn attach(namespace: &'a Namespace, interface: &str, shape: Shape) -> Result<Shaping<'a>> {
        let command = shape.command("replace", interface);
        namespace.output("tc", &command.split(' ').collect::<Vec<_>>()).context(
            "cannot give a link a rate: `tc` of iproute2 and a kernel with CONFIG_NET_SCH_TBF are needed",
        )?;
        let tc = namespace
            .command("tc")
            .args(["-batch", "-"])
            .stdin(Stdio::piped())
            .spawn()
            .context("cannot start `tc -batch -`")?;
        Ok(Shaping { namespace, interface: interface.to_owned(), shape, tc })
    }

    /// Changes the rate; what waits leaves at the new one.
    ///
    /// # Errors
    /// Where `tc` has ended because it refused an earlier change.
    pub fn set_rate(&mut self, rate: u64) -> Result<()> {
        self.shape.rate = rate;
        let line = self.shape.command("change", &self.interface) + "\n";
        let input = self.tc.stdin.as_mut().context("`tc` has no standard input")?;
        input
            .write_all(line.as_bytes())
            .and_then(|()| input.flush())
            .with_context(|| format!("`tc` takes no more commands for {}", self.interface))
    }

    /// What has passed since it was attached, once the kernel has the rate that was set last.
    ///
    /// # Errors
    /// Where `tc` fails, or the kernel goes on showing another rate.
    pub fn passed(&self) -> Result<Passed> {
        let mut passed = Passed::default();
        let what = format!("`tc` showed {} bit/s on {}", self.shape.rate, self.interface);
        wait_until(&what, DEADLINE, || {
            let args = ["-s", "-j", "qdisc", "show", "dev", &self.interface, "root"];
            let text = self.namespace.output("tc", &args)?;
            let shown: serde_json::Value = serde_json::from_str(&text).context("`tc -j` wrote no JSON")?;
            let count = |name: &str| shown[0][name].as_u64();
            passed = Passed {
                bytes: count("bytes").context("`tc -s` shows no bytes")?,
                dropped: count("drops").unwrap_or(0),
                waits: count("overlimits").unwrap_or(0),
            };
            Ok(shown[0]["options"]["rate"].as_u64() == Some(self.shape.rate / 8))
        })?;
        Ok(passed)
    }
}

impl Drop for Shaping<'_> {
    fn drop(&mut self) {
        // Both fail only where it has ended already.
        let _ = self.tc.kill();
        let _ = self.tc.wait();
    }
}
