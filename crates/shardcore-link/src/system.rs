//! The kernel calls, and all unsafe code of this crate.

use std::ffi::c_void;
use std::fs::File;
use std::io::{self, Error};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::ptr;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// A block of shared memory, mapped here and in peers. `T` holds atomics only, and all zeros is its first value.
#[derive(Debug)]
pub(crate) struct Mapped<T> {
    address: *mut T,
}

// SAFETY: the mapping lives as long as the value, and `T` is shared by reference only.
unsafe impl<T: Sync> Send for Mapped<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Mapped<T> {}

impl<T> Mapped<T> {
    /// Maps the first bytes of `file`, which must be at least as long as a `T`.
    pub(crate) fn new(file: &File) -> io::Result<Self> {
        let length = size_of::<T>();
        if file.metadata()?.len() < length as u64 {
            return Err(Error::other("the shared block is too short"));
        }
        // SAFETY: a new shared mapping at an address of the kernel's choice aliases nothing of this process.
        let address = unsafe {
            libc::mmap(
                ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED { Err(Error::last_os_error()) } else { Ok(Self { address: address.cast() }) }
    }

    pub(crate) fn get(&self) -> &T {
        // SAFETY: mapped until drop, page aligned, at least as long as `T`, whose every bit pattern is valid (atomics).
        unsafe { &*self.address }
    }
}

impl<T> Drop for Mapped<T> {
    fn drop(&mut self) {
        // SAFETY: this value mapped exactly these bytes, and no reference outlives it.
        unsafe { libc::munmap(self.address.cast::<c_void>(), size_of::<T>()) };
    }
}

/// A file in memory without a name, of `nbytes` zeros; peers open it through `/proc`.
pub(crate) fn memory_file(nbytes: usize) -> io::Result<File> {
    // SAFETY: the name is a C string; the call has no other preconditions.
    let fd = unsafe { libc::memfd_create(c"shardcore-link".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: a descriptor that was just made and that nobody else owns.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(nbytes as u64)?;
    Ok(file)
}

/// Lets other processes of this user read this one's memory where the Yama module restricts that to descendants.
pub(crate) fn allow_readers() {
    // SAFETY: plain integers; without Yama the call fails and nothing needs to be allowed.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0) };
}

/// A handle on a process that stays its own when the number is given to another process.
pub(crate) fn open_process(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: plain integers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let fd = i32::try_from(fd).map_err(Error::other)?;
    if fd < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: a descriptor that was just made and that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whether the process has ended.
pub(crate) fn has_ended(process: &OwnedFd) -> bool {
    let mut poll = libc::pollfd { fd: process.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid `pollfd`, no waiting.
    unsafe { libc::poll(&raw mut poll, 1, 0) > 0 }
}

/// Copies `nbytes` from `from` in process `pid` to `into` in this process. Addresses that are not mapped, on either
/// side, are an error and no crash, because the kernel does the copy.
///
/// # Safety
/// `into .. into + nbytes` must be memory that the caller may overwrite, and that nothing else reads or writes now.
pub(crate) unsafe fn read_memory(pid: i32, from: usize, into: usize, nbytes: usize) -> io::Result<()> {
    let mut copied = 0;
    while copied < nbytes {
        let rest = nbytes - copied;
        let local = libc::iovec { iov_base: (into + copied) as *mut c_void, iov_len: rest };
        let remote = libc::iovec { iov_base: (from + copied) as *mut c_void, iov_len: rest };
        // SAFETY: one vector on each side; the local one is the caller's to overwrite.
        let count = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
        match usize::try_from(count) {
            Ok(0) => return Err(Error::other("the kernel read nothing")),
            Ok(count) => copied += count,
            Err(_) => {
                let error = Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

/// Sleeps until another process rings the bell, unless its value has changed from `seen` already.
pub(crate) fn wait_for_bell(bell: &AtomicU32, seen: u32, timeout: Duration) {
    let seconds = libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX);
    let timeout = libc::timespec { tv_sec: seconds, tv_nsec: timeout.subsec_nanos().into() };
    // SAFETY: the bell and the time-out outlive the call. Returning early or late is allowed: callers look again.
    unsafe { libc::syscall(libc::SYS_futex, bell.as_ptr(), libc::FUTEX_WAIT, seen, &raw const timeout) };
}

/// Wakes every process that sleeps at the bell.
pub(crate) fn ring(bell: &AtomicU32) {
    bell.fetch_add(1, std::sync::atomic::Ordering::Release);
    // SAFETY: the bell outlives the call.
    unsafe { libc::syscall(libc::SYS_futex, bell.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}
