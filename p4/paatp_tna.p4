/* The switch of paatp.p4 for Tofino (P4_16, TNA): a contribution of 32 lanes is looked up, added and decided about in
 * one pass.
 *
 * Each register is touched once by a packet, in one stage, and each decision must have been made a stage before it is
 * used. So the program takes less than paatp.p4 (one place for each chunk, 31 local ranks, 32 lanes) and passes the rest
 * on; docs/switch.md compares the two and says why nothing is added twice or to another chunk.
 *
 *   stage 0      who sends, which slot
 *   stage 1      slot_holder: does the chunk have its slot
 *   stage 2      slot_seen: has the rank contributed; slot_agreed; slot_ack; slot_progress
 *   stage 3      slot_missing: are all in
 *   stage 3-11   tag, lanes
 *
 * Ingress decides and adds, egress makes up for it in the check and makes copies. What is only passed on skips the
 * egress.
 *
 * What is computed with are whole words, a step in each stage, where possible in place: an instruction reads and writes
 * packet header registers of one size and of one group of sixteen.
 *
 * -DPAATP_SLOTS=n: slots, a power of two, with -DPAATP_SLOT_BITS=log2(n).
 */

#include <core.p4>
#include <tna.p4>

#ifndef PAATP_SLOTS
#define PAATP_SLOTS 4096
#define PAATP_SLOT_BITS 12
#endif

/* Local ranks have 5 bits. (8 bits of slot_missing count them.) */
#define PAATP_LOCAL_BITS 5
#define PAATP_SEEN_BITS (PAATP_SLOT_BITS + PAATP_LOCAL_BITS)

#include "include/paatp_constants.p4"
#include "include/paatp_header.p4"

typedef bit<48> mac_t;
typedef bit<32> ipv4_t;
typedef bit<PAATP_SLOT_BITS> slot_t;

header ethernet_h {
    mac_t destination;
    mac_t source;
    bit<16> ether_type;
}

header ipv4_h {
    bit<4> version;
    bit<4> ihl;
    bit<6> diffserv;
    bit<2> ecn;
    bit<16> total_length;
    bit<16> identification;
    bit<3> flags;
    bit<13> fragment;
    bit<8> hops;
    bit<8> protocol;
    bit<16> checksum;
    ipv4_t source;
    ipv4_t destination;
}

header udp_h {
    bit<16> source;
    bit<16> destination;
    bit<16> length;
    bit<16> checksum;
}

/* What the egress is to make of the packet. */
const bit<8> MODE_ANSWER = 1;
const bit<8> MODE_SUM = 2;
const bit<8> MODE_RESULT = 3;

/* From ingress to egress, on all packets that do not skip it. With MODE_SUM paatp_changes_h follows. */
header bridge_h {
    bit<8> mode;
}

const bit<16> ETHER_IPV4 = 0x0800;
const bit<8> PROTOCOL_UDP = 17;
const bit<2> CONGESTED = 3;
const bit<2> ECN_CAPABLE = 2;
const bit<8> TIME_TO_LIVE = 64;
const bit<16> IPV4_BYTES = 20;
const bit<16> UDP_BYTES = 8;
const bit<16> ANSWER_BYTES = UDP_BYTES + PAATP_HEADER_BYTES;
const bit<16> DATA_BYTES = ANSWER_BYTES + (PAATP_LANES_PER_BLOCK << 2);

/* How long a slot is safe from other chunks, counted from its first contribution, in units of 2^16 ns: 250 ms. The
   control plane may set another time. */
const bit<32> PATIENCE = 3815;

/* Of slot_missing: the lower half is the number of ranks that are missing, the upper that of contributions with a mark. */
#define MARK 0x0100

/* What a slot has for a contribution. A register action hands its two conditions out as one of four bits: neither, the
   first, the second, both. Here they are that it is another chunk's, and that nobody needs it. */
const bit<8> NO_PLACE = 0;
const bit<8> CROWDED = 2;
const bit<8> CLAIMED = 8;
#define IS_HELD(place) ((place) == 1 || (place) == 4)
/* The same for a result: its chunk has the slot, and was not over. */
const bit<8> WAS_UNDER_WAY = 8;

/* What was found of a contribution, each a stage before it is asked for. */
struct found_t {
    bit<8> place;
    /* The rank is in the slot. */
    bit<1> seen;
    /* The word with the largest exponent that the slot's ranks propose, xor NEXT_EXPONENT_BIAS. 0: this rank does not agree
       with the slot, or the slot is not the chunk's. */
    bit<32> next;
}

