//! The seam between the engine and the kernel, where tests put faults that a healthy machine does not show.

use std::fmt::Debug;
use std::io;
use std::path::Path;

/// What a request does to its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// From the file into memory.
    Read,
    /// From memory into the file.
    Write,
}

impl Kind {
    pub(crate) fn verb(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// One system call that is about to move bytes.
#[derive(Clone, Copy, Debug)]
pub struct Transfer<'a> {
    /// Its direction.
    pub kind: Kind,
    /// The file, by the path that the caller gave.
    pub path: &'a Path,
    /// First byte in the file.
    pub offset: u64,
    /// Number of bytes asked for.
    pub nbytes: usize,
    /// Whether it goes past the page cache.
    pub direct: bool,
}

/// What becomes of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is carried out.
    Whole,
    /// It is carried out, but for its first bytes only, as the kernel may do at any time.
    Short(usize),
    /// It is not carried out, and reports this error number.
    Fail(i32),
}

/// Faults to inject. Every method leaves things as they are unless it is overridden.
///
/// # Errors
/// The system call that the method stands before fails with the error returned, and is not made.
#[allow(clippy::missing_errors_doc, reason = "one rule for all methods, above")]
pub trait Faults: Debug + Send + Sync {
    /// Before an `io_uring` is set up.
    fn ring(&self) -> io::Result<()> {
        Ok(())
    }

    /// Before memory is registered with an `io_uring`.
    fn register(&self) -> io::Result<()> {
        Ok(())
    }

    /// Before a file is opened; `direct` for the opening with `O_DIRECT`.
    fn open(&self, path: &Path, direct: bool) -> io::Result<()> {
        let _ = (path, direct);
        Ok(())
    }

    /// Before a transfer, on either back end.
    fn transfer(&self, transfer: &Transfer<'_>) -> Verdict {
        let _ = transfer;
        Verdict::Whole
    }
}

/// No faults: the engine as users get it.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoFaults;

impl Faults for NoFaults {}
