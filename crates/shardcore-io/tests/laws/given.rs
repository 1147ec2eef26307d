//! Folders, engines and memory for the tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use shardcore_io::{
    Backend, Direct, Faults, Handle, HostBuffer, HostOptions, HostSlice, IoEngine, Kind, Options, Place, StorageError,
};

pub(crate) const BACKENDS: [Backend; 2] = [Backend::IoUring, Backend::Threads];

/// Cases of a property: few in every run, many with `SHARDCORE_FULL=1`.
pub(crate) fn cases(few: u32, many: u32) -> u32 {
    if std::env::var_os("SHARDCORE_FULL").is_some() { many } else { few }
}

/// A folder that goes when the test ends. It lies in the target folder, whose file system knows `O_DIRECT` where a
/// temporary one may not.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("io-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
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

/// How an engine of a test differs from the default one.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    pub(crate) backend: Option<Backend>,
    pub(crate) direct: Direct,
    pub(crate) queue_depth: usize,
    pub(crate) block_nbytes: usize,
    pub(crate) faults: Option<Arc<dyn Faults>>,
}

impl Setting {
    pub(crate) fn of(backend: Backend) -> Self {
        let (direct, queue_depth, block_nbytes) = (Direct::Auto, 4, 8192);
        Self { backend: Some(backend), direct, queue_depth, block_nbytes, faults: None }
    }

    pub(crate) fn faulty(backend: Backend, faults: impl Faults + 'static) -> Self {
        Self { faults: Some(Arc::new(faults)), ..Self::of(backend) }
    }

    pub(crate) fn options(&self) -> Options {
        let mut options = Options::new(self.queue_depth, self.block_nbytes).unwrap();
        options.backend = self.backend;
        options.direct = self.direct;
        if let Some(faults) = &self.faults {
            options.faults = Arc::clone(faults);
        }
        options
    }

    pub(crate) fn engine(&self) -> IoEngine {
        IoEngine::new(self.options()).unwrap()
    }
}

/// Bytes that differ from place to place and from seed to seed.
pub(crate) fn pattern(seed: u64, nbytes: usize) -> Vec<u8> {
    let mix = |index: u64| (index.wrapping_add(1)).wrapping_mul(0x9E37_79B9_7F4A_7C15 ^ (seed << 1)).to_be_bytes()[1];
    (0..nbytes as u64).map(mix).collect()
}

/// A request and the memory that it reads or writes, `misalignment` bytes behind a page boundary.
pub(crate) struct Pending {
    handle: Handle,
    memory: Arc<HostBuffer>,
    misalignment: usize,
}

impl Pending {
    pub(crate) fn write(engine: &IoEngine, place: Place<'_>, offset: u64, data: &[u8], misalignment: usize) -> Self {
        Self::submit(engine, Kind::Write, place, offset, data, misalignment)
    }

    pub(crate) fn read(engine: &IoEngine, place: Place<'_>, offset: u64, nbytes: usize, misalignment: usize) -> Self {
        Self::submit(engine, Kind::Read, place, offset, &vec![0xAA; nbytes], misalignment)
    }

    fn submit(engine: &IoEngine, kind: Kind, place: Place<'_>, offset: u64, data: &[u8], misalignment: usize) -> Self {
        let range = misalignment..misalignment + data.len();
        let memory = Arc::new(HostBuffer::new("a test", range.end, &HostOptions::now()).unwrap());
        // SAFETY: nobody else knows the buffer, and the range is inside it.
        unsafe { memory.start().add(misalignment).copy_from_nonoverlapping(data.as_ptr(), data.len()) };
        // SAFETY: the memory is looked at when the handle is done, by `wait`.
        let slice = unsafe { HostSlice::new(Arc::clone(&memory), range) }.unwrap();
        let handle = engine.submit(kind, place, offset, slice).unwrap();
        Self { handle, memory, misalignment }
    }

    /// The bytes in memory when the request has ended well.
    pub(crate) fn wait(self) -> Result<Vec<u8>, StorageError> {
        self.handle.wait()?;
        // SAFETY: the request has ended, and its memory is this value's.
        Ok(unsafe { self.memory.bytes() }[self.misalignment..].to_vec())
    }
}
