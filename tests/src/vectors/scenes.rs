//! What the vectors show.

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};
use paatp_common::Seq;
use paatp_common::frame::PLAIN_HEADER;
use paatp_common::limits::STANDARD_BLOCKS;
use paatp_common::switch::places;
use paatp_common::wire::{Chunk, ElementType, Header, Kind, Operation, Request, Status, flags};

use super::{JobSpec, Step, SwitchSpec, Vector, at_the_aggregator, at_the_switch, hex};
use crate::testrun::support::node::OwnedNode;
use crate::testrun::support::requests::{TestJob, edit, lanes_of, sum_of, tag_of};
use crate::testrun::support::switch::{OwnedSwitch, Port};

/// Lanes of most chunks: few, so that the files stay readable.
const LANES: u16 = 32;
/// Slots of a switch that has room.
const ROOMY: usize = 64;
/// Longer than any test takes, in µs.
const PATIENT: u64 = 1 << 40;
/// A UDP port that no rank has.
const FORGED_PORT: u16 = 9;
/// Between two packets at a switch in memory, in µs.
const PAUSE: u64 = 1000;

/// A vector in the making.
struct Scene {
    vector: Vector,
    node: OwnedNode,
    switch: Option<OwnedSwitch>,
    failure: Option<String>,
}

impl Scene {
    fn new(about: &str, jobs: &[TestJob], switch: Option<SwitchSpec>) -> Scene {
        let jobs = jobs.iter().map(JobSpec::of).collect();
        let vector = Vector { about: about.into(), jobs, switch, steps: Vec::new() };
        // The kernel's slots have a fixed length; a switch's are as long as its program says.
        let (node, switch) = (vector.node(STANDARD_BLOCKS), vector.switch(STANDARD_BLOCKS));
        Scene { vector, node, switch, failure: None }
    }

    /// A frame of a rank. `same`: the switch is to do with it what the aggregator does.
    fn frame(&mut self, what: &str, rank: u8, mut frame: Vec<u8>, same: bool) -> &mut Step {
        frame[6..12].copy_from_slice(&Port::Rank(rank).mac());
        let aggregator = at_the_aggregator(&mut self.node, &self.vector.jobs, &frame);
        let switch = self.switch.as_mut().map(|switch| {
            switch.now += PAUSE;
            at_the_switch(switch, Port::Rank(rank), &frame)
        });
        let slots = switch.as_ref().and_then(|switch| switch.slot.as_ref()).zip(aggregator.slot.as_ref());
        if same && !slots.is_some_and(|(switch, aggregator)| switch.is_same(aggregator)) {
            self.failure = Some(format!("{what}: the switch's slot is not the aggregator's"));
        }
        let (aggregator, frame) = (Some(aggregator), hex(&frame));
        let step = Step { what: what.into(), rank: Some(rank), frame, aggregator, switch, same };
        self.vector.steps.push(step);
        let last = self.vector.steps.len() - 1;
        &mut self.vector.steps[last]
    }

    fn send(&mut self, what: &str, job: &TestJob, request: &Request, same: bool) {
        let lanes = lanes_of(job.world, request.worker, request.seq, request.chunk.lanes);
        self.frame(what, request.worker, job.frame(request, &lanes), same);
    }

    /// A contribution that the switch is to pass on as it is.
    fn pass(&mut self, what: &str, job: &TestJob, request: &Request) {
        self.send(what, job, request, false);
        let step = self.vector.steps.last().filter(|step| {
            let out = step.switch.as_ref().and_then(|effect| effect.out.get("node"));
            out != Some(&step.frame)
        });
        if step.is_some() {
            self.failure = Some(format!("{what}: the switch does not pass it on"));
        }
    }

    /// A frame of the aggregator that the switch alone sees.
    fn down(&mut self, what: &str, frame: &[u8]) {
        let switch = self.switch.as_mut().map(|switch| {
            switch.now += PAUSE;
            at_the_switch(switch, Port::Node, frame)
        });
        let what = what.into();
        self.vector.steps.push(Step {
            what,
            rank: None,
            frame: hex(frame),
            aggregator: None,
            switch,
            same: false,
        });
    }

