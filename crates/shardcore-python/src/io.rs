//! `shardcore.offload`: the I/O engine and its files.

use std::path::PathBuf;
use std::time::Duration;

use pyo3::exceptions::PyBaseException;
use pyo3::prelude::*;
#[cfg(feature = "stubs")]
use pyo3::{PyTypeInfo, inspect::PyStaticExpr, type_hint_union};
use shardcore_io::{Backend, Direct, Handle, IoEngine, Kind, Options, Place, StorageError, SwapFile};

use crate::args::{u64_of, usize_of};
use crate::error::CoreError;
use crate::gil;
use crate::host_memory::PyHostMemory;
use crate::tensor::TensorRef;

/// How long a wait may go without a look at Ctrl-C.
const TICK: Duration = Duration::from_millis(100);

/// Reads and writes tensors, many at a time, while Python goes on. Any size, any offset, any dtype; any thread may
/// submit.
///
/// ``queue_depth`` transfers of up to ``block_nbytes`` are under way at once. ``backend`` is ``"io_uring"``,
/// ``"threads"`` or ``"auto"`` (``io_uring`` where the kernel allows it). ``direct`` says whether bytes go past the
/// page cache (``O_DIRECT``): ``"auto"`` where the file system allows it, ``"on"`` (an error where it does not) or
/// ``"off"``.
///
/// Requests on the same bytes of a file take effect in the order of their submission. A finished write is seen by
/// every reader; it survives a power failure only after an ``fsync``. A context manager: leaving it closes the
/// engine. An engine belongs to the process that made it; after a fork, make another.
///
/// Raises ``ConfigError`` for a setting out of range, and ``StorageError`` if ``"io_uring"`` is refused.
#[pyclass(frozen, name = "IoEngine", module = "shardcore.offload")]
pub(crate) struct PyIoEngine {
    engine: IoEngine,
    direct: Direct,
}

#[pymethods]
impl PyIoEngine {
    #[new]
    #[pyo3(signature = (*, queue_depth = 32, block_nbytes = 1_048_576, backend = "auto", direct = "auto"))]
    fn new(py: Python<'_>, queue_depth: i128, block_nbytes: i128, backend: &str, direct: &str) -> PyResult<Self> {
        let mut options = options(queue_depth, block_nbytes).map_err(|error| CoreError::Config(error.to_string()))?;
        options.backend = match backend {
            "auto" => None,
            "io_uring" => Some(Backend::IoUring),
            "threads" => Some(Backend::Threads),
            _ => return Err(unknown("backend", backend, "\"auto\", \"io_uring\" or \"threads\"")),
        };
        options.direct = match direct {
            "auto" => Direct::Auto,
            "on" => Direct::On,
            "off" => Direct::Off,
            _ => return Err(unknown("direct", direct, "\"auto\", \"on\" or \"off\"")),
        };
        let direct = options.direct;
        Ok(Self { engine: gil::run(py, || IoEngine::new(options))?, direct })
    }

    /// What carries transfers out: ``"io_uring"`` or ``"threads"``.
    #[getter]
    fn backend(&self) -> &'static str {
        self.engine.backend().name()
    }

    /// Transfers under way at once.
    #[getter]
    fn queue_depth(&self) -> usize {
        self.engine.queue_depth()
    }

    /// Bytes of a transfer at most.
    #[getter]
    fn block_nbytes(&self) -> usize {
        self.engine.block_nbytes()
    }

    /// Whether bytes go past the page cache: ``"auto"``, ``"on"`` or ``"off"``, as given.
    #[getter]
    fn direct(&self) -> &'static str {
        match self.direct {
            Direct::Auto => "auto",
            Direct::On => "on",
            Direct::Off => "off",
        }
    }

    /// Starts to write the tensor's bytes at ``offset`` (bytes) of a file, which is made if missing and never cut.
    ///
    /// The tensor is contiguous and on the CPU. Until the handle is done, do not change it, and do not resize its
    /// storage; dropping it is fine. Raises ``StorageError`` for a tensor or an offset that cannot be; what goes wrong
    /// with the file is raised by ``Handle.wait``, or by ``close`` if nobody waits.
    #[pyo3(signature = (path, tensor, offset = 0))]
    fn write(&self, py: Python<'_>, path: Storage<'_>, tensor: TensorRef, offset: i128) -> PyResult<PyIoHandle> {
        self.submit(py, Kind::Write, path, tensor, offset)
    }

    /// Starts to read the tensor's bytes from ``offset`` (bytes) of a file, which must have them all.
    ///
    /// As for ``write``; until the handle is done, the tensor's values are undefined.
    #[pyo3(signature = (path, tensor, offset = 0))]
    fn read(&self, py: Python<'_>, path: Storage<'_>, tensor: TensorRef, offset: i128) -> PyResult<PyIoHandle> {
        tensor.mark_changed(py)?;
        self.submit(py, Kind::Read, path, tensor, offset)
    }

    /// Lets the kernel look the memory up and pin it once, instead of at each transfer; the engine keeps it until
    /// ``close``.
    ///
    /// Returns whether the kernel did. It may refuse (``ulimit -l``); transfers work all the same.
    fn register(&self, py: Python<'_>, memory: &PyHostMemory) -> PyResult<bool> {
        gil::run(py, || match self.engine.register(memory.buffer()) {
            Ok(()) => Ok(true),
            Err(StorageError::NotRegistered { .. }) => Ok(false),
            Err(error) => Err(error),
        })
    }

    /// Waits for all requests and ends the engine; a second call does nothing.
    ///
    /// Raises the error of a request that failed and for which nobody waited.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        until(py, || self.engine.wait_idle(TICK).then_some(()))?;
        gil::run(py, || self.engine.close())
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    /// Closes the engine. An error that is under way already is not replaced by another; it gets a note.
    #[pyo3(signature = (kind, error, traceback, /))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        error: Option<&Bound<'_, PyBaseException>>,
        traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let _ = (kind, traceback);
        match (self.close(py), error) {
            (Err(also), Some(error)) => error.call_method1("add_note", (format!("also: {also}"),)).map(drop),
            (outcome, _) => outcome,
        }
    }

    fn __repr__(&self) -> String {
        let (depth, block) = (self.engine.queue_depth(), self.engine.block_nbytes());
        format!("<IoEngine on {}: {depth} transfers of {block} bytes, direct={:?}>", self.backend(), self.direct())
    }
}

