//! The machine and this process: kernel, privileges, BPF.

use std::net::IpAddr;
use std::path::Path;

use crate::doctor::facts::{Bpffs, Call, HostFacts, LinkFacts, Question};
use crate::doctor::report::{Check, Finding, Severity};

use super::runs_paatp;

/// Oldest kernel: `bpf_loop` came with 5.17, `bpf_xdp_get_buff_len` with 5.18.
const OLDEST_KERNEL: (u32, u32) = (5, 18);

/// Linux counts BPF memory by control group, and not against the limit of locked memory, since then.
const NO_MEMLOCK: (u32, u32) = (5, 11);

const GIVE_SECCOMP: &str = "docker: --security-opt seccomp=PROFILE that allows bpf (RuntimeDefault does with CAP_BPF since 2022); \
     Kubernetes: securityContext.seccompProfile; systemd: SystemCallFilter=@system-service bpf";

pub fn findings(host: &HostFacts, question: &Question, link: Option<&LinkFacts>) -> Vec<Finding> {
    let mut found = vec![kernel(&host.kernel), capabilities(host)];
    if !host.initial_user_namespace {
        found.push(user_namespace());
    }
    found.push(seccomp(host));
    found.extend(bpf(host));
    found.extend(program(host));
    found.extend(jit(host.jit));
    found.push(btf(host.btf));
    found.push(bpffs(host.bpffs, question.bpffs.as_deref().unwrap_or(Path::new(""))));
    found.push(memlock(host));
    found.push(port(host, question.port, link));
    found
}

/// Major and minor number of a release such as `6.18.44-generic`.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn kernel(release: &str) -> Finding {
    let (major, minor) = OLDEST_KERNEL;
    match version(release) {
        Some(version) if version >= OLDEST_KERNEL => Finding::ok(Check::Kernel, format!("Linux {release}")),
        Some(_) => Finding::new(
            Check::Kernel,
            Severity::Error,
            format!("Linux {release} is older than {major}.{minor}"),
            "the program calls functions that this kernel does not have, so its verifier refuses it",
        )
        .mend(format!("boot Linux {major}.{minor} or newer")),
        None => Finding::new(
            Check::Kernel,
            Severity::Warning,
            format!("`{release}` is no version that can be read"),
            format!("Linux {major}.{minor} or newer is needed"),
        )
        .mend("uname -r"),
    }
}

fn capabilities(host: &HostFacts) -> Finding {
    let missing = host.capabilities.missing();
    if missing.is_empty() {
        return Finding::ok(Check::Capabilities, "CAP_BPF and CAP_NET_ADMIN are in force");
    }
    let list = missing.join(" and ");
    let short: Vec<&str> = missing.iter().map(|name| name.trim_start_matches("CAP_")).collect();
    let file: Vec<String> = missing.iter().map(|name| name.to_lowercase()).collect();
    Finding::new(
        Check::Capabilities,
        Severity::Error,
        format!("this process lacks {list}"),
        "loading needs CAP_BPF and CAP_NET_ADMIN, attaching needs CAP_NET_ADMIN; no limit of memory (ulimit) is to blame",
    )
    .mend(format!(
        "run paatp as root, or: setcap {}+ep $(command -v paatp); systemd: AmbientCapabilities={}; \
         containers: capabilities.add: [{}], as root or with ambient capabilities",
        file.join(","),
        missing.join(" "),
        short.join(", "),
    ))
}

fn user_namespace() -> Finding {
    Finding::new(
        Check::UserNamespace,
        Severity::Error,
        "this process is in a user namespace of its own",
        "CAP_BPF counts in the initial user namespace only, even for the namespace's root",
    )
    .mend("start paatp outside of it: no rootless container, no userns-remap, no unshare --user")
}

/// What else may refuse besides capabilities.
fn others(host: &HostFacts) -> String {
    let mut others = String::from("a security module (SELinux, AppArmor)");
    if let Some(mode) = &host.lockdown {
        others = format!("kernel lockdown ({mode}) or {others}");
    }
    others
}

