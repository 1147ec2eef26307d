//! Laws of the layer partition, against every partition there is.

#![allow(clippy::float_cmp, reason = "a bottleneck is one of the sums, to the last bit")]

use proptest::prelude::*;
use shardcore_plan::PlanError;
use shardcore_plan::schedule::partition::{balanced, balanced_unless, by_marks, by_marks_unless, manual, uniform};

/// Weights that have broken partitioners before: equal ones, zeros, one that outweighs all, ratios of 10^12 and more.
fn weights() -> impl Strategy<Value = Vec<f64>> {
    let weight = prop_oneof![
        4 => (0_u32..5).prop_map(f64::from),
        2 => 0.0..1.0_f64,
        1 => prop::sample::select(vec![0.0, 1e-300, 1e-12, 1e6, 1e12, 1e300]),
    ];
    prop::collection::vec(weight, 1..10)
}

/// All boundaries of `num_parts` parts that are not empty.
fn all_partitions(num_layers: usize, num_parts: usize) -> Vec<Vec<usize>> {
    if num_parts == 1 {
        return vec![vec![0, num_layers]];
    }
    let shorter = (num_parts - 1..num_layers).flat_map(|end| all_partitions(end, num_parts - 1));
    shorter.map(|boundaries| [boundaries, vec![num_layers]].concat()).collect()
}

fn part_weights<'a>(weights: &'a [f64], boundaries: &'a [usize]) -> impl Iterator<Item = f64> + 'a {
    boundaries.windows(2).map(|pair| weights[pair[0]..pair[1]].iter().sum())
}

fn bottleneck(weights: &[f64], boundaries: &[usize]) -> f64 {
    part_weights(weights, boundaries).fold(0.0, f64::max)
}

fn bytes_cut(cut_nbytes: &[u64], boundaries: &[usize]) -> u128 {
    boundaries[1..boundaries.len() - 1].iter().map(|&cut| u128::from(cut_nbytes[cut - 1])).sum()
}

fn squares(weights: &[f64], boundaries: &[usize]) -> f64 {
    let total: f64 = weights.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    part_weights(weights, boundaries).map(|weight| (weight / total).powi(2)).sum()
}

fn is_partition(boundaries: &[usize], num_layers: usize, num_parts: usize) -> bool {
    boundaries.len() == num_parts + 1 && manual(boundaries.to_vec(), num_layers).is_ok()
}

proptest! {
    #[test]
    fn the_bottleneck_is_the_smallest_of_all(weights in weights(), seed in any::<prop::sample::Index>()) {
        let num_parts = seed.index(weights.len()) + 1;
        let found = balanced(&weights, num_parts, None).unwrap();
        prop_assert!(is_partition(&found, weights.len(), num_parts), "{found:?}");
        let all = all_partitions(weights.len(), num_parts);
        let best = all.iter().map(|other| bottleneck(&weights, other)).fold(f64::INFINITY, f64::min);
        prop_assert_eq!(bottleneck(&weights, &found), best);
        // Among those the parts are as even as can be, up to the rounding of prefix sums.
        let even = all.iter().filter(|other| bottleneck(&weights, other) <= best);
        let evenest = even.map(|other| squares(&weights, other)).fold(f64::INFINITY, f64::min);
        prop_assert!(squares(&weights, &found) <= evenest + 1e-12, "{found:?}");
    }

    /// Whole numbers are compared exactly: by the squares, then by the cuts, the last one first.
    #[test]
    fn ties_of_whole_numbers_are_broken_exactly(
        weights in prop::collection::vec((0_u32..5).prop_map(f64::from), 1..10),
        seed in any::<prop::sample::Index>(),
    ) {
        let num_parts = seed.index(weights.len()) + 1;
        let exact = |other: &Vec<usize>| {
            let squares = part_weights(&weights, other).map(|weight| weight * weight).sum::<f64>();
            (bottleneck(&weights, other), squares)
        };
        let mut all = all_partitions(weights.len(), num_parts);
        all.sort_by_key(|other| other.iter().rev().copied().collect::<Vec<usize>>());
        let best = all.into_iter().reduce(|best, other| if exact(&other) < exact(&best) { other } else { best });
        prop_assert_eq!(balanced(&weights, num_parts, None).ok(), best);
    }

    #[test]
    fn ties_are_broken_by_bytes(weights in weights(), nbytes in prop::collection::vec(0_u64..4, 9), seed in any::<prop::sample::Index>()) {
        let num_parts = seed.index(weights.len()) + 1;
        let cut_nbytes = &nbytes[..weights.len() - 1];
        let found = balanced(&weights, num_parts, Some(cut_nbytes)).unwrap();
        let all = all_partitions(weights.len(), num_parts);
        let best = bottleneck(&weights, &balanced(&weights, num_parts, None).unwrap());
        prop_assert_eq!(bottleneck(&weights, &found), best);
        let tied = all.iter().filter(|other| bottleneck(&weights, other) <= best);
        prop_assert_eq!(Some(bytes_cut(cut_nbytes, &found)), tied.map(|other| bytes_cut(cut_nbytes, other)).min());
    }

    #[test]
    fn the_unit_of_weight_does_not_matter(weights in weights(), seed in any::<prop::sample::Index>()) {
        let num_parts = seed.index(weights.len()) + 1;
        let halved: Vec<f64> = weights.iter().map(|weight| weight * 0.5).collect();
        prop_assert_eq!(balanced(&weights, num_parts, None), balanced(&halved, num_parts, None));
    }

    #[test]
    fn uniform_parts_lose_nothing(num_layers in 1_usize..200, seed in any::<prop::sample::Index>()) {
        let num_parts = seed.index(num_layers) + 1;
        let found = uniform(num_layers, num_parts).unwrap();
        prop_assert!(is_partition(&found, num_layers, num_parts), "{found:?}");
        let lengths = found.windows(2).map(|pair| pair[1] - pair[0]);
        prop_assert!(lengths.clone().max().unwrap() - lengths.min().unwrap() <= 1);
    }

    #[test]
    fn marked_layers_are_spread(marked in prop::collection::vec(any::<bool>(), 1..40), seed in any::<prop::sample::Index>()) {
        let num_parts = seed.index(marked.len()) + 1;
        let count = marked.iter().filter(|&&mark| mark).count();
        prop_assume!(count > 0);
        let found = by_marks(&marked, num_parts, None).unwrap();
        prop_assert!(is_partition(&found, marked.len(), num_parts), "{found:?}");
        let most = found.windows(2).map(|pair| marked[pair[0]..pair[1]].iter().filter(|&&mark| mark).count()).max();
        prop_assert_eq!(most, Some(count.div_ceil(num_parts)));
    }
}

