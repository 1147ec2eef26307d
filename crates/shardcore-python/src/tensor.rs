//! Tensors as memory: what Rust reads and writes in place.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
#[cfg(feature = "stubs")]
use pyo3::{inspect::PyStaticExpr, type_hint_identifier};
use shardcore_io::IoMemory;

use crate::error::CoreError;

/// The memory of a contiguous CPU tensor, kept alive by a reference to the tensor.
pub(crate) struct TensorRef {
    owner: Py<PyAny>,
    address: usize,
    nbytes: usize,
}

impl TensorRef {
    /// Where the tensor's bytes are in this process, and how many.
    pub(crate) fn span(&self) -> (usize, usize) {
        (self.address, self.nbytes)
    }

    /// The tensor's bytes.
    ///
    /// # Safety
    /// While the slice lives, nobody writes them or frees their storage.
    pub(crate) unsafe fn bytes(&self) -> &[u8] {
        if self.nbytes == 0 {
            return &[];
        }
        // SAFETY: the memory was checked to be there, and the caller promises that it stays as it is.
        unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(self.address), self.nbytes) }
    }

    /// The tensor's bytes, to be written.
    ///
    /// # Safety
    /// While the slice lives, nobody else reads or writes them or frees their storage.
    #[expect(clippy::mut_from_ref, reason = "the memory is the tensor's, not this value's")]
    pub(crate) unsafe fn bytes_mut(&self) -> &mut [u8] {
        if self.nbytes == 0 {
            return &mut [];
        }
        // SAFETY: the memory was checked to be there, and the caller promises to be alone with it.
        unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(self.address), self.nbytes) }
    }

    /// The tensor itself.
    pub(crate) fn into_owner(self) -> Py<PyAny> {
        self.owner
    }

    /// Tells autograd that the tensor's values change behind its back.
    pub(crate) fn mark_changed(&self, py: Python<'_>) -> PyResult<()> {
        let tensor = self.owner.bind(py);
        if tensor.call_method0("is_inference")?.extract()? {
            return Ok(()); // Inference tensors have no version to count.
        }
        py.import("torch.autograd.graph")?.call_method1("increment_version", (tensor,)).map(drop)
    }
}

impl<'py> FromPyObject<'_, 'py> for TensorRef {
    type Error = PyErr;

    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_identifier!("torch", "Tensor");

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if !object.hasattr("data_ptr")? {
            return Err(PyTypeError::new_err(format!("expected a torch.Tensor, got {}", object.get_type())));
        }
        check_layout(&object)?;
        let nbytes = number(&object, "numel")? * number(&object, "element_size")?;
        let before = number(&object, "storage_offset")? * number(&object, "element_size")?;
        let held = number(&object.call_method0("untyped_storage")?, "nbytes")?;
        if nbytes > 0 && held < before + nbytes {
            return Err(refused(
                &object,
                &format!(
                    "its storage holds {held} bytes and it needs {}: the memory was released (a sharded parameter \
                     outside its use is; see sc.summon and sc.local_shard)",
                    before + nbytes
                ),
            ));
        }
        let address = number(&object, "data_ptr")?;
        if nbytes > 0 && address == 0 {
            return Err(refused(&object, "it has no memory of its own"));
        }
        Ok(Self { owner: object.to_owned().unbind(), address, nbytes })
    }
}

// SAFETY: the tensor is referenced until the value is dropped, and its memory was checked to be there. That nobody frees
// the storage under a tensor, or touches its bytes against the rules, while a request is under way is what the methods
// that take a tensor ask of their callers. A reference may be dropped on any thread: pyo3 counts it down later.
unsafe impl IoMemory for TensorRef {
    fn start(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.address)
    }

    fn nbytes(&self) -> usize {
        self.nbytes
    }
}

/// Whether the tensor's elements are plain bytes in a row in host memory.
fn check_layout(tensor: &Bound<'_, PyAny>) -> PyResult<()> {
    let device: String = tensor.getattr("device")?.str()?.extract()?;
    if device != "cpu" {
        return Err(refused(tensor, &format!("it is on device {device}; copy it to the CPU (a pinned buffer) first")));
    }
    let layout: String = tensor.getattr("layout")?.str()?.extract()?;
    if layout != "torch.strided" {
        return Err(refused(tensor, &format!("its layout is {layout}; make it dense first (to_dense)")));
    }
    if !flag(tensor, "is_contiguous")? {
        return Err(refused(tensor, "it is not contiguous; write tensor.contiguous(), or read into a contiguous one"));
    }
    if flag(tensor, "is_conj")? || flag(tensor, "is_neg")? {
        return Err(refused(
            tensor,
            "it is a lazy conjugate or negative; resolve it (resolve_conj, resolve_neg) first",
        ));
    }
    Ok(())
}

fn refused(tensor: &Bound<'_, PyAny>, reason: &str) -> PyErr {
    let text = |name: &str| tensor.getattr(name).and_then(|value| value.str()).map(|text| text.to_string());
    let dtype = text("dtype").unwrap_or_default();
    let shape = tensor.getattr("shape").and_then(|shape| shape.extract::<Vec<usize>>()).unwrap_or_default();
    CoreError::Tensor(format!("this tensor ({dtype}, shape {shape:?}) cannot be read or written: {reason}")).into()
}

fn number(object: &Bound<'_, PyAny>, method: &str) -> PyResult<usize> {
    object.call_method0(method)?.extract()
}

fn flag(object: &Bound<'_, PyAny>, method: &str) -> PyResult<bool> {
    object.call_method0(method)?.extract()
}