/* The word is an exponent that ranks agree on, the next one, and 0. With this bias it is in the order of signed next
   exponents, and never 0. */
const bit<32> NEXT_EXPONENT_BIAS = 0x00800001;
#define AGREES(found) ((found).next[0:0] == 1)

/* To be added to what a slot holds. (Else it is a duplicate, or not the slot's.) */
#define IS_NEW(found) ((found).seen == 0 && AGREES(found))

/* One lane of all slots. */
control PaatpLane(inout bit<32> lane, in slot_t slot, in found_t found) {
    Register<bit<32>, slot_t>(PAATP_SLOTS) sums;

    RegisterAction<bit<32>, slot_t, bit<32>>(sums) store = {
        void apply(inout bit<32> sum) {
            sum = lane;
        }
    };

    RegisterAction<bit<32>, slot_t, bit<32>>(sums) add = {
        void apply(inout bit<32> sum, out bit<32> result) {
            sum = sum + lane;
            result = sum;
        }
    };

    apply {
        if (found.place == CLAIMED) {
            store.execute(slot);
        } else if (IS_NEW(found)) {
            lane = add.execute(slot);
        }
    }
}

#include "include/paatp_tna_parts.p4"

/* ------------------------------------------------------------------------------------------------------ ingress */

struct ingress_headers_t {
    bridge_h bridge;
    /* For each word that will change, first what the slot is to have of it, then what it is to be, then by how much that
       differs. There for all contributions, until one is passed on. */
    paatp_changes_h changes;
    ethernet_h ethernet;
    ipv4_h ipv4;
    udp_h udp;
    paatp_words_h paatp;
    paatp_payload_h payload;
}

struct ingress_metadata_t {
    bit<8> kind;
    /* Of a rank of the switch. */
    bit<1> is_known;
    bit<8> count;
    slot_t slot;
    /* The chunk (the contribution's seq, or the result's want); then the chunk among those of all jobs and generations. */
    bit<32> id;
    bit<32> now;
    bit<PAATP_LOCAL_BITS> local;
    bit<16> group;
    found_t found;
    bit<8> was;
    bit<32> agreed;
    bit<32> next;
    /* What slot_missing begins with, what a further contribution adds to it, and what it says then. */
    bit<16> first;
    bit<16> step;
    bit<16> left;
    bit<32> carry;
}

/* Kinds of packets of ours. */
const bit<8> KIND_CONTRIBUTION = 1;
const bit<8> KIND_RESULT = 2;
/* A contribution that is not for the switch. */
const bit<8> KIND_UNFIT = 3;

parser PaatpIngressParser(
    packet_in packet,
    out ingress_headers_t hdr,
    out ingress_metadata_t meta,
    out ingress_intrinsic_metadata_t ig_intr_md
) {
    state start {
        packet.extract(ig_intr_md);
        packet.advance(PORT_METADATA_SIZE);
        hdr.bridge.setValid();
        hdr.bridge.mode = 0;
        meta.kind = 0;
        meta.is_known = 0;
        meta.count = PAATP_COUNTS;
        meta.found.place = NO_PLACE;
        meta.found.seen = 1;
        meta.found.next = 0;
        meta.was = 0;
        meta.step = 0xffff;
        meta.carry = 0;
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.ether_type) {
            ETHER_IPV4: ipv4;
            default: accept;
        }
    }

    /* Contributions and results of 32 lanes have one length, so nothing else is looked at. */
    state ipv4 {
        packet.extract(hdr.ipv4);
        transition select(hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.total_length) {
            (4, 5, IPV4_BYTES + DATA_BYTES): whole;
            default: accept;
        }
    }

    state whole {
        transition select(hdr.ipv4.flags[0:0], hdr.ipv4.fragment, hdr.ipv4.protocol) {
            (0, 0, PROTOCOL_UDP): udp;
            default: accept;
        }
    }

    state udp {
        packet.extract(hdr.udp);
        transition select(hdr.udp.length) {
            DATA_BYTES: kind;
            default: accept;
        }
    }

    state kind {
        transition select(packet.lookahead<bit<32>>()) {
            PAATP_MAGIC ++ PAATP_VERSION ++ PAATP_KIND_DATA ++ PAATP_FLAG_PAYLOAD: data;
            PAATP_MAGIC ++ PAATP_VERSION ++ PAATP_KIND_ANSWER ++ PAATP_FLAG_RESULT
                &&& 0xffffff00 | (bit<32>)PAATP_FLAG_RESULT: answer;
            default: accept;
        }
    }

    /* A first sending of 32 lanes that add up, of one rank alone, which asks for no window; else it is passed on. */
    state data {
        packet.extract(hdr.paatp);
        meta.id = hdr.paatp.seq;
        transition select(hdr.paatp.word12) {
            PAATP_LANES_PER_BLOCK ++ 8w0 ++ 8w1: operation;
            default: unfit;
        }
    }

    state operation {
        transition select(hdr.paatp.word13[15:0], hdr.paatp.word14[15:0]) {
            (0, 8w0 ++ ((bit<8>)PAATP_OPERATION_SUM << 4) &&& 0xff60): contribution;
            default: unfit;
        }
    }

    state unfit {
        meta.kind = KIND_UNFIT;
        transition accept;
    }

    state contribution {
        packet.extract(hdr.payload);
        hdr.changes.setValid();
        meta.kind = KIND_CONTRIBUTION;
        transition accept;
    }

    state answer {
        packet.extract(hdr.paatp);
        meta.id = hdr.paatp.want;
        transition select(hdr.paatp.status) {
            PAATP_STATUS_REJOIN: accept;
            default: result;
        }
    }

    state result {
        meta.kind = KIND_RESULT;
        transition accept;
    }
}

