//! The application of each rank: it computes, hands in, checks the sums and goes on.

use paatp_transport::{Event, Handle, Values};

use super::{Happening, Peer, Simulation, SimulationError};
use crate::training::{self, OperationId};
use crate::units::Nanos;

impl Simulation<'_> {
    pub(super) fn hear(&mut self, host: usize) -> Result<(), SimulationError> {
        while let Some(event) = self.peers[host].worker.poll_event() {
            match event {
                Event::Done { handle, tensors, .. } => {
                    let values = tensors.into_iter().next().map(|tensor| tensor.values);
                    self.check_result(host, handle, values.as_ref())?;
                    self.done(host, handle)?;
                }
                Event::Failed { error: source, .. } => {
                    let Peer { job, rank, .. } = self.peers[host];
                    return Err(SimulationError::Operation { at: self.now, job, rank, source });
                }
                Event::Left { complete } => self.peers[host].left = Some(complete),
            }
        }
        Ok(())
    }

    pub(super) fn wrong<T>(&self, host: usize, what: String) -> Result<T, SimulationError> {
        let Peer { job, rank, .. } = self.peers[host];
        Err(SimulationError::Wrong { at: self.now, job, rank, what })
    }

    /// Compares a result with the sum.
    fn check_result(
        &mut self,
        host: usize,
        handle: Handle,
        values: Option<&Values>,
    ) -> Result<(), SimulationError> {
        let (job, spec) = (self.peers[host].job, self.job_of(host));
        let Some(operation) = self.peers[host].operations.get(&handle.0).copied() else {
            return self.wrong(host, format!("operation {} is done twice", handle.0));
        };
        let (right, seen) =
            self.expected.entry((job, operation)).or_insert_with(|| (training::expected(spec, operation), 0));
        *seen += 1;
        let (is_right, is_last) = (values == Some(right), *seen == spec.world);
        if is_last {
            self.expected.remove(&(job, operation));
        }
        if is_right { Ok(()) } else { self.wrong(host, format!("{operation:?} has a wrong result")) }
    }

    /// A rank begins an iteration: it computes.
    pub(super) fn begin(&mut self, host: usize) -> Result<(), SimulationError> {
        let (spec, start) = (self.job_of(host), self.now);
        let peer = &mut self.peers[host];
        let effort = peer.pace.next(&self.scenario.stragglers);
        let iteration = peer.begun;
        peer.begun += 1;
        peer.computing = true;
        peer.missing.insert(iteration, spec.operations);
        for index in 0..spec.operations {
            let at = start + training::ready_after(spec, effort.compute, index);
            self.schedule(at, Happening::Ready(host as u32, OperationId { iteration, index }));
        }
        if let Some((after, span)) = effort.failure {
            self.schedule(start + after, Happening::Fail(host as u32, span));
        }
        Ok(())
    }

    pub(super) fn hand_in(&mut self, host: usize, operation: OperationId) -> Result<(), SimulationError> {
        if self.is_dead(host) {
            // What a dead host would have computed is there when it is back.
            self.peers[host].held.push_back(operation);
            return Ok(());
        }
        let (spec, time) = (self.job_of(host), self.time());
        let peer = &mut self.peers[host];
        let tensor = training::tensor(spec, operation, peer.rank);
        let handle = peer.worker.all_reduce(time, training::reduction(spec), vec![tensor]);
        peer.operations.insert(handle.0, operation);
        if operation.index + 1 == spec.operations {
            peer.computing = false;
        }
        self.pump(host)?;
        self.go_on(host);
        Ok(())
    }

    fn done(&mut self, host: usize, handle: Handle) -> Result<(), SimulationError> {
        let peer = &mut self.peers[host];
        let Some(operation) = peer.operations.remove(&handle.0) else { return Ok(()) };
        let missing = peer.missing.entry(operation.iteration).or_insert(0);
        *missing = missing.saturating_sub(1);
        if *missing == 0 {
            peer.missing.remove(&operation.iteration);
            peer.finished += 1;
            let (job, iteration) = (peer.job, operation.iteration);
            if self.recorder.finished(self.now, usize::from(job), iteration) {
                for (job, chunks) in (0..).zip(self.delivered_by_all()) {
                    self.recorder.jobs[job].chunks_when_first_ended = chunks;
                }
            }
            self.go_on(host);
        }
        Ok(())
    }

    /// Chunks that all ranks of a job have, for each job.
    fn delivered_by_all(&self) -> Vec<u64> {
        let of_job = |job: u16| {
            let ranks = self.peers.iter().filter(|peer| peer.job == job);
            ranks.map(|peer| peer.worker.chunks().0).min().unwrap_or(0)
        };
        (0..self.scenario.jobs.len() as u16).map(of_job).collect()
    }

    /// Begins the next iteration if it may, or leaves after the last.
    fn go_on(&mut self, host: usize) {
        let (spec, time) = (self.job_of(host), self.time());
        let peer = &mut self.peers[host];
        if peer.computing {
            return;
        }
        if peer.begun < spec.iterations {
            if peer.begun <= peer.finished + spec.staleness {
                peer.computing = true;
                self.schedule(self.now, Happening::Begin(host as u32));
            }
        } else if peer.finished == spec.iterations {
            peer.worker.leave(time);
            self.schedule(self.now, Happening::Wake(host as u32));
        }
    }

    pub(super) fn fail(&mut self, host: usize, span: Nanos) {
        let peer = &mut self.peers[host];
        let until = (self.now + span).max(peer.dead_until.unwrap_or_default());
        peer.dead_until = Some(until);
        self.schedule(until, Happening::Recover(host as u32));
    }

    pub(super) fn recover(&mut self, host: usize) -> Result<(), SimulationError> {
        while !self.is_dead(host)
            && let Some(operation) = self.peers[host].held.pop_front()
        {
            self.hand_in(host, operation)?;
        }
        self.wake(host)
    }
}
