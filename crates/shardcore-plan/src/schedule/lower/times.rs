//! When each computation ends if every one takes its unit of time.

use crate::error::{PlanError, Result};
use crate::schedule::action::{Action, ActionKind};
use crate::schedule::placement::Placement;
use crate::schedule::program::Schedule;

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

/// The ends of all forwards, input gradients and fused backwards. 0 stands for one that has not run.
pub(super) struct Times {
    pub(super) links: Vec<Links>,
    num_units: usize,
    forward: Vec<u32>,
    backward: Vec<u32>,
    /// Whether the weight gradient has run.
    weights: Vec<bool>,
}

impl Times {
    /// Runs every rank's program; a rank computes nothing for a stage that has `window` inputs waiting, as long as
    /// the program can run so.
    ///
    /// # Errors
    /// [`PlanError::BadAction`] for an action that can never run.
    pub(super) fn new(schedule: &Schedule, window: u32) -> Result<Self> {
        let limited = Run::new(schedule, Self::empty(schedule), Some(Waiting::new(schedule, window))).finish()?;
        limited.map_or_else(|_| Run::new(schedule, Self::empty(schedule), None).finish()?, Ok)
    }

    fn empty(schedule: &Schedule) -> Self {
        let placement = schedule.placement();
        let num_units = schedule.header().num_units() as usize;
        let num_cells = num_units * placement.num_stages() as usize;
        let links = (0..placement.num_stages()).map(|stage| links(placement, stage)).collect();
        let (forward, backward, weights) = (vec![0; num_cells], vec![0; num_cells], vec![false; num_cells]);
        Self { links, num_units, forward, backward, weights }
    }

    /// When the forward or backward of a stage ended for a micro-batch.
    pub(super) fn end(&self, direction: Direction, stage: u32, unit: u32) -> u32 {
        self.ends(direction)[self.cell(stage, unit)]
    }

    fn ends(&self, direction: Direction) -> &[u32] {
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
        match action.kind {
            ActionKind::Forward => links.previous.map(|neighbour| (Direction::Forward, neighbour)),
            ActionKind::Backward | ActionKind::InputGrad => {
                links.next.map(|neighbour| (Direction::Backward, neighbour))
            }
            _ => None,
        }
    }

    /// Where an action's output goes; `None` at the ends of a chain and for weight gradients.
    pub(super) fn target(&self, action: Action) -> Option<(Direction, Neighbour)> {
        let links = self.links[action.stage as usize];
        match action.kind {
            ActionKind::Forward => links.next.map(|neighbour| (Direction::Forward, neighbour)),
            ActionKind::Backward | ActionKind::InputGrad => {
                links.previous.map(|neighbour| (Direction::Backward, neighbour))
            }
            _ => None,
        }
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
    let (mut before, mut rest) = (0, program);
    std::iter::from_fn(move || {
        let (composite, others) = rest.split_at(composite_len(rest));
        let after = before + index(composite.len());
        let item = (before, after, composite);
        (before, rest) = (after, others);
        (!composite.is_empty()).then_some(item)
    })
}

/// Positions fit: a program has at most three actions for each of 2^28 forwards.
#[expect(clippy::cast_possible_truncation, reason = "at most 3 * 2^28")]
fn index(count: usize) -> u32 {
    count as u32
}

/// What keeps a rank from its next composite.
enum Blocked {
    /// The part at this position waits for something of another rank.
    By { rank: u32 },
    /// The part at this position of the composite can never run.
    Forever { part: usize, reason: String },
}

/// All ranks at work.
struct Run<'a> {
    schedule: &'a Schedule,
    times: Times,
    /// Where each rank is in its program, and when it is free.
    positions: Vec<usize>,
    clocks: Vec<u32>,
    /// The ranks that wait for each rank.
    waiters: Vec<Vec<u32>>,
    /// The inputs that wait at each stage, if there is a limit.
    waiting: Option<Waiting>,
}

