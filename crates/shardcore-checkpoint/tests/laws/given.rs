//! Folders, and checkpoints with random contents.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;
use serde_json::value::RawValue;
use shardcore_checkpoint::checksum::{BLOCK_NBYTES, to_text};
use shardcore_checkpoint::index::{FORMAT, FileEntry, PieceEntry, TensorEntry, VERSION};
use shardcore_checkpoint::safetensors::{Entry, itemsize};
use shardcore_checkpoint::{FileWriter, Index, Result, Written, folder};

/// Cases of a property: few in every run, many with `SHARDCORE_FULL=1`.
pub(crate) fn cases(few: u32, many: u32) -> u32 {
    if std::env::var_os("SHARDCORE_FULL").is_some() { many } else { few }
}

/// A folder that goes when the test ends.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("checkpoint-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A tensor, and at which elements it is cut between files.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: &'static str,
    pub(crate) bytes: Vec<u8>,
    pub(crate) cuts: Vec<u64>,
}

impl Tensor {
    pub(crate) fn itemsize(&self) -> u64 {
        itemsize(self.dtype).unwrap()
    }

    pub(crate) fn numel(&self) -> u64 {
        self.bytes.len() as u64 / self.itemsize()
    }

    /// Ranges between the cuts.
    fn ranges(&self) -> Vec<(u64, u64)> {
        let mut bounds: Vec<u64> = self.cuts.iter().map(|cut| cut % (self.numel() + 1)).collect();
        bounds.extend([0, self.numel()]);
        bounds.sort_unstable();
        bounds.dedup();
        bounds.windows(2).map(|pair| (pair[0], pair[1])).collect()
    }
}

pub(crate) fn tensors() -> impl Strategy<Value = Vec<Tensor>> {
    let numel = prop_oneof![Just(0_usize), Just(1), 2_usize..300, 3_000_usize..5_000];
    let dtype = prop::sample::select(vec!["F32", "BF16", "U8", "I64"]);
    let one = (numel, dtype, any::<u8>(), prop::collection::vec(any::<u64>(), 0..3));
    prop::collection::vec(one, 0..6).prop_map(|rows| {
        let made = rows.into_iter().enumerate().map(|(i, (numel, dtype, seed, cuts))| {
            let nbytes = numel * usize::try_from(itemsize(dtype).unwrap()).unwrap();
            let bytes =
                (0..=250_u8).cycle().map(|byte| byte.wrapping_mul(31).wrapping_add(seed)).take(nbytes).collect();
            Tensor { name: format!("layer.{i}"), dtype, bytes, cuts }
        });
        made.collect()
    })
}

/// Writes the tensors, whose pieces go to `num_files` files by turns, and commits them.
pub(crate) fn save(run: &Path, tag: &str, tensors: &[Tensor], num_files: usize) -> Result<PathBuf> {
    let aside = folder::begin(run, tag)?;
    let mut places: Vec<Vec<(usize, (u64, u64))>> = vec![Vec::new(); num_files];
    let pieces = tensors.iter().enumerate().flat_map(|(i, tensor)| tensor.ranges().into_iter().map(move |r| (i, r)));
    for (turn, piece) in pieces.enumerate() {
        places[turn % num_files].push(piece);
    }
    let mut index = empty_index();
    index.tensors = tensors.iter().map(entry_of).collect();
    for (number, places) in places.iter().enumerate() {
        let name = format!("rank-{number:05}.safetensors");
        let written = write_file(&aside.join(&name), tensors, places)?;
        for (&(tensor, (start, stop)), (offset, sums)) in places.iter().zip(&written.entries) {
            let piece = PieceEntry { file: number, offset: *offset, start, stop, crc32: to_text(sums), runs: None };
            index.tensors[tensor].pieces.push(piece);
        }
        index.files.push(file_entry(name, &written));
    }
    for tensor in &mut index.tensors {
        tensor.pieces.sort_by_key(|piece| piece.start);
    }
    folder::commit(run, tag, index)
}

pub(crate) fn empty_index() -> Index {
    Index {
        format: FORMAT.to_owned(),
        version: VERSION,
        sequence: 0,
        block_nbytes: BLOCK_NBYTES,
        files: Vec::new(),
        tensors: Vec::new(),
        training: RawValue::from_string(r#"{"big":123456789012345678901234567890}"#.to_owned()).unwrap(),
    }
}

pub(crate) fn file_entry(name: String, written: &Written) -> FileEntry {
    let header_crc32 = format!("{:08x}", written.header_sum);
    FileEntry { name, nbytes: written.nbytes, header_nbytes: written.header_nbytes, header_crc32 }
}

fn entry_of(tensor: &Tensor) -> TensorEntry {
    TensorEntry {
        role: "weight".to_owned(),
        name: tensor.name.clone(),
        dtype: tensor.dtype.to_owned(),
        shape: vec![tensor.numel()],
        pieces: Vec::new(),
    }
}

fn write_file(path: &Path, tensors: &[Tensor], places: &[(usize, (u64, u64))]) -> Result<Written> {
    let entries: Vec<Entry> = places
        .iter()
        .map(|&(tensor, (start, stop))| Entry {
            name: format!("{}[{start}:{stop}]", tensors[tensor].name),
            dtype: tensors[tensor].dtype.to_owned(),
            shape: vec![stop - start],
        })
        .collect();
    let mut writer = FileWriter::create(path, &entries, &[("format".to_owned(), "pt".to_owned())])?;
    for &(tensor, (start, stop)) in places {
        let at = |element: u64| usize::try_from(element * tensors[tensor].itemsize()).unwrap();
        for chunk in tensors[tensor].bytes[at(start)..at(stop)].chunks(1_000) {
            writer.put(chunk)?;
        }
    }
    writer.finish(true)
}
