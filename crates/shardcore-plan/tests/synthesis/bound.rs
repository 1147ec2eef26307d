//! The lower bound against the optimum of tiny problems, found by trying every order.

use std::collections::VecDeque;

use shardcore_plan::schedule::simulate::{Network, Simulator};
use shardcore_plan::schedule::{
    Action, ActionKind, Amount, CostSpec, Costs, Header, Objective, Placement, Request, Synthesis, synthesize,
};

use crate::{Dice, cases};

/// How far a stage is.
#[derive(Clone, Default)]
struct Progress {
    forwards: u32,
    backwards: u32,
    /// The micro-batches whose weight gradient is still to come.
    split: VecDeque<u32>,
}

impl Progress {
    /// What may come next: of each kind the first micro-batch, and how far the stage is then.
    fn next(&self, microbatches: u32) -> Vec<(ActionKind, u32, Self)> {
        let mut found = Vec::new();
        if self.forwards < microbatches {
            found.push((ActionKind::Forward, self.forwards, Self { forwards: self.forwards + 1, ..self.clone() }));
        }
        if self.backwards < self.forwards {
            let whole = Self { backwards: self.backwards + 1, ..self.clone() };
            let mut split = whole.clone();
            split.split.push_back(self.backwards);
            found.push((ActionKind::Backward, self.backwards, whole));
            found.push((ActionKind::InputGrad, self.backwards, split));
        }
        let mut done = self.clone();
        if let Some(microbatch) = done.split.pop_front() {
            found.push((ActionKind::WeightGrad, microbatch, done));
        }
        found
    }
}

/// Every order of one rank's actions in which the micro-batches of a kind keep their order, each backward in one piece
/// or split.
fn orders(stages: &[u32], microbatches: u32) -> Vec<Vec<Action>> {
    let mut found = Vec::new();
    extend(stages, microbatches, &mut vec![Progress::default(); stages.len()], &mut Vec::new(), &mut found);
    found
}

fn extend(
    stages: &[u32],
    microbatches: u32,
    progress: &mut [Progress],
    order: &mut Vec<Action>,
    found: &mut Vec<Vec<Action>>,
) {
    if progress.iter().all(|stage| stage.backwards == microbatches && stage.split.is_empty()) {
        found.push(order.clone());
        return;
    }
    for chunk in 0..stages.len() {
        for (kind, microbatch, after) in progress[chunk].next(microbatches) {
            let before = std::mem::replace(&mut progress[chunk], after);
            order.push(Action::new(kind, stages[chunk], microbatch));
            extend(stages, microbatches, progress, order, found);
            order.pop();
            progress[chunk] = before;
        }
    }
}

/// The best makespan and span over all orders that fit.
fn optimum(placement: &Placement, microbatches: u32, costs: &Costs, cap: f64) -> Option<[f64; 2]> {
    let header = Header::new("all", placement.clone(), microbatches);
    let mut simulator = Simulator::new();
    let mut best: Option<[f64; 2]> = None;
    let choices: Vec<Vec<Vec<Action>>> =
        (0..placement.num_ranks()).map(|rank| orders(placement.stages_of(rank), microbatches)).collect();
    let total: usize = choices.iter().map(Vec::len).product();
    for mut index in 0..total {
        let mut programs = Vec::new();
        for choice in &choices {
            programs.push(choice[index % choice.len()].clone());
            index /= choice.len();
        }
        let run = simulator.evaluate(&header, &programs, false, costs, &Network::default()).unwrap();
        if let Some(run) = run.filter(|run| run.peak <= cap * (1.0 + 1e-9)) {
            let [makespan, span] = best.unwrap_or([f64::INFINITY; 2]);
            best = Some([makespan.min(run.makespan), span.min(run.span)]);
        }
    }
    best
}

const OBJECTIVES: [(Objective, usize); 2] = [(Objective::Makespan, 0), (Objective::Span, 1)];

/// How much longer than the optimum of all orders what synthesis finds is, and whether its bound, which is never above
/// the optimum, meets it.
fn compared_with_all(placement: &Placement, microbatches: u32, costs: &CostSpec, cap: f64) -> [(f64, bool); 2] {
    let resolved = Costs::new(costs, placement, 1).unwrap();
    let best = optimum(placement, microbatches, &resolved, cap).unwrap();
    OBJECTIVES.map(|(objective, index)| {
        let request =
            Request::new(placement.clone(), microbatches, costs.clone()).with_cap(cap).with_objective(objective);
        let (found, best) = (synthesize(&request).unwrap(), best[index]);
        let case = format!("{placement} m={microbatches} cap={cap} {objective:?} {costs:?}");
        assert!(found.lower_bound <= best * (1.0 + 1e-9), "{case}: {} > {best}", found.lower_bound);
        assert!(found.value >= best * (1.0 - 1e-9), "{case}: {} < {best}", found.value);
        (found.value / best - 1.0, found.gap < 1e-9)
    })
}

#[test]
fn the_bound_is_never_above_the_optimum_of_all_orders() {
    let mut dice = Dice::new(11);
    let shapes = [
        (Placement::looped(2, 1).unwrap(), 2),
        (Placement::looped(2, 1).unwrap(), 3),
        (Placement::looped(3, 1).unwrap(), 2),
        (Placement::looped(1, 1).unwrap(), 3),
        (Placement::v_shape(2).unwrap(), 1),
        (Placement::looped(1, 2).unwrap(), 2),
    ];
    let mut tight = 0;
    for round in 0..cases(24, 600) {
        let (placement, microbatches) = &shapes[round as usize % shapes.len()];
        let costs = dice.costs(placement.num_stages() as usize);
        let least = f64::from(placement.num_chunks()) * 1.2;
        let cap = least + f64::from(dice.below(4)) * 0.7;
        for (loss, is_tight) in compared_with_all(placement, *microbatches, &costs, cap) {
            assert!(loss < 1e-9, "round {round}: {placement} m={microbatches} cap={cap} {costs:?}: {loss}");
            tight += u32::from(is_tight);
        }
    }
    assert!(tight > 0, "the bound is never reached");
}

