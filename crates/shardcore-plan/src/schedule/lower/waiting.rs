//! How many results wait at each stage for their use, and when there was room for the next.

use super::times::Direction;
use crate::schedule::program::Schedule;

/// The inputs that stages take from other ranks: so many of a stage and direction may wait until they are used.
///
/// Where all ranks wait because of that, [`Waiting::widen`] makes room. What a rank computes does not depend on when
/// the others go on, so a run comes to a stop in the same state however it got there, also if there was less room in the
/// meantime (Kahn, "The semantics of a simple language for parallel programming", 1974). So room that is made only where
/// a run has stopped is room without which it stops, and in the end there is the least with which it does not (Parks,
/// "Bounded scheduling of process networks", 1995, chapter 4).
pub(super) struct Waiting {
    /// The most inputs that may wait, at least 1.
    window: usize,
    num_units: usize,
    /// How many inputs each stage and direction has got, and used.
    made: Vec<usize>,
    used: Vec<usize>,
    /// When the last inputs of each stage and direction were used, in a ring; empty if all may wait.
    ends: Vec<f64>,
    /// The length of a ring: a power of two, at least the window.
    capacity: usize,
}

/// The input of a stage in one direction.
pub(super) fn stream(direction: Direction, stage: u32) -> usize {
    2 * stage as usize + direction as usize
}

impl Waiting {
    pub(super) fn new(schedule: &Schedule, window: u32) -> Self {
        let (window, num_units) = (window as usize, schedule.header().num_units() as usize);
        let counts = vec![0; 2 * schedule.num_stages() as usize];
        let mut waiting = Self { window, num_units, used: counts.clone(), made: counts, ends: Vec::new(), capacity: 0 };
        waiting.fit_rings();
        waiting
    }

    pub(super) fn window(&self) -> usize {
        self.window
    }

    /// When there was room for the next input; `None` while there is none.
    pub(super) fn room(&self, stream: usize) -> Option<f64> {
        match self.made[stream].checked_sub(self.window) {
            Some(turn) if self.is_bounded() => (turn < self.used[stream]).then(|| self.ends[self.slot(stream, turn)]),
            _ => Some(0.0),
        }
    }

    /// An input has come: see [`Waiting::room`].
    pub(super) fn add(&mut self, stream: usize) {
        self.made[stream] += 1;
    }

    /// The first of the inputs that wait has been used.
    pub(super) fn take(&mut self, stream: usize, end: f64) {
        if self.is_bounded() {
            let slot = self.slot(stream, self.used[stream]);
            self.ends[slot] = end;
            self.used[stream] += 1;
        }
    }

    /// Makes room for one more input of each stage and direction.
    pub(super) fn widen(&mut self) {
        self.window += 1;
        if self.is_bounded() && self.window > self.capacity {
            self.fit_rings();
        }
    }

    fn is_bounded(&self) -> bool {
        self.window < self.num_units
    }

    fn slot(&self, stream: usize, turn: usize) -> usize {
        stream * self.capacity + (turn & (self.capacity - 1))
    }

    /// Gives the rings the length that the window needs. A use that is in no ring any more ended before the latest
    /// input left, so that its time makes no difference.
    fn fit_rings(&mut self) {
        if !self.is_bounded() {
            return;
        }
        let capacity = self.window.next_power_of_two();
        let mut ends = vec![0.0; self.used.len() * capacity];
        for (stream, &used) in self.used.iter().enumerate() {
            for turn in used.saturating_sub(self.capacity)..used {
                ends[stream * capacity + (turn & (capacity - 1))] = self.ends[self.slot(stream, turn)];
            }
        }
        (self.ends, self.capacity) = (ends, capacity);
    }
}