    fn done(self) -> Result<Vector> {
        ensure!(self.failure.is_none(), "{}", self.failure.unwrap_or_default());
        Ok(self.vector)
    }
}

const fn roomy(k: u8) -> Option<SwitchSpec> {
    Some(SwitchSpec { slots: ROOMY, k, patience: PATIENT })
}

/// The job of most vectors.
const fn job() -> TestJob {
    TestJob::new(3, 4, 64)
}

fn data(job: &TestJob, rank: u8, seq: u32) -> Request {
    job.data(rank, Seq(seq), sum_of(LANES))
}

/// An answer of the aggregator to a rank, as frames of the rank would be answered.
fn answer(job: &TestJob, rank: u8, payload: &[u32], change: impl FnOnce(&mut Header)) -> Vec<u8> {
    let mut datagram = job.datagram(&data(job, rank, 0), payload);
    edit(&mut datagram, |header| {
        header.set_kind(Kind::Answer);
        header.set_flags(0);
        header.set_lanes(payload.len() as u16);
        header.set_told(3);
        header.set_window(9);
        header.set_gain(-3);
        header.set_operation_or_epoch(5);
        change(header);
    });
    let mut envelope = job.envelope(rank);
    std::mem::swap(&mut envelope.source, &mut envelope.destination);
    std::mem::swap(&mut envelope.source_port, &mut envelope.port);
    let mut frame = envelope.wrap(&datagram);
    frame[..6].copy_from_slice(&Port::Rank(rank).mac());
    frame[6..12].copy_from_slice(&Port::Node.mac());
    frame[40..42].fill(0);
    frame
}

/// The result of a chunk that all ranks are in, as it is sent to one of them.
fn result(job: &TestJob, rank: u8, seq: u32, lanes: u16) -> Vec<u8> {
    let mut sums = vec![0u32; usize::from(lanes)];
    for other in 0..job.world {
        let own = lanes_of(job.world, other, Seq(seq), lanes);
        sums.iter_mut().zip(own).for_each(|(sum, lane)| *sum = sum.wrapping_add(lane));
    }
    let keys = (0..job.world).map(|rank| job.key(rank)).fold(0u64, u64::wrapping_add);
    let salt = paatp_common::tag::salt(keys, Seq(seq), sum_of(lanes));
    answer(job, rank, &sums, |header| {
        header.set_flags(flags::RESULT | flags::PAYLOAD);
        header.set_raw_seq(seq);
        header.set_raw_want(seq);
        header.set_raw_ack(seq);
        header.set_raw_progress(seq + 1);
        header.set_bitmap(job.entry().expected);
        header.set_contributors(job.world);
        header.set_tag(tag_of(&sums).wrapping_add(salt));
        header.set_exponent(sum_of(lanes).exponent);
    })
}

/// Makes a vector.
type Make = fn() -> Result<Vector>;

/// All vectors, by name.
///
/// # Errors
/// Where a switch does not do what it is said to do.
pub fn all() -> Result<BTreeMap<String, Vector>> {
    let scenes: [(&str, Make); 15] = [
        ("sum", sum),
        ("lengths", lengths),
        ("duplicates", duplicates),
        ("window", window),
        ("floor", floor),
        ("mismatch", mismatch),
        ("passed", passed),
        ("operations", operations),
        ("extremes", extremes),
        ("crowded", crowded),
        ("eviction", eviction),
        ("damage", damage),
        ("strangers", strangers),
        ("results", results),
        ("jobs", jobs),
    ];
    scenes.into_iter().map(|(name, scene)| Ok((name.to_owned(), scene()?))).collect()
}

fn sum() -> Result<Vector> {
    let job = job();
    let mut scene = Scene::new("Store, add, complete; in any order the same lanes.", &[job], roomy(2));
    for (seq, order) in [(0, [0, 1, 2]), (1, [2, 0, 1])] {
        for (rank, what) in order.into_iter().zip(["stored", "added", "completes the slot"]) {
            scene.send(&format!("rank {rank}, chunk {seq}: {what}"), &job, &data(&job, rank, seq), true);
        }
    }
    scene.done()
}

