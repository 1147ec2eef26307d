//! The simulator against an executor written apart from it, its links, its composites and its refusals.

#![allow(clippy::float_cmp, reason = "sums of whole numbers and quarters are exact")]

use std::collections::BTreeMap;

use proptest::prelude::*;
use shardcore_plan::PlanError;
use shardcore_plan::schedule::check::{self, FaultKind};
use shardcore_plan::schedule::simulate::{Network, Simulator, simulate, simulate_on};
use shardcore_plan::schedule::{
    Action, Amount, CommModel, CostSpec, Costs, Gating, Header, Lowering, Placement, Schedule, ScheduleName,
};

use crate::given::{program, times};
use crate::reference::{Times, run};
use crate::timed::{any_flat, built, costs_of, count, gated, lowered, simulated, taken_apart};

fn whole(number: i64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let number = number as f64;
    number
}

/// The same times on every stage, whatever the number of stages of its rank.
fn per_stage(schedule: &Schedule, times: Times) -> Costs {
    let [forward, input_grad, weight_grad, hop] =
        [times.forward, times.input_grad, times.weight_grad, times.hop].map(whole);
    let every = |time: f64| Amount::PerStage(vec![time; schedule.num_stages() as usize]);
    let spec = CostSpec {
        forward: every(forward),
        input_grad: every(input_grad),
        weight_grad: every(weight_grad),
        activation: every(1.0),
        ..CostSpec::default().with_hop(hop)
    };
    costs_of(schedule, &spec)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(count(500, 10_000)) })]

    #[test]
    fn the_simulator_agrees_with_the_reference(schedule in program(), times in times()) {
        let schedule = taken_apart(&schedule);
        let expected = run(&schedule, times).unwrap();
        let found = simulate(&schedule, &per_stage(&schedule, times)).unwrap();
        prop_assert_eq!((found.makespan, found.span), (whole(expected.makespan), whole(expected.span)));
        let peaks: Vec<f64> = expected.peak.iter().map(|&peak| whole(i64::try_from(peak).unwrap())).collect();
        prop_assert_eq!(found.peak, peaks);
    }

    /// What lowering adds costs nothing without latency; with latency only rendezvous waits for late receives.
    #[test]
    fn lowered_programs_take_what_their_compute_takes(schedule in program(), times in times(), ahead in 1_u32..4) {
        let lowered = lowered(&schedule, &Lowering { receives_ahead: Some(ahead), ..Lowering::default() });
        let buffered = Header { comm: CommModel::Buffered, ..lowered.header().clone() };
        let buffered =
            Schedule::new_lowered(buffered, lowered.programs().to_vec(), lowered.lowering().unwrap().clone()).unwrap();
        let costs = per_stage(&schedule, times);
        let direct = simulate(&schedule, &costs).unwrap();
        prop_assert_eq!(simulate(&buffered, &costs).unwrap().makespan, direct.makespan);
        let rendezvous = simulate(&lowered, &costs).unwrap();
        prop_assert!(rendezvous.makespan >= direct.makespan);
        prop_assert!(times.hop > 0 || rendezvous.makespan == direct.makespan);
        prop_assert_eq!(&rendezvous.peak, &direct.peak);
        prop_assert_eq!(&rendezvous.busy, &direct.busy);
    }

    /// Lowered at the costs at which it runs, a program hides what the schedule hides, whatever waits for its partner.
    #[test]
    fn receives_are_posted_when_their_messages_leave(
        schedule in program(), times in times(), own in any::<bool>(), ahead in 0_u32..3,
    ) {
        let schedule = gated(&schedule, if own { Gating::Own } else { Gating::All });
        let costs = per_stage(&schedule, times);
        let receives_ahead = Some(schedule.header().num_units() + ahead);
        let lowered = schedule.lower_for(&Lowering { receives_ahead, ..Lowering::default() }, &costs).unwrap();
        let (direct, found) = (simulate(&schedule, &costs).unwrap(), simulate(&lowered, &costs).unwrap());
        prop_assert_eq!((found.makespan, found.span), (direct.makespan, direct.span));
    }

    #[test]
    fn a_simulator_is_as_new_for_each_schedule(schedules in prop::collection::vec(any_flat(), 1..4)) {
        let mut simulator = Simulator::new();
        for schedule in &schedules {
            let costs = costs_of(schedule, &CostSpec::uniform(2.0, 3.0, 1.0).with_hop(0.25));
            let network = Network::default();
            let found = simulator.evaluate(schedule.header(), schedule.programs(), false, &costs, &network);
            let (found, expected) = (found.unwrap().unwrap(), simulate(schedule, &costs).unwrap());
            prop_assert_eq!((found.makespan, found.span), (expected.makespan, expected.span));
            prop_assert_eq!(found.peak, expected.peak.iter().copied().fold(0.0, f64::max));
            for (intervals, program) in expected.intervals.iter().zip(schedule.programs()) {
                prop_assert!(intervals.windows(2).all(|pair| pair[0].end <= pair[1].start));
                prop_assert_eq!(intervals.len(), program.len());
            }
            for (curve, peak) in expected.memory.iter().zip(&expected.peak) {
                prop_assert_eq!(curve.iter().map(|point| point.held).fold(0.0, f64::max), *peak);
                prop_assert!(curve.last().is_some_and(|point| point.held == 0.0));
            }
        }
    }
}

