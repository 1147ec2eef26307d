//! Laws of the closed-form schedules: they run, in the time and memory of the formulas, in the published order.

use proptest::prelude::*;
use shardcore_plan::PlanError;
use shardcore_plan::schedule::generate::ChunkCount;
use shardcore_plan::schedule::generate::closed::ClosedForm;
use shardcore_plan::schedule::generate::evaluation::evaluation;
use shardcore_plan::schedule::{Action, CostSpec, Placement, Schedule, ScheduleName, build, rank_program};

use crate::given::{cases, counts, name, placement, times};
use crate::reference::{Times, run};

use ScheduleName::{
    EagerOneForwardOneBackward, Gpipe, Interleaved, InterleavedZb, LoopedBfs, OneForwardOneBackward,
    SeqOneForwardOneBackward, ZbH1, ZbH2,
};

pub(crate) fn made(name: ScheduleName, p: u32, m: u32, v: u32) -> Schedule {
    let chunks = (name.num_chunks() == ChunkCount::Any).then_some(v);
    build(name, p, m, chunks, None).unwrap()
}

/// Chunks or slices into which a rank's work is cut.
fn parts(schedule: &Schedule) -> u32 {
    schedule.num_chunks() * schedule.header().num_slices
}

/// The most parts of micro-batches that a rank holds, as the formulas say.
fn peak(name: ScheduleName, schedule: &Schedule, rank: u32) -> u32 {
    let (p, m, v) = (schedule.num_ranks(), schedule.num_microbatches(), parts(schedule));
    let behind = p - 1 - rank;
    let wanted = match name {
        Gpipe | LoopedBfs => m * v,
        OneForwardOneBackward => behind + 1,
        EagerOneForwardOneBackward => 2 * behind + 1,
        Interleaved => 2 * behind + (v - 1) * p + 1,
        ZbH1 => p,
        ZbH2 => 2 * p - 1,
        InterleavedZb => p * v,
        _ => behind + v,
    };
    wanted.min(m * v)
}

/// The makespan beyond `m (tF + tB)` with `t` the times of a part; `None` where no formula holds.
fn bubble(name: ScheduleName, schedule: &Schedule, t: Times) -> Option<i64> {
    let (p, m) = (i64::from(schedule.num_ranks()), i64::from(schedule.num_microbatches()));
    let whole = t.forward + t.input_grad + t.weight_grad;
    // The last rank starts after p - 1 forwards, whatever else is cheap.
    let split = (t.forward + t.input_grad - t.forward.min(t.weight_grad)).max(t.forward);
    let holds = match name {
        ZbH1 | LoopedBfs => m >= p,
        Interleaved | InterleavedZb => m % p == 0,
        ZbH2 => false,
        _ => true,
    };
    let each = if matches!(name, ZbH1 | InterleavedZb) { split } else { whole };
    holds.then_some((p - 1) * each)
}

