//! Pictures of simulated schedules: text, SVG and a trace for Perfetto.

mod ascii;
mod perfetto;
mod svg;
mod svg_memory;

pub use ascii::ascii;
pub use perfetto::perfetto;
pub use svg::svg;

use std::fmt::Write as _;

use super::action::{Action, ActionKind};
use super::program::{Gating, Schedule};
use super::simulate::{Interval, MemoryPoint, Simulation};

/// Every computation of a rank with its interval.
fn cells<'a>(schedule: &'a Schedule, run: &'a Simulation, rank: usize) -> impl Iterator<Item = (Action, Interval)> {
    let program = schedule.programs().get(rank).into_iter().flatten();
    let intervals = run.intervals.get(rank).into_iter().flatten();
    program.copied().zip(intervals.copied()).filter(|(action, _)| action.kind.is_compute())
}

/// The computations of a rank that run at one time: a composite whose parts start together, or one action.
fn composites(schedule: &Schedule, run: &Simulation, rank: usize) -> Vec<(Vec<Action>, Interval)> {
    let together = schedule.header().gating == Gating::All;
    let mut found: Vec<(Vec<Action>, Interval)> = Vec::new();
    for (action, interval) in cells(schedule, run, rank) {
        match found.last_mut() {
            Some((parts, _)) if together && parts.last().is_some_and(|part| part.with_next) => parts.push(action),
            _ => found.push((vec![action], interval)),
        }
    }
    found
}

/// `F3` where a rank has one stage, else `2F3`.
fn label(schedule: &Schedule, action: Action) -> String {
    let kind = action.kind;
    let unit = action.microbatch;
    if stages_a_rank(schedule) == 1 { format!("{kind}{unit}") } else { format!("{}{kind}{unit}", action.stage) }
}

/// The most stages that a rank holds, over all chains.
fn stages_a_rank(schedule: &Schedule) -> usize {
    let placement = schedule.placement();
    (0..placement.num_ranks()).map(|rank| placement.stages_of(rank).len()).max().unwrap_or(1)
}

/// The kinds of computation that a schedule has, in the order of the table.
fn kinds(schedule: &Schedule) -> Vec<ActionKind> {
    let computes = ActionKind::ALL.iter().copied().filter(|kind| kind.is_compute());
    let used = |kind: &ActionKind| schedule.programs().iter().flatten().any(|action| action.kind == *kind);
    computes.filter(used).collect()
}

/// A memory curve with one point per time: of several changes at one time the last one stays.
fn settled(curve: &[MemoryPoint]) -> Vec<MemoryPoint> {
    let mut points: Vec<MemoryPoint> = Vec::with_capacity(curve.len());
    for point in curve {
        match points.last_mut() {
            Some(last) if last.time >= point.time => last.held = point.held,
            _ => points.push(*point),
        }
    }
    points
}

/// What a reader wants to know first: time, both bubbles, peak.
fn summary(run: &Simulation) -> String {
    let peak = run.peak.iter().copied().fold(0.0, f64::max);
    let mut text = format!("makespan {}, bubble {:.1}%", number(run.makespan), 100.0 * run.bubble_makespan);
    if number(run.span) != number(run.makespan) {
        let _ = write!(text, " (span {}, bubble {:.1}%)", number(run.span), 100.0 * run.bubble_span);
    }
    let _ = write!(text, ", peak {}", number(peak));
    text
}

