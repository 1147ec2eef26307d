//! `shardcore.optim`: the CPU kernels on torch tensors.

#![allow(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over by value")]

use std::ops::Range;
use std::sync::{Mutex, PoisonError, TryLockError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use shardcore_kernels::rule::{AdagradOptions, AdamOptions, LionOptions, Options, SgdOptions};
use shardcore_kernels::{Cast, ParamMut, Rounding, StateMut, Stream, Update, ValuesMut, cast, norm, update};

use crate::error::CoreError;
use crate::gil;
use crate::kernel_tensor::{Element, KernelTensor};

/// From so many bytes of 16-bit copies in one step on, they go to memory past the caches, which could not hold them.
const STREAMING_NBYTES: usize = 16 << 20;

/// An update rule with its hyperparameters. Raises ``ConfigError`` for one that is out of range.
#[pyclass(frozen, name = "CPURule", module = "shardcore.optim")]
pub(crate) struct PyRule {
    options: Options,
    maximize: bool,
}

impl PyRule {
    fn new(options: Options, maximize: bool) -> Result<Self, CoreError> {
        options.check()?;
        Ok(Self { options, maximize })
    }
}

#[pymethods]
impl PyRule {
    /// Adam; ``decoupled`` weight decay acts on the parameter (``AdamW``), else it is added to the gradient.
    #[staticmethod]
    #[pyo3(signature = (*, lr, betas, eps, weight_decay, decoupled, maximize = false))]
    fn adam(
        lr: f64,
        betas: (f64, f64),
        eps: f64,
        weight_decay: f64,
        decoupled: bool,
        maximize: bool,
    ) -> Result<Self, CoreError> {
        let (first, second) = betas;
        Self::new(
            Options::Adam(AdamOptions { lr, beta1: first, beta2: second, eps, weight_decay, decoupled }),
            maximize,
        )
    }

    /// Lion, with decoupled weight decay.
    #[staticmethod]
    #[pyo3(signature = (*, lr, betas, weight_decay, maximize = false))]
    fn lion(lr: f64, betas: (f64, f64), weight_decay: f64, maximize: bool) -> Result<Self, CoreError> {
        let (first, second) = betas;
        Self::new(Options::Lion(LionOptions { lr, beta1: first, beta2: second, weight_decay }), maximize)
    }

    /// Adagrad.
    #[staticmethod]
    #[pyo3(signature = (*, lr, lr_decay, weight_decay, eps, maximize = false))]
    fn adagrad(lr: f64, lr_decay: f64, weight_decay: f64, eps: f64, maximize: bool) -> Result<Self, CoreError> {
        Self::new(Options::Adagrad(AdagradOptions { lr, lr_decay, weight_decay, eps }), maximize)
    }

    /// Gradient descent; ``momentum=0`` keeps no state.
    #[staticmethod]
    #[pyo3(signature = (*, lr, momentum, dampening, weight_decay, nesterov, maximize = false))]
    fn sgd(
        lr: f64,
        momentum: f64,
        dampening: f64,
        weight_decay: f64,
        nesterov: bool,
        maximize: bool,
    ) -> Result<Self, CoreError> {
        Self::new(Options::Sgd(SgdOptions { lr, momentum, dampening, weight_decay, nesterov }), maximize)
    }

    fn __repr__(&self) -> String {
        format!("<CPURule {:?}>", self.options)
    }
}

/// One tensor of a table as Python describes it: number, group, step, param, low, first, second, copy.
type PyRow<'py> = (
    u64,
    usize,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
);

/// Names of a row's tensors in messages, in order.
const PARTS: [&str; 6] = ["the step", "the parameter", "the remainder", "state 0", "state 1", "the 16-bit copy"];
const STEP: usize = 0;
const PARAM: usize = 1;
const LOW: usize = 2;
const FIRST: usize = 3;
const SECOND: usize = 4;
const COPY: usize = 5;

