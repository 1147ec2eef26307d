//! Where the bytes of a request lie: in one file, or in stripes over several.

use std::sync::Arc;

use crate::file::{DiskFile, FileId};
use crate::seam::Kind;

/// The largest run of pages that the page cache keeps as one unit (a "large folio" is at most a huge page).
const CACHE_UNIT: u64 = 2 << 20;

/// A place in storage at which a request starts.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    /// From byte `start` of a file on.
    File { file: Arc<DiskFile>, start: u64 },
    /// From byte `start` of a striped file on.
    Stripes { stripes: Arc<Stripes>, start: u64 },
}

/// Files that take turns: stripe `i` of `stripe_nbytes` bytes lies in file `i % files.len()`.
#[derive(Debug)]
pub(crate) struct Stripes {
    pub(crate) files: Vec<Arc<DiskFile>>,
    pub(crate) stripe_nbytes: u64,
}

/// A run of bytes inside one file.
#[derive(Clone, Debug)]
pub(crate) struct Extent<'a> {
    pub(crate) file: &'a Arc<DiskFile>,
    pub(crate) offset: u64,
    pub(crate) nbytes: u64,
}

/// What a request does to one file: enough to tell which requests must not run side by side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    file: FileId,
    start: u64,
    end: u64,
    direct: bool,
    cached: bool,
}

impl Target {
    /// The run that begins `at` bytes after the start, cut to `nbytes`.
    pub(crate) fn extent(&self, at: u64, nbytes: u64) -> Extent<'_> {
        match self {
            Self::File { file, start } => Extent { file, offset: start + at, nbytes },
            Self::Stripes { stripes, start } => {
                let (stripe, within) = stripes.split(start + at);
                let nbytes = nbytes.min(stripes.stripe_nbytes - within);
                Extent { file: stripes.file(stripe), offset: stripes.offset(stripe) + within, nbytes }
            }
        }
    }

    /// The ranges that a request of `nbytes` from the start on touches, one for each file.
    pub(crate) fn claims(&self, nbytes: u64) -> Vec<Claim> {
        if nbytes == 0 {
            return Vec::new();
        }
        match self {
            Self::File { file, start } => vec![Claim::new(file, *start, start + nbytes)],
            Self::Stripes { stripes, start } => stripes.claims(*start, start + nbytes),
        }
    }
}

impl Stripes {
    /// Bytes of each file when the whole has `nbytes`.
    pub(crate) fn file_nbytes(num_files: usize, stripe_nbytes: u64, nbytes: u64) -> Vec<u64> {
        let (full, rest) = (nbytes / stripe_nbytes, nbytes % stripe_nbytes);
        let count = num_files as u64;
        let of_file = |index: u64| {
            let stripes = full / count + u64::from(index < full % count);
            stripes * stripe_nbytes + if index == full % count { rest } else { 0 }
        };
        (0..count).map(of_file).collect()
    }

    /// (stripe, byte within it) of a byte of the whole.
    fn split(&self, byte: u64) -> (u64, u64) {
        (byte / self.stripe_nbytes, byte % self.stripe_nbytes)
    }

    fn count(&self) -> u64 {
        self.files.len() as u64
    }

    fn file(&self, stripe: u64) -> &Arc<DiskFile> {
        let index = usize::try_from(stripe % self.count()).unwrap_or_default();
        &self.files[index]
    }

    /// Where a stripe starts in its file.
    fn offset(&self, stripe: u64) -> u64 {
        stripe / self.count() * self.stripe_nbytes
    }

    /// A contiguous range of the whole is a contiguous range of every file.
    fn claims(&self, start: u64, end: u64) -> Vec<Claim> {
        let (first, from) = self.split(start);
        let (last, to) = self.split(end - 1);
        let of_file = |index: u64| {
            let first_here = first + (index + self.count() - first % self.count()) % self.count();
            let last_here = last.checked_sub((last % self.count() + self.count() - index) % self.count())?;
            if first_here > last_here {
                return None;
            }
            let start = self.offset(first_here) + if first_here == first { from } else { 0 };
            let end = self.offset(last_here) + if last_here == last { to + 1 } else { self.stripe_nbytes };
            Some(Claim::new(self.file(first_here), start, end))
        };
        (0..self.count()).filter_map(of_file).collect()
    }
}

impl Claim {
    fn new(file: &DiskFile, start: u64, end: u64) -> Self {
        let (direct, cached) = match file.alignment() {
            None => (false, true),
            Some(unit) => {
                let aligned = start.next_multiple_of(unit) < end / unit * unit;
                (aligned, !start.is_multiple_of(unit) || !end.is_multiple_of(unit))
            }
        };
        Self { file: file.id(), start, end, direct, cached }
    }

    /// Whether the order of the two, of which at least one writes, shows in the bytes.
    ///
    /// Ranges that share a byte do. So do ranges that are merely close, if one goes through the page cache and the other
    /// past it: the cache may hold the bytes of both as one unit and bring stale ones back.
    fn meets(&self, other: &Self) -> bool {
        if self.file != other.file {
            return false;
        }
        let mixed = (self.direct && other.cached) || (self.cached && other.direct);
        let unit = if mixed { CACHE_UNIT } else { 1 };
        self.start / unit < other.end.div_ceil(unit) && other.start / unit < self.end.div_ceil(unit)
    }
}

/// Whether a request must wait for an earlier one.
pub(crate) fn conflict(earlier: (Kind, &[Claim]), later: (Kind, &[Claim])) -> bool {
    if earlier.0 == Kind::Read && later.0 == Kind::Read {
        return false;
    }
    earlier.1.iter().any(|one| later.1.iter().any(|other| one.meets(other)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stripes_hold_every_byte_once() {
        for (count, stripe, nbytes) in [(1, 10, 35), (3, 10, 0), (3, 10, 30), (3, 10, 35), (4, 7, 100), (2, 8, 8)] {
            let sizes = Stripes::file_nbytes(count, stripe, nbytes);
            assert_eq!(sizes.iter().sum::<u64>(), nbytes, "{sizes:?}");
            let ends: Vec<u64> = (0..nbytes).map(|byte| (byte / stripe) % count as u64).collect();
            for (index, size) in sizes.iter().enumerate() {
                assert_eq!(ends.iter().filter(|&&file| file == index as u64).count() as u64, *size);
            }
        }
    }
}
