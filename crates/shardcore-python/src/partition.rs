//! `shardcore.plan`: which layers form a stage, and Megatron's way to write it.

#![allow(clippy::needless_pass_by_value, reason = "pyo3 hands lists over by value")]

use pyo3::prelude::*;
use shardcore_plan::PlanError;
use shardcore_plan::schedule::megatron::{LayerKind, LayerLayout};
use shardcore_plan::schedule::partition;

use crate::error::CoreError;
use crate::gil;
use crate::numbers::{Number, Whole, fit_all, plain};

/// Cuts layers into consecutive parts whose heaviest is as light as can be.
///
/// ``weights`` is the weight of every layer: parameters, floating-point operations, measured times. The answer are
/// ``num_parts + 1`` boundaries: part ``i`` holds the layers ``boundaries[i]`` up to ``boundaries[i + 1]``. No part is
/// empty. Ties are broken by the bytes that cross the cuts, where ``cut_nbytes`` gives them for the place behind each
/// layer but the last, and then by how even the parts are.
///
/// Raises ``PlanError`` for fewer layers than parts, and for weights that are negative or not finite.
#[pyfunction]
#[pyo3(signature = (weights, num_parts, *, cut_nbytes = None))]
pub(crate) fn partition_layers(
    py: Python<'_>,
    weights: Vec<Number>,
    num_parts: Whole,
    cut_nbytes: Option<Vec<Whole>>,
) -> PyResult<Vec<usize>> {
    let (num_parts, cut_nbytes, weights) = (parts(num_parts)?, cuts(cut_nbytes)?, plain(weights));
    gil::run_interruptible(py, |interrupted| {
        partition::balanced_unless(&weights, num_parts, cut_nbytes.as_deref(), interrupted)
    })
}

/// Cuts layers into consecutive parts whose lengths differ by at most one, the longer ones at the end.
///
/// Raises ``PlanError`` for fewer layers than parts.
#[pyfunction]
pub(crate) fn partition_uniform(num_layers: Whole, num_parts: Whole) -> Result<Vec<usize>, CoreError> {
    Ok(partition::uniform(layers(num_layers)?, parts(num_parts)?)?)
}

/// Spreads marked layers evenly over consecutive parts, as ``partition_layers`` does where a marked layer weighs 1 and
/// any other nothing.
///
/// Raises ``PlanError`` for fewer layers than parts, and if no layer is marked.
#[pyfunction]
#[pyo3(signature = (marked, num_parts, *, cut_nbytes = None))]
pub(crate) fn partition_marked(
    py: Python<'_>,
    marked: Vec<bool>,
    num_parts: Whole,
    cut_nbytes: Option<Vec<Whole>>,
) -> PyResult<Vec<usize>> {
    let (num_parts, cut_nbytes) = (parts(num_parts)?, cuts(cut_nbytes)?);
    gil::run_interruptible(py, |interrupted| {
        partition::by_marks_unless(&marked, num_parts, cut_nbytes.as_deref(), interrupted)
    })
}

/// Checks boundaries that someone chose by hand, and gives them back: from 0 to ``num_layers``, each beyond the one
/// before.
///
/// Raises ``PlanError`` naming the first boundary that is wrong.
#[pyfunction]
pub(crate) fn check_boundaries(boundaries: Vec<Whole>, num_layers: Whole) -> Result<Vec<usize>, CoreError> {
    Ok(partition::manual(places(boundaries)?, layers(num_layers)?)?)
}

/// Reads Megatron's layout string, such as ``"Et*3|(tt|)*29,m|L"``: the layers and the boundaries of their stages.
///
/// Layers are ``"embedding"``, ``"decoder"``, ``"mtp"`` and ``"loss"``; boundaries are as those of
/// ``partition_layers``. Raises ``PlanError`` naming the character at which the string goes wrong.
#[pyfunction]
pub(crate) fn from_megatron_layout(text: &str) -> Result<(Vec<&'static str>, Vec<usize>), CoreError> {
    let layout = LayerLayout::parse(text)?;
    Ok((layout.layers().iter().map(|kind| kind.name()).collect(), layout.boundaries().to_vec()))
}

/// Writes the layout string that Megatron's ``--pipeline-model-parallel-layout`` takes.
///
/// Layers and boundaries are as ``from_megatron_layout`` gives them. Raises ``PlanError`` for an unknown layer, an
/// order that Megatron refuses, and boundaries that are none.
#[pyfunction]
pub(crate) fn to_megatron_layout(layers: Vec<String>, boundaries: Vec<Whole>) -> Result<String, CoreError> {
    let layers = layers.iter().map(|name| LayerKind::parse(name)).collect::<Result<_, PlanError>>()?;
    Ok(LayerLayout::new(layers, places(boundaries)?)?.to_string())
}

fn parts(num_parts: Whole) -> Result<usize, CoreError> {
    Ok(num_parts.fit_or(|value| {
        let expected = if value < 1 { "at least 1" } else { "at most 2^24" };
        PlanError::OutOfRange { what: "num_parts", value, expected }
    })?)
}

fn layers(num_layers: Whole) -> Result<usize, CoreError> {
    Ok(num_layers.fit("num_layers", "0 to 2^64 - 1")?)
}

fn places(boundaries: Vec<Whole>) -> Result<Vec<usize>, CoreError> {
    let error = |at: usize, value: i128| PlanError::BadPartition {
        reason: format!("boundary {at} is {value}: no layer has it"),
    };
    Ok(fit_all(boundaries, error)?)
}

fn cuts(cut_nbytes: Option<Vec<Whole>>) -> Result<Option<Vec<u64>>, CoreError> {
    let error = |at: usize, value: i128| PlanError::BadPartition {
        reason: format!("cut_nbytes[{at}] is {value}: expected 0 to 2^64 - 1 bytes"),
    };
    Ok(cut_nbytes.map(|nbytes| fit_all(nbytes, error)).transpose()?)
}
