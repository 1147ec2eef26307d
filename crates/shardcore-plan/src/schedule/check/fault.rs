//! What is wrong with a schedule, and the fewest actions that show it.

use std::fmt;

use super::grid;
use crate::error::PlanError;
use crate::schedule::action::Action;
use crate::schedule::program::Schedule;

/// Actions of a witness that a message names; of a longer one it names both ends.
const NAMED: usize = 12;

/// What kind of rule a schedule breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FaultKind {
    /// An action that every schedule needs is not there.
    Missing,
    /// An action is there twice, or a backward both whole and in parts.
    Duplicate,
    /// An action stands on a rank or in a chain that does not hold its stage for its micro-batch.
    Misplaced,
    /// Two actions of one rank stand in the wrong order.
    Order,
    /// Actions of several ranks wait for each other.
    Deadlock,
    /// Two ends of a channel stand at different messages.
    Mismatch,
    /// A receive slot is filled before it is read, or another one is read, or more wait to be read than may.
    Slot,
    /// A gather, a reduction, a sum over shared weights or an optimizer step that the lowering does not have, or that
    /// stands where its stage cannot use it.
    Sharding,
    /// A rank holds more than the memory cap.
    Memory,
}

/// An action, and where it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The rank in whose program it stands.
    pub rank: u32,
    /// Its place there, from 0.
    pub position: usize,
    /// The action.
    pub action: Action,
}

impl Place {
    /// What stands at a position of a rank, both in range.
    pub(crate) fn at(schedule: &Schedule, rank: usize, position: usize) -> Self {
        let action = schedule.programs()[rank][position];
        Self { rank: u32::try_from(rank).unwrap_or(u32::MAX), position, action }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (rank {}, position {})", self.action, self.rank, self.position)
    }
}

/// A broken rule: which one, where, and the fewest actions that show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The rule.
    pub kind: FaultKind,
    /// What is wrong, expected and found, and what to do.
    pub message: String,
    /// The failing cell: the first action that cannot stand where it stands.
    pub cell: Option<Place>,
    /// The fewest actions that show the fault; of a deadlock the cycle, in its order.
    pub witness: Vec<Place>,
    /// The grid around them: ranks are rows, the failing cell is `>marked<`, the rest of the witness `[marked]`.
    pub grid: String,
}

impl Fault {
    /// A fault with its grid. The first of the witness is the failing cell.
    pub(super) fn new(schedule: &Schedule, kind: FaultKind, message: String, witness: Vec<Place>) -> Self {
        let grid = grid::excerpt(schedule, &witness);
        Self { kind, message, cell: witness.first().copied(), witness, grid }
    }
}

impl From<Fault> for PlanError {
    fn from(fault: Fault) -> Self {
        Self::InvalidSchedule(Box::new(fault))
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if self.witness.len() > 1 {
            let names: Vec<String> = self.witness.iter().map(ToString::to_string).collect();
            let list = if names.len() <= NAMED {
                names.join(", ")
            } else {
                let (head, tail) = (&names[..NAMED / 2], &names[names.len() - NAMED / 2..]);
                format!("{}, ... {} more ..., {}", head.join(", "), names.len() - NAMED, tail.join(", "))
            };
            write!(f, "\nwitness: {list}")?;
        }
        if !self.grid.is_empty() {
            write!(f, "\n{}", self.grid)?;
        }
        Ok(())
    }
}
