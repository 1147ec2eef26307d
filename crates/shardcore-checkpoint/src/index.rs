//! What a checkpoint holds, and where: the document `index.json`.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::checksum::num_blocks;
use crate::error::{CheckpointError, Result};
use crate::runs::{Runs, tile};
use crate::safetensors::itemsize;

/// The `format` of every index.
pub const FORMAT: &str = "shardcore-checkpoint";
/// The newest version that this code reads. What has no pieces across rows is written as version 1.
pub const VERSION: u32 = 2;

/// The document.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Index {
    /// [`FORMAT`].
    pub format: String,
    /// [`VERSION`] or older.
    pub version: u32,
    /// Checkpoints of a run are numbered from 1, in the order in which they were completed.
    #[serde(default)]
    pub sequence: u64,
    /// Bytes of a block with a checksum.
    pub block_nbytes: u64,
    /// The files, by number.
    pub files: Vec<FileEntry>,
    /// The tensors, ordered by role and name.
    pub tensors: Vec<TensorEntry>,
    /// What the training keeps besides tensors: steps, options, client state. Passed through as it is.
    pub training: Box<RawValue>,
}

/// One file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its name in the folder.
    pub name: String,
    /// Its bytes.
    pub nbytes: u64,
    /// Bytes before the data.
    pub header_nbytes: u64,
    /// CRC-32 of these, in hexadecimal digits.
    pub header_crc32: String,
}

/// One tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// What it is to the training: `"weight"`, `"buffer"`, `"state/exp_avg"`, `"rank/3"`.
    pub role: String,
    /// The name of the parameter or buffer in the unsharded model.
    pub name: String,
    /// Element type, as safetensors spells it.
    pub dtype: String,
    /// The unsharded shape.
    pub shape: Vec<u64>,
    /// Where its elements are, in their order; those across rows part by part.
    pub pieces: Vec<PieceEntry>,
}

/// A range of the flattened tensor, or of a part across its rows, that lies in a row in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PieceEntry {
    /// Number of the file.
    pub file: usize,
    /// Where it begins in the file.
    pub offset: u64,
    /// First element.
    pub start: u64,
    /// The element after the last one.
    pub stop: u64,
    /// CRC-32 of every block of it: eight hexadecimal digits each, one behind the other.
    pub crc32: String,
    /// The part of which `start` and `stop` count the elements; None: they count those of the tensor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runs: Option<Runs>,
}

impl TensorEntry {
    /// Its pieces, those of each part together.
    pub(crate) fn groups(&self) -> impl Iterator<Item = &[PieceEntry]> {
        self.pieces.chunk_by(|one, next| one.runs == next.runs)
    }

    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Bytes of an element; 1 for a type that is unknown, which [`Index::check`] refuses.
    #[must_use]
    pub fn itemsize(&self) -> u64 {
        itemsize(&self.dtype).unwrap_or(1)
    }
}

impl PieceEntry {
    /// The bytes of the file that it takes.
    #[must_use]
    pub fn span(&self, itemsize: u64) -> std::ops::Range<u64> {
        self.offset..self.offset + (self.stop - self.start) * itemsize
    }
}

impl Index {
    /// Reads and checks a document.
    ///
    /// # Errors
    /// [`CheckpointError::BadIndex`]: not an index, a newer version, or one that contradicts itself.
    pub fn from_json(text: &str) -> Result<Self> {
        let index: Self =
            serde_json::from_str(text).map_err(|error| bad(format!("it is not the document expected ({error})")))?;
        index.check()?;
        Ok(index)
    }

