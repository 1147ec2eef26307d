//! Random parameters for the property tests.

use proptest::prelude::*;
use shardcore_plan::{Dtype, Param, Sharding};

/// Element counts that have broken sharding before: none, one, around vector and alignment widths, primes.
pub(crate) fn numel() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(0),
        Just(1),
        prop::sample::select(vec![2_u64, 3, 7, 8, 15, 16, 17, 31, 127, 128, 129, 251, 509, 1021]),
        0_u64..2_000,
    ]
}

fn dtype() -> impl Strategy<Value = Dtype> {
    prop::sample::select(Dtype::all().collect::<Vec<_>>())
}

pub(crate) fn sharding() -> impl Strategy<Value = Sharding> {
    let alignment = prop::sample::select(vec![16_u64, 32, 64, 256, 512, 4096]);
    (1_u64..40, alignment).prop_map(|(num_shards, alignment)| Sharding::new(num_shards, alignment).unwrap())
}

/// Up to `max` parameters of one kind.
pub(crate) fn uniform_params(max: usize) -> impl Strategy<Value = Vec<Param>> {
    (dtype(), any::<bool>(), prop::collection::vec(numel(), 0..max)).prop_map(|(dtype, trainable, numels)| {
        let numbered = numels.into_iter().enumerate();
        numbered.map(|(index, numel)| Param { name: format!("p{index}"), numel, dtype, trainable }).collect()
    })
}

/// Up to `max` parameters of few kinds, so that kinds repeat.
pub(crate) fn mixed_params(max: usize) -> impl Strategy<Value = Vec<Param>> {
    let dtype = prop::sample::select(vec![Dtype::Bf16, Dtype::Fp32, Dtype::Int8]);
    prop::collection::vec((numel(), dtype, any::<bool>()), 0..max).prop_map(|rows| {
        let numbered = rows.into_iter().enumerate();
        numbered
            .map(|(index, (numel, dtype, trainable))| Param { name: format!("p{index}"), numel, dtype, trainable })
            .collect()
    })
}

/// How many cases: `usual` in every run, `full` with `SHARDCORE_FULL=1`.
#[expect(clippy::disallowed_methods, reason = "tests read their environment, plans do not")]
pub(crate) fn cases(usual: u32, full: u32) -> u32 {
    if std::env::var("SHARDCORE_FULL").is_ok_and(|value| value == "1") { full } else { usual }
}
