//! `shardcore.checkpoint`: files, index and folders of checkpoints.

#![allow(clippy::needless_pass_by_value, reason = "pyo3 hands paths and lists over by value")]

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use pyo3::prelude::*;
use shardcore_checkpoint::checksum::to_text;
use shardcore_checkpoint::folder::{self, Keep};
use shardcore_checkpoint::safetensors::Entry;
use shardcore_checkpoint::{Checkpoint, CheckpointError, FileWriter, Index, Runs, Want, verify};

use crate::error::CoreError;
use crate::gil;
use crate::tensor::TensorRef;

/// Bytes, header bytes, CRC-32 of the header, and for each entry where it begins and the CRC-32 of its blocks.
type WrittenFile = (u64, u64, String, Vec<(u64, String)>);

/// Tensor, first element, the element after the last one, memory, and the part of which these are elements.
type Wanted = (usize, u64, u64, TensorRef, Option<(u64, u64, u64)>);

/// Tag, folder, number in the run, what is wrong.
type Listed = (String, PathBuf, Option<u64>, Option<String>);

/// A safetensors file that is being written: ``entries`` are ``(name, dtype, shape)``, whose bytes come by ``put`` in
/// this order. It must not exist, and gets its whole space at once.
///
/// Raises ``StorageError`` if the disk is full, with the arithmetic, or refuses.
#[pyclass(frozen, name = "CheckpointWriter", module = "shardcore.checkpoint")]
pub(crate) struct PyCheckpointWriter(Mutex<Option<FileWriter>>);

#[pymethods]
impl PyCheckpointWriter {
    #[new]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        entries: Vec<(String, String, Vec<u64>)>,
        metadata: Vec<(String, String)>,
    ) -> PyResult<Self> {
        let entries: Vec<Entry> =
            entries.into_iter().map(|(name, dtype, shape)| Entry { name, dtype, shape }).collect();
        let writer = gil::run(py, || FileWriter::create(&path, &entries, &metadata))?;
        Ok(Self(Mutex::new(Some(writer))))
    }

    /// The next bytes of the file: those of a contiguous CPU tensor, which are copied before this returns.
    fn put(&self, py: Python<'_>, tensor: TensorRef) -> PyResult<()> {
        let mut guard = self.lock()?;
        let writer = &mut *guard;
        gil::run(py, || {
            // SAFETY: the tensor is alive, and whoever saves it does not write to it meanwhile.
            let bytes = unsafe { tensor.bytes() };
            writer.as_mut().ok_or_else(ended)?.put(bytes)
        })
    }

    /// Writes the rest, syncs the file and compares it with what was written: size and header; with ``read_back``
    /// all of it.
    ///
    /// Returns ``(nbytes, header_nbytes, header_crc32, [(offset, crc32 of its blocks) of each entry])``.
    fn finish(&self, py: Python<'_>, read_back: bool) -> PyResult<WrittenFile> {
        let mut guard = self.lock()?;
        let writer = &mut *guard;
        let written = gil::run(py, || writer.take().ok_or_else(ended)?.finish(read_back))?;
        let entries = written.entries.iter().map(|(offset, sums)| (*offset, to_text(sums))).collect();
        Ok((written.nbytes, written.header_nbytes, format!("{:08x}", written.header_sum), entries))
    }
}

impl PyCheckpointWriter {
    fn lock(&self) -> Result<MutexGuard<'_, Option<FileWriter>>, CoreError> {
        match self.0.try_lock() {
            Ok(guard) => Ok(guard),
            Err(TryLockError::Poisoned(error)) => Ok(PoisonError::into_inner(error)),
            Err(TryLockError::WouldBlock) => Err(CoreError::Busy("this writer of a checkpoint's file")),
        }
    }
}

fn ended() -> CheckpointError {
    CheckpointError::Internal("a file of a checkpoint is written to after its end".to_owned())
}

/// A complete checkpoint, opened for reading: its mark, its index and the sizes of its files are checked.
///
/// Raises ``CheckpointError`` naming the file and its bytes if it is damaged, or if it was never finished.
#[pyclass(frozen, name = "CheckpointReader", module = "shardcore.checkpoint")]
pub(crate) struct PyCheckpointReader(Checkpoint);

#[pymethods]
impl PyCheckpointReader {
    #[new]
    fn new(py: Python<'_>, folder: PathBuf) -> PyResult<Self> {
        gil::run(py, || Checkpoint::open(&folder)).map(Self)
    }

    /// Safetensors files that anyone may have written, as if they were a checkpoint: all tensors have the role
    /// ``"weight"``, and there are no checksums.
    ///
    /// Raises ``CheckpointError`` for what is no such file, and for a name in two of them.
    #[staticmethod]
    fn of_safetensors(py: Python<'_>, folder: PathBuf, names: Vec<String>) -> PyResult<Self> {
        gil::run(py, || Checkpoint::of_safetensors(&folder, &names)).map(Self)
    }

    /// The index, as its JSON document.
    fn index(&self, py: Python<'_>) -> PyResult<String> {
        gil::run(py, || self.0.index().to_json())
    }