/// A number with at most three decimals, none of them needless; very large and small ones with an exponent.
#[must_use]
pub fn number(value: f64) -> String {
    if value != 0.0 && !(1e-3..1e9).contains(&value.abs()) {
        return format!("{value:.3e}");
    }
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::schedule::generate::{ScheduleName, build};
    use crate::schedule::simulate::simulate;
    use crate::schedule::{CostSpec, Costs};

    fn simulated(name: ScheduleName, ranks: u32, microbatches: u32) -> (Schedule, Simulation) {
        let schedule = build(name, ranks, microbatches, None, None).unwrap();
        let costs = Costs::new(&CostSpec::uniform(1.0, 1.0, 1.0), schedule.placement(), 1).unwrap();
        let run = simulate(&schedule, &costs).unwrap();
        (schedule, run)
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!([number(0.0), number(33.0), number(4.25), number(1.0 / 3.0)], ["0", "33", "4.25", "0.333"]);
        assert_eq!([number(2.5e12), number(1e-7)], ["2.500e12", "1.000e-7"]);
    }

    #[test]
    fn text_is_to_scale() {
        let (schedule, run) = simulated(ScheduleName::OneForwardOneBackward, 2, 3);
        let text = ascii(&schedule, &run, 80);
        let rows: Vec<&str> = text.lines().skip(1).collect();
        assert_eq!(rows[0], "rank 0 |F0 F1 ......B0    F2 B1    ...B2    |");
        assert_eq!(rows[1], "rank 1 |...F0 B0    F1 B1    F2 B2    ......|");
        let cut = ascii(&schedule, &run, 10);
        assert!(cut.lines().nth(1).unwrap().ends_with("|F0 F1 .... ..."), "{cut}");
    }

    /// What the lines of a rank show, band after band.
    fn lines_of(text: &str, rank: usize) -> Vec<&str> {
        let name = format!("rank {rank} |");
        let lines = text.lines().filter_map(|line| line.strip_prefix(&name));
        lines.map(|line| line.strip_suffix(" ...").or(line.strip_suffix('|')).unwrap()).collect()
    }

    #[test]
    fn every_cell_of_a_picture_can_be_told() {
        for &name in ScheduleName::ALL {
            let (schedule, run) = simulated(name, 4, 8);
            let text = ascii(&schedule, &run, 110);
            assert!(text.lines().skip(1).all(|row| row.len() <= "rank 0 |".len() + 114), "{text}");
            for (rank, program) in schedule.programs().iter().enumerate() {
                let expected: Vec<String> = program.iter().map(|&action| label(&schedule, action)).collect();
                if stages_a_rank(&schedule) == 1 {
                    assert_eq!(lines_of(&text, rank).concat().replace([' ', '.'], ""), expected.concat());
                } else {
                    // Line by line: no label is cut in two.
                    let lines = lines_of(&text, rank);
                    let cells = lines.iter().flat_map(|line| line.split([' ', '.', '&']));
                    assert_eq!(cells.filter(|cell| !cell.is_empty()).collect::<Vec<_>>(), expected, "{text}");
                }
            }
        }
    }

    #[test]
    fn a_picture_too_long_for_labels_is_cut() {
        let (schedule, run) = simulated(ScheduleName::Gpipe, 4, 4096);
        assert_eq!(ascii(&schedule, &run, 160).lines().count(), 5);
    }

    #[test]
    fn tiny_and_huge_times_are_drawn_as_others() {
        let schedule = build(ScheduleName::ZbH1, 3, 5, None, None).unwrap();
        let pictures = [5e-324, 1.0, 1e300].map(|unit| {
            let costs = Costs::new(&CostSpec::uniform(unit, unit, unit), schedule.placement(), 1).unwrap();
            let run = simulate(&schedule, &costs).unwrap();
            let picture = svg(&schedule, &run) + &perfetto(&schedule, &run, 1.0);
            assert!(!picture.contains("NaN") && !picture.contains("inf"), "{picture}");
            ascii(&schedule, &run, 160).lines().skip(1).map(str::to_owned).collect::<Vec<_>>()
        });
        assert_eq!([&pictures[0], &pictures[2]], [&pictures[1]; 2]);
        // One action of no account beside the others.
        let times = vec![1e300, 1e-300, 1.0].into();
        let costs = CostSpec { forward: times, ..CostSpec::default() };
        let run = simulate(&schedule, &Costs::new(&costs, schedule.placement(), 1).unwrap()).unwrap();
        assert!(ascii(&schedule, &run, usize::MAX).len() < 3 * 5000);
    }

    #[test]
    fn parts_that_run_together_are_shown_together() {
        let (schedule, run) = simulated(ScheduleName::DualPipe, 2, 4);
        assert!(ascii(&schedule, &run, 400).contains('&'));
        let (all, halves) = (svg(&schedule, &run), "height=\"13.0\"");
        let joined = schedule.programs().iter().flatten().filter(|action| action.with_next).count();
        assert!(joined > 0);
        assert_eq!(all.matches(halves).count(), 2 * joined);
        assert_eq!(all.matches(" to ").count(), schedule.num_actions());
    }

    #[test]
    fn a_picture_has_every_cell_and_a_block_for_cells_too_narrow() {
        let (schedule, run) = simulated(ScheduleName::ZbH1, 3, 5);
        let picture = svg(&schedule, &run);
        assert_eq!(picture.matches(" to ").count(), schedule.num_actions());
        assert_eq!(picture.matches("stroke-width=\"1.6\"").count(), 3, "one memory curve a rank");
        let (schedule, run) = simulated(ScheduleName::Gpipe, 4, 4096);
        assert!(svg(&schedule, &run).matches("<rect").count() < 100);
    }

    #[test]
    fn a_trace_has_slices_arrows_and_counters() {
        let (schedule, run) = simulated(ScheduleName::Interleaved, 2, 4);
        let trace: Value = serde_json::from_str(&perfetto(&schedule, &run, 1000.0)).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let of = |phase: &str| events.iter().filter(|event| event["ph"] == phase).collect::<Vec<_>>();
        assert_eq!(of("X").len(), schedule.num_actions());
        // Four stages in a loop over two ranks: three hops there and three back for each micro-batch.
        assert_eq!((of("s").len(), of("f").len()), (4 * 6, 4 * 6));
        for (start, end) in of("s").into_iter().zip(of("f")) {
            assert_eq!(start["id"], end["id"]);
            assert!(start["ts"].as_f64() <= end["ts"].as_f64());
        }
        let highest = of("C").iter().filter_map(|event| event["args"]["held"].as_f64()).fold(0.0, f64::max);
        assert!((highest - run.peak[0]).abs() < 1e-12);
    }
}
