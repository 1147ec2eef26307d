//! One file of a checkpoint, written as a stream: past the page cache in large aligned blocks, synced, and compared.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use shardcore_io::{Block, IoEngine, Kind, Loan, Options, Place, reserve};

use crate::checksum::{BLOCK_NBYTES, Sums, sum};
use crate::error::{CheckpointError, Result};
use crate::files::os;
use crate::safetensors::{Entry, header};

/// Bytes that are written at once, and so the memory of a block of the stream.
const CHUNK_NBYTES: usize = 4 << 20;
/// Chunks under way at once.
const NUM_CHUNKS: usize = 4;
/// Bytes of one transfer.
const TRANSFER_NBYTES: usize = 1 << 20;

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Bytes of the file.
    pub nbytes: u64,
    /// Bytes before the data.
    pub header_nbytes: u64,
    /// CRC-32 of these.
    pub header_sum: u32,
    /// For each entry: where it begins in the file, and the sums of its blocks.
    pub entries: Vec<(u64, Vec<u32>)>,
}

/// A file that is being written: its header first, then the bytes of its entries in their order.
pub struct FileWriter {
    path: PathBuf,
    engine: IoEngine,
    header: Vec<u8>,
    /// For each entry, where it begins in the file; and the end of the last.
    bounds: Vec<u64>,
    sums: Vec<Vec<u32>>,
    current: Option<Sums>,
    /// Bytes of the file that have come.
    position: u64,
    block: Option<Block>,
    filled: usize,
    /// Where the first byte of `block` goes.
    block_offset: u64,
    loans: VecDeque<Loan>,
}

impl FileWriter {
    /// Makes the file, which must not exist, with its space and its header.
    ///
    /// # Errors
    /// [`CheckpointError::Storage`]: the disk is full, with the arithmetic, or refuses; [`CheckpointError::BadIndex`] for
    /// entries that no file can hold.
    pub fn create(path: &Path, entries: &[Entry], metadata: &[(String, String)]) -> Result<Self> {
        let (header, mut bounds) = header(entries, metadata)?;
        let last = entries.last().map_or(Ok(0), Entry::nbytes)?;
        bounds.push(bounds.last().map_or(header.len() as u64, |start| start + last));
        let file = OpenOptions::new().write(true).create_new(true).open(path).map_err(os("create", path))?;
        reserve(&file, path, *bounds.last().unwrap_or(&0))?;
        let mut writer = Self {
            path: path.to_owned(),
            engine: IoEngine::new(Options::new(NUM_CHUNKS * CHUNK_NBYTES / TRANSFER_NBYTES, TRANSFER_NBYTES)?)?,
            header: Vec::new(),
            bounds,
            sums: Vec::new(),
            current: None,
            position: 0,
            block: None,
            filled: 0,
            block_offset: 0,
            loans: VecDeque::new(),
        };
        writer.append(&header)?;
        writer.header = header;
        writer.end_entries()?;
        Ok(writer)
    }

