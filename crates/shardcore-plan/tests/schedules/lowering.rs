//! Laws of lowering: the lowered programs run where every message blocks, slots hold what is read from them, and the
//! sharding's actions stand where they must.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use shardcore_plan::schedule::check;
use shardcore_plan::schedule::generate::evaluation::evaluation;
use shardcore_plan::schedule::{
    Action, ActionKind, CommModel, Gating, Header, Lowering, OptimizerStep, Placement, ReduceTiming, Schedule,
    ScheduleName,
};

use crate::given::{cases, named, placement, program};
use crate::named::made;
use crate::reference::peak;
use crate::timed;

use ActionKind::{
    Backward, Forward, InputGrad, Optimizer, RecvBackward, RecvForward, Reduce, Reshard, TiedReduce, Unshard,
    WeightGrad,
};

fn lowering() -> impl Strategy<Value = Lowering> {
    let reduce = prop::sample::select(ReduceTiming::ALL.to_vec());
    let optimizer = prop::sample::select(OptimizerStep::ALL.to_vec());
    (prop::option::of(0_u8..4), reduce, optimizer, prop::option::of(1_u32..4), 1_u32..4, any::<bool>()).prop_map(
        |(zero_stage, reduce, optimizer, receives_ahead, max_unsharded, tie)| Lowering {
            zero_stage,
            reduce: if matches!(zero_stage, Some(2 | 3)) { reduce } else { ReduceTiming::Once },
            optimizer,
            tied: if tie { vec![vec![0, u32::MAX]] } else { vec![] },
            receives_ahead,
            max_unsharded,
        },
    )
}

/// Ties the first and the last stage of a model, where the options ask for a tie and there are two stages.
fn fitted(lowering: &Lowering, placement: &Placement) -> Lowering {
    let last = placement.chain_length() - 1;
    let tied = if lowering.tied.is_empty() || last == 0 { vec![] } else { vec![vec![0, last]] };
    Lowering { tied, ..lowering.clone() }
}

/// Runs lowered programs where every send and receive waits for its partner. What computes needs its input delivered.
fn run_blocking(schedule: &Schedule) -> Result<(), String> {
    let placement = schedule.placement();
    let mut heads = vec![0_usize; schedule.programs().len()];
    let mut delivered = BTreeSet::new();
    let mut made = BTreeSet::new();
    loop {
        let mut progress = false;
        for rank in 0..schedule.num_ranks() {
            let program = schedule.program(rank).unwrap();
            while let Some(&action) = program.get(heads[rank as usize]) {
                if let Some(partner) = placement.partner(action) {
                    let peer = placement.rank_of(partner.stage) as usize;
                    let other = schedule.programs()[peer].get(heads[peer]);
                    let meet = |other: &Action| {
                        (other.kind, other.stage, other.microbatch) == (partner.kind, partner.stage, partner.microbatch)
                    };
                    if !other.is_some_and(meet) {
                        break;
                    }
                    let (send, recv) = if action.kind.is_send() { (action, partner) } else { (partner, action) };
                    if !made.contains(&(send.kind == ActionKind::SendForward, send.stage, send.microbatch)) {
                        return Err(format!("{send} before it is computed"));
                    }
                    delivered.insert((recv.kind == RecvForward, recv.stage, recv.microbatch));
                    heads[peer] += 1;
                } else {
                    compute(placement, action, &delivered, &mut made)?;
                }
                heads[rank as usize] += 1;
                progress = true;
            }
        }
        if !progress {
            break;
        }
    }
    let stuck = |(head, program): (usize, &Vec<Action>)| program.get(head).map(Action::to_string);
    let stuck: Vec<_> = heads.into_iter().zip(schedule.programs()).filter_map(stuck).collect();
    if stuck.is_empty() { Ok(()) } else { Err(format!("stuck at {stuck:?}")) }
}

/// Outputs by (is forward, stage, micro-batch).
type Outputs = BTreeSet<(bool, u32, u32)>;

