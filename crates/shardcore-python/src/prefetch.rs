//! `shardcore.plan`: when units are gathered and released, and the coordinator that the hooks of a step ask.

use pyo3::prelude::*;
use pyo3::types::PyType;
use shardcore_plan::PlanError;
use shardcore_plan::prefetch::{Coordinator, Cost, Objective, Phase, PrefetchPlan, Seconds, Trace};

use crate::error::CoreError;
use crate::gil;
use crate::numbers::{Number, Whole};
use crate::prefetch_args::{Sizes, TraceEntries, UnitSizes, limits};

/// Which gathers start at which use of a step, and which units are released after which.
///
/// Made by ``prefetch``. Units are named, uses are counted from 0, times are in seconds (or whatever unit the trace's
/// are in). Frozen, comparable, hashable and picklable.
#[pyclass(frozen, eq, hash, name = "PrefetchPlan", module = "shardcore.plan")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct PyPrefetchPlan(PrefetchPlan);

#[pymethods]
impl PyPrefetchPlan {
    /// The units as ``(name, nbytes)``.
    #[getter]
    fn units(&self) -> Vec<(&str, u64)> {
        self.0.trace().units().iter().map(|unit| (unit.name.as_str(), unit.nbytes)).collect()
    }

    /// The uses as ``(unit, phase, seconds, span)``, in order; see ``prefetch``.
    #[getter]
    fn trace(&self) -> Vec<(&str, &'static str, f64, usize)> {
        let uses = self.0.trace().uses().iter();
        uses.map(|used| (self.name(used.unit), used.phase.name(), used.seconds.get(), used.span)).collect()
    }

    /// The budget in bytes; ``None`` for no limit.
    #[getter]
    fn budget(&self) -> Option<u64> {
        self.0.limits().budget
    }

    /// What the plan makes small: ``"bytes"`` or ``"time"``.
    #[getter]
    fn objective(&self) -> &'static str {
        self.0.objective().name()
    }

    /// All gathers as ``(unit, start, need)`` in the order in which they start: with the use ``start``, complete when
    /// the use ``need`` begins.
    #[getter]
    fn gathers(&self) -> Vec<(&str, usize, usize)> {
        self.0.gathers().iter().map(|gather| (self.name(gather.unit), gather.start, gather.need)).collect()
    }

    /// For each use whether its unit stays gathered after it, until its next use.
    #[getter]
    fn kept(&self) -> Vec<bool> {
        self.0.kept().to_vec()
    }

    /// For each use the bytes that are gathered or on their way while it lasts.
    #[getter]
    fn live(&self) -> Vec<u64> {
        self.0.live_nbytes().to_vec()
    }

    /// The most bytes that are gathered or on their way at one moment.
    #[getter]
    fn peak(&self) -> u64 {
        self.0.peak_nbytes()
    }

    /// Bytes of all gathers.
    #[getter]
    fn bytes_gathered(&self) -> u64 {
        self.0.gathered_nbytes()
    }

    /// Bytes of all gathers if each use gathered its unit and released it after.
    #[getter]
    fn bytes_on_demand(&self) -> u64 {
        self.0.on_demand_nbytes()
    }

    /// For each use the seconds for which it waits for its unit.
    #[getter]
    fn stalls(&self) -> Vec<f64> {
        self.0.simulation().stalls.iter().map(|stall| stall.get()).collect()
    }

    /// All stalls together: the part of the gathers that computation does not hide.
    #[getter]
    fn exposed(&self) -> f64 {
        self.0.simulation().exposed()
    }

    /// All stalls if each use gathered its unit and released it after.
    #[getter]
    fn exposed_on_demand(&self) -> f64 {
        self.0.on_demand().exposed()
    }

    /// Seconds from the first gather to the end of the last use.
    #[getter]
    fn makespan(&self) -> f64 {
        self.0.simulation().makespan.get()
    }

    /// SHA-256 of the plan as 64 hexadecimal digits: equal plans have equal digests, on every platform.
    fn digest(&self, py: Python<'_>) -> PyResult<String> {
        gil::run_infallible(py, || self.0.digest())
    }

    /// The plan as an aligned text table, one line a use; a long one shows both ends.
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
        gil::run(cls.py(), || PrefetchPlan::from_json(text)).map(Self)
    }

    fn __len__(&self) -> usize {
        self.0.trace().uses().len()
    }

    fn __repr__(&self) -> String {
        format!("<PrefetchPlan of {}>", self.0)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        Ok((py.get_type::<Self>().getattr("from_json")?, (self.to_json(py)?,)))
    }
}

