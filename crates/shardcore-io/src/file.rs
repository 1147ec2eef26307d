//! Files, opened twice: once through the page cache and, where the file system allows it, once past it.

use std::collections::BTreeMap;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::error::{Result, StorageError};
use crate::memory::page_nbytes;
use crate::seam::{Faults, Kind};

/// Whether transfers go past the page cache (`O_DIRECT`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direct {
    /// Where the file system allows it.
    #[default]
    Auto,
    /// Always; a file system that refuses is an error. The unaligned ends of a request still use the page cache.
    On,
    /// Never.
    Off,
}

/// How an engine opens files.
#[derive(Clone, Copy)]
pub(crate) struct Access<'a> {
    pub(crate) direct: Direct,
    /// The largest transfer; a file system that wants larger units is used through the page cache.
    pub(crate) block_nbytes: usize,
    pub(crate) faults: &'a dyn Faults,
}

/// What a descriptor is for.
#[derive(Clone, Copy)]
pub(crate) enum Rights {
    Read,
    Write,
    Both,
}

impl Rights {
    fn options(self) -> OpenOptions {
        let mut options = OpenOptions::new();
        options.read(!matches!(self, Self::Write)).write(!matches!(self, Self::Read));
        options
    }
}

/// What tells files apart, whatever they are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    pub(crate) fn of(metadata: &Metadata) -> Self {
        Self { device: metadata.dev(), inode: metadata.ino() }
    }
}

/// An open file.
#[derive(Debug)]
pub(crate) struct DiskFile {
    path: PathBuf,
    id: FileId,
    cached: File,
    direct: Option<DirectFile>,
    /// The file system took `O_DIRECT` when the file was opened and refused a transfer later.
    refused: AtomicBool,
    strict: bool,
    open_files: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct DirectFile {
    file: File,
    offset_alignment: u64,
    memory_alignment: usize,
}

impl DiskFile {
    /// Opens `path`; a write makes the file if it is missing, and never cuts it.
    fn open(path: &Path, kind: Kind, access: Access<'_>, open_files: &Arc<AtomicUsize>) -> Result<Self> {
        let failed = |error: io::Error| StorageError::os(kind.verb(), path, None, &error);
        access.faults.open(path, false).map_err(failed)?;
        let rights = if kind == Kind::Read { Rights::Read } else { Rights::Write };
        let cached = rights.options().create(kind == Kind::Write).open(path).map_err(failed)?;
        let metadata = cached.metadata().map_err(failed)?;
        check_is_file(path, kind, &metadata)?;
        Self::from_open(path, cached, rights, access, open_files)
    }

