//! Which privileges the aggregator needs, and which this process has, to tell a missing one from other causes.

/// A capability that `paatp run` needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// As `capabilities(7)` calls it.
    pub name: &'static str,
    /// What for.
    pub purpose: &'static str,
    /// Its number in `linux/capability.h`.
    bit: u32,
}

impl Requirement {
    /// As Kubernetes and Docker call it.
    #[must_use]
    pub fn short_name(&self) -> &'static str {
        self.name.trim_start_matches("CAP_")
    }
}

const BPF: Requirement =
    Requirement { name: "CAP_BPF", purpose: "create the tables and load the XDP program", bit: 39 };
const NET_ADMIN: Requirement = Requirement {
    name: "CAP_NET_ADMIN",
    purpose: "attach the program to the interface, and see that it stays attached",
    bit: 12,
};

/// All that `paatp run` needs. Unit file, manifests and documentation are made from this list (`cargo xtask codegen`).
pub const REQUIRED: [Requirement; 2] = [BPF, NET_ADMIN];

/// Includes [`BPF`].
const SYS_ADMIN_BIT: u32 = 21;

/// Capabilities that loading and attaching depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// `CAP_BPF`, or `CAP_SYS_ADMIN` which includes it.
    pub bpf: bool,
    /// `CAP_NET_ADMIN`.
    pub net_admin: bool,
}

impl Capabilities {
    /// Those in force in this process; none where `/proc` cannot tell.
    #[must_use]
    pub fn of_this_process() -> Capabilities {
        Self::parse(&std::fs::read_to_string("/proc/self/status").unwrap_or_default())
    }

    /// Reads the line `CapEff` of `/proc/self/status`.
    fn parse(status: &str) -> Capabilities {
        let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
        let set = line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
        let has = |bit: u32| set >> bit & 1 == 1;
        Capabilities { bpf: has(BPF.bit) || has(SYS_ADMIN_BIT), net_admin: has(NET_ADMIN.bit) }
    }

    /// Names of those that are missing.
    #[must_use]
    pub fn missing(self) -> Vec<&'static str> {
        let wanted = [(self.bpf, BPF), (self.net_admin, NET_ADMIN)];
        wanted.into_iter().filter(|(has, _)| !has).map(|(_, capability)| capability.name).collect()
    }
}

/// A seccomp filter is in force in this process.
#[must_use]
pub fn is_filtered() -> bool {
    has_filter(&std::fs::read_to_string("/proc/self/status").unwrap_or_default())
}

/// A seccomp filter is in force, and it keeps bpf(2) from the kernel: a call that every kernel refuses with `E2BIG`, because
/// its argument is longer than a page, ends otherwise. (A filter that kills would have done so at the first call.)
#[must_use]
pub fn refuses_bpf() -> bool {
    const BPF_MAP_LOOKUP_ELEM: libc::c_int = 1;
    const TOO_LONG: libc::c_uint = 1 << 20;
    if !is_filtered() {
        return false;
    }
    // SAFETY: the kernel refuses the length before it reads the argument.
    let ended =
        unsafe { libc::syscall(libc::SYS_bpf, BPF_MAP_LOOKUP_ELEM, std::ptr::null::<u8>(), TOO_LONG) };
    ended >= 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::E2BIG)
}

/// Reads the line `Seccomp` of `/proc/self/status`; 2 is a filter.
fn has_filter(status: &str) -> bool {
    status.lines().any(|line| line.strip_prefix("Seccomp:").is_some_and(|mode| mode.trim() == "2"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_seen() {
        assert!(has_filter("Seccomp:\t2\nSeccomp_filters:\t1\n") && !has_filter("Seccomp:\t0\n"));
    }

    #[test]
    fn reads_the_effective_set() {
        let set =
            |hex: &str| Capabilities::parse(&format!("Name:\tx\nCapPrm:\tffff\nCapEff:\t{hex}\n")).missing();
        assert_eq!(set("000001ffffffffff"), Vec::<&str>::new());
        assert_eq!(set("0000000000000000"), ["CAP_BPF", "CAP_NET_ADMIN"]);
        assert_eq!(set("0000000000001000"), ["CAP_BPF"]);
        assert_eq!(set("0000008000000000"), ["CAP_NET_ADMIN"]);
        assert_eq!(set("0000000000201000"), Vec::<&str>::new());
        assert_eq!(Capabilities::parse("nothing").missing(), REQUIRED.map(|capability| capability.name));
    }
}
