//! The gather and release program of a step.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use crate::error::{PlanError, Result};
use crate::prefetch::keep::{self, Gap};
use crate::prefetch::simulate::{Cost, Simulation, simulate};
use crate::prefetch::trace::{GatherUnit, Hold, Phase, Trace};

/// What bounds a plan, in bytes of gathered units. The default bounds nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Limits {
    /// Gathered units never take more, in use or not; a step whose units in use alone take more cannot be planned.
    pub budget: Option<u64>,
    /// DeepSpeed's `stage3_prefetch_bucket_size`: no further gather starts ahead of its use while so much is gathered
    /// ahead already. 0 gathers each unit when it is used.
    pub prefetch_nbytes: Option<u64>,
    /// DeepSpeed's `stage3_max_live_parameters`: as the budget, for what is gathered ahead or kept. A unit in use is
    /// gathered whatever this says.
    pub max_live_nbytes: Option<u64>,
    /// DeepSpeed's `stage3_max_reuse_distance`: a unit is kept only if the uses before its next one are of no more
    /// bytes.
    pub max_reuse_nbytes: Option<u64>,
    /// DeepSpeed's `stage3_param_persistence_threshold`: units of up to so many bytes are kept from their first use
    /// to the end of the step, before all others and where the budget permits.
    pub persistence_nbytes: u64,
}

impl Limits {
    /// What units that are gathered ahead or kept may take, together with those in use.
    pub(crate) fn optional_nbytes(&self) -> u64 {
        let bound = |limit: Option<u64>| limit.unwrap_or(u64::MAX);
        bound(self.budget).min(bound(self.max_live_nbytes))
    }
}

/// What a plan makes small.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Objective {
    /// The bytes gathered. Units that are kept may leave no room to gather ahead.
    #[default]
    Bytes,
    /// The time that computation waits for gathers: keeps less where gathering ahead hides more.
    Time,
}

impl Objective {
    /// Reads `"bytes"` or `"time"`.
    ///
    /// # Errors
    /// [`PlanError::UnknownObjective`].
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "bytes" => Ok(Self::Bytes),
            "time" => Ok(Self::Time),
            _ => Err(PlanError::UnknownObjective { objective: name.to_owned() }),
        }
    }

    /// `"bytes"` or `"time"`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bytes => "bytes",
            Self::Time => "time",
        }
    }
}

/// One gather: starts when use `start` begins (or before), and must be complete when use `need` begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Gather {
    /// The unit.
    pub unit: usize,
    /// The use whose hook starts it.
    pub start: usize,
    /// The use that waits for it.
    pub need: usize,
}

/// Which gathers start at which use, and which units are released at the end of which.
///
/// Gathers start in the order in which they are needed, so a gather never waits behind one that is needed later, and
/// all ranks with the same trace run the same collectives in the same order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PrefetchPlan {
    trace: Trace,
    limits: Limits,
    objective: Objective,
    cost: Cost,
    program: Program,
    on_demand: Simulation,
    on_demand_nbytes: u64,
}

impl PrefetchPlan {
    /// Plans a step.
    ///
    /// 1. Units are kept between two uses where memory permits, for the most bytes saved: `keep`.
    /// 2. Every other use gathers its unit, as early as memory permits. This is the rule "conservative" of P. Cao, E.
    ///    Felten, A. Karlin, K. Li, "A study of integrated prefetching and caching strategies", SIGMETRICS 1995,
    ///    section 3: the replacements of the best demand paging, each at the first opportunity.
    ///
    /// With [`Objective::Bytes`] times and `cost` only say how long the program would take. With [`Objective::Time`]
    /// they choose how much room step 1 leaves to step 2. Without a `cost` it is [`Cost::balanced`].
    ///
    /// # Errors
    /// [`PlanError::BudgetTooSmall`] if the units in use at one moment are larger than the budget.
    pub fn new(trace: Trace, limits: Limits, objective: Objective, cost: Option<Cost>) -> Result<Self> {
        let planner = Planner::new(&trace, limits, cost.unwrap_or_else(|| Cost::balanced(&trace)));
        planner.check_budget()?;
        let program = planner.best(objective);
        let cost = planner.cost;
        let demanded = on_demand(&trace);
        let on_demand_nbytes = demanded.iter().map(|gather| trace.nbytes(gather.unit)).sum();
        let on_demand = simulate(&trace, cost, &demanded);
        Ok(Self { trace, limits, objective, cost, program, on_demand, on_demand_nbytes })
    }

    /// The trace that was planned.
    #[must_use]
    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    /// The limits that it was planned under.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// What it makes small.
    #[must_use]
    pub fn objective(&self) -> Objective {
        self.objective
    }

