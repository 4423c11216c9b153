/* A switch between the workers of an all-reduce and their aggregator (P4_16, v1model).
 *
 * It adds contributions that pass by and sends the aggregator one partial sum for all its ranks; the result that comes
 * back goes to all of them. What it cannot or need not take it passes on unchanged: the aggregator alone decides what a
 * result is. docs/switch.md has the decisions as a table, paatp-common/src/switch.rs the same program in Rust, and
 * tests/vectors holds the two together.
 *
 * -DPAATP_BLOCKS=n (1 to 8): blocks of 32 lanes in a slot.   -DPAATP_SLOTS=n: slots, a power of two.
 */

#include <core.p4>
#include <v1model.p4>

#ifndef PAATP_BLOCKS
#define PAATP_BLOCKS 8
#endif
#ifndef PAATP_SLOTS
#define PAATP_SLOTS 1024
#endif

#include "include/paatp_constants.p4"
#include "include/paatp_header.p4"

typedef bit<48> mac_t;
typedef bit<32> ipv4_t;
typedef bit<9> port_t;
typedef bit<32> index_t;

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

struct headers_t {
    ethernet_h ethernet;
    ipv4_h ipv4;
    udp_h udp;
    paatp_h paatp;
    paatp_block_h[PAATP_BLOCKS] block;
}

/* What the control plane says of a job; see SwitchJob in paatp-common/src/switch.rs. */
struct job_t {
    bit<64> local;
    bit<32> reach;
    bit<8> k;
    bit<16> granted;
    bit<48> patience;
    bit<32> mask;
    ipv4_t node;
    port_t node_port;
    bit<16> group;
}

struct metadata_t {
    job_t job;
    /* An answer of the aggregator or our own: it tells the UDP port of its rank. */
    bool tells_port;
    /* The IP header is to be summed anew. */
    bool changed;
}

#include "include/paatp_lanes.p4"

/* Answers to a rank tell its UDP port: by job and rank. Written and read in the egress. */
register<bit<16>>(PAATP_MAX_JOBS * PAATP_MAX_RANKS) rank_ports;

const bit<16> ETHER_IPV4 = 0x0800;
const bit<8> PROTOCOL_UDP = 17;
const bit<2> CONGESTED = 3;
const bit<2> ECN_CAPABLE = 2;
const bit<8> TIME_TO_LIVE = 64;
/* The number of a broadcast's copies: not sent back to where it came from. */
const bit<16> FLOOD_COPY = 0xFFFF;
const bit<16> ETHERNET_BYTES = 14;
const bit<16> IPV4_BYTES = 20;
const bit<16> UDP_BYTES = 8;

parser PaatpParser(
    packet_in packet,
    out headers_t hdr,
    inout metadata_t meta,
    inout standard_metadata_t standard_metadata
) {
    state start {
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.ether_type) {
            ETHER_IPV4: ipv4;
            default: accept;
        }
    }

    state ipv4 {
        packet.extract(hdr.ipv4);
        transition select(
            hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.protocol, hdr.ipv4.flags[0:0], hdr.ipv4.fragment
        ) {
            (4, 5, PROTOCOL_UDP, 0, 0): udp;
            default: accept;
        }
    }

    state udp {
        packet.extract(hdr.udp);
        transition select(packet.lookahead<bit<16>>()) {
            PAATP_MAGIC: paatp;
            default: accept;
        }
    }

    state paatp {
        packet.extract(hdr.paatp);
        /* Bytes of the datagram besides the lanes that it says it has. */
        bit<16> besides = hdr.udp.length - (hdr.paatp.lanes << 2);
        transition select(hdr.paatp.kind, hdr.paatp.flags & PAATP_FLAG_PAYLOAD, besides, hdr.paatp.lanes) {
#define PAATP_LENGTH(n) \
            (PAATP_KIND_DATA, PAATP_FLAG_PAYLOAD, UDP_BYTES + PAATP_HEADER_BYTES, n * PAATP_LANES_PER_BLOCK): block##n;
#if PAATP_BLOCKS > 7
            PAATP_LENGTH(8)
#endif
#if PAATP_BLOCKS > 6
            PAATP_LENGTH(7)
#endif
#if PAATP_BLOCKS > 5
            PAATP_LENGTH(6)
#endif
#if PAATP_BLOCKS > 4
            PAATP_LENGTH(5)
#endif
#if PAATP_BLOCKS > 3
            PAATP_LENGTH(4)
#endif
#if PAATP_BLOCKS > 2
            PAATP_LENGTH(3)
#endif
#if PAATP_BLOCKS > 1
            PAATP_LENGTH(2)
#endif
            PAATP_LENGTH(1)
            default: accept;
        }
    }

