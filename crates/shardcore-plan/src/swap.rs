//! When tiles move between a disk and the few buffers that host memory has for them.
//!
//! A tile is a range of a shard with all its states, `[master | first moment | second moment]`; an update reads it, changes
//! it and writes it. Host memory has slots for some tiles. A step updates its tiles in an order, and the next step goes
//! the other way: the tiles that are in slots at the end of one are the first of the next, so `num_slots` tiles a step
//! take no way over the disk, and no order saves more (every tile is changed in every step).

use std::collections::VecDeque;

use crate::error::{PlanError, Result};

/// Parts of a tile start at multiples of this, which suits CPU instructions and direct I/O.
pub const PART_ALIGNMENT: u64 = 512;

/// Tiles start at multiples of this in their file.
pub const TILE_ALIGNMENT: u64 = 4096;

/// Where a tile lies in its file, and its parts in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TilePlace {
    /// Byte of the file where the tile starts.
    pub offset: u64,
    /// Bytes of the tile, up to the end of its last part.
    pub nbytes: u64,
    /// Byte of the tile where each part starts.
    pub parts: Vec<u64>,
}

/// Lays tiles out one behind the other; each is its number of elements and the bytes of an element of each part.
///
/// Returns the places and the bytes of the file.
///
/// # Errors
/// [`PlanError::OutOfRange`] where the file would exceed 2^63 - 1 bytes.
pub fn place_tiles(tiles: &[(u64, Vec<u64>)]) -> Result<(Vec<TilePlace>, u64)> {
    let mut end = 0;
    let mut places = Vec::with_capacity(tiles.len());
    for (numel, itemsizes) in tiles {
        let place = place_tile(end, *numel, itemsizes).ok_or(PlanError::OutOfRange {
            what: "the size of all tiles",
            value: i128::from(end) + i128::from(*numel),
            expected: "at most 2^63 - 1 bytes",
        })?;
        end = place.offset + place.nbytes;
        places.push(place);
    }
    Ok((places, end))
}

fn place_tile(end: u64, numel: u64, itemsizes: &[u64]) -> Option<TilePlace> {
    let offset = end.checked_next_multiple_of(TILE_ALIGNMENT)?;
    let mut parts = Vec::with_capacity(itemsizes.len());
    let mut nbytes = 0_u64;
    for itemsize in itemsizes {
        let start = nbytes.checked_next_multiple_of(PART_ALIGNMENT)?;
        parts.push(start);
        nbytes = start.checked_add(numel.checked_mul(*itemsize)?)?;
    }
    offset.checked_add(nbytes).filter(|&end| end <= i64::MAX.unsigned_abs()).map(|_| TilePlace {
        offset,
        nbytes,
        parts,
    })
}

/// One thing to do with a tile and a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwapAction {
    /// Start to bring the tile into the slot, once the write from that slot has ended.
    Read,
    /// Update the tile in the slot, once it is there.
    Update,
    /// Start to write the tile from the slot to the disk.
    Write,
}

impl SwapAction {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Update => "update",
            Self::Write => "write",
        }
    }
}

/// The actions of one step, and what is in the slots after it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SwapPlan {
    /// (action, tile, slot) in order.
    pub actions: Vec<(SwapAction, usize, usize)>,
    /// The tile in each slot at the end. It is newer there than on the disk.
    pub residents: Vec<Option<usize>>,
}

/// Plans a step that updates the tiles `order` one after the other, from what is in the slots before it.
///
/// While a tile is updated, the one before it is written and the one behind it read (with three slots or more; with two
/// only the write overlaps). A tile is read once at most, and written only if its slot is needed: those that the step
/// leaves alone first, then those that it has updated, and one that it has yet to update only where nothing else is left.
///
/// # Errors
/// [`PlanError::BadSwap`] for no slot, or a tile that stands twice in `order` or in the slots.
pub fn plan_swap(order: &[usize], residents: &[Option<usize>]) -> Result<SwapPlan> {
    check(order, residents)?;
    let mut step = Step::new(order, residents);
    for &tile in order {
        step.fetch(tile);
        step.update(tile);
    }
    Ok(step.plan)
}

