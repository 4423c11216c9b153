//! The driver that works everywhere: a UDP socket, with as few system calls as can be.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use tracing::warn;

use super::batch::{Inbox, Outbox, Sent};
use super::driver::{BATCH, Driver};
use super::socket::{DataSocket, Target};
use super::xdp::PeerProgram;

/// How long messages of several datagrams may go without an answer before they are thought lost for being such: many
/// round trips, and what a busy host may add.
const PROBATION: Duration = Duration::from_millis(100);

/// How long requests may go without any answer before the worker's own end of a veth is looked at.
const SILENCE: Duration = Duration::from_millis(50);

/// Answers to segmented messages that prove that the path takes them, if so many are under way.
const PROOF: u64 = BATCH as u64 / 2;

/// Whether the path takes messages of several datagrams is only seen from their answers. Virtual interfaces hand them on
/// whole; an aggregator behind nothing but such ones, in generic mode, then meets them uncut, and drops them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Probation {
    /// When the first message of several datagrams was sent.
    since: Option<Instant>,
    answers: u64,
    is_over: bool,
}

/// What the answers tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// It takes longer to know.
    Open,
    /// The path takes them.
    Passed,
    /// Nothing came back but what single datagrams explain.
    Failed,
}

impl Probation {
    /// Each request is answered once and at once: more answers than single requests are answers to segmented ones.
    fn judge(&mut self, sent: Sent, now: Instant) -> Verdict {
        if sent.segmented == 0 {
            return Verdict::Open;
        }
        let since = *self.since.get_or_insert(now);
        if self.answers >= sent.single + PROOF.min(sent.segmented.div_ceil(2)) {
            self.is_over = true;
            return Verdict::Passed;
        }
        // Beside many single requests, losses among those weigh more than all answers to the others.
        let is_marginal = sent.segmented * 4 < sent.single;
        if is_marginal || now.saturating_duration_since(since) < PROBATION {
            return Verdict::Open;
        }
        self.is_over = true;
        Verdict::Failed
    }
}

/// A UDP socket as a driver.
pub struct UdpDriver {
    socket: DataSocket,
    target: Target,
    outbox: Outbox,
    inbox: Inbox,
    probation: Probation,
    /// When the first request was sent; none once silence was dealt with, or an answer has come.
    silent_since: Option<Instant>,
    has_started: bool,
    /// Attached as long as it lives.
    peer_program: Option<PeerProgram>,
    waits: u64,
}

impl UdpDriver {
    /// Drives a socket.
    ///
    /// # Errors
    /// If the route is gone.
    pub fn new(socket: DataSocket) -> io::Result<UdpDriver> {
        let target = socket.target();
        // With one port the kernel can look the way up once.
        let names: Vec<SocketAddr> = if target.ports == 1 {
            socket.connect()?;
            Vec::new()
        } else {
            (0..target.ports).map(|index| target.port(index)).collect()
        };
        Ok(UdpDriver {
            socket,
            target,
            outbox: Outbox::new(&names, true),
            inbox: Inbox::new(),
            probation: Probation::default(),
            silent_since: None,
            has_started: false,
            peer_program: None,
            waits: 0,
        })
    }

    /// Sends each datagram alone, for comparison.
    #[must_use]
    pub fn without_segments(mut self) -> UdpDriver {
        self.outbox.stop_segments();
        self
    }

    /// Whether messages of several datagrams are cut by the kernel or the card; false once that was refused, or nobody
    /// answered such messages.
    #[must_use]
    pub const fn segments(&self) -> bool {
        self.outbox.segments()
    }

    /// The first answers do not come: if this is a veth and the aggregator its other end, they need a program here.
    fn break_silence(&mut self) {
        let now = Instant::now();
        if !std::mem::replace(&mut self.has_started, true) {
            self.silent_since = Some(now);
        }
        if self.silent_since.is_some_and(|since| now.saturating_duration_since(since) >= SILENCE) {
            self.silent_since = None;
            self.peer_program = PeerProgram::attach_where_needed(self.target);
        }
    }

    fn judge_segments(&mut self) {
        if self.probation.judge(self.outbox.sent(), Instant::now()) == Verdict::Failed {
            self.outbox.stop_segments();
            warn!(
                "nobody answers messages of several datagrams (UDP segmentation), so each is sent alone: is the aggregator \
                 in generic mode behind a virtual interface?"
            );
        }
    }
}

impl Driver for UdpDriver {
    fn room(&mut self) -> Option<&mut [u8]> {
        self.outbox.room()
    }

    fn push(&mut self, length: usize, seq: u32) {
        self.outbox.push(length, self.target.port_index(seq));
    }

    fn flush(&mut self) -> io::Result<bool> {
        if !self.has_started && !self.outbox.is_empty() || self.silent_since.is_some() {
            self.break_silence();
        }
        let result = self.outbox.flush(self.socket.as_fd());
        if !self.probation.is_over && self.outbox.segments() {
            self.judge_segments();
        }
        result
    }

    fn receive(&mut self, take: &mut dyn FnMut(&[u8], bool)) -> io::Result<bool> {
        match self.inbox.receive(self.socket.as_fd(), |from| self.target.is_sender(from), take) {
            Ok(received) => {
                self.probation.answers += received as u64;
                self.silent_since = None;
                Ok(received == BATCH)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn wait(&mut self, timeout: Duration) -> io::Result<Option<io::Error>> {
        self.waits += 1;
        self.socket.wait(timeout, !self.outbox.is_empty())
    }

    fn system_calls(&self) -> u64 {
        self.outbox.calls() + self.inbox.calls() + self.waits
    }

    /// Closing the socket does it.
    fn stop(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_pass_or_fail_by_their_answers() {
        let start = Instant::now();
        let later = start + PROBATION;
        let sent = |single, segmented| Sent { single, segmented };
        let judge = |sent, answers, now| {
            let mut probation = Probation { since: Some(start), answers, is_over: false };
            let verdict = probation.judge(sent, now);
            assert_eq!(probation.is_over, verdict != Verdict::Open);
            verdict
        };
        // Nothing segmented yet: nothing to judge, however long it takes.
        assert_eq!(judge(sent(1000, 0), 0, later), Verdict::Open);
        assert_eq!(judge(sent(3, 64), 3, start), Verdict::Open);
        assert_eq!(judge(sent(3, 64), 35, start), Verdict::Passed);
        // All answers are explained by single datagrams.
        assert_eq!(judge(sent(500, 640), 500, later), Verdict::Failed);
        // A job of two chunks.
        assert_eq!(judge(sent(1, 2), 2, start), Verdict::Passed);
        assert_eq!(judge(sent(1, 2), 1, later), Verdict::Failed);
    }
}
