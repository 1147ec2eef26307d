//! What is to be scheduled, in the form that list scheduling needs.

use std::collections::VecDeque;
use std::ops::Range;

use crate::error::{PlanError, Result};
use crate::schedule::{Action, ActionKind, Costs, Placement};

/// What an [`Op`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum OpKind {
    Forward,
    InputGrad,
    WeightGrad,
    /// Input and weight gradient in one.
    Backward,
}

/// The next micro-batch's `kind` of a rank's `chunk`. The micro-batch is implied: forwards and backwards run in their
/// order, and a weight gradient is that of the first whose input gradient is done and whose weight gradient is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Op(u16);

/// The ops of every rank, in their order.
pub(crate) type Order = Vec<Vec<Op>>;

impl Op {
    /// The most chunks a rank may have.
    const MAX_CHUNKS: usize = 1 << 14;

    pub(crate) fn new(kind: OpKind, chunk: u16) -> Self {
        Self(chunk << 2 | kind as u16)
    }

    pub(crate) fn kind(self) -> OpKind {
        match self.0 & 3 {
            0 => OpKind::Forward,
            1 => OpKind::InputGrad,
            2 => OpKind::WeightGrad,
            _ => OpKind::Backward,
        }
    }

    pub(crate) fn chunk(self) -> u16 {
        self.0 >> 2
    }
}

/// One chain of stages with costs, memory caps, and a number of micro-batches.
#[derive(Clone, Debug)]
pub(crate) struct Problem {
    pub(crate) num_ranks: usize,
    pub(crate) num_microbatches: usize,
    /// The rank of each stage.
    pub(crate) rank_of: Vec<usize>,
    /// The position of each stage among those of its rank.
    pub(crate) chunk_of: Vec<u16>,
    /// The stages of each rank, ascending.
    pub(crate) stages_of: Vec<Vec<usize>>,
    /// Time of each kind of op on each stage.
    pub(crate) time: [Vec<f64>; 4],
    /// Latency from the stage before; 0 where both are on one rank.
    pub(crate) hop_before: Vec<f64>,
    pub(crate) activation: Vec<f64>,
    pub(crate) stash: Vec<f64>,
    /// Memory of each rank; infinite without a cap.
    pub(crate) cap: Vec<f64>,
    /// Per stage, the micro-batches whose backwards list scheduling makes in one piece.
    pub(crate) fused: Vec<Range<usize>>,
}

impl Problem {
    /// Refuses a placement with more stages on a rank than an [`Op`] can name.
    pub(crate) fn check_placement(placement: &Placement) -> Result<()> {
        let counts = (0..placement.num_ranks()).map(|rank| placement.stages_of(rank).len());
        match counts.max() {
            Some(most) if most > Op::MAX_CHUNKS => {
                let value = most as i128;
                Err(PlanError::OutOfRange { what: "stages of one rank", value, expected: "at most 2^14" })
            }
            _ => Ok(()),
        }
    }

    /// The problem of a placement with one chain. `cap` has one entry a rank.
    pub(crate) fn new(placement: &Placement, costs: &Costs, num_microbatches: u32, cap: Vec<f64>) -> Result<Self> {
        Self::check_placement(placement)?;
        let stages_of: Vec<Vec<usize>> = (0..placement.num_ranks())
            .map(|rank| placement.stages_of(rank).iter().map(|&stage| stage as usize).collect())
            .collect();
        let rank_of: Vec<usize> = placement.ranks().iter().map(|&rank| rank as usize).collect();
        let mut chunk_of = vec![0; rank_of.len()];
        for stages in &stages_of {
            for (chunk, &stage) in (0..).zip(stages) {
                chunk_of[stage] = chunk;
            }
        }
        let hop = |pair: &[usize]| if pair[0] == pair[1] { 0.0 } else { costs.hop };
        let hop_before = std::iter::once(0.0).chain(rank_of.windows(2).map(hop)).collect();
        let backward = (0..placement.num_stages()).map(|stage| costs.backward(stage)).collect();
        Ok(Self {
            num_ranks: stages_of.len(),
            num_microbatches: num_microbatches as usize,
            rank_of,
            chunk_of,
            stages_of,
            time: [costs.forward.clone(), costs.input_grad.clone(), costs.weight_grad.clone(), backward],
            hop_before,
            activation: costs.activation.clone(),
            stash: costs.stash.clone(),
            // Sums of the caller's sizes may round up by a few bits.
            cap: cap.into_iter().map(|cap| cap * (1.0 + 1e-9)).collect(),
            fused: vec![0..0; placement.num_stages() as usize],
        })
    }

