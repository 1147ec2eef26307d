//! From compute programs to programs with communication and with what the sharding needs.
//!
//! | module | what it decides |
//! |---|---|
//! | `options` | what a program is lowered for |
//! | `times` | when each computation ends with equal costs; a program that cannot end is refused |
//! | `messages` | where a rank's sends and receives stand |
//! | `slots` | which slot each receive fills |
//! | `sharding`, `gathers` | where a rank reduces and steps, gathers and releases |
//! | `ties` | which stages sum gradients of shared weights, and in which order |
//! | `infer` | what programs from elsewhere were lowered for |
//!
//! # Why the communication cannot deadlock
//!
//! All messages are put in one order, by the time at which they are sent when every computation takes its unit of
//! time. Every rank posts its sends and receives in that order: a send directly after its computation, a receive before
//! the computation that needs it and after no computation that needs a later message. So of all messages that are not
//! delivered, the earliest has both ends posted, or they will be without waiting for another: the program runs even
//! where each send and receive blocks its rank ([`CommModel::Blocking`]), and then under
//! every weaker model.

mod gathers;
mod infer;
mod messages;
mod options;
mod sharding;
mod slots;
mod ties;
mod times;

pub use options::{Lowering, OptimizerStep, ReduceTiming};
pub(crate) use ties::Ties;

use super::action::Action;
use super::program::{CommModel, Header, Schedule};
use crate::error::{PlanError, Result};
use messages::Messages;
use sharding::Sharding;
use slots::Slots;
use times::Times;

impl Schedule {
    /// The schedule with its communication, and with the gathers, reductions and optimizer steps that `lowering` asks
    /// for. Neighbouring stages on one rank exchange nothing.
    ///
    /// # Errors
    /// [`PlanError::BadAction`] for an action that can never run: on the wrong rank, twice, before what it needs, or in
    /// a cycle of ranks that wait for each other. [`PlanError::BadLowering`] for a schedule that is lowered already,
    /// and for options that do not fit it.
    pub fn lower(&self, lowering: &Lowering) -> Result<Self> {
        if self.is_lowered() {
            let reason = "it is lowered already: lower the schedule that it was made from".to_owned();
            return Err(PlanError::BadLowering { reason });
        }
        lowering.check(self.placement())?;
        let times = Times::new(self, lowering.receives_ahead)?;
        let (mut messages, mut slots) = (Messages::new(&times, lowering.receives_ahead), Slots::new(self));
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
        let receives_ahead = lowering.receives_ahead.max(slots.most_ahead());
        Self::new_lowered(header, programs, Lowering { receives_ahead, ..lowering.clone() })
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
    let mut lowered = Vec::with_capacity(program.len() + messages.len() + sharding.len());
    let (mut messages, mut sharding) = (messages.iter().peekable(), sharding.iter().peekable());
    for (position, &action) in (0_u32..).zip(program) {
        let due = |inserted: &&Inserted| inserted.gap <= position;
        while let Some(inserted) = messages.next_if(due) {
            lowered.push(inserted.action);
        }
        while let Some(inserted) = sharding.next_if(due) {
            lowered.push(inserted.action);
        }
        lowered.push(action);
    }
    lowered.extend(messages.chain(sharding).map(|inserted| inserted.action));
    lowered
}
