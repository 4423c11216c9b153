//! Two racks of four ranks each and a root: the results are bit for bit those of one level, whatever happens on the links
//! and to the racks' daemons.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::sync::Arc;
use std::time::Duration;

use paatp_common::Event;
use paatp_common::counter::Counters;
use paatp_tests::gradients::{real, synthetic};
use paatp_tests::job::run;
use paatp_tests::kernel::{Maps, attached};
use paatp_tests::pins::Pins;
use paatp_tests::process::{Aggregator, AggregatorOptions, PORT, Process, WorkerCommand, wait_until};
use paatp_tests::{
    Direction, Disturbance, Dtype, Family, Gradient, JobOptions, Lab, Layout, Rates, require_bpf,
};
use tempfile::TempDir;

const DEADLINE: Duration = Duration::from_secs(120);
/// Ranks of each rack.
const RACK: usize = 4;
const RACKS: usize = 2;

/// A root, two racks and eight workers that wait to be started.
struct Bench {
    lab: Lab,
    family: Family,
    root: Aggregator,
    racks: Vec<Aggregator>,
    pins: Arc<Pins>,
    folder: TempDir,
}

/// Options of the aggregator of a rack.
fn rack_options(pins: Option<&Arc<Pins>>, folder: &TempDir, rack: usize) -> AggregatorOptions {
    let config = folder.path().join(format!("rack{rack}.toml")).display().to_string();
    AggregatorOptions {
        pins: pins.cloned(),
        more: vec!["--config".into(), config],
        ..AggregatorOptions::world(0)
    }
}

impl Bench {
    fn new(family: Family) -> Bench {
        Bench::with_root(family, "--levels")
    }

    fn with_root(family: Family, option: &str) -> Bench {
        let lab = Lab::new(Layout { racks: RACKS, ..Layout::workers(RACK * RACKS) }).unwrap();
        let folder = TempDir::new().unwrap();
        let pins = Arc::new(Pins::new().unwrap());
        let lanes = if family == Family::V4 { 352 } else { 320 };
        let options = AggregatorOptions {
            lanes,
            more: option.split_whitespace().map(Into::into).collect(),
            ..AggregatorOptions::world(RACK * RACKS)
        };
        let root = Aggregator::start(&lab, &options).unwrap();
        for rack in 0..RACKS {
            let (parent, first) = (lab.aggregator.address(family), rack * RACK);
            let text = format!(
                "[[job]]\nname = \"lab\"\nworld = {}\nlanes = {lanes}\nparent = \"{parent}\"\nranks = \"{first}-{}\"\n",
                RACK * RACKS,
                first + RACK - 1
            );
            std::fs::write(folder.path().join(format!("rack{rack}.toml")), text).unwrap();
        }
        let start = |rack: usize| {
            // One of them can be killed.
            let options = rack_options((rack == 0).then_some(&pins), &folder, rack);
            Aggregator::watch(Aggregator::spawn_at(&lab.racks[rack], &options).unwrap()).unwrap()
        };
        let racks = (0..RACKS).map(start).collect();
        Bench { lab, family, root, racks, pins, folder }
    }

    fn spawn(&self, inputs: &[Gradient]) -> (Vec<WorkerCommand>, Vec<Process>) {
        let spawn = |(rank, gradient): (usize, &Gradient)| {
            let mut command =
                WorkerCommand::new(&self.lab, self.family, rank, inputs.len(), self.folder.path());
            command.aggregator = self.lab.racks[rank / RACK].address(self.family);
            gradient.write(&command.input).unwrap();
            let worker = command.spawn(&self.lab.workers[rank]).unwrap();
            (command, worker)
        };
        inputs.iter().enumerate().map(spawn).unzip()
    }

