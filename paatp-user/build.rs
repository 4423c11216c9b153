//! Finds the eBPF object and tells the crate whether there is one, so that everything but running compiles without it.

use std::env;
use std::path::{Path, PathBuf};

/// File name of the object in its directory.
const OBJECT: &str = "paatp.bpf.o";

fn main() {
    println!("cargo::rerun-if-env-changed=PAATP_EBPF_DIR");
    println!("cargo::rustc-check-cfg=cfg(paatp_object)");
    let object = directory().join(OBJECT);
    // Also where it is missing: cargo then looks again whenever it runs, and sees the file appear.
    println!("cargo::rerun-if-changed={}", object.display());
    match object.canonicalize() {
        Ok(path) if path.is_file() => {
            println!("cargo::rustc-cfg=paatp_object");
            println!("cargo::rustc-env=PAATP_EBPF_OBJECT={}", path.display());
        }
        _ => println!("cargo::warning=no {}: this paatp will not be able to `run`", object.display()),
    }
}

/// `PAATP_EBPF_DIR`, or `target/ebpf` of the workspace.
fn directory() -> PathBuf {
    match env::var_os("PAATP_EBPF_DIR") {
        Some(directory) if !directory.is_empty() => directory.into(),
        _ => Path::new(&env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default()).join("../target/ebpf"),
    }
}
