//! The failure matrix: SIGKILL and SIGSTOP of each role at each step of an operation. Nobody hangs, and every survivor ends
//! with an error that names the culprit or with a sum that is right, exactly, for the ranks that are in it.
//!
//! The steps are reached by gates on the ranks' ways ([`scene`]), not by measuring time: while a scene is set the daemon is
//! stopped, so that it takes nobody for lost meanwhile. Values have a bit for each rank, so that a sum says who is in it.
//!
//! `cargo xtask soak matrix` plays the whole product.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

#[path = "matrix/scene.rs"]
mod scene;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use paatp_common::Seq;
use paatp_common::wire::Kind;
use paatp_tests::pins::Pins;
use paatp_tests::process::{names, wait_until};
use paatp_tests::require_bpf;
use scene::{Bed, CHUNKS, END, Ending, JOB_TIMEOUT, Play, Policy, WINDOW, WORLD};

/// Labs that are played in at a time: most of the time is waiting.
const BEDS: usize = 4;
/// Longest time without progress that the workers are given, where the daemon is to be faster.
const PATIENCE: Duration = Duration::from_secs(16);
/// The same where nothing but their own patience ends their wait.
const IMPATIENCE: Duration = Duration::from_secs(5);
/// Packets that are lost in scenes with loss, in each direction.
const LOSS: f64 = 0.05;

const ALL: u32 = (1 << WORLD) - 1;

/// Where an operation stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The victim has not asked to join.
    BeforeJoin,
    /// It waits for the others.
    Joining,
    /// It is a member, and has sent nothing.
    Granted,
    /// It is in the exponent round, which is not complete.
    Round,
    /// It has contributed what it may before the first sum is complete.
    First,
    /// The same before the tenth.
    Middle,
    /// It has contributed everything; the last sum is not complete.
    Last,
    /// It has its result; another rank has not.
    Lingering,
    /// It has written its result and waits until the daemon takes its leave.
    Leaving,
}

impl Step {
    const EVERY: [Step; 9] = [
        Step::BeforeJoin,
        Step::Joining,
        Step::Granted,
        Step::Round,
        Step::First,
        Step::Middle,
        Step::Last,
        Step::Lingering,
        Step::Leaving,
    ];

    /// The first chunk that the gate keeps incomplete.
    const fn gate(self) -> u32 {
        match self {
            Step::Round => 0,
            Step::First => 1,
            Step::Middle => 10,
            _ => END - 1,
        }
    }

    /// Chunks that the victim can contribute then: nothing but the round before the round is over.
    const fn reach(self) -> u32 {
        let reach = if self.gate() == 0 { 1 } else { self.gate() + WINDOW };
        if reach < END { reach } else { END }
    }

    /// Everything that the sum needs of the victim is there.
    const fn is_past_the_sum(self) -> bool {
        matches!(self, Step::Last | Step::Lingering | Step::Leaving)
    }
}

/// What happens to the victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blow {
    /// SIGKILL.
    Kill,
    /// SIGSTOP, for good.
    Stop,
    /// SIGSTOP, and SIGCONT when the others have dealt with it.
    Pause,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    step: Step,
    blow: Blow,
    victim: usize,
    policy: Policy,
    loss: bool,
}

const fn case(step: Step, blow: Blow, victim: usize, policy: Policy) -> Case {
    Case { step, blow, victim, policy, loss: false }
}

impl Case {
    /// The rank whose requests the gate holds up.
    const fn peer(self) -> usize {
        (self.victim + 1) % WORLD
    }

    const fn third(self) -> usize {
        (self.victim + 2) % WORLD
    }

    fn patience(self) -> Duration {
        match (self.step, self.blow) {
            (Step::BeforeJoin | Step::Joining, _) => IMPATIENCE,
            // They linger for the victim.
            (Step::Last, Blow::Kill | Blow::Stop) => IMPATIENCE,
            _ => PATIENCE,
        }
    }

    /// The contributors of each chunk in the survivors' results; `None` if they get errors.
    fn sums(self) -> Option<Vec<u32>> {
        let survivors = ALL & !(1 << self.victim);
        let is_in = |chunk: u32| self.step != Step::Granted && chunk < self.step.reach();
        // Values begin after the round.
        let shrunk = || (1..END).map(|chunk| if is_in(chunk) { ALL } else { survivors }).collect();
        match self.step {
            Step::BeforeJoin | Step::Joining => None,
            step if step.is_past_the_sum() => Some(vec![ALL; CHUNKS as usize]),
            _ => (self.policy == Policy::Shrink).then(shrunk),
        }
    }
}

