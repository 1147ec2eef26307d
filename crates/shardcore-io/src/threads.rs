//! The back end of threads: each carries one transfer out at a time, with `pread` and `pwrite`.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use crate::error::{Result, StorageError};
use crate::memory::{HostBuffer, HostOptions};
use crate::queue::Queue;
use crate::request::Piece;
use crate::seam::Kind;

/// Threads that are started as requests ask for them, `max_threads` at most.
pub(crate) struct Threads {
    max_threads: usize,
    running: Vec<JoinHandle<()>>,
}

impl Threads {
    pub(crate) fn new(max_threads: usize) -> Self {
        Self { max_threads, running: Vec::new() }
    }

    /// Makes sure that a request of so many pieces finds threads.
    ///
    /// # Errors
    /// [`StorageError::Internal`] if not even one thread can be started.
    pub(crate) fn grow(&mut self, queue: &Arc<Queue>, num_pieces: usize) -> Result<()> {
        let missing = num_pieces.saturating_sub(queue.idle_threads()).min(self.max_threads - self.running.len());
        for _ in 0..missing {
            let queue = Arc::clone(queue);
            match spawn(move || run(&queue)) {
                Ok(thread) => self.running.push(thread),
                Err(_) if !self.running.is_empty() => break,
                Err(error) => return Err(StorageError::Internal(format!("no thread can be started: {error}"))),
            }
        }
        Ok(())
    }

    pub(crate) fn into_running(self) -> Vec<JoinHandle<()>> {
        self.running
    }
}

/// Starts a thread that leaves signals to the threads of the program, which wait for them.
pub(crate) fn spawn(body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name("shardcore-io".to_owned()).spawn(move || {
        // SAFETY: `sigset_t` is plain data that `sigfillset` fills; the mask is that of this thread alone.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
        }
        body();
    })
}

/// Works until the engine is closed and all is done.
fn run(queue: &Queue) {
    if catch_unwind(AssertUnwindSafe(|| work(queue))).is_err() {
        queue.break_off(&StorageError::Internal("a thread of the engine panicked".to_owned()));
    }
}

fn work(queue: &Queue) {
    let mut bounce = None;
    while let Some(piece) = queue.next_blocking() {
        let outcome = piece.ask(queue.faults.as_ref()).and_then(|nbytes| {
            if piece.needs_bounce() {
                let memory = bounce_memory(&mut bounce, queue.block_nbytes)?;
                through(&piece, nbytes, memory)
            } else {
                transfer(&piece, piece.memory(), nbytes)
            }
        });
        queue.finish(piece, outcome);
    }
}

fn bounce_memory(bounce: &mut Option<HostBuffer>, nbytes: usize) -> io::Result<*mut u8> {
    let buffer = match bounce.take() {
        Some(buffer) => buffer,
        None => bounce_buffer(nbytes)?,
    };
    Ok(bounce.insert(buffer).start())
}

/// Memory for transfers whose own memory is not aligned well enough.
pub(crate) fn bounce_buffer(nbytes: usize) -> io::Result<HostBuffer> {
    let options = HostOptions { huge_pages: true, ..HostOptions::now() };
    let made = HostBuffer::new("copying unaligned memory", nbytes, &options);
    made.map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))
}

/// Moves a piece through memory that is aligned well enough.
fn through(piece: &Piece, nbytes: usize, memory: *mut u8) -> io::Result<usize> {
    if piece.request.kind == Kind::Write {
        // SAFETY: both have at least `nbytes` (a block at most), and they are different mappings.
        unsafe { memory.copy_from_nonoverlapping(piece.memory(), nbytes) };
    }
    let moved = transfer(piece, memory, nbytes)?;
    if piece.request.kind == Kind::Read {
        // SAFETY: as above; no more bytes moved than were asked for.
        unsafe { piece.memory().copy_from_nonoverlapping(memory, moved) };
    }
    Ok(moved)
}

fn transfer(piece: &Piece, memory: *mut u8, nbytes: usize) -> io::Result<usize> {
    let descriptor = piece.file.descriptor(piece.direct);
    let offset = libc::off_t::try_from(piece.offset).map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))?;
    // SAFETY: `memory` has `nbytes`, and the piece keeps both it and the file alive during the call.
    let moved = unsafe {
        match piece.request.kind {
            Kind::Read => libc::pread(descriptor, memory.cast(), nbytes, offset),
            Kind::Write => libc::pwrite(descriptor, memory.cast_const().cast(), nbytes, offset),
        }
    };
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}
