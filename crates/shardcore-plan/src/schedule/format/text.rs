//! The text form: a header of one `key value` a line, then one line a rank.
//!
//! ```text
//! shardcore.pipeline_schedule.v1
//! name 1f1b
//! num_ranks 2
//! num_chunks 1
//! num_microbatches 2
//! num_slices 1
//! num_chains 1
//! placement 0 1
//! gating all
//! comm blocking
//! lowered no
//! rank 0: 0F0 0F1 0B0 0B1
//! rank 1: 1F0 1B0 1F1 1B1
//! ```
//!
//! A lowered schedule has, behind `lowered yes`, the lines `zero_stage`, `reduce`, `optimizer`, `tied`,
//! `receives_ahead` and `max_unsharded`.

use std::fmt::Write as _;

use super::SCHEDULE_FORMAT;
use super::action::{parse_composite, split_number};
use crate::error::{PlanError, Result, shortened};
use crate::schedule::action::Action;
use crate::schedule::lower::{Lowering, OptimizerStep, ReduceTiming};
use crate::schedule::placement::Placement;
use crate::schedule::program::{CommModel, Gating, Header, Schedule};

impl Schedule {
    /// The schedule as text, which [`Schedule::from_text`] reads back.
    #[must_use]
    pub fn to_text(&self) -> String {
        let Header { name, num_microbatches, num_slices, placement, gating, comm } = self.header();
        let mut text = String::with_capacity(256 + 12 * self.num_actions());
        let mut line = |key: &str, value: &dyn std::fmt::Display| {
            let _ = writeln!(text, "{key} {value}"); // Writing to a String cannot fail.
        };
        line("name", name);
        line("num_ranks", &placement.num_ranks());
        line("num_chunks", &placement.num_chunks());
        line("num_microbatches", num_microbatches);
        line("num_slices", num_slices);
        line("num_chains", &placement.num_chains());
        line("placement", &joined(placement.ranks(), " "));
        line("gating", gating);
        line("comm", comm);
        line("lowered", &if self.is_lowered() { "yes" } else { "no" });
        if let Some(lowering) = self.lowering() {
            line("zero_stage", &lowering.zero_stage.map_or_else(|| NONE.to_owned(), |stage| stage.to_string()));
            line("reduce", &lowering.reduce);
            line("optimizer", &lowering.optimizer);
            line("tied", &tied_text(&lowering.tied));
            line("receives_ahead", &lowering.most_receives_ahead());
            line("max_unsharded", &lowering.max_unsharded);
        }
        for (rank, program) in self.programs().iter().enumerate() {
            let _ = write!(text, "rank {rank}:");
            let mut joined = false;
            for action in program {
                let _ = write!(text, "{}{action}", if joined { "" } else { " " });
                joined = action.with_next;
            }
            text.push('\n');
        }
        format!("{SCHEDULE_FORMAT}\n{text}")
    }

    /// Reads what [`Schedule::to_text`] wrote, and nothing else.
    ///
    /// # Errors
    /// [`PlanError::BadScheduleText`] with the line and column (from 1) of what is wrong, and those of
    /// [`Schedule::new`].
    pub fn from_text(text: &str) -> Result<Self> {
        let mut reader = Reader::new(text);
        reader.format()?;
        let (header, [num_ranks, num_chunks]) = reader.header()?;
        let placement = &header.placement;
        if [num_ranks, num_chunks] != [placement.num_ranks(), placement.num_chunks()] {
            let [ranks, chunks] = [placement.num_ranks(), placement.num_chunks()];
            return Err(reader.error(
                0,
                format!(
                    "the placement has {ranks} ranks and {chunks} chunks per rank, not {num_ranks} and {num_chunks}"
                ),
            ));
        }
        header.check()?;
        let lowering = reader.lowering()?;
        let programs = (0..num_ranks).map(|rank| reader.program(rank)).collect::<Result<Vec<_>>>()?;
        reader.end()?;
        check_last_break(text)?;
        match lowering {
            None => Self::new(header, programs),
            Some(lowering) => Self::new_lowered(header, programs, lowering),
        }
    }
}

/// Refuses a text whose last line does not end: where it was cut, numbers may have lost digits.
fn check_last_break(text: &str) -> Result<()> {
    if text.ends_with('\n') {
        return Ok(());
    }
    let last = text.rfind('\n').map_or(0, |at| at + 1);
    let (line, column) = (text.split('\n').count(), text.len() - last + 1);
    let reason = "expected a line break behind the last line, got the end: the text may have been cut".to_owned();
    Err(PlanError::BadScheduleText { line, column, reason })
}

/// What stands where there is nothing.
const NONE: &str = "none";

pub(super) fn joined(numbers: &[u32], separator: &str) -> String {
    numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(separator)
}

/// `0+5 1+2`: the groups, each joined by a plus.
fn tied_text(groups: &[Vec<u32>]) -> String {
    let groups: Vec<String> = groups.iter().map(|group| joined(group, "+")).collect();
    if groups.is_empty() { NONE.to_owned() } else { groups.join(" ") }
}

/// Reads line after line; knows where it is for errors.
struct Reader<'a> {
    lines: std::str::Split<'a, char>,
    line: usize,
    /// Letters before the value on the line.
    offset: usize,
}

impl<'a> Reader<'a> {
    fn new(text: &'a str) -> Self {
        Self { lines: text.strip_suffix('\n').unwrap_or(text).split('\n'), line: 0, offset: 0 }
    }

