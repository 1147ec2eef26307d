//! Simulation and checks of interleaved 1F1B on 64 ranks with 1,024 micro-batches and 2 chunks a rank, and how they
//! grow up to 1,024 ranks and 4,096 micro-batches; a small schedule as a search evaluates it thousands of times.

use std::hint::black_box;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use shardcore_plan::Result;
use shardcore_plan::schedule::check::{self, Delivery};
use shardcore_plan::schedule::generate::{self, ScheduleName};
use shardcore_plan::schedule::simulate::{Network, Simulator, simulate};
use shardcore_plan::schedule::{CostSpec, Costs, Lowering, OptimizerStep, Schedule};

const DELIVERIES: [Delivery; 7] = [
    Delivery::Buffered,
    Delivery::Directed,
    Delivery::Capacity(1),
    Delivery::Batched,
    Delivery::PairFifo,
    Delivery::OneFifo,
    Delivery::Blocking,
];

fn interleaved(ranks: u32, microbatches: u32) -> Result<(Schedule, Costs)> {
    let schedule = generate::build(ScheduleName::Interleaved, ranks, microbatches, Some(2), None)?;
    let spec = CostSpec::uniform(1.0, 1.0, 1.0).with_hop(0.05);
    let costs = Costs::new(&spec, schedule.placement(), 1)?;
    Ok((schedule, costs))
}

fn large(criterion: &mut Criterion) -> Result<()> {
    for (ranks, microbatches) in [(64, 1024), (256, 1024), (1024, 4096)] {
        let (schedule, costs) = interleaved(ranks, microbatches)?;
        let network = Network::default();
        let mut simulator = Simulator::new();
        let mut group = criterion.benchmark_group(format!("p={ranks} m={microbatches} v=2"));
        group.sample_size(10);
        group.bench_function("evaluate", |bencher| {
            bencher.iter(|| {
                simulator.evaluate(schedule.header(), black_box(schedule.programs()), false, &costs, &network)
            });
        });
        group.bench_function("simulate", |bencher| bencher.iter(|| simulate(black_box(&schedule), &costs)));
        group.bench_function("check structure", |bencher| bencher.iter(|| check::structure(black_box(&schedule))));
        group.bench_function("check dependencies", |bencher| {
            bencher.iter(|| check::dependencies(black_box(&schedule)));
        });
        group.bench_function("check memory", |bencher| {
            bencher.iter(|| check::memory(black_box(&schedule), f64::from(microbatches), &costs));
        });
        if ranks < 1024 {
            communication(&mut group, &schedule.lower(&Lowering::default())?, &costs);
            sharding(&mut group, &schedule)?;
        }
        group.finish();
    }
    Ok(())
}

fn communication(group: &mut BenchmarkGroup<'_, WallTime>, lowered: &Schedule, costs: &Costs) {
    group.bench_function("simulate lowered", |bencher| bencher.iter(|| simulate(black_box(lowered), costs)));
    for delivery in DELIVERIES {
        group.bench_function(format!("check {delivery:?}"), |bencher| {
            bencher.iter(|| check::communication(black_box(lowered), delivery));
        });
    }
}

/// With every kind of action: gathers, reductions, sums over shared weights, optimizer steps.
fn sharding(group: &mut BenchmarkGroup<'_, WallTime>, schedule: &Schedule) -> Result<()> {
    let tied = vec![vec![0, schedule.num_stages() - 1]];
    let optimizer = OptimizerStep::Barrier;
    let lowered = schedule.lower(&Lowering { zero_stage: Some(3), optimizer, tied, ..Lowering::default() })?;
    group.bench_function("check Blocking, ZeRO-3 and a step", |bencher| {
        bencher.iter(|| check::communication(black_box(&lowered), Delivery::Blocking));
    });
    Ok(())
}

/// Simulation and the strictest check for each forward: the same time each means linear growth.
fn growth(criterion: &mut Criterion) -> Result<()> {
    let mut group = criterion.benchmark_group("growth, interleaved v=2");
    group.sample_size(10);
    for (ranks, microbatches) in [(16, 256), (64, 1024), (256, 2048), (1024, 4096)] {
        let (schedule, costs) = interleaved(ranks, microbatches)?;
        group.throughput(Throughput::Elements(2 * u64::from(ranks) * u64::from(microbatches)));
        let id = |what: &str| BenchmarkId::new(what, format!("p={ranks} m={microbatches}"));
        group.bench_function(id("simulate"), |bencher| bencher.iter(|| simulate(black_box(&schedule), &costs)));
        let lowered = schedule.lower(&Lowering::default())?;
        drop(schedule);
        group.bench_function(id("check Blocking"), |bencher| {
            bencher.iter(|| check::communication(black_box(&lowered), Delivery::Blocking));
        });
    }
    group.finish();
    Ok(())
}

fn small(criterion: &mut Criterion) -> Result<()> {
    let (schedule, costs) = interleaved(8, 32)?;
    let network = Network::default();
    let mut simulator = Simulator::new();
    criterion.bench_function("p=8 m=32 v=2/evaluate", |bencher| {
        bencher.iter(|| simulator.evaluate(schedule.header(), black_box(schedule.programs()), false, &costs, &network));
    });
    Ok(())
}

fn bench(criterion: &mut Criterion) {
    #[expect(clippy::expect_used, reason = "a benchmark of a plan that cannot be made has no meaning")]
    large(criterion).and_then(|()| growth(criterion)).and_then(|()| small(criterion)).expect("the schedules are valid");
}

criterion_group!(benches, bench);
criterion_main!(benches);
