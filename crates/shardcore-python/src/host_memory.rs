//! `shardcore.offload`: host memory as a Python buffer.

use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::ffi;
use pyo3::prelude::*;
use shardcore_io::{HostBuffer, HostOptions, HostPool, StorageError};

use crate::args::{u64_of, usize_of};
use crate::gil;

/// Page-aligned host memory of exactly ``nbytes``, zeroed and committed, behind ``shardcore.offload.HostPool``.
///
/// It is a writable Python buffer. ``take`` hands it out from start to end. With ``huge_pages`` it is aligned to
/// them and the kernel is asked for them; with ``lock`` it is never swapped out.
///
/// Raises ``StorageError`` with the arithmetic when the machine, a container or ``ulimit -l`` has less.
#[pyclass(frozen, name = "HostMemory", module = "shardcore.offload")]
pub(crate) struct PyHostMemory {
    pool: HostPool,
    on_release: Mutex<Option<Py<PyAny>>>,
}

impl PyHostMemory {
    pub(crate) fn buffer(&self) -> &Arc<HostBuffer> {
        self.pool.buffer()
    }
}

/// Checks that ``nbytes`` of host memory can be had now, and takes none. ``what`` begins the message.
///
/// Raises ``StorageError`` with the arithmetic when the machine or a container has less.
#[pyfunction]
pub(crate) fn check_host_memory(py: Python<'_>, what: &str, nbytes: i128) -> PyResult<()> {
    gil::run(py, || HostOptions::now().limits.check(what, u64_of("nbytes", nbytes, "0 bytes or more")?, false))
}

#[pymethods]
impl PyHostMemory {
    #[new]
    #[pyo3(signature = (nbytes, *, huge_pages = true, lock = false))]
    fn new(py: Python<'_>, nbytes: i128, huge_pages: bool, lock: bool) -> PyResult<Self> {
        let pool = gil::run(py, || {
            let options = HostOptions { huge_pages, lock, ..HostOptions::now() };
            HostPool::new(usize_of("nbytes", nbytes, "0 bytes or more")?, &options)
        })?;
        Ok(Self { pool, on_release: Mutex::new(None) })
    }

    /// Bytes that ``take`` hands out.
    #[getter]
    fn nbytes(&self) -> usize {
        self.buffer().nbytes()
    }

    /// Bytes taken from the machine: ``nbytes`` in whole pages.
    #[getter]
    fn committed_nbytes(&self) -> usize {
        self.buffer().committed_nbytes()
    }

    /// Bytes handed out, with the gaps between pieces.
    #[getter]
    fn taken_nbytes(&self) -> usize {
        self.pool.taken_nbytes()
    }

    /// Address of the first byte.
    #[getter]
    fn address(&self) -> usize {
        self.buffer().start().addr()
    }

    /// Hands out the next ``nbytes`` and says where they start; pieces start at multiples of 512.
    ///
    /// Raises ``StorageError`` with the arithmetic when fewer are left.
    fn take(&self, py: Python<'_>, nbytes: i128) -> PyResult<usize> {
        gil::run(py, || Ok::<_, StorageError>(self.pool.take(usize_of("nbytes", nbytes, "0 bytes or more")?)?.start))
    }

    /// Bytes of a memory from which pieces of these sizes can be taken in this order.
    #[staticmethod]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 makes the list from a Python sequence")]
    fn required(pieces: Vec<usize>) -> PyResult<usize> {
        let total = HostPool::required(&pieces);
        total.ok_or_else(|| {
            let error =
                StorageError::out_of_range("the number of pieces", pieces.len() as i128, "pieces below 2^63 bytes");
            crate::error::CoreError::from(error).into()
        })
    }

    /// Calls ``callback()`` just before the memory is given back.
    fn on_release(&self, callback: Py<PyAny>) {
        *self.on_release.lock().unwrap_or_else(PoisonError::into_inner) = Some(callback);
    }

    /// # Safety
    /// The interpreter calls this with a view to fill.
    unsafe fn __getbuffer__(slf: &Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let (start, nbytes) = (slf.get().buffer().start(), slf.get().buffer().nbytes());
        // SAFETY: the view takes a reference to the object, which owns the mapping; it is writable.
        let status =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start.cast(), nbytes.cast_signed(), 0, flags) };
        if status == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

impl Drop for PyHostMemory {
    fn drop(&mut self) {
        let Some(callback) = self.on_release.get_mut().unwrap_or_else(PoisonError::into_inner).take() else { return };
        // None while the interpreter ends, when nothing needs to be undone.
        Python::try_attach(|py| {
            if let Err(error) = callback.call0(py) {
                error.write_unraisable(py, None);
            }
        });
    }
}