#if PAATP_BLOCKS > 7
    state block8 { packet.extract(hdr.block.next); transition block7; }
#endif
#if PAATP_BLOCKS > 6
    state block7 { packet.extract(hdr.block.next); transition block6; }
#endif
#if PAATP_BLOCKS > 5
    state block6 { packet.extract(hdr.block.next); transition block5; }
#endif
#if PAATP_BLOCKS > 4
    state block5 { packet.extract(hdr.block.next); transition block4; }
#endif
#if PAATP_BLOCKS > 3
    state block4 { packet.extract(hdr.block.next); transition block3; }
#endif
#if PAATP_BLOCKS > 2
    state block3 { packet.extract(hdr.block.next); transition block2; }
#endif
#if PAATP_BLOCKS > 1
    state block2 { packet.extract(hdr.block.next); transition block1; }
#endif
    state block1 { packet.extract(hdr.block.next); transition accept; }
}

control PaatpVerifyChecksum(inout headers_t hdr, inout metadata_t meta) {
    apply { }
}

/* The number in a word of {generation, number}; zero where it is of another generation. */
#define NUMBER_OF(word) ((word)[63:32] == hdr.paatp.generation ? (word)[31:0] : 0)
/* Serial numbers: a lies behind b. */
#define IS_BEFORE(a, b) (((a) - (b))[31:31] == 1)
/* The later of the number in a word and another; the other one where the word is of another generation. */
#define RAISED(word, number) \
    ((word)[63:32] == hdr.paatp.generation && !IS_BEFORE((word)[31:0], number) ? (word)[31:0] : number)

