//! Throughput by loss, window and number of workers for every controller, against a file that is checked in. A change of a
//! controller or of the worker changes it: look at the difference, then write it anew with
//!
//! ```text
//! UPDATE_SNAPSHOTS=1 cargo test -p paatp-sim --test snapshots
//! ```

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use paatp_sim::Scenario;
use paatp_sim::report::{self, Outcome};
use paatp_transport::rate::Algorithm;

const LOSSES: [f64; 4] = [0.0, 0.0001, 0.001, 0.01];
const WINDOWS: [u16; 3] = [16, 64, 256];
const WORLDS: [u8; 2] = [2, 8];

fn scenario(world: u8, window: u16, loss: f64) -> Scenario {
    let slots = u32::from(window) * 2;
    let text = format!(
        r#"
        description = "one operation after the other over a shared link"
        [network]
        packet = "1500 B"
        host = {{ rate = "100 Gbit/s", delay = "1 us", buffer = "1 MiB", ecn = "150 KiB" }}
        aggregator = {{ rate = "100 Gbit/s", delay = "1 us", buffer = "4 MiB", ecn = "300 KiB" }}
        impairment = {{ loss = {loss} }}
        [[job]]
        name = "j"
        world = {world}
        window = {window}
        slots = {slots}
        chunks = 500
        iterations = 6
        compute = "1 us"
        "#
    );
    let scenario: Scenario = toml::from_str(&text).unwrap();
    scenario.check().unwrap();
    scenario
}

fn table() -> String {
    let mut text = String::from(
        "Goodput to each rank [Gbit/s]; all ranks share 100 Gbit/s, of which packets of 1500 bytes take 97.5.\n\n",
    );
    let _ = write!(text, "{:>6}{:>8}{:>9}", "ranks", "window", "loss");
    for algorithm in Algorithm::ALL {
        let _ = write!(text, "{:>10}", algorithm.name());
    }
    text.push('\n');
    for world in WORLDS {
        for window in WINDOWS {
            for loss in LOSSES {
                let scenario = scenario(world, window, loss);
                let _ = write!(text, "{world:>6}{window:>8}{loss:>9}");
                for algorithm in Algorithm::ALL {
                    let record = report::run(&scenario, algorithm, 1).unwrap();
                    let outcome = Outcome::of(&scenario, &record);
                    let _ = write!(text, "{:>10.2}", outcome.jobs[0].goodput_bits_per_second / 1e9);
                }
                text.push('\n');
            }
        }
    }
    text
}

#[test]
fn throughput_is_what_it_was() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/throughput.txt");
    let now = table();
    if env::var_os("UPDATE_SNAPSHOTS").is_some() {
        fs::write(&file, &now).unwrap();
    }
    let then = fs::read_to_string(&file).unwrap_or_default();
    let changed: Vec<_> = now.lines().zip(then.lines()).filter(|(now, then)| now != then).collect();
    assert!(
        changed.is_empty() && now.len() == then.len(),
        "{} is not what comes out now; if that is meant, run UPDATE_SNAPSHOTS=1 cargo test -p paatp-sim --test snapshots\n\
         now, then: {changed:#?}",
        file.display()
    );
}
