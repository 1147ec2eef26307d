//! Plans as JSON documents.
//!
//! A document holds what the plan was made from and what was derived from it. Reading one plans again and compares,
//! so a document that was edited by hand can never become an invalid plan.

use std::borrow::Cow;
use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

use crate::diff::first_difference;
use crate::dtype::Dtype;
use crate::error::{PlanError, Result, shortened};
use crate::layout::{Entry, FlatLayout, Param, Sharding};
use crate::shard_plan::{Group, ShardPlan, Unit};

/// Kind and version of a layout document.
pub(crate) const LAYOUT_FORMAT: &str = "shardcore.shard_layout.v1";
/// Kind and version of a plan document.
pub(crate) const PLAN_FORMAT: &str = "shardcore.shard_plan.v1";

// The order of the fields is the order in which `first_difference` compares: causes before what follows from them.

#[derive(Serialize, Deserialize)]
struct LayoutDocument<'a> {
    format: Cow<'a, str>,
    num_shards: u64,
    alignment: u64,
    #[serde(flatten)]
    group: GroupDocument<'a>,
}

#[derive(Serialize, Deserialize)]
struct GroupDocument<'a> {
    dtype: Dtype,
    trainable: bool,
    entries: Cow<'a, [Entry]>,
    padded_numel: u64,
}

#[derive(Serialize, Deserialize)]
struct UnitDocument<'a> {
    name: Cow<'a, str>,
    groups: Vec<GroupDocument<'a>>,
}

#[derive(Serialize, Deserialize)]
struct PlanDocument<'a> {
    format: Cow<'a, str>,
    num_shards: u64,
    alignment: u64,
    segment_nbytes: Option<NonZeroU64>,
    units: Vec<UnitDocument<'a>>,
    reduce_order: Cow<'a, [usize]>,
}

impl<'a> GroupDocument<'a> {
    fn of(layout: &'a FlatLayout) -> Self {
        Self {
            dtype: layout.dtype(),
            trainable: layout.trainable(),
            entries: layout.entries().into(),
            padded_numel: layout.padded_numel(),
        }
    }

    fn into_params(self) -> impl Iterator<Item = Param> {
        let (dtype, trainable) = (self.dtype, self.trainable);
        let entries = self.entries.into_owned().into_iter();
        entries.map(move |Entry { name, numel, .. }| Param { name, numel, dtype, trainable })
    }
}

impl FlatLayout {
    /// The layout as a compact JSON document: `format`, `num_shards`, `alignment` (bytes), `dtype`, `trainable`,
    /// `entries` (`name`, `numel`, `offset` in elements) and `padded_numel`.
    #[must_use]
    pub fn to_json(&self) -> String {
        write(&LayoutDocument {
            format: LAYOUT_FORMAT.into(),
            num_shards: self.num_shards(),
            alignment: self.sharding().alignment(),
            group: GroupDocument::of(self),
        })
    }

    /// Reads what [`FlatLayout::to_json`] wrote.
    ///
    /// # Errors
    /// [`PlanError::BadDocument`] if the text is no such document or contradicts itself, and those of `new`.
    pub fn from_json(text: &str) -> Result<Self> {
        let document: LayoutDocument = read(text, LAYOUT_FORMAT)?;
        let sharding = Sharding::new(document.num_shards, document.alignment)?;
        let layout = Self::new(document.group.into_params().collect(), sharding)?;
        check_consistent(text, &layout.to_json())?;
        Ok(layout)
    }
}

impl ShardPlan {
    /// The plan as a compact JSON document: `format`, `num_shards`, `alignment` and `segment_nbytes` (bytes), `units`
    /// (`name` and `groups`, each as in [`FlatLayout::to_json`]) and `reduce_order`.
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut units: Vec<UnitDocument> =
            self.units().iter().map(|name| UnitDocument { name: name.into(), groups: Vec::new() }).collect();
        for Group { unit, layout } in self.groups() {
            units[*unit].groups.push(GroupDocument::of(layout));
        }
        write(&PlanDocument {
            format: PLAN_FORMAT.into(),
            num_shards: self.sharding().num_shards(),
            alignment: self.sharding().alignment(),
            segment_nbytes: self.segment_nbytes(),
            units,
            reduce_order: self.reduce_order().into(),
        })
    }

    /// Reads what [`ShardPlan::to_json`] wrote.
    ///
    /// # Errors
    /// [`PlanError::BadDocument`] if the text is no such document or contradicts itself, and those of `new`.
    pub fn from_json(text: &str) -> Result<Self> {
        let document: PlanDocument = read(text, PLAN_FORMAT)?;
        let sharding = Sharding::new(document.num_shards, document.alignment)?;
        let units = document.units.into_iter().map(|unit| Unit {
            name: unit.name.into_owned(),
            params: unit.groups.into_iter().flat_map(GroupDocument::into_params).collect(),
        });
        let plan = Self::new(units.collect(), sharding, document.segment_nbytes)?;
        check_consistent(text, &plan.to_json())?;
        Ok(plan)
    }
}

pub(crate) fn write(document: &impl Serialize) -> String {
    #[expect(clippy::expect_used, reason = "strings, numbers and lists always serialize")]
    serde_json::to_string(document).expect("a plan document is plain data")
}

pub(crate) fn read<'a, D: Deserialize<'a>>(text: &'a str, format: &str) -> Result<D> {
    #[derive(Deserialize)]
    struct Header<'a> {
        format: Cow<'a, str>,
    }
    let header: Header = serde_json::from_str(text).map_err(bad_document)?;
    if header.format != format {
        return Err(PlanError::BadDocument {
            reason: format!("expected format {format:?}, got {:?}", shortened(&header.format)),
        });
    }
    serde_json::from_str(text).map_err(bad_document)
}

/// Compares a document with the one that its own plan writes.
pub(crate) fn check_consistent(document: &str, planned: &str) -> Result<()> {
    let Some(difference) = first_difference(document, planned)? else {
        return Ok(());
    };
    let reason =
        format!("it contradicts itself (first: as written, second: as planned from its parameters): {difference}");
    Err(PlanError::BadDocument { reason })
}

#[expect(clippy::needless_pass_by_value, reason = "the form that map_err takes")]
fn bad_document(error: serde_json::Error) -> PlanError {
    PlanError::BadDocument { reason: error.to_string() }
}
