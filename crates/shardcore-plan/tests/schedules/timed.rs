//! Schedules with their costs and their simulation.

use std::sync::LazyLock;

use proptest::prelude::*;
use shardcore_plan::PlanError;
use shardcore_plan::schedule::generate::{self, ChunkCount, ScheduleName};
use shardcore_plan::schedule::simulate::{Simulation, simulate};
use shardcore_plan::schedule::{Action, CostSpec, Costs, Gating, Header, Lowering, Schedule};

/// A count of random cases: `some` in every run, `all` where `SHARDCORE_FULL=1` asks for the counts of the issue.
pub(crate) fn count(some: u32, all: u32) -> u32 {
    #[expect(clippy::disallowed_methods, reason = "tests may ask how much to test")]
    let full = std::env::var("SHARDCORE_FULL").is_ok_and(|value| value == "1");
    if full { all } else { some }
}

pub(crate) fn built(name: ScheduleName, ranks: u32, microbatches: u32, chunks: Option<u32>) -> Schedule {
    generate::build(name, ranks, microbatches, chunks, None).unwrap()
}

/// Schedules of few counts and every name, closed form or not; those that are searched for are found once.
pub(crate) fn any_flat() -> impl Strategy<Value = Schedule> {
    static SEARCHED: LazyLock<Vec<Schedule>> = LazyLock::new(|| {
        let names = ScheduleName::ALL.iter().filter(|name| !ScheduleName::CLOSED.contains(name));
        names.flat_map(|&name| [(2, 1), (2, 3), (4, 2)].map(|(ranks, rounds)| flat(name, ranks, rounds, 2))).collect()
    });
    prop_oneof![
        (prop::sample::select(ScheduleName::CLOSED), 2_u32..=5, 1_u32..=4, 1_u32..=3)
            .prop_map(|(name, ranks, rounds, chunks)| flat(name, ranks, rounds, chunks)),
        prop::sample::select(SEARCHED.as_slice()),
    ]
}

/// A schedule whose counts fit it, with every composite taken apart: so actions can be moved one by one.
pub(crate) fn flat(name: ScheduleName, ranks: u32, rounds: u32, chunks: u32) -> Schedule {
    let chunks = (name.num_chunks() == ChunkCount::Any).then_some(chunks);
    let ranks = if name == ScheduleName::DualPipe { ranks.next_multiple_of(2) } else { ranks };
    taken_apart(&built(name, ranks, ranks * rounds, chunks))
}

/// The same programs without composites.
pub(crate) fn taken_apart(schedule: &Schedule) -> Schedule {
    let apart = |action: &Action| Action { with_next: false, ..*action };
    let programs = schedule.programs().iter().map(|program| program.iter().map(apart).collect()).collect();
    Schedule::new(schedule.header().clone(), programs).unwrap()
}

pub(crate) fn costs_of(schedule: &Schedule, spec: &CostSpec) -> Costs {
    Costs::new(spec, schedule.placement(), schedule.header().num_slices).unwrap()
}

pub(crate) fn simulated(schedule: &Schedule, spec: &CostSpec) -> Simulation {
    simulate(schedule, &costs_of(schedule, spec)).unwrap()
}

/// The schedule lowered as asked for, or with as many receives ahead as it needs at least. Where no number is asked for,
/// lowering itself finds that one.
pub(crate) fn lowered(schedule: &Schedule, lowering: &Lowering) -> Schedule {
    let with = |receives_ahead| schedule.lower(&Lowering { receives_ahead, ..lowering.clone() });
    let least = |result: Result<Schedule, PlanError>| match result {
        Err(PlanError::TooFewReceives { given, needed }) => {
            assert!(needed > given, "{needed} <= {given}");
            let fewer = with(Some(needed - 1));
            assert!(matches!(fewer, Err(PlanError::TooFewReceives { .. })), "{needed} is not the least");
            needed
        }
        result => result.unwrap().lowering().unwrap().receives_ahead.unwrap(),
    };
    let Some(given) = lowering.receives_ahead else {
        let lowered = with(None).unwrap();
        assert_eq!(lowered.lowering().unwrap().receives_ahead, Some(least(with(Some(2)))));
        return lowered;
    };
    with(Some(least(with(Some(given))))).unwrap()
}

/// The same programs with another gating of their composites.
pub(crate) fn gated(schedule: &Schedule, gating: Gating) -> Schedule {
    let header = Header { gating, ..schedule.header().clone() };
    Schedule::new(header, schedule.programs().to_vec()).unwrap()
}