/// `DualPipe` on 8 ranks with 20 micro-batches: a composite that waits for both inputs idles 6 of 66.
#[test]
fn dualpipe_idles_six_of_sixty_six() {
    let schedule = built(ScheduleName::DualPipe, 8, 20, None);
    let all = simulated(&schedule, &CostSpec::default());
    assert_eq!(all.makespan, 66.0);
    assert!(all.busy.iter().all(|&busy| all.makespan - busy == 6.0), "{:?}", all.busy);
    let header = Header { gating: Gating::Own, ..schedule.header().clone() };
    let own = simulated(&Schedule::new(header, schedule.programs().to_vec()).unwrap(), &CostSpec::default());
    assert_eq!(own.makespan, 63.0, "each part waits for its own input: half of the bubble");
}

/// Two ranks, one micro-batch: F on both, B on both.
fn pair() -> (Schedule, Costs) {
    let schedule = built(ScheduleName::Gpipe, 2, 2, None);
    let costs = costs_of(&schedule, &CostSpec::uniform(4.0, 4.0, 4.0).with_hop(1.0));
    (schedule, costs)
}

#[test]
fn every_edge_may_have_its_latency() {
    let (schedule, costs) = pair();
    let edges = [((0, 1), 1.0), ((1, 0), 1.0)];
    let network = Network { latency: BTreeMap::from(edges), ..Network::default() };
    let one = simulate(&schedule, &costs).unwrap();
    assert_eq!(simulate_on(&schedule, &costs, &network).unwrap(), one);
    let network = Network { latency: BTreeMap::from([((1, 0), 3.0)]), ..Network::default() };
    assert_eq!(simulate_on(&schedule, &costs, &network).unwrap().makespan, one.makespan + 2.0);
}

#[test]
fn messages_of_a_size_follow_one_another_on_their_link() {
    let (schedule, costs) = pair();
    // Each message takes 10 on its link and 1 of latency. Forwards: sent at 4 and 8, gone at 14 and 24, there at 15 and
    // 25; the second rank computes to 29, then back 29..37 and 37..45. Gradients: gone at 47 and 57, there at 48 and 58.
    let network = Network { message: vec![20.0, 20.0], bandwidth: 2.0, ..Network::default() };
    let run = simulate_on(&schedule, &costs, &network).unwrap();
    assert_eq!(run.intervals[1][1].start, 25.0);
    assert_eq!(run.intervals[0][3].start, 58.0);
    assert_eq!(run.makespan, 66.0);
}

#[test]
fn without_overlap_a_sender_waits_for_its_message() {
    let (schedule, costs) = pair();
    let network = Network { overlap: false, ..Network::default() };
    let run = simulate_on(&schedule, &costs, &network).unwrap();
    let starts: Vec<f64> = run.intervals[0].iter().map(|interval| interval.start).collect();
    assert_eq!(starts, [0.0, 5.0, 23.0, 32.0]);
    assert_eq!(run.makespan, 40.0);
}

fn without_overlap() -> Network {
    Network { overlap: false, ..Network::default() }
}

/// A lowered program that is declared for some communication.
fn declared(programs: &[&[&str]], comm: CommModel) -> Schedule {
    let header = Header { comm, ..Header::new("mine", Placement::looped(2, 1).unwrap(), 2) };
    let action = |text: &&str| text.parse::<Action>().unwrap();
    let programs = programs.iter().map(|program| program.iter().map(action).collect()).collect();
    Schedule::new_lowered(header, programs, Lowering::default()).unwrap()
}

#[test]
fn without_overlap_a_receiver_waits_for_its_message() {
    // Rank 1 receives both inputs before it computes: the second is sent at 2 and there at 7, so it starts at 7.
    let programs: [&[&str]; 2] = [&["0F0", "0SEND_F0", "0F1", "0SEND_F1"], &["1RECV_F0", "1RECV_F1@1", "1F0", "1F1@1"]];
    let buffered = declared(&programs, CommModel::Buffered);
    let costs = costs_of(&buffered, &CostSpec::uniform(1.0, 1.0, 1.0).with_hop(3.0));
    let run = simulate_on(&buffered, &costs, &without_overlap()).unwrap();
    let starts: Vec<f64> = run.intervals[1].iter().map(|interval| interval.start).collect();
    let ends: Vec<f64> = run.intervals[1].iter().map(|interval| interval.end).collect();
    assert_eq!((starts, ends), (vec![0.0, 4.0, 8.0, 9.0], vec![4.0, 8.0, 9.0, 10.0]));
    let blocking = simulate_on(&declared(&programs, CommModel::Blocking), &costs, &without_overlap()).unwrap();
    assert_eq!(blocking.makespan, run.makespan);
    assert_eq!(blocking.intervals[0][1].end, 4.0, "a send ends when its message is there");
}

