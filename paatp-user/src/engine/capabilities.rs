//! Which privileges this process has, to tell a missing one from other causes.

/// Capabilities that loading and attaching depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// `CAP_BPF`, or `CAP_SYS_ADMIN` which includes it.
    pub bpf: bool,
    /// `CAP_NET_ADMIN`.
    pub net_admin: bool,
}

/// Bit numbers of `linux/capability.h`.
const NET_ADMIN: u32 = 12;
const SYS_ADMIN: u32 = 21;
const BPF: u32 = 39;

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
        Capabilities { bpf: has(BPF) || has(SYS_ADMIN), net_admin: has(NET_ADMIN) }
    }

    /// Names of those that are missing.
    #[must_use]
    pub fn missing(self) -> Vec<&'static str> {
        let wanted = [(self.bpf, "CAP_BPF"), (self.net_admin, "CAP_NET_ADMIN")];
        wanted.into_iter().filter(|(has, _)| !has).map(|(_, name)| name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_effective_set() {
        let set =
            |hex: &str| Capabilities::parse(&format!("Name:\tx\nCapPrm:\tffff\nCapEff:\t{hex}\n")).missing();
        assert_eq!(set("000001ffffffffff"), Vec::<&str>::new());
        assert_eq!(set("0000000000000000"), ["CAP_BPF", "CAP_NET_ADMIN"]);
        assert_eq!(set("0000000000001000"), ["CAP_BPF"]);
        assert_eq!(set("0000008000000000"), ["CAP_NET_ADMIN"]);
        assert_eq!(set("0000000000201000"), Vec::<&str>::new());
        assert_eq!(Capabilities::parse("nothing").missing().len(), 2);
    }
}