fn check(order: &[usize], residents: &[Option<usize>]) -> Result<()> {
    if residents.is_empty() && !order.is_empty() {
        return Err(PlanError::BadSwap {
            reason: "there is no slot; give host memory for one tile at least".to_owned(),
        });
    }
    for (what, tiles) in [("order", order.to_vec()), ("slots", residents.iter().copied().flatten().collect())] {
        let mut sorted = tiles;
        sorted.sort_unstable();
        if let Some((tile, _)) = sorted.iter().zip(sorted.iter().skip(1)).find(|(tile, next)| tile == next) {
            return Err(PlanError::BadSwap { reason: format!("tile {tile} stands twice in the {what}") });
        }
    }
    Ok(())
}

struct Step<'a> {
    plan: SwapPlan,
    order: &'a [usize],
    /// Tiles that are not in a slot, in the order of their update.
    missing: VecDeque<usize>,
    /// Slots that may take another tile: written, or empty.
    free: VecDeque<usize>,
    /// Slots of tiles that this step leaves alone.
    idle: VecDeque<usize>,
}

impl<'a> Step<'a> {
    fn new(order: &'a [usize], residents: &[Option<usize>]) -> Self {
        let is_resident = |tile: &usize| residents.contains(&Some(*tile));
        let slots = || residents.iter().enumerate();
        let mut step = Self {
            plan: SwapPlan { actions: Vec::new(), residents: residents.to_vec() },
            order,
            missing: order.iter().filter(|tile| !is_resident(tile)).copied().collect(),
            free: slots().filter(|(_, tile)| tile.is_none()).map(|(slot, _)| slot).collect(),
            idle: slots()
                .filter(|(_, tile)| tile.is_some_and(|tile| !order.contains(&tile)))
                .map(|(slot, _)| slot)
                .collect(),
        };
        step.read_into_free(0);
        while let (false, Some(slot)) = (step.missing.is_empty(), step.idle.pop_front()) {
            step.write(slot);
            step.read_into_free(0);
        }
        step
    }

    /// Makes sure that the tile is in a slot, or on its way into one.
    fn fetch(&mut self, tile: usize) {
        if self.plan.residents.contains(&Some(tile)) {
            return;
        }
        if self.free.is_empty() {
            self.evict();
        }
        self.read_into_free(0);
    }

    /// Frees the slot of the resident tile that is needed last.
    fn evict(&mut self) {
        let position = |tile: usize| self.order.iter().position(|&other| other == tile);
        let latest = (0..self.plan.residents.len()).max_by_key(|&slot| self.plan.residents[slot].and_then(position));
        let Some(slot) = latest else { return };
        let again = self.plan.residents[slot];
        self.write(slot);
        // It is the last of the order that was here; what is missing behind it keeps its place behind it.
        let (Some(tile), Some(at)) = (again, again.and_then(position)) else { return };
        let before = self.missing.iter().take_while(|&&other| position(other) < Some(at)).count();
        self.missing.insert(before, tile);
    }

    fn update(&mut self, tile: usize) {
        let Some(slot) = self.plan.residents.iter().position(|&resident| resident == Some(tile)) else { return };
        self.plan.actions.push((SwapAction::Update, tile, slot));
        let is_needed = self.missing.len() > self.free.len();
        if is_needed {
            self.write(slot);
        }
        // A write that has just begun gets the time of an update before its slot is read into.
        self.read_into_free(usize::from(is_needed));
    }

    fn write(&mut self, slot: usize) {
        if let Some(tile) = self.plan.residents[slot].take() {
            self.plan.actions.push((SwapAction::Write, tile, slot));
        }
        self.free.push_back(slot);
    }

    /// Starts reads of the next tiles into free slots, all but the last `kept`.
    fn read_into_free(&mut self, kept: usize) {
        while self.free.len() > kept {
            let Some(tile) = self.missing.pop_front() else { return };
            let Some(slot) = self.free.pop_front() else { return };
            self.plan.residents[slot] = Some(tile);
            self.plan.actions.push((SwapAction::Read, tile, slot));
        }
    }
}
