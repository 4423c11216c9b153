//! Where the aggregator is.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6, ToSocketAddrs};

use nix::net::if_::if_nametoindex;
use thiserror::Error;

use crate::control::DEFAULT_PORT;

/// An aggregator's address as it was written, and what it stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// As written.
    pub text: String,
    /// TCP address of the control server.
    pub address: SocketAddr,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let resolved = self.address.to_string();
        if resolved.starts_with(&self.text) {
            f.write_str(&resolved)
        } else {
            write!(f, "{resolved} (`{}`)", self.text)
        }
    }
}

/// A text names no aggregator.
#[derive(Debug, Error)]
pub enum EndpointError {
    /// Neither an address nor a name.
    #[error(
        "`{0}` is no aggregator address; write for example 10.0.0.1, 10.0.0.1:20545, [fd00::1]:20545 or a host name"
    )]
    Syntax(String),
    /// The zone of a link-local address is no interface.
    #[error("`{text}`: there is no interface `{zone}` here; see `ip link`")]
    Zone {
        /// The whole text.
        text: String,
        /// After the percent sign.
        zone: String,
    },
    /// A link-local address without an interface.
    #[error("`{0}` is a link-local address; say on which interface, for example {0}%eth0")]
    NoZone(String),
    /// The name does not resolve.
    #[error(
        "the name `{name}` does not resolve to an address; check it, or give the aggregator's IP address"
    )]
    Name {
        /// The name.
        name: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The name has no address.
    #[error("the name `{0}` has no address; give the aggregator's IP address")]
    NoAddress(String),
}

impl Endpoint {
    /// Reads `ADDR[:PORT]` and resolves it.
    ///
    /// # Errors
    /// If it cannot be read, or the name does not resolve.
    pub fn resolve(text: &str) -> Result<Endpoint, EndpointError> {
        let (host, port) = split(text).ok_or_else(|| EndpointError::Syntax(text.into()))?;
        let address = resolve_host(text, host, port)?;
        Ok(Endpoint { text: text.into(), address })
    }
}

/// Host and port; brackets are gone.
fn split(text: &str) -> Option<(&str, u16)> {
    let port = |text: &str| text.parse::<u16>().ok().filter(|port| *port != 0);
    if let Some(rest) = text.strip_prefix('[') {
        let (host, rest) = rest.split_once(']')?;
        return match rest.strip_prefix(':') {
            Some(text) => Some((host, port(text)?)),
            None => rest.is_empty().then_some((host, DEFAULT_PORT)),
        };
    }
    match text.matches(':').count() {
        0 if text.is_empty() => None,
        0 => Some((text, DEFAULT_PORT)),
        1 => text
            .split_once(':')
            .filter(|(host, _)| !host.is_empty())
            .and_then(|(host, p)| Some((host, port(p)?))),
        _ => Some((text, DEFAULT_PORT)), // a bare IPv6 address
    }
}

fn resolve_host(text: &str, host: &str, port: u16) -> Result<SocketAddr, EndpointError> {
    if let Some((address, zone)) = host.split_once('%') {
        let v6: Ipv6Addr = address.parse().map_err(|_| EndpointError::Syntax(text.into()))?;
        let index = zone.parse().or_else(|_| if_nametoindex(zone));
        let index = index.map_err(|_| EndpointError::Zone { text: text.into(), zone: zone.into() })?;
        return Ok(SocketAddr::V6(SocketAddrV6::new(v6, port, 0, index)));
    }
    match host.parse::<IpAddr>() {
        Ok(IpAddr::V6(v6)) if v6.is_unicast_link_local() => Err(EndpointError::NoZone(host.into())),
        Ok(address) => Ok(SocketAddr::new(address, port)),
        Err(_) if host.contains(':') => Err(EndpointError::Syntax(text.into())),
        Err(_) => {
            let unresolved = |source| EndpointError::Name { name: host.into(), source };
            let mut found = (host, port).to_socket_addrs().map_err(unresolved)?;
            found.next().ok_or_else(|| EndpointError::NoAddress(host.into()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_with_and_without_ports() {
        for (text, wanted) in [
            ("10.0.0.1", "10.0.0.1:20545"),
            ("10.0.0.1:99", "10.0.0.1:99"),
            ("fd00::1", "[fd00::1]:20545"),
            ("[fd00::1]", "[fd00::1]:20545"),
            ("[fd00::1]:99", "[fd00::1]:99"),
            ("[fe80::1%1]:99", "[fe80::1%1]:99"),
            ("fe80::1%lo", "[fe80::1%1]:20545"),
        ] {
            let address = Endpoint::resolve(text).map(|endpoint| endpoint.address.to_string());
            assert_eq!(address.ok().as_deref(), Some(wanted), "{text}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "",
            ":",
            ":20545",
            "10.0.0.1:",
            "10.0.0.1:0",
            "10.0.0.1:x",
            "10.0.0.1:70000",
            "[fd00::1",
            "[fd00::1]x",
            "1:2:3",
        ] {
            assert!(matches!(Endpoint::resolve(text), Err(EndpointError::Syntax(_))), "{text}");
        }
        assert!(matches!(Endpoint::resolve("fe80::1"), Err(EndpointError::NoZone(_))));
        assert!(matches!(Endpoint::resolve("fe80::1%nosuch0"), Err(EndpointError::Zone { .. })));
        assert!(matches!(Endpoint::resolve("no-such-host.invalid"), Err(EndpointError::Name { .. })));
    }

    #[test]
    fn names_are_shown_with_their_address() {
        let shown = |text: &str| Endpoint::resolve(text).map(|endpoint| endpoint.to_string()).ok();
        assert_eq!(shown("10.0.0.1").as_deref(), Some("10.0.0.1:20545"));
        assert!(shown("localhost").is_some_and(|text| text.ends_with("(`localhost`)")));
    }
}
