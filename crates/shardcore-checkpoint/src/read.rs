//! Any range of any tensor of a checkpoint, read in whole blocks that are checked before their bytes are given out.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde_json::value::RawValue;
use shardcore_io::{Block, IoEngine, Kind, Loan, Options, Place};

use crate::checksum::{BLOCK_NBYTES, from_text, sum};
use crate::error::{CheckpointError, Result};
use crate::files::{os, read_if_there};
use crate::index::{FORMAT, FileEntry, Index, PieceEntry, TensorEntry, VERSION};
use crate::marker::{COMPLETE, INDEX, Marker};
use crate::runs::{Runs, Span};
use crate::safetensors::{Entry, read_header};

/// Blocks under way at once; with their memory this is the read buffer.
const NUM_BLOCKS: usize = 4;
/// Bytes of one transfer.
const TRANSFER_NBYTES: usize = 1 << 20;
/// Reads begin and end at multiples of this, so that they go past the page cache.
const PAGE: u64 = 4096;

/// A checkpoint that is complete, opened for reading.
pub struct Checkpoint {
    folder: PathBuf,
    index: Index,
    by_key: BTreeMap<(String, String), usize>,
    /// Engines that no read uses now.
    idle: Mutex<Vec<IoEngine>>,
}

/// Elements `[start, stop)` of a tensor or of a part of it, and where they are to go.
pub struct Want<'a> {
    /// Number of the tensor in the index.
    pub tensor: usize,
    /// The part of which elements are counted; None: they are those of the flattened tensor.
    pub runs: Option<Runs>,
    /// First element.
    pub start: u64,
    /// The element after the last one.
    pub stop: u64,
    /// Memory of exactly these elements.
    pub out: &'a mut [u8],
}

/// One block of a piece that is read for some wants.
pub(crate) struct Job {
    pub(crate) tensor: usize,
    pub(crate) file: usize,
    /// The block's bytes in the file.
    pub(crate) start: u64,
    pub(crate) stop: u64,
    /// None in files of others, which have no checksums.
    pub(crate) sum: Option<u32>,
    copies: Vec<Copy>,
}

/// Bytes of a block that go into the memory of a want.
struct Copy {
    want: usize,
    out_start: usize,
    skip: usize,
    take: usize,
}

/// The blocks to read, each once, in the order in which they are first wanted.
#[derive(Default)]
struct Plan {
    jobs: Vec<Job>,
    by_place: BTreeMap<(usize, u64), usize>,
}

impl Checkpoint {
    /// Opens the checkpoint in `folder`: checks its mark, its index and the sizes of its files.
    ///
    /// # Errors
    /// [`CheckpointError::Incomplete`]: it was never finished; [`CheckpointError::Damaged`] with the file and its bytes.
    pub fn open(folder: &Path) -> Result<Self> {
        let index = read_index(folder)?;
        let keys = index.tensors.iter().map(|tensor| (tensor.role.clone(), tensor.name.clone()));
        let by_key = keys.zip(0..).collect();
        let found = Self { folder: folder.to_owned(), index, by_key, idle: Mutex::default() };
        found.check_sizes()?;
        Ok(found)
    }

    /// Files that anyone may have written, in one folder; without checksums, so that only their sizes are checked.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`] for what is no safetensors file; [`CheckpointError::BadIndex`] for a name in two files.
    pub fn of_safetensors(folder: &Path, names: &[String]) -> Result<Self> {
        let mut index = Index {
            format: FORMAT.to_owned(),
            version: VERSION,
            sequence: 0,
            block_nbytes: BLOCK_NBYTES,
            files: Vec::new(),
            tensors: Vec::new(),
            training: RawValue::NULL.to_owned(),
        };
        let mut by_key = BTreeMap::new();
        for (file, name) in names.iter().enumerate() {
            let path = folder.join(name);
            let nbytes = fs::metadata(&path).map_err(os("read", &path))?.len();
            index.files.push(FileEntry { name: name.clone(), nbytes, header_nbytes: 0, header_crc32: String::new() });
            for (Entry { name, dtype, shape }, offset) in read_header(&path)? {
                let mut tensor = TensorEntry { role: "weight".to_owned(), name, dtype, shape, pieces: Vec::new() };
                if tensor.numel() > 0 {
                    let stop = tensor.numel();
                    tensor.pieces.push(PieceEntry { file, offset, start: 0, stop, crc32: String::new(), runs: None });
                }
                if by_key.insert((tensor.role.clone(), tensor.name.clone()), index.tensors.len()).is_some() {
                    return Err(CheckpointError::BadIndex(format!("{:?} is in two files", tensor.name)));
                }
                index.tensors.push(tensor);
            }
        }
        Ok(Self { folder: folder.to_owned(), index, by_key, idle: Mutex::default() })
    }

    /// What it holds.
    #[must_use]
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// The number of a tensor in the index.
    #[must_use]
    pub fn find(&self, role: &str, name: &str) -> Option<usize> {
        self.by_key.get(&(role.to_owned(), name.to_owned())).copied()
    }

