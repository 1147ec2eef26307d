//! What a schedule takes: an event-driven simulation of the programs that the engine executes.
//!
//! Each rank runs its program in order. An action starts when its rank is free and its inputs are there; an input from
//! another rank is there one hop after it was made. On a program without communication a message leaves by itself as
//! soon as it is made; on a lowered one it leaves when its send is posted and, unless the header declares
//! [`CommModel::Buffered`](super::CommModel::Buffered), its receive as well. A lowered program takes no time if it cannot
//! run under the communication that it declares. Both kinds of bubble are reported, because
//! the papers on zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", section 4) count the span of a
//! rank, while a step with a barrier costs the makespan.

mod memory;
mod prepare;
mod run;

pub use prepare::Network;
pub use run::{Simulator, Summary};

use super::action::Action;
use super::costs::Costs;
use super::flow::Flow;
use super::program::Schedule;
use crate::error::Result;
pub(crate) use memory::Ledger;

/// Start and end of an action, in the unit of the costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// When it starts.
    pub start: f64,
    /// When it ends.
    pub end: f64,
}

/// A point of a rank's memory curve: from `time` on `held` is held.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryPoint {
    /// When the memory changes.
    pub time: f64,
    /// What is held from then on, in the unit of the costs.
    pub held: f64,
}

/// What a schedule takes under given costs.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulation {
    /// The last end over all ranks, from 0: what a step with a barrier costs.
    pub makespan: f64,
    /// The longest time over the ranks from a rank's first start to its last end.
    pub span: f64,
    /// The time that each rank computes.
    pub busy: Vec<f64>,
    /// The idle part of the ranks' time if each takes the span: 0 to 1.
    pub bubble_span: f64,
    /// The idle part of the ranks' time if each takes the makespan: 0 to 1.
    pub bubble_makespan: f64,
    /// The most that each rank holds.
    pub peak: Vec<f64>,
    /// Start and end of each action of each rank, in the order of the programs. Communication takes no time of its own
    /// here unless it is not overlapped; its interval is the moment at which it is posted.
    pub intervals: Vec<Vec<Interval>>,
    /// What each rank holds over time.
    pub memory: Vec<Vec<MemoryPoint>>,
}

/// Simulates a schedule on links that have the latency of `costs` and no other limit.
///
/// # Errors
/// [`PlanError`](crate::PlanError) if the costs do not fit the schedule, or if the schedule cannot go on; the error
/// names the actions that wait for each other.
pub fn simulate(schedule: &Schedule, costs: &Costs) -> Result<Simulation> {
    simulate_on(schedule, costs, &Network::default())
}

/// Simulates a schedule on given links.
///
/// # Errors
/// As [`simulate`], and if the network does not fit the schedule.
pub fn simulate_on(schedule: &Schedule, costs: &Costs, network: &Network) -> Result<Simulation> {
    Simulator::new().simulate(schedule, costs, network)
}

/// The most that each rank holds: the order of its program decides, so no simulation is needed.
///
/// # Errors
/// [`PlanError`](crate::PlanError) if the costs do not fit the schedule.
pub fn peaks(schedule: &Schedule, costs: &Costs) -> Result<Vec<f64>> {
    fit(schedule, costs)?;
    let flow = Flow::of(schedule.header());
    let mut ledger = Ledger::default();
    ledger.set(schedule.header(), &flow, schedule.programs(), costs);
    let peak = |(rank, program): (usize, &Vec<Action>)| {
        let mut peak = 0.0_f64;
        ledger.walk(rank, program, |_, during, behind| peak = peak.max(during).max(behind));
        peak
    };
    Ok(schedule.programs().iter().enumerate().map(peak).collect())
}

/// Checks that the costs have one valid entry for each stage.
pub(crate) fn fit(schedule: &Schedule, costs: &Costs) -> Result<()> {
    prepare::check(&Flow::of(schedule.header()), costs, &Network::default())
}

/// What is idle of `num_ranks` ranks that take `total` each.
fn idle_part(busy: &[f64], total: f64) -> f64 {
    if total <= 0.0 {
        return 0.0;
    }
    // Parts of the total stay far from overflow.
    #[expect(clippy::cast_precision_loss, reason = "the number of ranks is far below 2^52")]
    let num_ranks = busy.len() as f64;
    let mean = busy.iter().map(|busy| busy / total).sum::<f64>() / num_ranks;
    (1.0 - mean).clamp(0.0, 1.0)
}

/// The end of the composite that starts at `index`, exclusive.
pub(crate) fn composite_end(program: &[Action], index: usize) -> usize {
    let links = program[index..].iter().take_while(|action| action.with_next).count();
    (index + links + 1).min(program.len())
}

#[cfg(test)]
#[allow(clippy::float_cmp, reason = "sums of whole numbers are exact")]
mod tests {
    use super::*;
    use crate::schedule::{CostSpec, Header, Placement};

    /// 1F1B written from its definition: warm-up, pairs, the rest.
    fn one_f_one_b(ranks: u32, microbatches: u32) -> Schedule {
        let program = |rank: u32| {
            let warm_up = microbatches.min(ranks - 1 - rank);
            let mut program: Vec<Action> = (0..warm_up).map(|unit| Action::forward(rank, unit)).collect();
            for unit in warm_up..microbatches {
                program.extend([Action::forward(rank, unit), Action::backward(rank, unit - warm_up)]);
            }
            program.extend((microbatches - warm_up..microbatches).map(|unit| Action::backward(rank, unit)));
            program
        };
        let header = Header::new("1f1b", Placement::looped(ranks, 1).unwrap(), microbatches);
        Schedule::new(header, (0..ranks).map(program).collect()).unwrap()
    }

    #[test]
    fn one_f_one_b_matches_its_closed_form() {
        for (ranks, microbatches) in [(1, 1), (2, 4), (4, 8), (4, 3), (8, 20)] {
            let schedule = one_f_one_b(ranks, microbatches);
            let costs = Costs::new(&CostSpec::uniform(2.0, 3.0, 1.0), schedule.placement(), 1).unwrap();
            let run = simulate(&schedule, &costs).unwrap();
            assert_eq!(run.makespan, f64::from(6 * (microbatches + ranks - 1)));
            let expected: Vec<f64> = (0..ranks).map(|rank| f64::from(microbatches.min(ranks - rank))).collect();
            assert_eq!(run.peak, expected);
            assert_eq!(peaks(&schedule, &costs).unwrap(), expected);
        }
    }
}
