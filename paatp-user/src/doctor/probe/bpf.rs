//! Tries the bpf system call in child processes: a seccomp filter may kill whoever calls it.

use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};

use crate::doctor::facts::Call;

/// Any command that needs no capability; its argument is too long before anything else is looked at.
const BPF_MAP_LOOKUP_ELEM: libc::c_int = 1;
/// More than a page, on every architecture: the kernel answers `E2BIG` to any longer argument.
const TOO_LONG: libc::c_uint = 1 << 20;

const BPF_MAP_CREATE: libc::c_int = 0;
const BPF_MAP_TYPE_ARRAY: u32 = 2;

/// Exit status of a child that had no error; error numbers are 1 to 133.
const DONE: i32 = 0;

/// A call that the kernel always refuses with `E2BIG`, so that any other end is a filter's.
#[must_use]
pub fn reach() -> Call {
    in_child(|| {
        // SAFETY: the kernel refuses the length before it reads the argument.
        unsafe { libc::syscall(libc::SYS_bpf, BPF_MAP_LOOKUP_ELEM, std::ptr::null::<u8>(), TOO_LONG) }
    })
}

/// Creates an array of one number; it is gone with the child.
#[must_use]
pub fn create_map() -> Call {
    // The head of `union bpf_attr`: type, bytes of a key, bytes of a value, entries; the rest of it is zero.
    let attributes: [u32; 4] = [BPF_MAP_TYPE_ARRAY, 4, 4, 1];
    in_child(|| {
        // SAFETY: the argument is as long as said and outlives the call.
        unsafe {
            libc::syscall(
                libc::SYS_bpf,
                BPF_MAP_CREATE,
                attributes.as_ptr(),
                size_of_val(&attributes) as libc::c_uint,
            )
        }
    })
}

/// Makes one system call in a child, whose exit status is the error number.
fn in_child(call: impl FnOnce() -> libc::c_long) -> Call {
    // SAFETY: the child makes system calls and ends; it allocates nothing and takes no lock.
    match unsafe { fork() } {
        Ok(ForkResult::Child) => {
            let status = if call() >= 0 {
                DONE
            } else {
                std::io::Error::last_os_error().raw_os_error().unwrap_or(255)
            };
            // SAFETY: ends the child at once, without the parent's handlers.
            unsafe { libc::_exit(status) }
        }
        Ok(ForkResult::Parent { child }) => loop {
            match waitpid(child, None) {
                Ok(WaitStatus::Exited(_, DONE)) => return Call::Done,
                Ok(WaitStatus::Exited(_, number)) => return Call::Refused(number),
                Ok(WaitStatus::Signaled(..)) => return Call::Killed,
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(_) => return Call::Untried,
            }
        },
        Err(_) => Call::Untried,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_tell_how_calls_end() {
        assert_eq!(in_child(|| 3), Call::Done);
        // SAFETY: a descriptor that is none is refused.
        assert_eq!(in_child(|| unsafe { libc::close(-1) }.into()), Call::Refused(libc::EBADF));
        assert_eq!(in_child(|| std::process::abort()), Call::Killed);
    }
}
