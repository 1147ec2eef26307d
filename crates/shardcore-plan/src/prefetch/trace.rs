//! What one step uses, in which order and for how long: the input of the planner.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{PlanError, Result};
use crate::names;

/// All uses together gather at most so many bytes, so that no sum of sizes overflows.
const MAX_NBYTES: u64 = i64::MAX as u64;

/// In which half of a step a unit is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Its forward runs.
    Forward,
    /// Its backward runs.
    Backward,
}

impl Phase {
    /// Reads a phase by its name or its first letter, in either case.
    ///
    /// # Errors
    /// [`PlanError::UnknownPhase`].
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "forward" | "F" | "f" => Ok(Self::Forward),
            "backward" | "B" | "b" => Ok(Self::Backward),
            _ => Err(PlanError::UnknownPhase { phase: name.to_owned() }),
        }
    }

    /// `"forward"` or `"backward"`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A duration: finite and not negative, so that plans which hold one can be compared and hashed.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(into = "f64", try_from = "f64")]
pub struct Seconds(f64);

impl Seconds {
    /// One second, or one unit of whatever the caller counts time in.
    pub const ONE: Self = Self(1.0);
    /// No time at all.
    pub const ZERO: Self = Self(0.0);

    /// A duration of `value` seconds.
    ///
    /// # Errors
    /// [`PlanError::BadTime`] for a negative number, an infinity or a NaN.
    pub fn new(value: f64) -> Result<Self> {
        if value.is_finite() && value >= 0.0 {
            return Ok(Self(value + 0.0)); // Adding zero turns -0.0 into 0.0, which has other bits.
        }
        Err(PlanError::BadTime { value: value.to_string() })
    }

    /// The result of arithmetic on durations; what overflows is the longest duration.
    pub(crate) fn saturating(value: f64) -> Self {
        Self(if value.is_nan() { 0.0 } else { value.clamp(0.0, f64::MAX) })
    }

    /// The number of seconds.
    #[must_use]
    pub const fn get(self) -> f64 {
        self.0
    }
}

impl PartialEq for Seconds {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Eq for Seconds {}

impl std::hash::Hash for Seconds {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}

impl From<Seconds> for f64 {
    fn from(seconds: Seconds) -> Self {
        seconds.0
    }
}

impl TryFrom<f64> for Seconds {
    type Error = PlanError;

    fn try_from(value: f64) -> Result<Self> {
        Self::new(value)
    }
}

/// What is gathered as one, such as the parameters of a transformer block.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GatherUnit {
    /// Unique name.
    pub name: String,
    /// Bytes of the whole, gathered unit.
    pub nbytes: u64,
}

/// One use of a unit. It lasts from its place in the trace until `span` places later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Use {
    /// Position of the unit in the list of units.
    pub unit: usize,
    /// Forward or backward.
    pub phase: Phase,
    /// Time of computing from the start of this use to the start of the next.
    pub seconds: Seconds,
    /// Over how many uses it lasts, itself included: 1 where it ends before the next one begins, more where other
    /// units are used inside it.
    pub span: usize,
}

impl Use {
    /// A use that ends before the next one begins and takes one second.
    #[must_use]
    pub const fn new(unit: usize, phase: Phase) -> Self {
        Self { unit, phase, seconds: Seconds::ONE, span: 1 }
    }
}

/// The uses of one step, in order. Valid by construction.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Trace {
    units: Vec<GatherUnit>,
    uses: Vec<Use>,
}

impl Trace {
    /// A trace of `uses` over `units`. Units that are never used are allowed.
    ///
    /// # Errors
    /// [`PlanError::DuplicateUnit`], [`PlanError::BadUse`] for a unit or a span out of range, and
    /// [`PlanError::TraceTooLarge`] if all uses together hold more than 2^63 - 1 bytes.
    pub fn new(units: Vec<GatherUnit>, uses: Vec<Use>) -> Result<Self> {
        check_units(&units)?;
        let mut nbytes = 0_u64;
        for (index, used) in uses.iter().enumerate() {
            let bad = |reason: String| PlanError::BadUse { index, reason };
            let unit = units.get(used.unit).ok_or_else(|| {
                bad(format!("unit {} is out of range: there are {} units (from 0)", used.unit, units.len()))
            })?;
            let left = uses.len() - index;
            if used.span == 0 || used.span > left {
                return Err(bad(format!("its span is {}: expected 1 to {left}, the uses that are left", used.span)));
            }
            nbytes = nbytes
                .checked_add(unit.nbytes)
                .filter(|&sum| sum <= MAX_NBYTES)
                .ok_or_else(|| PlanError::TraceTooLarge { index, name: unit.name.clone(), nbytes: unit.nbytes })?;
        }
        Ok(Self { units, uses })
    }

    /// The units.
    #[must_use]
    pub fn units(&self) -> &[GatherUnit] {
        &self.units
    }

    /// The uses, in order.
    #[must_use]
    pub fn uses(&self) -> &[Use] {
        &self.uses
    }

    /// Bytes of the unit at `unit`.
    pub(crate) fn nbytes(&self, unit: usize) -> u64 {
        self.units[unit].nbytes
    }

    /// The stretches over which units are in use without a break.
    pub(crate) fn holds(&self) -> Vec<Hold> {
        let mut holds: Vec<Hold> = Vec::with_capacity(self.uses.len());
        let mut latest: Vec<Option<usize>> = vec![None; self.units.len()];
        for (index, used) in self.uses.iter().enumerate() {
            let stop = index + used.span;
            let previous = latest[used.unit];
            match previous {
                Some(hold) if holds[hold].stop >= index => {
                    holds[hold].stop = holds[hold].stop.max(stop);
                    holds[hold].last = index;
                }
                _ => {
                    if let Some(hold) = previous {
                        holds[hold].next = Some(holds.len());
                    }
                    latest[used.unit] = Some(holds.len());
                    holds.push(Hold { unit: used.unit, start: index, stop, last: index, next: None });
                }
            }
        }
        holds
    }
}

pub(crate) fn check_units(units: &[GatherUnit]) -> Result<()> {
    let all: Vec<&str> = units.iter().map(|unit| unit.name.as_str()).collect();
    match names::sorted_unique(&all) {
        Ok(_) => Ok(()),
        Err((first, second)) => Err(PlanError::DuplicateUnit { name: units[first].name.clone(), first, second }),
    }
}

/// A unit in use during `start..stop` (positions of uses). Uses that overlap or touch are one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hold {
    pub(crate) unit: usize,
    pub(crate) start: usize,
    pub(crate) stop: usize,
    /// Its use that began last.
    pub(crate) last: usize,
    /// The same unit's next hold.
    pub(crate) next: Option<usize>,
}
