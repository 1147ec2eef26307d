//! Schedules whose order on a rank is a closed form of counts alone.
//!
//! All of them share one shape. A rank runs its forwards in one order and its backwards in another; it begins with
//! `warmup` forwards, then takes one of each in turn until the forwards are used up, then the backwards that are left.
//! With a split backward, the weight gradient of the k-th backward follows `lag` backwards later. The schedules differ
//! in the two orders, in the warm-up and in the lag.
//!
//! With several chunks, micro-batches take their turns in groups. A last group that is not full is padded in the order
//! and its padding left out of the program: what is left of an order without cycles has none, and holds no more. A
//! short group in its place would close a cycle, since its micro-batches would need their next chunk before the ranks
//! between have done the backwards that come first.

use super::ScheduleName;
use crate::error::{PlanError, Result};
use crate::schedule::action::Action;
use crate::schedule::program::{Header, Schedule};

/// The order of every rank as a formula.
#[derive(Clone, Debug)]
pub struct ClosedForm {
    name: ScheduleName,
    header: Header,
    /// Stages a rank.
    num_chunks: u32,
    /// Micro-batches that go through a chunk before the next chunk's turn.
    group: u32,
}

impl ClosedForm {
    /// The formula of a named schedule; `num_chunks` as in [`build`](super::build).
    ///
    /// # Errors
    /// As [`build`](super::build).
    pub fn new(name: ScheduleName, num_ranks: u32, num_microbatches: u32, num_chunks: Option<u32>) -> Result<Self> {
        let group = if name == ScheduleName::LoopedBfs { num_microbatches } else { num_ranks };
        Self::with_group(name, num_ranks, num_microbatches, num_chunks, group)
    }

    /// The same with another number of micro-batches in a group, which only `interleaved` and `interleaved-zb` have: a
    /// larger group takes more memory and gives each hop more time.
    ///
    /// # Errors
    /// As [`build`](super::build), and [`PlanError::OutOfRange`] for a group smaller than the number of ranks, whose
    /// forwards would wait for each other.
    pub fn with_group(
        name: ScheduleName,
        num_ranks: u32,
        num_microbatches: u32,
        num_chunks: Option<u32>,
        group: u32,
    ) -> Result<Self> {
        if !ScheduleName::CLOSED.contains(&name) {
            return Err(PlanError::NoClosedForm { name: name.name() });
        }
        let placement = name.placement(num_ranks, num_chunks)?;
        if group < num_ranks && name != ScheduleName::LoopedBfs {
            let (what, expected) = ("group of micro-batches", "at least num_ranks");
            return Err(PlanError::OutOfRange { what, value: group.into(), expected });
        }
        let placed = placement.num_chunks();
        // A group beyond all micro-batches is as good as one of them all.
        let group = group.min(num_microbatches.max(num_ranks));
        let mut header = Header::new(name.name(), placement, num_microbatches);
        if name == ScheduleName::SeqOneForwardOneBackward {
            header.num_slices = name.resolve_chunks(num_chunks)?;
        }
        header.check()?;
        Ok(Self { name, header, num_chunks: placed, group })
    }

    /// The programs of all ranks.
    ///
    /// # Errors
    /// None for a valid formula; those of [`Schedule::new`] are passed on.
    pub fn build(&self) -> Result<Schedule> {
        let programs = (0..self.num_ranks()).map(|rank| self.order(rank)).collect();
        Schedule::new(self.header.clone(), programs)
    }

    /// The program of one rank.
    ///
    /// # Errors
    /// [`PlanError::NoSuchRank`].
    pub fn program(&self, rank: u32) -> Result<Vec<Action>> {
        if rank >= self.num_ranks() {
            return Err(PlanError::NoSuchRank { rank: rank.into(), num_ranks: self.num_ranks() });
        }
        Ok(self.order(rank))
    }

    fn num_ranks(&self) -> u32 {
        self.header.placement.num_ranks()
    }

