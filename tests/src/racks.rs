//! Two racks and a root, in a lab: three daemons, and workers on eight hosts.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use paatp_common::counter::Counters;
use tempfile::TempDir;

use crate::kernel::Maps;
use crate::lab::Host;
use crate::pins::Pins;
use crate::process::{Aggregator, AggregatorOptions, Process, WorkerCommand, wait_until};
use crate::report::Report;
use crate::{Family, Gradient, Lab, Layout};

/// Longest wait for a daemon or a job.
pub const DEADLINE: Duration = Duration::from_secs(120);
/// Hosts of each rack, and ranks unless there are more on each.
pub const RACK: usize = 4;
/// Number of racks.
pub const RACKS: usize = 2;

/// What a rack's ranks are called at the root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// As here: they are numbered through.
    Ranks,
    /// By one name for all: each rack is one rank there.
    Nodes,
}

/// A root, two racks and workers that wait to be started.
#[derive(Debug)]
pub struct Racks {
    /// Where all of it is.
    pub lab: Lab,
    /// The daemon of the root.
    pub root: Aggregator,
    /// Those of the racks.
    pub racks: Vec<Aggregator>,
    family: Family,
    naming: Naming,
    /// Ranks of each rack.
    size: usize,
    pins: Arc<Pins>,
    folder: TempDir,
}

/// What came of a job.
#[derive(Debug)]
pub struct RacksResult {
    /// Digest of each rank's result.
    pub digests: Vec<String>,
    /// What each rank tells of it.
    pub reports: Vec<Report>,
}

/// Most lanes that fit Ethernet's MTU.
#[must_use]
pub const fn lanes(family: Family) -> usize {
    match family {
        Family::V4 => 352,
        Family::V6 => 320,
    }
}

impl Racks {
    /// With a root that was started with more options.
    ///
    /// # Errors
    /// Where something does not start.
    pub fn new(family: Family, options: &str) -> Result<Racks> {
        Racks::with(family, options, Naming::Ranks, RACK)
    }

    /// With racks of so many ranks.
    ///
    /// # Errors
    /// Where something does not start.
    pub fn with(family: Family, options: &str, naming: Naming, size: usize) -> Result<Racks> {
        let lab = Lab::new(Layout { racks: RACKS, ..Layout::workers(RACK * RACKS) })?;
        let folder = TempDir::new()?;
        let pins = Arc::new(Pins::new()?);
        let options = AggregatorOptions {
            lanes: lanes(family),
            more: options.split_whitespace().map(Into::into).collect(),
            ..AggregatorOptions::world(if naming == Naming::Nodes { RACKS } else { size * RACKS })
        };
        let root = Aggregator::start(&lab, &options)?;
        let mut racks = Racks { lab, family, naming, size, root, racks: Vec::new(), pins, folder };
        for rack in 0..RACKS {
            let (parent, first) = (racks.lab.aggregator.address(family), rack * size);
            let (world, which) = match naming {
                Naming::Ranks => (size * RACKS, format!("ranks = \"{first}-{}\"", first + size - 1)),
                Naming::Nodes => (size, format!("child = {rack}")),
            };
            let text = format!(
                "[[job]]\nname = \"lab\"\nworld = {world}\nlanes = {}\nparent = \"{parent}\"\n{which}\n",
                lanes(family)
            );
            std::fs::write(racks.config(rack), text)?;
            racks.racks.push(racks.start_rack(rack)?);
        }
        Ok(racks)
    }

    fn config(&self, rack: usize) -> std::path::PathBuf {
        self.folder.path().join(format!("rack{rack}.toml"))
    }

    fn start_rack(&self, rack: usize) -> Result<Aggregator> {
        let options = AggregatorOptions {
            // One of them can be killed.
            pins: (rack == 0).then(|| self.pins.clone()),
            more: vec!["--config".into(), self.config(rack).display().to_string()],
            ..AggregatorOptions::world(0)
        };
        Aggregator::watch(Aggregator::spawn_at(&self.lab.racks[rack], &options)?)
    }

