//! Schedules of two overlapped streams.

#![allow(clippy::float_cmp, reason = "sums of whole numbers are exact")]

use proptest::prelude::*;
use shardcore_plan::schedule::check::check;
use shardcore_plan::schedule::{CostSpec, Gating, Schedule, ScheduleName, build};

use crate::{cases, peak, simulated};
use ScheduleName::{DualPipe, DualPipeV};

/// The same order with parts that wait for their own input only.
fn with_own_gating(schedule: &Schedule) -> Schedule {
    let mut header = schedule.header().clone();
    header.gating = Gating::Own;
    Schedule::new(header, schedule.programs().to_vec()).unwrap()
}

/// Makespan and idle time per rank, with composites that wait for both inputs.
#[test]
fn dualpipe_takes_66_with_6_idle() {
    let run = simulated(&build(DualPipe, 8, 20, None, None).unwrap(), &CostSpec::default());
    assert_eq!(run.makespan, 66.0);
    assert_eq!(run.busy, [60.0; 8]);
    assert_eq!(run.peak, [9.0; 8]);
}

/// `(p/2 - 1) (F&B + B - 3W)`, with F&B the sum of both here. Where the costs differ, some of it is hidden.
#[test]
fn dualpipe_reaches_its_form() {
    for ranks in [2, 4, 6, 8, 12] {
        for microbatches in [2 * ranks, 2 * ranks + 4, 5 * ranks] {
            for (forward, input, weight) in [(1, 1, 1), (2, 3, 2), (4, 5, 4)] {
                let spec = CostSpec::uniform(f64::from(forward), f64::from(input), f64::from(weight));
                let schedule = build(DualPipe, ranks, microbatches, None, None).unwrap();
                let idle = |schedule: &Schedule| {
                    simulated(schedule, &spec).makespan - f64::from(microbatches * (forward + input + weight))
                };
                let form = f64::from((ranks / 2 - 1) * (forward + 2 * (input + weight) - 3 * weight));
                let found = idle(&schedule);
                assert!(found <= form && (found == form || forward != input), "p={ranks} m={microbatches} {spec:?}");
                assert!(idle(&with_own_gating(&schedule)) <= found, "p={ranks} m={microbatches} {spec:?}");
                assert_eq!(peak(&simulated(&schedule, &spec)), f64::from(ranks + 1));
            }
        }
    }
}

/// Parts that wait for their own input halve the idle time at equal costs.
#[test]
fn own_gating_halves_the_idle_time_of_dualpipe() {
    for ranks in [4, 8, 16] {
        let schedule = with_own_gating(&build(DualPipe, ranks, 3 * ranks, None, None).unwrap());
        let run = simulated(&schedule, &CostSpec::default());
        assert_eq!(run.makespan - f64::from(9 * ranks), f64::from(ranks / 2 - 1), "p={ranks}");
    }
}

/// `(p - 1) (F&B + B - 3W)` in the costs of a chunk, which is half a rank's part.
#[test]
fn dualpipe_v_reaches_its_form() {
    for ranks in 1..=9 {
        for microbatches in [2 * ranks, 3 * ranks + 1] {
            let schedule = build(DualPipeV, ranks, microbatches, None, None).unwrap();
            let run = simulated(&schedule, &CostSpec::uniform(2.0, 2.0, 2.0));
            assert_eq!(
                run.makespan - f64::from(6 * microbatches),
                f64::from(2 * (ranks - 1)),
                "p={ranks} m={microbatches}"
            );
            assert_eq!(peak(&run), f64::from(ranks) + 0.5);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases(200, 10_000)) })]

    #[test]
    fn any_counts_give_a_right_schedule_within_its_memory(half in 1_u32..=5, odd in 0_u32..2, microbatches in 1_u32..=40) {
        let dual = build(DualPipe, 2 * half, microbatches, None, None).unwrap();
        let v = build(DualPipeV, 2 * half - odd, microbatches, None, None).unwrap();
        for (schedule, more) in [(dual, 1.0), (v, 0.5)] {
            prop_assert!(check(&schedule).is_ok(), "{}", check(&schedule).unwrap_err());
            for schedule in [with_own_gating(&schedule), schedule] {
                let run = simulated(&schedule, &CostSpec::default());
                prop_assert!(peak(&run) <= f64::from(schedule.num_ranks()) + more);
            }
        }
    }
}

#[test]
fn an_odd_number_of_ranks_is_an_error_that_names_the_way_out() {
    let message = build(DualPipe, 5, 20, None, None).unwrap_err().to_string();
    assert!(message.contains("num_ranks is 5") && message.contains("dualpipe-v"), "{message}");
    for (ranks, microbatches) in [(0, 4), (4, 0)] {
        assert!(build(DualPipe, ranks, microbatches, None, None).is_err());
        assert!(build(DualPipeV, ranks, microbatches, None, None).is_err());
    }
}
