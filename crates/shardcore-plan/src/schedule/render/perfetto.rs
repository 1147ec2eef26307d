//! A schedule as a trace: one track per rank, arrows for messages, a counter for the memory of each rank.
//!
//! The format is the JSON of Chrome's trace events, which <https://ui.perfetto.dev> opens.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::{cells, label, settled};
use crate::schedule::action::{Action, ActionKind};
use crate::schedule::program::Schedule;
use crate::schedule::simulate::{Interval, Simulation};

/// The trace of a simulated schedule, in which one unit of time is shown as so many microseconds.
#[must_use]
pub fn perfetto(schedule: &Schedule, run: &Simulation, microseconds: f64) -> String {
    let mut trace = Trace { text: String::from("{\"displayTimeUnit\":\"ms\",\"traceEvents\":["), microseconds };
    trace.event(&format!(
        "\"name\":\"process_name\",\"ph\":\"M\",\"pid\":0,\"args\":{{\"name\":\"{}\"}}",
        schedule.header().name
    ));
    for rank in 0..schedule.programs().len() {
        trace.event(&format!(
            "\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":0,\"tid\":{rank},\"args\":{{\"name\":\"rank {rank}\"}}"
        ));
        trace.event(&format!(
            "\"name\":\"thread_sort_index\",\"ph\":\"M\",\"pid\":0,\"tid\":{rank},\"args\":{{\"sort_index\":{rank}}}"
        ));
        for (action, interval) in cells(schedule, run, rank) {
            trace.slice(schedule, rank, action, interval);
        }
        for point in settled(run.memory.get(rank).map_or(&[], Vec::as_slice)) {
            let time = trace.time(point.time);
            let held = point.held;
            trace.event(&format!(
                "\"name\":\"memory of rank {rank}\",\"ph\":\"C\",\"pid\":0,\"ts\":{time},\"args\":{{\"held\":{held}}}"
            ));
        }
    }
    trace.flows(schedule, run);
    trace.text.push_str("\n]}\n");
    trace.text
}

struct Trace {
    text: String,
    microseconds: f64,
}

impl Trace {
    fn event(&mut self, fields: &str) {
        let separator = if self.text.ends_with('[') { "" } else { "," };
        let _ = write!(self.text, "{separator}\n{{{fields}}}");
    }

    fn time(&self, time: f64) -> f64 {
        time * self.microseconds
    }

    fn slice(&mut self, schedule: &Schedule, rank: usize, action: Action, interval: Interval) {
        let name = label(schedule, action);
        let (start, length) = (self.time(interval.start), self.time(interval.end - interval.start));
        let Action { kind, stage, microbatch, .. } = action;
        self.event(&format!(
            "\"name\":\"{name}\",\"cat\":\"{kind}\",\"ph\":\"X\",\"pid\":0,\"tid\":{rank},\"ts\":{start},\"dur\":{length},\"args\":{{\"stage\":{stage},\"microbatch\":{microbatch}}}"
        ));
    }

    /// An arrow from each result to the computation on another rank that takes it.
    fn flows(&mut self, schedule: &Schedule, run: &Simulation) {
        let placement = schedule.placement();
        let mut made = BTreeMap::new();
        for rank in 0..schedule.programs().len() {
            for (action, interval) in cells(schedule, run, rank) {
                if let Some(forward) = direction(action.kind) {
                    made.insert((forward, action.stage, action.microbatch), (rank, interval));
                }
            }
        }
        let mut id = 0_u64;
        for (&(forward, stage, unit), &(rank, from)) in &made {
            let taker = if forward { placement.next(stage) } else { placement.previous(stage) };
            let use_of = taker.and_then(|taker| made.get(&(forward, taker, unit)));
            let Some(&(other, to)) = use_of.filter(|(other, _)| *other != rank) else { continue };
            let name = if forward { "activation" } else { "gradient" };
            // An arrow begins and ends inside a slice: at the middle of the one and at the start of the other.
            let (leaves, arrives) = (self.time(f64::midpoint(from.start, from.end)), self.time(to.start));
            self.event(&format!("\"name\":\"{name}\",\"cat\":\"message\",\"ph\":\"s\",\"id\":{id},\"pid\":0,\"tid\":{rank},\"ts\":{leaves}"));
            self.event(&format!("\"name\":\"{name}\",\"cat\":\"message\",\"ph\":\"f\",\"bp\":\"e\",\"id\":{id},\"pid\":0,\"tid\":{other},\"ts\":{arrives}"));
            id += 1;
        }
    }
}

/// Whether what a computation hands on goes forward; `None` for a weight gradient.
fn direction(kind: ActionKind) -> Option<bool> {
    match kind {
        ActionKind::Forward => Some(true),
        ActionKind::Backward | ActionKind::InputGrad => Some(false),
        _ => None,
    }
}
