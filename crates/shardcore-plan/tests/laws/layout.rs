//! Laws of a flat layout: what it tiles, how it is aligned, what it refuses.

use crate::given::{numel, sharding, uniform_params};
use proptest::prelude::*;
use shardcore_plan::layout::PARAM_ALIGNMENT;
use shardcore_plan::{Dtype, FlatLayout, Kind, Param, PlanError, Sharding};

fn param(name: &str, numel: u64) -> Param {
    Param { name: name.to_owned(), numel, dtype: Dtype::Bf16, trainable: true }
}

fn four_shards() -> Sharding {
    Sharding::new(4, 256).unwrap()
}

/// Who owns each element of the flat buffer: entry index and position in the parameter, painted from the entries.
fn painted(layout: &FlatLayout) -> Vec<Option<(usize, u64)>> {
    let mut owners = vec![None; usize::try_from(layout.padded_numel()).unwrap()];
    for (index, entry) in layout.entries().iter().enumerate() {
        for position in 0..entry.numel {
            let cell = &mut owners[usize::try_from(entry.offset + position).unwrap()];
            assert_eq!(*cell, None, "two parameters share an element");
            *cell = Some((index, position));
        }
    }
    owners
}

proptest! {
    /// Read back shard by shard, the ranks' ranges give the painted buffer: each element once, at its place.
    #[test]
    fn shards_tile_every_element_exactly_once(params in uniform_params(12), sharding in sharding()) {
        let layout = FlatLayout::new(params.clone(), sharding).unwrap();
        let mut read = vec![None; usize::try_from(layout.padded_numel()).unwrap()];
        for rank in 0..layout.num_shards() {
            let mut previous_stop = 0;
            for range in layout.ranges(rank).unwrap() {
                prop_assert!(range.start < range.stop, "an empty range");
                prop_assert!(range.shard_offset >= previous_stop, "ranges overlap or are out of order");
                previous_stop = range.shard_offset + (range.stop - range.start);
                prop_assert!(previous_stop <= layout.shard_numel(), "a range leaves its shard");
                let index = params.iter().position(|param| param.name == range.name).unwrap();
                let first = rank * layout.shard_numel() + range.shard_offset;
                for position in range.start..range.stop {
                    let cell = usize::try_from(first + position - range.start).unwrap();
                    prop_assert_eq!(read[cell].replace((index, position)), None);
                }
            }
        }
        prop_assert_eq!(read, painted(&layout));
    }

    #[test]
    fn gaps_are_exactly_what_no_parameter_owns(params in uniform_params(12), sharding in sharding()) {
        let layout = FlatLayout::new(params, sharding).unwrap();
        let mut is_gap = vec![false; usize::try_from(layout.padded_numel()).unwrap()];
        let mut previous_stop = None;
        for (start, stop) in layout.gaps() {
            prop_assert!(start < stop && Some(start) != previous_stop, "empty, or not maximal");
            previous_stop = Some(stop);
            is_gap[usize::try_from(start).unwrap()..usize::try_from(stop).unwrap()].fill(true);
        }
        let unowned: Vec<bool> = painted(&layout).iter().map(Option::is_none).collect();
        prop_assert_eq!(is_gap, unowned);
    }

    #[test]
    fn everything_is_aligned_and_no_padding_is_wasted(params in uniform_params(12), sharding in sharding()) {
        let layout = FlatLayout::new(params.clone(), sharding).unwrap();
        let itemsize = layout.dtype().itemsize();
        let names: Vec<_> = layout.entries().iter().map(|entry| (&entry.name, entry.numel)).collect();
        let given: Vec<_> = params.iter().map(|param| (&param.name, param.numel)).collect();
        prop_assert_eq!(names, given, "the caller's order is kept");

        let mut end = 0;
        for entry in layout.entries() {
            prop_assert_eq!(entry.offset * itemsize % PARAM_ALIGNMENT, 0);
            prop_assert!(entry.offset >= end && (entry.offset - end) * itemsize < PARAM_ALIGNMENT);
            end = entry.end();
        }
        prop_assert_eq!(layout.shard_nbytes() % sharding.alignment(), 0);
        prop_assert_eq!(layout.shard_numel() * layout.num_shards(), layout.padded_numel());
        let quantum = sharding.num_shards() * sharding.alignment() / itemsize;
        prop_assert!(layout.padded_numel() >= end && layout.padded_numel() - end < quantum);
        prop_assert_eq!(layout.numel(), params.iter().map(|param| param.numel).sum::<u64>());
    }

    #[test]
    fn offsets_are_found_by_name(params in uniform_params(40), sharding in sharding()) {
        let layout = FlatLayout::new(params, sharding).unwrap();
        for entry in layout.entries() {
            prop_assert_eq!(layout.offset(&entry.name), Ok(entry.offset));
        }
        let unknown = matches!(layout.offset("q"), Err(PlanError::UnknownParameter { .. }));
        prop_assert!(unknown);
    }

    /// Too large to paint: the pieces of each parameter, rank by rank, join without a seam.
    #[test]
    fn huge_parameters_are_tiled_as_well(
        sizes in prop::collection::vec(prop_oneof![numel(), 1_u64 << 30..1 << 50], 1..6),
        num_shards in 1_u64..400,
    ) {
        let named = sizes.iter().enumerate().map(|(index, &numel)| param(&index.to_string(), numel));
        let layout = FlatLayout::new(named.collect(), Sharding::new(num_shards, 256).unwrap()).unwrap();
        let mut covered = vec![0; sizes.len()];
        for rank in 0..num_shards {
            for range in layout.ranges(rank).unwrap() {
                let index: usize = range.name.parse().unwrap();
                prop_assert_eq!(range.start, covered[index]);
                covered[index] = range.stop;
            }
        }
        prop_assert_eq!(covered, sizes);
    }
}

