//! Gathers, reductions, sums over shared weights and optimizer steps of a lowered schedule: those that its lowering has,
//! each once it has something to work on, none too late.
//!
//! One pass over each rank's program. Whether ranks wait for each other in a sum over shared weights is for the run to
//! say.

use super::fault::{Fault, FaultKind, Place};
use crate::error::{PlanError, Result};
use crate::schedule::action::{Action, ActionKind};
use crate::schedule::flow::Flow;
use crate::schedule::lower::{Lowering, OptimizerStep, ReduceTiming, Ties};
use crate::schedule::program::Schedule;
use crate::table::counted;

/// What has happened to a stage so far.
#[derive(Clone, Copy, Default)]
struct Stage {
    whole: bool,
    weight_grads: u32,
    /// Where the composite of the latest weight gradient starts.
    latest: usize,
    reductions: u32,
    sums: u32,
    stepped: bool,
}

/// Checks the actions for sharding against what the schedule was lowered for. Its structure is valid otherwise.
pub(super) fn check(schedule: &Schedule) -> Result<()> {
    let Some(lowering) = schedule.lowering() else { return Ok(()) };
    let mut pass = Pass::new(schedule, lowering);
    for (rank, program) in schedule.programs().iter().enumerate() {
        pass.begin_rank(rank);
        for (position, &action) in program.iter().enumerate() {
            if position == 0 || !program[position - 1].with_next {
                pass.composite = position;
            }
            pass.admit(action).map_err(|wrong| pass.fault(rank, position, wrong))?;
            pass.mark(position, action);
        }
    }
    pass.complete()
}

/// Why an action cannot stand where it stands, and the other action that shows it.
struct Wrong {
    reason: String,
    other: Option<usize>,
}

impl Wrong {
    fn alone<T>(reason: impl Into<String>) -> Result<T, Self> {
        Err(Self { reason: reason.into(), other: None })
    }
}

struct Pass<'a> {
    schedule: &'a Schedule,
    lowering: &'a Lowering,
    trains: bool,
    ties: Ties,
    /// The weight gradients of each stage in the whole step.
    num_weight_grads: Vec<u32>,
    stages: Vec<Stage>,
    /// The rank at hand; how many stages it holds whole; where its first step behind a barrier stands.
    rank: usize,
    num_whole: u32,
    barrier: Option<usize>,
    /// Where the composite at hand starts.
    composite: usize,
}

impl<'a> Pass<'a> {
    fn new(schedule: &'a Schedule, lowering: &'a Lowering) -> Self {
        let flow = Flow::of(schedule.header());
        let trains = !schedule.is_forward_only();
        let count = |stage| if trains { u32::try_from(flow.units_of(stage).len()).unwrap_or(u32::MAX) } else { 0 };
        Self {
            schedule,
            lowering,
            trains,
            ties: Ties::of(schedule),
            num_weight_grads: (0..schedule.num_stages()).map(count).collect(),
            stages: vec![Stage::default(); schedule.num_stages() as usize],
            rank: 0,
            num_whole: 0,
            barrier: None,
            composite: 0,
        }
    }

    fn begin_rank(&mut self, rank: usize) {
        (self.rank, self.num_whole, self.barrier) = (rank, 0, None);
    }

    fn gathers(&self) -> bool {
        self.lowering.zero_stage == Some(3)
    }

    fn per_microbatch(&self) -> bool {
        self.lowering.reduce == ReduceTiming::PerMicrobatch
    }

    /// The reductions that a stage has in the whole step.
    fn num_reductions(&self, stage: u32) -> u32 {
        match self.lowering.zero_stage {
            None => 0,
            Some(_) if self.per_microbatch() => self.num_weight_grads[stage as usize],
            Some(_) => u32::from(self.trains),
        }
    }

    fn admit(&self, action: Action) -> Result<(), Wrong> {
        let barrier = self.barrier.filter(|_| !is_over(action.kind));
        if barrier.is_some() {
            let reason = "it stands behind a step of the optimizer, for which all ranks wait at a barrier: put every \
                          OPTIM of the rank behind it";
            return Err(Wrong { reason: reason.to_owned(), other: barrier });
        }
        match action.kind {
            ActionKind::Unshard => self.admit_gather(action.stage),
            ActionKind::Reshard => self.admit_release(action.stage),
            ActionKind::Reduce => self.admit_reduction(action.stage),
            ActionKind::TiedReduce => self.admit_sum(action.stage),
            ActionKind::Optimizer => self.admit_step(action.stage),
            kind if kind.is_compute() => self.admit_compute(action),
            _ => Ok(()),
        }
    }

