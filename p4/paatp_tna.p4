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
 *   stage 3-11   tag and number of contributors, lanes
 *
 * Ingress decides and adds, egress writes headers. What is only passed on skips the egress.
 *
 * -DPAATP_SLOTS=n: slots, a power of two, with -DPAATP_SLOT_BITS=log2(n).
 */

#include <core.p4>
#include <tna.p4>

#ifndef PAATP_SLOTS
#define PAATP_SLOTS 4096
#define PAATP_SLOT_BITS 12
#endif

/* Local ranks have 5 bits, the marks and numbers that ride on tags as well: 31 of them. */
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

/* From ingress to egress, on all packets that do not skip it. All but the mode is of MODE_SUM. */
header bridge_h {
    bit<8> mode;
    /* At its place in the header's word, with the bias of found_t. */
    bit<32> next_exponent;
    bit<32> ack;
    bit<32> progress;
    bit<32> tag_high;
    bit<32> tag_low;
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

/* The upper limb of a tag's sum has the ranks that are missing above it, and the contributions with a mark above those:
   all are sums, so one register does. */
#define MISSING_SHIFT 21
#define MARKS_SHIFT 26

/* What a slot has for a contribution. */
enum place_t {
    CROWDED,
    CLAIMED,
    HELD
}

/* What was found of a contribution, each a stage before it is asked for. */
struct found_t {
    place_t place;
    /* The rank is in the slot. */
    bit<1> seen;
    /* The largest exponent that the slot's ranks propose, with a bias: never 0, and in the order of signed numbers. 0: this
       rank does not agree with the slot. */
    bit<32> next;
}

/* To be added to what a slot holds. (Else it is a duplicate, or not the slot's.) */
#define IS_NEW(found) ((found).place == place_t.HELD && (found).seen == 0 && (found).next != 0)

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
        if (found.place == place_t.CLAIMED) {
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
    ethernet_h ethernet;
    ipv4_h ipv4;
    udp_h udp;
    paatp_h paatp;
    paatp_payload_h payload;
}

struct ingress_metadata_t {
    bit<8> kind;
    /* The contribution's seq, or the result's want. */
    bit<32> chunk;
    slot_t slot;
    /* The chunk among those of all jobs and generations. */
    bit<32> id;
    bit<32> now;
    bit<PAATP_LOCAL_BITS> local;
    bit<PAATP_SEEN_BITS> seen_index;
    bit<16> group;
    found_t found;
    bit<1> is_over;
    /* Relative to the chunk: small numbers, which are compared with their sign. */
    int<32> ack;
    int<32> progress;
    bit<32> agreed;
    bit<32> next;
    /* Limbs of the tag, of 24, 24 and 16 bits, whose sums cannot overflow; see MISSING_SHIFT. */
    bit<32> low;
    bit<32> middle;
    bit<32> high;
    bit<32> first_high;
    bit<32> carry;
    bit<8> count;
}

/* Kinds of packets that the switch does not just pass on. */
const bit<8> KIND_CONTRIBUTION = 1;
const bit<8> KIND_RESULT = 2;

parser PaatpIngressParser(
    packet_in packet,
    out ingress_headers_t hdr,
    out ingress_metadata_t meta,
    out ingress_intrinsic_metadata_t ig_intr_md
) {
    state start {
        packet.extract(ig_intr_md);
        packet.advance(PORT_METADATA_SIZE);
        meta.kind = 0;
        meta.count = PAATP_COUNTS;
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

    state data {
        packet.extract(hdr.paatp);
        packet.extract(hdr.payload);
        meta.kind = KIND_CONTRIBUTION;
        meta.chunk = hdr.paatp.seq;
        transition accept;
    }

    state answer {
        packet.extract(hdr.paatp);
        meta.kind = KIND_RESULT;
        meta.chunk = hdr.paatp.want;
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
    RegisterAction<holder_t, slot_t, place_t>(slot_holder) find_or_claim = {
        void apply(inout holder_t holder, out place_t place) {
            if (holder.id == meta.id) {
                place = place_t.HELD;
            } else if (meta.now - holder.since > patience.read()) {
                holder.id = meta.id;
                holder.since = meta.now;
                place = place_t.CLAIMED;
            } else {
                place = place_t.CROWDED;
            }
        }
    };
    /* The chunk's name stays, so that late duplicates of its contributions are known for what they are. */
    RegisterAction<holder_t, slot_t, bit<1>>(slot_holder) end = {
        void apply(inout holder_t holder, out bit<1> is_over) {
            if (holder.id == meta.id && holder.since != 0) {
                holder.since = 0;
                is_over = 1;
            } else {
                is_over = 0;
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

    /* The lowest acknowledgement and progress, relative to the chunk. */
    Register<int<32>, slot_t>(PAATP_SLOTS) slot_ack;
    RegisterAction<int<32>, slot_t, int<32>>(slot_ack) set_ack = {
        void apply(inout int<32> ack) {
            ack = meta.ack;
        }
    };
    RegisterAction<int<32>, slot_t, int<32>>(slot_ack) lower_ack = {
        void apply(inout int<32> ack, out int<32> lowest) {
            ack = min(ack, meta.ack);
            lowest = ack;
        }
    };
    Register<int<32>, slot_t>(PAATP_SLOTS) slot_progress;
    RegisterAction<int<32>, slot_t, int<32>>(slot_progress) set_progress = {
        void apply(inout int<32> progress) {
            progress = meta.progress;
        }
    };
    RegisterAction<int<32>, slot_t, int<32>>(slot_progress) lower_progress = {
        void apply(inout int<32> progress, out int<32> lowest) {
            progress = min(progress, meta.progress);
            lowest = progress;
        }
    };

    /* The sum of the tags. */
#define PAATP_LIMB(name, limb, first) \
    Register<bit<32>, slot_t>(PAATP_SLOTS) slot_##name; \
    RegisterAction<bit<32>, slot_t, bit<32>>(slot_##name) set_##name = { \
        void apply(inout bit<32> sum) { \
            sum = first; \
        } \
    }; \
    RegisterAction<bit<32>, slot_t, bit<32>>(slot_##name) add_##name = { \
        void apply(inout bit<32> sum, out bit<32> result) { \
            sum = sum + limb; \
            result = sum; \
        } \
    };
    PAATP_LIMB(tag_low, meta.low, meta.low)
    PAATP_LIMB(tag_middle, meta.middle, meta.middle)
    PAATP_LIMB(tag_high, meta.high, meta.first_high)

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
       of local ranks, at its place above the tag. */
    action contribute(bit<32> seed, bit<PAATP_LOCAL_BITS> local, bit<32> missing) {
        meta.id = meta.chunk ^ seed;
        meta.local = local;
        meta.first_high = missing;
    }

    action pass_unfit() {
        meta.kind = 0;
        meta.count = PAATP_COUNT_PASSED_UNFIT;
    }

    /* The only address that may speak for a rank, the only bit that it may set, and where to. */
    table ranks {
        key = {
            hdr.paatp.job: exact;
            hdr.paatp.generation: exact;
            hdr.paatp.worker: exact;
            hdr.paatp.status: exact;
            hdr.paatp.bitmap: exact;
            hdr.ipv4.source: exact;
            hdr.ipv4.destination: exact;
            ig_intr_md.ingress_port: exact;
        }
        actions = { contribute; pass_unfit; }
        const default_action = pass_unfit();
        size = PAATP_MAX_JOBS << PAATP_LOCAL_BITS;
    }

    action take_result(bit<32> seed, bit<16> group) {
        meta.id = meta.chunk ^ seed;
        meta.group = group;
    }

    action pass_result() {
        meta.kind = 0;
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
        actions = { take_result; pass_result; }
        const default_action = pass_result();
        size = PAATP_MAX_JOBS << PAATP_LOCAL_BITS;
    }

    action prepare() {
        meta.slot = place_of.get({ hdr.paatp.job, meta.chunk });
        meta.now = ig_intr_md.ingress_mac_tstamp[47:16];
        meta.ack = (int<32>)(hdr.paatp.ack - meta.chunk);
        meta.progress = (int<32>)(hdr.paatp.progress - meta.chunk);
        meta.agreed = 8w0 ++ hdr.paatp.operation_or_epoch ++ hdr.paatp.exponent ++ hdr.paatp.rank;
        meta.next = 24w1 ++ (hdr.paatp.next_exponent ^ 0x80);
        meta.low = 8w0 ++ hdr.paatp.tag[23:0];
        meta.middle = 8w0 ++ hdr.paatp.tag[47:24];
        meta.high = 16w0 ++ hdr.paatp.tag[63:48];
    }

    action add_mark() {
        meta.high = meta.high + (1 << MARKS_SHIFT);
    }

    action find_rank() {
        meta.seen_index = meta.slot ++ meta.local;
    }

    /* To the first contribution all others are missing; each further one is. */
    action count_missing() {
        meta.first_high = meta.first_high + meta.high;
        meta.high = meta.high - (1 << MISSING_SHIFT);
    }

    /* Back to the sender: the contribution is in a partial sum. */
    action answer(bit<8> count) {
        ig_tm_md.ucast_egress_port = ig_intr_md.ingress_port;
        hdr.bridge.setValid();
        hdr.bridge.mode = MODE_ANSWER;
        hdr.payload.setInvalid();
        meta.count = count;
    }

    /* The partial sum: the request of whoever came last, for all. */
    action send_up() {
        hdr.bridge.setValid();
        hdr.bridge.mode = MODE_SUM;
        hdr.bridge.next_exponent = meta.found.next << 16;
        hdr.bridge.ack = (bit<32>)meta.ack + meta.chunk;
        hdr.bridge.progress = (bit<32>)meta.progress + meta.chunk;
        meta.count = PAATP_COUNT_COMPLETED;
    }

    action congest() {
        hdr.ipv4.ecn = CONGESTED;
    }

    /* The limbs' sums are carried over from one to the next. */
    action carry_low() {
        meta.carry = meta.low >> 24;
    }
    action add_low() {
        meta.middle = meta.middle + meta.carry;
    }
    action carry_middle() {
        meta.carry = meta.middle >> 24;
    }
    action add_middle() {
        meta.high = meta.high + meta.carry;
    }
    action join_limbs() {
        hdr.bridge.tag_high = meta.high[15:0] ++ meta.middle[23:8];
        hdr.bridge.tag_low = meta.middle[7:0] ++ meta.low[23:0];
    }

    /* The result that ends a slot goes to all ranks. */
    action hand_down() {
        ig_tm_md.mcast_grp_a = meta.group;
        hdr.bridge.setValid();
        hdr.bridge.mode = MODE_RESULT;
        meta.count = PAATP_COUNT_RESULTS;
    }

    action pass(bit<8> count) {
        meta.count = count;
    }

    action skip_egress() {
        ig_tm_md.bypass_egress = 1;
    }

    apply {
        prepare();
        if (meta.kind == KIND_CONTRIBUTION) {
            if (hdr.paatp.attempt == 0 && hdr.paatp.operation_or_epoch[6:5] == PAATP_OPERATION_SUM[2:1]
                && hdr.paatp.lanes == PAATP_LANES_PER_BLOCK && hdr.paatp.mode == 0 && hdr.paatp.contributors == 1) {
                ranks.apply();
            } else {
                pass_unfit();
            }
        } else if (meta.kind == KIND_RESULT) {
            if (hdr.paatp.status == PAATP_STATUS_REJOIN) {
                pass_result();
            } else {
                results.apply();
            }
        }

        if (meta.kind == KIND_CONTRIBUTION) {
            meta.found.place = find_or_claim.execute(meta.slot);
        } else if (meta.kind == KIND_RESULT) {
            meta.is_over = end.execute(meta.slot);
        }
        find_rank();
        if (hdr.ipv4.ecn == CONGESTED) {
            add_mark();
        }
        count_missing();

        if (meta.kind == KIND_CONTRIBUTION) {
            if (meta.found.place == place_t.CLAIMED) {
                see.execute(meta.seen_index);
                propose.execute(meta.slot);
                set_ack.execute(meta.slot);
                set_progress.execute(meta.slot);
                set_tag_low.execute(meta.slot);
                set_tag_middle.execute(meta.slot);
                set_tag_high.execute(meta.slot);
            } else if (meta.found.place == place_t.HELD) {
                meta.found.seen = see.execute(meta.seen_index);
                meta.found.next = agree.execute(meta.slot);
                meta.ack = lower_ack.execute(meta.slot);
                meta.progress = lower_progress.execute(meta.slot);
                if (IS_NEW(meta.found)) {
                    meta.low = add_tag_low.execute(meta.slot);
                    meta.middle = add_tag_middle.execute(meta.slot);
                    meta.high = add_tag_high.execute(meta.slot);
                }
            }
            payload.apply(hdr.payload, meta.slot, meta.found);
        }

        if (meta.kind == KIND_CONTRIBUTION) {
            if (meta.found.place == place_t.CLAIMED) {
                answer(PAATP_COUNT_STORED);
            } else if (meta.found.place == place_t.CROWDED) {
                pass(PAATP_COUNT_PASSED_CROWDED);
            } else if (meta.found.next == 0) {
                pass(PAATP_COUNT_PASSED_MISMATCH);
            } else if (meta.found.seen == 1) {
                answer(PAATP_COUNT_DUPLICATES);
            } else if (meta.high[MARKS_SHIFT - 1:MISSING_SHIFT] != 0) {
                answer(PAATP_COUNT_ADDED);
            } else {
                send_up();
                if (meta.high[31:MARKS_SHIFT] != 0) {
                    congest();
                }
            }
        } else if (meta.kind == KIND_RESULT && meta.is_over == 1) {
            hand_down();
        }
        carry_low();
        add_low();
        carry_middle();
        add_middle();
        join_limbs();

        if (!hdr.bridge.isValid()) {
            skip_egress();
        }
        if (!hdr.bridge.isValid() || hdr.bridge.mode == MODE_SUM) {
            stations.apply();
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
    ethernet_h ethernet;
    ipv4_h ipv4;
    udp_h udp;
    paatp_words_h words;
}

struct egress_metadata_t {
    changes_t changes;
    bit<32> field;
    bit<32> echo;
    bit<8> rank;
    bit<32> word1;
    mac_t mac;
    ipv4_t address;
    bit<12> rank_index;
    bit<16> port;
    bit<1> is_copy;
}

/* First words: of a contribution, of the answer to it, of a partial sum. */
const bit<32> WORD_DATA = PAATP_MAGIC ++ PAATP_VERSION ++ PAATP_KIND_DATA ++ PAATP_FLAG_PAYLOAD;
const bit<32> WORD_ANSWER = PAATP_MAGIC ++ PAATP_VERSION ++ PAATP_KIND_ANSWER ++ PAATP_FLAG_PARTIAL;
const bit<32> WORD_SUM = PAATP_MAGIC ++ PAATP_VERSION ++ PAATP_KIND_DATA ++ (PAATP_FLAG_PAYLOAD | PAATP_FLAG_PARTIAL);
/* Lanes, mode and contributors of a contribution, as the ingress lets them in. */
const bit<32> WORD_LENGTH = PAATP_LANES_PER_BLOCK ++ 8w0 ++ 8w1;
/* What the check gains by the first word and that of the length, in an answer. */
const bit<32> ANSWER_CHECK = PAATP_WEIGHT_0 * (WORD_ANSWER - WORD_DATA) - PAATP_WEIGHT_12 * WORD_LENGTH;
const bit<32> ECHO_CHECK = PAATP_WEIGHT_0 * (bit<32>)PAATP_FLAG_ECN_ECHO;
const bit<32> PARTIAL_CHECK = PAATP_WEIGHT_0 * (bit<32>)PAATP_FLAG_PARTIAL;
/* Third byte from the right of the words with next exponent and gain. */
const bit<32> FIELD = 0x00ff0000;
const bit<32> NEXT_EXPONENT_BIAS = 0x01800000;

parser PaatpEgressParser(
    packet_in packet,
    out egress_headers_t hdr,
    out egress_metadata_t meta,
    out egress_intrinsic_metadata_t eg_intr_md
) {
    state start {
        packet.extract(eg_intr_md);
        packet.extract(hdr.bridge);
        packet.extract(hdr.ethernet);
        packet.extract(hdr.ipv4);
        packet.extract(hdr.udp);
        packet.extract(hdr.words);
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

    action echo_mark() {
        meta.echo = (bit<32>)PAATP_FLAG_ECN_ECHO;
        hdr.words.word15 = hdr.words.word15 + ECHO_CHECK;
        hdr.ipv4.ecn = ECN_CAPABLE;
    }

    action no_mark() {
        meta.echo = 0;
    }

    action read_gain() {
        meta.field = hdr.words.word14 & FIELD;
    }

    action read_next_exponent() {
        meta.field = hdr.words.word13 & FIELD;
        hdr.bridge.next_exponent = hdr.bridge.next_exponent ^ NEXT_EXPONENT_BIAS;
    }

    /* The answer says nothing of the wish or the policy. Acknowledgement and progress stay the sender's own, which are
       lower bounds of p_min and p_max; the bitmap stays the sender's bit. */
    action answer(bit<32> granted) {
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
        hdr.words.word0 = WORD_ANSWER | meta.echo;
        meta.changes.word1 = 0;
        meta.changes.word4 = 0 - hdr.words.word4;
        hdr.words.word4 = 0;
        meta.changes.word5 = 0;
        meta.changes.word6 = 0;
        meta.changes.word7 = 0;
        meta.changes.word10 = 0 - hdr.words.word10;
        hdr.words.word10 = 0;
        meta.changes.word11 = 0 - hdr.words.word11;
        hdr.words.word11 = 0;
        hdr.words.word12 = 0;
        meta.changes.word13 = granted - hdr.words.word13;
        hdr.words.word13 = granted;
        meta.changes.word14 = 0 - hdr.words.word14;
        hdr.words.word14 = 0;
        hdr.words.word15 = hdr.words.word15 + ANSWER_CHECK;
    }

    /* `gain` is what the check gains by the words that are parameters and the first one. */
    action send_up(bit<32> word1, bit<32> bits_high, bit<32> bits_low, bit<32> word12, bit<32> gain) {
        hdr.udp.checksum = 0;
        hdr.words.word0 = WORD_SUM;
        hdr.words.word1 = word1;
        meta.changes.word1 = 0;
        meta.changes.word4 = hdr.words.word3 - hdr.words.word4;
        hdr.words.word4 = hdr.words.word3;
        meta.changes.word5 = hdr.bridge.ack - hdr.words.word5;
        hdr.words.word5 = hdr.bridge.ack;
        meta.changes.word6 = hdr.bridge.progress - hdr.words.word6;
        hdr.words.word6 = hdr.bridge.progress;
        meta.changes.word7 = 0;
        hdr.words.word8 = bits_high;
        hdr.words.word9 = bits_low;
        meta.changes.word10 = hdr.bridge.tag_high - hdr.words.word10;
        hdr.words.word10 = hdr.bridge.tag_high;
        meta.changes.word11 = hdr.bridge.tag_low - hdr.words.word11;
        hdr.words.word11 = hdr.bridge.tag_low;
        hdr.words.word12 = word12;
        meta.changes.word13 = hdr.bridge.next_exponent - meta.field;
        meta.changes.word14 = 0;
        hdr.words.word15 = hdr.words.word15 + gain;
    }

    /* By the request's words of rank and generation. */
    table ranks {
        key = {
            hdr.bridge.mode: exact;
            hdr.words.word1: exact;
            hdr.words.word2: exact;
        }
        actions = { answer; send_up; NoAction; }
        const default_action = NoAction();
        size = PAATP_MAX_JOBS << (PAATP_LOCAL_BITS + 1);
    }

    action set_next_exponent() {
        hdr.words.word13 = hdr.words.word13 + meta.changes.word13;
    }

    action set_copy(bit<8> rank, bit<32> word1, mac_t mac, ipv4_t address, bit<12> rank_index) {
        meta.rank = rank;
        meta.word1 = word1;
        meta.mac = mac;
        meta.address = address;
        meta.rank_index = rank_index;
        meta.is_copy = 1;
    }

    action no_copy() {
        meta.is_copy = 0;
    }

    /* To whom the copies of a job's results go, by their number in the group. */
    table copies {
        key = {
            hdr.words.word1[31:16]: exact;
            eg_intr_md.egress_rid: exact;
        }
        actions = { set_copy; no_copy; }
        const default_action = no_copy();
        size = PAATP_MAX_JOBS << PAATP_LOCAL_BITS;
    }

    action find_rank() {
        meta.rank_index = hdr.words.word1[21:16] ++ hdr.words.word1[13:8];
    }

    /* Nobody's token, and a status that speaks of no contribution. */
    action copy() {
        hdr.ethernet.destination = meta.mac;
        hdr.ipv4.destination = meta.address;
        hdr.udp.destination = meta.port;
        hdr.udp.checksum = 0;
        meta.changes.word1 = meta.word1 - hdr.words.word1;
        hdr.words.word1 = meta.word1;
        meta.changes.word4 = 0;
        meta.changes.word5 = 0;
        meta.changes.word6 = 0;
        meta.changes.word7 = 0 - hdr.words.word7;
        hdr.words.word7 = 0;
        meta.changes.word10 = 0;
        meta.changes.word11 = 0;
        meta.changes.word13 = 0;
        meta.changes.word14 = 0 - meta.field;
        hdr.words.word14 = hdr.words.word14 & ~FIELD;
    }

    action set_partial() {
        hdr.words.word0 = hdr.words.word0 | (bit<32>)PAATP_FLAG_PARTIAL;
        hdr.words.word15 = hdr.words.word15 + PARTIAL_CHECK;
    }

    action drop() {
        eg_dprsr_md.drop_ctl = 1;
    }

    apply {
        if (hdr.bridge.mode == MODE_RESULT) {
            read_gain();
            copies.apply();
            if (meta.is_copy == 1 && meta.rank != hdr.words.word1[15:8]) {
                meta.port = read_port.execute(meta.rank_index);
                if (meta.port == 0) {
                    drop();
                }
                copy();
                if (hdr.words.word0[1:1] == 0) {
                    set_partial();
                }
                check.apply(hdr.words.word15, meta.changes);
            } else {
                find_rank();
                learn_port.execute(meta.rank_index);
            }
        } else {
            if (hdr.bridge.mode == MODE_ANSWER && hdr.ipv4.ecn == CONGESTED) {
                echo_mark();
            } else {
                no_mark();
            }
            read_next_exponent();
            ranks.apply();
            if (hdr.bridge.mode == MODE_ANSWER) {
                find_rank();
                learn_port.execute(meta.rank_index);
            } else {
                set_next_exponent();
            }
            check.apply(hdr.words.word15, meta.changes);
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
        packet.emit(hdr.words);
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
