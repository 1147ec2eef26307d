//! What each rank holds: the order of a rank's program decides it, never the times.

use super::composite_end;
use crate::schedule::action::{Action, ActionKind};
use crate::schedule::costs::Costs;
use crate::schedule::flow::Flow;
use crate::schedule::program::{Gating, Header};

/// What the stages of each rank hold, counted per distinct size: a sum of many equal parts stays exact.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    /// The distinct sizes of each rank.
    sizes: Vec<Vec<f64>>,
    /// How often the rank at hand holds each of its sizes.
    counts: Vec<f64>,
    /// Which of its rank's sizes a stage's activation and its stash have.
    activation: Vec<u32>,
    stash: Vec<u32>,
    forward_only: bool,
    together: bool,
}

impl Ledger {
    /// Prepares for the programs of a schedule. The lists of `costs` have one entry per stage.
    pub(crate) fn set(&mut self, header: &Header, flow: &Flow, programs: &[Vec<Action>], costs: &Costs) {
        self.forward_only = is_forward_only(programs);
        self.together = header.gating == Gating::All;
        self.sizes.iter_mut().for_each(Vec::clear);
        self.sizes.resize_with(flow.num_ranks, Vec::new);
        self.activation.clear();
        self.stash.clear();
        for stage in 0..flow.num_stages {
            let sizes = &mut self.sizes[flow.rank[stage] as usize];
            self.activation.push(class(sizes, costs.activation[stage]));
            self.stash.push(class(sizes, costs.stash[stage]));
        }
    }

    /// Calls `visit` for each action of a rank with its index, what is held while it runs and what behind it.
    /// The stages of the program are in range.
    pub(crate) fn walk(&mut self, rank: usize, program: &[Action], mut visit: impl FnMut(usize, f64, f64)) {
        self.counts.clear();
        self.counts.resize(self.sizes[rank].len(), 0.0);
        let (mut index, mut held) = (0, 0.0);
        while index < program.len() {
            if !program[index].kind.is_compute() {
                visit(index, held, held);
                index += 1;
                continue;
            }
            let end = if self.together { composite_end(program, index) } else { index + 1 };
            program[index..end].iter().for_each(|action| self.begin(action));
            let during = self.held(rank);
            (index..end - 1).for_each(|part| visit(part, during, during));
            program[index..end].iter().for_each(|action| self.finish(action));
            held = self.held(rank);
            visit(end - 1, during, held);
            index = end;
        }
    }

    fn held(&self, rank: usize) -> f64 {
        self.counts.iter().zip(&self.sizes[rank]).map(|(count, size)| count * size).sum()
    }

    #[inline]
    fn begin(&mut self, action: &Action) {
        if action.kind == ActionKind::Forward {
            self.add(self.activation[action.stage as usize], 1.0);
        }
    }

    #[inline]
    fn finish(&mut self, action: &Action) {
        match action.kind {
            ActionKind::Forward if self.forward_only => self.add(self.activation[action.stage as usize], -1.0),
            ActionKind::Backward => self.add(self.activation[action.stage as usize], -1.0),
            ActionKind::InputGrad => {
                self.add(self.activation[action.stage as usize], -1.0);
                self.add(self.stash[action.stage as usize], 1.0);
            }
            ActionKind::WeightGrad => self.add(self.stash[action.stage as usize], -1.0),
            _ => {}
        }
    }

    /// A program that puts a stage on another rank than its own is not counted there: the checker refuses it.
    #[inline]
    fn add(&mut self, class: u32, change: f64) {
        if let Some(count) = self.counts.get_mut(class as usize) {
            *count += change;
        }
    }
}

/// The place of a size in a list of distinct sizes.
fn class(sizes: &mut Vec<f64>, size: f64) -> u32 {
    let known = sizes.iter().position(|other| other.to_bits() == size.to_bits());
    let at = known.unwrap_or_else(|| {
        sizes.push(size);
        sizes.len() - 1
    });
    u32::try_from(at).unwrap_or(u32::MAX)
}

/// Whether nothing in the programs goes backward: an evaluation, which holds nothing for later.
pub(crate) fn is_forward_only(programs: &[Vec<Action>]) -> bool {
    let backward =
        |action: &Action| matches!(action.kind, ActionKind::Backward | ActionKind::InputGrad | ActionKind::WeightGrad);
    !programs.iter().flatten().any(backward)
}
