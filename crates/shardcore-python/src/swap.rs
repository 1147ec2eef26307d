//! `shardcore.plan`: how tiles move between a disk and host memory.

#![allow(clippy::needless_pass_by_value, reason = "pyo3 hands lists over by value")]

use pyo3::prelude::*;
use shardcore_plan::PlanError;
use shardcore_plan::swap::{self, SwapPlan};

use crate::error::CoreError;
use crate::gil;
use crate::numbers::{Whole, fit_all};

/// What to do with which tile in which slot.
type Action = (&'static str, usize, usize);

/// Where a tile is in the file, its bytes, and the byte of the tile where each part starts.
type TilePlace = (u64, u64, Vec<u64>);

/// Plans a step that updates the tiles ``order`` one after the other, while others come from a disk and go to it.
///
/// ``residents`` has the tile in each slot of host memory before the step, or ``None``; those are newer than what is on
/// the disk. The answer are the actions ``(what, tile, slot)`` in order, ``what`` being ``"read"``, ``"update"`` or
/// ``"write"``, and the residents after the step. A read waits for the write from its slot, an update for its read.
/// Steps that go through their tiles in opposite directions by turns move the fewest bytes.
///
/// Raises ``PlanError`` for no slot, and for a tile that is given twice.
#[pyfunction]
pub(crate) fn plan_swap(
    py: Python<'_>,
    order: Vec<Whole>,
    residents: Vec<Option<Whole>>,
) -> PyResult<(Vec<Action>, Vec<Option<usize>>)> {
    let order = order.into_iter().map(tile).collect::<Result<Vec<usize>, CoreError>>()?;
    let residents = residents.into_iter().map(|held| held.map(tile).transpose());
    let residents = residents.collect::<Result<Vec<Option<usize>>, CoreError>>()?;
    let SwapPlan { actions, residents } = gil::run(py, || swap::plan_swap(&order, &residents))?;
    Ok((actions.into_iter().map(|(action, tile, slot)| (action.name(), tile, slot)).collect(), residents))
}

/// Lays tiles out in a file: each is ``(numel, itemsizes)``, the bytes of an element of each of its parts.
///
/// The answer are ``(offset, nbytes, parts)`` of each tile, ``parts`` being the byte of the tile where each part
/// starts, and the bytes of the file. Tiles start at multiples of 4096 bytes, parts at multiples of 512.
///
/// Raises ``PlanError`` for more than 2^63 - 1 bytes.
#[pyfunction]
pub(crate) fn place_tiles(py: Python<'_>, tiles: Vec<(Whole, Vec<Whole>)>) -> PyResult<(Vec<TilePlace>, u64)> {
    let itemsize = |_: usize, value: i128| PlanError::OutOfRange {
        what: "the itemsize of a part",
        value,
        expected: "0 to 2^64 - 1 bytes",
    };
    let sizes = |(numel, itemsizes): (Whole, Vec<Whole>)| -> Result<(u64, Vec<u64>), CoreError> {
        Ok((numel.fit_or(PlanError::numel)?, fit_all(itemsizes, itemsize)?))
    };
    let tiles = tiles.into_iter().map(sizes).collect::<Result<Vec<_>, CoreError>>()?;
    let (places, file_nbytes) = gil::run(py, || swap::place_tiles(&tiles))?;
    Ok((places.into_iter().map(|place| (place.offset, place.nbytes, place.parts)).collect(), file_nbytes))
}

fn tile(number: Whole) -> Result<usize, CoreError> {
    Ok(number.fit("the number of a tile", "0 to 2^64 - 1")?)
}
