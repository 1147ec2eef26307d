//! Forward-only programs.

use crate::error::Result;
use crate::schedule::action::Action;
use crate::schedule::placement::Placement;
use crate::schedule::program::{Header, Schedule};

/// The forwards of every micro-batch on any placement, also where neighbouring stages share a rank.
///
/// Each rank takes, of what has reached it, the micro-batch that is farthest along, unless two wait already where it
/// would go next. So results leave early and no rank needs more than two buffers a stage. The order is found by stepping
/// through time with equal costs: it has no cycle, since whatever is farthest along can always go on.
///
/// # Errors
/// [`PlanError::OutOfRange`](crate::PlanError::OutOfRange) for no micro-batches or too many.
pub fn evaluation(placement: Placement, num_microbatches: u32) -> Result<Schedule> {
    let header = Header::new("evaluation", placement, num_microbatches);
    header.check()?;
    let programs = Flow::new(&header).run();
    Schedule::new(header, programs)
}

/// How far the micro-batches have come.
struct Flow<'a> {
    placement: &'a Placement,
    /// For each stage, the next micro-batch to work on.
    next: Vec<u32>,
    /// For each stage, the micro-batch before which all have arrived.
    arrived: Vec<u32>,
    /// For each rank its stages, the farthest along first.
    stages: Vec<Vec<u32>>,
    num_left: usize,
}

impl<'a> Flow<'a> {
    fn new(header: &'a Header) -> Self {
        let placement = &header.placement;
        let length = placement.chain_length();
        let (half, all) = (num_in_first_chain(header), header.num_microbatches);
        let range = |stage| if placement.chain_of_stage(stage) == 0 { 0..half } else { half..all };
        let arrived = |stage: u32| if stage.is_multiple_of(length) { range(stage).end } else { range(stage).start };
        let sorted = |rank| {
            let mut stages = placement.stages_of(rank).to_vec();
            stages.sort_by_key(|stage| std::cmp::Reverse(stage % length));
            stages
        };
        Self {
            placement,
            next: (0..placement.num_stages()).map(|stage| range(stage).start).collect(),
            arrived: (0..placement.num_stages()).map(arrived).collect(),
            stages: (0..placement.num_ranks()).map(sorted).collect(),
            num_left: all as usize * length as usize,
        }
    }

    fn run(mut self) -> Vec<Vec<Action>> {
        let mut programs = vec![Vec::new(); self.stages.len()];
        let mut done = Vec::with_capacity(programs.len());
        // The ranks that something has reached, or room beyond them, since they last had nothing to do: all others still
        // have nothing to do.
        let mut woken: Vec<u32> = (0..self.placement.num_ranks()).collect();
        let mut is_woken = vec![true; programs.len()];
        while self.num_left > 0 {
            for rank in woken.drain(..) {
                is_woken[rank as usize] = false;
                let stages = &self.stages[rank as usize];
                if let Some(&stage) = stages.iter().find(|&&stage| self.waiting(stage) > 0 && self.has_room(stage)) {
                    programs[rank as usize].push(Action::forward(stage, self.next[stage as usize]));
                    done.push(stage);
                }
            }
            self.num_left -= done.len();
            for stage in done.drain(..) {
                self.advance(stage);
                let around = [self.placement.previous(stage), Some(stage), self.placement.next(stage)];
                let ranks = around.into_iter().flatten().map(|stage| self.placement.rank_of(stage));
                woken.extend(ranks.filter(|&rank| !std::mem::replace(&mut is_woken[rank as usize], true)));
            }
        }
        programs
    }

    /// Passes a micro-batch on to the next stage.
    fn advance(&mut self, stage: u32) {
        self.next[stage as usize] += 1;
        if let Some(next) = self.placement.next(stage) {
            self.arrived[next as usize] += 1;
        }
    }

    /// How many micro-batches have arrived at a stage and not left it.
    fn waiting(&self, stage: u32) -> u32 {
        self.arrived[stage as usize] - self.next[stage as usize]
    }

    /// Whether the following stage can take one more.
    fn has_room(&self, stage: u32) -> bool {
        self.placement.next(stage).is_none_or(|next| self.waiting(next) < 2)
    }
}

fn num_in_first_chain(header: &Header) -> u32 {
    let all = header.num_microbatches;
    if header.placement.num_chains() == 1 { all } else { all.div_ceil(2) }
}
