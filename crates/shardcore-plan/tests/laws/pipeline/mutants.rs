//! Programs with one fault of a known kind: the checker must refuse each of them.

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{TestCaseError, TestRunner};
use shardcore_plan::PlanError;
use shardcore_plan::schedule::check::{self, Fault, FaultKind};
use shardcore_plan::schedule::generate::{ChunkCount, ScheduleName};
use shardcore_plan::schedule::{Action, ActionKind, CostSpec, Schedule};

use super::{built, cases, costs_of};

/// The programs of a schedule, to be changed.
type Programs = Vec<Vec<Action>>;
/// Breaks programs at random; `None` where a schedule has no place for the fault.
type Mutation = fn(&Schedule, &mut Programs, &mut Dice) -> Option<()>;

/// Random choices of one case.
struct Dice(std::vec::IntoIter<Index>);

impl Dice {
    fn below(&mut self, count: usize) -> usize {
        self.0.next().unwrap().index(count)
    }

    /// One of the places for which `wanted` holds.
    fn place(&mut self, programs: &Programs, wanted: impl Fn(usize, usize, Action) -> bool) -> Option<(usize, usize)> {
        let mut places = Vec::new();
        for (rank, program) in programs.iter().enumerate() {
            let fitting = (0..program.len()).filter(|&at| wanted(rank, at, program[at]));
            places.extend(fitting.map(|at| (rank, at)));
        }
        if places.is_empty() { None } else { Some(places[self.below(places.len())]) }
    }
}

fn any_schedule(names: Vec<ScheduleName>) -> impl Strategy<Value = Schedule> {
    (prop::sample::select(names), 2_u32..=5, 1_u32..=4, 1_u32..=3).prop_map(|(name, ranks, rounds, chunks)| {
        let chunks = (name.num_chunks() == ChunkCount::Any).then_some(chunks);
        built(name, ranks, ranks * rounds, chunks)
    })
}

/// Where an action stands on a rank.
fn find(program: &[Action], kinds: &[ActionKind], stage: u32, microbatch: u32) -> Option<usize> {
    program
        .iter()
        .position(|action| kinds.contains(&action.kind) && (action.stage, action.microbatch) == (stage, microbatch))
}

fn shift(program: &mut Vec<Action>, from: usize, to: usize) {
    let action = program.remove(from);
    program.insert(to, action);
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

/// What the checker says of a mutant, built by `build` if its shape is valid.
fn fault_of(error: PlanError) -> Result<Fault, TestCaseError> {
    match error {
        PlanError::InvalidSchedule(fault) => Ok(*fault),
        other => Err(TestCaseError::fail(format!("not a fault of the schedule: {other}"))),
    }
}

/// The failing cell is marked, and every action of the witness is where it is said to be.
fn shows(fault: &Fault, mutant: &Schedule) -> Result<(), TestCaseError> {
    prop_assert!(!fault.message.is_empty() && !fault.witness.is_empty(), "{fault}");
    prop_assert_eq!(fault.cell, fault.witness.first().copied());
    for place in &fault.witness {
        prop_assert_eq!(mutant.program(place.rank).unwrap()[place.position], place.action);
    }
    prop_assert!(fault.grid.contains(&format!(">{}<", fault.witness[0].action)), "{fault}");
    prop_assert!(fault.to_string().contains(&fault.grid));
    Ok(())
}

/// Kills mutants of one kind until so many are dead.
fn kill(
    names: &[ScheduleName],
    mutation: Mutation,
    expected: &[FaultKind],
    judge: fn(&Schedule, &Schedule) -> Result<(), PlanError>,
) {
    let mut runner = TestRunner::new_with_rng(
        ProptestConfig {
            cases: cases(200, 1_000),
            failure_persistence: None,
            max_global_rejects: 100_000,
            ..ProptestConfig::default()
        },
        proptest::test_runner::TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha),
    );
    let dice = prop::collection::vec(any::<Index>(), 8);
    let outcome = runner.run(&(any_schedule(names.to_vec()), dice), |(schedule, dice)| {
        let mut programs = schedule.programs().to_vec();
        if mutation(&schedule, &mut programs, &mut Dice(dice.into_iter())).is_none() {
            return Err(TestCaseError::reject("no place for this fault"));
        }
        let mutant = Schedule::new(schedule.header().clone(), programs).unwrap();
        let Err(error) = judge(&schedule, &mutant) else {
            return Err(TestCaseError::fail(format!("a mutant lives: {:?}", mutant.programs())));
        };
        let fault = fault_of(error)?;
        prop_assert!(expected.contains(&fault.kind), "{fault}");
        shows(&fault, &mutant)
    });
    outcome.unwrap();
}

fn by_check(_: &Schedule, mutant: &Schedule) -> Result<(), PlanError> {
    check::check(mutant)
}

/// Under the cap that the schedule before the mutation needs.
fn by_memory(schedule: &Schedule, mutant: &Schedule) -> Result<(), PlanError> {
    let costs = costs_of(schedule, &CostSpec::default());
    let peaks = shardcore_plan::schedule::simulate::peaks(schedule, &costs).unwrap();
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
    kill(&ScheduleName::ALL, drop_op, &kinds, by_check);
}

#[test]
fn relabelled_microbatches() {
    let kinds = [FaultKind::Missing, FaultKind::Duplicate, FaultKind::Order];
    kill(&ScheduleName::ALL, relabel, &kinds, by_check);
}

#[test]
fn backwards_before_their_forwards() {
    kill(&ScheduleName::ALL, backward_before_forward, &[FaultKind::Order], by_check);
}

#[test]
fn weight_gradients_before_input_gradients() {
    kill(&SPLIT, weight_before_input, &[FaultKind::Order], by_check);
}

#[test]
fn ops_on_the_wrong_rank() {
    kill(&ScheduleName::ALL, wrong_rank, &[FaultKind::Misplaced], by_check);
}

#[test]
fn duplicate_ops() {
    kill(&ScheduleName::ALL, duplicate, &[FaultKind::Duplicate, FaultKind::Order], by_check);
}

#[test]
fn cross_rank_cycles() {
    kill(&LINEAR, cross_rank_cycle, &[FaultKind::Deadlock], by_check);
}

#[test]
fn memory_past_the_cap() {
    kill(&ScheduleName::ALL, memory_blow_up, &[FaultKind::Memory], by_memory);
}
