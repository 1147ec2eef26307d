//! Schedules on the V placement.

#![allow(clippy::float_cmp, reason = "sums of whole numbers and halves are exact")]

use proptest::prelude::*;
use shardcore_plan::schedule::check::check;
use shardcore_plan::schedule::{CostSpec, ScheduleName, build};

use crate::{cases, peak, simulated};
use ScheduleName::{VHalf, VMin, ZbV};

const NAMES: [ScheduleName; 3] = [ZbV, VHalf, VMin];

/// The most micro-batches a rank may hold.
fn cap(name: ScheduleName, ranks: u32) -> u32 {
    match name {
        VHalf => ranks / 2 + 1,
        VMin => (ranks + 4) / 3,
        _ => ranks,
    }
}

/// The makespan beyond the work at one unit for each of the three computations, where a formula is known.
fn bubble(name: ScheduleName, ranks: u32) -> f64 {
    let ranks_f = f64::from(ranks);
    match name {
        VHalf => (3.0 * ranks_f - 7.0) / 2.0,
        VMin if ranks.is_multiple_of(3) => 2.0 * ranks_f - 3.5,
        VMin => 2.0 * ranks_f - 2.5,
        _ => (ranks_f - 1.0) / 2.0,
    }
}

#[test]
fn equal_costs_reach_the_known_bubbles() {
    for ranks in [4, 6, 8, 12, 16] {
        for name in NAMES {
            let microbatches = 4 * ranks;
            let run = simulated(&build(name, ranks, microbatches, None, None).unwrap(), &CostSpec::default());
            let work = f64::from(3 * microbatches);
            assert!(
                run.makespan - work <= bubble(name, ranks),
                "{name} p={ranks}: {} > {}",
                run.makespan - work,
                bubble(name, ranks)
            );
            assert!(peak(&run) <= f64::from(cap(name, ranks)), "{name} p={ranks}: {}", peak(&run));
            if name == ZbV {
                assert!((run.span - work).abs() < 1e-9, "{name} p={ranks}: {}", run.span - work);
            }
        }
    }
}

#[test]
fn zb_v_leaves_no_bubble_with_any_number_of_ranks() {
    for ranks in 1..=9 {
        for microbatches in [2 * ranks, 2 * ranks + 1, 5 * ranks] {
            let run = simulated(&build(ZbV, ranks, microbatches, None, None).unwrap(), &CostSpec::default());
            let work = f64::from(3 * microbatches);
            assert_eq!([run.span - work, run.makespan - work], [0.0, bubble(ZbV, ranks)], "p={ranks} m={microbatches}");
        }
    }
}

/// Bubbles over span and makespan in per cent, of (8, 32): 1:1:1, with a hop of 0.05, and 2:3:1.
#[test]
fn given_the_costs_they_win_as_published() {
    let specs = [
        CostSpec::uniform(1.0, 1.0, 1.0),
        CostSpec::uniform(1.0, 1.0, 1.0).with_hop(0.05),
        CostSpec::uniform(2.0, 3.0, 1.0),
    ];
    let columns = [
        (ZbV, [(0.0, 3.5), (2.0, 5.1), (6.6, 6.6)]),
        (VHalf, [(8.1, 8.1), (10.2, 10.2), (19.0, 19.0)]),
        (VMin, [(12.3, 12.3), (19.3, 19.3), (39.6, 39.6)]),
    ];
    for (name, published) in columns {
        for (spec, (span, makespan)) in specs.iter().zip(published) {
            let run = simulated(&build(name, 8, 32, None, Some(spec)).unwrap(), spec);
            let found = [100.0 * run.bubble_span, 100.0 * run.bubble_makespan];
            assert!(
                found[0] <= span + 0.1 && found[1] <= makespan + 0.1,
                "{name} {spec:?}: {found:.2?} > {span}/{makespan}"
            );
        }
    }
}

/// The search looks at a shorter pipeline; what it finds there must hold.
#[test]
fn long_pipelines_reach_the_formulas_too() {
    for (ranks, microbatches) in [(31, 100), (64, 160)] {
        for name in NAMES {
            let run = simulated(&build(name, ranks, microbatches, None, None).unwrap(), &CostSpec::default());
            let work = f64::from(3 * microbatches);
            // With an odd number of ranks, half of an activation is left over: the forms are for even ones.
            let slack = if ranks.is_multiple_of(2) { 0.0 } else { 3.0 };
            assert!(run.makespan - work <= bubble(name, ranks) + slack, "{name} p={ranks}: {}", run.makespan - work);
        }
    }
}

fn any_costs() -> impl Strategy<Value = Option<CostSpec>> {
    let time = || prop_oneof![Just(0.0), (1_u32..10).prop_map(f64::from), Just(1e6)];
    let spec = (time(), time(), time(), prop_oneof![Just(0.0), Just(0.1), Just(50.0)])
        .prop_map(|(forward, input, weight, hop)| CostSpec::uniform(forward, input, weight).with_hop(hop));
    prop::option::of(spec)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases(24, 2_000)) })]

    #[test]
    fn any_counts_and_costs_give_a_right_schedule_within_its_memory(
        name in prop::sample::select(NAMES.to_vec()),
        (ranks, microbatches) in (1_u32..=9, 1_u32..=24),
        costs in any_costs(),
    ) {
        let schedule = build(name, ranks, microbatches, None, costs.as_ref()).unwrap();
        prop_assert!(check(&schedule).is_ok(), "{}", check(&schedule).unwrap_err());
        let run = simulated(&schedule, &costs.unwrap_or_default());
        prop_assert!(peak(&run) <= f64::from(cap(name, ranks)), "peak {}", peak(&run));
    }
}

#[test]
fn the_same_input_gives_the_same_schedule() {
    let spec = CostSpec::uniform(2.0, 3.0, 1.0).with_hop(0.3);
    for name in NAMES {
        let schedule = build(name, 5, 11, None, Some(&spec)).unwrap();
        assert_eq!(schedule, build(name, 5, 11, None, Some(&spec)).unwrap());
    }
}

#[test]
fn counts_out_of_range_are_errors() {
    for name in NAMES {
        assert!(build(name, 0, 4, None, None).is_err());
        assert!(build(name, 4, 0, None, None).is_err());
        assert!(build(name, 4, 4, Some(3), None).is_err());
        assert!(build(name, 4, 4, None, Some(&CostSpec::uniform(f64::NAN, 1.0, 1.0))).is_err());
    }
}