    /// What is right where it stands has happened.
    fn mark(&mut self, position: usize, action: Action) {
        let stage = &mut self.stages[action.stage as usize];
        match action.kind {
            ActionKind::Unshard => (stage.whole, self.num_whole) = (true, self.num_whole + 1),
            ActionKind::Reshard => (stage.whole, self.num_whole) = (false, self.num_whole - 1),
            ActionKind::Reduce => stage.reductions += 1,
            ActionKind::TiedReduce => stage.sums += 1,
            ActionKind::Optimizer => {
                stage.stepped = true;
                if self.lowering.optimizer == OptimizerStep::Barrier {
                    self.barrier = self.barrier.or(Some(position));
                }
            }
            kind if makes_weight_grad(kind) => {
                stage.weight_grads += 1;
                stage.latest = self.composite;
            }
            _ => {}
        }
    }

    fn admit_compute(&self, action: Action) -> Result<(), Wrong> {
        let stage = &self.stages[action.stage as usize];
        if self.gathers() && !stage.whole {
            return Wrong::alone("its parameters are not gathered: put UNSHARD before it");
        }
        let unreduced = self.lowering.zero_stage.is_some() && stage.weight_grads > stage.reductions;
        if unreduced && self.per_microbatch() && makes_weight_grad(action.kind) && stage.latest < self.composite {
            let reason = "the weight gradient before it is not reduced: with one reduction per micro-batch, put REDUCE \
                          behind each";
            return Err(Wrong { reason: reason.to_owned(), other: self.earlier_weight_grad(action.stage) });
        }
        Ok(())
    }

    fn admit_gather(&self, stage: u32) -> Result<(), Wrong> {
        if !self.gathers() {
            return Wrong::alone("parameters are whole below ZeRO stage 3: drop it, or lower for zero_stage 3");
        }
        if self.stages[stage as usize].whole {
            return Wrong::alone("its parameters are gathered already: drop it");
        }
        let most = self.lowering.max_unsharded;
        if self.num_whole >= most {
            let held = counted(self.num_whole.into(), "stage");
            return Wrong::alone(format!(
                "the rank holds {held} whole already, and max_unsharded is {most}: put a RESHARD before it"
            ));
        }
        Ok(())
    }

    fn admit_release(&self, stage: u32) -> Result<(), Wrong> {
        if !self.gathers() {
            return Wrong::alone("parameters are whole below ZeRO stage 3: drop it, or lower for zero_stage 3");
        }
        if !self.stages[stage as usize].whole {
            return Wrong::alone("its parameters are not gathered: gather them first, or drop it");
        }
        Ok(())
    }

    fn admit_reduction(&self, stage: u32) -> Result<(), Wrong> {
        let so_far = &self.stages[stage as usize];
        let most = self.num_reductions(stage);
        if most == 0 {
            return Wrong::alone(self.undeclared("reductions: drop it, or lower for a zero_stage"));
        }
        if so_far.reductions >= most {
            let often = if self.per_microbatch() { "behind each weight gradient" } else { "behind the last one" };
            return Wrong::alone(format!("its gradients are reduced already: reduce them once {often}"));
        }
        if self.per_microbatch() {
            if so_far.reductions >= so_far.weight_grads {
                let reason = "there is no weight gradient that it could carry: put it behind the next one";
                return Err(Wrong { reason: reason.to_owned(), other: self.next_weight_grad(stage) });
            }
            return Ok(());
        }
        self.behind_weight_grads(stage, "reduce")?;
        self.behind_sums(stage)
    }

    fn admit_sum(&self, stage: u32) -> Result<(), Wrong> {
        let so_far = &self.stages[stage as usize];
        let groups = self.ties.of_stage(stage);
        let Some(&group) = groups.get(so_far.sums as usize).filter(|_| self.trains) else {
            let reason = match groups.len() {
                _ if !self.trains => self.undeclared("backward"),
                0 => self.undeclared("tied weights of this stage: drop it, or lower with tied groups of stages"),
                count => {
                    let groups = counted(count as u64, "tied group");
                    format!("its shared gradients are summed already: expected one sum for each of its {groups}")
                }
            };
            return Wrong::alone(reason);
        };
        for &sharer in self.ties.stages(group).iter().filter(|&&sharer| self.is_here(sharer)) {
            self.behind_weight_grads(sharer, "sum")?;
            if self.per_microbatch() && self.stages[sharer as usize].reductions < self.num_reductions(sharer) {
                return Wrong::alone(format!("a gradient of stage {sharer} is not reduced yet: put it behind REDUCE"));
            }
        }
        Ok(())
    }

