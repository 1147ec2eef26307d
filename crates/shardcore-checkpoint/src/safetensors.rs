//! Headers of safetensors files: 8 bytes with their length, then JSON that says where in the rest each tensor lies.
//! <https://huggingface.co/docs/safetensors>

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::error::{CheckpointError, Result};
use crate::files::os;

/// Element types of the format, and their bytes.
const DTYPES: [(&str, u64); 17] = [
    ("BOOL", 1),
    ("U8", 1),
    ("I8", 1),
    ("F8_E4M3", 1),
    ("F8_E5M2", 1),
    ("F8_E8M0", 1),
    ("I16", 2),
    ("U16", 2),
    ("F16", 2),
    ("BF16", 2),
    ("I32", 4),
    ("U32", 4),
    ("F32", 4),
    ("I64", 8),
    ("U64", 8),
    ("F64", 8),
    ("C64", 8),
];
/// The data begin at a multiple of this, so that a mapped file can be used in place.
const ALIGNMENT: usize = 64;
/// The format's own limit.
const MAX_HEADER_NBYTES: usize = 100_000_000;

/// Bytes of an element; none for a type that the format does not know.
#[must_use]
pub fn itemsize(dtype: &str) -> Option<u64> {
    DTYPES.iter().find(|(name, _)| *name == dtype).map(|&(_, nbytes)| nbytes)
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name in the file.
    pub name: String,
    /// Element type, as the format spells it: `"F32"`.
    pub dtype: String,
    /// Its shape in the file.
    pub shape: Vec<u64>,
}

impl Entry {
    /// Its bytes.
    ///
    /// # Errors
    /// [`CheckpointError::BadIndex`]: an unknown element type, or more bytes than a file has.
    pub fn nbytes(&self) -> Result<u64> {
        let itemsize = itemsize(&self.dtype)
            .ok_or_else(|| CheckpointError::BadIndex(format!("{:?} has unknown dtype {:?}", self.name, self.dtype)))?;
        self.shape
            .iter()
            .try_fold(itemsize, |product, &dim| product.checked_mul(dim))
            .filter(|&nbytes| i64::try_from(nbytes).is_ok())
            .ok_or_else(|| CheckpointError::BadIndex(format!("{:?} of shape {:?} is too large", self.name, self.shape)))
    }
}

/// The header of a file whose data are these tensors, one behind the other, and where each lies in the file.
///
/// # Errors
/// [`CheckpointError::BadIndex`]: a name that appears twice, an unknown element type, a header beyond the limit.
pub fn header(entries: &[Entry], metadata: &[(String, String)]) -> Result<(Vec<u8>, Vec<u64>)> {
    let mut names = BTreeSet::new();
    let mut object = Map::new();
    if !metadata.is_empty() {
        let pairs = metadata.iter().map(|(key, value)| (key.clone(), Value::from(value.as_str())));
        object.insert("__metadata__".to_owned(), Value::Object(pairs.collect()));
    }
    let mut position = 0_u64;
    let mut starts = Vec::with_capacity(entries.len());
    for entry in entries {
        if !names.insert(entry.name.as_str()) || entry.name == "__metadata__" {
            return Err(CheckpointError::BadIndex(format!("the name {:?} appears twice in one file", entry.name)));
        }
        let end = position + entry.nbytes()?;
        let place = json!({"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [position, end]});
        object.insert(entry.name.clone(), place);
        starts.push(position);
        position = end;
    }
    let mut text = serde_json::to_vec(&object).map_err(|error| CheckpointError::Internal(error.to_string()))?;
    text.resize((text.len() + 8).next_multiple_of(ALIGNMENT) - 8, b' ');
    if text.len() > MAX_HEADER_NBYTES {
        let reason = format!("a header of {} bytes; the format allows {MAX_HEADER_NBYTES}", text.len());
        return Err(CheckpointError::BadIndex(reason));
    }
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut text);
    let base = bytes.len() as u64;
    Ok((bytes, starts.into_iter().map(|start| start + base).collect()))
}

/// A tensor in a header that was read.
#[derive(Deserialize)]
struct Place {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The tensors of a file that anyone may have written, and where each begins in it.
///
/// # Errors
/// [`CheckpointError::Damaged`]: not such a file, or one that is cut off; [`CheckpointError::Storage`].
pub fn read_header(path: &Path) -> Result<Vec<(Entry, u64)>> {
    let file = File::open(path).map_err(os("open", path))?;
    let total = file.metadata().map_err(os("read", path))?.len();
    let wrong = |what: String| CheckpointError::damaged(path, 0..total, what);
    let mut length = [0; 8];
    file.read_exact_at(&mut length, 0).map_err(|_| wrong("it is too short for a safetensors file".to_owned()))?;
    let nbytes = u64::from_le_bytes(length);
    let room = usize::try_from(nbytes).ok().filter(|&room| room <= MAX_HEADER_NBYTES && nbytes <= total - 8);
    let room = room.ok_or_else(|| wrong(format!("it has {total} bytes and promises a header of {nbytes}")))?;
    let mut text = vec![0; room];
    file.read_exact_at(&mut text, 8).map_err(os("read", path))?;
    let header: Map<String, Value> =
        serde_json::from_slice(&text).map_err(|error| wrong(format!("its header is no JSON object: {error}")))?;
    let mut found = Vec::new();
    for (name, value) in header.into_iter().filter(|(name, _)| name != "__metadata__") {
        let place: Place =
            serde_json::from_value(value).map_err(|error| wrong(format!("tensor {name:?} in its header: {error}")))?;
        let entry = Entry { name, dtype: place.dtype, shape: place.shape };
        let [start, stop] = place.data_offsets;
        if start > stop || stop - start != entry.nbytes()? || stop > total - 8 - nbytes {
            return Err(wrong(format!("tensor {:?} is at bytes {start} to {stop} of its data", entry.name)));
        }
        found.push((entry, 8 + nbytes + start));
    }
    Ok(found)
}
