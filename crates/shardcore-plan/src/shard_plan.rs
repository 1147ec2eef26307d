//! The shard plan of a model: the groups of every wrap unit and the order in which they are reduced.

use std::iter::repeat_n;
use std::num::NonZeroU64;
use std::sync::Arc;

use crate::error::{PlanError, Result};
use crate::layout::{FlatLayout, Param, Sharding};
use crate::{bucket, groups, names};

/// A wrap unit as the caller describes it: parameters that are used together, such as a transformer block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Qualified name of the module; the root module's may be empty.
    pub name: String,
    /// Its parameters, in the order of the module.
    pub params: Vec<Param>,
}

/// One group of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Group {
    /// Position of the unit to which it belongs.
    pub unit: usize,
    /// Its layout, shared with whoever executes the plan.
    pub layout: Arc<FlatLayout>,
}

/// The groups of all units, in the order of the units.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ShardPlan {
    sharding: Sharding,
    segment_nbytes: Option<NonZeroU64>,
    units: Vec<String>,
    groups: Vec<Group>,
    reduce_order: Vec<usize>,
}

impl ShardPlan {
    /// Groups the parameters of each unit as [`groups::split`] does. A unit without parameters has no group.
    ///
    /// # Errors
    /// [`PlanError::DuplicateAcrossUnits`] and those of [`groups::split`].
    pub fn new(units: Vec<Unit>, sharding: Sharding, segment_nbytes: Option<NonZeroU64>) -> Result<Self> {
        check_unique(&units)?;
        let mut unit_names = Vec::with_capacity(units.len());
        let mut all_groups = Vec::with_capacity(units.len());
        for (unit, Unit { name, params }) in units.into_iter().enumerate() {
            unit_names.push(name);
            let layouts = groups::split_unique(params, sharding, segment_nbytes)?;
            all_groups.extend(layouts.into_iter().map(|layout| Group { unit, layout: Arc::new(layout) }));
        }
        let reduce_order = bucket::reduce_order(&all_groups);
        Ok(Self { sharding, segment_nbytes, units: unit_names, groups: all_groups, reduce_order })
    }

    /// Number of shards and their alignment.
    #[must_use]
    pub fn sharding(&self) -> Sharding {
        self.sharding
    }

    /// The limit on a segment in bytes; `None` for no limit.
    #[must_use]
    pub fn segment_nbytes(&self) -> Option<NonZeroU64> {
        self.segment_nbytes
    }

    /// Names of the units, in order.
    #[must_use]
    pub fn units(&self) -> &[String] {
        &self.units
    }

    /// All groups, in the order of their units.
    #[must_use]
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Indices of the trainable groups in the order of reduction.
    #[must_use]
    pub fn reduce_order(&self) -> &[usize] {
        &self.reduce_order
    }
}

fn check_unique(units: &[Unit]) -> Result<()> {
    let owners = units.iter().enumerate().flat_map(|(index, unit)| repeat_n(index, unit.params.len()));
    let owners: Vec<usize> = owners.collect();
    let all: Vec<&str> = units.iter().flat_map(|unit| &unit.params).map(|param| param.name.as_str()).collect();
    let Err((first, second)) = names::sorted_unique(&all) else {
        return Ok(());
    };
    let name = all[first].to_owned();
    if owners[first] == owners[second] {
        let start = owners.partition_point(|&owner| owner < owners[first]);
        return Err(PlanError::DuplicateParameter { name, first: first - start, second: second - start });
    }
    let unit_name = |position: usize| units[owners[position]].name.clone();
    Err(PlanError::DuplicateAcrossUnits { name, first_unit: unit_name(first), second_unit: unit_name(second) })
}
