//! `shardcore.plan`: schedules made for given costs.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
#[cfg(feature = "stubs")]
use pyo3::{inspect::PyStaticExpr, type_hint_identifier, type_hint_subscript, type_hint_union};
use shardcore_plan::PlanError;
use shardcore_plan::schedule::render::number;
use shardcore_plan::schedule::synthesize::{Request, Synthesis, synthesize as make};
use shardcore_plan::schedule::{Objective, Placement, Schedule};

use crate::error::CoreError;
use crate::gil;
use crate::numbers::{Number, Whole, shortened, too_large};
use crate::schedule::PyPipelineSchedule;
use crate::schedule_args::{PyAmount, cost_spec, count, ranks};

/// What a synthesis consists of: its properties, in their order.
type Parts = (PyPipelineSchedule, f64, f64, f64, String);

/// A schedule that was made for given costs, and how far it can be from the best. Made by ``synthesize``.
///
/// Frozen, comparable, hashable and picklable.
#[pyclass(frozen, eq, name = "Synthesis", module = "shardcore.plan")]
#[derive(PartialEq)]
pub(crate) struct PySynthesis {
    schedule: Arc<Schedule>,
    value: f64,
    lower_bound: f64,
    gap: f64,
    found_by: String,
}

#[pymethods]
impl PySynthesis {
    /// The best schedule found.
    #[getter]
    fn schedule(&self) -> PyPipelineSchedule {
        PyPipelineSchedule(Arc::clone(&self.schedule))
    }

    /// What the schedule takes: its makespan or span, as asked for.
    #[getter]
    fn value(&self) -> f64 {
        self.value
    }

    /// No schedule on this placement takes less under these costs and this cap.
    #[getter]
    fn lower_bound(&self) -> f64 {
        self.lower_bound
    }

    /// How much longer the schedule takes than the bound, as a part of the bound: 0.03 is 3%.
    #[getter]
    fn gap(&self) -> f64 {
        self.gap
    }

    /// What found it: the name of a schedule, ``one-by-one`` (one micro-batch after another), ``breadth-first`` (all
    /// forwards stage by stage, then all backwards), ``list-scheduling`` or ``local-search``.
    #[getter]
    fn found_by(&self) -> &str {
        &self.found_by
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.schedule, self.value.to_bits(), self.lower_bound.to_bits(), &self.found_by).hash(&mut hasher);
        hasher.finish()
    }

    /// What pickle restores.
    #[staticmethod]
    fn _restored(
        schedule: &Bound<'_, PyPipelineSchedule>,
        value: f64,
        lower_bound: f64,
        gap: f64,
        found_by: String,
    ) -> Self {
        Self { schedule: Arc::clone(&schedule.get().0), value, lower_bound, gap, found_by }
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Parts)> {
        let restored = py.get_type::<Self>().getattr("_restored")?;
        Ok((restored, (self.schedule(), self.value, self.lower_bound, self.gap, self.found_by.clone())))
    }

    fn __repr__(&self) -> String {
        format!(
            "<Synthesis by {}: {}, at most {:.1}% above the bound {}>",
            self.found_by,
            number(self.value),
            100.0 * self.gap,
            number(self.lower_bound)
        )
    }
}

/// A memory cap: one for all ranks, or one for each.
pub(crate) enum Cap {
    /// The same for every rank.
    All(f64),
    /// One entry per rank.
    PerRank(Vec<f64>),
}

impl Cap {
    /// One entry for each rank, as many as were given.
    pub(crate) fn of_ranks(self, num_ranks: u32) -> Vec<f64> {
        match self {
            Self::All(cap) => vec![cap; num_ranks as usize],
            Self::PerRank(caps) => caps,
        }
    }
}

