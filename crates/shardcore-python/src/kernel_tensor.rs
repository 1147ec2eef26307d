//! Tensors as numbers: what kernels read and update in place.
//!
//! The binding asks the tensor object itself, at each call, and keeps that object alive for as long as it uses the
//! memory. This is the only place where an address becomes a slice.

use std::ops::Range;
use std::slice;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use shardcore_kernels::{Values, ValuesMut};

use crate::error::CoreError;

/// The element types that kernels work on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F32,
    Bf16,
    F16,
    /// The 16 bits that a bf16 lacks.
    I16,
    /// Codes of quantised numbers.
    U8,
}

impl Element {
    const ALL: [(Self, &'static str); 5] = [
        (Self::F32, "float32"),
        (Self::Bf16, "bfloat16"),
        (Self::F16, "float16"),
        (Self::I16, "int16"),
        (Self::U8, "uint8"),
    ];

    pub(crate) fn itemsize(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 | Self::I16 => 2,
            Self::U8 => 1,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        Self::ALL.iter().find(|(element, _)| *element == self).map_or("", |(_, name)| name)
    }
}

/// torch's dtype objects, in the order of [`Element::ALL`], and its strided layout.
struct Torch {
    dtypes: [Py<PyAny>; 5],
    strided: Py<PyAny>,
}

impl Torch {
    fn get(py: Python<'_>) -> PyResult<&'static Self> {
        static TORCH: PyOnceLock<Torch> = PyOnceLock::new();
        TORCH.get_or_try_init(py, || {
            // Whoever has a tensor has imported torch.
            let torch = py.import("torch")?;
            let [f32, bf16, f16, i16, u8] = Element::ALL.map(|(_, name)| torch.getattr(name));
            let dtypes = [f32?.unbind(), bf16?.unbind(), f16?.unbind(), i16?.unbind(), u8?.unbind()];
            Ok(Self { dtypes, strided: torch.getattr("strided")?.unbind() })
        })
    }
}

/// A tensor and the memory that it was found to have.
pub(crate) struct KernelTensor {
    owner: Py<PyAny>,
    address: usize,
    numel: usize,
    element: Element,
}

impl KernelTensor {
    /// Asks a tensor for its memory. `what` names it in messages.
    ///
    /// # Errors
    /// `ConfigError` for a tensor that is not dense, contiguous, on the CPU, of a known type and with memory of its own;
    /// `TypeError` for what is no tensor.
    pub(crate) fn read(tensor: &Bound<'_, PyAny>, what: &str) -> PyResult<Self> {
        let py = tensor.py();
        let torch = Torch::get(py)?;
        let layout = tensor.getattr(intern!(py, "layout"))?;
        if !layout.is(&torch.strided) {
            return Err(refused(what, "is dense (torch.strided)", &layout));
        }
        if !tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()? {
            return Err(refused(what, "is on the CPU", &tensor.getattr(intern!(py, "device"))?));
        }
        let dtype = tensor.getattr(intern!(py, "dtype"))?;
        let Some(index) = torch.dtypes.iter().position(|known| dtype.is(known)) else {
            return Err(refused(what, "is float32, bfloat16 or float16", &dtype));
        };
        if !tensor.call_method0(intern!(py, "is_contiguous"))?.is_truthy()? {
            return Err(refused(what, "is contiguous", &tensor.call_method0(intern!(py, "stride"))?));
        }
        let numel: usize = tensor.call_method0(intern!(py, "numel"))?.extract()?;
        let address: usize = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let element = Element::ALL[index].0;
        if numel > 0 && (address == 0 || !address.is_multiple_of(element.itemsize())) {
            return Err(refused(what, "has aligned memory (that of a sharded parameter may be released)", tensor));
        }
        Ok(Self { owner: tensor.clone().unbind(), address, numel, element })
    }

    /// Asks a tensor that is only read; one that is not contiguous is copied.
    pub(crate) fn read_or_copy(tensor: &Bound<'_, PyAny>, what: &str) -> PyResult<Self> {
        let py = tensor.py();
        // A sparse tensor has no answer; `read` says what is wrong with it.
        let is_dense = tensor.getattr(intern!(py, "layout"))?.is(&Torch::get(py)?.strided);
        if is_dense && !tensor.call_method0(intern!(py, "is_contiguous"))?.is_truthy()? {
            return Self::read(&tensor.call_method0(intern!(py, "contiguous"))?, what);
        }
        Self::read(tensor, what)
    }

    /// The bytes, checked to lie within the tensor's storage.
    ///
    /// # Errors
    /// `ConfigError` if the storage was shrunk below what the tensor needs.
    pub(crate) fn check_storage(&self, py: Python<'_>, what: &str) -> PyResult<()> {
        let tensor = self.owner.bind(py);
        let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
        let held: usize = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
        let offset: usize = tensor.call_method0(intern!(py, "storage_offset"))?.extract()?;
        let needed = (offset + self.numel) * self.element.itemsize();
        if self.numel == 0 || needed <= held {
            return Ok(());
        }
        Err(CoreError::KernelTensor(format!("{what} needs {needed} bytes of its storage, which has {held}")).into())
    }

