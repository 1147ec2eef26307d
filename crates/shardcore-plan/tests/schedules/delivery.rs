//! Communication models: against a graph of what must come before what, the laws between them, and known deadlocks.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use shardcore_plan::PlanError;
use shardcore_plan::schedule::check::{self, Delivery, FaultKind};
use shardcore_plan::schedule::{Action, ActionKind, Lowering, Schedule, ScheduleName};

use crate::given::program;
use crate::timed::{self, built, count};

/// Every send behind its computation, every receive directly before its own: the slot of a micro-batch is its number.
fn just_in_time(schedule: &Schedule) -> Schedule {
    just_in_time_with(schedule, &[], &mut |_| 0)
}

/// The same with sums over groups of stages that share weights, each anywhere behind the gradients that it needs.
fn just_in_time_with(schedule: &Schedule, tied: &[Vec<u32>], random: &mut impl FnMut(usize) -> usize) -> Schedule {
    let placement = schedule.placement();
    let message = |kind, action: Action| {
        let message = Action::new(kind, action.stage, action.microbatch);
        let partner = placement.partner(message);
        partner.filter(|partner| placement.rank_of(partner.stage) != placement.rank_of(action.stage)).map(|_| message)
    };
    let receive = |action: Action| {
        let kind = match action.kind {
            ActionKind::Forward => ActionKind::RecvForward,
            ActionKind::Backward | ActionKind::InputGrad => ActionKind::RecvBackward,
            _ => return None,
        };
        message(kind, action).map(|receive| receive.in_slot(slot_of(action)))
    };
    let send = |action: Action| match action.kind {
        ActionKind::Forward => message(ActionKind::SendForward, action),
        ActionKind::Backward | ActionKind::InputGrad => message(ActionKind::SendBackward, action),
        _ => None,
    };
    let computes = |action: Action| receive(action).map_or(action, |receive| action.in_slot(receive.slot));
    let lower = |program: &Vec<Action>| {
        let composites = program.chunk_by(|action, _| action.with_next);
        let parts = composites.flat_map(|parts| {
            let parts = || parts.iter().copied();
            parts().filter_map(receive).chain(parts().map(computes)).chain(parts().filter_map(send))
        });
        parts.collect()
    };
    let mut programs: Vec<Vec<Action>> = schedule.programs().iter().map(lower).collect();
    let lowering = Lowering { tied: tied.to_vec(), ..Lowering::default() };
    let groups = lowering.all_tied(placement);
    for &stage in groups.iter().flatten() {
        let shares = |action: &Action| {
            groups.iter().any(|group| group.contains(&stage) && group.contains(&action.stage))
                && matches!(action.kind, ActionKind::Backward | ActionKind::WeightGrad)
        };
        let program = &mut programs[placement.rank_of(stage) as usize];
        let first = program.iter().rposition(shares).map_or(0, |last| last + 1);
        let places: Vec<usize> = (first..=program.len()).filter(|&to| to == 0 || !program[to - 1].with_next).collect();
        let to = places[places.len() - 1 - random(places.len())];
        program.insert(to, Action::new(ActionKind::TiedReduce, stage, 0));
    }
    Schedule::new_lowered(schedule.header().clone(), programs, lowering).unwrap()
}

fn slot_of(action: Action) -> u16 {
    u16::try_from(action.microbatch).unwrap()
}

/// Moves sends later and receives earlier or later, as far as the order on their rank allows.
fn shuffled(schedule: &Schedule, moves: &[(Index, Index, Index)]) -> Schedule {
    let mut programs = schedule.programs().to_vec();
    for (rank, from, to) in moves {
        let rank = rank.index(programs.len());
        let program = &mut programs[rank];
        if program.is_empty() {
            continue;
        }
        let from = from.index(program.len());
        let to = (from + to.index(9)).saturating_sub(4).min(program.len() - 1);
        if program[from].kind.is_send() || program[from].kind.is_recv() {
            let action = program.remove(from);
            program.insert(to, action);
            let lowering = schedule.lowering().unwrap().clone();
            let changed = Schedule::new_lowered(schedule.header().clone(), programs.clone(), lowering);
            if !changed.is_ok_and(|changed| check::structure(&changed).is_ok()) {
                let action = programs[rank].remove(to);
                programs[rank].insert(from, action);
            }
        }
    }
    Schedule::new_lowered(schedule.header().clone(), programs, schedule.lowering().unwrap().clone()).unwrap()
}

