//! The eBPF object that the build script found, inside this program.

/// Bytes of `paatp.bpf.o`; empty if the build had none.
#[cfg(paatp_object)]
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("PAATP_EBPF_OBJECT"));

/// Bytes of `paatp.bpf.o`; empty if the build had none.
#[cfg(not(paatp_object))]
pub static OBJECT: &[u8] = &[];