    /// The document as text.
    ///
    /// # Errors
    /// [`CheckpointError::Internal`].
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|error| CheckpointError::Internal(error.to_string()))
    }

    /// Whether every tensor is there once, element by element, in files that lie beside the index.
    ///
    /// # Errors
    /// [`CheckpointError::BadIndex`] with the first contradiction.
    pub fn check(&self) -> Result<()> {
        if self.format != FORMAT || self.version > VERSION {
            return Err(bad(format!(
                "it is of format {:?}, version {}; this shardcore reads {FORMAT:?} up to version {VERSION}",
                self.format, self.version
            )));
        }
        if self.block_nbytes == 0 {
            return Err(bad("blocks have no bytes".to_owned()));
        }
        if let Some(file) = self.files.iter().find(|file| file.name.contains('/') || file.name.starts_with('.')) {
            return Err(bad(format!("it names {:?}; files lie beside the index", file.name)));
        }
        self.check_files()?;
        let mut known = BTreeSet::new();
        for tensor in &self.tensors {
            if !known.insert((tensor.role.as_str(), tensor.name.as_str())) {
                return Err(bad(format!("{} {:?} appears twice", tensor.role, tensor.name)));
            }
            self.check_tensor(tensor).map_err(|reason| bad(format!("{} {:?}: {reason}", tensor.role, tensor.name)))?;
        }
        Ok(())
    }

    /// Whether pieces take all bytes behind the headers, so that a checksum covers every byte.
    fn check_files(&self) -> Result<()> {
        let mut taken: Vec<u64> = self.files.iter().map(|file| file.header_nbytes).collect();
        for tensor in &self.tensors {
            for piece in &tensor.pieces {
                let nbytes = piece.stop.saturating_sub(piece.start).saturating_mul(tensor.itemsize());
                if let Some(taken) = taken.get_mut(piece.file) {
                    *taken = taken.saturating_add(nbytes);
                }
            }
        }
        match self.files.iter().zip(taken).find(|(file, taken)| file.nbytes != *taken) {
            None => Ok(()),
            Some((file, taken)) => {
                Err(bad(format!("{} has {} bytes, and its pieces take {taken}", file.name, file.nbytes)))
            }
        }
    }

    fn check_tensor(&self, tensor: &TensorEntry) -> std::result::Result<(), String> {
        let itemsize = itemsize(&tensor.dtype).ok_or_else(|| format!("unknown dtype {:?}", tensor.dtype))?;
        let numel = tensor.shape.iter().try_fold(1_u64, |product, &dim| product.checked_mul(dim));
        let numel = numel.filter(|&numel| numel <= i64::MAX.unsigned_abs() / 8).ok_or("its shape is too large")?;
        let groups: Vec<&[PieceEntry]> = tensor.groups().collect();
        let parts: Vec<Runs> = groups.iter().filter_map(|group| group[0].runs).collect();
        if !parts.is_empty() && (parts.len() != groups.len() || !tile(&parts)) {
            return Err("its parts across rows do not make up its rows".to_owned());
        }
        for group in &groups {
            let expected = group[0].runs.map_or(Some(numel), |runs| runs.numel(numel));
            self.check_group(group, expected.ok_or("it does not consist of rows as its parts do")?, itemsize)?;
        }
        if groups.is_empty() && numel > 0 { Err(format!("elements 0 to {numel} are missing")) } else { Ok(()) }
    }

    /// Whether the pieces of one part are each element of it once.
    fn check_group(&self, group: &[PieceEntry], numel: u64, itemsize: u64) -> std::result::Result<(), String> {
        let mut covered = 0;
        for piece in group {
            if piece.start != covered || piece.stop <= piece.start || piece.stop > numel {
                return Err(format!(
                    "elements from {covered} on are expected, and there is a piece [{}, {})",
                    piece.start, piece.stop
                ));
            }
            covered = piece.stop;
            let nbytes = (piece.stop - piece.start) * itemsize;
            let file = self.files.get(piece.file).ok_or_else(|| format!("there is no file {}", piece.file))?;
            if piece.offset < file.header_nbytes || piece.offset.checked_add(nbytes).is_none_or(|end| end > file.nbytes)
            {
                return Err(format!("its piece at byte {} is outside the data of {}", piece.offset, file.name));
            }
            if piece.crc32.len() as u64 != num_blocks(nbytes, self.block_nbytes) * 8 {
                return Err(format!("its piece [{}, {}) lacks checksums", piece.start, piece.stop));
            }
        }
        if covered == numel { Ok(()) } else { Err(format!("elements {covered} to {numel} are missing")) }
    }
}

fn bad(reason: String) -> CheckpointError {
    CheckpointError::BadIndex(reason)
}
