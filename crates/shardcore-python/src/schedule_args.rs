//! Python arguments of pipeline schedules: counts, costs, actions.

use std::collections::BTreeMap;

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFrozenSet, PySet};
#[cfg(feature = "stubs")]
use pyo3::{inspect::PyStaticExpr, type_hint_identifier, type_hint_subscript, type_hint_union};
use shardcore_plan::PlanError;
use shardcore_plan::schedule::simulate::Network;
use shardcore_plan::schedule::{Amount, CostSpec, Lowering, OptimizerStep, ReduceTiming};

use crate::error::CoreError;
use crate::numbers::{Number, Whole, fit_all, quoted, shortened, too_large, wrong};

/// A number of ranks, micro-batches or chunks: what does not fit is refused by the planner's own error.
pub(crate) fn count(value: Whole, error: fn(i128) -> PlanError) -> Result<u32, CoreError> {
    let too_large = |error| match error {
        PlanError::OutOfRange { what, value: value @ 1.., .. } => {
            PlanError::OutOfRange { what, value, expected: "at most 2^32 - 1" }
        }
        error => error,
    };
    Ok(value.fit_or(|value| too_large(error(value)))?)
}

/// The ranks of stages.
pub(crate) fn ranks(placement: Vec<Whole>) -> Result<Vec<u32>, PlanError> {
    fit_all(placement, |stage, rank| PlanError::BadPlacement { reason: format!("stage {stage} is on rank {rank}") })
}

/// A cost or a size: a number (per rank and micro-batch) or a list (per stage).
pub(crate) struct PyAmount(pub(crate) Amount);

impl<'py> FromPyObject<'_, 'py> for PyAmount {
    type Error = PyErr;

    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_union!(
        type_hint_identifier!("builtins", "float"),
        type_hint_subscript!(
            type_hint_identifier!("collections.abc", "Iterable"),
            type_hint_identifier!("builtins", "float")
        )
    );

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let is_overflow = |error: &PyErr| error.is_instance_of::<PyOverflowError>(object.py());
        match object.extract::<f64>() {
            Ok(value) => return Ok(Self(Amount::PerRank(value))),
            Err(error) if is_overflow(&error) => return Err(too_large()),
            Err(_) => {}
        }
        // Neither is a list: one gives its keys, the other no order.
        if object.hasattr("keys")? || object.is_instance_of::<PySet>() || object.is_instance_of::<PyFrozenSet>() {
            return Err(wrong(EXPECTED_AMOUNT, object));
        }
        let per_stage: PyResult<_> = object.try_iter().and_then(|items| items.map(|item| item?.extract()).collect());
        match per_stage {
            Ok(values) => Ok(Self(Amount::PerStage(values))),
            Err(error) if is_overflow(&error) => Err(too_large()),
            Err(_) => Err(wrong(EXPECTED_AMOUNT, object)),
        }
    }
}

const EXPECTED_AMOUNT: &str = "a number (per rank and micro-batch) or a list of numbers (per stage)";

impl PyAmount {
    /// One unit of memory for a micro-batch on a rank: the default of activations.
    pub(crate) const ONE: Self = Self(Amount::PerRank(1.0));
}

/// Unwraps an optional amount.
pub(crate) fn amount(given: Option<PyAmount>) -> Option<Amount> {
    given.map(|given| given.0)
}

/// What an action takes and holds, from the arguments that simulation and synthesis share.
pub(crate) fn cost_spec(
    forward: PyAmount,
    input_grad: PyAmount,
    weight_grad: PyAmount,
    fused_backward: Option<PyAmount>,
    hop: Number,
    activation: PyAmount,
    stash: Option<PyAmount>,
) -> CostSpec {
    CostSpec {
        forward: forward.0,
        input_grad: input_grad.0,
        weight_grad: weight_grad.0,
        fused_backward: amount(fused_backward),
        hop: hop.0,
        activation: activation.0,
        stash: amount(stash),
    }
}

/// The costs that guide a generator, in any of their spellings.
pub(crate) struct PyCosts(pub(crate) CostSpec);

