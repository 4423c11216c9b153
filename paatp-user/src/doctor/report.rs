//! Findings, and how they are told.

use std::fmt::{self, Write as _};

use serde::Serialize;

/// Version of the JSON: raised when a field changes its meaning or goes.
pub const SCHEMA_VERSION: u32 = 1;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// Good to know.
    Note,
    /// It works, but slower or not for everybody.
    Warning,
    /// `paatp run` fails, or answers do not arrive.
    Error,
}

impl Severity {
    /// Its word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Severity::Ok => "ok",
            Severity::Note => "note",
            Severity::Warning => "warning",
            Severity::Error => "error",
        }
    }
}

/// Declares the checks with their names, once.
macro_rules! checks {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// What was looked at; the name stands in the output, in the JSON and in `docs/troubleshooting.md`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Check {
            $($(#[$doc])* $name,)*
        }

        impl Check {
            /// All of them.
            pub const ALL: &[Check] = &[$(Check::$name,)*];

            /// Its name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Check::$name => $text,)*
                }
            }
        }
    };
}

checks! {
    /// The kernel's version.
    Kernel = "kernel",
    /// Capabilities of this process.
    Capabilities = "capabilities",
    /// User namespaces.
    UserNamespace = "user-namespace",
    /// Seccomp filters.
    Seccomp = "seccomp",
    /// The bpf system call.
    Bpf = "bpf",
    /// Whether the verifier takes the program.
    Program = "program",
    /// The just-in-time compiler.
    Jit = "jit",
    /// The kernel's type information.
    Btf = "btf",
    /// The BPF file system.
    Bpffs = "bpffs",
    /// The limit of locked memory.
    Memlock = "memlock",
    /// The TCP port.
    Port = "port",
    /// Whether the interface is there.
    Interface = "interface",
    /// Whether it is up.
    Link = "link",
    /// Its addresses.
    Address = "address",
    /// Whether packets fit its MTU.
    Mtu = "mtu",
    /// Whether its driver has native XDP.
    NativeXdp = "native-xdp",
    /// Whether the MTU allows native XDP.
    NativeMtu = "native-mtu",
    /// Programs that are attached already.
    Attached = "attached",
    /// What aggregators have pinned for the interface.
    Pins = "pins",
    /// The other end of a veth.
    VethPeer = "veth-peer",
    /// Queues of a veth.
    VethQueues = "veth-queues",
    /// Receive queues.
    Queues = "queues",
    /// Transmit queues for the answers.
    TransmitQueues = "transmit-queues",
    /// Rules that steer ports to queues.
    FlowRules = "flow-rules",
    /// The hash that spreads packets to queues.
    ReceiveHash = "receive-hash",
    /// Large receive offload and GRO in hardware.
    ReceiveOffload = "receive-offload",
    /// GRO that merges datagrams.
    GroForwarding = "gro-forwarding",
    /// VLAN tags taken off by the card.
    VlanOffload = "vlan-offload",
    /// Checksums left to the card.
    Checksum = "checksum",
    /// Ways to the workers.
    Worker = "worker",
    /// The switch in front of the aggregator.
    Switch = "switch",
}

impl Serialize for Check {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at.
    pub check: Check,
    /// How bad it is.
    pub severity: Severity,
    /// What was found.
    pub what: String,
    /// Why it matters; empty where all is well.
    pub why: String,
    /// The command, or the deed, that mends it.
    pub fix: Option<String>,
}

impl Finding {
    /// All is well.
    #[must_use]
    pub fn ok(check: Check, what: impl Into<String>) -> Finding {
        Finding { check, severity: Severity::Ok, what: what.into(), why: String::new(), fix: None }
    }

    /// Something to know, without a remedy.
    #[must_use]
    pub fn new(check: Check, severity: Severity, what: impl Into<String>, why: impl Into<String>) -> Finding {
        Finding { check, severity, what: what.into(), why: why.into(), fix: None }
    }

    /// With its remedy.
    #[must_use]
    pub fn mend(self, fix: impl Into<String>) -> Finding {
        Finding { fix: Some(fix.into()), ..self }
    }
}

