//! Schedules with their costs and their simulation.

use shardcore_plan::schedule::generate::{self, ScheduleName};
use shardcore_plan::schedule::simulate::{Simulation, simulate};
use shardcore_plan::schedule::{CostSpec, Costs, Schedule};

/// A count of random cases: `some` in every run, `all` where `SHARDCORE_FULL=1` asks for the counts of the issue.
pub(crate) fn count(some: u32, all: u32) -> u32 {
    #[expect(clippy::disallowed_methods, reason = "tests may ask how much to test")]
    let full = std::env::var("SHARDCORE_FULL").is_ok_and(|value| value == "1");
    if full { all } else { some }
}

pub(crate) fn built(name: ScheduleName, ranks: u32, microbatches: u32, chunks: Option<u32>) -> Schedule {
    generate::build(name, ranks, microbatches, chunks, None).unwrap()
}

pub(crate) fn costs_of(schedule: &Schedule, spec: &CostSpec) -> Costs {
    Costs::new(spec, schedule.placement(), schedule.header().num_slices).unwrap()
}

pub(crate) fn simulated(schedule: &Schedule, spec: &CostSpec) -> Simulation {
    simulate(schedule, &costs_of(schedule, spec)).unwrap()
}