    /// The same pipeline with another number of micro-batches.
    pub(crate) fn with_microbatches(&self, num_microbatches: usize) -> Self {
        Self { num_microbatches, ..self.clone() }
    }

    /// The same pipeline where a backward in one piece takes as much as a split one; `None` if it does.
    pub(crate) fn with_plain_backward(&self) -> Option<Self> {
        let [_, grad, weight, whole] = &self.time;
        let sums: Vec<f64> = grad.iter().zip(weight).map(|(grad, weight)| grad + weight).collect();
        (sums != *whole).then(|| {
            let mut problem = self.clone();
            problem.time[OpKind::Backward as usize] = sums;
            problem
        })
    }

    /// The same order with the backwards split that take longer in one piece.
    pub(crate) fn with_dear_split(&self, order: &[Vec<Op>]) -> Order {
        let split = |rank: usize, op: Op| {
            let stage = self.stages_of[rank][usize::from(op.chunk())];
            let is_dear = self.time[3][stage] > self.time[1][stage] + self.time[2][stage];
            let kinds: &[OpKind] = match op.kind() {
                OpKind::Backward if is_dear => &[OpKind::InputGrad, OpKind::WeightGrad],
                _ => &[],
            };
            let whole = kinds.is_empty().then_some(op);
            whole.into_iter().chain(kinds.iter().map(move |&kind| Op::new(kind, op.chunk())))
        };
        let of_rank = |(rank, ops): (usize, &Vec<Op>)| ops.iter().flat_map(|&op| split(rank, op)).collect();
        order.iter().enumerate().map(of_rank).collect()
    }

    /// The same pipeline for list scheduling, with some backwards in one piece. It looks at the memory of
    /// forwards only, so where a split backward's stash is larger than the activation, that is set aside from the start.
    pub(crate) fn cautious(&self, fused: Vec<Range<usize>>) -> Self {
        let reserved = |stage: usize| {
            let (activation, stash) = (self.activation[stage], self.stash[stage]);
            if fused[stage].len() == self.num_microbatches { activation } else { activation.max(stash) }
        };
        let activation = (0..self.num_stages()).map(reserved).collect();
        Self { activation, fused, ..self.clone() }
    }

    /// The memory that a rank needs for one micro-batch at a time: a backward in one piece needs no stash.
    pub(crate) fn least_memory(&self, rank: usize) -> f64 {
        self.stages_of[rank].iter().map(|&stage| self.activation[stage]).sum()
    }

    /// The backwards that must be in one piece even for one micro-batch at a time, because the stash does not fit beside
    /// the activations of the rank's stages below: all of a stage or none.
    pub(crate) fn must_fuse(&self) -> Vec<Range<usize>> {
        let mut must = vec![0..0; self.num_stages()];
        for (rank, stages) in self.stages_of.iter().enumerate() {
            let mut below = 0.0;
            for &stage in stages {
                if below + self.stash[stage] > self.cap[rank] {
                    must[stage] = 0..self.num_microbatches;
                }
                below += self.activation[stage];
            }
        }
        must
    }

    /// One micro-batch after another, each weight gradient at once.
    pub(crate) fn one_by_one(&self) -> Order {
        let one = |rank: usize, microbatch: usize| {
            let stages = &self.stages_of[rank];
            let op = |kind, stage: usize| Op::new(kind, self.chunk_of[stage]);
            let forwards = stages.iter().map(move |&stage| op(OpKind::Forward, stage));
            let backward = move |&stage: &usize| match self.backward_kind(stage, microbatch) {
                OpKind::Backward => vec![op(OpKind::Backward, stage)],
                split => vec![op(split, stage), op(OpKind::WeightGrad, stage)],
            };
            forwards.chain(stages.iter().rev().flat_map(backward))
        };
        let all = |rank| (0..self.num_microbatches).flat_map(|microbatch| one(rank, microbatch)).collect();
        (0..self.num_ranks).map(all).collect()
    }

