//! The lower bound against the optimum of tiny problems, found by trying every order.

use shardcore_plan::schedule::simulate::{Network, Simulator};
use shardcore_plan::schedule::{Action, ActionKind, Costs, Header, Objective, Placement, Request, synthesize};

use crate::{Dice, cases};

/// Every order of one rank's actions in which the micro-batches of a kind keep their order.
fn orders(stages: &[u32], microbatches: u32, fused: bool) -> Vec<Vec<Action>> {
    let kinds: &[ActionKind] = if fused {
        &[ActionKind::Forward, ActionKind::Backward]
    } else {
        &[ActionKind::Forward, ActionKind::InputGrad, ActionKind::WeightGrad]
    };
    let mut found = Vec::new();
    let mut counts = vec![vec![0; kinds.len()]; stages.len()];
    extend(stages, microbatches, kinds, &mut counts, &mut Vec::new(), &mut found);
    found
}

fn extend(
    stages: &[u32],
    microbatches: u32,
    kinds: &[ActionKind],
    counts: &mut [Vec<u32>],
    order: &mut Vec<Action>,
    found: &mut Vec<Vec<Action>>,
) {
    if order.len() == stages.len() * kinds.len() * microbatches as usize {
        found.push(order.clone());
        return;
    }
    for chunk in 0..stages.len() {
        for kind in 0..kinds.len() {
            let next = counts[chunk][kind];
            if next < if kind == 0 { microbatches } else { counts[chunk][kind - 1] } {
                counts[chunk][kind] += 1;
                order.push(Action::new(kinds[kind], stages[chunk], next));
                extend(stages, microbatches, kinds, counts, order, found);
                order.pop();
                counts[chunk][kind] -= 1;
            }
        }
    }
}

/// The best makespan and span over all orders that fit, split or all fused.
fn optimum(placement: &Placement, microbatches: u32, costs: &Costs, cap: f64) -> Option<[f64; 2]> {
    let header = Header::new("all", placement.clone(), microbatches);
    let mut simulator = Simulator::new();
    let mut best: Option<[f64; 2]> = None;
    for fused in [false, true] {
        let choices: Vec<Vec<Vec<Action>>> =
            (0..placement.num_ranks()).map(|rank| orders(placement.stages_of(rank), microbatches, fused)).collect();
        let total: usize = choices.iter().map(Vec::len).product();
        for mut index in 0..total {
            let mut programs = Vec::new();
            for choice in &choices {
                programs.push(choice[index % choice.len()].clone());
                index /= choice.len();
            }
            let run = simulator.evaluate(&header, &programs, false, costs, &Network::default()).unwrap();
            if let Some(run) = run.filter(|run| run.peak <= cap + 1e-9) {
                let [makespan, span] = best.unwrap_or([f64::INFINITY; 2]);
                best = Some([makespan.min(run.makespan), span.min(run.span)]);
            }
        }
    }
    best
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
        let resolved = Costs::new(&costs, placement, 1).unwrap();
        let best = optimum(placement, *microbatches, &resolved, cap);
        for (objective, index) in [(Objective::Makespan, 0), (Objective::Span, 1)] {
            let request =
                Request::new(placement.clone(), *microbatches, costs.clone()).with_cap(cap).with_objective(objective);
            let found = synthesize(&request).unwrap();
            let best = best.unwrap()[index];
            let case = format!("round {round} {placement} m={microbatches} cap={cap} {objective:?} {costs:?}");
            assert!(found.lower_bound <= best * (1.0 + 1e-9), "{case}: {} > {best}", found.lower_bound);
            assert!(found.value <= best * (1.0 + 1e-9), "{case}: {} is not the optimum {best}", found.value);
            tight += u32::from(found.gap < 1e-9);
        }
    }
    assert!(tight > 0, "the bound is never reached");
}