struct Row {
    number: u64,
    group: usize,
    parts: [Option<KernelTensor>; 6],
}

impl Row {
    fn new(row: &PyRow<'_>) -> PyResult<Self> {
        let (number, group, step, param, low, first, second, copy) = row;
        let tensors = [Some(step), Some(param), low.as_ref(), first.as_ref(), second.as_ref(), copy.as_ref()];
        let mut parts = [const { None }; 6];
        for (index, tensor) in tensors.into_iter().enumerate() {
            parts[index] = tensor.map(|tensor| part(tensor, *number, index)).transpose()?;
        }
        let row = Self { number: *number, group: *group, parts };
        row.check_elements()?;
        Ok(row)
    }

    /// Reads again what has moved since; says whether anything has.
    fn refresh(&mut self, py: Python<'_>) -> PyResult<bool> {
        let mut has_moved = false;
        for (index, slot) in self.parts.iter_mut().enumerate() {
            let Some(tensor) = slot else { continue };
            if !tensor.is_current(py)? {
                let owner = tensor.owner(py).clone();
                *slot = Some(part(&owner, self.number, index)?);
                has_moved = true;
            }
        }
        if has_moved {
            self.check_elements()?;
        }
        Ok(has_moved)
    }

    /// Each tensor has a type that its part may have.
    fn check_elements(&self) -> PyResult<()> {
        let is_split = self.parts[LOW].is_some();
        for (index, tensor) in self.parts.iter().enumerate() {
            let Some(tensor) = tensor else { continue };
            let allowed: &[Element] = match index {
                PARAM if is_split => &[Element::Bf16],
                STEP | PARAM => &[Element::F32],
                LOW => &[Element::I16],
                FIRST | SECOND => &[Element::F32, Element::Bf16],
                _ => &[Element::Bf16, Element::F16],
            };
            if !allowed.contains(&tensor.element()) || (index == STEP && tensor.numel() != 1) {
                let names: Vec<_> = allowed.iter().map(|element| element.name()).collect();
                let counted = if index == STEP { "one number of " } else { "" };
                return Err(CoreError::KernelTensor(format!(
                    "{}: expected {counted}{}, got {} of {}",
                    name(self.number, index),
                    names.join(" or "),
                    tensor.numel(),
                    tensor.element().name()
                ))
                .into());
            }
        }
        Ok(())
    }

    /// The step of this tensor. Its counter is not moved yet.
    ///
    /// # Safety
    /// As for [`KernelTensor::values_mut`], of all parts; the parts and the gradient do not overlap.
    unsafe fn update<'a>(
        &self,
        rule: &PyRule,
        seed: u64,
        grad: &KernelTensor,
        scale: f64,
    ) -> Result<Update<'a>, CoreError> {
        // SAFETY: the caller's promise.
        unsafe {
            let step = f64::from(self.counter().copied().unwrap_or(0.0)) + 1.0;
            let stream = Stream::new(seed, self.number, step.to_bits());
            let [_, param, low, first, second, copy] = &self.parts;
            let param = match (param, low) {
                (Some(high), Some(low)) => ParamMut::Split { high: high.bits_mut(), low: low.bits_mut() },
                (Some(param), None) => match param.values_mut() {
                    Some(ValuesMut::F32(values)) => {
                        ParamMut::F32 { values, copy: copy.as_ref().and_then(|copy| copy.values_mut()) }
                    }
                    _ => return Err(CoreError::KernelTensor(format!("{} is not fp32", name(self.number, PARAM)))),
                },
                (None, _) => return Err(CoreError::KernelTensor(format!("{} is missing", name(self.number, PARAM)))),
            };
            let grad = grad
                .values()
                .ok_or_else(|| CoreError::KernelTensor("the gradient is not a float tensor".to_owned()))?;
            let options = &rule.options;
            let first = first.as_ref().map(|state| state_mut(state, rounding(options, 0, stream)));
            let second = second.as_ref().map(|state| state_mut(state, rounding(options, 1, stream)));
            #[allow(clippy::cast_possible_truncation, reason = "kernels scale in fp32")]
            let scale = (if rule.maximize { -scale } else { scale }) as f32;
            Ok(Update::new(options.at(step), param, grad, scale, [first, second])?)
        }
    }

    /// # Safety
    /// As for [`KernelTensor::values_mut`].
    unsafe fn counter<'a>(&self) -> Option<&'a mut f32> {
        // SAFETY: the caller's promise.
        match self.parts[STEP].as_ref().and_then(|step| unsafe { step.values_mut() }) {
            Some(ValuesMut::F32([counter])) => Some(counter),
            _ => None,
        }
    }
}

