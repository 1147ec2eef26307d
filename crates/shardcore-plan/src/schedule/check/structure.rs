//! Each action exactly once, on its rank, behind what it needs there.
//!
//! One byte per stage and micro-batch remembers what has been seen, so the whole check is one pass. What is found wrong
//! is looked up again for the message: that happens once.

use super::fault::{Fault, FaultKind, Place};
use crate::error::{PlanError, Result};
use crate::schedule::action::{Action, ActionKind};
use crate::schedule::flow::{Flow, NO_STAGE};
use crate::schedule::lower::Lowering;
use crate::schedule::program::Schedule;
use crate::table::counted;

/// No micro-batch: a free slot.
const FREE: u32 = u32::MAX;
/// Either form of a backward.
const GRAD: u8 = bit(ActionKind::Backward) | bit(ActionKind::InputGrad);

/// The mark of a kind that has a micro-batch: the first eight.
const fn bit(kind: ActionKind) -> u8 {
    1 << kind as u8
}

/// Checks what can be seen without running the schedule.
pub(super) fn check(schedule: &Schedule) -> Result<()> {
    let flow = Flow::of(schedule.header());
    let seen = vec![0; flow.num_cells()];
    let slots = Slots::new(schedule, &flow);
    let mut pass = Pass { schedule, forward_only: schedule.is_forward_only(), flow, seen, slots };
    for (rank, program) in schedule.programs().iter().enumerate() {
        for (position, action) in program.iter().enumerate() {
            pass.admit(rank, position)?;
            pass.mark(action);
        }
    }
    pass.complete()
}

struct Pass<'a> {
    schedule: &'a Schedule,
    forward_only: bool,
    flow: Flow,
    /// The marks of each stage and micro-batch.
    seen: Vec<u8>,
    slots: Option<Slots>,
}

/// What an action needs before it on its rank: any kind of `marks` of a stage and micro-batch.
#[derive(Clone, Copy)]
struct Need {
    stage: u32,
    unit: u32,
    marks: u8,
}

