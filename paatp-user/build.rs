//! Finds the eBPF objects and tells the crate whether they are there, so that everything but running compiles without
//! them.

use std::env;
use std::path::{Path, PathBuf};

/// The objects in their directory, the condition under which the crate has one, and what lacks without it.
const OBJECTS: [(&str, &str, &str); 2] = [
    ("paatp.bpf.o", "paatp_object", "`run`"),
    ("worker.bpf.o", "paatp_worker_object", "bypass the kernel in `allreduce`"),
];

fn main() {
    println!("cargo::rerun-if-env-changed=PAATP_EBPF_DIR");
    for (name, condition, purpose) in OBJECTS {
        println!("cargo::rustc-check-cfg=cfg({condition})");
        let object = directory().join(name);
        // Also where it is missing: cargo then looks again whenever it runs, and sees the file appear.
        println!("cargo::rerun-if-changed={}", object.display());
        match object.canonicalize() {
            Ok(path) if path.is_file() => {
                println!("cargo::rustc-cfg={condition}");
                println!("cargo::rustc-env={}={}", condition.to_uppercase(), path.display());
            }
            _ => {
                println!("cargo::warning=no {}: this paatp will not be able to {purpose}", object.display());
            }
        }
    }
}

/// `PAATP_EBPF_DIR`, or `target/ebpf` of the workspace.
fn directory() -> PathBuf {
    match env::var_os("PAATP_EBPF_DIR") {
        Some(directory) if !directory.is_empty() => directory.into(),
        _ => Path::new(&env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default()).join("../target/ebpf"),
    }
}