    /// Waits for the workers; returns their digests.
    fn finish(&mut self, commands: &[WorkerCommand], mut workers: Vec<Process>) -> Vec<String> {
        wait_until("all ranks had ended", DEADLINE, || {
            for worker in &mut workers {
                if !worker.has_ended()? {
                    return Ok(false);
                }
            }
            Ok(true)
        })
        .unwrap_or_else(|error| {
            let outputs: Vec<_> = workers.iter().map(Process::output).collect();
            panic!(
                "{error:#}: {outputs:#?}\n{:#?}",
                [self.counters(0), self.counters(1), self.root_counters()]
            )
        });
        for worker in &mut workers {
            let finished = worker.wait(DEADLINE).unwrap();
            assert!(finished.is_success(), "{}", finished.output);
        }
        commands.iter().map(|command| Gradient::read(&command.output).unwrap().digest()).collect()
    }

    fn all_reduce(&mut self, inputs: &[Gradient]) -> Vec<String> {
        let (commands, workers) = self.spawn(inputs);
        self.finish(&commands, workers)
    }

    fn counters(&self, rack: usize) -> Counters {
        let host = &self.lab.racks[rack];
        Maps::on(&host.namespace, &host.interface).and_then(|maps| maps.counters()).unwrap()
    }

    fn root_counters(&self) -> Counters {
        let host = &self.lab.aggregator;
        Maps::on(&host.namespace, &host.interface).and_then(|maps| maps.counters()).unwrap()
    }

    /// Nobody has left, because nobody had come.
    fn stop_unused(self) {
        for aggregator in self.racks.into_iter().chain([self.root]) {
            assert!(aggregator.stop().unwrap().is_success());
        }
    }

    /// Everything ends in order, and the root knows that the ranks have left.
    fn stop(self) {
        let Bench { racks, root, .. } = self;
        for rack in racks {
            let finished = rack.stop().unwrap();
            assert!(finished.is_success(), "{}", finished.output);
        }
        let finished = root.stop().unwrap();
        assert!(finished.is_success(), "{}", finished.output);
        assert!(finished.output.contains("all ranks have left"), "{}", finished.output);
    }
}

/// What one level gives.
fn one_level(inputs: &[Gradient], family: Family) -> Vec<String> {
    let lab = Lab::new(Layout::workers(inputs.len())).unwrap();
    let mut options = JobOptions { family, ..JobOptions::world(inputs.len()) };
    options.aggregator.lanes = if family == Family::V4 { 352 } else { 320 };
    run(&lab, inputs, &options).unwrap().digests().unwrap()
}

#[test]
fn two_racks_and_a_root_give_the_bits_of_one_level() {
    if !require_bpf("levels::two_racks_and_a_root_give_the_bits_of_one_level") {
        return;
    }
    let inputs = real(1, RACK * RACKS).unwrap();
    for family in [Family::V4, Family::V6] {
        let mut bench = Bench::new(family);
        let expected = one_level(&inputs, family);
        assert_eq!(bench.all_reduce(&inputs), expected);
        let host = &bench.lab.racks[0];
        let program = attached(&host.namespace, &host.interface).unwrap().unwrap();
        assert_eq!((program.name.as_str(), program.is_native), ("levels", true));
        let root = bench.root_counters();
        let chunks = root.noted(Event::Completions);
        // Every contribution that the root took was a rack's sum.
        let sums = [Event::Sums, Event::Contributions].map(|event| root.noted(event));
        assert!(chunks > 0);
        assert_eq!(sums, [2 * chunks, 2 * chunks]);
        for rack in 0..RACKS {
            let counters = bench.counters(rack);
            let noted = |event| counters.noted(event);
            assert_eq!(noted(Event::Contributions), RACK as u64 * chunks);
            println!(
                "{family:?}, rack {rack}: {chunks} chunks, {} requests, {} sums and {} others went up",
                noted(Event::Requests),
                noted(Event::Lifted),
                noted(Event::PassedOn)
            );
        }
        // Again, with the generation after.
        assert_eq!(bench.all_reduce(&inputs), expected);
        bench.stop();
    }
}

