//! `shardcore.plan`: layouts and plans as frozen Python objects.

use std::num::NonZeroU64;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyType;
use shardcore_plan::{FlatLayout, PlanError, ShardPlan, first_difference as difference, groups as grouping};

use crate::args::{Params, Units, segment_limit, sharding};
use crate::error::CoreError;
use crate::gil;
use crate::numbers::Whole;

/// Where each parameter of one group lies in a flat buffer, and which piece of it each rank holds.
///
/// Made by ``shard_layout``, ``groups`` and ``plan_shards``. All numbers count elements unless their name ends in
/// ``nbytes``. Frozen, comparable, hashable and picklable.
#[pyclass(frozen, eq, hash, name = "ShardLayout", module = "shardcore.plan")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct PyShardLayout(Arc<FlatLayout>);

#[pymethods]
impl PyShardLayout {
    /// Canonical name of the element type, such as ``"bf16"``.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.dtype().name()
    }

    /// Bytes of one element.
    #[getter]
    fn itemsize(&self) -> u64 {
        self.0.dtype().itemsize()
    }

    /// Whether the parameters take gradients.
    #[getter]
    fn trainable(&self) -> bool {
        self.0.trainable()
    }

    /// Number of shards, one per rank.
    #[getter]
    fn num_shards(&self) -> u64 {
        self.0.num_shards()
    }

    /// Alignment of every shard in bytes.
    #[getter]
    fn alignment(&self) -> u64 {
        self.0.sharding().alignment()
    }

    /// Elements of all parameters, without padding.
    #[getter]
    fn numel(&self) -> u64 {
        self.0.numel()
    }

    /// Elements of the whole flat buffer: ``num_shards * shard_numel``.
    #[getter]
    fn padded_numel(&self) -> u64 {
        self.0.padded_numel()
    }

    /// Elements of one shard; every rank's is equal.
    #[getter]
    fn shard_numel(&self) -> u64 {
        self.0.shard_numel()
    }

    /// Names of the parameters, in the order of the buffer.
    #[getter]
    fn names(&self) -> Vec<&str> {
        self.0.entries().iter().map(|entry| entry.name.as_str()).collect()
    }

    /// Where a parameter starts in the flat buffer. Raises ``PlanError`` for an unknown name.
    fn offset(&self, name: &str) -> Result<u64, CoreError> {
        Ok(self.0.offset(name)?)
    }

    /// The parameters as ``(name, numel, offset)``, in the order of the buffer.
    fn entries(&self) -> Vec<(&str, u64, u64)> {
        self.0.entries().iter().map(|entry| (entry.name.as_str(), entry.numel, entry.offset)).collect()
    }

    /// What one rank holds: ``(name, start, stop, shard_offset)``, in the order of its shard.
    ///
    /// ``start`` and ``stop`` count in the flattened parameter, ``shard_offset`` in the rank's shard. A range is never
    /// empty: parameters of which the rank holds nothing are left out. Raises ``PlanError`` for a rank out of range.
    fn ranges(&self, rank: Whole) -> Result<Vec<(&str, u64, u64, u64)>, CoreError> {
        let num_shards = self.0.num_shards();
        let rank = rank.fit_or(|rank| PlanError::RankOutOfRange { rank, num_shards })?;
        let ranges = self.0.ranges(rank)?;
        Ok(ranges.map(|range| (range.name, range.start, range.stop, range.shard_offset)).collect())
    }

    /// The padding: maximal runs ``(start, stop)`` of the flat buffer that belong to no parameter.
    fn gaps(&self) -> Vec<(u64, u64)> {
        self.0.gaps().collect()
    }

    /// SHA-256 of the layout as 64 hexadecimal digits: equal layouts have equal digests, on every platform.
    fn digest(&self, py: Python<'_>) -> PyResult<String> {
        gil::run_infallible(py, || self.0.digest())
    }

    /// The layout as an aligned text table, one line a parameter; a long one shows both ends.
    fn explain(&self, py: Python<'_>) -> PyResult<String> {
        gil::run_infallible(py, || self.0.explain())
    }

    /// The layout as a compact JSON document, which ``from_json`` reads.
    fn to_json(&self, py: Python<'_>) -> PyResult<String> {
        gil::run_infallible(py, || self.0.to_json())
    }

    /// Reads what ``to_json`` wrote. Raises ``PlanError`` if the text is no layout or contradicts itself.
    #[classmethod]
    fn from_json(cls: &Bound<'_, PyType>, text: &str) -> PyResult<Self> {
        gil::run(cls.py(), || FlatLayout::from_json(text)).map(Self::from)
    }

    fn __len__(&self) -> usize {
        self.0.entries().len()
    }

    fn __repr__(&self) -> String {
        format!("<ShardLayout of {}>", self.0)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        Ok((py.get_type::<Self>().getattr("from_json")?, (self.to_json(py)?,)))
    }
}

impl PyShardLayout {
    pub(crate) fn layout(&self) -> &FlatLayout {
        &self.0
    }
}

impl From<FlatLayout> for PyShardLayout {
    fn from(layout: FlatLayout) -> Self {
        Self(Arc::new(layout))
    }
}

/// The groups of all wrap units of a model, and the order in which their gradients are reduced.
///
/// Made by ``plan_shards``. Frozen, comparable, hashable and picklable.
#[pyclass(frozen, eq, hash, name = "ShardPlan", module = "shardcore.plan")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct PyShardPlan(ShardPlan);

#[pymethods]
impl PyShardPlan {
    /// Number of shards, one per rank.
    #[getter]
    fn num_shards(&self) -> u64 {
        self.0.sharding().num_shards()
    }

    /// Alignment of every shard in bytes.
    #[getter]
    fn alignment(&self) -> u64 {
        self.0.sharding().alignment()
    }

