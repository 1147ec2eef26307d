//! `shardcore.plan`: which layers form a stage, and Megatron's way to write it.

#![allow(clippy::needless_pass_by_value, reason = "pyo3 hands lists over by value")]

use pyo3::prelude::*;
use shardcore_plan::PlanError;
use shardcore_plan::schedule::megatron::{LayerKind, LayerLayout};
use shardcore_plan::schedule::partition;

use crate::error::CoreError;
use crate::gil;

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
    weights: Vec<f64>,
    num_parts: i128,
    cut_nbytes: Option<Vec<u64>>,
) -> PyResult<Vec<usize>> {
    let num_parts = parts(num_parts)?;
    gil::run(py, || partition::balanced(&weights, num_parts, cut_nbytes.as_deref()))
}

/// Cuts layers into consecutive parts whose lengths differ by at most one, the longer ones at the end.
///
/// Raises ``PlanError`` for fewer layers than parts.
#[pyfunction]
pub(crate) fn partition_uniform(num_layers: usize, num_parts: i128) -> Result<Vec<usize>, CoreError> {
    Ok(partition::uniform(num_layers, parts(num_parts)?)?)
}

/// Spreads marked layers evenly over consecutive parts, as ``partition_layers`` does where a marked layer weighs 1 and
/// any other nothing.
///
/// Raises ``PlanError`` for fewer layers than parts, and if no layer is marked.
#[pyfunction]
#[pyo3(signature = (marked, num_parts, *, cut_nbytes = None))]
pub(crate) fn partition_marked(
    marked: Vec<bool>,
    num_parts: i128,
    cut_nbytes: Option<Vec<u64>>,
) -> Result<Vec<usize>, CoreError> {
    Ok(partition::by_marks(&marked, parts(num_parts)?, cut_nbytes.as_deref())?)
}

/// Checks boundaries that someone chose by hand, and gives them back: from 0 to ``num_layers``, each beyond the one
/// before.
///
/// Raises ``PlanError`` naming the first boundary that is wrong.
#[pyfunction]
pub(crate) fn check_boundaries(boundaries: Vec<usize>, num_layers: usize) -> Result<Vec<usize>, CoreError> {
    Ok(partition::manual(boundaries, num_layers)?)
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
pub(crate) fn to_megatron_layout(layers: Vec<String>, boundaries: Vec<usize>) -> Result<String, CoreError> {
    let layers = layers.iter().map(|name| LayerKind::parse(name)).collect::<Result<_, PlanError>>()?;
    Ok(LayerLayout::new(layers, boundaries)?.to_string())
}

fn parts(value: i128) -> Result<usize, CoreError> {
    let error = PlanError::OutOfRange { what: "num_parts", value, expected: "at least 1" };
    usize::try_from(value).map_err(|_| error.into())
}
