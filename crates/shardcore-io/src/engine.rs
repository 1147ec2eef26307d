//! The asynchronous engine: requests in, bytes moved, one handle for each request.

use std::path::Path;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::completion::{Completion, Handle};
use crate::error::{Result, StorageError};
use crate::file::{Access, Direct, FileTable};
use crate::memory::{HostBuffer, IoMemory, page_nbytes};
use crate::queue::{Queue, Registration, Waker};
use crate::request::Request;
use crate::seam::{Faults, Kind, NoFaults};
use crate::swap::SwapFile;
use crate::target::Target;
use crate::threads::{Threads, spawn};
use crate::uring::Driver;

/// Transfers of one engine that may be under way at once.
const MAX_QUEUE_DEPTH: usize = 4096;
/// The largest block: the kernel moves at most 2 GiB in one call.
const MAX_BLOCK: usize = 1 << 30;

/// What carries transfers out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// The kernel's submission and completion queues (`io_uring(7)`).
    IoUring,
    /// Threads that call `pread` and `pwrite`.
    Threads,
}

impl Backend {
    /// `"io_uring"` or `"threads"`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::IoUring => "io_uring",
            Self::Threads => "threads",
        }
    }
}

/// How an engine works.
#[derive(Clone, Debug)]
pub struct Options {
    queue_depth: usize,
    block_nbytes: usize,
    /// The back end; none for the best that this machine allows.
    pub backend: Option<Backend>,
    /// Whether to go past the page cache.
    pub direct: Direct,
    /// Faults to inject, in tests.
    pub faults: Arc<dyn Faults>,
}

impl Options {
    /// `queue_depth` transfers at once, of `block_nbytes` at most, on the best back end.
    ///
    /// # Errors
    /// [`StorageError::OutOfRange`]: the depth is 1 to 4096, a block whole pages up to 1 GiB.
    pub fn new(queue_depth: usize, block_nbytes: usize) -> Result<Self> {
        if !(1..=MAX_QUEUE_DEPTH).contains(&queue_depth) {
            let expected = format!("1 to {MAX_QUEUE_DEPTH} transfers at once");
            return Err(StorageError::out_of_range("queue_depth", queue_depth as i128, expected));
        }
        let page = page_nbytes();
        if block_nbytes == 0 || block_nbytes > MAX_BLOCK || !block_nbytes.is_multiple_of(page) {
            let expected = format!("a multiple of {page} bytes (a page), from {page} to {MAX_BLOCK}");
            return Err(StorageError::out_of_range("block_nbytes", block_nbytes as i128, expected));
        }
        let faults = Arc::new(NoFaults);
        Ok(Self { queue_depth, block_nbytes, backend: None, direct: Direct::Auto, faults })
    }
}

