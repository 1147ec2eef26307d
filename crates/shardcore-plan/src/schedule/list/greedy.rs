//! List scheduling: forwards and input gradients in a given order, weight gradients where there is room.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use super::problem::{Op, OpKind, Order, Problem};
use super::timing::{Timing, Workspace};

/// How a rank decides when its next op in the given order cannot start yet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rule {
    /// A weight gradient is put into a gap of at least this part of its time.
    pub(crate) fill: f64,
    /// How many ops ahead in the order a rank may look for one that can start now; 0 keeps the order.
    pub(crate) ahead: usize,
    /// An op from further ahead may delay the one before it by this part of its time.
    pub(crate) delay: f64,
}

impl Rule {
    /// The rules that the search tries. Their number keeps it short; each wins somewhere.
    pub(crate) fn all() -> impl Iterator<Item = Self> + Clone {
        let fills = [1e-6, 0.25, 0.5, 0.75, 1.0];
        let overtakes = [(0, 0.0), (3, 0.0), (3, 0.5), (3, 1.0)];
        fills.into_iter().flat_map(move |fill| overtakes.map(|(ahead, delay)| Self { fill, ahead, delay }))
    }
}

impl Rule {
    /// Those of [`Rule::all`] that are most unlike.
    pub(crate) fn few() -> impl Iterator<Item = Self> + Clone {
        let rule = |(fill, ahead, delay)| Self { fill, ahead, delay };
        [(0.5, 3, 1.0), (1e-6, 0, 0.0), (0.5, 0, 0.0), (1e-6, 3, 0.5), (0.75, 3, 0.0)].into_iter().map(rule)
    }
}

/// A time with a total order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Time(pub(super) f64);

impl Eq for Time {}

impl Ord for Time {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Time {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// What a rank does next.
enum Decision {
    /// The op of that kind and stage, now. `true`: it is the next one in the order.
    Start(OpKind, usize, bool),
    /// Nothing before this time.
    WaitUntil(f64),
    /// Nothing before another rank has placed an op.
    Sleep,
    /// The order cannot be kept within the cap.
    Stuck,
}

/// Schedules the forwards and input gradients of `order` (see [`Pattern`](super::Pattern)) as early as they can start
/// within the caps, and weight gradients in the gaps, at the end, or as soon as memory is short. `None` if the order
/// does not fit into the caps.
///
/// Ranks decide in the order of time, so a rank knows when every op that another has started will end: it looks ahead
/// to inputs that are on their way. Of the order, `order` is consumed: ops that overtake are moved.
pub(crate) fn schedule_list(
    problem: &Problem,
    order: &mut [Vec<Op>],
    rule: Rule,
    space: &mut Workspace,
) -> Option<(Order, Timing)> {
    space.reset();
    let (num_ranks, num_stages) = (problem.num_ranks, problem.num_stages());
    let (position, asleep, early) = (vec![0; num_ranks], vec![false; num_ranks], vec![0; num_stages]);
    let waiting = vec![BTreeSet::new(); num_ranks];
    let mut list = List { problem, order, rule, space, position, asleep, early, waiting };
    let out = list.run()?;
    Some((out, list.space.timing()))
}

struct List<'a> {
    problem: &'a Problem,
    order: &'a mut [Vec<Op>],
    rule: Rule,
    space: &'a mut Workspace,
    position: Vec<usize>,
    asleep: Vec<bool>,
    /// Per stage, how many weight gradients ran before their place in the order.
    early: Vec<usize>,
    /// Per rank, its stages with a weight gradient to do, those with the largest stash first.
    waiting: Vec<BTreeSet<(Reverse<Time>, usize)>>,
}

impl List<'_> {
    fn run(&mut self) -> Option<Order> {
        let problem = self.problem;
        let of_stage = |&stage: &usize| 3 * problem.num_microbatches - problem.fused[stage].len();
        let lengths = problem.stages_of.iter().map(|stages| stages.iter().map(of_stage).sum::<usize>());
        let mut out: Order = lengths.clone().map(Vec::with_capacity).collect();
        let mut events: BinaryHeap<Reverse<(Time, usize)>> =
            (0..self.problem.num_ranks).map(|rank| Reverse((Time(0.0), rank))).collect();
        while let Some(Reverse((Time(now), rank))) = events.pop() {
            if now < self.space.clock[rank] {
                continue; // Woken while it was busy; it decides again when it is free.
            }
            self.asleep[rank] = false;
            match self.decide(rank, now) {
                Decision::Start(kind, stage, in_order) => {
                    self.position[rank] += usize::from(in_order);
                    out[rank].push(Op::new(kind, self.problem.chunk_of[stage]));
                    let woken = self.space.place(self.problem, kind, stage, now).filter(|&woken| self.asleep[woken]);
                    self.note_waiting(rank, kind, stage);
                    events.push(Reverse((Time(self.space.clock[rank]), rank)));
                    events.extend(woken.map(|woken| Reverse((Time(now), woken))));
                }
                Decision::WaitUntil(time) => {
                    self.asleep[rank] = true;
                    events.push(Reverse((Time(time), rank)));
                }
                Decision::Sleep => self.asleep[rank] = true,
                Decision::Stuck => return None,
            }
        }
        out.iter().zip(lengths).all(|(ops, length)| ops.len() == length).then_some(out)
    }