/// Fault E13: 30 layers on 4 stages once built 28; every small case is counted.
#[test]
fn no_layer_is_lost_and_too_few_are_refused() {
    for num_layers in 0..10 {
        for num_parts in 1..5 {
            let weights = vec![1.0; num_layers];
            let found = [balanced(&weights, num_parts, None), uniform(num_layers, num_parts)];
            for boundaries in found {
                if num_layers < num_parts {
                    assert_eq!(boundaries, Err(PlanError::TooFewLayers { num_layers, num_parts }));
                } else {
                    assert!(is_partition(&boundaries.unwrap(), num_layers, num_parts));
                }
            }
        }
    }
}

/// A model far larger than any: the search stays quick, also where one layer outweighs all others.
#[test]
fn large_models_are_no_trouble() {
    let mut weights = vec![1.0; 5_000];
    weights[7] = 4_000.0;
    let found = balanced(&weights, 512, Some(&vec![1; 4_999])).unwrap();
    assert!(is_partition(&found, 5_000, 512));
    assert_eq!(bottleneck(&weights, &found), 4_000.0);
}

#[test]
fn bad_input_is_named() {
    let text = |result: Result<Vec<usize>, PlanError>| result.unwrap_err().to_string();
    assert_eq!(
        text(balanced(&[1.0, f64::NAN], 1, None)),
        "layer 1: its weight is NaN: expected a finite number of at least 0"
    );
    assert_eq!(text(balanced(&[-1.0], 1, None)), "layer 0: its weight is -1: expected a finite number of at least 0");
    assert!(text(balanced(&[f64::MAX, f64::MAX], 1, None)).contains("use a larger unit"));
    assert_eq!(text(balanced(&[1.0], 0, None)), "num_parts is 0: expected at least 1");
    assert!(text(balanced(&[1.0], 2, None)).starts_with("1 layers cannot fill 2 parts: every part holds at least one"));
    assert!(
        text(balanced(&[1.0, 1.0], 2, Some(&[1, 2]))).contains("cut_nbytes has 2 entries, but 2 layers have 1 places")
    );
    assert!(text(by_marks(&[false, false], 1, None)).contains("none of the 2 layers is marked"));
    for (boundaries, expected) in [
        (vec![], "0 boundaries make no part; give at least 0 and 4"),
        (vec![1, 4], "boundary 0 is 1: the first part starts at layer 0"),
        (vec![0, 2, 2, 4], "boundary 2 is 2 and the one before it 2, so part 1 is empty"),
        (vec![0, 3, 2, 4], "boundary 2 is 2 and the one before it 3, so part 1 is empty"),
        (vec![0, 5], "boundary 1 is 5: the last part must end with the last layer, at 4"),
        (vec![0, 3], "boundary 1 is 3: the last part must end with the last layer, at 4"),
    ] {
        assert!(text(manual(boundaries, 4)).contains(expected));
    }
}

#[test]
fn absurd_sizes_are_refused() {
    let huge = 1_usize << 62;
    let text = |error: PlanError| error.to_string();
    assert_eq!(text(uniform(huge, huge).unwrap_err()), "num_parts is 4611686018427387904: expected at most 2^24");
    assert_eq!(uniform(huge, 2), Ok(vec![0, huge / 2, huge]));
    let refused = text(balanced(&vec![0.0; 100_000], 100_000, None).unwrap_err());
    assert_eq!(refused, "number of layers * num_parts is 10000000000: expected at most 2^28");
}

#[test]
fn long_work_can_be_interrupted() {
    let weights = vec![1.0; 4_000];
    assert_eq!(balanced_unless(&weights, 100, None, &|| true), Err(PlanError::Interrupted));
    assert_eq!(balanced_unless(&weights, 100, None, &|| false), balanced(&weights, 100, None));
    assert_eq!(by_marks_unless(&[true; 4_000], 100, None, &|| true), Err(PlanError::Interrupted));
}
