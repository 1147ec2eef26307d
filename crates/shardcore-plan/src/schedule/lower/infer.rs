//! What programs that come without a lowering were lowered for, as far as their actions say.

use std::collections::BTreeSet;

use super::{Lowering, OptimizerStep, ReduceTiming};
use crate::schedule::action::{Action, ActionKind};
use crate::schedule::program::Schedule;

impl Lowering {
    /// The same with a number for the receives ahead: the one given, or what the programs reach and at least 2.
    pub(crate) fn completed(self, schedule: &Schedule) -> Self {
        let reached = || self.most_receives_ahead().max(most_ahead(schedule));
        Self { receives_ahead: Some(self.receives_ahead.unwrap_or_else(reached)), ..self }
    }

    /// The least under which the actions of a lowered schedule can be right.
    ///
    /// Gathers mean `ZeRO` stage 3. Several reductions of a stage, or one before it sums over shared weights, mean one
    /// per micro-batch. Reductions without gathers look the same at stages 0 to 2: they mean 0, or 2 where there is one
    /// per micro-batch. Steps of the optimizer mean a barrier where nothing comes behind them, else
    /// post-validation. The stages with one sum over shared weights are one tied group, those with a second one another,
    /// and so on. Bounds are what the programs reach, and at least the defaults.
    #[must_use]
    pub fn inferred(schedule: &Schedule) -> Self {
        let reductions = counts(schedule, ActionKind::Reduce);
        let per_microbatch = reductions.iter().any(|&count| count > 1) || sums_behind_reductions(schedule);
        let gathers = |kind| matches!(kind, ActionKind::Unshard | ActionKind::Reshard);
        let zero_stage = if schedule.programs().iter().flatten().any(|action| gathers(action.kind)) {
            Some(3)
        } else {
            reductions.iter().any(|&count| count > 0).then_some(if per_microbatch { 2 } else { 0 })
        };
        let defaults = Self::default();
        Self {
            zero_stage,
            reduce: if per_microbatch { ReduceTiming::PerMicrobatch } else { ReduceTiming::Once },
            optimizer: optimizer(schedule),
            tied: tied(schedule),
            receives_ahead: Some(defaults.most_receives_ahead().max(most_ahead(schedule))),
            max_unsharded: defaults.max_unsharded.max(most_unsharded(schedule)),
        }
    }
}

/// How many actions of a kind each stage has.
fn counts(schedule: &Schedule, kind: ActionKind) -> Vec<u32> {
    let mut counts = vec![0; schedule.num_stages() as usize];
    let actions = schedule.programs().iter().flatten().filter(|action| action.kind == kind);
    actions.for_each(|action| counts[action.stage as usize] += 1);
    counts
}

fn sums_behind_reductions(schedule: &Schedule) -> bool {
    let mut reduced = vec![false; schedule.num_stages() as usize];
    schedule.programs().iter().flatten().any(|action| {
        let stage = action.stage as usize;
        reduced[stage] |= action.kind == ActionKind::Reduce;
        reduced[stage] && action.kind == ActionKind::TiedReduce
    })
}

fn optimizer(schedule: &Schedule) -> OptimizerStep {
    let steps = |action: &Action| action.kind == ActionKind::Optimizer;
    let is_last = |program: &Vec<Action>| {
        program
            .iter()
            .skip_while(|action| !steps(action))
            .all(|action| matches!(action.kind, ActionKind::Optimizer | ActionKind::Unshard | ActionKind::Reshard))
    };
    if !schedule.programs().iter().flatten().any(steps) {
        OptimizerStep::Absent
    } else if schedule.programs().iter().all(is_last) {
        OptimizerStep::Barrier
    } else {
        OptimizerStep::PostValidation
    }
}

fn tied(schedule: &Schedule) -> Vec<Vec<u32>> {
    let sums = counts(schedule, ActionKind::TiedReduce);
    // The copies of a bidirectional placement are tied in any case.
    let first = u32::from(schedule.placement().num_chains() > 1);
    let most = sums.iter().copied().max().unwrap_or(0);
    let group = |turn: u32| (0..).zip(&sums).filter(|&(_, &count)| count > turn).map(|(stage, _)| stage).collect();
    (first..most).map(group).filter(|group: &Vec<u32>| group.len() > 1).collect()
}

/// The most receives of one stage and direction that are posted and not yet used.
fn most_ahead(schedule: &Schedule) -> u32 {
    let mut ahead = vec![[0_u32; 2]; schedule.num_stages() as usize];
    let mut most = 0;
    for action in schedule.programs().iter().flatten() {
        let sides = &mut ahead[action.stage as usize];
        match action.kind {
            ActionKind::RecvForward | ActionKind::RecvBackward => {
                let side = &mut sides[usize::from(action.kind == ActionKind::RecvForward)];
                *side += 1;
                most = most.max(*side);
            }
            ActionKind::Forward => sides[1] = sides[1].saturating_sub(1),
            ActionKind::Backward | ActionKind::InputGrad => sides[0] = sides[0].saturating_sub(1),
            _ => {}
        }
    }
    most
}

/// The most stages that a rank holds whole at once.
fn most_unsharded(schedule: &Schedule) -> u32 {
    let most = |program: &Vec<Action>| {
        let (mut whole, mut most) = (BTreeSet::new(), 0);
        for action in program {
            match action.kind {
                ActionKind::Unshard => drop(whole.insert(action.stage)),
                ActionKind::Reshard => drop(whole.remove(&action.stage)),
                _ => {}
            }
            most = most.max(whole.len());
        }
        most
    };
    let most = schedule.programs().iter().map(most).max().unwrap_or(0);
    u32::try_from(most).unwrap_or(u32::MAX)
}