/// The events of a run and what each of them must wait for: a run ends if and only if no events wait in a circle.
/// Events are the actions as they are posted, then the messages as they pass and the sums as all ranks have joined them.
struct Events {
    needs: Vec<Vec<usize>>,
    messages: BTreeMap<(bool, u32, u32), usize>,
    groups: Vec<Vec<u32>>,
    sums: BTreeMap<usize, usize>,
}

impl Events {
    fn of(schedule: &Schedule, delivery: Delivery) -> Self {
        let posts: usize = schedule.programs().iter().map(Vec::len).sum();
        let groups = schedule.lowering().unwrap().all_tied(schedule.placement());
        let mut events =
            Self { needs: vec![Vec::new(); posts], messages: BTreeMap::new(), groups, sums: BTreeMap::new() };
        let mut first = 0;
        for program in schedule.programs() {
            events.add_rank(schedule, delivery, program, first);
            first += program.len();
        }
        events
    }

    /// The message that a send or a receive passes, or that a computation takes; by its receiver.
    fn message(&mut self, schedule: &Schedule, action: Action) -> Option<usize> {
        let placement = schedule.placement();
        let Action { kind, stage, microbatch, .. } = action;
        let (is_forward, to, from) = match kind {
            ActionKind::Forward | ActionKind::RecvForward => (true, Some(stage), placement.previous(stage)),
            ActionKind::SendForward => (true, placement.next(stage), Some(stage)),
            ActionKind::Backward | ActionKind::InputGrad | ActionKind::RecvBackward => {
                (false, Some(stage), placement.next(stage))
            }
            ActionKind::SendBackward => (false, placement.previous(stage), Some(stage)),
            _ => return None,
        };
        let (to, from) = (to?, from?);
        let next = self.needs.len();
        (placement.rank_of(to) != placement.rank_of(from)).then(|| {
            let event = *self.messages.entry((is_forward, to, microbatch)).or_insert(next);
            if event == next {
                self.needs.push(Vec::new());
            }
            event
        })
    }

    /// The sum that a stage joins when it has joined so many, once all its stages of the rank have joined it.
    fn join(
        &mut self,
        schedule: &Schedule,
        stage: u32,
        post: usize,
        joined: &mut BTreeMap<u32, usize>,
    ) -> Option<usize> {
        let turn = joined.entry(stage).or_insert(0);
        *turn += 1;
        let mut groups = (0..self.groups.len()).filter(|&group| self.groups[group].contains(&stage));
        let group = groups.nth(*turn - 1).unwrap();
        let next = self.needs.len();
        let sum = *self.sums.entry(group).or_insert(next);
        if sum == next {
            self.needs.push(Vec::new());
        }
        self.needs[sum].push(post);
        let rank = schedule.placement().rank_of(stage);
        let mut here = self.groups[group].iter().filter(|&&other| schedule.placement().rank_of(other) == rank);
        let has_joined = |&other: &u32| {
            let turn = (0..=group).filter(|&earlier| self.groups[earlier].contains(&other)).count();
            joined.get(&other).is_some_and(|&joined| joined >= turn)
        };
        here.all(has_joined).then_some(sum)
    }

    fn add_rank(&mut self, schedule: &Schedule, delivery: Delivery, program: &[Action], first: usize) {
        let mut lanes: BTreeMap<(u32, bool), Vec<usize>> = BTreeMap::new();
        let (mut held_by, mut batch, mut joined, mut sum) = (None, Vec::new(), BTreeMap::new(), None);
        for (position, &action) in program.iter().enumerate() {
            let post = first + position;
            if position > 0 {
                self.needs[post].push(post - 1);
            }
            self.needs[post].extend(held_by.take());
            self.needs[post].extend(sum.take());
            if action.kind == ActionKind::TiedReduce {
                self.needs[post].append(&mut batch);
                sum = self.join(schedule, action.stage, post, &mut joined);
                continue;
            }
            let message = self.message(schedule, action);
            let (true, Some(message)) = (action.kind.is_send() || action.kind.is_recv(), message) else {
                self.needs[post].extend(message);
                self.needs[post].append(&mut batch);
                continue;
            };
            if delivery != Delivery::Buffered || action.kind.is_send() {
                self.needs[message].push(post);
            }
            let partner = schedule.placement().partner(action).unwrap();
            let lane = lanes.entry(match delivery {
                Delivery::OneFifo | Delivery::Blocking => (0, true),
                Delivery::PairFifo => (schedule.placement().rank_of(partner.stage), true),
                _ => (schedule.placement().rank_of(partner.stage), action.kind.is_send()),
            });
            let lane = lane.or_default();
            if delivery != Delivery::Buffered {
                self.needs[message].extend(lane.last());
            }
            lane.push(message);
            match delivery {
                Delivery::Blocking => held_by = Some(message),
                Delivery::Batched => batch.push(message),
                Delivery::Capacity(most) if action.kind.is_send() => {
                    held_by = lane.len().checked_sub(1 + most as usize).map(|at| lane[at]);
                }
                _ => {}
            }
        }
    }

