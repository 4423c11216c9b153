/* Made from paatp-common by `cargo xtask codegen`. */

const bit<16> PAATP_MAGIC = 0x5041;
const bit<4> PAATP_VERSION = 1;
const bit<16> PAATP_HEADER_BYTES = 64;
const bit<16> PAATP_LANES_PER_BLOCK = 32;
/* Places that a chunk may take. */
#define PAATP_K_MAX 8
/* Sizes of tables. */
#define PAATP_MAX_JOBS 64
#define PAATP_MAX_RANKS 64

const bit<4> PAATP_KIND_DATA = 1;
const bit<4> PAATP_KIND_ANSWER = 8;

const bit<8> PAATP_FLAG_RESULT = 0x01;
const bit<8> PAATP_FLAG_PARTIAL = 0x02;
const bit<8> PAATP_FLAG_ECN_ECHO = 0x08;
const bit<8> PAATP_FLAG_PAYLOAD = 0x20;

const bit<8> PAATP_STATUS_OK = 0;
const bit<8> PAATP_STATUS_NOT_YET = 1;
const bit<8> PAATP_STATUS_REJOIN = 4;

const bit<3> PAATP_OPERATION_SUM = 2;
const bit<3> PAATP_OPERATION_MEAN = 3;

/* What is counted. */
#define PAATP_COUNT_STORED 0
#define PAATP_COUNT_ADDED 1
#define PAATP_COUNT_DUPLICATES 2
#define PAATP_COUNT_COMPLETED 3
#define PAATP_COUNT_RESULTS 4
#define PAATP_COUNT_PASSED_UNFIT 5
#define PAATP_COUNT_PASSED_WINDOW 6
#define PAATP_COUNT_PASSED_CROWDED 7
#define PAATP_COUNT_PASSED_MISMATCH 8
#define PAATP_COUNT_PASSED_LATE 9
#define PAATP_COUNT_EVICTED 10
#define PAATP_COUNTS 11
