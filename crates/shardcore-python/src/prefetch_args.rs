//! Python arguments as the input of prefetch planning.

use std::collections::BTreeMap;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyMapping;
#[cfg(feature = "stubs")]
use pyo3::{inspect::PyStaticExpr, type_hint_identifier, type_hint_subscript, type_hint_union};
use shardcore_plan::prefetch::{GatherUnit, Limits, Phase, Seconds, Trace, Use};
use shardcore_plan::{PlanError, Result};

use crate::error::CoreError;
use crate::numbers::{Number, Whole};

const ENTRY: &str = "a use is (unit, phase), (unit, phase, seconds) or (unit, phase, seconds, span)";

/// An iterable of `(name, nbytes)`.
pub(crate) struct UnitSizes(Vec<(String, i128)>);

impl UnitSizes {
    /// The units, if all sizes are in range.
    pub(crate) fn checked(self) -> Result<Vec<GatherUnit>> {
        self.0.into_iter().map(|(name, nbytes)| gather_unit(name, nbytes)).collect()
    }
}

impl<'py> FromPyObject<'_, 'py> for UnitSizes {
    type Error = PyErr;

    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_subscript!(
        type_hint_identifier!("collections.abc", "Iterable"),
        type_hint_subscript!(
            type_hint_identifier!("builtins", "tuple"),
            type_hint_identifier!("builtins", "str"),
            type_hint_identifier!("builtins", "int")
        )
    );

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let pairs = object.try_iter()?.map(|item| {
            let item = item?;
            let [name, nbytes]: [Bound<'py, PyAny>; 2] =
                item.extract().map_err(|_| PyTypeError::new_err(format!("a unit is (name, nbytes), got {item:?}")))?;
            Ok((name.extract()?, integer(&nbytes)?))
        });
        pairs.collect::<PyResult<_>>().map(Self)
    }
}

/// Bytes of units: a mapping from names or numbers, or an iterable for units that are numbers.
pub(crate) struct Sizes(Vec<(String, i128)>);

impl<'py> FromPyObject<'_, 'py> for Sizes {
    type Error = PyErr;

    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_union!(
        type_hint_subscript!(
            type_hint_identifier!("collections.abc", "Mapping"),
            type_hint_identifier!("builtins", "str"),
            type_hint_identifier!("builtins", "int")
        ),
        type_hint_subscript!(
            type_hint_identifier!("collections.abc", "Mapping"),
            type_hint_identifier!("builtins", "int"),
            type_hint_identifier!("builtins", "int")
        ),
        type_hint_subscript!(
            type_hint_identifier!("collections.abc", "Iterable"),
            type_hint_identifier!("builtins", "int")
        )
    );

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(mapping) = object.cast::<PyMapping>() {
            let items = mapping.items()?;
            let pairs = items.iter().map(|item| {
                let (unit, nbytes): (Bound<'py, PyAny>, Bound<'py, PyAny>) = item.extract()?;
                Ok((unit_name(&unit)?, integer(&nbytes)?))
            });
            return pairs.collect::<PyResult<_>>().map(Self);
        }
        let numbered = object.try_iter()?.enumerate();
        numbered.map(|(index, nbytes)| Ok((index.to_string(), integer(&nbytes?)?))).collect::<PyResult<_>>().map(Self)
    }
}

/// A use whose unit is not looked up yet.
struct TraceEntry {
    unit: String,
    phase: Phase,
    seconds: Seconds,
    span: usize,
}

/// An iterable of `(unit, phase)`, `(unit, phase, seconds)` or `(unit, phase, seconds, span)`.
pub(crate) struct TraceEntries(Vec<TraceEntry>);

impl TraceEntries {
    /// The trace over the units that have a size.
    pub(crate) fn with_sizes(self, sizes: Sizes) -> Result<Trace> {
        let units: Vec<GatherUnit> =
            sizes.0.into_iter().map(|(name, nbytes)| gather_unit(name, nbytes)).collect::<Result<_>>()?;
        let indices: BTreeMap<&str, usize> =
            units.iter().enumerate().map(|(at, unit)| (unit.name.as_str(), at)).collect();
        let uses = self.0.into_iter().enumerate().map(|(index, entry)| {
            let unit = indices.get(entry.unit.as_str()).ok_or_else(|| PlanError::BadUse {
                index,
                reason: format!("unit {:?} is not among the {} units of sizes", entry.unit, units.len()),
            })?;
            Ok(Use { unit: *unit, phase: entry.phase, seconds: entry.seconds, span: entry.span })
        });
        let uses = uses.collect::<Result<_>>()?;
        Trace::new(units, uses)
    }
}

