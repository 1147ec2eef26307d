//! From compute programs to programs with communication and with what the sharding needs.
//!
//! | module | what it decides |
//! |---|---|
//! | `options` | what a program is lowered for |
//! | `times` | when each result leaves at given costs; a program that cannot end is refused |
//! | `waiting` | how many receives of a stage must be ahead |
//! | `messages` | where a rank's sends and receives stand |
//! | `slots` | which slot each receive fills |
//! | `sharding`, `gathers` | where a rank reduces and steps, gathers and releases |
//! | `ties` | which stages sum gradients of shared weights, and in which order |
//! | `infer` | what programs from elsewhere were lowered for |
//!
//! # Why the communication cannot deadlock
//!
//! All messages are put in one order: that in which they leave in a run of the programs where every computation and
//! every hop takes its time, a stage takes no more receives ahead than it may, and a rank waits with a message that
//! finds no room. (Where that holds up all ranks for good, the bound is too low and goes up by one.) Every rank posts its sends and receives in that order: a send directly after its computation, a
//! receive as early as its place and its room allow, which is before the computation that needs it and after no
//! computation that needs a later message. So of all messages that are not delivered, the earliest has both ends posted,
//! or they will be without waiting for another: the program runs even where each send and receive blocks its rank
//! ([`CommModel::Blocking`]), and then under every weaker model.
//!
//! # Why the communication is hidden
//!
//! Before a receive in that order stand only receives, and sends that left no later than its message. So it is posted
//! when its message leaves: at the costs for which it was lowered, a program waits for the latency of its messages and
//! for nothing else, unless the receives ahead are too few to cover it.

mod gathers;
mod infer;
mod messages;
mod options;
mod sharding;
mod slots;
mod ties;
mod times;
mod waiting;

pub use options::{Lowering, OptimizerStep, ReduceTiming};
pub(crate) use ties::Ties;

use super::action::Action;
use super::costs::Costs;
use super::program::{CommModel, Header, Schedule};
use super::simulate;
use crate::error::{PlanError, Result};
use messages::Messages;
use sharding::Sharding;
use slots::Slots;
use times::Times;

/// What a hop takes where no costs are given, and every computation takes 1 (a whole backward 2). Any latency tells apart
/// messages that without one would leave at the same moment; this one is about what links in use take.
const USUAL_HOP: f64 = 0.25;

impl Schedule {
    /// The schedule with its communication, and with the gathers, reductions and optimizer steps that `lowering` asks
    /// for. Neighbouring stages on one rank exchange nothing. A composite whose parts wait each for its own input is
    /// taken apart where a message leaves or comes between them.
    ///
    /// # Errors
    /// [`PlanError::BadAction`] for an action that can never run: on the wrong rank, twice, before what it needs, or in
    /// a cycle of ranks that wait for each other. [`PlanError::TooFewReceives`] for a program that needs more receives
    /// ahead than `lowering` allows. [`PlanError::BadLowering`] for a schedule that is lowered already, and for options
    /// that do not fit it.
    pub fn lower(&self, lowering: &Lowering) -> Result<Self> {
        let every = vec![1.0; self.num_stages() as usize];
        let usual = Costs {
            forward: every.clone(),
            input_grad: every.clone(),
            weight_grad: every.clone(),
            fused_backward: None,
            hop: USUAL_HOP,
            activation: every.clone(),
            stash: every,
        };
        self.lowered_at(lowering, &usual)
    }

    /// The same, with the messages in the order of given costs: receives are posted when their messages leave. Where
    /// the receives ahead are too few for that and [`Schedule::lower`] takes less at these costs, that.
    ///
    /// # Errors
    /// As [`Schedule::lower`], and [`PlanError::BadCost`] for costs that do not fit the schedule.
    pub fn lower_for(&self, lowering: &Lowering, costs: &Costs) -> Result<Self> {
        let ordered = self.lowered_at(lowering, costs)?;
        let makespan = |schedule: &Self| Ok::<f64, PlanError>(simulate::simulate(schedule, costs)?.makespan);
        match self.lower(lowering) {
            Ok(usual) if makespan(&usual)? < makespan(&ordered)? => Ok(usual),
            _ => Ok(ordered),
        }
    }

    fn lowered_at(&self, lowering: &Lowering, costs: &Costs) -> Result<Self> {
        if self.is_lowered() {
            let reason = "it is lowered already: lower the schedule that it was made from".to_owned();
            return Err(PlanError::BadLowering { reason });
        }
        lowering.check(self.placement())?;
        simulate::fit(self, costs)?;
        let times = Times::new(self, lowering, costs)?;
        let mut messages = Messages::new(&times, self.header().gating);
        let mut slots = Slots::new(self);
        let sharding = Sharding::new(self, lowering);
        let lowered = |(rank, program): (u32, &Vec<Action>)| {
            let stages = self.placement().stages_of(rank);
            let messages = messages.of_rank(rank, stages, program);
            let mut lowered = merge(program, &messages, &sharding.of_rank(rank, program));
            slots.assign(&mut lowered, stages.len())?;
            Ok(lowered)
        };
        let programs = (0..self.num_ranks()).zip(self.programs()).map(lowered).collect::<Result<_>>()?;
        let header = Header { comm: CommModel::Blocking, ..self.header().clone() };
        let max_unsharded = lowering.max_unsharded.max(sharding.widest());
        let receives_ahead = Some(times.receives_ahead);
        Self::new_lowered(header, programs, Lowering { receives_ahead, max_unsharded, ..lowering.clone() })
    }
}

/// Gives slots to the receives of a lowered schedule that came without any.
///
/// # Errors
/// [`PlanError::BadLowering`] if a stage holds more receives at once than there are slots.
pub(crate) fn with_slots(schedule: &Schedule) -> Result<Schedule> {
    let mut slots = Slots::new(schedule);
    let mut programs = schedule.programs().to_vec();
    for (rank, program) in (0..).zip(&mut programs) {
        slots.assign(program, schedule.placement().stages_of(rank).len())?;
    }
    Schedule::new_lowered(schedule.header().clone(), programs, schedule.lowering().cloned().unwrap_or_default())
}

/// An action between two computations: before the computation (or composite) that starts at `gap` in the program.
#[derive(Clone, Copy, Debug)]
struct Inserted {
    gap: u32,
    action: Action,
}

/// Puts the messages and, behind them, the sharding's actions into their gaps.
fn merge(program: &[Action], messages: &[Inserted], sharding: &[Inserted]) -> Vec<Action> {
    let mut lowered: Vec<Action> = Vec::with_capacity(program.len() + messages.len() + sharding.len());
    let (mut messages, mut sharding) = (messages.iter().peekable(), sharding.iter().peekable());
    for (position, &action) in (0_u32..).zip(program) {
        let (computed, due) = (lowered.len(), |inserted: &&Inserted| inserted.gap <= position);
        while let Some(inserted) = messages.next_if(due) {
            lowered.push(inserted.action);
        }
        while let Some(inserted) = sharding.next_if(due) {
            lowered.push(inserted.action);
        }
        if lowered.len() > computed && computed > 0 {
            lowered[computed - 1].with_next = false;
        }
        lowered.push(action);
    }
    lowered.extend(messages.chain(sharding).map(|inserted| inserted.action));
    lowered
}