impl Pass<'_> {
    /// Checks an action against what its rank has done before. A part of a composite may need the parts before it.
    fn admit(&mut self, rank: usize, position: usize) -> Result<()> {
        let action = self.schedule.programs()[rank][position];
        let stage = action.stage as usize;
        if self.flow.rank[stage] as usize != rank {
            return Err(self.misplaced(rank, position));
        }
        if !action.kind.has_microbatch() {
            return Ok(());
        }
        if !self.flow.units_of(action.stage).contains(&action.microbatch) {
            return Err(self.wrong_chain(rank, position));
        }
        if self.seen[self.flow.cell(action.stage, action.microbatch)] & excluded(action.kind) != 0 {
            return Err(self.duplicate(rank, position));
        }
        if !action.kind.is_compute() && !self.has_other_end(action) {
            return Err(self.no_other_end(rank, position));
        }
        if self.forward_only && action.kind == ActionKind::RecvBackward {
            return Err(self.never_sent(rank, position));
        }
        let (needs, count) = self.needs(action);
        for need in &needs[..count] {
            if self.seen[self.flow.cell(need.stage, need.unit)] & need.marks == 0 {
                return Err(self.unmet(rank, position, *need));
            }
        }
        self.pass_slot(rank, position)
    }

    fn mark(&mut self, action: &Action) {
        if action.kind.has_microbatch() {
            let cell = self.flow.cell(action.stage, action.microbatch);
            self.seen[cell] |= bit(action.kind);
        }
    }

    /// Whether the stage takes its input (or the gradient of its output) from another rank through a receive.
    fn receives(&self, stage: u32, neighbour: u32) -> bool {
        self.slots.is_some() && crosses(&self.flow, stage, neighbour)
    }

    fn needs(&self, action: Action) -> ([Need; 3], usize) {
        let (stage, unit) = (action.stage, action.microbatch);
        let mut needs = [Need { stage, unit, marks: 0 }; 3];
        let mut count = 0;
        let mut add = |stage, unit, marks| {
            needs[count] = Need { stage, unit, marks };
            count += 1;
        };
        let (prev, next) = (self.flow.prev[stage as usize], self.flow.next[stage as usize]);
        let slice = unit % self.flow.num_slices;
        match action.kind {
            ActionKind::Forward => {
                if slice > 0 {
                    add(stage, unit - 1, bit(ActionKind::Forward));
                }
                if self.receives(stage, prev) {
                    add(stage, unit, bit(ActionKind::RecvForward));
                } else if prev != NO_STAGE && !self.flow.crosses(stage, prev) {
                    add(prev, unit, bit(ActionKind::Forward));
                }
            }
            ActionKind::Backward | ActionKind::InputGrad => {
                add(stage, unit, bit(ActionKind::Forward));
                if slice + 1 < self.flow.num_slices {
                    add(stage, unit + 1, GRAD);
                }
                if self.receives(stage, next) {
                    add(stage, unit, bit(ActionKind::RecvBackward));
                } else if next != NO_STAGE && !self.flow.crosses(stage, next) {
                    add(next, unit, GRAD);
                }
            }
            ActionKind::WeightGrad => add(stage, unit, bit(ActionKind::InputGrad)),
            ActionKind::SendForward => add(stage, unit, bit(ActionKind::Forward)),
            ActionKind::SendBackward => add(stage, unit, GRAD),
            _ => {}
        }
        (needs, count)
    }

    fn has_other_end(&self, action: Action) -> bool {
        let partner = self.schedule.placement().partner(action);
        partner.is_some_and(|partner| self.flow.crosses(action.stage, partner.stage))
    }

    /// Follows the slots of receives to the computations that read them.
    fn pass_slot(&mut self, rank: usize, position: usize) -> Result<()> {
        let action = self.schedule.programs()[rank][position];
        let Some(slots) = &mut self.slots else { return Ok(()) };
        let cell = self.flow.cell(action.stage, action.microbatch);
        let stage = action.stage as usize;
        let side = usize::from(matches!(action.kind, ActionKind::Forward | ActionKind::RecvForward));
        let reads = match action.kind {
            ActionKind::RecvForward | ActionKind::RecvBackward => {
                slots.ahead[stage][side] += 1;
                if slots.ahead[stage][side] > slots.most_ahead {
                    return Err(self.too_far_ahead(rank, position));
                }
                return slots.fill(stage, side, &action, cell).map_err(|held| self.overwritten(rank, position, held));
            }
            ActionKind::Forward => crosses(&self.flow, action.stage, self.flow.prev[stage]),
            ActionKind::Backward | ActionKind::InputGrad => crosses(&self.flow, action.stage, self.flow.next[stage]),
            _ => false,
        };
        slots.ahead[stage][side] -= u32::from(reads);
        let fits = !reads || slots.holds(stage, side, &action);
        if action.kind == slots.last_use || action.kind == ActionKind::Backward {
            slots.release(stage, cell);
        }
        if fits { Ok(()) } else { Err(self.wrong_slot(rank, position)) }
    }

    /// Nothing that a schedule needs is missing.
    fn complete(&self) -> Result<()> {
        let forward_only = self.forward_only;
        for stage in (0..).take(self.flow.num_stages) {
            let [sends_forward, sends_backward] = [self.flow.next[stage as usize], self.flow.prev[stage as usize]]
                .map(|neighbour| self.receives(stage, neighbour));
            for unit in self.flow.units_of(stage) {
                let seen = self.seen[self.flow.cell(stage, unit)];
                let has = |kind| seen & bit(kind) != 0;
                let whole = has(ActionKind::Backward) || (has(ActionKind::InputGrad) && has(ActionKind::WeightGrad));
                let missing = if !has(ActionKind::Forward) {
                    ActionKind::Forward
                } else if sends_forward && !has(ActionKind::SendForward) {
                    ActionKind::SendForward
                } else if !forward_only && !whole {
                    if has(ActionKind::InputGrad) { ActionKind::WeightGrad } else { ActionKind::Backward }
                } else if !forward_only && sends_backward && !has(ActionKind::SendBackward) {
                    ActionKind::SendBackward
                } else {
                    continue;
                };
                return Err(self.missing(Action::new(missing, stage, unit)));
            }
        }
        Ok(())
    }
}

fn crosses(flow: &Flow, stage: u32, neighbour: u32) -> bool {
    neighbour != NO_STAGE && flow.crosses(stage, neighbour)
}

/// What is in the receive slots of a lowered schedule. A slot is taken until the last computation of its micro-batch on
/// the stage, because a backward reads the forward's input again.
struct Slots {
    /// How many receives of each stage are posted and not yet used, of gradients and of inputs; and the most that may be.
    ahead: Vec<[u32; 2]>,
    most_ahead: u32,
    /// The micro-batch in each slot of each stage: gradients, then inputs.
    held: Vec<Vec<u32>>,
    /// The slot that each micro-batch of each stage has: gradients, then inputs.
    of: Vec<u16>,
    last_use: ActionKind,
}

impl Slots {
    fn new(schedule: &Schedule, flow: &Flow) -> Option<Self> {
        let last_use = if schedule.is_forward_only() { ActionKind::Forward } else { ActionKind::WeightGrad };
        let lowering = schedule.lowering()?;
        Some(Self {
            ahead: vec![[0; 2]; flow.num_stages],
            most_ahead: lowering.most_receives_ahead(),
            held: vec![Vec::new(); 2 * flow.num_stages],
            of: vec![0; 2 * flow.num_cells()],
            last_use,
        })
    }