impl PyIoEngine {
    fn submit(
        &self,
        py: Python<'_>,
        kind: Kind,
        place: Storage<'_>,
        tensor: TensorRef,
        offset: i128,
    ) -> PyResult<PyIoHandle> {
        until(py, || self.engine.wait_for_room(TICK).then_some(()))?;
        let start = |place: Place<'_>| {
            gil::run(py, || {
                let offset = u64_of("offset", offset, "0 to 2^63 - 1 bytes")?;
                self.engine.submit(kind, place, offset, tensor)
            })
        };
        let handle = match place {
            Storage::Path(path) => start(Place::Path(&path)),
            Storage::Swap(swap) => start(Place::Swap(&swap.get().0)),
        };
        handle.map(PyIoHandle)
    }
}

impl Drop for PyIoEngine {
    fn drop(&mut self) {
        // Waits for requests under way, without the GIL. None while the interpreter ends: the engine's own drop does it.
        Python::try_attach(|py| py.detach(|| self.engine.close().ok()));
    }
}

/// A request under way. Dropping it neither cancels nor waits: the engine finishes the request.
#[pyclass(frozen, name = "IoHandle", module = "shardcore.offload")]
pub(crate) struct PyIoHandle(Handle);

#[pymethods]
impl PyIoHandle {
    /// Whether the request has ended, well or badly.
    fn done(&self) -> bool {
        self.0.done()
    }

    /// Waits for the end of the request; other Python threads go on, and Ctrl-C is honoured.
    ///
    /// Raises ``StorageError`` with ``filename``, ``offset`` and ``errno`` if it failed. A later call does the same
    /// again.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        until(py, || self.0.wait_timeout(TICK))?.map_err(|error| CoreError::from(error).into())
    }

    fn __repr__(&self) -> &'static str {
        if self.0.done() { "<IoHandle: done>" } else { "<IoHandle: under way>" }
    }
}

/// A file of fixed size that has its space from the start, for data which only this process needs.
///
/// ``folders`` are made if missing; with several, stripes of ``stripe_nbytes`` (whole pages) alternate between
/// them. The file has no name, so nothing is left behind however the process ends; what a process left that was
/// killed while making one is removed, and named in ``swept``. Pass it to ``IoEngine.write`` and ``read`` in place
/// of a path.
///
/// Raises ``StorageError``, with the arithmetic if a disk is too small.
#[pyclass(frozen, name = "SwapFile", module = "shardcore.offload")]
pub(crate) struct PySwapFile(SwapFile);

#[pymethods]
impl PySwapFile {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 makes the list from a Python sequence")]
    #[pyo3(signature = (engine, folders, nbytes, *, stripe_nbytes = 1_048_576))]
    fn new(
        py: Python<'_>,
        engine: &PyIoEngine,
        folders: Vec<PathBuf>,
        nbytes: i128,
        stripe_nbytes: i128,
    ) -> PyResult<Self> {
        gil::run(py, || {
            let nbytes = u64_of("nbytes", nbytes, "0 to 2^63 - 1 bytes")?;
            let stripe_nbytes = u64_of("stripe_nbytes", stripe_nbytes, "whole pages")?;
            SwapFile::create(&engine.engine, &folders, nbytes, stripe_nbytes)
        })
        .map(Self)
    }

    /// Bytes of the file.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.nbytes()
    }

    /// Files of killed processes that were found in the folders and removed.
    #[getter]
    fn swept(&self) -> Vec<PathBuf> {
        self.0.swept().to_vec()
    }

    fn __repr__(&self) -> String {
        format!("<SwapFile of {} bytes>", self.0.nbytes())
    }
}

/// A path or a swap file.
enum Storage<'py> {
    Path(PathBuf),
    Swap(Bound<'py, PySwapFile>),
}

impl<'py> FromPyObject<'_, 'py> for Storage<'py> {
    type Error = PyErr;

    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_union!(PathBuf::INPUT_TYPE, PySwapFile::TYPE_HINT);

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match object.cast::<PySwapFile>() {
            Ok(swap) => Ok(Self::Swap(swap.to_owned())),
            Err(_) => Ok(Self::Path(object.extract()?)),
        }
    }
}

fn options(queue_depth: i128, block_nbytes: i128) -> Result<Options, StorageError> {
    let depth = usize_of("queue_depth", queue_depth, "1 to 4096 transfers at once")?;
    Options::new(depth, usize_of("block_nbytes", block_nbytes, "a multiple of 4096 bytes (a page)")?)
}

fn unknown(what: &str, value: &str, expected: &str) -> PyErr {
    CoreError::Config(format!("{what} is {value:?}: expected {expected}")).into()
}

/// Calls `attempt` until it gives something, with a look at signals in between.
fn until<T: Send>(py: Python<'_>, attempt: impl Fn() -> Option<T> + Sync) -> PyResult<T> {
    loop {
        if let Some(value) = gil::run_infallible(py, &attempt)? {
            return Ok(value);
        }
    }
}
