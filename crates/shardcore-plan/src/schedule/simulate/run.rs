//! The event loop. Ranks run as far as they can; a rank that lacks an input goes on when it is made.

use super::memory::Ledger;
use super::prepare::{Link, Network, Prepared};
use super::{Interval, MemoryPoint, Simulation, composite_end, idle_part};
use crate::error::{PlanError, Result};
use crate::schedule::action::{Action, ActionKind};
use crate::schedule::check;
use crate::schedule::costs::Costs;
use crate::schedule::flow::{Flow, NO_STAGE};
use crate::schedule::program::{CommModel, Gating, Header, Schedule};

/// No time yet. Times are at least 0.
const NEVER: f64 = -1.0;
/// What a rank waits for if it waits for nothing.
const NOTHING: usize = usize::MAX;
/// Marks of a stage's micro-batch on its own rank.
const FORWARD_DONE: u8 = 1;
const INPUT_GRAD_DONE: u8 = 2;

/// What a schedule takes, without the course of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// The last end over all ranks, from 0.
    pub makespan: f64,
    /// The longest time over the ranks from a rank's first start to its last end.
    pub span: f64,
    /// The most that any rank holds.
    pub peak: f64,
}

/// Where one rank is.
#[derive(Clone, Copy, Debug)]
struct Rank {
    clock: f64,
    first_start: f64,
    last_end: f64,
    busy: f64,
    position: usize,
    /// The message without which it cannot go on.
    waits_for: usize,
}

/// A simulator that keeps its memory from one schedule to the next: for thousands of evaluations a second.
///
/// ```
/// # use shardcore_plan::schedule::simulate::Simulator;
/// let mut simulator = Simulator::new();
/// // simulator.evaluate(&header, &programs, &costs, &network): makespan, span and peak only
/// ```
#[derive(Debug, Default)]
pub struct Simulator {
    flow: Flow,
    costs: Prepared,
    ledger: Ledger,
    ranks: Vec<Rank>,
    /// When each message is there, by its receiver: inputs of all forwards, then gradients for all input gradients.
    arrival: Vec<f64>,
    /// When each message was sent, and its receive posted, on lowered programs.
    posted: Vec<[f64; 2]>,
    done: Vec<u8>,
    link_free: Vec<f64>,
    runnable: Vec<u32>,
    rendezvous: bool,
    lowered: bool,
    together: bool,
}

/// What can be learned from the event loop as it goes.
trait Record {
    /// The next action of a rank has run.
    fn action(&mut self, rank: usize, start: f64, end: f64);
}

impl Record for () {
    #[inline]
    fn action(&mut self, _: usize, _: f64, _: f64) {}
}

impl Record for Vec<Vec<Interval>> {
    #[inline]
    fn action(&mut self, rank: usize, start: f64, end: f64) {
        self[rank].push(Interval { start, end });
    }
}

/// Why a rank stops.
enum Stop {
    /// Until this message is there.
    Message(usize),
    /// For good: the program contradicts itself on its own rank.
    Fault,
}

impl Simulator {
    /// A simulator that has run nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makespan, span and peak of programs that need not be a valid schedule; `None` if they cannot go on.
    /// `lowered` tells whether they contain their communication.
    ///
    /// # Errors
    /// [`PlanError`](crate::PlanError) if costs or network do not fit the header.
    pub fn evaluate(
        &mut self,
        header: &Header,
        programs: &[Vec<Action>],
        lowered: bool,
        costs: &Costs,
        network: &Network,
    ) -> Result<Option<Summary>> {
        self.set(header, lowered, costs, network)?;
        if !self.run(programs, &mut ()) {
            return Ok(None);
        }
        self.ledger.set(header, &self.flow, programs, costs);
        let mut peak = 0.0_f64;
        for (rank, program) in programs.iter().enumerate() {
            self.ledger.walk(rank, program, |_, during, behind| peak = peak.max(during).max(behind));
        }
        check_sum("times", self.makespan()).and_then(|()| check_sum("sizes", peak))?;
        Ok(Some(Summary { makespan: self.makespan(), span: self.span(), peak }))
    }