impl<'py> FromPyObject<'_, 'py> for PyCosts {
    type Error = PyErr;

    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_union!(
        type_hint_subscript!(
            type_hint_identifier!("collections.abc", "Mapping"),
            type_hint_identifier!("builtins", "str"),
            type_hint_identifier!("typing", "Any")
        ),
        type_hint_subscript!(
            type_hint_identifier!("collections.abc", "Sequence"),
            type_hint_identifier!("typing", "Any")
        )
    );

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let mut spec = CostSpec::default();
        let keyed = object.call_method0("items");
        if let Ok(items) = keyed {
            for item in items.try_iter()? {
                let (key, value): (String, Bound<'py, PyAny>) = item?.extract()?;
                set(&mut spec, &key, &value)?;
            }
            return Ok(Self(spec));
        }
        let values: Vec<Bound<'py, PyAny>> = object.extract().map_err(|_| wrong_costs(object))?;
        if !(3..=4).contains(&values.len()) {
            return Err(wrong_costs(object));
        }
        for (key, value) in ["forward", "input_grad", "weight_grad", "hop"].into_iter().zip(&values) {
            set(&mut spec, key, value)?;
        }
        Ok(Self(spec))
    }
}

fn wrong_costs(object: Borrowed<'_, '_, PyAny>) -> PyErr {
    PyTypeError::new_err(format!(
        "costs are (forward, input_grad, weight_grad) or with hop as a fourth, or a mapping of those names, got {}",
        shortened(&object)
    ))
}

fn set(spec: &mut CostSpec, key: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
    let amount = |value: &Bound<'_, PyAny>| Ok::<_, PyErr>(value.extract::<PyAmount>()?.0);
    let optional = |value: &Bound<'_, PyAny>| Ok::<_, PyErr>(value.extract::<Option<PyAmount>>()?.map(|given| given.0));
    match key {
        "forward" => spec.forward = amount(value)?,
        "input_grad" => spec.input_grad = amount(value)?,
        "weight_grad" => spec.weight_grad = amount(value)?,
        "fused_backward" => spec.fused_backward = optional(value)?,
        "hop" => spec.hop = value.extract::<Number>()?.0,
        "activation" => spec.activation = amount(value)?,
        "stash" => spec.stash = optional(value)?,
        _ => {
            return Err(PyTypeError::new_err(format!(
                "unknown cost {}: expected forward, input_grad, weight_grad, fused_backward, hop, activation or stash",
                quoted(key)
            )));
        }
    }
    Ok(())
}

/// The links between ranks, from keyword arguments.
pub(crate) fn network(
    num_stages: usize,
    latency: Option<Latencies>,
    message: Option<PyAmount>,
    bandwidth: Option<Number>,
    overlap: bool,
    composite: Number,
) -> Result<Network, CoreError> {
    let message = match message.map(|sizes| sizes.0) {
        Some(Amount::PerRank(size)) => vec![size; num_stages],
        Some(Amount::PerStage(sizes)) => sizes,
        None => Vec::new(),
    };
    check_pair(&message, bandwidth)?;
    let edge = |((from, to), time): ((Whole, Whole), Number)| -> Result<((u32, u32), f64), CoreError> {
        let rank = |rank: Whole| {
            rank.fit_or(|_| PlanError::BadCost {
                what: format!("latency of edge {}->{}", from.0, to.0),
                expected: "two ranks between which messages pass".to_owned(),
            })
        };
        Ok(((rank(from)?, rank(to)?), time.0))
    };
    Ok(Network {
        latency: latency.unwrap_or_default().into_iter().map(edge).collect::<Result<_, CoreError>>()?,
        message,
        bandwidth: bandwidth.map_or(f64::INFINITY, |bandwidth| bandwidth.0),
        overlap,
        composite: composite.0,
    })
}

