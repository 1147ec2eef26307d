//! Whether every rank stays under a memory cap.

use super::fault::{Fault, FaultKind, Place};
use crate::error::{PlanError, Result};
use crate::schedule::action::ActionKind;
use crate::schedule::costs::Costs;
use crate::schedule::flow::Flow;
use crate::schedule::program::Schedule;
use crate::schedule::simulate::Ledger;

/// Sums of sizes are rounded; a cap is not exceeded by less than this part of it.
const ROUNDING: f64 = 1e-9;

/// Checks that no rank holds more than its cap, of which there is one for each. The costs fit the schedule.
pub(super) fn check(schedule: &Schedule, caps: &[f64], costs: &Costs) -> Result<()> {
    let flow = Flow::of(schedule.header());
    let mut ledger = Ledger::default();
    ledger.set(schedule.header(), &flow, schedule.programs(), costs);
    for ((rank, program), &cap) in schedule.programs().iter().enumerate().zip(caps) {
        let mut over: Option<(usize, f64)> = None;
        ledger.walk(rank, program, |position, during, behind| {
            let held = during.max(behind);
            if over.is_none() && held > cap * (1.0 + ROUNDING) {
                over = Some((position, held));
            }
        });
        if let Some((position, held)) = over {
            return Err(fault(schedule, rank, position, held, cap));
        }
    }
    Ok(())
}

fn fault(schedule: &Schedule, rank: usize, position: usize, held: f64, cap: f64) -> PlanError {
    let cell = Place::at(schedule, rank, position);
    let message = format!(
        "{cell}: the rank holds {held} there, expected at most the cap of {cap}; run a backward before it, or raise the cap"
    );
    Fault::new(schedule, FaultKind::Memory, message, holders(schedule, rank, position)).into()
}

/// The actions whose results a rank holds at a position, the one at the position first.
fn holders(schedule: &Schedule, rank: usize, position: usize) -> Vec<Place> {
    let program = &schedule.programs()[rank];
    let mut held: Vec<usize> = Vec::new();
    for (at, action) in program[..=position].iter().enumerate() {
        let release = |held: &mut Vec<usize>, kind| {
            held.retain(|&earlier| {
                let other = &program[earlier];
                (other.kind, other.stage, other.microbatch) != (kind, action.stage, action.microbatch)
            });
        };
        match action.kind {
            ActionKind::Forward => held.push(at),
            ActionKind::Backward if at < position => release(&mut held, ActionKind::Forward),
            ActionKind::InputGrad => {
                release(&mut held, ActionKind::Forward);
                held.push(at);
            }
            ActionKind::WeightGrad if at < position => release(&mut held, ActionKind::InputGrad),
            _ => {}
        }
    }
    let others = held.into_iter().filter(|&at| at != position);
    std::iter::once(position).chain(others).map(|at| Place::at(schedule, rank, at)).collect()
}
