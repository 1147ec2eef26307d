//! The JSON form: the same header and actions as the text form.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use super::SCHEDULE_FORMAT;
use super::action::{composite_text, parse_composite};
use crate::error::{PlanError, Result};
use crate::json::{read, write};
use crate::schedule::action::Action;
use crate::schedule::lower::{Lowering, OptimizerStep, ReduceTiming};
use crate::schedule::placement::Placement;
use crate::schedule::program::{CommModel, Gating, Header, Schedule};

/// `P` is programs to write, or those that were read.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document<'a, P> {
    format: Cow<'a, str>,
    name: Cow<'a, str>,
    num_ranks: u32,
    num_chunks: u32,
    num_microbatches: u32,
    num_slices: u32,
    num_chains: u32,
    placement: Cow<'a, [u32]>,
    gating: Cow<'a, str>,
    comm: Cow<'a, str>,
    lowering: Option<Keyed<LoweringDocument<'a>>>,
    programs: P,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LoweringDocument<'a> {
    zero_stage: Option<u8>,
    reduce: Cow<'a, str>,
    optimizer: Cow<'a, str>,
    tied: Cow<'a, [Vec<u32>]>,
    receives_ahead: u32,
    max_unsharded: u32,
}

/// An object with named fields, never a list of their values, which a derived reader would take too.
#[derive(Serialize)]
#[serde(transparent)]
struct Keyed<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Keyed<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(KeyedVisitor(PhantomData))
    }
}

struct KeyedVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for KeyedVisitor<T> {
    type Value = Keyed<T>;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map)).map(Keyed)
    }
}

/// Writes each composite as a string, without a copy of the programs in between.
struct Programs<'a>(&'a [Vec<Action>]);

impl Serialize for Programs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(|program| Composites(program)))
    }
}

struct Composites<'a>(&'a [Action]);

impl Serialize for Composites<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.chunk_by(|action, _| action.with_next).map(composite_text))
    }
}

impl Schedule {
    /// The schedule as a compact JSON document: `format`, the header's fields, `lowering` (null for one that is not
    /// lowered) and `programs`, a list of composites such as `"2F0"` and `"0F3&1B2"` for each rank.
    #[must_use]
    pub fn to_json(&self) -> String {
        let header = self.header();
        write(&Document {
            format: SCHEDULE_FORMAT.into(),
            name: header.name.as_str().into(),
            num_ranks: self.num_ranks(),
            num_chunks: self.num_chunks(),
            num_microbatches: header.num_microbatches,
            num_slices: header.num_slices,
            num_chains: header.placement.num_chains(),
            placement: header.placement.ranks().into(),
            gating: header.gating.name().into(),
            comm: header.comm.name().into(),
            lowering: self.lowering().map(|lowering| Keyed(LoweringDocument::of(lowering))),
            programs: Programs(self.programs()),
        })
    }

    /// Reads what [`Schedule::to_json`] wrote.
    ///
    /// # Errors
    /// [`PlanError::BadDocument`] if the text is no such document or contradicts itself, and those of
    /// [`Schedule::new`].
    pub fn from_json(text: &str) -> Result<Self> {
        let Keyed(document): Keyed<Document<Vec<Vec<Cow<str>>>>> = read(text, SCHEDULE_FORMAT)?;
        let placement = Placement::new(document.placement.into_owned(), document.num_chains)?;
        let stated = [document.num_ranks, document.num_chunks];
        let placed = [placement.num_ranks(), placement.num_chunks()];
        if stated != placed {
            let reason = format!("it states {stated:?} ranks and chunks per rank, but its placement has {placed:?}");
            return Err(PlanError::BadDocument { reason });
        }
        let header = Header {
            name: document.name.into_owned(),
            num_microbatches: document.num_microbatches,
            num_slices: document.num_slices,
            placement,
            gating: Gating::from_name(&document.gating)?,
            comm: CommModel::from_name(&document.comm)?,
        };
        let programs = document.programs.iter().enumerate().map(|(rank, texts)| program(rank, texts));
        let programs = programs.collect::<Result<_>>()?;
        match document.lowering {
            None => Self::new(header, programs),
            Some(Keyed(lowering)) => Self::new_lowered(header, programs, lowering.into_lowering()?),
        }
    }
}

fn program(rank: usize, texts: &[Cow<str>]) -> Result<Vec<Action>> {
    let mut program = Vec::with_capacity(texts.len());
    for (position, text) in texts.iter().enumerate() {
        parse_composite(text, &mut program).map_err(|(_, reason)| PlanError::BadDocument {
            reason: format!("programs[{rank}][{position}]: {reason}"),
        })?;
    }
    Ok(program)
}

impl<'a> LoweringDocument<'a> {
    fn of(lowering: &'a Lowering) -> Self {
        Self {
            zero_stage: lowering.zero_stage,
            reduce: lowering.reduce.name().into(),
            optimizer: lowering.optimizer.name().into(),
            tied: lowering.tied.as_slice().into(),
            receives_ahead: lowering.most_receives_ahead(),
            max_unsharded: lowering.max_unsharded,
        }
    }

    fn into_lowering(self) -> Result<Lowering> {
        Ok(Lowering {
            zero_stage: self.zero_stage,
            reduce: ReduceTiming::from_name(&self.reduce)?,
            optimizer: OptimizerStep::from_name(&self.optimizer)?,
            tied: self.tied.into_owned(),
            receives_ahead: Some(self.receives_ahead),
            max_unsharded: self.max_unsharded,
        })
    }
}