    /// An error behind `column` letters of the value.
    fn error(&self, column: usize, reason: String) -> PlanError {
        PlanError::BadScheduleText { line: self.line, column: self.offset + column + 1, reason }
    }

    fn next_line(&mut self) -> Option<&'a str> {
        (self.line, self.offset) = (self.line + 1, 0);
        self.lines.next()
    }

    /// The value on the next line, which must begin with the key.
    fn value(&mut self, key: &str) -> Result<&'a str> {
        let line = self.next_line();
        let value = line.and_then(|line| line.strip_prefix(key)?.strip_prefix(' '));
        let got = line.map_or_else(|| "the end".to_owned(), |line| format!("{:?}", shortened(line)));
        let value = value.ok_or_else(|| self.error(0, format!("expected {key:?} and a value, got {got}")))?;
        self.offset = key.len() + 1;
        Ok(value)
    }

    fn number(&mut self, key: &str) -> Result<u32> {
        let value = self.value(key)?;
        self.whole_number(0, value)
    }

    fn whole_number(&self, column: usize, text: &str) -> Result<u32> {
        let number = split_number(text).filter(|(_, rest)| rest.is_empty());
        let refused = || self.error(column, format!("expected a whole number below 2^32, got {:?}", shortened(text)));
        number.map(|(number, _)| number).ok_or_else(refused)
    }

    /// Numbers with one separator between two.
    fn numbers(&self, column: usize, text: &str, separator: char) -> Result<Vec<u32>> {
        let mut column = column;
        let number = |part: &str| {
            let number = self.whole_number(column, part);
            column += part.len() + 1;
            number
        };
        text.split(separator).map(number).collect()
    }

    fn named<T>(&mut self, key: &str, from_name: impl Fn(&str) -> Result<T>) -> Result<T> {
        let value = self.value(key)?;
        from_name(value).map_err(|error| self.error(0, error.to_string()))
    }

    fn format(&mut self) -> Result<()> {
        match self.next_line() {
            Some(SCHEDULE_FORMAT) => Ok(()),
            line => {
                let got = line.map(shortened).unwrap_or_default();
                Err(self.error(0, format!("expected {SCHEDULE_FORMAT:?}, got {got:?}")))
            }
        }
    }

    /// The header, and the numbers of ranks and chunks that it states.
    fn header(&mut self) -> Result<(Header, [u32; 2])> {
        let name = self.value("name")?.to_owned();
        let stated = [self.number("num_ranks")?, self.number("num_chunks")?];
        let (num_microbatches, num_slices) = (self.number("num_microbatches")?, self.number("num_slices")?);
        let num_chains = self.number("num_chains")?;
        let ranks = self.value("placement")?;
        let ranks = self.numbers(0, ranks, ' ')?;
        let placement = Placement::new(ranks, num_chains).map_err(|error| self.error(0, error.to_string()))?;
        let gating = self.named("gating", Gating::from_name)?;
        let comm = self.named("comm", CommModel::from_name)?;
        Ok((Header { name, num_microbatches, num_slices, placement, gating, comm }, stated))
    }

    fn lowering(&mut self) -> Result<Option<Lowering>> {
        match self.value("lowered")? {
            "no" => Ok(None),
            "yes" => Ok(Some(Lowering {
                zero_stage: self.zero_stage()?,
                reduce: self.named("reduce", ReduceTiming::from_name)?,
                optimizer: self.named("optimizer", OptimizerStep::from_name)?,
                tied: self.tied()?,
                receives_ahead: Some(self.number("receives_ahead")?),
                max_unsharded: self.number("max_unsharded")?,
            })),
            other => Err(self.error(0, format!("expected \"yes\" or \"no\", got {:?}", shortened(other)))),
        }
    }

    fn zero_stage(&mut self) -> Result<Option<u8>> {
        match self.value("zero_stage")? {
            NONE => Ok(None),
            stage => {
                let number = self.whole_number(0, stage)?;
                let stage = u8::try_from(number).ok();
                stage.map(Some).ok_or_else(|| self.error(0, format!("expected none, 0, 1, 2 or 3, got {number}")))
            }
        }
    }

    fn tied(&mut self) -> Result<Vec<Vec<u32>>> {
        match self.value("tied")? {
            NONE => Ok(Vec::new()),
            groups => {
                let mut column = 0;
                let group = |group: &str| {
                    let stages = self.numbers(column, group, '+');
                    column += group.len() + 1;
                    stages
                };
                groups.split(' ').map(group).collect()
            }
        }
    }

    fn program(&mut self, rank: u32) -> Result<Vec<Action>> {
        let key = format!("rank {rank}:");
        let line = self.next_line();
        let got = line.map_or_else(|| "the end".to_owned(), |line| format!("{:?}", shortened(line)));
        let Some(actions) = line.and_then(|line| line.strip_prefix(&key)) else {
            return Err(self.error(0, format!("expected {key:?} and its actions, got {got}")));
        };
        self.offset = key.len();
        let mut program = Vec::new();
        let mut parts = actions.split(' ');
        if parts.next() != Some("") {
            return Err(self.error(0, format!("expected a space behind {key:?}")));
        }
        let mut column = 1;
        for part in parts {
            let refused = |(letters, reason)| self.error(column + letters, reason);
            parse_composite(part, &mut program).map_err(refused)?;
            column += part.len() + 1;
        }
        Ok(program)
    }

    fn end(&mut self) -> Result<()> {
        match self.next_line() {
            None => Ok(()),
            Some(line) => Err(self.error(0, format!("expected the end, got {:?}", shortened(line)))),
        }
    }
}