    fn admit_step(&self, stage: u32) -> Result<(), Wrong> {
        let so_far = &self.stages[stage as usize];
        if self.lowering.optimizer == OptimizerStep::Absent || !self.trains {
            return Wrong::alone(self.undeclared("optimizer steps: drop it, or lower with an optimizer"));
        }
        if so_far.stepped {
            return Wrong::alone("its optimizer has stepped already: step once");
        }
        self.behind_weight_grads(stage, "step")?;
        self.behind_sums(stage)?;
        if so_far.reductions < self.num_reductions(stage) {
            return Wrong::alone("its gradients are not reduced yet: put it behind REDUCE");
        }
        Ok(())
    }

    /// Nothing of the stage's gradient is still to come.
    fn behind_weight_grads(&self, stage: u32, verb: &str) -> Result<(), Wrong> {
        let left = self.num_weight_grads[stage as usize] - self.stages[stage as usize].weight_grads;
        if left == 0 {
            return Ok(());
        }
        let left = counted(left.into(), "weight gradient");
        let reason = format!("it stands before {left} of stage {stage}: {verb} behind the last one");
        Err(Wrong { reason, other: self.next_weight_grad(stage) })
    }

    fn behind_sums(&self, stage: u32) -> Result<(), Wrong> {
        let left = self.ties.of_stage(stage).len() - self.stages[stage as usize].sums as usize;
        if left == 0 {
            return Ok(());
        }
        let left = counted(left as u64, "sum");
        Wrong::alone(format!("it stands before {left} over its shared weights: put it behind TIED_REDUCE"))
    }

    fn undeclared(&self, what: &str) -> String {
        if !self.trains {
            return "a program without a backward has no gradients: drop it".to_owned();
        }
        format!("what the schedule was lowered for has no {what}")
    }

    fn is_here(&self, stage: u32) -> bool {
        self.schedule.placement().rank_of(stage) as usize == self.rank
    }

    /// Where the first weight gradient of a stage stands that has not happened.
    fn next_weight_grad(&self, stage: u32) -> Option<usize> {
        self.weight_grad(stage, self.stages[stage as usize].weight_grads as usize)
    }

    fn earlier_weight_grad(&self, stage: u32) -> Option<usize> {
        self.weight_grad(stage, (self.stages[stage as usize].weight_grads as usize).checked_sub(1)?)
    }

    fn weight_grad(&self, stage: u32, turn: usize) -> Option<usize> {
        let makes = |action: &Action| action.stage == stage && makes_weight_grad(action.kind);
        let program = self.schedule.programs()[self.rank].iter().enumerate();
        program.filter(|(_, action)| makes(action)).nth(turn).map(|(position, _)| position)
    }

    /// Every stage is released, reduced, summed and stepped as the lowering says.
    fn complete(&self) -> Result<()> {
        for (stage, state) in (0_u32..).zip(&self.stages) {
            let missing = if state.whole {
                Some((ActionKind::Reshard, "at the end"))
            } else if self.trains && (state.sums as usize) < self.ties.of_stage(stage).len() {
                Some((ActionKind::TiedReduce, "behind its weight gradients"))
            } else if state.reductions < self.num_reductions(stage) {
                Some((ActionKind::Reduce, "behind its weight gradients"))
            } else {
                let steps = self.trains && self.lowering.optimizer != OptimizerStep::Absent;
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
        Fault::new(self.schedule, FaultKind::Missing, message, near.into_iter().collect()).into()
    }

    fn fault(&self, rank: usize, position: usize, wrong: Wrong) -> PlanError {
        let place = Place::at(self.schedule, rank, position);
        let Wrong { reason, other } = wrong;
        let other = other.map(|position| Place::at(self.schedule, rank, position));
        let message = format!("{place}: {reason}");
        Fault::new(self.schedule, FaultKind::Sharding, message, std::iter::once(place).chain(other).collect()).into()
    }
}

/// Whether an action may stand behind the barrier of the optimizer.
fn is_over(kind: ActionKind) -> bool {
    matches!(kind, ActionKind::Optimizer | ActionKind::Unshard | ActionKind::Reshard)
}

fn makes_weight_grad(kind: ActionKind) -> bool {
    matches!(kind, ActionKind::Backward | ActionKind::WeightGrad)
}
