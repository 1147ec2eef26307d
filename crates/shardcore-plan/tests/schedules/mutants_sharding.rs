//! Lowered programs with one fault in what they gather, reduce, sum and step: the checker must refuse each of them.

use proptest::prelude::*;
use shardcore_plan::PlanError;
use shardcore_plan::schedule::check::{self, FaultKind};
use shardcore_plan::schedule::{Action, ActionKind, Lowering, OptimizerStep, ReduceTiming, Schedule, ScheduleName};

use crate::mutation::{Dice, Programs, kill, shift};
use crate::timed::{any_flat, flat, lowered};

use ActionKind::{Backward, Optimizer, Reduce, Reshard, TiedReduce, Unshard, WeightGrad};

const KINDS: [ActionKind; 5] = [Unshard, Reshard, Reduce, TiedReduce, Optimizer];
const OPTIMIZERS: [OptimizerStep; 2] = [OptimizerStep::Barrier, OptimizerStep::PostValidation];

fn lowerings() -> impl Strategy<Value = Lowering> {
    let reduce = prop::sample::select(ReduceTiming::ALL);
    let optimizer = prop::sample::select(OptimizerStep::ALL);
    (prop::option::of(0_u8..4), reduce, optimizer, 1_u32..4).prop_map(|(zero_stage, reduce, optimizer, most)| {
        let reduce = if matches!(zero_stage, Some(2 | 3)) { reduce } else { ReduceTiming::Once };
        Lowering { zero_stage, reduce, optimizer, max_unsharded: most, ..Lowering::default() }
    })
}

/// Lowered in any way, some with tied weights.
fn any_lowered() -> impl Strategy<Value = Schedule> {
    (any_flat(), lowerings(), any::<bool>()).prop_map(|(schedule, lowering, tie)| {
        let last = schedule.placement().chain_length() - 1;
        let tied = if tie && last > 0 { vec![vec![0, last]] } else { Vec::new() };
        lowered(&schedule, &Lowering { tied, ..lowering })
    })
}

fn with(change: fn(Lowering) -> Lowering) -> impl Strategy<Value = Schedule> {
    (any_flat(), lowerings(), prop::sample::select(OPTIMIZERS.to_vec())).prop_map(
        move |(schedule, lowering, optimizer)| {
            let tied = vec![vec![0, schedule.placement().chain_length() - 1]];
            lowered(&schedule, &change(Lowering { tied, optimizer, ..lowering }))
        },
    )
}

fn gathered() -> impl Strategy<Value = Schedule> {
    with(|lowering| Lowering { zero_stage: Some(3), ..lowering })
}

fn reduced_once() -> impl Strategy<Value = Schedule> {
    with(|lowering| Lowering { zero_stage: Some(2), reduce: ReduceTiming::Once, ..lowering })
}

fn reduced_per_microbatch() -> impl Strategy<Value = Schedule> {
    with(|lowering| Lowering { zero_stage: Some(2), reduce: ReduceTiming::PerMicrobatch, ..lowering })
}

fn makes_weight_grad(action: &Action) -> bool {
    matches!(action.kind, Backward | WeightGrad)
}

fn drop_one(_: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let (rank, at) = dice.place(programs, |_, _, action| KINDS.contains(&action.kind))?;
    programs[rank].remove(at);
    Some(())
}

fn double_one(_: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let (rank, at) = dice.place(programs, |_, _, action| KINDS.contains(&action.kind))?;
    let (action, to) = (programs[rank][at], dice.below(programs[rank].len() + 1));
    programs[rank].insert(to, action);
    Some(())
}

/// An action of a kind that the lowering does not have.
fn undeclared(schedule: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let present: Vec<ActionKind> = programs.iter().flatten().map(|action| action.kind).collect();
    let absent: Vec<ActionKind> = KINDS.into_iter().filter(|kind| !present.contains(kind)).collect();
    if absent.is_empty() {
        return None;
    }
    let (kind, rank) = (absent[dice.below(absent.len())], dice.below(programs.len()));
    let stages = schedule.placement().stages_of(u32::try_from(rank).unwrap());
    let (stage, to) = (stages[dice.below(stages.len())], dice.below(programs[rank].len() + 1));
    programs[rank].insert(to, Action::new(kind, stage, 0));
    Some(())
}

