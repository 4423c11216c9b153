//! `cargo xtask screenshot`: the status page of a real aggregator under real traffic, as PNG.
//!
//! A lab, an aggregator with three jobs, and workers that repeat all-reduces: `train` with a rank whose link is slow,
//! `eval`, which is well, and `tune`, of which a rank never comes. After a while a browser in the aggregator's namespace
//! opens the page and takes the pictures.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use paatp_tests::browser::{self, Browser, Screen};
use paatp_tests::gradients::synthetic;
use paatp_tests::process::{Aggregator, PORT, Process, paatp, wait_until};
use paatp_tests::shaping::Shape;
use paatp_tests::{Direction, Dtype, Family, Lab, Layout, WorkerCommand};

/// Takes pictures of the status page of an aggregator at work.
#[derive(Parser)]
#[command(name = "screenshot", max_term_width = 110)]
struct Args {
    /// Where the picture goes.
    #[arg(long, value_name = "FILE.png", default_value = "docs/images/status.png")]
    output: PathBuf,
    /// The same in dark.
    #[arg(long, value_name = "FILE.png")]
    dark: Option<PathBuf>,
    /// The same on a telephone.
    #[arg(long, value_name = "FILE.png")]
    phone: Option<PathBuf>,
    /// How long the workers work before, in seconds.
    #[arg(long, default_value_t = 75, value_parser = clap::value_parser!(u64).range(5..))]
    seconds: u64,
}

/// Name and number of ranks of each job.
const JOBS: [(&str, usize); 3] = [("train", 4), ("eval", 2), ("tune", 3)];
/// The rank of `train` whose link is slow, and the link: bits a second, bytes that may wait.
const SLOW_RANK: usize = 2;
const SLOW_LINK: Shape = Shape { rate: 20_000_000, buffer: 64 << 10 };
/// Values of one tensor: 8 MiB.
const VALUES: usize = 2 << 20;
/// Longest run of one all-reduce.
const DEADLINE: Duration = Duration::from_secs(120);
/// Largest picture, in bytes: it lies in the repository.
const LARGEST: usize = 200_000;

const PAGE: Screen = Screen { width: 1120, height: 1240, scale: 1.0, scheme: "light" };
const PHONE: Screen = Screen { width: 360, height: 780, scale: 2.0, scheme: "light" };

fn main() -> Result<()> {
    let args = Args::parse();
    let program =
        browser::find().context("no Chromium; `cargo xtask setup` installs chromium-headless-shell")?;
    let folder = tempfile::Builder::new().prefix("paatp-screenshot-").tempdir()?;
    let lab = Lab::new(Layout::workers(4))?;
    let aggregator = start(&lab, folder.path())?;
    let _slow = lab.shape(SLOW_RANK, Direction::Egress, SLOW_LINK)?;
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let workers = JOBS.map(|(job, world)| {
            let (lab, folder, over) = (&lab, folder.path(), &over);
            scope.spawn(move || work(lab, folder, job, world, over))
        });
        let begin = Instant::now();
        let taken =
            wait_until("the workers have worked for a while", Duration::from_secs(args.seconds + 1), || {
                ensure!(workers.iter().all(|worker| !worker.is_finished()), "workers have ended");
                Ok(begin.elapsed() >= Duration::from_secs(args.seconds))
            })
            .and_then(|()| take(&args, &program, &lab));
        over.store(true, Ordering::Relaxed);
        let worked = workers.into_iter().map(|worker| match worker.join() {
            Ok(result) => result,
            Err(_) => bail!("a worker's thread panicked"),
        });
        // What went wrong first is why nothing was taken.
        worked.collect::<Result<Vec<()>>>().and(taken)
    })?;
    aggregator.stop().map(drop)
}

fn start(lab: &Lab, folder: &Path) -> Result<Aggregator> {
    let jobs: String =
        JOBS.iter().map(|(name, world)| format!("[[job]]\nname = \"{name}\"\nworld = {world}\n\n")).collect();
    let config = folder.join("jobs.toml");
    std::fs::write(&config, jobs)?;
    let host = &lab.aggregator;
    let mut command = host.namespace.command(paatp()?);
    command.args(["run", "--iface", &host.interface, "--xdp-mode", "native", "--config"]).arg(&config);
    Aggregator::watch(Process::spawn("the aggregator", command)?)
}

/// Repeats all-reduces of one job. Of `tune` the last rank stays away.
fn work(lab: &Lab, folder: &Path, job: &str, world: usize, over: &AtomicBool) -> Result<()> {
    let folder = folder.join(job);
    std::fs::create_dir(&folder)?;
    let gradients = synthetic(world, 1, &[(Dtype::F32, VALUES)], 1.0);
    let mut commands = Vec::new();
    for (rank, gradient) in gradients.iter().enumerate() {
        let mut command = WorkerCommand::new(lab, Family::V4, rank, world, &folder);
        command.job = job.into();
        command.timeout = DEADLINE;
        gradient.write(&command.input)?;
        commands.push(command);
    }
    if job == "tune" {
        commands.pop();
    }
    while !over.load(Ordering::Relaxed) {
        let started = commands.iter().zip(&lab.workers).map(|(command, host)| command.spawn(host));
        let mut ranks = started.collect::<Result<Vec<Process>>>()?;
        for rank in &mut ranks {
            let ended =
                wait_until(
                    "a rank ended",
                    DEADLINE,
                    || Ok(rank.has_ended()? || over.load(Ordering::Relaxed)),
                );
            ended.with_context(|| format!("job {job}"))?;
            if over.load(Ordering::Relaxed) {
                return Ok(());
            }
            let finished = rank.wait(DEADLINE)?;
            ensure!(finished.is_success(), "job {job}: {}", finished.output);
        }
    }
    Ok(())
}

fn take(args: &Args, program: &Path, lab: &Lab) -> Result<()> {
    let mut browser = Browser::start(program, |shell| lab.aggregator.namespace.command(shell))?;
    browser.show_on(PAGE)?;
    browser.open(&format!("http://127.0.0.1:{PORT}/#job=train"))?;
    browser.wait_for("the job was drawn", "document.querySelectorAll('#ranks tbody tr').length === 4")?;
    browser.wait_for(
        "the job runs and the slow rank is marked",
        "document.querySelector('#jobs tbody td').innerText === 'running' && document.querySelector('#ranks tbody tr:nth-child(3)').matches('.straggler')",
    )?;
    save(&mut browser, &args.output)?;
    if let Some(path) = &args.dark {
        browser.show_on(Screen { scheme: "dark", ..PAGE })?;
        save(&mut browser, path)?;
    }
    if let Some(path) = &args.phone {
        browser.show_on(PHONE)?;
        save(&mut browser, path)?;
    }
    let problems = browser.problems()?;
    ensure!(problems.is_empty(), "the browser complains: {problems:#?}");
    let tasks = browser.value("longTasks")?;
    println!("tasks of the page that took more than 50 ms: {tasks}");
    Ok(())
}

fn save(browser: &mut Browser, path: &Path) -> Result<()> {
    let picture = browser.screenshot()?;
    ensure!(picture.len() <= LARGEST, "the picture has {} bytes, more than {LARGEST}", picture.len());
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(path, &picture).with_context(|| format!("cannot write {}", path.display()))?;
    println!("{}: {} bytes", path.display(), picture.len());
    Ok(())
}