    /// Fills the slot of a receive, or gives the micro-batch that is still in it.
    fn fill(&mut self, stage: usize, side: usize, receive: &Action, cell: usize) -> std::result::Result<(), u32> {
        let slot = usize::from(receive.slot);
        let held = &mut self.held[2 * stage + side];
        if slot >= held.len() {
            held.resize(slot + 1, FREE);
        }
        if held[slot] != FREE {
            return Err(held[slot]);
        }
        held[slot] = receive.microbatch;
        self.of[2 * cell + side] = receive.slot;
        Ok(())
    }

    fn holds(&self, stage: usize, side: usize, reader: &Action) -> bool {
        self.held[2 * stage + side].get(usize::from(reader.slot)) == Some(&reader.microbatch)
    }

    fn release(&mut self, stage: usize, cell: usize) {
        for side in 0..2 {
            let slot = usize::from(self.of[2 * cell + side]);
            if let Some(held) = self.held[2 * stage + side].get_mut(slot) {
                *held = FREE;
            }
        }
    }
}

/// The kinds that a stage and micro-batch cannot have had before an action of this kind.
const fn excluded(kind: ActionKind) -> u8 {
    match kind {
        ActionKind::Backward => GRAD | bit(ActionKind::WeightGrad),
        ActionKind::InputGrad => GRAD,
        ActionKind::WeightGrad => bit(ActionKind::WeightGrad) | bit(ActionKind::Backward),
        other => bit(other),
    }
}