    /// The limit on a segment in bytes; ``None`` for no limit.
    #[getter]
    fn segment_nbytes(&self) -> Option<NonZeroU64> {
        self.0.segment_nbytes()
    }

    /// Names of the units, in order.
    #[getter]
    fn units(&self) -> &[String] {
        self.0.units()
    }

    /// All groups as ``(unit_index, layout)``, in the order of their units.
    #[getter]
    fn groups(&self) -> Vec<(usize, PyShardLayout)> {
        let groups = self.0.groups().iter();
        groups.map(|group| (group.unit, PyShardLayout(Arc::clone(&group.layout)))).collect()
    }

    /// Indices of the trainable groups in the order in which their gradients are reduced: the last unit's come first.
    #[getter]
    fn reduce_order(&self) -> &[usize] {
        self.0.reduce_order()
    }

    /// SHA-256 of the plan as 64 hexadecimal digits: equal plans have equal digests, on every platform.
    fn digest(&self, py: Python<'_>) -> PyResult<String> {
        gil::run_infallible(py, || self.0.digest())
    }

    /// The plan as an aligned text table, one line a group; a long one shows both ends.
    fn explain(&self, py: Python<'_>) -> PyResult<String> {
        gil::run_infallible(py, || self.0.explain())
    }

    /// The plan as a compact JSON document, which ``from_json`` and ``first_difference`` read.
    fn to_json(&self, py: Python<'_>) -> PyResult<String> {
        gil::run_infallible(py, || self.0.to_json())
    }

    /// Reads what ``to_json`` wrote. Raises ``PlanError`` if the text is no plan or contradicts itself.
    #[classmethod]
    fn from_json(cls: &Bound<'_, PyType>, text: &str) -> PyResult<Self> {
        gil::run(cls.py(), || ShardPlan::from_json(text)).map(Self)
    }

    fn __len__(&self) -> usize {
        self.0.groups().len()
    }

    fn __repr__(&self) -> String {
        format!("<ShardPlan of {}>", self.0)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        Ok((py.get_type::<Self>().getattr("from_json")?, (self.to_json(py)?,)))
    }
}

/// Lays parameters of one dtype and one trainability out in one flat buffer of equal shards.
///
/// ``params`` are ``(name, numel, dtype, trainable)``. They keep their order, and each starts 16-byte aligned; the
/// buffer is padded at its end to ``num_shards * alignment`` bytes, so all shards are equal and aligned. ``alignment``
/// is a power of two of at least 16.
///
/// Raises ``PlanError`` for mixed dtypes or trainabilities (use ``groups``), duplicate names and numbers out of range.
#[pyfunction]
#[pyo3(signature = (params, num_shards, *, alignment = Whole(256)), text_signature = "(params, num_shards, *, alignment=256)")]
pub(crate) fn shard_layout(
    py: Python<'_>,
    params: Params,
    num_shards: Whole,
    alignment: Whole,
) -> PyResult<PyShardLayout> {
    gil::run(py, || FlatLayout::new(params.0, sharding(num_shards, alignment)?)).map(PyShardLayout::from)
}

/// Splits parameters into layouts of one dtype and one trainability each, and those into segments.
///
/// ``params`` are ``(name, numel, dtype, trainable)``. Layouts stand in the order of their first parameter, and inside
/// one the order is kept. With ``segment_nbytes`` a layout ends before the parameter that would carry it past so many
/// bytes (padding at the end not counted); a larger parameter gets a layout of its own and is never split.
///
/// Raises ``PlanError`` for duplicate names and numbers out of range.
#[pyfunction]
#[pyo3(signature = (params, num_shards, *, segment_nbytes = None, alignment = Whole(256)), text_signature = "(params, num_shards, *, segment_nbytes=None, alignment=256)")]
pub(crate) fn groups(
    py: Python<'_>,
    params: Params,
    num_shards: Whole,
    segment_nbytes: Option<Whole>,
    alignment: Whole,
) -> PyResult<Vec<PyShardLayout>> {
    let layouts =
        gil::run(py, || grouping::split(params.0, sharding(num_shards, alignment)?, segment_limit(segment_nbytes)?))?;
    Ok(layouts.into_iter().map(PyShardLayout::from).collect())
}

/// Plans the shards of a model that is cut into wrap units.
///
/// ``units`` are ``(unit_name, params)`` in the order of use, ``params`` as in ``groups``, which is applied to each
/// unit. A parameter belongs to exactly one unit.
///
/// Raises ``PlanError`` for a name in two units and for whatever ``groups`` refuses.
#[pyfunction]
#[pyo3(signature = (units, num_shards, *, segment_nbytes = None, alignment = Whole(256)), text_signature = "(units, num_shards, *, segment_nbytes=None, alignment=256)")]
pub(crate) fn plan_shards(
    py: Python<'_>,
    units: Units,
    num_shards: Whole,
    segment_nbytes: Option<Whole>,
    alignment: Whole,
) -> PyResult<PyShardPlan> {
    let plan =
        gil::run(py, || ShardPlan::new(units.0, sharding(num_shards, alignment)?, segment_limit(segment_nbytes)?))?;
    Ok(PyShardPlan(plan))
}

/// Names the first difference between two documents that ``to_json`` wrote; ``None`` when they are equal.
///
/// The answer reads like ``unit 3 "layers.3", group 0, entry 1 "mlp.weight", numel: 4096 in the first, 4100 in the
/// second``. Raises ``PlanError`` if a text is not JSON.
#[pyfunction]
pub(crate) fn first_difference(py: Python<'_>, first: &str, second: &str) -> PyResult<Option<String>> {
    gil::run(py, || difference(first, second))
}
