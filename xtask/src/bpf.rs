//! Whether this process may use BPF: decides if tests must run or may skip themselves.

use std::env;
use std::fs;

/// Tells tests not to skip themselves.
pub const REQUIRE_BPF: &str = "PAATP_REQUIRE_BPF";

/// Whether we are root.
pub fn is_root() -> bool {
    // SAFETY: geteuid has no arguments, no side effects and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// Why BPF cannot be used here, or nothing if it can: root, a BPF file system, a working system call.
pub fn unavailable() -> Option<String> {
    if !is_root() {
        return Some("not root".into());
    }
    if !bpf_fs_is_mounted(&fs::read_to_string("/proc/self/mounts").unwrap_or_default()) {
        return Some("no BPF file system; `mount -t bpf bpf /sys/fs/bpf` mounts it".into());
    }
    create_a_map().err().map(|error| format!("the bpf system call refuses a small map: {error}"))
}

/// Whether tests are required to use BPF: as the environment says, else if this machine can.
pub fn required() -> bool {
    match env::var(REQUIRE_BPF) {
        Ok(value) => !matches!(value.as_str(), "" | "0"),
        Err(_) => match unavailable() {
            None => true,
            Some(reason) => {
                eprintln!("note: tests that need BPF may skip themselves here: {reason}");
                false
            }
        },
    }
}

/// Finds the mount in the text of `/proc/self/mounts`.
fn bpf_fs_is_mounted(mounts: &str) -> bool {
    mounts.lines().any(|line| {
        let mut fields = line.split(' ').skip(1);
        fields.next() == Some("/sys/fs/bpf") && fields.next() == Some("bpf")
    })
}

/// Creates an array map with one entry and drops it.
fn create_a_map() -> std::io::Result<()> {
    /// `BPF_MAP_CREATE` of `enum bpf_cmd`.
    const MAP_CREATE: libc::c_long = 0;
    // The head of `union bpf_attr` for that command: type (2: array), key size, value size, entries.
    let attributes: [u32; 4] = [2, 4, 4, 1];
    // SAFETY: the pointer and the size describe `attributes`, which the kernel only reads; fields
    // beyond the given size count as zero.
    let descriptor =
        unsafe { libc::syscall(libc::SYS_bpf, MAP_CREATE, attributes.as_ptr(), size_of_val(&attributes)) };
    let Ok(descriptor) = i32::try_from(descriptor) else {
        return Err(std::io::Error::other("it returned no file descriptor"));
    };
    if descriptor < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made for us and nobody else knows it.
    unsafe { libc::close(descriptor) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_bpf_file_system() {
        assert!(bpf_fs_is_mounted("sysfs /sys sysfs rw 0 0\nbpf /sys/fs/bpf bpf rw,mode=700 0 0\n"));
        assert!(!bpf_fs_is_mounted("tmpfs /sys/fs/bpf tmpfs rw 0 0\nbpf /mnt bpf rw 0 0\n"));
    }
}