fn lengths() -> Result<Vector> {
    let job = TestJob::new(2, 4, 256);
    let about = "Chunks of different lengths; the switch adds what its slots hold.";
    let mut scene = Scene::new(about, &[job], roomy(1));
    for (seq, lanes) in [(0, 256), (1, 64), (2, 160)] {
        for rank in [1, 0] {
            let request = job.data(rank, Seq(seq), sum_of(lanes));
            scene.send(&format!("rank {rank}: {lanes} lanes"), &job, &request, true);
        }
    }
    scene.done()
}

fn duplicates() -> Result<Vector> {
    let job = job();
    let about = "A contribution that is there already is answered, not added, before and after completion.";
    let mut scene = Scene::new(about, &[job], roomy(1));
    for (rank, what) in [
        (0, "stored"),
        (0, "again"),
        (1, "added"),
        (1, "again"),
        (0, "once more"),
        (2, "completes the slot"),
        (2, "again, after the partial sum was sent"),
        (0, "again, likewise"),
    ] {
        scene.send(&format!("rank {rank}: {what}"), &job, &data(&job, rank, 0), true);
    }
    scene.done()
}

fn window() -> Result<Vector> {
    let job = job();
    let about = "Chunks outside of the window: refused by the aggregator, passed on by the switch.";
    let mut scene = Scene::new(about, &[job], roomy(1));
    let at = |rank, seq, ack| Request { ack: Seq(ack), progress: Seq(ack), ..data(&job, rank, seq) };
    scene.send("rank 0: the last chunk of the window", &job, &at(0, 3, 0), true);
    scene.send("rank 0: one further", &job, &at(0, 4, 0), false);
    for rank in 0..3 {
        scene.send(&format!("rank {rank} has acknowledged two chunks"), &job, &at(rank, 2, 2), true);
    }
    scene.send("rank 1: now there is room", &job, &at(1, 4, 2), true);
    scene.send("rank 1: all ranks have acknowledged this one", &job, &at(1, 1, 2), false);
    scene.done()
}

fn floor() -> Result<Vector> {
    let job = job();
    let about = "A switch that has forgotten how far a job is learns it from an answer without a result, around the end of \
                 the numbers.";
    let mut scene = Scene::new(about, &[job], roomy(1));
    let at = |from: u32| u32::MAX.wrapping_add(from);
    let own = |rank, seq, ack| Request { ack: Seq(ack), progress: Seq(seq), ..data(&job, rank, seq) };
    let told = |min_ack, progress| {
        answer(&job, 0, &[], |header| {
            header.set_raw_want(min_ack);
            header.set_raw_ack(progress);
            header.set_raw_progress(progress);
        })
    };
    scene.pass("rank 0: nothing is known but the job's beginning", &job, &own(0, at(0), at(0)));
    scene.down("all ranks have acknowledged what is before the last number", &told(at(0), at(1)));
    scene.send("rank 1: the last chunk of the window", &job, &own(1, at(3), at(0)), false);
    scene.pass("rank 1: one further", &job, &own(1, at(4), at(0)));
    scene.down("an answer that was under way for long lowers nothing", &told(at(0).wrapping_sub(9), at(0)));
    scene.down("nobody is so far ahead of what all have", &told(at(4), at(9)));
    let mut other = told(at(4), at(5));
    edit(&mut other[PLAIN_HEADER..], |header| header.set_flags(flags::PARTIAL));
    scene.down("another switch's answer says nothing of it", &other);
    let mut rejoin = told(at(4), at(5));
    edit(&mut rejoin[PLAIN_HEADER..], |header| header.set_status(Status::Rejoin as u8));
    scene.down("nor does REJOIN", &rejoin);
    scene.pass("rank 2: so the window is the same", &job, &own(2, at(4), at(0)));
    scene.send("rank 2: at its beginning as well", &job, &own(2, at(1), at(0)), false);
    scene.down("all ranks are further", &told(at(2), at(4)));
    scene.send("rank 0: now there is room", &job, &own(0, at(5), at(2)), false);
    scene.pass("rank 0: all ranks have acknowledged this one", &job, &own(0, at(1), at(2)));
    scene.done()
}