fn compute(placement: &Placement, action: Action, delivered: &Outputs, made: &mut Outputs) -> Result<(), String> {
    let Action { kind, stage, microbatch, .. } = action;
    let (forward, source) = match kind {
        Forward => (true, placement.previous(stage)),
        Backward | InputGrad => (false, placement.next(stage)),
        _ => return Ok(()),
    };
    let here = placement.rank_of(stage);
    let there = |&source: &u32| {
        if placement.rank_of(source) == here {
            made.contains(&(forward, source, microbatch))
        } else {
            delivered.contains(&(forward, stage, microbatch))
        }
    };
    if source.as_ref().is_some_and(|source| !there(source)) {
        return Err(format!("{action} without its input"));
    }
    made.insert((forward, stage, microbatch));
    Ok(())
}

/// Follows the slots of a rank; gives the most slots of one stage and direction.
fn check_slots(program: &[Action], forward_only: bool) -> Result<usize, String> {
    let mut held: BTreeMap<(u32, bool, u16), u32> = BTreeMap::new();
    let mut received = BTreeSet::new();
    let mut most = 0;
    for &action in program {
        let Action { kind, stage, microbatch, slot, .. } = action;
        match kind {
            RecvForward | RecvBackward => {
                let forward = kind == RecvForward;
                if let Some(other) = held.insert((stage, forward, slot), microbatch) {
                    return Err(format!("{action} overwrites micro-batch {other}"));
                }
                received.insert((forward, stage, microbatch));
                most = most.max(usize::from(slot) + 1);
            }
            Forward | Backward | InputGrad => {
                let forward = kind == Forward;
                let expected = received.contains(&(forward, stage, microbatch)).then_some(microbatch);
                if expected.is_some() && held.get(&(stage, forward, slot)).copied() != expected {
                    return Err(format!("{action} reads another micro-batch"));
                }
            }
            _ => {}
        }
        let last = if forward_only { kind == Forward } else { matches!(kind, Backward | WeightGrad) };
        if last {
            held.retain(|&(of, _, _), &mut held| (of, held) != (stage, microbatch));
        }
    }
    if held.is_empty() { Ok(most) } else { Err(format!("never read: {held:?}")) }
}

/// Parameters are whole where they are used, no more stages at once than allowed, and none at the end.
fn check_gathers(program: &[Action], max_unsharded: usize) -> Result<(), String> {
    let mut whole = BTreeSet::new();
    for (position, &Action { kind, stage, .. }) in program.iter().enumerate() {
        let fine = match kind {
            Unshard => whole.insert(stage),
            Reshard => whole.remove(&stage),
            kind => !kind.is_compute() || whole.contains(&stage),
        };
        if !fine || whole.len() > max_unsharded {
            return Err(format!("position {position} of {program:?}: {whole:?}"));
        }
    }
    if whole.is_empty() { Ok(()) } else { Err(format!("still whole: {whole:?}")) }
}

/// Gradients are reduced, summed and stepped behind what makes them.
fn check_gradients(schedule: &Schedule, rank: u32) -> Result<(), String> {
    let (program, lowering) = (schedule.program(rank).unwrap(), schedule.lowering().unwrap());
    let tied = lowering.all_tied(schedule.placement());
    let makes = |action: &Action| matches!(action.kind, Backward | WeightGrad);
    let end = program.iter().rposition(|action| action.kind <= RecvBackward).unwrap_or(0);
    for &stage in schedule.placement().stages_of(rank) {
        let at = |kind| -> Vec<usize> {
            let here = |(position, action): (usize, &Action)| {
                (action.kind == kind && action.stage == stage).then_some(position)
            };
            program.iter().enumerate().filter_map(here).collect()
        };
        let last = program.iter().rposition(|action| makes(action) && action.stage == stage);
        let (reduces, sums, steps) = (at(Reduce), at(TiedReduce), at(Optimizer));
        let num_ties = tied.iter().filter(|group| group.contains(&stage)).count();
        let per_microbatch = lowering.reduce == ReduceTiming::PerMicrobatch;
        let num_reduces = match (lowering.zero_stage, per_microbatch) {
            (None, _) => 0,
            (_, false) => 1,
            (_, true) => program.iter().filter(|action| makes(action) && action.stage == stage).count(),
        };
        let num_steps = usize::from(lowering.optimizer != OptimizerStep::Absent);
        if [reduces.len(), sums.len(), steps.len()] != [num_reduces, num_ties, num_steps] {
            return Err(format!("stage {stage}: {reduces:?} {sums:?} {steps:?}"));
        }
        let ordered = [
            sums.iter().all(|&sum| sum > end && Some(sum) > last),
            reduces.last().is_none_or(|&reduce| Some(reduce) > last),
            per_microbatch || reduces.iter().all(|&reduce| sums.iter().all(|&sum| sum < reduce)),
            steps.iter().all(|&step| reduces.iter().chain(&sums).all(|&other| other < step) && Some(step) > last),
            lowering.optimizer != OptimizerStep::Barrier || steps.iter().all(|&step| step > end),
        ];
        if ordered.contains(&false) {
            return Err(format!("stage {stage}: {ordered:?} in {program:?}"));
        }
    }
    Ok(())
}

