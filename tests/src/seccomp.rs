//! Processes that a filter keeps from the bpf system call, as containers and services are.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// Lets a filter answer bpf(2) from the command's start on, with `SECCOMP_RET_…`. Root needs no more for it.
pub fn refuse_bpf(command: &mut Command, action: u32) {
    let instruction = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let filter = [
        // The system call's number is the first word of what a filter sees.
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_bpf as u32),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, action),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    // SAFETY: between fork and exec one system call is made; the filter lives in the closure and the kernel copies it.
    unsafe {
        command.pre_exec(move || {
            let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
            match libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
}
