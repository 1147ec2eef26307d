//! Schedules on the V placement, where rank `r` holds the stages `r` and `2p - 1 - r`.
//!
//! Their orders are not closed forms. Each comes from reference patterns (building blocks that repeat at the pace of
//! the busiest rank; Qi et al., "Pipeline Parallelism with Controllable Memory", 2024, section 3), made tight by list
//! scheduling under the schedule's memory as a hard cap. Weight gradients go where there is room. Costs guide all of
//! it, so a pattern that suits them is looked for; equal costs start from patterns known to be good.

use super::super::costs::{Amount, CostSpec, Costs};
use super::super::list::{
    Budget, Found, Goal, Improver, Op, OpKind, Order, Pattern, PatternSearch, Problem, Ranked, Rule,
};
use super::super::placement::Placement;
use super::super::program::{Header, Schedule};
use crate::error::{PlanError, Result};

/// A schedule on the V placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum VSchedule {
    /// Zero bubble between a rank's first and last action at equal costs, in the memory of 1F1B (Qi et al., "Zero
    /// Bubble Pipeline Parallelism", 2024, section 6).
    ZeroBubble,
    /// Half of that memory (Qi et al., "Pipeline Parallelism with Controllable Memory", 2024, section 4.2).
    Half,
    /// A third of it (the same).
    Min,
}

impl VSchedule {
    /// The name in text: `zb-v`, `v-half`, `v-min`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ZeroBubble => "zb-v",
            Self::Half => "v-half",
            Self::Min => "v-min",
        }
    }

    /// The most micro-batches whose activations a rank holds; each is two chunks of half the size.
    #[must_use]
    pub fn peak(self, num_ranks: u32) -> u32 {
        match self {
            Self::ZeroBubble => num_ranks,
            Self::Half => num_ranks / 2 + 1,
            Self::Min => num_ranks.saturating_add(4) / 3,
        }
    }

    /// Steps of building blocks, as in [`Pattern`] without its turns. They add up to the schedule's share of memory:
    /// 12, 6 or 4 for all, a half and a third of 1F1B's.
    fn steps(self) -> &'static [[u32; 4]] {
        match self {
            Self::ZeroBubble => &[[4, 2, 2, 4], [2, 4, 4, 2], [3, 3, 3, 3], [2, 3, 3, 4]],
            Self::Half => &[[1, 2, 2, 1], [2, 1, 1, 2], [1, 2, 1, 2], [2, 1, 2, 1]],
            Self::Min => &[[1, 1, 1, 1]],
        }
    }

    /// Building blocks that suit equal costs: those that repeat every six units with no two ops of a rank at one time,
    /// the shortest first, and a few that list scheduling makes good.
    fn patterns(self, num_ranks: u32) -> Vec<Pattern> {
        let turns = (0..216).map(|turn| [turn / 36 + 1, turn / 6 % 6 + 1, turn % 6 + 1]);
        let blocks =
            turns.flat_map(|turns| self.steps().iter().map(move |&steps| (turns.iter().sum::<u32>(), steps, turns)));
        let mut fitting: Vec<(u32, [u32; 4], [u32; 3])> =
            blocks.filter(|&(_, steps, turns)| is_free_of_collisions(num_ranks, steps, turns)).collect();
        fitting.sort_unstable();
        fitting.truncate(12);
        let blocks = fitting.into_iter().map(|(_, steps, turns)| {
            let all: [&[u32]; 2] = [&steps, &turns];
            Pattern { steps: all.concat().into_iter().map(f64::from).collect() }
        });
        let known: &[&[f64]] = match self {
            Self::ZeroBubble => &[&[2.3, 3.5, 3.3, 2.5, 3.8, 1.5, 0.9]],
            Self::Half => &[
                &[1.0, 2.0, 2.0, 1.0, 2.0, 4.0, 4.0],
                &[1.0, 2.0, 2.0, 1.0, 4.0, 1.0, 5.0, 2.0, 2.0],
                &[0.86, 2.09, 2.06, 1.02, 5.67, 2.35, 3.25],
                &[1.07, 1.92, 2.12, 1.26, 3.82, 1.97, 3.63],
                &[2.18, 1.4, 1.7, 2.04, 1.05, 1.52, 0.05],
            ],
            Self::Min => &[&[1.2, 1.2, 1.3, 0.8, 1.0, 2.3, 1.8], &[1.2, 2.0, 1.9, 1.2, 2.0, 2.4, 3.1]],
        };
        known.iter().map(|steps| Pattern { steps: steps.to_vec() }).chain(blocks).collect()
    }
}

