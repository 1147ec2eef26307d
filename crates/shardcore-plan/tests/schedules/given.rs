//! Random instances for the property tests.

use proptest::prelude::*;
use proptest::test_runner::Config;
use shardcore_plan::schedule::{Placement, ScheduleName};

use crate::reference::Times;

/// `cases` of a property in `make test`; sixty-four times as many in `make test-full`.
pub(crate) fn cases(cases: u32) -> Config {
    #[expect(clippy::disallowed_methods, reason = "tests may be told to do more")]
    let full = std::env::var("SHARDCORE_FULL").is_ok_and(|value| value == "1");
    Config { cases: if full { cases * 64 } else { cases }, ..Config::default() }
}

pub(crate) fn name() -> impl Strategy<Value = ScheduleName> {
    prop::sample::select(ScheduleName::ALL.to_vec())
}

/// Few and many micro-batches, also fewer than ranks and not divisible by them.
pub(crate) fn counts() -> impl Strategy<Value = (u32, u32, u32)> {
    (1_u32..=9, 1_u32..=20, 1_u32..=4)
}

/// Times with zeros and huge ratios.
pub(crate) fn times() -> impl Strategy<Value = Times> {
    let time = || prop_oneof![Just(0_i64), 1_i64..10, Just(1_000_000)];
    (time(), time(), time(), time()).prop_map(|(forward, input_grad, weight_grad, hop)| Times {
        forward,
        input_grad,
        weight_grad,
        hop,
    })
}

/// Every shape, and arbitrary ones where each rank holds at least one stage.
pub(crate) fn placement() -> impl Strategy<Value = Placement> {
    let custom = (1_u32..6, prop::collection::vec(any::<u32>(), 0..8), any::<prop::sample::Index>()).prop_map(
        |(num_ranks, more, turn)| {
            let mut ranks: Vec<u32> = (0..num_ranks).chain(more.into_iter().map(|rank| rank % num_ranks)).collect();
            let turn = turn.index(ranks.len());
            ranks.rotate_left(turn);
            Placement::custom(ranks).unwrap()
        },
    );
    prop_oneof![
        (1_u32..9, 1_u32..5).prop_map(|(p, v)| Placement::looped(p, v).unwrap()),
        (1_u32..9, 1_u32..5).prop_map(|(p, v)| Placement::zig_zag(p, v).unwrap()),
        (1_u32..9).prop_map(|p| Placement::bidirectional(p).unwrap()),
        custom,
    ]
}