    /// Whether all events come about.
    fn end(&self) -> bool {
        let mut missing: Vec<usize> = self.needs.iter().map(Vec::len).collect();
        let mut followers = vec![Vec::new(); self.needs.len()];
        for (event, needs) in self.needs.iter().enumerate() {
            for &need in needs {
                followers[need].push(event);
            }
        }
        let mut open: Vec<usize> = (0..missing.len()).filter(|&event| missing[event] == 0).collect();
        let mut passed = 0;
        while let Some(event) = open.pop() {
            passed += 1;
            for &follower in &followers[event] {
                missing[follower] -= 1;
                if missing[follower] == 0 {
                    open.push(follower);
                }
            }
        }
        passed == self.needs.len()
    }
}

/// Every model, and for each the weaker models that it implies.
const LAWS: [(Delivery, &[Delivery]); 9] = [
    (Delivery::Buffered, &[]),
    (Delivery::Directed, &[Delivery::Buffered]),
    (Delivery::PairFifo, &[Delivery::Directed]),
    (Delivery::OneFifo, &[Delivery::PairFifo]),
    (Delivery::Capacity(2), &[Delivery::Directed]),
    (Delivery::Capacity(1), &[Delivery::Capacity(2)]),
    (Delivery::Capacity(0), &[Delivery::Capacity(1)]),
    (Delivery::Batched, &[Delivery::Directed]),
    (Delivery::Blocking, &[Delivery::OneFifo, Delivery::Batched, Delivery::Capacity(0)]),
];

fn moves() -> impl Strategy<Value = Vec<(Index, Index, Index)>> {
    prop::collection::vec(any::<(Index, Index, Index)>(), 0..12)
}

/// Pairs of stages that share weights, and where their sums stand.
fn ties() -> impl Strategy<Value = (Vec<(Index, Index)>, Vec<Index>)> {
    (prop::collection::vec(any::<(Index, Index)>(), 0..4), prop::collection::vec(any::<Index>(), 64))
}

fn pairs(schedule: &Schedule, ties: &[(Index, Index)]) -> Vec<Vec<u32>> {
    let stage = |index: &Index| u32::try_from(index.index(schedule.num_stages() as usize)).unwrap();
    let pairs = ties.iter().map(|(one, other)| vec![stage(one), stage(other)]);
    pairs.filter(|pair| pair[0] != pair[1]).collect()
}

fn has_sums(schedule: &Schedule) -> bool {
    schedule.programs().iter().flatten().any(|action| action.kind == ActionKind::TiedReduce)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(count(300, 3_000)) })]

    #[test]
    fn the_checker_agrees_with_the_graph_of_events(
        schedule in program(),
        moves in moves(),
        (ties, places) in ties(),
        lowered in any::<bool>(),
    ) {
        let tied = pairs(&schedule, &ties);
        let mut places = places.iter().cycle();
        let schedule = if lowered {
            timed::lowered(&schedule, &Lowering { tied, ..Lowering::default() })
        } else {
            let schedule = just_in_time_with(&schedule, &tied, &mut |below| places.next().unwrap().index(below));
            shuffled(&schedule, &moves)
        };
        let runs: BTreeMap<Delivery, bool> =
            LAWS.map(|(model, _)| (model, check::communication(&schedule, model).is_ok())).into();
        for (model, weaker) in LAWS {
            prop_assert_eq!(runs[&model], Events::of(&schedule, model).end(), "{:?} of {:?}", model, schedule.programs());
            prop_assert!(!runs[&model] || weaker.iter().all(|weaker| runs[weaker]), "{:?} and {:?}", model, runs);
        }
        prop_assert!(has_sums(&schedule) || runs[&Delivery::OneFifo] == runs[&Delivery::Blocking]);
        prop_assert!(!lowered || runs[&Delivery::Blocking]);
    }

    #[test]
    fn a_witness_shows_its_fault(schedule in program(), moves in moves(), (ties, places) in ties()) {
        let (tied, mut places) = (pairs(&schedule, &ties), places.iter().cycle());
        let schedule = just_in_time_with(&schedule, &tied, &mut |below| places.next().unwrap().index(below));
        let schedule = shuffled(&schedule, &moves);
        for (model, _) in LAWS {
            let Err(PlanError::InvalidSchedule(fault)) = check::communication(&schedule, model) else { continue };
            prop_assert!(fault.kind == FaultKind::Deadlock || fault.kind == FaultKind::Mismatch, "{}", fault);
            prop_assert!(fault.witness.len() >= 2, "{}", fault);
            for place in &fault.witness {
                prop_assert_eq!(schedule.program(place.rank).unwrap()[place.position], place.action);
            }
        }
    }
}

