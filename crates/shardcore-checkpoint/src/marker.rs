//! The file that makes a folder a checkpoint. It says which index it stands for, so damage to either shows.

use std::path::Path;

use crate::error::{CheckpointError, Result};
use crate::files;

/// Its name.
pub(crate) const COMPLETE: &str = "complete";
/// The name of the index.
pub(crate) const INDEX: &str = "index.json";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Marker {
    /// Checkpoints of a run are numbered from 1.
    pub(crate) sequence: u64,
    pub(crate) index_nbytes: u64,
    pub(crate) index_sum: u32,
}

impl Marker {
    pub(crate) fn text(self) -> String {
        let Self { sequence, index_nbytes, index_sum } = self;
        format!("shardcore checkpoint 1\nsequence {sequence}\nindex {index_nbytes} {index_sum:08x}\n")
    }

    /// The marker of a folder. None where there is none, or an empty one: the checkpoint was never finished.
    pub(crate) fn read(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(COMPLETE);
        let Some(bytes) = files::read_if_there(&path)?.filter(|bytes| !bytes.is_empty()) else { return Ok(None) };
        let text = String::from_utf8_lossy(&bytes);
        let marker = parse(&text).filter(|marker| marker.text() == text);
        let damaged = || CheckpointError::damaged(&path, 0..bytes.len() as u64, "it is not the mark of a checkpoint");
        marker.map(Some).ok_or_else(damaged)
    }
}

fn parse(text: &str) -> Option<Marker> {
    let mut lines = text.lines().skip(1);
    let sequence = lines.next()?.strip_prefix("sequence ")?.parse().ok()?;
    let (nbytes, sum) = lines.next()?.strip_prefix("index ")?.split_once(' ')?;
    let index_sum = u32::from_str_radix(sum, 16).ok()?;
    Some(Marker { sequence, index_nbytes: nbytes.parse().ok()?, index_sum })
}
