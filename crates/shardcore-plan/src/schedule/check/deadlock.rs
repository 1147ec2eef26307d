//! Who waits for whom when nothing goes on, and the shortest circle of them.

use std::collections::{BTreeMap, VecDeque};

use super::delivery::{Delivery, Node, Run, is_message};
use super::fault::{Fault, FaultKind, Place};
use crate::error::PlanError;
use crate::schedule::action::{Action, ActionKind};

/// Hops of a circle that a message tells in words.
const TOLD: usize = 4;

/// A step of a circle: `node` cannot go on before `needs`, which stands behind the next node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hop {
    node: Node,
    needs: Node,
}

/// Two ends of a channel that stand at different messages.
pub(super) fn mismatch(run: &Run, one: Node, other: Node) -> PlanError {
    let [one, other] = [one, other].map(|(rank, position)| Place::at(run.schedule, rank, position));
    let (receive, send) = if one.action.kind.is_recv() { (one, other) } else { (other, one) };
    let message = format!(
        "{receive} meets {send}: a channel delivers first in first out, so the receives of an edge must stand in the order of its sends ({})",
        run.delivery
    );
    Fault::new(run.schedule, FaultKind::Mismatch, message, vec![receive, send]).into()
}

/// Why a run stands still. Its structure is valid, so some ranks wait for each other in a circle.
pub(super) fn explain(run: &Run) -> PlanError {
    let graph = Graph::of(run);
    let circle = graph.shortest_circle();
    let place = |node: Node| Place::at(run.schedule, node.0, node.1);
    let told = circle.iter().take(TOLD).map(|hop| {
        if hop.needs == hop.node {
            format!("{} stands first", place(hop.node))
        } else {
            format!("{} waits for {}", place(hop.node), place(hop.needs))
        }
    });
    let told = told.collect::<Vec<_>>().join("; behind that ");
    let rest = if circle.len() > TOLD { "; and so on round the circle" } else { "; that closes the circle" };
    let how = if run.schedule.is_lowered() { format!(" ({})", run.delivery) } else { String::new() };
    let message = format!(
        "deadlock of {} waiting actions{how}: {told}{rest}; change the order on one of these ranks",
        circle.len()
    );
    let mut witness: Vec<Place> = Vec::new();
    for node in circle.iter().flat_map(|hop| [hop.node, hop.needs]) {
        let place = place(node);
        if !witness.contains(&place) {
            witness.push(place);
        }
    }
    Fault::new(run.schedule, FaultKind::Deadlock, message, witness).into()
}

/// The actions at which ranks and channels stand, and for what they wait.
struct Graph {
    nodes: Vec<Node>,
    /// For each node: what it needs, and the node behind which that stands.
    edges: Vec<Vec<(Node, usize)>>,
}

impl Graph {
    fn of(run: &Run) -> Self {
        let mut graph = Self { nodes: Vec::new(), edges: Vec::new() };
        let mut index = BTreeMap::new();
        let mut open: VecDeque<Node> = (0..run.flow.num_ranks).flat_map(|rank| stands_at(run, rank)).collect();
        let mut found = Vec::new();
        while let Some(node) = open.pop_front() {
            if index.contains_key(&node) {
                continue;
            }
            index.insert(node, graph.nodes.len());
            graph.nodes.push(node);
            let waits = waits(run, node);
            open.extend(waits.iter().map(|&(_, behind)| behind));
            found.push(waits);
        }
        let target = |(needs, behind): (Node, Node)| index.get(&behind).map(|&at| (needs, at));
        graph.edges = found.into_iter().map(|waits| waits.into_iter().filter_map(target).collect()).collect();
        graph
    }

    fn shortest_circle(&self) -> Vec<Hop> {
        let mut best: Vec<Hop> = Vec::new();
        for start in 0..self.nodes.len() {
            let limit = if best.is_empty() { usize::MAX } else { best.len() };
            if let Some(circle) = self.circle_through(start, limit) {
                best = circle;
            }
            if (1..=2).contains(&best.len()) {
                break;
            }
        }
        best
    }

    /// The shortest circle through a node of fewer hops than `limit`.
    fn circle_through(&self, start: usize, limit: usize) -> Option<Vec<Hop>> {
        let mut came_from: BTreeMap<usize, (usize, Node)> = BTreeMap::new();
        let mut open = VecDeque::from([(start, 0_usize)]);
        while let Some((at, depth)) = open.pop_front() {
            if depth + 1 >= limit {
                return None;
            }
            for &(needs, to) in &self.edges[at] {
                if to == start {
                    return Some(self.trace(&came_from, start, at, needs));
                }
                came_from.entry(to).or_insert_with(|| {
                    open.push_back((to, depth + 1));
                    (at, needs)
                });
            }
        }
        None
    }

    fn trace(&self, came_from: &BTreeMap<usize, (usize, Node)>, start: usize, last: usize, needs: Node) -> Vec<Hop> {
        let mut circle = vec![Hop { node: self.nodes[last], needs }];
        let mut at = last;
        while at != start {
            let (from, needs) = came_from[&at];
            circle.push(Hop { node: self.nodes[from], needs });
            at = from;
        }
        circle.reverse();
        circle
    }
}

