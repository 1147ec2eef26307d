//! Lowered programs with one fault in their communication: the checker must refuse each of them.

use proptest::prelude::*;
use shardcore_plan::PlanError;
use shardcore_plan::schedule::check::{self, Delivery, FaultKind};
use shardcore_plan::schedule::generate::evaluation::evaluation;
use shardcore_plan::schedule::{Action, ActionKind, Lowering, Schedule};

use crate::mutation::{Dice, Programs, find, kill, shift};
use crate::timed::{any_flat, lowered};

fn any_lowered() -> impl Strategy<Value = Schedule> {
    (any_flat(), prop::option::of(1_u32..=3))
        .prop_map(|(schedule, receives_ahead)| lowered(&schedule, &Lowering { receives_ahead, ..Lowering::default() }))
}

fn is_message(action: Action) -> bool {
    action.kind.is_send() || action.kind.is_recv()
}

/// The rank at the other end of a send or a receive.
fn peer(schedule: &Schedule, action: Action) -> Option<u32> {
    schedule.placement().partner(action).map(|partner| schedule.placement().rank_of(partner.stage))
}

fn drop_message(_: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let (rank, at) = dice.place(programs, |_, _, action| is_message(action))?;
    programs[rank].remove(at);
    Some(())
}

fn duplicate_send(_: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let (rank, at) = dice.place(programs, |_, _, action| action.kind.is_send())?;
    let action = programs[rank][at];
    let to = at + dice.below(programs[rank].len() + 1 - at);
    programs[rank].insert(to, action);
    Some(())
}

fn send_before_compute(_: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let (rank, at) = dice.place(programs, |_, _, action| action.kind.is_send())?;
    let Action { kind, stage, microbatch, .. } = programs[rank][at];
    let makers: &[ActionKind] = if kind == ActionKind::SendForward {
        &[ActionKind::Forward]
    } else {
        &[ActionKind::Backward, ActionKind::InputGrad]
    };
    let made = find(&programs[rank], makers, stage, microbatch)?;
    let to = dice.below(made + 1);
    shift(&mut programs[rank], at, to);
    Some(())
}

/// Two receives from one rank change places.
fn swap_receives(schedule: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let (rank, at) = dice.place(programs, |_, _, action| action.kind.is_recv())?;
    let from = peer(schedule, programs[rank][at])?;
    let others: Vec<usize> = (0..programs[rank].len())
        .filter(|&other| {
            let action = programs[rank][other];
            other != at && action.kind.is_recv() && peer(schedule, action) == Some(from)
        })
        .collect();
    if others.is_empty() {
        return None;
    }
    let other = others[dice.below(others.len())];
    programs[rank].swap(at, other);
    Some(())
}

/// A receive is posted behind the next message that its rank exchanges with the same rank.
fn late_receive(schedule: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let next_of = |program: &[Action], at: usize| {
        let with = peer(schedule, program[at]);
        let later = program[at + 1..].iter().position(|&action| is_message(action) && peer(schedule, action) == with);
        later.map(|later| at + 1 + later)
    };
    let (rank, at) = {
        let late = |rank: usize, at: usize, action: Action| {
            action.kind.is_recv() && next_of(&schedule.programs()[rank], at).is_some()
        };
        dice.place(programs, late)?
    };
    let to = next_of(&programs[rank], at)?;
    shift(&mut programs[rank], at, to);
    Some(())
}

fn wrong_slot(_: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let (rank, at) = dice.place(programs, |_, _, action| action.kind.is_recv())?;
    let by = 1 + u16::try_from(dice.below(3)).unwrap();
    programs[rank][at].slot = programs[rank][at].slot.wrapping_add(by);
    Some(())
}

/// An evaluation posts a receive of a gradient, which nobody sends.
fn dangling_receive(schedule: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let gradient = |action: Action| Action::new(ActionKind::RecvBackward, action.stage, action.microbatch);
    let crosses = |rank: usize, action: Action| {
        let from = peer(schedule, gradient(action));
        action.kind == ActionKind::Forward && from.is_some_and(|from| from as usize != rank)
    };
    let (rank, at) = dice.place(programs, |rank, _, action| crosses(rank, action))?;
    let to = dice.below(programs[rank].len() + 1);
    let receive = gradient(programs[rank][at]);
    programs[rank].insert(to, receive);
    Some(())
}

