//! The way to a worker.

use crate::doctor::facts::{InterfaceFacts, LinkFacts, Route, WorkerFacts};
use crate::doctor::report::{Check, Finding, Severity};

pub fn finding(worker: &WorkerFacts, interface: &InterfaceFacts) -> Finding {
    let address = worker.address;
    let route = match &worker.route {
        Ok(route) => route,
        Err(number) => {
            let error = std::io::Error::from_raw_os_error(*number);
            return Finding::new(
                Check::Worker,
                Severity::Error,
                format!("there is no way to {address}: {error}"),
                "it joins over TCP, whose answers need a route",
            )
            .mend(format!("ip route get {address}; ip route add NETWORK/PREFIX via ROUTER"));
        }
    };
    if route.local {
        return Finding::new(
            Check::Worker,
            Severity::Error,
            format!("{address} is this machine's own address"),
            "packets of a worker here go through the loopback interface and never meet the program",
        )
        .mend("start the worker on another machine, or in a network namespace of its own");
    }
    match interface {
        InterfaceFacts::Found(link) => by(worker, route, link),
        InterfaceFacts::NotAsked | InterfaceFacts::Absent { .. } => {
            Finding::ok(Check::Worker, format!("{address} is reached {}", way(route)))
        }
    }
}

fn by(worker: &WorkerFacts, route: &Route, link: &LinkFacts) -> Finding {
    let (address, name) = (worker.address, &link.interface.name);
    if route.interface != *name {
        return Finding::new(
            Check::Worker,
            Severity::Warning,
            format!("{address} is reached {}, not through {name}", way(route)),
            format!("its packets probably arrive there as well, where no program adds them; the program is on {name}"),
        )
        .mend(format!("paatp doctor {}, or a route: ip route add {address} dev {name}", route.interface));
    }
    if !link.interface.addresses.iter().any(|own| own.is_ipv4() == address.is_ipv4()) {
        let family = if address.is_ipv4() { "IPv4" } else { "IPv6" };
        return Finding::new(
            Check::Worker,
            Severity::Error,
            format!("{address} needs {family}, and {name} has no {family} address"),
            "the worker has no address to send to",
        )
        .mend(format!("ip address add ADDRESS/PREFIX dev {name}"));
    }
    if let Some(mtu) = route.mtu
        && mtu < link.interface.mtu
    {
        return Finding::new(
            Check::Worker,
            Severity::Warning,
            format!("the route to {address} takes {mtu} bytes, {name} {}", link.interface.mtu),
            "longer packets are cut in fragments, which the program does not read",
        )
        .mend(format!("paatp run --lanes of fewer, or: ip route change … mtu {}", link.interface.mtu));
    }
    Finding::ok(Check::Worker, format!("{address} is reached {}", way(route)))
}

fn way(route: &Route) -> String {
    let mut text = format!("through {}", route.interface);
    if let Some(gateway) = route.gateway {
        text += &format!(" by {gateway}");
    }
    if let Some(source) = route.source {
        text += &format!(" from {source}");
    }
    text
}