control PaatpIngress(
    inout headers_t hdr,
    inout metadata_t meta,
    inout standard_metadata_t standard_metadata
) {
    /* The slots, less their lanes. */
    register<bit<48>>(PAATP_SLOTS) slot_owner;       /* job, generation; 0: free */
    register<bit<32>>(PAATP_SLOTS) slot_seq;
    register<bit<64>>(PAATP_SLOTS) slot_bits;
    register<bit<8>>(PAATP_SLOTS) slot_contributors;
    register<bit<64>>(PAATP_SLOTS) slot_tag;
    register<bit<40>>(PAATP_SLOTS) slot_agreed;      /* operation and type, lanes, exponent, root */
    register<bit<8>>(PAATP_SLOTS) slot_next_exponent;
    register<bit<32>>(PAATP_SLOTS) slot_ack;
    register<bit<32>>(PAATP_SLOTS) slot_progress;
    register<bit<1>>(PAATP_SLOTS) slot_congested;
    register<bit<1>>(PAATP_SLOTS) slot_sent;
    register<bit<48>>(PAATP_SLOTS) slot_touched;
    /* By job: {generation, number}. */
    register<bit<64>>(PAATP_MAX_JOBS) job_floor;
    register<bit<64>>(PAATP_MAX_JOBS) job_p_min;
    register<bit<64>>(PAATP_MAX_JOBS) job_p_max;
    register<bit<64>>(PAATP_MAX_JOBS) job_crowded;   /* the latest chunk that found no place */
    counter(PAATP_COUNTS, CounterType.packets) counts;

    PaatpLanes() lanes;

    action forward(port_t port) {
        standard_metadata.egress_spec = port;
    }

    action flood(bit<16> group) {
        standard_metadata.mcast_grp = group;
    }

    action drop() {
        mark_to_drop(standard_metadata);
    }

    /* Where everybody is, by address of Ethernet. */
    table stations {
        key = { hdr.ethernet.destination: exact; }
        actions = { forward; flood; drop; }
        default_action = drop();
        size = 1024;
    }

    action set_job(
        bit<64> local, bit<32> reach, bit<8> k, bit<16> granted, bit<48> patience, bit<32> mask, ipv4_t node,
        port_t node_port, bit<16> group
    ) {
        meta.job.local = local;
        meta.job.reach = reach;
        meta.job.k = k;
        meta.job.granted = granted;
        meta.job.patience = patience;
        meta.job.mask = mask;
        meta.job.node = node;
        meta.job.node_port = node_port;
        meta.job.group = group;
    }

    table jobs {
        key = {
            hdr.paatp.job: exact;
            hdr.paatp.generation: exact;
        }
        actions = { set_job; NoAction; }
        default_action = NoAction();
        size = PAATP_MAX_JOBS;
    }

    /* The only address that may speak for a rank. */
    table ranks {
        key = {
            hdr.paatp.job: exact;
            hdr.paatp.generation: exact;
            hdr.paatp.worker: exact;
            hdr.ipv4.source: exact;
        }
        actions = { NoAction; }
        default_action = NoAction();
        size = PAATP_MAX_JOBS * PAATP_MAX_RANKS;
    }

    /* The answer to the sender: the contribution is in a partial sum. It speaks of nothing else. */
    action answer(bit<64> bits, bit<32> p_min, bit<32> p_max) {
        mac_t mac = hdr.ethernet.source;
        hdr.ethernet.source = hdr.ethernet.destination;
        hdr.ethernet.destination = mac;
        ipv4_t address = hdr.ipv4.source;
        hdr.ipv4.source = hdr.ipv4.destination;
        hdr.ipv4.destination = address;
        hdr.ipv4.hops = TIME_TO_LIVE;
        hdr.ipv4.total_length = IPV4_BYTES + UDP_BYTES + PAATP_HEADER_BYTES;
        bit<16> port = hdr.udp.source;
        hdr.udp.source = hdr.udp.destination;
        hdr.udp.destination = port;
        hdr.udp.length = UDP_BYTES + PAATP_HEADER_BYTES;
        hdr.udp.checksum = 0;
        hdr.paatp.kind = PAATP_KIND_ANSWER;
        hdr.paatp.flags = hdr.ipv4.ecn == CONGESTED
            ? PAATP_FLAG_PARTIAL | PAATP_FLAG_ECN_ECHO : PAATP_FLAG_PARTIAL;
        hdr.ipv4.ecn = hdr.ipv4.ecn == CONGESTED ? ECN_CAPABLE : hdr.ipv4.ecn;
        hdr.paatp.status = PAATP_STATUS_OK;
        hdr.paatp.want = 0;
        hdr.paatp.ack = p_min;
        hdr.paatp.progress = p_max;
        hdr.paatp.bitmap = bits;
        hdr.paatp.tag = 0;
        hdr.paatp.lanes = 0;
        hdr.paatp.mode = 0;
        hdr.paatp.contributors = 0;
        hdr.paatp.exponent = 0;
        hdr.paatp.next_exponent = 0;
        hdr.paatp.window = meta.job.granted;
        hdr.paatp.rank = 0;
        hdr.paatp.gain = 0;
        hdr.paatp.attempt = 0;
        hdr.paatp.operation_or_epoch = 0;
        hdr.paatp.check = PAATP_HEADER_CHECK(hdr.paatp);
        hdr.block.pop_front(PAATP_BLOCKS);
        standard_metadata.egress_spec = standard_metadata.ingress_port;
        meta.tells_port = true;
        meta.changed = true;
    }

    /* The partial sum: the request of whoever came last, for all. */
    action send_up(
        bit<64> bits, bit<8> contributors, bit<64> tag, bit<8> next_exponent, bit<32> ack, bit<32> progress
    ) {
        hdr.paatp.flags = PAATP_FLAG_PAYLOAD | PAATP_FLAG_PARTIAL;
        hdr.paatp.status = hdr.paatp.worker;
        hdr.paatp.want = hdr.paatp.seq;
        hdr.paatp.ack = ack;
        hdr.paatp.progress = progress;
        hdr.paatp.bitmap = bits;
        hdr.paatp.tag = tag;
        hdr.paatp.next_exponent = next_exponent;
        hdr.paatp.contributors = contributors;
        hdr.paatp.check = PAATP_HEADER_CHECK(hdr.paatp);
        hdr.udp.checksum = 0;
        standard_metadata.egress_spec = meta.job.node_port;
        meta.changed = true;
    }

    apply {
        stations.apply();
        if (!hdr.paatp.isValid()) {
            return;
        }
        /* The lengths that Ethernet, IP and UDP tell must be the same, and the header's check right. */
        if (hdr.udp.length + IPV4_BYTES != hdr.ipv4.total_length
            || standard_metadata.packet_length != (bit<32>)(hdr.ipv4.total_length + ETHERNET_BYTES)
            || hdr.paatp.version != PAATP_VERSION
            || hdr.paatp.check != PAATP_HEADER_CHECK(hdr.paatp)) {
            return;
        }
        if (!jobs.apply().hit) {
            return;
        }
        bool from_node = standard_metadata.ingress_port == meta.job.node_port;
        bool is_data = hdr.paatp.kind == PAATP_KIND_DATA && !from_node && hdr.ipv4.destination == meta.job.node;
        meta.tells_port = hdr.paatp.kind == PAATP_KIND_ANSWER && from_node && hdr.ipv4.source == meta.job.node;
        bool is_answer = meta.tells_port && hdr.paatp.status != PAATP_STATUS_REJOIN;
        if (is_data) {
            is_data = ranks.apply().hit;
        }
        if (!is_data && !is_answer) {
            return;
        }
        index_t job = (index_t)hdr.paatp.job;

        /* A first sending of lanes that add up, whole, from a rank that speaks for itself. (Its length is right, or the
           parser had found no block.) All else is the aggregator's. */
        bit<64> bit_of_rank = 64w1 << hdr.paatp.worker[5:0];
        bool is_local = hdr.paatp.worker[7:6] == 0 && meta.job.local & bit_of_rank != 0;
        if (is_data) {
            bool is_fit = hdr.paatp.flags == PAATP_FLAG_PAYLOAD
                && hdr.paatp.attempt == 0
                && (PAATP_OPERATION(hdr.paatp) == PAATP_OPERATION_SUM
                    || PAATP_OPERATION(hdr.paatp) == PAATP_OPERATION_MEAN)
                && hdr.block[0].isValid()
                && is_local
                && hdr.paatp.bitmap == bit_of_rank;
            if (!is_fit) {
                counts.count(PAATP_COUNT_PASSED_UNFIT);
                return;
            }
        }

        /* What passes by tells how far the job is. */
        bit<64> word;
        job_p_min.read(word, job);
        bit<32> p_min = NUMBER_OF(word);
        if (is_answer) {
            p_min = RAISED(word, hdr.paatp.ack);
            job_p_min.write(job, hdr.paatp.generation ++ p_min);
        }
        job_p_max.read(word, job);
        bit<32> p_max = RAISED(word, hdr.paatp.progress);
        job_p_max.write(job, hdr.paatp.generation ++ p_max);
        bit<64> floor_word;
        job_floor.read(floor_word, job);
        bit<32> floor = NUMBER_OF(floor_word);
        if (is_answer && hdr.paatp.flags & (PAATP_FLAG_RESULT | PAATP_FLAG_PARTIAL) == 0
            && hdr.paatp.progress - hdr.paatp.want <= meta.job.reach) {
            /* min_ack: or a job of which no slot becomes complete for S chunks would be out of the window for good. */
            job_floor.write(job, hdr.paatp.generation ++ RAISED(floor_word, hdr.paatp.want));
        }

        if (is_answer && (hdr.paatp.flags & PAATP_FLAG_RESULT == 0 || !is_local)) {
            return;
        }
        if (is_data && hdr.paatp.seq - floor >= meta.job.reach) {
            counts.count(PAATP_COUNT_PASSED_WINDOW);
            return;
        }

        /* All places are looked at for the chunk, and the first k for a free one. */
        bit<32> seq = is_data ? hdr.paatp.seq : hdr.paatp.want;
        bit<48> owner = hdr.paatp.job ++ hdr.paatp.generation;
        bit<32> place;
        hash(place, HashAlgorithm.crc32, 32w0, { hdr.paatp.job, seq }, 64w0x100000000);
        bit<32> step = (place >> 16) | 1;
        bool found = false;
        bool has_free = false;
        bool evicts = false;
        index_t slot = 0;
        index_t free_slot = 0;
        bit<48> other;
        bit<32> other_seq;
        bit<48> touched;
#define PAATP_PROBE(n) \
        slot_owner.read(other, place & meta.job.mask); \
        slot_seq.read(other_seq, place & meta.job.mask); \
        if (!found && other == owner && other_seq == seq) { \
            found = true; \
            slot = place & meta.job.mask; \
        } \
        if (!has_free && n < meta.job.k) { \
            slot_touched.read(touched, place & meta.job.mask); \
            if (other == 0 \
                || (other[47:32] == hdr.paatp.job && (other != owner || IS_BEFORE(other_seq, floor))) \
                || standard_metadata.ingress_global_timestamp - touched > meta.job.patience) { \
                has_free = true; \
                evicts = other != 0; \
                free_slot = place & meta.job.mask; \
            } \
        } \
        place = place + step;
        PAATP_PROBE(0)
        PAATP_PROBE(1)
        PAATP_PROBE(2)
        PAATP_PROBE(3)
        PAATP_PROBE(4)
        PAATP_PROBE(5)
        PAATP_PROBE(6)
        PAATP_PROBE(7)
#if PAATP_K_MAX != 8
#error "there are as many probes as places"
#endif

        if (is_answer) {
            /* The result that frees a slot goes to all ranks. */
            if (found) {
                slot_owner.write(slot, 0);
                counts.count(PAATP_COUNT_RESULTS);
                standard_metadata.mcast_grp = meta.job.group;
            }
            return;
        }

        /* Of this chunk or a later one something was passed on for want of a place: a slot would wait for it in vain. */
        job_crowded.read(word, job);
        bool was_crowded = word[63:32] == hdr.paatp.generation && word[31:0] - seq < meta.job.reach;

        bit<40> agreed = PAATP_AGREED(hdr.paatp);
        bit<64> bits = hdr.paatp.bitmap;
        bit<8> contributors = 1;
        bit<64> tag = hdr.paatp.tag;
        bit<8> next_exponent = hdr.paatp.next_exponent;
        bit<32> ack = hdr.paatp.ack;
        bit<32> progress = hdr.paatp.progress;
        bit<1> congested = hdr.ipv4.ecn == CONGESTED ? 1w1 : 1w0;
        if (found) {
            bit<40> others;
            slot_agreed.read(others, slot);
            if (others != agreed) {
                counts.count(PAATP_COUNT_PASSED_MISMATCH);
                return;
            }
            bit<64> before;
            slot_bits.read(before, slot);
            if (before & bits != 0) {
                counts.count(PAATP_COUNT_DUPLICATES);
                answer(before, p_min, p_max);
                return;
            }
            bit<1> sent;
            slot_sent.read(sent, slot);
            if (sent == 1) {
                counts.count(PAATP_COUNT_PASSED_LATE);
                return;
            }
            counts.count(PAATP_COUNT_ADDED);
            bits = bits | before;
            bit<8> number;
            slot_contributors.read(number, slot);
            contributors = contributors + number;
            bit<64> sum;
            slot_tag.read(sum, slot);
            tag = tag + sum;
            slot_next_exponent.read(number, slot);
            /* Signed: the lower of two by its upper bit turned over. */
            next_exponent = (next_exponent ^ 0x80) < (number ^ 0x80) ? number : next_exponent;
            bit<32> known;
            slot_ack.read(known, slot);
            ack = IS_BEFORE(known, ack) ? known : ack;
            slot_progress.read(known, slot);
            progress = IS_BEFORE(known, progress) ? known : progress;
            bit<1> mark;
            slot_congested.read(mark, slot);
            congested = congested | mark;
        } else if (has_free && !was_crowded) {
            slot = free_slot;
            counts.count(PAATP_COUNT_STORED);
            if (evicts) {
                counts.count(PAATP_COUNT_EVICTED);
            }
            slot_owner.write(slot, owner);
            slot_seq.write(slot, seq);
            slot_agreed.write(slot, agreed);
        } else {
            counts.count(PAATP_COUNT_PASSED_CROWDED);
            if (!was_crowded) {
                job_crowded.write(job, hdr.paatp.generation ++ seq);
            }
            return;
        }
        bool is_complete = meta.job.local & ~bits == 0;
        slot_bits.write(slot, bits);
        slot_contributors.write(slot, contributors);
        slot_tag.write(slot, tag);
        slot_next_exponent.write(slot, next_exponent);
        slot_ack.write(slot, ack);
        slot_progress.write(slot, progress);
        slot_congested.write(slot, congested);
        slot_sent.write(slot, is_complete ? 1w1 : 1w0);
        slot_touched.write(slot, standard_metadata.ingress_global_timestamp);
        lanes.apply(hdr, slot, !found);

        if (!is_complete) {
            answer(bits, p_min, p_max);
            return;
        }
        counts.count(PAATP_COUNT_COMPLETED);
        job_floor.write(job, hdr.paatp.generation ++ RAISED(floor_word, ack));
        hdr.ipv4.ecn = congested == 1 ? CONGESTED : hdr.ipv4.ecn;
        send_up(bits, contributors, tag, next_exponent, ack, progress);
    }
}