    fn decide(&mut self, rank: usize, now: f64) -> Decision {
        let Some(op) = self.next_op(rank) else {
            return self.fill(rank).unwrap_or(Decision::Sleep);
        };
        let (kind, stage) = (op.kind(), self.stage(rank, op));
        if kind == OpKind::Forward && !self.fits(rank, stage, 0.0) {
            return self.make_room(rank, now);
        }
        match self.space.arrival(self.problem, kind, stage) {
            Some(arrival) if arrival <= now => Decision::Start(kind, stage, true),
            Some(arrival) => self.bridge(rank, now, arrival),
            None => self.fill(rank).unwrap_or(Decision::Sleep),
        }
    }

    /// The next op in the rank's order. Weight gradients that ran before, or whose input gradient did not, are passed.
    fn next_op(&mut self, rank: usize) -> Option<Op> {
        loop {
            let &op = self.order[rank].get(self.position[rank])?;
            let stage = self.stage(rank, op);
            if op.kind() != OpKind::WeightGrad || (self.early[stage] == 0 && self.space.waits(stage)) {
                return Some(op);
            }
            self.early[stage] = self.early[stage].saturating_sub(1);
            self.position[rank] += 1;
        }
    }

    /// A weight gradient outside the order.
    fn fill(&mut self, rank: usize) -> Option<Decision> {
        let stage = self.waiting_weight(rank)?;
        self.early[stage] += 1;
        Some(Decision::Start(OpKind::WeightGrad, stage, false))
    }

    fn stage(&self, rank: usize, op: Op) -> usize {
        self.problem.stages_of[rank][usize::from(op.chunk())]
    }

    /// Whether the rank has memory for a forward of the stage, and for `reserved` more.
    fn fits(&self, rank: usize, stage: usize, reserved: f64) -> bool {
        self.space.held[rank] + self.problem.activation[stage] + reserved <= self.problem.cap[rank]
    }

    /// Of the rank's stages with a weight gradient to do, the one whose stash is largest.
    fn waiting_weight(&self, rank: usize) -> Option<usize> {
        self.waiting[rank].first().map(|&(_, stage)| stage)
    }

    /// Notes whether a stage has a weight gradient to do, after an op of it.
    fn note_waiting(&mut self, rank: usize, kind: OpKind, stage: usize) {
        let entry = (Reverse(Time(self.problem.stash[stage])), stage);
        match kind {
            OpKind::InputGrad => {
                self.waiting[rank].insert(entry);
            }
            OpKind::WeightGrad if !self.space.waits(stage) => {
                self.waiting[rank].remove(&entry);
            }
            _ => {}
        }
    }

    /// A forward has no memory: a weight gradient gives some back, or the next input gradient comes first.
    fn make_room(&mut self, rank: usize, now: f64) -> Decision {
        if let Some(decision) = self.fill(rank) {
            return decision;
        }
        let ops = &mut self.order[rank][self.position[rank]..];
        let is_backward = |op: &Op| matches!(op.kind(), OpKind::InputGrad | OpKind::Backward);
        let Some(ahead) = ops.iter().position(is_backward) else {
            return Decision::Stuck;
        };
        ops[..=ahead].rotate_right(1);
        self.decide(rank, now)
    }

    /// The next op's input is on its way: another op overtakes it, a weight gradient fills the gap, or the rank waits.
    fn bridge(&mut self, rank: usize, now: f64, arrival: f64) -> Decision {
        if let Some(ahead) = self.find_overtaker(rank, now, arrival) {
            let position = self.position[rank];
            self.order[rank][position..=position + ahead].rotate_right(1);
            let op = self.order[rank][position];
            return Decision::Start(op.kind(), self.stage(rank, op), true);
        }
        match self.waiting_weight(rank) {
            Some(stage) if arrival - now >= self.rule.fill * self.problem.time_of(OpKind::WeightGrad, stage) => {
                self.fill(rank).unwrap_or(Decision::WaitUntil(arrival))
            }
            _ => Decision::WaitUntil(arrival),
        }
    }

    /// How far ahead in the order an op stands that can start now and delays the next one by little enough.
    fn find_overtaker(&self, rank: usize, now: f64, arrival: f64) -> Option<usize> {
        let ops = &self.order[rank][self.position[rank]..];
        let reserved =
            if ops[0].kind() == OpKind::Forward { self.problem.activation[self.stage(rank, ops[0])] } else { 0.0 };
        (1..ops.len().min(self.rule.ahead + 1)).find(|&ahead| {
            let op = ops[ahead];
            let (kind, stage) = (op.kind(), self.stage(rank, op));
            let time = self.problem.time_of(kind, stage);
            kind != OpKind::WeightGrad
                && !ops[..ahead].contains(&op)
                && (kind != OpKind::Forward || self.fits(rank, stage, reserved))
                && now + time <= arrival + self.rule.delay * time
                && self.space.arrival(self.problem, kind, stage).is_some_and(|arrival| arrival <= now)
        })
    }
}
