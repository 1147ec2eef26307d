//! A small executor of compute programs, written apart from the crate's own checker and simulator: exact integers, one
//! action at a time, nothing clever.

use std::collections::BTreeMap;

use shardcore_plan::schedule::{Action, ActionKind, Gating, Placement, Schedule};

/// Times of one action on any stage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) forward: i64,
    pub(crate) input_grad: i64,
    pub(crate) weight_grad: i64,
    pub(crate) hop: i64,
}

impl Times {
    pub(crate) const UNIT: Self = Self { forward: 1, input_grad: 1, weight_grad: 1, hop: 0 };

    fn of(self, kind: ActionKind) -> i64 {
        match kind {
            ActionKind::Forward => self.forward,
            ActionKind::Backward => self.input_grad + self.weight_grad,
            ActionKind::InputGrad => self.input_grad,
            ActionKind::WeightGrad => self.weight_grad,
            other => panic!("{other} is no compute"),
        }
    }
}

/// What came out of a run.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) makespan: i64,
    pub(crate) span: i64,
    /// The most micro-batches (chunks, slices) held at once, for each rank: from F until B or W.
    pub(crate) peak: Vec<usize>,
}

type Done = BTreeMap<(ActionKind, u32, u32), i64>;

/// What must be done before an action can start, with whether it crosses ranks.
fn needs(schedule: &Schedule, action: Action, done: &Done) -> Option<Vec<(ActionKind, u32)>> {
    let header = schedule.header();
    let placement = schedule.placement();
    let Action { stage, microbatch, .. } = action;
    let backward = |stage: u32| {
        let fused = done.contains_key(&(ActionKind::Backward, stage, microbatch));
        (if fused { ActionKind::Backward } else { ActionKind::InputGrad }, stage)
    };
    if !header.crosses(microbatch, stage) {
        return None;
    }
    Some(match action.kind {
        ActionKind::Forward => {
            placement.previous(stage).map(|stage| (ActionKind::Forward, stage)).into_iter().collect()
        }
        ActionKind::WeightGrad => vec![(ActionKind::InputGrad, stage)],
        _ => {
            let own = (ActionKind::Forward, stage);
            std::iter::once(own).chain(placement.next(stage).map(backward)).collect()
        }
    })
}

fn arrival(placement: &Placement, done: &Done, action: Action, need: (ActionKind, u32), hop: i64) -> Option<i64> {
    let end = *done.get(&(need.0, need.1, action.microbatch))?;
    let local = placement.rank_of(need.1) == placement.rank_of(action.stage);
    Some(if local { end } else { end + hop })
}

/// When the inputs of an action are there; `None` while one is missing.
fn ready(schedule: &Schedule, done: &Done, action: Action, hop: i64) -> Option<i64> {
    let needs = needs(schedule, action, done)?;
    let arrivals = needs.into_iter().map(|need| arrival(schedule.placement(), done, action, need, hop));
    arrivals.collect::<Option<Vec<_>>>().map(|times| times.into_iter().max().unwrap_or(0))
}

/// A rank's next composite: the actions up to the first that is not joined with the one behind.
fn composite(program: &[Action]) -> &[Action] {
    let end = program.iter().position(|action| !action.with_next).map_or(0, |last| last + 1);
    &program[..end]
}

/// Runs every rank's program in its order and checks that each micro-batch does all it must, once.
pub(crate) fn run(schedule: &Schedule, times: Times) -> Result<Run, String> {
    let mut done = Done::new();
    let mut rest: Vec<&[Action]> = schedule.programs().iter().map(Vec::as_slice).collect();
    let mut clock = vec![0_i64; rest.len()];
    let mut first = vec![None; rest.len()];
    loop {
        let mut progress = false;
        for rank in 0..rest.len() {
            while let Some(end) = step(schedule, times, &mut done, rest[rank], &mut clock[rank], &mut first[rank])? {
                rest[rank] = &rest[rank][end..];
                progress = true;
            }
        }
        if rest.iter().all(|program| program.is_empty()) {
            break;
        }
        if !progress {
            let heads: Vec<String> =
                rest.iter().map(|program| program.first().map_or("-".into(), Action::to_string)).collect();
            return Err(format!("stuck at {heads:?}"));
        }
    }
    complete(schedule, &done)?;
    let span = clock.iter().zip(&first).map(|(&end, &start)| end - start.unwrap_or(end)).max().unwrap_or(0);
    let peak = schedule.programs().iter().map(|program| peak(program)).collect::<Result<_, _>>()?;
    Ok(Run { makespan: clock.into_iter().max().unwrap_or(0), span, peak })
}

/// Runs a rank's next composite if its inputs are there; gives how many actions it had.
fn step(
    schedule: &Schedule,
    times: Times,
    done: &mut Done,
    rest: &[Action],
    clock: &mut i64,
    first: &mut Option<i64>,
) -> Result<Option<usize>, String> {
    let parts = composite(rest);
    if parts.is_empty() {
        return Ok(None);
    }
    // Parts that feed each other inside a composite run one after the other; its gating says when it may start.
    let starts: Vec<Option<i64>> = parts.iter().map(|&part| ready(schedule, done, part, times.hop)).collect();
    let Some(starts) = starts.into_iter().collect::<Option<Vec<_>>>() else {
        return Ok(None);
    };
    let gate = starts.iter().copied().max().unwrap_or(0);
    for (&part, own) in parts.iter().zip(starts) {
        let start = (*clock).max(if schedule.header().gating == Gating::All { gate } else { own });
        first.get_or_insert(start);
        *clock = start + times.of(part.kind);
        if done.insert((part.kind, part.stage, part.microbatch), *clock).is_some() {
            return Err(format!("{part} twice"));
        }
    }
    Ok(Some(parts.len()))
}

/// Each stage and micro-batch of its chain has F, and, if anything goes backward, B or I and W.
fn complete(schedule: &Schedule, done: &Done) -> Result<(), String> {
    let forward_only = schedule.is_forward_only();
    let mut expected = 0;
    for microbatch in 0..schedule.header().num_units() {
        for stage in schedule.header().stages_of(microbatch) {
            let has = |kind| done.contains_key(&(kind, stage, microbatch));
            let (fused, split) = (has(ActionKind::Backward), has(ActionKind::InputGrad) && has(ActionKind::WeightGrad));
            if !has(ActionKind::Forward) || (!forward_only && fused == split) {
                return Err(format!("stage {stage} has not done all for micro-batch {microbatch}"));
            }
            expected += if forward_only { 1 } else { 2 + usize::from(split) };
        }
    }
    if done.len() == expected { Ok(()) } else { Err(format!("{} actions instead of {expected}", done.len())) }
}

/// The most micro-batches that a rank holds at once.
pub(crate) fn peak(program: &[Action]) -> Result<usize, String> {
    let (mut held, mut most) = (0_usize, 0);
    for action in program {
        match action.kind {
            ActionKind::Forward => held += 1,
            ActionKind::Backward | ActionKind::WeightGrad => {
                held = held.checked_sub(1).ok_or_else(|| format!("{action} before its F"))?;
            }
            _ => {}
        }
        most = most.max(held);
    }
    Ok(most)
}
