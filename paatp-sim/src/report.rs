//! What a scenario came to under each controller: for people a table, for programs JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use paatp_common::switch::Count;
use paatp_transport::rate::Algorithm;
use serde::Serialize;

use crate::record::{Recorder, SwitchRecord, Totals};
use crate::scenario::Scenario;
use crate::simulation::{Simulation, SimulationError};
use crate::units::Nanos;

/// Version of [`Report`].
pub const SCHEMA_VERSION: u32 = 1;

/// A scenario under several controllers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// The scenario's name.
    pub scenario: String,
    /// The seed.
    pub seed: u64,
    /// Each controller, by name.
    pub controllers: BTreeMap<&'static str, Outcome>,
}

/// A scenario under one controller.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// Mean time of an iteration, over all iterations of all jobs.
    pub mean_iteration_seconds: f64,
    /// From the start of the first job to the end of the last.
    pub job_completion_seconds: f64,
    /// Jain's index of the jobs' goodputs until the first job ended: 1 if they are equal, 1/jobs if one has all.
    pub jain_index: f64,
    /// The jobs, in the scenario's order.
    pub jobs: Vec<JobOutcome>,
    /// Packets that entered links, each link counted.
    pub packets: u64,
    /// Packets that found no room.
    pub dropped_packets: u64,
    /// Packets lost by chance.
    pub lost_packets: u64,
    /// Packets marked.
    pub marked_packets: u64,
    /// Contributions, each chunk counted once for each rank.
    pub contributions: u64,
    /// Contributions sent again.
    pub retransmissions: u64,
    /// Requests for results without a contribution.
    pub pulls: u64,
    /// The switch, if there is one that adds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub switch: Option<SwitchOutcome>,
}

/// The switch that adds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SwitchOutcome {
    /// Share of all contributions that came to the aggregator in one of its sums.
    pub summed_share: f64,
    /// Contributions that found no slot, for each contribution.
    pub crowded_share: f64,
    /// Contributions outside of the window as the switch knew it, for each contribution.
    pub outside_share: f64,
    /// Slots whose sum never became complete, as a share of all that were begun.
    pub unfinished_share: f64,
    /// Contributions that were sent again because their sum did not come, for each contribution.
    pub reclaimed_share: f64,
    /// Places that each job's chunks might claim in the end.
    pub k: Vec<u8>,
}

/// One job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct JobOutcome {
    /// Its name.
    pub name: String,
    /// Ranks.
    pub world: u8,
    /// Mean time of an iteration.
    pub mean_iteration_seconds: f64,
    /// Half of the iterations took at most this.
    pub median_iteration_seconds: f64,
    /// Nine of ten iterations took at most this.
    pub p90_iteration_seconds: f64,
    /// From its start to the end of its last iteration.
    pub completion_seconds: f64,
    /// Bits of gradient that each rank had reduced, in whole packets, divided by the time until the first job ended.
    pub goodput_bits_per_second: f64,
}

/// Runs a scenario under one controller.
///
/// # Errors
/// What went wrong.
pub fn run(scenario: &Scenario, algorithm: Algorithm, seed: u64) -> Result<Recorder, SimulationError> {
    Simulation::new(scenario, algorithm, seed)?.run()
}

/// Times of a job's iterations.
#[must_use]
pub fn iteration_times(start: Nanos, ends: &[Nanos]) -> Vec<Nanos> {
    let before = std::iter::once(&start).chain(ends);
    ends.iter().zip(before).map(|(end, before)| *end - *before).collect()
}

/// The value that this share of the values do not exceed.
fn quantile(sorted: &[Nanos], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).map_or(0.0, |time| time.seconds())
}

fn mean(times: &[Nanos]) -> f64 {
    times.iter().map(|time| time.seconds()).sum::<f64>() / times.len().max(1) as f64
}

/// Jain's index.
#[must_use]
pub fn jain(shares: &[f64]) -> f64 {
    let (sum, squares) = shares.iter().fold((0.0, 0.0), |(sum, squares), x| (sum + x, squares + x * x));
    if squares > 0.0 { sum * sum / (shares.len() as f64 * squares) } else { 1.0 }
}

impl Outcome {
    /// What a run came to.
    #[must_use]
    pub fn of(scenario: &Scenario, record: &Recorder) -> Outcome {
        let mut all = Vec::new();
        let packet_bits = scenario.network.packet.0 as f64 * 8.0;
        let jobs: Vec<JobOutcome> = scenario
            .jobs
            .iter()
            .zip(&record.jobs)
            .map(|(spec, job)| {
                let times = iteration_times(spec.start, &job.iterations);
                let mut sorted = times.clone();
                sorted.sort_unstable();
                let end = job.iterations.last().copied().unwrap_or_default();
                let shared = (record.first_end() - spec.start).seconds().max(1e-9);
                all.extend(times.iter().copied());
                JobOutcome {
                    name: spec.name.clone(),
                    world: spec.world,
                    mean_iteration_seconds: mean(&times),
                    median_iteration_seconds: quantile(&sorted, 0.5),
                    p90_iteration_seconds: quantile(&sorted, 0.9),
                    completion_seconds: (end - spec.start).seconds(),
                    goodput_bits_per_second: job.chunks_when_first_ended as f64 * packet_bits / shared,
                }
            })
            .collect();
        let start = scenario.jobs.iter().map(|job| job.start).min().unwrap_or_default();
        let ends = record.jobs.iter().filter_map(|job| job.iterations.last().copied());
        let goodputs: Vec<f64> = jobs.iter().map(|job| job.goodput_bits_per_second).collect();
        let Totals { packets, dropped, lost, marked, contributions, retransmissions, pulls, .. } =
            record.totals;
        Outcome {
            mean_iteration_seconds: mean(&all),
            job_completion_seconds: (ends.max().unwrap_or_default() - start).seconds(),
            jain_index: jain(&goodputs),
            jobs,
            packets,
            dropped_packets: dropped,
            lost_packets: lost,
            marked_packets: marked,
            contributions,
            retransmissions,
            pulls,
            switch: record.switch.as_ref().map(|switch| SwitchOutcome::of(switch, contributions)),
        }
    }
}

