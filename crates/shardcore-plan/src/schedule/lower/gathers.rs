//! Which stages' parameters a rank holds whole, at `ZeRO` stage 3.
//!
//! A stage is gathered one stage ahead of its use, behind the computation of the one in use. Where room is needed, the
//! stage whose next use is farthest away is released (Belady's rule, which gathers least), and each is released behind
//! its last use.

use super::Inserted;
use super::times::composites;
use crate::schedule::action::{Action, ActionKind};

/// No later use.
const NEVER: usize = usize::MAX;

/// Computations of one stage in a row.
struct Use {
    stage: u32,
    /// The gaps before the first and behind the last of them.
    before: u32,
    after: u32,
    /// The stage's next use, or [`NEVER`].
    next: usize,
}

/// A stage whose parameters are whole.
struct Resident {
    stage: u32,
    next: usize,
    /// The gap behind its latest use.
    idle_from: u32,
}

/// The gathers and releases of a rank that holds `max_unsharded` stages whole at once, or as many as a composite
/// needs.
pub(super) fn gathers(program: &[Action], max_unsharded: u32) -> Vec<Inserted> {
    let uses = uses(program);
    let mut planner = Planner { room: max_unsharded as usize, residents: Vec::new(), inserted: Vec::new() };
    for (turn, current) in uses.iter().enumerate() {
        planner.release_unused(current.before);
        if !planner.holds(current.stage) {
            planner.make_room(current.before, current.stage);
            planner.gather(current.before, current.stage, turn);
        }
        for resident in planner.residents.iter_mut().filter(|resident| resident.stage == current.stage) {
            (resident.next, resident.idle_from) = (current.next, current.after);
        }
        if let Some(upcoming) = uses.get(turn + 1).filter(|upcoming| !planner.holds(upcoming.stage)) {
            planner.make_room(current.before, current.stage);
            if planner.residents.len() < planner.room {
                planner.gather(current.before, upcoming.stage, turn + 1);
            }
        }
    }
    planner.release_unused(u32::MAX);
    planner.inserted
}

/// The most stages of one composite, which are whole together.
pub(super) fn widest(program: &[Action]) -> usize {
    let distinct = |composite: &[Action]| {
        let mut stages: Vec<u32> = composite.iter().map(|action| action.stage).collect();
        stages.sort_unstable();
        stages.dedup();
        stages.len()
    };
    let joined = composites(program).filter(|(_, _, composite)| composite.len() > 1);
    joined.map(|(_, _, composite)| distinct(composite)).max().unwrap_or(1)
}

struct Planner {
    room: usize,
    residents: Vec<Resident>,
    inserted: Vec<Inserted>,
}

impl Planner {
    fn holds(&self, stage: u32) -> bool {
        self.residents.iter().any(|resident| resident.stage == stage)
    }

    fn gather(&mut self, gap: u32, stage: u32, next: usize) {
        self.residents.push(Resident { stage, next, idle_from: gap });
        self.inserted.push(Inserted { gap, action: Action::new(ActionKind::Unshard, stage, 0) });
    }

    /// Releases the stages that are not used again.
    fn release_unused(&mut self, gap: u32) {
        let unused = |resident: &mut Resident| resident.next == NEVER && resident.idle_from <= gap;
        for resident in self.residents.extract_if(.., unused) {
            let action = Action::new(ActionKind::Reshard, resident.stage, 0);
            self.inserted.push(Inserted { gap: resident.idle_from, action });
        }
    }

    /// Releases the stage whose next use is farthest, if there is no room and one other than `stage` is idle.
    fn make_room(&mut self, gap: u32, stage: u32) {
        if self.residents.len() < self.room {
            return;
        }
        let idle = |(_, resident): &(usize, &Resident)| resident.idle_from <= gap && resident.stage != stage;
        let farthest = self.residents.iter().enumerate().filter(idle).max_by_key(|(_, resident)| resident.next);
        if let Some((index, _)) = farthest {
            let released = self.residents.swap_remove(index);
            self.inserted.push(Inserted { gap, action: Action::new(ActionKind::Reshard, released.stage, 0) });
        }
    }
}

fn uses(program: &[Action]) -> Vec<Use> {
    let mut uses: Vec<Use> = Vec::new();
    for (before, after, composite) in composites(program) {
        for &Action { stage, .. } in composite {
            match uses.last_mut() {
                Some(last) if last.stage == stage => last.after = after,
                _ => uses.push(Use { stage, before, after, next: NEVER }),
            }
        }
    }
    let mut following: std::collections::BTreeMap<u32, usize> = std::collections::BTreeMap::new();
    for turn in (0..uses.len()).rev() {
        uses[turn].next = following.insert(uses[turn].stage, turn).unwrap_or(NEVER);
    }
    uses
}