    /// Wraps a file that is open already, and opens it again past the page cache.
    pub(crate) fn from_open(
        path: &Path,
        cached: File,
        rights: Rights,
        access: Access<'_>,
        open_files: &Arc<AtomicUsize>,
    ) -> Result<Self> {
        let failed = |error: io::Error| StorageError::os("open", path, None, &error);
        let id = FileId::of(&cached.metadata().map_err(failed)?);
        let past = match access.direct {
            Direct::Off => None,
            Direct::Auto | Direct::On => open_direct(path, rights, id, access).map_err(failed)?,
        };
        if past.is_none() && access.direct == Direct::On {
            return Err(StorageError::NoDirect { path: path.to_owned() });
        }
        open_files.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            path: path.to_owned(),
            id,
            cached,
            direct: past,
            refused: AtomicBool::new(false),
            strict: access.direct == Direct::On,
            open_files: Arc::clone(open_files),
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn id(&self) -> FileId {
        self.id
    }

    /// The descriptor for transfers past the page cache, or through it.
    pub(crate) fn descriptor(&self, direct: bool) -> RawFd {
        match &self.direct {
            Some(past) if direct => past.file.as_raw_fd(),
            _ => self.cached.as_raw_fd(),
        }
    }

    /// What offsets and lengths of direct transfers are multiples of; none if all goes through the page cache.
    ///
    /// At least a page, so that no page of the cache is touched by a direct transfer and by a buffered one of the same
    /// request.
    pub(crate) fn alignment(&self) -> Option<u64> {
        let past = self.direct.as_ref().filter(|_| !self.refused.load(Ordering::Relaxed))?;
        Some(past.offset_alignment.max(page_nbytes() as u64))
    }

    /// Whether direct transfers may use memory at this address as it is.
    pub(crate) fn takes(&self, address: usize) -> bool {
        self.direct.as_ref().is_none_or(|past| address.is_multiple_of(past.memory_alignment))
    }

    /// Notes that direct transfers do not work here after all; false if the caller insists on them.
    pub(crate) fn refuse_direct(&self) -> bool {
        self.refused.store(!self.strict, Ordering::Relaxed);
        !self.strict
    }
}

impl Drop for DiskFile {
    fn drop(&mut self) {
        self.open_files.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The files that unfinished requests use: requests on one file share its descriptors.
#[derive(Debug, Default)]
pub(crate) struct FileTable {
    files: Mutex<BTreeMap<(FileId, bool), Weak<DiskFile>>>,
    open_files: Arc<AtomicUsize>,
}

impl FileTable {
    /// The file at `path` as it is now: what was removed or replaced since an earlier request is not used again.
    pub(crate) fn open(&self, path: &Path, kind: Kind, access: Access<'_>) -> Result<Arc<DiskFile>> {
        // Before the opening, which would wait for ever on a pipe without a writer.
        if let Ok(metadata) = std::fs::metadata(path) {
            check_is_file(path, kind, &metadata)?;
            let key = (FileId::of(&metadata), kind == Kind::Write);
            let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(file) = files.get(&key).and_then(Weak::upgrade) {
                return Ok(file);
            }
        }
        let file = Arc::new(DiskFile::open(path, kind, access, &self.open_files)?);
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.retain(|_, file| file.strong_count() > 0);
        files.insert((file.id(), kind == Kind::Write), Arc::downgrade(&file));
        Ok(file)
    }

    /// Files open now.
    pub(crate) fn num_open(&self) -> usize {
        self.open_files.load(Ordering::Relaxed)
    }
}

fn check_is_file(path: &Path, kind: Kind, metadata: &Metadata) -> Result<()> {
    let is = metadata.file_type();
    let found = match () {
        () if is.is_file() || is.is_block_device() => return Ok(()),
        () if is.is_dir() => "a folder",
        () if is.is_fifo() => "a pipe",
        () if is.is_socket() => "a socket",
        () => "a device without a size",
    };
    Err(StorageError::NotAFile { action: kind.verb(), path: path.to_owned(), found })
}

/// Opens the file past the page cache; none where its file system does not do that.
fn open_direct(path: &Path, rights: Rights, id: FileId, access: Access<'_>) -> io::Result<Option<DirectFile>> {
    let open = || rights.options().custom_flags(libc::O_DIRECT).open(path);
    let file = match access.faults.open(path, true).and_then(|()| open()) {
        Ok(file) => file,
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => return Ok(None),
        Err(error) => return Err(error),
    };
    // Something may have put another file there between the two openings.
    if FileId::of(&file.metadata()?) != id {
        return Ok(None);
    }
    let (memory_alignment, offset_alignment) = alignments(&file).unwrap_or((page_nbytes(), page_nbytes() as u64));
    let fits = offset_alignment <= access.block_nbytes as u64;
    Ok(fits.then_some(DirectFile { file, offset_alignment, memory_alignment }))
}

/// (memory, offset) alignment that direct transfers need, where the kernel says so: `statx(2)`, `STATX_DIOALIGN`.
fn alignments(file: &File) -> Option<(usize, u64)> {
    // SAFETY: statx is plain data, for which zeros are a valid value.
    let mut status: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is an empty C string, so that the call asks about the descriptor; `status` is filled by it.
    let failed = unsafe {
        libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, &raw mut status)
    } != 0;
    let known = !failed && status.stx_mask & libc::STATX_DIOALIGN != 0;
    let (memory, offset) = (status.stx_dio_mem_align as usize, u64::from(status.stx_dio_offset_align));
    (known && memory > 0 && offset > 0).then_some((memory, offset))
}
