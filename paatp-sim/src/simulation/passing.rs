//! What the switch on the first leaf does with the packets that pass by.

use paatp_common::switch::{Outcome, address_copy};
use paatp_common::wire::{HEADER_BYTES, Header};

use super::{Happening, Simulation, SimulationError};
use crate::node::{Sender, generation};
use crate::switch::Passage;
use paatp_transport::rate::share::Share;
use std::time::Duration;

impl Simulation<'_> {
    /// A packet that has passed so many links is at the switch, and there is one that adds.
    pub(super) fn is_at_switch(&self, host: usize, hop: usize, is_answer: bool) -> bool {
        let place = if is_answer { 1 } else { self.topology.links_to_switch(host) };
        self.switch.is_some() && hop == place
    }

    /// A packet is at the switch, which adds it, answers it, copies it or lets it pass.
    pub(super) fn pass(&mut self, id: u32, host: usize) -> Result<(), SimulationError> {
        let Some(mut switch) = self.switch.take() else { return Ok(()) };
        let lowest = |job: u16| self.delivered(job).into_iter().min().unwrap_or(0);
        let packet = &self.packets[id as usize];
        let passage = Passage {
            peer: Sender::rank(self.peers[host].job, self.peers[host].rank),
            is_answer: packet.answer,
            congested: packet.congested,
            now: self.now,
        };
        let mut bytes = packet.bytes.clone();
        let outcome = switch.pass(&mut bytes, passage, &lowest);
        self.switch = Some(switch);
        let outcome = outcome.map_err(|violation| SimulationError::Violation { at: self.now, violation })?;
        let packet = &mut self.packets[id as usize];
        packet.bytes = bytes;
        match outcome {
            Outcome::Forward => {}
            Outcome::Answer => {
                packet.bytes.truncate(HEADER_BYTES);
                // As if it came from the aggregator's link: what is left is the way down from here.
                (packet.answer, packet.congested, packet.hop) = (true, false, 1);
            }
            Outcome::Up { congested } => {
                packet.congested |= congested;
                packet.ranks = Header::of(&packet.bytes).map_or(0, Header::bitmap);
            }
            Outcome::Down { others } => self.copy_to(id, passage.peer.job, others)?,
        }
        self.go_on_from(id, host)
    }

    /// A result for each of these ranks of a job.
    fn copy_to(&mut self, id: u32, job: u16, ranks: u64) -> Result<(), SimulationError> {
        let first = self.first[usize::from(job)];
        for rank in (0..64).filter(|rank| ranks >> rank & 1 == 1) {
            let copy = self.copy(id);
            let (packet, host) = (&mut self.packets[copy as usize], first + usize::from(rank));
            packet.host = host as u32;
            if let Some(header) = Header::of_mut(&mut packet.bytes) {
                address_copy(header, rank);
            }
            self.go_on_from(copy, host)?;
        }
        Ok(())
    }

    /// The next link of a packet's way.
    fn go_on_from(&mut self, id: u32, host: usize) -> Result<(), SimulationError> {
        let packet = &self.packets[id as usize];
        let way = if packet.answer { self.topology.down(host) } else { self.topology.up(host) };
        match way.get(packet.hop as usize).copied() {
            Some(link) => self.forward(id, link),
            None => Ok(()),
        }
    }

    /// The control plane of the switch looks at goodput and crowding, and tunes k.
    pub(super) fn tune(&mut self) {
        let (Some(switch), Some(spec)) = (&mut self.switch, self.scenario.switch) else { return };
        let share = |job: u16| {
            let (generation, min_ack) = (generation(job), self.node.min_ack(job));
            switch.crowded(job).map(|crowded| Share { job, generation, min_ack, crowded })
        };
        let shares: Vec<Share> = (0..self.scenario.jobs.len() as u16).filter_map(share).collect();
        let ks = self.switch_shares.tick(Duration::from_nanos(spec.tuning.0), &shares);
        shares.iter().zip(ks).for_each(|(share, k)| switch.set_k(share.job, k));
        self.schedule(self.now + spec.tuning, Happening::Tune);
    }
}
