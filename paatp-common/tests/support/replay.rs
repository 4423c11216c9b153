//! One hostile frame against a node in the middle of its work: what the fuzzer does with each input, and the tests with
//! each file of the corpus.

use std::sync::LazyLock;

use paatp_common::Seq;
use paatp_common::aggregate::unsalted;
use paatp_common::frame::{self, Frame, Parsed};
use paatp_common::slot::Slot;
use paatp_common::wire::{Answer, Body, HEADER_BYTES, Header, Kind, Request, Status};

use super::node::{OwnedNode, Verdict};
use super::requests::{TestJob, lanes_of, payload_of, sum_of, tag_of};

/// Lanes of the jobs under attack.
pub const LANES: u16 = 64;

/// Blocks of that many lanes.
pub const BLOCKS: usize = LANES as usize / 32;

/// The jobs under attack: one over each version of IP.
#[must_use]
pub const fn jobs() -> [TestJob; 2] {
    let v4 = TestJob::new(3, 4, LANES);
    [v4, TestJob { number: 1, first_slot: 4, v6: true, quorum: 2, ..v4 }]
}

/// A node whose jobs have a complete chunk, one that is begun, one that is being redone and an empty slot each. Its
/// slots have `blocks` blocks, two at least.
#[must_use]
pub fn node_at_work(blocks: usize) -> OwnedNode {
    let mut node = OwnedNode::new(2, 8, blocks);
    for job in jobs() {
        node.install(&job);
        let mut send = |rank: u8, seq: u32, attempt: u8| {
            let request = Request { attempt, ..job.data(rank, Seq(seq), sum_of(LANES)) };
            node.ask(&job, &request, &lanes_of(job.world, rank, Seq(seq), LANES)).expect("an answer");
        };
        for rank in 0..3 {
            send(rank, 0, 0);
            send(rank, 2, 0);
        }
        send(1, 1, 0);
        send(0, 2, 1);
    }
    node
}

/// Runs a frame as it is, and then one that is mended as far as it asks for.
///
/// # Panics
/// Where a frame that nobody may have sent changes a slot, or an answer is not as it has to be.
pub fn check(bytes: &[u8]) {
    static NODE: LazyLock<OwnedNode> = LazyLock::new(|| node_at_work(BLOCKS));
    let mut node = NODE.duplicate();
    run(&mut node, bytes.to_vec());
    if let Some(mended) = mend(&node, bytes) {
        run(&mut node, mended);
    }
}

/// Makes right what a random frame never has right. The field `contributors`, which requests do not use, says what.
fn mend(node: &OwnedNode, bytes: &[u8]) -> Option<Vec<u8>> {
    let mut frame = bytes.to_vec();
    let length = frame.len() as u32;
    let Parsed::Ours(layout, _) = frame::parse(&Frame::new(&mut frame), length, &node.node, 0) else {
        return None;
    };
    let start = layout.header();
    let payload = payload_of(&frame[start..]);
    let header = Header::of_mut(&mut frame[start..])?;
    let wishes = header.contributors();
    let wish = |bit: u8| wishes >> bit & 1 == 1;
    let job = jobs()[layout.is_v6 as usize];
    if wish(0) {
        header.set_job(job.number);
        header.set_generation(job.generation);
        header.set_worker(header.worker() % job.world);
    }
    let worker = header.worker();
    if wish(1) {
        header.set_bitmap(1u64.wrapping_shl(worker.into()));
    }
    if wish(2) {
        header.set_lanes(payload.len() as u16);
    }
    let kind = if wish(3) { Kind::Data } else { Kind::Pull };
    header.set_kind(kind);
    if wish(4) {
        let salt = paatp_common::tag::salt(job.key(worker), header.seq(), header.chunk());
        header.set_tag(tag_of(&payload).wrapping_add(if wish(3) { salt } else { 0 }));
    }
    header.seal();
    if wish(5) {
        let address = job.address(worker);
        let source = start - 8 - if layout.is_v6 { 32 } else { 8 };
        let own = if layout.is_v6 { &address[..] } else { &address[12..] };
        frame[source..source + own.len()].copy_from_slice(own);
    }
    Some(frame)
}

fn run(node: &mut OwnedNode, mut frame: Vec<u8>) {
    let original = frame.clone();
    let (slots, lanes) = (node.slots.clone(), node.lanes.clone());
    let verdict = node.frame(&mut frame);
    let is_unchanged = node.slots == slots && node.lanes == lanes;
    match verdict {
        Verdict::Pass => assert!(is_unchanged && frame == original, "not ours, and not as it was"),
        Verdict::Drop => assert!(is_unchanged, "dropped, and a slot changed"),
        Verdict::Transmit => {
            let layout = match frame::parse(
                &Frame::new(&mut original.clone()),
                original.len() as u32,
                &node.node,
                0,
            ) {
                Parsed::Ours(layout, _) => layout,
                other => panic!("answered {other:?}"),
            };
            assert!(frame.len() <= original.len(), "an answer never is longer than its request");
            let datagram = &frame[layout.header()..];
            let answer = Answer::decode(Header::of(datagram).expect("a header")).expect("an answer");
            match answer.status {
                Status::Ok => assert!(changed(&slots, &node.slots) <= 1),
                Status::BadTag => {
                    let lost_at_most = |(old, new): (&Slot, &Slot)| new.bits == old.bits || new.bits == 0;
                    assert!(slots.iter().zip(&node.slots).all(lost_at_most), "damage was added");
                }
                status => assert!(is_unchanged, "{status:?}, and a slot changed"),
            }
            let job = jobs()[answer.job as usize];
            match answer.body {
                Body::Result { want, bitmap, tag, .. } => {
                    let slot = &node.slots[(job.first_slot + want.0 % job.slots) as usize];
                    let keys = (0..64u8).filter(|rank| bitmap >> rank & 1 == 1).map(|rank| job.key(rank));
                    let keys = keys.fold(0, u64::wrapping_add);
                    let expected = tag_of(&payload_of(datagram));
                    assert_eq!(
                        unsalted(tag, keys, want, slot.chunk()),
                        expected,
                        "a result that fails its check"
                    );
                }
                Body::Pending { .. } => assert_eq!(datagram.len(), HEADER_BYTES),
            }
        }
    }
}

fn changed(before: &[Slot], after: &[Slot]) -> usize {
    before.iter().zip(after).filter(|(before, after)| before != after).count()
}