    /// Where a file is.
    #[must_use]
    pub fn path(&self, file: usize) -> PathBuf {
        self.folder.join(&self.index.files[file].name)
    }

    /// Reads all wants, checking every block that it touches.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`] with file and bytes; [`CheckpointError::Storage`] if the disk fails;
    /// [`CheckpointError::Internal`] for a range outside its tensor.
    pub fn read(&self, mut wants: Vec<Want<'_>>) -> Result<()> {
        let mut plan = Plan::default();
        for (number, want) in wants.iter().enumerate() {
            self.plan(number, want, &mut plan)?;
        }
        self.run(plan.jobs, |job, bytes| {
            let bytes = bytes?;
            for Copy { want, out_start, skip, take } in &job.copies {
                wants[*want].out[*out_start..out_start + take].copy_from_slice(&bytes[*skip..skip + take]);
            }
            Ok(())
        })
    }

    /// Reads blocks, several at a time and in order, and hands over each, or what is wrong with it.
    pub(crate) fn run(&self, jobs: Vec<Job>, mut act: impl FnMut(&Job, Result<&[u8]>) -> Result<()>) -> Result<()> {
        let engine = self.engine()?;
        let mut under_way: VecDeque<(Job, Loan)> = VecDeque::new();
        let mut free: Vec<Block> = Vec::new();
        let room = jobs.iter().map(|job| self.pages_of(job).1).max().unwrap_or(0);
        for job in jobs {
            if under_way.len() == NUM_BLOCKS
                && let Some(done) = under_way.pop_front()
            {
                free.push(self.settle(done, &mut act)?);
            }
            let block = free.pop().map_or_else(|| Block::new("the buffer of a checkpoint's reader", room), Ok)?;
            let path = self.path(job.file);
            let (first, nbytes) = self.pages_of(&job);
            let loan = engine.lend(Kind::Read, Place::Path(&path), first, block, nbytes)?;
            under_way.push_back((job, loan));
        }
        while let Some(done) = under_way.pop_front() {
            free.push(self.settle(done, &mut act)?);
        }
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(engine);
        Ok(())
    }