struct holder_t {
    bit<32> id;
    /* When it was claimed, in units of 2^16 ns; 0: its chunk is over. */
    bit<32> since;
}

struct agreed_t {
    bit<32> agreed;
    bit<32> next;
}

/* Alone in their packet header registers: what one table writes beside them would make the others wait a stage. */
@pa_solitary("ingress", "meta.slot")
@pa_solitary("ingress", "meta.now")
@pa_solitary("ingress", "meta.is_known")
@pa_solitary("ingress", "meta.local")
@pa_solitary("ingress", "meta.first")
@pa_solitary("ingress", "meta.step")
@pa_solitary("ingress", "meta.count")
@pa_solitary("ingress", "meta.group")
@pa_solitary("ingress", "meta.agreed")
@pa_solitary("ingress", "meta.next")
@pa_solitary("ingress", "meta.found.place")
@pa_solitary("ingress", "meta.found.seen")
@pa_solitary("ingress", "meta.was")
@pa_solitary("ingress", "meta.left")
control PaatpIngress(
    inout ingress_headers_t hdr,
    inout ingress_metadata_t meta,
    in ingress_intrinsic_metadata_t ig_intr_md,
    in ingress_intrinsic_metadata_from_parser_t ig_prsr_md,
    inout ingress_intrinsic_metadata_for_deparser_t ig_dprsr_md,
    inout ingress_intrinsic_metadata_for_tm_t ig_tm_md
) {
    Hash<slot_t>(HashAlgorithm_t.CRC32) place_of;
    Counter<bit<64>, bit<8>>(PAATP_COUNTS, CounterType_t.PACKETS) counts;
    PaatpPayload() payload;

    /* Whose a slot is. */
    Register<holder_t, slot_t>(PAATP_SLOTS) slot_holder;
    RegisterParam<bit<32>>(PATIENCE) patience;
    RegisterAction<holder_t, slot_t, bit<8>>(slot_holder) find_or_claim = {
        void apply(inout holder_t holder, out bit<8> place) {
            bit<32> allowed = patience.read();
            bool is_foreign = holder.id != meta.id;
            bool is_free = meta.now - holder.since > allowed;
            place = this.predicate(is_foreign, is_free);
            if (is_foreign && is_free) {
                holder.id = meta.id;
                holder.since = meta.now;
            }
        }
    };
    /* The chunk's name stays, so that late duplicates of its contributions are known for what they are. */
    RegisterAction<holder_t, slot_t, bit<8>>(slot_holder) end = {
        void apply(inout holder_t holder, out bit<8> was) {
            bool is_own = holder.id == meta.id;
            bool lasts = holder.since != 0;
            was = this.predicate(is_own, lasts);
            if (is_own && lasts) {
                holder.since = 0;
            }
        }
    };

    /* By slot and rank: to which chunk the rank contributed there last. */
    Register<bit<16>, bit<PAATP_SEEN_BITS>>(PAATP_SLOTS << PAATP_LOCAL_BITS) slot_seen;
    RegisterAction<bit<16>, bit<PAATP_SEEN_BITS>, bit<1>>(slot_seen) see = {
        void apply(inout bit<16> last, out bit<1> seen) {
            if (last == meta.id[15:0]) {
                seen = 1;
            } else {
                seen = 0;
            }
            last = meta.id[15:0];
        }
    };

    /* What ranks agree on, and the largest exponent that they propose. */
    Register<agreed_t, slot_t>(PAATP_SLOTS) slot_agreed;
    RegisterAction<agreed_t, slot_t, bit<32>>(slot_agreed) propose = {
        void apply(inout agreed_t slot) {
            slot.agreed = meta.agreed;
            slot.next = meta.next;
        }
    };
    RegisterAction<agreed_t, slot_t, bit<32>>(slot_agreed) agree = {
        void apply(inout agreed_t slot, out bit<32> next) {
            if (slot.agreed == meta.agreed) {
                slot.next = max(slot.next, meta.next);
                next = slot.next;
            } else {
                next = 0;
            }
        }
    };

    /* The lowest acknowledgement and progress, relative to the chunk: small numbers, compared with their sign. */
    Register<int<32>, slot_t>(PAATP_SLOTS) slot_ack;
    RegisterAction<int<32>, slot_t, int<32>>(slot_ack) set_ack = {
        void apply(inout int<32> ack) {
            ack = (int<32>)hdr.changes.ack;
        }
    };
    RegisterAction<int<32>, slot_t, int<32>>(slot_ack) lower_ack = {
        void apply(inout int<32> ack, out int<32> lowest) {
            ack = min(ack, (int<32>)hdr.changes.ack);
            lowest = ack;
        }
    };
    Register<int<32>, slot_t>(PAATP_SLOTS) slot_progress;
    RegisterAction<int<32>, slot_t, int<32>>(slot_progress) set_progress = {
        void apply(inout int<32> progress) {
            progress = (int<32>)hdr.changes.progress;
        }
    };
    RegisterAction<int<32>, slot_t, int<32>>(slot_progress) lower_progress = {
        void apply(inout int<32> progress, out int<32> lowest) {
            progress = min(progress, (int<32>)hdr.changes.progress);
            lowest = progress;
        }
    };

    /* How many ranks are missing, and how many contributions had a mark. */
    Register<bit<16>, slot_t>(PAATP_SLOTS) slot_missing;
    RegisterAction<bit<16>, slot_t, bit<16>>(slot_missing) set_missing = {
        void apply(inout bit<16> missing) {
            missing = meta.first;
        }
    };
    RegisterAction<bit<16>, slot_t, bit<16>>(slot_missing) count_down = {
        void apply(inout bit<16> missing, out bit<16> left) {
            missing = missing + meta.step;
            left = missing;
        }
    };

    /* The sum of the tags. */
#define PAATP_HALF(half, value) \
    Register<bit<32>, slot_t>(PAATP_SLOTS) slot_tag_##half; \
    RegisterAction<bit<32>, slot_t, bit<32>>(slot_tag_##half) set_tag_##half = { \
        void apply(inout bit<32> sum) { \
            sum = value; \
        } \
    }; \
    RegisterAction<bit<32>, slot_t, bit<32>>(slot_tag_##half) add_tag_##half = { \
        void apply(inout bit<32> sum, out bit<32> result) { \
            sum = sum + value; \
            result = sum; \
        } \
    };
    PAATP_HALF(low, hdr.paatp.tag_low)
    PAATP_HALF(high, hdr.changes.tag_high)

    action forward(PortId_t port) {
        ig_tm_md.ucast_egress_port = port;
    }

    action flood(MulticastGroupId_t group) {
        ig_tm_md.mcast_grp_a = group;
    }

    action drop() {
        ig_dprsr_md.drop_ctl = 1;
    }

    /* Where everybody is, by address of Ethernet. */
    table stations {
        key = { hdr.ethernet.destination: exact; }
        actions = { forward; flood; drop; }
        const default_action = drop();
        size = 1024;
    }

    /* `seed` names job and generation: chunk xor seed is the chunk's name among all. `missing` is one less than the number
       of local ranks. */
    action contribute(bit<32> seed, bit<PAATP_LOCAL_BITS> local, bit<16> missing) {
        meta.id = meta.id ^ seed;
        meta.is_known = 1;
        meta.local = local;
        meta.first = missing;
    }

    action pass_unfit() {
        meta.count = PAATP_COUNT_PASSED_UNFIT;
    }

    /* The only address that may speak for a rank, the only bit that it may set, and where to. */
    table ranks {
        key = {
            hdr.paatp.job: exact;
            hdr.paatp.generation: exact;
            hdr.paatp.worker: exact;
            hdr.paatp.status: exact;
            hdr.paatp.bitmap_high: exact;
            hdr.paatp.bitmap_low: exact;
            hdr.ipv4.source: exact;
            hdr.ipv4.destination: exact;
            ig_intr_md.ingress_port: exact;
        }
        actions = { contribute; pass_unfit; }
        const default_action = pass_unfit();
        size = PAATP_MAX_JOBS << PAATP_LOCAL_BITS;
    }

    action take_result(bit<32> seed, bit<16> group) {
        meta.id = meta.id ^ seed;
        meta.is_known = 1;
        meta.group = group;
    }

    /* Results of the aggregator, to a rank of the switch. */
    table results {
        key = {
            hdr.paatp.job: exact;
            hdr.paatp.generation: exact;
            hdr.paatp.worker: exact;
            hdr.ipv4.source: exact;
            ig_intr_md.ingress_port: exact;
        }
        actions = { take_result; NoAction; }
        const default_action = NoAction();
        size = PAATP_MAX_JOBS << PAATP_LOCAL_BITS;
    }

    /* The first of three steps: each number as the slot has it. (The word with the next exponent: see found_t.) */
    action prepare() {
        hdr.changes.want = hdr.paatp.seq - hdr.paatp.want;
        hdr.changes.ack = hdr.paatp.ack - hdr.paatp.seq;
        hdr.changes.progress = hdr.paatp.progress - hdr.paatp.seq;
        hdr.changes.tag_high = hdr.paatp.tag_high;
        meta.next = hdr.paatp.word13 ^ NEXT_EXPONENT_BIAS;
        meta.agreed = hdr.paatp.word14[31:24] ++ hdr.paatp.word13[31:24] ++ hdr.paatp.word14[15:0];
    }

    action mark() {
        meta.first = meta.first + MARK;
        meta.step = MARK - 1;
    }

    /* The second step: what the header is to have. */
    action restore() {
        hdr.changes.ack = hdr.changes.ack + hdr.paatp.seq;
        hdr.changes.progress = hdr.changes.progress + hdr.paatp.seq;
        hdr.changes.next_exponent = meta.found.next ^ NEXT_EXPONENT_BIAS;
    }

    /* The lower half's sum is below what was added to it where it went round. */
    action find_carry() {
        meta.carry = hdr.paatp.tag_low |-| hdr.changes.tag_low;
    }

    action carry() {
        hdr.changes.tag_high = hdr.changes.tag_high + 1;
    }

    /* Back to the sender: the contribution is in a partial sum. */
    action answer(bit<8> count) {
        ig_tm_md.ucast_egress_port = ig_intr_md.ingress_port;
        hdr.bridge.mode = MODE_ANSWER;
        hdr.changes.setInvalid();
        hdr.payload.setInvalid();
        meta.count = count;
    }

    /* The partial sum: the request of whoever came last, for all. The third step: what is new, and by how much it differs. */
    action send_up() {
        bit<32> ack = hdr.changes.ack;
        hdr.changes.ack = ack - hdr.paatp.ack;
        hdr.paatp.ack = ack;
        bit<32> progress = hdr.changes.progress;
        hdr.changes.progress = progress - hdr.paatp.progress;
        hdr.paatp.progress = progress;
        bit<32> tag_high = hdr.changes.tag_high;
        hdr.changes.tag_high = tag_high - hdr.paatp.tag_high;
        hdr.paatp.tag_high = tag_high;
        bit<32> tag_low = hdr.changes.tag_low;
        hdr.changes.tag_low = tag_low - hdr.paatp.tag_low;
        hdr.paatp.tag_low = tag_low;
        hdr.paatp.want = hdr.paatp.seq;
        bit<32> word13 = hdr.changes.next_exponent;
        hdr.changes.next_exponent = word13 - hdr.paatp.word13;
        hdr.paatp.word13 = word13;
        hdr.bridge.mode = MODE_SUM;
        meta.count = PAATP_COUNT_COMPLETED;
    }

    action congest() {
        hdr.ipv4.ecn = CONGESTED;
    }

    /* The result that ends a slot goes to all ranks. */
    action hand_down() {
        ig_tm_md.mcast_grp_a = meta.group;
        hdr.bridge.mode = MODE_RESULT;
        meta.count = PAATP_COUNT_RESULTS;
    }

    action pass(bit<8> count) {
        meta.count = count;
    }

    /* What becomes of a contribution. (The masks are those of a whole part. Left to itself, the compiler masks the whole field
       that the part is of.) */
    table verdicts {
        key = {
            meta.found.place: ternary;
            meta.found.next[0:0]: ternary;
            meta.found.seen: ternary;
            meta.left[7:0]: ternary;
        }
        actions = { answer; pass; send_up; }
        const entries = {
            (CLAIMED, _, _, _): answer(PAATP_COUNT_STORED);
            (CROWDED, _, _, _): pass(PAATP_COUNT_PASSED_CROWDED);
            (_, 1w0 &&& 1, _, _): pass(PAATP_COUNT_PASSED_MISMATCH);
            (_, _, 1, _): answer(PAATP_COUNT_DUPLICATES);
            (_, _, _, 8w0 &&& 0xff): send_up();
            (_, _, _, _): answer(PAATP_COUNT_ADDED);
        }
        size = 6;
    }

    action skip_egress() {
        ig_tm_md.bypass_egress = 1;
        hdr.bridge.setInvalid();
        hdr.changes.setInvalid();
    }

    apply {
        meta.slot = place_of.get({ hdr.paatp.job, meta.id });
        meta.now = ig_intr_md.ingress_mac_tstamp[47:16];
        if (meta.kind == KIND_CONTRIBUTION) {
            ranks.apply();
        } else if (meta.kind == KIND_RESULT) {
            results.apply();
        } else if (meta.kind == KIND_UNFIT) {
            pass_unfit();
        }

        if (meta.is_known == 1) {
            if (meta.kind == KIND_CONTRIBUTION) {
                meta.found.place = find_or_claim.execute(meta.slot);
            } else {
                meta.was = end.execute(meta.slot);
            }
        }
        prepare();
        if (hdr.ipv4.ecn == CONGESTED) {
            mark();
        }

        if (meta.found.place == CLAIMED) {
            see.execute(meta.slot ++ meta.local);
            propose.execute(meta.slot);
            set_ack.execute(meta.slot);
            set_progress.execute(meta.slot);
        } else if (IS_HELD(meta.found.place)) {
            meta.found.seen = see.execute(meta.slot ++ meta.local);
            meta.found.next = agree.execute(meta.slot);
            hdr.changes.ack = (bit<32>)lower_ack.execute(meta.slot);
            hdr.changes.progress = (bit<32>)lower_progress.execute(meta.slot);
        }
        restore();

        if (meta.found.place == CLAIMED) {
            set_missing.execute(meta.slot);
            set_tag_low.execute(meta.slot);
        } else if (IS_NEW(meta.found)) {
            meta.left = count_down.execute(meta.slot);
            hdr.changes.tag_low = add_tag_low.execute(meta.slot);
        }
        payload.apply(hdr.payload, meta.slot, meta.found);

        if (IS_NEW(meta.found)) {
            find_carry();
        }
        if (meta.carry != 0) {
            carry();
        }
        if (meta.found.place == CLAIMED) {
            set_tag_high.execute(meta.slot);
        } else if (IS_NEW(meta.found)) {
            hdr.changes.tag_high = add_tag_high.execute(meta.slot);
        }

        if (meta.found.place != NO_PLACE) {
            verdicts.apply();
        } else if (meta.was == WAS_UNDER_WAY) {
            hand_down();
        }
        if (hdr.bridge.mode == MODE_SUM && meta.left[15:8] != 0) {
            congest();
        }

        if (hdr.bridge.mode == 0 || hdr.bridge.mode == MODE_SUM) {
            stations.apply();
        }
        if (hdr.bridge.mode == 0) {
            skip_egress();
        }
        if (meta.count != PAATP_COUNTS) {
            counts.count(meta.count);
        }
    }
}