    /// What gathers are taken to cost.
    #[must_use]
    pub fn cost(&self) -> Cost {
        self.cost
    }

    /// All gathers, in the order in which they start.
    #[must_use]
    pub fn gathers(&self) -> &[Gather] {
        &self.program.gathers
    }

    /// For each use whether its unit stays gathered after it, until its next use.
    #[must_use]
    pub fn kept(&self) -> &[bool] {
        &self.program.kept
    }

    /// For each use the bytes gathered or on their way while it lasts.
    #[must_use]
    pub fn live_nbytes(&self) -> &[u64] {
        &self.program.live
    }

    /// The most bytes that are gathered or on their way at one moment.
    #[must_use]
    pub fn peak_nbytes(&self) -> u64 {
        self.program.live.iter().copied().max().unwrap_or(0)
    }

    /// Bytes of all gathers.
    #[must_use]
    pub fn gathered_nbytes(&self) -> u64 {
        self.program.gathers.iter().map(|gather| self.trace.nbytes(gather.unit)).sum()
    }

    /// Bytes that gathering at each use and releasing after it would gather.
    #[must_use]
    pub fn on_demand_nbytes(&self) -> u64 {
        self.on_demand_nbytes
    }

    /// How the step would run.
    #[must_use]
    pub fn simulation(&self) -> &Simulation {
        &self.program.simulation
    }

    /// How it would run with each unit gathered when it is used and released after.
    #[must_use]
    pub fn on_demand(&self) -> &Simulation {
        &self.on_demand
    }
}

/// Which gathers start when, what is kept, and what follows from that.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Program {
    gathers: Vec<Gather>,
    kept: Vec<bool>,
    live: Vec<u64>,
    simulation: Simulation,
}

/// The input of planning, and what all programs for it share.
struct Planner<'a> {
    trace: &'a Trace,
    limits: Limits,
    cost: Cost,
    holds: Vec<Hold>,
    /// Bytes in use while each use lasts.
    in_use: Vec<u64>,
}

impl<'a> Planner<'a> {
    fn new(trace: &'a Trace, limits: Limits, cost: Cost) -> Self {
        let holds = trace.holds();
        let mut in_use = vec![0; trace.uses().len()];
        for hold in &holds {
            add(&mut in_use[hold.start..hold.stop], trace.nbytes(hold.unit));
        }
        Self { trace, limits, cost, holds, in_use }
    }

    fn check_budget(&self) -> Result<()> {
        let smallest = self.in_use.iter().copied().max().unwrap_or(0);
        let budget = self.limits.budget.unwrap_or(u64::MAX);
        let Some(index) = self.in_use.iter().position(|&nbytes| nbytes > budget) else {
            return Ok(());
        };
        let units = self.trace.units();
        let used = self.trace.uses()[index];
        let others = self.holds.iter().filter(|hold| hold.start < index && index < hold.stop && hold.unit != used.unit);
        let others = others.map(|hold| &units[hold.unit]);
        Err(budget_too_small(budget, index, used.phase, &units[used.unit], others, smallest))
    }

    fn best(&self, objective: Objective) -> Program {
        let largest = self.holds.iter().map(|hold| self.trace.nbytes(hold.unit)).max().unwrap_or(0);
        let reserves: &[u64] = match objective {
            Objective::Bytes => &[0],
            Objective::Time => &[0, largest, largest.saturating_mul(2)],
        };
        let mut best = self.program(reserves[0]);
        for &reserve in &reserves[1..] {
            let other = self.program(reserve);
            if other.simulation.exposed() < best.simulation.exposed() {
                best = other;
            }
        }
        best
    }

    /// The program that keeps units where `reserve` bytes are left to gather ahead.
    fn program(&self, reserve: u64) -> Program {
        let mut live = self.in_use.clone();
        let keeps = self.choose_kept(reserve, &mut live);
        let gathers = self.place_gathers(&keeps, &mut live);
        let kept = kept_after(self.trace, &self.holds, &keeps);
        let simulation = simulate(self.trace, self.cost, &gathers);
        Program { gathers, kept, live, simulation }
    }