/// A receive is posted while as many as may be are not used yet.
fn receive_too_far_ahead(schedule: &Schedule, programs: &mut Programs, dice: &mut Dice) -> Option<()> {
    let most = schedule.lowering()?.receives_ahead?;
    let mut places = Vec::new();
    for (rank, program) in programs.iter().enumerate() {
        for (at, receive) in program.iter().enumerate().filter(|(_, action)| action.kind.is_recv()) {
            let mut ahead = 0;
            for (to, action) in program[..at].iter().enumerate().filter(|(_, action)| action.stage == receive.stage) {
                ahead += u32::from(action.kind == receive.kind);
                ahead -= u32::from(reads(action.kind, receive.kind) && ahead > 0);
                if ahead == most {
                    places.push((rank, at, to + 1));
                }
            }
        }
    }
    places.retain(|&(_, at, to)| to < at);
    let (rank, at, to) = *places.get(dice.below(places.len().max(1)))?;
    shift(&mut programs[rank], at, to);
    Some(())
}

fn reads(kind: ActionKind, receive: ActionKind) -> bool {
    match kind {
        ActionKind::Forward => receive == ActionKind::RecvForward,
        ActionKind::Backward | ActionKind::InputGrad => receive == ActionKind::RecvBackward,
        _ => false,
    }
}

/// Under the communication that the header declares.
fn by_check(_: &Schedule, mutant: &Schedule) -> Result<(), PlanError> {
    check::check(mutant)
}

fn by_pair_fifo(_: &Schedule, mutant: &Schedule) -> Result<(), PlanError> {
    check::communication(mutant, Delivery::PairFifo)
}

fn by_buffered(_: &Schedule, mutant: &Schedule) -> Result<(), PlanError> {
    check::communication(mutant, Delivery::Buffered)
}

fn by_directed(_: &Schedule, mutant: &Schedule) -> Result<(), PlanError> {
    check::communication(mutant, Delivery::Directed)
}

#[test]
fn dropped_sends_and_receives() {
    kill(any_lowered(), drop_message, &[FaultKind::Missing], by_check);
}

#[test]
fn duplicate_sends() {
    kill(any_lowered(), duplicate_send, &[FaultKind::Duplicate], by_check);
}

#[test]
fn sends_before_their_computation() {
    kill(any_lowered(), send_before_compute, &[FaultKind::Order], by_check);
}

#[test]
fn swapped_receives() {
    let kinds = [FaultKind::Order, FaultKind::Mismatch, FaultKind::Slot, FaultKind::Deadlock];
    kill(any_lowered(), swap_receives, &kinds, by_check);
    kill(any_lowered(), swap_receives, &kinds, by_directed);
}

#[test]
fn receives_posted_late() {
    let kinds = [FaultKind::Order, FaultKind::Mismatch, FaultKind::Deadlock, FaultKind::Slot];
    kill(any_lowered(), late_receive, &kinds, by_check);
    kill(any_lowered(), late_receive, &kinds, by_pair_fifo);
}

#[test]
fn receives_into_another_slot() {
    kill(any_lowered(), wrong_slot, &[FaultKind::Slot], by_check);
}

#[test]
fn sends_and_receives_without_their_other_end() {
    kill(any_lowered(), drop_message, &[FaultKind::Missing], by_buffered);
    let evaluated = (any_lowered(), 1_u32..=6).prop_map(|(schedule, microbatches)| {
        let evaluation = evaluation(schedule.placement().clone(), microbatches).unwrap();
        evaluation.lower(&Lowering::default()).unwrap()
    });
    kill(evaluated, dangling_receive, &[FaultKind::Missing], by_buffered);
}

#[test]
fn receives_too_far_ahead() {
    kill(any_lowered(), receive_too_far_ahead, &[FaultKind::Slot], by_check);
}
