//! Which slot each receive fills.
//!
//! A slot is a buffer for what one stage receives in one direction, so all its contents have one shape. Slots are
//! counted apart for each stage and direction. A slot is free again when nothing reads it any more: in training after
//! the micro-batch's weight gradient, since autograd keeps what the stage received until then, in evaluation after its
//! forward.

use crate::error::{PlanError, Result};
use crate::schedule::action::{Action, ActionKind};
use crate::schedule::program::Schedule;

/// No receive is alive.
const NONE: u16 = u16::MAX;

/// The slots of one stage in one direction.
#[derive(Clone, Default)]
struct Pool {
    free: Vec<u16>,
    /// Slots in use or free.
    count: u16,
}

impl Pool {
    fn take(&mut self) -> Option<u16> {
        self.free.pop().or_else(|| {
            let slot = self.count;
            self.count += u16::from(slot < NONE);
            (slot < NONE).then_some(slot)
        })
    }
}

/// Gives slots to the receives of rank after rank.
pub(super) struct Slots {
    num_units: usize,
    /// The position of each stage among those of its rank.
    local: Vec<u32>,
    forward_only: bool,
    /// For each stage of the rank and direction, the slot of each micro-batch, and the pool.
    held: Vec<u16>,
    pools: Vec<Pool>,
}

impl Slots {
    pub(super) fn new(schedule: &Schedule) -> Self {
        let placement = schedule.placement();
        let mut local = vec![0; placement.num_stages() as usize];
        for rank in 0..placement.num_ranks() {
            (0..).zip(placement.stages_of(rank)).for_each(|(turn, &stage)| local[stage as usize] = turn);
        }
        let num_units = schedule.header().num_units() as usize;
        Self { num_units, local, forward_only: schedule.is_forward_only(), held: Vec::new(), pools: Vec::new() }
    }

    /// Writes the slots into a rank's lowered program.
    ///
    /// # Errors
    /// [`PlanError::BadLowering`] if a stage holds more than 65,535 receives at once.
    pub(super) fn assign(&mut self, program: &mut [Action], num_stages: usize) -> Result<()> {
        self.held.clear();
        self.held.resize(2 * num_stages * self.num_units, NONE);
        self.pools.clear();
        self.pools.resize(2 * num_stages, Pool::default());
        for action in program {
            let (forward, backward) = self.pool_indices(action.stage);
            match action.kind {
                ActionKind::RecvForward => action.slot = self.fill(forward, *action)?,
                ActionKind::RecvBackward => action.slot = self.fill(backward, *action)?,
                ActionKind::Forward => action.slot = self.read(forward, *action),
                ActionKind::Backward | ActionKind::InputGrad => action.slot = self.read(backward, *action),
                _ => {}
            }
            let last = if self.forward_only { action.kind == ActionKind::Forward } else { ends(action.kind) };
            if last {
                self.release(forward, *action);
                self.release(backward, *action);
            }
        }
        Ok(())
    }

    fn pool_indices(&self, stage: u32) -> (usize, usize) {
        let first = 2 * self.local[stage as usize] as usize;
        (first, first + 1)
    }

    fn fill(&mut self, pool: usize, action: Action) -> Result<u16> {
        let slot = self.pools[pool].take().ok_or_else(|| PlanError::BadLowering {
            reason: format!("stage {} holds more than 65,535 received micro-batches at once: use fewer", action.stage),
        })?;
        self.held[pool * self.num_units + action.microbatch as usize] = slot;
        Ok(slot)
    }

    fn read(&self, pool: usize, action: Action) -> u16 {
        match self.held[pool * self.num_units + action.microbatch as usize] {
            NONE => 0,
            slot => slot,
        }
    }

    fn release(&mut self, pool: usize, action: Action) {
        let held = &mut self.held[pool * self.num_units + action.microbatch as usize];
        if *held != NONE {
            self.pools[pool].free.push(*held);
            *held = NONE;
        }
    }
}

/// Whether nothing of the micro-batch is left to do on the stage in training.
fn ends(kind: ActionKind) -> bool {
    matches!(kind, ActionKind::Backward | ActionKind::WeightGrad)
}
