//! Reference patterns: when each op would run if every micro-batch repeated the one before it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;

use super::greedy::Time;
use super::problem::{Op, OpKind, Order, Problem};

/// A building block: how far apart the ops of one micro-batch lie along its way, in units of an average op. Micro-batch
/// after micro-batch it repeats at the pace of the busiest rank (Qi et al., "Pipeline Parallelism with Controllable
/// Memory", section 3). The sooner a block comes back to a rank, the fewer micro-batches are in flight.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Pattern {
    /// Per chunk, the step from a stage's forward to the next stage's; then per chunk the step of the input gradients;
    /// then the turns: from a chunk's last forward to the next chunk's first, from the last forward to its input
    /// gradient, and from a chunk's last input gradient to that of the chunk before. A paced pattern has one more step
    /// per chunk, from an input gradient to its weight gradient; else weight gradients run only where there is room.
    pub(crate) steps: Vec<f64>,
}

impl Pattern {
    /// The order of every rank's forwards and input gradients, with the weight gradients of a paced pattern up to the
    /// last forward. Of two at one time, a backward comes first.
    pub(crate) fn order(&self, problem: &Problem) -> Order {
        let interval = problem.interval();
        let offsets = self.offsets(problem, interval);
        let paced = self.steps.len() >= 5 * problem.num_chunks() - 1;
        (0..problem.num_ranks).map(|rank| merge(problem, rank, paced, &offsets, interval)).collect()
    }

    /// When each stage's ops run for the first micro-batch, by kind.
    fn offsets(&self, problem: &Problem, interval: f64) -> [Vec<f64>; 3] {
        let (num_stages, num_chunks) = (problem.num_stages(), problem.num_chunks());
        let unit = interval / (3.0 * f64::from(u32::try_from(num_chunks).unwrap_or(u32::MAX)));
        let chunk = |stage: usize| usize::from(problem.chunk_of[stage]);
        let turns = 2 * num_chunks;
        let mut forward = vec![0.0; num_stages];
        for stage in 1..num_stages {
            let (here, before) = (chunk(stage), chunk(stage - 1));
            let step = if here == before { here } else { turns + here.max(before) - 1 };
            forward[stage] = forward[stage - 1] + self.steps[step] * unit;
        }
        let mut grad = vec![0.0; num_stages];
        grad[num_stages - 1] = forward[num_stages - 1] + self.steps[turns + num_chunks - 1] * unit;
        for stage in (0..num_stages - 1).rev() {
            let (here, after) = (chunk(stage), chunk(stage + 1));
            let step = if here == after { num_chunks + here } else { turns + num_chunks + here.min(after) };
            grad[stage] = grad[stage + 1] + self.steps[step] * unit;
        }
        let lag = |stage: usize| self.steps.get(4 * num_chunks - 1 + chunk(stage)).copied().unwrap_or(0.0);
        let weight = (0..num_stages).map(|stage| grad[stage] + lag(stage) * unit).collect();
        [forward, grad, weight]
    }
}

/// The next op of one stage: its forwards, its backwards, or the weight gradients of those that are split.
struct Stream {
    kind: OpKind,
    stage: usize,
    microbatch: usize,
}

impl Stream {
    /// `None`: a backward in one piece has done the weight gradient.
    fn op(&self, problem: &Problem) -> Option<Op> {
        let backward = problem.backward_kind(self.stage, self.microbatch);
        let kind = match self.kind {
            OpKind::Forward => OpKind::Forward,
            OpKind::WeightGrad if backward == OpKind::Backward => return None,
            OpKind::WeightGrad => OpKind::WeightGrad,
            // A fused backward stands where the input gradient would.
            OpKind::InputGrad | OpKind::Backward => backward,
        };
        Some(Op::new(kind, problem.chunk_of[self.stage]))
    }
}

/// Merges the ops of a rank's stages by their reference times.
fn merge(problem: &Problem, rank: usize, paced: bool, offsets: &[Vec<f64>; 3], interval: f64) -> Vec<Op> {
    let stages = &problem.stages_of[rank];
    let kinds = [OpKind::InputGrad, OpKind::Forward, OpKind::WeightGrad];
    let kinds = &kinds[..if paced { 3 } else { 2 }];
    let mut streams: Vec<Stream> = Vec::with_capacity(kinds.len() * stages.len());
    let mut next = BinaryHeap::with_capacity(streams.capacity());
    for &kind in kinds {
        for &stage in stages {
            next.push(Reverse((Time(offsets[kind as usize][stage]), streams.len())));
            streams.push(Stream { kind, stage, microbatch: 0 });
        }
    }
    let mut num_forwards = stages.len() * problem.num_microbatches;
    let mut ops = Vec::with_capacity(streams.len() * problem.num_microbatches);
    // Of two at one time, the stream that was made first.
    while let Some(mut first) = next.peek_mut() {
        let Reverse((Time(time), index)) = *first;
        let stream = &mut streams[index];
        // While the pipeline drains, weight gradients wait for gaps.
        if stream.kind == OpKind::WeightGrad && num_forwards == 0 {
            PeekMut::pop(first);
            continue;
        }
        ops.extend(stream.op(problem));
        num_forwards -= usize::from(stream.kind == OpKind::Forward);
        stream.microbatch += 1;
        if stream.microbatch == problem.num_microbatches {
            PeekMut::pop(first);
        } else {
            *first = Reverse((Time(time + interval), index));
        }
    }
    ops
}