    /// The whole course of a schedule.
    ///
    /// # Errors
    /// As [`simulate_on`](super::simulate_on).
    pub fn simulate(&mut self, schedule: &Schedule, costs: &Costs, network: &Network) -> Result<Simulation> {
        let programs = schedule.programs();
        self.set(schedule.header(), schedule.is_lowered(), costs, network)?;
        let mut intervals: Vec<_> = programs.iter().map(|program| Vec::with_capacity(program.len())).collect();
        if !self.run(programs, &mut intervals) {
            return Err(check::why_stuck(schedule, network.overlap, &self.positions()));
        }
        if self.rendezvous && network.overlap {
            check::run(schedule, schedule.header().comm.into())?;
        }
        check_sum("times", self.makespan())?;
        self.ledger.set(schedule.header(), &self.flow, programs, costs);
        let mut peak = vec![0.0_f64; programs.len()];
        let mut memory = Vec::with_capacity(programs.len());
        for (rank, program) in programs.iter().enumerate() {
            // What is not used of it costs nothing.
            let mut curve = Curve(Vec::with_capacity(program.len()));
            self.ledger.walk(rank, program, |index, during, behind| {
                peak[rank] = peak[rank].max(during).max(behind);
                curve.push(intervals[rank][index].start, during);
                curve.push(intervals[rank][index].end, behind);
            });
            memory.push(curve.0);
        }
        peak.iter().try_for_each(|&peak| check_sum("sizes", peak))?;
        let (makespan, span) = (self.makespan(), self.span());
        let busy: Vec<f64> = self.ranks.iter().map(|rank| rank.busy).collect();
        let (bubble_span, bubble_makespan) = (idle_part(&busy, span), idle_part(&busy, makespan));
        Ok(Simulation { makespan, span, busy, bubble_span, bubble_makespan, peak, intervals, memory })
    }

