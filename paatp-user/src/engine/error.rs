//! What the kernel refuses, with the cause and the remedy in words.

use std::error::Error as StdError;
use std::fmt::Write as _;
use std::io;
use std::path::PathBuf;

use aya::programs::ProgramError;
use aya::sys::NetlinkError;
use paatp_common::layout::LAYOUT;
use thiserror::Error;

use super::capabilities::Capabilities;
use super::interface::InterfaceError;

/// Lines of the verifier's log that a message shows: its verdict stands at the end.
const VERIFIER_LINES: usize = 12;

/// Largest MTU at which veth and most drivers take a program without fragments, in bytes.
pub const NATIVE_MTU: u32 = 3506;

/// The engine cannot start or go on.
#[derive(Debug, Error)]
pub enum EngineError {
    /// The build had no object.
    #[error("this paatp was built without its eBPF object; build it with `cargo xtask build`")]
    NoObject,
    /// The object lacks what this program needs.
    #[error(
        "the eBPF object has no {what} `{name}`; build object and program from the same sources with `cargo xtask build`"
    )]
    Incomplete {
        /// A program or a map.
        what: &'static str,
        /// Its name.
        name: &'static str,
    },
    /// Object and program mean different tables.
    #[error(
        "the eBPF object is of another build than this program: it {}, this program is of layout {LAYOUT:016x}; build both from the same sources with `cargo xtask build`",
        .object.map_or_else(|| "does not say its layout".to_owned(), |layout| format!("is of layout {layout:016x}"))
    )]
    OtherBuild {
        /// What the object says.
        object: Option<u64>,
    },
    /// Another daemon has the interface.
    #[error(
        "another `paatp run` has interface `{interface}`{}; stop that one first (the lock is {path})",
        .pid.map_or_else(|| ": a process that cannot be seen from here".to_owned(), |pid| format!(": process {pid}"))
    )]
    Locked {
        /// The interface.
        interface: String,
        /// Who, if that is known.
        pid: Option<u32>,
        /// What is locked.
        path: PathBuf,
    },
    /// What another build left behind has the interface.
    #[error(
        "interface `{interface}` is held by a link of an earlier `paatp run` that was not stopped: pinned at {path}, {}, while this program is of layout {LAYOUT:016x}; if nothing depends on it any more, `paatp cleanup --iface {interface}` removes it",
        .layout.map_or_else(|| "of unknown layout".to_owned(), |layout| format!("layout {layout:016x}"))
    )]
    HeldByPins {
        /// The interface.
        interface: String,
        /// Where the link is pinned.
        path: PathBuf,
        /// The layout of its tables, if that can be told.
        layout: Option<u64>,
    },
    /// The object cannot be read.
    #[error("the eBPF object cannot be read; build it anew with `cargo xtask build`")]
    BadObject(#[source] Box<aya::EbpfError>),
    /// The interface cannot serve.
    #[error(transparent)]
    Interface(#[from] InterfaceError),
    /// The kernel refused.
    #[error("cannot {what}: {why}\n{advice}")]
    Refused {
        /// What was to be done.
        what: String,
        /// Why it failed.
        why: String,
        /// What to do next.
        advice: String,
        /// Somebody else is there already.
        taken: bool,
    },
    /// A table of the loaded program cannot be read or written.
    #[error(
        "cannot access the table {map} of the loaded program; is this paatp's object from the same build?"
    )]
    Table {
        /// Its name.
        map: &'static str,
        /// Why.
        #[source]
        source: Box<aya::maps::MapError>,
    },
    /// The kernel does not tell what the program cost.
    #[error("cannot read what the program cost; is /proc mounted?")]
    Cost(#[source] io::Error),
    /// A table cannot be opened once more.
    #[error("cannot open the table {map} a second time; raise the limit of open files (ulimit -n)")]
    Descriptor {
        /// Its name.
        map: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A table cannot be mapped.
    #[error(
        "cannot map the table {map}: {source}; a kernel from 5.18 on can, if nothing forbids shared mappings of BPF maps (SELinux, seccomp)"
    )]
    Map {
        /// Its name.
        map: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Two jobs would get answers under one number.
    #[error(
        "another job of this node has the same number at its parent, which is another one; give both jobs one parent, or serve them on different interfaces"
    )]
    NumberTaken,
    /// The parent is somewhere else.
    #[error(
        "packets to the job's parent leave through interface `{other}`, and sums leave where they come in, through `{interface}`; give the parent's address on that side"
    )]
    OtherWay {
        /// The interface of the program.
        interface: String,
        /// The one towards the parent.
        other: String,
    },
    /// The interface disappeared while it was served.
    #[error(
        "interface `{0}` is gone: it was deleted, renamed or moved to another network namespace; start paatp again where it is"
    )]
    Gone(String),
    /// The program is not attached any more.
    #[error(
        "the XDP program was taken off interface `{0}` by somebody else; see `ip link show dev {0}`, then start paatp again"
    )]
    TakenOff(String),
}

