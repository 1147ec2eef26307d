//! A running step: what it has done, and how far it is in its plan.

use std::sync::Arc;

use crate::prefetch::coordinator::Answer;
use crate::prefetch::coordinator::residents::Residents;
use crate::prefetch::plan::{Gather, PrefetchPlan};
use crate::prefetch::trace::{GatherUnit, Phase, Use};

/// A plan with the places of each unit.
#[derive(Debug)]
pub(super) struct Program {
    plan: PrefetchPlan,
    /// For each unit and phase the uses in the trace, in order.
    places: Vec<[Vec<usize>; 2]>,
}

impl Program {
    pub(super) fn new(plan: PrefetchPlan) -> Self {
        let mut places = vec![[Vec::new(), Vec::new()]; plan.trace().units().len()];
        for (place, used) in plan.trace().uses().iter().enumerate() {
            places[used.unit][used.phase as usize].push(place);
        }
        Self { plan, places }
    }

    pub(super) fn plan(&self) -> &PrefetchPlan {
        &self.plan
    }

    /// The first use of `unit` in `phase` at `from` or later.
    fn next_place(&self, unit: usize, phase: Phase, from: usize) -> Option<usize> {
        let places = &self.places[unit][phase as usize];
        places.get(places.partition_point(|&place| place < from)).copied()
    }
}

/// Where a step first departed from its plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct Departure {
    index: usize,
    planned: Option<(usize, Phase)>,
    got: Option<(usize, Phase)>,
}

impl Departure {
    pub(super) fn describe(self, units: &[GatherUnit]) -> String {
        let words = |used: Option<(usize, Phase)>| match used {
            Some((unit, phase)) => format!("{:?} {phase}", units[unit].name),
            None => "the end of the step".to_owned(),
        };
        format!("use {}: planned {}, got {}", self.index, words(self.planned), words(self.got))
    }
}

#[derive(Clone, Debug)]
pub(super) struct Step {
    kind: String,
    program: Option<Arc<Program>>,
    /// The next use of the plan.
    cursor: usize,
    /// The next gather of the plan.
    next_gather: usize,
    departure: Option<Departure>,
    uses: Vec<Use>,
    /// Uses that have not ended.
    open: Vec<usize>,
}

impl Step {
    pub(super) fn new(kind: String, program: Option<Arc<Program>>) -> Self {
        let capacity = program.as_ref().map_or(0, |program| program.plan.trace().uses().len());
        let uses = Vec::with_capacity(capacity);
        Self { kind, program, cursor: 0, next_gather: 0, departure: None, uses, open: Vec::new() }
    }

    pub(super) fn num_uses(&self) -> usize {
        self.uses.len()
    }

    /// The place in the plan of a use that begins now; None for one that it does not have. Uses that were left out
    /// are passed over: their units are let go as if they had been used.
    pub(super) fn follow(
        &mut self,
        unit: usize,
        phase: Phase,
        residents: &mut Residents,
        answer: &mut Answer,
    ) -> Option<usize> {
        let program = Arc::clone(self.program.as_ref()?);
        let uses = program.plan.trace().uses();
        let planned = uses.get(self.cursor).map(|used| (used.unit, used.phase));
        if planned == Some((unit, phase)) {
            self.cursor += 1;
            return Some(self.cursor - 1);
        }
        let index = self.uses.len();
        self.departure.get_or_insert(Departure { index, planned, got: Some((unit, phase)) });
        let place = program.next_place(unit, phase, self.cursor)?;
        let passed = uses.iter().zip(program.plan.kept()).take(place).skip(self.cursor);
        for (other, _) in passed.filter(|(other, kept)| other.unit != unit && !**kept) {
            residents.release_idle(other.unit, answer);
        }
        self.cursor = place + 1;
        Some(place)
    }

    /// Where the plan needs `unit` next.
    pub(super) fn next_need(&self, unit: usize) -> Option<usize> {
        let program = self.program.as_ref()?;
        let next = |phase| program.next_place(unit, phase, self.cursor);
        [next(Phase::Forward), next(Phase::Backward)].into_iter().flatten().min()
    }

    /// Records a use that has begun.
    pub(super) fn note(&mut self, unit: usize, phase: Phase, stays: Option<bool>, residents: &mut Residents) {
        residents.enter(unit, stays);
        self.open.push(self.uses.len());
        self.uses.push(Use::new(unit, phase));
    }

    /// Records the end of the use of `unit` in `phase` that began last; false if there is none.
    pub(super) fn close(&mut self, unit: usize, phase: Phase) -> bool {
        let is_it = |&index: &usize| (self.uses[index].unit, self.uses[index].phase) == (unit, phase);
        let Some(position) = self.open.iter().rposition(is_it) else { return false };
        let index = self.open.remove(position);
        self.uses[index].span = self.uses.len() - index;
        true
    }

    /// Whether the plan keeps the unit after its use at `place`.
    pub(super) fn keeps(&self, place: usize) -> bool {
        self.program.as_ref().is_some_and(|program| program.plan.kept()[place])
    }

    /// Starts the gathers whose time has come, in the order of the plan. Where a use lasts longer than planned, so that
    /// one does not fit into `limit` yet, it waits for a later hook and all behind it as well: the order stays.
    pub(super) fn start_ahead(&mut self, residents: &mut Residents, limit: u64, answer: &mut Answer) {
        let Some(program) = &self.program else { return };
        while let Some(&Gather { unit, start, need }) = program.plan.gathers().get(self.next_gather) {
            if need >= self.cursor {
                if start > self.cursor.saturating_sub(1) || residents.is_used(unit) {
                    return;
                }
                if residents.is_away(unit) {
                    if !residents.fits(unit, limit) {
                        return;
                    }
                    residents.start(unit, answer);
                }
            }
            self.next_gather += 1;
        }
    }

    /// The first departure; a plan that is not at its end departs there.
    pub(super) fn departure(&self) -> Option<Departure> {
        let uses = self.program.as_ref()?.plan.trace().uses();
        let planned = uses.get(self.cursor).map(|used| (used.unit, used.phase));
        let early = planned.map(|_| Departure { index: self.uses.len(), planned, got: None });
        self.departure.or(early)
    }

    /// The kind and the uses; those that are open end with the step.
    pub(super) fn finish(mut self) -> (String, Vec<Use>) {
        let len = self.uses.len();
        self.open.iter().for_each(|&index| self.uses[index].span = len - index);
        (self.kind, self.uses)
    }
}
