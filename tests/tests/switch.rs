//! Whole jobs through the switch program on BMv2, in front of the XDP program. `cargo xtask p4 test` runs this.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::fs;
use std::time::Duration;

use paatp_common::Event;
use paatp_common::counter::Counters;
use paatp_common::job::JobEntry;
use paatp_common::levels::Link;
use paatp_common::switch::Count;
use paatp_tests::disturbance::Direction;
use paatp_tests::gradients::real;
use paatp_tests::job::run;
use paatp_tests::kernel::{Maps, PodOf};
use paatp_tests::lab::Family;
use paatp_tests::p4::{BLOCKS, SLOTS, Switch, Tools, require_p4};
use paatp_tests::process::{Aggregator, AggregatorOptions, PORT, Process, WorkerCommand, wait_until};
use paatp_tests::report::Report;
use paatp_tests::{Disturbance, Gradient, JobOptions, Lab, Layout, Rates, require_bpf};
use paatp_user::switch::entries::{Neighbour, SwitchedJob, station};
use tempfile::TempDir;

/// A software switch on a busy machine.
const DEADLINE: Duration = Duration::from_secs(240);
/// Lanes of a chunk: as many as the switch takes.
const LANES: usize = BLOCKS * 32;
const WINDOW: u16 = 32;
/// Ports of the switch.
const WORKERS: u16 = 0;
const NODE: u16 = 1;
/// Everything is lost: nobody is to begin before the switch knows the job.
const NOTHING_PASSES: Rates = Rates { loss: 1.0, ..Rates::NONE };
const DISTURBED: Rates = Rates { loss: 0.03, duplicate: 0.03, reorder: 0.03, corrupt: 0.0 };

/// The digest of a job without any switch.
fn without_a_switch(inputs: &[Gradient]) -> String {
    let mut options = JobOptions { timeout: DEADLINE, ..JobOptions::world(inputs.len()) };
    (options.aggregator.lanes, options.aggregator.window) = (LANES, WINDOW);
    let lab = Lab::new(Layout::workers(inputs.len())).unwrap();
    let result = run(&lab, inputs, &options).unwrap();
    let verdict = result.check(inputs, &options).unwrap();
    assert!(verdict.is_right(), "{:#?}", verdict.complaints);
    result.digests().unwrap().swap_remove(0)
}

/// What a run through the switch is to have.
#[derive(Clone, Copy)]
struct Plan {
    /// Number of jobs, and of each one's ranks.
    jobs: usize,
    world: usize,
    /// Slots of the switch's table that are used, by all jobs together.
    slots: u32,
    /// What happens on the workers' links.
    rates: Rates,
    /// What happens between switch and aggregator.
    beyond: Rates,
    /// What happens in the middle of it, when the switch has sent some sums.
    incident: Incident,
}

#[derive(Clone, Copy, PartialEq)]
enum Incident {
    None,
    /// The switch forgets the jobs.
    Cleared,
    /// Its link to the workers fails; there is another way to the aggregator.
    LinkDown,
}

const ROOMY: Plan = Plan {
    jobs: 1,
    world: 4,
    slots: SLOTS as u32,
    rates: Rates::NONE,
    beyond: Rates::NONE,
    incident: Incident::None,
};

/// Jobs that run behind a switch.
struct Scene {
    aggregator: Aggregator,
    switch: Switch,
    commands: Vec<WorkerCommand>,
    workers: Vec<Process>,
    disturbances: Vec<Disturbance>,
    plan: Plan,
    folder: TempDir,
    lab: Lab,
}

/// What came of it.
struct Outcome {
    /// By rank, one job after the other.
    digests: Vec<String>,
    reports: Vec<Report>,
    /// What the switch counted.
    counts: Vec<u64>,
    /// What the aggregator did.
    counters: Counters,
}

impl Scene {
    /// Everything stands, and no packet of a worker has passed.
    fn new(tools: &Tools, inputs: &[Gradient], plan: Plan) -> Scene {
        let lab = Lab::new(Layout::workers(inputs.len())).unwrap();
        let (namespace, interfaces) = lab.splice().unwrap();
        let json = tools.compile(BLOCKS).unwrap();
        let mut switch = Switch::start(tools, &json, namespace, &interfaces).unwrap();
        for worker in &lab.workers {
            switch.add(&[station(worker.mac(), WORKERS)]).unwrap();
        }
        switch.add(&[station(lab.aggregator.mac(), NODE)]).unwrap();

        let folder = TempDir::new().unwrap();
        let job = |number| {
            format!(
                "[[job]]\nname = \"job{number}\"\nworld = {}\nlanes = {LANES}\nwindow = {WINDOW}\n",
                plan.world
            )
        };
        let config = folder.path().join("jobs.toml");
        fs::write(&config, (0..plan.jobs).map(job).collect::<String>()).unwrap();
        let options = AggregatorOptions {
            more: vec!["--levels".into(), "--config".into(), config.display().to_string()],
            ..AggregatorOptions::world(0)
        };
        let aggregator = Aggregator::start(&lab, &options).unwrap();
        let (commands, workers) = (Vec::new(), Vec::new());
        let mut scene =
            Scene { aggregator, switch, commands, workers, disturbances: Vec::new(), plan, folder, lab };
        scene.start_workers(inputs);
        scene
    }

