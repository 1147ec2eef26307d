//! A request, and how it is cut into transfers: whole blocks past the page cache, unaligned ends through it.

use std::io;
use std::sync::Arc;

use crate::completion::Completion;
use crate::error::StorageError;
use crate::file::DiskFile;
use crate::memory::IoMemory;
use crate::seam::{Faults, Kind, Transfer, Verdict};
use crate::target::{Claim, Target};

/// How often in a row a transfer may report "try again" before that counts as a fault.
const MAX_RETRIES: u32 = 1000;

/// What a caller asked for. It owns its memory until the last transfer has ended.
pub(crate) struct Request {
    pub(crate) kind: Kind,
    pub(crate) target: Target,
    pub(crate) memory: Box<dyn IoMemory>,
    pub(crate) claims: Vec<Claim>,
    pub(crate) completion: Arc<Completion>,
}

/// A request that is not finished.
pub(crate) struct Active {
    pub(crate) request: Arc<Request>,
    /// Bytes that have been cut into pieces.
    cut_nbytes: usize,
    /// Unaligned ends of a write: they go through the page cache after everything that goes past it.
    ends: Vec<Piece>,
    in_flight: usize,
    /// The ends alone are left, and transfers are under way that must end first.
    pub(crate) waits: bool,
    pub(crate) error: Option<StorageError>,
}

/// One transfer, or what a short one has left over.
pub(crate) struct Piece {
    pub(crate) id: u64,
    pub(crate) request: Arc<Request>,
    pub(crate) file: Arc<DiskFile>,
    /// First byte in the file.
    pub(crate) offset: u64,
    /// First byte in the request's memory.
    at: usize,
    pub(crate) nbytes: usize,
    pub(crate) direct: bool,
    retries: u32,
}

/// What follows a transfer.
pub(crate) enum Next {
    Done,
    Again(Piece),
    Failed(StorageError),
}

impl Active {
    pub(crate) fn new(request: Arc<Request>) -> Self {
        Self { request, cut_nbytes: 0, ends: Vec::new(), in_flight: 0, waits: false, error: None }
    }

    pub(crate) fn claims(&self) -> (Kind, &[Claim]) {
        (self.request.kind, &self.request.claims)
    }

    /// The next transfer; none if all are under way, or must wait for those that are.
    pub(crate) fn cut(&mut self, id: u64, block_nbytes: usize) -> Option<Piece> {
        if self.error.is_some() {
            return None;
        }
        while self.cut_nbytes < self.request.memory.nbytes() {
            let piece = Piece::cut(id, &self.request, self.cut_nbytes, block_nbytes);
            self.cut_nbytes += piece.nbytes;
            if self.request.kind == Kind::Write && !piece.direct && piece.file.alignment().is_some() {
                self.ends.push(piece);
                continue;
            }
            self.in_flight += 1;
            return Some(piece);
        }
        self.waits = self.in_flight > 0 && !self.ends.is_empty();
        let piece = if self.waits { None } else { self.ends.pop() }?;
        self.in_flight += 1;
        Some(piece)
    }

    /// Notes that a transfer failed. Of several errors the one at the lowest byte is told: pieces are cut in order, so that
    /// is where the fault begins.
    pub(crate) fn fail(&mut self, error: StorageError) {
        if self.error.as_ref().is_none_or(|known| error.offset() < known.offset()) {
            self.error = Some(error);
        }
    }

    /// Whether the rest of a short transfer is still of use: after an error only if it may show an earlier one.
    pub(crate) fn wants(&self, rest: &Piece) -> bool {
        self.error.as_ref().is_none_or(|error| Some(rest.offset) < error.offset())
    }

    /// Counts a transfer that ended for good. True once nothing of the request is under way.
    pub(crate) fn end_piece(&mut self) -> bool {
        self.in_flight -= 1;
        self.in_flight == 0
    }

    /// Whether the request has nothing left to do, given that nothing is under way.
    pub(crate) fn is_finished(&self) -> bool {
        let cut = self.cut_nbytes == self.request.memory.nbytes() && self.ends.is_empty();
        self.in_flight == 0 && (self.error.is_some() || cut)
    }
}

impl Piece {
    fn cut(id: u64, request: &Arc<Request>, at: usize, block_nbytes: usize) -> Self {
        let left = request.memory.nbytes() - at;
        let extent = request.target.extent(at as u64, left.min(block_nbytes) as u64);
        let block = usize::try_from(extent.nbytes).unwrap_or(left);
        let (nbytes, direct) = match extent.file.alignment() {
            None => (block, false),
            Some(unit) => first_cut(extent.offset, block, unit),
        };
        let file = Arc::clone(extent.file);
        Self { id, request: Arc::clone(request), file, offset: extent.offset, at, nbytes, direct, retries: 0 }
    }