    /// The next bytes of the data.
    ///
    /// # Errors
    /// [`CheckpointError::Storage`] if the disk fails; [`CheckpointError::Internal`] for more bytes than were announced.
    pub fn put(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let Some(sums) = &mut self.current else {
                return Err(self.misused("more bytes come than its entries have"));
            };
            let left = self.bounds[self.sums.len() + 1] - self.position;
            let (now, rest) = bytes.split_at(usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len()));
            sums.update(now);
            self.append(now)?;
            bytes = rest;
            self.end_entries()?;
        }
        Ok(())
    }

    /// Writes what is left, syncs the file and compares it: its size, and its header, with what was written. With
    /// `read_back` all bytes are read again and their sums compared with those taken while writing.
    ///
    /// # Errors
    /// [`CheckpointError::Storage`] if the disk fails; [`CheckpointError::Damaged`] if the file is not what was written.
    pub fn finish(mut self, read_back: bool) -> Result<Written> {
        if self.current.is_some() {
            return Err(self.misused("bytes of its entries are missing"));
        }
        self.flush()?;
        while let Some(loan) = self.loans.pop_front() {
            loan.wait()?;
        }
        self.engine.close()?;
        let file = File::open(&self.path).map_err(os("open", &self.path))?;
        file.sync_all().map_err(os("sync", &self.path))?;
        let found = file.metadata().map_err(os("read", &self.path))?.len();
        if found != self.position {
            let what = format!("{} bytes were written, and it has {found}", self.position);
            return Err(CheckpointError::damaged(&self.path, found.min(self.position)..found.max(self.position), what));
        }
        self.compare(&file, read_back)?;
        Ok(Written {
            nbytes: self.position,
            header_nbytes: self.header.len() as u64,
            header_sum: sum(&self.header),
            entries: self.bounds.iter().copied().zip(self.sums).collect(),
        })
    }

    fn compare(&self, file: &File, read_back: bool) -> Result<()> {
        let mut buffer = vec![0; self.header.len()];
        file.read_exact_at(&mut buffer, 0).map_err(os("read", &self.path))?;
        if buffer != self.header {
            let range = 0..self.header.len() as u64;
            return Err(CheckpointError::damaged(&self.path, range, "the header reads other than it was written"));
        }
        if !read_back {
            return Ok(());
        }
        for (bounds, sums) in self.bounds.windows(2).zip(&self.sums) {
            let mut start = bounds[0];
            for &expected in sums {
                let stop = (start + BLOCK_NBYTES).min(bounds[1]);
                buffer.resize(usize::try_from(stop - start).unwrap_or(usize::MAX), 0);
                file.read_exact_at(&mut buffer, start).map_err(os("read", &self.path))?;
                if sum(&buffer) != expected {
                    return Err(CheckpointError::damaged(&self.path, start..stop, "they read other than written"));
                }
                start = stop;
            }
        }
        Ok(())
    }

    /// Ends the entries whose last byte has come, empty ones too, and begins the next.
    fn end_entries(&mut self) -> Result<()> {
        if self.current.is_none() && self.sums.len() + 1 < self.bounds.len() {
            self.current = Some(Sums::new(BLOCK_NBYTES));
        }
        while self.current.is_some() && self.position == self.bounds[self.sums.len() + 1] {
            let ended = self.current.take().unwrap_or_else(|| Sums::new(BLOCK_NBYTES));
            self.sums.push(ended.finish());
            if self.sums.len() + 1 < self.bounds.len() {
                self.current = Some(Sums::new(BLOCK_NBYTES));
            }
        }
        if self.sums.len() + 1 == self.bounds.len() { self.flush() } else { Ok(()) }
    }

    fn append(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let filled = self.filled;
            let block = self.block()?;
            let (now, rest) = bytes.split_at((block.nbytes() - filled).min(bytes.len()));
            block.bytes_mut()[filled..filled + now.len()].copy_from_slice(now);
            self.filled += now.len();
            self.position += now.len() as u64;
            bytes = rest;
            if self.filled == CHUNK_NBYTES {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// The block that is being filled; the oldest one that is under way, once all are.
    fn block(&mut self) -> Result<&mut Block> {
        let block = match self.block.take() {
            Some(block) => block,
            None if self.loans.len() < NUM_CHUNKS => Block::new("the buffer of a checkpoint's file", CHUNK_NBYTES)?,
            None => match self.loans.pop_front() {
                Some(loan) => loan.wait()?,
                None => return Err(self.misused("it has no buffer")),
            },
        };
        Ok(self.block.insert(block))
    }

    fn flush(&mut self) -> Result<()> {
        let Some(block) = self.block.take() else { return Ok(()) };
        if self.filled > 0 {
            let place = Place::Path(&self.path);
            self.loans.push_back(self.engine.lend(Kind::Write, place, self.block_offset, block, self.filled)?);
        }
        self.block_offset += self.filled as u64;
        self.filled = 0;
        Ok(())
    }

    fn misused(&self, what: &str) -> CheckpointError {
        CheckpointError::Internal(format!("writing {}: {what}", self.path.display()))
    }
}