    /// Reads ``(tensor, start, stop, out, runs)``: elements of the flattened tensor with this number in the index, into
    /// the memory of ``out``, which has exactly these elements and is contiguous on the CPU. With ``runs``, ``(first,
    /// length, stride)``, they are counted in the part of it that runs of ``length`` elements every ``stride`` from
    /// ``first`` on make up. Every block is checked.
    ///
    /// Raises ``CheckpointError`` naming the file and its bytes for a block that is not as it was written.
    fn read(&self, py: Python<'_>, wants: Vec<Wanted>) -> PyResult<()> {
        check_apart(&wants)?;
        for (_, _, _, out, _) in &wants {
            out.mark_changed(py)?;
        }
        gil::run(py, || {
            let wants = wants.iter().map(|(tensor, start, stop, out, runs)| {
                // SAFETY: the tensors are alive, their memory was checked not to overlap, and whoever loads into them
                // neither reads nor writes them meanwhile.
                let out = unsafe { out.bytes_mut() };
                let runs = runs.map(|(first, length, stride)| Runs { first, length, stride });
                Want { tensor: *tensor, runs, start: *start, stop: *stop, out }
            });
            self.0.read(wants.collect())
        })
    }

    /// Raises ``CheckpointError`` if the header of the file with this number is not as it was written.
    fn check_header(&self, py: Python<'_>, file: usize) -> PyResult<()> {
        gil::run(py, || self.0.check_header(file))
    }
}

/// No two of them share memory.
fn check_apart(wants: &[Wanted]) -> Result<(), CoreError> {
    let mut spans: Vec<(usize, usize)> =
        wants.iter().map(|(_, _, _, out, _)| out.span()).filter(|&(_, nbytes)| nbytes > 0).collect();
    spans.sort_unstable();
    if spans.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0) {
        return Ok(());
    }
    Err(CoreError::Tensor("two of the tensors to read into share memory".to_owned()))
}

/// Makes the empty folder in which the files of a checkpoint are written. Returns its path.
#[pyfunction]
pub(crate) fn begin_checkpoint(py: Python<'_>, run: PathBuf, tag: &str) -> PyResult<PathBuf> {
    gil::run(py, || folder::begin(&run, tag))
}

/// The folder that ``begin_checkpoint`` makes for this tag.
#[pyfunction]
pub(crate) fn checkpoint_aside(run: PathBuf, tag: &str) -> PathBuf {
    folder::aside(&run, tag)
}

/// Makes a checkpoint of the files in that folder and the index, and lets ``latest`` name it if ``is_latest``. Then
/// removes older ones: all but the ``keep_last`` newest, and those whose number is a multiple of ``keep_every``.
///
/// Returns its path and the tags that were removed.
#[pyfunction]
#[pyo3(signature = (run, tag, index, *, is_latest, keep_last = None, keep_every = None))]
pub(crate) fn commit_checkpoint(
    py: Python<'_>,
    run: PathBuf,
    tag: &str,
    index: &str,
    is_latest: bool,
    keep_last: Option<u64>,
    keep_every: Option<u64>,
) -> PyResult<(PathBuf, Vec<String>)> {
    gil::run(py, || {
        let path = folder::commit(&run, tag, Index::from_json(index)?)?;
        if is_latest {
            folder::point_latest(&run, tag)?;
        }
        let removed = folder::prune(&run, Keep { last: keep_last, every: keep_every })?;
        Ok::<_, CheckpointError>((path, removed))
    })
}

/// Removes that folder, after a save that failed.
#[pyfunction]
pub(crate) fn abandon_checkpoint(py: Python<'_>, run: PathBuf, tag: &str) -> PyResult<()> {
    gil::run(py, || folder::abandon(&run, tag))
}

/// All checkpoints of a run as ``(tag, path, number or None, what is wrong or None)``, the oldest first.
#[pyfunction]
pub(crate) fn list_checkpoints(py: Python<'_>, run: PathBuf) -> PyResult<Vec<Listed>> {
    let found = gil::run(py, || folder::list(&run))?;
    Ok(found.into_iter().map(|found| (found.tag, found.path, found.sequence, found.problem)).collect())
}

/// The checkpoint that a path means: ``(its folder, what is worth telling)``.
///
/// Raises ``CheckpointError`` if there is none that is complete.
#[pyfunction]
#[pyo3(signature = (place, tag = None))]
pub(crate) fn choose_checkpoint(py: Python<'_>, place: PathBuf, tag: Option<&str>) -> PyResult<(PathBuf, Vec<String>)> {
    gil::run(py, || folder::choose(&place, tag)).map(|chosen| (chosen.path, chosen.notes))
}

/// The tag in ``latest``; None if there is none.
#[pyfunction]
pub(crate) fn latest_checkpoint(py: Python<'_>, run: PathBuf) -> PyResult<Option<String>> {
    gil::run(py, || folder::latest(&run))
}

/// Reads every byte of a checkpoint. Returns the damages as ``(file, first byte, byte after the last, what)``.
#[pyfunction]
pub(crate) fn verify_checkpoint(py: Python<'_>, folder: PathBuf) -> PyResult<Vec<(PathBuf, u64, u64, String)>> {
    let found = gil::run(py, || verify::verify(&folder))?;
    Ok(found.into_iter().map(|damage| (damage.path, damage.start, damage.stop, damage.what)).collect())
}
