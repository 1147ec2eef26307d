//! When each result of a computation leaves, at given costs.

use super::options::Lowering;
use super::waiting::{Waiting, stream};
use crate::error::{PlanError, Result};
use crate::schedule::action::{Action, ActionKind};
use crate::schedule::costs::Costs;
use crate::schedule::placement::Placement;
use crate::schedule::program::{Gating, Schedule};

/// A neighbour in the chain: its stage and the rank that holds it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Neighbour {
    pub(super) stage: u32,
    pub(super) rank: u32,
}

/// Both neighbours of a stage.
#[derive(Clone, Copy, Debug)]
pub(super) struct Links {
    pub(super) previous: Option<Neighbour>,
    pub(super) next: Option<Neighbour>,
}

/// Two directions of flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Forward,
    Backward,
}

/// No time yet. Times are at least 0.
const NEVER: f64 = -1.0;

/// When each result leaves its computation: a moment, and its turn among those of one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Departure {
    time: f64,
    turn: u32,
}

/// When the results of all forwards, input gradients and fused backwards leave.
///
/// Turns count the results in an order in which they can leave one after another, so times and turns together order
/// them as programs and messages do, also where computations take no time.
pub(super) struct Times {
    pub(super) links: Vec<Links>,
    /// The most inputs of a stage and direction that wait for their use.
    pub(super) receives_ahead: u32,
    num_units: usize,
    forward: Vec<Departure>,
    backward: Vec<Departure>,
    /// Whether the weight gradient has run.
    weights: Vec<bool>,
}

impl Times {
    /// Runs every rank's program at given costs. A result stays with its rank, and the rank waits, while as many results
    /// as may be ahead are with the receiving stage and not used. Where that would hold up all ranks for good, one more
    /// may.
    ///
    /// # Errors
    /// [`PlanError::BadAction`] for an action that can never run; [`PlanError::TooFewReceives`] if more must be ahead
    /// than the lowering allows.
    pub(super) fn new(schedule: &Schedule, lowering: &Lowering, costs: &Costs) -> Result<Self> {
        let run = Run::new(schedule, Waiting::new(schedule, lowering.most_receives_ahead()), costs);
        let times = run.finish()?;
        match lowering.receives_ahead {
            Some(given) if given < times.receives_ahead => {
                Err(PlanError::TooFewReceives { given, needed: times.receives_ahead })
            }
            _ => Ok(times),
        }
    }

    fn empty(schedule: &Schedule) -> Self {
        let placement = schedule.placement();
        let num_units = schedule.header().num_units() as usize;
        let num_cells = num_units * placement.num_stages() as usize;
        let links = (0..placement.num_stages()).map(|stage| links(placement, stage)).collect();
        let never = vec![Departure { time: NEVER, turn: 0 }; num_cells];
        let weights = vec![false; num_cells];
        Self { links, receives_ahead: 0, num_units, forward: never.clone(), backward: never, weights }
    }

    /// The place of a result in the one order of all of them; no two have the same.
    pub(super) fn order(&self, direction: Direction, stage: u32, unit: u32) -> (u64, u32) {
        let Departure { time, turn } = self.results(direction)[self.cell(stage, unit)];
        // Doubles that are not negative stand in the order of their bits.
        (time.to_bits(), turn)
    }

    /// When a result left, if it did.
    fn left(&self, direction: Direction, stage: u32, unit: u32) -> Option<f64> {
        let time = self.results(direction)[self.cell(stage, unit)].time;
        (time >= 0.0).then_some(time)
    }

    fn results(&self, direction: Direction) -> &[Departure] {
        match direction {
            Direction::Forward => &self.forward,
            Direction::Backward => &self.backward,
        }
    }

    fn cell(&self, stage: u32, unit: u32) -> usize {
        stage as usize * self.num_units + unit as usize
    }

    /// Where an action's input comes from; `None` at the ends of a chain and for weight gradients.
    pub(super) fn source(&self, action: Action) -> Option<(Direction, Neighbour)> {
        let links = self.links[action.stage as usize];
        match direction_of(action.kind)? {
            Direction::Forward => links.previous.map(|neighbour| (Direction::Forward, neighbour)),
            Direction::Backward => links.next.map(|neighbour| (Direction::Backward, neighbour)),
        }
    }

