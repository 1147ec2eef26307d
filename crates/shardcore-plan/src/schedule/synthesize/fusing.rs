//! Which backwards list scheduling makes in one piece.

use std::ops::Range;

use super::super::list::Problem;

/// Ways to choose, per stage, the micro-batches whose backwards are in one piece; those that the caps force are always
/// among them. One way where fusing gains neither time nor memory. Else
///
/// - none, all, and those of stages at one end or the other of the chain: before the first stages nobody waits for an
///   input gradient, and on the last ones least is held;
/// - all but the first micro-batch, or as many as there are stages: ranks that wait for their first gradient get it
///   sooner;
/// - all but the last micro-batches, whose weight gradients keep a rank busy while the pipeline drains; and both.
pub(super) fn choices(problem: &Problem) -> Vec<Vec<Range<usize>>> {
    let (num_stages, num_microbatches) = (problem.num_stages(), problem.num_microbatches);
    let gains: Vec<bool> = (0..num_stages).map(|stage| gains(problem, stage)).collect();
    let (must, drain) = (problem.must_fuse(), drains(problem));
    let half = num_stages.div_ceil(2);
    let ends = [0..0, 0..num_stages, 0..1, 0..half, half..num_stages].map(|stages| (stages, 0, false));
    let windows = [(0, true), (1, false), (1, true), (num_stages, true)];
    let windows = windows.map(|(first, drains)| (0..num_stages, first, drains));
    let mut choices: Vec<Vec<Range<usize>>> = Vec::new();
    for (stages, first, drains) in ends.into_iter().chain(windows) {
        let fused = |stage: usize| {
            if !must[stage].is_empty() {
                return must[stage].clone();
            }
            let end = num_microbatches - if drains { drain[stage] } else { 0 };
            if stages.contains(&stage) && gains[stage] && first < end { first..end } else { 0..0 }
        };
        let choice = (0..num_stages).map(fused).collect();
        if !choices.contains(&choice) {
            choices.push(choice);
        }
    }
    choices
}

/// Whether a backward in one piece takes less time, or less of a memory that is short.
fn gains(problem: &Problem, stage: usize) -> bool {
    let is_short = problem.cap[problem.rank_of[stage]].is_finite() && problem.stash[stage] > problem.activation[stage];
    is_short || problem.fusing_pays(stage)
}

/// Per stage, how many weight gradients take as long as its last input gradient takes on to the first stage.
fn drains(problem: &Problem) -> Vec<usize> {
    let [_, grad, weight, _] = &problem.time;
    let mut way = 0.0;
    let mut drain = |stage: usize| {
        let (mut count, mut busy) = (0, 0.0);
        while busy < way && count < problem.num_microbatches {
            busy += weight[stage];
            count += 1;
        }
        way += grad[stage] + problem.hop_before.get(stage + 1).copied().unwrap_or(0.0);
        count
    };
    (0..problem.num_stages()).map(&mut drain).collect()
}