/// Both ranks send first, or both receive first: without overlap neither goes on.
#[test]
fn without_overlap_a_deadlock_is_an_error_that_names_its_circle() {
    let sends: [&[&str]; 2] = [
        &["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1@1", "0B1@1"],
        &["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1@1", "1F1@1", "1B1", "1SEND_B1"],
    ];
    let schedule = declared(&sends, CommModel::Directed);
    check::check(&schedule).unwrap();
    let costs = costs_of(&schedule, &CostSpec::default());
    assert!(simulate(&schedule, &costs).is_ok(), "with overlap both are posted");
    let error = simulate_on(&schedule, &costs, &without_overlap()).unwrap_err();
    assert!(error.to_string().contains("deadlock of") && error.to_string().contains("0SEND_F1"), "{error}");
    assert!(simulate_on(&declared(&sends, CommModel::Buffered), &costs, &without_overlap()).is_ok());
    let receives: [&[&str]; 2] = [
        &["0F0", "0SEND_F0", "0F1", "0RECV_B0", "0B0", "0SEND_F1", "0RECV_B1@1", "0B1@1"],
        &["1RECV_F0", "1F0", "1RECV_F1@1", "1B0", "1SEND_B0", "1F1@1", "1B1", "1SEND_B1"],
    ];
    for comm in [CommModel::Buffered, CommModel::Directed] {
        let schedule = declared(&receives, comm);
        assert!(simulate(&schedule, &costs).is_ok(), "{comm}");
        let error = simulate_on(&schedule, &costs, &without_overlap()).unwrap_err();
        assert!(error.to_string().contains("deadlock of"), "{error}");
    }
}

/// A program that deadlocks under the communication that it declares takes no time at all.
#[test]
fn a_false_declaration_is_refused() {
    let programs: [&[&str]; 2] = [
        &["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1@1", "0B1@1"],
        &["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1@1", "1F1@1", "1B1", "1SEND_B1"],
    ];
    let schedule = declared(&programs, CommModel::Blocking);
    let error = simulate(&schedule, &costs_of(&schedule, &CostSpec::default())).unwrap_err();
    assert!(error.to_string().contains("deadlock of"), "{error}");
}

#[test]
fn a_composite_may_take_less_than_its_parts() {
    let schedule = built(ScheduleName::DualPipe, 4, 8, None);
    let costs = costs_of(&schedule, &CostSpec::default());
    let network = Network { composite: 0.75, ..Network::default() };
    let run = |network: &Network| simulate_on(&schedule, &costs, network).unwrap().makespan;
    assert!(run(&network) < run(&Network::default()));
}

#[test]
fn costs_that_do_not_fit_are_refused() {
    let (schedule, costs) = pair();
    let refused = |costs: &Costs, network: &Network, what: &str| {
        let error = simulate_on(&schedule, costs, network).unwrap_err();
        assert!(matches!(&error, PlanError::BadCost { .. }) && error.to_string().contains(what), "{error}");
    };
    let plain = Network::default();
    refused(&Costs { forward: vec![1.0], ..costs.clone() }, &plain, "forward (a list of 1)");
    refused(&Costs { stash: vec![1.0, -1.0], ..costs.clone() }, &plain, "stash of stage 1");
    refused(&Costs { hop: f64::NAN, ..costs.clone() }, &plain, "hop");
    refused(&costs, &Network { bandwidth: 0.0, ..Network::default() }, "bandwidth");
    refused(&costs, &Network { latency: BTreeMap::from([((0, 1), -1.0)]), ..Network::default() }, "edge 0->1");
    let elsewhere = Network { latency: BTreeMap::from([((0, 1), 1.0), ((0, 2), 1.0)]), ..Network::default() };
    refused(&costs, &elsewhere, "latency of edge 0->2: expected an edge over which messages pass: 0->1, 1->0");
    refused(&Costs { forward: vec![1e308; 2], ..costs.clone() }, &plain, "times: their sum");
    refused(&Costs { activation: vec![1e308; 2], ..costs.clone() }, &plain, "sizes: their sum");
    assert!(check::memory(&schedule, f64::NAN, &costs).is_err());
}

#[test]
fn a_deadlock_is_an_error_that_names_the_blocked_actions() {
    let header = Header::new("stuck", Placement::looped(2, 1).unwrap(), 1);
    let programs =
        vec![vec![Action::backward(0, 0), Action::forward(0, 0)], vec![Action::forward(1, 0), Action::backward(1, 0)]];
    let stuck = Schedule::new(header, programs).unwrap();
    let costs = costs_of(&stuck, &CostSpec::default());
    let error = simulate(&stuck, &costs).unwrap_err();
    assert!(error.to_string().contains("0B0 (rank 0, position 0) comes before 0F0 (rank 0, position 1)"), "{error}");
    let evaluated = Simulator::new().evaluate(stuck.header(), stuck.programs(), false, &costs, &Network::default());
    assert_eq!(evaluated, Ok(None));
    let PlanError::InvalidSchedule(fault) = error else { panic!("{error}") };
    assert_eq!(fault.kind, FaultKind::Order);
}
