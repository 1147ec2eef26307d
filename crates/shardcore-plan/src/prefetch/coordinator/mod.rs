//! Answers the hooks of a running step: start these gathers, wait for this one, release those.
//!
//! The first step of a kind is recorded, with each unit gathered when it is used. From then on the hooks follow the
//! plan of that trace. A use that the plan does not have next departs from it: uses left out are passed over, a use too
//! many is gathered on demand, and the plan goes on where it meets the step again. What departed is planned anew for
//! the next step.
//!
//! Whatever the hooks do, a unit is started only while it is away, waited for before it is used, and released once;
//! gathered units never take more than the budget; and answers follow from the hooks so far alone, so that ranks with
//! the same hooks run the same collectives in the same order.

mod residents;
mod step;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{PlanError, Result};
use crate::prefetch::plan::{Limits, Objective, PrefetchPlan, budget_too_small};
use crate::prefetch::trace::{GatherUnit, Phase, Trace, Use, check_units};

use residents::Residents;
use step::{Program, Step};

/// Plans remembered for each kind of step, so that steps which alternate are not planned again and again.
const NUM_REMEMBERED: usize = 8;

/// What a hook has to do, in this order: release, start, wait.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Units to release; one whose gather is under way is waited for first.
    pub release: Vec<usize>,
    /// Units whose gather to start, in this order.
    pub start: Vec<usize>,
    /// Whether the gather of the unit that is entered must be waited for.
    pub wait: bool,
}

impl Answer {
    fn clear(&mut self) {
        self.release.clear();
        self.start.clear();
        self.wait = false;
    }
}

/// A finished step that has no plan yet.
#[derive(Clone, Debug)]
pub struct Recorded {
    kind: String,
    units: Vec<GatherUnit>,
    uses: Vec<Use>,
    limits: Limits,
    objective: Objective,
}

impl Recorded {
    /// Plans the step for the next of its kind.
    ///
    /// # Errors
    /// [`PlanError::TraceTooLarge`].
    pub fn plan(&self) -> Result<PrefetchPlan> {
        PrefetchPlan::new(Trace::new(self.units.clone(), self.uses.clone())?, self.limits, self.objective, None)
    }
}

/// Follows the plan of each step, and records what the step does.
#[derive(Clone, Debug)]
pub struct Coordinator {
    units: Vec<GatherUnit>,
    limits: Limits,
    objective: Objective,
    /// For each kind of step its plans, the one in force first.
    programs: BTreeMap<String, Vec<Arc<Program>>>,
    step: Option<Step>,
    /// The step that ended last: its kind and uses.
    finished: Option<(String, Vec<Use>)>,
    residents: Residents,
    answer: Answer,
    num_departures: u64,
    last_departure: Option<String>,
}

impl Coordinator {
    /// A coordinator of `units`, which gathers nothing before the first step.
    ///
    /// # Errors
    /// [`PlanError::DuplicateUnit`], [`PlanError::UnitAboveBudget`], and [`PlanError::TraceTooLarge`] for units of
    /// more than 2^63 - 1 bytes together.
    pub fn new(units: Vec<GatherUnit>, limits: Limits, objective: Objective) -> Result<Self> {
        check_units(&units)?;
        let budget = limits.budget.unwrap_or(u64::MAX);
        let largest = units.iter().max_by_key(|unit| unit.nbytes);
        if let Some(unit) = largest.filter(|unit| unit.nbytes > budget) {
            return Err(PlanError::UnitAboveBudget { budget, name: unit.name.clone(), nbytes: unit.nbytes });
        }
        // One use of each: the sum of all sizes is checked there.
        Trace::new(units.clone(), (0..units.len()).map(|unit| Use::new(unit, Phase::Forward)).collect())?;
        Ok(Self {
            residents: Residents::new(&units),
            units,
            limits,
            objective,
            programs: BTreeMap::new(),
            step: None,
            finished: None,
            answer: Answer::default(),
            num_departures: 0,
            last_departure: None,
        })
    }

    /// A step begins. Steps of one `kind`, such as `"train"` and `"eval"`, share a plan. A step that is still running
    /// ends here as by [`Coordinator::end`].
    pub fn begin(&mut self, kind: &str) -> &Answer {
        self.end();
        self.plan_recorded();
        let program = self.programs.get(kind).and_then(|known| known.first()).cloned();
        let mut step = Step::new(kind.to_owned(), program);
        step.start_ahead(&mut self.residents, self.limits.optional_nbytes(), &mut self.answer);
        self.step = Some(step);
        &self.answer
    }

