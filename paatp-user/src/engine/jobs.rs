//! The table of jobs as memory: what the data plane reads while it is written is written in whole words.
//!
//! A system call copies an entry byte by byte for all that the kernel promises. And the data plane writes one word
//! itself, the policy ([`paatp_common::policy`]), which must not be overwritten by a copy of what it was.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use paatp_common::job::JobEntry;
use paatp_common::limits::MAX_JOBS;
use paatp_common::policy::Policy;

/// 64-bit words of an entry.
const WORDS: usize = size_of::<JobEntry>() / 8;
/// The one that holds the generation: written last.
const GENERATION: usize = std::mem::offset_of!(JobEntry, generation) / 8;
/// The one that is the policy.
const POLICY: usize = std::mem::offset_of!(JobEntry, policy) / 8;
const BYTES: usize = MAX_JOBS * WORDS * 8;

const _: () = assert!(size_of::<JobEntry>().is_multiple_of(8) && size_of::<Policy>() == 8);

/// The mapped table.
#[derive(Debug)]
pub(super) struct JobTable {
    words: NonNull<AtomicU64>,
}

// SAFETY: atomic words in a mapping that lives as long as this.
unsafe impl Send for JobTable {}

impl JobTable {
    /// Maps the table of this descriptor, which must be an array of [`MAX_JOBS`] entries.
    pub(super) fn map(table: BorrowedFd<'_>) -> io::Result<JobTable> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses. It refuses one that is longer than the table.
        let map = unsafe {
            libc::mmap(std::ptr::null_mut(), BYTES, access, libc::MAP_SHARED, table.as_raw_fd(), 0)
        };
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let words = NonNull::new(map.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(JobTable { words })
    }

    fn word(&self, number: u16, word: usize) -> Option<&AtomicU64> {
        let number = usize::from(number);
        // SAFETY: inside the mapping by the comparison, aligned because a mapping is, and alive as long as `self`. All
        // of it is read and written as atomic words only.
        (number < MAX_JOBS && word < WORDS).then(|| unsafe { self.words.add(number * WORDS + word).as_ref() })
    }

    /// Writes an entry but for its policy, the generation last.
    pub(super) fn write(&self, number: u16, entry: &JobEntry) {
        let words: [u64; WORDS] = bytemuck::cast(*entry);
        let order = (0..WORDS).filter(|word| *word != GENERATION && *word != POLICY);
        for index in order.chain([GENERATION]) {
            if let Some(word) = self.word(number, index) {
                word.store(words[index], Ordering::Release);
            }
        }
    }

    /// A job's policy.
    pub(super) fn policy(&self, number: u16) -> Policy {
        self.word(number, POLICY).map_or_else(Policy::default, |word| Policy(word.load(Ordering::Acquire)))
    }

    /// Replaces the policy of a job that does not run.
    pub(super) fn set_policy(&self, number: u16, policy: Policy) {
        if let Some(word) = self.word(number, POLICY) {
            word.store(policy.0, Ordering::Release);
        }
    }

    /// Replaces a job's policy, if it still is what it was.
    pub(super) fn replace_policy(&self, number: u16, from: Policy, to: Policy) -> bool {
        self.word(number, POLICY).is_some_and(|word| {
            word.compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        })
    }
}

impl Drop for JobTable {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which nobody refers to any more. There is nothing to be done if it fails.
        unsafe { libc::munmap(self.words.as_ptr().cast(), BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn entries_are_written_but_for_their_policy() {
        let file = tempfile::tempfile().unwrap_or_else(|error| panic!("{error}"));
        assert!(file.set_len(BYTES as u64).is_ok());
        let table = JobTable::map(file.as_fd()).unwrap_or_else(|error| panic!("{error}"));
        let entry = JobEntry { generation: 7, expected: 3, policy: Policy(9), ..JobEntry::default() };
        table.set_policy(2, Policy(5));
        table.write(2, &entry);
        assert_eq!(table.policy(2), Policy(5));
        assert!(
            !table.replace_policy(2, Policy(4), Policy(6)) && table.replace_policy(2, Policy(5), Policy(6))
        );
        let mut bytes = vec![0; BYTES];
        assert!(std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 0).is_ok());
        let entries: &[JobEntry] = bytemuck::cast_slice(&bytes);
        assert_eq!(entries[2], JobEntry { policy: Policy(6), ..entry });
        assert_eq!([entries[1], entries[3]], [JobEntry::default(); 2]);
        table.write(MAX_JOBS as u16, &entry);
        assert_eq!(table.policy(MAX_JOBS as u16), Policy(0));
    }
}