fn mismatch() -> Result<Vector> {
    let job = job();
    let about =
        "Ranks that do not agree: the aggregator ends the job, the switch leaves it to the aggregator.";
    let mut scene = Scene::new(about, &[job], roomy(1));
    let first = data(&job, 0, 0);
    scene.send("rank 0: stored", &job, &first, true);
    let of = |chunk: Chunk| Request { chunk, ..data(&job, 1, 0) };
    let chunk = first.chunk;
    scene.send("another exponent", &job, &of(Chunk { exponent: 4, ..chunk }), true);
    scene.send("other lanes", &job, &of(Chunk { lanes: 64, ..chunk }), true);
    scene.send("another root", &job, &of(Chunk { root: 1, ..chunk }), true);
    let mean = Chunk::new(Operation::Mean, ElementType::F32, LANES, chunk.exponent);
    scene.send("another operation", &job, &of(mean), true);
    scene.send("what they agreed on", &job, &data(&job, 1, 0), true);
    scene.done()
}

fn passed() -> Result<Vector> {
    let job = job();
    let about = "What goes past the switch: retransmissions, redos, pulls, values that cannot be reduced.";
    let mut scene = Scene::new(about, &[job], roomy(1));
    let with = |bits, rank, seq| Request { flags: bits, ..data(&job, rank, seq) };
    scene.send("rank 0: a retransmission", &job, &with(flags::RETRANSMIT, 0, 0), false);
    scene.send("rank 1: not finite", &job, &with(flags::NON_FINITE, 1, 1), false);
    scene.send("rank 1: a redo", &job, &Request { attempt: 1, ..data(&job, 1, 2) }, false);
    scene.send("rank 2: a pull", &job, &job.pull(2, Seq(0), sum_of(LANES)), false);
    scene.send("rank 2: a partial sum of itself", &job, &with(flags::PARTIAL, 2, 3), false);
    scene.done()
}

fn operations() -> Result<Vector> {
    let job = TestJob::new(3, 8, 64);
    let about = "The switch adds sums and means, also such that need every rank; all else goes past it.";
    let mut scene = Scene::new(about, &[job], roomy(1));
    let chunk = |operation, lanes| Chunk::new(operation, ElementType::F32, lanes, -3);
    let everybody = sum_of(LANES).operation_and_type | paatp_common::wire::EVERYBODY;
    for (seq, chunk, same) in [
        (0, chunk(Operation::Mean, LANES), true),
        (1, Chunk { operation_and_type: everybody, ..sum_of(LANES) }, true),
        (2, chunk(Operation::Max, LANES), false),
        (3, chunk(Operation::Min, LANES), false),
        (4, Chunk { root: 1, ..chunk(Operation::Broadcast, LANES) }, false),
        (5, chunk(Operation::Barrier, 0), false),
        (6, chunk(Operation::Exponents, 0), false),
    ] {
        let what = format!("operation and type {:#04x}", chunk.operation_and_type);
        scene.send(&what, &job, &job.data(1, Seq(seq), chunk), same);
    }
    scene.done()
}

fn extremes() -> Result<Vector> {
    let job = job();
    let about = "A slot keeps the largest exponent, the lowest acknowledgement and progress, and marks of congestion.";
    let mut scene = Scene::new(about, &[job], roomy(1));
    for seq in [0, 1] {
        for (rank, next_exponent, ack, progress) in [(1, -9, 1, 2), (0, 7, 0, 1), (2, -128, 1, 3)] {
            let (ack, progress) = (Seq(ack), Seq(progress));
            let request = Request { next_exponent, ack, progress, ..data(&job, rank, seq) };
            let lanes = lanes_of(job.world, rank, Seq(seq), LANES);
            let mut envelope = job.envelope(rank);
            envelope.ecn = if rank == 0 && seq == 0 { 3 } else { 2 };
            let frame = envelope.wrap(&job.datagram(&request, &lanes));
            scene.frame(&format!("rank {rank} proposes {next_exponent}"), rank, frame, true);
        }
    }
    scene.done()
}

