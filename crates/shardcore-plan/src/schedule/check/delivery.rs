//! Runs a schedule without times, under a way to deliver messages.
//!
//! Channels join two ranks and nothing is chosen at run time, so all orders in which the ranks may go on end in the
//! same state (Kahn, "The semantics of a simple language for parallel programming", 1974): one run decides.

use std::collections::BTreeMap;
use std::fmt;

use crate::error::{PlanError, Result};
use crate::schedule::action::{Action, ActionKind};
use crate::schedule::flow::{Flow, NO_STAGE};
use crate::schedule::lower::Ties;
use crate::schedule::program::{CommModel, Gating, Schedule};
use crate::schedule::simulate::composite_end;

/// How messages are delivered: the models of [`CommModel`], and two between them.
///
/// A program that is right under blocking delivery is right under one queue per rank, then under one per pair, then
/// under one per directed edge, then with buffers. One that is right under blocking delivery is also right in batches
/// and with any capacity; either of these makes it right on directed edges; a larger capacity never hurts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Delivery {
    /// A send never waits; a message is found by its name.
    Buffered,
    /// One channel per directed edge, first in first out. Posting never waits; a message passes when both ends have
    /// posted it.
    Directed,
    /// As `Directed`, but a rank that sends waits while more than so many of its messages on the edge have not met
    /// their posted receive.
    Capacity(u32),
    /// The sends and receives between two computations are posted together, and the rank waits for all of them.
    Batched,
    /// One rendezvous channel per pair of ranks, for both directions.
    PairFifo,
    /// One queue per rank for all its sends and receives. What a rank computes behind a message reaches others only by
    /// messages that the queue holds back, so this refuses the programs that `Blocking` refuses, unless ranks meet in
    /// sums over shared weights as well.
    OneFifo,
    /// Each send and receive waits for its partner before the rank goes on.
    Blocking,
}

impl Delivery {
    /// The way to deliver messages of that name; all but `Capacity` have one.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`], which lists them.
    pub fn from_name(name: &str) -> Result<Self> {
        let named = CommModel::ALL.iter().map(|&model| Self::from(model)).chain([Self::Batched]);
        named.clone().find(|delivery| delivery.name() == name).ok_or_else(|| {
            let known: Vec<&str> = named.map(Self::name).collect();
            PlanError::unknown_name("communication model", name, &known)
        })
    }

    /// The name, without the number of messages of a capacity.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Buffered => CommModel::Buffered.name(),
            Self::Directed => CommModel::Directed.name(),
            Self::Capacity(_) => "capacity",
            Self::Batched => "batched",
            Self::PairFifo => CommModel::PairFifo.name(),
            Self::OneFifo => CommModel::OneFifo.name(),
            Self::Blocking => CommModel::Blocking.name(),
        }
    }
}

/// What messages say: `capacity 2 communication`.
impl fmt::Display for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        if let Self::Capacity(messages) = self {
            write!(f, " {messages}")?;
        }
        f.write_str(" communication")
    }
}

impl From<CommModel> for Delivery {
    fn from(model: CommModel) -> Self {
        match model {
            CommModel::Buffered => Self::Buffered,
            CommModel::Directed => Self::Directed,
            CommModel::PairFifo => Self::PairFifo,
            CommModel::OneFifo => Self::OneFifo,
            CommModel::Blocking => Self::Blocking,
        }
    }
}

/// A position of a rank's program.
pub(super) type Node = (usize, usize);

/// How a run ended, if not well.
pub(super) enum Stuck {
    /// Ranks wait for each other.
    Deadlock,
    /// The two ends of a channel stand at different messages.
    Mismatch(Node, Node),
}

/// The posted and unmatched sends and receives of a rank in one channel.
#[derive(Default)]
pub(super) struct Lane {
    rank: usize,
    queue: Vec<u32>,
    head: usize,
}

impl Lane {
    pub(super) fn first(&self) -> Option<usize> {
        self.queue.get(self.head).map(|&position| position as usize)
    }

    pub(super) fn waiting(&self) -> &[u32] {
        &self.queue[self.head..]
    }

    fn push(&mut self, position: usize) {
        self.queue.push(u32::try_from(position).unwrap_or(u32::MAX));
    }

    /// The first has been matched.
    fn pop(&mut self) {
        self.head += 1;
        if self.head == self.queue.len() {
            // Mostly nothing is left: the queue stays short, and in the cache.
            self.queue.clear();
            self.head = 0;
        }
    }
}

