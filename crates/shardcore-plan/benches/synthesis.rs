//! The schedules that are searched for: synthesis at 16 ranks and 64 micro-batches, and the V schedules with their
//! growth.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use shardcore_plan::schedule::{CostSpec, Placement, Request, ScheduleName, build, synthesize};

/// Uneven stages and a latency, so that no bound ends the search early.
fn request(num_ranks: u32, num_microbatches: u32) -> shardcore_plan::Result<Request> {
    let uneven =
        |mean: f64| -> Vec<f64> { (0..num_ranks).map(|stage| mean * (0.8 + 0.1 * f64::from(stage * 7 % 5))).collect() };
    let costs = CostSpec {
        forward: uneven(1.0).into(),
        input_grad: uneven(1.1).into(),
        weight_grad: uneven(0.8).into(),
        ..CostSpec::default().with_hop(0.3)
    };
    let placement = Placement::looped(num_ranks, 1)?;
    Ok(Request::new(placement, num_microbatches, costs).with_cap(f64::from(num_ranks)))
}

fn synthesis(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("synthesize");
    group.sample_size(10);
    for (num_ranks, num_microbatches) in [(4, 16), (8, 32), (16, 64)] {
        let id = BenchmarkId::from_parameter(format!("p={num_ranks} m={num_microbatches}"));
        group.bench_function(id, |bencher| {
            bencher.iter(|| synthesize(&request(black_box(num_ranks), num_microbatches)?));
        });
    }
    group.finish();
}

fn v_schedules(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("V schedules");
    group.sample_size(10);
    let costs = CostSpec::uniform(2.0, 3.0, 1.0).with_hop(0.1);
    for name in [ScheduleName::ZbV, ScheduleName::VHalf, ScheduleName::VMin] {
        for (num_ranks, num_microbatches) in [(8, 64), (64, 1024), (128, 2048)] {
            group.throughput(Throughput::Elements(6 * u64::from(num_ranks) * u64::from(num_microbatches)));
            for (kind, costs) in [("equal", None), ("given", Some(&costs))] {
                let id = BenchmarkId::new(format!("{name} {kind}"), format!("p={num_ranks} m={num_microbatches}"));
                group.bench_function(id, |bencher| {
                    bencher.iter(|| build(name, black_box(num_ranks), num_microbatches, None, costs));
                });
            }
        }
    }
    group.finish();
}

criterion_group!(benches, synthesis, v_schedules);
criterion_main!(benches);