/// Refuses sizes without a bandwidth, and a bandwidth without sizes: one without the other would count for nothing.
fn check_pair(message: &[f64], bandwidth: Option<Number>) -> Result<(), PlanError> {
    let sizes = !message.is_empty();
    let (what, expected) = match bandwidth {
        None if sizes => {
            ("message without bandwidth", "also bandwidth, the size that an edge carries in a unit of time")
        }
        Some(bandwidth) if bandwidth.0 != f64::INFINITY && !sizes => {
            ("bandwidth without message", "also message, the size of each stage's output")
        }
        _ => return Ok(()),
    };
    Err(PlanError::BadCost { what: what.to_owned(), expected: expected.to_owned() })
}

/// Latencies of directed edges.
pub(crate) type Latencies = BTreeMap<(Whole, Whole), Number>;

/// What a schedule is lowered for, from the keyword arguments of `lower`.
pub(crate) fn lowering(
    zero_stage: Option<Whole>,
    reduce: &str,
    optimizer: &str,
    tied: Vec<Vec<Whole>>,
    receives_ahead: Option<Whole>,
    max_unsharded: Whole,
) -> Result<Lowering, CoreError> {
    let bad_stage = |_: usize, stage: i128| PlanError::BadLowering {
        reason: format!("tied stages: stage {stage} is out of range"),
    };
    Ok(Lowering {
        zero_stage: zero_stage.map(|stage| stage.fit("zero_stage", "0, 1, 2 or 3")).transpose()?,
        reduce: ReduceTiming::from_name(reduce)?,
        optimizer: OptimizerStep::from_name(optimizer)?,
        tied: tied.into_iter().map(|group| fit_all(group, bad_stage)).collect::<Result<_, PlanError>>()?,
        receives_ahead: receives_ahead
            .map(|given| count(given, |value| at_least_1("receives_ahead", value)))
            .transpose()?,
        max_unsharded: count(max_unsharded, |value| at_least_1("max_unsharded", value))?,
    })
}

fn at_least_1(what: &'static str, value: i128) -> PlanError {
    PlanError::OutOfRange { what, value, expected: "at least 1" }
}

/// The same as a dict.
pub(crate) fn lowering_dict<'py>(py: Python<'py>, lowering: &Lowering) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("zero_stage", lowering.zero_stage)?;
    dict.set_item("reduce", lowering.reduce.name())?;
    dict.set_item("optimizer", lowering.optimizer.name())?;
    dict.set_item("tied", &lowering.tied)?;
    dict.set_item("receives_ahead", lowering.receives_ahead)?;
    dict.set_item("max_unsharded", lowering.max_unsharded)?;
    Ok(dict)
}

/// A mapping of those keyword arguments.
pub(crate) struct PyLowering(pub(crate) Lowering);

impl<'py> FromPyObject<'_, 'py> for PyLowering {
    type Error = PyErr;

    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_subscript!(
        type_hint_identifier!("collections.abc", "Mapping"),
        type_hint_identifier!("builtins", "str"),
        type_hint_identifier!("typing", "Any")
    );

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let defaults = lowering_dict(object.py(), &Lowering::default())?;
        let items = object.call_method0("items").map_err(|_| {
            PyTypeError::new_err(format!("a lowering is a mapping of what lower takes, got {}", shortened(&object)))
        })?;
        for item in items.try_iter()? {
            let (key, value): (String, Bound<'py, PyAny>) = item?.extract()?;
            if !defaults.contains(&key)? {
                let known: Vec<String> = defaults.keys().extract()?;
                return Err(PyTypeError::new_err(format!(
                    "unknown option {} of a lowering: expected {}",
                    quoted(&key),
                    known.join(", ")
                )));
            }
            defaults.set_item(key, value)?;
        }
        let option = |key: &str| defaults.get_item(key)?.ok_or_else(|| PyTypeError::new_err(key.to_owned()));
        let (reduce, optimizer): (String, String) = (option("reduce")?.extract()?, option("optimizer")?.extract()?);
        Ok(Self(lowering(
            option("zero_stage")?.extract()?,
            &reduce,
            &optimizer,
            option("tied")?.extract()?,
            option("receives_ahead")?.extract()?,
            option("max_unsharded")?.extract()?,
        )?))
    }
}