/// Sets the scene, strikes, and sees how everybody ends.
fn play(bed: &mut Bed, case: Case) -> Result<()> {
    bed.reset(if case.loss { LOSS } else { 0.0 })?;
    let mut play = Play::new(bed, case.policy.job(), case.patience())?;
    let Case { victim, step, .. } = case;
    let (peer, third) = (case.peer(), case.third());
    match step {
        Step::BeforeJoin => {
            play.start(bed, peer)?;
            play.start(bed, third)?;
        }
        Step::Joining => {
            play.start(bed, victim)?;
            play.start(bed, peer)?;
            bed.wait_joining(play.job, vec![victim, peer])?;
            strike(&play, case)?;
            bed.wait_joining(play.job, vec![peer])?;
            play.start(bed, third)?;
        }
        Step::Granted => {
            play.start(bed, victim)?;
            play.start(bed, peer)?;
            bed.wait_joining(play.job, vec![victim, peer])?;
            play.signal(victim, Signal::SIGSTOP)?;
            play.start(bed, third)?;
            play.wait_formed(bed)?;
            strike(&play, case)?;
        }
        Step::Round | Step::First | Step::Middle | Step::Last => {
            bed.gate(peer).gate(Kind::Data, Seq(step.gate()))?;
            begin(bed, &mut play)?;
            play.wait_contributed(bed, victim, step.reach())?;
            strike(&play, case)?;
            bed.gate(peer).open()?;
            bed.daemon(Signal::SIGCONT)?;
        }
        Step::Lingering | Step::Leaving => {
            reach_the_end(bed, &mut play, case)?;
            if step == Step::Leaving {
                bed.gate(peer).open()?;
                play.wait_written()?;
            }
            strike(&play, case)?;
            bed.gate(peer).open()?;
            bed.daemon(Signal::SIGCONT)?;
        }
    }
    judge(bed, &mut play, case)
}

/// Everybody joins; then the daemon is stopped.
fn begin(bed: &Bed, play: &mut Play) -> Result<()> {
    (0..WORLD).try_for_each(|rank| play.start(bed, rank))?;
    play.wait_formed(bed)?;
    play.wait_granted(bed)?;
    bed.daemon(Signal::SIGSTOP)
}

/// The victim and the third have everything; the peer has contributed everything, and does not get to ask for the last sum.
fn reach_the_end(bed: &mut Bed, play: &mut Play, case: Case) -> Result<()> {
    let last = Seq(END - 1);
    bed.gate(case.peer()).gate(Kind::Pull, last)?;
    for rank in [case.victim, case.third()] {
        bed.gate(rank).gate(Kind::Data, last)?;
    }
    begin(bed, play)?;
    play.wait_for_its_last(bed, case.peer())?;
    for rank in [case.victim, case.third()] {
        bed.gate(rank).open()?;
    }
    play.wait_acknowledged(bed, case.victim)
}

fn strike(play: &Play, case: Case) -> Result<()> {
    play.signal(case.victim, if case.blow == Blow::Kill { Signal::SIGKILL } else { Signal::SIGSTOP })
}

fn judge(bed: &Bed, play: &mut Play, case: Case) -> Result<()> {
    let Case { victim, step, .. } = case;
    if case.blow == Blow::Pause && step.is_past_the_sum() {
        // Nobody is to miss it: the others wait for it at most.
        if step == Step::Last {
            play.wait_acknowledged(bed, case.third())?;
        }
        play.signal(victim, Signal::SIGCONT)?;
        let ending = play.end(victim)?;
        ensure!(ending.is_success && ending.result == case.sums(), "the victim: {ending:?}");
    }
    for survivor in [case.peer(), case.third()] {
        let ending = play.end(survivor)?;
        match case.sums() {
            Some(sums) => right(&ending, &sums).with_context(|| format!("rank {survivor}"))?,
            None => failed(&ending, &[victim]).with_context(|| format!("rank {survivor}"))?,
        }
    }
    let is_lost = matches!(step, Step::Granted | Step::Round | Step::First | Step::Middle);
    let lost = bed.lost(play.job)?;
    // A generation that was not formed leaves what was known of the one before.
    let is_new = !matches!(step, Step::BeforeJoin | Step::Joining);
    ensure!(!is_new || lost == if is_lost { vec![victim] } else { vec![] }, "lost: {lost:?}");
    match (step, case.blow) {
        (Step::BeforeJoin, Blow::Pause) => {
            // It comes when the others have gone.
            play.start(bed, victim)?;
            failed(&play.end(victim)?, &[case.peer(), case.third()])
        }
        (_, Blow::Pause) if is_lost => {
            play.signal(victim, Signal::SIGCONT)?;
            failed(&play.end(victim)?, &[])
        }
        _ => Ok(()),
    }
}

