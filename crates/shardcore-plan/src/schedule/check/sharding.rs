//! Gathers, reductions and optimizer steps of a lowered schedule: each where its stage needs it.

use super::fault::{Fault, FaultKind, Place};
use crate::error::{PlanError, Result};
use crate::schedule::action::{Action, ActionKind};
use crate::schedule::lower::{Lowering, OptimizerStep, ReduceTiming};
use crate::schedule::program::Schedule;

/// What has happened to a stage so far.
#[derive(Clone, Copy, Default)]
struct Stage {
    whole: bool,
    weight_grads: u32,
    reductions: u32,
    tied: bool,
    stepped: bool,
}

/// Checks the actions for sharding against what the schedule was lowered for. Its structure is valid otherwise.
pub(super) fn check(schedule: &Schedule) -> Result<()> {
    let Some(lowering) = schedule.lowering() else { return Ok(()) };
    let mut pass = Pass { schedule, lowering, stages: vec![Stage::default(); schedule.num_stages() as usize] };
    for (rank, program) in schedule.programs().iter().enumerate() {
        for position in 0..program.len() {
            pass.admit(rank, position)?;
        }
    }
    pass.complete()
}

struct Pass<'a> {
    schedule: &'a Schedule,
    lowering: &'a Lowering,
    stages: Vec<Stage>,
}

impl Pass<'_> {
    fn admit(&mut self, rank: usize, position: usize) -> Result<()> {
        let action = self.schedule.programs()[rank][position];
        let per_microbatch = self.lowering.reduce == ReduceTiming::PerMicrobatch;
        let stage = &mut self.stages[action.stage as usize];
        let before = *stage;
        let wrong = match action.kind {
            ActionKind::Unshard => {
                stage.whole = true;
                before.whole.then_some("its parameters are gathered already: drop it")
            }
            ActionKind::Reshard => {
                stage.whole = false;
                (!before.whole).then_some("its parameters are not gathered: gather them first, or drop it")
            }
            ActionKind::Reduce => {
                stage.reductions += 1;
                let early = !per_microbatch && before.reductions > 0;
                early.then_some("its gradients are reduced already: reduce them once, behind the last weight gradient")
            }
            ActionKind::TiedReduce => {
                stage.tied = true;
                before.stepped.then_some("its optimizer has stepped already: sum the shared gradients before that")
            }
            ActionKind::Optimizer => {
                stage.stepped = true;
                before.stepped.then_some("its optimizer has stepped already: step once")
            }
            kind if kind.is_compute() => {
                let makes = matches!(kind, ActionKind::Backward | ActionKind::WeightGrad);
                stage.weight_grads += u32::from(makes);
                if self.lowering.zero_stage == Some(3) && !before.whole {
                    Some("its parameters are not gathered: put UNSHARD before it")
                } else if makes && before.reductions > 0 && !per_microbatch {
                    Some("its gradients are reduced already: reduce behind the last weight gradient")
                } else {
                    (makes && before.stepped).then_some("its optimizer has stepped already: step behind the last one")
                }
            }
            _ => None,
        };
        wrong.map_or(Ok(()), |reason| {
            let place = Place::at(self.schedule, rank, position);
            Err(self.fault(FaultKind::Sharding, format!("{place}: {reason}"), vec![place]))
        })
    }

    /// Every stage is released, reduced and stepped as the lowering says.
    fn complete(&self) -> Result<()> {
        let trains = !self.schedule.is_forward_only();
        for (stage, state) in (0_u32..).zip(&self.stages) {
            let per_microbatch = self.lowering.reduce == ReduceTiming::PerMicrobatch;
            let reductions = match self.lowering.zero_stage {
                Some(_) if trains && per_microbatch => state.weight_grads,
                Some(_) if trains => state.weight_grads.min(1),
                _ => 0,
            };
            let steps = trains && state.weight_grads > 0 && self.lowering.optimizer != OptimizerStep::Absent;
            let missing = if state.whole {
                Some((ActionKind::Reshard, "at the end"))
            } else if state.reductions < reductions {
                Some((ActionKind::Reduce, "behind its weight gradients"))
            } else {
                (steps && !state.stepped).then_some((ActionKind::Optimizer, "behind its reductions"))
            };
            if let Some((kind, place)) = missing {
                return Err(self.missing(Action::new(kind, stage, 0), place));
            }
        }
        Ok(())
    }

    fn missing(&self, action: Action, place: &str) -> PlanError {
        let rank = self.schedule.placement().rank_of(action.stage);
        let program = &self.schedule.programs()[rank as usize];
        let last = program.iter().rposition(|other| other.stage == action.stage);
        let near = last.map(|position| Place::at(self.schedule, rank as usize, position));
        let message = format!("{action} is missing: expected it on rank {rank} {place}");
        self.fault(FaultKind::Missing, message, near.into_iter().collect())
    }

    fn fault(&self, kind: FaultKind, message: String, witness: Vec<Place>) -> PlanError {
        Fault::new(self.schedule, kind, message, witness).into()
    }
}
