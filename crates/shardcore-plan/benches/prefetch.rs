//! The hooks of a step of 1,000 units, and the planning of large steps.
//!
//! A step has 2,000 uses and so 4,000 hooks; "elements" are hooks. At most 5 microseconds a hook are promised.

#![allow(clippy::expect_used, reason = "a benchmark of a step that cannot be run has no meaning")]

use std::hint::black_box;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use shardcore_plan::prefetch::{Coordinator, GatherUnit, Limits, Objective, Phase, PrefetchPlan, Trace, Use};

const NUM_UNITS: usize = 1_000;

/// Units of three sizes.
fn units(count: usize) -> Vec<GatherUnit> {
    (0..count).map(|index| GatherUnit { name: format!("layers.{index}"), nbytes: [100, 70, 10][index % 3] }).collect()
}

fn there_and_back(count: usize) -> Vec<Use> {
    let forward = (0..count).map(|unit| Use::new(unit, Phase::Forward));
    forward.chain((0..count).rev().map(|unit| Use::new(unit, Phase::Backward))).collect()
}

/// Every tenth use left out, every seventh doubled.
fn departing(uses: &[Use]) -> Vec<Use> {
    let numbered = uses.iter().enumerate().filter(|(index, _)| index % 10 != 9);
    numbered.flat_map(|(index, &used)| std::iter::repeat_n(used, if index % 7 == 6 { 2 } else { 1 })).collect()
}

fn run(coordinator: &mut Coordinator, uses: &[Use]) -> usize {
    let mut started = coordinator.begin("train").start.len();
    for used in uses {
        started += coordinator.enter(used.unit, used.phase).expect("the budget suffices").start.len();
        started += coordinator.leave(used.unit, used.phase).expect("it was entered").release.len();
    }
    started + coordinator.end().release.len()
}

fn coordinator(num_in_budget: u64) -> Coordinator {
    let limits = Limits { budget: Some(100 * num_in_budget), ..Limits::default() };
    Coordinator::new(units(NUM_UNITS), limits, Objective::Time).expect("the budget suffices")
}

fn hooks(criterion: &mut Criterion) {
    let uses = there_and_back(NUM_UNITS);
    let mut group = criterion.benchmark_group("hooks");
    for num_in_budget in [3, 300] {
        let fresh = coordinator(num_in_budget);
        let mut planned = fresh.clone();
        run(&mut planned, &uses);
        planned.plan_recorded();
        let steps = [("recorded", &fresh, uses.clone()), ("planned", &planned, uses.clone())];
        let steps = steps.into_iter().chain([("departing", &planned, departing(&uses))]);
        for (name, coordinator, uses) in steps {
            group.throughput(Throughput::Elements(2 * uses.len() as u64));
            group.bench_function(format!("{name}, budget of {num_in_budget} units"), |bencher| {
                let setup = || coordinator.clone();
                bencher.iter_batched_ref(setup, |own| run(own, black_box(&uses)), BatchSize::LargeInput);
            });
        }
    }
    group.finish();
}

fn planning(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("planning");
    group.sample_size(20);
    for (name, num_units) in [("80 blocks", 80), ("1000 units", NUM_UNITS), ("10000 units", 10 * NUM_UNITS)] {
        let trace = Trace::new(units(num_units), there_and_back(num_units)).expect("the trace is valid");
        for num_in_budget in [3, 300] {
            let limits = Limits { budget: Some(100 * num_in_budget), ..Limits::default() };
            group.bench_function(format!("{name}, budget of {num_in_budget} units"), |bencher| {
                bencher.iter(|| PrefetchPlan::new(black_box(trace.clone()), limits, Objective::Time, None));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, hooks, planning);
criterion_main!(benches);