    fn start_workers(&mut self, inputs: &[Gradient]) {
        let rates = self.plan.rates;
        let held: Vec<_> = (0..inputs.len())
            .map(|worker| self.lab.disturb(worker, PORT..=PORT, 1, NOTHING_PASSES, Rates::NONE).unwrap())
            .collect();
        for (worker, gradient) in inputs.iter().enumerate() {
            let (job, rank) = (worker / self.plan.world, worker % self.plan.world);
            let folder = self.folder.path().join(format!("job{job}"));
            fs::create_dir_all(&folder).unwrap();
            let mut command = WorkerCommand::new(&self.lab, Family::V4, rank, self.plan.world, &folder);
            (command.job, command.timeout) = (format!("job{job}"), DEADLINE);
            gradient.write(&command.input).unwrap();
            self.workers.push(command.spawn(&self.lab.workers[worker]).unwrap());
            self.commands.push(command);
        }
        (0..self.plan.jobs).for_each(|job| self.tell_the_switch(job));
        // Before anything passes: a job may be over in less time than it takes to attach them.
        if rates.any() {
            let disturb = |worker| self.lab.disturb(worker, PORT..=PORT, 7 + worker as u64, rates, rates);
            self.disturbances.extend((0..inputs.len()).map(|worker| disturb(worker).unwrap()));
        }
        if self.plan.beyond.any() {
            let rates = self.plan.beyond;
            self.disturbances.push(self.lab.disturb_beyond(PORT..=PORT, 99, rates, rates).unwrap());
        }
        drop(held);
    }

    fn maps(&self) -> Maps {
        Maps::on(&self.lab.aggregator.namespace, &self.lab.aggregator.interface).unwrap()
    }

    fn tell_the_switch(&mut self, job: usize) {
        let maps = self.maps();
        let served = || maps.array::<PodOf<JobEntry>>("JOBS").unwrap().get(&(job as u32), 0).unwrap().0;
        wait_until("the generation was formed", DEADLINE, || Ok(served().generation != 0)).unwrap();
        let entry = served();
        let mut links = maps.array::<PodOf<Link>>("LINKS").unwrap();
        let switched = (1 << self.plan.world) - 1;
        links.set(job as u32, PodOf(Link { switched, ..Link::default() }), 0).unwrap();
        let hosts = &self.lab.workers[job * self.plan.world..][..self.plan.world];
        let neighbour = |(rank, worker): (u8, &paatp_tests::lab::Host)| Neighbour {
            rank,
            port: WORKERS,
            mac: worker.mac(),
            address: worker.v4(),
        };
        let job = SwitchedJob {
            number: job as u16,
            generation: entry.generation,
            ranks: (0..).zip(hosts).map(neighbour).collect(),
            reach: entry.slots,
            k: 4,
            granted: 0,
            patience: 200_000,
            slots: self.plan.slots,
            node: self.lab.aggregator.v4(),
            node_port: NODE,
        };
        job.check().unwrap();
        self.switch.add_group(&job.group()).unwrap();
        self.switch.add(&job.entries()).unwrap();
    }

    fn count(&mut self, what: Count) -> u64 {
        self.switch.counter("PaatpIngress.counts", what as usize).unwrap()
    }

    fn go_through_the_incident(&mut self) {
        if self.plan.incident == Incident::None {
            return;
        }
        wait_until("the switch had sent sums", DEADLINE, || Ok(self.count(Count::Completed) > 5)).unwrap();
        match self.plan.incident {
            Incident::LinkDown => self.lab.bypass().unwrap(),
            _ => drop(self.switch.command("table_clear PaatpIngress.jobs").unwrap()),
        }
        let chunks = self.maps().counters().unwrap().noted(Event::Completions);
        println!("{chunks} chunks were complete when it happened");
    }