    /// Whether the tensor still has the memory that it had when it was read.
    pub(crate) fn is_current(&self, py: Python<'_>) -> PyResult<bool> {
        let tensor = self.owner.bind(py);
        let address: usize = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let numel: usize = tensor.call_method0(intern!(py, "numel"))?.extract()?;
        let torch = Torch::get(py)?;
        let is_same_dtype = tensor.getattr(intern!(py, "dtype"))?.is(&torch.dtypes[self.element as usize]);
        Ok(address == self.address && numel == self.numel && is_same_dtype)
    }

    /// The tensor object.
    pub(crate) fn owner<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.owner.bind(py)
    }

    pub(crate) fn numel(&self) -> usize {
        self.numel
    }

    pub(crate) fn element(&self) -> Element {
        self.element
    }

    /// The addresses that it occupies.
    pub(crate) fn span(&self) -> Range<usize> {
        self.address..self.address + self.numel * self.element.itemsize()
    }

    /// The numbers, to be read; none for a type that is no number of a kernel.
    ///
    /// # Safety
    /// Until the slice is dropped the owner is alive, the storage is not resized, and nobody writes to the memory.
    pub(crate) unsafe fn values<'a>(&self) -> Option<Values<'a>> {
        // SAFETY: `read` saw this many elements at this address, aligned; the rest is the caller's promise.
        unsafe {
            match self.element {
                Element::F32 => Some(Values::F32(self.slice())),
                Element::Bf16 => Some(Values::Bf16(self.slice())),
                Element::F16 => Some(Values::F16(self.slice())),
                Element::I16 | Element::U8 => None,
            }
        }
    }

    /// The numbers, to be written.
    ///
    /// # Safety
    /// As for [`values`](Self::values), and nobody reads the memory either.
    pub(crate) unsafe fn values_mut<'a>(&self) -> Option<ValuesMut<'a>> {
        // SAFETY: as in `values`.
        unsafe {
            match self.element {
                Element::F32 => Some(ValuesMut::F32(self.slice_mut())),
                Element::Bf16 => Some(ValuesMut::Bf16(self.slice_mut())),
                Element::F16 => Some(ValuesMut::F16(self.slice_mut())),
                Element::I16 | Element::U8 => None,
            }
        }
    }

    /// The bits of 16-bit elements, to be written.
    ///
    /// # Safety
    /// As for [`values_mut`](Self::values_mut); the elements have 16 bits.
    pub(crate) unsafe fn bits_mut<'a>(&self) -> &'a mut [u16] {
        debug_assert_eq!(self.element.itemsize(), 2);
        // SAFETY: as in `values`.
        unsafe { self.slice_mut() }
    }

    /// The bytes of uint8 elements.
    ///
    /// # Safety
    /// As for [`values`](Self::values); the elements are bytes.
    pub(crate) unsafe fn bytes<'a>(&self) -> &'a [u8] {
        debug_assert_eq!(self.element, Element::U8);
        // SAFETY: as in `values`.
        unsafe { self.slice() }
    }

    /// The bytes of uint8 elements, to be written.
    ///
    /// # Safety
    /// As for [`values_mut`](Self::values_mut); the elements are bytes.
    pub(crate) unsafe fn bytes_mut<'a>(&self) -> &'a mut [u8] {
        debug_assert_eq!(self.element, Element::U8);
        // SAFETY: as in `values`.
        unsafe { self.slice_mut() }
    }

    /// # Safety
    /// As for [`values`](Self::values); `T` has the size of an element.
    unsafe fn slice<'a, T>(&self) -> &'a [T] {
        if self.numel == 0 {
            return &[];
        }
        // SAFETY: the caller's promise.
        unsafe { slice::from_raw_parts(self.address as *const T, self.numel) }
    }

    /// # Safety
    /// As for [`values_mut`](Self::values_mut); `T` has the size of an element.
    unsafe fn slice_mut<'a, T>(&self) -> &'a mut [T] {
        if self.numel == 0 {
            return &mut [];
        }
        // SAFETY: the caller's promise.
        unsafe { slice::from_raw_parts_mut(self.address as *mut T, self.numel) }
    }
}

fn refused(what: &str, expected: &str, found: &Bound<'_, PyAny>) -> PyErr {
    let found = found.repr().map_or_else(|_| "?".to_owned(), |text| text.to_string());
    CoreError::KernelTensor(format!("{what}: a CPU kernel needs a tensor that {expected}, got {found}")).into()
}
