//! How long an order takes when every op starts as early as the order, its inputs and the latencies allow.

use super::problem::{Op, OpKind, Problem};

/// What a schedule is to be good at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Objective {
    /// The last end over all ranks, from time 0: what a step with a barrier at its end costs.
    Makespan,
    /// The most that lies between a rank's first start and its last end: what a step costs when each rank's optimizer
    /// steps on its own.
    Span,
}

/// When an order ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Timing {
    pub(crate) makespan: f64,
    pub(crate) span: f64,
    /// Sum of the ranks' last ends: tells apart orders that are equal otherwise.
    pub(crate) sum_of_ends: f64,
}

impl Timing {
    /// From the first start and the last end of every rank.
    pub(crate) fn of(first_start: &[f64], last_end: &[f64]) -> Self {
        let spans = first_start.iter().zip(last_end).map(|(start, end)| end - start.min(*end));
        Self {
            makespan: last_end.iter().copied().fold(0.0, f64::max),
            span: spans.fold(0.0, f64::max),
            sum_of_ends: last_end.iter().sum(),
        }
    }

    /// The number that the objective wants small.
    pub(crate) fn value(&self, objective: Objective) -> f64 {
        match objective {
            Objective::Makespan => self.makespan,
            Objective::Span => self.span,
        }
    }
}

/// What a search wants small: a weighted sum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Goal {
    pub(crate) makespan: f64,
    pub(crate) span: f64,
}

impl Goal {
    /// Both ways to measure a step, alike.
    pub(crate) const BOTH: Self = Self { makespan: 1.0, span: 1.0 };

    pub(crate) fn of(objective: Objective) -> Self {
        match objective {
            Objective::Makespan => Self { makespan: 1.0, span: 0.0 },
            Objective::Span => Self { makespan: 0.0, span: 1.0 },
        }
    }

    pub(crate) fn score(self, timing: &Timing) -> f64 {
        self.makespan * timing.makespan + self.span * timing.span
    }
}

/// Nothing has happened yet.
pub(crate) const NEVER: f64 = -1.0;

/// The state of all ranks while an order runs; kept between runs to spare allocations.
pub(crate) struct Workspace {
    num_microbatches: usize,
    /// End of each forward, and of each input gradient, by stage and micro-batch; [`NEVER`] before.
    pub(crate) ends: [Vec<f64>; 2],
    /// How many ops of each kind each stage has done.
    pub(crate) done: Vec<[usize; 3]>,
    pub(crate) clock: Vec<f64>,
    pub(crate) first_start: Vec<f64>,
    pub(crate) held: Vec<f64>,
    position: Vec<usize>,
    /// Of the last replay: start and micro-batch of every op, rank by rank.
    pub(crate) trace: Vec<Vec<(f64, usize)>>,
    /// Of the last replay: where each forward, and each input gradient, stands on its rank.
    pub(crate) position_of: [Vec<usize>; 2],
    /// Of the last replay: whether each backward is in one piece, by stage and micro-batch.
    whole: Vec<bool>,
    /// Of the last replay: no weight gradient of an earlier micro-batch waits, by stage.
    oldest: Vec<usize>,
    ready: Vec<usize>,
    is_ready: Vec<bool>,
}

impl Workspace {
    pub(crate) fn new(problem: &Problem) -> Self {
        let (num_ranks, num_stages) = (problem.num_ranks, problem.num_stages());
        let cells = vec![NEVER; num_stages * problem.num_microbatches];
        Self {
            num_microbatches: problem.num_microbatches,
            ends: [cells.clone(), cells],
            done: vec![[0; 3]; num_stages],
            clock: vec![0.0; num_ranks],
            first_start: vec![f64::INFINITY; num_ranks],
            held: vec![0.0; num_ranks],
            position: vec![0; num_ranks],
            trace: vec![Vec::new(); num_ranks],
            position_of: [Vec::new(), Vec::new()],
            whole: Vec::new(),
            oldest: vec![0; num_stages],
            ready: Vec::with_capacity(num_ranks),
            is_ready: vec![true; num_ranks],
        }
    }

    pub(crate) fn reset(&mut self) {
        self.ends.iter_mut().for_each(|ends| ends.fill(NEVER));
        self.done.fill([0; 3]);
        self.clock.fill(0.0);
        self.first_start.fill(f64::INFINITY);
        self.held.fill(0.0);
        self.position.fill(0);
        self.ready.clear();
        self.ready.extend((0..self.clock.len()).rev());
        self.is_ready.fill(true);
    }

    pub(crate) fn timing(&self) -> Timing {
        Timing::of(&self.first_start, &self.clock)
    }

    /// Whether the stage has a weight gradient to do.
    pub(crate) fn waits(&self, stage: usize) -> bool {
        self.done[stage][1] > self.done[stage][2]
    }

