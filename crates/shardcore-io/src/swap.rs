//! Preallocated files for data that only this process needs, on one disk or striped over several.
//!
//! A file has its space from the start, so a disk that is too small shows before training. It loses its name as soon as
//! it is made: whatever becomes of the process, its space is free afterwards. A process that is killed in the moment
//! between leaves a name behind, which tells who made it; the next one that uses the folder removes it.

use std::ffi::{CString, OsStr};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::engine::IoEngine;
use crate::error::{Result, StorageError};
use crate::file::{Access, DiskFile, FileId, Rights};
use crate::memory::page_nbytes;
use crate::target::{Stripes, Target};

const PREFIX: &str = "shardcore-";
const SUFFIX: &str = ".swap";

/// Numbers the files of this process.
static NEXT_FILE: AtomicU64 = AtomicU64::new(0);

/// A file of fixed size without a name, which ends with this value or with the process.
#[derive(Debug)]
pub struct SwapFile {
    stripes: Arc<Stripes>,
    nbytes: u64,
    swept: Vec<PathBuf>,
}

impl SwapFile {
    /// Makes a file of `nbytes` in `folders`, which are made if missing, and removes what killed processes left there.
    ///
    /// With several folders, on a disk each, stripes of `stripe_nbytes` alternate between them.
    ///
    /// # Errors
    /// [`StorageError::DiskFull`] with the arithmetic, [`StorageError::OutOfRange`] for no folder or a stripe that is
    /// not whole pages, and what the file system says.
    pub fn create(engine: &IoEngine, folders: &[PathBuf], nbytes: u64, stripe_nbytes: u64) -> Result<Self> {
        let page = page_nbytes() as u64;
        if folders.is_empty() {
            return Err(StorageError::out_of_range("the number of folders", 0, "at least 1"));
        }
        if stripe_nbytes == 0 || !stripe_nbytes.is_multiple_of(page) || stripe_nbytes > i64::MAX.unsigned_abs() {
            let expected = format!("a multiple of {page} bytes (a page)");
            return Err(StorageError::out_of_range("stripe_nbytes", stripe_nbytes, expected));
        }
        if nbytes > i64::MAX.unsigned_abs() {
            return Err(StorageError::out_of_range("nbytes", nbytes, "0 to 2^63 - 1 bytes"));
        }
        let mut swept = Vec::new();
        for folder in folders {
            fs::create_dir_all(folder).map_err(|error| StorageError::os("make the folder", folder, None, &error))?;
            swept.extend(sweep(folder)?);
        }
        let sizes = Stripes::file_nbytes(folders.len(), stripe_nbytes, nbytes);
        let files = folders.iter().zip(sizes).map(|(folder, nbytes)| allocate(folder, nbytes, engine.access()));
        let files = files.collect::<Result<Vec<_>>>()?;
        Ok(Self { stripes: Arc::new(Stripes { files, stripe_nbytes }), nbytes, swept })
    }

    /// Bytes of the file.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// What killed processes had left in the folders, and is removed.
    #[must_use]
    pub fn swept(&self) -> &[PathBuf] {
        &self.swept
    }

    pub(crate) fn target(&self, start: u64) -> Target {
        Target::Stripes { stripes: Arc::clone(&self.stripes), start }
    }
}

/// Removes the files in `folder` that no living process owns.
///
/// A living owner holds a lock on its file, which the kernel releases however the process ends. Where the file system
/// has no locks, the process number and start time in the name decide.
///
/// # Errors
/// What the file system says about the folder. A file that somebody else removes meanwhile is no error.
pub fn sweep(folder: &Path) -> Result<Vec<PathBuf>> {
    let failed = |error: io::Error| StorageError::os("list", folder, None, &error);
    let mut swept = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let Some(owner) = path.file_name().and_then(Owner::of_name) else { continue };
        let Ok(file) = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(&path)
        else {
            continue;
        };
        let dead = match try_lock(&file) {
            Ok(locked) => locked || !owner.lives(),
            Err(_) => !owner.lives(),
        };
        if dead && fs::remove_file(&path).is_ok() {
            swept.push(path);
        }
    }
    Ok(swept)
}

