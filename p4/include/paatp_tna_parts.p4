/* Made from paatp-common by `cargo xtask codegen`. */

/* The header with whole words where there is something to compute. */
header paatp_words_h {
    bit<32> word0;
    bit<16> job;
    bit<8> worker;
    bit<8> status;
    bit<32> generation;
    bit<32> seq;
    bit<32> want;
    bit<32> ack;
    bit<32> progress;
    bit<32> token;
    bit<32> bitmap_high;
    bit<32> bitmap_low;
    bit<32> tag_high;
    bit<32> tag_low;
    bit<32> word12;
    bit<32> word13;
    bit<32> word14;
    bit<32> check;
}

header paatp_payload_h {
    bit<32> lane0;
    bit<32> lane1;
    bit<32> lane2;
    bit<32> lane3;
    bit<32> lane4;
    bit<32> lane5;
    bit<32> lane6;
    bit<32> lane7;
    bit<32> lane8;
    bit<32> lane9;
    bit<32> lane10;
    bit<32> lane11;
    bit<32> lane12;
    bit<32> lane13;
    bit<32> lane14;
    bit<32> lane15;
    bit<32> lane16;
    bit<32> lane17;
    bit<32> lane18;
    bit<32> lane19;
    bit<32> lane20;
    bit<32> lane21;
    bit<32> lane22;
    bit<32> lane23;
    bit<32> lane24;
    bit<32> lane25;
    bit<32> lane26;
    bit<32> lane27;
    bit<32> lane28;
    bit<32> lane29;
    bit<32> lane30;
    bit<32> lane31;
}

#define PAATP_WEIGHT_0 29
#define PAATP_WEIGHT_1 27
#define PAATP_WEIGHT_2 25
#define PAATP_WEIGHT_3 23
#define PAATP_WEIGHT_4 21
#define PAATP_WEIGHT_5 19
#define PAATP_WEIGHT_6 17
#define PAATP_WEIGHT_7 15
#define PAATP_WEIGHT_8 13
#define PAATP_WEIGHT_9 11
#define PAATP_WEIGHT_10 9
#define PAATP_WEIGHT_11 7
#define PAATP_WEIGHT_12 5
#define PAATP_WEIGHT_13 3
#define PAATP_WEIGHT_14 1

control PaatpPayload(inout paatp_payload_h payload, in slot_t slot, in found_t found) {
    PaatpLane() lane0;
    PaatpLane() lane1;
    PaatpLane() lane2;
    PaatpLane() lane3;
    PaatpLane() lane4;
    PaatpLane() lane5;
    PaatpLane() lane6;
    PaatpLane() lane7;
    PaatpLane() lane8;
    PaatpLane() lane9;
    PaatpLane() lane10;
    PaatpLane() lane11;
    PaatpLane() lane12;
    PaatpLane() lane13;
    PaatpLane() lane14;
    PaatpLane() lane15;
    PaatpLane() lane16;
    PaatpLane() lane17;
    PaatpLane() lane18;
    PaatpLane() lane19;
    PaatpLane() lane20;
    PaatpLane() lane21;
    PaatpLane() lane22;
    PaatpLane() lane23;
    PaatpLane() lane24;
    PaatpLane() lane25;
    PaatpLane() lane26;
    PaatpLane() lane27;
    PaatpLane() lane28;
    PaatpLane() lane29;
    PaatpLane() lane30;
    PaatpLane() lane31;

    apply {
        lane0.apply(payload.lane0, slot, found);
        lane1.apply(payload.lane1, slot, found);
        lane2.apply(payload.lane2, slot, found);
        lane3.apply(payload.lane3, slot, found);
        lane4.apply(payload.lane4, slot, found);
        lane5.apply(payload.lane5, slot, found);
        lane6.apply(payload.lane6, slot, found);
        lane7.apply(payload.lane7, slot, found);
        lane8.apply(payload.lane8, slot, found);
        lane9.apply(payload.lane9, slot, found);
        lane10.apply(payload.lane10, slot, found);
        lane11.apply(payload.lane11, slot, found);
        lane12.apply(payload.lane12, slot, found);
        lane13.apply(payload.lane13, slot, found);
        lane14.apply(payload.lane14, slot, found);
        lane15.apply(payload.lane15, slot, found);
        lane16.apply(payload.lane16, slot, found);
        lane17.apply(payload.lane17, slot, found);
        lane18.apply(payload.lane18, slot, found);
        lane19.apply(payload.lane19, slot, found);
        lane20.apply(payload.lane20, slot, found);
        lane21.apply(payload.lane21, slot, found);
        lane22.apply(payload.lane22, slot, found);
        lane23.apply(payload.lane23, slot, found);
        lane24.apply(payload.lane24, slot, found);
        lane25.apply(payload.lane25, slot, found);
        lane26.apply(payload.lane26, slot, found);
        lane27.apply(payload.lane27, slot, found);
        lane28.apply(payload.lane28, slot, found);
        lane29.apply(payload.lane29, slot, found);
        lane30.apply(payload.lane30, slot, found);
        lane31.apply(payload.lane31, slot, found);
    }
}