/// An action of a kind moves to the place of one that it must stand behind, or before that.
fn too_early(
    programs: &mut Programs,
    dice: &mut Dice,
    kind: ActionKind,
    needs: impl Fn(Action, &Action) -> bool,
) -> Option<()> {
    let (rank, at) = dice.place(programs, |_, _, action| action.kind == kind)?;
    let moved = programs[rank][at];
    let last = programs[rank][..at].iter().rposition(|action| needs(moved, action))?;
    let to = dice.below(last + 1);
    shift(&mut programs[rank], at, to);
    Some(())
}

fn early_reduction(_: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    too_early(programs, dice, Reduce, |moved, action| {
        action.stage == moved.stage && (makes_weight_grad(action) || action.kind == TiedReduce)
    })
}

/// Of a program with a reduction per micro-batch: before the weight gradient that it carries.
fn reduction_of_nothing(_: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    too_early(programs, dice, Reduce, |moved, action| action.stage == moved.stage && makes_weight_grad(action))
}

/// Of a program with a reduction per micro-batch: behind the next weight gradient as well.
fn reduction_of_two(_: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let next = |program: &[Action], at: usize| {
        let stage = program[at].stage;
        let later = program[at..].iter().position(|action| action.stage == stage && makes_weight_grad(action));
        later.map(|later| at + later)
    };
    let (rank, at) = {
        let programs = &*programs;
        dice.place(programs, |rank, at, action| action.kind == Reduce && next(&programs[rank], at).is_some())?
    };
    let next = next(&programs[rank], at)?;
    let to = next + dice.below(programs[rank].len() - next);
    shift(&mut programs[rank], at, to);
    Some(())
}

fn early_sum(schedule: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let per_microbatch = schedule.lowering()?.reduce == ReduceTiming::PerMicrobatch;
    too_early(programs, dice, TiedReduce, |moved, action| {
        let reduces = per_microbatch && action.kind == Reduce;
        action.stage == moved.stage && (makes_weight_grad(action) || reduces)
    })
}

/// A step of the optimizer moves before a gradient, reduction or sum of its stage, or before anything at a barrier.
fn early_step(schedule: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let barrier = schedule.lowering()?.optimizer == OptimizerStep::Barrier;
    too_early(programs, dice, Optimizer, |moved, action| {
        let own = makes_weight_grad(action) || matches!(action.kind, Reduce | TiedReduce);
        let waits = barrier && !matches!(action.kind, Optimizer | Unshard | Reshard);
        waits || (own && action.stage == moved.stage)
    })
}

/// Two ranks sum over the same two groups, one of them in another order.
fn sums_in_another_order(_: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let (rank, first) = dice.place(programs, |_, _, action| action.kind == TiedReduce)?;
    let sums = |action: &Action| action.kind == TiedReduce && action.stage != programs[rank][first].stage;
    let second = programs[rank].iter().position(sums)?;
    programs[rank].swap(first, second);
    Some(())
}

/// A sum over shared weights stands before a message for which another rank of the sum waits before it sums.
fn sum_before_a_message(_: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let (rank, at) = dice.place(programs, |rank, _, action| rank > 0 && action.kind == TiedReduce)?;
    let last = programs[rank].iter().rposition(|action| action.kind.is_send())?;
    let gradient = programs[rank].iter().rposition(makes_weight_grad)?;
    if gradient > last {
        return None;
    }
    shift(&mut programs[rank], at, last);
    Some(())
}

/// A stage is gathered where the rank holds as many whole as it may.
fn one_gather_too_many(schedule: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let most = schedule.lowering()?.max_unsharded as usize;
    let mut places = Vec::new();
    for (rank, program) in programs.iter().enumerate() {
        let mut whole = 0;
        let mut full = Vec::new();
        for (at, action) in program.iter().enumerate() {
            if action.kind == Unshard {
                places.extend(full.iter().map(|&to| (rank, at, to)));
                whole += 1;
            }
            whole -= usize::from(action.kind == Reshard);
            if whole == most {
                full.push(at + 1);
            }
        }
    }
    let (rank, at, to) = *places.get(dice.below(places.len().max(1)))?;
    shift(&mut programs[rank], at, to.min(at));
    (to < at).then_some(())
}

