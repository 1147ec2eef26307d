//! Memory with one owner at a time: whoever fills or reads it, or the request that moves it.
//!
//! Between requests its bytes are plain slices, so code that computes on what it reads and writes needs no `unsafe`.

use std::sync::Arc;

use crate::completion::Handle;
use crate::engine::{IoEngine, Place};
use crate::error::{Result, StorageError};
use crate::memory::{HostBuffer, HostOptions, HostSlice};
use crate::seam::Kind;

/// Page-aligned memory that belongs to its holder alone.
#[derive(Debug)]
pub struct Block(HostBuffer);

impl Block {
    /// Maps `nbytes`, zeroed. `what` names it in an error.
    ///
    /// # Errors
    /// [`StorageError::Memory`] where the machine has less.
    pub fn new(what: &str, nbytes: usize) -> Result<Self> {
        HostBuffer::new(what, nbytes, &HostOptions::now()).map(Self)
    }

    /// Number of bytes.
    #[must_use]
    pub fn nbytes(&self) -> usize {
        self.0.nbytes()
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: writing them takes `&mut self`.
        unsafe { self.0.bytes() }
    }

    /// The bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is valid for so many bytes and is this value's own; no other reference to it lives.
        unsafe { std::slice::from_raw_parts_mut(self.0.start(), self.0.nbytes()) }
    }
}

/// A block that a request has.
#[derive(Debug)]
pub struct Loan {
    handle: Handle,
    buffer: Arc<HostBuffer>,
}

impl Loan {
    /// Waits for the end of the request and gives the block back.
    ///
    /// # Errors
    /// What went wrong with the request; the block is gone then.
    pub fn wait(self) -> Result<Block> {
        self.handle.wait()?;
        // A request lets go of its memory before anybody is told of its end.
        let buffer = Arc::into_inner(self.buffer);
        buffer.map(Block).ok_or_else(|| StorageError::Internal("a finished request still holds its memory".to_owned()))
    }
}

impl IoEngine {
    /// Starts to move the first `nbytes` of `block` from or to `place`, as [`IoEngine::submit`] does.
    ///
    /// # Errors
    /// As [`IoEngine::submit`], and [`StorageError::OutOfRange`] where the block has fewer bytes.
    pub fn lend(&self, kind: Kind, place: Place<'_>, offset: u64, block: Block, nbytes: usize) -> Result<Loan> {
        let buffer = Arc::new(block.0);
        // SAFETY: the loan holds the only other reference, and makes a block of it once the request has ended.
        let memory = unsafe { HostSlice::new(Arc::clone(&buffer), 0..nbytes)? };
        let handle = self.submit(kind, place, offset, memory)?;
        Ok(Loan { handle, buffer })
    }
}
