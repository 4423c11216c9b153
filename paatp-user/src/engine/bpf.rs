//! The few requests to the `bpf` system call that aya does not offer: what lies at a path, and what a link holds.
//!
//! Objects are opened by their path in a BPF file system: by number it would need `CAP_SYS_ADMIN`.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Commands of `enum bpf_cmd`.
const OBJ_GET: libc::c_long = 7;
const OBJ_GET_INFO_BY_FD: libc::c_long = 15;

/// What a descriptor or a file of the BPF file system is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A map.
    Map,
    /// A program.
    Program,
    /// A link.
    Link,
    /// Something else.
    Other,
}

/// What a link holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkFacts {
    /// The program's number.
    pub program: u32,
    /// Index of the interface; 0 where the link holds none any more.
    pub interface: u32,
}

/// Head of `union bpf_attr` for `BPF_OBJ_GET`.
#[repr(C)]
struct ObjectByPath {
    pathname: u64,
    descriptor: u32,
    flags: u32,
}

/// The same for `BPF_OBJ_GET_INFO_BY_FD`.
#[repr(C)]
struct InfoByDescriptor {
    descriptor: u32,
    bytes: u32,
    info: u64,
}

/// `struct bpf_link_info` up to the part of XDP links.
#[derive(Default)]
#[repr(C)]
struct LinkInfo {
    kind: u32,
    id: u32,
    program: u32,
    padding: u32,
    interface: u32,
    rest: [u32; 3],
}

/// `BPF_LINK_TYPE_XDP`.
const LINK_XDP: u32 = 6;

/// Opens what is pinned at a path.
///
/// # Errors
/// What the kernel says; `EACCES` or `EINVAL` for files that are no pins.
pub fn open(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let attributes = ObjectByPath { pathname: path.as_ptr() as u64, descriptor: 0, flags: 0 };
    // SAFETY: pointer and size describe `attributes`, whose path lives until after the call; the kernel only reads.
    let descriptor =
        unsafe { libc::syscall(libc::SYS_bpf, OBJ_GET, &raw const attributes, size_of_val(&attributes)) };
    let descriptor = i32::try_from(descriptor).unwrap_or(-1);
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else knows.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// What a descriptor stands for: the kernel tells it in the name of its inode only.
pub fn kind(descriptor: BorrowedFd<'_>) -> Kind {
    let name = std::fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd())).unwrap_or_default();
    match name.as_os_str().as_bytes() {
        b"anon_inode:bpf-map" => Kind::Map,
        b"anon_inode:bpf-prog" => Kind::Program,
        b"anon_inode:bpf_link" | b"anon_inode:bpf-link" => Kind::Link,
        _ => Kind::Other,
    }
}

/// What a link holds.
///
/// # Errors
/// If it is no link of XDP, or the kernel does not tell.
pub fn link_facts(link: BorrowedFd<'_>) -> io::Result<LinkFacts> {
    let mut info = LinkInfo::default();
    let attributes = InfoByDescriptor {
        descriptor: link.as_raw_fd() as u32,
        bytes: size_of::<LinkInfo>() as u32,
        info: (&raw mut info) as u64,
    };
    // SAFETY: pointers and sizes describe `attributes` and `info`; the kernel writes no more than `bytes` to the latter.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, OBJ_GET_INFO_BY_FD, &raw const attributes, size_of_val(&attributes))
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    if info.kind != LINK_XDP {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a link, but not of XDP"));
    }
    Ok(LinkFacts { program: info.program, interface: info.interface })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn what_is_no_pin_is_an_error() {
        let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
        let path = folder.path().join("file");
        assert!(std::fs::write(&path, "text").is_ok());
        assert!(open(&path).is_err() && open(folder.path()).is_err() && open(Path::new("/a\0b")).is_err());
        let file = std::fs::File::open(&path).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(kind(file.as_fd()), Kind::Other);
        assert!(link_facts(file.as_fd()).is_err());
    }
}
