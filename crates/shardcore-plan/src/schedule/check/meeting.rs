//! A quick way to say that a program runs where every message blocks.

use super::delivery::is_message;
use crate::schedule::action::{Action, ActionKind};
use crate::schedule::flow::Flow;
use crate::schedule::program::Schedule;

/// Whether all sends and receives of a lowered schedule meet if each holds up its rank, and nothing else can.
///
/// So it is if no sums join the ranks, and if every computation stands behind the receive of its input, as in a schedule
/// of valid structure and in one that a simulation has brought to its end. Where this says no, a
/// [`Run`](super::delivery::Run) finds out whether that is right, and why.
pub(super) fn all_meet(schedule: &Schedule) -> bool {
    let flow = Flow::of(schedule.header());
    let programs = schedule.programs();
    let mut positions = vec![0; programs.len()];
    // The message at which each rank stands.
    let mut waits = vec![None; programs.len()];
    let mut runnable: Vec<usize> = (0..programs.len()).collect();
    while let Some(rank) = runnable.pop() {
        let program = &programs[rank];
        while let Some(action) = program.get(positions[rank]) {
            if action.kind == ActionKind::TiedReduce {
                return false;
            }
            if is_message(action.kind) {
                let (message, peer) = message_of(&flow, action);
                if waits[peer] != Some(message) {
                    waits[rank] = Some(message);
                    break;
                }
                waits[peer] = None;
                positions[peer] += 1;
                runnable.push(peer);
            }
            positions[rank] += 1;
        }
    }
    positions.iter().zip(programs).all(|(&position, program)| position == program.len())
}

/// The message of a send or a receive that has another end, by its receiver as in [`Flow::cell`], and the other rank.
fn message_of(flow: &Flow, action: &Action) -> (usize, usize) {
    let stage = action.stage as usize;
    let (to, other, side) = match action.kind {
        ActionKind::SendForward => (flow.next[stage], flow.next[stage], 0),
        ActionKind::RecvForward => (action.stage, flow.prev[stage], 0),
        ActionKind::SendBackward => (flow.prev[stage], flow.prev[stage], flow.num_cells()),
        _ => (action.stage, flow.next[stage], flow.num_cells()),
    };
    (side + flow.cell(to, action.microbatch), flow.rank[other as usize] as usize)
}