impl SwitchOutcome {
    fn of(record: &SwitchRecord, contributions: u64) -> SwitchOutcome {
        let counted = |what: Count| record.counts.get(what as usize).copied().unwrap_or(0);
        let share = |part: u64, of: u64| part as f64 / of.max(1) as f64;
        let unfinished = counted(Count::Stored).saturating_sub(counted(Count::Completed));
        SwitchOutcome {
            summed_share: share(record.summed, contributions),
            crowded_share: share(counted(Count::PassedCrowded), contributions),
            outside_share: share(counted(Count::PassedWindow), contributions),
            unfinished_share: share(unfinished, counted(Count::Stored)),
            reclaimed_share: share(record.reclaimed, contributions),
            k: record.ks.clone(),
        }
    }
}

impl Report {
    /// Nothing has been run yet.
    #[must_use]
    pub const fn new(scenario: String, seed: u64) -> Report {
        Report { schema_version: SCHEMA_VERSION, scenario, seed, controllers: BTreeMap::new() }
    }

    /// The table: one line for each controller, and with several jobs one for each of these.
    #[must_use]
    pub fn table(&self) -> String {
        let mut text = String::new();
        let _ = writeln!(
            text,
            "{:<12}{:>14}{:>14}{:>14}{:>8}{:>10}{:>9}{:>9}{:>9}",
            "controller",
            "mean iter",
            "p90 iter",
            "completion",
            "jain",
            "pulls",
            "again",
            "dropped",
            "marked"
        );
        let order =
            Algorithm::ALL.iter().filter_map(|algorithm| self.controllers.get_key_value(algorithm.name()));
        for (name, outcome) in order {
            let share = |part: u64| format!("{:.3}", part as f64 / outcome.contributions.max(1) as f64);
            let slowest = outcome.jobs.iter().map(|job| job.p90_iteration_seconds).fold(0.0, f64::max);
            let _ = writeln!(
                text,
                "{:<12}{:>14}{:>14}{:>14}{:>8.4}{:>10}{:>9}{:>9}{:>9}",
                name,
                span(outcome.mean_iteration_seconds),
                span(slowest),
                span(outcome.job_completion_seconds),
                outcome.jain_index,
                share(outcome.pulls),
                share(outcome.retransmissions),
                outcome.dropped_packets,
                outcome.marked_packets,
            );
            for job in outcome.jobs.iter().filter(|_| outcome.jobs.len() > 1) {
                let _ = writeln!(
                    text,
                    "  {:<10}{:>14}{:>14}{:>14}  {:.3} Gbit/s to each of {} ranks",
                    job.name,
                    span(job.mean_iteration_seconds),
                    span(job.p90_iteration_seconds),
                    span(job.completion_seconds),
                    job.goodput_bits_per_second / 1e9,
                    job.world,
                );
            }
        }
        for (name, switch) in self.controllers.iter().filter_map(|(name, o)| Some((name, o.switch.as_ref()?)))
        {
            let _ = writeln!(
                text,
                "{name}, switch: of the contributions {:.3} in its sums, {:.3} without a slot, {:.3} outside of its window, {:.3} reclaimed; {:.3} of its slots \
                 never complete; k {:?}",
                switch.summed_share,
                switch.crowded_share,
                switch.outside_share,
                switch.reclaimed_share,
                switch.unfinished_share,
                switch.k
            );
        }
        text.push_str("pulls, again: requests without a contribution, contributions sent again, for each contribution\n");
        text
    }
}

fn span(seconds: f64) -> String {
    Nanos((seconds * 1e9) as u64).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iterations_follow_each_other() {
        let times = iteration_times(Nanos(10), &[Nanos(15), Nanos(40), Nanos(41)]);
        assert_eq!(times, [Nanos(5), Nanos(25), Nanos(1)]);
        assert_eq!(quantile(&[Nanos(1), Nanos(2), Nanos(3)], 0.5), 2e-9);
    }

    #[test]
    fn jain_is_one_for_equals() {
        assert_eq!(jain(&[3.0, 3.0, 3.0]), 1.0);
        assert_eq!(jain(&[1.0, 0.0]), 0.5);
        assert_eq!(jain(&[0.0, 0.0]), 1.0);
    }
}