/// The first rank sends all its forwards at once while the second takes one and sends a backward in turn.
fn flood(microbatches: u32) -> Schedule {
    let first = built(ScheduleName::Gpipe, 2, microbatches, None);
    let second = built(ScheduleName::OneForwardOneBackward, 2, microbatches, None);
    let programs = vec![first.programs()[0].clone(), second.programs()[1].clone()];
    just_in_time(&Schedule::new(first.header().clone(), programs).unwrap())
}

/// Each step from a weaker model to a stricter one refuses some program: the laws are not empty. Only one queue per rank
/// and blocking agree where no sums join the ranks: whatever a rank computes behind a message reaches others by messages
/// that the queue holds back.
#[test]
fn every_model_is_stricter_than_those_it_implies() {
    let mut runner = TestRunner::deterministic();
    let mut random = || {
        let (schedule, moves) = (program(), moves()).new_tree(&mut runner).unwrap().current();
        shuffled(&just_in_time(&schedule), &moves)
    };
    let schedules: Vec<Schedule> = (0..300).map(|_| random()).chain((1..10).map(flood)).collect();
    let mut apart = BTreeMap::new();
    for schedule in schedules.into_iter().filter(|schedule| !has_sums(schedule)) {
        let runs = LAWS.map(|(model, _)| check::communication(&schedule, model).is_ok());
        let runs_under = |model: Delivery| runs[LAWS.iter().position(|(other, _)| *other == model).unwrap()];
        for ((model, weaker), runs) in LAWS.into_iter().zip(runs) {
            for &weaker in weaker {
                *apart.entry((weaker, model)).or_insert(0) += u32::from(runs_under(weaker) && !runs);
            }
        }
    }
    assert_eq!(apart.remove(&(Delivery::OneFifo, Delivery::Blocking)), Some(0));
    assert!(apart.values().all(|&count| count > 0), "{apart:?}");
}

#[test]
fn models_judge_1f1b_and_gpipe_with_receives_just_in_time() {
    let one_f_one_b = just_in_time(&built(ScheduleName::OneForwardOneBackward, 2, 4, None));
    let fits = |schedule: &Schedule| LAWS.map(|(model, _)| check::communication(schedule, model).is_ok());
    // Buffered, directed, pair-fifo, one-fifo, capacity 2, 1 and 0, batched, blocking.
    assert_eq!(fits(&one_f_one_b), [true, true, false, false, true, true, false, true, false]);
    let gpipe = just_in_time(&built(ScheduleName::Gpipe, 3, 4, None));
    assert_eq!(fits(&gpipe), [true; 9]);
}

/// A receive-deferral pass deadlocks under pair-FIFO rendezvous: both heads of the pair are sends.
#[test]
fn receives_deferred_in_1f1b_deadlock_in_pairs() {
    let schedule = just_in_time(&built(ScheduleName::OneForwardOneBackward, 2, 4, None));
    check::communication(&schedule, Delivery::Directed).unwrap();
    let error = check::communication(&schedule, Delivery::PairFifo).unwrap_err();
    let PlanError::InvalidSchedule(fault) = error else { panic!("{error}") };
    assert_eq!(fault.kind, FaultKind::Deadlock);
    let names: Vec<String> = fault.witness.iter().map(|place| place.action.to_string()).collect();
    assert_eq!(names, ["0SEND_F1", "1RECV_F1@1", "1SEND_B0", "0RECV_B0"]);
    let lowered = built(ScheduleName::OneForwardOneBackward, 2, 4, None).lower(&Lowering::default()).unwrap();
    check::communication(&lowered, Delivery::Blocking).unwrap();
}

#[test]
fn a_schedule_without_communication_is_not_checked_for_it() {
    let schedule = built(ScheduleName::Gpipe, 2, 2, None);
    let error = check::communication(&schedule, Delivery::PairFifo).unwrap_err();
    assert_eq!(error, PlanError::NotLowered { name: "gpipe".to_owned() });
}
