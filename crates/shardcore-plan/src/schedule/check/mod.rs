//! Whether a schedule can be executed: structure, dependencies, memory and communication.
//!
//! | check | what it finds |
//! |---|---|
//! | [`structure`] | actions that are missing, twice, on the wrong rank, before what they need on their rank; slots |
//! | | gathers, reductions, sums over shared weights and optimizer steps other than those of the lowering |
//! | [`dependencies`] | ranks that wait for each other, whatever the communication, also in sums over shared weights |
//! | [`communication`] | ranks that wait for each other under one way to deliver messages; messages out of order |
//! | [`memory`] | ranks that hold more than a cap |
//!
//! A fault comes as a [`PlanError::InvalidSchedule`] with the part of the grid in which it lies, the failing cell
//! marked, and the fewest actions that show it.

mod deadlock;
mod delivery;
mod fault;
mod grid;
mod meeting;
mod memory_cap;
mod sharding;
mod structure;

pub use delivery::Delivery;
pub use fault::{Fault, FaultKind, Place};

use super::costs::Costs;
use super::program::{CommModel, Header, Schedule};
use super::simulate;
use crate::error::{PlanError, Result};
use delivery::{Run, Stuck};

/// Checks structure and dependencies, and the communication that the header declares of a lowered schedule.
///
/// # Errors
/// [`PlanError::InvalidSchedule`] with the first fault.
pub fn check(schedule: &Schedule) -> Result<()> {
    structure(schedule)?;
    let Header { comm, .. } = schedule.header();
    let delivery = if schedule.is_lowered() { Delivery::from(*comm) } else { Delivery::Buffered };
    run(schedule, delivery)
}

/// Checks that each action is there once, on its rank and behind what it needs on that rank; that composites can
/// start; that receive slots are read before they are filled again; and that a lowered schedule posts receives,
/// gathers, reduces, sums over shared weights and steps as its lowering says.
///
/// # Errors
/// [`PlanError::InvalidSchedule`] with the first fault.
pub fn structure(schedule: &Schedule) -> Result<()> {
    structure::check(schedule)?;
    sharding::check(schedule)
}

/// Checks that the ranks do not wait for each other even if no message ever waits.
///
/// # Errors
/// [`PlanError::InvalidSchedule`] with a fault of the structure, or the shortest circle of actions that wait.
pub fn dependencies(schedule: &Schedule) -> Result<()> {
    structure(schedule)?;
    run(schedule, Delivery::Buffered)
}

/// Checks that a lowered schedule runs to its end if messages are delivered in a given way.
///
/// # Errors
/// [`PlanError::NotLowered`] for a schedule without communication; [`PlanError::InvalidSchedule`] with a fault of the
/// structure, two messages out of order, or the shortest circle of actions that wait.
pub fn communication(schedule: &Schedule, delivery: Delivery) -> Result<()> {
    if !schedule.is_lowered() {
        return Err(PlanError::NotLowered { name: schedule.header().name.clone() });
    }
    structure(schedule)?;
    run(schedule, delivery)
}

/// The strictest communication under which a lowered schedule runs to its end; `None` if there is none.
#[must_use]
pub fn strictest_communication(schedule: &Schedule) -> Option<CommModel> {
    CommModel::ALL.iter().copied().rev().find(|&model| communication(schedule, model.into()).is_ok())
}

/// Checks that no rank holds more than `cap`, in the unit of `costs`.
///
/// # Errors
/// [`PlanError::InvalidSchedule`] with the first action that exceeds the cap and all that is held there;
/// [`PlanError::BadCost`] if the costs do not fit the schedule or the cap is no number of at least 0.
pub fn memory(schedule: &Schedule, cap: f64, costs: &Costs) -> Result<()> {
    memory_of_ranks(schedule, &vec![cap; schedule.programs().len()], costs)
}

/// Checks that no rank holds more than its own cap, in the unit of `costs`: `caps` has one for each rank.
///
/// # Errors
/// As [`memory`], and [`PlanError::BadCost`] for another number of caps.
pub fn memory_of_ranks(schedule: &Schedule, caps: &[f64], costs: &Costs) -> Result<()> {
    let num_ranks = schedule.programs().len();
    if caps.len() != num_ranks {
        let what = format!("memory_cap (a list of {})", caps.len());
        return Err(PlanError::BadCost { what, expected: format!("one entry for each of the {num_ranks} ranks") });
    }
    if let Some(cap) = caps.iter().find(|cap| cap.is_nan() || **cap < 0.0) {
        let expected = "a number of at least 0, in the unit of the activations".to_owned();
        return Err(PlanError::BadCost { what: format!("memory_cap = {cap}"), expected });
    }
    simulate::fit(schedule, costs)?;
    memory_cap::check(schedule, caps, costs)
}

/// Runs a schedule whose actions are all in place.
///
/// # Errors
/// [`PlanError::InvalidSchedule`] with two messages out of order, or the shortest circle of actions that wait.
pub(crate) fn run(schedule: &Schedule, delivery: Delivery) -> Result<()> {
    if delivery == Delivery::Blocking && schedule.is_lowered() && meeting::all_meet(schedule) {
        return Ok(());
    }
    let mut run = Run::new(schedule, delivery);
    match run.finish() {
        Ok(()) => Ok(()),
        Err(Stuck::Deadlock) => Err(deadlock::explain(&run)),
        Err(Stuck::Mismatch(one, other)) => Err(deadlock::mismatch(&run, one, other)),
    }
}

/// Why a simulation of a schedule stopped at the given positions; without overlap every message blocks its ranks.
pub(crate) fn why_stuck(schedule: &Schedule, overlap: bool, positions: &[usize]) -> PlanError {
    let blocking = || if overlap { Ok(()) } else { communication(schedule, Delivery::Blocking) };
    if let Err(error) = check(schedule).and_then(|()| blocking()) {
        return error;
    }
    let blocked = positions.iter().enumerate().filter(|&(rank, &at)| at < schedule.programs()[rank].len());
    let witness: Vec<Place> = blocked.map(|(rank, &at)| Place::at(schedule, rank, at)).collect();
    let message = format!("{} ranks cannot go on", witness.len());
    Fault::new(schedule, FaultKind::Deadlock, message, witness).into()
}
