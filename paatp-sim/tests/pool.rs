//! Jobs of different numbers of ranks in one pool that is too small for all.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::path::Path;

use paatp_sim::Scenario;
use paatp_sim::report::{self, Outcome};
use paatp_transport::rate::Algorithm;

fn run(name: &str, algorithm: Algorithm) -> Outcome {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios").join(name);
    let scenario = Scenario::read(&path).unwrap();
    Outcome::of(&scenario, &report::run(&scenario, algorithm, scenario.seed).unwrap())
}

/// The loader makes the jobs' goodput more equal than it is if each may try all places.
#[test]
fn tuning_shares_the_pool_out() {
    for algorithm in [Algorithm::PaAtp, Algorithm::A2tp] {
        let untuned = run("pool-2-8-16-untuned.toml", algorithm);
        let tuned = run("pool-2-8-16.toml", algorithm);
        for (what, outcome) in [("untuned", &untuned), ("tuned", &tuned)] {
            let goodputs: Vec<f64> =
                outcome.jobs.iter().map(|job| job.goodput_bits_per_second / 1e9).collect();
            println!(
                "{algorithm} {what}: Jain's index {:.3}, {goodputs:.2?} Gbit/s, completed in {:.4} s",
                outcome.jain_index, outcome.job_completion_seconds
            );
        }
        assert!(tuned.jain_index > untuned.jain_index, "{algorithm}");
    }
}