impl<'py> FromPyObject<'_, 'py> for Cap {
    type Error = PyErr;

    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_union!(
        type_hint_identifier!("builtins", "float"),
        type_hint_subscript!(
            type_hint_identifier!("collections.abc", "Sequence"),
            type_hint_identifier!("builtins", "float")
        )
    );

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let is_overflow = |error: &PyErr| error.is_instance_of::<PyOverflowError>(object.py());
        match object.extract() {
            Ok(cap) => return Ok(Self::All(cap)),
            Err(error) if is_overflow(&error) => return Err(too_large()),
            Err(_) => {}
        }
        match object.extract() {
            Ok(caps) => Ok(Self::PerRank(caps)),
            Err(error) if is_overflow(&error) => Err(too_large()),
            Err(_) => Err(PyTypeError::new_err(format!(
                "memory_cap is a number, or a list with one for each rank, got {}",
                shortened(&object)
            ))),
        }
    }
}

/// Makes a schedule for given costs, under a memory cap.
///
/// Costs and sizes are as in ``PipelineSchedule.simulate``. ``memory_cap`` is the most that a rank may hold (a list:
/// each rank), in the unit of ``activation``; ``objective`` is ``"makespan"`` or ``"span"``. ``fused_backward`` is what
/// a whole backward takes in one piece (``None``: as much as its gradients in a row); the schedule fuses those for
/// which it pays, in time or in memory, since one piece needs no stash. ``placement`` is the rank of every stage, by
/// default one stage a rank.
///
/// The result is never worse than a named schedule on that placement under the same cap, comes with a certified lower
/// bound, and is the same on every machine; planning again after a profile is one call.
///
/// Raises ``PlanError`` for costs that do not fit and for a cap under which a rank cannot hold one micro-batch.
#[pyfunction]
#[pyo3(
    signature = (num_ranks, num_microbatches, forward, input_grad, weight_grad, hop = Number(0.0), activation = PyAmount::ONE, stash = None, memory_cap = None, objective = "makespan", fused_backward = None, *, placement = None),
    text_signature = "(num_ranks, num_microbatches, forward, input_grad, weight_grad, hop=0.0, activation=1.0, stash=None, memory_cap=None, objective='makespan', fused_backward=None, *, placement=None)"
)]
#[expect(clippy::too_many_arguments, reason = "one for each cost")]
pub(crate) fn synthesize(
    py: Python<'_>,
    num_ranks: Whole,
    num_microbatches: Whole,
    forward: PyAmount,
    input_grad: PyAmount,
    weight_grad: PyAmount,
    hop: Number,
    activation: PyAmount,
    stash: Option<PyAmount>,
    memory_cap: Option<Cap>,
    objective: &str,
    fused_backward: Option<PyAmount>,
    placement: Option<Vec<Whole>>,
) -> PyResult<PySynthesis> {
    let num_ranks = count(num_ranks, PlanError::num_ranks)?;
    let request = Request {
        placement: placed(num_ranks, placement)?,
        num_microbatches: count(num_microbatches, PlanError::num_microbatches)?,
        costs: cost_spec(forward, input_grad, weight_grad, fused_backward, hop, activation, stash),
        memory_cap: memory_cap.map(|cap| cap.of_ranks(num_ranks)),
        objective: parse_objective(objective)?,
    };
    let Synthesis { schedule, value, lower_bound, gap, found_by } = gil::run_or_leave(py, move || make(&request))?;
    Ok(PySynthesis { schedule: Arc::new(schedule), value, lower_bound, gap, found_by: found_by.to_owned() })
}

/// The placement that was asked for, by default one stage a rank.
fn placed(num_ranks: u32, placement: Option<Vec<Whole>>) -> Result<Placement, CoreError> {
    let Some(placement) = placement else { return Ok(Placement::looped(num_ranks, 1)?) };
    let placement = Placement::custom(ranks(placement)?)?;
    if placement.num_ranks() == num_ranks {
        return Ok(placement);
    }
    let reason = format!("it has stages on {} ranks, but num_ranks is {num_ranks}", placement.num_ranks());
    Err(PlanError::BadPlacement { reason }.into())
}

fn parse_objective(name: &str) -> Result<Objective, CoreError> {
    match name {
        "makespan" => Ok(Objective::Makespan),
        "span" => Ok(Objective::Span),
        _ => Err(PlanError::unknown_name("objective", name, &["makespan", "span"]).into()),
    }
}
