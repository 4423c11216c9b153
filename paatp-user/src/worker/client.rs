//! Joins a job at the aggregator's control server.

use std::thread;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use paatp_transport::words::{Ranks, Span};
use thiserror::Error;
use tracing::{debug, info, warn};
use ureq::http::Method;

use crate::client::{Server, escape};
use crate::control::MAX_WAIT_SECONDS;
use crate::control::error::Code;
use crate::control::protocol::{Grant, JobDetails, JoinRequest, LeaveRequest, PROTOCOL, Problem};

/// Pause before the next attempt to reach an aggregator that does not answer.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// How much longer than the server's own wait the connection is held: the server's answer names the missing ranks.
const GRACE: Duration = Duration::from_secs(2);

/// Longest time that a worker who is done spends on saying so: a daemon that was killed is back by then, or it stays away.
pub const LEAVE_PATIENCE: Duration = Duration::from_secs(10);

/// Longest time for a question whose answer is only good to know.
const ASIDE: Duration = Duration::from_secs(2);

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
    #[error("the aggregator at {aggregator} refused rank {rank} of job `{job}`: {}", .answer.detail)]
    Refused {
        /// The aggregator.
        aggregator: String,
        /// The job.
        job: String,
        /// The rank.
        rank: u32,
        /// What it said.
        answer: Box<Problem>,
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

impl ClientError {
    /// The aggregator ends: perhaps it is started again.
    fn is_stopping(&self) -> bool {
        matches!(self, ClientError::Refused { answer, .. } if answer.code == Code::STOPPING.name())
    }
}

/// Joins a job and waits for its other ranks; tries again while nobody answers. `sign` shows that on a terminal, and is
/// put aside for log lines.
///
/// # Errors
/// If the aggregator refuses, or the timeout is over.
pub fn join(
    server: &Server,
    job: &str,
    rank: u32,
    world: u32,
    timeout: Duration,
    layout: &str,
    sign: &ProgressBar,
) -> Result<Grant, ClientError> {
    let endpoint = server.endpoint();
    let path = format!("/v1/jobs/{}/join", escape(job));
    let start = Instant::now();
    let mut told = false;
    // The same for all attempts: if an answer gets lost, the grant in it is not. Without randomness it is.
    let attempt = getrandom::u64().ok();
    loop {
        let left = timeout.saturating_sub(start.elapsed());
        let request = JoinRequest {
            protocol: PROTOCOL,
            rank,
            world,
            wait_seconds: left.as_secs_f64().min(MAX_WAIT_SECONDS),
            layout: Some(layout.to_owned()),
            attempt,
            below: None,
            members: None,
        };
        sign.suspend(|| info!(aggregator = %endpoint, job, rank, "joining"));
        let error = match server.ask(Method::POST, &path, Some(&request), left + GRACE) {
            Ok((status, body)) => match read(server, job, rank, status, &body) {
                Err(ClientError::Refused { answer, .. })
                    if answer.code == Code::RANKS_MISSING.name() && left.as_secs_f64() > MAX_WAIT_SECONDS =>
                {
                    // No server waits for so long: join again.
                    continue;
                }
                Err(error @ ClientError::Refused { .. }) if error.is_stopping() => error,
                result => return result,
            },
            Err(source) => {
                let (aggregator, waited) = (endpoint.to_string(), start.elapsed());
                // More time does not mend a certificate.
                let is_final = matches!(source, ureq::Error::Tls(_) | ureq::Error::Rustls(_));
                let error = ClientError::NoAggregator { aggregator, waited, source: Box::new(source) };
                if is_final {
                    return Err(error);
                }
                error
            }
        };
        if start.elapsed() + RETRY_PAUSE >= timeout {
            return Err(error);
        }
        if !std::mem::replace(&mut told, true) {
            let cause = std::error::Error::source(&error).unwrap_or(&error);
            sign.suspend(
                || warn!(aggregator = %endpoint, "no answer yet, trying until the timeout: {cause}"),
            );
        }
        thread::sleep(RETRY_PAUSE);
    }
}

/// Says that a rank has all results of its generation; tries again for `patience` while nobody answers, as when the
/// aggregator is started again. Nothing depends on it but what the aggregator knows.
pub fn leave(server: &Server, job: &str, rank: u32, generation: u32, patience: Duration) {
    let request = LeaveRequest { protocol: PROTOCOL, rank, generation: Some(generation) };
    let path = format!("/v1/jobs/{}/leave", escape(job));
    let start = Instant::now();
    loop {
        match server.ask(Method::POST, &path, Some(&request), ASIDE) {
            Ok((204, _)) => return,
            Ok((status, _)) => return debug!(status, "the aggregator did not take the leave"),
            Err(error) if start.elapsed() + RETRY_PAUSE >= patience => {
                return debug!("could not leave: {error}");
            }
            Err(_) => thread::sleep(RETRY_PAUSE),
        }
    }
}

/// What became of a generation, as the aggregator tells it: packets cannot say why it is over.
#[must_use]
pub fn fate(server: &Server, job: &str, generation: u32) -> Option<String> {
    let path = format!("/v1/jobs/{}", escape(job));
    let (status, body) = server.ask(Method::GET, &path, None::<&()>, ASIDE).ok()?;
    if status != 200 {
        let problem: Problem = serde_json::from_slice(&body).ok()?;
        let deleted = problem.code == Code::UNKNOWN_JOB.name();
        return deleted.then(|| format!("the aggregator has no job `{job}` any more: it was deleted"));
    }
    let details: JobDetails = serde_json::from_slice(&body).ok()?;
    let lost = &details.status.lost_ranks;
    match details.status.generation {
        Some(running) if running == generation && lost.is_empty() => None,
        Some(running) if running != generation => {
            Some("another run of the job has begun since: its ranks joined again".into())
        }
        _ if lost.is_empty() => Some("the aggregator has ended this run of the job".into()),
        _ => Some(format!(
            "the aggregator says: {} held the others up for longer than the job allows",
            Ranks(lost)
        )),
    }
}

fn read(server: &Server, job: &str, rank: u32, status: u16, body: &[u8]) -> Result<Grant, ClientError> {
    let aggregator = server.endpoint().to_string();
    let strange = |detail: String| ClientError::Strange { aggregator: aggregator.clone(), status, detail };
    if status == 200 {
        let grant: Grant = serde_json::from_slice(body).map_err(|error| strange(error.to_string()))?;
        if grant.protocol != PROTOCOL || grant.ports == 0 {
            return Err(strange("its grant cannot be used".into()));
        }
        return Ok(grant);
    }
    let refused: Problem = serde_json::from_slice(body).map_err(|error| strange(error.to_string()))?;
    Err(ClientError::Refused { aggregator, job: job.into(), rank, answer: Box::new(refused) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Credentials;
    use crate::worker::Endpoint;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    fn client(endpoint: Endpoint) -> Server {
        Server::new(endpoint, &Credentials::default()).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Answers one request with each text.
    fn server(answers: &'static [&'static str]) -> Server {
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
        client(Endpoint { text: "test".into(), address })
    }

    fn ask(server: &Server, timeout: Duration) -> Result<Grant, ClientError> {
        join(server, "pair", 0, 2, timeout, "x", &ProgressBar::hidden())
    }

    const MISSING: &str = "408 Request Timeout\r\nContent-Length: 88\r\n\r\n{\"code\":\"ranks_missing\",\"title\":\"\",\"status\":408,\"detail\":\"rank 1\",\"missing_ranks\":[1,3]}";

    #[test]
    fn refusals_keep_words_and_ranks() {
        match ask(&server(&[MISSING]), Duration::from_secs(5)) {
            Err(ClientError::Refused { answer, .. }) => {
                let Problem { code, detail, missing_ranks, .. } = *answer;
                let words = (code.as_str(), detail.as_str());
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
            "409 Conflict\r\nContent-Length: 54\r\n\r\n{\"code\":\"x\",\"title\":\"\",\"status\":409,\"detail\":\"enough\"}",
        ]);
        match ask(&endpoint, Duration::from_secs(7200)) {
            Err(ClientError::Refused { answer, .. }) => assert_eq!(answer.detail, "enough"),
            other => panic!("{other:?}"),
        }
    }

    /// An aggregator that ends may be started again; whoever asks again shows the same attempt.
    #[test]
    fn a_stopping_aggregator_is_asked_again() {
        let endpoint = server(&[
            "503 Service Unavailable\r\nContent-Length: 56\r\n\r\n{\"code\":\"stopping\",\"title\":\"\",\"status\":503,\"detail\":\"e\"}",
            "409 Conflict\r\nContent-Length: 54\r\n\r\n{\"code\":\"x\",\"title\":\"\",\"status\":409,\"detail\":\"enough\"}",
        ]);
        match ask(&endpoint, Duration::from_secs(20)) {
            Err(ClientError::Refused { answer, .. }) => assert_eq!(answer.detail, "enough"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn nobody_there_is_an_error_after_the_timeout() {
        let listener = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let Ok(address) = listener else { panic!("no port") };
        let endpoint = client(Endpoint { text: address.to_string(), address });
        let start = Instant::now();
        let error = ask(&endpoint, Duration::from_millis(500)).map_err(|error| error.to_string());
        assert!(start.elapsed() < Duration::from_secs(3));
        let message = error.err().unwrap_or_default();
        assert!(message.contains("is `paatp run` running there, and is the port right?"), "{message}");
    }
}
