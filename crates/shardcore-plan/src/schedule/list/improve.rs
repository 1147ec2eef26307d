//! Local search on an order: an op on the critical path moves, and what is not worse stays.

use super::problem::{Op, OpKind, Order, Problem};
use super::rng::Rng;
use super::timing::{Goal, Timing, Workspace};

/// Where an op stands: its rank and its position there.
type Place = (usize, usize);

/// How many moves the search tries before it starts again from its best. Many short rounds find more than a few long
/// ones: far from the best there is little to find.
const ROUND: usize = 48;

/// How much worse the score may become by one move, in units of an average op.
const MOST_WORSE: f64 = 0.5;

/// How often a backward is split or made whole, where that can be a gain.
const FLIPS: f64 = 0.15;

/// How far an op moves at most.
const FARTHEST: usize = 8;

/// On the critical path, an op waits for the one before it on its rank: it could run earlier, or that one later.
#[derive(Clone, Copy)]
struct Move {
    rank: usize,
    position: usize,
    /// The first position at which its inputs are there.
    earliest: usize,
    /// The last position of the one before it, ahead of what needs its result.
    latest: usize,
}

/// The state of a local search.
pub(crate) struct Improver<'a> {
    problem: &'a Problem,
    goal: Goal,
    space: Workspace,
    rng: Rng,
    order: Order,
    score: f64,
    /// Whether it may pay to have a backward in one piece.
    flips: bool,
    /// How the ops on the critical path could give way.
    moves: Vec<Move>,
    best: (f64, Order, Timing),
}

impl<'a> Improver<'a> {
    /// Starts from an order; `None` if it cannot be executed within the caps.
    pub(crate) fn new(problem: &'a Problem, order: &[Vec<Op>], goal: Goal, seed: u64) -> Option<Self> {
        let mut space = Workspace::new(problem);
        let timing = space.replay(problem, order)?;
        let score = score(&timing, goal);
        let best = (score, order.to_vec(), timing);
        let rng = Rng::new(seed);
        let may_fuse = |stage: usize| problem.fusing_pays(stage) || problem.stash[stage] > problem.activation[stage];
        let flips = (0..problem.num_stages()).any(may_fuse);
        let (order, moves) = (order.to_vec(), Vec::new());
        let mut search = Self { problem, goal, space, rng, order, score, flips, moves, best };
        search.find_critical();
        Some(search)
    }

    /// Moves ops until `budget` ops have been placed or the goal's score is at most `least`: in rounds, each from the
    /// best so far and at first ready to become worse.
    pub(crate) fn run(&mut self, budget: usize, least: f64) {
        let num_ops: usize = self.order.iter().map(Vec::len).sum();
        let most_worse = MOST_WORSE * self.problem.interval() / 3.0;
        for _ in 0..budget / num_ops.max(1) / ROUND {
            for step in 0..ROUND {
                if self.goal.score(&self.best.2) <= least || self.moves.is_empty() {
                    return;
                }
                #[expect(clippy::cast_precision_loss, reason = "a ratio")]
                let left = 1.0 - step as f64 / ROUND as f64;
                self.step(most_worse * left * left);
            }
            self.start_from_best();
        }
    }

    fn start_from_best(&mut self) {
        self.order.clone_from(&self.best.1);
        self.score = self.best.0;
        self.space.replay(self.problem, &self.order);
        self.find_critical();
    }

    /// The goal's score of the best order so far.
    pub(crate) fn best_score(&self) -> f64 {
        self.goal.score(&self.best.2)
    }

    /// The best order so far.
    pub(crate) fn into_best(self) -> (Order, Timing) {
        (self.best.1, self.best.2)
    }

    /// Makes a random move and keeps it if the score becomes worse by at most a random part of `most_worse`.
    fn step(&mut self, most_worse: f64) {
        let tolerance = most_worse * self.rng.unit();
        let Move { rank, position, earliest, latest } = self.moves[self.rng.below(self.moves.len())];
        if self.flips && self.rng.unit() < FLIPS {
            if flip(&mut self.order[rank], position) && !self.accept(tolerance) {
                flip(&mut self.order[rank], position);
            }
            return;
        }
        let distance = 1 + self.rng.below(FARTHEST);
        let (from, to) = if self.rng.unit() < 0.5 {
            (position, position.saturating_sub(distance).max(earliest))
        } else {
            (position - 1, (position - 1 + distance).min(latest))
        };
        let between = &self.order[rank][from.min(to)..=from.max(to)];
        if from == to || between.iter().all(|op| *op == between[0]) {
            return;
        }
        shift(&mut self.order[rank], from, to);
        if !self.accept(tolerance) {
            shift(&mut self.order[rank], to, from);
        }
    }

