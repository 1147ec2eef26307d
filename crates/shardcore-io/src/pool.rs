//! Pools: one mapping whose size is known at the start, handed out piece by piece.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Result, StorageError};
use crate::limits::amount;
use crate::memory::{HostBuffer, HostOptions};

/// Where pieces of a pool start: a multiple of this fits every CPU instruction, and the memory alignment that disks
/// ask of `O_DIRECT`.
pub const PIECE_ALIGNMENT: usize = 512;

/// Exactly sized memory, handed out from its start to its end; no piece is ever given back before the pool ends.
#[derive(Debug)]
pub struct HostPool {
    buffer: Arc<HostBuffer>,
    taken_nbytes: Mutex<usize>,
}

impl HostPool {
    /// Maps and commits `nbytes`.
    ///
    /// # Errors
    /// Those of [`HostBuffer::new`].
    pub fn new(nbytes: usize, options: &HostOptions) -> Result<Self> {
        let buffer = Arc::new(HostBuffer::new("a host pool", nbytes, options)?);
        Ok(Self { buffer, taken_nbytes: Mutex::new(0) })
    }

    /// Bytes that a pool of these pieces needs; none beyond what a `usize` counts.
    #[must_use]
    pub fn required(pieces: &[usize]) -> Option<usize> {
        pieces
            .iter()
            .try_fold(0_usize, |end, &nbytes| end.checked_next_multiple_of(PIECE_ALIGNMENT)?.checked_add(nbytes))
    }

    /// Hands out the next `nbytes`, aligned to [`PIECE_ALIGNMENT`]. No two pieces share a byte.
    ///
    /// # Errors
    /// [`StorageError::Memory`] with the arithmetic if the pool has less left.
    pub fn take(&self, nbytes: usize) -> Result<Range<usize>> {
        let mut taken = self.taken_nbytes.lock().unwrap_or_else(PoisonError::into_inner);
        let start = taken.next_multiple_of(PIECE_ALIGNMENT).min(self.buffer.nbytes());
        let left = self.buffer.nbytes() - start;
        if nbytes > left {
            return Err(StorageError::Memory(format!(
                "the host pool of {} has {} taken and {} left: {} do not fit ({} missing); make the pool as large as \
                 the sum of its pieces, each rounded up to {PIECE_ALIGNMENT} bytes",
                amount(self.buffer.nbytes() as u64),
                amount(*taken as u64),
                amount(left as u64),
                amount(nbytes as u64),
                amount((nbytes - left) as u64),
            )));
        }
        *taken = start + nbytes;
        Ok(start..start + nbytes)
    }

    /// The memory of the pool.
    #[must_use]
    pub fn buffer(&self) -> &Arc<HostBuffer> {
        &self.buffer
    }

    /// Bytes handed out so far, with the gaps between pieces.
    #[must_use]
    pub fn taken_nbytes(&self) -> usize {
        *self.taken_nbytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_aligned_disjoint_and_fill_the_pool_to_the_byte() {
        let pieces = [1, 0, 513, 4096, 7];
        let total = HostPool::required(&pieces).unwrap();
        let pool = HostPool::new(total, &HostOptions::now()).unwrap();
        let mut end = 0;
        for nbytes in pieces {
            let range = pool.take(nbytes).unwrap();
            assert!(range.start.is_multiple_of(PIECE_ALIGNMENT) && range.start >= end && range.len() == nbytes);
            end = range.end;
        }
        assert_eq!(end, total);
        let full = pool.take(1).unwrap_err().to_string();
        assert!(full.contains("1 bytes missing"), "{full}");
        assert!(pool.take(0).is_ok());
        assert_eq!(HostPool::required(&[usize::MAX, 1]), None);
    }
}