    /// Where the transfer's bytes lie in memory.
    pub(crate) fn memory(&self) -> *mut u8 {
        self.request.memory.start().wrapping_add(self.at)
    }

    /// Whether a direct transfer must go through memory that is better aligned.
    pub(crate) fn needs_bounce(&self) -> bool {
        self.direct && !self.file.takes(self.memory().addr())
    }

    /// How many bytes to ask the kernel for, unless a test wants the transfer to fail.
    pub(crate) fn ask(&self, faults: &dyn Faults) -> io::Result<usize> {
        let Self { offset, nbytes, direct, .. } = *self;
        let transfer = Transfer { kind: self.request.kind, path: self.file.path(), offset, nbytes, direct };
        match faults.transfer(&transfer) {
            Verdict::Whole => Ok(nbytes),
            Verdict::Short(fewer) => Ok(fewer.min(nbytes)),
            Verdict::Fail(errno) => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// Judges how the transfer ended. A short one goes on where it stopped.
    pub(crate) fn advance(mut self, outcome: io::Result<usize>) -> Next {
        match outcome {
            Ok(moved) if moved == self.nbytes => Next::Done,
            Ok(0) => Next::Failed(self.stopped()),
            Ok(moved) if moved < self.nbytes => {
                self.offset += moved as u64;
                self.at += moved;
                self.nbytes -= moved;
                self.retries = 0;
                let aligned = |unit: u64| self.offset.is_multiple_of(unit) && (self.nbytes as u64).is_multiple_of(unit);
                self.direct &= self.file.alignment().is_some_and(aligned);
                Next::Again(self)
            }
            Ok(moved) => Next::Failed(StorageError::Internal(format!(
                "{moved} bytes moved where {} were asked for",
                self.nbytes
            ))),
            Err(error) => self.failed(&error),
        }
    }

    fn failed(mut self, error: &io::Error) -> Next {
        match error.raw_os_error() {
            Some(libc::EINTR | libc::EAGAIN) if self.retries < MAX_RETRIES => {
                self.retries += 1;
                Next::Again(self)
            }
            Some(libc::EINVAL | libc::EOPNOTSUPP) if self.direct && self.file.refuse_direct() => {
                self.direct = false;
                Next::Again(self)
            }
            _ => Next::Failed(StorageError::os(self.request.kind.verb(), self.file.path(), Some(self.offset), error)),
        }
    }

    /// The error of a transfer that moved nothing.
    fn stopped(&self) -> StorageError {
        let path = self.file.path();
        match self.request.kind {
            Kind::Read => StorageError::EndOfFile {
                path: path.to_owned(),
                offset: self.offset - self.moved_before(),
                end: self.offset + self.nbytes as u64,
                file_end: self.offset,
            },
            Kind::Write => {
                let error = io::Error::from_raw_os_error(libc::EIO);
                StorageError::os("write", path, Some(self.offset), &error)
            }
        }
    }

    /// Bytes of this request that lie before the piece in the same file, as far as one can count back.
    fn moved_before(&self) -> u64 {
        match &self.request.target {
            Target::File { .. } => self.at as u64,
            Target::Stripes { .. } => 0,
        }
    }
}

/// (bytes, whether direct) of the first transfer of a run of `block` bytes at `offset`.
fn first_cut(offset: u64, block: usize, unit: u64) -> (usize, bool) {
    // Alignments are powers of two of a few KiB at most, far inside usize.
    let unit = usize::try_from(unit).unwrap_or(usize::MAX);
    let past = usize::try_from(offset % unit as u64).unwrap_or(0);
    if past > 0 {
        (block.min(unit - past), false)
    } else if block >= unit {
        (block / unit * unit, true)
    } else {
        (block, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_cut_off_and_whole_units_stay_together() {
        assert_eq!(first_cut(0, 8192, 4096), (8192, true));
        assert_eq!(first_cut(0, 8191, 4096), (4096, true));
        assert_eq!(first_cut(4096, 4095, 4096), (4095, false));
        assert_eq!(first_cut(1, 8192, 4096), (4095, false));
        assert_eq!(first_cut(4095, 8192, 4096), (1, false));
        assert_eq!(first_cut(10, 5, 4096), (5, false));
    }
}
