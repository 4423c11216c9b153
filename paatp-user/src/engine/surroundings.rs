//! What is wrong with the interface just now, for those who look at a running node. It may change at any time, and by
//! others than us.

use crate::telemetry::health::{Level, Notice};

use super::netlink::{self, LinkState};

/// The interface, to be asked for.
#[derive(Clone, Debug)]
pub struct Surroundings {
    /// Its name.
    pub name: String,
    /// Its index.
    pub index: u32,
    /// The program is in the driver.
    pub native: bool,
}

impl Surroundings {
    /// What there is to say now. An interface that is gone ends the daemon, which says so.
    #[must_use]
    pub fn look(&self) -> Vec<Notice> {
        let Ok(link) = netlink::query(self.index) else { return Vec::new() };
        let peer = if self.native { peer(&link) } else { None };
        notices(&self.name, &link, peer.as_ref())
    }

    /// It is a veth whose other end cannot be seen.
    #[must_use]
    pub fn has_hidden_peer(&self) -> bool {
        netlink::query(self.index).is_ok_and(|link| is_veth(&link) && peer(&link).is_none())
    }
}

fn is_veth(link: &LinkState) -> bool {
    link.kind.as_deref() == Some("veth")
}

/// The other end of a veth, if it can be seen.
fn peer(link: &LinkState) -> Option<LinkState> {
    let index = link.lower.filter(|_| is_veth(link))?;
    netlink::query_in(link.lower_namespace, index).ok()
}

/// A pure function of what was seen. `peer` is given where answers need a program there.
fn notices(name: &str, link: &LinkState, peer: Option<&LinkState>) -> Vec<Notice> {
    let has = |flag: i32| link.flags & flag as u32 != 0;
    let notice = |level, sentence| Notice { level, job: None, sentence };
    let mut found = Vec::new();
    if !has(libc::IFF_UP) {
        let sentence =
            format!("interface `{name}` is down: no packet arrives; bring it up: ip link set dev {name} up");
        found.push(notice(Level::Trouble, sentence));
    } else if !has(libc::IFF_RUNNING) {
        let sentence = format!(
            "interface `{name}` has no carrier: cable, switch port or the other end of a veth are down; see ip link show dev {name}"
        );
        found.push(notice(Level::Trouble, sentence));
    }
    if let Some(peer) = peer.filter(|peer| !peer.xdp.is_some_and(netlink::XdpState::is_native)) {
        let may_come = peer.master.is_none() && peer.xdp.is_none();
        let (level, bring) = if may_come {
            (Level::Notice, "; a worker at that end brings one if it may")
        } else {
            (Level::Trouble, "")
        };
        let sentence = format!(
            "no native XDP program runs at the other end of the veth `{name}`, `{}`, so answers to it are dropped without a word{bring}; attach one that passes everything there (docs/troubleshooting.md, veth-peer), or start with --xdp-mode generic",
            peer.name
        );
        found.push(notice(level, sentence));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::XdpState;

    const UP: u32 = (libc::IFF_UP | libc::IFF_RUNNING) as u32;

    fn told(link: &LinkState, peer: Option<&LinkState>) -> Vec<(Level, String)> {
        notices("eth0", link, peer).into_iter().map(|notice| (notice.level, notice.sentence)).collect()
    }

    #[test]
    fn an_interface_that_takes_no_packets_is_told() {
        let link = |flags| LinkState { flags, ..LinkState::default() };
        assert_eq!(told(&link(UP), None), []);
        for (flags, words) in [(0, "ip link set dev eth0 up"), (libc::IFF_UP as u32, "no carrier")] {
            let told = told(&link(flags), None);
            assert!(told.len() == 1 && told[0].0 == Level::Trouble && told[0].1.contains(words), "{told:?}");
        }
    }

    #[test]
    fn answers_over_veth_need_a_native_program() {
        let link = LinkState { flags: UP, ..LinkState::default() };
        let peer = |attached: Option<u8>, master| LinkState {
            name: "far".into(),
            xdp: attached.map(|attached| XdpState { attached, program: Some(1) }),
            master,
            ..LinkState::default()
        };
        for (peer, level) in [
            (peer(None, None), Some(Level::Notice)),
            // Nobody will bring one to a bridge's port, or where there is another one already.
            (peer(None, Some(3)), Some(Level::Trouble)),
            (peer(Some(2), None), Some(Level::Trouble)),
            (peer(Some(1), None), None),
            (peer(Some(4), Some(3)), None),
        ] {
            let told = told(&link, Some(&peer));
            assert_eq!(told.first().map(|(level, _)| *level), level, "{peer:?}");
            assert!(told.iter().all(|(_, sentence)| sentence.contains("`far`")), "{told:?}");
        }
    }
}
