//! The back end of an `io_uring`: one thread keeps up to `queue_depth` transfers in the kernel.

use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use io_uring::{IoUring, Probe, opcode, squeue, types};

use crate::error::StorageError;
use crate::memory::HostBuffer;
use crate::queue::{Queue, Registration};
use crate::request::Piece;
use crate::seam::Kind;
use crate::threads::bounce_buffer;

/// Marks the completion of the poll of the eventfd that wakes the thread.
const WAKE: u64 = u64::MAX;
/// The kernel registers at most 1 GiB as one buffer.
const MAX_REGISTERED_NBYTES: usize = 1 << 30;
/// Places in the kernel's table of registered buffers: 256 GiB.
const NUM_REGISTERED: u16 = 256;

/// The state of the ring's thread.
pub(crate) struct Driver {
    queue: Arc<Queue>,
    ring: IoUring,
    waker: RawFd,
    waits_for_wake: bool,
    slots: Vec<Option<InFlight>>,
    free: Vec<usize>,
    registered: Registered,
    /// One block for each slot, made when a piece first needs one.
    bounce: Option<Arc<HostBuffer>>,
}

struct InFlight {
    piece: Piece,
    bounced: bool,
}

/// Memory that the kernel has looked up and pinned once, for all transfers.
#[derive(Default)]
struct Registered {
    /// Whether the kernel has a table; it is asked once.
    table: Option<bool>,
    /// Address ranges; the position is the kernel's index.
    ranges: Vec<Range<usize>>,
    buffers: Vec<Arc<HostBuffer>>,
}

impl Driver {
    /// Sets the ring up, in the thread that will use it.
    ///
    /// # Errors
    /// The kernel has no `io_uring`, forbids it, or has one that cannot read and write.
    pub(crate) fn new(queue: Arc<Queue>, waker: RawFd, queue_depth: usize) -> io::Result<Self> {
        queue.faults.ring()?;
        // One entry more, for the waker.
        let entries = u32::try_from(queue_depth + 1).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
        // One thread submits and reaps, so the kernel may leave its work to the moment when that thread waits. Older
        // kernels do not know these flags.
        let ring = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(entries);
        let ring = ring.or_else(|_| IoUring::new(entries))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [opcode::Read::CODE, opcode::Write::CODE, opcode::ReadFixed::CODE, opcode::WriteFixed::CODE];
        if !needed.iter().all(|&code| probe.is_supported(code)) {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        Ok(Self {
            queue,
            ring,
            waker,
            waits_for_wake: false,
            slots: (0..queue_depth).map(|_| None).collect(),
            free: (0..queue_depth).rev().collect(),
            registered: Registered::default(),
            bounce: None,
        })
    }

    /// Works until the engine is closed and all is done.
    pub(crate) fn run(mut self) {
        let queue = Arc::clone(&self.queue);
        let ended = catch_unwind(AssertUnwindSafe(|| self.work()));
        let error = match ended {
            Ok(Ok(())) => return,
            Ok(Err(error)) => StorageError::Internal(format!("io_uring_enter failed: {error}")),
            Err(_) => StorageError::Internal("the ring's thread panicked".to_owned()),
        };
        queue.break_off(&error);
        // The kernel may still write to memory that these name: none of it is ever freed.
        std::mem::forget(self);
    }

    fn work(&mut self) -> io::Result<()> {
        while !self.queue.is_over() {
            for registration in self.queue.take_registrations() {
                self.register(&registration);
            }
            self.sleep_on_waker()?;
            self.fill()?;
            // The last request may have failed before it reached the kernel; nobody would end the wait.
            if self.queue.is_over() {
                break;
            }
            match self.ring.submit_and_wait(1) {
                Err(error) if !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {
                    return Err(error);
                }
                _ => self.reap(),
            }
        }
        Ok(())
    }

    /// Makes sure that the next wake-up ends the wait.
    fn sleep_on_waker(&mut self) -> io::Result<()> {
        if self.waits_for_wake {
            return Ok(());
        }
        // A poll, not a read: no memory of ours is in the kernel's hands when the thread ends.
        let entry = opcode::PollAdd::new(types::Fd(self.waker), libc::POLLIN as u32).build();
        // SAFETY: the entry points nowhere.
        unsafe { self.push(&entry.user_data(WAKE))? };
        self.waits_for_wake = true;
        Ok(())
    }

    /// Hands pieces to the kernel while there are slots.
    fn fill(&mut self) -> io::Result<()> {
        while let Some(&slot) = self.free.last() {
            let Some(piece) = self.queue.next() else { break };
            let prepared = piece.ask(self.queue.faults.as_ref()).and_then(|nbytes| {
                let memory = self.memory(&piece, slot)?;
                Ok((nbytes, memory))
            });
            let (nbytes, memory) = match prepared {
                Ok(prepared) => prepared,
                Err(error) => {
                    self.queue.finish(piece, Err(error));
                    continue;
                }
            };
            let bounced = memory != piece.memory();
            if bounced && piece.request.kind == Kind::Write {
                // SAFETY: the slot's block has at least `nbytes`, and it is another mapping than the piece's memory.
                unsafe { memory.copy_from_nonoverlapping(piece.memory(), nbytes) };
            }
            let entry = self.entry(&piece, memory, nbytes).user_data(slot as u64);
            // SAFETY: the slot keeps the piece, and with it memory and file, until the completion; the driver keeps
            // the bounce memory.
            unsafe { self.push(&entry)? };
            self.free.pop();
            self.slots[slot] = Some(InFlight { piece, bounced });
        }
        Ok(())
    }

    /// Where the kernel shall read or write: the piece's own memory, or the slot's block where that is not aligned.
    fn memory(&mut self, piece: &Piece, slot: usize) -> io::Result<*mut u8> {
        if !piece.needs_bounce() {
            return Ok(piece.memory());
        }
        let block_nbytes = self.queue.block_nbytes;
        let buffer = if let Some(buffer) = &self.bounce {
            buffer
        } else {
            let buffer = Arc::new(bounce_buffer(self.slots.len() * block_nbytes)?);
            // Registration spares work; the transfers do without it where it is refused.
            let _ = self.registered.add(&self.ring, &buffer, &self.queue);
            self.bounce.insert(buffer)
        };
        Ok(buffer.start().wrapping_add(slot * block_nbytes))
    }

    fn entry(&self, piece: &Piece, memory: *mut u8, nbytes: usize) -> squeue::Entry {
        let (file, offset) = (types::Fd(piece.file.descriptor(piece.direct)), piece.offset);
        // A block has at most 1 GiB.
        let length = u32::try_from(nbytes).unwrap_or(u32::MAX);
        match (piece.request.kind, self.registered.index(memory.addr(), nbytes)) {
            (Kind::Read, None) => opcode::Read::new(file, memory, length).offset(offset).build(),
            (Kind::Write, None) => opcode::Write::new(file, memory, length).offset(offset).build(),
            (Kind::Read, Some(index)) => opcode::ReadFixed::new(file, memory, length, index).offset(offset).build(),
            (Kind::Write, Some(index)) => opcode::WriteFixed::new(file, memory, length, index).offset(offset).build(),
        }
    }

    /// # Safety
    /// What the entry points to stays valid until its completion.
    unsafe fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        // SAFETY: the caller's promise.
        if unsafe { self.ring.submission().push(entry) }.is_ok() {
            return Ok(());
        }
        // The queue holds one entry for each slot and the waker, so it is full only if the kernel took none: make it.
        self.ring.submit()?;
        // SAFETY: the caller's promise.
        let pushed = unsafe { self.ring.submission().push(entry) };
        pushed.map_err(|_| io::Error::from_raw_os_error(libc::EBUSY))
    }