/// Which lane and which directed edge the sends and receives of a stage use. One entry per kind and stage.
#[derive(Default)]
struct Routes {
    lane: Vec<u32>,
    /// The lane of the partner, on the other rank.
    mirror: Vec<u32>,
    edge: Vec<u32>,
}

const MESSAGE_KINDS: [ActionKind; 4] =
    [ActionKind::SendForward, ActionKind::RecvForward, ActionKind::SendBackward, ActionKind::RecvBackward];

fn route(action: &Action) -> usize {
    action.stage as usize * MESSAGE_KINDS.len() + (action.kind as usize - ActionKind::SendForward as usize)
}

pub(super) fn is_message(kind: ActionKind) -> bool {
    kind.is_send() || kind.is_recv()
}

/// Sums over shared weights, in which the ranks that hold them meet.
pub(super) struct Sums {
    pub(super) ties: Ties,
    /// How many sums each stage has joined.
    joined: Vec<usize>,
    /// Where each rank waits for the other ranks of a sum.
    meets: Vec<Option<usize>>,
}

impl Sums {
    fn of(schedule: &Schedule) -> Self {
        let (num_stages, num_ranks) = (schedule.num_stages() as usize, schedule.num_ranks() as usize);
        Self { ties: Ties::of(schedule), joined: vec![0; num_stages], meets: vec![None; num_ranks] }
    }

    /// The group whose sum the stage joins now.
    fn join(&mut self, stage: u32) -> Option<u32> {
        let turn = &mut self.joined[stage as usize];
        *turn += 1;
        self.ties.of_stage(stage).get(*turn - 1).copied()
    }

    /// Where a rank waits for the other ranks of a sum.
    pub(super) fn meets_at(&self, rank: usize) -> Option<usize> {
        self.meets[rank]
    }

    /// The group whose sum a stage joined last.
    pub(super) fn latest(&self, stage: u32) -> Option<u32> {
        let turn = self.joined[stage as usize].checked_sub(1)?;
        self.ties.of_stage(stage).get(turn).copied()
    }

    /// The stages of a group that have not joined its sum.
    pub(super) fn missing(&self, group: u32) -> impl Iterator<Item = u32> {
        let absent = move |stage: &u32| {
            let joined = &self.ties.of_stage(*stage)[..self.joined[*stage as usize]];
            !joined.contains(&group)
        };
        self.ties.stages(group).iter().copied().filter(absent)
    }

    /// Which `TIED_REDUCE` of a stage is for a group, counted from 0.
    pub(super) fn turn(&self, stage: u32, group: u32) -> Option<usize> {
        self.ties.of_stage(stage).iter().position(|&other| other == group)
    }
}

/// A run of a schedule of valid structure.
pub(super) struct Run<'a> {
    pub(super) schedule: &'a Schedule,
    pub(super) flow: Flow,
    pub(super) delivery: Delivery,
    pub(super) lanes: Vec<Lane>,
    /// The next position of each rank.
    pub(super) position: Vec<usize>,
    routes: Routes,
    /// Which messages are there: inputs of all forwards, then gradients for all backwards, by their receiver.
    there: Vec<bool>,
    /// Posted sends and receives that are not matched, per rank.
    outstanding: Vec<u32>,
    /// The lane that holds a rank up because it is full.
    pub(super) full: Vec<Option<usize>>,
    pub(super) sums: Sums,
    idle: Vec<bool>,
    runnable: Vec<usize>,
    touched: Vec<usize>,
}

impl<'a> Run<'a> {
    /// Runs a schedule as far as it goes. A schedule that is not lowered has buffered messages.
    pub(super) fn new(schedule: &'a Schedule, delivery: Delivery) -> Self {
        let flow = Flow::of(schedule.header());
        let num_ranks = flow.num_ranks;
        let (routes, lanes) = if schedule.is_lowered() && delivery != Delivery::Buffered {
            routes(schedule, &flow, delivery)
        } else {
            (Routes::default(), Vec::new())
        };
        Self {
            schedule,
            delivery,
            lanes,
            position: vec![0; num_ranks],
            routes,
            there: vec![false; 2 * flow.num_cells()],
            outstanding: vec![0; num_ranks],
            full: vec![None; num_ranks],
            sums: Sums::of(schedule),
            idle: vec![false; num_ranks],
            runnable: (0..num_ranks).rev().collect(),
            touched: Vec::new(),
            flow,
        }
    }

