//! `shardcore.comm`: the CPU kernels that make tensors small for their way between ranks.

#![allow(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over by value")]

use std::ops::Range;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use shardcore_kernels::{Bits, Dequantize, Quantize, Values, ValuesMut, quantize};

use crate::error::CoreError;
use crate::gil;
use crate::kernel_tensor::{Element, KernelTensor};

type Tensors<'py> = Vec<Bound<'py, PyAny>>;

/// Numbers that share a scale.
#[pyfunction]
pub(crate) fn quantization_block() -> usize {
    quantize::BLOCK
}

/// Quantises each source into codes of ``bits`` bits (8, or 4: two in a byte) and one fp32 scale per block.
///
/// All are contiguous CPU tensors: sources fp32, bf16 or fp16, codes uint8, scales fp32. A bf16 residual is added to
/// its source first and becomes what rounding took away. What is written shares no memory with anything else here.
/// Raises ``ConfigError`` for other tensors.
#[pyfunction]
#[pyo3(name = "quantize", signature = (sources, codes, scales, *, bits, residuals = None, num_threads = 1))]
pub(crate) fn quantize_tensors(
    py: Python<'_>,
    sources: Tensors<'_>,
    codes: Tensors<'_>,
    scales: Tensors<'_>,
    bits: u32,
    residuals: Option<Tensors<'_>>,
    num_threads: usize,
) -> PyResult<()> {
    let bits = read_bits(bits)?;
    check_counts(&[sources.len(), codes.len(), scales.len(), residuals.as_ref().map_or(sources.len(), Vec::len)])?;
    let sources = read_all(&sources, "a source", None)?;
    let codes = read_all(&codes, "codes", Some(Element::U8))?;
    let scales = read_all(&scales, "scales", Some(Element::F32))?;
    let residuals = read_all(residuals.as_deref().unwrap_or_default(), "a residual", Some(Element::Bf16))?;
    check_apart(&[&sources], &[&codes, &scales, &residuals])?;
    let mut work = Vec::with_capacity(sources.len());
    for (index, source) in sources.iter().enumerate() {
        // SAFETY: the tensors were read just now and their owners live; `check_apart` found what is written to be apart
        // from everything; the elements were checked to be those asked for.
        unsafe {
            let from = floats(source)?;
            let rest = residuals.get(index).map(|residual| residual.bits_mut());
            let item = Quantize::new(from, bits, codes[index].bytes_mut(), singles(&scales[index])?, rest);
            work.push(item.map_err(CoreError::from)?);
        }
    }
    gil::run_infallible(py, || quantize::quantize(work, num_threads))
}

/// Reads codes back: each times the scale of its block, into the targets, or added to what these hold.
///
/// Tensors are those of ``quantize``; the targets are fp32, bf16 or fp16. Raises ``ConfigError`` for others.
#[pyfunction]
#[pyo3(name = "dequantize", signature = (codes, scales, targets, *, bits, add = false, num_threads = 1))]
pub(crate) fn dequantize_tensors(
    py: Python<'_>,
    codes: Tensors<'_>,
    scales: Tensors<'_>,
    targets: Tensors<'_>,
    bits: u32,
    add: bool,
    num_threads: usize,
) -> PyResult<()> {
    let bits = read_bits(bits)?;
    check_counts(&[targets.len(), codes.len(), scales.len()])?;
    let codes = read_all(&codes, "codes", Some(Element::U8))?;
    let scales = read_all(&scales, "scales", Some(Element::F32))?;
    let targets = read_all(&targets, "a target", None)?;
    check_apart(&[&codes, &scales], &[&targets])?;
    let mut work = Vec::with_capacity(targets.len());
    for (index, target) in targets.iter().enumerate() {
        // SAFETY: as in `quantize_tensors`.
        unsafe {
            let to = target.values_mut().ok_or_else(|| not_a_float(target))?;
            let Values::F32(scales) = floats(&scales[index])? else { return Err(not_a_float(&scales[index]).into()) };
            let item = Dequantize::new(bits, codes[index].bytes(), scales, to).map_err(CoreError::from)?;
            work.push(item.adding(add));
        }
    }
    gil::run_infallible(py, || quantize::dequantize(work, num_threads))
}

fn read_bits(bits: u32) -> PyResult<Bits> {
    match bits {
        4 => Ok(Bits::Four),
        8 => Ok(Bits::Eight),
        other => Err(PyValueError::new_err(format!("bits={other}: expected 4 or 8"))),
    }
}

fn check_counts(counts: &[usize]) -> PyResult<()> {
    if counts.windows(2).all(|pair| pair[0] == pair[1]) {
        return Ok(());
    }
    Err(PyValueError::new_err(format!("lists of {counts:?} tensors: expected as many of each")))
}

fn read_all(tensors: &[Bound<'_, PyAny>], what: &str, element: Option<Element>) -> PyResult<Vec<KernelTensor>> {
    let read = |tensor: &Bound<'_, PyAny>| {
        let found = KernelTensor::read(tensor, what)?;
        found.check_storage(tensor.py(), what)?;
        match element {
            Some(expected) if found.element() != expected => Err(wrong_element(what, &found, expected).into()),
            _ => Ok(found),
        }
    };
    tensors.iter().map(read).collect()
}

/// What is written must be apart from all else.
fn check_apart(read: &[&[KernelTensor]], written: &[&[KernelTensor]]) -> Result<(), CoreError> {
    let spans = |tensors: &[&[KernelTensor]], is_written: bool| -> Vec<(Range<usize>, bool)> {
        let all = tensors.iter().copied().flatten();
        all.map(|tensor| (tensor.span(), is_written)).filter(|(span, _)| !span.is_empty()).collect()
    };
    let mut all = spans(read, false);
    all.extend(spans(written, true));
    all.sort_unstable_by_key(|(span, _)| span.start);
    let (mut end, mut written_end) = (0, 0);
    for (span, is_written) in all {
        if span.start < (if is_written { end } else { written_end }) {
            let message = "tensors of one call share memory with what it writes; give each its own".to_owned();
            return Err(CoreError::KernelTensor(message));
        }
        end = end.max(span.end);
        written_end = if is_written { written_end.max(span.end) } else { written_end };
    }
    Ok(())
}

/// # Safety
/// As for [`KernelTensor::values`].
unsafe fn floats<'a>(tensor: &KernelTensor) -> Result<Values<'a>, CoreError> {
    // SAFETY: the caller's promise.
    unsafe { tensor.values() }.ok_or_else(|| not_a_float(tensor))
}

/// # Safety
/// As for [`KernelTensor::values_mut`].
unsafe fn singles<'a>(tensor: &KernelTensor) -> Result<&'a mut [f32], CoreError> {
    // SAFETY: the caller's promise.
    match unsafe { tensor.values_mut() } {
        Some(ValuesMut::F32(slice)) => Ok(slice),
        _ => Err(not_a_float(tensor)),
    }
}

fn not_a_float(tensor: &KernelTensor) -> CoreError {
    CoreError::KernelTensor(format!("expected float32, bfloat16 or float16, got {}", tensor.element().name()))
}

fn wrong_element(what: &str, found: &KernelTensor, expected: Element) -> CoreError {
    CoreError::KernelTensor(format!("{what}: expected {}, got {}", expected.name(), found.element().name()))
}