/// How many inputs other ranks have made for each stage and direction, and when the latest of them were used.
struct Waiting {
    /// The most inputs that may wait, at least 1.
    window: usize,
    made: Vec<usize>,
    used: Vec<usize>,
    /// When the last `window` inputs of each stage and direction were used, in a ring.
    ends: Vec<u32>,
}

impl Waiting {
    fn new(schedule: &Schedule, window: u32) -> Self {
        let window = window.min(schedule.header().num_units()) as usize;
        let num_streams = 2 * schedule.num_stages() as usize;
        Self { window, made: vec![0; num_streams], used: vec![0; num_streams], ends: vec![0; num_streams * window] }
    }

    /// When there was room for the next input; `None` while there is none.
    fn room(&self, stream: usize) -> Option<u32> {
        match self.made[stream].checked_sub(self.window) {
            None => Some(0),
            Some(turn) if turn < self.used[stream] => Some(self.ends[stream * self.window + turn % self.window]),
            Some(_) => None,
        }
    }

    fn take(&mut self, stream: usize, end: u32) {
        self.ends[stream * self.window + self.used[stream] % self.window] = end;
        self.used[stream] += 1;
    }
}

/// The input of a stage in one direction.
fn stream(direction: Direction, stage: u32) -> usize {
    2 * stage as usize + direction as usize
}

impl<'a> Run<'a> {
    fn new(schedule: &'a Schedule, times: Times, waiting: Option<Waiting>) -> Self {
        let num_ranks = schedule.num_ranks() as usize;
        let (positions, clocks, waiters) = (vec![0; num_ranks], vec![0; num_ranks], vec![Vec::new(); num_ranks]);
        Self { schedule, times, positions, clocks, waiters, waiting }
    }

    /// The times, or why all ranks wait.
    ///
    /// # Errors
    /// An action that can never run, whatever the others do.
    fn finish(mut self) -> Result<Result<Times>> {
        let mut awake: Vec<u32> = (0..self.schedule.num_ranks()).rev().collect();
        while let Some(rank) = awake.pop() {
            if self.advance(rank)? {
                awake.append(&mut self.waiters[rank as usize]);
            }
        }
        let waiting = (0..self.schedule.num_ranks()).find(|&rank| !self.rest(rank).is_empty());
        Ok(waiting.map_or(Ok(()), |rank| Err(self.stuck(rank))).map(|()| self.times))
    }

