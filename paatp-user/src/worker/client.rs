//! Joins a job at the aggregator's control server.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use paatp_transport::words::Span;
use thiserror::Error;
use tracing::{info, warn};
use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};

use crate::control::MAX_WAIT_SECONDS;
use crate::control::protocol::{Grant, JoinRequest, PROTOCOL, RANKS_MISSING, Refused};

use super::endpoint::Endpoint;

/// Pause before the next attempt to reach an aggregator that does not answer.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// How much longer than the server's own wait the connection is held: the server's answer names the missing ranks.
const GRACE: Duration = Duration::from_secs(2);

/// Largest answer, in bytes; a grant has 200, a refusal that names all jobs a few thousand.
const MAX_ANSWER_BYTES: u64 = 64 << 10;

/// A job could not be joined.
#[derive(Debug, Error)]
pub enum ClientError {
    /// Nobody listens, or nothing comes back.
    #[error(
        "no aggregator answers at {aggregator} (tried for {}): is `paatp run` running there, and is the port right?",
        Span(*.waited)
    )]
    NoAggregator {
        /// The aggregator.
        aggregator: String,
        /// How long.
        waited: Duration,
        /// The last attempt's failure.
        #[source]
        source: Box<ureq::Error>,
    },
    /// The aggregator said no.
    #[error("the aggregator at {aggregator} refused rank {rank} of job `{job}`: {}", .answer.message)]
    Refused {
        /// The aggregator.
        aggregator: String,
        /// The job.
        job: String,
        /// The rank.
        rank: u32,
        /// What it said.
        answer: Box<Refused>,
    },
    /// Something that is no aggregator answered.
    #[error(
        "what answers at {aggregator} is no aggregator of this version (HTTP status {status}): {detail}; check address and port"
    )]
    Strange {
        /// The aggregator.
        aggregator: String,
        /// HTTP status.
        status: u16,
        /// What was wrong with the answer.
        detail: String,
    },
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

/// Joins a job and waits for its other ranks; tries again while nobody answers. `sign` shows that on a terminal, and is
/// put aside for log lines.
///
/// # Errors
/// If the aggregator refuses, or the timeout is over.
pub fn join(
    endpoint: &Endpoint,
    job: &str,
    rank: u32,
    world: u32,
    timeout: Duration,
    layout: &str,
    sign: &ProgressBar,
) -> Result<Grant, ClientError> {
    let start = Instant::now();
    let mut told = false;
    loop {
        let left = timeout.saturating_sub(start.elapsed());
        let request = JoinRequest {
            protocol: PROTOCOL,
            rank,
            world,
            wait_seconds: left.as_secs_f64().min(MAX_WAIT_SECONDS),
            layout: Some(layout.to_owned()),
        };
        sign.suspend(|| info!(aggregator = %endpoint, job, rank, "joining"));
        let error = match attempt(endpoint, job, &request, left + GRACE) {
            Ok((status, body)) => match read(endpoint, job, rank, status, &body) {
                Err(ClientError::Refused { answer, .. })
                    if answer.error == RANKS_MISSING && left.as_secs_f64() > MAX_WAIT_SECONDS =>
                {
                    // No server waits for so long: join again.
                    continue;
                }
                result => return result,
            },
            Err(error) => error,
        };
        if start.elapsed() + RETRY_PAUSE >= timeout {
            return Err(ClientError::NoAggregator {
                aggregator: endpoint.to_string(),
                waited: start.elapsed(),
                source: Box::new(error),
            });
        }
        if !std::mem::replace(&mut told, true) {
            sign.suspend(
                || warn!(aggregator = %endpoint, "no answer yet, trying until the timeout: {error}"),
            );
        }
        thread::sleep(RETRY_PAUSE);
    }
}

/// One request; returns status and body.
fn attempt(
    endpoint: &Endpoint,
    job: &str,
    request: &JoinRequest,
    deadline: Duration,
) -> Result<(u16, Vec<u8>), ureq::Error> {
    let config = Config::builder()
        .http_status_as_error(false)
        // An aggregator is a neighbour; the environment's proxy would make the rank's address the proxy's.
        .proxy(None)
        .max_redirects(0)
        .timeout_global(Some(deadline))
        .build();
    let agent = ureq::Agent::with_parts(config, DefaultConnector::default(), Fixed(endpoint.address));
    let uri = format!("http://aggregator:{}/v1/jobs/{}/join", endpoint.address.port(), escape(job));
    let mut answer = agent.post(uri).send_json(request)?;
    let body = answer.body_mut().with_config().limit(MAX_ANSWER_BYTES).read_to_vec()?;
    Ok((answer.status().as_u16(), body))
}

