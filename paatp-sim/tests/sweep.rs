//! A switch that adds, from a table that is far too small to one without a limit: a small part of `paatp sim sweep`. That
//! every result is the sum, and nothing was added twice, is what a run checks itself.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::path::Path;

use paatp_sim::Scenario;
use paatp_sim::sweep::{self, Grid, Places, Row, Slots, Sweep};
use paatp_transport::rate::Algorithm;

/// How much slower more memory may be, as chance has it in short runs.
const TOLERANCE: f64 = 0.05;

fn sweep(file: &str, iterations: u32, grid: &Grid) -> Sweep {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios").join(file);
    let mut scenario = Scenario::read(&path).unwrap();
    scenario.jobs.iter_mut().for_each(|job| job.iterations = iterations);
    let sweep = sweep::run(file, &scenario, Algorithm::PaAtp, grid, &mut |_| ()).unwrap();
    println!("{}", sweep.table());
    sweep
}

/// Slots from too few to enough, two jobs of 8 and 2 ranks.
#[test]
fn more_memory_adds_more_and_is_not_slower() {
    let grid = Grid {
        jobs: vec![2],
        slots: [Some(16), Some(64), Some(256), None].map(Slots).to_vec(),
        places: vec![Places(Some(8))],
        seeds: vec![1, 2],
    };
    let sweep = sweep("switch-mixed.toml", 6, &grid);
    for pair in sweep.rows.windows(2) {
        let [less, more] = pair else { panic!("windows of two") };
        let grew = |of: fn(&Row) -> f64| of(more) >= of(less) * (1.0 - TOLERANCE);
        assert!(grew(|row| row.of_none.median) && grew(|row| row.summed_share.median), "{less:?}\n{more:?}");
    }
    let [few, .., unlimited] = &sweep.rows[..] else { panic!("{sweep:?}") };
    assert!(unlimited.of_none.least > 2.0 && unlimited.summed_share.least > 0.99, "{unlimited:?}");
    assert!(unlimited.crowded_share.most < 0.001 && unlimited.unfinished_share.most < 0.001, "{unlimited:?}");
    // Sixteen slots are too few for most of it, and do no harm: docs/simulator.md. What is passed on, is as a whole.
    assert!(few.crowded_share.least > 0.1 && few.unfinished_share.most < 0.1, "{few:?}");
    assert!(few.of_none.least > 1.0, "{few:?}");
    assert!(few.of_unlimited.most < 0.5, "{few:?}");
}

/// The same seeds give the same figures.
#[test]
fn a_sweep_repeats_itself() {
    let grid =
        Grid { jobs: vec![2], slots: vec![Slots(Some(16))], places: vec![Places(None)], seeds: vec![3] };
    let [first, second] = [0, 1].map(|_| sweep("switch-equal.toml", 1, &grid));
    assert_eq!(first, second);
}