#[test]
fn fewer_elements_than_ranks_leaves_ranks_without_ranges() {
    let layout = FlatLayout::new(vec![param("w", 3)], Sharding::new(1_000, 16).unwrap()).unwrap();
    assert_eq!(layout.shard_numel(), 8);
    assert_eq!(layout.ranges(0).unwrap().count(), 1);
    assert!((1..1_000).all(|rank| layout.ranges(rank).unwrap().next().is_none()));
}

#[test]
fn empty_layouts_hold_nothing() {
    for params in [vec![], vec![param("a", 0), param("b", 0)]] {
        let layout = FlatLayout::new(params, four_shards()).unwrap();
        assert_eq!((layout.padded_numel(), layout.shard_numel(), layout.gaps().count()), (0, 0, 0));
        assert!((0..4).all(|rank| layout.ranges(rank).unwrap().next().is_none()));
    }
}

#[test]
fn mixed_kinds_are_refused_and_the_way_out_is_named() {
    let trainable = param("w", 8);
    let frozen = Param { trainable: false, ..param("v", 8) };
    let full = Param { dtype: Dtype::Fp32, ..param("u", 8) };
    for other in [frozen, full] {
        let error = FlatLayout::new(vec![trainable.clone(), other.clone()], four_shards()).unwrap_err();
        assert!(matches!(&error, PlanError::MixedLayout { name, .. } if *name == other.name));
        assert!(error.to_string().contains("plan.groups"), "{error}");
        assert!(error.to_string().contains(&other.kind().to_string()), "{error}");
    }
}

#[test]
fn duplicate_names_are_refused_with_their_positions() {
    let params = vec![param("w", 1), param("v", 1), param("w", 2)];
    let expected = PlanError::DuplicateParameter { name: "w".to_owned(), first: 0, second: 2 };
    assert_eq!(FlatLayout::new(params, four_shards()), Err(expected));
}

#[test]
fn shardings_out_of_range_are_refused() {
    assert_eq!(Sharding::new(0, 256), Err(PlanError::num_shards(0)));
    for alignment in [0, 1, 8, 17, 24, 255, u64::MAX] {
        assert_eq!(Sharding::new(4, alignment), Err(PlanError::alignment(alignment)));
    }
    assert!(Sharding::new(1, 16).is_ok());
}

#[test]
fn ranks_out_of_range_are_refused() {
    let layout = FlatLayout::new(vec![param("w", 8)], four_shards()).unwrap();
    for rank in [4, u64::MAX] {
        let expected = PlanError::RankOutOfRange { rank: rank.into(), num_shards: 4 };
        assert_eq!(layout.ranges(rank).err(), Some(expected));
    }
}

#[test]
fn buffers_beyond_signed_64_bit_bytes_are_refused() {
    let limit = i64::MAX as u64 / 2;
    let too_large = |params: Vec<Param>, num_shards: u64, alignment: u64| {
        let result = FlatLayout::new(params, Sharding::new(num_shards, alignment).unwrap());
        matches!(result, Err(PlanError::TooLarge { .. }))
    };
    assert!(too_large(vec![param("w", u64::MAX)], 1, 16), "one parameter");
    assert!(too_large(vec![param("w", limit / 2), param("v", limit / 2 + 16)], 1, 16), "the sum");
    assert!(too_large(vec![param("w", limit)], 2, 1 << 62), "the padding");
    assert!(too_large(vec![param("w", 1)], 1 << 63, 256), "the number of shards");
    assert!(!too_large(vec![param("w", limit - 1024)], 2, 256), "the largest that fits");
}

#[test]
fn an_empty_layout_reports_frozen_fp32() {
    let layout = FlatLayout::new(vec![], four_shards()).unwrap();
    assert_eq!(layout.kind(), Kind { dtype: Dtype::Fp32, trainable: false });
}
