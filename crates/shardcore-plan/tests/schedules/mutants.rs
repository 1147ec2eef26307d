//! Programs with one fault of a known kind: the checker must refuse each of them.

use proptest::prelude::*;
use shardcore_plan::PlanError;
use shardcore_plan::schedule::check::{self, FaultKind};
use shardcore_plan::schedule::simulate::peaks;
use shardcore_plan::schedule::{Action, ActionKind, CostSpec, Schedule, ScheduleName};

use crate::mutation::{Dice, Programs, find, kill, shift};
use crate::timed::{any_flat, costs_of, flat};

fn any_of(names: &[ScheduleName]) -> impl Strategy<Value = Schedule> {
    (prop::sample::select(names.to_vec()), 2_u32..=5, 1_u32..=4, 1_u32..=3)
        .prop_map(|(name, ranks, rounds, chunks)| flat(name, ranks, rounds, chunks))
}

const GRADS: [ActionKind; 2] = [ActionKind::Backward, ActionKind::InputGrad];

fn drop_op(_: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let (rank, at) = dice.place(programs, |_, _, _| true)?;
    programs[rank].remove(at);
    Some(())
}

fn relabel(schedule: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let (rank, at) = dice.place(programs, |_, _, _| true)?;
    let units = schedule.header().num_units();
    let by = 1 + u32::try_from(dice.below(units as usize - 1)).unwrap();
    programs[rank][at].microbatch = (programs[rank][at].microbatch + by) % units;
    Some(())
}

fn backward_before_forward(_: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let (rank, at) = dice.place(programs, |_, _, action| GRADS.contains(&action.kind))?;
    let Action { stage, microbatch, .. } = programs[rank][at];
    let forward = find(&programs[rank], &[ActionKind::Forward], stage, microbatch)?;
    let to = dice.below(forward + 1);
    shift(&mut programs[rank], at, to);
    Some(())
}

fn weight_before_input(_: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let (rank, at) = dice.place(programs, |_, _, action| action.kind == ActionKind::WeightGrad)?;
    let Action { stage, microbatch, .. } = programs[rank][at];
    let input = find(&programs[rank], &[ActionKind::InputGrad], stage, microbatch)?;
    let to = dice.below(input + 1);
    shift(&mut programs[rank], at, to);
    Some(())
}

fn wrong_rank(_: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let (rank, at) = dice.place(programs, |_, _, _| true)?;
    let other = (rank + 1 + dice.below(programs.len() - 1)) % programs.len();
    let action = programs[rank].remove(at);
    let to = dice.below(programs[other].len() + 1);
    programs[other].insert(to, action);
    Some(())
}

fn duplicate(_: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let (rank, at) = dice.place(programs, |_, _, _| true)?;
    let action = programs[rank][at];
    let to = dice.below(programs[rank].len() + 1);
    programs[rank].insert(to, action);
    Some(())
}

/// A rank runs a forward only after the backward of another micro-batch, for which the next rank waits until it has
/// that forward.
fn cross_rank_cycle(_: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let last = programs.len() - 1;
    let (rank, backward) = dice.place(programs, |rank, _, action| rank < last && GRADS.contains(&action.kind))?;
    let Action { stage, microbatch: early, .. } = programs[rank][backward];
    let later: Vec<u32> = programs[rank][backward + 1..]
        .iter()
        .filter(|action| GRADS.contains(&action.kind))
        .map(|action| action.microbatch)
        .collect();
    if later.is_empty() {
        return None;
    }
    let late = later[dice.below(later.len())];
    let forward = find(&programs[rank], &[ActionKind::Forward], stage, late)?;
    let to = if forward < backward { backward } else { backward + 1 };
    shift(&mut programs[rank], forward, to);
    let next = &mut programs[rank + 1];
    let forward = find(next, &[ActionKind::Forward], stage + 1, late)?;
    let backward = find(next, &GRADS, stage + 1, early)?;
    if forward > backward {
        shift(next, forward, backward);
    }
    Some(())
}

/// The rank that holds most takes its next forward at once.
fn memory_blow_up(_: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let mut held = 0_i32;
    let mut places = Vec::new();
    let mut most = 0;
    for (rank, program) in programs.iter().enumerate() {
        held -= held;
        for (at, action) in program.iter().enumerate() {
            held += i32::from(action.kind == ActionKind::Forward);
            if held >= most && action.kind == ActionKind::Forward {
                if held > most {
                    places.clear();
                }
                most = held;
                let later = program[at + 1..].iter().position(|action| action.kind == ActionKind::Forward);
                places.extend(later.map(|later| (rank, at + 1, at + 1 + later)));
            }
            held -= i32::from(matches!(action.kind, ActionKind::Backward | ActionKind::WeightGrad));
        }
    }
    if places.is_empty() {
        return None;
    }
    let (rank, to, from) = places[dice.below(places.len())];
    shift(&mut programs[rank], from, to);
    Some(())
}

fn by_check(_: &Schedule, mutant: &Schedule) -> Result<(), PlanError> {
    check::check(mutant)
}

/// Under the cap that the schedule before the mutation needs.
fn by_memory(schedule: &Schedule, mutant: &Schedule) -> Result<(), PlanError> {
    let costs = costs_of(schedule, &CostSpec::default());
    let peaks = peaks(schedule, &costs).unwrap();
    check::memory(mutant, peaks.into_iter().fold(0.0, f64::max), &costs)
}

const SPLIT: [ScheduleName; 3] = [ScheduleName::ZbH1, ScheduleName::ZbH2, ScheduleName::InterleavedZb];
const LINEAR: [ScheduleName; 5] = [
    ScheduleName::Gpipe,
    ScheduleName::OneForwardOneBackward,
    ScheduleName::EagerOneForwardOneBackward,
    ScheduleName::ZbH1,
    ScheduleName::ZbH2,
];

#[test]
fn dropped_ops() {
    let kinds = [FaultKind::Missing];
    kill(any_flat(), drop_op, &kinds, by_check);
}

#[test]
fn relabelled_microbatches() {
    let kinds = [FaultKind::Missing, FaultKind::Duplicate, FaultKind::Order, FaultKind::Misplaced];
    kill(any_flat(), relabel, &kinds, by_check);
}

#[test]
fn backwards_before_their_forwards() {
    kill(any_flat(), backward_before_forward, &[FaultKind::Order], by_check);
}

#[test]
fn weight_gradients_before_input_gradients() {
    kill(any_of(&SPLIT), weight_before_input, &[FaultKind::Order], by_check);
}

#[test]
fn ops_on_the_wrong_rank() {
    kill(any_flat(), wrong_rank, &[FaultKind::Misplaced], by_check);
}

#[test]
fn duplicate_ops() {
    kill(any_flat(), duplicate, &[FaultKind::Duplicate, FaultKind::Order], by_check);
}

#[test]
fn cross_rank_cycles() {
    kill(any_of(&LINEAR), cross_rank_cycle, &[FaultKind::Deadlock], by_check);
}

#[test]
fn memory_past_the_cap() {
    kill(any_flat(), memory_blow_up, &[FaultKind::Memory], by_memory);
}
