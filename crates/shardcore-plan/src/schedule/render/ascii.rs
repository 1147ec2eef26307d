//! A schedule as text: ranks are rows, time goes to the right.

use std::fmt::Write as _;

use super::{composites, label, stages_a_rank, summary};
use crate::schedule::action::Action;
use crate::schedule::program::Schedule;
use crate::schedule::simulate::Simulation;

/// The whole time never takes more columns than this: a single tiny action must not stretch all the others.
const MOST_COLUMNS: f64 = 4096.0;

/// A grid of a simulated schedule. Time is to scale, so that a gap is a bubble. A grid of more than `max_width` columns
/// goes on in further bands of lines, unless it is too long for labels; then its start is shown.
///
/// ```text
/// 1f1b: ... makespan 15, bubble 20.0%, peak 2
/// rank 0 |F0F1  B0  F2B1  F3B2  B3  |
/// ```
#[must_use]
pub fn ascii(schedule: &Schedule, run: &Simulation, max_width: usize) -> String {
    let (columns, in_bands) = num_columns(schedule, run, max_width);
    let rows: Vec<String> = (0..schedule.programs().len()).map(|rank| row(schedule, run, rank, columns)).collect();
    let name_width = format!("rank {}", rows.len().saturating_sub(1)).len();
    let width = rows.iter().map(String::len).max().unwrap_or(0);
    let mut text = format!("{schedule}: {}\n", summary(run));
    let (mut from, mut to) = (0, width.min(max_width));
    loop {
        if in_bands && to < width {
            to = whole_labels(&rows, from, to);
        }
        for (rank, row) in rows.iter().enumerate() {
            let name = format!("rank {rank}");
            let shown = &row[from.min(row.len())..to.min(row.len())];
            let _ = writeln!(text, "{name:<name_width$} |{shown}{}", if row.len() > to { " ..." } else { "|" });
        }
        if to == from || to >= width || !in_bands {
            return text;
        }
        (from, to) = (to, width.min(to.saturating_add(max_width)));
    }
}

/// The last column up to `to` at which no label of any rank is cut in two; `to` if there is none.
fn whole_labels(rows: &[String], from: usize, to: usize) -> usize {
    let is_label =
        |row: &String, column: usize| row.as_bytes().get(column).is_some_and(|letter| !b" .".contains(letter));
    let cuts = |row: &String, at: usize| is_label(row, at - 1) && is_label(row, at);
    (from + 1..=to).rev().find(|&at| !rows.iter().any(|row| cuts(row, at))).unwrap_or(to)
}

/// A rank's whole line.
fn row(schedule: &Schedule, run: &Simulation, rank: usize, columns: f64) -> String {
    let column = |time: f64| if run.makespan > 0.0 { round(time / run.makespan * columns) } else { 0 };
    let mut row = String::new();
    for (parts, interval) in composites(schedule, run, rank) {
        let (start, end) = (column(interval.start), column(interval.end));
        let used = row.len();
        row.extend(std::iter::repeat_n('.', start.saturating_sub(used)));
        let room = end.saturating_sub(row.len());
        let label = joined(schedule, &parts);
        let shown = if label.len() <= room { label } else { "#".repeat(room) };
        let _ = write!(row, "{shown:<room$}");
    }
    row.extend(std::iter::repeat_n('.', column(run.makespan).saturating_sub(row.len())));
    row
}

/// So many columns that the label of each action fits into its time and leaves a blank, and whether all of them may be
/// shown: not where that would be too many. Where a rank has one stage, labels can be told apart without blanks, and no
/// more columns are taken than are shown if the labels fit into those.
fn num_columns(schedule: &Schedule, run: &Simulation, max_width: usize) -> (f64, bool) {
    let (mut wanted, mut least) = (0.0_f64, 0.0_f64);
    for rank in 0..schedule.programs().len() {
        for (parts, interval) in composites(schedule, run, rank) {
            let part = (interval.end - interval.start) / run.makespan;
            if part > 0.0 {
                #[expect(clippy::cast_precision_loss, reason = "a label has a few letters")]
                let length = joined(schedule, &parts).len() as f64;
                wanted = wanted.max((length + 1.0) / part);
                least = least.max(length / part);
            }
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "compared with at most MOST_COLUMNS")]
    let shown = max_width as f64;
    let is_narrow = stages_a_rank(schedule) == 1 && least <= shown;
    (wanted.min(if is_narrow { shown.min(MOST_COLUMNS) } else { MOST_COLUMNS }), wanted <= MOST_COLUMNS)
}

/// `F3&B1`, with the stages where a rank has several.
fn joined(schedule: &Schedule, parts: &[Action]) -> String {
    let names: Vec<String> = parts.iter().map(|&part| label(schedule, part)).collect();
    names.join("&")
}

fn round(place: f64) -> usize {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most MOST_COLUMNS, at least 0")]
    let column = place.round() as usize;
    column
}
