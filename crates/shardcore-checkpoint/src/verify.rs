//! Where a checkpoint is damaged: every byte of every file is read.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::checksum::sum;
use crate::error::{CheckpointError, Result};
use crate::files::os;
use crate::read::{Checkpoint, check_size, read_index};

/// Bytes of a file that are not as they were written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The file.
    pub path: PathBuf,
    /// First byte of the smallest range that is known to hold the damage.
    pub start: u64,
    /// The byte after its last one.
    pub stop: u64,
    /// What is wrong, and with which tensor.
    pub what: String,
}

/// All that is wrong with the checkpoint in `folder`; nothing for a sound one.
///
/// # Errors
/// [`CheckpointError::Incomplete`] for one that was never finished; [`CheckpointError::Storage`] if the disk fails.
pub fn verify(folder: &Path) -> Result<Vec<Damage>> {
    let mut found = Vec::new();
    let index = match read_index(folder) {
        Ok(index) => index,
        Err(error) => {
            note(&mut found, Err(error), "")?;
            return Ok(found);
        }
    };
    for file in &index.files {
        note(&mut found, check_size(folder, file), "")?;
    }
    let Ok(checkpoint) = Checkpoint::open(folder) else { return Ok(found) };
    for file in 0..index.files.len() {
        note(&mut found, checkpoint.check_header(file), "")?;
    }
    checkpoint.run(checkpoint.all_jobs()?, |job, bytes| {
        let tensor = &index.tensors[job.tensor];
        note(&mut found, bytes.map(|_| ()), &format!(" (of {} {:?})", tensor.role, tensor.name))
    })?;
    Ok(found)
}

impl Checkpoint {
    /// Whether the header of a file is as it was written.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`], or [`CheckpointError::Storage`] if the disk fails.
    pub fn check_header(&self, file: usize) -> Result<()> {
        let path = self.path(file);
        let entry = &self.index().files[file];
        let mut header = vec![0; usize::try_from(entry.header_nbytes).unwrap_or(usize::MAX)];
        let opened = File::open(&path).map_err(os("open", &path))?;
        opened.read_exact_at(&mut header, 0).map_err(os("read", &path))?;
        if format!("{:08x}", sum(&header)) == entry.header_crc32 {
            return Ok(());
        }
        Err(CheckpointError::damaged(&path, 0..entry.header_nbytes, "the header is not as it was written"))
    }
}

/// Keeps a damage; any other error ends the search.
fn note(found: &mut Vec<Damage>, outcome: Result<()>, of: &str) -> Result<()> {
    match outcome {
        Ok(()) => Ok(()),
        Err(CheckpointError::Damaged { path, start, stop, what }) => {
            found.push(Damage { path, start, stop, what: what + of });
            Ok(())
        }
        Err(error) => Err(error),
    }
}