    fn reap(&mut self) {
        let ended: Vec<(u64, i32)> = self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        for (token, result) in ended {
            if token == WAKE {
                self.queue.woken();
                self.waits_for_wake = false;
                continue;
            }
            let slot = usize::try_from(token).unwrap_or(usize::MAX);
            let Some(InFlight { piece, bounced }) = self.slots.get_mut(slot).and_then(Option::take) else { continue };
            self.free.push(slot);
            let outcome = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
            if let (Ok(moved), true, Kind::Read) = (&outcome, bounced, piece.request.kind)
                && let Some(buffer) = &self.bounce
            {
                let block = buffer.start().wrapping_add(slot * self.queue.block_nbytes);
                let nbytes = (*moved).min(piece.nbytes);
                // SAFETY: no more bytes moved than the block and the piece's memory hold; they are different mappings.
                unsafe { piece.memory().copy_from_nonoverlapping(block, nbytes) };
            }
            self.queue.finish(piece, outcome);
        }
    }

    fn register(&mut self, registration: &Registration) {
        let outcome = self.registered.add(&self.ring, &registration.buffer, &self.queue);
        let refused =
            |error: io::Error| StorageError::NotRegistered { errno: error.raw_os_error().unwrap_or(libc::EIO) };
        registration.completion.set(outcome.map_err(refused));
    }
}

impl Registered {
    /// Registers a buffer, in parts that the kernel takes. The memory stays until the ring is gone.
    fn add(&mut self, ring: &IoUring, buffer: &Arc<HostBuffer>, queue: &Queue) -> io::Result<()> {
        if buffer.nbytes() == 0 || self.index(buffer.start().addr(), 1).is_some() {
            return Ok(());
        }
        queue.faults.register()?;
        if !*self.table.get_or_insert_with(|| ring.submitter().register_buffers_sparse(NUM_REGISTERED.into()).is_ok()) {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        // Kept even if a later part is refused: those before it are the kernel's until the ring is gone.
        self.buffers.push(Arc::clone(buffer));
        for offset in (0..buffer.nbytes()).step_by(MAX_REGISTERED_NBYTES) {
            let start = buffer.start().wrapping_add(offset);
            let nbytes = MAX_REGISTERED_NBYTES.min(buffer.nbytes() - offset);
            let part = libc::iovec { iov_base: start.cast(), iov_len: nbytes };
            let index = u32::try_from(self.ranges.len()).unwrap_or(u32::MAX);
            // SAFETY: the part lies in the buffer, which is kept until the ring is gone.
            unsafe { ring.submitter().register_buffers_update(index, &[part], None)? };
            self.ranges.push(start.addr()..start.addr() + nbytes);
        }
        Ok(())
    }

    /// The kernel's index of the part that holds all these bytes.
    fn index(&self, start: usize, nbytes: usize) -> Option<u16> {
        let holds = |range: &Range<usize>| range.start <= start && start + nbytes <= range.end;
        self.ranges.iter().position(holds).and_then(|index| u16::try_from(index).ok())
    }
}
