//! Laws of grouping: every parameter once, kinds apart, segments full but not too full.

use std::num::NonZeroU64;

use crate::given::{mixed_params, sharding};
use proptest::prelude::*;
use shardcore_plan::{Dtype, FlatLayout, Param, PlanError, Sharding, groups};

fn segment(nbytes: u64) -> Option<NonZeroU64> {
    NonZeroU64::new(nbytes)
}

/// Bytes up to the end of the last parameter: what a segment limit counts.
fn content_nbytes(layout: &FlatLayout) -> u64 {
    layout.entries().last().map_or(0, |entry| entry.end() * layout.dtype().itemsize())
}

/// Where the parameter named `p7` stood in the input.
fn position(name: &str) -> usize {
    name[1..].parse().unwrap()
}

proptest! {
    #[test]
    fn each_parameter_is_in_one_group_of_its_kind(
        params in mixed_params(30),
        sharding in sharding(),
        limit in prop::option::of(1_u64..5_000),
    ) {
        let layouts = groups::split(params.clone(), sharding, limit.and_then(segment)).unwrap();
        let mut seen = vec![0; params.len()];
        for layout in &layouts {
            prop_assert!(!layout.entries().is_empty());
            prop_assert_eq!(layout.sharding(), sharding);
            for entry in layout.entries() {
                let given = &params[position(&entry.name)];
                prop_assert_eq!((given.numel, given.kind()), (entry.numel, layout.kind()));
                seen[position(&entry.name)] += 1;
            }
        }
        prop_assert!(seen.iter().all(|&count| count == 1));
    }

    #[test]
    fn kinds_stand_by_first_appearance_and_keep_their_order(
        params in mixed_params(30),
        sharding in sharding(),
        limit in prop::option::of(1_u64..5_000),
    ) {
        let layouts = groups::split(params.clone(), sharding, limit.and_then(segment)).unwrap();
        let first_of_kind = |layout: &FlatLayout| {
            params.iter().position(|param| param.kind() == layout.kind()).unwrap()
        };
        let order: Vec<(usize, usize)> = layouts
            .iter()
            .flat_map(|layout| layout.entries().iter().map(|entry| (first_of_kind(layout), position(&entry.name))))
            .collect();
        prop_assert!(order.is_sorted(), "{order:?}");
        if limit.is_none() {
            let kinds: Vec<_> = layouts.iter().map(first_of_kind).collect();
            prop_assert!(kinds.windows(2).all(|pair| pair[0] < pair[1]), "one group a kind: {kinds:?}");
        }
    }

    #[test]
    fn segments_are_full_but_not_too_full(params in mixed_params(30), sharding in sharding(), limit in 1_u64..5_000) {
        let layouts = groups::split(params, sharding, segment(limit)).unwrap();
        for layout in &layouts {
            let alone = layout.entries().len() == 1;
            prop_assert!(content_nbytes(layout) <= limit || alone, "{layout}");
        }
        for pair in layouts.windows(2).filter(|pair| pair[0].kind() == pair[1].kind()) {
            // The next segment's first parameter, aligned behind this one, would have passed the limit.
            let next = pair[1].entries()[0].numel * pair[1].dtype().itemsize();
            prop_assert!(content_nbytes(&pair[0]).next_multiple_of(16) + next > limit);
        }
    }
}

#[test]
fn a_parameter_above_the_limit_stands_alone() {
    let param = |name: &str, numel| Param { name: name.to_owned(), numel, dtype: Dtype::Fp32, trainable: true };
    let params = vec![param("p0", 4), param("p1", 1_000), param("p2", 4), param("p3", 4)];
    let layouts = groups::split(params, Sharding::new(2, 16).unwrap(), segment(64)).unwrap();
    let counts: Vec<usize> = layouts.iter().map(|layout| layout.entries().len()).collect();
    assert_eq!(counts, [1, 1, 2]);
}

#[test]
fn one_name_in_two_kinds_is_refused() {
    let param = |dtype| Param { name: "w".to_owned(), numel: 4, dtype, trainable: true };
    let params = vec![param(Dtype::Fp32), param(Dtype::Bf16)];
    let expected = PlanError::DuplicateParameter { name: "w".to_owned(), first: 0, second: 1 };
    assert_eq!(groups::split(params, Sharding::new(2, 16).unwrap(), None), Err(expected));
}

#[test]
fn no_parameters_make_no_groups() {
    assert_eq!(groups::split(vec![], Sharding::new(2, 16).unwrap(), segment(1)), Ok(vec![]));
}

#[test]
fn a_parameter_too_large_for_any_buffer_is_refused_with_a_limit_too() {
    let param = Param { name: "w".to_owned(), numel: u64::MAX, dtype: Dtype::Fp32, trainable: true };
    let result = groups::split(vec![param], Sharding::new(2, 16).unwrap(), segment(64));
    assert!(matches!(result, Err(PlanError::TooLarge { .. })));
}
