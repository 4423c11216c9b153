//! Which names a request may be for.
//!
//! A web page whose name was made to resolve to this server (DNS rebinding) can make a browser that visits it ask here,
//! past whatever keeps strangers away, and read the answers. Such a request carries the page's name. So without TLS only
//! requests for an address, for `localhost`, or for a name that the operator gave are answered. With TLS the browser
//! refuses by itself: the certificate is not the page's.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::HeaderValue;
use axum::http::header::HOST;
use axum::middleware::Next;
use axum::response::Response;

use super::error::ControlError;

/// Characters of a refused name that the refusal repeats: as many as a name may have.
const MAX_NAME_TOLD: usize = 253;

/// Names that the operator gave.
#[derive(Clone, Debug, Default)]
pub struct Hosts(Vec<String>);

impl Hosts {
    /// With these names, in any case, with or without a port.
    #[must_use]
    pub fn new(names: &[String]) -> Hosts {
        Hosts(
            names
                .iter()
                .map(|name| normal(without_port(name.trim())))
                .filter(|name| !name.is_empty())
                .collect(),
        )
    }

    /// Whether a request for this host, with or without a port, is meant for us.
    fn allow(&self, host: &str) -> bool {
        let name = without_port(host);
        let address = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        if let Some(v6) = address {
            return v6.parse::<Ipv6Addr>().is_ok();
        }
        let name = normal(name);
        name == "localhost" || name.parse::<Ipv4Addr>().is_ok() || self.0.contains(&name)
    }
}

/// A name as it is compared: DNS knows no case, and a full stop at the end means the same.
fn normal(name: &str) -> String {
    name.trim().trim_end_matches('.').to_ascii_lowercase()
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

/// Lets a request through if it is for one of our names. One that names no host comes from no browser.
pub(super) async fn check(
    State(hosts): State<Arc<Hosts>>,
    request: Request,
    next: Next,
) -> Result<Response, ControlError> {
    let text = |host: &HeaderValue| String::from_utf8_lossy(host.as_bytes()).into_owned();
    let headers: Vec<String> = request.headers().get_all(HOST).iter().map(text).collect();
    // Where both are there, the line counts (RFC 9112); whoever sends two different ones is up to something.
    let line = request.uri().authority().map(|authority| authority.as_str().to_owned());
    if let Some(host) = headers.into_iter().chain(line).find(|host| !hosts.allow(host)) {
        return Err(ControlError::BadHost(without_port(&host).chars().take(MAX_NAME_TOLD).collect()));
    }
    Ok(next.run(request).await)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::testing::server;
    use std::io::{Read, Write};

    #[test]
    fn names_are_addresses_or_known() {
        let hosts = Hosts::new(&["Node.Example.".into(), "other.example:20545".into(), String::new()]);
        for host in [
            "127.0.0.1",
            "127.0.0.1:20545",
            "10.0.0.1:1",
            "[::1]",
            "[fd00::1]:20545",
            "localhost",
            "LocalHost:20545",
            "localhost.",
            "node.example",
            "NODE.example:9",
            "other.example",
            "other.example:20545",
        ] {
            assert!(hosts.allow(host), "{host}");
        }
        for host in [
            "",
            ":20545",
            "evil.example",
            "evil.example:20545",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "x.node.example",
            "2130706433",
            "0x7f.1",
            "[evil]",
            "127.0.0.1:x",
            "evil.example:127.0.0.1",
            "::1",
        ] {
            assert!(!hosts.allow(host), "{host}");
        }
        assert!(!Hosts::default().allow("node.example"));
    }

    /// Over a connection: the status of `GET /v1/status` with these lines in its header.
    fn status(line: &str, headers: &str) -> String {
        let server = server();
        let mut stream =
            std::net::TcpStream::connect(server.address).unwrap_or_else(|error| panic!("{error}"));
        let _ = write!(stream, "GET {line} HTTP/1.1\r\n{headers}\r\n");
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    }

    #[test]
    fn a_page_that_made_itself_our_name_reads_nothing() {
        for (line, headers) in [
            ("/v1/status", "Host: evil.example:20545\r\n"),
            ("/", "Host: evil.example\r\n"),
            ("/metrics", "Host: evil.example\r\n"),
            ("http://evil.example/v1/status", "Host: 127.0.0.1\r\n"),
            ("/v1/status", "Host: 127.0.0.1\r\nHost: evil.example\r\n"),
        ] {
            let answer = status(line, headers);
            let is_refused = answer.starts_with("HTTP/1.1 421") && answer.contains("\"bad_host\"");
            let is_malformed = answer.starts_with("HTTP/1.1 400");
            assert!(is_refused || is_malformed, "{line} {headers}: {answer}");
            assert!(!answer.contains("core_age_seconds"), "{answer}");
        }
        let refusal = status("/v1/status", "Host: evil.example:20545\r\n");
        assert!(refusal.contains("--allowed-host evil.example"), "{refusal}");
        assert!(status("/v1/status", "Host: 127.0.0.1:20545\r\n").starts_with("HTTP/1.1 200"));
        assert!(status("http://127.0.0.1/v1/status", "Host: localhost\r\n").starts_with("HTTP/1.1 200"));
    }
}
