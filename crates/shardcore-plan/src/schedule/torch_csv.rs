//! The schedule files of `torch.distributed.pipelining`: what its `_dump_csv` writes and its `_load_csv` reads.
//!
//! One line a rank, one cell an action: `2F0`, `1SEND_F3`, `0UNSHARD`. A composite is `(0F3;1B2)OVERLAP_F_B`, an empty
//! cell an idle step. A file holds compute actions only (torch lowers them itself), or communication as well; then
//! torch from 2.15 on wants each send and each reduction waited for in the file (`WAIT_SEND_F`, `WAIT_REDUCE_GRAD`),
//! which torch before knows not. Here a wait is no action: writing puts waits where torch's own lowering does, reading
//! checks them and leaves them out.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::action::{Action, ActionKind};
use super::check::strictest_communication;
use super::format::split_number;
use super::lower::{Lowering, with_slots};
use super::named::nearest;
use super::placement::Placement;
use super::program::{Gating, Header, MAX_UNITS, Schedule};
use crate::error::{PlanError, Result, shortened};

const OVERLAP: &str = "OVERLAP_F_B";
const REDUCE: &str = "REDUCE_GRAD";
const WAIT: &str = "WAIT_";

impl Schedule {
    /// The schedule as torch's CSV, with `waits` as torch 2.15 wants them or without, for torch before.
    ///
    /// # Errors
    /// [`PlanError::NoSuchForm`] for what torch has no form for: two chains, sequence slices, programs without a
    /// backward, tied reductions and optimizer steps.
    pub fn to_torch_csv(&self, waits: bool) -> Result<String> {
        let cannot = |reason: &str| Err(PlanError::NoSuchForm { form: "torch's CSV", reason: reason.to_owned() });
        if self.placement().num_chains() > 1 {
            return cannot(
                "there every micro-batch runs through every stage, but this one has two copies of the model",
            );
        }
        if self.header().num_slices > 1 {
            return cannot("it knows no slices of a sequence");
        }
        if self.is_forward_only() {
            return cannot(
                "torch refuses programs without a backward; its eval() runs a training schedule forward only",
            );
        }
        let mut text = String::new();
        for (rank, program) in self.programs().iter().enumerate() {
            let unknown = |action: &&Action| name_of(action.kind).is_none();
            if let Some(action) = program.iter().find(unknown) {
                return cannot(&format!("rank {rank} has {action}, which torch leaves to the caller"));
            }
            text.push_str(&row(program, waits).join(","));
            text.push_str("\r\n"); // As Python's csv module ends lines.
        }
        Ok(text)
    }

    /// Reads torch's CSV. Ranks are lines; stages and micro-batches are those that appear. A file with communication is
    /// declared for the strictest way of delivery under which it runs, and lowered for what its actions say
    /// ([`Lowering::inferred`]). Spaces around a cell are as torch reads them; every other letter counts.
    ///
    /// # Errors
    /// [`PlanError::BadScheduleText`] naming line and column; [`PlanError::BadScheduleName`].
    pub fn from_torch_csv(name: &str, text: &str) -> Result<Self> {
        let mut file = File::default();
        for (index, line) in text.lines().enumerate() {
            file.read_line(index + 1, line)?;
        }
        file.into_schedule(name)
    }
}

/// The cells of one rank.
fn row(program: &[Action], waits: bool) -> Vec<String> {
    let mut cells = Vec::with_capacity(program.len());
    let mut unwaited = BTreeSet::new();
    for composite in program.chunk_by(|action, _| action.with_next) {
        cells.push(match composite {
            [action] => cell(*action),
            parts => {
                let parts: Vec<String> = parts.iter().map(|action| cell(*action)).collect();
                format!("({}){OVERLAP}", parts.join(";"))
            }
        });
        for &action in if waits { composite } else { &[] } {
            match action.kind {
                ActionKind::Reduce => cells.push(format!("{}{WAIT}{REDUCE}", action.stage)),
                ActionKind::SendForward | ActionKind::SendBackward => {
                    unwaited.insert(action);
                }
                // The gradient has come back, so the output has long arrived: this wait never stalls.
                ActionKind::Backward | ActionKind::InputGrad => {
                    let sent = Action::new(ActionKind::SendForward, action.stage, action.microbatch);
                    if unwaited.remove(&sent) {
                        cells.push(wait(sent));
                    }
                }
                _ => {}
            }
        }
    }
    cells.extend(unwaited.into_iter().map(wait));
    cells
}