proptest! {
    #![proptest_config(cases(400))]

    #[test]
    fn every_schedule_runs_within_its_peak(name in name(), (p, m, v) in counts(), times in times()) {
        let schedule = made(name, p, m, v);
        let run = run(&schedule, times).map_err(TestCaseError::fail)?;
        for (rank, &held) in (0..p).zip(&run.peak) {
            let allowed = peak(name, &schedule, rank);
            prop_assert!(held <= allowed as usize, "rank {rank} holds {held} of {allowed}");
        }
        prop_assert!(run.span <= run.makespan);
    }

    #[test]
    fn the_peak_is_reached_with_enough_microbatches(name in name(), (p, m, v) in counts()) {
        let schedule = made(name, p, m + 2 * p, v);
        let run = run(&schedule, Times::UNIT).map_err(TestCaseError::fail)?;
        let allowed: Vec<usize> = (0..p).map(|rank| peak(name, &schedule, rank) as usize).collect();
        prop_assert_eq!(run.peak, allowed);
    }

    #[test]
    fn the_bubble_is_that_of_the_formula(name in name(), (p, m, v) in counts(), times in times()) {
        let schedule = made(name, p, m, v);
        let times = Times { hop: 0, ..times };
        if let Some(bubble) = bubble(name, &schedule, times) {
            let work = i64::from(m * parts(&schedule)) * (times.forward + times.input_grad + times.weight_grad);
            let run = run(&schedule, times).map_err(TestCaseError::fail)?;
            prop_assert_eq!(run.makespan - work, bubble);
        }
    }

    #[test]
    fn one_rank_is_the_rank_of_all(name in name(), (p, m, v) in counts()) {
        let schedule = made(name, p, m, v);
        let chunks = Some(parts(&schedule));
        for rank in 0..p {
            let alone = rank_program(name, p, m, chunks, None, rank).unwrap();
            prop_assert_eq!(alone.as_slice(), schedule.program(rank).unwrap());
        }
        let expected = PlanError::NoSuchRank { rank: p.into(), num_ranks: p };
        prop_assert_eq!(rank_program(name, p, m, chunks, None, p), Err(expected));
    }

    #[test]
    fn evaluation_runs_on_every_placement(placement in placement(), m in 1_u32..20, times in times()) {
        let schedule = evaluation(placement, m).unwrap();
        prop_assert!(schedule.is_forward_only());
        run(&schedule, times).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn a_larger_group_runs_within_its_peak(
        split in any::<bool>(),
        (p, m, v) in counts(),
        more in 0_u32..12,
        times in times(),
    ) {
        let name = if split { InterleavedZb } else { Interleaved };
        let schedule = ClosedForm::with_group(name, p, m, Some(v), p + more).unwrap().build().unwrap();
        let run = run(&schedule, times).map_err(TestCaseError::fail)?;
        for (rank, &held) in (0..p).zip(&run.peak) {
            let warmup = if split { p - 1 } else { 2 * (p - 1 - rank) };
            let allowed = (warmup + (v - 1) * (p + more) + 1).min(m * v);
            prop_assert!(held <= allowed as usize, "rank {rank} holds {held} of {allowed}");
        }
    }

    #[test]
    fn zb_h2_has_the_span_of_its_formula(p in 1_u32..9, more in 0_u32..10, times in times()) {
        let m = 2 * p - 1 + more;
        let Times { forward, input_grad, weight_grad, .. } = times;
        let run = run(&made(ZbH2, p, m, 1), Times { hop: 0, ..times }).map_err(TestCaseError::fail)?;
        let bubble = i64::from(p - 1) * (forward + input_grad - 2 * forward.min(weight_grad)).max(0);
        let work = i64::from(m) * (forward + input_grad + weight_grad);
        prop_assert_eq!(run.span - work, bubble);
    }

    /// Small latencies add what the pipeline's critical path has of hops.
    #[test]
    fn latency_adds_the_hops_of_the_critical_path(p in 2_u32..9, rounds in 3_u32..6, v in 1_u32..4) {
        let m = p * rounds;
        let (ranks, microbatches, chunks) = (i64::from(p), i64::from(m), i64::from(v));
        let slow = |name| {
            let times = Times { forward: 1000, input_grad: 1000, weight_grad: 1000, hop: 1 };
            let makespan = |times| run(&made(name, p, m, v), times).unwrap().makespan;
            makespan(times) - makespan(Times { hop: 0, ..times })
        };
        prop_assert_eq!(slow(Gpipe), 2 * (ranks - 1));
        prop_assert_eq!(slow(EagerOneForwardOneBackward), 2 * (ranks - 1));
        prop_assert_eq!(slow(ZbH1), 4 * (ranks - 1));
        prop_assert_eq!(slow(OneForwardOneBackward), 2 * microbatches * (ranks - 1) / ranks + 2 * (ranks - 2));
        if v > 1 {
            prop_assert_eq!(slow(Interleaved), 2 * (ranks * chunks - 1));
        }
    }
}

/// Rank `rank` of a schedule as text.
fn order(name: ScheduleName, [p, m, v]: [u32; 3], rank: u32) -> String {
    let schedule = made(name, p, m, v);
    schedule.program(rank).unwrap().iter().map(Action::to_string).collect::<Vec<_>>().join(" ")
}

#[test]
fn orders_are_the_published_ones() {
    assert_eq!(order(Gpipe, [2, 3, 1], 1), "1F0 1F1 1F2 1B0 1B1 1B2");
    assert_eq!(order(OneForwardOneBackward, [3, 4, 1], 0), "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3");
    assert_eq!(order(EagerOneForwardOneBackward, [3, 4, 1], 1), "1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3");
    assert_eq!(order(LoopedBfs, [2, 2, 2], 0), "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1");
    assert_eq!(order(ZbH1, [3, 4, 1], 0), "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3");
    assert_eq!(order(ZbH1, [3, 4, 1], 2), "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3");
    assert_eq!(order(ZbH2, [2, 4, 1], 1), "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3");
    let interleaved = "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3";
    assert_eq!(order(Interleaved, [2, 4, 2], 1), interleaved);
    let interleaved_zb = "0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1";
    assert_eq!(order(InterleavedZb, [2, 2, 2], 0), interleaved_zb);
    // Units are micro-batch x 2 + slice: the slices of a backward run in reverse.
    assert_eq!(order(SeqOneForwardOneBackward, [2, 2, 2], 1), "1F0 1F1 1B1 1F2 1B0 1F3 1B3 1B2");
}

/// The last rank of another 1F1B generator emitted F1..Fm.
#[test]
fn the_last_rank_of_1f1b_starts_with_micro_batch_0() {
    assert_eq!(order(OneForwardOneBackward, [2, 4, 1], 1), "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3");
}

/// Other generators refuse fewer micro-batches than ranks, or hang.
#[test]
fn fewer_micro_batches_than_ranks_train() {
    for &name in ScheduleName::CLOSED {
        for m in 1..8 {
            run(&made(name, 8, m, 3), Times::UNIT).unwrap();
        }
    }
}

/// A short last group of micro-batches closed a cycle.
#[test]
fn interleaving_a_short_last_group_does_not_stall() {
    run(&made(Interleaved, 6, 25, 3), Times::UNIT).unwrap();
    run(&made(InterleavedZb, 6, 25, 3), Times::UNIT).unwrap();
}

/// Two neighbouring stages on one rank raised an assertion elsewhere.
#[test]
fn evaluation_on_a_v_runs_both_stages_of_the_turning_rank() {
    let schedule = evaluation(Placement::v_shape(2).unwrap(), 2).unwrap();
    let orders: Vec<String> = (0..2)
        .map(|rank| schedule.program(rank).unwrap().iter().map(Action::to_string).collect::<Vec<_>>().join(" "))
        .collect();
    assert_eq!(orders, ["0F0 0F1 3F0 3F1", "1F0 2F0 1F1 2F1"]);
}

/// The published bubble rates (span, profiled costs in microseconds), to four digits.
#[test]
fn published_bubble_rates_are_reproduced() {
    let rows: [([u32; 2], [i64; 4], [i64; 3]); 6] = [
        ([8, 24], [18_522, 18_086, 9_337, 601], [2431, 1585, 1083]),
        ([8, 32], [18_513, 18_086, 9_331, 626], [1985, 1242, 837]),
        ([8, 64], [18_546, 18_097, 9_321, 762], [1240, 674, 444]),
        ([16, 48], [11_347, 11_248, 8_132, 377], [2552, 1397, 672]),
        ([16, 64], [11_307, 11_254, 8_101, 379], [2082, 1088, 516]),
        ([16, 128], [11_325, 11_308, 8_109, 378], [1251, 576, 266]),
    ];
    for ([p, m], [forward, input_grad, weight_grad, hop], expected) in rows {
        let rates = [OneForwardOneBackward, ZbH1, ZbH2].map(|name| {
            let run = run(&made(name, p, m, 1), Times { forward, input_grad, weight_grad, hop }).unwrap();
            let idle = run.span - i64::from(m) * (forward + input_grad + weight_grad);
            (idle * 10_000 + run.span / 2) / run.span
        });
        assert_eq!(rates, expected, "p = {p}, m = {m}");
    }
}

/// Also where the order does not depend on them.
#[test]
fn costs_that_are_none_are_refused_for_every_name() {
    for &name in ScheduleName::ALL {
        let stages = name.placement(4, None).unwrap().num_stages() as usize;
        let made = |costs: &CostSpec| {
            let whole = build(name, 4, 4, None, Some(costs));
            assert_eq!(rank_program(name, 4, 4, None, Some(costs), 0).as_ref().err(), whole.as_ref().err());
            whole.map_err(|error| error.to_string())
        };
        let plain = CostSpec { forward: vec![1.0; stages].into(), ..CostSpec::default() };
        assert_eq!(made(&plain).unwrap().num_stages() as usize, stages);
        for bad in [f64::NAN, f64::INFINITY, -1.0] {
            let expected = format!("{bad}: expected a finite number of at least 0");
            assert!(made(&CostSpec::uniform(bad, 1.0, 1.0)).unwrap_err().contains(&format!("forward = {expected}")));
            assert!(made(&CostSpec::default().with_hop(bad)).unwrap_err().contains(&format!("hop = {expected}")));
            let fused = CostSpec { fused_backward: Some(vec![bad; stages].into()), ..CostSpec::default() };
            assert!(made(&fused).unwrap_err().contains(&format!("fused_backward of stage 0 = {expected}")));
        }
        let short = CostSpec { stash: Some(vec![1.0; stages - 1].into()), ..CostSpec::default() };
        assert!(made(&short).unwrap_err().contains(&format!("one entry for each of the {stages} stages")));
    }
}

#[test]
fn counts_out_of_range_are_refused() {
    let refused = |p, m, chunks| build(OneForwardOneBackward, p, m, chunks, None).unwrap_err().to_string();
    assert_eq!(refused(0, 1, None), "num_ranks is 0: expected at least 1");
    assert_eq!(refused(1, 0, None), "num_microbatches is 0: expected at least 1");
    assert_eq!(refused(1, 1, Some(0)), "num_chunks is 0: expected at least 1");
    assert!(refused(1, 1, Some(2)).starts_with("schedule 1f1b has 1 chunk per rank, not 2"));
    assert!(refused(u32::MAX, u32::MAX, None).starts_with("number of stages is 4294967295"));
    assert!(refused(1, u32::MAX, None).starts_with("num_microbatches * num_slices is"));
    assert!(refused(1 << 20, 1 << 20, None).starts_with("num_microbatches * number of stages is"));
    assert!(build(Interleaved, 1 << 16, 1, Some(1 << 16), None).is_err());
    assert!(ClosedForm::with_group(Interleaved, 4, 8, None, 3).is_err());
    ClosedForm::with_group(Interleaved, 4, 8, None, u32::MAX).unwrap().build().unwrap();
}
