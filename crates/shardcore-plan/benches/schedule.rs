//! Pipeline schedules of 64 ranks and 1,024 micro-batches, and the growth up to 1,024 ranks and 4,096 micro-batches.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use shardcore_plan::Result;
use shardcore_plan::schedule::{Lowering, Schedule, ScheduleName, build, rank_program};

fn lowered(name: ScheduleName, num_ranks: u32, num_microbatches: u32) -> Result<Schedule> {
    build(name, num_ranks, num_microbatches, None, None)?.lower(&Lowering::default())
}

fn at_64_ranks(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("schedule p=64 m=1024 v=2");
    // Interleaved with a split backward needs room for the gradients of half of the ranks.
    for name in [ScheduleName::Interleaved, ScheduleName::InterleavedZb] {
        group.bench_function(BenchmarkId::new("build", name), |bencher| {
            bencher.iter(|| build(name, black_box(64), 1024, Some(2), None));
        });
        group.bench_function(BenchmarkId::new("build and lower", name), |bencher| {
            let made = || lowered(name, black_box(64), 1024);
            assert!(made().is_ok(), "an error takes another time");
            bencher.iter(made);
        });
        group.bench_function(BenchmarkId::new("one rank", name), |bencher| {
            bencher.iter(|| rank_program(name, 64, 1024, Some(2), None, black_box(17)));
        });
    }
    #[expect(clippy::expect_used, reason = "a benchmark of a plan that cannot be made has no meaning")]
    let schedule = lowered(ScheduleName::Interleaved, 64, 1024).expect("the counts are valid");
    let text = schedule.to_text();
    group.bench_function("digest", |bencher| bencher.iter(|| schedule.digest()));
    group.bench_function("to_text", |bencher| bencher.iter(|| schedule.to_text()));
    group.bench_function("from_text", |bencher| bencher.iter(|| Schedule::from_text(&text)));
    group.bench_function("to_json", |bencher| bencher.iter(|| schedule.to_json()));
    group.finish();
}

/// Build and lower per computation: the same time each means linear growth.
fn growth(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("schedule growth, zb-h1");
    group.sample_size(10);
    for (num_ranks, num_microbatches) in [(16, 256), (64, 1024), (256, 2048), (1024, 4096)] {
        group.throughput(Throughput::Elements(3 * u64::from(num_ranks) * u64::from(num_microbatches)));
        let id = BenchmarkId::from_parameter(format!("p={num_ranks} m={num_microbatches}"));
        group.bench_function(id, |bencher| {
            bencher.iter(|| lowered(ScheduleName::ZbH1, black_box(num_ranks), num_microbatches));
        });
    }
    group.finish();
}

criterion_group!(benches, at_64_ranks, growth);
criterion_main!(benches);
