//! Which stages share weights, and in which order they sum their gradients.

use crate::schedule::program::Schedule;

/// The groups of stages that share weights. A stage sums over its groups in ascending order: its first `TIED_REDUCE` is
/// for the first of them.
pub(crate) struct Ties {
    groups: Vec<Vec<u32>>,
    /// The groups of each stage.
    of_stage: Vec<Vec<u32>>,
}

impl Ties {
    /// Those of a lowered schedule; none of another.
    pub(crate) fn of(schedule: &Schedule) -> Self {
        let groups = schedule.lowering().map(|lowering| lowering.all_tied(schedule.placement()));
        Self::new(groups.unwrap_or_default(), schedule.num_stages())
    }

    pub(super) fn new(groups: Vec<Vec<u32>>, num_stages: u32) -> Self {
        let mut of_stage = vec![Vec::new(); num_stages as usize];
        for (group, stages) in (0..).zip(&groups) {
            for &stage in stages {
                of_stage[stage as usize].push(group);
            }
        }
        Self { groups, of_stage }
    }

    /// All groups.
    pub(crate) fn groups(&self) -> &[Vec<u32>] {
        &self.groups
    }

    /// The groups of a stage, ascending.
    pub(crate) fn of_stage(&self, stage: u32) -> &[u32] {
        &self.of_stage[stage as usize]
    }

    /// The stages of a group.
    pub(crate) fn stages(&self, group: u32) -> &[u32] {
        &self.groups[group as usize]
    }
}
