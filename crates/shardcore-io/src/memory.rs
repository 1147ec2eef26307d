//! Host memory of exactly the size asked for, aligned to pages.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::{io, ptr, slice};

use crate::error::{Result, StorageError};
use crate::limits::{HostLimits, amount};

/// Bytes of a huge page; its size differs on few machines, where the kernel then uses normal pages.
const HUGE_PAGE: usize = 2 << 20;

/// Memory that an engine may read from or write to.
///
/// # Safety
/// For as long as the value lives, `start()` and `nbytes()` describe the same memory, valid for reads and writes; and
/// nobody else writes it, nor reads it while a request reads from disk into it. The value may be dropped on any thread.
pub unsafe trait IoMemory: Send + Sync + 'static {
    /// The first byte.
    fn start(&self) -> *mut u8;
    /// Number of bytes.
    fn nbytes(&self) -> usize;
}

/// How a [`HostBuffer`] is made.
#[derive(Clone, Copy, Debug)]
pub struct HostOptions {
    /// Align to huge pages and ask the kernel for them; where it has none, or a buffer is smaller than one, normal pages
    /// do. The buffer takes no more memory for it.
    pub huge_pages: bool,
    /// Keep the pages from being swapped out (`mlock`).
    pub lock: bool,
    /// What the request is checked against.
    pub limits: HostLimits,
}

impl HostOptions {
    /// Normal pages, not locked, checked against the limits of this moment.
    #[must_use]
    pub fn now() -> Self {
        Self { huge_pages: false, lock: false, limits: HostLimits::now() }
    }
}

/// A private mapping of exactly so many bytes, rounded up to whole pages and no further. Zeroed, and committed when it
/// is made, so that memory that is not there shows at the start and not as a kill in the middle of training.
#[derive(Debug)]
pub struct HostBuffer {
    start: NonNull<u8>,
    nbytes: usize,
    committed_nbytes: usize,
}

// SAFETY: the mapping belongs to the value alone and is tied to no thread; all access goes through raw pointers whose
// users state why they may.
unsafe impl Send for HostBuffer {}
// SAFETY: as above; no method of `&self` touches the bytes, except `bytes`, which is unsafe for that reason.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// Maps and commits `nbytes`. `what` names the buffer in an error.
    ///
    /// # Errors
    /// [`StorageError::Memory`] with the arithmetic if the machine, a container or `ulimit -l` has less.
    pub fn new(what: &str, nbytes: usize, options: &HostOptions) -> Result<Self> {
        if nbytes == 0 {
            return Ok(Self { start: NonNull::dangling(), nbytes, committed_nbytes: 0 });
        }
        options.limits.check(what, nbytes as u64, options.lock)?;
        let failed = |step: &str, error: &io::Error| {
            StorageError::Memory(format!(
                "{what} needs {} of host memory: {step} failed: {error}",
                amount(nbytes as u64)
            ))
        };
        let committed_nbytes = nbytes
            .checked_next_multiple_of(page_nbytes())
            .filter(|&rounded| isize::try_from(rounded).is_ok())
            .ok_or_else(|| failed("mmap", &io::Error::from_raw_os_error(libc::ENOMEM)))?;
        let huge_pages = options.huge_pages && nbytes >= HUGE_PAGE;
        let alignment = if huge_pages { HUGE_PAGE.max(page_nbytes()) } else { page_nbytes() };
        let start = map_aligned(committed_nbytes, alignment).map_err(|error| failed("mmap", &error))?;
        let buffer = Self { start, nbytes, committed_nbytes };
        if huge_pages {
            // SAFETY: the range is this mapping. Advice that is not followed changes nothing.
            unsafe { libc::madvise(start.as_ptr().cast(), committed_nbytes, libc::MADV_HUGEPAGE) };
        }
        buffer.commit().map_err(|error| failed("committing it", &error))?;
        if options.lock {
            // SAFETY: the range is this mapping, which `munmap` unlocks when it ends.
            let status = unsafe { libc::mlock(start.as_ptr().cast(), committed_nbytes) };
            if status != 0 {
                return Err(failed("mlock (see `ulimit -l`)", &io::Error::last_os_error()));
            }
        }
        Ok(buffer)
    }

    /// The first byte; page-aligned, and huge-page-aligned if that was asked for.
    #[must_use]
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Bytes asked for.
    #[must_use]
    pub fn nbytes(&self) -> usize {
        self.nbytes
    }

    /// Bytes taken from the machine: `nbytes` in whole pages.
    #[must_use]
    pub fn committed_nbytes(&self) -> usize {
        self.committed_nbytes
    }

    /// The bytes.
    ///
    /// # Safety
    /// Nobody writes them while the slice lives.
    #[must_use]
    pub unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is valid for `nbytes` (a dangling pointer for none) and lives as long as `self`.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.nbytes) }
    }

    /// Makes the kernel back every page now.
    fn commit(&self) -> io::Result<()> {
        let start = self.start.as_ptr();
        // SAFETY: the range is this mapping; populating leaves its contents as they are.
        let status = unsafe { libc::madvise(start.cast(), self.committed_nbytes, libc::MADV_POPULATE_WRITE) };
        let error = if status == 0 { return Ok(()) } else { io::Error::last_os_error() };
        if error.raw_os_error() != Some(libc::EINVAL) {
            return Err(error);
        }
        for offset in (0..self.committed_nbytes).step_by(page_nbytes()) {
            // SAFETY: inside the mapping, which no one else knows yet. Kernels before 5.14 have no MADV_POPULATE_WRITE.
            unsafe { start.add(offset).write_volatile(0) };
        }
        Ok(())
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if self.committed_nbytes > 0 {
            // SAFETY: the mapping is this value's own, and it is not used after.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.committed_nbytes) };
        }
    }
}