/// The actions at which a rank stands: none at its end.
fn stands_at(run: &Run, rank: usize) -> Vec<Node> {
    if let Some(sum) = run.sums.meets_at(rank) {
        return vec![(rank, sum)];
    }
    let program = &run.schedule.programs()[rank];
    let position = run.position[rank];
    let next = program.get(position);
    let pending = |lane: usize| run.lanes[lane].waiting().iter().map(move |&at| (rank, at as usize));
    match run.delivery {
        Delivery::Blocking | Delivery::Batched if next.is_none_or(|next| run.is_held_up(rank, next.kind)) => {
            let posted = (0..position).rev().take_while(|&at| is_message(program[at].kind));
            posted.filter(|&at| !run.has_passed(&program[at])).map(|at| (rank, at)).collect()
        }
        Delivery::Capacity(_) if next.is_some_and(|next| run.is_held_up(rank, next.kind)) => {
            run.full[rank].into_iter().flat_map(pending).take(1).collect()
        }
        _ => next.into_iter().map(|_| (rank, position)).collect(),
    }
}

/// What an action that stands needs, each with an action behind which that stands.
fn waits(run: &Run, node: Node) -> Vec<(Node, Node)> {
    let (rank, position) = node;
    let program = &run.schedule.programs()[rank];
    if is_message(program[position].kind) {
        return message_waits(run, node);
    }
    if program[position].kind == ActionKind::TiedReduce {
        return sum_waits(run, program[position].stage);
    }
    let end = crate::schedule::simulate::composite_end(program, position);
    let lacking = program[position..end].iter().filter(|part| run.lacks(part).is_some());
    lacking.flat_map(|part| compute_waits(run, rank, part)).collect()
}

fn compute_waits(run: &Run, rank: usize, action: &Action) -> Vec<(Node, Node)> {
    let is_forward = action.kind == ActionKind::Forward;
    let receive = if is_forward { ActionKind::RecvForward } else { ActionKind::RecvBackward };
    let receive = Action::new(receive, action.stage, action.microbatch);
    let Some(send) = run.schedule.placement().partner(receive) else { return Vec::new() };
    if run.schedule.is_lowered() && run.delivery != Delivery::Buffered {
        return find(run, rank, |other| same(other, &receive)).map(|node| (node, node)).into_iter().collect();
    }
    let from = run.flow.rank[send.stage as usize] as usize;
    let made = |other: &Action| {
        (other.stage, other.microbatch) == (send.stage, send.microbatch)
            && if run.schedule.is_lowered() {
                other.kind == send.kind
            } else if is_forward {
                other.kind == ActionKind::Forward
            } else {
                matches!(other.kind, ActionKind::Backward | ActionKind::InputGrad)
            }
    };
    find(run, from, made).map_or(Vec::new(), |needs| behind(run, needs))
}

/// A posted send or receive waits for what was posted before it in its channel, or for its partner.
fn message_waits(run: &Run, node: Node) -> Vec<(Node, Node)> {
    let (rank, position) = node;
    let action = &run.schedule.programs()[rank][position];
    if run.lanes.is_empty() {
        return Vec::new();
    }
    let lane = &run.lanes[run.lane_of(action)];
    if position < run.position[rank] && lane.first() != Some(position) {
        return lane.first().map(|first| ((rank, first), (rank, first))).into_iter().collect();
    }
    let Some(partner) = run.schedule.placement().partner(*action) else { return Vec::new() };
    let peer = run.flow.rank[partner.stage as usize] as usize;
    let Some(needs) = find(run, peer, |other| same(other, &partner)) else { return Vec::new() };
    if needs.1 >= run.position[peer] {
        return behind(run, needs);
    }
    let first = run.lanes[run.lane_of(&partner)].first();
    first.map(|first| (needs, (peer, first))).into_iter().collect()
}

/// An action that its rank has not reached stands behind everything at which the rank stands.
fn behind(run: &Run, needs: Node) -> Vec<(Node, Node)> {
    stands_at(run, needs.0).into_iter().map(|at| (needs, at)).collect()
}

/// A sum over shared weights waits for the stages that have not joined it.
fn sum_waits(run: &Run, stage: u32) -> Vec<(Node, Node)> {
    let Some(group) = run.sums.latest(stage) else { return Vec::new() };
    let joins = |other: u32| {
        let rank = run.flow.rank[other as usize] as usize;
        let is_sum = |action: &Action| action.kind == ActionKind::TiedReduce && action.stage == other;
        let sums = run.schedule.programs()[rank].iter().enumerate().filter(|(_, action)| is_sum(action));
        sums.map(|(position, _)| (rank, position)).nth(run.sums.turn(other, group)?)
    };
    run.sums.missing(group).filter_map(joins).flat_map(|needs| behind(run, needs)).collect()
}

fn find(run: &Run, rank: usize, wanted: impl Fn(&Action) -> bool) -> Option<Node> {
    run.schedule.programs()[rank].iter().position(wanted).map(|position| (rank, position))
}

fn same(one: &Action, other: &Action) -> bool {
    (one.kind, one.stage, one.microbatch) == (other.kind, other.stage, other.microbatch)
}
