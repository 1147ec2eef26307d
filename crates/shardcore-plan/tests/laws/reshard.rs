//! Going from one layout to another copies each element once; sharing the writing writes each element once.

use proptest::prelude::*;
use shardcore_plan::reshard::moves;
use shardcore_plan::share::{Piece, parts};
use shardcore_plan::{FlatLayout, Param, PlanError, Sharding};

use crate::given;

/// What each element of a flat buffer is: (number of the parameter, position in it); none for padding.
fn contents(layout: &FlatLayout, names: &[String]) -> Vec<Option<(usize, u64)>> {
    let mut found = vec![None; usize::try_from(layout.padded_numel()).unwrap()];
    for entry in layout.entries() {
        let number = names.iter().position(|name| *name == entry.name).unwrap();
        for position in 0..entry.numel {
            found[usize::try_from(entry.offset + position).unwrap()] = Some((number, position));
        }
    }
    found
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(given::cases(128, 2_000)))]

    #[test]
    fn every_element_is_copied_once_to_where_it_belongs(
        params in given::uniform_params(6), first in given::sharding(), second in given::sharding(), flip in any::<bool>(),
    ) {
        let names: Vec<String> = params.iter().map(|param| param.name.clone()).collect();
        let mut other = params.clone();
        if flip {
            other.reverse();
        }
        let (old, new) = (FlatLayout::new(params, first).unwrap(), FlatLayout::new(other, second).unwrap());
        let (source, wanted) = (contents(&old, &names), contents(&new, &names));
        let mut arrived = vec![None; wanted.len()];
        let mut before = None;
        for step in moves(&old, &new).unwrap() {
            prop_assert!(step.numel > 0 && before < Some((step.dst_rank, step.dst_offset)));
            before = Some((step.dst_rank, step.dst_offset));
            prop_assert!(step.src_offset + step.numel <= old.shard_numel());
            prop_assert!(step.dst_offset + step.numel <= new.shard_numel());
            for i in 0..step.numel {
                let from = usize::try_from(step.src_rank * old.shard_numel() + step.src_offset + i).unwrap();
                let to = usize::try_from(step.dst_rank * new.shard_numel() + step.dst_offset + i).unwrap();
                prop_assert!(source[from].is_some(), "padding was copied");
                prop_assert!(arrived[to].replace(source[from].unwrap()).is_none(), "copied twice");
            }
        }
        prop_assert_eq!(arrived, wanted);
    }

    #[test]
    fn every_held_element_is_written_once_by_a_holder(
        held in prop::collection::vec(
            prop::collection::vec((0_usize..3, 0_u64..300, 0_u64..100_000), 0..5), 1..6),
        itemsizes in prop::collection::vec(prop::sample::select(vec![1_u64, 2, 4, 8]), 3),
    ) {
        let held: Vec<Vec<Piece>> = held.iter().map(|pieces| pieces.iter()
            .map(|&(tensor, start, numel)| Piece { tensor, start, stop: start + numel }).collect()).collect();
        let written = parts(&held, &itemsizes).unwrap();
        for tensor in 0..3 {
            let mut ranges: Vec<(u64, u64)> = Vec::new();
            for (mine, parts) in held.iter().zip(&written) {
                for part in parts.iter().filter(|part| mine[part.piece].tensor == tensor) {
                    prop_assert!(part.start < part.stop);
                    prop_assert!(mine[part.piece].start <= part.start && part.stop <= mine[part.piece].stop);
                    ranges.push((part.start, part.stop));
                }
            }
            ranges.sort_unstable();
            prop_assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "written twice");
            let num_written: u64 = ranges.iter().map(|(start, stop)| stop - start).sum();
            prop_assert_eq!(num_written, union(&held, tensor));
        }
        prop_assert!(written.iter().all(|parts| parts.is_sorted()));
    }
}

/// How many elements of the tensor are held by any rank.
fn union(held: &[Vec<Piece>], tensor: usize) -> u64 {
    let mut ranges: Vec<(u64, u64)> =
        held.iter().flatten().filter(|piece| piece.tensor == tensor).map(|piece| (piece.start, piece.stop)).collect();
    ranges.sort_unstable();
    let mut end = 0;
    ranges.iter().fold(0, |count, &(start, stop)| {
        let from = start.max(end);
        end = end.max(stop);
        count + stop.saturating_sub(from)
    })
}

#[test]
fn copies_of_a_large_tensor_are_written_in_equal_parts() {
    let held = vec![vec![Piece { tensor: 0, start: 0, stop: 1_000_000 }]; 4];
    let written = parts(&held, &[4]).unwrap();
    assert!(written.iter().all(|parts| parts.len() == 1 && parts[0].stop - parts[0].start == 250_000));
}

#[test]
fn many_small_copies_are_balanced() {
    let held = vec![(0..100).map(|tensor| Piece { tensor, start: 0, stop: 10 + tensor as u64 }).collect::<Vec<_>>(); 4];
    let written = parts(&held, &[4; 100]).unwrap();
    let loads: Vec<u64> = written.iter().map(|parts| parts.iter().map(|part| part.stop - part.start).sum()).collect();
    assert!(loads.iter().max().unwrap() - loads.iter().min().unwrap() <= 110, "{loads:?}");
}

#[test]
fn layouts_of_other_parameters_are_refused_by_name() {
    let layout = |names: &[(&str, u64)]| {
        let params = names.iter().map(|&(name, numel)| Param {
            name: name.to_owned(),
            numel,
            dtype: shardcore_plan::Dtype::Fp32,
            trainable: true,
        });
        FlatLayout::new(params.collect(), Sharding::new(2, 16).unwrap()).unwrap()
    };
    let old = layout(&[("a", 4), ("b", 5)]);
    for (new, says) in [
        (layout(&[("a", 4)]), "\"b\" is in the old one only"),
        (layout(&[("a", 4), ("b", 5), ("c", 1)]), "\"c\" is in the new one only"),
        (layout(&[("a", 4), ("b", 6)]), "\"b\" has 5 elements in the old one and 6 in the new"),
    ] {
        let refused = moves(&old, &new).unwrap_err();
        assert!(matches!(refused, PlanError::DifferentParameters { .. }));
        assert!(refused.to_string().contains(says), "{refused}");
    }
    let bad = parts(&[vec![Piece { tensor: 1, start: 0, stop: 1 }]], &[4]).unwrap_err();
    assert!(matches!(bad, PlanError::BadPiece { rank: 0, piece: 0, .. }));
}