/// A part of a shared [`HostBuffer`] that one request reads or writes.
#[derive(Debug)]
pub struct HostSlice {
    buffer: Arc<HostBuffer>,
    range: Range<usize>,
}

impl HostSlice {
    /// The bytes `range` of `buffer`.
    ///
    /// # Safety
    /// As for [`IoMemory`]: while the slice lives, nobody else writes these bytes, nor reads them if a request does.
    ///
    /// # Errors
    /// [`StorageError::OutOfRange`] for a range that is not inside the buffer.
    pub unsafe fn new(buffer: Arc<HostBuffer>, range: Range<usize>) -> Result<Self> {
        if range.start > range.end || range.end > buffer.nbytes() {
            let expected = format!("a range inside the buffer of {} bytes", buffer.nbytes());
            return Err(StorageError::out_of_range("the end of the slice", range.end as i128, expected));
        }
        Ok(Self { buffer, range })
    }
}

// SAFETY: the range is inside the mapping, which the slice keeps alive; the caller of `new` promised the rest.
unsafe impl IoMemory for HostSlice {
    fn start(&self) -> *mut u8 {
        self.buffer.start().wrapping_add(self.range.start)
    }

    fn nbytes(&self) -> usize {
        self.range.len()
    }
}

/// Bytes of a page of memory, and so of a page of the page cache.
pub(crate) fn page_nbytes() -> usize {
    // SAFETY: a query without arguments that point anywhere.
    let nbytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(nbytes).unwrap_or(4096)
}

/// A private anonymous mapping; what a larger alignment needs besides is given back at once.
fn map_aligned(nbytes: usize, alignment: usize) -> io::Result<NonNull<u8>> {
    let slack = alignment - page_nbytes();
    let total = nbytes.checked_add(slack).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at a place of the kernel's choice touches no memory that exists.
    let mapped =
        unsafe { libc::mmap(ptr::null_mut(), total, protection, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) };
    if mapped == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let mapped = mapped.cast::<u8>();
    let before = mapped.addr().next_multiple_of(alignment) - mapped.addr();
    let start = mapped.wrapping_add(before);
    for (edge, edge_nbytes) in [(mapped, before), (start.wrapping_add(nbytes), slack - before)] {
        if edge_nbytes > 0 {
            // SAFETY: whole pages of the mapping just made, outside the part that is kept.
            unsafe { libc::munmap(edge.cast(), edge_nbytes) };
        }
    }
    NonNull::new(start).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(huge_pages: bool) -> HostOptions {
        HostOptions { huge_pages, ..HostOptions::now() }
    }

    #[test]
    fn a_buffer_commits_whole_pages_and_no_more() {
        for nbytes in [0, 1, 4095, 4096, 4097, (129 << 20) + 1] {
            let buffer = HostBuffer::new("a test", nbytes, &options(false)).unwrap();
            assert_eq!(buffer.nbytes(), nbytes);
            assert_eq!(buffer.committed_nbytes(), nbytes.next_multiple_of(page_nbytes()));
            // SAFETY: nobody else knows the buffer.
            assert!(unsafe { buffer.bytes() }.iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn huge_pages_align_and_take_nothing_more() {
        let buffer = HostBuffer::new("a test", (3 << 20) + 5, &options(true)).unwrap();
        assert_eq!(buffer.start().addr() % HUGE_PAGE, 0);
        assert_eq!(buffer.committed_nbytes(), (3 << 20) + page_nbytes());
    }

    #[test]
    fn what_the_machine_lacks_is_refused_with_the_sum() {
        let limits = HostLimits { available_nbytes: Some(1 << 20), ..HostLimits::default() };
        let refused = HostBuffer::new("a pool", 3 << 20, &HostOptions { limits, ..HostOptions::now() }).unwrap_err();
        assert!(refused.to_string().contains("2.00 MiB (2097152 bytes) missing"), "{refused}");
        let endless = HostOptions { limits: HostLimits::default(), ..HostOptions::now() };
        assert!(matches!(HostBuffer::new("a pool", usize::MAX, &endless), Err(StorageError::Memory(_))));
        assert!(matches!(HostBuffer::new("a pool", 1 << 62, &endless), Err(StorageError::Memory(_))));
    }

    #[test]
    fn a_slice_stays_inside_its_buffer() {
        let buffer = Arc::new(HostBuffer::new("a test", 10, &options(false)).unwrap());
        // SAFETY: no slice is used.
        let slice = |range| unsafe { HostSlice::new(Arc::clone(&buffer), range) };
        assert!(slice(0..11).is_err());
        assert_eq!(slice(3..10).unwrap().nbytes(), 7);
    }
}
