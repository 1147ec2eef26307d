//! Which units are gathered or on their way, and what they take.

use crate::prefetch::coordinator::Answer;
use crate::prefetch::trace::GatherUnit;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Only this rank's shard is here.
    Away,
    /// Its gather has started and was not waited for.
    Started,
    /// It can be used.
    Ready,
}

#[derive(Clone, Debug)]
struct Resident {
    nbytes: u64,
    state: State,
    /// Uses that have begun and not ended.
    num_uses: usize,
    /// Stays when the last use ends.
    stays: bool,
}

/// All units with their states.
#[derive(Clone, Debug)]
pub(super) struct Residents {
    all: Vec<Resident>,
    live_nbytes: u64,
    used_nbytes: u64,
}

impl Residents {
    pub(super) fn new(units: &[GatherUnit]) -> Self {
        let away = |unit: &GatherUnit| Resident { nbytes: unit.nbytes, state: State::Away, num_uses: 0, stays: false };
        Self { all: units.iter().map(away).collect(), live_nbytes: 0, used_nbytes: 0 }
    }

    pub(super) fn live_nbytes(&self) -> u64 {
        self.live_nbytes
    }

    /// The units in use.
    pub(super) fn used(&self) -> impl Iterator<Item = usize> {
        (0..self.all.len()).filter(|&unit| self.all[unit].num_uses > 0)
    }

    /// Whether the unit fits into `limit` beside those in use, once all others are released.
    pub(super) fn fits_beside_used(&self, unit: usize, limit: u64) -> bool {
        let resident = &self.all[unit];
        resident.num_uses > 0 || self.used_nbytes + resident.nbytes <= limit
    }

    /// Whether the unit fits into `limit` beside all that is here.
    pub(super) fn fits(&self, unit: usize, limit: u64) -> bool {
        self.live_nbytes + self.all[unit].nbytes <= limit
    }

    pub(super) fn is_away(&self, unit: usize) -> bool {
        self.all[unit].state == State::Away
    }

    pub(super) fn is_used(&self, unit: usize) -> bool {
        self.all[unit].num_uses > 0
    }

    pub(super) fn start(&mut self, unit: usize, answer: &mut Answer) {
        self.all[unit].state = State::Started;
        self.live_nbytes += self.all[unit].nbytes;
        answer.start.push(unit);
    }

    /// Starts the unit if it is away. For room it releases units that are not in use, the one with the farthest next
    /// need first: Belady's rule.
    pub(super) fn demand(
        &mut self,
        unit: usize,
        limit: u64,
        answer: &mut Answer,
        next_need: impl Fn(usize) -> Option<usize>,
    ) {
        if !self.is_away(unit) {
            return;
        }
        while !self.fits(unit, limit) {
            let idle = (0..self.all.len()).filter(|&other| !self.is_away(other) && self.all[other].num_uses == 0);
            let Some(victim) = idle.max_by_key(|&other| next_need(other).unwrap_or(usize::MAX)) else { break };
            self.release(victim, answer);
        }
        self.start(unit, answer);
    }

    /// Whether the unit stays after a use that the plan does not have: as before it. None while it is in use anyway.
    pub(super) fn stays_after_extra_use(&self, unit: usize) -> Option<bool> {
        (self.all[unit].num_uses == 0).then(|| !self.is_away(unit))
    }

    /// A use begins; `stays` says whether the unit stays when its last use ends. None leaves that as it is now.
    pub(super) fn enter(&mut self, unit: usize, stays: Option<bool>) {
        let resident = &mut self.all[unit];
        if resident.num_uses == 0 {
            self.used_nbytes += resident.nbytes;
        }
        resident.num_uses += 1;
        resident.stays = stays.unwrap_or(resident.stays);
    }

    /// Whether the unit must be waited for; from then on it is ready.
    pub(super) fn wait(&mut self, unit: usize) -> bool {
        std::mem::replace(&mut self.all[unit].state, State::Ready) == State::Started
    }

    /// A use ends, and with the last one the unit is released unless it stays.
    pub(super) fn leave(&mut self, unit: usize, answer: &mut Answer) {
        let resident = &mut self.all[unit];
        resident.num_uses -= 1;
        if resident.num_uses == 0 {
            self.used_nbytes -= resident.nbytes;
            if !resident.stays {
                self.release(unit, answer);
            }
        }
    }

    /// Releases the unit if it is here and not in use.
    pub(super) fn release_idle(&mut self, unit: usize, answer: &mut Answer) {
        if !self.is_away(unit) && self.all[unit].num_uses == 0 {
            self.release(unit, answer);
        }
    }

    /// Releases everything; no use is open any more.
    pub(super) fn release_all(&mut self, answer: &mut Answer) {
        for unit in 0..self.all.len() {
            self.all[unit].num_uses = 0;
            self.release_idle(unit, answer);
        }
        self.used_nbytes = 0;
    }

    fn release(&mut self, unit: usize, answer: &mut Answer) {
        let resident = &mut self.all[unit];
        resident.state = State::Away;
        resident.stays = false;
        self.live_nbytes -= resident.nbytes;
        answer.release.push(unit);
    }
}
