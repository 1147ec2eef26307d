//! A torch tensor as Rust sees it: where its memory is.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyString;

/// The memory of a contiguous CPU tensor, read at the call, and the tensor that keeps it alive.
pub(crate) struct TensorRef {
    pub(crate) owner: Py<PyAny>,
    pub(crate) address: usize,
    pub(crate) nbytes: usize,
}

impl<'py> FromPyObject<'_, 'py> for TensorRef {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let is_cpu: bool = object.getattr(pyo3::intern!(py, "is_cpu"))?.extract()?;
        let is_contiguous: bool = object.call_method0(pyo3::intern!(py, "is_contiguous"))?.extract()?;
        if !is_cpu || !is_contiguous {
            let device = object.getattr(pyo3::intern!(py, "device"))?.str()?;
            return Err(PyValueError::new_err(unfit(&device, is_contiguous)));
        }
        Ok(Self {
            owner: object.to_owned().unbind(),
            address: object.call_method0(pyo3::intern!(py, "data_ptr"))?.extract()?,
            nbytes: object.getattr(pyo3::intern!(py, "nbytes"))?.extract()?,
        })
    }
}

fn unfit(device: &Bound<'_, PyString>, is_contiguous: bool) -> String {
    let layout = if is_contiguous { "contiguous" } else { "strided" };
    format!("expected a contiguous CPU tensor, got a {layout} one on {device}; use tensor.cpu().contiguous()")
}