    /// An engine for this read alone.
    fn engine(&self) -> Result<IoEngine> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let made = || IoEngine::new(Options::new(NUM_BLOCKS * 4, TRANSFER_NBYTES)?);
        Ok(idle.map_or_else(made, Ok)?)
    }

    /// All blocks of all tensors.
    pub(crate) fn all_jobs(&self) -> Result<Vec<Job>> {
        let mut plan = Plan::default();
        for (number, entry) in self.index.tensors.iter().enumerate() {
            for piece in &entry.pieces {
                let all = Span { start: piece.start, stop: piece.stop, at: 0 };
                self.plan_piece(number, piece, all, 0, &mut plan)?;
            }
        }
        Ok(plan.jobs)
    }

    fn settle(
        &self,
        (job, loan): (Job, Loan),
        act: &mut impl FnMut(&Job, Result<&[u8]>) -> Result<()>,
    ) -> Result<Block> {
        let block = loan.wait()?;
        let (first, _) = self.pages_of(&job);
        let before = in_memory(job.start - first);
        let bytes = &block.bytes()[before..before + in_memory(job.stop - job.start)];
        let damaged = || {
            let what = "their checksum is not the one taken when they were written";
            CheckpointError::damaged(&self.path(job.file), job.start..job.stop, what)
        };
        let is_sound = job.sum.is_none_or(|expected| sum(bytes) == expected);
        act(&job, if is_sound { Ok(bytes) } else { Err(damaged()) })?;
        Ok(block)
    }

    /// (first byte, number of bytes) of whole pages around a block, as far as the file goes.
    fn pages_of(&self, job: &Job) -> (u64, usize) {
        let first = job.start / PAGE * PAGE;
        let end = job.stop.next_multiple_of(PAGE).min(self.index.files[job.file].nbytes);
        (first, in_memory(end - first))
    }

    fn plan(&self, number: usize, want: &Want<'_>, plan: &mut Plan) -> Result<()> {
        let outside = || CheckpointError::Internal(format!("elements {} to {} are wanted", want.start, want.stop));
        let entry = self.index.tensors.get(want.tensor).ok_or_else(outside)?;
        let numel = want.runs.map_or(Some(entry.numel()), |runs| runs.numel(entry.numel())).ok_or_else(outside)?;
        let nbytes = want.stop.checked_sub(want.start).and_then(|count| count.checked_mul(entry.itemsize()));
        if nbytes != Some(want.out.len() as u64) || want.stop > numel {
            return Err(outside());
        }
        let all = Span { start: want.start, stop: want.stop, at: 0 };
        for group in entry.groups() {
            match (want.runs, group[0].runs) {
                (mine, theirs) if mine == theirs => self.plan_in_row(number, want.tensor, group, all, plan)?,
                (mine, theirs) => {
                    let spans: Box<dyn Iterator<Item = Span>> = match mine {
                        Some(runs) => Box::new(runs.spans(want.start, want.stop)),
                        None => Box::new(std::iter::once(all)),
                    };
                    for span in spans {
                        match theirs {
                            None => self.plan_in_row(number, want.tensor, group, span, plan)?,
                            Some(runs) => runs
                                .common(span)
                                .try_for_each(|each| self.plan_in_row(number, want.tensor, group, each, plan))?,
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// The pieces of one part that hold elements of `span`, which counts the part's.
    fn plan_in_row(&self, want: usize, tensor: usize, group: &[PieceEntry], span: Span, plan: &mut Plan) -> Result<()> {
        let first = group.partition_point(|piece| piece.stop <= span.start);
        for piece in group[first..].iter().take_while(|piece| piece.start < span.stop) {
            let (start, stop) = (piece.start.max(span.start), piece.stop.min(span.stop));
            let inside = Span { start, stop, at: span.at + start - span.start };
            self.plan_piece(tensor, piece, inside, want, plan)?;
        }
        Ok(())
    }

    /// The blocks of a piece that hold the elements of `span`.
    fn plan_piece(&self, tensor: usize, piece: &PieceEntry, span: Span, want: usize, plan: &mut Plan) -> Result<()> {
        let entry = &self.index.tensors[tensor];
        let (itemsize, block_nbytes) = (entry.itemsize(), self.index.block_nbytes);
        let place = piece.span(itemsize);
        let from = place.start + (span.start - piece.start) * itemsize;
        let to = place.start + (span.stop - piece.start) * itemsize;
        let mut out_start = in_memory(span.at * itemsize);
        for number in (from - place.start) / block_nbytes..(to - place.start).div_ceil(block_nbytes) {
            let start = place.start + number * block_nbytes;
            let stop = (start + block_nbytes).min(place.end);
            let sum = from_text(&piece.crc32, number);
            if sum.is_none() && !piece.crc32.is_empty() {
                return Err(CheckpointError::BadIndex(format!("a checksum of {:?} is not one", entry.name)));
            }
            let known = *plan.by_place.entry((piece.file, start)).or_insert(plan.jobs.len());
            if known == plan.jobs.len() {
                plan.jobs.push(Job { tensor, file: piece.file, start, stop, sum, copies: Vec::new() });
            }
            let (first, last) = (start.max(from), stop.min(to));
            let (skip, take) = (in_memory(first - start), in_memory(last - first));
            plan.jobs[known].copies.push(Copy { want, out_start, skip, take });
            out_start += take;
        }
        Ok(())
    }

    fn check_sizes(&self) -> Result<()> {
        self.index.files.iter().try_for_each(|file| check_size(&self.folder, file))
    }
}

/// The index of a complete checkpoint, as its mark says it is.
///
/// # Errors
/// As [`Checkpoint::open`].
pub fn read_index(folder: &Path) -> Result<Index> {
    let Some(marker) = Marker::read(folder)? else {
        return Err(CheckpointError::incomplete(
            folder,
            format!("its file {COMPLETE:?} is missing; saving was cut off"),
        ));
    };
    let path = folder.join(INDEX);
    let bytes = read_if_there(&path)?.ok_or_else(|| CheckpointError::damaged(&path, 0..0, "the file is missing"))?;
    let found = bytes.len() as u64;
    if found != marker.index_nbytes {
        let range = found.min(marker.index_nbytes)..found.max(marker.index_nbytes);
        let what = format!("it had {} bytes and has {found}", marker.index_nbytes);
        return Err(CheckpointError::damaged(&path, range, what));
    }
    if sum(&bytes) != marker.index_sum {
        let what = format!("its checksum is not the one in {COMPLETE:?}");
        return Err(CheckpointError::damaged(&path, 0..found, what));
    }
    let text = String::from_utf8(bytes).map_err(|error| CheckpointError::BadIndex(error.to_string()))?;
    let index = Index::from_json(&text)?;
    if index.sequence != marker.sequence {
        let marker_path = folder.join(COMPLETE);
        let what = format!("it has number {}, and the index {}", marker.sequence, index.sequence);
        return Err(CheckpointError::damaged(&marker_path, 0..marker.text().len() as u64, what));
    }
    Ok(index)
}

/// Whether a file is there with its size.
pub(crate) fn check_size(folder: &Path, file: &FileEntry) -> Result<()> {
    let path = folder.join(&file.name);
    let found = match fs::metadata(&path) {
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(CheckpointError::damaged(&path, 0..file.nbytes, "the file is missing"));
        }
        Err(error) => return Err(os("read", &path)(error).into()),
    };
    if found == file.nbytes {
        return Ok(());
    }
    let range = found.min(file.nbytes)..found.max(file.nbytes);
    Err(CheckpointError::damaged(&path, range, format!("the file had {} bytes and has {found}", file.nbytes)))
}

/// Bytes of a block are few enough for memory.
fn in_memory(nbytes: u64) -> usize {
    usize::try_from(nbytes).unwrap_or(usize::MAX)
}
