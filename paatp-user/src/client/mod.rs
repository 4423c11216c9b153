//! Talks to a control server: as a worker that joins (`worker::client`) and as `paatp job` ([`job`]).

pub mod job;
pub mod table;

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use thiserror::Error;
use ureq::config::Config;
use ureq::http::{Method, Request, Uri};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};

use crate::cli::Credentials;
use crate::control::token::{self, TokenError};
use crate::worker::Endpoint;

/// Largest answer, in bytes: 64 jobs of 64 ranks with all that can be seen of them need 1.2 MiB.
const MAX_ANSWER_BYTES: u64 = 4 << 20;

/// Token or certificates cannot be used.
#[derive(Debug, Error)]
pub enum CredentialError {
    /// The token.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// The certificates cannot be read.
    #[error("cannot read the certificates {path} (--tls-ca); check path and permissions")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The file holds none.
    #[error("{0} (--tls-ca) holds no certificate; it must be a PEM file")]
    NoCertificate(PathBuf),
}

/// Answers every question with the one address that was resolved before; it may have a zone, which no URI can hold.
#[derive(Debug)]
struct Fixed(SocketAddr);

impl Resolver for Fixed {
    fn resolve(&self, _: &Uri, _: &Config, _: NextTimeout) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let mut all = self.empty();
        all.push(self.0);
        Ok(all)
    }
}

/// A control server, and how to speak to it.
#[derive(Clone, Debug)]
pub struct Server {
    endpoint: Endpoint,
    authorization: Option<Secret>,
    roots: Option<RootCerts>,
}

/// A header that is not printed.
#[derive(Clone)]
struct Secret(String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Secret")
    }
}

impl Server {
    /// Reads the files that the credentials name. An empty name is none.
    ///
    /// # Errors
    /// If one cannot be used.
    pub fn new(endpoint: Endpoint, credentials: &Credentials) -> Result<Server, CredentialError> {
        let given = |path: &Option<PathBuf>| path.clone().filter(|path| !path.as_os_str().is_empty());
        let token = given(&credentials.token_file).map(|path| token::read(&path)).transpose()?;
        let roots = given(&credentials.tls_ca).map(|path| certificates(&path)).transpose()?;
        let authorization = token.map(|token| Secret(format!("Bearer {token}")));
        Ok(Server { endpoint, authorization, roots })
    }

    /// Where it is.
    #[must_use]
    pub const fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// One request; returns status and body.
    ///
    /// # Errors
    /// If nobody answers until the deadline, or no HTTP.
    pub fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
        deadline: Duration,
    ) -> Result<(u16, Vec<u8>), ureq::Error> {
        let mut config = Config::builder()
            .http_status_as_error(false)
            // An aggregator is a neighbour; the environment's proxy would make the rank's address the proxy's.
            .proxy(None)
            .max_redirects(0)
            .timeout_global(Some(deadline));
        if let Some(roots) = &self.roots {
            config = config.tls_config(TlsConfig::builder().root_certs(roots.clone()).build());
        }
        let address = self.endpoint.address;
        let agent = ureq::Agent::with_parts(config.build(), DefaultConnector::default(), Fixed(address));
        let mut request = Request::builder().method(method).uri(self.uri(path));
        if let Some(Secret(authorization)) = &self.authorization {
            request = request.header("Authorization", authorization);
        }
        let mut answer = match body {
            Some(body) => {
                let text = serde_json::to_vec(body).map_err(|error| ureq::Error::Io(error.into()))?;
                agent.run(request.header("Content-Type", "application/json").body(text)?)?
            }
            None => agent.run(request.body(())?)?,
        };
        let body = answer.body_mut().with_config().limit(MAX_ANSWER_BYTES).read_to_vec()?;
        Ok((answer.status().as_u16(), body))
    }

    fn uri(&self, path: &str) -> String {
        let port = self.endpoint.address.port();
        match &self.roots {
            // Servers without TLS want to be asked for by an address.
            None => format!("http://{}:{port}{path}", literal(self.endpoint.address.ip())),
            // The certificate is for it.
            Some(_) => format!("https://{}:{port}{path}", host(&self.endpoint)),
        }
    }
}

/// An address as a part of a URI; a zone is nobody's business but this machine's.
fn literal(address: IpAddr) -> String {
    match address {
        IpAddr::V6(v6) => format!("[{v6}]"),
        IpAddr::V4(v4) => v4.to_string(),
    }
}

/// The host of an endpoint, as certificates name it.
fn host(endpoint: &Endpoint) -> String {
    let text = endpoint.text.as_str();
    let name = text.rsplit_once(':').map_or(text, |(name, _)| name);
    let is_address = text.parse::<SocketAddr>().is_ok()
        || text.starts_with('[')
        || text.contains('%')
        || text.parse::<IpAddr>().is_ok();
    if is_address { literal(endpoint.address.ip()) } else { name.to_owned() }
}

/// The certificates of a file.
fn certificates(path: &Path) -> Result<RootCerts, CredentialError> {
    let text = std::fs::read(path).map_err(|source| CredentialError::Read { path: path.into(), source })?;
    let items = parse_pem(&text).filter_map(|item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(certificate),
        _ => None,
    });
    let list: Vec<Certificate<'static>> = items.collect();
    if list.is_empty() {
        return Err(CredentialError::NoCertificate(path.into()));
    }
    Ok(RootCerts::Specific(Arc::new(list)))
}

/// A name as a part of a path.
#[must_use]
pub fn escape(name: &str) -> String {
    let mut escaped = String::new();
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-') {
            escaped.push(byte.into());
        } else {
            let _ = write!(escaped, "%{byte:02X}");
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_escaped() {
        assert_eq!(escape("a-b_c.9"), "a-b_c.9");
        assert_eq!(escape("a/b ?é"), "a%2Fb%20%3F%C3%A9");
    }

    #[test]
    fn certificates_are_for_the_host_that_was_written() {
        let host = |text: &str, address: &str| {
            let address = address.parse().unwrap_or_else(|error| panic!("{error}"));
            host(&Endpoint { text: text.into(), address })
        };
        assert_eq!(host("node.example", "10.0.0.1:20545"), "node.example");
        assert_eq!(host("node.example:9", "10.0.0.1:9"), "node.example");
        assert_eq!(host("10.0.0.1:9", "10.0.0.1:9"), "10.0.0.1");
        assert_eq!(host("10.0.0.1", "10.0.0.1:20545"), "10.0.0.1");
        assert_eq!(host("[fd00::1]:9", "[fd00::1]:9"), "[fd00::1]");
        assert_eq!(host("fd00::1", "[fd00::1]:9"), "[fd00::1]");
    }

    #[test]
    fn tokens_are_not_printed() {
        let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
        let path = folder.path().join("token");
        assert!(std::fs::write(&path, "0123456789abcdef\n").is_ok());
        let address = SocketAddr::from(([127, 0, 0, 1], 1));
        let endpoint = Endpoint { text: "x".into(), address };
        let credentials = Credentials { token_file: Some(path), tls_ca: None };
        let server = Server::new(endpoint, &credentials).unwrap_or_else(|error| panic!("{error}"));
        assert!(server.authorization.is_some() && !format!("{server:?}").contains("0123"));
        let nothing = folder.path().join("nothing");
        let credentials = Credentials { token_file: None, tls_ca: Some(nothing) };
        let refused = Server::new(server.endpoint, &credentials);
        assert!(matches!(refused, Err(CredentialError::Read { .. })));
    }
}