/// What was being done when the kernel refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Creating maps and reading the object.
    Maps,
    /// Loading the program.
    Load,
    /// Attaching it, in the driver or in the stack.
    Attach {
        /// In the driver.
        native: bool,
    },
}

/// What is known of the circumstances.
#[derive(Clone, Debug, Default)]
pub struct Context {
    /// The interface.
    pub interface: String,
    /// Its MTU.
    pub mtu: u32,
    /// This process's privileges.
    pub capabilities: Capabilities,
    /// A seccomp filter refuses bpf(2).
    pub seccomp: bool,
    /// The program that is attached already.
    pub other_program: Option<u32>,
    /// Bytes of all slots.
    pub slot_memory: u64,
    /// The verifier's log.
    pub verifier_log: String,
}

/// Puts a refusal into words.
#[must_use]
pub fn explain(step: Step, number: Option<i32>, context: &Context) -> EngineError {
    let what = match step {
        Step::Maps => "create the tables in the kernel".into(),
        Step::Load => "load the XDP program".into(),
        Step::Attach { native: true } => format!("attach to `{}` in native mode", context.interface),
        Step::Attach { native: false } => format!("attach to `{}` in generic mode", context.interface),
    };
    let name =
        number.map_or_else(|| "no error number".into(), |n| io::Error::from_raw_os_error(n).to_string());
    let (cause, advice) = match step {
        Step::Attach { native } => explain_attach(number, native, context),
        Step::Maps | Step::Load => explain_load(number, step, context),
    };
    let mut why = name;
    if !cause.is_empty() {
        let _ = write!(why, ": {cause}");
    }
    let taken = matches!((step, number), (Step::Attach { .. }, Some(libc::EBUSY | libc::EEXIST)));
    EngineError::Refused { what, why, advice, taken }
}

fn explain_load(number: Option<i32>, step: Step, context: &Context) -> (String, String) {
    match number {
        Some(libc::EPERM) => explain_permission(context),
        Some(libc::ENOMEM | libc::E2BIG) if step == Step::Maps => (
            format!("the slots need {} MiB", context.slot_memory >> 20),
            "use fewer slots (--slots), free memory, or raise the memory limit of this service's control group".into(),
        ),
        Some(libc::EAGAIN | libc::EINTR) => {
            ("a signal interrupted it".into(), "start paatp again if it was not meant to end".into())
        }
        Some(libc::ENOSYS) if context.seccomp => explain_filter(),
        Some(libc::ENOSYS) => (
            "this kernel has no bpf system call".into(),
            "run a kernel with CONFIG_BPF_SYSCALL, 5.18 or newer".into(),
        ),
        Some(libc::EACCES) if context.verifier_log.contains("prohibited") => (
            verdict("the verifier demands CAP_PERFMON", &context.verifier_log),
            "give this paatp CAP_PERFMON besides CAP_BPF and CAP_NET_ADMIN, and report it: it should not need it".into(),
        ),
        Some(libc::EACCES | libc::EINVAL | libc::E2BIG | libc::ENOSPC) if step == Step::Load => (
            verdict("the kernel's verifier refused the program", &context.verifier_log),
            "use kernel 5.18 or newer; if it is, report the lines above with the output of `uname -r`".into(),
        ),
        Some(libc::EACCES) => (
            "a security module (SELinux, AppArmor) forbids it".into(),
            "look for a denial in `dmesg` or the audit log and allow this program to use bpf".into(),
        ),
        _ => (
            verdict("", &context.verifier_log),
            "check the kernel's version (5.18 or newer) and `dmesg`, and report this message".into(),
        ),
    }
}

