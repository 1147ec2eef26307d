//! Where a rank's sends and receives stand.

use super::Inserted;
use super::times::{Direction, Times, composites};
use crate::schedule::action::{Action, ActionKind};

/// The place of a message in the one order of all messages: the time at which it is sent, then what it is. No two have
/// the same.
type Order = (u64, u32);

/// A send or a receive of one rank.
#[derive(Clone, Copy)]
struct Message {
    order: Order,
    action: Action,
    /// The first gap that the number of receives ahead allows, and the last gap that is right. A send has one.
    earliest: u32,
    latest: u32,
}

/// Plans the messages of rank after rank. What is used anew for each rank keeps its memory.
pub(super) struct Messages<'a> {
    times: &'a Times,
    receives_ahead: usize,
    planned: Vec<Message>,
    /// For each stage of the rank at hand and direction, the gaps behind the computations that used a receive.
    used: Vec<Vec<u32>>,
}

impl<'a> Messages<'a> {
    pub(super) fn new(times: &'a Times, receives_ahead: u32) -> Self {
        Self { times, receives_ahead: receives_ahead as usize, planned: Vec::new(), used: Vec::new() }
    }

    /// The sends and receives of a rank that holds these stages, in their order.
    pub(super) fn of_rank(&mut self, rank: u32, stages: &[u32], program: &[Action]) -> Vec<Inserted> {
        self.collect(rank, stages, program);
        self.planned.sort_unstable_by_key(|message| message.order);
        let mut latest = u32::MAX;
        for message in self.planned.iter_mut().rev() {
            latest = latest.min(message.latest);
            message.latest = latest;
        }
        let mut gap = 0;
        let place = |message: &Message| {
            gap = message.earliest.clamp(gap, message.latest.max(gap));
            Inserted { gap, action: message.action }
        };
        self.planned.iter().map(place).collect()
    }

    /// The messages in the order of the program.
    fn collect(&mut self, rank: u32, stages: &[u32], program: &[Action]) {
        self.planned.clear();
        self.used.iter_mut().for_each(Vec::clear);
        self.used.resize(2 * stages.len(), Vec::new());
        for (before, after, composite) in composites(program) {
            for &action in composite {
                let receive = stages.binary_search(&action.stage).ok();
                let receive = receive.and_then(|local| self.receive(rank, local, action, [before, after]));
                self.planned.extend(receive);
                self.planned.extend(self.send(rank, action, after));
            }
        }
    }

    fn receive(&mut self, rank: u32, local: usize, action: Action, [before, after]: [u32; 2]) -> Option<Message> {
        let (direction, source) = self.times.source(action).filter(|(_, source)| source.rank != rank)?;
        let kind = match direction {
            Direction::Forward => ActionKind::RecvForward,
            Direction::Backward => ActionKind::RecvBackward,
        };
        let used = &mut self.used[2 * local + direction as usize];
        let earliest = used.len().checked_sub(self.receives_ahead).map_or(0, |turn| used[turn]);
        used.push(after);
        Some(Message {
            order: self.order(direction, source.stage, action.microbatch),
            action: Action::new(kind, action.stage, action.microbatch),
            earliest,
            latest: before,
        })
    }

    fn send(&self, rank: u32, action: Action, after: u32) -> Option<Message> {
        let (direction, _) = self.times.target(action).filter(|(_, target)| target.rank != rank)?;
        let kind = match direction {
            Direction::Forward => ActionKind::SendForward,
            Direction::Backward => ActionKind::SendBackward,
        };
        Some(Message {
            order: self.order(direction, action.stage, action.microbatch),
            action: Action::new(kind, action.stage, action.microbatch),
            earliest: after,
            latest: after,
        })
    }

    /// `stage` is the one that sends, so both ends of a message have the same place.
    fn order(&self, direction: Direction, stage: u32, unit: u32) -> Order {
        let (time, stream) = (self.times.end(direction, stage, unit), 2 * stage + direction as u32);
        (u64::from(time) << 32 | u64::from(stream), unit)
    }
}
