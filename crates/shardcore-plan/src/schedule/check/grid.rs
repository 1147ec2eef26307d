//! The part of a schedule's grid in which a fault lies.

use std::fmt::Write as _;

use super::fault::Place;
use crate::schedule::program::Schedule;

/// A grid of at most so many ranks and positions is shown whole.
const WHOLE: (usize, usize) = (16, 20);
/// Positions shown before and behind a marked cell of a larger one.
const AROUND: usize = 6;
/// Rows shown of a larger one.
const ROWS: usize = 12;

/// The grid around some places, of which the first is the failing one.
pub(super) fn excerpt(schedule: &Schedule, marked: &[Place]) -> String {
    let programs = schedule.programs();
    let longest = programs.iter().map(Vec::len).max().unwrap_or(0);
    let whole = programs.len() <= WHOLE.0 && longest <= WHOLE.1;
    let mut ranks: Vec<usize> = marked.iter().map(|place| place.rank as usize).collect();
    if whole {
        ranks = (0..programs.len()).collect();
    } else {
        ranks.sort_unstable();
        ranks.dedup();
    }
    let hidden = ranks.len().saturating_sub(ROWS.max(if whole { WHOLE.0 } else { 0 }));
    ranks.truncate(ranks.len() - hidden);
    let rows: Vec<Row> = ranks.iter().map(|&rank| Row::new(&programs[rank], rank, marked, whole)).collect();
    let width = rows.iter().flat_map(|row| &row.cells).map(String::len).max().unwrap_or(0);
    let mut text = String::new();
    for row in &rows {
        let _ = write!(text, "rank {:>4}, from {:>5}:", row.rank, row.start);
        row.cells.iter().for_each(|cell| {
            let _ = write!(text, " {cell:^width$}");
        });
        text.truncate(text.trim_end().len());
        text.push_str(if row.more { " ...\n" } else { "\n" });
    }
    if hidden > 0 {
        let _ = writeln!(text, "... {hidden} more ranks ...");
    }
    text.truncate(text.trim_end().len());
    text
}

struct Row {
    rank: usize,
    start: usize,
    cells: Vec<String>,
    more: bool,
}

impl Row {
    fn new(program: &[crate::schedule::action::Action], rank: usize, marked: &[Place], whole: bool) -> Self {
        let here = || marked.iter().filter(|place| place.rank as usize == rank);
        let first = here().next().map_or(0, |place| place.position);
        let last = here().map(|place| place.position).filter(|&at| at.abs_diff(first) <= 2 * AROUND).max();
        let start = if whole { 0 } else { first.saturating_sub(AROUND) };
        let stop = if whole { program.len() } else { program.len().min(last.unwrap_or(first) + AROUND + 1) };
        let cell = |position: usize| {
            let name = program[position].to_string();
            match marked.iter().position(|place| place.rank as usize == rank && place.position == position) {
                Some(0) => format!(">{name}<"),
                Some(_) => format!("[{name}]"),
                None => name,
            }
        };
        Self { rank, start, cells: (start..stop).map(cell).collect(), more: stop < program.len() }
    }
}