/// How a bf16 state is rounded: Adam's first moment bears rounding to nearest, and has less noise with it.
fn rounding(options: &Options, state: usize, stream: Stream) -> Rounding {
    if matches!(options, Options::Adam(_)) && state == 0 { Rounding::Nearest } else { Rounding::Stochastic(stream) }
}

/// # Safety
/// As for [`KernelTensor::values_mut`].
unsafe fn state_mut<'a>(state: &KernelTensor, rounding: Rounding) -> StateMut<'a> {
    // SAFETY: the caller's promise; a state is fp32 or has 16 bits.
    unsafe {
        match state.values_mut() {
            Some(ValuesMut::F32(values)) => StateMut::F32(values),
            _ => StateMut::Bf16(state.bits_mut(), rounding),
        }
    }
}

fn part(tensor: &Bound<'_, PyAny>, number: u64, index: usize) -> PyResult<KernelTensor> {
    let what = name(number, index);
    let read = KernelTensor::read(tensor, &what)?;
    read.check_storage(tensor.py(), &what)?;
    Ok(read)
}

fn name(number: u64, index: usize) -> String {
    format!("{} of parameter {number}", PARTS[index])
}

struct Rows {
    rows: Vec<Row>,
    /// The memory that steps write to, in the order of addresses, with the number of the parameter it belongs to.
    spans: Vec<(Range<usize>, u64)>,
}

impl Rows {
    fn new(rows: Vec<Row>) -> Result<Self, CoreError> {
        let mut rows = Self { rows, spans: Vec::new() };
        rows.find_spans()?;
        Ok(rows)
    }

    /// Two parts in the same memory would be written twice at once.
    fn find_spans(&mut self) -> Result<(), CoreError> {
        let parts = self.rows.iter().flat_map(|row| row.parts.iter().flatten().map(|part| (part.span(), row.number)));
        self.spans = parts.filter(|(span, _)| !span.is_empty()).collect();
        self.sort_spans()
    }

    fn sort_spans(&mut self) -> Result<(), CoreError> {
        self.spans.sort_unstable_by_key(|(span, _)| span.start);
        let overlap = self.spans.windows(2).find(|pair| pair[0].0.end > pair[1].0.start);
        overlap.map_or(Ok(()), |pair| Err(shared_memory(pair[0].1, pair[1].1)))
    }

    fn refresh(&mut self, py: Python<'_>) -> PyResult<()> {
        let mut has_moved = false;
        for row in &mut self.rows {
            has_moved |= row.refresh(py)?;
        }
        if has_moved {
            self.find_spans()?;
        }
        Ok(())
    }

    /// A gradient must not lie in memory that the step writes.
    fn check_apart(&self, grad: &KernelTensor, number: u64) -> Result<(), CoreError> {
        let span = grad.span();
        let after = self.spans.partition_point(|(written, _)| written.end <= span.start);
        match self.spans.get(after) {
            Some((written, other)) if !span.is_empty() && written.start < span.end => {
                Err(shared_memory(number, *other))
            }
            _ => Ok(()),
        }
    }
}