/// The most receives of one stage and direction that are posted and not used.
fn most_ahead(program: &[Action]) -> usize {
    let mut ahead: BTreeMap<(u32, bool), usize> = BTreeMap::new();
    let mut most = 0;
    for &Action { kind, stage, .. } in program {
        match kind {
            RecvForward | RecvBackward => {
                let ahead = ahead.entry((stage, kind == RecvForward)).or_default();
                *ahead += 1;
                most = most.max(*ahead);
            }
            Forward | Backward | InputGrad => {
                // The first and the last stage take nothing from others.
                if let Some(ahead) = ahead.get_mut(&(stage, kind == Forward)) {
                    *ahead -= 1;
                }
            }
            _ => {}
        }
    }
    most
}

/// The most stages of one composite, which are gathered together at `ZeRO` stage 3.
fn widest(compute: &Schedule, lowering: &Lowering) -> u32 {
    let composites = compute.programs().iter().flat_map(|program| program.chunk_by(|action, _| action.with_next));
    let distinct = |composite: &[Action]| composite.iter().map(|action| action.stage).collect::<BTreeSet<u32>>().len();
    let widest = composites.map(distinct).max().filter(|_| lowering.zero_stage == Some(3)).unwrap_or(1);
    u32::try_from(widest).unwrap()
}

