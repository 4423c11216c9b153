//! The machine and this process.

use std::fs;
use std::net::IpAddr;
use std::path::Path;

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};
use nix::unistd::{AccessFlags, SysconfVar, access, sysconf};

use super::bpf;
use crate::config::{JobConfig, Jobs};
use crate::doctor::facts::{Bpffs, Call, HostFacts, Question};
use crate::engine::{Capabilities, check_program, is_filtered, names};

/// State of a listening socket in `/proc/net/tcp`.
const LISTEN: &str = "0A";

pub fn look(question: &Question, object: &[u8]) -> HostFacts {
    let capabilities = Capabilities::of_this_process();
    let bpf_map = bpf::create_map();
    let may_load = bpf_map == Call::Done && capabilities.missing().is_empty();
    HostFacts {
        kernel: text("/proc/sys/kernel/osrelease").trim().to_owned(),
        capabilities,
        initial_user_namespace: is_initial(&text("/proc/self/uid_map")),
        seccomp: is_filtered(),
        bpf_reach: bpf::reach(),
        bpf_map,
        program: may_load.then(|| try_program(object, question.lanes)),
        lockdown: lockdown(&text("/sys/kernel/security/lockdown")),
        unprivileged_bpf_disabled: number("/proc/sys/kernel/unprivileged_bpf_disabled"),
        jit: number("/proc/sys/net/core/bpf_jit_enable"),
        btf: Path::new("/sys/kernel/btf/vmlinux").exists(),
        bpffs: question.bpffs.as_deref().map_or(Bpffs::NotAsked, bpffs),
        memlock: getrlimit(Resource::RLIMIT_MEMLOCK)
            .map_or(None, |(soft, _)| Some(soft).filter(|soft| *soft != RLIM_INFINITY)),
        processors: processors(),
        listeners: ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"]
            .iter()
            .flat_map(|path| listeners(&text(path), question.port))
            .collect(),
        interfaces: names(),
    }
}

/// A file's text; nothing where it cannot be read.
fn text(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn number(path: &str) -> Option<u32> {
    text(path).trim().parse().ok()
}

/// The initial user namespace maps all numbers to themselves.
fn is_initial(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// The word in brackets is the mode in force.
fn lockdown(modes: &str) -> Option<String> {
    let mode = modes.split_once('[')?.1.split_once(']')?.0;
    (mode != "none").then(|| mode.to_owned())
}

fn bpffs(path: &Path) -> Bpffs {
    match statfs(path) {
        Ok(found) if found.filesystem_type() == BPF_FS_MAGIC => {
            if access(path, AccessFlags::W_OK).is_ok() {
                Bpffs::Writable
            } else {
                Bpffs::ReadOnly
            }
        }
        _ => Bpffs::Missing,
    }
}

fn processors() -> u32 {
    let online = sysconf(SysconfVar::_NPROCESSORS_ONLN).ok().flatten();
    online.and_then(|count| u32::try_from(count).ok()).unwrap_or(1)
}

/// Addresses of listening sockets with that port in `/proc/net/tcp` or `tcp6`.
fn listeners(table: &str, port: u16) -> Vec<IpAddr> {
    let of_line = |line: &str| {
        let mut fields = line.split_whitespace().skip(1);
        let (local, _remote, state) = (fields.next()?, fields.next()?, fields.next()?);
        let (address, of_port) = local.split_once(':')?;
        let listens = state == LISTEN && u16::from_str_radix(of_port, 16) == Ok(port);
        listens.then(|| hex_address(address)).flatten()
    };
    table.lines().skip(1).filter_map(of_line).collect()
}

/// The kernel prints an address's 32-bit words as numbers of this machine, whose bytes are the address's.
fn hex_address(hex: &str) -> Option<IpAddr> {
    let word = |i: usize| Some(u32::from_str_radix(hex.get(8 * i..8 * i + 8)?, 16).ok()?.to_ne_bytes());
    match hex.len() {
        8 => Some(IpAddr::from(word(0)?)),
        32 => {
            let words = [word(0)?, word(1)?, word(2)?, word(3)?];
            let bytes: [u8; 16] = words.as_flattened().try_into().ok()?;
            Some(IpAddr::from(bytes).to_canonical())
        }
        _ => None,
    }
}

/// Lets the verifier judge the program that a job of that many lanes needs.
fn try_program(object: &[u8], lanes: u32) -> Result<(), String> {
    let job = JobConfig { lanes, slots: 2, window: 1, ..JobConfig::new("doctor", 1) };
    let jobs = Jobs::new(vec![job]).map_err(|error| error.to_string())?;
    check_program(object, &jobs).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_is_read() {
        assert!(is_initial("         0          0 4294967295\n"));
        assert!(!is_initial("         0       1000          1\n") && !is_initial(""));
        assert_eq!(lockdown("none [integrity] confidentiality\n").as_deref(), Some("integrity"));
        assert_eq!(lockdown("[none] integrity confidentiality\n"), None);
        assert_eq!(lockdown(""), None);
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn listeners_are_found() {
        let table = "  sl  local_address rem_address   st tx_queue\n\
                     0: 0100007F:5041 00000000:0000 0A 00000000:00000000\n\
                     1: 0100007F:5042 0100007F:5041 01 00000000:00000000\n";
        assert_eq!(listeners(table, 0x5041), [IpAddr::from([127, 0, 0, 1])]);
        assert!(listeners(table, 0x5042).is_empty(), "a connection is no listener");
        assert!(listeners("", 1).is_empty() && listeners("x\n0: zz:5041 y 0A\n", 0x5041).is_empty());
        let v6 = "x\n0: 000080FE00000000FF005450020000FE:5041 00:0 0A\n0: 00000000000000000000000000000000:5041 00:0 0A\n";
        let link_local = [0xfe80, 0, 0, 0, 0x5054, 0x00ff, 0xfe00, 0x0002];
        assert_eq!(listeners(v6, 0x5041), [IpAddr::from(link_local), IpAddr::from([0u16; 8])]);
    }
}