    /// Keeps the order as it is now if its score is worse by at most `tolerance`; whether it is.
    fn accept(&mut self, tolerance: f64) -> bool {
        let timing = self.space.replay(self.problem, &self.order);
        let score = timing.as_ref().map_or(f64::INFINITY, |timing| score(timing, self.goal));
        match timing {
            Some(timing) if score <= self.score + tolerance => {
                self.score = score;
                if score < self.best.0 {
                    self.best = (score, self.order.clone(), timing);
                }
                self.find_critical();
                true
            }
            _ => false,
        }
    }

    /// Follows the chain of ops without slack back from the last end.
    fn find_critical(&mut self) {
        self.moves.clear();
        let last = |rank: &usize| {
            let start = if self.goal.makespan == 0.0 { self.space.first_start[*rank] } else { 0.0 };
            self.space.clock[*rank] - start
        };
        let ranks = (0..self.problem.num_ranks).filter(|&rank| !self.order[rank].is_empty());
        let Some(rank) = ranks.reduce(|best, rank| if last(&rank) > last(&best) { rank } else { best }) else { return };
        let mut place = (rank, self.order[rank].len() - 1);
        loop {
            let (rank, position) = place;
            let start = self.start(place);
            if position > 0 && start <= self.end((rank, position - 1)) {
                self.moves.push(self.possible_move(place));
                place = (rank, position - 1);
            } else if let Some(input) = self.input_of(place) {
                place = input;
            } else {
                return;
            }
        }
    }

    fn possible_move(&self, place: Place) -> Move {
        let (rank, position) = place;
        let microbatch = |position: usize| self.space.trace[rank][position].1;
        let cell =
            |position: usize| self.stage((rank, position)) * self.problem.num_microbatches + microbatch(position);
        let [forwards, grads] = &self.space.position_of;
        let made_at = match self.order[rank][position].kind() {
            OpKind::Forward => None,
            OpKind::InputGrad | OpKind::Backward => Some(forwards[cell(position)]),
            OpKind::WeightGrad => Some(grads[cell(position)]),
        };
        let arrival = self.input_of(place).map_or(0.0, |input| self.end(input));
        let floor = made_at.map_or(0, |made_at| made_at + 1);
        let late = (floor..position).rev().take_while(|&at| self.start((rank, at)) >= arrival).last();
        let before = position - 1;
        let used_at = match self.order[rank][before].kind() {
            OpKind::Forward => grads[cell(before)],
            _ => self.order[rank].len(),
        };
        Move { rank, position, earliest: late.unwrap_or(position).saturating_sub(1).max(floor), latest: used_at - 1 }
    }

    fn stage(&self, (rank, position): Place) -> usize {
        self.problem.stages_of[rank][usize::from(self.order[rank][position].chunk())]
    }

    fn start(&self, (rank, position): Place) -> f64 {
        self.space.trace[rank][position].0
    }

    fn end(&self, place: Place) -> f64 {
        self.start(place) + self.problem.time_of(self.order[place.0][place.1].kind(), self.stage(place))
    }

    /// Where the op stands on another rank whose result this one starts with; `None` if it waits for none.
    fn input_of(&self, place: Place) -> Option<Place> {
        let stage = self.stage(place);
        let (kind, other) = match self.order[place.0][place.1].kind() {
            OpKind::Forward => (0, stage.checked_sub(1)?),
            OpKind::InputGrad | OpKind::Backward => (1, stage + 1),
            OpKind::WeightGrad => return None,
        };
        let &rank = self.problem.rank_of.get(other)?;
        let (_, microbatch) = self.space.trace[place.0][place.1];
        Some((rank, self.space.position_of[kind][other * self.problem.num_microbatches + microbatch]))
    }
}

/// Mostly the goal; among equals, what lets the other ranks end early leaves the most room.
fn score(timing: &Timing, goal: Goal) -> f64 {
    goal.score(timing) + 1e-4 * timing.sum_of_ends
}

/// Splits a backward, or fuses an input gradient with the weight gradient right behind it; whether there was one.
fn flip(ops: &mut Vec<Op>, position: usize) -> bool {
    let op = ops[position];
    let weight = Op::new(OpKind::WeightGrad, op.chunk());
    match op.kind() {
        OpKind::Backward => {
            ops[position] = Op::new(OpKind::InputGrad, op.chunk());
            ops.insert(position + 1, weight);
            true
        }
        OpKind::InputGrad if ops.get(position + 1) == Some(&weight) => {
            ops[position] = Op::new(OpKind::Backward, op.chunk());
            ops.remove(position + 1);
            true
        }
        _ => false,
    }
}

/// Moves one element, and those between by one.
fn shift(ops: &mut [Op], from: usize, to: usize) {
    if from < to {
        ops[from..=to].rotate_left(1);
    } else {
        ops[to..=from].rotate_right(1);
    }
}