/// Chunks below 2^16 whose first places are the same in a table of so many slots.
fn colliding(slots: usize, count: usize) -> Vec<u32> {
    let home = |seq: u32| places(0, Seq(seq), slots)[0];
    (0..1 << 16).filter(|seq| home(*seq) == home(0)).take(count).collect()
}

fn crowded() -> Result<Vector> {
    let about = "k = 2 finds places for two chunks, a third has none but theirs and goes to the aggregator, and so does all \
                 the rest of it, and of chunks before it that have none.";
    const SLOTS: usize = 16;
    const K: u8 = 2;
    let job = TestJob::new(2, 1 << 10, LANES);
    let (first, second) = (0, colliding(SLOTS, 2)[1]);
    let taken = [places(0, Seq(first), SLOTS)[0], places(0, Seq(second), SLOTS)[1]];
    let has_taken_ones_alone =
        |seq: &u32| places(0, Seq(*seq), SLOTS)[..usize::from(K)].iter().all(|place| taken.contains(place));
    let mut crowded = (second + 2..job.slots).filter(has_taken_ones_alone);
    let (Some(third), Some(fourth)) = (crowded.next(), crowded.next()) else {
        bail!("no chunks with these places")
    };
    let mut scene = Scene::new(about, &[job], Some(SwitchSpec { slots: SLOTS, k: K, patience: PATIENT }));
    scene.send("first place", &job, &data(&job, 0, first), true);
    scene.send("second place", &job, &data(&job, 0, second), true);
    scene.pass("no place", &job, &data(&job, 0, third));
    scene.send("in the first place", &job, &data(&job, 1, first), true);
    scene.down("its result frees it", &result(&job, 1, first, LANES));
    scene.send("in the second place, although the first is free", &job, &data(&job, 1, second), true);
    scene.pass("there is a place now, but a part of it has gone by", &job, &data(&job, 1, third));
    scene.pass("as something of this one may have", &job, &data(&job, 1, third - 1));
    scene.send("a later chunk may have the place", &job, &data(&job, 1, fourth), true);
    scene.send("and has it", &job, &data(&job, 0, fourth), true);
    scene.done()
}

fn eviction() -> Result<Vector> {
    let about =
        "A slot that was untouched for too long goes to another chunk; what it held is the ranks' to repeat.";
    const SLOTS: usize = 16;
    let seqs = colliding(SLOTS, 2);
    let job = TestJob::new(2, 1 << 10, LANES);
    let mut scene = Scene::new(about, &[job], Some(SwitchSpec { slots: SLOTS, k: 1, patience: 0 }));
    scene.send("stored", &job, &data(&job, 0, seqs[0]), true);
    scene.send("takes its place", &job, &data(&job, 0, seqs[1]), true);
    scene.send("takes it back, without what was there", &job, &data(&job, 1, seqs[0]), false);
    scene.done()
}

fn damage() -> Result<Vector> {
    let job = job();
    let about =
        "Flipped bits: the switch reads headers, not tags; the aggregator finds what it added of the latter.";
    let mut scene = Scene::new(about, &[job], roomy(1));
    let good = |rank| {
        let request = data(&job, rank, 0);
        job.frame(&request, &lanes_of(job.world, rank, request.seq, LANES))
    };
    let mut header = good(0);
    header[PLAIN_HEADER + 20] ^= 0x10;
    scene.frame("in the header", 0, header, false);
    let mut address = good(0);
    address[29] ^= 1;
    scene.frame("in the IP header", 0, address, false);
    let mut payload = good(0);
    let last = payload.len() - 1;
    payload[last] ^= 1;
    scene.frame("in the payload: the switch cannot know", 0, payload, false);
    scene.done()
}

