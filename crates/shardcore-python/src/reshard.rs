//! `shardcore.plan`: from one set of shards to another, and who writes what.

#![allow(clippy::needless_pass_by_value, reason = "pyo3 hands lists over by value")]

use pyo3::prelude::*;
use shardcore_plan::PlanError;
use shardcore_plan::reshard::moves;
use shardcore_plan::share::{Piece, parts};

use crate::error::CoreError;
use crate::gil;
use crate::numbers::Whole;
use crate::plan::PyShardLayout;

/// Rank and offset in the old shards, rank and offset in the new ones, number of elements.
type Copied = (u64, u64, u64, u64, u64);

/// The copies that fill the shards of ``new`` from those of ``old``, ordered by where they go.
///
/// Each is ``(src_rank, src_offset, dst_rank, dst_offset, numel)``, in elements. Every element of every parameter is
/// copied once, and no padding. The layouts may differ in the number of shards, in the order of the parameters and in
/// the dtype.
///
/// Raises ``PlanError`` if they do not hold the same parameters with the same numbers of elements.
#[pyfunction]
pub(crate) fn reshard(
    py: Python<'_>,
    old: &Bound<'_, PyShardLayout>,
    new: &Bound<'_, PyShardLayout>,
) -> PyResult<Vec<Copied>> {
    let (old, new) = (old.get().layout(), new.get().layout());
    let found = gil::run(py, || moves(old, new))?;
    Ok(found.into_iter().map(|m| (m.src_rank, m.src_offset, m.dst_rank, m.dst_offset, m.numel)).collect())
}

/// Divides the writing of tensors that several ranks hold: every element once, about as many bytes on every rank.
///
/// ``held[rank]`` are the pieces ``(tensor, start, stop)`` of a rank, ranges of flattened tensors; ``itemsizes`` are
/// the bytes of an element of each tensor. Returns for each rank the parts ``(piece, start, stop)`` that it writes,
/// ``piece`` being a place in its own list, in the order of that list.
///
/// Raises ``PlanError`` for pieces that end before they begin, or are of no tensor.
#[pyfunction]
pub(crate) fn share_writes(
    py: Python<'_>,
    held: Vec<Vec<(Whole, Whole, Whole)>>,
    itemsizes: Vec<Whole>,
) -> PyResult<Vec<Vec<(usize, u64, u64)>>> {
    let piece = |(tensor, start, stop): (Whole, Whole, Whole)| {
        Ok(Piece {
            tensor: tensor.fit("tensor", "a place in itemsizes")?,
            start: start.fit("start", "0 to 2^64 - 1 elements")?,
            stop: stop.fit("stop", "0 to 2^64 - 1 elements")?,
        })
    };
    let pieces = |rank: Vec<_>| rank.into_iter().map(piece).collect::<Result<Vec<_>, PlanError>>();
    let held = held.into_iter().map(pieces).collect::<Result<Vec<_>, _>>().map_err(CoreError::from)?;
    let itemsizes = itemsizes.into_iter().map(|nbytes| nbytes.fit("itemsize", "0 to 2^64 - 1 bytes"));
    let itemsizes = itemsizes.collect::<Result<Vec<_>, PlanError>>().map_err(CoreError::from)?;
    let written = gil::run(py, || parts(&held, &itemsizes))?;
    let flat = |parts: Vec<shardcore_plan::share::Part>| {
        parts.into_iter().map(|part| (part.piece, part.start, part.stop)).collect()
    };
    Ok(written.into_iter().map(flat).collect())
}