    /// Runs all ranks to their ends.
    pub(super) fn finish(&mut self) -> Result<(), Stuck> {
        while let Some(rank) = self.runnable.pop() {
            self.idle[rank] = false;
            while self.step(rank)? {}
            self.idle[rank] = true;
        }
        let programs = self.schedule.programs();
        let ended = (0..programs.len())
            .all(|rank| self.position[rank] == programs[rank].len() && self.sums.meets_at(rank).is_none());
        if ended && self.outstanding.iter().all(|&count| count == 0) { Ok(()) } else { Err(Stuck::Deadlock) }
    }

    /// Runs the next action of a rank, if it can.
    fn step(&mut self, rank: usize) -> Result<bool, Stuck> {
        let schedule = self.schedule;
        let program = &schedule.programs()[rank];
        let position = self.position[rank];
        let Some(action) = program.get(position) else { return Ok(false) };
        if self.sums.meets_at(rank).is_some() || self.is_held_up(rank, action.kind) {
            return Ok(false);
        }
        if action.kind == ActionKind::TiedReduce {
            self.position[rank] += 1;
            self.join_sum(rank, position, action.stage);
            return Ok(true);
        }
        if is_message(action.kind) {
            self.position[rank] += 1;
            self.post(rank, position, action)?;
            return Ok(true);
        }
        let together = action.with_next && schedule.header().gating == Gating::All;
        let end = if together { composite_end(program, position) } else { position + 1 };
        if program[position..end].iter().any(|part| self.lacks(part).is_some()) {
            return Ok(false);
        }
        self.position[rank] = end;
        program[position..end].iter().for_each(|part| self.hand_on(part));
        Ok(true)
    }

    /// A stage joins the next of its sums; a rank of which no other stage is to come waits there for the other ranks.
    fn join_sum(&mut self, rank: usize, position: usize, stage: u32) {
        let Some(group) = self.sums.join(stage) else { return };
        if self.sums.missing(group).any(|other| self.flow.rank[other as usize] as usize == rank) {
            return;
        }
        self.sums.meets[rank] = Some(position);
        if self.sums.missing(group).next().is_some() {
            return;
        }
        for at in 0..self.sums.ties.stages(group).len() {
            let other = self.flow.rank[self.sums.ties.stages(group)[at] as usize] as usize;
            self.sums.meets[other] = None;
            self.wake(other);
        }
    }

    /// Whether a rank waits for sends and receives that it posted before.
    pub(super) fn is_held_up(&self, rank: usize, next: ActionKind) -> bool {
        match self.delivery {
            Delivery::Blocking => self.outstanding[rank] > 0,
            Delivery::Batched => self.outstanding[rank] > 0 && !is_message(next),
            Delivery::Capacity(most) => {
                self.full[rank].is_some_and(|lane| self.lanes[lane].waiting().len() > most as usize)
            }
            _ => false,
        }
    }

    /// The message from another rank that an action lacks.
    pub(super) fn lacks(&self, action: &Action) -> Option<usize> {
        let stage = action.stage as usize;
        let (from, side) = match action.kind {
            ActionKind::Forward => (self.flow.prev[stage], 0),
            ActionKind::Backward | ActionKind::InputGrad => (self.flow.next[stage], self.flow.num_cells()),
            _ => return None,
        };
        let message = side + self.flow.cell(action.stage, action.microbatch);
        (from != NO_STAGE && self.flow.crosses(from, action.stage) && !self.there[message]).then_some(message)
    }

    /// On programs without communication the result of an action leaves by itself.
    fn hand_on(&mut self, action: &Action) {
        if self.schedule.is_lowered() {
            return;
        }
        let stage = action.stage as usize;
        let (to, side) = match action.kind {
            ActionKind::Forward => (self.flow.next[stage], 0),
            ActionKind::Backward | ActionKind::InputGrad => (self.flow.prev[stage], self.flow.num_cells()),
            _ => return,
        };
        if to != NO_STAGE && self.flow.crosses(action.stage, to) {
            self.deliver(side + self.flow.cell(to, action.microbatch), to);
        }
    }

    fn deliver(&mut self, message: usize, to: u32) {
        self.there[message] = true;
        self.wake(self.flow.rank[to as usize] as usize);
    }

    fn wake(&mut self, rank: usize) {
        if std::mem::take(&mut self.idle[rank]) {
            self.runnable.push(rank);
        }
    }

    /// The message of a send or a receive, and the stage that takes it.
    pub(super) fn message(&self, action: &Action) -> (usize, u32) {
        let stage = action.stage as usize;
        let (to, side) = match action.kind {
            ActionKind::SendForward => (self.flow.next[stage], 0),
            ActionKind::RecvForward => (action.stage, 0),
            ActionKind::SendBackward => (self.flow.prev[stage], self.flow.num_cells()),
            _ => (action.stage, self.flow.num_cells()),
        };
        (side + self.flow.cell(to, action.microbatch), to)
    }