fn shared_memory(first: u64, second: u64) -> CoreError {
    CoreError::KernelTensor(format!(
        "tensors of parameter {first} and of parameter {second} share memory: a step would write it twice; give each its own, and a shared parameter once"
    ))
}

/// Tensors that are stepped together, with their memory looked up once and checked again at each step.
///
/// ``rows`` are ``(number, group, step, param, low, first, second, copy)``: the parameter's number (the key of
/// stochastic rounding), the index of its rule, a tensor of one fp32 that counts its steps, the fp32 parameter (or a
/// bf16 one and its int16 remainders ``low``), its states in fp32 or bf16, and a bf16 or fp16 tensor that receives a
/// copy. All are contiguous CPU tensors of equal length that share no memory.
///
/// Raises ``ConfigError`` for any other tensor.
#[pyclass(frozen, name = "CPUStepTable", module = "shardcore.optim")]
pub(crate) struct PyStepTable(Mutex<Rows>);

#[pymethods]
impl PyStepTable {
    #[new]
    fn new(rows: Vec<PyRow<'_>>) -> PyResult<Self> {
        let rows = rows.iter().map(Row::new).collect::<PyResult<_>>()?;
        Ok(Self(Mutex::new(Rows::new(rows)?)))
    }

    fn __len__(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).rows.len()
    }

    /// Makes one step of every tensor that has a gradient, in one pass over each.
    ///
    /// ``grads`` has a tensor (fp32, bf16 or fp16) or ``None`` for each row, ``rules`` one rule for each group.
    /// Gradients are multiplied by ``grad_scale`` first. ``seeds``, one for each group, are those of stochastic
    /// rounding. The result does not depend on ``num_threads``.
    #[pyo3(signature = (grads, rules, *, seeds, grad_scale = 1.0, num_threads = 1))]
    fn step(
        &self,
        py: Python<'_>,
        grads: Vec<Option<Bound<'_, PyAny>>>,
        rules: Vec<PyRef<'_, PyRule>>,
        seeds: Vec<u64>,
        grad_scale: f64,
        num_threads: usize,
    ) -> PyResult<()> {
        // Waiting here would keep the GIL from the thread that is at it.
        let mut table = match self.0.try_lock() {
            Ok(table) => table,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(CoreError::Busy("this optimizer").into()),
        };
        table.refresh(py)?;
        let table = &*table;
        let grads = read_grads(table, &grads)?;
        let copied = table.rows.iter().filter_map(|row| row.parts[COPY].as_ref());
        let streaming = copied.map(|copy| copy.span().len()).sum::<usize>() >= STREAMING_NBYTES;
        let mut updates = Vec::with_capacity(table.rows.len());
        for (row, grad) in table.rows.iter().zip(&grads) {
            let Some(grad) = grad else { continue };
            let (Some(rule), Some(&seed)) = (rules.get(row.group), seeds.get(row.group)) else {
                let (group, found) = (row.group, rules.len().min(seeds.len()));
                return Err(PyValueError::new_err(format!("group {group} has no rule or no seed: {found} were given")));
            };
            // SAFETY: `refresh` has just seen the memory, which `find_spans` and `check_apart` found not to overlap; the
            // table keeps the owners alive. That no other thread resizes or writes these tensors meanwhile is what
            // every operator of torch asks too.
            updates.push(unsafe { row.update(rule, seed, grad, grad_scale) }?.streaming(streaming));
        }
        gil::run_infallible(py, || update::step(updates, num_threads))?;
        for (row, grad) in table.rows.iter().zip(&grads) {
            // SAFETY: as above; the updates are gone.
            if let (Some(_), Some(counter)) = (grad, unsafe { row.counter() }) {
                *counter += 1.0;
            }
        }
        Ok(())
    }
}