    /// Where an action's output goes; `None` at the ends of a chain and for weight gradients.
    pub(super) fn target(&self, action: Action) -> Option<(Direction, Neighbour)> {
        let links = self.links[action.stage as usize];
        match direction_of(action.kind)? {
            Direction::Forward => links.next.map(|neighbour| (Direction::Forward, neighbour)),
            Direction::Backward => links.previous.map(|neighbour| (Direction::Backward, neighbour)),
        }
    }
}

/// Which way the result of a computation flows.
fn direction_of(kind: ActionKind) -> Option<Direction> {
    match kind {
        ActionKind::Forward => Some(Direction::Forward),
        ActionKind::Backward | ActionKind::InputGrad => Some(Direction::Backward),
        _ => None,
    }
}

fn links(placement: &Placement, stage: u32) -> Links {
    let neighbour = |stage| Neighbour { stage, rank: placement.rank_of(stage) };
    Links { previous: placement.previous(stage).map(neighbour), next: placement.next(stage).map(neighbour) }
}

/// The number of actions that run as one with the first, itself included; 0 of none.
fn composite_len(program: &[Action]) -> usize {
    program.iter().position(|action| !action.with_next).map_or(program.len(), |last| last + 1)
}

/// The composites of a program (single actions are such), each with the gaps before and behind it.
pub(super) fn composites(program: &[Action]) -> impl Iterator<Item = (u32, u32, &[Action])> {
    split(program, composite_len)
}

/// What of a program starts and ends as one: composites, or their parts where each has its own inputs only.
pub(super) fn blocks(program: &[Action], gating: Gating) -> impl Iterator<Item = (u32, u32, &[Action])> {
    split(program, move |rest| block_len(rest, gating))
}

fn block_len(program: &[Action], gating: Gating) -> usize {
    match gating {
        Gating::All => composite_len(program),
        Gating::Own => program.len().min(1),
    }
}

fn split(program: &[Action], len: impl Fn(&[Action]) -> usize) -> impl Iterator<Item = (u32, u32, &[Action])> {
    let (mut before, mut rest) = (0, program);
    std::iter::from_fn(move || {
        let (block, others) = rest.split_at(len(rest));
        let after = before + index(block.len());
        let item = (before, after, block);
        (before, rest) = (after, others);
        (!block.is_empty()).then_some(item)
    })
}

/// Positions fit: a program has at most three actions for each of 2^28 forwards.
#[expect(clippy::cast_possible_truncation, reason = "at most 3 * 2^28")]
fn index(count: usize) -> u32 {
    count as u32
}

/// What keeps a rank from going on.
enum Blocked {
    /// Something of another rank.
    By { rank: u32 },
    /// The part at this position of the block can never run.
    Forever { part: usize, reason: String },
}

/// All ranks at work.
struct Run<'a> {
    schedule: &'a Schedule,
    costs: &'a Costs,
    times: Times,
    ranks: Vec<Rank>,
    /// The ranks that wait for each rank.
    waiters: Vec<Vec<u32>>,
    waiting: Waiting,
    num_left: u32,
}

/// Where a rank is: what it has computed, and what of that has left.
#[derive(Clone, Copy, Default)]
struct Rank {
    clock: f64,
    position: usize,
    handed_on: usize,
}

impl Rank {
    /// Whether something that it has computed cannot leave.
    fn lacks_room(&self) -> bool {
        self.handed_on < self.position
    }
}

impl<'a> Run<'a> {
    fn new(schedule: &'a Schedule, waiting: Waiting, costs: &'a Costs) -> Self {
        let num_ranks = schedule.num_ranks() as usize;
        let (ranks, waiters) = (vec![Rank::default(); num_ranks], vec![Vec::new(); num_ranks]);
        Self { schedule, costs, times: Times::empty(schedule), ranks, waiters, waiting, num_left: 0 }
    }