/// Makes, allocates and locks a file, opens it past the page cache too, and takes its name away.
fn allocate(folder: &Path, nbytes: u64, access: Access<'_>) -> Result<Arc<DiskFile>> {
    loop {
        let path = folder.join(Owner::this().name(NEXT_FILE.fetch_add(1, Ordering::Relaxed)));
        let failed = |error: io::Error| StorageError::os("make", &path, None, &error);
        access.faults.open(&path, false).map_err(failed)?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let file = options.open(&path).map_err(failed)?;
        let named = Named(path.clone());
        // Without locks in this file system the name alone tells the owner. A sweep may hold this one's, and remove it.
        if matches!(try_lock(&file), Ok(false)) {
            continue;
        }
        let id = FileId::of(&file.metadata().map_err(failed)?);
        // Or it has come and gone between the making and the lock.
        if !fs::symlink_metadata(&path).is_ok_and(|metadata| FileId::of(&metadata) == id) {
            continue;
        }
        reserve(&file, folder, nbytes)?;
        let file = DiskFile::from_open(&path, file, Rights::Both, access, &Arc::new(AtomicUsize::new(0)))?;
        drop(named);
        return Ok(Arc::new(file));
    }
}

/// A name that goes when the value goes, also on the way out of an error.
struct Named(PathBuf);

impl Drop for Named {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Gives an open file in `folder` its space, and its length.
///
/// # Errors
/// [`StorageError::DiskFull`] with the arithmetic; [`StorageError::Os`] for whatever else the system refuses.
pub fn reserve(file: &File, folder: &Path, nbytes: u64) -> Result<()> {
    let free = free_nbytes(folder);
    let full = |free_nbytes| StorageError::DiskFull { path: folder.to_owned(), wanted_nbytes: nbytes, free_nbytes };
    if let Some(free_nbytes) = free.filter(|&free| free < nbytes) {
        return Err(full(free_nbytes));
    }
    if nbytes == 0 {
        return Ok(());
    }
    let failed = |error: io::Error| StorageError::os("allocate a file in", folder, None, &error);
    let length = libc::off_t::try_from(nbytes).unwrap_or(libc::off_t::MAX);
    // SAFETY: a call on an open descriptor without pointers.
    let error = match unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, length) } {
        0 => return Ok(()),
        _ => io::Error::last_os_error(),
    };
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => Err(full(free_nbytes(folder).unwrap_or(0))),
        // Some network file systems allocate nothing ahead: the file gets its length, and writes report a full disk.
        Some(libc::EOPNOTSUPP) => file.set_len(nbytes).map_err(failed),
        _ => Err(failed(error)),
    }
}

/// Bytes that this user may still write in the folder's file system; none if it does not say.
fn free_nbytes(folder: &Path) -> Option<u64> {
    let path = CString::new(folder.as_os_str().as_bytes()).ok()?;
    let mut status = MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: the path is a C string, and `status` is filled unless the call fails.
    let status = unsafe {
        if libc::statvfs(path.as_ptr(), status.as_mut_ptr()) != 0 {
            return None;
        }
        status.assume_init()
    };
    status.f_bavail.checked_mul(status.f_frsize)
}

/// Takes the lock that a living owner holds; false if somebody has it.
fn try_lock(file: &File) -> io::Result<bool> {
    // SAFETY: a call on an open descriptor without pointers.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
        return Ok(true);
    }
    match io::Error::last_os_error() {
        error if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        error => Err(error),
    }
}

/// The process that a file belongs to. The start time tells it from a later process of the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Owner {
    pid: u32,
    start_ticks: u64,
}

impl Owner {
    fn this() -> Self {
        let pid = std::process::id();
        Self { pid, start_ticks: start_ticks(pid).unwrap_or(0) }
    }

    fn name(self, number: u64) -> String {
        format!("{PREFIX}{}-{}-{number}{SUFFIX}", self.pid, self.start_ticks)
    }

    fn of_name(name: &OsStr) -> Option<Self> {
        let mut fields = name.to_str()?.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.split('-');
        let owner = Self { pid: fields.next()?.parse().ok()?, start_ticks: fields.next()?.parse().ok()? };
        let number: Option<u64> = fields.next().and_then(|number| number.parse().ok());
        (number.is_some() && fields.next().is_none()).then_some(owner)
    }

    fn lives(self) -> bool {
        start_ticks(self.pid) == Some(self.start_ticks)
    }
}

/// When a process started, in clock ticks since boot: field 22 of `/proc/PID/stat`; none for one that is gone.
fn start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the command's name in brackets, which may hold anything.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_tells_its_owner() {
        let owner = Owner::this();
        assert!(owner.lives());
        assert_eq!(Owner::of_name(OsStr::new(&owner.name(7))), Some(owner));
        assert!(!Owner { start_ticks: owner.start_ticks + 1, ..owner }.lives());
        for other in ["shardcore-1-2.swap", "shardcore-1-2-3-4.swap", "shardcore-x-2-3.swap", "a.swap", "shardcore-"] {
            assert_eq!(Owner::of_name(OsStr::new(other)), None, "{other}");
        }
    }
}