    fn rest(&self, rank: u32) -> &'a [Action] {
        &self.schedule.programs()[rank as usize][self.positions[rank as usize]..]
    }

    /// Runs a rank until it must wait; whether it ran anything.
    fn advance(&mut self, rank: u32) -> Result<bool> {
        let before = self.positions[rank as usize];
        let mut rest = self.rest(rank);
        while !rest.is_empty() {
            let (composite, others) = rest.split_at(composite_len(rest));
            match self.start(rank, composite) {
                Ok(start) => self.run(rank, composite, start),
                Err(Blocked::By { rank: other }) => {
                    self.waiters[other as usize].push(rank);
                    break;
                }
                Err(Blocked::Forever { part, reason }) => return Err(self.bad_action(rank, part, reason)),
            }
            rest = others;
        }
        Ok(self.positions[rank as usize] > before)
    }

    /// When a composite may start: when the rank is free and all inputs are there.
    fn start(&self, rank: u32, composite: &[Action]) -> Result<u32, Blocked> {
        let mut start = self.clocks[rank as usize];
        for (part, &action) in composite.iter().enumerate() {
            self.check(rank, action, &composite[..part]).map_err(|reason| Blocked::Forever { part, reason })?;
            start = start.max(self.room(rank, action)?);
            let Some((direction, source)) = self.times.source(action) else { continue };
            let end = self.times.end(direction, source.stage, action.microbatch);
            let made_inside =
                || composite[..part].iter().any(|&other| produces(other, direction, source.stage, action));
            if end == 0 && source.rank == rank && !made_inside() {
                let reason = format!("it needs what stage {} of the same rank computes later or never", source.stage);
                return Err(Blocked::Forever { part, reason });
            }
            if end == 0 && source.rank != rank {
                return Err(Blocked::By { rank: source.rank });
            }
            start = start.max(end);
        }
        Ok(start)
    }

    /// When the stage that gets an action's output had room for it.
    fn room(&self, rank: u32, action: Action) -> Result<u32, Blocked> {
        let (Some(waiting), Some((direction, target))) = (&self.waiting, self.times.target(action)) else {
            return Ok(0);
        };
        if target.rank == rank {
            return Ok(0);
        }
        waiting.room(stream(direction, target.stage)).ok_or(Blocked::By { rank: target.rank })
    }

    /// What the rank itself must have done before, and not done yet.
    fn check(&self, rank: u32, action: Action, inside: &[Action]) -> Result<(), String> {
        let Action { kind, stage, microbatch, .. } = action;
        let done = |direction| {
            self.times.end(direction, stage, microbatch) != 0
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

    /// The parts run one after the other; what they made leaves together.
    fn run(&mut self, rank: u32, composite: &[Action], start: u32) {
        let duration = composite.iter().map(|action| if action.kind == ActionKind::Backward { 2 } else { 1 });
        let end = start + duration.sum::<u32>();
        for &action in composite {
            if let Some(waiting) = &mut self.waiting {
                if let Some((direction, _)) = self.times.source(action).filter(|(_, source)| source.rank != rank) {
                    waiting.take(stream(direction, action.stage), end);
                }
                if let Some((direction, target)) = self.times.target(action) {
                    waiting.made[stream(direction, target.stage)] += 1;
                }
            }
            let cell = self.times.cell(action.stage, action.microbatch);
            match action.kind {
                ActionKind::Forward => self.times.forward[cell] = end,
                ActionKind::Backward | ActionKind::InputGrad => self.times.backward[cell] = end,
                _ => {}
            }
            self.times.weights[cell] |= matches!(action.kind, ActionKind::Backward | ActionKind::WeightGrad);
        }
        self.clocks[rank as usize] = end;
        self.positions[rank as usize] += composite.len();
    }

    /// The first rank of those that wait for each other, or for what never runs.
    fn stuck(&self, rank: u32) -> PlanError {
        let rest = self.rest(rank);
        let composite = &rest[..composite_len(rest)];
        let missing = composite.iter().enumerate().find_map(|(part, &action)| {
            let (direction, source) = self.times.source(action)?;
            let missing = self.times.end(direction, source.stage, action.microbatch) == 0 && source.rank != rank;
            missing.then_some((part, source))
        });
        let Some((part, Neighbour { stage, rank: other })) = missing else {
            return self.bad_action(rank, 0, "it never runs".to_owned());
        };
        let head = self.rest(other).first();
        let head = head.map_or_else(|| "has ended".to_owned(), |action| format!("itself waits at {action}"));
        self.bad_action(rank, part, format!("it waits for stage {stage} of rank {other}, which {head}"))
    }

    fn bad_action(&self, rank: u32, part: usize, reason: String) -> PlanError {
        let position = self.positions[rank as usize] + part;
        let action = self.schedule.programs()[rank as usize][position].to_string();
        PlanError::BadAction { rank: rank as usize, position, action, reason }
    }
}

/// Whether an action makes, for the micro-batch of `wanted`, what flows out of `stage` in `direction`.
fn produces(action: Action, direction: Direction, stage: u32, wanted: Action) -> bool {
    let kind = match direction {
        Direction::Forward => action.kind == ActionKind::Forward,
        Direction::Backward => matches!(action.kind, ActionKind::Backward | ActionKind::InputGrad),
    };
    kind && action.stage == stage && action.microbatch == wanted.microbatch
}
