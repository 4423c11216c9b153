use super::*;
use proptest::prelude::*;

fn request() -> impl Strategy<Value = Request> {
    let ids = (any::<bool>(), any::<u8>(), any::<u16>(), any::<u8>(), any::<u32>());
    let seqs = any::<[u32; 5]>();
    let sums = (any::<u64>(), any::<u64>(), any::<(u8, u16, i8, u8)>(), any::<i8>(), any::<u8>());
    (ids, seqs, sums).prop_map(|(ids, seqs, sums)| Request {
        kind: if ids.0 { Kind::Data } else { Kind::Pull },
        flags: ids.1,
        job: ids.2,
        worker: ids.3,
        generation: ids.4,
        seq: Seq(seqs[0]),
        want: Seq(seqs[1]),
        ack: Seq(seqs[2]),
        progress: Seq(seqs[3]),
        token: seqs[4],
        bitmap: sums.0,
        tag: sums.1,
        chunk: Chunk { operation_and_type: sums.2.0, lanes: sums.2.1, exponent: sums.2.2, root: sums.2.3 },
        next_exponent: sums.3,
        attempt: sums.4,
    })
}

proptest! {
    #[test]
    fn requests_round_trip(request in request()) {
        prop_assert_eq!(Request::decode(&request.encode()), Ok(request));
    }

    #[test]
    fn a_flipped_bit_is_refused(request in request(), bit in 0..512usize) {
        let mut header = request.encode();
        bytemuck::bytes_of_mut(&mut header)[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(Request::decode(&header).is_err());
    }

    #[test]
    fn decoding_never_panics(bytes in any::<[[u8; 32]; 2]>()) {
        let mut header: Header = bytemuck::cast(bytes);
        let _ = (Request::decode(&header), Answer::decode(&header));
        header.set_kind(Kind::Answer);
        header.seal();
        let _ = Answer::decode(&header);
    }
}

/// Locks the byte offsets that docs/protocol.md states.
#[test]
fn layout() {
    let mut header = Header::zeroed();
    let mut expected = [0u8; HEADER_BYTES];
    let mut at = |offset: usize, bytes: &[u8]| expected[offset..offset + bytes.len()].copy_from_slice(bytes);
    header.set_kind(Kind::Data);
    at(0, &[0x50, 0x41, 0x11]);
    header.set_flags(0x22);
    at(3, &[0x22]);
    header.set_job(0x0102);
    at(4, &[1, 2]);
    header.set_worker(3);
    header.set_status(4);
    at(6, &[3, 4]);
    header.set_generation(0x05060708);
    at(8, &[5, 6, 7, 8]);
    header.set_raw_seq(0x11121314);
    at(12, &[0x11, 0x12, 0x13, 0x14]);
    header.set_raw_want(0x15161718);
    at(16, &[0x15, 0x16, 0x17, 0x18]);
    header.set_raw_ack(0x21222324);
    at(20, &[0x21, 0x22, 0x23, 0x24]);
    header.set_raw_progress(0x25262728);
    at(24, &[0x25, 0x26, 0x27, 0x28]);
    header.set_token(0x31323334);
    at(28, &[0x31, 0x32, 0x33, 0x34]);
    header.set_bitmap(0x4142434445464748);
    at(32, &[0x41, 0x42, 0x43, 0x44, 0x45, 0x46, 0x47, 0x48]);
    header.set_tag(0x5152535455565758);
    at(40, &[0x51, 0x52, 0x53, 0x54, 0x55, 0x56, 0x57, 0x58]);
    header.set_lanes(0x6162);
    header.set_told(0x63);
    header.set_contributors(0x64);
    at(48, &[0x61, 0x62, 0x63, 0x64]);
    header.set_exponent(-1);
    header.set_next_exponent(2);
    header.set_window(0x7172);
    at(52, &[0xFF, 2, 0x71, 0x72]);
    header.set_rank(0x81);
    header.set_gain(-2);
    header.set_attempt(0x83);
    header.set_operation_or_epoch(0x84);
    at(56, &[0x81, 0xFE, 0x83, 0x84]);
    assert_eq!(header.as_bytes(), &expected);
}