control PaatpEgress(
    inout headers_t hdr,
    inout metadata_t meta,
    inout standard_metadata_t standard_metadata
) {
    bit<8> rank = 0;
    mac_t mac = 0;
    ipv4_t address = 0;

    action set_copy(bit<8> of_rank, mac_t of_mac, ipv4_t of_address) {
        rank = of_rank;
        mac = of_mac;
        address = of_address;
    }

    /* To whom the copies of a job's results go, by their number in the group. */
    table copies {
        key = {
            hdr.paatp.job: exact;
            standard_metadata.egress_rid: exact;
        }
        actions = { set_copy; NoAction; }
        default_action = NoAction();
        size = PAATP_MAX_JOBS * PAATP_MAX_RANKS;
    }

    apply {
        if (standard_metadata.egress_rid == FLOOD_COPY
            && standard_metadata.egress_port == standard_metadata.ingress_port) {
            mark_to_drop(standard_metadata);
            return;
        }
        if (!meta.tells_port) {
            return;
        }
        bool is_copy = false;
        if (standard_metadata.egress_rid != 0 && copies.apply().hit) {
            is_copy = rank != hdr.paatp.worker;
        }
        index_t base = (index_t)hdr.paatp.job * PAATP_MAX_RANKS;
        if (!is_copy) {
            if (hdr.paatp.worker[7:6] == 0) {
                rank_ports.write(base + (index_t)hdr.paatp.worker, hdr.udp.destination);
            }
            return;
        }
        bit<16> port;
        rank_ports.read(port, base + (index_t)rank);
        if (port == 0) {
            mark_to_drop(standard_metadata);
            return;
        }
        hdr.ethernet.destination = mac;
        hdr.ipv4.destination = address;
        hdr.udp.destination = port;
        hdr.udp.checksum = 0;
        /* Nobody's token, and a status that speaks of no contribution. */
        hdr.paatp.flags = hdr.paatp.flags | PAATP_FLAG_PARTIAL;
        hdr.paatp.worker = rank;
        hdr.paatp.status = PAATP_STATUS_NOT_YET;
        hdr.paatp.token = 0;
        hdr.paatp.gain = 0;
        hdr.paatp.check = PAATP_HEADER_CHECK(hdr.paatp);
        meta.changed = true;
    }
}

control PaatpComputeChecksum(inout headers_t hdr, inout metadata_t meta) {
    apply {
        update_checksum(
            meta.changed,
            {
                hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.diffserv, hdr.ipv4.ecn, hdr.ipv4.total_length,
                hdr.ipv4.identification, hdr.ipv4.flags, hdr.ipv4.fragment, hdr.ipv4.hops, hdr.ipv4.protocol,
                hdr.ipv4.source, hdr.ipv4.destination
            },
            hdr.ipv4.checksum,
            HashAlgorithm.csum16
        );
    }
}

control PaatpDeparser(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr.ethernet);
        packet.emit(hdr.ipv4);
        packet.emit(hdr.udp);
        packet.emit(hdr.paatp);
        packet.emit(hdr.block);
    }
}

V1Switch(
    PaatpParser(),
    PaatpVerifyChecksum(),
    PaatpIngress(),
    PaatpEgress(),
    PaatpComputeChecksum(),
    PaatpDeparser()
) main;
