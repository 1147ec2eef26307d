//! Laws of swapping: a tile is there when it is updated, nothing is lost, and the disk moves no more than it must.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::sample::{Index, subsequence};
use shardcore_plan::PlanError;
use shardcore_plan::swap::{PART_ALIGNMENT, SwapAction, TILE_ALIGNMENT, place_tiles, plan_swap};

/// Carries plans out on a disk and slots that hold the number of updates of each tile.
#[derive(Default)]
struct Machine {
    disk: BTreeMap<usize, u32>,
    slots: Vec<Option<(usize, u32)>>,
    reads: usize,
    writes: usize,
}

impl Machine {
    fn new(num_slots: usize) -> Self {
        Self { slots: vec![None; num_slots], ..Self::default() }
    }

    fn residents(&self) -> Vec<Option<usize>> {
        self.slots.iter().map(|slot| slot.map(|(tile, _)| tile)).collect()
    }

    fn step(&mut self, order: &[usize]) {
        let plan = plan_swap(order, &self.residents()).unwrap();
        let mut updated = Vec::new();
        for &(action, tile, slot) in &plan.actions {
            match action {
                SwapAction::Read => {
                    assert!(self.slots[slot].is_none(), "a read over a tile that was not written");
                    self.slots[slot] = Some((tile, self.disk.get(&tile).copied().unwrap_or(0)));
                    self.reads += 1;
                }
                SwapAction::Update => {
                    let (found, count) = self.slots[slot].unwrap();
                    assert_eq!(found, tile);
                    self.slots[slot] = Some((tile, count + 1));
                    updated.push(tile);
                }
                SwapAction::Write => {
                    let (found, count) = self.slots[slot].take().unwrap();
                    assert_eq!(found, tile);
                    self.disk.insert(tile, count);
                    self.writes += 1;
                }
            }
        }
        assert_eq!(updated, order);
        assert_eq!(plan.residents, self.residents());
    }

    fn count(&self, tile: usize) -> u32 {
        let in_slot = self.slots.iter().flatten().find(|(resident, _)| *resident == tile);
        in_slot.map_or_else(|| self.disk.get(&tile).copied().unwrap_or(0), |(_, count)| *count)
    }
}

fn steps() -> impl Strategy<Value = (usize, usize, Vec<Vec<usize>>)> {
    (0_usize..12, 1_usize..6).prop_flat_map(|(num_tiles, num_slots)| {
        let all: Vec<usize> = (0..num_tiles).collect();
        let step = (subsequence(all, 0..=num_tiles), any::<Index>()).prop_map(|(mut tiles, cut)| {
            if !tiles.is_empty() {
                let at = cut.index(tiles.len());
                tiles.rotate_left(at);
            }
            tiles
        });
        (Just(num_tiles), Just(num_slots), prop::collection::vec(step, 0..8))
    })
}

proptest! {
    #[test]
    fn every_update_finds_the_newest_value((num_tiles, num_slots, steps) in steps()) {
        let mut machine = Machine::new(num_slots);
        for order in &steps {
            machine.step(order);
        }
        for tile in 0..num_tiles {
            let expected = steps.iter().filter(|order| order.contains(&tile)).count();
            prop_assert_eq!(machine.count(tile) as usize, expected);
        }
    }

    #[test]
    fn turning_back_saves_the_slots((num_tiles, num_slots, num_steps) in (1_usize..30, 1_usize..8, 2_usize..6)) {
        let mut machine = Machine::new(num_slots);
        let mut order: Vec<usize> = (0..num_tiles).collect();
        machine.step(&order);
        let over = num_tiles.saturating_sub(num_slots);
        prop_assert_eq!(machine.writes, over);
        for _ in 1..num_steps {
            (machine.reads, machine.writes) = (0, 0);
            order.reverse();
            machine.step(&order);
            // At most `num_slots` tiles are there at the start; the others must come, and as many must go.
            prop_assert_eq!((machine.reads, machine.writes), (over, over));
        }
    }

    #[test]
    fn reads_and_writes_have_an_update_to_overlap_with((num_tiles, num_slots) in (4_usize..30, 3_usize..8)) {
        let order: Vec<usize> = (0..num_tiles).collect();
        let actions = plan_swap(&order, &vec![None; num_slots]).unwrap().actions;
        let at = |action, tile| actions.iter().position(|&(a, t, _)| (a, t) == (action, tile));
        let updates_between = |from: usize, to: usize| {
            actions[from..to].iter().filter(|(action, _, _)| *action == SwapAction::Update).count()
        };
        for tile in num_slots..num_tiles {
            let read = at(SwapAction::Read, tile).unwrap();
            let written = actions[..read].iter().rposition(|&(a, _, s)| a == SwapAction::Write && s == actions[read].2);
            prop_assert!(updates_between(written.unwrap(), read) >= 1, "the write overlaps an update");
            prop_assert!(updates_between(read, at(SwapAction::Update, tile).unwrap()) >= 1, "the read overlaps one");
        }
    }

    #[test]
    fn tiles_lie_apart_and_aligned(tiles in prop::collection::vec((0_u64..5_000, prop::collection::vec(1_u64..9, 0..4)), 0..9)) {
        let (places, file_nbytes) = place_tiles(&tiles).unwrap();
        let mut end = 0;
        for ((numel, itemsizes), place) in tiles.iter().zip(&places) {
            prop_assert!(place.offset >= end && place.offset - end < TILE_ALIGNMENT);
            prop_assert!(place.offset.is_multiple_of(TILE_ALIGNMENT));
            let mut part_end = 0;
            for (itemsize, &start) in itemsizes.iter().zip(&place.parts) {
                prop_assert!(start.is_multiple_of(PART_ALIGNMENT) && start >= part_end && start - part_end < PART_ALIGNMENT);
                part_end = start + numel * itemsize;
            }
            prop_assert_eq!(place.nbytes, part_end);
            end = place.offset + place.nbytes;
        }
        prop_assert_eq!(file_nbytes, end);
    }
}

#[test]
fn contradictions_are_refused() {
    for (order, residents, what) in [
        (vec![0], vec![], "no slot"),
        (vec![3, 1, 3], vec![None], "tile 3 stands twice in the order"),
        (vec![], vec![Some(2), Some(2)], "tile 2 stands twice in the slots"),
    ] {
        let message = plan_swap(&order, &residents).unwrap_err().to_string();
        assert!(message.contains(what), "{message}");
    }
    assert!(plan_swap(&[], &[]).unwrap().actions.is_empty());
    assert!(matches!(place_tiles(&[(u64::MAX, vec![4])]), Err(PlanError::OutOfRange { .. })));
}