    pub(crate) fn num_stages(&self) -> usize {
        self.rank_of.len()
    }

    /// The most stages on one rank.
    pub(crate) fn num_chunks(&self) -> usize {
        self.stages_of.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Ops of the whole problem, all kinds split.
    pub(crate) fn num_ops(&self) -> usize {
        3 * self.num_stages() * self.num_microbatches
    }

    /// Time of an op.
    pub(crate) fn time_of(&self, kind: OpKind, stage: usize) -> f64 {
        self.time[kind as usize][stage]
    }

    /// The kind that a micro-batch's backward starts with.
    pub(crate) fn backward_kind(&self, stage: usize, microbatch: usize) -> OpKind {
        if self.fused[stage].contains(&microbatch) { OpKind::Backward } else { OpKind::InputGrad }
    }

    /// Whether a stage's backward takes less in one piece.
    pub(crate) fn fusing_pays(&self, stage: usize) -> bool {
        self.time[3][stage] < self.time[1][stage] + self.time[2][stage]
    }

    /// Whether there is such a stage.
    pub(crate) fn any_fusing_pays(&self) -> bool {
        (0..self.num_stages()).any(|stage| self.fusing_pays(stage))
    }

    /// Time of a whole backward: the cheapest way for it.
    pub(crate) fn least_backward(&self, stage: usize) -> f64 {
        let split = self.time[1][stage] + self.time[2][stage];
        let must_fuse = self.fused[stage].len() == self.num_microbatches;
        if must_fuse { self.time[3][stage] } else { split.min(self.time[3][stage]) }
    }

    /// Work of a rank for one micro-batch: what it computes whatever the order is.
    pub(crate) fn work(&self, rank: usize) -> f64 {
        self.stages_of[rank].iter().map(|&stage| self.time[0][stage] + self.least_backward(stage)).sum()
    }

    /// The work of the busiest rank for one micro-batch: no order repeats faster.
    pub(crate) fn interval(&self) -> f64 {
        (0..self.num_ranks).map(|rank| self.work(rank)).fold(0.0, f64::max)
    }

    /// What an op adds to the memory that its rank holds.
    pub(crate) fn held_by(&self, kind: OpKind, stage: usize) -> f64 {
        match kind {
            OpKind::Forward => self.activation[stage],
            OpKind::InputGrad => self.stash[stage] - self.activation[stage],
            OpKind::WeightGrad => -self.stash[stage],
            OpKind::Backward => -self.activation[stage],
        }
    }

    /// The stages to which the ranks of an order's ops belong, as the actions of a program.
    pub(crate) fn programs(&self, order: &[Vec<Op>]) -> Vec<Vec<Action>> {
        order.iter().enumerate().map(|(rank, ops)| self.program(rank, ops)).collect()
    }

    fn program(&self, rank: usize, ops: &[Op]) -> Vec<Action> {
        let stages = &self.stages_of[rank];
        let mut streams = vec![Stream::default(); stages.len()];
        let mut action = |op: &Op| {
            let chunk = usize::from(op.chunk());
            let (kind, microbatch) = streams[chunk].next(op.kind());
            Action::new(kind, u32::try_from(stages[chunk]).unwrap_or(u32::MAX), microbatch)
        };
        ops.iter().map(&mut action).collect()
    }
}

/// Which micro-batch comes next on a stage.
#[derive(Clone, Default)]
struct Stream {
    num_forwards: u32,
    num_grads: u32,
    /// The micro-batches whose weight gradient waits.
    waiting: VecDeque<u32>,
}

impl Stream {
    fn next(&mut self, kind: OpKind) -> (ActionKind, u32) {
        match kind {
            OpKind::Forward => (ActionKind::Forward, post_increment(&mut self.num_forwards)),
            OpKind::Backward => (ActionKind::Backward, post_increment(&mut self.num_grads)),
            OpKind::InputGrad => {
                self.waiting.push_back(self.num_grads);
                (ActionKind::InputGrad, post_increment(&mut self.num_grads))
            }
            // A replay has checked that one waits.
            OpKind::WeightGrad => (ActionKind::WeightGrad, self.waiting.pop_front().unwrap_or(u32::MAX)),
        }
    }
}

fn post_increment(count: &mut u32) -> u32 {
    *count += 1;
    *count - 1
}