fn explain_permission(context: &Context) -> (String, String) {
    let missing = context.capabilities.missing();
    if missing.is_empty() && context.seccomp {
        return explain_filter();
    }
    if missing.is_empty() {
        return (
            "the process has CAP_BPF and CAP_NET_ADMIN, so something else forbids it".into(),
            "in a container use no user namespace; on a host see whether kernel lockdown is on \
             (/sys/kernel/security/lockdown), and what SELinux or AppArmor denied; `paatp doctor` tells them apart"
                .into(),
        );
    }
    let list = missing.join(" and ");
    (
        format!("this process lacks {list}"),
        format!(
            "run paatp as root, or give it {list} (systemd: AmbientCapabilities=, containers: capabilities.add)"
        ),
    )
}

/// The privileges are there, or do not matter, and a filter is in force: it may still be another module that refuses.
fn explain_filter() -> (String, String) {
    (
        "a seccomp filter is in force, which refuses bpf(2) by all appearance".into(),
        "allow the bpf system call: in systemd SystemCallFilter=bpf besides what is there, in a container a seccomp \
         profile with bpf; `paatp doctor` in the same place makes sure"
            .into(),
    )
}

fn explain_attach(number: Option<i32>, native: bool, context: &Context) -> (String, String) {
    let interface = &context.interface;
    let or_generic = if native { ", or use --xdp-mode generic" } else { "" };
    match number {
        Some(libc::EPERM | libc::EACCES) => explain_permission(context),
        Some(libc::ERANGE) => (
            format!(
                "its MTU of {} is too large for a program without fragments (about {NATIVE_MTU} at most, less on some drivers)",
                context.mtu
            ),
            format!("`ip link set {interface} mtu {NATIVE_MTU}` (for veth on both ends){or_generic}"),
        ),
        Some(libc::EBUSY | libc::EEXIST) => {
            let holder = match context.other_program {
                Some(id) => format!("another XDP program (id {id}) is attached"),
                None => "another XDP program is attached".into(),
            };
            let advice = format!(
                "see it with `ip link show dev {interface}` and `bpftool net`; end the program that owns it, or take \
                 it off with `ip link set dev {interface} xdp off` (not possible where it is held by a link)"
            );
            (holder, advice)
        }
        Some(libc::EOPNOTSUPP | ENOTSUPP) if native => (
            "its driver has no native XDP".into(),
            "use --xdp-mode generic, which is slower and works everywhere".into(),
        ),
        Some(libc::EINVAL | libc::EOPNOTSUPP | ENOTSUPP) => (
            "the driver refused; large receive offload, hardware GRO or a large MTU are the usual reasons".into(),
            format!("look at `dmesg`; try `ethtool -K {interface} lro off rx-gro-hw off`, a smaller MTU{or_generic}"),
        ),
        Some(libc::ENOMEM) => (
            "the driver has too few queues or too little memory: native XDP needs a transmit queue for each core".into(),
            format!("`ethtool -L {interface} combined N` with a smaller N{or_generic}"),
        ),
        Some(libc::ENODEV | libc::ENXIO) => {
            ("the interface is gone".into(), "see `ip link`, and start paatp where the interface is".into())
        }
        _ => (String::new(), format!("look at `dmesg`{or_generic}")),
    }
}

/// The kernel's own `ENOTSUPP`, which some drivers let out.
pub const ENOTSUPP: i32 = 524;

/// A cause with the end of the verifier's log.
fn verdict(cause: &str, log: &str) -> String {
    let lines: Vec<&str> = log.lines().filter(|line| !line.trim().is_empty()).collect();
    let tail = lines.get(lines.len().saturating_sub(VERIFIER_LINES)..).unwrap_or_default();
    let mut text = String::from(cause);
    for line in tail {
        let _ = write!(text, "\n    {line}");
    }
    text
}