    fn makespan(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.last_end).fold(0.0, f64::max)
    }

    fn span(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.last_end - rank.first_start.min(rank.last_end)).fold(0.0, f64::max)
    }

    /// Where each rank stopped.
    fn positions(&self) -> Vec<usize> {
        self.ranks.iter().map(|rank| rank.position).collect()
    }

    fn set(&mut self, header: &Header, lowered: bool, costs: &Costs, network: &Network) -> Result<()> {
        self.flow.set(header);
        self.costs.set(&self.flow, costs, network)?;
        self.lowered = lowered;
        self.rendezvous = lowered && header.comm > CommModel::Buffered;
        self.together = header.gating == Gating::All;
        let fresh =
            Rank { clock: 0.0, first_start: f64::INFINITY, last_end: 0.0, busy: 0.0, position: 0, waits_for: NOTHING };
        refill(&mut self.ranks, self.flow.num_ranks, fresh);
        let cells = self.flow.num_cells();
        refill(&mut self.arrival, 2 * cells, NEVER);
        refill(&mut self.done, cells, 0);
        refill(&mut self.link_free, self.costs.num_edges, 0.0);
        let messages = if lowered { 2 * cells } else { 0 };
        refill(&mut self.posted, messages, [NEVER; 2]);
        Ok(())
    }

    /// Runs all ranks to their ends; false if some cannot get there.
    fn run<R: Record>(&mut self, programs: &[Vec<Action>], record: &mut R) -> bool {
        if programs.len() != self.flow.num_ranks {
            return false;
        }
        self.runnable.clear();
        self.runnable.extend((0..self.ranks.len()).rev().filter_map(|rank| u32::try_from(rank).ok()));
        while let Some(rank) = self.runnable.pop() {
            let rank = rank as usize;
            self.ranks[rank].waits_for = NOTHING;
            let program = &programs[rank];
            while self.ranks[rank].position < program.len() {
                match self.step(rank, program, record) {
                    Ok(behind) => self.ranks[rank].position = behind,
                    Err(Stop::Message(message)) => {
                        self.ranks[rank].waits_for = message;
                        break;
                    }
                    Err(Stop::Fault) => return false,
                }
            }
        }
        self.ranks.iter().zip(programs).all(|(rank, program)| rank.position == program.len())
    }

    /// Runs the action at a rank's position, with its composite if parts start together. Gives the next position.
    #[inline]
    fn step<R: Record>(&mut self, rank: usize, program: &[Action], record: &mut R) -> std::result::Result<usize, Stop> {
        let index = self.ranks[rank].position;
        let action = &program[index];
        if action.with_next && self.together && !is_communication(action.kind) {
            return self.step_composite(rank, program, record);
        }
        let Some(cost) = self.cost(action) else {
            let at = self.ranks[rank].clock;
            if is_communication(action.kind) {
                self.step_message(rank, action)?;
            }
            record.action(rank, at, self.ranks[rank].clock);
            return Ok(index + 1);
        };
        let start = self.ranks[rank].clock.max(self.ready(rank, action)?);
        let end = start + cost;
        record.action(rank, start, end);
        self.occupy(rank, start, end, cost);
        self.complete(rank, action, end);
        Ok(index + 1)
    }

    /// Parts that start when the inputs of all are there, and end together.
    fn step_composite<R: Record>(
        &mut self,
        rank: usize,
        program: &[Action],
        record: &mut R,
    ) -> std::result::Result<usize, Stop> {
        let index = self.ranks[rank].position;
        let stop = composite_end(program, index);
        let (mut start, mut sum) = (self.ranks[rank].clock, 0.0);
        for (part, action) in program[index..stop].iter().enumerate() {
            if let Some(cost) = self.cost(action) {
                let ready = match self.ready(rank, action) {
                    Err(Stop::Message(_)) if self.is_made_by(&program[index..index + part], action) => 0.0,
                    ready => ready?,
                };
                start = start.max(ready);
                sum += cost;
                // Parts behind may need this one; no other rank reads the mark.
                self.done[self.flow.cell(action.stage, action.microbatch)] |= mark(action.kind);
            }
        }
        // A sum beyond every double stays one, whatever it is scaled by: 0 times infinity is no number.
        let cost = if sum.is_finite() { sum * self.costs.composite } else { sum };
        let end = start + cost;
        self.occupy(rank, start, end, cost);
        for action in &program[index..stop] {
            record.action(rank, start, end);
            self.complete(rank, action, end);
        }
        Ok(stop)
    }

    /// Whether one of the parts before makes what an action takes from its own rank.
    fn is_made_by(&self, parts: &[Action], action: &Action) -> bool {
        let stage = action.stage as usize;
        let is_forward = action.kind == ActionKind::Forward;
        let from = if is_forward { self.flow.prev[stage] } else { self.flow.next[stage] };
        let makes = |part: &Action| {
            (part.stage, part.microbatch) == (from, action.microbatch)
                && mark(part.kind) == if is_forward { FORWARD_DONE } else { INPUT_GRAD_DONE }
        };
        parts.iter().any(makes)
    }

    /// The time of an action that computes.
    #[inline]
    fn cost(&self, action: &Action) -> Option<f64> {
        let costs = match action.kind {
            ActionKind::Forward => &self.costs.forward,
            ActionKind::Backward => &self.costs.backward,
            ActionKind::InputGrad => &self.costs.input_grad,
            ActionKind::WeightGrad => &self.costs.weight_grad,
            _ => return None,
        };
        Some(costs.get(action.stage as usize).copied().unwrap_or(0.0))
    }

    #[inline]
    fn occupy(&mut self, rank: usize, start: f64, end: f64, cost: f64) {
        let state = &mut self.ranks[rank];
        state.clock = end;
        state.first_start = state.first_start.min(start);
        state.last_end = state.last_end.max(end);
        state.busy += cost;
    }

    /// When the inputs of an action that computes are there.
    #[inline]
    fn ready(&self, rank: usize, action: &Action) -> std::result::Result<f64, Stop> {
        let (stage, unit) = (action.stage, action.microbatch);
        let flow = &self.flow;
        if stage as usize >= flow.num_stages || unit >= flow.num_units || flow.rank[stage as usize] as usize != rank {
            return Err(Stop::Fault);
        }
        let cell = flow.cell(stage, unit);
        let done = |cell: usize, mark: u8| if self.done[cell] & mark == 0 { Err(Stop::Fault) } else { Ok(()) };
        let there = |message: usize| match self.arrival[message] {
            NEVER => Err(Stop::Message(message)),
            time => Ok(time),
        };
        let slice = if flow.num_slices > 1 { unit % flow.num_slices } else { 0 };
        match action.kind {
            ActionKind::Forward => {
                if slice > 0 {
                    done(cell - 1, FORWARD_DONE)?;
                }
                if flow.prev[stage as usize] == NO_STAGE { Ok(0.0) } else { there(cell) }
            }
            ActionKind::WeightGrad => done(cell, INPUT_GRAD_DONE).map(|()| 0.0),
            _ => {
                done(cell, FORWARD_DONE)?;
                if slice + 1 < flow.num_slices {
                    done(cell + 1, INPUT_GRAD_DONE)?;
                }
                if flow.next[stage as usize] == NO_STAGE { Ok(0.0) } else { there(flow.num_cells() + cell) }
            }
        }
    }

    /// Marks an action as done and hands its result on.
    #[inline]
    fn complete(&mut self, rank: usize, action: &Action, end: f64) {
        let stage = action.stage as usize;
        let (mark, to, link) = match action.kind {
            ActionKind::Forward => (FORWARD_DONE, self.flow.next[stage], self.costs.onward[stage]),
            ActionKind::Backward | ActionKind::InputGrad => {
                (INPUT_GRAD_DONE, self.flow.prev[stage], self.costs.back[stage])
            }
            _ => return,
        };
        let cell = self.flow.cell(action.stage, action.microbatch);
        self.done[cell] |= mark;
        if to == NO_STAGE || (link.crosses && self.lowered) {
            return;
        }
        let side = if mark == FORWARD_DONE { 0 } else { self.flow.num_cells() };
        let message = side + self.flow.cell(to, action.microbatch);
        if !link.crosses {
            self.arrival[message] = end;
            return;
        }
        let arrival = self.deliver(link, end);
        self.arrival[message] = arrival;
        self.wake(message, self.flow.rank[to as usize]);
        if !self.costs.overlap {
            self.ranks[rank].clock = self.ranks[rank].clock.max(arrival);
        }
    }

    /// When a message that may leave at `from` is there: it waits for its link.
    #[inline]
    fn deliver(&mut self, link: Link, from: f64) -> f64 {
        if link.transfer == 0.0 {
            return from + link.latency;
        }
        let gone = from.max(self.link_free[link.edge as usize]) + link.transfer;
        self.link_free[link.edge as usize] = gone;
        gone + link.latency
    }

    #[inline]
    fn wake(&mut self, message: usize, rank: u32) {
        if self.ranks[rank as usize].waits_for == message {
            self.ranks[rank as usize].waits_for = NOTHING;
            self.runnable.push(rank);
        }
    }

    /// Posts a send or a receive; without overlap, waits for its message.
    fn step_message(&mut self, rank: usize, action: &Action) -> std::result::Result<(), Stop> {
        let Envelope { message, link, producer, consumer } = self.envelope(rank, action).ok_or(Stop::Fault)?;
        let is_send = matches!(action.kind, ActionKind::SendForward | ActionKind::SendBackward);
        if is_send {
            let mark = if action.kind == ActionKind::SendForward { FORWARD_DONE } else { INPUT_GRAD_DONE };
            if self.done[self.flow.cell(producer, action.microbatch)] & mark == 0 {
                return Err(Stop::Fault);
            }
        }
        let now = self.ranks[rank].clock;
        self.posted[message][usize::from(!is_send)] = now;
        let [sent, posted] = self.posted[message];
        if sent != NEVER && (posted != NEVER || !self.rendezvous) && self.arrival[message] == NEVER {
            let from = if self.rendezvous { sent.max(posted) } else { sent };
            self.arrival[message] = self.deliver(link, from);
            for stage in [producer, consumer] {
                self.wake(message, self.flow.rank[stage as usize]);
            }
        }
        if self.costs.overlap {
            return Ok(());
        }
        match self.arrival[message] {
            NEVER => Err(Stop::Message(message)),
            arrival => {
                self.ranks[rank].clock = now.max(arrival);
                Ok(())
            }
        }
    }

    /// Which message a send or a receive of a rank is about; `None` if it is about none.
    fn envelope(&self, rank: usize, action: &Action) -> Option<Envelope> {
        let flow = &self.flow;
        let stage = action.stage as usize;
        if stage >= flow.num_stages || action.microbatch >= flow.num_units || flow.rank[stage] as usize != rank {
            return None;
        }
        let (producer, consumer) = match action.kind {
            ActionKind::SendForward => (action.stage, flow.next[stage]),
            ActionKind::RecvForward => (flow.prev[stage], action.stage),
            ActionKind::SendBackward => (action.stage, flow.prev[stage]),
            _ => (flow.next[stage], action.stage),
        };
        if producer == NO_STAGE || consumer == NO_STAGE {
            return None;
        }
        let is_forward = matches!(action.kind, ActionKind::SendForward | ActionKind::RecvForward);
        let (links, side) = if is_forward { (&self.costs.onward, 0) } else { (&self.costs.back, flow.num_cells()) };
        let message = side + flow.cell(consumer, action.microbatch);
        Some(Envelope { message, link: links[producer as usize], producer, consumer })
    }
}