fn read_grads(table: &Rows, grads: &[Option<Bound<'_, PyAny>>]) -> PyResult<Vec<Option<KernelTensor>>> {
    if grads.len() != table.rows.len() {
        let message = format!("{} gradients for {} rows: expected one or None for each", grads.len(), table.rows.len());
        return Err(PyValueError::new_err(message));
    }
    let read = |(row, grad): (&Row, &Option<Bound<'_, PyAny>>)| {
        let Some(grad) = grad else { return Ok(None) };
        let found = KernelTensor::read_or_copy(grad, &format!("the gradient of parameter {}", row.number))?;
        table.check_apart(&found, row.number)?;
        Ok(Some(found))
    };
    table.rows.iter().zip(grads).map(read).collect()
}

/// The sum of squares of each tensor (fp32, bf16 or fp16, on the CPU), in fp64.
///
/// Does not depend on ``num_threads``. It is inf or NaN exactly where an element of the tensor is.
#[pyfunction]
#[pyo3(signature = (tensors, *, num_threads = 1))]
pub(crate) fn sums_of_squares(
    py: Python<'_>,
    tensors: Vec<Bound<'_, PyAny>>,
    num_threads: usize,
) -> PyResult<Vec<f64>> {
    let read = |tensor| KernelTensor::read_or_copy(tensor, "a tensor of the norm");
    let tensors = tensors.iter().map(read).collect::<PyResult<Vec<_>>>()?;
    // SAFETY: the memory was read just now, and `tensors` keeps its owners alive; see `PyStepTable::step`.
    let values = tensors.iter().map(|tensor| unsafe { tensor.values() }.ok_or(not_a_float(tensor)));
    let values = values.collect::<Result<Vec<_>, _>>()?;
    gil::run_infallible(py, || norm::sums_of_squares(&values, num_threads))
}

/// Copies each source, times ``scale``, into its target of any other float type, rounded to nearest.
///
/// Sources and targets are fp32, bf16 or fp16 tensors on the CPU, pairwise of equal length; targets are contiguous and
/// share no memory with anything here.
#[pyfunction]
#[pyo3(signature = (sources, targets, *, scale = 1.0, num_threads = 1))]
pub(crate) fn convert(
    py: Python<'_>,
    sources: Vec<Bound<'_, PyAny>>,
    targets: Vec<Bound<'_, PyAny>>,
    scale: f32,
    num_threads: usize,
) -> PyResult<()> {
    if sources.len() != targets.len() {
        return Err(PyValueError::new_err(format!("{} sources for {} targets", sources.len(), targets.len())));
    }
    let read = |tensor| KernelTensor::read_or_copy(tensor, "a source");
    let sources = sources.iter().map(read).collect::<PyResult<Vec<_>>>()?;
    let targets = targets.iter().map(|tensor| KernelTensor::read(tensor, "a target")).collect::<PyResult<Vec<_>>>()?;
    check_targets(&sources, &targets)?;
    let mut casts = Vec::with_capacity(sources.len());
    for (source, target) in sources.iter().zip(&targets) {
        // SAFETY: `check_targets` found no overlap; the rest as in `sums_of_squares`.
        let (Some(from), Some(to)) = (unsafe { (source.values(), target.values_mut()) }) else {
            return Err(not_a_float(target).into());
        };
        casts.push(Cast::new(from, to, scale).map_err(CoreError::from)?);
    }
    gil::run_infallible(py, || cast::cast(casts, num_threads))
}

fn check_targets(sources: &[KernelTensor], targets: &[KernelTensor]) -> Result<(), CoreError> {
    let numbered = (0..).zip(targets).map(|(number, target)| (target.span(), number));
    let mut table = Rows { rows: Vec::new(), spans: numbered.filter(|(span, _)| !span.is_empty()).collect() };
    table.sort_spans()?;
    (0..).zip(sources).try_for_each(|(number, source)| table.check_apart(source, number))
}

fn not_a_float(tensor: &KernelTensor) -> CoreError {
    CoreError::KernelTensor(format!(
        "expected a tensor of float32, bfloat16 or float16, got {}",
        tensor.element().name()
    ))
}