control PaatpIngressDeparser(
    packet_out packet,
    inout ingress_headers_t hdr,
    in ingress_metadata_t meta,
    in ingress_intrinsic_metadata_for_deparser_t ig_dprsr_md
) {
    apply {
        packet.emit(hdr);
    }
}

/* ------------------------------------------------------------------------------------------------------- egress */

struct egress_headers_t {
    bridge_h bridge;
    paatp_changes_h changes;
    ethernet_h ethernet;
    ipv4_h ipv4;
    udp_h udp;
    paatp_h paatp;
}

struct egress_metadata_t {
    bit<8> rank;
    mac_t mac;
    ipv4_t address;
    bit<12> rank_index;
    bit<16> port;
    bit<1> is_known;
}

/* What the check gains by the flags that the switch sets. */
const bit<32> ECHO_CHECK = PAATP_WEIGHT_0 * (bit<32>)PAATP_FLAG_ECN_ECHO;
const bit<32> PARTIAL_CHECK = PAATP_WEIGHT_0 * (bit<32>)PAATP_FLAG_PARTIAL;

parser PaatpEgressParser(
    packet_in packet,
    out egress_headers_t hdr,
    out egress_metadata_t meta,
    out egress_intrinsic_metadata_t eg_intr_md
) {
    state start {
        packet.extract(eg_intr_md);
        packet.extract(hdr.bridge);
        meta.is_known = 0;
        transition select(hdr.bridge.mode) {
            MODE_SUM: changes;
            default: frame;
        }
    }

    state changes {
        packet.extract(hdr.changes);
        transition frame;
    }

    state frame {
        packet.extract(hdr.ethernet);
        packet.extract(hdr.ipv4);
        packet.extract(hdr.udp);
        packet.extract(hdr.paatp);
        transition accept;
    }
}