fn cell(action: Action) -> String {
    let mut text = format!("{}{}", action.stage, name_of(action.kind).unwrap_or_default());
    if action.kind.has_microbatch() {
        let _ = write!(text, "{}", action.microbatch); // Writing to a String cannot fail.
    }
    text
}

fn wait(send: Action) -> String {
    format!("{}{WAIT}{}{}", send.stage, send.kind, send.microbatch)
}

/// What one cell says.
enum Cell {
    Act(Action),
    WaitSend(Action),
    WaitReduce(u32),
}

/// What has been read so far.
#[derive(Default)]
struct File {
    programs: Vec<Vec<Action>>,
    /// The rank of each stage, by the first of its actions.
    stages: BTreeMap<u32, u32>,
    num_microbatches: u32,
    lowered: bool,
}

impl File {
    fn read_line(&mut self, line: usize, text: &str) -> Result<()> {
        let mut program = Vec::new();
        let mut open = BTreeSet::new();
        let mut column = 1;
        for cell in text.split(',') {
            let start = column + cell.len() - cell.trim_start_matches(' ').len();
            let place = Place { line, column: start };
            match cell.trim_matches(' ') {
                "" | "\"\"" => {} // An idle step; Python's csv module quotes it where a line has no other cell.
                inner => self.read_cell(place, inner, &mut program, &mut open)?,
            }
            column += cell.chars().count() + 1;
        }
        if !program.iter().any(|action| action.kind.is_compute()) {
            let reason =
                format!("rank {} computes nothing; every rank has a line with its actions", self.programs.len());
            return Err(Place { line, column: 1 }.wrong(reason));
        }
        self.programs.push(program);
        Ok(())
    }

    /// `open` holds what was sent or reduced on this rank and not waited for.
    fn read_cell(
        &mut self,
        place: Place,
        text: &str,
        program: &mut Vec<Action>,
        open: &mut BTreeSet<Action>,
    ) -> Result<()> {
        if text.starts_with('(') {
            return self.read_composite(place, text, program);
        }
        let (action, waited) = match parse(place, text)? {
            Cell::Act(action) => (action, false),
            Cell::WaitSend(send) => (send, true),
            Cell::WaitReduce(stage) => (Action::new(ActionKind::Reduce, stage, 0), true),
        };
        if !waited {
            if action.kind.is_send() || action.kind == ActionKind::Reduce {
                open.insert(action);
            }
            self.note(place, action)?;
            program.push(action);
        } else if !open.remove(&action) {
            return Err(place.wrong(format!("{text} waits for what has not been started on this rank")));
        }
        Ok(())
    }

    fn read_composite(&mut self, place: Place, text: &str, program: &mut Vec<Action>) -> Result<()> {
        let Some(parts) = text.strip_prefix('(').and_then(|text| text.strip_suffix(OVERLAP)?.strip_suffix(')')) else {
            return Err(
                place.wrong(format!("{:?} is no composite: expected (action;action){OVERLAP}", shortened(text)))
            );
        };
        let mut column = place.column + 1;
        let first = program.len();
        for part in parts.split(';') {
            let here = Place { column, ..place };
            match parse(here, part)? {
                Cell::Act(action) if action.kind.is_compute() => {
                    self.note(here, action)?;
                    program.push(action.joined());
                }
                _ => return Err(here.wrong(format!("{part} cannot be part of a composite: expected F, B, I or W"))),
            }
            column += part.chars().count() + 1;
        }
        if program.len() - first < 2 {
            return Err(place.wrong("a composite has at least two parts"));
        }
        if let Some(last) = program.last_mut() {
            last.with_next = false;
        }
        Ok(())
    }

    /// Learns from an action where its stage is, and how many micro-batches there are.
    fn note(&mut self, place: Place, action: Action) -> Result<()> {
        self.lowered |= !action.kind.is_compute();
        if action.microbatch >= MAX_UNITS {
            return Err(place.wrong(format!("{action} is for micro-batch {}: expected below 2^24", action.microbatch)));
        }
        self.num_microbatches = self.num_microbatches.max(action.microbatch + 1);
        let Ok(rank) = u32::try_from(self.programs.len()) else {
            return Err(place.wrong("too many ranks"));
        };
        let known = *self.stages.entry(action.stage).or_insert(rank);
        if known != rank {
            let reason = format!("{action} is on rank {rank}, but stage {} was on rank {known} before", action.stage);
            return Err(place.wrong(reason));
        }
        Ok(())
    }

