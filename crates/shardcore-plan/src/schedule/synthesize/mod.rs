//! Schedules made for given costs: from measured times, a latency and a memory cap to a schedule, and a proof of how far
//! it can be from the best.
//!
//! 1. All named schedules of the placement that fit under the cap are candidates, so the result is never worse; and so
//!    are one micro-batch after another and, for slow hops, one stage after another.
//! 2. List scheduling of reference patterns with several rules looks for more, as for the V schedules
//!    ([`v_shape`](super::generate::v_shape)).
//! 3. Where a backward in one piece takes less, those for which nobody waits are fused.
//! 4. A local search moves, splits and fuses ops that lie on the critical path.
//!
//! The search counts work, not time, and draws its random numbers from a fixed seed: the same request gives the same
//! schedule on every machine. Planning again after a profile is one call.

mod bound;
mod candidates;
mod fusing;

use super::costs::{CostSpec, Costs};
use super::list::{
    Budget, Found, Goal, Improver, Objective, Order, Pattern, PatternSearch, Problem, Rule, Timing, Workspace,
};
use super::placement::Placement;
use super::program::{Header, Schedule};
use crate::error::{PlanError, Result};

/// What a schedule is wanted for.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Where the stages are: one chain.
    pub placement: Placement,
    /// Micro-batches of one step.
    pub num_microbatches: u32,
    /// Times, latency and sizes. `fused_backward` says what an input and a weight gradient take in one piece; `None`: as
    /// much as one after the other. The schedule fuses those for which it pays, in time or in memory: one piece needs no
    /// stash.
    pub costs: CostSpec,
    /// The most that each rank may hold, in the unit of the sizes; `None` for no limit.
    pub memory_cap: Option<Vec<f64>>,
    /// What is to be short.
    pub objective: Objective,
}

impl Request {
    /// A request for the shortest makespan, with no limit on memory.
    #[must_use]
    pub fn new(placement: Placement, num_microbatches: u32, costs: CostSpec) -> Self {
        Self { placement, num_microbatches, costs, memory_cap: None, objective: Objective::Makespan }
    }

    /// The same with one cap for all ranks.
    #[must_use]
    pub fn with_cap(self, cap: f64) -> Self {
        let memory_cap = Some(vec![cap; self.placement.num_ranks() as usize]);
        Self { memory_cap, ..self }
    }

    /// The same with another objective.
    #[must_use]
    pub fn with_objective(self, objective: Objective) -> Self {
        Self { objective, ..self }
    }
}

/// A schedule and how good it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Synthesis {
    /// The best schedule found.
    pub schedule: Schedule,
    /// What it takes: its makespan or span, as asked for.
    pub value: f64,
    /// No schedule of this placement takes less under these costs and caps.
    pub lower_bound: f64,
    /// How much longer the schedule takes than the bound, as a part of the bound: 0.03 is 3%.
    pub gap: f64,
    /// What found it: the name of a schedule, `one-by-one` (one micro-batch after another), `breadth-first` (all
    /// forwards stage by stage, then all backwards), `list-scheduling` or `local-search`.
    pub found_by: &'static str,
}

/// Makes a schedule for given costs.
///
/// # Errors
/// [`PlanError::OutOfRange`] for counts; [`PlanError::BadCost`] for costs and caps that are negative, not a number, or
/// not one for each stage or rank; [`PlanError::CapTooSmall`] where a rank cannot hold even one micro-batch;
/// [`PlanError::OneChain`] for a bidirectional placement.
pub fn synthesize(request: &Request) -> Result<Synthesis> {
    let problem = problem_of(request)?;
    let lower_bound = bound::lower_bound(&problem, request.objective);
    // Sums in another order differ by a few bits.
    let best = search(request, &problem, lower_bound * (1.0 + 1e-12))?;
    let header = Header::new("synthesized", request.placement.clone(), request.num_microbatches);
    let schedule = Schedule::new(header, problem.programs(&best.order))?;
    let value = best.timing.value(request.objective);
    let lower_bound = lower_bound.min(value);
    let gap = if value > lower_bound { value / lower_bound - 1.0 } else { 0.0 };
    Ok(Synthesis { schedule, value, lower_bound, gap, found_by: best.found_by })
}