/// Where a request reads or writes.
#[derive(Clone, Copy)]
pub enum Place<'a> {
    /// The file at a path. A write makes it if it is missing, and never cuts it.
    Path(&'a Path),
    /// A preallocated file.
    Swap(&'a SwapFile),
}

/// Reads and writes of any size at any offset, many at a time. Any thread may submit.
///
/// Requests on the same bytes of a file take effect in the order in which they were submitted; all others in any order.
/// A finished write is in the file for every reader; it is on stable storage only after an `fsync`.
pub struct IoEngine {
    queue: Arc<Queue>,
    files: FileTable,
    options: Options,
    backend: Backend,
    workers: Mutex<Workers>,
    owner: u32,
}

enum Workers {
    Ring(JoinHandle<()>),
    Threads(Threads),
    Ended,
}

impl IoEngine {
    /// Starts the engine: one thread for an `io_uring`; threads of the other back end start as requests come.
    ///
    /// # Errors
    /// [`StorageError::NoRing`] if an `io_uring` is asked for by name and refused.
    pub fn new(options: Options) -> Result<Self> {
        let ring = match options.backend {
            Some(Backend::Threads) => None,
            Some(Backend::IoUring) => Some(start_ring(&options)?),
            None => start_ring(&options).ok(),
        };
        let (queue, workers, backend) = if let Some((queue, thread)) = ring {
            (queue, Workers::Ring(thread), Backend::IoUring)
        } else {
            let queue = Arc::new(Queue::new(options.block_nbytes, Arc::clone(&options.faults), None));
            (queue, Workers::Threads(Threads::new(options.queue_depth)), Backend::Threads)
        };
        let owner = std::process::id();
        Ok(Self { queue, files: FileTable::default(), options, backend, workers: Mutex::new(workers), owner })
    }

    /// What carries transfers out.
    #[must_use]
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// Transfers at once.
    #[must_use]
    pub fn queue_depth(&self) -> usize {
        self.options.queue_depth
    }

    /// Bytes of a transfer at most.
    #[must_use]
    pub fn block_nbytes(&self) -> usize {
        self.options.block_nbytes
    }

    /// Starts to move all bytes of `memory` from or to `place`, `offset` bytes behind its start.
    ///
    /// What goes wrong with the file shows in the handle.
    ///
    /// # Errors
    /// [`StorageError::OutOfRange`] for bytes that no file has, [`StorageError::Closed`] and [`StorageError::Forked`].
    pub fn submit(&self, kind: Kind, place: Place<'_>, offset: u64, memory: impl IoMemory) -> Result<Handle> {
        self.check_owner()?;
        let nbytes = memory.nbytes() as u64;
        check_range(place, offset, nbytes)?;
        let completion = Arc::new(Completion::default());
        let handle = Handle::new(Arc::clone(&completion), self.owner);
        let target = match self.target(kind, place, offset) {
            Ok(target) => target,
            Err(error) => {
                self.queue.push_failed(&completion, error)?;
                return Ok(handle);
            }
        };
        let claims = target.claims(nbytes);
        self.grow(memory.nbytes())?;
        self.queue.push(Request { kind, target, memory: Box::new(memory), claims, completion })?;
        Ok(handle)
    }

    /// Lets the kernel look up and pin the buffer once instead of at each transfer. The engine keeps it until it is
    /// closed.
    ///
    /// # Errors
    /// [`StorageError::NotRegistered`] where the kernel refuses (`ulimit -l`, say) or there is no ring: transfers work
    /// all the same.
    pub fn register(&self, buffer: &Arc<HostBuffer>) -> Result<()> {
        self.check_owner()?;
        if self.backend == Backend::Threads {
            return Err(StorageError::NotRegistered { errno: libc::EOPNOTSUPP });
        }
        let completion = Arc::new(Completion::default());
        let registration = Registration { buffer: Arc::clone(buffer), completion: Arc::clone(&completion) };
        self.queue.push_registration(registration)?;
        Handle::new(completion, self.owner).wait()
    }

    /// Waits until another request may come without piling up requests or open files; false after `timeout`.
    #[must_use]
    pub fn wait_for_room(&self, timeout: Duration) -> bool {
        let max_open = max_open_files();
        let ready = |num_active| Queue::has_room(num_active) && (num_active == 0 || self.files.num_open() < max_open);
        self.owner != std::process::id() || self.queue.wait_until(timeout, ready)
    }

    /// Waits until all requests have ended; false after `timeout`.
    #[must_use]
    pub fn wait_idle(&self, timeout: Duration) -> bool {
        self.owner != std::process::id() || self.queue.wait_until(timeout, |num_active| num_active == 0)
    }

    /// Waits for all requests and ends the threads. Again and again is fine.
    ///
    /// # Errors
    /// That of a request which failed and for which nobody waited: no error is lost.
    pub fn close(&self) -> Result<()> {
        self.check_owner()?;
        self.queue.close();
        let workers = std::mem::replace(&mut *self.lock_workers(), Workers::Ended);
        let threads = match workers {
            Workers::Ring(thread) => vec![thread],
            Workers::Threads(threads) => threads.into_running(),
            Workers::Ended => Vec::new(),
        };
        for thread in threads {
            // A thread that panicked has told its requests.
            let _ = thread.join();
        }
        self.queue.take_unseen().map_or(Ok(()), Err)
    }

    /// How the engine opens files.
    pub(crate) fn access(&self) -> Access<'_> {
        Access {
            direct: self.options.direct,
            block_nbytes: self.options.block_nbytes,
            faults: self.options.faults.as_ref(),
        }
    }

    fn target(&self, kind: Kind, place: Place<'_>, offset: u64) -> Result<Target> {
        match place {
            Place::Path(path) => Ok(Target::File { file: self.files.open(path, kind, self.access())?, start: offset }),
            Place::Swap(swap) => Ok(swap.target(offset)),
        }
    }

    fn grow(&self, nbytes: usize) -> Result<()> {
        match &mut *self.lock_workers() {
            Workers::Threads(threads) => threads.grow(&self.queue, nbytes.div_ceil(self.options.block_nbytes)),
            Workers::Ring(_) | Workers::Ended => Ok(()),
        }
    }

    fn lock_workers(&self) -> std::sync::MutexGuard<'_, Workers> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Before any lock: a lock that another thread held at the fork is held for ever in the child.
    fn check_owner(&self) -> Result<()> {
        match std::process::id() {
            here if here == self.owner => Ok(()),
            here => Err(StorageError::Forked { owner: self.owner, here }),
        }
    }
}