/// Whether a placement is the V.
pub(crate) fn is_v(placement: &Placement) -> bool {
    Placement::v_shape(placement.num_ranks()).is_ok_and(|v| v == *placement)
}

/// The building blocks of all three schedules.
pub(crate) fn all_patterns(num_ranks: u32) -> Vec<Pattern> {
    [VSchedule::ZeroBubble, VSchedule::Half, VSchedule::Min].iter().flat_map(|v| v.patterns(num_ranks)).collect()
}

/// Whether the two forwards and two input gradients of every rank fall on different units of the six that repeat.
fn is_free_of_collisions(num_ranks: u32, [down, up, grad_up, grad_down]: [u32; 4], turns: [u32; 3]) -> bool {
    let last = num_ranks - 1;
    (0..num_ranks.min(6)).all(|rank| {
        let back = last - rank;
        let forward = down * rank;
        let second = down * last + turns[0] + up * back;
        let second_grad = down * last + turns[0] + up * last + turns[1] + grad_down * rank;
        let grad = second_grad - grad_down * rank + grad_down * last + turns[2] + grad_up * back;
        let units = [forward, second, second_grad, grad].map(|time| time % 6);
        (1..4).all(|index| !units[..index].contains(&units[index]))
    })
}

/// Builds a schedule on the V placement for any number of micro-batches. `None` for `costs` means equal ones.
///
/// # Errors
/// [`PlanError::OutOfRange`] for no ranks or micro-batches; [`PlanError::BadCost`] for costs that do not fit.
pub fn build(schedule: VSchedule, num_ranks: u32, num_microbatches: u32, costs: Option<&CostSpec>) -> Result<Schedule> {
    let placement = Placement::v_shape(num_ranks)?;
    if num_microbatches == 0 {
        return Err(PlanError::num_microbatches(num_microbatches));
    }
    let header = Header::new(schedule.name(), placement, num_microbatches);
    header.check()?;
    let mut costs = Costs::new(costs.unwrap_or(&CostSpec::default()), &header.placement, 1)?;
    // The schedule's memory is a count of micro-batches, whatever their size is.
    costs.activation.fill(1.0);
    costs.stash.fill(1.0);
    let cap = vec![2.0 * f64::from(schedule.peak(num_ranks)); num_ranks as usize];
    let problem = Problem::new(&header.placement, &costs, num_microbatches, cap)?;
    let order = find_order(schedule, &problem, &costs)?;
    let programs = problem.programs(&order);
    Schedule::new(header, programs)
}

/// Of the search for a pattern.
const PATTERNS: Budget = Budget { ops: 1_500_000, orders: 1_500 };

/// Of the local search after it.
const LOCAL_SEARCH: Budget = Budget { ops: 6_000_000, orders: 6_000 };

/// How many patterns and rules the search for a pattern should be able to try; on a smaller pipeline if need be.
const TRIALS: usize = 100;

/// The best of the known patterns, and of those that a search near them finds. The search runs on as many micro-batches
/// as it takes to fill and drain the pipeline and to repeat a while between, and on a shorter pipeline with the mean
/// costs where that is too many ops: a pattern is good or bad whatever the number of ranks is.
fn find_order(schedule: VSchedule, problem: &Problem, costs: &Costs) -> Result<Order> {
    let few = problem.num_microbatches.min(4 * problem.num_ranks);
    let sample = problem.with_microbatches(few);
    if sample.num_ops() * TRIALS > PATTERNS.ops {
        let short = shorter(schedule, problem, costs)?;
        let found = search_patterns(schedule, &short);
        return Ok(try_best(problem, &found).map_or_else(|| problem.one_by_one(), |found| found.order));
    }
    let mut found = search_patterns(schedule, &sample);
    if few < problem.num_microbatches {
        return Ok(try_best(problem, &found).map_or_else(|| problem.one_by_one(), |found| found.order));
    }
    let Some(found_best) = found.best.take() else { return Ok(problem.one_by_one()) };
    Ok(polish(problem, found_best, &found.ranked))
}