/// Checks a request and brings it into the form of list scheduling.
fn problem_of(request: &Request) -> Result<Problem> {
    let Request { placement, num_microbatches, costs, memory_cap, .. } = request;
    if *num_microbatches == 0 {
        return Err(PlanError::num_microbatches(0));
    }
    if placement.num_chains() != 1 {
        return Err(PlanError::OneChain);
    }
    Header::new("synthesized", placement.clone(), *num_microbatches).check()?;
    Problem::check_placement(placement)?; // Before the costs of every stage are worked out.
    let num_ranks = placement.num_ranks() as usize;
    let caps = memory_cap.clone().unwrap_or_else(|| vec![f64::INFINITY; num_ranks]);
    if caps.len() != num_ranks {
        let (what, expected) =
            (format!("memory_cap (a list of {})", caps.len()), format!("one entry for each of the {num_ranks} ranks"));
        return Err(PlanError::BadCost { what, expected });
    }
    if let Some(rank) = caps.iter().position(|cap| cap.is_nan() || *cap < 0.0) {
        let (what, expected) =
            (format!("memory_cap of rank {rank} = {}", caps[rank]), "a number of at least 0".to_owned());
        return Err(PlanError::BadCost { what, expected });
    }
    let problem = Problem::new(placement, &Costs::new(costs, placement, 1)?, *num_microbatches, caps.clone())?;
    check_sums(&problem)?;
    for (rank, cap) in caps.into_iter().enumerate() {
        if problem.least_memory(rank) > problem.cap[rank] {
            return Err(cap_too_small(&problem, rank, cap));
        }
    }
    Ok(problem)
}

/// Refuses costs of which no double holds the sum, so that every time and size of every order is a finite number.
fn check_sums(problem: &Problem) -> Result<()> {
    #[expect(clippy::cast_precision_loss, reason = "at most 2^24 micro-batches")]
    let num_microbatches = problem.num_microbatches as f64;
    let of_stage =
        |stage: usize| problem.time.iter().map(|times| times[stage]).sum::<f64>() + 2.0 * problem.hop_before[stage];
    let time: f64 = (0..problem.num_stages()).map(of_stage).sum();
    let memory: f64 = problem.activation.iter().chain(&problem.stash).sum();
    for (what, sum) in [("times", time), ("sizes", memory)] {
        // A little less than the largest double, because sums in another order round in another way.
        if !(4.0 * sum * num_microbatches).is_finite() {
            let what = format!("{what}: their sum is beyond what a double can hold");
            return Err(PlanError::BadCost { what, expected: "numbers in a larger unit".to_owned() });
        }
    }
    Ok(())
}

fn cap_too_small(problem: &Problem, rank: usize, cap: f64) -> PlanError {
    PlanError::CapTooSmall { rank, cap: cap.to_string(), needed: problem.least_memory(rank).to_string() }
}

/// An order and how long it takes.
struct Candidate {
    order: Order,
    timing: Timing,
    found_by: &'static str,
}

impl Candidate {
    /// The same, or what a search makes of it if that is better.
    fn improved(self, problem: &Problem, goal: Goal, search: impl FnOnce(&mut Improver)) -> Self {
        let Some(mut improver) = Improver::new(problem, &self.order, goal, 1) else { return self };
        search(&mut improver);
        let (order, timing) = improver.into_best();
        if goal.score(&timing) < goal.score(&self.timing) { Self { order, timing, ..self } } else { self }
    }
}

/// How many candidates are fused as far as can be.
const FUSED: usize = 3;

const LIST_SCHEDULING: Budget = Budget { ops: 4_000_000, orders: 2_000 };
const LOCAL_SEARCH: Budget = Budget { ops: 10_000_000, orders: 10_000 };
const FUSING: Budget = Budget { ops: 18_000_000, orders: 18_000 };

/// The ops that a part of the search may place. Where a backward in one piece takes another time than a split one, half:
/// the search for equal times has had as much.
fn share(budget: &Budget, problem: &Problem) -> usize {
    if problem.with_plain_backward().is_some() { budget.on(problem) / 2 } else { budget.on(problem) }
}

fn search(request: &Request, problem: &Problem, lower_bound: f64) -> Result<Candidate> {
    let goal = Goal::of(request.objective);
    let mut found = candidates(request, problem, lower_bound)?;
    let fuses = problem.any_fusing_pays();
    if !found.iter().any(|candidate| goal.score(&candidate.timing) <= lower_bound) {
        found.extend(at_plain_backwards(request, problem)?);
        if fuses {
            found = fused(problem, goal, found);
        }
    }
    let best = found.into_iter().min_by(|a, b| goal.score(&a.timing).total_cmp(&goal.score(&b.timing)));
    // One micro-batch after another fits, with backwards in one piece where need be: `problem_of` has checked it.
    let best = best.ok_or_else(|| cap_too_small(problem, 0, problem.cap[0]))?;
    let before = goal.score(&best.timing);
    if before <= lower_bound {
        return Ok(best);
    }
    let best = best.improved(problem, goal, |search| {
        search.run(share(&LOCAL_SEARCH, problem), lower_bound);
        if fuses {
            search.fuse_all(share(&FUSING, problem) / 4, false);
            search.fuse_all(share(&FUSING, problem) / 4, true);
        }
        search.split_critical(share(&FUSING, problem) / 4);
    });
    let found_by = if goal.score(&best.timing) < before { "local-search" } else { best.found_by };
    Ok(Candidate { found_by, ..best })
}