    /// A use of `unit` begins.
    ///
    /// # Errors
    /// [`PlanError::UnitOutOfRange`], [`PlanError::NoStep`], and [`PlanError::BudgetTooSmall`] if the unit does not
    /// fit beside those in use. Nothing has changed then.
    pub fn enter(&mut self, unit: usize, phase: Phase) -> Result<&Answer> {
        self.check_unit(unit)?;
        let Some(step) = &mut self.step else {
            return Err(PlanError::NoStep { name: self.units[unit].name.clone() });
        };
        let budget = self.limits.budget.unwrap_or(u64::MAX);
        if !self.residents.fits_beside_used(unit, budget) {
            let others = self.residents.used().map(|other| &self.units[other]);
            let index = step.num_uses();
            return Err(budget_too_small(budget, index, phase, &self.units[unit], others, 0));
        }
        self.answer.clear();
        let stays = match step.follow(unit, phase, &mut self.residents, &mut self.answer) {
            Some(place) => Some(step.keeps(place)),
            None => self.residents.stays_after_extra_use(unit),
        };
        self.residents.demand(unit, budget, &mut self.answer, |other| step.next_need(other));
        step.note(unit, phase, stays, &mut self.residents);
        step.start_ahead(&mut self.residents, self.limits.optional_nbytes(), &mut self.answer);
        self.answer.wait = self.residents.wait(unit);
        Ok(&self.answer)
    }

    /// The use of `unit` that began last ends.
    ///
    /// # Errors
    /// [`PlanError::UnitOutOfRange`], and [`PlanError::NotInUse`] if there is no such use.
    pub fn leave(&mut self, unit: usize, phase: Phase) -> Result<&Answer> {
        self.check_unit(unit)?;
        if !self.step.as_mut().is_some_and(|step| step.close(unit, phase)) {
            return Err(PlanError::NotInUse { name: self.units[unit].name.clone(), phase: phase.name() });
        }
        self.answer.clear();
        self.residents.leave(unit, &mut self.answer);
        Ok(&self.answer)
    }

    /// The step is over: everything is released, and uses that are still open end. Without a step nothing happens.
    pub fn end(&mut self) -> &Answer {
        self.answer.clear();
        if let Some(step) = self.step.take() {
            self.residents.release_all(&mut self.answer);
            if let Some(departure) = step.departure() {
                self.num_departures += 1;
                self.last_departure = Some(departure.describe(&self.units));
            }
            self.finished = Some(step.finish());
        }
        &self.answer
    }

    /// The step has failed: everything is released as by [`Coordinator::end`], and what was recorded is forgotten.
    pub fn reset(&mut self) -> &Answer {
        self.answer.clear();
        self.step = None;
        self.residents.release_all(&mut self.answer);
        &self.answer
    }

    /// What the step that ended last did, unless a plan of it is in force or was remembered. To be planned and given
    /// to [`Coordinator::adopt`]; a step without a plan gathers on demand.
    pub fn recorded(&mut self) -> Option<Recorded> {
        let (kind, uses) = self.finished.take().filter(|(_, uses)| !uses.is_empty())?;
        let known = self.programs.entry(kind.clone()).or_default();
        if let Some(position) = known.iter().position(|program| program.plan().trace().uses() == uses) {
            known[..=position].rotate_right(1); // The last step's plan is the one in force.
            return None;
        }
        Some(Recorded { kind, units: self.units.clone(), uses, limits: self.limits, objective: self.objective })
    }

    /// Follows `plan` from the next step of its kind on.
    pub fn adopt(&mut self, recorded: Recorded, plan: PrefetchPlan) {
        let known = self.programs.entry(recorded.kind).or_default();
        known.truncate(NUM_REMEMBERED - 1);
        known.insert(0, Arc::new(Program::new(plan)));
    }

    /// Plans what the step that ended last recorded, if it has to be; [`Coordinator::begin`] does so too.
    pub fn plan_recorded(&mut self) {
        if let Some(recorded) = self.recorded() {
            // A step whose sizes add up to more than 2^63 - 1 bytes has no plan: it stays on demand.
            if let Ok(plan) = recorded.plan() {
                self.adopt(recorded, plan);
            }
        }
    }

    /// The plan that the next step of this kind follows.
    #[must_use]
    pub fn plan(&self, kind: &str) -> Option<&PrefetchPlan> {
        self.programs.get(kind).and_then(|known| known.first()).map(|program| program.plan())
    }

    /// The units.
    #[must_use]
    pub fn units(&self) -> &[GatherUnit] {
        &self.units
    }

    /// Bytes that are gathered or on their way now.
    #[must_use]
    pub fn live_nbytes(&self) -> u64 {
        self.residents.live_nbytes()
    }

    /// Steps that departed from their plan.
    #[must_use]
    pub fn num_departures(&self) -> u64 {
        self.num_departures
    }

    /// Where the last step that departed first did so, in words.
    #[must_use]
    pub fn last_departure(&self) -> Option<&str> {
        self.last_departure.as_deref()
    }

    fn check_unit(&self, unit: usize) -> Result<()> {
        let num_units = self.units.len();
        if unit < num_units { Ok(()) } else { Err(PlanError::UnitOutOfRange { unit: unit as i128, num_units }) }
    }
}
