//! Laws of the coordinator: whatever a step does, nothing is started twice, used early, left over or over budget.

use crate::given::cases;
use crate::prefetch::{budget, limits, random_sizes, smallest_budget, there_and_back, traces, units};
use proptest::prelude::*;
use shardcore_plan::prefetch::{Answer, Coordinator, GatherUnit, Limits, Objective, Phase, Trace, Use};
use shardcore_plan::{PlanError, Result};

const FORWARD: Phase = Phase::Forward;
const BACKWARD: Phase = Phase::Backward;

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Away,
    Started,
    Ready,
}

/// What a rank does with the answers, checking each.
struct Rank {
    coordinator: Coordinator,
    sizes: Vec<u64>,
    budget: u64,
    states: Vec<State>,
    num_uses: Vec<usize>,
    /// The units whose gathers were started in this step, in order.
    started: Vec<usize>,
    /// Whether the coordinator told to wait for a gather that the same hook started.
    num_exposed: usize,
}

impl Rank {
    fn new(sizes: &[u64], budget: u64, limits: Limits) -> Self {
        let limits = Limits { budget: Some(budget), ..limits };
        Self {
            coordinator: Coordinator::new(units(sizes), limits, Objective::Bytes).unwrap(),
            sizes: sizes.to_vec(),
            budget,
            states: vec![State::Away; sizes.len()],
            num_uses: vec![0; sizes.len()],
            started: Vec::new(),
            num_exposed: 0,
        }
    }

    fn obey(&mut self, answer: &Answer) {
        for &unit in &answer.release {
            assert_ne!(self.states[unit], State::Away, "released twice");
            assert_eq!(self.num_uses[unit], 0, "released while in use");
            self.states[unit] = State::Away;
        }
        for &unit in &answer.start {
            assert_eq!(self.states[unit], State::Away, "started twice");
            self.states[unit] = State::Started;
            self.started.push(unit);
        }
        assert!(self.live() <= self.budget, "{} of {}", self.live(), self.budget);
        assert_eq!(self.live(), self.coordinator.live_nbytes());
    }

    fn live(&self) -> u64 {
        (0..self.sizes.len()).filter(|&unit| self.states[unit] != State::Away).map(|unit| self.sizes[unit]).sum()
    }

    fn begin(&mut self, kind: &str) {
        let answer = self.coordinator.begin(kind).clone();
        self.started.clear();
        self.num_exposed = 0;
        self.obey(&answer);
    }

    fn enter(&mut self, unit: usize, phase: Phase) -> Result<()> {
        let answer = self.coordinator.enter(unit, phase)?.clone();
        self.obey(&answer);
        assert_eq!(answer.wait, self.states[unit] == State::Started, "used before its gather is over");
        self.num_exposed += usize::from(answer.start.contains(&unit));
        assert_ne!(self.states[unit], State::Away, "used while it is away");
        self.states[unit] = State::Ready;
        self.num_uses[unit] += 1;
        Ok(())
    }

    fn leave(&mut self, unit: usize, phase: Phase) {
        self.num_uses[unit] -= 1;
        let answer = self.coordinator.leave(unit, phase).unwrap().clone();
        assert!(answer.start.is_empty() && !answer.wait);
        self.obey(&answer);
    }

    fn end(&mut self) {
        self.num_uses.fill(0);
        let answer = self.coordinator.end().clone();
        self.obey(&answer);
        assert!(self.states.iter().all(|&state| state == State::Away), "a gather is left over");
    }

    /// Uses in order; those that do not fit into the budget are left out.
    fn run(&mut self, uses: &[Use]) -> usize {
        let mut entered: Vec<Option<Use>> = Vec::new();
        for used in uses {
            entered.push(self.enter(used.unit, used.phase).is_ok().then_some(*used));
            let place = entered.len();
            for (at, used) in entered.iter_mut().enumerate().rev() {
                if let Some(ended) = used.take_if(|used| at + used.span == place) {
                    self.leave(ended.unit, ended.phase);
                }
            }
        }
        entered.iter().flatten().count()
    }

    fn step(&mut self, kind: &str, uses: &[Use]) {
        self.begin(kind);
        self.run(uses);
        self.end();
    }
}

/// Another step than `trace`: uses left out, doubled, exchanged, prolonged, cut off.
fn departing(trace: &Trace, edits: &[(prop::sample::Index, u8)]) -> Vec<Use> {
    let mut uses = trace.uses().to_vec();
    for (index, edit) in edits {
        if uses.is_empty() {
            break;
        }
        let place = index.index(uses.len());
        match edit {
            0 => drop(uses.remove(place)),
            1 => uses.insert(place, uses[place]),
            2 => uses.swap(place, 0),
            3 => uses[place].span += 2,
            4 => uses[place].phase = if uses[place].phase == FORWARD { BACKWARD } else { FORWARD },
            _ => uses.truncate(place),
        }
    }
    let len = uses.len();
    uses.iter_mut().enumerate().for_each(|(at, used)| used.span = used.span.min(len - at));
    uses
}