/// The messages.
impl Pass<'_> {
    fn fault(&self, kind: FaultKind, message: String, witness: Vec<Place>) -> PlanError {
        Fault::new(self.schedule, kind, message, witness).into()
    }

    fn place(&self, rank: usize, position: usize) -> Place {
        Place::at(self.schedule, rank, position)
    }

    /// The first action of a rank that has one of these marks for a stage and micro-batch.
    fn find_on(&self, rank: usize, need: Need) -> Option<Place> {
        let wanted = |action: &Action| {
            action.kind.has_microbatch()
                && (action.stage, action.microbatch) == (need.stage, need.unit)
                && bit(action.kind) & need.marks != 0
        };
        let position = self.schedule.programs()[rank].iter().position(wanted)?;
        Some(self.place(rank, position))
    }

    fn find(&self, need: Need) -> Option<Place> {
        (0..self.flow.num_ranks).find_map(|rank| self.find_on(rank, need))
    }

    fn misplaced(&self, rank: usize, position: usize) -> PlanError {
        let place = self.place(rank, position);
        let owner = self.flow.rank[place.action.stage as usize];
        let message = format!("{place} stands on the wrong rank: stage {} is on rank {owner}", place.action.stage);
        self.fault(FaultKind::Misplaced, message, vec![place])
    }

    fn wrong_chain(&self, rank: usize, position: usize) -> PlanError {
        let place = self.place(rank, position);
        let units = self.flow.units_of(place.action.stage);
        let message = format!(
            "{place}: stage {} is in the chain of micro-batches {} to {} only",
            place.action.stage,
            units.start,
            units.end.saturating_sub(1)
        );
        self.fault(FaultKind::Misplaced, message, vec![place])
    }

    fn duplicate(&self, rank: usize, position: usize) -> PlanError {
        let place = self.place(rank, position);
        let Action { kind, stage, microbatch: unit, .. } = place.action;
        let first = self.find_on(rank, Need { stage, unit, marks: excluded(kind) });
        let earlier = first.map_or(String::new(), |first| format!(" after {first}"));
        let rule = "expected each action once, and a backward either whole (B) or in parts (I and W)";
        let message = format!("{place} comes again{earlier}: {rule}");
        self.fault(FaultKind::Duplicate, message, std::iter::once(place).chain(first).collect())
    }

    fn no_other_end(&self, rank: usize, position: usize) -> PlanError {
        let place = self.place(rank, position);
        let message = format!(
            "{place} has no other end: the neighbour of stage {} that it means is on no other rank; drop it",
            place.action.stage
        );
        self.fault(FaultKind::Misplaced, message, vec![place])
    }

    fn unmet(&self, rank: usize, position: usize, need: Need) -> PlanError {
        let place = self.place(rank, position);
        let needed = describe(need);
        match self.find_on(rank, need).or_else(|| self.find(need)) {
            Some(found) if found.rank as usize == rank => {
                let message = format!("{place} comes before {found}, which it needs: swap them");
                self.fault(FaultKind::Order, message, vec![place, found])
            }
            Some(found) => {
                let message = format!("{place} needs {needed} on its own rank, but it is on rank {}", found.rank);
                self.fault(FaultKind::Misplaced, message, vec![found, place])
            }
            None => {
                let todo = if self.has_messages() {
                    format!("add it to rank {rank}")
                } else {
                    "no program has messages at all: leave out what is not F, B, I or W and let lower() add the rest"
                        .to_owned()
                };
                let message = format!("{place} needs {needed} before it, and no rank has it: {todo}");
                self.fault(FaultKind::Missing, message, vec![place])
            }
        }
    }

    fn has_messages(&self) -> bool {
        self.schedule.programs().iter().flatten().any(|action| action.kind.is_send() || action.kind.is_recv())
    }

    fn missing(&self, action: Action) -> PlanError {
        let Action { kind, stage, microbatch: unit, .. } = action;
        let rank = self.flow.rank[stage as usize];
        let parts = if kind == ActionKind::Backward {
            format!(" (or {stage}I{unit} and {stage}W{unit})")
        } else {
            String::new()
        };
        let waits = self.schedule.placement().partner(action).and_then(|partner| {
            let Action { kind, stage, microbatch: unit, .. } = partner;
            self.find_on(self.flow.rank[stage as usize] as usize, Need { stage, unit, marks: bit(kind) })
        });
        let waits_for_it = waits.map_or(String::new(), |receive| format!("; {receive} waits for it"));
        let message = format!("{action}{parts} is missing: expected it once on rank {rank}{waits_for_it}");
        let marks = u8::MAX;
        let witness =
            self.find_on(rank as usize, Need { stage, unit, marks }).or_else(|| self.find(Need { stage, unit, marks }));
        let near = witness
            .or_else(|| (!self.schedule.programs()[rank as usize].is_empty()).then(|| self.place(rank as usize, 0)));
        self.fault(FaultKind::Missing, message, near.into_iter().chain(waits).collect())
    }

    fn never_sent(&self, rank: usize, position: usize) -> PlanError {
        let place = self.place(rank, position);
        let message = format!(
            "{place} waits for a message that no rank sends: the program has no backward; drop it, or add the backwards"
        );
        self.fault(FaultKind::Missing, message, vec![place])
    }

    fn too_far_ahead(&self, rank: usize, position: usize) -> PlanError {
        let place = self.place(rank, position);
        let Action { kind, stage, .. } = place.action;
        let reads = |reader: ActionKind| match reader {
            ActionKind::Forward => kind == ActionKind::RecvForward,
            ActionKind::Backward | ActionKind::InputGrad => kind == ActionKind::RecvBackward,
            _ => false,
        };
        let program = &self.schedule.programs()[rank];
        let mut unread: Vec<usize> = Vec::new();
        for (at, action) in program[..position].iter().enumerate().filter(|(_, action)| action.stage == stage) {
            if action.kind == kind {
                unread.push(at);
            } else if reads(action.kind) {
                unread.retain(|&earlier| program[earlier].microbatch != action.microbatch);
            }
        }
        let most = self.schedule.lowering().map_or(0, Lowering::most_receives_ahead);
        let message = format!(
            "{place} is posted with {} of stage {stage} before it that nothing has used, and receives_ahead is {most}: \
             post it behind a computation that uses one, or lower with a larger receives_ahead",
            counted(unread.len() as u64, "receive")
        );
        let earlier = unread.into_iter().map(|at| self.place(rank, at));
        self.fault(FaultKind::Slot, message, std::iter::once(place).chain(earlier).collect())
    }

    fn overwritten(&self, rank: usize, position: usize, held: u32) -> PlanError {
        let place = self.place(rank, position);
        let Action { kind, stage, slot, .. } = place.action;
        let first = self.find_on(rank, Need { stage, unit: held, marks: bit(kind) });
        let message = format!(
            "{place} fills slot {slot} while the slot holds micro-batch {held}, which is read later only: give it a free slot"
        );
        self.fault(FaultKind::Slot, message, std::iter::once(place).chain(first).collect())
    }

    fn wrong_slot(&self, rank: usize, position: usize) -> PlanError {
        let place = self.place(rank, position);
        let Action { kind, stage, microbatch: unit, slot, .. } = place.action;
        let receive = if kind == ActionKind::Forward { ActionKind::RecvForward } else { ActionKind::RecvBackward };
        let filled = self.find_on(rank, Need { stage, unit, marks: bit(receive) });
        let other = filled.map_or(String::new(), |filled| format!(" of slot {}", filled.action.slot));
        let message = format!(
            "{place} reads slot {slot}, which does not hold its input: expected the one{other} that its receive filled"
        );
        self.fault(FaultKind::Slot, message, std::iter::once(place).chain(filled).collect())
    }
}

/// `2F0`, or `2B0 or 2I0`.
fn describe(need: Need) -> String {
    let kinds = ActionKind::ALL.iter().copied().filter(|kind| kind.has_microbatch() && bit(*kind) & need.marks != 0);
    let names: Vec<String> = kinds.map(|kind| Action::new(kind, need.stage, need.unit).to_string()).collect();
    names.join(" or ")
}
