//! Small files and folders: every step that must survive a crash is synced.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use shardcore_io::StorageError;

use crate::error::Result;

/// Turns a system error on `path` into ours.
pub(crate) fn os(action: &'static str, path: &Path) -> impl Fn(io::Error) -> StorageError {
    move |error| StorageError::os(action, path, None, &error)
}

/// The bytes of a file; none if there is no such file.
pub(crate) fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
        Err(error) => Err(os("read", path)(error).into()),
    }
}

/// Puts `bytes` at `path`, whole or not at all: written aside, synced, renamed.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut aside = path.as_os_str().to_owned();
    aside.push(".tmp");
    let aside = Path::new(&aside);
    let mut file =
        OpenOptions::new().write(true).create(true).truncate(true).open(aside).map_err(os("write", aside))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(os("write", aside))?;
    rename(aside, path)
}

/// Renames, and makes the renaming survive a crash.
pub(crate) fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(os("rename", from))?;
    to.parent().map_or(Ok(()), sync_folder)
}

/// Makes the names in a folder survive a crash.
pub(crate) fn sync_folder(folder: &Path) -> Result<()> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    File::open(folder).and_then(|file| file.sync_all()).map_err(os("sync", folder))?;
    Ok(())
}

/// Removes a folder with all that is in it; nothing if it is not there.
pub(crate) fn remove_folder(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(os("remove", folder)(error).into()),
        _ => Ok(()),
    }
}
