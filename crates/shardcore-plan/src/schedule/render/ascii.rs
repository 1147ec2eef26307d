//! A schedule as text: ranks are rows, time goes to the right.

use std::fmt::Write as _;

use super::{composites, label, summary};
use crate::schedule::action::Action;
use crate::schedule::program::Schedule;
use crate::schedule::simulate::Simulation;

/// The whole time never takes more columns than this: a single tiny action must not stretch all the others.
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
    let columns = num_columns(schedule, run, max_width);
    let column = |time: f64| if run.makespan > 0.0 { round(time / run.makespan * columns) } else { 0 };
    let name_width = format!("rank {}", ranks.len().saturating_sub(1)).len();
    let mut text = format!("{schedule}: {}\n", summary(run));
    for rank in ranks {
        let mut row = String::new();
        for (parts, interval) in composites(schedule, run, rank) {
            let (start, end) = (column(interval.start), column(interval.end));
            if start >= max_width {
                break;
            }
            let used = row.len();
            row.extend(std::iter::repeat_n('.', start.saturating_sub(used)));
            let room = end.saturating_sub(row.len());
            let shown = [joined(schedule, &parts), short(&parts)].into_iter().find(|name| name.len() <= room);
            let shown = shown.unwrap_or_else(|| "#".repeat(room));
            let _ = write!(row, "{shown:<room$}");
        }
        let whole = column(run.makespan);
        row.extend(std::iter::repeat_n('.', whole.saturating_sub(row.len())));
        let cut = row.len() > max_width;
        row.truncate(max_width);
        let name = format!("rank {rank}");
        let _ = writeln!(text, "{name:<name_width$} |{row}{}", if cut { " ..." } else { "|" });
    }
    text
}

/// So many columns that the label of each action fits into its time and leaves a blank, as far as that is sensible; no
/// more than are shown, if the short labels fit into those.
fn num_columns(schedule: &Schedule, run: &Simulation, max_width: usize) -> f64 {
    let (mut wanted, mut least) = (0.0_f64, 0.0_f64);
    for rank in 0..schedule.programs().len() {
        for (parts, interval) in composites(schedule, run, rank) {
            let part = (interval.end - interval.start) / run.makespan;
            if part > 0.0 {
                #[expect(clippy::cast_precision_loss, reason = "a label has a few letters")]
                let [long, short] = [joined(schedule, &parts), short(&parts)].map(|name| name.len() as f64 / part);
                wanted = wanted.max(long + 1.0 / part);
                least = least.max(short);
            }
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "compared with at most MOST_COLUMNS")]
    let shown = max_width as f64;
    wanted.min(if least <= shown { shown.min(MOST_COLUMNS) } else { MOST_COLUMNS })
}

/// `F3&B1`, with the stages where a rank has several.
fn joined(schedule: &Schedule, parts: &[Action]) -> String {
    let names: Vec<String> = parts.iter().map(|&part| label(schedule, part)).collect();
    names.join("&")
}

/// `F3&B1`.
fn short(parts: &[Action]) -> String {
    let names: Vec<String> = parts.iter().map(|part| format!("{}{}", part.kind, part.microbatch)).collect();
    names.join("&")
}

fn round(place: f64) -> usize {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most MOST_COLUMNS, at least 0")]
    let column = place.round() as usize;
    column
}