fn sizes_of(trace: &Trace) -> Vec<u64> {
    trace.units().iter().map(|unit| unit.nbytes).collect()
}

/// A budget in which each unit fits alone.
fn workable(trace: &Trace, slack: u64) -> u64 {
    smallest_budget(trace).max(sizes_of(trace).into_iter().max().unwrap_or(0)) + slack
}

fn edits() -> impl Strategy<Value = Vec<(prop::sample::Index, u8)>> {
    prop::collection::vec((any::<prop::sample::Index>(), 0_u8..6), 0..4)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(256, 4_096)))]

    #[test]
    fn whatever_a_step_does_gathers_are_consistent_and_within_budget(
        trace in traces(random_sizes(1..10), 0..30),
        (slack, limits) in limits(),
        steps in prop::collection::vec((edits(), 0_u8..8), 1..8),
    ) {
        let mut rank = Rank::new(&sizes_of(&trace), workable(&trace, slack), limits);
        for (edits, way) in steps {
            rank.begin(if way == 0 { "eval" } else { "train" });
            rank.run(&departing(&trace, &edits));
            match way {
                1 => {
                    rank.num_uses.fill(0);
                    let answer = rank.coordinator.reset().clone();
                    rank.obey(&answer);
                }
                2 => continue, // Whoever begins again without an end has ended.
                _ => rank.end(),
            }
            prop_assert_eq!(rank.live(), 0);
        }
    }

    #[test]
    fn the_second_step_runs_exactly_the_plan(
        trace in traces(random_sizes(1..10), 1..30),
        (slack, limits) in limits(),
    ) {
        let mut rank = Rank::new(&sizes_of(&trace), workable(&trace, slack), limits);
        rank.step("", trace.uses());
        rank.step("", trace.uses());
        let plan = rank.coordinator.plan("").unwrap();
        let planned: Vec<usize> = plan.gathers().iter().map(|gather| gather.unit).collect();
        prop_assert_eq!(&rank.started, &planned);
        // Two open uses of one unit and phase are one to the hooks: spans may be exchanged between them.
        let order = |uses: &[Use]| uses.iter().map(|used| (used.unit, used.phase)).collect::<Vec<_>>();
        prop_assert_eq!(order(plan.trace().uses()), order(trace.uses()));
        prop_assert_eq!(rank.coordinator.num_departures(), 0);
        // After any other step the plan is back at once.
        rank.step("", &trace.uses()[..trace.uses().len() / 2]);
        rank.step("", trace.uses());
        rank.step("", trace.uses());
        prop_assert_eq!(rank.started, planned);
    }

    #[test]
    fn equal_hooks_give_equal_answers(
        trace in traces(random_sizes(1..10), 1..30),
        slack in 0_u64..300,
        steps in prop::collection::vec(edits(), 1..6),
    ) {
        let rank = || Rank::new(&sizes_of(&trace), workable(&trace, slack), Limits::default());
        let mut ranks = [rank(), rank()];
        for edits in steps {
            let uses = departing(&trace, &edits);
            for rank in &mut ranks {
                rank.step("", &uses);
            }
            prop_assert_eq!(&ranks[0].started, &ranks[1].started);
            prop_assert_eq!(ranks[0].coordinator.plan(""), ranks[1].coordinator.plan(""));
        }
    }
}

fn three_units_of_twelve() -> (Rank, Trace) {
    let trace = there_and_back(&[100; 12]);
    let mut rank = Rank::new(&[100; 12], 300, Limits::default());
    rank.step("train", trace.uses());
    assert_eq!((rank.num_exposed, rank.started.len()), (24, 24), "the first step gathers on demand");
    (rank, trace)
}

#[test]
fn planned_steps_wait_for_nothing_that_they_only_just_started() {
    let (mut rank, trace) = three_units_of_twelve();
    rank.step("train", trace.uses());
    assert_eq!((rank.num_exposed, rank.started.len()), (0, 21), "the first gather starts as the step begins");
}

