//! Local search on an order: an op on the critical path moves, and what is not worse stays.

use std::collections::BTreeMap;
use std::ops::Range;

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
    /// The gradients on the critical path, whatever they wait for, if it may pay to split or fuse them.
    gradients: Vec<Place>,
    /// Where each rank waits: the positions of the ops behind its gaps, where a weight gradient costs nothing.
    gaps: Vec<Vec<usize>>,
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
        let (order, gaps) = (order.to_vec(), vec![Vec::new(); problem.num_ranks]);
        let (moves, gradients) = (Vec::new(), Vec::new());
        let mut search = Self { problem, goal, space, rng, order, score, flips, moves, gradients, gaps, best };
        search.find_critical();
        Some(search)
    }

    /// Moves ops until `budget` ops have been placed or the goal's score is at most `least`: in rounds, each from the
    /// best so far and at first ready to become worse.
    pub(crate) fn run(&mut self, budget: usize, least: f64) {
        let most_worse = MOST_WORSE * self.problem.interval() / 3.0;
        for _ in 0..budget / self.num_ops() / ROUND {
            for step in 0..ROUND {
                if self.best_score() <= least || (self.moves.is_empty() && self.gradients.is_empty()) {
                    return;
                }
                #[expect(clippy::cast_precision_loss, reason = "a ratio")]
                let left = 1.0 - step as f64 / ROUND as f64;
                self.step(most_worse * left * left);
            }
            self.start_from_best();
        }
    }

    /// Fuses the gradients of backwards wherever the goal's score does not become worse, the last ones of each rank
    /// first: there an input gradient is waited for least. `far`: not only those that are next to each other. Places
    /// about `budget` ops at most.
    pub(crate) fn fuse_all(&mut self, budget: usize, far: bool) {
        self.start_from_best();
        let mut trials = budget / self.num_ops();
        for rank in 0..self.problem.num_ranks {
            let num_grads = self.order[rank].iter().filter(|op| op.kind() == OpKind::InputGrad).count();
            self.fuse_range(rank, 0..num_grads, far, &mut trials);
        }
    }

    /// Fuses those of a rank's input gradients, all at once or by halves.
    fn fuse_range(&mut self, rank: usize, grads: Range<usize>, far: bool, trials: &mut usize) {
        if grads.is_empty() || *trials == 0 {
            return;
        }
        let ops = fused(&self.order[rank], &grads, far);
        if ops.len() == self.order[rank].len() {
            return;
        }
        *trials -= 1;
        let split = std::mem::replace(&mut self.order[rank], ops);
        let (goal, limit) = (self.goal, self.best_score());
        if self.accept_if(|timing| goal.score(timing) <= limit) {
            return;
        }
        self.order[rank] = split;
        if grads.len() > 1 {
            let half = grads.start.midpoint(grads.end);
            self.fuse_range(rank, half..grads.end, far, trials);
            self.fuse_range(rank, grads.start..half, far, trials);
        }
    }

    /// What it takes to time the order once.
    fn num_ops(&self) -> usize {
        self.order.iter().map(Vec::len).sum::<usize>().max(1)
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
        if !self.gradients.is_empty() && (self.moves.is_empty() || self.rng.unit() < FLIPS) {
            let (rank, position) = self.gradients[self.rng.below(self.gradients.len())];
            self.flip(rank, position, tolerance);
            return;
        }
        let Move { rank, position, earliest, latest } = self.moves[self.rng.below(self.moves.len())];
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

    /// Splits a backward, or fuses a gradient with the other of its kind, and keeps that if the score allows it.
    fn flip(&mut self, rank: usize, position: usize, tolerance: f64) {
        let ops = &self.order[rank];
        let op = ops[position];
        let [grad, weight] = [OpKind::InputGrad, OpKind::WeightGrad].map(|kind| Op::new(kind, op.chunk()));
        let pair = match op.kind() {
            OpKind::Backward => {
                let weight = if self.rng.unit() < 0.5 { position + 1 } else { self.next_gap(rank, position) };
                self.try_split(rank, position, weight, tolerance);
                return;
            }
            OpKind::WeightGrad => ops[..position].iter().rposition(|&op| op == grad).map(|at| (at, position)),
            _ => ops[position..].iter().position(|&op| op == weight).map(|far| (position, position + far)),
        };
        let Some((grad, weight)) = pair else { return };
        fuse_gradients(&mut self.order[rank], grad, weight);
        if !self.accept(tolerance) {
            split_backward(&mut self.order[rank], grad, weight);
        }
    }

    /// Splits a backward, with its weight gradient before the op at `weight`, and keeps that if the score allows it;
    /// whether it does.
    fn try_split(&mut self, rank: usize, position: usize, weight: usize, tolerance: f64) -> bool {
        split_backward(&mut self.order[rank], position, weight);
        let keeps = self.accept(tolerance);
        if !keeps {
            fuse_gradients(&mut self.order[rank], position, weight);
        }
        keeps
    }

    /// Splits backwards on the critical path as long as the score becomes better. Places about `budget` ops at most.
    pub(crate) fn split_critical(&mut self, budget: usize) {
        self.start_from_best();
        let mut trials = budget / self.num_ops();
        while self.split_one(&mut trials) {}
    }

    fn split_one(&mut self, trials: &mut usize) -> bool {
        let less = -1e-9 * self.problem.interval();
        for (rank, position) in self.gradients.clone() {
            if self.order[rank][position].kind() != OpKind::Backward {
                continue;
            }
            let gap = self.next_gap(rank, position);
            for weight in [position + 1, gap] {
                if *trials == 0 {
                    return false;
                }
                *trials -= 1;
                if self.try_split(rank, position, weight, less) {
                    return true;
                }
            }
        }
        false
    }

    /// The first gap of a rank behind a position, or its end.
    fn next_gap(&self, rank: usize, position: usize) -> usize {
        let gaps = &self.gaps[rank];
        gaps.get(gaps.partition_point(|&gap| gap <= position)).copied().unwrap_or(self.order[rank].len())
    }

    fn find_gaps(&mut self) {
        let mut gaps = std::mem::take(&mut self.gaps);
        for (rank, gaps) in gaps.iter_mut().enumerate() {
            gaps.clear();
            let waits = |&at: &usize| self.start((rank, at)) > self.end((rank, at - 1));
            gaps.extend((1..self.order[rank].len()).filter(waits));
        }
        self.gaps = gaps;
    }

    /// Keeps the order as it is now if its score is worse by at most `tolerance`; whether it is.
    fn accept(&mut self, tolerance: f64) -> bool {
        let limit = self.score + tolerance;
        let goal = self.goal;
        self.accept_if(|timing| score(timing, goal) <= limit)
    }

    /// Keeps the order as it is now if it can be executed and its timing allows it; whether it is.
    fn accept_if(&mut self, allows: impl FnOnce(&Timing) -> bool) -> bool {
        let Some(timing) = self.space.replay(self.problem, &self.order).filter(allows) else { return false };
        self.score = score(&timing, self.goal);
        if self.score < self.best.0 {
            self.best = (self.score, self.order.clone(), timing);
        }
        self.find_critical();
        true
    }

    /// Follows the chain of ops without slack back from the last end.
    fn find_critical(&mut self) {
        self.moves.clear();
        self.gradients.clear();
        if self.flips {
            self.find_gaps();
        }
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
            if self.flips && self.order[rank][position].kind() != OpKind::Forward {
                self.gradients.push(place);
            }
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
        let late = (floor.max(position.saturating_sub(FARTHEST))..position)
            .rev()
            .take_while(|&at| self.start((rank, at)) >= arrival)
            .last();
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

/// The same ops with some of the input gradients, counted from the first, fused with the next weight gradient of their
/// stage.
fn fused(ops: &[Op], grads: &Range<usize>, far: bool) -> Vec<Op> {
    let (mut num_grads, mut done) = (0, BTreeMap::new());
    let mut fuse = |(position, op): (usize, &Op)| {
        let done = done.entry(op.chunk()).or_insert(0);
        match op.kind() {
            OpKind::InputGrad => {
                num_grads += 1;
                let is_near = ops.get(position + 1) == Some(&Op::new(OpKind::WeightGrad, op.chunk()));
                let chosen = grads.contains(&(num_grads - 1)) && (far || is_near);
                *done += usize::from(chosen);
                Some(if chosen { Op::new(OpKind::Backward, op.chunk()) } else { *op })
            }
            OpKind::WeightGrad if *done > 0 => {
                *done -= 1;
                None
            }
            _ => Some(*op),
        }
    };
    ops.iter().enumerate().filter_map(&mut fuse).collect()
}

/// Splits a backward into its input gradient, in its place, and a weight gradient before the op at `weight`.
fn split_backward(ops: &mut Vec<Op>, position: usize, weight: usize) {
    let chunk = ops[position].chunk();
    ops[position] = Op::new(OpKind::InputGrad, chunk);
    ops.insert(weight, Op::new(OpKind::WeightGrad, chunk));
}

/// Fuses an input gradient with a weight gradient behind it: undoes [`split_backward`].
fn fuse_gradients(ops: &mut Vec<Op>, position: usize, weight: usize) {
    ops[position] = Op::new(OpKind::Backward, ops[position].chunk());
    ops.remove(weight);
}

/// Moves one element, and those between by one.
fn shift(ops: &mut [Op], from: usize, to: usize) {
    if from < to {
        ops[from..=to].rotate_left(1);
    } else {
        ops[to..=from].rotate_right(1);
    }
}
