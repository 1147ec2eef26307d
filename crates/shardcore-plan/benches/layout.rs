//! A plan of 1,000 groups with 10 billion elements over 16,384 ranks, and one rank's view of it.

use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use shardcore_plan::layout::SHARD_ALIGNMENT;
use shardcore_plan::{Dtype, Param, Result, ShardPlan, Sharding, Unit};

const NUM_GROUPS: usize = 1_000;
const PARAMS_A_GROUP: usize = 10;
const NUM_SHARDS: u64 = 16_384;
const TOTAL_NUMEL: u64 = 10_000_000_000;

fn units() -> Vec<Unit> {
    let numel = TOTAL_NUMEL / (NUM_GROUPS * PARAMS_A_GROUP) as u64;
    let param = |unit: usize, index: usize| Param {
        name: format!("model.layers.{unit}.block.{index}.weight"),
        numel,
        dtype: Dtype::Bf16,
        trainable: true,
    };
    let unit = |unit: usize| Unit {
        name: format!("model.layers.{unit}"),
        params: (0..PARAMS_A_GROUP).map(|index| param(unit, index)).collect(),
    };
    (0..NUM_GROUPS).map(unit).collect()
}

fn plan(units: Vec<Unit>) -> Result<ShardPlan> {
    ShardPlan::new(units, Sharding::new(NUM_SHARDS, SHARD_ALIGNMENT)?, None)
}

/// Every range of one rank, summed so that none is optimised away.
fn own_view(plan: &ShardPlan, rank: u64) -> Result<u64> {
    plan.groups().iter().try_fold(0, |sum, group| {
        let held = group.layout.ranges(rank)?.map(|range| range.stop - range.start);
        Ok(sum + held.sum::<u64>())
    })
}

fn bench(criterion: &mut Criterion) {
    criterion.bench_function("plan 1000 groups and view one rank of 16384", |bencher| {
        bencher.iter_batched(
            units,
            |units| plan(units).and_then(|plan| own_view(&plan, black_box(NUM_SHARDS - 1))),
            BatchSize::LargeInput,
        );
    });
    #[expect(clippy::expect_used, reason = "a benchmark of a plan that cannot be made has no meaning")]
    let made = plan(units()).expect("the input is valid");
    criterion.bench_function("view one rank of 16384", |bencher| {
        bencher.iter(|| own_view(&made, black_box(77)));
    });
    criterion.bench_function("digest", |bencher| bencher.iter(|| made.digest()));
    criterion.bench_function("to_json", |bencher| bencher.iter(|| made.to_json()));
    criterion.bench_function("explain", |bencher| bencher.iter(|| made.explain()));
}

criterion_group!(benches, bench);
criterion_main!(benches);
