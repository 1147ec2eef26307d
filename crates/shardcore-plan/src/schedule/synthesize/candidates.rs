//! What the synthesiser starts from.

use std::iter::repeat_n;

use super::super::action::{Action, ActionKind};
use super::super::generate::{self, ChunkCount, ScheduleName};
use super::super::list::{Op, OpKind, Order, Pattern, Problem};
use super::super::program::Schedule;
use super::Request;
use crate::error::Result;

/// The orders of all named schedules of the request's placement; of one micro-batch after another, which fits under any
/// cap that one micro-batch fits under; and of one stage after another, which suits slow hops.
pub(super) fn named(request: &Request, problem: &Problem) -> Result<Vec<(Order, &'static str)>> {
    let num_ranks = request.placement.num_ranks();
    let cautious = problem.cautious(problem.must_fuse());
    let mut orders = vec![(cautious.one_by_one(), "one-by-one")];
    for backwards in [Backwards::Whole, Backwards::Split, Backwards::WeightsLast] {
        orders.push((breadth_first(&cautious, backwards), BREADTH_FIRST));
    }
    for &name in ScheduleName::ALL {
        let num_chunks = match name.num_chunks() {
            ChunkCount::Any => Some(request.placement.num_chunks()),
            ChunkCount::Exactly(_) => None,
        };
        let is_sliced = name == ScheduleName::SeqOneForwardOneBackward;
        if is_sliced || !name.placement(num_ranks, num_chunks).is_ok_and(|placement| placement == request.placement) {
            continue;
        }
        let schedule = generate::build(name, num_ranks, request.num_microbatches, num_chunks, Some(&request.costs))?;
        orders.push((order_of(&schedule, problem), name.name()));
    }
    Ok(orders)
}

/// The name of the orders of one stage after another.
pub(super) const BREADTH_FIRST: &str = "breadth-first";

/// How the backwards of an order by stages run.
#[derive(Clone, Copy, PartialEq)]
enum Backwards {
    /// In one piece.
    Whole,
    /// Each weight gradient directly behind its input gradient.
    Split,
    /// All weight gradients at the end, so that the ranks before get their gradients soonest.
    WeightsLast,
}

/// All forwards stage by stage, then all backwards from the last stage to the first: the latency of a hop is waited for
/// once, not once a micro-batch.
fn breadth_first(problem: &Problem, backwards: Backwards) -> Order {
    let of_rank = |stages: &Vec<usize>| {
        let op = |kind, stage: usize| Op::new(kind, problem.chunk_of[stage]);
        let forwards = |&stage| repeat_n(op(OpKind::Forward, stage), problem.num_microbatches);
        let mut ops: Vec<Op> = stages.iter().flat_map(forwards).collect();
        let mut last = Vec::new();
        for &stage in stages.iter().rev() {
            for microbatch in 0..problem.num_microbatches {
                let is_whole = backwards == Backwards::Whole;
                let kind = if is_whole { OpKind::Backward } else { problem.backward_kind(stage, microbatch) };
                ops.push(op(kind, stage));
                if kind == OpKind::InputGrad {
                    let behind = if backwards == Backwards::Split { &mut ops } else { &mut last };
                    behind.push(op(OpKind::WeightGrad, stage));
                }
            }
        }
        ops.append(&mut last);
        ops
    };
    problem.stages_of.iter().map(of_rank).collect()
}

/// A schedule whose ops keep the order of the micro-batches, as all named ones do.
fn order_of(schedule: &Schedule, problem: &Problem) -> Order {
    let op = |action: &Action| {
        let kind = match action.kind {
            ActionKind::Forward => OpKind::Forward,
            ActionKind::InputGrad => OpKind::InputGrad,
            ActionKind::WeightGrad => OpKind::WeightGrad,
            _ => OpKind::Backward,
        };
        Op::new(kind, problem.chunk_of[action.stage as usize])
    };
    schedule.programs().iter().map(|program| program.iter().map(op).collect()).collect()
}

/// Reference patterns to start the search from.
pub(super) fn patterns(request: &Request, problem: &Problem) -> Vec<Pattern> {
    let num_chunks = problem.num_chunks();
    let steps: &[f64] = &[1.0, 1.5, 2.0, 2.5, 3.0];
    if num_chunks == 1 {
        let pairs = steps.iter().flat_map(|&forward| steps.iter().map(move |&grad| vec![forward, grad, 1.0]));
        return pairs.map(|steps| Pattern { steps }).collect();
    }
    let uniform = [0.6, 1.0, 1.5, 2.0, 3.0, 4.0].map(|step| Pattern { steps: vec![step; 4 * num_chunks - 1] });
    let on_v = if generate::v_shape::is_v(&request.placement) {
        generate::v_shape::all_patterns(request.placement.num_ranks())
    } else {
        Vec::new()
    };
    on_v.into_iter().chain(uniform).collect()
}