/// What a send or a receive is about.
struct Envelope {
    message: usize,
    link: Link,
    producer: u32,
    consumer: u32,
}

/// What a computation marks as done.
#[inline]
fn mark(kind: ActionKind) -> u8 {
    match kind {
        ActionKind::Forward => FORWARD_DONE,
        ActionKind::Backward | ActionKind::InputGrad => INPUT_GRAD_DONE,
        _ => 0,
    }
}

fn is_communication(kind: ActionKind) -> bool {
    matches!(
        kind,
        ActionKind::SendForward | ActionKind::RecvForward | ActionKind::SendBackward | ActionKind::RecvBackward
    )
}

/// Sums of finite numbers may be beyond what a double can hold.
fn check_sum(what: &str, sum: f64) -> Result<()> {
    if sum.is_finite() {
        return Ok(());
    }
    let what = format!("{what}: their sum is beyond what a double can hold");
    Err(PlanError::BadCost { what, expected: "numbers in a larger unit".to_owned() })
}

fn refill<T: Clone>(list: &mut Vec<T>, len: usize, value: T) {
    list.clear();
    list.resize(len, value);
}

/// A memory curve: one point per time at which what is held changes.
struct Curve(Vec<MemoryPoint>);

impl Curve {
    fn push(&mut self, time: f64, held: f64) {
        match self.0.last_mut() {
            Some(last) if last.held.to_bits() == held.to_bits() => {}
            _ => self.0.push(MemoryPoint { time, held }),
        }
    }
}
