//! Small scenarios drawn from a seed, as bad as they may be: whatever happens, every operation must complete with the right
//! sum, and no rule may be broken on the way.

use paatp_common::pool::K_MAX;
use paatp_transport::rate::Algorithm;

use crate::link::{Impairment, LinkSpec};
use crate::random::{Purpose, Random};
use crate::record::Recorder;
use crate::scenario::{
    CARD_PACKETS, Direction, JobSpec, MemoryKind, Network, Place, PoolSpec, Ranks, Scenario, Straggler,
    SwitchSpec, ValuesKind,
};
use crate::simulation::{Simulation, SimulationError};
use crate::units::{BitRate, Bytes, Nanos};

/// Virtual time that a run may take. Workers give up on their own before that.
const LIMIT: Nanos = Nanos(600_000_000_000);

/// A seed whose run failed.
#[derive(Debug, thiserror::Error)]
#[error("seed {seed} ({algorithm}) fails: {source}\nreplay it with: paatp sim soak --from {seed} --seeds 1")]
pub struct SoakFailure {
    /// The seed.
    pub seed: u64,
    /// The controller it drew.
    pub algorithm: Algorithm,
    /// What happened.
    pub source: SimulationError,
}

/// Runs one seed.
///
/// # Errors
/// What went wrong, and how to see it again.
pub fn run(seed: u64) -> Result<Recorder, SoakFailure> {
    let (scenario, algorithm) = scenario(seed);
    Simulation::new(&scenario, algorithm, seed).and_then(Simulation::run).map_err(|source| SoakFailure {
        seed,
        algorithm,
        source,
    })
}

/// The scenario of a seed.
#[must_use]
pub fn scenario(seed: u64) -> (Scenario, Algorithm) {
    let mut random = Random::new(seed, Purpose::Shape, 0);
    let algorithm = Algorithm::ALL[random.below(Algorithm::ALL.len() as u64) as usize];
    let jobs = 1 + random.below(4) / 3;
    let mut jobs: Vec<JobSpec> = (0..jobs).map(|number| job(number, &mut random)).collect();
    let network = network(&mut random);
    // Damage on the way or damage in memory: two flips in one result may hide each other (see `Node::damage`).
    let memory_damage =
        if network.impairment.damage == 0.0 && random.chance(0.4) { random.uniform(0.0, 0.03) } else { 0.0 };
    let stragglers = stragglers(&mut random);
    let description = format!("seed {seed}");
    let pool = share(&mut jobs, &mut random);
    let switch = switch(&network, &mut random);
    let limit = LIMIT;
    let scenario =
        Scenario { description, seed, limit, network, pool, switch, jobs, stragglers, memory_damage };
    (scenario, algorithm)
}

fn pick<T: Copy>(random: &mut Random, of: &[T]) -> T {
    of[random.below(of.len() as u64) as usize]
}

fn job(number: u64, random: &mut Random) -> JobSpec {
    let window = pick(random, &[1, 1, 2, 2, 3, 4, 6, 8, 16]);
    // From the shortest ring that a window may have, in which ranks run into BUSY, to one that they never fill.
    let slots = u32::from(window).next_power_of_two() << random.below(4);
    let chunks = random.between(1, 24);
    JobSpec {
        name: format!("job-{number}"),
        world: random.between(2, 5) as u8,
        lanes: pick(random, &[32, 32, 64]),
        window,
        slots,
        memory: MemoryKind::Reserved,
        chunks,
        operations: random.between(1, chunks.min(3)) as u32,
        iterations: random.between(1, 3) as u32,
        start: Nanos(random.below(2_000_000)),
        compute: Nanos(random.below(500_000)),
        first_ready: random.uniform(0.0, 1.0),
        jitter: random.uniform(0.0, 0.9),
        staleness: random.below(3) as u32,
        values: pick(random, &[ValuesKind::FloatSum, ValuesKind::IntegerSum, ValuesKind::IntegerMax]),
    }
}