    /// The times, and how many inputs of a stage and direction had to wait at most.
    ///
    /// # Errors
    /// An action that can never run, whatever the others do and however much room there is.
    fn finish(mut self) -> Result<Times> {
        self.go_on()?;
        while self.ranks.iter().any(Rank::lacks_room) {
            self.waiting.widen();
            self.go_on()?;
        }
        let program = |rank: u32| &self.schedule.programs()[rank as usize];
        let unfinished = |&rank: &u32| self.ranks[rank as usize].position < program(rank).len();
        if let Some(rank) = (0..self.schedule.num_ranks()).find(unfinished) {
            return Err(self.stuck(rank));
        }
        self.times.receives_ahead = u32::try_from(self.waiting.window()).unwrap_or(u32::MAX);
        Ok(self.times)
    }

    /// Runs all ranks until each has ended or waits.
    fn go_on(&mut self) -> Result<()> {
        self.waiters.iter_mut().for_each(Vec::clear);
        let mut awake: Vec<u32> = (0..self.schedule.num_ranks()).rev().collect();
        while let Some(rank) = awake.pop() {
            if self.advance(rank)? {
                awake.append(&mut self.waiters[rank as usize]);
            }
        }
        Ok(())
    }

    fn rest(&self, rank: u32) -> &'a [Action] {
        &self.schedule.programs()[rank as usize][self.ranks[rank as usize].position..]
    }

    /// Runs a rank until it must wait; whether it did anything.
    fn advance(&mut self, rank: u32) -> Result<bool> {
        let before = self.ranks[rank as usize];
        let gating = self.schedule.header().gating;
        let mut blocked = self.hand_on(rank);
        while blocked.is_none() {
            let rest = self.rest(rank);
            let block = &rest[..block_len(rest, gating)];
            if block.is_empty() {
                break;
            }
            blocked = match self.start(rank, block) {
                Ok(start) => {
                    self.run(rank, block, start);
                    self.hand_on(rank)
                }
                Err(blocked) => Some(blocked),
            };
        }
        match blocked {
            Some(Blocked::By { rank: other }) => self.waiters[other as usize].push(rank),
            Some(Blocked::Forever { part, reason }) => return Err(self.bad_action(rank, part, reason)),
            None => {}
        }
        let Rank { position, handed_on, .. } = self.ranks[rank as usize];
        Ok((position, handed_on) != (before.position, before.handed_on))
    }

    /// When a block may start: when the rank is free and all inputs are there.
    fn start(&self, rank: u32, block: &[Action]) -> Result<f64, Blocked> {
        let mut start = self.ranks[rank as usize].clock;
        for (part, &action) in block.iter().enumerate() {
            let inside = &block[..part];
            self.check(rank, action, inside).map_err(|reason| Blocked::Forever { part, reason })?;
            let Some((direction, source)) = self.times.source(action) else { continue };
            match self.times.left(direction, source.stage, action.microbatch) {
                Some(left) if source.rank == rank => start = start.max(left),
                Some(left) => start = start.max(left + self.costs.hop),
                None if source.rank != rank => return Err(Blocked::By { rank: source.rank }),
                None if inside.iter().any(|&other| produces(other, direction, source.stage, action)) => {}
                None => {
                    let stage = source.stage;
                    let reason = format!("it needs what stage {stage} of the same rank computes later or never");
                    return Err(Blocked::Forever { part, reason });
                }
            }
        }
        Ok(start)
    }

    /// What the rank itself must have done before, and not done yet.
    fn check(&self, rank: u32, action: Action, inside: &[Action]) -> Result<(), String> {
        let Action { kind, stage, microbatch, .. } = action;
        let done = |direction| {
            self.times.left(direction, stage, microbatch).is_some()
                || inside.iter().any(|&other| produces(other, direction, stage, action))
        };
        let cell = self.times.cell(stage, microbatch);
        let (forward, backward) = (done(Direction::Forward), done(Direction::Backward));
        let holder = self.schedule.placement().rank_of(stage);
        if holder != rank {
            return Err(format!("stage {stage} is on rank {holder}"));
        }
        match kind {
            ActionKind::Forward if forward => Err("it has run before".to_owned()),
            ActionKind::Backward | ActionKind::InputGrad if backward => Err("it has run before".to_owned()),
            ActionKind::Backward | ActionKind::InputGrad if !forward => Err("its forward has not run".to_owned()),
            ActionKind::WeightGrad if !backward => Err("its input gradient has not run".to_owned()),
            ActionKind::WeightGrad if self.times.weights[cell] => Err("it has run before".to_owned()),
            _ => Ok(()),
        }
    }

    /// The parts run one after the other.
    fn run(&mut self, rank: u32, block: &[Action], start: f64) {
        let end = start + block.iter().map(|&action| self.time_of(action)).sum::<f64>();
        for &action in block {
            if let Some((direction, _)) = self.times.source(action).filter(|(_, source)| source.rank != rank) {
                self.waiting.take(stream(direction, action.stage), end);
            }
            let cell = self.times.cell(action.stage, action.microbatch);
            self.times.weights[cell] |= matches!(action.kind, ActionKind::Backward | ActionKind::WeightGrad);
        }
        self.ranks[rank as usize].clock = end;
        self.ranks[rank as usize].position += block.len();
    }

    fn time_of(&self, Action { kind, stage, .. }: Action) -> f64 {
        match kind {
            ActionKind::Forward => self.costs.forward[stage as usize],
            ActionKind::Backward => self.costs.backward(stage),
            ActionKind::InputGrad => self.costs.input_grad[stage as usize],
            ActionKind::WeightGrad => self.costs.weight_grad[stage as usize],
            _ => 0.0,
        }
    }

    /// Lets results leave for their stages, in the order of the program; what the rank waits for with one of them.
    fn hand_on(&mut self, rank: u32) -> Option<Blocked> {
        let program = &self.schedule.programs()[rank as usize];
        let Rank { mut clock, position, mut handed_on } = self.ranks[rank as usize];
        let mut blocked = None;
        for &action in &program[handed_on..position] {
            if let Some((direction, target)) = self.times.target(action).filter(|(_, target)| target.rank != rank) {
                let stream = stream(direction, target.stage);
                let Some(room) = self.waiting.room(stream) else {
                    blocked = Some(Blocked::By { rank: target.rank });
                    break;
                };
                clock = clock.max(room);
                self.waiting.add(stream);
            }
            let cell = self.times.cell(action.stage, action.microbatch);
            let departure = Departure { time: clock, turn: self.num_left };
            match direction_of(action.kind) {
                Some(Direction::Forward) => self.times.forward[cell] = departure,
                Some(Direction::Backward) => self.times.backward[cell] = departure,
                None => {}
            }
            self.num_left += 1;
            handed_on += 1;
        }
        self.ranks[rank as usize] = Rank { clock, position, handed_on };
        blocked
    }

    /// The first rank of those that wait for each other, or for what never runs.
    fn stuck(&self, rank: u32) -> PlanError {
        let rest = self.rest(rank);
        let block = &rest[..block_len(rest, self.schedule.header().gating)];
        let missing = block.iter().enumerate().find_map(|(part, &action)| {
            let (direction, source) = self.times.source(action)?;
            let missing = self.times.left(direction, source.stage, action.microbatch).is_none();
            (missing && source.rank != rank).then_some((part, source))
        });
        let Some((part, Neighbour { stage, rank: other })) = missing else {
            return self.bad_action(rank, 0, "it never runs".to_owned());
        };
        let head = self.rest(other).first();
        let head = head.map_or_else(|| "has ended".to_owned(), |action| format!("itself waits at {action}"));
        self.bad_action(rank, part, format!("it waits for stage {stage} of rank {other}, which {head}"))
    }

    fn bad_action(&self, rank: u32, part: usize, reason: String) -> PlanError {
        let position = self.ranks[rank as usize].position + part;
        let action = self.schedule.programs()[rank as usize].get(position).map(Action::to_string).unwrap_or_default();
        PlanError::BadAction { rank: rank as usize, position, action, reason }
    }
}

/// Whether an action makes, for the micro-batch of `wanted`, what flows out of `stage` in `direction`.
fn produces(action: Action, direction: Direction, stage: u32, wanted: Action) -> bool {
    direction_of(action.kind) == Some(direction) && action.stage == stage && action.microbatch == wanted.microbatch
}
