//! When each result of a computation leaves, at given costs.

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
    num_units: usize,
    forward: Vec<Departure>,
    backward: Vec<Departure>,
    /// Whether the weight gradient has run.
    weights: Vec<bool>,
}

impl Times {
    /// Runs every rank's program at given costs. A result stays with its rank, and the rank waits, while `window`
    /// results that the receiving stage has not used are with the receiver.
    ///
    /// # Errors
    /// [`PlanError::BadAction`] for an action that can never run, [`PlanError::TooFewReceives`] if only the window
    /// stands in the way.
    pub(super) fn new(schedule: &Schedule, window: u32, costs: &Costs) -> Result<Self> {
        if let Ok(times) = Self::within(schedule, window, costs)? {
            return Ok(times);
        }
        let num_units = schedule.header().num_units();
        Self::within(schedule, num_units, costs)?.map_err(|stuck| *stuck)?;
        // More room never hurts, so the least that is enough is found by bisection.
        let (mut below, mut enough) = (window, num_units);
        while enough - below > 1 {
            let middle = below + (enough - below) / 2;
            match Self::within(schedule, middle, costs)? {
                Ok(_) => enough = middle,
                Err(_) => below = middle,
            }
        }
        Err(PlanError::TooFewReceives { given: window, needed: enough })
    }

    /// Inner error: why all ranks wait.
    fn within(schedule: &Schedule, window: u32, costs: &Costs) -> Result<Result<Self, Box<PlanError>>> {
        Run::new(schedule, Self::empty(schedule), Waiting::new(schedule, window), costs).finish()
    }

    fn empty(schedule: &Schedule) -> Self {
        let placement = schedule.placement();
        let num_units = schedule.header().num_units() as usize;
        let num_cells = num_units * placement.num_stages() as usize;
        let links = (0..placement.num_stages()).map(|stage| links(placement, stage)).collect();
        let never = vec![Departure { time: NEVER, turn: 0 }; num_cells];
        Self { links, num_units, forward: never.clone(), backward: never, weights: vec![false; num_cells] }
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

/// How many inputs from other ranks each stage and direction has got, and when the latest of them were used.
struct Waiting {
    /// The most inputs that may wait, at least 1.
    window: usize,
    made: Vec<usize>,
    used: Vec<usize>,
    /// When the last `window` inputs of each stage and direction were used, in a ring; empty if all may wait.
    ends: Vec<f64>,
}

impl Waiting {
    fn new(schedule: &Schedule, window: u32) -> Self {
        let num_units = schedule.header().num_units();
        let num_streams = 2 * schedule.num_stages() as usize;
        let ring = if window < num_units { num_streams * window as usize } else { 0 };
        let counts = || vec![0; num_streams];
        Self { window: window as usize, made: counts(), used: counts(), ends: vec![0.0; ring] }
    }

    /// When there was room for the next input; `None` while there is none.
    fn room(&self, stream: usize) -> Option<f64> {
        match self.made[stream].checked_sub(self.window) {
            Some(turn) if !self.ends.is_empty() => {
                (turn < self.used[stream]).then(|| self.ends[stream * self.window + turn % self.window])
            }
            _ => Some(0.0),
        }
    }

    fn take(&mut self, stream: usize, end: f64) {
        if !self.ends.is_empty() {
            self.ends[stream * self.window + self.used[stream] % self.window] = end;
            self.used[stream] += 1;
        }
    }
}

/// The input of a stage in one direction.
fn stream(direction: Direction, stage: u32) -> usize {
    2 * stage as usize + direction as usize
}

impl<'a> Run<'a> {
    fn new(schedule: &'a Schedule, times: Times, waiting: Waiting, costs: &'a Costs) -> Self {
        let num_ranks = schedule.num_ranks() as usize;
        let (ranks, waiters) = (vec![Rank::default(); num_ranks], vec![Vec::new(); num_ranks]);
        Self { schedule, costs, times, ranks, waiters, waiting, num_left: 0 }
    }

    /// The times, or why all ranks wait.
    ///
    /// # Errors
    /// An action that can never run, whatever the others do.
    fn finish(mut self) -> Result<Result<Times, Box<PlanError>>> {
        let mut awake: Vec<u32> = (0..self.schedule.num_ranks()).rev().collect();
        while let Some(rank) = awake.pop() {
            if self.advance(rank)? {
                awake.append(&mut self.waiters[rank as usize]);
            }
        }
        let program = |rank: u32| &self.schedule.programs()[rank as usize];
        let unfinished = |&rank: &u32| self.ranks[rank as usize].handed_on < program(rank).len();
        let waiting = (0..self.schedule.num_ranks()).find(unfinished);
        Ok(waiting.map_or(Ok(()), |rank| Err(Box::new(self.stuck(rank)))).map(|()| self.times))
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
                self.waiting.made[stream] += 1;
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
