//! Why host memory or a disk did not do what was asked. A message says what, where, expected and found, and what to
//! do instead.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// The result of a storage operation.
pub type Result<T> = std::result::Result<T, StorageError>;

/// Host memory or a disk could not do what was asked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs)] // The messages document the fields.
pub enum StorageError {
    #[error("cannot {action} {}{}: {}{}", path.display(), At(*offset), reason(*errno), advice(*errno))]
    Os { action: &'static str, path: PathBuf, offset: Option<u64>, errno: i32 },

    #[error(
        "cannot read bytes {offset} to {end} of {}: the file ends at byte {file_end}; it is shorter than what was once written there, or something cut it meanwhile", path.display()
    )]
    EndOfFile { path: PathBuf, offset: u64, end: u64, file_end: u64 },

    #[error("cannot {action} {}: it is {found}, expected a regular file or a block device; give the path of a file", path.display())]
    NotAFile { action: &'static str, path: PathBuf, found: &'static str },

    #[error(
        "the file system of {} refuses O_DIRECT; use direct=\"auto\" or \"off\", or a path on a local file system such as ext4 or xfs", path.display()
    )]
    NoDirect { path: PathBuf },

    #[error(
        "{} has room for {free_nbytes} bytes and {wanted_nbytes} are needed there ({wanted_nbytes} - {free_nbytes} = {} missing); free space, or choose another path", path.display(), wanted_nbytes.saturating_sub(*free_nbytes)
    )]
    DiskFull { path: PathBuf, wanted_nbytes: u64, free_nbytes: u64 },

    #[error("{what} is {value}: expected {expected}")]
    OutOfRange { what: &'static str, value: i128, expected: String },

    #[error("{0}")]
    Memory(String),

    #[error("cannot register memory: {}; transfers go on without registration", reason(*errno))]
    NotRegistered { errno: i32 },

    #[error("io_uring is refused here: {}; use backend=\"auto\" or \"threads\"", reason(*errno))]
    NoRing { errno: i32 },

    #[error("the I/O engine is closed; make a new one")]
    Closed,

    #[error(
        "the I/O engine belongs to process {owner} and this is process {here}: its threads did not come along with the fork; make an engine in this process"
    )]
    Forked { owner: u32, here: u32 },

    #[error("internal error of the I/O engine: {0}; this is a fault of shardcore, please report it")]
    Internal(String),
}

impl StorageError {
    /// A failed system call on a path.
    #[must_use]
    pub fn os(action: &'static str, path: &Path, offset: Option<u64>, error: &io::Error) -> Self {
        Self::Os { action, path: path.to_owned(), offset, errno: error.raw_os_error().unwrap_or(libc::EINVAL) }
    }

    /// An argument outside its range.
    pub fn out_of_range(what: &'static str, value: impl Into<i128>, expected: impl Into<String>) -> Self {
        Self::OutOfRange { what, value: value.into(), expected: expected.into() }
    }

    /// The number that the operating system gives the fault; none where it was not the system that refused.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Os { errno, .. } | Self::NotRegistered { errno } | Self::NoRing { errno } => Some(*errno),
            Self::EndOfFile { .. } => Some(libc::ENODATA),
            Self::NotAFile { .. } | Self::NoDirect { .. } | Self::OutOfRange { .. } => Some(libc::EINVAL),
            Self::DiskFull { .. } => Some(libc::ENOSPC),
            Self::Memory(_) => Some(libc::ENOMEM),
            Self::Closed => Some(libc::EBADF),
            Self::Forked { .. } | Self::Internal(_) => None,
        }
    }

    /// The file or folder at fault.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Os { path, .. }
            | Self::EndOfFile { path, .. }
            | Self::NotAFile { path, .. }
            | Self::NoDirect { path }
            | Self::DiskFull { path, .. } => Some(path),
            _ => None,
        }
    }

    /// The byte of the file at which the fault showed.
    #[must_use]
    pub fn offset(&self) -> Option<u64> {
        match self {
            Self::Os { offset, .. } => *offset,
            Self::EndOfFile { file_end, .. } => Some(*file_end),
            _ => None,
        }
    }
}

struct At(Option<u64>);

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(offset) => write!(f, " at byte {offset}"),
            None => Ok(()),
        }
    }
}

fn reason(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

fn advice(errno: i32) -> &'static str {
    match errno {
        libc::ENOSPC | libc::EDQUOT => "; free space there, or choose another path",
        libc::EROFS | libc::EACCES | libc::EPERM => {
            "; choose a path that this user may write, or change its permissions"
        }
        libc::ENOENT => "; check the path: the file, or a folder on the way, is missing or was removed",
        libc::EIO => "; the device failed: see the kernel's log (dmesg), and do not trust what lies there",
        libc::EMFILE | libc::ENFILE => "; raise the limit on open files (ulimit -n), or wait for earlier requests",
        libc::EFBIG => "; raise the limit on file sizes (ulimit -f), or choose another file system",
        libc::ENOMEM => "; free memory, or use a smaller queue_depth or block_nbytes",
        _ => "",
    }
}