impl PyPrefetchPlan {
    fn name(&self, unit: usize) -> &str {
        &self.0.trace().units()[unit].name
    }
}

/// Answers the hooks of a running step: start these gathers, wait for this one, release those.
///
/// The first step of a kind is recorded, and each use gathers its unit. From then on steps follow the plan of that
/// trace. A use that the plan does not have next departs from it: uses left out are passed over, a use too many is
/// gathered on demand, and the plan goes on where it meets the step again. What departed is planned anew for the next
/// step.
///
/// Whatever the hooks do, a unit is started only while it is away, waited for before it is used, and released once, and
/// gathered units never take more than the budget. Ranks with the same hooks run the same gathers in the same order.
/// Units are counted from 0. A unit is whatever is gathered as one; a hook that needs several enters each.
///
/// Hooks obey an answer in this order: release (after waiting, if the gather is still under way), start, wait.
///
/// ``units`` are ``(name, nbytes)``; the other arguments are those of ``prefetch``, so without any bound all units are
/// gathered as a planned step begins. Raises ``PlanError`` for a unit
/// larger than the budget and for numbers out of range.
#[pyclass(name = "PrefetchCoordinator", module = "shardcore.plan")]
pub(crate) struct PyPrefetchCoordinator(Coordinator);

#[pymethods]
impl PyPrefetchCoordinator {
    #[new]
    #[pyo3(signature = (
        units, budget = None, *, objective = "time",
        prefetch_nbytes = None, max_live_nbytes = None, max_reuse_nbytes = None, persistence_nbytes = Whole(0)
    ), text_signature = "(units, budget=None, *, objective='time', prefetch_nbytes=None, max_live_nbytes=None, max_reuse_nbytes=None, persistence_nbytes=0)")]
    fn new(
        units: UnitSizes,
        budget: Option<Whole>,
        objective: &str,
        prefetch_nbytes: Option<Whole>,
        max_live_nbytes: Option<Whole>,
        max_reuse_nbytes: Option<Whole>,
        persistence_nbytes: Whole,
    ) -> Result<Self, CoreError> {
        let limits = limits(budget, prefetch_nbytes, max_live_nbytes, max_reuse_nbytes, persistence_nbytes)?;
        Ok(Self(Coordinator::new(units.checked()?, limits, Objective::parse(objective)?)?))
    }

    /// A step begins; gives ``(release, start)``. Steps of one ``kind``, such as ``"train"`` and ``"eval"``, share a
    /// plan. A step that is still running ends here.
    #[pyo3(signature = (kind = "train"))]
    fn begin(&mut self, kind: &str) -> (Vec<usize>, Vec<usize>) {
        let answer = self.0.begin(kind);
        (answer.release.clone(), answer.start.clone())
    }

    /// A use of ``unit`` in ``"forward"`` or ``"backward"`` begins; gives ``(release, start, wait)``: units to release,
    /// units whose gathers to start, and whether to wait for the gather of this one.
    ///
    /// Raises ``PlanError``, and changes nothing, if the unit does not fit into the budget beside those in use.
    fn enter(&mut self, unit: Whole, phase: &str) -> Result<(Vec<usize>, Vec<usize>, bool), CoreError> {
        let answer = self.0.enter(index(&self.0, unit)?, Phase::parse(phase)?)?;
        Ok((answer.release.clone(), answer.start.clone(), answer.wait))
    }

    /// The use of ``unit`` in this phase that began last ends; gives the units to release.
    fn leave(&mut self, unit: Whole, phase: &str) -> Result<Vec<usize>, CoreError> {
        Ok(self.0.leave(index(&self.0, unit)?, Phase::parse(phase)?)?.release.clone())
    }

    /// The step is over: plans it for the next of its kind, unless its plan is known, and gives the units to release,
    /// which are all that are left.
    fn end(&mut self, py: Python<'_>) -> PyResult<Vec<usize>> {
        let release = self.0.end().release.clone();
        if let Some(recorded) = self.0.recorded() {
            // A step whose sizes add up to more than 2^63 - 1 bytes has no plan: it stays on demand.
            if let Ok(plan) = gil::run_infallible(py, || recorded.plan())? {
                self.0.adopt(recorded, plan);
            }
        }
        Ok(release)
    }

    /// The step has failed: as ``end``, but what it recorded is forgotten.
    fn reset(&mut self) -> Vec<usize> {
        self.0.reset().release.clone()
    }

    /// The plan that the next step of this kind follows; ``None`` if there is none yet.
    #[pyo3(signature = (kind = "train"))]
    fn plan(&self, kind: &str) -> Option<PyPrefetchPlan> {
        self.0.plan(kind).cloned().map(PyPrefetchPlan)
    }

    /// The units as ``(name, nbytes)``.
    #[getter]
    fn units(&self) -> Vec<(&str, u64)> {
        self.0.units().iter().map(|unit| (unit.name.as_str(), unit.nbytes)).collect()
    }

    /// Bytes that are gathered or on their way now.
    #[getter]
    fn live(&self) -> u64 {
        self.0.live_nbytes()
    }

    /// How many steps departed from their plan.
    #[getter]
    fn num_departures(&self) -> u64 {
        self.0.num_departures()
    }

    /// Where the last step that departed first did so, in words.
    #[getter]
    fn last_departure(&self) -> Option<&str> {
        self.0.last_departure()
    }

    fn __repr__(&self) -> String {
        format!("<PrefetchCoordinator of {} units, {} bytes live>", self.0.units().len(), self.0.live_nbytes())
    }
}