/// Where a backward in one piece takes less, the best schedule is often of both kinds. Of 1,200 searches under tight caps
/// 11 miss it, by 5.4% at most.
#[test]
fn backwards_in_one_piece_and_split_ones_mix_as_is_best() {
    let mut dice = Dice::new(12);
    let mut losses = Vec::new();
    let shapes = [(2, 3), (3, 2), (2, 2)].map(|(ranks, count)| (Placement::looped(ranks, 1).unwrap(), count));
    for round in 0..cases(30, 600) {
        let (placement, microbatches) = &shapes[round as usize % shapes.len()];
        let mut costs = dice.costs(placement.num_stages() as usize);
        let split = Costs::new(&costs, placement, 1).unwrap();
        let sums = split.input_grad.iter().zip(&split.weight_grad).map(|(input, weight)| input + weight);
        if dice.below(2) == 0 {
            (costs.activation, costs.stash) = (2.0.into(), Some(f64::from(1 + dice.below(4)).into()));
        }
        costs.fused_backward = Some(sums.map(|sum| sum * (0.6 + 0.4 * dice.unit())).collect::<Vec<f64>>().into());
        let cap = 2.0 + f64::from(dice.below(6));
        losses.extend(compared_with_all(placement, *microbatches, &costs, cap).map(|(loss, _)| loss));
    }
    let longer = losses.iter().filter(|loss| **loss > 1e-9).count();
    let most = losses.iter().copied().fold(0.0, f64::max);
    assert!(longer * 50 <= losses.len() && most < 0.06, "{longer} of {} are longer, by up to {most}", losses.len());
}

/// A power of two as far from 1 as costs may be.
fn any_power(dice: &mut Dice) -> f64 {
    2.0_f64.powi(i32::try_from(dice.below(1801)).unwrap() - 900)
}

fn scaled(amount: &Amount, by: f64) -> Amount {
    match amount {
        Amount::PerRank(value) => Amount::PerRank(value * by),
        Amount::PerStage(values) => values.iter().map(|value| value * by).collect::<Vec<f64>>().into(),
    }
}

/// Products of times and sizes once overflowed, or vanished, and gave bounds above what was found.
#[test]
fn neither_the_unit_of_times_nor_that_of_sizes_changes_anything() {
    let mut dice = Dice::new(14);
    for round in 0..cases(12, 200) {
        let placement = [Placement::looped(3, 1).unwrap(), Placement::v_shape(2).unwrap()][round as usize % 2].clone();
        let costs = dice.costs(placement.num_stages() as usize);
        let cap = 2.0 + f64::from(dice.below(3));
        let [time, size] = [any_power(&mut dice), any_power(&mut dice)];
        let other = CostSpec {
            forward: scaled(&costs.forward, time),
            input_grad: scaled(&costs.input_grad, time),
            weight_grad: scaled(&costs.weight_grad, time),
            fused_backward: costs.fused_backward.as_ref().map(|amount| scaled(amount, time)),
            hop: costs.hop * time,
            activation: scaled(&costs.activation, size),
            stash: costs.stash.as_ref().map(|amount| scaled(amount, size)),
        };
        let plain = synthesize(&Request::new(placement.clone(), 6, costs.clone()).with_cap(cap)).unwrap();
        let found = synthesize(&Request::new(placement, 6, other).with_cap(cap * size)).unwrap();
        let expected = Synthesis { value: plain.value * time, lower_bound: plain.lower_bound * time, ..plain };
        assert_eq!(found, expected, "{costs:?}, times x {time:e}, sizes x {size:e}");
    }
}

/// Every time and size of its own order of magnitude.
#[test]
fn the_bound_holds_whatever_the_magnitudes() {
    let mut dice = Dice::new(15);
    let shapes = [
        (Placement::looped(2, 1).unwrap(), 2),
        (Placement::looped(2, 1).unwrap(), 3),
        (Placement::v_shape(2).unwrap(), 1),
        (Placement::looped(1, 2).unwrap(), 2),
    ];
    for round in 0..cases(24, 600) {
        let (placement, microbatches) = &shapes[round as usize % shapes.len()];
        let num_stages = placement.num_stages() as usize;
        let mut wild = || -> Vec<f64> { (0..num_stages).map(|_| any_power(&mut dice)).collect() };
        let [forward, input, weight, activation, stash] = std::array::from_fn(|_| wild());
        let of_rank = |rank: u32| placement.stages_of(rank).iter().map(|&stage| activation[stage as usize]).sum();
        let needed = (0..placement.num_ranks()).map(of_rank).fold(0.0, f64::max);
        let costs = CostSpec {
            fused_backward: (dice.below(2) == 0)
                .then(|| (0..num_stages).map(|_| any_power(&mut dice)).collect::<Vec<f64>>().into()),
            forward: forward.into(),
            input_grad: input.into(),
            weight_grad: weight.into(),
            hop: any_power(&mut dice),
            activation: activation.into(),
            stash: Some(stash.into()),
        };
        compared_with_all(placement, *microbatches, &costs, needed * (1.0 + dice.unit()));
    }
}