fn right(ending: &Ending, sums: &[u32]) -> Result<()> {
    ensure!(ending.is_success, "{}", ending.output);
    ensure!(ending.result.as_deref() == Some(sums), "{:?} instead of {sums:?}", ending.result);
    Ok(())
}

fn failed(ending: &Ending, culprits: &[usize]) -> Result<()> {
    ensure!(!ending.is_success && ending.result.is_none(), "it got a result: {ending:?}");
    let is_named = culprits.iter().all(|culprit| names(&ending.output, *culprit));
    ensure!(is_named, "{culprits:?} are not named: {}", ending.output);
    Ok(())
}

/// Plays cases, some at a time; tells all that went wrong.
fn play_all(cases: impl IntoIterator<Item = Case>) {
    let cases: VecDeque<Case> = cases.into_iter().collect();
    let (count, started) = (cases.len(), Instant::now());
    let (cases, failures) = (Mutex::new(cases), Mutex::new(Vec::new()));
    let next = || cases.lock().unwrap().pop_front();
    thread::scope(|scope| {
        for _ in 0..BEDS.min(count) {
            scope.spawn(|| {
                let mut bed = Bed::new(None).unwrap();
                while let Some(case) = next() {
                    if let Err(error) = play(&mut bed, case) {
                        let daemon = bed.aggregator.process.output();
                        failures.lock().unwrap().push(format!("{case:?}: {error:#}\nthe daemon: {daemon}"));
                        // Whatever is left of the scene is not to spoil the next.
                        bed = Bed::new(None).unwrap();
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    println!("{count} cases, {} failed, in {:.0} s", failures.len(), started.elapsed().as_secs_f64());
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

#[test]
fn the_most_telling_cases() {
    if !require_bpf("matrix::the_most_telling_cases") {
        return;
    }
    use Blow::{Kill, Pause, Stop};
    use Policy::{Abort, Shrink};
    const LAST: usize = WORLD - 1;
    let lossy = |case: Case| Case { loss: true, ..case };
    play_all([
        case(Step::BeforeJoin, Pause, LAST, Abort),
        case(Step::Joining, Kill, 0, Abort),
        case(Step::Granted, Kill, 0, Abort),
        case(Step::Granted, Stop, LAST, Shrink),
        case(Step::Round, Kill, LAST, Abort),
        case(Step::Round, Stop, 0, Shrink),
        case(Step::First, Stop, 0, Abort),
        case(Step::First, Kill, LAST, Shrink),
        case(Step::Middle, Pause, LAST, Abort),
        case(Step::Middle, Kill, 0, Shrink),
        case(Step::Middle, Pause, 0, Shrink),
        lossy(case(Step::Middle, Kill, LAST, Shrink)),
        lossy(case(Step::Middle, Stop, 0, Abort)),
        case(Step::Last, Kill, LAST, Abort),
        case(Step::Last, Pause, 0, Shrink),
        lossy(case(Step::Last, Pause, LAST, Abort)),
        case(Step::Lingering, Kill, 0, Abort),
        case(Step::Lingering, Pause, LAST, Shrink),
        lossy(case(Step::Lingering, Stop, LAST, Abort)),
        case(Step::Leaving, Kill, 0, Shrink),
        case(Step::Leaving, Pause, LAST, Abort),
    ]);
}

/// Every step, blow, victim and policy, with and without loss.
#[test]
#[ignore = "takes minutes: `cargo xtask soak matrix`"]
fn the_whole_product() {
    if !require_bpf("matrix::the_whole_product") {
        return;
    }
    let mut cases = Vec::new();
    for step in Step::EVERY {
        for blow in [Blow::Kill, Blow::Stop, Blow::Pause] {
            // Whoever is stopped before it joins, or while it waits, is not told from one that comes late, and is granted
            // what it waits for: those are other steps.
            let is_other = matches!(
                (step, blow),
                (Step::BeforeJoin, Blow::Kill) | (Step::Joining, Blow::Stop | Blow::Pause)
            );
            for victim in [0, WORLD - 1] {
                for policy in [Policy::Abort, Policy::Shrink] {
                    let of_loss = |loss| Case { step, blow, victim, policy, loss };
                    cases.extend([false, true].into_iter().filter(|_| !is_other).map(of_loss));
                }
            }
        }
    }
    play_all(cases);
}

/// Two ranks die at the same place: both are lost at one look, and named together.
#[test]
fn two_ranks_die_at_the_same_place() {
    if !require_bpf("matrix::two_ranks_die_at_the_same_place") {
        return;
    }
    let mut bed = Bed::new(None).unwrap();
    for policy in [Policy::Shrink, Policy::Abort] {
        bed.reset(0.0).unwrap();
        let mut play = Play::new(&bed, policy.job(), PATIENCE).unwrap();
        let step = Step::Middle;
        bed.gate(1).gate(Kind::Data, Seq(step.gate())).unwrap();
        begin(&bed, &mut play).unwrap();
        for victim in [0, 2] {
            play.wait_contributed(&bed, victim, step.reach()).unwrap();
            play.signal(victim, Signal::SIGKILL).unwrap();
        }
        bed.gate(1).open().unwrap();
        bed.daemon(Signal::SIGCONT).unwrap();
        let ending = play.end(1).unwrap();
        match policy {
            Policy::Shrink => {
                let sums = |chunk| if chunk < step.reach() { ALL } else { 0b010 };
                right(&ending, &(1..END).map(sums).collect::<Vec<_>>()).unwrap();
            }
            Policy::Abort => failed(&ending, &[0, 2]).unwrap(),
        }
        assert_eq!(bed.lost(play.job).unwrap(), [0, 2]);
        let output = bed.aggregator.process.output();
        assert!(names(&output, 0) && names(&output, 2), "{output}");
    }
}

/// A rank dies, and all ranks are started anew: the new generation computes what is right, and those that are left of the
/// old one learn of it at once.
#[test]
fn a_new_generation_ends_what_is_left_of_the_old_one() {
    if !require_bpf("matrix::a_new_generation_ends_what_is_left_of_the_old_one") {
        return;
    }
    let mut bed = Bed::new(None).unwrap();
    // Nothing here waits for an end of patience: three more processes start on what may be a busy machine.
    let patience = PATIENCE * 8;
    let [mut old, mut new] = [(); 2].map(|()| Play::new(&bed, Policy::Abort.job(), patience).unwrap());
    bed.gate(1).gate(Kind::Data, Seq(Step::Middle.gate())).unwrap();
    begin(&bed, &mut old).unwrap();
    old.wait_contributed(&bed, 0, Step::Middle.reach()).unwrap();
    old.signal(0, Signal::SIGKILL).unwrap();
    new.follow(&old);
    (0..WORLD).for_each(|rank| new.start(&bed, rank).unwrap());
    bed.daemon(Signal::SIGCONT).unwrap();
    new.wait_formed(&bed).unwrap();
    // The new generation does not end before they have heard of it: then nobody would tell them.
    new.signal(0, Signal::SIGSTOP).unwrap();
    bed.gate(1).open().unwrap();
    for rank in [1, 2] {
        let ending = old.end(rank).unwrap();
        failed(&ending, &[]).unwrap();
        assert!(ending.output.contains("has begun anew"), "{}", ending.output);
    }
    new.signal(0, Signal::SIGCONT).unwrap();
    for rank in 0..WORLD {
        right(&new.end(rank).unwrap(), &[ALL; CHUNKS as usize]).unwrap();
    }
    assert_eq!(bed.lost(new.job).unwrap(), Vec::<usize>::new());
}

/// The daemon is killed, and another one takes over: while ranks join, in the middle, while they leave. Nobody notices.
#[test]
fn the_daemon_is_killed_at_each_step() {
    if !require_bpf("matrix::the_daemon_is_killed_at_each_step") {
        return;
    }
    let mut bed = Bed::new(Some(Arc::new(Pins::new().unwrap()))).unwrap();
    for step in [Step::Joining, Step::Middle, Step::Leaving] {
        let result = with_the_daemon(&mut bed, step, |bed| bed.restart(), |_| Ok(()));
        result.with_context(|| format!("{step:?}: {}", bed.aggregator.process.output())).unwrap();
    }
}

/// The daemon is stopped, for longer than the job allows ranks to hold others up, and goes on: nobody is lost for that.
#[test]
fn the_daemon_is_stopped_at_each_step() {
    if !require_bpf("matrix::the_daemon_is_stopped_at_each_step") {
        return;
    }
    let mut bed = Bed::new(None).unwrap();
    for step in [Step::Joining, Step::Middle, Step::Leaving] {
        let stopped = |bed: &mut Bed| bed.daemon(Signal::SIGSTOP);
        let continued =
            |bed: &Bed| pass(JOB_TIMEOUT + JOB_TIMEOUT / 4).and_then(|()| bed.daemon(Signal::SIGCONT));
        let result = with_the_daemon(&mut bed, step, stopped, continued);
        result.with_context(|| format!("{step:?}: {}", bed.aggregator.process.output())).unwrap();
    }
}

/// All ranks and the daemon are frozen for longer than the job allows, and go on, the daemon first. At that moment somebody
/// is always the lowest.
#[test]
fn a_frozen_node_loses_nobody() {
    if !require_bpf("matrix::a_frozen_node_loses_nobody") {
        return;
    }
    let mut bed = Bed::new(None).unwrap();
    let mut play = Play::new(&bed, Policy::Abort.job(), PATIENCE).unwrap();
    bed.gate(1).gate(Kind::Data, Seq(Step::Middle.gate())).unwrap();
    (0..WORLD).for_each(|rank| play.start(&bed, rank).unwrap());
    play.wait_formed(&bed).unwrap();
    play.wait_contributed(&bed, 0, Step::Middle.reach()).unwrap();
    bed.wait_in_the_way(play.job, 1).unwrap();
    let before = bed.looked_at(play.job).unwrap();
    bed.daemon(Signal::SIGSTOP).unwrap();
    (0..WORLD).for_each(|rank| play.signal(rank, Signal::SIGSTOP).unwrap());
    bed.gate(1).open().unwrap();
    pass(2 * JOB_TIMEOUT).unwrap();
    bed.daemon(Signal::SIGCONT).unwrap();
    // It has looked again, before anybody has moved.
    let later = before + JOB_TIMEOUT.as_secs_f64();
    wait_until("the daemon had looked", PATIENCE, || Ok(bed.looked_at(play.job)? > later)).unwrap();
    (0..WORLD).for_each(|rank| play.signal(rank, Signal::SIGCONT).unwrap());
    for rank in 0..WORLD {
        right(&play.end(rank).unwrap(), &[ALL; CHUNKS as usize]).unwrap();
    }
    assert_eq!(bed.lost(play.job).unwrap(), Vec::<usize>::new());
}

/// Lets time pass: it is what the test is about.
fn pass(time: Duration) -> Result<()> {
    let end = Instant::now() + time;
    wait_until("time had passed", 2 * time, || Ok(Instant::now() >= end))
}

/// An operation during which something happens to the daemon at a step, and comes to an end later. It is as if nothing had
/// happened.
fn with_the_daemon(
    bed: &mut Bed,
    step: Step,
    strike: impl Fn(&mut Bed) -> Result<()>,
    relent: impl Fn(&Bed) -> Result<()>,
) -> Result<()> {
    bed.reset(0.0)?;
    let mut play = Play::new(bed, Policy::Abort.job(), PATIENCE)?;
    let scene = case(step, Blow::Stop, 0, Policy::Abort);
    match step {
        Step::Joining => {
            play.start(bed, 0)?;
            play.start(bed, 1)?;
            bed.wait_joining(play.job, vec![0, 1])?;
            strike(bed)?;
            play.start(bed, 2)?;
        }
        Step::Middle => {
            bed.gate(1).gate(Kind::Data, Seq(step.gate()))?;
            (0..WORLD).try_for_each(|rank| play.start(bed, rank))?;
            play.wait_formed(bed)?;
            play.wait_contributed(bed, 0, step.reach())?;
            strike(bed)?;
            bed.gate(1).open()?;
            play.wait_acknowledged(bed, 1)?;
        }
        _ => {
            reach_the_end(bed, &mut play, scene)?;
            bed.gate(scene.peer()).open()?;
            play.wait_written()?;
            strike(bed)?;
        }
    }
    relent(bed)?;
    for rank in 0..WORLD {
        right(&play.end(rank)?, &[ALL; CHUNKS as usize]).with_context(|| format!("rank {rank}"))?;
    }
    wait_until("all had left", PATIENCE, || Ok(bed.job(play.job)?["state"] == "idle"))?;
    ensure!(bed.lost(play.job)?.is_empty(), "ranks were lost");
    Ok(())
}