/// A stage is gathered behind a computation that uses it.
fn late_gather(_: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let (rank, at) = dice.place(programs, |_, _, action| action.kind == Unshard)?;
    let stage = programs[rank][at].stage;
    let uses = |action: &Action| action.stage == stage && action.kind.is_compute();
    let to = at + programs[rank][at..].iter().position(uses)?;
    shift(&mut programs[rank], at, to);
    Some(())
}

/// A stage is released before a computation that uses it.
fn early_release(_: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    too_early(programs, dice, Reshard, |moved, action| action.stage == moved.stage && action.kind.is_compute())
}

fn by_check(_: &Schedule, mutant: &Schedule) -> Result<(), PlanError> {
    check::check(mutant)
}

#[test]
fn dropped_actions() {
    kill(any_lowered(), drop_one, &[FaultKind::Missing, FaultKind::Sharding], by_check);
}

#[test]
fn doubled_actions() {
    kill(any_lowered(), double_one, &[FaultKind::Missing, FaultKind::Sharding], by_check);
}

#[test]
fn actions_that_the_lowering_does_not_have() {
    kill(any_lowered(), undeclared, &[FaultKind::Sharding], by_check);
}

#[test]
fn reductions_before_the_last_gradient_or_sum() {
    kill(reduced_once(), early_reduction, &[FaultKind::Sharding], by_check);
}

#[test]
fn reductions_of_nothing_and_of_two_micro_batches() {
    kill(reduced_per_microbatch(), reduction_of_nothing, &[FaultKind::Sharding], by_check);
    kill(reduced_per_microbatch(), reduction_of_two, &[FaultKind::Sharding], by_check);
}

#[test]
fn sums_before_the_last_gradient_or_reduction() {
    kill(reduced_once(), early_sum, &[FaultKind::Sharding], by_check);
    kill(reduced_per_microbatch(), early_sum, &[FaultKind::Sharding], by_check);
}

#[test]
fn steps_before_what_they_step_with_or_before_the_barrier() {
    kill(reduced_once(), early_step, &[FaultKind::Sharding], by_check);
    kill(reduced_per_microbatch(), early_step, &[FaultKind::Sharding], by_check);
    kill(gathered(), early_step, &[FaultKind::Sharding], by_check);
}

#[test]
fn sums_that_ranks_reach_in_different_orders() {
    let tied = (2_u32..=5, 1_u32..=3).prop_map(|(ranks, rounds)| {
        let schedule = flat(ScheduleName::Interleaved, ranks, rounds, 2);
        lowered(&schedule, &Lowering { tied: vec![vec![0, ranks + 1], vec![1, ranks]], ..Lowering::default() })
    });
    kill(tied, sums_in_another_order, &[FaultKind::Deadlock], by_check);
}

#[test]
fn sums_before_messages_for_which_others_wait() {
    let names = [ScheduleName::Gpipe, ScheduleName::OneForwardOneBackward, ScheduleName::EagerOneForwardOneBackward];
    let tied = (prop::sample::select(names.to_vec()), 2_u32..=5, 1_u32..=3).prop_map(|(name, ranks, rounds)| {
        let schedule = flat(name, ranks, rounds, 1);
        lowered(&schedule, &Lowering { tied: vec![(0..ranks).collect()], ..Lowering::default() })
    });
    kill(tied, sum_before_a_message, &[FaultKind::Deadlock], by_check);
}

#[test]
fn gathers_that_are_too_many_or_too_late() {
    kill(gathered(), one_gather_too_many, &[FaultKind::Sharding], by_check);
    kill(gathered(), late_gather, &[FaultKind::Sharding], by_check);
}

#[test]
fn releases_that_are_too_early() {
    kill(gathered(), early_release, &[FaultKind::Sharding], by_check);
}