/// How many of the best patterns the local search starts from.
const STARTS: usize = 4;

/// Improves the orders of the best few patterns by local search for half of the budget, and the best of them for the
/// rest.
fn polish(problem: &Problem, best: Found, ranked: &[Ranked]) -> Order {
    let least = least_score(problem);
    let mut starts = vec![best.order];
    for ranked in ranked {
        let mut search = PatternSearch::new(problem, usize::MAX, Goal::BOTH);
        search.try_pattern(&ranked.pattern, ranked.rule);
        starts.extend(search.best.map(|found| found.order).filter(|order| !starts.contains(order)));
        if starts.len() == STARTS {
            break;
        }
    }
    let half = LOCAL_SEARCH.on(problem) / 2;
    let share = half / starts.len();
    let improve = |start: &Order| {
        let mut improver = Improver::new(problem, start, Goal::BOTH, 1)?;
        improver.run(share, least);
        Some(improver)
    };
    let improvers = starts.iter().filter_map(improve);
    let Some(mut best) =
        improvers.reduce(|best, other| if other.best_score() < best.best_score() { other } else { best })
    else {
        return starts.swap_remove(0);
    };
    best.run(half, least);
    best.into_best().0
}

/// What a search on a sample has found.
struct Lesson {
    best: Option<Found>,
    /// The rules for the fixed order of ZB-V, the best first.
    fixed: Vec<Rule>,
    ranked: Vec<Ranked>,
}

fn search_patterns(schedule: VSchedule, sample: &Problem) -> Lesson {
    let least = least_score(sample);
    let mut search = PatternSearch::new(sample, PATTERNS.on(sample), Goal::BOTH);
    let fixed = if schedule == VSchedule::ZeroBubble {
        rank_rules(&mut search, &zero_bubble_order(sample), least)
    } else {
        Vec::new()
    };
    let num_ranks = u32::try_from(sample.num_ranks).unwrap_or(u32::MAX);
    let rules: Vec<Rule> = Rule::few().collect();
    let ranked = search.run(&schedule.patterns(num_ranks), &rules, least);
    Lesson { best: search.best, fixed, ranked }
}

/// The same kind of pipeline with fewer ranks, each with the mean costs.
fn shorter(schedule: VSchedule, problem: &Problem, costs: &Costs) -> Result<Problem> {
    // Collisions depend on the number of ranks modulo 6.
    let num_ranks = 12 + u32::try_from(problem.num_ranks % 6).unwrap_or(0);
    let placement = Placement::v_shape(num_ranks)?;
    let mean = |values: &[f64]| {
        let count = f64::from(u32::try_from(values.len()).unwrap_or(u32::MAX));
        vec![values.iter().sum::<f64>() / count; placement.num_stages() as usize]
    };
    let spec = CostSpec {
        forward: mean(&costs.forward).into(),
        input_grad: mean(&costs.input_grad).into(),
        weight_grad: mean(&costs.weight_grad).into(),
        activation: Amount::PerRank(2.0),
        ..CostSpec::default().with_hop(costs.hop)
    };
    let num_microbatches = problem.num_microbatches.min(4 * num_ranks as usize);
    let cap = vec![2.0 * f64::from(schedule.peak(num_ranks)); num_ranks as usize];
    let num_microbatches = u32::try_from(num_microbatches).unwrap_or(u32::MAX);
    Problem::new(&placement, &Costs::new(&spec, &placement, 1)?, num_microbatches, cap)
}

