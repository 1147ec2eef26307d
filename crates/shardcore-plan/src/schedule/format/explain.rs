//! Schedules as tables for people.

use super::text::joined;
use crate::schedule::action::{Action, ActionKind};
use crate::schedule::program::Schedule;
use crate::table::{Align, Table, count};

impl Schedule {
    /// The schedule as an aligned table: one line a rank with its stages, its actions by kind, and the most
    /// micro-batches (parts of them, with several chunks or slices) whose activations it holds at once. Long schedules
    /// show both ends.
    #[must_use]
    pub fn explain(&self) -> String {
        let columns = [
            ("rank", Align::Right),
            ("stages", Align::Left),
            ("F", Align::Right),
            ("B", Align::Right),
            ("I", Align::Right),
            ("W", Align::Right),
            ("messages", Align::Right),
            ("held", Align::Right),
            ("first", Align::Left),
        ];
        let ranks: Vec<u32> = (0..self.num_ranks()).collect();
        let table = Table::new(columns, ranks.len(), |index| self.row(ranks[index]));
        format!("{self}\n{table}")
    }

    fn row(&self, rank: u32) -> [String; 9] {
        let program = &self.programs()[rank as usize];
        let number =
            |wanted: fn(ActionKind) -> bool| count(program.iter().filter(|action| wanted(action.kind)).count() as u64);
        let stages = joined(self.placement().stages_of(rank), " ");
        let held = if self.is_forward_only() { 1 } else { held(program) };
        let first: Vec<String> = program.iter().take(4).map(Action::to_string).collect();
        [
            rank.to_string(),
            stages,
            number(|kind| kind == ActionKind::Forward),
            number(|kind| kind == ActionKind::Backward),
            number(|kind| kind == ActionKind::InputGrad),
            number(|kind| kind == ActionKind::WeightGrad),
            number(|kind| kind.is_send() || kind.is_recv()),
            count(held as u64),
            first.join(" "),
        ]
    }
}

/// The most micro-batches whose activations are held at once.
fn held(program: &[Action]) -> usize {
    let (mut held, mut most) = (0_usize, 0);
    for action in program {
        match action.kind {
            ActionKind::Forward => held += 1,
            ActionKind::Backward | ActionKind::WeightGrad => held = held.saturating_sub(1),
            _ => {}
        }
        most = most.max(held);
    }
    most
}
