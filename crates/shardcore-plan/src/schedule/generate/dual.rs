//! Schedules that run two streams of micro-batches against each other, so that a forward of one overlaps a backward of
//! the other (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1).
//!
//! `DualPipe` holds two copies of the model and feeds micro-batches from both ends. Its half on the V placement holds
//! one copy: the second chunk of each rank takes the place of the other direction. Both have one order of eight
//! phases, for a rank's distance from the middle (from the last rank, on the V). An overlapped pair is a composite.
//!
//! The papers ask for twice as many micro-batches as ranks. Fewer, or an odd number for two directions, leave those
//! that lack out of the order for more: what is left of a right order is right, in no more memory.

use std::collections::VecDeque;

use super::super::action::{Action, ActionKind};
use super::super::placement::Placement;
use super::super::program::{Header, Schedule};
use crate::error::{PlanError, Result};

/// `DualPipe`: two directions, two copies of the model, an even number of ranks.
///
/// # Errors
/// [`PlanError::OutOfRange`] for an odd number of ranks or none, and for no micro-batches.
pub fn dualpipe(num_ranks: u32, num_microbatches: u32) -> Result<Schedule> {
    if !num_ranks.is_multiple_of(2) {
        let expected = "even for dualpipe, whose two directions meet in the middle; dualpipe-v takes any number";
        return Err(PlanError::OutOfRange { what: "num_ranks", value: num_ranks.into(), expected });
    }
    let header = header("dualpipe", Placement::bidirectional(num_ranks)?, num_microbatches)?;
    let first = num_microbatches.div_ceil(2);
    let streams = [
        Stream { first_stage: 0, first: 0, count: first },
        Stream { first_stage: num_ranks, first, count: num_microbatches - first },
    ];
    let program = |rank: u32| {
        let mirrored = num_ranks - 1 - rank;
        // A rank's own stream is the one that starts in its half.
        let [own, other] = if rank < mirrored { [(0, rank), (1, mirrored)] } else { [(1, mirrored), (0, rank)] };
        let stream = |(stream, step): (usize, u32)| streams[stream].at(step);
        Phases::new([stream(own), stream(other)], num_ranks / 2, rank.min(mirrored), first).program()
    };
    Schedule::new(header, (0..num_ranks).map(program).collect())
}

/// `DualPipe` cut in half: on the V placement, one copy of the model, any number of ranks (Qi et al., "`DualPipe` could be
/// better without the dual", 2025).
///
/// # Errors
/// [`PlanError::OutOfRange`] for no ranks or no micro-batches.
pub fn dualpipe_v(num_ranks: u32, num_microbatches: u32) -> Result<Schedule> {
    let header = header("dualpipe-v", Placement::v_shape(num_ranks)?, num_microbatches)?;
    let stream = Stream { first_stage: 0, first: 0, count: num_microbatches };
    let program = |rank: u32| {
        let chunks = [stream.at(rank), stream.at(2 * num_ranks - 1 - rank)];
        Phases::new(chunks, num_ranks, rank, num_microbatches).program()
    };
    Schedule::new(header, (0..num_ranks).map(program).collect())
}

fn header(name: &str, placement: Placement, num_microbatches: u32) -> Result<Header> {
    if num_microbatches == 0 {
        return Err(PlanError::num_microbatches(num_microbatches));
    }
    let header = Header::new(name, placement, num_microbatches);
    header.check()?;
    Ok(header)
}

/// Micro-batches that flow through one chain.
#[derive(Clone, Copy)]
struct Stream {
    first_stage: u32,
    first: u32,
    count: u32,
}

impl Stream {
    /// The same stream on one of its stages.
    fn at(self, step: u32) -> Self {
        Self { first_stage: self.first_stage + step, ..self }
    }
}

/// The eight phases of one rank.
struct Phases {
    /// The rank's two stages with their streams: the one that it reaches first, then the other.
    sides: [Stream; 2],
    /// How many ranks lie between the ends and the middle, and how many of them come before this one.
    half: u32,
    before: u32,
    /// Micro-batches of each side for which the order is made: at least twice `half`.
    num_units: u32,
    forwards: [u32; 2],
    backwards: [u32; 2],
    /// Weight gradients put off, oldest first.
    weights: VecDeque<(usize, u32)>,
    program: Vec<Action>,
}

impl Phases {
    fn new(sides: [Stream; 2], half: u32, before: u32, num_microbatches: u32) -> Self {
        Self {
            sides,
            half,
            before,
            num_units: num_microbatches.max(2 * half),
            forwards: [0; 2],
            backwards: [0; 2],
            weights: VecDeque::new(),
            program: Vec::new(),
        }
    }

    fn program(mut self) -> Vec<Action> {
        let (before, after) = (self.before, self.half - self.before - 1);
        (0..2 * after).for_each(|_| self.forward(0));
        for _ in 0..=before {
            self.forward(0);
            self.forward(1);
        }
        for _ in 0..after {
            self.input_grad(1);
            self.weight_grad();
            self.forward(1);
        }
        for round in 0..=self.num_units - 2 * self.half + before {
            // Next to the middle the first forward's result is what the backward waits for: not worth a composite.
            self.overlapped(0, 1, !(round == 0 && after == 0));
            self.overlapped(1, 0, true);
        }
        for _ in 0..after {
            self.backward(1);
            self.overlapped(1, 0, true);
        }
        self.drain(before);
        for _ in 0..after {
            self.weight_grad();
            self.input_grad(0);
        }
        while !self.weights.is_empty() {
            self.weight_grad();
        }
        self.program
    }

    /// Backwards of both sides; weight gradients are put off from the middle on, to fill the gaps at the end.
    fn drain(&mut self, before: u32) {
        let turn = before.div_ceil(2);
        for round in 0..=before {
            self.backward_in_parts(1, round >= turn + u32::from(before.is_multiple_of(2)));
            self.backward_in_parts(0, round >= turn);
        }
    }

    fn backward_in_parts(&mut self, side: usize, is_split: bool) {
        if is_split {
            self.input_grad(side);
        } else {
            self.backward(side);
        }
    }

    /// Adds an action for a side's `unit`-th micro-batch, unless there is none. Whether it was added.
    fn push(&mut self, kind: ActionKind, side: usize, unit: u32) -> bool {
        let Stream { first_stage, first, count } = self.sides[side];
        if unit < count {
            self.program.push(Action::new(kind, first_stage, first + unit));
        }
        unit < count
    }

    fn forward(&mut self, side: usize) {
        self.push(ActionKind::Forward, side, self.forwards[side]);
        self.forwards[side] += 1;
    }

    fn backward(&mut self, side: usize) {
        self.push(ActionKind::Backward, side, self.backwards[side]);
        self.backwards[side] += 1;
    }

    fn input_grad(&mut self, side: usize) {
        self.push(ActionKind::InputGrad, side, self.backwards[side]);
        self.weights.push_back((side, self.backwards[side]));
        self.backwards[side] += 1;
    }

    fn weight_grad(&mut self) {
        if let Some((side, unit)) = self.weights.pop_front() {
            self.push(ActionKind::WeightGrad, side, unit);
        }
    }

    /// A forward of one side and a backward of the other, as one composite if asked for.
    fn overlapped(&mut self, forward: usize, backward: usize, composite: bool) {
        let length = self.program.len();
        self.forward(forward);
        self.backward(backward);
        if let (true, [first, _]) = (composite, &mut self.program[length..]) {
            *first = first.joined();
        }
    }
}