/// Makes some jobs share a pool, mostly one that is too small for them.
fn share(jobs: &mut [JobSpec], random: &mut Random) -> Option<PoolSpec> {
    if !random.chance(0.4) {
        return None;
    }
    for job in jobs {
        job.memory = if random.chance(0.8) { MemoryKind::Shared } else { MemoryKind::Reserved };
    }
    let k = if random.chance(0.5) { Some(random.between(1, K_MAX.into()) as u8) } else { None };
    Some(PoolSpec { slots: pick(random, &[1, 1, 2, 4, 8, 32]), k })
}

/// Puts a switch before the aggregator's link, if it has one of its own; mostly one that is too small.
fn switch(network: &Network, random: &mut Random) -> Option<SwitchSpec> {
    if network.aggregator.is_none() || !random.chance(0.5) {
        return None;
    }
    let k = if random.chance(0.5) { Some(random.between(1, K_MAX.into()) as u8) } else { None };
    Some(SwitchSpec {
        slots: Some(pick(random, &[8, 8, 16, 64])),
        k,
        // From less than a round trip on: slots whose sums are under way go to others.
        patience: Nanos(pick(random, &[50_000, 1_000_000, 20_000_000, 1_000_000_000])),
        tuning: Nanos(pick(random, &[100_000, 5_000_000])),
    })
}

fn link(random: &mut Random) -> LinkSpec {
    LinkSpec {
        rate: BitRate(pick(random, &[100, 1000, 10_000, 100_000]) * 1_000_000),
        delay: Nanos(random.between(500, 200_000)),
        buffer: Bytes(1600 * random.between(2, 64)),
        ecn: if random.chance(0.5) { Some(Bytes(1600 * random.between(0, 16))) } else { None },
    }
}

fn network(random: &mut Random) -> Network {
    let bad = |random: &mut Random, worst: f64| {
        if random.chance(0.6) { random.uniform(0.0, worst) } else { 0.0 }
    };
    Network {
        leaves: random.between(1, 3),
        spines: random.between(1, 2),
        packet: Bytes(1500),
        host: link(random),
        aggregator: if random.chance(0.5) { Some(link(random)) } else { None },
        fabric: Some(link(random)),
        card: CARD_PACKETS,
        impairment: Impairment {
            loss: bad(random, 0.3),
            duplication: bad(random, 0.3),
            reordering: bad(random, 1.0),
            reordering_delay: Nanos(random.between(1000, 1_000_000)),
            damage: if random.chance(0.3) { random.uniform(0.0, 0.05) } else { 0.0 },
        },
    }
}

fn stragglers(random: &mut Random) -> Vec<Straggler> {
    let mut all = Vec::new();
    let (ranks, ms) = (Ranks::All, 1_000_000);
    if random.chance(0.2) {
        let (probability, mean_iteration) = (random.uniform(0.0, 0.5), Nanos(random.below(5 * ms)));
        let ranks = ranks.clone();
        all.push(Straggler::SlowWorker { probability, least: 0.5, most: 2.0, mean_iteration, ranks });
    }
    if random.chance(0.2) {
        let (probability, duration) = (random.uniform(0.0, 0.5), Nanos(random.below(200 * ms)));
        let within = Nanos(random.below(2 * ms));
        all.push(Straggler::Failure { probability, duration, within, ranks: ranks.clone() });
    }
    if random.chance(0.2) {
        let (period, share) = (Nanos(random.between(1000, 5 * ms)), random.uniform(0.0, 1.0));
        let direction = pick(random, &[Direction::Up, Direction::Down, Direction::Both]);
        let ranks = Ranks::These(vec![random.below(4) as u32]);
        let place = pick(random, &[Place::Host, Place::Fabric]);
        all.push(Straggler::SlowLink { factor: 0.25, period, phase: None, share, place, direction, ranks });
    }
    if random.chance(0.2) {
        let (on, off) = (Nanos(random.between(1000, ms)), Nanos(random.between(1000, ms)));
        let (direction, place) = (Direction::Both, pick(random, &[Place::Host, Place::Fabric]));
        let rate = random.uniform(0.0, 0.9);
        all.push(Straggler::Background { rate, on, off, place, direction, ranks });
    }
    all
}