/// What is found where a backward in one piece takes as much as a split one, at the times given: as it is, and with those
/// split that take longer, so that knowing the times never makes a schedule longer.
fn at_plain_backwards(request: &Request, problem: &Problem) -> Result<Vec<Candidate>> {
    let Some(plain) = problem.with_plain_backward() else { return Ok(Vec::new()) };
    let lower_bound = bound::lower_bound(&plain, request.objective);
    let Candidate { order, found_by, .. } = search(request, &plain, lower_bound * (1.0 + 1e-12))?;
    let split = problem.with_dear_split(&order);
    let mut space = Workspace::new(problem);
    let orders = if split == order { vec![order] } else { vec![order, split] };
    let timed = |order: Order| space.replay(problem, &order).map(|timing| Candidate { order, timing, found_by });
    Ok(orders.into_iter().filter_map(timed).collect())
}

/// Candidates with backwards fused where nobody waits: of all those whose gradients are next to each other, and of the
/// best few of them more.
fn fused(problem: &Problem, goal: Goal, mut found: Vec<Candidate>) -> Vec<Candidate> {
    for (far, kept) in [(false, usize::MAX), (true, FUSED)] {
        found.sort_by(|a, b| goal.score(&a.timing).total_cmp(&goal.score(&b.timing)));
        found.truncate(kept);
        let each = share(&FUSING, problem) / found.len().max(1);
        let improved = |candidate: Candidate| candidate.improved(problem, goal, |search| search.fuse_all(each, far));
        found = found.into_iter().map(improved).collect();
    }
    found
}

/// All named schedules that fit, the best of list scheduling, and one stage after another where that is better than them:
/// elsewhere it would only take its share of the search.
fn candidates(request: &Request, problem: &Problem, lower_bound: f64) -> Result<Vec<Candidate>> {
    let (goal, mut space) = (Goal::of(request.objective), Workspace::new(problem));
    let named = candidates::named(request, problem)?.into_iter();
    let timed = |(order, found_by): (Order, &'static str)| {
        let timing = space.replay(problem, &order)?;
        Some(Candidate { order, timing, found_by })
    };
    let (by_stages, mut found): (Vec<Candidate>, Vec<Candidate>) =
        named.filter_map(timed).partition(|candidate| candidate.found_by == candidates::BREADTH_FIRST);
    let (patterns, rules) = (candidates::patterns(request, problem), Rule::all().collect::<Vec<Rule>>());
    let variants = promising(problem, &patterns, goal, lower_bound);
    for variant in &variants {
        let mut lists = PatternSearch::new(variant, share(&LIST_SCHEDULING, problem) / variants.len(), goal);
        lists.run(&patterns, &rules, lower_bound);
        found.extend(lists.best.map(|Found { order, timing, .. }| Candidate {
            order,
            timing,
            found_by: "list-scheduling",
        }));
    }
    let score = |candidate: &Candidate| goal.score(&candidate.timing);
    let least = found.iter().map(score).fold(f64::INFINITY, f64::min);
    found.extend(by_stages.into_iter().filter(|candidate| score(candidate) < least));
    Ok(found)
}

/// How many choices of what to fuse the search goes into.
const VARIANTS: usize = 2;

/// The part of the budget that it takes to compare the choices.
const COMPARED: usize = 24;

/// The problem with no more backwards in one piece than the caps need; where fusing takes less time or memory, the best
/// of some more choices.
fn promising(problem: &Problem, patterns: &[Pattern], goal: Goal, lower_bound: f64) -> Vec<Problem> {
    let variants: Vec<Problem> = fusing::choices(problem).into_iter().map(|choice| problem.cautious(choice)).collect();
    if variants.len() == 1 {
        return variants;
    }
    let rules: Vec<Rule> = Rule::few().collect();
    let score = |variant: &Problem| {
        let mut lists = PatternSearch::new(variant, share(&LIST_SCHEDULING, problem) / COMPARED, goal);
        lists.run(patterns, &rules, lower_bound);
        lists.best.map_or(f64::INFINITY, |best| best.score)
    };
    let mut scored: Vec<(f64, Problem)> = variants.into_iter().map(|variant| (score(&variant), variant)).collect();
    scored.sort_by(|a, b| a.0.total_cmp(&b.0));
    scored.into_iter().map(|(_, variant)| variant).take(VARIANTS).collect()
}