#[test]
fn every_link_loses_packets() {
    if !require_bpf("levels::every_link_loses_packets") {
        return;
    }
    let inputs = synthetic(RACK * RACKS, 5, &[(Dtype::F32, 200_000), (Dtype::I32, 3000)], 1.0);
    let expected = one_level(&inputs, Family::V4);
    let mut bench = Bench::new(Family::V4);
    let loss = Rates { loss: 0.05, ..Rates::NONE };
    let of_workers =
        (0..inputs.len()).map(|rank| bench.lab.disturb(rank, PORT..=PORT, rank as u64, loss, loss).unwrap());
    let mut all: Vec<Disturbance> = of_workers.collect();
    all.extend(
        (0..RACKS)
            .map(|rack| bench.lab.disturb_rack(rack, PORT..=PORT, 100 + rack as u64, loss, loss).unwrap()),
    );
    assert_eq!(bench.all_reduce(&inputs), expected);
    let dropped = |disturbance: &Disturbance| {
        [Direction::Egress, Direction::Ingress]
            .map(|direction| disturbance.counts(direction).unwrap().dropped)
    };
    let dropped: Vec<_> = all.iter().map(dropped).collect();
    assert!(dropped.iter().flatten().all(|count| *count > 0), "{dropped:?}");
    println!("lost on each link, there and back: {dropped:?}");
    bench.stop();
}

#[test]
fn a_racks_daemon_is_killed_in_the_middle() {
    if !require_bpf("levels::a_racks_daemon_is_killed_in_the_middle") {
        return;
    }
    let inputs = synthetic(RACK * RACKS, 6, &[(Dtype::F32, 700_000)], 1.0);
    let expected = one_level(&inputs, Family::V4);
    let mut bench = Bench::new(Family::V4);
    let (commands, workers) = bench.spawn(&inputs);
    wait_until("results came down", DEADLINE, || Ok(bench.counters(0).noted(Event::Completions) > 200))
        .unwrap();
    let before = bench.counters(0).noted(Event::Completions);
    bench.racks[0].process.kill();
    let options = rack_options(Some(&bench.pins), &bench.folder, 0);
    bench.racks[0] = Aggregator::watch(Aggregator::spawn_at(&bench.lab.racks[0], &options).unwrap()).unwrap();
    assert_eq!(bench.finish(&commands, workers), expected);
    assert!(bench.counters(0).noted(Event::Completions) > before, "it was over before the daemon was killed");
    bench.stop();
}

/// What cannot be is refused where it is asked for, with what to do.
#[test]
fn refusals_say_what_to_do() {
    if !require_bpf("levels::refusals_say_what_to_do") {
        return;
    }
    let bench = Bench::new(Family::V4);
    // A rank of the other rack.
    let mut command = WorkerCommand::new(&bench.lab, Family::V4, 5, RACK * RACKS, bench.folder.path());
    command.aggregator = bench.lab.racks[0].address(Family::V4);
    synthetic(1, 7, &[(Dtype::F32, 10)], 1.0)[0].write(&command.input).unwrap();
    let finished = command.spawn(&bench.lab.workers[5]).unwrap().wait(DEADLINE).unwrap();
    assert!(!finished.is_success() && finished.output.contains("ranks 0-3 do"), "{}", finished.output);
    bench.stop_unused();
    // A root that was not started for it.
    let bench = Bench::with_root(Family::V4, "");
    let inputs = synthetic(RACK * RACKS, 7, &[(Dtype::F32, 10)], 1.0);
    let (_, mut workers) = bench.spawn(&inputs);
    for worker in &mut workers {
        let finished = worker.wait(DEADLINE).unwrap();
        assert!(
            !finished.is_success() && finished.output.contains("start it with --levels"),
            "{}",
            finished.output
        );
    }
    bench.stop_unused();
}