    /// Which holds keep their unit until its next one. Adds what is kept to `live`.
    fn choose_kept(&self, reserve: u64, live: &mut [u64]) -> Vec<bool> {
        let before = used_before(self.trace);
        let reach = u128::from(self.limits.max_reuse_nbytes.unwrap_or(u64::MAX));
        let (mut owners, mut gaps) = (Vec::new(), Vec::new());
        for (index, hold) in self.holds.iter().enumerate() {
            let Some(next) = hold.next.map(|next| &self.holds[next]) else { continue };
            let nbytes = self.trace.nbytes(hold.unit);
            let persistent = nbytes <= self.limits.persistence_nbytes;
            if persistent || before[next.start] - before[hold.stop] <= reach {
                owners.push(index);
                gaps.push(Gap { start: hold.stop, stop: next.start, nbytes, persistent });
            }
        }
        let limit = self.limits.optional_nbytes();
        let left = |&nbytes: &u64| limit.saturating_sub(nbytes).saturating_sub(reserve);
        let room: Vec<u64> = self.in_use.iter().map(left).collect();
        let mut keeps = vec![false; self.holds.len()];
        let chosen = keep::choose(&gaps, &room);
        for ((gap, owner), _) in gaps.iter().zip(owners).zip(chosen).filter(|(_, chosen)| *chosen) {
            keeps[owner] = true;
            add(&mut live[gap.start..gap.stop], gap.nbytes);
        }
        keeps
    }

    /// When each gather starts: as early as memory permits, and never before one that is needed earlier. Adds what
    /// is gathered ahead to `live`.
    fn place_gathers(&self, keeps: &[bool], live: &mut [u64]) -> Vec<Gather> {
        let mut earliest = vec![Some(0); self.holds.len()];
        for (hold, &keeps) in self.holds.iter().zip(keeps) {
            if let Some(next) = hold.next {
                earliest[next] = (!keeps).then_some(hold.stop);
            }
        }
        let limit = self.limits.optional_nbytes();
        let ahead_limit = self.limits.prefetch_nbytes.unwrap_or(u64::MAX);
        let mut ahead = vec![0; live.len()];
        let mut gathers: Vec<Gather> = Vec::with_capacity(self.holds.len());
        for (hold, earliest) in self.holds.iter().zip(earliest) {
            let Some(earliest) = earliest else { continue };
            let (nbytes, need) = (self.trace.nbytes(hold.unit), hold.start);
            let first = gathers.last().map_or(0, |gather| gather.start).max(earliest);
            let fits = |place: &usize| live[*place].checked_add(nbytes).is_some_and(|sum| sum <= limit);
            let reach = (first..need).rev().take_while(fits).last().unwrap_or(need);
            let start = (reach..need).find(|&place| ahead[place] < ahead_limit).unwrap_or(need);
            add(&mut live[start..need], nbytes);
            add(&mut ahead[start..need], nbytes);
            gathers.push(Gather { unit: hold.unit, start, need });
        }
        gathers
    }
}

fn add(places: &mut [u64], nbytes: u64) {
    for place in places {
        *place += nbytes;
    }
}

/// The error of units in use that are larger than the budget, with the sum written out.
pub(crate) fn budget_too_small<'a>(
    budget: u64,
    index: usize,
    phase: Phase,
    unit: &GatherUnit,
    others: impl Iterator<Item = &'a GatherUnit>,
    smallest: u64,
) -> PlanError {
    let mut sum = format!("{:?} ({} bytes)", unit.name, unit.nbytes);
    let mut needed = unit.nbytes;
    for other in others {
        let _ = write!(sum, " + {:?} ({} bytes)", other.name, other.nbytes); // Writing to a String cannot fail.
        needed = needed.saturating_add(other.nbytes);
    }
    PlanError::BudgetTooSmall { budget, index, phase: phase.name(), sum, needed, smallest: smallest.max(needed) }
}

/// Bytes of all uses before each place.
fn used_before(trace: &Trace) -> Vec<u128> {
    let mut before = vec![0];
    for (index, used) in trace.uses().iter().enumerate() {
        before.push(before[index] + u128::from(trace.nbytes(used.unit)));
    }
    before
}

/// For each use whether its unit stays gathered after it: inside a hold, and where the hold keeps it for the next.
fn kept_after(trace: &Trace, holds: &[Hold], keeps: &[bool]) -> Vec<bool> {
    let mut kept = vec![true; trace.uses().len()];
    holds.iter().zip(keeps).for_each(|(hold, &keeps)| kept[hold.last] = keeps);
    kept
}

/// The gathers of a step without a plan: each use gathers its unit unless it is in use already.
fn on_demand(trace: &Trace) -> Vec<Gather> {
    let mut in_use_until = vec![0; trace.units().len()];
    let mut gathers = Vec::with_capacity(trace.uses().len());
    for (index, used) in trace.uses().iter().enumerate() {
        if in_use_until[used.unit] <= index {
            gathers.push(Gather { unit: used.unit, start: index, need: index });
        }
        in_use_until[used.unit] = in_use_until[used.unit].max(index + used.span);
    }
    gathers
}
