//! An aggregator that owns its memory, and packets for it. Shared by the tests of `paatp-common`, the fuzzer and the
//! tests of the loaded program, which include this file by its path.

#![allow(dead_code, reason = "each includer uses a part")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

pub mod corpus;
pub mod node;
pub mod packet;
pub mod replay;
pub mod requests;
pub mod switch;