/* By how much words have changed. */
header paatp_changes_h {
    bit<32> want;
    bit<32> ack;
    bit<32> progress;
    bit<32> tag_high;
    bit<32> tag_low;
    bit<32> next_exponent;
}

/* Makes up for it in the header's check: each change times the weight of its word. Weights are sums and
 * differences of powers of two, so nothing is multiplied. An error that the check showed it still shows.
 * A step for each stage of a switch. */
control PaatpCheck(inout bit<32> check, in paatp_changes_h by) {
    bit<32> times_16;
    bit<32> times_8;
    bit<32> times_4;

    action step0() {
        times_16 = by.want + by.ack;
        times_8 = by.tag_high + by.tag_low;
        times_4 = by.want + by.ack;
        check = check + by.want;
    }

    action step1() {
        times_16 = times_16 + by.progress;
        times_4 = times_4 + by.next_exponent;
        check = check + by.progress;
    }

    action step2() {
        times_16 = times_16 << 1;
        check = check + by.tag_high;
    }

    action step3() {
        times_8 = times_8 + times_16;
        check = check - by.ack;
    }

    action step4() {
        times_8 = times_8 << 1;
        check = check - by.tag_low;
    }

    action step5() {
        times_4 = times_4 + times_8;
        check = check - by.next_exponent;
    }

    action step6() {
        times_4 = times_4 << 2;
    }

    action step7() {
        check = check + times_4;
    }

    apply {
        step0();
        step1();
        step2();
        step3();
        step4();
        step5();
        step6();
        step7();
    }
}

/* What the check gains as a rank's number becomes 0. */
#define PAATP_RANKS_OUT_OF_CHECK(action) \
    0: action(0x00000000); \
    1: action(0xffffe500); \
    2: action(0xffffca00); \
    3: action(0xffffaf00); \
    4: action(0xffff9400); \
    5: action(0xffff7900); \
    6: action(0xffff5e00); \
    7: action(0xffff4300); \
    8: action(0xffff2800); \
    9: action(0xffff0d00); \
    10: action(0xfffef200); \
    11: action(0xfffed700); \
    12: action(0xfffebc00); \
    13: action(0xfffea100); \
    14: action(0xfffe8600); \
    15: action(0xfffe6b00); \
    16: action(0xfffe5000); \
    17: action(0xfffe3500); \
    18: action(0xfffe1a00); \
    19: action(0xfffdff00); \
    20: action(0xfffde400); \
    21: action(0xfffdc900); \
    22: action(0xfffdae00); \
    23: action(0xfffd9300); \
    24: action(0xfffd7800); \
    25: action(0xfffd5d00); \
    26: action(0xfffd4200); \
    27: action(0xfffd2700); \
    28: action(0xfffd0c00); \
    29: action(0xfffcf100); \
    30: action(0xfffcd600); \
    31: action(0xfffcbb00); \
    32: action(0xfffca000); \
    33: action(0xfffc8500); \
    34: action(0xfffc6a00); \
    35: action(0xfffc4f00); \
    36: action(0xfffc3400); \
    37: action(0xfffc1900); \
    38: action(0xfffbfe00); \
    39: action(0xfffbe300); \
    40: action(0xfffbc800); \
    41: action(0xfffbad00); \
    42: action(0xfffb9200); \
    43: action(0xfffb7700); \
    44: action(0xfffb5c00); \
    45: action(0xfffb4100); \
    46: action(0xfffb2600); \
    47: action(0xfffb0b00); \
    48: action(0xfffaf000); \
    49: action(0xfffad500); \
    50: action(0xfffaba00); \
    51: action(0xfffa9f00); \
    52: action(0xfffa8400); \
    53: action(0xfffa6900); \
    54: action(0xfffa4e00); \
    55: action(0xfffa3300); \
    56: action(0xfffa1800); \
    57: action(0xfff9fd00); \
    58: action(0xfff9e200); \
    59: action(0xfff9c700); \
    60: action(0xfff9ac00); \
    61: action(0xfff99100); \
    62: action(0xfff97600); \
    63: action(0xfff95b00);
