//! Where a rank's sends and receives stand.

use super::Inserted;
use super::times::{Direction, Times, blocks};
use crate::schedule::action::{Action, ActionKind};
use crate::schedule::program::Gating;

/// The place of a message in the one order of all messages (see [`Times::order`]). No two have the same.
type Order = (u64, u32);

/// A send or a receive of one rank.
#[derive(Clone, Copy)]
struct Message {
    order: Order,
    action: Action,
    /// The last gap that is right; a send has only this one.
    latest: u32,
    /// Of a receive, which of the rank's streams it belongs to.
    stream: Option<u32>,
}

/// What a stage of the rank at hand receives in one direction.
#[derive(Clone, Default)]
struct Stream {
    /// The receives, in the order in which the program uses them.
    receives: Vec<Message>,
    /// The gaps behind the computations that use a receive, in the order of the program.
    used: Vec<u32>,
    num_posted: usize,
}

/// Plans the messages of rank after rank. What is used anew for each rank keeps its memory.
pub(super) struct Messages<'a> {
    times: &'a Times,
    gating: Gating,
    receives_ahead: usize,
    planned: Vec<Message>,
    streams: Vec<Stream>,
}

impl<'a> Messages<'a> {
    pub(super) fn new(times: &'a Times, gating: Gating) -> Self {
        let (planned, streams) = (Vec::new(), Vec::new());
        Self { times, gating, receives_ahead: times.receives_ahead as usize, planned, streams }
    }

    /// The sends and receives of a rank that holds these stages, in their order: a send directly behind its
    /// computation, a receive as early as the order of the messages and the number of receives ahead allow.
    pub(super) fn of_rank(&mut self, rank: u32, stages: &[u32], program: &[Action]) -> Vec<Inserted> {
        self.collect(rank, stages, program);
        // Fast on what `collect` leaves: a few runs that are in order already, or nearly.
        self.planned.sort_by_key(|message| message.order);
        let mut latest = u32::MAX;
        for message in self.planned.iter_mut().rev() {
            latest = latest.min(message.latest);
            message.latest = latest;
        }
        let mut gap = 0;
        let mut inserted = Vec::with_capacity(self.planned.len());
        for message in &self.planned {
            gap = match message.stream {
                None => message.latest,
                Some(stream) => gap.max(self.streams[stream as usize].post(self.receives_ahead)).min(message.latest),
            };
            inserted.push(Inserted { gap, action: message.action });
        }
        inserted
    }

    /// The messages: first all sends, which leave in the order of the program, then stream after stream of receives.
    fn collect(&mut self, rank: u32, stages: &[u32], program: &[Action]) {
        self.planned.clear();
        for stream in &mut self.streams {
            stream.receives.clear();
            stream.used.clear();
            stream.num_posted = 0;
        }
        self.streams.resize(2 * stages.len(), Stream::default());
        for (before, after, block) in blocks(program, self.gating) {
            for &action in block {
                if let Ok(local) = stages.binary_search(&action.stage) {
                    self.receive(rank, local, action, [before, after]);
                }
                self.planned.extend(self.send(rank, action, after));
            }
        }
        self.planned.extend(self.streams.iter().flat_map(|stream| &stream.receives));
    }

    fn receive(&mut self, rank: u32, local: usize, action: Action, [before, after]: [u32; 2]) {
        let source = self.times.source(action).filter(|(_, source)| source.rank != rank);
        let Some((direction, source)) = source else { return };
        let kind = match direction {
            Direction::Forward => ActionKind::RecvForward,
            Direction::Backward => ActionKind::RecvBackward,
        };
        let stream = 2 * local + direction as usize;
        self.streams[stream].used.push(after);
        self.streams[stream].receives.push(Message {
            order: self.times.order(direction, source.stage, action.microbatch),
            action: Action::new(kind, action.stage, action.microbatch),
            latest: before,
            stream: u32::try_from(stream).ok(),
        });
    }

    fn send(&self, rank: u32, action: Action, after: u32) -> Option<Message> {
        let (direction, _) = self.times.target(action).filter(|(_, target)| target.rank != rank)?;
        let kind = match direction {
            Direction::Forward => ActionKind::SendForward,
            Direction::Backward => ActionKind::SendBackward,
        };
        Some(Message {
            // Both ends of a message have the place of the result that it carries.
            order: self.times.order(direction, action.stage, action.microbatch),
            action: Action::new(kind, action.stage, action.microbatch),
            latest: after,
            stream: None,
        })
    }
}

impl Stream {
    /// The first gap at which there is room for its next receive.
    fn post(&mut self, receives_ahead: usize) -> u32 {
        let before = self.num_posted.checked_sub(receives_ahead);
        self.num_posted += 1;
        before.map_or(0, |turn| self.used[turn])
    }
}
