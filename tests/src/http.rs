//! Asks an HTTP server in a namespace, as plainly as possible: one request of HTTP/1.0 a connection.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::netns::Namespace;

/// Longest wait for anything.
const TIMEOUT: Duration = Duration::from_secs(20);

/// What came back.
#[derive(Clone, Debug, Default)]
pub struct Response {
    /// The status.
    pub status: u16,
    /// Names in lower case, and values.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: String,
}

impl Response {
    /// The value of a header.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(header, _)| header == name).map(|(_, value)| value.as_str())
    }
}

/// Sends a request without a body from inside a namespace.
///
/// # Errors
/// Where nobody answers.
pub fn ask(namespace: &Namespace, address: SocketAddr, method: &str, path: &str) -> Result<Response> {
    namespace.run(|| send(address, method, path, ""))?
}

/// Sends a request from this thread's namespace; its body, if any, is JSON.
///
/// # Errors
/// Where nobody answers.
pub fn send(address: SocketAddr, method: &str, path: &str, body: &str) -> Result<Response> {
    send_as(None, address, method, path, body)
}

/// The same, with a bearer token.
///
/// # Errors
/// Where nobody answers.
pub fn send_as(
    token: Option<&str>,
    address: SocketAddr,
    method: &str,
    path: &str,
    body: &str,
) -> Result<Response> {
    let mut stream = TcpStream::connect_timeout(&address, TIMEOUT).with_context(|| address.to_string())?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let json = format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len());
    let about = if body.is_empty() { "" } else { json.as_str() };
    let token = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
    let head = format!("{method} {path} HTTP/1.0\r\nHost: {address}\r\n{token}{about}\r\n");
    stream.write_all((head + body).as_bytes())?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").context("no end of the header")?;
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).context("no status")?;
    let header = |line: &str| {
        let (name, value) = line.split_once(':')?;
        Some((name.to_ascii_lowercase(), value.trim().to_owned()))
    };
    let headers = lines.filter_map(header).collect();
    Ok(Response { status: status.parse().context("no status")?, headers, body: body.into() })
}

/// All ranks of a job join from inside a namespace.
///
/// # Errors
/// Where one is refused.
pub fn join_all(namespace: &Namespace, address: SocketAddr, job: &str, world: u32) -> Result<()> {
    let path = format!("/v1/jobs/{job}/join");
    let joined: Vec<Result<u16>> = std::thread::scope(|scope| {
        let path = &path;
        let one = |rank: u32| {
            scope.spawn(move || {
                let body = format!(r#"{{"protocol":1,"rank":{rank},"world":{world},"wait_seconds":30}}"#);
                Ok(namespace.run(|| send(address, "POST", path, &body))??.status)
            })
        };
        let ranks: Vec<_> = (0..world).map(one).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|_| bail!("no thread"))).collect()
    });
    for status in joined {
        let status = status?;
        ensure!(status == 200, "a rank of {job} was refused: {status}");
    }
    Ok(())
}