fn seccomp(host: &HostFacts) -> Finding {
    let how = match host.bpf_reach {
        Call::Refused(libc::E2BIG) => {
            let what =
                if host.seccomp { "the seccomp filter lets bpf(2) through" } else { "no filter is in force" };
            return Finding::ok(Check::Seccomp, what);
        }
        Call::Killed => "kills a process that calls bpf(2)".to_owned(),
        Call::Refused(number) if host.seccomp => format!("refuses bpf(2) with {}", name(number)),
        Call::Refused(_) | Call::Done | Call::Untried => {
            return Finding::ok(Check::Seccomp, "no filter is in force");
        }
    };
    Finding::new(
        Check::Seccomp,
        Severity::Error,
        format!("a seccomp filter {how}"),
        "the program cannot be loaded, whatever capabilities this process has",
    )
    .mend(GIVE_SECCOMP)
}

/// The bpf system call, where no filter keeps it from the kernel and the capabilities are there.
fn bpf(host: &HostFacts) -> Option<Finding> {
    let reached = host.bpf_reach == Call::Refused(libc::E2BIG);
    if host.bpf_reach == Call::Refused(libc::ENOSYS) && !host.seccomp {
        let finding = Finding::new(
            Check::Bpf,
            Severity::Error,
            "this kernel has no bpf system call",
            "the additions happen in a BPF program",
        );
        return Some(finding.mend("boot a kernel with CONFIG_BPF_SYSCALL=y and CONFIG_BPF_JIT=y"));
    }
    if !host.capabilities.bpf || (host.seccomp && !reached) {
        return None;
    }
    let refusal = |what: String, why: &str, fix: String| {
        Some(Finding::new(Check::Bpf, Severity::Error, what, why).mend(fix))
    };
    match host.bpf_map {
        Call::Done => {
            let others = match host.unprivileged_bpf_disabled {
                Some(0) => " (unprivileged users may use some of it, too)",
                _ => "",
            };
            Some(Finding::ok(Check::Bpf, format!("maps can be created{others}")))
        }
        Call::Killed => refusal(
            "creating a map kills the process".into(),
            "a seccomp filter allows bpf(2), but not this use",
            GIVE_SECCOMP.into(),
        ),
        Call::Refused(number @ (libc::EPERM | libc::EACCES)) => {
            let filter = if host.seccomp { "a seccomp filter, " } else { "" };
            let why = format!("CAP_BPF is there, so {filter}{} forbids it", others(host));
            let fix = "look for the denial: dmesg | tail; journalctl -k | grep -i denied; cat /sys/kernel/security/lockdown";
            refusal(format!("creating a map is refused with {}", name(number)), &why, fix.into())
        }
        Call::Refused(number @ (libc::ENOMEM | libc::EAGAIN)) => refusal(
            format!("creating a map of a few bytes is refused with {}", name(number)),
            "the control group's memory is used up",
            "raise its limit: systemd MemoryMax=, containers resources.limits.memory".into(),
        ),
        Call::Refused(number) => refusal(
            format!("creating a map is refused with {}", name(number)),
            "nothing can be loaded",
            "see dmesg, and report this line".into(),
        ),
        Call::Untried => None,
    }
}

fn program(host: &HostFacts) -> Option<Finding> {
    Some(match host.program.as_ref()? {
        Ok(()) => Finding::ok(Check::Program, "the kernel's verifier takes paatp's program"),
        Err(error) => Finding::new(
            Check::Program,
            Severity::Error,
            error.as_str(),
            "`paatp run` will fail in the same way",
        ),
    })
}

