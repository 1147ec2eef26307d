//! Where a rank reduces gradients and steps the optimizer, and with [`gathers`](super::gathers) all its actions for
//! sharding.

use super::gathers::{gathers, widest};
use super::times::composites;
use super::{Inserted, Lowering, OptimizerStep, ReduceTiming, Ties};
use crate::schedule::action::{Action, ActionKind};
use crate::schedule::program::{Gating, Schedule};

/// What all ranks have in common.
pub(super) struct Sharding<'a> {
    lowering: &'a Lowering,
    schedule: &'a Schedule,
    trains: bool,
    ties: Ties,
}

impl<'a> Sharding<'a> {
    pub(super) fn new(schedule: &'a Schedule, lowering: &'a Lowering) -> Self {
        let ties = Ties::new(lowering.all_tied(schedule.placement()), schedule.num_stages());
        Self { lowering, schedule, trains: !schedule.is_forward_only(), ties }
    }

    /// The most stages that a rank must gather at once.
    pub(super) fn widest(&self) -> u32 {
        let gathered = if self.lowering.zero_stage == Some(3) { self.schedule.programs() } else { &[] };
        let widest = gathered.iter().map(|program| widest(program)).max().unwrap_or(1);
        u32::try_from(widest).unwrap_or(u32::MAX)
    }

    /// The sharding's actions of a rank, by gap.
    pub(super) fn of_rank(&self, rank: u32, program: &[Action]) -> Vec<Inserted> {
        let mut inserted = Vec::new();
        if self.lowering.zero_stage == Some(3) {
            inserted.extend(gathers(program, self.lowering.max_unsharded));
        }
        if self.trains && (self.reduces() || self.lowering.optimizer == OptimizerStep::PostValidation) {
            inserted.extend(self.behind_gradients(rank, program));
        }
        // Stable: what a computation leaves is released, then reduced, and only then the next is gathered.
        inserted.sort_by_key(|inserted| (inserted.gap, inserted.action.kind == ActionKind::Unshard));
        if self.trains {
            inserted.extend(self.at_end(rank).into_iter().map(|action| Inserted { gap: u32::MAX, action }));
        }
        inserted
    }

    fn shares(&self, stage: u32) -> bool {
        !self.ties.of_stage(stage).is_empty()
    }

    fn reduces(&self) -> bool {
        self.lowering.zero_stage.is_some()
    }

    /// Reductions behind weight gradients, and the steps of post-validation behind a stage's last.
    fn behind_gradients(&self, rank: u32, program: &[Action]) -> Vec<Inserted> {
        let per_microbatch = self.reduces() && self.lowering.reduce == ReduceTiming::PerMicrobatch;
        let once = self.reduces() && !per_microbatch;
        let steps = self.lowering.optimizer == OptimizerStep::PostValidation;
        let stages = self.schedule.placement().stages_of(rank);
        let mut last = vec![None; stages.len()];
        let mut inserted = Vec::new();
        for (before, after, composite) in composites(program) {
            let parts = (before..).zip(composite).filter(|(_, action)| makes_weight_grad(action.kind));
            for (part, action) in parts {
                if let Ok(turn) = stages.binary_search(&action.stage) {
                    last[turn] = Some(after);
                }
                if per_microbatch {
                    let gap =
                        if self.makes_another(&program[part as usize..after as usize]) { part + 1 } else { after };
                    inserted.push(Inserted { gap, action: Action::new(ActionKind::Reduce, action.stage, 0) });
                }
            }
        }
        for (&stage, gap) in stages.iter().zip(last) {
            let Some(gap) = gap.filter(|_| !self.shares(stage)) else { continue };
            let kinds = [once.then_some(ActionKind::Reduce), steps.then_some(ActionKind::Optimizer)];
            let actions = kinds.into_iter().flatten().map(|kind| Action::new(kind, stage, 0));
            inserted.extend(actions.map(|action| Inserted { gap, action }));
        }
        inserted
    }

    /// Whether parts that wait each for its own input, so that they may run apart, make two weight gradients of the
    /// first one's stage.
    fn makes_another(&self, parts: &[Action]) -> bool {
        let again = |other: &Action| other.stage == parts[0].stage && makes_weight_grad(other.kind);
        self.schedule.header().gating == Gating::Own && parts[1..].iter().any(again)
    }

    /// Shared weights are summed when the rank has nothing else to do, in one order on all ranks: so none waits for a
    /// rank that waits for it. Their stages are reduced and stepped behind that.
    fn at_end(&self, rank: u32) -> Vec<Action> {
        let placement = self.schedule.placement();
        let here = |&&stage: &&u32| placement.rank_of(stage) == rank;
        let sharing = |&&stage: &&u32| self.shares(stage);
        let action = |kind| move |&stage: &u32| Action::new(kind, stage, 0);
        let stages = placement.stages_of(rank);
        let mut actions: Vec<Action> =
            self.ties.groups().iter().flatten().filter(here).map(action(ActionKind::TiedReduce)).collect();
        if self.reduces() && self.lowering.reduce == ReduceTiming::Once {
            actions.extend(stages.iter().filter(sharing).map(action(ActionKind::Reduce)));
        }
        match self.lowering.optimizer {
            OptimizerStep::Absent => {}
            OptimizerStep::Barrier => actions.extend(stages.iter().map(action(ActionKind::Optimizer))),
            OptimizerStep::PostValidation => {
                actions.extend(stages.iter().filter(sharing).map(action(ActionKind::Optimizer)));
            }
        }
        actions
    }
}

fn makes_weight_grad(kind: ActionKind) -> bool {
    matches!(kind, ActionKind::Backward | ActionKind::WeightGrad)
}
