//! Prefetch plans as JSON documents and as digests.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::digest::Encoder;
use crate::error::Result;
use crate::json::{check_consistent, read, write};
use crate::prefetch::plan::{Gather, Limits, Objective, PrefetchPlan};
use crate::prefetch::simulate::Cost;
use crate::prefetch::trace::{GatherUnit, Seconds, Trace, Use};

/// Kind and version of a document.
const FORMAT: &str = "shardcore.prefetch_plan.v1";

// The order of the fields is the order in which `first_difference` compares: causes before what follows from them.
#[derive(Serialize, Deserialize)]
struct Document<'a> {
    format: Cow<'a, str>,
    budget: Option<u64>,
    prefetch_nbytes: Option<u64>,
    max_live_nbytes: Option<u64>,
    max_reuse_nbytes: Option<u64>,
    persistence_nbytes: u64,
    objective: Objective,
    units: Cow<'a, [GatherUnit]>,
    uses: Cow<'a, [Use]>,
    latency: Seconds,
    seconds_per_byte: Seconds,
    gathers: Cow<'a, [Gather]>,
    kept: Cow<'a, [bool]>,
}

impl PrefetchPlan {
    /// The plan as a compact JSON document: its limits (bytes) and `objective`, `units` (`name`, `nbytes`), `uses`
    /// (`unit`, `phase`, `seconds`, `span`), what a gather costs, `gathers` (`unit`, `start`, `need`) and for each use
    /// `kept`.
    #[must_use]
    pub fn to_json(&self) -> String {
        let (limits, cost) = (self.limits(), self.cost());
        write(&Document {
            format: FORMAT.into(),
            budget: limits.budget,
            prefetch_nbytes: limits.prefetch_nbytes,
            max_live_nbytes: limits.max_live_nbytes,
            max_reuse_nbytes: limits.max_reuse_nbytes,
            persistence_nbytes: limits.persistence_nbytes,
            objective: self.objective(),
            units: self.trace().units().into(),
            uses: self.trace().uses().into(),
            latency: cost.latency,
            seconds_per_byte: cost.per_byte,
            gathers: self.gathers().into(),
            kept: self.kept().into(),
        })
    }

    /// Reads what [`PrefetchPlan::to_json`] wrote.
    ///
    /// # Errors
    /// [`PlanError::BadDocument`](crate::PlanError::BadDocument) if the text is no such document or contradicts
    /// itself, and those of `new`.
    pub fn from_json(text: &str) -> Result<Self> {
        let document: Document = read(text, FORMAT)?;
        let limits = Limits {
            budget: document.budget,
            prefetch_nbytes: document.prefetch_nbytes,
            max_live_nbytes: document.max_live_nbytes,
            max_reuse_nbytes: document.max_reuse_nbytes,
            persistence_nbytes: document.persistence_nbytes,
        };
        let cost = Cost { latency: document.latency, per_byte: document.seconds_per_byte };
        let trace = Trace::new(document.units.into_owned(), document.uses.into_owned())?;
        let plan = Self::new(trace, limits, document.objective, Some(cost))?;
        check_consistent(text, &plan.to_json())?;
        Ok(plan)
    }

    /// SHA-256 of the plan as 64 hexadecimal digits. Equal plans have equal digests, on every platform.
    #[must_use]
    pub fn digest(&self) -> String {
        let mut encoder = Encoder::new(FORMAT);
        let limits = self.limits();
        for limit in [limits.budget, limits.prefetch_nbytes, limits.max_live_nbytes, limits.max_reuse_nbytes] {
            encoder.number(limit.is_some().into());
            encoder.number(limit.unwrap_or(0));
        }
        encoder.number(limits.persistence_nbytes);
        encoder.text(self.objective().name());
        encoder.number(self.cost().latency.get().to_bits());
        encoder.number(self.cost().per_byte.get().to_bits());
        encoder.count(self.trace().units().len());
        for unit in self.trace().units() {
            encoder.text(&unit.name);
            encoder.number(unit.nbytes);
        }
        encoder.count(self.trace().uses().len());
        for (used, &kept) in self.trace().uses().iter().zip(self.kept()) {
            encoder.count(used.unit);
            encoder.text(used.phase.name());
            encoder.number(used.seconds.get().to_bits());
            encoder.count(used.span);
            encoder.number(kept.into());
        }
        encoder.count(self.gathers().len());
        for gather in self.gathers() {
            encoder.count(gather.unit);
            encoder.count(gather.start);
            encoder.count(gather.need);
        }
        encoder.finish()
    }
}