fn strangers() -> Result<Vector> {
    let job = job();
    let about = "Packets that nobody registered may have sent, and what is not the switch's to read.";
    let mut scene = Scene::new(about, &[job], roomy(1));
    let lanes = lanes_of(job.world, 0, Seq(0), LANES);
    let edited = |change: &dyn Fn(&mut Header)| {
        let mut datagram = job.datagram(&data(&job, 0, 0), &lanes);
        edit(&mut datagram, change);
        job.envelope(0).wrap(&datagram)
    };
    scene.frame("another job", 0, edited(&|header| header.set_job(1)), false);
    scene.frame("another generation", 0, edited(&|header| header.set_generation(1)), false);
    scene.frame("a rank that is none", 0, edited(&|header| header.set_worker(3)), false);
    scene.frame("the number of another rank", 0, edited(&|header| header.set_worker(1)), false);
    scene.frame("another rank's bit", 0, edited(&|header| header.set_bitmap(2)), false);
    scene.frame("two bits", 0, edited(&|header| header.set_bitmap(3)), false);
    scene.frame("lanes that are not there", 0, edited(&|header| header.set_lanes(64)), false);
    scene.frame("a payload of no lanes", 0, edited(&|header| header.set_lanes(0)), false);
    scene.frame("an answer", 0, edited(&|header| header.set_kind(Kind::Answer)), false);
    let datagram = job.datagram(&data(&job, 0, 0), &lanes);
    let mut tagged = job.envelope(0);
    tagged.tags = vec![0x8100];
    scene.frame("behind a VLAN tag", 0, tagged.wrap(&datagram), false);
    let mut padded = job.envelope(0).wrap(&datagram);
    padded.push(0);
    scene.frame("with a trailer", 0, padded, false);
    scene.done()
}

fn results() -> Result<Vector> {
    let job = job();
    let about = "The result that frees a slot goes to all ranks whose port is known; any other to whom it is addressed.";
    let mut scene = Scene::new(about, &[job], roomy(1));
    for rank in [0, 1, 2] {
        scene.send(&format!("rank {rank}"), &job, &data(&job, rank, 0), true);
    }
    let pending = answer(&job, 2, &[], |header| {
        header.set_raw_ack(0);
        header.set_raw_progress(1);
        header.set_status(Status::Busy as u8);
    });
    scene.down("no result: to whom it is addressed", &pending);
    let mut forged = answer(&job, 0, &[], |_| {});
    forged[PLAIN_HEADER - 6..PLAIN_HEADER - 4].copy_from_slice(&FORGED_PORT.to_be_bytes());
    scene.frame("an answer from a worker's port tells nobody's UDP port", 1, forged, false);
    scene.down("the result: to all", &result(&job, 2, 0, LANES));
    scene.down("the same again: to whom it is addressed", &result(&job, 2, 0, LANES));
    let request = Request { progress: Seq(1), ..data(&job, 0, 1) };
    scene.send("a next chunk is told what passed", &job, &request, true);
    let mut damaged = result(&job, 0, 1, LANES);
    damaged[PLAIN_HEADER + 12] ^= 1;
    scene.down("a damaged header frees nothing", &damaged);
    let rejoin = answer(&job, 0, &[], |header| {
        header.set_status(Status::Rejoin as u8);
        header.set_raw_ack(77);
    });
    scene.down("REJOIN: nothing else in it is true", &rejoin);
    let request = Request { progress: Seq(1), ..data(&job, 1, 1) };
    scene.send("and so it is not told", &job, &request, true);
    scene.down("a result of a chunk that is not complete here", &result(&job, 0, 1, LANES));
    scene.done()
}

fn jobs() -> Result<Vector> {
    let first = job();
    let second = TestJob { number: 1, generation: 0xBEEF, first_slot: 4, ..TestJob::new(2, 4, 64) };
    let about = "Two jobs with the same chunks do not meet.";
    let mut scene = Scene::new(about, &[first, second], roomy(2));
    for (job, rank) in [(first, 0), (second, 0), (first, 1), (second, 1), (first, 2)] {
        let what = format!("job {}, rank {rank}", job.number);
        scene.send(&what, &job, &data(&job, rank, 0), true);
    }
    scene.done()
}