/// A name as a part of a path.
fn escape(name: &str) -> String {
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

fn read(endpoint: &Endpoint, job: &str, rank: u32, status: u16, body: &[u8]) -> Result<Grant, ClientError> {
    let aggregator = endpoint.to_string();
    let strange = |detail: String| ClientError::Strange { aggregator: endpoint.to_string(), status, detail };
    if status == 200 {
        let grant: Grant = serde_json::from_slice(body).map_err(|error| strange(error.to_string()))?;
        if grant.protocol != PROTOCOL || grant.ports == 0 {
            return Err(strange("its grant cannot be used".into()));
        }
        return Ok(grant);
    }
    let refused: Refused = serde_json::from_slice(body).map_err(|error| strange(error.to_string()))?;
    Err(ClientError::Refused { aggregator, job: job.into(), rank, answer: Box::new(refused) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    /// Answers one request with each text.
    fn server(answers: &'static [&'static str]) -> Endpoint {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap_or_else(|error| panic!("{error}"));
        let address = listener.local_addr().unwrap_or_else(|error| panic!("{error}"));
        thread::spawn(move || {
            for answer in answers {
                let Ok((mut stream, _)) = listener.accept() else { return };
                let mut request = vec![0; 4096];
                // The head may come before the body.
                while !request.windows(8).any(|window| window == b"\"layout\"") {
                    match stream.read(&mut request) {
                        Ok(0) | Err(_) => break,
                        Ok(_) => {}
                    }
                }
                let _ = write!(stream, "HTTP/1.1 {answer}");
            }
        });
        Endpoint { text: "test".into(), address }
    }

    fn ask(endpoint: &Endpoint, timeout: Duration) -> Result<Grant, ClientError> {
        join(endpoint, "pair", 0, 2, timeout, "x", &ProgressBar::hidden())
    }

    const MISSING: &str = "408 Request Timeout\r\nContent-Length: 66\r\n\r\n{\"error\":\"ranks_missing\",\"message\":\"rank 1\",\"missing_ranks\":[1,3]}";

    #[test]
    fn refusals_keep_words_and_ranks() {
        match ask(&server(&[MISSING]), Duration::from_secs(5)) {
            Err(ClientError::Refused { answer, .. }) => {
                let Refused { error, message, missing_ranks } = *answer;
                let words = (error.as_str(), message.as_str());
                assert_eq!((words, missing_ranks), (("ranks_missing", "rank 1"), vec![1, 3]));
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn others_than_aggregators_are_told_apart() {
        let endpoint = server(&["200 OK\r\nContent-Length: 2\r\n\r\nhi"]);
        let error = ask(&endpoint, Duration::from_secs(5)).map_err(|error| error.to_string());
        assert!(
            error.is_err_and(|message| message.contains("no aggregator of this version (HTTP status 200)"))
        );
    }

    /// A server waits for an hour at most; who is told to wait for longer joins again.
    #[test]
    fn long_waits_are_several() {
        let endpoint = server(&[
            MISSING,
            MISSING,
            "409 Conflict\r\nContent-Length: 32\r\n\r\n{\"error\":\"x\",\"message\":\"enough\"} ",
        ]);
        match ask(&endpoint, Duration::from_secs(7200)) {
            Err(ClientError::Refused { answer, .. }) => assert_eq!(answer.message, "enough"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn nobody_there_is_an_error_after_the_timeout() {
        let listener = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let Ok(address) = listener else { panic!("no port") };
        let endpoint = Endpoint { text: address.to_string(), address };
        let start = Instant::now();
        let error = ask(&endpoint, Duration::from_millis(500)).map_err(|error| error.to_string());
        assert!(start.elapsed() < Duration::from_secs(3));
        let message = error.err().unwrap_or_default();
        assert!(message.contains("is `paatp run` running there, and is the port right?"), "{message}");
    }

    #[test]
    fn names_are_escaped() {
        assert_eq!(escape("a-b_c.9"), "a-b_c.9");
        assert_eq!(escape("a/b ?é"), "a%2Fb%20%3F%C3%A9");
    }
}