/// All laws of one lowered schedule.
fn check_lowered(compute: &Schedule, lowering: &Lowering) -> Result<(), TestCaseError> {
    let lowered = timed::lowered(compute, &fitted(lowering, compute.placement()));
    let receives_ahead = lowered.lowering().unwrap().receives_ahead.unwrap() as usize;
    let max_unsharded = lowered.lowering().unwrap().max_unsharded;
    prop_assert_eq!(max_unsharded, lowering.max_unsharded.max(widest(compute, lowering)));
    prop_assert_eq!(lowered.header().comm, CommModel::Blocking);
    run_blocking(&lowered).map_err(TestCaseError::fail)?;
    let passes = |schedule: &Schedule| check::check(schedule).map_err(|fault| TestCaseError::fail(fault.to_string()));
    passes(&lowered)?;
    passes(&lowered.clone().with_inferred_lowering())?;
    for (rank, program) in (0..).zip(lowered.programs()) {
        let apart = compute.header().gating == Gating::Own;
        let plain = |action: &Action| Action { with_next: action.with_next && !apart, ..action.in_slot(0) };
        let computes = |program: &[Action]| -> Vec<Action> {
            program.iter().filter(|action| action.kind.is_compute()).map(plain).collect()
        };
        prop_assert_eq!(computes(program), computes(compute.program(rank).unwrap()));
        prop_assert!(most_ahead(program) <= receives_ahead, "{} > {receives_ahead}", most_ahead(program));
        let forward_only = compute.is_forward_only();
        check_slots(program, forward_only).map_err(TestCaseError::fail)?;
        if lowering.zero_stage == Some(3) {
            check_gathers(program, max_unsharded as usize).map_err(TestCaseError::fail)?;
        }
        if !forward_only {
            check_gradients(&lowered, rank).map_err(TestCaseError::fail)?;
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(cases(100))]

    #[test]
    fn evaluation_lowers(placement in placement(), m in 1_u32..20, lowering in lowering()) {
        check_lowered(&evaluation(placement, m).unwrap(), &lowering)?;
    }

    #[test]
    fn any_program_that_can_run_lowers(schedule in program(), lowering in lowering()) {
        check_lowered(&schedule, &lowering)?;
    }

    /// Parts that wait each for its own input: what one makes may be what the next waits for, by way of another rank.
    #[test]
    fn composites_of_own_gating_lower(schedule in program(), lowering in lowering()) {
        let join = |program: &Vec<Action>| -> Vec<Action> {
            let last = program.len() - 1;
            (0..).zip(program).map(|(at, &action)| Action { with_next: at < last && at % 3 != 2, ..action }).collect()
        };
        let programs = schedule.programs().iter().map(join).collect();
        let header = Header { gating: Gating::Own, ..schedule.header().clone() };
        check_lowered(&Schedule::new(header, programs).unwrap(), &lowering)?;
    }

    #[test]
    fn evaluation_needs_few_slots(placement in placement(), m in 1_u32..40) {
        let schedule = evaluation(placement, m).unwrap().lower(&Lowering::default()).unwrap();
        for program in schedule.programs() {
            let slots = check_slots(program, true).map_err(TestCaseError::fail)?;
            prop_assert!(slots <= 2, "{slots}");
        }
    }
}

// Fewer cases: some named schedules are found by search.
proptest! {
    #![proptest_config(cases(24))]

    #[test]
    fn named_schedules_lower(schedule in named(), lowering in lowering()) {
        check_lowered(&schedule, &lowering)?;
    }

    /// As many slots more than what lives at once as there are receives ahead, mostly two, for transfers that overlap
    /// computations.
    #[test]
    fn slots_follow_what_is_alive(schedule in named()) {
        let schedule = timed::lowered(&schedule, &Lowering::default());
        let ahead = schedule.lowering().unwrap().receives_ahead.unwrap() as usize;
        for program in schedule.programs() {
            let slots = check_slots(program, false).map_err(TestCaseError::fail)?;
            let alive = peak(program).unwrap();
            prop_assert!(slots <= alive + ahead, "{slots} slots for {alive} alive");
        }
    }
}

fn texts(schedule: &Schedule) -> Vec<String> {
    schedule
        .programs()
        .iter()
        .map(|program| program.iter().map(Action::to_string).collect::<Vec<_>>().join(" "))
        .collect()
}

/// A receive that is posted behind a send on the same pair deadlocks where each pair has one first-in-first-out queue:
/// rank 1 posts its second receive before it sends.
#[test]
fn receives_stand_before_the_sends_that_would_block_them() {
    let schedule = made(ScheduleName::OneForwardOneBackward, 2, 4, 1).lower(&Lowering::default()).unwrap();
    let expected = [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1@1 0B0 0F2 0SEND_F2 0B1@1 0F3 0SEND_F3 0RECV_B2@1 0RECV_B3 0B2@1 \
         0B3",
        "1RECV_F0 1RECV_F1@1 1F0 1B0 1SEND_B0 1F1@1 1B1 1SEND_B1 1RECV_F2@1 1RECV_F3 1F2@1 1B2 1SEND_B2 1F3 1B3 \
         1SEND_B3",
    ];
    assert_eq!(texts(&schedule), expected);
}

#[test]
fn neighbours_on_one_rank_exchange_nothing() {
    let schedule = evaluation(Placement::v_shape(1).unwrap(), 1).unwrap().lower(&Lowering::default()).unwrap();
    assert_eq!(texts(&schedule), ["0F0 1F0"]);
}

#[test]
fn what_can_never_run_is_refused() {
    let header = |p| Header::new("mine", Placement::looped(p, 1).unwrap(), 2);
    let refused = |programs: Vec<Vec<Action>>| {
        let p = u32::try_from(programs.len()).unwrap();
        Schedule::new(header(p), programs).unwrap().lower(&Lowering::default()).unwrap_err().to_string()
    };
    let (f, b) = (Action::forward, Action::backward);
    let texts = [
        refused(vec![vec![f(0, 0), f(0, 0)]]),
        refused(vec![vec![b(0, 0)]]),
        refused(vec![vec![f(1, 0)], vec![]]),
        refused(vec![vec![f(0, 0), Action::input_grad(0, 0), Action::weight_grad(0, 0), Action::weight_grad(0, 0)]]),
        refused(vec![vec![f(0, 0), Action::weight_grad(0, 0)]]),
        refused(vec![vec![f(0, 0), b(0, 0), f(0, 1)], vec![f(1, 0), f(1, 1), b(1, 0)]]),
    ];
    let expected = [
        "rank 0, position 1, 0F0: it has run before",
        "rank 0, position 0, 0B0: its forward has not run",
        "rank 0, position 0, 1F0: stage 1 is on rank 1",
        "rank 0, position 3, 0W0: it has run before",
        "rank 0, position 1, 0W0: its input gradient has not run",
        "rank 0, position 1, 0B0: it waits for stage 1 of rank 1, which itself waits at 1F1",
    ];
    assert_eq!(texts, expected);
}

/// A rank's actions from its last computation or message on.
fn tail(program: &[Action]) -> String {
    let end = program.iter().rposition(|action| action.kind <= RecvBackward).unwrap();
    program[end..].iter().map(Action::to_string).collect::<Vec<_>>().join(" ")
}

/// Fault E9: the sum over tied weights was skipped, or done before the last micro-batch.
#[test]
fn e9_tied_gradients_are_summed_once_after_the_last_micro_batch() {
    let lowering = Lowering {
        zero_stage: Some(1),
        optimizer: OptimizerStep::Barrier,
        tied: vec![vec![0, 2], vec![0, 1, 2]],
        ..Lowering::default()
    };
    let schedule = made(ScheduleName::ZbH1, 3, 3, 1).lower(&lowering).unwrap();
    let tails: Vec<String> = schedule.programs().iter().map(|program| tail(program)).collect();
    let expected = [
        "0W2 0TIED_REDUCE 0TIED_REDUCE 0REDUCE 0OPTIM",
        "1W2 1TIED_REDUCE 1REDUCE 1OPTIM",
        "2W2 2TIED_REDUCE 2TIED_REDUCE 2REDUCE 2OPTIM",
    ];
    assert_eq!(tails, expected);
}

/// Fault E15: `ZeRO` stages 2 and 3 under a pipeline gave wrong gradients, or never reduced.
#[test]
fn e15_every_micro_batch_is_reduced_at_every_zero_stage() {
    let orders = |zero_stage, reduce| {
        let lowering = Lowering { zero_stage: Some(zero_stage), reduce, ..Lowering::default() };
        let schedule = made(ScheduleName::OneForwardOneBackward, 1, 2, 1).lower(&lowering);
        schedule.map(|schedule| texts(&schedule).remove(0)).map_err(|error| error.to_string())
    };
    for zero_stage in 0..3 {
        assert_eq!(orders(zero_stage, ReduceTiming::Once).unwrap(), "0F0 0B0 0F1 0B1 0REDUCE");
    }
    assert_eq!(orders(3, ReduceTiming::Once).unwrap(), "0UNSHARD 0F0 0B0 0F1 0B1 0RESHARD 0REDUCE");
    assert_eq!(orders(2, ReduceTiming::PerMicrobatch).unwrap(), "0F0 0B0 0REDUCE 0F1 0B1 0REDUCE");
    let refused = orders(1, ReduceTiming::PerMicrobatch).unwrap_err();
    assert!(refused.contains("per micro-batch at ZeRO stages 2 and 3 only"), "{refused}");
}

#[test]
fn post_validation_steps_each_stage_behind_its_reduction() {
    let optimizer = OptimizerStep::PostValidation;
    let lowering = Lowering { zero_stage: Some(2), optimizer, ..Lowering::default() };
    let schedule = made(ScheduleName::LoopedBfs, 1, 1, 2).lower(&lowering).unwrap();
    assert_eq!(texts(&schedule), ["0F0 1F0 1B0 1REDUCE 1OPTIM 0B0 0REDUCE 0OPTIM"]);
    let schedule = made(ScheduleName::LoopedBfs, 1, 1, 2);
    let barrier = Lowering { optimizer: OptimizerStep::Barrier, ..lowering };
    assert_eq!(texts(&schedule.lower(&barrier).unwrap()), ["0F0 1F0 1B0 1REDUCE 0B0 0REDUCE 0OPTIM 1OPTIM"]);
}

#[test]
fn a_stage_is_gathered_behind_the_computation_before_it() {
    let schedule = made(ScheduleName::LoopedBfs, 1, 1, 3);
    let order = |max_unsharded| {
        let lowering = Lowering { zero_stage: Some(3), max_unsharded, ..Lowering::default() };
        let text = texts(&schedule.lower(&lowering).unwrap()).remove(0);
        text.replace("UNSHARD", "+").replace("RESHARD", "-").replace("REDUCE", "R")
    };
    assert_eq!(order(2), "0+ 1+ 0F0 0- 2+ 1F0 2F0 2B0 2- 2R 0+ 1B0 1- 1R 0B0 0- 0R");
    assert_eq!(order(1), "0+ 0F0 0- 1+ 1F0 1- 2+ 2F0 2B0 2- 2R 1+ 1B0 1- 1R 0+ 0B0 0- 0R");
    assert_eq!(order(u32::MAX), "0+ 1+ 0F0 2+ 1F0 2F0 2B0 2- 2R 1B0 1- 1R 0B0 0- 0R");
}

/// The two copies of each stage of a bidirectional placement sum their gradients.
#[test]
fn both_copies_of_a_model_sum_their_gradients() {
    let placement = Placement::bidirectional(2).unwrap();
    let (f, b) = (Action::forward, Action::backward);
    let programs = vec![vec![f(0, 0), f(3, 1), b(3, 1), b(0, 0)], vec![f(2, 1), f(1, 0), b(1, 0), b(2, 1)]];
    let schedule = Schedule::new(Header::new("mine", placement, 2), programs).unwrap();
    let lowering = Lowering { tied: vec![vec![0, 1]], ..Lowering::default() };
    let lowered = schedule.lower(&lowering).unwrap();
    assert_eq!(lowering.all_tied(schedule.placement()), [vec![0, 1, 2, 3], vec![0, 2], vec![1, 3]]);
    let tails: Vec<String> = lowered.programs().iter().map(|program| tail(program)).collect();
    let expected = [
        "0B0 0TIED_REDUCE 3TIED_REDUCE 0TIED_REDUCE 3TIED_REDUCE",
        "2B1 1TIED_REDUCE 2TIED_REDUCE 2TIED_REDUCE 1TIED_REDUCE",
    ];
    assert_eq!(tails, expected);
}

#[test]
fn options_that_do_not_fit_are_refused() {
    let schedule = made(ScheduleName::Gpipe, 2, 2, 1);
    let refused = |lowering: Lowering| schedule.lower(&lowering).unwrap_err().to_string();
    let lowering = Lowering::default;
    assert!(refused(Lowering { zero_stage: Some(4), ..lowering() }).contains("zero_stage is 4: expected 0, 1, 2 or 3"));
    assert!(refused(Lowering { receives_ahead: Some(0), ..lowering() }).contains("receives_ahead is 0"));
    assert!(refused(Lowering { max_unsharded: 0, ..lowering() }).contains("max_unsharded is 0"));
    for (group, reason) in
        [(vec![0, 2], "stage 2 is out of range"), (vec![0], "two different"), (vec![0, 0], "two different")]
    {
        assert!(refused(Lowering { tied: vec![group], ..lowering() }).contains(reason));
    }
    let lowered = schedule.lower(&lowering()).unwrap();
    assert!(lowered.lower(&lowering()).unwrap_err().to_string().contains("lowered already"));
}

/// A rank that uses its inputs in another order than they are made needs room for those between.
#[test]
fn fewer_receives_ahead_than_a_program_needs_are_refused() {
    let header = Header::new("reversed", Placement::looped(2, 1).unwrap(), 4);
    let forwards = |stage, units: [u32; 4]| units.map(|unit| Action::forward(stage, unit)).to_vec();
    let schedule = Schedule::new(header, vec![forwards(0, [0, 1, 2, 3]), forwards(1, [3, 2, 1, 0])]).unwrap();
    let with = |ahead| schedule.lower(&Lowering { receives_ahead: Some(ahead), ..Lowering::default() });
    let refused = with(2).unwrap_err().to_string();
    assert!(refused.starts_with("receives_ahead is 2, but this program cannot run with fewer than 4"), "{refused}");
    check::check(&with(4).unwrap()).unwrap();
}
