//! What is to be scheduled, in the form that list scheduling needs.

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

/// The next micro-batch's `kind` of a rank's `chunk`. The micro-batch is implied: each kind runs in their order.
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
    /// Whether every backward is one op.
    pub(crate) fused: bool,
}

impl Problem {
    /// The problem of a placement with one chain. `cap` has one entry a rank.
    pub(crate) fn new(placement: &Placement, costs: &Costs, num_microbatches: u32, cap: Vec<f64>) -> Result<Self> {
        let stages_of: Vec<Vec<usize>> = (0..placement.num_ranks())
            .map(|rank| placement.stages_of(rank).iter().map(|&stage| stage as usize).collect())
            .collect();
        let rank_of: Vec<usize> = placement.ranks().iter().map(|&rank| rank as usize).collect();
        let mut chunk_of = vec![0; rank_of.len()];
        for stages in &stages_of {
            if stages.len() > Op::MAX_CHUNKS {
                let value = stages.len() as i128;
                return Err(PlanError::OutOfRange { what: "stages of one rank", value, expected: "at most 2^14" });
            }
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
            fused: false,
        })
    }

    /// The same pipeline with another number of micro-batches.
    pub(crate) fn with_microbatches(&self, num_microbatches: usize) -> Self {
        Self { num_microbatches, ..self.clone() }
    }

    /// The same pipeline with every backward in one piece.
    pub(crate) fn with_fused_backward(&self) -> Self {
        Self { fused: true, ..self.clone() }
    }

    /// The same pipeline, with memory for an activation's stash set aside from the start where a stash is larger: list
    /// scheduling looks at the memory of forwards only.
    pub(crate) fn cautious(&self) -> Self {
        let activation = self.activation.iter().zip(&self.stash).map(|(&size, &stash)| size.max(stash)).collect();
        Self { activation, ..self.clone() }
    }

    /// The memory that a rank needs for one micro-batch at a time.
    pub(crate) fn least_memory(&self, rank: usize) -> f64 {
        let mut below = 0.0;
        let mut most = 0.0_f64;
        for &stage in &self.stages_of[rank] {
            // While the backwards come down the chain, the stages below still hold their activations.
            most = most.max(below + self.stash[stage]);
            below += self.activation[stage];
        }
        most.max(below)
    }

    /// One micro-batch after another, each weight gradient at once.
    pub(crate) fn one_by_one(&self) -> Order {
        let chunks = |rank: usize| self.stages_of[rank].iter().map(|&stage| self.chunk_of[stage]);
        let one = |rank: usize| {
            let forwards = chunks(rank).map(|chunk| Op::new(OpKind::Forward, chunk));
            let backward = |chunk| [OpKind::InputGrad, OpKind::WeightGrad].map(|kind| Op::new(kind, chunk));
            forwards.chain(chunks(rank).rev().flat_map(backward)).collect::<Vec<Op>>()
        };
        (0..self.num_ranks).map(|rank| one(rank).repeat(self.num_microbatches)).collect()
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

    /// The kind that a backward starts with.
    pub(crate) fn backward_kind(&self) -> OpKind {
        if self.fused { OpKind::Backward } else { OpKind::InputGrad }
    }

    /// Time of a whole backward: the cheapest way for it.
    pub(crate) fn least_backward(&self, stage: usize) -> f64 {
        let split = self.time[1][stage] + self.time[2][stage];
        if self.fused { self.time[3][stage] } else { split.min(self.time[3][stage]) }
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
        let mut next = vec![[0; 3]; stages.len()];
        let mut action = |op: &Op| {
            let (chunk, kind) = (usize::from(op.chunk()), op.kind());
            let counts: Range<usize> = match kind {
                OpKind::Backward => 1..3, // Both gradients.
                _ => kind as usize..kind as usize + 1,
            };
            let microbatch = next[chunk][counts.start];
            next[chunk][counts].iter_mut().for_each(|count| *count += 1);
            let kind = match kind {
                OpKind::Forward => ActionKind::Forward,
                OpKind::InputGrad => ActionKind::InputGrad,
                OpKind::WeightGrad => ActionKind::WeightGrad,
                OpKind::Backward => ActionKind::Backward,
            };
            Action::new(kind, u32::try_from(stages[chunk]).unwrap_or(u32::MAX), microbatch)
        };
        ops.iter().map(&mut action).collect()
    }
}