#[test]
fn a_step_goes_on_with_its_plan_after_a_departure() {
    let (mut rank, trace) = three_units_of_twelve();
    let mut uses = trace.uses().to_vec();
    uses.remove(4);
    rank.step("train", &uses);
    assert_eq!(rank.num_exposed, 0, "a layer that is left out costs nothing");
    assert_eq!(rank.coordinator.last_departure(), Some(r#"use 4: planned "u4" forward, got "u5" forward"#));
    rank.step("train", &uses);
    uses.insert(7, uses[2]);
    rank.step("train", &uses);
    assert!(rank.num_exposed <= 4, "one use too many: {}", rank.num_exposed);
    assert_eq!(rank.coordinator.num_departures(), 2);
}

#[test]
fn kinds_of_steps_have_their_own_plans() {
    let (mut rank, trace) = three_units_of_twelve();
    for kind in ["eval", "train", "eval", "train"] {
        rank.step(kind, if kind == "eval" { &trace.uses()[..12] } else { trace.uses() });
    }
    assert_eq!(rank.coordinator.num_departures(), 0);
    assert_eq!(rank.coordinator.plan("eval").unwrap().trace().uses().len(), 12);
    assert!(rank.coordinator.plan("generate").is_none());
}

#[test]
fn steps_that_alternate_are_planned_once() {
    let (mut rank, trace) = three_units_of_twelve();
    rank.step("train", &trace.uses()[..12]);
    rank.begin("train");
    rank.run(trace.uses());
    rank.end();
    assert!(rank.coordinator.recorded().is_none(), "the plan of the first step is remembered");
    rank.step("train", trace.uses());
    assert_eq!((rank.num_exposed, rank.coordinator.num_departures()), (0, 2));
    assert_eq!(rank.coordinator.last_departure(), Some(r#"use 12: planned the end of the step, got "u11" backward"#));
}

#[test]
fn a_use_that_lasts_longer_delays_gathers_but_keeps_their_order() {
    let (mut rank, trace) = three_units_of_twelve();
    rank.step("train", trace.uses());
    let planned = rank.started.clone();
    let mut uses = trace.uses().to_vec();
    uses[3].span = 3;
    uses[15].span = 2;
    rank.step("train", &uses);
    assert_eq!(rank.started, planned);
    assert_eq!(rank.coordinator.num_departures(), 0);
}

#[test]
fn a_unit_still_in_use_when_its_next_gather_is_due_keeps_the_order() {
    let uses = [0, 1, 2, 0, 3].map(|unit| Use::new(unit, FORWARD));
    let mut rank = Rank::new(&[100; 4], 400, Limits { max_reuse_nbytes: Some(0), ..Limits::default() });
    rank.step("", &uses);
    let mut longer = uses;
    longer[0].span = 3;
    rank.step("", &longer);
    assert_eq!(rank.started, [0, 1, 2, 0, 3]);
}

#[test]
fn a_use_that_does_not_fit_beside_others_is_refused_and_nothing_changes() {
    let mut rank = Rank::new(&[60, 50, 10], 100, Limits::default());
    rank.begin("");
    rank.enter(0, FORWARD).unwrap();
    rank.enter(2, FORWARD).unwrap();
    let error = rank.enter(1, FORWARD).unwrap_err();
    assert!(matches!(error, PlanError::BudgetTooSmall { smallest: 120, .. }), "{error}");
    assert!(
        error.to_string().contains(r#""u1" (50 bytes) + "u0" (60 bytes) + "u2" (10 bytes) = 120 bytes"#),
        "{error}"
    );
    rank.leave(0, FORWARD);
    rank.enter(1, FORWARD).unwrap();
    rank.end();
}

#[test]
fn misuse_is_refused() {
    let mut coordinator = Coordinator::new(units(&[1]), budget(1), Objective::Bytes).unwrap();
    assert!(matches!(coordinator.enter(0, FORWARD), Err(PlanError::NoStep { .. })));
    assert!(matches!(coordinator.leave(0, FORWARD), Err(PlanError::NotInUse { .. })));
    assert!(coordinator.end().release.is_empty());
    coordinator.begin("");
    assert!(matches!(coordinator.enter(1, FORWARD), Err(PlanError::UnitOutOfRange { unit: 1, num_units: 1 })));
    coordinator.enter(0, FORWARD).unwrap();
    assert!(matches!(coordinator.leave(0, BACKWARD), Err(PlanError::NotInUse { .. })));
    let above = Coordinator::new(units(&[1, 3]), budget(2), Objective::Bytes).unwrap_err();
    assert_eq!(above, PlanError::UnitAboveBudget { budget: 2, name: "u1".to_owned(), nbytes: 3 });
    let twice = vec![GatherUnit { name: "u".to_owned(), nbytes: 1 }; 2];
    assert!(matches!(
        Coordinator::new(twice, Limits::default(), Objective::Bytes),
        Err(PlanError::DuplicateUnit { .. })
    ));
}
