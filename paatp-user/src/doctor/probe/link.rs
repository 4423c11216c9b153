//! The interface.

use std::net::IpAddr;
use std::path::Path;

use aya::programs::loaded_programs;
use nix::net::if_::if_nametoindex;

use super::{ioctl, netdev};
use crate::doctor::facts::{InterfaceFacts, LinkFacts, Peer, PinFacts};
use crate::engine::pins::{Place, SetName};
use crate::engine::{Interface, LinkState, names, owner_of, query, query_in};

pub fn look(name: Option<&str>, bpffs: Option<&Path>) -> InterfaceFacts {
    let Some(name) = name else { return InterfaceFacts::NotAsked };
    let absent = |error: String| {
        let owner = name.parse::<IpAddr>().ok().and_then(owner_of);
        InterfaceFacts::Absent { name: name.into(), error, owner }
    };
    let interface = match Interface::look(name) {
        Ok(interface) => interface,
        Err(error) => return absent(error.to_string()),
    };
    let index = interface.index;
    let link = match query(index) {
        Ok(link) => link,
        Err(error) => return absent(format!("interface `{name}` went away: {error}")),
    };
    let peer = peer(&link);
    InterfaceFacts::Found(Box::new(LinkFacts {
        master: link
            .master
            .and_then(|master| query(master).ok())
            .map(|master| (master.name, master.kind.unwrap_or_else(|| "interface".into()))),
        vlans: vlans_on(index),
        driver: ioctl::driver(name),
        xdp_features: netdev::xdp_features(index),
        program_name: link.xdp.and_then(|xdp| program_name(xdp.program?)),
        pins: bpffs.map(|bpffs| pins(bpffs, &interface, &link)).unwrap_or_default(),
        offloads: ioctl::offloads(name),
        queues: ioctl::queues(name),
        rules: ioctl::flow_rules(name),
        hash_has_ports: ioctl::hash_has_ports(name),
        peer_transmit: match &peer {
            Peer::Seen(peer) if link.lower_namespace.is_none() => {
                ioctl::queues(&peer.name).map(|queues| queues.transmit)
            }
            _ => None,
        },
        peer,
        interface,
        link,
    }))
}

/// What earlier and present aggregators have pinned for an interface of this network namespace.
fn pins(bpffs: &Path, interface: &Interface, link: &LinkState) -> Vec<PinFacts> {
    let Ok(place) = Place::new(bpffs, &interface.name) else { return Vec::new() };
    let program = link.xdp.map_or(Some(0), |xdp| xdp.program);
    let is_here = |path: &Path| {
        let name = path.file_name().and_then(|name| SetName::parse(name.to_str()?));
        name.is_none_or(|name| name.namespace == place.namespace())
    };
    let here = place.all(interface.index, program).into_iter().filter(|(path, _, _)| is_here(path));
    here.map(|(path, layout, holds)| PinFacts { path, layout, holds }).collect()
}

/// The other end of a veth, in whatever network namespace it is.
fn peer(link: &LinkState) -> Peer {
    if link.kind.as_deref() != Some("veth") {
        return Peer::None;
    }
    let Some(index) = link.lower else {
        return Peer::Hidden("the kernel does not name it".into());
    };
    match query_in(link.lower_namespace, index) {
        Ok(state) => Peer::Seen(state),
        Err(error) => Peer::Hidden(error.to_string()),
    }
}

/// VLAN interfaces of this namespace on top of an interface.
fn vlans_on(index: u32) -> Vec<String> {
    let on_top = |name: &String| {
        let state = if_nametoindex(name.as_str()).ok().and_then(|found| query(found).ok());
        state.is_some_and(|state| state.kind.as_deref() == Some("vlan") && state.lower == Some(index))
    };
    names().into_iter().filter(on_top).collect()
}

/// A program's name by its id: needs `CAP_SYS_ADMIN`, so that there may be no answer.
fn program_name(id: u32) -> Option<String> {
    let program = loaded_programs().map_while(Result::ok).find(|program| program.id() == id)?;
    program.name_as_str().map(str::to_owned).filter(|name| !name.is_empty())
}
