//! Laws of the schedules that adapt to costs: those on the V placement, those of two streams, and the synthesiser.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests too")]

mod dual;
mod v_shape;

use shardcore_plan::schedule::simulate::{Simulation, simulate};
use shardcore_plan::schedule::{CostSpec, Costs, Schedule};

/// A count of random cases: `some` in every run, `all` where `SHARDCORE_FULL=1` asks for the counts of the issue.
fn cases(some: u32, all: u32) -> u32 {
    #[expect(clippy::disallowed_methods, reason = "tests may ask how much to test")]
    let full = std::env::var("SHARDCORE_FULL").is_ok_and(|value| value == "1");
    if full { all } else { some }
}

fn simulated(schedule: &Schedule, spec: &CostSpec) -> Simulation {
    simulate(schedule, &Costs::new(spec, schedule.placement(), 1).unwrap()).unwrap()
}

/// The most that any rank holds.
fn peak(run: &Simulation) -> f64 {
    run.peak.iter().copied().fold(0.0, f64::max)
}