    /// Whether the message of a send or a receive has passed.
    pub(super) fn has_passed(&self, action: &Action) -> bool {
        self.there[self.message(action).0]
    }

    fn post(&mut self, rank: usize, position: usize, action: &Action) -> Result<(), Stuck> {
        if self.delivery == Delivery::Buffered {
            if action.kind.is_send() {
                let (message, to) = self.message(action);
                self.deliver(message, to);
            }
            return Ok(());
        }
        let lane = self.lane_of(action);
        if matches!(self.delivery, Delivery::Capacity(_)) && action.kind.is_send() {
            self.full[rank] = Some(lane);
        }
        let partner = if self.lanes[lane].waiting().is_empty() { self.partner(rank, position, action)? } else { None };
        let Some(mirror) = partner else {
            self.lanes[lane].push(position);
            self.outstanding[rank] += 1;
            return Ok(());
        };
        let message = self.message(action).0;
        self.there[message] = true;
        self.pass(mirror);
        self.settle(mirror)
    }

    /// The lane whose first is the other end of a send or a receive that is the first of its own; `None` if there is none
    /// yet.
    fn partner(&self, rank: usize, position: usize, action: &Action) -> Result<Option<usize>, Stuck> {
        let mirror = self.routes.mirror[route(action)] as usize;
        let Some((other_at, other)) = self.first_of(mirror) else { return Ok(None) };
        if self.routes.edge[route(action)] != self.routes.edge[route(other)]
            || action.kind.is_send() == other.kind.is_send()
        {
            return Ok(None);
        }
        if self.message(action) == self.message(other) {
            return Ok(Some(mirror));
        }
        Err(Stuck::Mismatch((rank, position), (self.lanes[mirror].rank, other_at)))
    }

    /// The first of a lane has met its other end.
    fn pass(&mut self, lane: usize) {
        let rank = self.lanes[lane].rank;
        self.lanes[lane].pop();
        self.outstanding[rank] -= 1;
        self.wake(rank);
    }

    /// The lane of a send or a receive, where there are lanes.
    pub(super) fn lane_of(&self, action: &Action) -> usize {
        self.routes.lane[route(action)] as usize
    }

    /// Matches what can be matched, beginning with the first of a lane.
    fn settle(&mut self, lane: usize) -> Result<(), Stuck> {
        self.touched.push(lane);
        while let Some(lane) = self.touched.pop() {
            let Some((position, action)) = self.first_of(lane) else { continue };
            let Some(mirror) = self.partner(self.lanes[lane].rank, position, action)? else { continue };
            let message = self.message(action).0;
            self.there[message] = true;
            for lane in [lane, mirror] {
                self.pass(lane);
                self.touched.push(lane);
            }
        }
        Ok(())
    }

    fn first_of(&self, lane: usize) -> Option<(usize, &'a Action)> {
        let position = self.lanes[lane].first()?;
        Some((position, &self.schedule.programs()[self.lanes[lane].rank][position]))
    }
}

/// Lanes and routes of all sends and receives that a placement has.
fn routes(schedule: &Schedule, flow: &Flow, delivery: Delivery) -> (Routes, Vec<Lane>) {
    let placement = schedule.placement();
    let (mut lanes, mut known, mut edges) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
    let mut lane_of = |rank: u32, peer: u32, is_send: bool| {
        let key = match delivery {
            Delivery::OneFifo | Delivery::Blocking => (rank, rank, true),
            Delivery::PairFifo => (rank, peer, true),
            _ => (rank, peer, is_send),
        };
        *known.entry(key).or_insert_with(|| {
            lanes.push(Lane { rank: rank as usize, ..Lane::default() });
            u32::try_from(lanes.len() - 1).unwrap_or(u32::MAX)
        })
    };
    let mut routes = Routes::default();
    for stage in (0..).take(flow.num_stages) {
        for kind in MESSAGE_KINDS {
            let partner = placement.partner(Action::new(kind, stage, 0)).map_or(stage, |partner| partner.stage);
            let (rank, peer) = (flow.rank[stage as usize], flow.rank[partner as usize]);
            let edge = if kind.is_send() { (rank, peer) } else { (peer, rank) };
            let num_edges = u32::try_from(edges.len()).unwrap_or(u32::MAX);
            routes.edge.push(*edges.entry(edge).or_insert(num_edges));
            routes.lane.push(lane_of(rank, peer, kind.is_send()));
            routes.mirror.push(lane_of(peer, rank, !kind.is_send()));
        }
    }
    (routes, lanes)
}
