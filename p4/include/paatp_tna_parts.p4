/* Made from paatp-common by `cargo xtask codegen`. */

header paatp_words_h {
    bit<32> word0;
    bit<32> word1;
    bit<32> word2;
    bit<32> word3;
    bit<32> word4;
    bit<32> word5;
    bit<32> word6;
    bit<32> word7;
    bit<32> word8;
    bit<32> word9;
    bit<32> word10;
    bit<32> word11;
    bit<32> word12;
    bit<32> word13;
    bit<32> word14;
    bit<32> word15;
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
struct changes_t {
    bit<32> word1;
    bit<32> word4;
    bit<32> word5;
    bit<32> word6;
    bit<32> word7;
    bit<32> word10;
    bit<32> word11;
    bit<32> word13;
    bit<32> word14;
}

/* Makes up for it in the header's check: each change times the weight of its word. Weights are sums and
 * differences of powers of two, so nothing is multiplied. An error that the check showed it still shows. */
control PaatpCheck(inout bit<32> check, in changes_t by) {
    apply {
        bit<32> sum0 = by.word4 + by.word5;
        bit<32> sum1 = by.word13 - by.word1;
        bit<32> sum2 = sum1 + sum0;
        bit<32> times_4 = sum2 << 2;
        bit<32> sum3 = by.word10 + by.word11;
        bit<32> times_8 = sum3 << 3;
        bit<32> sum4 = by.word4 + by.word5;
        bit<32> sum5 = by.word6 + by.word7;
        bit<32> sum6 = sum5 + sum4;
        bit<32> times_16 = sum6 << 4;
        bit<32> times_32 = by.word1 << 5;
        bit<32> sum7 = check + by.word4;
        bit<32> sum8 = by.word6 + by.word10;
        bit<32> sum9 = by.word14 - by.word1;
        bit<32> sum10 = by.word5 + by.word7;
        bit<32> sum11 = by.word11 + by.word13;
        bit<32> sum12 = sum9 + sum8;
        bit<32> sum13 = sum7 + times_32;
        bit<32> sum14 = sum11 + sum10;
        bit<32> sum15 = sum13 + sum12;
        bit<32> sum16 = times_8 - sum14;
        bit<32> sum17 = sum16 + sum15;
        bit<32> sum18 = times_4 + times_16;
        bit<32> sum19 = sum18 + sum17;
        check = sum19;
    }
}
