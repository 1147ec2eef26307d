//! What a program is lowered for.

use std::collections::BTreeSet;

use crate::error::{PlanError, Result};
use crate::schedule::named::named;
use crate::schedule::placement::Placement;

/// When the optimizer steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OptimizerStep {
    /// Not in the program.
    Absent,
    /// At the end, after every gradient of the rank, behind a barrier for the global gradient norm.
    Barrier,
    /// Each stage as soon as its gradients are reduced; a later check of the global norm rolls back what it must
    /// (Qi et al., "Zero Bubble Pipeline Parallelism", 2024, section 4).
    PostValidation,
}

named!(OptimizerStep, "optimizer step", [Absent = "absent", Barrier = "barrier", PostValidation = "post-validation"]);

/// When a stage's gradients are reduced over the data-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceTiming {
    /// Once, after the stage's last weight gradient; its gradients stay whole until then.
    Once,
    /// After each weight gradient: one bucket of memory, and as many times the traffic as there are micro-batches.
    PerMicrobatch,
}

named!(ReduceTiming, "reduce timing", [Once = "once", PerMicrobatch = "per-microbatch"]);

/// What a program is lowered for: data-parallel sharding, shared weights, the optimizer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lowering {
    /// The `ZeRO` stage, 0 to 3, whose reductions (and, at 3, gathers) the program holds; `None` for neither.
    pub zero_stage: Option<u8>,
    /// When gradients are reduced; per micro-batch only at `ZeRO` stages 2 and 3.
    pub reduce: ReduceTiming,
    /// When the optimizer steps.
    pub optimizer: OptimizerStep,
    /// Groups of stages that share weights. A stage reduces its groups in this order, so all ranks agree on it. The
    /// two copies of each stage of a bidirectional placement are added by lowering.
    pub tied: Vec<Vec<u32>>,
    /// The most receives of a stage and direction that are posted and not yet used, at least 1. `None`: 2, with which a
    /// transfer overlaps the computation before the one that needs it, or the least with which the programs run, if that
    /// is more. A lowered schedule has the number.
    pub receives_ahead: Option<u32>,
    /// How many stages a rank gathers at once at `ZeRO` stage 3, at least 1. With 2, the next is gathered behind the
    /// computation of the one in use. Where one composite works on more stages, lowering raises it to them.
    pub max_unsharded: u32,
}

/// One transfer under way for each that is used.
const USUAL_RECEIVES_AHEAD: u32 = 2;

/// Communication only.
impl Default for Lowering {
    fn default() -> Self {
        Self {
            zero_stage: None,
            reduce: ReduceTiming::Once,
            optimizer: OptimizerStep::Absent,
            tied: Vec::new(),
            receives_ahead: None,
            max_unsharded: 2,
        }
    }
}

impl Lowering {
    /// The bound on receives ahead: the one given, or the usual one.
    #[must_use]
    pub fn most_receives_ahead(&self) -> u32 {
        self.receives_ahead.unwrap_or(USUAL_RECEIVES_AHEAD)
    }

    pub(crate) fn check(&self, placement: &Placement) -> Result<()> {
        let at_least_1 = |what, value: u32| match value {
            0 => Err(PlanError::OutOfRange { what, value: 0, expected: "at least 1" }),
            _ => Ok(()),
        };
        at_least_1("receives_ahead", self.most_receives_ahead())?;
        at_least_1("max_unsharded", self.max_unsharded)?;
        if let Some(stage @ 4..) = self.zero_stage {
            return Err(PlanError::OutOfRange { what: "zero_stage", value: stage.into(), expected: "0, 1, 2 or 3" });
        }
        if self.reduce == ReduceTiming::PerMicrobatch && !matches!(self.zero_stage, Some(2 | 3)) {
            let reason = "gradients are reduced per micro-batch at ZeRO stages 2 and 3 only: below them they stay whole \
                          until the step; reduce \"once\", or at another stage";
            return Err(PlanError::BadLowering { reason: reason.to_owned() });
        }
        self.tied.iter().try_for_each(|group| check_group(group, placement))
    }

    /// The groups of stages that share weights, with the copies of a bidirectional placement.
    #[must_use]
    pub fn all_tied(&self, placement: &Placement) -> Vec<Vec<u32>> {
        if placement.num_chains() == 1 {
            return self.tied.clone();
        }
        let with_twins = |group: &Vec<u32>| {
            let twins = group.iter().filter_map(|&stage| placement.twin(stage));
            group.iter().copied().chain(twins).collect::<BTreeSet<u32>>().into_iter().collect()
        };
        let copies = (0..placement.chain_length()).map(|stage| vec![stage, stage + placement.chain_length()]);
        let mut groups: Vec<Vec<u32>> = self.tied.iter().map(with_twins).collect();
        groups.extend(copies);
        groups
    }
}

fn check_group(group: &[u32], placement: &Placement) -> Result<()> {
    let num_stages = placement.num_stages();
    let distinct: BTreeSet<u32> = group.iter().copied().collect();
    let reason = if let Some(stage) = group.iter().find(|&&stage| stage >= num_stages) {
        format!("stage {stage} is out of range: there are stages 0 to {}", num_stages - 1)
    } else if distinct.len() < 2 || distinct.len() < group.len() {
        "expected at least two different stages, each once".to_owned()
    } else {
        return Ok(());
    };
    Err(PlanError::BadLowering { reason: format!("tied stages {group:?}: {reason}") })
}
