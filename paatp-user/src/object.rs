//! The eBPF objects that the build script found, inside this program.

/// Bytes of `paatp.bpf.o`; empty if the build had none.
#[cfg(paatp_object)]
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("PAATP_OBJECT"));

/// Bytes of `paatp.bpf.o`; empty if the build had none.
#[cfg(not(paatp_object))]
pub static OBJECT: &[u8] = &[];

/// Bytes of `worker.bpf.o`; empty if the build had none.
#[cfg(paatp_worker_object)]
pub static WORKER_OBJECT: &[u8] = aya::include_bytes_aligned!(env!("PAATP_WORKER_OBJECT"));

/// Bytes of `worker.bpf.o`; empty if the build had none.
#[cfg(not(paatp_worker_object))]
pub static WORKER_OBJECT: &[u8] = &[];
