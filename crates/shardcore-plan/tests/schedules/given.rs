//! Random instances for the property tests.

use proptest::prelude::*;
use proptest::test_runner::Config;
use shardcore_plan::schedule::{Action, ActionKind, Header, Placement, Schedule, ScheduleName};

use crate::named::made;
use crate::reference::Times;
use crate::timed::count;

/// `cases` of a property in `make test`; sixty-four times as many in `make test-full`.
pub(crate) fn cases(cases: u32) -> Config {
    Config { cases: count(cases, cases * 64), failure_persistence: None, ..Config::default() }
}

/// A schedule whose order is a closed form.
pub(crate) fn name() -> impl Strategy<Value = ScheduleName> {
    prop::sample::select(ScheduleName::CLOSED.to_vec())
}

/// Any named schedule, of few ranks and micro-batches.
pub(crate) fn named() -> impl Strategy<Value = Schedule> {
    (prop::sample::select(ScheduleName::ALL.to_vec()), counts()).prop_map(|(name, (p, m, v))| {
        let p = if name == ScheduleName::DualPipe { p.next_multiple_of(2) } else { p };
        made(name, p, m, v)
    })
}

/// Few and many micro-batches, also fewer than ranks and not divisible by them.
pub(crate) fn counts() -> impl Strategy<Value = (u32, u32, u32)> {
    (1_u32..=9, 1_u32..=20, 1_u32..=4)
}

/// Times with zeros and huge ratios.
pub(crate) fn times() -> impl Strategy<Value = Times> {
    let time = || prop_oneof![Just(0_i64), 1_i64..10, Just(1_000_000)];
    (time(), time(), time(), time()).prop_map(|(forward, input_grad, weight_grad, hop)| Times {
        forward,
        input_grad,
        weight_grad,
        hop,
    })
}

/// Every shape, and arbitrary ones where each rank holds at least one stage.
pub(crate) fn placement() -> impl Strategy<Value = Placement> {
    let custom = (1_u32..6, prop::collection::vec(any::<u32>(), 0..8), any::<prop::sample::Index>()).prop_map(
        |(num_ranks, more, turn)| {
            let mut ranks: Vec<u32> = (0..num_ranks).chain(more.into_iter().map(|rank| rank % num_ranks)).collect();
            let turn = turn.index(ranks.len());
            ranks.rotate_left(turn);
            Placement::custom(ranks).unwrap()
        },
    );
    prop_oneof![
        (1_u32..9, 1_u32..5).prop_map(|(p, v)| Placement::looped(p, v).unwrap()),
        (1_u32..9, 1_u32..5).prop_map(|(p, v)| Placement::zig_zag(p, v).unwrap()),
        (1_u32..9).prop_map(|p| Placement::bidirectional(p).unwrap()),
        custom,
    ]
}

/// Programs that can run, in any order that the dependencies allow, some with composites.
pub(crate) fn program() -> impl Strategy<Value = Schedule> {
    (placement(), 1_u32..8, any::<bool>(), any::<bool>(), any::<u64>()).prop_map(
        |(placement, m, split, joins, seed)| random_program(Header::new("random", placement, m), split, joins, seed),
    )
}

fn random_program(header: Header, split: bool, joins: bool, mut seed: u64) -> Schedule {
    let mut random = |below: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(seed >> 33).unwrap() % below
    };
    let mut programs = vec![Vec::<Action>::new(); header.placement.num_ranks() as usize];
    // What each micro-batch does next, and weight gradients that may wait.
    let mut ready: Vec<Action> =
        (0..header.num_units()).map(|unit| Action::forward(header.stages_of(unit).start, unit)).collect();
    while !ready.is_empty() {
        let action = ready.swap_remove(random(ready.len()));
        let program = &mut programs[header.placement.rank_of(action.stage) as usize];
        program.push(action);
        ready.extend(following(&header, action, split));
    }
    if joins {
        programs.iter_mut().map(Vec::as_mut_slice).for_each(join);
    }
    Schedule::new(header, programs).unwrap()
}

fn following(header: &Header, action: Action, split: bool) -> Vec<Action> {
    let Action { kind, stage, microbatch, .. } = action;
    let backward =
        |stage| Action::new(if split { ActionKind::InputGrad } else { ActionKind::Backward }, stage, microbatch);
    match kind {
        ActionKind::Forward => {
            vec![header.placement.next(stage).map_or(backward(stage), |next| Action::forward(next, microbatch))]
        }
        ActionKind::InputGrad => header
            .placement
            .previous(stage)
            .map(backward)
            .into_iter()
            .chain([Action::weight_grad(stage, microbatch)])
            .collect(),
        ActionKind::Backward => header.placement.previous(stage).map(backward).into_iter().collect(),
        _ => vec![],
    }
}

/// Joins a weight gradient with the action before it: that never closes a cycle.
fn join(program: &mut [Action]) {
    for position in 1..program.len() {
        let joined = program[position].kind == ActionKind::WeightGrad && position % 3 == 0;
        program[position - 1].with_next = joined;
    }
}