    /// Turns of a rank's forwards, those of the padding included.
    fn num_turns(&self) -> u32 {
        let padding = if self.num_chunks == 1 { 0 } else { self.header.num_units().next_multiple_of(self.group) };
        self.header.num_units().max(padding) * self.num_chunks
    }

    /// Turns of a rank's forwards before its first backward.
    fn warmup(&self, rank: u32) -> u32 {
        let behind = self.num_ranks() - 1 - rank; // Ranks that follow.
        let chunks_before = self.group.saturating_mul(self.num_chunks - 1);
        let wanted = match self.name {
            ScheduleName::Gpipe | ScheduleName::LoopedBfs => u32::MAX,
            ScheduleName::OneForwardOneBackward | ScheduleName::ZbH1 => behind,
            ScheduleName::EagerOneForwardOneBackward | ScheduleName::ZbH2 => 2 * behind,
            ScheduleName::Interleaved => chunks_before.saturating_add(2 * behind),
            ScheduleName::InterleavedZb => chunks_before.saturating_add(behind),
            _ => behind + self.header.num_slices - 1,
        };
        wanted.min(self.num_turns())
    }

    /// How many turns later the weight gradient follows; `None` for a fused backward.
    fn lag(&self, rank: u32) -> Option<u32> {
        match self.name {
            ScheduleName::ZbH1 | ScheduleName::InterleavedZb => Some(rank),
            ScheduleName::ZbH2 => Some(2 * rank),
            _ => None,
        }
    }

    fn order(&self, rank: u32) -> Vec<Action> {
        let (total, warmup, lag) = (self.num_turns(), self.warmup(rank), self.lag(rank));
        let per_microbatch = if lag.is_some() { 3 } else { 2 };
        let mut program =
            Vec::with_capacity(self.header.num_units() as usize * self.num_chunks as usize * per_microbatch);
        let forward = |turn| self.forward(rank, turn);
        let backward = |turn| self.backward(rank, turn);
        program.extend((0..warmup).filter_map(forward));
        for turn in 0..total {
            if turn < total - warmup {
                program.extend(forward(warmup + turn));
            }
            match lag {
                None => program.extend(backward(turn)),
                Some(lag) => {
                    program.extend(backward(turn).map(input_grad));
                    program.extend(turn.checked_sub(lag).and_then(backward).map(weight_grad));
                }
            }
        }
        let left = lag.map_or(total, |lag| total.saturating_sub(lag));
        program.extend((left..total).filter_map(backward).map(weight_grad));
        program
    }

    /// The forward in a rank's `turn`: group after group, chunk after chunk, micro-batch after micro-batch.
    fn forward(&self, rank: u32, turn: u32) -> Option<Action> {
        let (chunk, unit) = self.table(turn)?;
        Some(Action::forward(chunk * self.num_ranks() + rank, unit))
    }

    /// The backward in a rank's `turn`: the same with the chunks, and the slices of a sequence, in reverse.
    fn backward(&self, rank: u32, turn: u32) -> Option<Action> {
        let (chunk, unit) = self.table(turn)?;
        let slice = unit % self.header.num_slices;
        let unit = unit - slice + (self.header.num_slices - 1 - slice);
        Some(Action::backward((self.num_chunks - 1 - chunk) * self.num_ranks() + rank, unit))
    }

    /// Chunk and micro-batch in turn; `None` for the padding of the last group.
    fn table(&self, turn: u32) -> Option<(u32, u32)> {
        if self.num_chunks == 1 {
            return Some((0, turn));
        }
        let (row, column) = (turn / self.group, turn % self.group);
        let microbatch = row / self.num_chunks * self.group + column;
        (microbatch < self.header.num_microbatches).then_some((row % self.num_chunks, microbatch))
    }
}

fn input_grad(backward: Action) -> Action {
    Action::input_grad(backward.stage, backward.microbatch)
}

fn weight_grad(backward: Action) -> Action {
    Action::weight_grad(backward.stage, backward.microbatch)
}