    /// When the inputs of a stage's next op of a kind are there; `None` while an op that it needs is not yet placed.
    #[inline]
    pub(crate) fn arrival(&self, problem: &Problem, kind: OpKind, stage: usize) -> Option<f64> {
        let [forwards, grads] = &self.ends;
        let cell = |kind: usize| stage * self.num_microbatches + self.done[stage][kind];
        let arrival = match kind {
            OpKind::Forward if stage == 0 => 0.0,
            OpKind::Forward => {
                let end = forwards[cell(0) - self.num_microbatches];
                if end < 0.0 { NEVER } else { end + problem.hop_before[stage] }
            }
            OpKind::InputGrad | OpKind::Backward => {
                let own = cell(1);
                let forward = forwards[own];
                if forward < 0.0 {
                    NEVER
                } else if stage + 1 == problem.num_stages() {
                    forward
                } else {
                    let end = grads[own + self.num_microbatches];
                    if end < 0.0 { NEVER } else { forward.max(end + problem.hop_before[stage + 1]) }
                }
            }
            // Its input gradient ran on the same rank, so it is there as soon as the rank is free.
            OpKind::WeightGrad if self.waits(stage) => self.clock[problem.rank_of[stage]],
            OpKind::WeightGrad => NEVER,
        };
        (arrival >= 0.0).then_some(arrival)
    }

    /// Places a stage's next op of a kind at `start` and gives the rank whose inputs it may have completed.
    #[inline]
    pub(crate) fn place(&mut self, problem: &Problem, kind: OpKind, stage: usize, start: f64) -> Option<usize> {
        let rank = problem.rank_of[stage];
        let end = start + problem.time_of(kind, stage);
        if start < self.first_start[rank] {
            self.first_start[rank] = start;
        }
        self.clock[rank] = end;
        self.held[rank] += problem.held_by(kind, stage);
        let cell = |microbatch: usize| stage * self.num_microbatches + microbatch;
        let neighbour = match kind {
            OpKind::Forward => {
                self.ends[0][cell(self.done[stage][0])] = end;
                self.done[stage][0] += 1;
                problem.rank_of.get(stage + 1)
            }
            OpKind::InputGrad | OpKind::Backward => {
                self.ends[1][cell(self.done[stage][1])] = end;
                self.done[stage][1] += 1;
                if kind == OpKind::Backward {
                    self.done[stage][2] += 1;
                }
                stage.checked_sub(1).and_then(|previous| problem.rank_of.get(previous))
            }
            OpKind::WeightGrad => {
                self.done[stage][2] += 1;
                None
            }
        };
        neighbour.copied().filter(|&neighbour| neighbour != rank)
    }

    /// Times an order. `None` if it deadlocks or breaks a cap.
    pub(crate) fn replay(&mut self, problem: &Problem, order: &[Vec<Op>]) -> Option<Timing> {
        self.reset();
        self.reset_trace();
        let mut left: usize = order.iter().map(Vec::len).sum();
        while let Some(rank) = self.ready.pop() {
            self.is_ready[rank] = false;
            while let Some(&op) = order[rank].get(self.position[rank]) {
                let (kind, stage) = (op.kind(), problem.stages_of[rank][usize::from(op.chunk())]);
                let Some(arrival) = self.arrival(problem, kind, stage) else { break };
                let start = arrival.max(self.clock[rank]);
                self.note(rank, kind, stage, start);
                let neighbour = self.place(problem, kind, stage, start);
                if self.held[rank] > problem.cap[rank] {
                    return None;
                }
                self.position[rank] += 1;
                left -= 1;
                if let Some(neighbour) = neighbour.filter(|&rank| !self.is_ready[rank]) {
                    self.is_ready[neighbour] = true;
                    self.ready.push(neighbour);
                }
            }
        }
        (left == 0).then(|| self.timing())
    }

    fn reset_trace(&mut self) {
        self.trace.iter_mut().for_each(Vec::clear);
        let num_cells = self.ends[0].len();
        self.position_of.iter_mut().for_each(|positions| positions.resize(num_cells, 0));
        self.whole.clear();
        self.whole.resize(num_cells, false);
        self.oldest.fill(0);
    }

    /// Notes of an op that is about to be placed when it starts, its micro-batch, and where it stands.
    #[inline]
    fn note(&mut self, rank: usize, kind: OpKind, stage: usize, start: f64) {
        let first = stage * self.num_microbatches;
        let [num_forwards, num_grads, _] = self.done[stage];
        let microbatch = match kind {
            OpKind::Forward => num_forwards,
            OpKind::InputGrad | OpKind::Backward => num_grads,
            OpKind::WeightGrad => {
                let oldest = &mut self.oldest[stage];
                while self.whole[first + *oldest] {
                    *oldest += 1;
                }
                *oldest += 1;
                *oldest - 1
            }
        };
        match kind {
            OpKind::Forward => self.position_of[0][first + microbatch] = self.position[rank],
            OpKind::InputGrad | OpKind::Backward => {
                self.position_of[1][first + microbatch] = self.position[rank];
                self.whole[first + microbatch] = kind == OpKind::Backward;
            }
            OpKind::WeightGrad => {}
        }
        self.trace[rank].push((start, microbatch));
    }
}
