//! Any bytes as a frame: parsed, handled and turned round by a node in the middle of its work, as it came and, where
//! the bytes ask for it, with what random bytes never have right put right. Nothing panics, and no slot changes unless
//! the frame is a well-formed request of a member.

#![no_main]

#[path = "../../paatp-common/tests/support/mod.rs"]
mod support;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| support::replay::check(bytes));