    fn into_schedule(self, name: &str) -> Result<Schedule> {
        let end = Place { line: self.programs.len() + 1, column: 1 };
        if self.programs.is_empty() {
            return Err(end.wrong("the file is empty; every rank has a line with its actions"));
        }
        let gap = self.stages.keys().zip(0..).find(|(stage, expected)| *stage != expected);
        if let Some((stage, missing)) = gap {
            return Err(end.wrong(format!("stage {missing} is nowhere, though there is a stage {stage}")));
        }
        let placement = Placement::custom(self.stages.into_values().collect())?;
        // torch runs the parts of a composite one after the other, each behind its own receive.
        let header = Header { gating: Gating::Own, ..Header::new(name, placement, self.num_microbatches) };
        if !self.lowered {
            return Schedule::new(header, self.programs);
        }
        let schedule = Schedule::new_lowered(header, self.programs, Lowering::default())?;
        let schedule = with_slots(&schedule.with_inferred_lowering())?;
        Ok(match strictest_communication(&schedule) {
            Some(comm) => schedule.declared_for(comm),
            None => schedule, // It runs under none, as `check` will say.
        })
    }
}

/// A place in the file, both numbers counted from 1.
#[derive(Clone, Copy)]
struct Place {
    line: usize,
    column: usize,
}

impl Place {
    fn wrong(self, reason: impl Into<String>) -> PlanError {
        PlanError::BadScheduleText { line: self.line, column: self.column, reason: reason.into() }
    }
}

fn parse(place: Place, text: &str) -> Result<Cell> {
    let wrong = |reason: &str| place.wrong(format!("{:?} is no action: {reason}", shortened(text)));
    let form = "expected a stage, a kind and a micro-batch, such as 2F0, numbers without leading zeros";
    let (stage, rest) = split_number(text).ok_or_else(|| wrong(form))?;
    let (name, microbatch) = rest.split_at(rest.trim_end_matches(|letter: char| letter.is_ascii_digit()).len());
    let (bare, waits) = match name.strip_prefix(WAIT) {
        Some(bare) => (bare, true),
        None => (name, false),
    };
    let kind = kind_of(bare).map_err(|reason| wrong(&reason))?;
    let microbatch = match (kind.has_microbatch(), microbatch) {
        (false, "") => 0,
        (false, _) => return Err(wrong("this kind takes no micro-batch")),
        (true, digits) => match split_number(digits) {
            Some((number, "")) => number,
            _ => return Err(wrong("expected the number of a micro-batch at its end, without leading zeros")),
        },
    };
    let action = Action::new(kind, stage, microbatch);
    match (waits, kind) {
        (false, _) => Ok(Cell::Act(action)),
        (true, ActionKind::Reduce) => Ok(Cell::WaitReduce(stage)),
        (true, kind) if kind.is_send() => Ok(Cell::WaitSend(action)),
        (true, _) => Err(wrong("only sends and reductions are waited for")),
    }
}

/// The kind of that name in torch, or why there is none.
fn kind_of(name: &str) -> Result<ActionKind, String> {
    let known = ActionKind::ALL.iter().filter_map(|&kind| Some((name_of(kind)?, kind)));
    if let Some((_, kind)) = known.clone().find(|&(known, _)| known == name) {
        return Ok(kind);
    }
    if let Ok(kind) = ActionKind::from_name(name) {
        let form = name_of(kind).map_or(String::new(), |known| format!(", it writes {known}"));
        return Err(format!("torch has no such kind{form}"));
    }
    let guess = nearest(name, known.map(|(known, _)| known));
    let guess = guess.map_or(String::new(), |guess| format!("; did you mean {guess}?"));
    Err(format!("expected a kind that torch knows, such as F or SEND_B{guess}"))
}

/// The name of a kind in torch, where it has one.
fn name_of(kind: ActionKind) -> Option<&'static str> {
    match kind {
        ActionKind::Reduce => Some(REDUCE),
        ActionKind::TiedReduce | ActionKind::Optimizer => None,
        kind => Some(kind.name()),
    }
}
