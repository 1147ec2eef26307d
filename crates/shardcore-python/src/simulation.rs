//! `shardcore.plan`: what a pipeline schedule takes, as a frozen Python object.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use shardcore_plan::PlanError;
use shardcore_plan::schedule::render::{self, number};
use shardcore_plan::schedule::simulate::{Network, Simulation, simulate_on};
use shardcore_plan::schedule::{Amount, CostSpec, Costs, Schedule};

use crate::error::CoreError;
use crate::gil;
use crate::numbers::{Number, Whole};
use crate::schedule::PyPipelineSchedule;

/// When the actions of a schedule run, what is idle and what is held. Made by ``PipelineSchedule.simulate``.
///
/// Times and sizes are in the units of the costs. Frozen, comparable, hashable and picklable.
#[pyclass(frozen, eq, name = "Simulation", module = "shardcore.plan")]
#[derive(PartialEq)]
pub(crate) struct PySimulation {
    schedule: Arc<Schedule>,
    /// What was simulated with: a copy simulates again.
    spec: CostSpec,
    network: Network,
    run: Simulation,
}

impl PySimulation {
    pub(crate) fn of(schedule: &Arc<Schedule>, spec: &CostSpec, network: &Network) -> Result<Self, PlanError> {
        let costs = Costs::new(spec, schedule.placement(), schedule.header().num_slices)?;
        let run = simulate_on(schedule, &costs, network)?;
        Ok(Self { schedule: Arc::clone(schedule), spec: spec.clone(), network: network.clone(), run })
    }

    /// What a list over ranks has for one of them.
    fn at<'a, T>(&self, list: &'a [T], rank: Whole) -> Result<&'a T, CoreError> {
        let found = usize::try_from(rank.0).ok().and_then(|rank| list.get(rank));
        Ok(found.ok_or(PlanError::NoSuchRank { rank: rank.0, num_ranks: self.schedule.num_ranks() })?)
    }
}

#[pymethods]
impl PySimulation {
    /// The last end over all ranks, from time 0: what a step with a barrier costs.
    #[getter]
    fn makespan(&self) -> f64 {
        self.run.makespan
    }

    /// The longest time over the ranks from a rank's first start to its last end.
    #[getter]
    fn span(&self) -> f64 {
        self.run.span
    }

    /// The time that each rank computes.
    #[getter]
    fn busy(&self) -> &[f64] {
        &self.run.busy
    }

    /// The idle part of the ranks' time if each takes the span, 0 to 1: the bubble rate of the zero-bubble papers.
    #[getter]
    fn bubble_span(&self) -> f64 {
        self.run.bubble_span
    }

    /// The idle part of the ranks' time if each takes the makespan, 0 to 1.
    #[getter]
    fn bubble_makespan(&self) -> f64 {
        self.run.bubble_makespan
    }

    /// The most that each rank holds.
    #[getter]
    fn peak(&self) -> &[f64] {
        &self.run.peak
    }

    /// ``(start, end)`` of each action of a rank, in the order of its program. Raises ``PlanError`` for a rank out of
    /// range.
    fn intervals(&self, rank: Whole) -> Result<Vec<(f64, f64)>, CoreError> {
        Ok(self.at(&self.run.intervals, rank)?.iter().map(|at| (at.start, at.end)).collect())
    }

    /// What a rank holds over time: ``(time, held)``, each until the next. Raises ``PlanError`` for a rank out of
    /// range.
    fn memory(&self, rank: Whole) -> Result<Vec<(f64, f64)>, CoreError> {
        Ok(self.at(&self.run.memory, rank)?.iter().map(|point| (point.time, point.held)).collect())
    }

    /// A grid as text: ranks are rows, time goes to the right, to scale.
    ///
    /// A grid of more than ``max_width`` columns goes on in further bands of lines; of one too long for labels the
    /// start is shown. Raises ``PlanError`` for a negative width.
    #[pyo3(signature = (*, max_width = Whole(160)), text_signature = "($self, *, max_width=160)")]
    fn to_ascii(&self, py: Python<'_>, max_width: Whole) -> PyResult<String> {
        let max_width = max_width.fit("max_width", "0 to 2^64 - 1 columns").map_err(CoreError::from)?;
        gil::run_infallible(py, || render::ascii(&self.schedule, &self.run, max_width))
    }

    /// A self-contained SVG picture: the grid, and below it what each rank holds.
    fn to_svg(&self, py: Python<'_>) -> PyResult<String> {
        gil::run_infallible(py, || render::svg(&self.schedule, &self.run))
    }

    /// A trace that <https://ui.perfetto.dev> opens (JSON of Chrome's trace events): one track per rank, arrows for
    /// messages, a counter for memory. One unit of time is shown as ``microseconds``.
    ///
    /// Raises ``PlanError`` for microseconds that are not above 0, or so many that no double holds the last time.
    #[pyo3(signature = (*, microseconds = Number(1000.0)), text_signature = "($self, *, microseconds=1000.0)")]
    fn to_perfetto(&self, py: Python<'_>, microseconds: Number) -> PyResult<String> {
        let microseconds = microseconds.0;
        if !(microseconds > 0.0 && (self.run.makespan * microseconds).is_finite() && microseconds.is_finite()) {
            let expected = "a number above 0 by which the makespan can be multiplied".to_owned();
            let what = format!("microseconds = {microseconds}");
            return Err(CoreError::from(PlanError::BadCost { what, expected }).into());
        }
        gil::run_infallible(py, || render::perfetto(&self.schedule, &self.run, microseconds))
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.schedule, self.run.makespan.to_bits(), self.run.span.to_bits()).hash(&mut hasher);
        hasher.finish()
    }

    /// A copy simulates again, which gives the same numbers.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, ())> {
        let (spec, network) = (&self.spec, &self.network);
        let costs = PyDict::new(py);
        let set = |key: &str, amount: Option<&Amount>| match amount {
            None => costs.set_item(key, py.None()),
            Some(Amount::PerRank(value)) => costs.set_item(key, value),
            Some(Amount::PerStage(values)) => costs.set_item(key, values),
        };
        set("forward", Some(&spec.forward))?;
        set("input_grad", Some(&spec.input_grad))?;
        set("weight_grad", Some(&spec.weight_grad))?;
        set("fused_backward", spec.fused_backward.as_ref())?;
        set("activation", Some(&spec.activation))?;
        set("stash", spec.stash.as_ref())?;
        costs.set_item("hop", spec.hop)?;
        costs.set_item("latency", network.latency.clone())?;
        costs.set_item("message", network.message.clone())?;
        costs.set_item("bandwidth", network.bandwidth)?;
        costs.set_item("overlap", network.overlap)?;
        costs.set_item("composite", network.composite)?;
        let simulate = py.get_type::<PyPipelineSchedule>().getattr("simulate")?;
        let schedule = PyPipelineSchedule(Arc::clone(&self.schedule));
        let again = py.import("functools")?.getattr("partial")?.call((simulate, schedule), Some(&costs))?;
        Ok((again, ()))
    }

    fn __repr__(&self) -> String {
        let (name, run) = (&self.schedule.header().name, &self.run);
        let [span, makespan] = [run.bubble_span, run.bubble_makespan].map(|bubble| 100.0 * bubble);
        format!(
            "<Simulation of {name}: makespan {} ({makespan:.1}% idle), span {} ({span:.1}% idle)>",
            number(run.makespan),
            number(run.span)
        )
    }
}
