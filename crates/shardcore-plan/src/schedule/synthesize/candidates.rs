//! What the synthesiser starts from.

use super::super::action::{Action, ActionKind};
use super::super::generate::{self, ChunkCount, ScheduleName};
use super::super::list::{Op, OpKind, Order, Pattern, Problem};
use super::super::program::Schedule;
use super::Request;
use crate::error::Result;

/// The orders of all named schedules of the request's placement, and of one micro-batch after another, which fits under
/// any cap that one micro-batch fits under.
pub(super) fn named(request: &Request, problem: &Problem) -> Result<Vec<(Order, &'static str)>> {
    let num_ranks = request.placement.num_ranks();
    let mut orders = vec![(problem.cautious(problem.must_fuse()).one_by_one(), "one-by-one")];
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
