//! The file that makes a folder a checkpoint. It says which index it stands for, so damage to either shows, and has a
//! checksum of its own, so that it shows in which of them.

use std::path::Path;

use crate::checksum::sum;
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
        let lines = self.lines(2);
        format!("{lines}sum {:08x}\n", sum(lines.as_bytes()))
    }

    fn lines(self, version: u32) -> String {
        let Self { sequence, index_nbytes, index_sum } = self;
        format!("shardcore checkpoint {version}\nsequence {sequence}\nindex {index_nbytes} {index_sum:08x}\n")
    }

    /// The marker with this text, also in its first version, which had no checksum.
    fn of(text: &str) -> Option<Self> {
        parse(text).filter(|marker| marker.text() == text || marker.lines(1) == text)
    }

    /// The marker of a folder. None where there is none, or an empty one: the checkpoint was never finished.
    pub(crate) fn read(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(COMPLETE);
        let Some(bytes) = files::read_if_there(&path)?.filter(|bytes| !bytes.is_empty()) else { return Ok(None) };
        let text = String::from_utf8_lossy(&bytes);
        let damaged = || CheckpointError::damaged(&path, 0..bytes.len() as u64, "it is not the mark of a checkpoint");
        Self::of(&text).map(Some).ok_or_else(damaged)
    }
}

fn parse(text: &str) -> Option<Marker> {
    let mut lines = text.lines().skip(1);
    let sequence = lines.next()?.strip_prefix("sequence ")?.parse().ok()?;
    let (nbytes, sum) = lines.next()?.strip_prefix("index ")?.split_once(' ')?;
    let index_sum = u32::from_str_radix(sum, 16).ok()?;
    Some(Marker { sequence, index_nbytes: nbytes.parse().ok()?, index_sum })
}

#[cfg(test)]
mod tests {
    use super::Marker;

    const MARKER: Marker = Marker { sequence: 12, index_nbytes: 3_456, index_sum: 0x0bad_cafe };

    /// A digit that becomes another one would else be taken for damage to the index.
    #[test]
    fn no_flipped_or_missing_byte_leaves_a_marker() {
        let text = MARKER.text();
        assert_eq!(Marker::of(&text), Some(MARKER));
        for at in 0..text.len() {
            assert_eq!(Marker::of(&text[..at]), None, "cut off at {at}");
            for flip in 1..=255 {
                let mut bytes = text.clone().into_bytes();
                bytes[at] ^= flip;
                assert_eq!(Marker::of(&String::from_utf8_lossy(&bytes)), None, "byte {at} by {flip}");
            }
        }
    }

    #[test]
    fn the_first_version_is_read() {
        assert_eq!(Marker::of("shardcore checkpoint 1\nsequence 12\nindex 3456 0badcafe\n"), Some(MARKER));
    }
}
