/* Made from paatp-common by `cargo xtask codegen`. */

header paatp_h {
    bit<16> magic;
    bit<4> version;
    bit<4> kind;
    bit<8> flags;
    bit<16> job;
    bit<8> worker;
    bit<8> status;
    bit<32> generation;
    bit<32> seq;
    bit<32> want;
    bit<32> ack;
    bit<32> progress;
    bit<32> token;
    bit<64> bitmap;
    bit<64> tag;
    bit<16> lanes;
    bit<8> mode;
    bit<8> contributors;
    bit<8> exponent;
    bit<8> next_exponent;
    bit<16> window;
    bit<8> rank;
    bit<8> gain;
    bit<8> attempt;
    bit<8> operation_or_epoch;
    bit<32> check;
}

/* 32 lanes: two in a word, which add up without a carry between them. */
header paatp_block_h {
    bit<64> word0;
    bit<64> word1;
    bit<64> word2;
    bit<64> word3;
    bit<64> word4;
    bit<64> word5;
    bit<64> word6;
    bit<64> word7;
    bit<64> word8;
    bit<64> word9;
    bit<64> word10;
    bit<64> word11;
    bit<64> word12;
    bit<64> word13;
    bit<64> word14;
    bit<64> word15;
}

/* A header's 32-bit words, and its check over all but the last. */
#define PAATP_WORD_0(h) ((h).magic ++ (h).version ++ (h).kind ++ (h).flags)
#define PAATP_WORD_1(h) ((h).job ++ (h).worker ++ (h).status)
#define PAATP_WORD_2(h) ((h).generation)
#define PAATP_WORD_3(h) ((h).seq)
#define PAATP_WORD_4(h) ((h).want)
#define PAATP_WORD_5(h) ((h).ack)
#define PAATP_WORD_6(h) ((h).progress)
#define PAATP_WORD_7(h) ((h).token)
#define PAATP_WORD_8(h) ((h).bitmap[63:32])
#define PAATP_WORD_9(h) ((h).bitmap[31:0])
#define PAATP_WORD_10(h) ((h).tag[63:32])
#define PAATP_WORD_11(h) ((h).tag[31:0])
#define PAATP_WORD_12(h) ((h).lanes ++ (h).mode ++ (h).contributors)
#define PAATP_WORD_13(h) ((h).exponent ++ (h).next_exponent ++ (h).window)
#define PAATP_WORD_14(h) ((h).rank ++ (h).gain ++ (h).attempt ++ (h).operation_or_epoch)
#define PAATP_WORD_15(h) ((h).check)
#define PAATP_HEADER_CHECK(h) ( \
    29 * PAATP_WORD_0(h) + \
    27 * PAATP_WORD_1(h) + \
    25 * PAATP_WORD_2(h) + \
    23 * PAATP_WORD_3(h) + \
    21 * PAATP_WORD_4(h) + \
    19 * PAATP_WORD_5(h) + \
    17 * PAATP_WORD_6(h) + \
    15 * PAATP_WORD_7(h) + \
    13 * PAATP_WORD_8(h) + \
    11 * PAATP_WORD_9(h) + \
    9 * PAATP_WORD_10(h) + \
    7 * PAATP_WORD_11(h) + \
    5 * PAATP_WORD_12(h) + \
    3 * PAATP_WORD_13(h) + \
    1 * PAATP_WORD_14(h))

#define PAATP_OPERATION(h) ((h).operation_or_epoch[6:4])
/* What ranks must agree on. */
#define PAATP_AGREED(h) ((h).operation_or_epoch ++ (h).lanes ++ (h).exponent ++ (h).rank)
