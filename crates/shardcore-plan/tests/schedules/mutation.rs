//! Schedules with one fault of a known kind, and the checker that must find it.

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{RngAlgorithm, TestCaseError, TestRng, TestRunner};
use shardcore_plan::PlanError;
use shardcore_plan::schedule::check::{Fault, FaultKind};
use shardcore_plan::schedule::{Action, ActionKind, Schedule};

use crate::timed::count;

/// The programs of a schedule, to be changed.
pub(crate) type Programs = Vec<Vec<Action>>;
/// Breaks programs at random; `None` where a schedule has no place for the fault.
pub(crate) type Mutation = fn(&Schedule, &mut Programs, &mut Dice) -> Option<()>;

/// Random choices of one case.
pub(crate) struct Dice(std::vec::IntoIter<Index>);

impl Dice {
    pub(crate) fn below(&mut self, count: usize) -> usize {
        self.0.next().unwrap().index(count)
    }

    /// One of the places for which `wanted` holds.
    pub(crate) fn place(
        &mut self,
        programs: &Programs,
        wanted: impl Fn(usize, usize, Action) -> bool,
    ) -> Option<(usize, usize)> {
        let mut places = Vec::new();
        for (rank, program) in programs.iter().enumerate() {
            let fitting = (0..program.len()).filter(|&at| wanted(rank, at, program[at]));
            places.extend(fitting.map(|at| (rank, at)));
        }
        if places.is_empty() { None } else { Some(places[self.below(places.len())]) }
    }
}

/// Where an action stands on a rank.
pub(crate) fn find(program: &[Action], kinds: &[ActionKind], stage: u32, microbatch: u32) -> Option<usize> {
    program
        .iter()
        .position(|action| kinds.contains(&action.kind) && (action.stage, action.microbatch) == (stage, microbatch))
}

pub(crate) fn shift(program: &mut Vec<Action>, from: usize, to: usize) {
    let action = program.remove(from);
    program.insert(to, action);
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
pub(crate) fn kill(
    schedules: impl Strategy<Value = Schedule>,
    mutation: Mutation,
    expected: &[FaultKind],
    judge: fn(&Schedule, &Schedule) -> Result<(), PlanError>,
) {
    let config = ProptestConfig {
        cases: count(200, 1_000),
        failure_persistence: None,
        max_global_rejects: 100_000,
        ..ProptestConfig::default()
    };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let dice = prop::collection::vec(any::<Index>(), 8);
    let outcome = runner.run(&(schedules, dice), |(schedule, dice)| {
        let mut programs = schedule.programs().to_vec();
        if mutation(&schedule, &mut programs, &mut Dice(dice.into_iter())).is_none() {
            return Err(TestCaseError::reject("no place for this fault"));
        }
        let mutant = match schedule.lowering() {
            Some(lowering) => Schedule::new_lowered(schedule.header().clone(), programs, lowering.clone()).unwrap(),
            None => Schedule::new(schedule.header().clone(), programs).unwrap(),
        };
        let Err(error) = judge(&schedule, &mutant) else {
            return Err(TestCaseError::fail(format!("a mutant lives: {:?}", mutant.programs())));
        };
        let fault = fault_of(error)?;
        prop_assert!(expected.contains(&fault.kind), "{fault}");
        shows(&fault, &mutant)
    });
    outcome.unwrap();
}