fn jit(enabled: Option<u32>) -> Option<Finding> {
    Some(match enabled? {
        0 => Finding::new(
            Check::Jit,
            Severity::Warning,
            "the just-in-time compiler for BPF is off",
            "the program is interpreted, several times slower",
        )
        .mend("sysctl -w net.core.bpf_jit_enable=1"),
        _ => Finding::ok(Check::Jit, "BPF programs are compiled"),
    })
}

fn btf(there: bool) -> Finding {
    if there {
        return Finding::ok(Check::Btf, "/sys/kernel/btf/vmlinux is there");
    }
    Finding::new(
        Check::Btf,
        Severity::Note,
        "/sys/kernel/btf/vmlinux is missing",
        "paatp does not need it; other BPF programs and bpftrace may (CONFIG_DEBUG_INFO_BTF)",
    )
}

fn bpffs(state: Bpffs, path: &Path) -> Finding {
    let path = path.display();
    let (what, fix) = match state {
        Bpffs::NotAsked => {
            let what =
                "nothing is to be pinned (--pin-dir none): if `paatp run` is killed, its jobs end with it";
            return Finding::ok(Check::Bpffs, what);
        }
        Bpffs::Writable => return Finding::ok(Check::Bpffs, format!("{path} is mounted and writable")),
        Bpffs::ReadOnly => (
            format!("{path} is mounted, but files cannot be created there"),
            format!(
                "mount -o remount,rw {path}; systemd: ReadWritePaths={path}, or no ProtectKernelTunables=; \
                 containers: mount it without readOnly"
            ),
        ),
        Bpffs::Missing => (
            format!("{path} is no BPF file system"),
            format!("mount -t bpf bpf {path}; Kubernetes: a hostPath volume of {path}"),
        ),
    };
    Finding::new(
        Check::Bpffs,
        Severity::Warning,
        what,
        "paatp works without, but pins nothing then: if it is killed, jobs that run end with it instead of going on",
    )
    .mend(fix)
}

fn memlock(host: &HostFacts) -> Finding {
    let limit = host.memlock.map_or_else(|| "unlimited".into(), |bytes| format!("{} KiB", bytes >> 10));
    match version(&host.kernel) {
        Some(version) if version < NO_MEMLOCK && host.memlock.is_some() => Finding::new(
            Check::Memlock,
            Severity::Error,
            format!("locked memory is limited to {limit}"),
            "kernels before 5.11 count BPF memory against this limit",
        )
        .mend("ulimit -l unlimited; systemd: LimitMEMLOCK=infinity"),
        _ => Finding::ok(
            Check::Memlock,
            format!("limit {limit}; BPF memory is counted by the control group instead (since Linux 5.11)"),
        ),
    }
}

/// The control server binds the interface's addresses, and does without loopback.
fn port(host: &HostFacts, port: u16, link: Option<&LinkFacts>) -> Finding {
    let hinders =
        |at: &&IpAddr| at.is_unspecified() || link.is_none_or(|link| link.interface.served().contains(at));
    let Some(at) = host.listeners.iter().find(hinders) else {
        return Finding::ok(Check::Port, format!("nobody listens on TCP port {port}"));
    };
    let what = format!("somebody listens on TCP port {port} at {at}");
    if link.is_some_and(runs_paatp) {
        let why = "paatp's program is attached, so `paatp run` seems to be running here already";
        return Finding::new(Check::Port, Severity::Note, what, why);
    }
    let why = "workers join at this port, so `paatp run` needs it";
    Finding::new(Check::Port, Severity::Error, what, why).mend(format!(
        "ss -tlnp 'sport = :{port}' names the process; or another port for all: paatp run --port P"
    ))
}

/// An error number in words.
fn name(number: i32) -> String {
    std::io::Error::from_raw_os_error(number).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_read() {
        assert_eq!(version("6.18.44-fc-v857"), Some((6, 18)));
        assert_eq!(version("5.4.0"), Some((5, 4)));
        assert_eq!(version("6.1-rc3"), Some((6, 1)));
        assert_eq!(version("six"), None);
        assert_eq!(version(""), None);
    }
}
