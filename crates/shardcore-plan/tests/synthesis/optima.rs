//! The synthesiser against proven optima and published schedules.

#![allow(clippy::float_cmp, reason = "sums of whole numbers are exact")]

use shardcore_plan::schedule::check::{check, memory};
use shardcore_plan::schedule::{CostSpec, Costs, Objective, Placement, Request, ScheduleName, build, synthesize};

use crate::simulated;
use Objective::{Makespan, Span};

/// Ranks, micro-batches, cap, (tF, tI, tW), and the proven optima of makespan and span where known.
type Case = ([u32; 3], [f64; 3], [Option<f64>; 2]);

const fn unit(counts: [u32; 3], makespan: f64, span: f64) -> Case {
    (counts, [1.0; 3], [Some(makespan), Some(span)])
}

const fn makespan(counts: [u32; 3], times: [f64; 3], optimum: f64) -> Case {
    (counts, times, [Some(optimum), None])
}

const LINEAR: [Case; 16] = [
    unit([2, 4, 1], 20.0, 20.0),
    unit([2, 4, 2], 13.0, 13.0),
    unit([2, 4, 3], 13.0, 12.0),
    unit([3, 6, 2], 25.0, 25.0),
    unit([3, 6, 3], 20.0, 20.0),
    unit([3, 6, 5], 20.0, 18.0),
    makespan([4, 4, 3], [1.0; 3], 18.0),
    unit([4, 4, 4], 15.0, 15.0),
    unit([4, 8, 1], 72.0, 72.0),
    unit([4, 8, 2], 41.0, 41.0),
    unit([4, 8, 3], 31.0, 31.0),
    unit([4, 8, 4], 27.0, 27.0),
    makespan([4, 8, 4], [2.0, 2.0, 1.0], 49.0),
    makespan([4, 8, 4], [2.0, 3.0, 1.0], 60.0),
    makespan([4, 8, 4], [3.0, 3.0, 2.0], 76.0),
    // A fused backward: all of it is in the input gradient.
    makespan([4, 8, 4], [1.0, 2.0, 0.0], 33.0),
];

/// Times and caps count chunks: two a rank.
const ON_V: [Case; 3] = [unit([3, 6, 6], 38.0, 36.0), unit([4, 8, 8], 51.0, 48.0), makespan([4, 8, 6], [1.0; 3], 53.0)];

fn reach(placement: &Placement, chunks: f64, (counts, times, optima): Case) {
    let [_, microbatches, cap] = counts;
    let [forward, input, weight] = times.map(|time| chunks * time);
    let costs = CostSpec { activation: chunks.into(), ..CostSpec::uniform(forward, input, weight) };
    for (objective, optimum) in [Makespan, Span].into_iter().zip(optima) {
        let Some(optimum) = optimum else { continue };
        let request = Request::new(placement.clone(), microbatches, costs.clone())
            .with_cap(f64::from(cap))
            .with_objective(objective);
        let found = synthesize(&request).unwrap();
        assert_eq!(found.value, optimum, "{counts:?} {times:?} {objective:?} by {}", found.found_by);
        assert!(found.lower_bound <= optimum, "{counts:?} {times:?} {objective:?}: bound {}", found.lower_bound);
        check(&found.schedule).unwrap();
        memory(&found.schedule, f64::from(cap), &Costs::new(&costs, placement, 1).unwrap()).unwrap();
        let run = simulated(&found.schedule, &costs);
        assert_eq!(if objective == Makespan { run.makespan } else { run.span }, optimum);
    }
}

#[test]
fn every_small_case_of_a_linear_placement_is_optimal() {
    for case in LINEAR {
        reach(&Placement::looped(case.0[0], 1).unwrap(), 1.0, case);
    }
}

#[test]
fn every_small_case_of_the_v_placement_is_optimal() {
    for case in ON_V {
        reach(&Placement::v_shape(case.0[0]).unwrap(), 2.0, case);
    }
}

/// With uniform costs, no latency and room for as many micro-batches as there are ranks, no order of more is shorter than
/// ZB-H1's: the bound proves it.
#[test]
fn zb_h1_is_optimal_at_uniform_costs_without_latency() {
    let costs = [[1.0, 1.0, 1.0], [2.0, 2.0, 1.0], [2.0, 3.0, 1.0], [3.0, 3.0, 2.0], [1.0, 2.0, 2.0], [2.0, 1.0, 2.0]];
    for ranks in [2, 3, 4, 6, 8] {
        for microbatches in [ranks + 1, 2 * ranks + 1, 4 * ranks] {
            for [forward, input, weight] in costs {
                let spec = CostSpec::uniform(forward, input, weight);
                let named = build(ScheduleName::ZbH1, ranks, microbatches, None, None).unwrap();
                let request = Request::new(named.placement().clone(), microbatches, spec.clone());
                let found = synthesize(&request.with_cap(f64::from(ranks))).unwrap();
                let expected = [simulated(&named, &spec).makespan; 2];
                assert_eq!([found.value, found.lower_bound], expected, "p={ranks} m={microbatches} {spec:?}");
            }
        }
    }
}

/// Ranks, micro-batches, times and latency, and the bubble rates over the span of the best automatic schedules with the
/// memory of 1F1B and with twice that (Qi et al., "Zero Bubble Pipeline Parallelism", 2024, table 5).
const AUTOMATIC: [([u32; 2], [f64; 4], [f64; 2]); 6] = [
    ([8, 24], [18.522, 18.086, 9.337, 0.601], [0.1585, 0.0433]),
    ([8, 32], [18.513, 18.086, 9.331, 0.626], [0.1242, 0.0039]),
    ([8, 64], [18.546, 18.097, 9.321, 0.762], [0.0674, 0.0026]),
    ([16, 48], [11.347, 11.248, 8.132, 0.377], [0.1397, 0.0066]),
    ([16, 64], [11.307, 11.254, 8.101, 0.379], [0.1088, 0.0054]),
    ([16, 128], [11.325, 11.308, 8.109, 0.378], [0.0576, 0.0028]),
];

#[test]
fn published_automatic_schedules_are_reached() {
    for ([ranks, microbatches], [forward, input, weight, hop], rates) in AUTOMATIC {
        let (hidden, heads, length) = if ranks == 8 { (2304.0, 24.0, 1024.0) } else { (5120.0, 40.0, 1024.0) };
        let (activation, stash) = (34.0 * hidden + 5.0 * heads * length, 32.0 * hidden);
        let costs = CostSpec {
            activation: activation.into(),
            stash: Some(stash.into()),
            ..CostSpec::uniform(forward, input, weight).with_hop(hop)
        };
        for (times, rate) in [1.0, 2.0].into_iter().zip(rates) {
            let request = Request::new(Placement::looped(ranks, 1).unwrap(), microbatches, costs.clone())
                .with_cap(times * f64::from(ranks) * activation)
                .with_objective(Span);
            let found = synthesize(&request).unwrap();
            let work = f64::from(microbatches) * (forward + input + weight);
            let reached = 1.0 - work / found.value;
            assert!(reached < rate + 0.000_05, "p={ranks} m={microbatches} cap x{times}: {reached:.5} > {rate}");
        }
    }
}