#[cfg(feature = "stubs")]
const UNIT_TYPE: PyStaticExpr =
    type_hint_union!(type_hint_identifier!("builtins", "str"), type_hint_identifier!("builtins", "int"));

impl<'py> FromPyObject<'_, 'py> for TraceEntries {
    type Error = PyErr;

    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_subscript!(
        type_hint_identifier!("collections.abc", "Iterable"),
        type_hint_union!(
            type_hint_subscript!(
                type_hint_identifier!("builtins", "tuple"),
                UNIT_TYPE,
                type_hint_identifier!("builtins", "str")
            ),
            type_hint_subscript!(
                type_hint_identifier!("builtins", "tuple"),
                UNIT_TYPE,
                type_hint_identifier!("builtins", "str"),
                type_hint_identifier!("builtins", "float")
            ),
            type_hint_subscript!(
                type_hint_identifier!("builtins", "tuple"),
                UNIT_TYPE,
                type_hint_identifier!("builtins", "str"),
                type_hint_identifier!("builtins", "float"),
                type_hint_identifier!("builtins", "int")
            )
        )
    );

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let entries = object.try_iter()?.enumerate().map(|(index, item)| entry(index, &item?));
        entries.collect::<PyResult<_>>().map(Self)
    }
}

fn entry(index: usize, object: &Bound<'_, PyAny>) -> PyResult<TraceEntry> {
    let wrong = || PyTypeError::new_err(format!("{ENTRY}, got {object:?} at {index}"));
    if object.extract::<&str>().is_ok() {
        return Err(wrong()); // A text is a sequence of texts.
    }
    let fields: Vec<Bound<'_, PyAny>> = object.extract().map_err(|_| wrong())?;
    let (unit, phase, seconds, span) = match fields.as_slice() {
        [unit, phase] => (unit, phase, None, None),
        [unit, phase, seconds] => (unit, phase, Some(seconds), None),
        [unit, phase, seconds, span] => (unit, phase, Some(seconds), Some(span)),
        _ => return Err(wrong()),
    };
    let bad = |error: PlanError| CoreError::from(PlanError::BadUse { index, reason: error.to_string() });
    let Number(seconds) = seconds.map_or(Ok(Number(1.0)), PyAnyMethods::extract)?;
    let span = span.map_or(Ok(1), integer)?;
    Ok(TraceEntry {
        unit: unit_name(unit)?,
        phase: Phase::parse(phase.extract()?).map_err(bad)?,
        seconds: Seconds::new(seconds).map_err(bad)?,
        span: usize::try_from(span).unwrap_or(0), // Out of range, as 0 is: the trace says so.
    })
}

/// The name of a unit; a number is its decimal digits.
fn unit_name(object: &Bound<'_, PyAny>) -> PyResult<String> {
    match object.extract::<String>() {
        Ok(name) => Ok(name),
        Err(_) => object
            .extract::<usize>()
            .map(|number| number.to_string())
            .map_err(|_| PyTypeError::new_err(format!("a unit is a name or a number from 0, got {object:?}"))),
    }
}

fn integer(object: &Bound<'_, PyAny>) -> PyResult<i128> {
    object.extract::<Whole>().map(|value| value.0)
}

fn gather_unit(name: String, nbytes: i128) -> Result<GatherUnit> {
    match u64::try_from(nbytes) {
        Ok(nbytes) if i64::try_from(nbytes).is_ok() => Ok(GatherUnit { name, nbytes }),
        _ => Err(PlanError::BadUnitSize { name, nbytes }),
    }
}

/// Checks the limits of a plan; all are bytes.
pub(crate) fn limits(
    budget: Option<Whole>,
    prefetch: Option<Whole>,
    max_live: Option<Whole>,
    max_reuse: Option<Whole>,
    persistence: Whole,
) -> Result<Limits> {
    let limit = |what, value: Whole| value.fit_or(|value| PlanError::limit(what, value));
    let optional = |what, value: Option<Whole>| value.map(|value| limit(what, value)).transpose();
    Ok(Limits {
        budget: optional("budget", budget)?,
        prefetch_nbytes: optional("prefetch_nbytes", prefetch)?,
        max_live_nbytes: optional("max_live_nbytes", max_live)?,
        max_reuse_nbytes: optional("max_reuse_nbytes", max_reuse)?,
        persistence_nbytes: limit("persistence_nbytes", persistence)?,
    })
}