/// All findings.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Version of paatp.
    pub version: &'static str,
    /// The interface that was asked about.
    pub interface: Option<String>,
    /// Number of errors.
    pub errors: usize,
    /// Number of warnings.
    pub warnings: usize,
    /// In the order of [`Check::ALL`].
    pub findings: Vec<Finding>,
}

impl Report {
    /// Of these findings.
    #[must_use]
    pub fn new(interface: Option<String>, mut findings: Vec<Finding>) -> Report {
        findings.sort_by_key(|finding| Check::ALL.iter().position(|check| *check == finding.check));
        let count = |severity| findings.iter().filter(|finding| finding.severity == severity).count();
        Report {
            schema_version: SCHEMA_VERSION,
            version: env!("CARGO_PKG_VERSION"),
            interface,
            errors: count(Severity::Error),
            warnings: count(Severity::Warning),
            findings,
        }
    }

    /// As JSON, with a line's end.
    ///
    /// # Errors
    /// None that is known.
    pub fn json(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string_pretty(self).map(|text| text + "\n")
    }
}

/// Columns before the text: severity and check, with the longest names and two spaces.
const SEVERITY_COLUMN: usize = "warning".len() + 2;
const CHECK_COLUMN: usize = "transmit-queues".len() + 2;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::new();
        let indent = " ".repeat(SEVERITY_COLUMN + CHECK_COLUMN);
        for Finding { check, severity, what, why, fix } in &self.findings {
            let (severity, check) = (severity.name(), check.name());
            write!(text, "{severity:SEVERITY_COLUMN$}{check:CHECK_COLUMN$}")?;
            writeln!(text, "{}", what.trim_end().replace('\n', &format!("\n{indent}")))?;
            if !why.is_empty() {
                writeln!(text, "{indent}why: {why}")?;
            }
            if let Some(fix) = fix {
                writeln!(text, "{indent}fix: {fix}")?;
            }
        }
        let (errors, warnings) = (plural(self.errors, "error"), plural(self.warnings, "warning"));
        writeln!(text, "{errors}, {warnings}")?;
        f.write_str(&text)
    }
}

fn plural(count: usize, word: &str) -> String {
    if count == 1 { format!("1 {word}") } else { format!("{count} {word}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let bad = Finding::new(Check::Mtu, Severity::Error, "two\nlines", "because").mend("do this");
        Report::new(Some("eth0".into()), vec![bad, Finding::ok(Check::Kernel, "6.18")])
    }

    #[test]
    fn text_is_for_people() {
        let text = report().to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "ok       kernel           6.18",
                "error    mtu              two",
                "                          lines",
                "                          why: because",
                "                          fix: do this",
                "1 error, 0 warnings",
            ]
        );
    }

    #[test]
    fn json_is_for_programs() {
        let json: serde_json::Value =
            report().json().ok().and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
        assert_eq!((&json["schema_version"], &json["errors"]), (&1.into(), &1.into()));
        let second = &json["findings"][1];
        assert_eq!(
            (&second["check"], &second["severity"], &second["fix"]),
            (&"mtu".into(), &"error".into(), &"do this".into())
        );
        assert!(json["findings"][0]["fix"].is_null());
    }

    #[test]
    fn names_are_unique_and_fit() {
        let mut names: Vec<&str> = Check::ALL.iter().map(|check| check.name()).collect();
        assert!(names.iter().all(|name| name.len() + 2 <= CHECK_COLUMN));
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Check::ALL.len());
    }

    /// Whoever looks up a finding's name finds it.
    #[test]
    fn every_check_is_in_the_docs() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/troubleshooting.md");
        let docs = std::fs::read_to_string(path).unwrap_or_default();
        let missing: Vec<&str> = Check::ALL
            .iter()
            .map(|check| check.name())
            .filter(|name| !docs.contains(&format!("`{name}`")))
            .collect();
        assert!(missing.is_empty(), "docs/troubleshooting.md does not mention {missing:?}");
    }
}
