//! The search for a good reference pattern and rule.

use super::greedy::{Rule, schedule_list};
use super::pattern::Pattern;
use super::problem::{Order, Problem};
use super::rng::Rng;
use super::timing::{Goal, Timing, Workspace};

/// The best that a search has found.
pub(crate) struct Found {
    pub(crate) order: Order,
    pub(crate) timing: Timing,
    pub(crate) score: f64,
}

/// A pattern and a rule, and how good what they make is.
#[derive(Clone, Debug)]
pub(crate) struct Ranked {
    pub(crate) score: f64,
    pub(crate) pattern: Pattern,
    pub(crate) rule: Rule,
}

/// Tries patterns and rules until a budget of placed ops is used up.
pub(crate) struct PatternSearch<'a> {
    problem: &'a Problem,
    goal: Goal,
    space: Workspace,
    budget: usize,
    pub(crate) best: Option<Found>,
}

impl<'a> PatternSearch<'a> {
    /// `budget` counts ops, each time one is placed.
    pub(crate) fn new(problem: &'a Problem, budget: usize, goal: Goal) -> Self {
        Self { problem, goal, space: Workspace::new(problem), budget, best: None }
    }

    /// Schedules a pattern by a rule; infinite if it does not fit into the caps.
    pub(crate) fn try_pattern(&mut self, pattern: &Pattern, rule: Rule) -> f64 {
        let mut order = pattern.order(self.problem);
        self.try_list(&mut order, rule)
    }

    /// Schedules forwards and input gradients in a given order.
    pub(crate) fn try_order(&mut self, order: &[Vec<super::Op>], rule: Rule) -> f64 {
        self.try_list(&mut order.to_vec(), rule)
    }

    fn try_list(&mut self, order: &mut Order, rule: Rule) -> f64 {
        self.budget = self.budget.saturating_sub(self.problem.num_ops());
        let Some((order, timing)) = schedule_list(self.problem, order, rule, &mut self.space) else {
            return f64::INFINITY;
        };
        let score = self.goal.score(&timing);
        if self.best.as_ref().is_none_or(|best| score < best.score) {
            self.best = Some(Found { order, timing, score });
        }
        score
    }

    /// Whether the budget is used up, or nothing can be better than what was found.
    pub(crate) fn is_over(&self, least: f64) -> bool {
        self.budget == 0 || self.best.as_ref().is_some_and(|best| best.score <= least)
    }

    /// Tries every pattern with every rule, then improves the best few by random steps. Stops at a score of `least`.
    /// Gives what fits, the best first: both the given patterns and the improved ones.
    pub(crate) fn run(&mut self, patterns: &[Pattern], rules: &[Rule], least: f64) -> Vec<Ranked> {
        let mut ranked: Vec<Ranked> = Vec::new();
        for pattern in patterns {
            let mut best: Option<(f64, Rule)> = None;
            for &rule in rules {
                if self.is_over(least) {
                    break;
                }
                let score = self.try_pattern(pattern, rule);
                if best.is_none_or(|(other, _)| score < other) {
                    best = Some((score, rule));
                }
            }
            ranked.extend(best.map(|(score, rule)| Ranked { score, pattern: pattern.clone(), rule }));
        }
        ranked.sort_by(|a, b| a.score.total_cmp(&b.score));
        for nth in 0..ranked.len().min(Self::CLIMBS) {
            let share = self.budget / (Self::CLIMBS - nth);
            let mut start = ranked[nth].clone();
            self.climb(&mut start, self.budget - share, least);
            ranked.push(start);
        }
        ranked.retain(|ranked| ranked.score.is_finite());
        ranked.sort_by(|a, b| a.score.total_cmp(&b.score));
        ranked.dedup_by(|a, b| a.pattern == b.pattern);
        ranked
    }

    /// From how many of the best starts to climb.
    const CLIMBS: usize = 4;

    /// Changes one or two steps or the rule at a time and keeps what is not worse, until the budget has come down to
    /// `floor`.
    fn climb(&mut self, start: &mut Ranked, floor: usize, least: f64) {
        let rules: Vec<Rule> = Rule::all().collect();
        let mut rng = Rng::new(1);
        while self.budget > floor && !self.is_over(least) {
            let mut other = start.clone();
            if rng.unit() < 0.15 {
                other.rule = rules[rng.below(rules.len())];
            } else {
                for _ in 0..=rng.below(2) {
                    let step = rng.below(other.pattern.steps.len());
                    let size = if rng.unit() < 0.5 { 0.4 } else { 2.0 };
                    let moved: f64 = other.pattern.steps[step] + (rng.unit() - 0.5) * size;
                    other.pattern.steps[step] = moved.max(0.05);
                }
            }
            other.score = self.try_pattern(&other.pattern, other.rule);
            if other.score <= start.score {
                *start = other;
            }
        }
    }
}
