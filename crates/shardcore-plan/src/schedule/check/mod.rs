//! Whether a schedule can be executed: structure, dependencies, memory and communication.

mod fault;
mod grid;

pub use fault::{Fault, FaultKind, Place};

use super::program::Schedule;
use crate::error::PlanError;

/// Why a schedule stopped at the given positions.
pub(crate) fn why_stuck(schedule: &Schedule, positions: &[usize]) -> PlanError {
    let blocked = positions.iter().enumerate().filter(|&(rank, &at)| at < schedule.programs()[rank].len());
    let witness = blocked.map(|(rank, &at)| Place::at(schedule, rank, at)).collect();
    Fault::new(schedule, FaultKind::Deadlock, "the schedule cannot go on".to_owned(), witness).into()
}