    fn finish(mut self) -> Outcome {
        wait_until("all ranks had ended", DEADLINE, || {
            let ended = self.workers.iter_mut().map(Process::has_ended);
            Ok(ended.collect::<anyhow::Result<Vec<_>>>()?.into_iter().all(|ended| ended))
        })
        .unwrap();
        for worker in &mut self.workers {
            let finished = worker.wait(DEADLINE).unwrap();
            assert!(finished.is_success(), "{}", finished.output);
        }
        for disturbance in &self.disturbances {
            let [sent, received] =
                [Direction::Egress, Direction::Ingress].map(|way| disturbance.counts(way).unwrap());
            assert!(sent.dropped + sent.duplicated > 0 && received.seen > 0, "{sent:?}, {received:?}");
        }
        let outputs = self.commands.iter().map(|command| Gradient::read(&command.output).unwrap().digest());
        let outcome = Outcome {
            digests: outputs.collect(),
            reports: self.commands.iter().map(|command| Report::read(&command.report).unwrap()).collect(),
            counts: Count::ALL.iter().map(|count| self.count(*count)).collect(),
            counters: self.maps().counters().unwrap(),
        };
        let finished = self.aggregator.stop().unwrap();
        assert!(finished.is_success(), "{}", finished.output);
        outcome
    }
}

/// Each job has the bits of a run without a switch, and each of its chunks was completed once.
fn same_bits(name: &str, plan: Plan) {
    let Some(tools) = require_p4(name).filter(|_| require_bpf(name)) else { return };
    let inputs: Vec<Vec<Gradient>> =
        (0..plan.jobs).map(|job| real(job as u32, plan.world).unwrap()).collect();
    let plain: Vec<String> =
        inputs.iter().flat_map(|inputs| vec![without_a_switch(inputs); plan.world]).collect();
    let mut scene = Scene::new(&tools, &inputs.concat(), plan);
    scene.go_through_the_incident();
    let Outcome { digests, reports, counts, counters } = scene.finish();
    assert_eq!(digests, plain);

    let count = |what: Count| counts[what as usize];
    let told: Vec<String> =
        Count::ALL.iter().map(|what| format!("{} {}", what.name(), count(*what))).collect();
    let contributions = counters.noted(Event::Contributions);
    let by_switch = count(Count::Stored) + count(Count::Added);
    println!("{name}: {}; the aggregator took {contributions} contributions", told.join(", "));
    let sum = |what: &str| reports.iter().map(|report| report.statistic(what)).sum::<u64>();
    println!(
        "{name}: {} results copied, {} contributions reclaimed",
        sum("copied_results"),
        sum("reclaimed")
    );
    assert!(count(Count::Completed) > 5 && by_switch > 0, "{told:?}");
    let chunks: u64 =
        reports.iter().step_by(plan.world).map(|report| report.0["chunks"].as_u64().unwrap()).sum();
    assert_eq!((counters.noted(Event::Completions), counters.noted(Event::Redos)), (chunks, 0));
    let is_quiet = !plan.rates.any() && !plan.beyond.any() && plan.incident == Incident::None;
    if is_quiet && plan.slots as usize == SLOTS {
        // `simple_switch` is slow, so that much is sent again, past it: how much is a matter of this machine's other work.
        let all = chunks * plan.world as u64;
        assert!(contributions < all * 3 / 4, "{contributions} of {all}: {told:?}");
    }
}

#[test]
fn four_workers() {
    same_bits("switch::four_workers", ROOMY);
}

#[test]
fn eight_workers() {
    same_bits("switch::eight_workers", Plan { world: 8, ..ROOMY });
}

#[test]
fn four_workers_disturbed() {
    same_bits("switch::four_workers_disturbed", Plan { rates: DISTURBED, ..ROOMY });
}

#[test]
fn disturbed_between_switch_and_aggregator() {
    same_bits("switch::disturbed_between_switch_and_aggregator", Plan { beyond: DISTURBED, ..ROOMY });
}

/// Two jobs, and room for 16 slots in all: the rest is the aggregator's.
const MIXED: Plan = Plan { jobs: 2, slots: 16, ..ROOMY };

#[test]
fn two_jobs_and_sixteen_slots() {
    same_bits("switch::two_jobs_and_sixteen_slots", MIXED);
}

#[test]
fn the_switch_forgets_two_jobs() {
    same_bits("switch::the_switch_forgets_two_jobs", Plan { incident: Incident::Cleared, ..MIXED });
}

#[test]
fn the_switch_is_taken_away_from_two_jobs() {
    same_bits(
        "switch::the_switch_is_taken_away_from_two_jobs",
        Plan { incident: Incident::LinkDown, ..MIXED },
    );
}
