//! A schedule as text: ranks are rows, time goes to the right.

use std::fmt::Write as _;

use super::{composites, label, summary};
use crate::schedule::action::Action;
use crate::schedule::program::Schedule;
use crate::schedule::simulate::Simulation;

/// Columns for one unit of time never exceed this: a single tiny action must not stretch all the others.
const MOST_COLUMNS: f64 = 4096.0;

/// A grid of a simulated schedule. Time is to scale, so that a gap is a bubble; `max_width` columns are shown.
///
/// ```text
/// 1f1b: ... makespan 15, bubble 20.0%, peak 2
/// rank 0 |F0F1  B0  F2B1  F3B2  B3  |
/// ```
#[must_use]
pub fn ascii(schedule: &Schedule, run: &Simulation, max_width: usize) -> String {
    let ranks = 0..schedule.programs().len();
    let scale = columns_per_time(schedule, run);
    let name_width = format!("rank {}", ranks.len().saturating_sub(1)).len();
    let mut text = format!("{schedule}: {}\n", summary(run));
    for rank in ranks {
        let mut row = String::new();
        for (parts, interval) in composites(schedule, run, rank) {
            let (start, end) = (column(interval.start * scale), column(interval.end * scale));
            if start >= max_width {
                break;
            }
            let used = row.len();
            row.extend(std::iter::repeat_n('.', start.saturating_sub(used)));
            let room = end.saturating_sub(row.len());
            let name = joined(schedule, &parts);
            let shown = if name.len() <= room { name } else { "#".repeat(room) };
            let _ = write!(row, "{shown:<room$}");
        }
        let whole = column(run.makespan * scale);
        row.extend(std::iter::repeat_n('.', whole.saturating_sub(row.len())));
        let cut = row.len() > max_width;
        row.truncate(max_width);
        let name = format!("rank {rank}");
        let _ = writeln!(text, "{name:<name_width$} |{row}{}", if cut { " ..." } else { "|" });
    }
    text
}

/// So many columns that the label of each action fits into its time and leaves a blank, as far as that is sensible.
fn columns_per_time(schedule: &Schedule, run: &Simulation) -> f64 {
    let mut scale = 0.0_f64;
    for rank in 0..schedule.programs().len() {
        for (parts, interval) in composites(schedule, run, rank) {
            let time = interval.end - interval.start;
            if time > 0.0 {
                #[expect(clippy::cast_precision_loss, reason = "a label has a few letters")]
                let needed = (joined(schedule, &parts).len() + 1) as f64;
                scale = scale.max(needed / time);
            }
        }
    }
    scale.min(if run.makespan > 0.0 { MOST_COLUMNS / run.makespan } else { 1.0 })
}

/// `F3&B1`.
fn joined(schedule: &Schedule, parts: &[Action]) -> String {
    let names: Vec<String> = parts.iter().map(|&part| label(schedule, part)).collect();
    names.join("&")
}

fn column(place: f64) -> usize {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most MOST_COLUMNS, at least 0")]
    let column = place.round() as usize;
    column
}