impl Drop for IoEngine {
    /// Waits for all requests: the kernel must not write into memory that somebody else has by then.
    fn drop(&mut self) {
        if self.close().is_err_and(|error| matches!(error, StorageError::Forked { .. })) {
            // The threads are the parent's: there is nothing to wait for here.
            let workers = self.workers.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(std::mem::replace(workers, Workers::Ended));
        }
    }
}

/// Starts the thread of a ring, and waits until the kernel has said yes or no.
fn start_ring(options: &Options) -> Result<(Arc<Queue>, JoinHandle<()>)> {
    let refused = |error: &std::io::Error| StorageError::NoRing { errno: error.raw_os_error().unwrap_or(libc::ENOSYS) };
    let waker = Waker::new().map_err(|error| refused(&error))?;
    let descriptor = waker.descriptor();
    let queue = Arc::new(Queue::new(options.block_nbytes, Arc::clone(&options.faults), Some(waker)));
    let (sender, receiver) = mpsc::channel();
    let (theirs, queue_depth) = (Arc::clone(&queue), options.queue_depth);
    let thread = spawn(move || match Driver::new(theirs, descriptor, queue_depth) {
        Ok(driver) => {
            let _ = sender.send(Ok(()));
            driver.run();
        }
        Err(error) => {
            let _ = sender.send(Err(error));
        }
    });
    let thread = thread.map_err(|error| StorageError::Internal(format!("no thread can be started: {error}")))?;
    match receiver.recv() {
        Ok(Ok(())) => Ok((queue, thread)),
        Ok(Err(error)) => Err(refused(&error)),
        Err(_) => Err(StorageError::Internal("the ring's thread ended at its start".to_owned())),
    }
}

fn check_range(place: Place<'_>, offset: u64, nbytes: u64) -> Result<()> {
    let (limit, of) = match place {
        Place::Path(_) => (i64::MAX.unsigned_abs(), "a file"),
        Place::Swap(swap) => (swap.nbytes(), "this swap file"),
    };
    let end = offset.checked_add(nbytes).filter(|&end| end <= limit);
    end.map(drop).ok_or_else(|| {
        let expected = format!("offset + {nbytes} bytes of data inside {of} ({limit} bytes)");
        StorageError::out_of_range("offset", offset, expected)
    })
}

/// Files that may be open at once: two descriptors each, and most of the limit is left to the program.
fn max_open_files() -> usize {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid rlimit that the call fills.
    let failed = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0;
    let descriptors = if failed { 1024 } else { usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX) };
    (descriptors / 8).max(1)
}