/// The rules by how good they make an order, the best first.
fn rank_rules(search: &mut PatternSearch<'_>, order: &[Vec<Op>], least: f64) -> Vec<Rule> {
    let mut ranked: Vec<(f64, Rule)> = Vec::new();
    for rule in Rule::all() {
        ranked.push((search.try_order(order, rule), rule));
        if search.is_over(least) {
            break;
        }
    }
    ranked.retain(|(score, _)| score.is_finite());
    ranked.sort_by(|a, b| a.0.total_cmp(&b.0));
    ranked.into_iter().map(|(_, rule)| rule).collect()
}

/// Schedules the whole problem by the best that a sample has shown. Of many micro-batches, fewer are enough to choose.
fn try_best(problem: &Problem, lesson: &Lesson) -> Option<Found> {
    let mut whole = PatternSearch::new(problem, usize::MAX, Goal::BOTH);
    if let Some(&rule) = lesson.fixed.first() {
        whole.try_order(&zero_bubble_order(problem), rule);
    }
    let sample = problem.with_microbatches(problem.num_microbatches.min(2 * problem.num_ranks + 8));
    let mut trial = PatternSearch::new(&sample, PATTERNS.ops, Goal::BOTH);
    let mut ranked: Vec<(f64, &Ranked)> = Vec::new();
    for candidate in &lesson.ranked {
        ranked.push((trial.try_pattern(&candidate.pattern, candidate.rule), candidate));
        if ranked.len() > 1 && trial.is_over(0.0) {
            break;
        }
    }
    ranked.sort_by(|a, b| a.0.total_cmp(&b.0));
    let fits = |(_, ranked): &&(f64, &Ranked)| whole.try_pattern(&ranked.pattern, ranked.rule).is_finite();
    let _ = ranked.iter().find(fits);
    whole.best
}

/// A score that no schedule is below: every rank does its work, and starts when the first input can have reached it.
fn least_score(problem: &Problem) -> f64 {
    let mut reach = 0.0;
    let mut starts = vec![f64::INFINITY; problem.num_ranks];
    for (stage, &rank) in problem.rank_of.iter().enumerate() {
        reach += problem.hop_before[stage];
        starts[rank] = starts[rank].min(reach);
        reach += problem.time_of(OpKind::Forward, stage);
    }
    #[expect(clippy::cast_precision_loss, reason = "at most 2^24 micro-batches")]
    let num_microbatches = problem.num_microbatches as f64;
    let work = |rank| num_microbatches * problem.work(rank);
    let makespan = starts.iter().enumerate().map(|(rank, start)| start + work(rank)).fold(0.0, f64::max);
    makespan + num_microbatches * problem.interval()
}

/// The order of ZB-V at equal costs (Qi et al., 2024, figure 10), without its weight gradients: forwards down the V
/// until the last stage is reached, then one forward, one backward on each of the two chunks in turn. The
/// micro-batches that a small number lacks are left out.
fn zero_bubble_order(problem: &Problem) -> Order {
    let forward = |chunk| Op::new(OpKind::Forward, chunk);
    let grad = |chunk| Op::new(OpKind::InputGrad, chunk);
    let (num_ranks, num_microbatches) = (problem.num_ranks, problem.num_microbatches);
    let program = |rank: usize| {
        let after = num_ranks - rank;
        let warm_up = std::iter::repeat_n(vec![forward(0)], 2 * after - 1)
            .chain(std::iter::repeat_n(vec![forward(1), forward(0)], rank))
            .chain(std::iter::repeat_n(vec![forward(1), grad(1)], after));
        let steady = vec![forward(0), grad(0), forward(1), grad(1)];
        let blocks = warm_up.chain(std::iter::repeat_n(steady, num_microbatches.max(2 * num_ranks) - num_ranks));
        let mut left = [[num_microbatches; 2]; 2];
        let mut ops: Vec<Op> = blocks.flatten().collect();
        ops.extend((0..num_ranks).flat_map(|_| [grad(0), grad(1)]));
        ops.retain(|op| {
            let left = &mut left[usize::from(op.kind() != OpKind::Forward)][usize::from(op.chunk())];
            *left > 0 && {
                *left -= 1;
                true
            }
        });
        ops
    };
    (0..num_ranks).map(program).collect()
}