/// The operating system's number in an error or its causes.
#[must_use]
pub fn error_number(error: &(dyn StdError + 'static)) -> Option<i32> {
    let mut next = Some(error);
    while let Some(cause) = next {
        if let Some(io) = cause.downcast_ref::<io::Error>()
            && let Some(number) = io.raw_os_error()
        {
            return Some(number);
        }
        if let Some(number) = cause.downcast_ref::<NetlinkError>().and_then(NetlinkError::raw_os_error) {
            return Some(number);
        }
        next = cause.source();
    }
    None
}

/// The verifier's log in an error, if it has one.
#[must_use]
pub fn verifier_log(error: &ProgramError) -> String {
    match error {
        ProgramError::LoadError { verifier_log, .. } => verifier_log.to_string(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context() -> Context {
        let capabilities = Capabilities { bpf: true, net_admin: true };
        Context {
            interface: "eth0".into(),
            mtu: 9000,
            capabilities,
            slot_memory: 3 << 20,
            ..Context::default()
        }
    }

    fn text(step: Step, number: i32, context: &Context) -> String {
        explain(step, Some(number), context).to_string()
    }

    const NATIVE: Step = Step::Attach { native: true };

    #[test]
    fn missing_capabilities_are_told_apart() {
        let without = |bpf, net_admin| {
            let capabilities = Capabilities { bpf, net_admin };
            text(Step::Load, libc::EPERM, &Context { capabilities, ..context() })
        };
        let no_bpf = without(false, true);
        assert!(no_bpf.contains("CAP_BPF") && !no_bpf.contains("CAP_NET_ADMIN"), "{no_bpf}");
        let no_net = without(true, false);
        assert!(no_net.contains("CAP_NET_ADMIN") && !no_net.contains("CAP_BPF"), "{no_net}");
        assert!(without(false, false).contains("lacks CAP_BPF and CAP_NET_ADMIN"));
        let both = without(true, true);
        assert!(both.contains("lockdown") && !both.contains("seccomp"), "{both}");
        let filtered = Context { seccomp: true, ..context() };
        for number in [libc::EPERM, libc::ENOSYS] {
            let message = text(Step::Load, number, &filtered);
            assert!(
                message.contains("a seccomp filter") && message.contains("SystemCallFilter"),
                "{message}"
            );
        }
        // What is missing is missing, filter or not.
        let capabilities = Capabilities { bpf: false, net_admin: true };
        let message = text(Step::Load, libc::EPERM, &Context { capabilities, ..filtered });
        assert!(message.contains("lacks CAP_BPF"), "{message}");
        for message in [no_bpf, no_net, both] {
            assert!(!message.contains("ulimit") && !message.to_lowercase().contains("memlock"));
        }
    }

    #[test]
    fn the_verifier_has_the_last_lines() {
        let log: String = (0..100).map(|i| format!("line {i}\n")).collect();
        let message = text(Step::Load, libc::EACCES, &Context { verifier_log: log, ..context() });
        assert!(message.contains("line 99") && message.contains("line 88") && !message.contains("line 87"));
        let log = "R1 pointer -= pointer prohibited".to_owned();
        let message = text(Step::Load, libc::EACCES, &Context { verifier_log: log, ..context() });
        assert!(message.contains("CAP_PERFMON"), "{message}");
    }

    #[test]
    fn attach_errors_say_what_to_do() {
        let cases: [(i32, &[&str]); 6] = [
            (libc::ERANGE, &["9000", "3506", "mtu", "--xdp-mode generic"]),
            (libc::EBUSY, &["id 77", "ip link show dev eth0", "xdp off"]),
            (libc::EEXIST, &["id 77"]),
            (libc::EOPNOTSUPP, &["no native XDP", "--xdp-mode generic"]),
            (libc::EINVAL, &["lro off", "--xdp-mode generic"]),
            (libc::ENODEV, &["gone", "ip link"]),
        ];
        for (number, parts) in cases {
            let message = text(NATIVE, number, &Context { other_program: Some(77), ..context() });
            assert!(message.starts_with("cannot attach to `eth0` in native mode: "), "{message}");
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
        let generic = text(Step::Attach { native: false }, libc::EINVAL, &context());
        assert!(!generic.contains("--xdp-mode generic"), "{generic}");
    }

    #[test]
    fn memory_is_told() {
        assert!(text(Step::Maps, libc::ENOMEM, &context()).contains("3 MiB"));
    }

    #[test]
    fn numbers_are_found_below() {
        let inner = io::Error::from_raw_os_error(libc::EBUSY);
        let syscall = aya::sys::SyscallError { call: "bpf_link_create", io_error: inner };
        let error = ProgramError::SyscallError(syscall);
        assert_eq!(error_number(&error), Some(libc::EBUSY));
        assert_eq!(error_number(&ProgramError::NotLoaded), None);
    }
}