    /// Kills the daemon of the first rack, and starts another over what it leaves.
    ///
    /// # Errors
    /// Where it does not start.
    pub fn restart_the_first(&mut self) -> Result<()> {
        self.racks[0].process.kill();
        self.racks[0] = self.start_rack(0)?;
        Ok(())
    }

    /// How a rank is started.
    ///
    /// # Errors
    /// Where its input cannot be written.
    pub fn command(&self, rank: usize, world: usize, input: &Gradient) -> Result<WorkerCommand> {
        let rack = rank / self.size;
        let folder = self.folder.path().join(format!("rack{rack}"));
        std::fs::create_dir_all(&folder)?;
        let (rank, world) = match self.naming {
            Naming::Ranks => (rank, world),
            Naming::Nodes => (rank % self.size, self.size),
        };
        let mut command = WorkerCommand::new(&self.lab, self.family, rank, world, &folder);
        command.aggregator = self.lab.racks[rack].address(self.family);
        input.write(&command.input)?;
        Ok(command)
    }

    /// Starts the ranks.
    ///
    /// # Errors
    /// Where one does not start.
    pub fn spawn(&self, inputs: &[Gradient]) -> Result<(Vec<WorkerCommand>, Vec<Process>)> {
        let mut started = (Vec::new(), Vec::new());
        for (rank, input) in inputs.iter().enumerate() {
            let command = self.command(rank, inputs.len(), input)?;
            let host = rank / self.size * RACK + rank % self.size % RACK;
            started.1.push(command.spawn(&self.lab.workers[host])?);
            started.0.push(command);
        }
        Ok(started)
    }

    /// Waits for the ranks.
    ///
    /// # Errors
    /// Where they do not end in time, or one fails.
    pub fn finish(&self, commands: &[WorkerCommand], mut workers: Vec<Process>) -> Result<RacksResult> {
        wait_until("all ranks had ended", DEADLINE, || {
            let ended: Result<Vec<bool>> = workers.iter_mut().map(Process::has_ended).collect();
            Ok(ended?.into_iter().all(|ended| ended))
        })
        .with_context(|| {
            let outputs: Vec<_> = workers.iter().map(Process::output).collect();
            format!("{outputs:#?}\n{:#?}", self.all_counters())
        })?;
        for worker in &mut workers {
            let finished = worker.wait(DEADLINE)?;
            ensure!(finished.is_success(), "{}", finished.output);
        }
        let digest = |command: &WorkerCommand| Ok(Gradient::read(&command.output)?.digest());
        Ok(RacksResult {
            digests: commands.iter().map(digest).collect::<Result<_>>()?,
            reports: commands.iter().map(|command| Report::read(&command.report)).collect::<Result<_>>()?,
        })
    }

    /// A job from beginning to end.
    ///
    /// # Errors
    /// As [`Racks::finish`].
    pub fn all_reduce(&self, inputs: &[Gradient]) -> Result<RacksResult> {
        let (commands, workers) = self.spawn(inputs)?;
        self.finish(&commands, workers)
    }

    fn counters_at(host: &Host) -> Result<Counters> {
        Maps::on(&host.namespace, &host.interface)?.counters()
    }

    /// What a rack's program counted.
    ///
    /// # Errors
    /// Where none is attached.
    pub fn counters(&self, rack: usize) -> Result<Counters> {
        Racks::counters_at(&self.lab.racks[rack])
    }

    /// What the root's program counted.
    ///
    /// # Errors
    /// Where none is attached.
    pub fn root_counters(&self) -> Result<Counters> {
        Racks::counters_at(&self.lab.aggregator)
    }

    fn all_counters(&self) -> Result<Vec<Counters>> {
        (0..RACKS).map(|rack| self.counters(rack)).chain([self.root_counters()]).collect()
    }

    /// Everything ends in order; returns what the root wrote.
    ///
    /// # Errors
    /// Where a daemon does not end well.
    pub fn stop(self) -> Result<String> {
        for rack in self.racks {
            let finished = rack.stop()?;
            ensure!(finished.is_success(), "{}", finished.output);
        }
        let finished = self.root.stop()?;
        ensure!(finished.is_success(), "{}", finished.output);
        Ok(finished.output)
    }
}