control PaatpEgress(
    inout egress_headers_t hdr,
    inout egress_metadata_t meta,
    in egress_intrinsic_metadata_t eg_intr_md,
    in egress_intrinsic_metadata_from_parser_t eg_prsr_md,
    inout egress_intrinsic_metadata_for_deparser_t eg_dprsr_md,
    inout egress_intrinsic_metadata_for_output_port_t eg_oport_md
) {
    PaatpCheck() check;

    /* Answers tell a rank's UDP port: by job and rank. */
    Register<bit<16>, bit<12>>(PAATP_MAX_JOBS * PAATP_MAX_RANKS) rank_ports;
    RegisterAction<bit<16>, bit<12>, bit<16>>(rank_ports) learn_port = {
        void apply(inout bit<16> port) {
            port = hdr.udp.destination;
        }
    };
    RegisterAction<bit<16>, bit<12>, bit<16>>(rank_ports) read_port = {
        void apply(inout bit<16> port, out bit<16> known) {
            known = port;
        }
    };

    /* The answer says what the request's fields do not say already: nothing of the wish or the policy. Acknowledgement and
       progress stay the sender's own, which are lower bounds of p_min and p_max; the bitmap stays the sender's bit; what an
       answer without a result does not define stays, too. `gain` is what the check gains by kind, flags, window. */
    action answer(bit<16> granted, bit<32> gain, bit<12> rank_index) {
        mac_t mac = hdr.ethernet.source;
        hdr.ethernet.source = hdr.ethernet.destination;
        hdr.ethernet.destination = mac;
        ipv4_t address = hdr.ipv4.source;
        hdr.ipv4.source = hdr.ipv4.destination;
        hdr.ipv4.destination = address;
        hdr.ipv4.hops = TIME_TO_LIVE;
        hdr.ipv4.total_length = IPV4_BYTES + ANSWER_BYTES;
        bit<16> port = hdr.udp.source;
        hdr.udp.source = hdr.udp.destination;
        hdr.udp.destination = port;
        hdr.udp.length = ANSWER_BYTES;
        hdr.udp.checksum = 0;
        hdr.paatp.kind = PAATP_KIND_ANSWER;
        hdr.paatp.flags = PAATP_FLAG_PARTIAL;
        hdr.paatp.window = granted;
        hdr.paatp.check = hdr.paatp.check + gain;
        meta.rank_index = rank_index;
        meta.is_known = 1;
    }

    action echo_mark() {
        hdr.paatp.flags = PAATP_FLAG_PARTIAL | PAATP_FLAG_ECN_ECHO;
        hdr.paatp.check = hdr.paatp.check + ECHO_CHECK;
        hdr.ipv4.ecn = ECN_CAPABLE;
    }

    /* `gain` is what the check gains by the parameters and the flags. */
    action send_up(bit<8> status, bit<64> bitmap, bit<8> contributors, bit<32> gain) {
        hdr.udp.checksum = 0;
        hdr.paatp.flags = PAATP_FLAG_PAYLOAD | PAATP_FLAG_PARTIAL;
        hdr.paatp.status = status;
        hdr.paatp.bitmap = bitmap;
        hdr.paatp.contributors = contributors;
        hdr.paatp.check = hdr.paatp.check + gain;
    }

    action drop() {
        eg_dprsr_md.drop_ctl = 1;
    }

    /* By the request's rank. What the ingress took and this does not know goes nowhere: it is sent again, past the switch. */
    table ranks {
        key = {
            hdr.bridge.mode: exact;
            hdr.paatp.job: exact;
            hdr.paatp.worker: exact;
            hdr.paatp.generation: exact;
        }
        actions = { answer; send_up; drop; }
        const default_action = drop();
        size = PAATP_MAX_JOBS << (PAATP_LOCAL_BITS + 1);
    }

    /* `gain` is what the check has of the rank's number. */
    action set_copy(bit<8> rank, mac_t mac, ipv4_t address, bit<12> rank_index, bit<32> gain) {
        meta.rank = rank;
        meta.mac = mac;
        meta.address = address;
        meta.rank_index = rank_index;
        meta.is_known = 1;
        hdr.paatp.check = hdr.paatp.check + gain;
    }

    /* To whom the copies of a job's results go, by their number in the group. */
    table copies {
        key = {
            hdr.paatp.job: exact;
            eg_intr_md.egress_rid: exact;
        }
        actions = { set_copy; NoAction; }
        const default_action = NoAction();
        size = PAATP_MAX_JOBS << PAATP_LOCAL_BITS;
    }

    action lose(bit<32> gain) {
        hdr.paatp.check = hdr.paatp.check + gain;
    }

    /* The rank that the result is addressed to leaves the check. */
    table addressees {
        key = { hdr.paatp.worker: exact; }
        actions = { lose; NoAction; }
        const default_action = NoAction();
        const entries = {
            PAATP_RANKS_OUT_OF_CHECK(lose)
        }
        size = PAATP_MAX_RANKS;
    }

    /* A copy is one by its flag; what is said of its rank's request then means nothing. */
    action copy() {
        hdr.ethernet.destination = meta.mac;
        hdr.ipv4.destination = meta.address;
        hdr.udp.destination = meta.port;
        hdr.udp.checksum = 0;
        hdr.paatp.worker = meta.rank;
    }

    action set_partial() {
        hdr.paatp.flags = hdr.paatp.flags | PAATP_FLAG_PARTIAL;
        hdr.paatp.check = hdr.paatp.check + PARTIAL_CHECK;
    }

    apply {
        if (hdr.bridge.mode == MODE_RESULT) {
            copies.apply();
            if (meta.is_known == 1) {
                addressees.apply();
                if (meta.rank != hdr.paatp.worker) {
                    meta.port = read_port.execute(meta.rank_index);
                    if (meta.port == 0) {
                        drop();
                    }
                    copy();
                    if (hdr.paatp.flags[1:1] == 0) {
                        set_partial();
                    }
                } else {
                    learn_port.execute(meta.rank_index);
                }
            }
        } else {
            ranks.apply();
            if (meta.is_known == 1) {
                learn_port.execute(meta.rank_index);
                if (hdr.ipv4.ecn == CONGESTED) {
                    echo_mark();
                }
            } else {
                check.apply(hdr.paatp.check, hdr.changes);
            }
        }
    }
}

control PaatpEgressDeparser(
    packet_out packet,
    inout egress_headers_t hdr,
    in egress_metadata_t meta,
    in egress_intrinsic_metadata_for_deparser_t eg_dprsr_md
) {
    Checksum() checksum;

    apply {
        hdr.ipv4.checksum = checksum.update({
            hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.diffserv, hdr.ipv4.ecn, hdr.ipv4.total_length,
            hdr.ipv4.identification, hdr.ipv4.flags, hdr.ipv4.fragment, hdr.ipv4.hops, hdr.ipv4.protocol,
            hdr.ipv4.source, hdr.ipv4.destination
        });
        packet.emit(hdr.ethernet);
        packet.emit(hdr.ipv4);
        packet.emit(hdr.udp);
        packet.emit(hdr.paatp);
    }
}

Pipeline(
    PaatpIngressParser(),
    PaatpIngress(),
    PaatpIngressDeparser(),
    PaatpEgressParser(),
    PaatpEgress(),
    PaatpEgressDeparser()
) pipe;

Switch(pipe) main;