fn index(coordinator: &Coordinator, unit: Whole) -> shardcore_plan::Result<usize> {
    unit.fit_or(|unit| PlanError::UnitOutOfRange { unit, num_units: coordinator.units().len() })
}

/// Plans the gathers and releases of a step.
///
/// ``trace`` holds the uses in order, each as ``(unit, phase)``, ``(unit, phase, seconds)`` or
/// ``(unit, phase, seconds, span)``: a name or number, ``"forward"`` or ``"backward"``, the time from its start to the
/// start of the next use (default 1), and over how many uses it lasts, itself included (default 1; more where other
/// units are used inside it). ``sizes`` gives the bytes of each unit: a mapping, or a list where units are numbers.
/// ``budget`` bounds the bytes of all gathered units, in use or not; without one (and without the settings below) all
/// units are gathered as the step begins, and kept.
///
/// Units are kept between two uses where that saves most bytes. All others are gathered as early as the budget permits,
/// in the order of need. ``objective="time"`` keeps less where gathering ahead hides more.
///
/// ``latency`` (seconds) and ``bandwidth`` (bytes a second) are what a gather costs. Without a bandwidth, gathering a
/// unit of average size takes as long as an average use. They decide about the times that the plan predicts, and with
/// ``objective="time"`` about the plan.
///
/// DeepSpeed's settings, in bytes: ``prefetch_nbytes`` (``stage3_prefetch_bucket_size``: no further gather starts while
/// so much is gathered ahead; 0 for none ahead), ``max_live_nbytes`` (``stage3_max_live_parameters``: as the budget,
/// but what is in use may exceed it), ``max_reuse_nbytes`` (``stage3_max_reuse_distance``: keep a unit only if the uses
/// in between are of no more bytes) and ``persistence_nbytes`` (``stage3_param_persistence_threshold``: keep units up
/// to this size to the end of the step).
///
/// Raises ``PlanError`` if the units in use at one moment exceed the budget (the message names the smallest workable
/// one), for a unit without a size and for numbers out of range.
#[pyfunction]
#[pyo3(signature = (
    trace, sizes, budget = None, *, objective = "bytes", latency = Number(0.0), bandwidth = None,
    prefetch_nbytes = None, max_live_nbytes = None, max_reuse_nbytes = None, persistence_nbytes = Whole(0)
), text_signature = "(trace, sizes, budget=None, *, objective='bytes', latency=0.0, bandwidth=None, prefetch_nbytes=None, max_live_nbytes=None, max_reuse_nbytes=None, persistence_nbytes=0)")]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
pub(crate) fn prefetch(
    py: Python<'_>,
    trace: TraceEntries,
    sizes: Sizes,
    budget: Option<Whole>,
    objective: &str,
    latency: Number,
    bandwidth: Option<Number>,
    prefetch_nbytes: Option<Whole>,
    max_live_nbytes: Option<Whole>,
    max_reuse_nbytes: Option<Whole>,
    persistence_nbytes: Whole,
) -> PyResult<PyPrefetchPlan> {
    let plan = gil::run(py, || {
        let limits = limits(budget, prefetch_nbytes, max_live_nbytes, max_reuse_nbytes, persistence_nbytes)?;
        let trace: Trace = trace.with_sizes(sizes)?;
        let cost = match bandwidth {
            Some(bandwidth) => Cost::new(latency.0, bandwidth.0)?,
            None => Cost { latency: Seconds::new(latency.0)?, ..Cost::balanced(&trace) },
        };
        PrefetchPlan::new(trace, limits, Objective::parse(objective)?, Some(cost))
    })?;
    Ok(PyPrefetchPlan(plan))
}
